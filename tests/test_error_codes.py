"""Every error code of the protocol, answered by an embedded broker: it behaves as its row says.

What `persisted` says is compared with the log. A broker that answers an error has
appended the batch, or it has not: each code is tried with what a real broker can have done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from asyncproducer import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerRejected,
    ConnectionFailed,
    DeliveryError,
    DeliveryTimeout,
    InvalidTopic,
    KafkaError,
    MetadataTimeout,
    Producer,
)
from asyncproducer.cli.error_tables import effect
from asyncproducer.core import wire
from asyncproducer.core.answers import (
    CONTROL,
    Answer,
    answer_for,
)
from asyncproducer.errors import ErrorCode, Persisted
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

#: Spec 7.0: after these our picture of the cluster is old (InvalidMetadataException).
REFRESH = {
    *(E.UNKNOWN_TOPIC_OR_PARTITION, E.LEADER_NOT_AVAILABLE, E.NOT_LEADER_OR_FOLLOWER),
    *(E.REPLICA_NOT_AVAILABLE, E.NETWORK_EXCEPTION, E.KAFKA_STORAGE_ERROR, E.LISTENER_NOT_FOUND),
    *(E.FENCED_LEADER_EPOCH, E.PREFERRED_LEADER_NOT_AVAILABLE, E.ELIGIBLE_LEADERS_NOT_AVAILABLE),
    *(E.ELECTION_NOT_NEEDED, E.UNKNOWN_TOPIC_ID, E.INCONSISTENT_TOPIC_ID),
}

#: Spec 7.0: after these the same may succeed later (RetriableException).
RETRIABLE = {
    *REFRESH,
    *(E.REQUEST_TIMED_OUT, E.NOT_ENOUGH_REPLICAS, E.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
    *(E.CORRUPT_MESSAGE, E.COORDINATOR_LOAD_IN_PROGRESS, E.COORDINATOR_NOT_AVAILABLE),
    *(E.NOT_COORDINATOR, E.CONCURRENT_TRANSACTIONS, E.UNKNOWN_LEADER_EPOCH),
    *(E.OFFSET_NOT_AVAILABLE, E.UNSTABLE_OFFSET_COMMIT, E.THROTTLING_QUOTA_EXCEEDED),
    *(E.NOT_CONTROLLER, E.FETCH_SESSION_ID_NOT_FOUND, E.INVALID_FETCH_SESSION_EPOCH),
    *(E.FETCH_SESSION_TOPIC_ID_ERROR, E.SHARE_SESSION_NOT_FOUND, E.INVALID_SHARE_SESSION_EPOCH),
    E.SHARE_SESSION_LIMIT_REACHED,
}

End = type[DeliveryError] | None


class Row(NamedTuple):
    """What becomes of a single record whose batch always gets this answer."""

    #: The class of its error, without idempotence and with it. None: it is acknowledged.
    plain: End
    idempotent: End
    #: Whether a broker that says so has the batch in its log; maybe: nobody knows.
    stored: Persisted
    #: What every later call of an idempotent producer raises.
    later: type[KafkaError] | None = None


#: The record waits for better times, or is refused.
WAITS: tuple[End, End] = (DeliveryTimeout, DeliveryTimeout)
REFUSED: tuple[End, End] = (BrokerRejected, BrokerRejected)
#: What only means something to an idempotent producer: that can mend it.
MENDED: tuple[End, End] = (BrokerRejected, DeliveryTimeout)

#: Spec 7.2, line by line; written out here, not taken from the tables of the producer. The log is
#: what Java's broker does: it checks request, topic, batch and producer before it appends, and the
#: replicas after that. A leader that resigns or loses its disk (6, 56) may have appended.
SPEC = {
    E.UNKNOWN_SERVER_ERROR: Row(*REFUSED, "maybe"),
    E.CORRUPT_MESSAGE: Row(*WAITS, "no"),
    E.UNKNOWN_TOPIC_OR_PARTITION: Row(*WAITS, "no"),
    E.LEADER_NOT_AVAILABLE: Row(*WAITS, "no"),
    E.REPLICA_NOT_AVAILABLE: Row(*WAITS, "no"),
    E.NETWORK_EXCEPTION: Row(*WAITS, "maybe"),
    E.KAFKA_STORAGE_ERROR: Row(*WAITS, "maybe"),
    E.LISTENER_NOT_FOUND: Row(*WAITS, "no"),
    E.NOT_LEADER_OR_FOLLOWER: Row(*WAITS, "maybe"),
    E.FENCED_LEADER_EPOCH: Row(*WAITS, "no"),
    E.UNKNOWN_LEADER_EPOCH: Row(*WAITS, "no"),
    E.REQUEST_TIMED_OUT: Row(*WAITS, "maybe"),
    E.MESSAGE_TOO_LARGE: Row(*REFUSED, "no"),
    E.RECORD_LIST_TOO_LARGE: Row(*REFUSED, "no"),
    E.INVALID_TOPIC_EXCEPTION: Row(*REFUSED, "no"),
    E.NOT_ENOUGH_REPLICAS: Row(*WAITS, "no"),
    E.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Row(*WAITS, "yes"),
    E.INVALID_REQUIRED_ACKS: Row(*REFUSED, "no"),
    E.TOPIC_AUTHORIZATION_FAILED: Row(*REFUSED, "no"),
    E.CLUSTER_AUTHORIZATION_FAILED: Row(*REFUSED, "no", AuthorizationError),
    E.INVALID_TIMESTAMP: Row(*REFUSED, "no"),
    E.INVALID_RECORD: Row(*REFUSED, "no"),
    E.POLICY_VIOLATION: Row(*REFUSED, "no"),
    E.INVALID_REQUEST: Row(*REFUSED, "no"),
    E.UNSUPPORTED_COMPRESSION_TYPE: Row(*REFUSED, "no"),
    E.UNSUPPORTED_FOR_MESSAGE_FORMAT: Row(*REFUSED, "no"),
    E.UNSUPPORTED_VERSION: Row(*REFUSED, "no", BrokerError),
    E.OUT_OF_ORDER_SEQUENCE_NUMBER: Row(*MENDED, "no"),
    E.DUPLICATE_SEQUENCE_NUMBER: Row(None, None, "yes"),
    E.INVALID_PRODUCER_EPOCH: Row(*REFUSED, "no"),
    E.INVALID_TXN_STATE: Row(*REFUSED, "no"),
    E.INVALID_PRODUCER_ID_MAPPING: Row(*REFUSED, "no", BrokerError),
    E.CONCURRENT_TRANSACTIONS: Row(*WAITS, "no"),
    E.COORDINATOR_LOAD_IN_PROGRESS: Row(*WAITS, "no"),
    E.COORDINATOR_NOT_AVAILABLE: Row(*WAITS, "no"),
    E.NOT_COORDINATOR: Row(*WAITS, "no"),
    E.TRANSACTION_COORDINATOR_FENCED: Row(*REFUSED, "no"),
    E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Row(*REFUSED, "no", BrokerError),
    E.UNKNOWN_PRODUCER_ID: Row(*MENDED, "no"),
    E.THROTTLING_QUOTA_EXCEEDED: Row(*WAITS, "no"),
    E.PRODUCER_FENCED: Row(*REFUSED, "no", BrokerError),
    E.UNKNOWN_TOPIC_ID: Row(*WAITS, "no"),
    E.INCONSISTENT_TOPIC_ID: Row(*WAITS, "no"),
    E.TRANSACTION_ABORTABLE: Row(*REFUSED, "no"),
}


def row_of(code: ErrorCode) -> Row:
    """Spec 7.0 where 7.2 has no line: no broker says it of a Produce request."""
    return SPEC.get(code) or Row(*(WAITS if code in RETRIABLE else REFUSED), "maybe")


def appends(code: ErrorCode) -> list[bool]:
    """Whether a broker that answers this has appended the batch: what is possible."""
    return {"yes": [True], "no": [False], "maybe": [False, True]}[row_of(code).stored]


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
    row = row_of(code)
    end = row.idempotent if idempotent else row.plain
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

        if end is None:
            assert error is None
        else:
            assert type(error) is end
            cause = error.__cause__ if end is DeliveryTimeout else error
            assert isinstance(cause, KafkaError)
            assert (cause.code, cause.retriable) == (code, code in RETRIABLE)
            assert error.persisted == row.stored
            assert (error.attempts > 1) == (end is DeliveryTimeout)
            # The sentence of the documentation, for whoever wants to send it again.
            assert {"no": not stored, "maybe": True, "yes": bool(stored)}[error.persisted]
        # As docs/errors.md has it.
        classes = effect("Produce", code).error.split("; plain: ")
        assert classes[0 if idempotent else -1] == (f"`{end.__name__}`" if end else "")

        if idempotent and row.later is not None:
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", b"later")
            assert type(caught.value) is row.later
            assert caught.value.code == code
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
    row = row_of(code)
    end = row.idempotent if idempotent else row.plain
    for is_appended in appends(code):
        cluster.inject("produce", error=code, after_append=is_appended)
        producer = new_producer(enable_idempotence=idempotent, **OPTIONS)
        await producer.start()
        await producer.warm_up("t")
        asked = len(cluster.received("metadata"))
        value = f"{is_appended}".encode()
        error = await send(producer, value)
        if end is None or end is DeliveryTimeout:
            assert error is None
            twice = is_appended and end is DeliveryTimeout and not idempotent
            assert count(cluster, value) == 1 + twice
        else:
            assert error is not None
            assert count(cluster, value) == is_appended
        await asyncio.sleep(0.2)
        assert (len(cluster.received("metadata")) > asked) == (code in REFRESH)
        await producer.close()


# -- the other requests ------------------------------------------------------------------------

#: A call waits for 2 s.
PATIENCE: dict[str, Any] = {**OPTIONS, "max_block_ms": 2000}


@every_code
async def test_a_code_for_the_producer_id(
    cluster: EmbeddedCluster, new_producer: New, code: ErrorCode
) -> None:
    """Spec 8.1: a denial may be taken back, what is retriable passes, all else is fatal."""
    denied = code == E.CLUSTER_AUTHORIZATION_FAILED
    # Several denials: the first may come before the record, which has its metadata to wait for.
    times = 5 if denied else 1
    fault = cluster.inject("init_producer_id", error=code, times=times)
    producer = new_producer(**PATIENCE)
    if code in RETRIABLE:
        await producer.start()
        await producer.send("t", b"value")
        assert len(cluster.received("init_producer_id")) == 2
        return
    expected = AuthorizationError if denied else BrokerError
    assert effect("InitProducerId", code).error == f"`{expected.__name__}`"

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
    if denied:
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
    if code == ErrorCode.REBOOTSTRAP_REQUIRED:
        return  # the embedded broker answers it for the whole request: see below
    producer = new_producer(**PATIENCE)
    await producer.start()
    cluster.inject("metadata", error=code, topic="t", partition=None, times=1)
    # Spec 6.13: these two are for the caller. All others may pass, whatever they are.
    ends = {
        E.INVALID_TOPIC_EXCEPTION: InvalidTopic,
        E.TOPIC_AUTHORIZATION_FAILED: AuthorizationError,
    }
    told = ends.get(code)
    assert effect("... topic", code).error == f"`{(told or MetadataTimeout).__name__}`"
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
    assert (len(cluster.received("metadata")) - asked > 1) == (code in REFRESH)


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
    with pytest.raises(ConnectionFailed, match=code.name) as caught:
        await producer.start()
    assert isinstance(caught.value.__cause__, BrokerError)
    assert caught.value.__cause__.code == code


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
    for name in ("SaslHandshake", "SaslAuthenticate"):
        assert effect(name, code).error == "`AuthenticationError`"


@pytest.mark.parametrize("name", CONTROL)
def test_every_code_has_its_answer(name: str) -> None:
    assert set(CONTROL[name]) == set(ErrorCode)
    assert answer_for(CONTROL[name], 12345) is CONTROL[name][ErrorCode.UNKNOWN_SERVER_ERROR]
    assert CONTROL[name][ErrorCode.NONE] is Answer.TAKE
