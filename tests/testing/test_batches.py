from __future__ import annotations

import io
from datetime import UTC, datetime

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.records.schema import NewRecordBatch, Record, RecordHeader
from kio.records.writers import write_batch
from kio.static.primitive import TZAwareMicros, i8, i16, i32, i64

from asyncproducer.core.compression import codec
from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import (
    BatchError,
    StoredRecord,
    check_crc,
    decode_batch,
    decode_records,
    encode_batch,
    encode_marker,
    increment_sequence,
    read_header,
    rewrite_offset,
    rewrite_timestamp,
    split_batches,
    with_header,
)

T0 = 1_700_000_000_000

# Byte for byte what Java's producer writes.
PLAIN = bytes.fromhex(
    "00000000000000000000003affffffff02e99b8dd80000000000000000018bcfe568000000018bcfe56800"
    "ffffffffffffffffffffffffffff0000000110000000026b027600"
)
IDEMPOTENT = bytes.fromhex(
    "000000000000000000000057ffffffff021ce182b70000000000020000018bcfe568000000018bcfe56805"
    "0000000000000fa000070000000c0000000316000000010a68656c6c6f0024000a02066b65790104046831"
    "0278046832010c000504000000"
)
TRANSACTIONAL = bytes.fromhex(
    "00000000000000000000003affffffff02c0a597380010000000000000018bcfe568000000018bcfe56800"
    "00000000000000010000000000000000000110000000026b027600"
)
LZ4 = bytes.fromhex(
    "000000000000000000000049ffffffff02924fa7900003000000000000018bcfe568000000018bcfe56800"
    "ffffffffffffffffffffffffffff0000000104224d186040820900008010000000026b02760000000000"
)
SNAPPY = bytes.fromhex(
    "000000000000000000000050ffffffff0208ee48690002000000000000018bcfe568000000018bcfe56800"
    "ffffffffffffffffffffffffffff0000000182534e415050590000000001000000010000000b0920100000"
    "00026b027600"
)
KV = StoredRecord(0, T0, b"k", b"v", ())


@pytest.mark.parametrize("batch", [PLAIN, LZ4, SNAPPY], ids=["plain", "lz4", "snappy"])
def test_javas_batches_are_read_whatever_their_codec(batch: bytes) -> None:
    """RC-01"""
    assert decode_batch(batch) == [KV]


def test_null_and_empty_and_headers_and_earlier_timestamps_are_told_apart() -> None:
    """RC-02"""
    assert decode_batch(IDEMPOTENT) == [
        StoredRecord(0, T0, None, b"hello", (), 4000, 7, 12),
        StoredRecord(1, T0 + 5, b"key", None, (("h1", b"x"), ("h2", None)), 4000, 7, 13),
        StoredRecord(2, T0 - 3, b"", b"", (), 4000, 7, 14),
    ]


def test_the_transactional_bit_and_its_producer_are_read() -> None:
    (record,) = decode_batch(TRANSACTIONAL)
    assert record == KV._replace(producer_id=1, producer_epoch=0, sequence=0, is_transactional=True)


def test_our_own_writer_makes_javas_bytes() -> None:
    pair = [(b"k", b"v")]
    assert encode_batch(pair, timestamps=[T0]) == PLAIN
    transactional = encode_batch(
        pair, timestamps=[T0], producer_id=1, producer_epoch=0, base_sequence=0, attributes=0x10
    )
    assert transactional == TRANSACTIONAL
    snappy = encode_batch(pair, timestamps=[T0], attributes=2, compress=codec("snappy").compress)
    assert snappy == SNAPPY


bytes_or_null = st.none() | st.binary(max_size=300)
records = st.lists(
    st.tuples(
        bytes_or_null,
        bytes_or_null,
        st.lists(st.tuples(st.text(max_size=5), bytes_or_null), max_size=3),
        st.integers(0, 2**40),
    ),
    min_size=1,
    max_size=5,
)


@given(rows=records, producer_id=st.integers(-1, 2**63 - 1), sequence=st.integers(0, 2**31 - 1))
def test_what_kio_writes_is_what_is_read(
    rows: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]],
    producer_id: int,
    sequence: int,
) -> None:
    """RC-02, with an independent writer."""
    # Whole seconds: kio keeps times as datetimes, and rounds on the way through a float.
    times = [milliseconds // 1000 for *_, milliseconds in rows]
    out = io.BytesIO()
    write_batch(
        out,
        NewRecordBatch(
            producer_id=i64(producer_id),
            producer_epoch=i16(3),
            base_sequence=i32(sequence),
            attributes=i16(0),
            records=tuple(
                Record(
                    attributes=i8(0),
                    timestamp=TZAwareMicros.parse(datetime.fromtimestamp(time, UTC)),
                    offset=i64(index),
                    key=key,
                    value=value,
                    headers=tuple(RecordHeader(key=k.encode(), value=v) for k, v in headers),
                )
                for index, ((key, value, headers, _), time) in enumerate(
                    zip(rows, times, strict=True)
                )
            ),
        ),
    )
    assert decode_batch(out.getvalue()) == [
        StoredRecord(
            index,
            time * 1000,
            key,
            value,
            tuple(headers),
            producer_id,
            3,
            (sequence + index) % 2**31,
        )
        for index, ((key, value, headers, _), time) in enumerate(zip(rows, times, strict=True))
    ]


def test_sequences_wrap_around_within_a_batch() -> None:
    """RC-02, RC-04"""
    batch = encode_batch(
        [(None, b"a"), (None, b"b")],
        timestamps=[T0, T0],
        producer_id=1,
        producer_epoch=0,
        base_sequence=2**31 - 1,
    )
    assert [record.sequence for record in decode_batch(batch)] == [2**31 - 1, 0]
    assert read_header(batch).last_sequence == 0
    assert read_header(PLAIN).last_sequence == -1
    assert increment_sequence(2**31 - 8, 10) == 2


def test_a_single_flipped_bit_is_found() -> None:
    """RC-01"""
    for position in range(17, len(PLAIN)):
        damaged = bytearray(PLAIN)
        damaged[position] ^= 0x10
        with pytest.raises(BatchError, match="CRC") as raised:
            decode_batch(bytes(damaged))
        assert raised.value.code == ErrorCode.CORRUPT_MESSAGE


def test_the_crc_does_not_cover_what_a_leader_fills_in() -> None:
    batch = rewrite_offset(PLAIN, base_offset=77, leader_epoch=5)
    header = read_header(batch)
    check_crc(batch, header)
    assert (header.base_offset, header.leader_epoch, header.last_offset) == (77, 5, 77)
    assert decode_batch(batch) == [KV._replace(offset=77)]


def test_log_append_time_counts_for_all_records() -> None:
    batch = rewrite_timestamp(IDEMPOTENT, read_header(IDEMPOTENT), T0 + 99, log_append_time=True)
    assert {record.timestamp for record in decode_batch(batch)} == {T0 + 99}
    assert [record.value for record in decode_batch(batch)] == [b"hello", None, b""]


def test_a_corrected_maximum_leaves_the_records_alone() -> None:
    batch = rewrite_timestamp(PLAIN, read_header(PLAIN), T0 + 99)
    assert decode_batch(batch) == [KV]
    assert read_header(batch).max_timestamp == T0 + 99


def test_control_batches_are_marked() -> None:
    header = read_header(TRANSACTIONAL)
    batch = with_header(TRANSACTIONAL, header._replace(attributes=0x30))
    assert [record.is_control for record in decode_batch(batch)] == [True]


# -- what is not well formed


@pytest.mark.parametrize("committed", [True, False])
def test_a_marker_ends_a_transaction(committed: bool) -> None:
    (record,) = decode_batch(encode_marker(7, 3, committed=committed, timestamp=T0))
    assert record.is_transactional
    assert record.is_control
    assert record.is_commit is committed
    assert (record.producer_id, record.producer_epoch, record.sequence) == (7, 3, -1)
    assert not record._replace(is_control=False).is_commit  # a user's key may look like that


def batch_of(body: bytes, count: int = 1) -> bytes:
    """These bytes as the records of a batch whose header and CRC are right."""
    header = read_header(PLAIN)._replace(
        batch_length=49 + len(body), record_count=count, last_offset_delta=count - 1
    )
    return with_header(PLAIN[:61] + body, header)


def record(body: bytes) -> bytes:
    """A record of fewer than 64 bytes: its length, and the attributes."""
    return bytes([2 * (len(body) + 1), 0]) + body


# timestamp delta 0, offset delta 0
START = b"\0\0"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b"", "record 0: the data ends within a varint", id="nothing"),
        pytest.param(b"\x80", "ends within a varint", id="half a length"),
        pytest.param(b"\x01" + START, "length is -1", id="negative length"),
        pytest.param(b"\x00", "length is 0", id="empty record"),
        pytest.param(b"\x40\x00" + START, "length is 32, 3 bytes are left", id="too long"),
        pytest.param(record(b""), "ends within a varint", id="no timestamp"),
        pytest.param(record(b"\x80" * 9 + b"\x02"), "more than 64 bits", id="65-bit varlong"),
        pytest.param(record(b"\x80" * 10 + b"\x01"), "more than 64 bits", id="11-byte varlong"),
        pytest.param(record(b"\0"), "ends within a varint", id="no offset"),
        pytest.param(record(b"\0\x02\x01\x01\0"), "offset delta is 1", id="wrong offset"),
        pytest.param(record(b"\0" + b"\x80" * 5 + b"\0"), "more than 32 bits", id="6-byte varint"),
        pytest.param(record(b"\0" + b"\x80" * 4 + b"\x10"), "more than 32 bits", id="33-bit"),
        pytest.param(record(START + b"\x03\x01\0"), "length of the key is -2", id="key -2"),
        pytest.param(record(START + b"\x20\x01\0"), "length of the key is 16", id="key too long"),
        pytest.param(record(START + b"\x01\x05\0"), "length of the value is -3", id="value -3"),
        pytest.param(record(START + b"\x01\x20\0"), "value is 16, 1 bytes", id="value too long"),
        pytest.param(record(START + b"\x01\x01\x01"), "it has -1 headers", id="headers -1"),
        pytest.param(record(START + b"\x01\x01\x20aa"), "16 headers in 2", id="too many headers"),
        pytest.param(record(START + b"\x01\x01\x02\x01\x01"), "is null", id="null header key"),
        pytest.param(record(START + b"\x01\x01\x02\x02\xff\x01"), "not UTF-8", id="header key"),
        pytest.param(record(START + b"\x01\x01\x02\x20k\x01"), "header key is 16", id="long key"),
        pytest.param(record(START + b"\x01\x01\x02\x02k\x20"), "header value is 16", id="long hv"),
        pytest.param(record(START + b"\x01\x01\0zz"), "2 bytes are left behind its", id="rest"),
    ],
)
def test_records_that_are_not_well_formed_are_refused(body: bytes, message: str) -> None:
    """RC-03"""
    with pytest.raises(BatchError, match=message) as raised:
        decode_batch(batch_of(body))
    assert raised.value.code == ErrorCode.INVALID_RECORD


ONE_RECORD = PLAIN[61:]
TWO_RECORDS = ONE_RECORD + bytes([ONE_RECORD[0], 0, 0, 2]) + ONE_RECORD[4:]


@pytest.mark.parametrize("name", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_number_of_records_must_be_right(name: str) -> None:
    """RC-03: too few and too many, plain and compressed."""
    codec_id = ["none", "gzip", "snappy", "lz4", "zstd"].index(name)
    body = TWO_RECORDS if name == "none" else codec(name).compress(TWO_RECORDS)
    header = read_header(batch_of(body, count=2))._replace(attributes=codec_id)
    for count, message in ((1, "bytes are left behind the 1 records"), (3, "ends within a varint")):
        with pytest.raises(BatchError, match=message):
            decode_batch(with_header(bytes(61) + body, header._replace(record_count=count)))
    assert len(decode_batch(with_header(bytes(61) + body, header))) == 2


def test_data_that_cannot_be_decompressed_is_refused() -> None:
    for attributes in (1, 2, 3, 4, 5):
        header = read_header(PLAIN)._replace(attributes=attributes)
        with pytest.raises(BatchError) as raised:
            decode_records(PLAIN, header)
        assert raised.value.code == ErrorCode.UNKNOWN_SERVER_ERROR


def test_headers_that_cannot_be_are_refused() -> None:
    with pytest.raises(BatchError, match="less than a batch header") as raised:
        decode_batch(PLAIN[:60])
    assert raised.value.code == ErrorCode.CORRUPT_MESSAGE
    with pytest.raises(BatchError, match="says that it has 70 bytes, but has 71"):
        decode_batch(PLAIN + b"\0")
    with pytest.raises(BatchError, match="magic byte 1"):
        decode_batch(with_header(PLAIN, read_header(PLAIN)._replace(magic=1)))


def test_batches_are_split_and_a_cut_one_at_the_end_is_left_out() -> None:
    data = PLAIN + IDEMPOTENT + SNAPPY
    assert list(split_batches(data)) == [PLAIN, IDEMPOTENT, SNAPPY]
    for cut in range(1, len(SNAPPY) + 1):
        assert list(split_batches(data[:-cut])) == [PLAIN, IDEMPOTENT]


@pytest.mark.parametrize(
    ("position", "data"), [(8, b"\0\0\0\x0d"), (8, b"\xff\xff\xff\xff"), (16, b"\x03")]
)
def test_a_length_or_magic_that_cannot_be_ends_the_splitting(position: int, data: bytes) -> None:
    damaged = PLAIN[:position] + data + PLAIN[position + len(data) :]
    with pytest.raises(BatchError) as raised:
        list(split_batches(damaged))
    assert raised.value.code == ErrorCode.CORRUPT_MESSAGE


@given(st.binary(max_size=200), st.integers(0, 5))
def test_random_bytes_are_records_or_refused(body: bytes, count: int) -> None:
    """RC-03: no other exception leaves the decoder, whatever it reads."""
    try:
        assert len(decode_batch(batch_of(body, count))) == count
    except BatchError:
        pass


def test_the_crc_is_castagnolis() -> None:
    assert crc32c.crc32c(b"123456789") == 0xE3069283
