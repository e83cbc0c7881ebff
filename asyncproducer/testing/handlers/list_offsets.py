"""ListOffsets (2)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.handlers.api import Call, api
from asyncproducer.testing.handlers.fetch import READ_COMMITTED, check_leader
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, RequestRefused
from asyncproducer.testing.storage import PartitionLog

__all__ = ["list_offsets"]

#: Special timestamps (ListOffsetsRequest.java). There is no tiered storage here, so
#: "local" is everything, and nothing is tiered or pending.
_LATEST, _EARLIEST, _MAX_TIMESTAMP = -1, -2, -3
_EARLIEST_LOCAL, _LATEST_TIERED, _EARLIEST_PENDING_UPLOAD = -4, -5, -6


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    for topic in body.topics:
        for partition in topic.partitions:
            yield topic.name, partition.partition_index


@api(2, "list_offsets", 1, 11, touches=_touches)
def list_offsets(call: Call) -> Response:
    """Offsets by timestamp: the log's start and end, its latest record, or the first so late."""
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [_partition(call, topic.name, item) for item in topic.partitions],
            }
            for topic in call.body.topics
        ]
    }


def _partition(call: Call, name: str, item: Message) -> Response:
    code, timestamp, offset, epoch = ErrorCode.NONE, -1, -1, -1
    try:
        call.refuse_injected(name, item.partition_index)
        partition = call.state.partition(name, item.partition_index)
        check_leader(call, partition, getattr(item, "current_leader_epoch", -1))
        committed = getattr(call.body, "isolation_level", 0) == READ_COMMITTED
        timestamp, offset = _look_up(partition.log, item.timestamp, committed)
        if offset == partition.log.end_offset:
            epoch = partition.leader_epoch
        elif offset >= 0:
            epoch = partition.log.leader_epoch_at(offset)
    except RequestRefused as exc:
        code = exc.code
    return {
        "partition_index": item.partition_index,
        "error_code": code,
        "timestamp": timestamp,
        "offset": offset,
        "leader_epoch": epoch,
    }


def _look_up(log: PartitionLog, timestamp: int, committed: bool) -> tuple[int, int]:
    """(timestamp, offset), (-1, -1) where there is no such record."""
    if timestamp == _LATEST:
        return -1, log.last_stable_offset if committed else log.end_offset
    if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
        return -1, log.start_offset
    if timestamp in (_LATEST_TIERED, _EARLIEST_PENDING_UPLOAD):
        return -1, -1
    if timestamp < _EARLIEST_PENDING_UPLOAD:
        raise RequestRefused(ErrorCode.UNSUPPORTED_VERSION)
    found = log.latest_timestamp() if timestamp == _MAX_TIMESTAMP else log.find_timestamp(timestamp)
    end = log.last_stable_offset if committed else log.end_offset
    return (-1, -1) if found is None or found[1] >= end else found
