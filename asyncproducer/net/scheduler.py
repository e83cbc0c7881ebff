"""The scheduler: Java's Sender thread, as a task that sleeps on deadlines.

`step(now)` does everything that can be done now, without waiting: it expires what is
too old, wakes what has lingered or backed off, drains the ready lines into requests for
the connections that have room, and starts what takes time (compression of large
batches, the producer id). It returns when it wants to be called again at the latest.
The task only sleeps until then, or until `wake`.

Answers do not go through the task: a connection calls `_answered` from its reader, the
batches are completed there, and the freed slot is used at once by another `step`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncproducer.core import wire
from asyncproducer.core.accumulator import Accumulator
from asyncproducer.core.answers import INIT_PRODUCER_ID, Answer, answer_for
from asyncproducer.core.batch import GONE
from asyncproducer.core.delivery import PENDING, Failure
from asyncproducer.core.metadata import LeaderHint
from asyncproducer.core.outcome import Action, Decision, decide, fatal_error, rule_for
from asyncproducer.core.sequences import Sequences
from asyncproducer.errors import (
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    DeliveryError,
    ErrorCode,
    KafkaError,
    ProtocolError,
    UnsupportedVersionError,
    error_name,
)
from asyncproducer.logs import guarded
from asyncproducer.net.waiting import time_of

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.batch import ProducerBatch
    from asyncproducer.core.metrics import Metrics
    from asyncproducer.net.cluster import Cluster
    from asyncproducer.net.connection import Connection
    from asyncproducer.net.transactions import Transactions

__all__ = ["Scheduler"]

logger = guarded("asyncproducer.net.scheduler")

_NEVER = float("inf")

# Looked up once: an enum's members cost as much as the work itself for each batch.
_PRODUCE = wire.ApiKey.PRODUCE
_NONE = int(ErrorCode.NONE)
_DUPLICATE = int(ErrorCode.DUPLICATE_SEQUENCE_NUMBER)

#: Retries are logged so that somebody sees them, once in so many seconds for each topic. All of
#: them are at level DEBUG.
_WARNING_SECONDS = 10.0
#: How long nothing is given up any more after a failure in that.
_PAUSE_AFTER_FAILURE = 1.0

#: The most that an answer to Produce takes, with all its errors: so much, and so much for each
#: partition and record that was sent. To read more would hold up the loop for nothing.
_ANSWER_BYTES, _ANSWER_BYTES_EACH = 256 * 1024, 1024

#: How often brokers may have no producer id for us yet before that is worth a warning: one that
#: has just started has none for a moment.
_REFUSALS_TOLD = 10
_PRODUCE_WITH_TOPIC_IDS = 13


class Scheduler:
    """Moves batches from the accumulator to the brokers, and their answers back."""

    def __init__(
        self,
        config: ProducerConfig,
        accumulator: Accumulator,
        cluster: Cluster,
        *,
        client_id: str,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        sequences: Sequences | None,
        in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        on_ready: Callable[[], None],
        transactions: Transactions | None = None,
    ) -> None:
        self._accumulator = accumulator
        self._cluster = cluster
        self._loop = loop
        self._time = time_of(loop)
        self._metrics = metrics
        self._sequences = sequences
        self._in_thread = in_thread
        self._on_ready = on_ready
        self._transactions = transactions
        #: The newest version of Produce that may be used, None for any.
        self.produce_cap: int | None = None
        self._client_id = client_id
        #: What requests begin with, see `encode_produce`.
        self._heads: dict[tuple[int, str | None, int, int, str | None], bytes] = {}
        self._acks = config.acks
        self._retries = config.retries
        self._max_request_size = config.max_request_size
        self._request_timeout = config.request_timeout_ms / 1000
        self._timeout_ms = config.request_timeout_ms
        self._delivery_timeout = config.delivery_timeout_ms / 1000
        self._backoff = config.retry_backoff_ms / 1000
        self._wakeup: asyncio.Future[None] | None = None
        #: When the task wakes by itself; -inf while it is awake.
        self._sleeps_until = -_NEVER
        #: When to look again at what waits although its broker would take it.
        self._held_until = _NEVER
        #: Topic → when a retry was last logged as a warning.
        self._warned: dict[str, float] = {}
        self._stepping = False
        self._step_again = False
        #: Whether `_turned` is to be called, and `_step_for_compressed`.
        self._turning = False
        self._compressed = False
        # A dict keeps their order; that of a set differs from run to run.
        self._tasks: dict[asyncio.Task[None], None] = {}
        #: Whether the task has ended, or is cancelling those it has begun.
        self._ended = False
        #: Why there is no producer id yet, where one is asked for in vain.
        self.id_error: KafkaError | None = None
        self._id_refusals = 0
        self._id_told = False
        #: The deadline for which it is awake.
        self._reached = -_NEVER
        #: After a failure in giving up: when that is tried again.
        self._expires_from = -_NEVER
        self.stopped = False
        #: Why nothing can be sent any more, or None.
        self.fatal_error: KafkaError | None = None

    # -- the task --------------------------------------------------------------------------

    async def run(self) -> None:
        """Step, sleep until the next deadline or `wake`, again; until cancelled."""
        try:
            while not self.stopped:
                # Before stepping: a wake in between must not be lost.
                wakeup = self._wakeup = self._loop.create_future()
                # A loop may run its timers a little early, uvloop's up to half a millisecond: what
                # was due at its deadline is, or it would be asked again until then.
                now = max(self._time(), self._reached)
                self._reached = -_NEVER
                if self._accumulator.has_expired(now) and now >= self._expires_from:
                    # Not before the answers that are here already: what has just held up the loop
                    # for as long may have held up nobody else. It reads them in this turn.
                    await asyncio.sleep(0)
                    self._expire(max(now, self._time()))
                deadline = self.try_step(now)
                timer = None
                if deadline < _NEVER:
                    timer = self._loop.call_at(deadline, self._wake_at, deadline)
                self._sleeps_until = deadline
                try:
                    await wakeup
                finally:
                    self._sleeps_until = -_NEVER
                    if timer is not None:
                        timer.cancel()
        finally:
            self._wakeup = None
            self._ended = True  # what comes later begins no thread's work any more
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _wake_at(self, deadline: float) -> None:
        self._reached = deadline
        self.wake()

    def _expire(self, now: float) -> None:
        """Give up what has waited too long, in flight or not. The step that comes next is for what
        follows from it, and for what is asked of it from inside: callbacks may send."""
        self._stepping = True
        self._metrics.tick(now)
        try:
            self._give_up_old(now, in_flight=True)
        finally:
            self._stepping = False

    def _give_up_old(self, now: float, *, in_flight: bool) -> None:
        try:
            for batch in self._accumulator.expire(now, in_flight):
                self._metrics.records_failed(batch.topic, batch.count)
            self._accumulator.give_back()
        except Exception:
            # It is tried again, but neither at once nor by each step: others have things to send.
            logger.exception("the scheduler failed; it goes on")
            self._expires_from = now + _PAUSE_AFTER_FAILURE

    def try_step(self, now: float) -> float:
        """`step`, where a failure of ours must not reach the caller."""
        try:
            return self.step(now)
        except Exception:
            # A bug must not end the producer: what it hit stays queued and expires.
            logger.exception("the scheduler failed; it goes on")
            return self._awake_by(now + self._backoff)

    def _awake_by(self, deadline: float) -> float:
        """Let the task sleep until `deadline` at the latest, and return that."""
        if deadline < self._sleeps_until:
            self.wake()
        return deadline

    def wake(self) -> None:
        """Let the task step in the next turn of the loop."""
        wakeup = self._wakeup
        if wakeup is not None and not wakeup.done() and not self._loop.is_closed():
            wakeup.set_result(None)

    def stop(self) -> None:
        """Let `run` return after the step it is in."""
        self.stopped = True
        self.wake()

    # -- one step --------------------------------------------------------------------------

    def step(self, now: float) -> float:
        """Do what can be done now. Returns the time of the next deadline, or infinity."""
        if self._stepping:
            # Called from inside: by memory handed on, or by a connection that failed at once.
            self._step_again = True
            return _NEVER
        self._stepping = True
        self._metrics.tick(now)
        accumulator = self._accumulator
        try:
            while True:
                self._step_again = False
                accumulator.news = False
                self._idempotence(now)
                if accumulator.has_expired(now) and now >= self._expires_from:
                    # What is in flight may have its answer here: `run` sees to that.
                    self._give_up_old(now, in_flight=False)
                if self._transactions is not None:
                    self._transactions.step(now)
                accumulator.fire_timers(now)
                self._held_until = _NEVER
                for node in list(accumulator.ready):
                    self._serve(node, now)
                if accumulator.leaderless:
                    self._ask_for_leaders()
                while accumulator.to_compress and not self._ended:
                    self.spawn(self._compress(accumulator.to_compress.pop()))
                if accumulator.compressed_here and not self._turning:
                    self._turning = True
                    self._loop.call_soon(self._turned)
                accumulator.give_back()
                if not (self._step_again or accumulator.news):
                    deadline = min(accumulator.next_deadline(self._expires_from), self._held_until)
                    if self._transactions is not None:
                        deadline = min(deadline, self._transactions.wake_at)
                    return self._awake_by(deadline)
        finally:
            self._stepping = False

    def _turned(self) -> None:
        self._turning = False
        now = self._time()
        if self._accumulator.turned(now):
            self.try_step(now)

    def _step_for_compressed(self) -> None:
        self._compressed = False
        self.try_step(self._time())

    def _serve(self, node: int, now: float) -> None:
        accumulator = self._accumulator
        connection = self._cluster.connection(node)
        ready = connection is not None and connection.can_send(now)
        accumulator.node_seen(node, now, drained=ready)
        while connection is not None and ready:
            if connection.in_flight and (until := accumulator.held_until(node, now)) >= 0:
                self._held_until = min(self._held_until, until)
                return
            if self._transactions is not None:
                self._transactions.gather(node, now)
            batches = accumulator.drain(node, self._max_request_size, now)
            if not batches:
                return
            try:
                self._send(connection, batches, now)
            except Exception as error:
                # A bug of ours: what was taken must not stay in flight.
                self._lost(batches, error, now)
                raise
            ready = connection.can_send(now)

    def _ask_for_leaders(self) -> None:
        for topic in dict.fromkeys([q.topic.name for q in self._accumulator.leaderless]):
            self._cluster.add_topic(topic)
        self._cluster.request_update()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the steps. It is cancelled when the scheduler ends."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())

    async def _compress(self, batch: ProducerBatch) -> None:
        codec = batch.codec
        if codec is None:
            return
        try:
            # Nothing here keeps the records: what they lie in serves the next batch only if nobody
            # has a view of it.
            payload = await self._in_thread(partial(codec.compress, batch.uncompressed()))
        except Exception as error:
            logger.exception("%s-%d: a batch cannot be compressed", batch.topic, batch.partition)
            if self._accumulator.not_compressed(batch, error, self._time()):
                self._metrics.records_failed(batch.topic, batch.count)
        else:
            self._accumulator.compressed(batch, payload, self._time())
        # One step for all that ends in this turn: fewer and larger requests, and what they take is
        # not added to this turn.
        if not self._compressed:
            self._compressed = True
            self._loop.call_soon(self._step_for_compressed)

    # -- requests --------------------------------------------------------------------------

    def _send(self, connection: Connection, batches: list[ProducerBatch], now: float) -> None:
        metrics = self._metrics
        topics: dict[str, wire.ProduceTopic] = {}
        partitions: dict[str, list[wire.ProducePartition]] = {}
        by_place: dict[tuple[str | bytes, int], ProducerBatch] = {}
        cap = self.produce_cap
        transactions = self._transactions
        metadata = self._cluster.metadata
        for batch in batches:
            topic = topics.get(batch.topic)
            if topic is None:
                metadata.add_topic(batch.topic, now)
                known = metadata.topic(batch.topic)
                topic_id = None if known is None else known.topic_id
                if topic_id is None:
                    # A topic without an id can only be named, up to version 12.
                    named = _PRODUCE_WITH_TOPIC_IDS - 1
                    cap = named if cap is None else min(cap, named)
                parts = partitions[batch.topic] = []
                # What calling the class does, without a call of its Python; likewise below.
                topic = tuple.__new__(wire.ProduceTopic, (batch.topic, topic_id, parts))
                topics[batch.topic] = topic
            part = tuple.__new__(wire.ProducePartition, (batch.partition, batch.buffers()))
            partitions[batch.topic].append(part)
            by_place[batch.topic, batch.partition] = batch
            if topic.topic_id is not None:
                by_place[topic.topic_id, batch.partition] = batch
            metrics.batch_drained(batch, now)
        try:
            version = connection.version(_PRODUCE, cap)
            correlation_id = connection.next_correlation_id()
            buffers = wire.encode_produce(
                version,
                correlation_id,
                self._client_id,
                acks=self._acks,
                timeout_ms=self._timeout_ms,
                transactional_id=None if transactions is None else transactions.transactional_id,
                topics=list(topics.values()),
                heads=self._heads,
            )
        except UnsupportedVersionError as error:
            self._refused(batches, error, now)
            return
        node_id = connection.node.node_id
        metrics.request_sent(node_id, batches)
        adds = transactions is not None and transactions.sent(node_id, batches)
        connection.send(
            _PRODUCE,
            version,
            correlation_id,
            buffers,
            timeout=self._request_timeout,
            on_done=partial(self._answered, connection, version, batches, by_place, now, adds),
            expect_response=self._acks != 0,
        )

    def _refused(self, batches: Sequence[ProducerBatch], error: KafkaError, now: float) -> None:
        """Our own request could not be made: these batches were never sent."""
        for batch in batches:
            self._accumulator.landed(batch)
            self._fail(batch, int(ErrorCode.UNSUPPORTED_VERSION), str(error), error, now)
        self._step_again = True

    # -- answers ---------------------------------------------------------------------------

    def _answered(
        self,
        connection: Connection,
        version: int,
        batches: list[ProducerBatch],
        by_place: dict[tuple[str | bytes, int], ProducerBatch],
        sent_at: float,
        adds: bool,
        body: bytes | None,
        error: BaseException | None,
    ) -> None:
        now = self._time()
        self._metrics.tick(now)
        node_id = connection.node.node_id
        if adds and self._transactions is not None:
            self._transactions.added(node_id, now)
        if error is not None:
            self._lost(batches, error, now)
        elif body is None:
            # acks=0: that the system has taken the bytes is all that will ever be known.
            self._metrics.request_done(node_id, None)
            for batch in batches:
                self._accumulator.landed(batch)
                self._acknowledge(batch, -1, -1, now)
        else:
            try:
                _check_size(body, batches)
                response = wire.decode_produce(version, body)
            except ProtocolError as broken:
                # First ours: what closing the connection loses was sent after it.
                self._lost(batches, broken, now)
                connection.close(broken)
            else:
                self._metrics.request_done(node_id, now - sent_at)
                self._metrics.throttled(response.throttle_ms)
                if wire.throttles_client(_PRODUCE, version):
                    connection.throttle(response.throttle_ms, now)
                if self._transactions is not None:
                    concurrent = any(
                        part.error_code == ErrorCode.CONCURRENT_TRANSACTIONS
                        for part in response.partitions
                    )
                    self._transactions.produced(now - sent_at, refused=concurrent)
                self._response(response, batches, by_place, now)
        self._accumulator.give_back()
        self.try_step(now)

    def _lost(self, batches: list[ProducerBatch], error: BaseException, now: float) -> None:
        code = getattr(error, "code", None)
        if code != ErrorCode.REQUEST_TIMED_OUT:
            code = ErrorCode.NETWORK_EXCEPTION
        self._metrics.request_done(-1, None)
        for batch in batches:
            self._accumulator.landed(batch)
            self._conclude(batch, int(code), str(error), error, {}, -1, now)

    def _response(
        self,
        response: wire.ProduceResponse,
        batches: list[ProducerBatch],
        by_place: dict[tuple[str | bytes, int], ProducerBatch],
        now: float,
    ) -> None:
        hints: list[LeaderHint] = []
        answers: dict[ProducerBatch, wire.ProducePartitionResponse] = {}
        twice: list[ProducerBatch] = []
        strays: list[wire.ProducePartitionResponse] = []
        refused: list[ProducerBatch] = []
        for part in response.partitions:
            topic: str | bytes = part.topic if part.topic is not None else part.topic_id or b""
            batch = by_place.get((topic, part.partition))
            if batch is None or batch in answers:
                strays.append(part)
                if batch is not None:
                    twice.append(batch)
                continue
            answers[batch] = part
        # Two answers for one batch contradict each other, or one is another's: none counts.
        strays += [answers.pop(batch) for batch in twice if batch in answers]
        for part in strays:
            logger.warning(
                "a broker answered for %s-%d, which the request did not contain, or twice",
                part.topic,
                part.partition,
            )
        for batch, part in answers.items():
            code = part.error_code
            if code in (_NONE, _DUPLICATE):
                self._accumulator.landed(batch)
                self._acknowledge(batch, part.base_offset, part.log_append_time, now)
            else:
                refused.append(batch)
        # Afterwards: what is fatal ends the others, and what is stored is not to be among them.
        for batch in refused:
            part = answers[batch]
            self._accumulator.landed(batch)
            # A topic that was made again since has other leaders.
            if part.leader >= 0 and part.leader_epoch >= 0 and batch.sent_to != GONE:
                hints.append(
                    LeaderHint(batch.topic, batch.partition, part.leader, part.leader_epoch)
                )
            record_errors = {e.batch_index: e.message for e in part.record_errors}
            self._conclude(
                batch,
                part.error_code,
                part.error_message,
                None,
                record_errors,
                part.log_start_offset,
                now,
            )
        if hints:
            self._cluster.take_hints(hints, response.nodes)
        if len(answers) < len(batches):
            missing = ProtocolError("the broker's answer leaves out a partition of the request")
            for batch in batches:
                if batch not in answers:
                    self._accumulator.landed(batch)
                    code = int(ErrorCode.NETWORK_EXCEPTION)
                    self._conclude(batch, code, str(missing), missing, {}, -1, now)

    def _acknowledge(
        self, batch: ProducerBatch, base_offset: int, log_append_time: int, now: float
    ) -> None:
        if self._accumulator.acknowledge(batch, base_offset, log_append_time, now):
            self._metrics.batch_acknowledged(batch, now)

    def _conclude(
        self,
        batch: ProducerBatch,
        code: int,
        message: str | None,
        cause: BaseException | None,
        record_errors: dict[int, str | None],
        log_start_offset: int,
        now: float,
    ) -> None:
        """Do what the outcome table says about a batch that was not acknowledged."""
        rule = rule_for(code)
        if rule.persisted != "no":
            batch.maybe_written = True
            batch.is_stored = batch.is_stored or rule.persisted == "yes"
        if batch.state != PENDING:
            # Given up before the answer came: only the sequences may still care.
            if rule.refresh:
                self._cluster.request_update()
            return
        batch.last_error = cause if cause is not None else BrokerError(code, message)
        decision: Decision = decide(
            code,
            records=batch.count,
            attempts=batch.attempts,
            retries=self._retries,
            expired=now - batch.created_at >= self._delivery_timeout,
            idempotent=self._sequences is not None,
        )
        if decision.sequence and self._gives_up(batch, decision, log_start_offset):
            decision = decision._replace(action=Action.FAIL)
        if decision.action is Action.RETRY:
            self._retry(batch, decision, log_start_offset, code, now)
        elif decision.action is Action.SPLIT:
            try:
                parts = self._accumulator.split(batch, now)
            except Exception as error:  # there may be no memory for it
                why = f"{message or 'it is too large'}; and it could not be split: {error!r}"
                self._fail(batch, code, why, error, now, record_errors)
                return
            self._metrics.batch_split(batch.topic)
            logger.warning(
                "%s-%d: the broker found a batch of %d records (%d bytes) too large; it is sent "
                "again as %d batches. Lower batch_size to avoid this",
                batch.topic,
                batch.partition,
                batch.count,
                batch.estimated_size(),
                len(parts),
            )
        else:
            fatal = self._fatal(code, message) if decision.action is Action.FATAL else None
            if fatal is not None and self._transactions is not None:
                # First: who waits for a commit hears of this, not of the batch.
                self._transactions.fatal(fatal)
            self._fail(batch, code, message, cause, now, record_errors)
            if fatal is not None:
                self.give_up(fatal, now)
        if decision.refresh:
            self._cluster.request_update()

    def _gives_up(self, batch: ProducerBatch, decision: Decision, log_start: int) -> bool:
        if self._sequences is None:
            return False
        partition = self._accumulator.sequences_of(batch)
        return self._sequences.gives_up(partition, batch, decision.sequence, log_start)

    def _fatal(self, code: int, message: str | None) -> KafkaError:
        if code == ErrorCode.PRODUCER_FENCED and self._transactions is not None:
            return self._transactions.fenced("Produce")
        return fatal_error(code, message)

    def _retry(
        self, batch: ProducerBatch, decision: Decision, log_start: int, code: int, now: float
    ) -> None:
        if self._sequences is not None and decision.sequence:
            partition = self._accumulator.sequences_of(batch)
            if decision.sequence == "out_of_order":
                self._sequences.out_of_order(partition, batch)
            else:
                self._sequences.unknown_producer(partition, batch, log_start)
        self._accumulator.retry(batch, now)
        self._metrics.records_retried(batch.topic, batch.count)
        level = logging.DEBUG
        if now >= self._warned.get(batch.topic, -_NEVER) + _WARNING_SECONDS:
            self._warned[batch.topic] = now
            level = logging.WARNING
        logger.log(
            level,
            "%s-%d: attempt %d of %d records is repeated: %s",
            batch.topic,
            batch.partition,
            batch.attempts,
            batch.count,
            batch.last_error,
        )

    def _fail(
        self,
        batch: ProducerBatch,
        code: int,
        message: str | None,
        cause: BaseException | None,
        now: float,
        record_errors: dict[int, str | None] | None = None,
    ) -> None:
        failure = self._failure(batch, code, message, cause, now, record_errors)
        if self._accumulator.fail(batch, failure, now):
            self._metrics.records_failed(batch.topic, batch.count)

    def _failure(
        self,
        batch: ProducerBatch,
        code: int,
        message: str | None,
        cause: BaseException | None,
        now: float,
        record_errors: dict[int, str | None] | None = None,
    ) -> Failure:
        name = error_name(code)
        text = f"{name}: {message}" if message else name
        return Failure(
            BrokerRejected if cause is None else DeliveryError,
            f"{batch.count} record(s) for {batch.topic}-{batch.partition} were not delivered: "
            f"{text} (attempt {batch.sends})",
            persisted=batch.persisted(),
            code=code,
            cause=cause if cause is not None else batch.last_error,
            attempts=batch.sends,
            elapsed=now - batch.created_at,
            record_errors=record_errors,
        )

    def give_up(self, error: KafkaError, now: float) -> None:
        """Nothing can be sent any more: every batch fails with `error`."""
        if self._sequences is not None:
            self._sequences.fail(error)
        self.fatal_error = error
        if self._transactions is not None:
            self._transactions.fatal(error)
        # First: nobody comes in any more, not those who wait, nor who sends again what failed.
        self._on_ready()
        self.abort(f"the producer failed for good: {error}", error, now)

    def abort(self, reason: str, cause: BaseException | None, now: float) -> int:
        """Fail everything that has no end yet; returns the number of records."""
        records = 0
        for batch in self._accumulator.abort(reason, cause, now):
            records += batch.count
            self._metrics.records_failed(batch.topic, batch.count)
        self._accumulator.give_back()
        return records

    # -- the producer id -------------------------------------------------------------------

    def _idempotence(self, now: float) -> None:
        sequences = self._sequences
        if sequences is None or self.stopped or sequences.quiet:
            return
        accumulator = self._accumulator
        accumulator.touch_partitions(sequences.resolve(), now)
        for batch in sequences.doubtful():
            failure = self._failure(
                batch,
                int(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
                "the broker refused what was sent before it, and may have this",
                None,
                now,
            )
            if accumulator.give_up(batch, failure, now):
                self._metrics.records_failed(batch.topic, batch.count)
        accumulator.touch_partitions(sequences.apply_bumps(), now)
        if sequences.needs_id:
            sequences.requested()
            self.spawn(self._acquire_producer_id(sequences))

    async def _acquire_producer_id(self, sequences: Sequences) -> None:
        """Ask for a producer id until there is one, or can be none."""
        while self.fatal_error is None:
            request = wire.InitProducerIdRequest(None, 2**31 - 1)
            deadline = self._time() + self._request_timeout
            try:
                response = await self._cluster.request(request, deadline=deadline)
            except UnsupportedVersionError as error:
                self.give_up(error, self._time())
                return
            except KafkaError as error:
                self._no_producer_id(error)
            else:
                code = response.error_code
                if (
                    code == ErrorCode.NONE
                    and min(response.producer_id, response.producer_epoch) < 0
                ):
                    self._no_producer_id(
                        ProtocolError(
                            f"the broker gave producer id {response.producer_id} with epoch "
                            f"{response.producer_epoch}"
                        )
                    )
                elif code == ErrorCode.NONE:
                    sequences.assigned(response.producer_id, response.producer_epoch)
                    now = self._time()
                    self.id_error = None
                    self._id_refusals = 0
                    self._id_told = False
                    self._accumulator.touch_all(now)
                    self.try_step(now)
                    self._on_ready()
                    return
                else:
                    self._refused_producer_id(BrokerError(code), code)
            await asyncio.sleep(self._backoff)

    def _no_producer_id(self, error: KafkaError) -> None:
        """None yet: another try follows. A broker that answers may only have started."""
        self._id_refusals += 1
        patient = isinstance(error, BrokerError) and self._id_refusals < _REFUSALS_TOLD
        level = logging.DEBUG
        if not (patient or self._id_told):
            level = logging.WARNING
            self._id_told = True
        logger.log(level, "no producer id yet, trying on: %s", error)
        self.id_error = error

    def _refused_producer_id(self, error: BrokerError, code: int) -> None:
        answer = answer_for(INIT_PRODUCER_ID, code)
        if answer is Answer.REPEAT:
            self._no_producer_id(error)
            return
        now = self._time()
        if answer is Answer.DENIED:
            # May be granted later: what waits fails, what comes asks again.
            denied = AuthorizationError(
                "this principal may not use idempotent writes on the cluster "
                "(CLUSTER_AUTHORIZATION_FAILED): grant IDEMPOTENT_WRITE, or set "
                "enable_idempotence=False"
            )
            denied.code = code
            self.abort(str(denied), denied, now)
            return
        self.give_up(error, now)


def _check_size(body: bytes, batches: list[ProducerBatch]) -> None:
    size = len(body)
    if size > _ANSWER_BYTES:
        records = sum(batch.count for batch in batches)
        most = _ANSWER_BYTES + _ANSWER_BYTES_EACH * (len(batches) + records)
        if size > most:
            raise ProtocolError(
                f"an answer of {size} bytes to a Produce request with {records} records: {most} "
                "would be enough for an error with each of them"
            )
