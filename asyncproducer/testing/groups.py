"""Consumer groups, as far as a producer sees them: members that a test wrote down, and offsets.

Nobody can join. A group that nobody described has no members, and takes offsets from
whoever claims none either, as Kafka's groups do for consumers that assign for themselves.
Offsets of a transaction are pending until its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.state import RequestRefused

__all__ = ["CommittedOffset", "Group", "Groups", "Offsets"]


class CommittedOffset(NamedTuple):
    """Where a group goes on with a partition."""

    offset: int
    leader_epoch: int = -1
    metadata: str | None = ""


#: By topic and partition.
Offsets: TypeAlias = dict[tuple[str, int], CommittedOffset]


@dataclasses.dataclass(slots=True)
class Group:
    """One group. `members`: member id -> group.instance.id, None without one."""

    generation: int = -1
    members: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    offsets: Offsets = dataclasses.field(default_factory=dict)
    #: By the producer id of the transaction.
    pending: dict[int, Offsets] = dataclasses.field(default_factory=dict)

    def check(self, generation: int, member_id: str, instance_id: str | None) -> None:
        """ClassicGroup.validateOffsetCommit, for a transaction. Raises RequestRefused."""
        if generation < 0 and (not self.members or (not member_id and instance_id is None)):
            return
        if instance_id is not None:
            owner = next((m for m, known in self.members.items() if known == instance_id), None)
            if owner is None:
                raise RequestRefused(ErrorCode.UNKNOWN_MEMBER_ID)
            if owner != member_id:
                raise RequestRefused(ErrorCode.FENCED_INSTANCE_ID)
        elif member_id not in self.members:
            raise RequestRefused(ErrorCode.UNKNOWN_MEMBER_ID)
        if generation != self.generation:
            raise RequestRefused(ErrorCode.ILLEGAL_GENERATION)


class Groups:
    """The groups of one cluster."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def get(self, group_id: str) -> Group:
        """A group, which is empty when nobody knows it."""
        return self._groups.get(group_id, Group())

    def describe(self, group_id: str, generation: int, members: Mapping[str, str | None]) -> None:
        """Writes down who is in a group."""
        group = self._groups.setdefault(group_id, Group())
        group.generation, group.members = generation, members

    def check(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None
    ) -> None:
        """Raises RequestRefused unless this member may commit offsets in a transaction."""
        group = self._groups.get(group_id)
        if group is not None:
            group.check(generation, member_id, instance_id)
        elif generation >= 0:
            raise RequestRefused(ErrorCode.ILLEGAL_GENERATION)

    def add_pending(self, group_id: str, producer_id: int, offsets: Offsets) -> None:
        """Offsets that count when the producer's transaction is committed."""
        group = self._groups.setdefault(group_id, Group())
        group.pending.setdefault(producer_id, {}).update(offsets)

    def end_transaction(self, group_id: str, producer_id: int, *, committed: bool) -> None:
        """Makes a transaction's offsets the group's, or forgets them."""
        group = self.get(group_id)
        offsets = group.pending.pop(producer_id, {})
        if committed:
            group.offsets.update(offsets)
