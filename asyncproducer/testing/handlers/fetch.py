"""Fetch (1)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import read_header, split_batches
from asyncproducer.testing.handlers.api import Call, api, topic_name
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, Partition, RequestRefused

__all__ = ["READ_COMMITTED", "check_leader", "fetch"]

#: Of a request's isolation level.
READ_COMMITTED = 1


def _touches(state: ClusterState, body: Message) -> Iterator[tuple[str | None, int | None]]:
    for topic in body.topics:
        name = topic_name(state, topic, "topic")
        for partition in topic.partitions:
            yield name, partition.partition


@api(1, "fetch", 4, 18, touches=_touches)
async def fetch(call: Call) -> Response:
    """Records, when there are `min_bytes` of them or `max_wait` has passed.

    Topic ids from v13 on, leader hints from v16 on. `read_committed` ends at the last
    stable offset, and names the aborted transactions in what it gives. Not done: fetch
    sessions (every answer has session id 0, which tells the client to go on without),
    followers.
    """
    if call.body.__version__ >= 7 and call.body.session_id != 0:
        return {
            "error_code": ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
            "session_id": 0,
            "responses": [],
        }
    loop = asyncio.get_running_loop()
    deadline = loop.time() + call.body.max_wait / timedelta(seconds=1)
    while True:
        attempt = _Attempt(call)
        if attempt.complete or loop.time() >= deadline:
            return attempt.response
        await _wait_for_data(attempt.partitions, deadline)


class _Attempt:
    """One pass over the partitions asked for, in their order."""

    def __init__(self, call: Call) -> None:
        body = call.body
        self._call = call
        self._room = body.max_bytes
        self._committed = body.isolation_level == READ_COMMITTED
        self._size = 0
        self._failed = False
        self._endpoints: dict[int, Response] = {}
        self.partitions: list[Partition] = []
        responses = [self._read_topic(topic) for topic in body.topics]
        #: There is no reason to wait for more (ReplicaManager.fetchMessages).
        self.complete = self._failed or not self.partitions or self._size >= body.min_bytes
        self.response: Response = {
            "error_code": ErrorCode.NONE,
            "session_id": 0,
            "responses": responses,
            "node_endpoints": list(self._endpoints.values()),
        }

    def _read_topic(self, topic: Message) -> Response:
        name = topic_name(self._call.state, topic, "topic")
        topic_id: uuid.UUID | None = getattr(topic, "topic_id", None)
        return {
            "topic": name,
            "topic_id": topic_id,
            "partitions": [self._read_partition(name, item) for item in topic.partitions],
        }

    def _read_partition(self, name: str | None, item: Message) -> Response:
        response: dict[str, Any] = {
            "partition_index": item.partition,
            "error_code": ErrorCode.NONE,
            "high_watermark": -1,
            "last_stable_offset": -1,
            "log_start_offset": -1,
            "aborted_transactions": None,
            "preferred_read_replica": -1,
            "records": b"",
        }
        try:
            partition = self._find(name, item)
        except RequestRefused as exc:
            self._failed = True
            response["error_code"] = exc.code
            self._add_leader_hint(name, response)
            return response
        log = partition.log
        self.partitions.append(partition)
        # The first partition with data gives a whole batch, however little was asked (KIP-74).
        records = log.read(
            item.fetch_offset,
            min(item.partition_max_bytes, self._room),
            at_least_one=self._size == 0,
            committed=self._committed,
        )
        self._size += len(records)
        self._room -= len(records)
        response |= {
            "high_watermark": log.end_offset,
            "last_stable_offset": log.last_stable_offset,
            "log_start_offset": log.start_offset,
            "records": records,
        }
        if self._committed:
            response["aborted_transactions"] = [
                {"producer_id": aborted.producer_id, "first_offset": aborted.first_offset}
                for aborted in log.aborted(item.fetch_offset, _end_offset(records))
            ]
        return response

    def _find(self, name: str | None, item: Message) -> Partition:
        call = self._call
        call.refuse_injected(name, item.partition)
        if name is None:
            raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_ID)
        partition = call.state.partition(name, item.partition)
        check_leader(call, partition, getattr(item, "current_leader_epoch", -1))
        if not partition.log.start_offset <= item.fetch_offset <= partition.log.end_offset:
            raise RequestRefused(ErrorCode.OFFSET_OUT_OF_RANGE)
        return partition

    def _add_leader_hint(self, name: str | None, response: dict[str, Any]) -> None:
        code = response["error_code"]
        hinted = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
        state = self._call.state
        if self._call.version < 16 or code not in hinted or name not in state.topics:
            return
        partition = state.partition(name, response["partition_index"])
        response["current_leader"] = {
            "leader_id": partition.leader,
            "leader_epoch": partition.leader_epoch,
        }
        if (node := state.nodes.get(partition.leader)) is not None and node.alive:
            self._endpoints[node.node_id] = {
                "node_id": node.node_id,
                "host": node.host,
                "port": node.port,
                "rack": node.rack,
            }


def _end_offset(records: bytes) -> int:
    """The offset behind the last batch, -1 without one."""
    *_, last = [None, *split_batches(records)]
    return -1 if last is None else read_header(last).last_offset + 1


def check_leader(call: Call, partition: Partition, epoch: int) -> None:
    """Raises RequestRefused unless the node leads, in the epoch that the client knows (KIP-320)."""
    if partition.leader != call.node_id:
        raise RequestRefused(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    if 0 <= epoch < partition.leader_epoch:
        raise RequestRefused(ErrorCode.FENCED_LEADER_EPOCH)
    if epoch > partition.leader_epoch:
        raise RequestRefused(ErrorCode.UNKNOWN_LEADER_EPOCH)


async def _wait_for_data(partitions: list[Partition], deadline: float) -> None:
    """Returns when one of the logs has changed, or at the deadline."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    timer = loop.call_at(deadline, changed.set)
    for partition in partitions:
        partition.log.watch(changed.set)
    try:
        await changed.wait()
    finally:
        timer.cancel()
        for partition in partitions:
            partition.log.unwatch(changed.set)
