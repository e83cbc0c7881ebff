"""The way in: from a call to a record in the accumulator, at once or in line.

`enter` does everything that needs no waiting: interceptors, serializers, checks, the
partition, and `append`. Where the topic is not known yet or there is no memory, the
record becomes a `Pending` in a line: first that of its topic's metadata, then that of
the buffer pool. Whoever serves a line appends the record there and then, so records
enter the accumulator in the order in which their callers came: nobody overtakes
between being woken and running.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from threading import get_ident
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any

from asyncproducer.core.answers import METADATA_TOPIC, Answer, answer_for
from asyncproducer.core.batch import (
    BATCH_OVERHEAD,
    NO_HEADERS,
    batch_upper_bound,
    encode_headers,
    plain_headers,
)
from asyncproducer.core.delivery import Delivery, Waiter, raise_later
from asyncproducer.core.partitioner import partition_for_key
from asyncproducer.encoding import (
    MAX_TIMESTAMP,
    cancellations,
    header_list,
    partitioner_of,
    timestamp_ms,
    to_bytes,
    unchanging,
)
from asyncproducer.errors import (
    AuthorizationError,
    BrokerError,
    BufferFull,
    ErrorCode,
    IllegalStateError,
    InvalidPartition,
    InvalidTopic,
    KafkaError,
    MetadataNotReady,
    MetadataTimeout,
    ProducerNotStarted,
    RecordError,
    RecordTooLarge,
    SerializationError,
    again,
    error_name,
)
from asyncproducer.logs import guarded
from asyncproducer.net.buffer_pool import Ticket
from asyncproducer.net.waiting import time_of
from asyncproducer.records import Record, RecordMetadata, check_topic

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.accumulator import Accumulator, TopicState
    from asyncproducer.core.bulk import Rows
    from asyncproducer.core.metadata import ClusterMetadata, TopicMetadata
    from asyncproducer.encoding import RecordSerializer
    from asyncproducer.net.buffer_pool import BufferPool, Share
    from asyncproducer.net.cluster import Cluster
    from asyncproducer.net.scheduler import Scheduler
    from asyncproducer.plugins import Interceptor
    from asyncproducer.records import Header

    # Where this module is compiled, these are C functions, see intake.pxd.
    COMPILED: bool
    HAS_GIL: bool
    MOST_NS_PER_COUNT: int
    append_quickly: Any
    Py_REFCNT: Any
    begin_entry: Any
    c_counter: Any
    c_get_ident: Any
    c_monotonic: Any
    c_time_ns: Any
    forget_stop: Any
    in_line: Any
    install_calls: Any
    install_send: Any
    plain_call: Any
    size_of: Any

# ruff: noqa: F821 (names that intake.pxd brings in where this module is compiled)

__all__ = ["REFUSALS", "Entry", "Front", "Intake", "Pending"]

#: Whether this module runs compiled, which C knows as a constant: what the other case needs is not
#: even there. A file that Python loads from source ends in .py.
globals()["COMPILED"] = not __file__.endswith(".py")

logger = guarded("asyncproducer")

#: How many records that waited for metadata are appended before the loop may turn.
_SERVED_AT_ONCE = 500

#: How many partitions must have a batch to send before a request leaves within a turn of the loop
#: for a broker that has one: fewer would make many small requests under load.
_BATCHES_PER_REQUEST = 5

#: In how many turns of the loop a record leaves that nobody follows.
_LONE_TURNS = 2

#: How much a loop of `await enqueue()` may take in before it lets the event loop turn: at most so
#: many bytes, where a record counts as so many more than it has; and no more after so many seconds,
#: which are looked at each time that some of these bytes have come in; fewer where batches are
#: compressed, which takes its part of a turn.
_BYTES_PER_TURN = 1_048_576
_SECONDS_PER_TURN = 0.00045
_SECONDS_BESIDE_COMPRESSING = 0.0003
_BYTES_PER_LOOK = 65_536
_BYTES_PER_RECORD = 400
#: The same for a row of a bulk, which counts half: it costs less.
_BYTES_PER_ROW = 60
#: Of so many tasks it is known that they had a record in a turn that was spent.
_REMEMBERED = 64
#: How many tasks whose records are in go on in a turn for each that only let others go first, where
#: the former take all of its time.
_GIVEN_PER_BREATH = 8
#: How many rows go in at most before the budget of the turn is looked at.
_ROWS_AT_ONCE = 500
#: How often in a row none may go in with the one before it, until that is not tried any more.
_MOST_IN_VAIN = 3

#: What concerns one record only, and is known before it is buffered.
REFUSALS = (RecordError, MetadataNotReady, BufferFull, AuthorizationError)

_CANNOT_WAIT = "send_nowait cannot wait for an async serializer: use send or enqueue"


def _partitions(view: TopicMetadata) -> str:
    count = view.partition_count
    return "1 partition" if count == 1 else f"{count} partitions"


class Pending(Ticket):
    """A record that waits: for its topic's metadata, then for memory."""

    __slots__ = (
        "deadline",
        "headers",
        "intake",
        "key",
        "partition",
        "place",
        "state",
        "timer",
        "timestamp",
        "topic",
        "value",
        "wait",
    )

    def __init__(
        self,
        intake: Intake,
        topic: str,
        partition: int | None,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
        deadline: float,
    ) -> None:
        self.intake = intake
        self.topic = topic
        self.partition = partition
        self.timestamp = timestamp
        self.key = key
        self.value = value
        self.headers = headers
        self.deadline = deadline
        #: Without a partition, the one that it waits for where it has to tell: who comes later
        #: and goes elsewhere is not before it then.
        self.place = -1
        self.state: TopicState | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.wait: Wait | None = None

    def claim(self) -> bool:
        """Whether no memory is needed: the record fits a batch that is open now, or its
        caller was cancelled in this very turn, or refused, and it must not be sent."""
        if self.wait is not None and self.wait.over:
            return True
        return self._append(0)

    def share(self) -> Share | None:
        """What its broker has of the memory."""
        accumulator, state = self.intake.accumulator, self.state
        if state is None:
            return None
        place = self.place if self.partition is None else self.partition
        share: Share | None = None if place < 0 else accumulator.share_of(state, place)
        if share is None or (share.node < 0 and self.partition is None):
            accumulator.move_on(state, self._asked)
            self.place = state.partitioner.peek(state.view)
            share = accumulator.share_of(state, self.place)
        return share

    def granted(self) -> None:
        """Memory for a new batch is there."""
        self._append(self._asked)

    def refused(self, error: BaseException) -> None:
        """There was none in time, or the producer was closed."""
        self.fail(error)

    def _append(self, granted: int) -> bool:
        intake = self.intake
        state = self.state
        if state is None:
            raise IllegalStateError("a record without a topic cannot be appended")
        delivery = intake.accumulator.append(
            state,
            self.place if self.partition is None else self.partition,
            self.timestamp,
            self.key,
            self.value,
            self.headers,
            intake.loop_time(),
            granted,
        )
        intake.tell_news()
        if delivery is None:
            return False
        if self.place >= 0:
            # It counts for when records without a partition go on to the next.
            size = batch_upper_bound(self.key, self.value, self.headers) - BATCH_OVERHEAD
            if state.partitioner.update(delivery.partition, size, state.view, True):
                state.sticky = None
                state.unsaid = 0
        self.resolve(delivery)
        return True

    def resolve(self, delivery: Delivery) -> None:
        """The record is buffered."""
        self.disarm()
        if self.wait is not None and not self.wait.over:
            self.intake.resume_soon(self.wait)
            self.wait.give(delivery)

    def fail(self, error: BaseException) -> None:
        """The record will not be buffered."""
        self.disarm()
        if self.wait is not None and not self.wait.over:
            self.intake.on_lost(error)
            self.wait.refuse(error)

    def buffered(self) -> Delivery | None:
        """The Delivery, where the record was buffered in the turn that cancelled its caller."""
        return None if self.wait is None else self.wait.delivery

    def disarm(self) -> None:
        """No deadline for metadata any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Breath:
    """A task lets others go first: of asyncio.Future, what a Task needs of one (see Waiter)."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_loop", "_wakeup", "over")

    _asyncio_future_blocking: bool
    _context: Any
    _wakeup: Callable[[Breath], object] | None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wakeup = None
        self.over = False

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Breath:
        return self

    def __next__(self) -> Breath:
        if self.over:
            raise StopIteration(self.result())
        self._asyncio_future_blocking = True
        return self

    def result(self) -> Any:
        """Nothing. (The Task asks before it goes on.)"""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the task."""
        return self._loop

    def add_done_callback(self, wakeup: Callable[[Breath], object], *, context: Any) -> None:
        """The Task that sleeps here wants to be woken with `wakeup`, in its context."""
        self._wakeup = wakeup
        self._context = context

    def cancel(self, msg: Any = None) -> bool:
        """The Task was cancelled, which it remembers itself: wake it."""
        self.over = True
        self._loop.call_soon(self.end)
        return False

    def end(self) -> None:
        """Run the task, as the loop would."""
        self.over = True
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            self._context.run(wakeup, self)
            wakeup = None  # as in _wake


class Wait(Breath):
    """What a caller awaits whose record waits. It is over when the record's fate is known."""

    __slots__ = ("_message", "delivery", "error")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._message: Any = None
        self.delivery: Delivery | None = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """The Delivery, or the error is raised."""
        if self.error is not None:
            raise self.error
        if self.delivery is None:
            raise asyncio.CancelledError(*(() if self._message is None else (self._message,)))
        return self.delivery

    def cancel(self, msg: Any = None) -> bool:
        """As Breath's. Whoever takes the cancellation back finds no Delivery all the same."""
        self._message = msg
        return super().cancel(msg)

    def give(self, delivery: Delivery) -> None:
        """The record is in. Whoever calls this has `end` called as well."""
        self.delivery = delivery
        self.over = True

    def refuse(self, error: BaseException) -> None:
        """It will not be: the task runs in the next turn of the loop."""
        self._loop.call_soon(self.end)
        self.error = error
        self.over = True


class Entry:
    """`await producer.enqueue(...)` or `send(...)`: a coroutine in small, for where a real one
    costs too much.

    A record that need not wait for room is buffered in the first step. One that must goes on
    as a coroutine inside. It can be awaited, and given to asyncio as a coroutine can: once.
    """

    __slots__ = (
        "_begun",
        "_headers",
        "_inner",
        "_intake",
        "_key",
        "_long",
        "_partition",
        "_sends",
        "_timestamp",
        "_topic",
        "_value",
        "_waiter",
    )

    _begun: bool
    _headers: Any
    _inner: Any
    _intake: Intake
    _key: Any
    #: Whether it has more than topic, value and key.
    _long: bool
    _partition: Any
    _sends: bool
    _timestamp: Any
    _topic: Any
    _value: Any
    _waiter: Waiter | None

    def _called(self) -> str:
        return "send" if self._sends else "enqueue"

    def _begin(self) -> Any:
        """The result, a Waiter to sleep on, or the coroutine that goes on."""
        if self._begun:
            return self._sleep() if self._inner is None else self._inner
        if self._intake is None:
            raise TypeError("only a producer makes these: await its send() or enqueue()")
        self._begun = True
        delivery: Delivery | None
        if self._long:
            delivery = self._enter()
        else:
            delivery = self._intake.enter_open(self)
            if delivery is None:
                delivery = self._enter()
        if delivery is None:
            return self._inner
        self._value = None
        if self._key is not None:
            self._key = None
        if not self._sends:
            self._intake.spare = self
            return delivery
        # From here on the Waiter is all that the record needs: the next one gets the Delivery.
        waiter = delivery.waiter()
        if waiter is None:
            self._intake.spare = self
            return delivery._metadata()
        self._waiter = waiter
        waiter._asyncio_future_blocking = True
        return waiter

    def _enter(self) -> Delivery | None:
        """The long way. None: `_inner` goes on."""
        intake = self._intake
        topic, value, key, headers = self._topic, self._value, self._key, self._headers
        partition, timestamp = self._partition, self._timestamp
        self._value = self._key = self._headers = self._partition = self._timestamp = None
        if not self._sends and intake.spent and intake.again():
            self._inner = intake.enter_later(topic, value, key, headers, partition, timestamp)
            return None
        entered = intake.enter(topic, value, key, headers, partition, timestamp)
        if type(entered) is Delivery:
            return entered
        wait = intake.wait_acknowledged if self._sends else intake.wait
        self._inner = wait(topic, entered)
        return None

    def _sleep(self) -> Any:
        """The result, or what to sleep on until it is there."""
        waiter = self._waiter
        if waiter is None:
            raise RuntimeError(f"cannot await the same {self._called()}() twice")
        if waiter.done():
            self._waiter = None
            self._intake.spare = self
            return waiter._metadata()
        if waiter._wakeup is not None:
            raise RuntimeError(f"this {self._called()}() is being awaited already")
        waiter._asyncio_future_blocking = True
        return waiter

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Run until it waits; StopIteration brings the result."""
        step = self._begin()
        kind = type(step)
        if kind is Waiter:
            return step
        if kind is Delivery or kind is RecordMetadata:
            raise StopIteration(step)
        return step.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception where it waits."""
        error = kind if value is None else value
        if traceback is not None:
            error = error.with_traceback(traceback)
        if self._inner is not None:
            return self._inner.throw(error)
        self._begun = True
        self._waiter = None
        raise error

    def close(self) -> None:
        """Give up."""
        self._begun = True
        self._waiter = None
        if self._inner is not None:
            self._inner.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._called()}() cannot be copied: it is awaited once")

    def __del__(self) -> None:
        if not self._begun and self._intake is not None:
            warnings.warn(
                f"{self._called()}({self._topic!r}, ...) was never awaited: the record is not sent",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


def _new_entry(
    sends: bool,
    intake: Intake,
    topic: Any,
    value: Any,
    key: Any,
    headers: Any,
    partition: Any,
    timestamp: Any,
) -> Entry:
    # A loop of sends needs one Entry: the last one, if nobody has kept it. What is to be awaited
    # on the producer's loop may be made on another thread, whose turn this is where there is a GIL.
    entry = None
    if COMPILED and HAS_GIL:  # pragma: no cover - coverage sees no C
        entry = intake.spare
        if entry is not None:
            intake.spare = None
    if entry is None or Py_REFCNT(entry) > 1:
        entry = Entry.__new__(Entry)
        entry._intake = intake
        entry._topic = entry._key = entry._headers = entry._partition = entry._timestamp = None
        entry._inner = entry._waiter = None
    entry._sends = sends
    entry._value = value
    # One that is used again has the topic of the last record, and none of the others: each name
    # for an object is counted, in C too.
    if entry._topic is not topic:
        entry._topic = topic
    if key is not None:
        entry._key = key
    entry._long = headers is not None or partition is not None or timestamp is not None
    if entry._long:
        entry._headers = headers
        entry._partition = partition
        entry._timestamp = timestamp
    entry._begun = False
    return entry


def _is_late(data: Any) -> bool:
    """Whether what a serializer returned is to be awaited. To ask `inspect` costs as much as the
    rest of a record's way, and nearly always it is bytes."""
    return type(data) is not bytes and data is not None and inspect.isawaitable(data)


class Intake:
    """What a running producer does with a record until it is buffered."""

    def __init__(
        self,
        config: ProducerConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        metadata: ClusterMetadata,
        cluster: Cluster,
        pool: BufferPool,
        accumulator: Accumulator,
        scheduler: Scheduler,
        interceptors: tuple[Interceptor, ...],
        key_serializer: RecordSerializer | None,
        value_serializer: RecordSerializer | None,
        check_usable: Callable[[], None],
        on_refused: Callable[[str], None],
        on_lost: Callable[[BaseException], None],
        on_metadata_wait: Callable[[float], None],
    ) -> None:
        self.accumulator = accumulator
        self.loop_time = time_of(loop)
        self._plain_time = self.loop_time is monotonic
        #: Whether records are taken now: not before the start, nor from close on.
        self._open = False
        # Asking for the running loop is a system call in CPython 3.11, so it is asked once in
        # each of its turns; until it turns again, the thread tells.
        self._in_turn = False
        #: Whether `_turned` is going to be called.
        self._turns = False
        self._thread = 0
        #: The last time that was asked for, the processor's counter before that, and how far it
        #: goes at least until the millisecond is over.
        self._ms = self._counter = self._ms_lasts = 0
        #: An Entry that has done its work.
        self.spare: Entry | None = None
        #: Whether as much came in as a turn of the loop takes, or a task had its part of that; who
        #: had a record after that (and the last who had: the others are the first); and who lets
        #: the loop turn before the next one, in order.
        self.spent = False
        self._goes_round = False
        self._had: set[asyncio.Task[Any]] = set()
        self._had_last: asyncio.Task[Any] | None = None
        self._breaths: deque[Breath] = deque()
        #: Whose records are in that waited.
        self._given: deque[Breath] = deque()
        self.partitioner = partitioner_of(config.partitioner)
        self._config = config
        self._loop = loop
        self._metadata = metadata
        self._cluster = cluster
        self._pool = pool
        #: Whoever waits for memory. A property of the pool would cost a call per record.
        self._pool_line = pool.tickets
        #: And whoever waits until one broker has less of it.
        self._pool_aside = pool.set_aside
        self._scheduler = scheduler
        self._interceptors = interceptors
        self._key_serializer = key_serializer
        self._value_serializer = value_serializer
        serializers = [s for s in (key_serializer, value_serializer) if s is not None]
        self._serializes = bool(serializers)
        self._async_serializers = any(s.is_async for s in serializers)
        #: Whether records are written as they come.
        self._plain = not (interceptors or serializers or self.partitioner)
        self._check_usable = check_usable
        self._on_refused = on_refused
        #: Hears why a record will not be buffered that has waited for it, before its caller does.
        self.on_lost = on_lost
        self._on_metadata_wait = on_metadata_wait
        self._hash_keys = not config.partitioner_ignore_keys
        self._max_block = config.max_block_ms / 1000
        # Below this, key, value and headers fit whatever their lengths' encodings take.
        self._certain_size = min(config.max_request_size, config.buffer_memory) - 128
        #: The topic of the last record, and its state: mostly that of the next as well.
        self._last_topic: str | None = None
        self._last_state: TopicState | None = None
        #: Records of topics that are not known yet, or whose line is being let in.
        self._lines: dict[str, OrderedDict[Pending, None]] = {}
        #: Records for partitions that their topics do not have (yet).
        self._absent: dict[str, OrderedDict[Pending, None]] = {}
        #: What somebody is told who does not wait.
        self._declined: KafkaError | None = None
        #: What came in since the loop has turned, how much may, and with how much to look whether
        #: that was enough, which it is from `_turn_ends` on.
        self._taken = 0
        self.turn_bytes = _BYTES_PER_TURN
        self._look_at = 0
        self._turn_ends = 0.0
        self._turn_seconds = _SECONDS_PER_TURN
        if config.compression_type != "none":
            self._turn_seconds = _SECONDS_BESIDE_COMPRESSING
        #: For how many turns of the loop `_settle` has been under way; 0 while it is not.
        self._settling = 0
        #: Whether `_turned` goes on with it: a call of its own costs a lone record 2 % more.
        self._settles = False
        #: Whether a task had more records in this turn than it takes.
        self._pouring = False
        #: How often it was opened: once, or once for each transaction.
        self.openings = 0
        self._late = False
        #: How many records are with the user's code, of those that a commit waits for.
        self.serializing = 0

    @property
    def waiting(self) -> int:
        """How many records wait for metadata."""
        return sum(map(len, (*self._lines.values(), *self._absent.values())))

    def open(self) -> None:
        """Take records from now on."""
        self._open = True
        self._late = False
        self.openings += 1
        self.serializing = 0  # what is left of the transaction before is refused when it is ready

    def shut(self, *, late: bool = False) -> None:
        """Take no more records. `late`: but those whose serializers are at work."""
        self._open = self._in_turn = False
        self._forget()
        self._late = late
        self.spare = None

    def close(self, error: BaseException) -> None:
        """Refuse those who wait for metadata. The pool refuses those who wait for memory."""
        self.shut()
        self._refuse_lines(error)

    def refuse_waiting(self, error: BaseException) -> None:
        """Refuse those who wait now, for metadata or for memory."""
        for ticket in self._pool.everybody():
            if isinstance(ticket, Pending):
                ticket.fail(again(error))
        self._pool.serve()  # they claim nothing, and go
        self._refuse_lines(error)

    def _refuse_lines(self, error: BaseException) -> None:
        lines = [*self._lines.values(), *self._absent.values()]
        self._lines, self._absent = {}, {}
        for line in lines:
            for pending in line:
                pending.fail(again(error))

    def enter(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Any,
        partition: int | None,
        timestamp: int | datetime | None,
        wait: bool = True,
    ) -> Any:
        """Buffer the record, or put it in line. Returns a Delivery, a Pending, or for async
        serializers and interceptors' records a coroutine that gives one of them: `wait`
        knows them all."""
        if not self._here():
            self._come_in()  # raises where the call is wrong here and now, whatever the record
        try:
            return self._enter(topic, value, key, headers, partition, timestamp, wait)
        except BaseException as error:
            # Nothing was waited for: a CancelledError is what the user's own code has raised. That
            # somebody who does not wait would have to is an answer, no harm to his transaction.
            declined = error is self._declined
            self._declined = None
            self._refuse(topic, error, -1 if declined else self.openings)
            raise

    def _refuse(self, topic: str, error: BaseException, openings: int) -> None:
        """The record, which came in the transaction of this number, will not be buffered."""
        if isinstance(error, REFUSALS) and type(topic) is str:
            self._on_refused(topic)
        if openings == self.openings:
            self.on_lost(error)

    def _enter(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Any,
        partition: int | None,
        timestamp: int | datetime | None,
        wait: bool,
    ) -> Any:
        if self._interceptors:
            return self._enter_observed(topic, value, key, headers, partition, timestamp, wait)
        if headers is None:
            pairs: Any = None
        else:
            pairs = None if self._serializes else plain_headers(headers)
            if pairs is None:
                openings = self.openings
                pairs = header_list(headers)
                self._check_open(openings)
        if self._serializes:
            if pairs is None:
                pairs = []
            openings = self.openings
            if self._async_serializers and wait:
                return self._enter_serialized(
                    topic, value, key, pairs, partition, timestamp, openings
                )
            key, value = self._serialize(topic, key, value, pairs, wait)
            if _is_late(key) or _is_late(value):
                return self._enter_awaited(topic, value, key, pairs, partition, timestamp, openings)
        return self._enter_bytes(topic, value, key, pairs, partition, timestamp, wait)

    def enter_open(self, entry: Entry) -> Delivery | None:
        """The short way of nearly every record, in one piece: bytes for the topic of the record
        before, into a batch that is open. None: go the long way, `enter`."""
        state = self._last_state
        if entry._topic is not self._last_topic or state is None or not state.known:
            return None
        if not self._plain or not self._here() or (self.spent and not entry._sends):
            return None
        if self._somebody_waits():
            return None
        size = 1
        place = -1
        value, key = entry._value, entry._key
        if value is not None:
            if type(value) is not bytes:
                return None
            size += size_of(value) if COMPILED else len(value)
        if key is not None:
            if type(key) is not bytes:
                return None
            size += size_of(key) if COMPILED else len(key)
            if self._hash_keys:
                place = partition_for_key(key, state.partition_count)
        if size > self._certain_size:
            return None
        when = self._today()
        accumulator = self.accumulator
        delivery = None
        if COMPILED:  # pragma: no cover - coverage sees no C
            delivery = append_quickly(accumulator, state, place, when, key, value, size)
        if delivery is None:
            delivery = accumulator.append_open(state, place, when, key, value, NO_HEADERS, size)
            if delivery is None:
                return None
        self._taken += size + _BYTES_PER_RECORD
        if self._taken > self._look_at:
            self._look()
        return delivery

    def _somebody_waits(self) -> bool:
        """Nobody overtakes those who wait for metadata, or for memory."""
        if COMPILED:  # pragma: no cover - coverage sees no C
            return in_line(self) > 0  # type: ignore[no-any-return]
        return bool(self._lines or self._pool_line or self._pool_aside)

    def _may_pass(self, state: TopicState, place: int) -> bool:
        """Whether nobody waits for memory who would be overtaken: who waits for another broker's
        is not."""
        if self._pool_line:
            return False
        if place < 0:
            return self.accumulator.move_on(state)
        share = self.accumulator.share_of(state, place)
        return not share.is_waited_for()

    def _here(self) -> bool:
        """Whether this is our loop, as far as can be told without asking for it."""
        if COMPILED:  # pragma: no cover - coverage sees no C
            return self._in_turn and c_get_ident() == self._thread
        return self._in_turn and get_ident() == self._thread

    def _come_in(self) -> None:
        """The first record in this turn of the loop. Raises if none can be taken here."""
        if not self._open or self._loop is not running_loop():
            self._check_usable()
            if not self._open:
                raise ProducerNotStarted(
                    "send(): this call was made before the producer was started: make it anew"
                )
        self._in_turn = True
        self._thread = get_ident()
        self._turn_ends = self._now() + self._turn_seconds
        self._turn_soon()

    def _turned(self) -> None:
        self._turns = False
        if self._breaths or self._given:
            self._turn_soon()  # whatever is raised here, in other people's code
        self._in_turn = False
        self._forget()
        self._taken = self._look_at = 0
        if self.accumulator.pouring and not self._pouring:
            self._scheduler.wake()  # what was held up gets no more
        self.accumulator.pouring = self._pouring
        self._pouring = False
        # It holds its batch, whose end is told when nobody can ask for it any more.
        self.accumulator.last = None
        if COMPILED:  # pragma: no cover - coverage sees no C
            forget_stop()
        if self._settles:
            self._settles = False
            self._settle()
        if self._breaths or self._given:
            self._go_on()

    def _turn_soon(self) -> None:
        if not self._turns:
            self._loop.call_soon(self._turned)
            self._turns = True

    def _forget(self) -> None:
        """The turn is not spent, or a new one."""
        self.spent = self._goes_round = False
        self._had.clear()
        self._had_last = None

    def resume(self, breath: Breath) -> None:
        """Run its task when those before it have had their turn."""
        self._turn_soon()
        self._breaths.append(breath)

    def resume_soon(self, breath: Breath) -> None:
        """Run its task in the next turn of the loop: its record is in, and who is cancelled until
        then does not hear of it."""
        self._turn_soon()
        self._given.append(breath)

    def _go_on(self) -> None:
        """Run those whose records are in, and those who let the loop turn, for as long as a turn
        may take."""
        breaths, given = self._breaths, self._given
        ends = self._now() + self._turn_seconds
        # Where there is always a crowd whose records are in, the time is always used up.
        least = 1 + len(given) // _GIVEN_PER_BREATH
        while given:
            self._run(given.popleft())
        # Who lets the loop turn for no more records does not wait for others.
        while breaths and (least > 0 or not (self._open and (self.spent or self._now() >= ends))):
            least -= 1
            self._run(breaths.popleft())

    def _run(self, breath: Breath) -> None:
        """Run the task, which may have so much of the turn while others wait."""
        self._look_at = min(self._taken + _BYTES_PER_LOOK, self.turn_bytes)
        breath.end()
        if self._goes_round:
            self._forget()

    def _look(self) -> bool:
        """Whether this task shall let the loop turn, or others go first, before its next record."""
        taken = self._taken
        if taken <= self.turn_bytes and self._now() < self._turn_ends:
            self._look_at = min(taken + _BYTES_PER_LOOK, self.turn_bytes)
            if self.spent or not (self._breaths or self._given):
                return self.spent
            self._goes_round = True
        else:
            self._taken = 0
            self._look_at = min(_BYTES_PER_LOOK, self.turn_bytes)
            self._goes_round = False
        self._turn_soon()
        self.spent = True
        self._has_had(asyncio.current_task())
        return True

    def again(self) -> bool:
        """Where the turn is spent, whether the task has had a record since: each may have one, so
        that who has no more than that does not wait."""
        task = asyncio.current_task()
        if task is self._had_last or task in self._had:
            return task is not None and self._open and self._loop is running_loop()
        self._has_had(task)
        return False

    def _has_had(self, task: asyncio.Task[Any] | None) -> None:
        self._had_last = task
        # Who begins tasks that run at once is not the last one then, but among the first.
        if task is not None and len(self._had) < _REMEMBERED:
            self._had.add(task)

    def _today(self) -> int:
        """The time in ms since 1970.

        To ask the system takes as long as to write a record, so the processor's counter is asked
        whether this millisecond can have ended at all, where there is one.
        """
        if COMPILED:  # pragma: no cover - coverage sees no C
            counter = c_counter()
            if counter - self._counter >= self._ms_lasts:
                nanoseconds = c_time_ns()
                self._ms = nanoseconds // 1_000_000
                self._counter = counter
                self._ms_lasts = (1_000_000 - nanoseconds % 1_000_000) // MOST_NS_PER_COUNT
            return self._ms
        return time_ns() // 1_000_000

    def _now(self) -> float:
        if COMPILED and self._plain_time:  # pragma: no cover - coverage sees no C
            return c_monotonic()  # type: ignore[no-any-return]
        return self.loop_time()

    def _serialize(
        self, topic: str, key: Any, value: Any, pairs: list[Header], wait: bool
    ) -> tuple[Any, Any]:
        """Key and value as their serializers return them: to be awaited, perhaps, if `wait`."""
        if self._async_serializers and not wait:
            raise SerializationError(_CANNOT_WAIT)
        openings = self.openings
        key, value = self._kept(key, value)
        try:
            if self._key_serializer is not None:
                key = self._key_serializer(topic, key, pairs)
            if self._value_serializer is not None:
                value = self._value_serializer(topic, value, pairs)
            if not wait and (_is_late(key) or _is_late(value)):
                raise SerializationError(_CANNOT_WAIT)
            self._check_open(openings)
        except BaseException:
            for data in (key, value):
                if inspect.iscoroutine(data):
                    data.close()  # nobody awaits it
            raise
        return key, value

    def _kept(self, key: Any, value: Any) -> tuple[Any, Any]:
        """What is not serialized as it is now: a serializer of the other one may take its time."""
        if self._key_serializer is None:
            key = unchanging(key)
        if self._value_serializer is None:
            value = unchanging(value)
        return key, value

    def _check_open(self, openings: int) -> None:
        """Called after the user's own code: that may have ended the transaction, or closed the
        producer. Raises if the record, which came with the opening of this number, is too late."""
        if openings != self.openings:
            raise IllegalStateError(
                "the transaction that the record was sent in ended before the record was ready"
            )
        # A commit waits for those that are counted.
        if not self._open and not (self._late and self.serializing):
            self._check_usable()

    def _enter_bytes(
        self,
        topic: str,
        value: Any,
        key: Any,
        pairs: list[Header] | bytes | None,
        partition: int | None,
        timestamp: int | datetime | None,
        wait: bool,
    ) -> Delivery | Pending:
        """`pairs`: the headers, or what they are on the wire."""
        openings = self.openings
        if value is not None and type(value) is not bytes:
            value = to_bytes(topic, "value", value)
            self._check_open(openings)
        if key is not None and type(key) is not bytes:
            key = to_bytes(topic, "key", key)
            self._check_open(openings)
        if not pairs:
            headers = NO_HEADERS
        elif isinstance(pairs, bytes):
            headers = pairs
        else:
            # A serializer may have added some.
            headers = encode_headers(header_list(pairs) if self._serializes else pairs)
        size = len(headers)
        if value is not None:
            size += size_of(value) if COMPILED else len(value)
        if key is not None:
            size += size_of(key) if COMPILED else len(key)
        if size > self._certain_size:
            self._check_size(topic, key, value, headers)
        if timestamp is None:
            when = self._today()
        elif type(timestamp) is not int or not 0 <= timestamp <= MAX_TIMESTAMP:
            when = timestamp_ms(timestamp)
            self._check_open(openings)
        else:
            when = timestamp
        self._taken += size + _BYTES_PER_RECORD
        if self._taken > self._look_at:
            # Also where nothing can leave yet: it is the answers that must be read.
            self._look()
        accumulator = self.accumulator
        state = self._last_state
        if topic is not self._last_topic or state is None or not state.known:
            if type(topic) is not str:
                check_topic(topic)
            state = accumulator.topics.get(topic)
            self._last_state = state
            self._last_topic = topic
        if state is None or not state.known or (self._lines and topic in self._lines):
            return self._enter_line(topic, partition, when, key, value, headers, wait=wait)
        place = -1
        if partition is None:
            if self.partitioner is not None:
                place = self._ask_partitioner(state.view, key, value)
            elif key is not None and self._hash_keys:
                place = partition_for_key(key, state.partition_count)
        else:
            if type(partition) is int and 0 <= partition < 2**31:
                place = partition  # in C a number of its own: no object is made to compare it
            if not 0 <= place < state.partition_count:
                return self._enter_line(topic, partition, when, key, value, headers, wait=wait)
        if not (self._pool_line or self._pool_aside) or self._may_pass(state, place):
            delivery = accumulator.append_open(state, place, when, key, value, headers, size)
            if delivery is not None:
                return delivery
            delivery = self._append(state, place, when, key, value, headers)
            if delivery is not None:
                return delivery
        if not wait:
            return self._append_now(state, place, when, key, value, headers)
        return self._enter_pool(state, None if place < 0 else place, when, key, value, headers)

    def enter_rows(self, rows: Rows, first: int) -> int:
        """Buffer rows from `first` on, without an object for each, as far as nothing waits.

        Returns the first row that is not in. It must go the way of a single record: it has to
        wait, or is not plain, or something is wrong with it, or the loop shall turn before it.
        """
        if not self._here():
            self._come_in()
        row = first
        if self._interceptors or self._serializes or self.partitioner is not None:
            return row
        rows.now = self._today()
        accumulator = self.accumulator
        topic: Any = None
        state: TopicState | None = None
        place = vain = 0
        try:
            # Nobody overtakes those who wait for memory.
            while row < rows.count and not self._pool_line and rows.read(row):
                if rows.topic is not topic:
                    topic = rows.topic
                    if state is not None:
                        state.stays = False
                    state = accumulator.topics.get(topic)
                    if topic in self._lines:
                        break
                    if state is not None:
                        accumulator.stay(state, rows.abound)
                if state is None or not state.known or rows.size > self._certain_size:
                    break
                place = rows.partition
                if place >= state.partition_count or state.partition_count == 0:
                    break
                if place < 0 and rows.key_size >= 0 and self._hash_keys:
                    place = rows.key_partition(state.partition_count)
                if self._pool_aside and not self._may_pass(state, place):
                    break
                batch = accumulator.append_row(state, place, rows)
                if batch is not None:
                    rows.place(row, batch, batch.count - 1)
                elif not self._append_row(state, place, rows, row):
                    break
                row += 1
                self._taken += (rows.size + _BYTES_PER_ROW) >> 1
                if self._pool_line:
                    break  # memory came back meanwhile, and somebody has been called for it
                batch = state.sticky
                first = row
                end = min(rows.count, row + _ROWS_AT_ONCE)
                if place >= 0:
                    # Each row that it leaves is read once more. It asks for no one's place in line.
                    if vain < _MOST_IN_VAIN and rows.headers_size == 1 and not self._pool_aside:
                        row = accumulator.append_spread(
                            state, rows, row, end, self._certain_size, self._hash_keys
                        )
                        vain = 0 if row > first else vain + 1
                        self._taken += (rows.written + (row - first) * _BYTES_PER_ROW) >> 1
                elif batch is not None:
                    size = batch.size
                    row = accumulator.append_run(state, rows, row, end, self._certain_size)
                    self._taken += (batch.size - size + (row - first) * _BYTES_PER_ROW) >> 1
                if self._taken > self._look_at and self._look():
                    break
        finally:
            if state is not None:
                rows.stay = state.stays and place < 0
                state.stays = False
        return row

    def _append_row(self, state: TopicState, place: int, rows: Rows, row: int) -> bool:
        """The row, by the long way into a batch."""
        key, value, headers = rows.fields()
        delivery = self._append(state, place, rows.timestamp, key, value, headers)
        if delivery is not None:
            rows.placed(row, delivery)
        return delivery is not None

    def _append(
        self, state: TopicState, place: int, when: int, key: Any, value: Any, headers: bytes
    ) -> Delivery | None:
        """The long way into a batch: it begins with this record, or is full with it. None: there
        is no memory."""
        accumulator = self.accumulator
        delivery = accumulator.append(state, place, when, key, value, headers, self._now())
        if accumulator.news:
            self._after_news()
        return delivery

    def _append_now(
        self, state: TopicState, place: int, when: int, key: Any, value: Any, headers: bytes
    ) -> Delivery:
        """For who does not wait, and has found no memory: another broker may have some."""
        accumulator = self.accumulator
        needs = accumulator.batch_bytes(key, value, headers)
        if (
            place < 0
            and not self._pool_line
            and self._pool.is_held_up(accumulator.share_of(state, place), needs)
            and accumulator.move_on(state, needs)
        ):
            delivery = self._append(state, place, when, key, value, headers)
            if delivery is not None:
                return delivery
        raise self._decline(self._buffer_full(state, place, needs))

    def _after_news(self) -> None:
        """A batch began or became full: let the scheduler know."""
        accumulator = self.accumulator
        self._settle_soon()
        for node, line in accumulator.ready.items():
            # The connection has nothing to do, or there is enough for a request of decent size: it
            # leaves now, and the broker works while the loop has not turned yet.
            enough = (
                len(line) >= _BATCHES_PER_REQUEST
                and accumulator.held_until(node, self._now()) < 0
                and self._cluster.has_room(node)
            )
            if enough or self._cluster.is_idle(node):
                # What fails there is not the caller's concern: the record is buffered.
                self._scheduler.try_step(self.loop_time())
                return
        accumulator.news = False
        if not self._settling:
            self._scheduler.wake()

    def _settle_soon(self) -> None:
        if self.accumulator.fresh and not self._settling:
            self._settling = 1
            if self._in_turn:
                self._settles = True
            else:
                self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """One turn of the loop later: is anybody still adding to the new batches?"""
        now = self.loop_time()
        accumulator = self.accumulator
        turns, self._settling = self._settling, 0
        try:
            if accumulator.settle(now, self._cluster.is_idle):
                self._settling = turns + 1
                self._loop.call_soon(self._settle)
        except BaseException:
            self._scheduler.wake()
            raise
        if accumulator.ready or not self._settling:
            self._scheduler.try_step(now)
        elif self._settling > _LONE_TURNS:
            # Records still come. Some may have a linger time, or their partition no leader yet, or
            # no place in the transaction: that is for a step.
            self._scheduler.wake()

    def tell_news(self) -> None:
        """Somebody else than a caller of ours appended: let the scheduler know, if need be."""
        if self.accumulator.news:
            self._settle_soon()
            self._scheduler.wake()

    def _decline(self, error: KafkaError) -> KafkaError:
        """The answer to who does not wait, so that `enter` knows it from what his code raises."""
        self._declined = error
        return error

    def _buffer_full(self, state: TopicState, place: int, needs: int) -> BufferFull:
        pool = self._pool
        pool.turned_away()
        share = self.accumulator.share_of(state, place)
        held_up = pool.available and pool.is_held_up(share, needs)
        whose = f" ({pool.told_of(share)})" if held_up else ""
        return BufferFull(
            f"the buffer is full: {pool.available} of {pool.total} bytes are free{whose} and "
            f"{pool.waiting} senders wait; await enqueue() or send(), or raise buffer_memory"
        )

    def is_over(self) -> bool:
        """Whether the turn is over by the clock, whatever came in. Where none is under way, one
        begins now."""
        if not self._open:
            return False
        if not self._here():
            self._come_in()
            return False
        return self._now() >= self._turn_ends

    async def breathe(self) -> None:
        """Let the loop turn, for a task that has records when the turn is spent: answers must
        be read as well. Before its next record is taken, so that a cancellation finds nothing
        half done. Raises IllegalStateError where the next transaction has begun meanwhile."""
        openings = self.openings
        if self.spent or self._taken > _BYTES_PER_LOOK:  # else it is its time that is over
            self._pouring = self.accumulator.pouring = True
        breath = Breath(self._loop)
        self.resume(breath)
        await breath
        # An abort of what no broker has heard of takes no turn.
        if openings != self.openings:
            raise IllegalStateError("the transaction that the record was sent in has ended")

    async def enter_later(self, topic: str, *record: Any) -> Delivery:
        """`breathe`, then `enter`."""
        await self.breathe()
        entered = self.enter(topic, *record)
        if type(entered) is Delivery:
            return entered
        return await self.wait(topic, entered)

    async def wait(self, topic: str, entered: Any) -> Delivery:
        """Wait for what `enter` could not do at once; counts refusals as `enter` does."""
        openings = self.openings
        before = cancellations()
        try:
            delivery = await self._wait(entered)
            if self.spent:
                self._has_had(asyncio.current_task())
            return delivery
        except BaseException as error:
            # Who was cancelled knows that the record is not in. But the user's own code may raise a
            # CancelledError as well, and a GeneratorExit: nobody can tell whose that is.
            if not isinstance(error, asyncio.CancelledError) or cancellations() <= before:
                self._refuse(topic, error, openings)
            raise

    async def wait_acknowledged(self, topic: str, entered: Any) -> RecordMetadata:
        """`wait`, then wait for the brokers."""
        delivery = await self.wait(topic, entered)
        return await delivery

    async def _wait(self, entered: Any) -> Delivery:
        """Wait in line for what `_enter` could not do at once."""
        while type(entered) is not Delivery:
            if type(entered) is not Pending:
                entered = await entered
                continue
            pending = entered
            if pending.wait is None:
                raise AssertionError("somebody waits for what becomes of the record")
            try:
                delivery: Delivery = await pending.wait
                return delivery
            except BaseException:
                # Cancelled, or the coroutine was closed: nobody waits any more.
                self._withdraw(pending)
                raise
        return entered

    def _withdraw(self, pending: Pending) -> None:
        """The record leaves its line: the caller was cancelled, or its time is up."""
        pending.disarm()
        self._scheduler.wake()  # it may be what a commit waits for
        if pending.state is not None:
            self._pool.leave(pending)
            return
        for lines in (self._lines, self._absent):
            line = lines.get(pending.topic)
            if line is not None and pending in line:
                del line[pending]
                if not line:
                    del lines[pending.topic]

    def _enter_line(
        self,
        topic: str,
        partition: int | None,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
        *,
        wait: bool,
    ) -> Delivery | Pending:
        """The topic, or the partition, is not known yet: wait for metadata."""
        check_topic(topic)
        if partition is not None and (type(partition) is not int or partition < 0):
            raise InvalidPartition(f"partition {partition!r} for {topic}: must be an int >= 0")
        now = self.loop_time()
        pending = Pending(
            self, topic, partition, timestamp, key, value, headers, now + self._max_block
        )
        line = self._lines.get(topic)
        denied: AuthorizationError | None = None
        try:
            if line is None and self.ready(pending):
                # Known since a moment ago, but not used yet.
                return self._admit(pending, wait=wait)
        except AuthorizationError as refusal:
            denied = refusal  # when we last asked: it may have been granted since
        self._cluster.add_topic(topic)
        known = self._metadata.topic(topic) is not None
        if line is None:
            # Also where the topic is in use: the last answer may have left it out.
            self._cluster.request_update_for_topic(topic)
        if not wait or self._max_block == 0:
            if denied is not None:
                raise denied
            if wait:
                raise self.metadata_timeout(pending)
            raise self._decline(self._not_ready(pending))
        pending.wait = Wait(self._loop)
        pending.timer = self._loop.call_at(pending.deadline, self._metadata_timed_out, pending)
        if line is None:
            line = (self._absent if known else self._lines).setdefault(topic, OrderedDict())
        line[pending] = None
        return pending

    def _metadata_timed_out(self, pending: Pending) -> None:
        if pending.wait is not None and not pending.wait.over:
            self._withdraw(pending)
            pending.fail(self.metadata_timeout(pending))

    def metadata_timeout(self, pending: Pending) -> MetadataTimeout:
        """The error of a record whose topic or partition did not appear in time."""
        budget = f"{round(self._max_block * 1000)} ms (max_block_ms)"
        view = self._metadata.topic(pending.topic)
        code = self._metadata.topic_error(pending.topic)
        if view is None:
            hint = (
                "check its name, and whether the brokers create topics by themselves "
                "(auto.create.topics.enable)"
                if code in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                else f"the brokers answer {error_name(code)} when they are asked about it"
            )
            error = MetadataTimeout(f"topic {pending.topic!r} is not known after {budget}: {hint}")
        else:
            error = MetadataTimeout(
                f"partition {pending.partition} of {pending.topic!r} did not appear within "
                f"{budget}: the topic has {_partitions(view)}"
            )
        if code:
            error.__cause__ = BrokerError(code)
        elif self._cluster.fatal_error is not None:
            error.__cause__ = self._cluster.fatal_error
        return error

    def _not_ready(self, pending: Pending) -> MetadataNotReady:
        """The error of a record that will not wait."""
        view = self._metadata.topic(pending.topic)
        if view is None:
            what = f"topic {pending.topic!r} is not known yet"
        elif pending.partition is not None and pending.partition >= view.partition_count:
            what = (
                f"topic {pending.topic!r} has no partition {pending.partition}, only "
                f"{_partitions(view)}"
            )
        else:
            what = f"others wait in line to be sent to topic {pending.topic!r}"
        error = MetadataNotReady(
            f"{what}: the brokers are asked, try again later, or await send, enqueue or warm_up"
        )
        code = self._metadata.topic_error(pending.topic)
        if code:
            error.__cause__ = BrokerError(code)
        return error

    def ready(self, pending: Pending) -> bool:
        """Whether metadata has what the record needs. Raises what makes it hopeless."""
        name = pending.topic
        view = self._metadata.topic(name)
        if view is None:
            code = self._metadata.topic_error(name)
            answer = answer_for(METADATA_TOPIC, code)
            if answer is Answer.INVALID:
                raise InvalidTopic(f"the brokers do not accept the topic name {name!r}")
            if answer is Answer.DENIED:
                error = AuthorizationError(f"not authorized for topic {name!r}")
                error.code = code
                raise error
            if self._cluster.fatal_error is not None:
                raise again(self._cluster.fatal_error)
            return False
        return pending.partition is None or pending.partition < view.partition_count

    def _admit(self, pending: Pending, *, wait: bool = True) -> Delivery | Pending:
        """Metadata is there: choose the partition, and append or wait for memory."""
        view = self._metadata.topic(pending.topic)
        if view is None:
            raise AssertionError("the topic was there")
        state = self.accumulator.topics.get(pending.topic)
        if state is None or not state.known or state.view is not view:
            state = self.accumulator.update_topic(view, self.loop_time())
        partition = pending.partition
        if partition is None:
            if self.partitioner is not None:
                partition = self._ask_partitioner(view, pending.key, pending.value)
            elif pending.key is not None and self._hash_keys:
                partition = partition_for_key(pending.key, view.partition_count)
        pending.partition = partition
        pending.state = state
        place = -1 if partition is None else partition
        if not self._pool.waiting or self._may_pass(state, place):
            delivery = self._append(
                state, place, pending.timestamp, pending.key, pending.value, pending.headers
            )
            if delivery is not None:
                pending.resolve(delivery)
                return delivery
        if not wait:
            return self._append_now(
                state, place, pending.timestamp, pending.key, pending.value, pending.headers
            )
        self._join_pool(pending)
        return pending

    def _enter_pool(
        self,
        state: TopicState,
        partition: int | None,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
    ) -> Pending:
        pending = Pending(
            self,
            state.name,
            partition,
            timestamp,
            key,
            value,
            headers,
            self.loop_time() + self._max_block,
        )
        pending.state = state
        self._join_pool(pending)
        return pending

    def _join_pool(self, pending: Pending) -> None:
        pending.disarm()
        if pending.wait is None:
            pending.wait = Wait(self._loop)
        size = self.accumulator.batch_bytes(pending.key, pending.value, pending.headers)
        self._pool.enter(size, pending.deadline, pending)
        self.tell_news()

    def _serve_line(self, topic: str) -> None:
        """Let in, in order, the records that waited for this topic's metadata."""
        line = self._lines.get(topic)
        served = 0
        while line:
            pending = next(iter(line))
            if pending.wait is None or pending.wait.over:
                del line[pending]
                continue
            if served >= _SERVED_AT_ONCE:
                self._loop.call_soon(self._serve_line, topic)
                return
            try:
                if not self.ready(pending):
                    self._metadata.request_update_for_topic(topic)  # keep asking
                    if self._metadata.topic(topic) is None:
                        return
                    # Only its partition is missing: those behind need not wait for that.
                    del line[pending]
                    self._absent.setdefault(topic, OrderedDict())[pending] = None
                    continue
                del line[pending]
                # It came `max_block_ms` before its deadline.
                left = pending.deadline - self.loop_time()
                self._on_metadata_wait(max(0.0, self._max_block - left))
                self._admit(pending)
            except BaseException as error:
                line.pop(pending, None)
                if isinstance(error, Exception):
                    pending.fail(error)
                else:
                    # It ends the loop in a turn of its own: the others in line are let in, and
                    # whoever brought the metadata goes on.
                    refusal = InvalidPartition(f"the partitioner raised {error!r}")
                    refusal.__cause__ = error
                    pending.fail(refusal)
                    raise_later(self._loop, error)
            served += 1
        self._lines.pop(topic, None)

    def _serve_absent(self, topic: str) -> None:
        """Let those back into the line whose partition is there now."""
        view = self._metadata.topic(topic)
        if view is None:
            return
        able: list[Pending] = []
        rest: OrderedDict[Pending, None] = OrderedDict()
        for pending in self._absent.pop(topic):
            if pending.partition is None or pending.partition < view.partition_count:
                able.append(pending)
            else:
                rest[pending] = None
        if able:
            # In front: who came later for the same partition stands in the line, if at all.
            line = self._lines.setdefault(topic, OrderedDict())
            for pending in reversed(able):
                line[pending] = None
                line.move_to_end(pending, last=False)
        if rest:
            self._absent[topic] = rest
            self._metadata.request_update_for_topic(topic)  # keep asking

    def _check_size(self, topic: str, key: Any, value: Any, headers: bytes) -> None:
        size = batch_upper_bound(key, value, headers)
        for option in ("max_request_size", "buffer_memory"):
            limit = getattr(self._config, option)
            if size > limit:
                raise RecordTooLarge(
                    f"a record for {topic} takes up to {size} bytes, more than {option}={limit} "
                    f"allows: send less in one record, or raise {option}"
                    + (
                        " (and max.message.bytes of the topic)"
                        if option == "max_request_size"
                        else ""
                    )
                )

    def _ask_partitioner(self, view: TopicMetadata, key: Any, value: Any) -> int:
        if self.partitioner is None:
            raise AssertionError("there is a partitioner")
        openings = self.openings
        self.serializing += 1  # the record is in no line now: a commit would not wait for it
        try:
            partition = self.partitioner.partition(view, key, value)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Whoever was cancelled, it is another task: a partitioner waits for nothing.
            raise InvalidPartition(
                f"the partitioner {type(self.partitioner).__name__} raised {error!r}"
            ) from error
        else:
            self._check_open(openings)
        finally:
            self._serialized(openings)
        if type(partition) is not int or not 0 <= partition < view.partition_count:
            raise InvalidPartition(
                f"the partitioner {type(self.partitioner).__name__} returned {partition!r} for "
                f"{view.name}, which has {_partitions(view)}"
            )
        return partition

    # -- interceptors and async serializers ------------------------------------------------

    async def _enter_serialized(
        self,
        topic: str,
        value: Any,
        key: Any,
        pairs: list[Header],
        partition: int | None,
        timestamp: int | datetime | None,
        openings: int,
    ) -> Any:
        self._check_open(openings)
        self.serializing += 1
        try:
            key, value = self._kept(key, value)
            if self._key_serializer is not None:
                key = self._key_serializer(topic, key, pairs)
                if _is_late(key):
                    key = await self._key_serializer.awaited(topic, key)
            if self._value_serializer is not None:
                value = self._value_serializer(topic, value, pairs)
                if _is_late(value):
                    value = await self._value_serializer.awaited(topic, value)
            self._check_open(openings)
            return self._enter_bytes(topic, value, key, pairs, partition, timestamp, True)
        finally:
            self._serialized(openings)

    async def _enter_awaited(
        self,
        topic: str,
        value: Any,
        key: Any,
        pairs: list[Header],
        partition: int | None,
        timestamp: int | datetime | None,
        openings: int,
    ) -> Any:
        """`key` and `value`: as their serializers returned them, where nobody knew that they
        would have to be awaited."""
        counted = self.openings
        self.serializing += 1
        late = value
        try:
            if self._key_serializer is not None and _is_late(key):
                key = await self._key_serializer.awaited(topic, key)
            if self._value_serializer is not None and _is_late(value):
                value = await self._value_serializer.awaited(topic, value)
            self._check_open(openings)
            return self._enter_bytes(topic, value, key, pairs, partition, timestamp, True)
        finally:
            if inspect.iscoroutine(late):
                late.close()  # it was not begun, if that of the key has failed
            self._serialized(counted)

    def _serialized(self, openings: int) -> None:
        """The user's code has ended that the commit of this opening's transaction waits for."""
        if openings == self.openings:
            self.serializing -= 1
        if not self._open:
            self._scheduler.wake()  # it may be what a commit waits for

    def _enter_observed(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Any,
        partition: int | None,
        timestamp: int | datetime | None,
        wait: bool,
    ) -> Any:
        """The way of a record that interceptors look at."""
        openings = self.openings
        if headers is not None and not isinstance(headers, (Mapping, Sequence)):
            # An iterator would be empty after the first look.
            headers = header_list(headers)
        record = Record(topic, value, key, headers, partition, timestamp)
        for interceptor in self._interceptors:
            try:
                result = interceptor.on_send(record)
                if type(result) is not Record:
                    raise TypeError(f"on_send returned {result!r}, not a Record")
                record = result
            except (Exception, asyncio.CancelledError):
                logger.exception("on_send of %r failed; the record goes on as it was", interceptor)
        if wait:
            return self._observe(record, openings)
        pairs: list[Header] = []
        try:
            pairs = [] if record.headers is None else header_list(record.headers)
            self._check_open(openings)
            key, value = self._serialize(record.topic, record.key, record.value, pairs, False)
            delivery = self._enter_bytes(
                record.topic, value, key, pairs, record.partition, record.timestamp, False
            )
        except BaseException as error:
            self._notify_refused(record, error, tuple(pairs))
            raise
        if type(delivery) is Delivery:
            self._notify_later(delivery, tuple(pairs))
        return delivery

    async def _observe(self, record: Record, openings: int) -> Delivery:
        entered: Any = None
        pairs: list[Header] = []
        try:
            pairs = [] if record.headers is None else header_list(record.headers)
            entered = await self._enter_serialized(
                record.topic,
                record.value,
                record.key,
                pairs,
                record.partition,
                record.timestamp,
                openings,
            )
            delivery = await self._wait(entered)
        except BaseException as error:
            buffered = entered.buffered() if type(entered) is Pending else None
            if buffered is None:
                self._notify_refused(record, error, tuple(pairs))
            else:
                self._notify_later(buffered, tuple(pairs))
            raise
        self._notify_later(delivery, tuple(pairs))
        return delivery

    def _notify_refused(
        self, record: Record, error: BaseException, headers: tuple[Header, ...]
    ) -> None:
        partition = record.partition if type(record.partition) is int else -1
        # The transaction hears of it right after them: a commit that they call waits until then.
        openings = self.openings
        self.serializing += 1
        self._notify(RecordMetadata(record.topic, partition, -1, -1, -1, -1), error, headers)
        self._serialized(openings)

    def _notify_later(self, delivery: Delivery, headers: tuple[Header, ...]) -> None:
        def done(delivery: Delivery) -> None:
            error = delivery.peek_exception()
            if error is None:
                self._notify(delivery.result(), None, headers)
            else:
                place = RecordMetadata(delivery.topic, delivery.partition, -1, -1, -1, -1)
                self._notify(place, error, headers)

        delivery.add_done_callback(done)

    def _notify(
        self, metadata: RecordMetadata, error: BaseException | None, headers: tuple[Header, ...]
    ) -> None:
        for interceptor in self._interceptors:
            try:
                interceptor.on_acknowledgement(metadata, error, headers)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                # It ends the loop in a turn of its own: the next interceptor is to hear of it. The
                # loop that runs: ours may be closed, and the producer be closed by another.
                raise_later(asyncio.get_running_loop(), interrupt)
            except BaseException:
                logger.exception("on_acknowledgement of %r failed", interceptor)

    def serve_lines(self) -> None:
        """There is news from the cluster: let in whoever waited for it."""
        for topic in (*self._absent, *self._lines):
            # It is in use as long as somebody waits, however long that is.
            self._cluster.add_topic(topic)
        for topic in list(self._absent):
            self._serve_absent(topic)
        for topic in list(self._lines):
            self._serve_line(topic)


#: The loop that runs in this thread, or None: what asyncio.get_running_loop is made of.
running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop

if COMPILED:  # pragma: no cover - coverage sees no C
    install_send(Entry, Waiter, Delivery, RecordMetadata, begin_entry)


class Front:
    """What a Producer inherits where it is compiled: `send` and `enqueue` without a coroutine."""

    __slots__ = ("_intake",)

    _intake: Intake | None

    def enqueue(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        headers: Any = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Any:
        """Producer.enqueue: nothing happens until it is awaited."""
        if self._intake is None:
            return self._not_yet()
        return _new_entry(False, self._intake, topic, value, key, headers, partition, timestamp)

    def send(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        headers: Any = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Any:
        """Producer.send: nothing happens until it is awaited."""
        if self._intake is None:
            return self._not_yet()
        return _new_entry(True, self._intake, topic, value, key, headers, partition, timestamp)

    async def _not_yet(self) -> Any:
        """There is no intake before the start. Raises when it is awaited."""
        raise NotImplementedError


if COMPILED:  # pragma: no cover - coverage sees no C
    install_calls(Front, plain_call)

for _method in (Front.send, Front.enqueue):
    # What wants a coroutine function, as Starlette's background tasks do, shall find one.
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(_method)
    else:
        _method._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
