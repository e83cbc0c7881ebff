"""The event loop of a worker process, and the producers that live on it.

Spark calls a sink with an iterator, in the only thread of a worker process, and keeps the process
for later batches. So there is one event loop for the process, in a thread of its own that is
started when it is first needed; the caller's thread gets the next rows meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

from asyncproducer.errors import KafkaError
from asyncproducer.producer import Producer
from asyncproducer.spark.options import SinkOptions

__all__ = ["Feed", "Worker", "worker"]

T = TypeVar("T")

_Key: TypeAlias = frozenset[tuple[str, str]]

#: How many bytes of rows may wait for the producer, which has `buffer_memory` besides.
FEED_BYTES = 8_388_608


class Worker:
    """A running event loop, and the producers that tasks have in turn."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._producers: dict[_Key, Producer[Any, Any]] = {}
        #: Those with transactions that no task has now.
        self._idle: dict[_Key, Producer[Any, Any]] = {}
        threading.Thread(target=self._run, name="asyncproducer-spark", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """It runs in its own thread."""
        return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Do it on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the loop, and wait for its end. Interrupted: it is cancelled."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def feed(self, batches: Iterable[Any], work: Callable[[Feed], Coroutine[Any, Any, T]]) -> T:
        """Do on the loop what takes `batches`, which are made here meanwhile. Blocks until its end.

        An error that ends them is raised, and so is an interruption: when `work`, which is
        cancelled then, has come to its end.
        """
        feed = Feed(self._loop, FEED_BYTES)
        # (That of `submit` is over as soon as it is cancelled, before its work is.)
        done: Future[T] = Future()
        task: asyncio.Task[T]

        def begin() -> None:
            nonlocal task
            task = self._loop.create_task(work(feed))
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            feed.leave()
            if task.cancelled():
                done.cancel()
                done.set_running_or_notify_cancel()  # else nobody who waits is told
            elif error := task.exception():
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        try:
            for batch in batches:
                if not feed.put(batch):
                    break
            feed.end()
            return done.result()
        except BaseException as error:
            self._loop.call_soon_threadsafe(lambda: task.cancel())
            wait([done])
            if not done.cancelled() and (other := done.exception()) not in (None, error):
                error.add_note(f"Before that, the delivery had failed: {other!r}")
            raise

    async def producer(self, options: SinkOptions) -> Producer[Any, Any]:
        """The one with these options, which stays for the next task that needs it."""
        key = _key(options)
        found = self._producers.get(key)
        if found is None:
            found = Producer(config=options.config())
            await found.start()
            self._producers[key] = found
        return found

    async def transactional(self, options: SinkOptions, name: str) -> Producer[Any, Any]:
        """One of the task's own that has just begun as transactional id `name`, and fenced others.

        It goes to `keep` when nothing is open, else it is to be closed. Raises as `start()`.
        """
        found = self._idle.pop(_key(options), None)
        if found is not None:
            try:
                await found._take_over(name)
                return found
            except BaseException as error:
                await found.close(0)
                if not isinstance(error, KafkaError):
                    raise
                # Whatever was wrong with it: one that is new knows better.
        found = Producer(config=options.config(transactional_id=name))
        await found.start()
        return found

    async def keep(self, options: SinkOptions, producer: Producer[Any, Any]) -> None:
        """The next task that needs one with these options saves the way to the brokers."""
        key = _key(options)
        other = self._idle.pop(key, None)
        self._idle[key] = producer
        if other is not None:
            await other.close()

    async def forget(self, options: SinkOptions) -> None:
        """Something went wrong with it: the next task gets another."""
        found = self._producers.pop(_key(options), None)
        if found is not None:
            await found.close(0)

    async def close(self) -> None:
        """Close the producers."""
        for producers in (self._producers, self._idle):
            while producers:
                _, found = producers.popitem()
                await found.close()


def _key(options: SinkOptions) -> _Key:
    """What producers are alike by, but for the transactional id."""
    return frozenset(options.producer.items())


_worker: Worker | None = None


def worker() -> Worker:
    """That of this process. A forked process makes its own."""
    global _worker
    if _worker is None or _worker.pid != os.getpid():
        _worker = Worker()
    return _worker


class Feed:
    """Batches on their way from the caller's thread to the loop, so many bytes at once.

    The loop iterates over it. An iterator that is left ends the feed: `put` returns False.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = FEED_BYTES) -> None:
        self._loop = loop
        self._limit = limit
        self._changed = threading.Condition()
        self._batches: deque[Any] = deque()
        self._bytes = 0
        self._ended = False
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, batch: Any) -> bool:
        """Hand the batch over, and wait for room for another. False if nobody takes it."""
        with self._changed:
            self._batches.append(batch)
            self._bytes += batch.nbytes
        self._loop.call_soon_threadsafe(self._wake)
        with self._changed:
            while self._bytes >= self._limit and not self._left:
                self._changed.wait()
            return not self._left

    def end(self) -> None:
        """There is no further batch."""
        with self._changed:
            self._ended = True
        self._loop.call_soon_threadsafe(self._wake)

    def leave(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            with self._changed:
                batch = self._batches.popleft() if self._batches else None
                if batch is not None:
                    self._bytes -= batch.nbytes
                    self._changed.notify_all()
                elif self._ended:
                    return
                else:
                    self._waiter = self._loop.create_future()
            if batch is not None:
                yield batch
            elif self._waiter is not None:
                await self._waiter
