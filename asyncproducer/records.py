"""The values that users hold: where a record went, and what goes in."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, overload
from uuid import UUID

from asyncproducer.errors import InvalidTopic

__all__ = [
    "BatchResult",
    "CloseReport",
    "ConsumerGroupMetadata",
    "Header",
    "Headers",
    "Health",
    "OffsetAndMetadata",
    "OffsetRange",
    "PartitionInfo",
    "Record",
    "RecordMetadata",
    "TopicPartition",
    "check_topic",
]

#: One header as the wire has it: a name, and bytes or null.
Header: TypeAlias = tuple[str, bytes | None]

#: What `headers=` accepts: a mapping, or pairs where a name may come twice.
Headers: TypeAlias = (
    Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | None
)

_TOPIC_NAME = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")


def check_topic(topic: Any) -> None:
    """Raises InvalidTopic for what no broker accepts as a topic's name."""
    if type(topic) is not str:
        raise InvalidTopic(f"topic must be a str, not {type(topic).__name__}: {topic!r}")
    if not _TOPIC_NAME.fullmatch(topic):
        raise InvalidTopic(
            f"topic {topic!r}: a topic's name has 1 to 249 of the characters "
            "a-z, A-Z, 0-9, '.', '_' and '-'"
        )


class TopicPartition(NamedTuple):
    """A topic's name and a partition's number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class RecordMetadata(NamedTuple):
    """Where an acknowledged record is.

    `offset` is -1 where the broker does not tell it (`acks=0`, and a retry that the
    broker recognised as already stored). `timestamp`, in ms, is the log's append
    time where the topic keeps that, else the record's own. Sizes are those of the
    serialized key and value in bytes, -1 for null.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    serialized_key_size: int
    serialized_value_size: int

    @property
    def has_offset(self) -> bool:
        """Whether the broker told the offset."""
        return self.offset >= 0

    @property
    def has_timestamp(self) -> bool:
        """Whether a timestamp is known."""
        return self.timestamp >= 0

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic and partition as one value."""
        return TopicPartition(self.topic, self.partition)


class Record(NamedTuple):
    """A record as `send_many` and interceptors see it: before serialization.

    `topic` may be "" where `send_many` is given one for all.
    `timestamp` is ms since 1970 or an aware datetime; None means now.
    `partition` None lets the partitioner choose.
    """

    topic: str
    value: Any = None
    key: Any = None
    headers: Headers = None
    partition: int | None = None
    timestamp: int | datetime | None = None


class PartitionInfo(NamedTuple):
    """A partition as last heard. `leader` is a broker id, -1 while there is none.

    `topic_id` is new where a topic was deleted and created again; None if the brokers are too
    old to tell (before 2.8).
    """

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    topic_id: UUID | None = None


class OffsetAndMetadata(NamedTuple):
    """Where a consumer group goes on: the offset of the next record that it reads.

    `metadata` is kept with it. `leader_epoch` is that of the last record read, -1 if unknown.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class ConsumerGroupMetadata(NamedTuple):
    """A consumer's membership of its group, so that the group can tell who is in it no more.

    Only `group_id` is needed; without the rest the group cannot fence anybody.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class CloseReport(NamedTuple):
    """What became of the records of a producer, as `close()` tells it.

    `aborted` are those that had no end when the time was up, and were failed then; they
    are counted in `failed` too. Every record that was buffered is in `acknowledged` or
    in `failed`. `elapsed` is how long the close took, in seconds.
    """

    acknowledged: int
    failed: int
    aborted: int
    elapsed: float

    @property
    def clean(self) -> bool:
        """Whether nothing had to be given up for lack of time."""
        return self.aborted == 0


class Health(NamedTuple):
    """A producer at one moment, for readiness probes and logs.

    `ready`: it is running, knows the cluster, and nothing is wrong for good. `problem`
    says what is wrong, or is None. Ages are seconds, sizes bytes.
    """

    ready: bool
    state: str
    problem: str | None
    brokers_known: int
    brokers_connected: int
    buffered_bytes: int
    waiting_senders: int
    incomplete_batches: int
    oldest_batch_age: float


class BatchResult(Sequence["RecordMetadata | Exception"]):
    """The outcome of a `send_many`: one entry per record, in the order they came.

    An entry is the record's RecordMetadata or the exception that ended it. They are made when
    they are asked for: a result that nobody goes through costs nothing per record.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        # Rows (core/bulk.py) that have their end.
        self._parts = parts
        self._ends = list(accumulate(part.count for part in parts))
        self._failed: list[tuple[int, Exception]] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> RecordMetadata | Exception: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordMetadata | Exception]: ...

    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self._outcome(place) for place in places]
        return self._outcome(places)

    def _outcome(self, index: int) -> RecordMetadata | Exception:
        at = bisect_right(self._ends, index)
        part = self._parts[at]
        result: RecordMetadata | Exception = part.result(index - self._ends[at] + part.count)
        return result

    def __iter__(self) -> Iterator[RecordMetadata | Exception]:
        for part in self._parts:
            for row in range(part.count):
                yield part.result(row)

    @property
    def failed(self) -> list[tuple[int, Exception]]:
        """(index, exception) of the records that were not acknowledged."""
        if self._failed is None:
            self._failed = [
                (end - part.count + row, part.error(row)[0])
                for part, end in zip(self._parts, self._ends, strict=True)
                if not part.clean()
                for row in part.failures()
            ]
        return self._failed

    @property
    def acknowledged(self) -> int:
        """How many records are in the log."""
        return len(self) - len(self.failed)

    def __repr__(self) -> str:
        return f"<BatchResult {self.acknowledged} acknowledged, {len(self.failed)} failed>"


class OffsetRange(NamedTuple):
    """What a `send_table` has put into one partition: `records` records.

    `first` and `last` are their lowest and highest offsets; records of others may be in
    between. Both are -1 where the brokers did not tell (`acks=0`).
    """

    first: int
    last: int
    records: int
