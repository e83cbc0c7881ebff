from __future__ import annotations

import asyncio

import pytest

from asyncproducer.core.wire import ApiKey
from asyncproducer.net.in_flight import OnDone, Pending
from asyncproducer.net.unwritten import Unwritten

pytestmark = pytest.mark.virtual_time


class Writer:
    """A transport, and what it was told to write."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.left: int | None = 0
        self.looks = 0
        self.events: list[tuple[float, str]] = []
        self.unwritten = Unwritten(
            self.loop, left=self._left, on_written=self._written, on_timeout=self._timed_out
        )

    def _left(self) -> int | None:
        self.looks += 1
        return self.left

    def _written(self, on_done: OnDone) -> None:
        on_done(None, None)

    def _timed_out(self, request: Pending) -> None:
        self._event(f"{request.correlation_id} timed out")

    def _event(self, text: str) -> None:
        self.events.append((round(self.loop.time(), 3), text))

    def write(self, correlation_id: int, size: int, *, taken: int, timeout: float = 30.0) -> None:
        """A request of `size` bytes, of which the system takes some at once."""
        assert self.left is not None
        self.left += size - taken
        self.unwritten.handed(size)
        request = Pending(
            ApiKey.PRODUCE,
            9,
            correlation_id,
            timeout,
            self.loop.time(),
            lambda body, error: self._event(f"{correlation_id} written"),
        )
        self.unwritten.add(request)

    def rest(self) -> list[int]:
        return [request.correlation_id for request in self.unwritten.clear()]


async def test_what_the_system_takes_at_once_is_written_and_costs_no_timer() -> None:
    writer = Writer()
    writer.write(1, 100, taken=100)
    assert writer.events == [(0.0, "1 written")]
    assert len(writer.unwritten) == 0
    looks = writer.looks
    await asyncio.sleep(1.0)
    assert writer.looks == looks


async def test_a_request_is_written_with_its_last_byte_and_in_order() -> None:
    writer = Writer()
    for number in range(3):
        writer.write(number, 100, taken=0)
    for left, written in (
        (250, []),
        (201, []),
        (200, ["0"]),
        (1, ["0", "1"]),
        (0, ["0", "1", "2"]),
    ):
        writer.left = left
        writer.unwritten.look()
        assert writer.events == [(0.0, f"{number} written") for number in written]
        assert len(writer.unwritten) == 3 - len(written)


async def test_bytes_of_other_requests_are_in_the_line_as_well() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0)
    writer.unwritten.handed(50)
    writer.left = 50
    writer.unwritten.look()
    assert writer.events == [(0.0, "1 written")]
    writer.left += 0
    writer.write(2, 100, taken=0)
    writer.left = 1
    writer.unwritten.look()
    assert len(writer.unwritten) == 1


async def test_nobody_has_to_tell_that_bytes_have_left() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0)
    await asyncio.sleep(1.0)
    assert writer.events == []
    writer.left = 0
    await asyncio.sleep(0.01)
    assert [text for _, text in writer.events] == ["1 written"]
    looks = writer.looks
    await asyncio.sleep(1.0)
    assert writer.looks == looks, "looked although nothing is left"


async def test_a_loop_that_writes_at_the_end_of_its_turn_is_looked_at_in_the_next() -> None:
    """uvloop."""
    writer = Writer()
    writer.write(1, 100, taken=0)
    writer.left = 0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert writer.events == [(0.0, "1 written")]


async def test_a_transport_that_may_lose_its_bytes_proves_nothing() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0)
    writer.left = None
    await asyncio.sleep(1.0)
    assert writer.events == []
    assert writer.rest() == [1]


async def test_the_oldest_request_has_a_deadline() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0, timeout=3.0)
    writer.write(2, 100, taken=0)
    await asyncio.sleep(2.99)
    assert writer.events == []
    await asyncio.sleep(0.02)
    [(late, text), *_] = writer.events
    assert text == "1 timed out"
    assert 3.0 <= late <= 3.005
    assert writer.rest() == [1, 2]


async def test_nothing_runs_on_after_the_end() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0)
    await asyncio.sleep(1.0)
    timer = writer.unwritten._timer
    assert writer.rest() == [1]
    assert timer is not None
    assert timer.cancelled()


async def test_more_time_is_for_all() -> None:
    writer = Writer()
    writer.write(1, 100, taken=0, timeout=3.0)
    writer.write(2, 100, taken=0, timeout=3.0)
    writer.unwritten.extend(10.0)
    await asyncio.sleep(12.99)
    assert writer.events == []
    writer.left = 100
    await asyncio.sleep(0.02)
    assert [text for _, text in writer.events][:2] == ["1 written", "2 timed out"]
    assert writer.rest() == [2]
