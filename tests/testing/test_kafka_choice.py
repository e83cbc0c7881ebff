"""Where real Kafka comes from, and what the nodes are told: no process, no network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncproducer.testing import kafka_nodes
from asyncproducer.testing.java import Java, JavaUnavailable
from asyncproducer.testing.kafka import KafkaCluster, KafkaSource, KafkaUnavailable, choose_source
from asyncproducer.testing.kafka_nodes import (
    common_properties,
    docker_answers,
    docker_environment,
    docker_properties,
    free_ports,
    jvm_properties,
    random_uuid,
    render_properties,
)
from asyncproducer.testing.kafka_reaper import survivors

RUNNING = {"KAFKA_BOOTSTRAP_SERVERS": "broker:9092"}


def yes() -> bool:
    return True


def no() -> bool:
    return False


def never_asked() -> bool:
    pytest.fail("asking Docker may take seconds, and the answer does not matter here")


# -- the choice


def test_a_running_cluster_comes_first() -> None:
    assert choose_source(RUNNING, never_asked) is KafkaSource.EXTERNAL


def test_docker_comes_second() -> None:
    assert choose_source({}, yes) is KafkaSource.DOCKER


def test_local_jvms_come_last() -> None:
    assert choose_source({}, no) is KafkaSource.JVM


def test_an_empty_variable_is_no_cluster() -> None:
    assert choose_source({"KAFKA_BOOTSTRAP_SERVERS": ""}, no) is KafkaSource.JVM


def test_nobody_elses_cluster_is_broken() -> None:
    assert choose_source(RUNNING, yes, own=True) is KafkaSource.DOCKER
    assert choose_source(RUNNING, no, own=True) is KafkaSource.JVM


def test_feature_levels_need_a_format_of_our_own() -> None:
    features = {"transaction.version": 1}
    assert choose_source(RUNNING, never_asked, features=features) is KafkaSource.JVM


def test_no_engine_is_no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens")
    assert docker_answers() is False


# -- what the nodes are told


def test_uuids_never_look_like_an_option() -> None:
    uuids = [random_uuid() for _ in range(300)]
    assert {len(u) for u in uuids} == {22}
    assert not any(u.startswith("-") for u in uuids)
    assert len(set(uuids)) == 300


def test_ports_are_free_and_different() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        first, second = free_ports(2)
        offers: Iterator[int] = iter([used, first, first, second])
        assert free_ports(2, pick=lambda: next(offers)) == [first, second]


@pytest.mark.parametrize(("nodes", "replication", "in_sync"), [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
def test_internal_topics_survive_one_lost_node_where_they_can(
    nodes: int, replication: int, in_sync: int
) -> None:
    told = common_properties(nodes)
    assert told["transaction.state.log.replication.factor"] == str(replication)
    assert told["offsets.topic.replication.factor"] == str(replication)
    assert told["transaction.state.log.min.isr"] == str(in_sync)
    assert told["min.insync.replicas"] == str(in_sync)


def test_a_loopback_node_knows_all_controllers_and_its_own_ports() -> None:
    told = jvm_properties(2, 15001, {1: 16000, 2: 16001}, Path("/data/node2"))
    assert told["controller.quorum.voters"] == "1@127.0.0.1:16000,2@127.0.0.1:16001"
    assert told["listeners"] == "PLAINTEXT://127.0.0.1:15001,CONTROLLER://127.0.0.1:16001"
    assert told["advertised.listeners"] == "PLAINTEXT://127.0.0.1:15001"
    assert told["log.dirs"] == "/data/node2"


def test_properties_are_written_one_per_line() -> None:
    assert render_properties({"a.b": "1", "c": "x=y"}) == "a.b=1\nc=x=y\n"


def test_a_container_listens_for_the_host_on_the_port_it_advertises() -> None:
    told = docker_properties(2, "localhost", 15001, [1, 2, 3])
    assert told["listeners"].startswith("PLAINTEXT://0.0.0.0:15001,")
    assert told["advertised.listeners"] == "PLAINTEXT://localhost:15001,INTERNAL://kafka2:19092"
    assert told["controller.quorum.voters"] == "1@kafka1:19093,2@kafka2:19093,3@kafka3:19093"


def test_property_names_become_the_images_variables() -> None:
    told = docker_environment({"log.dirs": "/x", "a.b_c-d": "1"})
    assert told == {"KAFKA_LOG_DIRS": "/x", "KAFKA_A_B__C___D": "1"}


# -- a cluster that does not run


def test_a_cluster_that_was_not_started_says_so() -> None:
    cluster = KafkaCluster()
    with pytest.raises(RuntimeError, match="not started"):
        _ = cluster.source
    with pytest.raises(RuntimeError, match="not running"):
        _ = cluster.bootstrap_servers
    cluster.stop()


@pytest.mark.parametrize("servers", ["broker", ":9092", "broker:x"])
def test_a_wrong_address_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, servers: str
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", servers)
    with pytest.raises(KafkaUnavailable, match="is not host:port"):
        KafkaCluster().start()


def test_an_environment_cluster_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{port}")
    with pytest.raises(KafkaUnavailable, match=f"KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:{port}"):
        KafkaCluster().start()


def test_feature_levels_are_refused_by_docker() -> None:
    cluster = KafkaCluster(features={"transaction.version": 1}, source=KafkaSource.DOCKER)
    with pytest.raises(KafkaUnavailable, match="feature levels need local JVMs"):
        cluster.start()


def test_without_java_there_is_no_local_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java(environ: object) -> Java:
        raise JavaUnavailable("Kafka needs Java 17")

    monkeypatch.setattr(kafka_nodes, "find_java", no_java)
    with pytest.raises(KafkaUnavailable, match="Kafka needs Java 17"):
        KafkaCluster(source=KafkaSource.JVM).start()


def test_without_jars_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_jars(version: str) -> list[Path]:
        raise KafkaUnavailable(f"cannot get {version}")

    monkeypatch.setattr(kafka_nodes, "find_java", lambda environ: Java("java", 25))
    monkeypatch.setattr(kafka_nodes, "kafka_jars", no_jars)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KafkaUnavailable, match=r"cannot get 4\.3\.1"):
        KafkaCluster(source=KafkaSource.JVM).start()
    assert list(tmp_path.iterdir()) == []


# -- the watching process


def test_only_brokers_that_were_not_waited_for_are_ended() -> None:
    assert survivors(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}
    assert survivors([]) == set()
