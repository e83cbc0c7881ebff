"""Several runs into one file."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from . import report as module
from .report import Total
from .runner import ROOT, Finding, Report

FRAMES = ROOT / "asyncproducer" / "net" / "frames.py"
FINDING = Finding("frames", "error", b"", "")


def lines_of(path: Path, *lines: int, file: Path = FRAMES) -> Path:
    """What a worker leaves that has reached these lines, one after the other."""
    data = coverage.CoverageData(str(path))
    data.add_arcs({str(file): list(itertools.pairwise(lines))})
    data.write()
    data.close()
    return path


def test_runs_add_up(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    Total(file).add(Report("frames", 10, 1.5, [FINDING]), "a")
    Total(file).add(Report("answers", 7, 2.0), "a")
    Total(file).add(Report("frames", 5, 0.5), "b")
    told = json.loads(file.read_text("utf-8"))["targets"]
    assert told["frames"] == {"inputs": 15, "seconds": 2.0, "findings": 1, "seeds": ["a", "b"]}
    assert told["answers"]["inputs"] == 7
    assert [line.split()[:2] for line in Total(file).fed_lines()] == [
        ["frames", "15"],
        ["answers", "7"],
    ]


def test_lines_that_any_of_the_runs_has_reached_count_once(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    text = FRAMES.read_text("utf-8").splitlines()
    first, second, *_ = (n for n, line in enumerate(text, 1) if line.startswith("from"))
    covered = []
    for number, lines in enumerate([(-1, first), (-1, first), (first, second)]):
        total = Total(file)
        total.add(Report("frames"), "a", lines_of(tmp_path / f".coverage.{number}", *lines))
        total.close()
        (reached,) = Total(file).modules.values()
        covered.append((reached.covered, len(reached.arcs)))
    assert covered == [(1, 1), (1, 1), (2, 2)]
    assert reached.lines > 20
    (line,) = Total(file).reached_lines()
    assert line.split()[0] == "net/frames.py"


def test_lines_of_another_state_of_the_source_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    Total(file).add(Report("frames"), "a", lines_of(tmp_path / ".coverage.1", 1, 2, 3))
    monkeypatch.setattr(module, "_digest", lambda _: "changed")
    Total(file).add(Report("frames"), "b", lines_of(tmp_path / ".coverage.2", 5, 6))
    assert Total(file).modules["net/frames.py"].arcs == [(5, 6)]
    assert Total(file).targets["frames"].seeds == ["a", "b"]


def test_modules_that_no_target_is_meant_for_are_left_out(tmp_path: Path) -> None:
    total = Total()
    other = ROOT / "asyncproducer" / "producer.py"
    total.add(Report("frames"), "a", lines_of(tmp_path / ".coverage", 1, 2, file=other))
    assert not total.modules


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"targets": {"frames": 1}, "modules": {}}'])
def test_a_file_that_is_none_of_ours_is_not_written_over(text: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"report\.json is no report"):
        Total(file)


def test_the_command_adds_to_its_report_and_takes_no_seed_twice(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    # As who works on it starts it: in the checkout, whose sources alone can be measured.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}

    def run(seed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.fuzz", "--target", "frames", "--inputs", "50"]
        return subprocess.run(
            [*command, "--seed", seed, "--report", str(file)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    done = run("a")
    assert done.returncode == 0, done.stderr
    assert "  net/frames.py " in done.stdout
    again = run("a")
    assert again.returncode == 2
    assert "frames was fed the inputs of seed a already" in again.stderr
    assert "frames                   100 inputs" in run("b").stdout
