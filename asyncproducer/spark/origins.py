"""Where a row was read, as one number, for exactly-once delivery by sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from asyncproducer.spark.columns import OFFSET_BITS, ORIGIN, PLACES, TOPICS

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["origin"]


def origin(*topics: str) -> Column:
    """A column `__origin`: which of `topics` a row was read from, its partition and its offset.

    For `delivery=exactly_once` with `marker=source`. It is made of the columns `topic`, `partition`
    and `offset` of Spark's Kafka source, and does what they do as `__topic`, `__partition` and
    `__offset`: a row of 100 bytes costs less so, since each column from the JVM costs.

    The sink refuses rows of any other topic, and those that a number has no room for: offsets from
    2**48 on, and partitions from 32768 / len(topics) on. The names are in the column's metadata,
    which a function in Python (mapInArrow, mapInPandas) does not keep: behind one of these, take
    the three columns. A query may change from one to the other, and name further topics behind
    those that it had, or others.

    Raises ValueError.
    """
    if not topics or not all(isinstance(each, str) and each for each in topics):
        raise ValueError(f"origin{topics!r}: give it the names of the topics that are read")
    if len(set(topics)) < len(topics):
        raise ValueError(f"origin{topics!r}: each topic once")
    number = F.lit(None).cast("bigint")
    for n, topic in reversed(list(enumerate(topics))):
        number = F.when(F.col("topic") == topic, F.lit(n).cast("bigint")).otherwise(number)
    # Null for what it has no room for: the sink says so, and nothing is written.
    place = F.col("partition").cast("bigint") * len(topics) + number
    fits = (place < PLACES) & (F.col("offset") < 1 << OFFSET_BITS)
    packed = F.when(fits, F.shiftleft(place, OFFSET_BITS).bitwiseOR(F.col("offset")))
    return packed.alias(ORIGIN, metadata={TOPICS: list(topics)})
