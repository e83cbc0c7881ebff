"""Idempotence: producer id, epoch, and the sequence numbers of each partition.

A broker stores a batch of an idempotent producer only if its base sequence follows
the last one it stored for that (producer id, epoch, partition); it recognises the last
five batches and answers a repeated one as a success. From this follow the rules here:

1. A batch gets its sequence when it is drained for the first time, and keeps it
   through every retry: the bytes of a retry are the same.
2. Up to five batches of a partition may be on the wire, as many as the broker remembers.
   As soon as one of them must be retried, they go one at a time, lowest sequence first,
   and nothing new joins them. Nothing is pipelined either to a broker that may not know
   the producer yet, or behind what another broker has: five batches could be stored
   before an older one is repeated, which would then not be recognised.
3. When a batch ends without being stored, the sequences behind it have a hole that the
   broker would refuse for ever. Then the epoch is bumped, locally (KIP-360): the
   partition's waiting batches are renumbered from 0 under the new epoch, once none of
   them is on the wire and those before the hole, which may be stored, have their end.
   Other partitions finish what they have under their old epoch and change when nothing
   of theirs is outstanding. A batch whose answer was lost asks under its old sequence first,
   if it is the first; behind another it ends, for the broker may have it (see `doubtful`).
4. A batch that is given up after it was sent may or may not be stored. The partition is
   then `unresolved`: nothing new leaves until its outstanding batches have told.

Sequences count modulo 2**31; comparisons are serial (RFC 1982), so they hold at the wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from asyncproducer.core.batch import GONE
from asyncproducer.errors import IllegalStateError

if TYPE_CHECKING:
    from asyncproducer.core.batch import ProducerBatch

__all__ = [
    "MAX_EPOCH",
    "IdState",
    "PartitionSequences",
    "Sequences",
    "TransactionalSequences",
    "increment",
    "is_before",
]

_MODULO = 1 << 31

#: The last epoch that a producer id can have; then a new id is needed.
MAX_EPOCH = 32767


def increment(sequence: int, by: int) -> int:
    """`sequence` + `by`, wrapping from 2147483647 to 0."""
    return (sequence + by) % _MODULO


def is_before(first: int, second: int) -> bool:
    """Whether `first` comes before `second`, wrapped or not."""
    return first != second and (second - first) % _MODULO < _MODULO // 2


class IdState(Enum):
    """Where the producer id stands."""

    NONE = "NONE"
    REQUESTED = "REQUESTED"
    READY = "READY"
    FATAL = "FATAL"


#: The legal moves of the producer id's state.
TRANSITIONS: dict[IdState, frozenset[IdState]] = {
    IdState.NONE: frozenset({IdState.REQUESTED, IdState.FATAL}),
    IdState.REQUESTED: frozenset({IdState.READY, IdState.NONE, IdState.FATAL}),
    IdState.READY: frozenset({IdState.NONE, IdState.FATAL}),
    IdState.FATAL: frozenset({IdState.FATAL}),
}

# Looked up once: before CPython 3.12 a member costs its class a search each time.
_READY = IdState.READY


class PartitionSequences:
    """One partition's numbers."""

    __slots__ = (
        "hole",
        "last_acked_offset",
        "last_acked_sequence",
        "maybe_forgotten",
        "next_sequence",
        "outstanding",
        "owner",
        "producer_epoch",
        "producer_id",
        "unresolved",
    )

    def __init__(self, owner: Any = None) -> None:
        #: The queue whose numbers these are.
        self.owner = owner
        self.producer_id = -1
        self.producer_epoch = -1
        self.next_sequence = 0
        self.last_acked_sequence = -1
        self.last_acked_offset = -1
        #: Whether the topic may be another one by now, or was not used for long: its broker
        #: may not know the producer.
        self.maybe_forgotten = False
        #: Batches that have a sequence and no end yet, in sequence order: on the wire or
        #: waiting for their retry.
        self.outstanding: list[ProducerBatch] = []
        #: The sequence behind the last batch whose fate is unknown, or None.
        self.unresolved: int | None = None
        #: The first sequence that is lost, or None. The outstanding batches from there on
        #: are to be renumbered under a new epoch.
        self.hole: int | None = None

    @property
    def on_wire(self) -> bool:
        """Whether one of the outstanding batches is in a request now."""
        return any(batch.in_flight for batch in self.outstanding)

    def is_before_hole(self, batch: ProducerBatch) -> bool:
        """Whether `batch` keeps its sequence, which the broker can still take."""
        return self.hole is None or is_before(batch.base_sequence, self.hole)

    def __repr__(self) -> str:
        return (
            f"<PartitionSequences id={self.producer_id}:{self.producer_epoch} "
            f"next={self.next_sequence} acked={self.last_acked_sequence} "
            f"outstanding={len(self.outstanding)} unresolved={self.unresolved} hole={self.hole}>"
        )


class Sequences:
    """The producer id of this producer, and what follows from answers for the sequences."""

    #: Whether batches belong to transactions.
    transactional = False

    def __init__(self) -> None:
        self.state = IdState.NONE
        self.producer_id = -1
        self.producer_epoch = -1
        self.fatal_error: BaseException | None = None
        self.epoch_bumps = 0
        #: Partitions whose outstanding batches wait to be renumbered.
        self._renumber: dict[PartitionSequences, None] = {}
        #: Partitions with a batch of unknown fate.
        self._unresolved: dict[PartitionSequences, None] = {}

    # -- the producer id -------------------------------------------------------------------

    def _move(self, to: IdState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise IllegalStateError(
                f"the producer id cannot go from {self.state.name} to {to.name}"
            )
        self.state = to

    @property
    def needs_id(self) -> bool:
        """Whether an InitProducerId request should be made now."""
        return self.state is IdState.NONE

    @property
    def quiet(self) -> bool:
        """Whether there is an id, and nothing to do about any partition."""
        return self.state is _READY and not self._renumber and not self._unresolved

    def requested(self) -> None:
        """An InitProducerId request is on its way."""
        self._move(IdState.REQUESTED)

    def request_failed(self) -> None:
        """It failed in a way that may pass: ask again."""
        self._move(IdState.NONE)

    def assigned(self, producer_id: int, producer_epoch: int) -> None:
        """The broker gave us an id."""
        self._move(IdState.READY)
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch

    def fail(self, error: BaseException) -> None:
        """Nothing can be sent any more with this producer."""
        self._move(IdState.FATAL)
        self.fatal_error = error

    # -- draining --------------------------------------------------------------------------

    def _stale(self, partition: PartitionSequences) -> bool:
        return (
            partition.producer_id != self.producer_id
            or partition.producer_epoch != self.producer_epoch
        )

    def may_drain(self, partition: PartitionSequences, batch: ProducerBatch) -> bool:
        """Whether `batch`, the head of its queue, may be sent now.

        When not, something outstanding of this partition, or the producer id, is
        waited for; its end calls for another look.
        """
        if self.state is not _READY:
            return False
        if batch.base_sequence < 0:
            if partition.unresolved is not None or partition.hole is not None:
                return False
            if not partition.outstanding:
                return True
            # Behind an outstanding batch: only under the same epoch, and once a first one
            # is stored, because a broker that does not know the producer yet takes any
            # sequence. Not behind a retry, and not to another leader, or another address of it,
            # than those before: it may store five batches first and then not recognise an older
            # one.
            leader = partition.owner.leader
            if partition.last_acked_sequence < 0 or partition.maybe_forgotten:
                return False
            for other in partition.outstanding:
                if not other.in_flight or other.attempts > 0 or other.sent_to != leader:
                    return False
            return not self._stale(partition)
        first = partition.outstanding[0] if partition.outstanding else None
        return first is batch and (partition.is_before_hole(batch) or self._asks(batch))

    def _asks(self, batch: ProducerBatch) -> bool:
        """Whether `batch` goes again under its sequence, though a hole is before it.

        If its broker has it, it says so; under a new epoch it would be stored again.
        """
        return batch.maybe_written and not self.transactional

    def assign(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """Give `batch` its sequence if it has none. It is outstanding from now on."""
        if batch.base_sequence >= 0:
            return
        if not partition.outstanding and self._stale(partition):
            self._restart(partition)
        batch.set_producer_state(
            partition.producer_id,
            partition.producer_epoch,
            partition.next_sequence,
            transactional=self.transactional,
        )
        partition.next_sequence = increment(partition.next_sequence, batch.count)
        partition.outstanding.append(batch)

    def _restart(self, partition: PartitionSequences) -> None:
        partition.producer_id = self.producer_id
        partition.producer_epoch = self.producer_epoch
        partition.next_sequence = 0
        partition.last_acked_sequence = -1
        partition.last_acked_offset = -1
        partition.maybe_forgotten = False
        partition.unresolved = None
        partition.hole = None
        self._unresolved.pop(partition, None)

    # -- answers ---------------------------------------------------------------------------

    def acknowledged(
        self, partition: PartitionSequences, batch: ProducerBatch, base_offset: int
    ) -> None:
        """The broker has `batch`. Also for one that was given up meanwhile."""
        self._forget(partition, batch)
        if not self._same_epoch(partition, batch):
            return
        if batch.sent_to != GONE:
            partition.maybe_forgotten = False
        last = increment(batch.base_sequence, batch.count - 1)
        if partition.last_acked_sequence < 0 or is_before(partition.last_acked_sequence, last):
            partition.last_acked_sequence = last
        if base_offset >= 0:
            partition.last_acked_offset = max(
                partition.last_acked_offset, base_offset + batch.count - 1
            )

    def _same_epoch(self, partition: PartitionSequences, batch: ProducerBatch) -> bool:
        return (
            batch.producer_id == partition.producer_id
            and batch.producer_epoch == partition.producer_epoch
        )

    def _forget(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        if batch in partition.outstanding:
            partition.outstanding.remove(batch)

    def rejected(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """`batch` ended without being stored, as the broker said: its sequences are a hole."""
        if batch.base_sequence < 0:
            return
        self._forget(partition, batch)
        if self._same_epoch(partition, batch):
            self.bump(partition, batch.base_sequence)

    def expired(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """`batch` was given up after it was sent: nobody knows whether it is stored."""
        if batch.base_sequence < 0:
            return
        self._forget(partition, batch)
        if not self._same_epoch(partition, batch):
            return
        behind = increment(batch.base_sequence, batch.count)
        if partition.unresolved is None or is_before(partition.unresolved, behind):
            partition.unresolved = behind
        self._unresolved[partition] = None

    def split(
        self, partition: PartitionSequences, batch: ProducerBatch, parts: list[ProducerBatch]
    ) -> None:
        """The parts take over the sequences of the batch that was too large."""
        if batch.base_sequence < 0:
            return
        at = partition.outstanding.index(batch)
        sequence = batch.base_sequence
        for part in parts:
            part.set_producer_state(
                batch.producer_id, batch.producer_epoch, sequence, transactional=batch.transactional
            )
            sequence = increment(sequence, part.count)
        partition.outstanding[at : at + 1] = parts

    def out_of_order(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """OUT_OF_ORDER_SEQUENCE for `batch`, which will be retried (spec 8.5).

        While an earlier batch is still missing, that is what a broker must answer. Where
        `batch` is the first one outstanding, the hole is real and only a new epoch mends it.
        """
        if not self._same_epoch(partition, batch):
            return
        if partition.outstanding and partition.outstanding[0] is batch:
            # Nor is it stored: the broker would know it, whatever became of earlier answers. (One
            # that has forgotten or lost something would not: see `gives_up`.)
            batch.maybe_written = False
            self.bump(partition, batch.base_sequence)

    def unknown_producer(
        self, partition: PartitionSequences, batch: ProducerBatch, log_start_offset: int
    ) -> None:
        """UNKNOWN_PRODUCER_ID for `batch`, which will be retried: the broker forgot us.

        Without a log start offset the answer says nothing about the log, and the same
        again may succeed. Otherwise the sequences start anew under a new epoch.
        """
        if log_start_offset < 0 or not self._same_epoch(partition, batch):
            return
        self.bump(partition, batch.base_sequence)

    def gives_up(
        self, partition: PartitionSequences, batch: ProducerBatch, why: str, log_start_offset: int
    ) -> bool:
        """Whether `batch`, which the answers above would repeat, has to fail instead.

        Under a new epoch the broker would store again what it has, or what may still reach it:

        - what it has said that it has;
        - a batch whose answer was lost, behind one that was given up without an answer: both
          requests may still arrive, one after the other;
        - a batch whose answer was lost, where the broker has forgotten the producer, or should
          take it by all that we know;
        - a part of a batch that was found too large after an answer for it was lost: the broker
          refuses the part's sequences if it has the whole, since it knows its last five batches,
          not what they were made of. It may have it though what comes before is missing: one
          that has forgotten the producer takes any sequence for the first.
        """
        if batch.is_stored:
            return True
        if not batch.maybe_written:
            return False
        if why == "out_of_order":
            if partition.unresolved is not None:
                return True
            return partition.outstanding[:1] == [batch] and (
                batch.whole_maybe_written or partition.is_before_hole(batch)
            )
        return log_start_offset >= 0

    # -- epochs ----------------------------------------------------------------------------

    def bump(self, partition: PartitionSequences, hole: int) -> None:
        """Ask for a new epoch for this partition: the sequence `hole` will never come."""
        if partition.hole is None or is_before(hole, partition.hole):
            partition.hole = hole
        self._renumber[partition] = None

    def resolve(self) -> list[PartitionSequences]:
        """Look again at partitions of unknown fate; returns those that may go on."""
        free = []
        for partition in list(self._unresolved):
            if partition.outstanding:
                continue
            del self._unresolved[partition]
            partition.unresolved = None
            if increment(partition.last_acked_sequence, 1) != partition.next_sequence:
                self.bump(partition, partition.next_sequence)
            else:
                free.append(partition)
        return free

    def _may_renumber(self, partition: PartitionSequences) -> bool:
        first = partition.outstanding[0] if partition.outstanding else None
        return first is None or not (
            partition.is_before_hole(first) or self._asks(first) or partition.on_wire
        )

    def doubtful(self) -> list[ProducerBatch]:
        """Batches that have to fail before `apply_bumps`, which would store them again.

        Their answers were lost, and what is before them is not stored. A broker that knows the
        producer would not have taken them then; one that has forgotten it may have.
        """
        return [
            batch
            for partition in self._renumber
            if self._may_renumber(partition)
            for batch in partition.outstanding
            if batch.maybe_written
        ]

    def apply_bumps(self) -> list[PartitionSequences]:
        """Bump the epoch if a partition needs it and renumber what can be renumbered.

        Returns the partitions that may go on. At the last epoch the id is given up and
        `needs_id` says so; the renumbering happens when the new id is there.
        """
        if self.state is not _READY or not self._renumber:
            return []
        waiting = [p for p in self._renumber if self._may_renumber(p)]
        if not waiting:
            return []
        if any(not self._stale(p) for p in waiting):
            if self.producer_epoch >= MAX_EPOCH:
                self.producer_id = -1
                self.producer_epoch = -1
                self._move(IdState.NONE)
                return []
            self.producer_epoch += 1
            self.epoch_bumps += 1
        for partition in waiting:
            del self._renumber[partition]
            self._restart(partition)
            for batch in partition.outstanding:
                batch.set_producer_state(
                    self.producer_id,
                    self.producer_epoch,
                    partition.next_sequence,
                    transactional=self.transactional,
                )
                partition.next_sequence = increment(partition.next_sequence, batch.count)
        return waiting


class TransactionalSequences(Sequences):
    """The numbers of a transactional producer.

    A hole does not renumber anything here: the transaction that it is in will be aborted, and
    what follows it has another epoch, from the coordinator. Where the coordinator cannot give
    one (before Kafka 2.5), `rewind` goes back to what the broker has.
    """

    transactional = True

    def __init__(self, joins: Callable[[PartitionSequences], bool]) -> None:
        super().__init__()
        #: Whether a partition is in the transaction; asks for it if it is not.
        self._joins = joins
        #: Partitions whose numbers cannot go on as they are.
        self._damaged: dict[PartitionSequences, None] = {}

    @property
    def needs_id(self) -> bool:
        """Never: the transaction's coordinator gives it, when it is asked to."""
        return False

    @property
    def damaged(self) -> bool:
        """Whether some batch got a number and did not keep it."""
        return bool(self._damaged)

    @property
    def uncertain(self) -> bool:
        """Whether nobody knows which number the broker wants next, somewhere."""
        return any(partition.unresolved is not None for partition in self._damaged)

    def may_drain(self, partition: PartitionSequences, batch: ProducerBatch) -> bool:
        """Whether `batch`, the head of its queue, may be sent now: not before its partition is in
        the transaction."""
        return self._joins(partition) and super().may_drain(partition, batch)

    def bump(self, partition: PartitionSequences, hole: int) -> None:
        """The sequence `hole` will never come."""
        if partition.hole is None or is_before(hole, partition.hole):
            partition.hole = hole
        self._damaged[partition] = None

    def expired(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """`batch` was given up, here or after an answer that leaves its fate open."""
        if not (batch.in_flight or batch.maybe_written):
            self.rejected(partition, batch)
            return
        super().expired(partition, batch)
        if partition.unresolved is not None:
            self._damaged[partition] = None

    def resolve(self) -> list[PartitionSequences]:
        """Nothing is looked at again within a transaction."""
        return []

    def gives_up(
        self, partition: PartitionSequences, batch: ProducerBatch, why: str, log_start_offset: int
    ) -> bool:
        """Whether only a new epoch could help `batch` (spec 8.5)."""
        if batch.renumbered and (why != "out_of_order" or partition.unresolved is None):
            return False  # the answer is to a number that it has no more
        if why == "out_of_order":
            first = partition.outstanding[0] if partition.outstanding else None
            return partition.unresolved is not None or first is None or first is batch
        # Some of what was acknowledged is still in the log, and yet the broker forgot us.
        return partition.last_acked_offset >= log_start_offset >= 0

    def out_of_order(self, partition: PartitionSequences, batch: ProducerBatch) -> None:
        """An earlier batch is still missing: nothing else is wrong."""

    def unknown_producer(
        self, partition: PartitionSequences, batch: ProducerBatch, log_start_offset: int
    ) -> None:
        """The log has lost all that we had there: it begins anew in the same epoch, once."""
        if log_start_offset < 0 or batch.renumbered or not self._same_epoch(partition, batch):
            return
        self._restart(partition)
        for other in partition.outstanding:
            other.set_producer_state(
                other.producer_id,
                other.producer_epoch,
                partition.next_sequence,
                transactional=True,
            )
            other.renumbered = True
            partition.next_sequence = increment(partition.next_sequence, other.count)

    def renew(self, producer_id: int, producer_epoch: int) -> None:
        """Another epoch, between two transactions. All partitions begin at 0."""
        if self.state is IdState.NONE:
            self.requested()
            self.assigned(producer_id, producer_epoch)
        else:
            self.producer_id = producer_id
            self.producer_epoch = producer_epoch
            self.epoch_bumps += 1
        for partition in list(self._damaged):
            self._restart(partition)
        self._damaged.clear()

    def rewind(self) -> None:
        """The same epoch goes on: with the number behind the last one that the broker took."""
        for partition in self._damaged:
            partition.hole = None
            partition.next_sequence = increment(partition.last_acked_sequence, 1)
        self._damaged.clear()
