# cython: annotation_typing=False
# (Cython would take `int` here for Python's, against the C types in partitioner.pxd.)
"""Which partition a record goes to.

A record that names its partition goes there. Else, with a key, murmur2 of the key picks
it, so that equal keys of all of Kafka's Java clients meet. Else the built-in partitioner
of KIP-794 picks one and stays with it for about one batch; a partition that is slow to
take its batches is picked less often. The two classes at the end are for users who choose
them by name.

This module is compiled together with the record path; partitioner.pxd has the C types.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import mmh3

from asyncproducer.errors import ConfigError, InvalidPartition
from asyncproducer.plugins import TopicView

__all__ = [
    "BuiltInPartitioner",
    "Murmur3Partitioner",
    "RoundRobinPartitioner",
    "murmur2",
    "murmur3_bucket",
    "murmur3_bucket_long",
    "partition_for_key",
]


def murmur2(data: bytes | bytearray | memoryview) -> int:
    """Kafka's 32-bit murmur2 (Java: Utils.murmur2) of some bytes, as an unsigned number."""
    if not isinstance(data, (bytes, bytearray)):
        data = bytes(memoryview(data))
    octets = data
    return hash_octets(octets, len(data))


def hash_octets(octets: Any, length: int) -> int:
    """`murmur2` of `length` bytes; compiled, at a pointer."""
    # Compiled, `octets` is a pointer and the numbers are C's unsigned int: 0.04 us for 16
    # bytes. Words from struct.unpack would be a third faster in plain Python (1.2 us for
    # 1.8) and six times slower when compiled.
    mask = 0xFFFFFFFF
    m = 0x5BD1E995
    h = 0x9747B28C  # the seed
    h = (h ^ length) & mask
    tail = length & ~3
    for i in range(0, tail, 4):
        k = octets[i + 3]
        k = (k << 24 | octets[i + 2] << 16 | octets[i + 1] << 8 | octets[i]) * m & mask
        k ^= k >> 24
        h = (h * m ^ k * m) & mask
    if tail != length:
        k = octets[tail]
        if length - tail > 1:
            k |= octets[tail + 1] << 8
        if length - tail > 2:
            k |= octets[tail + 2] << 16
        h = (h ^ k) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def partition_for_key(key: bytes | bytearray | memoryview, partition_count: int) -> int:
    """The partition of a key: of all partitions, whether they have a leader or not.

    Raises:
        InvalidPartition: there are no partitions.
    """
    if partition_count < 1:
        raise InvalidPartition(f"no partition for a key: the topic has {partition_count}")
    h = murmur2(key)
    # Java clears the sign bit (Utils.toPositive); it does not take the absolute value.
    return (h & 0x7FFFFFFF) % partition_count


class BuiltInPartitioner:
    """Adaptive sticky partitioning of one topic's records without a key (KIP-794).

    The partition in use ("sticky") is left when it has got `sticky_batch_size` bytes and
    the batch in front is full: `enable_switch` says that it is. An open batch would leave
    half empty, so the switch waits for it, at most until twice the size.

    The topic is handed in with each call. A changed topic is a new object, as TopicMetadata
    is: `peek` then leaves a partition that vanished, or that lost its leader while others
    have one. (Java goes on until the next regular switch: records for a vanished partition
    expire, those for a leaderless one wait for the election.)

    `random()` returns a non-negative number below 2**31. It is asked exactly once per choice.
    """

    __slots__ = (
        "_available",
        "_count",
        "_cumulative",
        "_partition",
        "_partition_ids",
        "_produced_bytes",
        "_random",
        "_sticky_batch_size",
        "_view",
        "topic",
    )

    def __init__(self, topic: str, sticky_batch_size: int, random: Callable[[], int]) -> None:
        if sticky_batch_size < 1:
            raise ConfigError(f"sticky batch size {sticky_batch_size}: must be at least 1 byte")
        self.topic = topic
        self._sticky_batch_size = sticky_batch_size
        self._random = random
        self._partition = -1  # none yet
        self._produced_bytes = 0
        # The topic as of the last look, and what counts of it.
        self._view: TopicView | None = None
        self._count = 0
        self._available: tuple[int, ...] = ()
        # The load of the partitions; None while it does not matter, see update_load.
        self._cumulative: list[int] | None = None
        self._partition_ids: list[int] = []

    def peek(self, topic: TopicView) -> int:
        """The partition for the next record. The first call chooses it.

        Raises:
            InvalidPartition: the topic has no partitions.
        """
        if topic is not self._view:
            self._look_at(topic)
            # Short of a leader anywhere, a leaderless partition is as good as any.
            if self._partition < 0 or not self._usable(self._partition):
                self._switch()
        return self._partition

    def update(
        self, partition: int, appended_bytes: int, topic: TopicView, enable_switch: bool
    ) -> bool:
        """Count bytes appended to a partition that `peek` gave; True if it made a new choice.

        The new choice can be the same partition. Bytes for another partition than the
        present one are late news (it was left while the record waited) and do not count.
        """
        if partition != self._partition or partition < 0:
            return False
        produced = self._produced_bytes + appended_bytes
        size = self._sticky_batch_size
        if produced >= 2 * size or (enable_switch and produced >= size):
            if topic is not self._view:
                self._look_at(topic)
            self._switch()
            return True
        self._produced_bytes = produced
        return False

    def room(self, enable_switch: bool) -> int:
        """With fewer bytes than this, `update` makes no new choice."""
        size = self._sticky_batch_size
        return (size if enable_switch else 2 * size) - self._produced_bytes

    def update_load(
        self,
        queue_sizes: Sequence[int] | None,
        partition_ids: Sequence[int] = (),
        length: int = -1,
    ) -> None:
        """Tell how many batches wait for each partition; None for "choose evenly".

        Only the first `length` entries count (-1 for all): the caller leaves out partitions
        whose broker takes nothing, and their number shows in the arrays being longer. The
        arrays are copied. Queue sizes are batches, without those in flight.
        """
        self._cumulative = None
        if queue_sizes is None:
            return
        total = len(queue_sizes)
        if length < 0:
            length = total
        if length < 1 or total < 2:
            return
        sizes = list(queue_sizes[:length])
        longest = max(sizes)
        if length == total and min(sizes) == longest:
            return  # all the same: even
        # A partition's weight is how much shorter its queue is than the longest, plus one
        # so that every one gets something. [5, 0, 3, 0, 1] gives the sums 1, 7, 10, 16, 21.
        cumulative: list[int] = []
        weight_sum = 0
        for queue_size in sizes:
            weight_sum += longest + 1 - queue_size
            cumulative.append(weight_sum)
        self._cumulative = cumulative
        self._partition_ids = list(partition_ids[:length])

    def _look_at(self, topic: TopicView) -> None:
        self._count = topic.partition_count
        self._available = tuple(topic.available)
        self._view = topic

    def _switch(self) -> None:
        if self._count < 1:
            self._view = None  # the next one looks again, and is told as well
            raise InvalidPartition(f"topic {self.topic} has no partitions")
        self._partition = self._choose()
        self._produced_bytes = 0

    def _choose(self) -> int:
        number = self._random()
        cumulative = self._cumulative
        if cumulative is not None:
            partition = self._partition_ids[_first_above(cumulative, number)]
            if self._usable(partition):
                return partition
            # The load was measured before the topic changed: choose evenly this time.
        available = self._available
        if available:
            return available[number % len(available)]
        return number % self._count

    def _usable(self, partition: int) -> bool:
        """Whether the partition exists, and has a leader if any has."""
        if partition >= self._count:
            return False
        available = self._available
        if not available or len(available) == self._count:
            return True
        index = bisect_left(available, partition)
        return index < len(available) and available[index] == partition


def _first_above(sums: list[int], number: int) -> int:
    """Where in a list that ascends strictly the first sum is above `number` modulo the last.

    bisect_right is a call of Python's, and there is a choice for each 16 KiB.
    """
    high = len(sums) - 1
    last = sums[high]
    point = number % last
    low = 0
    while low < high:
        middle = (low + high) >> 1
        value = sums[middle]
        if value > point:
            high = middle
        else:
            low = middle + 1
    return low


class RoundRobinPartitioner:
    """Every record to the next partition that has a leader, keys or not.

    (Java: RoundRobinPartitioner.) Counts per topic. While no partition has a leader, it
    goes over all of them.
    """

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None, /) -> int:
        """The next partition; neither key nor value matters.

        Raises:
            InvalidPartition: the topic has no partitions.
        """
        name = topic.name
        count = topic.partition_count
        if count < 1:
            raise InvalidPartition(f"topic {name} has no partitions")
        counter = self._counters.get(name, 0)
        self._counters[name] = counter + 1 & 0x7FFFFFFF
        available = topic.available
        if available:
            return available[counter % len(available)]
        return counter % count


class Murmur3Partitioner:
    """Equal keys to the partition that Iceberg's bucket transform numbers for them.

    With as many partitions as buckets, each partition holds one bucket of a table that is
    partitioned by `bucket(n, key)` where the column is a string or binary and the key its
    bytes. For an int or long column the key must be `value.to_bytes(8, "little",
    signed=True)`.

    Records without a key have no bucket. They go round robin over the partitions with a
    leader: a partitioner is asked per record and does not learn when a batch is full, so
    it cannot stick to one as the built-in does.
    """

    __slots__ = ("_keyless",)

    def __init__(self) -> None:
        self._keyless = RoundRobinPartitioner()

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None, /) -> int:
        """The key's bucket, of all partitions.

        Raises:
            InvalidPartition: the topic has no partitions.
        """
        if key is None:
            return self._keyless.partition(topic, key, value)
        return murmur3_bucket(key, topic.partition_count)


def murmur3_bucket(data: bytes | bytearray | memoryview, bucket_count: int) -> int:
    """Iceberg's bucket of a binary value, or of a string's UTF-8 bytes.

    murmur3, x86, 32 bits, seed 0 (Iceberg's specification, appendix B).

    Raises:
        InvalidPartition: there are no buckets.
    """
    if bucket_count < 1:
        raise InvalidPartition(f"no bucket for a key: there are {bucket_count}")
    if not isinstance(data, bytes):
        data = bytes(memoryview(data))
    return (mmh3.hash(data, 0, False) & 0x7FFFFFFF) % bucket_count


def murmur3_bucket_long(value: int, bucket_count: int) -> int:
    """Iceberg's bucket of an int, long, date, time or timestamp (in days or microseconds).

    Raises:
        InvalidPartition: there are no buckets.
        OverflowError: the value has more than 64 bits.
    """
    return murmur3_bucket(value.to_bytes(8, "little", signed=True), bucket_count)
