# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
"""The scheduler at work: whole producers on an embedded cluster, whose answers go wrong."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import pytest

from asyncproducer import (
    IMPLEMENTATION,
    AbortedError,
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    ConnectionFailed,
    Delivery,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    Interceptor,
    KafkaError,
    Producer,
    ProducerClosed,
    ProtocolError,
    Record,
    RecordMetadata,
    UnsupportedVersionError,
)
from asyncproducer.core import wire
from asyncproducer.core.batch import NO_HEADERS
from asyncproducer.core.compression import codec
from asyncproducer.core.sequences import MAX_EPOCH, IdState, PartitionSequences
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.faults import BatchSummary, Drop
from asyncproducer.testing.handlers import APIS, Call
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

#: One record of 100 bytes in each batch, which leaves at once.
SINGLE: dict[str, Any] = {"batch_size": 150, "batch_max_bytes": 0, "linger_ms": 0}


def now() -> float:
    return asyncio.get_running_loop().time()


def payload(number: int) -> bytes:
    return b"%0100d" % number


def stored(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[int]:
    return [int(record.value or b"-1") for record in cluster.records(topic, partition)]


def batches(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[BatchSummary]:
    """What was sent for a partition, in order."""
    return [
        batch
        for request in cluster.received("produce")
        for batch in request.batches
        if (batch.topic, batch.partition) == (topic, partition)
    ]


def sent_sequences(cluster: EmbeddedCluster, topic: str = "t") -> list[tuple[int, int]]:
    """(epoch, base sequence) of each batch that was sent, in order."""
    return [(batch.producer_epoch, batch.base_sequence) for batch in batches(cluster, topic)]


def sequences(producer: Producer[Any, Any], topic: str = "t") -> PartitionSequences:
    queue = producer._accumulator.topics[topic].queues[0]
    assert queue is not None
    return queue.sequences


async def outcomes(deliveries: Sequence[Delivery]) -> list[Any]:
    return await asyncio.gather(*deliveries, return_exceptions=True)


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


# -- sending and answers -----------------------------------------------------------------------


async def test_acknowledged_record_has_its_offset(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-01: and nothing is in flight any more."""
    async with new_producer() as producer:
        sent = [await producer.send("t", payload(n)) for n in range(3)]
        assert [metadata.offset for metadata in sent] == [0, 1, 2]
        assert producer.metrics()["requests_in_flight"] == 0


@pytest.mark.parametrize("acks", [1, "all"])
async def test_acks_are_asked_for(cluster: EmbeddedCluster, new_producer: New, acks: Any) -> None:
    async with new_producer(acks=acks, enable_idempotence=False) as producer:
        assert (await producer.send("t", payload(0))).offset == 0
    (request,) = cluster.received("produce")
    assert request.fields["acks"] == (1 if acks == 1 else -1)
    assert batches(cluster)[0].producer_id == -1
    assert not cluster.received("init_producer_id")


async def test_acks_0_ends_with_the_writing(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-20, IT-08: offset -1, the record's own timestamp, and errors are never heard of."""
    async with new_producer(acks=0, enable_idempotence=False) as producer:
        metadata = await producer.send("t", payload(0), timestamp=1000)
        assert (metadata.offset, metadata.timestamp, metadata.has_offset) == (-1, 1000, False)
        await asyncio.sleep(1)  # the broker has it now
        cluster.inject("produce", error="MESSAGE_TOO_LARGE")
        assert (await producer.send("t", payload(1))).offset == -1
        await asyncio.sleep(1)  # the broker closes the connection
        assert (await producer.send("t", payload(2))).offset == -1
        await asyncio.sleep(1)
    assert stored(cluster) == [0, 2]


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_full_batch_leaves_also_while_its_broker_has_a_request(
    cluster: EmbeddedCluster, new_producer: New, awaited: bool
) -> None:
    """The next ones gather while nothing more may be sent."""
    async with new_producer(batch_size=150, linger_ms=50) as producer:
        await producer.send("t", payload(0))
        held = cluster.inject("produce", hold=True)
        tasks: list[asyncio.Future[Any]] = []

        async def fill(*numbers: int) -> int:
            for number in numbers:
                if awaited:
                    tasks.append(asyncio.ensure_future(producer.send("t", payload(number))))
                else:
                    producer.send_nowait("t", payload(number))
            await asyncio.sleep(0.001)
            return int(producer.metrics()["requests_in_flight"])

        assert await fill(1) == 1
        assert [await fill(n, n + 1) for n in (2, 4, 6, 8)] == [2, 3, 4, 5]
        assert await fill(10, 11) == 5
        assert await fill(12, 13) == 5
        held.release()
        await producer.flush()
        await asyncio.gather(*tasks)
    assert [batch.record_count for batch in batches(cluster)] == [1, 1, 2, 2, 2, 2, 4]


@pytest.mark.parametrize(
    ("linger_ms", "most", "answered"), [(2, 0.002, False), (50, 0.005, False), (50, 0.003, True)]
)
async def test_what_waits_for_more_leaves_with_the_next_answer(
    cluster: EmbeddedCluster, new_producer: New, linger_ms: int, most: float, answered: bool
) -> None:
    """Or in time, if none comes: the task of the scheduler wakes up for it."""
    async with new_producer(linger_ms=linger_ms) as producer:
        await producer.send("t", payload(0))
        held = cluster.inject("produce", hold=True)
        producer.send_nowait("t", payload(1))
        await asyncio.sleep(0.001)
        accumulator, now = producer._accumulator, asyncio.get_running_loop().time()
        topic = accumulator.topics["t"]
        for _ in range(3):
            assert accumulator.append(topic, 0, 1, None, bytes(9000), NO_HEADERS, now)
        accumulator.pouring = True
        producer._scheduler.wake()
        await asyncio.sleep(most - 0.0001)
        sent = producer.metrics()["record_send_total"]
        assert producer.metrics()["requests_in_flight"] == 1
        if answered:
            held.release()
            await asyncio.sleep(0.0009)  # it takes so long
        await asyncio.sleep(0.0002)
        assert producer.metrics()["requests_in_flight"] == 2 - answered
        assert producer.metrics()["record_send_total"] == sent + 3
        held.release()


async def test_a_lone_send_takes_two_steps(cluster: EmbeddedCluster, new_producer: New) -> None:
    """One to send it, one for its answer: the task of the scheduler sleeps."""
    async with new_producer(linger_ms=1000) as producer:
        await producer.send("t", payload(0))
        await asyncio.sleep(0.001)
        scheduler = producer._scheduler
        step, steps = scheduler.step, []

        def counted(now: float) -> float:
            steps.append(now)
            return step(now)

        scheduler.step = counted  # type: ignore[method-assign]
        for number in range(1, 11):
            await producer.send("t", payload(number))
        assert len(steps) == 20
    assert stored(cluster) == list(range(11))


async def test_the_task_knows_of_a_linger_time_while_the_batch_still_grows(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(linger_ms=20) as producer:
        await producer.send("t", payload(0))
        held = cluster.inject("produce", hold=True)
        producer.send_nowait("t", payload(1))
        await held.reached()
        await asyncio.sleep(1)  # the time of the first ones is over
        scheduler = producer._scheduler
        assert scheduler._sleeps_until > now() + 1
        for number in range(2, 10):
            producer.send_nowait("t", b"%d" % number)
            await asyncio.sleep(0)
        assert scheduler._sleeps_until == pytest.approx(now() + 0.02)
        held.release()


async def test_what_fails_while_records_come_does_not_keep_the_next_ones_waiting(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    told: list[dict[str, Any]] = []

    def fails(node: int) -> bool:
        del vars(producer._cluster)["is_idle"]
        raise MemoryError

    async with new_producer(linger_ms=5) as producer:
        await producer.send("t", payload(0))
        await asyncio.sleep(1)
        producer._cluster.is_idle = fails  # type: ignore[assignment, method-assign]
        began = now()
        await producer.send("t", payload(1))
        assert now() < began + 0.01, "it has lingered"
        began = now()
        await producer.send("t", payload(2))
        assert now() < began + 0.005
    assert [type(context["exception"]) for context in told] == [MemoryError]


async def test_one_request_has_one_batch_of_each_partition(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.create_topic("one", partitions=1)
    async with new_producer(**SINGLE, enable_idempotence=False) as producer:
        await producer.warm_up("t", "one", "t4")
        held = cluster.inject("produce", hold=True)
        for number in range(4):
            for partition in (0, 2):
                producer.send_nowait("t4", payload(number), partition=partition)
            producer.send_nowait("t", payload(number))
        await held.reached()
        held.release()
        await producer.flush()
    for request in cluster.received("produce"):
        places = [(batch.topic, batch.partition) for batch in request.batches]
        assert len(places) == len(set(places))
    assert max(len(request.batches) for request in cluster.received("produce")) == 3
    for partition in (0, 2):
        assert stored(cluster, "t4", partition) == [0, 1, 2, 3]


async def test_requests_are_pipelined_up_to_max_in_flight(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**SINGLE, max_in_flight_requests_per_connection=3) as producer:
        await producer.send("t", payload(0))
        held = cluster.inject("produce", hold=True)
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 8)]
        await asyncio.sleep(1)
        assert producer.metrics()["requests_in_flight"] == 3
        held.release()
        await outcomes(sent)
    assert stored(cluster) == list(range(8))


async def test_batches_beyond_max_request_size_go_in_several_requests(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.create_topic("many", partitions=6)
    async with new_producer(max_request_size=900, linger_ms=10) as producer:
        await producer.warm_up("many")
        for partition in range(0, 6, 2):
            for number in range(4):
                producer.send_nowait("many", payload(number), partition=partition)
        await producer.flush()
    requests = [request for request in cluster.received("produce") if request.node_id == 1]
    assert [len(request.batches) for request in requests] == [1, 1, 1]


async def test_topic_without_an_id_is_named(network: MemoryNetwork) -> None:
    """Brokers before 2.8 tell no ids: then Produce stays at version 12."""
    async with EmbeddedCluster(
        topics={"t": 1}, network=network, request_versions={3: (0, 9)}
    ) as cluster:
        async with Producer(cluster.bootstrap_servers, connector=network) as producer:
            await producer.send("t", payload(0))
        assert cluster.received("produce")[0].version == 12


@pytest.mark.parametrize("version", range(3, 14))
async def test_every_version_of_produce(network: MemoryNetwork, version: int) -> None:
    async with (
        EmbeddedCluster(
            topics={"t": 1}, network=network, request_versions={0: (0, version)}
        ) as cluster,
        Producer(cluster.bootstrap_servers, connector=network, **SINGLE) as producer,
    ):
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        await producer.send("t", payload(0))
        assert {request.version for request in cluster.received("produce")} == {version}
        cluster.inject("produce", error="INVALID_RECORD", record_errors=[(0, "bad")])
        with pytest.raises(BrokerRejected) as caught:
            await producer.send("t", payload(1))
        assert caught.value.broker_message == ("bad" if version >= 8 else None)


async def test_broker_without_a_common_version_of_produce(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was sent, and the producer says what is wrong."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        connection = producer._cluster.connection(1)
        assert connection is not None
        connection.versions = {**connection.versions, 0: (99, 99)}
        with pytest.raises(DeliveryError, match="UNSUPPORTED_VERSION") as caught:
            await producer.send("t", payload(0))
        assert caught.value.persisted == "no"
        assert isinstance(caught.value.__cause__, UnsupportedVersionError)
        assert producer.health.buffered_bytes == 0
    assert not cluster.received("produce")


async def test_throttle_time_is_measured_and_obeyed(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-02, IT-16: nothing is sent meanwhile; the metrics know average and maximum."""
    async with new_producer(linger_ms=0) as producer:
        await producer.warm_up("t")
        for throttle_ms in (400, 100, 200):
            cluster.inject("produce", throttle_ms=throttle_ms)
        for number in range(4):
            await producer.send("t", payload(number))
        arrivals = [request.received_at for request in cluster.received("produce")]
        metrics = producer.metrics()
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert gaps == pytest.approx([0.4, 0.1, 0.2], abs=0.01)
    assert metrics["produce_throttle_time_max"] == 400
    # On average over all answers, also to other requests than Produce.
    assert metrics["response_total"] > 4
    assert metrics["produce_throttle_time_avg"] == pytest.approx(700 / metrics["response_total"])
    assert stored(cluster) == [0, 1, 2, 3]


@pytest.mark.parametrize("version", [3, 5, 6])
async def test_old_brokers_have_waited_themselves(network: MemoryNetwork, version: int) -> None:
    """NC-09: before version 6 of Produce a throttle time tells of the past (KIP-219)."""
    async with (
        EmbeddedCluster(
            topics={"t": 1}, network=network, request_versions={0: (0, version)}
        ) as cluster,
        Producer(cluster.bootstrap_servers, connector=network, linger_ms=0) as producer,
    ):
        cluster.inject("produce", throttle_ms=3000)
        await producer.send("t", payload(0))
        connection = producer._cluster.connection(1)
        assert connection is not None
        silent_s = connection.throttled_until - asyncio.get_running_loop().time()
        assert max(silent_s, 0.0) == pytest.approx(3.0 if version >= 6 else 0.0, abs=0.01)
        assert producer.metrics()["produce_throttle_time_max"] == 3000


# -- retries -----------------------------------------------------------------------------------


RETRIABLE = [
    "CORRUPT_MESSAGE",
    "UNKNOWN_TOPIC_OR_PARTITION",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_OR_FOLLOWER",
    "REQUEST_TIMED_OUT",
    "NETWORK_EXCEPTION",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "KAFKA_STORAGE_ERROR",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "THROTTLING_QUOTA_EXCEEDED",
    "UNKNOWN_TOPIC_ID",
    "INCONSISTENT_TOPIC_ID",
]


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("error", RETRIABLE)
async def test_retriable_errors_are_retried(
    cluster: EmbeddedCluster, new_producer: New, error: str, idempotent: bool
) -> None:
    cluster.inject("produce", error=error, times=2)
    async with new_producer(enable_idempotence=idempotent) as producer:
        assert (await producer.send("t", payload(0))).offset == 0
        metrics = producer.metrics()
    assert stored(cluster) == [0]
    assert metrics["record_retry_total"] == 2
    assert metrics["record_error_total"] == 0


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        "UNKNOWN_SERVER_ERROR",
        "INVALID_TOPIC_EXCEPTION",
        "RECORD_LIST_TOO_LARGE",
        "INVALID_REQUIRED_ACKS",
        "TOPIC_AUTHORIZATION_FAILED",
        "INVALID_TIMESTAMP",
        "UNSUPPORTED_FOR_MESSAGE_FORMAT",
        "POLICY_VIOLATION",
        "UNSUPPORTED_COMPRESSION_TYPE",
        "INVALID_RECORD",
        "INVALID_PRODUCER_EPOCH",
    ],
)
async def test_other_errors_fail_the_batch_and_nothing_else(
    cluster: EmbeddedCluster, new_producer: New, error: str, idempotent: bool
) -> None:
    """SN-08, SI-21: not retried. What comes later is sent as if nothing had been."""
    async with new_producer(enable_idempotence=idempotent) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error=error, error_message="because")
        with pytest.raises(BrokerRejected, match=f"{error}: because") as caught:
            await producer.send("t", payload(1))
        failure = caught.value
        assert (failure.topic, failure.partition, failure.attempts) == ("t", 0, 1)
        assert failure.code == ErrorCode[error]
        assert not failure.retriable
        assert failure.persisted == ("maybe" if error == "UNKNOWN_SERVER_ERROR" else "no")
        assert isinstance(failure.__cause__, BrokerError)
        assert (await producer.send("t", payload(2))).offset == 1
        assert producer.metrics()["record_error_total"] == 1
    assert stored(cluster) == [0, 2]


async def test_out_of_order_without_idempotence_fails(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    for code in ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID"):
        cluster.inject("produce", error=code)
        async with new_producer(enable_idempotence=False) as producer:
            with pytest.raises(BrokerRejected, match=code):
                await producer.send("t", payload(0))


async def test_retries_are_limited(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-03: with retries=1 one lost connection is survived, two are not."""
    async with new_producer(retries=1) as producer:
        cluster.inject("produce", drop="before")
        await producer.send("t", payload(0))
        cluster.inject("produce", drop="before", times=2)
        with pytest.raises(DeliveryError, match="NETWORK_EXCEPTION") as caught:
            await producer.send("t", payload(1))
        failure = caught.value
        assert failure.attempts == 2
        assert failure.persisted == "maybe"
        assert failure.retriable
        assert isinstance(failure.__cause__, ConnectionFailed)
        await producer.send("t", payload(2))
    assert stored(cluster) == [0, 2]


async def test_no_retries(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(retries=0, enable_idempotence=False) as producer:
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        with pytest.raises(BrokerRejected, match="NOT_ENOUGH_REPLICAS") as caught:
            await producer.send("t", payload(0))
        assert caught.value.retriable
        assert caught.value.attempts == 1


async def test_lost_answer_is_no_second_record(cluster: EmbeddedCluster, new_producer: New) -> None:
    """The retry has the same sequence, so the broker knows it."""
    async with new_producer() as producer:
        drops: list[Drop] = ["before", "after"]
        for drop in drops:
            cluster.inject("produce", drop=drop)
            await producer.send("t", payload(0))
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS_AFTER_APPEND", after_append=True)
        await producer.send("t", payload(1))
    assert stored(cluster) == [0, 0, 1]


async def test_lost_answer_without_idempotence_may_be_a_second_record(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(enable_idempotence=False) as producer:
        cluster.inject("produce", drop="after")
        await producer.send("t", payload(0))
    assert stored(cluster) == [0, 0]


async def test_request_without_an_answer_times_out_and_is_retried(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(request_timeout_ms=2000) as producer:
        cluster.inject("produce", no_answer=True)
        began = now()
        await producer.send("t", payload(0))
        assert 2 < now() - began < 3


@pytest.mark.parametrize("how", ["garbage", "correlation_id", "size"])
async def test_unreadable_answer_is_retried_on_a_new_connection(
    cluster: EmbeddedCluster, new_producer: New, how: Any
) -> None:
    async with new_producer(retries=1) as producer:
        cluster.inject("produce", corrupt=how)
        assert (await producer.send("t", payload(0))).offset == 0
        connections = {request.connection_id for request in cluster.received("produce")}
        assert len(connections) == 2
        cluster.inject("produce", corrupt="garbage", times=2)
        with pytest.raises(DeliveryError) as caught:
            await producer.send("t", payload(1))
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert caught.value.persisted == "maybe"


async def test_answer_whose_fields_make_no_sense(network: MemoryNetwork) -> None:
    """Its header can be read, its body cannot: older versions have nothing to check in between."""
    async with (
        EmbeddedCluster(topics={"t": 1}, network=network, request_versions={0: (0, 8)}) as cluster,
        Producer(cluster.bootstrap_servers, connector=network, retries=0) as producer,
    ):
        cluster.inject("produce", corrupt="garbage")
        with pytest.raises(DeliveryError) as caught:
            await producer.send("t", payload(0))
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert caught.value.persisted == "maybe"
        await producer.send("t", payload(1))


async def test_retries_wait_longer_each_time(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-18: exponential backoff, each step within its jitter."""
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", times=6)
    async with new_producer(retry_backoff_ms=100, retry_backoff_max_ms=1000) as producer:
        await producer.send("t", payload(0))
    arrivals = [request.received_at for request in cluster.received("produce")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    for gap, (low, high) in zip(
        gaps,
        [(0.08, 0.12), (0.16, 0.24), (0.32, 0.48), (0.64, 0.96), (0.8, 1.0), (0.8, 1.0)],
        strict=True,
    ):
        assert low <= gap <= high + 0.005


async def test_backoff_is_not_cut_short_by_a_flush(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(retry_backoff_ms=500, retry_backoff_max_ms=500) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        producer.send_nowait("t", payload(0))
        await producer.flush()
    first, second = (request.received_at for request in cluster.received("produce"))
    assert second - first >= 0.5


@pytest.mark.parametrize("idempotent", [False, True])
async def test_order_of_a_key_survives_faults(
    cluster: EmbeddedCluster, new_producer: New, idempotent: bool
) -> None:
    """With five requests in flight if sequences keep the order, else with one."""
    in_flight = 5 if idempotent else 1
    options = {
        **SINGLE,
        "enable_idempotence": idempotent,
        "max_in_flight_requests_per_connection": in_flight,
        "request_timeout_ms": 1000,
        "metadata_max_age_ms": 2000,
    }
    async with new_producer(**options) as producer:
        tasks = []
        for number in range(200):
            tasks.append(asyncio.create_task(producer.send("t4", payload(number), key=b"key")))
            if number % 20 == 5:
                cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
            if number % 20 == 9:
                cluster.inject("produce", error="NOT_LEADER_OR_FOLLOWER")
            if number % 20 == 13:
                cluster.inject("produce", drop="before")
            if number % 40 == 17:
                cluster.inject("produce", no_answer=True)
            await asyncio.sleep(0.05)
        sent = await asyncio.gather(*tasks)
    (partition,) = {metadata.partition for metadata in sent}
    assert stored(cluster, "t4", partition) == list(range(200))
    assert [metadata.offset for metadata in sent] == list(range(200))


# -- leaders -----------------------------------------------------------------------------------


async def test_hint_of_a_new_leader_is_followed_at_once(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-17, KIP-951: without asking for metadata, and without backoff."""
    async with new_producer(retry_backoff_ms=500, retry_backoff_max_ms=500) as producer:
        await producer.send("t", payload(0))
        await producer.warm_up("t4")  # a connection to both
        asked = len(cluster.received("metadata"))
        cluster.move_leader("t", 0, 2)
        began = now()
        await producer.send("t", payload(1))
        assert now() - began < 0.1
        assert [request.node_id for request in cluster.received("produce")] == [1, 1, 2]
        hinted = cluster.received("metadata")[asked:]
        assert not hinted or hinted[0].received_at > cluster.received("produce")[-1].received_at
        assert sequences(producer).producer_epoch == 0
    assert stored(cluster) == [0, 1]


async def test_without_a_hint_metadata_tells_the_new_leader(network: MemoryNetwork) -> None:
    """SN-17: NOT_LEADER before v10 of Produce: after a refresh."""
    async with (
        EmbeddedCluster(
            brokers=2, topics={"t": 1}, network=network, request_versions={0: (0, 9)}
        ) as old,
        Producer(old.bootstrap_servers, connector=network) as producer,
    ):
        await producer.send("t", payload(0))
        old.move_leader("t", 0, 2)
        began = now()
        await producer.send("t", payload(1))
        assert now() - began < 0.5
        nodes = [request.node_id for request in old.received("produce")]
        assert nodes[-1] == 2
        assert set(nodes[:-1]) == {1}
        assert len(nodes) <= 4


async def test_new_leader_ends_the_backoff(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-16: news of the same leader does not."""
    # Metadata has the same backoff: it may be asked for at about 2, 4 and 6 s.
    async with new_producer(
        retry_backoff_ms=2000, retry_backoff_max_ms=2000, metadata_max_age_ms=1000
    ) as producer:
        await producer.warm_up("t", "t4")
        for number, moves in enumerate([False, True]):
            await asyncio.sleep(1.5)
            cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
            began = now()
            sending = asyncio.create_task(producer.send("t", payload(number)))
            await asyncio.sleep(0.1)
            if moves:
                cluster.move_leader("t", 0, 2)
            await sending
            waited = now() - began
            assert waited < 1.9 if moves else waited > 2
    assert stored(cluster) == [0, 1]


async def test_partition_without_a_leader_waits_for_one(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        cluster.move_leader("t", 0, -1)
        sending = asyncio.create_task(producer.send("t", payload(1)))
        await asyncio.sleep(10)
        assert not sending.done()
        cluster.move_leader("t", 0, 2)
        await sending
        assert [request.node_id for request in cluster.received("produce")][-1] == 2
    assert stored(cluster) == [0, 1]


async def test_brokers_that_go_and_come(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-10: a bounce of the leader loses nothing, and keeps the order."""
    async with new_producer(**SINGLE) as producer:
        tasks = []
        for number in range(60):
            tasks.append(asyncio.create_task(producer.send("t", payload(number))))
            if number in (10, 40):
                await cluster.stop_broker(1)
            if number in (25, 50):
                await cluster.start_broker(1)
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
    assert stored(cluster) == list(range(60))


async def test_topic_created_anew_gets_the_queued_records(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """IT-11: another id, sequences that the broker does not know: nothing hangs."""
    async with new_producer(metadata_max_age_ms=1000) as producer:
        await producer.send("t", payload(0))
        cluster.delete_topic("t")
        sending = asyncio.create_task(producer.send("t", payload(1)))
        await asyncio.sleep(3)
        assert not sending.done()
        cluster.create_topic("t")
        await sending
    assert stored(cluster) == [1]


async def test_slow_broker_is_avoided(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-07, KIP-794: a node that took nothing for the availability timeout gets no new records."""
    cluster.create_topic("two", partitions=2)
    async with new_producer(
        **SINGLE, partitioner_availability_timeout_ms=500, partitioner_ignore_keys=True
    ) as producer:
        await producer.warm_up("two")
        for number in range(40):
            producer.send_nowait("two", payload(number))
        await producer.flush()
        cluster.pause(2)
        for number in range(100):
            producer.send_nowait("two", payload(number))
            await asyncio.sleep(0.05)
        late = [producer.send_nowait("two", payload(n)).partition for n in range(20)]
        cluster.resume(2)
    assert set(late) == {0}


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_broker_that_takes_nothing_does_not_hold_up_the_other(
    cluster: EmbeddedCluster, new_producer: New, bulk: bool
) -> None:
    """Its records wait, as many as have room. Those for the other are acknowledged as ever."""
    cluster.create_topic("two", partitions=2)
    loop = asyncio.get_running_loop()
    async with new_producer() as producer:
        await producer.warm_up("two")
        cluster.pause(2)
        held = [producer.send_nowait("two", bytes(1000), partition=1) for _ in range(5000)]
        began = loop.time()
        if bulk:
            records = [Record("two", payload(number), partition=0) for number in range(5000)]
            assert (await producer.send_many(None, records)).acknowledged == 5000
        else:
            for number in range(100):
                await producer.send("two", payload(number), partition=0)
        assert loop.time() - began < 1.0
        assert not any(delivery.done() for delivery in held)
        cluster.resume(2)
        await outcomes(held)
        assert {delivery.result().partition for delivery in held} == {1}


# -- one in flight -----------------------------------------------------------------------------


async def test_one_in_flight_waits_also_after_a_change_of_leader(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-04: the second batch does not pass the first one by way of the new leader."""
    async with new_producer(
        **SINGLE, max_in_flight_requests_per_connection=1, metadata_max_age_ms=500
    ) as producer:
        await producer.warm_up("t", "t4")
        held = cluster.inject("produce", hold=True)
        first = producer.send_nowait("t", payload(0))
        second = producer.send_nowait("t", payload(1))
        await held.reached()
        cluster.move_leader("t", 0, 2)
        await asyncio.sleep(5)
        assert len(cluster.received("produce")) == 1
        held.release()
        await outcomes([first, second])
    assert stored(cluster) == [0, 1]


async def test_one_in_flight_waits_for_the_request_of_an_expired_batch(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-10: whose answer may still come."""
    async with new_producer(
        **SINGLE,
        max_in_flight_requests_per_connection=1,
        enable_idempotence=False,
        request_timeout_ms=2900,
        delivery_timeout_ms=3000,
        retry_backoff_ms=100,
    ) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", delay=2.0)
        held = cluster.inject("produce", hold=True)
        first = producer.send_nowait("t", payload(0))
        await held.reached()  # at about 2.1 s
        await asyncio.sleep(0.5)
        second = producer.send_nowait("t", payload(1))
        with pytest.raises(DeliveryTimeout):
            await first
        await asyncio.sleep(0.5)
        assert len(cluster.received("produce")) == 2
        held.release()
        await second
    assert len(cluster.received("produce")) == 3


# -- delivery timeout --------------------------------------------------------------------------


#: Batches that wait or retry expire before their requests time out.
IMPATIENT: dict[str, Any] = {
    "request_timeout_ms": 2900,
    "delivery_timeout_ms": 3000,
    "linger_ms": 0,
    "batch_size": 150,
    "batch_max_bytes": 0,
}


async def test_queued_batch_expires(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-11: it was never sent, so it is certainly not stored, and its number was never used."""
    async with new_producer(**IMPATIENT) as producer:
        await producer.send("t", payload(0))
        cluster.move_leader("t", 0, -1)
        cluster.inject("metadata", error="LEADER_NOT_AVAILABLE", topic="t", partition=0)
        await asyncio.sleep(0)
        producer._cluster.request_update()
        await asyncio.sleep(0.5)
        began = now()
        with pytest.raises(DeliveryTimeout, match="no leader, or the topic is gone") as caught:
            await producer.send("t", payload(1))
        assert now() - began == pytest.approx(3.0, abs=0.01)
        failure = caught.value
        assert (failure.persisted, failure.attempts) == ("no", 0)
        assert failure.elapsed == pytest.approx(3.0, abs=0.01)
        assert isinstance(failure, TimeoutError)
        assert failure.retriable
        cluster.move_leader("t", 0, 1)
        await producer.send("t", payload(2))
        assert sequences(producer).producer_epoch == 0
    assert stored(cluster) == [0, 2]
    assert sent_sequences(cluster) == [(0, 0), (0, 1)]


async def test_batch_in_flight_expires(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """SN-09, SN-19: late success is ignored; the memory is not handed out before the answer."""
    cluster.inject("init_producer_id", delay=1.0)
    held = cluster.inject("produce", hold=True)
    async with new_producer(**IMPATIENT) as producer:
        began = now()
        delivery = await producer.enqueue("t", payload(0))
        with pytest.raises(DeliveryTimeout, match="has not answered the request") as caught:
            await delivery
        assert now() - began == pytest.approx(3.0, abs=0.02)
        assert (caught.value.persisted, caught.value.attempts) == ("maybe", 1)
        assert producer.metrics()["requests_in_flight"] == 1
        assert producer.health.incomplete_batches == 0
        assert producer.health.buffered_bytes > 0
        held.release()
        await asyncio.sleep(0.1)
        assert producer.health.buffered_bytes == 0
        assert delivery.exception() is not None
        metrics = producer.metrics()
        assert metrics["record_error_total"] == 1
        await producer.send("t", payload(1))
    assert stored(cluster) == [0, 1]
    assert not errors_logged(caplog)


@pytest.mark.parametrize("error", ["NOT_ENOUGH_REPLICAS", "MESSAGE_TOO_LARGE", "INVALID_RECORD"])
async def test_late_error_for_an_expired_batch_is_ignored(
    cluster: EmbeddedCluster, new_producer: New, error: str
) -> None:
    """SN-11: no retry, no split."""
    cluster.inject("init_producer_id", delay=1.0)
    held = cluster.inject("produce", hold=True, error=error)
    async with new_producer(**{**IMPATIENT, "batch_size": 16384}) as producer:
        await producer.partitions_for("t")
        sent = [producer.send_nowait("t", payload(n)) for n in range(2)]
        results = await outcomes(sent)
        assert [type(result) for result in results] == [DeliveryTimeout] * 2
        held.release()
        await asyncio.sleep(2)
        assert len(cluster.received("produce")) == 1
        assert producer.health.buffered_bytes == 0
        assert producer.metrics()["batch_split_total"] == 0
        await producer.send("t", payload(2))
    assert stored(cluster) == [2]


async def test_retrying_batch_expires(cluster: EmbeddedCluster, new_producer: New) -> None:
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", times=None)
    async with new_producer(**IMPATIENT) as producer:
        with pytest.raises(DeliveryError) as caught:
            await producer.send("t", payload(0))
        failure = caught.value
        assert isinstance(failure, DeliveryTimeout)
        assert f"the last of {failure.attempts} attempts failed with: NOT_ENOUGH_REPLICAS" in str(
            failure
        )
        assert isinstance(failure.__cause__, BrokerError)
        assert failure.code == failure.__cause__.code == ErrorCode.NOT_ENOUGH_REPLICAS
        assert failure.persisted == "no"
        assert failure.attempts > 2
        assert failure.elapsed == pytest.approx(3.0, abs=0.01)


async def test_retries_are_logged_so_that_somebody_sees_them(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in ten seconds for each topic, with the reason."""
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", times=None)
    async with new_producer(
        retry_backoff_ms=1000, retry_backoff_max_ms=1000, delivery_timeout_ms=40_000
    ) as producer:
        with pytest.raises(DeliveryTimeout):
            await producer.send("t", payload(0))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert 3 <= len(warnings) <= 4
    assert warnings[0].startswith("t-0: attempt 1 of 1 records is repeated: NOT_ENOUGH_REPLICAS")


async def test_retrying_batch_that_may_be_stored_expires(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("produce", drop="after", times=None)
    async with new_producer(**IMPATIENT, reconnect_backoff_max_ms=500) as producer:
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t", payload(0))
        failure = caught.value
        assert failure.persisted == "maybe"
        assert isinstance(failure.__cause__, ConnectionFailed)
        assert f"attempts failed with: {failure.__cause__}" in str(failure)
        assert failure.code == ErrorCode.NETWORK_EXCEPTION
        cluster.clear_faults()
        await producer.send("t", payload(1))
    assert stored(cluster) == [0, 1]


async def test_many_partitions_expire_together(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-12: and the next deadline is that of what is left."""
    async with new_producer(**IMPATIENT) as producer:
        await producer.warm_up("t4")
        await cluster.stop_broker(1)
        await cluster.stop_broker(2)
        began = now()
        first = [producer.send_nowait("t4", payload(p), partition=p) for p in range(4)]
        await asyncio.sleep(1)
        second = [producer.send_nowait("t4", payload(p), partition=p) for p in range(4)]
        assert {type(result) for result in await outcomes(first)} == {DeliveryTimeout}
        assert now() - began == pytest.approx(3.0, abs=0.01)
        assert not any(delivery.done() for delivery in second)
        assert {type(result) for result in await outcomes(second)} == {DeliveryTimeout}
        assert now() - began == pytest.approx(4.0, abs=0.01)


async def test_callback_of_an_expired_batch_may_send(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-05: the new record is neither lost nor expired with the old one."""
    async with new_producer(**IMPATIENT) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        again: list[Delivery] = []
        sent = [producer.send_nowait("t", payload(n)) for n in range(4)]
        for number, delivery in enumerate(sent, 4):
            delivery.add_done_callback(
                lambda _, number=number: again.append(  # type: ignore[misc]
                    producer.send_nowait("t", payload(number))
                )
            )
        results = await outcomes(sent)
        assert {type(result) for result in results} <= {DeliveryTimeout, DeliveryError}
        assert len(again) == 4
        assert not any(delivery.done() for delivery in again)
        cluster.resume(1)
        await outcomes(again)
        assert all(delivery.exception() is None for delivery in again)
    assert stored(cluster)[-4:] == [4, 5, 6, 7]


async def test_callback_of_an_expired_batch_may_send_to_an_idle_broker(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The scheduler is in the middle of a step then, and sends it all the same."""
    async with new_producer(**IMPATIENT) as producer:
        await producer.warm_up("t", "t4")
        cluster.move_leader("t", 0, -1)
        producer._cluster.request_update()
        await asyncio.sleep(1)
        expiring = producer.send_nowait("t", payload(0))
        again: list[Delivery] = []

        def send(_: Delivery) -> None:
            again.extend(producer.send_nowait("t4", payload(n), partition=1) for n in range(3))

        expiring.add_done_callback(send)
        with pytest.raises(DeliveryTimeout):
            await expiring
        began = now()
        await outcomes(again)
        assert now() - began < 0.1
    assert stored(cluster, "t4", 1) == [0, 1, 2]


# -- a broker that does not know the producer, and answers that are lost -------------------------


#: What happens to a batch that is stored.
LOST: list[dict[str, Any]] = [
    {"drop": "after"},
    {"no_answer": True, "after_append": True},
    {"error": "REQUEST_TIMED_OUT", "after_append": True},
    {"error": "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "after_append": True},
]


@pytest.mark.parametrize("lost", LOST, ids=str)
async def test_to_a_topic_that_was_made_again_nothing_is_pipelined_at_first(
    cluster: EmbeddedCluster, new_producer: New, lost: dict[str, Any]
) -> None:
    """Its broker would take the second batch of a burst when it refuses the first."""
    cluster.create_topic("again")
    async with new_producer(metadata_max_age_ms=1000, request_timeout_ms=500, **SINGLE) as producer:
        for number in range(3):
            await producer.send("again", payload(number))
        cluster.delete_topic("again")
        cluster.create_topic("again")
        await asyncio.sleep(3)
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", topic="again")
        cluster.inject("produce", topic="again", **lost)
        sent = [await producer.enqueue("again", payload(number)) for number in range(5)]
        assert [each.offset for each in await outcomes(sent)] == [*range(5)]
        assert sequences(producer, "again").producer_epoch == 0
    assert stored(cluster, "again") == [*range(5)]


REPEATED: dict[str, Any] = {"error": "NOT_ENOUGH_REPLICAS"}
REFUSED: dict[str, Any] = {"error": "INVALID_RECORD"}


@pytest.mark.parametrize(
    ("before", "behind"),
    [([REPEATED], []), ([REPEATED], [REFUSED]), ([REFUSED, REPEATED], [])],
    ids=["one before", "and a refused one behind", "and a refused one before"],
)
@pytest.mark.parametrize("lost", LOST, ids=str)
async def test_what_a_broker_that_forgot_the_producer_may_have_is_not_stored_again(
    cluster: EmbeddedCluster,
    new_producer: New,
    lost: dict[str, Any],
    before: list[dict[str, Any]],
    behind: list[dict[str, Any]],
) -> None:
    """It takes a later batch for the first; the earlier one then needs a new epoch."""
    faults = [*before, lost, *behind]
    async with new_producer(request_timeout_ms=500, **SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.forget_producers("t", 0)
        for fault in faults:
            cluster.inject("produce", **fault)
        sent = [await producer.enqueue("t", payload(number)) for number in range(1, 6)]
        ended = await outcomes(sent)
        await producer.send("t", payload(6))
        assert producer.health.buffered_bytes == 0
    log = stored(cluster)
    assert sorted(log) == sorted(set(log))
    failed = {n: e.persisted for n, e in enumerate(ended, 1) if isinstance(e, DeliveryError)}
    assert {*range(1, 6)} - {*failed} <= {*log}
    assert {*failed} & {1, 2}
    unstored = {n for n, persisted in failed.items() if persisted == "no"}
    assert not unstored & {*log}
    if REFUSED in before:
        assert unstored == {1}
    else:
        assert len(unstored) <= len(behind)


async def test_no_part_of_what_a_broker_that_forgot_the_producer_may_have_is_stored_again(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """It has the whole, though what came before is refused, and knows no part of it."""
    async with new_producer(linger_ms=0, batch_size=16_384) as producer:
        await producer.send("t", payload(0))
        cluster.forget_producers("t", 0)
        fault = cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", hold=True)
        cluster.inject("produce", error="REQUEST_TIMED_OUT", after_append=True)
        cluster.inject("produce", error="MESSAGE_TOO_LARGE", times=2)
        first = await producer.enqueue("t", payload(1))
        await fault.reached()
        others = [producer.send_nowait("t", payload(number)) for number in range(2, 6)]
        await asyncio.sleep(0.01)
        fault.release()
        ended = await outcomes([first, *others])
        await producer.send("t", payload(6))
    assert stored(cluster) == [0, 2, 3, 4, 5, 6]
    assert [each.persisted for each in ended if isinstance(each, DeliveryError)] == [
        "no",
        *["maybe"] * 4,
    ]


async def test_what_a_broker_may_have_stored_before_it_forgot_the_producer_is_not_stored_again(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """It takes the second batch for the first, and has nothing to compare the first with."""
    async with new_producer(
        request_timeout_ms=1000, retry_backoff_ms=300, retry_backoff_max_ms=300, linger_ms=0
    ) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", delay=5)
        first = await producer.enqueue("t", payload(1))
        await asyncio.sleep(0.1)
        second = await producer.enqueue("t", payload(2))
        await asyncio.sleep(0.1)
        cluster.forget_producers("t", 0)
        with pytest.raises(BrokerRejected) as caught:
            await first
        assert caught.value.persisted == "maybe"
        await second
        await producer.send("t", payload(3))
    assert stored(cluster) == [0, 1, 2, 3]


@pytest.mark.parametrize("ms", range(320, 440, 10))
async def test_requests_that_arrive_after_their_connection_was_given_up_double_nothing(
    cluster: EmbeddedCluster, network: MemoryNetwork, new_producer: New, ms: int
) -> None:
    """The first expires, the second goes again on another connection; then both arrive."""
    async with new_producer(
        request_timeout_ms=300,
        delivery_timeout_ms=350,
        retry_backoff_ms=60,
        retry_backoff_max_ms=60,
        **SINGLE,
    ) as producer:
        await producer.send("t", payload(0))
        began = now()
        links = list(network.links)
        for link in links:
            link.to_server.stall()
        first = await producer.enqueue("t", payload(1))
        await asyncio.sleep(0.1)
        second = await producer.enqueue("t", payload(2))
        await asyncio.sleep(began + ms / 1000 - now())
        for link in links:
            link.to_server.resume()
        ended = await outcomes([first, second])
        await asyncio.sleep(0.5)
        await producer.send("t", payload(3))
    assert {each.persisted for each in ended if isinstance(each, DeliveryError)} == {"maybe"}
    assert stored(cluster) == [0, 1, 2, 3]


async def test_a_batch_behind_a_hole_asks_under_its_sequence_before_it_is_numbered_anew(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="INVALID_RECORD")
        cluster.inject("produce", drop="before")
        refused, cut = [await producer.enqueue("t", payload(number)) for number in (1, 2)]
        ended = await outcomes([refused, cut])
        assert isinstance(ended[0], BrokerRejected)
        assert ended[1].offset == 1
    assert stored(cluster) == [0, 2]
    # With the old epoch, which was answered with OUT_OF_ORDER_SEQUENCE_NUMBER, then with the new.
    assert sent_sequences(cluster)[-2:] == [(0, 2), (1, 0)]


async def test_what_a_broker_has_said_that_it_has_stays_so(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS_AFTER_APPEND", after_append=True)
    cluster.inject("produce", error="REQUEST_TIMED_OUT", times=None)
    async with new_producer(delivery_timeout_ms=2000, request_timeout_ms=500) as producer:
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t", payload(0))
    assert caught.value.persisted == "yes"


@pytest.mark.parametrize("error", ["OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID"])
async def test_what_a_broker_has_said_that_it_has_gets_no_new_epoch(
    cluster: EmbeddedCluster, new_producer: New, error: str
) -> None:
    """Under it, a broker that has forgotten the producer would store it a second time."""
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS_AFTER_APPEND", after_append=True)
    cluster.inject("produce", error=error)
    async with new_producer() as producer:
        with pytest.raises(BrokerRejected) as caught:
            await producer.send("t", payload(0))
        assert (caught.value.code, caught.value.persisted) == (ErrorCode[error], "yes")
        assert (await producer.send("t", payload(1))).offset == 1
    assert stored(cluster) == [0, 1]


async def test_parts_of_a_batch_tell_of_its_attempts(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(
        delivery_timeout_ms=1500, request_timeout_ms=500, retry_backoff_ms=100
    ) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", drop="after")
        cluster.inject("produce", error="MESSAGE_TOO_LARGE")
        cluster.inject("produce", no_answer=True, times=None)
        ended = await outcomes([producer.send_nowait("t", payload(n)) for n in range(1, 9)])
    # The second part never left.
    assert (ended[-1].attempts, ended[-1].persisted) == (2, "maybe")
    assert "the last of 2 attempts failed" in str(ended[-1])


# -- too large ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_batch_that_the_broker_finds_too_large_is_split(
    cluster: EmbeddedCluster, new_producer: New, idempotent: bool, compression: str
) -> None:
    """SI-23: no retry is counted, order, sequences and deliveries stay; memory is returned once."""
    cluster.create_topic("small", configs={"max.message.bytes": "500"})
    async with new_producer(
        retries=1, enable_idempotence=idempotent, compression_type=compression
    ) as producer:
        await producer.warm_up("small")
        sent = [producer.send_nowait("small", payload(n)) for n in range(40)]
        await producer.flush()
        assert all(delivery.done() for delivery in sent)
        offsets = [delivery.result().offset for delivery in sent]
        # Without sequences a small part may pass a large one that has to be split again.
        assert (offsets if idempotent else sorted(offsets)) == list(range(40))
        metrics = producer.metrics()
        assert metrics["record_retry_total"] == 0
        if compression == "none":
            assert metrics["batch_split_total"] > 1
        assert producer.health.buffered_bytes == 0
        # SN-14: nothing of the original is left that could expire.
        await asyncio.sleep(200)
    assert sorted(stored(cluster, "small")) == list(range(40))


async def test_a_batch_that_cannot_be_split_fails_and_nothing_else(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decompress(*_: object) -> bytes:
        raise MemoryError

    cluster.inject("produce", error="MESSAGE_TOO_LARGE")
    async with new_producer(compression_type="lz4") as producer:
        await producer.warm_up("t")
        with monkeypatch.context() as patched:
            patched.setattr(type(codec("lz4")), "decompress", decompress)
            sent = [producer.send_nowait("t", payload(n)) for n in range(2)]
            for result in await outcomes(sent):
                assert isinstance(result, DeliveryError)
                assert (result.code, result.persisted) == (10, "no")
                assert "could not be split: MemoryError()" in str(result)
        await producer.send("t", payload(2))
        assert producer.health.buffered_bytes == 0
        await asyncio.sleep(200)
    assert stored(cluster) == [2]


#: What is sent again expires before that request times out.
RETRIES_LATE: dict[str, Any] = {
    "delivery_timeout_ms": 4000,
    "request_timeout_ms": 3000,
    "retry_backoff_ms": 1500,
    "retry_backoff_max_ms": 1500,
}


async def test_what_is_answered_already_does_not_expire() -> None:
    """Whatever has held up the loop: an answer that is here is heard before its time is up."""
    loop: Any = asyncio.get_running_loop()
    async with (
        EmbeddedCluster(2, topics={"t": 2}, network=MemoryNetwork(latency=0.05)) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=cluster.connector,
            **RETRIES_LATE,
        ) as producer,
    ):
        for partition in range(2):
            await producer.send("t", payload(0), partition=partition)
        for node in (1, 2):
            cluster.inject("produce", node=node, error="NOT_ENOUGH_REPLICAS")
        held = [cluster.inject("produce", node=node, hold=True) for node in (1, 2)]
        sent = [producer.send_nowait("t", payload(1), partition=n) for n in range(2)]
        began = loop.time()
        await asyncio.sleep(2.5)  # by then both have gone again
        assert producer.metrics()["requests_in_flight"] == 2
        for fault in held:
            fault.release()
        await turns()
        loop._set_time(began + 4.02)  # when the answers are here
        await producer.enqueue("t", b"whoever comes now")
        assert [type(result) for result in await outcomes(sent)] == [RecordMetadata] * 2


async def test_what_was_not_sent_in_time_is_not_sent_any_more() -> None:
    """Nor by the step of an answer, before it is given up: it would be in the log, and failed."""
    loop: Any = asyncio.get_running_loop()
    async with (
        EmbeddedCluster(topics={"t": 1}, network=MemoryNetwork(latency=0.05)) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=cluster.connector,
            max_in_flight_requests_per_connection=1,
            **RETRIES_LATE,
        ) as producer,
    ):
        await producer.send("t", payload(0))
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        held = cluster.inject("produce", hold=True)
        first = producer.send_nowait("t", payload(1))
        began = loop.time()
        await asyncio.sleep(0.05)
        second = producer.send_nowait("t", payload(2))
        await asyncio.sleep(2.45)  # by then the first has gone again
        assert producer.metrics()["requests_in_flight"] == 1
        held.release()
        await turns()
        loop._set_time(began + 4.1)  # when the answer is here
        with pytest.raises(DeliveryTimeout, match="it was never sent") as caught:
            await second
        assert caught.value.persisted == "no"
        await first
    assert stored(cluster) == [0, 1]


async def test_a_failure_in_giving_up_stops_nobody_and_is_tried_again_now_and_then(
    cluster: EmbeddedCluster,
    new_producer: New,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop: Any = asyncio.get_running_loop()
    async with new_producer(**IMPATIENT) as producer:
        await producer.send("t", payload(0))
        await producer.warm_up("t4")
        cluster.move_leader("t", 0, -1)
        cluster.inject("metadata", error="LEADER_NOT_AVAILABLE", topic="t", partition=0)
        producer._cluster.request_update()
        await asyncio.sleep(0.5)
        stuck = producer.send_nowait("t", payload(1))
        # While its error is made there is no memory left.
        unreadable = property(no_memory, lambda cluster, error: None)
        monkeypatch.setattr(type(producer._cluster), "last_error", unreadable, raising=False)
        await asyncio.sleep(3.0)
        jumps = loop.jumps
        for n in range(100):
            await producer.send("t4", payload(n))
            await asyncio.sleep(0.05)
        assert 4 <= len(errors_logged(caplog)) <= 6
        assert loop.jumps - jumps < 2000
        assert not stuck.done()
        monkeypatch.undo()
        with pytest.raises(DeliveryTimeout):
            await stuck


def no_memory(_: object) -> Any:
    raise MemoryError


async def test_a_loop_that_runs_timers_early_is_not_asked_again_until_they_are_due(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uvloop, which counts in whole milliseconds."""
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    asked: list[float] = []

    def early(when: float, callback: Any, *given: Any, context: Any = None) -> Any:
        if getattr(callback, "__name__", "") == "_wake_at":
            asked.append(when)
            when = max(loop.time(), when - 0.0004)
        return call_at(when, callback, *given, context=context)

    async with new_producer(linger_ms=5, adaptive_linger=False) as producer:
        await producer.warm_up("t")
        monkeypatch.setattr(loop, "call_at", early)
        await producer.send("t", payload(0))
    assert asked
    assert Counter(asked).most_common(1)[0][1] <= 2


async def test_split_keeps_sequences(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-23: two records: the parts have sequences 0 and 1, and go one after the other."""
    cluster.inject("produce", error="MESSAGE_TOO_LARGE")
    async with new_producer(retries=1) as producer:
        await producer.warm_up("t")
        sent = [producer.send_nowait("t", payload(n)) for n in range(2)]
        assert [metadata.offset for metadata in await outcomes(sent)] == [0, 1]
        assert sequences(producer).next_sequence == 2
    # It was smaller than batch_size already.
    assert [(b.base_sequence, b.record_count) for b in batches(cluster)] == [
        (0, 2),
        (0, 1),
        (1, 1),
    ]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("drop", ["before", "after"])
async def test_a_batch_of_unknown_fate_that_is_too_large_then_is_stored_once(
    cluster: EmbeddedCluster, new_producer: New, drop: Literal["before", "after"], times: int
) -> None:
    """Its parts keep its sequences: the log takes them only where it has not got the whole."""
    async with new_producer(retry_backoff_ms=100) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", drop=drop)
        cluster.inject("produce", error="MESSAGE_TOO_LARGE", times=times)
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 9)]
        await asyncio.sleep(0.05)
        behind = producer.send_nowait("t", payload(9))
        ended = await outcomes(sent)
        assert producer.metrics()["batch_split_total"] == times
        if drop == "before":
            assert [each.offset for each in ended] == list(range(1, 9))
        else:
            assert {type(each) for each in ended} == {BrokerRejected}
            assert {each.code for each in ended} == {ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER}
            assert {each.persisted for each in ended} == {"maybe"}
        await behind
        assert (await producer.send("t", payload(10))).offset == 10
        assert producer.health.buffered_bytes == 0
    assert stored(cluster) == list(range(11))


async def test_single_record_too_large_for_the_broker_fails(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.create_topic("small", configs={"max.message.bytes": "500"})
    async with new_producer() as producer:
        await producer.warm_up("small")
        deliveries = [
            producer.send_nowait("small", value) for value in (payload(0), bytes(600), payload(2))
        ]
        good, bad, also_good = await outcomes(deliveries)
        assert (good.offset, also_good.offset) == (0, 1)
        assert isinstance(bad, BrokerRejected)
        assert bad.code == ErrorCode.MESSAGE_TOO_LARGE
        assert bad.persisted == "no"


async def test_flush_waits_for_the_parts_of_a_split(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.create_topic("small", configs={"max.message.bytes": "500"})
    async with new_producer(linger_ms=1000, adaptive_linger=False) as producer:
        await producer.warm_up("small")
        sent = [producer.send_nowait("small", payload(n)) for n in range(20)]
        await producer.flush()
        assert all(delivery.done() for delivery in sent)


# -- answers that do not fit the request -------------------------------------------------------

Tamper = Callable[[Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Tamper:
    """`tamper(change)` lets `change` alter the next answer to a Produce request."""
    changes: list[Callable[[dict[str, Any]], None]] = []
    handle = APIS[0].handle

    def produce(call: Call) -> Any:
        response = handle(call)
        if changes:
            assert isinstance(response, dict)
            changes.pop(0)(response)
        return response

    monkeypatch.setitem(APIS, 0, APIS[0]._replace(handle=produce))
    return changes.append


@pytest.mark.parametrize("version", [12, 13], ids=["names", "ids"])
async def test_partition_missing_in_the_answer_is_retried(
    network: MemoryNetwork, tamper: Tamper, version: int
) -> None:
    """Spec 6.4: it must not hang until its delivery timeout."""

    def leave_out(response: dict[str, Any]) -> None:
        del response["responses"][0]["partition_responses"][1]

    async with (
        EmbeddedCluster(
            topics={"two": 2}, network=network, request_versions={0: (0, version)}
        ) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        await producer.warm_up("two")
        tamper(leave_out)
        sent = [producer.send_nowait("two", payload(p), partition=p) for p in range(2)]
        began = now()
        assert [metadata.offset for metadata in await outcomes(sent)] == [0, 0]
        assert now() - began < 1
        assert producer.metrics()["record_retry_total"] == 1


async def test_partition_missing_in_the_last_answer(
    cluster: EmbeddedCluster, new_producer: New, tamper: Tamper
) -> None:
    tamper(lambda response: response.update(responses=[]))
    async with new_producer(retries=0, enable_idempotence=False) as producer:
        with pytest.raises(DeliveryError, match="leaves out a partition") as caught:
            await producer.send("t", payload(0))
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert caught.value.persisted == "maybe"
        await producer.send("t", payload(1))


async def test_partitions_that_nobody_asked_for_or_that_are_told_twice_do_not_count(
    cluster: EmbeddedCluster,
    new_producer: New,
    tamper: Tamper,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def add(response: dict[str, Any]) -> None:
        parts = response["responses"][0]["partition_responses"]
        parts.insert(0, {**parts[0], "index": 7, "error_code": ErrorCode.INVALID_RECORD})
        # The same again, with another result.
        parts.append({**parts[1], "error_code": ErrorCode.INVALID_RECORD})
        response["responses"].append(
            {"name": "stranger", "topic_id": uuid.uuid4(), "partition_responses": parts[1:2]}
        )

    tamper(add)
    async with new_producer() as producer:
        # Which of the two is true, only a second attempt tells: it is stored already.
        assert (await producer.send("t", payload(0))).offset == 0
        assert producer.metrics()["record_retry_total"] == 1
        assert producer.health.buffered_bytes == 0
    assert sum("which the request did not contain" in r.getMessage() for r in caplog.records) == 4
    assert len(cluster.records("t")) == 1


@pytest.mark.parametrize("stored_before", [0, 2])
async def test_unknown_producer_id_with_a_log_start_bumps_the_epoch(
    cluster: EmbeddedCluster, new_producer: New, tamper: Tamper, stored_before: int
) -> None:
    """SI-18, SI-19: whether or not records were deleted behind our back."""

    def forgotten(response: dict[str, Any]) -> None:
        for part in response["responses"][0]["partition_responses"]:
            part.update(error_code=ErrorCode.UNKNOWN_PRODUCER_ID, base_offset=-1)
            part.update(log_start_offset=stored_before)

    async with new_producer(**SINGLE) as producer:
        for number in range(2):
            await producer.send("t", payload(number))
        cluster.forget_producers("t", 0)
        cluster.delete_records("t", 0, stored_before)
        cluster.inject("produce", error="UNKNOWN_PRODUCER_ID", times=2)
        tamper(forgotten)
        tamper(forgotten)
        sent = [producer.send_nowait("t", payload(n)) for n in range(2, 4)]
        await outcomes(sent)
        assert sequences(producer).producer_epoch == 1
    assert sent_sequences(cluster) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert stored(cluster) == [0, 1, 2, 3][stored_before:]


async def test_an_answer_that_cannot_be_read_ends_its_connection(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 6.4: who has sent nonsense once is not listened to again. The batch is sent again."""
    decode = wire.decode_produce
    cut: list[int] = []

    def cut_once(version: int, body: bytes) -> Any:
        if not cut:
            cut.append(len(body) - 1)
            body = body[:-1]
        return decode(version, body)

    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        monkeypatch.setattr(wire, "decode_produce", cut_once)
        await producer.send("t", payload(1))
    assert cut
    first, garbled, again = (r.connection_id for r in cluster.received("produce"))
    assert first == garbled != again
    assert stored(cluster) == [0, 1]


# -- errors of single records ------------------------------------------------------------------


async def test_record_errors(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SN-15: the listed ones get their message, the others learn why they failed with them."""
    cluster.inject(
        "produce",
        error="INVALID_RECORD",
        error_message="some are bad",
        record_errors=[(1, "no key"), (2, None)],
    )
    async with new_producer() as producer:
        await producer.warm_up("t")
        sent = [producer.send_nowait("t", payload(n)) for n in range(4)]
        results = await outcomes(sent)
    assert [type(result) for result in results] == [BrokerRejected] * 4
    assert [result.record_index for result in results] == [None, 1, 2, None]
    assert [result.broker_message for result in results] == [None, "no key", None, None]
    assert [result.code for result in results] == [None, 87, 87, None]
    assert str(results[1]) == "t-0 refused the record: INVALID_RECORD: no key"
    assert "some are bad" in str(results[2])
    for other in (results[0], results[3]):
        assert "another record of the same batch" in str(other)
        assert "some are bad" in str(other)
    assert not stored(cluster)


async def test_records_that_a_real_log_refuses(cluster: EmbeddedCluster, new_producer: New) -> None:
    cluster.create_topic("compact", configs={"cleanup.policy": "compact"})
    async with new_producer() as producer:
        await producer.warm_up("compact")
        sent = [
            producer.send_nowait("compact", b"value", key=None if n == 2 else b"k")
            for n in range(3)
        ]
        results = await outcomes(sent)
        assert [result.record_index for result in results] == [None, None, 2]
        await producer.send("compact", b"value", key=b"k")


async def test_message_of_the_code_where_the_broker_has_none(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("produce", error="POLICY_VIOLATION")
    async with new_producer() as producer:
        with pytest.raises(BrokerRejected, match=r"1 record\(s\) for t-0 .* POLICY_VIOLATION"):
            await producer.send("t", payload(0))


# -- the producer id ---------------------------------------------------------------------------


async def test_producer_id_is_asked_for(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-01: at once, before any record."""
    async with new_producer(max_in_flight_requests_per_connection=1) as producer:
        await asyncio.sleep(0.1)
        (request,) = cluster.received("init_producer_id")
        assert request.fields["transactional_id"] is None
        await producer.send("t", payload(0))
        ids = producer._sequences
        assert ids is not None
        assert ids.state is IdState.READY
    assert batches(cluster)[0].producer_id >= 0


async def test_producer_id_while_coordinators_load(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SN-18: asked for again after retry_backoff_ms each time."""
    cluster.inject("init_producer_id", error="COORDINATOR_LOAD_IN_PROGRESS", times=3)
    async with new_producer(retry_backoff_ms=100) as producer:
        await producer.send("t", payload(0))
    arrivals = [request.received_at for request in cluster.received("init_producer_id")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert gaps == pytest.approx([0.1, 0.1, 0.1], abs=0.005)


async def test_producer_id_from_a_broker_that_was_not_there(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-02: no answer for longer than the request timeout."""
    cluster.inject("init_producer_id", no_answer=True, times=3)
    async with new_producer(request_timeout_ms=1000) as producer:
        began = now()
        await producer.send("t", payload(0))
        assert now() - began > 2


async def test_idempotence_that_is_not_allowed(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-03, KP-24: what waits fails; what comes later is tried again, and not in a hurry."""
    cluster.inject("init_producer_id", error="CLUSTER_AUTHORIZATION_FAILED", times=20)
    async with new_producer(retry_backoff_ms=100) as producer:
        with pytest.raises(AbortedError, match="enable_idempotence=False") as caught:
            await producer.send("t", payload(0))
        assert isinstance(caught.value.__cause__, AuthorizationError)
        assert caught.value.persisted == "no"
        await asyncio.sleep(5)
        assert producer.health.ready
        await producer.send("t", payload(1))
        assert 2 < cluster.received("init_producer_id")[-1].received_at < 3
    assert stored(cluster) == [1]


async def test_producer_id_that_is_refused_for_good(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """What waits fails, and so does all that comes later: at once, not at its timeout."""
    held = cluster.inject("init_producer_id", error="INVALID_REQUEST", hold=True)
    async with new_producer() as producer:
        delivery = await producer.enqueue("t", payload(0))
        unknown = asyncio.create_task(producer.send("missing", payload(0)))
        warming = asyncio.create_task(producer.warm_up("t"))
        await asyncio.sleep(1)
        held.release()
        with pytest.raises(AbortedError, match="failed for good: INVALID_REQUEST"):
            await delivery
        for waiting in (unknown, warming):
            with pytest.raises(BrokerError, match="INVALID_REQUEST"):
                await waiting
        began = now()
        with pytest.raises(BrokerError, match="INVALID_REQUEST"):
            await producer.send("t", payload(1))
        with pytest.raises(BrokerError, match="INVALID_REQUEST"):
            producer.send_nowait("t", payload(1))
        with pytest.raises(BrokerError, match="INVALID_REQUEST"):
            await producer.flush()
        assert now() == began
        health = producer.health
        assert (health.ready, health.problem) == (False, "INVALID_REQUEST")
        await asyncio.sleep(5)
        assert len(cluster.received("init_producer_id")) == 1
    assert not cluster.received("produce")


async def test_broker_without_idempotence(network: MemoryNetwork) -> None:
    """Before 0.11: UnsupportedVersion, and the producer works without idempotence."""
    async with EmbeddedCluster(
        topics={"t": 1}, network=network, request_versions={22: None}
    ) as cluster:
        async with Producer(cluster.bootstrap_servers, connector=network) as producer:
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", payload(0))
            error = caught.value
            if isinstance(error, AbortedError):
                error = error.__cause__  # type: ignore[assignment]
            assert isinstance(error, UnsupportedVersionError)
        async with Producer(
            cluster.bootstrap_servers, connector=network, enable_idempotence=False
        ) as producer:
            await producer.send("t", payload(0))


async def test_producer_id_when_the_connection_is_lost(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("init_producer_id", drop="before", times=2)
    async with new_producer() as producer:
        await producer.send("t", payload(0))
    assert len(cluster.received("init_producer_id")) == 3


async def test_batch_without_a_producer_id_says_why_there_is_none(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("init_producer_id", error="COORDINATOR_NOT_AVAILABLE", times=None)
    async with new_producer(**IMPATIENT) as producer:
        with pytest.raises(DeliveryTimeout, match="never sent: COORDINATOR_NOT_AVAIL") as caught:
            await producer.send("t", payload(0))
        assert isinstance(caught.value.__cause__, BrokerError)
        assert caught.value.code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert (caught.value.persisted, caught.value.attempts) == ("no", 0)
        health = producer.health
        assert not health.ready
        assert health.problem == "there is no producer id yet: COORDINATOR_NOT_AVAILABLE"


#: (producer id, epoch) -> alters the answers to InitProducerId from now on; None ends that.
Forge = Callable[[tuple[int, int] | None], None]


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Forge:
    forged: tuple[int, int] | None = None
    handle = APIS[22].handle

    def init_producer_id(call: Call) -> Any:
        response = handle(call)
        if forged is not None:
            assert isinstance(response, dict)
            return {**response, "producer_id": forged[0], "producer_epoch": forged[1]}
        return response

    def change(to: tuple[int, int] | None) -> None:
        nonlocal forged
        forged = to

    monkeypatch.setitem(APIS, 22, APIS[22]._replace(handle=init_producer_id))
    return change


NO_IDS = pytest.mark.parametrize("nonsense", [(5, -1), (-1, -1), (-1, 0)])


def id_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if "no producer id yet" in r.getMessage()]
    return [r.getMessage() for r in found if r.levelno >= logging.WARNING]


@NO_IDS
async def test_producer_id_that_is_none_is_asked_for_again(
    cluster: EmbeddedCluster,
    new_producer: New,
    forge: Forge,
    caplog: pytest.LogCaptureFixture,
    nonsense: tuple[int, int],
) -> None:
    """Without an error, and yet no id: health and what expires say so, the log does once."""
    caplog.set_level(logging.DEBUG, "asyncproducer.net.scheduler")
    what = f"the broker gave producer id {nonsense[0]} with epoch {nonsense[1]}"
    forge(nonsense)
    async with new_producer(**IMPATIENT, retry_backoff_ms=100) as producer:
        with pytest.raises(DeliveryTimeout, match=f"it was never sent: {what}") as caught:
            await producer.send("t", payload(0))
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert (caught.value.persisted, caught.value.attempts) == ("no", 0)
        assert producer.health.problem == f"there is no producer id yet: {what}"
        assert not producer.health.ready
        assert len(cluster.received("init_producer_id")) >= 20
        assert not cluster.received("produce")
        assert id_warnings(caplog) == [f"no producer id yet, trying on: {what}"]

        waiting = producer.send_nowait("t", payload(1))
        await asyncio.sleep(1)
        forge(None)
        began = now()
        assert (await waiting).offset == 0
        assert now() - began < 0.2
        health = producer.health
        assert (health.ready, health.problem) == (True, None)
        ids = producer._sequences
        assert ids is not None
        assert min(ids.producer_id, ids.producer_epoch) >= 0
        assert len(id_warnings(caplog)) == 1
    assert stored(cluster) == [1]
    assert not errors_logged(caplog)


@pytest.mark.parametrize(("refusals", "told"), [(9, 0), (10, 1), (30, 1)])
async def test_brokers_that_have_just_started_are_no_cause_for_a_warning(
    cluster: EmbeddedCluster,
    new_producer: New,
    caplog: pytest.LogCaptureFixture,
    refusals: int,
    told: int,
) -> None:
    cluster.inject("init_producer_id", error="COORDINATOR_LOAD_IN_PROGRESS", times=refusals)
    async with new_producer() as producer:
        await producer.send("t", payload(0))
    assert len(cluster.received("init_producer_id")) == refusals + 1
    assert len(id_warnings(caplog)) == told


@NO_IDS
async def test_closing_without_a_producer_id(
    cluster: EmbeddedCluster, new_producer: New, forge: Forge, nonsense: tuple[int, int]
) -> None:
    forge(nonsense)
    async with new_producer() as producer:
        delivery = await producer.enqueue("t", payload(0))
        await asyncio.sleep(1)
        began = now()
        report = await producer.close(5)
        assert now() - began == pytest.approx(5, abs=0.01)
        assert (report.acknowledged, report.failed, report.aborted) == (0, 1, 1)
        assert producer.health.state == "closed"
        assert isinstance(delivery.exception(), AbortedError)


# -- fatal errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("CLUSTER_AUTHORIZATION_FAILED", AuthorizationError),
        ("UNSUPPORTED_VERSION", BrokerError),
        ("INVALID_PRODUCER_ID_MAPPING", BrokerError),
        ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", BrokerError),
        ("PRODUCER_FENCED", BrokerError),
    ],
)
async def test_errors_that_end_the_producer(
    cluster: EmbeddedCluster, new_producer: New, error: str, kind: type[KafkaError]
) -> None:
    """SI-20, SI-21: everything fails with it, what is in flight, what is queued, what comes."""
    async with new_producer(**SINGLE, buffer_memory=150 * 8) as producer:
        await producer.send("t", payload(0))
        held = cluster.inject("produce", error=error, hold=True)
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 5)]
        waiting = [asyncio.create_task(producer.send("t", payload(n))) for n in range(5, 9)]
        await held.reached()
        assert producer.health.waiting_senders > 0
        held.release()
        results = await outcomes(sent)
        assert isinstance(results[0], BrokerRejected)
        assert {type(result) for result in results[1:]} == {AbortedError}
        assert {type(result.__cause__) for result in results[1:]} == {kind}
        assert results[1].persisted == "maybe"
        done, pending = await asyncio.wait(waiting, timeout=1)
        assert not pending
        for task in done:
            assert isinstance(task.exception(), KafkaError)
        with pytest.raises(kind):
            await producer.send("t", payload(9))
        assert producer.health.problem is not None
        assert producer.health.buffered_bytes == 0
        report = await producer.close()
    assert report.acknowledged == 1
    assert report.elapsed < 1


async def test_memory_of_an_aborted_batch_in_flight_comes_back_with_its_answer(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-20: the connection may still be reading it."""
    async with new_producer(**SINGLE) as producer:
        await producer.warm_up("t", "t4")
        held = cluster.inject("produce", hold=True, node=2)
        other = producer.send_nowait("t4", payload(0), partition=1)
        await held.reached()
        cluster.inject("produce", error="CLUSTER_AUTHORIZATION_FAILED", node=1)
        with pytest.raises(BrokerRejected):
            await producer.send("t", payload(1))
        with pytest.raises(AbortedError):
            await other
        assert producer.health.buffered_bytes > 0
        held.release()
        await asyncio.sleep(0.1)
        assert producer.health.buffered_bytes == 0


@pytest.mark.parametrize("queued", [1, 4])
async def test_callback_that_sends_again_what_failed_for_good_is_refused(
    cluster: EmbeddedCluster, new_producer: New, queued: int
) -> None:
    """Each failure calls it, and what it sends must not be one more failure, without end."""
    refusals: list[KafkaError] = []
    sent_again: list[Delivery] = []

    def send_again(failed: Delivery) -> None:
        assert failed.exception() is not None
        if len(sent_again) >= 50:
            return  # that goes on for ever
        try:
            delivery = producer.send_nowait("t", payload(9))
        except KafkaError as error:
            refusals.append(error)
        else:
            sent_again.append(delivery)
            delivery.add_done_callback(send_again)

    async with new_producer(**SINGLE) as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", error="PRODUCER_FENCED", hold=True)
        sent = [producer.send_nowait("t", payload(n)) for n in range(queued)]
        for delivery in sent:
            delivery.add_done_callback(send_again)
        await held.reached()
        held.release()
        await outcomes(sent)
        await asyncio.sleep(1)
        # The answer's own record may be first to be told, before the producer has failed.
        assert len(sent_again) <= 1
        assert [(type(e), e.code) for e in refusals] == [
            (BrokerError, ErrorCode.PRODUCER_FENCED)
        ] * queued
        assert producer.health.problem == "PRODUCER_FENCED"
        report = await producer.close()
        assert (report.failed, report.aborted) == (queued + len(sent_again), 0)


async def failed_for_good(
    cluster: EmbeddedCluster, producer: Producer[Any, Any], code: str = "PRODUCER_FENCED"
) -> None:
    """Ends the producer with the answer to a record for partition 0 of t4."""
    cluster.inject("produce", error=code, partition=0)
    with pytest.raises(BrokerRejected, match=code):
        await producer.send("t4", payload(0), partition=0)


async def test_fatal_error_reaches_those_who_wait_for_memory_at_once(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Not when memory comes back: a broker that is silent may hold all of it for long."""
    async with new_producer(**SINGLE, buffer_memory=40_000) as producer:
        await producer.warm_up("t4")
        held = cluster.inject("produce", hold=True, partition=1)
        large = producer.send_nowait("t4", bytes(30_000), partition=1)
        await held.reached()
        waiting = [
            asyncio.create_task(producer.send("t4", bytes(15_000), partition=2)),
            asyncio.create_task(producer.enqueue("t4", b"small", partition=3)),
        ]
        held_again = cluster.inject("produce", hold=True, partition=0, error="PRODUCER_FENCED")
        # Before them in the buffer, and alone in its request.
        first = producer.send_nowait("t4", payload(0), partition=0)
        await held_again.reached()
        assert producer.health.waiting_senders == 2
        began = now()
        held_again.release()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert now() - began < 0.1
        assert producer.health.buffered_bytes >= 30_000
        assert [(type(r), getattr(r, "code", None)) for r in results] == [
            (BrokerError, ErrorCode.PRODUCER_FENCED)
        ] * 2
        fatal = producer._scheduler.fatal_error
        assert len({id(error) for error in (*results, fatal)}) == 3
        assert producer.health.waiting_senders == 0
        assert {type(e) for e in await outcomes([first, large])} == {BrokerRejected, AbortedError}
        with pytest.raises(BrokerError, match="PRODUCER_FENCED"):
            await producer.send("t", payload(1))
        held.release()
        await asyncio.sleep(0.1)
        assert producer.health.buffered_bytes == 0


@pytest.mark.parametrize("refused", [0, 1])
async def test_what_is_stored_is_not_failed_by_a_fatal_error_in_the_same_answer(
    cluster: EmbeddedCluster, new_producer: New, refused: int
) -> None:
    async with new_producer(linger_ms=50) as producer:
        await producer.warm_up("t4")
        code = "INVALID_PRODUCER_ID_MAPPING"
        both = 0, 2  # of one broker
        cluster.inject("produce", error=code, topic="t4", partition=both[refused])
        ended = await outcomes([await producer.enqueue("t4", b"", partition=p) for p in both])
    assert len(cluster.received("produce")) == 1
    assert isinstance(ended[refused], DeliveryError)
    assert ended[1 - refused].offset == 0


async def test_an_answer_that_is_larger_than_all_errors_could_make_it_is_not_read(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(
        request_timeout_ms=1000, delivery_timeout_ms=2000, linger_ms=0
    ) as producer:
        await producer.send("t", payload(0))
        many = [(0, "x" * 1000)] * 300
        cluster.inject("produce", error="INVALID_RECORD", record_errors=many, times=None)
        with pytest.raises(DeliveryTimeout, match=r"an answer of 30\d{4} bytes") as caught:
            await producer.send("t", payload(1))
        assert isinstance(caught.value.__cause__, ProtocolError)
        assert caught.value.persisted == "maybe"


async def test_fatal_error_that_is_raised_by_every_call_collects_no_tracebacks(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Else it would keep the values of all records alive that were refused with it."""

    def length(error: BaseException) -> int:
        return sum(1 for _ in traceback.walk_tb(error.__traceback__))

    async with new_producer() as producer:
        await producer.warm_up("t", "t4")
        asked: list[Coroutine[Any, Any, Any]] = [
            *(producer.send("missing", payload(n)) for n in range(3)),
            *(producer.warm_up("missing") for _ in range(3)),
        ]
        waiting = [asyncio.create_task(ask) for ask in asked]
        await asyncio.sleep(0.1)
        await failed_for_good(cluster, producer)
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: producer.send("t", payload(1)),
            lambda: producer.send("another", payload(1)),
            lambda: producer.warm_up("t"),
            lambda: producer.partitions_for("t"),
            producer.flush,
        ]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        lengths: list[list[int]] = []
        for call in calls:
            of_this_call = await asyncio.gather(
                *[call() for _ in range(20)], return_exceptions=True
            )
            lengths.append([length(error) for error in of_this_call])
            errors += of_this_call
        for _ in range(20):
            with pytest.raises(KafkaError) as caught:
                producer.send_nowait("t", payload(1))
            errors.append(caught.value)
        assert {(type(error), str(error)) for error in errors} == {(BrokerError, "PRODUCER_FENCED")}
        assert len({id(error) for error in errors}) == len(errors)
        assert [len(set(of_this_call)) for of_this_call in lengths] == [1] * len(calls)
        fatal = producer._scheduler.fatal_error
        assert fatal is not None
        assert fatal.__traceback__ is None


async def test_fatal_codes_do_not_end_a_producer_without_idempotence(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("produce", error="CLUSTER_AUTHORIZATION_FAILED")
    async with new_producer(enable_idempotence=False) as producer:
        with pytest.raises(BrokerRejected):
            await producer.send("t", payload(0))
        await producer.send("t", payload(1))


# -- sequences ---------------------------------------------------------------------------------


async def test_sequences_follow_each_other(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-04, SI-22: counted in records; several in flight."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        assert sequences(producer).last_acked_sequence == 0
        assert sequences(producer).next_sequence == 1
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 5)]
        await outcomes(sent)
        assert sequences(producer).last_acked_sequence == 4
    assert sent_sequences(cluster) == [(0, n) for n in range(5)]
    # Pipelined: they came before the first of them was answered.
    arrivals = [request.received_at for request in cluster.received("produce")][1:]
    assert len(set(arrivals)) == 1


async def test_first_batch_of_a_partition_is_waited_for(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """A broker that does not know the producer takes any sequence: nothing may pass the first."""
    async with new_producer(**SINGLE) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        sent = [producer.send_nowait("t", payload(n)) for n in range(4)]
        await outcomes(sent)
    assert sent_sequences(cluster) == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3)]
    assert stored(cluster) == [0, 1, 2, 3]


async def test_retry_goes_first_and_alone(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-05: the first fails, those behind are out of order: all again, one at a time."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 5)]
        assert [metadata.offset for metadata in await outcomes(sent)] == [1, 2, 3, 4]
        assert sequences(producer).producer_epoch == 0
        assert producer.metrics()["record_retry_total"] == 4
    assert sent_sequences(cluster) == [(0, n) for n in (0, 1, 2, 3, 4, 1, 2, 3, 4)]
    arrivals = [request.received_at for request in cluster.received("produce")][5:]
    assert len(set(arrivals)) == 4
    assert stored(cluster) == [0, 1, 2, 3, 4]


async def test_batch_behind_a_failed_one_gets_a_new_epoch(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-06: the failed one leaves a hole, the second one is sent again with sequence 0."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="MESSAGE_TOO_LARGE")
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 4)]
        bad, *good = await outcomes(sent)
        assert isinstance(bad, BrokerRejected)
        assert [metadata.offset for metadata in good] == [1, 2]
    assert sent_sequences(cluster) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert stored(cluster) == [0, 2, 3]


async def test_sequence_that_is_lost_is_mended_by_an_epoch(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-07: out of order right behind the last acknowledged one."""
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="OUT_OF_ORDER_SEQUENCE_NUMBER")
        await producer.send("t", payload(1))
        assert sequences(producer).producer_epoch == 1
        assert sequences(producer).next_sequence == 1
        await producer.send("t", payload(2))
    assert sent_sequences(cluster) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert stored(cluster) == [0, 1, 2]
    assert len(cluster.received("init_producer_id")) == 1


async def test_other_partitions_change_the_epoch_when_they_are_idle(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-08, SI-15, SI-17, TX-35: what is outstanding keeps its epoch, also when it is retried."""
    cluster.create_topic("other", partitions=1)
    cluster.move_leader("other", 0, 2)
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        await producer.send("other", payload(0))
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", topic="other", times=3)
        slow = producer.send_nowait("other", payload(1))
        queued = producer.send_nowait("other", payload(2))
        cluster.inject("produce", error="OUT_OF_ORDER_SEQUENCE_NUMBER", topic="t")
        await producer.send("t", payload(1))
        assert sequences(producer).producer_epoch == 1
        assert not slow.done()
        await outcomes([slow, queued])
        assert sequences(producer, "other").producer_epoch == 0
        await producer.send("other", payload(3))
        assert sequences(producer, "other").producer_epoch == 1
    assert stored(cluster, "other") == [0, 1, 2, 3]
    assert sent_sequences(cluster, "other")[-1] == (1, 0)
    assert {epoch for epoch, _ in sent_sequences(cluster, "other")[:-1]} == {0}


async def test_duplicate_is_a_success_without_an_offset(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-10: an earlier attempt was stored, and its answer was lost."""
    async with new_producer() as producer:
        cluster.inject("produce", error="DUPLICATE_SEQUENCE_NUMBER", after_append=True)
        metadata = await producer.send("t", payload(0), timestamp=1234)
        assert (metadata.offset, metadata.timestamp) == (-1, 1234)
        assert (await producer.send("t", payload(1))).offset == 1
    assert stored(cluster) == [0, 1]


async def test_later_batch_is_stored_before_a_retried_one(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-10: the first was stored, but the broker gave up waiting for its replicas."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="REQUEST_TIMED_OUT", after_append=True)
        first = producer.send_nowait("t", payload(1))
        second = producer.send_nowait("t", payload(2))
        assert (await second).offset == 2
        assert not first.done()
        assert sequences(producer).last_acked_sequence == 2
        assert (await first).offset == 1
        assert sequences(producer).last_acked_sequence == 2
    assert stored(cluster) == [0, 1, 2]


async def test_batch_of_unknown_fate_blocks_new_ones_until_the_others_tell(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-12: the first expires in its retry, the second succeeds, the third was held back."""
    async with new_producer(**IMPATIENT) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", drop="after", when=lambda r: r.batches[0].base_sequence == 1)
        first = producer.send_nowait("t", payload(1))
        await asyncio.sleep(0.01)
        cluster.pause(1)
        await asyncio.sleep(1)
        second = producer.send_nowait("t", payload(2))
        third = producer.send_nowait("t", payload(3))
        await asyncio.sleep(1.9)
        with pytest.raises(DeliveryTimeout) as caught:
            await first
        assert caught.value.persisted == "maybe"
        cluster.resume(1)
        results = await outcomes([second, third])
        assert [getattr(result, "offset", result) for result in results] == [2, 3]
    assert stored(cluster) == [0, 1, 2, 3]


async def test_all_sent_batches_expire(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-14: nobody knows what is stored: a new epoch, and sequence 0."""
    async with new_producer(**IMPATIENT, reconnect_backoff_max_ms=200) as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", drop="before", times=None)
        sent = [producer.send_nowait("t", payload(n)) for n in range(1, 4)]
        results = await outcomes(sent)
        assert {type(result) for result in results} == {DeliveryTimeout}
        assert [result.persisted for result in results] == ["maybe"] * 3
        cluster.clear_faults()
        await producer.send("t", payload(4))
        assert sequences(producer).producer_epoch == 1
    assert stored(cluster) == [0, 4]
    assert sent_sequences(cluster)[-1] == (1, 0)


async def test_broker_that_forgot_the_producer(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-12: as after a week of silence. It takes whatever sequence comes next."""
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        cluster.forget_producers("t", 0)
        await producer.send("t", payload(1))
    assert sent_sequences(cluster) == [(0, 0), (0, 1)]


async def test_unknown_producer_id_without_a_log_start_is_retried_as_it_is(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-18."""
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", error="UNKNOWN_PRODUCER_ID", times=2)
        await producer.send("t", payload(1))
    assert sent_sequences(cluster) == [(0, 0), (0, 1), (0, 1), (0, 1)]


async def test_disconnected_batch_keeps_its_sequence(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-22."""
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        cluster.inject("produce", drop="before")
        await producer.send("t", payload(1))
        assert sequences(producer).next_sequence == 2
    assert sent_sequences(cluster) == [(0, 0), (0, 1), (0, 1)]


async def test_last_epoch_is_followed_by_a_new_producer_id(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """SI-22: and batches of other partitions keep theirs meanwhile."""
    cluster.create_topic("other", partitions=1)
    async with new_producer() as producer:
        await producer.warm_up("t", "other")
        ids = producer._sequences
        assert ids is not None
        ids.producer_epoch = MAX_EPOCH
        old_id = ids.producer_id
        await producer.send("t", payload(0))
        await producer.send("other", payload(0))
        held = cluster.inject("init_producer_id", hold=True)
        cluster.inject("produce", error="OUT_OF_ORDER_SEQUENCE_NUMBER", topic="t")
        delivery = producer.send_nowait("t", payload(1))
        await held.reached()
        assert not delivery.done()
        held.release()
        await delivery
        await producer.send("other", payload(1))
        assert ids.producer_id != old_id
    assert [(b.producer_id == old_id, b.producer_epoch) for b in batches(cluster)] == [
        (True, MAX_EPOCH),
        (True, MAX_EPOCH),
        (False, 0),
    ]
    assert stored(cluster) == [0, 1]
    assert stored(cluster, "other") == [0, 1]


@pytest.mark.parametrize("timeout", [0, 5])
async def test_closing_releases_all_who_wait_for_the_producer_id(
    cluster: EmbeddedCluster, new_producer: New, timeout: int
) -> None:
    """KP-18: an API call that waits for it gets a KafkaError, with close(0) at once.

    Without transactions nobody waits for a coordinator or for partitions to be added.
    """
    held = cluster.inject("init_producer_id", hold=True)
    async with new_producer() as producer:
        warming = asyncio.create_task(producer.warm_up("t"))
        sending = asyncio.create_task(producer.send("t", payload(0)))
        await held.reached()
        await asyncio.sleep(1)
        flushing = asyncio.create_task(producer.flush())
        await asyncio.sleep(1)
        assert not any(task.done() for task in (warming, sending, flushing))

        began = now()
        report = await producer.close(timeout)
        with pytest.raises(ProducerClosed, match="closed while waiting for a producer id"):
            await warming
        with pytest.raises(AbortedError, match="was closed before") as caught:
            await sending
        assert caught.value.persisted == "no"
        await flushing
        assert now() - began == pytest.approx(timeout, abs=0.1)
        assert report.aborted == 1
    assert stored(cluster) == []


@pytest.mark.parametrize("timeout", [0, 5])
async def test_closing_while_a_new_producer_id_is_fetched(
    cluster: EmbeddedCluster, new_producer: New, timeout: int
) -> None:
    """SI-16, KP-18: also when there was one before."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        assert producer._sequences is not None
        producer._sequences.producer_epoch = MAX_EPOCH
        held = cluster.inject("init_producer_id", hold=True)
        cluster.inject("produce", error="OUT_OF_ORDER_SEQUENCE_NUMBER")
        delivery = producer.send_nowait("t", payload(1))
        await held.reached()
        report = await producer.close(timeout)
        assert report.elapsed == pytest.approx(timeout, abs=0.1)
        assert report.aborted == 1
        assert isinstance(delivery.exception(), AbortedError)


async def test_sequences_wrap(cluster: EmbeddedCluster, new_producer: New) -> None:
    """SI-24: 0 comes after 2147483647."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        cluster.forget_producers("t", 0)
        sequences(producer).next_sequence = 2**31 - 2
        sequences(producer).last_acked_sequence = 2**31 - 3
        cluster.inject("produce", error="NOT_ENOUGH_REPLICAS")
        await producer.send("t", payload(1))
        sent = [producer.send_nowait("t", payload(n)) for n in range(2, 6)]
        assert [metadata.offset for metadata in await outcomes(sent)] == [2, 3, 4, 5]
    assert [s for _, s in sent_sequences(cluster)][-6:] == [
        2**31 - 2,
        2**31 - 2,
        2**31 - 1,
        0,
        1,
        2,
    ]
    assert stored(cluster) == [0, 1, 2, 3, 4, 5]


# -- compression -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_large_batches_are_compressed_beside_the_loop(
    cluster: EmbeddedCluster, new_producer: New, codec: str
) -> None:
    async with new_producer(
        compression_type=codec, batch_size=200_000, linger_ms=10, max_request_size=2**20
    ) as producer:
        threads = set()
        in_thread = producer._scheduler._in_thread

        async def noted(function: Callable[[], bytes]) -> bytes:
            def work() -> bytes:
                threads.add(threading.get_ident())
                return function()

            return await in_thread(work)

        producer._scheduler._in_thread = noted
        await producer.send("t", payload(0))
        assert not threads
        sent = [producer.send_nowait("t", payload(n) * 10) for n in range(1, 500)]
        await producer.flush()
        assert [delivery.result().offset for delivery in sent] == list(range(1, 500))
        assert producer.metrics()["compression_rate_avg"] < 0.5
    assert threads
    assert threading.get_ident() not in threads
    assert len({batch.codec_id for batch in batches(cluster)}) == 1
    assert [int((r.value or b"")[:100]) for r in cluster.records("t")] == list(range(500))
    assert max(batch.record_count for batch in batches(cluster)) > 64


async def test_small_batches_are_compressed_in_one_turn_after_the_other(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Neither at once nor in a thread: nothing but the next turn of the loop is waited for."""
    loop = asyncio.get_running_loop()
    async with new_producer(compression_type="lz4", linger_ms=0, adaptive_linger=False) as producer:
        await producer.warm_up("t4")
        accumulator = producer._accumulator
        accumulator.quick_bytes = 300
        accumulator.turned(now())
        began = loop.time()
        deliveries = [
            producer.send_nowait("t4", payload(number), partition=number) for number in range(4)
        ]
        assert len(accumulator.postponed) == 3
        await asyncio.gather(*deliveries)
        assert loop.time() - began < 0.01
        assert not accumulator.postponed
        await asyncio.sleep(0)
        assert not accumulator.compressed_here
    assert len(cluster.received("produce")) > 1


async def test_what_threads_have_compressed_in_one_turn_leaves_in_one_request(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(batch_size=200_000, compression_type="gzip") as producer:
        await producer.warm_up("t4")
        working: list[Callable[[], bytes]] = []
        all_work = asyncio.Event()

        async def slow(function: Callable[[], bytes]) -> bytes:
            working.append(function)
            if len(working) == 4:
                all_work.set()
            await all_work.wait()
            return function()

        producer._scheduler._in_thread = slow
        sent = [producer.send_nowait("t4", bytes(100_000), partition=n) for n in range(4)]
        await producer.flush()
        assert [delivery.result().offset for delivery in sent] == [0] * 4
    requests = cluster.received("produce")
    assert len(requests) == len({request.node_id for request in requests}) < 4


async def test_what_a_thread_has_done_does_not_give_a_turn_more_time_to_compress(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The step that follows comes after what is compressed here in the same turn."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    async def slow(function: Callable[[], bytes]) -> bytes:
        await done
        return function()

    async with new_producer(
        compression_type="lz4", batch_size=200_000, linger_ms=0, adaptive_linger=False
    ) as producer:
        await producer.warm_up("t", "t4")
        accumulator = producer._accumulator
        producer._scheduler._in_thread = slow
        producer.send_nowait("t", bytes(180_000))
        await turns(10)
        waited: list[int] = []

        def others() -> None:
            accumulator.quick_bytes = 300
            accumulator.turned(loop.time())
            for number in range(4):
                producer.send_nowait("t4", payload(number), partition=number)
            producer._scheduler.try_step(loop.time())
            waited.append(len(accumulator.postponed))

        loop.call_soon(loop.call_soon, others)
        done.set_result(None)
        await asyncio.sleep(0)
        # In the turn of the others, after the step for what the thread has done.
        loop.call_soon(lambda: waited.append(len(accumulator.postponed)))
        await turns(5)
        assert waited == [3, 3]


@pytest.mark.parametrize("later", range(5))
def test_no_thread_is_given_work_once_the_task_has_ended(later: int) -> None:
    """Whoever cancels all tasks, as `asyncio.run` does in the end, leaves none behind. (On
    asyncio's own loop, where an answer comes while the cancelled task ends.)"""
    working: list[asyncio.Future[None]] = []

    async def slow(function: Callable[[], bytes]) -> bytes:
        working.append(asyncio.get_running_loop().create_future())
        await working[-1]
        return function()

    async def main() -> None:
        network = MemoryNetwork()
        async with (
            EmbeddedCluster(topics={"t": 1}, network=network) as cluster,
            Producer(
                cluster.bootstrap_servers,
                connector=network,
                compression_type="lz4",
                batch_size=200_000,
            ) as producer,
        ):
            await producer.warm_up("t")
            producer._scheduler._in_thread = slow
            sent = [producer.send_nowait("t", bytes(190_000)) for _ in range(3)]
            await turns(20)
            working[0].set_result(None)
            await turns(later)
            for task in asyncio.all_tasks():
                if task.get_name().endswith("scheduler"):
                    task.cancel()
            await turns(10)
            assert "_compress" not in repr(asyncio.all_tasks())
            with pytest.raises(AbortedError):
                sent[-1].result()

    asyncio.run(main())


async def test_expired_while_it_is_compressed(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(**{**IMPATIENT, "batch_size": 200_000}, compression_type="gzip") as p:
        await p.warm_up("t")
        working = asyncio.Event()
        go_on = asyncio.Event()

        async def slow(function: Callable[[], bytes]) -> bytes:
            working.set()
            await go_on.wait()
            return function()

        p._scheduler._in_thread = slow
        delivery = p.send_nowait("t", bytes(100_000))
        closing = p.send_nowait("t", bytes(150_000))
        await working.wait()
        with pytest.raises(DeliveryTimeout, match="never sent") as caught:
            await delivery
        assert caught.value.persisted == "no"
        go_on.set()
        with pytest.raises(DeliveryTimeout):
            await closing
        await p.send("t", payload(1))
    assert stored(cluster) == [1]


@pytest.mark.skipif(IMPLEMENTATION != "compiled", reason="only that uses buffers again")
async def test_a_batch_compressed_by_a_thread_leaves_its_buffer_to_others(
    new_producer: New,
) -> None:
    async with new_producer(batch_size=200_000, compression_type="lz4") as p:
        await p.send("t", bytes(150_000))
        assert p._accumulator.spares.size > 150_000


async def test_failing_compression_is_reported(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch fails at once; the producer goes on."""
    async with new_producer(batch_size=200_000, compression_type="gzip") as p:
        await p.warm_up("t", "t4")

        async def broken(function: Callable[[], bytes]) -> bytes:
            raise MemoryError("no room")

        p._scheduler._in_thread = broken
        with pytest.raises(DeliveryError, match="could not be compressed") as caught:
            await p.send("t", bytes(100_000))
        assert caught.value.persisted == "no"
        assert p.metrics()["record_error_total"] == 1
        await p.send("t", payload(1))
    assert stored(cluster) == [1]
    assert errors_logged(caplog) == ["t-0: a batch cannot be compressed"]


# -- robustness --------------------------------------------------------------------------------


async def test_bug_in_a_step_does_not_end_the_scheduler(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_producer(linger_ms=20, adaptive_linger=False) as producer:
        await producer.warm_up("t")
        scheduler = producer._scheduler
        idempotence = scheduler._idempotence
        calls = 0

        def broken(now: float) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ZeroDivisionError("a bug")
            idempotence(now)

        scheduler._idempotence = broken  # type: ignore[method-assign]
        await producer.send("t", payload(0))
    assert errors_logged(caplog) == ["the scheduler failed; it goes on"]


class Bug:
    """A part of the scheduler that fails for some of its calls, counted from 1."""

    def __init__(self, part: Callable[..., Any], fails: Callable[[int], bool]) -> None:
        self._part = part
        self._fails = fails
        self.calls = 0
        self.failed = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self._fails(self.calls):
            self.failed += 1
            raise ZeroDivisionError("a bug")
        return self._part(*args)


def break_part(producer: Producer[Any, Any], part: str, fails: Callable[[int], bool]) -> Bug:
    """From now on, this method of the scheduler has a bug."""
    bug = Bug(getattr(producer._scheduler, part), fails)
    setattr(producer._scheduler, part, bug)
    return bug


async def test_bug_in_the_step_that_follows_a_producer_id_is_survived(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits for the id is told of it, and health no longer says that there is none."""
    cluster.inject("init_producer_id", error="COORDINATOR_NOT_AVAILABLE", times=20)
    async with new_producer(retry_backoff_ms=100) as producer:
        warming = asyncio.create_task(producer.warm_up("t"))
        delivery = await producer.enqueue("t", payload(0))
        await asyncio.sleep(1)
        assert not producer.health.ready
        bug = break_part(producer, "_serve", lambda number: number == 1)
        assert (await delivery).offset == 0
        assert bug.failed == 1
        await warming
        assert producer.health.problem is None
    assert errors_logged(caplog) == ["the scheduler failed; it goes on"]


async def test_bug_in_the_step_that_follows_a_compression_is_survived(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_producer(compression_type="gzip", batch_size=200_000) as producer:
        await producer.warm_up("t")
        await asyncio.sleep(1)
        compress = producer._scheduler._compress

        async def compress_and_fail(batch: Any) -> None:
            break_part(producer, "_serve", lambda number: number == 1)
            await compress(batch)

        producer._scheduler._compress = compress_and_fail  # type: ignore[method-assign]
        began = now()
        await producer.send("t", bytes(180_000))
        assert now() - began < 1
    assert errors_logged(caplog) == ["the scheduler failed; it goes on"]


@pytest.mark.parametrize("call", ["send_nowait", "enqueue"])
async def test_bug_in_a_step_is_not_raised_by_the_send_that_steps(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The record is buffered, and sent: who got an error would send it again."""
    async with new_producer(**SINGLE) as producer:
        await producer.send("t", payload(0))
        await asyncio.sleep(1)
        bug = break_part(producer, "_serve", lambda number: number == 1)
        began = now()
        if call == "enqueue":
            delivery = await producer.enqueue("t", payload(1))
        else:
            delivery = producer.send_nowait("t", payload(1))
        assert bug.failed == 1, "within the call"
        assert errors_logged(caplog) == ["the scheduler failed; it goes on"]
        assert (await delivery).offset == 1
        assert now() - began < 1
    assert stored(cluster) == [0, 1]


@pytest.mark.parametrize("options", [{}, SINGLE], ids=["many in a batch", "one in a batch"])
@pytest.mark.parametrize("number", range(1, 7))
async def test_bug_in_any_step_is_survived(
    cluster: EmbeddedCluster,
    new_producer: New,
    caplog: pytest.LogCaptureFixture,
    number: int,
    options: dict[str, Any],
) -> None:
    """Whoever steps: a send, the scheduler's task, an answer, the look at young batches."""
    async with new_producer(**options, max_in_flight_requests_per_connection=1) as producer:
        await producer.send("t", payload(0))
        await asyncio.sleep(1)
        closed = producer.metrics()["connection_close_total"]
        bug = break_part(producer, "_serve", lambda call: call == number)
        began = now()
        for first in range(1, 31, 3):
            sent = [await producer.enqueue("t", payload(n)) for n in range(first, first + 3)]
            await outcomes(sent)
        assert bug.failed == 1
        assert now() - began < 2
        assert producer.metrics()["connection_close_total"] == closed
    assert stored(cluster) == list(range(31))
    assert errors_logged(caplog) == ["the scheduler failed; it goes on"]


@pytest.mark.parametrize("part", ["_idempotence", "_serve", "_send"])
async def test_bug_in_each_step_does_not_keep_the_producer_from_closing(
    cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    before = asyncio.all_tasks()
    async with Producer(
        cluster.bootstrap_servers,
        connector=cluster.connector,
        linger_ms=1000,
        adaptive_linger=False,
    ) as producer:
        await producer.send("t", payload(0))
        delivery = await producer.enqueue("t", payload(1))
        bug = break_part(producer, part, lambda number: True)
        began = now()
        report = await producer.close(5)
        assert bug.failed > 0
        assert now() - began == pytest.approx(5, abs=0.01)
        assert (report.acknowledged, report.failed, report.aborted) == (1, 1, 1)
        assert producer.health.state == "closed"
        assert isinstance(delivery.exception(), AbortedError)
        assert await producer.close() is report
        await asyncio.sleep(1)  # those of the brokers end, too
        assert asyncio.all_tasks() == before
    assert set(errors_logged(caplog)) == {"the scheduler failed; it goes on"}


async def test_bug_where_a_close_gives_up_does_not_leave_anything_running(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The close raises it, and is done all the same."""
    before = asyncio.all_tasks()
    async with new_producer() as producer:
        await producer.send("t", payload(0))
        break_part(producer, "abort", lambda number: True)
        with pytest.raises(ZeroDivisionError):
            await producer.close(5)
        assert producer.health.state == "closed"
        assert (await producer.close()).acknowledged == 1
        assert producer.health.brokers_connected == 0
        await asyncio.sleep(1)  # those of the brokers end, too
        assert asyncio.all_tasks() == before


async def test_delivery_callback_that_raises_disturbs_nobody(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(delivery: Delivery) -> None:
        raise ZeroDivisionError("a user's bug")

    async with new_producer() as producer:
        await producer.warm_up("t")
        sent = [producer.send_nowait("t", payload(n)) for n in range(3)]
        sent[1].add_done_callback(broken)
        await outcomes(sent)
    assert errors_logged(caplog) == ["a delivery callback of t failed"]


async def test_busy_producer_does_not_spin(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Spec 12.5: it sleeps until the next deadline, not until the next moment."""
    async with new_producer(linger_ms=1000, adaptive_linger=False) as producer:
        await producer.send("t", payload(0))
        steps = 0
        step = producer._scheduler.step

        def counted(now: float) -> float:
            nonlocal steps
            steps += 1
            return step(now)

        producer._scheduler.step = counted  # type: ignore[method-assign]
        producer.send_nowait("t", payload(1))
        await asyncio.sleep(0.9)
        assert steps <= 3
        cluster.pause(1)
        await asyncio.sleep(20)
        assert steps <= 12
        cluster.resume(1)


async def test_observers_and_fences_meet_in_one_turn(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """A callback may flush, send and close: everything still ends."""

    class Reacts(Interceptor):
        def on_acknowledgement(self, *args: Any) -> None:
            tasks.append(asyncio.ensure_future(producer.flush()))

    tasks: list[asyncio.Future[None]] = []
    async with new_producer(interceptors=[Reacts()]) as producer:
        await producer.send("t", payload(0))
        await producer.send("t", payload(1))
        await asyncio.gather(*tasks)
    assert len(tasks) == 2
