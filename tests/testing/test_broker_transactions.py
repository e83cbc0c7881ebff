"""Transactions of the embedded cluster: what tests can look at, move, and make go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import encode_batch
from asyncproducer.testing.broker import EmbeddedCluster, TransactionView
from asyncproducer.testing.groups import CommittedOffset
from asyncproducer.testing.messages import Message
from asyncproducer.testing.network import MemoryNetwork
from asyncproducer.testing.raw_client import RawClient
from asyncproducer.testing.transactions import TransactionState

pytestmark = pytest.mark.virtual_time

T0 = 1_700_000_000_000
TRANSACTIONAL = 0x10
OK = ErrorCode.NONE

COORDINATOR_APIS = (
    "init_producer_id",
    "add_partitions_to_txn",
    "add_offsets_to_txn",
    "txn_offset_commit",
    "end_txn",
)

Pid = tuple[int, int]


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    network = MemoryNetwork()
    async with EmbeddedCluster(3, topics={"t": 2}, network=network, start_time_ms=T0) as cluster:
        for partition in range(2):
            cluster.move_leader("t", partition, 1)
        cluster.move_coordinator("tx", 1)
        cluster.move_coordinator("tx", 1, "group")
        yield cluster


class Session:
    """One connection to node 1, for "tx", the topic "t" and the group "tx"."""

    def __init__(self, client: RawClient) -> None:
        self.client = client

    async def init(self, version: int = 5, **fields: Any) -> Message:
        fields = {"producer_id": -1, "producer_epoch": -1, "transaction_timeout": 60_000} | fields
        return await self.client.request(
            "init_producer_id", version, transactional_id="tx", **fields
        )

    async def begin(self) -> Pid:
        response = await self.init()
        assert response.error_code == OK
        return response.producer_id, response.producer_epoch

    async def add(self, pid: Pid, *partitions: int) -> list[ErrorCode]:
        response = await self.client.request(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id="tx",
            v3_and_below_producer_id=pid[0],
            v3_and_below_producer_epoch=pid[1],
            v3_and_below_topics=[{"name": "t", "partitions": partitions or (0,)}],
        )
        (topic,) = response.results_by_topic_v3_and_below
        return [ErrorCode(r.partition_error_code) for r in topic.results_by_partition]

    async def add_offsets(self, pid: Pid) -> ErrorCode:
        response = await self.client.request(
            "add_offsets_to_txn",
            4,
            transactional_id="tx",
            producer_id=pid[0],
            producer_epoch=pid[1],
            group_id="tx",
        )
        return ErrorCode(response.error_code)

    async def commit_offsets(self, pid: Pid, *partitions: int) -> list[ErrorCode]:
        response = await self.client.request(
            "txn_offset_commit",
            5,
            transactional_id="tx",
            producer_id=pid[0],
            producer_epoch=pid[1],
            group_id="tx",
            topics=[
                {
                    "name": "t",
                    "partitions": [
                        {
                            "partition_index": index,
                            "committed_offset": 7,
                            "committed_metadata": None,
                        }
                        for index in partitions or (0,)
                    ],
                }
            ],
        )
        return [ErrorCode(p.error_code) for p in response.topics[0].partitions]

    async def fetch_offsets(self, version: int) -> Message:
        topic = {"name": "t", "partition_indexes": [0]}
        response = await self.client.request(
            "offset_fetch",
            version,
            group_id="tx",
            topics=[topic],
            groups=[{"group_id": "tx", "topics": [topic]}],
        )
        return response.groups[0] if version >= 8 else response

    async def end(self, pid: Pid, *, commit: bool = True) -> Message:
        return await self.client.request(
            "end_txn",
            5,
            transactional_id="tx",
            producer_id=pid[0],
            producer_epoch=pid[1],
            committed=commit,
        )

    async def produce(
        self, pid: Pid, sequence: int = 0, *, version: int = 12, value: bytes = b"v"
    ) -> ErrorCode:
        data = encode_batch(
            [(None, value)],
            timestamps=[T0],
            producer_id=pid[0],
            producer_epoch=pid[1],
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        response = await self.client.request(
            "produce",
            version,
            transactional_id="tx",
            acks=-1,
            timeout=1000,
            topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": data}]}],
        )
        return ErrorCode(response.responses[0].partition_responses[0].error_code)


@pytest.fixture
async def s(cluster: EmbeddedCluster) -> AsyncIterator[Session]:
    async with await RawClient.connect(cluster.address(1), cluster.connector) as client:
        yield Session(client)


async def find(cluster: EmbeddedCluster, *, key_type: int = 1) -> tuple[ErrorCode, int]:
    async with await RawClient.connect(cluster.address(2), cluster.connector) as client:
        response = await client.request("find_coordinator", 3, key="tx", key_type=key_type)
    return ErrorCode(response.error_code), response.node_id


# -- what a test can look at


async def test_a_transaction_can_be_looked_at(cluster: EmbeddedCluster, s: Session) -> None:
    pid = await s.begin()
    empty = TransactionView(TransactionState.EMPTY, *pid, (), {}, 60_000)
    assert cluster.transaction("tx") == empty
    await s.produce(pid, value=b"a")
    await s.commit_offsets(pid)
    offsets = {("t", 0): CommittedOffset(7, -1, None)}
    assert cluster.transaction("tx") == empty._replace(
        state=TransactionState.ONGOING, partitions=(("t", 0),), pending_offsets={"tx": offsets}
    )
    assert cluster.committed_offsets("tx") == {}
    assert (cluster.last_stable_offset("t", 0), cluster.end_offset("t", 0)) == (0, 1)
    assert cluster.records("t", committed=True) == []

    after = await s.end(pid)
    assert cluster.transaction("tx") == empty._replace(
        state=TransactionState.COMPLETE_COMMIT, producer_epoch=pid[1] + 1
    )
    assert (after.producer_id, after.producer_epoch) == (pid[0], pid[1] + 1)
    assert cluster.committed_offsets("tx") == offsets
    assert (cluster.last_stable_offset("t", 0), cluster.end_offset("t", 0)) == (2, 2)
    assert [r.value for r in cluster.records("t", 0, committed=True)] == [b"a"]
    assert [r.value for r in cluster.records("t")] == [b"a"]
    (marker,) = cluster.markers("t", 0)
    assert (marker.offset, marker.is_commit, marker.producer_epoch) == (1, True, pid[1] + 1)
    assert (marker.timestamp, cluster.markers("t", 1)) == (T0, [])


@pytest.mark.parametrize(
    "call", ["transaction('x')", "forget_transactional_id('x')", "set_producer_epoch('x', 1)"]
)
async def test_a_transactional_id_that_nobody_used_is_a_mistake(
    cluster: EmbeddedCluster, call: str
) -> None:
    with pytest.raises(ValueError, match="nobody has used the transactional id 'x'"):
        eval(f"cluster.{call}", {"cluster": cluster})


async def test_a_transactional_id_can_be_forgotten(cluster: EmbeddedCluster, s: Session) -> None:
    pid = await s.begin()
    await s.add(pid)
    with pytest.raises(ValueError, match="'tx' has a transaction open"):
        cluster.forget_transactional_id("tx")
    await s.end(pid)
    cluster.forget_transactional_id("tx")
    assert (await s.end(pid)).error_code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert await s.begin() != pid


async def test_an_epoch_can_be_the_last_one(cluster: EmbeddedCluster, s: Session) -> None:
    producer_id, _ = await s.begin()
    cluster.set_producer_epoch("tx", 32766)
    await s.produce((producer_id, 32766))
    after = await s.end((producer_id, 32766))
    assert after.producer_id != producer_id
    assert after.producer_epoch == 0
    assert await s.produce((after.producer_id, 0)) == OK


async def test_an_open_transaction_keeps_its_producer_known(
    cluster: EmbeddedCluster, s: Session
) -> None:
    pid = await s.begin()
    await s.produce(pid)
    cluster.forget_producers("t", 0)
    assert await s.produce(pid, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


async def test_records_of_an_open_transaction_can_be_deleted(
    cluster: EmbeddedCluster, s: Session
) -> None:
    pid = await s.begin()
    await s.produce(pid, 0)
    await s.produce(pid, 1)
    cluster.delete_records("t", 0, 1)
    assert cluster.last_stable_offset("t", 0) == 1
    await s.end(pid, commit=False)
    assert cluster.last_stable_offset("t", 0) == 3
    assert cluster.records("t", committed=True) == []


async def test_transactions_are_described(cluster: EmbeddedCluster, s: Session) -> None:
    async def describe(name: str) -> Message:
        response = await s.client.request("describe_transactions", 0, transactional_ids=[name])
        return response.transaction_states[0]

    assert (await describe("tx")).error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert (await describe("")).error_code == ErrorCode.INVALID_REQUEST
    pid = await s.begin()
    await s.add(pid, 0, 1)
    found = await describe("tx")
    assert (found.error_code, found.transaction_state) == (OK, "Ongoing")
    assert (found.producer_id, found.producer_epoch) == pid
    assert found.transaction_timeout == timedelta(minutes=1)
    assert found.transaction_start_time.timestamp() * 1000 == T0
    assert [(t.topic, t.partitions) for t in found.topics] == [("t", (0, 1))]
    cluster.move_coordinator("tx", 2)
    assert (await describe("tx")).error_code == ErrorCode.NOT_COORDINATOR


# -- features


async def test_features_change_while_the_cluster_runs(cluster: EmbeddedCluster, s: Session) -> None:
    async def told() -> tuple[dict[str, int], int]:
        response = await s.client.request(
            "api_versions", 4, client_software_name="a", client_software_version="1"
        )
        assert {f.name: (f.min_version, f.max_version) for f in response.supported_features} == {
            "transaction.version": (0, 2)
        }
        finalized = {f.name: f.max_version_level for f in response.finalized_features}
        return finalized, response.finalized_features_epoch

    assert await told() == ({"transaction.version": 2}, 1)
    cluster.set_feature("transaction.version", 1)
    assert await told() == ({"transaction.version": 1}, 2)
    cluster.set_feature("transaction.version", 0)
    assert await told() == ({}, 3)


async def test_two_phase_commit_is_off() -> None:
    """KIP-939: in a version that is only there when asked for."""
    network = MemoryNetwork()
    async with (
        EmbeddedCluster(network=network, request_versions={22: (0, 6)}) as cluster,
        await RawClient.connect(cluster.address(1), network) as client,
    ):
        s = Session(client)
        response = await s.init(6)
        assert (response.error_code, response.ongoing_txn_producer_id) == (OK, -1)
        response = await s.init(6, enable2_pc=True)
        assert response.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        response = await s.init(6, keep_prepared_txn=True)
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("version", [4, 5])
async def test_clients_may_not_speak_like_brokers(s: Session, version: int) -> None:
    response = await s.client.request(
        "add_partitions_to_txn",
        version,
        transactions=[
            {"transactional_id": "tx", "producer_id": 1, "producer_epoch": 0, "topics": []}
        ],
    )
    assert response.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


# -- time


async def test_a_timeout_takes_no_real_time(cluster: EmbeddedCluster, s: Session) -> None:
    response = await s.init(transaction_timeout=900_000)
    pid = response.producer_id, response.producer_epoch
    await s.produce(pid)
    await asyncio.sleep(899.9)
    assert cluster.transaction("tx").state is TransactionState.ONGOING
    await asyncio.sleep(0.2)
    assert cluster.transaction("tx").state is TransactionState.COMPLETE_ABORT
    (marker,) = cluster.markers("t", 0)
    assert (marker.is_commit, marker.timestamp) == (False, T0 + 900_000)
    assert await s.produce(pid, 1) == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_markers_may_take_their_time(cluster: EmbeddedCluster, s: Session) -> None:
    cluster.set_marker_delay(100)
    pid = await s.begin()
    await s.produce(pid)
    response = await s.end(pid)
    after = response.producer_id, response.producer_epoch
    assert cluster.transaction("tx").state is TransactionState.PREPARE_COMMIT
    assert cluster.last_stable_offset("t", 0) == 0
    assert await s.add(after) == [ErrorCode.CONCURRENT_TRANSACTIONS]
    assert await s.produce(after) == ErrorCode.CONCURRENT_TRANSACTIONS
    # Clients of TV1 do not expect that from Produce.
    assert await s.produce(after, version=11) == ErrorCode.NOT_ENOUGH_REPLICAS
    await asyncio.sleep(0.1)
    assert cluster.last_stable_offset("t", 0) == 2
    assert await s.produce(after) == OK


async def test_a_consumer_that_waits_hears_of_the_commit(
    cluster: EmbeddedCluster, s: Session
) -> None:
    pid = await s.begin()
    await s.produce(pid)
    async with await RawClient.connect(cluster.address(1), cluster.connector) as other:
        place = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 10**6}
        fetching = asyncio.create_task(
            other.request(
                "fetch",
                4,
                max_wait=50_000,
                min_bytes=1,
                max_bytes=10**6,
                isolation_level=1,
                topics=[{"topic": "t", "partitions": [place]}],
            )
        )
        await asyncio.sleep(1)
        assert not fetching.done()
        await s.end(pid)
        partition = (await fetching).responses[0].partitions[0]
    assert partition.last_stable_offset == 2
    assert partition.records != b""


# -- coordinators


async def test_a_coordinator_moves(cluster: EmbeddedCluster, s: Session) -> None:
    pid = await s.begin()
    cluster.move_coordinator("tx", 3)
    assert cluster.coordinator("tx") == 3
    assert cluster.coordinator("tx", "group") == 1
    assert (await find(cluster), await find(cluster, key_type=0)) == ((OK, 3), (OK, 1))
    moved = ErrorCode.NOT_COORDINATOR
    assert (await s.init()).error_code == moved
    assert await s.add(pid) == [moved]
    assert await s.add_offsets(pid) == moved
    assert (await s.end(pid)).error_code == moved
    # Any leader asks the coordinator, wherever that is.
    assert await s.produce(pid) == OK
    assert await s.commit_offsets(pid) == [OK]
    async with await RawClient.connect(cluster.address(3), cluster.connector) as client:
        assert (await Session(client).end(pid)).error_code == OK


async def test_a_coordinator_that_has_moved_loads_first(
    cluster: EmbeddedCluster, s: Session
) -> None:
    pid = await s.begin()
    cluster.move_coordinator("tx", 1, load_ms=500)
    assert await find(cluster) == (OK, 1)
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert (await s.init()).error_code == loading
    assert await s.add(pid) == [loading]
    assert await s.produce(pid) == ErrorCode.NOT_ENOUGH_REPLICAS
    await asyncio.sleep(0.5)
    assert await s.produce(pid) == OK


async def test_there_may_be_no_coordinator(cluster: EmbeddedCluster, s: Session) -> None:
    pid = await s.begin()
    cluster.move_coordinator("tx", -1)
    assert cluster.coordinator("tx") == -1
    assert await find(cluster) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, -1)
    assert (await s.end(pid)).error_code == ErrorCode.NOT_COORDINATOR
    for version in (11, 12):
        assert await s.produce(pid, version=version) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert await s.commit_offsets(pid) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]


@pytest.mark.parametrize("version", range(1, 10))
async def test_offsets_are_fetched_from_the_groups_coordinator(
    cluster: EmbeddedCluster, s: Session, version: int
) -> None:
    pid = await s.begin()
    await s.commit_offsets(pid)
    await s.end(pid)
    found = await s.fetch_offsets(version)
    (partition,) = found.topics[0].partitions
    assert (partition.error_code, partition.committed_offset) == (OK, 7)
    cluster.move_coordinator("tx", 2, "group")
    assert await s.commit_offsets(pid) == [ErrorCode.NOT_COORDINATOR]
    found = await s.fetch_offsets(version)
    if version == 1:
        found = found.topics[0].partitions[0]
    assert found.error_code == ErrorCode.NOT_COORDINATOR


async def test_all_offsets_of_a_group_are_fetched(s: Session) -> None:
    pid = await s.begin()
    await s.commit_offsets(pid, 0, 1)
    await s.end(pid)
    response = await s.client.request("offset_fetch", 2, group_id="tx", topics=None)
    (topic,) = response.topics
    assert [(p.partition_index, p.committed_offset) for p in topic.partitions] == [(0, 7), (1, 7)]


# -- faults


async def test_a_refused_request_has_no_effect(cluster: EmbeddedCluster, s: Session) -> None:
    error = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    for api in COORDINATOR_APIS:
        cluster.inject(api, error=error)
    assert (await s.init()).error_code == error
    with pytest.raises(ValueError, match="nobody has used"):
        cluster.transaction("tx")
    pid = await s.begin()
    assert await s.add(pid) == [error]
    assert await s.add_offsets(pid) == error
    assert await s.commit_offsets(pid) == [error]
    assert cluster.transaction("tx").state is TransactionState.EMPTY
    assert await s.add(pid) == [OK]
    assert (await s.end(pid)).error_code == error
    assert cluster.transaction("tx").state is TransactionState.ONGOING


async def test_an_error_may_come_after_the_effect(cluster: EmbeddedCluster, s: Session) -> None:
    error = ErrorCode.REQUEST_TIMED_OUT
    for api in COORDINATOR_APIS:
        cluster.inject(api, error=error, after_append=True)
    assert (await s.init()).error_code == error
    assert cluster.transaction("tx").producer_epoch == 0
    pid = await s.begin()
    assert pid[1] == 1
    assert await s.add(pid) == [error]
    assert cluster.transaction("tx").partitions == (("t", 0),)
    assert await s.add_offsets(pid) == error
    assert cluster.transaction("tx").pending_offsets == {"tx": {}}
    assert await s.commit_offsets(pid) == [error]
    assert cluster.transaction("tx").pending_offsets["tx"] != {}
    assert (await s.end(pid)).error_code == error
    assert cluster.transaction("tx").state is TransactionState.COMPLETE_COMMIT


@pytest.mark.parametrize("after", [False, True])
async def test_one_partition_may_fail(cluster: EmbeddedCluster, s: Session, after: bool) -> None:
    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for api in ("add_partitions_to_txn", "txn_offset_commit"):
        cluster.inject(api, error=error, topic="t", partition=1, after_append=after)
    pid = await s.begin()
    other = OK if after else ErrorCode.OPERATION_NOT_ATTEMPTED
    assert await s.add(pid, 0, 1) == [other, error]
    assert len(cluster.transaction("tx").partitions) == (2 if after else 0)
    assert await s.commit_offsets(pid, 0, 1) == [OK, error]
    pending = cluster.transaction("tx").pending_offsets["tx"]
    assert list(pending) == ([("t", 0), ("t", 1)] if after else [("t", 0)])


@pytest.mark.parametrize("drop", ["before", "after"])
async def test_the_answer_to_end_txn_may_be_lost(
    cluster: EmbeddedCluster, s: Session, drop: Any
) -> None:
    pid = await s.begin()
    await s.add(pid)
    fault = cluster.inject("end_txn", drop=drop)
    with pytest.raises(asyncio.IncompleteReadError):
        await s.end(pid)
    assert fault.hits == 1
    async with await RawClient.connect(cluster.address(1), cluster.connector) as client:
        ended = cluster.transaction("tx").state is TransactionState.COMPLETE_COMMIT
        assert ended == (drop == "after")
        response = await Session(client).end(pid)
        assert (response.error_code, response.producer_epoch) == (OK, pid[1] + 1)
    assert len(cluster.markers("t", 0)) == 1


async def test_an_answer_may_be_late(cluster: EmbeddedCluster, s: Session) -> None:
    pid = await s.begin()
    cluster.inject("add_partitions_to_txn", delay=2.0)
    before = asyncio.get_running_loop().time()
    assert await s.add(pid) == [OK]
    assert asyncio.get_running_loop().time() - before == pytest.approx(2.0)


async def test_a_verification_may_fail(cluster: EmbeddedCluster, s: Session) -> None:
    """As any other error of Produce: with the partition neither added nor written."""
    pid = await s.begin()
    cluster.inject("produce", error="CONCURRENT_TRANSACTIONS", topic="t", partition=0)
    assert await s.produce(pid) == ErrorCode.CONCURRENT_TRANSACTIONS
    assert cluster.transaction("tx").partitions == ()
    assert await s.produce(pid) == OK
