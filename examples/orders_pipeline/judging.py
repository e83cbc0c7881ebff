"""The audit, and before it what it cannot know: which orders must be in fulfillment.

    python -m orders_pipeline.judging SETTINGS.json LEDGER ARGUMENT...

LEDGER is the directory with the ledger of the load; it gets another file. The arguments are those
of `python -m asyncproducer.spark.audit`, and so is the exit status: 2 for any error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from asyncproducer.spark.audit import command
from asyncproducer.spark.audit.ledger import Entry, Range, read_ledger, write_ledger
from orders_pipeline.batches import envelopes
from orders_pipeline.orders import Codec
from orders_pipeline.rules import FULFILLMENT, SCORED
from orders_pipeline.stages import Settings, session

__all__ = ["Approved", "expected", "main"]


@dataclass(frozen=True)
class Approved:
    """For mapInArrow: the numbers of approved orders, of their values and headers. Picklable."""

    codec: Codec

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What Spark calls."""
        for batch in batches:
            found = zip(batch["value"].to_pylist(), envelopes(batch["headers"]), strict=True)
            seqs = [
                around.stamp.seq
                for value, around in found
                if around.stamp is not None and self.codec.decode(value)["approved"]
            ]
            yield pa.RecordBatch.from_pydict({"seq": pa.array(seqs, pa.int64())})


def expected(load: Entry, approved: Iterable[int]) -> Entry:
    """What the ledger is to say of fulfillment: these numbers, and none else of the load."""
    others: list[Range] = []
    begin = load.first_seq
    for seq in [*sorted(set(approved)), load.last_seq + 1]:
        if begin < seq:
            others.append((begin, seq - 1))
        begin = seq + 1
    return Entry(
        load.run, load.lane, FULFILLMENT, load.first_seq, load.last_seq, failed=tuple(others)
    )


def main(arguments: Sequence[str]) -> int:
    """Judge; returns the audit's exit status."""
    settings, ledger = Settings.load(Path(arguments[0])), Path(arguments[1])
    (load,) = read_ledger(ledger)
    spark = session(settings, "judging", memory="2g")
    try:
        scored = (
            spark.read.format("kafka")
            .option("kafka.bootstrap.servers", settings.servers)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", SCORED)
            .option("includeHeaders", "true")
            .load()
            .select("value", "headers")
        )
        rows = scored.mapInArrow(Approved(Codec(settings.ids)), "seq long").collect()
        entry = expected(load, (row["seq"] for row in rows))
        write_ledger(ledger / "fulfillment.parquet", [entry])
        return command.main(arguments[2:])
    finally:
        spark.stop()


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:
        # Left alone it would end with 1, which is a verdict.
        traceback.print_exc()
        status = 2
    sys.exit(status)
