"""What all brokers of an embedded cluster agree on: nodes, topics, leaders, features.

In Kafka this is the controller's metadata log. Here it is one object that all nodes
look at, so every change is known everywhere at once. A stale view is a client's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias
from zlib import crc32

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.storage import LogConfig, PartitionLog

__all__ = [
    "INTERNAL_TOPICS",
    "ClusterState",
    "CoordinatorKind",
    "Node",
    "Partition",
    "RequestRefused",
    "Topic",
    "parse_configs",
]

#: A coordinator is in charge of a group, or of a transactional id.
CoordinatorKind: TypeAlias = Literal["group", "transaction"]

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

#: Kafka's own topics, to which no client may write (Java: Topic.INTERNAL_TOPICS).
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__share_group_state", "__transaction_state"})


class RequestRefused(ValueError):
    """An error code to answer, and a text where the API has a place for it.

    To a test that calls the cluster's methods it is what it inherits from.
    """

    def __init__(self, code: ErrorCode, message: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclasses.dataclass(slots=True)
class Node:
    """A broker as its cluster knows it. `port` is 0 until it first listens."""

    node_id: int
    host: str
    port: int = 0
    rack: str | None = None
    alive: bool = False


@dataclasses.dataclass(slots=True)
class Partition:
    """A partition: its log, who leads it (-1 nobody), and the nodes that have it."""

    topic: str
    index: int
    log: PartitionLog
    replicas: tuple[int, ...]
    leader: int = -1
    leader_epoch: int = 0


@dataclasses.dataclass(slots=True)
class Topic:
    """A topic. `topic_id` is new each time that a topic of this name is created."""

    name: str
    topic_id: uuid.UUID
    configs: Mapping[str, str]
    log_config: LogConfig
    partitions: list[Partition] = dataclasses.field(default_factory=list)

    @property
    def is_internal(self) -> bool:
        """Whether it is one of Kafka's own topics."""
        return self.name in INTERNAL_TOPICS


class ClusterState:
    """The metadata of one embedded cluster. All methods are synchronous."""

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        rng: random.Random,
        auto_create_topics: bool = True,
        default_partitions: int = 1,
        topic_defaults: Mapping[str, str] | None = None,
        validate_records: bool = True,
        features: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.topics: dict[str, Topic] = {}
        self.auto_create_topics = auto_create_topics
        self.default_partitions = default_partitions
        self.features = dict(features or {})
        self.features_epoch = 1
        #: Of which coordinators the state is being loaded.
        self.loading: set[tuple[CoordinatorKind, str]] = set()
        self._placed: dict[tuple[CoordinatorKind, str], int] = {}
        self._topic_defaults = dict(topic_defaults or {})
        self._validate_records = validate_records
        self._rng = rng
        self._by_id: dict[uuid.UUID, Topic] = {}
        self._producer_ids = itertools.count(1000)
        self.cluster_id = f"embedded-{self._new_id().hex[:12]}"

    # -- nodes

    @property
    def alive(self) -> list[Node]:
        """The nodes that can be reached, by id."""
        return [node for node in self.nodes.values() if node.alive]

    @property
    def controller_id(self) -> int:
        """The node that answers as the controller: the first one alive, else -1."""
        return self.alive[0].node_id if self.alive else -1

    def node_started(self, node_id: int) -> None:
        """The node leads what nobody else could lead."""
        self.nodes[node_id].alive = True
        for partition in self._partitions():
            if partition.leader == -1 and node_id in partition.replicas:
                self._set_leader(partition, node_id)

    def node_stopped(self, node_id: int) -> None:
        """Other replicas become leaders where this node was one; without any, nobody is."""
        self.nodes[node_id].alive = False
        for partition in self._partitions():
            if partition.leader == node_id:
                in_sync = self.in_sync_replicas(partition)
                self._set_leader(partition, in_sync[0] if in_sync else -1)

    def coordinator(self, kind: CoordinatorKind, key: str) -> Node:
        """The node that is in charge of a group or transactional id.

        It is where it was moved to, else where the key's hash says; where that node is
        stopped, the next one. Raises RequestRefused (COORDINATOR_NOT_AVAILABLE).
        """
        ids = list(self.nodes)
        placed = self._placed.get((kind, key))
        if placed != -1:
            first = crc32(key.encode()) % len(ids) if placed is None else ids.index(placed)
            for node_id in ids[first:] + ids[:first]:
                if self.nodes[node_id].alive:
                    return self.nodes[node_id]
        raise RequestRefused(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def move_coordinator(self, kind: CoordinatorKind, key: str, node_id: int) -> None:
        """Puts another node in charge; -1: nobody is. Raises ValueError for an unknown node."""
        if node_id != -1 and node_id not in self.nodes:
            raise ValueError(f"there is no broker {node_id} to coordinate {key!r}")
        self._placed[kind, key] = node_id

    def check_coordinator(self, kind: CoordinatorKind, key: str, node_id: int) -> None:
        """Raises RequestRefused unless the node is the coordinator, and has its state."""
        try:
            is_here = self.coordinator(kind, key).node_id == node_id
        except RequestRefused:
            is_here = False  # who is asked only knows that it is not itself
        if not is_here:
            raise RequestRefused(ErrorCode.NOT_COORDINATOR)
        if (kind, key) in self.loading:
            raise RequestRefused(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    # -- features

    def set_feature(self, name: str, level: int) -> None:
        """Finalizes a feature at a level, 0 for off. ApiVersions tells it from now on."""
        self.features[name] = level
        self.features_epoch += 1

    # -- topics

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        *,
        replication: int | None = None,
        assignment: Mapping[int, tuple[int, ...]] | None = None,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> Topic:
        """A new topic; None is the cluster's default. Raises RequestRefused."""
        self._check_new_name(name)
        all_configs = {**self._topic_defaults, **(configs or {})}
        log_config = parse_configs(all_configs)
        if assignment is None:
            count = self.default_partitions if partitions is None else partitions
            assignment = self._assign(range(count), replication)
        self._check_assignment(assignment, first=0)
        topic = Topic(name, self._new_id(), all_configs, log_config)
        self._add_partitions(topic, assignment)
        if not validate_only:
            self.topics[name] = topic
            self._by_id[topic.topic_id] = topic
        return topic

    def delete_topic(self, name: str) -> None:
        """Deletes a topic and its records. Raises RequestRefused."""
        topic = self.topic(name)
        del self.topics[name], self._by_id[topic.topic_id]
        for partition in topic.partitions:
            partition.leader = -1
            partition.log.notify()

    def add_partitions(
        self,
        name: str,
        count: int,
        *,
        assignment: Mapping[int, tuple[int, ...]] | None = None,
        validate_only: bool = False,
    ) -> None:
        """Grows a topic to `count` partitions. Raises RequestRefused."""
        topic = self.topic(name)
        have = len(topic.partitions)
        if count <= have:
            raise RequestRefused(
                ErrorCode.INVALID_PARTITIONS, f"the topic has {have} partitions already"
            )
        if assignment is None:
            replication = len(topic.partitions[0].replicas)
            assignment = self._assign(range(have, count), replication)
        self._check_assignment(assignment, first=have)
        if not validate_only:
            self._add_partitions(topic, assignment)

    def topic(self, name: str) -> Topic:
        """Raises RequestRefused (UNKNOWN_TOPIC_OR_PARTITION)."""
        try:
            return self.topics[name]
        except KeyError:
            raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name}") from None

    def topic_by_id(self, topic_id: uuid.UUID | None) -> Topic:
        """Raises RequestRefused (UNKNOWN_TOPIC_ID). kio has None for the zero id."""
        topic = None if topic_id is None else self._by_id.get(topic_id)
        if topic is None:
            raise RequestRefused(ErrorCode.UNKNOWN_TOPIC_ID, f"no topic with id {topic_id}")
        return topic

    def partition(self, topic: str, index: int) -> Partition:
        """Raises RequestRefused (UNKNOWN_TOPIC_OR_PARTITION)."""
        partitions = self.topic(topic).partitions
        if not 0 <= index < len(partitions):
            raise RequestRefused(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no partition {index} of topic {topic}"
            )
        return partitions[index]

    def in_sync_replicas(self, partition: Partition) -> list[int]:
        """The replicas that can be reached: there is no lag here."""
        return [node_id for node_id in partition.replicas if self.nodes[node_id].alive]

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        """Makes a node the leader (-1: nobody leads), and a replica if it was none.

        Raises ValueError when that node is not there, RequestRefused for the partition.
        """
        if node_id != -1 and not (node_id in self.nodes and self.nodes[node_id].alive):
            raise ValueError(f"node {node_id} is not there to lead {topic}-{partition}")
        found = self.partition(topic, partition)
        if node_id != -1 and node_id not in found.replicas:
            found.replicas += (node_id,)
        self._set_leader(found, node_id)

    # -- producers

    def new_producer_id(self) -> int:
        """A producer id that was never given out before."""
        return next(self._producer_ids)

    # -- inside

    def _new_id(self) -> uuid.UUID:
        return uuid.UUID(int=self._rng.getrandbits(128), version=4)

    def _partitions(self) -> Iterable[Partition]:
        return itertools.chain.from_iterable(t.partitions for t in self.topics.values())

    def _set_leader(self, partition: Partition, node_id: int) -> None:
        partition.leader = node_id
        partition.leader_epoch += 1
        partition.log.notify()  # a fetch that waits at the old leader must hear of it

    def _check_new_name(self, name: str) -> None:
        if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            raise RequestRefused(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                "a topic's name has 1 to 249 characters of a-z, A-Z, 0-9, '.', '_' and '-'",
            )
        if name in self.topics:
            raise RequestRefused(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name} already exists")
        for other in self.topics:
            # In Kafka's metric names the dot becomes an underscore.
            if other.replace(".", "_") == name.replace(".", "_"):
                raise RequestRefused(
                    ErrorCode.INVALID_TOPIC_EXCEPTION, f"the name collides with topic {other}"
                )

    def _check_assignment(self, assignment: Mapping[int, tuple[int, ...]], first: int) -> None:
        if not assignment:
            raise RequestRefused(ErrorCode.INVALID_PARTITIONS, "a topic has at least one partition")
        numbers = list(range(first, first + len(assignment)))
        sizes = {len(replicas) for replicas in assignment.values()}
        if sorted(assignment) != numbers or len(sizes) != 1 or 0 in sizes:
            raise RequestRefused(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                "the partitions are not numbered without a gap, or have not equally many replicas",
            )
        for replicas in assignment.values():
            if len(set(replicas)) != len(replicas) or not set(replicas) <= self.nodes.keys():
                raise RequestRefused(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{replicas} are not different brokers"
                )

    def _assign(
        self, partitions: Iterable[int], replication: int | None
    ) -> dict[int, tuple[int, ...]]:
        """Partition i has its preferred leader on the i-th node, and replicas on the next ones."""
        ids = list(self.nodes)
        factor = min(3, len(ids)) if replication is None else replication
        if not 1 <= factor <= len(ids):
            raise RequestRefused(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"replication factor {factor} with {len(ids)} brokers",
            )
        return {
            index: tuple(ids[(index + shift) % len(ids)] for shift in range(factor))
            for index in partitions
        }

    def _add_partitions(self, topic: Topic, assignment: Mapping[int, tuple[int, ...]]) -> None:
        for index, replicas in sorted(assignment.items()):
            log = PartitionLog(topic.log_config, validate_records=self._validate_records)
            partition = Partition(topic.name, index, log, replicas)
            in_sync = self.in_sync_replicas(partition)
            # Before the cluster's start every leader is the preferred one, at epoch 0.
            candidates = in_sync or ([] if self.alive else list(replicas))
            partition.leader = candidates[0] if candidates else -1
            topic.partitions.append(partition)


#: Topic options that we take and that change nothing here. Others are INVALID_CONFIG,
#: so that a mistyped name is found, as it is by Kafka.
_WITHOUT_EFFECT = frozenset(
    {
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.type",
        "compression.zstd.level",
        "delete.retention.ms",
        "errors.deadletterqueue.enable",
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "index.interval.bytes",
        "leader.replication.throttled.replicas",
        "local.retention.bytes",
        "local.retention.ms",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        "preallocate",
        "remote.copy.disable",
        "remote.log.delete.on.disable",
        "remote.storage.enable",
        "retention.bytes",
        "retention.ms",
        "segment.bytes",
        "segment.index.bytes",
        "segment.jitter.ms",
        "segment.ms",
        "unclean.leader.election.enable",
    }
)


def parse_configs(configs: Mapping[str, str]) -> LogConfig:
    """Topic options by Kafka's names. Raises RequestRefused (INVALID_CONFIG)."""
    values: dict[str, Any] = {}
    for name, text in configs.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _OPTIONS:
            raise RequestRefused(ErrorCode.INVALID_CONFIG, f"unknown topic option {name}")
        field, parse = _OPTIONS[name]
        try:
            values[field] = parse(text)
        except (KeyError, ValueError):
            raise RequestRefused(
                ErrorCode.INVALID_CONFIG, f"invalid value {text!r} of topic option {name}"
            ) from None
    return LogConfig(**values)


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if (value := int(text)) < minimum:
            raise ValueError(text)
        return value

    return parse


def _is_compacted(text: str) -> bool:
    policies = {policy.strip() for policy in text.split(",")}
    if not policies <= {"compact", "delete"}:
        raise ValueError(text)
    return "compact" in policies


_OPTIONS: dict[str, tuple[str, Callable[[str], int | bool]]] = {
    "cleanup.policy": ("compacted", _is_compacted),
    "max.message.bytes": ("max_message_bytes", _at_least(0)),
    "message.timestamp.after.max.ms": ("timestamp_after_max_ms", _at_least(0)),
    "message.timestamp.before.max.ms": ("timestamp_before_max_ms", _at_least(0)),
    "message.timestamp.type": (
        "log_append_time",
        {"CreateTime": False, "LogAppendTime": True}.__getitem__,
    ),
    "min.insync.replicas": ("min_insync_replicas", _at_least(1)),
}
