# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
from __future__ import annotations

import asyncio
import gc
import inspect
import struct
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import Any

import pytest

from asyncproducer import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    BufferFull,
    BufferTimeout,
    Delivery,
    ErrorCode,
    Interceptor,
    InvalidPartition,
    InvalidTimestamp,
    InvalidTopic,
    MetadataNotReady,
    MetadataTimeout,
    Producer,
    ProducerClosed,
    Record,
    RecordMetadata,
    RecordTooLarge,
    SerializationError,
    TransactionAborted,
    WrongLoopError,
)
from asyncproducer import intake as module
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.partitioner import partition_for_key
from asyncproducer.core.wire import ApiKey
from asyncproducer.encoding import MAX_TIMESTAMP
from asyncproducer.intake import Pending
from asyncproducer.net.cluster import Cluster
from asyncproducer.net.frames import FrameReader, frame
from asyncproducer.plugins import TopicView
from asyncproducer.records import Header
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.clock import VirtualTimeLoop
from asyncproducer.testing.handlers import APIS, Call
from asyncproducer.testing.node import Listener
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

COMPILED = not str(module.__file__).endswith(".py")
CODEC_IDS = {"gzip": 1, "lz4": 3}


def values(cluster: EmbeddedCluster, topic: str, partition: int = 0) -> list[bytes | None]:
    return [record.value for record in cluster.records(topic, partition)]


def now() -> float:
    return asyncio.get_running_loop().time()


# -- metadata ----------------------------------------------------------------------------------


async def test_only_the_first_send_waits_for_metadata(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-01: later ones, also with a partition, do not touch the network before they enter."""
    async with new_producer() as producer:
        await producer.send("t4", b"first")
        asked = len(cluster.received("metadata"))
        for partition in range(4):
            producer.send_nowait("t4", b"later", partition=partition)
        await producer.flush()
        assert len(cluster.received("metadata")) == asked


async def test_unknown_topic_times_out_with_the_brokers_reason(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-03: asked for again and again, until max_block_ms."""
    async with new_producer(max_block_ms=5000) as producer:
        began = now()
        with pytest.raises(MetadataTimeout, match="'missing' is not known after 5000 ms") as caught:
            await producer.send("missing", b"value")
        assert now() - began == pytest.approx(5.0)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value.__cause__, BrokerError)
        assert caught.value.__cause__.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        asked = [r for r in cluster.received("metadata") if ("missing", None) in r.partitions]
        assert len(asked) >= 5
        assert producer.metrics()["record_error_total"] == 1


async def test_auto_created_topic_is_waited_for(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(network=network) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        await producer.send("new", b"value")
        assert values(cluster, "new") == [b"value"]


async def test_topic_that_appears_is_served(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send("late", b"value"))
        await asyncio.sleep(10)
        assert not sending.done()
        cluster.create_topic("late")
        assert (await sending).offset == 0


async def test_idle_topic_is_forgotten_and_asked_for_again(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-02, KP-05, SN-06: after metadata_max_idle_ms the topic is dropped; sending re-adds it."""
    async with new_producer(metadata_max_idle_ms=5000, metadata_max_age_ms=2000) as producer:
        await producer.send("t", b"1")
        await asyncio.sleep(20)
        assert producer._metadata.topic("t") is None
        with pytest.raises(MetadataNotReady, match="not known yet"):
            producer.send_nowait("t", b"too early")
        assert (await producer.send("t", b"2")).offset == 1


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Topics about which the answers to Metadata say nothing, not even an error."""
    names: set[str] = set()
    handle = APIS[ApiKey.METADATA].handle

    def metadata(call: Call) -> Any:
        response = handle(call)
        assert isinstance(response, dict)
        topics = [topic for topic in response["topics"] if topic["name"] not in names]
        return {**response, "topics": topics}

    monkeypatch.setitem(APIS, ApiKey.METADATA, APIS[ApiKey.METADATA]._replace(handle=metadata))
    return names


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("partition", [None, 0])
async def test_topic_that_answers_leave_out_is_asked_for_again(
    cluster: EmbeddedCluster,
    new_producer: New,
    leave_out: set[str],
    partition: int | None,
    times: int,
) -> None:
    """Brokers say at least why not. One that does not (it starts up, or there is a proxy) must
    not make the topic unknown until the metadata is old."""
    async with new_producer(max_block_ms=10_000) as producer:
        for number in range(times):
            await producer.send("t", b"%d" % number, partition=partition)
            leave_out.add("t")
            producer._cluster.request_update()
            while producer._metadata.topic("t") is not None:  # noqa: ASYNC110 there is no event
                await asyncio.sleep(0.1)
            leave_out.clear()
            began = now()
            await producer.send("t", b"again", partition=partition)
            assert now() - began < 2  # the longest backoff is a second
    assert len(values(cluster, "t")) == 2 * times


@pytest.mark.parametrize("call", ["send", "send_nowait"])
async def test_sending_to_a_topic_in_use_that_is_not_known_asks_for_it(
    new_producer: New, leave_out: set[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whether or not the last answer had an error for it."""
    leave_out.add("t")
    async with new_producer(max_block_ms=0) as producer:
        with pytest.raises(MetadataTimeout):
            await producer.send("t", b"in use from now on")
        await asyncio.sleep(1)
        assert producer._metadata.topic_error("t") == 0
        asked: list[str] = []
        monkeypatch.setattr(Cluster, "request_update_for_topic", lambda _, name: asked.append(name))
        with pytest.raises(MetadataNotReady):
            await getattr(producer, call)("t", b"value")
        assert asked == ["t"]


@pytest.mark.parametrize("call", ["send", "send to a partition", "partitions_for", "warm_up"])
async def test_topic_that_somebody_waits_for_is_not_idle(
    cluster: EmbeddedCluster, new_producer: New, call: str
) -> None:
    """KP-05, PM-03: it is asked for until max_block_ms, also beyond metadata_max_idle_ms."""
    async with new_producer(metadata_max_idle_ms=5000) as producer:
        asks: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "send": lambda: producer.send("late", b"value"),
            "send to a partition": lambda: producer.send("t", b"value", partition=1),
            "partitions_for": lambda: producer.partitions_for("late"),
            "warm_up": lambda: producer.warm_up("late"),
        }
        waiting = asyncio.create_task(asks[call]())
        await asyncio.sleep(20)
        assert not waiting.done()
        cluster.create_topic("late")
        cluster.add_partitions("t", 2)
        began = now()
        await waiting
        assert now() - began < 2  # the longest backoff is a second


async def test_partition_out_of_range_waits_for_expansion(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-04: and succeeds when the partition is there."""
    async with new_producer() as producer:
        await producer.send("t", b"known")
        sending = asyncio.create_task(producer.send("t", b"value", partition=2))
        await asyncio.sleep(3)
        cluster.add_partitions("t", 3)
        assert (await sending).partition == 2


@pytest.mark.parametrize("partition", [4, 2**31 - 1, 2**31, 2**63, 2**100])
@pytest.mark.parametrize("known", [False, True])
async def test_partition_that_never_appears_times_out(
    new_producer: New, partition: int, known: bool
) -> None:
    """KP-04: the message names partition and count."""
    async with new_producer(max_block_ms=3000) as producer:
        if known:
            await producer.send("t4", b"value", partition=3)
        with pytest.raises(
            MetadataTimeout, match=rf"partition {partition} of 't4' .* 4 partitions"
        ):
            await producer.send("t4", b"value", partition=partition)


async def test_missing_partition_holds_nobody_up(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.send("t", b"0")
        absent = asyncio.create_task(producer.enqueue("t", b"absent", partition=1))
        await turns()
        assert producer.health.waiting_senders == 1
        began = now()
        await producer.send("t", b"1")
        producer.send_nowait("t", b"2")
        assert now() - began < 0.05
        cluster.add_partitions("t", 2)
        await (await absent)
        assert values(cluster, "t") == [b"0", b"1", b"2"]


async def test_order_is_kept_when_a_partition_appears(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Those in line before the topic was known, those after, and those of the moment itself."""
    cluster.delete_topic("t")
    async with new_producer() as producer:

        async def send(number: int, partition: int) -> None:
            await (await producer.enqueue("t", b"%d" % number, partition=partition))

        async with asyncio.TaskGroup() as group:
            for number in range(600):
                group.create_task(send(number, number % 2))
            await asyncio.sleep(1)
            cluster.create_topic("t", partitions=1)
            while producer._metadata.topic("t") is None:  # noqa: ASYNC110 there is no event
                await asyncio.sleep(0.001)
            for number in range(600, 1200):
                group.create_task(send(number, number % 2))
            await asyncio.sleep(1)
            cluster.add_partitions("t", 2)
            while producer.health.waiting_senders:
                # Time stands still while the line is served, in several turns of the loop.
                for _ in range(2):
                    number += 1
                    group.create_task(send(number, number % 2))
                await asyncio.sleep(0.001 if len(cluster.records("t", 1)) == 0 else 0)
        assert number > 1200
        for partition in range(2):
            sent = values(cluster, "t", partition)
            assert sent == [b"%d" % n for n in range(number + 1) if n % 2 == partition]


async def test_topic_that_the_brokers_find_invalid(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-07: InvalidTopic, the second time without another request."""
    cluster.inject("metadata", error="INVALID_TOPIC_EXCEPTION", topic="odd", times=None)
    async with new_producer() as producer:
        for _ in range(2):
            with pytest.raises(InvalidTopic, match="do not accept the topic name 'odd'"):
                await producer.send("odd", b"value")
        asked = [r for r in cluster.received("metadata") if ("odd", None) in r.partitions]
        assert len(asked) == 1


@pytest.mark.parametrize("topic", [None, "", ".", "..", "a/b", "ü", "x" * 250, b"bytes", 5])
async def test_topic_names_that_no_broker_accepts(new_producer: New, topic: Any) -> None:
    """KP-08: refused before anybody is asked."""
    async with new_producer() as producer:
        began = now()
        with pytest.raises(InvalidTopic, match=r"a topic's name has 1 to 249|topic must be a str"):
            await producer.send(topic, b"value")
        assert now() == began


async def test_denied_topic_is_asked_for_again(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-17: each send tells what the brokers say now, not what they said once."""
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t", times=2)
    async with new_producer() as producer:
        for _ in range(2):
            with pytest.raises(AuthorizationError, match="not authorized for topic 't'") as caught:
                await producer.send("t", b"value")
            assert caught.value.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert (await producer.send("t", b"value")).offset == 0


@pytest.mark.parametrize("idempotent", [True, False])
async def test_denied_write_is_told_by_the_delivery(
    cluster: EmbeddedCluster, new_producer: New, idempotent: bool
) -> None:
    """IT-17: of that topic only, at once, and until it is granted."""
    denied = cluster.inject("produce", error="TOPIC_AUTHORIZATION_FAILED", topic="t", times=None)
    async with new_producer(enable_idempotence=idempotent) as producer:
        for _ in range(2):
            await producer.warm_up("t", "t4")
            began = now()
            forbidden = producer.send_nowait("t", b"forbidden")
            allowed = producer.send_nowait("t4", b"allowed", partition=0)
            with pytest.raises(BrokerRejected) as caught:
                await forbidden
            assert caught.value.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert (caught.value.topic, caught.value.persisted) == ("t", "no")
            assert isinstance(caught.value.__cause__, BrokerError)
            await allowed
            assert now() - began < 0.1
        denied.remove()
        assert (await producer.send("t", b"granted")).offset == 0
    assert values(cluster, "t") == [b"granted"]
    assert values(cluster, "t4") == [b"allowed", b"allowed"]


async def test_denied_topic_without_waiting(cluster: EmbeddedCluster, new_producer: New) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t")
    async with new_producer() as producer:
        with pytest.raises(AuthorizationError):
            await producer.send("t", b"value")
        with pytest.raises(AuthorizationError):
            producer.send_nowait("t", b"value")
        await asyncio.sleep(1)
        await producer.send_nowait("t", b"value")


class SaslGate(asyncio.Protocol):
    """Stands before a broker, and lets nobody through without a password (PLAIN)."""

    def __init__(self, broker: asyncio.Protocol, passwords: Mapping[str, str]) -> None:
        self._broker = broker
        self._passwords = passwords
        self._frames = FrameReader()
        self._passed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._passed:
            self._broker.data_received(data)
            return
        for request in self._frames.feed(data):
            self._answer(bytes(request))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._passed:
            self._broker.connection_lost(exc)

    def _answer(self, request: bytes) -> None:
        api_key, _, correlation_id, client_id_length = struct.unpack_from(">hhih", request)
        body = request[10 + client_id_length :]
        answer = b""
        refused = False
        match api_key:
            case ApiKey.API_VERSIONS:
                spoken = [(ApiKey.API_VERSIONS, 0), (ApiKey.SASL_HANDSHAKE, 1)]
                spoken.append((ApiKey.SASL_AUTHENTICATE, 1))
                entries = [struct.pack(">hhh", key, 0, highest) for key, highest in spoken]
                answer = struct.pack(">hi", 0, len(entries)) + b"".join(entries)
            case ApiKey.SASL_HANDSHAKE:
                answer = struct.pack(">hih", 0, 1, 5) + b"PLAIN"
            case ApiKey.SASL_AUTHENTICATE:
                _, name, password = body[4:].decode().split("\0")
                refused = self._passwords.get(name) != password
                code = ErrorCode.SASL_AUTHENTICATION_FAILED if refused else ErrorCode.NONE
                text = b"Invalid username or password" if refused else b""
                answer = struct.pack(">hh", code, len(text)) + text + struct.pack(">iq", 0, 0)
                self._passed = not refused
        self._transport.write(frame(struct.pack(">i", correlation_id) + answer))
        if self._passed:
            self._broker.connection_made(self._transport)
        elif refused:
            self._transport.close()


class GuardedCluster(EmbeddedCluster):
    """A cluster with a gate before each broker."""

    def __init__(self, passwords: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._passwords = passwords

    async def _listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.Protocol]
    ) -> Listener:
        return await super()._listen(
            host, port, lambda: SaslGate(protocol_factory(), self._passwords)
        )


@pytest.mark.parametrize("strategy", ["rebootstrap", "none"])
async def test_refused_credentials_are_told_at_once(network: MemoryNetwork, strategy: str) -> None:
    """IT-18: by start, and to those who wait for a topic or come then, however they ask;
    until the credentials are there."""
    passwords = {"bob": "another"}
    async with GuardedCluster(
        passwords, topics={"t": 1, "new": 1}, network=network, auto_create_topics=False
    ) as cluster:
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=network,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username="alice",
            sasl_password="secret",
            metadata_recovery_strategy=strategy,
        )

        def calls(topic: str) -> list[asyncio.Task[Any]]:
            asks: list[Coroutine[Any, Any, Any]] = [
                producer.send(topic, b"value"),
                producer.partitions_for(topic),
                producer.warm_up(topic),
            ]
            return [asyncio.create_task(ask) for ask in asks]

        async def all_are_refused(tasks: list[asyncio.Task[Any]], *, within: float) -> None:
            began = now()
            for task in tasks:
                with pytest.raises(AuthenticationError, match="PLAIN: Invalid username") as caught:
                    await task
                assert caught.value.code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert now() - began <= within

        await all_are_refused([asyncio.create_task(producer.start())], within=0.1)
        passwords["alice"] = "secret"
        async with producer:
            assert (await producer.send("t", b"first")).offset == 0

            waiting = calls("missing")
            await asyncio.sleep(1)
            passwords["alice"] = "changed"
            cluster.kill_connections(1)
            await all_are_refused(waiting, within=1)
            await all_are_refused(calls("new"), within=0)
            assert not producer.health.ready
            assert "Invalid username" in str(producer.health.problem)

            passwords["alice"] = "secret"
            await asyncio.sleep(3)  # a second is the longest backoff
            assert producer.health.ready
            for task in calls("new"):
                await task
            assert (await producer.send("t", b"second")).offset == 1
        assert values(cluster, "new") == [b"value"]


async def test_each_who_is_told_of_a_refusal_has_an_error_of_his_own(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """One that all of them raise would collect their tracebacks, and the values in there."""

    def length(error: BaseException) -> int:
        return sum(1 for _ in traceback.walk_tb(error.__traceback__))

    refusal = AuthenticationError("wrong password")
    refusal.code = ErrorCode.SASL_AUTHENTICATION_FAILED
    async with new_producer(max_block_ms=10_000) as producer:
        cluster.inject("metadata", no_answer=True, times=None)
        asked: list[Coroutine[Any, Any, Any]] = [
            *(producer.send("t", b"%d" % n) for n in range(20)),
            *(producer.partitions_for("t") for _ in range(20)),
        ]
        waiting = [asyncio.create_task(ask) for ask in asked]
        await asyncio.sleep(1)
        producer._cluster.fatal_error = refusal
        producer._on_change()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        for _ in range(20):
            with pytest.raises(AuthenticationError) as caught:
                producer.send_nowait("t", b"value")
            errors.append(caught.value)
        assert {(type(e), str(e), getattr(e, "code", None)) for e in errors} == {
            (AuthenticationError, "wrong password", ErrorCode.SASL_AUTHENTICATION_FAILED)
        }
        assert len({id(error) for error in (*errors, refusal)}) == 61
        assert [len({length(e) for e in errors[at : at + 20]}) for at in (0, 20, 40)] == [1, 1, 1]
        assert refusal.__traceback__ is None
        producer._cluster.fatal_error = None


async def test_timeout_without_an_answer_names_the_refusal(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    refusal = AuthenticationError("wrong password")
    async with new_producer(max_block_ms=1000) as producer:
        cluster.inject("metadata", no_answer=True, times=None)
        waiting = asyncio.create_task(producer.send("t", b"value"))
        await asyncio.sleep(0.99)
        producer._cluster.fatal_error = refusal
        with pytest.raises(MetadataTimeout) as caught:
            await waiting
        assert caught.value.__cause__ is refusal
        producer._cluster.fatal_error = None


async def test_first_send_without_blocking_registers_the_topic(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-35, IT-06: max_block_ms=0 fails at once, and later sends succeed."""
    async with new_producer(max_block_ms=0) as producer:
        with pytest.raises(MetadataTimeout):
            await producer.send("t", b"value")
        await asyncio.sleep(1)
        assert (await producer.send("t", b"value")).offset == 0


async def test_send_nowait_never_waits_for_metadata(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        with pytest.raises(MetadataNotReady, match="'t4' is not known yet") as caught:
            producer.send_nowait("t4", b"value")
        assert not isinstance(caught.value, TimeoutError)
        await asyncio.sleep(1)
        assert (await producer.send_nowait("t4", b"value", partition=1)).partition == 1
        with pytest.raises(MetadataNotReady, match="has no partition 9, only 4"):
            producer.send_nowait("t4", b"value", partition=9)
        with pytest.raises(MetadataNotReady):
            producer.send_nowait("missing", b"value")
        await asyncio.sleep(1)
        with pytest.raises(MetadataNotReady) as caught:
            producer.send_nowait("missing", b"value")
        assert isinstance(caught.value.__cause__, BrokerError)


async def test_send_nowait_does_not_overtake_a_line(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:

        async def first() -> None:
            await producer.enqueue("t", b"0")
            # The others are let in in several turns of the loop.
            assert producer.health.waiting_senders == 100
            with pytest.raises(MetadataNotReady, match="others wait in line"):
                producer.send_nowait("t", b"overtakes")

        async with asyncio.TaskGroup() as group:
            group.create_task(first())
            for number in range(1, 600):
                group.create_task(producer.enqueue("t", b"%d" % number))
        await producer.flush()
        assert values(cluster, "t") == [b"%d" % n for n in range(600)]


async def test_closing_releases_who_waits_for_metadata(new_producer: New) -> None:
    """KP-17: with ProducerClosed, not with a timeout."""
    async with new_producer() as producer:
        unknown = asyncio.create_task(producer.send("missing", b"value"))
        absent = asyncio.create_task(producer.send("t", b"value", partition=3))
        await asyncio.sleep(1)
        await producer.close()
    for task in (unknown, absent):
        with pytest.raises(ProducerClosed, match="closed while the record waited"):
            await task
    assert unknown.exception() is not absent.exception()


# -- partitions --------------------------------------------------------------------------------


async def test_key_decides_the_partition(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        for number in range(20):
            key = b"key-%d" % number
            metadata = await producer.send("t4", b"value", key=key)
            assert metadata.partition == partition_for_key(key, 4)


async def test_keys_can_be_ignored(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(partitioner_ignore_keys=True) as producer:
        await producer.warm_up("t4")
        sent = [producer.send_nowait("t4", b"value", key=b"%d" % n) for n in range(20)]
        assert len({delivery.partition for delivery in sent}) == 1


async def test_custom_partitioner_sees_serialized_bytes(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    seen: list[tuple[str, int, bytes | None, bytes | None]] = []

    def choose(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        seen.append((topic.name, topic.partition_count, key, value))
        return 2

    async with new_producer(partitioner=choose, key_serializer=str.encode) as producer:
        assert (await producer.send("t4", bytearray(b"v"), key="k")).partition == 2
        assert (await producer.send("t4", None)).partition == 2
        assert (await producer.send("t4", b"v", partition=1)).partition == 1
    assert seen == [("t4", 4, b"k", b"v"), ("t4", 4, None, None)]


@pytest.mark.parametrize("choice", [-1, 4, True, "1", None, 1.0])
@pytest.mark.parametrize("known", [False, True])
async def test_custom_partitioner_with_a_bad_result(
    new_producer: New, choice: Any, known: bool
) -> None:
    """KP-11: refused with the partitioner's name, nothing is sent, and interceptors are told."""

    class Odd:
        def partition(self, topic: TopicView, key: bytes | None, value: bytes | None) -> Any:
            return choice

    notes = Notes()
    async with new_producer(partitioner=Odd(), interceptors=[notes]) as producer:
        if known:
            await producer.send("t4", b"value", partition=0)
            notes.ended.clear()
        with pytest.raises(
            InvalidPartition, match=f"Odd returned {choice!r} for t4, .* 4 "
        ) as refused:
            await producer.send("t4", b"value", headers={"h": "1"})
        assert producer.health.buffered_bytes == 0
    ((metadata, exception, headers),) = notes.ended
    assert (metadata.topic, metadata.partition, metadata.offset) == ("t4", -1, -1)
    assert exception is refused.value
    assert headers == (("h", b"1"),)


async def test_custom_partitioner_that_raises(new_producer: New) -> None:
    def broken(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        raise ZeroDivisionError("by the partitioner")

    async with new_producer(partitioner=broken) as producer:
        for _ in range(2):
            with pytest.raises(
                InvalidPartition, match=r"raised ZeroDivisionError\('by the p"
            ) as raised:
                await producer.send("t4", b"value")
            assert isinstance(raised.value.__cause__, ZeroDivisionError)


class Panic(BaseException):
    """What extensions in Rust raise."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Panic])
async def test_a_partitioner_that_raises_what_is_no_exception_harms_its_record_only(
    new_producer: New, error: type[BaseException]
) -> None:
    """The first record of a topic meets it in the task that fetches metadata."""

    def broken(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        if value == b"bad":
            raise error
        return 0

    async with new_producer(partitioner=broken) as producer:
        with pytest.raises(InvalidPartition, match=rf"raised {error.__name__}\(\)"):
            await producer.send("t4", b"bad")
        for topic in ("t4", "t"):
            await producer.send(topic, b"good")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_partitioner_that_ends_the_program_harms_its_record_only(
    error: type[BaseException],
) -> None:
    """Whoever lets the loop run on, as `asyncio.run` does to clean up, finds the others sent."""

    def ends(topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        if value == b"bad":
            raise error
        return 0

    async def start() -> tuple[Producer[Any, Any], list[asyncio.Task[Any]]]:
        await cluster.__aenter__()
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=cluster.connector,
            transactional_id="x",
            partitioner=ends,
        )
        await producer.start()
        await producer.begin_transaction()
        return producer, [
            asyncio.create_task(producer.send("t", value)) for value in (b"1", b"bad", b"2")
        ]

    async def end() -> None:
        await asyncio.wait(tasks, timeout=1)
        with pytest.raises(InvalidPartition, match=f"raised {error.__name__}"):
            await tasks[1]
        with pytest.raises(TransactionAborted, match=f"raised {error.__name__}"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction() as tx:
            await tx.send("t", b"3")
        assert [r.value for r in cluster.records("t", committed=True)] == [b"3"]
        await producer.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await cluster.__aexit__(None, None, None)

    loop = VirtualTimeLoop()
    try:
        asyncio.set_event_loop(loop)
        cluster = EmbeddedCluster(topics={"t": 1}, network=MemoryNetwork(latency=0.001))
        producer, tasks = loop.run_until_complete(start())
        with pytest.raises(error):
            loop.run_forever()
        loop.run_until_complete(end())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("partition", [-1, "1", 1.0, True])
async def test_bad_partition(new_producer: New, partition: Any, known: bool) -> None:
    async with new_producer() as producer:
        if known:
            await producer.send("t4", b"value")
        with pytest.raises(InvalidPartition, match="must be an int >= 0"):
            await producer.send("t4", b"value", partition=partition)


# -- serializers, headers, timestamps ----------------------------------------------------------


async def awaited(value: str) -> bytes:
    await asyncio.sleep(0.01)
    return value.encode()


def later(topic: str, value: str, headers: list[Header]) -> Any:
    """A plain function whose result is an awaitable."""
    headers.append(("by", b"later"))
    return awaited(value)


async def wide(topic: str, value: str, headers: list[Header]) -> bytes:
    headers.append(("by", b"wide"))
    return await awaited(value)


@pytest.mark.parametrize("observed", [False, True], ids=["", "interceptors"])
@pytest.mark.parametrize("key_serializer", [str.encode, awaited, later])
@pytest.mark.parametrize("value_serializer", [str.encode, awaited, wide, later])
async def test_serializers(
    cluster: EmbeddedCluster,
    new_producer: New,
    key_serializer: Any,
    value_serializer: Any,
    observed: bool,
) -> None:
    async with new_producer(
        key_serializer=key_serializer,
        value_serializer=value_serializer,
        interceptors=[Interceptor()] if observed else [],
    ) as producer:
        metadata = await producer.send("t", "value", key="key", headers={"a": "1"})
    assert (metadata.serialized_key_size, metadata.serialized_value_size) == (3, 5)
    (record,) = cluster.records("t")
    assert (record.key, record.value) == (b"key", b"value")
    added = [("by", f.__name__.encode()) for f in (key_serializer, value_serializer) if f is later]
    added += [("by", b"wide")] if value_serializer is wide else []
    assert list(record.headers) == [("a", b"1"), *added]


@pytest.mark.parametrize("observed", [False, True], ids=["", "interceptors"])
@pytest.mark.parametrize("serializer", [awaited, later, wide])
async def test_send_nowait_cannot_wait_for_a_serializer(
    new_producer: New, serializer: Any, observed: bool
) -> None:
    interceptors = [Interceptor()] if observed else []
    async with new_producer(value_serializer=serializer, interceptors=interceptors) as producer:
        await producer.warm_up("t")
        with pytest.raises(SerializationError, match="cannot wait for an async serializer"):
            producer.send_nowait("t", "value")
        assert producer.metrics()["record_error_total"] == 1


async def test_send_nowait_with_an_awaitable_that_is_no_coroutine(new_producer: New) -> None:
    async with new_producer(
        value_serializer=lambda value: asyncio.get_running_loop().create_future()
    ) as producer:
        await producer.warm_up("t")
        with pytest.raises(SerializationError, match="cannot wait for an async serializer"):
            producer.send_nowait("t", "value")


async def test_a_key_is_not_awaited_when_the_value_cannot_be_serialized(
    new_producer: New,
) -> None:
    """Nor is its coroutine left behind, which would be a warning."""
    keys: list[Coroutine[Any, Any, bytes]] = []

    def key_of(key: Any) -> Any:
        keys.append(awaited(key))
        return keys[-1]

    def fails(value: Any) -> bytes:
        raise ValueError("no")

    async with new_producer(key_serializer=key_of, value_serializer=fails) as producer:
        with pytest.raises(SerializationError, match="the value for topic t could not"):
            await producer.send("t", "value", key="key")
    assert [inspect.getcoroutinestate(key) for key in keys] == [inspect.CORO_CLOSED]


async def test_a_value_is_not_awaited_when_the_key_cannot_be_serialized(
    new_producer: New,
) -> None:
    """Found by the simulation: its coroutine was left behind, which is a warning."""
    values: list[Coroutine[Any, Any, bytes]] = []

    async def fails(key: Any) -> bytes:
        raise ValueError("no")

    def value_of(value: Any) -> Any:
        values.append(awaited(value))
        return values[-1]

    def key_of(key: Any) -> Any:
        return fails(key)

    async with new_producer(key_serializer=key_of, value_serializer=value_of) as producer:
        with pytest.raises(SerializationError, match="the key for topic t could not"):
            await producer.send("t", "value", key="key")
    assert [inspect.getcoroutinestate(value) for value in values] == [inspect.CORO_CLOSED]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_serializer_that_raises(
    cluster: EmbeddedCluster, new_producer: New, asynchronous: bool
) -> None:
    """KP-10: SerializationError, nothing is sent, and the next record is not harmed."""

    def plain(value: Any) -> bytes:
        return bytes([value])

    async def awaiting(value: Any) -> bytes:
        return plain(value)

    async with new_producer(value_serializer=awaiting if asynchronous else plain) as producer:
        with pytest.raises(SerializationError, match="the value for topic t could not") as caught:
            await producer.send("t", "text")
        assert isinstance(caught.value.__cause__, TypeError)
        await producer.send("t", 65)
        assert producer.metrics()["record_error_total"] == 1
    assert values(cluster, "t") == [b"A"]


async def test_a_send_that_is_cancelled_in_its_serializer_is_cancelled(new_producer: New) -> None:
    reached = asyncio.Event()

    async def waits(value: Any) -> bytes:
        reached.set()
        await asyncio.sleep(60)
        return b""

    async with new_producer(value_serializer=waits) as producer:
        sending = asyncio.create_task(producer.send("t", "value"))
        await reached.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await producer.send("t", "value")


async def test_text_of_a_class_with_an_encoding_of_its_own(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """What is compiled would take what that returns for bytes, whatever it is."""

    class Text(str):
        def encode(self, *_: Any) -> Any:
            return bytearray(64)

    async with new_producer(linger_ms=5) as producer:
        await producer.warm_up("t")
        for key in (b"key", Text("key")):  # into an open batch as well
            headers = [(Text("name"), Text("x"))]
            await producer.enqueue("t", Text("value"), key=key, headers=headers)
        await producer.flush()
    assert len(cluster.records("t")) == 2
    for record in cluster.records("t"):
        assert (record.key, record.value) == (b"key", b"value")
        assert record.headers == (("name", b"x"),)


async def test_serializer_that_returns_nonsense(new_producer: New) -> None:
    async with new_producer(value_serializer=lambda value: 5) as producer:
        with pytest.raises(SerializationError, match="the value for topic t is of type int"):
            await producer.send("t", b"value")


async def test_serializer_that_adds_a_bad_header(new_producer: New) -> None:
    def bad(topic: str, value: bytes, headers: list[Any]) -> bytes:
        headers.append(("n", 5))
        return value

    async with new_producer(value_serializer=bad) as producer:
        with pytest.raises(SerializationError, match=r"header 0 \('n'\) has a value of type int"):
            await producer.send("t", b"value")


async def test_serializer_may_add_a_str_header(cluster: EmbeddedCluster, new_producer: New) -> None:
    def add(topic: str, value: bytes, headers: list[Any]) -> bytes:
        headers.append(("n", "text"))
        return value

    async with new_producer(value_serializer=add) as producer:
        await producer.send("t", b"value")
    assert cluster.records("t")[0].headers == (("n", b"text"),)


async def test_users_headers_are_left_alone(cluster: EmbeddedCluster, new_producer: New) -> None:
    """KP-09: what is given can be given again, also after a failed send."""
    headers: list[tuple[str, bytes | str | None]] = [("a", b"1"), ("a", "2"), ("b", None)]
    async with new_producer(value_serializer=wide, max_block_ms=1000) as producer:
        with pytest.raises(MetadataTimeout):
            await producer.send("missing", "value", headers=headers)
        await producer.send("t", "value", headers=headers)
    assert headers == [("a", b"1"), ("a", "2"), ("b", None)]
    assert cluster.records("t")[0].headers == (
        ("a", b"1"),
        ("a", b"2"),
        ("b", None),
        ("by", b"wide"),
    )


async def test_bad_headers_are_refused(new_producer: New) -> None:
    async with new_producer() as producer:
        with pytest.raises(SerializationError, match="header 0"):
            await producer.send("t", b"value", headers=["nonsense"])  # type: ignore[list-item]


async def test_keys_of_all_kinds(cluster: EmbeddedCluster, new_producer: New) -> None:
    keys: list[Any] = [b"bytes", bytearray(b"array"), memoryview(b"view"), "text", None]
    async with new_producer() as producer:
        await producer.send_many("t", [Record("", b"value", key) for key in keys])
    assert [r.key for r in cluster.records("t")] == [b"bytes", b"array", b"view", b"text", None]


async def test_null_and_empty_values(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        tombstone = await producer.send("t", None, key=b"k")
        empty = await producer.send("t", b"")
    assert (tombstone.serialized_key_size, tombstone.serialized_value_size) == (1, -1)
    assert (empty.serialized_key_size, empty.serialized_value_size) == (-1, 0)
    assert [(r.key, r.value) for r in cluster.records("t")] == [(b"k", None), (None, b"")]


async def test_timestamps(cluster: EmbeddedCluster, new_producer: New) -> None:
    moment = datetime(2024, 2, 29, tzinfo=UTC)
    async with new_producer() as producer:
        await producer.send("t", b"int", timestamp=1_000)
        await producer.send("t", b"datetime", timestamp=moment)
        before = int(time.time() * 1000)
        metadata = await producer.send("t", b"now")
        after = int(time.time() * 1000)
    stamps = [record.timestamp for record in cluster.records("t")]
    assert stamps[:2] == [1_000, 1_709_164_800_000]
    assert before <= stamps[2] <= after
    assert metadata.timestamp == stamps[2]


@pytest.mark.parametrize("timestamp", [-1, MAX_TIMESTAMP + 1, "now", datetime(2024, 1, 1), False])
async def test_bad_timestamps(new_producer: New, timestamp: Any) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        with pytest.raises(InvalidTimestamp):
            await producer.send("t", b"value", timestamp=timestamp)


async def test_timestamps_of_one_batch_may_be_far_apart(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    stamps = [0, MAX_TIMESTAMP, 1]
    # The broker compares with its own clock.
    cluster.create_topic("far", configs={"message.timestamp.after.max.ms": str(MAX_TIMESTAMP)})
    async with new_producer() as producer:
        await producer.warm_up("far")
        for timestamp in stamps:
            producer.send_nowait("far", b"value", timestamp=timestamp)
        await producer.flush()
    assert [record.timestamp for record in cluster.records("far")] == stamps
    assert len(cluster.batches("far", 0)) == 1


# -- sizes and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "option", "limit"),
    [
        ({}, "max_request_size", 1048576),
        ({"buffer_memory": 100_000, "max_request_size": 10**7}, "buffer_memory", 100_000),
    ],
)
async def test_record_too_large(
    new_producer: New, options: dict[str, Any], option: str, limit: int
) -> None:
    """KP-12: refused at once, with size, limit and option. Nothing is taken from the buffer."""
    async with new_producer(**options) as producer:
        began = now()
        with pytest.raises(
            RecordTooLarge, match=f"takes up to 20000.. bytes, more than {option}={limit} .* raise"
        ):
            await producer.send("t", bytes(2_000_000))
        assert now() == began
        assert producer.health.buffered_bytes == 0
        assert producer.metrics()["record_error_total"] == 1


async def test_largest_record_is_sent(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-05: of just max_request_size."""
    async with new_producer(max_request_size=10_000) as producer:
        overhead = 61 + 21 + 1 + 1 + 3
        await producer.send("t", bytes(10_000 - overhead))
        with pytest.raises(RecordTooLarge, match="takes up to 10001 bytes"):
            await producer.send("t", bytes(10_001 - overhead))


async def test_who_has_waited_for_memory_does_not_linger_where_the_broker_is_idle(
    new_producer: New,
) -> None:
    """Nobody adds to the batch that its memory has begun."""
    options = {"batch_size": 1000, "buffer_memory": 1000, "max_request_size": 1000}
    async with new_producer(linger_ms=60_000, max_block_ms=600_000, **options) as producer:
        await producer.send("t", bytes(700))
        began = now()
        await asyncio.gather(*(producer.send("t", bytes(700)) for _ in range(3)))
        assert now() - began < 1.0


async def test_what_begins_while_others_wait_for_memory_is_not_remembered_for_ever(
    new_producer: New,
) -> None:
    options = {"batch_size": 1000, "buffer_memory": 3000, "max_request_size": 1000}
    async with new_producer(max_block_ms=600_000, **options) as producer:
        await producer.warm_up("t")

        async def send(count: int) -> None:
            for _ in range(count):
                await producer.send("t", bytes(900))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(30):
                tasks.create_task(send(10))
            await turns(50)
            assert producer._pool.waiting > 10
            most = 0
            while producer._pool.waiting > 10:
                most = max(most, len(producer._accumulator.fresh))
                await asyncio.sleep(0.001)
        assert producer.metrics()["record_send_total"] == 300
        assert most <= 4


@pytest.mark.parametrize("batch_size", [1_000_000, 16_384])
async def test_records_on_the_short_way_have_the_bytes_that_a_batch_writes(
    cluster: EmbeddedCluster, new_producer: New, batch_size: int
) -> None:
    """Of every size at which a length takes a byte more; also where the batch grows in pieces."""
    sizes = [*range(80), *range(8140, 8200)]
    given = [
        (key, None if size is None else bytes([number & 255]) * size)
        for number, size in enumerate([None, *sizes])
        for key in (None, b"", b"a key of some bytes")
    ]
    async with new_producer(
        batch_size=batch_size, linger_ms=60_000, adaptive_linger=False
    ) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        sent = [(pair, await producer.enqueue("t", pair[1], key=pair[0])) for pair in given]
        batches = [
            (queue.partition, batch)
            for queue in producer._accumulator.topics["t"].queues
            if queue is not None
            for batch in (*queue.in_flight, *queue.batches)
        ]
        assert sum(batch.count for _, batch in batches) == len(given)
        for partition in {partition for partition, _ in batches}:
            mine = iter([each for each in sent if each[1].partition == partition])
            for batch in [batch for place, batch in batches if place == partition]:
                expected = ProducerBatch("t", partition, write_limit=10_000_000, created_at=0.0)
                for (key, value), delivery in islice(mine, batch.count):
                    assert expected.try_append(delivery.timestamp, key, value, NO_HEADERS)
                assert batch.uncompressed() == expected.uncompressed()
                assert batch.size == expected.size
                assert batch.max_timestamp == expected.max_timestamp
                assert batch.max_record_size == expected.max_record_size
        cluster.resume(1)


#: Room for five batches of one record of 100 bytes.
TINY: dict[str, Any] = {
    "buffer_memory": 1000,
    "batch_size": 200,
    "batch_max_bytes": 0,
    "linger_ms": 0,
}


async def fill(
    cluster: EmbeddedCluster, producer: Producer[Any, Any], *, count: int = 5
) -> list[Delivery]:
    """Fills the buffer of a TINY producer with the records 0, 1, ... which node 1 leaves lying."""
    await producer.warm_up("t")
    cluster.pause(1)
    return [producer.send_nowait("t", b"%0100d" % number) for number in range(count)]


async def test_full_buffer_times_out(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(**TINY, max_block_ms=5000) as producer:
        sent = await fill(cluster, producer)
        began = now()
        with pytest.raises(BufferTimeout, match="no 200 bytes of buffer_memory within 5"):
            await producer.send("t", bytes(100))
        assert now() - began == pytest.approx(5.0)
        metrics = producer.metrics()
        assert metrics["buffer_exhausted_total"] == 1
        assert metrics["record_error_total"] == 1
        assert metrics["waiting_threads"] == 0
        cluster.resume(1)
        assert [(await delivery).offset for delivery in sent] == [0, 1, 2, 3, 4]


async def test_longest_possible_patience(cluster: EmbeddedCluster, new_producer: New) -> None:
    """RA-31: a deadline of now + 2^63-1 ms is far away, and neither past nor an error."""
    async with new_producer(
        **TINY, max_block_ms=2**63 - 1, delivery_timeout_ms=2**31 - 1
    ) as producer:
        sent = await fill(cluster, producer)
        waiting: list[asyncio.Task[Any]] = [
            asyncio.create_task(producer.send("t", bytes(100))),
            asyncio.create_task(producer.send("late", b"value")),
            asyncio.create_task(producer.partitions_for("late")),
            asyncio.create_task(producer.warm_up("late")),
        ]
        await asyncio.sleep(3600)
        assert not any(task.done() for task in waiting)
        cluster.create_topic("late")
        cluster.resume(1)
        await asyncio.gather(*waiting)
        assert [(await delivery).offset for delivery in sent] == [0, 1, 2, 3, 4]
        assert (waiting[0].result().offset, waiting[1].result().offset) == (5, 0)


async def test_without_patience_what_is_there_is_tried(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """RA-31, KP-35: the first try for room takes no time, so it has no deadline; there is no
    second one. Only that counts as an exhausted buffer, and a missing topic does not."""
    async with new_producer(**TINY, max_block_ms=0) as producer:
        with pytest.raises(MetadataTimeout):
            await producer.send("missing", bytes(100))
        with pytest.raises(MetadataTimeout):
            await producer.send("t", bytes(100))
        assert producer.metrics()["buffer_exhausted_total"] == 0
        await asyncio.sleep(1)
        began = now()
        cluster.pause(1)
        sent = [await producer.enqueue("t", b"%0100d" % number) for number in range(5)]
        for failures in range(1, 4):
            with pytest.raises(BufferTimeout):
                await producer.send("t", bytes(100))
            assert producer.metrics()["buffer_exhausted_total"] == failures
        assert now() == began
        cluster.resume(1)
        assert [(await delivery).offset for delivery in sent] == [0, 1, 2, 3, 4]


async def test_metadata_and_memory_share_one_deadline(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**TINY, max_block_ms=5000) as producer:
        await fill(cluster, producer)
        began = now()
        waiting = asyncio.create_task(producer.send("late", bytes(100)))
        await asyncio.sleep(3)
        cluster.create_topic("late")
        with pytest.raises(BufferTimeout):
            await waiting
        assert now() - began == pytest.approx(5.0)
        cluster.resume(1)


async def test_send_nowait_with_a_full_buffer(cluster: EmbeddedCluster, new_producer: New) -> None:
    """KP-35: BufferFull at once, and also whenever somebody waits."""
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        with pytest.raises(BufferFull, match="0 of 1000 bytes are free and 0 senders wait"):
            producer.send_nowait("t", bytes(100))
        waiting = asyncio.create_task(producer.enqueue("t", bytes(100)))
        await turns()
        with pytest.raises(BufferFull, match="1 senders wait") as caught:
            producer.send_nowait("t", b"small enough for anything")
        assert caught.value.retriable
        assert not isinstance(caught.value, TimeoutError)
        assert producer.health.waiting_senders == 1
        cluster.resume(1)
        await (await waiting)


async def test_send_nowait_to_a_new_topic_with_a_full_buffer(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Known, but not used yet: the same error."""
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        await producer.partitions_for("t4")
        with pytest.raises(BufferFull):
            producer.send_nowait("t4", bytes(100))
        cluster.resume(1)


async def test_closing_releases_who_waits_for_memory(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        waiting = asyncio.create_task(producer.send("t", bytes(100)))
        await turns()
        await producer.close(1)
        with pytest.raises(ProducerClosed, match="waited for 200 bytes"):
            await waiting


@pytest.mark.parametrize(("count", "batch_size"), [(300, 200), (5000, 2000)])
@pytest.mark.parametrize("topic", ["t", "t4"])
async def test_records_stand_in_the_order_of_the_calls(
    cluster: EmbeddedCluster, new_producer: New, count: int, batch_size: int, topic: str
) -> None:
    """Tasks that were started in order, and a buffer for five batches."""
    async with new_producer(
        buffer_memory=5 * batch_size, batch_size=batch_size, batch_max_bytes=0, linger_ms=0
    ) as producer:
        tasks = [
            asyncio.create_task(producer.send(topic, b"%0100d" % number, key=b"%d" % (number % 7)))
            for number in range(count)
        ]
        await asyncio.gather(*tasks)
    stored = 0
    for partition in range(4 if topic == "t4" else 1):
        log = [int(value or b"-1") for value in values(cluster, topic, partition)]
        assert log == sorted(log)
        stored += len(log)
    assert stored == count


async def test_order_without_keys_or_waiting_for_the_answer(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**TINY) as producer:
        tasks = [
            asyncio.create_task(producer.enqueue("t", b"%0*d" % (1 + number % 150, number)))
            for number in range(1000)
        ]
        for task in tasks:
            await (await task)
    assert [int(value or b"-1") for value in values(cluster, "t")] == list(range(1000))


@pytest.mark.parametrize("codec", ["lz4", "gzip"])
@pytest.mark.parametrize("options", [{}, {"batch_max_bytes": 0}], ids=["growing", "as Java"])
async def test_buffer_memory_bounds_records_that_are_not_compressed_yet(
    cluster: EmbeddedCluster, new_producer: New, codec: str, options: dict[str, Any]
) -> None:
    """Records that shrink to a hundredth take their full size until their batch leaves. Java
    counts `batch_size` for each batch, which is several times less."""
    memory = 1024 * 1024
    async with new_producer(compression_type=codec, buffer_memory=memory, **options) as producer:
        await producer.warm_up("t", "t4")
        estimator = producer._accumulator.estimator
        for topic in ("t", "t4"):
            for _ in range(400):
                estimator.observe(topic, CODEC_IDS[codec], 0.01)
            assert estimator.estimate(topic, CODEC_IDS[codec]) < 0.3
        for node in cluster.node_ids:
            cluster.pause(node)
        count = 0
        full = False
        while not full:
            try:
                if count % 5:
                    producer.send_nowait("t", bytes(1000))
                else:
                    producer.send_nowait("t4", bytes(300), partition=count % 4)
                count += 1
            except BufferFull:
                full = True
            if count % 100 == 0:
                await turns(2)
        held = sum(
            len(batch.buffer or b"") + len(batch.payload or b"")
            for batch in producer._accumulator.incomplete
        )
        assert held <= producer._pool.reserved <= memory
        assert held > memory / 2
        assert producer.health.buffered_bytes == producer._pool.reserved
        for node in cluster.node_ids:
            cluster.resume(node)
        await producer.flush()
        assert producer.health.buffered_bytes == 0
        assert producer.metrics()["record_send_total"] == count
        assert producer.metrics()["record_error_total"] == 1


async def test_a_task_asks_as_much_of_the_loop_among_thousands_as_among_a_hundred(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each awaits its own send: nothing of that grows with their number."""
    loop = asyncio.get_running_loop()
    calls: Counter[str] = Counter()
    for name in ("call_soon", "call_at", "create_future"):

        def counting(*args: Any, name: str = name, **rest: Any) -> Any:
            calls[name] += 1
            return getattr(type(loop), name)(loop, *args, **rest)

        monkeypatch.setattr(loop, name, counting)
    async with new_producer() as producer:
        await producer.warm_up("t4")
        found = []
        for tasks in (100, 5000):
            calls.clear()
            await asyncio.gather(*(producer.send("t4", bytes(100)) for _ in range(tasks)))
            found.append({name: calls[name] / tasks for name in ("call_soon", "call_at")})
            assert calls["create_future"] <= 20 + tasks / 100
    few, many = found
    # To begin, and to tell that it is done. To wake it is one call for all of a batch.
    assert 2 <= many["call_soon"] <= few["call_soon"]
    assert many["call_soon"] < 2.1
    assert many["call_at"] <= few["call_at"] < 0.5


async def test_a_task_that_waits_takes_as_much_memory_among_thousands_as_among_a_thousand(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t4")
        await producer.send("t4", b"")
        each = []
        for count in (1000, 5000):
            for node in cluster.node_ids:
                cluster.pause(node)
            gc.collect()
            tracemalloc.start()
            try:
                tasks = [asyncio.ensure_future(producer.send("t4", b"")) for _ in range(count)]
                await turns(3)
                assert not any(task.done() for task in tasks)
                each.append(tracemalloc.get_traced_memory()[0] / count)
            finally:
                tracemalloc.stop()
            for node in cluster.node_ids:
                cluster.resume(node)
            await asyncio.gather(*tasks)
    assert each[1] < 1.2 * each[0]
    assert each[1] < 1500


async def test_a_lone_send_asks_little_of_the_loop(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves in the second turn; and nobody wakes for a linger time that is not used."""
    loop = asyncio.get_running_loop()
    asked: Counter[str] = Counter()
    for name in ("call_soon", "call_at"):

        def asking(*args: Any, name: str = name, **rest: Any) -> Any:
            callback = next(each for each in args if callable(each))
            asked[getattr(callback, "__qualname__", "")] += 1
            return getattr(type(loop), name)(loop, *args, **rest)

        monkeypatch.setattr(loop, name, asking)
    async with new_producer(linger_ms=5) as producer:
        await producer.send("t", b"")
        await asyncio.sleep(1)
        asked.clear()
        for _ in range(20):
            await producer.send("t", b"")
            await asyncio.sleep(0.01)
        assert asked["Intake._turned"] == asked["Intake._settle"] == 20
        assert asked["Scheduler.wake"] <= 1, "for the delivery timeout of the first"


async def test_loop_of_enqueues_lets_others_run(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """It never has to wait for memory, and yet answers are read meanwhile."""
    network.latency = 0  # else time would have to move
    async with new_producer(batch_size=1000, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        sent = [await producer.enqueue("t", b"%0100d" % number) for number in range(10_000)]
        assert sent[0].done()
        assert not sent[-1].done()


@pytest.mark.parametrize(
    ("seconds", "records", "codec"),
    [(0.0, 14, "none"), (0.0002, 4, "none"), (0.0002, 3, "lz4"), (0.001, 2, "none")],
)
async def test_a_turn_takes_in_what_there_is_time_for(
    cluster: EmbeddedCluster, new_producer: New, seconds: float, records: int, codec: str
) -> None:
    """Where a record takes so long; at most a megabyte however quick that is. That it was enough
    is seen with the record after, and the task lets the loop turn before the next. Compressing
    takes its part of a turn."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with new_producer(batch_size=1000, batch_max_bytes=0, compression_type=codec) as producer:
        await producer.warm_up("t")
        await turns()
        task = asyncio.current_task()
        assert task is not None
        turn = 0

        def count() -> None:
            nonlocal turn
            turn += 1
            if turn < 20:
                loop.call_soon(count)

        loop.call_soon(count)
        in_turn: list[int] = []
        for _ in range(3 * records):
            await producer.enqueue("t", bytes(75_000))
            in_turn.append(turn)
            loop._set_time(loop.time() + seconds)
        assert [in_turn.count(number) for number in range(3)] == [records] * 3
        await producer.flush()


async def test_a_turn_takes_in_no_more_from_many_tasks_than_from_one(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """But for one record of each that comes in vain. They go on in order, so none gets ahead."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    tasks, each = 30, 12
    async with new_producer(batch_size=1000, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        await turns()
        turn = 0

        def count() -> None:
            nonlocal turn
            turn += 1
            if turn < 1000:
                loop.call_soon(count)

        in_turn: Counter[int] = Counter()
        counts = [0] * tasks

        async def enqueue(number: int) -> None:
            for _ in range(each):
                await producer.enqueue("t", bytes(75_000))
                in_turn[turn] += 1
                counts[number] += 1
                assert max(counts) - min(counts) <= 8
                loop._set_time(loop.time() + 0.0002)

        loop.call_soon(count)
        await asyncio.gather(*(enqueue(number) for number in range(tasks)))
        await producer.flush()
    first, *others = [in_turn[number] for number in sorted(in_turn)]
    assert first <= 4 + tasks
    assert max(others) <= 4
    assert sum(in_turn.values()) == tasks * each


@pytest.mark.parametrize(("given", "most"), [(1, 5), (40, 1)])
async def test_who_lets_others_go_first_has_a_turn_however_many_have_waited_for_room(
    cluster: EmbeddedCluster, new_producer: New, given: int, most: int
) -> None:
    """Also where they take all the time of each turn, and more."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with new_producer(**{**TINY, "buffer_memory": 100_000}) as producer:
        await fill(cluster, producer)
        pool, intake = producer._pool, producer._intake
        assert intake is not None
        taken = pool.available
        assert pool.try_reserve(taken)
        room = producer.config.batch_size
        entered = 0

        async def enqueue() -> None:
            nonlocal entered
            await producer.enqueue("t", bytes(100))
            entered += 1
            loop._set_time(loop.time() + 0.001)

        crowd = [asyncio.create_task(enqueue()) for _ in range(20 * given)]
        await turns()
        assert (entered, pool.waiting) == (0, 20 * given)
        turned: list[int] = []
        number = 0

        async def breathe() -> None:
            await intake.breathe()
            turned.append(number)

        others = [asyncio.create_task(breathe()) for _ in range(5)]
        while number < 10:
            number += 1
            assert taken >= given * room
            taken -= given * room
            pool.release(given * room)
            await turns(1)
        assert entered >= 9 * given, "there have always been enough of them"
        assert len(turned) == 5
        assert max(turned) - min(turned) < most
        pool.release(taken)
        cluster.resume(1)
        await asyncio.gather(*crowd, *others)


@pytest.mark.parametrize("cancelled", [0, 1, 4])
async def test_cancelled_in_the_line_of_those_who_let_others_go_first(
    cluster: EmbeddedCluster, new_producer: New, cancelled: int
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        taken = [0] * 5

        async def endless(number: int) -> None:
            while taken[number] < 2000:
                await producer.enqueue("t", b"%d" % number + bytes(2000))
                taken[number] += 1

        tasks = [asyncio.create_task(endless(number)) for number in range(5)]
        await turns(2)
        tasks[cancelled].cancel()
        tasks[cancelled].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends].count(asyncio.CancelledError) == 1
        await producer.flush()
    sent = Counter((value or b"")[:1] for value in values(cluster, "t"))
    assert sent == {b"%d" % number: count for number, count in enumerate(taken)}
    assert [count == 2000 for count in taken].count(False) == 1


@pytest.mark.parametrize("in_python", [False, True])
async def test_many_who_wait_for_memory_go_on_in_order(
    cluster: EmbeddedCluster, new_producer: New, in_python: bool
) -> None:
    """As tasks of C or of Python; and who comes later passes nobody."""
    loop = asyncio.get_running_loop()
    if in_python:
        kind: Any = getattr(asyncio.tasks, "_PyTask")  # noqa: B009 no stub has it
        loop.set_task_factory(lambda loop, coro, **options: kind(coro, loop=loop, **options))
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        order: list[int] = []

        async def enqueue(number: int) -> None:
            await producer.enqueue("t", b"%0100d" % number)
            order.append(number)
            await producer.enqueue("t", b"%0100d" % (number + 500))

        waiting = [asyncio.create_task(enqueue(number)) for number in range(5, 505)]
        await turns()
        assert order == []
        assert producer.health.waiting_senders == 500
        cluster.resume(1)
        await asyncio.gather(*waiting)
        await producer.flush()
    loop.set_task_factory(None)
    assert order == list(range(5, 505))
    assert [int(value or b"") for value in values(cluster, "t")] == list(range(1005))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_ends_the_loop_takes_nobody_with_him_who_waited(error: type[BaseException]) -> None:
    """Whoever lets the loop run on finds the others awake."""
    loop = VirtualTimeLoop()
    woken: list[int] = []

    async def main() -> None:
        async with EmbeddedCluster(topics={"t": 1}) as cluster:
            address, connector = cluster.bootstrap_servers, cluster.connector
            async with Producer(address, connector=connector, **TINY) as producer:
                await fill(cluster, producer)

                async def wait(number: int) -> None:
                    await producer.enqueue("t", b"%0100d" % number)
                    woken.append(number)
                    if number == 6:
                        raise error

                waiting = [asyncio.create_task(wait(number)) for number in range(5, 25)]
                await turns()
                cluster.resume(1)
                await asyncio.wait(waiting)

    task = loop.create_task(main())
    with pytest.raises(error):
        loop.run_until_complete(task)
    assert woken == [5, 6]
    loop.run_until_complete(task)
    loop.close()
    assert woken == list(range(5, 25))


async def test_a_bulk_takes_no_part_of_a_turn_that_is_spent(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """However many begin at a time."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        for node in cluster.node_ids:
            cluster.pause(node)
        rows = [bytes(1000)] * 500
        tasks = [asyncio.create_task(producer.send_many("t", rows)) for _ in range(20)]
        buffered = [0]
        for _ in range(30):
            await turns(1)
            buffered.append(producer.health.buffered_bytes)
        for node in cluster.node_ids:
            cluster.resume(node)
        await asyncio.gather(*tasks)
    steps = [after - before for before, after in pairwise(buffered)]
    assert buffered[-1] > 8_000_000
    assert max(steps) < 4_000_000


async def test_refused_while_many_wait_all_hear_of_it_before_close_returns(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Whatever they do then: it takes no turns of the loop that nobody may be there for."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        told: list[type[BaseException]] = []

        async def enqueue() -> None:
            try:
                await producer.enqueue("t", bytes(100))
            except ProducerClosed as error:
                told.append(type(error))
                loop._set_time(loop.time() + 0.001)

        tasks = [asyncio.create_task(enqueue()) for _ in range(500)]
        await turns()
        await producer.close(0)
        assert told == [ProducerClosed] * 500
        await asyncio.gather(*tasks)


async def test_what_got_room_is_told_in_the_next_turn_to_however_many(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Who is cancelled later than that has an answer: nothing is sent of which nobody knows."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    options = {**TINY, "buffer_memory": 100_000, "batch_size": 20_000}
    async with new_producer(**options) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        sent = [producer.send_nowait("t", bytes(19_000)) for _ in range(5)]
        turn = 0
        told: list[int] = []

        async def enqueue() -> None:
            await producer.enqueue("t", bytes(1500))
            told.append(turn)
            loop._set_time(loop.time() + 0.001)

        def count() -> None:
            nonlocal turn
            turn += 1
            if turn < 100:
                loop.call_soon(count)

        tasks = [asyncio.create_task(enqueue()) for _ in range(10)]
        await turns()
        assert not told
        sent[0].add_done_callback(lambda _: count())
        cluster.resume(1)
        await asyncio.gather(*tasks)
        assert set(told) <= {1, 2}, "10 times 1 ms of work, where a turn may take 0.45"
        await producer.flush()


async def test_who_takes_a_cancellation_back_finds_no_delivery(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """(From CPython 3.13 on a Task forgets of it then.) The record is not sent."""
    loop = asyncio.get_running_loop()
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        kind: Any = getattr(asyncio.tasks, "_PyTask")  # noqa: B009 no stub has it
        task = kind(producer.enqueue("t", b"%0100d" % 5), loop=loop)
        await turns()
        task.cancel("enough")
        task.uncancel()
        task._must_cancel = False
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        cluster.resume(1)
    assert len(values(cluster, "t")) == 5


async def test_a_task_of_another_loop_hears_so_also_where_a_turn_is_spent(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        intake = producer._intake
        assert intake is not None
        for _ in range(2000):
            if intake.spent:
                break
            await producer.enqueue("t", bytes(1000))
        assert intake.spent

        async def foreign() -> None:
            for _ in range(3):
                with pytest.raises(WrongLoopError):
                    await producer.enqueue("t", b"")
                with pytest.raises(WrongLoopError):
                    await producer.send_many("t", [b""])

        thread = threading.Thread(target=asyncio.run, args=[foreign()])
        thread.start()
        thread.join()
        assert intake.spent
        await producer.enqueue("t", b"")
        assert not intake.spent


async def test_cancelled_while_others_need_the_loop(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """An enqueue that is cancelled where it lets others run has not taken its record."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        taken = 0

        async def endless() -> None:
            nonlocal taken
            while True:
                await producer.enqueue("t", bytes(1000))
                taken += 1

        task = asyncio.create_task(endless())
        await turns(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await producer.flush()
    assert len(values(cluster, "t")) == taken


async def test_value_is_taken_when_it_is_given(cluster: EmbeddedCluster, new_producer: New) -> None:
    """A buffer may be used again as soon as the call was made, even if the record waits."""
    async with new_producer() as producer:
        buffer = bytearray(b"first")
        waiting = asyncio.create_task(producer.send("t", buffer))
        await turns()
        buffer[:] = b"other bytes"
        await waiting
    assert values(cluster, "t") == [b"first"]


# -- cancelled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["missing", "t4"])
async def test_cancelled_while_waiting_for_metadata(
    cluster: EmbeddedCluster, new_producer: New, topic: str
) -> None:
    async with new_producer() as producer:
        waiting = asyncio.create_task(producer.send(topic, b"value", partition=9))
        await asyncio.sleep(1)
        assert producer.health.waiting_senders == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert producer.health.waiting_senders == 0
        if topic == "t4":
            cluster.add_partitions("t4", 10)
        else:
            cluster.create_topic("missing", partitions=10)
        await producer.send(topic, b"another", partition=9)
    assert values(cluster, topic, 9) == [b"another"]


async def test_cancelled_while_waiting_for_memory(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        waiting = [asyncio.create_task(producer.send("t", b"%0100d" % n)) for n in range(5, 9)]
        await turns()
        for task in waiting[::2]:
            task.cancel()
        await turns()
        assert producer.health.waiting_senders == 2
        cluster.resume(1)
        done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in done] == [asyncio.CancelledError, RecordMetadata] * 2
    assert [int(value or b"-1") for value in values(cluster, "t")] == [0, 1, 2, 3, 4, 6, 8]


MANY = 3000


@pytest.mark.skipif(COMPILED, reason="compiled code compares where nobody can count")
@pytest.mark.parametrize(("topic", "partition"), [("late", None), ("t", 1)])
@pytest.mark.parametrize("newest_first", [True, False])
async def test_leaving_a_long_line_does_not_look_at_the_others(
    new_producer: New,
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    partition: int | None,
    newest_first: bool,
) -> None:
    """A server that goes down cancels what thousands of its requests wait for."""
    compared = 0

    def compare(one: Pending, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    async with new_producer() as producer:
        await producer.warm_up("t")
        waiting = [
            asyncio.create_task(producer.send(topic, b"value", partition=partition))
            for _ in range(MANY)
        ]
        await turns(2)
        assert producer.health.waiting_senders == MANY
        monkeypatch.setattr(Pending, "__eq__", compare)
        for task in reversed(waiting) if newest_first else waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert producer.health.waiting_senders == 0
        assert compared < MANY


@pytest.mark.parametrize(("topic", "partition"), [("late", None), ("late", 1), ("t", 1)])
async def test_those_who_stay_keep_their_order(
    cluster: EmbeddedCluster, new_producer: New, topic: str, partition: int | None
) -> None:
    """When others leave the line before it is let in, and while it is. More than are let in
    within one turn of the loop."""
    left: list[int] = []

    def first_is_in(_: object) -> None:
        left.append(producer.health.waiting_senders)
        for task in reversed(tasks[3001::10]):
            task.cancel()

    async with new_producer() as producer:
        await producer.warm_up("t")
        tasks = [
            asyncio.create_task(producer.enqueue(topic, b"%d" % n, partition=partition))
            for n in range(4000)
        ]
        await turns(2)
        for task in reversed(tasks[::2]):
            task.cancel()
        await turns(2)
        assert producer.health.waiting_senders == 2000
        if topic == "late" and partition is None:
            cluster.create_topic("late")
        else:
            # They stand back until their partition is there, too.
            if topic == "late":
                cluster.create_topic("late")
                await asyncio.sleep(3)
            assert producer.health.waiting_senders == 2000
            cluster.add_partitions(topic, 2)
        tasks[1].add_done_callback(first_is_in)
        await asyncio.wait(tasks)
        assert len(left) == 1
        assert 0 < left[0] < 2000, "some were let in, others were not"
    there = [n for n, task in enumerate(tasks) if not task.cancelled()]
    assert 1900 <= len(there) < 2000
    log = [int(value or b"-1") for value in values(cluster, topic, partition or 0)]
    assert log == there


async def test_cancelled_head_lets_the_next_one_go_at_once(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """A large record waits for memory in front of a small one, and is cancelled.

    The small one gets the memory then and there, and leaves, though nothing else happens.
    """
    async with new_producer(**TINY) as producer:
        await producer.warm_up("t4")
        await fill(cluster, producer, count=3)
        large = asyncio.create_task(producer.send("t4", bytes(700), partition=1))
        small = asyncio.create_task(producer.send("t4", b"small", partition=1))
        await turns()
        assert producer.health.waiting_senders == 2
        began = now()
        large.cancel()
        await small
        assert now() - began < 0.1
        cluster.resume(1)


async def test_cancelled_in_the_turn_in_which_it_is_buffered(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """It is too late then: the record goes on, as after any later cancellation."""
    acknowledged: list[RecordMetadata] = []

    class Watch(Interceptor):
        def on_acknowledgement(
            self, metadata: RecordMetadata, exception: BaseException | None, headers: Any
        ) -> None:
            acknowledged.append(metadata)
            assert exception is None

    async with new_producer(**TINY, interceptors=[Watch()]) as producer:
        sent = await fill(cluster, producer)
        waiting = asyncio.create_task(producer.send("t", b"%0100d" % 5))
        await turns()
        sent[0].add_done_callback(
            lambda _: asyncio.get_running_loop().call_soon(lambda: waiting.cancel())
        )
        cluster.resume(1)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await producer.flush()
    assert len(values(cluster, "t")) == len(acknowledged) == 6
    assert all(metadata.offset >= 0 for metadata in acknowledged)


async def test_cancelled_in_the_turn_in_which_it_is_refused(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The refusal that nobody sees is not reported as forgotten."""
    async with new_producer(**TINY) as producer:
        await fill(cluster, producer)
        memory = asyncio.create_task(producer.send("t", bytes(100)))
        metadata = asyncio.create_task(producer.send("missing", bytes(100)))
        await turns()
        closing = asyncio.create_task(producer.close(0))
        await turns(1)  # those who wait for metadata are refused
        metadata.cancel()
        await turns(1)  # those who wait for memory are refused
        memory.cancel()
        for task in (memory, metadata):
            with pytest.raises(asyncio.CancelledError):
                await task
        await closing
        del task, memory, metadata
        gc.collect()  # what was not retrieved is reported now


# -- a topic that goes away --------------------------------------------------------------------


async def test_topic_removed_while_its_record_waits_for_memory(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The record is buffered, waits for its topic to return, and is sent then."""
    cluster.create_topic("gone", partitions=1)
    async with new_producer(
        **TINY, enable_idempotence=False, metadata_max_age_ms=1000, retry_backoff_ms=100
    ) as producer:
        await producer.send("gone", b"first")
        await producer.warm_up("t4")
        # Node 2 leads partition 1 and holds the memory; node 1 answers what is asked.
        cluster.pause(2)
        for number in range(5):
            producer.send_nowait("t4", b"%0100d" % number, partition=1)
        waiting = asyncio.create_task(producer.enqueue("gone", bytes(100)))
        await turns()
        cluster.delete_topic("gone")
        while producer._metadata.topic("gone") is not None:  # noqa: ASYNC110 there is no event
            await asyncio.sleep(0.5)
        cluster.resume(2)
        delivery = await waiting
        await asyncio.sleep(1)
        assert not delivery.done()
        cluster.create_topic("gone", partitions=1)
        await delivery
        assert len(values(cluster, "gone")) == 1


# -- interceptors ------------------------------------------------------------------------------


HEADERS = [("a", b"1"), ("b", b"2")]


class Notes(Interceptor):
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.sent: list[Record] = []
        self.ended: list[tuple[RecordMetadata, BaseException | None, tuple[Header, ...]]] = []

    def on_send(self, record: Record) -> Record:
        self.sent.append(record)
        return record

    def on_acknowledgement(
        self,
        metadata: RecordMetadata,
        exception: BaseException | None,
        headers: tuple[Header, ...],
    ) -> None:
        self.ended.append((metadata, exception, headers))


async def test_interceptors_see_each_record_once(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-14: whichever way it was sent, and however it ended."""
    notes = Notes()
    cluster.create_topic("strict", configs={"cleanup.policy": "compact"})
    async with new_producer(interceptors=[notes], max_block_ms=1000) as producer:
        good = await producer.send("t", b"send", key=b"k", headers={"h": "1"})
        assert notes.ended.pop() == (good, None, (("h", b"1"),))
        await (await producer.enqueue("t", b"enqueue"))
        await producer.send_nowait("t", b"send_nowait")
        await producer.send_many("t", [b"many", Record("", b"record")])
        assert [error for _, error, _ in notes.ended] == [None] * 4
        notes.ended.clear()

        for send in (producer.send, producer.send_nowait):
            with pytest.raises(RecordTooLarge):
                await send("t", bytes(2_000_000), partition=0)
            ((place, error, headers),) = notes.ended
            assert place == RecordMetadata("t", 0, -1, -1, -1, -1)
            assert isinstance(error, RecordTooLarge)
            assert headers == ()
            notes.ended.clear()

        with pytest.raises(MetadataTimeout):
            await producer.send("missing", b"")
        ((place, error, _),) = notes.ended
        assert place == RecordMetadata("missing", -1, -1, -1, -1, -1)
        assert isinstance(error, MetadataTimeout)
        notes.ended.clear()

        result = await producer.send_many("strict", [b"no key"], raise_on_error=False)
        ((place, error, _),) = notes.ended
        assert place == RecordMetadata("strict", 0, -1, -1, -1, -1)
        assert type(error) is type(result[0])
        notes.ended.clear()
    assert len(notes.sent) == 9


async def test_metadata_of_a_failed_record_has_its_place(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-13: topic and partition, and nothing else."""
    notes = Notes()
    cluster.inject("produce", error="INVALID_RECORD")
    async with new_producer(interceptors=[notes]) as producer:
        result = await producer.send_many("t", [b"value"], raise_on_error=False)
        assert len(result.failed) == 1
    ((metadata, error, _),) = notes.ended
    assert metadata.topic_partition == ("t", 0)
    assert not metadata.has_offset
    assert not metadata.has_timestamp
    assert (metadata.serialized_key_size, metadata.serialized_value_size) == (-1, -1)
    assert error is not None


async def test_cancelled_record_is_acknowledged_to_interceptors(new_producer: New) -> None:
    notes = Notes()
    async with new_producer(interceptors=[notes]) as producer:
        waiting = asyncio.create_task(producer.send("missing", b"value"))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    ((metadata, error, _),) = notes.ended
    assert metadata.topic == "missing"
    assert isinstance(error, asyncio.CancelledError)


async def test_interceptors_form_a_chain(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """KP-14: one after the other; what raises, or returns nonsense, is left out."""

    class Append(Notes):
        def __init__(self, what: bytes) -> None:
            super().__init__()
            self.what = what

        def on_send(self, record: Record) -> Record:
            super().on_send(record)
            return record._replace(value=record.value + self.what)

    class Broken(Notes):
        def on_send(self, record: Record) -> Record:
            super().on_send(record)
            raise ZeroDivisionError("on_send")

        def on_acknowledgement(self, *args: Any) -> None:
            super().on_acknowledgement(*args)
            raise ZeroDivisionError("on_acknowledgement")

    class Nonsense(Notes):
        def on_send(self, record: Record) -> Any:
            super().on_send(record)
            return record.value

    chain = [Append(b"-a"), Broken(), Nonsense(), Append(b"-b")]
    async with new_producer(interceptors=chain) as producer:
        await producer.send("t", b"value")
    assert values(cluster, "t") == [b"value-a-b"]
    assert [[r.value for r in notes.sent] for notes in chain] == [
        [b"value"],
        [b"value-a"],
        [b"value-a"],
        [b"value-a"],
    ]
    assert [len(notes.ended) for notes in chain] == [1, 1, 1, 1]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == 3
    assert sum("on_send of" in text for text in logged) == 2
    assert sum("on_acknowledgement of" in text for text in logged) == 1


class Raises(Notes):
    """Its `on_acknowledgement` raises."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def on_acknowledgement(self, *args: Any) -> None:
        super().on_acknowledgement(*args)
        raise self.error


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, Panic])
async def test_what_an_interceptor_raises_at_the_end_keeps_no_other_from_hearing_of_it(
    new_producer: New, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the record was sent or refused."""
    chain = [Raises(error), Notes()]
    async with new_producer(interceptors=chain) as producer:
        await producer.send("t", b"value")
        with pytest.raises(RecordTooLarge):
            await producer.send("t", bytes(2_000_000))
    assert [len(notes.ended) for notes in chain] == [2, 2]
    assert sum("on_acknowledgement of" in r.getMessage() for r in caplog.records) == 2


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interceptor_that_ends_the_program_keeps_no_other_from_hearing_of_it(
    error: type[BaseException], refused: bool
) -> None:
    chain = [Raises(error), Notes()]

    async def start() -> Producer[Any, Any]:
        await cluster.__aenter__()
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers, connector=cluster.connector, interceptors=chain
        )
        await producer.start()
        return producer

    async def end() -> None:
        await asyncio.wait([sending])
        assert type(sending.exception()) is (RecordTooLarge if refused else type(None))
        await producer.close()
        await cluster.__aexit__(None, None, None)

    loop = VirtualTimeLoop()
    try:
        cluster = EmbeddedCluster(topics={"t": 1}, network=MemoryNetwork())
        producer = loop.run_until_complete(start())
        sending = loop.create_task(producer.send("t", bytes(2_000_000) if refused else b"value"))
        with pytest.raises(error):
            loop.run_forever()
        loop.run_until_complete(end())
    finally:
        loop.close()
    assert [len(notes.ended) for notes in chain] == [1, 1]


@pytest.mark.parametrize("error", [GeneratorExit, Panic])
@pytest.mark.parametrize("call", ["send", "send_nowait"])
async def test_interceptors_hear_of_a_record_whose_serializer_panics(
    new_producer: New, call: str, error: type[BaseException]
) -> None:
    def panics(value: bytes) -> bytes:
        raise error

    notes = Notes()
    async with new_producer(interceptors=[notes], value_serializer=panics) as producer:
        with pytest.raises(error):
            await getattr(producer, call)("t", b"value")
    assert [type(raised) for _, raised, _ in notes.ended] == [error]


async def test_interceptor_may_change_everything(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    class Redirect(Interceptor):
        def on_send(self, record: Record) -> Record:
            return Record("t4", b"other", b"k", {"h": b"1"}, 3, 1000)

    async with new_producer(interceptors=[Redirect()]) as producer:
        metadata = await producer.send("t", b"value")
        assert (metadata.topic, metadata.partition, metadata.timestamp) == ("t4", 3, 1000)
        again = await producer.send_nowait("t", b"value")
        assert (again.topic, again.partition) == ("t4", 3)
    record = cluster.records("t4", 3)[0]
    assert (record.key, record.value, record.headers) == (b"k", b"other", (("h", b"1"),))


@pytest.mark.parametrize("call", ["send", "enqueue", "send_nowait"])
@pytest.mark.parametrize(
    "given",
    [
        lambda: (pair for pair in HEADERS),
        lambda: iter(HEADERS),
        lambda: map(tuple, HEADERS),
        lambda: dict(HEADERS).items(),
        lambda: dict(HEADERS),
        lambda: HEADERS,
    ],
    ids=["generator", "iterator", "map", "items", "mapping", "list"],
)
async def test_headers_that_interceptors_read_are_sent(
    cluster: EmbeddedCluster, new_producer: New, call: str, given: Callable[[], Any]
) -> None:
    """Also those that can be read but once: each interceptor sees them, and the broker."""

    class Reads(Notes):
        def on_send(self, record: Record) -> Record:
            headers = record.headers
            pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
            seen.append([(key, value) for key, value in pairs])
            return super().on_send(record)

    seen: list[list[Any]] = []
    notes = [Reads(), Reads()]
    async with new_producer(interceptors=notes) as producer:
        await producer.warm_up("t")
        sent = getattr(producer, call)("t", b"value", headers=given())
        if call == "send_nowait":
            await sent
        else:
            await sent if call == "send" else await (await sent)
    assert seen == [HEADERS, HEADERS]
    (record,) = cluster.records("t")
    assert list(record.headers) == HEADERS
    assert [list(note.ended[0][2]) for note in notes] == [HEADERS, HEADERS]


async def test_interceptors_see_headers_that_serializers_add(new_producer: New) -> None:
    notes = Notes()
    async with new_producer(interceptors=[notes], value_serializer=later) as producer:
        await producer.send("t", "value", headers={"a": b"1"})
    assert notes.ended[0][2] == (("a", b"1"), ("by", b"later"))


async def test_closed_while_a_serializer_works(new_producer: New) -> None:
    async def slow(value: bytes) -> bytes:
        await asyncio.sleep(10)
        return value

    async with new_producer(value_serializer=slow) as producer:
        sending = asyncio.create_task(producer.send("t", b"value"))
        await asyncio.sleep(1)
        await producer.close()
        with pytest.raises(ProducerClosed):
            await sending


@pytest.mark.parametrize(("partitions", "requests", "sent"), [(5, 1, 1), (6, 2, 6)])
async def test_what_an_idle_broker_can_have_and_what_is_enough_leaves_before_the_loop_turns(
    cluster: EmbeddedCluster, new_producer: New, partitions: int, requests: int, sent: int
) -> None:
    """Of five partitions is enough, while a request is under way. Others: when it has turned."""
    cluster.create_topic("many", partitions=partitions)
    for partition in range(partitions):
        cluster.move_leader("many", partition, 1)
    async with new_producer(batch_size=200, batch_max_bytes=0) as producer:
        await producer.warm_up("many")
        value = b"x" * 150  # two do not fit into one batch
        deliveries = [
            producer.send_nowait("many", value, partition=partition)
            for partition in range(partitions)
            for _ in range(2)
        ]
        # There was no await since the first record.
        assert producer.metrics()["request_total:node=node-1"] == requests
        assert producer.metrics()["record_send_total"] == sent
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert producer.metrics()["record_send_total"] == partitions
        await producer.flush()
        assert all(delivery.done() for delivery in deliveries)
