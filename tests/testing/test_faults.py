from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import encode_batch
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.faults import Faults, Injection, ReceivedRequest
from asyncproducer.testing.messages import Message
from asyncproducer.testing.network import MemoryNetwork
from asyncproducer.testing.raw_client import RawClient

pytestmark = pytest.mark.virtual_time

T0 = 1_700_000_000_000


# -- the rules alone


def request(
    api: str = "produce",
    *,
    node: int = 1,
    partitions: tuple[tuple[str | None, int | None], ...] = (("t", 0),),
) -> ReceivedRequest:
    return ReceivedRequest(
        node_id=node,
        connection_id=1,
        received_at=0.0,
        api=api,
        api_key=0,
        version=12,
        correlation_id=1,
        size_bytes=10,
        partitions=partitions,
    )


@pytest.fixture
def faults() -> Faults:
    return Faults(["produce", "metadata", "init_producer_id"])


def test_the_first_rule_that_matches_wins(faults: Faults) -> None:
    first = faults.inject("produce", error="REQUEST_TIMED_OUT")
    second = faults.inject("produce", error="CORRUPT_MESSAGE")
    assert faults.match(request("metadata")) is None
    assert [faults.match(request()) for _ in range(3)] == [first, second, None]
    assert (first.hits, second.hits) == (1, 1)


def test_a_rule_is_used_up_after_so_many_times(faults: Faults) -> None:
    twice = faults.inject("produce", error=7, times=2)
    always = faults.inject("produce", error=7, times=None)
    assert [faults.match(request()) for _ in range(4)] == [twice, twice, always, always]
    assert (twice.used_up, always.used_up) == (True, False)


def test_a_rule_asks_for_all_that_it_names(faults: Faults) -> None:
    fault = faults.inject(
        "produce", node=2, topic="t", partition=1, times=None, when=lambda r: r.version == 12
    )
    assert faults.match(request(node=1, partitions=(("t", 1),))) is None
    assert faults.match(request(node=2, partitions=(("t", 0), ("u", 1)))) is None
    assert faults.match(request(node=2, partitions=(("u", 1), ("t", 1)))) is fault
    other = request(node=2, partitions=(("t", 1),))
    other.version = 11
    assert faults.match(other) is None


def test_a_request_for_a_whole_topic_names_all_of_its_partitions(faults: Faults) -> None:
    fault = faults.inject("metadata", partition=3)
    assert faults.match(request("metadata", partitions=(("t", None),))) is fault


def test_a_rule_without_an_api_concerns_all(faults: Faults) -> None:
    fault = faults.inject(drop="before")
    assert faults.match(request("metadata")) is fault


@pytest.mark.parametrize("name", ["init_producer_id", "InitProducerId", "INIT_PRODUCER_ID"])
def test_an_api_is_known_by_all_of_its_names(faults: Faults, name: str) -> None:
    fault = faults.inject(name)
    assert faults.match(request("init_producer_id")) is fault


def test_a_removed_rule_does_nothing(faults: Faults) -> None:
    fault = faults.inject("produce")
    fault.remove()
    fault.remove()
    assert faults.match(request()) is None
    faults.inject("produce")
    faults.clear()
    assert faults.match(request()) is None


def test_the_error_is_for_what_the_rule_names(faults: Faults) -> None:
    expected = Injection(ErrorCode.MESSAGE_TOO_LARGE, None, (), False)
    fault = faults.inject(error=10, topic="t", partition=1)
    assert fault.injected("t", 1) == expected
    assert [fault.injected(*part) for part in (("t", 0), ("u", 1), ("t",), ())] == [None] * 4
    of_all = faults.inject(error=10)
    assert of_all.injected() == of_all.injected("t") == of_all.injected("t", 1) == expected
    assert faults.inject(delay=1).injected() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api": "produces"}, "produces"),
        ({"error": "NO_SUCH_ERROR"}, "NO_SUCH_ERROR"),
        ({"error": 9999}, "9999"),
        ({"times": 0}, "times=0"),
        ({"delay": -1}, "negative"),
        ({"throttle_ms": -1}, "negative"),
        ({"truncate": -1}, "negative"),
        ({"drop": "during"}, "during"),
        ({"corrupt": "everything"}, "everything"),
    ],
)
def test_nonsense_is_refused(faults: Faults, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faults.inject(**options)


def test_a_rule_shows_what_it_is(faults: Faults) -> None:
    text = repr(faults.inject("produce", error="REQUEST_TIMED_OUT", topic="t"))
    for part in ("produce", "REQUEST_TIMED_OUT", "topic=t", "hits=0"):
        assert part in text
    assert "node" not in text


async def test_reached_waits_for_that_many_requests(faults: Faults) -> None:
    fault = faults.inject("produce", times=None)
    waiting = asyncio.create_task(fault.reached(2))
    cancelled = asyncio.create_task(fault.reached(1))
    await asyncio.sleep(1)
    cancelled.cancel()
    await asyncio.sleep(1)
    faults.match(request())
    await fault.reached()
    await asyncio.sleep(1)
    assert not waiting.done()
    faults.match(request())
    await waiting
    await fault.reached(2)


# -- the rules at work


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    network = MemoryNetwork()
    async with EmbeddedCluster(2, topics={"t": 2}, network=network, start_time_ms=T0) as cluster:
        yield cluster


async def connect(cluster: EmbeddedCluster, node: int = 1) -> RawClient:
    return await RawClient.connect(cluster.address(node), cluster.connector)


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[RawClient]:
    async with await connect(cluster) as client:
        yield client


def fields(*partitions: int, acks: int = -1, topic: str = "t") -> dict[str, Any]:
    data = encode_batch([(b"k", b"v")], timestamps=[T0])
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout": 1000,
        "topic_data": [
            {
                "name": topic,
                "partition_data": [{"index": i, "records": data} for i in partitions or (0,)],
            }
        ],
    }


async def produce(client: RawClient, *partitions: int, version: int = 12) -> list[Message]:
    response = await client.request("produce", version, **fields(*partitions))
    return list(response.responses[0].partition_responses)


async def code(client: RawClient) -> ErrorCode:
    return ErrorCode((await produce(client))[0].error_code)


def stored(cluster: EmbeddedCluster, partition: int = 0) -> int:
    return cluster.end_offset("t", partition)


async def assert_closed(client: RawClient) -> None:
    try:
        assert await client.reader.read() == b""
    except ConnectionResetError:
        pass


async def test_an_error_is_answered_and_nothing_is_stored(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    fault = cluster.inject("produce", error="REQUEST_TIMED_OUT", times=2)
    codes = [await code(client) for _ in range(3)]
    assert codes == [ErrorCode.REQUEST_TIMED_OUT] * 2 + [ErrorCode.NONE]
    assert (fault.hits, stored(cluster)) == (2, 1)


async def test_an_error_after_the_append(cluster: EmbeddedCluster, client: RawClient) -> None:
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS_AFTER_APPEND", after_append=True)
    assert await code(client) == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    assert stored(cluster) == 1


async def test_an_error_for_one_partition_leaves_the_others_alone(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.move_leader("t", 1, 1)
    cluster.inject("produce", error="CORRUPT_MESSAGE", topic="t", partition=1)
    answers = await produce(client, 0, 1)
    assert [a.error_code for a in answers] == [ErrorCode.NONE, ErrorCode.CORRUPT_MESSAGE]
    assert (stored(cluster, 0), stored(cluster, 1)) == (1, 0)


async def test_an_injected_not_leader_has_the_leader_for_a_hint(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", error="NOT_LEADER_OR_FOLLOWER", times=None)
    answer = (await produce(client))[0]
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (answer.current_leader.leader_id, answer.current_leader.leader_epoch) == (1, 0)
    response = await client.request("produce", 12, **fields(topic="unknown"))
    (answer,) = response.responses[0].partition_responses
    assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert answer.current_leader.leader_id == -1


async def test_record_errors_and_a_message_are_answered(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject(
        "produce",
        error="INVALID_RECORD",
        record_errors=[(0, "bad"), (3, None)],
        error_message="some are bad",
    )
    (answer,) = await produce(client)
    errors = [(e.batch_index, e.batch_index_error_message) for e in answer.record_errors]
    assert errors == [(0, "bad"), (3, None)]
    assert (answer.error_code, answer.error_message) == (ErrorCode.INVALID_RECORD, "some are bad")


async def test_an_error_with_acks_0_closes_the_connection(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", error="NOT_LEADER_OR_FOLLOWER")
    client.send("produce", 12, **fields(acks=0))
    await assert_closed(client)


def topic_fields(name: str = "t") -> dict[str, Any]:
    return {
        "topics": [{"name": name, "topic_id": None}],
        "allow_auto_topic_creation": True,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }


OTHER_APIS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "api_versions": (4, {"client_software_name": "a", "client_software_version": "1"}, None),
    "init_producer_id": (4, {"transactional_id": None, "transaction_timeout": 1}, None),
    "find_coordinator": (3, {"key": "k"}, None),
    "metadata": (12, topic_fields(), lambda r: r.topics[0]),
    "create_topics": (
        7,
        {
            "topics": [
                {
                    "name": "n",
                    "num_partitions": 1,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [],
                }
            ],
            "timeout": 1,
        },
        lambda r: r.topics[0],
    ),
    "delete_topics": (3, {"topic_names": ["t"], "timeout": 1}, lambda r: r.responses[0]),
    "create_partitions": (
        3,
        {
            "topics": [{"name": "t", "count": 9, "assignments": None}],
            "timeout": 1,
            "validate_only": False,
        },
        lambda r: r.results[0],
    ),
    "list_offsets": (
        4,
        {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        },
        lambda r: r.topics[0].partitions[0],
    ),
    "fetch": (
        4,
        {
            "max_wait": 0,
            "min_bytes": 0,
            "isolation_level": 0,
            "topics": [
                {
                    "topic": "t",
                    "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}],
                }
            ],
        },
        lambda r: r.responses[0].partitions[0],
    ),
}


@pytest.mark.parametrize("api", OTHER_APIS)
async def test_every_api_can_fail(cluster: EmbeddedCluster, client: RawClient, api: str) -> None:
    version, options, find = OTHER_APIS[api]
    cluster.inject(api, error="CLUSTER_AUTHORIZATION_FAILED")
    answer = await client.request(api, version, **options)
    failed = answer if find is None else find(answer)
    assert failed.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert list(cluster.records("t")) == []
    # It was not done, and is now.
    answer = await client.request(api, version, **options)
    assert (answer if find is None else find(answer)).error_code == ErrorCode.NONE


async def test_metadata_can_fail_for_a_topic_a_partition_or_all(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t")
    cluster.inject("metadata", error="LEADER_NOT_AVAILABLE", topic="t", partition=1)
    cluster.inject("metadata", error="REBOOTSTRAP_REQUIRED")
    (topic,) = (await client.request("metadata", 13, **topic_fields())).topics
    assert topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    (topic,) = (await client.request("metadata", 13, **topic_fields())).topics
    codes = [(topic.error_code, p.error_code) for p in topic.partitions]
    assert codes == [
        (ErrorCode.NONE, ErrorCode.NONE),
        (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE),
    ]
    response = await client.request("metadata", 13, **topic_fields())
    assert (response.error_code, response.topics) == (ErrorCode.REBOOTSTRAP_REQUIRED, ())


async def test_all_topics_can_fail_too(cluster: EmbeddedCluster, client: RawClient) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t")
    (topic,) = (await client.request("metadata", 1, topics=None)).topics
    assert topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED


async def test_api_versions_can_be_unsupported(cluster: EmbeddedCluster, client: RawClient) -> None:
    cluster.inject("api_versions", error="UNSUPPORTED_VERSION")
    response = await client.request("api_versions", 0)
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert [(a.api_key, a.max_version) for a in response.api_keys] == [(18, 4)]


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_delayed_answer_holds_back_the_next_ones(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", delay=2.5)
    started = now()
    first = client.send("produce", 12, **fields())
    second = client.send("metadata", 12, **topic_fields())
    await asyncio.sleep(1)
    assert stored(cluster) == 1  # processed, but not answered
    await client.receive("produce", 12, first)
    await client.receive("metadata", 12, second)
    assert now() - started == 2.5


async def test_other_connections_are_not_held_back(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", delay=5)
    client.send("produce", 12, **fields())
    async with await connect(cluster) as other:
        await asyncio.sleep(1)
        assert await code(other) == ErrorCode.NONE
        assert now() < 5


async def test_a_held_answer_waits_for_its_release(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    fault = cluster.inject("produce", hold=True)
    correlation_id = client.send("produce", 12, **fields())
    await fault.reached()
    await asyncio.sleep(100)
    assert stored(cluster) == 1
    assert client.reader._buffer == b""  # type: ignore[attr-defined]
    fault.release()
    await client.receive("produce", 12, correlation_id)
    assert now() == 100


async def test_clearing_the_faults_releases_what_is_held(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", hold=True)
    later = cluster.inject("produce", error="REQUEST_TIMED_OUT")
    correlation_id = client.send("produce", 12, **fields())
    await asyncio.sleep(1)
    cluster.clear_faults()
    assert (await client.receive("produce", 12, correlation_id)).responses
    assert await code(client) == ErrorCode.NONE
    assert later.hits == 0


async def test_a_cluster_closes_although_answers_are_held() -> None:
    async with EmbeddedCluster(network=MemoryNetwork(), topics={"t": 1}) as cluster:
        fault = cluster.inject(hold=True)
        client = await connect(cluster)
        client.send("produce", 12, **fields())
        await fault.reached()
    await assert_closed(client)
    await client.close()


@pytest.mark.parametrize(("drop", "count"), [("before", 0), ("after", 1)])
async def test_a_connection_is_dropped_before_or_after_the_append(
    cluster: EmbeddedCluster, client: RawClient, drop: Any, count: int
) -> None:
    cluster.inject("produce", drop=drop, delay=1)
    client.send("produce", 12, **fields())
    client.send("produce", 12, **fields())  # is lost in any case
    await assert_closed(client)
    assert (stored(cluster), now()) == (count, 1)
    async with await connect(cluster) as other:
        assert await code(other) == ErrorCode.NONE


@pytest.mark.parametrize("after_append", [True, False])
async def test_a_black_hole_keeps_the_connection_and_answers_nothing_more(
    cluster: EmbeddedCluster, client: RawClient, after_append: bool
) -> None:
    fault = cluster.inject("produce", no_answer=True, after_append=after_append)
    client.send("produce", 12, **fields())
    client.send("metadata", 12, **topic_fields())
    await fault.reached()
    client.send("metadata", 12, **topic_fields())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1000):
            await client.reader.read()
    assert cluster.connection_count(1) == 1
    assert stored(cluster) == int(after_append)
    assert cluster.received("metadata") == []
    async with await connect(cluster) as other:
        assert await code(other) == ErrorCode.NONE
    await client.close()
    await asyncio.sleep(1)
    assert cluster.connection_count(1) == 0


async def test_a_throttled_connection_is_silent_for_so_long(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", throttle_ms=1500)
    response = await client.request("produce", 12, **fields())
    assert response.throttle_time.total_seconds() == 1.5
    assert now() == 0  # it is answered at once (KIP-219)
    assert await code(client) == ErrorCode.NONE
    assert now() == 1.5


@pytest.mark.parametrize("size", [0, 1, 4, 9, 20])
async def test_an_answer_is_cut(cluster: EmbeddedCluster, client: RawClient, size: int) -> None:
    cluster.inject("produce", truncate=size)
    client.send("produce", 12, **fields())
    assert len(await client.reader.read()) == size
    assert stored(cluster) == 1


async def test_an_answer_has_another_correlation_id(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", corrupt="correlation_id")
    with pytest.raises(ValueError, match="correlation id"):
        await produce(client)


async def test_an_answer_is_garbage_behind_its_header(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", corrupt="garbage", times=2)
    frames = []
    for _ in range(2):
        correlation_id = client.send("produce", 12, **fields())
        frame = await client.receive_frame()
        assert int.from_bytes(frame[:4], "big") == correlation_id
        frames.append(frame[4:])
    good = client.send("produce", 12, **fields())
    assert len(await client.receive_frame()) == len(frames[0]) + 4
    assert good == 3
    assert frames[0] != frames[1]


async def test_an_answer_has_an_impossible_size(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("produce", corrupt="size")
    client.send("produce", 12, **fields())
    assert await client.reader.readexactly(4) == b"\x7f\xff\xff\xff"


@pytest.mark.parametrize("effect", [{"delay": 60}, {"hold": True}, {"throttle_ms": 60_000}])
async def test_a_client_that_goes_away_is_not_waited_for(
    cluster: EmbeddedCluster, effect: Mapping[str, Any]
) -> None:
    """What it sent behind is processed all the same."""
    cluster.inject("produce", **effect)
    async with await connect(cluster) as client:
        client.send("produce", 12, **fields())
        client.send("produce", 12, **fields())
        await asyncio.sleep(1)
        assert stored(cluster) == 1
        client.writer.transport.abort()
    await asyncio.sleep(1)
    assert (stored(cluster), cluster.connection_count(1)) == (2, 0)


async def test_when_sees_the_request(cluster: EmbeddedCluster, client: RawClient) -> None:
    seen: list[ReceivedRequest] = []

    def is_second(request: ReceivedRequest) -> bool:
        seen.append(request)
        assert request.body is not None
        return len(seen) == 2

    cluster.inject("produce", error="REQUEST_TIMED_OUT", when=is_second)
    codes = [await code(client) for _ in range(3)]
    assert codes == [ErrorCode.NONE, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NONE]
    assert len(seen) == 2  # then the rule was used up


async def test_a_rule_for_one_node_leaves_the_others_alone(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", node=2, times=None)
    async with await connect(cluster, 2) as other:
        answers = [
            (await c.request("metadata", 12, **topic_fields())).topics[0].error_code
            for c in (client, other)
        ]
    assert answers == [ErrorCode.NONE, ErrorCode.TOPIC_AUTHORIZATION_FAILED]


async def test_a_rule_without_effect_is_an_observer(
    cluster: EmbeddedCluster, client: RawClient
) -> None:
    fault = cluster.inject("produce", times=None)
    assert [await code(client) for _ in range(2)] == [ErrorCode.NONE] * 2
    assert (fault.hits, stored(cluster)) == (2, 2)
