"""What is asked of Arrow batches before they are sent, by the column and not by the row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy
import pyarrow
import pyarrow.compute

from asyncproducer.arrow import murmur2_of
from asyncproducer.spark.columns import OFFSET_BITS, SinkColumns
from asyncproducer.spark.markers import Seen, SinkStopped

__all__ = ["Groups", "Offsets", "Read", "payload_bytes", "read_of", "several_sources"]


def payload_bytes(batch: Any, columns: SinkColumns) -> int:
    """Bytes of all keys and values."""
    names = [columns.value, *([columns.key] if columns.key else [])]
    lengths = (pyarrow.compute.binary_length(batch.column(name)) for name in names)
    return sum(pyarrow.compute.sum(each).as_py() or 0 for each in lengths)


def _integers(batch: Any, name: str, fix: str = "fill it") -> Any:
    column = batch.column(name)
    if column.null_count:
        raise SinkStopped(f"the column {name!r} is null in {column.null_count} rows: {fix}")
    return column.to_numpy(zero_copy_only=False)


class Groups:
    """Checks that rows are where their partition says, and remembers which went where.

    Rows whose partition was made of their key are known by that, or by the value where the key is
    null; values may differ in a replay. Others are known by both.
    """

    def __init__(self, columns: SinkColumns, task: int, tasks: int) -> None:
        self._columns = columns
        self._task = task
        self._tasks = tasks
        self._sum = 0

    def look(self, batch: Any) -> None:
        """Raises SinkStopped for a row of another group."""
        partitions = _integers(batch, self._columns.partition or "")
        foreign = numpy.flatnonzero(partitions % self._tasks != self._task)
        if len(foreign) or (len(partitions) and partitions.min() < 0):
            wrong = int(partitions[foreign[0]] if len(foreign) else partitions.min())
            raise SinkStopped(
                f"a row for partition {wrong} is in task {self._task} of {self._tasks}, where it "
                "does not belong: write what by_kafka_partition returns as it is, with the same "
                "number of tasks"
            )
        mixed = _mixed(partitions.astype(numpy.uint64) << numpy.uint64(32) | self._known_by(batch))
        self._sum += int(mixed.sum())

    def _known_by(self, batch: Any) -> Any:
        """32 bits for each row."""
        key = self._columns.key
        values = batch.column(self._columns.value)
        if key is None:
            return _hashes(values)
        keys = batch.column(key)
        if not self._columns.partitions:
            return (_mixed(_hashes(keys)) ^ _hashes(values)) & numpy.uint64(0xFFFFFFFF)
        if keys.null_count:
            return numpy.where(keys.is_valid(), _hashes(keys), _hashes(values))
        return _hashes(keys)

    @property
    def routing(self) -> int:
        """A number made of which rows went to which partition, in whatever order they come."""
        return self._sum % 2**64


def _hashes(column: Any) -> Any:
    """32 bits for each row of text or bytes; 0 where it is null."""
    return numpy.asarray(murmur2_of(column)).view(numpy.uint64)


class Read(NamedTuple):
    """Where the rows of a batch were read."""

    source: tuple[str, int]
    #: A numpy array.
    offsets: Any


def read_of(batch: Any, columns: SinkColumns) -> Read:
    """Of a batch with rows. Raises SinkStopped if they are not of one Kafka partition."""
    if columns.origin is not None:
        return _unpacked(batch, columns.origin, columns.topics)
    return Read(_source_of(batch, columns), _integers(batch, columns.offset or ""))


def _unpacked(batch: Any, name: str, topics: Sequence[str]) -> Read:
    fix = (
        f"either they were read from another topic than {', '.join(topics)}, which origin() was "
        "given: name all that are read. Or a partition or an offset is too large for it: then "
        "select topic, partition and offset as __topic, __partition and __offset instead"
    )
    packed = _integers(batch, name, fix)
    # The lowest and the highest are of two partitions if any are.
    sources = []
    for each in (packed.min(), packed.max()):
        partition, n = divmod(int(each) >> OFFSET_BITS, len(topics))
        sources.append((topics[n], partition))
    if sources[0] != sources[1]:
        raise several_sources(sources)
    return Read(sources[0], packed & ((1 << OFFSET_BITS) - 1))


def _source_of(batch: Any, columns: SinkColumns) -> tuple[str, int]:
    names = [columns.source_topic or "", columns.source_partition or ""]
    try:
        topics, partitions = (batch.column(name).unique().to_pylist() for name in names)
    except UnicodeDecodeError:
        raise SinkStopped(
            f"the column {names[0]!r} has bytes that are no text: it must be the column topic as "
            "Spark's Kafka source gives it"
        ) from None
    if len(topics) != 1 or len(partitions) != 1 or None in (topics[0], partitions[0]):
        raise several_sources((t, p) for t in topics for p in partitions)
    return topics[0], partitions[0]


def several_sources(found: Iterable[tuple[str | None, int | None]]) -> SinkStopped:
    """The error of a task that has rows of more than one Kafka partition."""
    named = " and ".join(f"{topic}-{partition}" for topic, partition in islice(found, 4))
    return SinkStopped(
        f"a task has rows of several Kafka partitions ({named}): marker=source needs one Spark "
        "partition for each that is read. Do not union, coalesce or repartition before the sink, "
        "or use marker=group"
    )


class Offsets:
    """Remembers which offsets of the source were looked at."""

    def __init__(self) -> None:
        self._first = 2**63
        self._last = -1
        #: How many rows, and the sum of their mixed offsets: before `start`, and from there on.
        self._rows = [0, 0]
        self._sums = [0, 0]

    def look(self, batch: Any, offsets: Any, start: int) -> Any:
        """The rows of a batch with rows that were read at `start` or later, given all offsets."""
        self._first = min(self._first, int(offsets.min()))
        self._last = max(self._last, int(offsets.max()))
        mixed = _mixed(offsets)
        new = offsets >= start
        for n, kept in enumerate((~new, new)):
            self._rows[n] += int(numpy.count_nonzero(kept))
            self._sums[n] += int(mixed[kept].sum())
        return batch if new.all() else batch.filter(pyarrow.array(new))

    @property
    def seen(self) -> Seen:
        """All of it."""
        return Seen(
            self._first,
            self._last,
            sum(self._rows),
            sum(self._sums) % 2**64,
            self._rows[0],
            self._sums[0] % 2**64,
        )


def _mixed(numbers: Any) -> Any:
    """Each number as 64 bits that look random (splitmix64), so that sums of others differ."""
    mixed = numbers.astype(numpy.uint64) + numpy.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> numpy.uint64(31))
