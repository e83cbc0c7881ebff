from __future__ import annotations

import re

import pytest

from asyncproducer.cli.error_tables import (
    REQUESTS,
    control_part,
    effect,
    group_part,
    produce_table,
    transactional_part,
)
from asyncproducer.core.answers import CONTROL
from asyncproducer.core.outcome import TRANSACTIONAL
from asyncproducer.errors import ErrorCode, needs_refresh

HEAD = ["answer", "codes", "class", "retriable", "refresh", "batch", "transaction", "the user"]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a table."""
    return [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]


def sections(text: str) -> dict[str, list[list[str]]]:
    """The tables below the headings."""
    parts = re.split(r"^### (.*)\n", text, flags=re.MULTILINE)
    return {head: rows(body) for head, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_produce_has_a_row_per_code() -> None:
    lines = produce_table().splitlines()
    assert lines[0].split(" | ")[2:] == [
        *("class", "retriable", "refresh", "batch", "in the log", "transaction", "the user |"),
    ]
    assert len(lines) == 2 + len(ErrorCode)
    assert "| 0 | NONE |  |  |  | acknowledge | yes | goes on | `RecordMetadata` |" in lines
    assert (
        "| 13 | NETWORK_EXCEPTION | `DeliveryTimeout` | yes | metadata | retry | maybe "
        "| goes on; abortable if it fails | nothing; the error when its time is up |"
    ) in lines
    assert (
        "| 17 | INVALID_TOPIC_EXCEPTION | `BrokerRejected` |  |  | fail | no | abortable "
        "| the error |"
    ) in lines
    assert (
        "| 31 | CLUSTER_AUTHORIZATION_FAILED | `BrokerRejected` |  |  | fatal; plain: fail | no "
        "| fatal | the error; then each call raises `AuthorizationError` |"
    ) in lines
    assert (
        "| 90 | PRODUCER_FENCED | `BrokerRejected` |  |  | fatal; plain: fail | no | fatal "
        "| the error; then each call raises `ProducerFenced`; `BrokerError` without a "
        "`transactional_id` |"
    ) in lines


@pytest.mark.parametrize("request_", REQUESTS)
def test_every_code_has_everything_for_every_request(request_: str) -> None:
    for code in ErrorCode:
        row = effect(request_, code)
        assert row.answer
        assert row.batch
        assert row.transaction
        assert row.user
        assert bool(row.error) == (row.answer not in ("take", "done", "acknowledge")), (
            f"{code.name} needs a class"
        )


@pytest.mark.parametrize("request_", [name for name in REQUESTS if name != "Produce"])
def test_a_request_has_each_code_in_one_row(request_: str) -> None:
    heading = request_.replace("...", "Metadata:")
    head, _, *found = sections(control_part() + transactional_part() + group_part())[heading]
    assert head == HEAD
    listed = {row[1]: row for row in found}
    named = {name: row for row in found for name in row[1].split(", ")}
    assert sum(len(row[1].split(", ")) for row in found) == len(named)
    for code in ErrorCode:
        wanted = effect(request_, code)
        row = named.get(code.name)
        if row is None and wanted.retriable:
            row = listed.get("all other retriable codes")
        if row is None:
            row = listed["all other codes"]
        retriable = "yes" if wanted.retriable else ""
        assert [row[0], *row[2:]] == [
            *(wanted.answer, wanted.error, retriable, wanted.refresh),
            *(wanted.batch, wanted.transaction, wanted.user),
        ], code.name


def test_codes_side_by_side() -> None:
    head, _, *found = sections(control_part())["All by code"]
    assert head == ["code", "name", "retriable", "refresh", *CONTROL]
    assert [row[:2] for row in found] == [[str(c.value), c.name] for c in sorted(ErrorCode)]
    assert [row[3] == "metadata" for row in found] == list(map(needs_refresh, sorted(ErrorCode)))
    assert (
        "31 CLUSTER_AUTHORIZATION_FAILED   disconnect refused refused repeat repeat if wanted "
        "take denied"
    ) in [" ".join(row) for row in found]
    head, _, *found = sections(transactional_part())["All of a transaction by code"]
    assert head == ["code", "name", "retriable", "refresh", *TRANSACTIONAL]
    assert [row[:2] for row in found] == [[str(c.value), c.name] for c in sorted(ErrorCode)]
    lines = [" ".join(row) for row in found]
    assert "16 NOT_COORDINATOR yes coordinator repeat find find find find find" in lines
    assert (
        "7 REQUEST_TIMED_OUT yes coordinator (TxnOffsetCommit) "
        "repeat repeat repeat repeat find repeat"
    ) in lines


def test_what_a_group_has_committed_is_asked_for_again_or_the_call_raises() -> None:
    assert [request for request in REQUESTS if request.endswith("of a group")] == [
        "FindCoordinator of a group",
        "OffsetFetch of a group",
    ]
    waits, raises = "nothing; the error after `max_block_ms`", "`committed_offsets()` raises it"
    expected = {
        ErrorCode.NONE: ("", "", "nothing"),
        ErrorCode.UNSTABLE_OFFSET_COMMIT: ("`RequestTimedOut`, cause `BrokerError`", "", waits),
        ErrorCode.NOT_COORDINATOR: (
            "`RequestTimedOut`, cause `BrokerError`",
            "coordinator",
            waits,
        ),
        ErrorCode.GROUP_AUTHORIZATION_FAILED: ("`AuthorizationError`", "", raises),
        ErrorCode.INVALID_GROUP_ID: ("`BrokerError`", "", raises),
    }
    for code, wanted in expected.items():
        row = effect("OffsetFetch of a group", code)
        assert (row.error, row.refresh, row.user) == wanted
        assert (row.batch, row.transaction) == ("goes on", "goes on")
