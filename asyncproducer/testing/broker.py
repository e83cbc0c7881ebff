"""An Apache Kafka cluster inside the process: for tests, and for the demo.

    async with EmbeddedCluster(brokers=3, topics={"orders": 6}) as cluster:
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send("orders", b"value")
        assert [r.value for r in cluster.records("orders")] == [b"value"]

It speaks Kafka's protocol over TCP on the loopback interface, or in memory, and any
client may use it. What it does is what Java's broker (4.x) does, as far as a producer,
transactional or not, and a consumer without a group can see; where it knowingly differs,
the handler says so.
Replicas are only names: all nodes look at one log, so nothing acknowledged is ever lost.

    broker.py    the cluster, as its user sees it
    node.py      one broker: port, connections, one request after the other
    handlers/    one function per API
    faults.py    what goes wrong, by script
    state.py     topics, leaders, features: the controller's view
    transactions.py  transactional ids: the transaction coordinator's view
    groups.py    consumer groups' offsets
    storage.py   a partition's log, and what a leader remembers about producers
    batches.py   the record format
    messages.py  kio's messages, whatever their version

It has no clock and no randomness but the event loop's and `seed`, so a run on the
VirtualTimeLoop with a MemoryNetwork is the same each time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias

from asyncproducer.testing.batches import StoredRecord
from asyncproducer.testing.faults import ReceivedRequest
from asyncproducer.testing.groups import Groups, Offsets
from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.node import BrokerNode, Environment, Listener
from asyncproducer.testing.state import (
    ClusterState,
    CoordinatorKind,
    Node,
    Partition,
    RequestRefused,
)
from asyncproducer.testing.transactions import TransactionalId, Transactions, TransactionState

if TYPE_CHECKING:
    from asyncproducer.testing.network import MemoryNetwork

__all__ = ["EmbeddedCluster", "TransactionView"]

TimestampType: TypeAlias = Literal["CreateTime", "LogAppendTime"]


class TransactionView(NamedTuple):
    """A transactional id at one moment."""

    state: TransactionState
    producer_id: int
    producer_epoch: int
    #: Topic and number of those that are in the transaction, or still wait for its marker.
    partitions: tuple[tuple[str, int], ...]
    #: By group: the offsets that it gets if the transaction is committed.
    pending_offsets: Mapping[str, Offsets]
    timeout_ms: int


class EmbeddedCluster:
    """Some brokers with ids 1, 2, ... on one event loop. An async context manager.

    `brokers`: how many. `topics`: name -> number of partitions, to begin with.
    `network`: a MemoryNetwork instead of TCP; give `connector` to the producer then.
    `auto_create_topics`, `default_partitions`: as Kafka's auto.create.topics.enable and
    num.partitions. `max_message_bytes`, `message_timestamp_type` (for all topics, or by
    name): defaults of max.message.bytes and message.timestamp.type.
    `host`: what to listen on, and to advertise. `port`: of the first broker; the others
    have the ports that follow. 0: any, each its own.
    `request_versions`: API key -> (lowest, highest), None for an API that is not there:
    plays an older broker. `finalized_features`: what ApiVersions tells, by name; without
    it `transaction.version` is 2, as it is in Kafka.
    `max_request_bytes`: socket.request.max.bytes. `marker_delay_ms`: see `set_marker_delay`.
    `validate_records`: check every single record. Off, an uncompressed batch costs the
    same however many records it has, and bad ones are only found when they are read.
    `seed`: of ids and of garbage. `start_time_ms`: the broker's clock at `start()`, ms
    since 1970, instead of the real one. `request_log_size`: how many requests `requests`
    keeps.

    Its methods raise ValueError for topics, partitions and brokers that are not there.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        topics: Mapping[str, int] | None = None,
        network: MemoryNetwork | None = None,
        auto_create_topics: bool = True,
        default_partitions: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        request_versions: Mapping[int, tuple[int, int] | None] | None = None,
        finalized_features: Mapping[str, int] | None = None,
        marker_delay_ms: int = 0,
        max_message_bytes: int = 1_048_588,
        max_request_bytes: int = 104_857_600,
        message_timestamp_type: TimestampType | Mapping[str, TimestampType] = "CreateTime",
        validate_records: bool = True,
        seed: int = 0,
        start_time_ms: int | None = None,
        request_log_size: int = 10_000,
    ) -> None:
        if brokers < 1:
            raise ValueError(f"brokers={brokers}: a cluster has at least one")
        if not 0 <= port <= (65536 - brokers if port else 0):
            raise ValueError(f"port={port}: there are no {brokers} ports from there to 65535")
        rng = random.Random(seed)
        self._network = network
        self._start_time_ms = start_time_ms
        self._clock: Callable[[], float] = time.time
        self._timestamp_types: Mapping[str, TimestampType] = {}
        defaults = {"max.message.bytes": str(max_message_bytes)}
        if isinstance(message_timestamp_type, str):
            defaults["message.timestamp.type"] = message_timestamp_type
        else:
            self._timestamp_types = dict(message_timestamp_type)
        self._state = ClusterState(
            (Node(n, host, port and port + n - 1) for n in range(1, brokers + 1)),
            rng=rng,
            auto_create_topics=auto_create_topics,
            default_partitions=default_partitions,
            topic_defaults=defaults,
            validate_records=validate_records,
            features={"transaction.version": 2}
            if finalized_features is None
            else finalized_features,
        )
        self._groups = Groups()
        self._transactions = Transactions(
            self._state,
            self._groups,
            now_ms=self._now_ms,
            call_later=_call_later,
            marker_delay_ms=marker_delay_ms,
        )
        versions, advertised = _versions(request_versions or {})
        self._environment = Environment(
            self._state,
            versions=versions,
            advertised=advertised,
            groups=self._groups,
            transactions=self._transactions,
            rng=rng,
            now_ms=self._now_ms,
            max_request_bytes=max_request_bytes,
            log_size=request_log_size,
        )
        #: Makes the next requests that match go wrong: see `faults.Faults.inject`.
        self.inject = self._environment.faults.inject
        self._nodes = {
            node.node_id: BrokerNode(node, self._environment) for node in self._state.nodes.values()
        }
        for name, partitions in (topics or {}).items():
            self.create_topic(name, partitions=partitions)

    # -- life

    async def start(self) -> None:
        """Listens on all ports: all, or none and OSError."""
        loop = asyncio.get_running_loop()
        start_ms = time.time() * 1000 if self._start_time_ms is None else self._start_time_ms
        offset = start_ms / 1000 - loop.time()
        self._clock = lambda: loop.time() + offset
        try:
            for node in self._nodes.values():
                await node.listen(self._listen)
        except BaseException:
            await self.close()
            raise
        for node_id in self._nodes:
            self._state.node_started(node_id)

    async def close(self) -> None:
        """Stops all brokers. Topics and records can still be looked at. Twice does no harm."""
        self._environment.faults.clear()
        self._transactions.close()
        for node_id, node in self._nodes.items():
            await node.close()
            self._state.nodes[node_id].alive = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def bootstrap_servers(self) -> str:
        """All brokers as "host:port,host:port". RuntimeError before `start()`."""
        if not all(node.port for node in self._state.nodes.values()):
            raise RuntimeError("the cluster has no ports yet: call start(), or use `async with`")
        return ",".join(_address(node) for node in self._state.nodes.values())

    def address(self, node_id: int) -> str:
        """One broker's "host:port"."""
        return _address(self._node(node_id).node)

    @property
    def connector(self) -> MemoryNetwork | None:
        """What the producer takes to reach the cluster: None for TCP."""
        return self._network

    @property
    def cluster_id(self) -> str:
        """The id that metadata tells."""
        return self._state.cluster_id

    @property
    def node_ids(self) -> list[int]:
        """1, 2, ..."""
        return list(self._nodes)

    # -- topics

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication: int | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a topic, before or after `start()`.

        None: the cluster's default number, and three replicas where there are as many
        nodes. `configs` by Kafka's names ("cleanup.policy"). Partition i is led by the
        i-th node. Raises ValueError when it cannot be.
        """
        by_topic = self._timestamp_types.get(name)
        all_configs = dict(configs or {})
        if by_topic is not None:
            all_configs.setdefault("message.timestamp.type", by_topic)
        self._state.create_topic(name, partitions, replication=replication, configs=all_configs)

    def delete_topic(self, name: str) -> None:
        """Deletes a topic and its records. A new one of this name has another id."""
        self._state.delete_topic(name)

    def add_partitions(self, name: str, count: int) -> None:
        """Grows a topic to `count` partitions in all."""
        self._state.add_partitions(name, count)

    def leader(self, topic: str, partition: int) -> int:
        """The node that leads a partition, -1 when nobody does."""
        return self._partition(topic, partition).leader

    def leader_epoch(self, topic: str, partition: int) -> int:
        """How often the leader has changed."""
        return self._partition(topic, partition).leader_epoch

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        """Makes another node the leader, at the next leader epoch; -1 leaves none.

        Raises ValueError when that node does not run.
        """
        self._state.move_leader(topic, partition, node_id)

    # -- records

    def records(
        self, topic: str, partition: int | None = None, *, committed: bool = False
    ) -> list[StoredRecord]:
        """The records of a partition, or of all partitions one after the other. Decoded now.

        `committed`: only those that a `read_committed` consumer sees. Markers are not in it.
        """
        partitions = self._state.topic(topic).partitions
        if partition is not None:
            partitions = [self._partition(topic, partition)]
        return [record for p in partitions for record in p.log.records(committed=committed)]

    def markers(self, topic: str, partition: int) -> list[StoredRecord]:
        """What ended transactions in a partition: `is_commit` tells how."""
        return self._partition(topic, partition).log.markers()

    def batches(self, topic: str, partition: int) -> list[bytes]:
        """The batches of a partition as they are stored: with offset and leader epoch."""
        return [batch.data for batch in self._partition(topic, partition).log.batches()]

    def end_offset(self, topic: str, partition: int) -> int:
        """The offset that the next record gets."""
        return self._partition(topic, partition).log.end_offset

    def last_stable_offset(self, topic: str, partition: int) -> int:
        """Where a `read_committed` consumer has to stop."""
        return self._partition(topic, partition).log.last_stable_offset

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        """Forgets the records before an offset, as retention does: the log starts there."""
        self._partition(topic, partition).log.delete_before(before_offset)

    def forget_producers(self, topic: str, partition: int) -> None:
        """The leader loses what it knows of idempotent producers, as after a week of silence."""
        self._partition(topic, partition).log.forget_producers()

    # -- transactions and groups

    def transaction(self, transactional_id: str) -> TransactionView:
        """What the coordinator knows of a transactional id. ValueError for an unknown one."""
        known = self._transactional_id(transactional_id)
        pending = {g: self._groups.get(g).pending.get(known.producer_id, {}) for g in known.groups}
        return TransactionView(
            known.state,
            known.producer_id,
            known.producer_epoch,
            tuple(known.partitions),
            {group_id: dict(offsets) for group_id, offsets in pending.items()},
            known.timeout_ms,
        )

    def set_producer_epoch(self, transactional_id: str, epoch: int) -> None:
        """As after so many transactions: 32766 is the last epoch of a producer id."""
        self._transactional_id(transactional_id).producer_epoch = epoch

    def forget_transactional_id(self, transactional_id: str) -> None:
        """As `transactional.id.expiration.ms` does. Nothing may be open in its name."""
        known = self._transactional_id(transactional_id)
        if known.partitions or known.groups:
            raise ValueError(f"{transactional_id!r} has a transaction open: it never expires")
        del self._transactions.ids[transactional_id]

    def set_marker_delay(self, delay_ms: int) -> None:
        """How long transactions that end from now on wait for their markers; 0: not at all.

        So long a new one cannot begin: CONCURRENT_TRANSACTIONS.
        """
        self._transactions.marker_delay_ms = delay_ms

    def set_feature(self, name: str, level: int) -> None:
        """Changes a finalized feature, 0 for off: `set_feature("transaction.version", 1)`."""
        self._state.set_feature(name, level)

    def coordinator(self, key: str, kind: CoordinatorKind = "transaction") -> int:
        """The node in charge of a transactional id or group, -1 when nobody is."""
        try:
            return self._state.coordinator(kind, key).node_id
        except RequestRefused:
            return -1

    def move_coordinator(
        self, key: str, node_id: int, kind: CoordinatorKind = "transaction", *, load_ms: int = 0
    ) -> None:
        """Puts another node in charge; -1: nobody, which is COORDINATOR_NOT_AVAILABLE.

        Others answer NOT_COORDINATOR, the new one COORDINATOR_LOAD_IN_PROGRESS for `load_ms`.
        """
        self._state.move_coordinator(kind, key, node_id)
        if load_ms:
            self._state.loading.add((kind, key))
            _call_later(load_ms / 1000, lambda: self._state.loading.discard((kind, key)))

    def set_group(
        self, group_id: str, generation: int = -1, members: Mapping[str, str | None] | None = None
    ) -> None:
        """Writes down who is in a group: member id -> group.instance.id, None without one.

        Without members it is a group whose consumers assign partitions for themselves.
        """
        self._groups.describe(group_id, generation, dict(members or {}))

    def committed_offsets(self, group_id: str) -> Offsets:
        """A group's offsets by topic and partition."""
        return dict(self._groups.get(group_id).offsets)

    # -- brokers

    async def stop_broker(self, node_id: int) -> None:
        """Stops a broker at once: requests under way get no answer.

        Another replica takes over each partition that it led, where there is one.
        """
        node = self._node(node_id)
        self._state.node_stopped(node_id)
        node.running.set()
        await node.close()

    async def start_broker(self, node_id: int) -> None:
        """Starts a stopped broker on its old port. It leads only what had no leader."""
        node = self._node(node_id)
        if not node.node.alive:
            await node.listen(self._listen)
            self._state.node_started(node_id)

    async def move_broker(self, node_id: int) -> None:
        """Gives a broker that runs another address: another port of its host.

        As where names or forwarded ports change under brokers that run. Open connections stay,
        and clients find the address in metadata. Raises OSError, ValueError.
        """
        node = self._node(node_id)
        if not node.node.alive:
            raise ValueError(f"broker {node_id} does not run")
        await node.move(self._listen)

    def kill_connections(self, node_id: int) -> int:
        """Drops all connections of a broker, which goes on. Returns how many."""
        return self._node(node_id).drop_connections()

    def connection_count(self, node_id: int) -> int:
        """How many open connections a broker has."""
        return sum(connection.is_open for connection in self._node(node_id).connections)

    def pause(self, node_id: int) -> None:
        """The broker hangs: it takes connections and requests, and does nothing with them.

        It stays the leader of its partitions.
        """
        self._node(node_id).pause()

    def resume(self, node_id: int) -> None:
        """Ends `pause`: what has come in meanwhile is answered."""
        self._node(node_id).resume()

    # -- faults and requests

    def clear_faults(self) -> None:
        """Removes all faults, and releases what they hold."""
        self._environment.faults.clear()

    @property
    def requests(self) -> list[ReceivedRequest]:
        """The last requests that came in, of all nodes, in the order in which they were taken."""
        return list(self._environment.log)

    def received(self, api: str, *, node: int | None = None) -> list[ReceivedRequest]:
        """Those of `requests` with an API's name, at a node."""
        return [r for r in self._environment.log if r.api == api and node in (None, r.node_id)]

    # -- inside

    def _node(self, node_id: int) -> BrokerNode:
        try:
            return self._nodes[node_id]
        except KeyError:
            raise ValueError(f"there is no broker {node_id}, only {self.node_ids}") from None

    def _transactional_id(self, transactional_id: str) -> TransactionalId:
        try:
            return self._transactions.ids[transactional_id]
        except KeyError:
            raise ValueError(f"nobody has used the transactional id {transactional_id!r}") from None

    def _partition(self, topic: str, partition: int) -> Partition:
        return self._state.partition(topic, partition)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def _listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.Protocol]
    ) -> Listener:
        if self._network is not None:
            memory_server = self._network.listen(host, port, protocol_factory)

            async def forget() -> None:
                memory_server.close()

            return Listener(memory_server.address.port, forget)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol_factory, host, port)
        return Listener(server.sockets[0].getsockname()[1], partial(_stop_listening, server))


async def _stop_listening(server: asyncio.Server) -> None:
    """Close it as `server.close()` does, and leave no connection open.

    asyncio forgets those that it has accepted but not handed over yet: `Server._attach` fails.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    # A task, a transport, a protocol that refuses it, its end, the news of that: a turn each.
    for _ in range(5):
        await asyncio.sleep(0)
    server.close()


def _call_later(delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay, callback)


def _address(node: Node) -> str:
    return f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"


def _versions(
    asked: Mapping[int, tuple[int, int] | None],
) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """The versions to take, and those to advertise, by API key. Raises ValueError."""
    for key, wanted in asked.items():
        if key not in APIS:
            raise ValueError(f"request_versions: this broker does not know API {key}")
        api = APIS[key]
        if wanted and not api.advertised_min_version <= wanted[0] <= wanted[1] <= api.max_version:
            raise ValueError(
                f"request_versions: {api.name} {wanted} is not within"
                f" ({api.min_version}, {api.max_version})"
            )
    versions = {}
    advertised = {}
    for key, api in APIS.items():
        wanted = asked.get(key, (api.advertised_min_version, api.advertised_max_version))
        if wanted is not None:
            advertised[key] = wanted
            versions[key] = (max(wanted[0], api.min_version), wanted[1])
    return versions, advertised
