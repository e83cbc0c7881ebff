# Blocks of transactions, and what they raise, are what is looked at.
# ruff: noqa: PT012
# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
"""Transactions on real brokers, of version 1 and of version 2, read by two other clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiokafka
import confluent_kafka
import pytest
from kio.schema.update_features.v1.request import FeatureUpdateKey, UpdateFeaturesRequest
from kio.schema.update_features.v1.response import UpdateFeaturesResponse
from kio.static.primitive import i8, i16

from asyncproducer import (
    ConsumerGroupMetadata,
    DeliveryError,
    ErrorCode,
    IllegalStateError,
    KafkaError,
    OffsetAndMetadata,
    Producer,
    ProducerFenced,
    RecordTooLarge,
    TopicPartition,
    TransactionAborted,
    TransactionTimeout,
)
from asyncproducer.core.transactions import TransactionState
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.proxy import FaultProxy, ProxyFault
from tests.chaos.offsets import committed_offset

from .conftest import IMPATIENT, FreshTopic, ReadCommitted, started

PATIENCE = 90.0
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _of_version_1() -> Iterator[KafkaCluster]:
    yield from started(KafkaCluster(features={"transaction.version": 1}, properties=IMPATIENT))


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def brokers(request: pytest.FixtureRequest, version: int) -> KafkaCluster:
    """One node, whose transactions have this version."""
    name = "_of_version_1" if version == 1 else "kafka"
    cluster: KafkaCluster = request.getfixturevalue(name)
    if cluster.admin.features().get("transaction.version", 0) != version:
        pytest.skip(f"the cluster does not have transaction.version={version}")
    return cluster


@pytest.fixture
def topic(brokers: KafkaCluster, fresh_topic: FreshTopic) -> str:
    return fresh_topic(cluster=brokers)


def transactional(cluster: KafkaCluster, name: str | None = None, **options: Any) -> Producer:
    name = name or f"tx-{time.time_ns()}-{next(_numbers)}"
    return Producer(cluster.bootstrap_servers, transactional_id=name, **options)


def state(producer: Producer) -> TransactionState:
    assert producer._transactions is not None
    return producer._transactions._manager.state


async def test_only_committed_records_are_read(
    brokers: KafkaCluster, topic: str, committed: ReadCommitted
) -> None:
    """IT-13."""
    async with transactional(brokers) as producer:
        for number in range(6):
            with contextlib.suppress(KeyError):
                async with producer.transaction() as tx:
                    for part in range(3):
                        await tx.enqueue(topic, f"{number}-{part}")
                    if number % 3 == 1:
                        await tx.flush()
                    if number % 3:
                        raise KeyError
        assert state(producer) is TransactionState.READY
    assert await committed(brokers, topic) == [
        f"{n}-{part}".encode() for n in (0, 3) for part in range(3)
    ]


async def test_a_transaction_over_many_partitions(
    brokers: KafkaCluster, fresh_topic: FreshTopic, committed: ReadCommitted
) -> None:
    topics = [fresh_topic(4, cluster=brokers) for _ in range(2)]
    async with transactional(brokers, batch_size=500) as producer:
        for number in range(3):
            async with producer.transaction() as tx:
                results = [
                    await tx.enqueue(each, b"%d" % number, partition=partition)
                    for each in topics
                    for partition in range(4)
                    for _ in range(50)
                ]
            assert all(delivery.done() for delivery in results)
    for each in topics:
        assert await committed(brokers, each) == [b"%d" % n for n in range(3) for _ in range(50)]


async def test_a_failed_record_is_never_committed_over(
    brokers: KafkaCluster, fresh_topic: FreshTopic, committed: ReadCommitted
) -> None:
    """KP-25: the broker refuses one record, and the block looks away."""
    topic = fresh_topic(cluster=brokers, configs={"max.message.bytes": "2000"})
    async with transactional(brokers) as producer:
        for number in range(2):
            with pytest.raises(TransactionAborted) as caught:
                async with producer.transaction() as tx:
                    await tx.send(topic, b"with it")
                    with pytest.raises((DeliveryError, RecordTooLarge)):
                        await tx.send(topic, b"x" * (5_000 if number else 2_000_000))
            assert caught.value.__cause__ is not None
            async with producer.transaction() as tx:
                await tx.send(topic, b"%d" % number)
    assert await committed(brokers, topic) == [b"0", b"1"]


async def send_late(producer: Producer, topic: str) -> None:
    await producer.send(topic, b"late")


async def send_late_elsewhere(producer: Producer, topic: str) -> None:
    """To a partition that the transaction has not had yet."""
    await producer.send(topic, b"late", partition=1)


async def send_late_offsets(producer: Producer, topic: str) -> None:
    await producer.send_offsets({TopicPartition(topic, 0): 1}, topic)


async def commit_late(producer: Producer, topic: str) -> None:
    await producer.commit_transaction()


@pytest.mark.parametrize("call", [send_late, send_late_elsewhere, send_late_offsets, commit_late])
async def test_a_newer_producer_fences_the_older_one(
    brokers: KafkaCluster,
    fresh_topic: FreshTopic,
    committed: ReadCommitted,
    call: Callable[[Producer, str], Awaitable[None]],
) -> None:
    """IT-13, TX-20, TX-21: whatever the older one tries first."""
    name = f"fenced-{time.time_ns()}"
    topic = fresh_topic(2, cluster=brokers)
    async with transactional(brokers, name) as old:
        await old.begin_transaction()
        await old.send(topic, b"old", partition=0)
        async with transactional(brokers, name) as young:
            with pytest.raises((ProducerFenced, DeliveryError, TransactionAborted)):
                await call(old, topic)
            if state(old) is not TransactionState.FATAL_ERROR:
                # Only a coordinator can tell an old epoch from a fenced one.
                with pytest.raises(ProducerFenced, match="has taken over"):
                    await old.abort_transaction()
            with pytest.raises(ProducerFenced, match="has taken over"):
                await old.begin_transaction()
            async with young.transaction() as tx:
                await tx.send(topic, b"young", partition=0)
    assert await committed(brokers, topic) == [b"young"]


def is_closed(cluster: KafkaCluster, topic: str) -> bool:
    """Whether no transaction holds back the readers of what is committed."""
    return cluster.end_offsets(topic, committed=True) == cluster.end_offsets(topic)


async def test_a_transaction_that_the_broker_gave_up(
    topic: str, brokers: KafkaCluster, committed: ReadCommitted
) -> None:
    """IT-13, spec 9.10."""
    name = f"slow-{time.time_ns()}"
    async with transactional(brokers, name, transaction_timeout_ms=1_000) as producer:
        with pytest.raises(KafkaError, match="transaction_timeout_ms=1000"):
            async with producer.transaction() as tx:
                await tx.send(topic, b"too late")
                await asyncio.to_thread(brokers.wait_until, lambda: is_closed(brokers, topic))
        assert state(producer) is TransactionState.FATAL_ERROR
    async with transactional(brokers, name) as producer, producer.transaction() as tx:
        await tx.send(topic, b"in time")
    assert await committed(brokers, topic) == [b"in time"]


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted once", "at once"])
async def test_consume_transform_produce_with_aiokafka(
    brokers: KafkaCluster,
    fresh_topic: FreshTopic,
    committed: ReadCommitted,
    aborted: bool,
) -> None:
    """IT-14: each input has exactly one output, and the group goes on behind it."""
    source, target = fresh_topic(cluster=brokers), fresh_topic(cluster=brokers)
    group = f"group-{time.time_ns()}"
    async with Producer(brokers.bootstrap_servers) as producer:
        await producer.send_many(source, [b"%d" % n for n in range(20)])
    done = 0
    async with transactional(brokers) as producer:
        while done < 20:
            async with aiokafka.AIOKafkaConsumer(
                source,
                bootstrap_servers=brokers.bootstrap_servers,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                max_poll_records=8,
            ) as consumer:
                with contextlib.suppress(KeyError):
                    while done < 20:
                        fetched = await consumer.getmany(timeout_ms=1_000)
                        coordinator = consumer._coordinator
                        member = ConsumerGroupMetadata(
                            group, coordinator.generation, coordinator.member_id
                        )
                        async with producer.transaction() as tx:
                            for place, records in fetched.items():
                                for record in records:
                                    await tx.enqueue(target, b"out of " + record.value)
                                await tx.send_offsets({place: records[-1].offset + 1}, member)
                            if aborted and fetched:
                                aborted = False
                                raise KeyError
                        done += sum(len(records) for records in fetched.values())
    assert await committed(brokers, target) == [b"out of %d" % n for n in range(20)]
    assert await committed_offset(brokers, group, source) == 20


async def test_consume_transform_produce_with_confluent_kafka(
    brokers: KafkaCluster, fresh_topic: FreshTopic, committed: ReadCommitted
) -> None:
    """IT-14: with the positions and the membership as its consumer gives them."""
    source, target = fresh_topic(2, cluster=brokers), fresh_topic(cluster=brokers)
    group = f"group-{time.time_ns()}"
    async with Producer(brokers.bootstrap_servers) as producer:
        # Nothing is in partition 1: its position is none.
        await producer.send_many(source, [b"%d" % n for n in range(0)])
        for number in range(10):
            await producer.send(source, b"%d" % number, partition=0)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": brokers.bootstrap_servers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([source])
    try:
        async with transactional(brokers) as producer:
            for _ in range(10):
                message = await asyncio.to_thread(consumer.poll, PATIENCE)
                assert message is not None
                assert message.error() is None
                value = message.value()
                assert value is not None
                async with producer.transaction() as tx:
                    await tx.enqueue(target, b"out of " + value)
                    await tx.send_offsets(
                        consumer.position(consumer.assignment()),
                        consumer.consumer_group_metadata(),
                    )
    finally:
        consumer.close()
    assert await committed(brokers, target) == [b"out of %d" % n for n in range(10)]
    assert await committed_offset(brokers, group, source) == 10


async def test_a_consumer_that_left_its_group_commits_nothing(
    brokers: KafkaCluster, topic: str, committed: ReadCommitted
) -> None:
    """TX-10, KIP-447."""
    group = f"group-{time.time_ns()}"
    async with aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=brokers.bootstrap_servers, group_id=group
    ) as consumer:
        await consumer.getmany(timeout_ms=100)
        coordinator = consumer._coordinator
        generation, member = coordinator.generation, coordinator.member_id
    async with transactional(brokers) as producer:
        with pytest.raises(TransactionAborted) as caught:
            async with producer.transaction() as tx:
                await tx.send(topic, b"1")
                await tx.send_offsets(
                    {TopicPartition(topic, 0): 1}, ConsumerGroupMetadata(group, generation, member)
                )
        assert caught.value.code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)
        async with producer.transaction() as tx:
            await tx.send(topic, b"2")
    assert await committed(brokers, topic) == [b"2"]


@pytest.mark.parametrize("phase", ["send", "offsets", "end"])
async def test_a_cancelled_block_leaves_a_producer_that_goes_on(
    brokers: KafkaCluster, topic: str, committed: ReadCommitted, phase: str
) -> None:
    """What was cancelled in the block is aborted; at its end it is committed."""
    async with transactional(brokers) as producer:
        for number in range(20):
            ending = asyncio.Event()

            async def block(number: int = number, ending: asyncio.Event = ending) -> None:
                async with producer.transaction() as tx:
                    await tx.send(topic, b"cancelled %d" % number)
                    if phase == "offsets":
                        await tx.send_offsets({TopicPartition(topic, 0): number}, f"g-{topic}")
                    elif phase == "end":
                        ending.set()

            task = asyncio.ensure_future(block())
            if phase == "end":
                await ending.wait()
            await asyncio.sleep(0.0007 * number)
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(IllegalStateError):
                await producer.commit_transaction()
            assert state(producer) is TransactionState.READY
            async with producer.transaction() as tx:
                await tx.send(topic, b"%d" % number)
    values = await committed(brokers, topic)
    assert [v for v in values if v and not v.startswith(b"c")] == [b"%d" % n for n in range(20)]
    if phase == "end":
        expected = [each for n in range(20) for each in (b"cancelled %d" % n, b"%d" % n)]
        assert values == expected


async def test_a_commit_that_times_out_can_be_called_again(
    brokers: KafkaCluster, topic: str, committed: ReadCommitted
) -> None:
    """TX-17, IT-13."""
    async with transactional(brokers) as producer:
        assert producer._transactions is not None
        producer._transactions._max_block = 0.001
        resumed = 0
        for number in range(5):
            await producer.begin_transaction()
            await producer.enqueue(topic, b"%d" % number)
            while True:
                try:
                    await producer.commit_transaction()
                except TransactionTimeout:
                    resumed += 1
                    with pytest.raises(IllegalStateError, match=r"call commit_transaction\(\)"):
                        await producer.abort_transaction()
                else:
                    break
        assert resumed
    assert await committed(brokers, topic) == [b"%d" % n for n in range(5)]


async def test_the_version_is_changed_at_run_time(
    fresh_topic: FreshTopic, committed: ReadCommitted
) -> None:
    """TX-42: a producer that runs goes over to the other protocol and back."""
    with KafkaCluster(features={"transaction.version": 1}) as cluster:
        cluster.create_topic("changing")
        async with (
            FaultProxy(cluster.bootstrap_servers) as proxy,
            Producer(proxy.bootstrap_servers, transactional_id="changing") as producer,
        ):
            manager = producer._transactions._manager  # type: ignore[union-attr]
            number = itertools.count()
            for level in (1, 2, 1):
                await asyncio.to_thread(set_version, cluster, level)
                # A broker tells of it with each new connection.
                proxy.inject(ProxyFault(kind="cut_after", api="produce"))
                for _ in range(5):
                    async with producer.transaction() as tx:
                        await tx.send("changing", b"%d" % next(number))
                assert manager.version_two is (level == 2)
        assert await committed(cluster, "changing") == [b"%d" % n for n in range(15)]


def set_version(cluster: KafkaCluster, level: int) -> None:
    present = cluster.admin.features()["transaction.version"]
    if present != level:
        answer = cluster.admin._ask(
            UpdateFeaturesRequest(
                feature_updates=(
                    FeatureUpdateKey(
                        feature="transaction.version",
                        max_version_level=i16(level),
                        upgrade_type=i8(1 if level > present else 2),
                    ),
                )
            ),
            UpdateFeaturesResponse,
            None,
        )
        assert answer.error_code.value == 0, answer
    cluster.wait_until(lambda: cluster.admin.features()["transaction.version"] == level)


@pytest.mark.long  # the chaos command's short form kills one, too
async def test_coordinators_die_and_every_transaction_is_whole(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, committed: ReadCommitted
) -> None:
    """IT-14: two killed, one after the other, while transactions go on."""
    topic = fresh_topic(cluster=kafka3)
    kept: list[bytes] = []
    unknown: list[bytes] = []
    stop = asyncio.Event()

    async def work() -> None:
        async with transactional(kafka3, max_block_ms=60_000) as producer:
            for number in itertools.count():
                if stop.is_set():
                    return
                value = b"%d" % number
                try:
                    async with producer.transaction() as tx:
                        await tx.enqueue(topic, value + b"a")
                        await tx.enqueue(topic, value + b"b")
                except TransactionAborted:
                    continue
                except TransactionTimeout:
                    unknown.append(value)
                    return
                kept.append(value)

    working = asyncio.create_task(work())
    await asyncio.sleep(3)
    for node in (1, 2):
        await asyncio.to_thread(kafka3.kill, node)
        await asyncio.sleep(5)
        await asyncio.to_thread(kafka3.restart, node)
        await asyncio.sleep(3)
    stop.set()
    await working
    assert len(kept) > 10
    assert not unknown
    assert await committed(kafka3, topic) == [
        value + part for value in kept for part in (b"a", b"b")
    ]


@pytest.mark.long  # `tox` has the same without restarts
@pytest.mark.timeout(300)
@pytest.mark.parametrize("membership", [True, False], ids=["member", "group id, one in flight"])
async def test_consume_transform_produce_while_brokers_restart(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, committed: ReadCommitted, membership: bool
) -> None:
    """IT-14: each input has exactly one output, in order, whatever was aborted meanwhile."""
    source, target = fresh_topic(cluster=kafka3), fresh_topic(cluster=kafka3)
    group = f"group-{time.time_ns()}"
    servers = kafka3.bootstrap_servers
    inputs = [b"%d" % n for n in range(2000)]
    async with Producer(servers) as producer:
        await producer.send_many(source, inputs)

    def bounce() -> None:
        for node in (1, 2, 3):
            kafka3.kill(node)
            kafka3.restart(node)
            kafka3.wait_until(
                lambda: all(
                    len(p.isr) == 3
                    for topic in kafka3.view(source, target).topics.values()
                    for p in topic.values()
                )
            )

    options: dict[str, Any] = {} if membership else {"max_in_flight_requests_per_connection": 1}
    place = aiokafka.TopicPartition(source, 0)
    bouncing = asyncio.create_task(asyncio.to_thread(bounce))
    aborted = done = 0
    async with (
        transactional(kafka3, **options) as producer,
        aiokafka.AIOKafkaConsumer(
            bootstrap_servers=servers,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            max_poll_records=20,
        ) as consumer,
    ):
        if membership:
            consumer.subscribe([source])
        else:
            consumer.assign([place])
        while done < len(inputs):
            fetched = (await consumer.getmany(timeout_ms=1_000)).get(place, [])
            if not fetched:
                continue
            coordinator = consumer._coordinator
            member: Any = group
            if membership:
                member = ConsumerGroupMetadata(group, coordinator.generation, coordinator.member_id)
            try:
                async with producer.transaction() as tx:
                    for record in fetched:
                        await tx.enqueue(target, record.value, partition=0)
                    await tx.send_offsets({place: fetched[-1].offset + 1}, member)
                if not bouncing.done():
                    await asyncio.wait([bouncing], timeout=0.2)  # it lasts as long as the restarts
                done = fetched[-1].offset + 1
            except TransactionAborted:
                aborted += 1
                consumer.seek(place, fetched[0].offset)
    await bouncing
    assert await committed(kafka3, target) == inputs, f"{aborted} were aborted"
    assert await committed_offset(kafka3, group, source) == len(inputs)


async def test_what_a_group_has_committed_is_told_after_its_transaction(
    brokers: KafkaCluster, topic: str
) -> None:
    group, place = f"group-{topic}", TopicPartition(topic, 0)
    async with transactional(brokers, f"{group}-id") as old:
        assert await old.committed_offsets(group, [place]) == {}
        async with old.transaction() as tx:
            await tx.send_offsets({place: OffsetAndMetadata(5, "note")}, group)
        await old.begin_transaction()
        await old.send_offsets({place: 6}, group)
        async with transactional(brokers, f"{group}-id") as new:
            found = await new.committed_offsets(group, [place, (topic, 7)])
            assert found == {place: OffsetAndMetadata(5, "note")}
            with pytest.raises(ProducerFenced):
                await old.commit_transaction()
