"""Plans for a transactional producer: what its user does, and what may go wrong for it.

All that goes wrong for other producers goes wrong here, too. See making.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from typing import Any

from asyncproducer.testing.simulation.making import PlanMaker
from asyncproducer.testing.simulation.plan import (
    GROUP,
    TRANSACTIONAL_ID,
    Plan,
    Step,
    Trouble,
)

__all__ = ["TransactionalPlanMaker"]

#: What every coordinator may say, with nothing done: to try again after, ...
_COORDINATOR = (
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
)
#: ... and what ends the transaction, or the producer.
_FINAL = (
    "TRANSACTION_ABORTABLE",
    "INVALID_PRODUCER_EPOCH",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_ID_MAPPING",
    "INVALID_TXN_STATE",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "UNKNOWN_SERVER_ERROR",
)
#: Request -> what only it may be told, with nothing done.
_ERRORS = {
    "find_coordinator": ("COORDINATOR_NOT_AVAILABLE", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    "init_producer_id": (*_COORDINATOR, "CONCURRENT_TRANSACTIONS"),
    "add_partitions_to_txn": (
        *_COORDINATOR,
        "CONCURRENT_TRANSACTIONS",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "TOPIC_AUTHORIZATION_FAILED",
        "OPERATION_NOT_ATTEMPTED",
        *_FINAL,
    ),
    "add_offsets_to_txn": (
        *_COORDINATOR,
        "CONCURRENT_TRANSACTIONS",
        "GROUP_AUTHORIZATION_FAILED",
        *_FINAL,
    ),
    "txn_offset_commit": (
        *_COORDINATOR,
        "UNKNOWN_TOPIC_OR_PARTITION",
        "REQUEST_TIMED_OUT",
        "ILLEGAL_GENERATION",
        "UNKNOWN_MEMBER_ID",
        "FENCED_INSTANCE_ID",
        "GROUP_AUTHORIZATION_FAILED",
        *_FINAL,
    ),
    "end_txn": (*_COORDINATOR, "CONCURRENT_TRANSACTIONS", *_FINAL),
}
#: What keeps the end of a transaction from getting an epoch for the next one.
_NO_EPOCH = (
    "TRANSACTION_ABORTABLE",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
)
#: What is said though it was done: the coordinator could not know.
_DONE = ("COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR")

#: From this version of Produce on, a batch adds its partition to the transaction.
_TV2_PRODUCE = 12


class TransactionalPlanMaker(PlanMaker):
    """Makes the plan of a transactional producer."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.peaceful = self.patient or self.chance(0.6)

    def plan(self, seed: int) -> Plan:
        """As for others, perhaps with a group that nobody coordinates, or slow senders beside."""
        plan = super().plan(seed)
        if self.chance(0.2):
            plan = self.group_away(plan)
        if self.chance(0.3):
            plan = self.streams(plan)
        return plan

    def group_away(self, plan: Plan) -> Plan:
        """For longer than users wait, nobody coordinates the group whose offsets are committed."""
        rng = self.rng
        away = {
            "key": GROUP,
            "kind": "group",
            "node": self.node(),
            "nobody_for": rng.choice((5.0, 15.0, 30.0)),
            "load_ms": rng.choice((0, 0, 5000)),
        }
        troubles = list(plan.troubles)
        options = dict(plan.options)
        # A history has its cost: for so long, nothing is asked for every few ms.
        for name in ("max_block_ms", "metadata_max_age_ms", "retry_backoff_max_ms"):
            if name in options:
                options[name] = max(200, options[name])
        if self.chance(0.6):
            # Nothing else is wrong: what is not about offsets must not feel it.
            troubles.clear()
            options["transaction_timeout_ms"] = 60_000
        troubles.append(
            Trouble(rng.choice((0.0, self.span(0, self.length))), "move_coordinator", away)
        )
        return dataclasses.replace(
            plan,
            steps=tuple(map(self.busy, plan.steps)),
            options=options,
            troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at)),
            close_at=None,
        )

    def busy(self, step: Step) -> Step:
        """What the user of a transaction does who cannot wait for a group's coordinator."""
        rng = self.rng
        if step.action != "transaction" or self.chance(0.3):
            return step
        return dataclasses.replace(
            step,
            offsets=True,
            offsets_first=self.chance(0.5),
            ends=rng.choice((step.ends, "abort", "fails")),
            cancels="offsets",
            cancel_turns=None,
            cancel_after=rng.choice((0.01, 0.1)),
        )

    def streams(self, plan: Plan) -> Plan:
        """Who sends many beside the transactions may not be done when they end."""
        rng = self.rng
        style = rng.choice(("keyed", "partitioned", "sticky", "mixed"))
        steps = list(plan.steps)
        for _ in range(rng.randint(1, 3)):
            records = [self.record(plan.options, style, 0.1) for _ in range(rng.choice((4, 8, 16)))]
            step = Step(self.span(0, self.length), "send_many", tuple(records))
            steps.append(self.slower(step) if self.chance(0.7) else step)
        return dataclasses.replace(plan, steps=tuple(sorted(steps, key=lambda step: step.at)))

    def moved(self, plan: Plan) -> Plan:
        """As for others; and epochs that are refused, where more than a group is away."""
        plan = super().moved(plan)
        if all(trouble.arguments.get("kind") == "group" for trouble in plan.troubles):
            return plan
        return self.epochs_refused(plan) if self.chance(0.25) else plan

    def epochs_refused(self, plan: Plan) -> Plan:
        """Ends of transactions that get no epoch for the next one."""
        rng = self.rng
        troubles = list(plan.troubles)
        for _ in range(rng.choice((1, 1, 2))):
            at = self.span(0, self.length)
            refused = {"error": rng.choice(_NO_EPOCH), "times": rng.choice((1, 1, 2, 3))}
            troubles.append(Trouble(at, "epoch_refused", refused))
            # What makes a producer ask for one.
            needed = self.version_changes(plan.options)
            troubles.append(Trouble(round(at + self.span(0, self.length / 4), 4), *needed))
        ordered = tuple(sorted(troubles, key=lambda trouble: trouble.at))
        return dataclasses.replace(plan, troubles=ordered)

    def repeated(self, plan: Plan) -> Plan:
        """Who has lost patience with the offsets of a transaction sends them with the next one."""
        rng = self.rng
        steps = list(plan.steps)
        places = [at for at, step in enumerate(steps) if step.action == "transaction"]
        for first, second in itertools.pairwise(places):
            if self.chance(0.5):
                continue
            steps[first] = dataclasses.replace(
                steps[first],
                offsets=True,
                ends=rng.choice((steps[first].ends, "abort", "fails")),
                cancels="offsets",
                cancel_turns=None,
                cancel_after=rng.choice((0.0005, 0.001, 0.002, 0.01, 0.05)),
            )
            number = steps[first].offsets_of or steps[first].transaction
            steps[second] = dataclasses.replace(steps[second], offsets=True, offsets_of=number)
        return dataclasses.replace(plan, steps=tuple(steps))

    def serialized(self, plan: Plan) -> Plan:
        """Its user has serializers: who sends beside may be in one when a transaction ends."""
        if self.chance(0.3):
            plan = self.repeated(plan)
        plan = super().serialized(plan)
        if "serializers" not in plan.cluster:
            return plan
        rng = self.rng
        steps = list(plan.steps)
        for _ in range(rng.choice((0, 5, 10))):
            record = self.record(plan.options, "keyed", 0.1)
            steps.append(Step(self.span(0, self.length), "enqueue", (record,)))
        plan = dataclasses.replace(plan, steps=tuple(sorted(steps, key=lambda step: step.at)))
        # What nothing but serializers can have spoiled.
        return dataclasses.replace(plan, troubles=()) if self.chance(0.4) else plan

    def names_topics_by_id(self, plan: Plan) -> bool:
        """Topics are not made again here: what of a transaction was in them is gone."""
        return False

    def options(self) -> dict[str, Any]:
        """As for others, with a transactional id."""
        rng = self.rng
        options = super().options()
        for name in ("acks", "retries"):
            options.pop(name, None)
        options |= {
            "enable_idempotence": True,
            "transactional_id": TRANSACTIONAL_ID,
            "max_block_ms": options["max_block_ms"]
            if self.patient
            else rng.choice((20, 200, 500, 2000, 2000, 60_000)),
            # With the shortest ones coordinators end what users would have committed.
            "transaction_timeout_ms": rng.choice((60_000, 60_000, 60_000, 1000, 200, 50)),
        }
        if self.chance(0.2) and not self.patient:
            options["retries"] = rng.choice((1, 2, 5))
        return options

    def cluster(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As for others, with a version of transactions."""
        rng = self.rng
        cluster = super().cluster(options)
        cluster["transaction_version"] = rng.choice((1, 2))
        if cluster.get("produce_version", _TV2_PRODUCE) < _TV2_PRODUCE:
            cluster["transaction_version"] = 1
        if self.chance(0.3):
            cluster["marker_delay_ms"] = rng.choice((1, 5, 30, 200))
        if cluster["transaction_version"] == 1 and self.chance(0.15):
            cluster["bumps_epochs"] = False
        return cluster

    def steps(self, options: Mapping[str, Any]) -> list[Step]:
        """Transactions, one after the other, and now and then somebody who sends beside."""
        rng = self.rng
        style = rng.choice(("keyed", "partitioned", "sticky", "mixed"))
        fat = rng.choice((0.0, 0.1, 0.5))
        cancels = rng.choice((0.0, 0.1, 0.1, 0.4))
        steps: list[Step] = []
        at = 0.004
        for number in range(1, rng.choice((2, 4, 6, 8)) + 1):
            steps.append(self.transaction(at, number, options, style, fat, cancels))
            at = round(at + self.span(0, 2 * self.length / 5), 4)
        self.length = max(self.length, at)
        steps += [
            self.sending(self.span(0, self.length), options, style, fat, cancels)
            for _ in range(rng.choice((0, 0, 1, 5)))
        ]
        if self.chance(0.3):
            timeout = rng.choice((None, 0.01, 0.2, 5.0))
            at = self.span(0, self.length)
            steps.append(Step(at, "flush", timeout=timeout, **self.cancelled(cancels)))
        if self.chance(0.15):
            timeout = rng.choice((None, 0.0, 0.02, 1.0))
            at = self.span(self.length / 2, self.length)
            steps.append(Step(at, "close", timeout=timeout, **self.cancelled(cancels)))
        return steps

    def transaction(
        self,
        at: float,
        number: int,
        options: Mapping[str, Any],
        style: str,
        fat: float,
        cancels: float,
    ) -> Step:
        """One transaction: its records, then offsets, then its end."""
        rng = self.rng
        count = rng.choice((0, 1, 2, 4, 8, 16))
        ends = rng.choice(("commit", "commit", "commit", "block", "block", "abort", "fails"))
        if self.chance(0.03):
            ends = "left"
        return Step(
            at,
            "transaction",
            tuple(self.record(options, style, fat) for _ in range(count)),
            transaction=number,
            how=rng.choice(("enqueue", "enqueue", "send", "send_nowait", "send_many", "together")),
            offsets=self.chance(0.4),
            ends=ends,
            pause=rng.choice((0.0, 0.0, 0.0, 0.005, 0.1)),
            cancels=rng.choice(("records", "offsets", "end", "end")),
            **self.cancelled(max(cancels, 0.2)),
        )

    def kinds(self) -> list[Any]:
        """Half of the troubles are those of transactions."""
        # Leaders do not forget producers whose transactions are open.
        kinds = [kind for kind in super().kinds() if kind != self.producers_forgotten]
        return [
            *kinds,
            *[self.transaction_fault] * 16,
            *[self.coordinator_moves] * 5,
            self.another_producer,
            *[self.version_changes] * 3,
            *[self.markers_slow] * 2,
        ]

    def transaction_fault(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Requests to coordinators, refused or broken off."""
        rng = self.rng
        api = rng.choice(sorted(_ERRORS))
        fault: dict[str, Any] = {"api": api, "times": self.times()}
        which = rng.random()
        if which < 0.35:
            fault["error"] = rng.choice(_ERRORS[api])
        elif which < 0.5 and api not in ("find_coordinator", "init_producer_id"):
            fault.update(error=rng.choice(_DONE), after_append=True)
        else:
            fault |= self.broken_answer(options, delay=0.02, throttles=(30,), lengths=(0, 6, 12))
        return "fault", fault

    def coordinator_moves(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Another broker is in charge, perhaps nobody for a while."""
        kind = self.rng.choice(("transaction", "transaction", "group"))
        arguments: dict[str, Any] = {
            "key": GROUP if kind == "group" else TRANSACTIONAL_ID,
            "kind": kind,
            "node": self.node(),
        }
        if self.chance(0.3):
            arguments["nobody_for"] = self.lasting()
        if self.chance(0.3):
            arguments["load_ms"] = self.rng.choice((5, 50))
        return "move_coordinator", arguments

    def another_producer(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """It takes the transactional id."""
        return "take_over", {}

    def version_changes(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """An administrator changes `transaction.version`."""
        return "transaction_version", {"level": self.rng.choice((1, 2, 2))}

    def markers_slow(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Transactions take their time to end from now on."""
        return "marker_delay", {"delay_ms": self.rng.choice((0, 5, 50, 300))}
