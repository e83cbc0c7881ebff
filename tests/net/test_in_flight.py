from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import ProtocolError
from asyncproducer.net.in_flight import InFlight, Pending

pytestmark = pytest.mark.virtual_time


class Queue:
    """An InFlight whose requests have no version-specific headers, and who was late, and when."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.late: list[tuple[int, float]] = []
        self.in_flight = InFlight(self.loop, self._timed_out)

    def _timed_out(self, pending: Pending) -> None:
        self.late.append((pending.correlation_id, self.loop.time()))

    def add(self, correlation_id: int, timeout: float = 30.0) -> None:
        self.in_flight.add(
            ApiKey.SASL_HANDSHAKE, 1, correlation_id, timeout, lambda body, error: None
        )

    def take(self, correlation_id: int, body: bytes = b"body") -> bytes:
        frame = correlation_id.to_bytes(4, "big", signed=True) + body
        pending, found = self.in_flight.take(frame)
        assert pending.correlation_id == correlation_id
        return found

    def rest(self) -> list[int]:
        return [pending.correlation_id for pending in self.in_flight.clear()]


async def test_answers_are_taken_in_the_order_of_the_requests() -> None:
    """IF-01: complete next."""
    queue = Queue()
    for i in range(3):
        queue.add(i)
    assert [queue.take(i, b"%d" % i) for i in range(3)] == [b"0", b"1", b"2"]
    assert len(queue.in_flight) == 0


async def test_an_answer_to_a_later_request_is_refused_and_nothing_is_taken() -> None:
    queue = Queue()
    queue.add(7)
    queue.add(8)
    with pytest.raises(ProtocolError, match=r"correlation id 8.*has 7 \(SASL_HANDSHAKE v1\)"):
        queue.take(8)
    assert queue.rest() == [7, 8]


async def test_an_answer_to_nothing_is_refused() -> None:
    """IF-01: empty access."""
    with pytest.raises(ProtocolError, match="nothing was asked"):
        Queue().take(0)


async def test_a_frame_too_short_for_its_header_is_refused() -> None:
    queue = Queue()
    queue.add(0)
    with pytest.raises(ProtocolError):
        queue.in_flight.take(b"\0\0")
    assert queue.rest() == [0]


async def test_a_bare_token_is_the_whole_frame() -> None:
    queue = Queue()
    queue.in_flight.add(None, 0, 0, 1.0, lambda body, error: None)
    pending, body = queue.in_flight.take(b"token")
    assert (body, str(pending)) == (b"token", "a SASL token")


async def test_clear_gives_the_oldest_first_and_stops_the_timer() -> None:
    """IF-01: clear."""
    queue = Queue()
    for i in range(3):
        queue.add(i, 1.0)
    assert queue.rest() == [0, 1, 2]
    await asyncio.sleep(5)
    assert queue.late == []


async def test_clear_of_an_empty_queue_gives_nothing() -> None:
    """IF-01: empty access."""
    assert Queue().rest() == []


async def test_the_first_to_be_late_is_reported_at_its_deadline() -> None:
    """IF-01: timed out nodes."""
    queue = Queue()
    queue.add(0, 10.0)
    await asyncio.sleep(1)
    queue.add(1, 10.0)
    await asyncio.sleep(30)
    assert queue.late == [(0, 10.0)]


async def test_a_later_request_may_have_the_earlier_deadline() -> None:
    queue = Queue()
    queue.add(0, 10.0)
    queue.add(1, 2.0)
    queue.add(2, 5.0)
    await asyncio.sleep(30)
    assert queue.late == [(1, 2.0)]


async def test_an_answer_in_time_moves_the_timer_to_the_next_deadline() -> None:
    queue = Queue()
    queue.add(0, 10.0)
    await asyncio.sleep(4)
    queue.add(1, 10.0)
    queue.take(0)
    await asyncio.sleep(30)
    assert queue.late == [(1, 14.0)]


async def test_nobody_is_late_when_all_have_answered() -> None:
    queue = Queue()
    queue.add(0, 1.0)
    queue.take(0)
    await asyncio.sleep(5)
    queue.add(1, 3.0)
    queue.take(1)
    await asyncio.sleep(5)
    assert queue.late == []


async def test_more_time_for_all_moves_every_deadline() -> None:
    """IF-01: timed out nodes with throttle."""
    queue = Queue()
    queue.add(0, 10.0)
    queue.add(1, 12.0)
    queue.in_flight.extend(5.0)
    queue.add(2, 14.5)
    await asyncio.sleep(14.25)
    assert queue.late == []
    await asyncio.sleep(30)
    assert queue.late == [(2, 14.5)]


async def test_a_steady_stream_sets_one_timer_per_timeout() -> None:
    """Setting and cancelling a timer for every request would cost more than the request."""
    queue = Queue()
    scheduled = 0
    call_at = queue.loop.call_at

    def counting(when: float, callback: Any, *args: Any, **context: Any) -> asyncio.TimerHandle:
        nonlocal scheduled
        scheduled += callback == queue.in_flight._fired
        return call_at(when, callback, *args, **context)

    queue.loop.call_at = counting  # type: ignore[method-assign,assignment]  # counts only
    queue.add(0, 10.0)
    for i in range(1, 1000):
        await asyncio.sleep(0.1)
        queue.add(i, 10.0)
        queue.take(i - 1)
    assert scheduled <= 12
