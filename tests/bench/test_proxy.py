from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asyncproducer import Producer
from asyncproducer.bench.proxy import DelayProxy
from asyncproducer.testing import EmbeddedCluster, RawClient

# Real sockets on virtual time: each jump waits a millisecond for bytes, and then is exact.
pytestmark = pytest.mark.virtual_time

RTT = 0.5

#: A request that any broker answers at once.
FIELDS = {"transactional_id": None, "transaction_timeout": 1000}


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(brokers=2, topics={"t": 4}) as cluster:
        yield cluster


@pytest.fixture
async def proxy(cluster: EmbeddedCluster) -> AsyncIterator[DelayProxy]:
    async with DelayProxy(cluster.address(1), RTT) as proxy:
        yield proxy


async def test_an_answer_comes_a_round_trip_after_its_request(proxy: DelayProxy) -> None:
    now = asyncio.get_running_loop().time
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        for _ in range(2):
            before = now()
            await client.request(
                "init_producer_id", 2, transactional_id=None, transaction_timeout=1000
            )
            assert now() - before == pytest.approx(RTT)


async def test_requests_that_are_sent_together_are_delayed_together(proxy: DelayProxy) -> None:
    now = asyncio.get_running_loop().time
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        before = now()
        sent = [client.send("init_producer_id", 2, **FIELDS) for _ in range(20)]
        for correlation_id in sent:  # in their order, or it raises
            await client.receive("init_producer_id", 2, correlation_id)
        assert now() - before == pytest.approx(RTT)


@pytest.mark.parametrize("version", [1, 9, 12])
async def test_metadata_leads_to_the_proxy_and_not_past_it(
    cluster: EmbeddedCluster, proxy: DelayProxy, version: int
) -> None:
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        answer = await client.request(
            "metadata",
            version,
            topics=[],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
            include_cluster_authorized_operations=False,
        )
    told = {f"{b.host}:{b.port}" for b in answer.brokers}
    assert len(told) == 2
    assert proxy.bootstrap_servers in told
    assert told.isdisjoint(cluster.bootstrap_servers.split(","))


async def test_a_producer_reaches_all_brokers_through_it(
    cluster: EmbeddedCluster, proxy: DelayProxy
) -> None:
    now = asyncio.get_running_loop().time
    async with Producer(proxy.bootstrap_servers) as producer:
        await producer.warm_up("t")
        for partition in range(4):
            before = now()
            await producer.send("t", b"v", partition=partition)
            assert now() - before >= RTT
    assert [r.value for r in cluster.records("t")] == [b"v"] * 4


async def test_the_end_of_a_broker_is_the_end_of_the_connection(
    cluster: EmbeddedCluster, proxy: DelayProxy
) -> None:
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        await client.request("init_producer_id", 2, **FIELDS)
        await cluster.stop_broker(1)
        with pytest.raises(asyncio.IncompleteReadError):
            await client.receive_frame()
