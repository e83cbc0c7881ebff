from __future__ import annotations

import pytest

from asyncproducer.spark.audit.stamps import (
    SIZE,
    Stamp,
    Trace,
    encode_stamp,
    encode_trace,
    read_stamp,
    read_trace,
)


def test_the_layout_is_the_documented_one() -> None:
    # CRC-32C of "123456789" is the check value of its definition.
    stamp = encode_stamp(1, 0x0203, 0x0405, 0x0607, b"123456789")
    assert stamp.hex(" ", 4) == ("00000001 00000203 00000000 00000405 00000000 00000607 e3069283")
    assert len(stamp) == SIZE


def test_what_was_written_is_read() -> None:
    payload = b"some payload"
    stamp = read_stamp(encode_stamp(2**32 - 1, 7, 2**63 - 1, 5, payload) + payload)
    assert stamp[:4] == (2**32 - 1, 7, 2**63 - 1, 5)
    assert stamp.holds(payload)
    assert not stamp.holds(payload + b".")
    assert stamp == Stamp(*stamp)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((2**32, 0, 0, 0), "run is 4294967296: it must be within 0 and 4294967295"),
        ((0, -1, 0, 0), "lane is -1"),
        ((0, 0, 2**63, 0), "seq is 9223372036854775808"),
        ((0, 0, 0, -5), "send_us is -5"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    numbers: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_stamp(*numbers)


@pytest.mark.parametrize("data", [b"", bytes(27), b"\xff" * 28])
def test_bytes_that_are_no_stamp_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_stamp(data)


def test_a_trace_is_read_as_it_was_written() -> None:
    assert read_trace(encode_trace("prüfen", 10, 2**63 - 1)) == Trace("prüfen", 10, 2**63 - 1)
    assert encode_trace("a", 1, 2).hex() == "0000000000000001000000000000000261"
    for wrong in (bytes(15), b"\xff" * 16):
        with pytest.raises(ValueError):
            read_trace(wrong)
