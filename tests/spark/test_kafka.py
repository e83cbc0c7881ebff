"""Kafka to Kafka through Spark, on real brokers, read back by Spark's own connector."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from asyncproducer.testing import KafkaCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]

_numbers = itertools.count(1)


class Pipe:
    """A topic to read, one to write, and a query between them."""

    def __init__(self, spark: Any, kafka: KafkaCluster, checkpoint: Path) -> None:
        number = next(_numbers)
        self.spark = spark
        self.servers = kafka.bootstrap_servers
        self.checkpoint = checkpoint
        self.source, self.target = f"spark-in-{number}", f"spark-out-{number}"
        kafka.create_topic(self.source, partitions=2)
        kafka.create_topic(self.target, partitions=3)

    def fill(self, first: int, end: int) -> None:
        """Numbers as rows of the source."""
        rows = self.spark.range(first, end, 1, 2).selectExpr("string(id) key", "string(id) value")
        rows.write.format("asyncproducer").mode("append").options(
            **{"kafka.bootstrap.servers": self.servers, "topic": self.source}
        ).save()

    def read(self) -> Any:
        """The source as a stream, with what marker=source wants to know."""
        from asyncproducer.spark import origin

        options = {
            "kafka.bootstrap.servers": self.servers,
            "subscribe": self.source,
            "startingOffsets": "earliest",
        }
        return (
            self.spark.readStream.format("kafka")
            .options(**options)
            .load()
            .select("key", "value", origin(self.source))
        )

    def run(self, df: Any, **options: Any) -> None:
        """Until the source is at its end."""
        given = {"kafka.bootstrap.servers": self.servers, "topic": self.target}
        given |= {name.replace("_", "."): str(value) for name, value in options.items()}
        query = df.writeStream.format("asyncproducer").options(**given)
        query = query.option("checkpointLocation", str(self.checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()

    def forget(self, batch: int) -> None:
        """Spark will run this batch again, as if the driver had died before its last word."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink()

    def written(self) -> list[int]:
        """What counts in the target, sorted."""
        options = {
            "kafka.bootstrap.servers": self.servers,
            "subscribe": self.target,
            "kafka.isolation.level": "read_committed",
        }
        rows = self.spark.read.format("kafka").options(**options).load().select("value").collect()
        return sorted(int(row.value) for row in rows)


@pytest.fixture
def pipe(spark: Any, kafka: KafkaCluster, tmp_path: Path) -> Pipe:
    return Pipe(spark, kafka, tmp_path / "checkpoint")


def test_what_was_read_is_written_once_though_batches_are_replayed(pipe: Pipe) -> None:
    options = {"delivery": "exactly_once", "marker": "source", "sink_id": pipe.target}
    for n in range(2):
        pipe.fill(n * 1000, n * 1000 + 1000)
        pipe.run(pipe.read(), **options)
        pipe.forget(n)
        pipe.run(pipe.read(), **options)
        assert pipe.written() == list(range(n * 1000 + 1000))


def test_groups_are_written_once_though_batches_are_replayed(pipe: Pipe) -> None:
    from asyncproducer.spark import by_kafka_partition

    options = {"delivery": "exactly_once", "tasks": 2, "sink_id": pipe.target}
    for n in range(2):
        pipe.fill(n * 1000, n * 1000 + 1000)
        df = pipe.read().select("key", "value")
        pipe.run(by_kafka_partition(df, tasks=2, partitions=3), **options)
        pipe.forget(n)
        pipe.run(by_kafka_partition(df, tasks=2, partitions=3), **options)
        assert pipe.written() == list(range(n * 1000 + 1000))


def test_partitions_that_are_added_stop_a_replay_and_come_with_the_next_batch(
    pipe: Pipe,
) -> None:
    from pyspark.errors import StreamingQueryException

    from asyncproducer.spark import by_kafka_partition

    def run(**more: Any) -> None:
        options = {"delivery": "exactly_once", "tasks": 2, "sink_id": pipe.target}
        df = by_kafka_partition(
            pipe.read().select("key", "value"),
            tasks=2,
            partitions=more.pop("partitions", None),
            topic=pipe.target,
            bootstrap_servers=pipe.servers,
        )
        pipe.run(df, **options, **more)

    pipe.fill(0, 1000)
    run()
    pipe.forget(0)
    admin = AdminClient({"bootstrap.servers": pipe.servers})
    (created,) = admin.create_partitions([NewPartitions(pipe.target, 5)]).values()
    created.result(30)
    with pytest.raises(StreamingQueryException, match="one of 3 partitions in batch 0, and now"):
        run()
    run(partitions=3)
    pipe.fill(1000, 2000)
    run(adopt=1)
    pipe.fill(2000, 3000)
    run()
    assert pipe.written() == list(range(3000))


def test_at_least_once_a_replayed_batch_is_there_twice(pipe: Pipe) -> None:
    """Else the tests above would show nothing."""
    pipe.fill(0, 1000)
    pipe.run(pipe.read())
    pipe.forget(0)
    pipe.run(pipe.read())
    assert pipe.written() == sorted([*range(1000)] * 2)


def test_a_partition_that_is_read_by_two_tasks_stops_the_query(pipe: Pipe) -> None:
    from pyspark.errors import StreamingQueryException

    pipe.fill(0, 1000)
    split = pipe.spark.readStream.format("kafka").options(
        **{
            "kafka.bootstrap.servers": pipe.servers,
            "subscribe": pipe.source,
            "startingOffsets": "earliest",
            "minPartitions": "6",
        }
    )
    df = split.load().selectExpr(
        "value", "topic as __topic", "partition as __partition", "offset as __offset"
    )
    options = {"delivery": "exactly_once", "marker": "source", "sink_id": pipe.target}
    with pytest.raises(StreamingQueryException, match="minPartitions"):
        pipe.run(df, **options)


def test_the_union_of_two_parts_of_a_stream_stops_and_so_does_the_mended_query(pipe: Pipe) -> None:
    from pyspark.errors import StreamingQueryException

    pipe.fill(0, 1000)
    df = pipe.read()
    options = {"delivery": "exactly_once", "marker": "source", "sink_id": pipe.target}
    number = "int(string(value))"
    shared = df.where(f"{number} % 3 > 0").union(df.where(f"{number} % 3 = 0"))
    # Spark itself refuses another number of sources, so it is still a union.
    mended = df.where(f"{number} >= 0").union(df.where(f"{number} < 0"))
    for query in (shared, mended):
        with pytest.raises(StreamingQueryException, match=r"several Spark partitions|have rows of"):
            pipe.run(query, **options)
        assert 0 < len(pipe.written()) < 1000


@pytest.mark.parametrize("marker", ["group", "source"])
def test_rows_that_end_early_are_no_unit(pipe: Pipe, tmp_path: Path, marker: str) -> None:
    """What makes them fails behind some: Spark closes their stream, as if that were all."""
    from pyspark.sql.functions import udf

    from asyncproducer.spark import by_kafka_partition

    flag = tmp_path / "fail"
    flag.touch()
    path = str(flag)

    def failing(value: str) -> str:
        import os

        if value == "29999" and os.path.exists(path):
            raise ValueError("the last row")
        return value

    made = udf(failing, "string")("value").alias("value")
    rows = pipe.spark.range(0, 30_000, 1, 1).selectExpr("string(id) key", "string(id) value")
    if marker == "group":
        rows = by_kafka_partition(rows, tasks=1, partitions=3)
        rows = rows.select("key", made, "partition")
    else:
        place = (f"'{pipe.source}' __topic", "0 __partition", "bigint(value) __offset")
        rows = rows.selectExpr("key", "value", *place)
        rows = rows.select("key", made, "__topic", "__partition", "__offset")
    options = {
        "kafka.bootstrap.servers": pipe.servers,
        "topic": pipe.target,
        "delivery": "exactly_once",
        "sink.id": f"early-{pipe.target}",
        "job.id": "1",
    }
    options |= {"tasks": "1"} if marker == "group" else {"marker": "source"}
    job = rows.write.format("asyncproducer").mode("append").options(**options)
    with pytest.raises(Exception, match="the last row"):
        job.save()
    assert pipe.written() == []
    flag.unlink()
    job.save()
    assert pipe.written() == [*range(30_000)]
