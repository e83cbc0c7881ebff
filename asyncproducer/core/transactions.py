"""Transactions: the state machine, and the requests that it has to make, in their order.

Between `begin` and `commit` a partition joins the transaction with its first batch. In
version 1 the coordinator is told before the batch may leave (AddPartitionsToTxn). In version
2 (KIP-890) nobody is: the Produce request adds the partition, and ending a transaction gives
the next one another epoch, so that nothing late can get into it. The cluster decides which
version it is (`transaction.version`, a finalized feature). A transaction has one version from
its beginning to its end; the end is where it may change for the next one.

Whatever fails within a transaction makes it abortable: a record, a record that `send`
refused, an offset. Then it can only be aborted: it never commits over a failed record. After
that the next transaction is as good as any. What nobody can mend is fatal.

There is one request at a time (Java does the same): the coordinator would refuse most pairs,
and their order is what the transaction is. `next_request` gives it to whoever can send it,
`answered` or `failed` must follow. The priorities say that everything is added before the end.

Calls that wait get an Operation. It goes on when nobody waits any more: too late, or cancelled.
The same call again then waits for the same Operation, and until its end is known no other
one makes sense.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import inf
from typing import Any

from asyncproducer.core import wire
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.outcome import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    TXN_OFFSET_COMMIT,
    TxnAction,
    txn_action_for,
)
from asyncproducer.core.sequences import PartitionSequences, TransactionalSequences
from asyncproducer.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    ConfigError,
    ErrorCode,
    IllegalStateError,
    KafkaError,
    ProducerClosed,
    ProducerFenced,
    ProtocolError,
    TransactionAborted,
    UnsupportedVersionError,
    again,
)
from asyncproducer.logs import guarded
from asyncproducer.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

__all__ = [
    "ABORT",
    "BEGIN",
    "CALLS",
    "COMMIT",
    "SEND",
    "SEND_OFFSETS",
    "START",
    "TRANSITIONS",
    "Kind",
    "MarkerPause",
    "Offsets",
    "Operation",
    "TransactionManager",
    "TransactionState",
    "TxnRequest",
]

logger = guarded("asyncproducer.transactions")

Offsets = Mapping[TopicPartition, OffsetAndMetadata]

#: A coordinator is that of a transactional id or of a group (FindCoordinator's key types).
Key = tuple[int, str]

#: The first request of a transaction often comes while the markers of the one before are still
#: being written: that takes milliseconds, not a retry_backoff_ms. So it is repeated soon, then
#: after twice as long, up to this (which is Java's only pause, and for AddPartitionsToTxn alone; a
#: transaction with a group's offsets took 110 ms with that here, and takes 8).
_FIRST_MARKERS_SECONDS, _MARKERS_SECONDS = 0.001, 0.02


class TransactionState(Enum):
    """Where a transactional producer is."""

    UNINITIALIZED = "UNINITIALIZED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    IN_TRANSACTION = "IN_TRANSACTION"
    COMMITTING = "COMMITTING"
    ABORTING = "ABORTING"
    ABORTABLE_ERROR = "ABORTABLE_ERROR"
    FATAL_ERROR = "FATAL_ERROR"


_S = TransactionState

#: The legal moves. INITIALIZING is also the way to another epoch, after the end, and to another
#: transactional id.
TRANSITIONS: dict[TransactionState, frozenset[TransactionState]] = {
    _S.UNINITIALIZED: frozenset({_S.INITIALIZING, _S.FATAL_ERROR}),
    _S.INITIALIZING: frozenset({_S.READY, _S.ABORTABLE_ERROR, _S.FATAL_ERROR}),
    _S.READY: frozenset({_S.IN_TRANSACTION, _S.INITIALIZING, _S.FATAL_ERROR}),
    _S.IN_TRANSACTION: frozenset({_S.COMMITTING, _S.ABORTING, _S.ABORTABLE_ERROR, _S.FATAL_ERROR}),
    _S.COMMITTING: frozenset({_S.READY, _S.INITIALIZING, _S.ABORTABLE_ERROR, _S.FATAL_ERROR}),
    _S.ABORTING: frozenset({_S.READY, _S.INITIALIZING, _S.FATAL_ERROR}),
    _S.ABORTABLE_ERROR: frozenset({_S.ABORTING, _S.FATAL_ERROR}),
    _S.FATAL_ERROR: frozenset(),
}

START, BEGIN, SEND = "start", "begin_transaction", "send"
SEND_OFFSETS, COMMIT, ABORT = "send_offsets", "commit_transaction", "abort_transaction"

#: How a transaction is called that has its end.
_PAST = {COMMIT: "committed", ABORT: "aborted"}

#: How a message names a call: all that send come in by one door.
_CALL_NAMES = {SEND: "send() (or enqueue(), send_nowait(), send_many(), send_table())"}

#: The states in which a call is allowed.
CALLS: dict[str, frozenset[TransactionState]] = {
    START: frozenset({_S.UNINITIALIZED}),
    BEGIN: frozenset({_S.READY}),
    SEND: frozenset({_S.IN_TRANSACTION}),
    SEND_OFFSETS: frozenset({_S.IN_TRANSACTION}),
    COMMIT: frozenset({_S.IN_TRANSACTION}),
    ABORT: frozenset({_S.IN_TRANSACTION, _S.ABORTABLE_ERROR}),
}

_HINTS = {
    _S.UNINITIALIZED: "start() comes first",
    _S.READY: "begin_transaction() comes first",
    _S.IN_TRANSACTION: "a transaction is open",
    _S.COMMITTING: "the transaction is being committed",
    _S.ABORTING: "the transaction is being aborted",
    _S.ABORTABLE_ERROR: "abort_transaction() comes first",
    _S.INITIALIZING: "the producer is still getting its producer id",
}


class Kind(Enum):
    """The requests of a transaction. The value's number is their priority: low ones go first.

    A group's coordinator may be away for long. Only its offsets, and the commit, wait for that.
    """

    FIND_COORDINATOR = (0, "FindCoordinator")
    INIT_PRODUCER_ID = (1, "InitProducerId")
    ADD_PARTITIONS = (2, "AddPartitionsToTxn")
    ADD_OFFSETS = (2, "AddOffsetsToTxn")
    COMMIT_OFFSETS = (4, "TxnOffsetCommit")
    END = (5, "EndTxn")
    #: InitProducerId once more, for another epoch.
    BUMP_EPOCH = (6, "InitProducerId for the next epoch")

    @property
    def priority(self) -> int:
        """Low ones go first."""
        return self.value[0]


#: The priority of finding a group's coordinator.
_FIND_GROUP = 3
#: What may be the first of a transaction, and meet the markers of the one before.
_MEET_MARKERS = (Kind.ADD_PARTITIONS, Kind.ADD_OFFSETS, Kind.COMMIT_OFFSETS)
#: What is about the open transaction, and of no use when that can only be aborted.
_OF_A_TRANSACTION = (*_MEET_MARKERS, Kind.END)


class Operation:
    """What a call waits for: until `done`, then `error` says how it ended."""

    __slots__ = ("arguments", "done", "error", "left", "name")

    def __init__(self, name: str, arguments: Any = None) -> None:
        self.name = name
        self.arguments = arguments
        self.done = False
        self.error: KafkaError | None = None
        #: Whether nobody will ask for its end.
        self.left = False

    def finish(self, error: KafkaError | None = None) -> None:
        """The first end counts."""
        if not self.done:
            self.done = True
            self.error = error

    def __repr__(self) -> str:
        return f"<Operation {self.name} {'done' if self.done else 'under way'} {self.error or ''}>"


class TxnRequest:
    """One request, from the moment it is needed to its answer."""

    __slots__ = (
        "attempts",
        "commit",
        "doubtful",
        "group",
        "key",
        "kind",
        "node",
        "not_before",
        "number",
        "offsets",
        "operation",
        "partitions",
        "priority",
        "wire",
    )

    def __init__(
        self,
        kind: Kind,
        number: int,
        key: Key | None,
        operation: Operation | None,
        *,
        partitions: tuple[PartitionSequences, ...] = (),
        group: ConsumerGroupMetadata | None = None,
        offsets: Offsets | None = None,
        commit: bool = False,
        not_before: float = -inf,
    ) -> None:
        self.kind = kind
        of_group = key is not None and key[0] == wire.FindCoordinatorRequest.GROUP
        finds_group = kind is Kind.FIND_COORDINATOR and of_group
        self.priority = _FIND_GROUP if finds_group else kind.priority
        self.number = number
        #: Who coordinates what it is about; of FindCoordinator, who is to be found.
        self.key = key
        self.operation = operation
        self.partitions = partitions
        self.group = group
        self.offsets = dict(offsets or {})
        self.commit = commit
        self.attempts = 0
        #: Whether an attempt may have had success, though its answer does not say so.
        self.doubtful = False
        #: It is a repetition, or was refused before, and waits until then.
        self.not_before = not_before
        #: The broker to send it to, None for any, and what to send.
        self.node: int | None = None
        self.wire: wire.Request[Any] | None = None

    def __lt__(self, other: TxnRequest) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)

    @property
    def is_of_offsets(self) -> bool:
        """Whether it is for a group's offsets, which an abort has no use for."""
        return self.kind is Kind.COMMIT_OFFSETS or self.priority == _FIND_GROUP

    def __repr__(self) -> str:
        return f"<TxnRequest {self.kind.value[1]} to {self.node} attempts={self.attempts}>"


def _place(partition: PartitionSequences) -> TopicPartition:
    return TopicPartition(partition.owner.topic.name, partition.owner.partition)


class MarkerPause:
    """For how long after the end of a transaction its markers are still being written.

    So long a broker keeps the first batch of the next one waiting, but it looks again only after
    20 ms (version 2; add.partitions.to.txn.retry.backoff.ms). A moment of patience here, in which
    batches grow, spares that. How long a moment is learned: longer when a broker had to wait, a
    little shorter when it had not.
    """

    #: Bounds in seconds: the first guess, and what is not worth more.
    LEAST, MOST = 0.001, 0.02
    #: An answer that took so much longer than that to EndTxn has waited.
    _WAITED = 0.015

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended_at = -inf
        self._latency = 0.0
        self._learns = False

    def ended(self, asked_at: float, now: float) -> None:
        """A transaction has ended; the request was made at `asked_at`."""
        self._ended_at = now
        self._latency = now - asked_at

    def begun(self, now: float) -> float:
        """A transaction begins. Returns the time until which it is better to wait."""
        # Later than that, what a broker waits for are no markers.
        self._learns = now < self._ended_at + self.MOST
        return self._ended_at + self.seconds

    def answered(self, latency: float, *, refused: bool) -> None:
        """Produce was answered: the first time in a transaction something is learned."""
        if not self._learns:
            return
        self._learns = False
        if refused or latency > self._latency + self._WAITED:
            self.seconds = min(max(self.seconds * 1.5, self.LEAST), self.MOST)
        else:
            self.seconds *= 0.99


class TransactionManager:
    """The transactions of one producer, one after the other.

    `version_two`: asks whether the cluster has version 2 now. `can_bump` is to be set as soon as
    it is known whether the coordinator gives new epochs (InitProducerId 3).
    """

    def __init__(
        self,
        transactional_id: str,
        timeout_ms: int,
        *,
        version_two: Callable[[], bool],
        backoff: ExponentialBackoff,
    ) -> None:
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.state = _S.UNINITIALIZED
        #: Why the transaction can only be aborted, or why the producer is of no use any more.
        self.error: KafkaError | None = None
        #: Of the transaction that is open, or of the next.
        self.version_two = False
        self.can_bump = False
        self.sequences = TransactionalSequences(self._joins)
        #: How many transactions were begun.
        self.number = 0
        #: When `next_request` has something again at the latest, if nothing happens before.
        self.wake_at = inf
        #: Why the last request is being repeated.
        self.trouble: KafkaError | None = None
        #: Brokers that coordinate transactional ids and groups, as far as it is known.
        self.coordinators: dict[Key, int] = {}
        self._ask_version = version_two
        self._backoff = backoff
        self._me: Key = (wire.FindCoordinatorRequest.TRANSACTION, transactional_id)
        #: The end of a transaction that somebody must hear of.
        self._ending: Operation | None = None
        self._offsets: list[Operation] = []
        #: The last of them, which who asks again for the same waits for.
        self._last_offsets: Operation | None = None
        self._queue: list[TxnRequest] = []
        self._requests = 0
        self._in_flight: TxnRequest | None = None
        #: Whether the broker may know of the transaction.
        self._started = False
        #: Whether something was asked for that makes it so, whatever the answer.
        self._asked = False
        #: Whether a broker may have committed it: what comes now is not of it any more.
        self._decided = False
        #: "committed" or "aborted", where that is done, and the epoch for the next one was refused.
        self._over = ""
        #: How often it was refused, and when it is asked for again at the earliest.
        self._refusals = 0
        self._refused_until = -inf
        self._needs_bump = False
        #: Whether one of its requests that got no answer would do harm in the next transaction.
        self._may_harm = False
        self._partitions: dict[PartitionSequences, None] = {}
        self._new: dict[PartitionSequences, None] = {}
        self._pending: set[PartitionSequences] = set()
        #: Whether partitions that come now join a moment later, and which do.
        self.holds = False
        self._held: dict[PartitionSequences, None] = {}
        #: Partitions that have joined and whose first batch has not left (version 2).
        self._joined: dict[PartitionSequences, None] = {}
        #: Brokers that have yet to answer the first batch of some partition, and how many requests.
        self._adding: dict[int, int] = {}

    # -- states ----------------------------------------------------------------------------

    def _move(self, to: TransactionState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise IllegalStateError(
                f"a transactional producer that is {self.state.name} cannot become {to.name}"
            )
        logger.debug("%s: %s -> %s", self.transactional_id, self.state.name, to.name)
        self.state = to

    def check(self, call: str) -> None:
        """Raise if `call` is not allowed now. Whatever is raised names the call and the state."""
        state, ending = self.state, self._ending
        if ending is not None and ending.left and ending.done:
            self._ending = ending = None
        if ending is None and state in CALLS[call]:
            return
        refused = f"{_CALL_NAMES.get(call, f'{call}()')} is not allowed in state {state.name}: "
        if state is _S.FATAL_ERROR and self.error is not None:
            error = again(self.error)
            error.args = (f"{refused}{self.error}",)
            raise error
        if ending is not None and (ending.error is None or call != ABORT):
            raise IllegalStateError(
                f"{refused}the end of {ending.name}() is not known yet; call {ending.name}() again "
                "to wait for it"
            )
        aborts = state is _S.ABORTABLE_ERROR and self._over != _PAST[COMMIT]
        if aborts and call in (SEND, SEND_OFFSETS, COMMIT):
            raise self.aborted(refused)
        if state not in CALLS[call]:
            error = IllegalStateError(refused + (self._lacking() or _HINTS[state]))
            error.__cause__ = self.error if self._over else None
            raise error

    def aborted(self, refused: str = "") -> TransactionAborted:
        """The error of calls in a transaction that can only be aborted; `refused` begins it."""
        what = self._lacking() or (
            f"the transaction cannot be committed: {self.error}; abort_transaction(), then begin "
            "another one"
        )
        error = TransactionAborted(refused + what)
        if self.error is not None:
            error.code = self.error.code
            error.__cause__ = self.error
        return error

    @property
    def _past(self) -> str:
        """What became of the transaction, where only the epoch for the next one is missing."""
        if self.state is not _S.INITIALIZING or self._ending is None:
            return ""
        return self._over or _PAST.get(self._ending.name, "")

    def _lacking(self) -> str:
        """What is wrong where the last transaction has its end, and the next one no epoch."""
        return self._over and (
            f"the last transaction was {self._over}, but there is no epoch for the next one: "
            f"{self.error}; abort_transaction() asks for it again"
        )

    @property
    def lacks_epoch(self) -> bool:
        """Whether an abort comes next, though no transaction is open: it asks for the epoch.

        Not while somebody is to ask for the end of the last one.
        """
        is_known = self._ending is None or self._ending.left
        return self.state is _S.ABORTABLE_ERROR and bool(self._over) and is_known

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that has no end yet."""
        return not self._over and self.state in (
            _S.IN_TRANSACTION,
            _S.COMMITTING,
            _S.ABORTING,
            _S.ABORTABLE_ERROR,
        )

    @property
    def is_ending(self) -> bool:
        """Whether the end of a transaction is on its way."""
        return self._ending is not None and not self._ending.done

    @property
    def is_doomed(self) -> bool:
        """Whether nothing of the open transaction counts any more."""
        return self.state in (_S.ABORTING, _S.ABORTABLE_ERROR)

    @property
    def partitions(self) -> Iterable[PartitionSequences]:
        """Those that are in the transaction."""
        return self._partitions

    # -- calls -----------------------------------------------------------------------------

    def initialize(self) -> Operation:
        """Ask for producer id and epoch. Fences whoever has the transactional id now."""
        self.check(START)
        return self._initialize()

    def take_over(self, transactional_id: str) -> Operation:
        """`initialize` again, between two transactions, under this id or another one."""
        self.check(BEGIN)
        self.transactional_id = transactional_id
        self._me = (wire.FindCoordinatorRequest.TRANSACTION, transactional_id)
        return self._initialize()

    def _initialize(self) -> Operation:
        self._move(_S.INITIALIZING)
        self._ending = Operation(START)
        self._push(Kind.INIT_PRODUCER_ID, self._me, self._ending)
        return self._ending

    def begin(self) -> None:
        """Open a transaction. No broker hears of it yet."""
        self.check(BEGIN)
        self._move(_S.IN_TRANSACTION)
        self.number += 1

    def send_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> Operation:
        """Commit a group's offsets with the transaction."""
        self.check(SEND_OFFSETS)
        arguments = (offsets, group)
        last = self._last_offsets
        if last is not None and last.arguments == arguments:
            return last
        operation = Operation(SEND_OFFSETS, arguments)
        self._offsets.append(operation)
        self._last_offsets = operation
        if self.version_two:
            # Whatever becomes of it, the coordinator may have heard of the transaction.
            self._started = True
            self._push_offsets(operation)
        else:
            self._push(Kind.ADD_OFFSETS, self._me, operation, group=group)
        return operation

    def _push_offsets(self, operation: Operation) -> None:
        offsets, group = operation.arguments
        key = (wire.FindCoordinatorRequest.GROUP, group.group_id)
        self._push(Kind.COMMIT_OFFSETS, key, operation, group=group, offsets=offsets)

    def commit(self) -> Operation:
        """Commit, as soon as all records have their end."""
        return self._end(COMMIT, _S.COMMITTING)

    def abort(self) -> Operation:
        """Abort, as soon as nothing is on its way any more."""
        operation = self._end(ABORT, _S.ABORTING)
        self._new.clear()
        # The offsets of an aborted transaction are of no use. What adds something to it must get
        # its answer first: else nobody knew whether there is something to abort.
        self._drop_queued()
        return operation

    def _end(self, call: str, state: TransactionState) -> Operation:
        ending = self._ending
        if ending is not None and ending.name == call and not self.lacks_epoch:
            return ending
        self.check(call)
        self._move(state)
        self._ending = Operation(call)
        self._push(Kind.END, self._me, self._ending, commit=call == COMMIT)
        return self._ending

    def observed(self, operation: Operation) -> None:
        """Somebody knows how it ended."""
        if operation is self._ending:
            self._ending = None
        if operation in self._offsets:
            self._offsets.remove(operation)
        if operation is self._last_offsets:
            self._last_offsets = None

    def not_observed(self, operation: Operation) -> None:
        """Who was about to know how a transaction ended was cancelled: the same call tells it."""
        if self._ending is None and operation.name in (COMMIT, ABORT):
            self._ending = operation

    def leave_abort(self) -> None:
        """Nobody will ask for the end of the abort that is under way: what it does is clear."""
        if self._ending is not None and self._ending.name == ABORT:
            self._ending.left = True

    def give_up_ending(self) -> None:
        """Nobody will ask for the end of the last call any more: the producer is being closed."""
        if self._ending is not None and self._ending.done:
            self._ending = None

    # -- the record path -------------------------------------------------------------------

    def _joins(self, partition: PartitionSequences) -> bool:
        if partition in self._partitions:
            return True
        if self.state is not _S.IN_TRANSACTION and self.state is not _S.COMMITTING:
            return False
        if self.holds or (self._adding and partition.owner.leader in self._adding):
            self._held[partition] = None
            return False
        if self.version_two:
            self._partitions[partition] = None
            self._joined[partition] = None
            self._started = True
            return True
        if partition not in self._pending:
            self._new[partition] = None
        return False

    def release(self) -> Iterable[PartitionSequences]:
        """The moment is over. Returns the partitions that may join now."""
        self.holds = False
        return self._released()

    def _released(self) -> Iterable[PartitionSequences]:
        held, self._held = self._held, {}
        return held

    def adds_at(self, node: int) -> bool:
        """Whether the next request to that broker adds a partition, and no other one is under way
        that does."""
        return node not in self._adding and any(
            partition.owner.leader == node for partition in self._joined
        )

    def is_new(self, partition: PartitionSequences) -> bool:
        """Whether it is not in the transaction yet."""
        return partition not in self._partitions

    def sent(self, node: int, partitions: Iterable[PartitionSequences]) -> bool:
        """Batches of these are on their way to a broker. Returns whether it adds one of them.

        Then `added` must follow. Until then no other one joins there: the broker asks the
        coordinator, which takes some milliseconds, and reads no other request of ours meanwhile.
        So what comes next may as well be in one request.
        """
        if not self._joined:
            return False
        new = [partition for partition in partitions if partition in self._joined]
        for partition in new:
            del self._joined[partition]
        if new:
            self._adding[node] = self._adding.get(node, 0) + 1
        return bool(new)

    def added(self, node: int) -> Iterable[PartitionSequences]:
        """The broker has answered, or cannot any more. Returns the partitions that may join now."""
        left = self._adding[node] - 1
        if left:
            self._adding[node] = left
            return ()
        del self._adding[node]
        return self._released()

    # -- errors ----------------------------------------------------------------------------

    def abortable(self, error: KafkaError) -> None:
        """Something of the transaction failed: it can only be aborted."""
        if self.state not in (_S.IN_TRANSACTION, _S.COMMITTING) or self._decided:
            # Its end is under way, or the first error is known already.
            logger.debug("%s: in state %s: %s", self.transactional_id, self.state.name, error)
            return
        if self.sequences.uncertain and not (self.can_bump or self.version_two):
            self.fatal(_too_old(str(error)))
            return
        self._move(_S.ABORTABLE_ERROR)
        self.error = error
        self._needs_bump = self._needs_bump or (self._asked and not self.version_two)
        self._new.clear()
        self._drop_queued(*_OF_A_TRANSACTION)
        if self._ending is not None:
            self._ending.finish(self.aborted())

    def fatal(self, error: KafkaError) -> None:
        """Nothing can be sent any more."""
        if self.state is _S.FATAL_ERROR:
            return
        if self._past and self._ending is not None and self._ending.name == COMMIT:
            self._ending.finish()  # what is committed is so: the next call tells the rest
        self._move(_S.FATAL_ERROR)
        self.error = error
        self.close(error)

    def close(self, error: KafkaError) -> None:
        """No further request is made, and who waits gets `error`."""
        self.wake_at = inf
        self._queue.clear()
        self._new.clear()
        ending = self._ending
        if ending is not None and self._past:
            ending.finish()  # that is done, only the next epoch was missing
        for operation in (ending, *self._offsets):
            if operation is not None:
                operation.finish(error)

    # -- requests --------------------------------------------------------------------------

    def _push(self, kind: Kind, key: Key | None, operation: Operation | None, **more: Any) -> None:
        self._requests += 1
        heapq.heappush(self._queue, TxnRequest(kind, self._requests, key, operation, **more))

    def next_request(self, now: float, *, busy: bool) -> TxnRequest | None:
        """What to send now, if anything.

        `busy`: whether records of the transaction are still on their way, or may come yet.
        """
        self.wake_at = inf
        if self._in_flight is not None:
            return None
        if self._new:
            partitions = tuple(self._new)
            self._new.clear()
            self._pending.update(partitions)
            self._push(Kind.ADD_PARTITIONS, self._me, None, partitions=partitions)
        while self._queue:
            request = self._queue[0]
            finds = request.kind is Kind.FIND_COORDINATOR
            if request.kind is Kind.END:
                if busy:
                    return None
                if not self._started:
                    heapq.heappop(self._queue)
                    self._ended(request.operation)
                    continue
            if not finds and request.key is not None and request.key not in self.coordinators:
                self._push(Kind.FIND_COORDINATOR, request.key, None, not_before=self._refused_until)
                continue
            if request.not_before > now:
                self.wake_at = request.not_before
                return None
            self._in_flight = heapq.heappop(self._queue)
            request.node = None
            if not finds and request.key is not None:
                request.node = self.coordinators[request.key]
            request.wire = self._encode(request)
            if request.kind in (Kind.ADD_PARTITIONS, Kind.ADD_OFFSETS):
                self._asked = True
            elif request.kind is Kind.END:
                self._decided = True
            return request
        return None

    def _encode(self, request: TxnRequest) -> wire.Request[Any]:
        kind = request.kind
        if kind is Kind.FIND_COORDINATOR and request.key is not None:
            key_type, key = request.key
            return wire.FindCoordinatorRequest(key_type, [key])
        mine = (
            self.transactional_id,
            self.sequences.producer_id,
            self.sequences.producer_epoch,
        )
        if kind is Kind.INIT_PRODUCER_ID:
            return wire.InitProducerIdRequest(self.transactional_id, self.timeout_ms)
        if kind is Kind.BUMP_EPOCH:
            return wire.InitProducerIdRequest(self.transactional_id, self.timeout_ms, *mine[1:])
        if kind is Kind.ADD_PARTITIONS:
            return wire.AddPartitionsToTxnRequest(*mine, map(_place, request.partitions))
        if kind is Kind.END:
            return wire.EndTxnRequest(*mine, commit=request.commit, version_two=self.version_two)
        if request.group is None:
            raise IllegalStateError(f"{kind.name} without a group")
        if kind is Kind.ADD_OFFSETS:
            return wire.AddOffsetsToTxnRequest(*mine, request.group.group_id)
        return wire.TxnOffsetCommitRequest(
            *mine, request.group, request.offsets, version_two=self.version_two
        )

    def _drop_queued(self, *kinds: Kind) -> None:
        """Forget the requests for offsets, and those of these kinds."""
        dropped = [each for each in self._queue if each.is_of_offsets or each.kind in kinds]
        self._queue = [each for each in self._queue if each not in dropped]
        heapq.heapify(self._queue)
        for request in dropped:
            self._drop(request)

    def _drop(self, request: TxnRequest) -> None:
        """It is not sent (again): the transaction will be aborted."""
        self._pending.difference_update(request.partitions)
        if request.operation is not None:
            request.operation.finish(self._why_dropped())

    def _why_dropped(self) -> TransactionAborted:
        if self.error is not None:
            return self.aborted()
        return TransactionAborted("the transaction was aborted meanwhile")

    def _repeat(
        self, request: TxnRequest, error: KafkaError, now: float, most: float = inf
    ) -> None:
        given_up = self.state is _S.ABORTABLE_ERROR and request.kind in _OF_A_TRANSACTION
        if given_up or (self.is_doomed and request.is_of_offsets):
            self._drop(request)
            return
        level = logging.WARNING if request.attempts == 0 else logging.DEBUG
        if isinstance(error, BrokerError):
            level = logging.DEBUG
        self.trouble = error
        request.not_before = now + min(self._backoff.delay(request.attempts), most)
        request.attempts += 1
        heapq.heappush(self._queue, request)
        # Last of all: what handles it may raise.
        logger.log(
            level, "%s: %s is repeated: %s", self.transactional_id, request.kind.value[1], error
        )

    # -- answers ---------------------------------------------------------------------------

    def failed(self, request: TxnRequest, error: KafkaError, now: float) -> None:
        """No answer: the coordinator is looked for again."""
        self._in_flight = None
        if self.state is _S.FATAL_ERROR or isinstance(error, ProducerClosed):
            return
        if isinstance(error, (UnsupportedVersionError, ConfigError, AuthenticationError)):
            self._fatal_for(request, error)
            return
        request.doubtful = True
        if request.kind in _OF_A_TRANSACTION and not self.version_two:
            # It may arrive yet, in the next transaction: there it must have an older epoch.
            self._needs_bump = True
            self._may_harm = self._may_harm or request.kind in (Kind.COMMIT_OFFSETS, Kind.END)
        self._lose_coordinator(request)
        self._repeat(request, error, now)

    def _lose_coordinator(self, request: TxnRequest) -> None:
        if request.kind is not Kind.FIND_COORDINATOR and request.key is not None:
            self.coordinators.pop(request.key, None)

    def answered(
        self, request: TxnRequest, response: Any, now: float
    ) -> Iterable[PartitionSequences]:
        """Take an answer. Returns partitions whose batches may leave now."""
        self._in_flight = None
        if self.state is _S.FATAL_ERROR:
            return ()
        kind = request.kind
        if kind is Kind.FIND_COORDINATOR:
            self._found(request, response, now)
        elif kind is Kind.ADD_PARTITIONS:
            return self._partitions_added(request, response, now)
        elif kind is Kind.COMMIT_OFFSETS:
            self._offsets_committed(request, response, now)
        elif kind is Kind.ADD_OFFSETS:
            if self._is_done(request, ADD_OFFSETS_TO_TXN, response.error_code, now):
                self._started = True
                if self.is_doomed:
                    self._drop(request)
                elif request.operation is not None:
                    self._push_offsets(request.operation)
        elif kind is Kind.END:
            if self._is_done(request, END_TXN, response.error_code, now):
                if response.producer_id >= 0 and response.producer_epoch >= 0:
                    self.sequences.renew(response.producer_id, response.producer_epoch)
                    self._needs_bump = False
                self._ended(request.operation)
        else:
            self._initialized(request, response, now)
        return ()

    def _is_done(
        self,
        request: TxnRequest,
        table: Mapping[int, TxnAction],
        code: int,
        now: float,
        message: str | None = None,
    ) -> bool:
        """Do what the request's table says. True if there is no error."""
        action = txn_action_for(table, code)
        if action is TxnAction.DONE:
            if table is not FIND_COORDINATOR:
                self.trouble = None
            return True
        error = self.error_for(request.kind, code, message)
        if action is TxnAction.BUMP:
            possible = self.can_bump or self.version_two
            action = TxnAction.ABORTABLE if possible else TxnAction.FATAL
        if action in (TxnAction.REPEAT, TxnAction.FIND):
            # Of these, only this one is always said before anything is written.
            if code != ErrorCode.CONCURRENT_TRANSACTIONS:
                request.doubtful = True
        elif request.kind is Kind.END and self._is_in_doubt(request):
            action = TxnAction.FATAL
        if action is TxnAction.FIND:
            self._lose_coordinator(request)
            self._repeat(request, error, now)
        elif action is TxnAction.REPEAT:
            self._repeat(request, error, now, self._most_patience(request, code))
        elif action is TxnAction.ABORTABLE:
            if request.kind is Kind.END:
                self._decided = False
            self._abortable_for(request, error, now)
        else:
            self._fatal_for(request, error)
        return False

    def _most_patience(self, request: TxnRequest, code: int) -> float:
        if code != ErrorCode.CONCURRENT_TRANSACTIONS or request.kind not in _MEET_MARKERS:
            return inf
        if request.kind is Kind.ADD_PARTITIONS and self._partitions:
            return inf  # the markers are written
        return min(_FIRST_MARKERS_SECONDS * 2.0 ** min(request.attempts, 10), _MARKERS_SECONDS)

    def error_for(self, kind: Kind, code: int, message: str | None = None) -> KafkaError:
        """The error of a code in the answer to a request."""
        name = kind.value[1]
        if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
            message = (
                f"transaction_timeout_ms={self.timeout_ms} must be more than 0 and at most the "
                "brokers' transaction.max.timeout.ms"
            )
        if code == ErrorCode.INVALID_TXN_STATE and kind is Kind.END:
            message = (
                "the broker has no open transaction: it was open for more than "
                f"transaction_timeout_ms={self.timeout_ms}, and so the broker has aborted it, or "
                "another producer with this transactional_id has"
            )
        if code in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH):
            return self.fenced(name)
        if code in _DENIED:
            error: KafkaError = AuthorizationError(
                f"{ErrorCode(code).name}: {message or _DENIED[code]} (answer to {name}; "
                f"transactional_id={self.transactional_id!r})"
            )
            error.code = code
            return error
        return BrokerError(code, f"{message}, answer to {name}" if message else f"answer to {name}")

    def fenced(self, request: str) -> ProducerFenced:
        """The error of all calls from now on: there is another producer."""
        return ProducerFenced(
            f"another producer has taken over transactional_id={self.transactional_id!r}, or the "
            f"transaction was open for more than transaction_timeout_ms={self.timeout_ms} (answer "
            f"to {request}): close this producer"
        )

    def _abortable_for(self, request: TxnRequest, error: KafkaError, now: float) -> None:
        self._pending.difference_update(request.partitions)
        if self.state is _S.INITIALIZING:
            self._no_epoch(request, error, now)
            return
        if request.kind is Kind.END and not request.commit:
            # Aborting it is what went wrong.
            self._fatal_for(request, error)
            return
        self.abortable(error)
        if request.operation is not None:
            request.operation.finish(self._why_dropped())
        if request.kind is Kind.FIND_COORDINATOR and self.state in (_S.COMMITTING, _S.ABORTING):
            # Its end is under way, or decided: that goes on.
            self._repeat(request, error, now)

    def _no_epoch(self, request: TxnRequest, error: KafkaError, now: float) -> None:
        """There is no transaction to be aborted: it has its end, or none was begun yet."""
        ending = self._ending
        if ending is None or not self._past:
            self._fatal_for(request, error)
            return
        self._over = self._past
        self._needs_bump = True
        # Who asks again and again does so at this pace.
        self._refused_until = now + self._backoff.delay(self._refusals)
        self._refusals += 1
        self._move(_S.ABORTABLE_ERROR)
        self.error = error
        # What is committed is so: to say anything else would have its records sent again.
        if ending.name == COMMIT:
            ending.finish()
        elif self._over == _PAST[COMMIT]:
            ending.finish(_because(self._lacking(), error))
        else:
            ending.finish(self.aborted())
        self._drop_queued(Kind.BUMP_EPOCH)

    def _is_in_doubt(self, request: TxnRequest) -> bool:
        """Whether a commit was asked for before, perhaps with success, and its answer was lost or
        left that open: to call the transaction aborted could be wrong."""
        asked_before = request.kind is not Kind.END or request.doubtful
        return self.state is _S.COMMITTING and self._decided and asked_before

    def _fatal_for(self, request: TxnRequest, error: KafkaError) -> None:
        if self._is_in_doubt(request):
            error = _because(f"nobody knows whether the transaction was committed: {error}", error)
        elif request.kind is Kind.END and not request.commit and not isinstance(error, _CLEAR):
            error = _because(f"the transaction could not be aborted: {error}", error)
        elif self._past:
            error = _because(
                f"the transaction was {self._past}, but there is no next one: {error}", error
            )
        self.fatal(error)

    def _found(
        self, request: TxnRequest, response: wire.FindCoordinatorResponse, now: float
    ) -> None:
        for found in response.coordinators:
            if request.key is None or found.key != request.key[1]:
                continue
            if self._is_done(request, FIND_COORDINATOR, found.error_code, now, found.error_message):
                self.coordinators[request.key] = found.node_id
            return
        self._repeat(request, ProtocolError("the answer names no coordinator of ours"), now)

    def _initialized(
        self, request: TxnRequest, response: wire.InitProducerIdResponse, now: float
    ) -> None:
        if not self._is_done(request, INIT_PRODUCER_ID, response.error_code, now):
            return
        if min(response.producer_id, response.producer_epoch) < 0:
            self._repeat(
                request,
                ProtocolError(
                    f"the broker gave producer id {response.producer_id} with epoch "
                    f"{response.producer_epoch}"
                ),
                now,
            )
            return
        self.sequences.renew(response.producer_id, response.producer_epoch)
        if request.kind is Kind.INIT_PRODUCER_ID:
            self.version_two = self._ask_version()
        self._ready(request.operation)

    def _partitions_added(
        self, request: TxnRequest, response: wire.AddPartitionsToTxnResponse, now: float
    ) -> Iterable[PartitionSequences]:
        denied: set[str] = set()
        refused: dict[TopicPartition, int] = {}
        for place in map(_place, request.partitions):
            code = response.errors.get(place, int(ErrorCode.UNKNOWN_SERVER_ERROR))
            action = txn_action_for(ADD_PARTITIONS_TO_TXN, code)
            if code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                denied.add(place.topic)
            elif action is TxnAction.ABORTABLE:
                refused[place] = code
            elif action is not TxnAction.DONE:
                # The same for all of them.
                self._is_done(request, ADD_PARTITIONS_TO_TXN, code, now)
                return ()
        if denied:
            named = f"not authorized for {', '.join(sorted(denied))}"
            code = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            self._abortable_for(request, self.error_for(request.kind, code, named), now)
            return ()
        if refused:
            code = next(iter(refused.values()))
            named = ", ".join(
                f"{p}: {ErrorCode(c).name}" for p, c in refused.items() if c in _CODES
            )
            self._abortable_for(request, self.error_for(request.kind, code, named), now)
            return ()
        self.trouble = None
        self._pending.difference_update(request.partitions)
        self._partitions.update(dict.fromkeys(request.partitions))
        self._started = True
        return request.partitions

    def _offsets_committed(
        self, request: TxnRequest, response: wire.TxnOffsetCommitResponse, now: float
    ) -> None:
        pending: int | None = None
        for place in list(request.offsets):
            code = response.errors.get(place, int(ErrorCode.NETWORK_EXCEPTION))
            action = txn_action_for(TXN_OFFSET_COMMIT, code)
            if action is TxnAction.DONE:
                del request.offsets[place]
            elif action in (TxnAction.REPEAT, TxnAction.FIND):
                if pending is None or action is TxnAction.FIND:
                    pending = code
            else:
                self._is_done(request, TXN_OFFSET_COMMIT, code, now)
                return
        if self.is_doomed:
            self._drop(request)
        elif pending is not None:
            self._is_done(request, TXN_OFFSET_COMMIT, pending, now)
        elif request.operation is not None:
            self.trouble = None
            request.operation.finish()

    # -- ends ------------------------------------------------------------------------------

    def _ended(self, operation: Operation | None) -> None:
        """The transaction is committed or aborted, or nobody had heard of it."""
        # Nothing late may get from the old protocol into the new one: not the markers of this
        # transaction into the next one either, which are written after the answer. Where no new
        # epoch keeps them apart it stays with the old one.
        version_two = self._ask_version() and (self.version_two or self.can_bump)
        upgrade = version_two and not self.version_two
        bump = self._needs_bump or upgrade or self.sequences.damaged
        harm = self._may_harm
        self.version_two = version_two
        self._needs_bump = self._may_harm = self._decided = False
        self._asked = self._started = self.holds = False
        self._held.clear()
        self._joined.clear()
        self._partitions.clear()
        self._new.clear()
        self._pending.clear()
        # Who has not waited for them does not ask for those of the next transaction.
        self._offsets.clear()
        self._last_offsets = None
        if bump and (self.can_bump or self._over):
            self._move(_S.INITIALIZING)
            self._push(Kind.BUMP_EPOCH, self._me, operation, not_before=self._refused_until)
        elif self.sequences.uncertain:
            self.fatal(_too_old("the transaction was aborted, but there is no next one"))
        else:
            self.sequences.rewind()
            self._ready(operation)
            if harm:
                self.fatal(
                    KafkaError(
                        "the last transaction is over, but a request of it that got no answer may "
                        "arrive yet, in the next one, and the broker is too old to tell the two "
                        "apart (Kafka 2.5 can); close this producer, and start another"
                    )
                )

    def _ready(self, operation: Operation | None) -> None:
        self._move(_S.READY)
        self.error = None
        self._over = ""
        self._refusals = 0
        if operation is not None:
            operation.finish()


_CODES = frozenset(int(code) for code in ErrorCode)

#: Errors that say all there is to say.
_CLEAR = (ProducerFenced, AuthorizationError, AuthenticationError, UnsupportedVersionError)

#: What a principal may not do, and how it may.
_DENIED: dict[int, str] = {
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "this principal may not use the transactional id: grant Write and Describe on it"
    ),
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: (
        "this principal may not use the topic: grant Write on it, or Read to commit offsets of it"
    ),
    ErrorCode.GROUP_AUTHORIZATION_FAILED: (
        "this principal may not commit offsets of the group: grant Read on it"
    ),
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: (
        "this principal may not use idempotent writes on the cluster: grant IdempotentWrite"
    ),
}


def _too_old(text: str) -> KafkaError:
    return TransactionAborted(
        f"{text}: nobody knows which records the broker has stored, and it is too old to begin "
        "anew (Kafka 2.5 can); close this producer"
    )


def _because(text: str, cause: KafkaError) -> KafkaError:
    error = KafkaError(text) if not isinstance(cause, _CLEAR) else type(cause)(text)
    error.code = cause.code
    error.__cause__ = cause
    return error
