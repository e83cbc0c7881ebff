"""`python -m asyncproducer.spark.audit`, as a process of its own: with a session of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncproducer.spark.audit import command
from asyncproducer.spark.audit.audit import Outcome
from asyncproducer.spark.audit.command import main
from asyncproducer.spark.audit.injected import Plan, inject
from asyncproducer.spark.audit.injected import main as injected
from asyncproducer.spark.audit.ledger import Entry, write_ledger
from asyncproducer.spark.audit.verdict import Verdict
from asyncproducer.testing.java import JavaUnavailable

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_a_violated_claim_is_exit_status_1_and_a_report(submit_args: str, tmp_path: Path) -> None:
    """In a process with a session of its own. Other tests call `main`."""
    inject(Plan(records=1, lanes=1, faults=1, replays=False), tmp_path / "in")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "asyncproducer.spark.audit", "--master", "local[2]"),
            *("--parquet", str(tmp_path / "in/log"), "--target", "t", "--json"),
            *("--fact", "kills=3 < 4", "--fact", "verdict=clean"),
            *("--ledger", str(tmp_path / "in/ledger.parquet"), "--output", str(tmp_path / "out")),
        ],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": submit_args},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    told = json.loads(run.stdout)
    assert told["verdict"] == "violated"
    assert told["targets"][0]["evidence"] == [
        *("audit_gaps", "audit_dups", "audit_order", "audit_lanes"),
    ]
    assert told["kills"] == "3 < 4"
    report = (tmp_path / "out/report.html").read_text()
    assert "<svg" in report
    assert "3 &lt; 4" in report


def test_without_java_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.sql import SparkSession

    def no_java(environ: object) -> str:
        raise JavaUnavailable("Spark needs Java 17")

    # What other tests have left here.
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(command, "spark_java_home", no_java)
    with pytest.raises(SystemExit) as caught:
        main(f"--parquet {tmp_path} --target t --output {tmp_path}/out".split())
    assert caught.value.code == 2
    assert "Spark needs Java 17" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, "all that was acknowledged, once"),
        ({"duplicates": 3144}, "all that was acknowledged, and 3,144 doubled"),
        ({"aborted": 4112}, "all that was acknowledged, once (4,112 aborted)"),
        ({"duplicates": 1, "reasons": ["lane 1: 1 doubled"]}, "lane 1: 1 doubled"),
    ],
)
def test_the_verdict_says_what_is_so(
    found: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least once is kept with doubled records, too."""
    row = {"verdict": "clean", "target": "t", "run": 7, "delivery": "at_least_once"}
    row |= {"records": 40_000, "reasons": [], "duplicates": 0, "aborted": None} | found
    outcome = Outcome("out", Verdict.CLEAN, [row], {})
    command._print(outcome, {}, "report.html", argparse.Namespace(json=False))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"clean: t, run 7, at_least_once: 40,000 records, {told}"


def test_a_module_that_is_missing_is_no_verdict() -> None:
    """In a process of its own: pytest's import hook, which rewrites what is installed with the
    plugin, has no `get_code` for runpy."""
    program = (
        "import runpy, sys\n"
        f"sys.modules[{command.__name__!r}] = None\n"
        "runpy.run_module('asyncproducer.spark.audit', run_name='__main__')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    assert 'pip install "asyncproducer[audit]"' in run.stderr


def test_an_unexpected_error_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(command, "_session", broken)
    assert main(f"--parquet {tmp_path} --target t --output {tmp_path}/out".split()) == 2
    assert "RuntimeError: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parquet {0} --output {0}/out", "nothing to audit: name a topic"),
        ("--parquet {0}/none --target t --output {0}/out", "there is nothing at"),
        ("--parquet {0} --target t --output {0}", "is there already"),
        ("--parquet {0} --target t --output hdfs://x", "say with --report"),
        ("--parquet {0} --target t:x --output {0}/out", "'x' in target 't:x' is not one of"),
        ("--parquet {0} --target t --ledger {0}/none --output {0}/out", "no ledger at"),
        ("--parquet {0} --target t --ledger {0}/wrong --output {0}/out", "no column run"),
        ("--parquet {0} --target t --kafka-option x --output {0}/out", "'x' is not NAME=VALUE"),
        ("--target t --output {0}/out", "--bootstrap-servers --parquet is required"),
    ],
)
def test_wrong_arguments_are_exit_status_2_before_spark_starts(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"x": [1]}), tmp_path / "wrong")
    with pytest.raises(SystemExit) as caught:
        main(arguments.format(tmp_path).split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_logs_with_faults_are_made_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--records", "20000", "--lanes", "2", "--faults", "1", "--output"]
    assert injected([*arguments, str(tmp_path / "a")]) == 0
    assert injected([*arguments, str(tmp_path / "b")]) == 0
    files = ["log/00000.parquet", "ledger.parquet", "truth.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "records in" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        injected([*arguments, str(tmp_path / "a")])
    with pytest.raises(FileExistsError):
        write_ledger(tmp_path / "a/ledger.parquet", [Entry(1, 1, "t", 0, 1)])
