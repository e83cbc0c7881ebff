"""CreateTopics (19), DeleteTopics (20), CreatePartitions (37). Any node takes them, as in KRaft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.handlers.api import Call, api, topic_name
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, RequestRefused

__all__ = ["create_partitions", "create_topics", "delete_topics"]

#: Partitions that one request may make (Java: ReplicationControlManager.MAX_PARTITIONS_PER_BATCH).
_MAX_NEW_PARTITIONS = 10_000

#: ConfigSource.TOPIC_CONFIG: the option was set for this topic.
_FROM_TOPIC = 1


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    yield from ((topic.name, None) for topic in body.topics)


@api(19, "create_topics", 2, 7, touches=_touches)
def create_topics(call: Call) -> Response:
    """-1 for partitions or replicas is the cluster's default (allowed from v4 on, here always)."""
    return {"topics": [_create_topic(call, item) for item in call.body.topics]}


def _create_topic(call: Call, item: Message) -> Response:
    response: dict[str, Any] = {
        "name": item.name,
        "topic_id": None,
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "num_partitions": -1,
        "replication_factor": -1,
        "configs": [],
    }
    manual = {a.partition_index: tuple(a.broker_ids) for a in item.assignments}
    try:
        call.refuse_injected(item.name)
        _refuse_too_many(sum(max(topic.num_partitions, 0) for topic in call.body.topics))
        if manual and (item.num_partitions != -1 or item.replication_factor != -1):
            raise RequestRefused(
                ErrorCode.INVALID_REQUEST, "both an assignment and numbers were given"
            )
        topic = call.state.create_topic(
            item.name,
            None if item.num_partitions == -1 else item.num_partitions,
            replication=None if item.replication_factor == -1 else item.replication_factor,
            assignment=manual or None,
            configs={config.name: config.value or "" for config in item.configs},
            validate_only=call.body.validate_only,
        )
    except RequestRefused as exc:
        return response | {"error_code": exc.code, "error_message": exc.message or None}
    return response | {
        "topic_id": None if call.body.validate_only else topic.topic_id,
        "num_partitions": len(topic.partitions),
        "replication_factor": len(topic.partitions[0].replicas),
        "configs": [
            {
                "name": name,
                "value": value,
                "read_only": False,
                "config_source": _FROM_TOPIC,
                "is_sensitive": False,
            }
            for name, value in topic.configs.items()
        ],
    }


def _refuse_too_many(partitions: int) -> None:
    if partitions > _MAX_NEW_PARTITIONS:
        raise RequestRefused(
            ErrorCode.POLICY_VIOLATION,
            f"{partitions} partitions in one request, {_MAX_NEW_PARTITIONS} at most",
        )


def _touches_deleted(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    for name, _ in _deleted(state, body):
        yield name, None


def _deleted(state: ClusterState, body: Message) -> Iterator[tuple[str | None, Any]]:
    """(name, id) of the topics to delete: by id from v6 on."""
    if hasattr(body, "topic_names"):
        yield from ((name, None) for name in body.topic_names)
    else:
        yield from ((topic_name(state, item), item.topic_id) for item in body.topics)


@api(20, "delete_topics", 1, 6, touches=_touches_deleted)
def delete_topics(call: Call) -> Response:
    """By name, or by id from v6 on."""
    responses = []
    for name, topic_id in _deleted(call.state, call.body):
        code = ErrorCode.NONE
        message = None
        try:
            call.refuse_injected(name)
            if name is None:
                raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_ID)
            call.state.delete_topic(name)
        except RequestRefused as exc:
            code, message = exc.code, exc.message or None
        responses.append(
            {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}
        )
    return {"responses": responses}


@api(37, "create_partitions", 0, 3, touches=_touches)
def create_partitions(call: Call) -> Response:
    """More partitions for a topic; records stay where they are."""
    results = []
    for item in call.body.topics:
        code, message = ErrorCode.NONE, None
        try:
            call.refuse_injected(item.name)
            _refuse_too_many(item.count - len(call.state.topic(item.name).partitions))
            call.state.add_partitions(
                item.name,
                item.count,
                assignment=_new_assignment(call.state, item),
                validate_only=call.body.validate_only,
            )
        except RequestRefused as exc:
            code, message = exc.code, exc.message or None
        results.append({"name": item.name, "error_code": code, "error_message": message})
    return {"results": results}


def _new_assignment(state: ClusterState, item: Message) -> dict[int, tuple[int, ...]] | None:
    if item.assignments is None:
        return None
    have = len(state.topic(item.name).partitions)
    return {
        index: tuple(assignment.broker_ids)
        for index, assignment in enumerate(item.assignments, start=have)
    }
