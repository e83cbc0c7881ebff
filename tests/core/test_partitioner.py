from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from itertools import count

import pytest
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core.metadata import PartitionMetadata, TopicMetadata
from asyncproducer.core.partitioner import (
    BuiltInPartitioner,
    Murmur3Partitioner,
    RoundRobinPartitioner,
    murmur2,
    murmur3_bucket,
    murmur3_bucket_long,
    partition_for_key,
)
from asyncproducer.errors import ConfigError, InvalidPartition
from asyncproducer.plugins import Partitioner

LARGEST = 2**31 - 1


def topic(
    partition_count: int, *, leaderless: Sequence[int] = (), name: str = "orders"
) -> TopicMetadata:
    """A topic as last heard, where some partitions have no leader."""
    return TopicMetadata(
        name,
        tuple(
            PartitionMetadata(partition, -1 if partition in leaderless else 1)
            for partition in range(partition_count)
        ),
    )


class Numbers:
    """A source of randomness that is none: 0, 1, 2, ... or what it is given; it counts."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers) if numbers else count()
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return next(self._numbers)


def choices(partitioner: BuiltInPartitioner, view: TopicMetadata, times: int) -> list[int]:
    """The next partitions, with a switch after each."""
    chosen = []
    for _ in range(times):
        partition = partitioner.peek(view)
        chosen.append(partition)
        assert partitioner.update(partition, 1_000_000, view, True)
    return chosen


# Keys

#: bytes, murmur2 (signed), toPositive, mod 3, mod 6, mod 10, mod 12
VECTORS = [
    (b"21", -973932308, 1173551340, 0, 0, 0, 0),
    (b"foobar", -790332482, 1357151166, 0, 0, 6, 6),
    (b"a-little-bit-long-string", -985981536, 1161502112, 2, 2, 2, 8),
    (b"a-little-bit-longer-string", -1486304829, 661178819, 2, 5, 9, 11),
    (
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
        *(-58897971, 2088585677, 2, 5, 7, 5),
    ),
    (b"abc", 479470107, 479470107, 0, 3, 7, 3),
    (b"", 275646681, 275646681, 0, 3, 1, 9),
    (b"a", -1563381124, 584102524, 1, 4, 4, 4),
    (b"ab", 316155434, 316155434, 2, 2, 4, 2),
    (b"abcd", -1323649548, 823834100, 2, 2, 0, 8),
    (b"1", -1993445489, 154038159, 0, 3, 9, 3),
    (b"12345678", 338742798, 338742798, 0, 0, 8, 6),
    (b"kafka", -798503068, 1348980580, 1, 4, 0, 4),
    (b"key0", 452605474, 452605474, 1, 4, 4, 10),
    (b"key1", 28543940, 28543940, 2, 2, 0, 8),
    (b"key2", 1674751211, 1674751211, 2, 5, 1, 11),
    (b"\x00", 375494588, 375494588, 2, 2, 8, 8),
    (b"\xff" * 7, -71293549, 2076190099, 1, 1, 9, 7),
    ("é".encode(), 186971271, 186971271, 0, 3, 1, 3),
    (bytes(range(16)), -1038035159, 1109448489, 0, 3, 9, 9),
]


@pytest.mark.parametrize(("data", "signed", "positive", "mod3", "mod6", "mod10", "mod12"), VECTORS)
def test_murmur2_vectors(
    data: bytes, signed: int, positive: int, mod3: int, mod6: int, mod10: int, mod12: int
) -> None:
    """MM-01: Kafka's own vectors, with the columns for the sign and for partition counts."""
    assert murmur2(data) == signed % 2**32
    assert partition_for_key(data, 2**31) == positive
    assert [partition_for_key(data, n) for n in (3, 6, 10, 12)] == [mod3, mod6, mod10, mod12]
    assert partition_for_key(data, 1) == 0


@given(st.binary(max_size=100))
def test_murmur2_agrees_with_aiokafka(data: bytes) -> None:
    assert murmur2(data) == aiokafka_murmur2(data) % 2**32


@given(st.binary(max_size=40))
def test_murmur2_takes_any_buffer(data: bytes) -> None:
    assert murmur2(bytearray(data)) == murmur2(data)
    assert murmur2(memoryview(b"_" + data)[1:]) == murmur2(data)


@pytest.mark.parametrize("data", ["text", 5, None])
def test_murmur2_refuses_what_is_not_bytes(data: object) -> None:
    with pytest.raises(TypeError):
        murmur2(data)  # type: ignore[arg-type]  # that is what is tested


@pytest.mark.parametrize("partition_count", [0, -1])
def test_a_key_needs_a_partition(partition_count: int) -> None:
    with pytest.raises(InvalidPartition, match=f"has {partition_count}"):
        partition_for_key(b"key", partition_count)


# Sticky


@pytest.mark.parametrize("size", [0, -1])
def test_sticky_batch_size_must_be_positive(size: int) -> None:
    """BI-04"""
    with pytest.raises(ConfigError, match=f"{size}: must be at least 1"):
        BuiltInPartitioner("orders", size, Numbers())


def test_first_choice_is_made_when_it_is_needed() -> None:
    numbers = Numbers(7)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert numbers.asked == 0
    assert partitioner.peek(topic(5)) == 2
    assert numbers.asked == 1


def test_sticks_for_exactly_the_batch_size() -> None:
    """BI-01"""
    view = topic(3)
    numbers = Numbers()
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    for expected in (0, 1, 2, 0):
        assert partitioner.peek(view) == expected
        assert not partitioner.update(expected, 99, view, True)
        assert partitioner.peek(view) == expected
        assert partitioner.update(expected, 1, view, True)
    assert numbers.asked == 5


def test_a_single_partition_is_chosen_again_and_again() -> None:
    """BI-01: a switch may lead to the same partition."""
    numbers = Numbers()
    assert choices(BuiltInPartitioner("orders", 100, numbers), topic(1), 4) == [0] * 4
    assert numbers.asked == 5


def test_the_count_starts_anew_after_a_switch() -> None:
    view = topic(2)
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    assert partitioner.update(partitioner.peek(view), 150, view, True)
    assert not partitioner.update(partitioner.peek(view), 99, view, True)


def test_an_open_batch_defers_the_switch() -> None:
    view = topic(2)
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    assert not partitioner.update(partitioner.peek(view), 199, view, False)
    assert partitioner.peek(view) == 0
    assert partitioner.update(0, 0, view, True)
    assert partitioner.peek(view) == 1


def test_twice_the_size_switches_in_any_case() -> None:
    view = topic(2)
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    assert not partitioner.update(partitioner.peek(view), 199, view, False)
    assert partitioner.update(0, 1, view, False)
    assert partitioner.peek(view) == 1


@pytest.mark.parametrize(("enable", "room"), [(False, 170), (True, 70)])
def test_within_the_room_nothing_is_switched(enable: bool, room: int) -> None:
    view = topic(2)
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    assert not partitioner.update(partitioner.peek(view), 30, view, enable)
    assert partitioner.room(enable) == room
    assert not partitioner.update(0, room - 1, view, enable)
    assert partitioner.room(enable) == 1
    assert partitioner.update(0, 1, view, enable)


def test_nothing_is_switched_for_nothing() -> None:
    view = topic(2)
    partitioner = BuiltInPartitioner("orders", 1, Numbers())
    assert not partitioner.update(partitioner.peek(view), 0, view, True)


def test_bytes_for_a_partition_that_was_left_do_not_count() -> None:
    view = topic(3)
    numbers = Numbers()
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert not partitioner.update(-1, 1000, view, True)  # nothing was chosen yet
    assert not partitioner.update(0, 1000, view, True)
    assert numbers.asked == 0
    assert partitioner.update(partitioner.peek(view), 100, view, True)
    assert not partitioner.update(0, 1000, view, True)
    assert partitioner.peek(view) == 1
    assert numbers.asked == 2


class StickyQueues:
    """The least of an accumulator that RA-27 needs: one open batch or none per partition."""

    def __init__(self, partitioner: BuiltInPartitioner, view: TopicMetadata, size: int) -> None:
        self.partitioner = partitioner
        self.view = view
        self.size = size
        self.open: dict[int, int] = {}  # bytes in the open batch

    def append(self, record_bytes: int) -> int:
        while True:
            partition = self.partitioner.peek(self.view)
            tail = self.open.get(partition)
            if tail is not None and tail + record_bytes > self.size:
                del self.open[partition]  # the batch is full: closed
                tail = None
            # Where the next record must begin a batch, a deferred switch happens first.
            if tail is None and self.partitioner.update(partition, 0, self.view, True):
                continue
            # A new batch takes any record, and stays open: its buffer has a reserve.
            self.open[partition] = (tail or 0) + record_bytes
            self.partitioner.update(partition, record_bytes, self.view, False)
            return partition


def test_small_then_large_records() -> None:
    """RA-27: where records go, and how often the random source is consulted."""
    numbers = Numbers()
    queues = StickyQueues(BuiltInPartitioner("orders", 1024, numbers), topic(3), 1024)
    went = [(queues.append(size), numbers.asked) for size in (100, 1024, 1024, 1024, 1024)]
    assert went == [(0, 1), (0, 1), (1, 2), (2, 3), (0, 4)]


# Leaders


def test_leaderless_partitions_are_not_chosen_while_others_exist() -> None:
    """BI-02"""
    view = topic(5, leaderless=[1, 4])
    chosen = choices(BuiltInPartitioner("orders", 100, Numbers()), view, 300)
    assert Counter(chosen) == {0: 100, 2: 100, 3: 100}


def test_the_only_partition_with_a_leader_is_always_chosen() -> None:
    """BI-02"""
    view = topic(3, leaderless=[0, 2])
    assert set(choices(BuiltInPartitioner("orders", 100, Numbers()), view, 20)) == {1}


def test_without_any_leader_all_partitions_are_chosen() -> None:
    """BI-02"""
    view = topic(3, leaderless=[0, 1, 2])
    chosen = choices(BuiltInPartitioner("orders", 100, Numbers()), view, 300)
    assert Counter(chosen) == {0: 100, 1: 100, 2: 100}


def test_largest_random_number() -> None:
    partitioner = BuiltInPartitioner("orders", 100, Numbers(LARGEST))
    assert partitioner.peek(topic(10)) == LARGEST % 10


def test_a_topic_without_partitions_is_refused() -> None:
    with pytest.raises(InvalidPartition, match="orders has no partitions"):
        BuiltInPartitioner("orders", 100, Numbers()).peek(topic(0))


# The topic changes


def test_a_partition_that_vanished_is_left_at_once() -> None:
    numbers = Numbers(3, 1)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert partitioner.peek(topic(4)) == 3
    assert partitioner.peek(topic(3)) == 1
    assert numbers.asked == 2


def test_a_partition_that_lost_its_leader_is_left_while_others_have_one() -> None:
    numbers = Numbers(1, 1)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert partitioner.peek(topic(4)) == 1
    assert partitioner.peek(topic(4, leaderless=[1])) == 2
    assert numbers.asked == 2


def test_a_partition_without_a_leader_is_kept_when_no_other_has_one() -> None:
    numbers = Numbers(1)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert partitioner.peek(topic(4)) == 1
    assert partitioner.peek(topic(4, leaderless=range(4))) == 1
    assert numbers.asked == 1


@pytest.mark.parametrize("changed", [topic(4), topic(8), topic(4, leaderless=[0, 2, 3])])
def test_a_change_elsewhere_changes_nothing(changed: TopicMetadata) -> None:
    view = topic(4)
    numbers = Numbers(1, 2)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    assert not partitioner.update(partitioner.peek(view), 60, view, True)
    assert partitioner.peek(changed) == 1
    assert numbers.asked == 1
    # The bytes still count: 60 of 100 were there before.
    assert not partitioner.update(1, 39, changed, True)
    assert partitioner.update(1, 1, changed, True)


def test_a_choice_that_the_topic_forced_starts_the_count_anew() -> None:
    partitioner = BuiltInPartitioner("orders", 100, Numbers(3, 1))
    partitioner.update(partitioner.peek(topic(4)), 99, topic(4), True)
    smaller = topic(3)
    assert not partitioner.update(partitioner.peek(smaller), 99, smaller, True)


def test_a_failed_choice_is_made_again_next_time() -> None:
    partitioner = BuiltInPartitioner("orders", 100, Numbers(5))
    empty = topic(0)
    for _ in range(2):
        with pytest.raises(InvalidPartition):
            partitioner.peek(empty)
    assert partitioner.peek(topic(3)) == 2


# Load


def frequencies(
    queue_sizes: Sequence[int],
    cycles: int = 2,
    *,
    partition_ids: Sequence[int] | None = None,
    length: int = -1,
    view: TopicMetadata | None = None,
) -> dict[int, int]:
    """How often each partition is chosen in `cycles` times the sum of the weights."""
    counted = queue_sizes if length < 0 else queue_sizes[:length]
    weights = sum(max(counted) + 1 - size for size in counted)
    ids = range(len(queue_sizes)) if partition_ids is None else partition_ids
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    partitioner.update_load(queue_sizes, ids, length)
    chosen = choices(partitioner, view or topic(max(ids) + 1), cycles * weights)
    return {partition: times // cycles for partition, times in Counter(chosen).items()}


def test_short_queues_are_chosen_more_often() -> None:
    """BI-03: frequencies are the longest queue plus one minus the own, over two cycles."""
    assert frequencies([5, 0, 3, 0, 1]) == {0: 1, 1: 6, 2: 3, 3: 6, 4: 5}


def test_the_order_of_choice_follows_the_cumulative_weights() -> None:
    """BI-03: [5, 0, 3, 0, 1] makes the sums 1, 7, 10, 16, 21."""
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    partitioner.update_load([5, 0, 3, 0, 1], range(5))
    expected = [0] * 1 + [1] * 6 + [2] * 3 + [3] * 6 + [4] * 5
    assert choices(partitioner, topic(5), 22) == [*expected, 0]


def test_queues_of_1_7_2() -> None:
    """RA-28: frequencies 7, 1, 6."""
    assert frequencies([1, 7, 2]) == {0: 7, 1: 1, 2: 6}


def test_entries_beyond_the_length_are_excluded() -> None:
    """RA-28: a partition on a slow node is left out and never chosen."""
    assert frequencies([1, 7, 99], length=2) == {0: 7, 1: 1}
    assert frequencies([3, 3, 99], length=2) == {0: 1, 1: 1}


def test_ids_need_not_be_dense() -> None:
    assert frequencies([0, 1], partition_ids=[2, 5]) == {2: 2, 5: 1}


def test_a_leaderless_partition_counts_as_any_when_no_partition_has_a_leader() -> None:
    assert frequencies([0, 1], view=topic(2, leaderless=[0, 1])) == {0: 2, 1: 1}


@pytest.mark.parametrize(
    "set_load",
    [
        pytest.param(lambda p: p.update_load(None), id="off"),
        pytest.param(lambda p: p.update_load([2, 2, 2], range(3)), id="all alike"),
        pytest.param(lambda p: p.update_load([2, 1, 1], range(3), 0), id="all excluded"),
        pytest.param(lambda p: p.update_load([5], [2]), id="too few partitions"),
        pytest.param(lambda p: p.update_load([], []), id="none"),
    ],
)
def test_without_a_difference_in_load_the_choice_is_even(
    set_load: Callable[[BuiltInPartitioner], None],
) -> None:
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    partitioner.update_load([9, 0, 0], range(3))
    set_load(partitioner)
    assert choices(partitioner, topic(3), 6) == [0, 1, 2, 0, 1, 2]


def test_one_partition_left_of_many_gets_all() -> None:
    assert frequencies([4, 4, 4], length=1) == {0: 1}


def test_the_arrays_are_copied() -> None:
    sizes, ids = [0, 1], [0, 1]
    partitioner = BuiltInPartitioner("orders", 100, Numbers())
    partitioner.update_load(sizes, ids)
    sizes[:], ids[:] = [7, 0], [5, 5]
    assert choices(partitioner, topic(6), 3) == [0, 0, 1]


@pytest.mark.parametrize("view", [topic(2), topic(3, leaderless=[2])], ids=["gone", "leaderless"])
def test_load_from_before_a_change_chooses_no_partition_that_is_no_more(
    view: TopicMetadata,
) -> None:
    numbers = Numbers(10, 3)
    partitioner = BuiltInPartitioner("orders", 100, numbers)
    partitioner.update_load([5, 5, 0], range(3))  # sums 1, 2, 8
    assert partitioner.peek(topic(3)) == 1 + 1  # 10 % 8 = 2
    assert partitioner.peek(view) == 1  # 3 % 8 is partition 2 again, so 3 % 2
    assert numbers.asked == 2


@given(
    queue_sizes=st.lists(st.integers(0, 50), min_size=2, max_size=20),
    excluded=st.integers(0, 19),
)
def test_frequencies_are_the_weights(queue_sizes: list[int], excluded: int) -> None:
    length = max(1, len(queue_sizes) - excluded)
    counted = queue_sizes[:length]
    even = length == len(queue_sizes) and len(set(counted)) == 1
    expected = {
        partition: (1 if even else max(counted) + 1 - size)
        for partition, size in enumerate(counted)
    }
    assert frequencies(queue_sizes, 1, length=length) == expected


# Round robin


def test_round_robin_goes_over_partitions_with_a_leader() -> None:
    """RR-01: evenly, with and without keys, without those that have no leader."""
    partitioner = RoundRobinPartitioner()
    view = topic(4, leaderless=[1])
    keys = [None, b"k", b"k", None, b"other", None, b"k"]
    chosen = [partitioner.partition(view, key, b"v") for key in keys]
    assert chosen == [0, 2, 3, 0, 2, 3, 0]


def test_round_robin_goes_over_all_when_none_has_a_leader() -> None:
    """RR-01"""
    partitioner = RoundRobinPartitioner()
    view = topic(3, leaderless=[0, 1, 2])
    assert [partitioner.partition(view, None, None) for _ in range(4)] == [0, 1, 2, 0]


def test_round_robin_counts_per_topic() -> None:
    """RR-01"""
    partitioner = RoundRobinPartitioner()
    views = [topic(3, name="a"), topic(3, name="b")]
    chosen = [partitioner.partition(views[n % 2], None, None) for n in range(6)]
    assert chosen == [0, 0, 1, 1, 2, 2]


def test_round_robin_goes_on_when_the_topic_changes() -> None:
    partitioner = RoundRobinPartitioner()
    assert [partitioner.partition(topic(2), None, None) for _ in range(3)] == [0, 1, 0]
    assert [partitioner.partition(topic(4), None, None) for _ in range(3)] == [3, 0, 1]


@pytest.mark.parametrize("partitioner", [RoundRobinPartitioner(), Murmur3Partitioner()])
@pytest.mark.parametrize("key", [None, b"k"])
def test_partitioners_refuse_a_topic_without_partitions(
    partitioner: Partitioner, key: bytes | None
) -> None:
    with pytest.raises(InvalidPartition):
        partitioner.partition(topic(0), key, None)


def test_partitioners_are_what_users_may_plug_in() -> None:
    partitioners: list[Partitioner] = [RoundRobinPartitioner(), Murmur3Partitioner()]
    assert all(isinstance(partitioner, Partitioner) for partitioner in partitioners)


# Iceberg's buckets

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(moment: datetime) -> int:
    elapsed = moment - EPOCH
    return (elapsed.days * 86400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds


@pytest.mark.parametrize(
    ("data", "hash_"),
    [
        (b"iceberg", 1210000089),
        (bytes([0, 1, 2, 3]), -188683207),
        (uuid.UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes, 1488055340),
        (b"\x05\x8c", -500754589),  # decimal 14.20: its unscaled value, big-endian
    ],
)
def test_buckets_of_bytes_are_icebergs(data: bytes, hash_: int) -> None:
    """The hashes that Iceberg's specification lists in appendix B."""
    assert murmur3_bucket(data, 2**31) == hash_ % 2**31
    assert murmur3_bucket(data, 100) == hash_ % 2**31 % 100


@pytest.mark.parametrize(
    ("value", "hash_"),
    [
        (34, 2017239379),
        ((date(2017, 11, 16) - date(1970, 1, 1)).days, -653330422),
        (((22 * 60 + 31) * 60 + 8) * 1_000_000, -662762989),  # the time 22:31:08
        (micros(datetime(2017, 11, 16, 22, 31, 8, tzinfo=UTC)), -2047944441),
        (micros(datetime(2017, 11, 16, 22, 31, 8, 1, tzinfo=UTC)), -1207196810),
    ],
)
def test_buckets_of_numbers_are_icebergs(value: int, hash_: int) -> None:
    """Iceberg, appendix B: int, long, date, time and timestamp hash as 8 bytes."""
    assert murmur3_bucket_long(value, 2**31) == hash_ % 2**31
    assert murmur3_bucket_long(value, 16) == hash_ % 2**31 % 16


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 1000))
def test_every_long_has_a_bucket(value: int, buckets: int) -> None:
    assert 0 <= murmur3_bucket_long(value, buckets) < buckets


def test_a_number_of_more_than_64_bits_has_no_bucket() -> None:
    with pytest.raises(OverflowError):
        murmur3_bucket_long(2**63, 16)


def test_there_must_be_buckets() -> None:
    with pytest.raises(InvalidPartition, match="there are 0"):
        murmur3_bucket(b"iceberg", 0)


def test_murmur3_takes_any_buffer() -> None:
    for data in (bytearray(b"iceberg"), memoryview(b"_iceberg")[1:]):
        assert murmur3_bucket(data, 2**31) == 1210000089


def test_murmur3_partition_is_the_bucket_whether_it_has_a_leader_or_not() -> None:
    view = topic(16, leaderless=range(15))
    expected = 1210000089 % 16
    assert Murmur3Partitioner().partition(view, b"iceberg", None) == expected == 9


def test_murmur3_sends_records_without_a_key_round_robin() -> None:
    partitioner = Murmur3Partitioner()
    view = topic(3, leaderless=[0])
    keys = [None, b"iceberg", None, None]
    # The key's record does not move the turn of the others: 1210000089 % 3 is 0.
    assert [partitioner.partition(view, key, None) for key in keys] == [1, 0, 2, 1]
