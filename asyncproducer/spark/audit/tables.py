"""The tables of an audit, each a Spark query over `audit_records` or over what came of it.

`seen` is the heart: for each topic, run, lane and bucket of 32,768 numbers one bitmap (4 KB) of
those that were found, and how many records they were. Bitmaps of several topics are united by OR.
All that is counted exactly comes from them; the records are looked at again only in buckets in
which something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from asyncproducer.spark.audit import judge
from asyncproducer.spark.audit.judge import BUCKET, BUCKET_BITS, Books, Judge
from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.records import Kind
from asyncproducer.spark.audit.targets import Target

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "audit_aborted",
    "audit_dups",
    "audit_gaps",
    "audit_kinds",
    "audit_lanes",
    "audit_latency",
    "audit_order",
    "audit_skew",
    "copies",
    "gaps",
    "judged",
    "seen",
    "targets_of",
    "top_keys",
]

_LANE = ("target", "run", "lane")

_COUNTS = ["records", "distinct", "acked", "lost", "duplicates", "phantom"]
_COUNTS += ["in_doubt", "in_doubt_present", "corrupt"]

#: Of a gap.
_SIDES = ("before", "after")

#: What has no more rows than this goes whole to where the records are, not they to it.
_FEW = 1_000_000


def _broadcast(frame: DataFrame) -> DataFrame:
    """`frame`, which is cheap to count, broadcast if it is small.

    Left alone, Spark sorts all records to join them with a handful of rows: it cannot know before
    how few these will be.
    """
    return F.broadcast(frame) if frame.count() <= _FEW else frame


def _bucket() -> Column:
    return F.shiftright("seq", BUCKET_BITS).alias("bucket")


def _counted(records: DataFrame) -> DataFrame:
    return records.where(F.col("kind") == Kind.COUNTED)


def targets_of(spark: SparkSession, targets: Iterable[Target], *, of: bool = False) -> DataFrame:
    """Each target with each of its topics, or with each of those whose records it must hold."""
    rows = [
        (target.name, topic) for target in targets for topic in (target.of if of else target.topics)
    ]
    return F.broadcast(spark.createDataFrame(rows, "target string, topic string"))


def audit_kinds(records: DataFrame) -> DataFrame:
    """How many records of each topic take part, are of other runs, or have no stamp."""
    return records.groupBy("topic", "kind").count()


def seen(records: DataFrame) -> DataFrame:
    """topic, run, lane, bucket, bits, records, corrupt, first and last send_us, last_seq."""
    return (
        _counted(records)
        .groupBy("topic", "run", "lane", _bucket())
        .agg(
            F.bitmap_construct_agg(F.col("seq").bitwiseAND(BUCKET - 1)).alias("bits"),
            F.count("*").alias("records"),
            F.count_if(~F.col("crc_ok")).alias("corrupt"),
            F.min("send_us").alias("first_send_us"),
            F.max("send_us").alias("last_send_us"),
            F.max("seq").alias("last_seq"),
        )
    )


def judged(
    spark: SparkSession,
    seen: DataFrame,
    targets: Sequence[Target],
    told: Sequence[tuple[str, Entry]],
    assumed: Sequence[tuple[str, Entry]],
) -> DataFrame:
    """One row for each target, run, lane and bucket, see judge.SCHEMA.

    `told`: the ledger, each entry with its target. `assumed`: the same for lanes of which only the
    log tells. Of these the buckets between two that were found are one row.
    """
    found = (
        seen.join(targets_of(spark, targets), "topic")
        .groupBy(*_LANE, "bucket")
        .agg(
            F.bitmap_or_agg("bits").alias("seen"),
            *(F.sum(name).alias(name) for name in ("records", "corrupt")),
            F.min("first_send_us").alias("first_send_us"),
            F.max("last_send_us").alias("last_send_us"),
        )
    )
    named = spark.createDataFrame(
        [(*lane, first, last) for lane, first, last in Books(told).buckets()],
        "target string, run long, lane long, first long, last long",
    ).select(*_LANE, F.explode(F.sequence("first", "last")).alias("bucket"))
    derived = (
        seen.join(targets_of(spark, targets, of=True), "topic")
        .groupBy(*_LANE, "bucket")
        .agg(F.bitmap_or_agg("bits").alias("expected"))
    )
    due = named.withColumn("expected", F.lit(None).cast("binary")).unionByName(derived)
    partial = frozenset(target.name for target in targets if target.partial)
    rows = (
        found.join(due, [*_LANE, "bucket"], "full_outer")
        .select(
            *(*_LANE, "bucket", "seen", "expected", "records", "corrupt"),
            *("first_send_us", "last_send_us"),
        )
        .mapInArrow(Judge(Books([*told, *assumed]), partial), judge.SCHEMA)
    )
    if not assumed:
        return rows
    holes = _holes(spark, found, assumed)
    return rows.unionByName(holes, allowMissingColumns=True).fillna(0, _COUNTS)


def _holes(
    spark: SparkSession, found: DataFrame, assumed: Sequence[tuple[str, Entry]]
) -> DataFrame:
    """Stretches of buckets before one that was found in which nothing is, each as one row.

    No row for each bucket: a damaged stamp may have any number below 2**63.
    """
    lanes = spark.createDataFrame(
        [(target, entry.run, entry.lane) for target, entry in assumed],
        "target string, run long, lane long",
    )
    before = F.lag("bucket", 1, -1).over(Window.partitionBy(*_LANE).orderBy("bucket"))
    first, last = F.shiftleft("begin", BUCKET_BITS), F.shiftleft("bucket", BUCKET_BITS) - 1
    none = F.lit(None).cast("long")
    gap = F.struct(
        first.alias("first"), last.alias("last"), none.alias("before"), none.alias("after")
    )
    return (
        found.join(F.broadcast(lanes), [*_LANE])
        .select(*_LANE, "bucket", (before + 1).alias("begin"))
        .where("begin < bucket")
        .select(
            *_LANE,
            F.col("begin").alias("bucket"),
            *((last - first + 1).alias(name) for name in ("acked", "lost")),
            F.array(gap).alias("gaps"),
        )
    )


def audit_lanes(judged: DataFrame, aborted: DataFrame | None) -> DataFrame:
    """Exact counts of each target, run and lane. `aborted`: see audit_aborted."""
    lanes = judged.groupBy(*_LANE).agg(
        *(F.sum(name).alias(name) for name in _COUNTS),
        F.min("first_send_us").alias("first_send_us"),
        F.max("last_send_us").alias("last_send_us"),
    )
    if aborted is None:
        return lanes.withColumn("aborted", F.lit(None).cast("long"))
    return lanes.join(aborted, [*_LANE], "left").fillna(0, "aborted")


def audit_aborted(
    spark: SparkSession, committed: DataFrame, everything: DataFrame, targets: Sequence[Target]
) -> DataFrame:
    """Records that only those see who read uncommitted: of aborted or open transactions."""
    difference = _counted(everything).select("topic", "run", "lane", F.lit(1).alias("n"))
    difference = difference.unionByName(
        _counted(committed).select("topic", "run", "lane", F.lit(-1).alias("n"))
    )
    return (
        difference.groupBy("topic", "run", "lane")
        .agg(F.sum("n").alias("n"))
        .join(targets_of(spark, targets), "topic")
        .groupBy(*_LANE)
        .agg(F.sum("n").alias("aborted"))
    )


# -- gaps and duplicates -------------------------------------------------------------------------


def gaps(judged: DataFrame) -> DataFrame:
    """Lost ranges, also over several buckets, with the nearest numbers that are there."""
    buckets = Window.partitionBy(*_LANE).orderBy("bucket")
    below = buckets.rowsBetween(Window.unboundedPreceding, -1)
    above = buckets.rowsBetween(1, Window.unboundedFollowing)
    pieces = judged.select(
        *_LANE,
        F.last("last_present", ignorenulls=True).over(below).alias("below"),
        F.first("first_present", ignorenulls=True).over(above).alias("above"),
        "gaps",
    ).select(*_LANE, "below", "above", F.inline("gaps"))
    lane = Window.partitionBy(*_LANE).orderBy("first")
    begins = F.coalesce(F.lag("last").over(lane) + 1 != F.col("first"), F.lit(True))
    return (
        pieces.withColumn("begins", begins.cast("int"))
        .withColumn("gap", F.sum("begins").over(lane))
        .groupBy(*_LANE, "gap")
        .agg(
            F.min("first").alias("first_seq"),
            F.max("last").alias("last_seq"),
            F.min_by(F.coalesce("before", "below"), "first").alias("before_seq"),
            F.max_by(F.coalesce("after", "above"), "first").alias("after_seq"),
        )
        .drop("gap")
    )


def audit_gaps(
    spark: SparkSession, gaps: DataFrame, records: DataFrame, targets: Sequence[Target]
) -> DataFrame:
    """`gaps`, where their neighbours lie, and when these were sent: the loss is between them."""
    gap = [*_LANE, "first_seq", "last_seq"]
    sides = [
        F.struct(F.lit(side).alias("side"), F.col(f"{side}_seq").alias("seq")) for side in _SIDES
    ]
    beside = gaps.select(*gap, F.explode(F.array(*sides)).alias("near")).select(*gap, "near.*")
    wanted = beside.select(*_LANE, "seq").where("seq is not null").distinct()
    places = (
        _counted(records)
        .join(
            _broadcast(wanted.join(targets_of(spark, targets), "target")),
            ["topic", "run", "lane", "seq"],
        )
        .groupBy(*_LANE, "seq")
        .agg(
            F.first(F.struct("topic", "partition", "offset")).alias("place"),
            F.first("send_us").alias("send_us"),
        )
    )
    near = F.struct("seq", "place", "send_us")
    return (
        beside.join(places, [*_LANE, "seq"], "left")
        .groupBy(*gap)
        .agg(*(F.max(F.when(F.col("side") == side, near)).alias(side) for side in _SIDES))
        .select(
            *gap,
            (F.col("last_seq") - F.col("first_seq") + 1).alias("lost"),
            *(
                F.col(f"{side}.{field}").alias(f"{side}{name}")
                for side in _SIDES
                for field, name in (("seq", "_seq"), ("place", ""), ("send_us", "_send_us"))
            ),
        )
    )


def copies(
    spark: SparkSession, records: DataFrame, judged: DataFrame, targets: Sequence[Target]
) -> DataFrame:
    """The records that are there more than once, all of them; `copy` 1 is the first in the log."""
    wrong = judged.where("duplicates > 0").select(*_LANE, "bucket")
    number = Window.partitionBy(*_LANE, "seq")
    return (
        _counted(records)
        .withColumn("bucket", _bucket())
        .join(
            F.broadcast(wrong.join(targets_of(spark, targets), "target")),
            ["topic", "run", "lane", "bucket"],
        )
        .select(
            *(*_LANE, "seq", "topic", "partition", "offset"),
            *("append_us", "send_us", "producer_batch"),
            F.count("*").over(number).alias("copies"),
            F.row_number()
            .over(number.orderBy("append_us", "topic", "partition", "offset"))
            .alias("copy"),
        )
        .where("copies > 1")
    )


def audit_dups(
    spark: SparkSession, copies: DataFrame, entries: Sequence[tuple[str, Entry]]
) -> DataFrame:
    """What is there more than once, and a guess why, by what else is there more than once.

    batch replay: with the ledger's whole batch, in all lanes that had a part in it. task retry:
    with all that this lane had of the batch, or with its beginning. cross partition: in several
    partitions. retry: else.
    """
    dups = copies.groupBy(*_LANE, "seq").agg(
        F.max("copies").alias("copies"),
        (F.count_distinct("topic", "partition") == 1).alias("same_partition"),
        (F.max("offset") - F.min("offset")).alias("offset_distance"),
        ((F.max("append_us") - F.min("append_us")) / 1000).alias("ms_apart"),
        F.max("producer_batch").alias("producer_batch"),
    )
    dups = dups.withColumn("offset_distance", F.expr("if(same_partition, offset_distance, null)"))
    part = [*_LANE, "producer_batch"]
    parts = spark.createDataFrame(
        [
            (target, entry.run, entry.lane, entry.batch_id, entry.acked, _first_acked(entry))
            for target, entry in entries
            if entry.batch_id is not None and entry.acked
        ],
        "target string, run long, lane long, producer_batch long, acked long, first_acked long",
    )
    # A batch that was tried again has several entries: the fullest is the one that came through.
    parts = parts.groupBy(*part).agg(
        F.max("acked").alias("acked"), F.min("first_acked").alias("first_acked")
    )
    doubled = dups.groupBy(*part).agg(
        F.count("*").alias("doubled"), F.min("seq").alias("first"), F.max("seq").alias("last")
    )
    batch = Window.partitionBy("target", "run", "producer_batch")
    classes = (
        parts.join(doubled, part, "left")
        .withColumn("whole", F.coalesce(F.col("doubled") >= F.col("acked"), F.lit(False)))
        .withColumn("replayed", F.min("whole").over(batch))
        .withColumn(
            "retried",
            F.expr("whole or (doubled > 1 and first = first_acked and last - first + 1 = doubled)"),
        )
        .select(*part, "replayed", "retried")
    )
    cause = (
        F.when(F.col("replayed"), "batch replay")
        .when(F.col("retried"), "task retry")
        .when(~F.col("same_partition"), "cross partition")
        .otherwise("retry")
    )
    return (
        dups.join(classes, part, "left")
        .withColumn("class", cause)
        .select(
            *(*_LANE, "seq", "copies", "same_partition", "offset_distance", "ms_apart"),
            *("producer_batch", "class"),
        )
    )


def _first_acked(entry: Entry) -> int:
    first = entry.first_seq
    for begin, end in sorted(entry.failed + entry.in_doubt):
        if begin > first:
            break
        first = end + 1
    return first


# -- order, skew, latency ------------------------------------------------------------------------


def audit_order(records: DataFrame, copies: DataFrame) -> DataFrame:
    """Records behind a later one of their lane in the same partition, by how many numbers.

    `copies`: what is there again is a duplicate, and does not count as late.
    """
    place = ["topic", "partition", "offset"]
    again = copies.where("copy > 1").select(*place).distinct()
    lane = ["topic", "partition", "run", "lane"]
    before = (
        Window.partitionBy(*lane)
        .orderBy("offset")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    return (
        _counted(records)
        .select(*lane, "offset", "seq")
        .join(_broadcast(again), place, "left_anti")
        .withColumn("behind", F.max("seq").over(before) - F.col("seq"))
        .groupBy(*lane)
        .agg(
            F.count("*").alias("records"),
            F.count_if(F.col("behind") > 0).alias("late_records"),
            F.max("behind").alias("max_displacement"),
        )
    )


def audit_skew(records: DataFrame) -> DataFrame:
    """Records and bytes of each partition, and how uneven they are over the topic's partitions.

    A partition without a record has no row and no part in the mean.
    """
    topic = Window.partitionBy("topic")
    sizes = records.groupBy("topic", "partition").agg(
        F.count("*").alias("records"), F.sum("bytes").alias("bytes")
    )
    return sizes.select(
        *("topic", "partition", "records", "bytes"),
        *(
            column
            for name in ("records", "bytes")
            for column in (
                (F.max(name).over(topic) / F.mean(name).over(topic)).alias(f"{name}_max_to_mean"),
                (F.stddev_pop(name).over(topic) / F.mean(name).over(topic)).alias(f"{name}_cv"),
            )
        ),
    )


def top_keys(records: DataFrame, count: int = 10) -> DataFrame:
    """The most frequent keys of each topic, by their hash (Spark's xxhash64)."""
    topic = Window.partitionBy("topic")
    return (
        records.where("key_hash is not null")
        .groupBy("topic", "key_hash")
        .agg(F.count("*").alias("records"), F.sum("bytes").alias("bytes"))
        .withColumn("share", F.col("records") / F.sum("records").over(topic))
        .withColumn("rank", F.row_number().over(topic.orderBy(F.desc("records"), "key_hash")))
        .where(F.col("rank") <= count)
    )


def audit_latency(records: DataFrame) -> DataFrame:
    """How many records took how long, in buckets of a factor of 2 ** (1 / 8).

    Stages: `append`, from the stamp to the broker's clock; `create`, where the topic keeps the
    producer's time instead; and of records with a trace, `wait NAME` and `stage NAME`.
    """
    counted = _counted(records)
    name = F.when(F.col("ts_type") == 1, "append").otherwise("create")
    taken = counted.select(
        "run", "topic", name.alias("stage"), (F.col("append_us") - F.col("send_us")).alias("us")
    )
    if "trace" in records.columns:
        steps = F.expr(
            "transform(trace, (step, i) -> named_struct('stage', step.stage, 'took',"
            " step.out_us - step.in_us, 'waited',"
            " step.in_us - if(i = 0, send_us, trace[i - 1].out_us)))"
        )
        passed = counted.where(F.size("trace") > 0)
        passed = passed.select("run", "topic", F.explode(steps).alias("step"))
        for word, field in (("wait", "waited"), ("stage", "took")):
            taken = taken.unionByName(
                passed.select(
                    "run",
                    "topic",
                    F.concat(F.lit(f"{word} "), "step.stage").alias("stage"),
                    F.col(f"step.{field}").alias("us"),
                )
            )
    # 0 is a bucket by itself; latencies below 0 have the buckets below 0, as a mirror.
    bucket = F.signum("us") * (1 + F.floor(8 * F.log2(F.abs("us"))))
    return (
        taken.withColumn("bucket", F.when(F.col("us") == 0, 0).otherwise(bucket).cast("int"))
        .groupBy("run", "topic", "stage", "bucket")
        .agg(F.count("*").alias("count"), F.min("us").alias("min_us"), F.max("us").alias("max_us"))
    )
