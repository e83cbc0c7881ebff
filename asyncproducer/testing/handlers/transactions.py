"""AddPartitionsToTxn (24), AddOffsetsToTxn (25), EndTxn (26), DescribeTransactions (65)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.handlers.api import Call, api
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import INTERNAL_TOPICS, ClusterState, RequestRefused

__all__ = ["add_offsets_to_txn", "add_partitions_to_txn", "describe_transactions", "end_txn"]


#: v4 and up of AddPartitionsToTxn are for brokers.
_CLIENT_VERSION = 3


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    if body.__version__ > _CLIENT_VERSION:
        return
    for topic in body.v3_and_below_topics:
        for index in topic.partitions:
            yield topic.name, index


@api(24, "add_partitions_to_txn", 0, 5, touches=_touches)
def add_partitions_to_txn(call: Call) -> Response:
    """All partitions or none: beside one that cannot be, the others are OPERATION_NOT_ATTEMPTED.

    What is for brokers only is advertised all the same, as it is in Kafka, and refused.
    """
    if call.version > _CLIENT_VERSION:
        return {
            "error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            "results_by_transaction": [],
        }
    body = call.body
    codes = {
        (topic.name, index): _check_partition(call, topic.name, index)
        for topic in body.v3_and_below_topics
        for index in topic.partitions
    }
    if any(codes.values()):
        codes = {p: code or ErrorCode.OPERATION_NOT_ATTEMPTED for p, code in codes.items()}
    else:
        code = _add_partitions(call, list(codes))
        codes = {p: code or _injected_after(call, *p) for p in codes}
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic.name,
                "results_by_partition": [
                    {
                        "partition_index": index,
                        "partition_error_code": codes[topic.name, index],
                    }
                    for index in topic.partitions
                ],
            }
            for topic in body.v3_and_below_topics
        ]
    }


def _check_partition(call: Call, name: str, index: int) -> ErrorCode:
    injected = call.injected(name, index)
    if injected is not None and not injected.after_append:
        return injected.code
    if name in INTERNAL_TOPICS:
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED
    try:
        call.state.partition(name, index)
    except RequestRefused as exc:
        return exc.code
    return ErrorCode.NONE


def _injected_after(call: Call, name: str, index: int) -> ErrorCode:
    injected = call.injected(name, index)
    return ErrorCode.NONE if injected is None else injected.code


def _add_partitions(call: Call, partitions: list[tuple[str, int]]) -> ErrorCode:
    body = call.body
    try:
        call.check_coordinator("transaction", body.v3_and_below_transactional_id)
        call.transactions.add(
            body.v3_and_below_transactional_id,
            body.v3_and_below_producer_id,
            body.v3_and_below_producer_epoch,
            partitions=partitions,
            version=1,
        )
    except RequestRefused as exc:
        return _code(call, exc)
    return ErrorCode.NONE


@api(25, "add_offsets_to_txn", 0, 4)
def add_offsets_to_txn(call: Call) -> Response:
    """The group's offsets become part of the transaction."""
    body = call.body
    try:
        with call.effect():
            call.check_coordinator("transaction", body.transactional_id)
            call.transactions.add(
                body.transactional_id,
                body.producer_id,
                body.producer_epoch,
                groups=[body.group_id],
                version=1,
            )
    except RequestRefused as exc:
        return {"error_code": _code(call, exc)}
    return {"error_code": ErrorCode.NONE}


@api(26, "end_txn", 0, 5)
def end_txn(call: Call) -> Response:
    """Commits or aborts. v5 is TV2: it answers with the epoch for the next transaction."""
    body = call.body
    try:
        with call.effect():
            call.check_coordinator("transaction", body.transactional_id)
            producer_id, epoch = call.transactions.end(
                body.transactional_id,
                body.producer_id,
                body.producer_epoch,
                commit=body.committed,
                version=2 if call.version >= 5 else 1,
            )
    except RequestRefused as exc:
        return {"error_code": _code(call, exc), "producer_id": -1, "producer_epoch": -1}
    return {"error_code": ErrorCode.NONE, "producer_id": producer_id, "producer_epoch": epoch}


def _code(call: Call, refused: RequestRefused) -> ErrorCode:
    """Clients older than v2 of these three do not know PRODUCER_FENCED."""
    if refused.code == ErrorCode.PRODUCER_FENCED and call.version < 2:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return refused.code


@api(65, "describe_transactions", 0, 0)
def describe_transactions(call: Call) -> Response:
    """What the coordinator knows. Groups, which are partitions in Kafka, are not listed."""
    return {
        "transaction_states": [
            _describe(call, transactional_id) for transactional_id in call.body.transactional_ids
        ]
    }


def _describe(call: Call, transactional_id: str) -> Response:
    response: dict[str, Any] = {
        "error_code": ErrorCode.NONE,
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time": 0,
        "producer_id": -1,
        "producer_epoch": -1,
        "topics": [],
    }
    try:
        call.refuse_injected()
        if not transactional_id:
            raise RequestRefused(ErrorCode.INVALID_REQUEST)
        call.check_coordinator("transaction", transactional_id)
        known = call.transactions.ids.get(transactional_id)
        if known is None:
            raise RequestRefused(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
    except RequestRefused as exc:
        return response | {"error_code": exc.code}
    topics: dict[str, list[int]] = {}
    for name, index in known.partitions:
        topics.setdefault(name, []).append(index)
    return response | {
        "transaction_state": known.state.value,
        "transaction_timeout": known.timeout_ms,
        "transaction_start_time": known.started_ms,
        "producer_id": known.producer_id,
        "producer_epoch": known.producer_epoch,
        "topics": [{"topic": name, "partitions": indexes} for name, indexes in topics.items()],
    }
