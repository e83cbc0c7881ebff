"""How the package was built that runs: a figure belongs to that, too."""

from __future__ import annotations

from pathlib import Path

from asyncproducer import IMPLEMENTATION, intake

__all__ = ["built"]


def built() -> str:
    """ "python", "compiled", or "profiled": compiled by the counts of a training (setup.py)."""
    if IMPLEMENTATION == "compiled" and b"-fprofile-use" in Path(intake.__file__).read_bytes():
        return "profiled"  # GCC has recorded its switches
    return IMPLEMENTATION
