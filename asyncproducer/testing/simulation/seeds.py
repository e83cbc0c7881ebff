"""From a seed to its plan."""

from __future__ import annotations

import random

from asyncproducer.testing.simulation.making import PlanMaker
from asyncproducer.testing.simulation.plan import Plan
from asyncproducer.testing.simulation.transactional import TransactionalPlanMaker

__all__ = ["is_transactional", "make_plan"]


def is_transactional(seed: int) -> bool:
    """Whether the producer of this seed has transactions: that of each third."""
    return seed % 3 == 2


def make_plan(seed: int) -> Plan:
    """The plan of this seed: always the same in one version of what makes it."""
    maker = TransactionalPlanMaker if is_transactional(seed) else PlanMaker
    makes = maker(random.Random(seed))
    return makes.squeezed(makes.poured(makes.moved(makes.serialized(makes.plan(seed)))))
