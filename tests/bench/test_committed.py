"""Counting what is committed, on an embedded broker over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from asyncproducer import Producer
from asyncproducer.bench import committed
from asyncproducer.bench.committed import count_committed
from asyncproducer.testing import EmbeddedCluster
from asyncproducer.testing.kafka import KafkaCluster


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KafkaCluster]:
    async with EmbeddedCluster(brokers=2, topics={"t": 3}) as embedded:
        monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", embedded.bootstrap_servers)
        yield await asyncio.to_thread(KafkaCluster().start)


def transactional(cluster: KafkaCluster) -> Producer:
    return Producer(cluster.bootstrap_servers, transactional_id="x")


async def test_markers_are_not_counted(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it matter how many batches there are in an answer, and who leads."""
    monkeypatch.setattr(committed, "_MOST_BYTES", 1)
    async with transactional(cluster) as producer:
        for _ in range(2):
            async with producer.transaction() as tx:
                for n in range(30):
                    await tx.enqueue("t", b"value", partition=n % 3)
    ends = await asyncio.to_thread(cluster.end_offsets, "t")
    assert set(ends.values()) == {22}
    assert await asyncio.to_thread(count_committed, cluster, "t") == 60


async def test_an_open_transaction_is_no_result(cluster: KafkaCluster) -> None:
    async with transactional(cluster) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"value")
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(partial(count_committed, cluster, "t", timeout_s=0.1))
        await producer.commit_transaction()
    assert await asyncio.to_thread(count_committed, cluster, "t") == 1


async def test_an_aborted_transaction_is_no_result(cluster: KafkaCluster) -> None:
    async with transactional(cluster) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"value", partition=1)
        await producer.abort_transaction()
    with pytest.raises(RuntimeError, match="transactions in t-1: 1 aborted ones"):
        await asyncio.to_thread(count_committed, cluster, "t")
