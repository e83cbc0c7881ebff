"""python -m asyncproducer.testing.simulation: see `--help`, and docs/simulation.md."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asyncproducer._implementation import IMPLEMENTATION
from asyncproducer.testing.simulation import known as known_seeds
from asyncproducer.testing.simulation.known import KNOWN
from asyncproducer.testing.simulation.many import run_many
from asyncproducer.testing.simulation.model import Violation
from asyncproducer.testing.simulation.mutants import MUTANTS, Mutant, find
from asyncproducer.testing.simulation.plan import Plan
from asyncproducer.testing.simulation.seeds import is_transactional, make_plan
from asyncproducer.testing.simulation.shrink import shrink
from asyncproducer.testing.simulation.world import run

#: Seconds between two lines about the progress.
_TELL_SECONDS = 5.0
#: After so many failing seeds, more would tell nothing new.
_FAILURES = 3
#: How many seeds are tried to find a planted bug, and how many that find it are enough.
_MUTANT_SEEDS, _ENOUGH = 2000, 3
_RECORD = '''"""Which seeds find the planted bugs. Written by `--mutants --record`."""

KNOWN: dict[str, tuple[int, ...]] = {{
{}}}
'''


def simulate(first: int, seeds: int, jobs: int) -> bool:
    """Runs many histories and tells about them. Returns whether all were good."""
    print(
        f"asyncproducer, {IMPLEMENTATION}: seeds {first} to {first + seeds - 1}, {jobs} processes"
    )
    began = told = time.monotonic()
    done = 0
    counters: Counter[str] = Counter()
    failures: list[tuple[int, list[Violation]]] = []
    for chunk in run_many(first, seeds, jobs):
        done += chunk.histories
        counters += chunk.counters
        failures += chunk.failures
        now = time.monotonic()
        if now - told >= _TELL_SECONDS or done == seeds:
            told = now
            speed = done / (now - began)
            print(f"{done:,} histories, {speed:.1f}/s, {len(failures)} failed", flush=True)
        if len(failures) >= _FAILURES:
            break
    print("\nWhat they met:")
    for name, count in sorted(counters.items()):
        print(f"  {count:>12,}  {name}")
    for seed, violations in sorted(failures):
        explain(make_plan(seed), violations)
    print(f"\n{done:,} histories, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return not failures


def explain(plan: Plan, violations: Sequence[Violation]) -> None:
    """Tells what a plan breaks, and the smallest plan that still does."""
    print(f"\nSeed {plan.seed} breaks a promise:")
    for violation in violations[:5]:
        print(f"  {violation}")
    rule = violations[0].rule

    def fails(candidate: Plan) -> bool:
        return any(violation.rule == rule for violation in run(candidate).violations)

    small = shrink(plan, fails)
    print("The smallest history that was found for it (run it again with --plan FILE):")
    print(small.to_json())
    for violation in run(small).violations[:5]:
        print(f"  {violation}")


def replay(plan: Plan, *, verbose: bool) -> bool:
    """Runs one plan and tells all about it. Returns whether it was good."""
    print(plan.to_json())
    if verbose:
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(at)s %(message)s")
        logging.getLogger().handlers[0].addFilter(_with_time)
    result = run(plan, log_level=logging.DEBUG if verbose else None)
    for name, count in sorted(result.counters.items()):
        print(f"  {count:>12,}  {name}")
    print(f"trace {result.trace}")
    for violation in result.violations:
        print(f"  {violation}")
    print("All promises were kept." if not result.violations else "Promises were broken.")
    return not result.violations


def _with_time(record: logging.LogRecord) -> bool:
    try:
        record.at = f"{asyncio.get_running_loop().time():.6f}"
    except RuntimeError:
        record.at = "-"
    return True


def find_mutants(mutants: Sequence[Mutant], seeds: int, *, record: bool) -> bool:
    """Looks for each planted bug. Returns whether all were found."""
    known = dict(KNOWN)
    for mutant in mutants:
        others = (seed for seed in range(seeds) if is_transactional(seed) is mutant.transactional)
        # Those that are known to find it come first: some bugs show once in thousands.
        tried = [*dict.fromkeys([*KNOWN.get(mutant.name, ()), *others])]
        search = find(mutant, tried, _ENOUGH)
        known[mutant.name] = search.seeds
        how = ", ".join(f"{rule} {count}" for rule, count in search.rules.most_common())
        print(f"{mutant.name}: ", end="")
        if search.seeds:
            print(f"seeds {list(search.seeds)} of {search.tried}: {how}", flush=True)
        else:
            wanted = " or ".join(mutant.rules)
            print(f"NOT FOUND in {search.tried} ({wanted}): {how or 'nothing'}", flush=True)
    if record:
        names = [mutant.name for mutant in MUTANTS]
        lines = [f'    "{name}": {known[name]},\n' for name in names if name in known]
        Path(known_seeds.__file__).write_text(_RECORD.format("".join(lines)))
    survived = [mutant.name for mutant in mutants if not known[mutant.name]]
    print(f"{len(mutants)} planted bugs, {len(survived)} not found")
    return not survived


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0 where all promises were kept."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncproducer.testing.simulation",
        description="Runs the producer through histories of faults on virtual time.",
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many histories (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--fresh", action="store_true", help="begin at a seed by chance instead")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)"
    )
    parser.add_argument("--seed", type=int, help="run this one, and tell all about it")
    parser.add_argument("--plan", type=Path, help="run the plan in this file (JSON)")
    parser.add_argument("--verbose", action="store_true", help="with the log of --seed or --plan")
    parser.add_argument("--mutants", action="store_true", help="look for planted bugs")
    parser.add_argument("--mutant", default="", help="only for those with this in their names")
    parser.add_argument(
        "--record", action="store_true", help="write down the seeds that find planted bugs"
    )
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.jobs < 1:
        parser.error("--seeds and --jobs are 1 at least")
    if given.mutants or given.mutant:
        if IMPLEMENTATION == "compiled":
            parser.error("bugs are planted in the sources: set ASYNCPRODUCER_IMPL=python")
        chosen = [mutant for mutant in MUTANTS if given.mutant in mutant.name]
        good = bool(chosen) and find_mutants(
            chosen, max(given.seeds, _MUTANT_SEEDS), record=given.record
        )
    elif given.plan is not None:
        good = replay(Plan.from_json(given.plan.read_text()), verbose=given.verbose)
    elif given.seed is not None:
        good = replay(make_plan(given.seed), verbose=given.verbose)
    else:
        first = random.SystemRandom().randrange(10**9) if given.fresh else given.first
        good = simulate(first, given.seeds, given.jobs)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
