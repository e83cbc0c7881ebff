"""The transactions of a producer at work: requests to coordinators, and calls that wait.

The rules are those of core/transactions.py. `step` is a part of the scheduler's step: it drops
what an abort need not send, and starts the next request if there is one to be made. Each is a
task of its own, one at a time, and records go on leaving beside it.

A call waits until its operation is done, at most `max_block_ms`. Neither that nor a
cancellation stops the operation: the same call again goes on waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from asyncproducer.core.accumulator import Accumulator, Fence
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.delivery import Failure
from asyncproducer.core.sequences import PartitionSequences, TransactionalSequences
from asyncproducer.core.transactions import (
    SEND_OFFSETS,
    START,
    Kind,
    MarkerPause,
    Offsets,
    Operation,
    TransactionManager,
    TransactionState,
    TxnRequest,
)
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import (
    IllegalStateError,
    KafkaError,
    ProducerClosed,
    RecordError,
    TransactionAborted,
    TransactionTimeout,
    again,
)
from asyncproducer.logs import guarded
from asyncproducer.net.waiting import Changes

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.batch import ProducerBatch
    from asyncproducer.core.metrics import Metrics
    from asyncproducer.intake import Intake
    from asyncproducer.net.buffer_pool import BufferPool
    from asyncproducer.net.cluster import Cluster
    from asyncproducer.net.scheduler import Scheduler
    from asyncproducer.records import ConsumerGroupMetadata

__all__ = ["Transactions"]

logger = guarded("asyncproducer.transactions")

_S = TransactionState

#: The level of the feature `transaction.version` with which KIP-890 begins.
_VERSION_TWO = 2
#: From this version of Produce on, a batch adds its partition to the transaction.
_PRODUCE_ADDS_PARTITIONS = 12
#: From this version of InitProducerId on, a producer can ask for its next epoch (KIP-360).
_BUMPS_EPOCH = 3


class Transactions:
    """The transactions of one producer. `attach` completes it."""

    def __init__(
        self,
        config: ProducerConfig,
        cluster: Cluster,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        random: Callable[[], float],
    ) -> None:
        self._manager = TransactionManager(
            config.transactional_id or "",
            config.transaction_timeout_ms,
            version_two=lambda: cluster.features.get("transaction.version", 0) >= _VERSION_TWO,
            backoff=ExponentialBackoff(
                config.retry_backoff_ms / 1000,
                config.retry_backoff_max_ms / 1000,
                random=random,
            ),
        )
        self._cluster = cluster
        self._loop = loop
        self._metrics = metrics
        self._max_block = config.max_block_ms / 1000
        self._request_timeout = config.request_timeout_ms / 1000
        self._changes = Changes(loop)
        self._pause = MarkerPause()
        #: The transaction that was open when the producer was closed.
        self._cut_off = 0
        #: Called by who asks for the abort of the open transaction.
        self._on_abort: Callable[[], None] | None = None
        #: The state whose consequences are drawn.
        self._state = self._manager.state
        self._accumulator: Accumulator
        self._scheduler: Scheduler
        self._intake: Intake
        self._pool: BufferPool

    def attach(
        self, accumulator: Accumulator, scheduler: Scheduler, intake: Intake, pool: BufferPool
    ) -> None:
        """What it works on: these know of it, too."""
        self._accumulator = accumulator
        self._scheduler = scheduler
        self._intake = intake
        self._pool = pool

    @property
    def sequences(self) -> TransactionalSequences:
        """Producer id, epoch and numbers."""
        return self._manager.sequences

    @property
    def transactional_id(self) -> str:
        """Whose transactions these are now."""
        return self._manager.transactional_id

    @property
    def coordinators(self) -> dict[tuple[int, str], int]:
        """Brokers by what they coordinate; who learns of another one changes it."""
        return self._manager.coordinators

    @property
    def wake_at(self) -> float:
        """When the next request is due, if nothing happens before."""
        return self._manager.wake_at

    @property
    def number(self) -> int:
        """How many transactions were begun."""
        return self._manager.number

    @property
    def lacks_epoch(self) -> bool:
        """Whether no other transaction can begin before an abort has asked for an epoch."""
        return self._manager.lacks_epoch

    def is_unfinished(self, number: int) -> bool:
        """Whether the transaction of this number has no end yet, or will never have one."""
        manager = self._manager
        if number != manager.number:
            return False
        return manager.is_open or manager.state is _S.FATAL_ERROR or number == self._cut_off

    def check(self, call: str) -> None:
        """Raise if a call (of those in core/transactions.py) is not allowed now."""
        self._manager.check(call)

    # -- calls -----------------------------------------------------------------------------

    async def initialize(self, deadline: float) -> None:
        """Get producer id and epoch, and fence whoever has had the transactional id."""
        began = self._loop.time()
        operation = self._manager.initialize()
        self._go(began)
        await self._wait(operation, deadline)
        self._metrics.transaction_called("init", self._loop.time() - began)

    async def take_over(self, transactional_id: str, deadline: float) -> None:
        """`initialize` again, between two transactions: as the producer of this id."""
        operation = self._manager.take_over(transactional_id)
        # When it is done, no markers are left to be written.
        self._pause = MarkerPause()
        self._go(self._loop.time())
        await self._wait(operation, deadline)

    def begin(self, on_abort: Callable[[], None] | None = None) -> None:
        """Open a transaction. `on_abort` is called by who asks for its abort."""
        began = self._loop.time()
        self._manager.begin()
        self._on_abort = on_abort
        self._scheduler.produce_cap = (
            None if self._manager.version_two else _PRODUCE_ADDS_PARTITIONS - 1
        )
        hold_until = self._pause.begun(began)
        if self._manager.version_two and hold_until > began:
            self._manager.holds = True
            self._loop.call_at(hold_until, self._release)
        self._follow(began)
        self._metrics.transaction_called("begin", self._loop.time() - began)

    def _release(self) -> None:
        """The markers of the last transaction should be written now."""
        now = self._loop.time()
        self._accumulator.touch_partitions(self._manager.release(), now)
        self._scheduler.try_step(now)

    def gather(self, node: int, now: float) -> None:
        """Something is about to go to a broker. Before `sent`."""
        if self._manager.adds_at(node):
            self._accumulator.gather(node, self._manager.is_new, now)

    def sent(self, node: int, batches: Iterable[ProducerBatch]) -> bool:
        """These are about to go to a broker. Whether that adds partitions: `added` must follow."""
        return self._manager.sent(node, map(self._accumulator.sequences_of, batches))

    def added(self, node: int, now: float) -> None:
        """That broker has answered, or cannot any more."""
        self._accumulator.touch_partitions(self._manager.added(node), now)

    def produced(self, latency: float, *, refused: bool) -> None:
        """Produce was answered; `refused`: because of the last transaction's markers."""
        self._pause.answered(latency, refused=refused)

    async def send_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> None:
        """Commit a group's offsets with the transaction."""
        began = self._loop.time()
        if not offsets:
            self._manager.check(SEND_OFFSETS)
            return
        operation = self._manager.send_offsets(offsets, group)
        await self._call("send_offsets", operation, began)

    async def commit(self) -> None:
        """Commit the transaction."""
        began = self._loop.time()
        await self._call("commit", self._manager.commit(), began)

    async def abort(self) -> None:
        """Abort the transaction."""
        began = self._loop.time()
        # Else it only asks for an epoch.
        of_transaction = self._manager.is_open
        operation = self._manager.abort()
        if self._on_abort is not None and of_transaction:
            self._on_abort()
        await self._call("abort", operation, began)

    def leave_abort(self) -> None:
        """Nobody asks again for an abort that has no end yet."""
        self._manager.leave_abort()

    async def _call(self, name: str, operation: Operation, began: float) -> None:
        ended_before = operation.done
        self._go(began)
        if operation.done and not ended_before:
            await self._others(operation)
        await self._wait(operation, began + self._max_block)
        self._metrics.transaction_called(name, self._loop.time() - began)

    def _go(self, now: float) -> None:
        self._follow(now)
        self._scheduler.try_step(now)

    async def _wait(self, operation: Operation, deadline: float) -> None:
        if not operation.done and deadline <= self._loop.time():
            await asyncio.sleep(0)  # who does not wait and asks again lets it go on all the same
        while not operation.done:
            if self._loop.time() >= deadline:
                raise self._timeout(operation)
            await self._changes.wait(deadline)
        self._manager.observed(operation)
        if operation.error is not None:
            raise again(operation.error)

    async def _others(self, operation: Operation) -> None:
        """No broker was asked. What was begun within the transaction, and has not had its turn yet,
        has it now: it is not to run in the next one."""
        manager = self._manager
        number = manager.number
        manager.observed(operation)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if manager.number == number:
                manager.not_observed(operation)
            raise

    def _timeout(self, operation: Operation) -> TransactionTimeout:
        text = f"{operation.name}() has no end after {self._max_block:g} s (max_block_ms)"
        trouble = self._manager.trouble
        if trouble is not None:
            text += f": {trouble}"
        if operation.name != START:
            text += f"; it goes on, call {operation.name}() again to wait for it"
        error = TransactionTimeout(text)
        error.__cause__ = trouble
        return error

    # -- what happens to records -----------------------------------------------------------

    def batch_failed(self, batch: ProducerBatch, failure: Failure) -> None:
        """A batch failed: nothing of the transaction counts. In the middle of a change."""
        if not self._manager.is_doomed:
            self._doom(failure.exception(batch.topic, batch.partition, 0))

    def refused(self, error: BaseException) -> None:
        """A record was refused before it was buffered."""
        if isinstance(error, KafkaError):
            what = _shown(error, str)
            if what is not None:
                self._doom(error)
                return
        refusal = RecordError(
            f"a record was refused: {_shown(error, repr) or type(error).__name__}"
        )
        refusal.__cause__ = error
        self._doom(refusal)

    def _doom(self, error: KafkaError) -> None:
        self._manager.abortable(error)
        if self._manager.state is not _S.IN_TRANSACTION:
            self._intake.shut()
        # The rest is for the next step: somebody is in the middle of something here.
        self._scheduler.wake()

    def fenced(self, request: str) -> KafkaError:
        """What is wrong where a broker says that there is another producer."""
        return self._manager.fenced(request)

    def fatal(self, error: KafkaError) -> None:
        """The producer has failed for good."""
        self._manager.fatal(error)
        self._state = self._manager.state
        self._intake.shut()
        self._changes.tell()

    # -- steps -----------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Do what can be done now: drop what is not to be sent, and make the next request."""
        manager = self._manager
        self._follow(now)
        if manager.is_doomed:
            self._drop(now)
        request = manager.next_request(now, busy=manager.is_ending and self._is_busy())
        if request is not None:
            self._scheduler.spawn(self._perform(request))
        self._follow(now)

    def _is_busy(self) -> bool:
        """Whether records of the transaction may still reach a broker."""
        intake = self._intake
        if self._accumulator.incomplete or intake.waiting or self._pool.waiting:
            return True
        if intake.serializing and not self._manager.is_doomed:
            return True
        # Also what was given up while it was on its way.
        return any(partition.owner.in_flight for partition in self._manager.partitions)

    def _drop(self, now: float) -> None:
        """Whatever is not on its way goes nowhere."""
        cause = self._manager.error
        what = (
            "the transaction was aborted" if cause is None else f"the transaction failed: {cause}"
        )
        if self._intake.waiting or self._pool.waiting:
            refusal = TransactionAborted(f"{what}; the record was waiting and was not sent")
            refusal.__cause__ = cause
            self._intake.refuse_waiting(refusal)
        for batch in self._accumulator.abort(what, cause, now, self._is_kept):
            batch.observed = batch.count  # who aborts knows
            self._metrics.records_failed(batch.topic, batch.count)

    def _is_kept(self, batch: ProducerBatch) -> bool:
        """Whether a batch goes on to its own end, though nothing of the transaction counts."""
        if batch.in_flight:
            return True
        if self._manager.can_bump or self._manager.version_two or batch.base_sequence < 0:
            return False
        # The next transaction has the same epoch: we must know what the broker has.
        return self._accumulator.sequences_of(batch).is_before_hole(batch)

    def _follow(self, now: float) -> None:
        """Draw the consequences of another state."""
        state, before = self._manager.state, self._state
        if state is before:
            return
        self._state = state
        if state is _S.IN_TRANSACTION:
            self._intake.open()
        else:
            self._intake.shut(late=state is _S.COMMITTING)
        if state is _S.COMMITTING:
            # Nothing lingers, nor does what still waits for room.
            self._accumulator.begin_flush(Fence(lambda: None), now)
        elif before is _S.COMMITTING:
            self._accumulator.end_flush()
        if state is _S.FATAL_ERROR and self._manager.error is not None:
            self._scheduler.give_up(self._manager.error, now)
        self._changes.tell()

    async def _perform(self, request: TxnRequest) -> None:
        manager, loop = self._manager, self._loop
        joined: Iterable[PartitionSequences] = ()
        asked_at = loop.time()
        try:
            if request.wire is None:
                raise IllegalStateError(f"{request} has nothing to send")
            response = await self._cluster.request(
                request.wire,
                deadline=loop.time() + self._request_timeout,
                node_id=request.node,
                once=request.node is not None,
            )
            self._look_at(request.node)
            joined = manager.answered(request, response, loop.time())
            if request.kind is Kind.END:
                self._pause.ended(asked_at, loop.time())
        except Exception as error:
            if isinstance(error, KafkaError) and not isinstance(error, IllegalStateError):
                manager.failed(request, error, loop.time())
            else:
                # A bug of ours: nothing can be trusted any more (Java does the same, KAFKA-14831).
                logger.exception("a transaction has lost its way")
                lost = IllegalStateError(f"the transaction has lost its way: {error}")
                lost.__cause__ = error
                manager.fatal(lost)
        now = loop.time()
        self._accumulator.touch_partitions(joined, now)
        self._follow(now)
        self._changes.tell()
        self._scheduler.try_step(now)

    def _look_at(self, coordinator: int | None) -> None:
        if coordinator is not None:
            newest = self._cluster.highest_version(coordinator, ApiKey.INIT_PRODUCER_ID)
            if newest is not None:
                self._manager.can_bump = newest >= _BUMPS_EPOCH

    # -- the end ---------------------------------------------------------------------------

    async def finish(self) -> None:
        """The producer is being closed: abort what is open, or wait for the end it is to have."""
        manager = self._manager
        while True:
            manager.give_up_ending()
            if manager.is_open and not manager.is_ending:
                # Also where it was to be committed, and could not.
                self._cut_off = manager.number
                manager.abort()
                self._go(self._loop.time())
            if not manager.is_ending:
                return
            await self._changes.wait(inf)

    @property
    def is_committing(self) -> bool:
        """Whether somebody has asked for a commit that has no end yet."""
        return self._manager.state is _S.COMMITTING

    def close(self) -> None:
        """Nothing is asked any more. Who waits gets ProducerClosed."""
        self._manager.close(
            ProducerClosed("the producer was closed before the end of the transaction was known")
        )
        self._changes.tell()


def _shown(error: BaseException, how: Callable[[BaseException], str]) -> str | None:
    """None where the user's own exception cannot be shown: it may raise then, too."""
    try:
        return how(error)
    except Exception:
        return None
