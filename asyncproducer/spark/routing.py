"""Kafka's own partition of keys, in the Python workers in which Spark asks for it."""

from __future__ import annotations

from typing import Any

import numpy
import pyarrow

from asyncproducer.arrow import murmur2_of
from asyncproducer.spark.kept import freeze

__all__ = ["partitions_of"]


def partitions_of(column: Any, partitions: int) -> Any:
    """An Arrow array of text or bytes, without null, as one of partitions (int32)."""
    hashes = numpy.asarray(murmur2_of(column))
    chosen = pyarrow.array((hashes & 0x7FFFFFFF) % partitions, pyarrow.int32())
    freeze()
    return chosen


freeze()
