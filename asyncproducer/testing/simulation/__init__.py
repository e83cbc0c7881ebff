"""Deterministic simulation: the whole producer through histories of faults, checked by a model.

    python -m asyncproducer.testing.simulation --seeds 100000

    plan.py     a history as data, made from a seed
    world.py    runs it: virtual time, a network in memory, the embedded brokers
    model.py    what must be true of what was seen
    shrink.py   makes a failing plan small
    mutants.py  planted bugs, which must be found

See docs/simulation.md.
"""

from __future__ import annotations

from asyncproducer.testing.simulation.model import Violation, check
from asyncproducer.testing.simulation.plan import Plan
from asyncproducer.testing.simulation.seeds import make_plan
from asyncproducer.testing.simulation.shrink import shrink
from asyncproducer.testing.simulation.world import Result, run

__all__ = ["Plan", "Result", "Violation", "check", "make_plan", "run", "shrink"]
