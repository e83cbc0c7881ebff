from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncproducer import ConnectionFailed, DeliveryTimeout, Producer
from asyncproducer.bench.proxy import delayed
from asyncproducer.testing import EmbeddedCluster, RawClient
from asyncproducer.testing.proxy import FaultPlan, FaultProxy, ProxyFault

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
async def proxy(cluster: EmbeddedCluster) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(cluster.address(1), latency=RTT / 2) as proxy:
        yield proxy


async def ask(client: RawClient) -> None:
    await client.request("init_producer_id", 2, **FIELDS)


def fault_of(kind: Any, **fields: Any) -> ProxyFault:
    return ProxyFault(kind=kind, **fields)


# -- without faults


async def test_an_answer_comes_a_round_trip_after_its_request(proxy: FaultProxy) -> None:
    now = asyncio.get_running_loop().time
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        for _ in range(2):
            before = now()
            await ask(client)
            assert now() - before == pytest.approx(RTT)


async def test_requests_that_are_sent_together_are_delayed_together(proxy: FaultProxy) -> None:
    now = asyncio.get_running_loop().time
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        before = now()
        sent = [client.send("init_producer_id", 2, **FIELDS) for _ in range(20)]
        for correlation_id in sent:  # in their order, or it raises
            await client.receive("init_producer_id", 2, correlation_id)
        assert now() - before == pytest.approx(RTT)


@pytest.mark.parametrize("version", [1, 9, 12])
async def test_metadata_leads_to_the_proxy_and_not_past_it(
    cluster: EmbeddedCluster, proxy: FaultProxy, version: int
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


@pytest.mark.parametrize("version", [3, 4])
async def test_a_coordinator_is_reached_through_the_proxy(
    cluster: EmbeddedCluster, proxy: FaultProxy, version: int
) -> None:
    asked = {"key": "id"} if version < 4 else {"coordinator_keys": ["id"]}
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        answer = await client.request("find_coordinator", version, key_type=1, **asked)
    told = answer if version < 4 else answer.coordinators[0]
    assert f"{told.host}:{told.port}" not in cluster.bootstrap_servers.split(",")


async def test_a_leader_that_a_produce_answer_names_is_reached_through_the_proxy(
    cluster: EmbeddedCluster,
) -> None:
    async with (
        FaultProxy(cluster.bootstrap_servers) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        await producer.send("t", b"v", partition=0)
        (there,) = {1, 2} - {cluster.leader("t", 0)}
        cluster.move_leader("t", 0, there)
        await producer.send("t", b"v", partition=0)
        cluster.inject(api="produce", no_answer=True, node=there)
        proxy.inject(fault_of("cut_before", node=there))
        await producer.send("t", b"v", partition=0)
        assert proxy.counts == {"cut_before": 1}


async def test_a_producer_reaches_all_brokers_through_it(
    cluster: EmbeddedCluster, proxy: FaultProxy
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
    cluster: EmbeddedCluster, proxy: FaultProxy
) -> None:
    async with await RawClient.connect(proxy.bootstrap_servers) as client:
        await ask(client)
        await cluster.stop_broker(1)
        with pytest.raises(asyncio.IncompleteReadError):
            await client.receive_frame()


async def test_acks_0_passes_without_answers(cluster: EmbeddedCluster, proxy: FaultProxy) -> None:
    async with Producer(proxy.bootstrap_servers, acks=0) as producer:
        for _ in range(3):
            await producer.send("t", b"v", partition=0)
            await producer.partitions_for("t")
    await asyncio.sleep(RTT)
    assert len(cluster.records("t", 0)) == 3


@pytest.mark.parametrize("servers", ["nowhere", "host:", ":9092", "host:port"])
def test_what_is_no_address_is_refused(servers: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        FaultProxy(servers)


def test_the_benchmarks_proxy_is_a_process_of_its_own() -> None:
    with delayed("127.0.0.1:1", 0) as servers:
        assert servers == "127.0.0.1:1"
    with delayed("127.0.0.1:1", 10) as servers:
        assert servers.startswith("127.0.0.1:")
        assert servers != "127.0.0.1:1"


# -- faults: what the producer makes of them, and what is in the log


@pytest.mark.parametrize(
    "kind", ["cut_before", "cut_after", "truncate_request", "truncate_answer", "refuse"]
)
async def test_a_connection_that_ends_costs_a_retry_and_nothing_else(
    cluster: EmbeddedCluster, kind: str
) -> None:
    plan = FaultPlan([fault_of(kind, after=1)])
    async with (
        FaultProxy(cluster.bootstrap_servers, plan) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        for n in range(4):
            await producer.send("t", b"%d" % n, partition=0)
        assert proxy.counts == {kind: 1}
        assert producer.metrics()["record_retry_total"] == 1
    assert [r.value for r in cluster.records("t", 0)] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("cut_before", 1),
        ("truncate_request", 1),
        ("cut_after", 2),
        ("truncate_answer", 2),
        ("delay", 1),
    ],
)
async def test_whether_the_broker_had_the_request_is_exact(
    cluster: EmbeddedCluster, kind: str, stored: int
) -> None:
    """Without idempotence, what is sent again is stored again."""
    async with (
        FaultProxy(cluster.bootstrap_servers, FaultPlan([fault_of(kind)])) as proxy,
        Producer(proxy.bootstrap_servers, acks=1, enable_idempotence=False) as producer,
    ):
        await producer.send("t", b"v", partition=0)
    assert len(cluster.records("t", 0)) == stored


async def test_a_delay_holds_up_the_answers_behind_it(cluster: EmbeddedCluster) -> None:
    plan = FaultPlan([fault_of("delay", api="init_producer_id", after=1, seconds=3)])
    now = asyncio.get_running_loop().time
    async with (
        FaultProxy(cluster.address(1), plan) as proxy,
        await RawClient.connect(proxy.bootstrap_servers) as client,
    ):
        before = now()
        sent = [client.send("init_producer_id", 2, **FIELDS) for _ in range(3)]
        ended = []
        for correlation_id in sent:
            await client.receive("init_producer_id", 2, correlation_id)
            ended.append(now() - before)
    assert ended == [0, pytest.approx(3), pytest.approx(3)]


async def test_a_throttled_connection_passes_so_many_bytes_a_second(
    cluster: EmbeddedCluster,
) -> None:
    plan = FaultPlan([fault_of("throttle", seconds=60, bytes_per_second=10_000)])
    now = asyncio.get_running_loop().time
    async with (
        FaultProxy(cluster.bootstrap_servers, plan) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        await producer.warm_up("t")
        before = now()
        await producer.send("t", b"v" * 50_000, partition=0)
        assert now() - before == pytest.approx(5, abs=0.5)
        await asyncio.sleep(60)
        before = now()
        await producer.send("t", b"v" * 50_000, partition=0)
        assert now() - before < 0.5


async def test_a_black_hole_is_one_until_its_end_and_its_connections_for_ever(
    cluster: EmbeddedCluster,
) -> None:
    plan = FaultPlan([fault_of("black_hole", api="init_producer_id", after=1, seconds=10)])
    async with (
        FaultProxy(cluster.address(1), plan) as proxy,
        await RawClient.connect(proxy.bootstrap_servers) as old,
    ):
        await ask(old)
        for client in (old, await RawClient.connect(proxy.bootstrap_servers)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20):
                    await ask(client)
            if client is not old:
                await client.close()
        async with await RawClient.connect(proxy.bootstrap_servers) as new:
            await ask(new)
    assert len(cluster.received("init_producer_id")) == 2


async def test_a_refused_broker_is_back_on_its_port_when_the_time_is_over(
    cluster: EmbeddedCluster,
) -> None:
    plan = FaultPlan([fault_of("refuse", api="init_producer_id", seconds=5)])
    async with FaultProxy(cluster.address(1), plan) as proxy:
        async with await RawClient.connect(proxy.bootstrap_servers) as client:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ask(client)
        with pytest.raises(ConnectionFailed):
            await RawClient.connect(proxy.bootstrap_servers)
        await asyncio.sleep(5.1)
        async with await RawClient.connect(proxy.bootstrap_servers) as client:
            await ask(client)


async def test_a_proxy_that_ends_while_it_refuses_leaves_nothing_behind(
    cluster: EmbeddedCluster,
) -> None:
    plan = FaultPlan([fault_of("refuse", api="init_producer_id", seconds=60)])
    async with (
        FaultProxy(cluster.address(1), plan) as proxy,
        await RawClient.connect(proxy.bootstrap_servers) as client,
    ):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ask(client)


async def test_a_fault_may_be_for_one_broker_only(cluster: EmbeddedCluster) -> None:
    node = cluster.leader("t", 1)
    plan = FaultPlan([fault_of("cut_before", node=node, times=None)])
    async with (
        FaultProxy(cluster.bootstrap_servers, plan) as proxy,
        Producer(proxy.bootstrap_servers, delivery_timeout_ms=2000, request_timeout_ms=1000) as p,
    ):
        await p.send("t", b"v", partition=0)
        with pytest.raises(DeliveryTimeout):
            await p.send("t", b"v", partition=1)
        assert {injected.node for injected in proxy.injected} == {node}


async def test_a_fault_of_an_answer_that_does_not_come_is_for_the_next_one(
    cluster: EmbeddedCluster,
) -> None:
    plan = FaultPlan([fault_of("cut_after")])
    cluster.inject(api="produce", drop="before")
    async with (
        FaultProxy(cluster.bootstrap_servers, plan) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        await producer.send("t", b"v")
        assert producer.metrics()["record_retry_total"] == 2
        assert proxy.counts == {"cut_after": 1}


async def test_a_connection_that_was_cut_is_forgotten(cluster: EmbeddedCluster) -> None:
    """Else the faults of the answers that it owes would never come."""
    plan = FaultPlan([fault_of("cut_after")])
    async with FaultProxy(cluster.bootstrap_servers, plan) as proxy:
        async with Producer(proxy.bootstrap_servers) as producer:
            await producer.send("t", b"v")
        assert proxy.counts == {"cut_after": 1}
        async with asyncio.timeout(10):
            await asyncio.gather(*proxy._tasks)
        assert not any(gate.connections for gate in proxy._gates.values())


async def test_who_waits_for_a_fault_hears_of_it(cluster: EmbeddedCluster) -> None:
    async with (
        FaultProxy(cluster.bootstrap_servers) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        await proxy.happened(0)
        waiting = [asyncio.create_task(proxy.happened(n)) for n in (1, 2, 2)]
        for ended in (1, 3):
            proxy.inject(fault_of("cut_before"))
            await producer.send("t", b"v")
            await asyncio.sleep(0)
            assert sum(task.done() for task in waiting) == ended


async def test_rules_can_be_taken_away(cluster: EmbeddedCluster) -> None:
    async with (
        FaultProxy(cluster.bootstrap_servers) as proxy,
        Producer(proxy.bootstrap_servers) as producer,
    ):
        proxy.inject(fault_of("cut_before", times=None))
        proxy.clear()
        await producer.send("t", b"v")
        assert proxy.injected == []


# -- plans


async def run_through(plan: FaultPlan, cluster: EmbeddedCluster) -> list[ProxyFault]:
    """The faults of 200 requests, one after the other over a single connection at a time."""
    async with FaultProxy(cluster.address(1), plan) as proxy:
        client = await RawClient.connect(proxy.bootstrap_servers)
        for _ in range(200):
            try:
                await ask(client)
            except (ConnectionError, asyncio.IncompleteReadError):
                await client.close()
                client = await RawClient.connect(proxy.bootstrap_servers)
        await client.close()
        replay = proxy.replay()
    assert list(replay.faults) == [injected.fault for injected in proxy.injected]
    return list(replay.faults)


async def test_the_same_seed_meets_the_same_requests_another_one_others(
    cluster: EmbeddedCluster,
) -> None:
    rules = [
        fault_of("cut_before", api="init_producer_id", chance=0.05, times=None),
        fault_of("cut_after", api=None, chance=0.05, times=3),
    ]
    first = await run_through(FaultPlan(rules, seed=1), cluster)
    assert len(first) > 5
    assert await run_through(FaultPlan(rules, seed=1), cluster) == first
    assert await run_through(FaultPlan(rules, seed=2), cluster) != first
    # What has happened, as a plan without chance.
    assert all(fault.chance == 1 and fault.times == 1 for fault in first)
    assert await run_through(FaultPlan(first, seed=9), cluster) == first


def test_a_plan_is_text() -> None:
    plan = FaultPlan([fault_of("delay", seconds=0.5, times=None), fault_of("cut_after")], seed=7)
    assert json.loads(plan.to_json()) == {
        "seed": 7,
        "faults": [{"kind": "delay", "times": None, "seconds": 0.5}, {"kind": "cut_after"}],
    }
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert FaultPlan.from_json("{}") == FaultPlan()


def test_the_mixed_plan_has_every_kind_within_a_dozen_produce_requests() -> None:
    plan = FaultPlan.mixed(3)
    assert plan.seed == 3
    certain = [f for f in plan.faults if (f.api, f.chance, f.times) == ("produce", 1.0, 1)]
    assert sorted(f.after for f in certain) == list(range(8))
    assert len({fault.kind for fault in certain}) == 8
    # Later ones come by chance, but for the one that costs half a minute each time.
    assert {f.kind for f in plan.faults if f.chance < 1} == {f.kind for f in certain} - {
        "black_hole"
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "Expecting value"),
        ("[]", "a plan is an object"),
        ('{"rules": []}', "a plan is an object"),
        ('{"faults": {}}', '"faults" must be a list'),
        ('{"faults": [{}]}', 'fault 0: it must be an object with at least a "kind"'),
        ('{"faults": [7]}', "fault 0: it must be an object"),
        ('{"faults": [{"kind": "cut"}]}', "fault 0: kind='cut': it must be one of cut_before"),
        ('{"faults": [{"kind": "delay", "second": 1}]}', "fault 0: field='second': it must be"),
        ('{"faults": [{"kind": "delay", "api": "fetch"}]}', "fault 0: api='fetch'"),
        ('{"faults": [{"kind": "delay", "seconds": -1}]}', "seconds=-1: .* 0 or more"),
        ('{"faults": [{"kind": "delay", "chance": 2}]}', "chance=2: it must be a number, 0 to 1"),
        ('{"faults": [{"kind": "delay", "times": 1.5}]}', "times=1.5: it must be a whole number"),
        ('{"faults": [{"kind": "delay", "after": null}]}', "after=None: it must be"),
        ('{"faults": [{"kind": "delay", "node": true}]}', "node=True: it must be a whole"),
        ('{"seed": "x"}', "seed='x': it must be a whole number"),
    ],
)
def test_a_plan_that_is_none_says_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FaultPlan.from_json(text)
