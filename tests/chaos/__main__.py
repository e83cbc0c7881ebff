"""`python -m tests.chaos --faults 100`: three real brokers, faults of every kind, and a ledger.

Several producers send numbered records through a proxy (asyncproducer.testing.FaultProxy) to
three real brokers. Meanwhile two lines of faults go on side by side: of the brokers (SIGKILL,
SIGTERM, SIGSTOP, elections, too few replicas, other addresses, no quorum), and of the wire (cuts
before and after the broker acted, truncated frames, delays, throttling, black holes, refusals).
Afterwards a consumer that is not ours reads all of it, and each record is compared with what the
producer said of it, and each offset that a transaction has sent for a group with its records.

Exit status: 0 if so many faults happened, and nothing was lost, doubled, reordered or unexplained
beyond what the options of a load promise; 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncproducer.cli.clusters import quiet, read
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.proxy import FaultPlan, FaultProxy
from tests.chaos.faults import BROKER_FAULTS, OF_TRANSACTIONS, WIRE_FAULTS, Chaos, Fault
from tests.chaos.loads import LOADS, Load, Outcome
from tests.chaos.offsets import committed_log, committed_offset

PARTITIONS = 6

#: Of the faults, so much is the wire's share: they take less time.
WIRE_SHARE = 0.6

#: The longest rest between two faults of a line, in seconds: both lines end at about the same time.
RESTS = {"wire": 4.0, "brokers": 1.0}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=15.0, help="at most; default: %(default)s")
    parser.add_argument("--seed", type=int, help="of what goes wrong; default: any")
    parser.add_argument("--rate", type=int, default=200, help="records/s of each load")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    parser.add_argument(
        "--transaction-version", type=int, choices=[1, 2], help="default: Kafka's own"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*BROKER_FAULTS, *WIRE_FAULTS], metavar="FAULT"
    )
    parser.add_argument("--json", type=Path, help="write the ledgers there")
    parser.add_argument("--log", type=Path, help="write what the producers log there")
    options = parser.parse_args(arguments)
    options.seed = random.randrange(2**32) if options.seed is None else options.seed
    return options


def main() -> int:
    options = parse()
    quiet("aiokafka")
    if options.log:
        logging.basicConfig(
            filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
    else:
        quiet("asyncproducer")
    version = options.transaction_version
    features = {"transaction.version": version} if version else {}
    with KafkaCluster(3, own=True, features=features) as cluster:
        return asyncio.run(Run(options, cluster).run())


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Run:
    def __init__(self, options: argparse.Namespace, cluster: KafkaCluster) -> None:
        self.options = options
        self.cluster = cluster
        self.began = time.monotonic()
        self.happened: list[str] = []
        self.unsettled: list[str] = []
        self.outcomes: list[Outcome] = []

    async def run(self) -> int:
        options, cluster = self.options, self.cluster
        tell(f"seed {options.seed}")
        async with FaultProxy(cluster.bootstrap_servers, FaultPlan(seed=options.seed)) as proxy:
            servers = proxy.bootstrap_servers
            loads = [
                Load(name, servers, f"chaos-{options.seed}-{name}", options.rate)
                for name in options.loads
            ]
            for load in loads:
                await asyncio.to_thread(cluster.create_topic, load.topic, partitions=PARTITIONS)
            try:
                for load in loads:
                    await load.start()
                await self._break(proxy, loads)
                tell("sending ends, waiting for the end of each record")
                for load in loads:
                    await load.end()
            finally:
                for load in loads:
                    await load.producer.close(0)
        for load in loads:
            starts = dict.fromkeys(range(PARTITIONS), 0)
            async for record in read(cluster.bootstrap_servers, load.topic, starts, load.reading):
                load.ledger.read(*record)
            if load.promise.transactional:
                # First where it is: that waits until no transaction holds back anything.
                load.offset_found = await committed_offset(cluster, load.group, load.topic)
                load.logged_offsets = await committed_log(cluster, load.group, load.topic)
        self.outcomes = [load.outcome() for load in loads]
        return self._report(self.outcomes)

    async def _break(self, proxy: FaultProxy, loads: list[Load]) -> None:
        """Two lines of faults, each with random numbers of its own, side by side."""
        only = self.options.only
        wire, brokers = (
            {
                name: fault
                for name, fault in faults.items()
                if (not only or name in only)
                and ("transactional" in self.options.loads or name not in OF_TRANSACTIONS)
            }
            for faults in (WIRE_FAULTS, BROKER_FAULTS)
        )
        count = self.options.faults
        share = WIRE_SHARE if not only else len(wire) / (len(wire) + len(brokers))
        of_wire = round(count * share)
        async with asyncio.TaskGroup() as lines:
            for name, faults, number in (
                ("wire", wire, of_wire),
                ("brokers", brokers, count - of_wire),
            ):
                rng = random.Random(f"{self.options.seed}/{name}")
                chaos = Chaos(self.cluster, proxy, loads, rng)
                lines.create_task(self._line(chaos, shuffled(faults, number, rng), RESTS[name]))

    async def _line(self, chaos: Chaos, faults: Iterator[tuple[str, Fault]], rest: float) -> None:
        for name, fault in faults:
            before = time.monotonic()
            if before - self.began > self.options.minutes * 60:
                return
            under_way = sum(load.ledger.open for load in chaos.loads)
            try:
                what = await fault(chaos)
            except (OSError, RuntimeError) as error:  # TimeoutError, AdminError, KafkaUnavailable
                what = f"DID NOT SETTLE: {error!r:.200}"
                self.unsettled.append(f"{name}: {error!r}")
                await asyncio.to_thread(self.cluster.heal)
            self.happened.append(name)
            now = time.monotonic()
            tell(
                f"{now - self.began:7.1f} s  {len(self.happened):3} of {self.options.faults}"
                f"  {name} ({now - before:.1f} s, {under_way} under way): {what}"
            )
            await chaos.a_while(rest)

    def _report(self, outcomes: list[Outcome]) -> int:
        seconds = time.monotonic() - self.began
        tell(f"\n{len(self.happened)} faults in {seconds:.0f} s, seed {self.options.seed}")
        for name, number in sorted(Counter(self.happened).items()):
            tell(f"  {number:3} {name}")
        rows: dict[str, list[object]] = {}
        for outcome in outcomes:
            rows.setdefault("", []).append(outcome.name)
            for field, value in (
                *dataclasses.asdict(outcome.verdict).items(),
                ("retries", outcome.retries),
                ("epoch_bumps", outcome.epoch_bumps),
                ("commits", outcome.commits),
                ("aborts", outcome.aborts),
                *dataclasses.asdict(outcome.offsets).items(),
                ("longest_delivery_s", f"{outcome.longest_delivery_s:.1f}"),
            ):
                allowed = "*" if field in outcome.promise.allows and value else ""
                rows.setdefault(field, []).append(f"{value}{allowed}")
        for field, values in rows.items():
            tell(f"{field:<20}" + "".join(f"{value!s:>15}" for value in values))
        tell("* what the options of this load do not promise:")
        for outcome in outcomes:
            if outcome.promise.allows:
                tell(f"  {outcome.name}: {outcome.promise.why}")
        problems = [f"{o.name}: {n} {what}" for o in outcomes for what, n in o.wrong.items()]
        problems += self.unsettled
        if len(self.happened) < self.options.faults:
            problems.append(
                f"only {len(self.happened)} of {self.options.faults} faults in"
                f" {self.options.minutes} minutes"
            )
        for problem in problems:
            tell(f"✗ {problem}")
        if not problems:
            for outcome in outcomes:
                found = {
                    name: getattr(outcome.verdict, name)
                    for name in ("lost", "doubled", "reordered")
                }
                told = ", ".join(f"{number} {name}" for name, number in found.items())
                promised = "" if not any(found.values()) else " (not promised)"
                tell(f"✓ {outcome.name}: {told}{promised}, 0 unexplained")
        if self.options.json:
            document = {
                "seed": self.options.seed,
                "seconds": seconds,
                "faults": Counter(self.happened),
                "problems": problems,
                "loads": {
                    o.name: {
                        **dataclasses.asdict(o.verdict),
                        "retries": o.retries,
                        "epoch_bumps": o.epoch_bumps,
                        "commits": o.commits,
                        "aborts": o.aborts,
                        **dataclasses.asdict(o.offsets),
                    }
                    for o in outcomes
                },
            }
            self.options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
        return 1 if problems else 0


def shuffled(
    faults: dict[str, Fault], count: int, rng: random.Random
) -> Iterator[tuple[str, Fault]]:
    """So many of them: each kind once in each round, in another order each time."""

    def rounds() -> Iterator[tuple[str, Fault]]:
        while faults:
            yield from rng.sample(list(faults.items()), len(faults))

    return itertools.islice(rounds(), count)


if __name__ == "__main__":
    sys.exit(main())
