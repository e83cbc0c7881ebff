"""Where the brokers of a test cluster run: in local JVMs, or in Docker containers.

Both start the same properties, and both offer the faults that a chaos test needs, by node id.
Nothing here waits for readiness or speaks Kafka's protocol: `asyncproducer.testing.kafka` does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from asyncproducer.testing.java import JavaUnavailable, find_java

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.network import Network

__all__ = [
    "DockerNodes",
    "JvmNodes",
    "KafkaUnavailable",
    "Nodes",
    "docker_answers",
    "kafka_jars",
]

# Kafka logs through SLF4J 1.7 and its artifacts bring no binding: without one a broker that fails
# to start says nothing at all. This one is a single small jar, configured by system properties.
_LOG_BINDING = "org.slf4j:slf4j-simple:1.7.36"

# Outside the range from which systems take the ports of outgoing connections (Linux from 32768,
# the others from 49152). Inside it, a client that retries the port of a broker that is down can
# be given that very port and connect to itself, and the broker then cannot come back.
_PORTS = range(15_000, 32_000)


class KafkaUnavailable(RuntimeError):
    """No Kafka could be started here; the message says what is missing, or shows the log."""


class Nodes(Protocol):
    """The processes of a cluster, by node id."""

    @property
    def addresses(self) -> Mapping[int, tuple[str, int]]:
        """Where clients reach each node, whether it runs or not."""
        ...

    def start(self, node: int) -> None:
        """Starts a node, on its files if it ran before; does not wait until it is ready."""
        ...

    def move(self, node: int) -> tuple[str, int]:
        """Gives a node that is down another address, for its next start.

        Raises KafkaUnavailable where that cannot be.
        """
        ...

    def kill(self, node: int) -> None:
        """Ends it at once; returns when it is gone."""
        ...

    def terminate(self, node: int, timeout_s: float) -> None:
        """Asks it to end; returns when it is gone. Raises TimeoutError when it is not."""
        ...

    def pause(self, node: int) -> None:
        """Stops its clock: connections stay open."""
        ...

    def resume(self, node: int) -> None:
        """Undoes `pause`."""
        ...

    def alive(self, node: int, for_s: float = 0.0) -> bool:
        """Whether its process is there; a paused one is.

        Blocks until it ends, at most `for_s`; an engine, which takes its time, is just asked.
        """
        ...

    def log(self, node: int) -> str:
        """What it has printed so far."""
        ...

    def close(self) -> None:
        """Ends all nodes at once and removes what they wrote."""
        ...


# -- what both need -----------------------------------------------------------------------------


def random_uuid() -> str:
    """A uuid in Kafka's notation: base64url without padding, never with a leading dash.

    StorageTool would read a leading dash as an option (Java: Uuid.randomUuid avoids it too).
    """
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def free_ports(count: int, *, pick: Callable[[], int] | None = None) -> list[int]:
    """Loopback ports that nobody listens on now, all different."""
    pick = pick or (lambda: random.choice(_PORTS))
    found: list[int] = []
    while len(found) < count:
        port = pick()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def common_properties(node_count: int) -> dict[str, str]:
    """What every node of a test cluster gets, wherever it runs."""
    replication = min(node_count, 3)
    in_sync = max(1, replication - 1)
    return {
        "process.roles": "broker,controller",
        "controller.listener.names": "CONTROLLER",
        "num.partitions": "6",
        "default.replication.factor": f"{replication}",
        "min.insync.replicas": f"{in_sync}",
        "offsets.topic.replication.factor": f"{replication}",
        "transaction.state.log.replication.factor": f"{replication}",
        "transaction.state.log.min.isr": f"{in_sync}",
        # The default of 50 partitions each makes the first transaction wait for 50 logs.
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",
        # A broker that was killed stays registered until its session ends, and may not come back
        # before: with the default of 9 s each restart would take that long.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
    }


def _heap(node_count: int) -> str:
    return "-Xmx1g" if node_count == 1 else "-Xmx700m"


def render_properties(properties: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in properties.items())


# -- local JVMs ---------------------------------------------------------------------------------


def kafka_jars(version: str, *more: str) -> list[Path]:
    """The class path of a Kafka broker, and of `more` Maven coordinates.

    The first call for a version downloads about 45 MB and takes some ten seconds; jgo keeps the
    files for all later ones. Raises KafkaUnavailable without jgo, or without a registry.
    """
    try:
        import jgo
        from jgo.maven import PythonResolver
    except ImportError as error:
        raise KafkaUnavailable(
            "real Kafka needs jgo: `pip install asyncproducer[kafka]`"
        ) from error
    endpoint = "+".join([f"org.apache.kafka:kafka_2.13:{version}", _LOG_BINDING, *more])
    try:
        # all_jars, not classpath: the latter leaves out the jars that are Java modules.
        return jgo.build(endpoint, resolver=PythonResolver()).all_jars
    except Exception as error:  # whatever a resolver over the network raises
        raise KafkaUnavailable(f"cannot get {endpoint}: {error}") from error


class JvmNodes:
    """Brokers as child processes, each in a process group of its own, in one temporary directory.

    Everything ends with `close()`, at the latest when this process ends: even when it is killed,
    through a small watching process (kafka_reaper.py).
    """

    def __init__(
        self,
        count: int,
        *,
        version: str,
        properties: Mapping[str, str],
        features: Mapping[str, int],
        jvm_options: Sequence[str] = (),
    ) -> None:
        # Before anything is left to clean up: both may be missing here.
        try:
            java = find_java(os.environ)
        except JavaUnavailable as error:
            raise KafkaUnavailable(str(error)) from None
        jars = kafka_jars(version)
        self._directory = Path(tempfile.mkdtemp(prefix="asyncproducer-kafka-"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._command = [
            java.executable,
            _heap(count),
            "-XX:+UseSerialGC",
            # The quick compiler only: a broker is up a quarter sooner, and a test never runs long
            # enough to earn the slow one's work back. A benchmark asks for it with
            # jvm_options=["-XX:TieredStopAtLevel=4"].
            "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
            *jvm_options,
            "-cp",
            os.pathsep.join(map(str, jars)),
        ]
        ports = free_ports(2 * count)
        self.addresses = {n: ("127.0.0.1", ports[n - 1]) for n in range(1, count + 1)}
        controllers = {n: ports[count + n - 1] for n in self.addresses}
        self._reaper = subprocess.Popen(
            [
                sys.executable,
                "-I",
                str(Path(__file__).with_name("kafka_reaper.py")),
                self._directory,
            ],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            **_own_group(),
        )
        try:
            for node, (_, port) in self.addresses.items():
                own = jvm_properties(node, port, controllers, self._data(node))
                self._config(node).write_text(
                    render_properties({**common_properties(count), **own, **properties})
                )
            self._format(features)
        except BaseException:
            self.close()
            raise

    def start(self, node: int) -> None:
        with self._log(node).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "kafka.Kafka", str(self._config(node))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                **_own_group(),
            )
        self._processes[node] = process
        self._tell_reaper("+", process)

    def move(self, node: int) -> tuple[str, int]:
        host, old = self.addresses[node]
        (new,) = free_ports(1)
        config = self._config(node)
        config.write_text(
            re.sub(rf"{re.escape(host)}:{old}\b", f"{host}:{new}", config.read_text())
        )
        self.addresses[node] = host, new
        return self.addresses[node]

    def kill(self, node: int) -> None:
        self._processes[node].kill()
        self._reap(node, None)

    def terminate(self, node: int, timeout_s: float) -> None:
        self._processes[node].terminate()
        try:
            self._reap(node, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"node {node} was asked to stop and still runs after {timeout_s} s"
            ) from None

    def pause(self, node: int) -> None:
        self._signal(node, "SIGSTOP")

    def resume(self, node: int) -> None:
        self._signal(node, "SIGCONT")

    def alive(self, node: int, for_s: float = 0.0) -> bool:
        process = self._processes.get(node)
        if process is None:
            return False
        try:
            process.wait(for_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def log(self, node: int) -> str:
        path = self._log(node)
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        for node, process in list(self._processes.items()):
            process.kill()
            self._reap(node, None)
        assert self._reaper.stdin is not None  # it was opened with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.close()
        self._reaper.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- files

    def _config(self, node: int) -> Path:
        return self._directory / f"node{node}.properties"

    def _data(self, node: int) -> Path:
        return self._directory / f"node{node}"

    def _log(self, node: int) -> Path:
        return self._directory / f"node{node}.log"

    def _format(self, features: Mapping[str, int]) -> None:
        """One run of StorageTool (0.7 s) for the first node; the others get a copy.

        What it writes differs between nodes only in the two ids of meta.properties.
        """
        told = subprocess.run(
            [
                *self._command,
                "kafka.tools.StorageTool",
                "format",
                *("--cluster-id", random_uuid()),
                *("--config", str(self._config(1))),
                *(part for name, level in features.items() for part in ("-f", f"{name}={level}")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            cwd=self._directory,
        )
        if told.returncode != 0:
            raise KafkaUnavailable(f"StorageTool could not format the log:\n{told.stdout}")
        for node in self.addresses:
            if node == 1:
                continue
            shutil.copytree(self._data(1), self._data(node))
            meta = self._data(node) / "meta.properties"
            text = re.sub(r"(?m)^node\.id=.*$", f"node.id={node}", meta.read_text())
            text = re.sub(r"(?m)^directory\.id=.*$", f"directory.id={random_uuid()}", text)
            meta.write_text(text)

    # -- processes

    def _reap(self, node: int, timeout_s: float | None) -> None:
        process = self._processes[node]
        process.wait(timeout_s)
        self._tell_reaper("-", process)
        del self._processes[node]

    def _tell_reaper(self, sign: str, process: subprocess.Popen[bytes]) -> None:
        assert self._reaper.stdin is not None  # it was opened with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.write(f"{sign}{process.pid}\n")

    def _signal(self, node: int, name: str) -> None:
        number = getattr(signal, name, None)
        if number is None:
            raise NotImplementedError(f"{name} does not exist on this system: use Docker")
        self._processes[node].send_signal(number)


def jvm_properties(
    node: int, port: int, controllers: Mapping[int, int], data: Path
) -> dict[str, str]:
    """What makes one node of a loopback cluster itself."""
    return {
        "node.id": f"{node}",
        "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{p}" for n, p in controllers.items()),
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controllers[node]}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": data.as_posix(),
    }


class _PopenOptions(TypedDict, total=False):
    process_group: int
    creationflags: int


def _own_group() -> _PopenOptions:
    """A Ctrl-C in the terminal is for us: the brokers end when we end them."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


# -- Docker -------------------------------------------------------------------------------------

_DOCKER_TIMEOUT_S = 3
_INTERNAL_PORT, _CONTROLLER_PORT = 19_092, 19_093


def docker_answers() -> bool:
    """Whether testcontainers is installed and an engine answers."""
    try:
        import docker
        import docker.utils
        import testcontainers.core.container  # noqa: F401  (only whether it is there)

        # Tried by hand first: where nobody listens, docker's client leaves its socket unclosed.
        _, is_unix, path = docker.utils.parse_host(os.environ.get("DOCKER_HOST")).partition(
            "unix://"
        )
        if is_unix:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_DOCKER_TIMEOUT_S)
                probe.connect(path)
        client = docker.from_env(timeout=_DOCKER_TIMEOUT_S)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except Exception:  # not installed, no socket, no permission, an engine that hangs: no Docker
        return False


def docker_properties(node: int, host: str, port: int, node_ids: Sequence[int]) -> dict[str, str]:
    """One listener for the host at the same port on both sides, one between the containers."""
    return {
        "node.id": f"{node}",
        "controller.quorum.voters": ",".join(
            f"{n}@{_alias(n)}:{_CONTROLLER_PORT}" for n in node_ids
        ),
        "listeners": f"PLAINTEXT://0.0.0.0:{port},INTERNAL://0.0.0.0:{_INTERNAL_PORT},"
        f"CONTROLLER://0.0.0.0:{_CONTROLLER_PORT}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port},"
        f"INTERNAL://{_alias(node)}:{_INTERNAL_PORT}",
        "inter.broker.listener.name": "INTERNAL",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT,"
        "CONTROLLER:PLAINTEXT",
        "log.dirs": "/tmp/kafka-logs",
    }


def docker_environment(properties: Mapping[str, str]) -> dict[str, str]:
    """Kafka's image reads `a.b_c-d` from KAFKA_A_B__C___D (its KafkaDockerWrapper)."""

    def name(key: str) -> str:
        return "KAFKA_" + key.replace("_", "__").replace("-", "___").replace(".", "_").upper()

    return {name(key): value for key, value in properties.items()}


def _alias(node: int) -> str:
    return f"kafka{node}"


class DockerNodes:
    """Brokers as containers of Kafka's own image, on a network of their own.

    Their ports have the same number inside and outside: a broker must tell its clients a port
    before anybody knows which one an engine would have chosen.
    """

    def __init__(self, count: int, *, version: str, properties: Mapping[str, str]) -> None:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.docker_client import DockerClient
        from testcontainers.core.network import Network

        engine = DockerClient()
        image = f"apache/kafka:{version}"
        # Here, since pulling an image may take minutes, and starting one may not.
        if not engine.client.images.list(name=image):
            engine.client.images.pull(image)
        ports = free_ports(count)
        cluster_id = random_uuid()
        self.addresses = {n: (engine.host(), ports[n - 1]) for n in range(1, count + 1)}
        engine.client.close()
        self._network: Network = Network().create()
        self._containers: dict[int, DockerContainer] = {}
        self._created: set[int] = set()
        for node, (host, port) in self.addresses.items():
            own = docker_properties(node, host, port, list(self.addresses))
            self._containers[node] = (
                DockerContainer(image)
                .with_envs(**docker_environment({**common_properties(count), **own, **properties}))
                .with_env("CLUSTER_ID", cluster_id)
                .with_env("KAFKA_HEAP_OPTS", _heap(count))
                .with_bind_ports(port, port)
                .with_network(self._network)
                .with_network_aliases(_alias(node))
            )

    def start(self, node: int) -> None:
        container = self._containers[node]
        if node in self._created:
            container.get_wrapped_container().start()
        else:
            self._created.add(node)
            container.start()

    def move(self, node: int) -> tuple[str, int]:
        raise KafkaUnavailable("a container keeps its port: a node moves only with local JVMs")

    def kill(self, node: int) -> None:
        self._containers[node].get_wrapped_container().kill()

    def terminate(self, node: int, timeout_s: float) -> None:
        self._containers[node].get_wrapped_container().stop(timeout=int(timeout_s))

    def pause(self, node: int) -> None:
        self._containers[node].get_wrapped_container().pause()

    def resume(self, node: int) -> None:
        self._containers[node].get_wrapped_container().unpause()

    def alive(self, node: int, for_s: float = 0.0) -> bool:
        if node not in self._created:
            return False
        wrapped = self._containers[node].get_wrapped_container()
        wrapped.reload()
        return str(wrapped.status) in {"running", "paused", "created"}

    def log(self, node: int) -> str:
        if node not in self._created:
            return ""
        out, error = self._containers[node].get_logs()
        return (out + error).decode(errors="replace")

    def close(self) -> None:
        for container in self._containers.values():
            container.stop()
        self._created.clear()
        self._network.remove()
        self._network._docker.client.close()  # which Network does not
