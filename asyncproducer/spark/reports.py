"""What tasks tell the driver, and what the driver makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncproducer.records import OffsetRange, TopicPartition

__all__ = ["CommitReport", "TaskReport"]


@dataclass(frozen=True)
class TaskReport:
    """What became of the rows of one task. Picklable."""

    task: int
    #: Rows that were written, and rows that an earlier attempt had written already.
    rows: int = 0
    skipped: int = 0
    #: Of the keys and values that were written.
    bytes: int = 0
    #: Where they are: first and last offset, and how many, for each partition.
    offsets: Mapping[TopicPartition, OffsetRange] = field(default_factory=dict)
    #: Records that had to be sent again.
    retries: int = 0
    #: From the first look at the rows to the last acknowledgement (or commit).
    seconds: float = 0.0
    #: Of the Produce requests lately: on average, and at most.
    latency_ms: float = 0.0
    latency_ms_max: float = 0.0
    #: The Kafka partition that its rows were read from, with marker=source: "orders-5".
    source: str = ""


@dataclass(frozen=True)
class CommitReport:
    """One micro-batch, or one job."""

    batch: int | None
    tasks: tuple[TaskReport, ...]

    @classmethod
    def of(cls, batch: int | None, tasks: Iterable[TaskReport]) -> CommitReport:
        """The tasks by their number."""
        return cls(batch, tuple(sorted(tasks, key=lambda each: each.task)))

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return sum(each.rows for each in self.tasks)

    @property
    def offsets(self) -> dict[TopicPartition, OffsetRange]:
        """Where they are: first and last offset, and how many, for each partition."""
        merged: dict[TopicPartition, OffsetRange] = {}
        for task in self.tasks:
            for place, new in task.offsets.items():
                old = merged.get(place, new._replace(records=0))
                merged[place] = OffsetRange(
                    min(old.first, new.first), max(old.last, new.last), old.records + new.records
                )
        return dict(sorted(merged.items()))

    def as_dict(self) -> dict[str, Any]:
        """For logs and files: sums, and the offsets as text -> [first, last, records]."""
        slowest = max((each.seconds for each in self.tasks), default=0.0)
        return {
            "batch": self.batch,
            "tasks": len(self.tasks),
            "rows": self.rows,
            "skipped": sum(each.skipped for each in self.tasks),
            "bytes": sum(each.bytes for each in self.tasks),
            "retries": sum(each.retries for each in self.tasks),
            "seconds": round(slowest, 3),
            "latency_ms": round(max((t.latency_ms for t in self.tasks), default=0.0), 1),
            "latency_ms_max": round(max((t.latency_ms_max for t in self.tasks), default=0.0), 1),
            "offsets": {str(place): list(found) for place, found in self.offsets.items()},
        }

    def __str__(self) -> str:
        return json.dumps(self.as_dict())
