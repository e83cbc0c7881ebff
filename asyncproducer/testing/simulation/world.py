"""Runs a plan: the real producer on virtual time, in front of an embedded cluster.

The same plan gives the same history, to the last byte on the wire: the clock is virtual,
the network is in memory, what the producer asks of `random` comes from the plan's seed,
and nothing waits for a thread. `Result.trace` is a digest of all that happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import logging
import random
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from asyncproducer.core.delivery import Delivery
from asyncproducer.core.transactions import TransactionState
from asyncproducer.errors import (
    BufferTimeout,
    DeliveryError,
    KafkaError,
    TransactionAborted,
    TransactionTimeout,
)
from asyncproducer.plugins import TopicView
from asyncproducer.producer import Producer
from asyncproducer.records import Record, RecordMetadata
from asyncproducer.testing.batches import BatchError, BatchHeader, StoredRecord
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.clock import DeadlockError, VirtualTimeLoop
from asyncproducer.testing.faults import BatchSummary, Fault, ReceivedRequest
from asyncproducer.testing.network import Direction, MemoryLink, MemoryNetwork, MemoryServer
from asyncproducer.testing.simulation.making import RETRIABLE
from asyncproducer.testing.simulation.model import (
    Ended,
    History,
    Sent,
    Transaction,
    Violation,
    check,
    headers_of,
)
from asyncproducer.testing.simulation.plan import (
    GROUP,
    OWN_PARTITIONER,
    PATIENT_MS,
    TRANSACTIONAL_ID,
    Plan,
    PlannedRecord,
    Step,
    Trouble,
)
from asyncproducer.testing.simulation.serializers import Serializers
from asyncproducer.testing.state import CoordinatorKind, RequestRefused

__all__ = ["Result", "run"]

#: Virtual seconds after which something must be wrong that keeps the loop busy for ever.
_LIMIT = 1000.0
#: And turns of the loop, of which most histories need less than a thousand: so many, and so
#: many more for each virtual second. Metadata that is fetched every few ms, a byte a turn, takes
#: tens of thousands a second, for as long as somebody waits for a partition that is not there.
_MOST_TURNS, _TURNS_A_SECOND = 300_000, 100_000
#: The brokers' clock at the start, ms since 1970: records have timestamps near it.
_EPOCH_MS = 1_700_000_000_000
#: A peaceful close may take so long to write what a connection has accepted (CLOSE_GRACE).
_CLOSE_GRACE = 1.0
#: Turns of the loop in which users hear of what the end of the producer meant for them.
_LAST_TURNS = 10

#: Kafka's default of max.message.bytes.
_USUAL_BYTES = 1_048_588
#: What tasks of the brokers run that have no name.
_BROKERS_OWN = ("Fault.released", "sleep")

#: What the offsets of transactions are of: each transaction has a partition, and its number is
#: the offset.
_INPUT = "input"
#: How often a call whose end is not known is made again, and how soon.
_ASKED, _PAUSE = 1000, 0.01
#: A transaction may take so long where nothing is wrong.
_LONG_MS = 10_000
#: The partitioner that is a user's own raises for each so many records.
_UNPLACED = 8
#: For how long somebody who transacts does nothing, at most: two serializers and a pause.
_LONGEST_PAUSE = 0.4
#: The versions of InitProducerId in which a producer could not ask for its next epoch.
_INIT_PRODUCER_ID, _NO_BUMPS = 22, (0, 2)

#: Logged when nobody asks a failed delivery, as after a cancelled `send`: it must be.
_NOBODY_LOOKED = "nobody looked at the result"


class _UserError(Exception):
    """What a block raises that fails."""


class _Unplaced(Exception):
    """What the partitioner raises that is a user's own."""


class _Slow:
    """An iterator that waits before each of its records.

    No async generator: those that are not used up are closed whenever they are collected.
    """

    def __init__(self, records: Iterator[Record], gap: float) -> None:
        self._records = records
        self._gap = gap

    def __aiter__(self) -> AsyncIterator[Record]:
        return self

    async def __anext__(self) -> Record:
        await asyncio.sleep(self._gap)
        record = next(self._records, None)
        if record is None:
            raise StopAsyncIteration
        return record


class Result(NamedTuple):
    """What became of a plan."""

    violations: list[Violation]
    counters: Counter[str]
    #: A digest of every request, answer and outcome, with their times.
    trace: str


def run(plan: Plan, *, log_level: int | None = None) -> Result:
    """Runs the plan, and checks what was seen. Uses and seeds the module `random`.

    What the package logs goes nowhere, unless there is a `log_level`.
    """
    random.seed(plan.seed)
    world = _World(plan)
    collecting = gc.isenabled()
    # What reference cycles hold must not end at times that depend on other histories.
    gc.disable()
    try:
        with _errors_logged(log_level) as errors, warnings.catch_warnings():
            # What a broken producer leaves open is told by its own violations.
            warnings.simplefilter("ignore", ResourceWarning)
            world.live()
            world.forget()
            # All that was made since `disable` is of the youngest generation, and nothing else.
            gc.collect(0)
    finally:
        if collecting:
            gc.enable()
    history = world.history
    history.found += [Violation("logged", text) for text in errors]
    violations = check(history)
    for sent in history.sent:
        world.trace(sent)
    return Result(violations, history.counters, world.digest.hexdigest())


class _Handler(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()  # also of a warning, which must be well-formed
        if record.levelno >= logging.ERROR and _NOBODY_LOOKED not in text:
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {record.exc_info[1]!r}"
            self._errors.append(text)


@contextlib.contextmanager
def _errors_logged(log_level: int | None) -> Iterator[list[str]]:
    """What the package logs as an error, though it should not."""
    errors: list[str] = []
    handler = _Handler(errors)
    logger = logging.getLogger("asyncproducer")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if log_level is None else log_level)
    logger.propagate = log_level is not None
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Loop(VirtualTimeLoop):
    """Ends what turns for ever, with or without moving its time."""

    def __init__(self) -> None:
        super().__init__(limit=_LIMIT)
        self._turns = 0

    def _run_once(self) -> None:
        self._turns += 1
        if self._turns >= _MOST_TURNS + _TURNS_A_SECOND * self.time():
            what = self._report(f"the loop has turned {self._turns} times")
            self._turns = 0  # the end of its tasks takes some, too
            raise DeadlockError(what)
        super()._run_once()  # type: ignore[misc]  # asyncio's own, in no stub


class _Network(MemoryNetwork):
    """Keeps its servers, and the links in the order in which brokers number them."""

    def __init__(self, latency: float, window: int | None) -> None:
        if window is None:
            super().__init__(latency=latency)
        else:
            super().__init__(latency=latency, window=window)
        self.on_link = self._linked
        self.made: list[MemoryLink] = []
        self.servers: dict[int, MemoryServer] = {}

    def listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> MemoryServer:
        server = super().listen(host, port, protocol_factory)
        self.servers[server.address.port] = server
        return server

    def _linked(self, link: MemoryLink) -> None:
        self.made.append(link)


class _World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.history = History(
            plan.options,
            # Without a group's coordinator, only offsets wait.
            calm=all(trouble.arguments.get("kind") == "group" for trouble in plan.troubles)
            and plan.options.get("transaction_timeout_ms", _LONG_MS) >= _LONG_MS
            and not {"window", "max_message_bytes", "compressing"} & plan.cluster.keys()
            # Batches wait for the markers of the transaction before by being sent again.
            and not ("marker_delay_ms" in plan.cluster and "retries" in plan.options),
        )
        self.history.mendable = _is_mendable(plan)
        self.count = self.history.counters
        self.digest = hashlib.blake2b(digest_size=12)
        self.network = _Network(plan.cluster["latency"], plan.cluster.get("window"))
        self.transactional = "transactional_id" in plan.options
        version = plan.cluster.get("produce_version")
        versions: dict[int, tuple[int, int] | None] = {}
        if version is not None:
            versions[0] = (0, version)
        if not plan.cluster.get("bumps_epochs", True):
            versions[_INIT_PRODUCER_ID] = _NO_BUMPS
        transactions = sum(step.action == "transaction" for step in plan.steps)
        topics = plan.cluster["topics"]
        self.cluster = EmbeddedCluster(
            plan.cluster["brokers"],
            topics={**topics, _INPUT: transactions} if transactions else topics,
            network=self.network,
            auto_create_topics=False,
            request_versions=versions,
            finalized_features={"transaction.version": plan.cluster.get("transaction_version", 2)},
            marker_delay_ms=plan.cluster.get("marker_delay_ms", 0),
            message_timestamp_type="LogAppendTime"
            if plan.cluster.get("log_append_time")
            else "CreateTime",
            max_message_bytes=plan.cluster.get("max_message_bytes", _USUAL_BYTES),
            validate_records=False,
            start_time_ms=_EPOCH_MS,
        )
        self.producer: Producer[Any, Any]
        self.serializers = Serializers(
            plan.cluster.get("serializers", {}), self._serialized, self._unserialized
        )
        self.by_number: dict[int, Sent] = {}
        self.tasks: dict[asyncio.Task[None], str] = {}
        self.troubles: list[asyncio.Task[None]] = []
        self.faults: list[Fault] = []
        self.deliveries: list[tuple[Sent, Delivery]] = []
        #: Those whose turn has not come, and the one that is open.
        self.transactions: list[Step] = []
        self.transacting = False
        #: Whether its start is over.
        self.started = False
        #: Whether all is over for it, and nothing may go wrong any more.
        self.settling = False
        self.ticks = 0
        self.last_step = max((step.at for step in plan.steps), default=0.0) + 0.001
        #: Identities of the batches that topics had which were deleted.
        self.deleted: set[tuple[Any, ...]] = set()
        #: Identity of a batch -> its size: it is sent again as it was.
        self.batches: dict[tuple[Any, ...], tuple[int, int]] = {}

    def trace(self, *what: object) -> None:
        self.digest.update(repr(what).encode())

    def found(self, rule: str, what: str) -> None:
        self.history.found.append(Violation(rule, what))

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    # -- life ------------------------------------------------------------------------------

    def live(self) -> None:
        runner = asyncio.Runner(loop_factory=_Loop, debug=False)
        try:
            self.loop = runner.get_loop()
            self.loop.set_exception_handler(self._unhandled)
            runner.run(self._main())
        except DeadlockError as error:
            self.found("hang", str(error))
        except Exception as error:
            self.found("raised", f"the producer raised {error!r}")
        finally:
            # In a busy loop it cannot be closed in peace.
            with contextlib.suppress(DeadlockError):
                runner.close()

    def forget(self) -> None:
        """Lets go of everything that ran: only what was seen is kept."""
        for name in ("producer", "loop", "cluster", "network", "tasks", "troubles", "deliveries"):
            vars(self).pop(name, None)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.found("unhandled", f"{context['message']}: {error!r}")

    async def _main(self) -> None:
        plan, loop = self.plan, self.loop
        if plan.cluster.get("log_append_time"):
            self.count["log append time"] = 1
        await self.cluster.start()
        # The first rule of all: it sees each request, and applies to none.
        self.cluster.inject("produce", times=None, when=self._watch)
        start = loop.time()
        for trouble in plan.troubles:
            act = getattr(self, f"_{trouble.kind}")
            loop.call_at(start + trouble.at, self._trouble, act, trouble.arguments)
        options = dict(plan.options)
        if options.get("partitioner") == OWN_PARTITIONER:
            options["partitioner"] = self._place
        self.producer = Producer(
            self.cluster.bootstrap_servers,
            connector=self.network,
            client_id="simulated",
            **options,
            **self.serializers.options(),
        )
        try:
            await self.producer.start()
        except KafkaError as error:
            self.count[f"start failed: {type(error).__name__}"] += 1
        else:
            self.started = True
            self.producer._scheduler._in_thread = self._in_thread
            if self.producer._intake is not None and "turn_bytes" in plan.cluster:
                self.producer._intake.turn_bytes = plan.cluster["turn_bytes"]
            if "quick_bytes" in plan.cluster:
                accumulator = self.producer._accumulator
                accumulator.quick_bytes = plan.cluster["quick_bytes"]
                accumulator.turned(loop.time())
            start = loop.time()
            for step in plan.steps:
                loop.call_at(start + step.at, self._begin, step)
            await self._users_done(plan.close_at)
            with contextlib.suppress(asyncio.CancelledError):
                await self._close(plan.close_timeout)
            await self._look_behind()
        await self._settle()
        self._read_logs()
        self._count()

    async def _users_done(self, close_at: float | None) -> None:
        if close_at is not None:
            await asyncio.sleep(close_at)
            return
        await asyncio.sleep(self.last_step)
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=2 * PATIENT_MS / 1000)

    async def _in_thread(self, function: Callable[[], bytes]) -> bytes:
        """Instead of a thread, which would end whenever it likes."""
        await asyncio.sleep(self.plan.cluster.get("compressing", 0.0))
        return function()

    async def _look_behind(self) -> None:
        """What a closed producer must not leave."""
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)
        tasks = dict(self.tasks)
        # Its user may be in a pause, and so may an iterator or a serializer.
        slow = "serializers" in self.plan.cluster or any(step.gap for step in self.plan.steps)
        if self.transacting or slow:
            await asyncio.sleep(_LONGEST_PAUSE)
        for task, what in tasks.items():
            if not task.done():
                self.found("stuck", f"{what} waits on after the producer was closed")
        ours = {asyncio.current_task(), *self.tasks, *self.troubles}
        left = [
            task.get_name()
            for task in asyncio.all_tasks()
            if task not in ours
            and not task.get_name().startswith("broker-")
            and getattr(task.get_coro(), "__qualname__", "") not in _BROKERS_OWN
        ]
        if left:
            self.found("leak", f"tasks run after the producer was closed: {sorted(left)}")
        for sent, delivery in self.deliveries:
            if delivery.done():
                again = dataclasses.replace(sent)
                self._tell(again, delivery)
                again.ended_at = sent.ended_at
                if again != sent:
                    self.found("ends", f"{sent}: first {sent!r}, then {again!r}")
        pool = self.producer._pool
        if (pool.available, pool.held, pool.waiting) != (pool.total, 0, 0):
            self.found("memory", f"after the producer was closed: {pool.statistics()}")
        if self.producer._accumulator.incomplete:
            self.found("memory", "batches without an end after the producer was closed")
        for sent in self.history.sent:
            self.trace(sent.record.number, sent.outcome, sent.ended_at)

    async def _settle(self) -> None:
        """What is on its way to the brokers still arrives: it may be in the log, too."""
        # Steps that come too late meet a closed producer.
        await asyncio.sleep(self.last_step)
        self.settling = True
        for task in self.tasks:
            task.cancel()
        for task in self.troubles:
            task.cancel()
        await asyncio.wait([*self.tasks, *self.troubles, self.loop.create_task(asyncio.sleep(0))])
        self.cluster.clear_faults()
        for node in self.cluster.node_ids:
            self.cluster.resume(node)
            if self.transactional:
                await self.cluster.start_broker(node)
        for link in list(self.network.links):
            link.to_server.resume()
            link.to_client.resume()
        # Twice a latency, and the longest delay that a fault holds an answer back.
        await asyncio.sleep(2.0)
        if self.transactional:
            for topic, partitions in self.plan.cluster["topics"].items():
                for index in range(partitions):
                    if self.cluster.leader(topic, index) == -1:
                        self.cluster.move_leader(topic, index, self.cluster.node_ids[0])
            # What the producer could not end, its coordinator does.
            await asyncio.sleep(self.plan.options.get("transaction_timeout_ms", 0) / 1000 + 1.0)
        await self.cluster.close()

    def _read_logs(self) -> None:
        for topic in self.plan.cluster["topics"]:
            self.history.logs |= self._logs(topic)
            if self.transactional:
                for index in range(self.plan.cluster["topics"][topic]):
                    self._read_committed(topic, index)

    def _logs(self, topic: str) -> dict[tuple[str, int], list[StoredRecord]]:
        logs = {}
        for index in range(self.plan.cluster["topics"][topic]):
            try:
                records = self.cluster.records(topic, index)
            except BatchError as error:
                self.found("altered", f"{topic}-{index} cannot be read: {error}")
                records = []
            logs[topic, index] = records
            self.trace(topic, index, [(r.offset, r.value, r.sequence) for r in records])
        return logs

    def _read_committed(self, topic: str, index: int) -> None:
        committed = self.cluster.records(topic, index, committed=True)
        self.history.committed[topic, index] = committed
        end = self.cluster.end_offset(topic, index)
        stable = self.cluster.last_stable_offset(topic, index)
        if stable < end:
            self.found("hanging", f"{topic}-{index} is readable up to {stable} of {end}, for ever")
        for (_, partition), committed_offset in self.cluster.committed_offsets(GROUP).items():
            self.history.offsets[partition + 1] = committed_offset.offset
        self.trace([record.offset for record in committed], sorted(self.history.offsets.items()))

    # -- what a user does ------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        what = step.action
        if step.action == "transaction":
            self.transactions.append(step)
            if not self.transacting:
                self.transacting = True
                self._start(self._transact(), "transactions")
            return
        if step.records:
            what += f" of {[record.number for record in step.records]}"
        self._cancel_as_planned(self._start(self._act(step, what), what), step)

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = self.loop.create_task(work, name=what)
        self.tasks[task] = what
        return task

    def _cancel_as_planned(self, task: asyncio.Task[None], step: Step) -> None:
        if step.cancel_after is not None:
            self.loop.call_later(step.cancel_after, self._cancel, task)
        elif step.cancel_turns is not None:
            self._cancel_in(task, step.cancel_turns)

    def _cancel_in(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            self.loop.call_soon(self._cancel_in, task, turns - 1)
        else:
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if task.cancel():
            self.count["cancelled calls"] += 1

    async def _act(self, step: Step, what: str) -> None:
        try:
            if step.action == "flush":
                await self._flush(step.timeout)
            elif step.action == "close":
                await self._close(step.timeout)
            elif step.action == "warm_up":
                await self._warm_up()
            elif step.action == "send_many":
                await self._send_many(step)
            else:
                await self._send(step)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.found("raised", f"{what} raised {error!r}")

    def _place(self, topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        """A user's own partitioner."""
        data = key or value or b""
        number = int((value or b"0:").partition(b":")[0])
        if number % _UNPLACED == 0:
            self.history.spoiled[number] = "InvalidPartition"
            raise _Unplaced
        return sum(data) % topic.partition_count

    def _called(self, record: PlannedRecord, stream: int | None = None) -> Sent:
        now = self.loop.time()
        sent = Sent(record, now, self.tick(), stream=stream)
        manager = self.producer._transactions and self.producer._transactions._manager
        if manager and manager.state is TransactionState.IN_TRANSACTION:
            sent.transaction = manager.number
        sent.timestamp = _EPOCH_MS + round(now * 1000)
        self.history.sent.append(sent)
        self.by_number[record.number] = sent
        return sent

    def _serialized(self, number: int) -> None:
        """Only now the record comes in: who is slow is overtaken, and its time begins."""
        sent = self.by_number[number]
        sent.called, sent.called_at = self.tick(), self.loop.time()

    def _unserialized(self, number: int) -> None:
        self._serialized(number)
        self.history.spoiled[number] = "SerializationError"

    async def _send(self, step: Step) -> None:
        record = step.records[0]
        sent = self._called(record)
        producer = self.producer
        value = self.serializers.value(record)
        fields: dict[str, Any] = {
            "key": self.serializers.key(record),
            "partition": record.partition,
            "timestamp": sent.timestamp,
            "headers": headers_of(record) or None,
        }
        delivery = None
        try:
            if step.action == "send":
                self._acknowledged(sent, await producer.send(record.topic, value, **fields))
                return
            if step.action == "enqueue":
                delivery = await producer.enqueue(record.topic, value, **fields)
            else:
                delivery = producer.send_nowait(record.topic, value, **fields)
        except asyncio.CancelledError:
            sent.outcome = "cancelled"
            raise
        except (KafkaError, _Unplaced) as error:
            self._failed(sent, error)
            return
        sent.entered, sent.entered_at = self.tick(), self.loop.time()
        sent.partition = delivery.partition
        sent.ends = 0
        self.deliveries.append((sent, delivery))
        delivery.add_done_callback(partial(self._delivered, sent))
        if step.waits:
            try:
                await delivery
            except DeliveryError:
                if not sent.ends:
                    self.found("ends", f"{sent} failed before its callbacks were called")

    def _delivered(self, sent: Sent, delivery: Delivery) -> None:
        sent.ends = (sent.ends or 0) + 1
        self._tell(sent, delivery)

    def _tell(self, sent: Sent, delivery: Delivery) -> None:
        try:
            self._acknowledged(sent, delivery.result())
        except DeliveryError as error:
            self._failed(sent, error)

    async def _send_many(self, step: Step) -> None:
        stream = self.tick()
        all_sent: list[Sent] = []
        transactions = self.producer._transactions
        began_in = 0 if transactions is None else transactions.number

        def records() -> Iterator[Record]:
            nonlocal began_in
            for planned in step.records:
                sent = self._called(planned, stream)
                began_in = began_in or sent.transaction or 0
                if sent.transaction != began_in:
                    sent.transaction = None  # it is of one that has ended
                all_sent.append(sent)
                yield Record(
                    planned.topic,
                    self.serializers.value(planned),
                    self.serializers.key(planned),
                    headers_of(planned),
                    planned.partition,
                    sent.timestamp,
                )

        try:
            result = await self.producer.send_many(
                None, _Slow(records(), step.gap) if step.gap else records(), raise_on_error=False
            )
        except asyncio.CancelledError:
            for sent in all_sent:
                sent.outcome = "cancelled"
            raise
        except (KafkaError, _Unplaced) as error:
            # Closed meanwhile, or its transaction has ended: what came in before that goes on,
            # and nobody is told.
            self.count[f"send_many ended by {type(error).__name__}"] += 1
            for sent in all_sent:
                sent.outcome = "cancelled"
            return
        if len(result) != len(all_sent):
            self.found("ends", f"send_many of {len(all_sent)} records told of {len(result)}")
        for sent, outcome in zip(all_sent, result, strict=False):
            if isinstance(outcome, RecordMetadata):
                self._acknowledged(sent, outcome)
            elif isinstance(outcome, KafkaError):
                self._failed(sent, outcome)
            else:
                self.found("raised", f"{sent} failed with {outcome!r}")

    def _acknowledged(self, sent: Sent, metadata: RecordMetadata) -> None:
        sent.outcome = "acknowledged"
        sent.ended_at = self.loop.time()
        sent.partition, sent.offset = metadata.partition, metadata.offset

    def _failed(self, sent: Sent, error: KafkaError | _Unplaced) -> None:
        sent.ended_at = self.loop.time()
        sent.error, sent.code = type(error).__name__, getattr(error, "code", None)
        if isinstance(error, DeliveryError):
            sent.outcome = "failed"
            sent.persisted = error.persisted
            sent.partition = error.partition
            str(error)
        else:
            sent.outcome = "refused"
            # In a transaction, all others were given up because of this one.
            alone = sent.stream is None and not self.transactional
            alone = alone and isinstance(error, BufferTimeout)
            sent.nobody_had_any = alone and not self.producer._pool.reserved

    async def _warm_up(self) -> None:
        began = self.loop.time()
        try:
            await self.producer.warm_up(*self.plan.cluster["topics"])
        except KafkaError:
            self.count["warm-ups refused"] += 1
        limit = self.plan.options["max_block_ms"] / 1000
        self.history.calls.append(Ended("warm_up", began, self.loop.time(), limit))

    async def _flush(self, timeout: float | None) -> None:
        began = self.loop.time()
        before = [sent for sent in self.history.sent if sent.ends == 0]
        try:
            await self.producer.flush(timeout)
        except TimeoutError:
            self.count["flushes timed out"] += 1
        except KafkaError:
            self.count["flushes refused"] += 1
        else:
            self.count["flushes"] += 1
            for sent in before:
                if not sent.ends:
                    self.found("flush", f"a flush ended before {sent}")
        limit = self.plan.options["delivery_timeout_ms"] / 1000 if timeout is None else timeout
        self.history.calls.append(Ended("flush", began, self.loop.time(), limit))

    async def _close(self, timeout: float | None) -> None:
        began = self.loop.time()
        limit = timeout
        if limit is None:
            limit = self.plan.options["delivery_timeout_ms"] / 1000 + _CLOSE_GRACE
        try:
            await self.producer.close(timeout)
        finally:
            self.history.calls.append(Ended("close", began, self.loop.time(), limit))
        self.count["closes"] += 1

    # -- transactions ----------------------------------------------------------------------

    async def _transact(self) -> None:
        """One after the other, as long as there are some."""
        try:
            while self.transactions:
                await self._transaction(self.transactions.pop(0))
        except KafkaError as error:
            # Fenced, closed, or in need of an end that nobody knows: there is no next one.
            self.count[f"transactions ended by {type(error).__name__}"] += 1
            self.transactions.clear()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.found("raised", f"a transaction raised {error!r}")
        finally:
            self.transacting = False

    def _begun(self, step: Step) -> Transaction:
        number = self.producer._transactions.number if self.producer._transactions else 0
        planned = step.transaction or 0
        transaction = Transaction(number, planned, self.loop.time())
        transaction.offsets_of = step.offsets_of or planned
        self.history.transactions.append(transaction)
        return transaction

    async def _transaction(self, step: Step) -> None:
        if step.ends in ("block", "fails"):
            await self._block(step)
            return
        if self.producer._lacks_epoch():
            await self._epoch()
        await self.producer.begin_transaction()
        transaction = self._begun(step)
        with contextlib.suppress(asyncio.CancelledError):
            await self._contents(step, transaction)
        if step.ends != "left":
            await self._ended(step, transaction, commit=step.ends == "commit")

    async def _epoch(self) -> None:
        """Asks for the epoch that was refused after the last transaction, until there is one."""
        for _ in range(_ASKED):
            self.count["epochs asked for again"] += 1
            try:
                await self.producer.abort_transaction()
                return
            except TransactionTimeout:
                await asyncio.sleep(_PAUSE)
            except KafkaError:
                if not self.producer._lacks_epoch():
                    raise

    async def _contents(self, step: Step, transaction: Transaction) -> None:
        """Records, then offsets, or first these. Raises CancelledError where the plan says so."""
        if step.offsets_first:
            await self._send_offsets(step, transaction)
        if step.records:
            await self._call(self._records(step), "records", step)
        if step.offsets and not step.offsets_first:
            await self._send_offsets(step, transaction)
        if step.pause:
            await asyncio.sleep(step.pause)

    async def _send_offsets(self, step: Step, transaction: Transaction) -> None:
        """Asks for it until it is done, or its user has something else to do."""
        for _ in range(_ASKED):
            try:
                await self._call(self._offsets(transaction), "offsets", step)
            except asyncio.CancelledError:
                return  # it goes on: the end waits for it
            except TransactionTimeout as error:
                self._timed_out("the offsets", transaction, error)
                if self.loop.time() >= transaction.began_at + 1.0:
                    return
                await asyncio.sleep(_PAUSE)
            except KafkaError:
                self.count["offsets refused"] += 1
                return
            else:
                return

    async def _call(self, work: Coroutine[Any, Any, None], which: str, step: Step) -> None:
        """Waits for it in a task of its own, which is cancelled if that is what is planned."""
        task = self._start(work, f"{which} of transaction {step.transaction}")
        if step.cancels == which:
            self._cancel_as_planned(task, step)
        await asyncio.wait([task])
        del self.tasks[task]
        task.result()

    async def _records(self, step: Step) -> None:
        if step.how == "send_many":
            await self._send_many(step)
            return
        together = step.how == "together"
        single = [
            Step(step.at, "send" if together else step.how, (record,)) for record in step.records
        ]
        if together:
            await asyncio.gather(*map(self._send, single))
        else:
            for each in single:
                await self._send(each)

    async def _offsets(self, transaction: Transaction) -> None:
        began = self.loop.time()
        place = (_INPUT, transaction.offsets_of - 1)
        transaction.offsets_asked = True
        try:
            await self.producer.send_offsets({place: transaction.offsets_of}, GROUP)
        finally:
            self._limited("send_offsets", began)

    def _timed_out(self, what: str, transaction: Transaction, error: TransactionTimeout) -> None:
        self.count["calls of transactions timed out"] += 1
        if self.plan.options["max_block_ms"] >= PATIENT_MS:
            self.found("starved", f"{what} of {transaction}: {error}")

    def _limited(self, what: str, began: float) -> None:
        limit = self.plan.options["max_block_ms"] / 1000
        self.history.calls.append(Ended(what, began, self.loop.time(), limit))

    async def _ended(self, step: Step, transaction: Transaction, *, commit: bool) -> None:
        """Asks for the end until it is known. Raises KafkaError where it never will be."""
        which = "end"
        for _ in range(_ASKED):
            try:
                await self._call(self._end(transaction, commit=commit), which, step)
            except asyncio.CancelledError:
                self.count["ends cancelled"] += 1
            except TransactionTimeout as error:
                self._timed_out("the end", transaction, error)
                await asyncio.sleep(_PAUSE)
            except TransactionAborted:
                if not commit:
                    if not self.producer._lacks_epoch():
                        raise
                    self.count["epochs asked for again"] += 1
                    await asyncio.sleep(_PAUSE)
                transaction.refused |= commit
                commit = False
            else:
                transaction.told = "committed" if commit else "aborted"
                self.count[f"transactions {transaction.told}"] += 1
                return
            which = "again"  # only the first is cancelled

    async def _end(self, transaction: Transaction, *, commit: bool) -> None:
        began = self.loop.time()
        transaction.commit_asked |= commit
        if not commit and transaction.aborting_at is None:
            transaction.aborting_at = began
        try:
            if commit:
                await self.producer.commit_transaction()
            else:
                await self.producer.abort_transaction()
        finally:
            self._limited("the end of a transaction", began)
            transaction.ended_at = self.loop.time()

    async def _block(self, step: Step) -> None:
        """`async with`. What it leaves unknown is asked for again."""
        transaction: Transaction | None = None
        ending = False

        async def block() -> None:
            nonlocal transaction, ending
            async with self.producer.transaction():
                transaction = self._begun(step)
                await self._contents(step, transaction)
                if step.ends == "fails":
                    transaction.aborting_at = self.loop.time()
                    raise _UserError
                ending = True
                transaction.commit_asked = True

        try:
            await self._call(block(), "end", step)
        except TransactionAborted:
            if transaction is not None:
                transaction.refused, transaction.told = True, "aborted"
        except (_UserError, TransactionTimeout, asyncio.CancelledError) as error:
            if transaction is None:  # not begun, or not allowed to
                if isinstance(error, TransactionTimeout):
                    raise
                return
            self.count["blocks left"] += 1
            transaction.ended_at = self.loop.time()
            if isinstance(error, _UserError) and not hasattr(error, "__notes__"):
                transaction.told = "aborted"
            elif self.producer._is_unfinished(transaction.number):
                await self._ended(step, transaction, commit=ending)
        except KafkaError:
            if transaction is not None or not self.producer._lacks_epoch():
                raise
            self.count["blocks that got no epoch"] += 1
        else:
            if transaction is not None:
                transaction.told = "committed"
        if transaction is not None and transaction.told:
            self.count[f"transactions {transaction.told}"] += 1

    # -- what goes wrong -------------------------------------------------------------------

    def _trouble(self, act: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        if self.settling:
            return  # the producer is gone
        if "topic" in arguments and arguments["topic"] not in self.cluster._state.topics:
            return
        outcome: Coroutine[Any, Any, None] | None = act(**arguments)
        if outcome is not None:
            self.troubles.append(self.loop.create_task(outcome))

    def _fault(self, **arguments: Any) -> None:
        error = arguments.get("error")
        if error in ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID"):
            # Of a batch that a broker has, it says neither.
            arguments["when"] = self._is_new
        if error == "TRANSACTION_ABORTABLE" and arguments["api"] == "end_txn":
            # Of a transaction whose commit only lost its answer, it says no such thing.
            arguments["when"] = self._is_not_committed
        fault = self.cluster.inject(**arguments)
        self.faults.append(fault)

    def _epoch_refused(self, error: str, times: int) -> None:
        fault = self.cluster.inject(
            "init_producer_id",
            error=error,
            times=times,
            when=lambda request: request.fields.get("producer_id", -1) >= 0,
        )
        self.faults.append(fault)

    async def _move_leader(
        self, topic: str, partition: int, node: int, nobody_for: float | None = None
    ) -> None:
        if nobody_for is not None:
            self.cluster.move_leader(topic, partition, -1)
            self.count["trouble: nobody leads"] += 1
            await asyncio.sleep(nobody_for)
        with contextlib.suppress(ValueError, RequestRefused):  # that node is down, or no topic
            if nobody_for is not None and self.cluster.leader(topic, partition) != -1:
                return
            self.cluster.move_leader(topic, partition, node)
            self.count["trouble: leader moved"] += 1

    async def _leader_hangs(self, topic: str, partition: int, delay: float, how: str) -> None:
        old = self.cluster.leader(topic, partition)
        alive = [node.node_id for node in self.cluster._state.alive]
        if old not in alive or len(alive) < 2:
            return
        if how == "paused":
            self.cluster.pause(old)
            await asyncio.sleep(delay / 4)
        else:
            fault = self.cluster.inject(
                "produce",
                node=old,
                topic=topic,
                partition=partition,
                delay=delay,
                drop="after" if how == "lost" else None,
                error="NOT_LEADER_OR_FOLLOWER" if how == "refused" else None,
            )
            self.faults.append(fault)
            await fault.reached()
        new = alive[(alive.index(old) + 1) % len(alive)]
        is_there = topic in self.cluster._state.topics
        if self.cluster._state.nodes[new].alive and is_there:
            self.cluster.move_leader(topic, partition, new)
            self.count["trouble: leader hangs, another leads"] += 1
        if how == "paused":
            await asyncio.sleep(delay)
            self.cluster.resume(old)

    async def _stop_broker(self, node: int, lasting: float) -> None:
        self.count["trouble: broker stopped"] += 1
        await self.cluster.stop_broker(node)
        await asyncio.sleep(lasting)
        await self.cluster.start_broker(node)

    async def _pause_broker(self, node: int, lasting: float) -> None:
        self.count["trouble: broker paused"] += 1
        self.cluster.pause(node)
        await asyncio.sleep(lasting)
        self.cluster.resume(node)

    async def _broker_moves(self, node: int, towards: str, how: str, lasting: float) -> None:
        """It is at another address, and what is on its way to the old one hangs."""
        await self.cluster.inject("produce", node=node, delay=0.0).reached()
        if not self.cluster._node(node).node.alive:
            return
        ways = self._ways(node, towards)
        for way in ways:
            if how == "stall":
                way.stall()
            elif how == "black_hole":
                way.black_hole()
        await self.cluster.move_broker(node)
        self.count[f"trouble: broker moved, {how} towards its {towards}"] += 1
        await asyncio.sleep(lasting)
        for way in ways:
            way.resume()

    async def _topic_made_again(
        self,
        topic: str,
        partition: int,
        error: str | None,
        delay: float,
        times: int,
        apart: float,
        then: str | None = None,
        led_by: int | None = None,
    ) -> None:
        """Another topic of the name, while an answer of a leader of the old one is waited for."""
        if led_by is not None:
            await self._move_leader(topic, partition, led_by)
        leader = self.cluster.leader(topic, partition)
        # Of all that it answers: of what is deleted meanwhile it does not know the name.
        fault = self.cluster.inject("produce", node=leader, error=error, delay=delay, times=times)
        self.faults.append(fault)
        await fault.reached()
        await asyncio.sleep(delay / 4)
        if topic not in self.cluster._state.topics:
            return
        for place in self.cluster._state.topic(topic).partitions:
            for batch in place.log.batches():
                self.deleted.add((topic, place.index, *_identity(batch.header)))
        self.history.deleted.append((self.loop.time(), self._logs(topic)))
        self.cluster.delete_topic(topic)
        self.count["trouble: topic made again"] += 1
        try:
            await asyncio.sleep(apart)
        finally:
            self.cluster.create_topic(topic, partitions=self.plan.cluster["topics"][topic])
            if then is not None:
                self._fault(api="produce", topic=topic, partition=partition, error=then)

    def _kill_connections(self, node: int) -> None:
        self.count["trouble: connections killed"] += self.cluster.kill_connections(node)

    def _server(self, node: int) -> MemoryServer:
        port = int(self.cluster.address(node).rpartition(":")[2])
        return self.network.servers[port]

    def _ways(self, node: int, towards: str) -> list[Direction]:
        links = self._server(node).links
        return [link.to_server if towards == "server" else link.to_client for link in links]

    async def _link(
        self,
        node: int,
        towards: str,
        how: str,
        sizes: tuple[int, ...] = (),
        lasting: float = 0.0,
        after_bytes: int = 0,
    ) -> None:
        ways = self._ways(node, towards)
        self.count[f"trouble: link {how}"] += len(ways)
        for way in ways:
            if how == "split":
                way.split(*sizes)
            elif how == "stall":
                way.stall()
            elif how == "cut":
                way.cut_after(after_bytes)
            elif how == "half_close":
                way.half_close()
            else:
                way.black_hole()
        if how == "stall":
            await asyncio.sleep(lasting)
            for way in ways:
                way.resume()

    async def _connects(self, node: int, how: str, lasting: float) -> None:
        server = self._server(node)
        self.count[f"trouble: connecting {how}"] += 1
        setattr(server, how, lasting if how == "delay" else True)
        await asyncio.sleep(lasting)
        setattr(server, how, 0.0 if how == "delay" else False)

    async def _max_message_bytes(self, topic: str, size: int, lasting: float) -> None:
        self.count["trouble: smaller batches"] += 1
        logs = [partition.log for partition in self.cluster._state.topic(topic).partitions]
        usual = self.plan.cluster.get("max_message_bytes", _USUAL_BYTES)
        for log in logs:
            log.config = dataclasses.replace(log.config, max_message_bytes=min(size, usual))
        await asyncio.sleep(lasting)
        for log in logs:
            log.config = dataclasses.replace(log.config, max_message_bytes=usual)

    def _forget_producers(self, topic: str, partition: int) -> None:
        # A broker forgets those that are silent for days: with something on its way,
        # nothing could tell a batch that is stored from one that is not.
        if not self.producer._accumulator.incomplete and not self._may_come_late():
            self.count["trouble: producers forgotten"] += 1
            self.history.forgotten.add((topic, partition))
            self.cluster.forget_producers(topic, partition)

    def _may_come_late(self) -> bool:
        """Whether a request of a connection that was given up may reach a broker yet."""
        given_up = any(link.client.is_closing() for link in self.network.links)
        return given_up or any(
            not connection.is_open
            for node in self.cluster._nodes.values()
            for connection in node.connections
        )

    async def _move_coordinator(
        self,
        key: str,
        kind: CoordinatorKind,
        node: int,
        nobody_for: float | None = None,
        load_ms: int = 0,
    ) -> None:
        if nobody_for is not None:
            self.cluster.move_coordinator(key, -1, kind)
            self.count["trouble: no coordinator"] += 1
            await asyncio.sleep(nobody_for)
        self.cluster.move_coordinator(key, node, kind, load_ms=load_ms)
        self.count["trouble: coordinator moved"] += 1

    async def _take_over(self) -> None:
        for _ in range(_ASKED):
            try:
                self.cluster._transactions.initialize(TRANSACTIONAL_ID, 60_000, None)
            except RequestRefused:  # what is open must be aborted first
                await asyncio.sleep(0.001)
            else:
                break
        else:
            return  # it lost patience, and has fenced nobody
        if self.started:
            self.history.taken_over_at = self.loop.time()
        self.count["trouble: another producer"] += 1

    def _transaction_version(self, level: int) -> None:
        if level == 1 or self.plan.cluster.get("produce_version") is None:
            self.cluster.set_feature("transaction.version", level)
            self.count[f"trouble: transaction.version {level}"] += 1

    def _marker_delay(self, delay_ms: int) -> None:
        self.cluster.set_marker_delay(delay_ms)
        self.count["trouble: other marker delay"] += 1

    # -- what brokers see ------------------------------------------------------------------

    def _watch(self, request: ReceivedRequest) -> bool:
        """Sees each Produce request, just before it is processed."""
        self.trace(
            request.node_id,
            request.connection_id,
            request.received_at,
            request.version,
            request.size_bytes,
            request.batches,
        )
        self.count["produce requests"] += 1
        if request.bytes_left_over:
            self.found("wire", f"{request.bytes_left_over} bytes too many in a request")
        # What the client has given up, but arrives.
        late = self.network.made[request.connection_id - 1].client.is_closing()
        places = set()
        known_batches = len(request.batches)
        # What was refused in one transaction may leave its sequences to the next.
        transactions = self.producer._transactions
        number = 0 if transactions is None else transactions.number
        for batch in request.batches:
            topic, index = batch.topic, batch.partition
            if topic is None:  # it was deleted
                known_batches -= 1
                continue
            places.add((topic, index))
            if batch.base_sequence < 0:
                continue
            identity = topic, index, *_identity(batch)
            looks = batch.size_bytes, batch.record_count
            known = self.batches.setdefault((*identity, number), looks)
            if not late and known != looks:
                # After a split the first part has the sequence of the whole.
                if looks > known:
                    self.found("wire", f"{identity} was sent again with other records")
                self.batches[*identity, number] = looks
            if late:
                self.count["late batches"] += 1
        if len(places) < known_batches:
            self.found("wire", "a request has two batches of one partition")
        self._check_memory()
        return False

    def _check_memory(self) -> None:
        pool = self.producer._pool
        used = sum(batch.memory for batch in self.producer._accumulator.incomplete)
        of_brokers = sum(share.held for share in pool._shares.values())
        if min(pool.available, pool.held) < 0 or not used <= of_brokers <= pool.reserved:
            self.found("memory", f"{used} bytes are in use: {pool.statistics()}")

    def _is_new(self, request: ReceivedRequest) -> bool:
        """Whether none of the request's batches is stored, or may come once more.

        A broker that finds one out of order finds the same one out of order later.
        """
        if self._may_come_late():
            return False
        for batch in request.batches:
            topic = self.cluster._state.topics.get(str(batch.topic))
            if topic is None or batch.base_sequence < 0:
                return False
            identity = _identity(batch)
            if (batch.topic, batch.partition, *identity) in self.deleted:
                return False
            for stored in topic.partitions[batch.partition].log.batches():
                if identity == _identity(stored.header):
                    return False
        return bool(request.batches)

    def _is_not_committed(self, _: ReceivedRequest) -> bool:
        """Whether nobody has decided yet that the transaction is committed."""
        known = self.cluster._transactions.ids.get(TRANSACTIONAL_ID)
        return known is None or known.state.name not in ("PREPARE_COMMIT", "COMPLETE_COMMIT")

    # -- what was met ----------------------------------------------------------------------

    def _count(self) -> None:
        count = self.count
        for fault in self.faults:
            if fault.hits:
                count[f"fault: {_name(fault)}"] += fault.hits
        for sent in self.history.sent:
            what = sent.outcome
            if sent.outcome == "failed":
                what += f" {sent.error}, persisted {sent.persisted}"
            elif sent.outcome == "refused":
                what += f" {sent.error}"
            count[f"records {what}"] += 1
        producer = self.producer
        if producer._loop is None:
            return
        metrics = producer.metrics()
        count["records sent again"] += int(metrics["record_retry_total"])
        count["batches split"] += int(metrics["batch_split_total"])
        count["connections"] += int(metrics["connection_creation_total"])
        count["buffer exhausted"] += int(metrics["buffer_exhausted_total"])
        if producer._sequences is not None:
            count["epoch bumps"] += producer._sequences.epoch_bumps
        self.trace(sorted((name, value) for name, value in metrics.items() if _steady(name)))


def _is_mendable(plan: Plan) -> bool:
    """Whether each record that is taken must be acknowledged in the end."""
    options = plan.options
    return (
        options["enable_idempotence"]
        and options["delivery_timeout_ms"] >= PATIENT_MS
        and not {"retries", "transactional_id"} & options.keys()
        and "max_message_bytes" not in plan.cluster
        and all(step.action != "close" for step in plan.steps)
        and all(map(_passes, plan.troubles))
    )


def _passes(trouble: Trouble) -> bool:
    error = trouble.arguments.get("error")
    return trouble.kind != "max_message_bytes" and (
        error is None or (trouble.arguments.get("api") == "produce" and error in RETRIABLE)
    )


def _identity(batch: BatchHeader | BatchSummary) -> tuple[int, int, int]:
    return batch.producer_id, batch.producer_epoch, batch.base_sequence


def _steady(metric: str) -> bool:
    """Whether a metric is the same in each run of a plan."""
    return not metric.startswith(("start_time", "app_info"))


def _name(fault: Fault) -> str:
    effects = [] if fault.error is None else [fault.error.name]
    effects += [
        name
        for name, is_set in (
            ("stored", fault.after_append),
            (f"drop {fault.drop} append", fault.drop),
            ("no answer", fault.no_answer),
            ("delay", fault.delay),
            ("throttle", fault.throttle_ms),
            ("truncated answer", fault.truncate is not None),
            (f"wrong {fault.corrupt}", fault.corrupt),
        )
        if is_set
    ]
    return f"{fault.api} {', '.join(effects)}"
