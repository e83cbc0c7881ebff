"""What was found against what was to be found, exactly, 32,768 numbers at a time. No Spark here.

A bucket is that many numbers of one lane; its bitmap has bit n & 7 of byte n >> 3 for the n-th of
them, as Spark's bitmap_construct_agg makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from asyncproducer.spark.audit.columns import Bools, Longs
from asyncproducer.spark.audit.ledger import Entry

__all__ = ["BUCKET", "BUCKET_BITS", "SCHEMA", "Books", "Judge", "Lane", "bucket_rows"]

BUCKET_BITS = 15
BUCKET = 1 << BUCKET_BITS

#: Buckets that one row of Spark's may be made into: they are in memory together.
_STRETCH = 1 << 16

#: Target, run, lane.
Lane: TypeAlias = tuple[str, int, int]


class _Rows(NamedTuple):
    """The entries of a lane; `first` and `last` of each for a quick search."""

    first: Longs
    last: Longs
    entries: list[Entry]


class Books:
    """The ledger by lane."""

    def __init__(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """`entries`: each one with the target that it belongs to."""
        lanes: dict[Lane, list[Entry]] = defaultdict(list)
        for target, entry in entries:
            lanes[target, entry.run, entry.lane].append(entry)
        self.lanes = {
            lane: _Rows(
                np.array([entry.first_seq for entry in found]),
                np.array([entry.last_seq for entry in found]),
                found,
            )
            for lane, found in lanes.items()
        }

    def buckets(self) -> Iterator[tuple[Lane, int, int]]:
        """The first and the last bucket of each stretch of a lane's entries, `_STRETCH` at most."""
        for lane, first, last in self._stretches():
            for begin in range(first, last + 1, _STRETCH):
                yield lane, begin, min(begin + _STRETCH - 1, last)

    def _stretches(self) -> Iterator[tuple[Lane, int, int]]:
        for lane, rows in self.lanes.items():
            firsts, lasts = rows.first >> BUCKET_BITS, rows.last >> BUCKET_BITS
            end = None
            first = 0
            for begin, until in sorted(zip(firsts.tolist(), lasts.tolist(), strict=True)):
                if end is not None and begin > end + 1:
                    yield lane, first, end
                    end = None
                if end is None:
                    first, end = begin, until
                end = max(end, until)
            if end is not None:
                yield lane, first, end

    def expected(self, lane: Lane, bucket: int) -> tuple[Bools, Bools]:
        """Which numbers of a bucket are acknowledged, and which are in doubt."""
        acked, doubt = np.zeros(BUCKET, np.bool_), np.zeros(BUCKET, np.bool_)
        rows = self.lanes.get(lane)
        if rows is None:
            return acked, doubt
        begin = bucket << BUCKET_BITS
        for at in np.flatnonzero((rows.first < begin + BUCKET) & (rows.last >= begin)).tolist():
            entry = rows.entries[at]
            told = np.zeros(BUCKET, np.bool_)
            _fill(told, begin, ((entry.first_seq, entry.last_seq),), True)
            _fill(told, begin, entry.failed + entry.in_doubt, False)
            acked |= told
            _fill(doubt, begin, entry.in_doubt, True)
        return acked, doubt & ~acked


def _fill(mask: Bools, begin: int, ranges: Iterable[tuple[int, int]], value: bool) -> None:
    for first, last in ranges:
        if first < begin + BUCKET and last >= begin:
            mask[max(0, first - begin) : last - begin + 1] = value


def _bits(bitmap: bytes | None) -> Bools:
    if bitmap is None:
        return np.zeros(BUCKET, np.bool_)
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").view(np.bool_)


def _gaps(lost: Bools, present: Longs, begin: int) -> list[dict[str, int | None]]:
    """Ranges of lost numbers, and the nearest numbers of the bucket that are present."""
    edges = np.flatnonzero(np.diff(lost, prepend=False, append=False)).reshape(-1, 2)
    places = np.searchsorted(present, edges[:, 0])
    # The last one stands for "none": index -1 and the index behind all others hit it.
    nearest: list[int | None] = [*(present + begin).tolist(), None]
    return [
        {
            "first": begin + first,
            "last": begin + end - 1,
            "before": nearest[place - 1],
            "after": nearest[place],
        }
        for (first, end), place in zip(edges.tolist(), places.tolist(), strict=True)
    ]


_LONGS = ["run", "lane", "bucket", "records", "distinct", "acked", "lost", "duplicates", "phantom"]
_LONGS += ["in_doubt", "in_doubt_present", "corrupt"]
_LONGS += ["first_send_us", "last_send_us", "first_present", "last_present"]

_GAP = ("first", "last", "before", "after")

#: What `bucket_rows` makes, for Spark and for Arrow.
SCHEMA = (
    f"target string, {', '.join(f'`{name}` long' for name in _LONGS)},"
    f" gaps array<struct<{', '.join(f'{name}: long' for name in _GAP)}>>"
)
_ARROW = pa.schema(
    [
        ("target", pa.string()),
        *((name, pa.int64()) for name in _LONGS),
        ("gaps", pa.list_(pa.struct([(name, pa.int64()) for name in _GAP]))),
    ]
)


def bucket_rows(row: Mapping[str, Any], books: Books, partial: bool) -> dict[str, Any]:
    """Judges one bucket.

    `row`: target, run, lane, bucket; seen (bitmap), records, corrupt, first_send_us, last_send_us
    of what was found, null if nothing was; expected (bitmap) of a target that must hold what other
    topics hold. `partial`: what is not there is not lost.
    """
    lane = (row["target"], row["run"], row["lane"])
    begin = row["bucket"] << BUCKET_BITS
    seen = _bits(row["seen"])
    if row["expected"] is not None:
        acked, doubt = _bits(row["expected"]), np.zeros(BUCKET, np.bool_)
    else:
        acked, doubt = books.expected(lane, row["bucket"])
    lost = acked & ~seen
    if partial:
        lost[:] = False
    present = np.flatnonzero(seen)
    records = row["records"] or 0
    return {
        "target": row["target"],
        "run": row["run"],
        "lane": row["lane"],
        "bucket": row["bucket"],
        "records": records,
        "distinct": len(present),
        "acked": int(acked.sum()),
        "lost": int(lost.sum()),
        "duplicates": records - len(present),
        "phantom": int((seen & ~acked & ~doubt).sum()),
        "in_doubt": int(doubt.sum()),
        "in_doubt_present": int((seen & doubt).sum()),
        "corrupt": row["corrupt"] or 0,
        "first_send_us": row["first_send_us"],
        "last_send_us": row["last_send_us"],
        "first_present": begin + int(present[0]) if len(present) else None,
        "last_present": begin + int(present[-1]) if len(present) else None,
        "gaps": _gaps(lost, present, begin),
    }


class Judge:
    """`bucket_rows` for mapInArrow."""

    def __init__(self, books: Books, partial: frozenset[str]) -> None:
        self._books = books
        self._partial = partial

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What Spark calls."""
        for batch in batches:
            rows = [
                bucket_rows(row, self._books, row["target"] in self._partial)
                for row in batch.to_pylist()
            ]
            yield pa.RecordBatch.from_pylist(rows, _ARROW)
