"""What is judged as one: a topic, or several that share the records between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from asyncproducer.spark.audit.ledger import DELIVERIES

__all__ = ["Target", "TargetError", "check", "grounded", "parse_target", "with_sources"]


class TargetError(ValueError):
    """A target that cannot be, or that contradicts another; the message says what to change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Topics that together hold each record once.

    What they must hold is told by the ledger's entries for these topics; or, with `of`, it is what
    the audit finds in other topics (of the stage before).
    """

    name: str
    topics: tuple[str, ...]
    of: tuple[str, ...] = ()
    #: A filter was before: what is not here need not be lost. Only with `of`.
    partial: bool = False
    #: Whether numbers must ascend; None: as the ledger claims of each lane, see docs/audit.md.
    ordered: bool | None = None
    #: One of DELIVERIES; None: as the ledger claims of each lane for these topics, or exactly once.
    delivery: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.topics or not all(self.topics + self.of):
            raise TargetError(f"target {self.name!r} needs a name, and topics with names")
        if self.partial and not self.of:
            raise TargetError(
                f"target {self.name!r} is partial: tell of which topics, with of=TOPIC"
            )
        own = sorted(set(self.topics) & set(self.of))
        if own:
            raise TargetError(
                f"target {self.name!r} is compared with {', '.join(own)}, a topic of its own: name "
                "in of=TOPIC those of the stage before"
            )
        if self.delivery not in (None, *DELIVERIES):
            known = ", ".join(DELIVERIES)
            raise TargetError(
                f"target {self.name!r}: delivery is {self.delivery!r}, not one of {known}"
            )


def parse_target(text: str) -> Target:
    """A target as the command line has it: TOPIC, or NAME=TOPIC+TOPIC, and after it any of
    :of=TOPIC+TOPIC, :partial, :unordered, :at_least_once (or another claim).

    Raises TargetError.
    """
    head, *words = text.split(":")
    name, _, topics = head.partition("=")
    of: tuple[str, ...] = ()
    partial, ordered, delivery = False, None, None
    for word in words:
        if word.startswith("of="):
            of = tuple(word.removeprefix("of=").split("+"))
        elif word == "partial":
            partial = True
        elif word == "unordered":
            ordered = False
        elif word in DELIVERIES:
            delivery = word
        else:
            known = ", ".join(("of=TOPIC+...", "partial", "unordered", *DELIVERIES))
            raise TargetError(f"{word!r} in target {text!r} is not one of {known}")
    return Target(name, tuple((topics or name).split("+")), of, partial, ordered, delivery)


def check(targets: Sequence[Target]) -> None:
    """Raises TargetError for none, or for two of one name."""
    names = [target.name for target in targets]
    if not names:
        raise TargetError("nothing to audit: name a topic or a target")
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise TargetError(f"more than one target is named {', '.join(doubled)}")


def grounded(targets: Sequence[Target]) -> set[str]:
    """The topics that are judged by the ledger, or by topics that are."""
    topics: set[str] = set()
    for _ in targets:  # more rounds than this find no more
        for target in targets:
            if topics.issuperset(target.of):
                topics.update(target.topics)
    return topics


def with_sources(targets: Sequence[Target], ledger: Collection[str]) -> list[Target]:
    """The targets, and behind them each topic of an `of=` that the ledger names and none judges.

    `ledger`: the topics that it names. What such a topic has lost, its target cannot know.
    """
    sources = {topic for target in targets for topic in target.of} & set(ledger)
    unused = sources - grounded(targets) - {target.name for target in targets}
    return [*targets, *(Target(topic, (topic,)) for topic in sorted(unused))]
