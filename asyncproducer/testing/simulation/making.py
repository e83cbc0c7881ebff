# ruff: noqa: D102 (what a method makes is its name)
"""Makes plans by chance: options, a cluster, what users do, what goes wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from asyncproducer.testing.simulation.plan import (
    OWN_PARTITIONER,
    PATIENT_MS,
    Plan,
    PlannedRecord,
    Step,
    Trouble,
)

__all__ = ["RETRIABLE", "PlanMaker"]

#: Errors of a partition in a Produce answer, with nothing stored: those to try again after, ...
RETRIABLE = (
    "CORRUPT_MESSAGE",
    "UNKNOWN_TOPIC_OR_PARTITION",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_OR_FOLLOWER",
    "REQUEST_TIMED_OUT",
    "REPLICA_NOT_AVAILABLE",
    "NOT_ENOUGH_REPLICAS",
    "KAFKA_STORAGE_ERROR",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "THROTTLING_QUOTA_EXCEEDED",
    "UNKNOWN_TOPIC_ID",
    "INCONSISTENT_TOPIC_ID",
)
#: ... those that end the batch, ...
_FINAL = (
    "UNKNOWN_SERVER_ERROR",
    "TOPIC_AUTHORIZATION_FAILED",
    "INVALID_RECORD",
    "INVALID_TIMESTAMP",
    "POLICY_VIOLATION",
    "RECORD_LIST_TOO_LARGE",
    "INVALID_PRODUCER_EPOCH",
    "TRANSACTION_ABORTABLE",
)
#: ... the producer, ...
_FATAL = ("CLUSTER_AUTHORIZATION_FAILED", "PRODUCER_FENCED", "INVALID_PRODUCER_ID_MAPPING")
#: ... or change its sequences; and those of batches that are stored all the same.
_SEQUENCE = ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID")
_STORED = (
    "REQUEST_TIMED_OUT",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "NOT_LEADER_OR_FOLLOWER",
    "KAFKA_STORAGE_ERROR",
    "UNKNOWN_SERVER_ERROR",
    "DUPLICATE_SEQUENCE_NUMBER",
)
_METADATA = (
    "LEADER_NOT_AVAILABLE",
    "UNKNOWN_TOPIC_OR_PARTITION",
    "TOPIC_AUTHORIZATION_FAILED",
    "REBOOTSTRAP_REQUIRED",
    "UNKNOWN_SERVER_ERROR",
)
_PRODUCER_ID = (
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "CONCURRENT_TRANSACTIONS",
    "CLUSTER_AUTHORIZATION_FAILED",
)

#: Seconds before each record of an iterator that is slow.
_GAPS = (0.001, 0.01, 0.05, 0.1)

#: What brokers answer to ApiVersions, about.
_HANDSHAKE_BYTES = 1000

#: Versions of Produce at which something new began. In the last, topics have ids.
_PRODUCE_VERSIONS = (3, 5, 7, 8, 9, 10, 12, 13)
_PRODUCE_BY_ID = _PRODUCE_VERSIONS[-1]


class PlanMaker:
    """Makes the plan of a producer without transactions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers = 0
        self.brokers = rng.choice((1, 2, 2, 3))
        #: Many small batches in few partitions: what retries could get out of order.
        self.dense = self.chance(0.5)
        #: Time enough for everything: nothing may expire.
        self.patient = self.chance(0.3)
        #: The producer is closed when its users are done, not while they work.
        self.peaceful = self.patient
        #: An answer comes when its batch has just been given up.
        self.late = not self.patient and self.chance(0.12)
        #: Leaders change while they owe answers, and the producer soon hears of it.
        self.handover = self.dense and self.brokers > 1 and self.chance(0.5)
        self.length = rng.choice((0.05, 0.1, 0.2) if self.dense else (0.2, 0.5, 1.0, 3.0))
        if self.handover:
            self.length = 0.3
        self.topics = {"a": rng.choice((1, 1, 2) if self.dense else (1, 2, 3))}
        if self.chance(0.2):
            self.topics["b"] = rng.randint(1, 2)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def span(self, low: float, high: float) -> float:
        return round(self.rng.uniform(low, high), 4)

    def plan(self, seed: int) -> Plan:
        rng = self.rng
        options = self.options()
        cluster = self.cluster(options)
        steps = self.steps(options)
        troubles = self.troubles(options) if self.chance(0.93) else []
        patience: float | None = rng.choice((0.0, 0.05, 0.5, 5.0, 30.0, 30.0, 30.0, None))
        if self.patient:
            patience = None
        close_at = None
        if not self.peaceful:
            close_at = self.span(*rng.choice(((0.2, 1.0), *[(1.0, 1.3)] * 5))) * self.length
            close_at += 0.5 if self.late else 0.0
        if self.chance(0.15):
            troubles += self.stored_and_too_large()
        # Drawn last, so that older seeds keep their plans: as all that is new.
        if self.chance(0.1):
            options["partitioner"] = OWN_PARTITIONER
        if self.chance(0.1):
            steps = [self.slower(step) for step in steps]
        return Plan(
            seed,
            options,
            cluster,
            tuple(sorted(steps, key=lambda step: step.at)),
            tuple(sorted(troubles, key=lambda trouble: trouble.at)),
            close_at=close_at,
            close_timeout=patience,
        )

    def serialized(self, plan: Plan) -> Plan:
        """Its user has serializers. Asked last of all, so that other plans stay as they are."""
        rng = self.rng
        if not self.chance(0.12):
            return plan
        which = rng.choice((("value",), ("value",), ("key", "value"), ("key",)))
        setting: dict[str, Any] = {
            what: rng.choice(("plain", "async", "async", "either", "either")) for what in which
        }
        setting["waits"] = rng.choice(([0.0], [0.0, 0.001], [0.0, 0.005, 0.1], [0.02, 0.0]))
        setting["fails"] = rng.choice((0, 0, 7, 20))
        return dataclasses.replace(plan, cluster={**plan.cluster, "serializers": setting})

    def poured(self, plan: Plan) -> Plan:
        """Users add more than a turn of the loop takes. Asked after all others."""
        if not self.chance(0.3):
            return plan
        turn_bytes = self.rng.choice((1, 1, 500, 1500))
        return dataclasses.replace(plan, cluster={**plan.cluster, "turn_bytes": turn_bytes})

    def squeezed(self, plan: Plan) -> Plan:
        """A turn of the loop compresses a record or a few. Asked last."""
        if plan.options.get("compression_type", "none") == "none" or not self.chance(0.5):
            return plan
        quick_bytes = self.rng.choice((150, 300, 1000))
        return dataclasses.replace(plan, cluster={**plan.cluster, "quick_bytes": quick_bytes})

    def moved(self, plan: Plan) -> Plan:
        """A broker gets another address, or a topic is made again: even later than `serialized`."""
        rng = self.rng
        # Where there is an order to be lost, and much on its way.
        probability = 0.2 if self.dense and plan.options["enable_idempotence"] else 0.03
        moves: list[Trouble] = []
        if self.brokers > 1 and self.chance(probability):
            # One and the same: somebody must still be where the producer looks for its cluster.
            node = self.node()
            moves += [self.broker_moves(node) for _ in range(rng.choice((1, 1, 2)))]
        if self.names_topics_by_id(plan) and self.chance(probability):
            moves += [self.topic_made_again() for _ in range(rng.choice((1, 1, 2)))]
        if not moves:
            return plan
        options = dict(plan.options)
        # The news of it comes before an answer is given up.
        options["metadata_max_age_ms"] = rng.choice((10, 20, 50))
        options["request_timeout_ms"] = max(rng.choice((100, 300)), options["request_timeout_ms"])
        options["delivery_timeout_ms"] = max(
            options["delivery_timeout_ms"], options["linger_ms"] + options["request_timeout_ms"]
        )
        steps = [*plan.steps, *(step for move in moves for step in self.around(move, options))]
        return dataclasses.replace(
            plan,
            options=options,
            steps=tuple(sorted(steps, key=lambda step: step.at)),
            troubles=tuple(sorted((*plan.troubles, *moves), key=lambda trouble: trouble.at)),
        )

    def around(self, move: Trouble, options: Mapping[str, Any]) -> list[Step]:
        """What is sent while that happens, to be on its way or to follow."""
        steps: list[Step] = []
        for after in (0.001, 0.005, 0.02, 0.06, 0.1, 0.2):
            for _ in range(self.rng.choice((0, 2, 6))):
                record = self.record(options, "partitioned", 0.0)
                steps.append(Step(round(move.at + after, 4), "enqueue", (record,)))
        return steps

    def names_topics_by_id(self, plan: Plan) -> bool:
        """By name, a batch for the topic before gets into the next one."""
        return bool(plan.cluster.get("produce_version", _PRODUCE_BY_ID) >= _PRODUCE_BY_ID)

    def broker_moves(self, node: int) -> Trouble:
        """While it owes answers."""
        arguments = {
            "node": node,
            "towards": self.rng.choice(("client", "client", "server")),
            "how": self.rng.choice(("stall", "stall", "black_hole", "none")),
            "lasting": self.rng.choice((0.02, 0.1, 0.5, 2.0)),
        }
        return Trouble(self.span(0, self.length / 2), "broker_moves", arguments)

    def topic_made_again(self) -> Trouble:
        """While a leader of the old one owes an answer, perhaps not the first leader."""
        topic = self.rng.choice(sorted(self.topics))
        arguments: dict[str, Any] = {
            "topic": topic,
            "partition": self.rng.randrange(self.topics[topic]),
            "error": self.rng.choice((None, None, "NOT_LEADER_OR_FOLLOWER", *RETRIABLE[:3])),
            "delay": self.rng.choice((0.0, 0.05, 0.09, 0.2)),
            "times": self.rng.choice((1, 2, 4)),
            "apart": self.rng.choice((0.0, 0.0, 0.005, 0.05, 0.5)),
        }
        if self.chance(0.5):
            arguments["then"] = self.rng.choice(RETRIABLE)
        if self.brokers > 1 and self.chance(0.5):
            arguments["led_by"] = self.node()
        return Trouble(self.span(0, self.length / 2), "topic_made_again", arguments)

    def options(self) -> dict[str, Any]:
        rng = self.rng
        idempotent = self.chance(0.65)
        linger = rng.choice((0, 0, 1, 5) if self.dense else (0, 1, 5, 30))
        request_timeout = rng.choice((100, 300) if self.handover else (30, 100, 300))
        delivery_timeout = (
            linger
            + request_timeout
            + rng.choice((0, 5, 10) if self.late else (0, 50, 300, 2000, 6000))
        )
        # At most so many retries: a history has its cost.
        least_backoff = delivery_timeout // 200
        if self.patient:
            delivery_timeout = PATIENT_MS
        batch_size = rng.choice((1, 120, 120, 200) if self.dense else (1, 200, 400, 1000, 16384))
        # At least one batch, whatever its records.
        memory = max(batch_size, 700) * rng.choice((4, 20, 20) if self.dense else (1, 1, 2, 4, 20))
        options: dict[str, Any] = {
            "enable_idempotence": idempotent,
            "linger_ms": linger,
            "batch_size": batch_size,
            "buffer_memory": memory,
            "max_block_ms": PATIENT_MS
            if self.patient
            else rng.choice((0, 20, 200, 2000, 2000, 60000)),
            "request_timeout_ms": request_timeout,
            "delivery_timeout_ms": delivery_timeout,
            "retry_backoff_ms": rng.choice((1, 5, 20, 100)),
            "retry_backoff_max_ms": max(least_backoff, rng.choice((5, 100, 400))),
            "reconnect_backoff_ms": rng.choice((1, 10, 50)),
            "reconnect_backoff_max_ms": max(least_backoff, rng.choice((50, 200))),
            "socket_connection_setup_timeout_ms": rng.choice((50, 200, 1000)),
            "max_in_flight_requests_per_connection": rng.choice((1, 2, 5, 5, 5)),
        }
        if not idempotent:
            options["acks"] = rng.choice(("all", "all", "all", 1, 1, 0))
            options["retries"] = rng.choice((0, 3, 2147483647, 2147483647, 2147483647))
            # Only then they promise an order.
            options["max_in_flight_requests_per_connection"] = rng.choice((1, 1, 1, 1, 5))
        elif self.chance(0.2) and not self.patient:
            options["retries"] = rng.choice((1, 2, 5))
        if self.chance(0.3):
            options["compression_type"] = rng.choice(("gzip", "snappy", "lz4", "zstd"))
            if options["compression_type"] == "zstd" and self.chance(0.7):
                options["compression_level"] = 15  # too slow for the loop: in a thread
        if self.chance(0.3):
            options["batch_max_bytes"] = rng.choice((0, 500, 3000))
        if self.chance(0.3):
            options["adaptive_linger"] = True
        if self.chance(0.2):
            options["max_request_size"] = rng.choice((400, 1000))
        if self.handover:
            options["metadata_max_age_ms"] = 10
        elif self.chance(0.2):
            options["metadata_max_age_ms"] = max(least_backoff, rng.choice((20, 200)))
        if self.chance(0.1):
            options["metadata_max_idle_ms"] = 5000
        if self.chance(0.1):
            options["metadata_recovery_rebootstrap_trigger_ms"] = rng.choice((50, 300))
        if self.chance(0.1):
            options["connections_max_idle_ms"] = rng.choice((20, 200))
        if self.chance(0.1):
            options["partitioner"] = rng.choice(("round_robin", "murmur3"))
        if self.chance(0.1):
            options["partitioner_availability_timeout_ms"] = rng.choice((5, 100))
        if self.chance(0.1):
            options["partitioner_ignore_keys"] = True
        return options

    def cluster(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rng = self.rng
        cluster: dict[str, Any] = {
            "brokers": self.brokers,
            "topics": self.topics,
            "latency": rng.choice((0.0, 0.0005, 0.001, 0.005)),
        }
        if self.chance(0.15) and not self.patient:
            window = rng.choice((7, 100, 1000))
            patience = min(
                options["request_timeout_ms"], options["socket_connection_setup_timeout_ms"]
            )
            # A network so slow that nobody could ever connect would show nothing.
            if window * patience / 1000 >= 10 * cluster["latency"] * _HANDSHAKE_BYTES:
                cluster["window"] = window
        if self.chance(0.3):
            version = rng.choice(_PRODUCE_VERSIONS)
            if options.get("compression_type") != "zstd" or version >= 7:
                cluster["produce_version"] = version
        if self.chance(0.15):
            cluster["log_append_time"] = True
        if self.chance(0.15):
            cluster["max_message_bytes"] = rng.choice((150, 250, 400))
        if "compression_level" in options:
            cluster["compressing"] = rng.choice((0.0, 0.001, 0.02, 0.5))
        return cluster

    # -- users

    def record(self, options: Mapping[str, Any], style: str, fat: float) -> PlannedRecord:
        rng = self.rng
        topic = rng.choice(sorted(self.topics))
        self.numbers += 1
        size = rng.choice((8, 30, 60)) if rng.random() > fat else rng.choice((150, 300, 600))
        key = partition = None
        if style == "keyed" or (style == "mixed" and self.chance(0.4)):
            key = rng.choice(("k1", "k2", "k3", "k4"))
        if style == "partitioned" or (style == "mixed" and self.chance(0.3)):
            partition = rng.randrange(self.topics[topic])
            if self.chance(0.01) and not self.patient:  # which would wait too long for it
                partition = self.topics[topic]
        return PlannedRecord(self.numbers, topic, size, key, partition)

    def steps(self, options: Mapping[str, Any]) -> list[Step]:
        rng = self.rng
        style = rng.choice(("keyed", "partitioned", "sticky", "mixed"))
        fat = rng.choice((0.0, 0.1, 0.5))
        wanted = rng.choice((20, 40, 60) if self.dense else (5, 10, 20, 40))
        cancels = rng.choice((0.0, 0.1, 0.1, 0.4))
        bursts = self.dense or self.chance(0.3)
        steps: list[Step] = []
        while self.numbers < wanted:
            at = self.span(0.004, self.length)
            together = rng.randint(2, 12) if bursts else 1
            while together > 0 and self.numbers < wanted:
                together -= 1
                steps.append(self.sending(at, options, style, fat, cancels))
        if self.chance(0.6):
            steps.append(Step(0.0, "warm_up", **self.cancelled(cancels / 4)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            at = self.span(0, self.length)
            timeout = rng.choice((None, None, 0.01, 0.2, 5.0))
            steps.append(Step(at, "flush", timeout=timeout, **self.cancelled(cancels)))
        if self.chance(0.15):
            timeout = rng.choice((None, 0.0, 0.02, 1.0))
            at = self.span(self.length / 2, self.length)
            steps.append(Step(at, "close", timeout=timeout, **self.cancelled(cancels)))
        return steps

    def sending(
        self, at: float, options: Mapping[str, Any], style: str, fat: float, cancels: float
    ) -> Step:
        rng = self.rng
        action = rng.choice(
            ("send", "send", "enqueue", "enqueue", "enqueue", "send_nowait", "send_many")
        )
        count = rng.randint(1, 8) if action == "send_many" else 1
        records = tuple(self.record(options, style, fat) for _ in range(count))
        cancelled = {} if action == "send_nowait" else self.cancelled(cancels)
        return Step(at, action, records, waits=self.chance(0.3), **cancelled)

    def slower(self, step: Step) -> Step:
        """What a send_many sends comes bit by bit."""
        if "send_many" not in (step.action, step.how):
            return step
        return dataclasses.replace(step, gap=self.rng.choice(_GAPS))

    def cancelled(self, probability: float) -> dict[str, Any]:
        if not self.chance(probability):
            return {}
        if self.chance(0.5):
            return {"cancel_turns": self.rng.choice((0, 1, 2, 3, 5, 10, 20))}
        return {"cancel_after": self.rng.choice((0.0005, 0.001, 0.002, 0.01, 0.05))}

    # -- troubles

    def kinds(self) -> list[Any]:
        """What may go wrong, as often as it is in the list."""
        return [
            *[self.produce_error] * 5,
            *[self.produce_fault] * 5,
            *[self.other_fault] * 2,
            *[self.leader_moves] * 2,
            *[self.leader_hangs] * (2 if self.brokers > 1 else 0),
            *[self.broker_stops] * 2,
            *[self.broker_pauses] * 2,
            *[self.link_trouble] * 3,
            self.connections_killed,
            self.connects_badly,
            self.smaller_batches,
            self.smaller_batches,
            self.producers_forgotten,
        ]

    def troubles(self, options: Mapping[str, Any]) -> list[Trouble]:
        rng = self.rng
        # Some kinds only: histories in which everything happens are all alike.
        kinds = self.kinds()
        kinds = [rng.choice(kinds) for _ in range(rng.randint(1, 5))]
        if self.handover:
            kinds = [*[self.leader_hangs] * 4, rng.choice(kinds)]
        late = self.late_answer(options) if self.late else []
        return late + [
            Trouble(
                # Often before the first request: a broker that does not know a producer
                # takes more from it than others do.
                0.0 if self.chance(0.3) else self.span(0, self.length),
                *rng.choice(kinds)(options),
            )
            for _ in range(rng.choice((1, 2, 3, 5, 8, 12)))
        ]

    def node(self) -> int:
        return self.rng.randint(1, self.brokers)

    def lasting(self) -> float:
        return self.rng.choice((0.002, 0.02, 0.1, 0.5, 2.0))

    def place(self) -> dict[str, Any]:
        if self.chance(0.5):
            return {}
        topic = self.rng.choice(sorted(self.topics))
        return {"topic": topic, "partition": self.rng.randrange(self.topics[topic])}

    def times(self) -> int:
        return self.rng.choice((1, 1, 1, 2, 3, 10))

    def produce_error(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        fault: dict[str, Any] = {"api": "produce", "times": self.times(), **self.place()}
        which = rng.random()
        if which < 0.35:
            fault["error"] = rng.choice(RETRIABLE)
        elif which < 0.6:
            fault.update(error=rng.choice(_STORED), after_append=True)
        elif which < 0.75:
            fault["error"] = rng.choice(_FINAL)
        elif which < 0.78:
            fault["error"] = rng.choice(_FATAL)
        elif which < 0.9 and options["enable_idempotence"]:
            fault["error"] = rng.choice(_SEQUENCE)
        else:
            fault.update(error="INVALID_RECORD", record_errors=[[0, "bad"]])
        if self.chance(0.2):
            fault["delay"] = self.rng.choice((0.005, 0.05))
        return "fault", fault

    def produce_fault(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        effect = self.broken_answer(options, delay=0.003, throttles=(5, 80), lengths=(0, 3, 10, 30))
        return "fault", {"api": "produce", "times": self.times(), **self.place(), **effect}

    def broken_answer(
        self,
        options: Mapping[str, Any],
        *,
        delay: float,
        throttles: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> dict[str, Any]:
        """It is late or damaged, or there is none. `lengths`: what may be left of it."""
        rng = self.rng
        request_timeout = options["request_timeout_ms"] / 1000
        return rng.choice(
            (
                {"drop": "before"},
                {"drop": "after"},
                {"drop": "after"},
                {"delay": delay},
                {"delay": request_timeout * 0.9},
                {"delay": request_timeout * 1.1},
                {"no_answer": True},
                {"no_answer": True, "after_append": True},
                *({"throttle_ms": throttle} for throttle in throttles),
                {"truncate": rng.choice(lengths)},
                {"corrupt": rng.choice(("correlation_id", "garbage", "size"))},
            )
        )

    def late_answer(self, options: Mapping[str, Any]) -> list[Trouble]:
        """Repeated once, then stored and answered, perhaps after the delivery timeout."""
        fault = {"api": "produce", "delay": options["request_timeout_ms"] / 1000 * 0.7}
        at = self.rng.choice((0.0, self.span(0, self.length / 2)))
        return [
            Trouble(at, "fault", {**fault, "times": 1, "error": "NOT_ENOUGH_REPLICAS"}),
            Trouble(at, "fault", {**fault, "times": 3}),
        ]

    def stored_and_too_large(self) -> list[Trouble]:
        """An answer is lost, and before the batch comes again its topic takes smaller ones only."""
        rng = self.rng
        fault = {"api": "produce", **self.place()}
        at = self.span(0, self.length)
        stored: dict[str, Any] = {"error": rng.choice(_STORED), "after_append": True}
        lost: dict[str, Any] = rng.choice(({"drop": "after"}, {"drop": "before"}, stored))
        return [
            Trouble(at, "fault", {**fault, "times": 1, **lost}),
            Trouble(at, "fault", {**fault, "times": self.times(), "error": "MESSAGE_TOO_LARGE"}),
        ]

    def other_fault(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        api, errors = rng.choice(
            (("metadata", _METADATA), ("init_producer_id", _PRODUCER_ID), ("api_versions", ()))
        )
        fault: dict[str, Any] = {"api": api, "times": self.times()}
        if errors and self.chance(0.5):
            fault["error"] = rng.choice(errors)
        else:
            fault |= rng.choice(
                (
                    {"drop": "before"},
                    {"drop": "after"},
                    {"delay": 0.02},
                    {"delay": 0.5},
                    {"no_answer": True},
                    {"throttle_ms": 30},
                    {"truncate": 6},
                    {"corrupt": "garbage"},
                )
            )
        return "fault", fault

    def leader_moves(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        topic = self.rng.choice(sorted(self.topics))
        partition = self.rng.randrange(self.topics[topic])
        arguments = {"topic": topic, "partition": partition, "node": self.node()}
        if self.chance(0.2):
            arguments["nobody_for"] = self.lasting()
        return "move_leader", arguments

    def leader_hangs(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Another broker leads while an answer of the old leader is waited for."""
        topic = self.rng.choice(sorted(self.topics))
        arguments: dict[str, Any] = {
            "topic": topic,
            "partition": self.rng.randrange(self.topics[topic]),
            "delay": self.rng.choice((0.05, 0.1, 0.2, 1.0)),
            "how": self.rng.choice(("stored", "lost", "lost", "refused", "paused")),
        }
        return "leader_hangs", arguments

    def broker_stops(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return "stop_broker", {"node": self.node(), "lasting": self.lasting()}

    def broker_pauses(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return "pause_broker", {"node": self.node(), "lasting": self.lasting()}

    def connections_killed(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return "kill_connections", {"node": self.node()}

    def link_trouble(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        arguments: dict[str, Any] = {
            "node": self.node(),
            "towards": rng.choice(("server", "client")),
            "how": rng.choice(("split", "stall", "cut", "half_close", "black_hole")),
        }
        if arguments["how"] == "split":
            arguments["sizes"] = rng.choice(([1], [3, 50], [100]))
        elif arguments["how"] == "stall":
            arguments["lasting"] = self.lasting()
        elif arguments["how"] == "cut":
            arguments["after_bytes"] = rng.choice((0, 1, 20, 100, 500))
        return "link", arguments

    def connects_badly(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        how = self.rng.choice(("refuse", "black_hole", "delay"))
        return "connects", {"node": self.node(), "how": how, "lasting": self.lasting()}

    def smaller_batches(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        topic = self.rng.choice(sorted(self.topics))
        size = self.rng.choice((100, 150, 200, 300, 500))
        return "max_message_bytes", {"topic": topic, "size": size, "lasting": self.lasting()}

    def producers_forgotten(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        topic = self.rng.choice(sorted(self.topics))
        partition = self.rng.randrange(self.topics[topic])
        return "forget_producers", {"topic": topic, "partition": partition}
