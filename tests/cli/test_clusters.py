from __future__ import annotations

import inspect
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from asyncproducer import Producer
from asyncproducer.cli import clusters
from asyncproducer.cli.clusters import (
    IDLE_MS,
    Unreachable,
    cleanup_policy,
    create_topic,
    delete_topic,
    ends,
    read,
    security,
    told,
)
from asyncproducer.config import ProducerConfig
from asyncproducer.testing import EmbeddedCluster


async def test_reading_ends_when_nothing_comes_any_more() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        async with Producer[bytes, bytes](cluster.bootstrap_servers) as producer:
            await producer.send("t", b"x")
        cluster.inject(api="fetch", error="KAFKA_STORAGE_ERROR", times=None)
        unread: list[tuple[int, ...]] = []

        def told(*range_: int) -> None:
            unread.append(range_)

        records = read(cluster.bootstrap_servers, "t", {0: 0}, idle_ms=1, unread=told)
        assert [record async for record in records] == []
        assert unread == [(0, 0, 1)]
        cluster.clear_faults()
        records = read(cluster.bootstrap_servers, "t", {0: 0}, unread=told)
        assert [record async for record in records] == [(0, 0, None, b"x")]
        assert len(unread) == 1


def test_a_fetch_that_is_never_answered_is_asked_again_before_the_reading_ends() -> None:
    parameters = inspect.signature(AIOKafkaConsumer.__init__).parameters
    assert parameters["request_timeout_ms"].default + 10_000 < IDLE_MS


async def test_partitions_that_were_added_since_are_read_from_their_beginning() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        servers = cluster.bootstrap_servers
        starts = await ends(servers, "t", [0])
        assert starts == {0: 0}
        cluster.add_partitions("t", 3)
        async with Producer[bytes, bytes](servers) as producer:
            await producer.send("t", b"x", partition=2)
        assert await ends(servers, "t", [0]) == {0: 0, 1: 0, 2: 1}
        assert [record async for record in read(servers, "t", starts)] == [(2, 0, None, b"x")]


async def test_only_what_lies_between_start_and_end_is_read() -> None:
    async with EmbeddedCluster(topics={"t": 2}) as cluster:
        servers = cluster.bootstrap_servers
        async with Producer[bytes, bytes](servers) as producer:
            await producer.send("t", b"before", partition=0)
            starts = await ends(servers, "t", [0, 1])
            await producer.send("t", b"after", partition=0)
        assert starts == {0: 1, 1: 0}
        assert [record async for record in read(servers, "t", starts)] == [(0, 1, None, b"after")]


async def test_what_was_removed_before_the_reading_is_told_and_the_rest_is_read() -> None:
    async with EmbeddedCluster(topics={"t": 2}) as cluster:
        servers = cluster.bootstrap_servers
        async with Producer[bytes, bytes](servers) as producer:
            for partition in (0, 1):
                for _ in range(5):
                    await producer.send("t", b"x", partition=partition)
        cluster.delete_records("t", 0, 3)
        cluster.delete_records("t", 1, 5)
        removed: list[tuple[int, ...]] = []
        records = read(servers, "t", {0: 1, 1: 0}, removed=lambda *range_: removed.append(range_))
        assert [record.offset async for record in records] == [3, 4]
        assert sorted(removed) == [(0, 1, 3), (1, 0, 5)]


async def test_what_is_removed_while_it_is_read_is_told_and_the_rest_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins = clusters._begins

    async def then_removed(*args: Any) -> dict[Any, int]:
        found = await begins(*args)
        if cluster.records("t", 0)[0].offset == 3:
            cluster.delete_records("t", 0, 5)
        return found

    monkeypatch.setattr(clusters, "_begins", then_removed)
    removed: list[tuple[int, ...]] = []
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        servers = cluster.bootstrap_servers
        async with Producer[bytes, bytes](servers) as producer:
            for _ in range(7):
                await producer.send("t", b"x")
        cluster.delete_records("t", 0, 3)
        records = read(servers, "t", {0: 0}, removed=lambda *range_: removed.append(range_))
        assert [record.offset async for record in records] == [5, 6]
        assert removed == [(0, 0, 3), (0, 3, 5)]


async def test_a_leader_that_is_behind_is_asked_again() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        async with Producer[bytes, bytes](cluster.bootstrap_servers) as producer:
            await producer.send("t", b"x")
        cluster.inject(api="fetch", error="OFFSET_OUT_OF_RANGE", times=1)
        records = read(cluster.bootstrap_servers, "t", {0: 0})
        assert [record.offset async for record in records] == [0]


async def test_a_cluster_that_does_not_tell_the_cleanup_policy_is_no_error() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        assert await cleanup_policy(cluster.bootstrap_servers, "t", {}) is None


async def test_a_log_without_records_is_read_in_no_time() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        assert [r async for r in read(cluster.bootstrap_servers, "t", {0: 0})] == []


async def test_a_topic_is_created_once_and_can_be_deleted() -> None:
    async with EmbeddedCluster(brokers=2) as cluster:
        servers = cluster.bootstrap_servers
        assert await create_topic(servers, "t", 3)
        assert not await create_topic(servers, "t", 5)
        assert await ends(servers, "t", [0, 1, 2]) == {0: 0, 1: 0, 2: 0}
        assert await delete_topic(servers, "t", {}) is None
        assert await delete_topic(servers, "t", {}) == "UNKNOWN_TOPIC_OR_PARTITION"


@pytest.mark.parametrize("error", ["TOPIC_AUTHORIZATION_FAILED", "POLICY_VIOLATION"])
async def test_a_topic_that_may_not_be_created_is_told_with_what_to_do(error: str) -> None:
    async with EmbeddedCluster() as cluster:
        cluster.inject(api="create_topics", error=error)
        with pytest.raises(Unreachable, match=f"cannot be created: {error}.*--topic"):
            await create_topic(cluster.bootstrap_servers, "t", 1)


async def test_a_cluster_that_is_not_there_is_told() -> None:
    with pytest.raises(Unreachable, match="no Kafka broker answers at localhost:1"):
        await create_topic("localhost:1", "t", 1)


def test_the_consumer_gets_the_producers_security() -> None:
    options: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": "alice",
        "sasl_password": "secret",
    }
    arguments = security(ProducerConfig("a:1", **options))
    assert arguments.pop("ssl_context").check_hostname
    assert arguments == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "sasl_plain_password": "secret",
    }
    assert security(ProducerConfig("a:1")) == {"security_protocol": "PLAINTEXT"}


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("it is 3"), "ValueError: it is 3"), (OSError("OSError: x"), "OSError: x")],
)
def test_an_error_is_told_with_its_name_once(error: Exception, line: str) -> None:
    assert told(error) == line
