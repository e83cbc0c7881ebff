"""The rows of Spark's Kafka source as `audit_records`: decoded once, with numpy."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pyspark.sql import functions as F

from asyncproducer.spark.audit.columns import Bools, Longs, Stamps, decode, decode_traces
from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.stamps import HEADER, TRACE_HEADER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Kind", "SourceError", "audit_records"]


class SourceError(ValueError):
    """The input is not what the Kafka source gives; the message says what is missing."""


class Kind(enum.IntEnum):
    """Whether a record takes part. Only of COUNTED ones run, lane and so on are not null."""

    #: It has a stamp of a run that is audited.
    COUNTED = 0
    #: It has a stamp that holds, of another run.
    OTHER_RUN = 1
    #: It has no stamp that holds.
    UNSTAMPED = 2


#: What the Kafka source gives, but for the headers, which need includeHeaders.
_NEEDED = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")

_SCHEMA = (
    "run long, lane long, seq long, topic string, partition int, offset long, append_us long,"
    " ts_type int, send_us long, key_hash long, bytes long, crc_ok boolean, producer_batch long,"
    " kind byte"
)
_TRACE = ", trace array<struct<stage: string, in_us: long, out_us: long>>"


def audit_records(frame: DataFrame, entries: Sequence[Entry]) -> DataFrame:
    """The table `audit_records`, not computed yet.

    `frame`: the columns of Spark's Kafka source, from wherever; with `headers`, stamps and traces
    in headers are read. `entries`: the ledger, empty if there is none. Raises SourceError.
    """
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise SourceError(
            f"the input has no column {', '.join(missing)}: it must have those of Spark's Kafka "
            f"source ({', '.join(_NEEDED)}; headers if there are any)"
        )
    # (Parquet that somebody else wrote may have wider numbers, and text.)
    shipped = [
        "topic",
        F.col("partition").cast("int"),
        F.col("offset").cast("long"),
        F.unix_micros("timestamp").alias("append_us"),
        F.col("timestampType").cast("int").alias("ts_type"),
        F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key_hash"),
        F.col("value").cast("binary"),
    ]
    with_headers = "headers" in frame.columns
    if with_headers:
        shipped += [
            F.expr(f"get(filter(headers, h -> h.key = '{HEADER}'), 0).value").alias("stamp"),
            F.expr(
                f"transform(filter(headers, h -> h.key = '{TRACE_HEADER}'), h -> h.value)"
            ).alias("trace"),
        ]
    schema = _SCHEMA + _TRACE * with_headers
    return frame.select(*shipped).mapInArrow(_Decoder(entries), schema)


class _Decoder:
    """Batches of what is shipped to batches of `audit_records`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._runs = np.array(sorted({entry.run for entry in entries}), np.int64)
        self._lanes = np.array(sorted({_lane(entry) for entry in entries}), np.uint64)
        self._batches = _batch_ranges(entries)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield self._decode(batch)

    def _decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        headers = "stamp" in batch.schema.names
        stamps = decode(batch["value"], batch["stamp"] if headers else None)
        kind = self._kinds(stamps)
        others = kind != Kind.COUNTED

        def counted(values: Any) -> pa.Array:
            return pa.array(values, mask=others)

        columns: dict[str, Any] = {
            "run": counted(stamps.run),
            "lane": counted(stamps.lane),
            "seq": counted(stamps.seq),
            **{name: batch[name] for name in ("topic", "partition", "offset", "append_us")},
            "ts_type": batch["ts_type"],
            "send_us": counted(stamps.send_us),
            "key_hash": batch["key_hash"],
            "bytes": pa.array(stamps.size),
            "crc_ok": counted(stamps.crc_ok),
            "producer_batch": self._producer_batch(batch["topic"], stamps, others),
            "kind": pa.array(kind),
        }
        if headers:
            columns["trace"] = decode_traces(batch["trace"])
        return pa.RecordBatch.from_pydict(columns)

    def _kinds(self, stamps: Stamps) -> Any:
        if len(self._runs):
            known = np.isin(stamps.run, self._runs)
            named = stamps.found & known & np.isin(_lanes(stamps), self._lanes)
            counted = named | (stamps.crc_ok & known)
        else:
            counted = stamps.crc_ok  # nothing else tells a stamp from other bytes
        kind = np.where(stamps.crc_ok, Kind.OTHER_RUN, Kind.UNSTAMPED)
        return np.where(counted, Kind.COUNTED, kind).astype(np.int8)

    def _producer_batch(self, topics: pa.Array, stamps: Stamps, others: Bools) -> pa.Array:
        rows = len(others)
        found = np.zeros(rows, np.int64)
        unknown = np.ones(rows, np.bool_)
        if self._batches:
            named = topics.dictionary_encode()
            codes = named.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            lanes, places = np.unique(_lanes(stamps), return_inverse=True)
            pairs = codes * len(lanes) + places
            for pair in np.unique(pairs[~others]).tolist():
                topic = named.dictionary[pair // len(lanes)].as_py()
                ranges = self._batches.get((topic, int(lanes[pair % len(lanes)])))
                if ranges is None:
                    continue
                first, last, ids = ranges
                rows_of = np.flatnonzero(pairs == pair)
                seqs = stamps.seq[rows_of]
                at = np.searchsorted(first, seqs, "right") - 1
                within = (at >= 0) & (seqs <= last[at])
                found[rows_of] = ids[at]
                unknown[rows_of[within]] = False
        return pa.array(found, mask=unknown | others)


def _lane(entry: Entry) -> int:
    return entry.run << 32 | entry.lane


def _lanes(stamps: Stamps) -> Any:
    return (stamps.run << 32 | stamps.lane).astype(np.uint64)


def _batch_ranges(entries: Sequence[Entry]) -> dict[tuple[str, int], tuple[Longs, Longs, Longs]]:
    """First and last number and id of the batches of each topic and lane, ascending."""
    ranges: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for entry in entries:
        if entry.batch_id is not None and entry.attempted:
            ranges[entry.topic, _lane(entry)].append(
                (entry.first_seq, entry.last_seq, entry.batch_id)
            )
    return {
        lane: (table[:, 0], table[:, 1], table[:, 2])
        for lane, found in ranges.items()
        for table in [np.array(sorted(found), np.int64)]
    }
