"""Arrow batches through a stage: the stamp, the trace, and where a row came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from asyncproducer.spark.audit.stamps import (
    HEADER,
    TRACE_HEADER,
    encode_stamp,
    read_stamp,
    read_trace,
)
from orders_pipeline.batches import ERROR_HEADER, Work, envelopes, headers_array
from orders_pipeline.judging import Approved
from orders_pipeline.orders import Codec
from orders_pipeline.rules import Result

SENT_US = 1_700_000_000_000_000


def shout(codec: Codec, values: Sequence[bytes | None]) -> list[Result]:
    """Values in capitals; those with a question as they are, too, and elsewhere."""
    results = []
    for row, value in enumerate(values):
        if value == b"drop":
            continue
        results.append(Result(row, "loud", (value or b"").upper()))
        if value and b"?" in value:
            results.append(Result(row, "questions", value, "is a question"))
    return results


def stamp(seq: int, value: bytes) -> tuple[str, bytes]:
    return HEADER, encode_stamp(1, 2, seq, SENT_US, value)


def batch(values: list[bytes], headers: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k%d" % n for n in range(len(values))], pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": headers_array([each or [] for each in headers]),
            "topic": pa.array(["in"] * len(values)),
            "partition": pa.array([5] * len(values), pa.int32()),
            "offset": pa.array(range(100, 100 + len(values)), pa.int64()),
        }
    )


def done(values: list[bytes], headers: list[Any]) -> list[dict[str, Any]]:
    work = Work("loudness", shout, Codec())
    rows: list[dict[str, Any]] = []
    for result in work(iter([batch(values, headers)])):
        rows += result.to_pylist()
    return rows


def header(row: dict[str, Any], name: str) -> list[bytes]:
    return [each["value"] for each in row["headers"] if each["key"] == name]


def test_results_keep_key_and_place_of_their_input() -> None:
    values = [b"a", b"drop", b"what?"]
    rows = done(values, [[stamp(n, value)] for n, value in enumerate(values)])
    names = ("key", "value", "topic", "__topic", "__partition", "__offset")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (b"k0", b"A", "loud", "in", 5, 100),
        (b"k2", b"WHAT?", "loud", "in", 5, 102),
        (b"k2", b"what?", "questions", "in", 5, 102),
    ]


def test_a_stamp_goes_along_and_holds_for_the_new_value() -> None:
    rows = done([b"what?"], [[stamp(7, b"what?")]])
    for row in rows:
        (found,) = header(row, HEADER)
        assert read_stamp(found)[:4] == (1, 2, 7, SENT_US)
        assert read_stamp(found).holds(row["value"])
        assert row["age_us"] > 0


def test_a_stamp_that_does_not_hold_is_not_mended() -> None:
    _, damaged = stamp(7, b"another value")
    (row,) = done([b"value"], [[(HEADER, damaged)]])
    assert header(row, HEADER) == [damaged]
    assert not read_stamp(damaged).holds(row["value"])


def test_each_stage_adds_a_trace_and_keeps_what_is_there() -> None:
    (row,) = done([b"a"], [[("mine", b"x"), stamp(0, b"a"), (TRACE_HEADER, b"an earlier one")]])
    assert [each["key"] for each in row["headers"]] == [HEADER, "mine", TRACE_HEADER, TRACE_HEADER]
    earlier, own = header(row, TRACE_HEADER)
    assert earlier == b"an earlier one"
    trace = read_trace(own)
    assert trace.stage == "loudness"
    assert SENT_US < trace.in_us <= trace.out_us


def test_an_error_is_told_in_a_header() -> None:
    loud, question = done([b"what?"], [[stamp(0, b"what?")]])
    assert header(loud, ERROR_HEADER) == []
    assert header(question, ERROR_HEADER) == [b"is a question"]


def test_records_without_a_stamp_go_through_without_one() -> None:
    rows = done([b"a", b"b"], [None, [(HEADER, b"short")]])
    assert [header(row, HEADER) for row in rows] == [[], [b"short"]]
    assert [row["age_us"] for row in rows] == [None, None]


def test_headers_that_are_null_are_none() -> None:
    """Spark's Kafka source gives null where a record has no headers."""
    kind = headers_array([]).type
    column = pa.array([None, [{"key": "a", "value": None}], [], None], kind)
    assert [each.others for each in envelopes(column)] == [(), (("a", None),), (), ()]
    assert [each.others for each in envelopes(column.slice(1, 2))] == [(("a", None),), ()]


def test_an_empty_batch_has_no_result() -> None:
    assert done([], []) == []


def test_orders_count_as_approved_by_their_value_and_stamp() -> None:
    codec = Codec()
    order = {
        **{"order_id": "o", "customer": "c", "country": "DE", "ship_to": "DE", "sku": "s"},
        **{"quantity": 1, "unit_cents": 1, "currency": "EUR", "placed_us": 1, "total_cents": 1},
    }
    values = [
        codec.encode("scored", order | {"fraud_score": 0.1, "approved": approved})
        for approved in (True, False, True, True)
    ]
    headers: list[Any] = [[stamp(seq, b"")] for seq in (7, 8, 9)]
    (found,) = Approved(codec)(iter([batch(values, [*headers, None])]))
    assert found.to_pydict() == {"seq": [7, 9]}
