"""The rules of exactly-once delivery: what a task does about the marker that it finds.

A *unit* is what one task delivers of a batch: a group of rows, or what was read from one Kafka
partition. A task delivers its unit in one transaction, and the transaction also commits a marker,
an offset with metadata under a consumer group of the unit's own. Either both count or neither.

A task reads the marker after it has got its producer id. From then on no earlier attempt can
commit anything, so the marker is the last word on whether the unit is delivered already. No
attempt needs to know of any other, and the driver has no part in it.

Whatever cannot be told for sure stops the query: neither losing nor doubling rows is a guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum

from asyncproducer.errors import KafkaError
from asyncproducer.records import OffsetAndMetadata

__all__ = [
    "Action",
    "Decision",
    "Marker",
    "Seen",
    "SharedSource",
    "SinkStopped",
    "Unit",
    "check_adopted",
    "check_groups",
    "check_layout",
    "check_sources",
    "decide",
    "disagreement",
    "is_delivered",
    "marker_of_source",
]

_VERSION = 1


class SinkStopped(KafkaError):
    """Exactly-once delivery cannot be kept up, or cannot be known to be.

    The task that raises it has written nothing.
    """


class SharedSource(SinkStopped):
    """Several tasks had rows of one Kafka partition: some of its rows may be left out.

    A marker that is `stopped` remembers it, for queries with other checkpoints.
    """


@dataclass(frozen=True)
class Marker:
    """What a unit's last transaction has left. It is written into the metadata of an offset."""

    #: The number of the batch (or job).
    batch: int
    #: Which query: Spark keeps its id in the checkpoint. "" for batch jobs.
    query: str = ""
    #: The Spark partition, and how many there are (of groups).
    task: int = -1
    tasks: int = 0
    #: Of how many partitions by_kafka_partition has chosen; 0 if somebody else has (of groups).
    partitions: int = 0
    #: How many rows, and a number made of which went to which partition (of groups), or of
    #: their offsets (of sources; 0 if it is not known).
    rows: int = 0
    routing: int = 0
    #: The first offset of the source that the batch had, and the next one that is to be delivered
    #: (of sources).
    first_offset: int = 0
    next_offset: int = 0
    #: The id of the source's topic (of sources).
    topic_id: str = ""
    #: The rows before `next_offset` are not all delivered, and nobody knows which (of sources).
    stopped: bool = False
    version: int = _VERSION

    def packed(self) -> OffsetAndMetadata:
        """As an offset that a transaction can commit."""
        told = {k: v for k, v in asdict(self).items() if v != getattr(_PLAIN, k)}
        told |= {"version": self.version, "batch": self.batch}
        metadata = json.dumps(told, separators=(",", ":"))
        return OffsetAndMetadata(max(self.batch, self.next_offset), metadata)

    @classmethod
    def unpacked(cls, found: OffsetAndMetadata) -> Marker:
        """From what a group has committed. Raises SinkStopped if that is no marker."""
        kinds = {each.name: type(getattr(_PLAIN, each.name)) for each in fields(cls)}
        try:
            given = json.loads(found.metadata)
            if any(type(given[name]) is not kinds[name] for name in given):
                raise ValueError
            return cls(**given)
        except (ValueError, KeyError, TypeError):
            raise SinkStopped(
                f"what is kept in the place of this sink's marker is none: "
                f"{found.metadata[:80]!r}; another program commits offsets under the same group, "
                "or a newer version of this sink did: give this sink another sink.id, or use that "
                "version"
            ) from None


_PLAIN = Marker(0)


@dataclass(frozen=True)
class Unit:
    """What a task is about to deliver."""

    #: For messages: "group 3 of 8", "orders-5".
    name: str
    batch: int
    query: str
    task: int
    streaming: bool = True
    tasks: int = 0
    partitions: int = 0
    #: The offset of its first row (of sources).
    first_offset: int = 0
    topic_id: str = ""
    adopt: int | None = None
    trust: int | None = None

    @property
    def of_source(self) -> bool:
        """Whether it is what was read of one Kafka partition."""
        return self.tasks == 0


@dataclass(frozen=True)
class Seen:
    """The rows of a source that an attempt has looked at."""

    first: int
    last: int
    rows: int
    #: A number made of their offsets, in whatever order they come.
    routing: int
    #: The same two, of the rows alone that come before `Decision.start`.
    old_rows: int = 0
    old_routing: int = 0


class Action(Enum):
    """What to do with the rows."""

    WRITE = "write"
    SKIP = "skip"


@dataclass(frozen=True)
class Decision:
    """The rows from `start` on are written; all of them for groups. Or none: SKIP."""

    action: Action
    start: int = 0


_ALL = Decision(Action.WRITE)
_NONE = Decision(Action.SKIP)


def decide(unit: Unit, found: Marker | None, progress: Marker | None = None) -> Decision:
    """What to do with a unit, given its marker and, where there is none, what the driver keeps.

    Raises SinkStopped.
    """
    rule = _of_source if unit.of_source else _of_group
    return rule(unit, found, progress)


def _of_group(unit: Unit, found: Marker | None, progress: Marker | None) -> Decision:
    if found is None:
        if progress is not None:
            check_layout(unit.name, progress, unit.tasks, unit.partitions)
            if progress.batch > unit.batch:
                raise SinkStopped(
                    f"{unit.name}: this is batch {unit.batch}, and batch {progress.batch} is the "
                    "first one that this sink may write since partitions were added, or since "
                    "adopt said so: what is left of earlier ones is not known to be unwritten. "
                    "If nothing was written yet (adopt was given by mistake), give another sink.id"
                )
        return _without_marker(unit, unit.batch == 0)
    is_new = found.batch < unit.batch or found.query != unit.query
    adopted = unit.adopt == unit.batch and is_new
    check_layout(unit.name, found, unit.tasks, unit.partitions, adopted=adopted)
    if adopted and found.query != unit.query:
        return _ALL
    if found.query != unit.query:
        raise SinkStopped(
            f"{unit.name}: another query has written batch {found.batch} under this sink.id, or "
            f"this one with another checkpoint. {_how_to_go_on(unit)}"
        )
    if found.batch == unit.batch:
        return _NONE
    if found.batch > unit.batch:
        raise SinkStopped(
            f"{unit.name}: this is batch {unit.batch}, and batch {found.batch} is written already: "
            "the checkpoint (or job.id) is older than what this sink has done. Use the newest "
            "checkpoint, or another sink.id for what is to be written again"
        )
    if unit.streaming and found.batch < unit.batch - 1 and unit.adopt != unit.batch:
        raise SinkStopped(
            f"{unit.name}: this is batch {unit.batch}, and the last one that is known to be "
            f"written is {found.batch}: those between went another way. {_how_to_go_on(unit)}"
        )
    return _ALL


def check_layout(
    name: str, found: Marker, tasks: int, partitions: int, *, adopted: bool = False
) -> None:
    """Raises SinkStopped if rows are in other groups now than those that the marker tells of, or
    if one of the two is of groups and the other of sources, which have no `tasks`.

    The marker is a group's, or what the driver keeps. `adopted`: nothing is written yet of what
    comes now, so other partitions do no harm. (Of other `tasks` some are not fenced.)
    """
    if bool(found.tasks) != bool(tasks):
        was, now = ("group", "source") if found.tasks else ("source", "group")
        raise SinkStopped(
            f"{name}: it belongs to marker={was} (since batch {found.batch} or longer), and "
            f"marker={now} knows nothing of what that has written: keep marker={was}, or give "
            "another sink.id at a batch from which on nothing was written"
        )
    if found.tasks != tasks:
        raise SinkStopped(
            f"{name}: the rows are in {tasks} tasks now, and were in {found.tasks} in batch "
            f"{found.batch}: the number belongs to sink.id; give tasks={found.tasks}, or another "
            "sink.id at a batch from which on nothing was written"
        )
    if found.partitions != partitions and not adopted:
        was, now = (_counted(each) for each in (found.partitions, partitions))
        fix = (
            f"give by_kafka_partition partitions={found.partitions}"
            if found.partitions
            else "keep to that column"
        )
        raise SinkStopped(
            f"{name}: the rows went to {was} in batch {found.batch}, and now to {now}: in a "
            f"replay some would be lost and others doubled. Go on as it was ({fix}); or, if "
            "nothing is written yet of the batch that comes now, with the option adopt=<its "
            f"number>, which counts for this batch only (where that is batch {found.batch} itself: "
            "with another sink.id)"
        )


def check_adopted(adopt: int, written: int) -> None:
    """Raises SinkStopped if a query's `adopt` does not name a batch that may come now: what it says
    is kept, and would be in the way of the batch that does. Groups have written up to `written`.
    """
    if adopt > written + 1:
        raise SinkStopped(
            f"adopt={adopt}: the last batch that is known to be written is {written}, and the next "
            f"one is {written + 1}. Give adopt={written + 1}, if nothing is written yet of that; "
            f"or, if those before {adopt} went another way, do one thing after the other: first "
            "go on as it was, with this adopt, and change the partitions a batch later"
        )


def _counted(partitions: int) -> str:
    return f"one of {partitions} partitions" if partitions else "the partition in their column"


def _of_source(unit: Unit, found: Marker | None, progress: Marker | None) -> Decision:
    if found is None:
        # (What `prepare` has left names no query: nothing was committed since.)
        fresh = progress is None or not (progress.query or progress.tasks)
        first = fresh and unit.batch == 0
        # It was written before this batch. Had this batch left a marker, that would be newer,
        # and it would not have expired before this one.
        # (That of groups tells nothing: they may have written these rows.)
        alive = (
            progress is not None
            and progress.tasks == 0
            and progress.query == unit.query
            and progress.batch < unit.batch
        )
        return _without_marker(unit, first or alive)
    if found.topic_id and found.topic_id != unit.topic_id:
        raise SinkStopped(
            f"{unit.name}: the topic was deleted and created again (or the brokers do not tell its "
            "id any more): its offsets begin anew, and this sink takes the first ones for "
            "delivered. Give it another sink.id"
        )
    _check_first(unit, found, unit.first_offset)
    return Decision(Action.WRITE, found.next_offset)


def marker_of_source(unit: Unit, found: Marker | None, seen: Seen) -> Marker:
    """What the transaction of a source leaves, when all rows were looked at.

    Its `rows` and `routing` are those of all rows that the batch has from `first_offset` to
    before `next_offset`, so that a replay can be compared.

    Raises SinkStopped where the batch had other rows when it was written.
    """
    own = Marker(
        unit.batch,
        unit.query,
        unit.task,
        rows=seen.rows,
        routing=seen.routing,
        first_offset=seen.first,
        next_offset=seen.last + 1,
        topic_id=unit.topic_id,
    )
    if found is None:
        return own
    _check_first(unit, found, seen.first)
    if not _is_replay(unit, found):
        if own.next_offset >= found.next_offset:
            return own
        # Never back: what is delivered stays so. Which rows this batch has up to there is unknown.
        return replace(own, next_offset=found.next_offset, rows=0, routing=0)
    if own.next_offset < found.next_offset:
        return found  # nothing is new, and what it tells of more rows stays true
    _check_rows(unit, found, seen.old_rows, seen.old_routing)
    return own


def is_delivered(unit: Unit, found: Marker, seen: Seen) -> bool:
    """Whether the rows of a fenced attempt at a source are delivered by another one.

    Raises SinkStopped where that one had other rows.
    """
    # Whoever delivers this batch leaves a marker of it.
    if not _is_replay(unit, found):
        return False
    _check_first(unit, found, seen.first)
    if seen.last == found.next_offset - 1:
        _check_rows(unit, found, seen.rows, seen.routing)
    return seen.last < found.next_offset


def _is_replay(unit: Unit, found: Marker) -> bool:
    return (found.query, found.batch) == (unit.query, unit.batch)


# A replay has the same rows, and a later batch of the query none of them. Not so if several tasks
# share a partition: rows of the second would be taken for delivered. The two parts of a union are
# two readers to Spark, and one may come to a row some batches after the other. (The number of the
# task tells nothing: a replay may have others.)


def _check_first(unit: Unit, found: Marker, first: int) -> None:
    if found.stopped:
        raise SinkStopped(
            f"{unit.name}: this sink.id has stopped in batch {found.batch} for good, where the "
            f"rows of a task did not fit what was written before: {_FILTER}{_SHARED}"
        )
    if not unit.streaming and found.query == unit.query and found.batch > unit.batch:
        raise SinkStopped(
            f"{unit.name}: this is job.id={unit.batch}, and job {found.batch} has written up to "
            f"offset {found.next_offset - 1}: whether the earlier job was done, nobody knows any "
            "more, and its rows would be left out. Give what is to be written a higher job.id if "
            "it comes behind that offset, else another sink.id"
        )
    if _is_replay(unit, found):
        fits = found.first_offset <= first < found.next_offset
    else:
        # Where the marker's rows are not known, its end is from elsewhere: an older checkpoint.
        later = unit.streaming and found.query == unit.query and found.batch < unit.batch
        fits = not (later and found.routing) or first >= found.next_offset
    if not fits:
        other = _FILTER if _is_replay(unit, found) else _COPIED
        raise SharedSource(
            f"{unit.name}: in batch {found.batch} the offsets {found.first_offset} to "
            f"{found.next_offset - 1} are written, and a task of batch {unit.batch} begins with "
            f"{first}: {other}{_why(unit)}"
        )


def _check_rows(unit: Unit, found: Marker, rows: int, routing: int) -> None:
    if found.routing and (found.rows, found.routing) != (rows, routing):
        raise SharedSource(
            f"{unit.name}: batch {unit.batch} was written with {found.rows} rows of the offsets "
            f"{found.first_offset} to {found.next_offset - 1}, and now a task has {rows} rows or "
            f"others there: {_FILTER}{_why(unit)}"
        )


_FILTER = "either a filter differs from one run to the next, or "
_COPIED = "either an older copy of this checkpoint has gone further meanwhile, or "
_SHARED = (
    "several Spark partitions have rows of this one Kafka partition. Read without minPartitions "
    "and maxRecordsPerPartition, and do not repartition or union before the sink (or use "
    "marker=group). What of this batch is delivered is not known: give another sink.id and begin "
    "where you know what is delivered, or read the topic back"
)


def _why(unit: Unit) -> str:
    if unit.streaming:
        return _SHARED
    return f"another job had this job.id (each needs one of its own), or {_SHARED}"


def _without_marker(unit: Unit, is_first: bool) -> Decision:
    if is_first or not unit.streaming or unit.adopt == unit.batch:
        return _ALL
    raise SinkStopped(
        f"{unit.name}: this is batch {unit.batch}, and nothing is known of earlier ones: the query "
        "wrote without exactly-once delivery until now, or under another sink.id or marker.topic "
        "(where there is none, that is the option topic), or its markers have expired "
        f"(offsets.retention.minutes). {_how_to_go_on(unit)}"
    )


def _how_to_go_on(unit: Unit) -> str:
    return (
        f"If nothing of batch {unit.batch} was written yet, go on with the option "
        f"adopt={unit.batch}, which counts for this batch only"
    )


def disagreement(unit: Unit, found: Marker, rows: int, routing: int) -> str | None:
    """Why rows that are skipped are not those that were written; None if they may well be."""
    if (found.rows, found.routing) == (rows, routing):
        return None
    written = f"{unit.name}: batch {unit.batch} was written with {found.rows} rows, and its replay"
    routed = (
        "rows are routed by what differs from one run to the next (a random key, the time, the "
        "order of a shuffle)"
    )
    back = "read the topic back, and begin where you know what is delivered, with another sink.id"
    if found.rows != rows:
        # These cannot be the same rows, whatever the user has seen of the topic.
        older = (
            "the checkpoint is older than what this sink has done, and the batch was cut "
            "otherwise: then use the newest one"
            if unit.streaming
            else "another job had this job.id: then give this one its own"
        )
        return (
            f"{written} brings {rows} rows: it would lose some, or double some. Either {older}; or "
            f"{routed}: then route by what the source says, and {back}"
        )
    if unit.trust == unit.batch:
        return None
    known_by = "keys" if unit.partitions else "keys or values"
    return (
        f"{written} brings other {known_by}, or other partitions: {routed}. Some may be lost or "
        "doubled in this batch. Route by what the source says. If the rows of each partition are "
        f"the same nevertheless, go on with the option trust={unit.batch}, which counts for this "
        f"batch only; else {back}"
    )


def check_sources(names: Sequence[tuple[str, int]]) -> None:
    """Raises SharedSource if two tasks of a batch name the same source; given (source, task)."""
    first: dict[str, int] = {}
    for name, task in names:
        if first.setdefault(name, task) != task:
            raise SharedSource(
                f"{name}: the tasks {first[name]} and {task} have rows of it: {_SHARED}"
            )


def check_groups(missing: Sequence[int], tasks: int) -> None:
    """Raises SinkStopped if not all groups had a task."""
    if missing:
        raise SinkStopped(
            f"{len(missing)} of {tasks} groups had no task (the first is {missing[0]}): Spark has "
            "merged partitions behind by_kafka_partition; write its result as it is, with the same "
            "number of tasks"
        )
