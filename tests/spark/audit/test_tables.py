"""The audit of logs with injected faults finds these, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from asyncproducer.spark.audit.audit import Outcome, audit
from asyncproducer.spark.audit.collecting import collect
from asyncproducer.spark.audit.injected import BATCH, Plan, Truth, inject
from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.records import SourceError, audit_records
from asyncproducer.spark.audit.report import render
from asyncproducer.spark.audit.stamps import encode_stamp, encode_trace
from asyncproducer.spark.audit.targets import Target, TargetError, parse_target

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PLANS = [
    Plan(records=150_000, lanes=2, seed=1, topic="a", run=1),
    Plan(records=60_000, lanes=3, partitions=7, faults=4, size=0, seed=2, topic="b", run=2**32 - 2),
    Plan(records=80_000, lanes=1, partitions=2, faults=5, seed=3, topic="c", run=30),
    Plan(records=20_000, lanes=2, faults=0, replays=False, seed=4, topic="d", run=40),
]


class Audited(NamedTuple):
    """An audit, and its tables as lists of rows."""

    outcome: Outcome
    tables: dict[str, list[dict[str, Any]]]
    truths: dict[str, Truth]

    def rows(self, table: str, **where: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in self.tables[table]
            if all(row[name] == value for name, value in where.items())
        ]


def all_rows(spark: Any, outcome: Outcome) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [r.asDict(recursive=True) for r in spark.read.parquet(str(path)).collect()]
        for path in Path(outcome.output).iterdir()
        if path.name != "audit_records"
    }


@pytest.fixture(scope="module")
def injected(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """All plans in one audit: they do not disturb each other."""
    directory = tmp_path_factory.mktemp("injected")
    entries: list[Entry] = []
    truths = {}
    for plan in PLANS:
        told, truths[plan.topic] = inject(plan, directory / plan.topic)
        entries += told
    frame = spark.read.parquet(*(str(directory / plan.topic / "log") for plan in PLANS))
    targets = [Target(plan.topic, (plan.topic,)) for plan in PLANS]
    outcome = audit(spark, frame, targets, entries, directory / "out")
    return Audited(outcome, all_rows(spark, outcome), truths)


def expected_dups(plan: Plan, truth: Truth) -> dict[tuple[int, int], str]:
    found = {}
    for batch in truth.replayed:
        for lane in range(plan.lanes):
            for seq in range(batch * BATCH, (batch + 1) * BATCH):
                found[lane, seq] = "batch replay"
    for lane, batch in truth.restarted:
        for seq in range(batch * BATCH, batch * BATCH + BATCH // 2):
            found[lane, seq] = "task retry"
    return (
        found
        | dict.fromkeys(truth.retried, "retry")
        | dict.fromkeys(truth.crossed, "cross partition")
    )


def span(ranges: list[tuple[int, int, int]]) -> int:
    return sum(last - first + 1 for _, first, last in ranges)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"seed{plan.seed}")
def test_injected_faults_are_found_and_nothing_else(injected: Audited, plan: Plan) -> None:
    truth, target = injected.truths[plan.topic], plan.topic
    gaps = injected.rows("audit_gaps", target=target)
    assert {(r["lane"], r["first_seq"], r["last_seq"]) for r in gaps} == set(truth.lost)
    dups = injected.rows("audit_dups", target=target)
    assert {(r["lane"], r["seq"]): r["class"] for r in dups} == expected_dups(plan, truth)
    assert {r["copies"] for r in dups} <= {2}
    order = injected.rows("audit_order", topic=plan.topic)
    assert sum(r["late_records"] for r in order) == len(truth.late)
    furthest = max((behind for *_, behind in truth.late), default=0)
    assert max(r["max_displacement"] for r in order) == furthest

    (verdict,) = (row for row in injected.outcome.rows if row["target"] == target)
    present = sum((last - first) // 2 + 1 for _, first, last in truth.doubtful)
    denied = sum(seq < plan.length for _, seq in truth.denied)
    failed, doubtful = span(truth.failed) + denied, span(truth.doubtful)
    assert {name: verdict[name] for name in verdict if name not in ("reasons", "evidence")} == {
        **{"target": target, "run": plan.run, "delivery": "exactly_once", "ordered": True},
        **{"known": True, "records": truth.records - truth.unstamped - truth.other_run},
        **{"acked": plan.length * plan.lanes - failed - doubtful, "lost": span(truth.lost)},
        **{"duplicates": len(dups), "phantom": len(truth.denied), "late": len(truth.late)},
        **{"in_doubt": doubtful, "in_doubt_present": present, "corrupt": len(truth.damaged)},
        **{"aborted": None, "verdict": "violated" if plan.faults else "clean"},
    }
    assert len(verdict["reasons"]) == (5 if plan.faults else 0)
    kinds = {row["kind"]: row["count"] for row in injected.rows("audit_kinds", topic=plan.topic)}
    assert kinds.get(2, 0) == truth.unstamped
    # What plan a's log holds of other runs is there for plan b's, and so on: none is audited.
    assert kinds.get(1, 0) == truth.other_run


def test_a_loss_lies_between_its_neighbours(injected: Audited) -> None:
    plan = PLANS[0]
    for gap in injected.rows("audit_gaps", target=plan.topic):
        assert gap["lost"] == gap["last_seq"] - gap["first_seq"] + 1
        assert gap["before_seq"] == gap["first_seq"] - 1
        assert gap["before"]["topic"] == plan.topic
        if gap["last_seq"] == plan.length - 1:
            assert gap["after_seq"] is gap["after"] is gap["after_send_us"] is None
        else:
            assert gap["after_seq"] == gap["last_seq"] + 1
            assert gap["after_send_us"] > 0 < gap["before_send_us"]


def test_sizes_and_latencies_are_those_of_the_log(injected: Audited) -> None:
    plan = PLANS[3]
    skew = injected.rows("audit_skew", topic=plan.topic)
    assert sum(row["records"] for row in skew) == injected.truths["d"].records
    assert sum(row["bytes"] for row in skew) == injected.truths["d"].records * (28 + plan.size)
    most = max(row["records"] for row in skew) * len(skew) / sum(row["records"] for row in skew)
    assert skew[0]["records_max_to_mean"] == pytest.approx(most)
    keys = injected.rows("audit_keys", topic=plan.topic)
    assert sorted(row["rank"] for row in keys) == list(range(1, 11))
    latency = injected.rows("audit_latency", topic=plan.topic)
    assert {row["stage"] for row in latency} == {"append"}
    assert sum(row["count"] for row in latency) == plan.length * plan.lanes
    for row in latency:
        assert 2 ** ((row["bucket"] - 1) / 8) <= row["min_us"] <= row["max_us"]
        assert row["max_us"] < 2 ** (row["bucket"] / 8) * 1.000001


def test_the_report_shows_what_was_found(spark: Any, injected: Audited) -> None:
    tables, totals = collect(spark, injected.outcome.output)
    page = render(tables, totals, {"verdict": "violated", "command": "a <b> & c"})
    assert page.count("<svg") == 3
    assert not re.findall(r"<script|<link|src=|url\((?!#)|href=\"(?!#)", page)  # of one piece
    assert "a &lt;b&gt; &amp; c" in page
    assert "<b class=violated>violated</b>" in page
    assert "<b class=clean>clean</b>" in page
    assert "batch replay" in page
    assert f"The first 50 of {totals['audit_dups']:,}" in page


# -- several topics as one, stages, headers, aborted records -----------------------------------

KAFKA = pa.schema(
    [
        *(("key", pa.binary()), ("value", pa.binary()), ("topic", pa.string())),
        *(("partition", pa.int32()), ("offset", pa.int64())),
        *(("timestamp", pa.timestamp("us", tz="UTC")), ("timestampType", pa.int32())),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


class Topics:
    """Rows as the Kafka source gives them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self, topic: str, lane: int, seqs: range | list[int], *, header: bool = False, run: int = 7
    ) -> None:
        for seq in seqs:
            payload = None if header else b"payload"
            stamp = encode_stamp(run, lane, seq, 1000, payload or b"")
            trace = encode_trace("check", 3000, 5000), encode_trace("score", 9000, 9000)
            headers: list[Any] = [{"key": "apx-trace", "value": part} for part in trace]
            headers += [{"key": "apx", "value": stamp}, {"key": "other", "value": None}]
            self.rows.append(
                {
                    **{"key": None, "value": payload if header else stamp + (payload or b"")},
                    **{"topic": topic, "partition": 0, "offset": len(self.rows)},
                    **{"timestamp": 21_000 if header else 0, "timestampType": int(header)},
                    "headers": headers if header else None,
                }
            )

    def frame(self, spark: Any) -> Any:
        return spark.createDataFrame(pa.Table.from_pylist(self.rows, KAFKA))


@pytest.fixture(scope="module")
def staged(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    topics = Topics()
    for lane in (0, 1):
        topics.add("raw", lane, range(20))
    topics.add("good", 0, range(10), header=True)
    topics.add("bad", 0, range(9, 20))  # 9 is there twice
    topics.add("good", 1, [*range(17), 19])  # 17 and 18 are in neither of both
    topics.add("good", 1, [40])  # and this one never was in the stage before
    topics.add("final", 0, [1, 3, 5])
    topics.add("final", 1, [2, 2])
    topics.add("lone", 5, [0, 1, 3, 2])
    topics.add("lone", 6, range(3), run=8)
    topics.rows.append({**topics.rows[0], "topic": "bare", "value": b"no stamp"})
    everything = Topics()
    everything.rows = list(topics.rows)
    everything.add("raw", 1, range(20, 25))
    entries = [Entry(7, lane, "raw", 0, 19, delivery="at_least_once") for lane in (0, 1)]
    targets = [
        Target("raw", ("raw",)),
        Target("checked", ("good", "bad"), of=("raw",), ordered=False),
        Target("final", ("final",), of=("good",), partial=True, delivery="exactly_once"),
        Target("lone", ("lone",)),
        Target("bare", ("bare", "misspelt")),
        Target("unfiltered", ("misspelt",), of=("raw",), partial=True),
    ]
    out = tmp_path_factory.mktemp("staged") / "out"
    outcome = audit(
        spark,
        topics.frame(spark),
        targets,
        entries,
        out,
        uncommitted=everything.frame(spark),
    )
    return Audited(outcome, all_rows(spark, outcome), {})


def found(audited: Audited, target: str, *names: str) -> tuple[Any, ...]:
    (row,) = (row for row in audited.outcome.rows if row["target"] == target)
    return tuple(row[name] for name in names)


def test_what_only_uncommitted_readers_see_is_aborted(staged: Audited) -> None:
    assert found(staged, "raw", "records", "aborted", "verdict") == (40, 5, "clean")
    assert found(staged, "checked", "aborted") == (0,)


def test_topics_together_must_hold_what_the_stage_before_held(staged: Audited) -> None:
    assert found(staged, "checked", "acked", "lost", "duplicates", "phantom", "verdict") == (
        *(40, 2, 1, 1),
        "violated",
    )
    assert found(staged, "checked", "delivery", "ordered") == ("exactly_once", False)
    (gap,) = staged.rows("audit_gaps")
    assert (gap["lane"], gap["first_seq"], gap["last_seq"]) == (1, 17, 18)
    assert (gap["before"]["topic"], gap["after_seq"]) == ("good", 19)


def test_what_a_filter_leaves_out_is_not_lost(staged: Audited) -> None:
    assert found(staged, "final", "records", "lost", "duplicates", "phantom", "verdict") == (
        *(5, 0, 1, 0),
        "violated",
    )
    (dup,) = staged.rows("audit_dups", target="final")
    assert (dup["class"], dup["offset_distance"]) == ("retry", 1)
    (dup,) = staged.rows("audit_dups", target="checked")
    assert (dup["class"], dup["offset_distance"]) == ("cross partition", None)


def test_without_a_ledger_the_end_of_a_lane_is_unknown(staged: Audited) -> None:
    # Of run 7 there is a ledger, but not for this topic; of run 8 there is none at all.
    assert found(staged, "lone", "known", "lost", "late", "verdict") == (False, 0, 1, "violated")
    assert staged.rows("audit_kinds", topic="lone", kind=1) == [
        {"topic": "lone", "kind": 1, "count": 3}
    ]


def test_a_target_in_which_nothing_was_compared_is_not_clean(spark: Any, staged: Audited) -> None:
    assert found(staged, "bare", "run", "records", "verdict") == (None, 0, "incomplete")
    assert found(staged, "unfiltered", "run", "records", "acked", "verdict") == (
        *(7, 0, 40),
        "incomplete",
    )
    for row in staged.outcome.rows:
        if row["target"] in ("bare", "unfiltered"):
            assert "nothing was compared: 0 records" in row["reasons"][0]
    tables, totals = collect(spark, staged.outcome.output)
    assert "<b class=incomplete>" in render(tables, totals, {"verdict": "incomplete"})


@pytest.fixture(scope="module")
def blind(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """What would be clean if claims or ledgers were looked at less closely."""
    topics = Topics()
    topics.add("mixed", 0, [0, 1, 1, 2, 0])
    topics.add("mixed", 1, [0, 1, 2, 2])
    topics.add("mixed", 2, [0, 2, 1])
    topics.add("pierced", 0, [*range(10), *range(20, 30)])
    topics.add("pierced", 1, range(10))
    topics.add("raw", 0, range(5))
    topics.add("out", 0, [*range(5), 3])
    topics.add("more", 0, range(6))
    topics.add("unfounded", 0, range(6))
    topics.add("far", 0, [0, 1, 3, 2**15 + 1])
    topics.add("far", 0, [2**50 + 1])
    topics.add("far", 1, [2**63 - 1])
    topics.add("far", 2, [2**63 - 2])
    free: dict[str, Any] = {"delivery": "at_least_once", "ordered": False}
    entries = [
        Entry(7, 0, "mixed", 0, 2, **free),
        Entry(7, 1, "mixed", 0, 2),
        Entry(7, 2, "mixed", 0, 2, **free),
        *(Entry(7, 0, "pierced", first, first + 9) for first in (0, 20)),
        Entry(7, 1, "pierced", 0, 9),
        Entry(7, 0, "raw", 0, 19, **free),
    ]
    lines = ("mixed", "pierced", "out:of=raw", "unfounded:of=more", "far")
    out = tmp_path_factory.mktemp("blind") / "out"
    targets = [parse_target(line) for line in lines]
    outcome = audit(spark, topics.frame(spark), targets, entries, out)
    return Audited(outcome, all_rows(spark, outcome), {})


def test_a_lane_that_breaks_its_claim_is_named(blind: Audited) -> None:
    assert found(blind, "mixed", "delivery", "ordered", "duplicates", "late", "reasons") == (
        *("at_least_once+exactly_once", True, 3, 1),
        ["lane 1: 1 doubled"],
    )
    assert found(blind, "mixed", "verdict") == ("violated",)


def test_a_ledger_with_a_hole_is_incomplete(blind: Audited) -> None:
    assert found(blind, "pierced", "known", "verdict", "reasons") == (
        *(False, "incomplete"),
        ["lane 0: the ledger tells nothing of 10 to 19"],
    )


def test_what_a_source_has_lost_is_judged_with_its_stage(blind: Audited) -> None:
    assert found(blind, "raw", "lost", "reasons") == (15, ["lane 0: 15 lost"])
    # What the stage has doubled is none of the source's claim.
    assert found(blind, "out", "delivery", "acked", "lost", "known", "reasons") == (
        *("exactly_once", 5, 0, True),
        ["lane 0: 1 doubled"],
    )
    assert found(blind, "unfounded", "lost", "known", "verdict") == (0, False, "incomplete")


def test_a_number_from_a_damaged_stamp_makes_no_row_for_each_bucket(
    spark: Any, blind: Audited
) -> None:
    lanes = {row["lane"]: row for row in blind.rows("audit_lanes", target="far")}
    assert (lanes[0]["lost"], lanes[0]["acked"], lanes[0]["phantom"]) == (2**50 - 3, 2**50 + 2, 0)
    assert (lanes[1]["lost"], lanes[1]["phantom"], lanes[2]["lost"]) == (2**63 - 1, 1, 2**63 - 2)
    gaps = [
        (row["first_seq"], row["last_seq"], row["before_seq"], row["after_seq"])
        for row in blind.rows("audit_gaps", target="far", lane=0)
    ]
    assert sorted(gaps) == [
        (2, 2, 1, 3),
        (4, 2**15, 3, 2**15 + 1),
        (2**15 + 2, 2**50, 2**15 + 1, 2**50 + 1),
    ]
    assert len(blind.rows("audit_buckets", target="far")) == 8
    assert found(blind, "far", "lost", "verdict") == (2**63 - 1, "violated")
    tables, totals = collect(spark, blind.outcome.output)
    assert f"{2**50 - 1 - 2**15:,}" in render(tables, totals, {"verdict": "violated"})


def test_traces_in_headers_tell_the_latency_of_each_stage(staged: Audited) -> None:
    good = {
        row["stage"]: (row["bucket"], row["count"], row["min_us"], row["max_us"])
        for row in staged.rows("audit_latency", topic="good")
        if row["stage"] != "create"
    }
    assert good == {
        "append": (115, 10, 20_000, 20_000),
        "wait check": (88, 10, 2000, 2000),
        "stage check": (88, 10, 2000, 2000),
        "wait score": (96, 10, 4000, 4000),
        "stage score": (0, 10, 0, 0),
    }
    (raw,) = staged.rows("audit_latency", topic="raw")
    assert (raw["stage"], raw["bucket"], raw["count"]) == ("create", -80, 40)


def test_wider_columns_than_the_kafka_source_has_are_read(spark: Any) -> None:
    topics = Topics()
    topics.add("t", 0, range(3), header=True)
    topics.add("t", 1, range(3))
    frame = topics.frame(spark)
    wide = frame.withColumns({n: frame[n].cast("long") for n in ("partition", "timestampType")})
    told = [audit_records(each, []).orderBy("lane", "seq").collect() for each in (frame, wide)]
    assert len(told[0]) == 6
    assert told[0] == told[1]
    text = frame.filter("headers is not null").withColumn("value", frame.value.cast("string"))
    assert audit_records(text, []).orderBy("lane", "seq").collect() == told[0][:3]


def test_input_that_is_none_is_refused(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(3)
    with pytest.raises(SourceError, match="no column key, value, partition"):
        audit(spark, frame.withColumn("topic", frame.id), [Target("t", ("t",))], [], tmp_path)
    with pytest.raises(TargetError, match="nothing to audit"):
        audit(spark, frame, [], [], tmp_path)
    empty = Topics().frame(spark)
    with pytest.raises(SourceError, match="no record in t, and no ledger"):
        audit(spark, empty, [Target("t", ("t",))], [], tmp_path / "out")
