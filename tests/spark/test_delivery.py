"""A sink at work on an embedded broker, given batches and numbers as Spark would give them."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from asyncproducer import (
    BatchDeliveryError,
    ConfigError,
    KafkaError,
    OffsetRange,
    Producer,
    ProducerFenced,
    TopicPartition,
    producer,
)
from asyncproducer.spark import delivery
from asyncproducer.spark.columns import SinkColumns
from asyncproducer.spark.delivery import Sink, Task
from asyncproducer.spark.markers import Marker, SinkStopped
from asyncproducer.spark.options import SinkOptions
from asyncproducer.spark.reports import TaskReport
from asyncproducer.spark.worker import Feed, worker
from asyncproducer.testing import TransactionState

from .conftest import Broker

_FEED_BYTES = "asyncproducer.spark.worker.FEED_BYTES"

READ = SinkColumns(
    "value", source_topic="__topic", source_partition="__partition", offset="__offset"
)
PACKED = SinkColumns("value", origin="__origin", topics=("out", "in", "far"))
#: Rows that were read tell where in either way.
either_way = pytest.mark.parametrize("columns", [READ, PACKED], ids=["columns", "origin"])


@pytest.fixture(autouse=True)
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second batch of a task is made after: the fencing of all earlier attempts."""
    monkeypatch.setattr(_FEED_BYTES, 1)


def plain(broker: Broker, **options: str) -> Sink:
    given = {"bootstrap.servers": broker.servers, "topic": "out", **options}
    return Sink(SinkOptions.of(given, streaming=True), SinkColumns("value"))


def grouped(broker: Broker, tasks: int = 2, *, streaming: bool = True, **options: Any) -> Sink:
    given = {
        "bootstrap.servers": broker.servers,
        "topic": "out",
        "delivery": "exactly_once",
        "sink.id": "s",
        "tasks": str(tasks),
        **{name.replace("_", "."): str(value) for name, value in options.items()},
    }
    columns = SinkColumns("value", partition="partition")
    return Sink(SinkOptions.of(given, streaming=streaming), columns)


def keyed(broker: Broker, partitions: int, **options: Any) -> Sink:
    """Of what by_kafka_partition has routed; `partitions` is 0 if somebody else has."""
    columns = SinkColumns("value", "key", partition="partition", partitions=partitions)
    return replace(grouped(broker, **options), columns=columns)


def sourced(
    broker: Broker, *, streaming: bool = True, columns: SinkColumns = READ, **options: Any
) -> Sink:
    given = {
        "bootstrap.servers": broker.servers,
        "topic": "out",
        "delivery": "exactly_once",
        "sink.id": "s",
        "marker": "source",
        **{name.replace("_", "."): str(value) for name, value in options.items()},
    }
    return Sink(SinkOptions.of(given, streaming=streaming), columns)


def rows(*values: bytes, **columns: list[Any]) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary()), **columns})


def placed(partition: int, *values: bytes) -> pa.RecordBatch:
    return rows(*values, partition=pa.array([partition] * len(values), pa.int32()))


def with_keys(partition: int, *pairs: tuple[bytes | None, bytes]) -> pa.RecordBatch:
    keys = pa.array([key for key, _ in pairs], pa.binary())
    partitions = pa.array([partition] * len(pairs), pa.int32())
    return rows(*(value for _, value in pairs), key=keys, partition=partitions)


def read(offsets: Sequence[int], partition: int = 0, topic: str = "in") -> pa.RecordBatch:
    """Rows whose values are their offsets."""
    return rows(
        *(b"%d-%03d" % (partition, offset) for offset in offsets),
        __topic=pa.array([topic] * len(offsets), pa.string()),
        __partition=pa.array([partition] * len(offsets), pa.int32()),
        __offset=pa.array(offsets, pa.int64()),
        __origin=packed(offsets, partition, topic),
    )


def packed(offsets: Sequence[int], partition: int, topic: str) -> pa.Array:
    """As `origin` has it."""
    place = partition * len(PACKED.topics) + PACKED.topics.index(topic)
    return pa.array([(place << 48) + offset for offset in offsets], pa.int64())


def expected(*ranges: tuple[int, range]) -> list[bytes]:
    return sorted(b"%d-%03d" % (p, offset) for p, offsets in ranges for offset in offsets)


def open_transactions(broker: Broker) -> list[str]:
    """Their ids."""

    def look(cluster: Any) -> list[str]:
        return [
            name
            for name in ("s/g0", "s/g1", "s/in/0")
            if name in cluster._transactions.ids
            and cluster.transaction(name).state is TransactionState.ONGOING
        ]

    return broker.do(look)


# -- at least once -----------------------------------------------------------------------------


def test_a_task_tells_what_it_has_written(broker: Broker) -> None:
    sink = plain(broker)
    report = sink.write([rows(b"a", b"b"), rows(), rows(b"c")], Task(1))
    assert (report.task, report.rows, report.skipped, report.bytes) == (1, 3, 0, 3)
    assert sum(found.records for found in report.offsets.values()) == 3
    assert broker.values() == [b"a", b"b", b"c"]


def test_no_batch_lingers_when_there_are_no_further_rows(broker: Broker) -> None:
    """It would for ten minutes, which is longer than a test may take."""
    patient: dict[str, Any] = {"linger.ms": "600000", "delivery.timeout.ms": "700000"}
    assert plain(broker, **patient).write([rows(b"a"), rows(b"b")], Task(0)).rows == 2
    once = grouped(broker, **patient)
    assert once.write([placed(0, b"c"), placed(2, b"d")], Task(0, 0, "q")).rows == 2
    assert broker.values() == [b"a", b"b", b"c", b"d"]


def test_tasks_of_a_process_share_a_producer(broker: Broker) -> None:
    for task in range(3):
        plain(broker).write([rows(b"x")], Task(task))
    assert broker.do(lambda c: {r.client_id for r in c.requests}).__len__() == 1
    assert broker.do(lambda c: sum(r.api == "init_producer_id" for r in c.requests)) == 1


def test_rows_that_are_refused_fail_the_task_and_the_next_begins_anew(broker: Broker) -> None:
    sink = plain(broker, **{"delivery.timeout.ms": "1000", "request.timeout.ms": "900"})
    broker.do(lambda c: c.inject("produce", error="TOPIC_AUTHORIZATION_FAILED"))
    with pytest.raises(BatchDeliveryError, match="1 of 1 rows"):
        sink.write([rows(b"lost")], Task(0))
    assert sink.write([rows(b"kept")], Task(0)).rows == 1
    assert broker.values() == [b"kept"]


def test_what_spark_raises_ends_the_sending(broker: Broker) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(b"a")
        raise OSError("the executor is gone")

    with pytest.raises(OSError, match="gone"):
        plain(broker).write(batches(), Task(0))


def test_rows_wait_for_room_by_bytes() -> None:
    here = worker()
    feed = Feed(here.loop, limit=100)
    small, big = rows(b"x"), rows(b"x" * 100)
    assert feed.put(small)
    putting = threading.Thread(target=feed.put, args=(big,))
    putting.start()
    putting.join(0.01)
    assert putting.is_alive()

    async def taken() -> list[Any]:
        return [each async for each in feed]

    taking = here.submit(taken())
    putting.join()  # taking it has made room
    feed.end()
    assert taking.result() == [small, big]
    feed.leave()
    assert not feed.put(big)


def test_a_commit_is_reported(broker: Broker, tmp_path: Path) -> None:
    sink = plain(broker, **{"report.file": str(tmp_path / "report")})
    tasks = [sink.write([rows(b"abc")], Task(n)) for n in range(2)]
    report = sink.commit(tasks, 7)
    assert report.rows == 2
    written = json.loads((tmp_path / "report").read_text())
    assert (written["batch"], written["tasks"], written["bytes"]) == (7, 2, 6)
    assert sum(found[2] for found in written["offsets"].values()) == 2


def test_the_report_of_a_job_has_the_number_that_its_markers_have(broker: Broker) -> None:
    """None where there are no markers."""
    assert plain(broker).commit([]).batch is None
    sink = grouped(broker, streaming=False, job_id=41)
    assert sink.commit([sink.write([], Task(n)) for n in range(2)]).batch == 41


# -- groups ------------------------------------------------------------------------------------


def test_a_group_is_written_once_however_often_its_task_runs(broker: Broker) -> None:
    sink = grouped(broker)
    batch = [placed(0, b"a"), placed(2, b"b")]
    first = sink.write(batch, Task(0, 0, "q"))
    assert (first.rows, first.skipped, first.bytes) == (2, 0, 2)
    assert first.offsets[TopicPartition("out", 0)] == OffsetRange(0, 0, 1)
    again = sink.write(batch, Task(0, 0, "q"))
    assert (again.rows, again.skipped) == (0, 2)
    assert sink.write([placed(0, b"c")], Task(0, 1, "q")).rows == 1
    assert broker.values() == [b"a", b"b", b"c"]


def test_the_marker_is_read_after_all_earlier_attempts_are_fenced(broker: Broker) -> None:
    """Before it, an attempt that is not fenced yet could still commit what is read as missing."""
    sinks = ((grouped(broker), placed(0, b"a")), (sourced(broker), read(range(3))))
    before = 0
    for number, (sink, batch) in enumerate(sinks):
        sink.write([batch], Task(0, 0, "q"))
        fenced, looked = broker.do(
            lambda cluster: [
                [request.received_at for request in cluster.received(api)]
                for api in ("init_producer_id", "offset_fetch")
            ]
        )
        assert len(fenced) == number + 1
        assert len(looked) == before + 2  # the unit's, and the driver's as there is none
        assert fenced[number] < min(looked[before:])
        before = len(looked)


def test_rows_that_end_with_an_error_are_not_compared_with_what_another_attempt_wrote(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink, task = grouped(broker), Task(0, 0, "q")

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        assert sink.write([placed(0, b"a"), placed(0, b"b")], task).rows == 2
        raise OSError("the shuffle's blocks are gone")

    with pytest.raises(OSError, match="blocks are gone"):
        sink.write(batches(), task)
    assert broker.values() == [b"a", b"b"]


def test_a_group_without_rows_has_its_marker(broker: Broker) -> None:
    sink = grouped(broker)
    for batch in range(3):
        assert sink.write([], Task(1, batch, "q")).rows == 0
    assert sink.write([placed(1, b"a")], Task(1, 3, "q")).rows == 1


def test_a_batch_that_is_left_out_stops(broker: Broker) -> None:
    sink = grouped(broker)
    sink.write([placed(0, b"a")], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match="adopt=2"):
        sink.write([placed(0, b"b")], Task(0, 2, "q"))
    assert grouped(broker, adopt=2).write([placed(0, b"b")], Task(0, 2, "q")).rows == 1


def test_tasks_of_a_process_use_one_connection_and_fence_all_the_same(broker: Broker) -> None:
    """Whatever unit they are for: each asks for the producer id anew."""
    sink = grouped(broker)

    def asked(api: str) -> int:
        return broker.do(lambda cluster: len(cluster.received(api)))

    for batch in range(3):
        for group in range(2):
            assert sink.write([placed(group, b"a")], Task(group, batch, "q")).rows == 1
            assert asked("init_producer_id") == 2 * batch + group + 1
    # A transaction's and a group's coordinator, of each unit; and what the driver keeps.
    assert asked("find_coordinator") == 5
    found = broker.do(lambda cluster: len(cluster.received("api_versions")))
    assert found == 2  # one to ask which brokers there are, one to that broker
    assert len(broker.values()) == 6


def test_rows_of_another_group_stop_and_nothing_counts(broker: Broker) -> None:
    with pytest.raises(SinkStopped, match="row for partition 1 is in task 0 of 2"):
        grouped(broker).write([placed(0, b"a"), placed(1, b"b")], Task(0, 0, "q"))
    assert broker.values() == []
    assert open_transactions(broker) == []
    with pytest.raises(SinkStopped, match="more than tasks=2"):
        grouped(broker).write([placed(2, b"a")], Task(2, 0, "q"))


def test_a_wild_partition_costs_no_memory_and_is_refused(broker: Broker) -> None:
    sink = grouped(broker, 1, max_block_ms=500)
    tracemalloc.start()
    try:
        with pytest.raises(BatchDeliveryError, match="2147483647"):
            sink.write([placed(2**31 - 1, b"a")], Task(0, 0, "q"))
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert broker.values() == []


def test_a_replay_that_is_routed_otherwise_stops(broker: Broker) -> None:
    sink = grouped(broker)
    sink.write([placed(0, b"a", b"b")], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match="routed by what differs"):
        sink.write([placed(0, b"a"), placed(2, b"b")], Task(0, 0, "q"))
    assert sink.write([placed(0, b"b"), placed(0, b"a")], Task(0, 0, "q")).skipped == 2


def test_a_replay_with_as_many_other_rows_in_each_partition_stops(broker: Broker) -> None:
    """One task is done and the other is not; in the replay two rows have changed places."""
    sink = grouped(broker)
    sink.write([placed(0, b"a", b"b")], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"replay brings other keys or values.*trust=0"):
        sink.write([placed(0, b"a", b"c")], Task(0, 0, "q"))
    assert grouped(broker, trust=0).write([placed(0, b"a", b"c")], Task(0, 0, "q")).skipped == 2
    with pytest.raises(SinkStopped, match="batch 0 was written with 2 rows"):
        grouped(broker, trust=1).write([placed(0, b"a", b"c")], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match="brings 3 rows: it would lose some"):
        grouped(broker, trust=0).write([placed(0, b"a", b"b", b"c")], Task(0, 0, "q"))
    assert broker.values() == [b"a", b"b"]


def test_rows_that_are_routed_by_their_key_are_known_by_it(broker: Broker) -> None:
    sink, task = keyed(broker, 4), Task(0, 0, "q")
    sink.write([with_keys(0, (b"k", b"at 12:00"), (None, b"v"))], task)
    assert sink.write([with_keys(0, (None, b"v"), (b"k", b"at 12:01"))], task).skipped == 2
    for pairs in (
        [(b"K", b"at 12:00"), (None, b"v")],
        [(b"k", b"at 12:00"), (None, b"V")],
        [(b"k", b"at 12:00"), (b"", b"v")],
    ):
        with pytest.raises(SinkStopped, match="replay brings other keys, or other partitions"):
            sink.write([with_keys(0, *pairs)], task)


def test_rows_that_somebody_else_has_routed_are_known_by_key_and_value(broker: Broker) -> None:
    """A key may be in several partitions: its rows may change places."""
    sink, task = keyed(broker, 0), Task(0, 0, "q")
    sink.write([with_keys(0, (b"k", b"1"))], task)
    assert sink.write([with_keys(0, (b"k", b"1"))], task).skipped == 1
    for pair in ((b"k", b"2"), (None, b"1"), (b"1", b"k")):
        with pytest.raises(SinkStopped, match="replay brings other keys or values"):
            sink.write([with_keys(0, pair)], task)


def test_partitions_that_were_added_stop_a_replay_before_anything_is_written(
    broker: Broker,
) -> None:
    keyed(broker, 4).prepare()
    keyed(broker, 4).write([with_keys(0, (b"k", b"1"))], Task(0, 0, "q"))
    # The other group has no marker yet, the driver knows it all the same: also a new one.
    for _ in range(2):
        with pytest.raises(SinkStopped, match=r"sink\.id s: the rows went to one of 4 partitions"):
            keyed(broker, 6).prepare()
    with pytest.raises(SinkStopped, match=r"now to one of 6.*partitions=4\)"):
        keyed(broker, 6).write([with_keys(0, (b"k", b"1"))], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"now to the partition in their column"):
        keyed(broker, 0).prepare()
    with pytest.raises(SinkStopped, match="in 3 tasks now, and were in 2"):
        keyed(broker, 4, tasks=3, adopt=1).prepare()
    keyed(broker, 4).prepare()
    # When the batch is through, somebody says so.
    sink = keyed(broker, 6, adopt=1)
    sink.prepare()
    with pytest.raises(SinkStopped, match="in a replay some would be lost"):
        sink.write([with_keys(0, (b"k", b"1"))], Task(0, 0, "q"))
    assert sink.write([with_keys(0, (b"k", b"2"))], Task(0, 1, "q")).rows == 1
    later = keyed(broker, 6)
    later.prepare()
    assert later.write([with_keys(0, (b"k", b"3"))], Task(0, 2, "q")).rows == 1
    assert broker.values() == [b"1", b"2", b"3"]


def test_partitions_are_adopted_once_for_a_batch(broker: Broker) -> None:
    """The option may stay where it is: a replay of that very batch finds some groups written."""
    first = keyed(broker, 4, adopt=5)
    first.prepare()
    first.write([with_keys(0, (b"k", b"1"))], Task(0, 5, "q"))
    with pytest.raises(SinkStopped, match="one of 4 partitions in batch 5, and now to one of 6"):
        keyed(broker, 6, adopt=5).prepare()
    again = first.write([with_keys(0, (b"k", b"1"))], Task(0, 5, "q"))
    first.commit([again, first.write([], Task(1, 5, "q"))], 5, "q")
    for batch in (4, 5):
        with pytest.raises(SinkStopped, match="one of 4 partitions in batch 5, and now to one of"):
            keyed(broker, 6, adopt=batch).prepare()
    keyed(broker, 6, adopt=6).prepare()


def test_a_group_without_a_marker_asks_what_the_driver_knows(broker: Broker) -> None:
    """A batch is half written, and the query is told to go on with a later one."""
    keyed(broker, 4).prepare()
    keyed(broker, 4).write([with_keys(0, (b"k", b"1"))], Task(0, 0, "q"))
    later = keyed(broker, 6, adopt=1)
    later.prepare()
    with pytest.raises(SinkStopped, match="this is batch 0, and batch 1 is the first one"):
        later.write([with_keys(1, (b"l", b"2"))], Task(1, 0, "q"))
    # Nor does a task that comes too late write where others have gone on.
    with pytest.raises(SinkStopped, match="one of 6 partitions in batch 1, and now to one of 4"):
        keyed(broker, 4).write([with_keys(1, (b"l", b"2"))], Task(1, 0, "q"))
    assert broker.values() == [b"1"]


def test_a_batch_that_cannot_come_yet_is_not_adopted(broker: Broker) -> None:
    """It would be kept, and stand in the way of the batch that comes."""
    keyed(broker, 4).prepare()
    keyed(broker, 4).write([with_keys(0, (b"k", b"1"))], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"adopt=5: the last .* is 0.*Give adopt=1"):
        keyed(broker, 6, adopt=5).prepare()
    keyed(broker, 4).prepare()
    keyed(broker, 6, adopt=1).prepare()


def test_a_batch_that_is_half_written_is_not_adopted(broker: Broker) -> None:
    """And what the driver keeps stays, so that the way back is open."""
    sink = keyed(broker, 4)
    sink.prepare()
    for batch in range(2):
        sink.write([with_keys(0, (b"k", b"%d" % batch))], Task(0, batch, "q"))
    with pytest.raises(SinkStopped, match=r"group 0 of 2.*batch 1, .*partitions=4\)"):
        keyed(broker, 6, adopt=1).prepare()
    keyed(broker, 4).prepare()


def test_a_sink_does_not_change_its_kind_of_marker(broker: Broker) -> None:
    """Neither knows what the other has written."""
    sink = sourced(broker)
    sink.commit([sink.write([read(range(3), 0)], Task(0, 0, "q"))], 0, "q")
    with pytest.raises(SinkStopped, match=r"belongs to marker=source \(since batch 0"):
        grouped(broker).prepare()
    other = grouped(broker, sink_id="other")
    other.prepare()
    other.commit([other.write([], Task(n, 0, "q")) for n in range(2)], 0, "q")
    with pytest.raises(SinkStopped, match="nothing is known of earlier ones"):
        sourced(broker, sink_id="other").write([read(range(3))], Task(0, 1, "q"))
    with pytest.raises(SinkStopped, match=r"belongs to marker=group \(since batch 0"):
        sourced(broker, sink_id="other").prepare()


def test_nor_does_a_job_also_where_nothing_was_committed(broker: Broker) -> None:
    """The first job has written a part, and is run again with the other kind."""
    sink = sourced(broker, streaming=False, job_id=5)
    sink.prepare()
    sink.write([read(range(3), 0)], Task(0))
    with pytest.raises(SinkStopped, match=r"belongs to marker=source \(since batch 5"):
        grouped(broker, streaming=False, job_id=5).prepare()
    other = grouped(broker, streaming=False, job_id=5, sink_id="other")
    other.prepare()
    other.write([placed(0, b"a")], Task(0))
    with pytest.raises(SinkStopped, match=r"belongs to marker=group \(since batch 5"):
        sourced(broker, streaming=False, job_id=5, sink_id="other").prepare()
    # Each goes on as it was.
    sink.prepare()
    assert sink.write([read(range(5), 0)], Task(0)).rows == 2
    assert broker.values() == sorted([b"a", *expected((0, range(5)))])


def test_a_stream_of_sources_that_was_made_ready_begins(broker: Broker) -> None:
    sink = sourced(broker)
    sink.prepare()
    assert sink.write([read(range(3), 0)], Task(0, 0, "q")).rows == 3
    assert sink.write([read(range(3), 1)], Task(1, 0, "q")).rows == 3


@pytest.mark.parametrize("make", [grouped, sourced])
def test_the_markers_topic_is_not_created(broker: Broker, make: Callable[..., Sink]) -> None:
    """A wrong name would be a place without markers. The topic itself may be new."""
    with pytest.raises(ConfigError, match=r"marker\.topic='none': there is no such topic"):
        make(broker, marker_topic="none", max_block_ms=300).prepare()
    assert "none" not in broker.do(lambda cluster: cluster._state.topics)
    make(broker, topic="new").prepare()


def test_what_the_driver_keeps_of_jobs_does_not_expire_before_the_markers(broker: Broker) -> None:
    for make in (grouped, sourced):
        for job in (1, 2):
            delivery._prepared.clear()
            make(broker, streaming=False, job_id=job, sink_id=make.__name__).prepare()
    commits = broker.do(lambda cluster: cluster.received("txn_offset_commit"))
    assert [each.body.group_id for each in commits] == [
        *("grouped/driver", "grouped/driver", "sourced/driver", "sourced/driver")
    ]


def test_what_was_agreed_on_is_written_once_a_process_and_again_with_the_progress(
    broker: Broker,
) -> None:
    def marker() -> Marker:
        found = broker.do(lambda c: c.committed_offsets("s/driver"))
        return Marker.unpacked(found["out", 0])  # type: ignore[arg-type]  # the same fields

    sink = keyed(broker, 4)
    for _ in range(3):
        sink.prepare()
    assert len(broker.do(lambda c: c.received("init_producer_id"))) == 1
    assert marker() == Marker(0, tasks=2, partitions=4)
    sink.commit([sink.write([], Task(n, 0, "q")) for n in range(2)], 0, "q")
    assert marker() == Marker(0, "q", tasks=2, partitions=4)


def test_a_report_that_cannot_be_written_is_said_before_rows_are(
    broker: Broker, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"report\.file='.*/no/report' cannot be written on the"):
        plain(broker, **{"report.file": str(tmp_path / "no" / "report")}).prepare()
    plain(broker, **{"report.file": str(tmp_path / "report")}).prepare()
    assert (tmp_path / "report").read_text() == ""


def test_a_task_that_dies_has_written_nothing(broker: Broker) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        raise OSError("killed")

    sink = grouped(broker)
    with pytest.raises(OSError, match="killed"):
        sink.write(batches(), Task(0, 0, "q"))
    assert open_transactions(broker) == []
    assert sink.write([placed(0, b"b")], Task(0, 0, "q")).rows == 1
    assert broker.values() == [b"b"]


def test_rows_are_made_while_the_producer_begins(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_FEED_BYTES, 10_000)
    sink = grouped(broker)
    begun: list[int] = []

    def asked() -> int:
        return broker.do(lambda cluster: len(cluster.received("init_producer_id")))

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(100):
            begun.append(asked())
            yield placed(0, b"%02d" % number)
        broker.do(lambda cluster: cluster.resume(1))

    broker.do(lambda cluster: cluster.pause(1))
    assert sink.write(batches(), Task(0, 0, "q")).rows == 100
    assert begun == [0] * 100
    assert broker.values() == [b"%02d" % number for number in range(100)]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_rows_that_cannot_be_made_while_the_producer_begins(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(_FEED_BYTES, 10_000)

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(after):
            yield placed(0, b"a")
        raise OSError("killed")

    sink = grouped(broker)
    with pytest.raises(OSError, match="killed"):
        sink.write(batches(), Task(0, 0, "q"))
    assert sink.write([placed(0, b"b")], Task(0, 0, "q")).rows == 1
    assert open_transactions(broker) == []
    assert broker.values() == [b"b"]


def test_a_producer_that_has_begun_before_the_rows_fail_is_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_FEED_BYTES, 10_000)
    here = worker()
    transactional = here.transactional
    begun: list[Producer[Any, Any]] = []
    is_begun = threading.Event()

    async def known(options: SinkOptions, name: str) -> Producer[Any, Any]:
        begun.append(await transactional(options, name))
        here.loop.call_soon(is_begun.set)
        return begun[-1]

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        assert is_begun.wait(60)
        raise OSError("killed")

    monkeypatch.setattr(here, "transactional", known)
    with pytest.raises(OSError, match="killed"):
        grouped(broker).write(batches(), Task(0, 0, "q"))
    (own,) = begun
    assert own.health.state == "closed"


def test_rows_that_cannot_be_made_fence_nobody(broker: Broker) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        raise OSError("killed")
        yield

    with pytest.raises(OSError, match="killed"):
        grouped(broker).write(batches(), Task(0, 0, "q"))
    assert broker.do(lambda cluster: cluster.received("init_producer_id")) == []


@pytest.mark.parametrize("make", [plain, grouped])
def test_what_spark_raises_does_not_wait_for_brokers(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sink]
) -> None:
    """Else their error would come first, and hide it."""
    monkeypatch.setattr(_FEED_BYTES, 10_000)

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        raise OSError("killed")

    broker.do(lambda cluster: cluster.pause(1))
    try:
        with pytest.raises(OSError, match="killed"):
            make(broker).write(batches(), Task(0, 0, "q"))
    finally:
        broker.do(lambda cluster: cluster.resume(1))


def test_who_is_interrupted_leaves_no_transaction_open(broker: Broker) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        yield placed(0, b"b")
        while not open_transactions(broker):
            pass
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grouped(broker, linger_ms=0).write(batches(), Task(0, 0, "q"))
    assert open_transactions(broker) == []
    assert broker.values() == []


def test_fenced_before_anything_is_sent_all_rows_are_compared(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were made while the producer began."""
    monkeypatch.setattr(_FEED_BYTES, 10_000)
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink, task = grouped(broker), Task(0, 0, "q")
    assert sink.write([placed(0, b"a", b"b", b"c")], task).rows == 3

    made = asyncio.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        for value in (b"a", b"b", b"c"):
            yield placed(0, value)
        worker().loop.call_soon_threadsafe(made.set)

    async def fenced(options: SinkOptions, name: str) -> None:
        await made.wait()
        raise ProducerFenced("another one has begun")

    monkeypatch.setattr(worker(), "transactional", fenced)
    report = sink.write(batches(), task)
    assert (report.rows, report.skipped) == (0, 3)


@pytest.mark.parametrize("told", [True, False])
def test_a_later_attempt_takes_over_and_the_earlier_one_sees_that_it_is_done(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """In one process two tasks run one after the other; here the second runs within the first.

    Where the first one is not `told`, the coordinator does not say that it is fenced: only Produce
    tells, of an old epoch.
    """
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    monkeypatch.setattr(delivery, "_ABORT_S", 0.3)
    sink, task = grouped(broker), Task(0, 0, "q")

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        assert sink.write([placed(0, b"a"), placed(2, b"b")], task).rows == 2
        if not told:
            monkeypatch.setattr(Producer, "send_offsets", never)
            broker.do(lambda cluster: cluster.inject("end_txn", no_answer=True))
        yield placed(2, b"b")

    report = sink.write(batches(), task)
    assert (report.rows, report.skipped) == (0, 2)
    assert broker.values() == [b"a", b"b"]


def test_an_old_epoch_without_another_attempt_fails_the_task(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction took too long, say."""
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    monkeypatch.setattr(delivery, "_ABORT_S", 0.1)
    broker.do(lambda cluster: cluster.inject("produce", error="INVALID_PRODUCER_EPOCH"))
    sink, task = grouped(broker), Task(0, 0, "q")
    with pytest.raises(BatchDeliveryError, match="INVALID_PRODUCER_EPOCH"):
        sink.write([placed(0, b"a")], task)
    assert sink.write([placed(0, b"a")], task).rows == 1
    assert broker.values() == [b"a"]


def test_a_later_attempt_that_is_routed_otherwise_stops_the_earlier_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink, task = grouped(broker), Task(0, 0, "q")

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        assert sink.write([placed(0, b"a", b"b")], task).rows == 2
        yield placed(2, b"b")

    with pytest.raises(SinkStopped, match="routed by what differs"):
        sink.write(batches(), task)


def test_fenced_by_an_attempt_that_does_not_end_the_task_fails(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink = grouped(broker, transaction_timeout_ms=1000)
    here = worker()

    async def fence() -> None:
        config = sink.options.config(transactional_id="s/g0")
        async with Producer(config=config):
            pass

    def batches() -> Iterator[pa.RecordBatch]:
        yield placed(0, b"a")
        here.run(fence())

    with pytest.raises(ProducerFenced):
        sink.write(batches(), Task(0, 0, "q"))
    assert broker.values() == []


def test_a_commit_of_which_nobody_heard_is_seen_by_the_next_attempt(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EndTxn is done, and its answer is lost as often as it is asked for."""
    monkeypatch.setattr(delivery, "_ABORT_S", 0.1)
    sink = grouped(broker, transaction_timeout_ms=1000, max_block_ms=700)
    fault = broker.do(lambda c: c.inject("end_txn", no_answer=True, after_append=True, times=None))
    with pytest.raises(Exception, match="commit_transaction"):
        sink.write([placed(0, b"a")], Task(0, 0, "q"))
    broker.do(lambda _: fault.remove())
    assert sink.write([placed(0, b"a")], Task(0, 0, "q")).skipped == 1
    assert broker.values() == [b"a"]


def test_every_group_is_asked_for_at_the_end(broker: Broker) -> None:
    sink = grouped(broker)
    done = [sink.write([placed(n, b"x")], Task(n, 0, "q")) for n in range(2)]
    assert sink.commit(done, 0, "q").rows == 2
    done = [sink.write([placed(0, b"x")], Task(0, 1, "q"))]
    with pytest.raises(SinkStopped, match="1 of 2 groups had no task"):
        sink.commit(done, 1, "q")


def test_without_rows_spark_makes_one_task_and_the_driver_the_others(broker: Broker) -> None:
    sink = grouped(broker)
    sink.commit([sink.write([], Task(0, 0, "q"))], 0, "q")
    for group in range(2):
        assert sink.write([placed(group, b"x")], Task(group, 1, "q")).rows == 1


def test_abort_ends_what_is_open_and_nothing_else(broker: Broker) -> None:
    sink = grouped(broker)
    sink.write([placed(0, b"a")], Task(0, 0, "q"))
    here = worker()

    async def hang() -> Producer[Any, Any]:
        config = sink.options.config(transactional_id="s/g1")
        producer: Producer[Any, Any] = Producer(config=config)
        await producer.start()
        await producer.begin_transaction()
        await producer.send("out", b"hangs", partition=1)
        return producer

    hanging = here.run(hang())
    assert open_transactions(broker) == ["s/g1"]
    sink.abort()
    assert open_transactions(broker) == []
    assert broker.values() == [b"a"]
    assert sink.write([placed(0, b"a")], Task(0, 0, "q")).skipped == 1
    here.run(hanging.close(0))


def test_a_job_is_done_once(broker: Broker) -> None:
    sink = grouped(broker, 1, streaming=False, job_id=5)
    for _ in range(2):
        sink.commit([sink.write([placed(0, b"a")], Task(0))])
    later = grouped(broker, 1, streaming=False, job_id=9)
    assert later.write([placed(0, b"b")], Task(0)).rows == 1
    with pytest.raises(SinkStopped, match="batch 9 is written already"):
        sink.write([placed(0, b"a")], Task(0))
    assert broker.values() == [b"a", b"b"]


# -- sources -----------------------------------------------------------------------------------


@either_way
def test_what_was_read_is_written_once(broker: Broker, columns: SinkColumns) -> None:
    sink = sourced(broker, columns=columns)
    first = sink.write([read(range(3)), read(range(3, 5))], Task(0, 0, "q"))
    assert (first.source, first.rows, first.skipped) == ("in-0", 5, 0)
    assert first.latency_ms_max > 0
    # A replay, also one with other bounds, or of another checkpoint.
    again = sink.write([read(range(5))], Task(0, 0, "q"))
    assert (again.skipped, again.latency_ms_max) == (5, 0)
    assert sink.write([read(range(2, 8))], Task(0, 1, "other")).rows == 3
    assert sink.write([read(range(10))], Task(0, 0, "another")).rows == 2
    assert broker.values() == expected((0, range(10)))


def test_a_replay_of_old_rows_does_not_turn_the_marker_back(broker: Broker) -> None:
    sink = sourced(broker)
    sink.write([read(range(10))], Task(0, 0, "q"))
    sink.write([read(range(5))], Task(0, 0, "other"))
    assert sink.write([read(range(5, 10))], Task(0, 1, "other")).rows == 0
    assert broker.values() == expected((0, range(10)))


@either_way
def test_each_partition_that_is_read_has_its_own_marker(
    broker: Broker, columns: SinkColumns
) -> None:
    sink = sourced(broker, columns=columns)
    assert sink.write([read(range(3), 0)], Task(0, 0, "q")).rows == 3
    assert sink.write([read(range(3), 1)], Task(1, 0, "q")).rows == 3
    assert sink.write([read(range(3), 1, topic="out")], Task(2, 0, "q")).source == "out-1"
    assert sink.write([], Task(3, 0, "q")).rows == 0
    assert broker.values() == expected((0, range(3)), (1, range(3)), (1, range(3)))


def test_a_query_may_change_how_it_tells_where_rows_were_read(broker: Broker) -> None:
    for number, columns in enumerate((READ, PACKED, READ)):
        sink = sourced(broker, columns=columns)
        sink.write([read(range(number, number + 2))], Task(0, 0, f"q{number}"))
    assert broker.values() == expected((0, range(4)))


def test_a_partition_with_its_first_rows_late_is_new_if_the_query_is_known(broker: Broker) -> None:
    sink = sourced(broker)
    sink.commit([sink.write([read(range(3), 0)], Task(0, 0, "q"))], 0, "q")
    assert sink.write([read(range(3), 1)], Task(0, 7, "q")).rows == 3
    with pytest.raises(SinkStopped, match="nothing is known of earlier ones"):
        sink.write([read(range(3), 0, topic="out")], Task(0, 7, "other"))


def test_the_progress_of_a_query_does_not_go_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an older checkpoint, a marker that has expired would be taken for a new source's."""
    sink = sourced(broker)
    for batch, offsets in ((7, range(3)), (3, range(3, 6))):
        monkeypatch.setattr(delivery, "_told", {})  # a new process
        adopted = replace(sink, options=replace(sink.options, adopt=batch))
        sink.commit([adopted.write([read(offsets)], Task(0, batch, "q"))], batch, "q")
    with pytest.raises(SinkStopped, match="nothing is known of earlier ones"):
        sink.write([read(range(3), 1)], Task(1, 5, "q"))


@either_way
def test_two_partitions_in_one_task_stop(broker: Broker, columns: SinkColumns) -> None:
    both = pa.Table.from_batches([read(range(2), 0), read(range(2), 1)]).combine_chunks()
    for batches in ([read(range(2), 0), read(range(2), 1)], both.to_batches()):
        with pytest.raises(SinkStopped, match="in-0 and in-1"):
            sourced(broker, columns=columns).write(batches, Task(0, 0, "q"))
    assert broker.values() == []
    assert open_transactions(broker) == []


def test_rows_whose_origin_is_unknown_stop(broker: Broker) -> None:
    column = pa.array([packed([0], 0, "in")[0].as_py(), None], pa.int64())
    batch = read(range(2))
    batch = batch.set_column(batch.schema.names.index("__origin"), "__origin", column)
    with pytest.raises(SinkStopped, match=r"null in 1 rows.* another topic than out, in, far"):
        sourced(broker, columns=PACKED).write([batch], Task(0, 0, "q"))
    assert broker.values() == []


def test_one_partition_in_two_tasks_stops(broker: Broker) -> None:
    sink = sourced(broker)
    sink.write([read(range(5, 9))], Task(1, 0, "q"))
    with pytest.raises(
        SinkStopped, match="5 to 8 are written, and a task of batch 0 begins with 0"
    ):
        sink.write([read(range(5))], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"this sink\.id has stopped in batch 0"):
        sink.write([read(range(5, 9))], Task(0, 0, "q"))


def test_a_filter_that_lets_in_an_earlier_row_in_a_replay_is_named_as_what_it_may_be(
    broker: Broker,
) -> None:
    sink = sourced(broker)
    sink.write([read(range(2, 9, 2))], Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"begins with 0: either a filter differs .* or several"):
        sink.write([read(range(0, 9, 3))], Task(0, 0, "q"))
    assert broker.values() == expected((0, range(2, 9, 2)))


def test_a_source_whose_topic_is_no_text_stops(broker: Broker) -> None:
    damaged = pa.array([b"\xff\xfe"] * 2, pa.binary()).view(pa.string())
    batch = read(range(2))
    batch = batch.set_column(batch.schema.names.index("__topic"), "__topic", damaged)
    with pytest.raises(SinkStopped, match="has bytes that are no text"):
        sourced(broker).write([batch], Task(0, 0, "q"))
    assert broker.values() == []


def test_one_partition_in_the_tasks_of_two_batches_stops(broker: Broker) -> None:
    """To Spark the parts of a union are two readers: one may see a row a batch later."""
    sink = sourced(broker)
    sink.write([read([1, 3])], Task(1, 0, "q"))
    with pytest.raises(
        SinkStopped,
        match="a task of batch 1 begins with 2: either an older copy of this checkpoint",
    ):
        sink.write([read([2, 4])], Task(0, 1, "q"))
    assert broker.values() == expected((0, range(1, 5, 2)))


#: Two tasks of one batch that share a partition: each has part of the offsets 0 to 9.
SHARED = {
    "even-odd": (range(0, 10, 2), range(1, 10, 2)),
    "odd-even": (range(1, 10, 2), range(0, 10, 2)),
    "even-fewer-odd": (range(0, 10, 2), range(1, 8, 2)),
    "halves": (range(5), range(5, 10)),
    "later-half-first": (range(5, 10), range(5)),
    "same": (range(10), range(10)),
}


def test_a_stop_that_cannot_be_kept_says_so(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sourced(broker)
    reports = [TaskReport(n, source="in-0") for n in (0, 1)]

    async def refuse(*_: object) -> None:
        raise KafkaError("no broker")

    monkeypatch.setattr(Sink, "_revise", refuse)
    with pytest.raises(SinkStopped) as caught:
        sink.commit(reports, 0, "q")
    assert "could not be kept under sink.id (no broker)" in caught.value.__notes__[0]


def run_batch(sink: Sink, *tasks: Sequence[int]) -> None:
    sink.commit([sink.write([read(t)], Task(n, 0, "q")) for n, t in enumerate(tasks)], 0, "q")


@pytest.mark.parametrize("tasks", SHARED.values(), ids=SHARED)
def test_two_tasks_of_one_partition_stop_and_so_does_the_mended_query(
    broker: Broker, tasks: tuple[range, range]
) -> None:
    sink = sourced(broker)
    for _ in range(2):  # also when the batch is run again as it was
        with pytest.raises(SinkStopped, match=r"several Spark partitions|the tasks 0 and 1"):
            run_batch(sink, *tasks)
    assert open_transactions(broker) == []
    written = broker.values()
    stopped = r"this sink\.id has stopped in batch 0 for good.* a filter differs.* several Spark"
    # With the same checkpoint, with others, and as a batch job.
    for query, batch in (("q", 0), ("q", 1), ("new", 0), ("new", 1)):
        with pytest.raises(SinkStopped, match=stopped):
            sink.write([read(range(10))], Task(0, batch, query))
    job = sourced(broker, streaming=False, job_id=2)
    with pytest.raises(SinkStopped, match=stopped):
        job.write([read(range(10))], Task(0))
    assert broker.values() == written
    assert open_transactions(broker) == []


@pytest.mark.parametrize("second", [range(6, 9), range(3)])
def test_a_job_in_several_tasks_stops_and_the_next_job_leaves_nothing_out(
    broker: Broker, second: range
) -> None:
    """One whose number another one had looks the same."""
    sink = sourced(broker, streaming=False, job_id=7)
    sink.write([read(range(3, 6))], Task(1))
    with pytest.raises(SinkStopped, match=r"another job had this job\.id .* or several Spark"):
        sink.write([read(second)], Task(2))
    with pytest.raises(SinkStopped, match=r"this sink\.id has stopped in batch 7"):
        sourced(broker, streaming=False, job_id=8).write([read(range(9))], Task(0))
    assert broker.values() == expected((0, range(3, 6)))


def test_a_job_does_not_come_after_a_later_one(broker: Broker) -> None:
    """It may have died before it wrote anything."""
    sourced(broker, streaming=False, job_id=8).write([read(range(10, 20))], Task(0))
    with pytest.raises(
        SinkStopped, match=r"this is job\.id=7, and job 8 has written up to offset 19"
    ):
        sourced(broker, streaming=False, job_id=7).write([read(range(10))], Task(0))


def test_a_source_that_is_doubled_in_one_task_is_not_the_two_halves_of_it(broker: Broker) -> None:
    sink = sourced(broker)
    run_batch(sink, range(5))
    with pytest.raises(SinkStopped, match="was written with 5 rows"):
        run_batch(sink, [*range(5), *range(5)])


@pytest.mark.parametrize(
    "offsets", [range(0, 10, 2), range(1, 10, 2), range(1, 8, 2), range(6), range(5, 12)]
)
def test_two_tasks_of_one_partition_at_once_stop(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, offsets: range
) -> None:
    """The second fences the first and is done while the first is at work.

    The first may wait for a marker that never comes, as far as its rows go beyond that of the
    second; then Spark tries it again.
    """
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink = sourced(broker, transaction_timeout_ms=1000)
    rest = [n for n in range(10) if n not in offsets]
    done: list[TaskReport] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield read(rest[:2])
        done.append(sink.write([read(offsets)], Task(1, 0, "q")))
        yield read(rest[2:])

    def run_both() -> None:
        try:
            first = sink.write(batches(), Task(0, 0, "q"))
        except BatchDeliveryError:
            first = sink.write([read(rest)], Task(0, 0, "q"))
        sink.commit([first, *done], 0, "q")

    with pytest.raises(SinkStopped, match=r"several Spark partitions|the tasks 0 and 1"):
        run_both()
    assert done[0].rows == len(offsets)
    assert broker.values() == expected((0, offsets))


def test_one_partition_in_two_tasks_at_once_is_kept_though_nobody_tries_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink = sourced(broker)

    def batches() -> Iterator[pa.RecordBatch]:
        yield read(range(3))
        sink.write([read(range(5, 10))], Task(1, 0, "q"))
        yield read(range(3, 5))

    with pytest.raises(SinkStopped, match="several Spark partitions"):
        sink.write(batches(), Task(0, 0, "q"))
    with pytest.raises(SinkStopped, match=r"this sink\.id has stopped in batch 0"):
        sink.write([read(range(10))], Task(0, 0, "new"))


def test_rows_that_are_refused_half_way_leave_no_marker_of_a_part(broker: Broker) -> None:
    """What is wrong with them is told, not that a replay has fewer.

    By which error depends on how many were on their way when the first was refused.
    """
    sink = sourced(broker)
    sink.write([read(range(5))], Task(0, 0, "q"))
    broker.do(lambda c: c.inject("produce", error="TOPIC_AUTHORIZATION_FAILED", times=None))

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, 400, 4):
            yield read(range(first, first + 4))

    with pytest.raises((KafkaError, BatchDeliveryError)) as caught:
        sink.write(batches(), Task(0, 0, "q"))
    assert not isinstance(caught.value, SinkStopped)


@pytest.mark.parametrize("second", [[read(range(10))], [read(range(6)), read(range(6, 10))]])
def test_a_source_is_delivered_by_the_attempt_that_fences_another(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, second: list[pa.RecordBatch]
) -> None:
    monkeypatch.setattr(delivery, "_LOOK_S", 0.01)
    sink, task = sourced(broker), Task(0, 0, "q")

    def batches() -> Iterator[pa.RecordBatch]:
        yield read(range(3))
        assert sink.write(second, task).rows == 10
        yield read(range(3, 10))

    report = sink.write(batches(), task)
    assert (report.source, report.rows, report.skipped) == ("in-0", 0, 10)
    assert broker.values() == expected((0, range(10)))


def test_a_stop_goes_up_though_another_attempt_has_begun(broker: Broker) -> None:
    sink, task = sourced(broker), Task(0, 0, "q")

    def batches() -> Iterator[pa.RecordBatch]:
        yield read(range(3))
        sink.write([read(range(3))], task)
        yield read(range(3), 1)

    with pytest.raises(SinkStopped, match="in-0 and in-1"):
        sink.write(batches(), task)


def test_a_replay_with_as_many_other_rows_stops(broker: Broker) -> None:
    sink = sourced(broker)
    run_batch(sink, [0, 1, 2, 4])
    run_batch(sink, [4, 2, 1, 0])  # in any order
    run_batch(sink, [0, 1, 2, 4, 5])
    run_batch(sink, [0, 1])  # which does not make the marker forget the others
    with pytest.raises(SinkStopped, match="was written with 5 rows"):
        run_batch(sink, [0, 1, 2, 3, 5])
    assert broker.values() == expected((0, range(3)), (0, range(4, 6)))


def test_a_topic_that_was_made_again_stops(broker: Broker) -> None:
    sink = sourced(broker)
    sink.write([read(range(5))], Task(0, 0, "q"))
    broker.do(lambda c: c.delete_topic("in"))
    broker.do(lambda c: c.create_topic("in", partitions=2))
    with pytest.raises(SinkStopped, match="deleted and created again"):
        sink.write([read(range(5))], Task(0, 1, "q"))


def test_the_source_may_be_another_cluster(broker: Broker) -> None:
    other = Broker()
    try:
        other.do(lambda c: c.create_topic("far", partitions=1))
        sink = sourced(broker, source_bootstrap_servers=other.servers)
        assert sink.write([read(range(5), topic="far")], Task(0, 0, "q")).rows == 5
        assert sink.write([read(range(5), topic="far")], Task(0, 0, "q")).skipped == 5
    finally:
        other.close()


def test_a_source_on_another_cluster_that_is_not_named_stops(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_TOPIC_ID_S", 0.3)
    sink = sourced(broker)
    with pytest.raises(SinkStopped, match=r"no topic 'far' at .*named by source\.bootstrap\.serv"):
        sink.write([read(range(5), topic="far")], Task(0, 0, "q"))
    with pytest.raises(ValueError, match="far"):
        broker.values("far")  # nobody has created it
    assert broker.values() == []


def test_what_is_in_the_markers_place(broker: Broker) -> None:
    sink = sourced(broker)
    sink.write([read(range(5))], Task(0, 0, "q"))
    found = broker.do(lambda c: c.committed_offsets("s/in/0"))
    marker = Marker.unpacked(found["out", 0])  # type: ignore[arg-type]  # the same fields
    assert (marker.batch, marker.query, marker.next_offset, marker.rows) == (0, "q", 5, 5)
    assert marker.topic_id
    assert marker.routing
