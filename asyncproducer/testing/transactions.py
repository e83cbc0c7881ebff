"""Transactions as their coordinator sees them: who produces, in which epoch, what is open.

The order of the checks, and so which error a request with two faults gets, is that of
Java's TransactionCoordinator (Kafka 4.x). All nodes share this object, so a coordinator
that moves takes its state along.

    EMPTY -> ONGOING -> PREPARE_COMMIT -> COMPLETE_COMMIT -> ONGOING ...
                     -> PREPARE_ABORT  -> COMPLETE_ABORT  -> ONGOING ...

PREPARE_x: the outcome is certain, and the partitions get their markers. That takes no
time unless `marker_delay_ms` says so, or a partition has no leader; what comes meanwhile
is answered CONCURRENT_TRANSACTIONS.

There are two protocols, and the version of the client's requests tells which:

    TV1  AddPartitionsToTxn, AddOffsetsToTxn; the epoch stays the same after EndTxn
    TV2  (KIP-890) Produce v12+ and TxnOffsetCommit v5+ add what they name, and EndTxn v5+
         bumps the epoch, so that nothing late gets into the next transaction

Other than Java's coordinator this one aborts a transaction on the very millisecond of its
timeout; there, somebody looks every ten seconds. Nothing ever expires.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Callable, Iterable

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.groups import Groups
from asyncproducer.testing.state import ClusterState, Partition, RequestRefused

__all__ = ["TransactionState", "TransactionalId", "Transactions"]

NO_PRODUCER_ID = -1
NO_EPOCH = -1

#: Epochs are 16 bits. The last one is for markers only (Java: isProducerEpochExhausted).
LAST_EPOCH = 2**15 - 2


class TransactionState(enum.Enum):
    """With the names that DescribeTransactions has for them."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_EMPTY, _ONGOING = TransactionState.EMPTY, TransactionState.ONGOING
_PREPARE_COMMIT, _PREPARE_ABORT = TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT
_COMPLETE_COMMIT = TransactionState.COMPLETE_COMMIT
_COMPLETE_ABORT = TransactionState.COMPLETE_ABORT

#: State -> those that it may follow.
_BEFORE = {
    _EMPTY: {_EMPTY, _COMPLETE_COMMIT, _COMPLETE_ABORT},
    _ONGOING: {_EMPTY, _ONGOING, _COMPLETE_COMMIT, _COMPLETE_ABORT},
    _PREPARE_COMMIT: {_ONGOING},
    # A client of TV2 may abort what has not begun: it cannot know whether its sends arrived.
    _PREPARE_ABORT: {_EMPTY, _ONGOING, _COMPLETE_COMMIT, _COMPLETE_ABORT},
    _COMPLETE_COMMIT: {_PREPARE_COMMIT},
    _COMPLETE_ABORT: {_PREPARE_ABORT},
}


@dataclasses.dataclass(slots=True, eq=False)
class TransactionalId:
    """What is known of one transactional id."""

    transactional_id: str
    producer_id: int
    timeout_ms: int
    producer_epoch: int = NO_EPOCH
    #: The epoch before, if its owner has asked for the present one: it may ask again.
    last_epoch: int = NO_EPOCH
    previous_producer_id: int = NO_PRODUCER_ID
    #: Follows at the end of the transaction, because the epochs are used up.
    next_producer_id: int = NO_PRODUCER_ID
    state: TransactionState = _EMPTY
    #: What the open transaction has, then what waits for its marker.
    partitions: dict[tuple[str, int], None] = dataclasses.field(default_factory=dict)
    groups: dict[str, None] = dataclasses.field(default_factory=dict)
    #: 1 or 2: the protocol that the open transaction is written with.
    version: int = 1
    started_ms: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def preparing(self) -> bool:
        """Whether the outcome is certain, and markers are missing."""
        return self.state in (_PREPARE_COMMIT, _PREPARE_ABORT)

    @property
    def epochs_used_up(self) -> bool:
        """Whether a new producer id is needed instead of the next epoch."""
        return self.producer_epoch >= LAST_EPOCH

    def become(self, state: TransactionState) -> None:
        """Raises RuntimeError for what cannot be."""
        if self.state not in _BEFORE[state]:
            raise RuntimeError(
                f"{self.transactional_id!r} cannot go from {self.state.name} to {state.name}"
            )
        self.state = state

    def check_producer(self, producer_id: int, producer_epoch: int) -> None:
        """Raises RequestRefused for somebody else, and while markers are missing."""
        if self.preparing and producer_id == self.next_producer_id:
            raise RequestRefused(ErrorCode.CONCURRENT_TRANSACTIONS)  # told, but not yet valid
        if producer_id != self.producer_id:
            raise RequestRefused(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if producer_epoch != self.producer_epoch:
            raise RequestRefused(ErrorCode.PRODUCER_FENCED)
        if self.preparing:
            raise RequestRefused(ErrorCode.CONCURRENT_TRANSACTIONS)

    def may_initialize(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a producer that gives its id is this one, as far as the id tells (KIP-360)."""
        return (
            self.producer_epoch == NO_EPOCH
            or producer_id == self.producer_id
            or (producer_id == self.previous_producer_id and producer_epoch >= LAST_EPOCH)
        )

    def is_repeated_end(self, producer_id: int, producer_epoch: int) -> bool:
        """TV2: whether the answer to EndTxn, with the new epoch, may have been lost."""
        return producer_epoch + 1 == self.producer_epoch or (
            (producer_id, producer_epoch) == (self.previous_producer_id, LAST_EPOCH)
            and self.producer_epoch == 0
        )

    def bump_epoch(self, expected_epoch: int | None) -> None:
        """For InitProducerId, between transactions. Raises RequestRefused (PRODUCER_FENCED)."""
        if expected_epoch is None:
            self.last_epoch = NO_EPOCH
        elif self.producer_epoch in (NO_EPOCH, expected_epoch):
            self.last_epoch = self.producer_epoch
        elif expected_epoch == self.last_epoch:
            return  # asked again: the first answer may be lost
        else:
            raise RequestRefused(ErrorCode.PRODUCER_FENCED)
        self.producer_epoch += 1

    def change_producer_id(self, producer_id: int, last_epoch: int) -> None:
        """Its epochs start again."""
        self.previous_producer_id, self.producer_id = self.producer_id, producer_id
        self.last_epoch, self.producer_epoch = last_epoch, 0


class Transactions:
    """The transactional ids of one cluster. Methods raise RequestRefused.

    `call_later(seconds, callback)` is the event loop's.
    """

    def __init__(
        self,
        state: ClusterState,
        groups: Groups,
        *,
        now_ms: Callable[[], int],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        marker_delay_ms: int = 0,
    ) -> None:
        self.ids: dict[str, TransactionalId] = {}
        self.marker_delay_ms = marker_delay_ms
        self._state = state
        self._groups = groups
        self._now_ms = now_ms
        self._call_later = call_later
        self._waiting: dict[TransactionalId, Callable[[], None]] = {}

    def close(self) -> None:
        """Nothing happens by itself any more."""
        for known in self.ids.values():
            _stop_timer(known)
        for known in list(self._waiting):
            self._stop_waiting(known)

    # -- what clients ask for

    def find(self, transactional_id: str) -> TransactionalId:
        """Raises RequestRefused (INVALID_REQUEST, INVALID_PRODUCER_ID_MAPPING)."""
        if not transactional_id:
            raise RequestRefused(ErrorCode.INVALID_REQUEST)
        if transactional_id not in self.ids:
            raise RequestRefused(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        return self.ids[transactional_id]

    def initialize(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Producer id and epoch for a producer that starts, or wants its epoch bumped (KIP-360).

        The latter gives what it has as `expected`. An open transaction is aborted, and the
        client has to ask again: CONCURRENT_TRANSACTIONS.
        """
        known = self.ids.get(transactional_id)
        if known is None:
            known = TransactionalId(transactional_id, self._state.new_producer_id(), timeout_ms)
            self.ids[transactional_id] = known
        if expected is not None and not known.may_initialize(*expected):
            raise RequestRefused(ErrorCode.PRODUCER_FENCED)
        if known.preparing:
            raise RequestRefused(ErrorCode.CONCURRENT_TRANSACTIONS)
        if known.state is _ONGOING:
            self._fence(known)
            raise RequestRefused(ErrorCode.CONCURRENT_TRANSACTIONS)
        expected_epoch = None if expected is None else expected[1]
        if known.epochs_used_up and expected_epoch in (None, known.producer_epoch):
            last_epoch = NO_EPOCH if expected is None else known.producer_epoch
            known.change_producer_id(self._state.new_producer_id(), last_epoch)
        else:
            known.bump_epoch(expected_epoch)
        known.timeout_ms = timeout_ms
        known.become(_EMPTY)
        return known.producer_id, known.producer_epoch

    def add(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        partitions: Iterable[tuple[str, int]] = (),
        groups: Iterable[str] = (),
        version: int,
    ) -> None:
        """Puts partitions, and groups for their offsets, into the transaction: the first begin it.

        `version`: 1 or 2, the client's protocol.
        """
        known = self.find(transactional_id)
        known.check_producer(producer_id, producer_epoch)
        if known.state is not _ONGOING:
            known.started_ms = self._now_ms()
            known.timer = self._call_later(known.timeout_ms / 1000, lambda: self._fence(known))
        known.become(_ONGOING)
        known.version = version
        known.previous_producer_id = NO_PRODUCER_ID  # who says so much has heard of the new one
        known.partitions.update(dict.fromkeys(partitions))
        known.groups.update(dict.fromkeys(groups))

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        partition: tuple[str, int] | None = None,
        group: str | None = None,
    ) -> bool:
        """Whether a partition or group is in the open transaction (KIP-890, part 1)."""
        known = self.find(transactional_id)
        known.check_producer(producer_id, producer_epoch)
        return partition in known.partitions or group in known.groups

    def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        version: int,
    ) -> tuple[int, int]:
        """Commits or aborts, and returns what the producer has to go on with."""
        known = self.find(transactional_id)
        repeated = version >= 2 and known.is_repeated_end(producer_id, producer_epoch)
        same_id = producer_id == known.producer_id
        if not same_id and not (repeated and producer_id == known.previous_producer_id):
            raise RequestRefused(ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if known.preparing:
            # Before its epoch is looked at: it may be the next transaction's (KAFKA-18464).
            raise RequestRefused(ErrorCode.CONCURRENT_TRANSACTIONS)
        if not _may_end(known, producer_epoch, version=version, repeated=repeated):
            raise RequestRefused(ErrorCode.PRODUCER_FENCED)
        code = _outcome(known.state, commit=commit, version=version, repeated=repeated)
        if code is None:
            known.version = version
            self._prepare(known, commit=commit, bump=version >= 2)
        elif code != ErrorCode.NONE:
            raise RequestRefused(code)
        if known.next_producer_id != NO_PRODUCER_ID:
            return known.next_producer_id, 0
        return known.producer_id, known.producer_epoch

    # -- inside

    def _fence(self, known: TransactionalId) -> None:
        """Aborts without the producer, whose epoch is over: a new one came, or its time is up."""
        self._prepare(known, commit=False, bump=True)

    def _prepare(self, known: TransactionalId, *, commit: bool, bump: bool) -> None:
        """The transaction's outcome is certain from here on."""
        _stop_timer(known)
        if bump:
            if known.epochs_used_up:
                known.next_producer_id = self._state.new_producer_id()
            # The old one may come back, if nobody else did (KIP-588).
            known.last_epoch = known.producer_epoch
            known.producer_epoch += 1
        known.become(_PREPARE_COMMIT if commit else _PREPARE_ABORT)
        if self.marker_delay_ms:
            delay = self.marker_delay_ms / 1000
            known.timer = self._call_later(delay, lambda: self._write_markers(known))
        else:
            self._write_markers(known)

    def _write_markers(self, known: TransactionalId) -> None:
        """Writes what can be written. Where nobody leads, a marker waits for a leader."""
        self._stop_waiting(known)
        leaderless = []
        for name, index in list(known.partitions):
            partition = self._find_partition(name, index)
            if partition is not None and partition.leader == -1:
                leaderless.append(partition)
                continue
            del known.partitions[name, index]
            if partition is not None:
                partition.log.append_marker(
                    known.producer_id,
                    known.producer_epoch,
                    committed=known.state is _PREPARE_COMMIT,
                    leader_epoch=partition.leader_epoch,
                    now_ms=self._now_ms(),
                )
        if leaderless:
            self._waiting[known] = lambda: self._write_markers(known)
            for partition in leaderless:
                partition.log.watch(self._waiting[known])
        else:
            self._complete(known)

    def _complete(self, known: TransactionalId) -> None:
        committed = known.state is _PREPARE_COMMIT
        for group_id in known.groups:
            self._groups.end_transaction(group_id, known.producer_id, committed=committed)
        known.groups.clear()
        known.become(_COMPLETE_COMMIT if committed else _COMPLETE_ABORT)
        if known.next_producer_id != NO_PRODUCER_ID:
            known.change_producer_id(known.next_producer_id, known.last_epoch)
            known.next_producer_id = NO_PRODUCER_ID

    def _stop_waiting(self, known: TransactionalId) -> None:
        callback = self._waiting.pop(known, None)
        if callback is not None:
            for name, index in known.partitions:
                partition = self._find_partition(name, index)
                if partition is not None:
                    partition.log.unwatch(callback)

    def _find_partition(self, name: str, index: int) -> Partition | None:
        try:
            return self._state.partition(name, index)
        except RequestRefused:  # deleted: it needs no marker
            return None


def _may_end(known: TransactionalId, epoch: int, *, version: int, repeated: bool) -> bool:
    """Whether the epoch of an EndTxn request is one that may ask this."""
    if version >= 2 and known.state in (_COMPLETE_COMMIT, _COMPLETE_ABORT) and repeated:
        return True
    return epoch == known.producer_epoch


def _outcome(
    state: TransactionState, *, commit: bool, version: int, repeated: bool
) -> ErrorCode | None:
    """What EndTxn gets to hear: NONE, where it was done before. None: it is to be done now."""
    if state is _ONGOING:
        return None
    agrees = state is (_COMPLETE_COMMIT if commit else _COMPLETE_ABORT)
    if agrees and (repeated or version < 2):
        return ErrorCode.NONE
    if version >= 2 and not commit and not repeated:
        return None
    return ErrorCode.INVALID_TXN_STATE


def _stop_timer(known: TransactionalId) -> None:
    if known.timer is not None:
        known.timer.cancel()
        known.timer = None
