"""What happens in one history, as data: made from a seed, shrunk, printed, run again.

Nothing is decided by chance while a history runs: all of that is in its plan.
`seeds.make_plan` makes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

__all__ = [
    "GROUP",
    "OWN_PARTITIONER",
    "PATIENT_MS",
    "TRANSACTIONAL_ID",
    "Plan",
    "PlannedRecord",
    "Step",
    "Trouble",
]

#: A delivery timeout that lasts longer than all troubles of a plan together.
PATIENT_MS = 120_000

#: Of those plans that have transactions: the producer's, and whose offsets they commit.
TRANSACTIONAL_ID, GROUP = "simulated", "readers"

#: What the option `partitioner` is where users have one of their own, which raises at times.
OWN_PARTITIONER = "own"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A record that somebody will send. `number` is its own, in all of the plan."""

    number: int
    topic: str
    size: int
    key: str | None = None
    partition: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a user does, `at` so many seconds after the start, in a task of its own.

    `action`: "warm_up", "send", "enqueue", "send_nowait" (one record), "send_many", "flush",
    "close", "transaction".
    `waits`: for the delivery, too (enqueue). `timeout`: of flush and close. `gap`: seconds before
    each record of a send_many, which is given an async iterator then.
    The task is cancelled `cancel_after` seconds or `cancel_turns` turns of the loop later.

    A transaction begins when the one before has its end. Its records are sent, `how` like an
    action of their own, or all "together"; then, with `offsets`, those of a group (once more the
    ones of transaction `offsets_of`), or with `offsets_first` before them; then it `ends` after a
    `pause`: by "commit" or "abort", as a "block" or one that "fails", or it is "left" open. Of its
    calls the one that `cancels` says is cancelled: "records", "offsets" or "end".
    """

    at: float
    action: str
    records: tuple[PlannedRecord, ...] = ()
    waits: bool = False
    timeout: float | None = None
    gap: float = 0.0
    cancel_after: float | None = None
    cancel_turns: int | None = None
    transaction: int | None = None
    how: str = ""
    offsets: bool = False
    offsets_first: bool = False
    offsets_of: int | None = None
    ends: str = ""
    pause: float = 0.0
    cancels: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong, and when. `World` has a method for each `kind`, with these arguments."""

    at: float
    kind: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All of a history. `cluster`: what is around the producer, from the network and the brokers
    to its user's serializers."""

    seed: int
    options: Mapping[str, Any]
    cluster: Mapping[str, Any]
    steps: tuple[Step, ...]
    troubles: tuple[Trouble, ...]
    #: When the producer is closed at the latest, and with which timeout. None: when all
    #: users are done.
    close_at: float | None
    close_timeout: float | None

    @property
    def record_count(self) -> int:
        """How many records are to be sent."""
        return sum(len(step.records) for step in self.steps)

    def to_json(self) -> str:
        """For a file that `from_json` reads, and for people: one step a line."""

        def shown(item: Any) -> str:
            return json.dumps(_without_defaults(dataclasses.asdict(item)))

        def block(items: tuple[Any, ...]) -> str:
            return "[" + ",".join(f"\n  {shown(item)}" for item in items) + "]"

        return (
            f'{{"seed": {self.seed},\n'
            f' "options": {json.dumps(dict(self.options))},\n'
            f' "cluster": {json.dumps(dict(self.cluster))},\n'
            f' "steps": {block(self.steps)},\n'
            f' "troubles": {block(self.troubles)},\n'
            f' "close_at": {json.dumps(self.close_at)},\n'
            f' "close_timeout": {json.dumps(self.close_timeout)}}}'
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """What `to_json` has written. Raises KeyError, TypeError or ValueError."""
        fields = json.loads(text)
        fields["steps"] = tuple(
            Step(**{**step, "records": tuple(PlannedRecord(**r) for r in step.get("records", ()))})
            for step in fields["steps"]
        )
        fields["troubles"] = tuple(Trouble(**trouble) for trouble in fields["troubles"])
        return cls(**fields)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_defaults(item)
            for name, item in value.items()
            if not (item is None or item is False or item == () or item == "")
        }
    return [_without_defaults(item) for item in value] if isinstance(value, tuple) else value
