"""The writers' side of an audit: what each lane tried, and what it was told of it.

A ledger is one or more Parquet files with the columns of `SCHEMA`, one row for each lane and batch.
`attempted` numbers, `first_seq` to `last_seq`, went into `topic`. Those of `failed` are not in the
log by the writer's word, those of `in_doubt` may be or not, and all others were acknowledged.
Rows of one lane may overlap (a batch that was tried again): acknowledged once is acknowledged.

A stamped load keeps its books with `StampedLedger`; who counts by himself makes `Entry` objects.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet

from asyncproducer.spark.audit.stamps import MAX_LANE, MAX_SEQ, SIZE, encode_stamp
from asyncproducer.testing.ledger import Ledger, State

__all__ = ["DELIVERIES", "SCHEMA", "Entry", "LedgerError", "Range", "StampedLedger", "entries_of"]
__all__ += ["read_ledger", "write_ledger"]

#: First and last number, both included.
Range: TypeAlias = tuple[int, int]

#: What a writer may claim of its records.
DELIVERIES = ("exactly_once", "at_least_once", "at_most_once")

_RANGES = pa.list_(pa.struct([("first", pa.int64()), ("last", pa.int64())]))
SCHEMA = pa.schema(
    [
        ("run", pa.int64()),
        ("lane", pa.int64()),
        ("topic", pa.string()),
        ("attempted", pa.int64()),
        ("acked", pa.int64()),
        ("first_seq", pa.int64()),
        ("last_seq", pa.int64()),
        ("failed", _RANGES),
        ("in_doubt", _RANGES),
        ("delivery", pa.string()),
        ("ordered", pa.bool_()),
        ("config_hash", pa.string()),
        ("sink_id", pa.string()),
        ("batch_id", pa.int64()),
    ]
)


class LedgerError(ValueError):
    """A ledger that is not one, or that contradicts itself; the message says where."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What one lane wrote into one topic, all of it or one batch."""

    run: int
    lane: int
    topic: str
    first_seq: int
    #: Included; first_seq - 1 if nothing was tried.
    last_seq: int
    failed: tuple[Range, ...] = ()
    in_doubt: tuple[Range, ...] = ()
    #: One of DELIVERIES: what the records are held to.
    delivery: str = "exactly_once"
    #: Whether the numbers of the lane must ascend in each partition.
    ordered: bool = True
    config_hash: str = ""
    sink_id: str = ""
    #: Of the micro-batch, or of any unit that is written again as a whole; None: there is none.
    batch_id: int | None = None

    def __post_init__(self) -> None:
        where = f"run {self.run}, lane {self.lane}, topic {self.topic!r}"
        for name in ("run", "lane"):
            if not 0 <= getattr(self, name) <= MAX_LANE:
                raise LedgerError(f"{where}: {name} must be within 0 and {MAX_LANE}")
        if not 0 <= self.first_seq <= self.last_seq + 1 <= MAX_SEQ:
            raise LedgerError(f"{where}: {self.first_seq} to {self.last_seq} are no numbers")
        if self.delivery not in DELIVERIES:
            known = ", ".join(DELIVERIES)
            raise LedgerError(f"{where}: delivery is {self.delivery!r}, not one of {known}")
        end = self.first_seq - 1
        for first, last in sorted(self.failed + self.in_doubt):
            if not end < first <= last <= self.last_seq:
                raise LedgerError(
                    f"{where}: {first} to {last}, failed or in doubt, is outside of "
                    f"{self.first_seq} to {self.last_seq}, or overlaps another such range"
                )
            end = last

    @property
    def attempted(self) -> int:
        """How many records it tried."""
        return self.last_seq - self.first_seq + 1

    @property
    def acked(self) -> int:
        """How many of them must be in the log."""
        return self.attempted - _count(self.failed) - _count(self.in_doubt)


def _count(ranges: Iterable[Range]) -> int:
    return sum(last - first + 1 for first, last in ranges)


class StampedLedger(Ledger):
    """The books of one lane: `asyncproducer.testing.ledger.Ledger` with stamped values.

    As there, one task sends the records, one after the other, so that the numbers ascend in each
    partition. The values are read back by the audit, not by `read`.
    """

    def __init__(self, run: int, lane: int, *, keys: int = 1000, size: int = 100) -> None:
        super().__init__(keys=keys, size=size)
        encode_stamp(run, lane, 0, 0)  # raises for numbers that do not fit
        self.run, self.lane = run, lane

    def _record(self, number: int) -> tuple[bytes | None, bytes]:
        key, payload = super()._record(number)
        payload = payload[: max(0, self._size - SIZE)]
        now_us = time.time_ns() // 1000
        return key, encode_stamp(self.run, self.lane, number, now_us, payload) + payload

    def read(self, partition: int, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Raises NotImplementedError: stamped records are read by the audit."""
        raise NotImplementedError("stamped records are read by the audit")

    def entry(self, topic: str, **others: Any) -> Entry:
        """What became of the records so far. `others`: further fields of the entry."""
        failed: list[Range] = []
        in_doubt: list[Range] = []
        for state, first, last in self.ranges():
            if state in (State.NO, State.REFUSED, State.ABORTED):
                _append(failed, first, last)
            elif state in (State.MAYBE, State.OPEN):
                _append(in_doubt, first, last)
        return Entry(
            self.run, self.lane, topic, 0, len(self) - 1, tuple(failed), tuple(in_doubt), **others
        )


def _append(ranges: list[Range], first: int, last: int) -> None:
    if ranges and ranges[-1][1] == first - 1:
        ranges[-1] = (ranges[-1][0], last)
    else:
        ranges.append((first, last))


def write_ledger(path: str | Path, entries: Sequence[Entry]) -> None:
    """Write entries as one new Parquet file.

    A ledger may be a directory: each writer adds files of its own. Raises FileExistsError.
    """
    rows = [
        {
            **{name: getattr(entry, name) for name in SCHEMA.names},
            "failed": [{"first": first, "last": last} for first, last in entry.failed],
            "in_doubt": [{"first": first, "last": last} for first, last in entry.in_doubt],
        }
        for entry in entries
    ]
    with Path(path).open("xb") as file:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), file)


def read_ledger(path: str | Path) -> list[Entry]:
    """The entries of a file, or of all Parquet files of a directory.

    Raises LedgerError for what is no ledger, FileNotFoundError where nothing is.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no ledger at {path}")
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        raise LedgerError(f"{path} is no ledger: the directory is empty")
    try:
        return entries_of(pyarrow.parquet.read_table(path))
    except pa.ArrowInvalid as error:
        raise LedgerError(f"{path} is no ledger: {error}") from error


def entries_of(table: pa.Table) -> list[Entry]:
    """The entries of a table with the columns of `SCHEMA`. Raises LedgerError for others."""
    missing = [name for name in SCHEMA.names if name not in table.schema.names]
    if missing:
        raise LedgerError(f"the ledger has no column {', '.join(missing)}")
    try:
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise LedgerError(f"the ledger's columns are of other types: {error}") from error
    return [_entry(row) for row in table.to_pylist()]


def _entry(row: dict[str, Any]) -> Entry:
    attempted, acked = row.pop("attempted"), row.pop("acked")
    for name in ("failed", "in_doubt"):
        row[name] = tuple((part["first"], part["last"]) for part in row[name] or ())
    nulls = [name for name, value in row.items() if value is None and name != "batch_id"]
    if nulls:
        raise LedgerError(f"null in the ledger's column {', '.join(nulls)}: {row}")
    entry = Entry(**row)
    if (entry.attempted, entry.acked) != (attempted, acked):
        raise LedgerError(
            f"run {entry.run}, lane {entry.lane}, topic {entry.topic!r}: {attempted} attempted and "
            f"{acked} acknowledged are told, its ranges say {entry.attempted} and {entry.acked}"
        )
    return entry
