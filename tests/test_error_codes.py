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
    AuthorizationError,
    BrokerRejected,
    DeliveryError,
    DeliveryTimeout,
    KafkaError,
    Producer,
)
from asyncproducer.core.outcome import PRODUCE, Action
from asyncproducer.errors import ErrorCode, is_retriable
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
