"""Brokers from 3.9 on: the same records, read back, and what their age makes different.

4.3 is what all other tests here run on. `tox` has one look at each of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from asyncproducer import DeliveryError, Producer, ProducerFenced
from asyncproducer.testing.kafka import KafkaCluster, KafkaUnavailable
from asyncproducer.testing.raw_client import RawClient
from tests.chaos.offsets import committed_offset

if TYPE_CHECKING:
    from tests.kafka.conftest import ReadCommitted, Reader

pytestmark = pytest.mark.slow

#: Version -> the newest Produce that it has: 13 names topics by id.
VERSIONS = {"3.9.2": 11, "4.0.1": 12, "4.1.1": 13, "4.2.0": 13}
#: The versions without transactions of version 2 (KIP-890).
OF_VERSION_1 = {"3.9.2"}


@pytest.fixture(scope="module", params=VERSIONS)
def aged(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    """One node of a version, which does not keep idle connections for long."""
    cluster = KafkaCluster(
        version=request.param, own=True, properties={"connections.max.idle.ms": "1000"}
    )
    try:
        cluster.start()
    except KafkaUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    "compression",
    ["zstd", *(pytest.param(c, marks=pytest.mark.long) for c in ("none", "gzip", "snappy", "lz4"))],
)
async def test_records_come_back(aged: KafkaCluster, read_log: Reader, compression: Any) -> None:
    topic = f"round-trip-{compression}"
    aged.create_topic(topic, partitions=3)
    values = [b"%d" % n * 20 for n in range(500)]
    async with Producer[Any, Any](aged.bootstrap_servers, compression_type=compression) as producer:
        result = await producer.send_many(topic, values)
        assert result.acknowledged == 500
        assert producer.metrics()["record_retry_total"] == 0
    log = await read_log(aged, topic)
    assert sorted(record.value or b"" for records in log.values() for record in records) == sorted(
        values
    )


async def test_the_newest_produce_of_each_version_is_known(aged: KafkaCluster) -> None:
    async with await RawClient.connect(aged.bootstrap_servers) as client:
        answer = await client.request(
            "api_versions", 3, client_software_name="raw", client_software_version="1"
        )
    newest = {int(api.api_key): api.max_version for api in answer.api_keys}[0]
    assert newest == VERSIONS[aged.version]


async def test_transactions(aged: KafkaCluster, committed: ReadCommitted) -> None:
    """Committed, aborted, with a group's offsets, and fenced."""
    aged.create_topic("in")
    aged.create_topic("out")
    async with Producer[Any, Any](aged.bootstrap_servers, transactional_id="tx") as old:
        assert old._transactions is not None
        assert old._transactions._manager.version_two is (aged.version not in OF_VERSION_1)
        for number in range(4):
            with contextlib.suppress(KeyError):
                async with old.transaction() as tx:
                    await tx.enqueue("out", b"%d" % number)
                    await tx.send_offsets({("in", 0): number}, "group")
                    if number % 2:
                        await tx.flush()
                        raise KeyError
        async with Producer[Any, Any](aged.bootstrap_servers, transactional_id="tx") as young:
            async with young.transaction() as tx:
                await tx.send("out", b"young")
            with pytest.raises((DeliveryError, ProducerFenced)):
                async with old.transaction() as tx:
                    await tx.send("out", b"late")
            with pytest.raises(ProducerFenced, match="has taken over"):
                await old.begin_transaction()
    assert await committed(aged, "out") == [b"0", b"2", b"young"]
    assert await committed_offset(aged, "group", "in") == 2


@pytest.mark.long
async def test_connections_that_the_broker_closes_when_idle_cost_nothing(
    aged: KafkaCluster,
) -> None:
    aged.create_topic("idle")
    async with Producer[Any, Any](aged.bootstrap_servers) as producer:
        assert (await producer.send("idle", b"before")).offset == 0
        async with asyncio.timeout(30):
            # Each of the broker's threads looks at its own connections, in its own time: that one
            # was closed says nothing of the others, and what is sent just then is sent again.
            while producer.metrics()["connection_count"] > 0:  # noqa: ASYNC110 there is no event
                await asyncio.sleep(0.05)
        assert (await producer.send("idle", b"after")).offset == 1
        metrics = producer.metrics()
        assert metrics["record_retry_total"] == metrics["record_error_total"] == 0
        assert metrics["connection_close_total"] > 0


@pytest.mark.long
async def test_retries_double_nothing(aged: KafkaCluster, read_log: Reader) -> None:
    """The answer is lost; the broker recognises what it has already."""
    from asyncproducer.testing.proxy import FaultPlan, FaultProxy, ProxyFault

    aged.create_topic("retries")
    plan = FaultPlan([ProxyFault(kind="cut_after", after=2, times=3)])
    async with (
        FaultProxy(aged.bootstrap_servers, plan) as proxy,
        Producer[Any, Any](proxy.bootstrap_servers) as producer,
    ):
        for n in range(10):
            await producer.send("retries", b"%d" % n)
        assert proxy.counts == {"cut_after": 3}
        assert producer.metrics()["record_retry_total"] == 3
    log = await read_log(aged, "retries")
    assert [record.value for record in log[0]] == [b"%d" % n for n in range(10)]
