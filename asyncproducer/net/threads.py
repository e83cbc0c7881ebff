"""Work that would hold up the loop, in worker threads. The only importer of anyio."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from asyncproducer.logs import guarded

__all__ = ["Workers", "jobs_elsewhere"]

logger = guarded("asyncproducer.net.threads")

T = TypeVar("T")

#: Future, result and error of what is done.
_Done: TypeAlias = tuple[asyncio.Future[Any], Any, BaseException | None]


class Workers:
    """As many work at once as leave a core to the event loop, whose turns they must not delay.

    The others wait in a line. Who has done one takes the next from it, without going through
    the loop, which has much to do then: of 40 kB that take 120 us with zstd, a thread for each
    cost 100 us more of CPU, and one that goes on 35. Made where the loop runs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = max(1, _cores() - 1)
        self._limiter = anyio.CapacityLimiter(self._most)
        self._line: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        #: What is done while there is more to do; the threads add, the loop takes.
        self._done: deque[_Done] = deque()
        self._to_be_told = False
        self._warned = False
        self._workers: set[asyncio.Task[_Done | None]] = set()
        #: Those that are awaited.
        self._futures: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a worker thread, in its turn, and return its result.

        Cancelled: the wait ends at once, and the function, if it has begun, goes on to its
        end. What it reads must stay as it is until then.
        """
        # A loop with a clock of its own (asyncproducer.testing) lets it stand still meanwhile.
        outside_work = getattr(self._loop, "outside_work", nullcontext)
        future: asyncio.Future[T] = self._loop.create_future()
        self._futures.add(future)
        try:
            with outside_work():
                self._line.append((function, future))
                self._begin()
                return await future
        finally:
            self._futures.discard(future)

    def _begin(self) -> None:
        if self._line and len(self._workers) < self._most:
            worker = self._loop.create_task(self._worker(), name="asyncproducer compression")
            self._workers.add(worker)
            worker.add_done_callback(self._ended)

    async def _worker(self) -> _Done | None:
        return await anyio.to_thread.run_sync(self._work, limiter=self._limiter)

    def _ended(self, worker: asyncio.Task[_Done | None]) -> None:
        self._workers.discard(worker)
        if worker.cancelled():
            # By somebody who ends all tasks. Its thread goes on, but with this line alone.
            self._line, self._done = deque(), deque()
            self._refuse([*self._futures], RuntimeError("its worker was cancelled"))
        elif error := worker.exception():
            if self._workers:
                return  # who has a thread takes what is in the line
            # There is no thread to be had: a late turn of the loop is better than a lost record.
            # One job a turn, so that the loop goes on, and the next may have a thread again.
            if not self._warned:
                self._warned = True
                logger.warning("no thread to compress in, so the loop waits for it: %s", error)
            done = self._next(self._line)
            if done is not None:
                self._tell_one(*done)
            self._begin()
        else:
            self._tell()
            last = worker.result()
            if last is not None:
                self._tell_one(*last)
            self._begin()

    def _work(self) -> _Done | None:
        """In the thread: all that is in the line. Returns the last: who hears of that finds no
        worker any more, unless there is more to do.
        """
        line, others = self._line, self._done
        while (done := self._next(line)) is not None and line:
            others.append(done)
            if not self._to_be_told:
                self._to_be_told = True
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._tell)
        return done

    @staticmethod
    def _next(line: deque[tuple[Callable[[], Any], asyncio.Future[Any]]]) -> _Done | None:
        """What the first in the line comes to. None if nobody waits any more."""
        while True:
            try:
                function, future = line.popleft()
            except IndexError:  # another worker was faster
                return None
            if future.cancelled():
                continue
            try:
                return (future, function(), None)
            except BaseException as error:
                return (future, None, error)

    def _tell(self) -> None:
        self._to_be_told = False
        while self._done:
            self._tell_one(*self._done.popleft())

    @staticmethod
    def _tell_one(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _refuse(self, futures: list[asyncio.Future[Any]], error: BaseException) -> None:
        for future in futures:
            self._tell_one(future, None, error)


def jobs_elsewhere() -> Callable[[], int]:
    """For the running loop: how many jobs of anyio's own threads have not ended.

    They are those that others give to anyio without a limiter, as FastAPI and Starlette do
    with a plain `def`. Called in a task: anyio finds its loop by it.
    """
    limiter = anyio.to_thread.current_default_thread_limiter()
    return lambda: limiter.borrowed_tokens


def _cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
