"""Logs with known faults, to try the audit on: it must find these, and nothing else.

    python -m asyncproducer.spark.audit.injected --records 20000000 --output /tmp/injected

writes `log/*.parquet` with the columns of Spark's Kafka source, `ledger.parquet`, and `truth.json`
with the faults: all follow from the seed. Every lane writes cells of 64 records, each into one
partition, as a sticky partitioner does; a cell has at most one fault, so that no two meet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from asyncproducer.spark.audit.columns import Longs, encode
from asyncproducer.spark.audit.ledger import Entry, Range, write_ledger

__all__ = ["Plan", "Truth", "inject"]

CELL = 64
#: Records of a lane in one batch of the ledger, and in one step of the making.
BATCH = 64 * CELL
_STEP_ROWS = 1_000_000

_START_US = 1_790_000_000_000_000
#: Where a fault sits in its cell: some records are before it, and more than it needs behind it.
_AT = 10

_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
    ]
)

#: Faults that take a cell each. "failed" and "doubtful" are none: the ledger tells them.
_KINDS = ("lost", "retried", "crossed", "late", "damaged", "denied", "failed", "doubtful")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is made. Every lane gets the same number of whole batches, at least three."""

    records: int = 200_000
    lanes: int = 4
    partitions: int = 3
    #: Bytes of a payload; the value has 28 more.
    size: int = 72
    #: How many faults of each kind.
    faults: int = 10
    #: One batch of all lanes is there twice, and one of lane 0.
    replays: bool = True
    seed: int = 0
    topic: str = "t"
    run: int = 0x5EED

    @property
    def batches(self) -> int:
        """Of each lane."""
        return max(3, self.records // (self.lanes * BATCH))

    @property
    def length(self) -> int:
        """Records that each lane tries."""
        return self.batches * BATCH


@dataclasses.dataclass(slots=True)
class Truth:
    """What the audit must find: (lane, seq), or (lane, first, last) of ranges."""

    lost: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    retried: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    crossed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    #: Lane, number, and how far behind it is.
    late: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    damaged: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    #: Present, and failed by the ledger, or behind all that was tried.
    denied: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    failed: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    #: In doubt; the first half of each is present.
    doubtful: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    #: Ids of batches that are there twice, with all lanes.
    replayed: list[int] = dataclasses.field(default_factory=list)
    #: Lane and number of batches of which the lane wrote the beginning again.
    restarted: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unstamped: int = 0
    other_run: int = 0
    records: int = 0


def inject(plan: Plan, directory: Path) -> tuple[list[Entry], Truth]:
    """Write a log, its ledger and its truth into a new directory. The same plan, the same bytes."""
    (directory / "log").mkdir(parents=True)
    truth = _draw(plan)
    entries = _ledger(plan, truth)
    steps = max(1, _STEP_ROWS // (plan.lanes * BATCH))
    made = _Maker(plan, truth)
    for number, first in enumerate(range(0, plan.batches, steps)):
        table = made.step(first, min(first + steps, plan.batches))
        pyarrow.parquet.write_table(table, directory / "log" / f"{number:05}.parquet")
        truth.records += len(table)
    write_ledger(directory / "ledger.parquet", entries)
    (directory / "truth.json").write_text(json.dumps(dataclasses.asdict(truth)))
    return entries, truth


def _draw(plan: Plan) -> Truth:
    chance = random.Random(plan.seed)
    truth = Truth()
    whole: set[int] = set()
    if plan.replays:
        replayed, restarted = chance.sample(range(plan.batches - 1), 2)
        truth.replayed.append(replayed)
        truth.restarted.append((0, restarted))
        whole = {replayed, restarted}
    cells = [
        (lane, batch * BATCH + cell * CELL)
        for lane in range(plan.lanes)
        for batch in chance.sample(range(plan.batches), min(plan.batches, 4 * plan.faults))
        if batch not in whole
        # The last cell of all is for the lost tail.
        for cell in range(0, BATCH // CELL - 1, 1 + BATCH // CELL // 16)
    ]
    chance.shuffle(cells)
    for kind in _KINDS:
        for _ in range(plan.faults):
            if not cells:
                raise ValueError(f"{plan.faults} faults of each kind need more records")
            lane, begin = cells.pop()
            at, length = begin + _AT, chance.randint(1, 37)
            found: list[Any] = getattr(truth, kind)
            if kind in ("lost", "failed", "doubtful"):
                found.append((lane, at, at + length - 1))
            elif kind == "late":
                found.append((lane, at, length))
            else:
                found.append((lane, at))
    if plan.faults:
        # The end of a lane, which only the ledger knows of; the border of two buckets; a number
        # that was never given.
        truth.lost.append((0, plan.length - 3, plan.length - 1))
        if plan.length > 32_800 and 32_768 // BATCH not in whole and 32_767 // BATCH not in whole:
            lane = 1 % plan.lanes
            if (lane, 32_768 // CELL) not in {(lane, at // CELL) for lane, at in _cells(truth)}:
                truth.lost.append((lane, 32_760, 32_775))
        truth.denied.append((1 % plan.lanes, plan.length + 5))
        truth.unstamped = truth.other_run = plan.faults
    return truth


def _cells(truth: Truth) -> Iterator[tuple[int, int]]:
    for kind in _KINDS:
        for fault in getattr(truth, kind):
            yield fault[0], fault[1]


def _ledger(plan: Plan, truth: Truth) -> list[Entry]:
    failed: dict[tuple[int, int], list[Range]] = defaultdict(list)
    doubt: dict[tuple[int, int], list[Range]] = defaultdict(list)
    for lane, first, last in truth.failed:
        failed[lane, first // BATCH].append((first, last))
    for lane, seq in truth.denied:
        if seq < plan.length:
            failed[lane, seq // BATCH].append((seq, seq))
    for lane, first, last in truth.doubtful:
        doubt[lane, first // BATCH].append((first, last))
    return [
        Entry(
            plan.run,
            lane,
            plan.topic,
            batch * BATCH,
            (batch + 1) * BATCH - 1,
            tuple(sorted(failed[lane, batch])),
            tuple(sorted(doubt[lane, batch])),
            sink_id="injected",
            batch_id=batch,
        )
        for batch in range(plan.batches)
        for lane in range(plan.lanes)
    ]


class _Maker:
    """Makes the log batch by batch; remembers how far each partition is."""

    def __init__(self, plan: Plan, truth: Truth) -> None:
        self._plan = plan
        self._truth = truth
        self._chance = np.random.default_rng(plan.seed)
        self._next = np.zeros(plan.partitions, np.int64)
        self._now_us = _START_US
        gone = [
            *truth.lost,
            *truth.failed,
            *((lane, (first + last) // 2 + 1, last) for lane, first, last in truth.doubtful),
        ]
        self._gone = np.array(
            [lane << 40 | seq for lane, first, last in gone for seq in range(first, last + 1)],
            np.int64,
        )

    def step(self, first: int, end: int) -> pa.Table:
        """The log of these batches of all lanes."""
        plan = self._plan
        cells = np.arange(first * BATCH // CELL, end * BATCH // CELL)
        # Position in the log, before faults: the lanes take turns, cell by cell.
        seq = (cells[:, None, None] * CELL + np.arange(CELL)).repeat(plan.lanes, 1).reshape(-1)
        lane = np.tile(np.arange(plan.lanes).repeat(CELL), len(cells))
        place = np.arange(len(seq), dtype=np.float64)
        partition = self._partition(lane, seq)
        keep = ~np.isin(lane << 40 | seq, self._gone)
        extra = self._extra(first, end, lane, seq, place)
        for at, _, behind in self._of_step(self._truth.late, first, end, lane, seq):
            place[at] = place[at + behind] + 0.5
        lane = np.concatenate([lane[keep], extra[0].astype(np.int64)])
        partition = np.concatenate([partition[keep], extra[2].astype(np.int64)])
        place = np.concatenate([place[keep], extra[3]])
        seq = np.concatenate([seq[keep], extra[1].astype(np.int64)])
        order = np.argsort(place, kind="stable")
        return self._table(lane[order], seq[order], partition[order], first == 0)

    def _partition(self, lane: Longs, seq: Longs) -> Longs:
        mixed = (seq // CELL * 2654435761 + lane * 40503) >> 7
        return mixed % self._plan.partitions

    def _of_step(
        self, faults: Sequence[Any], first: int, end: int, lane: Longs, seq: Longs
    ) -> Iterator[tuple[Any, ...]]:
        """Row, lane and the rest of those faults that are in these batches."""
        lanes = self._plan.lanes
        for fault_lane, at, *rest in faults:
            if first * BATCH <= at < end * BATCH:
                cell, within = divmod(at - first * BATCH, CELL)
                row = (cell * lanes + fault_lane) * CELL + within
                assert (lane[row], seq[row]) == (fault_lane, at)
                yield (row, fault_lane, *rest)

    def _extra(self, first: int, end: int, lane: Longs, seq: Longs, place: Any) -> Any:
        """Rows that are there again, or should not be: lane, number, partition, position."""
        plan, truth = self._plan, self._truth
        rows: list[tuple[int, int, int, float]] = []
        partition = self._partition(lane, seq)
        for at, of_lane in self._of_step(truth.retried, first, end, lane, seq):
            rows.append((of_lane, seq[at], partition[at], place[at + 20] + 0.5))
        for at, of_lane in self._of_step(truth.crossed, first, end, lane, seq):
            other = (partition[at] + 1) % plan.partitions
            rows.append((of_lane, seq[at], other, place[at + 20] + 0.5))
        if end == plan.batches:
            rows += [
                (of_lane, at, 0, float(len(seq)))
                for of_lane, at in truth.denied
                if at >= plan.length
            ]
        made = np.array(rows, np.float64).reshape(-1, 4).T
        for batch, lanes in [
            *((batch, None) for batch in truth.replayed),
            *((batch, of_lane) for of_lane, batch in truth.restarted),
        ]:
            if first <= batch < end:
                again = seq // BATCH == batch
                if lanes is not None:
                    again &= (lane == lanes) & (seq % BATCH < BATCH // 2)
                # Behind all that its batch has written.
                last = float(np.flatnonzero(seq // BATCH == batch)[-1])
                behind = last + 0.6 + 0.3 * place[again] / len(seq)
                made = np.hstack([made, [lane[again], seq[again], partition[again], behind]])
        return made

    def _table(self, lane: Longs, seq: Longs, partition: Longs, is_first: bool) -> pa.Table:
        plan, truth, chance = self._plan, self._truth, self._chance
        rows = len(seq)
        foreign = truth.unstamped + truth.other_run if is_first else 0
        # Four records each millisecond, as the broker's clock tells it.
        appended = self._now_us + np.arange(rows) // 4 * 1000
        self._now_us = int(appended[-1]) + 1000
        latency = chance.lognormal(8.0, 0.7, rows).astype(np.int64)
        text = chance.bytes(rows + plan.size)
        parts = (_offsets(rows, plan.size), _windows(text, plan.size, rows))
        payloads = pa.Array.from_buffers(pa.binary(), rows, [None, *map(pa.py_buffer, parts)])
        values = encode(plan.run, lane, seq, appended - latency, payloads)
        values = self._damage(values, lane, seq)
        keys = pa.compute.binary_join_element_wise("key-", pa.array(seq % 997).cast("string"), "")
        table = {
            "key": keys.cast(pa.binary()),
            "value": values,
            "partition": pa.array(partition, pa.int32()),
            "offset": pa.array(self._offset(partition)),
            "timestamp": pa.array(appended, pa.timestamp("us", tz="UTC")),
        }
        if foreign:
            table = self._foreign(table, foreign)
        rows += foreign
        table["topic"] = pa.repeat(pa.scalar(plan.topic), rows)
        table["timestampType"] = pa.array(np.ones(rows, np.int32))
        return pa.table({name: table[name] for name in _SCHEMA.names}, schema=_SCHEMA)

    def _offset(self, partition: Longs) -> Longs:
        """Offsets ascend in each partition, with a hole now and then, as markers leave them."""
        offset = np.empty(len(partition), np.int64)
        for number in range(self._plan.partitions):
            rows = np.flatnonzero(partition == number)
            counted = self._next[number] + np.arange(len(rows))
            self._next[number] += len(rows)
            offset[rows] = counted + counted // 1000
        return offset

    def _damage(self, values: pa.Array, lane: Longs, seq: Longs) -> pa.Array:
        damaged = np.array([a << 40 | b for a, b in self._truth.damaged], np.int64)
        at = np.flatnonzero(np.isin(lane << 40 | seq, damaged))
        if not len(at):
            return values
        mask = np.zeros(len(values), np.bool_)
        mask[at] = True
        wrong = [value[:-1] + bytes([value[-1] ^ 1]) for value in values.take(at).to_pylist()]
        return pa.compute.replace_with_mask(values, mask, pa.array(wrong, pa.binary()))

    def _foreign(self, table: dict[str, Any], count: int) -> dict[str, Any]:
        """Adds records without a stamp, some of them long enough for one, and those of others."""
        plan, truth = self._plan, self._truth
        numbers = np.arange(truth.other_run)
        others = encode(
            plan.run + 1, numbers, numbers, numbers, pa.array([b"other"] * truth.other_run)
        )
        texts = [b"no stamp" * (1 + n % 7) for n in range(truth.unstamped)]
        offsets = self._offset(np.zeros(count, np.int64))
        more = {
            "key": pa.nulls(count, pa.binary()),
            "value": pa.concat_arrays([pa.array(texts, pa.binary()), others]),
            "partition": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(offsets),
            "timestamp": pa.array(np.full(count, self._now_us), pa.timestamp("us", tz="UTC")),
        }
        return {name: pa.concat_arrays([table[name], more[name]]) for name in table}


def _offsets(rows: int, size: int) -> bytes:
    return (np.arange(rows + 1) * size).astype(np.int32).tobytes()


def _windows(text: bytes, size: int, rows: int) -> bytes:
    """A payload for each row: what is seen of the text through a window that moves."""
    view = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), size)
    return view[:rows].tobytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a log with faults; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncproducer.spark.audit.injected",
        description="Write a log with known faults, for the audit to find.",
    )
    parser.add_argument("--output", type=Path, required=True, help="a directory that is not there")
    for field in dataclasses.fields(Plan):
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            parser.add_argument(
                f"--{field.name}", type=int, default=field.default, help="default: %(default)s"
            )
    options = vars(parser.parse_args(arguments))
    output: Path = options.pop("output")
    if output.exists():
        parser.error(f"{output} is there already")
    _, truth = inject(Plan(**options), output)
    sys.stdout.write(f"{truth.records:,} records in {output / 'log'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
