"""Which process is killed when: each kind at each step of the protocol, and anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["DRIVER_STEPS", "MAKING", "TASK_STEPS", "TELLING", "Kill", "Victim", "plan", "steps"]

#: A Python worker of an executor, the JVM of an executor, the driver with its JVM, the Python
#: process beside the driver in which `commit` runs, a broker.
Victim: TypeAlias = Literal["worker", "executor", "driver", "planner", "broker"]

#: Of a task, in their order, by how it delivers. hook/sitecustomize.py says where each one is.
TASK_STEPS = {
    "exactly_once": (
        *("fencing", "fenced", "marker-read", "producing", "marker-sent"),
        *("produced", "ending", "ended", "reporting"),
    ),
    "at_least_once": ("producing", "produced", "reporting"),
}
#: Before and after the sink's part in the commit of a batch.
DRIVER_STEPS = ("committing", "committed")

#: A function of the query, in a Python worker of its own, has made some of the rows of a task.
MAKING = "making"

#: In the first commit of a driver: what marker=source keeps of the query itself is sent, and its
#: transaction open.
TELLING = "telling"

_AT_TASK_STEPS: tuple[Victim, ...] = ("worker", "worker", "executor", "driver", "broker")
_AT_DRIVER_STEPS: tuple[Victim, ...] = ("planner", "driver", "executor", "broker")
_ANYWHERE: tuple[Victim, ...] = (*("worker",) * 4, "executor", "executor", "driver", "broker")


@dataclass(frozen=True)
class Kill:
    """A `kill -9`: when a process is at the step, which is the victim or waits; or anywhere."""

    victim: Victim
    step: str | None
    #: In seconds: from the step, or from whenever its turn comes.
    delay: float
    #: The next one comes only when a batch was committed again.
    rest: bool

    def __str__(self) -> str:
        return f"{self.victim}, {self.step or 'anywhere'}"


def steps(delivery: str, keyings: Collection[str]) -> list[str]:
    """All that there are, in their order."""
    told = delivery == "exactly_once" and "source" in keyings
    at_end = [*DRIVER_STEPS[:1], *([TELLING] * told), *DRIVER_STEPS[1:]]
    return [MAKING, *TASK_STEPS[delivery], *at_end]


def plan(count: int, seed: int, delivery: str, keyings: Collection[str]) -> list[Kill]:
    """So many kills: all kinds of them in each round, in another order each time."""
    chance = random.Random(seed)
    round_: list[tuple[Victim, str | None]] = [
        ("worker", MAKING),
        *itertools.product(_AT_TASK_STEPS, TASK_STEPS[delivery]),
        *itertools.product(_AT_DRIVER_STEPS, DRIVER_STEPS),
        *((victim, None) for victim in _ANYWHERE),
    ]
    if TELLING in steps(delivery, keyings):
        round_ += [("planner", TELLING), ("driver", TELLING)]

    def rounds() -> Iterator[tuple[Victim, str | None]]:
        while True:
            yield from chance.sample(round_, len(round_))

    return [
        Kill(
            victim,
            step,
            round(chance.uniform(0, 0.3 if step else 1.5), 3),
            chance.random() < 0.75,
        )
        for victim, step in itertools.islice(rounds(), count)
    ]
