"""Sleeping until something happens or a time is reached, without a task or a lost wake-up; and
what the time is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic

__all__ = ["Alarm", "Changes", "time_of"]


def time_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """`loop.time`. asyncio's own loops only pass time.monotonic on: without the call in between."""
    return monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


class Changes:
    """Any number of tasks wait for the next change; each then looks what it was.

    A change while nobody waits is forgotten: look first, then wait, with no await in
    between.
    """

    __slots__ = ("_loop", "_waiters")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A dict keeps their order: a set would make runs differ.
        self._waiters: dict[asyncio.Future[None], None] = {}

    def tell(self) -> None:
        """Something has changed."""
        for waiter in self._waiters:
            _finish(waiter)

    async def wait(self, until: float) -> None:
        """Wait for a change, at most until this time of the loop."""
        waiter = self._loop.create_future()
        self._waiters[waiter] = None
        timer = self._loop.call_at(until, _finish, waiter) if until < inf else None
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            if timer is not None:
                timer.cancel()


class Alarm:
    """One task sleeps. An alarm while it is awake makes its next sleep end at once."""

    __slots__ = ("_changes", "_ringing")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._changes = Changes(loop)
        self._ringing = False

    def ring(self) -> None:
        """Wake the sleeper."""
        self._ringing = True
        self._changes.tell()

    async def sleep(self, until: float) -> None:
        """Wait for `ring()`, at most until this time of the loop."""
        if not self._ringing:
            await self._changes.wait(until)
        self._ringing = False


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
