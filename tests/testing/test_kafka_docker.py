"""The Docker nodes, through the real testcontainers, against an engine that only keeps books.

No machine of ours runs an engine. What this cannot show is that the image likes what it is told;
it does show what is asked of the engine, in which order.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from asyncproducer.testing.kafka import KafkaCluster, KafkaSource, KafkaUnavailable
from asyncproducer.testing.kafka_nodes import DockerNodes, docker_answers

pytest.importorskip("testcontainers")

STATES = {
    "start": "running",
    "unpause": "running",
    "pause": "paused",
    "kill": "exited",
    "stop": "exited",
}


class Engine(ThreadingHTTPServer):
    """The few paths of the engine's API that are used, and what was asked through them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.images: list[str] = []
        self.networks: set[str] = set()
        self.containers: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}

    def answer(self, verb: str, path: str, query: str, body: dict[str, Any]) -> Any:
        match verb, path.split("/")[1:]:
            case "GET", ["_ping"]:
                return "OK"
            case "GET", ["version"]:
                return {"ApiVersion": "1.47"}
            case "GET", ["images", "json"]:
                return [{"Id": image} for image in self.images]
            case "POST", ["images", "create"]:
                self.images.append(query)
                return {}
            case "GET", ["images", *_]:
                return {"Id": "image"}
            case "POST", ["networks", "create"]:
                self.networks.add("net")
                return {"Id": "net"}
            case "GET", ["networks", name]:
                return {"Id": name, "Name": name}
            case "DELETE", ["networks", name]:
                self.networks.remove(name)
                return {}
            case "POST", ["containers", "create"]:
                name = f"c{len(self.containers) + 1}"
                self.containers[name] = body
                self.states[name] = "created"
                return {"Id": name}
            case "GET", ["containers", name, "json"]:
                state = {"Status": self.states[name]}
                return {"Id": name, "State": state, "Config": {"Tty": True}}
            case "GET", ["containers", name, "logs"]:
                return f"log of {name}"
            case "DELETE", ["containers", name]:
                del self.states[name]
                return {}
            case "POST", ["containers", name, action]:
                self.states[name] = STATES[action]
                return {}
        raise NotImplementedError(f"{verb} {path}")


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def _serve(self) -> None:
        path, _, query = re.sub(r"^/v[\d.]+", "", self.path).partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.answer(self.command, path, query, json.loads(body or b"{}"))
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as engine:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{engine.server_port}")
        from testcontainers.core.config import testcontainers_config

        monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield engine
        engine.shutdown()
        thread.join()


def test_an_engine_that_answers_is_docker(engine: Engine) -> None:
    assert docker_answers() is True


def test_containers_are_told_what_they_are_and_publish_the_port_they_advertise(
    engine: Engine,
) -> None:
    nodes = DockerNodes(3, version="4.3.1", properties={"num.partitions": "2"})
    for node in nodes.addresses:
        nodes.start(node)
    told = engine.containers["c2"]
    environment = dict(pair.split("=", 1) for pair in told["Env"])
    host, port = nodes.addresses[2]
    assert told["Image"] == "apache/kafka:4.3.1"
    assert environment["KAFKA_NODE_ID"] == "2"
    assert environment["KAFKA_NUM_PARTITIONS"] == "2"
    assert environment["KAFKA_HEAP_OPTS"] == "-Xmx700m"
    assert f"PLAINTEXT://{host}:{port}" in environment["KAFKA_ADVERTISED_LISTENERS"]
    assert told["HostConfig"]["PortBindings"] == {
        f"{port}/tcp": [{"HostIp": "", "HostPort": f"{port}"}]
    }
    (network,) = told["NetworkingConfig"].values()
    assert [endpoint["Aliases"] for endpoint in network.values()] == [["kafka2"]]
    ids = {
        dict(p.split("=", 1) for p in c["Env"])["CLUSTER_ID"] for c in engine.containers.values()
    }
    assert len(ids) == 1
    nodes.close()


def test_the_image_is_pulled_once(engine: Engine) -> None:
    DockerNodes(1, version="4.3.1", properties={}).close()
    DockerNodes(1, version="4.3.1", properties={}).close()
    assert engine.images == ["tag=4.3.1&fromImage=apache%2Fkafka"]


def test_faults_reach_the_engine_and_a_restart_keeps_the_container(engine: Engine) -> None:
    nodes = DockerNodes(1, version="4.3.1", properties={})
    assert not nodes.alive(1)
    assert nodes.log(1) == ""
    nodes.start(1)
    for fault, state, alive in [
        (nodes.pause, "paused", True),
        (nodes.resume, "running", True),
        (nodes.kill, "exited", False),
        (nodes.start, "running", True),
    ]:
        fault(1)
        assert engine.states == {"c1": state}
        assert nodes.alive(1) is alive
    assert "log of c1" in nodes.log(1)
    with pytest.raises(KafkaUnavailable, match="keeps its port"):
        nodes.move(1)
    nodes.terminate(1, timeout_s=5)
    assert engine.states == {"c1": "exited"}
    nodes.close()
    assert engine.states == {}
    assert engine.networks == set()


def test_a_container_that_never_speaks_kafka_is_shown_with_its_log(engine: Engine) -> None:
    cluster = KafkaCluster(source=KafkaSource.DOCKER)
    with pytest.raises(KafkaUnavailable, match=r"not ready in time\n--- log of node 1\nlog of c1"):
        cluster.start(timeout_s=0)
    assert engine.states == {}
