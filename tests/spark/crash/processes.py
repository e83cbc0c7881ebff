"""Spark's processes: a standalone cluster and a driver, what is killed of them, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

import asyncproducer
from asyncproducer.testing import kafka_reaper
from asyncproducer.testing.kafka_nodes import free_ports
from tests.spark.crash.hook.sitecustomize import TICKETS
from tests.spark.crash.query import JVM_OPTIONS

__all__ = ["Processes", "gone"]

WORKERS = 2

_HERE = Path(__file__).parent
_HOOK = _HERE / "hook"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_PATIENCE_S = 15.0


class Processes:
    """A master and its workers, and one driver. `end` ends all of them, and all below them."""

    def __init__(self, directory: Path, tickets: Path) -> None:
        self._directory = directory
        ours = str(Path(asyncproducer.__file__).parents[1])
        #: For Spark without the hook.
        self.plain_environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": ours,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_SUBMIT_OPTS": JVM_OPTIONS,
        }
        self._environment = {
            **self.plain_environment,
            "PYTHONPATH": os.pathsep.join([str(_HOOK), ours]),
            "SPARK_DAEMON_JAVA_OPTS": f"{JVM_OPTIONS} -Dspark.deploy.maxExecutorRetries=-1",
            "SPARK_DAEMON_MEMORY": "256m",
            TICKETS: str(tickets),
        }
        (port,) = free_ports(1)
        self.master = f"spark://127.0.0.1:{port}"
        self._port = port
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._driver: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[str] | None = None
        #: All that were seen. psutil tells them from later ones with the same number.
        self._family: set[psutil.Process] = set()
        #: How many executors were seen, and how often the driver was started.
        self._executors: set[psutil.Process] = set()
        self.driver_starts = 0

    @property
    def executor_starts(self) -> int:
        """How many executors were seen."""
        return len(self._executors)

    # -- starting

    def start(self) -> None:
        """Start master and workers. Does not wait for them: a driver does."""
        work = self._directory / "work"
        work.mkdir()
        # It ends them also where this process is killed, and then removes what executors left.
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", kafka_reaper.__file__, str(work)],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        here = ["--host", "127.0.0.1", "--webui-port", "0"]
        self._daemon("master.Master", [*here, "--port", str(self._port)])
        for number in range(WORKERS):
            self._daemon(
                "worker.Worker",
                [
                    *here,
                    *("--cores", "1", "--memory", "1g"),
                    *("--work-dir", str(work / str(number)), self.master),
                ],
            )

    def _daemon(self, name: str, arguments: Sequence[str]) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        with (self._directory / f"{name}-{len(self._daemons)}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, "SPARK_HOME": str(home)},
                # Ctrl-C is for us; we end it then.
                start_new_session=True,
            )
        self._daemons.append(process)
        self._tell_reaper(process)

    def start_driver(self, settings: Path) -> None:
        """It goes on from its checkpoints."""
        with (self._directory / "driver.log").open("ab") as log:
            log.write(f"--- start {self.driver_starts + 1}\n".encode())
            log.flush()
            self._driver = subprocess.Popen(
                [sys.executable, str(_HERE / "query.py"), str(settings)],
                # It ends when this pipe does: with us, whatever ends us.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self.driver_starts += 1

    def _tell_reaper(self, process: subprocess.Popen[bytes]) -> None:
        assert self._reaper is not None
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"+{process.pid}\n")

    # -- looking

    @property
    def driver_lives(self) -> bool:
        """Whether the driver runs."""
        return self._driver is not None and self._driver.poll() is None

    def executors(self) -> list[psutil.Process]:
        """The JVMs in which tasks run."""
        found = [
            process
            for daemon in self._daemons
            for process in self._below(daemon)
            if _EXECUTOR in _command(process)
        ]
        self._executors.update(found)
        return found

    def workers(self) -> list[psutil.Process]:
        """The Python processes of executors."""
        return [
            process
            for executor in self.executors()
            for daemon in _children(executor)
            if "pyspark.daemon" in _command(daemon)
            for process in _children(daemon)
        ]

    def executor_of(self, pid: int) -> list[psutil.Process]:
        """That in which a Python worker runs, if it does."""
        try:
            above = set(psutil.Process(pid).parents())
        except psutil.Error:
            return []
        return [executor for executor in self.executors() if executor in above]

    def driver(self) -> list[psutil.Process]:
        """Its Python process and its JVM: both, or none if one of them is not there."""
        if self._driver is None:
            return []
        family = self._below(self._driver)
        jvms = [process for process in family if _command(process)[:1] == ["java"]]
        return [*family[:1], *jvms] if jvms else []

    def _below(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        family = _family(process.pid) if process.poll() is None else []
        self._family.update(family)
        return family

    def log_tail(self, lines: int = 40) -> str:
        """What the driver has said last."""
        try:
            text = (self._directory / "driver.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    # -- ending

    def kill(self, victims: Iterable[psutil.Process]) -> None:
        """SIGKILL; returns when they are gone."""
        victims = list(victims)
        self.executors()  # also to know whom they leave behind
        if self._driver is not None:
            self._below(self._driver)
        for victim in victims:
            _kill(victim)
        for victim in victims:
            gone(victim.pid)

    def end_driver(self) -> None:
        """Ask it to end, and wait for it."""
        if self._driver is None:
            return
        self._below(self._driver)
        if self._driver.stdin is not None:
            self._driver.stdin.close()
        try:
            self._driver.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass

    def end(self) -> None:
        """Kill all that are left. Returns when none is. A second call does nothing."""
        started = [*self._daemons, *([self._driver] if self._driver is not None else [])]
        for process in started:
            self._below(process)
        # Until nothing new is seen: an executor may have been started meanwhile.
        while True:
            left = [process for process in self._family if process.is_running()]
            below = {child for process in left for child in _family(process.pid)}
            for process in left:
                _kill(process)
            for each in started:
                each.poll()
            _, alive = psutil.wait_procs(left, _PATIENCE_S)
            self._family |= below
            if not left or alive:
                break
        for each in started:
            if each.stdin is not None:
                each.stdin.close()
            each.wait(_PATIENCE_S)
        if self._reaper is not None and self._reaper.stdin is not None:
            for daemon in self._daemons:
                self._reaper.stdin.write(f"-{daemon.pid}\n")
            self._reaper.stdin.close()
            self._reaper.wait(_PATIENCE_S)
        self._daemons, self._driver, self._reaper = [], None, None


def gone(pid: int, patience_s: float = _PATIENCE_S) -> bool:
    """Wait until a process has ended; False if it has not."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.Error:
        return []


def _family(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it is gone."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> list[str]:
    """With the program's name alone at first."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return []
    return [os.path.basename(command[0]), *command[1:]] if command else []
