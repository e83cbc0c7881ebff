"""What the command decides by itself: what is killed when, what is done, and what is judged."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.targets import check, parse_target
from orders_pipeline import rules
from orders_pipeline.command import parse
from orders_pipeline.judging import expected
from orders_pipeline.pipeline import settled
from orders_pipeline.processes import kill_plan
from orders_pipeline.stages import STAGES, Settings, Stage, Status, done, is_up, replayed, targets
from orders_pipeline.view import Picture, StagePicture, line


def test_each_stage_reads_what_an_earlier_one_writes() -> None:
    known = {rules.RAW}
    for stage in STAGES:
        assert stage.source in known
        known |= set(stage.sinks)
    assert len(known) == 6


def test_kills_are_of_all_stages_drivers_and_workers() -> None:
    plan = kill_plan(7, random.Random(1))
    assert sorted(kill.what for kill in plan) == ["driver"] * 4 + ["worker"] * 3
    assert {kill.stage for kill in plan} == {stage.name for stage in STAGES}
    assert [kill.at for kill in plan] == sorted(kill.at for kill in plan)
    assert all(0 < kill.at < 1 for kill in plan)
    assert kill_plan(0, random.Random(1)) == []


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_there_are_as_many_kills_as_were_asked_for(count: int) -> None:
    assert len(kill_plan(count, random.Random(count))) == count


@pytest.mark.parametrize(
    ("has", "committed", "written", "is_settled"),
    [
        ({}, {}, {}, True),
        ({}, {0: 0, 1: 0}, {0: 0, 1: 0}, True),
        ({0: 5}, {0: 5, 1: 0}, {0: 5, 1: 0}, True),
        ({0: 4}, {0: 5, 1: 0}, {0: 5, 1: 0}, False),
        ({0: 5}, {0: 5, 1: 1}, {0: 5, 1: 1}, False),
        # A transaction is open, or its marker is not there yet.
        ({0: 5}, {0: 5}, {0: 6}, False),
    ],
)
def test_a_stage_is_settled_when_it_has_all_and_nothing_is_open(
    has: dict[int, int], committed: dict[int, int], written: dict[int, int], is_settled: bool
) -> None:
    assert settled(has, committed, written) is is_settled


def checkpoint(directory: Path, commits: list[int], offsets: dict[int, dict[str, int]]) -> None:
    for name in ("commits", "offsets"):
        (directory / "checkpoint" / name).mkdir(parents=True)
    for batch in commits:
        (directory / "checkpoint" / "commits" / str(batch)).write_text("v1\n{}")
        (directory / "checkpoint" / "commits" / f".{batch}.crc").write_bytes(b"x")
    for batch, places in offsets.items():
        text = f"v1\n{{}}\n{json.dumps({'raw-orders': places})}"
        (directory / "checkpoint" / "offsets" / str(batch)).write_text(text)


def test_done_is_what_the_last_committed_batch_says(tmp_path: Path) -> None:
    checkpoint(tmp_path, [8, 9, 10], {9: {"0": 1}, 10: {"0": 7, "1": 3}, 11: {"0": 9}})
    assert done(tmp_path) == {0: 7, 1: 3}


def test_before_the_first_batch_nothing_is_done(tmp_path: Path) -> None:
    assert done(tmp_path) == {}
    checkpoint(tmp_path, [], {0: {"0": 5}})
    assert done(tmp_path) == {}
    assert not is_up(tmp_path)
    assert Status.load(tmp_path) == Status()


def test_what_a_replay_finds_delivered_is_counted(tmp_path: Path) -> None:
    """A kill may have cut a report off; the next one is in the same line then."""
    assert replayed(tmp_path) == 0
    lines = ['{"skipped":0}', '{"skipped":9555}', '{"ski{"skipped":3}', '{"skipped":20}', '{"sk']
    (tmp_path / "commits.jsonl").write_text("\n".join(lines))
    assert replayed(tmp_path) == 9575


def test_the_audit_judges_every_topic_against_the_one_before() -> None:
    found = [parse_target(text) for text in targets("exactly_once")]
    check(found)
    assert {topic for target in found for topic in target.topics} == {
        rules.RAW,
        *(topic for stage in STAGES for topic in stage.sinks),
    }
    by_topics = {target.topics: target for target in found}
    assert by_topics[rules.VALIDATED, rules.DLQ].of == (rules.RAW,)
    assert by_topics[(rules.FULFILLMENT,)].of == ()  # the ledger says what must be there
    assert not any(target.partial for target in found)
    assert {target.delivery for target in found} == {None, "exactly_once"}


def test_a_claim_of_at_least_once_is_judged_as_such() -> None:
    raw, *others = [parse_target(text) for text in targets("at_least_once")]
    assert (raw.delivery, raw.ordered) == (None, None)
    assert {(target.delivery, target.ordered) for target in others} == {("at_least_once", False)}


@pytest.mark.parametrize(
    ("approved", "others"),
    [
        ([], ((5, 9),)),
        ([7, 6, 7], ((5, 5), (8, 9))),
        ([5, 9], ((6, 8),)),
        (range(5, 10), ()),
    ],
)
def test_fulfillment_must_hold_the_approved_orders_and_no_others(
    approved: Sequence[int], others: tuple[tuple[int, int], ...]
) -> None:
    load = Entry(1, 2, rules.RAW, 5, 9, in_doubt=((6, 6),))
    assert expected(load, approved) == Entry(1, 2, rules.FULFILLMENT, 5, 9, failed=others)


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = Settings("h:1", "/d", 7, "exactly_once", {"raw": 1}, 500, ("a.jar", "b.jar"))
    settings.save(tmp_path / "settings.json")
    assert Settings.load(tmp_path / "settings.json") == settings
    assert settings.of(Stage("s", "a", ("b",), rules.score)) == Path("/d/s")


@pytest.mark.parametrize(
    ("orders", "admit"), [("100", 1_000), ("50000", 5_000), ("1000000", 20_000)]
)
def test_a_batch_is_a_tenth_within_limits(orders: str, admit: int) -> None:
    assert parse(["--orders", orders]).admit == admit


@pytest.mark.parametrize("wrong", [["--orders", "0"], ["--kills", "-1"], ["--output", "."]])
def test_wrong_arguments_end_with_status_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_line_tells_lag_and_latency_of_each_stage() -> None:
    stages = [StagePicture("a", "running", 1, 1234, 99.5, Status(3, 10, 0.5, 1500.0, 2500.0))]
    text = line(Picture(10, 0, stages, sent=5, seconds=3.2))
    assert text == "3 s: 5 sent; a running, lag 1,234, 100/s, age p50 1,500 ms p99 2,500 ms"
