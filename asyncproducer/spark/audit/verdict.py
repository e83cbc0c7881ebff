"""What the counts of an audit mean for what was claimed. Plain rules, no Spark."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence

from asyncproducer.spark.audit.ledger import DELIVERIES, Entry
from asyncproducer.spark.audit.targets import Target

__all__ = ["Finding", "Verdict", "claim", "judge", "overall", "unseen"]


class Verdict(enum.StrEnum):
    """How a run stands to its claim."""

    CLEAN = "clean"
    #: Nothing is wrong as far as can be seen, and not all can be seen.
    INCOMPLETE = "incomplete"
    VIOLATED = "violated"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one lane in one target, or (run None) that there is no run in it."""

    target: str
    run: int | None
    lane: int | None
    delivery: str
    ordered: bool
    #: Why not all can be seen that the writers did; empty: all can.
    unseen: str = ""
    records: int = 0
    acked: int = 0
    lost: int = 0
    duplicates: int = 0
    phantom: int = 0
    in_doubt: int = 0
    in_doubt_present: int = 0
    corrupt: int = 0
    late: int = 0
    aborted: int | None = None


def claim(target: Target, lane: Sequence[Entry]) -> tuple[str, bool]:
    """What a lane is held to: a delivery, and whether to order. `lane`: the ledger's rows of it.

    That of the target; else that of the rows for its topics, all of them together; else exactly
    once, in order unless the lane has no order in any topic.
    """
    own = [entry for entry in lane if entry.topic in target.topics]
    deliveries = {entry.delivery for entry in own}
    delivery = target.delivery or (deliveries.pop() if len(deliveries) == 1 else "exactly_once")
    ordered = not lane or any(entry.ordered for entry in own or lane)
    return delivery, ordered if target.ordered is None else target.ordered


def unseen(target: Target, lane: Sequence[Entry], judged: Collection[str]) -> str:
    """Why not all can be seen that a lane did; empty: all can.

    `lane`: the ledger's rows of it; `judged`: topics that are compared with the ledger, or with
    those that are.
    """
    if target.of:
        others = ", ".join(sorted(set(target.of).difference(judged)))
        return others and f"what {others} has lost cannot be seen: make a target of it"
    rows = sorted(
        (entry.first_seq, entry.last_seq) for entry in lane if entry.topic in target.topics
    )
    if not rows:
        return (
            "not in the ledger: what is lost behind the last record, or with all of a lane, cannot "
            "be seen"
        )
    due = 0
    for first, last in rows:
        if first > due:
            return f"the ledger tells nothing of {due} to {first - 1}"
        due = max(due, last + 1)
    return ""


#: So many reasons of one kind are told.
_REASONS = 5


def judge(lanes: Sequence[Finding]) -> tuple[Verdict, list[str]]:
    """The verdict on a run in a target, and its reasons, in words: each lane by its own claim."""
    broken: dict[str, dict[int | None, int]] = {}
    for found in lanes:
        for what, number in _broken(found).items():
            if number:
                broken.setdefault(what, {})[found.lane] = number
    if broken:
        return Verdict.VIOLATED, [
            f"{_named(numbers)}: {sum(numbers.values()):,} {what}"
            for what, numbers in broken.items()
        ]
    records, acked = (sum(getattr(found, name) for found in lanes) for name in ("records", "acked"))
    if not records or not acked:
        return Verdict.INCOMPLETE, [
            f"nothing was compared: {records:,} records that take part, {acked:,} to be there"
        ]
    hidden: dict[str, list[int | None]] = {}
    for found in lanes:
        if found.unseen:
            hidden.setdefault(found.unseen, []).append(found.lane)
    reasons = [f"{_named(numbers)}: {why}" for why, numbers in hidden.items()]
    if len(reasons) > _REASONS:
        reasons[_REASONS:] = [f"and {len(reasons) - _REASONS:,} more such reasons"]
    return (Verdict.INCOMPLETE if reasons else Verdict.CLEAN), reasons


def _broken(found: Finding) -> dict[str, int]:
    if found.delivery not in DELIVERIES:
        raise ValueError(f"delivery is {found.delivery!r}, not one of {', '.join(DELIVERIES)}")
    return {
        "lost": found.lost if found.delivery != "at_most_once" else 0,
        "doubled": found.duplicates if found.delivery != "at_least_once" else 0,
        "present, although never acknowledged": found.phantom,
        "with a damaged payload": found.corrupt,
        "out of order": found.late if found.ordered else 0,
    }


def _named(lanes: Collection[int | None]) -> str:
    first, others = next(iter(lanes)), len(lanes) - 1
    return f"lane {first}" + (f" and {others:,} more" if others else "")


def overall(verdicts: list[Verdict]) -> Verdict:
    """The worst. Of none at all: incomplete."""
    for worst in (Verdict.VIOLATED, Verdict.INCOMPLETE):
        if worst in verdicts:
            return worst
    return Verdict.CLEAN if verdicts else Verdict.INCOMPLETE
