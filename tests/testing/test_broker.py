from __future__ import annotations

import asyncio
import errno
import gc
import logging
import random
import socket
import uuid
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kio.index import load_response_schema

from asyncproducer.errors import ConnectionFailed, ErrorCode
from asyncproducer.testing import messages
from asyncproducer.testing.batches import (
    decode_batch,
    encode_batch,
    read_header,
    split_batches,
    with_header,
)
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.faults import BatchSummary
from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.messages import Message
from asyncproducer.testing.network import MemoryNetwork
from asyncproducer.testing.raw_client import RawClient, encode_request

pytestmark = pytest.mark.virtual_time

T0 = 1_700_000_000_000


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
async def cluster(network: MemoryNetwork) -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(3, topics={"t": 3}, network=network, start_time_ms=T0) as cluster:
        yield cluster


async def connect(cluster: EmbeddedCluster, node: int = 1) -> RawClient:
    return await RawClient.connect(cluster.address(node), cluster.connector)


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[RawClient]:
    async with await connect(cluster) as client:
        yield client


def now() -> float:
    return asyncio.get_running_loop().time()


def batch(*values: bytes, timestamp: int = T0, **options: Any) -> bytes:
    records = [(b"k", value) for value in values or (b"v",)]
    return encode_batch(records, timestamps=[timestamp] * len(records), **options)


def produce_fields(
    records: bytes | None,
    *,
    topic: str = "t",
    partition: int = 0,
    acks: int = -1,
    transactional_id: str | None = None,
) -> dict[str, Any]:
    return {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout": 1000,
        "topic_data": [
            {"name": topic, "partition_data": [{"index": partition, "records": records}]}
        ],
    }


async def produce(
    client: RawClient, records: bytes | None = None, *, version: int = 12, **options: Any
) -> Message:
    """The whole response; `records` is one small batch by default."""
    fields = produce_fields(batch() if records is None else records, **options)
    return await client.request("produce", version, **fields)


def only(response: Message) -> Message:
    """A produce response's only partition."""
    ((partition,),) = (topic.partition_responses for topic in response.responses)
    return partition


async def topic(client: RawClient, name: str = "t", *, version: int = 12) -> Message:
    return (await metadata(client, name, version=version)).topics[0]


async def metadata(client: RawClient, name: str = "t", *, version: int = 12) -> Message:
    return await client.request(
        "metadata",
        version,
        topics=[{"name": name, "topic_id": None}],
        allow_auto_topic_creation=True,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )


def fetch_fields(
    *partitions: tuple[int, int],
    name: str = "t",
    topic_id: uuid.UUID | None = None,
    max_wait: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 10**6,
    partition_max_bytes: int = 10**6,
    leader_epoch: int = -1,
    session_id: int = 0,
) -> dict[str, Any]:
    """`partitions` are pairs of partition and offset."""
    return {
        "max_wait": max_wait,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "session_id": session_id,
        "session_epoch": -1,
        "topics": [
            {
                "topic": name,
                "topic_id": topic_id,
                "partitions": [
                    {
                        "partition": partition,
                        "fetch_offset": offset,
                        "partition_max_bytes": partition_max_bytes,
                        "current_leader_epoch": leader_epoch,
                    }
                    for partition, offset in partitions or [(0, 0)]
                ],
            }
        ],
        "forgotten_topics_data": [],
        "rack_id": "",
    }


def fetched(response: Message) -> list[Message]:
    return [partition for found in response.responses for partition in found.partitions]


def values(records: bytes) -> list[bytes | None]:
    return [record.value for data in split_batches(records) for record in decode_batch(data)]


async def assert_closed(client: RawClient) -> None:
    try:
        assert await client.reader.read() == b""
    except ConnectionResetError:
        pass


# -- the cluster


async def test_a_cluster_has_addresses_when_it_runs() -> None:
    cluster = EmbeddedCluster(2)
    with pytest.raises(RuntimeError, match="start"):
        _ = cluster.bootstrap_servers
    async with cluster:
        first, second = cluster.bootstrap_servers.split(",")
        assert (first, second) == (cluster.address(1), cluster.address(2))
        assert cluster.connector is None
        assert cluster.node_ids == [1, 2]
        async with await RawClient.connect(second) as client:
            response = await metadata(client)
            addresses = {f"{b.host}:{b.port}" for b in response.brokers}
            assert addresses == {first, second}
            assert response.cluster_id == cluster.cluster_id
    with pytest.raises(ConnectionFailed):
        await RawClient.connect(second)
    await cluster.close()


async def test_an_ipv6_address_has_brackets(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(network=network, host="::1") as cluster:
        assert cluster.bootstrap_servers.startswith("[::1]:")
        async with await connect(cluster) as client:
            assert (await metadata(client)).brokers[0].host == "::1"


async def test_a_cluster_starts_as_a_whole_or_not_at_all(network: MemoryNetwork) -> None:
    taken = network.listen("127.0.0.1", 49153, asyncio.Protocol)
    cluster = EmbeddedCluster(2, network=network)
    with pytest.raises(OSError) as raised:
        await cluster.start()
    assert raised.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionFailed):
        await connect(cluster)
    taken.close()
    await cluster.start()  # and it can be tried again
    await cluster.close()


async def test_a_cluster_can_be_told_its_ports(network: MemoryNetwork) -> None:
    """So that somebody who was told them before finds it there."""
    async with EmbeddedCluster(3, port=9092, network=network) as cluster:
        assert cluster.bootstrap_servers == "127.0.0.1:9092,127.0.0.1:9093,127.0.0.1:9094"
        async with await connect(cluster, 3) as client:
            ports = [broker.port for broker in (await metadata(client)).brokers]
    assert ports == [9092, 9093, 9094]


@pytest.mark.parametrize(("brokers", "port"), [(1, -1), (1, 65536), (2, 65535)])
def test_ports_that_do_not_exist_are_refused(brokers: int, port: int) -> None:
    with pytest.raises(ValueError, match=f"port={port}"):
        EmbeddedCluster(brokers, port=port)
    assert EmbeddedCluster(brokers, port=65536 - brokers).node_ids


def test_a_cluster_has_a_broker() -> None:
    with pytest.raises(ValueError, match="brokers=0"):
        EmbeddedCluster(0)


async def test_records_can_be_looked_at_after_the_end(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(network=network, topics={"t": 2}, start_time_ms=T0) as cluster,
        await connect(cluster) as client,
    ):
        await produce(client, batch(b"a"))
        await produce(client, batch(b"b"), partition=1)
        await produce(client, batch(b"c"))
    assert [r.value for r in cluster.records("t")] == [b"a", b"c", b"b"]
    assert [r.value for r in cluster.records("t", 1)] == [b"b"]
    assert [decode_batch(data)[0].offset for data in cluster.batches("t", 0)] == [0, 1]
    assert (cluster.end_offset("t", 0), cluster.end_offset("t", 1)) == (2, 1)
    with pytest.raises(ValueError, match="no topic unknown"):
        cluster.records("unknown")


async def test_deleted_records_and_forgotten_producers(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    for sequence in range(3):
        data = batch(producer_id=7, producer_epoch=0, base_sequence=sequence)
        await produce(client, data)
    cluster.delete_records("t", 0, 2)
    assert [r.offset for r in cluster.records("t", 0)] == [2]
    gap = batch(producer_id=7, producer_epoch=0, base_sequence=9)
    answer = only(await produce(client, gap))
    assert answer.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert answer.log_start_offset == 2
    cluster.forget_producers("t", 0)
    assert only(await produce(client, gap)).error_code == ErrorCode.NONE


async def test_options_are_the_topics_defaults(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(
        network=network,
        topics={"t": 1},
        default_partitions=5,
        max_message_bytes=100,
        message_timestamp_type="LogAppendTime",
        start_time_ms=T0,
    ) as cluster:
        cluster.create_topic("u", configs={"max.message.bytes": "2000"})
        async with await connect(cluster) as client:
            assert len((await topic(client, "u")).partitions) == 5
            answer = only(await produce(client, batch(b"x" * 100)))
            assert answer.error_code == ErrorCode.MESSAGE_TOO_LARGE
            answer = only(await produce(client, batch(b"x" * 100), topic="u"))
            assert answer.error_code == ErrorCode.NONE
            assert answer.log_append_time.timestamp() * 1000 == T0


async def test_timestamp_types_by_topic(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(
            network=network,
            topics={"t": 1, "u": 1},
            message_timestamp_type={"u": "LogAppendTime"},
            start_time_ms=T0,
        ) as cluster,
        await connect(cluster) as client,
    ):
        await asyncio.sleep(2.5)
        assert only(await produce(client)).log_append_time is None
        # The clock is the loop's.
        answer = only(await produce(client, topic="u"))
        assert answer.log_append_time.timestamp() * 1000 == T0 + 2500


async def test_the_clock_is_the_real_one_unless_given(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(
            network=network, topics={"t": 1}, message_timestamp_type="LogAppendTime"
        ) as cluster,
        await connect(cluster) as client,
    ):
        answer = only(await produce(client))
        assert answer.log_append_time.year >= 2026


async def test_topics_are_not_created_if_that_is_off(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(network=network, auto_create_topics=False) as cluster,
        await connect(cluster) as client,
    ):
        for _ in range(2):
            code = (await topic(client)).error_code
            assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_metadata_before_v4_always_creates(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(network=network) as cluster, await connect(cluster) as client:
        await topic(client, version=1)
        assert (await topic(client, version=1)).error_code == ErrorCode.NONE


async def test_topics_can_be_created_grown_and_deleted_by_the_test(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    before = (await topic(client)).topic_id
    cluster.add_partitions("t", 4)
    assert len((await topic(client)).partitions) == 4
    cluster.delete_topic("t")
    with pytest.raises(ValueError, match="no topic t"):
        cluster.end_offset("t", 0)
    answer = only(await produce(client))
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    cluster.create_topic("t", partitions=1)
    assert (await topic(client)).topic_id != before
    with pytest.raises(ValueError, match="exists"):
        cluster.create_topic("t")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda kit: kit.create_topic("t"), "topic t already exists"),
        (lambda kit: kit.create_topic("a b"), "a topic's name has"),
        (lambda kit: kit.create_topic("u", partitions=0), "at least one partition"),
        (lambda kit: kit.create_topic("u", replication=5), "replication factor 5"),
        (lambda kit: kit.create_topic("u", configs={"bogus": "1"}), "unknown topic option bogus"),
        (lambda kit: kit.add_partitions("t", 1), "2"),
        (lambda kit: kit.delete_topic("u"), "no topic u"),
        (lambda kit: kit.records("u"), "no topic u"),
        (lambda kit: kit.leader("t", 7), "no partition 7 of topic t"),
        (lambda kit: kit.move_leader("t", 7, -1), "no partition 7 of topic t"),
        (lambda kit: EmbeddedCluster(topics={"a b": 1}), "a topic's name has"),
    ],
)
def test_what_cannot_be_is_a_value_error(
    call: Callable[[EmbeddedCluster], object], text: str
) -> None:
    """A test need not know what the brokers answer to a client in this case."""
    with pytest.raises(ValueError, match=text):
        call(EmbeddedCluster(topics={"t": 2}))


async def test_finalized_features_are_told(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(
            network=network, finalized_features={"transaction.version": 2, "off": 0}
        ) as cluster,
        await connect(cluster) as client,
    ):
        response = await client.request(
            "api_versions", 4, client_software_name="a", client_software_version="1"
        )
    features = {f.name: f.max_version_level for f in response.finalized_features}
    assert features == {"transaction.version": 2}
    assert response.finalized_features_epoch >= 0
    assert {f.name for f in response.supported_features} == {"transaction.version", "off"}


async def test_an_older_broker_can_be_played(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(
        network=network, topics={"t": 1}, request_versions={0: (3, 8), 18: (0, 2), 22: None}
    ) as cluster:
        async with await connect(cluster) as client:
            response = await client.request("api_versions", 2)
            ranges = {a.api_key: (a.min_version, a.max_version) for a in response.api_keys}
            assert (ranges[0], ranges[18], 22 in ranges) == ((3, 8), (0, 2), False)
            assert ranges[3] == (0, 13)
            # Not v3, although there is a v3: the answer is in v0.
            fields = {"client_software_name": "a", "client_software_version": "1"}
            client.writer.write(encode_request("api_versions", 3, fields, correlation_id=7))
            response = await client.receive("api_versions", 0, 7)
            assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
            assert response.api_keys[0].max_version == 2
            assert only(await produce(client, version=8)).error_code == ErrorCode.NONE
            client.send("produce", 9, **produce_fields(batch()))
            await assert_closed(client)
        async with await connect(cluster) as client:
            client.send("init_producer_id", 0, transactional_id=None, transaction_timeout=1)
            await assert_closed(client)


@pytest.mark.parametrize("versions", [{999: (0, 1)}, {0: (3, 99)}, {0: (9, 8)}, {1: (0, 4)}])
def test_versions_that_cannot_be_played_are_refused(versions: dict[int, tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="request_versions"):
        EmbeddedCluster(request_versions=versions)


async def test_runs_with_the_same_seed_are_the_same() -> None:
    async def run(seed: int) -> list[bytes]:
        network = MemoryNetwork(latency=0.01)
        async with EmbeddedCluster(
            2, network=network, topics={"t": 1}, seed=seed, start_time_ms=T0
        ) as cluster:
            cluster.inject("produce", corrupt="garbage")
            async with await connect(cluster) as client:
                for api, version, fields in (
                    ("metadata", 1, {"topics": None}),
                    ("produce", 9, produce_fields(batch())),
                    ("produce", 9, produce_fields(batch())),
                ):
                    client.send(api, version, **fields)
                return [await client.receive_frame() for _ in range(3)]

    assert await run(1) == await run(1) != await run(2)


# -- brokers that move, stop and hang


async def test_the_old_leader_names_the_new_one(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    """KIP-951"""
    cluster.move_leader("t", 0, 3)
    assert (cluster.leader("t", 0), cluster.leader_epoch("t", 0)) == (3, 1)
    response = await produce(client)
    answer = only(response)
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (answer.current_leader.leader_id, answer.current_leader.leader_epoch) == (3, 1)
    (endpoint,) = response.node_endpoints
    assert endpoint.node_id == 3
    assert f"{endpoint.host}:{endpoint.port}" == cluster.address(3)
    old = await produce(client, version=9)
    assert only(old).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    async with await connect(cluster, 3) as other:
        assert only(await produce(other)).error_code == ErrorCode.NONE
    assert decode_batch(cluster.batches("t", 0)[0])
    assert (await topic(client)).partitions[0].leader_epoch == 1


async def test_a_leader_that_is_gone_has_no_address(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.move_leader("t", 0, -1)
    response = await produce(client)
    assert only(response).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert only(response).current_leader.leader_id == -1
    assert response.node_endpoints == ()
    partition = (await topic(client)).partitions[0]
    assert (partition.error_code, partition.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)


async def test_a_stopped_broker_is_gone_and_another_one_leads(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    address = cluster.address(1)
    cluster.inject("metadata", hold=True)
    client.send("metadata", 1, topics=None)
    await asyncio.sleep(1)
    await cluster.stop_broker(1)
    await assert_closed(client)
    with pytest.raises(ConnectionFailed):
        await connect(cluster, 1)
    async with await connect(cluster, 2) as other:
        response = await metadata(other)
        assert [node.node_id for node in response.brokers] == [2, 3]
        assert response.controller_id == 2
        found = response.topics[0].partitions[0]
        assert (found.leader_id, found.leader_epoch) == (2, 1)
        assert (found.isr_nodes, found.offline_replicas) == ((2, 3), (1,))
        await cluster.start_broker(1)
        await cluster.start_broker(1)
        response = await metadata(other)
        assert [node.node_id for node in response.brokers] == [1, 2, 3]
        assert response.topics[0].partitions[0].leader_id == 2
    assert cluster.address(1) == address
    async with await connect(cluster, 1) as again:
        assert (await topic(again)).error_code == ErrorCode.NONE


async def test_a_broker_on_tcp_comes_back_on_its_port() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        address = cluster.address(1)
        client = await connect(cluster)
        await cluster.stop_broker(1)
        await assert_closed(client)
        await client.close()
        await cluster.start_broker(1)
        assert cluster.address(1) == address
        async with await connect(cluster) as client:
            assert (await topic(client)).error_code == ErrorCode.NONE


async def moves(cluster: EmbeddedCluster) -> None:
    before = cluster.address(1)
    async with await connect(cluster) as client:
        await cluster.move_broker(1)
        assert cluster.address(1) != before
        # The old connection goes on, and hears of the new address.
        (found,) = (await metadata(client)).brokers
        assert f"{found.host}:{found.port}" == cluster.address(1)
        with pytest.raises(ConnectionFailed):
            await RawClient.connect(before, cluster.connector)
        async with await connect(cluster) as other:
            assert (await topic(other)).error_code == ErrorCode.NONE
    # There it stays when it is started again.
    address = cluster.address(1)
    await cluster.stop_broker(1)
    with pytest.raises(ValueError, match="broker 1 does not run"):
        await cluster.move_broker(1)
    await cluster.start_broker(1)
    assert cluster.address(1) == address
    async with await connect(cluster) as client:
        assert (await topic(client)).error_code == ErrorCode.NONE


async def test_a_broker_that_moves_keeps_its_connections(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(topics={"t": 1}, network=network) as cluster:
        await moves(cluster)


async def test_a_broker_on_tcp_moves() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        await moves(cluster)


async def test_too_few_replicas_in_sync(cluster: EmbeddedCluster, client: RawClient) -> None:
    cluster.create_topic("u", partitions=1, configs={"min.insync.replicas": "2"})
    assert only(await produce(client, topic="u")).error_code == ErrorCode.NONE
    await cluster.stop_broker(2)
    await cluster.stop_broker(3)
    answer = only(await produce(client, topic="u"))
    assert answer.error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert only(await produce(client, topic="u", acks=1)).error_code == ErrorCode.NONE


async def test_killed_connections_lose_what_is_not_processed(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", hold=True)
    client.send("produce", 12, **produce_fields(batch()))
    client.send("produce", 12, **produce_fields(batch()))
    async with await connect(cluster) as other:
        await asyncio.sleep(1)
        assert cluster.connection_count(1) == 2
        assert cluster.kill_connections(1) == 2
        await assert_closed(client)
        await assert_closed(other)
    assert cluster.connection_count(1) == 0
    assert cluster.end_offset("t", 0) == 1
    async with await connect(cluster) as again:
        assert only(await produce(again)).base_offset == 1


async def test_a_paused_broker_takes_requests_and_answers_later(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", delay=1)
    delayed = client.send("produce", 12, **produce_fields(batch()))
    await asyncio.sleep(0.5)
    cluster.pause(1)
    later = client.send("metadata", 1, topics=None)
    async with await connect(cluster) as other:  # the system accepts for it
        newcomer = other.send("metadata", 1, topics=None)
        await asyncio.sleep(1000)
        assert cluster.received("metadata") == []
        cluster.resume(1)
        await client.receive("produce", 12, delayed)
        await client.receive("metadata", 1, later)
        await other.receive("metadata", 1, newcomer)
    assert now() == 1000.5
    assert cluster.leader("t", 0) == 1


async def test_a_paused_broker_can_be_stopped(cluster: EmbeddedCluster, client: RawClient) -> None:
    cluster.pause(1)
    client.send("metadata", 1, topics=None)
    await asyncio.sleep(1)
    await cluster.stop_broker(1)
    await assert_closed(client)
    await cluster.start_broker(1)
    async with await connect(cluster) as again:
        assert (await topic(again)).error_code == ErrorCode.NONE


async def test_a_connection_that_comes_with_the_end_is_dropped() -> None:
    network = MemoryNetwork()
    cluster = EmbeddedCluster(network=network)
    await cluster.start()
    # Accepted in the turn in which the broker stops, and told to it in a later one.
    network.on_link = lambda _: closing.append(asyncio.ensure_future(cluster.close()))
    closing: list[asyncio.Future[None]] = []
    client = await connect(cluster)
    await asyncio.gather(*closing)
    await assert_closed(client)
    await client.close()
    assert cluster.connection_count(1) == 0


@pytest.mark.parametrize("call", ["pause", "resume", "kill_connections", "connection_count"])
def test_an_unknown_broker_is_a_mistake(call: str) -> None:
    with pytest.raises(ValueError, match=r"no broker 4, only \[1\]"):
        getattr(EmbeddedCluster(), call)(4)


# -- connections


async def test_requests_may_come_in_pieces_and_together(
    cluster: EmbeddedCluster, network: MemoryNetwork, client: RawClient
) -> None:
    (link,) = network.links
    link.to_server.split(1)
    frames = b"".join(
        encode_request("metadata", 1, {"topics": []}, correlation_id=i) for i in range(3)
    )
    client.writer.write(frames)
    for correlation_id in range(3):
        await client.receive("metadata", 1, correlation_id)
    link.to_server.split()
    client.writer.write(frames)
    for correlation_id in range(3):
        await client.receive("metadata", 1, correlation_id)


async def test_a_request_may_be_as_large_as_the_limit_and_no_larger(
    network: MemoryNetwork,
) -> None:
    frame = encode_request("produce", 9, produce_fields(batch(b"x" * 500)), correlation_id=3)
    for limit, fits in ((len(frame) - 4, True), (len(frame) - 5, False)):
        async with (
            EmbeddedCluster(network=network, topics={"t": 1}, max_request_bytes=limit) as cluster,
            await connect(cluster) as client,
        ):
            client.writer.write(frame)
            if fits:
                await client.receive("produce", 9, 3)
            else:
                await assert_closed(client)


async def test_a_broker_reads_ahead_only_so_far(
    cluster: EmbeddedCluster, network: MemoryNetwork, client: RawClient
) -> None:
    fault = cluster.inject("produce", hold=True)
    frame = encode_request("produce", 9, produce_fields(batch(b"x" * 900_000)), correlation_id=5)
    for _ in range(12):
        client.writer.write(frame)
    await asyncio.sleep(1)
    waiting = client.writer.transport.get_write_buffer_size()
    assert len(frame) < waiting < 8 * len(frame)
    fault.release()
    for _ in range(12):
        await client.receive("produce", 9, 5)
    assert cluster.end_offset("t", 0) == 12


async def test_a_client_that_does_not_read_holds_up_only_itself(
    cluster: EmbeddedCluster, network: MemoryNetwork, client: RawClient
) -> None:
    await produce(client, batch(b"x" * 900_000))
    (link,) = network.links
    link.to_client.stall()
    for _ in range(8):
        client.send("fetch", 4, **fetch_fields())
    await asyncio.sleep(1)
    assert len(cluster.received("fetch")) < 3
    async with await connect(cluster) as other:
        assert (await topic(other)).error_code == ErrorCode.NONE
    link.to_client.resume()
    for correlation_id in range(2, 10):
        response = await client.receive("fetch", 4, correlation_id)
        assert len(fetched(response)[0].records) > 900_000


@pytest.mark.parametrize("turns", range(6))
def test_who_is_accepted_when_the_cluster_closes_is_not_left_open(turns: int) -> None:
    async def scenario() -> None:
        cluster = EmbeddedCluster()
        await cluster.start()
        host, port = cluster.bootstrap_servers.split(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(20)]
        for _ in range(turns):  # in one of which the loop accepts them
            await asyncio.sleep(0)
        await cluster.close()
        for client in clients:
            client.close()

    loop = asyncio.new_event_loop()  # asyncio.run would end what is left itself
    loop.run_until_complete(scenario())
    loop.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert caught == []


async def test_a_fault_of_the_broker_itself_closes_the_connection_and_is_logged(
    cluster: EmbeddedCluster,
    client: RawClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(APIS, 3, APIS[3]._replace(handle=broken))
    client.send("metadata", 1, topics=None)
    await assert_closed(client)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.name == "asyncproducer.testing.broker"
    assert record.exc_info is not None
    async with await connect(cluster) as other:
        assert only(await produce(other)).error_code == ErrorCode.NONE


async def test_a_malformed_request_is_no_error_of_the_broker(
    cluster: EmbeddedCluster, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    good = encode_request("metadata", 1, {"topics": []})
    client.writer.write(good[:3] + bytes([good[3] - 1]) + good[4:-1])  # a byte is missing
    client.writer.write(good)
    await assert_closed(client)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert cluster.requests == []


WHO = {"transactional_id": "x", "producer_id": 1000, "producer_epoch": 0}
OFFSETS = {
    "name": "t",
    "partitions": [{"partition_index": 0, "committed_offset": 1, "committed_metadata": None}],
}
TRANSACTIONAL_REQUESTS: dict[str, dict[str, Any]] = {
    "add_partitions_to_txn": {f"v3_and_below_{name}": value for name, value in WHO.items()}
    | {"v3_and_below_topics": [{"name": "t", "partitions": [0, 1]}]},
    "add_offsets_to_txn": WHO | {"group_id": "g"},
    "txn_offset_commit": WHO | {"group_id": "g", "topics": [OFFSETS]},
    "end_txn": WHO | {"committed": True},
    "offset_fetch": {
        "groups": [{"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}]
    },
}


@pytest.mark.parametrize("seed", range(6))
async def test_damaged_requests_do_no_harm(
    cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Each is answered or closes its connection, and the broker has no error of its own."""
    rng = random.Random(seed)
    names = {"topics": [{"name": "t", "topic_id": None}], "include_topic_authorized_operations": 0}
    frames = [
        encode_request("produce", 9, produce_fields(batch(b"a", b"b"))),
        encode_request("produce", 3, produce_fields(batch())),
        encode_request("fetch", 12, fetch_fields()),
        encode_request("metadata", 12, names),
        encode_request("find_coordinator", 4, {"coordinator_keys": ["a"]}),
        encode_request("init_producer_id", 4, {"transactional_id": "x", "transaction_timeout": 1}),
        encode_request("delete_topics", 6, {"topics": [{"topic_id": None}], "timeout": 1}),
        encode_request("add_partitions_to_txn", 3, TRANSACTIONAL_REQUESTS["add_partitions_to_txn"]),
        encode_request("add_offsets_to_txn", 3, TRANSACTIONAL_REQUESTS["add_offsets_to_txn"]),
        encode_request("txn_offset_commit", 5, TRANSACTIONAL_REQUESTS["txn_offset_commit"]),
        encode_request("end_txn", 5, TRANSACTIONAL_REQUESTS["end_txn"]),
        encode_request("offset_fetch", 8, TRANSACTIONAL_REQUESTS["offset_fetch"]),
        encode_request("describe_transactions", 0, {"transactional_ids": ["x"]}),
    ]
    for number in range(200):
        damaged = bytearray(frames[number % len(frames)])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(8, len(damaged))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        async with await connect(cluster) as client:
            client.writer.write(damaged)
            try:
                async with asyncio.timeout(3600):
                    await client.receive_frame()
            except (asyncio.IncompleteReadError, ConnectionResetError):
                pass
            except TimeoutError:
                assert cluster.requests[-1].fields.get("acks") == 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    async with await connect(cluster) as client:
        assert (await metadata(client)).brokers


# -- the log of requests


async def test_requests_are_logged_with_what_is_in_them(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    await asyncio.sleep(2)
    data = batch(b"a", b"b", producer_id=9, producer_epoch=1, base_sequence=4, attributes=0x10)
    await produce(client, data, version=11, transactional_id="tx", acks=1)
    (request,) = cluster.received("produce")
    assert cluster.requests == [request]
    assert (request.node_id, request.version, request.client_id) == (1, 11, "raw")
    assert (request.correlation_id, request.received_at, request.api_key) == (1, 2, 0)
    assert request.fields == {"transactional_id": "tx", "acks": 1, "timeout": 1000}
    assert request.partitions == [("t", 0)]
    summary = BatchSummary("t", 0, len(data), 2, 0, 9, 1, 4, is_transactional=True)
    assert request.batches == [summary]
    assert (request.body, request.bytes_left_over) == (None, 0)
    await produce(client, b"nonsense")
    assert cluster.requests[-1].batches == [BatchSummary("t", 0, 8)]


async def test_requests_are_found_by_api_and_node(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    await metadata(client)
    async with await connect(cluster, 2) as other:
        await metadata(other)
        response = await other.request(
            "metadata",
            12,
            topics=[{"name": None, "topic_id": uuid.UUID(int=5)}],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        assert response.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert [r.node_id for r in cluster.received("metadata")] == [1, 2, 2]
    assert len(cluster.received("metadata", node=2)) == 2
    assert cluster.received("metadata")[0].body.topics[0].name == "t"
    assert cluster.received("metadata")[2].partitions == [(None, None)]
    assert len({r.connection_id for r in cluster.requests}) == 2


async def test_the_log_of_requests_has_an_end(network: MemoryNetwork) -> None:
    async with EmbeddedCluster(network=network, request_log_size=2) as cluster:
        async with await connect(cluster) as client:
            for _ in range(3):
                await client.request("api_versions", 0)
        assert [r.correlation_id for r in cluster.requests] == [2, 3]


# -- what differs from Java's broker


async def test_null_records_are_invalid(client: RawClient) -> None:
    """Java's broker never answers that one."""
    fields = produce_fields(None)
    response = await client.request("produce", 12, **fields)
    assert only(response).error_code == ErrorCode.INVALID_RECORD


async def test_a_wrong_offset_delta_is_invalid(client: RawClient) -> None:
    data = batch(b"a", b"b")
    second = data.rindex(b"\x02\x02k\x02b")  # offset delta 1, key, value
    wrong = data[:second] + b"\x04" + data[second + 1 :]
    answer = only(await produce(client, with_header(wrong, read_header(wrong))))
    assert answer.error_code == ErrorCode.INVALID_RECORD


async def test_records_are_not_checked_if_that_is_off(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(
            network=network, topics={"t": 1}, validate_records=False, start_time_ms=T0
        ) as cluster,
        await connect(cluster) as client,
    ):
        data = batch(b"a")
        lie = read_header(data)._replace(record_count=2, last_offset_delta=1)
        answer = only(await produce(client, with_header(data, lie)))
        assert answer.error_code == ErrorCode.NONE
        assert cluster.end_offset("t", 0) == 2


# -- fetch, as far as it takes time


async def test_a_fetch_returns_when_there_are_enough_bytes(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    size = len(batch())
    fields = fetch_fields((0, 0), max_wait=60_000, min_bytes=2 * size)
    waiting = client.send("fetch", 12, **fields)
    async with await connect(cluster) as other:
        await asyncio.sleep(3)
        await produce(other)
        await asyncio.sleep(4)
        await produce(other)
    (partition,) = fetched(await client.receive("fetch", 12, waiting))
    assert (len(partition.records), now()) == (2 * size, 7)


async def test_a_fetch_returns_what_there_is_when_its_time_is_over(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    await produce(client)
    fields = fetch_fields((0, 0), max_wait=1500, min_bytes=10**6)
    (partition,) = fetched(await client.request("fetch", 12, **fields))
    assert (values(partition.records), now()) == ([b"v"], 1.5)


@pytest.mark.parametrize("version", [12, 16])
async def test_a_waiting_fetch_hears_of_a_new_leader(
    cluster: EmbeddedCluster, client: RawClient, version: int
) -> None:
    number = (await topic(client)).topic_id
    fields = fetch_fields(topic_id=number, max_wait=60_000)
    waiting = client.send("fetch", version, **fields)
    await asyncio.sleep(5)
    cluster.move_leader("t", 0, 2)
    response = await client.receive("fetch", version, waiting)
    (partition,) = fetched(response)
    assert (partition.error_code, now()) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 5)
    if version >= 16:
        assert partition.current_leader.leader_id == 2
        assert [node.node_id for node in response.node_endpoints] == [2]


async def test_a_waiting_fetch_hears_of_a_deleted_topic(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    waiting = client.send("fetch", 12, **fetch_fields(max_wait=60_000))
    await asyncio.sleep(5)
    cluster.delete_topic("t")
    (partition,) = fetched(await client.receive("fetch", 12, waiting))
    assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert now() == 5


async def test_an_error_is_not_waited_with(cluster: EmbeddedCluster, client: RawClient) -> None:
    """Also not for the other partitions' sake."""
    cluster.move_leader("t", 1, 1)
    fields = fetch_fields((0, 0), (7, 0), (1, 0), max_wait=60_000)
    response = await client.request("fetch", 12, **fields)
    assert [p.error_code for p in fetched(response)] == [
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NONE,
    ]
    unknown = fetch_fields(topic_id=uuid.UUID(int=3), max_wait=60_000)
    (partition,) = fetched(await client.request("fetch", 13, **unknown))
    assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert now() == 0


async def test_a_client_may_go_away_while_its_fetch_waits(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    client.send("fetch", 12, **fetch_fields(max_wait=60_000))
    await asyncio.sleep(1)
    await client.close()
    await asyncio.sleep(1)
    assert (cluster.connection_count(1), now()) == (0, 2)


async def test_the_limits_of_a_fetch(cluster: EmbeddedCluster, client: RawClient) -> None:
    """KIP-74: the first batch always comes, then the limits count."""
    cluster.move_leader("t", 1, 1)
    for partition in (0, 0, 1, 1):
        await produce(client, partition=partition)
    size = len(batch())
    for max_bytes, partition_max_bytes, counts in (
        (1, 10**6, [1, 0]),
        (10**6, 1, [1, 0]),
        (3 * size, 10**6, [2, 1]),
        (10**6, 2 * size - 1, [1, 1]),
    ):
        fields = fetch_fields(
            (0, 0), (1, 0), max_bytes=max_bytes, partition_max_bytes=partition_max_bytes
        )
        partitions = fetched(await client.request("fetch", 12, **fields))
        assert [len(p.records) // size for p in partitions] == counts


async def test_leader_epochs_are_checked(cluster: EmbeddedCluster, client: RawClient) -> None:
    """KIP-320"""
    cluster.move_leader("t", 0, 2)
    cluster.move_leader("t", 0, 1)
    number = (await topic(client)).topic_id
    for epoch, code in (
        (1, ErrorCode.FENCED_LEADER_EPOCH),
        (2, ErrorCode.NONE),
        (3, ErrorCode.UNKNOWN_LEADER_EPOCH),
    ):
        fields = fetch_fields(topic_id=number, leader_epoch=epoch)
        response = await client.request("fetch", 16, **fields)
        assert fetched(response)[0].error_code == code
        hinted = [node.node_id for node in response.node_endpoints]
        assert hinted == ([1] if code == ErrorCode.FENCED_LEADER_EPOCH else [])
        listed = await list_offset(client, -1, leader_epoch=epoch)
        assert listed.error_code == code


async def list_offset(
    client: RawClient, timestamp: int, *, leader_epoch: int = -1, isolation_level: int = 1
) -> Message:
    item = {
        "partition_index": 0,
        "timestamp": timestamp,
        "current_leader_epoch": leader_epoch,
    }
    response = await client.request(
        "list_offsets",
        9,
        replica_id=-1,
        isolation_level=isolation_level,
        topics=[{"name": "t", "partitions": [item]}],
    )
    return response.topics[0].partitions[0]


async def test_offsets_have_the_epoch_of_their_record(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    await produce(client)
    cluster.move_leader("t", 0, 2)
    cluster.move_leader("t", 0, 1)
    await produce(client, batch(timestamp=T0 + 5))
    found = [await list_offset(client, timestamp) for timestamp in (T0, T0 + 5, -1, -2, -3, -5)]
    assert [(f.offset, f.leader_epoch) for f in found] == [
        (0, 0),
        (1, 2),
        (2, 2),
        (0, 0),
        (1, 2),
        (-1, -1),
    ]
    nonsense = await list_offset(client, -99)
    assert nonsense.error_code == ErrorCode.UNSUPPORTED_VERSION


async def test_fetch_sessions_are_not_kept(client: RawClient) -> None:
    response = await client.request("fetch", 12, **fetch_fields())
    assert response.session_id == 0
    response = await client.request("fetch", 12, **fetch_fields(session_id=5))
    assert response.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


# -- coordinators and topics


async def init_producer_id(
    cluster: EmbeddedCluster,
    *,
    transactional_id: str = "tx",
    version: int = 4,
    producer: tuple[int, int] = (-1, -1),
    timeout_ms: int = 60_000,
) -> tuple[ErrorCode, int, int]:
    """Asks the coordinator."""
    async with await connect(cluster) as client:
        found = await client.request("find_coordinator", 3, key=transactional_id, key_type=1)
    async with await connect(cluster, found.node_id) as client:
        response = await client.request(
            "init_producer_id",
            version,
            transactional_id=transactional_id,
            transaction_timeout=timeout_ms,
            producer_id=producer[0],
            producer_epoch=producer[1],
        )
    return ErrorCode(response.error_code), response.producer_id, response.producer_epoch


async def test_a_transactional_id_bumps_its_epoch(cluster: EmbeddedCluster) -> None:
    _, producer_id, epoch = await init_producer_id(cluster)
    assert epoch == 0
    assert await init_producer_id(cluster) == (ErrorCode.NONE, producer_id, 1)
    bumped = await init_producer_id(cluster, producer=(producer_id, 1))
    assert bumped == (ErrorCode.NONE, producer_id, 2)
    # Its first answer may have been lost.
    assert await init_producer_id(cluster, producer=(producer_id, 1)) == bumped
    fenced = await init_producer_id(cluster, producer=(producer_id, 0))
    assert fenced == (ErrorCode.PRODUCER_FENCED, -1, -1)
    old = await init_producer_id(cluster, producer=(producer_id, 0), version=3)
    assert old[0] == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_a_transactional_id_must_be_sensible(cluster: EmbeddedCluster) -> None:
    for timeout_ms in (0, 15 * 60_000 + 1):
        code = (await init_producer_id(cluster, timeout_ms=timeout_ms))[0]
        assert code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    code = (await init_producer_id(cluster, transactional_id=""))[0]
    assert code == ErrorCode.INVALID_REQUEST


async def test_only_the_coordinator_takes_a_transactional_id(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    codes = []
    for node in cluster.node_ids:
        async with await connect(cluster, node) as other:
            response = await other.request(
                "init_producer_id", 0, transactional_id="tx", transaction_timeout=1000
            )
            codes.append(response.error_code)
    assert sorted(codes) == [ErrorCode.NONE] + [ErrorCode.NOT_COORDINATOR] * 2


async def test_share_groups_have_no_coordinator(client: RawClient) -> None:
    response = await client.request("find_coordinator", 6, key_type=2, coordinator_keys=["a", "b"])
    assert [(c.key, c.error_code, c.node_id) for c in response.coordinators] == [
        ("a", ErrorCode.INVALID_REQUEST, -1),
        ("b", ErrorCode.INVALID_REQUEST, -1),
    ]
    response = await client.request("find_coordinator", 3, key_type=2, key="a")
    assert response.error_message == "INVALID_REQUEST"


async def test_a_topic_without_name_or_id_is_an_invalid_request(client: RawClient) -> None:
    number = uuid.UUID(int=1)
    for version, name, asked in (
        (12, None, None),
        (11, None, None),
        (11, "t", number),
        (11, None, number),
    ):
        response = await client.request(
            "metadata",
            version,
            topics=[{"name": name, "topic_id": asked}],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        assert response.topics[0].error_code == ErrorCode.INVALID_REQUEST
        assert response.topics[0].name == (name or "")


async def test_a_batch_that_is_shorter_than_its_header_is_corrupt(client: RawClient) -> None:
    whole = batch(b"a")
    short = whole[:8] + (55 - 12).to_bytes(4, "big") + whole[12:55]
    assert only(await produce(client, short)).error_code == ErrorCode.CORRUPT_MESSAGE


async def test_a_request_cannot_make_more_partitions_than_kafka_would(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    """Each takes memory: 2**31 - 1 of them would take all there is."""
    new = {"num_partitions": 2**31 - 1, "replication_factor": 1, "assignments": [], "configs": []}
    created = await client.request(
        "create_topics", 7, topics=[{"name": "u", **new}], timeout=1, validate_only=False
    )
    assert created.topics[0].error_code == ErrorCode.POLICY_VIOLATION
    grown = await client.request(
        "create_partitions",
        3,
        topics=[{"name": "t", "count": 2**31 - 1, "assignments": None}],
        timeout=1,
        validate_only=False,
    )
    assert grown.results[0].error_code == ErrorCode.POLICY_VIOLATION
    assert "10000 at most" in grown.results[0].error_message
    assert cluster.leader("t", 0) == 1


async def test_an_assignment_of_replicas_is_followed(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    await client.request(
        "create_topics",
        7,
        topics=[
            {
                "name": "u",
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 0, "broker_ids": [3, 1]}],
                "configs": [{"name": "retention.ms", "value": None}],
            }
        ],
        timeout=1,
    )
    response = await client.request(
        "create_partitions",
        3,
        topics=[{"name": "u", "count": 2, "assignments": [{"broker_ids": [2, 3]}]}],
        timeout=1,
        validate_only=False,
    )
    assert response.results[0].error_code == ErrorCode.NONE
    assert [p.replica_nodes for p in (await topic(client, "u")).partitions] == [(3, 1), (2, 3)]
    assert (cluster.leader("u", 0), cluster.leader("u", 1)) == (3, 2)


def test_every_name_in_a_response_is_one_of_kafkas() -> None:
    """Names that a version has not are left out: so a mistyped one would never be missed.

    It sees what the other tests of this run have sent.
    """
    known: dict[str, set[str]] = {}
    for key, api in APIS.items():
        for version in range(api.min_version, api.max_version + 1):
            module = __import__(
                load_response_schema(key, version).__module__, fromlist=["__name__"]
            )
            for name, found in vars(module).items():
                known.setdefault(name, set()).update(getattr(found, "__dataclass_fields__", ()))
    for class_name, field in messages.LEFT_OUT:
        if class_name in known:
            assert field in known[class_name], (class_name, field)
