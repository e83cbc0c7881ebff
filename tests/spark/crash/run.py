"""The whole run: brokers, Spark, a load, the kills, and at last the audit."""

from __future__ import annotations

import asyncio
import html
import json
import random
import secrets
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from asyncproducer import Producer
from asyncproducer.spark.audit.ledger import StampedLedger, write_ledger
from asyncproducer.spark.connector import connector_jars
from asyncproducer.testing import KafkaCluster
from tests.spark.crash.plan import TELLING, Kill, Victim, plan, steps
from tests.spark.crash.processes import Processes, gone
from tests.spark.crash.query import Settings, batches, done, target
from tests.spark.crash.tickets import Claim, Tickets

__all__ = ["Failed", "Run", "perform_all", "problems", "table"]

SOURCE = "crash-in"
PARTITIONS = 2
#: Of the load: so many batches may wait, then it waits.
_BACKLOG = 10
_TICK_S = 0.02
#: Between two looks at what processes there are.
_LOOK_S = 0.5
#: For a ticket to be taken, for a batch to be committed after a kill, for replicas to catch up.
_CLAIM_S, _RECOVERY_S, _IN_SYNC_S = 120.0, 240.0, 120.0
#: For the end of all queries, when nothing breaks any more; for the audit.
_DRAIN_S, _AUDIT_S = 600.0, 600.0
#: So much of the run's time is kept for its end: later than that no missed kill is tried again.
_END_S = 180.0
#: For the audit of small tables: compiled code would cost more than it saves.
_SMALL = (
    "--conf spark.sql.adaptive.enabled=false --conf spark.sql.codegen.wholeStage=false "
    "--conf spark.sql.shuffle.partitions=2 --jars {jars} pyspark-shell"
)
#: Brokers are killed while it sends.
_LOAD: Mapping[str, Any] = {
    "delivery_timeout_ms": 3_600_000,
    "linger_ms": 20,
    "metadata_max_age_ms": 2000,
    "request_timeout_ms": 3000,
}


class Failed(RuntimeError):
    """The run came to no verdict; the message says why."""


@dataclass(frozen=True)
class Happened:
    """A kill, and what was hit."""

    kill: Kill
    unit: str


class Run:
    """One run, in a new directory."""

    def __init__(self, options: Namespace, kafka: KafkaCluster, directory: Path) -> None:
        self._options = options
        self._kafka = kafka
        self._directory = directory
        self._chance = random.Random(options.seed)
        self._tickets = Tickets(directory / "tickets")
        self._processes = Processes(directory, self._tickets.directory)
        self._settings = Settings(
            servers=kafka.bootstrap_servers,
            master=self._processes.master,
            directory=str(directory),
            jars=tuple(map(str, connector_jars())),
            source=SOURCE,
            partitions=PARTITIONS,
            delivery=options.delivery,
            keyings=tuple(options.keying),
            admit=options.admit,
        )
        self._path = directory / "settings.json"
        self._settings.save(self._path)
        self._ledger = StampedLedger(secrets.randbits(32), 0)
        self._enough = asyncio.Event()
        self._began = time.monotonic()
        self._driver_kills = 0
        self._transaction_version = 0
        self.happened: list[Happened] = []
        self.missed: list[Kill] = []
        #: Of the audit, by target.
        self.verdicts: list[dict[str, Any]] = []

    # -- the course of it

    async def all(self) -> None:
        """Until the audit has judged. Raises Failed."""
        options = self._options
        try:
            async with asyncio.timeout(options.minutes * 60):
                await asyncio.to_thread(self._create_topics)
                await asyncio.to_thread(self._processes.start)
                await self._stream()
            await asyncio.to_thread(self._processes.end_driver)
            await asyncio.to_thread(self._processes.end)
            await asyncio.to_thread(self._audit)
        except TimeoutError as error:
            raise Failed(
                f"not done after {time.monotonic() - self._began:.0f} s ({error})\n"
                f"{self._processes.log_tail()}"
            ) from None
        finally:
            self._tickets.clear()
            await asyncio.to_thread(self._processes.end)

    def _create_topics(self) -> None:
        self._transaction_version = self._kafka.admin.features()["transaction.version"]
        for topic in self._topics():
            self._kafka.create_topic(
                topic, partitions=PARTITIONS, configs={"message.timestamp.type": "LogAppendTime"}
            )

    def _topics(self) -> list[str]:
        return [SOURCE, *map(target, self._settings.keyings)]

    async def _stream(self) -> None:
        """The load and the kills, until all that was sent is through."""
        try:
            await self._kill_under_load()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _kill_under_load(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(self._tend())
            loading = tasks.create_task(self._load())
            await self._until(
                lambda: all(batches(self._checkpoint(k)) for k in self._settings.keyings),
                _RECOVERY_S,
                "no query has committed a batch",
            )
            self.tell("Spark is up")
            options = self._options
            await perform_all(
                plan(options.kills, options.seed, options.delivery, options.keying),
                self._perform,
                self._has_time,
            )
            self._enough.set()
            await loading
            self.tell(f"{len(self._ledger):,} records were sent; waiting for the queries")
            await self._until(self._is_drained, _DRAIN_S, "the queries did not come to the end")
            tending.cancel()

    def _checkpoint(self, keying: str) -> Path:
        return self._settings.checkpoint(keying)

    def _passed(self) -> int:
        """How many records the slowest query has committed."""
        return min(sum(done(self._checkpoint(k)).values()) for k in self._settings.keyings)

    def _is_drained(self) -> bool:
        return self._passed() >= sum(self._kafka.end_offsets(SOURCE).values())

    async def _load(self) -> None:
        """Send at the rate until there were enough kills, or wait where too much is waiting."""
        loop = asyncio.get_running_loop()
        ledger = self._ledger
        async with Producer[Any, Any](self._settings.servers, **_LOAD) as producer:
            due = loop.time()
            while not self._enough.is_set():
                if len(ledger) - self._passed() < _BACKLOG * self._options.admit:
                    for _ in range(max(1, round(self._options.rate * _TICK_S))):
                        key, value = ledger.next_record()
                        ledger.track(await producer.enqueue(SOURCE, value, key=key), loop.time())
                due = max(due + _TICK_S, loop.time())
                await asyncio.sleep(due - loop.time())
            await producer.flush()
        write_ledger(self._directory / "ledger.parquet", [ledger.entry(SOURCE)])

    async def _tend(self) -> None:
        """Start the driver, and again whenever it has ended."""
        while True:
            if not self._processes.driver_lives:
                own = self._processes.driver_starts - self._driver_kills
                if own > 5 + self._options.kills:
                    raise Failed(f"the driver ends again and again\n{self._processes.log_tail()}")
                self._processes.start_driver(self._path)
            await asyncio.to_thread(self._processes.executors)
            await asyncio.sleep(_LOOK_S)

    async def _until(
        self, condition: Callable[[], bool], patience_s: float, complaint: str
    ) -> None:
        for _ in _ticks(patience_s):
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(_TICK_S)
        raise Failed(f"{complaint} in {patience_s:.0f} s\n{self._processes.log_tail()}")

    # -- kills

    def _has_time(self) -> bool:
        limit: float = self._options.minutes * 60
        return time.monotonic() - self._began + _END_S < limit

    async def _perform(self, kill: Kill) -> bool:
        """Returns whether it hit."""
        before = time.monotonic()
        unit = await (self._anywhere(kill) if kill.step is None else self._at(kill, kill.step))
        if unit is None:
            self.missed.append(kill)
            self.tell(f"{kill}: MISSED")
            return False
        self.happened.append(Happened(kill, unit))
        struck, passed = time.monotonic(), self._batches()
        if kill.rest:
            await self._until(
                lambda: self._batches() > passed, _RECOVERY_S, f"{kill}: no batch was committed"
            )
        self.tell(
            f"{len(self.happened):3} of {self._options.kills}  {kill}"
            f"{f' ({unit})' if unit else ''}: after {struck - before:.1f} s"
            + (f", a batch {time.monotonic() - struck:.1f} s later" if kill.rest else "")
        )
        return True

    def _batches(self) -> int:
        return sum(batches(self._checkpoint(keying)) for keying in self._settings.keyings)

    async def _anywhere(self, kill: Kill) -> str | None:
        """At some moment. Returns what was hit, None for nothing."""
        await asyncio.sleep(kill.delay)
        for _ in _ticks(_CLAIM_S):
            if await self._strike(kill.victim, None):
                return ""
            await asyncio.sleep(_TICK_S)
        return None

    async def _at(self, kill: Kill, step: str) -> str | None:
        """When a process is at the step. Returns what it was about to deliver, None for nothing."""
        dies = kill.victim in ("worker", "planner")
        self._tickets.issue(step, "die" if dies else "wait")
        if step == TELLING:
            await self._strike("driver", None)  # only a new one comes there; this is not counted
        try:
            for _ in _ticks(_CLAIM_S):
                claim = self._tickets.claim(step)
                if claim is not None:
                    break
                await asyncio.sleep(_TICK_S)
            else:
                return None
            if dies:
                if not await asyncio.to_thread(gone, claim.pid):
                    raise Failed(f"process {claim.pid} did not die at the step {step}")
            else:
                # Who waits holds the world up: kill at once, wait after it.
                if not await self._strike(kill.victim, claim):
                    return None
                await asyncio.sleep(kill.delay)
            return claim.unit or "-"
        finally:
            # A process that waits, and still lives, goes on: of that it must make the best.
            self._tickets.clear()
            if kill.victim == "broker":
                await self._heal()

    async def _strike(self, victim: Victim, claim: Claim | None) -> bool:
        """SIGKILL. False if there is no such process at the moment."""
        processes = self._processes
        if victim == "broker":
            node = self._chance.choice(self._kafka.running)
            await asyncio.to_thread(self._kafka.kill, node)
            if claim is None:
                await asyncio.sleep(self._chance.uniform(0, 2))
                await self._heal()
            return True
        if victim == "driver":
            found = await asyncio.to_thread(processes.driver)
            self._driver_kills += bool(found)
        elif claim is not None and (own := processes.executor_of(claim.pid)):
            found = own
        else:
            looking = processes.workers if victim == "worker" else processes.executors
            found = await asyncio.to_thread(looking)
            found = [self._chance.choice(found)] if found else []
        await asyncio.to_thread(processes.kill, found)
        return bool(found)

    async def _heal(self) -> None:
        """All brokers run, and have all that is written."""
        await asyncio.to_thread(self._kafka.heal, timeout_s=_IN_SYNC_S)
        topics = self._topics()
        replicas = len(self._kafka.running)

        def in_sync() -> bool:
            view = self._kafka.view(*topics).topics
            return len(view) == len(topics) and all(
                len(partition.isr) == replicas and partition.leader > 0
                for topic in view.values()
                for partition in topic.values()
            )

        await asyncio.to_thread(self._kafka.wait_until, in_sync, timeout_s=_IN_SYNC_S)

    # -- the end

    def _audit(self) -> None:
        self.tell("the audit reads all topics")
        options = self._options
        report = self._directory / "report.html"
        exactly_once = options.delivery == "exactly_once"
        arguments = [
            *("--bootstrap-servers", self._settings.servers),
            # From its directory, and jars by themselves: the report tells its command.
            *("--ledger", "ledger.parquet", "--output", "audit", "--report", report.name),
            *("--json", "--no-headers", "--target", SOURCE),
        ]
        for keying in self._settings.keyings:
            # A shuffle keeps no order, and what is written again comes behind.
            order = "" if exactly_once and keying == "source" else "unordered:"
            arguments += ["--target", f"{target(keying)}:of={SOURCE}:{order}{options.delivery}"]
        with (self._directory / "audit.log").open("wb") as log:
            try:
                told = subprocess.run(
                    [sys.executable, "-m", "asyncproducer.spark.audit", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._directory,
                    env={
                        **self._processes.plain_environment,
                        "PYSPARK_SUBMIT_ARGS": _SMALL.format(jars=",".join(self._settings.jars)),
                    },
                    timeout=_AUDIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise Failed(str(error)) from None
        try:
            self.verdicts = json.loads(told.stdout)["targets"]
        except ValueError:
            text = (self._directory / "audit.log").read_text(encoding="utf-8", errors="replace")
            raise Failed(f"the audit has ended with {told.returncode}\n{text[-3000:]}") from None
        page = report.read_text(encoding="utf-8")
        kills = f"<h2>What was killed</h2><pre>{html.escape(self.report())}</pre>"
        report.write_text(page.replace("</html>", f"{kills}</html>"), encoding="utf-8")
        if options.report:
            shutil.copyfile(report, options.report)

    def report(self) -> str:
        """What happened, as text."""
        processes, settings, options = self._processes, self._settings, self._options
        lines = [
            f"{len(self.happened)} kills in {time.monotonic() - self._began:.0f} s, "
            f"{options.delivery}, seed {options.seed}, {len(self._kafka.addresses)} brokers, "
            f"transaction.version {self._transaction_version}",
            f"{len(self.missed)} tries missed: in time nobody was at the step, or no such process "
            "lived; a missed kill is tried again",
            table([each.kill for each in self.happened], steps(options.delivery, options.keying)),
            f"driver starts {processes.driver_starts}, of which after its own end "
            f"{processes.driver_starts - 1 - self._driver_kills}; "
            f"executors started {processes.executor_starts}",
        ]
        for keying in settings.keyings:
            reports = [
                json.loads(line)
                for line in settings.reports(keying).read_text(encoding="utf-8").splitlines()
                if line.endswith("}")
            ]
            rows, skipped = (sum(each[name] for each in reports) for name in ("rows", "skipped"))
            lines.append(
                f"{target(keying)}: {batches(settings.checkpoint(keying)):,} batches, "
                f"{rows:,} rows in reported commits, {skipped:,} skipped as delivered"
            )
        lines += [
            f"{row['target']}: {row['verdict']}; {row['records']:,} records of {row['acked']:,}, "
            f"{row['lost']:,} lost, {row['duplicates']:,} doubled"
            + (f", {row['late']:,} out of order" if row["ordered"] else "")
            + f", {row['aborted'] or 0:,} aborted"
            for row in self.verdicts
        ]
        return "\n".join(lines)

    def tell(self, text: str) -> None:
        """One line."""
        sys.stdout.write(f"{time.monotonic() - self._began:7.1f} s  {text}\n")
        sys.stdout.flush()


async def perform_all(
    kills: Iterable[Kill],
    perform: Callable[[Kill], Awaitable[bool]],
    has_time: Callable[[], bool],
) -> None:
    """All of them; behind the others again those that missed, until they hit or time is short."""
    owed = deque(kills)
    while owed:
        kill = owed.popleft()
        if not await perform(kill) and has_time():
            owed.append(kill)


def _ticks(seconds: float) -> range:
    """So many looks: counted, so that a machine that stands still for a while breaks nothing."""
    return range(round(seconds / _TICK_S))


def table(kills: Sequence[Kill], known: Sequence[str]) -> str:
    """How many of each kind, at each step."""
    victims = get_args(Victim)
    counts = Counter[tuple[str | None, str]]((kill.step, kill.victim) for kill in kills)
    places = [*known, None]
    lines = [" " * 12 + "".join(f"{victim:>10}" for victim in (*victims, "all"))]
    for step in places:
        row = [counts[step, victim] for victim in victims]
        lines.append(f"{step or 'anywhere':<12}" + "".join(f"{n:>10}" for n in (*row, sum(row))))
    sums = [sum(counts[step, victim] for step in places) for victim in victims]
    lines.append(f"{'all':<12}" + "".join(f"{n:>10}" for n in (*sums, len(kills))))
    return "\n".join(lines)


def problems(delivery: str, kills: int, happened: int, verdicts: list[dict[str, Any]]) -> list[str]:
    """Why the proof has failed."""
    found = [
        f"{row['target']}: {row['verdict']}, {'; '.join(row['reasons'])}"
        for row in verdicts
        if row["verdict"] != "clean"
    ]
    if not verdicts:
        found.append("the audit has judged nothing")
    if happened < kills:
        found.append(f"only {happened} of {kills} kills")
    if delivery == "at_least_once" and not any(row["duplicates"] for row in verdicts):
        found.append("nothing is doubled at least once: so this run shows nothing")
    return found
