from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import FrameType
from typing import Any

import pytest

from asyncproducer.core import accumulator as module
from asyncproducer.core.accumulator import Accumulator, Fence, PartitionQueue, TopicState
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch, batch_upper_bound
from asyncproducer.core.compression import Codec, codec
from asyncproducer.core.delivery import Delivery, Failure
from asyncproducer.core.metadata import PartitionMetadata, TopicMetadata
from asyncproducer.core.sequences import Sequences
from asyncproducer.errors import (
    AbortedError,
    BrokerError,
    BrokerRejected,
    DeliveryTimeout,
    IllegalStateError,
)
from asyncproducer.net.buffer_pool import BufferPool, Share, Ticket
from asyncproducer.testing.batches import decode_batch

T0 = 1_700_000_000_000
NEVER = float("inf")
COMPILED = not str(module.__file__).endswith(".py")


class Pool:
    """Memory that counts. Nobody waits in it unless a test says so."""

    def __init__(self, total: int = 10**9) -> None:
        self.total = total
        self.available = total
        self.waiting = 0
        self.on_release: Callable[[], None] | None = None
        self.shares: dict[int, Share] = {}
        #: Brokers that get no more.
        self.held_up: set[int] = set()
        #: From whom a partition was taken.
        self.recalled: list[int] = []

    def try_reserve(self, size: int, share: Any = None, *, spares: bool = False) -> bool:
        if self.waiting or size > self.available or self.is_held_up(share):
            return False
        self.available -= size
        return True

    def release(self, size: int) -> None:
        self.available += size
        assert self.available <= self.total
        if self.on_release is not None:
            self.on_release()

    def share(self, node: int) -> Share:
        return self.shares.setdefault(node, Share(node))

    def is_held_up(self, share: Share | None, size: int = 0) -> bool:
        return share is not None and share.node in self.held_up

    def has_better(self, share: Share, size: int = 0) -> bool:
        return not self.held_up.issuperset(self.shares)

    def move(self, share: Share | None, node: int) -> Share:
        self.recalled += [] if share is None else [share.node]
        return self.share(node)

    def is_wanted(self, share: Share) -> bool:
        return bool(self.waiting or share.line)

    def held(self, *nodes: int) -> list[int]:
        return [self.share(node).held for node in nodes]

    @property
    def taken(self) -> int:
        return self.total - self.available


class Rig:
    """An accumulator with a topic, a clock and short ways to do things."""

    def __init__(
        self,
        leaders: Sequence[int] = (1,),
        *,
        memory: Pool | None = None,
        batch_size: int = 1000,
        linger: float = 0.005,
        delivery_timeout: float = 120.0,
        jitter: Callable[[], float] = lambda: 0.5,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.short_ways = 0
        self.memory = Pool() if memory is None else memory
        self.randoms = count()
        self.accumulator = Accumulator(
            self.memory,
            batch_size=batch_size,
            linger=linger,
            delivery_timeout=delivery_timeout,
            retry_backoff=ExponentialBackoff(0.1, 1.0, random=jitter),
            random=lambda: next(self.randoms),
            **options,
        )
        self.epochs = [0] * len(leaders)
        self.topic = self.see(leaders)

    def see(self, leaders: Sequence[int], epochs: Sequence[int] | None = None) -> TopicState:
        """Metadata arrives."""
        if epochs is not None:
            self.epochs = list(epochs)
        self.epochs += [0] * (len(leaders) - len(self.epochs))
        partitions = tuple(
            PartitionMetadata(n, leader, self.epochs[n]) for n, leader in enumerate(leaders)
        )
        self.topic = self.accumulator.update_topic(TopicMetadata("orders", partitions), self.now)
        return self.topic

    def try_append(
        self, value: Any = b"v", *, partition: int = 0, granted: int = 0
    ) -> Delivery | None:
        """As intake does it: the short way first."""
        if not granted and not self.memory.waiting and self.topic.known:
            size = len(value or b"") + len(NO_HEADERS)
            delivery = self.accumulator.append_open(
                self.topic, partition, T0, None, value, NO_HEADERS, size
            )
            if delivery is not None:
                self.short_ways += 1
                return delivery
        return self.accumulator.append(
            self.topic, partition, T0, None, value, NO_HEADERS, self.now, granted
        )

    def append(self, value: Any = b"v", *, partition: int = 0) -> Delivery:
        delivery = self.try_append(value, partition=partition)
        assert delivery is not None
        return delivery

    def fill(self, *partitions: int) -> list[Delivery]:
        """A batch of two records that is exactly full, in each of the partitions."""
        deliveries: list[Delivery] = []
        for partition in partitions:
            before = len(self.queue(partition).batches) if self.topic.queues[partition] else 0
            deliveries.append(self.append(bytes(460), partition=partition))
            deliveries.append(self.append(bytes(461), partition=partition))
            queue = self.queue(partition)
            assert queue.open is None
            assert len(queue.batches) == before + 1
        return deliveries

    def ready(self) -> set[int]:
        """The nodes for which something can leave now."""
        self.accumulator.fire_timers(self.now)
        return set(self.accumulator.ready)

    def drain(self, node: int = 1, max_size: int = 10**6) -> list[ProducerBatch]:
        """In a new turn of the loop."""
        self.accumulator.turned(self.now)
        self.accumulator.fire_timers(self.now)
        return self.accumulator.drain(node, max_size, self.now)

    def drain_one(self, node: int = 1) -> ProducerBatch:
        [batch] = self.drain(node)
        return batch

    def acknowledge(self, batch: ProducerBatch, offset: int = 0) -> bool:
        self.accumulator.landed(batch)
        return self.accumulator.acknowledge(batch, offset, -1, self.now)

    def retry(self, batch: ProducerBatch) -> None:
        self.accumulator.landed(batch)
        self.accumulator.retry(batch, self.now)

    def fail(self, batch: ProducerBatch) -> bool:
        self.accumulator.landed(batch)
        return self.accumulator.fail(batch, Failure(BrokerRejected, "no"), self.now)

    def queue(self, partition: int = 0) -> PartitionQueue:
        queue = self.topic.queues[partition]
        assert queue is not None
        return queue

    def taken(self) -> int:
        """Reserved memory, when all that is free has been handed back."""
        self.accumulator.give_back()
        of_batches = sum(share.held for share in self.memory.shares.values())
        assert of_batches == sum(batch.memory for batch in self.batches())
        return self.memory.taken

    def batches(self) -> set[ProducerBatch]:
        """All that have no end yet, or are on their way."""
        batches = set(self.accumulator.incomplete)
        for topic in self.accumulator.topics.values():
            for queue in topic.queues:
                if queue is not None:
                    batches.update(queue.in_flight)
        return batches


def partitions(batches: Sequence[ProducerBatch]) -> list[int]:
    return [batch.partition for batch in batches]


def values(batch: ProducerBatch) -> list[bytes | None]:
    return [record.value for record in decode_batch(b"".join(batch.buffers()))]


def test_the_pool_of_these_tests_counts() -> None:
    pool = Pool(100)
    assert pool.try_reserve(60)
    assert not pool.try_reserve(41)
    assert pool.taken == 60
    pool.release(60)
    assert pool.try_reserve(100)
    with pytest.raises(AssertionError):
        pool.release(101)


# -- filling and lingering -----------------------------------------------------------------


def test_a_batch_fills_and_then_leaves_with_its_records_in_order() -> None:
    """RA-02."""
    rig = Rig(batch_size=1000)
    sent: list[bytes] = []
    while len(rig.queue().batches if rig.topic.queues[0] else ()) < 2:
        assert rig.ready() == set()
        sent.append(b"%090d" % len(sent))
        rig.append(sent[-1])
    assert len(sent) == 10, "each takes 97 bytes of the 939 behind the header"
    assert rig.ready() == {1}
    first = rig.drain_one()
    assert values(first) == sent[:-1]
    assert rig.ready() == set(), "the second one lingers"


@pytest.mark.parametrize("which", [None, "lz4"])
def test_a_record_above_batch_size_has_a_batch_of_its_own(which: str | None) -> None:
    """RA-03."""
    rig = Rig(batch_size=512, linger=0.0, codec=None if which is None else codec(which))
    delivery = rig.append(random.Random(1).randbytes(3 * 512))
    assert rig.ready() == {1}
    rig.append(b"this does not fit")
    batch = rig.drain_one()
    assert batch.count == 1
    [record] = decode_batch(b"".join(batch.buffers()))
    assert (record.offset, record.timestamp) == (0, T0)
    rig.acknowledge(batch, 7)
    assert delivery.result().offset == 7


def test_linger_starts_with_the_first_record_and_is_over_exactly_then() -> None:
    """RA-04."""
    rig = Rig(linger=0.5)
    rig.append()
    rig.now += 0.25
    rig.append()
    assert rig.ready() == set()
    assert rig.accumulator.next_deadline() == 1000.5
    rig.now = 1000.499
    assert rig.ready() == set()
    rig.now = 1000.5
    assert rig.ready() == {1}
    assert rig.drain_one().count == 2
    assert rig.drain() == []


def test_without_linger_a_record_can_leave_at_once() -> None:
    rig = Rig(linger=0.0)
    rig.append()
    assert rig.accumulator.news
    assert rig.ready() == {1}


def test_whoever_sleeps_hears_of_new_deadlines_and_of_what_is_ready() -> None:
    rig = Rig([1, 1], linger=0.5)
    assert not rig.accumulator.news
    rig.append(partition=0)
    assert rig.accumulator.news, "a linger time has begun"
    rig.accumulator.news = False
    rig.append(partition=0)
    assert not rig.accumulator.news, "nothing new"
    rig.now += 0.5
    rig.ready()
    assert rig.accumulator.news, "it is over"
    batch = rig.drain_one()
    rig.accumulator.news = False
    rig.retry(batch)
    assert rig.accumulator.news, "a backoff has begun"


def test_partitions_that_are_due_together_leave_in_the_order_of_their_records() -> None:
    rig = Rig([1] * 4, linger=0.5)
    for partition in (2, 0, 3, 1):
        rig.append(partition=partition)
    rig.now += 0.5
    assert partitions(rig.drain()) == [2, 0, 3, 1]


def test_the_next_deadline_is_the_first_linger_or_expiry() -> None:
    """RA-07, RA-25."""
    rig = Rig([1, 2, 1], linger=0.01, delivery_timeout=0.5)
    assert rig.accumulator.next_deadline() == NEVER
    rig.append(partition=0)
    assert rig.accumulator.next_deadline() == 1000.01
    rig.now += 0.005
    rig.append(partition=1)
    assert rig.accumulator.next_deadline() == 1000.01
    rig.fill(2)
    assert set(rig.accumulator.ready) == {1}
    assert rig.accumulator.next_deadline() == 1000.01
    rig.now = 1000.02
    drained = rig.drain(1) + rig.drain(2)
    assert partitions(drained) == [2, 0, 1]
    assert rig.accumulator.next_deadline() == 1000.5
    for batch in drained:
        rig.acknowledge(batch)
    assert rig.accumulator.next_deadline() == NEVER


def test_a_full_batch_does_not_wait_and_those_behind_it_push_it() -> None:
    rig = Rig([1, 2], linger=100.0)
    rig.append(bytes(10), partition=0)
    assert rig.ready() == set()
    rig.append(bytes(2000), partition=0)
    assert rig.ready() == {1}
    rig.fill(1)
    assert rig.ready() == {1, 2}
    assert [rig.drain_one(1).count, rig.drain_one(2).count] == [1, 2]
    assert rig.ready() == set(), "the large one lingers"


def test_batches_of_two_thirds_are_not_cut_short() -> None:
    """RA-29: no batch that leaves is smaller than half of batch.size."""
    size, value = 512, 32
    rig = Rig(range(3), batch_size=size, linger=0.02)
    generator = random.Random(29)
    rig.randoms = iter(lambda: generator.getrandbits(31), -1)  # type: ignore[assignment]
    smallest = 10**6
    for _ in range(2000):
        for _ in range(size * 2 // 3 // value):
            rig.append(bytes(value), partition=-1)
        rig.now += 0.02
        for node in rig.ready():
            for batch in rig.drain(node):
                smallest = min(smallest, batch.size)
                rig.acknowledge(batch)
    assert smallest >= size // 2


@pytest.mark.parametrize("good", range(1, 100))
def test_few_batches_are_split_whatever_compresses(good: int) -> None:
    """RA-22: `good` % of the records shrink well."""
    limit = 1024
    rig = Rig(batch_size=limit, linger=1e6, codec=codec("gzip"))
    generator = random.Random(good)
    split = drained = 0

    def send_out() -> None:
        nonlocal split, drained
        for batch in rig.drain():
            drained += 1
            if batch.estimated_size() > limit + 61 and batch.count > 1:
                split += 1
                rig.accumulator.landed(batch)
                rig.accumulator.split(batch, rig.now)
                send_out()
            else:
                rig.acknowledge(batch)

    for _ in range(1000):
        if generator.randrange(100) < good:
            rig.append(b"%d" % generator.randrange(10) * 100)
        else:
            rig.append(generator.randbytes(100))
        send_out()
    assert drained > 20
    assert split / drained < 0.1


# -- draining ------------------------------------------------------------------------------


def test_partitions_take_turns_when_only_one_batch_fits_a_request() -> None:
    """RA-01: per node; the third drain wraps around."""
    rig = Rig([1, 1, 2, 2])
    for _ in range(2):
        rig.fill(0, 1, 2, 3)
    taken = [partitions(rig.drain(1, 1100) + rig.drain(2, 1100)) for _ in range(4)]
    assert taken == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_an_unlimited_drain_takes_one_batch_of_every_partition() -> None:
    """RA-01."""
    rig = Rig([1, 1, 2, 2])
    rig.fill(0, 1, 2, 3, 0)
    assert [partitions(rig.drain(1)), partitions(rig.drain(2))] == [[0, 1], [2, 3]]
    assert partitions(rig.drain(1)) == [0]


def test_a_request_is_not_larger_than_its_limit() -> None:
    """RA-05: what did not fit stands in front of the line next time."""
    rig = Rig([1, 1, 1], batch_size=400, linger=0.0)
    for partition in range(3):
        rig.append(bytes(393 - 61), partition=partition)
    drained = rig.drain(max_size=1024)
    assert sum(batch.estimated_size() for batch in drained) <= 1024
    assert partitions(drained) == [0, 1]
    rig.append(bytes(1000), partition=0)
    assert partitions(rig.drain(max_size=1024)) == [2]
    assert partitions(rig.drain(max_size=1024)) == [0]


def test_a_batch_above_the_limit_goes_alone() -> None:
    """Spec 3.5."""
    rig = Rig([1, 1], linger=0.0)
    rig.append(bytes(5000), partition=0)
    rig.append(bytes(5000), partition=1)
    assert partitions(rig.drain(max_size=1000)) == [0]
    assert partitions(rig.drain(max_size=1000)) == [1]


def test_a_node_that_leads_nothing_gives_nothing() -> None:
    """RA-30."""
    rig = Rig([1])
    rig.fill(0)
    assert rig.drain(99) == []


def test_everything_that_is_appended_is_drained_once() -> None:
    """RA-06, without threads: records of five senders, mixed."""
    rig = Rig([1, 2], linger=0.0)
    seen: list[bytes] = []
    for number in range(10_000):
        rig.append(b"%d" % number, partition=number % 2)
        if number % 37 == 0:
            for node in (1, 2):
                for batch in rig.drain(node):
                    seen += [value for value in values(batch) if value is not None]
                    rig.acknowledge(batch)
    rig.accumulator.close(rig.now)
    while rig.accumulator.ready:
        for batch in [*rig.drain(1), *rig.drain(2)]:
            seen += [value for value in values(batch) if value is not None]
            rig.acknowledge(batch)
    assert sorted(map(int, seen)) == list(range(10_000))
    assert not rig.accumulator.incomplete
    assert rig.taken() == 0


def test_a_blocked_partition_does_not_keep_back_the_others() -> None:
    """Deviation 1: Java ends the drain there and begins there again."""
    sequences = Sequences()
    sequences.requested()
    sequences.assigned(1, 0)
    rig = Rig([1, 1, 1], sequences=sequences)
    rig.fill(0, 1, 2)
    first = rig.drain()
    assert partitions(first) == [0, 1, 2]
    rig.acknowledge(first[0])
    rig.acknowledge(first[2])
    rig.fill(1, 0, 2)
    assert partitions(rig.drain()) == [0, 2]
    rig.acknowledge(first[1])
    assert partitions(rig.drain()) == [1]


def test_a_drained_batch_knows_where_it_went() -> None:
    rig = Rig([5], linger=0.0)
    rig.see([5], [3])
    rig.append()
    batch = rig.drain_one(5)
    assert (batch.sends, batch.in_flight, batch.drained_at) == (1, True, rig.now)
    assert (batch.sent_to, batch.sent_leader_epoch) == (5, 3)
    assert rig.queue().in_flight == [batch]
    assert repr(rig.queue()) == "<PartitionQueue orders-0 queued=0 in_flight=1 leader=5>"


# -- one request in flight -----------------------------------------------------------------


def test_with_one_in_flight_a_partition_waits_for_its_answer() -> None:
    """RA-18: neither ready nor drained, then both. RA-01: others keep their turn."""
    rig = Rig([1, 1, 1], max_in_flight=1)
    rig.fill(0, 1, 2, 1)
    first, second, third = rig.drain(max_size=10**6)
    rig.fill(0, 2)
    assert rig.ready() == set()
    rig.acknowledge(first)
    rig.acknowledge(third)
    assert partitions(rig.drain()) == [0, 2]
    rig.acknowledge(second)
    assert partitions(rig.drain()) == [1]


@pytest.mark.parametrize("end", ["acknowledge", "retry", "fail", "expiry", "abort"])
def test_with_one_in_flight_every_end_lets_the_next_one_go(end: str) -> None:
    """SN-10: what was given up on the wire counts until the network is done with it."""
    rig = Rig(max_in_flight=1, delivery_timeout=10.0)
    delivery, _ = rig.fill(0)
    batch = rig.drain_one()
    rig.now += 5.0
    rig.fill(0)
    if end == "expiry":
        rig.now += 5.0
        assert rig.accumulator.expire(rig.now) == [batch]
    elif end == "abort":
        rig.accumulator.abort("enough", None, rig.now)
        rig.fill(0)
    assert rig.drain() == []
    if end in ("acknowledge", "retry", "fail"):
        getattr(rig, end)(batch)
    else:
        rig.accumulator.landed(batch)
    rig.now += 1.0
    assert len(rig.drain()) == 1
    if delivery.done() and end != "acknowledge":
        assert delivery.exception() is not None
    assert (rig.queue().batches or rig.queue().in_flight) != []


# -- retries -------------------------------------------------------------------------------


def test_a_batch_that_is_put_back_waits_for_its_backoff() -> None:
    """RA-08: other partitions of the node do not."""
    rig = Rig([1, 1], linger=0.0)
    rig.append(partition=0)
    batch = rig.drain_one()
    rig.retry(batch)
    assert (batch.attempts, batch.retry_at) == (1, rig.now + 0.1)
    rig.append(partition=1)
    assert partitions(rig.drain()) == [1]
    assert rig.accumulator.next_deadline() == rig.now + 0.1
    rig.now += 0.1
    assert rig.ready() == {1}
    assert rig.drain() == [batch]
    assert batch.sends == 2


def test_the_backoff_doubles_up_to_its_maximum() -> None:
    """RA-09."""
    for jitter, factor in ((0.0, 0.8), (0.999999, 1.2)):
        rig = Rig(jitter=lambda jitter=jitter: jitter, linger=0.0)  # type: ignore[misc]
        rig.append()
        batch = rig.drain_one()
        for attempt in range(8):
            rig.retry(batch)
            delay = min(0.1 * 2 ** min(attempt, 3.3219280948873626) * factor, 1.0)
            assert batch.retry_at - rig.now == pytest.approx(delay, rel=1e-4)
            rig.now = batch.retry_at - 1e-6
            assert rig.drain() == []
            rig.now = batch.retry_at
            assert rig.drain() == [batch]


def test_the_time_of_a_retry_is_drawn_once() -> None:
    """Deviation 14: Java draws a new jitter whenever it looks."""
    draws = []
    generator = random.Random(14)

    def draw() -> float:
        draws.append(generator.random())
        return draws[-1]

    rig = Rig(jitter=draw, linger=0.0)
    rig.append()
    rig.retry(rig.drain_one())
    for _ in range(50):
        rig.now += 0.001
        rig.drain()
    assert len(draws) == 1


def test_a_retry_does_not_linger_again() -> None:
    """Deviation 16."""
    rig = Rig(linger=50.0)
    rig.append()
    rig.now += 50.0
    batch = rig.drain_one()
    rig.retry(batch)
    rig.now += 0.1
    assert rig.drain() == [batch]


def test_batches_are_put_back_in_their_order_also_without_sequences() -> None:
    """Java only pushes to the head there, so that two failed ones change places."""
    rig = Rig(linger=0.0)
    for _ in range(4):
        rig.fill(0)
    batches = [rig.drain_one() for _ in range(3)]
    for number in (1, 0, 2):
        rig.retry(batches[number])
    rig.append()
    assert [batch.order[0] for batch in rig.queue().batches] == [0, 1, 2, 3, 4]
    rig.now += 0.1
    again = [rig.drain_one() for _ in range(5)]
    assert again[:3] == batches


def test_an_open_batch_behind_a_retry_goes_on_filling() -> None:
    rig = Rig(linger=0.0)
    rig.append()
    batch = rig.drain_one()
    rig.append()
    rig.retry(batch)
    rig.append()
    assert [b.count for b in rig.queue().batches] == [1, 2]
    rig.now += 0.1
    assert [rig.drain_one().count, rig.drain_one().count] == [1, 2]


def test_another_leader_without_a_new_epoch_is_no_reason_to_hurry() -> None:
    """RA-10."""
    rig = Rig([1], linger=0.0)
    rig.append()
    batch = rig.drain_one()
    rig.retry(batch)
    rig.see([2])
    rig.now += 0.099
    assert rig.ready() == set()
    rig.now += 0.002
    assert rig.drain(2) == [batch]


def test_a_new_leader_epoch_ends_the_backoff_once() -> None:
    """RA-11, PB-09, SN-16: the first epoch is no change, an older or equal one neither."""
    rig = Rig([1], linger=0.0)
    rig.see([1], [-1])
    rig.append()
    rig.see([1], [4])
    batch = rig.drain_one()
    rig.retry(batch)
    for epoch in (4, 3, -1):
        rig.see([2], [epoch])
        assert rig.ready() == set(), epoch
    rig.see([2], [5])
    assert rig.ready() == {2}
    assert rig.drain(2) == [batch]
    rig.retry(batch)
    rig.see([2], [5])
    assert rig.ready() == set()
    rig.now += 0.3
    assert rig.drain(2) == [batch]


def test_a_leader_that_moved_while_the_request_was_under_way_needs_no_backoff() -> None:
    """SN-17, KIP-951: the answer came with the news, or after them."""
    rig = Rig([1], linger=0.0)
    rig.append()
    batch = rig.drain_one()
    rig.see([2], [1])
    rig.retry(batch)
    assert rig.drain(2) == [batch]
    assert batch.attempts == 1


# -- expiry --------------------------------------------------------------------------------


def test_a_batch_expires_exactly_at_its_delivery_timeout() -> None:
    """RA-16, PB-06: equality included, a clock behind the creation never."""
    rig = Rig([0], linger=0.5, delivery_timeout=2.0)  # node 0 is one like the others
    delivery = rig.append()
    for now in (900.0, 1000.5, 1001.999):
        assert rig.accumulator.expire(now) == []
    [batch] = rig.accumulator.expire(1002.0)
    assert batch is not None
    error = delivery.exception()
    assert isinstance(error, DeliveryTimeout)
    assert (error.persisted, error.attempts, error.elapsed) == ("no", 0, 2.0)
    assert "no connection to the leader had room" in str(error)
    assert "expired 2000 ms after" in str(error)
    assert rig.accumulator.expire(1003.0) == []
    assert rig.taken() == 0


def test_the_largest_delivery_timeout_works() -> None:
    """RA-16."""
    rig = Rig(delivery_timeout=(2**31 - 1) / 1000)
    rig.append()
    assert rig.accumulator.expire(1000.0 + 2**31 / 1000 - 1) == []
    assert len(rig.accumulator.expire(1000.0 + 2**31 / 1000)) == 1


def test_a_partition_that_waits_for_its_answer_expires_too() -> None:
    """RA-16: muted or not. RA-17: in order, and nothing is ready afterwards."""
    rig = Rig(max_in_flight=1, delivery_timeout=2.0)
    rig.fill(0)
    rig.now += 0.5
    rig.fill(0)
    ended: list[int] = []
    on_wire = rig.drain_one()
    for number, batch in enumerate(rig.accumulator.incomplete):
        delivery = batch.delivery(0, 0, -1, -1)
        batch.add_callback(delivery, lambda _, number=number: ended.append(number))  # type: ignore[misc]
    rig.now += 2.0
    assert len(rig.accumulator.expire(rig.now)) == 2
    assert ended == [0, 1]
    assert rig.ready() == set()
    rig.accumulator.landed(on_wire)
    assert rig.ready() == set()
    assert rig.taken() == 0


def test_a_retry_keeps_the_time_of_its_creation() -> None:
    """RA-17, RA-26, PB-06: Java may still send it in that very pass."""
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    delivery = rig.append()
    batch = rig.drain_one()
    rig.now += 1.5
    batch.maybe_written = True
    batch.last_error = BrokerError(7, "slow")
    rig.retry(batch)
    rig.now += 0.5
    assert rig.accumulator.expire(rig.now) == [batch]
    assert rig.drain() == [], "expired before it could leave once more (deviation 2)"
    error = delivery.exception()
    assert error is not None
    assert (error.persisted, error.attempts) == ("maybe", 1)
    assert f"the attempt failed with: {batch.last_error}" in str(error)
    assert error.__cause__ is batch.last_error
    assert error.code == 7


def test_expired_on_the_wire_is_told_at_once_but_memory_waits() -> None:
    """SN-09, SN-19, KAFKA-19012: the socket may still read it."""
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    delivery = rig.append()
    batch = rig.drain_one()
    rig.now += 2.0
    assert rig.accumulator.expire(rig.now) == [batch]
    error = delivery.exception()
    assert error is not None
    assert error.persisted == "maybe"
    assert "has not answered" in str(error)
    assert rig.taken() == 1000
    assert b"".join(batch.buffers())
    assert rig.acknowledge(batch, 5) is False
    assert rig.accumulator.fail(batch, Failure(BrokerRejected, "no"), rig.now) is False
    assert rig.taken() == 0
    assert isinstance(delivery.exception(), DeliveryTimeout)


def test_expiry_says_when_there_was_no_leader() -> None:
    rig = Rig([-1], delivery_timeout=2.0)
    delivery = rig.append()
    rig.accumulator.expire(1002.0)
    assert "has no leader" in str(delivery.exception())


def test_those_behind_an_expired_batch_go_on() -> None:
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    first = rig.fill(0)
    rig.now += 1.0
    second = rig.append()
    rig.now += 1.0
    [expired] = rig.accumulator.expire(rig.now)
    batch = rig.drain_one()
    assert batch is not expired
    rig.acknowledge(batch, 3)
    assert second.result().offset == 3
    assert all(delivery.exception() for delivery in first)


def test_an_expired_open_batch_takes_no_more_records() -> None:
    rig = Rig(linger=50.0, delivery_timeout=2.0)
    first = rig.append()
    rig.now += 2.0
    rig.accumulator.expire(rig.now)
    second = rig.append()
    assert first.done()
    assert not second.done()
    assert len(rig.queue().batches) == 1


# -- callbacks that come back --------------------------------------------------------------


def test_a_callback_may_send_and_the_record_is_neither_lost_nor_expired() -> None:
    """SN-05."""
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    again: list[Delivery] = []
    expired = rig.fill(0, 0, 0)
    for delivery in expired[::2]:
        delivery.add_done_callback(lambda _: again.append(rig.append()))
    rig.now += 2.0
    assert len(rig.accumulator.expire(rig.now)) == 3
    assert all(delivery.exception() for delivery in expired)
    assert len(again) == 3
    assert not any(delivery.done() for delivery in again)
    batch = rig.drain_one()
    rig.acknowledge(batch, 10)
    assert [delivery.result().offset for delivery in again] == [10, 11, 12]


def test_a_callback_may_send_while_everything_is_aborted() -> None:
    """The queue that the new record is in is not forgotten with those behind it."""
    rig = Rig(linger=0.0)
    again: list[Delivery] = []
    aborted = rig.fill(0, 0, 0)
    for delivery in aborted[::2]:
        delivery.add_done_callback(lambda _: again.append(rig.append()))
    assert len(rig.accumulator.abort("enough", None, rig.now)) == 3
    rig.acknowledge(rig.drain_one())
    assert [delivery.exception() for delivery in again] == [None] * 3
    assert all(delivery.exception() for delivery in aborted)


@pytest.mark.parametrize("end", ["acknowledge", "expire"])
def test_a_callback_may_give_up_all_the_others(end: str) -> None:
    """As close(timeout=0) does from a task that starts eagerly."""
    rig = Rig([1, 1], delivery_timeout=2.0)
    aborted: list[ProducerBatch] = []

    def give_up(_: Delivery) -> None:
        aborted.extend(rig.accumulator.abort("enough", None, rig.now))

    deliveries = rig.fill(0, 0, 1)[::2]
    deliveries[0].add_done_callback(give_up)
    if end == "acknowledge":
        rig.acknowledge(rig.drain()[0])
    else:
        rig.now += 2.0
        assert len(rig.accumulator.expire(rig.now)) == 1
    assert len(aborted) == 2
    assert (deliveries[0].exception() is None) == (end == "acknowledge")
    assert all(isinstance(d.exception(), AbortedError) for d in deliveries[1:])
    assert not rig.accumulator.incomplete


@pytest.mark.parametrize("end", ["acknowledge", "fail", "expire"])
def test_a_flush_that_begins_in_a_callback_does_not_wait_for_what_just_ended(end: str) -> None:
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    fences: list[Fence] = []

    def flush(_: Delivery) -> None:
        fences.append(Fence(lambda: None))
        rig.accumulator.begin_flush(fences[0], rig.now)

    delivery = rig.append()
    delivery.add_done_callback(flush)
    batch = rig.drain_one()
    if end == "expire":
        rig.now += 2.0
        rig.accumulator.expire(rig.now)
    else:
        getattr(rig, end)(batch)
    assert fences[0].remaining == 0
    if end != "acknowledge":
        assert delivery.exception() is not None


# -- memory --------------------------------------------------------------------------------


def test_a_new_batch_takes_batch_size_or_what_its_record_needs() -> None:
    rig = Rig(batch_size=1000)
    rig.append(b"small")
    assert rig.memory.taken == 1000
    rig.append(b"another")
    assert rig.memory.taken == 1000
    rig.append(bytes(5000))
    assert rig.memory.taken == 1000 + batch_upper_bound(None, bytes(5000), NO_HEADERS)


@pytest.mark.parametrize("end", ["acknowledge", "fail"])
def test_memory_goes_back_once_when_the_batch_has_its_end(end: str) -> None:
    rig = Rig(linger=0.0)
    delivery = rig.append()
    batch = rig.drain_one()
    getattr(rig, end)(batch)
    assert rig.memory.taken == 1000, "not in the middle of a change: see give_back"
    assert rig.taken() == 0
    assert batch.memory == 0
    with pytest.raises(Exception, match="given its buffer back"):
        batch.buffers()
    rig.accumulator.give_back()
    assert rig.memory.taken == 0
    assert delivery.done()
    delivery.exception()


@pytest.mark.parametrize("end", ["acknowledge", "fail", "abort", "split"])
def test_memory_counts_for_the_broker_that_the_batch_was_begun_for(end: str) -> None:
    """Also when another one leads the partition before it has its end."""
    rig = Rig([1, 2, -1], linger=0.0, batch_max_bytes=10_000)
    rig.append(bytes(500))
    rig.append(bytes(100), partition=1)
    rig.append(partition=2)
    assert rig.memory.held(1, 2, -1) == [1000, 1000, 1000]
    rig.see([2, 2, -1], [1, 0, 0])
    rig.append(bytes(300))  # it fits
    rig.append(bytes(300))  # it does not: the batch grows
    assert rig.taken() == 3000 + rig.memory.share(1).held - 1000 > 3000
    assert rig.memory.held(2, -1) == [1000, 1000]
    [batch] = [batch for batch in rig.drain(2) if batch.partition == 0]
    if end == "abort":
        rig.accumulator.abort("enough", None, rig.now, lambda other: other is not batch)
        held = rig.memory.share(1).held  # the socket may still read it
        assert held == batch.memory > 1000
        rig.accumulator.landed(batch)
    elif end == "split":
        rig.accumulator.landed(batch)
        rig.accumulator.split(batch, rig.now)
    else:
        getattr(rig, end)(batch)
    assert rig.taken() == 2000
    assert rig.memory.held(1, 2, -1) == [0, 1000, 1000]


def test_a_record_for_a_broker_that_is_held_up_waits() -> None:
    rig = Rig([1, 2, 1], linger=50.0)
    for partition in range(3):
        rig.append(bytes(900), partition=partition)
    assert rig.ready() == set()
    rig.memory.held_up = {1}
    assert rig.try_append(bytes(900)) is None
    # What has its memory does not linger any more, and what is for others does.
    assert rig.ready() == {1}
    assert partitions(rig.drain(1)) == [0, 2]
    assert rig.accumulator.share_of(rig.topic, 0) is rig.memory.share(1)
    rig.append(bytes(10), partition=1)
    assert rig.taken() == 3000
    # While somebody waits, nothing new lingers there.
    rig.memory.held_up = set()
    rig.append(partition=0)
    assert rig.ready() == set()
    rig.memory.share(1).line[Ticket()] = None
    rig.append(partition=2)
    assert rig.ready() == {1}


def test_only_the_first_that_is_refused_hurries_what_lingers() -> None:
    """To look at all that lingers for each record would cost more the more there is."""
    rig = Rig([1, 1, 2], linger=50.0)
    rig.append(bytes(900))
    rig.append(bytes(900), partition=2)
    rig.memory.held_up = {1}
    rig.memory.share(1).hurried = True
    assert rig.try_append(bytes(900), partition=1) is None
    assert rig.ready() == set()
    rig.memory.share(1).hurried = False
    assert rig.try_append(bytes(900), partition=1) is None
    assert rig.memory.share(1).hurried
    assert partitions(rig.drain(1)) == [0]
    assert rig.ready() == set()
    # Until something lingers again, that is: there was room for it after all.
    rig.memory.held_up = set()
    rig.append()
    assert not rig.memory.share(1).hurried


def test_for_who_was_called_back_nothing_lingers_whosever_it_is() -> None:
    """Its broker has less than it may: what it waits for may be any other's."""
    rig = Rig([1, 2], linger=50.0)
    rig.append(bytes(900))
    rig.append(bytes(900), partition=1)
    rig.memory.held_up = {1}
    rig.memory.share(1).called = Ticket()
    assert rig.try_append(bytes(900)) is None
    assert rig.ready() == {1, 2}


@pytest.mark.parametrize("stays", [False, True])
def test_records_without_a_partition_move_on_to_a_broker_that_is_not_held_up(stays: bool) -> None:
    rig = Rig([1, 1, 2, 1], linger=50.0, batch_max_bytes=10_000)
    rig.accumulator.stay(rig.topic, stays)
    for place in range(4):
        rig.append(partition=place)
    rig.memory.held_up = {1}
    for _ in range(8):
        assert rig.accumulator.move_on(rig.topic)
        assert rig.accumulator.share_of(rig.topic, -1) is rig.memory.share(2)
        rig.append(bytes(900), partition=-1)
    assert {batch.partition for batch in rig.batches() if batch.count > 1} == {2}
    # Where all are, they stay where they are.
    rig.memory.held_up = {1, 2}
    before = rig.topic.partitioner.peek(rig.topic.view)
    assert not rig.accumulator.move_on(rig.topic)
    assert rig.topic.partitioner.peek(rig.topic.view) == before
    # Nor is it tried for ever, where a broker could have more that has none of the partitions.
    rig.memory.share(3)
    assert not rig.accumulator.move_on(rig.topic)


def test_whose_memory_a_record_needs_whatever_is_known_of_its_partition() -> None:
    rig = Rig([1, 2, -1])
    shares = [rig.accumulator.share_of(rig.topic, place) for place in range(3)]
    assert [share.node for share in shares] == [1, 2, -1]
    for place in range(3):
        rig.append(partition=place)
    assert [rig.accumulator.share_of(rig.topic, place) for place in range(3)] == shares
    rig.memory.recalled.clear()
    rig.see([2, 2, 1])
    assert rig.memory.recalled == [1, -1]
    assert rig.accumulator.share_of(rig.topic, 0) is shares[1]
    assert rig.accumulator.share_of(rig.topic, 2) is shares[0]
    rig.accumulator.remove_topic("orders", rig.now)
    assert rig.memory.recalled == [1, -1, 2, 2, 1]
    assert rig.accumulator.share_of(rig.topic, 1) is shares[2]


def test_who_waits_for_a_partition_without_a_queue_hears_of_its_next_leader() -> None:
    rig = Rig([1, 2])
    assert rig.accumulator.share_of(rig.topic, 1) is rig.memory.share(2)
    rig.memory.recalled.clear()
    rig.see([1, 1])
    assert rig.memory.recalled == [2]
    assert rig.accumulator.share_of(rig.topic, 1) is rig.memory.share(1)
    # Also where the topic was dropped meanwhile, and is to be known again.
    dropped = rig.topic
    rig.accumulator.remove_topic("orders", rig.now)
    assert rig.accumulator.topics == {}
    assert rig.accumulator.share_of(dropped, 1) is rig.memory.share(-1)
    assert rig.accumulator.topics == {"orders": dropped}


def test_a_retry_keeps_its_memory() -> None:
    rig = Rig(linger=0.0)
    rig.append()
    rig.retry(rig.drain_one())
    assert rig.taken() == 1000


def test_without_memory_nothing_is_appended_and_the_need_is_told() -> None:
    rig = Rig([1, 1], memory=Pool(1500), batch_size=1000)
    rig.append(partition=0)
    assert rig.try_append(bytes(2000), partition=1) is None
    bound = batch_upper_bound(None, bytes(2000), NO_HEADERS)
    assert rig.accumulator.batch_bytes(None, bytes(2000), NO_HEADERS) == bound
    assert rig.try_append(partition=1) is None
    assert rig.accumulator.batch_bytes(None, b"v", NO_HEADERS) == 1000
    assert not rig.queue(1).batches
    assert len(rig.accumulator.incomplete) == 1


def test_when_memory_runs_out_nothing_lingers_any_more() -> None:
    """Spec 3.3, exhausted: also what begins while somebody waits."""
    rig = Rig([1, 2, 2], memory=Pool(2500), batch_size=1000, linger=50.0)
    rig.append(partition=0)
    rig.append(partition=1)
    assert rig.ready() == set()
    assert rig.try_append(partition=2) is None
    assert rig.ready() == {1, 2}
    rig.memory.waiting = 1
    assert rig.try_append(partition=2, granted=1000) is not None
    assert {queue.partition for queue in rig.accumulator.ready[2]} == {1, 2}
    rig.memory.waiting = 0
    # It may have got into a batch by then; what is in line and need not go lingers again.
    assert partitions(rig.drain(2)) == [1]
    assert rig.ready() == {1}


def test_what_lingers_for_a_node_is_gathered_where_its_partition_is_new() -> None:
    rig = Rig([1, 1, 1, 2], linger=50.0)
    for partition in (1, 2, 3):
        rig.append(partition=partition)
    rig.fill(0)
    known = rig.queue(2).sequences
    rig.accumulator.gather(1, lambda sequences: sequences is not known, rig.now)
    assert rig.ready() == {1}
    assert sorted(partitions(rig.drain(1))) == [0, 1]
    # The others linger as before.
    assert rig.drain(1) == []
    rig.now += 50.0
    assert rig.ready() == {1, 2}


def test_nothing_is_gathered_where_the_full_batch_is_compressed_first() -> None:
    rig = Rig([1, 1], linger=50.0, codec=codec("gzip"))
    rig.append(partition=1)
    rig.accumulator.gather(1, lambda sequences: True, rig.now)
    assert rig.ready() == set()
    assert rig.queue(1).open is not None


def test_granted_memory_makes_a_batch() -> None:
    rig = Rig(memory=Pool(1000))
    assert rig.memory.try_reserve(1000)
    delivery = rig.try_append(granted=1000)
    assert delivery is not None
    assert rig.taken() == 1000
    rig.accumulator.close(rig.now)
    rig.acknowledge(rig.drain_one())
    assert rig.taken() == 0


def test_granted_memory_that_is_not_needed_goes_back() -> None:
    """Spec 3.2.3: meanwhile somebody else had opened a batch; or less was enough."""
    rig = Rig()
    rig.append()
    assert rig.memory.try_reserve(1000)
    rig.try_append(granted=1000)
    assert rig.taken() == 1000
    assert rig.memory.try_reserve(5000)
    rig.try_append(bytes(2000), granted=5000)
    assert rig.taken() == 1000 + batch_upper_bound(None, bytes(2000), NO_HEADERS)


def test_memory_that_is_handed_on_at_once_is_not_forgotten() -> None:
    """The pool's next one in line appends inside release, and gives back in turn."""
    rig = Rig(linger=0.0)
    rig.append()
    batch = rig.drain_one()
    rounds: list[int] = []

    def next_in_line() -> None:
        rounds.append(rig.memory.taken)
        if len(rounds) == 1:
            assert rig.memory.try_reserve(3000)
            rig.try_append(granted=3000)

    rig.memory.on_release = next_in_line
    rig.acknowledge(batch)
    assert rig.taken() == 1000
    assert rounds == [0, 1000]


class Fragile(bytes):
    """A value whose length can be asked for only so many times."""

    answers = 0

    def __len__(self) -> int:
        self.answers -= 1
        if self.answers < 0:
            raise BufferError("the value is gone")
        return super().__len__()

    def __bytes__(self) -> bytes:
        len(self)
        return super().__bytes__()


@pytest.mark.parametrize("granted", [0, 1000])
def test_a_value_that_cannot_be_read_leaves_nothing_behind(granted: int) -> None:
    """An empty batch could never be sent: it would stop its partition for good."""
    rig = Rig(linger=0.0)
    value = Fragile(b"v")
    value.answers = 1  # one for the size of the batch, none for the record
    if granted:
        assert rig.memory.try_reserve(granted)
    with pytest.raises(BufferError):
        rig.try_append(value, granted=granted)
    # What was granted belongs to the pool's ticket again.
    assert rig.taken() == granted
    assert not rig.accumulator.incomplete
    delivery = rig.append()
    rig.acknowledge(rig.drain_one())
    assert delivery.done()


# -- the short way in ----------------------------------------------------------------------


def test_what_fits_an_open_batch_needs_no_time() -> None:
    rig = Rig()
    assert rig.accumulator.append_open(rig.topic, 0, T0, None, b"v", NO_HEADERS, 2) is None
    rig.append(b"first")
    assert rig.short_ways == 0
    delivery = rig.append(b"second")
    assert rig.short_ways == 1
    batch = rig.queue().batches[0]
    rig.now += 1.0
    assert values(rig.drain_one()) == [b"first", b"second"]
    rig.acknowledge(batch, 7)
    assert delivery.result().offset == 8


def test_what_may_fill_a_batch_takes_the_long_way() -> None:
    """Then something becomes due, which needs the time. Whatever the lengths take."""
    for size in range(850, 1000):
        rig = Rig()
        rig.append(b"")
        rig.append(bytes(size))
        batch = rig.queue().batches[0]
        assert rig.short_ways == 0 or not batch.is_full()
        assert batch.size <= 1000
        assert rig.ready() == ({1} if batch.is_full() or len(rig.queue().batches) > 1 else set())


def test_the_short_way_counts_for_the_sticky_partition() -> None:
    """As many bytes as the long one: the partitions change after the same records."""
    short = Rig([1, 1, 1])
    long = Rig([1, 1, 1])
    for _ in range(200):
        by_short = short.append(bytes(50), partition=-1)
        by_long = long.accumulator.append(long.topic, -1, T0, None, bytes(50), NO_HEADERS, long.now)
        assert by_long is not None
        assert by_short.partition == by_long.partition
    assert short.short_ways > 100


@pytest.mark.parametrize("seed", range(60))
def test_the_short_way_never_changes_a_partition(seed: int) -> None:
    """Whatever else happens between the records. There the partitioner hears of each at once,
    here of many together. (With a codec both estimate, and round in other places.)"""
    rng = random.Random(seed)
    most = rng.choice([0, 3000, 100_000])
    leaders = [1] * rng.randint(2, 4)
    rigs = [Rig(leaders, batch_max_bytes=most, adaptive=False) for _ in range(2)]
    short, long = rigs
    chosen: list[int] = []
    for _ in range(400):
        act = rng.random()
        if act < 0.94:
            partition = -1 if act < 0.8 else rng.randrange(len(leaders))
            value = rng.randbytes(rng.choice([0, 20, 50, 90, 400]))
            by_short = short.append(value, partition=partition)
            by_long = long.accumulator.append(
                long.topic, partition, T0, None, value, NO_HEADERS, long.now
            )
            assert by_long is not None
            assert by_short.partition == by_long.partition
            chosen.append(by_short.partition)
        elif act < 0.98:
            left = []
            for rig in rigs:
                rig.now += 0.01
                batches = rig.drain(1, 2000)
                left.append([(b.partition, b.count) for b in batches])
                for batch in batches:
                    rig.accumulator.landed(batch)
                    rig.accumulator.acknowledge(batch, 0, -1, rig.now)
            assert left[0] == left[1]
        elif act < 0.99:
            leaders = [rng.choice([1, 1, -1]) for _ in range(len(leaders) + rng.randint(0, 1))]
            for rig in rigs:
                rig.see(leaders)
        else:
            for rig in rigs:
                rig.accumulator.remove_topic("orders", rig.now)
                rig.see(leaders)
    assert short.short_ways > 100
    assert len(set(chosen)) > 1


# -- growing -------------------------------------------------------------------------------


def growing(leaders: Sequence[int] = (1,), *, most: int = 5000, **options: Any) -> Rig:
    """batch_size=1000; a full batch may become `most` bytes until it leaves. Somebody pours."""
    rig = Rig(leaders, batch_max_bytes=most, **options)
    rig.accumulator.pouring = True
    return rig


def test_a_full_batch_may_leave_and_grows_on_until_it_does() -> None:
    rig = growing(linger=50.0)
    rig.append(bytes(900))
    assert rig.ready() == set()
    deliveries = [rig.append(bytes(900)) for _ in range(3)]
    assert rig.ready() == {1}
    assert len(rig.queue().batches) == 1
    batch = rig.drain_one()
    assert values(batch) == [bytes(900)] * 4
    rig.acknowledge(batch, 10)
    assert [delivery.result().offset for delivery in deliveries] == [11, 12, 13]
    assert rig.taken() == 0


def test_what_comes_after_it_left_begins_another() -> None:
    rig = growing()
    for _ in range(3):
        rig.append(bytes(900))
    first = rig.drain_one()
    rig.append(bytes(10))
    assert rig.queue().open is not first
    assert first.count == 3


def test_a_batch_that_is_not_full_does_not_take_memory_to_grow() -> None:
    rig = growing()
    rig.append(bytes(100))
    rig.append(bytes(100))
    assert rig.memory.taken == 1000
    assert rig.queue().open is not None
    assert not rig.queue().batches[0].ripe


@pytest.mark.parametrize(("total", "quick"), [(10**9, 100_000), (20_000, 4000), (7000, 0)])
def test_memory_grows_in_steps_and_covers_the_bytes(total: int, quick: int) -> None:
    """It doubles; four times as much while half of it all is free then."""
    rig = growing(most=100_000, memory=Pool(total))
    taken = []
    for _ in range(total // 200 if total < 10**6 else 200):
        rig.append(bytes(100))
        [batch] = rig.queue().batches
        assert batch.size <= batch.memory == rig.memory.taken
        if rig.memory.taken not in taken:
            taken.append(rig.memory.taken)
    assert taken[0] == 1000
    assert len(taken) < 8
    for earlier, later in itertools.pairwise(taken):
        assert later == min(100_000, (4 if later <= quick else 2) * earlier)


def test_it_never_grows_beyond_its_bound() -> None:
    rig = growing(most=5000)
    for _ in range(100):
        rig.append(bytes(100))
    sizes = [batch.size for batch in rig.queue().batches]
    assert len(sizes) == 3
    assert all(4800 < size <= 5000 for size in sizes[:2])
    assert rig.memory.taken == sum(batch.memory for batch in rig.queue().batches)


def test_the_bound_below_the_batch_size_is_no_growth() -> None:
    """Java's behaviour."""
    rig = growing(most=999)
    for _ in range(3):
        rig.append(bytes(900))
    assert [batch.count for batch in rig.queue().batches] == [1, 1, 1]


def test_one_record_a_batch_stays_one_record_a_batch() -> None:
    rig = Rig(batch_size=1, batch_max_bytes=5000)
    for _ in range(3):
        rig.append(bytes(10))
    assert [batch.count for batch in rig.queue().batches] == [1, 1, 1]


def test_a_record_larger_than_the_bound_gets_its_own_batch() -> None:
    rig = growing(most=5000)
    rig.append(bytes(900))
    rig.append(bytes(6000))
    assert [batch.count for batch in rig.queue().batches] == [1, 1]


def test_nobody_is_passed_over_by_what_grows() -> None:
    """It may leave. It grows by what those get who wait for memory, in their turn."""
    rig = growing()
    rig.append(bytes(900))
    rig.memory.waiting = 1
    assert rig.try_append(bytes(900)) is None
    assert rig.ready() == {1}
    assert rig.memory.taken == 1000
    for number in range(2, 5):
        # As the pool does it for the head of its line.
        rig.memory.available -= 1000
        assert rig.try_append(bytes(900), granted=1000) is not None
        [batch] = rig.queue().batches
        assert (batch.count, batch.memory, rig.taken()) == (number, 1000 * number, 1000 * number)
    rig.memory.waiting = 0
    assert rig.drain_one() is batch
    assert values(batch) == [bytes(900)] * 4
    rig.acknowledge(batch)
    assert rig.taken() == 0


@pytest.mark.parametrize("most", [5000, 1_000_000], ids=["small steps", "large steps"])
def test_a_broker_that_is_away_for_long_does_not_take_the_last_with_the_first(most: int) -> None:
    """Records expire with the first of their batch, so they are not much younger than that."""
    rig = growing(most=most, delivery_timeout=120.0)
    appended: dict[Delivery, float] = {}
    for _ in range(1190):
        appended[rig.append(bytes(100))] = rig.now
        rig.now += 0.1
    assert len(rig.accumulator.expire(1120.0)) > 0
    lifetimes = [1120.0 - at for delivery, at in appended.items() if delivery.done()]
    assert max(lifetimes) == 120.0
    assert min(lifetimes) >= 100.0
    sizes = [batch.size for batch in rig.queue().batches]
    assert max(sizes) > 2000, "they grow all the same"


@pytest.mark.parametrize("granted", [0, 1000])
def test_a_full_batch_that_is_old_gets_no_more_memory(granted: int) -> None:
    rig = growing(delivery_timeout=32.0)
    rig.append(bytes(900))
    rig.append(bytes(900))
    first = rig.queue().open
    assert first is not None
    assert first.ripe
    rig.now += 1.0
    memory = first.memory
    rig.memory.available -= granted
    while rig.queue().open is first:
        assert rig.try_append(bytes(900), granted=granted) is not None
        granted = 0
    assert first.memory == memory
    assert [batch.count for batch in rig.queue().batches][1:] == [1]
    assert rig.taken() == sum(batch.memory for batch in rig.queue().batches)


def test_what_is_granted_for_a_batch_that_may_not_grow_makes_another() -> None:
    rig = growing(most=2500)
    rig.append(bytes(900))
    rig.memory.waiting = 1
    for _ in range(3):
        if rig.try_append(bytes(700)) is None:
            rig.memory.available -= 1000
            assert rig.try_append(bytes(700), granted=1000) is not None
    assert [batch.count for batch in rig.queue().batches] == [3, 1]
    assert [batch.memory for batch in rig.queue().batches] == [2500, 1000]
    assert rig.taken() == 3500


@pytest.mark.parametrize("answers", range(8))
def test_a_value_that_cannot_be_read_does_not_let_its_batch_grow(answers: int) -> None:
    rig = growing(linger=0.0)
    rig.append(bytes(900))
    value = Fragile(bytes(900))
    value.answers = answers
    assert rig.memory.try_reserve(1000)
    rig.memory.waiting = 1
    records = 2
    try:
        assert rig.try_append(value, granted=1000) is not None
    except BufferError:
        # What was granted belongs to the pool's ticket again.
        assert rig.taken() == 2000
        rig.memory.waiting = 0
        rig.memory.release(1000)
        records = 1
    rig.memory.waiting = 0
    batch = rig.drain_one()
    assert batch.count == records
    rig.acknowledge(batch)
    assert rig.taken() == 0


def test_what_grows_takes_less_where_so_much_is_not_to_be_had() -> None:
    """Who does not wait is turned away when there is no memory for any batch of this broker."""
    loop = asyncio.new_event_loop()
    pool = BufferPool(4_000_000, loop=loop)
    memory: Any = pool
    rig = Rig([1, 2], memory=memory, batch_size=16_384, batch_max_bytes=1_000_000)
    rig.append(bytes(1000), partition=1)
    while rig.try_append(bytes(1000)) is not None:
        rig.now += 1e-6
    assert pool.is_held_up(rig.queue().share, 16_384)
    assert 8 * (pool.available - 16_384) < rig.queue().share.held + 16_384
    loop.close()


def test_nothing_grows_without_memory() -> None:
    rig = growing(memory=Pool(1800))
    rig.append(bytes(900))
    assert rig.try_append(bytes(900)) is None
    assert rig.memory.taken == 1000
    assert rig.taken() == 1000


def test_what_the_broker_found_too_large_is_not_tried_again() -> None:
    rig = growing(most=8000)
    for _ in range(7):
        rig.append(bytes(900))
    batch = rig.drain_one()
    rig.accumulator.landed(batch)
    parts = rig.accumulator.split(batch, rig.now)
    assert len(parts) == 7
    for _ in range(20):
        rig.append(bytes(900))
    grown = [b for b in rig.queue().batches if b not in parts]
    assert len(grown) > 1
    assert max(b.size for b in grown) <= batch.size // 2


def test_a_compressed_batch_grows_by_what_it_takes_uncompressed() -> None:
    rig = growing(codec=codec("lz4"), most=20_000)
    for _ in range(150):
        rig.accumulator.estimator.observe("orders", 3, 0.01)  # down to a quarter
    rig.append(bytes(100))
    [batch] = rig.queue().batches
    while batch.size < 2500:
        rig.append(bytes(100))
    assert not batch.ripe, "the estimate is what counts until it is full, as in Java"
    assert batch.size <= batch.memory == rig.memory.taken
    while not batch.ripe:
        rig.append(bytes(100))
    assert batch.size < batch.memory == rig.memory.taken
    for _ in range(900):
        rig.append(bytes(100))
        last = rig.queue().batches[-1]
        assert not last.ripe or last.size <= last.memory
    assert max(b.size for b in rig.queue().batches) <= 20_000


def test_memory_bounds_what_compressed_batches_take() -> None:
    """Java counts batch_size, however much the records take before they are compressed."""
    rig = Rig(codec=codec("lz4"), memory=Pool(20_000))
    for _ in range(300):
        rig.accumulator.estimator.observe("orders", 3, 0.01)
    while rig.try_append(bytes(100)) is not None:
        batches = rig.queue().batches
        assert all(batch.size <= batch.memory for batch in batches)
        assert all(len(batch.buffer or b"") <= batch.memory for batch in batches)
        assert rig.memory.taken == sum(batch.memory for batch in batches)
    assert sum(batch.size for batch in rig.queue().batches) > 10_000


def test_a_batch_that_cannot_be_sealed_does_not_take_others_with_it() -> None:
    rig = Rig([1, 1, 1], linger=0.0, delivery_timeout=5.0)
    deliveries = [rig.append(partition=partition) for partition in range(3)]
    broken = rig.queue(1).batches[0]
    broken.transactional = True  # without a producer id
    assert partitions(rig.drain()) == [0]
    with pytest.raises(IllegalStateError, match="transactional"):
        rig.drain()
    rig.now += 5.0
    rig.accumulator.expire(rig.now)
    assert isinstance(deliveries[1].exception(), DeliveryTimeout)


def test_a_grown_batch_that_finds_no_place_in_a_request_grows_on() -> None:
    rig = growing([1, 1], most=5000)
    for partition in (0, 1):
        for _ in range(3):
            rig.append(bytes(900), partition=partition)
    assert partitions(rig.drain(max_size=4000)) == [0]
    assert rig.queue(1).open is not None
    rig.append(bytes(900), partition=1)
    [batch] = rig.drain()
    assert (batch.partition, batch.count) == (1, 4)


def test_the_sticky_partition_is_left_although_its_batch_grows() -> None:
    """KIP-794: after batch_size bytes, as without growing."""
    rig = growing([1, 1, 1], most=100_000)
    chosen = [rig.append(bytes(90), partition=-1).partition for _ in range(60)]
    runs = [len(list(group)) for _, group in itertools.groupby(chosen)]
    assert len(runs) >= 4
    assert max(runs) <= 24, "two choices of the same partition in a row at most"
    assert {len(rig.queue(p).batches) for p in set(chosen)} == {1}


def test_a_switch_to_a_batch_that_is_open_goes_the_short_way() -> None:
    """To the partition that the long one would choose. The long one is for what begins or grows."""
    short = growing([1, 1, 1], most=100_000)
    long = growing([1, 1, 1], most=100_000)
    chosen = []
    for _ in range(400):
        chosen.append(short.append(bytes(90), partition=-1).partition)
        by_long = long.accumulator.append(long.topic, -1, T0, None, bytes(90), NO_HEADERS, long.now)
        assert by_long is not None
        assert chosen[-1] == by_long.partition
    switches = len(list(itertools.groupby(chosen))) - 1
    assert switches >= 30
    assert 400 - short.short_ways < 25


def staying(leaders: Sequence[int] = (1, 1, 1), **options: Any) -> Rig:
    """A bulk pours: records without a partition stay in a batch that grows."""
    rig = growing(leaders, **options)
    rig.accumulator.stay(rig.topic, True)
    return rig


def batch_runs(rig: Rig, records: int) -> list[tuple[int, int]]:
    """Partition and number of records of each batch, in the order in which they were filled."""
    batches = []
    for _ in range(records):
        chosen = rig.append(bytes(90), partition=-1).partition
        batches.append(rig.queue(chosen).batches[-1])
        rig.now += 0.00001
    return [(batch.partition, len(list(run))) for batch, run in itertools.groupby(batches)]


def test_records_that_stay_fill_one_batch_after_the_other() -> None:
    """The next is hardly ever of the partition that has just got one: it has the most."""
    rig = staying([1] * 6, most=20_000)
    *full, _ = batch_runs(rig, 20_000)
    # Compiled, a batch has several buffers, and one may have a few bytes left over.
    assert {records for _, records in full} == {199 if COMPILED else 200}
    sizes = [batch.size for n in range(6) for batch in rig.queue(n).batches]
    assert len([size for size in sizes if 19_700 < size <= 20_000]) >= len(full)
    filled = Counter(partition for partition, _ in full)
    assert min(filled.values()) >= 15
    assert sum(one == other for (one, _), (other, _) in itertools.pairwise(full)) < 10


def test_records_that_stay_leave_with_their_batch() -> None:
    """What comes then is for the partition that the partitioner has turned to."""
    rig = staying(most=100_000)
    batch_runs(rig, 100)
    [batch] = rig.drain()
    assert batch.count == 100
    assert rig.topic.sticky is None
    turned_to = rig.topic.partitioner.peek(rig.topic.view)
    assert turned_to != batch.partition
    assert [partition for partition, _ in batch_runs(rig, 100)] == [turned_to]


def test_who_stays_no_longer_goes_to_another_partition_with_each_batch_size() -> None:
    rig = staying(most=100_000)
    [(stayed_in, _)] = batch_runs(rig, 300)
    rig.accumulator.stay(rig.topic, False)
    runs = batch_runs(rig, 100)
    # The record with which the partitioner hears of the others.
    assert runs[0] == (stayed_in, 1)
    assert max(records for _, records in runs) <= 24


def test_short_and_long_way_stay_alike() -> None:
    short = staying(most=5000)
    long = staying(most=5000)
    for _ in range(1000):
        delivery = short.append(bytes(90), partition=-1)
        by_long = long.accumulator.append(long.topic, -1, T0, None, bytes(90), NO_HEADERS, long.now)
        assert by_long is not None
        assert delivery.partition == by_long.partition
    assert 1000 - short.short_ways < 70


@pytest.mark.parametrize(("total", "steps"), [(10**9, [1000, 100_000]), (120_000, [1000, 2000])])
def test_the_memory_for_what_stays_comes_at_once_if_half_of_it_remains(
    total: int, steps: list[int]
) -> None:
    rig = staying(most=100_000, memory=Pool(total))
    taken = []
    for _ in range(15):
        rig.append(bytes(90), partition=-1)
        if rig.memory.taken not in taken:
            taken.append(rig.memory.taken)
    assert taken == steps


def test_nothing_stays_where_it_is_compressed() -> None:
    """Batches are compressed side by side."""
    rig = staying(most=100_000, codec=codec("lz4"))
    noise = random.Random(1).randbytes
    chosen = {rig.append(noise(300), partition=-1).partition for _ in range(100)}
    assert chosen == {0, 1, 2}


# -- held up, where a broker has other requests to answer ------------------------------------


def held(rig: Rig) -> Any:
    """How much longer, in seconds; None: not at all."""
    assert rig.ready() in (set(), {1})
    until = rig.accumulator.held_until(1, rig.now)
    return None if until < 0 else pytest.approx(until - rig.now)


def ripe(rig: Rig, *partitions: int) -> None:
    """A batch of 2 kB that may leave and grow, in each of the partitions."""
    for partition in partitions:
        rig.append(bytes(900), partition=partition)
        rig.append(bytes(900), partition=partition)


@pytest.mark.parametrize(("linger", "most"), [(0.002, 0.002), (0.005, 0.005), (60.0, 0.005)])
def test_little_is_held_up_while_it_would_linger_but_not_long(linger: float, most: float) -> None:
    rig = growing(linger=linger)
    assert held(rig) is None, "nothing can leave"
    rig.append(bytes(900))
    assert held(rig) is None
    rig.now += 0.001
    rig.append(bytes(900))
    assert held(rig) == most - 0.001
    rig.now += most - 0.0011
    assert held(rig) == 0.0001
    rig.now += 0.0002
    assert held(rig) is None
    assert rig.accumulator.held_until(2, rig.now) < 0, "nobody leads anything there"


def test_the_oldest_batch_tells_how_long() -> None:
    rig = growing([1, 1, 1], most=10_000)
    for partition in (1, 0, 2):
        ripe(rig, partition)
        rig.now += 0.001
    assert held(rig) == 0.002


def test_what_is_worth_a_request_is_not_held_up() -> None:
    """64 times batch_size, the largest batch at most."""
    rig = growing([1] * 40, most=100_000)
    ripe(rig, *range(34))
    assert held(rig) is not None
    ripe(rig, 34, 35)
    assert held(rig) is None
    large = growing([1, 1], batch_size=100_000, most=250_000)
    for partition in (0, 0, 0, 1, 1):
        large.append(bytes(48_000), partition=partition)
    assert held(large) is not None, "144 kB"
    large.append(bytes(48_000), partition=1)
    assert held(large) is None, "288 kB"


def test_of_more_than_a_hundred_partitions_nothing_is_held_up() -> None:
    """Each of them would have to be looked at."""
    rig = growing([1] * 101, batch_size=100_000, most=120_000)
    for partition in range(101):
        assert partition == 0 or held(rig) is not None
        rig.append(bytes(1000), partition=partition)
        rig.append(bytes(119_500), partition=partition)
        assert [b.count for b in rig.queue(partition).batches] == [1, 1]
    assert held(rig) is None


def test_what_is_due_is_not_held_up() -> None:
    rig = growing([1, 1])
    ripe(rig, 0)
    [batch] = rig.drain()
    rig.retry(batch)
    rig.now += 0.2
    ripe(rig, 1)
    assert rig.ready() == {1}
    assert held(rig) is None, "one is sent again"


def test_nothing_is_held_up_where_somebody_waits_or_no_more_comes() -> None:
    rig = growing()
    ripe(rig, 0)
    assert held(rig) is not None
    rig.accumulator.pouring = False
    assert held(rig) is None
    rig.accumulator.pouring = True
    rig.memory.waiting = 1
    assert held(rig) is None
    rig.memory.waiting = 0
    rig.accumulator.begin_flush(Fence(lambda: None), rig.now)
    assert held(rig) is None
    rig.accumulator.end_flush()
    assert held(rig) is not None
    rig.accumulator.close(rig.now)
    assert held(rig) is None


@pytest.mark.parametrize("options", [{"linger": 0.0}, {"most": 0}, {"codec": codec("lz4")}])
def test_where_holding_up_gains_nothing_it_is_not_done(options: dict[str, Any]) -> None:
    """Without lingering, or growing; and other threads could be compressing."""
    rig = growing(**options)
    ripe(rig, 0)
    assert rig.ready() == {1}
    assert held(rig) is None


def test_what_has_grown_counts_for_the_load_as_the_batches_it_stands_for() -> None:
    """RA-28 with queues of one grown batch each."""
    rig = growing([1, 2, 3], most=100_000)
    for partition, count_ in ((0, 1), (1, 7), (2, 2)):
        for _ in range(count_):
            rig.append(bytes(900), partition=partition)
    assert [len(rig.queue(p).batches) for p in range(3)] == [1, 1, 1]
    assert rig.append(bytes(2000), partition=-1).partition == 0
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(140))
    assert chosen[1] < 20
    assert min(chosen[0], chosen[2]) > 50


# -- compression ---------------------------------------------------------------------------


def test_small_batches_are_compressed_when_they_are_drained() -> None:
    rig = Rig(codec=codec("lz4"), linger=0.0)
    rig.append(bytes(500))
    batch = rig.drain_one()
    assert batch.payload is not None
    assert values(batch) == [bytes(500)]
    assert rig.accumulator.estimator.estimate("orders", 3) == pytest.approx(0.995)
    assert rig.accumulator.to_compress == []


def test_large_batches_are_compressed_elsewhere_and_then_leave() -> None:
    rig = Rig([1, 1], codec=codec("lz4"), linger=0.0, quick_bytes=300)
    rig.append(bytes(500), partition=0)
    rig.append(bytes(10), partition=1)
    assert partitions(rig.drain()) == [1]
    [batch] = rig.accumulator.to_compress
    assert batch.compressing
    rig.append(bytes(500), partition=0)
    assert rig.ready() == set(), "those behind it wait"
    assert batch.codec is not None
    rig.accumulator.news = False
    payload = batch.codec.compress(batch.uncompressed())
    rig.accumulator.compressed(batch, payload, rig.now)
    assert rig.accumulator.news
    assert rig.drain() == [batch]
    assert not batch.compressing
    assert values(batch) == [bytes(500)]


def test_one_turn_compresses_only_so_much_on_the_loop() -> None:
    """Small batches add up: what is too much waits for the next turn, in its place, and grows."""
    rig = Rig([1, 1, 1, 2], codec=codec("lz4"), linger=0.0, quick_bytes=300)
    accumulator = rig.accumulator
    for partition in range(4):
        rig.append(bytes(100), partition=partition)
    assert not accumulator.compressed_here
    assert partitions(rig.drain()) == [0]
    assert accumulator.compressed_here
    assert accumulator.drain(2, 10**6, rig.now) == [], "the turn is one for all brokers"
    assert accumulator.to_compress == []
    assert rig.ready() == set()
    rig.append(bytes(10), partition=1)
    accumulator.news = False
    assert accumulator.turned(rig.now)
    assert accumulator.news
    assert not accumulator.compressed_here
    assert rig.ready() == {1, 2}
    [batch] = accumulator.drain(1, 10**6, rig.now)
    assert (batch.partition, values(batch)) == (1, [bytes(100), bytes(10)])
    accumulator.turned(rig.now)
    assert partitions(accumulator.drain(1, 10**6, rig.now)) == [2]
    accumulator.turned(rig.now)
    assert partitions(accumulator.drain(2, 10**6, rig.now)) == [3]
    assert not accumulator.turned(rig.now), "nothing waits any more"


@pytest.mark.parametrize(
    "leaders",
    [[1, 1, 1, 1], [1, 2], [1, 2, 3, 4], [1, 1, 2, 2], [1] * 9 + [2], [1, *[2] * 9], [3, 2, 1, 2]],
)
def test_what_waits_for_the_next_turn_does_not_do_so_for_ever(leaders: list[int]) -> None:
    """Where each turn has time for one batch, each partition has its turn now and then."""
    rig = Rig(leaders, codec=codec("lz4"), linger=0.0, quick_bytes=1000)
    accumulator = rig.accumulator
    for _ in range(30):
        for partition in range(len(leaders)):
            rig.append(bytes(900), partition=partition)
    drained: Counter[int] = Counter()
    turns = 7 * len(leaders)
    for _ in range(turns):
        accumulator.turned(rig.now)
        for node in list(accumulator.ready):
            while batches := accumulator.drain(node, 10**6, rig.now):
                drained.update(partitions(batches))
    assert drained.total() == turns
    assert min(drained[partition] for partition in range(len(leaders))) >= 4


def test_what_waits_for_the_next_turn_can_end_or_move_before() -> None:
    rig = Rig([1, 1, 1], codec=codec("lz4"), linger=0.0, quick_bytes=300, delivery_timeout=2.0)
    for partition in range(3):
        rig.append(bytes(100), partition=partition)
    assert partitions(rig.drain()) == [0]
    rig.see([1, 1, 2])
    assert rig.ready() == {1, 2}, "who is looked at again asks again"
    for node in (1, 2):
        assert rig.accumulator.drain(node, 10**6, rig.now) == []
    rig.now += 2.0
    assert len(rig.accumulator.expire(rig.now)) == 3
    assert rig.accumulator.turned(rig.now)
    assert rig.ready() == set()


def test_a_large_batch_goes_to_a_thread_though_there_is_time_for_it() -> None:
    rig = Rig([1, 1], codec=codec("lz4"), batch_size=100_000, linger=0.0, quick_bytes=150_000)
    for partition, size in enumerate((65_000, 66_000)):
        rig.append(bytes(size), partition=partition)
    assert partitions(rig.drain()) == [0]
    assert [batch.partition for batch in rig.accumulator.to_compress] == [1]


class Slow:
    """A clock in which each look takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_what_waits_is_asked_for_though_a_turn_takes_less_than_was_thought() -> None:
    clock = iter([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).__next__
    rig = Rig([1, 1, 1, 1], codec=codec("lz4"), batch_size=150_000, linger=0.0, clock=clock)
    for partition, size in enumerate((60_000, 60_000, 60_000, 10_000)):
        rig.append(bytes(size), partition=partition)
    assert partitions(rig.drain()) == [0, 1, 3]
    assert rig.accumulator.quick_bytes == 16_384, "the third took a second"
    assert len(rig.accumulator.postponed) == 1
    assert rig.accumulator.compressed_here
    assert rig.accumulator.turned(rig.now)


@pytest.mark.parametrize(
    ("seconds", "learned"),
    [
        pytest.param(1.0, 16_384, id="never less than a batch of ordinary size"),
        pytest.param(0.0, 2 * 147_456, id="never more than twice what is known of the codec"),
        pytest.param(10_061 / 100_000 * 0.00035, 100_000, id="what is measured"),
    ],
)
def test_how_much_a_turn_compresses_follows_what_it_takes(seconds: float, learned: int) -> None:
    rig = Rig(codec=codec("lz4"), batch_size=10_000, linger=0.0, clock=Slow(seconds))
    assert rig.accumulator.quick_bytes == 147_456
    for _ in range(200):
        rig.append(bytes(10_000 - 10))
        rig.acknowledge(rig.drain_one())
    assert rig.accumulator.quick_bytes == pytest.approx(learned, rel=0.01)


def test_how_much_that_is_the_codec_says() -> None:
    """Zstandard at its highest levels takes milliseconds for any batch."""
    fast, slow = (Rig(codec=codec("zstd", level), linger=0.0) for level in (1, 22))
    for rig in (fast, slow):
        rig.append(bytes(5000))
    assert len(fast.drain()) == 1
    assert slow.drain() == []
    assert len(slow.accumulator.to_compress) == 1


def test_a_batch_that_ends_while_it_is_compressed_keeps_its_bytes_until_then() -> None:
    rig = Rig(codec=codec("lz4"), linger=0.0, quick_bytes=300, delivery_timeout=2.0)
    delivery = rig.append(bytes(500))
    assert rig.drain() == []
    [batch] = rig.accumulator.to_compress
    records = batch.uncompressed()
    rig.now += 2.0
    assert rig.accumulator.expire(rig.now) == [batch]
    assert rig.taken() == 0
    assert batch.buffer is not None
    rig.accumulator.compressed(batch, codec("lz4").compress(records), rig.now)
    assert batch.buffer is None
    assert not batch.compressing
    assert delivery.exception() is not None
    assert rig.ready() == set()


class Broken(Codec):
    """A codec that has no memory."""

    def compress(self, data: Any) -> bytes:
        raise MemoryError("no room")


def test_a_codec_that_fails_fails_its_batch_alone() -> None:
    """The others of the request leave, in the one that was being made."""
    rig = Rig([1, 1, 1], codec=codec("lz4"), linger=0.0)
    deliveries = [rig.append(partition=partition) for partition in range(3)]
    batch = rig.queue(1).batches[0]
    batch.codec = Broken("lz4", 3, None)
    assert partitions(rig.drain()) == [0, 2]
    assert rig.accumulator.to_compress == [batch]
    assert rig.accumulator.not_compressed(batch, MemoryError("no room"), rig.now)
    error = deliveries[1].exception()
    assert error is not None
    assert error.persisted == "no"
    assert isinstance(error.__cause__, MemoryError)
    assert "could not be compressed" in str(error)
    assert rig.taken() == 2000
    assert batch.buffer is None
    assert not deliveries[0].done()
    rig.append(partition=1)
    assert partitions(rig.drain()) == [1]


def test_a_codec_that_fails_after_the_batch_was_given_up_changes_nothing() -> None:
    rig = Rig(codec=codec("lz4"), linger=0.0, quick_bytes=300, delivery_timeout=2.0)
    delivery = rig.append(bytes(500))
    rig.drain()
    [batch] = rig.accumulator.to_compress
    rig.now += 2.0
    rig.accumulator.expire(rig.now)
    assert not rig.accumulator.not_compressed(batch, MemoryError(), rig.now)
    assert batch.buffer is None
    assert isinstance(delivery.exception(), DeliveryTimeout)
    assert rig.taken() == 0


def test_the_estimate_is_taken_when_a_batch_begins() -> None:
    rig = Rig(codec=codec("lz4"), linger=0.0)
    rig.accumulator.estimator.observe("orders", 3, 0.5)
    rig.append()
    rig.accumulator.estimator.observe("orders", 3, 0.5)
    rig.append()
    assert rig.queue().batches[0].ratio == pytest.approx(0.995)


# -- splitting -----------------------------------------------------------------------------


def test_a_batch_that_is_too_large_goes_again_in_parts() -> None:
    """RA-20, RA-21: the users' deliveries live on; parts take no memory of the pool."""
    rig = Rig(batch_size=1024, linger=0.0)
    deliveries = [rig.append(bytes(400)) for _ in range(2)]
    calls: list[int] = []
    for delivery in deliveries:
        delivery.add_done_callback(lambda d: calls.append(d.result().offset))
    batch = rig.drain_one()
    rig.append()
    rig.accumulator.landed(batch)
    parts = rig.accumulator.split(batch, rig.now)
    assert rig.taken() == 1024, "of the record behind it"
    assert calls == []
    assert [part.created_at for part in parts] == [1000.0, 1000.0]
    assert list(rig.accumulator.incomplete)[:2] == parts
    assert list(rig.queue().batches)[:2] == parts
    drained = [rig.drain_one(), rig.drain_one()]
    assert drained == parts
    rig.acknowledge(drained[0], 50)
    rig.acknowledge(drained[1], 40)
    assert calls == [50, 40]
    assert rig.taken() == 1024


def test_a_split_makes_the_estimate_careful_again() -> None:
    """Spec 2.8."""
    rig = Rig(codec=codec("lz4"), linger=0.0)
    for _ in range(100):
        rig.accumulator.estimator.observe("orders", 3, 0.1)
    assert rig.accumulator.estimator.estimate("orders", 3) < 0.6
    rig.append(bytes(100))
    rig.append(bytes(100))
    batch = rig.drain_one()
    rig.accumulator.landed(batch)
    rig.accumulator.split(batch, rig.now)
    assert rig.accumulator.estimator.estimate("orders", 3) == 1.0


def test_a_batch_that_a_failure_has_left_nowhere_has_its_end_and_stops_nobody() -> None:
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    lost = rig.append()
    rig.accumulator.landed(rig.drain_one())
    other = rig.append()
    rig.now += 2.0
    assert len(rig.accumulator.expire(rig.now)) == 2
    assert isinstance(lost.exception(), DeliveryTimeout)
    assert isinstance(other.exception(), DeliveryTimeout)
    assert rig.taken() == 0


def test_a_batch_has_its_end_though_who_is_told_of_it_fails() -> None:
    def on_failed(batch: ProducerBatch, failure: Failure) -> None:
        raise ValueError("mine")

    rig = Rig(linger=0.0, delivery_timeout=2.0, on_failed=on_failed)
    lost = rig.append()
    rig.now += 2.0
    with pytest.raises(ValueError, match="mine"):
        rig.accumulator.expire(rig.now)
    assert isinstance(lost.exception(), DeliveryTimeout)
    assert rig.taken() == 0


def test_a_split_that_finds_no_memory_leaves_the_batch_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        @staticmethod
        def fromkeys(_: object) -> None:
            raise MemoryError

    rig = Rig(linger=0.0, batch_size=1000)
    sent = [rig.append(bytes(400)) for _ in range(2)]
    batch = rig.drain_one()
    rig.accumulator.landed(batch)
    with monkeypatch.context() as patched:
        patched.setattr(module, "OrderedDict", Full)
        with pytest.raises(MemoryError):
            rig.accumulator.split(batch, rig.now)
    rig.accumulator.fail(batch, Failure(BrokerRejected, "too large"), rig.now)
    for delivery in sent:
        assert isinstance(delivery.exception(), BrokerRejected)
    assert rig.taken() == 0


def test_a_split_reads_as_much_as_the_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be more than what is read of a stranger's."""
    compressing = codec("zstd")
    decompress = type(compressing).decompress
    limits: list[int] = []

    def spy(self: Codec, data: Any, max_size: int = 100) -> bytes:
        limits.append(max_size)
        return decompress(self, data, max_size)

    monkeypatch.setattr(type(compressing), "decompress", spy)
    rig = Rig(codec=compressing, linger=0.0, batch_size=10_000)
    rig.append(bytes(4000))
    rig.append(bytes(4000))
    batch = rig.drain_one()
    rig.accumulator.landed(batch)
    assert len(rig.accumulator.split(batch, rig.now)) == 2
    assert limits == [batch.size]


def test_what_no_broker_has_may_expire_before_what_one_has() -> None:
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    sent, waiting = rig.append(), rig.append(bytes(990))
    batch = rig.drain_one()
    rig.now += 2.0
    assert rig.accumulator.has_expired(rig.now)
    assert [b.count for b in rig.accumulator.expire(rig.now, False)] == [1]
    assert isinstance(waiting.exception(), DeliveryTimeout)
    assert not sent.done()
    assert rig.accumulator.expire(rig.now, False) == []
    rig.acknowledge(batch, 7)
    assert sent.result().offset == 7
    assert not rig.accumulator.has_expired(rig.now)


def test_parts_expire_with_the_age_of_their_batch() -> None:
    """Spec 3.9, SN-14."""
    rig = Rig(linger=0.0, delivery_timeout=2.0)
    deliveries = [rig.append(), rig.append()]
    batch = rig.drain_one()
    rig.now += 1.0
    rig.accumulator.landed(batch)
    rig.accumulator.split(batch, rig.now)
    rig.append()
    rig.now += 1.0
    expired = rig.accumulator.expire(rig.now)
    assert sum(part.count for part in expired) == 2
    assert all(isinstance(d.exception(), DeliveryTimeout) for d in deliveries)
    assert len(rig.accumulator.incomplete) == 1
    assert rig.taken() == 1000


# -- flush, close and abort ----------------------------------------------------------------


def test_during_a_flush_nothing_lingers() -> None:
    """RA-12, RA-32: the fence is passed when the last of its batches has its end."""
    rig = Rig([1, 1, 2], linger=50.0)
    deliveries = [rig.append(partition=n) for n in range(3)]
    passed: list[bool] = []
    fence = Fence(lambda: passed.append(all(d.done() for d in deliveries)))
    rig.accumulator.begin_flush(fence, rig.now)
    assert rig.ready() == {1, 2}
    rig.append(partition=0)
    drained = rig.drain(1) + rig.drain(2)
    assert len(drained) == 3
    later = rig.append(partition=1)
    assert rig.ready() == {1}, "what comes during the flush leaves as well"
    rig.acknowledge(drained[0])
    rig.retry(drained[1])
    rig.fail(drained[2])
    assert passed == []
    rig.now += 0.1
    again = rig.drain()
    rig.acknowledge(next(batch for batch in again if batch is drained[1]))
    assert passed == [True]
    assert not later.done()
    rig.accumulator.end_flush()
    assert rig.accumulator.flushing == 0
    assert deliveries[2].exception() is not None


def test_a_flush_that_is_given_up_lets_records_linger_again() -> None:
    """RA-13."""
    rig = Rig([1], linger=50.0)
    rig.append()
    rig.accumulator.begin_flush(Fence(lambda: None), rig.now)
    rig.drain_one()
    rig.accumulator.begin_flush(Fence(lambda: None), rig.now)
    rig.accumulator.end_flush()
    assert rig.accumulator.flushing == 1
    rig.accumulator.end_flush()
    rig.append()
    assert rig.ready() == set()


def test_a_flush_waits_for_the_parts_of_a_split() -> None:
    """RA-32."""
    rig = Rig(linger=0.0)
    rig.append()
    rig.append()
    passed: list[bool] = []
    rig.accumulator.begin_flush(Fence(lambda: passed.append(True)), rig.now)
    batch = rig.drain_one()
    rig.accumulator.landed(batch)
    rig.accumulator.split(batch, rig.now)
    for _ in range(2):
        assert passed == []
        rig.acknowledge(rig.drain_one())
    assert passed == [True]


def test_a_flush_of_nothing_has_nothing_to_wait_for() -> None:
    rig = Rig()
    fence = Fence(lambda: None)
    rig.accumulator.begin_flush(fence, rig.now)
    assert fence.remaining == 0


def test_a_flush_respects_the_backoff() -> None:
    """Spec 3.11."""
    rig = Rig(linger=0.0)
    rig.append()
    rig.retry(rig.drain_one())
    rig.accumulator.begin_flush(Fence(lambda: None), rig.now)
    assert rig.ready() == set()
    rig.now += 0.1
    assert rig.ready() == {1}


def test_closing_lets_everything_leave() -> None:
    """Spec 3.12."""
    rig = Rig([1, 2], linger=50.0)
    rig.append(partition=0)
    rig.accumulator.close(rig.now)
    assert rig.ready() == {1}
    rig.append(partition=1)
    assert rig.ready() == {1, 2}


def test_an_abort_ends_everything_once() -> None:
    """RA-14, PB-01: drained and undrained ones, each delivery told once."""
    rig = Rig([1, 2, -1], linger=0.0, delivery_timeout=10.0)
    deliveries = [rig.append(partition=n % 3) for n in range(6)]
    deliveries += [rig.append(bytes(2000), partition=2)]
    calls: Counter[Delivery] = Counter()
    for delivery in deliveries:
        delivery.add_done_callback(lambda d: calls.update([d]))
    [on_wire] = rig.drain(1)
    cause = ValueError("closed by force")
    rig.now += 1.0
    aborted = rig.accumulator.abort("the producer is closed", cause, rig.now)
    assert len(aborted) == 4
    assert calls == Counter(deliveries)
    errors = [delivery.exception() for delivery in deliveries]
    for error in errors:
        assert isinstance(error, AbortedError)
        assert error.__cause__ is cause
        assert error.elapsed == 1.0
        assert "the producer is closed" in str(error)
    assert [e.persisted for e in errors if e is not None] == [
        "maybe" if n in (0, 3) else "no" for n in range(7)
    ]
    assert not rig.accumulator.incomplete
    assert not rig.accumulator.leaderless
    assert rig.taken() == 1000
    rig.accumulator.landed(on_wire)
    assert rig.taken() == 0
    assert rig.ready() == set()
    assert rig.accumulator.abort("again", None, rig.now) == []


# -- topics and leaders --------------------------------------------------------------------


def test_without_a_leader_a_partition_waits_for_one() -> None:
    rig = Rig([-1, 1], linger=0.0)
    rig.append(partition=0)
    assert rig.ready() == set()
    assert [queue.partition for queue in rig.accumulator.leaderless] == [0]
    rig.see([2, 1])
    assert rig.ready() == {2}
    assert not rig.accumulator.leaderless


def test_a_lingering_partition_without_a_leader_asks_for_none_yet() -> None:
    rig = Rig([-1], linger=1.0)
    rig.append()
    assert not rig.accumulator.leaderless
    rig.now += 1.0
    assert rig.ready() == set()
    assert len(rig.accumulator.leaderless) == 1


def test_what_is_ready_moves_with_its_leader() -> None:
    rig = Rig([1, 1])
    rig.fill(0, 1)
    rig.see([2, 1])
    assert rig.ready() == {1, 2}
    rig.see([-1, 2])
    assert rig.ready() == {2}
    assert partitions(rig.drain(2)) == [1]
    assert [queue.partition for queue in rig.accumulator.leaderless] == [0]


def test_new_partitions_are_used() -> None:
    rig = Rig([1])
    rig.see([1, 1, 2])
    rig.fill(2)
    assert rig.ready() == {2}
    assert rig.topic.view.partition_count == 3


def test_a_topic_that_vanishes_keeps_what_is_queued_until_it_returns() -> None:
    """SN-06."""
    rig = Rig([1, 1], linger=0.0)
    rig.append(partition=1)
    rig.accumulator.remove_topic("orders", rig.now)
    assert not rig.topic.known
    assert rig.ready() == set()
    assert len(rig.accumulator.leaderless) == 1
    state = rig.topic
    assert rig.see([1, 2]) is state
    assert state.known
    assert rig.ready() == {2}


def test_an_idle_topic_is_forgotten_unless_its_sequences_are_needed() -> None:
    rig = Rig([1], linger=0.0)
    rig.append()
    rig.acknowledge(rig.drain_one())
    rig.accumulator.remove_topic("orders", rig.now)
    assert rig.accumulator.topics == {}
    rig.accumulator.remove_topic("orders", rig.now)
    sequences = Sequences()
    sequences.requested()
    sequences.assigned(1, 0)
    numbered = Rig([1], linger=0.0, sequences=sequences)
    numbered.append()
    numbered.acknowledge(numbered.drain_one())
    numbered.accumulator.remove_topic("orders", numbered.now)
    assert list(numbered.accumulator.topics) == ["orders"]
    numbered.see([1])
    numbered.append()
    assert numbered.drain_one().base_sequence == 1


def test_a_record_that_waited_while_its_topic_was_forgotten_is_not_lost() -> None:
    """Its sender still holds the old state of the topic."""
    rig = Rig([1, 1, 1], linger=0.0, delivery_timeout=2.0)
    old = rig.topic
    rig.accumulator.remove_topic("orders", rig.now)
    assert rig.accumulator.topics == {}
    deliveries = [rig.append(partition=2)]
    assert rig.accumulator.topics["orders"] is old
    rig.accumulator.expire(rig.now + 2.0)
    rig.accumulator.remove_topic("orders", rig.now)
    rig.see([1])
    rig.topic = old
    deliveries += [rig.append(partition=2), rig.append(partition=0)]
    rig.topic = rig.accumulator.topics["orders"]
    assert rig.topic is not old
    batch = rig.drain_one()
    assert partitions([batch]) == [0]
    rig.acknowledge(batch)
    rig.accumulator.expire(rig.now + 2.0)
    assert [d.exception() is None for d in deliveries] == [False, False, True]
    assert rig.taken() == 0


# -- sticky partitions ---------------------------------------------------------------------


def test_the_sticky_partition_is_left_only_with_a_full_batch() -> None:
    """RA-27: and the random source is asked exactly once per choice."""
    rig = Rig([1, 1, 1], batch_size=1000)
    large = bytes(1000)
    chosen = []
    for value in (b"small", large, large, large, large):
        delivery = rig.append(value, partition=-1)
        asked = next(rig.randoms)
        rig.randoms = count(asked)
        chosen.append((delivery.partition, asked))
    assert chosen == [(0, 1), (0, 1), (1, 2), (2, 3), (0, 4)]


def test_shorter_queues_are_chosen_more_often() -> None:
    """RA-28: queues of 1, 7 and 2 batches are chosen 7, 1 and 6 times of 14."""
    rig = Rig([1, 2, 3])
    rig.fill(*[1] * 7, 2, 2)
    assert rig.append(bytes(2000), partition=-1).partition == 0
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(140))
    assert chosen == {0: 70, 1: 10, 2: 60}


def test_partitions_of_a_broker_that_takes_nothing_are_left_out() -> None:
    """RA-28: more than the availability timeout between ready and drained."""
    rig = Rig([1, 2, 3], availability_timeout=0.1)
    rig.fill(0, 0, 1, 2)
    for node in (1, 2, 3):
        rig.accumulator.node_seen(node, 1000.0, drained=True)
    for node in (2, 3):
        rig.accumulator.node_seen(node, 1000.2, drained=node == 3)
    rig.append(bytes(2000), partition=-1)
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(100))
    assert set(chosen) == {0, 2}


def test_queues_that_are_empty_again_are_chosen_evenly() -> None:
    rig = Rig([1, 1, 1])
    rig.fill(*[1] * 7, 2, 2)
    rig.append(bytes(2000), partition=-1)
    rig.append(bytes(2000), partition=-1)
    rig.accumulator.close(rig.now)
    while rig.accumulator.ready:
        for batch in rig.drain():
            rig.acknowledge(batch)
    rig.now += 1.0
    rig.append(bytes(2000), partition=-1)
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(60))
    assert chosen == {0: 20, 1: 20, 2: 20}


def test_records_that_name_their_partition_do_not_move_the_sticky_one() -> None:
    rig = Rig([1, 1, 1])
    assert rig.append(partition=-1).partition == 0
    for _ in range(5):
        rig.append(bytes(600), partition=0)
    assert rig.append(b"v", partition=-1).partition == 0
    assert next(rig.randoms) == 1


def test_all_partitions_are_tried_before_their_load_counts() -> None:
    rig = Rig([1, 2, 3])
    rig.fill(0, 0, 0)
    chosen = [rig.append(bytes(2000), partition=-1).partition for _ in range(6)]
    assert chosen == [0, 1, 2] * 2


def test_partitions_without_a_leader_are_not_chosen() -> None:
    rig = Rig([1, 1, -1])
    rig.fill(*[0] * 3, 1, 2)
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(60))
    assert set(chosen) == {0, 1}
    assert chosen[1] > chosen[0]


def test_without_adaptive_partitioning_load_does_not_matter() -> None:
    rig = Rig([1, 2, 3], adaptive=False)
    rig.fill(*[0] * 9, 1, 2)
    chosen = Counter(rig.append(bytes(2000), partition=-1).partition for _ in range(60))
    assert chosen == {0: 20, 1: 20, 2: 20}


# -- adaptive linger -----------------------------------------------------------------------


def idle(node: int) -> bool:
    return True


def test_a_lone_record_leaves_after_one_quiet_turn() -> None:
    rig = Rig([0], linger=50.0, adaptive_linger=True)
    rig.append()
    assert rig.accumulator.settle(rig.now, idle), "it has just come"
    assert rig.ready() == set()
    assert rig.accumulator.next_deadline() == rig.now + 50.0
    assert not rig.accumulator.settle(rig.now, idle)
    assert rig.ready() == {0}
    delivery_timeout = 120.0
    assert rig.accumulator.next_deadline() == rig.now + delivery_timeout, "it lingers no more"


def test_a_burst_leaves_when_it_is_over() -> None:
    rig = Rig(linger=50.0, adaptive_linger=True)
    for _ in range(3):
        rig.append()
        assert rig.accumulator.settle(rig.now, idle)
        assert rig.ready() == set()
    assert not rig.accumulator.settle(rig.now, idle)
    assert rig.drain_one().count == 3


def test_where_the_broker_is_busy_records_linger() -> None:
    rig = Rig(linger=0.5, adaptive_linger=True)
    rig.append()
    rig.accumulator.settle(rig.now, lambda _: False)
    assert not rig.accumulator.settle(rig.now, lambda _: False)
    assert rig.ready() == set()
    rig.now += 0.5
    assert rig.ready() == {1}


def test_what_has_left_or_cannot_leave_is_not_settled() -> None:
    rig = Rig([1, -1], linger=50.0, adaptive_linger=True)
    rig.fill(0)
    rig.append(partition=1)
    assert not rig.accumulator.settle(rig.now, idle)
    assert rig.queue(1).open is not None


def test_records_behind_what_cannot_leave_share_a_batch() -> None:
    """Else each of them would have a batch of its own, and the memory of one, as long as a broker
    refuses the first."""
    rig = Rig(linger=50.0, adaptive_linger=True)
    rig.append()
    for _ in range(2):
        rig.accumulator.settle(rig.now, idle)
    rig.retry(rig.drain_one())
    for _ in range(20):
        rig.append()
        for _ in range(2):
            rig.accumulator.settle(rig.now, idle)
    assert [batch.count for batch in rig.queue().batches] == [1, 20]
    rig.now += 1.0
    assert rig.drain_one().count == 1
    assert rig.ready() == {1}, "it has lingered enough"
    assert rig.drain_one().count == 20


def test_before_there_is_a_producer_id_no_more_than_one_record_has_a_batch_of_its_own() -> None:
    rig = Rig(linger=50.0, adaptive_linger=True, sequences=Sequences())
    for _ in range(20):
        rig.append()
        for _ in range(2):
            rig.accumulator.settle(rig.now, idle)
    assert [batch.count for batch in rig.queue().batches] == [1, 19]


def test_without_adaptive_linger_nothing_is_fresh() -> None:
    rig = Rig(linger=50.0)
    rig.append()
    assert rig.accumulator.fresh == []


# -- what it costs -------------------------------------------------------------------------


class CountingPool(Pool):
    """Counts how often it is asked whether somebody waits: once per look at a lone batch."""

    looks = 0

    @property
    def waiting(self) -> int:
        self.looks += 1
        return 0

    @waiting.setter
    def waiting(self, value: int) -> None:
        pass


class CountingSequences(Sequences):
    looks = 0

    def may_drain(self, *arguments: Any) -> bool:
        self.looks += 1
        return super().may_drain(*arguments)


def lively(partition_count: int) -> tuple[Rig, CountingPool, CountingSequences]:
    """A producer that has used all of its partitions. Now all but one are idle."""
    pool, sequences = CountingPool(), CountingSequences()
    sequences.requested()
    sequences.assigned(1, 0)
    rig = Rig([1] * partition_count, memory=pool, sequences=sequences, linger=0.01)
    for partition in range(partition_count):
        rig.append(partition=partition)
    rig.now += 0.01
    for batch in rig.drain():
        rig.acknowledge(batch)
    rig.accumulator.give_back()
    assert all(queue is not None for queue in rig.topic.queues)
    return rig, pool, sequences


def a_round(rig: Rig) -> None:
    """Everything that happens to a record on its way, and what is asked meanwhile."""
    rig.append(partition=3)
    rig.accumulator.next_deadline()
    rig.now += 0.01
    rig.accumulator.expire(rig.now)
    batch = rig.drain_one()
    rig.retry(batch)
    rig.accumulator.begin_flush(Fence(lambda: None), rig.now)
    rig.accumulator.next_deadline()
    rig.now += 0.2
    rig.acknowledge(rig.drain_one())
    rig.accumulator.end_flush()
    rig.accumulator.give_back()
    rig.drain()


def test_looks_do_not_depend_on_the_number_of_partitions() -> None:
    looks = []
    for partition_count in (10, 10_000):
        rig, pool, sequences = lively(partition_count)
        pool.looks = sequences.looks = 0
        for _ in range(5):
            a_round(rig)
        looks.append((pool.looks, sequences.looks))
    assert looks[0] == looks[1]
    assert 0 < sum(looks[0]) < 100


@pytest.mark.skipif(COMPILED, reason="compiled code has no lines to count")
def test_lines_do_not_depend_on_the_number_of_partitions() -> None:
    lines = []
    for partition_count in (10, 10_000):
        rig, _, _ = lively(partition_count)
        # What the first records left in the heap is cleared away once, not in each round.
        a_round(rig)
        lines.append(lines_of(lambda rig=rig: a_round(rig)))  # type: ignore[misc]
    assert lines[0] == lines[1]
    assert lines[0] > 50


def lines_of(work: Callable[[], None]) -> int:
    """How many lines of the accumulator `work` runs through."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            executed += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return executed


def test_batches_that_fill_before_a_long_linger_time_leave_nothing_behind() -> None:
    rig = Rig([1, 1], linger=3600.0)
    rig.append(partition=1)
    for _ in range(2000):
        rig.fill(0)
        rig.acknowledge(rig.drain_one())
        rig.now += 0.001
    timers = [r for r in gc.get_referrers(rig.queue(0)) if type(r) is tuple]
    assert len(timers) < 200
    assert rig.accumulator.next_deadline() <= 1000.0 + 3600.0
    rig.now = 1000.0 + 3600.0
    assert rig.ready() == {1}, "the timer of the other partition is still there"
    assert partitions(rig.drain()) == [1]


class CountingView(TopicMetadata):
    """Metadata that counts how often all of its partitions are gone through."""

    reads = 0

    def __init__(self, leaders: Sequence[int]) -> None:
        self._rows = tuple(PartitionMetadata(n, leader, 0) for n, leader in enumerate(leaders))
        super().__init__("orders", self._rows)

    @property
    def partitions(self) -> Any:
        class Rows(tuple[PartitionMetadata, ...]):
            def __iter__(rows) -> Iterator[PartitionMetadata]:
                self.reads += 1
                return super().__iter__()

        return Rows(self._rows)

    @partitions.setter
    def partitions(self, value: Any) -> None:
        pass


def test_the_load_of_many_partitions_is_counted_rarely() -> None:
    """KIP-794's statistics are O(partitions): not more than once in 10 us per partition."""
    rig = Rig([1] * 5000)
    view = CountingView([1] * 5000)
    rig.topic = rig.accumulator.update_topic(view, rig.now)
    for partition in range(5000):
        rig.append(partition=partition)
    view.reads = 0
    for _ in range(1000):
        rig.append(bytes(2000), partition=-1)
        rig.now += 0.0001
    assert 1 <= view.reads <= 3
