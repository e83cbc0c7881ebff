"""Real brokers: one node for most tests, three for those that break one.

A cluster starts with the first test that asks for it and lasts for the whole run, so a test works
on topics of its own and leaves all nodes running.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from asyncproducer.testing.kafka import KafkaCluster


class FreshTopic(Protocol):
    """Makes a topic with a name that no other test has, and returns the name."""

    def __call__(
        self,
        partitions: int = 1,
        *,
        cluster: KafkaCluster | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> str: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaCluster]:
    """One node; it may be somebody's running cluster (KAFKA_BOOTSTRAP_SERVERS)."""
    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _three_nodes() -> Iterator[KafkaCluster]:
    with KafkaCluster(3, own=True) as cluster:
        yield cluster


@pytest.fixture
def kafka3(_three_nodes: KafkaCluster) -> Iterator[KafkaCluster]:
    """Three nodes to break; those that a test left down are brought back after it."""
    yield _three_nodes
    _three_nodes.heal()


_numbers = itertools.count(1)


@pytest.fixture
def fresh_topic(request: pytest.FixtureRequest) -> FreshTopic:
    """On the cluster `kafka` unless another is given."""
    prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:80]

    def make(
        partitions: int = 1,
        *,
        cluster: KafkaCluster | None = None,
        configs: Mapping[str, str] | None = None,
    ) -> str:
        target: KafkaCluster = cluster or request.getfixturevalue("kafka")
        name = f"{prefix}-{next(_numbers)}"
        target.create_topic(name, partitions=partitions, configs=configs)
        return name

    return make
