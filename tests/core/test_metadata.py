from __future__ import annotations

import logging
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.metadata import (
    ClusterMetadata,
    LeaderHint,
    MetadataChange,
    MetadataPlan,
    MetadataResponse,
    Node,
    PartitionMetadata,
    PartitionUpdate,
    TopicMetadata,
    TopicUpdate,
)
from asyncproducer.errors import ErrorCode, IllegalStateError

MAX_AGE = 300.0
MAX_IDLE = 60.0
#: What the backoff of `make()` gives: there is no jitter.
BACKOFFS = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]

NODE_1 = Node(1, "one", 9092)
NODE_2 = Node(2, "two", 9092)
NODE_3 = Node(3, "three", 9092)
SEED = Node(-1, "seed", 9092)

ID_A = bytes(15) + b"a"
ID_B = bytes(15) + b"b"

NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER


def make(
    *,
    max_age: float = MAX_AGE,
    max_idle: float = MAX_IDLE,
    trigger: float | None = 300.0,
    backoff: float = 0.1,
) -> ClusterMetadata:
    metadata = ClusterMetadata(
        max_age=max_age,
        max_idle=max_idle,
        backoff=ExponentialBackoff(backoff, backoff * 10, random=lambda: 0.5),
        rebootstrap_trigger=trigger,
    )
    metadata.bootstrap([SEED])
    return metadata


def partition(
    number: int, leader: int = 1, epoch: int = 0, *, error: int = ErrorCode.NONE
) -> PartitionUpdate:
    return PartitionUpdate(number, error, leader, epoch)


def topic(
    name: str | None,
    *partitions: PartitionUpdate,
    topic_id: bytes | None = None,
    error: int = ErrorCode.NONE,
    internal: bool = False,
) -> TopicUpdate:
    return TopicUpdate(name, topic_id, error, internal, partitions)


def response(
    *topics: TopicUpdate,
    nodes: tuple[Node, ...] = (NODE_1, NODE_2),
    version: int = 12,
    error: int = ErrorCode.NONE,
    controller_id: int = 1,
) -> MetadataResponse:
    return MetadataResponse(version, 0, error, "cluster", controller_id, nodes, topics)


def answer(
    metadata: ClusterMetadata,
    *topics: TopicUpdate,
    now: float = 0.0,
    nodes: tuple[Node, ...] = (NODE_1, NODE_2),
    version: int = 12,
) -> MetadataChange:
    """One request and its answer."""
    return metadata.update(metadata.plan(now), response(*topics, nodes=nodes, version=version), now)


def know(*topics: TopicUpdate, now: float = 0.0, version: int = 12) -> ClusterMetadata:
    """Metadata that has these topics in use, and has heard of them once."""
    metadata = make()
    for each in topics:
        assert each.name is not None
        metadata.add_topic(each.name, now)
    answer(metadata, *topics, now=now, version=version)
    return metadata


def leaders(metadata: ClusterMetadata, name: str) -> list[tuple[int, int]]:
    entry = metadata.topic(name)
    assert entry is not None
    return [(each.leader, each.leader_epoch) for each in entry.partitions]


# Values


def test_a_topic_knows_which_partitions_have_a_leader() -> None:
    entry = TopicMetadata(
        "t", (PartitionMetadata(0, 1, 0), PartitionMetadata(1), PartitionMetadata(2, 2, 5))
    )
    assert entry.available == (0, 2)
    assert entry.partition_count == 3
    assert "2 of 3" in repr(entry)


def test_a_node_prints_as_an_address() -> None:
    assert str(Node(7, "kafka", 9092)) == "kafka:9092 (id 7)"
    assert str(Node(7, "::1", 9092)) == "[::1]:9092 (id 7)"


# When


def test_an_update_is_due_at_first_even_without_bootstrap() -> None:
    """MD-02."""
    metadata = ClusterMetadata(
        max_age=MAX_AGE,
        max_idle=MAX_IDLE,
        backoff=ExponentialBackoff(0.1, 1.0, random=lambda: 0.5),
    )
    assert metadata.next_update_at(5.0) == 5.0


def test_bootstrap_makes_an_update_due_at_once() -> None:
    """MD-02."""
    metadata = make()
    answer(metadata)
    assert metadata.next_update_at(1.0) > 1.0
    metadata.bootstrap([SEED])
    assert metadata.next_update_at(1.0) == 1.0


def test_after_success_the_next_update_waits_for_the_max_age() -> None:
    """MD-02."""
    metadata = make()
    answer(metadata, now=10.0)
    assert metadata.next_update_at(10.0) == 10.0 + MAX_AGE
    assert metadata.next_update_at(10.0 + MAX_AGE) == 10.0 + MAX_AGE
    assert metadata.plan(10.0 + MAX_AGE).full


def test_a_backoff_longer_than_the_max_age_wins() -> None:
    """MD-02."""
    metadata = make(max_age=0.5, backoff=2.0)
    answer(metadata, now=10.0)
    assert metadata.next_update_at(10.0) == 12.0


def test_a_requested_update_waits_for_the_backoff_only() -> None:
    """MD-02."""
    metadata = make()
    answer(metadata, now=10.0)
    metadata.request_update()
    assert metadata.next_update_at(10.0) == pytest.approx(10.1)
    assert metadata.next_update_at(11.0) == 11.0


def test_without_max_age_and_backoff_an_update_is_always_due() -> None:
    """MD-02."""
    metadata = make(max_age=0.0, backoff=0.0)
    answer(metadata, now=10.0)
    assert metadata.next_update_at(10.0) == 10.0


def test_each_failure_makes_the_wait_longer_and_a_request_does_not_shorten_it() -> None:
    """MD-03."""
    metadata = make()
    waits = []
    now = 10.0
    for _ in BACKOFFS:
        metadata.failed_update(now)
        metadata.request_update(reset_backoff=True)
        waits.append(metadata.next_update_at(now) - now)
        now = metadata.next_update_at(now)
    assert waits == pytest.approx(BACKOFFS)


def test_success_forgets_the_failures() -> None:
    """MD-03."""
    metadata = make()
    for _ in range(5):
        metadata.failed_update(0.0)
    answer(metadata, now=10.0)
    metadata.request_update(reset_backoff=True)
    assert metadata.next_update_at(10.0) == pytest.approx(10.1)


def test_a_failure_leaves_the_age_of_the_last_success_alone() -> None:
    """MD-03."""
    metadata = make()
    answer(metadata, now=10.0)
    metadata.failed_update(20.0)
    assert metadata.next_update_at(20.0) == 10.0 + MAX_AGE


def test_the_backoff_is_drawn_once_per_failure() -> None:
    """A deadline that moves each time it is read would be no deadline (spec 12.1, 14)."""
    numbers = iter([0.0, 1.0, 1.0, 1.0])
    metadata = ClusterMetadata(
        max_age=MAX_AGE,
        max_idle=MAX_IDLE,
        backoff=ExponentialBackoff(0.1, 1.0, random=lambda: next(numbers)),
    )
    metadata.failed_update(0.0)
    assert [metadata.next_update_at(0.0) for _ in range(5)] == pytest.approx([0.08] * 5)


def test_answers_that_bring_nothing_new_are_asked_for_less_and_less_often() -> None:
    """MD-15."""
    stuck = topic("t", partition(0, leader=-1, epoch=3, error=ErrorCode.LEADER_NOT_AVAILABLE))
    metadata = know(stuck)
    waits = []
    now = metadata.next_update_at(0.0)
    for _ in BACKOFFS:
        answer(metadata, stuck, now=now)
        waits.append(metadata.next_update_at(now) - now)
        now = metadata.next_update_at(now)
    assert waits == pytest.approx(BACKOFFS)


def grow_equivalent_responses(metadata: ClusterMetadata, news: TopicUpdate, count: int) -> None:
    for _ in range(count):
        metadata.request_update()
        answer(metadata, news, now=1.0)
    metadata.request_update()


def test_a_new_leader_epoch_ends_the_wait_for_equivalent_answers() -> None:
    """MD-15."""
    metadata = know(topic("t", partition(0, epoch=3)))
    grow_equivalent_responses(metadata, topic("t", partition(0, epoch=3)), 6)
    assert metadata.next_update_at(1.0) == pytest.approx(2.0)
    answer(metadata, topic("t", partition(0, epoch=4)), now=2.0)
    metadata.request_update()
    assert metadata.next_update_at(2.0) == pytest.approx(2.1)


def test_a_request_may_reset_the_wait_for_equivalent_answers() -> None:
    """MD-15."""
    metadata = know(topic("t", partition(0)))
    grow_equivalent_responses(metadata, topic("t", partition(0)), 6)
    metadata.request_update(reset_backoff=True)
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)


def test_an_update_because_of_age_starts_counting_equivalent_answers_anew() -> None:
    """MD-15."""
    news = topic("t", partition(0))
    metadata = make(max_idle=10 * MAX_AGE)
    metadata.add_topic("t", 0.0)
    answer(metadata, news)
    grow_equivalent_responses(metadata, news, 6)
    now = 1.0 + MAX_AGE
    assert metadata.next_update_at(now) == now
    answer(metadata, news, now=now)
    metadata.request_update()
    assert metadata.next_update_at(now) == pytest.approx(now + BACKOFFS[0])
    answer(metadata, news, now=now)
    metadata.request_update()
    assert metadata.next_update_at(now) == pytest.approx(now + BACKOFFS[1])


def test_the_age_counts_from_the_last_full_update() -> None:
    metadata = make()
    assert metadata.age(5.0) == 0.0
    answer(metadata, now=5.0)
    metadata.add_topic("t", 6.0)
    answer(metadata, topic("t", partition(0)), now=7.0)
    assert metadata.age(8.0) == 3.0


# What


def test_a_new_topic_makes_a_partial_update_due_at_once() -> None:
    """PM-01, PM-02: whatever the backoff says."""
    metadata = know(topic("old", partition(0)))
    grow_equivalent_responses(metadata, topic("old", partition(0)), 4)
    answer(metadata, topic("old", partition(0)), now=1.0)
    metadata.failed_update(1.0)
    assert metadata.add_topic("new", 1.0)
    assert metadata.next_update_at(1.0) == 1.0
    plan = metadata.plan(1.0)
    assert plan.topics == ("new",)
    assert not plan.full


def test_adding_a_known_topic_again_is_no_news() -> None:
    metadata = know(topic("t", partition(0)))
    assert not metadata.add_topic("t", 1.0)
    assert metadata.next_update_at(1.0) > 1.0


def test_a_requested_update_is_full_and_asks_for_all_topics_in_use() -> None:
    """MD-09: also when a topic is new."""
    metadata = know(topic("a", partition(0)), topic("b", partition(0)))
    metadata.add_topic("c", 1.0)
    metadata.request_update()
    assert metadata.plan(1.0)[:2] == (("a", "b", "c"), True)


def test_a_new_topic_after_the_max_age_gets_a_full_update() -> None:
    """MD-09."""
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", MAX_AGE)
    assert metadata.plan(MAX_AGE).full


def test_without_topics_nothing_is_asked_for() -> None:
    """A null list would ask for all topics of the cluster."""
    assert make().plan(0.0).topics == ()


def test_a_partial_answer_leaves_a_wanted_full_update_wanted() -> None:
    """MD-09."""
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", 1.0)
    plan = metadata.plan(1.0)
    assert not plan.full
    metadata.request_update()
    metadata.update(plan, response(topic("b", partition(0))), 1.0)
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)
    assert metadata.plan(1.1).full


def test_a_partial_answer_does_not_make_the_metadata_younger() -> None:
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", 100.0)
    answer(metadata, topic("b", partition(0)), now=100.0)
    assert metadata.next_update_at(100.0) == MAX_AGE


def test_a_topic_added_while_a_request_is_in_flight_still_gets_its_own() -> None:
    """MD-08, MD-09: overlapping partial updates need both answers."""
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", 1.0)
    first = metadata.plan(1.0)
    metadata.add_topic("c", 1.0)
    metadata.update(first, response(topic("b", partition(0))), 1.0)
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)
    second = metadata.plan(1.1)
    assert second[:2] == (("c",), False)
    metadata.update(second, response(topic("c", partition(0))), 1.1)
    assert metadata.next_update_at(1.1) == MAX_AGE


def test_asking_for_one_topic_is_partial_while_it_is_new_and_full_later() -> None:
    """PM-04."""
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", 1.0)
    version = metadata.request_update_for_topic("b")
    assert version == metadata.version
    assert not metadata.plan(1.0).full
    answer(metadata, topic("b", partition(0)), now=1.0)
    assert metadata.version > version
    metadata.request_update_for_topic("b")
    assert metadata.plan(1.0).full


def test_a_new_topic_with_an_error_is_followed_up_by_full_updates() -> None:
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("b", 1.0)
    answer(metadata, topic("b", error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), now=1.0)
    assert metadata.plan(1.1)[:2] == (("a", "b"), True)


# Reading


def test_an_answer_is_found_by_name_id_and_partition() -> None:
    news = topic("t", partition(0, 1, 4), partition(1, 2, 5), topic_id=ID_A, internal=True)
    metadata = know(news)
    entry = metadata.topic("t")
    assert entry is not None
    assert (entry.name, entry.topic_id, entry.internal) == ("t", ID_A, True)
    assert (entry.partition_count, entry.available) == (2, (0, 1))
    assert metadata.topic_name(ID_A) == "t"
    assert metadata.leader("t", 1) == PartitionMetadata(1, 2, 5)
    assert metadata.leader("t", 2) is None
    assert metadata.leader("t", -1) is None
    assert metadata.leader("u", 0) is None
    assert metadata.topic("u") is None
    assert metadata.topic_name(ID_B) is None
    assert metadata.cluster_id == "cluster"
    assert metadata.nodes == {1: NODE_1, 2: NODE_2}
    assert metadata.controller == NODE_1


def test_an_unknown_controller_is_none() -> None:
    metadata = make()
    assert metadata.controller is None
    metadata.update(metadata.plan(0.0), response(controller_id=9), 0.0)
    assert metadata.controller is None


def test_partitions_are_dense_and_one_that_is_missing_has_no_leader() -> None:
    metadata = know(topic("t", partition(0, 1, 1), partition(1, 1, 1), partition(2, 1, 1)))
    answer(metadata, topic("t", partition(2, 2, 2), partition(0, 1, 1)))
    assert leaders(metadata, "t") == [(1, 1), (-1, -1), (2, 2)]


@pytest.mark.parametrize("number", [-1, 2, 999_999, 2**31 - 1])
def test_a_partition_number_without_enough_partitions_is_ignored(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A few bytes of an answer must not make us fill memory."""
    nonsense = topic("t", partition(0), partition(number))
    metadata = know(nonsense)
    assert leaders(metadata, "t") == [(1, 0)]
    answer(metadata, nonsense)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"2 partitions of topic t calls one of them {number}" in record.getMessage()
    answer(metadata, topic("t", partition(0)))
    answer(metadata, nonsense)
    assert len(caplog.records) == 2, "once for as long as it lasts"


def test_partitions_of_another_topic_of_that_name_are_none_of_the_new_one() -> None:
    metadata = know(topic("t", *map(partition, range(5)), topic_id=ID_A))
    answer(metadata, topic("t", partition(0), partition(4), topic_id=ID_B))
    assert leaders(metadata, "t") == [(1, 0)]


@pytest.mark.parametrize(
    "news",
    [topic("t"), topic("t", partition(999_999))],
    ids=["no partitions", "no partition that can be"],
)
def test_a_topic_without_partitions_is_not_known_and_asked_for_again(news: TopicUpdate) -> None:
    """It is being created or deleted: no partition can be chosen of none."""
    metadata = know(news)
    assert metadata.topic("t") is None
    assert metadata.topic_error("t") == ErrorCode.NONE
    assert metadata.next_update_at(0.0) == pytest.approx(0.1)
    assert metadata.plan(0.1)[:2] == (("t",), True)
    answer(metadata, topic("t", partition(0)), now=0.1)
    assert metadata.next_update_at(0.1) == pytest.approx(0.1 + MAX_AGE)
    change = answer(metadata, news, now=0.2)
    assert change.removed == {"t"}
    assert metadata.next_update_at(0.2) < 1.0


@pytest.mark.parametrize("new", [False, True])
def test_a_topic_that_an_answer_leaves_out_is_asked_for_again(new: bool) -> None:
    """The broker starts up, or there is a proxy. Not in a hurry: it may go on like that."""
    metadata = know(topic("other", partition(0)))
    metadata.add_topic("t", 1.0)
    if not new:
        answer(metadata, topic("t", partition(0)), now=1.0)
        metadata.request_update()
    waits = []
    now = 2.0
    for _ in BACKOFFS:
        answer(metadata, topic("other", partition(0)), now=now)
        assert metadata.topic("t") is None
        waits.append(metadata.next_update_at(now) - now)
        now = metadata.next_update_at(now)
        assert metadata.plan(now)[:2] == (("other", "t"), True)
    assert waits == pytest.approx(BACKOFFS)
    answer(metadata, topic("other", partition(0)), topic("t", partition(0)), now=now)
    assert leaders(metadata, "t") == [(1, 0)]
    assert metadata.next_update_at(now) == pytest.approx(now + MAX_AGE)


def test_a_topic_that_answers_leave_out_is_forgotten_when_nobody_uses_it() -> None:
    metadata = know()
    metadata.add_topic("t", 0.0)
    answer(metadata)
    answer(metadata, now=MAX_IDLE - 1.0)
    assert metadata.next_update_at(MAX_IDLE) == MAX_IDLE
    answer(metadata, now=MAX_IDLE)
    assert metadata.next_update_at(MAX_IDLE) == MAX_IDLE + MAX_AGE
    assert metadata.plan(MAX_IDLE).topics == ()


def test_an_answer_about_topics_that_are_not_in_use_is_ignored() -> None:
    metadata = make()
    assert answer(metadata, topic("stranger", partition(0))).topics == frozenset()
    assert metadata.topic("stranger") is None


def test_an_answer_by_topic_id_finds_the_name() -> None:
    metadata = know(topic("t", partition(0, 1, 1), topic_id=ID_A))
    answer(metadata, topic(None, partition(0, 2, 2), topic_id=ID_A), topic(None, topic_id=ID_B))
    assert leaders(metadata, "t") == [(2, 2)]


def test_a_leader_that_is_not_among_the_brokers_counts_as_none() -> None:
    """MD-11."""
    metadata = know(topic("t", partition(0, 9, 1), partition(1, 1, 1)))
    assert leaders(metadata, "t") == [(-1, 1), (1, 1)]
    entry = metadata.topic("t")
    assert entry is not None
    assert entry.available == (1,)
    answer(metadata, topic("t", partition(0, 9, 1), partition(1, 1, 1)), nodes=(Node(9, "n", 1),))
    assert leaders(metadata, "t") == [(9, 1), (-1, 1)]


def test_every_update_bumps_the_version_bootstrap_included() -> None:
    """PM-01."""
    metadata = make()
    versions = [metadata.version]
    metadata.add_topic("t", 0.0)
    answer(metadata, topic("t", partition(0)))
    versions.append(metadata.version)
    answer(metadata, topic("t", partition(0)))
    versions.append(metadata.version)
    metadata.update_leader("t", 0, 2, 1, [])
    versions.append(metadata.version)
    metadata.rebootstrap(0.0)
    versions.append(metadata.version)
    assert versions == sorted(set(versions))
    assert versions[0] > 0


def test_a_failed_update_does_not_bump_the_version() -> None:
    metadata = make()
    before = metadata.version
    metadata.failed_update(0.0)
    assert metadata.version == before


def test_what_was_read_stays_as_it_was() -> None:
    """MD-14: readers keep a consistent view while updates come in."""
    metadata = know(topic("t", partition(0, 1, 1)))
    nodes, entry = metadata.nodes, metadata.topic("t")
    answer(metadata, topic("t", partition(0, 3, 2)), nodes=(NODE_3,))
    assert entry is not None
    assert entry.partitions == (PartitionMetadata(0, 1, 1),)
    assert nodes == {1: NODE_1, 2: NODE_2}


def test_an_entry_without_news_stays_the_same_object() -> None:
    metadata = know(topic("t", partition(0), topic_id=ID_A))
    nodes, entry = metadata.nodes, metadata.topic("t")
    change = answer(metadata, topic("t", partition(0), topic_id=ID_A))
    assert metadata.topic("t") is entry
    assert metadata.nodes is nodes
    assert change == MetadataChange()


def test_no_update_is_taken_after_close() -> None:
    """MD-01."""
    metadata = know(topic("t", partition(0)))
    plan = metadata.plan(1.0)
    metadata.close()
    with pytest.raises(IllegalStateError, match="closed"):
        metadata.update(plan, response(), 1.0)
    assert metadata.topic("t") is not None


# What changed


def test_a_change_names_the_topics_with_news() -> None:
    metadata = know(
        topic("same", partition(0)),
        topic("moved", partition(0, 1, 0)),
        topic("grown", partition(0)),
        topic("gone", partition(0)),
    )
    metadata.request_update()
    change = answer(
        metadata,
        topic("same", partition(0)),
        topic("moved", partition(0, 2, 1)),
        topic("grown", partition(0), partition(1)),
    )
    assert change == MetadataChange(
        topics=frozenset({"moved", "grown", "gone"}),
        removed=frozenset({"gone"}),
        leaders_changed=True,
    )


def test_a_change_tells_that_a_broker_moved() -> None:
    metadata = know()
    change = answer(metadata, nodes=(NODE_1, NODE_2._replace(host="elsewhere")))
    assert change == MetadataChange(nodes_changed=True)
    assert metadata.nodes[2].host == "elsewhere"


def test_the_first_answer_changes_the_nodes_even_if_it_names_the_same() -> None:
    """Bootstrap addresses are not brokers, though a strange cluster may use their ids."""
    metadata = make()
    assert metadata.bootstrapping
    assert answer(metadata, nodes=(SEED,)).nodes_changed
    assert not metadata.bootstrapping


# Merging


def test_a_partial_answer_replaces_only_the_topics_it_mentions() -> None:
    """MD-12."""
    metadata = know(topic("a", partition(0, 1, 1)), topic("b", partition(0, 1, 1)))
    metadata.add_topic("c", 1.0)
    change = answer(metadata, topic("c", partition(0, 2, 1)), now=1.0)
    assert [leaders(metadata, name) for name in "abc"] == [[(1, 1)], [(1, 1)], [(2, 1)]]
    assert change.topics == {"c"}


def test_a_full_answer_replaces_everything() -> None:
    """MD-12."""
    metadata = know(topic("a", partition(0)), topic("b", partition(0), topic_id=ID_B))
    metadata.request_update()
    change = answer(metadata, topic("a", partition(0)))
    assert metadata.topic("b") is None
    assert metadata.topic_name(ID_B) is None
    assert change.removed == {"b"}


def test_a_partial_answer_without_a_broker_takes_its_leaders_away_everywhere() -> None:
    metadata = know(
        topic("a", partition(0, 1, 1), partition(1, 2, 1), topic_id=ID_A),
        topic("b", partition(0, 2, 1)),
    )
    entry = metadata.topic("b")
    metadata.add_topic("c", 1.0)
    change = answer(metadata, topic("c", partition(0, 2, 1)), now=1.0, nodes=(NODE_2,))
    assert leaders(metadata, "a") == [(-1, 1), (2, 1)]
    assert metadata.topic_name(ID_A) == "a"
    assert metadata.topic("b") is entry
    assert change.topics == {"a", "c"}
    assert change.leaders_changed
    # The broker may come back, and only a full update would tell who leads then.
    assert metadata.plan(1.0).full


def test_a_partial_update_does_not_look_at_the_other_topics() -> None:
    """Its cost must not grow with the number of topics."""

    class Untouchable(dict[str, TopicMetadata]):
        def items(self) -> None:  # type: ignore[override]
            raise AssertionError

        values = keys = copy = __iter__ = items  # type: ignore[assignment]

    metadata = know(topic("a", partition(0)))
    metadata._topics = Untouchable(metadata._topics)
    metadata.add_topic("b", 1.0)
    assert answer(metadata, topic("b", partition(0)), now=1.0).topics == {"b"}


# Errors


@pytest.mark.parametrize(
    "error", [ErrorCode.INVALID_TOPIC_EXCEPTION, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
)
def test_a_topic_error_can_be_read_until_the_next_good_answer(error: ErrorCode) -> None:
    """MD-10: each topic has its own. No further update is wanted because of it."""
    metadata = know(topic("bad", error=error), topic("good", partition(0)))
    assert metadata.topic_error("bad") == error
    assert metadata.topic_error("good") == ErrorCode.NONE
    assert metadata.topic("bad") is None
    assert metadata.next_update_at(0.0) == MAX_AGE
    metadata.add_topic("other", 1.0)
    answer(metadata, topic("other", error=ErrorCode.LEADER_NOT_AVAILABLE), now=1.0)
    assert metadata.topic_error("bad") == error
    assert metadata.topic_error("other") == ErrorCode.LEADER_NOT_AVAILABLE
    answer(metadata, topic("bad", partition(0)), topic("other", partition(0)), now=2.0)
    assert metadata.topic_error("bad") == ErrorCode.NONE
    assert metadata.topic_error("other") == ErrorCode.NONE


def test_a_full_answer_without_the_topic_clears_its_error() -> None:
    """MD-12."""
    metadata = know(topic("bad", error=ErrorCode.INVALID_TOPIC_EXCEPTION))
    metadata.request_update()
    answer(metadata)
    assert metadata.topic_error("bad") == ErrorCode.NONE


@pytest.mark.parametrize(
    "error", [ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
)
def test_a_topic_error_of_stale_metadata_wants_another_update(error: ErrorCode) -> None:
    metadata = know(topic("t", error=error))
    assert metadata.next_update_at(0.0) == pytest.approx(0.1)
    assert metadata.plan(0.1).full


def test_a_topic_error_takes_the_entry_away() -> None:
    metadata = know(topic("t", partition(0), topic_id=ID_A))
    change = answer(metadata, topic("t", error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    assert metadata.topic("t") is None
    assert change.removed == {"t"}
    assert change.leaders_changed


def test_a_partition_error_wants_another_update_but_the_entry_counts() -> None:
    metadata = know(
        topic("t", partition(0, -1, 7, error=ErrorCode.LEADER_NOT_AVAILABLE), partition(1))
    )
    assert leaders(metadata, "t") == [(-1, 7), (1, 0)]
    assert metadata.next_update_at(0.0) == pytest.approx(0.1)


def test_an_answer_without_brokers_is_a_failed_update() -> None:
    metadata = know(topic("t", partition(0)))
    metadata.request_update()
    version = metadata.version
    change = metadata.update(metadata.plan(1.0), response(nodes=()), 1.0)
    assert change == MetadataChange(applied=False)
    assert metadata.version == version
    assert metadata.topic("t") is not None
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)
    metadata.update(metadata.plan(2.0), response(nodes=()), 2.0)
    assert metadata.next_update_at(2.0) == pytest.approx(2.2)


# Leader epochs


def test_epochs_of_old_responses_are_ignored() -> None:
    """MD-04."""
    metadata = know(topic("t", partition(0, 1, 5)), version=8)
    assert leaders(metadata, "t") == [(1, -1)]
    answer(metadata, topic("t", partition(0, 2, 4)), version=8)
    assert leaders(metadata, "t") == [(2, -1)]
    answer(metadata, topic("t", partition(0, 1, 3)), version=9)
    assert leaders(metadata, "t") == [(1, 3)]
    answer(metadata, topic("t", partition(0, 2, 2)), version=9)
    assert leaders(metadata, "t") == [(1, 3)]


def test_an_old_response_makes_us_forget_the_last_seen_epoch() -> None:
    """MD-04: a cluster that was rolled back to old brokers may count from lower numbers."""
    metadata = know(topic("t", partition(0, 1, 5)))
    answer(metadata, topic("t", partition(0, 1, 5)), version=8)
    answer(metadata, topic("t", partition(0, 2, 1)))
    assert leaders(metadata, "t") == [(2, 1)]


def test_partitions_without_epoch_always_count_as_news() -> None:
    """MD-15: without epochs nothing can be told to be equivalent."""
    metadata = know(topic("t", partition(0)), version=8)
    for _ in range(5):
        answer(metadata, topic("t", partition(0)), now=1.0, version=8)
    metadata.request_update()
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)


def test_an_older_epoch_is_ignored_and_an_equal_one_taken() -> None:
    """MD-05."""
    metadata = know(topic("t", partition(0, 1, 10)))
    answer(metadata, topic("t", partition(0, 2, 9)))
    assert leaders(metadata, "t") == [(1, 10)]
    answer(metadata, topic("t", partition(0, 2, 10)))
    assert leaders(metadata, "t") == [(2, 10)]
    answer(metadata, topic("t", partition(0, 1, 12)))
    assert leaders(metadata, "t") == [(1, 12)]


def test_a_topic_that_comes_back_with_an_older_epoch_has_no_leader() -> None:
    """MD-05: without ids this can only be a broker that is behind."""
    metadata = know(topic("t", partition(0, 1, 10)))
    metadata.request_update()
    answer(metadata)
    assert metadata.topic("t") is None
    answer(metadata, topic("t", partition(0, 2, 9)))
    assert leaders(metadata, "t") == [(-1, -1)]
    answer(metadata, topic("t", partition(0, 2, 10)))
    assert leaders(metadata, "t") == [(2, 10)]


def test_a_recreated_topic_may_have_a_lower_epoch() -> None:
    """MD-07."""
    metadata = know(topic("t", partition(0, 1, 10), partition(1, 1, 10), topic_id=ID_A))
    answer(metadata, topic("t", partition(0, 2, 0), topic_id=ID_B))
    assert leaders(metadata, "t") == [(2, 0)]
    assert metadata.topic_name(ID_A) is None
    assert metadata.topic_name(ID_B) == "t"
    # Partition 1 of the new topic has nothing to do with the one of old.
    answer(metadata, topic("t", partition(0, 2, 0), partition(1, 2, 0), topic_id=ID_B))
    assert leaders(metadata, "t") == [(2, 0), (2, 0)]


def test_a_topic_whose_id_becomes_known_may_have_a_lower_epoch() -> None:
    """MD-07."""
    metadata = know(topic("t", partition(0, 1, 10)))
    answer(metadata, topic("t", partition(0, 2, 3), topic_id=ID_A))
    assert leaders(metadata, "t") == [(2, 3)]


def test_a_topic_that_was_deleted_and_made_again_may_have_a_lower_epoch() -> None:
    """MD-07: the epoch is kept through the deletion, the id decides."""
    metadata = know(topic("t", partition(0, 1, 10), topic_id=ID_A))
    answer(metadata, topic("t", error=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    answer(metadata, topic("t", partition(0, 2, 0), topic_id=ID_B))
    assert leaders(metadata, "t") == [(2, 0)]


def test_the_same_id_with_a_lower_epoch_is_ignored() -> None:
    """MD-07."""
    metadata = know(topic("t", partition(0, 1, 10), topic_id=ID_A))
    answer(metadata, topic("t", partition(0, 2, 9), topic_id=ID_A))
    assert leaders(metadata, "t") == [(1, 10)]


def test_a_changed_topic_id_is_news() -> None:
    """MD-15, MD-07."""
    metadata = know(topic("t", partition(0, 1, 1), topic_id=ID_A))
    grow_equivalent_responses(metadata, topic("t", partition(0, 1, 1), topic_id=ID_A), 5)
    answer(metadata, topic("t", partition(0, 1, 1), topic_id=ID_B), now=1.0)
    metadata.request_update()
    assert metadata.next_update_at(1.0) == pytest.approx(1.1)


def test_a_response_without_the_id_leaves_the_topic_without_one() -> None:
    """MD-12: a Produce request then names the topic instead."""
    metadata = know(topic("t", partition(0, 1, 1), topic_id=ID_A))
    answer(metadata, topic("t", partition(0, 1, 1)), version=9)
    entry = metadata.topic("t")
    assert entry is not None
    assert entry.topic_id is None
    assert metadata.topic_name(ID_A) is None


# Leaders named in Produce responses (KIP-951)


def know_two_topics() -> ClusterMetadata:
    return know(
        topic("a", partition(0, 1, 5), partition(1, 1, 5), topic_id=ID_A),
        topic("b", partition(0, 1, 5)),
    )


def test_a_newer_leader_is_taken_over() -> None:
    """MD-13: other partitions and the id stay, the leader's address is merged."""
    metadata = know_two_topics()
    untouched = metadata.topic("b")
    assert metadata.update_leader("a", 1, 3, 6, [NODE_3])
    assert leaders(metadata, "a") == [(1, 5), (3, 6)]
    assert metadata.nodes == {1: NODE_1, 2: NODE_2, 3: NODE_3}
    assert metadata.topic_name(ID_A) == "a"
    entry = metadata.topic("a")
    assert entry is not None
    assert entry.topic_id == ID_A
    assert metadata.topic("b") is untouched


def test_a_leader_whose_address_is_known_needs_none() -> None:
    """MD-13."""
    metadata = know_two_topics()
    nodes = metadata.nodes
    assert metadata.update_leader("a", 0, 2, 6, [])
    assert leaders(metadata, "a")[0] == (2, 6)
    assert metadata.nodes is nodes


def test_a_hint_may_tell_a_brokers_new_address() -> None:
    """MD-13."""
    metadata = know_two_topics()
    change = metadata.update_leaders([LeaderHint("a", 0, 2, 6)], [NODE_2._replace(port=1)])
    assert change == MetadataChange(
        topics=frozenset({"a"}), leaders_changed=True, nodes_changed=True
    )
    assert metadata.nodes[2].port == 1


@pytest.mark.parametrize(
    "hint",
    [
        LeaderHint("a", 0, 2, 5),
        LeaderHint("a", 0, 2, 4),
        LeaderHint("a", 0, 2, -1),
        LeaderHint("a", 0, -1, 6),
        LeaderHint("a", 0, 9, 6),
        LeaderHint("a", 7, 2, 6),
        LeaderHint("x", 0, 2, 6),
    ],
    ids=["same", "older", "no epoch", "no leader", "no address", "no partition", "no topic"],
)
def test_a_useless_hint_is_ignored(hint: LeaderHint) -> None:
    """MD-13."""
    metadata = know_two_topics()
    version = metadata.version
    change = metadata.update_leaders([hint], [NODE_3])
    assert change == MetadataChange(applied=False)
    assert leaders(metadata, "a") == [(1, 5), (1, 5)]
    assert 3 not in metadata.nodes
    assert metadata.version == version


#: The epochs of MD-06, told one after the other of a partition that is at epoch 41, and
#: whether each of them is news.
EPOCHS_TOLD = [42, 42, 41, 41, 42, 43, 43, 42, 41, 44]
EPOCHS_NEW = [True, False, False, False, False, True, False, False, False, True]


def test_only_a_strictly_newer_epoch_is_news_in_a_hint() -> None:
    """MD-06: the 1st, 6th and 10th. It brings the leader along, so no update has to be asked
    for, as Java does; but nothing is news about a partition that is not known."""
    metadata = know(topic("t", partition(0, 1, 41)))
    settled = metadata.next_update_at(1.0)
    told = []
    for epoch in EPOCHS_TOLD:
        version = metadata.version
        told.append(metadata.update_leader("t", 0, 2, epoch, []))
        assert (metadata.version > version) is told[-1]
        assert not metadata.update_leader("t", 1, 2, epoch, [])
        assert not metadata.update_leader("unknown", 0, 2, epoch, [])
    assert told == EPOCHS_NEW
    assert leaders(metadata, "t") == [(2, 44)]
    assert metadata.next_update_at(1.0) == settled


def test_only_a_strictly_newer_epoch_is_news_in_an_answer() -> None:
    """MD-06: the 1st, 6th and 10th change what is known, the others leave the very entry."""
    metadata = know(topic("t", partition(0, 1, 41)))
    told = []
    for epoch in EPOCHS_TOLD:
        entry = metadata.topic("t")
        change = answer(metadata, topic("t", partition(0, 1, epoch)))
        told.append(change.leaders_changed)
        assert (metadata.topic("t") is not entry) is told[-1]
    assert told == EPOCHS_NEW
    assert leaders(metadata, "t") == [(1, 44)]


def test_several_hints_are_taken_at_once_the_bad_ones_left() -> None:
    metadata = know_two_topics()
    change = metadata.update_leaders(
        [LeaderHint("a", 0, 2, 6), LeaderHint("a", 1, 2, 4), LeaderHint("b", 0, 2, 7)], []
    )
    assert change.topics == {"a", "b"}
    assert leaders(metadata, "a") == [(2, 6), (1, 5)]
    assert leaders(metadata, "b") == [(2, 7)]


def test_a_response_older_than_a_hint_is_ignored() -> None:
    """MD-13."""
    metadata = know_two_topics()
    metadata.update_leader("a", 0, 2, 6, [])
    answer(
        metadata,
        topic("a", partition(0, 1, 5), partition(1, 1, 5), topic_id=ID_A),
        topic("b", partition(0, 1, 5)),
    )
    assert leaders(metadata, "a")[0] == (2, 6)


def test_a_hint_older_than_what_a_vanished_entry_had_is_ignored() -> None:
    metadata = know(topic("t", partition(0, 1, 10)))
    metadata.request_update()
    answer(metadata)
    answer(metadata, topic("t", partition(0, 1, 8)))
    assert leaders(metadata, "t") == [(-1, -1)]
    assert not metadata.update_leader("t", 0, 2, 9, [])
    assert metadata.update_leader("t", 0, 2, 11, [])


# Topics that are not in use any more


def test_an_unused_topic_is_forgotten_with_the_first_answer_after_its_time() -> None:
    """PM-03."""
    metadata = know(topic("t", partition(0, 1, 5), topic_id=ID_A))
    metadata.request_update()
    answer(metadata, topic("t", partition(0, 1, 5), topic_id=ID_A), now=MAX_IDLE - 0.1)
    assert metadata.topic("t") is not None
    metadata.request_update()
    change = answer(metadata, topic("t", partition(0, 1, 5), topic_id=ID_A), now=MAX_IDLE)
    assert metadata.topic("t") is None
    assert metadata.topic_name(ID_A) is None
    assert change.removed == change.topics == {"t"}
    assert metadata.plan(MAX_IDLE).topics == ()


def test_a_partial_answer_about_others_forgets_unused_topics_too() -> None:
    """PM-03, MD-12."""
    metadata = know(topic("a", partition(0)), topic("b", error=ErrorCode.INVALID_TOPIC_EXCEPTION))
    metadata.add_topic("c", MAX_IDLE)
    change = answer(metadata, topic("c", partition(0)), now=MAX_IDLE)
    assert change.removed == {"a"}
    assert metadata.topic_error("b") == ErrorCode.NONE


def test_using_a_topic_keeps_it() -> None:
    """PM-03."""
    metadata = know(topic("t", partition(0)))
    metadata.add_topic("t", 50.0)
    metadata.add_topic("n", MAX_IDLE)
    answer(metadata, topic("n", partition(0)), now=MAX_IDLE)
    assert metadata.topic("t") is not None
    answer(metadata, topic("n", partition(0)), now=50.0 + MAX_IDLE)
    assert metadata.topic("t") is None


def test_a_forgotten_topic_that_is_used_again_is_new() -> None:
    """PM-03: its old epochs are forgotten as well."""
    metadata = know(topic("t", partition(0, 1, 5)))
    answer(metadata, now=MAX_IDLE)
    assert metadata.add_topic("t", MAX_IDLE)
    answer(metadata, topic("t", partition(0, 2, 1)), now=MAX_IDLE)
    assert leaders(metadata, "t") == [(2, 1)]
    metadata.request_update()
    assert metadata.plan(MAX_IDLE * 1.5).topics == ("t",)


def test_a_topic_is_not_forgotten_before_it_was_asked_for() -> None:
    """PM-03."""
    metadata = know(topic("a", partition(0)))
    metadata.add_topic("late", 1.0)
    plan = MetadataPlan(("a",), True, 0)
    metadata.update(plan, response(topic("a", partition(0))), 10 * MAX_IDLE)
    assert metadata.plan(10 * MAX_IDLE).topics == ("late",)
    # Asked for now; this answer and the next one may find it unused.
    answer(metadata, topic("late", partition(0)), now=10 * MAX_IDLE)
    assert metadata.topic("late") is not None
    answer(metadata, topic("late", partition(0)), now=10 * MAX_IDLE)
    assert metadata.topic("late") is None


# Starting over


def test_rebootstrap_begins_again_with_the_configured_addresses() -> None:
    metadata = know(topic("t", partition(0), topic_id=ID_A))
    change = metadata.rebootstrap(10.0)
    assert change == MetadataChange(
        topics=frozenset({"t"}), leaders_changed=True, nodes_changed=True
    )
    assert metadata.nodes == {-1: SEED}
    assert metadata.bootstrapping
    assert metadata.controller is None
    assert metadata.next_update_at(10.0) == 10.0
    assert metadata.plan(10.0)[:2] == (("t",), True)


def test_rebootstrap_keeps_the_number_of_partitions_but_no_leader_and_no_id() -> None:
    """So that sending goes on into the buffer while no broker can be reached."""
    metadata = know(topic("t", partition(0, 1, 7), partition(1, 2, 7), topic_id=ID_A))
    metadata.rebootstrap(10.0)
    assert leaders(metadata, "t") == [(-1, -1), (-1, -1)]
    assert metadata.topic_name(ID_A) is None
    # It may be another cluster, whose epochs count from elsewhere.
    answer(metadata, topic("t", partition(0, 1, 2), topic_id=ID_A), now=10.0)
    assert leaders(metadata, "t") == [(1, 2)]


def test_rebootstrap_forgets_the_errors_of_topics() -> None:
    metadata = know(topic("t", error=ErrorCode.INVALID_TOPIC_EXCEPTION))
    metadata.rebootstrap(10.0)
    assert metadata.topic_error("t") == ErrorCode.NONE


def test_rebootstrap_is_due_when_nothing_is_heard_for_the_trigger_time() -> None:
    """NC-20: from the first unanswered attempt on, and again only after another such time."""
    metadata = make(trigger=30.0)
    answer(metadata, now=0.0)
    assert metadata.rebootstrap_at == inf
    metadata.plan(100.0)
    metadata.failed_update(110.0)
    metadata.plan(120.0)
    assert not metadata.rebootstrap_due(130.0)
    assert metadata.rebootstrap_due(130.001)
    metadata.rebootstrap(130.001)
    metadata.plan(130.001)
    assert not metadata.rebootstrap_due(160.0)
    assert metadata.rebootstrap_due(160.1)


def test_an_answer_ends_the_wait_for_the_trigger_time() -> None:
    """NC-20."""
    metadata = make(trigger=30.0)
    metadata.begin_attempt(0.0)
    answer(metadata, now=29.0)
    assert not metadata.rebootstrap_due(1000.0)


def test_a_broker_may_demand_a_rebootstrap() -> None:
    """NC-20."""
    metadata = make(trigger=30.0)
    plan = metadata.plan(0.0)
    change = metadata.update(plan, response(error=ErrorCode.REBOOTSTRAP_REQUIRED), 0.0)
    assert not change.applied
    assert metadata.rebootstrap_due(0.0)
    metadata.rebootstrap(0.0)
    assert not metadata.rebootstrap_due(0.0)
    # The failure that came with it does not go unnoticed: no tight loop.
    assert metadata.next_update_at(0.0) == pytest.approx(0.1)


def test_another_error_of_the_whole_response_is_a_failed_update() -> None:
    metadata = make()
    change = metadata.update(
        metadata.plan(0.0), response(error=ErrorCode.UNKNOWN_SERVER_ERROR), 0.0
    )
    assert not change.applied
    assert not metadata.rebootstrap_due(0.0)


def test_without_the_strategy_there_is_no_rebootstrap() -> None:
    metadata = make(trigger=None)
    assert not metadata.can_rebootstrap
    metadata.update(metadata.plan(0.0), response(error=ErrorCode.REBOOTSTRAP_REQUIRED), 0.0)
    assert not metadata.rebootstrap_due(1e9)


def test_a_known_leader_counts_as_none_when_a_stale_answer_lacks_its_broker() -> None:
    """MD-11."""
    metadata = know(topic("t", partition(0, 1, 3)))
    metadata.update_leader("t", 0, 3, 5, [NODE_3])
    answer(metadata, topic("t", partition(0, 1, 4)), nodes=(NODE_1,))
    assert leaders(metadata, "t") == [(-1, 5)]
    answer(metadata, topic("t", partition(0, 3, 5)), nodes=(NODE_1, NODE_3))
    assert leaders(metadata, "t") == [(3, 5)]


steps = st.lists(
    st.tuples(
        st.sampled_from(["full", "partial", "hint", "fail", "rebootstrap", "add"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(-1, 4),
        st.integers(-1, 5),
        st.floats(0.0, 40.0),
    ),
    max_size=40,
)


@given(steps)
def test_whatever_comes_in_the_view_stays_consistent(
    walk: list[tuple[str, str, int, int, float]],
) -> None:
    metadata = make()
    now = 0.0
    for kind, name, leader, epoch, pause in walk:
        now += pause
        before = metadata.leader(name, 0)
        news = topic(name, partition(0, leader, epoch))
        if kind == "add":
            metadata.add_topic(name, now)
        elif kind == "fail":
            metadata.failed_update(now)
        elif kind == "rebootstrap":
            metadata.rebootstrap(now)
        elif kind == "hint":
            metadata.update_leader(name, 0, leader, epoch, [])
        else:
            if kind == "full":
                metadata.request_update()
            nodes = tuple(Node(each, "h", 1) for each in range(leader, leader + 2) if each >= 0)
            answer(metadata, news, now=now, nodes=nodes)
        after = metadata.leader(name, 0)
        if before and after and epoch >= 0 and kind != "rebootstrap":
            assert after.leader_epoch >= before.leader_epoch
        assert metadata.next_update_at(now) >= now
        for each in "abc":
            entry = metadata.topic(each)
            if entry is None:
                continue
            assert metadata.topic_error(each) == 0
            assert [item.partition for item in entry.partitions] == [0]
            assert all(
                item.leader == -1 or item.leader in metadata.nodes for item in entry.partitions
            )
            assert entry.available == tuple(
                item.partition for item in entry.partitions if item.leader >= 0
            )
