"""Apache Spark: a sink for DataFrames, at least once or exactly once. Needs the extra `spark`.

    df.write.format("asyncproducer").mode("append") \\
        .options(**{"kafka.bootstrap.servers": "localhost:9092", "topic": "orders"}).save()

Spark finds the format by itself where this package is installed, on the driver and on all
executors. `register(spark)` is for what it cannot find: a module that is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncproducer.spark.grouping import by_kafka_partition
    from asyncproducer.spark.origins import origin
    from asyncproducer.spark.source import DefaultSource, check, register

__all__ = ["DefaultSource", "by_kafka_partition", "check", "origin", "register"]

_MODULES = {
    "DefaultSource": "source",
    "by_kafka_partition": "grouping",
    "check": "source",
    "origin": "origins",
    "register": "source",
}


def __getattr__(name: str) -> Any:
    # pyspark takes a second to import, and the rules need none of it.
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
