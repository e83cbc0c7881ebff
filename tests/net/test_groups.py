"""What a group has committed, asked of its coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncproducer import (
    AuthorizationError,
    BrokerError,
    ErrorCode,
    OffsetAndMetadata,
    Producer,
    ProducerFenced,
    ProducerNotStarted,
    RequestTimedOut,
    TopicPartition,
    UnsupportedVersionError,
)
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

PLACES = [TopicPartition("t4", 0), TopicPartition("t4", 1)]


async def commit(producer: Producer[Any, Any], offset: int, metadata: str = "") -> None:
    async with producer.transaction() as tx:
        await tx.send_offsets({PLACES[0]: OffsetAndMetadata(offset, metadata)}, "g")


async def test_only_what_the_group_has_is_in_the_answer(new_producer: New) -> None:
    async with new_producer(transactional_id="tx") as producer:
        assert await producer.committed_offsets("g", PLACES) == {}
        await commit(producer, 5, '{"batch": 3}')
        expected = {PLACES[0]: OffsetAndMetadata(5, '{"batch": 3}', -1)}
        assert await producer.committed_offsets("g", PLACES) == expected
        assert await producer.committed_offsets("g", [("t4", 0)]) == expected
        assert await producer.committed_offsets("another", PLACES) == {}
        assert await producer.committed_offsets("g", []) == {}


async def test_an_open_transaction_is_waited_for(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(transactional_id="tx") as writer, new_producer() as reader:
        await commit(writer, 5)
        await writer.begin_transaction()
        await writer.send_offsets({PLACES[0]: 6}, "g")
        asking = asyncio.create_task(reader.committed_offsets("g", PLACES))
        await asyncio.sleep(5)
        assert not asking.done()
        await writer.commit_transaction()
        assert (await asking)[PLACES[0]].offset == 6


async def test_a_new_producer_of_the_id_sees_what_counts_and_nobody_adds_to_it(
    new_producer: New,
) -> None:
    async with new_producer(transactional_id="tx") as old:
        await commit(old, 5)
        await old.begin_transaction()
        await old.send_offsets({PLACES[0]: 6}, "g")
        async with new_producer(transactional_id="tx") as new:
            assert (await new.committed_offsets("g", PLACES))[PLACES[0]].offset == 5
            with pytest.raises(ProducerFenced):
                await old.commit_transaction()
            assert (await new.committed_offsets("g", PLACES))[PLACES[0]].offset == 5


@pytest.mark.parametrize("request_version", [7, 8, 9])
async def test_every_version(request_version: int, network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(
            topics={"t4": 4}, network=network, request_versions={9: (1, request_version)}
        ) as cluster,
        Producer(
            cluster.bootstrap_servers, connector=cluster.connector, transactional_id="tx"
        ) as producer,
    ):
        await commit(producer, 5, "note")
        found = await producer.committed_offsets("g", PLACES)
        assert found == {PLACES[0]: OffsetAndMetadata(5, "note")}


async def test_a_broker_that_cannot_wait_for_transactions_is_too_old(
    network: MemoryNetwork,
) -> None:
    async with (
        EmbeddedCluster(topics={"t4": 4}, network=network, request_versions={9: (1, 6)}) as cluster,
        Producer(cluster.bootstrap_servers, connector=cluster.connector) as producer,
    ):
        with pytest.raises(UnsupportedVersionError, match="OffsetFetch"):
            await producer.committed_offsets("g", PLACES)


async def test_another_coordinator_is_looked_for(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(transactional_id="tx") as producer:
        await commit(producer, 5)
        cluster.inject("offset_fetch", error=ErrorCode.NOT_COORDINATOR)
        assert (await producer.committed_offsets("g", PLACES))[PLACES[0]].offset == 5
        asked = [r.api for r in cluster.requests if r.api in ("find_coordinator", "offset_fetch")]
        assert asked[-4:] == ["find_coordinator", "offset_fetch"] * 2


async def test_a_lost_connection_is_mended(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(transactional_id="tx") as producer:
        await commit(producer, 5)
        cluster.inject("offset_fetch", drop="before")
        assert (await producer.committed_offsets("g", PLACES))[PLACES[0]].offset == 5


async def test_what_is_not_allowed_says_what_to_grant(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        cluster.inject("offset_fetch", error=ErrorCode.GROUP_AUTHORIZATION_FAILED)
        with pytest.raises(AuthorizationError, match="grant Describe on the group"):
            await producer.committed_offsets("g", PLACES)
        cluster.inject("offset_fetch", error=ErrorCode.INVALID_GROUP_ID)
        with pytest.raises(BrokerError, match="INVALID_GROUP_ID"):
            await producer.committed_offsets("g", PLACES)


async def test_it_waits_for_max_block_ms(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(max_block_ms=3000) as producer:
        cluster.inject("offset_fetch", error=ErrorCode.UNSTABLE_OFFSET_COMMIT, times=None)
        began = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimedOut, match="UNSTABLE_OFFSET_COMMIT"):
            await producer.committed_offsets("g", PLACES)
        assert asyncio.get_running_loop().time() - began == pytest.approx(3, abs=0.1)


async def test_bad_questions(new_producer: New) -> None:
    producer = new_producer()
    with pytest.raises(ProducerNotStarted):
        await producer.committed_offsets("g", PLACES)
    async with producer:
        with pytest.raises(TypeError, match="no partition"):
            await producer.committed_offsets("g", ["t4"])
        with pytest.raises(ValueError, match="empty id"):
            await producer.committed_offsets("", PLACES)
