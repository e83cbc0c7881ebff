"""The buffer pool: fair, and no byte gets lost.

BP-01, BP-02 and BP-03 are about Java's free list of buffers, which we do not have: the
pool counts bytes. BP-09 is about an exception inside Java's wait-time sensor: here the
wait is added to a float.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import anyio
import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncproducer.core.metrics import Metrics
from asyncproducer.errors import (
    BrokerError,
    BufferTimeout,
    ErrorCode,
    IllegalStateError,
    ProducerClosed,
    RecordTooLarge,
)
from asyncproducer.net.buffer_pool import BufferPool, BufferPoolStatistics, Share, Ticket
from asyncproducer.testing.clock import VirtualTimeLoop
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

TOTAL = 100


class Asker(Ticket):
    """A ticket that notes what happens to it, and does what the test tells it to."""

    def __init__(
        self,
        log: list[str],
        name: str = "",
        *,
        on_claim: Callable[[], bool] | None = None,
        on_granted: Callable[[], object] | None = None,
        on_refused: Callable[[], object] | None = None,
    ) -> None:
        self.log = log
        self.name = name
        self.on_claim = on_claim
        self.on_granted = on_granted
        self.on_refused = on_refused
        self.claims = 0
        self.error: BaseException | None = None

    def claim(self) -> bool:
        self.claims += 1
        return self.on_claim() if self.on_claim is not None else False

    def granted(self) -> None:
        self.log.append(f"{self.name} granted")
        if self.on_granted is not None:
            self.on_granted()

    def refused(self, error: BaseException) -> None:
        self.error = error
        self.log.append(f"{self.name} {type(error).__name__}")
        if self.on_refused is not None:
            self.on_refused()


def numbers(pool: BufferPool) -> tuple[int, int, int, int]:
    return pool.available, pool.held, pool.reserved, pool.waiting


def full_pool(total: int = TOTAL, metrics: Metrics | None = None) -> BufferPool:
    pool = BufferPool(total, loop=asyncio.get_running_loop(), metrics=metrics)
    assert pool.try_reserve(total)
    return pool


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
async def errors() -> list[dict[str, Any]]:
    """What reaches the loop's exception handler."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


@pytest.fixture(autouse=True)
async def _no_unexpected_errors(errors: list[dict[str, Any]]) -> Any:
    yield
    gc.collect()  # "exception was never retrieved" comes from a finalizer
    await asyncio.sleep(0)
    assert [e["message"] for e in errors] == []


def raising(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> None:
        raise error

    return raise_it


# --- without waiting ----------------------------------------------------------------------


async def test_a_fresh_pool_is_free() -> None:
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    assert pool.statistics() == BufferPoolStatistics(
        total=TOTAL, available=TOTAL, held=0, reserved=0, waiting=0, exhausted=0, waited_seconds=0.0
    )
    assert repr(pool).startswith("<BufferPool total=100 available=100 held=0 reserved=0 waiting=0")


async def test_a_reservation_is_taken_and_given_back() -> None:
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    assert pool.try_reserve(60)
    assert numbers(pool) == (40, 0, 60, 0)
    assert not pool.try_reserve(41)
    assert pool.try_reserve(40)
    pool.release(60)
    assert numbers(pool) == (60, 0, 40, 0)


async def test_all_of_the_pool_can_be_asked_for_but_not_more() -> None:
    """BP-04: size == total is allowed, size == total + 1 can never succeed."""
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    for reserve in (pool.try_reserve, lambda size: pool.enter(size, 1.0, Ticket())):
        with pytest.raises(RecordTooLarge, match=r"101 bytes will never fit .* of 100 bytes"):
            reserve(TOTAL + 1)
    with pytest.raises(ValueError, match="buffer_memory"):
        await pool.reserve(TOTAL + 1, math.inf)
    assert pool.try_reserve(TOTAL)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_too_large_is_told_even_when_others_wait() -> None:
    pool = full_pool()
    pool.enter(1, math.inf, Ticket())
    with pytest.raises(RecordTooLarge):
        pool.try_reserve(TOTAL + 1)


async def test_a_pool_larger_than_32_bits_counts_right() -> None:
    """BP-11: 20 GB with pieces of 2 GB."""
    gb = 1 << 30
    pool = BufferPool(20 * gb, loop=asyncio.get_running_loop())
    for i in range(10):
        assert pool.try_reserve(2 * gb)
        assert pool.available == (18 - 2 * i) * gb
    assert not pool.try_reserve(1)
    for _ in range(10):
        pool.release(2 * gb)
    assert pool.available == 20 * gb


async def test_more_than_was_reserved_cannot_be_released() -> None:
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    pool.try_reserve(10)
    for size in (11, -1):
        with pytest.raises(IllegalStateError, match="given back once"):
            pool.release(size)
    assert numbers(pool) == (90, 0, 10, 0)


async def test_what_the_head_holds_cannot_be_released(log: list[str]) -> None:
    pool = full_pool()
    pool.release(40)
    pool.enter(50, math.inf, Asker(log))
    assert numbers(pool) == (0, 40, 60, 1)
    with pytest.raises(IllegalStateError):
        pool.release(61)


async def test_sizes_are_not_negative_and_may_be_zero() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        BufferPool(-1, loop=asyncio.get_running_loop())
    pool = BufferPool(0, loop=asyncio.get_running_loop())
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.try_reserve(-1)
    assert pool.try_reserve(0)
    pool.release(0)


# --- the line -----------------------------------------------------------------------------


async def test_a_ticket_is_served_at_once_when_there_is_room(log: list[str]) -> None:
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    pool.enter(TOTAL, 0.0, Asker(log, "a"))
    assert log == ["a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_the_releaser_serves_the_head_within_its_call(log: list[str]) -> None:
    """BP-05: who waits for the whole pool gets it when the outstanding memory is back."""
    pool = full_pool()
    pool.enter(TOTAL, math.inf, Asker(log, "a"))
    assert log == []
    pool.release(TOTAL)
    assert log == ["a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_one_release_serves_all_that_fit_in_order(log: list[str]) -> None:
    pool = full_pool()
    for name, size in (("a", 30), ("b", 20), ("c", 50), ("d", 1)):
        pool.enter(size, math.inf, Asker(log, name))
    pool.release(60)
    assert log == ["a granted", "b granted"]
    assert numbers(pool) == (0, 10, 90, 2)  # c holds 10 of its 50
    pool.release(40)
    assert log == ["a granted", "b granted", "c granted"]
    pool.release(1)
    assert log[3:] == ["d granted"]


async def test_a_small_ask_does_not_overtake_a_large_one_that_waits(log: list[str]) -> None:
    """BP-15: strictly first come, first served; newcomers queue."""
    pool = full_pool()
    pool.release(10)
    pool.enter(50, math.inf, Asker(log, "large"))
    assert not pool.try_reserve(1)
    pool.enter(1, math.inf, Asker(log, "small"))
    pool.release(30)
    assert log == []
    assert not pool.try_reserve(1)
    pool.release(10)
    assert log == ["large granted"]
    assert numbers(pool) == (0, 0, TOTAL, 1)


async def test_a_large_ask_is_not_starved_by_small_newcomers(log: list[str]) -> None:
    """Small asks come faster than memory comes back, and still the large one gets it all."""
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    for _ in range(TOTAL):
        assert pool.try_reserve(1)
    pool.enter(TOTAL, math.inf, Asker(log, "large"))
    for i in range(TOTAL):
        assert not pool.try_reserve(1)
        pool.enter(1, math.inf, Asker(log, f"small {i}"))
        pool.enter(1, math.inf, Asker(log, f"small {i}"))
        assert log == []
        pool.release(1)
        assert pool.held in (i + 1, 0)
    assert log == ["large granted"]
    pool.release(TOTAL)
    assert len(log) == 1 + TOTAL


async def test_a_ticket_that_leaves_gives_back_what_it_held(log: list[str]) -> None:
    pool = full_pool()
    head = Asker(log, "head")
    pool.enter(50, math.inf, head)
    pool.enter(20, math.inf, Asker(log, "next"))
    pool.release(30)
    assert numbers(pool) == (0, 30, 70, 2)
    pool.leave(head)
    assert log == ["next granted"]
    assert numbers(pool) == (10, 0, 90, 0)


async def test_leaving_from_the_middle_changes_nothing_for_the_others(log: list[str]) -> None:
    pool = full_pool()
    tickets = [Asker(log, name) for name in "abc"]
    for ticket in tickets:
        pool.enter(10, math.inf, ticket)
    pool.leave(tickets[1])
    pool.release(20)
    assert log == ["a granted", "c granted"]


async def test_leaving_again_or_after_being_served_does_nothing(log: list[str]) -> None:
    pool = full_pool()
    ticket = Asker(log, "a")
    pool.leave(ticket)
    pool.enter(10, math.inf, ticket)
    pool.release(10)
    pool.leave(ticket)
    pool.leave(ticket)
    assert log == ["a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_ticket_can_be_in_the_line_once_but_come_again(log: list[str]) -> None:
    pool = full_pool()
    ticket = Asker(log, "a")
    pool.enter(10, math.inf, ticket)
    with pytest.raises(IllegalStateError, match="already in the line"):
        pool.enter(20, math.inf, ticket)
    pool.release(10)
    pool.enter(20, math.inf, ticket)
    pool.release(20)
    assert log == ["a granted", "a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_ticket_must_say_what_its_turn_means() -> None:
    ticket = Ticket()
    assert ticket.claim() is False
    with pytest.raises(NotImplementedError):
        ticket.granted()
    with pytest.raises(NotImplementedError):
        ticket.refused(ProducerClosed())


# --- claim --------------------------------------------------------------------------------


async def test_a_claim_is_served_without_memory_and_the_next_gets_it(log: list[str]) -> None:
    pool = full_pool()
    claiming = Asker(log, "claiming", on_claim=lambda: True)
    pool.enter(1, math.inf, Asker(log, "head"))
    pool.enter(50, math.inf, claiming)
    pool.enter(2, math.inf, Asker(log, "next"))
    assert claiming.claims == 0  # only the head is asked
    pool.release(3)
    assert log == ["head granted", "next granted"]
    assert claiming.claims == 1
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_claim_needs_no_free_memory(log: list[str]) -> None:
    pool = full_pool()
    pool.enter(10, math.inf, Asker(log, "a", on_claim=lambda: True))
    assert numbers(pool) == (0, 0, TOTAL, 0)
    assert log == []


async def test_the_head_is_asked_again_and_gives_back_what_it_held_meanwhile(
    log: list[str],
) -> None:
    pool = full_pool()
    open_batch = {"has room": False}
    head = Asker(log, "head", on_claim=lambda: open_batch["has room"])
    pool.enter(50, math.inf, head)
    pool.release(30)
    assert numbers(pool) == (0, 30, 70, 1)
    open_batch["has room"] = True
    pool.serve()
    assert head.claims == 3
    assert numbers(pool) == (30, 0, 70, 0)
    assert log == []


async def test_the_record_of_the_next_may_fit_into_the_batch_that_the_head_opened(
    log: list[str],
) -> None:
    pool = full_pool()
    batches: list[str] = []
    pool.enter(20, math.inf, Asker(log, "a", on_granted=lambda: batches.append("new")))
    pool.enter(20, math.inf, Asker(log, "b", on_claim=lambda: bool(batches)))
    pool.release(20)
    assert log == ["a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_claim_that_raises_is_reported_and_means_no(
    log: list[str], errors: list[dict[str, Any]]
) -> None:
    pool = full_pool()
    error = ZeroDivisionError()
    ticket = Asker(log, "a", on_claim=raising(error))
    pool.enter(10, math.inf, ticket)
    pool.release(10)
    assert log == ["a granted"]
    assert [(e["exception"], e["ticket"]) for e in errors] == [(error, ticket)] * 2
    assert errors[0]["message"] == "Asker.claim() failed: the line for memory goes on"
    errors.clear()


# --- callbacks that call back -------------------------------------------------------------


async def test_a_claim_may_release_memory_and_use_it_at_once(log: list[str]) -> None:
    pool = full_pool()
    once = iter([True])

    def release() -> bool:
        if next(once, False):
            pool.release(10)
        return False

    pool.enter(10, math.inf, Asker(log, "a", on_claim=release))
    assert log == ["a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


@pytest.mark.parametrize("answer", [True, False])
async def test_a_claim_may_leave_the_line(log: list[str], answer: bool) -> None:
    pool = full_pool()

    def leave() -> bool:
        if ticket.claims < 3:  # each time somebody enters
            return False
        pool.leave(ticket)
        return answer

    ticket = Asker(log, "a", on_claim=leave)
    pool.enter(10, math.inf, ticket)
    pool.enter(10, math.inf, Asker(log, "b"))
    assert pool.waiting == 2
    pool.release(10)
    assert log == ["b granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


@pytest.mark.parametrize("answer", [True, False])
async def test_a_claim_may_close_the_pool(log: list[str], answer: bool) -> None:
    pool = full_pool()

    def close() -> bool:
        pool.close()
        return answer

    pool.enter(10, math.inf, Asker(log, "a", on_claim=close))
    assert log == ["a ProducerClosed"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_memory_released_inside_granted_goes_to_the_next_in_line(log: list[str]) -> None:
    """Re-entrancy reorders nothing: who enters inside a callback is behind all others."""
    pool = full_pool()
    late = Asker(log, "late")

    def release_and_enter() -> None:
        pool.enter(5, math.inf, late)
        pool.release(10)
        log.append("a returns")

    pool.enter(10, math.inf, Asker(log, "a", on_granted=release_and_enter))
    pool.enter(4, math.inf, Asker(log, "b"))
    pool.enter(3, math.inf, Asker(log, "c"))
    pool.release(10)
    assert log == ["a granted", "a returns", "b granted", "c granted"]
    assert numbers(pool) == (0, 3, 97, 1)
    pool.release(2)
    assert log[4:] == ["late granted"]


async def test_a_newcomer_inside_granted_does_not_pass_those_who_wait(log: list[str]) -> None:
    pool = full_pool()
    got: list[bool] = []
    pool.enter(10, math.inf, Asker(log, "a", on_granted=lambda: got.append(pool.try_reserve(1))))
    pool.enter(10, math.inf, Asker(log, "b", on_granted=lambda: got.append(pool.try_reserve(1))))
    pool.release(25)
    assert got == [False, True]  # nobody waits behind b: there are 5 bytes left


async def test_the_stack_stays_flat_when_each_owner_releases_at_once(log: list[str]) -> None:
    pool = full_pool()
    waiters = 10_000  # Python's recursion limit is 1000
    for _ in range(waiters):
        pool.enter(TOTAL, math.inf, Asker(log, on_granted=lambda: pool.release(TOTAL)))
    pool.release(TOTAL)
    assert len(log) == waiters
    assert numbers(pool) == (TOTAL, 0, 0, 0)


async def test_a_ticket_may_enter_again_inside_its_own_granted(log: list[str]) -> None:
    pool = full_pool()
    rounds = iter(range(5000))

    def again() -> None:
        pool.release(10)
        if next(rounds, None) is not None:
            pool.enter(10, math.inf, ticket)

    ticket = Asker(log, on_granted=again)
    pool.enter(10, math.inf, ticket)
    pool.release(10)
    assert len(log) == 5001
    assert numbers(pool) == (10, 0, 90, 0)


async def test_close_inside_granted_refuses_the_rest(log: list[str]) -> None:
    pool = full_pool()
    pool.enter(10, math.inf, Asker(log, "a", on_granted=pool.close))
    pool.enter(10, math.inf, Asker(log, "b"))
    pool.release(30)
    assert log == ["a granted", "b ProducerClosed"]
    assert numbers(pool) == (20, 0, 80, 0)


async def test_leaving_for_another_inside_granted(log: list[str]) -> None:
    pool = full_pool()
    other = Asker(log, "b")
    pool.enter(10, math.inf, Asker(log, "a", on_granted=lambda: pool.leave(other)))
    pool.enter(10, math.inf, other)
    pool.enter(10, math.inf, Asker(log, "c"))
    pool.release(20)
    assert log == ["a granted", "c granted"]


async def test_granted_that_raises_gives_the_memory_to_the_next(
    log: list[str], errors: list[dict[str, Any]]
) -> None:
    """BP-12: a failure while the buffer is made refunds the memory and wakes the next.

    Who asked is told, and so is the loop's exception handler: it is a fault of ours.
    """
    pool = full_pool()
    error = MemoryError()
    pool.enter(60, math.inf, Asker(log, "a", on_granted=raising(error)))
    pool.enter(60, math.inf, Asker(log, "b"))
    pool.release(60)
    assert log == ["a granted", "a MemoryError", "b granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)
    assert [e["exception"] for e in errors] == [error]
    errors.clear()


async def test_granted_that_enters_again_and_then_raises_loses_only_its_grant(
    log: list[str], errors: list[dict[str, Any]]
) -> None:
    pool = full_pool()

    def again() -> None:
        ticket.on_granted = None
        pool.enter(30, math.inf, ticket)
        raise ZeroDivisionError

    ticket = Asker(log, "a", on_granted=again)
    pool.enter(10, math.inf, ticket)
    pool.release(10)
    assert numbers(pool) == (0, 10, 90, 1)
    pool.release(20)
    assert log == ["a granted", "a granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)
    errors.clear()


async def test_refused_that_raises_does_not_stop_the_line(
    log: list[str], errors: list[dict[str, Any]]
) -> None:
    pool = full_pool()
    pool.enter(50, 1.0, Asker(log, "a", on_refused=raising(ZeroDivisionError())))
    pool.enter(20, 9.0, Asker(log, "b", on_refused=raising(ZeroDivisionError())))
    pool.enter(10, 9.0, Asker(log, "c"))
    pool.release(15)
    await asyncio.sleep(1.0)
    assert numbers(pool) == (0, 15, 85, 2)
    pool.close()
    assert log == ["a BufferTimeout", "b ProducerClosed", "c ProducerClosed"]
    assert len(errors) == 2
    errors.clear()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("callback", ["on_claim", "on_granted", "on_refused"])
def test_an_interrupt_goes_up_but_the_line_goes_on(
    callback: str, interrupt: type[BaseException]
) -> None:
    log: list[str] = []
    loop = VirtualTimeLoop()
    pool = BufferPool(TOTAL, loop=loop)
    pool.try_reserve(TOTAL)
    first = Asker(log, "a")
    pool.enter(10, 5.0, first)
    pool.enter(10, math.inf, Asker(log, "b"))

    def interrupted() -> bool:
        setattr(first, callback, None)
        raise interrupt

    setattr(first, callback, interrupted)

    def provoke() -> None:
        if callback == "on_refused":
            loop.run_until_complete(asyncio.sleep(10.0))
        pool.release(10)

    with pytest.raises(interrupt):
        provoke()
    assert pool.statistics()[1:5] in {(10, 0, 90, 1), (10, 0, 90, 2), (0, 0, TOTAL, 1)}
    if callback == "on_refused":
        pool.release(10)
    loop.run_until_complete(asyncio.sleep(1.0))
    assert (
        log
        == {
            "on_claim": ["a granted"],
            "on_granted": ["a granted", "b granted"],
            "on_refused": ["a BufferTimeout", "b granted"],
        }[callback]
    )
    assert numbers(pool)[:3] == (0, 0, TOTAL)
    loop.close()


# --- metrics ------------------------------------------------------------------------------


class Heard(Metrics):
    """Notes what the pool tells."""

    def __init__(self) -> None:
        super().__init__(client_id="test")
        self.waits: list[tuple[float, float]] = []
        self.exhausted: list[float] = []

    def memory_waited(self, seconds: float, now: float) -> None:
        self.waits.append((seconds, now))

    def buffer_exhausted(self, now: float) -> None:
        self.exhausted.append(now)


async def test_waits_that_end_together_are_told_once(log: list[str]) -> None:
    """Not per record: those behind the head fit into the batch that it opens."""
    metrics = Heard()
    pool = full_pool(metrics=metrics)
    pool.enter(50, math.inf, Asker(log, "head"))
    await asyncio.sleep(1.0)
    for _ in range(3):
        pool.enter(1, math.inf, Asker(log, on_claim=lambda: "head granted" in log))
    await asyncio.sleep(1.0)
    assert metrics.waits == []
    pool.release(50)
    assert pool.waiting == 0
    assert metrics.waits == [(5.0, 2.0)]
    assert pool.waited_seconds == 5.0


@pytest.mark.parametrize("end", ["leave", "time out", "close"])
async def test_waits_in_vain_are_told_as_well(log: list[str], end: str) -> None:
    metrics = Heard()
    pool = full_pool(metrics=metrics)
    ticket = Asker(log)
    pool.enter(50, 2.0, ticket)
    await asyncio.sleep(1.0)
    if end == "leave":
        pool.leave(ticket)
    elif end == "close":
        pool.close()
    else:
        await asyncio.sleep(2.0)
    waited = 2.0 if end == "time out" else 1.0
    assert metrics.waits == [(waited, waited)]
    assert metrics.exhausted == ([2.0] if end == "time out" else [])
    pool.close()
    assert len(metrics.waits) == 1


async def test_every_record_without_memory_is_told_once(log: list[str]) -> None:
    """BP-16: also of those who have no time to wait, and of those who would not."""
    metrics = Heard()
    pool = full_pool(metrics=metrics)
    pool.enter(50, 0.0, Asker(log))
    await asyncio.sleep(1.0)
    pool.turned_away()
    assert metrics.exhausted == [0.0, 1.0]
    assert pool.exhausted == 2
    assert metrics.waits == []


# --- deadlines ----------------------------------------------------------------------------


async def test_a_wait_ends_at_its_deadline_and_not_earlier(log: list[str]) -> None:
    """BP-06, BP-07, BP-16: BufferTimeout at the deadline, no waiter left, counted once."""
    pool = full_pool()
    await asyncio.sleep(3.0)
    ticket = Asker(log, "a")
    pool.enter(70, 63.0, ticket)
    pool.release(60)
    await asyncio.sleep(59.999)
    assert log == []
    assert numbers(pool) == (0, 60, 40, 1)
    await asyncio.sleep(0.001)
    assert log == ["a BufferTimeout"]
    assert numbers(pool) == (60, 0, 40, 0)
    assert pool.exhausted == 1
    assert isinstance(ticket.error, TimeoutError)
    assert isinstance(ticket.error, BufferTimeout)
    assert ticket.error.retriable
    assert str(ticket.error).startswith(
        "no 70 bytes of buffer_memory within 60.000 s: 60 of 100 bytes are free, 0 others wait"
    )


async def test_the_head_that_times_out_passes_its_partial_grant_on(log: list[str]) -> None:
    pool = full_pool()
    pool.enter(80, 1.0, Asker(log, "head"))
    pool.enter(30, 9.0, Asker(log, "b"))
    pool.enter(30, 9.0, Asker(log, "c"))
    pool.release(50)
    await asyncio.sleep(1.0)
    assert log == ["head BufferTimeout", "b granted"]
    assert numbers(pool) == (0, 20, 80, 1)


async def test_one_behind_the_head_can_time_out_first(log: list[str]) -> None:
    pool = full_pool()
    pool.enter(80, 9.0, Asker(log, "head"))
    pool.enter(30, 1.0, Asker(log, "b"))
    pool.release(50)
    await asyncio.sleep(2.0)
    assert log == ["b BufferTimeout"]
    assert numbers(pool) == (0, 50, 50, 1)
    pool.release(30)
    assert log[1:] == ["head granted"]


async def test_deadlines_are_met_in_their_own_order(log: list[str]) -> None:
    pool = full_pool()
    for name, deadline in (("c", 3.0), ("a", 1.0), ("never", math.inf), ("d", 4.0), ("b", 2.0)):
        pool.enter(1, deadline, Asker(log, name))
    times = []
    for _ in range(4):
        await asyncio.sleep(1.0)
        times.append(log[-1])
    assert times == [f"{name} BufferTimeout" for name in "abcd"]
    await asyncio.sleep(1e4)
    assert pool.waiting == 1
    assert pool._timer is None  # no deadline, no timer


async def test_no_budget_means_an_immediate_answer(log: list[str]) -> None:
    """max_block_ms=0: an ask that cannot be satisfied now fails now."""
    pool = full_pool()
    pool.release(5)
    await asyncio.sleep(1.0)
    pool.enter(10, 1.0, Asker(log, "a"))
    assert log == ["a BufferTimeout"]
    pool.enter(5, 1.0, Asker(log, "b"))
    assert log[1:] == ["b granted"]
    with pytest.raises(BufferTimeout):
        await pool.reserve(1, 0.0)
    assert pool.exhausted == 2
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_no_budget_inside_a_callback_is_no_budget_either(log: list[str]) -> None:
    pool = full_pool()
    poor = Asker(log, "poor")
    pool.enter(10, 5.0, Asker(log, "a", on_granted=lambda: pool.enter(1, 0.0, poor)))
    pool.enter(10, 5.0, Asker(log, "b"))
    pool.release(20)
    assert log == ["a granted", "poor BufferTimeout", "b granted"]
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_those_who_time_out_together_do_not_serve_each_other(log: list[str]) -> None:
    """What the head held would do for the second, but its time is up as well."""
    pool = full_pool()
    pool.enter(50, 1.0, Asker(log, "a"))
    pool.enter(10, 1.0, Asker(log, "b"))
    pool.enter(10, 2.0, Asker(log, "c"))
    pool.release(20)
    await asyncio.sleep(1.0)
    assert log == ["a BufferTimeout", "b BufferTimeout", "c granted"]


async def test_memory_that_comes_back_in_refused_is_not_for_one_whose_time_is_up(
    log: list[str],
) -> None:
    pool = full_pool()
    pool.enter(50, 1.0, Asker(log, "a", on_refused=lambda: pool.release(10)))
    pool.enter(10, 1.0, Asker(log, "b"))
    pool.enter(10, 2.0, Asker(log, "c"))
    await asyncio.sleep(1.0)
    assert log == ["a BufferTimeout", "b BufferTimeout", "c granted"]


async def test_a_refused_ticket_may_call_back(log: list[str]) -> None:
    pool = full_pool()
    second = Asker(log, "second")
    last = Asker(log, "last")

    def on_refused() -> None:
        pool.leave(second)  # it was due in the same turn: now it only left
        pool.release(5)
        pool.enter(7, 2.0, last)

    pool.enter(50, 1.0, Asker(log, "first", on_refused=on_refused))
    pool.enter(10, 1.0, second)
    await asyncio.sleep(1.0)
    assert log == ["first BufferTimeout"]
    assert numbers(pool) == (0, 5, 95, 1)
    await asyncio.sleep(1.0)
    assert log == ["first BufferTimeout", "last BufferTimeout"]
    assert pool.exhausted == 2


async def test_a_ticket_that_was_served_or_left_does_not_time_out(log: list[str]) -> None:
    pool = full_pool()
    served, left, again = Asker(log, "served"), Asker(log, "left"), Asker(log, "again")
    for ticket in (served, left, again):
        pool.enter(10, 1.0, ticket)
    pool.leave(left)
    pool.release(20)
    pool.enter(10, 5.0, again)  # with another deadline
    await asyncio.sleep(4.0)
    assert log == ["served granted", "again granted"]
    await asyncio.sleep(1.0)
    assert log[2:] == ["again BufferTimeout"]
    assert pool.exhausted == 1


class CountingLoop(VirtualTimeLoop):
    """Counts timers, and has a clock that timers may come before."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = 0
        self.behind = 0.0

    def time(self) -> float:
        return super().time() - self.behind

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, **kwargs: Any
    ) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, callback, *args, **kwargs)

    def _set_time(self, now: float) -> None:
        super()._set_time(now)
        self._clock_resolution = 1e-9  # as real loops have it


def on_counting_loop(main: Callable[[CountingLoop], Coroutine[Any, Any, None]]) -> None:
    loop = CountingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


def test_a_timer_that_comes_a_little_early_is_on_time() -> None:
    """asyncio may run a timer up to its clock's resolution (a nanosecond) before its deadline."""

    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = full_pool()
        loop.behind = 5e-10
        pool.enter(10, 1.0, Asker(log, "a"))
        await asyncio.sleep(1.5)
        assert log == ["a BufferTimeout"]
        assert loop.timers == 2  # the sleep's, and ours, which was not armed again

    on_counting_loop(main)


def test_the_pool_has_one_timer_however_many_wait() -> None:
    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = full_pool()
        for i in range(1000):
            pool.enter(1, 60.0 + i / 1e6, Asker(log))
        assert loop.timers == 1
        pool.enter(1, 30.0, Asker(log))  # earlier than all: the timer moves
        assert loop.timers == 2

    on_counting_loop(main)


def test_served_tickets_do_not_pile_up_until_their_deadline() -> None:
    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = full_pool()
        for i in range(1000):
            pool.enter(10, 60.0 + i, Asker(log))
            pool.release(10)
            assert len(pool._deadlines) < 100
        assert len(log) == 1000
        assert loop.timers == 1
        pool.enter(10, 1e4, Asker(log, "a"))
        await asyncio.sleep(1e4)
        assert log[1000:] == ["a BufferTimeout"]

    on_counting_loop(main)


async def test_the_time_waited_is_counted_however_the_wait_ends(log: list[str]) -> None:
    pool = full_pool()
    left = Asker(log)
    pool.enter(10, math.inf, left)
    await asyncio.sleep(1.0)
    pool.leave(left)
    assert pool.waited_seconds == 1.0
    pool.enter(10, math.inf, Asker(log))
    await asyncio.sleep(2.0)
    pool.release(10)
    assert pool.waited_seconds == 3.0
    pool.enter(10, 7.0, Asker(log))
    await asyncio.sleep(4.0)
    assert pool.waited_seconds == 7.0
    claims = iter([False, True])
    pool.enter(10, math.inf, Asker(log, on_claim=lambda: next(claims)))
    await asyncio.sleep(8.0)
    pool.serve()
    assert pool.waited_seconds == 15.0
    pool.enter(10, math.inf, Asker(log))
    await asyncio.sleep(16.0)
    pool.close()
    assert pool.waited_seconds == 31.0


# --- close --------------------------------------------------------------------------------


async def test_close_refuses_everybody_who_waits_in_order(log: list[str]) -> None:
    """BP-14: all who wait are told, also those with no deadline."""
    pool = full_pool()
    for name in "abc":
        pool.enter(50, math.inf, Asker(log, name))
    pool.release(20)
    pool.close()
    assert log == ["a ProducerClosed", "b ProducerClosed", "c ProducerClosed"]
    assert numbers(pool) == (20, 0, 80, 0)
    assert pool.exhausted == 0
    assert "closed" in repr(pool)


async def test_who_rests_goes_on_when_it_is_time_or_the_pool_is_closed() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    pool = full_pool()
    await pool.rest(5.0)
    assert loop.time() == pytest.approx(began + 5.0)
    two = [asyncio.create_task(pool.rest(60.0)) for _ in range(2)]
    cancelled = asyncio.create_task(pool.rest(60.0))
    await asyncio.sleep(1.0)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert cancelled.cancelled()
    pool.close()
    await asyncio.gather(*two)
    await pool.rest(60.0)
    assert loop.time() == pytest.approx(began + 6.0)


async def test_who_rests_goes_on_when_so_much_is_free() -> None:
    """And what he wanted counts no more for the next one."""
    loop = asyncio.get_running_loop()
    pool = full_pool()
    for wanted, too_little, rest_of_it in ((50, 49, 1), (80, 20, 10)):
        began = loop.time()
        rest = asyncio.create_task(pool.rest(60.0, wanted))
        await asyncio.sleep(1.0)
        pool.release(too_little)
        await asyncio.sleep(1.0)
        assert not rest.done()
        pool.release(rest_of_it)
        await rest
        assert loop.time() == pytest.approx(began + 2.0)


async def test_close_can_say_why_and_everybody_gets_an_error_of_his_own(log: list[str]) -> None:
    """One for all would collect the tracebacks of all who raise it."""
    pool = full_pool()
    tickets = [Asker(log, name) for name in "abc"]
    for ticket in tickets:
        pool.enter(50, math.inf, ticket)
    reason = BrokerError(ErrorCode.PRODUCER_FENCED, "there is another one")
    reason.__cause__ = cause = KeyError("cause")
    pool.close(reason)
    assert log == ["a BrokerError", "b BrokerError", "c BrokerError"]
    told = [ticket.error for ticket in tickets]
    assert len({id(error) for error in (*told, reason)}) == 4
    for error in told:
        assert isinstance(error, BrokerError)
        assert (str(error), error.code) == (str(reason), reason.code)
        assert error.__cause__ is cause
    assert numbers(pool) == (0, 0, TOTAL, 0)
    assert pool.closed


async def test_the_reason_is_for_those_who_wait_and_not_for_those_who_come(
    log: list[str],
) -> None:
    """Who comes is told by others, before he asks for memory."""
    pool = full_pool()
    waiting = asyncio.create_task(pool.reserve(10, math.inf))
    await turns()
    pool.close(BrokerError(ErrorCode.PRODUCER_FENCED))
    with pytest.raises(BrokerError, match="PRODUCER_FENCED"):
        await waiting
    for reason in (None, BrokerError(ErrorCode.INVALID_REQUEST)):
        pool.close(reason)
        with pytest.raises(ProducerClosed):
            await pool.reserve(1, math.inf)
        with pytest.raises(ProducerClosed):
            pool.enter(1, math.inf, Asker(log))
    assert log == []


async def test_a_closed_pool_takes_back_but_gives_nothing(log: list[str]) -> None:
    """BP-13: reserving after close raises, releasing works."""
    pool = full_pool()
    pool.close()
    pool.close()
    with pytest.raises(ProducerClosed):
        pool.try_reserve(1)
    with pytest.raises(ProducerClosed):
        pool.enter(1, math.inf, Asker(log))
    with pytest.raises(ProducerClosed):
        await pool.reserve(1, math.inf)
    pool.release(TOTAL)
    assert numbers(pool) == (TOTAL, 0, 0, 0)


async def test_nobody_enters_while_the_pool_closes(log: list[str]) -> None:
    pool = full_pool()
    seen: list[object] = []

    def on_refused() -> None:
        pool.release(50)
        seen.append(numbers(pool))
        with pytest.raises(ProducerClosed):
            pool.try_reserve(1)
        with pytest.raises(ProducerClosed):
            pool.enter(1, math.inf, Asker(log, "late"))

    for name in "ab":
        pool.enter(10, math.inf, Asker(log, name, on_refused=on_refused))
    pool.close()
    assert log == ["a ProducerClosed", "b ProducerClosed"]
    assert seen == [(50, 0, 50, 0), (100, 0, 0, 0)]


def test_no_timer_remains_after_close() -> None:
    async def main(loop: CountingLoop) -> None:
        pool = full_pool()
        pool.enter(10, 60.0, Asker([]))
        timer = pool._timer
        pool.close()
        assert timer is not None
        assert timer.cancelled()
        assert pool._timer is None

    on_counting_loop(main)


# --- await reserve() ----------------------------------------------------------------------


async def test_reserve_does_not_wait_when_there_is_room() -> None:
    pool = BufferPool(TOTAL, loop=asyncio.get_running_loop())
    coroutine = pool.reserve(TOTAL, math.inf)
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_reserve_waits_its_turn() -> None:
    pool = full_pool()
    order: list[int] = []

    async def ask(size: int) -> None:
        await pool.reserve(size, math.inf)
        order.append(size)

    async with asyncio.TaskGroup() as group:
        for size in (30, 20, 50, 10):
            group.create_task(ask(size))
        await turns()
        pool.release(90)
        await turns()
        assert order == [30, 20]
        pool.release(10)
        await turns()
        assert order == [30, 20, 50]
        pool.release(10)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_reserve_times_out_at_its_deadline() -> None:
    """BP-06 for tasks."""
    pool = full_pool()
    loop = asyncio.get_running_loop()
    with pytest.raises(BufferTimeout):
        await pool.reserve(10, 60.0)
    assert loop.time() == 60.0
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_reserve_is_told_when_the_pool_closes() -> None:
    pool = full_pool()
    waiting = [asyncio.create_task(pool.reserve(10, math.inf)) for _ in range(3)]
    await turns()
    pool.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [ProducerClosed] * 3


async def test_two_cancelled_waiters_both_leave_the_line() -> None:
    """BP-08."""
    pool = full_pool()
    tasks = [asyncio.create_task(pool.reserve(60, math.inf)) for _ in range(2)]
    await turns()
    pool.release(50)
    assert numbers(pool) == (0, 50, 50, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert numbers(pool) == (50, 0, 50, 0)


async def test_cancelled_and_then_released_in_one_turn_goes_to_the_next() -> None:
    """The lost notify: the cancelled one is still in the line when the memory comes."""
    pool = full_pool()
    first = asyncio.create_task(pool.reserve(50, math.inf))
    second = asyncio.create_task(pool.reserve(50, math.inf))
    await turns()
    first.cancel()
    pool.release(50)
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.result() is None
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_released_and_then_cancelled_in_one_turn_goes_to_the_next() -> None:
    """The other order: the memory was granted, and its task never sees it."""
    pool = full_pool()
    first = asyncio.create_task(pool.reserve(50, math.inf))
    second = asyncio.create_task(pool.reserve(50, math.inf))
    await turns()
    pool.release(50)
    assert numbers(pool) == (0, 0, TOTAL, 1)
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.result() is None
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_timed_out_and_cancelled_in_one_turn_is_cancelled() -> None:
    pool = full_pool()
    task = asyncio.create_task(pool.reserve(50, 5.0))
    await turns()
    asyncio.get_running_loop().call_at(5.0, task.cancel)  # after the pool's timer
    await asyncio.wait([task])
    assert task.cancelled()
    assert pool.exhausted == 1
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_cancelled_and_timed_out_in_one_turn_is_cancelled() -> None:
    pool = full_pool()
    task: asyncio.Task[None]
    asyncio.get_running_loop().call_at(5.0, lambda: task.cancel())  # before the pool's timer
    task = asyncio.create_task(pool.reserve(50, 5.0))
    await asyncio.wait([task])
    assert task.cancelled()
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_closed_and_cancelled_in_one_turn_is_cancelled() -> None:
    pool = full_pool()
    tasks = [asyncio.create_task(pool.reserve(50, 5.0)) for _ in range(2)]
    await turns()
    tasks[0].cancel()
    pool.close()
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_timeout_around_reserve_works_like_a_cancellation() -> None:
    pool = full_pool()
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(1.0):
            await pool.reserve(10, 60.0)
    assert not isinstance(caught.value, BufferTimeout)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_coroutine_that_is_thrown_away_leaves_the_line() -> None:
    pool = full_pool()
    coroutine = pool.reserve(10, math.inf)
    coroutine.send(None)
    assert pool.waiting == 1
    coroutine.close()
    assert numbers(pool) == (0, 0, TOTAL, 0)


def test_a_coroutine_that_outlives_its_loop_loses_no_memory() -> None:
    found: list[dict[str, Any]] = []
    loop = VirtualTimeLoop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    pool = BufferPool(TOTAL, loop=loop)
    pool.try_reserve(TOTAL)
    coroutine = pool.reserve(10, math.inf)
    waiting = coroutine.send(None)
    waiting.add_done_callback(lambda _: None)
    loop.close()
    pool.release(10)  # cannot wake anybody
    assert [str(context["exception"]) for context in found] == ["Event loop is closed"]
    coroutine.close()
    assert numbers(pool) == (10, 0, 90, 0)


async def test_an_anyio_scope_cancels_a_wait() -> None:
    pool = full_pool()
    with anyio.move_on_after(1.0) as scope:
        await pool.reserve(10, math.inf)
    assert scope.cancelled_caught
    assert numbers(pool) == (0, 0, TOTAL, 0)


@pytest.mark.parametrize("release_first", [True, False])
async def test_anyio_cancellation_in_the_turn_of_the_release_loses_nothing(
    release_first: bool,
) -> None:
    """A scope that is cancelled after the release lets the wait succeed: the memory is its own."""
    pool = full_pool()
    got: list[str] = []

    async def ask(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            await pool.reserve(50, math.inf)
            got.append(name)

    scopes = [anyio.CancelScope(), anyio.CancelScope()]
    async with anyio.create_task_group() as group:
        for name, scope in zip("ab", scopes, strict=True):
            group.start_soon(ask, name, scope)
        await turns()
        if release_first:
            pool.release(50)
            scopes[0].cancel()
        else:
            scopes[0].cancel()
            pool.release(50)
        await turns()
        assert got == (["a"] if release_first else ["b"])
        assert numbers(pool)[:3] == (0, 0, TOTAL)
        if release_first:
            pool.release(50)
    assert numbers(pool) == (0, 0, TOTAL, 0)


async def test_a_wait_cancelled_by_anyio_ends_without_spinning() -> None:
    """Level cancellation comes again in each turn of the loop: nothing may be awaited on the way.

    The tasks end within a fixed number of turns, while somebody else works with the pool.
    """
    pool = full_pool()
    loop_turns = 0

    async def ask() -> None:
        await pool.reserve(50, math.inf)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(ask)
            await turns()
            assert pool.waiting == 50
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                while pool.waiting:
                    loop_turns += 1
                    await asyncio.sleep(0)
    assert not scope.cancelled_caught
    assert loop_turns <= 3
    assert numbers(pool) == (0, 0, TOTAL, 0)


# --- cost ---------------------------------------------------------------------------------


class CountingPool(BufferPool):
    """Counts how often the head of the line is looked at."""

    looks = 0

    def _serve_head(self) -> bool:
        self.looks += 1
        return super()._serve_head()


MANY = 50_000


def test_50000_waiters_are_served_at_a_flat_cost() -> None:
    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = CountingPool(TOTAL, loop=loop)
        pool.try_reserve(TOTAL)
        tickets = [Asker(log) for _ in range(MANY)]
        for i, ticket in enumerate(tickets):
            pool.enter(10, 60.0 + i / MANY, ticket)
        assert (pool.looks, loop.timers) == (MANY, 1)
        for _ in range(MANY):
            pool.release(10)
        assert len(log) == MANY
        # Once when it comes, once when it is the head that could not be served yet,
        # and once when it is served.
        assert pool.looks <= 3 * MANY
        assert sum(ticket.claims for ticket in tickets) == pool.looks
        assert loop.timers == 1

    on_counting_loop(main)


def test_50000_waiters_time_out_at_a_flat_cost() -> None:
    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = CountingPool(TOTAL, loop=loop)
        pool.try_reserve(TOTAL)
        for i in range(MANY):
            pool.enter(10, 60.0 + i % 7, Asker(log))
        before = pool.looks
        await asyncio.sleep(100.0)
        assert pool.exhausted == len(log) == MANY
        assert pool.looks - before <= 7
        assert loop.timers <= 1 + 1 + 7  # the sleep's, the first, one per different deadline

    on_counting_loop(main)


def test_50000_waiters_leave_in_any_order_at_a_flat_cost() -> None:
    async def main(loop: CountingLoop) -> None:
        log: list[str] = []
        pool = CountingPool(TOTAL, loop=loop)
        pool.try_reserve(TOTAL)
        tickets = [Asker(log) for _ in range(MANY)]
        for ticket in tickets:
            pool.enter(10, 60.0, ticket)
        random.Random(1).shuffle(tickets)
        before = pool.looks
        for ticket in tickets:
            pool.leave(ticket)
        assert pool.looks - before <= MANY
        assert numbers(pool) == (0, 0, TOTAL, 0)
        assert log == []

    on_counting_loop(main)


# --- storms -------------------------------------------------------------------------------


class CheckedPool(BufferPool):
    """Keeps its own account of what is reserved, and checks after every step.

    A step is a call from outside or a callback to the outside: wherever code of others
    can run, the sum is right, nothing is negative, and the order is that of entering.
    """

    def __init__(self, total: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(total, loop=loop)
        self.account = 0
        self.line: deque[Ticket] = deque()
        self.steps = 0

    def check(self) -> None:
        self.steps += 1
        assert min(self.available, self.held, self.account) >= 0
        assert self.available + self.held + self.account == self.total
        assert self.reserved == self.account
        assert self.waiting == len(self.line)

    def try_reserve(self, size: int, share: Share | None = None, *, spares: bool = False) -> bool:
        reserved = super().try_reserve(size, share, spares=spares)
        assert not (reserved and self.line)
        self.account += size if reserved else 0
        self.check()
        return reserved

    def release(self, size: int) -> None:
        self.account -= size
        super().release(size)
        self.check()

    def enter(self, size: int, deadline: float, ticket: Ticket) -> None:
        self.line.append(ticket)
        super().enter(size, deadline, ticket)
        self.check()

    def leave(self, ticket: Ticket) -> None:
        if ticket in self.line:
            self.line.remove(ticket)
        super().leave(ticket)
        self.check()

    def close(self, error: BaseException | None = None) -> None:
        self.line.clear()
        super().close(error)
        self.check()

    def _claim(self, ticket: Ticket) -> bool:
        assert ticket is self.line[0]
        self.check()
        claimed = super()._claim(ticket)
        if claimed and self.line and self.line[0] is ticket:
            self.line.popleft()
        return claimed

    def _grant(self, ticket: Ticket) -> None:
        assert ticket is self.line.popleft()
        self.account += ticket._asked
        self.check()
        super()._grant(ticket)
        self.check()

    def _refuse(self, ticket: Ticket, error: BaseException) -> None:
        if ticket in self.line:
            self.line.remove(ticket)
        self.check()
        super()._refuse(ticket, error)


async def _storm(seed: int, *, workers: int, rounds: int) -> CheckedPool:
    loop = asyncio.get_running_loop()
    pool = CheckedPool(TOTAL, loop=loop)
    chance = random.Random(seed)
    outcomes: dict[str, int] = {}
    # In the order of their beginning, so that a seed always chooses the same of them.
    tasks: dict[asyncio.Task[None], None] = {}

    def count(outcome: str) -> None:
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async def pause() -> None:
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.0, chance.random() * 0.01)))

    async def hold(size: int) -> None:
        try:
            await pause()
        finally:
            pool.release(size)

    async def use(size: int) -> None:
        deadline = loop.time() + chance.choice((0.0, 0.01, 0.1, math.inf))
        try:
            how = chance.randrange(3)
            if how == 0:
                with anyio.move_on_after(chance.random() * 0.02):
                    await pool.reserve(size, deadline)
                    await hold(size)
            elif how == 1:
                async with asyncio.timeout(chance.random() * 0.02):
                    await pool.reserve(size, deadline)
                    await hold(size)
            else:
                await pool.reserve(size, deadline)
                await hold(size)
            count("done")
        except BufferTimeout:
            count("exhausted")
        except TimeoutError:
            count("timeout")
        except asyncio.CancelledError:
            count("cancelled")
            raise

    async def worker() -> None:
        for _ in range(rounds):
            # Ten workers ask for about twice the pool.
            task = asyncio.create_task(use(chance.randint(1, 2 * TOTAL * 2 // workers)))
            tasks[task] = None
            task.add_done_callback(tasks.pop)
            await pause()
            if chance.random() < 0.3:
                victim = chance.choice([*tasks]) if tasks else task
                victim.cancel()
            if chance.random() < 0.7:
                await asyncio.wait([task])
            pool.check()

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())
    while tasks:
        await asyncio.wait(tasks)
    assert pool.exhausted == outcomes["exhausted"]
    assert set(outcomes) == {"done", "exhausted", "timeout", "cancelled"}
    return pool


@pytest.mark.parametrize("seed", range(10))
async def test_a_storm_of_tasks_leaves_the_pool_as_it_was(seed: int) -> None:
    """BP-10: ten workers, half the memory that they want; with cancellation and timeouts."""
    pool = await _storm(seed, workers=10, rounds=100)
    assert numbers(pool) == (TOTAL, 0, 0, 0)
    assert pool.steps > 2000


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, callbacks that call back included, against a simple model."""

    behaviours: ClassVar = (
        "keep",
        "release",
        "raise",
        "enter",
        "leave other",
        "release other",
        "try",
    )

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.pool = CheckedPool(TOTAL, loop=self.loop)
        self.reserved: list[int] = []
        self.served = 0
        self.tickets = 0

    # -- what a ticket does ----------------------------------------------------------------

    def make(self, size: int, claim: str, granted: str, refused: str) -> Asker:
        self.tickets += 1
        ticket = Asker([], str(self.tickets))
        asked = iter(range(100))

        def on_claim() -> bool:
            self.pool.check()
            if claim == "raise":
                raise ZeroDivisionError
            if claim == "release":
                self.release_one(0)
            return claim == "yes" or (claim == "later" and next(asked) > 0)

        def on_granted() -> None:
            self.pool.check()
            self.served += 1
            if granted == "raise":
                # The pool takes it back after this: the account has to know.
                self.pool.account -= size
                raise ZeroDivisionError
            if granted == "release":
                self.pool.release(size)
            else:
                self.reserved.append(size)
            self.act(granted)

        def on_refused() -> None:
            self.pool.check()
            self.act(refused)

        ticket.on_claim, ticket.on_granted, ticket.on_refused = on_claim, on_granted, on_refused
        return ticket

    def act(self, what: str) -> None:
        if what == "enter" and not self.pool.closed:
            self.pool.enter(7, math.inf, self.make(7, "no", "keep", "keep"))
        elif what == "leave other" and self.pool.line:
            self.pool.leave(self.pool.line[-1])
        elif what == "release other":
            self.release_one(0)
        elif what == "try" and not self.pool.closed and self.pool.try_reserve(3):
            self.reserved.append(3)

    def release_one(self, index: int) -> None:
        if self.reserved:
            self.pool.release(self.reserved.pop(index % len(self.reserved)))

    # -- steps -----------------------------------------------------------------------------

    @precondition(lambda self: not self.pool.closed)
    @rule(size=st.integers(0, TOTAL))
    def try_reserve(self, size: int) -> None:
        free = not self.pool.line and size <= self.pool.available
        assert self.pool.try_reserve(size) is free
        if free:
            self.reserved.append(size)

    @precondition(lambda self: not self.pool.closed)
    @rule(
        size=st.integers(0, TOTAL),
        timeout=st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, math.inf]),
        claim=st.sampled_from(["no", "no", "no", "yes", "later", "raise", "release"]),
        granted=st.sampled_from(behaviours),
        refused=st.sampled_from(behaviours),
    )
    def enter(self, size: int, timeout: float, claim: str, granted: str, refused: str) -> None:
        ticket = self.make(size, claim, granted, refused)
        self.pool.enter(size, self.loop.time() + timeout, ticket)

    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        self.release_one(index)

    @rule(index=st.integers(0, 100))
    def leave(self, index: int) -> None:
        if self.pool.line:
            self.pool.leave(self.pool.line[index % len(self.pool.line)])

    @rule(seconds=st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @precondition(lambda self: len(self.pool.line) > 2)
    @rule(sure=st.integers(0, 9))
    def close(self, sure: int) -> None:
        if sure == 0:
            self.pool.close()
            assert not self.pool.line

    @invariant()
    def the_sum_is_right(self) -> None:
        self.pool.check()
        assert sum(self.reserved) == self.pool.account

    @invariant()
    def the_head_has_all_that_is_free(self) -> None:
        """Nobody is passed over: what is free belongs to the head, and does not suffice."""
        if not self.pool.line:
            assert self.pool.held == 0
            return
        head = self.pool.line[0]
        assert self.pool.available == 0
        assert self.pool.held == head._held < head._asked
        assert all(ticket._held == 0 for ticket in list(self.pool.line)[1:])
        assert all(ticket._deadline > self.loop.time() for ticket in self.pool.line)

    @invariant()
    def nothing_but_the_planned_errors(self) -> None:
        assert all(type(e["exception"]) is ZeroDivisionError for e in self.errors)

    def teardown(self) -> None:
        """Nobody starves: give back what there is until everybody was served."""
        for _ in range(10_000):
            if not self.reserved:
                break
            self.release_one(0)
            self.the_sum_is_right()
        assert not self.pool.line
        assert numbers(self.pool) == (TOTAL, 0, 0, 0)
        self.loop.close()


def test_any_sequence_of_steps_keeps_the_account_and_the_order() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_long_seeded_storm_of_tickets(seed: int) -> None:
    """The same steps, thousands of them in a row, where Hypothesis prefers short runs."""
    chance = random.Random(seed)
    machine = PoolMachine()
    for _ in range(1500):
        step = chance.randrange(10)
        if step < 4:
            machine.enter(
                chance.choice((0, 1, chance.randrange(TOTAL), TOTAL)),
                chance.choice((0.0, 0.5, 1.0, 2.0, math.inf)),
                chance.choice(("no", "no", "no", "yes", "later", "raise", "release")),
                chance.choice(PoolMachine.behaviours),
                chance.choice(PoolMachine.behaviours),
            )
        elif step < 5:
            machine.try_reserve(chance.randrange(TOTAL))
        elif step < 8:
            machine.release(chance.randrange(100))
        elif step < 9:
            machine.leave(chance.randrange(100))
        else:
            machine.time_passes(chance.choice((0.0, 0.25, 1.0)))
        machine.the_sum_is_right()
        machine.the_head_has_all_that_is_free()
        machine.nothing_but_the_planned_errors()
    assert machine.served > 100
    machine.teardown()


def test_no_broker_is_better_that_takes_nothing() -> None:
    """One that leads nothing any more, or what was without a leader for a while."""
    loop = asyncio.new_event_loop()
    pool = BufferPool(1000, loop=loop)
    one, two, gone, nowhere = (pool.share(node) for node in (1, 2, 3, -1))
    for share in (one, two):
        share.queues = 1
        share.held = 475
        assert pool.try_reserve(475)
    assert pool.is_held_up(one)
    assert not pool.is_held_up(gone)
    assert not pool.is_held_up(nowhere)
    assert not pool.has_better(one)
    gone.queues = 1
    assert pool.has_better(one)
    loop.close()
