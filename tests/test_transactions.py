# Blocks of transactions, and what they raise, are what is looked at.
# ruff: noqa: PT012
# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
"""Transactions as their user sees them, on brokers of version 1 and of version 2 (KIP-890)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from asyncproducer import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BatchDeliveryError,
    BrokerError,
    BufferFull,
    BufferTimeout,
    ConsumerGroupMetadata,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    IllegalStateError,
    Interceptor,
    InvalidPartition,
    InvalidTopic,
    KafkaError,
    MetadataNotReady,
    MetadataTimeout,
    OffsetAndMetadata,
    Producer,
    ProducerClosed,
    ProducerFenced,
    ProducerNotStarted,
    Record,
    RecordError,
    RecordTooLarge,
    SerializationError,
    TopicPartition,
    TransactionAborted,
    TransactionTimeout,
)
from asyncproducer.core import wire
from asyncproducer.core.transactions import TransactionState
from asyncproducer.plugins import TopicView
from asyncproducer.testing import EmbeddedCluster
from asyncproducer.transaction import group_metadata, offset_map
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]
S = TransactionState

#: A batch leaves when it is full, flushed, or after a minute.
LAZY: dict[str, Any] = {"linger_ms": 60_000, "adaptive_linger": False}
#: One record of 100 bytes in each batch, which leaves at once.
SINGLE: dict[str, Any] = {"batch_size": 150, "batch_max_bytes": 0, "linger_ms": 0}
OFFSETS = {("in", 0): 5, ("in", 1): 6}
HUGE = b"x" * 2_000_000


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def version(request: pytest.FixtureRequest, cluster: EmbeddedCluster) -> int:
    """Of the transactions of `cluster`."""
    level: int = request.param
    cluster.set_feature("transaction.version", level)
    return level


@pytest.fixture
def new(cluster: EmbeddedCluster, new_producer: New) -> New:
    """Makes transactional producers. There is a topic to have consumed from."""
    cluster.create_topic("in", partitions=2)

    def make(**options: Any) -> Producer[Any, Any]:
        return new_producer(**{"transactional_id": "tx", **options})

    return make


def now() -> float:
    return asyncio.get_running_loop().time()


def state(producer: Producer[Any, Any]) -> TransactionState:
    assert producer._transactions is not None
    return producer._transactions._manager.state


def committed(cluster: EmbeddedCluster, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in cluster.records(topic, committed=True)]


def stored(cluster: EmbeddedCluster, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in cluster.records(topic)]


def apis(cluster: EmbeddedCluster) -> list[str]:
    return [r.api for r in cluster.requests if r.api not in ("api_versions", "metadata")]


def left_running() -> list[str]:
    """The tasks of producers and their connections."""
    names = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return [name for name in names if not name.startswith(("broker-", "Task-"))]


async def works(cluster: EmbeddedCluster, producer: Producer[Any, Any]) -> None:
    """Another transaction goes well."""
    before = committed(cluster, "t4")
    async with producer.transaction() as tx:
        await tx.enqueue("t4", b"works", partition=0)
    assert committed(cluster, "t4") == [*before, b"works"]
    assert state(producer) is S.READY


# -- a block -----------------------------------------------------------------------------------


async def test_what_a_block_sends_is_committed_at_its_end(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-46, RA-19: at once, and nothing has to be awaited within."""
    async with new(**LAZY) as producer:
        async with producer.transaction() as tx:
            assert tx is producer
            first = await tx.enqueue("t", b"1")
            second = tx.send_nowait("t", b"2")
            began = now()
        assert now() < began + 1
        assert first.done()
        assert [(await first).offset, (await second).offset] == [0, 1]
        assert committed(cluster) == [b"1", b"2"]
        assert [marker.is_commit for marker in cluster.markers("t", 0)] == [True]
        await works(cluster, producer)


async def test_what_a_block_raises_aborts_it(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """IT-13, TX-45: what was sent does not count, what was not is dropped without a delay."""
    async with new(**LAZY) as producer:
        with pytest.raises(KeyError) as caught:
            async with producer.transaction() as tx:
                sent = await tx.enqueue("t", b"sent")
                await tx.flush()
                dropped = await tx.enqueue("t", b"dropped")
                began = now()
                raise KeyError("mine")
        assert now() < began + 1
        assert not hasattr(caught.value, "__notes__")
        assert (await sent).offset == 0
        with pytest.raises(AbortedError, match="the transaction was aborted") as aborted:
            await dropped
        assert aborted.value.persisted == "no"
        assert stored(cluster) == [b"sent"]
        assert committed(cluster) == []
        await works(cluster, producer)


async def test_records_that_an_abort_drops_are_not_logged(
    cluster: EmbeddedCluster, new: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new(**LAZY) as producer:
        with pytest.raises(KeyError):
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"dropped")
                raise KeyError
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("how", ["commit", "abort"])
async def test_a_block_may_end_its_transaction_by_itself(
    cluster: EmbeddedCluster, new: New, version: int, how: str
) -> None:
    async with new() as producer:
        async with producer.transaction() as tx:
            await tx.enqueue("t", b"1")
            if how == "commit":
                await tx.commit_transaction()
            else:
                await tx.abort_transaction()
        assert committed(cluster) == ([b"1"] if how == "commit" else [])
        await works(cluster, producer)


@pytest.mark.parametrize("goes_on", [False, True], ids=["nothing follows", "another is open"])
async def test_a_block_hears_that_another_task_has_aborted_its_transaction(
    cluster: EmbeddedCluster, new: New, version: int, goes_on: bool
) -> None:
    """Also where that task has begun one of its own since."""
    async with new() as producer:
        sent, aborted = asyncio.Event(), asyncio.Event()

        async def block() -> None:
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                sent.set()
                await aborted.wait()

        task = asyncio.create_task(block())
        await sent.wait()
        await producer.abort_transaction()
        if goes_on:
            await producer.begin_transaction()
        aborted.set()
        with pytest.raises(TransactionAborted, match="aborted by another task, nothing of it"):
            await task
        assert state(producer) is (S.IN_TRANSACTION if goes_on else S.READY)
        if goes_on:
            await producer.abort_transaction()
        await works(cluster, producer)


@pytest.mark.parametrize(
    "aborts",
    [
        # In Python 3.11 it makes a task.
        lambda tx: asyncio.wait_for(tx.abort_transaction(), 5),  # noqa: TID251
        lambda tx: asyncio.gather(tx.abort_transaction()),
        lambda tx: asyncio.create_task(tx.abort_transaction()),
    ],
    ids=["wait_for", "gather", "task"],
)
async def test_a_block_that_aborts_by_what_it_has_started_knows_of_it(
    cluster: EmbeddedCluster, new: New, version: int, aborts: Any
) -> None:
    async with new() as producer:
        async with producer.transaction() as tx:
            await tx.enqueue("t", b"1")
            await aborts(tx)
        await works(cluster, producer)


def another_aborts(producer: Producer[Any, Any]) -> tuple[asyncio.Event, asyncio.Task[None]]:
    """A task that does, when the event is set; it was there before the transaction."""
    begun = asyncio.Event()

    async def other() -> None:
        await begun.wait()
        await producer.abort_transaction()

    return begun, asyncio.create_task(other())


async def test_a_block_that_aborts_knows_of_it_whoever_else_does(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer:
        begun, task = another_aborts(producer)
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            begun.set()
            await tx.abort_transaction()
            await task
        await works(cluster, producer)


async def test_what_became_of_a_block_is_forgotten_when_it_is_used_again(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer:
        begun, task = another_aborts(producer)
        block = producer.transaction()
        with pytest.raises(TransactionAborted, match="by another task"):
            async with block as tx:
                await tx.send("t", b"1")
                begun.set()
                await task
        async with block as tx:
            await tx.enqueue("t", b"2")
            await tx.commit_transaction()
        assert committed(cluster) == [b"2"]


async def test_the_end_of_a_block_leaves_the_transaction_of_another_task_alone(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """Both have heard that the commit failed, and the other one has begun anew at once."""
    async with new(max_block_ms=1000) as producer:
        ready = asyncio.Event()

        async def other() -> None:
            await ready.wait()
            with pytest.raises(TransactionAborted):
                await producer.commit_transaction()
            await producer.abort_transaction()
            await producer.begin_transaction()
            await producer.enqueue("t", b"next")
            await asyncio.sleep(0.5)
            await producer.commit_transaction()

        task = asyncio.create_task(other())
        with pytest.raises(TransactionAborted):
            async with producer.transaction() as tx:
                waits = asyncio.create_task(tx.send("nowhere", b"1"))
                await turns()
                ready.set()
                await asyncio.sleep(0.1)
        await task
        await asyncio.gather(waits, return_exceptions=True)
        assert committed(cluster) == [b"next"]


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
async def test_after_an_abort_that_a_block_did_not_wait_for_the_next_one_can_begin(
    cluster: EmbeddedCluster, new: New, version: int, how: str
) -> None:
    """As soon as it is done. Nobody who uses blocks would ask for its end."""
    async with new(max_block_ms=1000) as producer:

        async def block() -> None:
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                cluster.inject("end_txn", delay=3)
                raise KeyError

        task = asyncio.create_task(block())
        await asyncio.sleep(0.5)
        if how == "cancelled":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else KeyError):
            await task
        with pytest.raises(IllegalStateError, match="the end of abort_transaction"):
            await producer.begin_transaction()
        await asyncio.sleep(5)
        await works(cluster, producer)


async def test_markers_of_the_transaction_before_do_not_fence_who_aborts_the_next(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer:
        cluster.set_marker_delay(50)
        async with producer.transaction() as tx:
            await tx.enqueue("t", b"1")
        with pytest.raises(KeyError):
            async with producer.transaction() as tx:
                await tx.enqueue("t4", b"2")
                await asyncio.sleep(0.01)
                raise KeyError
        cluster.set_marker_delay(0)
        await works(cluster, producer)


async def test_a_commit_does_not_wait_for_serializers_of_the_transaction_before(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    gate = asyncio.Event()

    async def serialize(value: bytes) -> bytes:
        if value == b"slow":
            await gate.wait()
        return value

    async with new(value_serializer=serialize, max_block_ms=1000) as producer:
        await producer.begin_transaction()
        slow = asyncio.create_task(producer.enqueue("t", b"slow"))
        await turns()
        await producer.abort_transaction()
        await works(cluster, producer)
        # And when it is done, the one that waits for its own goes on waiting.
        async with producer.transaction() as tx:
            own = asyncio.create_task(tx.enqueue("t", b"slow"))
            await turns()
            gate.set()
        with pytest.raises(IllegalStateError, match="ended before the record was ready"):
            await slow
        assert (await (await own)).offset == 0
        assert committed(cluster) == [b"slow"]


class Unshown(Exception):
    """Raises where it is shown."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


class UnshownRefusal(SerializationError, Unshown):
    """As one of ours."""

    __repr__ = __str__ = Unshown.__repr__


@pytest.mark.parametrize("error", [Unshown, UnshownRefusal])
async def test_a_record_is_refused_with_an_error_that_cannot_be_shown(
    cluster: EmbeddedCluster, new: New, version: int, error: type[Exception]
) -> None:
    def headers() -> Iterator[tuple[str, bytes]]:
        raise error
        yield

    async with new() as producer:
        await producer.begin_transaction()
        with pytest.raises(error):
            await producer.send("t", b"1", headers=headers())
        with pytest.raises(TransactionAborted, match=error.__name__):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await works(cluster, producer)


class Raising:
    """Gives one thing to send, and then raises; the `begin` one raises at once."""

    def __init__(self, error: BaseException, first: Any = b"of the first", *, begin: bool) -> None:
        self.error = error
        self.first = [first]
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        if self.begin:
            raise self.error
        return self

    def __next__(self) -> Any:
        if not self.first:
            raise self.error
        return self.first.pop()


class RaisingLater(Raising):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> AsyncIterator[Any]:
        if self.begin:
            raise self.error
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        return self.__next__()


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("how", ["records", "later records", "reader", "later tables"])
@pytest.mark.parametrize(
    "error",
    [IllegalStateError("PENDING"), ProducerClosed("another one"), asyncio.CancelledError("task")],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_an_iterable_raises_no_transaction_is_committed_without_the_rest(
    cluster: EmbeddedCluster, new: New, version: int, how: str, error: BaseException, begin: bool
) -> None:
    """Also what the producer itself raises where nothing can be sent now."""
    if not isinstance(error, Exception) and how != "records":
        pytest.skip("may be that this task is cancelled, which fails nothing")
    if begin and how == "reader":
        pytest.skip("a reader begins with its schema")
    table = pa.table({"value": [b"of the first"]})
    async with new() as producer:
        await producer.begin_transaction()
        with pytest.raises(type(error)):
            if how == "records":
                await producer.send_many("t", Raising(error, begin=begin))
            elif how == "later records":
                await producer.send_many("t", RaisingLater(error, begin=begin))
            elif how == "reader":
                batches = Raising(error, table.to_batches()[0], begin=begin)
                await producer.send_table(
                    "t", pa.RecordBatchReader.from_batches(table.schema, batches)
                )
            else:
                await producer.send_table("t", RaisingLater(error, table, begin=begin))
        with pytest.raises(TransactionAborted, match=str(error)):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await works(cluster, producer)


async def test_what_is_no_iterable_of_records_is_missed_at_the_end(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    records: Any = None
    async with new() as producer:
        await producer.begin_transaction()
        with pytest.raises(TypeError, match="of type NoneType, not an iterable of records"):
            await producer.send_many("t", records)
        with pytest.raises(TransactionAborted, match="TypeError"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await works(cluster, producer)


class Zone(datetime.tzinfo):
    """Ends the transaction when it is asked."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def utcoffset(self, when: datetime.datetime | None) -> datetime.timedelta:
        self.end()
        return datetime.timedelta(0)

    def dst(self, when: datetime.datetime | None) -> None:
        return None

    def tzname(self, when: datetime.datetime | None) -> None:
        return None


async def test_a_record_whose_time_ends_its_transaction_is_in_none(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer:
        await producer.warm_up("t")

        def end() -> None:
            producer.abort_transaction().send(None)  # it is over: no broker has heard of it
            with pytest.raises(StopIteration):
                producer.begin_transaction().send(None)

        when = datetime.datetime(2026, 1, 1, tzinfo=Zone(end))
        await producer.begin_transaction()
        with pytest.raises(IllegalStateError, match="ended before the record was ready"):
            await producer.enqueue("t", b"late", timestamp=when)
        await producer.abort_transaction()
        await works(cluster, producer)
        assert stored(cluster) == []


@pytest.mark.parametrize("how", ["send", "enqueue", "send_many", "send_offsets"])
@pytest.mark.parametrize("ends", ["aborts", "commits"])
async def test_what_a_block_has_begun_and_not_waited_for_is_not_of_the_next(
    cluster: EmbeddedCluster, new: New, version: int, how: str, ends: str
) -> None:
    """Also where no broker has heard of the first one, whose end waits for nothing."""
    async with new() as producer:
        await producer.warm_up("t")
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: producer.send("t", b"late"),
            "enqueue": lambda: producer.enqueue("t", b"late"),
            "send_many": lambda: producer.send_many("t", [b"late"]),
            "send_offsets": lambda: producer.send_offsets(OFFSETS, "g"),
        }

        async def late() -> None:
            await calls[how]()

        await producer.begin_transaction()
        task = asyncio.create_task(late())
        if ends == "aborts":
            await producer.abort_transaction()
        else:
            await producer.commit_transaction()
        async with producer.transaction() as tx:
            await tx.send("t", b"next")
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        first = ends == "commits" and outcome is None
        assert isinstance(outcome, KafkaError) or first
        assert committed(cluster) == [b"next"]
        assert cluster.committed_offsets("g") == {}


@pytest.mark.parametrize("error", [BufferFull, BufferTimeout, MetadataNotReady, MetadataTimeout])
async def test_what_users_code_raises_is_no_answer_to_who_does_not_wait(
    cluster: EmbeddedCluster, new: New, version: int, error: type[KafkaError]
) -> None:
    """It has the same type, and yet the record is missing for another reason."""

    def headers() -> Iterator[tuple[str, bytes]]:
        raise error("of another producer")
        yield

    async with new() as producer:
        await producer.warm_up("t")
        with pytest.raises(TransactionAborted):
            async with producer.transaction() as tx:
                with pytest.raises(error):
                    tx.send_nowait("t", b"1", headers=headers())
        await works(cluster, producer)


async def test_a_key_that_is_changed_while_the_value_is_awaited(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Its owner may do that after the call."""

    async def serialize(value: bytes) -> bytes:
        await asyncio.sleep(1)
        return value

    async with new_producer(value_serializer=serialize) as producer:
        key = bytearray(b"key")
        sending = asyncio.ensure_future(producer.send("t", b"value", key=key))
        await asyncio.sleep(0.5)
        key[:] = b"YYY"
        await sending
    (record,) = cluster.records("t")
    assert record.key == b"key"


async def test_a_block_whose_error_ended_it_goes_on_with_that_where_another_task_aborted(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as producer:
        with pytest.raises(KeyError):
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                await asyncio.create_task(tx.abort_transaction())
                raise KeyError
        await works(cluster, producer)


async def refused_too_large(tx: Producer[Any, Any]) -> None:
    with pytest.raises(RecordTooLarge):
        await tx.send("t", HUGE)


async def refused_no_topic(tx: Producer[Any, Any]) -> None:
    with pytest.raises(MetadataTimeout):
        await tx.send("missing", b"x")


async def refused_no_partition(tx: Producer[Any, Any]) -> None:
    with pytest.raises(MetadataTimeout):
        await tx.send("t", b"x", partition=7)


async def refused_invalid_topic(tx: Producer[Any, Any]) -> None:
    with pytest.raises(InvalidTopic):
        await tx.send("no topic", b"x")


async def refused_in_bulk(tx: Producer[Any, Any]) -> None:
    result = await tx.send_many("t", [b"fine", HUGE], raise_on_error=False)
    assert isinstance(result[1], RecordTooLarge)


async def refused_before_the_intake(tx: Producer[Any, Any]) -> None:
    with pytest.raises(BatchDeliveryError):
        await tx.send_many(None, [b"without a topic"])


async def refused_table_behind_another(tx: Producer[Any, Any]) -> None:
    async def tables() -> AsyncIterator[pa.Table]:
        yield pa.table({"value": [b"of the first"]})
        yield pa.table({"value": [3]})

    with pytest.raises(SerializationError):
        await tx.send_table("t", tables())


async def refused_damaged_table(tx: Producer[Any, Any]) -> None:
    whole = pa.array([b"row"] * 2)
    offsets = pa.py_buffer(struct.pack("<3i", 0, 99, 6))
    damaged = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, whole.buffers()[2]])
    chunks = pa.chunked_array([whole, damaged])
    with pytest.raises(SerializationError):
        await tx.send_table("t", pa.table({"value": chunks}))


def failing_reader() -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": [b"of the first"]})
        raise ValueError("the file ends here")

    return pa.RecordBatchReader.from_batches(pa.schema([("value", pa.binary())]), batches())


async def refused_reader_that_fails(tx: Producer[Any, Any]) -> None:
    with pytest.raises(ValueError, match="the file ends here"):
        await tx.send_table("t", failing_reader())


async def refused_records_that_fail(tx: Producer[Any, Any]) -> None:
    def records() -> Iterator[bytes]:
        yield b"of the first"
        raise ValueError("the file ends here")

    with pytest.raises(ValueError, match="the file ends here"):
        await tx.send_many("t", records())


async def refused_later_records_that_fail(tx: Producer[Any, Any]) -> None:
    async def records() -> AsyncIterator[bytes]:
        yield b"of the first"
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down"):
        await tx.send_many("t", records())


async def refused_tables_that_fail(tx: Producer[Any, Any]) -> None:
    async def tables() -> AsyncIterator[pa.Table]:
        yield pa.table({"value": [b"of the first"]})
        raise OSError("the network is down")

    with pytest.raises(OSError, match="the network is down"):
        await tx.send_table("t", tables())


async def refused_table_without_the_column(tx: Producer[Any, Any]) -> None:
    with pytest.raises(SerializationError):
        await tx.send_table("t", pa.table({"other": [b"x"]}))


async def refused_table_for_no_topic(tx: Producer[Any, Any]) -> None:
    with pytest.raises(InvalidTopic):
        await tx.send_table("no topic", pa.table({"value": [b"x"]}))


async def refused_as_no_table(tx: Producer[Any, Any]) -> None:
    with pytest.raises(TypeError):
        await tx.send_table("t", [b"x"])  # type: ignore[arg-type]


async def refused_as_no_list(tx: Producer[Any, Any]) -> None:
    with pytest.raises(TypeError):
        await tx.send_many("t", b"x")


async def rejected_by_the_broker(tx: Producer[Any, Any]) -> None:
    with pytest.raises(DeliveryError):
        await tx.send("t", b"refuse me")


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (refused_too_large, RecordTooLarge),
        (refused_no_topic, MetadataTimeout),
        (refused_no_partition, MetadataTimeout),
        (refused_invalid_topic, InvalidTopic),
        (refused_in_bulk, RecordTooLarge),
        (refused_before_the_intake, InvalidTopic),
        (refused_table_behind_another, SerializationError),
        (refused_damaged_table, SerializationError),
        (refused_reader_that_fails, RecordError),
        (refused_records_that_fail, RecordError),
        (refused_later_records_that_fail, RecordError),
        (refused_tables_that_fail, RecordError),
        (refused_table_without_the_column, SerializationError),
        (refused_table_for_no_topic, InvalidTopic),
        (refused_as_no_table, RecordError),
        (refused_as_no_list, RecordError),
        (rejected_by_the_broker, DeliveryError),
    ],
)
async def test_a_transaction_is_never_committed_without_one_of_its_records(
    cluster: EmbeddedCluster,
    new: New,
    version: int,
    fail: Callable[[Producer[Any, Any]], Awaitable[None]],
    cause: type[KafkaError],
) -> None:
    """KP-25, TX-22, TX-40: also where the block has looked away."""
    async with new(max_block_ms=2_000) as producer:
        with pytest.raises(TransactionAborted, match="was aborted, nothing of it counts") as caught:
            async with producer.transaction() as tx:
                await tx.send("t", b"fine")
                if fail is rejected_by_the_broker:
                    cluster.inject("produce", error="INVALID_RECORD")
                await fail(tx)
        assert isinstance(caught.value.__cause__, cause)
        assert committed(cluster) == []
        # It is empty already where the producer has asked for a new epoch since.
        assert cluster.transaction("tx").state.value in ("CompleteAbort", "Empty")
        await works(cluster, producer)


async def test_a_record_that_nobody_awaits_fails_the_commit(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-29: with its own error as the cause."""
    cluster.inject("produce", error="POLICY_VIOLATION")
    async with new() as producer:
        await producer.begin_transaction()
        delivery = await producer.enqueue("t", b"1")
        with pytest.raises(TransactionAborted, match="POLICY_VIOLATION") as caught:
            await producer.commit_transaction()
        assert caught.value.code == ErrorCode.POLICY_VIOLATION
        assert delivery.exception() is not None
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await works(cluster, producer)


async def test_sends_after_a_failure_are_refused_with_its_cause(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-01: what was queued is dropped."""
    async with new(**SINGLE) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        cluster.inject("produce", error="INVALID_RECORD")
        with pytest.raises(DeliveryError):
            await producer.send("t", b"2")
        for name, call in (
            ("send", lambda: producer.send("t", b"3")),
            ("send", lambda: producer.enqueue("t", b"3")),
            ("send", lambda: producer.send_many("t", [b"3"])),
            ("send_offsets", lambda: producer.send_offsets(OFFSETS, "g")),
            ("commit_transaction", producer.commit_transaction),
        ):
            with pytest.raises(
                TransactionAborted, match=rf"^{name}\(\) .* ABORTABLE_ERROR: .*INVALID_RECORD"
            ):
                await call()
        with pytest.raises(TransactionAborted, match=r"^send\(\) .* ABORTABLE_ERROR: "):
            producer.send_nowait("t", b"3")
        await producer.abort_transaction()
        await works(cluster, producer)
    assert stored(cluster) == [b"1"]


async def test_send_nowait_that_would_have_to_wait_fails_nothing(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new(buffer_memory=20_000, batch_size=10_000, **LAZY) as producer:
        async with producer.transaction() as tx:
            with pytest.raises(MetadataNotReady):
                tx.send_nowait("t", b"1")
            await tx.warm_up("t", "t4")
            await tx.enqueue("t", b"x" * 15_000)
            with pytest.raises(BufferFull):
                tx.send_nowait("t4", b"y" * 15_000)
        assert len(committed(cluster)) == 1


# -- outside of transactions -------------------------------------------------------------------


async def test_nothing_can_be_sent_outside_of_a_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-01: it is refused before it is buffered, and gets into no later transaction."""
    async with new() as producer:
        await producer.warm_up("t")
        for _ in range(2):
            for call in (
                lambda: producer.send("t", b"lost"),
                lambda: producer.enqueue("t", b"lost"),
                lambda: producer.send_many("t", [b"lost"]),
            ):
                with pytest.raises(IllegalStateError, match=r"send\(\) .* state READY: begin_tr"):
                    await call()
            with pytest.raises(IllegalStateError, match="READY"):
                producer.send_nowait("t", b"lost")
            assert producer.health.buffered_bytes == 0
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
    assert stored(cluster) == [b"1", b"1"]


async def test_calls_of_transactions_need_a_transactional_id(new_producer: New) -> None:
    """TX-02."""
    async with new_producer() as producer:
        for name, call in (
            ("begin_transaction", producer.begin_transaction),
            ("commit_transaction", producer.commit_transaction),
            ("abort_transaction", producer.abort_transaction),
            ("begin_transaction", producer.transaction().__aenter__),
            ("send_offsets", lambda: producer.send_offsets(OFFSETS, "g")),
        ):
            with pytest.raises(
                IllegalStateError, match=rf"^{name}\(\): .* give it a transactional_id"
            ):
                await call()
        await producer.send("t", b"1")


async def test_calls_of_transactions_before_the_start_and_after_the_end(new: New) -> None:
    """KP-19, TX-45."""
    producer = new()
    with pytest.raises(ProducerNotStarted):
        await producer.begin_transaction()
    await producer.start()
    await producer.begin_transaction()
    with pytest.raises(IllegalStateError, match=r"begin_transaction\(\) .* IN_TRANSACTION"):
        await producer.begin_transaction()
    await producer.close()
    for call in (
        producer.begin_transaction,
        producer.commit_transaction,
        producer.abort_transaction,
    ):
        with pytest.raises(ProducerClosed):
            await call()


async def test_a_transaction_of_nothing_asks_nobody(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-16."""
    async with new() as producer:
        asked = len(apis(cluster))
        async with producer.transaction():
            pass
        with pytest.raises(KeyError):
            async with producer.transaction():
                raise KeyError
        with pytest.raises(TransactionAborted):
            async with producer.transaction() as tx:
                await refused_too_large(tx)
        assert len(apis(cluster)) == asked


# -- on the wire -------------------------------------------------------------------------------


async def test_a_partition_is_asked_for_while_records_still_come(
    cluster: EmbeddedCluster, new: New
) -> None:
    cluster.set_feature("transaction.version", 1)
    async with new(linger_ms=0) as producer:
        async with producer.transaction():
            await producer.send("t4", b"", partition=0)
        await asyncio.sleep(1)
        async with producer.transaction():
            for number in range(10):
                producer.send_nowait("t4", b"%d" % number, partition=0)
                await asyncio.sleep(0)
            assert producer.metrics()["requests_in_flight"] == 1
    assert len(cluster.received("add_partitions_to_txn")) == 2


@pytest.mark.parametrize("records", [0, 1])
@pytest.mark.parametrize("call", ["commit_transaction", "abort_transaction"])
async def test_the_end_is_told_to_who_asks_again_however_often_he_is_cancelled(
    cluster: EmbeddedCluster, new: New, call: str, records: int
) -> None:
    async with new() as producer:
        for turns in range(1, 5):
            await producer.begin_transaction()
            for _ in range(records):
                await producer.enqueue("t", b"1")
            told = 0
            for _ in range(3):
                task = asyncio.ensure_future(getattr(producer, call)())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                    told += 1
                    break
                await asyncio.sleep(1)
            assert told == 1
        await works(cluster, producer)
    kept = records if call == "commit_transaction" else 0
    assert committed(cluster) == [b"1"] * 4 * kept


async def test_requests_of_a_transaction(cluster: EmbeddedCluster, new: New, version: int) -> None:
    """TX-07, KP-30, TX-42: which ones, in which order, and no newer than they may be."""
    async with new() as producer:
        assert apis(cluster) == ["find_coordinator", "init_producer_id"]
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            await tx.send_offsets(OFFSETS, "g")
    of_one = ["produce", "find_coordinator", "txn_offset_commit", "end_txn"]
    if version == 1:
        of_one[:2] = ["add_partitions_to_txn", "produce", "add_offsets_to_txn", "find_coordinator"]
    assert apis(cluster)[2:] == of_one
    caps = {
        "produce": (11, 13),
        "txn_offset_commit": (4, 5),
        "end_txn": (4, 5),
        "add_partitions_to_txn": (3, 3),
    }
    for request in cluster.requests:
        if request.api in caps:
            assert request.version == caps[request.api][version - 1]
    (request,) = cluster.received("produce")
    assert request.fields["transactional_id"] == "tx"
    assert request.batches[0].is_transactional


async def test_sequences_and_epochs_of_several_transactions(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-33, TX-42: version 2 has another epoch for each, version 1 only after an error."""
    async with new() as producer:
        for failing in (False, False, True, False):
            if failing:
                with pytest.raises(TransactionAborted):
                    async with producer.transaction() as tx:
                        await tx.send("t", b"1")
                        await refused_too_large(tx)
            else:
                async with producer.transaction() as tx:
                    await tx.send("t", b"1")
    sent = [
        (b.producer_epoch, b.base_sequence) for r in cluster.received("produce") for b in r.batches
    ]
    if version == 1:
        assert sent == [(0, 0), (0, 1), (0, 2), (1, 0)]
    else:
        assert sent == [(0, 0), (1, 0), (2, 0), (3, 0)]


async def test_partitions_are_added_once_and_together(cluster: EmbeddedCluster, new: New) -> None:
    """TX-18."""
    cluster.set_feature("transaction.version", 1)
    async with new() as producer, producer.transaction() as tx:
        await tx.send_many("t4", [b"%d" % n for n in range(50)])
        for partition in range(4):
            await tx.send("t4", b"again", partition=partition)
    added = [p for r in cluster.received("add_partitions_to_txn") for p in r.partitions]
    assert len(added) == len(set(added)) == 4


def led_together(cluster: EmbeddedCluster) -> tuple[int, list[int]]:
    """A broker, and which partitions of a new topic "t6" it leads, the first among them."""
    cluster.create_topic("t6", partitions=6)
    node = cluster.leader("t6", 0)
    return node, [n for n in range(6) if cluster.leader("t6", n) == node]


async def test_partitions_that_come_while_one_is_added_are_added_together(
    cluster: EmbeddedCluster, new: New
) -> None:
    """Version 2: the broker asks the coordinator, and reads nothing else meanwhile."""
    node, places = led_together(cluster)
    async with new() as producer:
        await producer.warm_up("t6")
        async with producer.transaction() as tx:
            cluster.pause(node)
            deliveries = []
            for n in (*places, 0):
                deliveries.append(await tx.enqueue("t6", b"value", partition=n))
                await turns(20)
            cluster.resume(node)
            for delivery in deliveries:
                await delivery
    sent = [[each.partition for each in r.batches] for r in cluster.received("produce", node=node)]
    assert len(places) == 3
    assert [sorted(each) for each in sent] == [[0], places]


async def test_what_lingers_for_new_partitions_goes_with_the_request_that_adds_one(
    cluster: EmbeddedCluster, new: New
) -> None:
    """Version 2: else it would be held until that is answered, and added by another one."""
    node, places = led_together(cluster)
    size = {"batch_size": 1000, "batch_max_bytes": 1000}
    async with new(**size, linger_ms=50_000, adaptive_linger=False) as producer:
        await producer.warm_up("t6")
        async with producer.transaction() as tx:
            for _ in range(2):
                for n in places[1:]:
                    await tx.enqueue("t6", b"small", partition=n)
                await tx.enqueue("t6", bytes(460), partition=places[0])
                await (await tx.enqueue("t6", bytes(461), partition=places[0]))  # it is full
            # In the second round they are in the transaction, and go on lingering.
            requests = cluster.received("produce", node=node)
            sent = [sorted(each.partition for each in r.batches) for r in requests]
            assert sent == [places, places[:1]]


async def test_a_producer_takes_over_other_ids_one_after_the_other(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new(transactional_id="a") as one, new(transactional_id="b") as other:
        for name in ("a", "b", "a", "c"):
            await one._take_over(name)
            async with one.transaction() as tx:
                await tx.send("t4", name.encode(), partition=0)
                await tx.send_offsets({("in", 0): 7}, name)
        with pytest.raises(KafkaError, match="another producer has taken over"):
            async with other.transaction() as tx:
                await tx.enqueue("t4", b"fenced", partition=0)
    assert committed(cluster, "t4") == [b"a", b"b", b"a", b"c"]
    assert cluster.committed_offsets("c")[("in", 0)].offset == 7


async def test_an_id_that_cannot_be_taken_over_is_the_end_of_the_producer(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new(max_block_ms=50) as producer:
        for node in cluster.node_ids:
            cluster.pause(node)
        with pytest.raises(TransactionTimeout):
            await producer._take_over("b")
        with pytest.raises(IllegalStateError):
            await producer.begin_transaction()
        for node in cluster.node_ids:
            cluster.resume(node)


async def test_the_partition_of_a_record_that_is_refused_is_not_added(
    cluster: EmbeddedCluster, new: New
) -> None:
    """KP-34: a partition is added when a record for it was appended."""
    cluster.set_feature("transaction.version", 1)
    async with new() as producer:
        with pytest.raises(TransactionAborted):
            async with producer.transaction() as tx:
                with pytest.raises(RecordTooLarge):
                    await tx.send("t4", bytes(2_000_000), partition=3)
        async with producer.transaction() as tx:
            await tx.send("t4", b"fits", partition=1)
    assert [r.partitions for r in cluster.received("add_partitions_to_txn")] == [[("t4", 1)]]


async def test_a_producer_id_that_is_used_up_is_replaced(
    cluster: EmbeddedCluster, new: New
) -> None:
    """TX-42: the end of a transaction brings another one, whose epoch is 0."""
    async with new() as producer:
        await works(cluster, producer)
        producer_id = cluster.transaction("tx").producer_id
        cluster.set_producer_epoch("tx", 32766)
        sequences = producer._sequences
        assert sequences is not None
        sequences.producer_epoch = 32766
        await works(cluster, producer)
        assert (sequences.producer_id != producer_id, sequences.producer_epoch) == (True, 0)
        await works(cluster, producer)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_the_version_follows_the_cluster_at_run_time(
    cluster: EmbeddedCluster, new: New, before: int, after: int
) -> None:
    """TX-42: from the next transaction on, once a new connection has told of it."""
    cluster.set_feature("transaction.version", before)
    async with new() as producer:
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            change_version(cluster, after)
            await tx.send("t", b"2")
        epoch = cluster.transaction("tx").producer_epoch
        await works(cluster, producer)
    assert [r.version for r in cluster.received("end_txn")] == [3 + before, 3 + after]
    used = {r.version for r in cluster.received("produce")}
    assert used == {11, 13}
    # Either way nothing late of the one can get into the other.
    assert epoch == 1
    assert committed(cluster) == [b"1", b"2"]


async def test_brokers_that_are_busy_with_markers_are_given_a_moment(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-06, KP-30: after a few transactions hardly any of them asks too early in version 2."""
    cluster.set_marker_delay(4)
    async with new(**SINGLE) as producer:
        await producer.warm_up("t")
        began = now()
        for number in range(30):
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"%d" % number)
        # A retry of Produce takes 100 ms, one of AddPartitionsToTxn up to 20.
        assert producer.metrics()["record_retry_total"] <= 6
        assert (now() - began) / 30 < 0.035
    await asyncio.sleep(1)
    assert len(committed(cluster)) == 30


# -- offsets -----------------------------------------------------------------------------------


async def test_offsets_count_only_with_their_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """KP-26, TX-07."""
    async with new() as producer:
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            await tx.send_offsets(OFFSETS, "g")
            assert cluster.committed_offsets("g") == {}
        first = cluster.committed_offsets("g")
        assert {place: known.offset for place, known in first.items()} == OFFSETS
        with pytest.raises(KeyError):
            async with producer.transaction() as tx:
                await tx.send_offsets({("in", 0): 99}, "g")
                raise KeyError
        assert cluster.committed_offsets("g") == first
        # Offsets alone are a transaction, too; and none at all is nothing.
        async with producer.transaction() as tx:
            await tx.send_offsets({}, "g")
            place = TopicPartition("in", 0)
            await tx.send_offsets({place: OffsetAndMetadata(7, "note", 3)}, "g")
        assert cluster.committed_offsets("g")["in", 0][:3] == (7, 3, "note")


async def test_offsets_of_several_groups_go_to_their_coordinators(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """Spec 9.7: each group has its own coordinator."""
    cluster.move_coordinator("g1", 1, "group")
    cluster.move_coordinator("g2", 2, "group")
    async with new() as producer, producer.transaction() as tx:
        await asyncio.gather(tx.send_offsets(OFFSETS, "g1"), tx.send_offsets(OFFSETS, "g2"))
    assert {r.node_id for r in cluster.received("txn_offset_commit")} == {1, 2}
    for group in ("g1", "g2"):
        assert len(cluster.committed_offsets(group)) == 2


async def test_a_consumer_that_its_group_gave_up_commits_nothing(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-10: its records neither."""
    cluster.set_group("g", 3, {"me": None})
    async with new() as producer:
        for group, code in (
            (ConsumerGroupMetadata("g", 2, "me"), ErrorCode.ILLEGAL_GENERATION),
            (ConsumerGroupMetadata("g", 3, "you"), ErrorCode.UNKNOWN_MEMBER_ID),
        ):
            with pytest.raises(TransactionAborted) as caught:
                async with producer.transaction() as tx:
                    await tx.send("t", b"1")
                    await tx.send_offsets(OFFSETS, group)
            assert caught.value.code == code
        assert committed(cluster) == []
        async with producer.transaction() as tx:
            await tx.send_offsets(OFFSETS, ConsumerGroupMetadata("g", 3, "me"))
        assert len(cluster.committed_offsets("g")) == 2


@pytest.mark.parametrize("held", ["add_offsets_to_txn", "txn_offset_commit"])
@pytest.mark.parametrize("answered", [True, False])
async def test_offsets_that_nobody_waited_for_are_sent_again_with_the_next_transaction(
    cluster: EmbeddedCluster, new: New, version: int, held: str, answered: bool
) -> None:
    """Whoever retries his input asks for the same offsets: they were those of an aborted one."""
    if version == 2 and held == "add_offsets_to_txn":
        pytest.skip("there is no such request")
    async with new() as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        fault = cluster.inject(held, hold=True)
        sending = asyncio.create_task(producer.send_offsets(OFFSETS, "g"))
        await fault.reached()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        if answered:
            fault.release()
            await asyncio.sleep(1)
            await producer.abort_transaction()
        else:
            aborting = asyncio.create_task(producer.abort_transaction())
            await asyncio.sleep(1)
            fault.release()
            await aborting
        assert cluster.committed_offsets("g") == {}
        async with producer.transaction() as tx:
            await tx.send("t", b"2")
            await tx.send_offsets(OFFSETS, "g")
        assert committed(cluster) == [b"2"]
        assert [each.offset for each in cluster.committed_offsets("g").values()] == [5, 6]


async def test_of_offsets_that_are_sent_in_turns_the_last_ones_count(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer, producer.transaction() as tx:
        fault = cluster.inject("txn_offset_commit", hold=True)
        sending = asyncio.create_task(tx.send_offsets({("in", 0): 5}, "g"))
        await fault.reached()
        sending.cancel()
        fault.release()
        await tx.send_offsets({("in", 0): 6}, "g")
        await tx.send_offsets({("in", 0): 5}, "g")
    assert [each.offset for each in cluster.committed_offsets("g").values()] == [5]


async def test_offsets_of_which_an_answer_tells_two_things_are_sent_again(
    cluster: EmbeddedCluster, new: New, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = wire.TxnOffsetCommitRequest.decode
    place = TopicPartition("in", 0)
    answers = 0

    def twice(
        self: wire.TxnOffsetCommitRequest, version: int, body: bytes
    ) -> wire.TxnOffsetCommitResponse:
        nonlocal answers
        answers += 1
        if answers > 1:
            return decode(self, version, body)
        # Once refused, once not.
        refused = struct.pack(">ih", 0, ErrorCode.ILLEGAL_GENERATION) + b"\0"
        parts = b"\x03" + refused + struct.pack(">ih", 0, 0) + b"\0"
        return decode(self, 3, bytes(4) + b"\x02" + b"\x03in" + parts + b"\0\0")

    cluster.inject("txn_offset_commit", error="ILLEGAL_GENERATION")
    monkeypatch.setattr(wire.TxnOffsetCommitRequest, "decode", twice)
    async with new() as producer, producer.transaction() as tx:
        await tx.send("t", b"1")
        await tx.send_offsets({place: 5}, "g")
    assert answers == 2
    assert committed(cluster) == [b"1"]
    assert cluster.committed_offsets("g")[place].offset == 5


class KafkaOffset(NamedTuple):
    offset: int
    metadata: str


class Confluent:
    """confluent-kafka's TopicPartition."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        self.metadata = None
        self.leader_epoch = None


@pytest.mark.parametrize(
    "offsets",
    [
        {TopicPartition("in", 0): 5},
        {("in", 0): 5},
        {TopicPartition("in", 0): OffsetAndMetadata(5)},
        {TopicPartition("in", 0): KafkaOffset(5, "")},
        [Confluent("in", 0, 5), Confluent("in", 1, -1001)],
    ],
)
def test_offsets_are_taken_as_consumers_give_them(offsets: Any) -> None:
    assert offset_map(offsets) == {TopicPartition("in", 0): OffsetAndMetadata(5)}


class Membership(NamedTuple):
    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None = None


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("g", ConsumerGroupMetadata("g")),
        (Membership("g", 4, "me"), ConsumerGroupMetadata("g", 4, "me")),
        (Membership("g", 4, "me", "i"), ConsumerGroupMetadata("g", 4, "me", "i")),
        (b"CGMDv2:\xff\xff\xff\xffmy-group\0\0\1", ConsumerGroupMetadata("my-group")),
        (b"CGMDv2:\xff\xff\xff\xffg\0\0\0inst\0", ConsumerGroupMetadata("g", -1, "", "inst")),
        (
            b"CGMDv2:" + (7).to_bytes(4, sys.byteorder) + b"g\0me\0\1",
            ConsumerGroupMetadata("g", 7, "me"),
        ),
    ],
)
def test_groups_are_taken_as_consumers_give_them(
    group: Any, expected: ConsumerGroupMetadata
) -> None:
    assert group_metadata(group) == expected


@pytest.mark.parametrize(
    ("offsets", "group", "says"),
    [
        (OFFSETS, None, "group is of type NoneType"),
        (OFFSETS, "", "an empty id"),
        (OFFSETS, ConsumerGroupMetadata("g", 4), "generation_id=4 and no member_id"),
        (OFFSETS, Membership("g", "4", "me"), "generation_id .* '4'"),  # type: ignore[arg-type]
        (
            OFFSETS,
            ConsumerGroupMetadata("g", 2**40, "me"),
            "generation_id .* from -1 to 2147483647",
        ),
        (OFFSETS, Membership("g", 1, "me", 7), "group_instance_id .* is 7"),  # type: ignore[arg-type]
        (OFFSETS, "g\ud800", "group_id is .* no text"),
        (OFFSETS, "g" * 40_000, "group_id has 40000 bytes"),
        (OFFSETS, b"something", "not what consumer_group_metadata"),
        (OFFSETS, b"CGMDv2:\xff", "not what consumer_group_metadata"),
        (5, "g", "offsets is of type int"),
        ("in", "g", "offsets is of type str"),
        ({"in": 5}, "g", "'in' is no partition"),
        ({("in", -1): 5}, "g", "is no partition"),
        ({("in", 0): "5"}, "g", "is '5': give an int"),
        ({("in", 0): True}, "g", "is True: give an int"),
        ({("in", 0): -1}, "g", "cannot be less than 0"),
        ([Confluent("in", 0, 5), Confluent("in", 0, 6)], "g", "has two for in-0, 5 and 6"),
        ({("in", 0): 2**63}, "g", "the offset of .* must be from 0 to"),
        ({("in", 2**31): 5}, "g", "the partition of 'in' is 2147483648"),
        ({("in\ud800", 0): 5}, "g", "the topic of an offset is .* no text"),
        ({("in", 0): OffsetAndMetadata(5, "\ud800")}, "g", "the metadata of .* no text"),
        ({("in", 0): OffsetAndMetadata(5, "", 2**31)}, "g", "the leader epoch of"),
        ({("in", 0): OffsetAndMetadata(5, "", "x")}, "g", "the leader epoch of"),  # type: ignore[arg-type]
    ],
)
async def test_bad_offsets_and_groups_are_refused_and_change_nothing(
    cluster: EmbeddedCluster, new: New, offsets: Any, group: Any, says: str
) -> None:
    """KP-26."""
    async with new() as producer:
        async with producer.transaction() as tx:
            with pytest.raises((TypeError, ValueError), match=says):
                await tx.send_offsets(offsets, group)
            await tx.send("t", b"1")
        assert committed(cluster) == [b"1"]


# -- another producer --------------------------------------------------------------------------


async def fenced_at_a_send(producer: Producer[Any, Any]) -> None:
    await producer.send("t4", b"late", partition=1)


async def fenced_at_offsets(producer: Producer[Any, Any]) -> None:
    await producer.send_offsets(OFFSETS, "g")


async def fenced_at_the_commit(producer: Producer[Any, Any]) -> None:
    await producer.commit_transaction()


async def fenced_at_the_abort(producer: Producer[Any, Any]) -> None:
    await producer.abort_transaction()


@pytest.mark.parametrize(
    "fenced",
    [fenced_at_a_send, fenced_at_offsets, fenced_at_the_commit, fenced_at_the_abort],
)
async def test_a_producer_is_fenced_by_a_newer_one_with_its_id(
    cluster: EmbeddedCluster,
    new: New,
    version: int,
    fenced: Callable[[Producer[Any, Any]], Awaitable[None]],
) -> None:
    """IT-13, TX-20, TX-21: its open transaction is aborted, and it can do nothing any more."""
    async with new() as old:
        await old.begin_transaction()
        await old.send("t", b"old")
        async with new() as young:
            with pytest.raises((ProducerFenced, DeliveryError, TransactionAborted)):
                await fenced(old)
            if state(old) is not S.FATAL_ERROR:
                # Only a coordinator can tell an old epoch from a fenced one.
                with pytest.raises(ProducerFenced, match="has taken over transactional_id='tx'"):
                    await old.abort_transaction()
            for name, call in (
                ("begin_transaction", old.begin_transaction),
                ("commit_transaction", old.commit_transaction),
                ("abort_transaction", old.abort_transaction),
                ("send_offsets", lambda: old.send_offsets(OFFSETS, "g")),
                ("send", lambda: old.send("t", b"late")),
                ("send", lambda: old.enqueue("t", b"late")),
                ("send", lambda: old.send_many("t", [b"late"])),
            ):
                with pytest.raises(
                    ProducerFenced, match=rf"^{name}\(\) .* FATAL_ERROR: .* has taken over"
                ):
                    await call()
            with pytest.raises(ProducerFenced, match=r"^send\(\) .* FATAL_ERROR: "):
                old.send_nowait("t", b"late")
            assert "has taken over" in str(old.health.problem)
            async with young.transaction() as tx:
                await tx.send("t", b"young")
    assert committed(cluster) == [b"young"]


async def test_every_call_of_a_fenced_producer_raises_it_and_says_so_in_its_docstring(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as old, new():
        await old.begin_transaction()
        with pytest.raises(ProducerFenced):
            await fenced_at_offsets(old)

        async def nowait() -> None:
            old.send_nowait("t", b"late")

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "send": lambda: old.send("t", b"late"),
            "enqueue": lambda: old.enqueue("t", b"late"),
            "send_nowait": nowait,
            "send_many": lambda: old.send_many("t", [b"late"]),
            "send_table": lambda: old.send_table("t", None),  # type: ignore[arg-type]
            "flush": old.flush,
            "warm_up": lambda: old.warm_up("t"),
            "partitions_for": lambda: old.partitions_for("t"),
            "committed_offsets": lambda: old.committed_offsets("g", [("in", 0)]),
            "start": old.start,
            "begin_transaction": old.begin_transaction,
            "commit_transaction": old.commit_transaction,
            "abort_transaction": old.abort_transaction,
            "send_offsets": lambda: old.send_offsets(OFFSETS, "g"),
        }
        for name, call in calls.items():
            with pytest.raises(ProducerFenced):
                await call()
            raises = (getattr(Producer, name).__doc__ or "").split("Raises", 1)[1]
            assert "ProducerFenced" in raises, name


async def test_a_block_of_a_fenced_producer_says_what_went_wrong_and_that_it_is_fenced(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as old, new():
        with pytest.raises(KeyError) as caught:
            async with old.transaction() as tx:
                await asyncio.gather(tx.send("t", b"late"), return_exceptions=True)
                raise KeyError
    assert "aborting the transaction failed: " in caught.value.__notes__[0]
    assert "another producer has taken over" in caught.value.__notes__[0]


async def test_a_transaction_that_is_open_for_too_long_is_given_up_by_the_broker(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """Spec 9.10: never committed."""
    async with new(transaction_timeout_ms=5_000) as producer:
        with pytest.raises(KafkaError, match="transaction_timeout_ms=5000"):
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                await asyncio.sleep(10)
        assert state(producer) is S.FATAL_ERROR
    assert committed(cluster) == []


# -- coordinators ------------------------------------------------------------------------------

COORDINATED = ["init_producer_id", "add_partitions_to_txn", "add_offsets_to_txn", "end_txn"]


@pytest.mark.parametrize("api", [*COORDINATED, "txn_offset_commit", "find_coordinator"])
@pytest.mark.parametrize(
    "trouble",
    [
        {"error": "COORDINATOR_LOAD_IN_PROGRESS", "times": 3},
        {"error": "NOT_COORDINATOR"},
        {"error": "COORDINATOR_NOT_AVAILABLE", "times": 2},
        {"error": "CONCURRENT_TRANSACTIONS", "times": 3},
        {"drop": "before"},
        {"drop": "after"},
        {"no_answer": True},
        {"throttle_ms": 3_000},
    ],
    ids=lambda trouble: "-".join(map(str, trouble.values())),
)
async def test_trouble_with_a_coordinator_passes(
    cluster: EmbeddedCluster, new: New, version: int, api: str, trouble: dict[str, Any]
) -> None:
    """TX-11, TX-19, TX-25, TX-47, KP-23: and everything is done exactly once."""
    fault = cluster.inject(api, **trouble)
    async with new(request_timeout_ms=5_000) as producer:
        for number in range(2):
            async with producer.transaction() as tx:
                await tx.send("t", b"%d" % number)
                await tx.send_offsets({("in", 0): number}, "g")
    assert committed(cluster) == [b"0", b"1"]
    assert cluster.committed_offsets("g")["in", 0].offset == 1
    added = api in ("add_partitions_to_txn", "add_offsets_to_txn")
    assert fault.hits == (0 if added and version == 2 else trouble.get("times", 1))


async def test_a_coordinator_that_moves_is_followed(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-11."""
    async with new() as producer:
        for node in (1, 2, 1):
            cluster.move_coordinator("tx", node, load_ms=500)
            cluster.move_coordinator("g", 3 - node, "group", load_ms=500)
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                await tx.send_offsets(OFFSETS, "g")
    assert len(committed(cluster)) == 3


@pytest.mark.parametrize("phase", ["begin", "end"])
async def test_a_coordinator_that_dies_is_replaced(
    cluster: EmbeddedCluster, new: New, version: int, phase: str
) -> None:
    """IT-14, TX-11: without waiting for it to come back."""
    cluster.create_topic("safe", partitions=1)
    async with new() as producer:
        await works(cluster, producer)
        began = now()
        async with producer.transaction() as tx:
            if phase == "end":
                await tx.send("safe", b"1")
            coordinator = cluster.coordinator("tx")
            await cluster.stop_broker(coordinator)
            cluster.move_coordinator("tx", 3 - coordinator)
            await tx.send("safe", b"2")
        assert now() < began + 10
        assert committed(cluster, "safe")[-1] == b"2"
        await cluster.start_broker(coordinator)


async def test_a_denied_transactional_id_fails_the_start_which_can_be_tried_again(
    cluster: EmbeddedCluster, new: New
) -> None:
    """TX-12, KP-24."""
    for api, code in (
        ("init_producer_id", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
        ("init_producer_id", "CLUSTER_AUTHORIZATION_FAILED"),
        ("find_coordinator", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    ):
        producer = new()
        cluster.inject(api, error=code)
        with pytest.raises(AuthorizationError, match=code):
            await producer.start()
        assert not left_running()
        await producer.start()
        await works(cluster, producer)
        await producer.close()


async def test_topics_that_are_denied_are_named(cluster: EmbeddedCluster, new: New) -> None:
    """TX-14."""
    cluster.set_feature("transaction.version", 1)
    cluster.inject("add_partitions_to_txn", error="TOPIC_AUTHORIZATION_FAILED")
    async with new() as producer:
        with pytest.raises(TransactionAborted, match="not authorized for t") as caught:
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"1")
        assert isinstance(caught.value.__cause__, AuthorizationError)
        await works(cluster, producer)


async def test_an_old_broker_without_epoch_bumps_goes_on_with_its_sequences(
    new_producer: New, network: Any
) -> None:
    """TX-33: before Kafka 2.5."""
    async with EmbeddedCluster(
        topics={"t": 1, "t4": 4},
        network=network,
        finalized_features={},
        request_versions={22: (0, 2), 0: (3, 8), 26: (0, 1), 28: (0, 2), 24: (0, 1), 25: (0, 1)},
    ) as old:
        producer = new_producer(
            transactional_id="tx", bootstrap_servers=old.bootstrap_servers, connector=old.connector
        )
        async with producer:
            await works(old, producer)
            with pytest.raises(TransactionAborted):
                async with producer.transaction() as tx:
                    await tx.send("t", b"1")
                    old.inject("produce", error="INVALID_RECORD")
                    with pytest.raises(DeliveryError):
                        await tx.send("t", b"2")
            async with producer.transaction() as tx:
                await tx.send("t", b"3")
            sent = [
                b.base_sequence
                for r in old.received("produce")
                for b in r.batches
                if b.topic == "t"
            ]
            assert sent == [0, 1, 1]
            assert committed(old) == [b"3"]
            # What nobody knows ends it.
            old.inject("produce", drop="after", times=None)
            with pytest.raises(KafkaError) as caught:
                async with producer.transaction() as tx:
                    delivery = await tx.enqueue("t", b"4")
                    await asyncio.sleep(130)
            assert isinstance(delivery.exception(), DeliveryTimeout)
            assert isinstance(caught.value, TransactionAborted)
            with pytest.raises(TransactionAborted, match="too old to begin anew"):
                await producer.begin_transaction()
            old.clear_faults()


# -- answers to records ------------------------------------------------------------------------


async def test_a_batch_that_is_too_large_is_split_within_its_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """SI-23."""
    async with new(**LAZY) as producer:
        cluster.inject("produce", error="MESSAGE_TOO_LARGE")
        async with producer.transaction() as tx:
            for number in range(200):
                await tx.enqueue("t", b"%0100d" % number)
        assert producer.metrics()["batch_split_total"] == 1
        assert committed(cluster) == [b"%0100d" % n for n in range(200)]
        sent = [batch for r in cluster.received("produce") for batch in r.batches]
        assert all(batch.is_transactional for batch in sent)
        await works(cluster, producer)


async def test_a_leader_that_moves_within_a_transaction_is_followed(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(**SINGLE) as producer:
        async with producer.transaction() as tx:
            for number in range(6):
                await tx.enqueue("t", b"%d" % number)
                cluster.move_leader("t", 0, 1 + number % 2)
                await asyncio.sleep(0.01)
        assert committed(cluster) == [b"%d" % n for n in range(6)]


@pytest.mark.parametrize(
    "code",
    [
        "CONCURRENT_TRANSACTIONS",
        "NOT_LEADER_OR_FOLLOWER",
        "COORDINATOR_NOT_AVAILABLE",
        "NOT_ENOUGH_REPLICAS",
    ],
)
async def test_what_may_pass_is_repeated(
    cluster: EmbeddedCluster, new: New, version: int, code: str
) -> None:
    """KP-30: the broker may be busy with the markers of the last transaction."""
    async with new() as producer:
        cluster.inject("produce", error=code, times=2)
        async with producer.transaction() as tx:
            await tx.enqueue("t", b"1")
        assert committed(cluster) == [b"1"]


@pytest.mark.parametrize(
    "code",
    [
        "INVALID_PRODUCER_EPOCH",
        "INVALID_TXN_STATE",
        "TRANSACTION_ABORTABLE",
        "OUT_OF_ORDER_SEQUENCE_NUMBER",
    ],
)
async def test_what_cannot_pass_within_the_transaction_can_be_aborted(
    cluster: EmbeddedCluster, new: New, version: int, code: str
) -> None:
    """TX-21, TX-39, TX-41."""
    async with new() as producer:
        cluster.inject("produce", error=code)
        with pytest.raises(TransactionAborted, match=code):
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"1")
        await works(cluster, producer)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("PRODUCER_FENCED", ProducerFenced),
        ("INVALID_PRODUCER_ID_MAPPING", BrokerError),
        ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", BrokerError),
    ],
)
async def test_what_cannot_pass_at_all_ends_the_producer(
    cluster: EmbeddedCluster, new: New, version: int, code: str, kind: type[KafkaError]
) -> None:
    """TX-20, TX-41, SI-20."""
    async with new() as producer:
        cluster.inject("produce", error=code)
        with pytest.raises(kind):
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"1")
        assert state(producer) is S.FATAL_ERROR
        with pytest.raises(kind):
            await producer.begin_transaction()


def change_version(cluster: EmbeddedCluster, level: int) -> None:
    """Connections tell of it, when they are made."""
    cluster.set_feature("transaction.version", level)
    for node in cluster.node_ids:
        cluster.kill_connections(node)


@contextlib.asynccontextmanager
async def upgraded(
    cluster: EmbeddedCluster, producer: Producer[Any, Any], error: str, *, times: int = 1
) -> AsyncIterator[None]:
    """The last transaction of version 1, with two records. It is committed at the end of the block,
    and there is no epoch for the first one of version 2."""
    change_version(cluster, 1)
    await works(cluster, producer)
    cluster.inject("init_producer_id", error=error, times=times)
    async with producer.transaction() as tx:
        await tx.send("t", b"before")
        change_version(cluster, 2)
        await tx.send("t", b"committed")
        yield
    assert committed(cluster)[-2:] == [b"before", b"committed"]


async def needs_epoch(
    cluster: EmbeddedCluster, producer: Producer[Any, Any], error: str, *, times: int = 1
) -> None:
    """A transaction is committed, and an abort must ask for the epoch of the next one."""
    async with upgraded(cluster, producer, error, times=times):
        pass
    assert state(producer) is S.ABORTABLE_ERROR


REFUSED_EPOCHS = ["TRANSACTION_ABORTABLE", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"]


@pytest.mark.parametrize("error", REFUSED_EPOCHS)
async def test_a_transaction_is_committed_though_there_is_no_epoch_for_the_next_one(
    cluster: EmbeddedCluster, new: New, error: str
) -> None:
    """TX-39: an abort asks for it again."""
    async with new() as producer:
        await needs_epoch(cluster, producer, error, times=2)
        with pytest.raises(IllegalStateError, match=f"was committed, but.*{error}"):
            await producer.begin_transaction()
        with pytest.raises(KafkaError, match=f"was committed, but.*{error}") as caught:
            await producer.abort_transaction()
        assert not isinstance(caught.value, TransactionAborted)
        assert caught.value.code == ErrorCode[error]
        await producer.abort_transaction()
        await works(cluster, producer)


@pytest.mark.parametrize("error", REFUSED_EPOCHS)
async def test_a_block_asks_again_for_the_epoch_that_was_refused(
    cluster: EmbeddedCluster, new: New, error: str
) -> None:
    """TX-39: after a commit, and after an abort; what it cannot get it raises, or waits for."""
    async with new(max_block_ms=1_000) as producer:
        await needs_epoch(cluster, producer, error)
        await works(cluster, producer)
        await needs_epoch(cluster, producer, error, times=2)
        with pytest.raises(KafkaError, match="was committed, but") as refused:
            async with producer.transaction():
                raise AssertionError("not begun")
        assert not isinstance(refused.value, TransactionAborted)
        held = cluster.inject("init_producer_id", hold=True)
        with pytest.raises(TransactionTimeout, match="abort_transaction"):
            async with producer.transaction():
                raise AssertionError("not begun")
        held.release()
        await asyncio.sleep(0.1)  # it went on, and is done
        await works(cluster, producer)
        change_version(cluster, 1)
        await works(cluster, producer)
        cluster.inject("add_partitions_to_txn", error="UNKNOWN_PRODUCER_ID")
        cluster.inject("init_producer_id", error=error)
        with pytest.raises(TransactionAborted, match="UNKNOWN_PRODUCER_ID") as caught:
            async with producer.transaction() as tx:
                await tx.enqueue("t", b"lost")
        assert not hasattr(caught.value, "__notes__")  # it is aborted, and the next one asks again
        await works(cluster, producer)
    assert b"lost" not in stored(cluster)


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_a_start_that_is_cancelled_again_and_again_leaves_nothing(
    cluster: EmbeddedCluster, new: New, times: int
) -> None:
    """As anyio does in each turn of the loop."""
    held = cluster.inject("init_producer_id", hold=True)
    producer = new()
    starting = asyncio.create_task(producer.start(), name="Task-start")
    await asyncio.sleep(1)
    for _ in range(times):
        starting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.sleep(0.1)
    assert left_running() == []
    held.release()
    await producer.start()
    await works(cluster, producer)
    await producer.close()


@pytest.mark.parametrize("left", ["timed out", "cancelled"])
async def test_a_block_asks_again_where_nobody_knew_that_the_epoch_was_refused(
    cluster: EmbeddedCluster, new: New, left: str
) -> None:
    """The one before had given up waiting."""
    cluster.set_feature("transaction.version", 1)

    async def block() -> None:
        async with producer.transaction() as tx:
            await tx.enqueue("t", b"lost")

    async with new(max_block_ms=1_000) as producer:
        cluster.inject("add_partitions_to_txn", error="UNKNOWN_PRODUCER_ID")
        held = cluster.inject("init_producer_id", error="TRANSACTION_ABORTABLE", hold=True)
        task = asyncio.ensure_future(block())
        await held.reached()
        if left == "cancelled":
            task.cancel()
        with pytest.raises((TransactionAborted, asyncio.CancelledError)):
            await task
        assert task.cancelled() == (left == "cancelled")
        held.release()
        await asyncio.sleep(0.1)
        assert state(producer) is S.ABORTABLE_ERROR
        before = len(cluster.received("init_producer_id"))
        await works(cluster, producer)
        assert len(cluster.received("init_producer_id")) == before + 1


async def test_who_asks_for_an_epoch_aborts_nothing(cluster: EmbeddedCluster, new: New) -> None:
    """The block that has committed its transaction itself hears nothing of it."""
    async with new() as producer:
        async with upgraded(cluster, producer, "TRANSACTION_ABORTABLE"):
            await producer.commit_transaction()
            # Another task.
            await asyncio.ensure_future(producer.abort_transaction())
        await works(cluster, producer)


async def test_a_closed_producer_whose_epoch_was_refused_says_that_it_is_closed(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as producer:
        await needs_epoch(cluster, producer, "TRANSACTION_ABORTABLE")
    with pytest.raises(ProducerClosed, match="begin_transaction"):
        async with producer.transaction():
            raise AssertionError("not begun")


async def test_a_commit_that_is_done_is_so_though_its_producer_is_of_no_use_any_more(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as producer:
        async with upgraded(cluster, producer, "UNKNOWN_SERVER_ERROR"):
            pass
        assert state(producer) is S.FATAL_ERROR
        with pytest.raises(KafkaError, match="was committed, but there is no next one"):
            await producer.begin_transaction()


async def test_a_producer_whose_epoch_was_refused_is_closed_and_asks_no_one(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as producer:
        await needs_epoch(cluster, producer, "TRANSACTION_ABORTABLE")
        before = len(cluster.received("init_producer_id"))
        began = now()
    assert now() < began + 1
    assert len(cluster.received("init_producer_id")) == before


async def test_records_that_expire_can_only_be_aborted(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-29: what was on its way is waited for."""
    timeouts = {"request_timeout_ms": 2_000, "delivery_timeout_ms": 3_000, "linger_ms": 0}
    async with new(**timeouts) as producer:
        fault = cluster.inject("produce", no_answer=True, times=None)
        with pytest.raises(TransactionAborted) as caught:
            async with producer.transaction() as tx:
                delivery = await tx.enqueue("t", b"1")
        error = delivery.exception()
        assert isinstance(error, DeliveryTimeout)
        assert isinstance(caught.value.__cause__, DeliveryTimeout)
        assert fault.hits >= 1
        cluster.clear_faults()
        await works(cluster, producer)
        assert committed(cluster) == []


async def test_the_end_waits_for_what_was_given_up_on_its_way(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-23: nothing of a transaction may reach a broker after its end."""
    timeouts = {"request_timeout_ms": 2_000, "delivery_timeout_ms": 2_000, "linger_ms": 0}
    async with new(**timeouts) as producer:
        held = cluster.inject("produce", hold=True, topic="t")
        task = asyncio.ensure_future(commit_one(producer))
        await held.reached()
        with pytest.raises(KeyError):
            async with Aborting(producer, task):
                raise KeyError
        ended = [r for r in cluster.requests if r.api == "end_txn"]
        (produced,) = cluster.received("produce")
        assert ended
        assert ended[0].received_at >= produced.received_at + 1.9
        held.release()
        await works(cluster, producer)


async def test_a_late_answer_that_there_is_no_transaction_changes_nothing(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-45: the record had expired while it was under way."""
    timeouts = {"request_timeout_ms": 2_000, "delivery_timeout_ms": 2_000, "linger_ms": 0}
    async with new(**timeouts, retry_backoff_ms=1_000) as producer:
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        late = cluster.inject("produce", error="INVALID_TXN_STATE", delay=1.5)
        with pytest.raises(TransactionAborted) as caught:
            async with producer.transaction() as tx:
                delivery = await tx.enqueue("t", b"1")
        assert late.hits == 1
        assert isinstance(delivery.exception(), DeliveryTimeout)
        assert isinstance(caught.value.__cause__, DeliveryTimeout)
        (ended,) = cluster.received("end_txn")
        assert ended.received_at >= cluster.received("produce")[1].received_at + 1.5
        await works(cluster, producer)
        await asyncio.sleep(2)  # the answer is there now at the latest
        await works(cluster, producer)
    assert committed(cluster) == []


async def commit_one(producer: Producer[Any, Any]) -> None:
    await producer.begin_transaction()
    await producer.enqueue("t", b"1")


class Aborting:
    """Aborts when the block is left."""

    def __init__(self, producer: Producer[Any, Any], task: asyncio.Future[None]) -> None:
        self.producer = producer
        self.task = task

    async def __aenter__(self) -> None:
        await self.task

    async def __aexit__(self, *_: object) -> None:
        await self.producer.abort_transaction()


@pytest.mark.parametrize("bug", [IllegalStateError("no such move"), KeyError("oops")])
async def test_a_bug_of_ours_ends_the_producer(
    cluster: EmbeddedCluster,
    new: New,
    bug: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TX-38: nothing can be trusted any more, and nobody waits for ever."""

    def broken(*_: object) -> None:
        raise bug

    async with new() as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        assert producer._transactions is not None
        monkeypatch.setattr(producer._transactions._manager, "answered", broken)
        with pytest.raises(IllegalStateError, match="has lost its way") as caught:
            await producer.commit_transaction()
        assert caught.value.__cause__ is bug
        with pytest.raises(IllegalStateError, match="has lost its way"):
            await producer.begin_transaction()
    assert "a transaction has lost its way" in caplog.text


async def test_what_is_on_its_way_when_a_transaction_is_aborted_gets_its_own_answer(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """RA-15: and only then the abort ends."""
    async with new(linger_ms=0) as producer:
        await producer.warm_up("t")
        await producer.begin_transaction()
        held = cluster.inject("produce", hold=True)
        sent = await producer.enqueue("t", b"on its way")
        await held.reached()
        aborting = asyncio.create_task(producer.abort_transaction())
        await asyncio.sleep(1)
        assert not sent.done()
        assert not aborting.done()
        held.release()
        await aborting
        assert sent.result().offset == 0
        await works(cluster, producer)


async def test_retries_of_an_aborted_transaction_go_on_where_the_epoch_stays(
    new_producer: New, network: Any
) -> None:
    """TX-24, RA-15: before Kafka 2.5. What was never sent is dropped all the same."""
    async with EmbeddedCluster(
        topics={"t": 1, "t4": 4},
        network=network,
        finalized_features={},
        request_versions={22: (0, 2)},
    ) as old:
        options = {"bootstrap_servers": old.bootstrap_servers, "connector": old.connector}
        async with new_producer(transactional_id="tx", **SINGLE, **options) as producer:
            await works(old, producer)
            await producer.begin_transaction()
            old.inject("produce", error="NOT_ENOUGH_REPLICAS", times=3)
            first = await producer.enqueue("t", b"%0100d" % 1)
            await asyncio.sleep(0.01)
            second = await producer.enqueue("t", b"%0100d" % 2)
            await producer.abort_transaction()
            assert (await first).offset == 0
            assert isinstance(second.exception(), AbortedError)
            await works(old, producer)
            assert committed(old) == []


# -- records that wait -------------------------------------------------------------------------


async def test_a_commit_takes_along_who_waits_for_room(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """Spec 9.6: they were sent before the commit was called."""
    async with new(buffer_memory=20_000, batch_size=10_000, **LAZY) as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", hold=True)
        await producer.begin_transaction()
        sends = [asyncio.create_task(producer.send("t", b"x" * 9_000)) for _ in range(6)]
        await turns()
        assert producer._pool.waiting
        committing = asyncio.create_task(producer.commit_transaction())
        await held.reached()
        held.release()
        await committing
        assert len(committed(cluster)) == 6
        await asyncio.gather(*sends)


@pytest.mark.parametrize("waits_for", ["memory", "metadata"])
async def test_an_abort_refuses_who_waits(
    cluster: EmbeddedCluster, new: New, version: int, waits_for: str
) -> None:
    """Spec 9.6: and none of them gets into a later transaction."""
    async with new(buffer_memory=20_000, batch_size=10_000, **LAZY) as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", hold=True)
        await producer.begin_transaction()
        topic = "t" if waits_for == "memory" else "t4"
        first = [asyncio.create_task(producer.enqueue("t", b"x" * 9_000)) for _ in range(2)]
        await asyncio.sleep(0.01)
        cluster.inject("metadata", hold=True, times=None)
        waiting = [
            asyncio.create_task(producer.send(topic, b"y" * 9_000, partition=0)) for _ in range(3)
        ]
        await turns()
        assert producer.health.waiting_senders
        aborting = asyncio.create_task(producer.abort_transaction())
        await asyncio.sleep(1)
        for task in waiting:
            with pytest.raises((TransactionAborted, AbortedError), match="transaction was aborted"):
                await task
        held.release()
        await aborting
        await asyncio.gather(*first, return_exceptions=True)
        cluster.clear_faults()
        await works(cluster, producer)
        assert committed(cluster) == []


async def test_a_failure_refuses_who_waits(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(buffer_memory=20_000, batch_size=10_000, **LAZY) as producer:
        await producer.warm_up("t")
        await producer.begin_transaction()
        cluster.inject("produce", error="INVALID_RECORD")
        sends = [asyncio.create_task(producer.send("t", b"x" * 9_000)) for _ in range(8)]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert all(isinstance(each, KafkaError) for each in outcomes[:1])
        assert any(isinstance(each, TransactionAborted) for each in outcomes)
        await producer.abort_transaction()
        await works(cluster, producer)
        assert committed(cluster) == []


async def test_a_commit_ends_when_the_last_who_waits_is_cancelled(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new(max_block_ms=600_000) as producer:
        await producer.begin_transaction()
        waiting = asyncio.create_task(producer.send("missing", b"1"))
        await asyncio.sleep(1)
        committing = asyncio.create_task(producer.commit_transaction())
        await asyncio.sleep(1)
        assert not committing.done()
        waiting.cancel()
        began = now()
        await committing
        assert now() < began + 1


async def test_a_record_that_waited_in_vain_fails_the_commit_that_waits_for_it(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new(max_block_ms=5_000) as producer:
        await producer.begin_transaction()
        waiting = asyncio.create_task(producer.send("missing", b"1"))
        await asyncio.sleep(1)
        with pytest.raises(TransactionAborted, match="missing"):
            await producer.commit_transaction()
        with pytest.raises(MetadataTimeout):
            await waiting
        await producer.abort_transaction()
        await works(cluster, producer)


def released() -> memoryview:
    view = memoryview(b"1")
    view.release()
    return view


async def slow(value: bytes) -> bytes:
    """A serializer."""
    if value.startswith(b"slow"):
        await asyncio.sleep(5)
    if value.endswith(b"bad"):
        raise ValueError("no schema")
    return value


async def test_a_commit_waits_for_serializers(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(value_serializer=slow) as producer:
        await producer.begin_transaction()
        waiting = asyncio.create_task(producer.send("t", b"slow"))
        await asyncio.sleep(1)
        await producer.commit_transaction()
        await waiting
        assert committed(cluster) == [b"slow"]
        await producer.begin_transaction()
        waiting = asyncio.create_task(producer.send("t", b"slow and bad"))
        await asyncio.sleep(1)
        with pytest.raises(TransactionAborted, match="no schema"):
            await producer.commit_transaction()
        with pytest.raises(SerializationError):
            await waiting
        await producer.abort_transaction()
        await works(cluster, producer)


async def test_a_commit_that_waits_for_a_record_fails_when_the_close_gives_that_up(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(max_block_ms=60_000) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        waiting = asyncio.create_task(producer.send("missing", b"2"))
        await asyncio.sleep(1)
        committing = asyncio.create_task(producer.commit_transaction())
        await asyncio.sleep(1)
        await producer.close(1)
        for each in (waiting, committing):
            with pytest.raises((ProducerClosed, TransactionAborted)):
                await each
    assert committed(cluster) == []


#: What a serializer may raise that uses another producer, or waits for another task.
FOREIGN = [
    ProducerClosed("other"),
    IllegalStateError("other"),
    BufferFull("other"),
    MetadataNotReady("other"),
    TransactionAborted("other"),
    asyncio.CancelledError("other"),
]


def raises(value: bytes) -> bytes:
    """A serializer."""
    if value.isdigit():
        raise FOREIGN[int(value)]
    return value


async def raises_later(value: bytes) -> bytes:
    """Another one."""
    await asyncio.sleep(0)
    return raises(value)


@pytest.mark.parametrize("error", range(len(FOREIGN)), ids=lambda n: type(FOREIGN[n]).__name__)
@pytest.mark.parametrize("serializer", [raises, raises_later])
@pytest.mark.parametrize("way", ["send", "enqueue", "send_many"])
async def test_no_transaction_is_committed_over_a_serializers_error_whatever_it_is(
    cluster: EmbeddedCluster,
    new: New,
    version: int,
    error: int,
    serializer: Callable[[bytes], Any],
    way: str,
) -> None:
    bad = str(error).encode()
    async with new(value_serializer=serializer) as producer:
        with pytest.raises(TransactionAborted) as caught:
            async with producer.transaction() as tx:
                if way == "send_many":
                    result = await tx.send_many("t", [b"a", bad, b"b"], raise_on_error=False)
                    results = list(result)
                else:
                    send = getattr(tx, way)
                    calls = (send("t", value) for value in (b"a", bad, b"b"))
                    results = await asyncio.gather(*calls, return_exceptions=True)
                assert isinstance(results[1], SerializationError)
                assert results[1].__cause__ is FOREIGN[error]
        assert isinstance(caught.value.__cause__, SerializationError)
        assert committed(cluster) == []
        await works(cluster, producer)


class Panic(BaseException):
    """What extensions in Rust raise."""


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("error", [*FOREIGN, Panic()], ids=lambda error: type(error).__name__)
async def test_no_transaction_is_committed_over_a_record_whose_headers_raise(
    cluster: EmbeddedCluster, new: New, version: int, error: BaseException, many: bool
) -> None:
    def headers() -> Iterator[tuple[str, bytes]]:
        yield "name", b"value"
        raise error

    async with new() as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        with pytest.raises(type(error)):
            if many:
                bad: Any = Record("t", b"2", headers=headers())
                (result,) = await producer.send_many(None, [bad], raise_on_error=False)
                assert isinstance(result, BaseException)
                raise result
            await producer.send("t", b"2", headers=headers())
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert committed(cluster) == []
        await works(cluster, producer)


@pytest.mark.parametrize("way", ["send", "enqueue", "send_many", "send_many, async"])
@pytest.mark.parametrize("observed", [False, True], ids=["", "interceptors"])
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("error", [Panic, GeneratorExit])
async def test_no_transaction_is_committed_over_a_panic_of_a_serializer(
    cluster: EmbeddedCluster,
    new: New,
    error: type[BaseException],
    later: bool,
    observed: bool,
    way: str,
) -> None:
    def panics(value: bytes) -> bytes:
        if value == b"bad":
            raise error
        return value

    async def panics_later(value: bytes) -> bytes:
        return panics(value)

    async def records() -> AsyncIterator[bytes]:
        yield b"bad"

    async with new(
        value_serializer=panics_later if later else panics,
        interceptors=[Interceptor()] if observed else [],
    ) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"good")
        with pytest.raises(error):
            if way == "send_many":
                await producer.send_many("t", [b"bad"])
            elif way == "send_many, async":
                await producer.send_many("t", records())
            else:
                await getattr(producer, way)("t", b"bad")
        with pytest.raises(TransactionAborted, match=error.__name__):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert committed(cluster) == []


class CancelledPairs(list[tuple[str, bytes]]):
    """Headers that ask somebody who was cancelled."""

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        raise asyncio.CancelledError


@pytest.mark.parametrize("of", ["serializer", "headers"])
async def test_whoever_swallowed_a_cancellation_is_not_cancelled_by_his_own_code(
    cluster: EmbeddedCluster, new: New, of: str
) -> None:
    """He does not know that the record is not in, so no transaction is committed without it."""

    async def late(value: bytes) -> bytes:
        return raises(value)

    async def goes_on() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await producer.begin_transaction()
        if of == "headers":
            with pytest.raises(asyncio.CancelledError):
                await producer.send("t", b"a", headers=CancelledPairs())
        else:
            with pytest.raises(SerializationError, match="CancelledError: other"):
                await producer.send("t", b"5")
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()

    async with new(value_serializer=late, interceptors=[Interceptor()]) as producer:
        task = asyncio.create_task(goes_on())
        await asyncio.sleep(1)
        task.cancel()
        await task


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_transaction_goes_on_without_a_record_whose_sender_was_cancelled(
    cluster: EmbeddedCluster, new: New, when: str
) -> None:
    """Also where he has swallowed a cancellation before, or was asked for it before he sends."""

    async def goes_on() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await producer.begin_transaction()
        me = asyncio.current_task()
        assert me is not None
        if when == "before":
            me.cancel()
        else:
            asyncio.get_running_loop().call_later(1, me.cancel)
        with pytest.raises(asyncio.CancelledError):
            await producer.send("t", b"slow")
        await producer.send("t", b"1")
        await producer.commit_transaction()

    async with new(value_serializer=slow) as producer:
        task = asyncio.create_task(goes_on())
        await asyncio.sleep(1)
        task.cancel()
        await task
        assert committed(cluster) == [b"1"]


class Cancelled(Interceptor):
    """Asks somebody who was cancelled."""

    def on_send(self, record: Record) -> Record:
        raise asyncio.CancelledError

    def on_acknowledgement(self, metadata: Any, error: Any, headers: Any) -> None:
        raise asyncio.CancelledError


async def test_what_interceptors_raise_is_no_matter_of_the_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(interceptors=[Cancelled()]) as producer:
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
        assert committed(cluster) == [b"1"]
        await producer.begin_transaction()
        with pytest.raises(RecordTooLarge):
            await producer.send("t", HUGE)
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()


async def test_who_does_not_wait_for_the_end_of_a_transaction_lets_the_loop_turn(
    new: New, version: int
) -> None:
    """Else it could not come to its end, however often he asks."""
    async with new() as producer:
        await producer.warm_up("t")
        assert producer._transactions is not None
        producer._transactions._max_block = 0.0
        await producer.begin_transaction()
        await producer.enqueue("t", b"1")
        turned: list[int] = []
        for number in range(3):
            asyncio.get_running_loop().call_soon(turned.append, number)
            with pytest.raises(TransactionTimeout):
                await producer.commit_transaction()
            assert turned == [*range(number + 1)]


@pytest.mark.parametrize("late", ["serializer", "metadata"])
async def test_a_close_waits_for_a_commit_and_for_what_that_waits_for(
    cluster: EmbeddedCluster, new: New, version: int, late: str
) -> None:
    async with new(max_block_ms=60_000, value_serializer=slow) as producer:
        await producer.begin_transaction()
        if late == "serializer":
            waiting = asyncio.create_task(producer.send("t", b"slow"))
        else:
            waiting = asyncio.create_task(producer.send("new", b"slow"))
        await asyncio.sleep(1)
        committing = asyncio.create_task(producer.commit_transaction())
        await asyncio.sleep(1)
        closing = asyncio.create_task(producer.close(30))
        await asyncio.sleep(1)
        with pytest.raises(ProducerClosed):
            await producer.send("t", b"too late")
        cluster.create_topic("new")
        await asyncio.gather(waiting, committing, closing)
        topic = "t" if late == "serializer" else "new"
        assert [r.value for r in cluster.records(topic, committed=True)] == [b"slow"]


@pytest.mark.parametrize("value", [b"slow", b"slow and bad"])
async def test_a_record_whose_serializer_is_too_slow_is_no_matter_of_another_transaction(
    cluster: EmbeddedCluster, new: New, value: bytes
) -> None:
    async with new(value_serializer=slow) as producer:
        await producer.begin_transaction()
        waiting = asyncio.create_task(producer.send("t", value))
        await asyncio.sleep(1)
        await producer.abort_transaction()
        await producer.begin_transaction()
        with pytest.raises((IllegalStateError, SerializationError)):
            await waiting
        await producer.send("t", b"1")
        await producer.commit_transaction()
        assert committed(cluster) == [b"1"]


@pytest.mark.parametrize(
    ("record", "raised"),
    [
        ({"topic": ["t"], "value": b"1"}, InvalidTopic),
        ({"topic": "t", "value": b"1", "headers": 5}, SerializationError),
        ({"topic": "t", "value": released()}, ValueError),
        ({"topic": "t", "value": object()}, SerializationError),
    ],
)
async def test_whatever_a_record_is_refused_for_no_transaction_is_committed_without_it(
    cluster: EmbeddedCluster, new: New, record: dict[str, Any], raised: type[Exception]
) -> None:
    async with new() as producer:
        await producer.begin_transaction()
        await producer.enqueue("t", b"1")
        with pytest.raises(raised):
            await producer.enqueue(**record)
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await works(cluster, producer)


async def test_no_transaction_is_committed_without_a_record_that_nobody_may_ask_metadata_for(
    cluster: EmbeddedCluster, new: New
) -> None:
    async with new() as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        producer._cluster.fatal_error = AuthenticationError("the password was changed")
        with pytest.raises(AuthenticationError):
            await producer.enqueue("unknown", b"2")
        with pytest.raises(TransactionAborted, match="password"):
            await producer.commit_transaction()
        await producer.abort_transaction()


class Own(Interceptor):
    """The user's own code, which ends the transaction while it sees the record b"last"."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.end: Callable[[], Coroutine[Any, Any, None]]

    def sees(self, where: str, value: Any) -> None:
        if where == self.where and value == b"last":
            # What `create_task` does first where tasks are eager.
            with contextlib.suppress(StopIteration):
                self.end().send(None)

    def on_send(self, record: Record) -> Record:
        self.sees("on_send", record.value)
        return record

    def on_acknowledgement(self, metadata: Any, error: Any, headers: Any) -> None:
        if error is not None:
            self.sees("on_acknowledgement", b"last")

    def serialize(self, value: bytes) -> bytes:
        self.sees("serializer", value)
        return value

    async def serialize_later(self, value: bytes) -> bytes:
        return self.serialize(value)

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        self.sees("partitioner", value)
        return 0

    def headers(self) -> Iterator[tuple[str, bytes]]:
        self.sees("headers", b"last")
        yield "name", b"value"

    async def send(self, producer: Producer[Any, Any], way: str) -> None:
        headers = self.headers() if self.where == "headers" else None
        if way == "nowait":
            producer.send_nowait("t", b"last", headers=headers)
        else:
            await producer.enqueue("new" if way == "in line" else "t", b"last", headers=headers)


@pytest.fixture
def own(new: New, where: str, way: str) -> tuple[Own, Producer[Any, Any]]:
    """It is all that there is of users' code, so that the record goes the way of its kind."""
    it = Own(where)
    serializer = it.serialize_later if way == "later" else it.serialize
    options: dict[str, Any] = {}
    if where == "serializer" or way == "later":
        options["value_serializer"] = serializer
    if where == "partitioner":
        options["partitioner"] = it
    if where.startswith("on_"):
        options["interceptors"] = [it]
    return it, new(**options)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("way", ["nowait", "waits", "later", "in line"])
@pytest.mark.parametrize("where", ["serializer", "partitioner", "on_send", "headers"])
async def test_a_record_whose_own_code_aborts_its_transaction_is_in_no_other(
    cluster: EmbeddedCluster, own: tuple[Own, Producer[Any, Any]], way: str, restarts: bool
) -> None:
    code, producer = own

    async def end() -> None:
        producer.abort_transaction().send(None)  # it is over; the turn of the others is not awaited
        if restarts:
            await producer.begin_transaction()

    code.end = end
    cluster.create_topic("new")
    async with producer:
        await producer.warm_up("t")
        await producer.begin_transaction()
        with pytest.raises(IllegalStateError):
            await code.send(producer, way)
        if restarts:
            await producer.abort_transaction()
        async with producer.transaction() as tx:
            await tx.send("t", b"next")
        assert stored(cluster) == [b"next"]
        assert stored(cluster, "new") == []


@pytest.mark.parametrize("way", ["nowait", "waits", "later", "in line"])
@pytest.mark.parametrize("where", ["serializer", "partitioner", "on_send", "headers"])
async def test_a_commit_by_a_records_own_code_is_not_over_that_record(
    cluster: EmbeddedCluster, own: tuple[Own, Producer[Any, Any]], way: str
) -> None:
    code, producer = own
    code.end = producer.commit_transaction
    cluster.create_topic("new")
    async with producer:
        await producer.begin_transaction()
        await producer.send("t", b"first")
        if code.where == "partitioner" or (code.where, way) == ("serializer", "later"):
            await code.send(producer, way)  # the commit waits for it
            await producer.commit_transaction()
            assert committed(cluster) + committed(cluster, "new") == [b"first", b"last"]
        else:
            with pytest.raises(IllegalStateError, match="state COMMITTING"):
                await code.send(producer, way)
            with contextlib.suppress(TransactionAborted):
                await producer.commit_transaction()
        with contextlib.suppress(IllegalStateError):
            await producer.abort_transaction()
        before = committed(cluster)
        await works(cluster, producer)
        assert committed(cluster) == before


@pytest.mark.parametrize("way", ["nowait", "later"])
@pytest.mark.parametrize("where", ["on_acknowledgement"])
async def test_a_commit_by_an_interceptor_that_hears_of_a_refusal_is_not_over_that(
    cluster: EmbeddedCluster, own: tuple[Own, Producer[Any, Any]], way: str
) -> None:
    code, producer = own
    code.end = producer.commit_transaction
    async with producer:
        await producer.begin_transaction()
        await producer.send("t", b"first")
        with pytest.raises(RecordTooLarge):
            if way == "nowait":
                producer.send_nowait("t", HUGE)
            else:
                await producer.send("t", HUGE)
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert committed(cluster) == []


# -- timeouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["commit", "abort"])
async def test_a_call_that_timed_out_goes_on_and_can_be_made_again(
    cluster: EmbeddedCluster, new: New, version: int, name: str
) -> None:
    """TX-17, IT-13."""
    async with new(max_block_ms=1_000) as producer:
        call = producer.commit_transaction if name == "commit" else producer.abort_transaction
        await producer.begin_transaction()
        await producer.send("t", b"1")
        held = cluster.inject("end_txn", hold=True)
        began = now()
        for _ in range(2):
            with pytest.raises(TransactionTimeout, match=rf"1 s \(max_block_ms\); .*{name}_tr"):
                await call()
        assert now() == pytest.approx(began + 2)
        for other in (
            producer.begin_transaction,
            producer.abort_transaction if name == "commit" else producer.commit_transaction,
            lambda: producer.send("t", b"2"),
            lambda: producer.send_offsets(OFFSETS, "g"),
        ):
            with pytest.raises(IllegalStateError, match=f"call {name}_transaction"):
                await other()
        held.release()
        await asyncio.sleep(1)
        with pytest.raises(IllegalStateError, match=f"call {name}_transaction"):
            await producer.begin_transaction()
        await call()
        assert committed(cluster) == ([b"1"] if name == "commit" else [])
        await works(cluster, producer)


async def test_offsets_that_timed_out_go_on_and_a_commit_waits_for_them(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-17, IT-13."""
    async with new(max_block_ms=1_000) as producer:
        await producer.begin_transaction()
        held = cluster.inject("txn_offset_commit", hold=True)
        for _ in range(2):
            with pytest.raises(TransactionTimeout, match="send_offsets"):
                await producer.send_offsets(OFFSETS, "g")
        with pytest.raises(TransactionTimeout):
            await producer.commit_transaction()
        assert cluster.received("end_txn") == []
        held.release()
        await producer.commit_transaction()
        assert len(cluster.received("txn_offset_commit")) == 1
        assert len(cluster.committed_offsets("g")) == 2


async def test_offsets_that_timed_out_can_be_aborted(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(max_block_ms=1_000) as producer:
        cluster.inject("txn_offset_commit", error="COORDINATOR_LOAD_IN_PROGRESS", times=None)
        with pytest.raises(TransactionTimeout, match="COORDINATOR_LOAD_IN_PROGRESS"):
            async with producer.transaction() as tx:
                await tx.send_offsets(OFFSETS, "g")
        cluster.clear_faults()
        await works(cluster, producer)
        assert cluster.committed_offsets("g") == {}


@pytest.mark.parametrize("fails", [False, True])
async def test_an_abort_does_not_wait_for_a_groups_coordinator(
    cluster: EmbeddedCluster, new: New, version: int, fails: bool
) -> None:
    async with new(max_block_ms=1_000) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        cluster.move_coordinator("g", -1, "group")
        with pytest.raises(TransactionTimeout, match="send_offsets"):
            await producer.send_offsets(OFFSETS, "g")
        if fails:
            with pytest.raises(RecordTooLarge):
                await producer.send("t", HUGE)
        began = now()
        await producer.abort_transaction()
        assert now() - began < 0.5
        await works(cluster, producer)


async def test_new_partitions_do_not_wait_for_a_groups_coordinator(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new(max_block_ms=1_000) as producer:
        await producer.begin_transaction()
        cluster.move_coordinator("g", -1, "group")
        offsets = asyncio.create_task(producer.send_offsets(OFFSETS, "g"))
        await asyncio.sleep(0.1)
        began = now()
        await producer.send("t", b"1", partition=0)
        assert now() - began < 0.5
        with pytest.raises(TransactionTimeout):
            await offsets
        await producer.abort_transaction()


async def test_rows_do_not_go_on_in_the_next_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    more = asyncio.Event()

    async def rows() -> AsyncIterator[bytes]:
        yield b"1"
        await more.wait()
        yield b"2"

    async with new() as producer:
        await producer.begin_transaction()
        sending = asyncio.create_task(producer.send_many("t", rows(), raise_on_error=False))
        await asyncio.sleep(0.1)
        await producer.commit_transaction()
        await producer.begin_transaction()
        more.set()
        with pytest.raises(IllegalStateError, match="not sent in the transaction that is open"):
            await sending
        await producer.commit_transaction()
        assert stored(cluster) == [b"1"]


async def test_a_table_that_comes_while_its_transaction_is_committed_does_no_harm_to_it(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    more = asyncio.Event()

    async def tables() -> AsyncIterator[pa.Table]:
        yield pa.table({"value": [b"1"]})
        await more.wait()
        yield pa.table({"value": [b"2"]})

    async with new() as producer:
        await producer.begin_transaction()
        cluster.inject("produce", delay=1)
        sending = asyncio.create_task(producer.send_table("t", tables()))
        await asyncio.sleep(0.1)
        committing = asyncio.create_task(producer.commit_transaction())
        await asyncio.sleep(0.1)
        more.set()
        with pytest.raises(IllegalStateError, match="state COMMITTING"):
            await sending
        await committing
        assert committed(cluster) == [b"1"]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_table_that_comes_late_is_not_of_the_next_transaction(
    cluster: EmbeddedCluster, new: New, version: int, begun: bool
) -> None:
    async def tables() -> AsyncIterator[pa.Table]:
        await asyncio.sleep(1)
        yield pa.table({"value": [b"late"]})

    async with new() as producer:
        if begun:
            await producer.begin_transaction()
        sending = asyncio.create_task(producer.send_table("t", tables()))
        await asyncio.sleep(0)
        if begun:
            await producer.abort_transaction()
        await producer.begin_transaction()
        with pytest.raises(IllegalStateError, match="not sent in the transaction that is open"):
            await sending
        await producer.send("t", b"1")
        await producer.commit_transaction()
        assert committed(cluster) == [b"1"]


def first(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
    return 0


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("own", [{}, {"partitioner": first}], ids=["default", "own"])
async def test_records_that_let_the_loop_turn_do_not_go_on_in_the_next_transaction(
    cluster: EmbeddedCluster, new: New, own: dict[str, Any], many: bool
) -> None:
    """Of version 1: nobody has heard of what was buffered, so the abort ends at once."""
    cluster.set_feature("transaction.version", 1)

    async def send(producer: Producer[Any, Any]) -> None:
        if many:
            await producer.send_many("t", [b"x" * 1000] * 2000)
        else:
            for _ in range(1000):
                await producer.enqueue("t", b"x" * 1000)

    async with new(**LAZY, **own) as producer:
        await producer.warm_up("t")
        await producer.begin_transaction()
        sending = asyncio.create_task(send(producer))
        await asyncio.sleep(0)  # it has taken in so much that others have their turn
        await producer.abort_transaction()
        await producer.begin_transaction()
        with pytest.raises(IllegalStateError, match=r"state READY"):
            await sending
        await producer.commit_transaction()
        assert stored(cluster) == []


async def test_a_record_whose_partitioner_raised_is_not_committed_over(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    def broken(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        return 0 // (value != b"bad")

    async with new(partitioner=broken) as producer:
        with pytest.raises(TransactionAborted, match="raised ZeroDivisionError"):
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                with pytest.raises(InvalidPartition, match="raised ZeroDivisionError"):
                    await tx.send("t", b"bad")
        assert committed(cluster) == []


async def test_a_start_that_timed_out_can_be_tried_again(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """KP-22, IT-13: nothing is left of the first try, and nothing else can be done before."""
    producer = new(max_block_ms=1_000)
    cluster.inject("init_producer_id", error="COORDINATOR_LOAD_IN_PROGRESS", times=None)
    for _ in range(2):
        with pytest.raises(TransactionTimeout, match="COORDINATOR_LOAD_IN_PROGRESS"):
            await producer.start()
        assert not left_running()
        for call in (
            producer.begin_transaction,
            producer.commit_transaction,
            producer.abort_transaction,
            lambda: producer.send_offsets(OFFSETS, "g"),
        ):
            with pytest.raises(ProducerNotStarted):
                await call()
    cluster.clear_faults()
    await producer.start()
    await works(cluster, producer)


# -- cancellation ------------------------------------------------------------------------------


async def cancelled(call: Awaitable[Any], cluster: EmbeddedCluster, api: str) -> None:
    """Cancel a call while this request of it is under way."""
    held = cluster.inject(api, hold=True)
    task = asyncio.ensure_future(call)
    await held.reached()
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.release()


@pytest.mark.parametrize("api", ["find_coordinator", "init_producer_id"])
async def test_a_start_that_is_cancelled_can_be_tried_again(
    cluster: EmbeddedCluster, new: New, version: int, api: str
) -> None:
    """KP-18: there is nothing to be closed yet."""
    producer = new()
    starting = asyncio.ensure_future(producer.start())
    await asyncio.sleep(0)
    with pytest.raises(IllegalStateError, match=r"cancel start\(\) instead"):
        await producer.close(0)
    await cancelled(starting, cluster, api)
    assert not left_running()
    await producer.start()
    await works(cluster, producer)


@pytest.mark.parametrize("name", ["commit", "abort"])
async def test_an_end_that_is_cancelled_goes_on(
    cluster: EmbeddedCluster, new: New, version: int, name: str
) -> None:
    async with new() as producer:
        call = producer.commit_transaction if name == "commit" else producer.abort_transaction
        await producer.begin_transaction()
        await producer.send("t", b"1")
        await cancelled(call(), cluster, "end_txn")
        with pytest.raises(IllegalStateError, match=f"call {name}_transaction"):
            await producer.begin_transaction()
        await call()
        assert committed(cluster) == ([b"1"] if name == "commit" else [])
        await works(cluster, producer)


async def test_a_commit_that_is_cancelled_before_its_records_are_stored_goes_on(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    async with new() as producer:
        await producer.begin_transaction()
        await producer.enqueue("t", b"1")
        await cancelled(producer.commit_transaction(), cluster, "produce")
        await producer.commit_transaction()
        assert committed(cluster) == [b"1"]
        await works(cluster, producer)


async def in_a_block(producer: Producer[Any, Any], then: Callable[[], Awaitable[object]]) -> None:
    async with producer.transaction():
        await then()


@pytest.mark.parametrize("api", ["produce", "txn_offset_commit"])
async def test_a_block_that_is_cancelled_is_aborted(
    cluster: EmbeddedCluster, new: New, version: int, api: str
) -> None:
    async with new() as producer:

        async def send() -> None:
            await producer.send("t", b"1")
            await producer.send_offsets(OFFSETS, "g")

        held = cluster.inject(api, hold=True)
        task = asyncio.ensure_future(in_a_block(producer, send))
        await held.reached()
        task.cancel()
        await asyncio.sleep(0.1)
        held.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert state(producer) is S.READY
        assert committed(cluster) == []
        await works(cluster, producer)


async def test_a_block_that_is_cancelled_at_its_end_is_committed_all_the_same(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """What is true cannot be known then: the commit is called again to hear of it."""
    async with new() as producer:
        await cancelled(in_a_block(producer, lambda: producer.send("t", b"1")), cluster, "end_txn")
        with pytest.raises(IllegalStateError, match="call commit_transaction"):
            async with producer.transaction():
                raise AssertionError
        await producer.commit_transaction()
        assert committed(cluster) == [b"1"]
        await works(cluster, producer)


async def test_a_block_that_is_cancelled_twice_ends_at_once(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """The abort goes on, and can be waited for."""
    async with new() as producer:
        held = cluster.inject("end_txn", hold=True)

        async def send_and_sleep() -> None:
            await producer.send("t", b"1")
            await asyncio.sleep(3600)

        task = asyncio.ensure_future(in_a_block(producer, send_and_sleep))
        await asyncio.sleep(1)
        task.cancel()
        await held.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.release()
        await producer.abort_transaction()
        await works(cluster, producer)
        assert committed(cluster) == []


# -- close -------------------------------------------------------------------------------------


async def test_close_aborts_an_open_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-45, spec 9.11."""
    producer = new(**LAZY)
    await producer.start()
    await producer.begin_transaction()
    await producer.enqueue("t", b"1")
    await producer.flush()
    dropped = await producer.enqueue("t", b"2")
    began = now()
    report = await producer.close()
    assert now() < began + 1
    assert (report.acknowledged, report.failed) == (1, 1)
    assert isinstance(dropped.exception(), AbortedError)
    assert cluster.transaction("tx").state.value == "CompleteAbort"
    assert committed(cluster) == []


@pytest.mark.parametrize("timeout", [None, 0])
async def test_a_block_in_which_the_producer_is_closed_was_not_committed(
    cluster: EmbeddedCluster, new: New, version: int, timeout: float | None
) -> None:
    producer = new()
    await producer.start()
    with pytest.raises(ProducerClosed):
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            await producer.close(timeout)
    assert committed(cluster) == []


async def test_close_waits_for_a_commit(cluster: EmbeddedCluster, new: New, version: int) -> None:
    """TX-45."""
    producer = new()
    await producer.start()
    await producer.begin_transaction()
    await producer.enqueue("t", b"1")
    held = cluster.inject("end_txn", hold=True)
    committing = asyncio.create_task(producer.commit_transaction())
    await held.reached()
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(1)
    assert not closing.done()
    held.release()
    await closing
    await committing
    assert committed(cluster) == [b"1"]


async def test_close_aborts_a_transaction_whose_commit_fails_meanwhile(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """Else its partitions would be closed to readers until it times out."""
    producer = new()
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    held = cluster.inject("produce", error="INVALID_RECORD", topic="t4", hold=True)
    await producer.enqueue("t4", b"2")
    committing = asyncio.create_task(producer.commit_transaction())
    await held.reached()
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(1)
    held.release()
    await closing
    with pytest.raises(TransactionAborted):
        await committing
    assert cluster.transaction("tx").state.value in ("CompleteAbort", "Empty")
    assert len(cluster.received("end_txn")) == 1


async def test_whose_tasks_are_all_cancelled_need_not_wait(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """As asyncio.run does it at its end, also where that is a SystemExit."""
    producer = new()
    began = now()

    async def use() -> None:
        async with producer:
            try:
                async with producer.transaction() as tx:
                    await tx.send("t", b"1")
                    await asyncio.sleep(5)
            finally:
                with pytest.raises(ProducerClosed, match="own task was cancelled"):
                    await producer.begin_transaction()

    using = asyncio.create_task(use())
    await asyncio.sleep(3)
    assert producer._task is not None
    producer._task.cancel()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert now() < began + 4


async def test_close_in_no_time_ends_no_transaction(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """TX-45: the broker aborts it after its timeout. Who waits for a commit learns it."""
    producer = new()
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    await producer.close(0)
    assert cluster.received("end_txn") == []
    producer = new(transactional_id="other")
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t4", b"1")
    held = cluster.inject("end_txn", hold=True)
    committing = asyncio.create_task(producer.commit_transaction())
    await held.reached()
    await producer.close(0)
    with pytest.raises(ProducerClosed, match="before the end of the transaction was known"):
        await committing


async def test_close_gives_up_an_abort_when_its_time_is_over(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    producer = new()
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    cluster.inject("end_txn", hold=True, times=None)
    began = now()
    await producer.close(2)
    assert now() == pytest.approx(began + 2, abs=0.5)


@pytest.mark.parametrize("api", ["txn_offset_commit", "end_txn"])
async def test_close_in_no_time_releases_who_waits_for_the_coordinator(
    cluster: EmbeddedCluster, new: New, version: int, api: str
) -> None:
    """KP-18."""
    producer = new()
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    held = cluster.inject(api, hold=True)
    calling = asyncio.ensure_future(
        producer.commit_transaction() if api == "end_txn" else producer.send_offsets(OFFSETS, "g")
    )
    await held.reached()
    await producer.close(0)
    with pytest.raises(ProducerClosed):
        await calling


async def test_close_without_a_limit_waits_no_longer_for_an_end_than_for_records(
    cluster: EmbeddedCluster, new: New, version: int
) -> None:
    """A coordinator that never answers must not keep it open for ever."""
    producer = new(delivery_timeout_ms=5_000, request_timeout_ms=1_000)
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    cluster.inject("end_txn", error="COORDINATOR_NOT_AVAILABLE", times=None)
    began = now()
    await producer.close(None)
    assert now() == pytest.approx(began + 5, abs=0.5)


@pytest.mark.parametrize("how", ["failed", "fenced", "timed out"])
async def test_close_in_any_state(
    cluster: EmbeddedCluster, new: New, version: int, how: str
) -> None:
    """TX-45: an error does not keep it from closing."""
    producer = new(max_block_ms=1_000)
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"1")
    if how == "failed":
        await refused_too_large(producer)
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
    elif how == "fenced":
        async with new():
            with pytest.raises(ProducerFenced):
                await producer.commit_transaction()
    else:
        cluster.inject("end_txn", error="COORDINATOR_LOAD_IN_PROGRESS", times=12)
        with pytest.raises(TransactionTimeout):
            await producer.commit_transaction()
    await producer.close()
    assert committed(cluster) == ([b"1"] if how == "timed out" else [])


# -- everything else ---------------------------------------------------------------------------


async def test_time_spent_in_calls_is_counted_where_they_succeed(
    cluster: EmbeddedCluster, new: New
) -> None:
    """KP-28, spec 9.2, 10.8."""
    names = ("init", "begin", "send_offsets", "commit", "abort")
    async with new(max_block_ms=1_000) as producer:

        def spent() -> dict[str, float]:
            metrics = producer.metrics()
            return {name: metrics[f"txn_{name}_time_ns_total"] for name in names}

        assert spent()["init"] > 1_000_000
        assert spent()["commit"] == 0
        async with producer.transaction() as tx:
            await tx.send("t", b"1")
            await tx.send_offsets(OFFSETS, "g")
        await producer.begin_transaction()
        await producer.send("t", b"1")
        await producer.abort_transaction()
        before = spent()
        assert all(before[name] > 1_000_000 for name in names if name != "begin")
        await producer.begin_transaction()
        await producer.send("t", b"1")
        held = cluster.inject("end_txn", hold=True)
        with pytest.raises(TransactionTimeout):
            await producer.commit_transaction()
        assert spent()["commit"] == before["commit"]
        held.release()
        await producer.commit_transaction()


async def test_transactions_from_another_thread(cluster: EmbeddedCluster, new: New) -> None:
    async with new() as producer:
        portal = producer.portal()

        def work() -> None:
            portal.begin_transaction().result(10)
            portal.send("t", b"1").result(10)
            portal.send_offsets(OFFSETS, "g").result(10)
            portal.commit_transaction().result(10)
            portal.begin_transaction().result(10)
            portal.send("t", b"2").result(10)
            portal.abort_transaction().result(10)

        await asyncio.to_thread(work)
    assert committed(cluster) == [b"1"]
    assert len(cluster.committed_offsets("g")) == 2


async def test_a_producer_with_a_transactional_id_has_it_in_its_name(new: New) -> None:
    """CF-09."""
    async with new() as producer:
        assert producer.client_id == "producer-tx"


async def test_a_transaction_timeout_that_brokers_refuse_fails_the_start(
    cluster: EmbeddedCluster, new: New
) -> None:
    with pytest.raises(BrokerError, match=r"transaction_timeout_ms=0 must be more than 0"):
        await new(transaction_timeout_ms=0).start()
