"""A cluster that changes under a whole producer: topics, connections, names, addresses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from asyncproducer import BufferFull, DeliveryTimeout, Producer
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.network import MemoryLink, MemoryServer

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

#: Produce names topics by their ids from version 13 on.
BY_NAME = {0: (3, 12)}


def now() -> float:
    return asyncio.get_running_loop().time()


def values(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    return [record.value for record in cluster.records(topic, partition)]


def servers_of(network: MemoryNetwork) -> list[MemoryServer]:
    return list(network._servers.values())


# -- topics that are deleted and made again ----------------------------------------------------


@pytest.fixture(params=[None, BY_NAME], ids=["by id", "by name"])
async def topics_cluster(
    request: pytest.FixtureRequest, network: MemoryNetwork
) -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(
        brokers=2,
        topics={"t": 1, "t4": 4},
        network=network,
        auto_create_topics=False,
        request_versions=request.param,
    ) as cluster:
        yield cluster


async def test_a_record_that_waits_for_memory_while_its_topic_is_unknown_is_delivered(
    topics_cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    """Metadata drops a topic and has it again before there is room for the record."""
    async with Producer(
        topics_cluster.bootstrap_servers,
        connector=network,
        batch_size=1000,
        buffer_memory=1000,
        metadata_max_age_ms=50,
    ) as producer:
        await producer.warm_up("t", "t4")
        held = topics_cluster.inject("produce", hold=True)
        first = await producer.enqueue("t", b"1")
        await held.reached()
        second = asyncio.create_task(producer.send("t4", b"2", partition=0))
        await asyncio.sleep(0.01)
        dropped = topics_cluster.inject("metadata", error="UNKNOWN_TOPIC_OR_PARTITION", topic="t4")
        await dropped.reached()
        await asyncio.sleep(1)  # it is there again
        assert not second.done()
        held.release()
        began = now()
        await first
        await second
        assert now() < began + 1
    assert values(topics_cluster, "t4") == [b"2"]


def recreate(cluster: EmbeddedCluster, topic: str, partitions: int) -> None:
    cluster.delete_topic(topic)
    cluster.create_topic(topic, partitions=partitions)


async def test_a_topic_that_is_made_again_is_written_from_its_start(
    topics_cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    """No epoch is bumped: a broker takes any sequence of a producer that it does not know."""
    cluster = topics_cluster
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        for n in range(3):
            assert (await producer.send("t", b"old %d" % n)).offset == n
        recreate(cluster, "t", 1)
        for n in range(3):
            assert (await producer.send("t", b"new %d" % n)).offset == n
        assert producer.metrics()["record_error_total"] == 0
    assert values(cluster) == [b"new 0", b"new 1", b"new 2"]


async def test_what_is_under_way_when_its_topic_is_made_again_goes_into_the_new_one(
    topics_cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    cluster = topics_cluster
    async with Producer(cluster.bootstrap_servers, connector=network, batch_size=0) as producer:
        await producer.send("t", b"before")
        fault = cluster.inject(api="produce", hold=True)
        # The broker does the first one, and does not answer; others are in flight behind it.
        first = await producer.enqueue("t", b"first")
        deliveries = [await producer.enqueue("t", b"%d" % n) for n in range(20)]
        await fault.reached()
        assert values(cluster) == [b"before", b"first"]
        recreate(cluster, "t", 1)
        fault.release()
        assert (await first).offset == 1
        sent = [await delivery for delivery in deliveries]
    assert [int(value or b"") for value in values(cluster)] == list(range(20))
    assert [metadata.offset for metadata in sent] == list(range(20))


async def test_an_answer_about_the_old_topic_lets_nobody_overtake_in_the_new_one(
    network: MemoryNetwork,
) -> None:
    """The broker does not know the producer there, and would take any sequence first."""
    async with (
        EmbeddedCluster(brokers=2, topics={"t": 2}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers, connector=network, linger_ms=0, metadata_max_age_ms=100
        ) as producer,
    ):
        for partition in range(2):  # the second's broker is asked for metadata
            await producer.send("t", b"0", partition=partition)
        held = cluster.inject("produce", hold=True)
        sent = [await producer.enqueue("t", b"1", partition=0)]
        await held.reached()
        for value in (b"2", b"3"):
            sent.append(await producer.enqueue("t", value, partition=0))
            await asyncio.sleep(0.01)
        recreate(cluster, "t", 2)
        await asyncio.sleep(0.5)
        sent.append(await producer.enqueue("t", b"4", partition=0))
        await asyncio.sleep(0.01)
        held.release()
        await asyncio.gather(*sent)
        assert values(cluster) == [b"2", b"3", b"4"]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_leader_that_the_old_topic_had_is_not_asked_for_the_new_one(
    network: MemoryNetwork, idempotent: bool
) -> None:
    """The hint comes late, and its epoch is newer than those of the new topic."""
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 3}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            linger_ms=0,
            metadata_max_age_ms=1000,
            request_timeout_ms=3000,
            enable_idempotence=idempotent,
        ) as producer,
    ):
        for partition in range(3):
            await producer.send("t", b"0", partition=partition)
        for node in (2, 3, 2, 3, 2):
            cluster.move_leader("t", 0, node)
        held = cluster.inject("produce", delay=2.5, node=1)
        late = await producer.enqueue("t", b"1", partition=0)
        await held.reached()
        recreate(cluster, "t", 3)
        began = now()
        await late
        await producer.send("t", b"2", partition=0)
        assert now() - began < 5
        assert values(cluster) == [b"1", b"2"]


async def test_records_wait_for_a_topic_that_is_away_and_fail_when_it_stays_away(
    topics_cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    cluster = topics_cluster
    async with Producer(
        cluster.bootstrap_servers,
        connector=network,
        delivery_timeout_ms=20_000,
        request_timeout_ms=5_000,
    ) as producer:
        await producer.send("t", b"before")
        cluster.delete_topic("t")
        waiting = await producer.enqueue("t", b"waits")
        await asyncio.sleep(10)
        assert not waiting.done()
        cluster.create_topic("t", partitions=1)
        assert (await waiting).offset == 0
        cluster.delete_topic("t")
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t", b"never")
        assert caught.value.persisted == "no"
        # The other topic has not noticed.
        assert (await producer.send("t4", b"other", partition=0)).offset == 0


async def test_a_topic_that_comes_back_smaller_or_larger(
    topics_cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    """Records for partitions that are gone fail, in time; keys find those that are there."""
    cluster = topics_cluster
    async with Producer(
        cluster.bootstrap_servers,
        connector=network,
        delivery_timeout_ms=5_000,
        request_timeout_ms=1_000,
        max_block_ms=2_000,
    ) as producer:
        for partition in range(4):
            await producer.send("t4", b"old", partition=partition)
        recreate(cluster, "t4", 2)
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t4", b"lost its place", partition=3)
        assert caught.value.persisted == "no"
        assert len(await producer.partitions_for("t4")) == 2
        sent = await producer.send_many("t4", [b"%d" % n for n in range(100)])
        assert sent.acknowledged == 100
        recreate(cluster, "t4", 6)
        await producer.send("t4", b"v", partition=0)
        await producer.send("t4", b"v", partition=5)
    assert values(cluster, "t4", 5) == [b"v"]


# -- connections that die in silence -----------------------------------------------------------


async def test_connections_that_brokers_close_when_idle_are_made_again_without_a_retry(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t", "t4")
        for n in range(3):
            assert cluster.kill_connections(1) + cluster.kill_connections(2) > 0
            await asyncio.sleep(600)
            before = now()
            assert (await producer.send("t", b"%d" % n)).offset == n
            assert now() - before < 0.1
        metrics = producer.metrics()
        assert metrics["record_retry_total"] == metrics["record_error_total"] == 0


def half_open(link: MemoryLink) -> None:
    """As when a router in between has forgotten the connection: no end is told of it."""
    link.to_server.black_hole()
    link.to_client.black_hole()


@pytest.mark.parametrize("idle", [0, 100, 10_000], ids=["at once", "after a while", "after hours"])
async def test_a_half_open_connection_costs_a_request_timeout_and_no_record(
    cluster: EmbeddedCluster, network: MemoryNetwork, new_producer: New, idle: float
) -> None:
    """After hours it costs nothing: we have closed it ourselves when it was idle."""
    async with new_producer(request_timeout_ms=5_000) as producer:
        await producer.send("t", b"before")
        for link in network.links:
            half_open(link)
        await asyncio.sleep(idle)
        began = now()
        sent = await asyncio.gather(*(producer.send("t", b"%d" % n) for n in range(10)))
        took = now() - began
        assert took < 6
        assert (took > 4.9) is (idle < 1000)
    assert [metadata.offset for metadata in sent] == list(range(1, 11))
    assert values(cluster) == [b"before", *(b"%d" % n for n in range(10))]


async def test_a_half_open_connection_in_the_middle_of_a_stream_doubles_nothing(
    cluster: EmbeddedCluster, network: MemoryNetwork, new_producer: New
) -> None:
    """The answers are lost, the requests were done."""
    async with new_producer(request_timeout_ms=2_000, linger_ms=0, batch_size=0) as producer:
        await producer.warm_up("t")
        deliveries = []
        for n in range(100):
            deliveries.append(await producer.enqueue("t", b"%d" % n))
            if n == 50:
                for link in network.links:
                    link.to_client.black_hole()
            await asyncio.sleep(0.01)
        for delivery in deliveries:
            await delivery
    assert values(cluster) == [b"%d" % n for n in range(100)]


async def test_nothing_is_sent_to_a_brokers_new_address_behind_what_the_old_one_has(
    network: MemoryNetwork,
) -> None:
    """It knows the last five batches of a producer, and would not know the first of eleven."""
    async with (
        EmbeddedCluster(brokers=2, topics={"t": 2}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            linger_ms=0,
            metadata_max_age_ms=500,
            request_timeout_ms=5000,
        ) as producer,
    ):
        for partition in range(2):
            await producer.send("t", b"0", partition=partition)
        for link in network.links:
            if cluster.address(1).endswith(f":{link.server_address.port}"):
                link.to_client.stall()
        sent = []
        for number in range(1, 6):
            sent.append(await producer.enqueue("t", b"%d" % number, partition=0))
            await asyncio.sleep(0.01)
        await cluster.move_broker(1)
        await asyncio.sleep(1)
        for number in range(6, 12):
            sent.append(await producer.enqueue("t", b"%d" % number, partition=0))
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in sent)
        await asyncio.gather(*sent)
        assert values(cluster) == [b"%d" % number for number in range(12)]


# -- one of three ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hangs", "black hole", "refuses"])
async def test_one_broker_of_three_that_is_no_good_does_not_hold_up_the_others(
    network: MemoryNetwork, how: str
) -> None:
    random.seed(0)
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 3, "later": 3}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers, connector=network, request_timeout_ms=3_000
        ) as producer,
    ):
        for partition in range(3):
            await producer.send("t", b"before", partition=partition)
        bad = cluster.leader("t", 0)
        server = next(s for s in servers_of(network) if cluster.address(bad) == f"{s.address}")
        if how == "hangs":
            cluster.pause(bad)
        else:
            server.black_hole = how == "black hole"
            server.refuse = how == "refuses"
            for link in server.links:
                half_open(link) if server.black_hole else link.cut()
        stuck = [await producer.enqueue("t", b"stuck", partition=0) for _ in range(10)]
        began = now()
        count = 0
        while now() < began + 20:
            before = now()
            await producer.send("t", b"%d" % count, partition=1 + count % 2)
            assert now() - before < 0.05
            count += 1
            await asyncio.sleep(0.05)
        assert not any(delivery.done() for delivery in stuck)
        # Metadata of a topic that is new is found as well: at most one request is in vain.
        before = now()
        good = next(p for p in range(3) if cluster.leader("later", p) != bad)
        await producer.send("later", b"v", partition=good)
        assert now() - before < 4
        server.black_hole = server.refuse = False
        cluster.resume(bad)
        for delivery in stuck:
            await delivery
        assert producer.metrics()["record_error_total"] == 0
    assert values(cluster) == [b"before", *[b"stuck"] * 10]


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))  # whichever broker is asked first
async def test_a_frozen_broker_does_not_keep_a_new_topic_waiting(
    network: MemoryNetwork, bad: int, seed: int
) -> None:
    random.seed(seed)
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 3, "later": 3}, network=network) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        for partition in range(3):
            await producer.send("t", b"before", partition=partition)
        cluster.pause(bad)
        good = next(p for p in range(3) if cluster.leader("later", p) != bad)
        before = now()
        await producer.send("later", b"v", partition=good)
        assert now() - before < 1.5
        cluster.resume(bad)


async def test_brokers_whose_metadata_takes_seconds_are_heard_all_the_same(
    network: MemoryNetwork,
) -> None:
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 1, "u": 1, "v": 1}, network=network) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        await producer.send("t", b"")
        cluster.inject("metadata", delay=5.0, times=None)
        before, asked = now(), len(cluster.received("metadata"))
        await producer.send("u", b"")
        # 1, 2 and 4 seconds were too short: 8 are enough, and so they are from then on.
        assert 12 < now() - before < 13
        assert len(cluster.received("metadata")) == asked + 4
        before, asked = now(), len(cluster.received("metadata"))
        await producer.send("v", b"")
        assert 5 <= now() - before < 5.1
        assert len(cluster.received("metadata")) == asked + 1


async def test_a_broker_that_stands_still_does_not_take_the_room_of_the_others(
    network: MemoryNetwork,
) -> None:
    """More for it than there is memory: who has records for others goes on, all the time."""
    random.seed(0)
    buffer_memory = 1_000_000
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 6}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers, connector=network, buffer_memory=buffer_memory
        ) as producer,
    ):
        for partition in range(6):
            await producer.send("t", b"before", partition=partition)
        bad = cluster.leader("t", 0)
        stuck = [p for p in range(6) if cluster.leader("t", p) == bad]
        cluster.pause(bad)
        began = now()
        counts = [0] * 6

        async def flood(partition: int, number: int) -> None:
            while now() < began + 20:
                value = b"%d %0500d" % (number, counts[partition])
                await producer.enqueue("t", value, partition=partition)
                counts[partition] += 1
                if counts[partition] % 10 == 0:
                    await asyncio.sleep(0.05)

        async def lone(partition: int) -> None:
            while now() < began + 20:
                before = now()
                await producer.send("t", b"lone", partition=partition)
                assert now() - before < 0.1
                await asyncio.sleep(0.05)

        async def anywhere() -> None:
            """No partition and no key."""
            while now() < began + 20:
                before = now()
                delivery = await producer.enqueue("t", bytes(500))
                assert now() - before < 0.1
                if began + 15 < now() < began + 19:
                    assert delivery.partition not in stuck
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(flood(p, n)) for p in range(6) for n in range(3)]
        tasks += [asyncio.create_task(lone(p)) for p in range(6) if p not in stuck]
        tasks.append(asyncio.create_task(anywhere()))
        await asyncio.sleep(19)
        now_waiting = producer.health.waiting_senders
        assert now_waiting >= 3 * len(stuck)
        assert producer.health.buffered_bytes < buffer_memory
        with pytest.raises(BufferFull, match=f"broker {bad} has .* is kept for the others"):
            producer.send_nowait("t", bytes(500), partition=stuck[0])
        producer.send_nowait("t", b"", partition=next(p for p in range(6) if p not in stuck))
        before = list(counts)
        await asyncio.sleep(0.5)
        for partition in range(6):
            assert counts[partition] == before[partition] or partition not in stuck
        # 3 tasks, in 50 ms ten records of all or so, for 19.5 s.
        assert min(counts[p] for p in range(6) if p not in stuck) >= 10 * 380
        cluster.resume(bad)
        await asyncio.gather(*tasks)
        await producer.flush()
        assert producer.metrics()["record_error_total"] == 1  # that of send_nowait
        assert producer.health.buffered_bytes == 0
        assert [share.held for share in producer._pool._shares.values()] == [0, 0, 0]
        assert not producer._pool.everybody()
    for partition in stuck:
        sent = values(cluster, partition=partition)
        for number in (b"0 ", b"1 ", b"2 "):
            of_one = [int(v[2:]) for v in sent if v and v[:2] == number]
            assert len(of_one) > 10
            assert of_one == sorted(of_one)


@pytest.mark.parametrize("batch_max_bytes", [0, 1_000_000])
async def test_records_without_a_partition_pass_by_a_broker_that_stands_still(
    network: MemoryNetwork, batch_max_bytes: int
) -> None:
    """They are sent elsewhere, take nothing of what is left for that, and overtake nobody: also
    those whose batch is full, or begins, while others wait."""
    random.seed(0)
    async with (
        EmbeddedCluster(brokers=2, topics={"t": 2}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            buffer_memory=200_000,
            batch_max_bytes=batch_max_bytes,
        ) as producer,
    ):
        for partition in range(2):
            await producer.send("t", b"before", partition=partition)
        bad = cluster.leader("t", 0)
        cluster.pause(bad)
        stuck = [
            asyncio.create_task(producer.send("t", b"stuck%05d" % n + bytes(3000), partition=0))
            for n in range(100)
        ]
        await asyncio.sleep(0.1)
        assert producer.health.waiting_senders > 20
        others = [asyncio.create_task(producer.send("t", bytes(3000))) for _ in range(1000)]
        await asyncio.wait(others, timeout=5)
        assert {task.result().partition for task in others} == {1}
        assert producer.send_nowait("t", bytes(3000)).partition == 1
        assert not any(task.done() for task in stuck)
        cluster.resume(bad)
        await asyncio.gather(*stuck)
    assert [v[5:10] for v in values(cluster) if v and len(v) > 9] == [
        b"%05d" % n for n in range(100)
    ]


async def test_the_first_record_of_a_topic_that_does_not_wait_passes_by_as_well(
    network: MemoryNetwork,
) -> None:
    """Nobody waits for the broker that has its part: only this record would be too much."""
    topics = {f"t{number}": 2 for number in range(16)}
    async with (
        EmbeddedCluster(brokers=2, topics=topics, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            buffer_memory=200_000,
            batch_max_bytes=0,
            batch_size=1_000,
        ) as producer,
    ):
        for topic in topics:
            await producer.partitions_for(topic)
        for partition in range(2):
            await producer.send("t0", b"before", partition=partition)
        bad = cluster.leader("t0", 0)
        cluster.pause(bad)
        with suppress(BufferFull):
            while True:
                producer.send_nowait("t0", bytes(3000), partition=0)
        assert producer.health.waiting_senders == 0
        for topic in list(topics)[1:]:
            delivery = producer.send_nowait(topic, bytes(3000))
            assert cluster.leader(topic, delivery.partition) != bad
            await delivery
        cluster.resume(bad)


async def test_a_large_record_for_a_broker_that_stands_still_does_not_hold_up_the_others(
    network: MemoryNetwork,
) -> None:
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 3}, network=network) as cluster,
        Producer(cluster.bootstrap_servers, connector=network, buffer_memory=8_000_000) as producer,
    ):
        for partition in range(3):
            await producer.send("t", b"before", partition=partition)
        bad = cluster.leader("t", 0)
        cluster.pause(bad)
        large = [
            asyncio.create_task(producer.enqueue("t", bytes(1_000_000), partition=0))
            for _ in range(20)
        ]
        for number in range(100):
            before = now()
            await producer.send("t", b"%d" % number, partition=1 + number % 2)
            assert now() - before < 0.05
        assert producer.health.waiting_senders > 10
        cluster.resume(bad)
        await asyncio.gather(*large)


async def test_a_topic_that_is_gone_takes_nothing_from_the_only_broker(
    network: MemoryNetwork,
) -> None:
    """Its partitions have no leader: that is nobody to keep memory for."""
    async with (
        EmbeddedCluster(topics={"t": 1, "gone": 1}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            buffer_memory=100_000,
            batch_max_bytes=0,
            metadata_max_age_ms=1_000,
        ) as producer,
    ):
        await producer.send("gone", b"")
        await producer.send("t", b"")
        cluster.delete_topic("gone")
        await asyncio.sleep(5)
        cluster.pause(1)
        with suppress(BufferFull):
            while True:
                producer.send_nowait("t", bytes(10_000))
        assert producer.health.buffered_bytes > 90_000
        cluster.resume(1)


async def test_only_what_is_for_a_held_up_broker_does_not_linger(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(brokers=2, topics={"t": 2}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            buffer_memory=200_000,
            batch_max_bytes=0,
            linger_ms=1_000,
            adaptive_linger=False,
        ) as producer,
    ):
        for partition in range(2):
            await producer.send("t", b"before", partition=partition)
        cluster.pause(cluster.leader("t", 0))

        async def flood() -> None:
            for _ in range(300):
                await producer.enqueue("t", bytes(1000), partition=0)

        task = asyncio.create_task(flood())
        await asyncio.sleep(0.1)
        assert producer.health.waiting_senders == 1
        before = now()
        await producer.send("t", b"lingers", partition=1)
        assert now() - before == pytest.approx(1.0, abs=0.01)
        cluster.resume(cluster.leader("t", 0))
        await task


async def test_records_without_keys_avoid_a_broker_that_takes_nothing(
    network: MemoryNetwork,
) -> None:
    random.seed(0)
    async with (
        EmbeddedCluster(brokers=3, topics={"t": 3}, network=network) as cluster,
        Producer(
            cluster.bootstrap_servers,
            connector=network,
            request_timeout_ms=3_000,
            partitioner_availability_timeout_ms=1_000,
            batch_size=2_000,
        ) as producer,
    ):
        for partition in range(3):
            await producer.send("t", b"before", partition=partition)
        bad = cluster.leader("t", 0)
        cluster.pause(bad)
        began = now()
        late = []
        while now() < began + 60:
            delivery = await producer.enqueue("t", bytes(500))
            if now() > began + 10:
                late.append(delivery)
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        to_bad = [d for d in late if d.partition == 0]
        assert len(to_bad) < len(late) / 20
        assert all(d.done() for d in late if d.partition != 0)
        cluster.resume(bad)
        await producer.flush()
        assert producer.metrics()["record_error_total"] == 0


# -- names and addresses -----------------------------------------------------------------------


async def test_a_name_that_leads_elsewhere_is_looked_up_again(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(topics={"t": 1}, network=network, host="kafka") as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        for n, ip in enumerate(("10.9.0.1", "10.9.0.2", "10.9.0.3")):
            await producer.send("t", b"%d" % n)
            await cluster.stop_broker(1)
            waiting = await producer.enqueue("t", b"meanwhile")
            await asyncio.sleep(5)
            network.add_host("kafka", ip)
            await cluster.start_broker(1)
            await waiting
            assert network.attempts[-1].host == ip
    assert len(values(cluster)) == 6


async def test_a_name_that_nobody_knows_for_a_while_is_waited_for(
    network: MemoryNetwork,
) -> None:
    async with (
        EmbeddedCluster(topics={"t": 1}, network=network, host="kafka") as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        await producer.send("t", b"before")
        (ip,) = network.hosts.pop("kafka")
        cluster.kill_connections(1)
        waiting = await producer.enqueue("t", b"meanwhile")
        await asyncio.sleep(30)
        assert not waiting.done()
        network.add_host("kafka", ip)
        await waiting
    assert values(cluster) == [b"before", b"meanwhile"]


async def test_a_cluster_whose_brokers_all_moved_is_found_by_the_bootstrap_name(
    network: MemoryNetwork,
) -> None:
    """KIP-899: the known addresses are dead, and the name leads to the new ones."""
    async with (
        EmbeddedCluster(topics={"t": 1}, network=network, port=9092) as old,
        EmbeddedCluster(topics={"t": 1}, network=network, host="10.9.0.1", port=9092) as new,
    ):
        network.add_host("bootstrap", "127.0.0.1")
        async with Producer("bootstrap:9092", connector=network) as producer:
            await producer.send("t", b"old")
            network.add_host("bootstrap", "10.9.0.1")
            await old.stop_broker(1)
            before = now()
            assert (await producer.send("t", b"new")).offset == 0
            assert now() - before < 10
    assert (values(old), values(new)) == ([b"old"], [b"new"])


async def test_a_cluster_that_does_not_answer_any_more_is_left_for_the_bootstrap_name(
    network: MemoryNetwork,
) -> None:
    """KIP-1102: the brokers take connections, and no metadata comes for the trigger time."""
    async with (
        EmbeddedCluster(topics={"t": 1}, network=network, port=9092) as old,
        EmbeddedCluster(topics={"t": 1}, network=network, host="10.9.0.1", port=9092) as new,
    ):
        network.add_host("bootstrap", "127.0.0.1")
        async with Producer(
            "bootstrap:9092",
            connector=network,
            metadata_recovery_rebootstrap_trigger_ms=60_000,
            request_timeout_ms=10_000,
        ) as producer:
            await producer.send("t", b"old")
            network.add_host("bootstrap", "10.9.0.1")
            for api in ("produce", "metadata"):
                old.inject(api=api, no_answer=True, times=None)
            before = now()
            assert (await producer.send("t", b"new")).offset == 0
            assert 60 < now() - before < 90
    assert (values(old), values(new)) == ([b"old"], [b"new"])
