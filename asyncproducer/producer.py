"""The producer that users hold: lifecycle, the send family, flush and close.

The way of a record: interceptors → serializers → checks → partition → `append` to the
accumulator. Where all that is known and there is room, no step of it waits. Else the
record becomes a `_Pending` in a line: first that of its topic's metadata, then that of
the buffer pool. Whoever serves a line appends the record there and then, so records
enter the accumulator in the order in which their callers came.
"""

from __future__ import annotations

import asyncio
import os
import random
import warnings
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime
from enum import Enum
from functools import partial, update_wrapper
from itertools import islice
from time import monotonic, thread_time, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, Unpack
from uuid import UUID

from asyncproducer._implementation import IMPLEMENTATION, tell
from asyncproducer.arrow import Columns, open_table
from asyncproducer.bulk import Sending, TableResult
from asyncproducer.config import Options, ProducerConfig
from asyncproducer.core.accumulator import Accumulator, Fence
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS
from asyncproducer.core.compression import codec
from asyncproducer.core.delivery import Delivery, raise_later
from asyncproducer.core.metadata import ClusterMetadata, MetadataChange, TopicMetadata
from asyncproducer.core.metrics import APP_INFO, GAUGES, Metrics
from asyncproducer.core.sequences import Sequences
from asyncproducer.core.transactions import ABORT, BEGIN, CALLS, COMMIT, SEND, SEND_OFFSETS, START
from asyncproducer.core.wire import MetadataRequest
from asyncproducer.encoding import RecordSerializer
from asyncproducer.errors import (
    BatchDeliveryError,
    ConfigError,
    ErrorCode,
    ForkError,
    IllegalStateError,
    MetadataTimeout,
    ProducerClosed,
    ProducerNotStarted,
    ProducerStateError,
    SerializationError,
    WrongLoopError,
    again,
)
from asyncproducer.intake import Front, Intake, Pending, running_loop
from asyncproducer.logs import guarded
from asyncproducer.net.buffer_pool import BufferPool
from asyncproducer.net.cluster import Cluster
from asyncproducer.net.groups import committed_offsets
from asyncproducer.net.scheduler import Scheduler
from asyncproducer.net.threads import Workers
from asyncproducer.net.transactions import Transactions
from asyncproducer.net.transport import TcpConnector
from asyncproducer.net.waiting import time_of
from asyncproducer.portal import Portal
from asyncproducer.records import (
    BatchResult,
    CloseReport,
    ConsumerGroupMetadata,
    Headers,
    Health,
    OffsetAndMetadata,
    PartitionInfo,
    Record,
    RecordMetadata,
    TopicPartition,
    check_topic,
)
from asyncproducer.transaction import Transaction, group_metadata, offset_map, place

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from asyncproducer.arrow import ArrowTables
    from asyncproducer.net.transport import Connector
    from asyncproducer.plugins import Interceptor, SerializerFunction

__all__ = ["Producer", "State"]

logger = guarded("asyncproducer")

#: What can be sent without a serializer.
Plain: TypeAlias = bytes | bytearray | memoryview | str | None

if TYPE_CHECKING:
    # With a default (PEP 696), so that Producer("localhost:9092") needs no annotation.
    K = TypeVar("K", default=Plain)
    V = TypeVar("V", default=Plain)
    # For the classmethods: `Producer.from_config(...)` says nothing of K and V, which some type
    # checkers take for their defaults there, whatever the serializers.
    OtherK = TypeVar("OtherK", default=Plain)
    OtherV = TypeVar("OtherV", default=Plain)
else:
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")
    OtherK = TypeVar("OtherK")
    OtherV = TypeVar("OtherV")

_FORKED: weakref.WeakSet[Producer[Any, Any]] = weakref.WeakSet()


_CLOSED_MEANWHILE = "the producer was closed while the record waited for metadata of its topic"

#: Seconds after which a close that is not done says what it waits for.
_SILENT_CLOSE = 1.0

#: Buffers that have done their work are kept in what is free of `buffer_memory`, up to this and to
#: a quarter of that. Where records are compressed they come back early, and codecs want memory too.
_SPARE_BYTES = 8 * 1024 * 1024
_SPARE_BYTES_COMPRESSED = 2 * 1024 * 1024

#: How many errors a failed send_table raises: its result has all.
_ERRORS_RAISED = 100

#: Seconds: for a topic that is there to be known by every broker, and between two looks.
_TOPIC_ID_S, _TOPIC_ID_AGAIN_S = 5.0, 0.2


class State(Enum):
    """Where a producer is in its life."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"


#: The legal moves. A failed start leads back: the producer can be started again.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATED: frozenset({State.STARTING, State.CLOSED}),
    State.STARTING: frozenset({State.RUNNING, State.CREATED}),
    State.RUNNING: frozenset({State.CLOSING}),
    State.CLOSING: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}


class Unset(Enum):
    """Stands for an argument that was not given, where None says something else."""

    CLOSE_TIMEOUT = "close_timeout"

    def __repr__(self) -> str:
        return self.value


class _Plugins(NamedTuple):
    """What the user has given that is called."""

    key_serializer: RecordSerializer | None
    value_serializer: RecordSerializer | None
    interceptors: tuple[Interceptor, ...]
    connector: Connector | None

    def serializers(self) -> list[RecordSerializer]:
        return [each for each in (self.key_serializer, self.value_serializer) if each is not None]


def _check_interceptors(given: Any) -> tuple[Interceptor, ...]:
    try:
        interceptors = tuple(given)
    except TypeError:
        raise ConfigError(
            f"interceptors must be a sequence of them, not of type {type(given).__name__}"
        ) from None
    for index, interceptor in enumerate(interceptors):
        _check_methods(f"interceptors[{index}]", interceptor, ("on_send", "on_acknowledgement"))
    return interceptors


def _check_methods(argument: str, given: Any, names: tuple[str, ...]) -> None:
    if isinstance(given, type):
        raise ConfigError(f"{argument} is the class {given.__name__}: give an object of it")
    missing = [name for name in names if not callable(getattr(given, name, None))]
    if missing:
        raise ConfigError(
            f"{argument} is of type {type(given).__name__}, which has no {' and no '.join(missing)}"
        )


def _check_close_timeout(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0:
        raise ConfigError(
            f"close_timeout={given!r}: must be a number of seconds, 0 or more, or None for "
            "delivery_timeout_ms"
        )
    return given


def _after_fork_in_child() -> None:
    for producer in list(_FORKED):
        producer._forked = True
        if producer._intake is not None:
            producer._intake.shut()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Producer(Front, Generic[K, V]):
    """Puts records into Kafka topics, from one asyncio event loop.

        async with Producer("localhost:9092") as producer:
            metadata = await producer.send("orders", b"value", key=b"k")

    Making one does no I/O and needs no loop; `start()` (or `async with`) connects.
    Options are Java's in snake_case (see docs/options.md), checked here: ConfigError.

    `key_serializer` and `value_serializer` are functions `value -> bytes` or
    `(topic, value, headers) -> bytes`, plain or async; without one, `bytes`,
    `bytearray`, `memoryview`, `str` (as UTF-8) and None are taken as they are.
    `connector` opens the connections; the testing kit brings its own.

    `close_timeout`: for how many seconds `close()` and the end of `async with` wait for
    what is not acknowledged yet, also where the block is left by an exception: records
    that were taken are not dropped because something else failed. None:
    `delivery_timeout_ms` is the bound. 0: nothing is waited for.
    """

    # Where an object's dict is empty, CPython 3.13 finds a method at once, which else is a sixth of
    # an `enqueue`. What subclasses and tests add is in that dict.
    __slots__ = (
        "__dict__",
        "__orig_class__",
        "__weakref__",
        "_accumulator",
        "_ample",
        "_client_id",
        "_close_timeout",
        "_closing",
        "_cluster",
        "_config",
        "_enter",
        "_forked",
        "_hurry",
        "_impatient",
        "_loop",
        "_loop_time",
        "_made_at_ms",
        "_max_block",
        "_metadata",
        "_metrics",
        "_pid",
        "_plugins",
        "_pool",
        "_report",
        "_scheduler",
        "_sequences",
        "_state",
        "_task",
        "_transactions",
        "_wait",
        "_watchers",
    )

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        /,
        *,
        config: ProducerConfig | None = None,
        key_serializer: SerializerFunction[K] | None = None,
        value_serializer: SerializerFunction[V] | None = None,
        interceptors: Sequence[Interceptor] = (),
        connector: Connector | None = None,
        close_timeout: float | None = 30.0,
        **options: Unpack[Options],
    ) -> None:
        self._state = State.CREATED
        if config is None:
            config = ProducerConfig.from_options(bootstrap_servers, **options)
        elif not isinstance(config, ProducerConfig):
            raise ConfigError(
                f"config is of type {type(config).__name__}, not a ProducerConfig: for a mapping "
                "with dotted names use Producer.from_config(...)"
            )
        elif bootstrap_servers is not None or options:
            raise ConfigError(
                "config and single options do not go together: use config.replace(...)"
            )
        self._config = config
        if connector is not None:
            _check_methods("connector", connector, ("resolve", "connect"))
        self._plugins = _Plugins(
            RecordSerializer.of(key_serializer, "key"),
            RecordSerializer.of(value_serializer, "value"),
            _check_interceptors(interceptors),
            connector,
        )
        self._close_timeout = _check_close_timeout(close_timeout)
        self._client_id = config.resolve_client_id()
        self._max_block = config.max_block_ms / 1000
        #: Where so much memory is free, any record finds room.
        self._ample = min(max(config.batch_size, config.max_request_size), config.buffer_memory)
        self._made_at_ms = time_ns() // 1_000_000
        self._forked = False
        self._pid = 0
        self._watchers: list[asyncio.Future[None]] = []
        self._intake: Intake | None = None
        self._transactions: Transactions | None = None
        self._enter: Callable[..., Any] = self._not_started
        self._wait: Callable[[str, Any], Awaitable[Delivery]] = self._not_started
        self._hurry: asyncio.Future[None] | None = None
        self._impatient = False
        self._closing: asyncio.Task[CloseReport] | None = None
        self._report = CloseReport(0, 0, 0, 0.0)
        self._metrics = Metrics(
            client_id=self._client_id,
            samples=config.metrics_num_samples,
            window=config.metrics_sample_window_ms / 1000,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_config(
        cls,
        mapping: Mapping[str, Any],
        *,
        key_serializer: SerializerFunction[OtherK] | None = None,
        value_serializer: SerializerFunction[OtherV] | None = None,
        interceptors: Sequence[Interceptor] = (),
        connector: Connector | None = None,
        close_timeout: float | None = 30.0,
        **over: Unpack[Options],
    ) -> Producer[OtherK, OtherV]:
        """A producer from dotted names, Java's (`linger.ms`) or librdkafka's.

        `over` are options in snake_case that win. The mapping is not changed.
        Raises ConfigError.
        """
        make: Any = cls  # which is the same class whatever its K and V
        producer: Producer[OtherK, OtherV] = make(
            config=ProducerConfig.from_mapping(mapping, **over),
            key_serializer=key_serializer,
            value_serializer=value_serializer,
            interceptors=interceptors,
            connector=connector,
            close_timeout=close_timeout,
        )
        return producer

    @classmethod
    def from_env(
        cls,
        prefix: str = "KAFKA_",
        *,
        key_serializer: SerializerFunction[OtherK] | None = None,
        value_serializer: SerializerFunction[OtherV] | None = None,
        interceptors: Sequence[Interceptor] = (),
        connector: Connector | None = None,
        close_timeout: float | None = 30.0,
        **over: Unpack[Options],
    ) -> Producer[OtherK, OtherV]:
        """A producer from environment variables: KAFKA_BOOTSTRAP_SERVERS, KAFKA_LINGER_MS ...

        `over` are options in snake_case that win. Raises ConfigError.
        """
        make: Any = cls  # as in from_config
        producer: Producer[OtherK, OtherV] = make(
            config=ProducerConfig.from_env(prefix, **over),
            key_serializer=key_serializer,
            value_serializer=value_serializer,
            interceptors=interceptors,
            connector=connector,
            close_timeout=close_timeout,
        )
        return producer

    # -- lifecycle -------------------------------------------------------------------------

    @property
    def config(self) -> ProducerConfig:
        """The options of this producer."""
        return self._config

    @property
    def client_id(self) -> str:
        """The client id that brokers see: the option, or `producer-<n>`."""
        return self._client_id

    def _move(self, to: State) -> None:
        if to not in TRANSITIONS[self._state]:
            raise IllegalStateError(
                f"a producer that is {self._state.value} cannot become {to.value}"
            )
        self._state = to

    async def start(self) -> None:
        """Connect to the cluster and begin. Does nothing if it is running already.

        Waits until a broker has answered, at most `max_block_ms`, or
        `socket_connection_setup_timeout_ms` where that is 0. All or nothing: when it fails
        or is cancelled, nothing is left open, and it may be tried again.

        With a `transactional_id` it also waits for its coordinator, within the same time. Another
        producer with this id is fenced then, and its open transaction aborted.

        Raises ConnectionFailed, AuthenticationError, UnsupportedVersionError, ConfigError (TLS
        files); ProducerClosed after close(); IllegalStateError while another task is starting it.
        With a `transactional_id` also TransactionTimeout, AuthorizationError, ProducerFenced,
        BrokerError. Where it is running already: WrongLoopError, ForkError, and the fatal error.
        """
        if self._state is State.RUNNING:
            self._check_usable("start")
            return
        if self._state in (State.CLOSING, State.CLOSED):
            raise ProducerClosed("start(): the producer is closed: make a new one")
        if self._state is State.STARTING:
            raise IllegalStateError("start(): another task is starting the producer: wait for it")
        self._move(State.STARTING)
        loop = asyncio.get_running_loop()
        try:
            self._intake = self._build(loop)
            await self._connect(loop)
        except BaseException:
            self._loop = None
            self._move(State.CREATED)
            raise
        self._pid = os.getpid()
        self._move(State.RUNNING)
        tell()
        if self._transactions is None:
            self._intake.open()
        self._enter = self._intake.enter
        self._wait = self._intake.wait
        _FORKED.add(self)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        # Sends that never wait need a cluster all the same.
        patience = self._max_block or self._config.socket_connection_setup_timeout_ms / 1000
        deadline = loop.time() + patience
        try:
            await self._cluster.start(deadline)
            self._task = loop.create_task(
                self._scheduler.run(), name=f"{self._client_id} scheduler"
            )
            self._task.add_done_callback(self._scheduler_ended)
            if self._transactions is not None:
                await self._transactions.initialize(deadline)
        except BaseException:
            await self._stop()
            raise

    async def _take_over(self, transactional_id: str) -> None:
        """Become the producer of this id, as a new one would with `start()`, and fence all others.

        For who has many ids, one after the other, with a transaction each: connections and what
        is known of the cluster stay. Waits and raises as `start()`; raises IllegalStateError while
        a transaction has no end. Failed or cancelled: of no use any more, but for `close()`.
        """
        transactions = self._transactional(START)
        await transactions.take_over(transactional_id, self._loop_time() + self._max_block)

    def _scheduler_ended(self, task: asyncio.Task[None]) -> None:
        """Where asyncio.run ends by SystemExit, say, it cancels all tasks, and users clean up."""
        if not self._scheduler.stopped and self._scheduler.fatal_error is None:
            error = ProducerClosed(
                "the producer's own task was cancelled, as all are when the event loop ends: "
                "nothing is sent any more"
            )
            self._scheduler.give_up(error, self._loop_time())

    async def _stop(self) -> None:
        """End what runs beside us."""
        self._scheduler.stop()
        task, self._task = self._task, None
        try:
            if task is not None:
                await asyncio.wait([task])
        finally:
            # Also where this is cancelled once more: it ends all of its own before it waits. (It
            # has closed itself where it was what could not start.)
            await self._cluster.close()

    def _build(self, loop: asyncio.AbstractEventLoop) -> Intake:
        config = self._config
        self._loop = loop
        self._loop_time = loop.time
        self._pool = BufferPool(config.buffer_memory, loop=loop, metrics=self._metrics)
        self._metadata = ClusterMetadata.from_config(config, random.random)
        connector = self._plugins.connector or TcpConnector(
            send_buffer_bytes=config.send_buffer_bytes,
            receive_buffer_bytes=config.receive_buffer_bytes,
        )
        self._cluster = Cluster(
            config,
            self._metadata,
            connector,
            client_id=self._client_id,
            loop=loop,
            random=random.random,
            on_change=self._on_change,
            on_metadata=self._on_metadata,
            on_moved=lambda node_id: self._accumulator.node_moved(node_id),
            metrics=self._metrics,
        )
        self._transactions = transactions = None
        if config.transactional_id is not None:
            self._transactions = transactions = Transactions(
                config,
                self._cluster,
                loop=loop,
                metrics=self._metrics,
                random=random.random,
            )
        self._sequences: Sequences | None = None
        if transactions is not None:
            self._sequences = transactions.sequences
        elif config.enable_idempotence:
            self._sequences = Sequences()
        compression = config.compression_type
        spare_bytes = _SPARE_BYTES if compression == "none" else _SPARE_BYTES_COMPRESSED
        self._accumulator = Accumulator(
            self._pool,
            batch_size=config.batch_size,
            batch_max_bytes=min(config.batch_max_bytes, config.max_request_size),
            linger=config.linger_ms / 1000,
            delivery_timeout=config.delivery_timeout_ms / 1000,
            retry_backoff=ExponentialBackoff(
                config.retry_backoff_ms / 1000,
                config.retry_backoff_max_ms / 1000,
                random=random.random,
            ),
            random=partial(random.getrandbits, 31),
            codec=None if compression == "none" else codec(compression, config.compression_level),
            sequences=self._sequences,
            max_in_flight=config.max_in_flight_requests_per_connection,
            adaptive=config.partitioner_adaptive_partitioning_enable,
            adaptive_linger=config.adaptive_linger,
            availability_timeout=config.partitioner_availability_timeout_ms / 1000,
            # A loop with a clock of its own is one where everything shall happen again as it did.
            clock=thread_time if time_of(loop) is monotonic else None,
            loop=loop,
            trouble=lambda: self._scheduler.id_error or self._cluster.last_error,
            on_failed=None if transactions is None else transactions.batch_failed,
            spare_bytes=min(spare_bytes, config.buffer_memory // 4),
        )
        self._scheduler = Scheduler(
            config,
            self._accumulator,
            self._cluster,
            client_id=self._client_id,
            loop=loop,
            metrics=self._metrics,
            sequences=self._sequences,
            in_thread=Workers().run,
            on_ready=self._on_producer_id,
            transactions=transactions,
        )
        intake = Intake(
            config,
            loop=loop,
            metadata=self._metadata,
            cluster=self._cluster,
            pool=self._pool,
            accumulator=self._accumulator,
            scheduler=self._scheduler,
            interceptors=self._plugins.interceptors,
            key_serializer=self._plugins.key_serializer,
            value_serializer=self._plugins.value_serializer,
            check_usable=self._check_sendable,
            on_refused=self._on_refused,
            on_lost=self._lost,
            on_metadata_wait=self._metrics.metadata_waited,
        )
        if transactions is not None:
            transactions.attach(self._accumulator, self._scheduler, intake, self._pool)
        return intake

    def _not_started(self, *_: Any, **__: Any) -> Any:
        self._check_usable(SEND)
        raise ProducerNotStarted("send(): the producer is not started")

    async def _not_yet(self) -> Any:
        self._not_started()

    async def __aenter__(self) -> Producer[K, V]:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, timeout: float | Unset | None = Unset.CLOSE_TIMEOUT) -> CloseReport:
        """Send what is buffered, then end; at the latest after `timeout` seconds.

        Without `timeout`, the Producer's `close_timeout` is the bound: 30 s unless it was
        given. With None, `delivery_timeout_ms` is; with 0 nothing more is waited for. A
        close that takes more than a second logs a warning that says what it waits for.

        From the moment of the call, `send` raises ProducerClosed, also for those who wait
        for metadata or room, unless a commit waits for them. What has no end when the time is up
        fails with AbortedError. An open transaction is aborted, unless it is being committed; with
        0 seconds the broker does it after `transaction_timeout_ms`.
        Closing again gives the same report; of several who close at once, the one with the
        least patience decides. Cancelled: everything is given up at once, and closed.

        Raises ValueError (a negative timeout), IllegalStateError while another task is in
        `start()` (cancel that task instead), WrongLoopError.
        """
        if timeout is Unset.CLOSE_TIMEOUT:
            timeout = self._close_timeout
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout={timeout}: a close cannot take less than 0 seconds")
        if self._state is State.CREATED:
            self._move(State.CLOSED)
            self._close_plugins()
            return self._report
        if self._state is State.STARTING:
            raise IllegalStateError("close(): the producer is starting: cancel start() instead")
        if self._state is State.CLOSED:
            return self._report
        loop = self._loop
        if loop is None or self._forked or loop.is_closed():
            return self._abandon()
        if asyncio.get_running_loop() is not loop:
            raise WrongLoopError("close() must be called on the producer's own event loop")
        if self._closing is None:
            self._move(State.CLOSING)
            if self._transactions is None or not self._transactions.is_committing:
                self._refuse_waiting()
            self._wake_watchers()
            self._hurry = loop.create_future()
            self._closing = loop.create_task(
                self._close(self._hurry), name=f"{self._client_id} close"
            )
            if timeout is None or timeout > _SILENT_CLOSE:
                telling = loop.call_later(_SILENT_CLOSE, self._tell_closing, timeout)
                self._closing.add_done_callback(lambda _: telling.cancel())
        try:
            # Also where another task closes already, perhaps with more patience.
            await asyncio.wait([self._closing], timeout=timeout)
            if not self._closing.done():
                self._give_up_waiting()
            return await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._give_up_waiting()
            await asyncio.wait([self._closing])
            raise

    def _refuse_waiting(self) -> None:
        if self._intake is not None:
            self._intake.close(ProducerClosed(_CLOSED_MEANWHILE))

    def _give_up_waiting(self) -> None:
        """A closer's time is up: nothing is waited for any more."""
        self._impatient = True
        self._finish_waiting()
        if self._scheduler.stopped:
            self._cluster.abort()

    def _finish_waiting(self) -> None:
        if self._hurry is not None and not self._hurry.done():
            self._hurry.set_result(None)

    def _tell_closing(self, timeout: float | None) -> None:
        """Somebody may sit at a terminal and wonder why it does not end."""
        waiting = sum(batch.count for batch in self._accumulator.incomplete)
        why = ""
        if self._cluster.connected == 0 and self._cluster.last_error is not None:
            why = f". No broker is connected: {self._cluster.last_error}"
        logger.warning(
            "closing: %d records are still to be acknowledged, waiting up to %s; close_timeout of "
            "the Producer sets the limit, cancelling (another Ctrl-C) gives up at once%s",
            waiting,
            f"{self._config.delivery_timeout_ms / 1000:g} s (delivery_timeout_ms)"
            if timeout is None
            else f"{timeout:g} s",
            why,
        )

    async def stop(self, timeout: float | Unset | None = Unset.CLOSE_TIMEOUT) -> CloseReport:
        """The same as `close(timeout)`, for those who are used to aiokafka's name."""
        return await self.close(timeout)

    async def _close(self, hurry: asyncio.Future[None]) -> CloseReport:
        """`hurry` ends the waiting: all is delivered, or a closer's time is up."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._transactions is not None and not hurry.done():
            ending = loop.create_task(self._transactions.finish())
            # Records would expire in that time, its coordinator may never be there.
            await asyncio.wait(
                [ending, hurry],
                timeout=self._config.delivery_timeout_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        self._refuse_waiting()
        self._pool.close()
        self._accumulator.close(began)
        fence = Fence(self._finish_waiting)
        self._accumulator.begin_flush(fence, began)
        self._scheduler.try_step(began)
        if fence.remaining and not hurry.done():
            await asyncio.wait([hurry])
        aborted = 0
        try:
            aborted = self._scheduler.abort(
                "the producer was closed before the brokers had acknowledged them "
                f"(it waited for {loop.time() - began:.3f} s)",
                None,
                loop.time(),
            )
        finally:
            await self._end(began, aborted)
        return self._report

    async def _end(self, began: float, aborted: int) -> None:
        """Everything that runs ends, whatever went wrong before."""
        if self._transactions is not None:
            self._transactions.close()
        if self._impatient:
            self._cluster.abort()
        try:
            await self._stop()
        finally:
            self._close_plugins()
            self._report = CloseReport(
                self._metrics.acknowledged,
                self._metrics.failed,
                aborted,
                self._loop_time() - began,
            )
            self._move(State.CLOSED)

    def _abandon(self) -> CloseReport:
        """The event loop is gone, or we are in a forked child: only forget everything."""
        self._state = State.CLOSED
        if self._intake is not None:
            self._intake.shut()
        unsent = sum(batch.count for batch in self._accumulator.incomplete)
        if not self._forked:
            for batch in self._accumulator.incomplete:
                # Whoever waited on that loop will never run again. Callbacks do, on this one.
                batch.waiters = batch.fences = None
                batch.loop = asyncio.get_running_loop()
            for batch in self._accumulator.abort(
                "the event loop was closed", None, self._loop_time()
            ):
                self._metrics.records_failed(batch.topic, batch.count)
        self._close_plugins()
        self._report = CloseReport(self._metrics.acknowledged, self._metrics.failed, unsent, 0.0)
        return self._report

    def _close_plugins(self) -> None:
        serializers = (serializer.function for serializer in self._plugins.serializers())
        closed: set[int] = set()
        for plugin in (*self._plugins.interceptors, *serializers, self._config.partitioner):
            close = getattr(plugin, "close", None)
            if close is None or id(plugin) in closed:
                continue  # one object may serialize keys and values
            closed.add(id(plugin))
            try:
                close()
            except (KeyboardInterrupt, SystemExit) as error:
                # It ends the loop in a turn of its own: the others are to be closed, and we are.
                raise_later(asyncio.get_running_loop(), error)
            except BaseException:
                # Whoever was cancelled, it is another task: nothing is waited for here.
                logger.exception("close() of %r failed", plugin)

    def __del__(self) -> None:
        state = getattr(self, "_state", State.CLOSED)
        if state in (State.RUNNING, State.CLOSING) and not self._forked:
            unsent = sum(batch.count for batch in self._accumulator.incomplete)
            warnings.warn(
                f"unclosed {self!r}: {unsent} records have no end; use `async with`, "
                "or `await producer.close()`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        servers = ",".join(self._config.bootstrap_servers) if hasattr(self, "_config") else "?"
        return f"<Producer {servers} {self._state.value}>"

    # -- sending ---------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: V | None = None,
        *,
        key: K | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> RecordMetadata:
        """Send a record and return when it is acknowledged, as `acks` wants it.

        Waits for the topic's metadata and for room, together at most `max_block_ms`, then
        for the brokers, at most `delivery_timeout_ms`. Cancelled while it waits for
        metadata or room: nothing was sent. Cancelled later, or in the very turn of the
        loop in which room came: the wait ends, the delivery goes on.

        `timestamp` is ms since 1970, or an aware datetime; None is now. `headers` is a
        mapping or pairs of str and bytes, str or None.

        Raises RecordError (RecordTooLarge, SerializationError, InvalidPartition,
        InvalidTopic, InvalidTimestamp), MetadataTimeout, BufferTimeout, AuthorizationError,
        ProducerStateError before the record is buffered; DeliveryError after that. Where it waits
        for metadata and the brokers do not let us in: AuthenticationError,
        UnsupportedVersionError, ConfigError (TLS files). With a `transactional_id` also
        IllegalStateError (no transaction is open), TransactionAborted (it can only be aborted).

        A fatal error ends the producer: every call raises that very error then, which is
        ProducerFenced, AuthorizationError, AuthenticationError, UnsupportedVersionError,
        BrokerError or another KafkaError. docs/errors.md says which codes are fatal.
        """
        delivery = self._enter(topic, value, key, headers, partition, timestamp)
        if type(delivery) is not Delivery:
            delivery = await self._wait(topic, delivery)
        # `await delivery` in two steps, which spares two objects per waiting task.
        waiter = delivery.waiter()
        if waiter is None:
            return delivery.result()
        del delivery
        await waiter
        return waiter._metadata()

    async def enqueue(
        self,
        topic: str,
        value: V | None = None,
        *,
        key: K | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Delivery:
        """Buffer a record and return its Delivery, which can be awaited for the outcome.

        Waits only for the topic's metadata and for room, together at most `max_block_ms`;
        cancelled while it waits: nothing was sent, unless room had come in that very turn
        of the loop (the record is buffered then, in its place, before its caller runs).
        Where a turn of the loop has taken in what it has time for, other tasks go first: that time
        does not count. A failed delivery that nobody looks at is logged. Arguments as in `send`.

        Raises what `send` raises before the record is buffered: RecordError, MetadataTimeout,
        BufferTimeout, AuthorizationError, AuthenticationError, ProducerStateError, in a
        transaction TransactionAborted and IllegalStateError; after a fatal error that very one, as
        ProducerFenced. The Delivery raises DeliveryError.
        """
        if self._intake is not None and self._intake.spent and self._intake.again():
            await self._intake.breathe()
        delivery = self._enter(topic, value, key, headers, partition, timestamp)
        if type(delivery) is Delivery:
            return delivery
        return await self._wait(topic, delivery)

    def send_nowait(
        self,
        topic: str,
        value: V | None = None,
        *,
        key: K | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
    ) -> Delivery:
        """Buffer a record without ever waiting, and return its Delivery.

        Raises MetadataNotReady (the topic is asked for, try again or `warm_up` first),
        BufferFull, and the errors of `send` that come before buffering, also the fatal ones,
        as ProducerFenced. Async serializers cannot be used here: SerializationError.
        """
        delivery = self._enter(topic, value, key, headers, partition, timestamp, False)
        if type(delivery) is not Delivery:
            raise IllegalStateError("without waiting, a record enters or an error says why not")
        return delivery

    async def send_many(
        self,
        topic: str | None,
        records: Iterable[V | Record] | AsyncIterable[V | Record],
        *,
        raise_on_error: bool = True,
    ) -> BatchResult:
        """Send many records and return when each of them has its end.

        Made for plain ones: values that are bytes, or Records with bytes and no headers, take a
        fraction of what `enqueue` costs. Others cost the same as there.

        `records` are values, or `Record`s that bring key, headers and so on. A Record's own
        topic counts where `topic` is None; else it must be the same, or "". They enter the
        buffer in the order given, and the result has one entry per record in that order. A
        record that cannot be sent does not stop the others.

        Records without key and partition change their partition with each `batch_size` bytes, as
        single ones do. But with more in memory than brokers take at once (1.5 to 5 MiB, as many
        and as far as they are), they fill one batch up to `batch_max_bytes` before the next begins,
        most likely in a partition that has fewer: that costs a tenth less. (Not where records are
        compressed.)

        Each record may wait for metadata and room, together at most `max_block_ms`: there is
        no limit for all as long as they get in. But what one of them has waited for in vain,
        its topic or room in the buffer, no later one waits for: until it is there, they fail
        at once with the same kind of error, without being serialized.

        Of each record it keeps about 28 bytes (its place and its sizes, not its content) until the
        call ends, and in the result as long as you have that: 2.8 GB for 100 million of them. An
        endless iterable never gets a result and fills the memory: send parts of it instead, as
        `itertools.islice(records, 100_000)`, or `enqueue` each, of which nothing is kept.

        Raises BatchDeliveryError with all errors, unless `raise_on_error` is False; TypeError
        for a single record instead of several, or what is no iterable; ProducerStateError,
        AuthenticationError (see `send`), in a transaction TransactionAborted and
        IllegalStateError; after a fatal error that very one, as ProducerFenced: see `send`. These
        end the sending, and so does what is raised by the iterable itself; what came before goes
        on, but no transaction is committed that misses the rest. Cancelled: no further record is
        taken, what was buffered goes on. An iterable that is not async is asked for up to 1,000
        records (of about 256 KiB, or what it gives in half a millisecond) at a time: so many may be
        lost for it then. A list is not copied: what is put into it or taken out meanwhile counts,
        as far as its turn has not come.
        """
        self._check_usable(SEND)
        if isinstance(records, (Record, str, bytes, bytearray, memoryview)):
            wrong = TypeError(
                f"records is one {type(records).__name__}, not an iterable of records: "
                "send_many(topic, [record]), or send(...) for a single one"
            )
            self._lost(wrong)
            raise wrong
        sending = self._sending()
        try:
            result = await sending.many(topic, records)
        except (ProducerStateError, IllegalStateError):
            # Nothing can be sent now: a commit that is under way goes on. (Where the iterable or
            # reader has raised it, `asking` has told the transaction.)
            raise
        except Exception as error:
            # Whatever the iterable raises: the rest of the records is not sent.
            sending.refused(error)
            raise
        if raise_on_error and result.failed:
            first = result.failed[0]
            undelivered = BatchDeliveryError(
                f"{len(result.failed)} of {len(result)} records were not acknowledged; "
                f"the first is number {first[0]}: {first[1]}",
                [error for _, error in result.failed],
            )
            undelivered.result = result
            raise undelivered
        return result

    async def send_table(
        self,
        topic: str | None,
        table: ArrowTables,
        *,
        key: str | None = None,
        value: str | None = "value",
        headers: str | None = None,
        partition: str | None = None,
        timestamp: str | None = None,
        topic_column: str = "topic",
        raise_on_error: bool = True,
    ) -> TableResult:
        """Send the rows of an Arrow table, and return when each of them has its end.

        `table` is a pyarrow Table, RecordBatch or RecordBatchReader, or anything with the Arrow C
        stream or array interface (polars, pandas >= 2.2, duckdb). A reader is taken batch by
        batch as there is room; the loop stands still while it makes the next one. An async
        iterable of tables, all with the same columns, is sent as one, and the loop goes on while
        it is waited for.

        `key`, `value`, `headers`, `partition` and `timestamp` name columns; None is null (or
        "choose", "now") for all rows. Where `topic` is None, each row's own is in the column
        `topic_column`. Keys and values: binary or text of any kind. Headers: lists of (name,
        value) structs, or maps. Partitions: integers, null for "choose". Timestamps: Arrow's of
        any unit (those without a zone count as UTC), or ms since 1970; null for now.

        Rows enter the buffer in their order and wait there as those of `send_many` do. A row that
        cannot be sent does not stop the others. Interceptors and a partitioner of your own see
        each row, which costs as much as `enqueue`. Cancelled: no further row is taken, what was
        buffered goes on.

        Raises BatchDeliveryError, with the first 100 errors and the `result`, unless
        `raise_on_error` is False. Before anything is sent: SerializationError (no such column, or
        of another type; the producer has serializers, which see no columns), InvalidTopic,
        TypeError (no table), ImportError without pyarrow (the extra "arrow").

        Raises ProducerStateError, AuthenticationError (see `send`), in a transaction
        TransactionAborted and IllegalStateError; after a fatal error that very one, as
        ProducerFenced: see `send`. These end the sending, and so does what a reader raises, and
        SerializationError for a damaged array (its `validate(full=True)` tells), or for a batch
        with other columns than its reader's schema says; what was buffered goes on. A transaction
        from which rows were refused, some or all, or whose reader or iterable has failed, is not
        committed. What is within views and dictionaries pyarrow reads unchecked: validate in full
        what comes from strangers.
        """
        self._usable_intake(SEND)
        sending = self._sending()  # before anything is waited for: its transaction may end
        try:
            if topic is not None:
                check_topic(topic)
            for serializer in self._plugins.serializers():
                raise SerializationError(
                    f"send_table sends columns of bytes and text as they are, and the producer has "
                    f"a {serializer.what}_serializer: use a Producer without one, and serialize "
                    "into a column"
                )
            rest: AsyncIterator[Any] | None = None
            with sending.asking:
                if isinstance(table, AsyncIterable):
                    rest = aiter(table)
                    try:
                        table = await anext(rest)
                    except StopAsyncIteration:
                        return TableResult()
                reader = open_table(table)
            columns = Columns(
                reader.schema,
                topic,
                topic_column=topic_column if topic is None else None,
                key=key,
                value=value,
                headers=headers,
                partition=partition,
                timestamp=timestamp,
            )
            result = await sending.table(columns, reader, rest)
        except (ProducerStateError, IllegalStateError):
            # Nothing can be sent now: a commit that is under way goes on. (Where the iterable or
            # reader has raised it, `asking` has told the transaction.)
            raise
        except Exception as error:
            # Whatever the table, a reader or an iterable raises: the rest of the rows is not sent.
            sending.refused(error)
            raise
        if raise_on_error and result.acknowledged < len(result):
            result._look()
            errors = list(islice(result._errors(), _ERRORS_RAISED))
            group = BatchDeliveryError(
                f"{len(result) - result.acknowledged} of {len(result)} rows were not acknowledged; "
                f"the first is row {errors[0][0]}: {errors[0][1]}",
                [error for _, error, _, _ in errors],
            )
            group.result = result
            raise group
        return result

    def _sending(self) -> Sending:
        # A subclass's own `enqueue` sees every record.
        return Sending(self, by_record=type(self).enqueue is not _ENQUEUE)

    # -- transactions ----------------------------------------------------------------------

    def transaction(self) -> Transaction[K, V]:
        """A transaction for `async with`: committed at the end of the block, or aborted.

            async with producer.transaction() as tx:
                await tx.enqueue("orders", b"value")
                await tx.send_offsets(offsets, group)

        `tx` is the producer. The end waits for all records, `enqueue` is enough within. It is
        aborted if the block raises anything, and if any record of it failed or was refused, also
        where nobody looked: then TransactionAborted is raised. Cancelled in the block: aborted.
        Cancelled at its end: the commit goes on, and `commit_transaction()` waits for its end.
        The block may end it by itself, too; who finds it aborted by another task is told.
        Where its abort takes longer than `max_block_ms`, or is cancelled, that goes on: another
        one can begin as soon as it is done. Where the coordinator has refused the epoch that this
        one needs, its beginning asks again, for at most `max_block_ms`.

        Raises what `begin_transaction` and `commit_transaction` raise. What the block raises goes
        on, with a note where it could not be aborted (then the broker does it, after
        `transaction_timeout_ms`).
        """
        return Transaction(self)

    async def begin_transaction(self) -> None:
        """Open a transaction: what is sent from now on belongs to it. Never waits.

        Raises IllegalStateError (one is open, the end of the last one is not known, or that has
        got no epoch for this one: `abort_transaction()` asks again), ProducerStateError. After a
        fatal error that very error: ProducerFenced, AuthorizationError, AuthenticationError,
        UnsupportedVersionError, BrokerError or another KafkaError. The message of what is not
        allowed names the call and the state.
        """
        self._begin()

    def _begin(self, on_abort: Callable[[], None] | None = None) -> int:
        """Returns the transaction's number. `on_abort` is called by who asks for its abort."""
        transactions = self._transactional(BEGIN)
        transactions.begin(on_abort)
        return transactions.number

    async def commit_transaction(self) -> None:
        """Commit the open transaction, when all its records are acknowledged.

        No record is taken any more, nothing lingers. Waits at most `max_block_ms`. When that is
        over, or cancelled: it goes on, and the same call again waits for its end; until that is
        known, no other call of a transaction is allowed, but `close()` is.

        Raises TransactionAborted (some record failed: `abort_transaction()` is what is left),
        TransactionTimeout, IllegalStateError, ProducerStateError. ProducerFenced or another fatal
        error, also one that comes meanwhile: see `begin_transaction`.
        """
        await self._transactional(COMMIT).commit()

    async def abort_transaction(self) -> None:
        """Abort the open transaction. What is not sent yet is dropped, with AbortedError.

        Waits at most `max_block_ms` for what is on its way, and for the coordinator. Afterwards
        another one can begin. When the time is over, or cancelled: as `commit_transaction`.

        Raises TransactionAborted (it is aborted, but the coordinator has refused the epoch that the
        next one needs: the same call asks again, after `retry_backoff_ms`), KafkaError (so it is
        after one that was committed), TransactionTimeout, IllegalStateError, ProducerStateError.
        ProducerFenced or another fatal error, also one that comes meanwhile:
        see `begin_transaction`.
        """
        await self._transactional(ABORT).abort()

    async def send_offsets(
        self,
        offsets: Mapping[Any, Any] | Iterable[Any],
        group: str | bytes | ConsumerGroupMetadata | Any,
    ) -> None:
        """Commit a consumer group's offsets together with the transaction's records.

        `offsets`: from TopicPartition (ours, aiokafka's, or a plain pair) to the offset of the
        next record to read, as an int or OffsetAndMetadata; or confluent-kafka's list of
        TopicPartition. None at all does nothing.
        `group`: the group's id; or with its membership, so that the group fences a consumer that
        it has given up: ConsumerGroupMetadata, anything with its fields, or what
        `consumer_group_metadata()` of confluent-kafka returns.

        Waits at most `max_block_ms`. When that is over, or cancelled: it goes on, a commit waits
        for it, and the same call again waits for its end. If it fails, the transaction can only
        be aborted; arguments that are refused (TypeError, ValueError) change nothing.

        Raises TypeError, ValueError, TransactionAborted (its `code` says why), TransactionTimeout,
        IllegalStateError, ProducerStateError. ProducerFenced or another fatal error, also one that
        comes meanwhile: see `begin_transaction`.
        """
        transactions = self._transactional(SEND_OFFSETS)
        await transactions.send_offsets(offset_map(offsets), group_metadata(group))

    def _transactional(self, call: str) -> Transactions:
        self._check_usable(call)
        if self._transactions is None:
            raise IllegalStateError(
                f"{call}(): this producer has no transactions: give it a transactional_id"
            )
        return self._transactions

    def _lacks_epoch(self) -> bool:
        """Whether no other transaction can begin before an abort has asked for an epoch."""
        is_running = self._state is State.RUNNING
        return is_running and self._transactions is not None and self._transactions.lacks_epoch

    def _is_unfinished(self, number: int) -> bool:
        """Whether the transaction of this number has no end yet, or will never have one."""
        return self._transactions is not None and self._transactions.is_unfinished(number)

    def _leave_abort(self) -> None:
        """Nobody asks again for an abort that has no end yet."""
        if self._transactions is not None:
            self._transactions.leave_abort()

    def _lost(self, error: BaseException) -> None:
        """A record will not be buffered: no transaction is committed without it."""
        if self._transactions is not None:
            self._transactions.refused(error)

    def _on_refused(self, topic: str) -> None:
        """A record was refused before it was buffered: no step tells the metrics the time."""
        self._metrics.tick(self._loop_time())
        self._metrics.record_refused(topic)

    # -- news from the cluster --------------------------------------------------------------

    def _on_metadata(self, change: MetadataChange) -> None:
        now = self._loop_time()
        accumulator = self._accumulator
        for name in change.topics:
            view = self._metadata.topic(name)
            if view is None:
                accumulator.remove_topic(name, now)
            elif name in accumulator.topics:
                accumulator.update_topic(view, now)
        if self._intake is not None:
            self._intake.serve_lines()
        self._on_change()

    def _future(self) -> asyncio.Future[Any]:
        if self._loop is None:
            raise ProducerNotStarted("the producer is not started")
        return self._loop.create_future()

    def _on_producer_id(self) -> None:
        """There is one, or there will never be one."""
        error = self._scheduler.fatal_error
        if error is not None and self._intake is not None:
            self._intake.close(error)
            self._pool.close(error)
        self._wake_watchers()

    def _on_change(self) -> None:
        if self._intake is not None and self._cluster.fatal_error is not None:
            # Who waits for metadata waits in vain.
            self._intake.serve_lines()
        self._wake_watchers()
        self._scheduler.wake()

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait until something that the cluster tells makes `condition` true."""
        while not condition():
            if self._state is not State.RUNNING:
                raise ProducerClosed(f"the producer was closed while waiting for {what}")
            if self._scheduler.fatal_error is not None:
                raise again(self._scheduler.fatal_error)
            watcher = self._future()
            self._watchers.append(watcher)
            try:
                async with asyncio.timeout_at(deadline):
                    await watcher
            except TimeoutError:
                raise MetadataTimeout(
                    f"{what}: not within {round(self._max_block * 1000)} ms (max_block_ms)"
                ) from self._cluster.fatal_error
            finally:
                # Still there if it was not woken: too late, or cancelled.
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

    # -- checks ----------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._forked:
            raise ForkError(
                f"this producer was started in process {self._pid} and the process was forked "
                "since: make a new Producer in the child"
            )

    def _check_usable(self, call: str) -> None:
        """Say why the producer cannot be used here and now, for a call of this name."""
        self._check_process()
        if self._state is State.CREATED:
            raise ProducerNotStarted(
                f"{call}(): the producer is not started: use `async with Producer(...)`, "
                "or `await producer.start()` first"
            )
        if self._state is State.STARTING:
            raise ProducerNotStarted(
                f"{call}(): the producer is not started, its start() is STARTING it: wait for that"
            )
        if self._state in (State.CLOSING, State.CLOSED):
            raise ProducerClosed(f"{call}(): the producer is closed")
        if running_loop() is not self._loop:
            raise WrongLoopError(
                f"{call}(): this producer belongs to another event loop: make one producer per "
                "loop, or use producer.portal() from other threads"
            )
        if self._scheduler.fatal_error is not None:
            if self._transactions is not None and call in CALLS:
                self._transactions.check(call)  # the same error, which says more
            raise again(self._scheduler.fatal_error)

    def _check_sendable(self) -> None:
        """Say why no record can be sent here and now."""
        self._check_usable(SEND)
        if self._transactions is not None:
            self._transactions.check(SEND)

    # -- everything else -------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Send what is buffered now without lingering, and wait until it has its end.

        Records that are sent meanwhile are not waited for. Failed records do not fail the
        flush: their deliveries tell. Cancelled, or TimeoutError after `timeout` seconds:
        the records go on. Without `timeout` it ends when `delivery_timeout_ms` is over.

        Raises TimeoutError, ValueError (a negative timeout), ProducerStateError; after a fatal
        error that very one, as ProducerFenced: see `send`.
        """
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout={timeout}: a flush cannot take less than 0 seconds")
        self._check_usable("flush")
        passed = self._future()
        fence = Fence(lambda: None if passed.done() else passed.set_result(None))
        now = self._loop_time()
        accumulator = self._accumulator
        accumulator.begin_flush(fence, now)
        try:
            if not fence.remaining:
                return
            self._scheduler.step(now)
            async with asyncio.timeout(timeout):
                await passed
        except TimeoutError:
            raise TimeoutError(
                f"{fence.remaining} batches were not acknowledged within {timeout} s; "
                "they are still on their way"
            ) from None
        finally:
            accumulator.end_flush()
            self._metrics.flushed(self._loop_time() - now)

    async def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The partitions of a topic and their leaders, waiting for metadata if need be.

        Waits at most `max_block_ms`. Cancelled: only this wait ends. Raises MetadataTimeout,
        InvalidTopic, AuthorizationError, ProducerStateError (also if closed meanwhile),
        AuthenticationError (see `send`); a fatal error, also one that comes meanwhile, as
        ProducerFenced: see `send`.
        """
        intake = self._usable_intake("partitions_for")
        check_topic(topic)
        view = await self._view(intake, topic, self._loop_time() + self._max_block)
        topic_id = None if view.topic_id is None else UUID(bytes=view.topic_id)
        return tuple(
            PartitionInfo(topic, p.partition, p.leader, p.leader_epoch, topic_id)
            for p in view.partitions
        )

    async def _topic_id(self, topic: str) -> UUID | None:
        """Asked anew, whatever is known: another one where the topic was made again.

        Waits and raises as `partitions_for`, but creates no topic: one that is not there within
        some seconds is a MetadataTimeout.
        """
        self._usable_intake("partitions_for")
        check_topic(topic)
        deadline = self._loop_time() + self._max_block
        request = MetadataRequest([topic], allow_auto_topic_creation=False)
        unknown_until = -1.0
        while True:
            answer = await self._cluster.request(request, deadline=deadline)
            found = next((each for each in answer.topics if each.name == topic), None)
            if found is not None and not found.error_code:
                return None if found.topic_id is None else UUID(bytes=found.topic_id)
            if found is None or found.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                return (await self.partitions_for(topic))[0].topic_id
            # It may be that new that not all brokers know it.
            now = self._loop_time()
            if unknown_until < 0:
                unknown_until = min(deadline, now + _TOPIC_ID_S)
            if now + _TOPIC_ID_AGAIN_S >= unknown_until:
                raise MetadataTimeout(f"there is no topic {topic!r}")
            await asyncio.sleep(_TOPIC_ID_AGAIN_S)

    async def committed_offsets(
        self, group_id: str, partitions: Iterable[Any]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a consumer group has committed: where it goes on, with the metadata kept there.

        `partitions` are TopicPartitions (ours, another library's, or plain pairs). Those for
        which the group has nothing are not in the result. Offsets of a transaction that has no
        end yet are waited for (KIP-447): the answer is what counts, not what may come to count.
        So after `start()` of a transactional producer this is what earlier producers with its
        `transactional_id` have committed, and none of them can add to it.

        Waits at most `max_block_ms`. Cancelled: only this wait ends. Raises TypeError, ValueError,
        RequestTimedOut, AuthorizationError, BrokerError, UnsupportedVersionError (brokers before
        2.5), ProducerStateError (also if closed meanwhile), AuthenticationError and ConfigError
        (see `send`); after a fatal error that very one, as ProducerFenced: see `send`.
        """
        self._check_usable("committed_offsets")
        places = [place(each) for each in partitions]
        group = group_metadata(group_id).group_id
        if not places:
            return {}
        now = self._loop_time()
        return await committed_offsets(
            self._cluster,
            group,
            places,
            config=self._config,
            deadline=now + self._max_block,
            coordinators={} if self._transactions is None else self._transactions.coordinators,
        )

    def _usable_intake(self, call: str) -> Intake:
        self._check_usable(call)
        if self._intake is None:
            raise ProducerNotStarted(f"{call}(): the producer is not started")
        return self._intake

    async def _view(self, intake: Intake, topic: str, deadline: float) -> TopicMetadata:
        pending = Pending(intake, topic, None, 0, None, None, NO_HEADERS, deadline)
        self._cluster.add_topic(topic)
        began = self._loop_time()
        stale = -1
        if self._metadata.topic_error(topic):
            # What was wrong with it may have been mended since.
            stale = self._metadata.version
            self._cluster.request_update_for_topic(topic)

        def known() -> bool:
            self._cluster.add_topic(topic)  # it is in use as long as somebody waits
            return self._metadata.version != stale and intake.ready(pending)

        try:
            await self._until(known, deadline, f"topic {topic!r}")
        except MetadataTimeout:
            error = intake.metadata_timeout(pending)
            raise error from error.__cause__
        view = self._metadata.topic(topic)
        if view is None:
            raise IllegalStateError(f"topic {topic!r} vanished in the moment it appeared")
        self._metrics.metadata_waited(self._loop_time() - began)
        return view

    async def warm_up(self, *topics: str) -> None:
        """Fetch what the first records to `topics` would have to wait for.

        Their metadata, connections to the leaders of their partitions, and the producer id.
        Waits at most `max_block_ms`. Cancelled: what is fetched already stays. Raises
        MetadataTimeout, InvalidTopic, AuthorizationError, ProducerStateError (also if closed
        meanwhile), AuthenticationError (see `send`); a fatal error, also one that comes meanwhile,
        as ProducerFenced: see `send`.
        """
        intake = self._usable_intake("warm_up")
        deadline = self._loop_time() + self._max_block
        for topic in topics:
            check_topic(topic)
        for topic in topics:
            view = await self._view(intake, topic, deadline)
            if topic not in self._accumulator.topics:
                self._accumulator.update_topic(view, self._loop_time())
            await self._until(
                partial(self._reaches_leaders, topic),
                deadline,
                f"connections to the leaders of {topic!r}",
            )
        if self._sequences is not None:
            sequences = self._sequences
            await self._until(
                lambda: not sequences.needs_id and sequences.producer_id >= 0,
                deadline,
                "a producer id",
            )

    def _reaches_leaders(self, topic: str) -> bool:
        view = self._metadata.topic(topic)  # they may change while they are waited for
        return view is not None and all(
            self._cluster.connection(leader) is not None
            for leader in {p.leader for p in view.partitions if p.leader >= 0}
        )

    def metrics(self) -> dict[str, float]:
        """A snapshot of the producer's metrics, by Java's names in snake_case.

        Cheap; callable in every state. Per-topic and per-node metrics have their tag behind
        a colon: `record_send_total:topic=orders`. All of them are in docs/metrics.md.
        """
        from asyncproducer import __version__  # above, it would import this module again

        now = 0.0
        gauges = dict.fromkeys(GAUGES, 0.0)
        gauges["buffer_total_bytes"] = gauges["buffer_available_bytes"] = self._config.buffer_memory
        if self._loop is not None:
            now = self._loop_time()
            gauges["buffer_available_bytes"] = self._pool.available
            gauges["waiting_threads"] = self._pool.waiting
            gauges["requests_in_flight"] = self._cluster.in_flight
            gauges["metadata_age"] = self._metadata.age(now)
        gauges["start_time_ms"] = self._made_at_ms
        gauges[f"{APP_INFO}:version={__version__}"] = 1.0
        return self._metrics.snapshot(now, gauges)

    @property
    def health(self) -> Health:
        """How the producer is now, for readiness probes. Never waits, never raises."""
        if self._loop is None:
            return Health(False, self._state.value, "not started", 0, 0, 0, 0, 0, 0.0)
        problem: str | None = None
        if self._forked:
            problem = "the process was forked"
        elif self._loop.is_closed():
            problem = "the event loop of the producer is closed"
        elif self._scheduler.fatal_error is not None:
            problem = str(self._scheduler.fatal_error)
        elif self._cluster.fatal_error is not None:
            problem = str(self._cluster.fatal_error)
        elif self._scheduler.id_error is not None:
            problem = f"there is no producer id yet: {self._scheduler.id_error}"
        elif self._state is not State.RUNNING:
            problem = f"the producer is {self._state.value}"
        elif self._cluster.connected == 0 and self._cluster.last_error is not None:
            # Without an error, nobody has needed a connection yet, or for long.
            problem = f"no broker is connected: {self._cluster.last_error}"
        oldest = next(iter(self._accumulator.incomplete), None)
        return Health(
            ready=problem is None,
            state=self._state.value,
            problem=problem,
            brokers_known=len(self._metadata.nodes),
            brokers_connected=self._cluster.connected,
            buffered_bytes=self._pool.reserved,
            waiting_senders=self._pool.waiting
            + (0 if self._intake is None else self._intake.waiting),
            incomplete_batches=len(self._accumulator.incomplete),
            oldest_batch_age=0.0 if oldest is None else self._loop_time() - oldest.created_at,
        )

    def portal(self) -> Portal[K, V]:
        """A handle through which other threads can use this producer.

        May be asked for in any thread, while the producer runs. Raises ProducerNotStarted,
        ProducerClosed, ForkError.
        """
        self._check_process()
        if self._loop is None or self._state is not State.RUNNING:
            self._check_usable("portal")
            raise ProducerNotStarted("portal(): the producer is not started")
        return Portal(self, self._loop)


update_wrapper(Front.send, Producer.send)
update_wrapper(Front.enqueue, Producer.enqueue)
if IMPLEMENTATION == "compiled":
    # What is inherited does the same without a frame.
    delattr(Producer, "send")
    delattr(Producer, "enqueue")
_ENQUEUE = Producer.enqueue
