"""Tests of a service that sends: on an embedded cluster, with faults, in virtual time.

pip install asyncproducer pytest pytest-asyncio
pytest examples/06_testing_your_service.py

Or copy it among your own tests, as test_shop.py: there is nothing to set. For a FastAPI
application see "Its tests" in README.md.

No Kafka, no Docker, no port, no waiting: two minutes of timeout take milliseconds.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncproducer import DeliveryTimeout, Producer
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork

# The plugin of asyncproducer brings virtual_time: the clock jumps when nothing can run.
pytestmark = [pytest.mark.asyncio, pytest.mark.virtual_time]


class Shop:
    """Your service."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer

    async def order(self, customer: str, item: str) -> bool:
        """Whether the order is placed. False: certainly not, so it may be tried again."""
        try:
            await self.producer.send("orders", item, key=customer)
        except DeliveryTimeout as error:
            if error.persisted == "no":
                return False
            raise  # nobody knows: that is not ours to hide
        return True


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    network = MemoryNetwork(latency=0.002)  # leave it out, and real TCP is used
    async with EmbeddedCluster(brokers=3, topics={"orders": 6}, network=network) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def shop(cluster: EmbeddedCluster) -> AsyncIterator[Shop]:
    async with Producer(cluster.bootstrap_servers, connector=cluster.connector) as producer:
        yield Shop(producer)


async def test_an_order_is_in_the_log(cluster: EmbeddedCluster, shop: Shop) -> None:
    assert await shop.order("alice", "tea")
    assert [(r.key, r.value) for r in cluster.records("orders")] == [(b"alice", b"tea")]


async def test_a_leader_that_moves_goes_unnoticed(cluster: EmbeddedCluster, shop: Shop) -> None:
    fault = cluster.inject(api="produce", error="NOT_LEADER_OR_FOLLOWER", times=2)
    assert await shop.order("alice", "tea")
    assert fault.hits == 2
    assert len(cluster.records("orders")) == 1  # and not three


async def test_without_leaders_it_may_be_tried_again(cluster: EmbeddedCluster, shop: Shop) -> None:
    for partition in range(6):
        cluster.move_leader("orders", partition, -1)
    assert not await shop.order("alice", "tea")  # after delivery_timeout_ms: two minutes
    assert cluster.records("orders") == []


async def test_an_unanswered_order_is_told_apart(cluster: EmbeddedCluster, shop: Shop) -> None:
    cluster.inject(api="produce", no_answer=True, after_append=True, times=None)
    with pytest.raises(DeliveryTimeout) as caught:
        await shop.order("alice", "tea")
    assert caught.value.persisted == "maybe"
    assert len(cluster.records("orders")) == 1
