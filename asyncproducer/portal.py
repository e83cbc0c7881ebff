"""A handle for other threads: Django views, Celery tasks, a Spark partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from asyncproducer.errors import WrongLoopError
from asyncproducer.intake import running_loop
from asyncproducer.records import (
    BatchResult,
    ConsumerGroupMetadata,
    Headers,
    OffsetAndMetadata,
    Record,
    RecordMetadata,
    TopicPartition,
)

if TYPE_CHECKING:
    from asyncproducer.arrow import ArrowTables
    from asyncproducer.bulk import TableResult
    from asyncproducer.core.delivery import Delivery
    from asyncproducer.producer import Producer

__all__ = ["Portal"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")


class Portal(Generic[K, V]):
    """The producer, callable from any thread but the one of its event loop.

    No call waits: each gives a `concurrent.futures.Future` at once, and the loop does the
    work. `future.result(timeout)` waits. When its time is up the work goes on, unless the
    future is cancelled. Calls of one thread keep their order.

    `future.cancel()` is the cancellation of the producer's method: before a record is
    buffered nothing is sent, after that only the wait ends.

    The loop must be running: while it stands still no future gets its result, so give
    `result()` a timeout where that may be.

    Every call raises WrongLoopError on the producer's own loop, whose thread would wait for
    itself, and when that loop is closed; ForkError in a child process. All else is raised by
    `future.result()`: what the producer's method raises, also ProducerClosed.
    """

    def __init__(self, producer: Producer[K, V], loop: asyncio.AbstractEventLoop) -> None:
        self._producer = producer
        self._loop = loop

    def send(
        self,
        topic: str,
        value: V | None = None,
        *,
        key: K | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Future[RecordMetadata]:
        """`Producer.send`: the future is done when the broker acknowledged the record.

        Does not wait. Raises WrongLoopError, ForkError; the future what `Producer.send` raises,
        from SerializationError to DeliveryError.
        """
        return self._call(
            self._producer.send,
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp=timestamp,
        )

    def enqueue(
        self,
        topic: str,
        value: V | None = None,
        *,
        key: K | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Future[Delivery]:
        """`Producer.enqueue`: the future is done when the record is buffered.

        Its result is a Delivery, which belongs to the producer's loop: look at it there, or ask
        `done()` and `result()`. Does not wait. Raises WrongLoopError, ForkError; the future what
        `Producer.enqueue` raises, as BufferTimeout or MetadataTimeout.
        """
        return self._call(
            self._producer.enqueue,
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp=timestamp,
        )

    def send_many(
        self, topic: str | None, records: Iterable[V | Record], *, raise_on_error: bool = True
    ) -> Future[BatchResult]:
        """`Producer.send_many`: the future is done when every record has its end.

        The loop takes the records, so they should not be slow to make. Cancelling the future
        ends the wait: what is buffered goes on, the rest is not taken. Does not wait. Raises
        WrongLoopError, ForkError; the future BatchDeliveryError, unless `raise_on_error` is False.
        """
        return self._call(self._producer.send_many, topic, records, raise_on_error=raise_on_error)

    def send_table(
        self,
        topic: str | None,
        table: ArrowTables,
        *,
        key: str | None = None,
        value: str | None = "value",
        headers: str | None = None,
        partition: str | None = None,
        timestamp: str | None = None,
        topic_column: str = "topic",
        raise_on_error: bool = True,
    ) -> Future[TableResult]:
        """`Producer.send_table`: the future is done when every row has its end.

        The loop reads the table, and iterates over an async iterable of tables. Cancelling the
        future ends the wait: what is buffered goes on, the rest is not taken. Does not wait.
        Raises WrongLoopError, ForkError; the future what `Producer.send_table` raises.
        """
        return self._call(
            self._producer.send_table,
            topic,
            table,
            key=key,
            value=value,
            headers=headers,
            partition=partition,
            timestamp=timestamp,
            topic_column=topic_column,
            raise_on_error=raise_on_error,
        )

    def flush(self, timeout: float | None = None) -> Future[None]:
        """`Producer.flush`: the future is done when all records sent so far have their end.

        Those of this thread's earlier calls among them. Does not wait. Raises WrongLoopError,
        ForkError; the future TimeoutError after `timeout` seconds, and the records go on.
        """
        return self._call(self._producer.flush, timeout)

    def begin_transaction(self) -> Future[None]:
        """`Producer.begin_transaction`: what is sent after this call belongs to the transaction.

        Does not wait. Raises WrongLoopError, ForkError; the future what the producer's method
        raises, IllegalStateError above all.
        """
        return self._call(self._producer.begin_transaction)

    def commit_transaction(self) -> Future[None]:
        """`Producer.commit_transaction`: the future is done when the transaction is committed.

        Does not wait. Raises WrongLoopError, ForkError; the future TransactionAborted and what
        else the producer's method raises. Cancelling it ends the wait, the commit goes on.
        """
        return self._call(self._producer.commit_transaction)

    def abort_transaction(self) -> Future[None]:
        """`Producer.abort_transaction`: the future is done when the transaction is aborted.

        Does not wait. Raises WrongLoopError, ForkError; the future what the producer's method
        raises. Cancelling it ends the wait, the abort goes on.
        """
        return self._call(self._producer.abort_transaction)

    def send_offsets(
        self,
        offsets: Mapping[Any, Any] | Iterable[Any],
        group: str | bytes | ConsumerGroupMetadata | Any,
    ) -> Future[None]:
        """`Producer.send_offsets`: the future is done when the offsets are in the transaction.

        Does not wait. Raises WrongLoopError, ForkError; the future what the producer's method
        raises.
        """
        return self._call(self._producer.send_offsets, offsets, group)

    def committed_offsets(
        self, group_id: str, partitions: Iterable[Any]
    ) -> Future[dict[TopicPartition, OffsetAndMetadata]]:
        """`Producer.committed_offsets`: the future is done when the group's coordinator answered.

        Does not wait. Raises WrongLoopError, ForkError; the future what the producer's method
        raises.
        """
        return self._call(self._producer.committed_offsets, group_id, partitions)

    def _call(
        self,
        method: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Run a method of the producer on its loop, if it can be reached from here."""
        if running_loop() is self._loop:
            raise WrongLoopError(
                "the portal is for other threads: on the producer's own event loop, "
                "await the producer's methods"
            )
        self._producer._check_process()
        if self._loop.is_closed():
            raise WrongLoopError("the event loop of the producer is closed")
        # Made only now: a coroutine that nobody runs is a warning.
        work = _on_loop(partial(method, *args, **kwargs))
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _on_loop(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Called there, too: what the producer has is for its own thread."""
    coroutine = call()
    del call  # it has the record's bytes, which `coroutine` lets go of when they are buffered
    return await coroutine
