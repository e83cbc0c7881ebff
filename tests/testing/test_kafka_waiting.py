"""How KafkaCluster waits for what no broker tells, without a broker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode

from asyncproducer.testing import kafka
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.kafka_admin import AdminError


@pytest.fixture
def node() -> Iterator[socket.socket]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def cluster(node: socket.socket, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    cluster = KafkaCluster(own=True)
    monkeypatch.setattr(cluster, "_addresses", {1: node.getsockname()})
    # Longer than any test may take: nothing here waits for time.
    monkeypatch.setattr(kafka, "_LULL_S", 600.0)
    return cluster


def test_what_is_true_is_not_waited_for(cluster: KafkaCluster) -> None:
    cluster.wait_until(lambda: True, timeout_s=0)


def test_a_node_that_goes_ends_the_pause_between_two_questions(
    cluster: KafkaCluster, node: socket.socket
) -> None:
    def hang_up() -> None:
        node.accept()[0].close()

    hanging_up = threading.Thread(target=hang_up)
    hanging_up.start()
    told = iter([False, True])
    cluster.wait_until(lambda: next(told))
    hanging_up.join()


@pytest.mark.parametrize(
    "passing",
    [OSError("nobody is there"), AdminError("ask", ErrorCode.leader_not_available)],
    ids=["no node", "retriable"],
)
def test_errors_that_may_pass_are_no_answer(cluster: KafkaCluster, passing: Exception) -> None:
    def ask() -> bool:
        raise passing

    with pytest.raises(TimeoutError, match="did not become true within 0 s"):
        cluster.wait_until(ask, timeout_s=0)


def test_other_errors_are_raised_at_once(cluster: KafkaCluster) -> None:
    def ask() -> bool:
        raise AdminError("ask", ErrorCode.topic_authorization_failed)

    with pytest.raises(AdminError, match="topic_authorization_failed"):
        cluster.wait_until(ask)
