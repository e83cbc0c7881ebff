"""A stage's rule on Arrow batches: what Spark's Kafka source reads, what the sink writes.

The audit's stamp goes along with each order in the header `apx`, and each stage adds a header
`apx-trace`. Where a stage has changed the value, the stamp gets the new value's checksum; unless
the old one did not hold: then it stays as it is, so that the audit sees the damage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute

from asyncproducer.spark.audit.stamps import (
    HEADER,
    TRACE_HEADER,
    Stamp,
    encode_stamp,
    encode_trace,
    read_stamp,
)
from orders_pipeline.orders import Codec
from orders_pipeline.rules import Result, Rule

__all__ = ["ERROR_HEADER", "SCHEMA", "Envelope", "Work", "envelopes", "headers_array"]

ERROR_HEADER = "error"

#: What the sink wants with marker=source, for Spark; and when the order was stamped, for the view.
SCHEMA = (
    "key binary, value binary, topic string, headers array<struct<key: string, value: binary>>,"
    " __topic string, __partition int, __offset long, age_us long"
)

Header: TypeAlias = tuple[str, bytes | None]
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Envelope(NamedTuple):
    """What is around the value of a record."""

    stamp: Stamp | None
    #: The stamp as it came.
    sealed: bytes | None
    others: tuple[Header, ...]

    def seal(self, before: bytes | None, after: bytes | None) -> bytes | None:
        """The stamp of the value that a stage has made."""
        if self.stamp is None or before == after or not self.stamp.holds(before or b""):
            return self.sealed
        return encode_stamp(*self.stamp[:4], after or b"")


def envelopes(column: pa.Array) -> list[Envelope]:
    """Of each record, from its column of headers."""
    lengths = pa.compute.list_value_length(column).fill_null(0).to_pylist()
    flat = column.flatten()
    headers = zip(flat.field(0).to_pylist(), flat.field(1).to_pylist(), strict=True)
    return [_envelope([next(headers) for _ in range(length)]) for length in lengths]


def _envelope(headers: list[Header]) -> Envelope:
    sealed = next((value for name, value in headers if name == HEADER), None)
    others = tuple(header for header in headers if header[0] != HEADER)
    try:
        stamp = read_stamp(sealed or b"")
    except ValueError:
        stamp = None
    return Envelope(stamp, sealed, others)


def headers_array(rows: list[list[Header]]) -> pa.Array:
    """The column of headers, which is made much faster of flat lists than of nested ones."""
    places = [0]
    for row in rows:
        places.append(places[-1] + len(row))
    items = pa.StructArray.from_arrays(
        [
            pa.array([name for row in rows for name, _ in row], pa.string()),
            pa.array([value for row in rows for _, value in row], pa.binary()),
        ],
        fields=list(_HEADERS.value_type),
    )
    return pa.ListArray.from_arrays(pa.array(places, pa.int32()), items).cast(_HEADERS)


@dataclass(frozen=True)
class Work:
    """What `mapInArrow` calls in the worker processes. Picklable."""

    stage: str
    rule: Rule
    codec: Codec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batch for batch, so that the rows stay in order."""
        for batch in batches:
            if batch.num_rows:
                yield self.do(batch)

    def do(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One batch with the columns of Spark's Kafka source to one with those of SCHEMA."""
        in_us = _now_us()
        values = batch["value"].to_pylist()
        around = envelopes(batch["headers"])
        results = self.rule(self.codec, values)
        out_us = _now_us()
        trace = (TRACE_HEADER, encode_trace(self.stage, in_us, out_us))
        rows = pa.array([each.row for each in results], pa.int64())
        stamps = [around[each.row].stamp for each in results]
        columns = {
            "key": batch["key"].take(rows),
            "value": pa.array([each.value for each in results], pa.binary()),
            "topic": pa.array([each.topic for each in results], pa.string()),
            "headers": headers_array(
                [_headers(each, values[each.row], around[each.row], trace) for each in results]
            ),
            "__topic": batch["topic"].take(rows),
            "__partition": batch["partition"].take(rows),
            "__offset": batch["offset"].take(rows),
            "age_us": pa.array(
                [None if stamp is None else out_us - stamp.send_us for stamp in stamps], pa.int64()
            ),
        }
        return pa.RecordBatch.from_pydict(columns)


def _headers(result: Result, before: bytes | None, around: Envelope, trace: Header) -> list[Header]:
    sealed = around.seal(before, result.value)
    headers: list[Header] = [] if sealed is None else [(HEADER, sealed)]
    headers += [*around.others, trace]
    if result.error is not None:
        headers.append((ERROR_HEADER, result.error.encode()))
    return headers


def _now_us() -> int:
    return time.time_ns() // 1000
