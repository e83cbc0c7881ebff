"""What a producer sees of several brokers, and of its own errors, is the same on both kinds.

Beside tests/testing/test_parity.py, which compares single brokers request by request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

from asyncproducer import DeliveryError, ErrorCode, KafkaError, Producer, RecordMetadata
from asyncproducer.testing.batches import encode_batch
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.raw_client import RawClient

if TYPE_CHECKING:
    from asyncproducer.testing.kafka_admin import PartitionView
    from asyncproducer.testing.messages import Message

numbers = itertools.count(time.time_ns())


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", request.node.name)[:80] + f"-{next(numbers)}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- three brokers, request by request ----------------------------------------------------------


class Brokers(Protocol):
    """Three nodes of either kind."""

    @property
    def addresses(self) -> Mapping[int, str]:
        """`host:port` by node id."""
        ...

    async def create(self, topic: str, **configs: str) -> None:
        """A topic with one partition and three replicas."""
        ...

    async def stop(self, node: int) -> None:
        """Returns when the node is gone, and nobody takes it for a leader or a replica in sync."""
        ...

    async def start(self, node: int) -> None:
        """Returns when the node is back, and in sync."""
        ...


class RealBrokers:
    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._topics: list[str] = []

    @property
    def addresses(self) -> Mapping[int, str]:
        return {n: f"{host}:{port}" for n, (host, port) in self._cluster.addresses.items()}

    async def create(self, topic: str, **configs: str) -> None:
        named = {name.replace("_", "."): value for name, value in configs.items()}
        await asyncio.to_thread(self._cluster.create_topic, topic, configs=named)
        self._topics.append(topic)

    async def stop(self, node: int) -> None:
        await asyncio.to_thread(self._cluster.stop_node, node)
        await self._settle(lambda p: p.leader > 0 and node not in {p.leader, *p.isr})

    async def start(self, node: int) -> None:
        await asyncio.to_thread(self._cluster.restart, node)
        await self._settle(lambda p: len(p.isr) == 3)

    async def _settle(self, condition: Callable[[PartitionView], bool]) -> None:
        """Waits until it holds for all our partitions, as each running node sees them."""

        def holds() -> bool:
            for node in self._cluster.running:
                topics = self._cluster.view(*self._topics, node=node).topics
                found = [p for partitions in topics.values() for p in partitions.values()]
                if len(found) < len(self._topics) or not all(map(condition, found)):
                    return False
            return True

        await asyncio.to_thread(self._cluster.wait_until, holds)


class EmbeddedBrokers:
    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster

    @property
    def addresses(self) -> Mapping[int, str]:
        return {node: self._cluster.address(node) for node in self._cluster.node_ids}

    async def create(self, topic: str, **configs: str) -> None:
        named = {name.replace("_", "."): value for name, value in configs.items()}
        self._cluster.create_topic(topic, partitions=1, configs=named)

    async def stop(self, node: int) -> None:
        await self._cluster.stop_broker(node)

    async def start(self, node: int) -> None:
        await self._cluster.start_broker(node)


@pytest.fixture(params=["embedded", "kafka"])
async def brokers(request: pytest.FixtureRequest) -> AsyncIterator[Brokers]:
    if request.param == "kafka":
        yield RealBrokers(request.getfixturevalue("kafka3"))
        return
    async with EmbeddedCluster(3) as cluster:
        yield EmbeddedBrokers(cluster)


async def metadata(brokers: Brokers, node: int, topic: str, *, version: int = 12) -> Message:
    async with await RawClient.connect(brokers.addresses[node]) as client:
        return await client.request(
            "metadata",
            version,
            topics=[{"name": topic, "topic_id": None}],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )


async def partition_of(brokers: Brokers, node: int, topic: str) -> Message:
    return (await metadata(brokers, node, topic)).topics[0].partitions[0]


async def produce(
    brokers: Brokers, node: int, topic: str, data: bytes, *, version: int = 12, acks: int = -1
) -> tuple[Message, Message]:
    """The whole answer, and that for the one partition."""
    topic_id = (await metadata(brokers, node, topic)).topics[0].topic_id
    async with await RawClient.connect(brokers.addresses[node]) as client:
        response = await client.request(
            "produce",
            version,
            transactional_id=None,
            acks=acks,
            timeout=5000,
            topic_data=[
                {
                    "name": topic,
                    "topic_id": topic_id,
                    "partition_data": [{"index": 0, "records": data}],
                }
            ],
        )
    return response, response.responses[0].partition_responses[0]


def batch(producer_id: int = -1, epoch: int = -1, sequence: int = -1) -> bytes:
    return encode_batch(
        [(b"k", b"v")],
        timestamps=[now_ms()],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


async def new_producer_id(brokers: Brokers) -> int:
    """That of a producer, which waits until a broker has got a block of ids."""
    async with Producer(brokers.addresses[1]) as producer:
        await producer.warm_up()
        assert producer._sequences is not None
        return producer._sequences.producer_id


@pytest.mark.parametrize("version", range(3, 14))
async def test_a_follower_says_who_leads(brokers: Brokers, topic: str, version: int) -> None:
    """KIP-951: from v10 on."""
    await brokers.create(topic)
    leader = (await partition_of(brokers, 1, topic)).leader_id
    follower = next(node for node in brokers.addresses if node != leader)
    response, answer = await produce(brokers, follower, topic, batch(), version=version)
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (answer.base_offset, answer.log_append_time) == (-1, None)
    if version >= 5:
        assert answer.log_start_offset == -1
    if version >= 8:
        assert answer.record_errors == ()
    if version >= 10:
        assert (answer.current_leader.leader_id, answer.current_leader.leader_epoch) == (leader, 0)
        assert [
            (node.node_id, f"{node.host}:{node.port}", node.rack)
            for node in response.node_endpoints
        ] == [(leader, brokers.addresses[leader], None)]
    # A leader has nothing of this to tell.
    response, answer = await produce(brokers, leader, topic, batch(), version=version)
    assert answer.error_code == ErrorCode.NONE
    if version >= 10:
        assert response.node_endpoints == ()
        assert (answer.current_leader.leader_id, answer.current_leader.leader_epoch) == (-1, -1)


@pytest.mark.slow
async def test_a_new_leader_knows_what_the_old_one_knew(brokers: Brokers, topic: str) -> None:
    await brokers.create(topic)
    producer_id = await new_producer_id(brokers)
    batches = [batch(producer_id, 0, sequence) for sequence in range(3)]
    old = (await partition_of(brokers, 1, topic)).leader_id
    for data in batches[:2]:
        assert (await produce(brokers, old, topic, data))[1].error_code == ErrorCode.NONE
    await brokers.stop(old)
    others = [node for node in brokers.addresses if node != old]
    view = await partition_of(brokers, others[0], topic)
    new = view.leader_id
    assert (view.error_code, view.leader_epoch) == (ErrorCode.NONE, 1)
    assert sorted(view.isr_nodes) == others
    assert (sorted(view.replica_nodes), view.offline_replicas) == ([1, 2, 3], (old,))
    response = await metadata(brokers, others[0], topic)
    assert sorted(node.node_id for node in response.brokers) == others

    for offset, data in enumerate(batches[:2]):
        answer = (await produce(brokers, new, topic, data))[1]
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, offset)
    gap = (await produce(brokers, new, topic, batch(producer_id, 0, 3)))[1]
    assert gap.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    answer = (await produce(brokers, new, topic, batches[2]))[1]
    assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 2)

    await brokers.start(old)
    response, answer = await produce(brokers, old, topic, batch())
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (answer.current_leader.leader_id, answer.current_leader.leader_epoch) == (new, 1)


@pytest.mark.slow
async def test_a_leader_counts_its_replicas(brokers: Brokers, topic: str) -> None:
    await brokers.create(topic, min_insync_replicas="3")
    leader = (await partition_of(brokers, 1, topic)).leader_id
    follower = next(node for node in brokers.addresses if node != leader)
    await brokers.stop(follower)
    try:
        answer = (await produce(brokers, leader, topic, batch()))[1]
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NOT_ENOUGH_REPLICAS, -1)
        assert (answer.log_start_offset, answer.record_errors) == (0, ())
        answer = (await produce(brokers, leader, topic, batch(), acks=1))[1]
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 0)
    finally:
        await brokers.start(follower)


# -- one broker, through our own producer -------------------------------------------------------


class Kind(NamedTuple):
    """A cluster of one node, of either kind."""

    bootstrap_servers: str
    create: Callable[..., Awaitable[None]]


#: What a scenario saw, as plain values that can be compared.
Seen = Any


def plainly(outcome: RecordMetadata | BaseException) -> Seen:
    """Without what differs from run to run: names, clocks, wording."""
    if isinstance(outcome, RecordMetadata):
        sizes = (outcome.serialized_key_size, outcome.serialized_value_size)
        return ("acknowledged", outcome.partition, outcome.offset, sizes)
    if isinstance(outcome, DeliveryError):
        return (
            type(outcome).__name__,
            outcome.code,
            outcome.retriable,
            outcome.persisted,
            outcome.attempts > 1,
            getattr(outcome, "record_index", None),
            type(outcome.__cause__).__name__,
            getattr(outcome.__cause__, "code", None),
        )
    return (type(outcome).__name__, getattr(outcome, "code", None))


async def send_together(producer: Producer[Any, Any], topic: str, *records: Any) -> list[Seen]:
    """In one batch, if they may share one."""
    deliveries = [await producer.enqueue(topic, **record) for record in records]
    await producer.flush()
    return [plainly(d.exception() or d.result()) for d in deliveries]


def patient(servers: str, **options: Any) -> Producer[Any, Any]:
    options = {"linger_ms": 60_000, "adaptive_linger": False, "max_block_ms": 5000} | options
    return Producer(servers, **options)


async def bad_timestamps(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, configs={"message.timestamp.before.max.ms": "1000"})
    now = now_ms()
    seen = []
    for idempotent in (True, False):
        async with patient(kind.bootstrap_servers, enable_idempotence=idempotent) as producer:
            for ages in ([0, 50_000, 0], [50_000], [50_000, 0, 60_000], [0, 0]):
                records = [{"value": b"v", "timestamp": now - age + 60_000} for age in ages]
                for record, age in zip(records, ages, strict=True):
                    record["timestamp"] = now_ms() - age
                seen += await send_together(producer, topic, *records)
    return seen


async def null_keys_on_a_compacted_topic(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, configs={"cleanup.policy": "compact"})
    async with patient(kind.bootstrap_servers) as producer:
        seen = await send_together(
            producer, topic, {"value": b"v", "key": b"k"}, {"value": b"v"}, {"key": b""}
        )
        seen += await send_together(producer, topic, {"value": None, "key": b"k"})
        seen += await send_together(producer, topic, {"value": b"v"})
    return seen


async def too_large(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, configs={"max.message.bytes": "1000"})
    randbytes = random.Random(5).randbytes
    seen = []
    for options in ({}, {"compression_type": "gzip"}, {"acks": 1}):
        async with patient(kind.bootstrap_servers, **options) as producer:
            sizes = [100] * 30 + [2000] + [300] * 10
            records = [{"value": randbytes(size)} for size in sizes]
            seen += await send_together(producer, topic, *records)
            seen.append(producer.metrics()["batch_split_total"])
    return seen


async def timestamps_of_the_log(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, configs={"message.timestamp.type": "LogAppendTime"})
    async with patient(kind.bootstrap_servers) as producer:
        before = now_ms()
        delivery = await producer.enqueue(topic, b"v", timestamp=1)
        await producer.flush()
        told = delivery.result().timestamp
        return before <= told <= now_ms(), plainly(delivery.result())


async def internal_topics(kind: Kind, topic: str) -> Seen:
    # The brokers make them now.
    async with patient(kind.bootstrap_servers, max_block_ms=30_000) as producer:
        seen = []
        for name in ("__consumer_offsets", "__transaction_state"):
            await producer.partitions_for(name)
            seen += await send_together(producer, name, {"value": b"v", "key": b"k"})
    return seen


async def names_and_partitions(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, partitions=2)
    seen = []
    async with patient(kind.bootstrap_servers, max_block_ms=300) as producer:
        for name, partition in (("no spaces", None), ("..", None), (topic, 2), (topic, 1)):
            try:
                delivery = await producer.enqueue(name, b"v", partition=partition)
            except KafkaError as error:
                seen.append(plainly(error))
            else:
                await producer.flush()
                seen.append(plainly(delivery.result()))
    return seen


async def a_topic_that_comes_into_being(kind: Kind, topic: str) -> Seen:
    async with patient(kind.bootstrap_servers) as producer:
        return await send_together(producer, topic, *[{"value": b"v", "partition": 0}] * 3)


async def without_acks(kind: Kind, topic: str) -> Seen:
    await kind.create(topic, configs={"max.message.bytes": "1000"})
    async with patient(kind.bootstrap_servers, acks=0) as producer:
        await producer.warm_up(topic)
        (link,) = producer._cluster._links.values()
        connection = link.connection
        assert connection is not None
        seen = await send_together(producer, topic, {"value": bytes(2000)})
        # The broker closes the connection, which the producer finds out, and goes on.
        await connection.wait_closed()
        seen += await send_together(producer, topic, {"value": b"v"})
        await producer.flush()
    async with patient(kind.bootstrap_servers) as producer:
        seen += await send_together(producer, topic, {"value": b"v"})
    return seen


SCENARIOS = [
    bad_timestamps,
    null_keys_on_a_compacted_topic,
    too_large,
    timestamps_of_the_log,
    internal_topics,
    names_and_partitions,
    a_topic_that_comes_into_being,
    without_acks,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_the_producer_sees_the_same(
    kafka: KafkaCluster, topic: str, scenario: Callable[[Kind, str], Awaitable[Seen]]
) -> None:
    async def create(name: str, **options: Any) -> None:
        await asyncio.to_thread(kafka.create_topic, name, **options)

    real = await scenario(Kind(kafka.bootstrap_servers, create), topic)
    async with EmbeddedCluster() as cluster:

        async def create_embedded(name: str, **options: Any) -> None:
            cluster.create_topic(name, **options)

        embedded = await scenario(Kind(cluster.bootstrap_servers, create_embedded), topic)
    assert embedded == real
    assert real
