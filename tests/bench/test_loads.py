from __future__ import annotations

import asyncio
import gc
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from fastavro import schemaless_reader

from asyncproducer.bench import loads
from asyncproducer.bench.loads import (
    LOADS,
    _Turns,
    in_turn,
    longest_wait,
    percentile,
    values_of,
    warm_up,
)
from asyncproducer.bench.peers import Job, Peer, Result, Send
from asyncproducer.bench.serializers import _SCHEMA, serializer_of
from asyncproducer.bench.worker import drive
from asyncproducer.bench.workloads import Case, payloads


class Recorder:
    """A producer that keeps what it is given, and acknowledges at once."""

    version = "1"

    def __init__(self, *, blocking: bool, lists: bool = False) -> None:
        self.blocking = blocking
        self.lists = lists
        #: How many records there were at the begin and at the end of each transaction.
        self.transactions: list[tuple[int, int]] = []
        self.offsets: list[int | None] = []
        self._began = 0
        self.got: list[tuple[str, int | None, Any]] = []
        self.headers: Any = None
        self.keys: list[bytes | None] = []
        self.flushed = 0
        self.served: list[float] = []
        self.enqueue = self._plain_or_not(self._enqueue)

    def _enqueue(
        self,
        topic: str,
        value: Any,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Any = None,
    ) -> None:
        self.headers = headers
        self.keys.append(key)
        self.got.append((topic, partition, value))

    async def start(self, job: Job) -> None:
        raise NotImplementedError

    def _plain_or_not(self, function: Callable[..., None]) -> Send:
        async def later(*given: Any, **named: Any) -> None:
            await asyncio.sleep(0)
            function(*given, **named)

        return function if self.blocking else later

    def enqueue_all(self, topic: str, values: Sequence[Any], given: Mapping[str, Any]) -> None:
        for value in values:
            self._enqueue(topic, value, **given)

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        return partial(self.enqueue, topic)

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        def enqueue(value: Any, done: Callable[[], object]) -> None:
            self.got.append((topic, None, value))
            done()

        return self._plain_or_not(enqueue)

    def serve(self, seconds: float) -> None:
        self.served.append(seconds)

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        if not self.lists:
            return None
        return self._plain_or_not(lambda values: self.got.extend((topic, -1, v) for v in values))

    async def begin(self) -> None:
        self._began = len(self.got)

    async def commit(self, offset: int | None) -> None:
        self.transactions.append((self._began, len(self.got)))
        self.offsets.append(offset)

    async def flush(self) -> None:
        self.flushed += 1

    async def stop(self) -> None:
        raise NotImplementedError

    def statistics(self) -> Result:
        return {}


def job(case: Case) -> Job:
    return Job("x", "", tuple(f"t{n}" for n in range(case.topics)), case)


async def run(peer: Peer, case: Case) -> Result:
    return await LOADS[case.load](peer, job(case))


def test_a_percentile_is_one_of_the_values() -> None:
    values = list(range(1, 1001))
    assert [percentile(values, p) for p in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]
    assert percentile([7], 0.999) == percentile([7], 0.5) == 7


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_flood_sends_all_and_flushes(blocking: bool) -> None:
    peer = Recorder(blocking=blocking)
    case = Case(name="x", records=1500, headers=2, ticker=True)
    result = await run(peer, case)
    assert [value for _, _, value in peer.got] == [payloads(case)[n % 1000] for n in range(1500)]
    assert (result["records"], peer.flushed, len(peer.headers)) == (1500, 1, 2)
    assert ("stall_p999_ms" in result) == (not blocking)


async def test_a_turn_counts_what_the_thread_computed_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    turns = _Turns(loop)
    try:
        monkeypatch.setattr(time, "thread_time", iter(range(100)).__next__)
        monkeypatch.setattr(loads, "perf_counter", iter(range(100)).__next__)
        for _ in range(3):
            await asyncio.sleep(0)
    finally:
        del vars(loop)["_run_once"]
        del vars(loop._selector)["select"]  # type: ignore[attr-defined]
    # The turn that it began in was not measured; the last is not over.
    assert list(turns.computed) == [1, 1]
    # It asks in each whether there is something to do.
    assert turns.idle == 3


def test_memory_from_before_counts_for_the_most_and_not_for_the_growth() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the system does not begin anew with the most")
    before = b"x" * 2**26
    assert len(before) == 2**26
    del before
    meter = loads.Meter()
    assert meter.result(1)["rss_growth_mib"] < 32
    then = b"x" * 2**26
    assert meter.result(len(then))["rss_growth_mib"] > 60
    assert loads.peak_rss_mib() > 64


async def test_what_the_warm_up_has_left_in_memory_counts_too() -> None:
    class Hoarding(Recorder):
        kept: bytes | None = None

        async def start(self, job: Job) -> None:
            pass

        async def stop(self) -> None:
            pass

        async def flush(self) -> None:
            self.kept = self.kept or b"x" * 2**26

    result = await drive(Hoarding(blocking=False), job(Case(name="x", records=100)))
    assert result["sent"] == 110
    assert result["rss_growth_mib"] > 60


def test_values_in_turn_are_those_of_an_endless_repetition() -> None:
    for first in range(9):
        for count in range(12):
            pieces = list(in_turn(list("abcd"), first, count))
            assert all(pieces)
            assert [v for piece in pieces for v in piece] == list("abcd" * 6)[first : first + count]


def test_a_loop_without_turns_of_its_own_has_none() -> None:
    class Foreign:
        pass

    turns = _Turns(Foreign())  # type: ignore[arg-type]
    assert (list(turns.computed), turns.idle) == ([], 0.0)


def test_one_long_turn_counts_by_its_length_among_many_short_ones() -> None:
    # 10 s: what comes in the first 20 ms of one turn of 30 ms waits for more than 10 ms of it.
    short = [0.0001] * 50_000
    assert longest_wait([0.030, *short], 4.97, 0.998) == pytest.approx(0.010)
    # With two of them 20 ms of all time are 10 ms of each.
    assert longest_wait([0.030, *short, 0.030], 4.94, 0.998) == pytest.approx(0.020)
    # Half of all time nothing computes.
    assert longest_wait(short, 5.0, 0.4) == 0.0
    assert longest_wait(short, 0.0, 0.75) == pytest.approx(0.000075)
    assert longest_wait([], 1.0, 0.999) == 0.0


async def test_a_stall_stands_beside_one_of_an_idle_process() -> None:
    result = await run(Recorder(blocking=False), Case(name="x", records=1500, ticker=True))
    assert result["stall_max_ms"] >= result["stall_p999_ms"] > 0
    assert result["stall_idle_p999_ms"] > 0 <= result["turn_wait_p999_ms"]


async def test_runs_go_from_partition_to_partition_and_from_topic_to_topic() -> None:
    peer = Recorder(blocking=True)
    await run(peer, Case(name="x", records=9, topics=2, partitions=2, run_length=2))
    assert [place for *place, _ in peer.got] == [
        *(["t0", 0], ["t0", 0], ["t0", 1], ["t0", 1]),
        *(["t1", 0], ["t1", 0], ["t1", 1], ["t1", 1]),
        ["t0", 0],
    ]


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_flood_in_transactions_commits_each(blocking: bool) -> None:
    peer = Recorder(blocking=blocking)
    case = Case(name="x", records=25, transaction=10)
    assert (await run(peer, case))["records"] == 25
    assert peer.transactions == [(0, 10), (10, 20), (20, 25)]
    await warm_up(peer, job(Case(name="x", records=300, transaction=20)))
    assert peer.transactions[3:] == [(25, 45), (45, 55)]
    assert peer.offsets == [None] * 5


@pytest.mark.parametrize("blocking", [True, False])
async def test_transactions_may_end_by_time(
    monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    clock = iter(n / 100 for n in range(10_000))
    monkeypatch.setattr(loads, "perf_counter", lambda: next(clock))
    peer = Recorder(blocking=blocking)
    # Begun at one look, ended at the third after it.
    case = Case(name="x", records=740, transaction_ms=25.0)
    assert (await run(peer, case))["records"] == 740
    assert peer.transactions == [(0, 300), (300, 600), (600, 740)]
    peer.transactions.clear()
    await run(peer, replace(case, records=240, transaction_ms=0.001))
    assert [end - begin for begin, end in peer.transactions] == [100, 100, 40]
    peer.transactions.clear()
    # The time is up in the third one.
    result = await run(peer, replace(case, records=10_000, seconds=0.1))
    assert [end - begin for begin, end in peer.transactions] == [300, 300, 300]
    assert result["records"] == 900


async def test_transactions_send_the_number_of_records_so_far_as_the_groups_offset() -> None:
    peer = Recorder(blocking=False)
    await run(peer, Case(name="x", records=25, transaction=10, offsets=True))
    assert peer.offsets == [10, 20, 25]


@pytest.mark.parametrize("blocking", [True, False])
async def test_lists_are_as_long_as_transactions(blocking: bool) -> None:
    peer = Recorder(blocking=blocking, lists=True)
    case = Case(name="x", load="lists", records=25, transaction=10)
    assert (await run(peer, case))["records"] == 25
    assert peer.got == [("t0", -1, payloads(case)[n]) for n in range(25)]
    assert peer.transactions == [(0, 10), (10, 20), (20, 25)]


async def test_who_has_no_call_for_lists_sends_record_by_record() -> None:
    peer = Recorder(blocking=False)
    await run(peer, Case(name="x", load="lists", records=25, transaction=10))
    assert {partition for _, partition, _ in peer.got} == {None}
    assert peer.transactions == [(0, 10), (10, 20), (20, 25)]


async def test_a_tenth_is_the_warm_up() -> None:
    peer = Recorder(blocking=True)
    assert await warm_up(peer, job(Case(name="x", records=500))) == len(peer.got) == 50


async def test_before_a_case_that_goes_through_partitions_each_has_had_one() -> None:
    peer = Recorder(blocking=True)
    case = Case(name="x", records=500, partitions=7, run_length=4)
    assert await warm_up(peer, job(case)) == len(peer.got) == 57
    assert [partition for _, partition, _ in peer.got[:7]] == list(range(7))
    assert {partition for _, partition, _ in peer.got[7:]} == set(range(6))


async def test_bursts_and_loops_send_what_they_report() -> None:
    for load in ("burst", "loop"):
        peer = Recorder(blocking=False)
        result = await run(peer, Case(name="x", load=load, records=100, tasks=10))
        assert result["records"] == len(peer.got) == 100
        assert ("p50_ms" in result) == (load == "loop")


async def test_the_collector_is_patient_where_the_case_says_so() -> None:
    thresholds = gc.get_threshold()
    try:
        for patient, expected in ((False, thresholds), (True, (50_000, 20, 20))):
            case = Case(name="x", load="burst", records=1, patient_collector=patient)
            await run(Recorder(blocking=False), case)
            assert gc.get_threshold() == expected
    finally:
        gc.set_threshold(*thresholds)


async def test_each_task_of_a_loop_sends_more_than_once() -> None:
    peer = Recorder(blocking=False)
    result = await run(peer, Case(name="x", load="loop", records=10, tasks=10))
    assert result["records"] == len(peer.got) == 50


async def test_a_loop_may_pause_before_each_send(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def sleeping(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleeping)
    peer = Recorder(blocking=False)
    await run(peer, Case(name="x", load="loop", records=10, pause_ms=3.0))
    assert len(peer.got) == slept.count(0.003) == 10
    slept.clear()
    await run(peer, Case(name="x", load="loop", records=10))
    assert max(slept, default=0.0) == 0.0


async def test_an_open_loop_ends_when_all_have_their_end() -> None:
    for blocking in (True, False):
        peer = Recorder(blocking=blocking)
        case = Case(name="x", load="rate", rate=100_000, records=200, ticker=True)
        result = await run(peer, case)
        assert result["records"] == len(peer.got) == 200
        assert result["p999_ms"] >= result["p50_ms"] >= 0
        assert peer.flushed == 0


async def test_who_blocks_waits_in_whole_milliseconds() -> None:
    """librdkafka does not wait for a part of one, and who asks again and again keeps a processor
    busy that the brokers have no use of then."""
    peer = Recorder(blocking=True)
    await run(peer, Case(name="x", load="rate", records=20, rate=700))
    assert len(peer.got) == 20
    assert peer.served  # it never has anything to do but wait
    assert all(seconds * 1e3 == int(seconds * 1e3) for seconds in peer.served)


async def test_greedy_tasks_stop_in_time_and_are_compared() -> None:
    peer = Recorder(blocking=False)
    case = Case(name="x", load="exhaust", tasks=3, seconds=0.01)
    result = await run(peer, case)
    assert result["records"] == len(peer.got) > 0
    assert result["most_by_least_records"] >= 1


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("json", msgspec.json.decode),
        ("msgpack", msgspec.msgpack.decode),
        # Behind a byte 0 and the schema's id.
        ("avro", lambda octets: schemaless_reader(io.BytesIO(octets[5:]), _SCHEMA, None)),
    ],
)
def test_documents_are_sent_where_a_serializer_is_measured(
    name: Any, decode: Callable[[bytes], Any]
) -> None:
    case = Case(name="x", serializer=name)
    document = next(values_of(case))
    assert set(document) == {"id", "text"}
    serializer = serializer_of(case, "t")
    assert serializer is not None
    assert decode(serializer(document)) == document
    assert serializer_of(Case(name="x"), "t") is None


@pytest.mark.parametrize("pandas", [False, True])
async def test_a_table_goes_row_by_row_or_in_one_call(
    monkeypatch: pytest.MonkeyPatch, pandas: bool
) -> None:
    """One with more rows than are made has them again."""
    monkeypatch.setattr(loads, "_DISTINCT_ROWS", 10)
    case = Case(name="x", load="rows", records=25, pandas=pandas)
    assert len(loads._arrow(replace(case, records=20))["v"].chunks) == 2
    peer = Recorder(blocking=False)
    assert (await run(peer, case))["records"] == 25
    values = payloads(case)
    assert peer.got == [("t0", None, values[n % 10]) for n in range(25)]
    assert peer.keys == [b"key-%d" % (n % 10) for n in range(25)]
    tables = []

    class Tables(Recorder):
        @property
        def producer(self) -> Any:
            return self

        async def send_table(self, topic: str, table: Any, *, key: str, value: str) -> None:
            tables.append((topic, pa.table(table), key, value))

    result = await run(Tables(blocking=False), replace(case, load="table"))
    ((topic, table, key, value),) = tables
    assert (topic, result["records"]) == ("t0", 25)
    assert table[value].to_pylist() == [values[n % 10] for n in range(25)]
    assert table[key].to_pylist() == peer.keys


async def test_bulk_sending_that_is_not_there_is_said_to_be_missing() -> None:
    class Old:
        producer = object()

    with pytest.raises(NotImplementedError, match="this version has no send_many"):
        await LOADS["many"](Old(), job(Case(name="x", load="many")))  # type: ignore[arg-type]
