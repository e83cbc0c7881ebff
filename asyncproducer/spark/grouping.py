"""Rows to the Spark partition that delivers them, for exactly-once delivery by groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType

from asyncproducer.producer import Producer
from asyncproducer.spark.columns import PARTITIONS, TASKS
from asyncproducer.spark.exchange import hasten
from asyncproducer.spark.routing import partitions_of
from asyncproducer.spark.worker import worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["by_kafka_partition"]


def by_kafka_partition(
    df: DataFrame,
    *,
    tasks: int,
    partitions: int | None = None,
    topic: str | None = None,
    bootstrap_servers: str | None = None,
    **options: Any,
) -> DataFrame:
    """The rows with a column `partition`, each in Spark partition `partition % tasks`.

    For `delivery=exactly_once` with `marker=group`; give the sink the same `tasks`, and nothing
    between this and the sink. A column `partition` that is there already is kept. Else it is
    Kafka's own of `key` (murmur2); where there is none, or null, one by `value`, so that the same
    row always has the same. The number of `partitions` is given, or asked of the `topic` (with the
    producer's `options`), once: more partitions later get nothing until the query is started anew.
    Then the sink stops and says how to go on: with `partitions` as they were, or with more of them
    from a batch on of which nothing is written.

    `tasks` belongs to the sink's identity: it cannot change under one `sink.id`.

    Blocks while it asks. Raises ValueError; KafkaError if the topic cannot be asked.
    """
    if tasks < 1:
        raise ValueError(f"tasks={tasks}: at least one task must deliver the rows")
    # The sink takes its columns in any case, and so does Spark.
    columns = {name.lower(): name for name in df.columns}
    if "partition" not in columns:
        if partitions is None:
            if topic is None or bootstrap_servers is None:
                raise ValueError(
                    "how many partitions has the topic? Give partitions, or topic and "
                    "bootstrap_servers to ask"
                )
            # In a thread of its own: the caller's may have a running loop (notebooks do).
            partitions = worker().run(_count(topic, bootstrap_servers, options))
        if partitions < 1:
            raise ValueError(f"partitions={partitions}: a topic has at least one")
        value = F.col(columns.get("value", "value")).cast("binary")
        # Spark's own hash: without keys, no row has to go to Python for it.
        chosen = F.pmod(F.xxhash64(value), F.lit(partitions)).cast("int")
        if "key" in columns:
            key = F.col(columns["key"]).cast("binary")
            chosen = F.when(key.isNull(), chosen).otherwise(_partition_of(partitions)(key))
        df = df.withColumn("partition", chosen)
        told = {PARTITIONS: partitions}
        placed = "partition"
    else:
        placed = columns["partition"]
        told = df.schema[placed].metadata
    df = df.withMetadata(placed, {**told, TASKS: tasks})
    group = F.pmod(F.col(placed), F.lit(tasks))
    return df.repartitionById(tasks, group.cast("int"))


async def _count(topic: str, bootstrap_servers: str, options: dict[str, Any]) -> int:
    async with Producer(bootstrap_servers, **options) as producer:
        return len(await producer.partitions_for(topic))


def _partition_of(partitions: int) -> Any:
    import pyarrow

    # Of an iterator, which is here before the first rows are.
    def partition_of(columns: Iterator[pyarrow.Array]) -> Iterator[pyarrow.Array]:
        hasten()
        for column in columns:
            yield partitions_of(column.fill_null(b""), partitions)

    # Spark reads the annotations, which are text here.
    arrays = Iterator[pyarrow.Array]
    partition_of.__annotations__ = {"columns": arrays, "return": arrays}
    return F.arrow_udf(partition_of, IntegerType())
