"""What a producer promises beside delivering bytes, with brokers that are in the way of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its __init__ has no __all__
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewPartitions
from kio.schema.alter_client_quotas.v1.request import (
    AlterClientQuotasRequest,
    EntityData,
    EntryData,
    OpData,
)
from kio.schema.alter_client_quotas.v1.response import AlterClientQuotasResponse
from kio.schema.describe_producers.v0.request import DescribeProducersRequest, TopicRequest
from kio.schema.describe_producers.v0.response import DescribeProducersResponse
from kio.schema.describe_transactions.v0.request import DescribeTransactionsRequest
from kio.schema.describe_transactions.v0.response import DescribeTransactionsResponse
from kio.schema.types import TopicName, TransactionalId
from kio.static.primitive import f64, i32

from asyncproducer import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    BufferTimeout,
    ConnectionFailed,
    Delivery,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    Interceptor,
    InvalidTopic,
    KafkaError,
    MetadataTimeout,
    Producer,
    ProducerClosed,
    RecordTooLarge,
    TopicPartition,
    TransactionAborted,
)
from asyncproducer.bench.committed import count_committed
from asyncproducer.core.batch import batch_upper_bound
from asyncproducer.testing import EmbeddedCluster, kafka_nodes
from asyncproducer.testing.batches import read_header, split_batches
from asyncproducer.testing.kafka import KafkaCluster, KafkaSource, KafkaUnavailable
from asyncproducer.testing.kafka_nodes import free_ports
from asyncproducer.testing.proxy import FaultProxy, ProxyFault
from asyncproducer.testing.raw_client import RawClient

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic, Log, Reader, TopicId

BytesProducer = Producer[Any, Any]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def values(log: Log) -> list[bytes | None]:
    """Of all partitions, one after the other."""
    return [record.value for records in log.values() for record in records]


def numbered(count: int, size: int = 0) -> list[bytes]:
    return [(b"%06d" % n).ljust(size, b".") for n in range(count)]


async def administrate(kafka: KafkaCluster, ask: Callable[[AdminClient], Any]) -> None:
    """`ask` returns futures by topic, which are waited for."""

    def work() -> None:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for future in ask(admin).values():
            future.result(30)

    await asyncio.to_thread(work)


async def errors_of(deliveries: Sequence[Delivery]) -> list[DeliveryError | None]:
    found: list[DeliveryError | None] = []
    for delivery in deliveries:
        try:
            await delivery
        except DeliveryError as error:
            found.append(error)
        else:
            found.append(None)
    return found


# -- topics and partitions


async def test_a_topic_is_created_by_the_first_send(kafka: KafkaCluster, read_log: Reader) -> None:
    """IT-03"""
    topic = f"created-by-the-first-send-{now_ms()}"
    async with BytesProducer(kafka.bootstrap_servers) as producer:
        async with asyncio.TaskGroup() as group:
            sends = [
                group.create_task(producer.send(topic, value, partition=0))
                for value in numbered(10)
            ]
        assert [send.result().offset for send in sends] == list(range(10))
    assert values(await read_log(kafka, topic)) == numbered(10)


async def test_a_partition_that_does_not_exist_is_waited_for(
    kafka: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    """IT-03"""
    topic = fresh_topic(2)
    async with BytesProducer(kafka.bootstrap_servers, max_block_ms=400) as producer:
        await producer.warm_up(topic)
        async with asyncio.timeout(5):
            with pytest.raises(MetadataTimeout, match="the topic has 2 partitions"):
                await producer.send(topic, b"v", partition=2)
        # Nobody else has to wait.
        assert (await producer.send(topic, b"v", partition=1)).offset == 0


async def test_new_partitions_are_found_by_whoever_waits_for_them(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-03"""
    topic = fresh_topic(1)
    async with BytesProducer(kafka.bootstrap_servers) as producer:
        await producer.send(topic, b"first", partition=0)
        waiting = asyncio.create_task(producer.send(topic, b"second", partition=3))
        await administrate(kafka, lambda a: a.create_partitions([NewPartitions(topic, 4)]))
        assert (await waiting).partition == 3
        assert len(await producer.partitions_for(topic)) == 4
    log = await read_log(kafka, topic)
    assert {p: [r.value for r in records] for p, records in log.items()} == {
        0: [b"first"],
        1: [],
        2: [],
        3: [b"second"],
    }


async def test_internal_topics_are_not_written_to(kafka: KafkaCluster) -> None:
    """IT-09"""
    async with BytesProducer(kafka.bootstrap_servers) as producer:
        with pytest.raises((InvalidTopic, BrokerRejected)) as caught:
            await producer.send("__consumer_offsets", b"v", key=b"k")
        assert caught.value.code == ErrorCode.INVALID_TOPIC_EXCEPTION
        assert isinstance(caught.value, BrokerRejected)
        assert caught.value.persisted == "no"


async def test_a_name_that_no_broker_takes_is_refused(kafka: KafkaCluster) -> None:
    async with BytesProducer(kafka.bootstrap_servers) as producer:
        with pytest.raises(InvalidTopic):
            await producer.send("no spaces", b"v")


async def test_a_topic_that_is_deleted_while_sending(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader, topic_id: TopicId
) -> None:
    """IT-11: it comes back, since brokers create topics; every record has its end."""
    topic = fresh_topic(2)
    deliveries: list[Delivery] = []
    async with BytesProducer(
        kafka.bootstrap_servers, linger_ms=1, request_timeout_ms=2000, delivery_timeout_ms=10_000
    ) as producer:
        old_id = await topic_id(kafka, topic)
        deleted = asyncio.create_task(administrate(kafka, lambda a: a.delete_topics([topic])))

        async def send(count: int) -> None:
            for _ in range(count):
                value = b"%06d" % len(deliveries)
                deliveries.append(await producer.enqueue(topic, value, partition=0))

        async with asyncio.timeout(20):
            while await topic_id(kafka, topic) in (old_id, None):
                await send(50)
        await deleted
        await send(50)
        await producer.flush(timeout=20)
        errors = await errors_of(deliveries)
    assert errors[-1] is None
    assert all(isinstance(error, DeliveryTimeout) for error in errors if error is not None)
    log = await read_log(kafka, topic)
    # The log is that of the new topic: the last ones, each once and in order.
    offsets = [
        None if errors[n] else delivery.result().offset for n, delivery in enumerate(deliveries)
    ]
    found = [int(record.value or b"") for record in log[0]]
    assert found == sorted(set(found))
    assert found[-1] == len(deliveries) - 1
    assert [offsets[n] for n in found if offsets[n] is not None] == [
        record.offset for record in log[0] if offsets[int(record.value or b"")] is not None
    ]


# -- timestamps


async def test_only_the_record_with_a_bad_timestamp_is_named(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-04: those that share its batch are refused with it; what comes later is not."""
    bounds = {f"message.timestamp.{side}.max.ms": "60000" for side in ("before", "after")}
    topic = fresh_topic(1, configs=bounds)
    async with BytesProducer(
        kafka.bootstrap_servers, linger_ms=10_000, adaptive_linger=False
    ) as producer:
        deliveries = [
            await producer.enqueue(topic, b"%d" % offset, timestamp=now_ms() + offset)
            for offset in (0, -90_000, 10)
        ]
        await producer.flush()
        errors = await errors_of(deliveries)
        assert [type(error) for error in errors] == [BrokerRejected] * 3
        wanted = [None, ErrorCode.INVALID_TIMESTAMP, None]
        for error, code in zip(errors, wanted, strict=True):
            assert isinstance(error, BrokerRejected)
            assert (error.code, error.persisted) == (code, "no")
        assert [getattr(error, "record_index", None) for error in errors] == [None, 1, None]
        assert "Timestamp" in str(errors[1])
        assert "another record" in str(errors[0])

        deliveries = [
            await producer.enqueue(topic, b"%d" % offset, timestamp=now_ms() + offset)
            for offset in (-55_000, 0, 55_000)
        ]
        await producer.flush()
        assert await errors_of(deliveries) == [None] * 3
    assert values(await read_log(kafka, topic)) == [b"-55000", b"0", b"55000"]


async def test_a_bad_timestamp_alone_in_its_batch_disturbs_nobody(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-04"""
    topic = fresh_topic(1, configs={"message.timestamp.after.max.ms": "60000"})
    async with BytesProducer(kafka.bootstrap_servers, batch_size=0) as producer:
        deliveries = [
            await producer.enqueue(
                topic, value, timestamp=now_ms() + (90_000 if n % 10 == 5 else 0)
            )
            for n, value in enumerate(numbered(100))
        ]
        errors = await errors_of(deliveries)
    assert [n for n, error in enumerate(errors) if error] == list(range(5, 100, 10))
    expected = [value for n, value in enumerate(numbered(100)) if n % 10 != 5]
    assert values(await read_log(kafka, topic)) == expected


# -- sizes


async def test_a_record_of_max_request_size_and_one_byte_more(
    kafka: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    """IT-05"""
    topic = fresh_topic()
    async with BytesProducer(kafka.bootstrap_servers, max_request_size=20_000) as producer:
        size = 20_000 - batch_upper_bound(None, bytes(19_000), b"\0") + 19_000
        assert (await producer.send(topic, bytes(size))).serialized_value_size == size
        with pytest.raises(RecordTooLarge, match="max_request_size=20000"):
            await producer.send(topic, bytes(size + 1))
    assert kafka.end_offsets(topic) == {0: 1}


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize(
    "options", [{}, {"enable_idempotence": False}], ids=["idempotent", "plain"]
)
async def test_a_batch_that_is_too_large_for_the_broker_is_split(
    kafka: KafkaCluster,
    fresh_topic: FreshTopic,
    read_log: Reader,
    codec: str,
    options: dict[str, Any],
) -> None:
    topic = fresh_topic(1, configs={"max.message.bytes": "1000"})
    randbytes = random.Random(1).randbytes
    sent = [value + randbytes(100) for value in numbered(300)]
    async with BytesProducer(
        kafka.bootstrap_servers,
        compression_type=codec,
        linger_ms=50,
        # Without sequences, what fails is put in front of what is under way.
        max_in_flight_requests_per_connection=5 if not options else 1,
        **options,
    ) as producer:
        deliveries = [await producer.enqueue(topic, value) for value in sent]
        places = [await delivery for delivery in deliveries]
        metrics = producer.metrics()
    assert [place.offset for place in places] == list(range(300))
    assert values(await read_log(kafka, topic)) == sent
    assert metrics["batch_split_total"] > 3
    assert metrics["record_error_total"] == 0
    assert metrics["buffer_available_bytes"] == metrics["buffer_total_bytes"]


@pytest.mark.parametrize("kind", ["cut_before", "cut_after"])
async def test_a_batch_whose_answer_was_lost_and_that_is_too_large_then_is_stored_once(
    kafka: KafkaCluster,
    fresh_topic: FreshTopic,
    read_log: Reader,
    kind: Literal["cut_before", "cut_after"],
) -> None:
    topic = fresh_topic(1)
    sent = numbered(12)
    async with (
        FaultProxy(kafka.bootstrap_servers) as proxy,
        BytesProducer(
            proxy.bootstrap_servers,
            linger_ms=200,
            adaptive_linger=False,
            retry_backoff_ms=3000,
            retry_backoff_max_ms=3000,
        ) as producer,
    ):
        await producer.send(topic, sent[0])
        proxy.inject(ProxyFault(kind=kind, api="produce"))
        deliveries = [await producer.enqueue(topic, value) for value in sent[1:-1]]
        await proxy.happened(1)
        # Within the backoff: the batch is sent again, and the broker looks at its size first.
        await asyncio.to_thread(kafka.admin.alter_topic, topic, {"max.message.bytes": "150"})
        ended = await asyncio.gather(*deliveries, return_exceptions=True)
        assert producer.metrics()["batch_split_total"] > 0
        if kind == "cut_after":
            assert {getattr(each, "persisted", None) for each in ended} == {"maybe"}
        else:
            assert [getattr(each, "offset", each) for each in ended] == list(range(1, 11))
        await producer.send(topic, sent[-1])
    assert values(await read_log(kafka, topic)) == sent


@pytest.mark.parametrize("acks", ["all", 1])
async def test_a_single_record_that_is_too_large_for_the_broker_is_rejected(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader, acks: Any
) -> None:
    """IT-08"""
    topic = fresh_topic(1, configs={"max.message.bytes": "1000"})
    async with BytesProducer(
        kafka.bootstrap_servers,
        acks=acks,
        linger_ms=20,
        # Without sequences, a part that has to be split again is passed by the next.
        max_in_flight_requests_per_connection=5 if acks == "all" else 1,
    ) as producer:
        small, large, behind = [
            await producer.enqueue(topic, bytes(size)) for size in (500, 1500, 501)
        ]
        errors = await errors_of([small, large, behind])
        assert errors[0] is errors[2] is None
        error = errors[1]
        assert isinstance(error, BrokerRejected)
        assert (error.code, error.persisted) == (ErrorCode.MESSAGE_TOO_LARGE, "no")
        assert (error.topic, error.partition) == (topic, 0)
        assert isinstance(error.__cause__, BrokerError)
    assert [len(value or b"") for value in values(await read_log(kafka, topic))] == [500, 501]


async def test_without_acks_nobody_hears_of_a_record_that_is_too_large(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-08: the broker closes the connection, which is all that it can do."""
    topic = fresh_topic(1, configs={"max.message.bytes": "1000"})
    async with BytesProducer(kafka.bootstrap_servers, acks=0) as producer:
        assert (await producer.send(topic, bytes(1500))).offset == -1
        # What is sent before the connection is found closed is lost, as it may be.
        for _ in range(1000):
            assert (await producer.send(topic, b"small")).offset == -1
            if (await asyncio.to_thread(kafka.end_offsets, topic))[0]:
                break
    assert b"small" in values(await read_log(kafka, topic))


async def test_a_record_may_be_too_large_for_a_fetch_of_the_followers(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-08: replica.fetch.max.bytes bounds a fetch, not a record."""
    topic = fresh_topic(1, cluster=kafka3, configs={"max.message.bytes": "4000000"})
    async with BytesProducer(kafka3.bootstrap_servers, max_request_size=4_000_000) as producer:
        value = random.Random(2).randbytes(3_000_000)
        assert (await producer.send(topic, value)).offset == 0
    assert values(await read_log(kafka3, topic)) == [value]


# -- waiting, and not waiting


def at_once(call: Coroutine[Any, Any, Any]) -> None:
    """Runs what must end without letting the loop turn."""
    try:
        call.send(None)
    except StopIteration:
        pass
    else:
        call.close()
        pytest.fail("it waits")


async def test_with_max_block_0_nobody_waits(
    kafka: KafkaCluster, fresh_topic: FreshTopic, topic_id: TopicId
) -> None:
    """IT-06: the first send fails but asks for the topic; later ones succeed, given room."""
    topic = fresh_topic()
    async with BytesProducer(
        kafka.bootstrap_servers,
        max_block_ms=0,
        buffer_memory=32_768,
        linger_ms=60_000,
        adaptive_linger=False,
    ) as producer:
        with pytest.raises(MetadataTimeout):
            at_once(producer.send(topic, b"v"))
        async with asyncio.timeout(10):
            while True:
                try:
                    first = await producer.enqueue(topic, bytes(20_000))
                except MetadataTimeout:
                    # Its own question is answered meanwhile.
                    await topic_id(kafka, topic)
                else:
                    break
        with pytest.raises(BufferTimeout):
            at_once(producer.enqueue(topic, bytes(20_000)))
        assert (await first).offset == 0
        second = await producer.enqueue(topic, bytes(20_000))
        await producer.flush()
        assert (await second).offset == 1


# -- flush and close


async def test_flush_sends_what_lingers(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-07"""
    topic = fresh_topic(3)
    async with BytesProducer(
        kafka.bootstrap_servers, linger_ms=60_000, adaptive_linger=False
    ) as producer:
        for round_ in range(3):
            deliveries = [await producer.enqueue(topic, value) for value in numbered(2000)]
            assert not deliveries[-1].done()
            await producer.flush()
            assert all(delivery.done() for delivery in deliveries)
            assert sum(kafka.end_offsets(topic).values()) == 2000 * (round_ + 1)
    assert len(values(await read_log(kafka, topic))) == 6000


async def test_close_delivers_everything(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-07"""
    topic = fresh_topic(3)
    producer = BytesProducer(
        kafka.bootstrap_servers,
        linger_ms=60_000,
        adaptive_linger=False,
        compression_type="lz4",
    )
    await producer.start()
    deliveries = [await producer.enqueue(topic, value) for value in numbered(5000)]
    async with asyncio.timeout(10):  # and not until they have lingered
        report = await producer.close()
    assert (report.acknowledged, report.failed, report.clean) == (5000, 0, True)
    assert all(delivery.done() for delivery in deliveries)
    assert sorted(v or b"" for v in values(await read_log(kafka, topic))) == numbered(5000)
    for call in (producer.send, producer.enqueue):
        with pytest.raises(ProducerClosed):
            await call(topic, b"v")
    assert await producer.close() == report


async def test_close_0_gives_up_what_is_pending(
    kafka: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    """IT-07"""
    topic = fresh_topic()
    producer = BytesProducer(kafka.bootstrap_servers, linger_ms=60_000, adaptive_linger=False)
    await producer.start()
    await producer.warm_up(topic)
    # More than all the requests that can be under way at once.
    deliveries = [producer.send_nowait(topic, value) for value in numbered(2000, size=1000)]
    async with asyncio.timeout(10):
        report = await producer.close(0)
    errors = await errors_of(deliveries)
    aborted = [error for error in errors if error is not None]
    assert all(isinstance(error, AbortedError) for error in aborted)
    assert report.aborted == len(aborted) > 0


async def test_close_0_from_a_callback(kafka: KafkaCluster, fresh_topic: FreshTopic) -> None:
    """IT-07: no deadlock, and everything has its end."""
    topic = fresh_topic()
    producer = BytesProducer(kafka.bootstrap_servers, batch_size=200)
    await producer.start()
    closing: list[asyncio.Task[Any]] = []

    def close(_: Delivery) -> None:
        closing.append(asyncio.get_running_loop().create_task(producer.close(0)))

    deliveries: list[Delivery] = []

    async def send_on() -> None:
        while True:
            deliveries.append(await producer.enqueue(topic, b"v"))
            await asyncio.sleep(0)

    first = await producer.enqueue(topic, b"v")
    first.add_done_callback(close)
    with pytest.raises(ProducerClosed):
        await send_on()
    async with asyncio.timeout(10):
        report = await closing[0]
        errors = await errors_of(deliveries)
    assert first.result().offset == 0
    assert all(error is None or isinstance(error, AbortedError) for error in errors)
    assert report.acknowledged + report.failed == len(deliveries) + 1


# -- brokers that are not there


async def test_no_broker_at_the_bootstrap_address() -> None:
    """IT-09"""
    (port,) = free_ports(1)
    producer = BytesProducer(f"127.0.0.1:{port}", max_block_ms=500)
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionFailed, match=str(port)):
            await producer.start()
    await producer.close()


async def test_one_bad_bootstrap_address_does_no_harm(
    kafka: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    (port,) = free_ports(1)
    servers = f"127.0.0.1:{port},{kafka.bootstrap_servers}"
    async with BytesProducer(servers) as producer:
        assert (await producer.send(fresh_topic(), b"v")).offset == 0


async def test_all_known_brokers_are_replaced(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-15: the bootstrap address leads to the new ones."""
    topic = fresh_topic()
    target = ""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, far_writer))
            group.create_task(pump(far_reader, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        old = EmbeddedCluster(topics={topic: 1})
        await old.start()
        target = old.bootstrap_servers
        async with BytesProducer(address, reconnect_backoff_max_ms=100) as producer:
            assert [(await producer.send(topic, b"old")).offset for _ in range(3)] == [0, 1, 2]
            target = kafka.bootstrap_servers
            await old.close()
            async with asyncio.timeout(20):
                assert (await producer.send(topic, b"new")).offset == 0
    assert values(await read_log(kafka, topic)) == [b"new"]


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_a_producer_over_its_quota_slows_down_and_loses_nothing(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-16: throttling is no error, and no reason to repeat anything."""
    topic = fresh_topic()
    sent: list[bytes] = []
    limit(kafka, "over-quota", bytes_per_second=100_000.0)
    async with BytesProducer(kafka.bootstrap_servers, client_id="over-quota") as producer:
        # Kafka looks at the rate of some seconds, so the first megabyte passes.
        while not producer.metrics()["produce_throttle_time_max"]:
            assert len(sent) < 1000
            sent.append((b"%06d" % len(sent)).ljust(10_000))
            await producer.send(topic, sent[-1])
        behind = numbered(500)
        assert (await producer.send_many(topic, behind)).acknowledged == 500
        metrics = producer.metrics()
    limit(kafka, "over-quota", bytes_per_second=None)
    assert len(sent) > 1
    assert (metrics["record_retry_total"], metrics["record_error_total"]) == (0, 0)
    assert values(await read_log(kafka, topic)) == [*sent, *behind]


def limit(kafka: KafkaCluster, client_id: str, *, bytes_per_second: float | None) -> None:
    answer = kafka.admin._ask(
        AlterClientQuotasRequest(
            entries=(
                EntryData(
                    entity=(EntityData(entity_type="client-id", entity_name=client_id),),
                    ops=(
                        OpData(
                            key="producer_byte_rate",
                            value=f64(bytes_per_second or 0.0),
                            remove=bytes_per_second is None,
                        ),
                    ),
                ),
            ),
            validate_only=False,
        ),
        AlterClientQuotasResponse,
        None,
    )
    assert [int(entry.error_code) for entry in answer.entries] == [ErrorCode.NONE]


@pytest.mark.slow
async def test_without_enough_replicas_records_wait_and_then_fail(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-09: NOT_ENOUGH_REPLICAS is retried until the delivery timeout, or until they are back."""
    topic = fresh_topic(1, cluster=kafka3, configs={"min.insync.replicas": "3"})
    servers = kafka3.bootstrap_servers
    async with (
        BytesProducer(servers, delivery_timeout_ms=1500, request_timeout_ms=1000) as hasty,
        BytesProducer(servers) as patient,
    ):
        await hasty.send(topic, b"before")
        await patient.send(topic, b"before")
        leader = kafka3.topic(topic)[0].leader
        follower = next(node for node in kafka3.running if node != leader)
        await asyncio.to_thread(kafka3.stop_node, follower)

        # The broker's last refusal may come after the timeout.
        with pytest.raises((DeliveryTimeout, BrokerRejected)) as caught:
            await hasty.send(topic, b"hasty")
        assert caught.value.code in (None, ErrorCode.NOT_ENOUGH_REPLICAS)
        # Or an attempt is under way when the time is over.
        assert caught.value.persisted in ("no", "maybe")
        assert caught.value.attempts > 1
        waiting = await patient.enqueue(topic, b"patient")
        assert hasty.metrics()["record_retry_total"] > 0

        await asyncio.to_thread(kafka3.heal)
        assert (await waiting).offset == 2
        assert (await hasty.send(topic, b"after")).offset == 3
    assert values(await read_log(kafka3, topic)) == [b"before", b"before", b"patient", b"after"]


@pytest.mark.slow
async def test_the_last_of_three_brokers_cannot_acknowledge(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-09: it appends, and waits for replicas that nobody can take out of the in-sync set."""
    topic = fresh_topic(1, cluster=kafka3)
    async with BytesProducer(
        kafka3.bootstrap_servers, delivery_timeout_ms=4000, request_timeout_ms=1000
    ) as producer:
        await producer.send(topic, b"before")
        leader = kafka3.topic(topic)[0].leader
        for node in kafka3.running:
            if node != leader:
                await asyncio.to_thread(kafka3.kill, node)
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send(topic, b"during")
        assert caught.value.persisted == "maybe"

        await asyncio.to_thread(kafka3.heal)
        await producer.send(topic, b"after")
    found = values(await read_log(kafka3, topic))
    assert found in (
        [b"before", b"after"],
        [b"before", b"during", b"after"],
    )


# -- who may do what, and what brokers forget

#: After so long a broker wants to hear the password again (KIP-368).
SESSION_MS = 1500


class GuardedKafka:
    """A broker with a second listener: users log in there, and may do what they were granted.

    Who comes without a name, as our own tools do, may do everything.
    """

    def __init__(self) -> None:
        plain, controller, sasl = self._ports = free_ports(3)
        mechanism = "listener.name.sasl.scram-sha-256"
        self.servers = f"127.0.0.1:{sasl}"
        self.kafka = KafkaCluster(
            # The second listener needs a port that is known here, so no container.
            source=KafkaSource.JVM,
            own=True,
            properties={
                "listeners": f"PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},"
                f"SASL://127.0.0.1:{sasl}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL://127.0.0.1:{sasl}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
                "SASL:SASL_PLAINTEXT",
                "inter.broker.listener.name": "PLAINTEXT",
                "sasl.enabled.mechanisms": "SCRAM-SHA-256",
                f"{mechanism}.sasl.jaas.config": "org.apache.kafka.common.security.scram."
                "ScramLoginModule required;",
                f"{mechanism}.connections.max.reauth.ms": f"{SESSION_MS}",
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "producer.id.expiration.ms": "1000",
                "producer.id.expiration.check.interval.ms": "100",
                "transactional.id.expiration.ms": "4000",
                "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
            },
        )
        self._names = (f"user-{number}" for number in itertools.count(1))

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kafka_nodes, "free_ports", lambda count: self._ports[:count])
            self.kafka.start()

    def a_stranger(self) -> str:
        """A user's name that no broker has heard of."""
        return next(self._names)

    async def a_user(self) -> str:
        """A user who can log in, and may do nothing."""
        user = self.a_stranger()
        await self.set_password(user)
        return user

    async def set_password(self, user: str) -> None:
        credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion(user, credentials, b"secret")
        await administrate(self.kafka, lambda a: a.alter_user_scram_credentials([change]))

    async def forget_password(self, user: str) -> None:
        change = UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256)
        await administrate(self.kafka, lambda a: a.alter_user_scram_credentials([change]))

    async def grant(
        self,
        user: str,
        operation: AclOperation,
        name: str | None,
        kind: ResourceType = ResourceType.TOPIC,
    ) -> None:
        """For a topic, or what else has a name, or for the cluster. Returns when it is in force."""
        what: tuple[Any, ...] = (
            ResourceType.BROKER if name is None else kind,
            "kafka-cluster" if name is None else name,
            ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        await administrate(self.kafka, lambda a: a.create_acls([AclBinding(*what)]))
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        await asyncio.to_thread(
            self.kafka.wait_until,
            lambda: bool(admin.describe_acls(AclBindingFilter(*what)).result(20)),
        )

    def producer(self, user: str, **options: Any) -> BytesProducer:
        return BytesProducer(
            self.servers,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="SCRAM-SHA-256",
            sasl_username=user,
            sasl_password="secret",
            **options,
        )

    def active_producers(self, topic: str) -> list[int]:
        """The producer ids that the leader of partition 0 remembers."""
        answer = self.kafka.admin._ask(
            DescribeProducersRequest(
                topics=(TopicRequest(name=TopicName(topic), partition_indexes=(i32(0),)),)
            ),
            DescribeProducersResponse,
            None,
        )
        (partition,) = answer.topics[0].partitions
        assert int(partition.error_code) == ErrorCode.NONE
        return [state.producer_id for state in partition.active_producers]

    def knows(self, transactional_id: str) -> bool:
        answer = self.kafka.admin._ask(
            DescribeTransactionsRequest(transactional_ids=(TransactionalId(transactional_id),)),
            DescribeTransactionsResponse,
            None,
        )
        (state,) = answer.transaction_states
        return int(state.error_code) != ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedKafka]:
    guarded = GuardedKafka()
    try:
        guarded.start()
    except KafkaUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield guarded
    finally:
        guarded.kafka.stop()


def ways_to_ask(producer: BytesProducer, topic: str) -> list[Coroutine[Any, Any, Any]]:
    """All that need a topic's metadata."""
    return [
        producer.send(topic, b"value"),
        producer.partitions_for(topic),
        producer.warm_up(topic),
    ]


async def test_a_topic_that_may_not_be_described(
    guarded: GuardedKafka, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-17: the topic is named at once; the same producer writes to it when it is granted."""
    topic = fresh_topic(1, cluster=guarded.kafka)
    user = await guarded.a_user()
    async with guarded.producer(user) as producer:
        async with asyncio.timeout(10):
            for ask in ways_to_ask(producer, topic):
                with pytest.raises(
                    AuthorizationError, match=f"not authorized for topic '{topic}'"
                ) as e:
                    await ask
                assert e.value.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        await guarded.grant(user, AclOperation.WRITE, topic)  # implies describing it
        for ask in ways_to_ask(producer, topic):
            await ask
    assert values(await read_log(guarded.kafka, topic)) == [b"value"]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_topic_that_may_not_be_written(
    guarded: GuardedKafka,
    fresh_topic: FreshTopic,
    read_log: Reader,
    idempotent: bool,
) -> None:
    """IT-17: the delivery and the callbacks are told; other topics go on, and so does this one
    when it is granted."""
    told: list[tuple[str, Any]] = []

    class Notes(Interceptor):
        def on_acknowledgement(self, metadata: Any, exception: Any, headers: Any) -> None:
            told.append((metadata.topic, getattr(exception, "code", None)))

    denied, allowed = fresh_topic(1, cluster=guarded.kafka), fresh_topic(1, cluster=guarded.kafka)
    user = await guarded.a_user()
    await guarded.grant(user, AclOperation.DESCRIBE, denied)
    # To write to any topic is enough for a producer id (KIP-679).
    await guarded.grant(user, AclOperation.WRITE, allowed)
    async with guarded.producer(
        user, enable_idempotence=idempotent, interceptors=[Notes()]
    ) as producer:
        await producer.warm_up(denied, allowed)
        for number in range(3):
            forbidden = producer.send_nowait(denied, b"forbidden")
            called: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
            forbidden.add_done_callback(called.set_result)
            with pytest.raises(BrokerRejected) as caught:
                await forbidden
            assert caught.value.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert (caught.value.topic, caught.value.persisted) == (denied, "no")
            in_callback = (await called).exception()
            assert isinstance(in_callback, BrokerRejected)
            assert in_callback.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert (await producer.send(allowed, b"%d" % number)).offset == number
        await guarded.grant(user, AclOperation.WRITE, denied)
        assert (await producer.send(denied, b"granted")).offset == 0
    assert told[:2] == [(denied, ErrorCode.TOPIC_AUTHORIZATION_FAILED), (allowed, None)]
    assert told == told[:2] * 3 + [(denied, None)]
    assert values(await read_log(guarded.kafka, denied)) == [b"granted"]
    assert values(await read_log(guarded.kafka, allowed)) == [b"0", b"1", b"2"]


async def test_idempotent_writes_that_are_not_granted(
    guarded: GuardedKafka, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-17: without the right to a producer id nothing is sent; once it is granted, the same
    producer goes on."""
    topic = fresh_topic(1, cluster=guarded.kafka)
    user = await guarded.a_user()
    await guarded.grant(user, AclOperation.DESCRIBE, topic)
    async with guarded.producer(user) as producer:
        for _ in range(2):
            with pytest.raises(AbortedError, match="grant IDEMPOTENT_WRITE") as caught:
                await producer.send(topic, b"without an id")
            assert caught.value.persisted == "no"
            assert isinstance(caught.value.__cause__, AuthorizationError)
            assert caught.value.__cause__.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        await guarded.grant(user, AclOperation.IDEMPOTENT_WRITE, None)
        await producer.warm_up(topic)  # there is an id now
        with pytest.raises(BrokerRejected) as refused:
            await producer.send(topic, b"without the topic")
        assert refused.value.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        await guarded.grant(user, AclOperation.WRITE, topic)
        assert [(await producer.send(topic, b"%d" % n)).offset for n in range(3)] == [0, 1, 2]
    assert values(await read_log(guarded.kafka, topic)) == [b"0", b"1", b"2"]


async def verify(
    guarded: GuardedKafka, user: str, password: str, topic: str
) -> tuple[int | None, str]:
    """`asyncproducer verify` as this user: its exit status, and all that it prints."""
    options = (
        *("security.protocol=SASL_PLAINTEXT", "sasl.mechanism=SCRAM-SHA-256"),
        *(f"sasl.username={user}", f"sasl.password={password}"),
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncproducer", "verify", "--records", "500"),
        *("--bootstrap-servers", guarded.servers, "--topic", topic),
        *(part for option in options for part in ("--option", option)),
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, "COLUMNS": "300"},
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_verify_says_which_right_is_missing(
    guarded: GuardedKafka, fresh_topic: FreshTopic
) -> None:
    topic = fresh_topic(1, cluster=guarded.kafka)
    user = await guarded.a_user()

    async def verified(password: str = "secret", topic: str = topic) -> tuple[int | None, str]:
        return await verify(guarded, user, password, topic)

    status, out = await verified(password="wrong")
    assert (status, "AuthenticationError" in out) == (1, True)
    assert "wrong" not in out
    status, out = await verified(topic="not-there")
    assert (status, "cannot be created: TOPIC_AUTHORIZATION_FAILED" in out) == (1, True)
    await guarded.grant(user, AclOperation.WRITE, topic)
    status, out = await verified()
    assert (status, "may not be read back: have READ granted" in out) == (1, True)
    await guarded.grant(user, AclOperation.READ, topic)
    status, out = await verified()
    assert (status, "✓ read back: 500 records" in out) == (0, True), out


async def test_credentials_that_do_not_exist_yet(
    guarded: GuardedKafka, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-18: start() says so at once, and succeeds as soon as they do. When they are gone
    again, every way to ask for a topic says so; until they are there."""
    known, new = fresh_topic(1, cluster=guarded.kafka), fresh_topic(1, cluster=guarded.kafka)
    user = guarded.a_stranger()
    for topic in (known, new):
        await guarded.grant(user, AclOperation.WRITE, topic)
    producer = guarded.producer(user)
    async with asyncio.timeout(5):
        with pytest.raises(AuthenticationError, match="SCRAM-SHA-256: Authentication fail") as told:
            await producer.start()
    assert told.value.code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert producer.health.state == "created"

    await guarded.set_password(user)
    async with asyncio.timeout(10):
        while producer.health.state == "created":
            try:
                await producer.start()
            except AuthenticationError:
                pass  # it takes the broker a moment to hear of them
    async with producer:
        assert (await producer.send(known, b"0")).offset == 0
        await guarded.forget_password(user)
        # The broker asks for it when the session is over.
        await asyncio.to_thread(guarded.kafka.wait_until, lambda: not producer.health.ready)
        assert "Authentication failed" in str(producer.health.problem)
        async with asyncio.timeout(5):
            for ask in ways_to_ask(producer, new):
                with pytest.raises(AuthenticationError):
                    await ask
        await guarded.set_password(user)
        await asyncio.to_thread(guarded.kafka.wait_until, lambda: producer.health.ready)
        for ask in ways_to_ask(producer, new):
            await ask
        assert (await producer.send(known, b"1")).offset == 1
    assert values(await read_log(guarded.kafka, known)) == [b"0", b"1"]
    assert values(await read_log(guarded.kafka, new)) == [b"value"]


async def test_a_broker_that_has_forgotten_the_producer(
    guarded: GuardedKafka, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """IT-12: a producer id expires when nothing is sent with it for long (a day by default).
    An idempotent producer sends on with its next sequence, and nobody notices."""
    topic = fresh_topic(1, cluster=guarded.kafka)
    async with BytesProducer(guarded.kafka.bootstrap_servers) as producer:
        for round_ in range(3):
            for number in range(3):
                metadata = await producer.send(topic, b"%d" % (3 * round_ + number))
                assert metadata.offset == 3 * round_ + number
            assert len(guarded.active_producers(topic)) == 1
            await asyncio.to_thread(
                guarded.kafka.wait_until, lambda: guarded.active_producers(topic) == []
            )
        metrics = producer.metrics()
    assert (metrics["record_retry_total"], metrics["record_error_total"]) == (0, 0)
    assert values(await read_log(guarded.kafka, topic)) == [b"%d" % n for n in range(9)]
    # All with one producer id, in the order of their sequences.
    headers = [
        read_header(data) for data in await stored_batches(guarded.kafka, topic, partitions=1)
    ]
    assert len({(header.producer_id, header.producer_epoch) for header in headers}) == 1
    assert [header.base_sequence for header in headers] == list(range(9))


async def test_a_transactional_producer_that_was_forgotten(
    guarded: GuardedKafka, fresh_topic: FreshTopic
) -> None:
    """IT-12: by the leader, which nobody notices; then by the coordinator, too (after a week by
    default), which only a new producer can mend."""
    topic = fresh_topic(1, cluster=guarded.kafka)
    servers = guarded.kafka.bootstrap_servers
    async with BytesProducer(servers, transactional_id=topic) as producer:
        for number in range(2):
            async with producer.transaction() as tx:
                await tx.send(topic, b"%d" % number)
            await asyncio.to_thread(
                guarded.kafka.wait_until, lambda: guarded.active_producers(topic) == []
            )
            assert guarded.knows(topic)
        await asyncio.to_thread(guarded.kafka.wait_until, lambda: not guarded.knows(topic))
        with pytest.raises(KafkaError) as caught:
            async with producer.transaction() as tx:
                await tx.send(topic, b"late")
        assert caught.value.code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        with pytest.raises(KafkaError, match="INVALID_PRODUCER_ID_MAPPING"):
            await producer.begin_transaction()
    async with (
        BytesProducer(servers, transactional_id=topic) as producer,
        producer.transaction() as tx,
    ):
        await tx.send(topic, b"2")
    assert await asyncio.to_thread(count_committed, guarded.kafka, topic) == 3


async def test_a_transactional_id_that_may_not_be_used(
    guarded: GuardedKafka, fresh_topic: FreshTopic
) -> None:
    """IT-17: start() names it, and succeeds when it is granted, with the same producer."""
    topic = fresh_topic(1, cluster=guarded.kafka)
    user = await guarded.a_user()
    kind = ResourceType.TRANSACTIONAL_ID
    await guarded.grant(user, AclOperation.WRITE, topic)
    producer = guarded.producer(user, transactional_id=topic)
    for operation in (AclOperation.DESCRIBE, AclOperation.WRITE):
        with pytest.raises(AuthorizationError, match="grant Write and Describe on it") as caught:
            await producer.start()
        assert caught.value.code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert topic in str(caught.value)
        await guarded.grant(user, operation, topic, kind)
    async with producer, producer.transaction() as tx:
        await tx.send(topic, b"granted")
    assert await asyncio.to_thread(count_committed, guarded.kafka, topic) == 1


async def test_what_a_transaction_may_not_write_aborts_it(
    guarded: GuardedKafka, fresh_topic: FreshTopic
) -> None:
    """IT-17: a topic, or the offsets of a group; the next one goes well when they are granted."""
    topic, other = (fresh_topic(1, cluster=guarded.kafka) for _ in range(2))
    user = await guarded.a_user()
    for operation in (AclOperation.DESCRIBE, AclOperation.WRITE):
        await guarded.grant(user, operation, topic, ResourceType.TRANSACTIONAL_ID)
    await guarded.grant(user, AclOperation.WRITE, topic)
    await guarded.grant(user, AclOperation.READ, topic)
    await guarded.grant(user, AclOperation.DESCRIBE, other)
    offsets = {TopicPartition(topic, 0): 1}
    async with guarded.producer(user, transactional_id=topic) as producer:
        await producer.begin_transaction()
        await producer.send(topic, b"aborted")
        denied = await producer.enqueue(other, b"denied")
        with pytest.raises(TransactionAborted, match="TOPIC_AUTHORIZATION_FAILED"):
            await producer.commit_transaction()
        assert isinstance(denied.exception(), BrokerRejected)
        await producer.abort_transaction()
        await guarded.grant(user, AclOperation.WRITE, other)
        await producer.begin_transaction()
        await producer.send(topic, b"aborted")
        with pytest.raises(TransactionAborted, match="grant Read on it"):
            await producer.send_offsets(offsets, topic)
        await producer.abort_transaction()
        await guarded.grant(user, AclOperation.READ, topic, ResourceType.GROUP)
        async with producer.transaction() as tx:
            await tx.send(other, b"granted")
            await tx.send_offsets(offsets, topic)
    assert await asyncio.to_thread(count_committed, guarded.kafka, other) == 1


# -- metrics


async def test_metrics_agree_with_what_was_sent(
    kafka: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    topic, other = fresh_topic(2), fresh_topic(1, configs={"max.message.bytes": "1000"})
    async with BytesProducer(
        kafka.bootstrap_servers, compression_type="gzip", linger_ms=20
    ) as producer:
        result = await producer.send_many(topic, numbered(3000, size=100))
        assert result.acknowledged == 3000
        with pytest.raises(BrokerRejected):
            await producer.send(other, random.Random(3).randbytes(2000))
        metrics = producer.metrics()
        health = producer.health
    assert metrics["record_send_total"] == 3001
    assert metrics[f"record_send_total:topic={topic}"] == 3000
    assert metrics[f"record_send_total:topic={other}"] == 1
    assert metrics["record_error_total"] == metrics[f"record_error_total:topic={other}"] == 1
    assert metrics["record_retry_total"] == 0
    # The bytes in the log are the bytes that were counted.
    stored = [len(data) for data in await stored_batches(kafka, topic, partitions=2)]
    assert metrics[f"byte_total:topic={topic}"] == sum(stored)
    assert metrics["batch_count"] == len(stored) + 1
    assert metrics[f"compression_rate:topic={topic}"] < 0.5
    (node,) = kafka.addresses
    assert 1 <= metrics[f"request_total:node=node-{node}"] <= len(stored) + 1
    assert metrics[f"response_total:node=node-{node}"] == metrics[f"request_total:node=node-{node}"]
    assert metrics["requests_in_flight"] == 0
    assert metrics["buffer_available_bytes"] == metrics["buffer_total_bytes"]
    assert 0 < metrics["request_latency_avg"] <= metrics["request_latency_max"]
    assert health.ready
    assert (health.incomplete_batches, health.buffered_bytes) == (0, 0)


async def stored_batches(kafka: KafkaCluster, topic: str, *, partitions: int) -> list[bytes]:
    async with await RawClient.connect(kafka.bootstrap_servers.split(",")[0]) as client:
        response = await client.request(
            "fetch",
            12,
            max_wait=0,
            min_bytes=0,
            max_bytes=10**8,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[
                {
                    "topic": topic,
                    "partitions": [
                        {"partition": p, "fetch_offset": 0, "partition_max_bytes": 10**8}
                        for p in range(partitions)
                    ],
                }
            ],
            forgotten_topics_data=[],
            rack_id="",
        )
    return [
        batch
        for partition in response.responses[0].partitions
        for batch in split_batches(partition.records)
    ]
