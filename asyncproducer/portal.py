"""A handle for other threads: Django views, Celery tasks, a Spark partition."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asyncproducer.errors import ProducerStateError, WrongLoopError
from asyncproducer.intake import running_loop
from asyncproducer.records import BatchResult, Headers, Record, RecordMetadata

if TYPE_CHECKING:
    from asyncproducer.core.delivery import Delivery
    from asyncproducer.producer import Producer

__all__ = ["Portal"]

K = TypeVar("K")
V = TypeVar("V")


class Portal(Generic[K, V]):
    """The producer, callable from any thread but the one of its event loop.

    Each call runs on the producer's loop and gives a `concurrent.futures.Future`.
    Calls of one thread keep their order. The loop must be running; waiting for a
    result on its own thread would wait for ever, so that raises WrongLoopError.
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
        """`Producer.send`: the future is done when the broker acknowledged the record."""
        return self._call(
            self._producer.send(
                topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp
            )
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
        """`Producer.enqueue`: the future is done when the record is buffered."""
        return self._call(
            self._producer.enqueue(
                topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp
            )
        )

    def send_many(
        self, topic: str | None, records: Iterable[V | Record], *, raise_on_error: bool = True
    ) -> Future[BatchResult]:
        """`Producer.send_many`; the loop takes the records, so they should not be slow to make."""
        return self._call(self._producer.send_many(topic, records, raise_on_error=raise_on_error))

    def flush(self, timeout: float | None = None) -> Future[None]:
        """`Producer.flush`: the future is done when all records sent so far have their end."""
        return self._call(self._producer.flush(timeout))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if running_loop() is self._loop:
            work.close()
            raise WrongLoopError(
                "the portal is for other threads: on the producer's own event loop, "
                "await the producer's methods"
            )
        try:
            self._producer._check_process()
            if self._loop.is_closed():
                raise WrongLoopError("the event loop of the producer is closed")
        except ProducerStateError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)
