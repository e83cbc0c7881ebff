"""TxnOffsetCommit (28) and OffsetFetch (9)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.groups import CommittedOffset, Group
from asyncproducer.testing.handlers.api import Call, api
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, RequestRefused

__all__ = ["offset_fetch", "txn_offset_commit"]


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    for topic in body.topics:
        for partition in topic.partitions:
            yield topic.name, partition.partition_index


@api(28, "txn_offset_commit", 0, 5, touches=_touches)
def txn_offset_commit(call: Call) -> Response:
    """Offsets that the group gets when the transaction is committed. v5 is TV2."""
    error: ErrorCode | None = None  # of the transaction or the group, once it was looked at
    topics = []
    for topic in call.body.topics:
        parts = []
        for item in topic.partitions:
            code = ErrorCode.NONE
            try:
                with call.effect(topic.name, item.partition_index):
                    call.state.partition(topic.name, item.partition_index)
                    if error is None:
                        error = _prepare(call)
                    if error:
                        raise RequestRefused(error)
                    _add_pending(call, topic.name, item)
            except RequestRefused as exc:
                code = exc.code
            parts.append({"partition_index": item.partition_index, "error_code": code})
        topics.append({"name": topic.name, "partitions": parts})
    return {"topics": topics}


def _prepare(call: Call) -> ErrorCode:
    """Whether the producer may commit offsets of this group now. TV2: its transaction begins."""
    body = call.body
    try:
        if not body.group_id:
            raise RequestRefused(ErrorCode.INVALID_GROUP_ID)
        call.check_coordinator("group", body.group_id)
        call.state.coordinator("transaction", body.transactional_id)
        producer = body.transactional_id, body.producer_id, body.producer_epoch
        if call.version >= 5:
            call.transactions.add(*producer, groups=[body.group_id], version=2)
        elif not call.transactions.verify(*producer, group=body.group_id):
            known = call.version >= 4
            raise RequestRefused(
                ErrorCode.TRANSACTION_ABORTABLE if known else ErrorCode.INVALID_TXN_STATE
            )
        call.groups.check(
            body.group_id,
            getattr(body, "generation_id", -1),
            getattr(body, "member_id", ""),
            getattr(body, "group_instance_id", None),
        )
    except RequestRefused as exc:
        fenced = exc.code == ErrorCode.PRODUCER_FENCED
        return ErrorCode.INVALID_PRODUCER_EPOCH if fenced else exc.code
    return ErrorCode.NONE


def _add_pending(call: Call, name: str, item: Message) -> None:
    offset = CommittedOffset(
        item.committed_offset, getattr(item, "committed_leader_epoch", -1), item.committed_metadata
    )
    offsets = {(name, item.partition_index): offset}
    call.groups.add_pending(call.body.group_id, call.body.producer_id, offsets)


@api(9, "offset_fetch", 1, 9)
def offset_fetch(call: Call) -> Response:
    """Committed offsets; several groups from v8 on. `require_stable`: not those that may change."""
    body = call.body
    if call.version < 8:
        return _fetch_group(call, body.group_id, body.topics)
    return {
        "groups": [
            {"group_id": group.group_id, **_fetch_group(call, group.group_id, group.topics)}
            for group in body.groups
        ]
    }


def _fetch_group(call: Call, group_id: str, topics: list[Message] | None) -> Response:
    try:
        call.refuse_injected()
        call.check_coordinator("group", group_id)
    except RequestRefused as exc:
        return {
            "error_code": exc.code,
            "topics": _failed(topics or [], exc.code) if call.version < 2 else [],
        }
    group = call.groups.get(group_id)
    stable = getattr(call.body, "require_stable", False)
    wanted: dict[str, list[int]] = {}
    if topics is None:
        for name, index in group.offsets:
            wanted.setdefault(name, []).append(index)
    else:
        wanted = {topic.name: list(topic.partition_indexes) for topic in topics}
    return {
        "error_code": ErrorCode.NONE,
        "topics": [
            {
                "name": name,
                "partitions": [_fetch_offset(group, name, index, stable) for index in indexes],
            }
            for name, indexes in wanted.items()
        ],
    }


def _failed(topics: list[Message], code: ErrorCode) -> list[Response]:
    """v1 has no place but the partitions to say it."""
    unknown = {"committed_offset": -1, "metadata": "", "error_code": code}
    return [
        {
            "name": topic.name,
            "partitions": [{"partition_index": i, **unknown} for i in topic.partition_indexes],
        }
        for topic in topics
    ]


def _fetch_offset(group: Group, name: str, index: int, stable: bool) -> Response:
    error = ErrorCode.NONE
    found = group.offsets.get((name, index), CommittedOffset(-1))
    if stable and any((name, index) in offsets for offsets in group.pending.values()):
        error, found = ErrorCode.UNSTABLE_OFFSET_COMMIT, CommittedOffset(-1)
    return {
        "partition_index": index,
        "committed_offset": found.offset,
        "committed_leader_epoch": found.leader_epoch,
        "metadata": found.metadata,
        "error_code": error,
    }
