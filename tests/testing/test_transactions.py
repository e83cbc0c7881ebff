"""The transaction coordinator without a network; what Kafka shares is in the parity tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import encode_batch
from asyncproducer.testing.groups import CommittedOffset, Groups
from asyncproducer.testing.state import ClusterState, Node, RequestRefused
from asyncproducer.testing.storage import PartitionLog
from asyncproducer.testing.transactions import (
    LAST_EPOCH,
    TransactionalId,
    Transactions,
    TransactionState,
)

T0 = ("t", 0)
T1 = ("t", 1)

Pid = tuple[int, int]


@contextmanager
def refused(code: ErrorCode) -> Iterator[None]:
    with pytest.raises(RequestRefused) as raised:
        yield
    assert raised.value.code == code


class Timers:
    """A clock in ms, and what is to happen then."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.new_event_loop()
        self._handles: list[asyncio.TimerHandle] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        due = self.now + round(delay * 1000)
        handle = asyncio.TimerHandle(due, callback, (), self._loop)
        self._handles.append(handle)
        return handle

    @property
    def running(self) -> list[asyncio.TimerHandle]:
        return [handle for handle in self._handles if not handle.cancelled()]

    def advance(self, delay_ms: int) -> None:
        end = self.now + delay_ms
        while due := [h for h in self.running if h.when() <= end]:
            handle = min(due, key=lambda h: h.when())
            self.now = int(handle.when())
            self._handles.remove(handle)
            handle._run()
        self.now = end

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def timers() -> Iterator[Timers]:
    timers = Timers()
    yield timers
    timers.close()


@pytest.fixture
def state() -> ClusterState:
    state = ClusterState([Node(1, "h", alive=True), Node(2, "h", alive=True)], rng=random.Random(0))
    state.create_topic("t", 2, replication=1)
    return state


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def transactions(state: ClusterState, groups: Groups, timers: Timers) -> Transactions:
    return Transactions(
        state, groups, now_ms=lambda: timers.now, call_later=timers.call_later, marker_delay_ms=0
    )


def begin(transactions: Transactions, *partitions: tuple[str, int], version: int = 2) -> Pid:
    """A transaction of "tx" with these partitions."""
    pid = transactions.initialize("tx", 1000, None)
    transactions.add("tx", *pid, partitions=partitions or [T0], version=version)
    return pid


def end(transactions: Transactions, pid: Pid, *, commit: bool = True, version: int = 2) -> Pid:
    return transactions.end("tx", *pid, commit=commit, version=version)


def log(state: ClusterState, partition: tuple[str, int] = T0) -> PartitionLog:
    return state.partition(*partition).log


def markers(state: ClusterState, partition: tuple[str, int] = T0) -> list[tuple[int, bool]]:
    return [(marker.producer_epoch, marker.is_commit) for marker in log(state, partition).markers()]


def append(state: ClusterState, pid: Pid, sequence: int = 0, partition: Any = T0) -> None:
    data = encode_batch(
        [(b"k", b"v")],
        timestamps=[0],
        producer_id=pid[0],
        producer_epoch=pid[1],
        base_sequence=sequence,
        attributes=0x10,
    )
    log(state, partition).append(data, leader_epoch=0, now_ms=0)


# -- states


@pytest.mark.parametrize("state", TransactionState)
def test_a_state_that_cannot_follow_names_both(state: TransactionState) -> None:
    known = TransactionalId("tx", 1, 1, state=TransactionState.EMPTY)
    legal = {TransactionState.EMPTY, TransactionState.ONGOING, TransactionState.PREPARE_ABORT}
    if state in legal:
        known.become(state)
        assert known.state is state
        return
    with pytest.raises(RuntimeError, match=f"'tx' cannot go from EMPTY to {state.name}"):
        known.become(state)


# -- epochs that are used up


def test_the_end_of_a_transaction_brings_a_new_producer_id_when_epochs_are_used_up(
    transactions: Transactions, state: ClusterState
) -> None:
    producer_id, _ = transactions.initialize("tx", 1000, None)
    known = transactions.find("tx")
    known.producer_epoch = LAST_EPOCH - 1
    pid = (producer_id, LAST_EPOCH - 1)
    transactions.add("tx", *pid, partitions=[T0], version=2)
    pid = end(transactions, pid)
    assert pid == (producer_id, LAST_EPOCH)
    transactions.add("tx", *pid, partitions=[T0], version=2)
    after = end(transactions, pid)
    assert after[1] == 0
    assert after[0] != producer_id
    assert (known.producer_id, known.producer_epoch) == after
    # The marker is the old producer's last one.
    assert markers(state) == [(LAST_EPOCH, True), (LAST_EPOCH + 1, True)]
    # It may ask again, for the same.
    assert end(transactions, pid) == after
    with refused(ErrorCode.INVALID_TXN_STATE):
        end(transactions, pid, commit=False)
    with refused(ErrorCode.INVALID_PRODUCER_ID_MAPPING):
        end(transactions, (producer_id, LAST_EPOCH - 1))


def test_a_new_producer_id_is_not_valid_before_the_old_ones_markers(
    transactions: Transactions, timers: Timers
) -> None:
    producer_id, _ = transactions.initialize("tx", 1000, None)
    transactions.find("tx").producer_epoch = LAST_EPOCH
    transactions.add("tx", producer_id, LAST_EPOCH, partitions=[T0], version=2)
    transactions.marker_delay_ms = 10
    after = end(transactions, (producer_id, LAST_EPOCH))
    with refused(ErrorCode.CONCURRENT_TRANSACTIONS):
        transactions.add("tx", *after, partitions=[T0], version=2)
    timers.advance(10)
    transactions.add("tx", *after, partitions=[T0], version=2)


@pytest.mark.parametrize("gives_its_epoch", [True, False])
def test_a_start_brings_a_new_producer_id_when_epochs_are_used_up(
    transactions: Transactions, gives_its_epoch: bool
) -> None:
    producer_id, _ = transactions.initialize("tx", 1000, None)
    transactions.find("tx").producer_epoch = LAST_EPOCH
    expected = (producer_id, LAST_EPOCH) if gives_its_epoch else None
    after = transactions.initialize("tx", 1000, expected)
    assert after[1] == 0
    assert after[0] != producer_id
    # The first answer may be lost: the old id is known, if its epoch is the last one.
    with refused(ErrorCode.PRODUCER_FENCED):
        transactions.initialize("tx", 1000, (producer_id, 5))
    if gives_its_epoch:
        assert transactions.initialize("tx", 1000, (producer_id, LAST_EPOCH)) == after


def test_a_fence_brings_a_new_producer_id_when_epochs_are_used_up(
    transactions: Transactions, state: ClusterState
) -> None:
    producer_id, _ = begin(transactions, version=1)
    transactions.find("tx").producer_epoch = LAST_EPOCH
    with refused(ErrorCode.CONCURRENT_TRANSACTIONS):
        transactions.initialize("tx", 1000, None)
    assert markers(state) == [(LAST_EPOCH + 1, False)]
    assert transactions.find("tx").producer_id != producer_id
    assert transactions.initialize("tx", 1000, (producer_id, LAST_EPOCH))[1] == 0
    assert transactions.initialize("tx", 1000, None)[1] == 1


def test_an_old_producer_id_is_forgotten_with_the_next_transaction(
    transactions: Transactions,
) -> None:
    producer_id, _ = begin(transactions)
    transactions.find("tx").producer_epoch = LAST_EPOCH
    old = (producer_id, LAST_EPOCH)
    pid = end(transactions, old)
    transactions.add("tx", *pid, partitions=[T0], version=2)
    with refused(ErrorCode.INVALID_PRODUCER_ID_MAPPING):
        end(transactions, old)


# -- markers


def test_until_the_markers_are_written_nothing_new_begins(
    transactions: Transactions, state: ClusterState, timers: Timers
) -> None:
    transactions.marker_delay_ms = 50
    pid = begin(transactions)
    append(state, pid)
    after = end(transactions, pid)
    timers.advance(49)
    assert markers(state) == []
    assert log(state).last_stable_offset == 0
    assert transactions.find("tx").state is TransactionState.PREPARE_COMMIT
    for ask in (
        lambda: transactions.add("tx", *after, partitions=[T0], version=2),
        lambda: transactions.verify("tx", *after, partition=T0),
        lambda: transactions.initialize("tx", 1000, None),
        lambda: end(transactions, pid),
        lambda: end(transactions, pid, commit=False),
        # Of the next one, which nobody has begun: no reason to fence its producer.
        lambda: end(transactions, after, commit=False),
    ):
        with refused(ErrorCode.CONCURRENT_TRANSACTIONS):
            ask()
    timers.advance(1)
    assert markers(state) == [(after[1], True)]
    assert log(state).last_stable_offset == 2
    transactions.add("tx", *after, partitions=[T0], version=2)


def test_a_marker_waits_for_a_leader(transactions: Transactions, state: ClusterState) -> None:
    pid = begin(transactions, T0, T1)
    for partition in (T0, T1):
        append(state, pid, partition=partition)
    state.move_leader("t", 1, -1)
    end(transactions, pid, commit=False)
    known = transactions.find("tx")
    assert (markers(state), markers(state, T1)) == ([(1, False)], [])
    assert (known.state, list(known.partitions)) == (TransactionState.PREPARE_ABORT, [T1])
    state.move_leader("t", 1, 1)
    assert markers(state, T1) == [(1, False)]
    assert (known.state, list(known.partitions)) == (TransactionState.COMPLETE_ABORT, [])
    state.move_leader("t", 1, 2)  # is of no interest any more
    assert markers(state, T1) == [(1, False)]


@pytest.mark.parametrize("leaderless", [True, False])
def test_a_deleted_topic_needs_no_marker(
    transactions: Transactions, state: ClusterState, leaderless: bool
) -> None:
    state.create_topic("u", 1)
    pid = begin(transactions, T0, ("u", 0))
    if leaderless:
        state.move_leader("u", 0, -1)
        end(transactions, pid)
        assert transactions.find("tx").state is TransactionState.PREPARE_COMMIT
        state.delete_topic("u")
    else:
        state.delete_topic("u")
        end(transactions, pid)
    assert transactions.find("tx").state is TransactionState.COMPLETE_COMMIT
    assert markers(state) == [(1, True)]


# -- time


@pytest.mark.parametrize("version", [1, 2])
def test_a_transaction_is_aborted_when_its_time_is_up(
    transactions: Transactions, state: ClusterState, timers: Timers, version: int
) -> None:
    pid = transactions.initialize("tx", 1000, None)
    timers.advance(5000)  # counts from the beginning of the transaction only
    transactions.add("tx", *pid, partitions=[T0], version=version)
    timers.advance(999)
    transactions.add("tx", *pid, partitions=[T1], version=version)  # does not prolong it
    assert transactions.find("tx").state is TransactionState.ONGOING
    timers.advance(1)
    assert transactions.find("tx").state is TransactionState.COMPLETE_ABORT
    assert markers(state) == markers(state, T1) == [(1, False)]
    with refused(ErrorCode.PRODUCER_FENCED):
        transactions.add("tx", *pid, partitions=[T0], version=version)


@pytest.mark.parametrize("close", [True, False])
def test_a_transaction_that_ended_in_time_leaves_no_timer(
    transactions: Transactions, state: ClusterState, timers: Timers, close: bool
) -> None:
    pid = begin(transactions)
    assert len(timers.running) == 1
    if close:
        state.move_leader("t", 0, -1)
        end(transactions, pid)
        transactions.close()
        state.move_leader("t", 0, 1)
        assert markers(state) == []  # nothing happens after that
    else:
        end(transactions, pid)
    assert timers.running == []


def test_a_closed_coordinator_aborts_nothing(
    transactions: Transactions, state: ClusterState, timers: Timers
) -> None:
    begin(transactions)
    transactions.close()
    timers.advance(10_000)
    assert transactions.find("tx").state is TransactionState.ONGOING


# -- groups


def test_offsets_of_a_transaction_come_with_its_end(
    transactions: Transactions, groups: Groups
) -> None:
    offsets = {T0: CommittedOffset(5)}
    for commit in (False, True):
        pid = begin(transactions)
        transactions.add("tx", *pid, groups=["g"], version=2)
        assert transactions.verify("tx", *pid, group="g")
        assert not transactions.verify("tx", *pid, group="other")
        groups.add_pending("g", pid[0], offsets)
        assert groups.get("g").offsets == {}
        end(transactions, pid, commit=commit)
        assert groups.get("g").pending == {}
    assert groups.get("g").offsets == offsets


MEMBERS = {"m": None, "s": "i"}


@pytest.mark.parametrize(
    ("generation", "member", "instance", "code"),
    [
        (3, "m", None, None),
        (3, "s", "i", None),
        (-1, "", None, None),  # somebody who is in no group
        (2, "m", None, ErrorCode.ILLEGAL_GENERATION),
        (-1, "m", None, ErrorCode.ILLEGAL_GENERATION),
        (3, "x", None, ErrorCode.UNKNOWN_MEMBER_ID),
        (3, "", None, ErrorCode.UNKNOWN_MEMBER_ID),
        (3, "m", "j", ErrorCode.UNKNOWN_MEMBER_ID),
        (3, "m", "i", ErrorCode.FENCED_INSTANCE_ID),
    ],
)
def test_only_members_of_the_present_generation_commit_offsets(
    groups: Groups, generation: int, member: str, instance: str | None, code: ErrorCode | None
) -> None:
    groups.describe("g", 3, MEMBERS)
    if code is None:
        groups.check("g", generation, member, instance)
    else:
        with refused(code):
            groups.check("g", generation, member, instance)
