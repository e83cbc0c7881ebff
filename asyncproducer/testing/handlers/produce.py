"""Produce (0): the checks of KafkaApis and ReplicaManager; those of the log are in storage.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import BatchError, BatchHeader, read_header, split_batches
from asyncproducer.testing.faults import BatchSummary, Injection
from asyncproducer.testing.handlers.api import Call, CloseConnection, api, topic_name
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, Partition, RequestRefused
from asyncproducer.testing.storage import Appended, AppendRefused

__all__ = ["produce", "summarize"]

_ZSTD = 4
_TV2_VERSION = 12
_COORDINATOR_ERRORS = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    for topic in body.topic_data:
        name = topic_name(state, topic)
        for partition in topic.partition_data:
            yield name, partition.index


# Java's broker advertises v0 since 4.0, because librdkafka looked at it to find out
# about other things (KAFKA-18659); it takes v3 and up all the same.
@api(0, "produce", 3, 13, touches=_touches, advertised_min_version=0)
def produce(call: Call) -> Response | None:
    """Appends batches. Leader hints in v10 and up (KIP-951), topic ids in v13.

    acks=0 has no answer, and an error closes the connection, so that the client notices.

    Other than Java's broker we refuse null records (it never answers), wrong offset
    deltas, and header keys that are not UTF-8 (it takes both), and we look for the
    transactional id of each batch, not of the request.
    """
    endpoints: dict[int, Response] = {}
    responses = []
    failed = False
    for topic in call.body.topic_data:
        name = topic_name(call.state, topic)
        parts = [_produce_partition(call, name, item, endpoints) for item in topic.partition_data]
        failed = failed or any(part["error_code"] for part in parts)
        responses.append(
            {
                "name": name,
                "topic_id": getattr(topic, "topic_id", None),
                "partition_responses": parts,
            }
        )
    if call.body.acks != 0:
        return {"responses": responses, "node_endpoints": list(endpoints.values())}
    if failed:
        raise CloseConnection("a produce request with acks=0 failed")
    return None


def summarize(state: ClusterState, body: Message) -> list[BatchSummary]:
    """What is in a produce request: for the log of requests."""
    summaries = []
    for topic in body.topic_data:
        name = topic_name(state, topic)
        for item in topic.partition_data:
            data = item.records or b""
            try:
                header = read_header(data)
            except BatchError:
                summaries.append(BatchSummary(name, item.index, len(data)))
                continue
            summaries.append(
                BatchSummary(
                    name,
                    item.index,
                    len(data),
                    header.record_count,
                    header.codec_id,
                    header.producer_id,
                    header.producer_epoch,
                    header.base_sequence,
                    header.is_transactional,
                )
            )
    return summaries


def _produce_partition(
    call: Call, name: str | None, item: Message, endpoints: dict[int, Response]
) -> dict[str, Any]:
    try:
        appended = _append(call, name, item)
    except AppendRefused as exc:
        return _failed(item.index, exc)
    except RequestRefused as exc:
        response = _failed(item.index, AppendRefused(exc.code, exc.message))
        if exc.code == ErrorCode.NOT_LEADER_OR_FOLLOWER:
            _add_leader_hint(call, name, response, endpoints)
        return response
    return {
        "index": item.index,
        "error_code": ErrorCode.NONE,
        "base_offset": appended.base_offset,
        "log_append_time": appended.log_append_time,
        "log_start_offset": appended.log_start_offset,
        "record_errors": [],
        "error_message": None,
    }


def _append(call: Call, name: str | None, item: Message) -> Appended:
    injected = call.injected(name, item.index)
    if injected is not None and not injected.after_append:
        _refuse(injected)
    if name is None:
        raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_ID)
    partition = call.state.partition(name, item.index)
    try:
        data = _only_batch(item.records, call.version)
        header = read_header(data)
    except BatchError as exc:
        raise RequestRefused(exc.code, str(exc)) from exc
    _check_replication(call, partition)
    if header.is_transactional:
        _check_transaction(call, partition, header)
    appended = partition.log.append(data, leader_epoch=partition.leader_epoch, now_ms=call.now_ms())
    if injected is not None:
        _refuse(injected)
    return appended


def _check_transaction(call: Call, partition: Partition, header: BatchHeader) -> None:
    """The leader asks the coordinator about a batch that would begin something here (KIP-890).

    A client of TV2, which is one with Produce v12 and up, has its partition added by that;
    for others it must be in the transaction already.
    """
    transactional_id = call.body.transactional_id
    if transactional_id is None:
        raise RequestRefused(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if partition.log.has_transaction(header.producer_id, header.producer_epoch):
        return
    partition.log.expect_first(header, from_0=call.version >= _TV2_VERSION)
    producer = transactional_id, header.producer_id, header.producer_epoch
    where = partition.topic, partition.index
    try:
        node = call.state.coordinator("transaction", transactional_id)
        call.state.check_coordinator("transaction", transactional_id, node.node_id)
        if call.version >= _TV2_VERSION:
            call.transactions.add(*producer, partitions=[where], version=2)
        elif not call.transactions.verify(*producer, partition=where):
            known = call.version >= 11
            raise RequestRefused(
                ErrorCode.TRANSACTION_ABORTABLE if known else ErrorCode.INVALID_TXN_STATE
            )
    except RequestRefused as exc:
        raise _verification_failed(call, exc.code) from None


def _verification_failed(call: Call, code: ErrorCode) -> AppendRefused:
    """ReplicaManager.handleProduceAppend: clients have to know what is to be tried again."""
    if code == ErrorCode.PRODUCER_FENCED:
        code = ErrorCode.INVALID_PRODUCER_EPOCH
    if code == ErrorCode.INVALID_TXN_STATE:
        text = "Partition was not added to the transaction"
        return AppendRefused(code, text, error_message=text)
    passing = code in _COORDINATOR_ERRORS or (
        code == ErrorCode.CONCURRENT_TRANSACTIONS and call.version < _TV2_VERSION
    )
    if passing:
        text = (
            "Unable to verify the partition has been added to the transaction."
            f" Underlying error: {code.name}"
        )
        return AppendRefused(ErrorCode.NOT_ENOUGH_REPLICAS, text, error_message=text)
    return AppendRefused(code, code.name)


def _refuse(injected: Injection) -> NoReturn:
    if injected.code == ErrorCode.NOT_LEADER_OR_FOLLOWER:
        raise RequestRefused(injected.code)  # gets its leader hint
    raise AppendRefused(
        injected.code,
        "injected",
        record_errors=injected.record_errors,
        error_message=injected.message,
    )


def _only_batch(records: bytes | None, version: int) -> bytes:
    """ProduceRequest.validateRecords: one batch, of the current format. Raises BatchError."""
    batches = list(split_batches(records or b""))
    if len(batches) != 1:
        raise BatchError(f"{len(batches)} batches for one partition, not one")
    (data,) = batches
    if data[16] != 2:
        raise BatchError(f"magic byte {data[16]} where 2 was expected")
    if version < 7 and read_header(data).codec_id == _ZSTD:
        raise BatchError(
            f"zstd with produce v{version}, v7 is needed", ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        )
    return data


def _check_replication(call: Call, partition: Partition) -> None:
    acks = call.body.acks
    if acks not in (-1, 0, 1):
        raise RequestRefused(ErrorCode.INVALID_REQUIRED_ACKS, f"acks={acks}")
    if call.state.topic(partition.topic).is_internal:
        raise RequestRefused(ErrorCode.INVALID_TOPIC_EXCEPTION, "an internal topic")
    if partition.leader != call.node_id:
        raise RequestRefused(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    in_sync = call.state.in_sync_replicas(partition)
    # Never more than there are (Java: Partition.effectiveMinIsr).
    wanted = min(partition.log.config.min_insync_replicas, len(partition.replicas))
    if acks == -1 and len(in_sync) < wanted:
        raise AppendRefused(
            ErrorCode.NOT_ENOUGH_REPLICAS,
            f"{len(in_sync)} replicas are in sync",
            log_start_offset=partition.log.start_offset,
        )


def _failed(index: int, exc: AppendRefused) -> dict[str, Any]:
    return {
        "index": index,
        "error_code": exc.code,
        "base_offset": -1,
        "log_append_time": -1,
        "log_start_offset": exc.log_start_offset,
        "record_errors": [
            {"batch_index": number, "batch_index_error_message": text}
            for number, text in exc.record_errors
        ],
        "error_message": exc.error_message,
    }


def _add_leader_hint(
    call: Call, name: str | None, response: dict[str, Any], endpoints: dict[int, Response]
) -> None:
    """KIP-951: who leads now, and where to find it."""
    if name is None or call.version < 10:
        return
    try:
        partition = call.state.partition(name, response["index"])
    except RequestRefused:  # an injected error, for a partition that does not exist
        return
    response["current_leader"] = {
        "leader_id": partition.leader,
        "leader_epoch": partition.leader_epoch,
    }
    node = call.state.nodes.get(partition.leader)
    if node is not None and node.alive:
        endpoints[node.node_id] = {
            "node_id": node.node_id,
            "host": node.host,
            "port": node.port,
            "rack": node.rack,
        }
