"""The producer's numbers, by Java's names in snake_case.

Everything is counted per batch and per request, never per record. Rates, averages and
maxima cover the last `SAMPLES` windows of `WINDOW` seconds, as Java's sampled stats do;
`*_total` count from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from asyncproducer.core.batch import BATCH_OVERHEAD

if TYPE_CHECKING:
    from asyncproducer.core.batch import ProducerBatch

__all__ = ["Metrics", "Sampled"]

#: Java: metrics.num.samples and metrics.sample.window.ms.
SAMPLES = 2
WINDOW = 30.0


class Sampled:
    """A series of values: total since the start; sum, count and maximum of recent windows."""

    __slots__ = ("_samples", "_window", "count", "total")

    def __init__(self, *, samples: int = SAMPLES, window: float = WINDOW) -> None:
        self._window = window
        #: [start, sum, count, max] of each window, a ring.
        self._samples: list[list[float]] = [[-1.0, 0.0, 0.0, 0.0] for _ in range(samples)]
        self.total = 0.0
        self.count = 0

    def add(self, value: float, now: float, count: int = 1) -> None:
        """Record `value`, which stands for `count` events."""
        self.total += value
        self.count += count
        start = now - now % self._window
        sample = self._samples[int(now / self._window) % len(self._samples)]
        if sample[0] != start:
            sample[:] = [start, 0.0, 0.0, 0.0]
        sample[1] += value
        sample[2] += count
        sample[3] = max(sample[3], value)

    def _recent(self, now: float) -> list[list[float]]:
        oldest = now - self._window * len(self._samples)
        return [s for s in self._samples if s[0] >= 0 and s[0] > oldest]

    def rate(self, now: float) -> float:
        """Sum per second over the recent windows."""
        recent = self._recent(now)
        if not recent:
            return 0.0
        # Java: a window that has just begun must not make the rate explode.
        elapsed = max(now - min(s[0] for s in recent), self._window * (len(self._samples) - 1))
        return sum(s[1] for s in recent) / elapsed

    def average(self, now: float) -> float:
        """Sum per event over the recent windows."""
        recent = self._recent(now)
        count = sum(s[2] for s in recent)
        return sum(s[1] for s in recent) / count if count else 0.0

    def maximum(self, now: float) -> float:
        """The largest value of the recent windows."""
        return max((s[3] for s in self._recent(now)), default=0.0)


class _Topic:
    __slots__ = ("bytes", "compression", "errors", "records", "retries")

    def __init__(self, sampled: Callable[[], Sampled]) -> None:
        self.records = sampled()
        self.bytes = sampled()
        self.compression = sampled()
        self.retries = sampled()
        self.errors = sampled()


class _Node:
    __slots__ = ("latency", "request_size", "requests", "responses")

    def __init__(self, sampled: Callable[[], Sampled]) -> None:
        self.requests = sampled()
        self.request_size = sampled()
        self.responses = sampled()
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
        self._sent = sampled()
        self._per_request = sampled()
        self._retries = sampled()
        self._errors = sampled()
        self._record_size = sampled()
        self._splits = sampled()
        self._flush_seconds = 0.0
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
        self._sent.add(batch.count, now)
        self._record_size.add(batch.max_record_size, now)
        topic = self._topics.get(batch.topic)
        if topic is None:
            topic = self._topics[batch.topic] = _Topic(self._sampled)
        topic.records.add(batch.count, now)
        topic.bytes.add(size, now)
        topic.compression.add(ratio, now)

    def request_sent(self, node_id: int, batches: Iterable[ProducerBatch]) -> None:
        """A Produce request was handed to the connection of `node_id`."""
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(self._sampled)
        size = records = 0
        for batch in batches:
            size += batch.estimated_size()
            records += batch.count
        node.requests.add(1, self._now)
        node.request_size.add(size, self._now)
        self._per_request.add(records, self._now)

    def request_done(self, node_id: int, latency: float | None) -> None:
        """A request ended; `latency` in seconds if it was answered."""
        if latency is None:
            return
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(self._sampled)
        node.responses.add(1, self._now)
        node.latency.add(latency * 1000, self._now)
        self._latency.add(latency * 1000, self._now)

    def throttled(self, throttle_ms: int) -> None:
        """A response brought this throttle time (0 counts as well)."""
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

    def snapshot(self, now: float) -> dict[str, float]:
        """All of it at this moment. Sizes are bytes, times ms unless the name says ns."""
        out = {
            "batch_count": self._batch_size.count,
            "batch_size_avg": self._batch_size.average(now),
            "batch_size_max": self._batch_size.maximum(now),
            "compression_rate_avg": self._compression.average(now),
            "record_queue_time_avg": self._queue_time.average(now),
            "record_queue_time_max": self._queue_time.maximum(now),
            "request_latency_avg": self._latency.average(now),
            "request_latency_max": self._latency.maximum(now),
            "produce_throttle_time_avg": self._throttle.average(now),
            "produce_throttle_time_max": self._throttle.maximum(now),
            "record_send_rate": self._sent.rate(now),
            "record_send_total": self._sent.total,
            "records_per_request_avg": self._per_request.average(now),
            "record_retry_rate": self._retries.rate(now),
            "record_retry_total": self._retries.total,
            "record_error_rate": self._errors.rate(now),
            "record_error_total": self._errors.total,
            "record_size_avg": self._record_size.average(now),
            "record_size_max": self._record_size.maximum(now),
            "batch_split_rate": self._splits.rate(now),
            "batch_split_total": self._splits.total,
            "flush_time_ns_total": self._flush_seconds * 1e9,
        }
        for name, topic in self._topics.items():
            tag = f":topic={name}"
            out["record_send_rate" + tag] = topic.records.rate(now)
            out["record_send_total" + tag] = topic.records.total
            out["byte_rate" + tag] = topic.bytes.rate(now)
            out["byte_total" + tag] = topic.bytes.total
            out["compression_rate" + tag] = topic.compression.average(now)
            out["record_retry_rate" + tag] = topic.retries.rate(now)
            out["record_retry_total" + tag] = topic.retries.total
            out["record_error_rate" + tag] = topic.errors.rate(now)
            out["record_error_total" + tag] = topic.errors.total
        for node_id, node in self._nodes.items():
            tag = f":node=node-{node_id}"
            out["request_rate" + tag] = node.requests.rate(now)
            out["request_total" + tag] = node.requests.total
            out["request_size_avg" + tag] = node.request_size.average(now)
            out["request_size_max" + tag] = node.request_size.maximum(now)
            out["outgoing_byte_rate" + tag] = node.request_size.rate(now)
            out["outgoing_byte_total" + tag] = node.request_size.total
            out["response_rate" + tag] = node.responses.rate(now)
            out["response_total" + tag] = node.responses.total
            out["request_latency_avg" + tag] = node.latency.average(now)
            out["request_latency_max" + tag] = node.latency.maximum(now)
        return out
