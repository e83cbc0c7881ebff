"""Work that would hold up the loop, in worker threads. The only importer of anyio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import anyio
import anyio.to_thread

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """As many work at once as leave a core to the event loop, whose turns they must not delay.

    Others wait in threads of their own for a worker to end: the next begins at once then,
    and not only when the loop, which has much to do, comes to it. Made where the loop runs.
    """

    #: So many threads for each that may work.
    _LINE = 4

    def __init__(self) -> None:
        workers = max(1, _cores() - 1)
        self._working = threading.Semaphore(workers)
        self._limiter = anyio.CapacityLimiter(workers * self._LINE)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` in a worker thread, in its turn, and return its result.

        Cancelled: the wait ends at once, and the function goes on to its end. What it reads
        must stay as it is until then.
        """
        # A loop with a clock of its own (asyncproducer.testing) lets it stand still meanwhile.
        outside_work = getattr(asyncio.get_running_loop(), "outside_work", nullcontext)
        with outside_work():
            return await anyio.to_thread.run_sync(self._work, function, limiter=self._limiter)

    def _work(self, function: Callable[[], T]) -> T:
        with self._working:
            return function()


def _cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
