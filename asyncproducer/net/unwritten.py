"""Requests that get no answer (acks=0), until the operating system has all their bytes.

That is where such a request ends well: what the system has taken leaves this machine even
when we are gone, what the transport still holds goes with the connection.

A transport does not tell when a certain byte has left, only how many are left over. So we
count what the connection has written, and look: right after each write, whenever writing
may go on after a pause, and every few milliseconds while a request is not done. Most are
done with the first look.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from asyncproducer.net.in_flight import OnDone, Pending

__all__ = ["Unwritten"]

#: Seconds from one look to the next. Between its water marks a transport says nothing.
POLL = 0.005


class Unwritten:
    """The requests in the order of writing, and one timer while there are any.

    `left()` returns how many bytes the transport still holds; None when it may lose them.
    `on_written(on_done)` is called for each request that is done, `on_timeout(request)`
    for the oldest when its time is up.
    """

    __slots__ = ("_handed", "_left", "_loop", "_on_timeout", "_on_written", "_queue", "_timer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        left: Callable[[], int | None],
        on_written: Callable[[OnDone], None],
        on_timeout: Callable[[Pending], None],
    ) -> None:
        self._loop = loop
        self._left = left
        self._on_written = on_written
        self._on_timeout = on_timeout
        #: All bytes that the transport was ever given.
        self._handed = 0
        #: Each with what `_handed` was after it.
        self._queue: deque[tuple[int, Pending]] = deque()
        self._timer: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def handed(self, size: int) -> None:
        """The transport was given so many bytes, of whatever request."""
        self._handed += size

    def add(self, request: Pending) -> None:
        """The last bytes handed are the end of this request."""
        self._queue.append((self._handed, request))
        self.look()
        if self._queue and self._timer is None:
            # At once: uvloop writes nothing before the end of this turn.
            self._timer = self._loop.call_soon(self._poll)

    def look(self) -> None:
        """Who is done?"""
        queue = self._queue
        if not queue:
            return
        left = self._left()
        if left is None:
            return
        written = self._handed - left
        while queue and queue[0][0] <= written:
            self._on_written(queue.popleft()[1].on_done)

    def extend(self, seconds: float) -> None:
        """Give all of them more time."""
        for _, request in self._queue:
            request.deadline += seconds

    def clear(self) -> Iterator[Pending]:
        """Takes them out one by one, oldest first, and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            yield self._queue.popleft()[1]

    def _poll(self) -> None:
        self._timer = None
        self.look()
        if not self._queue:
            return
        self._timer = self._loop.call_later(POLL, self._poll)
        _, oldest = self._queue[0]
        if oldest.deadline <= self._loop.time():
            self._on_timeout(oldest)
