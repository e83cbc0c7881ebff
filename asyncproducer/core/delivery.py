# cython: nonecheck=True, binding=False, embedsignature=True, embedsignature.format=clinic
"""What becomes of a record: one `Outcome` per batch, one small `Delivery` per record.

A Delivery is (outcome, index). Acknowledging a batch therefore sets one state and
wakes whoever waits at that moment; records that nobody awaits cost nothing more.
A batch that the broker found too large is split: its outcome then points at the
outcomes of the parts, and deliveries follow (KIP-126).

Whoever waits sleeps on a `Waiter`, not on an asyncio.Future: those of a batch are woken
by one callback of the loop, where futures need one each.

This module is compiled together with the record path. It knows of the event loop that
it has `call_soon`, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from asyncproducer.errors import (
    DeliveryError,
    ErrorCode,
    IllegalStateError,
    Persisted,
    error_name,
)
from asyncproducer.logs import guarded
from asyncproducer.records import RecordMetadata

__all__ = [
    "ACKNOWLEDGED",
    "FAILED",
    "PENDING",
    "SPLIT",
    "Delivery",
    "Failure",
    "Outcome",
    "Place",
    "Waiter",
    "raise_later",
]

logger = guarded("asyncproducer")

#: The states of an outcome. Each final one is set exactly once.
PENDING = 0
ACKNOWLEDGED = 1
FAILED = 2
SPLIT = 3

_STATE_NAMES = ("PENDING", "ACKNOWLEDGED", "FAILED", "SPLIT")


def _raise(error: BaseException) -> None:
    raise error


def raise_later(loop: Any, error: BaseException) -> None:
    """End the loop with this SystemExit or KeyboardInterrupt of the user's code, as it would from
    any callback, but in a turn of its own: somebody is in the middle of something here."""
    loop.call_soon(_raise, error)


def _call(function: Callable[[Any], object], delivery: Delivery, topic: str, loop: Any) -> None:
    """Run a delivery callback. It is the user's code: it must not disturb the others."""
    try:
        function(delivery)
    except (SystemExit, KeyboardInterrupt) as error:
        raise_later(loop, error)
    except BaseException:
        # Also the CancelledError of a future that the callback asked for its result: it
        # cancels nobody here, we are in no task of the user's.
        logger.exception("a delivery callback of %s failed", topic)


class Failure:
    """Why a batch failed; makes a fresh exception for each record that asks.

    A fresh one, because an exception raised in two tasks mixes their tracebacks.
    `record_errors` maps the index of a record that the broker named to its message
    (KIP-467); the others were rejected only because they shared its batch.
    """

    __slots__ = (
        "attempts",
        "cause",
        "code",
        "elapsed",
        "kind",
        "message",
        "persisted",
        "record_errors",
    )

    def __init__(
        self,
        kind: type[DeliveryError],
        message: str,
        *,
        persisted: Persisted = "no",
        code: int | None = None,
        cause: BaseException | None = None,
        attempts: int = 0,
        elapsed: float = 0.0,
        record_errors: dict[int, str | None] | None = None,
    ) -> None:
        self.kind = kind
        self.message = message
        self.persisted: Persisted = persisted
        self.code = code
        self.cause = cause
        self.attempts = attempts
        self.elapsed = elapsed
        self.record_errors = record_errors

    def exception(self, topic: str, partition: int, index: int) -> DeliveryError:
        """The error of the record at `index`."""
        message, code = self.message, self.code
        named = False
        broker_message = None
        if self.record_errors:
            named = index in self.record_errors
            if named:
                broker_message = self.record_errors[index]
                if len(self.record_errors) > 1:
                    # The code of the batch need not be that of each (Java: InvalidRecordException).
                    code = ErrorCode.INVALID_RECORD
                if broker_message:
                    name = error_name(-1 if code is None else code)
                    message = f"{topic}-{partition} refused the record: {name}: {broker_message}"
            else:
                # Nothing is wrong with this one: no code says that there was.
                code = None
                message = (
                    f"another record of the same batch to {topic}-{partition} was invalid, "
                    f"so the broker refused all of it: {message}"
                )
        error = self.kind(
            message,
            topic=topic,
            partition=partition,
            persisted=self.persisted,
            attempts=self.attempts,
            elapsed=self.elapsed,
            code=code,
        )
        error.__cause__ = self.cause
        if named:
            error.record_index = index  # type: ignore[attr-defined]
            error.broker_message = broker_message  # type: ignore[attr-defined]
        return error


class Outcome:
    """The shared result of the records of one batch."""

    def __init__(self, topic: str, partition: int, loop: Any = None) -> None:
        self._begin_at(topic, partition, loop)

    def _begin_at(self, topic: str, partition: int, loop: Any) -> None:
        # Apart, so that C calls it as C.
        self.topic = topic
        self.partition = partition
        #: The event loop of those who wait, None where nobody may.
        self.loop = loop
        self.count = 0
        self.state = PENDING
        self.base_offset = -1
        self.log_append_time = -1
        self.failure: Failure | None = None
        #: Split: (index of the first record, outcome) of each part, ascending.
        self.parts: Sequence[tuple[int, Outcome]] | None = None
        #: Those who wait now.
        self.waiters: list[Waiter] | None = None
        #: What to call when this is done: each delivery, followed by its function.
        self.callbacks: list[Any] | None = None
        #: Fences: called once when every record of this batch has its end.
        self.fences: list[Any] | None = None
        #: How many records' failures somebody has looked at.
        self.observed = 0
        #: Bulk sending: whose rows came in last, and the place that this has in their list.
        self.taker = 0
        self.slot = 0

    def acknowledge(self, base_offset: int, log_append_time: int) -> bool:
        """All records are in the log. Returns False where the outcome was FAILED already:
        a late answer to a batch that was given up (Java: ProducerBatch.FinalState)."""
        if self.state == FAILED:
            return False
        if self.state != PENDING:
            raise IllegalStateError(
                f"a batch that is {_STATE_NAMES[self.state]} cannot be ACKNOWLEDGED"
            )
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        self.state = ACKNOWLEDGED
        self._announce()
        return True

    def fail(self, failure: Failure) -> bool:
        """No record will be retried. Returns False where the outcome was FAILED already."""
        if self.state == FAILED:
            return False
        if self.state != PENDING:
            raise IllegalStateError(f"a batch that is {_STATE_NAMES[self.state]} cannot be FAILED")
        self.failure = failure
        self.state = FAILED
        self._announce()
        return True

    def split_into(self, parts: Sequence[tuple[int, Outcome]]) -> None:
        """The records live on in `parts`; whoever waits here waits there from now on."""
        if self.state != PENDING:
            raise IllegalStateError(f"a batch that is {_STATE_NAMES[self.state]} cannot be SPLIT")
        self.parts = parts
        self.state = SPLIT
        waiters, self.waiters = self.waiters, None
        callbacks, self.callbacks = self.callbacks, None
        fences, self.fences = self.fences, None
        for waiter in waiters or ():
            waiter._resolve().add_waiter(waiter)
        if callbacks is not None:
            for at in range(0, len(callbacks), 2):
                delivery = callbacks[at]
                delivery._resolve().add_callback(delivery, callbacks[at + 1])
        for fence in fences or ():
            fence.replace(len(parts))
            for _, part in parts:
                part.add_fence(fence)

    def add_waiter(self, waiter: Waiter) -> None:
        """`waiter` is woken when the record of its delivery has its end."""
        if self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)

    def add_callback(self, delivery: Delivery, function: Callable[[Delivery], object]) -> None:
        """`function(delivery)` is called when its record, which is one of these, has its end."""
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append(delivery)
        self.callbacks.append(function)

    def add_fence(self, fence: Any) -> None:
        """`fence.passed()` is called when every record here has its end."""
        if self.fences is None:
            self.fences = []
        self.fences.append(fence)

    def delivery(self, index: int, timestamp: int, key_size: int, value_size: int) -> Delivery:
        """The handle of the record at `index`. Sizes are bytes, -1 for null."""
        delivery = Delivery.__new__(Delivery)
        delivery.point(self, index, timestamp, key_size, value_size)
        return delivery

    def _part(self, index: int) -> tuple[int, Outcome]:
        """The part that holds the record at `index`, and the index of its first record."""
        parts = self.parts
        if parts is None:
            raise IllegalStateError("this batch was not split")
        found = parts[0]
        for part in parts:
            if part[0] > index:
                break
            found = part
        return found

    def _announce(self) -> None:
        callbacks, self.callbacks = self.callbacks, None
        waiters, self.waiters = self.waiters, None
        fences, self.fences = self.fences, None
        if callbacks is not None:
            for at in range(0, len(callbacks), 2):
                delivery, function = callbacks[at], callbacks[at + 1]
                callbacks[at] = callbacks[at + 1] = None  # as in _wake
                _call(function, delivery, self.topic, self.loop)
        if waiters is not None:
            try:
                self.loop.call_soon(_wake, self.loop, waiters)
            except RuntimeError:
                # The event loop is closed: nobody waits any more.
                logger.debug("waiters for %s are gone with their event loop", self.topic)
        if fences is not None:
            for fence in fences:
                fence.passed()

    def __del__(self) -> None:
        # Nobody can ask any more. A failure that nobody saw is reported once per batch.
        if self.state == FAILED and self.observed < self.count and self.failure is not None:
            logger.error(
                "%d of %d records to %s-%d were not delivered and nobody looked at the result "
                "(persisted: %s): %s: %s",
                self.count - self.observed,
                self.count,
                self.topic,
                self.partition,
                self.failure.persisted,
                self.failure.kind.__name__,
                self.failure.message,
            )


class Place:
    """Which record of which outcome: what a Delivery is to its owner, and a Waiter to a Task."""

    __slots__ = ("_index", "_key_size", "_observed", "_outcome", "_timestamp", "_value_size")

    _outcome: Outcome
    _index: int
    _timestamp: int
    _key_size: int
    _value_size: int
    _observed: bool

    def point(
        self, outcome: Outcome, index: int, timestamp: int, key_size: int, value_size: int
    ) -> None:
        """This record."""
        self._outcome = outcome
        self._index = index
        self._timestamp = timestamp
        self._key_size = key_size
        self._value_size = value_size
        self._observed = False

    def _resolve(self) -> Outcome:
        """The outcome that decides about this record now: follows splits."""
        while self._outcome.state == SPLIT:
            start, part = self._outcome._part(self._index)
            self._outcome = part
            self._index -= start
        return self._outcome

    def done(self) -> bool:
        """Whether the record has its end: acknowledged or failed."""
        return self._resolve().state != PENDING

    def _metadata(self) -> RecordMetadata:
        """Where the record is. Raises DeliveryError, or IllegalStateError while it is not done."""
        outcome = self._resolve()
        if outcome.state == ACKNOWLEDGED:
            # What RecordMetadata(...) does, without a call that costs more than the rest.
            return tuple.__new__(
                RecordMetadata,
                (
                    outcome.topic,
                    outcome.partition,
                    outcome.base_offset + self._index if outcome.base_offset >= 0 else -1,
                    outcome.log_append_time if outcome.log_append_time >= 0 else self._timestamp,
                    self._key_size,
                    self._value_size,
                ),
            )
        error = self._failure()
        if error is None:
            raise IllegalStateError("the record is PENDING: await the delivery, or ask done()")
        raise error

    def _failure(self) -> DeliveryError | None:
        """Why it failed, or None. It counts as looked at. Raises as `_metadata`."""
        outcome = self._resolve()
        if outcome.state == PENDING:
            raise IllegalStateError("the record is PENDING: await the delivery, or ask done()")
        failure = outcome.failure
        if failure is None:
            return None
        if not self._observed:
            self._observed = True
            outcome.observed += 1
        return failure.exception(outcome.topic, outcome.partition, self._index)

    def _told(self) -> str:
        outcome = self._resolve()
        where = f"{outcome.topic}-{outcome.partition}"
        if outcome.state == ACKNOWLEDGED and outcome.base_offset >= 0:
            where += f"@{outcome.base_offset + self._index}"
        return f"{where} {_STATE_NAMES[outcome.state].lower()}"


class Delivery(Place):
    """The handle of one buffered record. `await` it for its RecordMetadata.

    Awaiting again gives the same again. Cancelling the wait does not cancel the
    record: it is on its way. Raises DeliveryError, see there for `persisted`.

    It is no asyncio.Future: it cannot be cancelled, and `asyncio.wait` does not take it. For
    several use `asyncio.gather(*deliveries, return_exceptions=True)`, or
    `asyncio.ensure_future(delivery)` where a future is wanted.
    """

    __slots__ = ()

    @property
    def topic(self) -> str:
        """The topic that the record goes to."""
        return self._outcome.topic

    @property
    def partition(self) -> int:
        """The partition that was chosen for the record."""
        return self._outcome.partition

    @property
    def timestamp(self) -> int:
        """The record's own timestamp, in ms."""
        return self._timestamp

    def result(self) -> RecordMetadata:
        """Where the record is. Never waits.

        Raises DeliveryError if it failed, IllegalStateError while it is not done.
        """
        return self._metadata()

    def exception(self) -> DeliveryError | None:
        """Why the record failed, or None. A fresh exception each time.

        Raises IllegalStateError while the record is not done.
        """
        return self._failure()

    def peek_exception(self) -> DeliveryError | None:
        """Like `exception`, for observers: the failure still counts as not looked at."""
        outcome = self._resolve()
        if outcome.failure is None:
            return None
        return outcome.failure.exception(outcome.topic, outcome.partition, self._index)

    def add_done_callback(self, function: Callable[[Delivery], object]) -> None:
        """Call `function(delivery)` when the record has its end; at once if it has.

        It runs on the event loop, in the order of the batch: keep it short. What it
        raises is logged.
        """
        outcome = self._resolve()
        if outcome.state == PENDING:
            outcome.add_callback(self, function)
        else:
            _call(function, self, outcome.topic, outcome.loop)

    def waiter(self) -> Waiter | None:
        """What to await until the record has its end; None if it has.

        To be awaited once, by whoever asked for it; then `_metadata` is there, from it as well:
        so many tasks that wait need one object each, and no Delivery.
        """
        outcome = self._resolve()
        if outcome.state != PENDING:
            return None
        if outcome.loop is None:
            raise IllegalStateError("this delivery belongs to no event loop")
        waiter = Waiter.__new__(Waiter)
        waiter.point(outcome, self._index, self._timestamp, self._key_size, self._value_size)
        waiter._wakeup = None
        waiter._context = None
        waiter._asyncio_future_blocking = False
        outcome.add_waiter(waiter)
        return waiter

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        waiter = self.waiter()
        if waiter is not None:
            yield from waiter
        return self.result()

    def __repr__(self) -> str:
        return f"<Delivery {self._told()}>"


class Waiter(Place):
    """A task's wait for a record: of asyncio.Future, what a Task needs of one.

    A Task recognizes what it may sleep on by `_asyncio_future_blocking`, asks `get_loop`,
    leaves its wakeup with `add_done_callback`, and asks for the `result` when it is woken;
    whoever cancels the task calls `cancel` (asyncio/tasks.py, Task.__step and Task.cancel).
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_wakeup")

    _wakeup: Callable[[Waiter], object] | None
    _context: Any
    _asyncio_future_blocking: bool

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Waiter:
        return self

    def __next__(self) -> Waiter:
        if self.done():
            raise StopIteration
        if self._wakeup is not None:
            raise RuntimeError("only one task can await a waiter: await the delivery instead")
        self._asyncio_future_blocking = True
        return self

    def result(self) -> None:
        """Nothing: what became of the record is `_metadata`, for whoever runs then."""

    def get_loop(self) -> Any:
        """The event loop that wakes."""
        return self._resolve().loop

    def add_done_callback(self, wakeup: Callable[[Waiter], object], *, context: Any) -> None:
        """The Task that sleeps here wants to be woken with `wakeup`, in its context."""
        self._context = context
        self._wakeup = wakeup

    def cancel(self, msg: Any = None) -> bool:
        """The Task was cancelled: wake it. The record goes on.

        Always False, which tells the Task to remember that it is cancelled, and `msg`: it
        raises CancelledError by itself when it runs.
        """
        if not self.done():
            loop = self.get_loop()
            loop.call_soon(_wake, loop, [self])
        return False

    def __repr__(self) -> str:
        return f"<Waiter for {self._told()}>"


def _wake(loop: Any, waiters: list[Waiter]) -> None:
    """Run the tasks that sleep there, one after the other, as the loop would.

    Each waiter is let go before the next task runs: a task that sends again makes no more objects
    than it leaves, so that there is no more work for Python's garbage collector, which looks at
    everything when their number grows.
    """
    at = 0
    for waiter in waiters:
        waiters[at] = None  # type: ignore[call-overload]
        at += 1
        wakeup = waiter._wakeup
        if wakeup is None:
            continue  # woken before, by a cancellation
        waiter._wakeup = None
        # Who was cancelled stays in the line: what his context holds must not.
        context, waiter._context = waiter._context, None
        try:
            context.run(wakeup, waiter)
        except BaseException:
            # SystemExit, KeyboardInterrupt, or a task that cannot run now: not the others'.
            if at < len(waiters):
                loop.call_soon(_wake, loop, waiters[at:])
            raise
    # A cancelled task holds this frame in its error: it must not hold the task in return.
    wakeup = context = None
