"""The processes of the stages: started, killed on purpose, started again, and ended in any case."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

import asyncproducer
from orders_pipeline.stages import STAGES, Settings, Stage

__all__ = ["Kill", "StageProcess", "end", "environment", "kill_plan"]

Victim: TypeAlias = Literal["driver", "worker"]

_VICTIMS: tuple[Victim, ...] = ("driver", "worker")
_PATIENCE_S = 15.0
#: Several JVMs start at once on one machine: without these, most of their time is compiling.
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass(frozen=True)
class Kill:
    """A `kill -9` when a stage has read so much of all orders (0 to 1)."""

    stage: str
    what: Victim
    at: float


def kill_plan(count: int, chance: random.Random) -> list[Kill]:
    """Kills of all stages in turn, drivers and Python workers in turn, over the whole load."""
    what = itertools.cycle(_VICTIMS)
    plan = []
    for number, stage in enumerate(STAGES):
        share = len(range(number, count, len(STAGES)))
        plan += [
            Kill(stage.name, next(what), round(0.9 * (n + chance.uniform(0.2, 0.9)) / share, 3))
            for n in range(share)
        ]
    return sorted(plan, key=lambda kill: kill.at)


def environment() -> dict[str, str]:
    """In which processes find this package and the asyncproducer that we have; and for JVMs."""
    places = [Path(__file__).parents[1], Path(asyncproducer.__file__).parents[1]]
    path = [*map(str, places), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "SPARK_SUBMIT_OPTS": _JVM_OPTIONS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


class StageProcess:
    """The driver of a stage with its JVM and its workers, again after each death."""

    def __init__(self, stage: Stage, settings: Settings, path: Path) -> None:
        self.stage = stage
        self.starts = 0
        self.started = 0.0
        self._directory = settings.of(stage)
        self._command = [sys.executable, "-m", "orders_pipeline.stages", str(path), stage.name]
        self._process: subprocess.Popen[bytes] | None = None
        #: All that were seen. psutil tells them from later ones with the same number.
        self._family: set[psutil.Process] = set()

    def start(self) -> None:
        """Start the driver. It goes on from its checkpoint."""
        self._directory.mkdir(exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                # It ends when this pipe does: with us, whatever ends us.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
                # Ctrl-C is for us; we end it then.
                start_new_session=True,
            )
        self.starts += 1
        self.started = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the driver runs. Looks around for its children, too."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._family |= set(_family(self._process.pid))
        return True

    def kill(self, what: Victim, chance: random.Random) -> bool:
        """SIGKILL. False if there is no such process yet."""
        assert self._process is not None
        here = _family(self._process.pid)
        self._family |= set(here)
        if what == "driver":
            # Python's half as well: it could tell nobody anything any more.
            victims = [each for each in here if _command_of(each)[:1] == ["java"]] + here[:1]
            if len(victims) < 2:
                return False
        else:
            daemons = {each.pid for each in here if "pyspark.daemon" in _command_of(each)}
            workers = [each for each in here if _parent_of(each) in daemons]
            if not workers:
                return False
            victims = [chance.choice(workers)]
        for victim in victims:
            _kill(victim)
        return True

    def ask_to_end(self) -> None:
        """End the query, then the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Ask, wait, then kill all that are left. Returns when none is."""
        if self._process is None:
            return
        self.ask_to_end()
        if self.alive:
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                pass
        # Those of earlier drivers, too: a worker may outlive its JVM.
        end([*self._family, *_family(self._process.pid)])
        self._process.wait()

    def log_tail(self, lines: int = 30) -> str:
        """What it has said last."""
        try:
            text = (self._directory / "log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def end(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    found = set(processes)
    for process in found:
        _kill(process)
    psutil.wait_procs(found, _PATIENCE_S)


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


def _family(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it is gone."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _command_of(process: psutil.Process) -> Sequence[str]:
    """With the program's name alone at first."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return []
    return [os.path.basename(command[0]), *command[1:]] if command else []


def _parent_of(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None
