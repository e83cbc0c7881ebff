"""Other people's clients against the embedded broker, over TCP: they know no faults of ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from asyncproducer.core.compression import codec
from asyncproducer.testing.batches import StoredRecord, encode_batch
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.kafka_admin import Admin
from asyncproducer.testing.raw_client import RawClient

confluent_kafka = pytest.importorskip("confluent_kafka")
confluent_admin = pytest.importorskip("confluent_kafka.admin")

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
PARTITIONS = 3
#: Values of very different lengths, in batches of every codec, with headers and nulls.
ROWS: list[tuple[bytes | None, bytes | None]] = [
    (b"key", b"x" * 10_000),
    (None, b"value"),
    (b"key", None),
    (b"", b""),
]
HEADERS: list[tuple[str, bytes | None]] = [("h", b"1"), ("h", b""), ("ü", None)]
BATCHES = 40

Seen = tuple[int, int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(2, topics={"t": PARTITIONS}) as cluster:
        yield cluster


async def fill(cluster: EmbeddedCluster, *, codecs: list[str] | None = None) -> list[Seen]:
    """Some batches in each partition; what a consumer has to see of them."""
    now = time.time_ns() // 1_000_000
    for partition in range(PARTITIONS):
        address = cluster.address(cluster.leader("t", partition))
        async with await RawClient.connect(address) as client:
            for number in range(BATCHES):
                name = (codecs or CODECS)[number % len(codecs or CODECS)]
                data = encode_batch(
                    ROWS,
                    timestamps=[now + number - i for i in range(len(ROWS))],
                    headers=HEADERS,
                    attributes=CODECS.index(name),
                    compress=None if name == "none" else codec(name).compress,
                )
                response = await client.request(
                    "produce",
                    9,
                    transactional_id=None,
                    acks=-1,
                    timeout=1000,
                    topic_data=[
                        {"name": "t", "partition_data": [{"index": partition, "records": data}]}
                    ],
                )
                assert response.responses[0].partition_responses[0].error_code == 0
    return sorted(
        seen(partition, record)
        for partition in range(PARTITIONS)
        for record in cluster.records("t", partition)
    )


def seen(partition: int, r: StoredRecord) -> Seen:
    return partition, r.offset, r.timestamp, r.key, r.value, list(r.headers)


async def test_aiokafka_reads_everything(cluster: EmbeddedCluster) -> None:
    expected = await fill(cluster)
    assert len(expected) == PARTITIONS * BATCHES * len(ROWS)
    # Small fetches, so that there are many.
    consumer = AIOKafkaConsumer(
        bootstrap_servers=cluster.bootstrap_servers, max_partition_fetch_bytes=30_000
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition("t", i) for i in range(PARTITIONS)])
        await consumer.seek_to_beginning()
        got: list[Seen] = []
        while len(got) < len(expected):
            for messages in (await consumer.getmany(timeout_ms=1000)).values():
                got += [
                    (m.partition, m.offset, m.timestamp, m.key, m.value, list(m.headers))
                    for m in messages
                ]
        assert sorted(got) == expected
    finally:
        await consumer.stop()


async def test_aiokafka_reads_from_an_offset_and_by_time(cluster: EmbeddedCluster) -> None:
    expected = await fill(cluster)
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap_servers)
    await consumer.start()
    try:
        partition = TopicPartition("t", 1)
        consumer.assign([partition])
        consumer.seek(partition, 101)
        message = await consumer.getone()
        assert (message.offset, message.value) == (101, b"value")
        assert await consumer.end_offsets([partition]) == {partition: BATCHES * len(ROWS)}
        timestamp = next(row for row in expected if row[:2] == (1, 40))[2]
        found = await consumer.offsets_for_times({partition: timestamp})
        assert (found[partition].offset, found[partition].timestamp) == (40, timestamp)
    finally:
        await consumer.stop()


async def test_aiokafka_waits_for_what_is_yet_to_come(cluster: EmbeddedCluster) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap_servers)
    await consumer.start()
    try:
        consumer.assign([TopicPartition("t", i) for i in range(PARTITIONS)])
        await consumer.seek_to_beginning()
        waiting = asyncio.create_task(consumer.getone())
        await asyncio.sleep(0)
        await fill(cluster)
        assert (await waiting).offset == 0
    finally:
        await consumer.stop()


@pytest.mark.parametrize("idempotent", [True, False])
async def test_aiokafka_writes(cluster: EmbeddedCluster, idempotent: bool) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=cluster.bootstrap_servers,
        enable_idempotence=idempotent,
        compression_type="gzip",
    )
    await producer.start()
    try:
        futures = [await producer.send("made-for-this", b"%d" % i) for i in range(100)]
        for future in futures:
            await future
    finally:
        await producer.stop()
    assert sorted(int(r.value or b"") for r in cluster.records("made-for-this")) == list(range(100))


def consume(servers: str, count: int) -> list[Seen]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "unused",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 30_000,
        }
    )
    try:
        beginning = confluent_kafka.OFFSET_BEGINNING
        consumer.assign(
            [confluent_kafka.TopicPartition("t", i, beginning) for i in range(PARTITIONS)]
        )
        got: list[Seen] = []
        # Returns as soon as there are that many. The timeout is for when there are fewer.
        for message in consumer.consume(count, timeout=30):
            assert message.error() is None
            _, timestamp = message.timestamp()
            got.append(
                (
                    message.partition(),
                    message.offset(),
                    timestamp,
                    message.key(),
                    message.value(),
                    message.headers(),
                )
            )
        return got
    finally:
        consumer.close()


async def test_librdkafka_reads_everything(cluster: EmbeddedCluster) -> None:
    expected = await fill(cluster)
    got = await asyncio.to_thread(consume, cluster.bootstrap_servers, len(expected))
    assert sorted(got) == expected


async def test_librdkafka_writes(cluster: EmbeddedCluster) -> None:
    def write(**options: Any) -> list[Any]:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 0, **options}
        )
        errors: list[Any] = []
        report: Callable[..., None] = lambda error, _: errors.append(error)  # noqa: E731
        for i in range(100):
            producer.produce("t", b"%d" % i, key=b"%d" % i, on_delivery=report)
        assert producer.flush(20) == 0
        return errors

    for options in ({"enable.idempotence": True}, {"compression.type": "lz4"}):
        assert await asyncio.to_thread(write, **options) == [None] * 100
    assert sorted(int(r.value or b"") for r in cluster.records("t")) == sorted(
        [*range(100), *range(100)]
    )


async def test_librdkafkas_admin_client_creates_grows_and_deletes_topics(
    cluster: EmbeddedCluster,
) -> None:
    admin = confluent_admin.AdminClient({"bootstrap.servers": cluster.bootstrap_servers})

    def done(futures: dict[str, Any]) -> None:
        for future in futures.values():
            future.result(timeout=20)

    def work() -> None:
        new = confluent_admin.NewTopic
        done(
            admin.create_topics([new("u", num_partitions=2, config={"cleanup.policy": "compact"})])
        )
        assert len(admin.list_topics(timeout=20).topics["u"].partitions) == 2
        done(admin.create_partitions([confluent_admin.NewPartitions("u", 4)]))
        with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_ALREADY_EXISTS"):
            done(admin.create_topics([new("u", num_partitions=2)]))

    await asyncio.to_thread(work)
    assert cluster.leader("u", 3) == 2
    await asyncio.to_thread(lambda: done(admin.delete_topics(["u"])))
    assert [r.api for r in cluster.requests].count("delete_topics") == 1


async def test_our_own_admin_client_works_too(cluster: EmbeddedCluster) -> None:
    host, port = cluster.address(1).split(":")
    admin = Admin({1: (host, int(port))})
    await fill(cluster, codecs=["none"])

    def work() -> None:
        view = admin.view("t")
        assert sorted(view.brokers) == [1, 2]
        assert {number: p.leader for number, p in view.topics["t"].items()} == {0: 1, 1: 2, 2: 1}
        admin.create_topic("v", partitions=2, replication=2, configs={"max.message.bytes": "9"})

    await asyncio.to_thread(work)
    assert cluster.leader("v", 1) == 2
