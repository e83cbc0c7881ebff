from __future__ import annotations

from typing import Any

import pytest

from asyncproducer.bench.report import losses, page, rows, section, tables


def result(peer: str, number: int, **numbers: Any) -> dict[str, Any]:
    common = {"workload": "W1", "case": "6 partitions", "version": "1"}
    return {**common, "peer": peer, "round": number, **numbers}


def rates(**by_peer: list[float]) -> list[dict[str, Any]]:
    return [
        result(peer.replace("_", "-"), number, records_per_s=value)
        for peer, values in by_peer.items()
        for number, value in enumerate(values, 1)
    ]


def test_a_row_has_the_median_and_the_range_of_the_rounds() -> None:
    (row,) = rows(rates(asyncproducer=[10, 30, 20]))
    assert (row.peer, row.rounds) == ("asyncproducer", 3)
    stat = row.stats["records_per_s"]
    assert (stat.median, stat.low, stat.high, stat.ratio) == (20, 10, 30, None)


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine was slow in the last round, for both.
    found = rows(rates(asyncproducer=[100, 100, 10], aiokafka=[50, 50, 5]))
    assert found[1].stats["records_per_s"].ratio == 2.0
    # Of the medians it would be 1.
    found = rows(rates(asyncproducer=[10, 20, 30], aiokafka=[30, 20, 10]))
    assert found[1].stats["records_per_s"].ratio == 1.0
    found = rows(rates(asyncproducer=[10, 20, 90], aiokafka=[20, 10, 30]))
    assert found[1].stats["records_per_s"].ratio == 2.0


def test_a_ratio_above_one_means_that_ours_is_better_whatever_is_measured() -> None:
    names = ("records_per_s", "cpu_us_per_record", "broker_cpu_us_per_record", "p99_ms")
    results = [
        result(peer, 1, **dict(zip(names, values, strict=True)))
        for peer, values in (
            ("asyncproducer", (200, 1.0, 3.0, 4.0)),
            ("aiokafka", (100, 4.0, 1.5, 2.0)),
        )
    ]
    stats = rows(results)[1].stats
    assert [stats[name].ratio for name in names] == [2.0, 4.0, 0.5, 0.5]


def test_growth_of_memory_has_no_ratio_which_may_be_next_to_nothing() -> None:
    results = [result(p, 1, rss_growth_mib=50.0) for p in ("asyncproducer", "aiokafka")]
    assert rows(results)[1].stats["rss_growth_mib"].ratio is None


def test_a_round_that_one_of_both_has_not_measured_is_no_part_of_the_ratio() -> None:
    results = rates(asyncproducer=[100, 300], aiokafka=[50])
    assert rows(results)[1].stats["records_per_s"].ratio == 2.0


def test_a_number_of_zero_has_no_ratio() -> None:
    assert rows(rates(asyncproducer=[0], aiokafka=[5]))[1].stats["records_per_s"].ratio is None
    assert rows(rates(asyncproducer=[5], aiokafka=[0]))[1].stats["records_per_s"].ratio is None


def test_without_the_compiled_one_the_next_of_ours_is_what_others_are_compared_with() -> None:
    found = rows(rates(asyncproducer_python=[80], aiokafka=[40]))
    assert [row.stats["records_per_s"].ratio for row in found] == [None, 2.0]


def test_losing_ratios_are_bold_and_listed() -> None:
    results = rates(asyncproducer=[100], confluent=[250], aiokafka=[50])
    text = tables(results)
    assert "| 6 partitions | confluent | 250, **0.40x** |" in text
    assert "| 6 partitions | aiokafka | 50, 2.00x |" in text
    assert losses(results) == [
        "W1, 6 partitions: confluent has 250 records/s, 2.50 times better",
    ]


def test_the_limit_and_our_other_forms_are_no_losses() -> None:
    faster = rates(asyncproducer=[100], wire_replay=[900], asyncproducer_uvloop=[200])
    assert losses(faster) == []
    assert "**0.11x**" in tables(faster)


def test_what_failed_and_what_was_left_out_is_told_in_its_row() -> None:
    results = [
        *rates(asyncproducer=[100]),
        result("java", 1, error="Traceback\n  File\nValueError: a | b"),
        result("aiokafka", 1, skipped="this version has no such thing"),
    ]
    text = tables(results)
    assert r"| 6 partitions | java | ValueError: a \| b |" in text
    assert "| 6 partitions | aiokafka | this version has no such thing |" in text


def test_a_failed_round_does_not_hide_the_others() -> None:
    results = [*rates(asyncproducer=[100, 100], java=[50]), result("java", 2, error="broken")]
    assert "| 6 partitions | java | 50, 2.00x broken |" in tables(results)


def document(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"command": "asyncproducer bench", "facts": {"cpus": 2}, "results": results}


def test_a_section_has_command_machine_versions_and_losses() -> None:
    text = section(document(rates(asyncproducer=[100], confluent=[250])))
    assert "asyncproducer bench\n" in text
    assert "cpus 2." in text
    assert "confluent 1" in text
    assert "- W1, 6 partitions: confluent" in text
    won = section(document(rates(asyncproducer=[100], confluent=[50])))
    assert "- nowhere in this run" in won


def test_a_section_says_that_nobody_else_was_measured() -> None:
    """Not that nobody is better."""
    others = [result("asyncproducer-python", 1), result("wire-replay", 1)]
    text = section(document([*rates(asyncproducer=[100]), *others]))
    assert "- no other producer was measured in this run" in text
    assert "nowhere" not in text


def test_a_page_keeps_what_is_around_its_results() -> None:
    before = "# Title\n\n<!-- results -->\nold\n<!-- end -->\n\nThe end.\n"
    one = document(rates(asyncproducer=[100]))
    made = page(before, [one], ["results/W1.svg"])
    assert made.startswith("# Title\n\n<!-- results -->\n")
    assert made.endswith("<!-- end -->\n\nThe end.\n")
    assert "![results/W1.svg](results/W1.svg)" in made
    assert "old" not in made
    assert page(made, [one], ["results/W1.svg"]) == made


def test_a_page_without_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="<!-- results --> and <!-- end --> are missing"):
        page("# Title\n", [], [])
