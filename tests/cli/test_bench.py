from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncproducer.bench import instructions, running
from asyncproducer.cli import bench, main


@pytest.fixture
def broker() -> Iterator[str]:
    """The address of an embedded broker in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncproducer", "broker", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONASYNCIODEBUG": ""},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="memory is read as Unix tells it")
def test_it_measures_what_can_be_measured_anywhere(
    broker: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "")  # it is set for the run, and then restored
    file = tmp_path / "results.json"
    status = main(
        [
            *("bench", "--quick", "--records", "300"),
            *("--workloads", "W1", "W5", "--cases", "6 partitions", "1 ms"),
            *("--peers", "asyncproducer-python", "wire-replay"),
            *("--bootstrap-servers", broker, "--json", str(file)),
        ]
    )
    told = capsys.readouterr()
    assert status == 0, told
    assert "W1 round 1 6 partitions, asyncproducer-python: " in told.out
    assert "| 1 ms | wire-replay |" in told.out
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [(r["case"], r["peer"]) for r in document["results"]] == [
        ("6 partitions", "asyncproducer-python"),
        ("6 partitions", "wire-replay"),
        ("1 ms", "asyncproducer-python"),
        ("1 ms", "wire-replay"),
    ]
    assert [r["sent"] for r in document["results"]] == [330, 330, 33, 33]
    # The replay's batches are like ours were.
    ours, replay = document["results"][:2]
    assert replay["batch_bytes"] == ours["batch_bytes"]


def test_a_page_is_made_of_results_without_measuring(tmp_path: Path) -> None:
    numbers = {"workload": "W1", "case": "6 partitions", "round": 1, "version": "1"}
    results = [
        {**numbers, "peer": "asyncproducer", "records_per_s": 100.0},
        {**numbers, "peer": "confluent", "records_per_s": 400.0},
    ]
    document = {"command": "asyncproducer bench", "facts": {"cpus": 2}, "results": results}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text("<!-- results -->\n<!-- end -->\n", encoding="utf-8")
    assert main(["bench", "--results", str(file), "--page", str(page)]) == 0
    assert "- W1, 6 partitions: confluent has 400 records/s, 4.00 times better" in page.read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workloads", "W99"], "invalid choice: 'W99'"),
        (["--peers", "nobody"], "invalid choice: 'nobody'"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--bootstrap-servers", "host:port"], "host:port"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_cases_that_nobody_can_do_are_told_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--workloads", "W11", "--peers", "java"]) == 1
    assert "there is nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--cases", "1 partition", "8000"],
            "no case's name begins with '8000', of '1 partition'",
        ),
        (["--json", "no such/x.json"], "--json no such/x.json: there is no directory no such"),
        (["--page", "page.md", "--svg", "../plots"], "a page shows plots that lie beside it"),
        (["--results", "other.json"], "--results other.json: this is not what --json has written"),
    ],
)
def test_what_would_fail_at_the_end_is_told_before_anything_is_started(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text("<!-- results -->\n<!-- end -->\n", encoding="utf-8")
    Path("other.json").write_text("[]", encoding="utf-8")
    assert main(["bench", "--workloads", "W1", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_page_without_a_place_is_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("no marks\n", encoding="utf-8")
    assert main(["bench", "--page", str(page)]) == 1
    assert "the page has no place for the results" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "missing", lambda peers: {"java": "a JVM"})
    assert main(["bench", "--peers", "java"]) == 2
    err = capsys.readouterr().err
    assert "java needs a JVM" in err
    assert 'pip install "asyncproducer[bench]"' in err


def test_results_that_are_there_stay_whole_while_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    bench._write(file, {"results": [1]}, last=False)
    before = file.read_text(encoding="utf-8")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            bench._write(file, {"results": [1, 2]}, last=True)
    assert file.read_text(encoding="utf-8") == before
    bench._write(file, {"results": [1, 2]}, last=True)
    assert json.loads(file.read_text(encoding="utf-8")) == {"results": [1, 2]}


def test_sigterm_interrupts_a_run_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), bench._ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError("No module named 'rich'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert main(["bench"]) == 2
    assert 'pip install "asyncproducer[bench]"' in capsys.readouterr().err


def test_more_instructions_than_the_baseline_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "instructions.json"
    arguments = ["bench", "--instructions", "--baseline", str(file)]
    counted = {"append": 100.0}
    monkeypatch.setattr(instructions, "count", lambda: counted)
    assert main(arguments) == 1
    assert "has no baseline of " in capsys.readouterr().err
    assert main([*arguments, "--update"]) == 0
    assert main(arguments) == 0
    counted["append"] = 120.0
    capsys.readouterr()
    assert main(arguments) == 1
    assert "20.0% more than the 100.0 of the baseline" in capsys.readouterr().err
