from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from typing import Any

import pytest

from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.delivery import (
    ACKNOWLEDGED,
    FAILED,
    PENDING,
    SPLIT,
    Delivery,
    Failure,
    Outcome,
)
from asyncproducer.errors import (
    BrokerRejected,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    IllegalStateError,
)
from asyncproducer.records import RecordMetadata

T0 = 1_700_000_000_000


class Waiter:
    """A future in small: awaiting it hands it out, then asks whether it has its result."""

    def __init__(self) -> None:
        self.results: list[None] = []
        self.cancelled = False
        self.loop_is_closed = False

    def done(self) -> bool:
        return self.cancelled or bool(self.results)

    def set_result(self, result: None) -> None:
        if self.loop_is_closed:
            raise RuntimeError("Event loop is closed")
        assert not self.done()
        self.results.append(result)

    def __iter__(self) -> Generator[Waiter, None, None]:
        yield self
        assert self.done()


class CancelledError(BaseException):
    """Like asyncio's, which this must not know: not an Exception."""


def new(
    records: int = 3, *, create_future: Callable[[], Any] | None = Waiter
) -> tuple[ProducerBatch, list[Delivery]]:
    batch = ProducerBatch(
        "orders", 3, write_limit=10_000, created_at=5.0, create_future=create_future
    )
    deliveries = []
    for number in range(records):
        delivery = batch.try_append(T0 + number, None, b"%d" % number + bytes(100), NO_HEADERS)
        assert delivery is not None
        deliveries.append(delivery)
    return batch, deliveries


def refusal(**details: Any) -> Failure:
    return Failure(BrokerRejected, "no", **details)


def split(batch: ProducerBatch) -> list[ProducerBatch]:
    batch.close()
    batch.seal()
    return batch.split(10)


def start(delivery: Delivery) -> tuple[Generator[Any, None, RecordMetadata], Any]:
    """Begin to await; returns the generator and what it waits for."""
    waiting = delivery.__await__()
    return waiting, next(waiting)


def finish(waiting: Generator[Any, None, RecordMetadata]) -> RecordMetadata:
    with pytest.raises(StopIteration) as stop:
        next(waiting)
    assert isinstance(stop.value.value, RecordMetadata)
    return stop.value.value


def test_the_waiter_of_these_tests_is_done_once() -> None:
    waiter = Waiter()
    assert not waiter.done()
    waiter.set_result(None)
    assert waiter.done()
    with pytest.raises(AssertionError):
        waiter.set_result(None)


# -- results -------------------------------------------------------------------------------


def test_each_record_gets_its_offset_and_its_own_timestamp() -> None:
    """PB-10: without a log append time the record's own timestamp counts."""
    batch, deliveries = new(2)
    assert batch.acknowledge(500, -1)
    assert deliveries[0].result() == RecordMetadata("orders", 3, 500, T0, -1, 101)
    assert deliveries[1].result() == RecordMetadata("orders", 3, 501, T0 + 1, -1, 101)
    assert type(deliveries[0].result()) is RecordMetadata
    assert deliveries[0].exception() is None
    assert deliveries[0].peek_exception() is None


def test_the_log_append_time_wins_over_the_record_timestamp() -> None:
    batch, deliveries = new(2)
    batch.acknowledge(0, 77)
    assert [delivery.result().timestamp for delivery in deliveries] == [77, 77]


def test_without_a_base_offset_no_record_has_an_offset() -> None:
    """Spec 3.10: acks=0, and what a broker recognised as stored before."""
    batch, deliveries = new(2)
    batch.acknowledge(-1, -1)
    assert [delivery.result().offset for delivery in deliveries] == [-1, -1]
    assert not deliveries[0].result().has_offset


def test_sizes_are_those_of_key_and_value() -> None:
    batch, _ = new(0)
    full = batch.try_append(T0, b"key", b"", NO_HEADERS)
    empty = batch.try_append(T0, b"", None, NO_HEADERS)
    assert full is not None
    assert empty is not None
    batch.acknowledge(0, -1)
    assert full.result()[4:] == (3, 0)
    assert empty.result()[4:] == (0, -1)


def test_a_delivery_knows_its_place_before_it_is_done() -> None:
    _, [delivery] = new(1)
    assert (delivery.topic, delivery.partition, delivery.timestamp) == ("orders", 3, T0)
    assert not delivery.done()
    assert delivery.peek_exception() is None
    for ask in (delivery.result, delivery.exception):
        with pytest.raises(IllegalStateError, match="PENDING"):
            ask()


def test_the_repr_tells_place_and_state() -> None:
    batch, deliveries = new(2)
    assert repr(deliveries[1]) == "<Delivery orders-3 pending>"
    batch.acknowledge(40, -1)
    assert repr(deliveries[1]) == "<Delivery orders-3@41 acknowledged>"
    failed, [delivery] = new(1)
    failed.fail(refusal())
    assert repr(delivery) == "<Delivery orders-3 failed>"
    delivery.exception()


# -- the states of an outcome --------------------------------------------------------------


def test_a_failed_outcome_ignores_what_comes_later() -> None:
    """PB-01, PB-02, PB-10: failed once; a late answer changes nothing and tells nobody."""
    batch, [delivery] = new(1)
    calls: list[Delivery] = []
    delivery.add_done_callback(calls.append)
    assert batch.fail(refusal())
    assert not batch.fail(Failure(DeliveryTimeout, "later"))
    assert not batch.acknowledge(500, 10)
    assert calls == [delivery]
    assert isinstance(delivery.exception(), BrokerRejected)
    assert batch.state == FAILED


def test_an_acknowledged_outcome_is_final() -> None:
    """PB-03: twice is a bug of ours; the first result stays."""
    batch, [delivery] = new(1)
    batch.acknowledge(500, 10)
    with pytest.raises(IllegalStateError, match="ACKNOWLEDGED cannot be ACKNOWLEDGED"):
        batch.acknowledge(1, 1)
    with pytest.raises(IllegalStateError, match="ACKNOWLEDGED cannot be FAILED"):
        batch.fail(refusal())
    with pytest.raises(IllegalStateError, match="ACKNOWLEDGED cannot be SPLIT"):
        batch.split_into([])
    assert delivery.result()[2:4] == (500, 10)
    assert batch.state == ACKNOWLEDGED


def test_a_split_outcome_is_final() -> None:
    batch, deliveries = new(2)
    parts = split(batch)
    assert batch.state == SPLIT
    with pytest.raises(IllegalStateError, match="SPLIT cannot be ACKNOWLEDGED"):
        batch.acknowledge(1, 1)
    with pytest.raises(IllegalStateError, match="SPLIT cannot be FAILED"):
        batch.fail(refusal())
    assert [part.state for part in parts] == [PENDING, PENDING]
    assert not deliveries[0].done()


def test_an_outcome_that_was_not_split_has_no_parts() -> None:
    with pytest.raises(IllegalStateError, match="not split"):
        Outcome("orders", 0)._part(0)


def test_deliveries_follow_splits_of_splits() -> None:
    """RA-20, RA-23."""
    batch, deliveries = new(8)
    batch.close()
    batch.seal()
    halves = batch.split(600)
    assert [part.count for part in halves] == [4, 4]
    for part in halves:
        part.seal()
    inner = halves[1].split(600)
    assert [part.count for part in inner] == [1, 1, 1, 1]
    for number in (2, 0, 3, 1):
        inner[number].acknowledge(10 * number, -1)
    halves[0].acknowledge(100, -1)
    offsets = [delivery.result().offset for delivery in deliveries]
    assert offsets == [100, 101, 102, 103, 0, 10, 20, 30]


# -- failures ------------------------------------------------------------------------------


def test_every_record_gets_a_fresh_exception_with_all_details() -> None:
    cause = ConnectionError("gone")
    batch, deliveries = new(2)
    batch.fail(
        Failure(
            DeliveryTimeout,
            "too late",
            persisted="maybe",
            code=ErrorCode.REQUEST_TIMED_OUT,
            cause=cause,
            attempts=3,
            elapsed=1.5,
        )
    )
    first = deliveries[0].exception()
    assert isinstance(first, DeliveryTimeout)
    assert str(first) == "too late"
    assert (first.topic, first.partition, first.persisted) == ("orders", 3, "maybe")
    assert (first.attempts, first.elapsed, first.code) == (3, 1.5, ErrorCode.REQUEST_TIMED_OUT)
    assert first.retriable
    assert first.__cause__ is cause
    assert deliveries[0].exception() is not first
    assert deliveries[1].exception() is not first
    with pytest.raises(DeliveryTimeout) as raised:
        deliveries[0].result()
    assert raised.value is not first


def test_records_that_the_broker_named_get_its_words_for_them() -> None:
    """PB-08, SN-15: records 0 and 3 are named, one of them without a message of its own."""
    batch, deliveries = new(4)
    batch.fail(
        refusal(code=ErrorCode.INVALID_RECORD, record_errors={0: "no key", 3: None, 99: "?"})
    )
    errors = [delivery.exception() for delivery in deliveries]
    assert all(isinstance(error, BrokerRejected) for error in errors)
    assert [str(error) for error in errors] == [
        "no key",
        "another record of the same batch to orders-3 was invalid, so the broker refused all of "
        "it: no",
        "another record of the same batch to orders-3 was invalid, so the broker refused all of "
        "it: no",
        "no",
    ]
    places = [(getattr(e, "record_index", "?"), getattr(e, "broker_message", "?")) for e in errors]
    assert places == [(0, "no key"), (None, None), (None, None), (3, None)]


def test_without_record_errors_all_records_get_the_same_words() -> None:
    """Spec 7.3. Also where the broker sent an empty list."""
    nothing: dict[int, str | None] | None
    for nothing in (None, {}):
        batch, deliveries = new(2)
        batch.fail(refusal(record_errors=nothing))
        errors = [delivery.exception() for delivery in deliveries]
        assert [str(error) for error in errors] == ["no", "no"]
        assert [getattr(error, "record_index", "?") for error in errors] == [None, None]


# -- callbacks -----------------------------------------------------------------------------


def test_callbacks_run_in_record_order_with_their_delivery() -> None:
    """Spec 3.10. They find the record done."""
    batch, deliveries = new(3)
    calls: list[tuple[Delivery, bool]] = []
    for delivery in deliveries:
        delivery.add_done_callback(lambda d: calls.append((d, d.done())))
    assert calls == []
    batch.acknowledge(0, -1)
    assert calls == [(delivery, True) for delivery in deliveries]


def test_a_callback_of_a_record_that_is_done_runs_at_once() -> None:
    batch, [delivery] = new(1)
    batch.acknowledge(0, -1)
    calls: list[Delivery] = []
    delivery.add_done_callback(calls.append)
    assert calls == [delivery]


@pytest.mark.parametrize("error", [ValueError("mine"), CancelledError("of something else")])
def test_what_a_callback_raises_is_logged_and_disturbs_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The CancelledError of some future that the callback looks at is no cancellation of ours."""
    batch, deliveries = new(2)
    fence = CountingFence()
    batch.add_fence(fence)
    calls: list[Delivery] = []

    def fails(delivery: Delivery) -> None:
        calls.append(delivery)
        raise error

    for delivery in deliveries:
        delivery.add_done_callback(fails)
    waiter = deliveries[1].waiter()
    batch.acknowledge(0, -1)
    assert calls == deliveries
    assert waiter.done()
    assert fence.passes == 1
    deliveries[0].add_done_callback(fails)
    assert [record.message for record in caplog.records] == [
        "a delivery callback of orders failed"
    ] * 3


def test_an_interrupt_in_a_callback_goes_through() -> None:
    batch, [delivery] = new(1)

    def interrupted(_: Delivery) -> None:
        raise KeyboardInterrupt

    delivery.add_done_callback(interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch.acknowledge(0, -1)
    assert delivery.done()


def test_callbacks_move_to_the_parts_of_a_split() -> None:
    """RA-20: they are called when the parts end, not before."""
    batch, deliveries = new(3)
    ended: list[int] = []
    for delivery in deliveries:
        delivery.add_done_callback(lambda d: ended.append(d.result().offset))
    parts = split(batch)
    assert ended == []
    for offset, part in zip((50, 40, 30), parts, strict=True):
        part.acknowledge(offset, -1)
    assert ended == [50, 40, 30]


# -- waiting -------------------------------------------------------------------------------


def test_awaiting_waits_for_the_end_and_gives_the_metadata() -> None:
    batch, deliveries = new(2)
    waiting, waiter = start(deliveries[1])
    assert isinstance(waiter, Waiter)
    assert not waiter.done()
    batch.acknowledge(500, -1)
    assert waiter.done()
    assert finish(waiting).offset == 501


def test_awaiting_what_is_done_does_not_wait() -> None:
    batch, [delivery] = new(1, create_future=None)
    batch.acknowledge(500, -1)
    assert delivery.waiter() is None
    for _ in range(2):
        assert finish(delivery.__await__()).offset == 500


def test_awaiting_a_failed_record_raises() -> None:
    batch, [delivery] = new(1)
    waiting, waiter = start(delivery)
    batch.fail(refusal())
    assert waiter.done()
    with pytest.raises(BrokerRejected):
        next(waiting)


def test_only_who_waits_gets_a_future() -> None:
    made: list[Waiter] = []

    def create() -> Waiter:
        made.append(Waiter())
        return made[-1]

    batch, deliveries = new(3, create_future=create)
    waiters = [deliveries[2].waiter(), deliveries[2].waiter(), deliveries[0].waiter()]
    assert made == waiters
    batch.acknowledge(0, -1)
    assert all(waiter.results == [None] for waiter in waiters)


def test_a_cancelled_wait_does_not_disturb_the_others() -> None:
    batch, deliveries = new(2)
    waiters = [delivery.waiter() for delivery in deliveries]
    waiters[0].cancelled = True
    batch.acknowledge(0, -1)
    assert waiters[0].results == []
    assert waiters[1].results == [None]
    assert deliveries[0].result().offset == 0


def test_waiters_of_a_closed_loop_do_not_disturb_the_others() -> None:
    """Close after the loop: who waits there never wakes, but the batch must end."""
    batch, deliveries = new(2)
    waiters = [delivery.waiter() for delivery in deliveries]
    fence = CountingFence()
    batch.add_fence(fence)
    waiters[0].loop_is_closed = True
    batch.fail(refusal())
    assert waiters[1].done()
    assert fence.passes == 1
    deliveries[0].exception()
    deliveries[1].exception()


def test_waiting_without_an_event_loop_is_refused() -> None:
    _, [delivery] = new(1, create_future=None)
    with pytest.raises(IllegalStateError, match="no event loop"):
        delivery.waiter()


def test_waiters_move_to_the_parts_of_a_split() -> None:
    """RA-20: the user's wait goes on."""
    batch, deliveries = new(3)
    awaits = [start(delivery) for delivery in deliveries]
    parts = split(batch)
    parts[1].acknowledge(70, -1)
    assert [waiter.done() for _, waiter in awaits] == [False, True, False]
    assert finish(awaits[1][0]).offset == 70
    parts[0].acknowledge(7, -1)
    parts[2].acknowledge(700, -1)
    assert [finish(waiting).offset for waiting, _ in (awaits[0], awaits[2])] == [7, 700]


def test_callbacks_come_before_waiters_and_fences_last() -> None:
    """Spec 3.10: flush returns after all that the records' own waiters were told."""
    order: list[str] = []

    class Noting(Waiter):
        def set_result(self, result: None) -> None:
            order.append("waiter")

    class NotingFence:
        def passed(self) -> None:
            order.append("fence")

    batch, [delivery] = new(1, create_future=Noting)
    batch.add_fence(NotingFence())
    delivery.waiter()
    delivery.add_done_callback(lambda _: order.append("callback"))
    batch.acknowledge(0, -1)
    assert order == ["callback", "waiter", "fence"]


# -- fences --------------------------------------------------------------------------------


class CountingFence:
    def __init__(self) -> None:
        self.passes = 0
        self.parts = 0

    def passed(self) -> None:
        self.passes += 1

    def replace(self, parts: int) -> None:
        self.parts += parts


@pytest.mark.parametrize("fails", [False, True])
def test_a_fence_is_passed_once_however_the_batch_ends(fails: bool) -> None:
    batch, deliveries = new(2)
    fence = CountingFence()
    batch.add_fence(fence)
    if fails:
        batch.fail(refusal())
        assert all(delivery.exception() for delivery in deliveries)
        batch.fail(refusal())
    else:
        batch.acknowledge(0, -1)
    assert fence.passes == 1


def test_a_fence_stands_behind_all_parts_of_a_split() -> None:
    """RA-32 in our form: flush waits for the parts, not for the batch that was split."""
    batch, _ = new(3)
    fence = CountingFence()
    batch.add_fence(fence)
    parts = split(batch)
    assert (fence.parts, fence.passes) == (3, 0)
    for part in parts:
        part.acknowledge(0, -1)
    assert fence.passes == 3


# -- failures that nobody looks at ---------------------------------------------------------


def test_failures_that_nobody_looked_at_are_logged_once_per_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scene() -> None:
        batch, deliveries = new(3)
        batch.fail(refusal(persisted="maybe"))
        assert isinstance(deliveries[0].peek_exception(), DeliveryError)
        assert deliveries[1].exception() is not None
        assert deliveries[1].exception() is not None

    scene()
    gc.collect()
    assert [record.message for record in caplog.records] == [
        "2 of 3 records to orders-3 were not delivered and nobody looked at the result "
        "(persisted: maybe): BrokerRejected: no"
    ]


def test_failures_that_were_looked_at_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def scene() -> None:
        batch, deliveries = new(2)
        batch.fail(refusal())
        with pytest.raises(BrokerRejected):
            deliveries[0].result()
        deliveries[1].exception()

    scene()
    gc.collect()
    assert caplog.records == []


def test_success_and_records_without_an_end_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scene() -> None:
        new(2)
        batch, _ = new(2)
        batch.acknowledge(0, -1)
        halves, _ = new(2)
        for part in split(halves):
            part.acknowledge(0, -1)

    scene()
    gc.collect()
    assert caplog.records == []
