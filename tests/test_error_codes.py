"""Every error code of the protocol, answered by an embedded broker: it behaves as its row says.

What `persisted` says is compared with the log. A broker that answers an error has
appended the batch, or it has not: each code is tried with what a real broker can have done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncproducer import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    DeliveryError,
    DeliveryTimeout,
    InvalidTopic,
    KafkaError,
    MetadataTimeout,
    Producer,
)
from asyncproducer.core import wire
from asyncproducer.core.answers import (
    CONTROL,
    INIT_PRODUCER_ID,
    METADATA_PARTITION,
    METADATA_TOPIC,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Answer,
    answer_for,
    control_table,
)
from asyncproducer.core.outcome import PRODUCE, Action
from asyncproducer.errors import ErrorCode, is_retriable
from asyncproducer.net import handshake
from asyncproducer.net.security import Plain
from asyncproducer.testing import EmbeddedCluster

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

CODES = [code for code in ErrorCode if code != ErrorCode.NONE]

#: A record lives 2 s, and is sent several times in them.
OPTIONS: dict[str, Any] = {"delivery_timeout_ms": 2000, "request_timeout_ms": 1000}

every_code = pytest.mark.parametrize("code", CODES, ids=[code.name for code in CODES])
both_kinds = pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "plain"])


E = ErrorCode

#: What a broker says of a batch that is in its log: fewer replicas than it should have; it was
#: there already.
STORED = {E.NOT_ENOUGH_REPLICAS_AFTER_APPEND, E.DUPLICATE_SEQUENCE_NUMBER}

#: What it says before it appends: of the request, of the topic, of the batch or its producer.
REFUSED = {
    *(E.CORRUPT_MESSAGE, E.UNKNOWN_TOPIC_OR_PARTITION, E.LEADER_NOT_AVAILABLE),
    *(E.REPLICA_NOT_AVAILABLE, E.MESSAGE_TOO_LARGE, E.COORDINATOR_LOAD_IN_PROGRESS),
    *(E.COORDINATOR_NOT_AVAILABLE, E.NOT_COORDINATOR, E.INVALID_TOPIC_EXCEPTION),
    *(E.RECORD_LIST_TOO_LARGE, E.NOT_ENOUGH_REPLICAS, E.INVALID_REQUIRED_ACKS),
    *(E.TOPIC_AUTHORIZATION_FAILED, E.CLUSTER_AUTHORIZATION_FAILED, E.INVALID_TIMESTAMP),
    *(E.UNSUPPORTED_VERSION, E.INVALID_REQUEST, E.UNSUPPORTED_FOR_MESSAGE_FORMAT),
    *(E.POLICY_VIOLATION, E.OUT_OF_ORDER_SEQUENCE_NUMBER, E.INVALID_PRODUCER_EPOCH),
    *(E.INVALID_TXN_STATE, E.INVALID_PRODUCER_ID_MAPPING, E.CONCURRENT_TRANSACTIONS),
    *(E.TRANSACTION_COORDINATOR_FENCED, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    *(E.UNKNOWN_PRODUCER_ID, E.LISTENER_NOT_FOUND, E.FENCED_LEADER_EPOCH),
    *(E.UNKNOWN_LEADER_EPOCH, E.UNSUPPORTED_COMPRESSION_TYPE, E.INVALID_RECORD),
    *(E.THROTTLING_QUOTA_EXCEEDED, E.PRODUCER_FENCED, E.UNKNOWN_TOPIC_ID),
    *(E.INCONSISTENT_TOPIC_ID, E.TRANSACTION_ABORTABLE),
}


def appends(code: ErrorCode) -> list[bool]:
    """Whether a broker that answers this has appended the batch: what is possible.

    All other codes are said of both, or of no Produce request at all: nobody knows.
    """
    if code in STORED:
        return [True]
    return [False] if code in REFUSED else [False, True]


def expected(code: ErrorCode, *, idempotent: bool) -> Action:
    """The action for a batch of one record."""
    rule = PRODUCE[code]
    if rule.action is Action.SPLIT:
        return Action.FAIL
    if not idempotent and (rule.sequence or rule.action is Action.FATAL):
        return Action.FAIL
    return rule.action


async def send(producer: Producer[Any, Any], value: bytes) -> DeliveryError | None:
    """How the delivery of one record ends."""
    delivery = await producer.enqueue("t", value, partition=0)
    await asyncio.gather(delivery, return_exceptions=True)
    return delivery.exception()


def count(cluster: EmbeddedCluster, value: bytes) -> int:
    return [record.value for record in cluster.records("t", 0)].count(value)


@every_code
@both_kinds
async def test_a_code_that_does_not_go_away(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode, idempotent: bool
) -> None:
    """The batch ends as its row says, and what the error tells of the log is true."""
    action = expected(code, idempotent=idempotent)
    for is_appended in appends(code):
        cluster.inject("produce", error=code, times=None, after_append=is_appended)
        producer = new_producer(enable_idempotence=idempotent, **OPTIONS)
        await producer.start()
        await producer.warm_up("t")
        value = f"{is_appended}".encode()
        error = await send(producer, value)
        cluster.clear_faults()
        stored = count(cluster, value)
        assert (stored > 0) == is_appended
        if idempotent:
            assert stored <= 1

        if action is Action.ACKNOWLEDGE:
            assert error is None
        else:
            assert error is not None
            assert type(error) is (DeliveryTimeout if action is Action.RETRY else BrokerRejected)
            cause = error if action is not Action.RETRY else error.__cause__
            assert isinstance(cause, KafkaError)
            assert (cause.code, cause.retriable) == (code, is_retriable(code))
            assert error.persisted == PRODUCE[code].persisted
            assert (error.attempts > 1) == (action is Action.RETRY)
            # The sentence of the documentation, for whoever wants to send it again.
            assert {"no": not stored, "maybe": True, "yes": bool(stored)}[error.persisted]

        if action is Action.FATAL:
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", b"later")
            assert caught.value.code == code
            assert isinstance(caught.value, AuthorizationError) == (
                code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            )
        else:
            assert await send(producer, b"later" + value) is None
            assert count(cluster, b"later" + value) == 1
        await producer.close()


@every_code
@both_kinds
async def test_a_code_that_comes_once(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode, idempotent: bool
) -> None:
    """What is retried gets there: once, where the producer is idempotent. Others go on."""
    action = expected(code, idempotent=idempotent)
    for is_appended in appends(code):
        cluster.inject("produce", error=code, after_append=is_appended)
        producer = new_producer(enable_idempotence=idempotent, **OPTIONS)
        await producer.start()
        await producer.warm_up("t")
        asked = len(cluster.received("metadata"))
        value = f"{is_appended}".encode()
        error = await send(producer, value)
        if action in (Action.RETRY, Action.ACKNOWLEDGE):
            assert error is None
            twice = is_appended and action is Action.RETRY and not idempotent
            assert count(cluster, value) == 1 + twice
        else:
            assert error is not None
            assert count(cluster, value) == is_appended
        await asyncio.sleep(0.2)
        assert (len(cluster.received("metadata")) > asked) == PRODUCE[code].refresh
        await producer.close()


# -- the other requests ------------------------------------------------------------------------

#: A call waits for 2 s.
PATIENCE: dict[str, Any] = {**OPTIONS, "max_block_ms": 2000}


@every_code
async def test_a_code_for_the_producer_id(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode
) -> None:
    answer = INIT_PRODUCER_ID[code]
    # Several denials: the first may come before the record, which has its metadata to wait for.
    times = 5 if answer is Answer.DENIED else 1
    fault = cluster.inject("init_producer_id", error=code, times=times)
    producer = new_producer(**PATIENCE)
    if answer is Answer.REPEAT:
        await producer.start()
        await producer.send("t", b"value")
        assert len(cluster.received("init_producer_id")) == 2
        return
    expected = AuthorizationError if answer is Answer.DENIED else BrokerError

    async def start_and_send() -> None:
        await producer.start()
        await fault.reached()
        await producer.send("t", b"value")

    with pytest.raises(KafkaError) as caught:
        await start_and_send()
    assert isinstance(caught.value, AbortedError | expected)
    cause = caught.value if isinstance(caught.value, expected) else caught.value.__cause__
    assert isinstance(cause, expected)
    assert cause.code == code
    if answer is Answer.DENIED:
        await asyncio.sleep(1)
        await producer.send("t", b"later")  # it was allowed meanwhile
    else:
        with pytest.raises(BrokerError, match=code.name):
            await producer.send("t", b"later")
        assert len(cluster.received("init_producer_id")) == 1


@every_code
async def test_a_code_for_a_topic(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode
) -> None:
    """Once, it is overcome, or told; for ever, a call waits as long as it may."""
    answer = METADATA_TOPIC[code]
    if code == ErrorCode.REBOOTSTRAP_REQUIRED:
        return  # the embedded broker answers it for the whole request: see below
    producer = new_producer(**PATIENCE)
    await producer.start()
    cluster.inject("metadata", error=code, topic="t", partition=None, times=1)
    told = {Answer.INVALID: InvalidTopic, Answer.DENIED: AuthorizationError}.get(answer)
    if told is not None:
        with pytest.raises(told):
            await producer.send("t", b"value")
        return
    await producer.send("t", b"value")
    cluster.inject("metadata", error=code, topic="t4", times=None)
    with pytest.raises(MetadataTimeout) as caught:
        await producer.send("t4", b"value")
    cause = caught.value.__cause__
    assert isinstance(cause, BrokerError)
    assert cause.code == code
    is_unknown = code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert ("auto.create" if is_unknown else code.name) in str(caught.value)
    cluster.clear_faults()
    await producer.send("t4", b"value")


@every_code
async def test_a_code_for_a_partition(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode
) -> None:
    """The leader that comes with it counts; whether the metadata is asked for again differs."""
    producer = new_producer(**PATIENCE)
    await producer.start()
    fault = cluster.inject("metadata", error=code, topic="t", partition=0)
    asked = len(cluster.received("metadata"))
    if code == ErrorCode.REBOOTSTRAP_REQUIRED or fault.times is None:
        return
    await producer.send("t", b"value", partition=0)
    await asyncio.sleep(1)
    repeats = METADATA_PARTITION[code] is Answer.REPEAT
    assert (len(cluster.received("metadata")) - asked > 1) == repeats


@every_code
async def test_a_code_for_the_versions(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode
) -> None:
    """A connection that is lost is made again, however often that is refused. `start` is told."""
    async with new_producer(**PATIENCE) as producer:
        await producer.warm_up("t")
        fault = cluster.inject("api_versions", error=code, times=3)
        for node in cluster.node_ids:
            cluster.kill_connections(node)
        await producer.send("t", b"value")
    assert fault.hits == 3
    cluster.inject("api_versions", error=code, times=None)
    producer = new_producer(**PATIENCE)
    with pytest.raises(KafkaError, match=code.name):
        await producer.start()


class _Refuses:
    """A broker at the other end of a handshake, which answers one request with a code."""

    def __init__(self, refused: type[wire.Request[Any]], code: ErrorCode) -> None:
        self.refused = refused
        self.code = code

    async def ask(self, request: wire.Request[Any], version: int) -> Any:
        code = self.code if isinstance(request, self.refused) else 0
        if isinstance(request, wire.SaslHandshakeRequest):
            return wire.SaslHandshakeResponse(code, ("PLAIN",))
        return wire.SaslAuthenticateResponse(code, None, b"", 0)

    async def exchange_raw(self, token: bytes) -> bytes:
        raise AssertionError("SaslAuthenticate is spoken here")


@every_code
@pytest.mark.parametrize("request_", [wire.SaslHandshakeRequest, wire.SaslAuthenticateRequest])
async def test_a_code_of_sasl(code: ErrorCode, request_: type[wire.Request[Any]]) -> None:
    versions: dict[int, tuple[int, int]] = {
        wire.ApiKey.SASL_HANDSHAKE: (0, 1),
        wire.ApiKey.SASL_AUTHENTICATE: (0, 2),
    }
    with pytest.raises(AuthenticationError) as caught:
        await handshake.authenticate(_Refuses(request_, code), Plain("u", "p"), versions)
    assert caught.value.code == code
    assert SASL_HANDSHAKE[code] is SASL_AUTHENTICATE[code] is Answer.REFUSED


@pytest.mark.parametrize("name", CONTROL)
def test_every_code_has_its_answer(name: str) -> None:
    assert set(CONTROL[name]) == set(ErrorCode)
    assert answer_for(CONTROL[name], 12345) is CONTROL[name][ErrorCode.UNKNOWN_SERVER_ERROR]
    assert CONTROL[name][ErrorCode.NONE] is Answer.TAKE


def test_the_table_for_the_documentation_has_a_line_per_code() -> None:
    lines = control_table().splitlines()
    assert len(lines) == 2 + len(ErrorCode)
    assert {line.count("|") for line in lines} == {3 + len(CONTROL)}
    assert (
        "| 31 | CLUSTER_AUTHORIZATION_FAILED | disconnect | refused | refused | repeat"
        " | repeat if wanted | take | denied |"
    ) in lines
