from __future__ import annotations

import contextvars
import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
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
    Waiter,
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


class Loop:
    """Of an event loop what the rules know of it. A turn comes when the test wants one."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.closed = False

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.due.append((function, arguments))

    def turn(self) -> int:
        """Run what is due, except what becomes due by that. Returns how many calls it was."""
        due, self.due = self.due, []
        for at, (function, arguments) in enumerate(due, 1):
            try:
                function(*arguments)
            except BaseException:
                self.due[:0] = due[at:]
                raise
        return len(due)


class CancelledError(BaseException):
    """Like asyncio's, which this must not know: not an Exception."""


class Task:
    """A task in small: it awaits a delivery, and sleeps on what that hands out."""

    def __init__(
        self,
        delivery: Delivery,
        context: contextvars.Context | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.context = context or contextvars.copy_context()
        self.on_end = on_end
        self.waiter: Waiter | None = None
        self.must_cancel = False
        #: What it awaited, or what that raised.
        self.end: RecordMetadata | DeliveryError | CancelledError | None = None
        self.steps = 0
        self.awaiting = delivery.__await__()
        self.context.run(self.step)

    def cancel(self) -> None:
        assert self.waiter is not None
        if not self.waiter.cancel(msg="enough"):
            self.must_cancel = True

    def step(self, woken_by: Waiter | None = None) -> None:
        assert woken_by is self.waiter
        self.steps += 1
        self.waiter = None
        try:
            if self.must_cancel:
                waiter = self.awaiting.throw(CancelledError())
            else:
                waiter = next(self.awaiting)
        except StopIteration as stop:
            self.end = stop.value
        except (DeliveryError, CancelledError) as error:
            self.end = error
        else:
            assert isinstance(waiter, Waiter)
            assert waiter._asyncio_future_blocking
            waiter._asyncio_future_blocking = False
            waiter.add_done_callback(self.step, context=self.context)
            self.waiter = waiter
            return
        self.on_end()

    @property
    def offset(self) -> int:
        assert isinstance(self.end, RecordMetadata)
        return self.end.offset


def new(records: int = 3, *, loop: Loop | None = None) -> tuple[ProducerBatch, list[Delivery]]:
    batch = ProducerBatch("orders", 3, write_limit=10_000, created_at=5.0, loop=loop)
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


def test_the_loop_of_these_tests_runs_in_order_what_was_due_before_the_turn() -> None:
    loop = Loop()
    calls: list[str] = []

    def again(name: str) -> None:
        calls.append(name)
        loop.call_soon(calls.append, name + " again")

    assert loop.turn() == 0
    loop.call_soon(again, "first")
    loop.call_soon(calls.append, "second")
    assert calls == []
    assert loop.turn() == 2
    assert calls == ["first", "second"]
    assert loop.turn() == 1
    assert calls == ["first", "second", "first again"]


def test_the_loop_of_these_tests_goes_on_after_a_call_that_raised() -> None:
    loop = Loop()
    calls: list[str] = []

    def fails() -> None:
        loop.call_soon(calls.append, "third")
        raise SystemExit

    loop.call_soon(fails)
    loop.call_soon(calls.append, "second")
    with pytest.raises(SystemExit):
        loop.turn()
    assert calls == []
    assert loop.turn() == 2
    assert calls == ["second", "third"]


def test_the_loop_of_these_tests_takes_nothing_when_it_is_closed() -> None:
    loop = Loop()
    loop.closed = True
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    assert loop.due == []


def test_the_task_of_these_tests_sleeps_until_it_is_woken_and_ends_once() -> None:
    batch, [delivery] = new(1, loop=Loop())
    ends: list[str] = []
    task = Task(delivery, on_end=partial(ends.append, "end"))
    waiter = task.waiter
    assert waiter is not None
    assert (task.steps, task.end, ends) == (1, None, [])
    batch.acknowledge(500, -1)
    task.step(waiter)
    assert (task.steps, task.offset, ends) == (2, 500, ["end"])
    with pytest.raises(AssertionError):
        task.step(waiter)


def test_the_task_of_these_tests_raises_its_cancellation_where_it_waits() -> None:
    _, [delivery] = new(1, loop=Loop())
    task = Task(delivery)
    waiter = task.waiter
    task.cancel()
    assert task.end is None
    task.step(waiter)
    assert isinstance(task.end, CancelledError)


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
    """PB-08, SN-15: of several, one has no message of its own. Each is an INVALID_RECORD, whatever
    the code of the batch; the others have no code, since nothing is wrong with them."""
    batch, deliveries = new(4)
    batch.fail(
        refusal(code=ErrorCode.INVALID_TIMESTAMP, record_errors={0: "too old", 3: None, 99: "?"})
    )
    errors = [delivery.exception() for delivery in deliveries]
    assert all(isinstance(error, BrokerRejected) for error in errors)
    assert [str(error) for error in errors] == [
        "orders-3 refused the record: INVALID_RECORD: too old",
        "another record of the same batch to orders-3 was invalid, so the broker refused all of "
        "it: no",
        "another record of the same batch to orders-3 was invalid, so the broker refused all of "
        "it: no",
        "no",
    ]
    places = [(getattr(e, "record_index", "?"), getattr(e, "broker_message", "?")) for e in errors]
    assert places == [(0, "too old"), (None, None), (None, None), (3, None)]
    codes = [error.code for error in errors if error is not None]
    assert codes == [ErrorCode.INVALID_RECORD, None, None, ErrorCode.INVALID_RECORD]
    assert not any(error is None or error.retriable for error in errors)


def test_the_only_record_that_the_broker_named_has_the_code_of_its_batch() -> None:
    """SN-15"""
    batch, deliveries = new(2)
    batch.fail(refusal(code=ErrorCode.INVALID_TIMESTAMP, record_errors={1: "too old"}))
    other, named = (delivery.exception() for delivery in deliveries)
    assert named is not None
    assert other is not None
    assert (named.code, other.code) == (ErrorCode.INVALID_TIMESTAMP, None)
    assert str(named) == "orders-3 refused the record: INVALID_TIMESTAMP: too old"


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
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    fence = CountingFence()
    batch.add_fence(fence)
    calls: list[Delivery] = []

    def fails(delivery: Delivery) -> None:
        calls.append(delivery)
        raise error

    for delivery in deliveries:
        delivery.add_done_callback(fails)
    task = Task(deliveries[1])
    batch.acknowledge(0, -1)
    assert calls == deliveries
    assert fence.passes == 1
    loop.turn()
    assert task.offset == 1
    deliveries[0].add_done_callback(fails)
    assert [record.message for record in caplog.records] == [
        "a delivery callback of orders failed"
    ] * 3


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("late", [True, False])
def test_an_interrupt_in_a_callback_ends_the_loop_and_nobody_elses_delivery(
    error: BaseException, late: bool
) -> None:
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    ended: list[int] = []

    def interrupted(_: Delivery) -> None:
        raise error

    if not late:
        deliveries[0].add_done_callback(interrupted)
    deliveries[1].add_done_callback(lambda _: ended.append(1))
    batch.acknowledge(0, -1)
    if late:
        deliveries[0].add_done_callback(interrupted)
    assert ended == [1]
    with pytest.raises(type(error)) as raised:
        loop.turn()
    assert raised.value is error


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


def alive(kind: type[object]) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_each_delivery_is_let_go_before_the_next_callback() -> None:
    """Callbacks that send again make no more objects than they leave (see `_wake`)."""
    batch, deliveries = new(4)
    counts: list[int] = []
    before = alive(Delivery) - 4
    while deliveries:
        deliveries.pop(0).add_done_callback(lambda _: counts.append(alive(Delivery) - before))
    batch.acknowledge(0, -1)
    assert counts == [4, 3, 2, 1]


# -- waiting -------------------------------------------------------------------------------


def test_awaiting_waits_for_the_end_and_gives_the_metadata() -> None:
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    task = Task(deliveries[1])
    waiter = task.waiter
    assert waiter is not None
    assert not waiter.done()
    assert loop.turn() == 0
    batch.acknowledge(500, -1)
    assert waiter.done()
    assert task.end is None
    loop.turn()
    assert task.offset == 501
    assert waiter.result() is None  # type: ignore[func-returns-value]  # as a Task asks


def test_awaiting_what_is_done_does_not_wait() -> None:
    batch, [delivery] = new(1)
    batch.acknowledge(500, -1)
    assert delivery.waiter() is None
    for _ in range(2):
        task = Task(delivery)
        assert (task.offset, task.steps) == (500, 1)


def test_awaiting_a_failed_record_raises() -> None:
    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    tasks = [Task(delivery), Task(delivery)]
    batch.fail(refusal())
    loop.turn()
    tasks.append(Task(delivery))
    assert [type(task.end) for task in tasks] == [BrokerRejected] * 3
    assert len({id(task.end) for task in tasks}) == 3


def test_only_who_waits_gets_a_waiter() -> None:
    loop = Loop()
    batch, deliveries = new(3, loop=loop)
    assert batch.waiters is None
    waiters = [deliveries[2].waiter(), deliveries[2].waiter(), deliveries[0].waiter()]
    assert batch.waiters == waiters
    assert len(set(waiters)) == 3
    batch.acknowledge(0, -1)
    assert batch.waiters is None
    assert all(waiter is not None and waiter.done() for waiter in waiters)


def test_whoever_waits_for_a_batch_is_woken_by_one_call_of_the_loop() -> None:
    """In the order in which they began to wait, whatever their records' order is."""
    loop = Loop()
    batch, deliveries = new(4, loop=loop)
    order: list[int] = []
    for number in (2, 0, 3, 1, 2):
        Task(deliveries[number], on_end=partial(order.append, number))
    batch.acknowledge(0, -1)
    assert order == []
    assert loop.turn() == 1
    assert order == [2, 0, 3, 1, 2]
    assert loop.turn() == 0


def test_each_waiter_is_let_go_before_the_next_task_runs() -> None:
    """Tasks that send again make no more objects than they leave: Python's collector, which looks
    at everything when there are more and more, has nothing to do."""
    loop = Loop()
    batch, deliveries = new(4, loop=loop)
    counts: list[int] = []
    before = alive(Waiter)
    tasks = [
        Task(delivery, on_end=lambda: counts.append(alive(Waiter) - before))
        for delivery in deliveries
    ]
    batch.acknowledge(0, -1)
    loop.turn()
    assert [task.steps for task in tasks] == [2] * 4
    assert counts == [4, 3, 2, 1]


def test_a_batch_that_nobody_waits_for_asks_nothing_of_the_loop() -> None:
    loop = Loop()
    batch, _ = new(2, loop=loop)
    batch.acknowledge(0, -1)
    failed, deliveries = new(2, loop=loop)
    failed.fail(refusal())
    assert loop.due == []
    assert all(delivery.exception() for delivery in deliveries)


def test_each_task_is_woken_in_its_own_context() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    names: list[str] = []

    def note() -> None:
        names.append(name.get())
        name.set("changed")

    contexts = [contextvars.copy_context() for _ in deliveries]
    for delivery, context, mine in zip(deliveries, contexts, ("Ann", "Bob"), strict=True):
        context.run(name.set, mine)
        Task(delivery, context, note)
    batch.acknowledge(0, -1)
    loop.turn()
    assert names == ["Ann", "Bob"]
    assert name.get() == "nobody"
    assert [context[name] for context in contexts] == ["changed", "changed"]


def test_a_wait_that_was_cancelled_does_not_hold_what_the_task_had() -> None:
    """Its record may have no end for minutes."""

    class Session:
        pass

    session: contextvars.ContextVar[Session] = contextvars.ContextVar("session")
    loop = Loop()
    batch, deliveries = new(1, loop=loop)
    context = contextvars.copy_context()
    context.run(session.set, Session())
    held = weakref.ref(context[session])
    task = Task(deliveries[0], context)
    task.cancel()
    loop.turn()
    assert isinstance(task.end, CancelledError)
    del task, context
    gc.collect()
    assert held() is None
    batch.acknowledge(0, -1)


def test_one_context_may_be_that_of_several_tasks() -> None:
    loop = Loop()
    batch, deliveries = new(3, loop=loop)
    context = contextvars.copy_context()
    tasks = [Task(delivery, context) for delivery in deliveries]
    batch.acknowledge(7, -1)
    loop.turn()
    assert [task.offset for task in tasks] == [7, 8, 9]


def test_a_cancelled_wait_does_not_disturb_the_others() -> None:
    """The waiter leaves it to the task to remember it, and wakes nobody but the task."""
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    tasks = [Task(delivery) for delivery in deliveries]
    tasks[0].cancel()
    assert tasks[0].must_cancel
    assert tasks[0].end is None
    assert loop.turn() == 1
    assert isinstance(tasks[0].end, CancelledError)
    assert tasks[1].steps == 1
    batch.acknowledge(0, -1)
    assert loop.turn() == 1
    assert (tasks[0].steps, tasks[1].offset) == (2, 1)
    assert deliveries[0].result().offset == 0


@pytest.mark.parametrize("times", [1, 3])
def test_a_task_that_was_woken_for_nothing_sleeps_on(times: int) -> None:
    """It was cancelled, and that was taken back before it ran (Task.uncancel from 3.13 on)."""
    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    task = Task(delivery)
    waiter = task.waiter
    for _ in range(times):
        task.cancel()
    task.must_cancel = False
    assert loop.turn() == times
    assert task.waiter is waiter is not None
    assert not waiter.done()
    batch.acknowledge(5, -1)
    loop.turn()
    assert task.offset == 5


@pytest.mark.parametrize("acknowledged_first", [False, True])
def test_a_task_that_is_cancelled_in_the_turn_of_the_end_is_woken_once(
    acknowledged_first: bool,
) -> None:
    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    task = Task(delivery)
    waiter = task.waiter
    assert waiter is not None
    if acknowledged_first:
        batch.acknowledge(0, -1)
        task.cancel()
        assert len(loop.due) == 1  # the call that is due will do
    else:
        task.cancel()
        batch.acknowledge(0, -1)
    loop.turn()
    assert isinstance(task.end, CancelledError)
    assert task.steps == 2
    assert waiter.cancel() is False
    assert loop.due == []


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_a_task_raises_is_not_the_others_matter(at: int, error: BaseException) -> None:
    """The loop gets it, as it would from the task alone; the others run a turn later."""
    loop = Loop()
    batch, deliveries = new(3, loop=loop)
    order: list[int] = []

    def end(number: int) -> None:
        order.append(number)
        if number == at:
            raise error

    for number, delivery in enumerate(deliveries):
        Task(delivery, on_end=partial(end, number))
    batch.acknowledge(0, -1)
    with pytest.raises(type(error)) as raised:
        loop.turn()
    assert raised.value is error
    assert order == list(range(at + 1))
    assert loop.turn() == (at < 2)
    assert order == [0, 1, 2]


def test_a_waiter_that_nobody_sleeps_on_yet_stays_out_of_the_way() -> None:
    """Asked for, and not awaited before the record had its end."""
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    early = deliveries[0].waiter()
    task = Task(deliveries[1])
    assert early is not None
    assert early.cancel() is False
    loop.turn()
    batch.acknowledge(0, -1)
    assert list(early) == []
    loop.turn()
    assert task.offset == 1
    assert list(early) == []


def test_one_waiter_is_for_one_task() -> None:
    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    task = Task(delivery)
    assert task.waiter is not None
    with pytest.raises(RuntimeError, match="await the delivery instead"):
        next(task.waiter)
    batch.acknowledge(0, -1)
    loop.turn()
    assert task.offset == 0


def test_a_waiter_belongs_to_the_loop_of_its_batch_and_says_what_it_waits_for() -> None:
    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    waiter = delivery.waiter()
    assert waiter is not None
    assert waiter.get_loop() is loop
    assert repr(waiter) == "<Waiter for orders-3 pending>"
    batch.acknowledge(8, -1)
    assert repr(waiter) == "<Waiter for orders-3@8 acknowledged>"


def test_the_waiters_of_a_closed_loop_do_not_keep_a_batch_from_its_end() -> None:
    """Close after the loop: who waits there never wakes, but the batch must end."""
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    tasks = [Task(delivery) for delivery in deliveries]
    calls: list[Delivery] = []
    deliveries[1].add_done_callback(calls.append)
    fence = CountingFence()
    batch.add_fence(fence)
    loop.closed = True
    batch.fail(refusal())
    assert calls == [deliveries[1]]
    assert fence.passes == 1
    assert batch.waiters is None
    assert all(delivery.exception() for delivery in deliveries)
    assert [task.steps for task in tasks] == [1, 1]


def test_waiting_without_an_event_loop_is_refused() -> None:
    _, [delivery] = new(1)
    with pytest.raises(IllegalStateError, match="no event loop"):
        delivery.waiter()
    with pytest.raises(IllegalStateError, match="no event loop"):
        Task(delivery)


def test_waiters_move_to_the_parts_of_a_split() -> None:
    """RA-20: the user's wait goes on."""
    loop = Loop()
    batch, deliveries = new(3, loop=loop)
    tasks = [Task(delivery) for delivery in deliveries]
    waiters = [task.waiter for task in tasks]
    parts = split(batch)
    assert batch.waiters is None
    assert [part.waiters for part in parts] == [[waiter] for waiter in waiters]
    assert loop.due == []
    parts[1].acknowledge(70, -1)
    loop.turn()
    assert [task.end is None for task in tasks] == [True, False, True]
    assert tasks[1].offset == 70
    parts[0].acknowledge(7, -1)
    parts[2].acknowledge(700, -1)
    assert loop.turn() == 2
    assert [task.offset for task in tasks] == [7, 70, 700]
    assert [task.steps for task in tasks] == [2, 2, 2]


def test_waiters_follow_splits_of_splits_in_their_order() -> None:
    """RA-20, RA-23. Those who wait for records of one part are woken as they came."""
    loop = Loop()
    batch, deliveries = new(8, loop=loop)
    order: list[str] = []
    for name in ("6", "4", "6 again", "1", "0", "4 again"):
        Task(deliveries[int(name[0])], on_end=partial(order.append, name))
    batch.close()
    batch.seal()
    first, second = batch.split(600)
    second.seal()
    inner = second.split(600)
    assert [part.count for part in (first, *inner)] == [4, 1, 1, 1, 1]
    for part in (inner[2], first, inner[0]):
        part.acknowledge(0, -1)
    assert loop.turn() == 3
    assert order == ["6", "6 again", "1", "0", "4", "4 again"]


def test_a_cancellation_reaches_a_task_that_waits_for_a_part() -> None:
    loop = Loop()
    batch, deliveries = new(2, loop=loop)
    task = Task(deliveries[1])
    parts = split(batch)
    assert task.waiter is not None
    assert task.waiter.get_loop() is loop
    task.cancel()
    assert loop.turn() == 1
    assert isinstance(task.end, CancelledError)
    parts[1].acknowledge(3, -1)
    assert loop.turn() == 1
    assert task.steps == 2
    assert deliveries[1].result().offset == 3


def test_callbacks_come_before_waiters_and_fences_last() -> None:
    """Spec 3.10: flush returns after all that the records' own waiters were told."""
    order: list[str] = []

    class FlushFence:
        """Its flush sleeps on something of the same loop."""

        def passed(self) -> None:
            order.append("fence")
            loop.call_soon(order.append, "flush")

    loop = Loop()
    batch, [delivery] = new(1, loop=loop)
    batch.add_fence(FlushFence())
    Task(delivery, on_end=lambda: order.append("waiter"))
    delivery.add_done_callback(lambda _: order.append("callback"))
    batch.acknowledge(0, -1)
    assert order == ["callback", "fence"]
    loop.turn()
    assert order == ["callback", "fence", "waiter", "flush"]


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


@pytest.mark.parametrize("method", ["done", "result", "exception", "waiter"])
def test_a_method_of_another_object_is_a_type_error(method: str) -> None:
    """Compiled as well, where it could read what is not there."""
    for nobody in (None, 5, object()):
        with pytest.raises((TypeError, AttributeError)):
            getattr(Delivery, method)(nobody)


def test_the_methods_tell_their_arguments() -> None:
    signature = inspect.signature(Delivery.add_done_callback)
    assert list(signature.parameters) == ["self", "function"]
    assert (Delivery.result.__doc__ or "").startswith("Where the record is.")
