"""A whole audit: all tables, written as Parquet, and the verdict."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from asyncproducer.spark.audit import tables
from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.records import SourceError, audit_records
from asyncproducer.spark.audit.stamps import MAX_SEQ
from asyncproducer.spark.audit.targets import Target, check, grounded, with_sources
from asyncproducer.spark.audit.verdict import Finding, Verdict, claim, judge, overall, unseen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Outcome", "audit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What an audit has written and found."""

    output: str
    verdict: Verdict
    #: The rows of audit_verdict.
    rows: list[dict[str, Any]]
    #: How long each table took.
    seconds: dict[str, float]


def audit(
    spark: SparkSession,
    frame: DataFrame,
    targets: Sequence[Target],
    entries: Sequence[Entry],
    output: str | Path,
    *,
    uncommitted: DataFrame | None = None,
) -> Outcome:
    """Judge what a frame with the columns of Spark's Kafka source holds.

    `frame` is to be read committed; `uncommitted`, the same with isolation level read_uncommitted,
    tells how much was aborted. `entries` is the ledger; without it, what is lost behind the last
    record of a lane cannot be seen, and the verdict says so. Topics of an `of` that the ledger
    names and no target judges are judged as well. `output` is a new directory or URI,
    for one Parquet directory for each table. Blocks until all is there.

    Raises TargetError, SourceError.
    """
    check(targets)
    targets = with_sources(targets, {entry.topic for entry in entries})
    work = _Work(spark, str(output))
    topics = sorted({topic for target in targets for topic in target.topics + target.of})
    frame = frame.where(F.col("topic").isin(topics))
    records = work.write("audit_records", audit_records(frame, entries))
    kinds = work.write("audit_kinds", tables.audit_kinds(records))
    if not entries and kinds.isEmpty():
        raise SourceError(f"there is no record in {', '.join(topics)}, and no ledger")
    seen = tables.seen(records).persist()
    aborted = None
    if uncommitted is not None:
        everything = audit_records(uncommitted.where(F.col("topic").isin(topics)), entries)
        aborted = tables.audit_aborted(spark, records, everything, targets)
    told, assumed = _told(seen, targets, entries)
    judged = tables.judged(spark, seen, targets, told, assumed).persist()
    lanes = work.write("audit_lanes", tables.audit_lanes(judged, aborted))
    work.write("audit_buckets", judged.drop("gaps"))
    gaps = tables.gaps(judged).persist()
    work.write("audit_gaps", tables.audit_gaps(spark, gaps, records, targets))
    copies = tables.copies(spark, records, judged, targets).persist()
    work.write("audit_dups", tables.audit_dups(spark, copies, told))
    order = work.write("audit_order", tables.audit_order(records, copies))
    work.write("audit_skew", tables.audit_skew(records))
    work.write("audit_keys", tables.top_keys(records))
    work.write("audit_latency", tables.audit_latency(records))
    rows = _verdicts(spark, lanes, order, targets, entries)
    work.write("audit_verdict", spark.createDataFrame(rows, _VERDICT))
    for cached in (seen, judged, gaps, copies):
        cached.unpersist()
    return Outcome(
        str(output), overall([Verdict(row["verdict"]) for row in rows]), rows, work.seconds
    )


#: Of lanes, which become those of runs.
_COUNTS = ["records", "acked", "lost", "duplicates", "phantom", "in_doubt", "in_doubt_present"]
_COUNTS += ["corrupt", "aborted"]

_VERDICT = (
    "target string, run long, delivery string, ordered boolean, known boolean, records long,"
    " acked long, lost long, duplicates long, phantom long, in_doubt long, in_doubt_present long,"
    " corrupt long, late long, aborted long, verdict string, reasons array<string>,"
    " evidence array<string>"
)


class _Work:
    """Writes tables, reads them back, and keeps the time."""

    def __init__(self, spark: SparkSession, output: str) -> None:
        self._spark = spark
        self._output = output
        self.seconds: dict[str, float] = {}

    def write(self, name: str, frame: DataFrame) -> DataFrame:
        began = time.perf_counter()
        path = f"{self._output}/{name}"
        frame.write.parquet(path)
        self.seconds[name] = round(time.perf_counter() - began, 3)
        return self._spark.read.parquet(path)


def _told(
    seen: DataFrame, targets: Sequence[Target], entries: Sequence[Entry]
) -> tuple[list[tuple[str, Entry]], list[tuple[str, Entry]]]:
    """What each target must hold by the ledger; and of lanes of which only the log tells.

    Of these it is assumed that they wrote all numbers up to the last one that was found.
    """
    told = [
        (target.name, entry)
        for target in targets
        if not target.of
        for entry in entries
        if entry.topic in target.topics
    ]
    named = {(target, entry.run, entry.lane) for target, entry in told}
    found = [
        row.asDict()
        for row in seen.groupBy("topic", "run", "lane")
        .agg(F.max("last_seq").alias("last_seq"))
        .collect()
    ]
    last: dict[tuple[str, int, int], int] = {}
    for target in targets:
        for row in found:
            lane = (target.name, row["run"], row["lane"])
            if row["topic"] in target.topics and not target.of and lane not in named:
                last[lane] = max(row["last_seq"], last.get(lane, 0))
    return told, [
        (target, Entry(run, lane, target, 0, min(last_seq, MAX_SEQ - 1)))
        for (target, run, lane), last_seq in last.items()
    ]


def _verdicts(
    spark: SparkSession,
    lanes: DataFrame,
    order: DataFrame,
    targets: Sequence[Target],
    entries: Sequence[Entry],
) -> list[dict[str, Any]]:
    late = {
        (row["target"], row["run"], row["lane"]): row["late"]
        for row in order.join(tables.targets_of(spark, targets), "topic")
        .groupBy("target", "run", "lane")
        .agg(F.sum("late_records").alias("late"))
        .collect()
    }
    by_name = {target.name: target for target in targets}
    judged = grounded(targets)
    ledger: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        ledger[entry.run, entry.lane].append(entry)
    runs: dict[tuple[str, int], list[Finding]] = defaultdict(list)
    for row in lanes.orderBy("target", "run", "lane").collect():
        target, run, lane = by_name[row["target"]], row["run"], row["lane"]
        own = ledger[run, lane]
        delivery, ordered = claim(target, own)
        runs[target.name, run].append(
            Finding(
                target.name,
                run,
                lane,
                delivery=delivery,
                ordered=ordered,
                unseen=unseen(target, own, judged),
                late=late.get((target.name, run, lane), 0),
                **{name: row[name] for name in _COUNTS},
            )
        )
    found = {name for name, _ in runs}
    # Of these neither the ledger nor the log has anything.
    nothing = [
        [Finding(target.name, None, None, *claim(target, []), unseen="all")]
        for target in targets
        if target.name not in found
    ]
    return [_row(findings) for findings in [*runs.values(), *nothing]]


def _row(lanes: Sequence[Finding]) -> dict[str, Any]:
    """Of audit_verdict. `lanes`: of one run in one target."""
    verdict, reasons = judge(lanes)
    # Lanes with numbers from damaged stamps can have lost more than a long can tell.
    counts = {
        name: min(sum(getattr(lane, name) for lane in lanes), MAX_SEQ)
        for name in (*_COUNTS[:-1], "late")
    }
    aborted = [lane.aborted for lane in lanes if lane.aborted is not None]
    return {
        **{"target": lanes[0].target, "run": lanes[0].run},
        "delivery": "+".join(sorted({lane.delivery for lane in lanes})),
        "ordered": any(lane.ordered for lane in lanes),
        "known": not any(lane.unseen for lane in lanes),
        **counts,
        "aborted": sum(aborted) if aborted else None,
        "verdict": str(verdict),
        "reasons": reasons,
        "evidence": _evidence(counts),
    }


def _evidence(counts: Mapping[str, int]) -> list[str]:
    """The tables that show what is wrong."""
    numbers = {
        "audit_gaps": counts["lost"],
        "audit_dups": counts["duplicates"],
        "audit_order": counts["late"],
        "audit_lanes": counts["phantom"] + counts["corrupt"],
    }
    return [table for table, number in numbers.items() if number]
