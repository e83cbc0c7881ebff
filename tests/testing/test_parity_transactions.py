"""What transactions are in the embedded broker and in Apache Kafka: the same tests run on both."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import (
    StoredRecord,
    decode_batch,
    encode_batch,
    split_batches,
)
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.messages import Message
from asyncproducer.testing.raw_client import RawClient

TRANSACTIONAL = 0x10

Pid = tuple[int, int]


class Broker(NamedTuple):
    """A cluster of one node, of either kind."""

    server: str
    create: Callable[[str], Awaitable[None]]


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    # Else a test of a timeout would take ten seconds.
    often = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with KafkaCluster(properties=often) as cluster:
        yield cluster


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "kafka":
        real: KafkaCluster = request.getfixturevalue("kafka")

        async def create(name: str) -> None:
            await asyncio.to_thread(real.create_topic, name, partitions=2)

        yield Broker(real.bootstrap_servers.split(",")[0], create)
        return
    async with EmbeddedCluster() as cluster:

        async def create_embedded(name: str) -> None:
            cluster.create_topic(name, partitions=2)

        yield Broker(cluster.bootstrap_servers, create_embedded)


numbers = itertools.count(time.time_ns())


async def until(ask: Callable[[], Awaitable[Any]], accept: Callable[[Any], bool]) -> Any:
    """Asks until the answer will do."""
    async with asyncio.timeout(20):
        while True:
            answer = await ask()
            if accept(answer):
                return answer
            await asyncio.sleep(0.02)


class Session:
    """Raw requests about one topic, one transactional id and one group."""

    def __init__(self, client: RawClient, name: str) -> None:
        self.client = client
        self.topic = self.txn = self.group = name

    async def coordinators(self) -> None:
        """Kafka makes its topics for the first one who asks, and loads them after that."""

        async def find(kind: int) -> ErrorCode:
            response = await self.client.request(
                "find_coordinator", 4, coordinator_keys=[self.txn], key_type=kind
            )
            return ErrorCode(response.coordinators[0].error_code)

        for kind in (0, 1):
            await until(partial(find, kind), lambda code: code == ErrorCode.NONE)
        for ask in (self.init_once, self.fetch_offset):
            await until(ask, lambda answer: answer[0] == ErrorCode.NONE)

    async def init_once(
        self, pid: Pid = (-1, -1), *, version: int = 5, timeout_ms: int = 60_000
    ) -> tuple[ErrorCode, int, int]:
        response = await self.client.request(
            "init_producer_id",
            version,
            transactional_id=self.txn,
            transaction_timeout=timeout_ms,
            producer_id=pid[0],
            producer_epoch=pid[1],
        )
        return ErrorCode(response.error_code), response.producer_id, response.producer_epoch

    async def settled(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The answer when markers are written, and what it was before."""

        def final(answer: Any) -> bool:
            code = answer[0] if isinstance(answer, tuple) else answer
            return code not in (ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS)

        return await until(ask, final)

    async def init(self, pid: Pid = (-1, -1), **options: Any) -> Pid:
        code, producer_id, epoch = await self.settled(lambda: self.init_once(pid, **options))
        assert code == ErrorCode.NONE
        return producer_id, epoch

    async def add_once(self, pid: Pid, *partitions: int, version: int = 3) -> list[ErrorCode]:
        response = await self.client.request(
            "add_partitions_to_txn",
            version,
            v3_and_below_transactional_id=self.txn,
            v3_and_below_producer_id=pid[0],
            v3_and_below_producer_epoch=pid[1],
            v3_and_below_topics=[{"name": self.topic, "partitions": partitions or (0,)}],
        )
        ((name, results),) = (
            (t.name, t.results_by_partition) for t in response.results_by_topic_v3_and_below
        )
        assert name == self.topic
        by_index = {r.partition_index: ErrorCode(r.partition_error_code) for r in results}
        return [by_index[index] for index in partitions or (0,)]

    async def add(self, pid: Pid, *partitions: int, version: int = 3) -> ErrorCode:
        async def once() -> ErrorCode:
            codes = await self.add_once(pid, *partitions, version=version)
            assert len(set(codes)) == 1
            return codes[0]

        code: ErrorCode = await self.settled(once)
        return code

    async def produce_once(
        self,
        pid: Pid,
        sequence: int,
        *values: bytes,
        version: int = 11,
        partition: int = 0,
        attributes: int = TRANSACTIONAL,
        txn: str = "",
    ) -> Message:
        values = values or (b"v",)
        data = encode_batch(
            [(None, value) for value in values],
            timestamps=[time.time_ns() // 1_000_000] * len(values),
            producer_id=pid[0],
            producer_epoch=pid[1],
            base_sequence=sequence,
            attributes=attributes,
        )
        response = await self.client.request(
            "produce",
            version,
            transactional_id=txn or self.txn,
            acks=-1,
            timeout=5000,
            topic_data=[
                {
                    "name": self.topic,
                    "partition_data": [{"index": partition, "records": data}],
                }
            ],
        )
        return response.responses[0].partition_responses[0]

    async def produce(self, pid: Pid, sequence: int, *values: bytes, **options: Any) -> ErrorCode:
        async def once() -> ErrorCode:
            answer = await self.produce_once(pid, sequence, *values, **options)
            return ErrorCode(answer.error_code)

        code: ErrorCode = await self.settled(once)
        return code

    async def end_once(
        self, pid: Pid, commit: bool, *, version: int = 4
    ) -> tuple[ErrorCode, int, int]:
        response = await self.client.request(
            "end_txn",
            version,
            transactional_id=self.txn,
            producer_id=pid[0],
            producer_epoch=pid[1],
            committed=commit,
        )
        return (
            ErrorCode(response.error_code),
            getattr(response, "producer_id", -1),
            getattr(response, "producer_epoch", -1),
        )

    async def end(self, pid: Pid, commit: bool, *, version: int = 4) -> Any:
        """TV1: the code, TV2: the code and what comes next. Returns when markers are written."""
        answer = await self.settled(lambda: self.end_once(pid, commit, version=version))
        if answer[0] == ErrorCode.NONE:
            await self.complete()
        return answer if version > 4 else answer[0]

    async def describe(self) -> Message:
        response = await self.client.request(
            "describe_transactions", 0, transactional_ids=[self.txn]
        )
        return response.transaction_states[0]

    async def complete(self) -> str:
        """The state, as soon as no marker is missing."""
        found = await until(
            self.describe, lambda found: not found.transaction_state.startswith("Prepare")
        )
        return str(found.transaction_state)

    async def add_offsets(self, pid: Pid, *, version: int = 3) -> ErrorCode:
        async def once() -> ErrorCode:
            response = await self.client.request(
                "add_offsets_to_txn",
                version,
                transactional_id=self.txn,
                producer_id=pid[0],
                producer_epoch=pid[1],
                group_id=self.group,
            )
            return ErrorCode(response.error_code)

        code: ErrorCode = await self.settled(once)
        return code

    async def commit_offset(
        self,
        pid: Pid,
        offset: int,
        *,
        version: int = 3,
        generation: int = -1,
        member: str = "",
        instance: str | None = None,
        partition: int = 0,
    ) -> ErrorCode:
        async def once() -> ErrorCode:
            response = await self.client.request(
                "txn_offset_commit",
                version,
                transactional_id=self.txn,
                producer_id=pid[0],
                producer_epoch=pid[1],
                group_id=self.group,
                generation_id=generation,
                member_id=member,
                group_instance_id=instance,
                topics=[
                    {
                        "name": self.topic,
                        "partitions": [
                            {
                                "partition_index": partition,
                                "committed_offset": offset,
                                "committed_leader_epoch": 3,
                                "committed_metadata": "m",
                            }
                        ],
                    }
                ],
            )
            (result,) = response.topics[0].partitions
            return ErrorCode(result.error_code)

        code: ErrorCode = await self.settled(once)
        return code

    async def fetch_offset(self, *, stable: bool = False) -> tuple[ErrorCode, int, int, str | None]:
        response = await self.client.request(
            "offset_fetch",
            8,
            groups=[
                {
                    "group_id": self.group,
                    "topics": [{"name": self.topic, "partition_indexes": [0]}],
                }
            ],
            require_stable=stable,
        )
        (group,) = response.groups
        if group.error_code:
            return ErrorCode(group.error_code), -1, -1, None
        (found,) = group.topics[0].partitions
        return (
            ErrorCode(found.error_code),
            found.committed_offset,
            found.committed_leader_epoch,
            found.metadata,
        )

    async def fetch(
        self, *, committed: bool = True, offset: int = 0, partition: int = 0
    ) -> Message:
        response = await self.client.request(
            "fetch",
            12,
            max_wait=0,
            min_bytes=0,
            max_bytes=10**7,
            isolation_level=int(committed),
            session_id=0,
            session_epoch=-1,
            topics=[
                {
                    "topic": self.topic,
                    "partitions": [
                        {
                            "partition": partition,
                            "fetch_offset": offset,
                            "partition_max_bytes": 10**7,
                        }
                    ],
                }
            ],
            forgotten_topics_data=[],
            rack_id="",
        )
        return response.responses[0].partitions[0]

    async def log(self, partition: int = 0) -> list[StoredRecord]:
        data = (await self.fetch(committed=False, partition=partition)).records
        return [record for stored in split_batches(data) for record in decode_batch(stored)]

    async def latest(self, *, committed: bool) -> int:
        response = await self.client.request(
            "list_offsets",
            7,
            replica_id=-1,
            isolation_level=int(committed),
            topics=[{"name": self.topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        )
        offset: int = response.topics[0].partitions[0].offset
        return offset


@pytest.fixture
async def s(broker: Broker, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    name = re.sub(r"[^A-Za-z0-9-]+", "-", request.node.name)[:80] + f"-{next(numbers)}"
    await broker.create(name)
    async with await RawClient.connect(broker.server) as client:
        session = Session(client, name)
        await session.coordinators()
        yield session


OK = ErrorCode.NONE
FENCED = ErrorCode.PRODUCER_FENCED
OLD_EPOCH = ErrorCode.INVALID_PRODUCER_EPOCH
BAD_STATE = ErrorCode.INVALID_TXN_STATE
MAPPING = ErrorCode.INVALID_PRODUCER_ID_MAPPING
CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS

#: The produce version of a client, and so the protocol.
TV1, TV2 = 11, 12


async def begin(s: Session, pid: Pid, *values: bytes, version: int) -> None:
    """A transaction with some records in partition 0."""
    if version == TV1:
        assert await s.add(pid, 0) == OK
    assert await s.produce(pid, 0, *values, version=version) == OK


async def end(s: Session, pid: Pid, commit: bool, *, version: int) -> Pid:
    """What the producer goes on with."""
    if version == TV1:
        assert await s.end(pid, commit) == OK
        return pid
    code, producer_id, epoch = await s.end(pid, commit, version=5)
    assert code == OK
    return producer_id, epoch


def plainly(record: StoredRecord) -> Any:
    """The value; the epoch of a marker and whether it is one that commits."""
    return (record.producer_epoch, record.is_commit) if record.is_control else record.value


# -- who produces


@pytest.mark.parametrize("version", range(6))
async def test_each_start_of_a_producer_has_the_next_epoch(s: Session, version: int) -> None:
    producer_id, epoch = await s.init(version=version)
    assert await s.init(version=version) == (producer_id, epoch + 1)


async def test_a_producer_that_gives_its_epoch_gets_the_next_one(s: Session) -> None:
    producer_id, epoch = await s.init()
    for _ in range(2):  # the first answer may be lost
        assert await s.init_once((producer_id, epoch)) == (OK, producer_id, epoch + 1)
    for stale in (
        (producer_id, epoch - 1),
        (producer_id, epoch + 7),
        (producer_id + 1, epoch + 1),
    ):
        assert await s.init_once(stale) == (FENCED, -1, -1)
        assert await s.init_once(stale, version=3) == (OLD_EPOCH, -1, -1)


@pytest.mark.parametrize("timeout_ms", [-1, 0, 900_001])
async def test_a_timeout_has_its_bounds(s: Session, timeout_ms: int) -> None:
    code, *_ = await s.init_once(timeout_ms=timeout_ms)
    assert code == ErrorCode.INVALID_TRANSACTION_TIMEOUT


@pytest.mark.parametrize("stale", [False, True], ids=["new", "stale"])
@pytest.mark.parametrize("version", [TV1, TV2])
async def test_a_new_producer_aborts_what_the_old_one_began(
    s: Session, version: int, stale: bool
) -> None:
    pid = producer_id, epoch = await s.init()
    await begin(s, pid, b"a", version=version)
    # An epoch that is over does it, too.
    code, *_ = await s.init_once((producer_id, epoch - 1) if stale else (-1, -1))
    assert code == CONCURRENT
    assert await s.complete() == "CompleteAbort"
    assert [plainly(r) for r in await s.log()] == [b"a", (epoch + 1, False)]

    # The old one is fenced, wherever it looks,
    for partition in (0, 1):
        code = await s.produce(pid, 1, version=version, partition=partition)
        assert code == OLD_EPOCH
    assert await s.add(pid, 0) == FENCED
    assert await s.add(pid, 0, version=1) == OLD_EPOCH
    assert await s.add_offsets(pid) == FENCED
    assert await s.add_offsets(pid, version=1) == OLD_EPOCH
    for offsets_version in (3, 5):
        assert await s.commit_offset(pid, 1, version=offsets_version) == OLD_EPOCH
    for commit in (True, False):
        assert await s.end(pid, commit, version=4) == FENCED
        assert await s.end(pid, commit, version=1) == OLD_EPOCH
    # but TV2 takes its next epoch for an answer that was lost.
    assert (await s.end_once(pid, True, version=5))[0] == BAD_STATE
    assert await s.end_once(pid, False, version=5) == (OK, producer_id, epoch + 1)

    # Nobody else has come: it may go on (KIP-588).
    assert await s.init_once(pid) == (OK, producer_id, epoch + 1)
    assert await s.init() == (producer_id, epoch + 2)
    assert await s.init_once(pid) == (FENCED, -1, -1)


@pytest.mark.parametrize("version", [TV1, TV2])
async def test_a_transaction_has_its_time(s: Session, version: int) -> None:
    pid = producer_id, epoch = await s.init(timeout_ms=100)
    await begin(s, pid, b"a", version=version)
    await until(s.describe, lambda found: found.transaction_state == "CompleteAbort")
    assert [plainly(r) for r in await s.log()] == [b"a", (epoch + 1, False)]
    assert await s.produce(pid, 1, version=version) == OLD_EPOCH
    assert await s.end(pid, True) == FENCED
    assert await s.init_once(pid) == (OK, producer_id, epoch + 1)


# -- what is in a transaction


async def test_a_partition_has_to_be_added_before(s: Session) -> None:
    """KIP-890: else its records would hang, if this were a late request."""
    pid = await s.init()
    for version, code in ((11, ErrorCode.TRANSACTION_ABORTABLE), (10, BAD_STATE), (3, BAD_STATE)):
        answer = await s.produce_once(pid, 0, version=version)
        assert (answer.error_code, answer.base_offset) == (code, -1)
        if version == 10:
            assert answer.log_start_offset == -1
            assert answer.error_message == "Partition was not added to the transaction"
        if version == 11:
            assert answer.error_message is None
    assert await s.log() == []


async def test_partitions_are_added_all_or_none(s: Session) -> None:
    pid = producer_id, epoch = await s.init()
    assert await s.add_once(pid, 0, 9) == [
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert await s.produce(pid, 0) == ErrorCode.TRANSACTION_ABORTABLE
    assert await s.add_once((producer_id, epoch + 1), 0) == [FENCED]
    assert await s.add_once((producer_id, epoch + 1), 0, version=1) == [OLD_EPOCH]
    assert await s.add_once((producer_id + 1, epoch), 0) == [MAPPING]
    for _ in range(2):
        assert await s.add_once(pid, 0, 1) == [OK, OK]
    found = await s.describe()
    assert found.transaction_state == "Ongoing"
    assert (found.producer_id, found.producer_epoch) == pid
    assert [(t.topic, sorted(t.partitions)) for t in found.topics] == [(s.topic, [0, 1])]
    s.topic = "__consumer_offsets"
    assert await s.add_once(pid, 0) == [ErrorCode.TOPIC_AUTHORIZATION_FAILED]


async def test_produce_v12_adds_the_partition(s: Session) -> None:
    """KIP-890, part 2."""
    pid = producer_id, epoch = await s.init()
    assert await s.produce((producer_id, epoch - 1), 0, version=TV2) == OLD_EPOCH
    assert await s.produce((producer_id, epoch + 1), 0, version=TV2) == OLD_EPOCH
    assert await s.produce((producer_id + 1, epoch), 0, version=TV2) == MAPPING
    assert await s.produce(pid, 0, version=TV2) == OK
    found = await s.describe()
    assert found.transaction_state == "Ongoing"
    assert [(t.topic, t.partitions) for t in found.topics] == [(s.topic, (0,))]


async def test_what_nobody_has_initialized_is_no_transaction(s: Session) -> None:
    pid = await s.init()
    for name, code in (("", ErrorCode.INVALID_REQUEST), (f"{s.txn}-other", MAPPING)):
        known, s.txn = s.txn, name
        assert await s.add_once(pid, 0) == [code]
        assert await s.add_offsets(pid) == code
        for version in (4, 5):
            assert (await s.end_once(pid, True, version=version))[0] == code
        for version in (3, 5):
            assert await s.commit_offset(pid, 1, version=version) == code
        s.txn = known
    for version in (10, 11, 12):
        assert await s.produce(pid, 0, version=version, txn=f"{s.txn}-other") == MAPPING


@pytest.mark.parametrize("version", [TV1, TV2])
async def test_sequences_are_checked_in_transactions_too(s: Session, version: int) -> None:
    pid = await s.init()
    await begin(s, pid, b"a", b"b", version=version)
    answer = await s.produce_once(pid, 0, b"a", b"b", version=version)
    assert (answer.error_code, answer.base_offset) == (OK, 0)
    assert await s.produce(pid, 3, version=version) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    # Not part of the transaction, although of its producer.
    assert await s.produce(pid, 2, version=version, attributes=0) == BAD_STATE
    assert await s.produce(pid, 2, version=version) == OK


async def test_a_refused_batch_leaves_no_gap(s: Session) -> None:
    """What begins a transaction here is the lowest sequence that has come."""
    pid = await s.init()
    assert await s.produce(pid, 4) == ErrorCode.TRANSACTION_ABORTABLE
    assert await s.add(pid, 0) == OK
    assert await s.produce(pid, 5) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert await s.produce(pid, 4) == OK
    assert await s.produce(pid, 5) == OK


async def test_an_unknown_producer_of_tv2_begins_with_0(s: Session) -> None:
    pid = await s.init()
    assert await s.produce(pid, 5, version=TV2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert await s.produce(pid, 0, version=TV2) == OK


# -- how it ends


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("version", [TV1, TV2])
async def test_each_partition_gets_a_marker(s: Session, version: int, commit: bool) -> None:
    pid = producer_id, epoch = await s.init()
    await begin(s, pid, b"a", version=version)
    assert await s.produce(pid, 0, b"b", version=TV2, partition=1) == OK
    assert await end(s, pid, commit, version=version) == (producer_id, epoch + (version == TV2))
    for partition, value in enumerate((b"a", b"b")):
        data, marker = await s.log(partition)
        assert plainly(data) == value
        assert plainly(marker) == (epoch + (version == TV2), commit)
        assert (marker.producer_id, marker.sequence) == (producer_id, -1)
        assert marker.is_transactional
        assert (marker.key, marker.value) == (bytes([0, 0, 0, commit]), bytes(6))
    found = await s.describe()
    assert found.transaction_state == ("CompleteCommit" if commit else "CompleteAbort")
    assert found.topics == ()


async def test_with_tv1_the_epoch_and_the_sequence_go_on(s: Session) -> None:
    pid = producer_id, epoch = await s.init()
    await begin(s, pid, version=TV1)
    for wrong, code in (((producer_id, epoch + 1), FENCED), ((producer_id + 1, epoch), MAPPING)):
        assert (await s.end_once(wrong, True))[0] == code
    assert await s.end(pid, True) == OK
    # It may ask again, for the same.
    assert await s.end(pid, True) == OK
    assert await s.end(pid, False) == BAD_STATE
    # Late requests do not begin the next one.
    for sequence in (0, 1):
        assert await s.produce(pid, sequence) == ErrorCode.TRANSACTION_ABORTABLE
    assert await s.add(pid, 0) == OK
    assert await s.produce(pid, 0) == OK  # a repeated batch, which is known
    assert await s.end(pid, False) == OK
    assert await s.end(pid, True) == BAD_STATE


async def test_with_tv2_the_epoch_changes_and_the_sequence_starts_again(s: Session) -> None:
    pid = producer_id, epoch = await s.init()
    await begin(s, pid, version=TV2)
    after = await end(s, pid, True, version=TV2)
    assert after == (producer_id, epoch + 1)
    # It may ask again, for the same.
    assert await s.end(pid, True, version=5) == (OK, *after)
    assert (await s.end(pid, False, version=5))[0] == BAD_STATE
    for sequence in (0, 1):
        assert await s.produce(pid, sequence, version=TV2) == OLD_EPOCH
    assert (await s.end(after, True, version=5))[0] == BAD_STATE  # nothing to commit
    assert await s.produce(after, 1, version=TV2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert await s.produce(after, 0, version=TV2) == OK
    assert await end(s, after, False, version=TV2) == (producer_id, epoch + 2)


async def test_only_with_tv2_nothing_can_be_aborted(s: Session) -> None:
    """Then a client need not know whether any of its sends has arrived."""
    pid = producer_id, epoch = await s.init()
    for version in (4, 5):
        assert (await s.end_once(pid, True, version=version))[0] == BAD_STATE
    assert await s.end(pid, False) == BAD_STATE
    for bump in (1, 2):
        pid = await end(s, pid, False, version=TV2)
        assert pid == (producer_id, epoch + bump)
    assert await s.log() == []


async def test_protocols_may_change_from_one_transaction_to_the_next(s: Session) -> None:
    pid = await s.init()
    epoch = pid[1]
    await begin(s, pid, b"a", version=TV1)
    await end(s, pid, True, version=TV1)
    assert await s.produce(pid, 1, b"b", version=TV2) == OK
    pid = await end(s, pid, True, version=TV2)
    await begin(s, pid, b"c", version=TV1)
    await end(s, pid, False, version=TV1)
    assert [plainly(r) for r in await s.log()] == [
        b"a",
        (epoch, True),
        b"b",
        (epoch + 1, True),
        b"c",
        (epoch + 1, False),
    ]


async def test_a_protocol_is_that_of_the_request(s: Session) -> None:
    """EndTxn v5 after AddPartitionsToTxn bumps the epoch, EndTxn v4 after Produce v12 does not."""
    pid = producer_id, epoch = await s.init()
    await begin(s, pid, version=TV1)
    pid = await end(s, pid, True, version=TV2)
    assert pid == (producer_id, epoch + 1)
    await begin(s, pid, version=TV2)
    await end(s, pid, True, version=TV1)
    assert await s.end(pid, True) == OK
    assert await end(s, pid, False, version=TV2) == (producer_id, epoch + 2)


async def test_all_versions_do_the_same(s: Session) -> None:
    pid = await s.init()
    for version in range(4):
        assert await s.add(pid, 0, version=version) == OK
    for sequence, version in enumerate(range(3, 13)):
        assert await s.produce(pid, sequence, version=version) == OK
    for version in range(5):
        assert await s.add_offsets(pid, version=version) == OK
    for version in range(6):
        assert await s.commit_offset(pid, version, version=version) == OK
    for version in range(5):
        assert await s.end(pid, True, version=version) == OK
    assert (await s.fetch_offset())[1] == 5


@pytest.mark.slow
async def test_after_the_last_epoch_comes_a_new_producer_id(s: Session) -> None:
    producer_id, epoch = await s.init()
    last = 32766
    while epoch < last:
        sent = [
            s.client.send(
                "init_producer_id",
                5,
                transactional_id=s.txn,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
            for _ in range(min(500, last - epoch))
        ]
        for correlation_id in sent:
            response = await s.client.receive("init_producer_id", 5, correlation_id)
        epoch = response.producer_epoch
    old = (producer_id, last)
    await begin(s, old, b"a", version=TV2)
    new = await end(s, old, True, version=TV2)
    assert new[0] != producer_id
    assert new[1] == 0
    # The first answer may be lost.
    assert await s.end(old, True, version=5) == (OK, *new)
    assert (await s.end(old, False, version=5))[0] == BAD_STATE
    assert await s.init_once(old) == (OK, *new)
    assert (await s.init_once((producer_id, 5)))[0] == FENCED
    await begin(s, new, b"b", version=TV2)
    assert (await s.end(old, True, version=5))[0] == MAPPING
    assert [(r.producer_id, r.producer_epoch) for r in await s.log()] == [
        old,
        (producer_id, last + 1),
        new,
    ]


# -- what consumers see


async def test_an_open_transaction_is_not_committed_for_anybody(s: Session) -> None:
    pid = await s.init()
    await begin(s, pid, b"a", version=TV2)
    found = await s.fetch()
    assert (found.records, found.last_stable_offset, found.high_watermark) == (b"", 0, 1)
    assert found.aborted_transactions == ()
    assert (await s.latest(committed=True), await s.latest(committed=False)) == (0, 1)
    found = await s.fetch(committed=False)
    assert found.records != b""
    assert found.aborted_transactions is None
    await end(s, pid, True, version=TV2)
    assert (await s.fetch()).last_stable_offset == 2
    assert await s.latest(committed=True) == 2


async def test_aborted_transactions_are_named_where_they_are(s: Session) -> None:
    pid = await s.init()
    producer_id = pid[0]
    for number, commit in enumerate((False, True, False)):
        await begin(s, pid, b"%d" % number, version=TV2)
        pid = await end(s, pid, commit, version=TV2)
    for offset, first_offsets in ((0, [0, 4]), (1, [0, 4]), (2, [4]), (5, [4]), (6, [])):
        found = await s.fetch(offset=offset)
        assert [(a.producer_id, a.first_offset) for a in found.aborted_transactions] == [
            (producer_id, first) for first in first_offsets
        ]
        assert (found.last_stable_offset, found.high_watermark) == (6, 6)


async def test_the_oldest_open_transaction_holds_up_the_others(s: Session) -> None:
    first = await s.init()
    await begin(s, first, b"a0", version=TV2)
    name, s.txn = s.txn, f"{s.txn}-2"
    second = await s.init()
    await begin(s, second, b"b0", b"b1", version=TV2)
    await end(s, second, True, version=TV2)
    s.txn = name
    assert await s.produce(first, 1, b"a1", version=TV2) == OK
    found = await s.fetch()
    assert (found.last_stable_offset, found.high_watermark, found.records) == (0, 5, b"")
    await end(s, first, False, version=TV2)
    found = await s.fetch()
    assert (found.last_stable_offset, found.high_watermark) == (6, 6)
    assert [(a.producer_id, a.first_offset) for a in found.aborted_transactions] == [(first[0], 0)]


# -- offsets


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("version", [TV1, TV2])
async def test_offsets_count_when_the_transaction_is_committed(
    s: Session, version: int, commit: bool
) -> None:
    pid = await s.init()
    if version == TV1:
        for offsets_version, code in (
            (0, BAD_STATE),
            (3, BAD_STATE),
            (4, ErrorCode.TRANSACTION_ABORTABLE),
        ):
            assert await s.commit_offset(pid, 5, version=offsets_version) == code
        assert await s.add_offsets(pid) == OK
    assert await s.commit_offset(pid, 5, version=3 if version == TV1 else 5) == OK
    assert (await s.describe()).transaction_state == "Ongoing"
    assert await s.fetch_offset() == (OK, -1, -1, "")
    assert (await s.fetch_offset(stable=True))[0] == ErrorCode.UNSTABLE_OFFSET_COMMIT
    await end(s, pid, commit, version=version)
    found = await until(lambda: s.fetch_offset(stable=True), lambda found: found[0] == OK)
    assert found == ((OK, 5, 3, "m") if commit else (OK, -1, -1, ""))


async def test_offsets_are_of_partitions_that_exist(s: Session) -> None:
    pid = await s.init()
    code = await s.commit_offset(pid, 5, version=5, partition=9)
    assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    s.group = ""
    assert await s.commit_offset(pid, 5, version=5) == ErrorCode.INVALID_GROUP_ID


async def test_a_group_without_members_takes_offsets_of_nobody_else(s: Session) -> None:
    pid = await s.init()
    code = await s.commit_offset(pid, 5, version=5, generation=3, member="x")
    assert code == ErrorCode.ILLEGAL_GENERATION  # there is no such group yet
    assert await s.commit_offset(pid, 5, version=5) == OK
    for member in ("", "x"):
        code = await s.commit_offset(pid, 5, version=5, generation=3, member=member)
        assert code == ErrorCode.UNKNOWN_MEMBER_ID
    assert await s.commit_offset(pid, 5, version=5, member="x") == OK
    assert await s.commit_offset(pid, 5, version=5, instance="i") == OK


# -- what a broker tells of itself


@pytest.mark.parametrize("version", range(1, 7))
async def test_every_coordinator_has_a_message(s: Session, version: int) -> None:
    for kind in (0, 1):
        response = await s.client.request(
            "find_coordinator", version, key=s.txn, key_type=kind, coordinator_keys=[s.txn]
        )
        found = response.coordinators[0] if version >= 4 else response
        assert (found.error_code, found.node_id) == (OK, 1)
        assert found.error_message == ("" if version >= 4 else "NONE")


@pytest.mark.parametrize("version", [3, 4])
async def test_the_transaction_version_is_told(s: Session, version: int) -> None:
    response = await s.client.request(
        "api_versions", version, client_software_name="a", client_software_version="1"
    )
    name = "transaction.version"
    finalized = {f.name: f.max_version_level for f in response.finalized_features}
    assert finalized[name] == 2
    supported = {f.name: (f.min_version, f.max_version) for f in response.supported_features}
    # A lowest level of 0 is news since v4 (KIP-1022).
    assert supported.get(name) == (None if version == 3 else (0, 2))
    ranges = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
    wanted = {10: (0, 6), 22: (0, 5), 24: (0, 5), 25: (0, 4), 26: (0, 5), 28: (0, 5)}
    assert {key: ranges[key] for key in wanted} == wanted
