"""The jars with which Spark reads Kafka, for tests and for machines without Maven."""

from __future__ import annotations

from pathlib import Path

__all__ = ["connector_jars"]

#: Each one without its dependencies: pyspark brings the others. Seen to work with pyspark 4.2, 4.3.
_COORDINATES = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


def connector_jars() -> list[Path]:
    """Spark's Kafka connector, for `spark.jars`: downloaded once by jgo, which keeps it.

    Blocks for some seconds the first time. Elsewhere `spark.jars.packages` with the connector's
    coordinate does the same. Raises ImportError without jgo (`asyncproducer[kafka]`).
    """
    from jgo.maven import MavenContext

    context = MavenContext()
    jars = []
    for coordinate in _COORDINATES:
        group, artifact, version = coordinate.split(":")
        jars.append(context.project(group, artifact).at_version(version).artifact().resolve())
    return jars
