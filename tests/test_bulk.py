# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
"""send_many where it goes the quick way; tests/test_producer.py has its rules."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

import pyarrow as pa
import pytest

from asyncproducer import (
    BatchDeliveryError,
    BrokerRejected,
    Delivery,
    Interceptor,
    InvalidPartition,
    Producer,
    ProducerClosed,
    Record,
    RecordMetadata,
    RecordTooLarge,
    SerializationError,
)
from asyncproducer import bulk as module
from asyncproducer.core.bulk import Objects
from asyncproducer.testing import EmbeddedCluster

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]


@pytest.fixture
def singles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that did not go the quick way."""
    seen: list[Any] = []
    take_one = module.Sending._take_one

    async def spy(self: Any, topic: Any, rows: Any, row: int) -> None:
        seen.append(rows.record(row))
        await take_one(self, topic, rows, row)

    monkeypatch.setattr(module.Sending, "_take_one", spy)
    return seen


async def test_plain_values_go_the_quick_way(
    cluster: EmbeddedCluster, new_producer: New, singles: list[Any]
) -> None:
    """The first makes the topic known. The loop turns now and then, and all others are quick."""
    values = [b"%0100d" % n for n in range(20_000)]
    async with new_producer() as producer:
        result = await producer.send_many("t", values)
    assert [record.value for record in cluster.records("t")] == values
    assert [m.offset for m in result if isinstance(m, RecordMetadata)] == [*range(20_000)]
    assert singles == values[:1]
    assert len(singles) < 20


async def test_mixed_records_keep_their_order_on_both_ways(
    cluster: EmbeddedCluster, new_producer: New, singles: list[Any]
) -> None:
    def kind(n: int) -> Any:
        value = b"%d" % n
        kinds = [value, Record("", value), bytearray(value), Record("", str(n)), Record("t", value)]
        return kinds[n % 7 % 5]

    async with new_producer() as producer:
        result = await producer.send_many("t", (kind(n) for n in range(3000)))
    assert [int(r.value or b"") for r in cluster.records("t")] == [*range(3000)]
    assert result.acknowledged == 3000
    assert 100 < len(singles) < 2000


class ByRecord(Producer[Any, Any]):
    """Its own `enqueue` sees each record, so nothing goes the quick way."""

    seen: list[Any]

    async def enqueue(self, topic: str, value: Any = None, **rest: Any) -> Delivery:
        self.seen.append(value)
        return await super().enqueue(topic, value, **rest)


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_the_quick_and_the_slow_way_end_in_the_same_log(
    cluster: EmbeddedCluster, new_producer: New, compression: str
) -> None:
    records = [
        Record(
            "",
            None if n % 11 == 0 else b"%0*d" % (n % 130, n),
            b"key %d" % (n % 17),
            partition=n % 4 if n % 5 == 0 else None,
            timestamp=1_700_000_000_000 + n,
        )
        for n in range(2000)
    ]
    cluster.create_topic("slow", partitions=4)
    options: dict[str, Any] = {"compression_type": compression, "connector": cluster.connector}
    async with new_producer(**options) as producer:
        quick = await producer.send_many("t4", records)
    by_record = ByRecord(cluster.bootstrap_servers, **options)
    by_record.seen = []
    async with by_record:
        slow = await by_record.send_many("slow", records)
        assert len(by_record.seen) == 2000
    assert [m[1:] for m in quick if isinstance(m, RecordMetadata)] == [
        m[1:] for m in slow if isinstance(m, RecordMetadata)
    ]
    for partition in range(4):
        logs = [
            [(r.key, r.value, r.timestamp) for r in cluster.records(topic, partition)]
            for topic in ("t4", "slow")
        ]
        assert logs[0] == logs[1]
        assert logs[0]


async def test_errors_of_records_stand_at_their_places(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(max_block_ms=1000) as producer:
        records: list[Any] = [b"%d" % n for n in range(100)]
        records[10] = 5
        records[20] = bytes(2_000_000)
        records[30] = Record("", b"x", partition=-1)
        result = await producer.send_many("t", records, raise_on_error=False)
        with pytest.raises(BatchDeliveryError, match=r"3 of 100 .* number 10") as caught:
            await producer.send_many("t", records)
        assert caught.value.result.acknowledged == 97
        assert producer.metrics()["record_error_total"] == 6
    assert [(index, type(error)) for index, error in result.failed] == [
        (10, SerializationError),
        (20, RecordTooLarge),
        (30, InvalidPartition),
    ]
    assert result[20] is result.failed[1][1]
    assert result[-1] == result[99]
    kinds = [type(outcome) for outcome in result[9:12]]
    assert kinds == [RecordMetadata, SerializationError, RecordMetadata]
    with pytest.raises(IndexError):
        result[100]


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("batch_size", [16_384, 600_000])
async def test_no_record_is_larger_than_a_request_may_be_not_even_where_a_batch_may(
    cluster: EmbeddedCluster, new_producer: New, batch_size: int, table: bool
) -> None:
    values = [b"a", b"b", bytes(100_000), b"c"]
    async with new_producer(batch_size=batch_size, max_request_size=20_000) as producer:
        await producer.warm_up("t")
        if table:
            arrow = pytest.importorskip("pyarrow").table({"value": values})
            failed = (await producer.send_table("t", arrow, raise_on_error=False)).failed
        else:
            failed = (await producer.send_many("t", values, raise_on_error=False)).failed
    assert [(row, type(error)) for row, error in failed] == [(2, RecordTooLarge)]
    assert {record.value for record in cluster.records("t")} == {b"a", b"b", b"c"}


async def test_the_metadata_of_a_result_is_that_of_single_records(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        result = await producer.send_many(
            "t", [b"value", None, b"", Record("t", b"v", b"key", timestamp=5), "text"]
        )
    sizes = [(m.serialized_key_size, m.serialized_value_size) for m in result]  # type: ignore[union-attr]
    assert sizes == [(-1, 5), (-1, -1), (-1, 0), (3, 1), (-1, 4)]
    stored = [record.timestamp for record in cluster.records("t")]
    assert [m.timestamp for m in result] == stored  # type: ignore[union-attr]
    assert stored[3] == 5


async def test_a_batch_that_is_too_large_is_split_and_every_record_has_its_offset(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.create_topic("small", configs={"max.message.bytes": "1000"})
    values = [b"%0100d" % n for n in range(500)]
    async with new_producer(batch_size=16_000) as producer:
        await producer.warm_up("small")
        result = await producer.send_many("small", values)
        assert producer.metrics()["batch_split_total"] > 0
    assert [m.offset for m in result if isinstance(m, RecordMetadata)] == [*range(500)]
    assert [record.value for record in cluster.records("small")] == values


async def test_a_failed_batch_fails_its_records_and_is_not_logged_when_somebody_looks(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_producer(linger_ms=1000, adaptive_linger=False) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", error="INVALID_RECORD")
        result = await producer.send_many("t", [b"x"] * 10, raise_on_error=False)
        assert [type(error) for _, error in result.failed] == [BrokerRejected] * 10
        assert producer.metrics()["record_error_total"] == 10
        del result
        gc.collect()
    assert "nobody looked" not in caplog.text


async def test_memory_is_given_in_turn_to_a_bulk_and_to_others(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """With so little memory both wait all the time: none of them is starved."""
    async with new_producer(buffer_memory=2000, batch_size=500, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        many = asyncio.create_task(producer.send_many("t", [b"%0100d" % n for n in range(400)]))
        singles = [asyncio.create_task(producer.send("t", b"single %d" % n)) for n in range(20)]
        done, _ = await asyncio.wait([many, *singles], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*singles)
        assert many not in done
        assert not many.done()
        assert (await many).acknowledged == 400
    order = [r.value or b"" for r in cluster.records("t")]
    assert [int(v) for v in order if not v.startswith(b"single")] == [*range(400)]
    assert [v for v in order if v.startswith(b"single")] == [b"single %d" % n for n in range(20)]


class Memory:
    """Of a pool, what a bulk looks at: `free_at` says when so many of its 800 bytes are free."""

    total = 800
    closed = False

    def __init__(self, free_at: dict[int, int], waiting_at: float = 1e9) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._free_at = free_at
        self._waiting_at = waiting_at

    @property
    def ms(self) -> float:
        return (self._loop.time() - self._began) * 1000

    @property
    def available(self) -> int:
        return max(free for at, free in self._free_at.items() if at <= self.ms + 0.001)

    @property
    def waiting(self) -> int:
        return self.ms + 0.001 >= self._waiting_at

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.mark.parametrize(
    ("free_at", "waiting_at", "ends_ms"),
    [
        ({0: 100}, 1e9, 0),
        ({0: 99, 12: 100}, 1e9, 15),
        ({0: 10}, 1e9, 50),  # the brokers are slow: what there is has to do
        ({0: 10}, 0, 0),  # others wait as well
        ({0: 10}, 8, 10),
    ],
)
async def test_a_bulk_that_waited_for_memory_goes_on_when_there_is_some(
    new_producer: New, free_at: dict[int, int], waiting_at: float, ends_ms: float
) -> None:
    """Not with that of each batch that comes back: an eighth."""
    async with new_producer() as producer:
        memory: Any = Memory(free_at, waiting_at)
        await module.Sending(producer, by_record=False)._more_room(memory)
        assert memory.ms == pytest.approx(ends_ms)


@pytest.mark.parametrize("buffer_memory", [100_000, 10_000_000])
async def test_only_a_bulk_that_waited_for_memory_pauses(
    cluster: EmbeddedCluster,
    new_producer: New,
    monkeypatch: pytest.MonkeyPatch,
    buffer_memory: int,
) -> None:
    paused: list[int] = []
    more_room = module.Sending._more_room

    async def spy(self: Any, pool: Any) -> None:
        paused.append(pool.available)
        await more_room(self, pool)
        assert pool.available * 8 >= pool.total

    monkeypatch.setattr(module.Sending, "_more_room", spy)
    async with new_producer(buffer_memory=buffer_memory, batch_size=2000) as producer:
        result = await producer.send_many("t", [b"%01000d" % n for n in range(1000)])
    assert result.acknowledged == 1000
    assert bool(paused) == (buffer_memory < 1_000_000)


@pytest.mark.parametrize("ends", [{}, {"timeout": 0.0}])
async def test_a_bulk_that_pauses_ends_when_the_producer_is_closed(
    cluster: EmbeddedCluster,
    new_producer: New,
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[str, float],
) -> None:
    """However long it would have paused: a closed producer leaves nobody behind."""
    monkeypatch.setattr(module, "_PAUSE_S", 1000.0)
    pausing = asyncio.Event()
    more_room = module.Sending._more_room

    async def spy(self: Any, pool: Any) -> None:
        pausing.set()
        await more_room(self, pool)

    monkeypatch.setattr(module.Sending, "_more_room", spy)
    monkeypatch.setattr(module, "_SHARE", 1)  # it pauses unless all is free
    async with new_producer(buffer_memory=2000, batch_size=500, batch_max_bytes=0) as producer:
        many = asyncio.create_task(producer.send_many("t", [bytes(400)] * 20))
        await pausing.wait()
        await producer.close(**ends)
        for _ in range(10):
            await asyncio.sleep(0)
        assert many.done()
        assert isinstance(many.exception(), ProducerClosed)


async def test_a_bulk_goes_on_while_others_wait_for_a_broker_that_stands_still(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Not what is for that broker: it comes after them."""
    async with new_producer(buffer_memory=90_000, batch_size=500, batch_max_bytes=0) as producer:
        for partition in range(4):
            await producer.send("t4", b"before", partition=partition)
        bad = cluster.leader("t4", 0)
        stuck = [p for p in range(4) if cluster.leader("t4", p) == bad]
        [well] = {p for p in range(4) if p not in stuck} - {max(set(range(4)) - {*stuck})}
        cluster.pause(bad)
        flood = [
            asyncio.create_task(producer.send("t4", b"%0400d" % number, partition=0))
            for number in range(300)
        ]
        await asyncio.sleep(0.01)
        waiting = producer.health.waiting_senders
        assert 0 < waiting < 300
        values = [b"%0400d" % number for number in range(300, 500)]
        result = await producer.send_many("t4", values)
        places = [m.partition for m in result if isinstance(m, RecordMetadata)]
        assert len(places) == 200
        assert not set(places) & set(stuck)
        records = [Record("t4", value, partition=well) for value in values]
        await producer.send_many(None, records)
        behind = asyncio.create_task(
            producer.send_many(None, [Record("t4", value, partition=0) for value in values])
        )
        await asyncio.sleep(0.01)
        assert producer.health.waiting_senders == waiting + 1
        cluster.resume(bad)
        await asyncio.gather(behind, *flood)
    assert [int(r.value or b"") for r in cluster.records("t4", 0)[1:]] == [*range(500)]


async def test_a_bulk_overtakes_nobody_who_waits_for_memory(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(buffer_memory=2000, batch_size=500, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        cluster.pause(2)
        for _ in range(3):
            await producer.enqueue("t", bytes(430))
        waiting = asyncio.create_task(producer.send("t", bytes(440)))
        await asyncio.sleep(0.01)
        many = asyncio.create_task(producer.send_many("t", [b"small"] * 3))
        await asyncio.sleep(0.01)
        cluster.resume(1)
        cluster.resume(2)
        await asyncio.gather(waiting, many)
    sizes = [len(r.value or b"") for r in cluster.records("t")]
    assert sizes == [430] * 3 + [440] + [5] * 3


@pytest.mark.parametrize(
    ("keys", "trips", "stays"),
    [
        (False, [0.0001], 3_200_000),
        (False, [0.0001, 0.0005], 7_200_000),
        (False, [0.002], 7_000_000),
        (False, [0.02], 10 * 2**20),
        (False, [], 10 * 2**20),
        (True, [0.0001], 16 * 2**20),
        (False, [0.0001], 0),
    ],
)
async def test_a_bulk_stays_so_far_ahead_of_busy_brokers(
    cluster: EmbeddedCluster,
    new_producer: New,
    monkeypatch: pytest.MonkeyPatch,
    keys: bool,
    trips: list[float],
    stays: int,
) -> None:
    """As long as no broker is hungry: memory that does nothing for them is left to others.

    Where one batch is filled after the other it is less, the nearer the brokers are.
    """
    cluster.create_topic("wide", partitions=8)
    values: list[Any] = [b"%01000d" % n for n in range(40_000)]
    if keys:
        values = [Record("wide", value, b"key %d" % n) for n, value in enumerate(values)]
    async with new_producer(buffer_memory=64 * 2**20) as producer:
        # The first batch of a partition goes alone, and nothing before its answer.
        await producer.send_many(None, [Record("wide", b"", partition=p) for p in range(8)])
        if not stays:
            monkeypatch.setattr(producer._cluster, "hungry", lambda fed: True)
        monkeypatch.setattr(producer._cluster, "round_trips", lambda: trips)
        for node in (1, 2):
            cluster.pause(node)
        pool = producer._pool
        many = asyncio.create_task(producer.send_many("wide", values))
        await asyncio.sleep(0.09)
        used = pool.total - pool.available
        if stays:
            assert 0 <= used - stays <= 4 * 2**20
        else:
            assert used > 30_000_000
        # They take nothing for so long that it goes on: they may not be the ones it is for.
        await asyncio.sleep(0.05)
        assert (pool.total - pool.available > used) is (stays > 0)
        for node in (1, 2):
            cluster.resume(node)
        result = await many
    assert result.acknowledged == len(values)


@pytest.mark.parametrize("compression", ["none", "lz4"])
async def test_a_large_bulk_fills_its_batches(
    cluster: EmbeddedCluster, new_producer: New, compression: str
) -> None:
    """One after the other, once there is more than brokers take at once. And only the bulk does."""
    cluster.create_topic("wide", partitions=8)
    async with new_producer(compression_type=compression) as producer:
        await producer.send_many(None, [Record("wide", b"", partition=p) for p in range(8)])
        for node in (1, 2):
            cluster.pause(node)
        many = asyncio.create_task(producer.send_many("wide", [bytes(1000)] * 12_000))
        await asyncio.sleep(0.05)
        assert producer._intake is not None
        state = producer._intake.accumulator.topics["wide"]
        queued = [batch for queue in state.queues if queue is not None for batch in queue.batches]
        assert not state.stays
        single = [await producer.enqueue("wide", bytes(1000)) for _ in range(200)]
        for node in (1, 2):
            cluster.resume(node)
        assert (await many).acknowledged == 12_000
    full = sum(batch.size > 990_000 for batch in queued)
    if compression == "none":
        assert full >= 4
        assert len(queued) <= 20
    # Each 16 KiB, or twice as much, to another partition.
    runs = [len(list(run)) for _, run in groupby(d.result().partition for d in single)]
    assert max(runs) <= 64


async def test_a_bulk_that_is_far_ahead_goes_on_when_enough_has_left(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the memory that comes back, not when the pause is over."""
    monkeypatch.setattr(module, "_AHEAD_BYTES", (10_000, 20_000))
    monkeypatch.setattr(module, "_LONGER_PAUSE_S", 1000.0)
    loop = asyncio.get_running_loop()
    async with new_producer(batch_size=2000, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        for node in (1, 2):
            cluster.pause(node)
        # As many as come in before the loop turns, then the rest.
        many = asyncio.create_task(producer.send_many("t", [bytes(1000)] * 5000))
        await asyncio.sleep(1.0)
        assert not many.done()
        began = loop.time()
        for node in (1, 2):
            cluster.resume(node)
        assert (await many).acknowledged == 5000
        assert loop.time() - began < 10.0


async def test_others_run_while_much_comes_in(cluster: EmbeddedCluster, new_producer: New) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def records() -> Iterator[bytes]:
        task = asyncio.create_task(others())
        for _ in range(20_000):
            yield bytes(1000)
        task.cancel()

    async with new_producer() as producer:
        await producer.warm_up("t")
        await producer.send_many("t", records())
    assert 8 <= turns < 20_000


def pass_time(seconds: float) -> None:
    """As if what runs now had taken so long."""
    loop: Any = asyncio.get_running_loop()
    loop._set_time(loop.time() + seconds)


@contextmanager
def counted_turns() -> Iterator[list[float]]:
    """When the loop has turned."""
    loop = asyncio.get_running_loop()
    turns: list[float] = []
    handle = loop.call_soon(lambda: None)

    def turned() -> None:
        nonlocal handle
        turns.append(loop.time())
        handle = loop.call_soon(turned)

    turned()
    try:
        yield turns
    finally:
        handle.cancel()


def longest(turns: list[float]) -> float:
    return max(after - before for before, after in pairwise(turns))


async def test_others_run_while_an_iterable_takes_its_time(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    given = asyncio.Event()

    def records() -> Iterator[bytes]:
        for n in range(500):
            pass_time(0.002)
            yield b"%d" % n
        given.set()

    async def later() -> AsyncIterator[bytes]:
        for value in records():
            yield value

    async with new_producer() as producer:
        await producer.warm_up("t")
        for iterable in (records(), later()):
            given.clear()
            with counted_turns() as turns:
                sending = asyncio.create_task(producer.send_many("t", iterable))
                await given.wait()
            assert longest(turns) < 0.0041
            assert (await sending).acknowledged == 500


@pytest.mark.parametrize("rows", [0, 1, 10])
async def test_others_run_while_a_reader_takes_its_time(
    cluster: EmbeddedCluster, new_producer: New, rows: int
) -> None:
    batch = pa.record_batch({"v": pa.array([b"x"] * rows, pa.binary())})
    given = asyncio.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        for _ in range(200):
            pass_time(0.002)
            yield batch
        given.set()

    async def tables() -> AsyncIterator[pa.Table]:
        for part in slow():
            yield pa.Table.from_batches([part])

    async with new_producer() as producer:
        await producer.warm_up("t")
        for data in (pa.RecordBatchReader.from_batches(batch.schema, slow()), tables()):
            given.clear()
            with counted_turns() as turns:
                sending = asyncio.create_task(producer.send_table("t", data, value="v"))
                await given.wait()
            assert longest(turns) < 0.0041
            assert (await sending).acknowledged == 200 * rows


async def test_few_records_at_a_time_share_their_bookkeeping(
    new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Counted(Objects):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(module, "Objects", Counted)

    def records() -> Iterator[Any]:
        for n in range(1000):
            pass_time(0.002)
            yield b"%d" % n if n % 3 else Record("", str(n).encode())

    async with new_producer() as producer:
        result = await producer.send_many("t", records())
    assert [record.offset for record in result] == [*range(1000)]  # type: ignore[union-attr]
    assert len(made) == 4


async def test_a_loop_that_turns_for_time_makes_no_batch_wait(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Who gives little at a time does not pour: what he gives leaves in the next turn."""

    def records() -> Iterator[bytes]:
        for _ in range(10):
            pass_time(0.1)
            yield b"x"

    async with new_producer() as producer:
        await producer.warm_up("t")
        result = await producer.send_many("t", records())
    assert result.acknowledged == 10
    assert producer.metrics()["batch_count"] >= 5


async def test_large_records_behind_small_ones_are_a_few_at_a_time(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    taken = 0

    def records() -> Iterator[Any]:
        nonlocal taken
        yield from (b"x" for _ in range(1400))
        for _ in range(100):
            taken += 100_000
            yield Record("", bytes(100_000))

    async with new_producer(buffer_memory=2_000_000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        cluster.pause(2)
        task = asyncio.create_task(producer.send_many("t", records()))
        await asyncio.sleep(0.1)
        assert taken <= 2_000_000 + 500_000
        cluster.resume(1)
        cluster.resume(2)
        assert (await task).acknowledged == 1500


async def test_headers_that_raise_and_topics_that_are_none_stop_no_other_record(
    new_producer: New,
) -> None:
    def headers() -> Iterator[tuple[str, bytes]]:
        raise KeyError("trace_id")
        yield "a", b"1"

    records: list[Any] = [
        Record("missing", b"v"),
        Record("t", b"v", headers=headers()),
        Record(["x"], b"v"),  # type: ignore[arg-type]
        Record("t", b"v"),
    ]
    async with new_producer(max_block_ms=100) as producer:
        result = await producer.send_many(None, records, raise_on_error=False)
    assert [(row, type(error).__name__) for row, error in result.failed] == [
        (0, "MetadataTimeout"),
        (1, "SerializationError"),
        (2, "InvalidTopic"),
    ]
    assert result.acknowledged == 1


async def test_cancelled_no_further_record_is_taken_and_what_is_buffered_goes_on(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    taken = 0

    def records() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"%0100d" % taken

    async with new_producer(buffer_memory=4000, batch_size=500, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        task = asyncio.create_task(producer.send_many("t", records()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        so_far = taken
        await asyncio.sleep(1)
        assert taken == so_far
    stored = [int(r.value or b"") for r in cluster.records("t")]
    assert stored == [*range(1, len(stored) + 1)]
    assert so_far - 2000 < len(stored) <= so_far


class Panic(BaseException):
    """What extensions in Rust raise."""


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, GeneratorExit, Panic])
async def test_what_came_before_an_error_of_the_iterable_goes_on(
    cluster: EmbeddedCluster, new_producer: New, error: type[BaseException]
) -> None:
    def records() -> Iterator[bytes]:
        for n in range(700):
            yield b"%d" % n
        raise error

    async with new_producer() as producer:
        with pytest.raises(error):
            await producer.send_many("t", records())
    assert [int(r.value or b"") for r in cluster.records("t")] == [*range(700)]


async def test_large_records_are_taken_from_an_iterable_a_few_at_a_time(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    taken = 0

    def records() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield bytes(500_000)

    async with new_producer(buffer_memory=2_000_000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        cluster.pause(2)
        task = asyncio.create_task(producer.send_many("t", records()))
        await asyncio.sleep(0.1)
        assert taken <= 6
        cluster.resume(1)
        cluster.resume(2)
        assert (await task).acknowledged == 100


@pytest.mark.parametrize("left", [0, 1, 10])
async def test_of_a_list_that_becomes_shorter_what_is_there_is_sent(
    cluster: EmbeddedCluster, new_producer: New, left: int
) -> None:
    values = [b"%d" % n for n in range(1000)]
    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send_many("t", values))
        await asyncio.sleep(0)  # the first one waits for the topic
        del values[left:]
        result = await sending
    assert [r.value for r in cluster.records("t")] == [b"%d" % n for n in range(max(left, 1))]
    assert len(result) == result.acknowledged == max(left, 1)


async def test_of_a_list_that_becomes_longer_all_is_sent(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    values = [b"a", b"b"]
    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send_many("t", values))
        await asyncio.sleep(0)
        values += [b"c", b"d"]
        result = await sending
    assert [r.value for r in cluster.records("t")] == values
    assert [m.offset for m in result if isinstance(m, RecordMetadata)] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [list, tuple])
async def test_a_list_shares_its_bookkeeping_in_parts(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(module, "_LARGEST_OF_LIST", 7)
    values = kind(bytes(n) for n in range(30))
    async with new_producer() as producer:
        result = await producer.send_many("t", values)
    assert [r.value for r in cluster.records("t")] == [*values]
    sizes = [m.serialized_value_size for m in result if isinstance(m, RecordMetadata)]
    assert sizes == [*range(30)]


async def test_an_async_iterable_is_sent_as_it_comes(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def records() -> AsyncIterator[Any]:
        for n in range(600):
            if n % 100 == 99:
                await asyncio.sleep(1)
                assert len(cluster.records("t")) == n
            yield Record("", b"%d" % n) if n % 2 else b"%d" % n

    async with new_producer() as producer:
        result = await producer.send_many("t", records())
    assert [m.offset for m in result if isinstance(m, RecordMetadata)] == [*range(600)]
    assert [int(r.value or b"") for r in cluster.records("t")] == [*range(600)]


async def test_a_partitioner_and_interceptors_see_every_record(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    asked: list[Any] = []

    def choose(topic: Any, key: Any, value: Any) -> int:
        asked.append(value)
        return 2

    class Watching(Interceptor):
        def on_send(self, record: Record) -> Record:
            return record._replace(value=record.value + b"!")

    async with new_producer(partitioner=choose, interceptors=[Watching()]) as producer:
        await producer.send_many("t4", [b"%d" % n for n in range(100)])
    assert asked == [b"%d!" % n for n in range(100)]
    assert [r.value for r in cluster.records("t4", 2)] == asked


async def test_a_serializer_sees_every_record(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(value_serializer=lambda value: value + b"!") as producer:
        await producer.send_many("t", [b"%d" % n for n in range(100)])
    assert [r.value for r in cluster.records("t")] == [b"%d!" % n for n in range(100)]


@pytest.mark.parametrize("seed", range(8))
async def test_bulks_and_single_senders_in_a_storm(
    cluster: EmbeddedCluster, new_producer: New, seed: int
) -> None:
    """Little memory, errors, cut connections, cancellations: nothing is lost, doubled, swapped."""
    chance = random.Random(seed)
    # Batches grow beyond that, and are split.
    cluster.create_topic("storm", partitions=4, configs={"max.message.bytes": "1200"})

    def now_and_then(_: Any) -> bool:
        return chance.random() < 0.03

    cluster.inject("produce", error="NOT_LEADER_OR_FOLLOWER", times=5, when=now_and_then)
    cluster.inject("produce", drop="before", times=3, when=now_and_then)
    cluster.inject("produce", drop="after", times=3, when=now_and_then)
    cancelled: set[int] = set()
    ended: dict[int, int] = {}

    async def sender(producer: Producer[Any, Any], number: int) -> None:
        count = chance.randrange(1, 400)
        values = [b"%d %d %s" % (number, n, bytes(n * 7 % 90)) for n in range(count)]
        key = b"key %d" % number
        task: asyncio.Task[Any]
        if number % 3 == 0:
            table = pa.table({"value": values, "key": [key] * count})
            task = asyncio.create_task(producer.send_table("storm", table, key="key"))
        elif number % 3 == 1:
            records = [Record("", value, key) for value in values]
            task = asyncio.create_task(producer.send_many("storm", records))
        else:

            async def loop() -> None:
                deliveries = [await producer.enqueue("storm", v, key=key) for v in values]
                for delivery in deliveries:
                    await delivery

            task = asyncio.create_task(loop())
        if number % 4 == 0:
            asyncio.get_running_loop().call_later(chance.random() / 20, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            cancelled.add(number)
        ended[number] = count

    async with new_producer(
        # With more, batches have room to grow.
        buffer_memory=6000 if seed % 2 else 60_000,
        batch_size=700,
        batch_max_bytes=3000,
        retry_backoff_ms=10,
        compression_type="lz4" if seed % 4 == 1 else "none",
    ) as producer:
        await asyncio.gather(*(sender(producer, number) for number in range(12)))
        metrics = producer.metrics()
        assert metrics["record_retry_total"] > 0
        assert metrics["batch_split_total"] > 0 or seed % 2
    assert cancelled
    found: dict[int, list[int]] = {number: [] for number in range(12)}
    for partition in range(4):
        for record in cluster.records("storm", partition):
            sent_by, row, _ = (record.value or b"").split(b" ", 2)
            found[int(sent_by)].append(int(row))
    for number, rows in found.items():
        assert rows == [*range(len(rows))]
        assert len(rows) == ended[number] or number in cancelled
