"""What a task does about the marker that it finds: every case, without Spark and Kafka."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncproducer import OffsetAndMetadata
from asyncproducer.spark.markers import (
    Action,
    Decision,
    Marker,
    Seen,
    SinkStopped,
    Unit,
    check_adopted,
    check_groups,
    check_sources,
    decide,
    disagreement,
    is_delivered,
    marker_of_source,
)

ALL, NONE = Decision(Action.WRITE), Decision(Action.SKIP)
FROM_100 = Decision(Action.WRITE, 100)


def group(batch: int, **other: Any) -> Unit:
    return dataclasses.replace(Unit("group 3 of 8", batch, "q", task=3, tasks=8), **other)


def job(number: int) -> Unit:
    return group(number, query="", streaming=False)


def source(batch: int, **other: Any) -> Unit:
    return dataclasses.replace(Unit("in-5", batch, "q", task=2, topic_id="id"), **other)


def left(batch: int, **other: Any) -> Marker:
    """By a group."""
    return dataclasses.replace(Marker(batch, "q", task=3, tasks=8), **other)


def read(batch: int, next_offset: int, **other: Any) -> Marker:
    """By a source."""
    marker = Marker(batch, "q", task=2, next_offset=next_offset, topic_id="id")
    return dataclasses.replace(marker, **other)


@pytest.mark.parametrize(
    ("unit", "found", "expected"),
    [
        # A query's first batch, the next one, and a replay.
        (group(0), None, ALL),
        (group(1), left(0), ALL),
        (group(0), left(0), NONE),
        (group(7), left(7), NONE),
        # What cannot be known stops.
        (group(7), None, "nothing is known of earlier ones"),
        (group(7), left(8), "older than what this sink has done"),
        (group(7), left(5), "those between went another way"),
        (group(7), left(6, tasks=4), "were in 4 in batch 6"),
        (group(7), left(7, tasks=4), "were in 4"),
        (group(7), left(6, query="other"), "another query has written batch 6"),
        (group(7), left(7, query="other"), "another query"),
        (group(0), left(0, query="other"), "another query"),
        (group(7), left(6, partitions=12), "went to one of 12 partitions in batch 6, and now to t"),
        (group(7, partitions=12), left(6), "went to the partition in their column in batch 6"),
        (group(7, partitions=12), left(6, partitions=8), "give by_kafka_partition partitions=8"),
        (group(7, partitions=8), left(7, partitions=8), NONE),
        # Somebody has said that nothing of this batch was written.
        (group(7, adopt=7), None, ALL),
        (group(7, adopt=7), left(3), ALL),
        (group(7, adopt=7), left(7, query="other"), ALL),
        (group(7, adopt=7), left(9, query="other"), ALL),
        # Which counts for this batch only, and not against what is known of this query.
        (group(8, adopt=7), None, "adopt=8"),
        (group(8, adopt=7), left(7, query="other"), "another query"),
        (group(7, adopt=7), left(7), NONE),
        (group(7, adopt=7), left(8), "older than"),
        (group(7, adopt=7), left(6, tasks=4), "were in 4"),
        (group(7, adopt=7, partitions=12), left(6, partitions=8), ALL),
        (group(7, adopt=7, partitions=12), left(7, partitions=12), NONE),
        (group(7, adopt=7, partitions=12), left(7, partitions=8), "in a replay some would be"),
        (group(8, adopt=7, partitions=12), left(7, partitions=8), "in a replay some would be"),
        # Jobs have any numbers that grow.
        (job(20261121), None, ALL),
        (job(20261121), left(20261120, query=""), ALL),
        (job(20261121), left(20261101, query=""), ALL),
        (job(20261121), left(20261121, query=""), NONE),
        (job(20261121), left(20261122, query=""), "job.id"),
        (job(5), left(4), "another query"),
    ],
)
def test_groups(unit: Unit, found: Marker | None, expected: Decision | str) -> None:
    check(unit, found, None, expected)


@pytest.mark.parametrize(
    ("unit", "found", "progress", "expected"),
    [
        # The offset says it all, whatever the batch.
        (source(0), None, None, ALL),
        (source(7), read(6, 100), None, FROM_100),
        (source(7), read(7, 100), None, FROM_100),
        (source(7), read(3, 100), None, FROM_100),
        (source(7), read(9, 100), None, FROM_100),
        (source(0), read(9, 100, query="other"), None, FROM_100),
        # A partition that has its first rows late, in a query that is known to be alive.
        (source(7), None, Marker(0, "q"), ALL),
        (source(7), None, Marker(6, "q"), ALL),
        # The marker may be gone: it was written before what is known of the query.
        (source(7), None, Marker(7, "q"), "nothing is known"),
        # What was written until now was written by groups.
        (source(7), None, Marker(6, "q", tasks=2), "nothing is known"),
        (source(0), None, Marker(0, tasks=2), "nothing is known"),
        # It was made ready, and has committed nothing.
        (source(0), None, Marker(0), ALL),
        (source(7), None, Marker(0), "nothing is known"),
        (source(0), None, Marker(0, "q"), "nothing is known"),
        (source(7), None, Marker(6, "other"), "nothing is known"),
        (source(0), None, Marker(6, "other"), "nothing is known"),
        (source(7), None, None, "markers have expired"),
        (source(7, adopt=7), None, None, ALL),
        (source(7, adopt=6), None, None, "adopt=7"),
        (source(7, streaming=False), None, None, ALL),
        # A replay begins where the batch did, in a task of any number. (Whether it has the same
        # rows is known at its end.)
        (source(7, first_offset=50, task=5), read(7, 100, first_offset=50), None, FROM_100),
        (source(7, first_offset=60), read(7, 100, first_offset=50), None, FROM_100),
        # Two tasks of a batch, of which the later rows may have come first.
        (source(7, first_offset=49), read(7, 100, first_offset=50), None, "minPartitions and max"),
        (source(7, first_offset=100), read(7, 100, first_offset=50), None, "50 to 99 are written"),
        (source(8, first_offset=49), read(7, 100, first_offset=50), None, FROM_100),
        (source(8, first_offset=100), read(7, 100, first_offset=50), None, FROM_100),
        (source(7, first_offset=9, query="n"), read(7, 100, first_offset=50), None, FROM_100),
        # A later batch of the query has later rows, where the marker's own are known.
        (source(8, first_offset=100), read(7, 100, routing=9), None, FROM_100),
        (source(8, first_offset=99), read(7, 100, routing=9), None, "task of batch 8 begins with"),
        (source(6, first_offset=99), read(7, 100, routing=9), None, FROM_100),
        (source(8, first_offset=99, query="n"), read(7, 100, routing=9), None, FROM_100),
        (source(8, first_offset=99, streaming=False), read(7, 100, routing=9), None, FROM_100),
        # A job whose number another job had, or one of two tasks of a job.
        (
            source(7, query="", first_offset=100, streaming=False),
            read(7, 100, first_offset=50, query=""),
            None,
            "begins with 100: either a filter differs .*, or another job had this job.id",
        ),
        (
            source(7, query="", first_offset=49, streaming=False),
            read(7, 100, first_offset=50, query=""),
            None,
            "begins with 49: either a filter differs .*, or another job had this job.id",
        ),
        # An earlier job, of which nobody knows whether it was done.
        (
            source(6, query="", streaming=False),
            read(7, 100, query=""),
            None,
            "this is job.id=6, and job 7 has written up to offset 99",
        ),
        (source(6, query="", streaming=False), read(7, 100), None, FROM_100),
        # Another topic of the same name.
        (source(7, topic_id="new"), read(6, 100), None, "deleted and created again"),
        (source(7, topic_id=""), read(6, 100), None, "do not tell its id any more"),
        (source(7), read(6, 100, topic_id=""), None, FROM_100),
    ],
)
def test_sources(
    unit: Unit, found: Marker | None, progress: Marker | None, expected: Decision | str
) -> None:
    check(unit, found, progress, expected)


def seen(first: int, last: int, rows: int, routing: int, *old: int) -> Seen:
    return Seen(first, last, rows, routing, *old)


WRITTEN = read(7, 100, first_offset=50, rows=25, routing=9)
UNKNOWN = read(7, 100, first_offset=50)


@pytest.mark.parametrize(
    ("found", "looked", "expected"),
    [
        (None, seen(50, 99, 25, 9), WRITTEN),
        # A replay with the same rows, with more of them behind, and one that ends before.
        (WRITTEN, seen(50, 99, 25, 9, 25, 9), WRITTEN),
        (
            WRITTEN,
            seen(50, 119, 40, 20, 25, 9),
            read(7, 120, first_offset=50, rows=40, routing=20),
        ),
        (WRITTEN, seen(50, 97, 24, 5, 24, 5), WRITTEN),
        (WRITTEN, seen(51, 98, 24, 5, 24, 5), WRITTEN),
        # Other rows, or as many of others.
        (WRITTEN, seen(51, 99, 24, 9, 24, 9), "written with 25 rows of the offsets 50 to 99"),
        (WRITTEN, seen(50, 99, 25, 8, 25, 8), "a task has 25 rows or others"),
        (WRITTEN, seen(50, 119, 25, 9, 15, 4), "a task has 15 rows or others"),
        (WRITTEN, seen(50, 119, 25, 9, 0, 0), "a task has 0 rows"),
        # A row that comes late in the task, from before all that were written.
        (WRITTEN, seen(49, 99, 25, 9, 25, 9), "a task of batch 7 begins with 49"),
        # What is not known cannot be compared; what is there then is known.
        (UNKNOWN, seen(50, 99, 25, 9, 25, 9), WRITTEN),
        (UNKNOWN, seen(50, 97, 24, 5, 24, 5), UNKNOWN),
        # Of another batch, or query: its rows are others.
        (read(6, 50, first_offset=20, rows=30, routing=4), seen(50, 99, 25, 9), WRITTEN),
        (read(8, 60, first_offset=20, rows=30, routing=4), seen(50, 99, 25, 9, 5, 3), WRITTEN),
        (read(7, 90, query="other", rows=1, routing=1), seen(50, 99, 25, 9, 20, 8), WRITTEN),
        (read(8, 100, first_offset=20, rows=30, routing=4), seen(50, 99, 25, 9, 25, 9), WRITTEN),
        (read(6, 60, rows=30, routing=4), seen(50, 99, 25, 9, 5, 3), "task of batch 7 begins with"),
        # It is not turned back, and which rows this batch has up to there is not known.
        (read(9, 100, first_offset=80, rows=20, routing=4), seen(50, 69, 9, 7, 9, 7), UNKNOWN),
    ],
)
def test_what_a_source_leaves(found: Marker | None, looked: Seen, expected: Marker | str) -> None:
    if isinstance(expected, Marker):
        assert marker_of_source(source(7), found, looked) == expected
    else:
        with pytest.raises(SinkStopped, match=expected) as stopped:
            marker_of_source(source(7), found, looked)
        assert "minPartitions" in str(stopped.value)


@pytest.mark.parametrize(
    ("found", "looked", "expected"),
    [
        (WRITTEN, seen(50, 99, 25, 9), True),
        (WRITTEN, seen(50, 97, 24, 5), True),
        (UNKNOWN, seen(50, 99, 25, 9), True),
        # Not yet: the marker is of an earlier attempt, or batch.
        (WRITTEN, seen(50, 119, 40, 20), False),
        (read(6, 100, first_offset=20), seen(50, 99, 25, 9), False),
        (read(7, 100, first_offset=50, query="other"), seen(50, 99, 25, 9), False),
        # Of another task.
        (WRITTEN, seen(49, 99, 25, 9), "a task of batch 7 begins with 49"),
        (WRITTEN, seen(100, 149, 25, 9), "a task of batch 7 begins with 100"),
        (WRITTEN, seen(51, 99, 24, 9), "written with 25 rows"),
        (WRITTEN, seen(50, 99, 25, 8), "25 rows or others"),
    ],
)
def test_what_a_fenced_source_finds(found: Marker, looked: Seen, expected: bool | str) -> None:
    if isinstance(expected, bool):
        assert is_delivered(source(7), found, looked) is expected
    else:
        with pytest.raises(SinkStopped, match=expected):
            is_delivered(source(7), found, looked)


def test_a_source_has_one_task() -> None:
    check_sources([("in-5", 2), ("in-6", 3)])
    with pytest.raises(SinkStopped, match=r"in-5: the tasks 2 and 4 have rows of it.*union"):
        check_sources([("in-5", 2), ("in-6", 3), ("in-5", 4)])


def check(
    unit: Unit, found: Marker | None, progress: Marker | None, expected: Decision | str
) -> None:
    if isinstance(expected, Decision):
        assert decide(unit, found, progress) == expected
    else:
        with pytest.raises(SinkStopped, match=expected) as stopped:
            decide(unit, found, progress)
        assert unit.name in str(stopped.value)


@pytest.mark.parametrize(
    "marker",
    [
        left(7, rows=5, routing=2**32 - 1),
        read(7, 2**40, task=0, first_offset=2**39, rows=2**39, routing=2**64 - 1),
        Marker(0),
        Marker(2**40, 'a "query"'),
    ],
)
def test_a_marker_is_an_offset_with_text(marker: Marker) -> None:
    packed = marker.packed()
    assert Marker.unpacked(packed) == marker
    assert packed.offset == max(marker.batch, marker.next_offset)
    assert len(packed.metadata) < 300  # brokers take 4096


@pytest.mark.parametrize("text", ["", "x", "[]", "5", '{"batch":"7"}', '{"batch":7,"new":1}'])
def test_what_is_no_marker_stops(text: str) -> None:
    with pytest.raises(SinkStopped, match=r"give this sink another sink\.id"):
        Marker.unpacked(OffsetAndMetadata(7, text))


def test_a_replay_that_was_routed_otherwise_is_found_out() -> None:
    unit, found = group(7), left(7, rows=100, routing=5)
    assert disagreement(unit, found, 100, 5) is None
    assert "written with 100 rows" in (disagreement(unit, found, 99, 5) or "")
    assert "other partitions" in (disagreement(unit, found, 100, 6) or "")


def test_trust_is_for_as_many_rows_and_not_offered_for_others() -> None:
    """An old checkpoint cuts batches otherwise: what is more in the replay would be left out."""
    unit, found = group(7), left(7, rows=100, routing=5)
    trusting = dataclasses.replace(unit, trust=7)
    assert "trust=7" in (disagreement(unit, found, 100, 6) or "")
    assert disagreement(trusting, found, 100, 6) is None
    for asked in (unit, trusting):
        for rows in (99, 101):
            told = disagreement(asked, found, rows, 6) or ""
            assert f"brings {rows} rows" in told
            assert "the checkpoint is older" in told
            assert "trust" not in told
    job = dataclasses.replace(unit, streaming=False)
    assert "another job had this job.id" in (disagreement(job, found, 101, 6) or "")


@pytest.mark.parametrize("adopt", [0, 4, 5])
def test_adopt_names_a_batch_that_may_come(adopt: int) -> None:
    check_adopted(adopt, 4)


def test_adopt_of_a_later_batch_is_refused_before_it_is_kept() -> None:
    with pytest.raises(SinkStopped, match=r"adopt=6: the last .* is 4, .*Give adopt=5"):
        check_adopted(6, 4)


def test_every_group_needs_a_task() -> None:
    check_groups([], 8)
    with pytest.raises(SinkStopped, match="2 of 8 groups had no task"):
        check_groups([6, 7], 8)
