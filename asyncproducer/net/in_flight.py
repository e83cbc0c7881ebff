"""The requests of one connection that have no response yet, oldest first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from asyncproducer.core import wire
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import ProtocolError
from asyncproducer.net.waiting import time_of

__all__ = ["InFlight", "OnDone", "Pending"]

#: (body, None): the response. (None, error): there will be none. (None, None): none is expected.
OnDone = Callable[["bytes | None", "BaseException | None"], None]


class Pending:
    """One request in flight. Without an `api_key` its answer is a bare SASL token."""

    __slots__ = (
        "api_key",
        "correlation_id",
        "deadline",
        "on_done",
        "since",
        "timeout",
        "version",
    )

    def __init__(
        self,
        api_key: ApiKey | None,
        version: int,
        correlation_id: int,
        timeout: float,
        since: float,
        on_done: OnDone,
    ) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.timeout = timeout
        self.since = since
        self.deadline = since + timeout
        self.on_done = on_done

    def __str__(self) -> str:
        return "a SASL token" if self.api_key is None else f"{self.api_key.name} v{self.version}"


class InFlight:
    """A queue with one timer. `on_timeout(pending)` is called for the first that is late."""

    __slots__ = ("_loop", "_on_timeout", "_queue", "_time", "_timer", "_timer_at")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[Pending], None]
    ) -> None:
        self._loop = loop
        self._time = time_of(loop)
        self._on_timeout = on_timeout
        self._queue: deque[Pending] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def add(
        self,
        api_key: ApiKey | None,
        version: int,
        correlation_id: int,
        timeout: float,
        on_done: OnDone,
    ) -> None:
        """The request is written now, and its response is due in `timeout` seconds."""
        pending = Pending(api_key, version, correlation_id, timeout, self._time(), on_done)
        self._queue.append(pending)
        self._watch(pending.deadline)

    def take(self, frame: bytes) -> tuple[Pending, bytes]:
        """The request that this frame answers, which is no longer in flight, and the body.

        Raises ProtocolError when it is not the answer to the oldest one, which stays.
        """
        if not self._queue:
            raise ProtocolError("it sent a response, and nothing was asked")
        head = self._queue[0]
        if head.api_key is None:
            body = frame
        else:
            correlation_id, body = wire.split_frame(head.api_key, head.version, frame)
            if correlation_id != head.correlation_id:
                raise ProtocolError(
                    f"it sent a response with the correlation id {correlation_id}, the oldest"
                    f" request in flight has {head.correlation_id} ({head})"
                )
        return self._queue.popleft(), body

    def extend(self, seconds: float) -> None:
        """Give all of them more time."""
        for pending in self._queue:
            pending.deadline += seconds

    def clear(self) -> Iterator[Pending]:
        """Takes them out one by one, oldest first, and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            yield self._queue.popleft()

    def _watch(self, deadline: float) -> None:
        """One timer, at the earliest deadline or before it.

        Answers do not touch it. When it fires it looks for the next deadline, so a busy
        connection sets a timer once per timeout, not once per request.
        """
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._fired)

    def _fired(self) -> None:
        self._timer = None
        if not self._queue:
            return
        # Timeouts differ between requests: the oldest is not always the first to be late.
        first = min(self._queue, key=lambda pending: pending.deadline)
        if first.deadline > self._time():
            self._watch(first.deadline)
        else:
            self._on_timeout(first)
