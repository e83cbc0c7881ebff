"""Three real brokers that move, and one of them that says nothing any more."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asyncproducer import Producer
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.proxy import FaultProxy, ProxyFault

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic, Reader, TopicId

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def in_sync(kafka3: KafkaCluster, topic: str) -> bool:
    return all(len(partition.isr) == 3 for partition in kafka3.topic(topic).values())


@pytest.mark.long  # the chaos command's short form moves one, too
async def test_all_brokers_move_to_other_addresses_one_after_the_other(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    """In the end none of the bootstrap addresses is right any more, and none is needed."""
    topic = fresh_topic(3, cluster=kafka3)
    before = kafka3.bootstrap_servers
    sent = 0
    async with Producer[Any, Any](before) as producer:
        for node in (1, 2, 3):
            deliveries = []
            moving = asyncio.create_task(
                asyncio.to_thread(partial(kafka3.restart, node, new_port=True))
            )
            while not moving.done():
                for partition in range(3):
                    deliveries.append(
                        await producer.enqueue(topic, b"%d" % sent, partition=partition)
                    )
                    sent += 1
                await asyncio.wait([moving], timeout=0.02)
            await moving
            async with asyncio.timeout(60):
                for delivery in deliveries:
                    await delivery
            await asyncio.to_thread(kafka3.wait_until, lambda: in_sync(kafka3, topic))
        assert producer.metrics()["record_error_total"] == 0
    assert not {*before.split(",")} & {*kafka3.bootstrap_servers.split(",")}
    log = await read_log(kafka3, topic)
    for partition, records in log.items():
        assert [int(r.value or b"") for r in records] == list(range(partition, sent, 3))


async def test_a_broker_that_is_a_black_hole_does_not_hold_up_the_other_two(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader
) -> None:
    topic = fresh_topic(3, cluster=kafka3)
    leaders = {number: view.leader for number, view in kafka3.topic(topic).items()}
    bad = leaders[0]
    others = [number for number, leader in leaders.items() if leader != bad]
    assert others
    async with (
        FaultProxy(kafka3.bootstrap_servers) as proxy,
        Producer[Any, Any](proxy.bootstrap_servers, request_timeout_ms=1500) as producer,
    ):
        for partition in range(3):
            await producer.send(topic, b"before", partition=partition)
        proxy.inject(ProxyFault(kind="black_hole", node=bad, seconds=5))
        stuck = await producer.enqueue(topic, b"stuck", partition=0)
        await proxy.happened(1)
        count = 0
        for count in range(1, 201):
            await producer.send(topic, b"%d" % count, partition=others[count % len(others)])
        assert not stuck.done()
        assert (await stuck).offset == 1
        assert producer.metrics()["record_error_total"] == 0
    log = await read_log(kafka3, topic)
    assert [record.value for record in log[0]] == [b"before", b"stuck"]
    assert sum(len(log[number]) for number in others) == 200 + len(others)


async def test_a_topic_that_is_deleted_and_made_again_is_written_from_its_start(
    kafka3: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader, topic_id: TopicId
) -> None:
    """Nothing is sent meanwhile: brokers would create it by themselves."""
    topic = fresh_topic(3, cluster=kafka3)
    async with Producer[Any, Any](kafka3.bootstrap_servers, metadata_max_age_ms=300_000) as p:
        for n in range(9):
            await p.send(topic, b"old %d" % n, partition=n % 3)
        old = await topic_id(kafka3, topic)
        kafka3.admin.delete_topics(topic)
        kafka3.wait_until(lambda: all(not kafka3.view(topic, node=n).topics for n in (1, 2, 3)))
        kafka3.create_topic(topic, partitions=3)
        assert await topic_id(kafka3, topic) != old
        async with asyncio.timeout(60):
            sent = [await p.send(topic, b"new %d" % n, partition=n % 3) for n in range(9)]
        assert [metadata.offset for metadata in sent] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert p.metrics()["record_error_total"] == 0
    log = await read_log(kafka3, topic)
    assert [r.value for r in log[0]] == [b"new 0", b"new 3", b"new 6"]
