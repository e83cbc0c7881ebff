"""Tickets: how a process that must die, or wait, at a step of the protocol learns of it.

A ticket is a file with the name of the step. Who comes to the step takes it by giving it another
name, with its own process id in it, which only one can do. Then it dies, or waits until that file
is gone. The other half is hook/sitecustomize.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Claim", "Tickets"]


class Claim(NamedTuple):
    """Who has taken a ticket."""

    pid: int
    #: What it was about to deliver: the name of its marker; of a driver nothing.
    unit: str


class Tickets:
    """One ticket at a time, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory

    def issue(self, step: str, order: Literal["die", "wait"]) -> None:
        """The next process at the step does so."""
        new = self.directory / ".new"
        new.write_text(order, encoding="utf-8")
        new.rename(self.directory / step)

    def claim(self, step: str) -> Claim | None:
        """Who has taken it, if somebody has."""
        for path in self.directory.glob(f"{step}.*"):
            _, pid, unit = path.name.split(".", 2)
            return Claim(int(pid), unit)
        return None

    def clear(self) -> None:
        """Nobody takes it any more, and who waits goes on."""
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)
