from __future__ import annotations

import io
import struct
import uuid
from collections.abc import Callable

import kio.serial.readers as kio_readers
import kio.serial.writers as kio_writers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core.primitives import (
    Reader,
    int32_at,
    put_int32,
    write_compact_string,
    write_int16,
    write_int32,
    write_string,
    write_unsigned_varint,
)
from asyncproducer.errors import ConfigError, ProtocolError

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=300)


def reader(data: bytes, *, flexible: bool = False) -> Reader:
    return Reader(data, "test message", flexible=flexible)


def varint(value: int) -> bytes:
    out = bytearray()
    write_unsigned_varint(out, value)
    return bytes(out)


# -- numbers -------------------------------------------------------------------------------


def test_integers_are_signed_and_big_endian() -> None:
    data = bytes.fromhex("fffe 80000000 7fffffffffffffff 00 02")
    read = reader(data)
    assert read.int16() == -2
    assert read.int32() == -(2**31)
    assert read.int64() == 2**63 - 1
    assert read.boolean() is False
    assert read.boolean() is True
    read.finish()


def test_any_buffer_is_read() -> None:
    for data in (b"\x00\x07", bytearray(b"\x00\x07"), memoryview(b"\xff\x00\x07")[1:]):
        assert Reader(data, "test message").int16() == 7


@given(st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1), INT64)
def test_integers_are_written_and_read_as_struct_does(short: int, middle: int, long: int) -> None:
    out = bytearray()
    write_int16(out, short)
    write_int32(out, middle)
    assert out == struct.pack(">hi", short, middle)
    read = reader(bytes(out) + struct.pack(">q", long))
    assert (read.int16(), read.int32(), read.int64()) == (short, middle, long)


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_number_at_a_known_place_is_written_and_read_as_struct_does(value: int) -> None:
    out = bytearray(b"before" + bytes(4) + b"behind")
    put_int32(out, 6, value)
    assert out == b"before" + struct.pack(">i", value) + b"behind"
    assert int32_at(bytes(out), 6) == value


@pytest.mark.parametrize(
    ("write", "bits"),
    [pytest.param(write_int16, 16, id="16"), pytest.param(write_int32, 32, id="32")],
)
def test_an_integer_that_does_not_fit_is_not_written(
    write: Callable[[bytearray, int], None], bits: int
) -> None:
    out = bytearray()
    for value in (2 ** (bits - 1), -(2 ** (bits - 1)) - 1):
        with pytest.raises(ValueError, match=f"{value} does not fit in {bits // 8} bytes"):
            write(out, value)
    assert out == b""


@given(UINT32)
def test_varint_is_written_as_kio_writes_it_and_read_back(value: int) -> None:
    out = io.BytesIO()
    kio_writers.write_unsigned_varint(out, value)  # type: ignore[arg-type]  # a plain int will do
    assert varint(value) == out.getvalue()
    read = reader(varint(value))
    assert read.unsigned_varint() == value
    read.finish()


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**32 - 1, "ffffffff0f")],
)
def test_varint_vectors(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded
    assert reader(bytes.fromhex(encoded)).unsigned_varint() == value


@pytest.mark.parametrize("encoded", ["ffffffff10", "ffffffff7f", "8080808080", "ffffffffff01"])
def test_varint_over_32_bits_is_refused(encoded: str) -> None:
    with pytest.raises(ProtocolError, match="more than 32 bits"):
        reader(bytes.fromhex(encoded)).unsigned_varint()


@pytest.mark.parametrize("encoded", ["", "80", "ffffffff"])
def test_varint_without_its_end_is_refused(encoded: str) -> None:
    with pytest.raises(ProtocolError, match="without its end"):
        reader(bytes.fromhex(encoded)).unsigned_varint()


# -- strings and bytes ---------------------------------------------------------------------


@given(st.none() | TEXT)
def test_strings_of_both_kinds_are_those_of_kio(value: str | None) -> None:
    cases: tuple[tuple[Callable[..., None], Callable[..., None], bool], ...] = (
        (write_string, kio_writers.write_nullable_legacy_string, False),
        (write_compact_string, kio_writers.write_nullable_compact_string, True),
    )
    for write, kio_write, flexible in cases:
        out, kio_out = bytearray(), io.BytesIO()
        write(out, value)
        kio_write(kio_out, value)
        assert out == kio_out.getvalue()
        read = reader(bytes(out), flexible=flexible)
        assert read.nullable_string() == value
        read.finish()


def test_longest_string_fits_and_one_more_byte_does_not() -> None:
    for write in (write_string, write_compact_string):
        out = bytearray()
        write(out, "x" * 32767)
        with pytest.raises(ConfigError, match="32768 bytes"):
            write(out, "x" * 32768)


def test_string_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        write_string(bytearray(), "half \ud800 a pair")


@pytest.mark.parametrize(
    ("data", "flexible"),
    [
        (b"\xff\xff", False),  # null
        (b"\x00", True),
        (b"\xff\xfe", False),  # a negative length that is not null
        (b"\x00\x02a", False),  # a byte is missing
        (b"\x03a", True),
        (b"\xff\xff\xff\xff\x0f", True),  # 4 GiB
        (b"\x00\x02\xc3\x28", False),  # no UTF-8
        (b"\x03\xed\xa0", True),
    ],
)
def test_malformed_string_is_refused(data: bytes, flexible: bool) -> None:
    with pytest.raises(ProtocolError, match="malformed test message"):
        reader(data, flexible=flexible).string()


def test_byte_string_of_both_kinds() -> None:
    assert reader(b"\0\0\0\2\xff\x00").byte_string() == b"\xff\x00"
    assert reader(b"\x03\xff\x00", flexible=True).byte_string() == b"\xff\x00"


@pytest.mark.parametrize(
    ("data", "flexible"),
    [
        (b"\xff\xff\xff\xff", False),
        (b"\0", True),
        (b"\0\0\0\2a", False),
        (b"\x7f\xff\xff\xff", False),
    ],
)
def test_malformed_byte_string_is_refused(data: bytes, flexible: bool) -> None:
    with pytest.raises(ProtocolError):
        reader(data, flexible=flexible).byte_string()


def test_zero_uuid_is_none() -> None:
    some = uuid.uuid5(uuid.NAMESPACE_DNS, "kafka")
    assert reader(some.bytes).uuid() == some.bytes
    assert reader(bytes(16)).uuid() is None
    assert kio_readers.read_uuid(some.bytes, 0)[0] == some


# -- structure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "flexible", "problem"),
    [
        (b"\xff\xff\xff\xff", False, "null or a negative"),
        (b"\x80\x00\x00\x00", False, "null or a negative"),
        (b"\x00", True, "null or a negative"),
        (b"\x7f\xff\xff\xff" + bytes(8), False, "2147483647 elements"),
        (b"\xff\xff\xff\xff\x0f" + bytes(8), True, "4294967294 elements"),
        (b"\x00\x00\x00\x03" + bytes(8), False, "3 elements"),
    ],
)
def test_array_count_that_the_message_cannot_hold_is_refused(
    data: bytes, flexible: bool, problem: str
) -> None:
    with pytest.raises(ProtocolError, match=problem):
        reader(data, flexible=flexible).array_length(4)


def test_array_that_just_fits_is_accepted() -> None:
    read = reader(b"\x00\x00\x00\x02" + bytes(8))
    assert read.array_length(4) == 2
    read = reader(b"\x03" + bytes(8), flexible=True)
    read.skip_int32_array()
    read.finish()


def test_tagged_fields_are_skipped_only_in_flexible_messages() -> None:
    read = reader(b"\x02\x07\x01a\x87\x01\x02bc", flexible=True)
    read.skip_tagged_fields()
    read.finish()
    read = reader(b"")
    read.skip_tagged_fields()
    read.finish()


@pytest.mark.parametrize("data", ["", "01", "0107", "010702", "01070261", "ffffffff0f", "020000"])
def test_malformed_tagged_fields_are_refused(data: str) -> None:
    with pytest.raises(ProtocolError):
        reader(bytes.fromhex(data), flexible=True).skip_tagged_fields()


def test_tagged_field_must_be_read_to_its_end_and_not_beyond() -> None:
    read = reader(b"\x02abz", flexible=True)
    outer = read.enter()
    with pytest.raises(ProtocolError):
        read.advance(3)
    read.advance(1)
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        read.leave(outer)
    read.advance(1)
    read.leave(outer)
    read.advance(1)
    read.finish()


def test_tagged_field_larger_than_the_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a tagged field of 3 bytes, 2 bytes are left"):
        reader(b"\x03ab", flexible=True).enter()


def test_cursor_never_moves_backwards() -> None:
    read = reader(b"abcd")
    read.advance(2)
    with pytest.raises(ProtocolError):
        read.advance(-1)
    assert read.position == 2


def test_error_names_message_problem_and_place() -> None:
    read = reader(b"\x00\x01\x02")
    read.int16()
    with pytest.raises(ProtocolError) as raised:
        read.int32()
    assert str(raised.value) == "malformed test message: 4 bytes expected, 1 are left at byte 2"
    with pytest.raises(ProtocolError, match="1 bytes too many at byte 2"):
        read.finish()
