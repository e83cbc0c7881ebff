"""The whole run: Kafka, the stages, the load, the kills, and at last the audit."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncproducer.spark.audit.ledger import StampedLedger, write_ledger
from asyncproducer.spark.connector import connector_jars
from asyncproducer.testing import KafkaCluster
from asyncproducer.testing.java import spark_java_home
from orders_pipeline.load import send_orders
from orders_pipeline.orders import Codec, register
from orders_pipeline.processes import Kill, StageProcess, end, environment, kill_plan
from orders_pipeline.rules import RAW
from orders_pipeline.stages import STAGES, Settings, Stage, Status, done, is_up, replayed, targets
from orders_pipeline.view import Picture, StagePicture, View

__all__ = ["Failed", "Options", "run", "settled"]

_TICK_S = 1.0
#: Starts of a stage that nobody has killed: then something is wrong.
_OWN_DEATHS = 3

Offsets = Mapping[int, int]


class Failed(RuntimeError):
    """The run came to no verdict; the message says why."""


@dataclass(frozen=True)
class Options:
    """What the command was told."""

    orders: int
    kills: int
    rate: int
    partitions: int
    admit: int
    cores: int
    #: "avro" or "json".
    format: str
    registry: str
    delivery: str
    output: Path
    timeout_s: float
    seed: int


def run(options: Options) -> int:
    """All of it. Blocks; returns the audit's exit status. Nothing that it started is left then.

    Raises Failed; JavaUnavailable; KafkaUnavailable.
    """
    # For all processes of Spark, here once: they look for no other.
    os.environ["JAVA_HOME"] = spark_java_home(os.environ)
    options.output.mkdir(parents=True)
    ids = register(options.registry) if options.format == "avro" else None
    jars = tuple(map(str, connector_jars()))
    with KafkaCluster(own=True) as kafka:
        for topic in dict.fromkeys([RAW, *(topic for stage in STAGES for topic in stage.sinks)]):
            kafka.create_topic(
                topic,
                partitions=options.partitions,
                configs={"message.timestamp.type": "LogAppendTime"},
            )
        settings = Settings(
            servers=kafka.bootstrap_servers,
            directory=str(options.output.resolve()),
            run=secrets.randbits(32),
            delivery=options.delivery,
            ids=ids,
            admit=options.admit,
            jars=jars,
            cores=options.cores,
        )
        return asyncio.run(_Run(options, settings, kafka).all())


class _Run:
    """What happens while Kafka is there."""

    def __init__(self, options: Options, settings: Settings, kafka: KafkaCluster) -> None:
        path = self._path = options.output / "settings.json"
        settings.save(path)
        self._options = options
        self._settings = settings
        self._kafka = kafka
        self._chance = random.Random(options.seed)
        self._kills = kill_plan(options.kills, self._chance)
        self._ledger = StampedLedger(settings.run, 0)
        self._processes = [StageProcess(stage, settings, path) for stage in STAGES]
        self._picture = Picture(
            options.orders, options.kills, [StagePicture(stage.name) for stage in STAGES]
        )
        self._view = View(self._picture)
        self._began = time.monotonic()
        #: Of each stage, and when it was looked at.
        self._before = [(0, self._began)] * len(STAGES)

    async def all(self) -> int:
        """Until the verdict."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                with self._view:
                    await self._stream()
                await asyncio.to_thread(self._end_stages)
                return await self._audit()
        except TimeoutError:
            raise Failed(f"not done after {self._options.timeout_s:.0f} s{self._logs()}") from None
        finally:
            self._end_stages()

    async def _stream(self) -> None:
        """The load, and all stages until nothing is left to do."""
        for process in self._processes:
            process.start()
        loading = asyncio.create_task(self._load())
        try:
            while True:
                self._picture.seconds = time.monotonic() - self._began
                self._picture.sent = len(self._ledger)
                if loading.done():
                    loading.result()
                is_done = await self._look()
                self._view.show()
                if loading.done() and is_done and not self._kills:
                    self._view.tell("all orders are through")
                    self._view.tell(
                        f"{self._replayed():,} results were found delivered when a batch came again"
                    )
                    return
                await self._kill_next(is_done and loading.done())
                await asyncio.sleep(_TICK_S)
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading

    async def _load(self) -> None:
        # Else the first latencies were those of Spark's start.
        while not all(is_up(self._settings.of(stage)) for stage in STAGES):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S / 4)
        options = self._options
        codec = Codec(self._settings.ids)
        await send_orders(
            self._settings.servers, self._ledger, codec, options.orders, options.rate, options.seed
        )
        directory = options.output / "ledger"
        directory.mkdir()
        write_ledger(directory / "load.parquet", [self._ledger.entry(RAW)])
        self._view.tell(f"{len(self._ledger):,} orders are sent")

    async def _look(self) -> bool:
        """At all stages. Returns whether there is nothing left to do."""
        is_done = True
        for number, process in enumerate(self._processes):
            picture = self._picture.stages[number]
            stage = process.stage
            directory = self._settings.of(stage)
            is_new = not process.alive
            if is_new:
                self._start_again(process)
                picture.state = "starting"
            # The stages in their order: what an earlier one has still to write is seen.
            has = done(directory)
            if is_new:
                # What the one before has done does not tell that this one runs.
                self._before[number] = (sum(has.values()), time.monotonic())
            committed, written = await asyncio.to_thread(self._ends, stage)
            is_done = is_done and settled(has, committed, written)
            picture.lag = sum(committed.values()) - sum(has.values())
            picture.starts = process.starts
            picture.status = Status.load(directory)
            before, then = self._before[number]
            now = time.monotonic()
            if sum(has.values()) != before:
                picture.state = "running"
            if sum(has.values()) != before or now - then > 5:
                picture.rate = (sum(has.values()) - before) / (now - then)
                self._before[number] = (sum(has.values()), now)
        return is_done

    def _ends(self, stage: Stage) -> tuple[Offsets, Offsets]:
        committed = self._kafka.end_offsets(stage.source, committed=True)
        return committed, self._kafka.end_offsets(stage.source)

    def _start_again(self, process: StageProcess) -> None:
        # A worker's death may end the query as well, where it is one that plans.
        if process.starts > self._options.kills + _OWN_DEATHS:
            raise Failed(f"{process.stage.name} ends again and again{self._logs()}")
        self._view.tell(f"{process.stage.name} has ended: starting it from its checkpoint")
        process.start()

    async def _kill_next(self, is_done: bool) -> None:
        """The next of the plan, if its time has come."""
        for kill in self._kills:
            process = next(p for p in self._processes if p.stage.name == kill.stage)
            has = sum(done(self._settings.of(process.stage)).values())
            if has < kill.at * self._options.orders and not is_done:
                continue
            # Anywhere in a batch, and not just behind one.
            await asyncio.sleep(self._chance.random())
            if process.kill(kill.what, self._chance):
                self._kills.remove(kill)
                who = f"{_article(kill)} of {kill.stage}"
                self._picture.killed.append(who)
                self._view.tell(f"kill -9 of {who}")
            return

    def _end_stages(self) -> None:
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.end()

    def _logs(self) -> str:
        return "".join(f"\n--- {p.stage.name}\n{p.log_tail()}" for p in self._processes)

    async def _audit(self) -> int:
        self._view.say("the audit reads all topics ...")
        output = self._options.output
        arguments = [
            *("--bootstrap-servers", self._settings.servers),
            *("--ledger", str(output / "ledger")),
            *("--output", str(output / "audit")),
            *("--report", str(output / "report.html")),
        ]
        for name, text in self._facts().items():
            arguments += ["--fact", f"{name}={text}"]
        for target in targets(self._options.delivery):
            arguments += ["--target", target]
        with (output / "audit.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orders_pipeline.judging", str(self._path)),
                *(str(output / "ledger"), *arguments),
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        try:
            return await process.wait()
        finally:
            await _end_process(process)

    def _facts(self) -> dict[str, str]:
        """What the report cannot know: what has happened meanwhile."""
        starts = ", ".join(f"{each.stage.name} {each.starts}" for each in self._processes)
        return {
            "kill -9": _counted(self._picture.killed),
            "starts of the stages": starts,
            "results found delivered when a batch came again": f"{self._replayed():,}",
        }

    def _replayed(self) -> int:
        return sum(replayed(self._settings.of(stage)) for stage in STAGES)


async def _end_process(process: Process) -> None:
    if process.returncode is None:
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            end([first, *first.children(recursive=True)])
        await process.wait()


def settled(has: Offsets, committed: Offsets, written: Offsets) -> bool:
    """Whether a stage has done all that its source holds, and nothing is open in there.

    `has`: the next offset by partition; of partitions without records, none need be there.
    """
    return committed == written and all(
        has.get(partition, 0) >= end for partition, end in committed.items()
    )


def _counted(killed: Sequence[str]) -> str:
    """How often each of them."""
    told = ", ".join(f"{what} ({often})" for what, often in Counter(killed).most_common())
    return told or "none"


def _article(kill: Kill) -> str:
    return "the driver" if kill.what == "driver" else "a Python worker"
