"""The numbers of idempotence, alone and together with the accumulator that drives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core.accumulator import Accumulator, PartitionQueue
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.compression import Codec, codec
from asyncproducer.core.delivery import PENDING, Delivery, Failure
from asyncproducer.core.metadata import PartitionMetadata, TopicMetadata
from asyncproducer.core.outcome import Action, decide, rule_for
from asyncproducer.core.sequences import (
    MAX_EPOCH,
    TRANSITIONS,
    IdState,
    PartitionSequences,
    Sequences,
    TransactionalSequences,
    increment,
    is_before,
)
from asyncproducer.errors import (
    AbortedError,
    BrokerRejected,
    DeliveryTimeout,
    ErrorCode,
    IllegalStateError,
)
from asyncproducer.testing.batches import decode_batch, read_header
from tests.core.memory import Undivided

LAST = 2**31 - 1
E = ErrorCode


# -- arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "by", "result"),
    [
        (0, 1, 1),
        (LAST, 1, 0),
        (LAST, 100, 99),
        (2147483640, 7, LAST),
        (2147483640, 8, 0),
        (2147483640, 10, 2),
    ],
)
def test_sequences_wrap_after_the_largest_int32(sequence: int, by: int, result: int) -> None:
    """RC-04, SI-24."""
    assert increment(sequence, by) == result


@given(start=st.integers(0, LAST), by=st.integers(1, 2**30 - 1))
def test_what_follows_is_later_wrapped_or_not(start: int, by: int) -> None:
    """RC-04: serial comparison, also across the wrap, where Java compares plainly."""
    later = increment(start, by)
    assert 0 <= later <= LAST
    assert is_before(start, later)
    assert not is_before(later, start)
    assert not is_before(start, start)


# -- the producer id -----------------------------------------------------------------------


def test_an_id_is_asked_for_once_and_again_when_that_failed() -> None:
    sequences = Sequences()
    assert sequences.needs_id
    assert (sequences.producer_id, sequences.producer_epoch) == (-1, -1)
    sequences.requested()
    assert not sequences.needs_id
    sequences.request_failed()
    assert sequences.needs_id
    sequences.requested()
    sequences.assigned(4000, 7)
    assert not sequences.needs_id
    assert (sequences.producer_id, sequences.producer_epoch) == (4000, 7)


def test_a_fatal_error_ends_it() -> None:
    """SI-20."""
    sequences = Sequences()
    error = ValueError("fenced")
    sequences.fail(error)
    assert sequences.fatal_error is error
    assert not sequences.needs_id
    sequences.fail(error)


@pytest.mark.parametrize("state", list(IdState))
@pytest.mark.parametrize("to", list(IdState))
def test_the_state_moves_only_as_the_table_says(state: IdState, to: IdState) -> None:
    sequences = Sequences()
    sequences.state = state
    if to in TRANSITIONS[state]:
        sequences._move(to)
        assert sequences.state is to
    else:
        with pytest.raises(IllegalStateError, match=f"from {state.name} to {to.name}"):
            sequences._move(to)


# -- one partition -------------------------------------------------------------------------


class Owner:
    """The queue of a partition, as far as the sequences look at it."""

    leader = 1


def ready() -> tuple[Sequences, PartitionSequences]:
    sequences = Sequences()
    sequences.requested()
    sequences.assigned(4000, 7)
    return sequences, PartitionSequences(Owner())


def batch_of(records: int) -> ProducerBatch:
    batch = ProducerBatch("orders", 0, write_limit=10_000, created_at=0.0)
    for _ in range(records):
        batch.try_append(0, None, b"v", NO_HEADERS)
    batch.close()
    return batch


def send(
    sequences: Sequences, partition: PartitionSequences, records: int = 1, *, to: int = 1
) -> ProducerBatch:
    batch = batch_of(records)
    assert sequences.may_drain(partition, batch)
    sequences.assign(partition, batch)
    batch.in_flight = True
    batch.sent_to = to
    return batch


def acknowledge(
    sequences: Sequences, partition: PartitionSequences, batch: ProducerBatch, offset: int = -1
) -> None:
    batch.in_flight = False
    sequences.acknowledged(partition, batch, offset)


def known() -> tuple[Sequences, PartitionSequences]:
    """A partition of which one record was stored."""
    sequences, partition = ready()
    acknowledge(sequences, partition, send(sequences, partition), 0)
    return sequences, partition


def test_the_first_batch_starts_at_zero_with_the_id_and_epoch() -> None:
    """SI-22."""
    sequences, partition = ready()
    batch = send(sequences, partition, 3)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (4000, 7, 0)
    assert not batch.transactional
    assert partition.next_sequence == 3
    assert partition.outstanding == [batch]
    acknowledge(sequences, partition, batch, 100)
    assert (partition.last_acked_sequence, partition.last_acked_offset) == (2, 102)
    assert partition.outstanding == []


def test_an_assigned_sequence_stays() -> None:
    sequences, partition = ready()
    batch = send(sequences, partition, 3)
    sequences.assign(partition, batch)
    assert batch.base_sequence == 0
    assert partition.next_sequence == 3
    assert partition.outstanding == [batch]


def test_sequences_of_batches_wrap() -> None:
    """SI-24, RC-02."""
    sequences, partition = known()
    partition.next_sequence = LAST - 1
    partition.last_acked_sequence = LAST - 2
    over = send(sequences, partition, 4)
    behind = send(sequences, partition, 1)
    assert (over.base_sequence, behind.base_sequence) == (LAST - 1, 2)
    acknowledge(sequences, partition, behind)
    assert partition.last_acked_sequence == 2
    acknowledge(sequences, partition, over)
    assert partition.last_acked_sequence == 2


def test_last_acked_never_goes_back() -> None:
    """SI-10: answers of two brokers may come in any order."""
    sequences, partition = known()
    first, second = send(sequences, partition), send(sequences, partition)
    acknowledge(sequences, partition, second, 2)
    assert (partition.last_acked_sequence, partition.last_acked_offset) == (2, 2)
    acknowledge(sequences, partition, first, 1)
    assert (partition.last_acked_sequence, partition.last_acked_offset) == (2, 2)


def test_nothing_is_drained_without_an_id() -> None:
    sequences = Sequences()
    partition = PartitionSequences(Owner())
    batch = batch_of(1)
    assert not sequences.may_drain(partition, batch)
    sequences.requested()
    assert not sequences.may_drain(partition, batch)
    sequences.assigned(1, 0)
    assert sequences.may_drain(partition, batch)
    sequences.fail(ValueError())
    assert not sequences.may_drain(partition, batch)


def test_a_broker_that_may_not_know_the_producer_gets_one_batch_first() -> None:
    """It takes any sequence then: were the first batch refused, the second would be stored."""
    sequences, partition = ready()
    first = send(sequences, partition)
    assert not sequences.may_drain(partition, batch_of(1))
    acknowledge(sequences, partition, first, -1)
    for _ in range(5):
        send(sequences, partition)


def test_nothing_new_leaves_behind_a_retry_not_even_one_on_the_wire() -> None:
    """Spec 8.4. Else more than five could be stored before an old one is repeated."""
    sequences, partition = known()
    first = send(sequences, partition)
    send(sequences, partition)
    first.in_flight = False  # as a part of a split that has not left yet
    assert not sequences.may_drain(partition, batch_of(1))
    first.attempts = 1
    assert not sequences.may_drain(partition, batch_of(1))
    first.in_flight = True
    assert not sequences.may_drain(partition, batch_of(1))
    acknowledge(sequences, partition, first)
    assert sequences.may_drain(partition, batch_of(1))


def test_retries_go_one_at_a_time_lowest_sequence_first() -> None:
    sequences, partition = known()
    first, second = send(sequences, partition), send(sequences, partition)
    first.in_flight = second.in_flight = False
    first.attempts = second.attempts = 1
    assert sequences.may_drain(partition, first)
    assert not sequences.may_drain(partition, second)
    acknowledge(sequences, partition, first)
    assert sequences.may_drain(partition, second)


def test_nothing_new_goes_to_another_leader_than_what_is_on_the_wire() -> None:
    sequences, partition = known()
    old = send(sequences, partition)
    partition.owner.leader = 2
    assert not sequences.may_drain(partition, batch_of(1))
    partition.owner.leader = 1
    assert sequences.may_drain(partition, batch_of(1))
    partition.owner.leader = 2
    acknowledge(sequences, partition, old)
    send(sequences, partition, to=2)


def test_a_batch_that_is_not_outstanding_any_more_is_not_drained() -> None:
    sequences, partition = known()
    batch = send(sequences, partition)
    acknowledge(sequences, partition, batch)
    assert not sequences.may_drain(partition, batch)


def test_the_repr_tells_where_the_partition_stands() -> None:
    sequences, partition = known()
    send(sequences, partition, 2)
    assert repr(partition) == (
        "<PartitionSequences id=4000:7 next=3 acked=0 outstanding=1 unresolved=None hole=None>"
    )


# -- holes and epochs ----------------------------------------------------------------------


def test_a_rejected_batch_leaves_a_hole_and_the_rest_starts_anew() -> None:
    sequences, partition = known()
    first, second, third = (send(sequences, partition, n) for n in (1, 2, 3))
    first.in_flight = False
    sequences.rejected(partition, first)
    assert partition.hole == 1
    assert sequences.apply_bumps() == [], "two are still on the wire"
    second.in_flight = False
    assert not sequences.may_drain(partition, second)
    assert not sequences.may_drain(partition, batch_of(1))
    assert sequences.apply_bumps() == []
    third.in_flight = False
    assert sequences.apply_bumps() == [partition]
    assert sequences.producer_epoch == 8
    assert sequences.epoch_bumps == 1
    assert [(b.producer_epoch, b.base_sequence) for b in (second, third)] == [(8, 0), (8, 2)]
    assert not second.transactional
    assert (partition.next_sequence, partition.last_acked_sequence) == (5, -1)
    assert partition.hole is None
    assert sequences.may_drain(partition, second)
    assert sequences.apply_bumps() == []


def test_it_is_quiet_while_there_is_an_id_and_nothing_to_renumber_or_resolve() -> None:
    """The scheduler looks no further then."""
    assert not Sequences().quiet
    sequences, partition = known()
    assert sequences.quiet
    rejected, lost = (send(sequences, partition) for _ in range(2))
    assert sequences.quiet, "they are on their way"
    rejected.in_flight = lost.in_flight = False
    sequences.rejected(partition, rejected)
    assert not sequences.quiet
    sequences.apply_bumps()
    assert sequences.quiet
    lost.maybe_written = True
    sequences.expired(partition, lost)
    assert not sequences.quiet
    sequences.resolve()
    assert not sequences.quiet
    sequences.apply_bumps()
    assert sequences.quiet


def test_batches_before_a_hole_keep_their_numbers_and_have_their_end_first() -> None:
    """They may be stored: under new numbers the broker would store them twice."""
    sequences, partition = known()
    before, lost, behind = (send(sequences, partition) for _ in range(3))
    for batch in (before, lost, behind):
        batch.in_flight = False
        batch.attempts = 1
    sequences.rejected(partition, lost)
    assert sequences.apply_bumps() == []
    assert sequences.may_drain(partition, before)
    assert not sequences.may_drain(partition, behind)
    assert sequences.producer_epoch == 7
    acknowledge(sequences, partition, before)
    assert sequences.apply_bumps() == [partition]
    assert (before.producer_epoch, before.base_sequence) == (7, 1)
    assert (behind.producer_epoch, behind.base_sequence) == (8, 0)


def test_of_two_holes_the_first_one_counts() -> None:
    sequences, partition = known()
    batches = [send(sequences, partition) for _ in range(4)]
    for batch in batches:
        batch.in_flight = False
    sequences.rejected(partition, batches[2])
    sequences.rejected(partition, batches[0])
    assert partition.hole == 1
    sequences.bump(partition, 4)
    assert partition.hole == 1
    assert sequences.apply_bumps() == [partition]
    assert [b.base_sequence for b in (batches[1], batches[3])] == [0, 1]


def test_the_very_first_sequence_can_be_lost_as_well() -> None:
    for end in ("rejected", "expired"):
        sequences, partition = ready()
        batch = send(sequences, partition)
        getattr(sequences, end)(partition, batch)
        assert partition.outstanding == []
        assert sequences.resolve() == []
        assert sequences.apply_bumps() == [partition]
        assert send(sequences, partition).producer_epoch == 8
    sequences, partition = ready()
    batch = send(sequences, partition, 2)
    parts = [batch_of(1), batch_of(1)]
    sequences.split(partition, batch, parts)
    assert [part.base_sequence for part in parts] == [0, 1]


def test_batches_without_a_sequence_leave_no_hole() -> None:
    """SI-11: never sent, so no broker misses it."""
    sequences, partition = known()
    for end in (sequences.rejected, sequences.expired):
        end(partition, batch_of(1))
    sequences.split(partition, batch_of(2), [batch_of(1), batch_of(1)])
    assert (partition.hole, partition.unresolved, partition.outstanding) == (None, None, [])
    assert sequences.apply_bumps() == []
    assert sequences.resolve() == []


def test_parts_take_the_place_of_their_batch_among_the_outstanding_ones() -> None:
    """SI-23."""
    sequences, partition = known()
    before, batch, behind = (send(sequences, partition, 3) for _ in range(3))
    parts = [batch_of(2), batch_of(1)]
    sequences.split(partition, batch, parts)
    assert partition.outstanding == [before, *parts, behind]
    assert [part.base_sequence for part in parts] == [4, 6]
    assert [(part.producer_id, part.producer_epoch) for part in parts] == [(4000, 7)] * 2
    assert partition.next_sequence == 10


def test_one_bump_serves_all_that_wait_for_it() -> None:
    sequences, first = known()
    second, third = PartitionSequences(Owner()), PartitionSequences(Owner())
    for partition in (second, third):
        acknowledge(sequences, partition, send(sequences, partition))
    lost = [send(sequences, partition) for partition in (first, second, third)]
    kept = send(sequences, third)
    for batch in lost:
        batch.in_flight = False
    for partition, batch in zip((first, second, third), lost, strict=True):
        sequences.rejected(partition, batch)
    assert sequences.apply_bumps() == [first, second]
    assert sequences.producer_epoch == 8
    kept.in_flight = False
    # It comes later, but the epoch is new enough for it.
    assert sequences.apply_bumps() == [third]
    assert sequences.producer_epoch == 8
    assert (kept.producer_epoch, kept.base_sequence) == (8, 0)


def test_other_partitions_change_when_nothing_of_theirs_is_outstanding() -> None:
    """SI-08, SI-17, TX-35: until then they go on under their epoch, retries included."""
    sequences, partition = known()
    other = PartitionSequences(Owner())
    acknowledge(sequences, other, send(sequences, other))
    old = send(sequences, other)
    sequences.bump(partition, partition.next_sequence)
    assert sequences.apply_bumps() == [partition]
    assert not sequences.may_drain(other, batch_of(1))
    for _ in range(2):
        old.in_flight = False
        old.attempts += 1
        assert sequences.may_drain(other, old)
        old.in_flight = True
    assert old.producer_epoch == 7
    acknowledge(sequences, other, old)
    assert other.last_acked_sequence == 1
    new = send(sequences, other)
    assert (new.producer_epoch, new.base_sequence) == (8, 0)


def test_after_the_last_epoch_a_new_id_is_asked_for() -> None:
    """SI-22: meanwhile nothing is drained; retries go under their own id afterwards."""
    sequences = Sequences()
    sequences.requested()
    sequences.assigned(4000, MAX_EPOCH)
    partition, other = PartitionSequences(Owner()), PartitionSequences(Owner())
    for numbers in (partition, other):
        acknowledge(sequences, numbers, send(sequences, numbers))
    waits = send(sequences, other)
    lost, kept = send(sequences, partition), send(sequences, partition)
    lost.in_flight = kept.in_flight = waits.in_flight = False
    sequences.rejected(partition, lost)
    assert sequences.apply_bumps() == []
    assert sequences.needs_id
    assert not sequences.may_drain(partition, kept)
    assert not sequences.may_drain(other, waits)
    sequences.requested()
    assert sequences.apply_bumps() == []
    sequences.assigned(4001, 0)
    assert sequences.apply_bumps() == [partition]
    assert (kept.producer_id, kept.producer_epoch, kept.base_sequence) == (4001, 0, 0)
    assert sequences.may_drain(other, waits)
    assert (waits.producer_id, waits.base_sequence) == (4000, 1)
    assert sequences.epoch_bumps == 0


def test_answers_to_batches_of_an_older_epoch_change_nothing() -> None:
    sequences, partition = known()
    batch = send(sequences, partition)
    sequences.expired(partition, batch)
    assert sequences.resolve() == []
    assert sequences.apply_bumps() == [partition]
    acknowledge(sequences, partition, batch, 1)
    sequences.rejected(partition, batch)
    sequences.expired(partition, batch)
    sequences.out_of_order(partition, batch)
    sequences.unknown_producer(partition, batch, 9)
    assert (partition.last_acked_sequence, partition.last_acked_offset) == (-1, -1)
    assert (partition.hole, partition.unresolved) == (None, None)
    assert sequences.apply_bumps() == []


# -- batches of unknown fate ---------------------------------------------------------------


def test_behind_a_batch_of_unknown_fate_nothing_new_leaves() -> None:
    """SI-12: retries do, and may tell that it was stored."""
    sequences, partition = known()
    first, second = send(sequences, partition), send(sequences, partition)
    first.in_flight = second.in_flight = False
    second.attempts = 1
    sequences.expired(partition, first)
    assert not sequences.may_drain(partition, batch_of(1))
    assert sequences.resolve() == []
    assert sequences.may_drain(partition, second)
    acknowledge(sequences, partition, second)
    assert sequences.resolve() == [partition]
    assert partition.unresolved is None
    assert sequences.apply_bumps() == []
    assert send(sequences, partition).base_sequence == 3


def test_a_late_success_resolves_as_well() -> None:
    sequences, partition = known()
    batch = send(sequences, partition)
    sequences.expired(partition, batch)
    acknowledge(sequences, partition, batch, 1)
    assert sequences.resolve() == [partition]
    assert sequences.apply_bumps() == []


def test_if_nobody_tells_the_epoch_is_bumped() -> None:
    """SI-14."""
    sequences, partition = known()
    batches = [send(sequences, partition), send(sequences, partition)]
    for batch in reversed(batches):
        sequences.expired(partition, batch)
    assert partition.unresolved == 3
    assert sequences.resolve() == []
    assert sequences.apply_bumps() == [partition]
    assert send(sequences, partition).base_sequence == 0


def test_a_hole_that_is_known_bumps_without_waiting_for_the_unknown() -> None:
    sequences, partition = known()
    unknown, lost, behind = (send(sequences, partition) for _ in range(3))
    for batch in (unknown, lost, behind):
        batch.in_flight = False
    sequences.expired(partition, unknown)
    sequences.rejected(partition, lost)
    assert sequences.apply_bumps() == [partition]
    assert behind.base_sequence == 0
    assert partition.unresolved is None
    assert sequences.resolve() == []


# -- with the accumulator ------------------------------------------------------------------


class Endless(Undivided):
    """Memory without limits that counts."""

    def __init__(self) -> None:
        self.taken = 0
        self.total = self.available = 2**60

    def try_reserve(self, size: int, share: None = None, *, spares: bool = False) -> bool:
        self.taken += size
        return True

    def release(self, size: int) -> None:
        assert size <= self.taken
        self.taken -= size


class Rig:
    """An idempotent producer without a network: what is drained is answered by hand.

    One record makes a batch, unless it is told otherwise. Nothing lingers.
    """

    def __init__(
        self,
        *,
        partitions: int = 1,
        batch_size: int = 1,
        retries: int = 10**6,
        epoch: int = 0,
        codec: Codec | None = None,
    ) -> None:
        self.now = 1000.0
        self.memory = Endless()
        self.sequences = Sequences()
        self.retries = retries
        self.accumulator = Accumulator(
            self.memory,
            batch_size=batch_size,
            linger=0.0,
            delivery_timeout=10.0,
            retry_backoff=ExponentialBackoff(0.1, 0.1, random=lambda: 0.5),
            random=lambda: 0,
            codec=codec,
            sequences=self.sequences,
        )
        leaders = tuple(PartitionMetadata(n, leader=1, leader_epoch=0) for n in range(partitions))
        self.topic = self.accumulator.update_topic(TopicMetadata("orders", leaders), self.now)
        self.sequences.requested()
        self.sequences.assigned(4000, epoch)

    def send(self, count: int = 1, *, partition: int = 0, size: int = 1) -> list[Delivery]:
        deliveries = []
        for _ in range(count):
            delivery = self.accumulator.append(
                self.topic, partition, 0, None, bytes(size), NO_HEADERS, self.now
            )
            assert delivery is not None
            deliveries.append(delivery)
        return deliveries

    def step(self) -> None:
        self.accumulator.news = True
        while self.accumulator.news:
            self.accumulator.news = False
            self.accumulator.touch_partitions(self.sequences.resolve(), self.now)
            self.accumulator.touch_partitions(self.sequences.apply_bumps(), self.now)
            self.accumulator.expire(self.now)
            self.accumulator.fire_timers(self.now)
            self.accumulator.give_back()

    def drain(self) -> list[ProducerBatch]:
        """All that may leave now, request by request."""
        batches: list[ProducerBatch] = []
        self.accumulator.news = True
        while self.accumulator.news:
            self.step()
            while more := self.accumulator.drain(1, 10**6, self.now):
                batches += more
        for batch in batches:
            decode_batch(b"".join(batch.buffers()))
        return batches

    def drain_one(self) -> ProducerBatch:
        [batch] = self.drain()
        return batch

    def later(self, seconds: float = 0.2) -> None:
        """Long enough for a backoff."""
        self.now += seconds

    def acknowledge(self, batch: ProducerBatch, offset: int = 0) -> bool:
        self.accumulator.landed(batch)
        fresh = self.accumulator.acknowledge(batch, offset, -1, self.now)
        self.step()
        return fresh

    def refuse(self, batch: ProducerBatch, code: ErrorCode, *, log_start: int = -1) -> Action:
        self.accumulator.landed(batch)
        batch.maybe_written = batch.maybe_written or rule_for(code).persisted != "no"
        if batch.state != PENDING:
            self.step()
            return Action.FAIL
        decision = decide(
            code,
            records=batch.count,
            attempts=batch.attempts,
            retries=self.retries,
            expired=False,
            idempotent=True,
        )
        partition = self.accumulator.sequences_of(batch)
        if decision.action is Action.RETRY:
            if decision.sequence == "out_of_order":
                self.sequences.out_of_order(partition, batch)
            elif decision.sequence:
                self.sequences.unknown_producer(partition, batch, log_start)
            self.accumulator.retry(batch, self.now)
        elif decision.action is Action.SPLIT:
            self.accumulator.split(batch, self.now)
        else:
            self.accumulator.fail(batch, Failure(BrokerRejected, code.name, code=code), self.now)
        self.step()
        return decision.action

    def warm(self, partition: int = 0) -> None:
        """A first record is stored, so that more may be pipelined. It has sequence 0."""
        self.send(partition=partition)
        self.acknowledge(self.drain_one())

    def queue(self, partition: int = 0) -> PartitionQueue:
        queue = self.topic.queues[partition]
        assert queue is not None
        return queue

    def numbers(self, partition: int = 0) -> PartitionSequences:
        return self.queue(partition).sequences

    def queued(self, partition: int = 0) -> list[int]:
        return [batch.base_sequence for batch in self.queue(partition).batches]


def label(batch: ProducerBatch) -> tuple[int, int]:
    """Epoch and sequence, as they are on the wire."""
    header = read_header(b"".join(batch.buffers()))
    assert (header.producer_epoch, header.base_sequence) == (
        batch.producer_epoch,
        batch.base_sequence,
    )
    return header.producer_epoch, header.base_sequence


def test_batches_in_flight_are_acknowledged_in_order() -> None:
    """SI-04, SI-22."""
    rig = Rig()
    rig.warm()
    deliveries = rig.send(2)
    first, second = rig.drain()
    assert [label(first), label(second)] == [(0, 1), (0, 2)]
    rig.acknowledge(first, 1)
    assert (rig.numbers().last_acked_sequence, rig.numbers().next_sequence) == (1, 3)
    assert deliveries[0].done()
    assert not deliveries[1].done()
    rig.acknowledge(second, 2)
    assert rig.numbers().last_acked_sequence == 2
    assert [delivery.result().offset for delivery in deliveries] == [1, 2]


def test_after_a_retriable_failure_all_go_again_in_order_one_at_a_time() -> None:
    """SI-05: the later ones get OUT_OF_ORDER, which is no reason for a new epoch."""
    rig = Rig()
    rig.warm()
    deliveries = rig.send(4)
    batches = rig.drain()
    before = [b"".join(batch.buffers()) for batch in batches]
    rig.refuse(batches[0], E.NOT_ENOUGH_REPLICAS)
    for batch in batches[1:]:
        rig.refuse(batch, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    rig.send()
    assert rig.queued() == [1, 2, 3, 4, -1]
    rig.later()
    for batch, data in zip(batches, before, strict=True):
        assert rig.drain_one() is batch
        assert b"".join(batch.buffers()) == data
        assert rig.drain() == []
        rig.acknowledge(batch)
    assert label(rig.drain_one()) == (0, 5)
    assert all(delivery.done() for delivery in deliveries)
    assert rig.sequences.epoch_bumps == 0


def test_behind_a_batch_that_fails_for_good_the_rest_starts_at_zero() -> None:
    """SI-06."""
    rig = Rig()
    rig.warm()
    lost, kept = rig.send(2)
    first, second = rig.drain()
    assert rig.refuse(first, E.MESSAGE_TOO_LARGE) is Action.FAIL
    assert rig.sequences.producer_epoch == 0, "the second is still on the wire"
    rig.refuse(second, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    rig.later()
    assert label(rig.drain_one()) == (1, 0)
    rig.acknowledge(second, 1)
    assert isinstance(lost.exception(), BrokerRejected)
    assert kept.result().offset == 1
    assert (rig.numbers().next_sequence, rig.numbers().last_acked_sequence) == (1, 0)


def test_out_of_order_right_behind_the_last_acknowledged_one_needs_a_new_epoch() -> None:
    """SI-07."""
    rig = Rig()
    rig.warm()
    [delivery] = rig.send()
    batch = rig.drain_one()
    rig.refuse(batch, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert rig.sequences.producer_epoch == 1
    rig.later()
    assert label(rig.drain_one()) == (1, 0)
    assert rig.numbers().next_sequence == 1
    rig.acknowledge(batch)
    assert delivery.done()


def test_an_idle_partition_takes_over_a_new_epoch_when_it_is_next_drained() -> None:
    """SI-08."""
    rig = Rig(partitions=2)
    rig.warm(0)
    rig.warm(1)
    rig.send()
    rig.refuse(rig.drain_one(), E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert rig.numbers(1).producer_epoch == 0
    rig.send(partition=1)
    assert [label(batch) for batch in rig.drain()] == [(1, 0)]
    assert rig.numbers(1).producer_epoch == 1


@pytest.mark.parametrize("stored", [True, False])
def test_a_partition_with_a_retry_keeps_its_epoch_until_that_has_its_end(stored: bool) -> None:
    """SI-08, SI-15, SI-17, TX-35: retried twice; then it restarts at 0, acknowledged or not."""
    rig = Rig(partitions=2)
    rig.warm(0)
    rig.warm(1)
    rig.send(partition=1)
    old = rig.drain_one()
    rig.refuse(old, E.NOT_ENOUGH_REPLICAS)
    rig.send(partition=0)
    rig.refuse(rig.drain_one(), E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert rig.sequences.producer_epoch == 1
    rig.send(partition=1)
    for _ in range(2):
        rig.later()
        assert old in rig.drain()
        assert label(old) == (0, 1)
        assert rig.queued(1) == [-1]
        rig.refuse(old, E.NOT_ENOUGH_REPLICAS)
    rig.later()
    assert rig.drain_one() is old
    if stored:
        assert rig.acknowledge(old)
    else:
        rig.refuse(old, E.TOPIC_AUTHORIZATION_FAILED)
    assert label(rig.drain_one()) == (1, 0)
    # Where it failed, the hole is in an epoch that is over anyway: one bump is enough.
    assert rig.sequences.producer_epoch == 1


def test_answers_out_of_order_are_queued_in_order() -> None:
    """SI-09: the second's OUT_OF_ORDER comes first, then the first's retriable error."""
    rig = Rig()
    rig.warm()
    rig.send(2)
    first, second = rig.drain()
    rig.refuse(second, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert rig.queued() == [2]
    rig.later()
    assert rig.drain() == [], "the first one is on the wire"
    rig.refuse(first, E.NOT_ENOUGH_REPLICAS)
    assert rig.queued() == [1, 2]
    rig.later()
    assert rig.drain() == [first]
    rig.acknowledge(first)
    assert rig.drain() == [second]
    assert rig.sequences.epoch_bumps == 0


def test_a_repeated_batch_that_the_broker_has_is_a_success() -> None:
    """SI-10: the second was acknowledged first; DUPLICATE_SEQUENCE is told as offset -1."""
    rig = Rig()
    rig.warm()
    deliveries = rig.send(2)
    first, second = rig.drain()
    rig.acknowledge(second, 2)
    assert rig.numbers().last_acked_sequence == 2
    rig.refuse(first, E.REQUEST_TIMED_OUT)
    rig.later()
    assert rig.drain_one() is first
    assert label(first) == (0, 1)
    rig.acknowledge(first, -1)
    assert [delivery.result().offset for delivery in deliveries] == [-1, 2]
    assert rig.numbers().last_acked_sequence == 2
    assert rig.sequences.epoch_bumps == 0


def test_what_was_never_sent_can_expire_without_consequences() -> None:
    """SI-11."""
    rig = Rig()
    rig.warm()
    [delivery] = rig.send()
    rig.later(10.0)
    rig.step()
    error = delivery.exception()
    assert isinstance(error, DeliveryTimeout)
    assert error.persisted == "no"
    assert rig.numbers().unresolved is None
    rig.send()
    assert label(rig.drain_one()) == (0, 1)


def expire_the_first_of_two(rig: Rig) -> ProducerBatch:
    """The first is sent, put back, and expires; the second, sent with it, is put back."""
    rig.warm()
    [lost] = rig.send()
    rig.later(1.0)
    rig.send()
    first, second = rig.drain()
    rig.refuse(first, E.NETWORK_EXCEPTION)
    rig.refuse(second, E.NETWORK_EXCEPTION)
    rig.later(9.0)
    rig.step()
    error = lost.exception()
    assert isinstance(error, DeliveryTimeout)
    assert error.persisted == "maybe"
    rig.send()
    assert rig.drain() == [second]
    return second


def test_behind_an_expired_batch_the_next_one_tells_that_it_was_stored() -> None:
    """SI-12."""
    rig = Rig()
    second = expire_the_first_of_two(rig)
    rig.acknowledge(second)
    assert label(rig.drain_one()) == (0, 3)
    assert rig.sequences.epoch_bumps == 0


def test_behind_an_expired_batch_the_next_one_tells_that_it_was_not_stored() -> None:
    """SI-13."""
    rig = Rig()
    second = expire_the_first_of_two(rig)
    rig.refuse(second, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert rig.sequences.producer_epoch == 1
    assert rig.queued() == [0, -1]
    rig.later()
    assert label(rig.drain_one()) == (1, 0)
    rig.acknowledge(second)
    assert label(rig.drain_one()) == (1, 1)


def test_when_all_that_was_sent_has_expired_a_new_epoch_begins() -> None:
    """SI-14."""
    rig = Rig()
    rig.warm()
    deliveries = rig.send(2)
    for batch in rig.drain():
        rig.refuse(batch, E.NETWORK_EXCEPTION)
    rig.later(10.0)
    rig.send()
    assert label(rig.drain_one()) == (1, 0)
    assert all(isinstance(d.exception(), DeliveryTimeout) for d in deliveries)


def test_a_batch_that_expires_on_its_first_way_is_of_unknown_fate_too() -> None:
    """Deviation 3: Java does not mark it, though it may be stored."""
    rig = Rig()
    rig.warm()
    [delivery] = rig.send()
    batch = rig.drain_one()
    rig.later(10.0)
    rig.accumulator.expire(rig.now)
    assert rig.numbers().unresolved == 2
    error = delivery.exception()
    assert error is not None
    assert error.persisted == "maybe"
    taken = rig.memory.taken
    rig.send()
    assert not rig.acknowledge(batch), "too late for the user, but good to know"
    assert rig.memory.taken < taken + 90
    assert label(rig.drain_one()) == (0, 2)


def test_an_epoch_does_not_wait_for_what_was_given_up_on_the_wire() -> None:
    """Should it arrive after all, the new epoch fences it, or it was there first."""
    rig = Rig()
    rig.warm()
    [delivery] = rig.send()
    batch = rig.drain_one()
    rig.later(10.0)
    rig.send()
    assert label(rig.drain_one()) == (1, 0)
    assert isinstance(delivery.exception(), DeliveryTimeout)
    rig.refuse(batch, E.INVALID_PRODUCER_EPOCH)
    assert rig.sequences.epoch_bumps == 1
    assert batch not in rig.queue().in_flight


def test_a_batch_that_fails_and_may_be_stored_leaves_no_sure_hole() -> None:
    """With its retries used up after a lost connection: the next one may be stored as well,
    so it asks under its own number first. A new number would store it twice."""
    rig = Rig(retries=0)
    rig.warm()
    rig.send()
    rig.retries = 1
    rig.send()
    first, second = rig.drain()
    rig.retries = 0
    assert rig.refuse(first, E.NETWORK_EXCEPTION) is Action.FAIL
    rig.retries = 5
    rig.refuse(second, E.NETWORK_EXCEPTION)
    rig.later()
    assert rig.drain() == [second]
    assert label(second) == (0, 2)
    rig.acknowledge(second)
    rig.send()
    assert label(rig.drain_one()) == (0, 3)
    assert rig.sequences.epoch_bumps == 0


def test_data_of_other_partitions_still_leaves_while_one_waits_for_its_epoch() -> None:
    """SI-15, deviation 1: Java's drain ends at the blocked partition."""
    rig = Rig(partitions=3)
    for partition in range(3):
        rig.warm(partition)
    rig.send(2, partition=1)
    lost, on_wire = rig.drain()
    rig.refuse(lost, E.INVALID_RECORD)
    assert on_wire.in_flight
    for partition in (1, 0, 2):
        rig.send(partition=partition)
    assert [batch.partition for batch in rig.drain()] == [0, 2]


@pytest.mark.parametrize("log_start", [-1, 50])
def test_unknown_producer_id_without_and_with_news_of_the_log(log_start: int) -> None:
    """SI-18: without a log start offset the same again; else all start anew, once."""
    rig = Rig()
    rig.warm()
    deliveries = rig.send(3)
    batches = rig.drain()
    for batch in batches:
        assert rig.refuse(batch, E.UNKNOWN_PRODUCER_ID, log_start=log_start) is Action.RETRY
    rig.later()
    epoch, first = (0, 1) if log_start < 0 else (1, 0)
    for number, batch in enumerate(batches):
        assert rig.drain() == [batch]
        assert label(batch) == (epoch, first + number)
        rig.acknowledge(batch)
    assert rig.sequences.producer_epoch == epoch
    assert all(delivery.done() for delivery in deliveries)


def test_unknown_producer_id_without_truncation_starts_anew() -> None:
    """SI-19: the log still has what we wrote last, the delivery stays open."""
    rig = Rig()
    rig.warm()
    [delivery] = rig.send()
    batch = rig.drain_one()
    rig.refuse(batch, E.UNKNOWN_PRODUCER_ID, log_start=0)
    assert (rig.sequences.producer_epoch, rig.numbers().last_acked_sequence) == (1, -1)
    assert not delivery.done()
    rig.later()
    assert label(rig.drain_one()) == (1, 0)


def test_a_fatal_error_stops_everything_and_memory_waits_for_the_network() -> None:
    """SI-20."""
    rig = Rig()
    rig.warm()
    rig.send(3)
    first, second, third = rig.drain()
    taken = rig.memory.taken
    assert rig.refuse(first, E.CLUSTER_AUTHORIZATION_FAILED) is Action.FATAL
    rig.sequences.fail(ValueError("not allowed"))
    aborted = rig.accumulator.abort("not allowed", None, rig.now)
    assert aborted == [second, third]
    rig.accumulator.give_back()
    assert rig.memory.taken == second.memory + third.memory < taken
    rig.acknowledge(second)
    rig.refuse(third, E.NETWORK_EXCEPTION)
    assert rig.memory.taken == 0
    rig.send()
    assert rig.drain() == []


def test_an_error_of_the_batch_alone_leaves_the_producer_healthy() -> None:
    """SI-21."""
    rig = Rig()
    rig.warm()
    [bad] = rig.send()
    rig.refuse(rig.drain_one(), E.UNSUPPORTED_FOR_MESSAGE_FORMAT)
    assert isinstance(bad.exception(), BrokerRejected)
    [good] = rig.send()
    rig.acknowledge(rig.drain_one(), 4)
    assert good.result().offset == 4


def test_a_lost_request_is_repeated_with_its_own_sequence() -> None:
    """SI-22."""
    rig = Rig()
    [delivery] = rig.send()
    batch = rig.drain_one()
    rig.refuse(batch, E.NETWORK_EXCEPTION)
    assert rig.numbers().next_sequence == 1
    rig.later()
    assert rig.drain_one() is batch
    assert (label(batch), rig.numbers().next_sequence) == ((0, 0), 1)
    rig.acknowledge(batch)
    assert delivery.done()


def test_at_the_last_epoch_a_new_id_is_awaited_and_all_is_sent() -> None:
    """SI-22: a batch of another partition goes on under the old id."""
    rig = Rig(partitions=2, epoch=MAX_EPOCH)
    rig.warm(0)
    rig.warm(1)
    rig.send(partition=0)
    rig.send(partition=1)
    broken, lost = rig.drain()
    rig.refuse(broken, E.OUT_OF_ORDER_SEQUENCE_NUMBER)
    rig.refuse(lost, E.NETWORK_EXCEPTION)
    rig.later()
    assert rig.sequences.needs_id
    assert rig.drain() == []
    rig.sequences.requested()
    rig.sequences.assigned(4001, 0)
    rig.accumulator.touch_all(rig.now)
    assert {label(batch) for batch in rig.drain()} == {(0, 0), (MAX_EPOCH, 1)}
    assert (broken.producer_id, lost.producer_id) == (4001, 4000)


@pytest.mark.parametrize("which", [None, codec("lz4")])
def test_the_parts_of_a_split_share_the_sequences_of_their_batch(which: Codec | None) -> None:
    """SI-23: one after the other, no retry counted, memory given back once."""
    rig = Rig(batch_size=1600, retries=0, codec=which)
    deliveries = rig.send(2, size=700)
    batch = rig.drain_one()
    assert (batch.count, rig.numbers().next_sequence) == (2, 2)
    assert rig.memory.taken == batch.memory > 0
    rig.accumulator.landed(batch)
    rig.accumulator.split(batch, rig.now)
    rig.accumulator.give_back()
    assert rig.memory.taken == 0
    assert not batch.in_flight
    assert rig.numbers().next_sequence == 2
    assert rig.queued() == [0, 1]
    if which is not None:
        assert rig.accumulator.estimator.estimate("orders", which.codec_id) == pytest.approx(1.0)
    for sequence in range(2):
        part = rig.drain_one()
        assert label(part) == (0, sequence)
        assert part.attempts == 0
        rig.acknowledge(part, 70 + sequence)
    assert [delivery.result().offset for delivery in deliveries] == [70, 71]
    assert rig.memory.taken == 0


@pytest.mark.parametrize("by", ["expiry", "abort"])
def test_parts_that_are_given_up_before_they_leave_do_not_block_the_partition(by: str) -> None:
    """They have a sequence without having been sent."""
    rig = Rig(batch_size=400)
    deliveries = rig.send(4, size=60)
    for _ in range(2):
        rig.refuse(rig.drain_one(), E.MESSAGE_TOO_LARGE)
    part = rig.drain_one()
    assert rig.numbers().outstanding == [part, *rig.queue().batches]
    assert len(rig.queue().batches) == 2
    if by == "expiry":
        rig.later(10.0)
        rig.step()
    else:
        rig.accumulator.abort("enough", None, rig.now)
    assert rig.numbers().outstanding == []
    assert all(delivery.exception() for delivery in deliveries)
    rig.send(size=500)
    assert label(rig.drain_one()) == (1, 0)


def test_sequences_wrap_in_the_middle_of_a_partition() -> None:
    """SI-24: retries across the wrap keep their order."""
    rig = Rig()
    rig.warm()
    rig.numbers().next_sequence = LAST - 1
    rig.numbers().last_acked_sequence = LAST - 2
    rig.send(4)
    batches = rig.drain()
    assert [batch.base_sequence for batch in batches] == [LAST - 1, LAST, 0, 1]
    for batch in reversed(batches):
        rig.refuse(batch, E.NETWORK_EXCEPTION)
    assert rig.queued() == [LAST - 1, LAST, 0, 1]
    rig.later()
    for batch in batches:
        assert rig.drain() == [batch]
        rig.acknowledge(batch)
    assert rig.numbers().last_acked_sequence == 1
    rig.send()
    assert label(rig.drain_one()) == (0, 2)


def test_aborted_batches_are_of_unknown_fate_if_they_were_sent() -> None:
    rig = Rig(partitions=2)
    rig.warm(0)
    rig.warm(1)
    sent = rig.send(partition=0)
    rig.drain()
    unsent = rig.send(partition=1)
    rig.accumulator.abort("enough", None, rig.now)
    persisted = []
    for delivery in sent + unsent:
        error = delivery.exception()
        assert isinstance(error, AbortedError)
        persisted.append(error.persisted)
    assert persisted == ["maybe", "no"]
    assert rig.numbers(0).unresolved == 2
    assert rig.numbers(1).unresolved is None


# -- transactions --------------------------------------------------------------------------


def transactional() -> tuple[TransactionalSequences, PartitionSequences]:
    sequences = TransactionalSequences(lambda _: True)
    sequences.renew(4000, 7)
    partition = PartitionSequences(Owner())
    acknowledge(sequences, partition, send(sequences, partition), 0)
    return sequences, partition


def test_a_transactional_producer_never_asks_for_an_id_by_itself() -> None:
    sequences = TransactionalSequences(lambda _: True)
    assert not sequences.needs_id
    sequences.renew(4000, 7)
    assert sequences.state is IdState.READY
    assert (sequences.producer_id, sequences.producer_epoch) == (4000, 7)
    assert not sequences.needs_id


def test_batches_wait_until_their_partition_is_in_the_transaction() -> None:
    """TX-28."""
    inside: set[PartitionSequences] = set()
    sequences = TransactionalSequences(inside.__contains__)
    sequences.renew(4000, 7)
    partition = PartitionSequences(Owner())
    assert not sequences.may_drain(partition, batch_of(1))
    inside.add(partition)
    assert send(sequences, partition).transactional


def test_a_hole_in_a_transaction_renumbers_nothing() -> None:
    """Spec 7.1: the transaction will be aborted, and the next one has another epoch."""
    sequences, partition = transactional()
    first, second = send(sequences, partition), send(sequences, partition)
    first.in_flight = False
    sequences.rejected(partition, first)
    assert sequences.damaged
    assert not sequences.uncertain
    assert sequences.apply_bumps() == []
    assert sequences.producer_epoch == 7
    assert second.base_sequence == 2
    assert not sequences.may_drain(partition, batch_of(1))
    acknowledge(sequences, partition, second)
    sequences.renew(4000, 8)
    assert not sequences.damaged
    assert send(sequences, partition).base_sequence == 0
    assert sequences.epoch_bumps == 1


def test_a_batch_that_is_given_up_is_uncertain_only_where_it_may_be_stored() -> None:
    """TX-30, TX-31."""
    for in_flight, maybe_written, uncertain in (
        (True, False, True),
        (False, True, True),
        (False, False, False),
    ):
        sequences, partition = transactional()
        batch = send(sequences, partition)
        batch.in_flight = in_flight
        batch.maybe_written = maybe_written
        sequences.expired(partition, batch)
        assert sequences.damaged
        assert sequences.uncertain is uncertain
        assert sequences.resolve() == []
        assert sequences.uncertain is uncertain
    unsent = batch_of(1)
    sequences, partition = transactional()
    sequences.expired(partition, unsent)
    assert not sequences.damaged


def test_the_numbers_go_back_to_what_the_broker_has() -> None:
    """TX-33: where there is no new epoch."""
    sequences, partition = transactional()
    batch = send(sequences, partition, 3)
    batch.in_flight = False
    sequences.rejected(partition, batch)
    other = PartitionSequences(Owner())
    batch = send(sequences, other, 3)
    batch.in_flight = False
    sequences.rejected(other, batch)
    sequences.rewind()
    assert send(sequences, partition).base_sequence == 1
    assert send(sequences, other).base_sequence == 0


def test_a_late_answer_of_an_older_epoch_damages_nothing() -> None:
    """TX-37."""
    sequences, partition = transactional()
    late = send(sequences, partition)
    sequences.expired(partition, late)
    sequences.renew(4000, 8)
    sequences.rejected(partition, late)
    sequences.expired(partition, late)
    sequences.unknown_producer(partition, late, 50)
    assert not sequences.damaged
    assert send(sequences, partition).base_sequence == 0


def test_out_of_order_is_repeated_only_behind_what_is_missing() -> None:
    """Spec 8.5: the next one in line would be refused for ever."""
    sequences, partition = transactional()
    first, second = send(sequences, partition), send(sequences, partition)
    assert sequences.gives_up(partition, first, "out_of_order", -1)
    assert not sequences.gives_up(partition, second, "out_of_order", -1)
    sequences.out_of_order(partition, second)
    assert not sequences.damaged
    sequences.expired(partition, first)
    assert sequences.gives_up(partition, second, "out_of_order", -1)
    ordinary, partition = known()
    assert not ordinary.gives_up(partition, send(ordinary, partition), "out_of_order", -1)


@pytest.mark.parametrize("why", ["out_of_order", "unknown_producer"])
def test_no_part_of_what_may_be_stored_as_a_whole_gets_a_new_epoch(why: str) -> None:
    sequences, partition = known()
    batch = send(sequences, partition, 4)
    batch.maybe_written = True
    parts = batch.split(1)
    sequences.split(partition, batch, parts)
    for part in parts:
        assert sequences.gives_up(partition, part, why, 0)
        sequences.expired(partition, part)  # what is given up


def test_unknown_producer_in_a_transaction() -> None:
    """SI-18, SI-19: where the log has lost all that was ours, it begins anew in this epoch."""
    sequences, partition = transactional()
    first, second = send(sequences, partition, 2), send(sequences, partition, 3)
    assert partition.last_acked_offset == 0
    assert not sequences.gives_up(partition, first, "unknown_producer", -1)
    assert sequences.gives_up(partition, first, "unknown_producer", 0)
    sequences.unknown_producer(partition, first, -1)
    assert first.base_sequence == 1
    assert not sequences.gives_up(partition, first, "unknown_producer", 50)
    for batch in (first, second):  # the second time nothing changes
        sequences.unknown_producer(partition, batch, 50)
        assert (first.base_sequence, second.base_sequence) == (0, 2)
    assert (first.producer_epoch, partition.next_sequence) == (7, 5)
    assert not sequences.damaged


@pytest.mark.parametrize("why", ["unknown_producer", "out_of_order"])
def test_an_answer_to_a_number_that_was_changed_since_gives_nothing_up(why: str) -> None:
    """Spec 8.5: the batch was on its way, to another leader, when the first one's answer came."""
    sequences, partition = transactional()
    first, second = send(sequences, partition, 2), send(sequences, partition, 3)
    sequences.unknown_producer(partition, first, 50)
    first.seal()
    acknowledge(sequences, partition, first, 50)
    assert (second.base_sequence, partition.outstanding) == (2, [second])
    assert not sequences.gives_up(partition, second, why, 50)
    sequences.unknown_producer(partition, second, 50)
    assert second.base_sequence == 2
    # Behind a batch that nobody knows the end of, what is missing may be that one.
    partition.unresolved = 2
    assert sequences.gives_up(partition, second, why, 50) is (why == "out_of_order")
    partition.unresolved = None
    # Sent with its new number, it is as with any other.
    second.seal()
    assert sequences.gives_up(partition, second, why, 50)
