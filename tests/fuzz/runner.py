"""Runs targets in worker processes, and watches them.

A worker writes each input into a file before it runs it. When it dies (kio ended the
process, memory ran out) or hangs, the file tells on what; the watcher keeps the input,
and a new worker goes on behind it. What a worker survives it judges itself: an
exception, too much CPU time, too much memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .mutator import MAX_BYTES
from .targets import TARGETS, Target

__all__ = ["CORPUS", "ROOT", "Finding", "Report", "corpus", "fuzz", "make", "replay", "work"]

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"

#: A worker that is at one input for so many seconds hangs. Machines may be slow and busy.
HANGS_AFTER = 60.0
#: More of one kind tell nothing new.
_FINDINGS_OF_A_KIND = 2

_HEADER = 16

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Finding:
    """An input for which something did not hold."""

    target: str
    kind: str
    data: bytes
    text: str

    @property
    def path(self) -> Path:
        """Where it is kept."""
        digest = hashlib.sha256(self.data).hexdigest()[:12]
        return CORPUS / self.target / f"{self.kind}-{digest}.bin"

    def save(self) -> Path:
        """Writes it into the corpus, to be run by the tests from now on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.data)
        return self.path


@dataclasses.dataclass
class Report:
    """What became of one target."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    findings: list[Finding] = dataclasses.field(default_factory=list)


def make(target: Target, seed: str, number: int) -> bytes:
    """The input of this number: always the same one for a seed."""
    return target.make(random.Random(f"{seed}:{target.name}:{number}"))[:MAX_BYTES]


def corpus() -> Iterator[tuple[str, Path]]:
    """Every kept input: its target's name, and its file."""
    for path in sorted(CORPUS.glob("*/*.bin")):
        yield path.parent.name, path


def replay(target: str, path: Path) -> None:
    """Runs one kept input. Raises what it raises."""
    TARGETS[target].run(path.read_bytes())


# -- the worker ------------------------------------------------------------------------------------


class _Current:
    """The file in which a worker says what it is at: number + 1, size, input."""

    def __init__(self, path: Path, *, create: bool) -> None:
        size = _HEADER + MAX_BYTES
        if create:
            with open(path, "wb") as new:
                new.truncate(size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def begin(self, number: int, data: bytes) -> None:
        self._map[_HEADER : _HEADER + len(data)] = data
        self._map[:_HEADER] = (number + 1).to_bytes(8, "big") + len(data).to_bytes(8, "big")

    @property
    def number(self) -> int:
        """-1 before the first one."""
        return int.from_bytes(self._map[:8], "big") - 1

    @property
    def data(self) -> bytes:
        size = int.from_bytes(self._map[8:_HEADER], "big")
        return self._map[_HEADER : _HEADER + size]


@dataclasses.dataclass
class Measured:
    """Coverage is measured of a worker's first inputs: it costs most of the speed."""

    seconds: float
    inputs: int
    end: Callable[[], None]


def work(
    target: Target,
    seed: str,
    first: int,
    seconds: float,
    inputs: int,
    current: Path,
    measured: Measured | None = None,
) -> None:
    """Runs inputs from number `first` on; findings and a summary go to stdout, as JSON lines."""
    _limit_memory(target)
    at = _Current(current, create=False)
    kinds: dict[str, int] = {}
    gc.freeze()  # what is loaded by now is no garbage: there is less to look through
    began = time.monotonic()
    number = first
    while number - first < inputs and (past := time.monotonic() - began) < seconds:
        if measured and (number - first >= measured.inputs or past >= measured.seconds):
            measured.end()
            measured = None
            gc.freeze()  # by now kio has loaded most of what it needs, too
        data = make(target, seed, number)
        at.begin(number, data)
        number += 1
        found = _judge(target, data)
        if found is not None:
            kind, where, text = found
            kinds[where] = kinds.get(where, 0) + 1
            if kinds[where] <= _FINDINGS_OF_A_KIND:
                _say(finding=kind, data=data.hex(), text=text)
    if measured:
        measured.end()
    _say(done=number - first)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _judge(target: Target, data: bytes) -> tuple[str, str, str] | None:
    """Kind, place and description of what went wrong."""
    cpu, memory = time.process_time(), _peak_mib()
    try:
        target.run(data)
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)[-1]
        text = "".join(traceback.format_exception(exc))
        return "error", f"{type(exc).__name__} {where.filename}:{where.lineno}", text
    used, grown = time.process_time() - cpu, _peak_mib() - memory
    # First: what takes much memory takes time for that.
    if grown > target.memory:
        return "memory", "memory", f"{grown:.0f} MiB, at most {target.memory} are meant"
    most = target.seconds * max(1.0, len(data) / _MIB)
    if used > most:
        return "slow", "slow", f"{used:.1f} s of CPU time, at most {most:.1f} are meant"
    return None


def _limit_memory(target: Target) -> None:
    """No input may take the machine's memory: asking for more than this fails, or ends us."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        most = (2048 + target.memory) * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_mib() -> float:
    try:
        import resource
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (_MIB if sys.platform == "darwin" else 1024)


# -- the watcher -----------------------------------------------------------------------------------


def fuzz(
    target: str, seed: str, *, seconds: float, inputs: int = sys.maxsize, coverage: Path | None
) -> Report:
    """Runs a target for so long, or so many inputs. `coverage`: where to put what was covered."""
    report = Report(target)
    began = time.monotonic()
    _watched(report, seed, seconds, inputs, coverage)
    report.seconds = time.monotonic() - began
    return report


def _watched(report: Report, seed: str, seconds: float, inputs: int, coverage: Path | None) -> None:
    """One worker after the other, until time or inputs are used up."""
    ends = time.monotonic() + seconds
    first = 0
    # A fifth must do. In the same worker: to start another one, and have it load what it needs,
    # takes a second of CPU time.
    measured_ends, measured_stop = ends - seconds + min(seconds / 5, 60.0), inputs // 5
    while first < inputs and (left := ends - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as directory:
            current = Path(directory) / "current"
            file = _Current(current, create=True)
            arguments = [
                *("--worker", report.target, "--seed", seed, "--first", str(first)),
                *("--seconds", str(left), "--inputs", str(inputs - first)),
                *("--current", str(current)),
            ]
            measured = measured_ends - time.monotonic()
            if coverage is not None and measured > 0 and first < measured_stop:
                arguments += ["--coverage-file", str(coverage)]
                arguments += ["--measured-seconds", str(measured)]
                arguments += ["--measured-inputs", str(measured_stop - first)]
            ended, killed = _watch(_command(arguments), file, report)
            if ended:
                return
            if file.number < first:
                raise RuntimeError("a worker ended before its first input: see what it printed")
            data = file.data
            kind = "hang" if killed else "crash"
            report.findings.append(Finding(report.target, kind, data, "the worker was at this"))
            # What it did before counts, and this one is not tried again.
            report.inputs += file.number + 1 - first
            first = file.number + 1


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "tests.fuzz", *arguments]


def _watch(command: list[str], file: _Current, report: Report) -> tuple[bool, bool]:
    """Runs a worker. Returns whether it came to its end, and whether it had to be killed."""
    # The same order of sets in each: or the same input would not be the same history.
    environment = dict(os.environ, PYTHONHASHSEED="0")
    with tempfile.TemporaryFile("w+") as output:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output)
        killed = False
        number, since = -1, time.monotonic()
        while worker.poll() is None:
            time.sleep(0.1)
            if file.number != number:
                number, since = file.number, time.monotonic()
            elif number >= 0 and time.monotonic() - since > HANGS_AFTER:
                worker.kill()
                worker.wait()
                killed = True
        output.seek(0)
        done = False
        for line in output:
            said = json.loads(line)
            if "done" in said:
                done = True
                report.inputs += said["done"]
            else:
                data = bytes.fromhex(said["data"])
                report.findings.append(Finding(report.target, said["finding"], data, said["text"]))
    return done, killed
