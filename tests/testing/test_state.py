from __future__ import annotations

import random
import uuid
from collections.abc import Mapping

import pytest

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.state import ClusterState, Node, RequestRefused, parse_configs
from asyncproducer.testing.storage import LogConfig


def make_state(nodes: int = 3, *, alive: bool = True, seed: int = 0) -> ClusterState:
    state = ClusterState(
        (Node(node_id, "localhost") for node_id in range(1, nodes + 1)),
        rng=random.Random(seed),
        default_partitions=2,
    )
    if alive:
        for node_id in state.nodes:
            state.node_started(node_id)
    return state


@pytest.fixture
def state() -> ClusterState:
    return make_state()


def leaders(state: ClusterState, topic: str = "t") -> list[int]:
    return [partition.leader for partition in state.topic(topic).partitions]


def epochs(state: ClusterState, topic: str = "t") -> list[int]:
    return [partition.leader_epoch for partition in state.topic(topic).partitions]


def refused(code: ErrorCode) -> pytest.RaisesExc[RequestRefused]:
    return pytest.RaisesExc(RequestRefused, check=lambda exc: exc.code == code)


# -- topics


@pytest.mark.parametrize("alive", [True, False])
def test_leaders_are_spread_over_the_nodes(alive: bool) -> None:
    state = make_state(alive=alive)
    state.create_topic("t", 4)
    assert leaders(state) == [1, 2, 3, 1]
    assert epochs(state) == [0, 0, 0, 0]
    assert state.partition("t", 1).replicas == (2, 3, 1)


def test_replicas_are_at_most_three_unless_asked_for() -> None:
    state = make_state(5)
    state.create_topic("t", 1)
    state.create_topic("u", 1, replication=5)
    assert state.partition("t", 0).replicas == (1, 2, 3)
    assert state.partition("u", 0).replicas == (1, 2, 3, 4, 5)


def test_the_default_number_of_partitions_is_the_clusters(state: ClusterState) -> None:
    assert len(state.create_topic("t").partitions) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "a/b", "x" * 250])
def test_bad_topic_names_are_refused(state: ClusterState, name: str) -> None:
    with refused(ErrorCode.INVALID_TOPIC_EXCEPTION):
        state.create_topic(name)


def test_names_that_differ_in_dot_and_underscore_collide(state: ClusterState) -> None:
    state.create_topic("a.b_c")
    with refused(ErrorCode.INVALID_TOPIC_EXCEPTION):
        state.create_topic("a_b.c")
    with refused(ErrorCode.TOPIC_ALREADY_EXISTS):
        state.create_topic("a.b_c")


def test_impossible_numbers_are_refused(state: ClusterState) -> None:
    for partitions in (0, -1):
        with refused(ErrorCode.INVALID_PARTITIONS):
            state.create_topic("t", partitions)
    for replication in (0, 4):
        with refused(ErrorCode.INVALID_REPLICATION_FACTOR):
            state.create_topic("t", 1, replication=replication)


@pytest.mark.parametrize(
    "assignment",
    [
        {1: (1,)},  # starts with 1
        {0: (1,), 2: (1,)},  # a hole
        {0: (1,), 1: (1, 2)},  # different numbers of replicas
        {0: ()},
        {0: (1, 1)},
        {0: (9,)},
    ],
)
def test_impossible_assignments_are_refused(
    state: ClusterState, assignment: Mapping[int, tuple[int, ...]]
) -> None:
    with refused(ErrorCode.INVALID_REPLICA_ASSIGNMENT):
        state.create_topic("t", assignment=assignment)


def test_an_assignment_is_followed(state: ClusterState) -> None:
    state.create_topic("t", assignment={0: (3, 1), 1: (2, 3)})
    assert leaders(state) == [3, 2]


def test_validate_only_changes_nothing(state: ClusterState) -> None:
    topic = state.create_topic("t", 2, validate_only=True)
    assert len(topic.partitions) == 2
    with refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
        state.topic("t")
    with refused(ErrorCode.UNKNOWN_TOPIC_ID):
        state.topic_by_id(topic.topic_id)


def test_a_topic_is_found_by_name_and_id_until_it_is_deleted(state: ClusterState) -> None:
    topic = state.create_topic("t")
    assert state.topic_by_id(topic.topic_id) is state.topic("t") is topic
    state.delete_topic("t")
    with refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
        state.topic("t")
    with refused(ErrorCode.UNKNOWN_TOPIC_ID):
        state.topic_by_id(topic.topic_id)
    assert state.create_topic("t").topic_id != topic.topic_id
    for unknown in (None, uuid.UUID(int=1)):
        with refused(ErrorCode.UNKNOWN_TOPIC_ID):
            state.topic_by_id(unknown)


def test_ids_come_from_the_seed() -> None:
    same = [make_state(seed=5).create_topic("t").topic_id for _ in range(2)]
    assert same[0] == same[1] != make_state(seed=6).create_topic("t").topic_id
    assert make_state(seed=5).cluster_id != make_state(seed=6).cluster_id


def test_partitions_are_added_at_the_end(state: ClusterState) -> None:
    state.create_topic("t", 2, replication=1)
    state.add_partitions("t", 4, validate_only=True)
    assert leaders(state) == [1, 2]
    state.add_partitions("t", 4)
    assert leaders(state) == [1, 2, 3, 1]
    assert state.partition("t", 3).replicas == (1,)
    state.add_partitions("t", 5, assignment={4: (2,)})
    assert leaders(state)[4] == 2
    with refused(ErrorCode.INVALID_PARTITIONS):
        state.add_partitions("t", 5)


def test_unknown_partitions_are_refused(state: ClusterState) -> None:
    state.create_topic("t", 1)
    for index in (-1, 1):
        with refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            state.partition("t", index)


# -- leaders


def test_another_replica_takes_over_from_a_stopped_node(state: ClusterState) -> None:
    state.create_topic("t", 3, replication=2)
    state.node_stopped(1)
    assert leaders(state) == [2, 2, 3]
    assert epochs(state) == [1, 0, 0]
    state.node_stopped(2)
    assert leaders(state) == [-1, 3, 3]
    state.node_started(1)
    assert leaders(state) == [1, 3, 3]
    assert epochs(state) == [3, 1, 0]
    assert state.in_sync_replicas(state.partition("t", 0)) == [1]


def test_a_topic_may_be_created_while_its_nodes_are_down(state: ClusterState) -> None:
    state.node_stopped(1)
    state.create_topic("t", 3, replication=1)
    assert leaders(state) == [-1, 2, 3]
    state.node_started(1)
    assert leaders(state) == [1, 2, 3]


def test_a_leader_is_moved_at_the_next_epoch(state: ClusterState) -> None:
    state.create_topic("t", 1, replication=1)
    state.move_leader("t", 0, 3)
    partition = state.partition("t", 0)
    assert (partition.leader, partition.leader_epoch, partition.replicas) == (3, 1, (1, 3))
    state.move_leader("t", 0, -1)
    assert (partition.leader, partition.leader_epoch) == (-1, 2)


def test_only_a_running_node_becomes_the_leader(state: ClusterState) -> None:
    state.create_topic("t", 1)
    state.node_stopped(2)
    for node_id in (2, 9):
        with pytest.raises(ValueError, match=f"node {node_id}"):
            state.move_leader("t", 0, node_id)


def test_the_controller_is_a_node_that_runs(state: ClusterState) -> None:
    assert state.controller_id == 1
    state.node_stopped(1)
    assert state.controller_id == 2
    assert [node.node_id for node in state.alive] == [2, 3]
    assert make_state(alive=False).controller_id == -1


def test_a_key_has_one_coordinator(state: ClusterState) -> None:
    assert len({state.coordinator("group", "a-key").node_id for _ in range(5)}) == 1
    assert {state.coordinator("group", f"key-{i}").node_id for i in range(50)} == {1, 2, 3}
    with refused(ErrorCode.COORDINATOR_NOT_AVAILABLE):
        make_state(alive=False).coordinator("group", "a-key")


def test_a_coordinator_stays_unless_its_own_node_stops(state: ClusterState) -> None:
    keys = [f"key-{i}" for i in range(50)]
    before = {key: state.coordinator("group", key).node_id for key in keys}
    state.node_stopped(2)
    after = {key: state.coordinator("group", key).node_id for key in keys}
    assert after == {key: 3 if node == 2 else node for key, node in before.items()}
    state.node_started(2)
    assert {key: state.coordinator("group", key).node_id for key in keys} == before


def test_a_coordinator_is_where_it_was_moved_to(state: ClusterState) -> None:
    for node in (1, 2, 3):
        state.move_coordinator("transaction", "tx", node)
        assert state.coordinator("transaction", "tx").node_id == node
    state.move_coordinator("transaction", "tx", -1)
    with refused(ErrorCode.COORDINATOR_NOT_AVAILABLE):
        state.coordinator("transaction", "tx")
    with refused(ErrorCode.NOT_COORDINATOR):
        state.check_coordinator("transaction", "tx", 3)
    state.coordinator("group", "tx")  # is another thing
    with pytest.raises(ValueError, match="no broker 9"):
        state.move_coordinator("transaction", "tx", 9)


# -- producers


def test_producer_ids_are_never_given_twice(state: ClusterState) -> None:
    assert len({state.new_producer_id() for _ in range(10)}) == 10


# -- options


def test_topic_options_are_kafkas() -> None:
    assert parse_configs({}) == LogConfig()
    assert parse_configs(
        {
            "cleanup.policy": "compact, delete",
            "max.message.bytes": "100",
            "message.timestamp.type": "LogAppendTime",
            "message.timestamp.before.max.ms": "5",
            "message.timestamp.after.max.ms": "6",
            "min.insync.replicas": "2",
            "retention.ms": "-1",
        }
    ) == LogConfig(
        max_message_bytes=100,
        log_append_time=True,
        compacted=True,
        timestamp_before_max_ms=5,
        timestamp_after_max_ms=6,
        min_insync_replicas=2,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanup.polizei", "compact"),
        ("cleanup.policy", "compost"),
        ("max.message.bytes", "many"),
        ("max.message.bytes", "-1"),
        ("message.timestamp.type", "Yesterday"),
        ("min.insync.replicas", "0"),
    ],
)
def test_mistyped_topic_options_are_refused(name: str, value: str) -> None:
    with pytest.raises(RequestRefused, match=name) as raised:
        parse_configs({name: value})
    assert raised.value.code == ErrorCode.INVALID_CONFIG
