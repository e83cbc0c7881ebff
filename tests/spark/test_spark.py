"""The sink under Spark itself, in local mode, on an embedded broker."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .conftest import Broker

pytestmark = [
    pytest.mark.spark,
    # Spark's own, and of the libraries that it uses.
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

_numbers = itertools.count(1)


@pytest.fixture
def F() -> Any:
    from pyspark.sql import functions

    return functions


def frame(spark: Any, count: int, F: Any) -> Any:
    """Keys and values that are numbers, in two partitions."""
    number = F.col("id").cast("string")
    return spark.range(0, count, 1, 2).select(number.alias("key"), number.alias("value"))


def numbers(count: int) -> list[bytes]:
    return sorted(b"%d" % n for n in range(count))


def save(df: Any, broker: Broker, **options: Any) -> None:
    given = {"kafka.bootstrap.servers": broker.servers, "topic": "out"}
    given |= {name.replace("_", "."): str(value) for name, value in options.items()}
    df.write.format("asyncproducer").mode("append").options(**given).save()


def stream(df: Any, broker: Broker, checkpoint: Path, **options: Any) -> Any:
    given = {"kafka.bootstrap.servers": broker.servers, "topic": "out"}
    given |= {name.replace("_", "."): str(value) for name, value in options.items()}
    writer = df.writeStream.format("asyncproducer").options(**given)
    return writer.option("checkpointLocation", str(checkpoint))


def test_spark_finds_the_format_and_rows_arrive(spark: Any, broker: Broker, F: Any) -> None:
    save(frame(spark, 5000, F), broker)
    records = broker.do(lambda cluster: cluster.records("out"))
    assert sorted(record.value or b"" for record in records) == numbers(5000)
    assert all(record.key == record.value for record in records)


def test_all_columns_arrive(spark: Any, broker: Broker, F: Any) -> None:
    df = spark.sql(
        """
        select 'k' as key, binary('v') as value, 'in' as topic, 1 as partition,
               timestamp_millis(1700000000123) as timestamp,
               array(named_struct('key', 'h', 'value', binary('x'))) as headers
        """
    )
    df.write.format("asyncproducer").mode("append").option(
        "bootstrap.servers", broker.servers
    ).save()
    (record,) = broker.do(lambda cluster: cluster.records("in", 1))
    assert (record.key, record.value, record.timestamp) == (b"k", b"v", 1700000000123)
    assert list(record.headers) == [("h", b"x")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ({"value": "1"}, {"topc": "x"}, "did you mean 'topic'?"),
        ({"value": "1"}, {"delivery": "exactly_once"}, "exactly-once delivery needs a name"),
        ({"valu": "'a'"}, {}, "did you mean 'value'?"),
        ({"value": "1.5"}, {}, "cast it"),
    ],
)
def test_what_is_wrong_is_said_before_a_job_begins(
    spark: Any,
    broker: Broker,
    tmp_path: Path,
    columns: dict[str, str],
    options: dict[str, str],
    says: str,
    streaming: bool,
) -> None:
    from pyspark.errors import AnalysisException, StreamingQueryException

    selected = [f"{value} as {name}" for name, value in columns.items()]
    if streaming:
        df = spark.readStream.format("rate").load().selectExpr(*selected)
        with pytest.raises((AnalysisException, StreamingQueryException)) as refused:
            stream(df, broker, tmp_path, **options).start().awaitTermination()
    else:
        with pytest.raises(AnalysisException) as refused:
            save(spark.range(1).selectExpr(*selected), broker, **options)
    assert says in str(refused.value)
    assert broker.do(lambda cluster: cluster.requests) == []


@pytest.mark.parametrize("told", [{}, {"sql.streaming.queryId": "q"}])
def test_a_batch_without_a_number_is_not_the_first(
    broker: Broker, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import pyarrow
    from pyspark.sql.types import BinaryType, IntegerType, StructType

    from asyncproducer.spark import source
    from asyncproducer.spark.columns import TASKS
    from asyncproducer.spark.markers import SinkStopped

    context = SimpleNamespace(getLocalProperty=told.get, partitionId=lambda: 0)
    monkeypatch.setattr(source, "TaskContext", SimpleNamespace(get=lambda: context))
    schema = StructType().add("value", BinaryType())
    schema.add("partition", IntegerType(), metadata={TASKS: 1})
    plain = {"bootstrap.servers": broker.servers, "topic": "out"}
    once = {**plain, "delivery": "exactly_once", "sink.id": "s", "tasks": "1"}
    rows = pyarrow.record_batch({"value": [b"a"], "partition": pyarrow.array([0], "int32")})
    with pytest.raises(SinkStopped, match=r"which batch this is .*, batch None\)"):
        source.DefaultSource(once).streamWriter(schema, False).write(iter([rows]))
    assert broker.values() == []
    source.DefaultSource(plain).streamWriter(schema, False).write(iter([rows]))
    assert broker.values() == [b"a"]


def test_a_topic_is_not_overwritten(spark: Any, broker: Broker, F: Any) -> None:
    from pyspark.errors import AnalysisException

    writer = frame(spark, 1, F).write.format("asyncproducer").mode("overwrite")
    with pytest.raises(AnalysisException, match=r'use mode\("append"\)'):
        writer.options(**{"bootstrap.servers": broker.servers, "topic": "out"}).save()


def test_a_job_that_is_run_again_writes_nothing(spark: Any, broker: Broker, F: Any) -> None:
    from asyncproducer.spark import by_kafka_partition

    grouped = by_kafka_partition(frame(spark, 1000, F), tasks=3, partitions=4)
    for _ in range(2):
        save(grouped, broker, delivery="exactly_once", sink_id="s", tasks=3, job_id=1)
    assert broker.values() == numbers(1000)


def test_other_tasks_than_the_frame_has_are_refused_before_a_row_is_written(
    spark: Any, broker: Broker, F: Any
) -> None:
    from pyspark.errors import AnalysisException

    from asyncproducer.spark import by_kafka_partition

    df = frame(spark, 10, F).withColumn("partition", F.lit(1))
    for rows in (df, by_kafka_partition(df, tasks=2)):
        with pytest.raises(AnalysisException, match="by_kafka_partition"):
            save(rows, broker, delivery="exactly_once", sink_id="s", tasks=3, job_id=1)
    assert broker.do(lambda cluster: cluster.requests) == []


def test_adaptive_execution_leaves_the_groups_as_they_are(
    spark: Any, broker: Broker, F: Any
) -> None:
    """It joins small partitions of other shuffles, and these have a row each, or none."""
    from asyncproducer.spark import by_kafka_partition

    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        totals = frame(spark, 20, F).groupBy("key").agg(F.max("value").alias("value"))
        grouped = by_kafka_partition(totals, tasks=16, partitions=4)
        for _ in range(2):
            save(grouped, broker, delivery="exactly_once", sink_id="s", tasks=16, job_id=1)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
    assert broker.values() == numbers(20)


@pytest.mark.parametrize(
    ("given", "columns", "says"),
    [
        ({"tasks": "3"}, [], "by_kafka_partition was given tasks=2"),
        ({"kafka.acks": "1"}, [], "acks=all"),
        ({"topc": "out"}, [], "did you mean 'topic'"),
        ({}, ["valeu"], "did you mean 'value'"),
    ],
)
def test_what_adaptive_execution_has_refused_late_is_refused_by_check_without_a_job(
    spark: Any, broker: Broker, F: Any, given: dict[str, str], columns: list[str], says: str
) -> None:
    """Spark asks the sink when the rows are shuffled: then nothing is written either."""
    from pyspark.errors import AnalysisException

    from asyncproducer.errors import ConfigError
    from asyncproducer.spark import by_kafka_partition, check

    right = {
        "kafka.bootstrap.servers": broker.servers,
        "topic": "out",
        "delivery": "exactly_once",
        "sink.id": "s",
        "tasks": "2",
        "job.id": "1",
    }
    df = frame(spark, 10, F)
    wrong = df.select("*", *(F.lit(1).alias(name) for name in columns))
    good, bad = (by_kafka_partition(each, tasks=2, partitions=4) for each in (df, wrong))
    context = spark.sparkContext
    context.setJobGroup(says, "check")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        check(good, right)
        with pytest.raises(ConfigError, match=says):
            check(bad, right | given)
        assert context.statusTracker().getJobIdsForGroup(says) == []
        with pytest.raises(AnalysisException, match=says):
            bad.write.format("asyncproducer").mode("append").options(**right | given).save()
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
        context.setLocalProperty("spark.jobGroup.id", None)
    assert broker.do(lambda cluster: cluster.requests) == []


def test_check_knows_a_query_from_a_job(spark: Any, broker: Broker) -> None:
    from asyncproducer.errors import ConfigError
    from asyncproducer.spark import check

    rows = spark.readStream.format("rate").load().selectExpr("string(value) as value")
    given = {"kafka.bootstrap.servers": broker.servers, "topic": "out"}
    check(rows, given | {"checkpointLocation": "/ck"})
    with pytest.raises(ConfigError, match=r"job\.id"):
        check(rows, given | {"delivery": "exactly_once", "sink.id": "s", "job.id": "1"})


def test_the_sink_knows_of_how_many_partitions_a_row_has_one(spark: Any, F: Any) -> None:
    """By the column's metadata, which come through Spark."""
    from asyncproducer.spark import by_kafka_partition
    from asyncproducer.spark.columns import SinkColumns
    from asyncproducer.spark.options import SinkOptions

    given = {"bootstrap.servers": "h:9092", "topic": "out"}
    options = SinkOptions.of(given, streaming=False)
    df = frame(spark, 1, F)
    routed = by_kafka_partition(df, tasks=3, partitions=4)
    assert SinkColumns.of(routed.schema, options).partitions == 4
    placed = by_kafka_partition(df.withColumn("partition", F.lit(3)), tasks=3)
    assert SinkColumns.of(placed.schema, options).partitions == 0


def test_an_origin_is_topic_partition_and_offset(spark: Any, F: Any) -> None:
    """And none where a number has no room for it, or the topic is another."""
    import pyarrow

    from asyncproducer.spark import origin
    from asyncproducer.spark.columns import SinkColumns
    from asyncproducer.spark.options import SinkOptions
    from asyncproducer.spark.rows import read_of

    given = {"bootstrap.servers": "h:9092", "topic": "out"}
    options = SinkOptions.of(given, streaming=False)

    def packed(topics: tuple[str, ...], *read: tuple[str, int, int]) -> Any:
        rows = spark.createDataFrame(list(read), "topic string, partition int, offset bigint")
        rows = rows.select(F.lit("v").alias("value"), origin(*topics))
        return pyarrow.table(rows.toArrow()), SinkColumns.of(rows.schema, options)

    topics = ("a", "b'\\", "c")
    highest = (32768 // 3 - 1, 2**48 - 1)
    for topic in topics:
        for partition, offset in ((0, 0), (5, 123456789012), highest):
            table, columns = packed(topics, (topic, partition, offset))
            found = read_of(table.to_batches()[0], columns)
            assert (found.source, list(found.offsets)) == ((topic, partition), [offset])
    rows = (("d", 0, 0), ("A", 0, 0), ("a", highest[0] + 2, 0), ("a", 0, 2**48), ("a", 0, 7))
    table, _ = packed(topics, *rows)
    assert table["__origin"].to_pylist() == [None, None, None, None, 7]
    # One topic has all the room.
    table, columns = packed(("a",), ("a", 32767, 2**48 - 1))
    assert table["__origin"].to_pylist() == [2**63 - 1]


@pytest.mark.parametrize("topics", [(), ("a", ""), ("a", "a"), (["a"],)])
def test_an_origin_without_topics_is_refused(spark: Any, topics: Any) -> None:
    from asyncproducer.spark import origin

    with pytest.raises(ValueError, match=r"origin\("):
        origin(*topics)


def test_rows_go_where_kafka_would_send_them(spark: Any, broker: Broker, F: Any) -> None:
    from asyncproducer.spark import by_kafka_partition

    df = frame(spark, 1000, F)
    save(by_kafka_partition(df, tasks=3, topic="out", bootstrap_servers=broker.servers), broker)
    save(df, broker)
    for partition in range(4):
        values = broker.values(partition=partition, committed=False)
        assert values[::2] == values[1::2] != []


def test_rows_without_a_key_go_by_their_value(spark: Any, F: Any) -> None:
    """Each row to the same partition whether its key is null or there is no such column."""
    from asyncproducer.spark import by_kafka_partition

    df = frame(spark, 1000, F)
    halves = df.withColumn("key", F.when(F.expr("value % 2 = 0"), F.col("key")))
    routed = by_kafka_partition(halves, tasks=3, partitions=4).where("key is null")
    without = by_kafka_partition(df.drop("key"), tasks=3, partitions=4).where("value % 2 = 1")
    placed, again = (
        {row["value"]: row["partition"] for row in each.collect()} for each in (routed, without)
    )
    assert placed == again
    assert len(placed) == 500
    counts = Counter(placed.values())
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 90
    assert "EvalPython" not in without._jdf.queryExecution().toString()


def test_columns_are_found_in_any_case(spark: Any, broker: Broker, F: Any) -> None:
    from asyncproducer.spark import by_kafka_partition

    df = frame(spark, 1000, F)
    Key = df.withColumnRenamed("key", "Key")
    save(by_kafka_partition(Key, tasks=3, topic="out", bootstrap_servers=broker.servers), broker)
    save(df, broker)
    for partition in range(4):
        values = broker.values(partition=partition, committed=False)
        assert values[::2] == values[1::2] != []
    placed = df.withColumn("Partition", F.lit(3))
    assert by_kafka_partition(placed, tasks=3, partitions=4).columns == placed.columns


async def test_the_topic_is_asked_within_a_running_loop(spark: Any, broker: Broker, F: Any) -> None:
    """As in a notebook."""
    from asyncproducer.spark import by_kafka_partition

    df = by_kafka_partition(
        frame(spark, 10, F), tasks=3, topic="out", bootstrap_servers=broker.servers
    )
    assert "partition" in df.columns


def test_a_stream_of_groups_goes_on_where_it_was(
    spark: Any, broker: Broker, F: Any, tmp_path: Path
) -> None:
    from asyncproducer.spark import by_kafka_partition

    source = tmp_path / "source"
    options = {"delivery": "exactly_once", "sink_id": "s", "tasks": 3}
    count = 0
    for end in (100, 250, 250, 300):  # one of the runs finds nothing new
        spark.range(count, end, 1, 1).selectExpr("string(id) value").write.mode("append").text(
            str(source)
        )
        count = end
        df = by_kafka_partition(spark.readStream.text(str(source)), tasks=3, partitions=4)
        query = stream(df, broker, tmp_path / "checkpoint", **options).trigger(availableNow=True)
        query.start().awaitTermination()
        assert broker.values() == numbers(end)


def test_a_replayed_batch_is_written_once(
    spark: Any, broker: Broker, F: Any, tmp_path: Path
) -> None:
    """Spark's log of commits loses its last entry, as when the driver dies before it writes it."""
    from asyncproducer.spark import by_kafka_partition

    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    for n in range(2):
        spark.range(n * 100, n * 100 + 100, 1, 1).selectExpr("string(id) value").write.mode(
            "append"
        ).text(str(source))
        for _ in range(2):
            df = by_kafka_partition(spark.readStream.text(str(source)), tasks=3, partitions=4)
            query = stream(df, broker, checkpoint, delivery="exactly_once", sink_id="s", tasks=3)
            query.trigger(availableNow=True).start().awaitTermination()
            for name in (f"{n}", f".{n}.crc"):
                (checkpoint / "commits" / name).unlink(missing_ok=True)
        df = by_kafka_partition(spark.readStream.text(str(source)), tasks=3, partitions=4)
        query = stream(df, broker, checkpoint, delivery="exactly_once", sink_id="s", tasks=3)
        query.trigger(availableNow=True).start().awaitTermination()
        assert broker.values() == numbers(n * 100 + 100)


def test_a_replay_that_is_grouped_otherwise_stops(
    spark: Any, broker: Broker, F: Any, tmp_path: Path
) -> None:
    """Each partition gets as many rows as before, and others; then the topic has more of them."""
    from pyspark.errors import StreamingQueryException

    from asyncproducer.spark import by_kafka_partition

    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    spark.range(0, 100, 1, 1).selectExpr("string(id) value").write.text(str(source))

    def run(df: Any, partitions: int | None = None) -> None:
        df = by_kafka_partition(df, tasks=2, partitions=partitions)
        query = stream(df, broker, checkpoint, delivery="exactly_once", sink_id=sink_id, tasks=2)
        query.trigger(availableNow=True).start().awaitTermination()

    def forget() -> None:
        for name in ("0", ".0.crc"):
            (checkpoint / "commits" / name).unlink(missing_ok=True)

    rows = spark.readStream.text(str(source))
    sink_id = "placed"
    for shift in (0, 1):
        column = F.expr(f"int((int(value) + {shift}) % 2)")
        if shift:
            with pytest.raises(StreamingQueryException, match="brings other keys or values"):
                run(rows.withColumn("partition", column))
        else:
            run(rows.withColumn("partition", column))
        forget()
    sink_id, checkpoint = "routed", tmp_path / "other"
    run(rows, 3)
    forget()
    with pytest.raises(StreamingQueryException, match="one of 3 partitions in batch 0, and now to"):
        run(rows, 4)
    run(rows, 3)
    assert broker.values() == sorted(numbers(100) * 2)


def test_at_least_once_a_replayed_batch_is_there_twice(
    spark: Any, broker: Broker, F: Any, tmp_path: Path
) -> None:
    """Else the test above would show nothing."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    spark.range(0, 100, 1, 1).selectExpr("string(id) value").write.text(str(source))
    for _ in range(2):
        query = stream(spark.readStream.text(str(source)), broker, checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
        for name in ("0", ".0.crc"):
            (checkpoint / "commits" / name).unlink(missing_ok=True)
    assert broker.values() == sorted(numbers(100) * 2)


def rates(spark: Any, broker: Broker) -> Any:
    df = spark.readStream.format("rate").option("numPartitions", 1).load()
    options = {"kafka.bootstrap.servers": broker.servers, "topic": "out"}
    writer = df.selectExpr("string(value) value").writeStream.format("asyncproducer")
    return writer.options(**options)


def test_a_continuous_trigger_is_refused(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """Spark gives a sink in Python no rows there."""
    from pyspark.errors import StreamingQueryException

    writer = rates(spark, broker).option("checkpointLocation", str(tmp_path))
    with pytest.raises(
        StreamingQueryException, match=r"Use micro-batches.*name it with its scheme"
    ):
        writer.trigger(continuous="100 milliseconds").start().awaitTermination(60)
    # What it has left is no obstacle.
    query = writer.trigger(processingTime="100 milliseconds").start()
    try:
        deadline = time.monotonic() + 60
        while not broker.values():
            assert time.monotonic() < deadline
            query.awaitTermination(0.1)
    finally:
        query.stop()


def test_a_continuous_trigger_that_the_sink_cannot_see_commits_nothing(
    spark: Any, broker: Broker, tmp_path: Path
) -> None:
    """It is not told of a checkpoint that the session names. What is committed would be lost."""
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path))
    try:
        writer = rates(spark, broker).queryName("seen")
        query = writer.trigger(continuous="100 milliseconds").start()
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    checkpoint = tmp_path / "seen"
    try:
        deadline = time.monotonic() + 60
        while len(list(checkpoint.glob("offsets/[0-9]*"))) < 4:
            assert time.monotonic() < deadline
            query.awaitTermination(0.1)
    finally:
        query.stop()
    assert list(checkpoint.glob("commits/[0-9]*")) == []
    assert broker.values() == []


def test_a_sink_that_stops_says_why(spark: Any, broker: Broker, F: Any, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    from asyncproducer.spark import by_kafka_partition

    source = tmp_path / "source"
    spark.range(0, 100, 1, 1).selectExpr("string(id) value").write.text(str(source))
    for checkpoint in ("one", "two"):
        df = by_kafka_partition(spark.readStream.text(str(source)), tasks=3, partitions=4)
        writer = stream(
            df, broker, tmp_path / checkpoint, delivery="exactly_once", sink_id="s", tasks=3
        )
        started = writer.trigger(availableNow=True).start()
        if checkpoint == "one":
            started.awaitTermination()
        else:
            with pytest.raises(StreamingQueryException, match="another query has written batch 0"):
                started.awaitTermination()
    assert broker.values() == numbers(100)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("module", ["source", "routing"])
def test_what_a_kept_worker_has_imported_is_no_garbage_to_look_for(kept: bool, module: str) -> None:
    program = f"import gc, asyncproducer.spark.{module}; print(gc.get_freeze_count())"
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_REUSE_WORKER"}
    if kept:
        environ["SPARK_REUSE_WORKER"] = "1"
    told = subprocess.check_output([sys.executable, "-c", program], env=environ, text=True)
    assert (int(told) > 10_000) is kept
    assert kept or int(told) == 0
