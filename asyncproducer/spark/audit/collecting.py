"""The few rows of an audit's tables that its report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from asyncproducer.spark.audit.records import Kind
from asyncproducer.spark.audit.report import ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["collect"]

#: Marks in the plot, and partitions.
_POINTS = 5000

_KINDS = {Kind.COUNTED: "takes part", Kind.OTHER_RUN: "of another run", Kind.UNSTAMPED: "no stamp"}


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.collect()]


def collect(
    spark: SparkSession, output: str
) -> tuple[Mapping[str, Sequence[Mapping[str, Any]]], Mapping[str, int]]:
    """Rows by table, and how many there are in all of the tables that are cut."""

    def table(name: str) -> DataFrame:
        return spark.read.parquet(f"{output}/{name}")

    gaps, dups = table("audit_gaps"), table("audit_dups")
    late = table("audit_order").where("late_records > 0")
    classes = dups.groupBy("target", "run", "class").agg(
        F.count("*").alias("numbers"), F.max("ms_apart").alias("ms_apart")
    )
    lane = ("target", "run", "lane")
    found = {
        "audit_verdict": table("audit_verdict").orderBy("target", "run"),
        "audit_gaps": gaps.orderBy(F.desc("lost"), *lane, "first_seq").limit(ROWS),
        "audit_dups": dups.orderBy(F.desc("copies"), *lane, "seq").limit(ROWS),
        "dup_classes": classes.orderBy("target", "run", "class"),
        "audit_order": late.orderBy(F.desc("late_records"), "topic", "partition").limit(ROWS),
        "audit_latency": table("audit_latency"),
        "audit_skew": table("audit_skew").orderBy("topic", "partition").limit(_POINTS),
        "audit_keys": table("audit_keys").orderBy("topic", "rank"),
        "audit_buckets": table("audit_buckets")
        .where("lost > 0 or duplicates > 0")
        .orderBy(F.desc(F.col("lost") + F.col("duplicates")))
        .limit(_POINTS),
        "audit_kinds": table("audit_kinds").orderBy("topic", "kind"),
    }
    tables = {name: _rows(frame) for name, frame in found.items()}
    for row in tables["audit_kinds"]:
        row["kind"] = _KINDS[Kind(row["kind"])]
    totals = {"audit_gaps": gaps.count(), "audit_dups": dups.count(), "audit_order": late.count()}
    return tables, totals
