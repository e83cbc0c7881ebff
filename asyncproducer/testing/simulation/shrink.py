"""Makes a failing plan small: what is left out one by one, as long as it still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from asyncproducer.testing.simulation.plan import TRANSACTIONAL_ID, Plan, Step

__all__ = ["shrink"]

T = TypeVar("T")

#: What the options become, where that still fails. Those of no plan are left out.
_PLAIN_OPTIONS: dict[str, Any] = {
    "enable_idempotence": True,
    "linger_ms": 0,
    "batch_size": 16384,
    "buffer_memory": 1_000_000,
    "max_block_ms": 60_000,
    "request_timeout_ms": 300,
    "delivery_timeout_ms": 5000,
    "retry_backoff_ms": 20,
    "retry_backoff_max_ms": 100,
    "reconnect_backoff_ms": 10,
    "reconnect_backoff_max_ms": 50,
    "socket_connection_setup_timeout_ms": 1000,
    "max_in_flight_requests_per_connection": 5,
    "transactional_id": TRANSACTIONAL_ID,
    "transaction_timeout_ms": 60_000,
}


def shrink(plan: Plan, fails: Callable[[Plan], bool], attempts: int = 1000) -> Plan:
    """The smallest plan that was found for which `fails`, which asks at most `attempts` times.

    Fewer troubles, steps and records, plainer steps, options and brokers, in this order,
    again and again as long as that helps. `plan` itself fails.
    """
    search = _Search(plan, fails, attempts)
    before = None
    while search.plan != before:
        before = search.plan
        search.drop("troubles")
        search.drop("steps")
        search.simplify(_plainer_steps)
        search.simplify(_plainer_options)
        search.simplify(_plainer_cluster)
    return search.plan


class _Search:
    def __init__(self, plan: Plan, fails: Callable[[Plan], bool], attempts: int) -> None:
        self.plan = plan
        self._fails = fails
        self._left = attempts

    def _take(self, plan: Plan) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        if not self._fails(plan):
            return False
        self.plan = plan
        return True

    def drop(self, field: str) -> None:
        """Leaves out half of the items, then quarters, down to single ones."""
        size = max(1, len(getattr(self.plan, field)) // 2)
        while True:
            start = 0
            while start < len(items := getattr(self.plan, field)):
                fewer = items[:start] + items[start + size :]
                if not self._take(dataclasses.replace(self.plan, **{field: fewer})):
                    start += size
            if size == 1:
                return
            size //= 2

    def simplify(self, candidates: Callable[[Plan], Iterator[Plan]]) -> None:
        """Takes the first candidate that fails, and begins again with it."""
        while any(self._take(plan) for plan in candidates(self.plan)):
            pass


def _replaced(items: Sequence[T], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _plainer_steps(plan: Plan) -> Iterator[Plan]:
    for index, step in enumerate(plan.steps):
        for plainer in _plainer(step):
            yield dataclasses.replace(plan, steps=_replaced(plan.steps, index, plainer))


def _plainer(step: Step) -> Iterator[Step]:
    if step.cancel_after is not None or step.cancel_turns is not None:
        yield dataclasses.replace(step, cancel_after=None, cancel_turns=None)
    if step.waits:
        yield dataclasses.replace(step, waits=False)
    if step.offsets:
        yield dataclasses.replace(step, offsets=False, offsets_first=False, offsets_of=None)
    if step.offsets_of is not None:
        yield dataclasses.replace(step, offsets_of=None)
    if step.offsets_first:
        yield dataclasses.replace(step, offsets_first=False)
    if step.gap:
        yield dataclasses.replace(step, gap=0.0)
    if step.pause:
        yield dataclasses.replace(step, pause=0.0)
    if step.how not in ("", "enqueue"):
        yield dataclasses.replace(step, how="enqueue")
    if step.ends not in ("", "commit"):
        yield dataclasses.replace(step, ends="commit")
    for number in range(len(step.records)):
        if len(step.records) > 1:
            fewer = step.records[:number] + step.records[number + 1 :]
            yield dataclasses.replace(step, records=fewer)
        record = step.records[number]
        if record.key is not None:
            plainer = dataclasses.replace(record, key=None)
            yield dataclasses.replace(step, records=_replaced(step.records, number, plainer))


def _plainer_options(plan: Plan) -> Iterator[Plan]:
    for name, value in plan.options.items():
        options = dict(plan.options)
        if name not in _PLAIN_OPTIONS:
            del options[name]
        elif value != _PLAIN_OPTIONS[name]:
            options[name] = _PLAIN_OPTIONS[name]
        else:
            continue
        yield dataclasses.replace(plan, options=options)
    if plan.close_timeout is not None:
        yield dataclasses.replace(plan, close_timeout=None)


def _plainer_cluster(plan: Plan) -> Iterator[Plan]:
    for name in plan.cluster:
        if name not in ("brokers", "topics", "latency"):
            yield dataclasses.replace(
                plan, cluster={k: v for k, v in plan.cluster.items() if k != name}
            )
