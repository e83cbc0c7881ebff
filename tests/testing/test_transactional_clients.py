"""Other people's transactional clients against the embedded broker, over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import ProducerFenced

from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.transactions import TransactionState

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.timeout(60)

PARTITIONS = 3
TRANSACTIONS = 6


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(2, topics={"t": PARTITIONS}) as cluster:
        yield cluster


def rows(number: int) -> list[bytes]:
    """The values of one transaction."""
    return [b"%d-%d" % (number, i) for i in range(10)]


def is_committed(number: int) -> bool:
    return number % 3 != 1


COMMITTED = sorted(v for n in range(TRANSACTIONS) if is_committed(n) for v in rows(n))
ALL = sorted(v for n in range(TRANSACTIONS) for v in rows(n))


# -- producers


async def write_with_aiokafka(cluster: EmbeddedCluster) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=cluster.bootstrap_servers, transactional_id="tx", linger_ms=0
    )
    await producer.start()
    try:
        for number in range(TRANSACTIONS):
            await producer.begin_transaction()
            sent = [
                await producer.send("t", value, partition=i % PARTITIONS)
                for i, value in enumerate(rows(number))
            ]
            for future in sent:
                await future
            offset = {TopicPartition("t", 0): 100 + number}
            await producer.send_offsets_to_transaction(offset, "g")
            if is_committed(number):
                await producer.commit_transaction()
            else:
                await producer.abort_transaction()
    finally:
        await producer.stop()


def librdkafka(servers: str, **options: Any) -> Any:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "transactional.id": "tx",
            "linger.ms": 0,
            "retry.backoff.ms": 1,
        }
        | options
    )
    producer.init_transactions(20)
    return producer


def write_with_librdkafka(servers: str) -> None:
    producer = librdkafka(servers)
    group = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "g"})
    for number in range(TRANSACTIONS):
        producer.begin_transaction()
        for i, value in enumerate(rows(number)):
            producer.produce("t", value, partition=i % PARTITIONS)
        assert producer.flush(20) == 0
        offset = confluent_kafka.TopicPartition("t", 0, 100 + number)
        producer.send_offsets_to_transaction([offset], group.consumer_group_metadata(), 20)
        if is_committed(number):
            producer.commit_transaction(20)
        else:
            producer.abort_transaction(20)
    group.close()
    librdkafka(servers)  # whoever starts next waits for the last markers


# -- consumers


async def read_with_aiokafka(cluster: EmbeddedCluster, isolation: str) -> list[bytes]:
    """All there is up to the end that this isolation level has."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=cluster.bootstrap_servers, isolation_level=isolation
    )
    await consumer.start()
    try:
        partitions = [TopicPartition("t", i) for i in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        values: list[bytes] = []
        while any([await consumer.position(p) < ends[p] for p in partitions]):
            for messages in (await consumer.getmany(timeout_ms=100)).values():
                values += [message.value for message in messages]
        return sorted(values)
    finally:
        await consumer.stop()


def read_with_librdkafka(servers: str, isolation: str) -> list[bytes]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    try:
        beginning = confluent_kafka.OFFSET_BEGINNING
        consumer.assign(
            [confluent_kafka.TopicPartition("t", i, beginning) for i in range(PARTITIONS)]
        )
        values = []
        ended = 0
        while ended < PARTITIONS:
            message = consumer.poll(20)
            assert message is not None
            if message.error() is None:
                values.append(message.value())
            else:
                assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                ended += 1
        return sorted(values)
    finally:
        consumer.close()


async def check(cluster: EmbeddedCluster) -> None:
    """What everybody sees of the transactions."""
    for isolation, wanted in (("read_committed", COMMITTED), ("read_uncommitted", ALL)):
        assert await read_with_aiokafka(cluster, isolation) == wanted
        read = asyncio.to_thread(read_with_librdkafka, cluster.bootstrap_servers, isolation)
        assert await read == wanted
    assert sorted(r.value or b"" for r in cluster.records("t")) == ALL
    assert sorted(r.value or b"" for r in cluster.records("t", committed=True)) == COMMITTED
    for partition in range(PARTITIONS):
        marked = [marker.is_commit for marker in cluster.markers("t", partition)]
        assert marked == [is_committed(number) for number in range(TRANSACTIONS)]
    offset = cluster.committed_offsets("g")["t", 0].offset
    assert offset == 100 + max(n for n in range(TRANSACTIONS) if is_committed(n))


# -- the tests


async def test_what_aiokafka_writes_is_read_by_all(cluster: EmbeddedCluster) -> None:
    await write_with_aiokafka(cluster)
    await check(cluster)
    assert cluster.transaction("tx").state is TransactionState.COMPLETE_COMMIT


@pytest.mark.parametrize("marker_delay_ms", [0, 5])
async def test_what_librdkafka_writes_is_read_by_all(
    cluster: EmbeddedCluster, marker_delay_ms: int
) -> None:
    cluster.set_marker_delay(marker_delay_ms)
    await asyncio.to_thread(write_with_librdkafka, cluster.bootstrap_servers)
    await check(cluster)


async def test_a_consumer_waits_at_an_open_transaction(cluster: EmbeddedCluster) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap_servers, transactional_id="tx")
    await producer.start()
    try:
        await producer.begin_transaction()
        await producer.send_and_wait("t", b"a", partition=0)
        assert await read_with_aiokafka(cluster, "read_committed") == []
        assert await read_with_aiokafka(cluster, "read_uncommitted") == [b"a"]
        await producer.commit_transaction()
        assert await read_with_aiokafka(cluster, "read_committed") == [b"a"]
    finally:
        await producer.stop()


async def test_a_second_aiokafka_fences_the_first(cluster: EmbeddedCluster) -> None:
    first, second = (
        AIOKafkaProducer(bootstrap_servers=cluster.bootstrap_servers, transactional_id="tx")
        for _ in range(2)
    )
    await first.start()
    await first.begin_transaction()
    await first.send_and_wait("t", b"a", partition=0)
    await second.start()
    try:
        async with second.transaction():
            await second.send_and_wait("t", b"b", partition=0)
        with pytest.raises(ProducerFenced):
            await first.commit_transaction()
    finally:
        await second.stop()
        await first.stop()
    assert [r.value for r in cluster.records("t", committed=True)] == [b"b"]


async def test_a_second_librdkafka_fences_the_first(cluster: EmbeddedCluster) -> None:
    def work() -> bool:
        first = librdkafka(cluster.bootstrap_servers)
        first.begin_transaction()
        first.produce("t", b"a", partition=0)
        assert first.flush(20) == 0
        second = librdkafka(cluster.bootstrap_servers)
        second.begin_transaction()
        second.produce("t", b"b", partition=0)
        second.commit_transaction(20)
        # Not pytest.raises: a traceback that is kept leaves the producers to the garbage
        # collector, in which librdkafka lets go of the GIL.
        try:
            first.commit_transaction(20)
        except confluent_kafka.KafkaException as exc:
            return bool(exc.args[0].fatal())
        return False

    assert await asyncio.to_thread(work)
    assert [r.value for r in cluster.records("t", committed=True)] == [b"b"]


async def test_librdkafka_finds_a_coordinator_that_has_moved(cluster: EmbeddedCluster) -> None:
    producer = await asyncio.to_thread(librdkafka, cluster.bootstrap_servers)
    node = cluster.coordinator("tx")
    for number in range(3):
        await asyncio.to_thread(producer.begin_transaction)
        producer.produce("t", b"%d" % number, partition=0)
        node = 3 - node
        cluster.move_coordinator("tx", node, load_ms=20)
        await asyncio.to_thread(producer.commit_transaction, 20)
    assert [r.value for r in cluster.records("t", 0, committed=True)] == [b"0", b"1", b"2"]
    assert {r.node_id for r in cluster.received("end_txn")} == {1, 2}


async def test_librdkafka_goes_on_where_a_transaction_has_left_its_group(
    cluster: EmbeddedCluster,
) -> None:
    await write_with_aiokafka(cluster)

    def committed() -> int:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g"}
        )
        try:
            (found,) = consumer.committed([confluent_kafka.TopicPartition("t", 0)], timeout=20)
            return int(found.offset)
        finally:
            consumer.close()

    assert await asyncio.to_thread(committed) == cluster.committed_offsets("g")["t", 0].offset
