from __future__ import annotations

import re

import pytest

from asyncproducer.core.batch import NO_HEADERS, ProducerBatch, batch_upper_bound
from asyncproducer.core.compression import codec
from asyncproducer.core.metrics import (
    GAUGES,
    NODE_FAMILIES,
    PRODUCER_FAMILIES,
    SINGLES,
    TOPIC_FAMILIES,
    Metrics,
    Sampled,
    metrics_table,
)


def sealed(
    records: int,
    *,
    size: int = 100,
    topic: str = "orders",
    created_at: float = 0.0,
    compression: str | None = None,
) -> ProducerBatch:
    batch = ProducerBatch(
        topic,
        0,
        write_limit=100_000,
        created_at=created_at,
        codec=None if compression is None else codec(compression),
    )
    for _ in range(records):
        batch.try_append(0, None, bytes(size), NO_HEADERS)
    batch.close()
    if batch.codec is not None:
        batch.compressed(batch.codec.compress(batch.uncompressed()))
    batch.seal()
    return batch


# -- one series ----------------------------------------------------------------------------


def test_nothing_recorded_is_zero() -> None:
    series = Sampled()
    assert (series.rate(5.0), series.average(5.0), series.maximum(5.0)) == (0.0, 0.0, 0.0)
    assert (series.total, series.count) == (0.0, 0)


def test_average_maximum_and_total() -> None:
    """SN-02: 400, 100, 200 and 300 average to 250 and peak at 400."""
    series = Sampled()
    for value in (400, 100, 200, 300):
        series.add(value, 5.0)
    assert (series.average(5.0), series.maximum(5.0)) == (250.0, 400.0)
    assert (series.total, series.count) == (1000.0, 4)


def test_a_value_can_stand_for_several_events() -> None:
    series = Sampled()
    series.add(90.0, 1.0, count=3)
    series.add(10.0, 1.0)
    assert series.average(1.0) == 25.0
    assert series.count == 4


def test_events_have_a_rate_of_their_own() -> None:
    series = Sampled(samples=2, window=30.0)
    series.add(90.0, 1.0, count=3)
    series.add(10.0, 40.0)
    assert (series.rate(40.0), series.event_rate(40.0)) == (100 / 40, 4 / 40)
    assert (series.rate(60.0), series.event_rate(60.0)) == (10 / 30, 1 / 30)


def test_values_leave_with_their_window_and_totals_stay() -> None:
    series = Sampled(samples=2, window=30.0)
    series.add(100.0, 10.0)  # window from 0 on
    series.add(20.0, 40.0)  # window from 30 on
    assert (series.average(59.0), series.maximum(59.0)) == (60.0, 100.0)
    assert (series.average(60.0), series.maximum(60.0)) == (20.0, 20.0)
    assert (series.average(90.0), series.maximum(90.0)) == (0.0, 0.0)
    assert series.total == 120.0


def test_a_window_is_used_again_for_a_later_time() -> None:
    series = Sampled(samples=2, window=30.0)
    series.add(100.0, 10.0)
    series.add(1.0, 70.0)  # the same place in the ring
    assert (series.average(70.0), series.maximum(70.0)) == (1.0, 1.0)


def test_a_rate_counts_at_least_all_windows_but_one() -> None:
    """Java's Rate: a window that has just begun must not make the rate explode."""
    series = Sampled(samples=2, window=30.0)
    series.add(60.0, 60.0)
    assert series.rate(60.0) == 2.0
    assert series.rate(61.0) == 2.0
    assert series.rate(105.0) == pytest.approx(60 / 45)
    series.add(30.0, 95.0)
    assert series.rate(100.0) == pytest.approx(90 / 40)
    only = Sampled(samples=1, window=30.0)
    only.add(60.0, 60.0)
    assert (only.rate(60.0), only.rate(61.0)) == (0.0, 60.0), "no time has gone by yet"


def test_what_it_tells_are_floats_also_where_integers_came_in() -> None:
    series = Sampled()
    series.add(195, 1.0)
    told = (series.rate(1.0), series.average(1.0), series.maximum(1.0), series.total)
    assert [type(number) for number in told] == [float] * 4


def test_any_window_length_works() -> None:
    series = Sampled(samples=3, window=0.7)
    for step in range(2000):
        series.add(1.0, step * 0.01)
    # Two whole windows and the one that has begun, 100 values a second.
    assert series.rate(19.99) == pytest.approx(100, rel=0.02)
    assert series.average(19.99) == 1.0
    assert series.count == 2000


# -- the producer's numbers ----------------------------------------------------------------


def test_what_a_drained_batch_counts() -> None:
    metrics = Metrics(client_id="me")
    batch = sealed(3, created_at=1.0)
    metrics.batch_drained(batch, 1.25)
    numbers = metrics.snapshot(1.25)
    assert numbers["batch_size_avg"] == numbers["batch_size_max"] == batch.size
    assert numbers["record_queue_time_avg"] == numbers["record_queue_time_max"] == 250.0
    assert numbers["record_send_total"] == 3
    assert numbers["record_send_rate"] == pytest.approx(3 / 30)
    bound = batch_upper_bound(None, bytes(100), NO_HEADERS)
    assert numbers["record_size_avg"] == numbers["record_size_max"] == bound
    assert numbers["compression_rate_avg"] == 1.0
    assert numbers["record_send_total:topic=orders"] == 3
    assert numbers["byte_total:topic=orders"] == batch.size
    assert numbers["compression_rate:topic=orders"] == 1.0
    assert metrics.client_id == "me"


def test_the_compression_rate_is_that_of_the_records_alone() -> None:
    """Spec 2.7: headers are not compressed and do not count."""
    metrics = Metrics(client_id="me")
    batch = sealed(10, compression="lz4")
    metrics.batch_drained(batch, 1.0)
    assert batch.payload is not None
    expected = len(batch.payload) / (batch.size - 61)
    assert metrics.snapshot(1.0)["compression_rate_avg"] == pytest.approx(expected)
    assert expected < 0.2


def test_requests_are_counted_per_node() -> None:
    metrics = Metrics(client_id="me")
    batches = [sealed(3), sealed(4)]
    for batch in batches:
        metrics.batch_drained(batch, 2.0)
    metrics.request_sent(7, batches)
    metrics.request_sent(8, batches[:1])
    metrics.request_done(7, 0.2)
    metrics.request_done(8, 0.4)
    metrics.request_done(9, None)  # lost, or acks=0: no latency
    metrics.request_done(10, 0.3)  # answered, though nothing was counted when it was sent
    numbers = metrics.snapshot(2.0)
    assert numbers["records_per_request_avg"] == 5.0
    assert numbers["request_total:node=node-7"] == 1
    assert numbers["request_rate:node=node-7"] == pytest.approx(1 / 30)
    assert numbers["request_size_avg:node=node-7"] == sum(b.size for b in batches)
    assert numbers["request_size_max:node=node-8"] == batches[0].size
    assert numbers["response_total:node=node-7"] == 1
    assert numbers["request_latency_max:node=node-8"] == 400.0
    assert numbers["request_latency_avg"] == pytest.approx(300.0)
    assert numbers["request_latency_max"] == 400.0
    assert "request_total:node=node-9" not in numbers
    assert numbers["request_latency_avg:node=node-10"] == pytest.approx(300.0)


def test_throttling_counts_unthrottled_answers_as_well() -> None:
    """SN-02."""
    metrics = Metrics(client_id="me")
    for throttle in (400, 0, 200, 0):
        metrics.throttled(throttle)
    numbers = metrics.snapshot(0.0)
    assert numbers["produce_throttle_time_avg"] == 150.0
    assert numbers["produce_throttle_time_max"] == 400.0


def test_every_record_ends_in_acknowledged_or_failed() -> None:
    metrics = Metrics(client_id="me")
    first, second = sealed(3), sealed(4)
    metrics.batch_drained(first, 1.0)
    metrics.batch_acknowledged(first, 2.0)
    metrics.records_failed("orders", second.count)
    assert (metrics.acknowledged, metrics.failed) == (3, 4)
    numbers = metrics.snapshot(2.0)
    assert numbers["record_error_total"] == numbers["record_error_total:topic=orders"] == 4


def test_refused_records_are_errors_but_were_never_buffered() -> None:
    metrics = Metrics(client_id="me")
    metrics.record_refused("unknown")
    numbers = metrics.snapshot(0.0)
    assert numbers["record_error_total"] == 1
    assert metrics.failed == 0
    # A name that no broker has confirmed gets no series of its own.
    assert not any("unknown" in name for name in numbers)


def test_retries_splits_and_flushes() -> None:
    metrics = Metrics(client_id="me")
    metrics.records_retried("orders", 5)
    metrics.batch_drained(sealed(5), 3.0)
    metrics.records_retried("orders", 5)
    metrics.batch_split("orders")
    metrics.flushed(0.25)
    metrics.flushed(0.5)
    metrics.metadata_waited(0.125)
    metrics.metadata_waited(2.0)
    numbers = metrics.snapshot(3.0)
    assert numbers["record_retry_total"] == 10
    assert numbers["record_retry_total:topic=orders"] == 5
    assert numbers["batch_split_total"] == 1
    assert numbers["batch_split_rate"] == pytest.approx(1 / 30)
    assert numbers["flush_time_ns_total"] == 750_000_000
    assert numbers["metadata_wait_time_ns_total"] == 2_125_000_000


def test_what_brings_no_time_counts_at_the_last_known_time() -> None:
    metrics = Metrics(client_id="me")
    batch = sealed(5)
    metrics.records_retried("orders", 100)
    metrics.batch_drained(batch, 1000.0)
    metrics.records_retried("orders", 5)
    metrics.batch_acknowledged(batch, 2000.0)
    metrics.records_failed("orders", 3)
    assert metrics.snapshot(1000.0)["record_retry_rate"] == pytest.approx(5 / 30)
    assert metrics.snapshot(2000.0)["record_error_rate"] == pytest.approx(3 / 30)


def test_topics_are_kept_apart() -> None:
    metrics = Metrics(client_id="me")
    metrics.batch_drained(sealed(1), 1.0)
    metrics.batch_drained(sealed(2, topic="bills"), 1.0)
    numbers = metrics.snapshot(1.0)
    assert numbers["record_send_total:topic=orders"] == 1
    assert numbers["record_send_total:topic=bills"] == 2
    assert numbers["record_send_total"] == 3


# -- memory and connections ----------------------------------------------------------------


def test_waits_for_memory_are_set_against_the_time_that_passed() -> None:
    """Spec 4.5: two who wait at once make a ratio above 1."""
    metrics = Metrics(client_id="me")
    metrics.memory_waited(75.0, 10.0)
    metrics.buffer_exhausted(10.0)
    metrics.buffer_exhausted(20.0)
    numbers = metrics.snapshot(30.0)
    assert numbers["bufferpool_wait_ratio"] == pytest.approx(75 / 30)
    assert numbers["bufferpool_wait_time_ns_total"] == 75e9
    assert numbers["buffer_exhausted_total"] == 2
    assert numbers["buffer_exhausted_rate"] == pytest.approx(2 / 30)


def test_open_connections_are_those_made_less_those_ended() -> None:
    metrics = Metrics(client_id="me")
    for at in (1.0, 2.0, 3.0):
        metrics.connection_opened(at)
    metrics.connection_closed(6.0)
    numbers = metrics.snapshot(30.0)
    assert numbers["connection_count"] == 2
    assert numbers["connection_creation_total"] == 3
    assert numbers["connection_creation_rate"] == pytest.approx(3 / 30)
    assert numbers["connection_close_total"] == 1
    assert numbers["connection_close_rate"] == pytest.approx(1 / 30)


def test_what_goes_over_the_wire_is_counted_for_all_and_for_each_node() -> None:
    metrics = Metrics(client_id="me")
    metrics.written(-1, 40, 1.0)
    metrics.written(7, 1000, 2.0)
    metrics.written(7, 160, 3.0)
    metrics.read(7, 300, 4.0)  # one read, two answers
    metrics.answered(4.0)
    metrics.answered(4.0)
    numbers = metrics.snapshot(30.0)
    assert numbers["outgoing_byte_total"] == 1200
    assert numbers["outgoing_byte_rate"] == pytest.approx(40.0)
    assert numbers["request_total"] == 3
    assert numbers["request_rate"] == pytest.approx(3 / 30)
    assert (numbers["request_size_avg"], numbers["request_size_max"]) == (400, 1000)
    assert numbers["incoming_byte_total"] == 300
    assert numbers["incoming_byte_rate"] == pytest.approx(10.0)
    assert numbers["response_total"] == 2
    assert numbers["response_rate"] == pytest.approx(2 / 30)
    assert numbers["network_io_total"] == 4
    assert numbers["network_io_rate"] == pytest.approx(4 / 30)
    assert numbers["outgoing_byte_total:node=node-7"] == 1160
    assert numbers["outgoing_byte_rate:node=node-7"] == pytest.approx(1160 / 30)
    assert numbers["incoming_byte_total:node=node-7"] == 300
    assert numbers["incoming_byte_rate:node=node-7"] == pytest.approx(10.0)
    assert numbers["outgoing_byte_total:node=node--1"] == 40


def test_authentications_of_new_connections_and_of_old_ones() -> None:
    metrics = Metrics(client_id="me")
    for at in (1.0, 2.0):
        metrics.authenticated(at)
    metrics.authentication_failed(3.0)
    metrics.reauthenticated(0.25, 4.0)
    metrics.reauthenticated(0.75, 5.0)
    for at in (6.0, 7.0, 8.0):
        metrics.reauthentication_failed(at)
    numbers = metrics.snapshot(30.0)
    assert numbers["successful_authentication_total"] == 2
    assert numbers["successful_authentication_no_reauth_total"] == 2
    assert numbers["successful_authentication_rate"] == pytest.approx(2 / 30)
    assert numbers["failed_authentication_total"] == 1
    assert numbers["failed_authentication_rate"] == pytest.approx(1 / 30)
    assert numbers["successful_reauthentication_total"] == 2
    assert numbers["successful_reauthentication_rate"] == pytest.approx(2 / 30)
    assert numbers["reauthentication_latency_avg"] == 500.0
    assert numbers["reauthentication_latency_max"] == 750.0
    assert numbers["failed_reauthentication_total"] == 3
    assert numbers["failed_reauthentication_rate"] == pytest.approx(3 / 30)


# -- the whole -----------------------------------------------------------------------------


#: What Java's producer 4.3 has without transactions, connected to one node, which an
#: asyncio producer can have as well.
JAVA = """
batch-size-avg batch-size-max batch-split-rate batch-split-total buffer-available-bytes
buffer-exhausted-rate buffer-exhausted-total buffer-total-bytes bufferpool-wait-ratio
bufferpool-wait-time-ns-total compression-rate-avg connection-close-rate connection-close-total
connection-count connection-creation-rate connection-creation-total failed-authentication-rate
failed-authentication-total failed-reauthentication-rate failed-reauthentication-total
flush-time-ns-total incoming-byte-rate incoming-byte-total metadata-age
metadata-wait-time-ns-total network-io-rate network-io-total outgoing-byte-rate
outgoing-byte-total produce-throttle-time-avg produce-throttle-time-max reauthentication-latency-avg
reauthentication-latency-max record-error-rate record-error-total record-queue-time-avg
record-queue-time-max record-retry-rate record-retry-total record-send-rate record-send-total
record-size-avg record-size-max records-per-request-avg request-latency-avg request-latency-max
request-rate request-size-avg request-size-max request-total requests-in-flight response-rate
response-total successful-authentication-no-reauth-total successful-authentication-rate
successful-authentication-total successful-reauthentication-rate
successful-reauthentication-total waiting-threads start-time-ms txn-init-time-ns-total
txn-begin-time-ns-total txn-send-offsets-time-ns-total txn-commit-time-ns-total
txn-abort-time-ns-total
"""
JAVA_TOPIC = """
record-send-rate record-send-total byte-rate byte-total compression-rate record-retry-rate
record-retry-total record-error-rate record-error-total
"""
JAVA_NODE = """
outgoing-byte-rate outgoing-byte-total request-rate request-total request-size-avg
request-size-max incoming-byte-rate incoming-byte-total response-rate response-total
request-latency-avg request-latency-max
"""


def snake(names: str) -> set[str]:
    return set(names.replace("-", "_").split())


def test_the_names_are_those_of_java_and_all_of_them_are_there() -> None:
    """Spec 10.8, and two of ours."""
    metrics = Metrics(client_id="me")
    metrics.batch_drained(sealed(1), 1.0)
    metrics.written(7, 1, 1.0)
    numbers = metrics.snapshot(1.0, dict.fromkeys(GAUGES, 0.0))
    plain = {name for name in numbers if ":" not in name}
    assert plain == snake(JAVA) | {"batch_count", "kafka_metrics_count"}
    suffix = ":topic=orders"
    of_topic = {name.removesuffix(suffix) for name in numbers if name.endswith(suffix)}
    assert of_topic == snake(JAVA_TOPIC)
    suffix = ":node=node-7"
    of_node = {name.removesuffix(suffix) for name in numbers if name.endswith(suffix)}
    assert of_node == snake(JAVA_NODE)
    assert numbers["kafka_metrics_count"] == len(numbers)
    assert len(numbers) == len(plain) + len(of_topic) + len(of_node)


def test_every_metric_is_a_number_before_anything_happened() -> None:
    numbers = Metrics(client_id="me").snapshot(0.0)
    assert set(numbers) == set(SINGLES) | {n for f in PRODUCER_FAMILIES for n in f.names}
    assert {value for name, value in numbers.items() if name != "kafka_metrics_count"} == {0.0}


def test_the_table_has_each_metric_once() -> None:
    cells = re.findall(
        r"^\| ([^|]+) \| (?:producer|topic|broker) \|", metrics_table(), re.MULTILINE
    )
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    expected = [name for f in PRODUCER_FAMILIES for name in f.names]
    expected += [*SINGLES, *GAUGES, "app_info:version=..."]
    expected += [f"{name}:topic=..." for f in TOPIC_FAMILIES for name in f.names]
    expected += [f"{name}:node=node-..." for f in NODE_FAMILIES for name in f.names]
    assert names == expected
    assert len(set(names)) == len(names)


def test_a_window_of_no_time_is_a_short_one() -> None:
    """Java allows metrics.sample.window.ms=0."""
    series = Sampled(samples=2, window=0.0)
    series.add(3.0, 5.0)
    series.add(1.0, 5.0)
    assert series.total == 4.0
    assert series.maximum(5.0) == 3.0


def test_a_ring_as_large_as_an_int_takes_what_is_used() -> None:
    series = Sampled(samples=2**31 - 1, window=1.0)
    series.add(3.0, 5.0)
    assert series.average(6.0) == 3.0


def test_errors_count_for_the_time_they_are_told_in() -> None:
    """Also in an outage, when nothing else is recorded."""
    metrics = Metrics(client_id="c")
    metrics.tick(1000.0)
    metrics.records_failed("t", 60)
    assert metrics.snapshot(1001.0)["record_error_rate"] > 0
