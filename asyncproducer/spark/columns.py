"""The columns of a DataFrame: those of Spark's own Kafka sink, and where the rows came from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncproducer.errors import ConfigError
from asyncproducer.spark.options import Keying, SinkOptions

__all__ = [
    "OFFSET",
    "OFFSET_BITS",
    "ORIGIN",
    "PARTITIONS",
    "PLACES",
    "SOURCE_PARTITION",
    "SOURCE_TOPIC",
    "TASKS",
    "TOPICS",
    "SinkColumns",
]

#: Where a row was read, for Keying.SOURCE.
SOURCE_TOPIC, SOURCE_PARTITION, OFFSET = "__topic", "__partition", "__offset"

#: The same as one number that `origin` has made: 15 bits for the partition (times how many topics
#: there are, plus which of them it is), then the offset. The topics are in its metadata.
ORIGIN, TOPICS = "__origin", "asyncproducer.topics"
OFFSET_BITS = 48
PLACES = 1 << 15

#: What by_kafka_partition leaves in the metadata of the column `partition`: of how many partitions
#: it has chosen, and its `tasks`.
PARTITIONS, TASKS = "asyncproducer.partitions", "asyncproducer.tasks"

_BYTES = ("string", "binary")
_HEADERS = ("array<struct<key:string,value:binary>>",)
#: Each column that we know, and Spark's types for it.
_TYPES: Mapping[str, tuple[str, ...]] = {
    "value": _BYTES,
    "key": _BYTES,
    "topic": ("string",),
    "partition": ("int", "bigint"),
    "timestamp": ("timestamp", "timestamp_ntz", "bigint"),
    "headers": _HEADERS,
    SOURCE_TOPIC: ("string",),
    SOURCE_PARTITION: ("int",),
    OFFSET: ("bigint",),
    ORIGIN: ("bigint",),
}


@dataclass(frozen=True)
class SinkColumns:
    """Which of them there are, by the names that they have. `of` makes it."""

    value: str
    key: str | None = None
    topic: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    headers: str | None = None
    source_topic: str | None = None
    source_partition: str | None = None
    offset: str | None = None
    origin: str | None = None
    #: Of which `origin` tells, in its order.
    topics: tuple[str, ...] = ()
    #: Of how many `partition` was chosen by the key; 0 if somebody else has chosen.
    partitions: int = 0

    @classmethod
    def of(cls, schema: Any, options: SinkOptions) -> SinkColumns:
        """Check a StructType. Raises ConfigError, which says what to change."""
        found: dict[str, str] = {}
        partitions = tasks = 0
        topics: tuple[str, ...] = ()
        for column in schema.fields:
            name, kind = column.name.lower(), column.dataType.simpleString()
            if name not in _TYPES:
                near = difflib.get_close_matches(name, _TYPES, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"the sink has no column {column.name!r}{hint}: select only those of "
                    f"{', '.join(_TYPES)}"
                )
            if name in found:
                raise ConfigError(f"two columns are called {name!r}: select one of them")
            if kind not in _TYPES[name]:
                if name == "headers":
                    advice = "make it an array of structs with the fields key and value"
                elif "binary" in _TYPES[name] and kind.startswith(("struct<", "array<", "map<")):
                    advice = f"make it text: to_json({column.name}).alias({name!r})"
                else:
                    advice = f"cast it: {column.name}.cast({_TYPES[name][0]!r})"
                raise ConfigError(
                    f"the column {column.name!r} is of type {kind}, it must be "
                    f"{' or '.join(_TYPES[name])}: {advice}"
                )
            found[name] = column.name
            metadata = column.metadata or {}
            if name == ORIGIN:
                topics = tuple(metadata.get(TOPICS, ()))
            if name == "partition":
                partitions, tasks = (int(metadata.get(each, 0)) for each in (PARTITIONS, TASKS))
        if "value" not in found:
            raise ConfigError(
                f"there is no column 'value', only {', '.join(map(repr, schema.names)) or 'none'}: "
                "select one as value, for example to_json(struct('*')).alias('value')"
            )
        if options.topic is None and "topic" not in found:
            raise ConfigError("where do the rows go? Give the option topic, or a column topic")
        _check_keying(found, options, tasks, topics)
        return cls(
            value=found["value"],
            key=found.get("key"),
            # As in Spark's own sink, the option is stronger.
            topic=None if options.topic else found["topic"],
            partition=found.get("partition"),
            timestamp=found.get("timestamp"),
            headers=found.get("headers"),
            source_topic=found.get(SOURCE_TOPIC),
            source_partition=found.get(SOURCE_PARTITION),
            offset=found.get(OFFSET),
            origin=found.get(ORIGIN),
            topics=topics,
            partitions=partitions,
        )

    def of_table(self) -> dict[str, str | None]:
        """What `send_table` is told of them."""
        return {
            "value": self.value,
            "key": self.key,
            "headers": self.headers,
            "partition": self.partition,
            "timestamp": self.timestamp,
            "topic_column": self.topic or "topic",
        }


def _check_keying(
    found: Mapping[str, str], options: SinkOptions, tasks: int, topics: Sequence[str]
) -> None:
    if options.keying is Keying.SOURCE:
        _check_source(found, topics)
    if options.keying is not Keying.GROUP:
        return
    if "partition" not in found:
        raise ConfigError(
            "marker=group needs the column partition, which says in which Spark partition a row "
            "belongs: write asyncproducer.spark.by_kafka_partition(df, ...) instead of df"
        )
    if not tasks:
        raise ConfigError(
            "marker=group: the column partition is not as by_kafka_partition has left it, so rows "
            "may be in any Spark partition: write what "
            f"asyncproducer.spark.by_kafka_partition(df, tasks={options.tasks}, ...) returns, with "
            "nothing between (a column partition of your own is kept)"
        )
    if tasks != options.tasks:
        raise ConfigError(
            f"tasks={options.tasks}, and by_kafka_partition was given tasks={tasks}: give the sink "
            "the same number"
        )


def _check_source(found: Mapping[str, str], topics: Sequence[str]) -> None:
    three = (SOURCE_TOPIC, SOURCE_PARTITION, OFFSET)
    missing = [name for name in three if name not in found]
    if ORIGIN not in found:
        if missing:
            raise ConfigError(
                f"marker=source needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}: "
                "select topic, partition and offset of the source under these names (or, as one "
                f"column {ORIGIN}, asyncproducer.spark.origin(<the topics that are read>)), and "
                "keep them up to the sink; or use marker=group"
            )
        return
    if len(missing) < len(three):
        raise ConfigError(
            f"the column {ORIGIN} says where a row was read, and so do {', '.join(three)}: drop "
            "one or the other"
        )
    if not topics:
        raise ConfigError(
            f"the column {ORIGIN!r} does not say of which topics it tells: select what "
            "asyncproducer.spark.origin(<the topics that are read>) returns. If a function in "
            "Python comes after it (mapInArrow, mapInPandas), keep topic, partition and offset as "
            f"{', '.join(three)} instead"
        )
