"""The jars with which Spark reads Kafka, for tests and for machines without Maven."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CONNECTOR", "connector_jars", "connector_version"]

#: Without its version.
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
#: Its version, by what pyspark's begins with. That of 4.2 runs with 4.3, too, but not with 4.1
#: (NoSuchMethodError), with which 4.1.0 fails as well (a NullPointerException for each batch).
_VERSIONS = {"4.1.": "4.1.3"}
_NEWEST = "4.2.0"

#: What it needs beside. Each jar without its dependencies: pyspark brings the others.
_COORDINATES = (
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


def connector_jars() -> list[Path]:
    """Spark's Kafka connector for the pyspark that is here, for `spark.jars`.

    Downloaded once by jgo, which keeps it: blocks for some seconds the first time. Elsewhere
    `spark.jars.packages` with the connector's coordinate does the same. Raises ImportError without
    pyspark or jgo (`asyncproducer[spark,kafka]`).
    """
    import pyspark
    from jgo.maven import MavenContext

    context = MavenContext()
    jars = []
    connector = f"{CONNECTOR}:{connector_version(pyspark.__version__)}"
    for coordinate in (connector, *_COORDINATES):
        group, artifact, version = coordinate.split(":")
        jars.append(context.project(group, artifact).at_version(version).artifact().resolve())
    return jars


def connector_version(pyspark: str) -> str:
    """Of the connector that runs with such a pyspark."""
    return next((v for begin, v in _VERSIONS.items() if pyspark.startswith(begin)), _NEWEST)
