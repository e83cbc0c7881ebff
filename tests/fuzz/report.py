"""What one run, or several pieces of a long one, have fed and reached: the tables, and a file.

The file is JSON. Each run adds to it when a target is done, so what is interrupted is not lost
with it. One run at a time: nobody looks whether another one writes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import runner
from .targets import TARGETS

__all__ = ["Fed", "Reached", "Total"]

#: As coverage names it.
_SOURCES = (runner.ROOT / "asyncproducer").resolve()


@dataclasses.dataclass
class Fed:
    """What a target was fed."""

    inputs: int = 0
    seconds: float = 0.0
    findings: int = 0
    #: With the same seed it would be the same inputs again.
    seeds: list[str] = dataclasses.field(default_factory=list)

    def line(self, name: str) -> str:
        """As it is printed."""
        return (
            f"{name:18} {self.inputs:9,} inputs in {self.seconds:5.0f} s,"
            f" {self.inputs / max(self.seconds, 0.001):7,.0f} a second,"
            f" {self.findings} findings"
        )


@dataclasses.dataclass
class Reached:
    """What was reached of a module. The numbers are made of the arcs, by `Total.close`."""

    #: Of what the arcs' line numbers are about.
    source: str
    arcs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    lines: int = 0
    covered: int = 0
    branches: int = 0
    branches_covered: int = 0

    def line(self, name: str) -> str:
        """As it is printed."""
        return (
            f"  {name:32} {self.covered:4} of {self.lines:4} lines,"
            f" {self.branches_covered:4} of {self.branches:4} branches"
        )


class Total:
    """All that was added, until `close`. `file`: what earlier runs have left, and this one adds to.

    Raises ValueError for a file that is none of ours.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.targets: dict[str, Fed] = {}
        self.modules: dict[str, Reached] = {}
        self._file = file
        if file is not None and file.exists():
            try:
                told = json.loads(file.read_text(encoding="utf-8"))
                self.targets = {name: Fed(**fed) for name, fed in told["targets"].items()}
                self.modules = {
                    name: _reached(**values) for name, values in told["modules"].items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file} is no report of this command: {error!r}") from error

    def add(self, report: runner.Report, seed: str, coverage: Path | None = None) -> None:
        """What a run has done with one target. `coverage`: its file, if that was measured."""
        fed = self.targets.setdefault(report.target, Fed())
        fed.inputs += report.inputs
        fed.seconds = round(fed.seconds + report.seconds, 1)
        fed.findings += len(report.findings)
        fed.seeds.append(seed)
        if coverage is not None and coverage.exists():
            self._cover(coverage)
        if self._file is not None:
            self._save(self._file)

    def _cover(self, file: Path) -> None:
        import coverage

        data = coverage.CoverageData(str(file))
        data.read()
        for path in map(Path, data.measured_files()):
            name = path.relative_to(_SOURCES).as_posix()
            if not _is_wanted(name, TARGETS):
                continue
            source = _digest(path)
            found = self.modules.get(name)
            # Lines of another state of the source, or of another Python, are not these lines.
            known = found.arcs if found is not None and found.source == source else []
            arcs = sorted({*known, *(data.arcs(str(path)) or ())})
            self.modules[name] = Reached(source, arcs)
        data.close()

    def close(self) -> None:
        """No more comes: counts lines and branches. Takes a second."""
        # Of another state of its source, a module's numbers stay as they were.
        known = {
            str(path): name
            for name, reached in self.modules.items()
            if (path := _SOURCES / name).exists() and _digest(path) == reached.source
        }
        arcs = {path: self.modules[name].arcs for path, name in known.items()}
        for file, numbers in _counted(arcs).items():
            name = known[file]
            old = self.modules[name]
            self.modules[name] = Reached(old.source, old.arcs, *numbers)
        if self._file is not None:
            self._save(self._file)

    def _save(self, file: Path) -> None:
        told = {
            "targets": {name: dataclasses.asdict(fed) for name, fed in self.targets.items()},
            "modules": {
                name: dataclasses.asdict(reached) for name, reached in sorted(self.modules.items())
            },
        }
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(told), encoding="utf-8")
        os.replace(new, file)

    def fed_lines(self) -> Iterator[str]:
        """A line for each target."""
        for name, fed in self.targets.items():
            yield fed.line(name)

    def reached_lines(self) -> Iterator[str]:
        """A line for each module that these targets are meant for."""
        for name, reached in sorted(self.modules.items()):
            if _is_wanted(name, self.targets):
                yield reached.line(name)


def _reached(arcs: list[list[int]], **others: Any) -> Reached:
    return Reached(arcs=[(first, second) for first, second in arcs], **others)


def _is_wanted(name: str, targets: Any) -> bool:
    patterns = {pattern for target in targets for pattern in TARGETS[target].files}
    return any(Path(name).match(pattern) for pattern in patterns)


def _digest(path: Path) -> str:
    version = "{}.{}".format(*sys.version_info)
    return f"{version} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _counted(arcs: dict[str, list[tuple[int, int]]]) -> dict[str, tuple[int, ...]]:
    """The four numbers of each file, in the order of `Reached`.

    By coverage's own command, in a process of its own: this one may be measured itself.
    """
    import coverage

    if not arcs:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "coverage")
        data = coverage.CoverageData(file)
        data.add_arcs(arcs)
        data.write()
        data.close()
        told = os.path.join(folder, "numbers.json")
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "--rcfile", os.devnull]
        others = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
        subprocess.run(
            [*command, "--data-file", file, "-o", told], env=others, cwd=folder, check=True
        )
        with open(told, encoding="utf-8") as numbers:
            files = json.load(numbers)["files"]
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {path: tuple(found["summary"][name] for name in names) for path, found in files.items()}
