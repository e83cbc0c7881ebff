"""The rules that need no Spark: targets, verdicts, buckets, percentiles."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from asyncproducer.spark.audit import report
from asyncproducer.spark.audit.judge import BUCKET, Books, bucket_rows
from asyncproducer.spark.audit.latency import below_zero, bounds_us, quantile_us
from asyncproducer.spark.audit.ledger import Entry
from asyncproducer.spark.audit.targets import (
    Target,
    TargetError,
    check,
    grounded,
    parse_target,
    with_sources,
)
from asyncproducer.spark.audit.verdict import Finding, Verdict, claim, judge, overall, unseen


def test_a_target_is_read_from_a_line() -> None:
    assert parse_target("orders") == Target("orders", ("orders",))
    assert parse_target("checked=good+bad:of=raw+late:unordered:at_least_once") == Target(
        "checked", ("good", "bad"), ("raw", "late"), False, False, "at_least_once"
    )
    assert parse_target("some=final:of=good:partial").partial


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a name"),
        ("a=b+", "topics with names"),
        ("a:partial", "tell of which topics"),
        ("a=b+c:of=b+d", "compared with b, a topic of its own"),
        ("a:ordered", "'ordered' in target 'a:ordered' is not one of of=TOPIC"),
    ],
)
def test_a_target_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        parse_target(text)


def test_targets_have_names_of_their_own() -> None:
    with pytest.raises(TargetError, match="more than one target is named a"):
        check([parse_target("a"), parse_target("a=b"), parse_target("c")])


def finding(lane: int = 0, **counts: Any) -> Finding:
    fields: dict[str, Any] = {"delivery": "exactly_once", "ordered": True}
    fields |= {"records": 1, "acked": 1}
    return Finding("t", 1, lane, **(fields | counts))


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ({}, Verdict.CLEAN),
        ({"in_doubt": 9, "in_doubt_present": 4, "aborted": 7}, Verdict.CLEAN),
        ({"lost": 1}, Verdict.VIOLATED),
        ({"duplicates": 1}, Verdict.VIOLATED),
        ({"phantom": 1}, Verdict.VIOLATED),
        ({"corrupt": 1}, Verdict.VIOLATED),
        ({"late": 1}, Verdict.VIOLATED),
        ({"late": 1, "ordered": False}, Verdict.CLEAN),
        ({"duplicates": 1, "delivery": "at_least_once"}, Verdict.CLEAN),
        ({"lost": 1, "delivery": "at_least_once"}, Verdict.VIOLATED),
        ({"lost": 1, "delivery": "at_most_once"}, Verdict.CLEAN),
        ({"duplicates": 1, "delivery": "at_most_once"}, Verdict.VIOLATED),
        ({"unseen": "why"}, Verdict.INCOMPLETE),
        ({"records": 0}, Verdict.INCOMPLETE),
        ({"records": 0, "lost": 1}, Verdict.VIOLATED),
        ({"records": 0, "lost": 1, "delivery": "at_most_once"}, Verdict.INCOMPLETE),
        ({"acked": 0, "in_doubt": 1, "in_doubt_present": 1}, Verdict.INCOMPLETE),
        ({"unseen": "why", "lost": 1}, Verdict.VIOLATED),
    ],
)
def test_the_verdict_follows_from_claim_and_counts(
    counts: dict[str, Any], verdict: Verdict
) -> None:
    found, reasons = judge([finding(**counts)])
    assert found is verdict
    assert bool(reasons) == (verdict is not Verdict.CLEAN)


@pytest.mark.parametrize(
    ("broken", "weaker", "reason"),
    [
        ({"duplicates": 3}, {"delivery": "at_least_once"}, "lane 1: 3 doubled"),
        ({"lost": 5}, {"delivery": "at_most_once"}, "lane 1: 5 lost"),
        ({"late": 5}, {"ordered": False}, "lane 1: 5 out of order"),
    ],
)
def test_each_lane_is_judged_by_its_own_claim(
    broken: dict[str, Any], weaker: dict[str, Any], reason: str
) -> None:
    allowed = finding(0, **broken, **weaker)
    assert judge([allowed, finding(1)]) == (Verdict.CLEAN, [])
    assert judge([allowed, finding(1, **broken)]) == (Verdict.VIOLATED, [reason])


def test_the_first_of_the_lanes_that_break_their_claim_is_named() -> None:
    lanes = [finding(0), *(finding(lane, lost=2000, phantom=lane - 3) for lane in (3, 4, 5))]
    assert judge(lanes)[1] == [
        "lane 3 and 2 more: 6,000 lost",
        "lane 4 and 1 more: 3 present, although never acknowledged",
    ]


def test_lanes_that_wrote_nothing_leave_the_others_clean() -> None:
    nothing = finding(records=0, acked=0)
    assert judge([nothing, finding(1)])[0] is Verdict.CLEAN
    assert judge([nothing, nothing])[0] is Verdict.INCOMPLETE


def test_reasons_stay_few() -> None:
    lanes = [finding(lane, unseen=f"{lane % 20}") for lane in range(40)]
    reasons = judge(lanes)[1]
    assert reasons[:2] == ["lane 0 and 1 more: 0", "lane 1 and 1 more: 1"]
    assert reasons[5:] == ["and 15 more such reasons"]


def entry(topic: str = "t", first: int = 0, last: int = 9, **claims: Any) -> Entry:
    return Entry(1, 2, topic, first, last, **claims)


LEAST: dict[str, Any] = {"delivery": "at_least_once", "ordered": False}


@pytest.mark.parametrize(
    ("target", "entries", "claimed"),
    [
        ("t", [entry(**LEAST)], ("at_least_once", False)),
        ("t", [entry(**LEAST), entry("u")], ("at_least_once", False)),
        ("t", [entry(**LEAST), entry()], ("exactly_once", True)),
        ("t", [entry(**LEAST), entry(delivery="at_most_once")], ("exactly_once", True)),
        ("t", [], ("exactly_once", True)),
        ("t:unordered:at_most_once", [entry()], ("at_most_once", False)),
        # A stage has no part in what those before it claim; but there is no order to keep.
        ("t:of=u", [entry("u", **LEAST)], ("exactly_once", False)),
        ("t:of=u", [entry("u", delivery="at_least_once")], ("exactly_once", True)),
        ("t:of=u:at_least_once", [entry("u")], ("at_least_once", True)),
        ("t:of=u", [entry("u"), entry(**LEAST)], ("at_least_once", False)),
    ],
)
def test_a_lane_is_held_to_the_claim_for_these_topics_or_else_to_exactly_once(
    target: str, entries: list[Entry], claimed: tuple[str, bool]
) -> None:
    assert claim(parse_target(target), entries) == claimed


@pytest.mark.parametrize(
    ("target", "entries", "why"),
    [
        ("t", [entry()], ""),
        ("t", [entry(first=8, last=20), entry()], ""),
        ("t", [entry(first=10, last=20), entry(), entry(first=5, last=6)], ""),
        ("t", [entry(first=20, last=29), entry()], "nothing of 10 to 19"),
        ("t", [entry(first=1)], "nothing of 0 to 0"),
        ("t", [entry(last=-1)], ""),
        ("t", [entry("u")], "not in the ledger"),
        ("t", [], "not in the ledger"),
        # What went to another topic has to be told.
        ("t", [entry(), entry("u", 10, 19), entry(first=20, last=29)], "nothing of 10 to 19"),
        ("t=t+u", [entry(), entry("u", 10, 19), entry(first=20, last=29)], ""),
        ("t:of=u", [], ""),
        ("t:of=u+w+v", [entry()], "v, w has lost"),
    ],
)
def test_what_the_ledger_does_not_tell_cannot_be_seen(
    target: str, entries: list[Entry], why: str
) -> None:
    found = unseen(parse_target(target), entries, {"u"})
    assert why in found
    assert bool(found) == bool(why)


def test_only_what_rests_on_the_ledger_is_judged() -> None:
    lines = ("d:of=b+c", "x=b+c:of=a", "a", "e:of=f", "f:of=e", "g:of=other")
    assert grounded([parse_target(line) for line in lines]) == {"a", "b", "c", "d"}


def test_sources_that_only_the_ledger_names_are_judged_too() -> None:
    def names(ledger: set[str], *lines: str) -> list[str]:
        return [target.name for target in with_sources([*map(parse_target, lines)], ledger)]

    assert names({"raw", "else"}, "out:of=raw+other") == ["out", "raw"]
    assert names({"raw"}, "out:of=raw", "first=raw+more") == ["out", "first"]
    assert names({"raw"}, "out:of=raw", "raw=other") == ["out", "raw"]
    assert names(set(), "out:of=raw") == ["out"]


def test_the_worst_verdict_is_that_of_all() -> None:
    clean, incomplete, violated = Verdict.CLEAN, Verdict.INCOMPLETE, Verdict.VIOLATED
    assert overall([clean, violated, incomplete]) is violated
    assert overall([clean, incomplete]) is incomplete
    assert overall([clean, clean]) is clean
    assert overall([]) is incomplete


def bitmap(numbers: set[int], begin: int) -> bytes:
    bits = np.zeros(BUCKET, np.bool_)
    bits[[number - begin for number in numbers]] = True
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_judged_as_sets_of_numbers_are(seed: int) -> None:
    chance = random.Random(seed)
    bucket = chance.choice([0, 3])
    begin = bucket * BUCKET

    def ranges(low: int, high: int, count: int) -> list[tuple[int, int]]:
        ends = sorted(chance.sample(range(low, high), 2 * count))
        return list(zip(ends[::2], ends[1::2], strict=True))

    entries, acked, doubt = [], set(), set()
    # The first two overlap: a batch that was tried again.
    for low, high in ((-90, 60), (-10, 200), (BUCKET - 100, BUCKET + 100)):
        first, last = max(0, begin + low), begin + high
        parts = ranges(first, last, chance.randint(0, 5))
        failed, in_doubt = parts[::2], parts[1::2]
        entries.append(("t", Entry(1, 2, "t", first, last, tuple(failed), tuple(in_doubt))))
        gone = {n for low, high in parts for n in range(low, high + 1)}
        acked |= set(range(first, last + 1)) - gone
        doubt |= {n for low, high in in_doubt for n in range(low, high + 1)}
    doubt -= acked
    seen = set(chance.sample(range(begin, begin + 300), 200)) | {begin + BUCKET - 1}
    inside = set(range(begin, begin + BUCKET))
    row: dict[str, Any] = {
        **{"target": "t", "run": 1, "lane": 2, "bucket": bucket, "seen": bitmap(seen, begin)},
        **{"records": 250, "corrupt": 3, "first_send_us": 5, "last_send_us": 6, "expected": None},
    }
    books = Books(entries)
    got = bucket_rows(row, books, partial=False)
    lost = (acked & inside) - seen
    assert (got["distinct"], got["duplicates"]) == (len(seen), 250 - len(seen))
    assert (got["acked"], got["lost"]) == (len(acked & inside), len(lost))
    assert got["phantom"] == len(seen - acked - doubt)
    assert (got["in_doubt"], got["in_doubt_present"]) == (len(doubt & inside), len(doubt & seen))
    assert (got["first_present"], got["last_present"]) == (min(seen), max(seen))
    spelled = [n for gap in got["gaps"] for n in range(gap["first"], gap["last"] + 1)]
    assert spelled == sorted(lost)
    for gap in got["gaps"]:
        assert gap["before"] == max((n for n in seen if n < gap["first"]), default=None)
        assert gap["after"] == min((n for n in seen if n > gap["last"]), default=None)
    filtered = bucket_rows(row, books, partial=True)
    assert (filtered["lost"], filtered["gaps"]) == (0, [])
    derived = bucket_rows(row | {"expected": bitmap(lost, begin)}, books, partial=False)
    assert (derived["lost"], derived["phantom"]) == (len(lost), len(seen))
    nothing = dict.fromkeys(["seen", "records", "corrupt", "first_send_us", "last_send_us"])
    missing = bucket_rows(row | nothing, books, partial=False)
    assert (missing["lost"], missing["records"]) == (len(acked & inside), 0)
    assert missing["first_present"] is None


def test_only_the_buckets_of_the_ledger_are_due() -> None:
    spans = [(0, 10), (5, BUCKET), (BUCKET * 2, BUCKET * 2), (BUCKET * 9, BUCKET * 11 - 1)]
    books = Books(("t", Entry(1, 2, "t", first, last)) for first, last in spans)
    assert list(books.buckets()) == [(("t", 1, 2), 0, 2), (("t", 1, 2), 9, 10)]


def test_no_row_stands_for_more_buckets_than_memory_holds() -> None:
    books = Books([("t", Entry(1, 2, "t", BUCKET, (2**17 + 2) * BUCKET))])
    assert list(books.buckets()) == [
        (("t", 1, 2), first, last)
        for first, last in ((1, 2**16), (2**16 + 1, 2**17), (2**17 + 1, 2**17 + 2))
    ]


def test_percentiles_are_read_from_buckets() -> None:
    buckets = {8: 50, 9: 49, 80: 1}
    assert quantile_us(buckets, 0.5) == bounds_us(8)[1] == 2.0
    assert quantile_us(buckets, 0.99) == bounds_us(9)[1]
    assert quantile_us(buckets, 1.0) == bounds_us(80)[1] == 1024.0
    assert bounds_us(0) == (0.0, 0.0)
    low, high = bounds_us(41)
    assert 1.09 < high / low < 1.091
    with pytest.raises(ValueError):
        quantile_us({}, 0.5)


def test_rounding_to_milliseconds_is_not_a_wrong_clock() -> None:
    assert bounds_us(-80) == (-1024.0, -(2 ** (79 / 8)))
    assert below_zero({-90: 3, -80: 5, -10: 7, 0: 9, 90: 11}) == 3


def test_no_share_of_the_latencies_is_above_the_longest() -> None:
    """The end of its bucket is."""
    row = {"run": 1, "topic": "t", "stage": "append", "bucket": 80, "count": 5, "max_us": 1000}
    (found,), _ = report._latency([row])
    assert bounds_us(80)[1] == 1024.0
    assert found["p50_ms"] == found["p99.9_ms"] == found["max_ms"] == 1.0
