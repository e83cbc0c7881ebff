"""The real cluster itself: what its users take for granted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import aiokafka
import pytest

from asyncproducer.testing.kafka import KafkaCluster, KafkaSource, KafkaUnavailable
from asyncproducer.testing.kafka_admin import Admin, AdminError

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic


def wait_for_the_end(connection: socket.socket) -> None:
    """Of the broker on the other side, to whom nothing was said."""
    connection.settimeout(40)
    try:
        assert connection.recv(1) == b""
    except ConnectionResetError:
        pass


async def write(cluster: KafkaCluster, topic: str, *values: bytes) -> None:
    async with aiokafka.AIOKafkaProducer(
        bootstrap_servers=cluster.bootstrap_servers, acks="all"
    ) as producer:
        for value in values:
            await producer.send_and_wait(topic, value, partition=0)


async def read(cluster: KafkaCluster, topic: str, count: int) -> list[bytes | None]:
    async with aiokafka.AIOKafkaConsumer(
        topic, bootstrap_servers=cluster.bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        return [(await consumer.getone()).value for _ in range(count)]


# -- one node


def test_a_started_cluster_knows_its_node_and_controller(kafka: KafkaCluster) -> None:
    view = kafka.view()
    assert view.brokers == kafka.addresses
    assert view.controller_id in view.brokers


def test_a_created_topic_is_led_at_once(kafka: KafkaCluster, fresh_topic: FreshTopic) -> None:
    topic = fresh_topic(3)
    assert sorted(kafka.topic(topic)) == [0, 1, 2]
    assert kafka.end_offsets(topic) == {0: 0, 1: 0, 2: 0}


def test_a_topic_cannot_be_created_twice(kafka: KafkaCluster, fresh_topic: FreshTopic) -> None:
    topic = fresh_topic()
    with pytest.raises(AdminError, match=f"{topic}: topic_already_exists"):
        kafka.create_topic(topic)


def test_topic_configs_reach_kafka(kafka: KafkaCluster, fresh_topic: FreshTopic) -> None:
    with pytest.raises(AdminError, match="invalid_config"):
        fresh_topic(configs={"no.such.config": "1"})
    assert kafka.topic(fresh_topic(configs={"max.message.bytes": "2000"}))


def test_questions_do_not_create_topics(kafka: KafkaCluster) -> None:
    assert kafka.topic("never-created") == {}
    with pytest.raises(TimeoutError):
        kafka.end_offsets("never-created", timeout_s=0)


async def test_records_come_back(kafka: KafkaCluster, fresh_topic: FreshTopic) -> None:
    topic = fresh_topic()
    await write(kafka, topic, b"one", b"two")
    assert kafka.end_offsets(topic) == {0: 2}
    assert kafka.end_offsets(topic, committed=True) == {0: 2}
    assert await read(kafka, topic, 2) == [b"one", b"two"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes to a killed process's children")
def test_brokers_end_with_a_killed_owner() -> None:
    """A test run that is killed cannot clean up; its brokers and files must not stay."""
    script = (
        "import sys\n"
        "from asyncproducer.testing.kafka import KafkaCluster, KafkaSource\n"
        "cluster = KafkaCluster(source=KafkaSource.JVM).start()\n"
        "print(cluster.bootstrap_servers, cluster._nodes._directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server, directory = run.stdout.readline().split()
        host, port = server.split(":")
        with socket.create_connection((host, int(port))) as connection:
            run.send_signal(signal.SIGKILL)
            wait_for_the_end(connection)
        # The watching process has it, too: it ends when that one has cleaned up.
        assert run.stdout.read() == ""
    assert not Path(directory).exists()


# -- a cluster that was told how to be


def test_properties_features_and_version_are_taken_over() -> None:
    with KafkaCluster(
        properties={"num.partitions": "2", "message.max.bytes": "5000"},
        features={"transaction.version": 1},
        source=KafkaSource.JVM,
    ) as cluster:
        assert cluster.admin.features()["transaction.version"] == 1
        cluster.create_topic("defaults", partitions=-1, timeout_s=5)
        assert len(cluster.topic("defaults")) == 2


def test_a_broker_that_cannot_start_shows_its_log() -> None:
    cluster = KafkaCluster(properties={"socket.request.max.bytes": "0"}, source=KafkaSource.JVM)
    with pytest.raises(KafkaUnavailable, match=r"socket\.request\.max\.bytes") as caught:
        cluster.start(timeout_s=30)
    assert "log" in str(caught.value)
    with pytest.raises(RuntimeError, match="not running"):
        _ = cluster.addresses


def test_a_start_takes_no_longer_than_it_may() -> None:
    cluster = KafkaCluster(source=KafkaSource.JVM)
    with pytest.raises(KafkaUnavailable, match="not ready in time"):
        cluster.start(timeout_s=0)


def test_an_existing_cluster_is_used_and_left_alone(
    kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    with KafkaCluster() as attached:
        assert attached.source is KafkaSource.EXTERNAL
        assert attached.addresses == kafka.addresses
        attached.create_topic("made-from-outside")
        with pytest.raises(KafkaUnavailable, match="not ours to break"):
            attached.kill(1)
    assert kafka.topic("made-from-outside")
    with pytest.raises(KafkaUnavailable, match="has 1 nodes, 3 are needed"):
        KafkaCluster(3).start()


# -- three nodes


def test_metadata_of_every_node_shows_three_nodes(kafka3: KafkaCluster) -> None:
    for node in kafka3.addresses:
        assert sorted(kafka3.view(node=node).brokers) == [1, 2, 3]


async def test_a_killed_node_comes_back_with_its_data(
    kafka3: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    topic = fresh_topic(cluster=kafka3)
    await write(kafka3, topic, b"kept")
    leader = kafka3.topic(topic)[0].leader

    kafka3.kill(leader)
    assert leader not in kafka3.running
    await write(kafka3, topic, b"to the next leader")
    assert kafka3.end_offsets(topic) == {0: 2}

    kafka3.restart(leader)
    kafka3.wait_until(lambda: sorted(kafka3.topic(topic)[0].isr) == [1, 2, 3])
    assert await read(kafka3, topic, 2) == [b"kept", b"to the next leader"]


def test_a_paused_node_is_silent_and_goes_on_when_resumed(kafka3: KafkaCluster) -> None:
    kafka3.pause(2)
    assert kafka3.running == [1, 3]
    with ThreadPoolExecutor() as pool:
        paused = pool.submit(Admin(kafka3.addresses, timeout_s=40).view, node=2)
        running = pool.submit(Admin(kafka3.addresses, timeout_s=40).view, node=1)
        assert sorted(running.result().brokers) == [1, 2, 3]
        assert not paused.done()
        kafka3.resume(2)
        assert sorted(paused.result().brokers) == [1, 2, 3]


def test_a_stopped_node_hands_its_leaders_over(
    kafka3: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    topic = fresh_topic(cluster=kafka3)
    leader = kafka3.topic(topic)[0].leader
    kafka3.stop_node(leader)
    state = kafka3.topic(topic)[0]
    assert state.leader not in {leader, -1}
    assert state.leader_epoch >= 1
    assert leader not in state.isr


def test_a_node_comes_back_at_another_address(
    kafka3: KafkaCluster, fresh_topic: FreshTopic
) -> None:
    topic = fresh_topic(cluster=kafka3)
    old = kafka3.addresses[2]
    kafka3.restart(2, new_port=True)
    assert kafka3.addresses[2] != old
    assert [kafka3.view(node=node).brokers[2] for node in (1, 2, 3)] == [kafka3.addresses[2]] * 3
    kafka3.wait_until(lambda: sorted(kafka3.topic(topic)[0].isr) == [1, 2, 3])


def test_leaders_move_when_they_are_told_to(kafka3: KafkaCluster, fresh_topic: FreshTopic) -> None:
    topic = fresh_topic(2, cluster=kafka3)
    before = kafka3.topic(topic)
    turned = {p: (*view.replicas[1:], view.replicas[0]) for p, view in before.items()}
    kafka3.admin.reassign(topic, turned)
    kafka3.wait_until(lambda: {p: v.replicas for p, v in kafka3.topic(topic).items()} == turned)
    kafka3.admin.elect_preferred_leaders(topic, 0, 1)
    leaders = {partition: nodes[0] for partition, nodes in turned.items()}
    kafka3.wait_until(lambda: {p: v.leader for p, v in kafka3.topic(topic).items()} == leaders)
    kafka3.admin.elect_preferred_leaders(topic, 0, 1)  # nothing to do is no error
    with pytest.raises(AdminError, match=f"{topic}-7"):
        kafka3.admin.elect_preferred_leaders(topic, 7)
    with pytest.raises(AdminError, match=f"reassign {topic}-0: invalid_replica_assignment"):
        kafka3.admin.reassign(topic, {0: [99]})


def test_a_topic_can_be_altered(kafka3: KafkaCluster, fresh_topic: FreshTopic) -> None:
    topic = fresh_topic(cluster=kafka3)
    kafka3.admin.alter_topic(topic, {"min.insync.replicas": "3"})
    with pytest.raises(AdminError, match="alter topic"):
        kafka3.admin.alter_topic(topic, {"min.insync.replicas": "many"})


def test_heal_brings_all_nodes_back(kafka3: KafkaCluster) -> None:
    kafka3.kill(1)
    kafka3.pause(2)
    kafka3.heal()
    assert kafka3.running == [1, 2, 3]
    assert sorted(kafka3.view(node=1).brokers) == [1, 2, 3]
