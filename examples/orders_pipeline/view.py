"""What is to be seen while the pipeline runs: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orders_pipeline.stages import Status

__all__ = ["Picture", "StagePicture", "View", "line", "table"]

#: Between two lines, where there is no terminal.
_LINE_S = 5.0
_EVENTS = 8


@dataclass
class StagePicture:
    """One stage at one moment."""

    name: str
    state: str = "starting"
    starts: int = 0
    #: Records of the source that it has not done yet, transactions' markers included.
    lag: int = 0
    #: Records of the source per second, lately.
    rate: float = 0.0
    status: Status = field(default_factory=Status)


@dataclass
class Picture:
    """All of it at one moment."""

    orders: int
    kills: int
    stages: list[StagePicture]
    sent: int = 0
    killed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def table(picture: Picture) -> Table:
    """For a terminal."""
    title = (
        f"{picture.sent:,} of {picture.orders:,} orders sent, {len(picture.killed)} of "
        f"{picture.kills} kills, {picture.seconds:.0f} s"
    )
    found = Table(title=title, title_justify="left")
    names = ("stage", "state", "starts", "batch", "rows", "batch s", "rows/s", "lag")
    for name in (*names, "age p50 ms", "p99"):
        found.add_column(name, justify="left" if name in ("stage", "state") else "right")
    for stage in picture.stages:
        status = stage.status
        found.add_row(
            stage.name,
            stage.state,
            str(stage.starts),
            str(status.batch) if status.batch >= 0 else "",
            f"{status.rows:,}",
            f"{status.seconds:.2f}",
            f"{stage.rate:,.0f}",
            f"{stage.lag:,}",
            f"{status.age_p50_ms:,.0f}",
            f"{status.age_p99_ms:,.0f}",
        )
    return found


def line(picture: Picture) -> str:
    """For a log."""
    stages = "; ".join(
        f"{stage.name} {stage.state}, lag {stage.lag:,}, {stage.rate:,.0f}/s, age p50 "
        f"{stage.status.age_p50_ms:,.0f} ms p99 {stage.status.age_p99_ms:,.0f} ms"
        for stage in picture.stages
    )
    return f"{picture.seconds:.0f} s: {picture.sent:,} sent; {stages}"


class View:
    """Shows pictures, and what happens."""

    def __init__(self, picture: Picture) -> None:
        self._console = Console()
        self._picture = picture
        self._events: list[str] = []
        self._next = 0.0
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live.is_started:
            self.show()
            self._live.stop()

    def show(self) -> None:
        """The picture as it is now."""
        if self._live.is_started:
            events = Text("\n".join(self._events[-_EVENTS:]))
            self._live.update(Group(table(self._picture), events), refresh=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_S
            self.say(line(self._picture))

    def tell(self, event: str) -> None:
        """Something has happened."""
        event = f"{self._picture.seconds:6.1f} s  {event}"
        self._events.append(event)
        if not self._live.is_started:
            self.say(event)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
