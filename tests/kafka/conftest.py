"""Real brokers: one node for most tests, three for those that break one. And readers.

A cluster starts with the first test that asks for it and lasts for the whole run, so a test works
on topics of its own and leaves all nodes running.

What is in a log is told by aiokafka and by librdkafka, which know nothing of our code.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, cast

import aiokafka
import confluent_kafka
import pytest

from asyncproducer import Producer
from asyncproducer.testing.kafka import KafkaCluster, KafkaUnavailable
from asyncproducer.testing.raw_client import RawClient


class FreshTopic(Protocol):
    """Makes a topic with a name that no other test has, and returns the name."""

    def __call__(
        self,
        partitions: int = 1,
        *,
        cluster: KafkaCluster | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> str: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kafka)


def started(cluster: KafkaCluster) -> Iterator[KafkaCluster]:
    try:
        cluster.start()
    except KafkaUnavailable as error:
        pytest.fail(str(error), pytrace=False)  # what is missing here, and not where we noticed it
    try:
        yield cluster
    finally:
        cluster.stop()


#: How often brokers look for transactions that are open for too long: ten seconds by default.
IMPATIENT = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaCluster]:
    """One node; it may be somebody's running cluster (KAFKA_BOOTSTRAP_SERVERS)."""
    yield from started(KafkaCluster(properties=IMPATIENT))


@pytest.fixture(scope="session")
def _three_nodes() -> Iterator[KafkaCluster]:
    yield from started(KafkaCluster(3, own=True))


@pytest.fixture
def kafka3(_three_nodes: KafkaCluster) -> Iterator[KafkaCluster]:
    """Three nodes to break; those that a test left down are brought back after it."""
    yield _three_nodes
    _three_nodes.heal()


_numbers = itertools.count(1)


@pytest.fixture
def fresh_topic(request: pytest.FixtureRequest) -> FreshTopic:
    """On the cluster `kafka` unless another is given."""
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:80]

    def make(
        partitions: int = 1,
        *,
        cluster: KafkaCluster | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> str:
        target: KafkaCluster = cluster or request.getfixturevalue("kafka")
        name = f"{prefix}-{next(_numbers)}"
        target.create_topic(name, partitions=partitions, configs=configs)
        return name

    return make


#: Asks a broker which id a topic has now; None: there is no such topic.
TopicId: TypeAlias = Callable[[KafkaCluster, str], Awaitable[uuid.UUID | None]]


async def _topic_id(cluster: KafkaCluster, topic: str) -> uuid.UUID | None:
    async with await RawClient.connect(cluster.bootstrap_servers.split(",")[0]) as client:
        response = await client.request(
            "metadata",
            12,
            topics=[{"name": topic, "topic_id": None}],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
    found: uuid.UUID | None = response.topics[0].topic_id
    return found


@pytest.fixture
def topic_id() -> TopicId:
    """Another id under the same name: the topic was deleted, and made again."""
    return _topic_id


# -- readers


class ReadRecord(NamedTuple):
    """A record as a consumer sees it."""

    offset: int
    timestamp: int
    is_append_time: bool
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


#: The records of a topic by partition, in the order in which they came.
Log: TypeAlias = dict[int, list[ReadRecord]]

#: Reads a topic from its beginning to its present end.
Reader: TypeAlias = Callable[[KafkaCluster, str], Awaitable[Log]]

_READ_DEADLINE_S = 60.0
_FETCH_WAIT_MS = 20  # nothing more will come where the end is reached
_LOG_APPEND_TIME = 1  # as aiokafka tells a record's timestamp type


async def _with_aiokafka(cluster: KafkaCluster, topic: str) -> Log:
    ends = await asyncio.to_thread(cluster.end_offsets, topic)
    log: Log = {partition: [] for partition in ends}
    places = {aiokafka.TopicPartition(topic, p): end for p, end in ends.items() if end}
    async with (
        asyncio.timeout(_READ_DEADLINE_S),
        aiokafka.AIOKafkaConsumer(
            bootstrap_servers=cluster.bootstrap_servers,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=2**22,
            fetch_max_wait_ms=_FETCH_WAIT_MS,
        ) as consumer,
    ):
        consumer.assign(list(places))
        while places:
            for place, records in (await consumer.getmany(*places, timeout_ms=1000)).items():
                log[place.partition] += [
                    ReadRecord(
                        record.offset,
                        record.timestamp,
                        record.timestamp_type == _LOG_APPEND_TIME,
                        record.key,
                        record.value,
                        tuple(record.headers),
                    )
                    for record in records
                ]
                if log[place.partition][-1].offset >= places[place] - 1:
                    del places[place]
    return log


def _confluent(servers: str, topic: str, ends: Mapping[int, int]) -> Log:
    log: Log = {partition: [] for partition in ends}
    left = {partition for partition, end in ends.items() if end}
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "none",  # must be set; nothing is ever committed
            "enable.auto.commit": False,
            "check.crcs": True,
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
        }
    )
    try:
        consumer.assign(
            [
                confluent_kafka.TopicPartition(topic, p, confluent_kafka.OFFSET_BEGINNING)
                for p in left
            ]
        )
        while left:
            message = consumer.poll(_READ_DEADLINE_S)
            assert message is not None, f"partitions {left} could not be read to their end"
            if message.error() is not None:
                raise confluent_kafka.KafkaException(message.error())
            kind, timestamp = message.timestamp()
            partition, offset = message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
            log[partition].append(
                ReadRecord(
                    offset,
                    timestamp,
                    kind == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME,
                    message.key(),
                    message.value(),
                    tuple(headers),
                )
            )
            if offset >= ends[partition] - 1:
                left.discard(partition)
    finally:
        consumer.close()
    return log


async def _with_confluent(cluster: KafkaCluster, topic: str) -> Log:
    ends = await asyncio.to_thread(cluster.end_offsets, topic)
    return await asyncio.to_thread(_confluent, cluster.bootstrap_servers, topic, ends)


@pytest.fixture
def read_quickly() -> Reader:
    """One reader, in C, for many records."""
    return _with_confluent


@pytest.fixture
def read_log() -> Reader:
    """Both readers, which must have seen the same."""

    async def read(cluster: KafkaCluster, topic: str) -> Log:
        log = await _with_aiokafka(cluster, topic)
        assert log == await _with_confluent(cluster, topic)
        return log

    return read


# -- readers of what is committed


#: What plain records end a log of transactions with.
_END = b"END"

Values: TypeAlias = list[bytes | None]

#: Reads what a consumer sees of a topic's partition 0 with read_committed.
ReadCommitted: TypeAlias = Callable[[KafkaCluster, str], Awaitable[Values]]


async def _committed_with_aiokafka(servers: str, topic: str) -> Values:
    values: Values = []
    async with aiokafka.AIOKafkaConsumer(
        bootstrap_servers=servers,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=20,
    ) as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, 0)])
        while True:
            value = (await consumer.getone()).value
            if value == _END:
                return values
            values.append(value)


def _committed_with_confluent(servers: str, topic: str) -> Values:
    values: Values = []
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "none",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 20,
        }
    )
    try:
        beginning = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, beginning)])
        while True:
            message = consumer.poll(_READ_DEADLINE_S)
            assert message is not None
            assert message.error() is None
            if message.value() == _END:
                return values
            values.append(message.value())
    finally:
        consumer.close()


@pytest.fixture
def committed() -> ReadCommitted:
    """Both consumers, which must see the same. The log ends then with a plain record."""

    async def read(cluster: KafkaCluster, topic: str) -> Values:
        servers = cluster.bootstrap_servers
        async with Producer(servers) as producer:
            await producer.send(topic, _END, partition=0)
        async with asyncio.timeout(_READ_DEADLINE_S):
            seen = await _committed_with_aiokafka(servers, topic)
            assert seen == await asyncio.to_thread(_committed_with_confluent, servers, topic)
        return seen

    return read
