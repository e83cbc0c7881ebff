"""Many histories, in several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import NamedTuple

from asyncproducer.testing.simulation.model import Violation
from asyncproducer.testing.simulation.seeds import make_plan
from asyncproducer.testing.simulation.world import run

__all__ = ["Chunk", "run_many", "run_seeds"]

#: Histories that a process does before it reports.
_AT_ONCE = 50


class Chunk(NamedTuple):
    """What came of some seeds."""

    histories: int
    counters: Counter[str]
    failures: list[tuple[int, list[Violation]]]


def run_seeds(first: int, count: int) -> Chunk:
    """Runs the histories of `count` seeds from `first` on."""
    # What is left then is no garbage: there is less to look through. What is frozen stays for ever.
    gc.collect()
    gc.freeze()
    counters: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        result = run(make_plan(seed))
        counters += result.counters
        if result.violations:
            failures.append((seed, result.violations))
    return Chunk(count, counters, failures)


def run_many(first: int, seeds: int, jobs: int) -> Iterator[Chunk]:
    """Runs the histories of `seeds` seeds from `first` on in `jobs` processes, in any order."""
    starts = range(first, first + seeds, _AT_ONCE)
    sizes = [min(_AT_ONCE, first + seeds - start) for start in starts]
    if jobs == 1:
        yield from map(run_seeds, starts, sizes)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures: list[Future[Chunk]] = list(
            map(pool.submit, [run_seeds] * len(starts), starts, sizes)
        )
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
