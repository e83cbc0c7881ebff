"""The few questions that tests ask of a real cluster: blocking, one short connection per call.

Not a client library: no pooling, no retries beyond "the next node". It exists so that a test
cluster is judged ready by the protocol itself, and not by an open port.
"""

from __future__ import annotations

import io
import itertools
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from kio.schema.alter_partition_reassignments.v0.request import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from kio.schema.alter_partition_reassignments.v0.response import (
    AlterPartitionReassignmentsResponse,
)
from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.api_versions.v3.response import ApiVersionsResponse
from kio.schema.create_topics.v7.request import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from kio.schema.create_topics.v7.response import CreateTopicsResponse
from kio.schema.delete_topics.v5.request import DeleteTopicsRequest
from kio.schema.delete_topics.v5.response import DeleteTopicsResponse
from kio.schema.elect_leaders.v2.request import ElectLeadersRequest, TopicPartitions
from kio.schema.elect_leaders.v2.response import ElectLeadersResponse
from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v4.request import FindCoordinatorRequest
from kio.schema.find_coordinator.v4.response import FindCoordinatorResponse
from kio.schema.incremental_alter_configs.v1.request import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from kio.schema.incremental_alter_configs.v1.response import IncrementalAlterConfigsResponse
from kio.schema.list_offsets.v7.request import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from kio.schema.list_offsets.v7.response import ListOffsetsResponse
from kio.schema.metadata.v12.request import MetadataRequest, MetadataRequestTopic
from kio.schema.metadata.v12.response import MetadataResponse
from kio.schema.types import BrokerId, TopicName
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64
from kio.static.protocol import RequestPayload, ResponsePayload

__all__ = ["Admin", "AdminError", "ClusterView", "PartitionView"]

R = TypeVar("R", bound=ResponsePayload)

_LATEST_TIMESTAMP = -1  # ListOffsets: "the end of the log"
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_GROUP, _TRANSACTION = 0, 1  # FindCoordinator: kinds of keys
_PREFERRED = 0  # ElectLeaders: the first replica
_TOPIC, _SET = 2, 0  # IncrementalAlterConfigs: a kind of resource, an operation


class AdminError(RuntimeError):
    """A broker answered with an error code.

    `code` is kio's ErrorCode; `retriable` is what Kafka's table says of it.
    """

    def __init__(self, what: str, code: ErrorCode, message: str | None = None) -> None:
        self.code = code
        self.retriable = code.retriable
        detail = f" ({message})" if message else ""
        super().__init__(f"{what}: {code.name}{detail}")


class PartitionView(NamedTuple):
    """One partition as one broker sees it; `leader` is -1 without one."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class ClusterView(NamedTuple):
    """The cluster as one broker sees it; only topics that were asked for, and that exist."""

    controller_id: int
    brokers: dict[int, tuple[str, int]]
    topics: dict[str, dict[int, PartitionView]]


class Admin:
    """Asks the first of `addresses` that answers, or the node that is named.

    Every call blocks up to `timeout_s` per node. Raises OSError when no node answers, AdminError
    when one answers with an error code.
    """

    def __init__(self, addresses: Mapping[int, tuple[str, int]], *, timeout_s: float = 5.0) -> None:
        self._addresses = dict(addresses)
        self._timeout_s = timeout_s

    def features(self, node: int | None = None) -> dict[str, int]:
        """The finalized feature levels, such as `transaction.version`."""
        answer = self._ask(
            ApiVersionsRequest(client_software_name="asyncproducer", client_software_version="0"),
            ApiVersionsResponse,
            node,
        )
        _check("ApiVersions", answer.error_code)
        return {f.name: f.max_version_level for f in answer.finalized_features}

    def view(self, *topics: str, node: int | None = None) -> ClusterView:
        """Nodes, controller, and those of `topics` that exist (none is ever created)."""
        answer = self._ask(
            MetadataRequest(
                topics=tuple(
                    MetadataRequestTopic(topic_id=None, name=TopicName(t)) for t in topics
                ),
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=False,
            ),
            MetadataResponse,
            node,
        )
        return ClusterView(
            controller_id=answer.controller_id,
            brokers={broker.node_id: (broker.host, broker.port) for broker in answer.brokers},
            topics={
                topic.name: {
                    p.partition_index: PartitionView(
                        p.leader_id, p.leader_epoch, p.replica_nodes, p.isr_nodes
                    )
                    for p in topic.partitions
                }
                for topic in answer.topics
                if topic.name is not None and topic.error_code is ErrorCode.none
            },
        )

    def create_topic(
        self,
        name: str,
        *,
        partitions: int,
        replication: int,
        configs: Mapping[str, str],
    ) -> int:
        """Creates the topic, and returns how many partitions it got (-1 takes the defaults).

        The answer comes before every broker has heard of the topic.
        """
        answer = self._ask(
            CreateTopicsRequest(
                topics=(
                    CreatableTopic(
                        name=TopicName(name),
                        num_partitions=i32(partitions),
                        replication_factor=i16(replication),
                        assignments=(),
                        configs=tuple(
                            CreatableTopicConfig(name=key, value=value)
                            for key, value in configs.items()
                        ),
                    ),
                )
            ),
            CreateTopicsResponse,
            None,
        )
        for topic in answer.topics:
            _check(f"create topic {topic.name}", topic.error_code, topic.error_message)
        return answer.topics[0].num_partitions

    def delete_topics(self, *names: str) -> None:
        """Deletes topics; brokers remove their files later."""
        answer = self._ask(
            DeleteTopicsRequest(
                topic_names=tuple(TopicName(name) for name in names),
                timeout=self._timeout,
            ),
            DeleteTopicsResponse,
            None,
        )
        for topic in answer.responses:
            _check(f"delete topic {topic.name}", topic.error_code, topic.error_message)

    def transaction_coordinator(self, transactional_id: str) -> int:
        """The node that coordinates the transactions of this id."""
        return self._coordinator(_TRANSACTION, transactional_id)

    def group_coordinator(self, group_id: str) -> int:
        """The node that coordinates this consumer group."""
        return self._coordinator(_GROUP, group_id)

    def _coordinator(self, kind: int, key: str) -> int:
        answer = self._ask(
            FindCoordinatorRequest(key_type=i8(kind), coordinator_keys=(key,)),
            FindCoordinatorResponse,
            None,
        )
        (found,) = answer.coordinators
        _check(f"coordinator of {key}", found.error_code, found.error_message)
        return int(found.node_id)

    def alter_topic(self, name: str, configs: Mapping[str, str]) -> None:
        """Changes configs of a topic; brokers hear of it a little later."""
        answer = self._ask(
            IncrementalAlterConfigsRequest(
                resources=(
                    AlterConfigsResource(
                        resource_type=i8(_TOPIC),
                        resource_name=name,
                        configs=tuple(
                            AlterableConfig(name=key, config_operation=i8(_SET), value=value)
                            for key, value in configs.items()
                        ),
                    ),
                ),
                validate_only=False,
            ),
            IncrementalAlterConfigsResponse,
            None,
        )
        for topic in answer.responses:
            _check(f"alter topic {name}", topic.error_code, topic.error_message)

    def elect_preferred_leaders(self, topic: str, *partitions: int) -> None:
        """Makes the first replica of each partition its leader, where it is not."""
        answer = self._ask(
            ElectLeadersRequest(
                election_type=i8(_PREFERRED),
                topic_partitions=(
                    TopicPartitions(
                        topic=TopicName(topic), partitions=tuple(i32(p) for p in partitions)
                    ),
                ),
                timeout=self._timeout,
            ),
            ElectLeadersResponse,
            None,
        )
        _check(f"elect leaders of {topic}", answer.error_code)
        for result in answer.replica_election_results:
            for partition in result.partition_result:
                if partition.error_code is not ErrorCode.election_not_needed:
                    what = f"elect the leader of {topic}-{partition.partition_id}"
                    _check(what, partition.error_code, partition.error_message)

    def reassign(self, topic: str, replicas: Mapping[int, Sequence[int]]) -> None:
        """Begins to move partitions to these nodes, the preferred leader first."""
        answer = self._ask(
            AlterPartitionReassignmentsRequest(
                timeout=self._timeout,
                topics=(
                    ReassignableTopic(
                        name=TopicName(topic),
                        partitions=tuple(
                            ReassignablePartition(
                                partition_index=i32(partition),
                                replicas=tuple(BrokerId(node) for node in nodes),
                            )
                            for partition, nodes in replicas.items()
                        ),
                    ),
                ),
            ),
            AlterPartitionReassignmentsResponse,
            None,
        )
        _check(f"reassign {topic}", answer.error_code, answer.error_message)
        for result in answer.responses:
            for partition in result.partitions:
                what = f"reassign {topic}-{partition.partition_index}"
                _check(what, partition.error_code, partition.error_message)

    def end_offsets(self, topic: str, *, committed: bool = False) -> dict[int, int]:
        """The offset after the last record of each partition.

        With `committed=True` it is the last stable offset, which an open transaction holds back.
        """
        partitions = self.view(topic).topics.get(topic)
        if partitions is None:
            raise AdminError(f"end offsets of {topic}", ErrorCode.unknown_topic_or_partition)
        by_leader: dict[int, list[int]] = {}
        for partition, state in partitions.items():
            by_leader.setdefault(state.leader, []).append(partition)
        offsets: dict[int, int] = {}
        for leader, indexes in by_leader.items():
            if leader < 0:
                what = f"end offsets of {topic}-{indexes[0]}"
                raise AdminError(what, ErrorCode.leader_not_available)
            offsets.update(self._leader_offsets(topic, indexes, leader, committed=committed))
        return dict(sorted(offsets.items()))

    def _leader_offsets(
        self, topic: str, partitions: Sequence[int], leader: int, *, committed: bool
    ) -> Iterator[tuple[int, int]]:
        answer = self._ask(
            ListOffsetsRequest(
                replica_id=BrokerId(-1),
                isolation_level=i8(_READ_COMMITTED if committed else _READ_UNCOMMITTED),
                topics=(
                    ListOffsetsTopic(
                        name=TopicName(topic),
                        partitions=tuple(
                            ListOffsetsPartition(
                                partition_index=i32(p), timestamp=i64(_LATEST_TIMESTAMP)
                            )
                            for p in partitions
                        ),
                    ),
                ),
            ),
            ListOffsetsResponse,
            leader,
        )
        for partition in answer.topics[0].partitions:
            _check(f"end offset of {topic}-{partition.partition_index}", partition.error_code)
            yield partition.partition_index, partition.offset

    @property
    def _timeout(self) -> i32Timedelta:
        return i32Timedelta.parse(timedelta(seconds=self._timeout_s))

    def _ask(self, request: RequestPayload, response_type: type[R], node: int | None) -> R:
        addresses = self._addresses
        candidates = addresses.values() if node is None else [addresses[node]]
        failure: OSError | None = None
        for host, port in candidates:
            try:
                with _connected(host, port, self._timeout_s) as connection:
                    return _exchange(connection, request, response_type)
            except OSError as error:
                failure = error
        raise failure or OSError("there is no node to ask")


def _check(what: str, code: ErrorCode, message: str | None = None) -> None:
    if code is not ErrorCode.none:
        raise AdminError(what, code, message)


class _Socket(Protocol):
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, value: float, /) -> None: ...


class _Bounded:
    """A socket with one deadline for everything: a paused broker accepts, and says nothing."""

    def __init__(self, inner: _Socket, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._arm()
        self._inner.sendall(data)

    def read_exactly(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            self._arm()
            chunk = self._inner.recv(size - len(chunks))
            if not chunk:
                raise ConnectionResetError("the broker closed the connection")
            chunks += chunk
        return bytes(chunks)

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the broker did not answer in time")
        self._inner.settimeout(left)


@contextmanager
def _connected(host: str, port: int, timeout_s: float) -> Iterator[_Bounded]:
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        yield _Bounded(connection, deadline)


_correlation_ids = itertools.count(1)


def _exchange(connection: _Bounded, request: RequestPayload, response_type: type[R]) -> R:
    correlation_id = next(_correlation_ids)
    frame = io.BytesIO()
    header_type = request.__header_schema__
    header = header_type(
        request_api_key=request.__api_key__,
        request_api_version=request.__version__,
        correlation_id=i32(correlation_id),
        client_id="asyncproducer-testing",
    )
    entity_writer(header_type)(frame, header)
    entity_writer(type(request))(frame, request)
    connection.sendall(struct.pack(">i", frame.tell()) + frame.getvalue())

    (size,) = struct.unpack(">i", connection.read_exactly(4))
    body = connection.read_exactly(size)
    answered, offset = entity_reader(response_type.__header_schema__)(body, 0)
    if answered.correlation_id != correlation_id:
        raise ConnectionError(f"answer {answered.correlation_id} to request {correlation_id}")
    response, _ = entity_reader(response_type)(body, offset)
    return response
