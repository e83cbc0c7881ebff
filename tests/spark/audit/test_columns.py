from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncproducer.spark.audit.columns import decode, decode_traces, encode
from asyncproducer.spark.audit.stamps import encode_stamp, encode_trace, read_stamp

TYPES = [pa.binary(), pa.large_binary(), pa.binary_view()]


def told(value: bytes | None, header: bytes | None) -> tuple[Any, ...]:
    """What `decode` must say of a record, by the functions for one record."""
    size = len(value or b"")
    source = value or b"" if header is None else header
    try:
        if header is not None and len(header) != 28:
            raise ValueError
        stamp = read_stamp(source)
    except ValueError:
        return (False, 0, 0, 0, 0, False, size)
    payload = (value or b"")[28 if header is None else 0 :]
    return (True, *stamp[:4], stamp.holds(payload), size)


def some_record(chance: random.Random) -> tuple[bytes | None, bytes | None]:
    payload = chance.randbytes(chance.choice([0, 1, 5, 100]))
    numbers = (chance.getrandbits(32), chance.getrandbits(32), chance.getrandbits(63), 17)
    stamp = encode_stamp(*numbers, payload)
    return chance.choice(
        [
            (stamp + payload, None),
            (stamp + payload + b"damaged", None),
            (payload, None),
            (None, None),
            (payload, stamp),
            (None, encode_stamp(*numbers)),
            (payload, b"short"),
            (payload, stamp + b"."),
            (b"\xff" * 40, None),
            (stamp + payload, b""),
        ]
    )


@pytest.mark.parametrize("binary", TYPES)
@pytest.mark.parametrize("seed", range(5))
def test_a_column_is_decoded_as_its_records_are(binary: pa.DataType, seed: int) -> None:
    chance = random.Random(seed)
    records = [some_record(chance) for _ in range(300)]
    values = pa.array([value for value, _ in records], binary)
    headers = pa.array([header for _, header in records], binary)
    expected = [told(*record) for record in records]
    assert list(zip(*(column.tolist() for column in decode(values, headers)), strict=True)) == (
        expected
    )
    # A slice lies at an offset in its buffers.
    part = decode(values[100:150], headers[100:150])
    assert list(zip(*(column.tolist() for column in part), strict=True)) == expected[100:150]


def test_without_headers_the_values_are_read() -> None:
    values = pa.array([encode_stamp(1, 2, 3, 4, b"x") + b"x", b"other", None])
    stamps = decode(values)
    assert stamps.found.tolist() == [True, False, False]
    assert stamps.crc_ok.tolist() == [True, False, False]
    assert stamps.seq.tolist() == [3, 0, 0]
    assert stamps.size.tolist() == [29, 5, 0]


@pytest.mark.parametrize("rows", [0, 3])
def test_columns_without_a_byte_are_decoded(rows: int) -> None:
    nothing = pa.array([None] * rows, pa.binary())
    assert decode(nothing, nothing).found.tolist() == [False] * rows
    assert decode(pa.chunked_array([nothing])).size.tolist() == [0] * rows


def test_columns_are_encoded_as_single_records_are() -> None:
    payloads = [b"", b"a", b"bcd"]
    lanes, seqs, times = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    made = encode(9, lanes, seqs, times, pa.array(payloads))
    assert made.to_pylist() == [
        encode_stamp(9, 1 + n, 4 + n, 7 + n, payload) + payload
        for n, payload in enumerate(payloads)
    ]


def test_traces_are_decoded_and_what_is_none_is_left_out() -> None:
    column = pa.array(
        [
            [encode_trace("a", 1, 2), encode_trace("ü", 3, 4)],
            [],
            None,
            [b"short", encode_trace("b", 5, 6), b"\xff" * 20],
        ],
        pa.list_(pa.binary()),
    )
    expected = [
        [{"stage": "a", "in_us": 1, "out_us": 2}, {"stage": "ü", "in_us": 3, "out_us": 4}],
        [],
        [],
        [{"stage": "b", "in_us": 5, "out_us": 6}],
    ]
    assert decode_traces(column).to_pylist() == expected
    assert decode_traces(column[1:]).to_pylist() == expected[1:]
    assert decode_traces(column[:0]).to_pylist() == []
