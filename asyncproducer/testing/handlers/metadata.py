"""Metadata (3)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.handlers.api import Call, api, topic_name
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, Partition, RequestRefused, Topic

__all__ = ["metadata"]

#: The schema's value for "was not asked".
_NO_OPERATIONS = -(2**31)


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    if body.topics is None:
        yield from ((name, None) for name in state.topics)
    else:
        yield from ((topic_name(state, item), None) for item in body.topics)


@api(3, "metadata", 0, 13, touches=_touches)
def metadata(call: Call) -> Response:
    """Nodes and topics. By id from v12 on, with an error of the whole request in v13.

    A topic that is created by this very request is UNKNOWN_TOPIC_OR_PARTITION in its
    answer, as with Java's broker, where the controller makes it meanwhile. The next
    request finds it.

    An injected REBOOTSTRAP_REQUIRED is the request's error, others are the topics'.
    """
    state = call.state
    top_level = call.injected()
    rebootstrap = top_level is not None and top_level.code == ErrorCode.REBOOTSTRAP_REQUIRED
    return {
        "error_code": ErrorCode.REBOOTSTRAP_REQUIRED if rebootstrap else ErrorCode.NONE,
        "brokers": [
            {"node_id": node.node_id, "host": node.host, "port": node.port, "rack": node.rack}
            for node in state.alive
        ],
        "cluster_id": state.cluster_id,
        "controller_id": state.controller_id,
        "topics": [] if rebootstrap else list(_topics(call)),
        "cluster_authorized_operations": _NO_OPERATIONS,
    }


def _topics(call: Call) -> Iterator[Response]:
    asked = call.body.topics
    # v0 has no null: there an empty list asks for everything.
    if asked is None or (call.version == 0 and not asked):
        for topic in call.state.topics.values():
            yield _topic(call, topic)
        return
    for item in asked:
        name: str | None = item.name
        topic_id: uuid.UUID | None = getattr(item, "topic_id", None)
        try:
            yield _topic(call, _find(call, name, topic_id))
        except RequestRefused as exc:
            yield _failed_topic(exc.code, name, topic_id, call.version)


def _find(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Topic:
    state = call.state
    if call.version < 12 and (name is None or topic_id is not None):
        # v10 and v11 have the field, but no broker ever took it.
        raise RequestRefused(ErrorCode.INVALID_REQUEST)
    if topic_id is not None:
        return state.topic_by_id(topic_id)
    if name is None:
        raise RequestRefused(ErrorCode.INVALID_REQUEST)
    call.refuse_injected(name)
    if name not in state.topics and state.auto_create_topics and _may_create(call):
        state.create_topic(name)
        raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if name not in state.topics:
        state.create_topic(name, validate_only=True)  # for INVALID_TOPIC_EXCEPTION
    return state.topic(name)


def _may_create(call: Call) -> bool:
    # Before v4 there was no way to say no.
    return bool(getattr(call.body, "allow_auto_topic_creation", True))


def _topic(call: Call, topic: Topic) -> Response:
    if (injected := call.injected(topic.name)) is not None:
        return _failed_topic(injected.code, topic.name, topic.topic_id, call.version)
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.is_internal,
        "partitions": [_partition(call, partition) for partition in topic.partitions],
        "topic_authorized_operations": _NO_OPERATIONS,
    }


def _failed_topic(
    code: ErrorCode, name: str | None, topic_id: uuid.UUID | None, version: int
) -> Response:
    by_id = version >= 12 and topic_id is not None
    return {
        "error_code": code,
        # Before v12 the name may not be null.
        "name": "" if name is None and not by_id else name,
        "topic_id": topic_id,
        "is_internal": False,
        "partitions": [],
        "topic_authorized_operations": _NO_OPERATIONS,
    }


def _partition(call: Call, partition: Partition) -> Response:
    in_sync = call.state.in_sync_replicas(partition)
    error = ErrorCode.LEADER_NOT_AVAILABLE if partition.leader == -1 else ErrorCode.NONE
    if (injected := call.injected(partition.topic, partition.index)) is not None:
        error = injected.code
    return {
        "error_code": error,
        "partition_index": partition.index,
        "leader_id": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": in_sync,
        "offline_replicas": [node for node in partition.replicas if node not in in_sync],
    }
