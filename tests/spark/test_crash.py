"""`python -m tests.spark.crash`: what it decides by itself; and in short, a few kills."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncproducer
from tests.spark.crash.__main__ import parse
from tests.spark.crash.hook import sitecustomize as hook
from tests.spark.crash.plan import DRIVER_STEPS, MAKING, TASK_STEPS, TELLING, Kill, plan, steps
from tests.spark.crash.query import Settings, batches, done
from tests.spark.crash.run import perform_all, problems, table
from tests.spark.crash.tickets import Claim, Tickets

EXACTLY_ONCE = list(
    itertools.product(("worker", "executor", "driver", "broker"), TASK_STEPS["exactly_once"])
)


# -- the plan


def test_two_hundred_kills_hit_every_kind_at_every_step_several_times() -> None:
    counts = Counter((kill.victim, kill.step) for kill in plan(200, 1, "exactly_once", ["source"]))
    assert counts.total() == 200
    for victim, step in EXACTLY_ONCE:
        assert counts[victim, step] >= 3  # type: ignore[index]
    for step in DRIVER_STEPS:
        assert counts["planner", step] >= 3
        assert counts["driver", step] >= 3
    assert counts["worker", MAKING] >= 3
    assert counts["planner", TELLING] >= 3
    for victim in ("worker", "executor", "driver", "broker"):
        assert counts[victim, None] >= 3  # type: ignore[index]


def test_the_seed_decides_all_of_the_plan() -> None:
    first, again, other = (plan(50, seed, "exactly_once", ["group"]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_at_least_once_has_no_steps_of_transactions() -> None:
    found = {kill.step for kill in plan(100, 1, "at_least_once", ["source"])}
    assert found == {MAKING, "producing", "produced", "reporting", *DRIVER_STEPS, None}


def test_the_step_of_the_query_itself_is_one_of_marker_source() -> None:
    for keying, there in (("source", True), ("group", False)):
        found = {kill.step for kill in plan(100, 1, "exactly_once", [keying])}
        assert (TELLING in found) is there
        assert found == {*steps("exactly_once", [keying]), None}


def test_some_kills_follow_at_once() -> None:
    assert {kill.rest for kill in plan(20, 1, "exactly_once", [])} == {True, False}


async def test_what_missed_is_tried_again_until_it_hits() -> None:
    kills = plan(4, 1, "exactly_once", ["source"])
    misses = Counter({kills[0]: 2, kills[2]: 1})
    tried = []

    async def perform(kill: Kill) -> bool:
        tried.append(kill)
        misses[kill] -= 1
        return misses[kill] < 0

    await perform_all(kills, perform, lambda: True)
    assert tried == [*kills, kills[0], kills[2], kills[0]]


async def test_what_missed_is_not_tried_again_when_time_is_short() -> None:
    kills = plan(4, 1, "exactly_once", ["source"])
    tried = []

    async def miss(kill: Kill) -> bool:
        tried.append(kill)
        return False

    await perform_all(kills, miss, lambda: len(tried) < 2)
    assert tried == [*kills, kills[0]]


# -- tickets


@pytest.fixture
def tickets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tickets:
    tickets = Tickets(tmp_path / "tickets")
    monkeypatch.setenv(hook.TICKETS, str(tickets.directory))
    return tickets


def test_who_comes_to_a_step_without_a_ticket_goes_on(tickets: Tickets) -> None:
    tickets.issue("ending", "die")
    hook.at("fenced", "s/g1")
    assert tickets.claim("ending") is tickets.claim("fenced") is None


def test_who_takes_a_ticket_waits_until_it_is_cleared(tickets: Tickets) -> None:
    tickets.issue("ending", "wait")
    waiting = threading.Thread(target=hook.at, args=("ending", "s/g1"))
    waiting.start()
    while tickets.claim("ending") is None:
        time.sleep(0.001)
    assert tickets.claim("ending") == Claim(os.getpid(), "s_g1")
    assert waiting.is_alive()
    hook.at("ending", "s/g2")  # it is taken
    tickets.clear()
    waiting.join(10)
    assert not waiting.is_alive()
    assert tickets.claim("ending") is None


def test_who_is_told_to_die_does_so_at_the_step(tickets: Tickets) -> None:
    tickets.issue("ending", "die")
    dies = f"""if True:
        import runpy
        hook = runpy.run_path({hook.__file__!r})
        print("before", flush=True)
        hook["at"]("ending", "s/g1")
        print("after")
    """
    told = subprocess.run([sys.executable, "-c", dies], capture_output=True, check=False)
    assert (told.returncode, told.stdout) == (-9, b"before\n")
    claim = tickets.claim("ending")
    assert claim is not None
    assert claim.unit == "s_g1"


def test_a_ticket_that_nobody_took_is_taken_back(tickets: Tickets) -> None:
    tickets.issue("ending", "die")
    tickets.clear()
    hook.at("ending")
    assert tickets.claim("ending") is None


def test_the_hook_wraps_the_sink_when_it_is_imported(tickets: Tickets) -> None:
    """All names that it wraps are there; and not before, as nothing must be imported early."""
    looks = """if True:
        import sys
        assert "asyncproducer" not in sys.modules
        from asyncproducer.spark.delivery import Producer, Sink
        print(Producer.__name__, Sink._send.__name__, Sink.commit.__name__)
    """
    path = [str(Path(hook.__file__).parent), str(Path(asyncproducer.__file__).parents[1])]
    told = subprocess.run(
        [sys.executable, "-c", looks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout == "CrashingProducer crashing_send crashing_commit\n", told.stderr


# -- the rest


def test_done_is_what_the_last_committed_batch_says(tmp_path: Path) -> None:
    assert (batches(tmp_path), done(tmp_path)) == (0, {})
    for name in ("commits", "offsets"):
        (tmp_path / name).mkdir()
    for batch in (0, 9, 10):
        (tmp_path / "commits" / f"{batch}").write_text("v1\n{}")
        (tmp_path / "commits" / f".{batch}.crc").write_bytes(b"x")
    for batch in (9, 10, 11):
        (tmp_path / "offsets" / f"{batch}").write_text(
            f"v1\n{{}}\n{json.dumps({'crash-in': {'0': batch, '1': 2 * batch}})}"
        )
    assert batches(tmp_path) == 11
    assert done(tmp_path) == {0: 10, 1: 20}


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = Settings("h:1", "spark://h:2", "/d", ("a", "b"), "in", 2, "at_least_once", ("x",), 9)
    settings.save(tmp_path / "settings.json")
    assert Settings.load(tmp_path / "settings.json") == settings


def test_the_table_counts_kills_by_kind_and_step() -> None:
    kills = [Kill("worker", "ending", 0, True)] * 2 + [Kill("broker", None, 0, True)]
    lines = table(kills, ["fenced", "ending"]).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["ending"] == ["2", "0", "0", "0", "0", "2"]
    assert rows["anywhere"] == ["0", "0", "0", "0", "1", "1"]
    assert rows["all"][-1] == "3"
    assert len(rows) == 5


def verdict(duplicates: int = 0, lost: int = 0, verdict: str = "clean") -> dict[str, Any]:
    reasons = [f"{lost} lost"] if lost else []
    return {"target": "t", "verdict": verdict, "duplicates": duplicates, "reasons": reasons}


@pytest.mark.parametrize(
    ("delivery", "happened", "verdicts", "says"),
    [
        ("exactly_once", 5, [verdict(), verdict()], None),
        ("exactly_once", 5, [verdict(), verdict(0, 3, "violated")], "3 lost"),
        ("exactly_once", 4, [verdict()], "only 4 of 5 kills"),
        ("exactly_once", 5, [], "has judged nothing"),
        ("at_least_once", 5, [verdict(), verdict(7)], None),
        ("at_least_once", 5, [verdict(), verdict()], "nothing is doubled"),
        ("at_least_once", 5, [verdict(7), verdict(0, 3, "violated")], "3 lost"),
    ],
)
def test_a_run_fails_that_breaks_its_promise_or_shows_nothing(
    delivery: str, happened: int, verdicts: list[dict[str, Any]], says: str | None
) -> None:
    found = problems(delivery, 5, happened, verdicts)
    assert (says or "") in " ".join(found)
    assert bool(found) is (says is not None)


@pytest.mark.parametrize("wrong", [["--kills", "0"], ["--rate", "-1"], ["--output", "."]])
def test_wrong_arguments_end_with_status_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(900)  # the run itself says before that what it waits for
@pytest.mark.parametrize(
    ("delivery", "keyings"),
    [
        ("exactly_once", ["source", "group"]),
        pytest.param("at_least_once", ["source"], marks=pytest.mark.long),
    ],
)
def test_a_few_kills_lose_nothing_and_double_as_promised(
    tmp_path: Path, delivery: str, keyings: list[str]
) -> None:
    output = tmp_path / "run"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.crash", "--kills", "4", "--seed", "3"),
            *("--brokers", "1", "--delivery", delivery, "--keying", *keyings),
            *("--output", str(output)),
        ],
        cwd=Path(__file__).parents[2],
        # The package that these tests test, also where it is not installed.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(asyncproducer.__file__).parents[1]), str(Path(__file__).parents[2])]
            ),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "✓ 4 kills" in run.stdout
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "What was killed" in page
    for private in (str(tmp_path), sys.prefix, str(Path.home())):
        assert private not in page
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert left == []
