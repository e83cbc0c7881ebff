"""The simulation: that it runs clean, is the same each time, and finds what it should find."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from asyncproducer._implementation import IMPLEMENTATION
from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import StoredRecord
from asyncproducer.testing.clock import DeadlockError
from asyncproducer.testing.simulation import Plan, check, make_plan, run, shrink, world
from asyncproducer.testing.simulation.__main__ import main
from asyncproducer.testing.simulation.known import KNOWN
from asyncproducer.testing.simulation.many import run_seeds
from asyncproducer.testing.simulation.model import (
    Ended,
    History,
    Sent,
    Transaction,
    Violation,
    headers_of,
    value_of,
)
from asyncproducer.testing.simulation.mutants import (
    MUTANTS,
    Mutant,
    changed_source,
    find,
    planted,
)
from asyncproducer.testing.simulation.plan import (
    GROUP,
    OWN_PARTITIONER,
    PATIENT_MS,
    TRANSACTIONAL_ID,
    PlannedRecord,
    Step,
    Trouble,
)
from asyncproducer.testing.simulation.seeds import is_transactional

#: How many histories run in each build: some always the same, some that nobody has seen.
FIXED, FRESH = 200, 100

only_python = pytest.mark.skipif(
    IMPLEMENTATION == "compiled", reason="bugs are planted in the Python sources"
)


def broken(first: int, count: int) -> dict[int, list[Violation]]:
    results = {seed: run(make_plan(seed)).violations for seed in range(first, first + count)}
    return {seed: violations for seed, violations in results.items() if violations}


def test_a_fixed_set_of_histories_keeps_all_promises() -> None:
    assert not broken(0, FIXED)


def test_fresh_histories_keep_all_promises() -> None:
    """A seed that fails here: python -m asyncproducer.testing.simulation --seed SEED"""
    first = random.SystemRandom().randrange(10**9)
    sys.stdout.write(f"fresh seeds: {first} to {first + FRESH - 1}\n")
    assert not broken(first, FRESH), "the keys are the seeds"


# -- the same each time ------------------------------------------------------------------------


def test_a_seed_gives_the_same_history_each_time() -> None:
    plans = [make_plan(seed) for seed in range(20)]
    traces = [run(plan).trace for plan in plans]
    assert [run(plan).trace for plan in reversed(plans)][::-1] == traces
    assert len({*traces}) == len(traces)


def test_a_seed_gives_the_same_history_in_another_process() -> None:
    """Whatever the order of sets of str, and of objects by their address."""
    program = (
        "from asyncproducer.testing.simulation import make_plan, run\n"
        "print([run(make_plan(seed)).trace for seed in range(40)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert outputs == {f"{[run(make_plan(seed)).trace for seed in range(40)]}\n"}


def test_a_plan_can_be_written_down_and_read_again() -> None:
    for seed in range(50):
        plan = make_plan(seed)
        again = Plan.from_json(plan.to_json())
        assert again.to_json() == plan.to_json()
        assert again.steps == plan.steps
        assert again.troubles == plan.troubles


def test_a_plan_that_was_read_gives_the_same_history() -> None:
    for seed in range(5):
        assert run(Plan.from_json(make_plan(seed).to_json())).trace == run(make_plan(seed)).trace


# -- what the model finds ----------------------------------------------------------------------


class Seen:
    """A good history of three records of one partition, to be spoiled."""

    def __init__(self, **options: Any) -> None:
        options = {
            "enable_idempotence": True,
            "max_in_flight_requests_per_connection": 5,
            "delivery_timeout_ms": 1000,
            "max_block_ms": 100,
        } | options
        self.history = History(options)
        self.log: list[StoredRecord] = []
        self.history.logs["t", 0] = self.log
        for number in (1, 2, 3):
            sent = Sent(PlannedRecord(number, "t", 5), called_at=0.0, called=2 * number)
            sent.entered, sent.entered_at, sent.ended_at = 2 * number + 1, 0.0, 0.5
            sent.outcome, sent.partition, sent.offset, sent.ends = "acknowledged", 0, number - 1, 1
            self.history.sent.append(sent)
            self.store(number)

    def store(self, number: int) -> None:
        record = PlannedRecord(number, "t", 5)
        offset = len(self.log)
        stored = StoredRecord(offset, -1, None, value_of(record), headers_of(record), 7, 0, offset)
        self.log.append(stored)

    def delete(self, at: float) -> None:
        """The topic is deleted, and made again."""
        self.history.deleted.append((at, {("t", 0): list(self.log)}))
        self.log.clear()

    def sent(self, number: int) -> Sent:
        return self.history.sent[number - 1]

    def fail(self, number: int, persisted: str) -> None:
        sent = self.sent(number)
        sent.outcome, sent.persisted, sent.error = "failed", persisted, "DeliveryTimeout"

    @property
    def rules(self) -> set[str]:
        return {violation.rule for violation in check(self.history)}


def test_a_good_history_breaks_nothing() -> None:
    assert not Seen().rules


def test_an_acknowledged_record_must_be_in_the_log() -> None:
    seen = Seen()
    del seen.log[2]
    assert seen.rules == {"lost"}


def test_nothing_is_promised_with_acks_0() -> None:
    seen = Seen(enable_idempotence=False, acks=0)
    del seen.log[2]
    assert not seen.rules


def test_an_acknowledged_record_must_be_where_it_was_said() -> None:
    seen = Seen()
    seen.sent(3).offset = 7
    assert seen.rules == {"offset"}


def test_a_record_must_not_be_stored_twice() -> None:
    seen = Seen()
    seen.store(2)
    assert "doubled" in seen.rules


def test_without_retries_a_record_must_not_be_stored_twice_either() -> None:
    seen = Seen(enable_idempotence=False, retries=0)
    seen.store(2)
    assert "doubled" in seen.rules
    seen = Seen(enable_idempotence=False, retries=3)
    seen.store(2)
    assert not seen.rules


def test_what_was_acknowledged_in_a_topic_that_is_deleted_was_there() -> None:
    seen = Seen()
    seen.delete(1.0)
    assert not seen.rules
    (_, logs), *_ = seen.history.deleted
    del logs["t", 0][2]
    assert seen.rules == {"lost"}


@pytest.mark.parametrize(("deleted_at", "rules"), [(1.0, {"doubled"}), (0.4, set())])
def test_what_a_topic_had_comes_into_the_next_one_only_if_nobody_knew_of_it(
    deleted_at: float, rules: set[str]
) -> None:
    """Its answer was lost with the topic, and so it is sent again."""
    seen = Seen()
    seen.delete(deleted_at)
    seen.store(1)
    assert seen.rules == rules


def test_in_one_topic_a_record_is_stored_once_and_in_order_also_if_the_topic_is_deleted() -> None:
    seen = Seen()
    seen.store(2)
    seen.delete(0.4)
    assert seen.rules == {"doubled"}
    seen = Seen()
    seen.log[:2] = seen.log[1::-1]
    seen.delete(0.4)
    assert "reordered" in seen.rules


def test_nothing_must_fail_where_all_that_is_wrong_passes() -> None:
    seen = Seen()
    seen.fail(2, "maybe")
    assert not seen.rules
    seen.history.mendable = True
    assert seen.rules == {"needless"}


@pytest.mark.parametrize(
    ("error", "persisted", "topic", "needless"),
    [
        ("BrokerRejected", "maybe", "t", False),
        ("BrokerRejected", "no", "t", True),
        ("DeliveryTimeout", "maybe", "t", True),
        ("BrokerRejected", "maybe", "b", True),
    ],
)
def test_what_may_be_stored_may_fail_where_a_leader_has_forgotten_its_producers(
    error: str, persisted: str, topic: str, needless: bool
) -> None:
    """Seed 3,800,028,850: it took the batch behind one that it refused for the first of all."""
    seen = Seen()
    seen.fail(2, persisted)
    seen.sent(2).error = error
    seen.history.mendable = True
    seen.history.forgotten = {(topic, 0)}
    assert ("needless" in seen.rules) == needless


def test_records_must_be_in_the_order_of_their_calls() -> None:
    seen = Seen()
    seen.sent(1).called, seen.sent(2).called = seen.sent(2).called, seen.sent(1).called
    assert seen.rules == {"reordered"}


def test_records_of_one_send_many_must_be_in_their_order() -> None:
    seen = Seen()
    for number, called in ((1, 20), (2, 21), (3, 22)):
        seen.sent(number).stream, seen.sent(number).called = 1, called
        seen.sent(number).entered = None
    assert not seen.rules
    seen.sent(1).called = 30
    assert seen.rules == {"reordered"}


def test_calls_that_overlap_have_no_order_across_a_send_many() -> None:
    seen = Seen()
    seen.sent(1).called, seen.sent(1).stream = 100, 1
    seen.sent(2).entered = None  # nobody knows when: it may be late
    seen.sent(3).entered = None
    assert not seen.rules


def test_with_one_request_in_flight_the_order_of_acknowledged_records_must_hold() -> None:
    seen = Seen(enable_idempotence=False, max_in_flight_requests_per_connection=1)
    seen.sent(1).called = 100
    assert seen.rules == {"reordered"}
    seen.fail(1, "maybe")
    assert not seen.rules


def test_without_answers_there_is_no_order() -> None:
    seen = Seen(enable_idempotence=False, max_in_flight_requests_per_connection=1, acks=0)
    seen.sent(1).called = 100
    assert not seen.rules


def test_what_failed_with_persisted_no_must_not_be_in_the_log() -> None:
    seen = Seen()
    seen.fail(2, "no")
    assert seen.rules == {"persisted"}


def test_what_failed_with_persisted_yes_must_be_in_the_log() -> None:
    seen = Seen()
    seen.fail(3, "yes")
    assert not seen.rules
    del seen.log[2]
    assert seen.rules == {"persisted"}


def test_what_failed_with_persisted_maybe_may_be_anywhere() -> None:
    seen = Seen()
    seen.fail(3, "maybe")
    assert not seen.rules
    del seen.log[2]
    assert not seen.rules


def test_what_is_stored_already_must_not_fail() -> None:
    seen = Seen()
    seen.fail(3, "yes")
    seen.sent(3).code = ErrorCode.DUPLICATE_SEQUENCE_NUMBER
    assert seen.rules == {"duplicate"}


def test_what_was_refused_must_not_be_in_the_log() -> None:
    seen = Seen()
    seen.sent(3).outcome = "refused"
    assert seen.rules == {"refused"}


def test_a_record_must_keep_its_bytes() -> None:
    seen = Seen()
    seen.log[1] = seen.log[1]._replace(key=b"key")
    assert seen.rules == {"altered"}


def test_a_record_must_keep_its_headers() -> None:
    seen = Seen()
    seen.log[2] = seen.log[2]._replace(headers=())
    assert seen.rules == {"altered"}


def test_a_record_must_keep_its_timestamp() -> None:
    seen = Seen()
    seen.log[1] = seen.log[1]._replace(timestamp=5)
    assert seen.rules == {"altered"}


def test_a_record_must_go_to_the_partition_that_was_asked_for() -> None:
    seen = Seen()
    seen.sent(1).record = dataclasses.replace(seen.sent(1).record, partition=1)
    assert seen.rules == {"altered"}


def test_a_record_that_nobody_sent_must_not_be_in_the_log() -> None:
    seen = Seen()
    seen.store(9)
    assert seen.rules == {"foreign"}


def test_the_records_of_a_key_must_share_a_partition() -> None:
    seen = Seen()
    for number, index in ((1, 0), (2, 1)):
        sent = seen.sent(number)
        sent.record, sent.partition = dataclasses.replace(sent.record, key="k"), index
    assert "scattered" in seen.rules
    seen.history.options = {**seen.history.options, "partitioner": "round_robin"}
    assert "scattered" not in seen.rules


def test_each_record_must_have_an_end() -> None:
    seen = Seen()
    seen.sent(1).outcome = ""
    assert seen.rules == {"pending"}


@pytest.mark.parametrize("ends", [0, 2])
def test_each_delivery_must_end_once(ends: int) -> None:
    seen = Seen()
    seen.sent(1).ends = ends
    assert seen.rules == {"ends"}


def test_a_delivery_must_end_within_its_timeout() -> None:
    seen = Seen()
    seen.sent(1).ended_at = 1.1
    assert seen.rules == {"late"}


def test_a_call_must_not_wait_longer_than_max_block() -> None:
    seen = Seen()
    seen.sent(1).entered_at = 0.2
    assert seen.rules == {"blocked"}
    seen = Seen()
    seen.log.pop()
    seen.sent(3).outcome, seen.sent(3).entered_at = "refused", None
    assert seen.rules == {"blocked"}


def test_a_close_must_keep_its_timeout() -> None:
    seen = Seen()
    seen.history.calls = [Ended("close", 1.0, 1.5, 0.5), Ended("close", 1.0, 9.0, None)]
    assert not seen.rules
    seen.history.calls.append(Ended("close", 1.0, 1.6, 0.5))
    assert seen.rules == {"overtime"}


def test_nothing_must_fail_or_be_slow_where_nothing_is_wrong() -> None:
    seen = Seen(linger_ms=0, delivery_timeout_ms=10_000)
    seen.history.calm = True
    seen.sent(1).ended_at = 4.0
    assert seen.rules == {"calm"}
    seen.sent(1).ended_at = 0.5
    seen.fail(1, "maybe")
    assert seen.rules == {"calm"}


def test_a_record_must_be_refused_where_code_of_its_user_raised() -> None:
    seen = Seen()
    seen.history.spoiled[3] = "InvalidPartition"
    assert seen.rules == {"spoiled"}
    del seen.log[2]
    seen.sent(3).outcome, seen.sent(3).entered_at, seen.sent(3).ended_at = "refused", None, 0.0
    assert seen.rules == {"spoiled"}
    seen.sent(3).error = "InvalidPartition"
    assert not seen.rules


def test_nothing_must_expire_that_has_more_time_than_all_troubles() -> None:
    seen = Seen(delivery_timeout_ms=PATIENT_MS)
    seen.fail(1, "maybe")
    assert seen.rules == {"starved"}


def test_memory_that_nobody_has_must_reach_who_waits_for_it() -> None:
    seen = Seen()
    seen.log.pop()
    last = seen.sent(3)
    last.outcome, last.error, last.ended_at = "refused", "BufferTimeout", 0.75
    assert not seen.rules
    last.nobody_had_any = True
    assert seen.rules == {"starved"}
    seen.sent(1).ended_at = 0.75
    assert not seen.rules, "that was given back in the moment in which it was too late"


# -- what the model finds of transactions ------------------------------------------------------


class SeenTransaction(Seen):
    """The three records are of one transaction, which was committed with its offsets."""

    def __init__(self) -> None:
        super().__init__(transactional_id="simulated")
        self.transaction = Transaction(1, 1, 0.0, True, True, 1, told="committed")
        self.history.transactions.append(self.transaction)
        self.history.offsets[1] = 1
        self.visible = list(self.log)
        self.history.committed["t", 0] = self.visible
        for sent in self.history.sent:
            sent.transaction = 1


def test_a_transaction_that_is_committed_whole_breaks_nothing() -> None:
    assert not SeenTransaction().rules


def test_a_committed_transaction_must_show_all_of_its_records() -> None:
    seen = SeenTransaction()
    del seen.visible[1]
    assert seen.rules == {"torn"}


@pytest.mark.parametrize(
    ("outcome", "error", "excused"),
    [
        ("refused", "SerializationError", True),
        ("cancelled", "", True),
        ("failed", "DeliveryTimeout", True),
        ("failed", "AbortedError", False),
        ("refused", "TransactionAborted", False),
        ("refused", "BufferFull", False),
    ],
)
def test_a_commit_must_not_be_refused_where_nothing_is_wrong_with_its_records(
    outcome: str, error: str, excused: bool
) -> None:
    seen = SeenTransaction()
    seen.history.options = {**seen.history.options, "delivery_timeout_ms": 100, "linger_ms": 0}
    seen.history.calm = True
    seen.visible.clear()
    seen.history.offsets.clear()
    seen.transaction.told, seen.transaction.refused = "aborted", True
    assert "calm" in seen.rules
    seen.transaction.ended_at = 1.0
    seen.history.calls = [Ended("close", 0.9, 1.1, None)]
    assert "calm" not in seen.rules
    seen.history.calls = [Ended("close", 1.1, 1.2, None)]
    assert "calm" in seen.rules
    seen.sent(2).outcome, seen.sent(2).error = outcome, error
    assert ("calm" not in seen.rules) is excused


def test_a_committed_transaction_must_show_its_offsets() -> None:
    seen = SeenTransaction()
    del seen.history.offsets[1]
    assert seen.rules == {"torn"}
    seen.history.offsets[1] = 7
    assert seen.rules == {"offsets"}


def test_a_transaction_must_not_be_committed_over_a_failed_record() -> None:
    seen = SeenTransaction()
    seen.fail(2, "maybe")
    assert seen.rules == {"torn"}


def test_a_transaction_may_be_committed_without_what_could_not_wait_and_nothing_else() -> None:
    seen = SeenTransaction()
    del seen.visible[2], seen.log[2]
    seen.sent(3).outcome, seen.sent(3).entered_at = "refused", None
    seen.history.options = {**seen.history.options, "max_block_ms": 1000}
    seen.sent(3).error = "BufferFull"
    assert not seen.rules
    seen.sent(3).error = "RecordTooLarge"
    assert seen.rules == {"torn"}


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_of_an_aborted_transaction_must_be_visible(asked: bool) -> None:
    seen = SeenTransaction()
    seen.transaction.told, seen.transaction.commit_asked = "aborted", asked
    assert seen.rules == {"undead"}
    seen.visible.clear()
    assert seen.rules == {"undead"}
    seen.history.offsets.clear()
    assert not seen.rules


def test_nothing_must_be_visible_of_what_nobody_has_committed_or_a_commit_has_refused() -> None:
    seen = SeenTransaction()
    seen.transaction.told, seen.transaction.commit_asked = "", False
    assert seen.rules == {"undead"}
    seen.transaction.commit_asked = seen.transaction.refused = True
    assert seen.rules == {"undead"}


def test_an_abort_must_be_quick_where_nothing_is_wrong() -> None:
    seen = SeenTransaction()
    seen.transaction.aborting_at, seen.transaction.ended_at = 1.0, 9.0
    assert not seen.rules
    seen.history.calm = True
    seen.history.options = {**seen.history.options, "linger_ms": 0}
    assert seen.rules == {"calm"}
    seen.transaction.aborting_at = 8.0
    assert not seen.rules


def test_a_transaction_in_doubt_must_be_whole_or_not_there() -> None:
    seen = SeenTransaction()
    seen.transaction.told = ""
    assert not seen.rules
    record = seen.visible.pop()
    assert seen.rules == {"torn"}
    seen.visible.append(record)
    del seen.history.offsets[1]
    assert seen.rules == {"torn"}
    seen.visible.clear()
    assert not seen.rules


def test_a_record_must_not_be_visible_twice() -> None:
    seen = SeenTransaction()
    seen.visible.append(seen.visible[0])
    assert seen.rules == {"doubled"}


@pytest.mark.parametrize("number", [None, 2])
def test_nothing_must_be_taken_outside_of_a_transaction(number: int | None) -> None:
    seen = SeenTransaction()
    seen.sent(3).transaction = number
    assert seen.rules == {"outside"}


def test_nothing_must_be_visible_of_a_transaction_that_began_after_another_producer_came() -> None:
    seen = SeenTransaction()
    seen.history.taken_over_at = 1.0
    assert not seen.rules
    seen.transaction.began_at = 2.0
    assert seen.rules == {"fenced"}


# -- the shrinker ------------------------------------------------------------------------------


def test_a_failing_plan_shrinks_to_what_it_needs() -> None:
    """Here that is one record, one trouble, one option."""
    plan = make_plan(next(s for s in range(100) if _needed(make_plan(s))))
    small = shrink(plan, _needed, attempts=10_000)
    assert [len(step.records) for step in small.steps] == [1]
    assert small.steps[0].cancel_after is small.steps[0].cancel_turns is None
    assert len(small.troubles) == 1
    assert small.options["linger_ms"] == 0
    assert small.options["batch_size"] < 1000
    assert small.cluster.keys() == {"brokers", "topics", "latency"}
    assert small.seed == plan.seed


def _needed(plan: Plan) -> bool:
    return (
        any(step.action == "send_many" for step in plan.steps)
        and plan.record_count > 0
        and any(trouble.kind == "fault" for trouble in plan.troubles)
        and plan.options["batch_size"] < 1000
    )


def test_a_step_of_a_failing_plan_becomes_plain() -> None:
    plan = small_plan(
        transaction(0.0, 1, "abort", how="send_many", gap=0.1, offsets_first=True), **TRANSACTIONAL
    )
    small = shrink(plan, lambda candidate: bool(candidate.steps))
    assert small.steps == (
        Step(0.0, "transaction", (record(12),), transaction=1, how="enqueue", ends="commit"),
    )


def test_the_shrinker_asks_no_more_often_than_it_may() -> None:
    asked: list[Plan] = []

    def fails(plan: Plan) -> bool:
        asked.append(plan)
        return True

    shrink(make_plan(1), fails, attempts=7)
    assert len(asked) == 7


def test_what_cannot_be_left_out_stays() -> None:
    plan = make_plan(3)
    assert shrink(plan, lambda candidate: False) is plan


# -- the world ---------------------------------------------------------------------------------

PLAIN = {
    "enable_idempotence": True,
    "linger_ms": 0,
    "max_block_ms": 60_000,
    "request_timeout_ms": 300,
    "delivery_timeout_ms": 5000,
    "max_in_flight_requests_per_connection": 5,
}


def small_plan(*steps: Step, troubles: tuple[Trouble, ...] = (), **options: Any) -> Plan:
    cluster = {"brokers": 2, "topics": {"a": 1}, "latency": 0.001}
    return Plan(0, PLAIN | options, cluster, steps, troubles, 1.0, None)


def record(number: int, size: int = 10) -> PlannedRecord:
    return PlannedRecord(number, "a", size)


def test_the_world_counts_what_it_meets() -> None:
    plan = small_plan(
        Step(0.0, "send", (record(1),)),
        Step(0.1, "send_many", (record(2), record(3))),
        Step(0.2, "flush"),
        Step(0.3, "enqueue", (record(4),), cancel_turns=0),
        Step(0.4, "enqueue", (record(5),), waits=True),
        troubles=(
            Trouble(0.05, "fault", {"api": "produce", "error": "NOT_ENOUGH_REPLICAS"}),
            Trouble(0.35, "move_leader", {"topic": "a", "partition": 0, "node": 2}),
        ),
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["records acknowledged"] == 4
    assert result.counters["cancelled calls"] == 1
    assert result.counters["records sent again"] == 3  # one of them to the new leader
    assert result.counters["fault: produce NOT_ENOUGH_REPLICAS"] == 1
    assert result.counters["trouble: leader moved"] == 1
    assert result.counters["flushes"] == 1


@pytest.mark.parametrize("towards", ["client", "server"])
@pytest.mark.parametrize("how", ["stall", "black_hole", "none"])
def test_brokers_have_another_address_while_they_owe_answers(towards: str, how: str) -> None:
    move = {"node": 1, "towards": towards, "how": how, "lasting": 0.5}
    plan = small_plan(
        *(Step(at / 100, "enqueue", (record(at),)) for at in range(1, 40)),
        troubles=(Trouble(0.1, "broker_moves", move),),
        metadata_max_age_ms=20,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["records acknowledged"] == 39
    assert result.counters[f"trouble: broker moved, {how} towards its {towards}"] == 1
    assert (result.counters["records sent again"] > 0) is (how != "none")


@pytest.mark.parametrize("error", [None, "NOT_LEADER_OR_FOLLOWER"])
def test_topics_are_made_again_while_an_answer_is_waited_for(error: str | None) -> None:
    again = {
        **{"topic": "a", "partition": 0, "error": error, "delay": 0.1, "times": 2},
        **{"apart": 0.02, "then": "NOT_ENOUGH_REPLICAS", "led_by": 2},
    }
    plan = small_plan(
        *(Step(at / 100, "enqueue", (record(at),)) for at in range(1, 40)),
        troubles=(Trouble(0.1, "topic_made_again", again),),
        metadata_max_age_ms=20,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["records acknowledged"] == 39
    assert result.counters["trouble: topic made again"] == 1
    assert result.counters["trouble: leader moved"] == 1
    assert result.counters["fault: produce NOT_ENOUGH_REPLICAS"] == 1


def test_records_of_a_plan_whose_troubles_pass_must_all_be_acknowledged() -> None:
    """It is known from the plan: the one fault that does not pass is not among them."""

    def wants_all(*troubles: Trouble, **options: Any) -> bool:
        options = {"delivery_timeout_ms": PATIENT_MS, **options}
        plan = small_plan(troubles=troubles, **options)
        return world._World(plan).history.mendable

    passes = [
        Trouble(0.0, "stop_broker", {"node": 1, "lasting": 1.0}),
        Trouble(0.0, "fault", {"api": "produce", "drop": "after"}),
        Trouble(0.0, "fault", {"api": "produce", "error": "NOT_ENOUGH_REPLICAS"}),
    ]
    assert wants_all(*passes)
    assert not wants_all(*passes, delivery_timeout_ms=1000)
    assert not wants_all(*passes, retries=3)
    for fault in (
        {"api": "produce", "error": "INVALID_RECORD"},
        {"api": "metadata", "error": "TOPIC_AUTHORIZATION_FAILED"},
    ):
        assert not wants_all(*passes, Trouble(0.0, "fault", fault))
    smaller = {"topic": "a", "size": 100, "lasting": 1.0}
    assert not wants_all(*passes, Trouble(0.0, "max_message_bytes", smaller))


def test_a_producer_that_cannot_start_is_an_end_too() -> None:
    trouble = Trouble(0.0, "stop_broker", {"node": 1, "lasting": 10.0})
    other = Trouble(0.0, "stop_broker", {"node": 2, "lasting": 10.0})
    plan = small_plan(Step(0.0, "send", (record(1),)), troubles=(trouble, other), max_block_ms=100)
    result = run(plan)
    assert not result.violations
    assert result.counters["start failed: ConnectionFailed"] == 1


TRANSACTIONAL: dict[str, Any] = {
    "transactional_id": TRANSACTIONAL_ID,
    "transaction_timeout_ms": 60_000,
    "max_block_ms": 2000,
}


def transaction(at: float, number: int, ends: str, **more: Any) -> Step:
    records = tuple(record(10 * number + n) for n in range(3))
    more = {"how": "enqueue", "offsets": True, **more}
    return Step(at, "transaction", records, transaction=number, ends=ends, **more)


@pytest.mark.parametrize("version", [1, 2])
def test_the_world_knows_how_transactions_ended(version: int) -> None:
    plan = small_plan(
        transaction(0.0, 1, "commit"),
        transaction(0.0, 2, "abort", how="send_many"),
        transaction(0.0, 3, "block", how="together"),
        transaction(0.0, 4, "fails", how="send"),
        transaction(0.0, 5, "commit", cancels="end", cancel_turns=1),
        Step(0.9, "send", (record(1),)),
        **TRANSACTIONAL,
    )
    plan.cluster["transaction_version"] = version  # type: ignore[index]
    result = run(plan)
    assert not result.violations
    assert result.counters["transactions committed"] == 3
    assert result.counters["transactions aborted"] == 2
    assert result.counters["ends cancelled"] == 1
    assert result.counters["records refused IllegalStateError"] == 1


def test_the_world_has_what_goes_wrong_with_transactions() -> None:
    coordinator = {"key": TRANSACTIONAL_ID, "kind": "transaction", "node": 1, "nobody_for": 0.05}
    plan = small_plan(
        *(transaction(at / 10, at + 1, "commit") for at in range(5)),
        troubles=(
            Trouble(0.05, "move_coordinator", {**coordinator, "load_ms": 5}),
            Trouble(0.1, "transaction_version", {"level": 1}),
            Trouble(0.15, "marker_delay", {"delay_ms": 20}),
            Trouble(0.35, "take_over", {}),
        ),
        **TRANSACTIONAL,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["transactions committed"] == 4
    assert result.counters["transactions ended by ProducerFenced"] == 1
    for trouble in (
        "coordinator moved",
        "transaction.version 1",
        "other marker delay",
        "another producer",
    ):
        assert result.counters[f"trouble: {trouble}"] == 1


def test_another_producer_that_loses_patience_has_fenced_nobody() -> None:
    """Seed 4,100,081,390: for so long no marker could be written."""
    nobody = {"topic": "a", "partition": 0, "node": 1, "nobody_for": 2.0}
    plan = small_plan(
        transaction(0.0, 1, "commit"),
        transaction(0.1, 2, "commit"),
        troubles=(
            Trouble(0.0, "marker_delay", {"delay_ms": 200}),
            Trouble(0.06, "take_over", {}),
            Trouble(0.07, "move_leader", nobody),
        ),
        **TRANSACTIONAL,
    )
    result = run(dataclasses.replace(plan, close_at=None))
    assert not result.violations
    assert result.counters["transactions committed"] == 2
    assert "trouble: another producer" not in result.counters


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ends", ["abort", "fails"])
def test_a_group_without_a_coordinator_is_no_reason_for_anything_but_its_offsets_to_wait(
    ends: str, version: int
) -> None:
    busy: dict[str, Any] = {"offsets_first": True, "cancels": "offsets", "cancel_after": 0.05}
    away = {"key": GROUP, "kind": "group", "node": 1, "nobody_for": 30.0}
    plan = small_plan(
        *(transaction(0.0, number, ends, **busy) for number in range(1, 4)),
        transaction(0.0, 4, "commit", how="send"),
        troubles=(Trouble(0.0, "move_coordinator", away),),
        **TRANSACTIONAL,
    )
    plan = dataclasses.replace(plan, close_at=None)
    plan.cluster["transaction_version"] = version  # type: ignore[index]
    result = run(plan)
    assert not result.violations
    assert result.counters["transactions aborted"] == 3
    assert result.counters["transactions committed"] == 1  # when there is a coordinator again
    assert result.counters["calls of transactions timed out"] > 10
    assert result.counters["trouble: no coordinator"] == 1


def test_a_transaction_is_not_committed_over_a_record_whose_partitioner_raised() -> None:
    plan = small_plan(
        transaction(0.0, 1, "commit", how="send"),
        Step(0.0, "transaction", (record(15), record(16)), transaction=2, how="send", ends="block"),
        partitioner=OWN_PARTITIONER,
        **TRANSACTIONAL,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["records refused InvalidPartition"] == 1
    assert result.counters["transactions committed"] == 1
    assert result.counters["transactions aborted"] == 1


def serialized(plan: Plan, **setting: Any) -> Plan:
    setting = {"waits": [0.05], **setting}
    return dataclasses.replace(plan, cluster={**plan.cluster, "serializers": setting})


@pytest.mark.parametrize("key", ["plain", "async", "either"])
@pytest.mark.parametrize("value", ["plain", "async", "either"])
def test_users_have_serializers_which_fail_at_times(key: str, value: str) -> None:
    plan = small_plan(
        Step(0.0, "send", (record(5),)),
        Step(0.0, "enqueue", (record(6),)),
        Step(0.1, "send_nowait", (record(7),)),  # which cannot wait
        Step(0.1, "send_many", (record(8), record(9), record(10))),
    )
    result = run(serialized(plan, key=key, value=value, fails=5))
    assert not result.violations
    refused = 2 if key == value == "plain" else 3
    assert result.counters["records refused SerializationError"] == refused
    assert result.counters["records acknowledged"] == 6 - refused


def test_a_record_that_comes_in_late_is_behind_those_that_its_serializer_let_pass() -> None:
    plan = small_plan(Step(0.0, "enqueue", (record(1),)), Step(0.001, "enqueue", (record(2),)))
    result = run(serialized(plan, value="either", waits=[0.0, 0.1, 0.02]))
    assert not result.violations
    assert result.counters["records acknowledged"] == 2


def test_what_serializers_bring_late_stays_in_its_transaction_or_out() -> None:
    plan = small_plan(
        transaction(0.0, 1, "commit", how="together"),
        transaction(0.0, 2, "abort", how="together"),
        transaction(0.0, 3, "commit", how="together"),
        # The commit waits for the one, the abort does not wait for the other.
        Step(0.05, "enqueue", (record(1),)),
        Step(0.15, "enqueue", (record(2),)),
        **TRANSACTIONAL,
    )
    result = run(serialized(plan, value="async", waits=[0.05]))
    assert not result.violations
    assert result.counters["transactions committed"] == 2
    assert result.counters["transactions aborted"] == 1
    assert result.counters["records refused IllegalStateError"] == 1
    assert result.counters["records acknowledged"] == 10


def test_what_a_slow_iterator_brings_stays_in_its_transaction() -> None:
    plan = small_plan(
        transaction(0.0, 1, "commit", pause=0.1, how="send_many", gap=0.01),
        transaction(0.0, 2, "commit", pause=0.1),
        Step(0.07, "send_many", tuple(map(record, range(1, 5))), gap=0.04),
        **TRANSACTIONAL,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["transactions committed"] == 2
    assert result.counters["send_many ended by IllegalStateError"] == 1
    assert result.counters["records acknowledged"] == 6
    assert result.counters["records cancelled"] == 3  # the last was of the second one


@pytest.mark.parametrize("lost", [True, False])
def test_a_coordinator_does_not_call_abortable_what_is_committed(lost: bool) -> None:
    answer_lost = Trouble(0.0, "fault", {"api": "end_txn", "times": 1, "drop": "after"})
    abortable = {"api": "end_txn", "times": 1, "error": "TRANSACTION_ABORTABLE"}
    plan = small_plan(
        transaction(0.1, 1, "commit"),
        troubles=(*([answer_lost] if lost else ()), Trouble(0.05, "fault", abortable)),
        **TRANSACTIONAL,
    )
    result = run(plan)
    assert not result.violations
    assert result.counters["transactions committed"] == lost
    assert result.counters["transactions aborted"] == (not lost)


def test_each_third_seed_has_transactions() -> None:
    for seed in range(12):
        steps = make_plan(seed).steps
        has = any(step.action == "transaction" for step in steps)
        assert has is is_transactional(seed) is (seed % 3 == 2)


@only_python
def test_a_loop_that_turns_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_MOST_TURNS", 10_000)
    busy = Mutant(
        "busy",
        "net.scheduler:Scheduler.run",
        "deadline = self.try_step(now)",
        "deadline = self.try_step(now); self._loop.call_soon(self.wake)",
    )
    with planted(busy):
        rules = {violation.rule for violation in run(small_plan()).violations}
    assert "hang" in rules


async def sleep_often(seconds: float) -> None:
    for _ in range(1000):
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("seconds", [0, 1e-6])
def test_a_loop_whose_time_hardly_moves_is_ended(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_MOST_TURNS", 500)
    with (
        asyncio.Runner(loop_factory=world._Loop) as runner,
        pytest.raises(DeadlockError, match="has turned"),
    ):
        runner.run(sleep_often(seconds))


def test_a_loop_that_turns_often_because_it_lives_long_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds 36,040,643 and 1,700,044,193: for a minute somebody waits while metadata is fetched
    every 5 ms, a byte a turn."""
    monkeypatch.setattr(world, "_MOST_TURNS", 500)
    with asyncio.Runner(loop_factory=world._Loop) as runner:
        runner.run(sleep_often(0.0001))


@only_python
def test_an_error_in_the_log_is_found() -> None:
    noisy = Mutant(
        "noisy",
        "net.scheduler:Scheduler.step",
        "self._metrics.tick(now)",
        "logger.error('oh')",
    )
    with planted(noisy):
        assert Violation("logged", "oh") in run(small_plan()).violations


# -- planted bugs ------------------------------------------------------------------------------


@only_python
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    """By one of the seeds that were found for it, and because of the promise that it breaks."""
    search = find(mutant, KNOWN.get(mutant.name, ()))
    assert search.seeds, (
        f"{search.tried} seeds show this bug no more, only {dict(search.rules)}: look for others "
        "with python -m asyncproducer.testing.simulation --mutant TEXT --record"
    )


def test_seeds_are_written_down_for_planted_bugs_that_are_there() -> None:
    assert [*KNOWN] == [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_source_has_the_place_of_a_planted_bug(mutant: Mutant) -> None:
    """Asked with compiled modules too: who changes such a line sees it at once."""
    assert mutant.new in changed_source(mutant)


def test_a_bug_that_cannot_be_planted_is_an_error() -> None:
    gone = MUTANTS[0]._replace(old="what is not there")
    with pytest.raises(RuntimeError, match="'what is not there' is not once in"):
        changed_source(gone)


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="here they can")
def test_bugs_cannot_be_planted_in_compiled_modules() -> None:
    with pytest.raises(RuntimeError, match="ASYNCPRODUCER_IMPL=python"), planted(MUTANTS[0]):
        pass


# -- the command -------------------------------------------------------------------------------


def test_the_command_tells_what_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "12", "--first", "100", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"asyncproducer, {IMPLEMENTATION}: seeds 100 to 111" in out
    assert "records acknowledged" in out
    assert "12 histories, 0 failed" in out


def test_the_command_uses_several_processes() -> None:
    """Which import what they run: a function of a `__main__` could not be found."""
    command = [sys.executable, "-m", "asyncproducer.testing.simulation"]
    options = ["--seeds", "60", "--jobs", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert "60 histories, 0 failed" in done.stdout


def test_what_a_history_leaves_is_not_kept_for_ever() -> None:
    """100,000 of them took 400 MB in each process."""

    class Left:
        def __init__(self) -> None:
            self.me = self

    left = weakref.ref(Left())
    run_seeds(0, 1)
    assert left() is None


def test_the_command_begins_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--fresh", "--jobs", "1"]) == 0
    assert "1 histories, 0 failed" in capsys.readouterr().out


def test_the_command_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert make_plan(5).to_json() in out
    assert f"trace {run(make_plan(5)).trace}" in out


def test_the_command_replays_a_plan_with_its_log(tmp_path: Path) -> None:
    """In a process of its own, whose logging it sets up."""
    file = tmp_path / "plan.json"
    file.write_text(make_plan(5).to_json())
    command = [sys.executable, "-m", "asyncproducer.testing.simulation", "--plan", str(file)]
    done = subprocess.run([*command, "--verbose"], capture_output=True, text=True, check=True)
    assert f"trace {run(make_plan(5)).trace}" in done.stdout
    assert "is ready" in done.stdout


@only_python
def test_the_command_shows_the_smallest_history_that_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = next(mutant for mutant in MUTANTS if mutant.name.startswith("what was sent once"))
    seed = KNOWN[lost.name][1]
    with planted(lost):
        assert main(["--seeds", "1", "--first", str(seed), "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert f"Seed {seed} breaks a promise:" in out
    text = out[out.index('{"seed"') : out.index('"close_timeout"')]
    small = Plan.from_json(text + '"close_timeout": null}')
    assert small.record_count <= 3


@only_python
def test_the_command_looks_for_planted_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutant", "a lost connection forgets"]) == 0
    assert "1 planted bugs, 0 not found" in capsys.readouterr().out


@pytest.mark.skipif(IMPLEMENTATION == "python", reason="here they can be planted")
def test_the_command_says_where_bugs_can_be_planted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--mutants"])
    assert "set ASYNCPRODUCER_IMPL=python" in capsys.readouterr().err


def test_the_command_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "0"])
    assert "--seeds and --jobs are 1 at least" in capsys.readouterr().err
