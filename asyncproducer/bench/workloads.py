"""What is measured: the table of the workloads.

A case is one point of a workload. Its fields are all that a measurement depends on, beside the
peer: they go to the worker process, and into the results. What a case does not say is the
same for all: acks=all, and each peer's own defaults.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

__all__ = [
    "BASE_RECORDS",
    "GROUP",
    "HEADLINE",
    "WORKLOADS",
    "Case",
    "Load",
    "SerializerName",
    "Workload",
    "headline",
    "payloads",
    "scaled",
]

#: flood    one task (or thread) enqueues all as fast as it can, then flushes
#: burst    so many new tasks await one send each, again and again
#: loop     so many tasks await one send after the other
#: rate     records leave at fixed times, whatever became of those before (open loop)
#: exhaust  so many tasks enqueue for some seconds, faster than the brokers take it
#: many     `send_many` of a list
#: rows     a table, row by row through enqueue
#: table    a table by `send_table`
#: lists    lists of values in one call each, where a peer has a call for that
Load: TypeAlias = Literal[
    "flood", "burst", "loop", "rate", "exhaust", "many", "rows", "table", "lists"
]

#: Who makes bytes of a value: nobody, or a serializer of bench/serializers.py.
SerializerName: TypeAlias = Literal["", "json", "msgpack", "avro"]

#: Records of most cases with 100-byte values; `--records` changes it, and the others in proportion.
BASE_RECORDS = 1_000_000

#: The consumer group whose offsets are sent in transactions.
GROUP = "asyncproducer-bench"

_KIB = 1024
#: So many distinct values, or as many as fit in some megabytes, are sent in turn.
_VALUES = 1000
_VALUE_BYTES = 8 * _KIB * _KIB
#: Java's batch.size.
_BATCH_BYTES = 16 * _KIB

_TEXT = (
    "account amount basket cancelled carrier change checkout city clicked country coupon created "
    "currency customer delayed delivered device discount email event failed gate gift invoice item "
    "language ledger loaded method mobile opened order origin paid parcel payment pending price "
    "product quantity queued received refund region retry returned route scanned score seat "
    "session shipped source started status stock store success tail ticket total updated user"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a workload. Sizes in bytes, `rate` in records/s, times as named."""

    name: str
    load: Load = "flood"
    records: int = BASE_RECORDS
    size: int = 100
    topics: int = 1
    partitions: int = 6
    #: So many records in a row go to one partition, then to the next; 0: the peer chooses.
    run_length: int = 0
    #: The largest batch; 0: the peer's default.
    batch_bytes: int = 0
    linger_ms: int = 5
    tasks: int = 1
    rate: int = 0
    #: The longest that a load by time runs, and about how long one by records may.
    seconds: float = 10.0
    rtt_ms: float = 0.0
    #: Of loops: so long each task sleeps before a send.
    pause_ms: float = 0.0
    codec: str = "none"
    #: The codec's level; None: its default.
    level: int | None = None
    idempotent: bool = True
    headers: int = 0
    #: So many records each are a transaction; 0: there are none. Of floods and lists.
    transaction: int = 0
    #: So long each is a transaction, until all records are sent or the time is up; 0: they are not
    #: by time. Of floods.
    transaction_ms: float = 0.0
    #: Each of these sends an offset of `GROUP` too, as who reads, transforms and writes does.
    offsets: bool = False
    #: If there is one, values are dicts, and the peer's value serializer is this.
    serializer: SerializerName = ""
    #: What tables are: of pandas, or else of Arrow.
    pandas: bool = False
    #: Python's garbage collector is set as docs/performance.md says for many tasks.
    patient_collector: bool = False
    #: The event loop's stalls are measured too, by a task that wakes each millisecond.
    ticker: bool = False

    @property
    def plain(self) -> bool:
        """Whether a peer can do it that only sends values to one topic, and has transactions by
        time alone, if any: Java's load generator."""
        return not (
            self.run_length
            or self.headers
            or self.serializer
            or self.transaction
            or self.topics > 1
        )

    @property
    def transactional(self) -> bool:
        """Whether there are transactions."""
        return bool(self.transaction or self.transaction_ms)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Some cases that guard one property, and the peers that are measured without `--peers`."""

    id: str
    title: str
    guards: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    #: What the plots and the page show of it first.
    metric: str = "records_per_s"
    remark: str = ""
    #: Topics of a case are made once for all peers: making them takes longer than using them.
    shared_topics: bool = field(default=False)


ALL = (
    "asyncproducer",
    "asyncproducer-uvloop",
    "asyncproducer-python",
    "aiokafka",
    "aiokafka-uvloop",
    "confluent",
    "confluent-aio",
    "kafka-python",
    "java",
    "wire-replay",
)
_FLAT_OUT = ("asyncproducer", "asyncproducer-python", "aiokafka", "confluent", "java")
_FEW = ("asyncproducer", "aiokafka", "confluent")
_ASYNC = ("asyncproducer", "asyncproducer-python", "aiokafka")


def _records_of(size: int) -> int:
    """At most 300 MB a measurement."""
    return min(BASE_RECORDS, 300_000_000 // size)


def _concurrency() -> tuple[Case, ...]:
    counts = (1, 10, 100, 1_000, 8_000, 50_000)
    loads: tuple[tuple[Load, str], ...] = (("loop", "tasks in a loop"), ("burst", "new tasks"))
    cases = tuple(
        Case(
            name=f"{tasks:,} {what}" if tasks > 1 else "1 task",
            load=load,
            tasks=tasks,
            records=200_000,
        )
        for load, what in loads
        for tasks in counts
        if not (tasks == 1 and load == "burst")
    )
    # What a service that has little to do sees: nothing is in the caches, and the processor sleeps.
    alone = Case(name="1 task, 10 ms apart", load="loop", records=1_000, pause_ms=10.0)
    # With 5 ms, who lingers whatever there is to do is compared by that and by nothing else.
    at_once = Case(name="1 task, linger 0", load="loop", records=200_000, linger_ms=0)
    patient = tuple(
        replace(case, name=f"{case.name}, patient collector", patient_collector=True)
        for case in cases
        if case.tasks in (100, 8_000, 50_000)
    )
    return (*cases, *patient, alone, at_once)


def _codecs() -> tuple[Case, ...]:
    default: tuple[tuple[str, int | None, int], ...] = tuple(
        (codec, None, 0) for codec in ("none", "gzip", "snappy", "lz4", "zstd")
    )
    # Not lz4 with 9: to Java and to us that is the fast method, to librdkafka a slow one.
    levels = (("gzip", 1, 0), ("gzip", 9, 0), ("lz4", 3, 0), ("zstd", 1, 0), ("zstd", 9, 0))
    sizes = tuple((codec, None, _BATCH_BYTES) for codec in ("none", "lz4", "zstd"))
    return tuple(
        Case(
            name=codec
            + (f", level {level}" if level is not None else "")
            + (f", {batch_bytes // _KIB} KiB batches" if batch_bytes else ""),
            codec=codec,
            level=level,
            batch_bytes=batch_bytes,
            size=1_000,
            # Some seconds: of a thousand ticks, one is above the 99.9th percentile.
            records=150_000 if codec == "gzip" or level is not None else 500_000,
            ticker=True,
        )
        for codec, level, batch_bytes in (*default, *levels, *sizes)
    )


def _filled(name: str, *, topics: int, partitions: int) -> Case:
    """So many records for each of at most 10,000 partitions as a batch of 16 KiB has room for."""
    return Case(
        name=name,
        topics=topics,
        partitions=partitions,
        records=1_480_000,
        run_length=148,
        batch_bytes=_BATCH_BYTES,
    )


_W1 = tuple(
    Case(name=f"{n} partition{'s' if n > 1 else ''}", partitions=n) for n in (1, 6, 16, 100)
)
# By default, Java's batches and aiokafka's have 16 KiB, librdkafka's and ours up to a megabyte.
_LARGE = Case(name="1 MB batches", batch_bytes=1_000_000)

WORKLOADS: dict[str, Workload] = {
    w.id: w
    for w in (
        Workload(
            id="W1",
            title="Enqueue loop, flat out, 100 B",
            guards="the way of one record",
            cases=(*_W1, _LARGE),
            peers=ALL,
        ),
        Workload(
            id="W2",
            title="Sizes, flat out",
            guards="what copying costs",
            cases=tuple(
                Case(name=name, size=size, records=_records_of(size))
                for name, size in (
                    ("1 kB", 1_000),
                    ("10 kB", 10_000),
                    ("100 kB", 100_000),
                    ("900 kB", 900_000),
                )
            ),
            peers=(*_FLAT_OUT, "wire-replay"),
        ),
        Workload(
            id="W3",
            title="Tasks that await their own send, 100 B",
            guards="the cost of a record does not grow with the number of tasks",
            cases=_concurrency(),
            peers=(
                *_ASYNC,
                "asyncproducer-uvloop",
                "aiokafka-uvloop",
                "confluent-aio",
                "wire-replay",
            ),
            remark="A single task in a loop is the lone awaited send; its wire-replay is the bare "
            "round trip of a Produce request with one record. Latencies in a loop begin with the "
            "call, and a pause before it is no part of them. aiokafka is left out above 8,000 "
            "tasks: its cost grows with their square.",
        ),
        Workload(
            id="W4",
            title="Fixed rates, 100 B (open loop)",
            guards="latency, lingering included, from intended send times",
            cases=tuple(
                Case(name=f"{rate:,}/s", load="rate", rate=rate, records=rate * 10, ticker=True)
                for rate in (100, 1_000, 10_000, 50_000)
            ),
            peers=(*_ASYNC, "confluent", "confluent-aio", "kafka-python"),
            metric="p99_ms",
            remark="Records are dispatched about once a millisecond, for all alike.",
        ),
        Workload(
            id="W5",
            title="Round-trip times, 1 kB, flat out",
            guards="pipelining",
            cases=tuple(
                Case(name=f"{rtt} ms", rtt_ms=rtt, size=1_000, records=100_000)
                for rtt in (1, 5, 20, 100)
            ),
            peers=(*_FLAT_OUT, "wire-replay"),
            remark="A proxy on this machine holds each request and answer back by half the time. "
            "The wire replay goes through it as well: nobody can be faster than the proxy.",
        ),
        Workload(
            id="W6",
            title="Codecs, levels and batch sizes, 1 kB, flat out",
            guards="the loop stays free while batches are compressed",
            cases=_codecs(),
            peers=_FLAT_OUT,
            remark="Stalls are those of a loop on which one task enqueues without a pause. floor: "
            "what a loop has that does nothing, with turns of 0.5 ms, while the other cores are "
            "busy. Who has no option for the level is left out there. A batch of a given size is "
            "the largest of each peer; without, each one's default.",
        ),
        Workload(
            id="W7",
            title="Idempotent or not, and in transactions, 100 B, flat out",
            guards="what idempotence and transactions cost",
            cases=(
                Case(name="idempotent"),
                Case(name="not idempotent", idempotent=False),
                Case(name="100 records a transaction", transaction=100, records=100_000),
                Case(name="1,000 records a transaction", transaction=1_000),
                Case(name="10,000 records a transaction", transaction=10_000),
                Case(
                    name="transactions of 100 ms",
                    transaction_ms=100.0,
                    seconds=5.0,
                    records=5_000_000,
                ),
                Case(name="1,000 records a transaction, lists", transaction=1_000, load="lists"),
                Case(
                    name="100 records and a group's offset a transaction",
                    transaction=100,
                    offsets=True,
                    records=20_000,
                ),
            ),
            peers=_FLAT_OUT,
            remark="Lists go by send_many, with confluent by produce_batch, with aiokafka record "
            "by record. Who reads, transforms and writes sends an offset of its group with each "
            "transaction: what counts there is the wait for the end of the one before. What a "
            "read_committed consumer would be given is what is counted. Java's load generator ends "
            "its transactions by time alone.",
        ),
        Workload(
            id="W8",
            title="Many topics and partitions at equal batch fill, 100 B",
            guards="no cost per partition that has nothing to send",
            cases=(
                _filled("1 topic, 6 partitions", topics=1, partitions=6),
                _filled("1,000 topics", topics=1_000, partitions=1),
                _filled("5,000 topics", topics=5_000, partitions=1),
                # A controller makes fewer than 10,000 partitions in one request.
                _filled("10,000 partitions (10 topics)", topics=10, partitions=1_000),
            ),
            peers=_FEW,
            shared_topics=True,
            remark="148 records in a row fill a batch of 16 KiB, the next 148 go to the next "
            "partition: so batches are equally full, however many partitions there are.",
        ),
        Workload(
            id="W11",
            title="Faster than the brokers: the buffer is full, 1 kB",
            guards="memory stays within buffer_memory, nobody starves",
            cases=(
                Case(
                    name="100 tasks, 60 s",
                    load="exhaust",
                    tasks=100,
                    seconds=60.0,
                    size=1_000,
                    # Far brokers: whatever this machine can do, the buffer fills.
                    rtt_ms=100,
                    ticker=True,
                ),
            ),
            peers=_ASYNC,
            metric="rss_growth_mib",
            remark="buffer_memory is 32 MiB here, the default. Fairness: records of the task that "
            "got most by those of the one that got least. aiokafka bounds no memory, but one "
            "batch per partition.",
        ),
        Workload(
            id="W12",
            title="Headers and serializers, 100 B, flat out",
            guards="what a record costs beside its value",
            cases=(
                Case(name="no headers", records=300_000),
                Case(name="3 headers", headers=3, records=300_000),
                Case(name="20 headers", headers=20, records=300_000),
                Case(name="JSON serializer", serializer="json", records=300_000),
                Case(name="MessagePack serializer", serializer="msgpack", records=300_000),
                Case(name="Avro serializer, known schema", serializer="avro", records=300_000),
            ),
            peers=("asyncproducer", "asyncproducer-python", "aiokafka", "confluent"),
            remark="All serialize with the same functions: asyncproducer.serializers' for JSON "
            "and MessagePack, which are msgspec's, and Confluent's for Avro, whose registry is "
            "asked before the first record only.",
        ),
        Workload(
            id="W14",
            title="Lists and tables",
            guards="bulk sending costs less than a loop",
            cases=(
                Case(name="enqueue, list"),
                Case(name="send_many, list", load="many"),
                Case(name="enqueue, list, 25 B", size=25),
                Case(name="send_many, list, 25 B", load="many", size=25),
                Case(name="enqueue, Arrow rows with keys", load="rows"),
                Case(name="send_table, Arrow with keys", load="table"),
                Case(name="10 times the rows: send_table, Arrow", load="table", records=10**7),
                Case(name="pandas with keys: enqueue of rows", load="rows", pandas=True),
                Case(name="pandas with keys: send_table", load="table", pandas=True),
            ),
            peers=("asyncproducer", "asyncproducer-python", "aiokafka", "confluent"),
            metric="cpu_us_per_record",
        ),
    )
}

HEADLINE = "headline"


def headline() -> Workload:
    """W1 with 6 partitions and all peers: what is measured without arguments."""
    return replace(WORKLOADS["W1"], id=HEADLINE, cases=(_W1[1],))


def scaled(case: Case, records: int, *, size: int | None = None, quick: bool = False) -> Case:
    """The case with `records` where it had BASE_RECORDS; `quick` shortens what goes by time."""
    if size is not None:
        case = replace(case, size=size)
    case = replace(case, records=max(1, case.records * records // BASE_RECORDS))
    if not quick:
        return case
    tasks = min(case.tasks, 1_000)
    return replace(case, seconds=1.0, tasks=tasks, records=min(case.records, case.rate or 10**9))


@functools.cache  # making them takes time, and is no part of a measurement
def payloads(case: Case) -> list[bytes]:
    """The values that are sent in turn: JSON of words and numbers, the same in each process.

    gzip makes about a third of 1,000 of them with 1 kB (report.py tells the exact figure).
    """
    rng = random.Random(case.size)
    count = max(4, min(_VALUES, _VALUE_BYTES // case.size))
    return [_payload(rng, case.size) for _ in range(count)]


def _payload(rng: random.Random, size: int) -> bytes:
    text = f'{{"id":{rng.randrange(10**6)},"text":"'
    closing = '"}'
    if size < len(text) + len(closing):
        return b"7" * size  # JSON as well: a number
    words: list[str] = []
    missing = size - len(text) - len(closing)
    while missing > 0:
        word = rng.choice(_WORDS) if rng.random() < 0.7 else str(rng.randrange(10**5))
        word = f"{word} "[:missing]
        words.append(word)
        missing -= len(word)
    return f"{text}{''.join(words)}{closing}".encode()
