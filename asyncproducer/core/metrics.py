"""The producer's numbers, by Java's names in snake_case.

Everything is counted per batch, per request and per connection, never per record. Rates,
averages and maxima cover the last `SAMPLES` windows of `WINDOW` seconds, as Java's sampled
stats do; `*_total` count from the start.

Most metrics come in families that are read from one series: `PRODUCER_FAMILIES` and so on
are the list of them, for the snapshot and for docs/metrics.md alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from asyncproducer.core.batch import BATCH_OVERHEAD

if TYPE_CHECKING:
    from asyncproducer.core.batch import ProducerBatch

__all__ = [
    "APP_INFO",
    "GAUGES",
    "LEFT_OUT",
    "NODE_FAMILIES",
    "PRODUCER_FAMILIES",
    "SINGLES",
    "TOPIC_FAMILIES",
    "Family",
    "Metrics",
    "Sampled",
    "metrics_table",
]

#: Java: metrics.num.samples and metrics.sample.window.ms.
SAMPLES = 2
WINDOW = 30.0

#: Start, sum, count and maximum of a window.
_Sample: TypeAlias = tuple[float, float, int, float]


class Sampled:
    """A series of values: total since the start; sum, count and maximum of recent windows."""

    def __init__(self, *, samples: int = SAMPLES, window: float = WINDOW) -> None:
        # Java allows 0: as short as can be, then.
        self._window = max(window, 0.001)
        self._ring = samples
        #: Place in the ring → start, sum, count and max of a window, but the present one. Made when
        #: first used: the ring may be as large as an int.
        self._samples: dict[int, _Sample] = {}
        self.total = 0.0
        self.count = 0
        # The present window.
        self._start = 0.0
        self._end = 0.0
        self._sum = 0.0
        self._events = 0
        self._max = 0.0

    def add(self, value: float, now: float, count: int = 1) -> None:
        """Record `value`, which stands for `count` events."""
        self.total += value
        self.count += count
        if now < self._start or now >= self._end:
            self._turn_to(now)
        self._sum += value
        self._events += count
        if value > self._max:
            self._max = float(value)  # which compiled it is anyway

    def _turn_to(self, now: float) -> None:
        """The present window becomes the one that `now` is in."""
        self._samples.update(self._present())
        start = now - now % self._window
        known = self._samples.get(self._place(start))
        if known is None or known[0] != start:
            known = (start, 0.0, 0, 0.0)
        self._start, self._sum, self._events, self._max = known
        self._end = start + self._window

    def _place(self, start: float) -> int:
        return round(start / self._window) % self._ring

    def _present(self) -> dict[int, _Sample]:
        if self._end <= self._start:
            return {}
        present = (self._start, self._sum, self._events, self._max)
        return {self._place(self._start): present}

    def _recent(self, now: float) -> list[_Sample]:
        oldest = now - self._window * self._ring
        return [s for s in (self._samples | self._present()).values() if s[0] > oldest]

    def rate(self, now: float) -> float:
        """Sum per second over the recent windows."""
        return self._per_second(1, now)

    def event_rate(self, now: float) -> float:
        """Events per second over the recent windows."""
        return self._per_second(2, now)

    def _per_second(self, field: int, now: float) -> float:
        recent = self._recent(now)
        if not recent:
            return 0.0
        # Java: a window that has just begun must not make the rate explode.
        elapsed = max(now - min([s[0] for s in recent]), self._window * (self._ring - 1))
        return sum([s[field] for s in recent]) / elapsed if elapsed else 0.0

    def average(self, now: float) -> float:
        """Sum per event over the recent windows."""
        recent = self._recent(now)
        count = sum([s[2] for s in recent])
        return sum([s[1] for s in recent]) / count if count else 0.0

    def maximum(self, now: float) -> float:
        """The largest value of the recent windows."""
        return max([s[3] for s in self._recent(now)], default=0.0)


# -- what there is -------------------------------------------------------------------------


class Family(NamedTuple):
    """Metrics that are read from one series, and what they are about.

    `stats`: "rate", "total", "avg", "max"; "" is the average under the bare name. With
    `events` rate and total count events, not their values.
    """

    name: str
    stats: tuple[str, ...]
    series: str
    meaning: str
    events: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The keys in the snapshot, without a tag."""
        return tuple(f"{self.name}_{stat}" if stat else self.name for stat in self.stats)


_AVG_MAX = ("avg", "max")
_RATE_TOTAL = ("rate", "total")

PRODUCER_FAMILIES = (
    Family("batch_size", _AVG_MAX, "batch_size", "Bytes of a batch as it is sent."),
    Family(
        "compression_rate",
        ("avg",),
        "compression",
        "Compressed by uncompressed size of a batch's records; 1 without compression.",
    ),
    Family(
        "record_queue_time",
        _AVG_MAX,
        "queue_time",
        "ms from the beginning of a batch until it leaves.",
    ),
    Family(
        "request_latency",
        _AVG_MAX,
        "latency",
        "ms from a Produce request to its answer. With `acks=0` there is none.",
    ),
    Family(
        "produce_throttle_time",
        _AVG_MAX,
        "throttle",
        "ms for which a broker wants silence, of each answer (mostly 0).",
    ),
    Family("record_send", _RATE_TOTAL, "sent_records", "Records put into requests."),
    Family("records_per_request", ("avg",), "per_request", "Records in one Produce request."),
    Family("record_retry", _RATE_TOTAL, "retries", "Records put back to be sent again."),
    Family(
        "record_error",
        _RATE_TOTAL,
        "errors",
        "Records that failed, those that `send` refused included.",
    ),
    Family(
        "record_size",
        _AVG_MAX,
        "record_size",
        "Upper bound of the bytes of the largest record of each batch.",
    ),
    Family(
        "batch_split", _RATE_TOTAL, "splits", "Batches split because a broker found them too large."
    ),
    Family(
        "buffer_exhausted",
        _RATE_TOTAL,
        "exhausted",
        "Records refused for lack of `buffer_memory`: BufferTimeout, BufferFull.",
    ),
    Family(
        "connection_creation",
        _RATE_TOTAL,
        "opened",
        "Connections made, TLS included where it is used.",
        events=True,
    ),
    Family(
        "connection_close",
        _RATE_TOTAL,
        "closed",
        "Connections that ended. (Java also counts attempts that made none.)",
        events=True,
    ),
    Family("outgoing_byte", _RATE_TOTAL, "written", "Bytes written to brokers."),
    Family(
        "request",
        _RATE_TOTAL,
        "written",
        "Requests of all kinds, those of the handshake included.",
        events=True,
    ),
    Family("request_size", _AVG_MAX, "written", "Bytes of a request of any kind."),
    Family("incoming_byte", _RATE_TOTAL, "read", "Bytes read from brokers."),
    Family("response", _RATE_TOTAL, "answers", "Answers to requests of all kinds.", events=True),
    Family(
        "successful_authentication",
        _RATE_TOTAL,
        "authentications",
        "Connections that SASL or TLS let in. None with PLAINTEXT.",
        events=True,
    ),
    Family(
        "successful_authentication_no_reauth",
        ("total",),
        "authentications",
        "The same number: Java's clients have it, though it is meant for brokers.",
        events=True,
    ),
    Family(
        "failed_authentication",
        _RATE_TOTAL,
        "failed_authentications",
        "Connections that SASL or TLS refused.",
        events=True,
    ),
    Family(
        "successful_reauthentication",
        _RATE_TOTAL,
        "reauthentications",
        "Sessions renewed before they ended (KIP-368).",
        events=True,
    ),
    Family(
        "failed_reauthentication",
        _RATE_TOTAL,
        "failed_reauthentications",
        "Sessions that could not be renewed; their connections end.",
        events=True,
    ),
    Family(
        "reauthentication_latency",
        _AVG_MAX,
        "reauthentications",
        "ms that a renewal took, in which nothing is sent.",
    ),
)

#: Per topic, from its first batch on.
TOPIC_FAMILIES = (
    Family("record_send", _RATE_TOTAL, "records", "Records put into requests."),
    Family("byte", _RATE_TOTAL, "bytes", "Bytes of the batches put into requests."),
    Family(
        "compression_rate",
        ("",),
        "compression",
        "Compressed by uncompressed size of a batch's records, on average.",
    ),
    Family("record_retry", _RATE_TOTAL, "retries", "Records put back to be sent again."),
    Family("record_error", _RATE_TOTAL, "errors", "Records that failed."),
)

#: Per broker, and per bootstrap address (node--1, node--2, ...).
NODE_FAMILIES = (
    Family("outgoing_byte", _RATE_TOTAL, "written", "Bytes written to it."),
    Family("incoming_byte", _RATE_TOTAL, "read", "Bytes read from it."),
    Family(
        "request",
        _RATE_TOTAL,
        "request_size",
        "Produce requests to it. (Java: requests of all kinds.)",
        events=True,
    ),
    Family("request_size", _AVG_MAX, "request_size", "Bytes of the batches in a Produce request."),
    Family(
        "response",
        _RATE_TOTAL,
        "latency",
        "Answers to Produce requests. (Java: to all kinds.)",
        events=True,
    ),
    Family("request_latency", _AVG_MAX, "latency", "ms from a Produce request to its answer."),
)

#: The calls of transactions whose time is counted.
TRANSACTION_CALLS = {
    "init": "getting the transactional producer id in `start()`",
    "begin": "`begin_transaction()`",
    "send_offsets": "`send_offsets()`",
    "commit": "`commit_transaction()`",
    "abort": "`abort_transaction()`",
}

#: What is computed in another way than a family is.
SINGLES = {
    "batch_count": "Batches put into requests since the start. (Java has none.)",
    "connection_count": "Connections that are open now, also those still in their handshake.",
    "network_io_rate": "Reads and writes of all connections, per second.",
    "network_io_total": "The same since the start.",
    "bufferpool_wait_ratio": (
        "Seconds that records waited for `buffer_memory`, per second: with several waiting at "
        "once it may be above 1."
    ),
    "bufferpool_wait_time_ns_total": "ns that records waited for `buffer_memory`, in vain or not.",
    "metadata_wait_time_ns_total": (
        "ns that calls waited for the metadata of their topics, and got it."
    ),
    "flush_time_ns_total": "ns spent in `flush()`, in vain or not.",
    **{
        f"txn_{name}_time_ns_total": f"ns spent in {what} with success. 0 without transactions."
        for name, what in TRANSACTION_CALLS.items()
    },
    "kafka_metrics_count": "How many metrics there are. (Java: `count` in `kafka-metrics-count`.)",
}

#: What the producer knows without counting, and hands in.
GAUGES = {
    "requests_in_flight": "Requests that have no answer yet.",
    "metadata_age": "Seconds since the last full update of the metadata; 0 before the first.",
    "waiting_threads": "Records that wait for `buffer_memory` now (Java's name: no threads wait).",
    "buffer_total_bytes": "`buffer_memory`.",
    "buffer_available_bytes": "What of it is free.",
    "start_time_ms": "When the producer was made, in ms since 1970.",
}

#: A metric whose information is in its tag; the value is always 1.
APP_INFO = "app_info"

#: Java's names that are not here, and why.
LEFT_OUT = {
    "`select-*`, `io-wait-*`, `io-time-*`, `io-ratio`": (
        "they are about Java's own I/O thread. Here that is the event loop, which is yours."
    ),
    "`txn-prepare-time-ns-total`": "it comes with two-phase commit.",
    "`commit-id` of `app-info`": "the version says it.",
}


def _value_total(series: Sampled, now: float) -> float:
    return series.total


def _event_total(series: Sampled, now: float) -> float:
    return float(series.count)


_Reader = Callable[[Sampled, float], float]

_READERS: Mapping[tuple[str, bool], _Reader] = {
    ("rate", False): Sampled.rate,
    ("rate", True): Sampled.event_rate,
    ("total", False): _value_total,
    ("total", True): _event_total,
    ("avg", False): Sampled.average,
    ("", False): Sampled.average,
    ("max", False): Sampled.maximum,
}


def _readers(families: Iterable[Family]) -> tuple[tuple[str, str, _Reader], ...]:
    return tuple(
        (name, family.series, _READERS[stat, family.events])
        for family in families
        for name, stat in zip(family.names, family.stats, strict=True)
    )


_NO_GAUGES: Mapping[str, float] = MappingProxyType({})

_PRODUCER = _readers(PRODUCER_FAMILIES)
_TOPIC = _readers(TOPIC_FAMILIES)
_NODE = _readers(NODE_FAMILIES)


def metrics_table() -> str:
    """All metrics as Markdown, for docs/metrics.md."""
    lines = ["| metric | of | what it is |", "|---|---|---|"]

    def add(names: Iterable[str], tag: str, of: str, meaning: str) -> None:
        lines.append(f"| {', '.join(f'`{name}{tag}`' for name in names)} | {of} | {meaning} |")

    for family in PRODUCER_FAMILIES:
        add(family.names, "", "producer", family.meaning)
    for name, meaning in (SINGLES | GAUGES).items():
        add([name], "", "producer", meaning)
    add([APP_INFO], ":version=...", "producer", "Always 1: the tag is the package's version.")
    for family in TOPIC_FAMILIES:
        add(family.names, ":topic=...", "topic", family.meaning)
    for family in NODE_FAMILIES:
        add(family.names, ":node=node-...", "broker", family.meaning)
    return "\n".join(lines) + "\n"


# -- the numbers ---------------------------------------------------------------------------


class _Topic:
    __slots__ = ("bytes", "compression", "errors", "records", "retries")

    def __init__(self, sampled: Callable[[], Sampled]) -> None:
        self.records = sampled()
        self.bytes = sampled()
        self.compression = sampled()
        self.retries = sampled()
        self.errors = sampled()


class _Node:
    __slots__ = ("latency", "read", "request_size", "written")

    def __init__(self, sampled: Callable[[], Sampled]) -> None:
        # Of its connections:
        self.written = sampled()
        self.read = sampled()
        # Of Produce requests:
        self.request_size = sampled()
        self.latency = sampled()


class Metrics:
    """What the scheduler counts, and the snapshot that users see."""

    def __init__(self, *, client_id: str, samples: int = SAMPLES, window: float = WINDOW) -> None:
        self.client_id = client_id
        self._sampled = partial(Sampled, samples=samples, window=window)
        #: Records with their end, since the start.
        self.acknowledged = 0
        self.failed = 0
        #: The last time that anything was recorded, for calls that bring none.
        self._now = 0.0
        sampled = self._sampled
        self._batch_size = sampled()
        self._compression = sampled()
        self._queue_time = sampled()
        self._latency = sampled()
        self._throttle = sampled()
        self._sent_records = sampled()
        self._per_request = sampled()
        self._retries = sampled()
        self._errors = sampled()
        self._record_size = sampled()
        self._splits = sampled()
        self._exhausted = sampled()
        self._memory_waits = sampled()
        self._opened = sampled()
        self._closed = sampled()
        self._written = sampled()
        self._read = sampled()
        self._answers = sampled()
        self._authentications = sampled()
        self._failed_authentications = sampled()
        self._reauthentications = sampled()
        self._failed_reauthentications = sampled()
        self._flush_seconds = 0.0
        self._metadata_seconds = 0.0
        self._transaction_seconds = dict.fromkeys(TRANSACTION_CALLS, 0.0)
        self._topics: dict[str, _Topic] = {}
        self._nodes: dict[int, _Node] = {}

    def batch_drained(self, batch: ProducerBatch, now: float) -> None:
        """A batch was sealed and goes into a request."""
        self._now = now
        size = batch.estimated_size()
        # Of the records alone: a header cannot be compressed (Java's compression-rate).
        ratio = (size - BATCH_OVERHEAD) / (batch.size - BATCH_OVERHEAD)
        self._batch_size.add(size, now)
        self._compression.add(ratio, now)
        self._queue_time.add((now - batch.created_at) * 1000, now)
        self._sent_records.add(batch.count, now)
        self._record_size.add(batch.max_record_size, now)
        topic = self._topics.get(batch.topic)
        if topic is None:
            topic = self._topics[batch.topic] = _Topic(self._sampled)
        topic.records.add(batch.count, now)
        topic.bytes.add(size, now)
        topic.compression.add(ratio, now)

    def request_sent(self, node_id: int, batches: Iterable[ProducerBatch]) -> None:
        """A Produce request was handed to the connection of `node_id`."""
        size = records = 0
        for batch in batches:
            size += batch.estimated_size()
            records += batch.count
        self._node(node_id).request_size.add(size, self._now)
        self._per_request.add(records, self._now)

    def request_done(self, node_id: int, latency: float | None) -> None:
        """A Produce request ended; `latency` in seconds if it was answered."""
        if latency is None:
            return
        self._node(node_id).latency.add(latency * 1000, self._now)
        self._latency.add(latency * 1000, self._now)

    def throttled(self, throttle_ms: int) -> None:
        """A response of any kind brought this throttle time (0 counts as well)."""
        self._throttle.add(throttle_ms, self._now)

    def batch_acknowledged(self, batch: ProducerBatch, now: float) -> None:
        """All records of the batch are in the log."""
        self._now = now
        self.acknowledged += batch.count

    def batch_split(self, topic: str) -> None:
        """A broker found a batch too large, and it was split."""
        self._splits.add(1, self._now)

    def records_retried(self, topic: str, records: int) -> None:
        """A batch was put back to be sent again."""
        self._retries.add(records, self._now)
        known = self._topics.get(topic)
        if known is not None:
            known.retries.add(records, self._now)

    def tick(self, now: float) -> None:
        """The time of what follows, where it is not told."""
        self._now = now

    def records_failed(self, topic: str, records: int) -> None:
        """Buffered records ended without being acknowledged."""
        self.failed += records
        self._error(topic, records)

    def record_refused(self, topic: str) -> None:
        """A record was refused before it was buffered."""
        self._error(topic, 1)

    def _error(self, topic: str, records: int) -> None:
        self._errors.add(records, self._now)
        known = self._topics.get(topic)
        if known is not None:
            known.errors.add(records, self._now)

    def flushed(self, seconds: float) -> None:
        """A flush took this long."""
        self._flush_seconds += seconds

    def metadata_waited(self, seconds: float) -> None:
        """A call waited this long for its topic's metadata, and got it."""
        self._metadata_seconds += seconds

    def transaction_called(self, name: str, seconds: float) -> None:
        """A call of a transaction took this long, and succeeded."""
        self._transaction_seconds[name] += seconds

    # -- memory ----------------------------------------------------------------------------

    def memory_waited(self, seconds: float, now: float) -> None:
        """Waits for memory have ended which took this long together."""
        self._now = now
        self._memory_waits.add(seconds, now)

    def buffer_exhausted(self, now: float) -> None:
        """A record got no memory."""
        self._now = now
        self._exhausted.add(1, now)

    # -- connections -----------------------------------------------------------------------

    def connection_opened(self, now: float) -> None:
        """There is a connection, though nothing was said on it."""
        self._now = now
        self._opened.add(1, now)

    def connection_closed(self, now: float) -> None:
        """One of them has ended."""
        self._now = now
        self._closed.add(1, now)

    def written(self, node_id: int, size: int, now: float) -> None:
        """A request of so many bytes was written."""
        self._now = now
        self._written.add(size, now)
        self._node(node_id).written.add(size, now)

    def read(self, node_id: int, size: int, now: float) -> None:
        """So many bytes came in at once."""
        self._now = now
        self._read.add(size, now)
        self._node(node_id).read.add(size, now)

    def answered(self, now: float) -> None:
        """A whole answer came in."""
        self._now = now
        self._answers.add(1, now)

    def authenticated(self, now: float) -> None:
        """A new connection came through SASL, or TLS alone."""
        self._now = now
        self._authentications.add(1, now)

    def authentication_failed(self, now: float) -> None:
        """A new connection was refused."""
        self._now = now
        self._failed_authentications.add(1, now)

    def reauthenticated(self, seconds: float, now: float) -> None:
        """A session was renewed; nothing could be sent for so long."""
        self._now = now
        self._reauthentications.add(seconds * 1000, now)

    def reauthentication_failed(self, now: float) -> None:
        """A session could not be renewed."""
        self._now = now
        self._failed_reauthentications.add(1, now)

    # -- reading ---------------------------------------------------------------------------

    def _node(self, node_id: int) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(self._sampled)
        return node

    def snapshot(self, now: float, gauges: Mapping[str, float] = _NO_GAUGES) -> dict[str, float]:
        """All of it at this moment, and `gauges`. What has no value yet is 0."""
        io = (self._written, self._read)
        out = {
            "batch_count": float(self._batch_size.count),
            "connection_count": float(self._opened.count - self._closed.count),
            "network_io_rate": sum(series.event_rate(now) for series in io),
            "network_io_total": float(sum(series.count for series in io)),
            "bufferpool_wait_ratio": self._memory_waits.rate(now),
            "bufferpool_wait_time_ns_total": self._memory_waits.total * 1e9,
            "metadata_wait_time_ns_total": self._metadata_seconds * 1e9,
            "flush_time_ns_total": self._flush_seconds * 1e9,
            **{
                f"txn_{name}_time_ns_total": seconds * 1e9
                for name, seconds in self._transaction_seconds.items()
            },
            **gauges,
        }
        for name, series, read in _PRODUCER:
            out[name] = read(getattr(self, f"_{series}"), now)
        for topic, numbers in self._topics.items():
            for name, series, read in _TOPIC:
                out[f"{name}:topic={topic}"] = read(getattr(numbers, series), now)
        for node_id, node in self._nodes.items():
            for name, series, read in _NODE:
                out[f"{name}:node=node-{node_id}"] = read(getattr(node, series), now)
        # With itself, as in Java.
        out["kafka_metrics_count"] = len(out) + 1.0
        return out
