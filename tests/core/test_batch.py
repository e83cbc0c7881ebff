from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncproducer.core.batch as module
from asyncproducer.core.batch import (
    BATCH_OVERHEAD,
    NO_HEADERS,
    RECORD_OVERHEAD,
    ListedValues,
    ProducerBatch,
    Sizes,
    batch_upper_bound,
    encode_headers,
    plain_headers,
    read_records,
)
from asyncproducer.core.compression import Codec, codec
from asyncproducer.core.delivery import PENDING, SPLIT, Delivery, Failure
from asyncproducer.core.sequences import increment
from asyncproducer.encoding import header_list
from asyncproducer.errors import BrokerRejected, IllegalStateError, ProtocolError
from asyncproducer.testing.batches import BatchError, decode_batch, read_header

T0 = 1_700_000_000_000
CODECS = [None, *(codec(name) for name in ("gzip", "snappy", "lz4", "zstd"))]
HEADERS = [("h1", b"x"), ("h2", None), ("", b"")]

GOLDEN_A = bytes.fromhex(
    "00000000000000000000003affffffff02e99b8dd80000000000000000018bcfe568000000018bcfe56800ffff"
    "ffffffffffffffffffffffff0000000110000000026b027600"
)
GOLDEN_B = bytes.fromhex(
    "000000000000000000000057ffffffff021ce182b70000000000020000018bcfe568000000018bcfe568050000"
    "000000000fa000070000000c0000000316000000010a68656c6c6f0024000a02066b6579010404683102780468"
    "32010c000504000000"
)
GOLDEN_C = bytes.fromhex(
    "00000000000000000000003affffffff02c0a597380010000000000000018bcfe568000000018bcfe568000000"
    "0000000000010000000000000000000110000000026b027600"
)
GOLDEN_D = bytes.fromhex(
    "000000000000000000000049ffffffff02924fa7900003000000000000018bcfe568000000018bcfe56800ffff"
    "ffffffffffffffffffffffff0000000104224d186040820900008010000000026b02760000000000"
)
GOLDEN_E = bytes.fromhex(
    "000000000000000000000050ffffffff0208ee48690002000000000000018bcfe568000000018bcfe56800ffff"
    "ffffffffffffffffffffffff0000000182534e415050590000000001000000010000000b092010000000026b02"
    "7600"
)


def new(
    *,
    limit: int = 10_000,
    codec: Codec | None = None,
    ratio: float = 1.0,
    created_at: float = 5.0,
) -> ProducerBatch:
    return ProducerBatch(
        "orders", 3, write_limit=limit, created_at=created_at, codec=codec, ratio=ratio
    )


def add(
    batch: ProducerBatch,
    value: Any = b"v",
    *,
    key: Any = None,
    timestamp: int = T0,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> Delivery:
    delivery = batch.try_append(timestamp, key, value, encode_headers(headers))
    assert delivery is not None
    return delivery


def finish(batch: ProducerBatch) -> bytes:
    """What is left to do before the batch can be sent; returns its bytes."""
    batch.close()
    if batch.needs_compression():
        assert batch.codec is not None
        batch.compressed(batch.codec.compress(batch.uncompressed()))
    batch.seal()
    return wire(batch)


def wire(batch: ProducerBatch) -> bytes:
    return b"".join(batch.buffers())


def values(batch: ProducerBatch) -> list[bytes | None]:
    return [record.value for record in decode_batch(wire(batch))]


# -- the bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [(None, GOLDEN_A), ("lz4", GOLDEN_D), ("snappy", GOLDEN_E)]
)
def test_one_record_has_the_bytes_that_java_writes(name: str | None, expected: bytes) -> None:
    """RC-01: vectors A, D and E."""
    batch = new(codec=None if name is None else codec(name))
    add(batch, b"v", key=b"k")
    assert finish(batch) == expected


def test_producer_state_nulls_headers_and_negative_deltas_have_the_bytes_that_java_writes() -> None:
    """RC-01: vector B."""
    batch = new()
    add(batch, b"hello")
    add(batch, None, key=b"key", timestamp=T0 + 5, headers=HEADERS[:2])
    add(batch, b"", key=b"", timestamp=T0 - 3)
    batch.set_producer_state(4000, 7, 12, transactional=False)
    assert finish(batch) == GOLDEN_B


def test_a_transactional_batch_has_the_bytes_that_java_writes() -> None:
    """RC-01: vector C."""
    batch = new()
    add(batch, b"v", key=b"k")
    batch.set_producer_state(1, 0, 0, transactional=True)
    assert finish(batch) == GOLDEN_C


def test_the_crc_covers_everything_from_the_attributes_on() -> None:
    """RC-01: a changed byte is noticed, whichever it is."""
    for position in range(21, len(GOLDEN_B)):
        damaged = bytearray(GOLDEN_B)
        damaged[position] ^= 0x40
        with pytest.raises(BatchError):
            decode_batch(bytes(damaged))


def castagnoli(data: bytes) -> int:
    """CRC-32C bit by bit, as it is defined, by no library."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("which", CODECS)
def test_the_crc_that_sealing_writes_is_castagnolis(which: Codec | None) -> None:
    """Spec 2.5: the check value says what CRC it is, and `seal` writes that one."""
    check = b"123456789"
    assert castagnoli(check) == 0xE3069283
    batch = new(codec=which)
    add(batch, check, key=check, headers=[("h", check)])
    batch.set_producer_state(7, 0, 100, transactional=False)
    data = finish(batch)
    assert struct.unpack_from(">I", data, 17) == (castagnoli(data[21:]),)


def test_the_check_value_of_the_crc_comes_out_of_sealing() -> None:
    """Spec 2.5: 0xE3069283, of a batch whose last bytes are "123456789".

    CRCs of data of one length are linear: what two tails that differ make of the CRC does
    not depend on what is before them.
    """
    crcs: list[int] = []
    for tail in (b"123456789", bytes(9)):
        batch = new()
        add(batch, headers=[("h", tail)])
        data = finish(batch)
        assert data.endswith(tail)
        crcs += struct.unpack_from(">I", data, 17)
    assert crcs[0] ^ crcs[1] ^ castagnoli(bytes(9)) == 0xE3069283


@pytest.mark.parametrize(
    ("delta", "encoded"),
    [
        (0, "00"),
        (-1, "01"),
        (1, "02"),
        (63, "7e"),
        (64, "8001"),
        (-64, "7f"),
        (-65, "8101"),
        (8191, "fe7f"),
        (8192, "808001"),
        (2147483647, "feffffff0f"),
        (-2147483648, "ffffffff0f"),
        (2**40, "808080808040"),
        (-(2**40), "ffffffffff3f"),
        (2**62, "808080808080808080" + "01"),
        (2**63 - 1, "feffffffffffffffff01"),
        # The oldest timestamp there is (none, -1) after the newest one.
        (-(2**63), "ffffffffffffffffff01"),
    ],
)
def test_timestamp_deltas_are_zigzag_varints(delta: int, encoded: str) -> None:
    """Spec 2.1: both ends of what 64 bits hold are among the vectors."""
    base = 2**63 - 1 if delta < 0 else 0
    batch = new()
    add(batch, timestamp=base)
    begin = batch.size
    add(batch, timestamp=base + delta)
    record = bytes(batch.uncompressed())[begin - BATCH_OVERHEAD :]
    rest = bytes.fromhex(encoded) + bytes.fromhex("02" + "01" + "0276" + "00")
    assert record == bytes([2 * (1 + len(rest)), 0]) + rest
    read = read_records(batch.uncompressed(), 2)
    assert [record.timestamp_delta for record in read] == [0, delta]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 8191, 8192, 1_048_575, 1_048_576])
def test_lengths_of_every_varint_size(size: int) -> None:
    batch = new()
    add(batch, bytes(size), key=bytes(size), headers=[("h", bytes(size))])
    [record] = decode_batch(finish(batch))
    assert record.key == record.value == record.headers[0][1] == bytes(size)


def test_offset_deltas_of_every_varint_size() -> None:
    batch = new(limit=200_000)
    for _ in range(8200):
        add(batch, b"")
    assert [r.offset for r in decode_batch(finish(batch))] == list(range(8200))


_BYTES = st.none() | st.binary(max_size=200)
_RECORDS = st.lists(
    st.tuples(
        _BYTES,
        _BYTES,
        st.integers(0, 2**52),
        st.lists(st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=70)), max_size=3),
    ),
    min_size=1,
    max_size=30,
)


@given(
    records=_RECORDS,
    which=st.sampled_from(CODECS),
    sequence=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 2**15 - 1),
    transactional=st.booleans(),
)
@settings(max_examples=150)
def test_what_is_written_is_what_a_broker_reads(
    records: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]],
    which: Codec | None,
    sequence: int,
    epoch: int,
    transactional: bool,
) -> None:
    """RC-02, RC-05, RC-07: nothing is lost, sizes are exact, sequences wrap inside a batch."""
    batch = new(codec=which)
    sizes = [batch.estimated_size()]
    for key, value, timestamp, headers in records:
        add(batch, value, key=key, timestamp=timestamp, headers=headers)
        sizes.append(batch.estimated_size())
    batch.set_producer_state(2**40, epoch, sequence, transactional=transactional)
    data = finish(batch)
    assert sizes == sorted(sizes)
    assert sizes[0] == BATCH_OVERHEAD
    assert len(data) == batch.estimated_size()
    read = decode_batch(data)
    assert [(r.key, r.value, r.timestamp, list(r.headers)) for r in read] == [
        (key, value, timestamp, headers) for key, value, timestamp, headers in records
    ]
    assert [r.sequence for r in read] == [increment(sequence, n) for n in range(len(records))]
    header = read_header(data)
    assert header.base_timestamp == records[0][2]
    assert header.max_timestamp == max(r[2] for r in records)
    assert (header.producer_id, header.producer_epoch) == (2**40, epoch)
    assert header.is_transactional == transactional
    assert header.codec_id == (0 if which is None else which.codec_id)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_keys_and_values_may_be_any_buffer(kind: Any) -> None:
    batch = new()
    delivery = add(batch, kind(b"value"), key=kind(b"key"))
    [record] = decode_batch(finish(batch))
    assert (record.key, record.value) == (b"key", b"value")
    batch.acknowledge(0, -1)
    assert delivery.result().serialized_value_size == 5


@pytest.mark.parametrize("before", [0, 1, 63, 64, 8191, 8192])
@pytest.mark.parametrize("delta", [0, -5, 64, 2**40])
def test_values_in_a_row_are_written_as_single_ones(before: int, delta: int) -> None:
    items = [b"", b"x", *(bytes([n % 251]) * n for n in (61, 62, 63, 64, 65, 4095, 8191, 8192))]
    items += [b"y" * 70_000, b"z"]
    one, other = new(limit=1_000_000), new(limit=1_000_000)
    for batch in (one, other):
        for _ in range(before):
            add(batch, None)
    assert (
        one.append_values(
            ListedValues([*items, None]), 1, len(items) + 1, T0 + delta, 900_000, 900_000
        )
        == 11
    )
    for value in items[1:]:
        add(other, value, timestamp=T0 + delta)
    assert (one.count, one.size) == (other.count, other.size) == (before + 11, one.size)
    assert one.max_record_size == other.max_record_size
    assert one.max_timestamp == other.max_timestamp
    assert finish(one) == finish(other)


@pytest.mark.parametrize("before", [0, 55, 8_180])
@pytest.mark.parametrize("size", [0, 1, 8, 60, 100])
def test_values_of_one_size_are_written_as_single_ones(before: int, size: int) -> None:
    """Their number in the batch gets longer among them, and with it the record."""
    values = [b"%03d" % n * 40 for n in range(20)]
    items = [value[:size] for value in values]
    one, other = new(limit=1_000_000), new(limit=1_000_000)
    for batch in (one, other):
        for _ in range(before):
            add(batch, None)
    split = 7
    assert one.append_values(ListedValues(items), 0, split, T0, 900_000, 900_000) == split
    assert one.append_values(ListedValues(items), split, 20, T0, 900_000, 900_000) == 20 - split
    for value in items:
        add(other, value)
    assert (one.count, one.size) == (other.count, other.size)
    assert finish(one) == finish(other)


@pytest.mark.parametrize("limit", [200, 201, 260, 261])
def test_values_in_a_row_end_before_a_limit(limit: int) -> None:
    batch = new(limit=1_000_000)
    values = ListedValues([bytes(50)] * 9)
    first = batch.append_values(values, 0, 9, T0, limit, 50)
    # The next one is not in because of its 50 bytes alone.
    assert batch.size < limit <= batch.size + 50
    assert first == batch.count == batch.append_values(values, 0, 9, T0, 0, 50) + first


def test_values_in_a_row_end_before_one_that_is_larger_than_a_record_may_be() -> None:
    batch = new(limit=1_000_000)
    values = ListedValues([bytes(50), b"", bytes(51), bytes(50)])
    assert batch.append_values(values, 0, 4, T0, 900_000, 50) == 2
    assert batch.append_values(values, 2, 4, T0, 900_000, 50) == 0
    assert batch.append_values(values, 2, 4, T0, 900_000, 51) == 2


@pytest.mark.skipif(
    not str(module.__file__).endswith(".py"), reason="compiled, they are read one by one"
)
def test_of_values_in_a_row_only_those_are_read_that_have_room() -> None:
    """Else each batch would read what comes after it."""

    class Counted(ListedValues):
        read = 0

        def plain(self, first: int, end: int) -> Iterator[bytes | None]:
            for item in super().plain(first, end):
                self.read += 1
                yield item

    values = Counted([bytes(50)] * 500)
    assert new(limit=1_000_000).append_values(values, 0, 500, T0, 200, 50) == values.read - 1 == 2


@given(st.lists(st.integers(-1, 3), max_size=8), st.sampled_from([None, -1]))
def test_sizes_are_those_that_were_put(sizes: list[int], missing: int | None) -> None:
    kept = Sizes(len(sizes)) if missing is None else Sizes(len(sizes), missing)
    for number, size in enumerate(sizes):
        if size != missing:
            kept.put(number, size)
            kept.put(number, size)  # a row may be read again
    assert [kept.of(number) for number in range(len(sizes))] == sizes


def test_a_value_that_no_record_can_have_does_not_stop_others() -> None:
    kept = Sizes(3)
    for number, size in enumerate((2**31, 1, 2**40)):
        kept.put(number, size)
    assert kept.of(1) == 1


def test_values_in_a_row_begin_with_bytes_in_an_open_batch() -> None:
    batch = new()
    assert batch.append_values(ListedValues(["text", b"v"]), 0, 2, T0, 1000, 1000) == 0
    assert batch.append_values(ListedValues([b"v"]), 1, 1, T0, 1000, 1000) == 0
    assert batch.append_values(ListedValues([b"v"]), 0, 1, T0, 1000, 1000) == 1
    batch.close()
    assert batch.append_values(ListedValues([b"v"]), 0, 1, T0, 1000, 1000) == 0
    batch.release()
    assert batch.append_values(ListedValues([b"v"]), 0, 1, T0, 1000, 1000) == 0
    assert batch.count == 1


def test_a_value_is_copied_when_it_is_appended() -> None:
    batch = new()
    value = bytearray(b"before")
    add(batch, value)
    value[:] = b"after!"
    finish(batch)
    assert values(batch) == [b"before"]


def test_headers_keep_their_order_and_may_repeat() -> None:
    headers = [("b", b"1"), ("a", b"2"), ("b", None), ("ä", b"")]
    batch = new()
    add(batch, headers=headers)
    [record] = decode_batch(finish(batch))
    assert list(record.headers) == headers
    assert encode_headers([]) == NO_HEADERS


#: Whether the module that is tested is compiled.
COMPILED = not str(module.__file__).endswith(".py")

LONG = "ä" * 5000


@pytest.mark.parametrize(
    "headers",
    [
        [],
        (),
        {},
        {"a": b"1", "b": None, "c": "text"},
        [("a", b""), ("a", b"x" * 9000), ("ä\U0001f600", "ö"), ("", None)],
        (("name", LONG), (LONG, LONG)),
        [("h", b"v")] * 70,
    ],
)
def test_plain_headers_are_encoded_as_all_others_are(headers: Any) -> None:
    encoded = plain_headers(headers)
    assert encoded == (encode_headers(header_list(headers)) if COMPILED else None)


class Name(str):
    """A str that might do something else."""


@pytest.mark.parametrize(
    "headers",
    [
        "text",
        b"bytes",
        7,
        iter([("a", b"1")]),
        [["a", b"1"]],
        [("a",)],
        [("a", b"1", 2)],
        ["ab"],
        [("a", 1)],
        [("a", bytearray(b"1"))],
        [(1, b"1")],
        [(Name("a"), b"1")],
        [("a", Name("1"))],
        [("a\udc80", b"1")],
        [("good", b"1"), ("a", "\udc80")],
        {1: b"1"},
    ],
)
def test_headers_that_are_not_plain_go_the_long_way(headers: Any) -> None:
    assert plain_headers(headers) is None


# -- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "headers", "bound"),
    [
        (None, b"hello", [], 90),
        (b"k", b"v", [], 87),
        (b"key", None, [("h1", b"x"), ("h2", None)], 97),
        (None, bytes(1000), [], 1086),
        (None, bytes(1_048_489), [], 1_048_576),
        (None, bytes(134_217_728), [], 134_217_728 + 5 + 2 + 82),
    ],
)
def test_the_upper_bound_of_a_record(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], bound: int
) -> None:
    """The vectors of spec 2.7: what max_request_size and buffer_memory are compared with."""
    assert batch_upper_bound(key, value, encode_headers(headers)) == bound


@given(
    key=_BYTES,
    value=_BYTES,
    first=st.integers(0, 2**62),
    second=st.integers(0, 2**62),
)
def test_no_record_is_larger_than_its_upper_bound(
    key: bytes | None, value: bytes | None, first: int, second: int
) -> None:
    batch = new()
    add(batch, timestamp=first)
    before = batch.size
    add(batch, value, key=key, timestamp=second)
    bound = batch_upper_bound(key, value, NO_HEADERS)
    assert batch.size - before <= bound - BATCH_OVERHEAD
    assert batch.max_record_size == max(bound, batch_upper_bound(None, b"v", NO_HEADERS))


def test_the_overheads_are_those_of_the_format() -> None:
    assert (BATCH_OVERHEAD, RECORD_OVERHEAD) == (61, 21)


def test_records_are_taken_as_long_as_they_fit_exactly() -> None:
    """RA-02: the limit itself is still in, one byte more is not."""
    record = 1 + 1 + 1 + 1 + 1 + 2 + 20 - 1 + 1  # see spec 2.3: no key, 20 bytes of value
    exact = new(limit=BATCH_OVERHEAD + 2 * record)
    add(exact, bytes(20))
    assert not exact.is_full()
    add(exact, bytes(20))
    assert exact.size == exact.write_limit
    assert exact.is_full()
    short = new(limit=BATCH_OVERHEAD + 2 * record - 1)
    add(short, bytes(20))
    assert short.try_append(T0, None, bytes(20), NO_HEADERS) is None
    assert short.count == 1


@pytest.mark.parametrize("which", [None, codec("lz4")])
def test_the_first_record_always_fits_and_fills_the_batch(which: Codec | None) -> None:
    """RA-03, RA-24: a large first record is taken, and then not even a small one."""
    batch = new(limit=100, codec=which)
    assert not batch.is_full()
    add(batch, bytes(1000))
    assert batch.is_full()
    assert batch.try_append(T0, None, b"", NO_HEADERS) is None
    finish(batch)
    assert values(batch) == [bytes(1000)]


def test_the_size_is_guessed_where_records_will_be_compressed() -> None:
    """Spec 2.7: 61 + int(uncompressed * ratio * 1.05), the next record counted as it is."""
    batch = new(limit=1000, codec=codec("lz4"), ratio=0.5)
    add(batch, bytes(992))  # 1001 bytes with its overhead
    uncompressed = batch.size - BATCH_OVERHEAD
    assert batch.estimated_size() == BATCH_OVERHEAD + int(uncompressed * 0.5 * 1.05)
    assert not batch.is_full()
    assert batch.try_append(T0, None, bytes(500), NO_HEADERS) is None
    add(batch, bytes(100))
    assert batch.count == 2


def test_a_batch_grows_beyond_its_limit_where_compression_promises_much() -> None:
    batch = new(limit=500, codec=codec("zstd"), ratio=0.01)
    for number in range(100):
        add(batch, b"%090d" % number)
    assert batch.size > 9000
    assert len(finish(batch)) == batch.estimated_size()
    assert values(batch) == [b"%090d" % number for number in range(100)]


def until_full(batch: ProducerBatch, *, size: int) -> None:
    while batch.try_append(T0, None, bytes(size), NO_HEADERS) is not None:
        assert batch.count < 10_000
        assert batch.buffer is not None
        # What is really there, not only what is written.
        assert batch.size <= len(batch.buffer) <= max(batch.capacity, batch.write_limit)


@pytest.mark.parametrize("size", [0, 1, 90, 299])
@pytest.mark.parametrize("memory", [500, 501, 700, 999, 1000, 1024, 1700, 5000])
def test_the_bytes_of_a_batch_never_exceed_the_memory_it_holds(memory: int, size: int) -> None:
    """Whatever compression promises: until it is done, the records take what they take."""
    batch = ProducerBatch(
        "orders",
        3,
        write_limit=500,
        created_at=5.0,
        codec=codec("zstd"),
        ratio=0.001,
        memory=memory,
    )
    assert batch.capacity == memory
    until_full(batch, size=size)
    assert memory - size - RECORD_OVERHEAD <= batch.size <= memory
    count = batch.count
    finish(batch)
    assert values(batch) == [bytes(size)] * count


def test_a_batch_that_gets_more_memory_takes_more_up_to_that() -> None:
    batch = ProducerBatch(
        "orders", 3, write_limit=500, created_at=5.0, codec=codec("lz4"), ratio=0.001, memory=700
    )
    for capacity in (700, 1100, 1101, 4000):
        batch.capacity = capacity
        until_full(batch, size=50)
        assert batch.size > capacity - 80


@pytest.mark.parametrize("memory", [500, 1086, 1200])
@pytest.mark.parametrize("which", [None, codec("lz4")])
def test_a_single_record_gets_what_it_needs_and_no_byte_more(
    which: Codec | None, memory: int
) -> None:
    """Twice the limit would not do for it."""
    batch = ProducerBatch(
        "orders", 3, write_limit=500, created_at=5.0, codec=which, ratio=0.001, memory=memory
    )
    add(batch, bytes(1000))
    assert batch.buffer is not None
    assert len(batch.buffer) == batch.size > 1000
    assert not batch.has_room(memory - batch.size + 1)


def test_a_batch_that_holds_no_memory_has_no_bound_but_its_limit() -> None:
    """Parts of a split: theirs was never asked for."""
    batch = new(limit=500, codec=codec("lz4"), ratio=0.001)
    for _ in range(100):
        add(batch, bytes(90))
    assert batch.size > 9000


def test_compressing_tells_the_ratio_of_the_records_without_the_header() -> None:
    batch = new(codec=codec("lz4"))
    add(batch, bytes(2000))
    batch.close()
    before = batch.size - BATCH_OVERHEAD
    assert batch.codec is not None
    payload = batch.codec.compress(batch.uncompressed())
    assert batch.needs_compression()
    assert batch.compressed(payload) == len(payload) / before
    assert not batch.needs_compression()
    assert batch.estimated_size() == BATCH_OVERHEAD + len(payload)


# -- the life of a batch -------------------------------------------------------------------


def test_a_closed_batch_takes_no_records() -> None:
    """PB-07, RC-06."""
    batch = new()
    add(batch)
    batch.close()
    assert batch.is_full()
    assert batch.try_append(T0, None, b"v", NO_HEADERS) is None
    assert batch.count == 1


@pytest.mark.parametrize("memory", [0, 500_000])
@pytest.mark.parametrize("size", [10, 1000, 14_990, 40_000, 70_000])
def test_the_crc_is_that_of_the_whole_however_it_came_in(size: int, memory: int) -> None:
    """In several buffers where it has grown, and for another producer state again."""
    batch = ProducerBatch("orders", 3, write_limit=16_384, created_at=5.0, memory=memory)
    batch.widen(500_000, True)
    values = [bytes([n % 251]) * size for n in range(400)]
    written = 0
    while batch.size + 2 * (size + RECORD_OVERHEAD) < 300_000 and written < 400:
        if written % 3:
            written += batch.append_values(
                ListedValues(values), written, written + 1 + written % 7, T0, 400_000, 400_000
            )
        else:
            add(batch, values[written])
            written += 1
    batch.set_producer_state(7, 0, 100, transactional=False)
    first = finish(batch)
    assert [record.value for record in decode_batch(first)] == values[:written]
    batch.set_producer_state(7, 1, 0, transactional=False)
    batch.seal()
    assert [record.value for record in decode_batch(wire(batch))] == values[:written]


def test_an_empty_batch_is_never_full_and_never_sealed() -> None:
    """RC-05."""
    batch = new(limit=61)
    assert not batch.is_full()
    batch.close()
    with pytest.raises(IllegalStateError, match="empty batch"):
        batch.seal()


def test_an_open_batch_cannot_be_sealed() -> None:
    batch = new()
    add(batch)
    with pytest.raises(IllegalStateError, match="OPEN"):
        batch.seal()


@pytest.mark.parametrize(
    ("producer_id", "epoch", "sequence", "transactional"),
    [(-1, -1, -1, True), (7, -1, 0, False), (7, 0, -1, False), (7, -1, -1, True)],
)
def test_an_incomplete_producer_state_cannot_be_sealed(
    producer_id: int, epoch: int, sequence: int, transactional: bool
) -> None:
    """RC-06."""
    batch = new()
    add(batch)
    batch.close()
    batch.set_producer_state(producer_id, epoch, sequence, transactional=transactional)
    with pytest.raises(IllegalStateError, match="producer id"):
        batch.seal()


def test_records_are_compressed_before_they_are_sealed_if_there_is_a_codec() -> None:
    batch = new(codec=codec("lz4"))
    add(batch)
    batch.close()
    with pytest.raises(IllegalStateError, match="compressed before"):
        batch.seal()
    plain = new()
    add(plain)
    add(plain)
    plain.close()
    plain.compressed(b"what")
    with pytest.raises(IllegalStateError, match="without a codec"):
        plain.seal()
    with pytest.raises(IllegalStateError, match="without a codec"):
        plain.split(100)


@pytest.mark.parametrize("which", CODECS)
def test_sealing_again_changes_only_crc_and_producer_state(which: Codec | None) -> None:
    """Spec 2.2: a retry after an epoch bump rewrites the header, the records stay."""
    batch = new(codec=which)
    add(batch, b"value" * 30)
    batch.set_producer_state(7, 0, 100, transactional=False)
    first = finish(batch)
    batch.seal()
    assert wire(batch) == first, "the same again has the same bytes"
    batch.set_producer_state(7, 1, 0, transactional=False)
    batch.seal()
    second = wire(batch)
    changed = {at for at, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}
    assert changed <= {*range(17, 21), *range(43, 57)}
    header = read_header(second)
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    decode_batch(second)


def test_sealing_again_leaves_a_header_alone_that_is_on_its_way() -> None:
    batch = new(codec=codec("lz4"))
    add(batch)
    batch.set_producer_state(7, 0, 100, transactional=False)
    first = finish(batch)
    on_their_way = batch.buffers()
    batch.set_producer_state(7, 1, 0, transactional=False)
    batch.seal()
    assert b"".join(on_their_way) == first


def test_the_records_are_handed_out_without_a_copy() -> None:
    batch = new()
    add(batch, bytes(5000))
    finish(batch)
    [buffer] = batch.buffers()
    assert isinstance(buffer, memoryview)
    assert buffer.obj is batch.buffer
    squeezed = new(codec=codec("gzip"))
    add(squeezed, bytes(5000))
    finish(squeezed)
    assert squeezed.buffers()[1] is squeezed.payload


def test_a_released_batch_has_no_bytes_any_more() -> None:
    """RC-06."""
    batch = new()
    add(batch)
    finish(batch)
    batch.release()
    for use in (batch.buffers, batch.uncompressed, batch.seal):
        with pytest.raises(IllegalStateError, match="given its buffer back"):
            use()
    unclosed = new()
    unclosed.release()
    with pytest.raises(IllegalStateError, match="given its buffer back"):
        add(unclosed)


def test_a_released_batch_still_tells_its_records_fate() -> None:
    batch = new()
    deliveries = [add(batch), add(batch)]
    finish(batch)
    batch.release()
    batch.acknowledge(500, -1)
    assert [delivery.result().offset for delivery in deliveries] == [500, 501]


def test_the_repr_tells_what_is_asked_first() -> None:
    batch = new()
    add(batch, b"")
    assert repr(batch) == "<ProducerBatch orders-3 1 records 68 bytes attempts=0 seq=-1>"


# -- splitting -----------------------------------------------------------------------------


def sealed(
    sizes: Sequence[int], *, codec: Codec | None = None
) -> tuple[ProducerBatch, list[Delivery]]:
    batch = new(limit=10_000_000, codec=codec, created_at=5.0)
    deliveries = [
        add(batch, b"%04d" % n + bytes(size), key=b"k", timestamp=T0 - n, headers=HEADERS)
        for n, size in enumerate(sizes)
    ]
    finish(batch)
    return batch, deliveries


def read_parts(parts: Sequence[ProducerBatch]) -> list[list[Any]]:
    return [decode_batch(finish(part)) for part in parts]


@pytest.mark.parametrize("which", CODECS)
def test_a_split_keeps_all_that_the_records_are(which: Codec | None) -> None:
    """PB-04, PB-05, RA-20: keys, values, headers, timestamps, order, codec."""
    batch, _ = sealed([50] * 7, codec=which)
    before = decode_batch(wire(batch))
    parts = batch.split(200)
    assert len(parts) >= 2
    read = read_parts(parts)
    after = [record for part in read for record in part]
    assert [r._replace(offset=0) for r in after] == [r._replace(offset=0) for r in before]
    for part, records in zip(parts, read, strict=True):
        header = read_header(wire(part))
        assert (header.base_offset, header.magic) == (0, 2)
        assert header.codec_id == (0 if which is None else which.codec_id)
        assert [record.offset for record in records] == list(range(part.count))
        assert part.is_split
        assert not part.is_open
        assert (part.topic, part.partition, part.created_at) == ("orders", 3, 5.0)
        assert (part.attempts, part.sends, part.memory, part.retry_at) == (0, 0, 0, 0.0)


def test_deliveries_follow_their_records_into_the_parts() -> None:
    """RA-20: offsets come from the parts, in whichever order they end."""
    batch, deliveries = sealed([50] * 5)
    ended: list[int] = []
    for number, delivery in enumerate(deliveries):
        delivery.add_done_callback(lambda _, number=number: ended.append(number))  # type: ignore[misc]
    parts = batch.split(220)
    assert [part.count for part in parts] == [2, 2, 1]
    assert batch.state == SPLIT
    assert not any(delivery.done() for delivery in deliveries)
    parts[1].acknowledge(700, -1)
    assert ended == [2, 3]
    assert [d.done() for d in deliveries] == [False, False, True, True, False]
    parts[0].acknowledge(100, -1)
    parts[2].fail(Failure(BrokerRejected, "no"))
    assert [d.result().offset for d in deliveries[:4]] == [100, 101, 700, 701]
    assert isinstance(deliveries[4].exception(), BrokerRejected)
    assert ended == [2, 3, 0, 1, 4]


def test_the_first_record_of_a_part_is_taken_whatever_its_size() -> None:
    """Spec 3.9."""
    batch, _ = sealed([1000, 1000, 5, 5])
    assert [part.count for part in batch.split(100)] == [1, 1, 1, 1]


def test_splitting_a_part_halves_it() -> None:
    """RA-23: the target is half its size, but never below its largest record."""
    batch, _ = sealed([100] * 32)
    first, second = batch.split(10_000_000)
    assert (first.count, second.count) == (16, 16)
    finish(first)
    assert [part.count for part in first.split(10_000_000)] == [7, 7, 2]
    uneven, _ = sealed([10, 10, 900, 10, 1000])
    part, _ = uneven.split(1_900)
    finish(part)
    assert [p.count for p in part.split(10_000_000)] == [2, 1, 1]


@pytest.mark.parametrize("which", CODECS)
def test_splitting_a_batch_that_is_below_the_target_halves_it(which: Codec | None) -> None:
    batch, _ = sealed([100] * 16, codec=which)
    assert [part.count for part in batch.split(10_000_000)] == [8, 8]


@pytest.mark.parametrize("which", CODECS)
@pytest.mark.parametrize("size", [0, 1000])
def test_repeated_splits_end_at_single_records(which: Codec | None, size: int) -> None:
    """RA-23: 100 records, batch.size 1 MiB; none lost, none twice. Also where a record's
    upper bound is above the size of several, which must not make a split a copy."""
    batch = new(limit=1_048_576, codec=which)
    for number in range(100):
        add(batch, b"%d" % number + bytes(size))
    finish(batch)
    waiting = [batch]
    single: list[bytes] = []
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds < 300
        batch = waiting.pop(0)
        if batch.count == 1:
            [value] = values(batch)
            assert value is not None
            single.append(value.rstrip(b"\x00"))
            continue
        parts = batch.split(1_048_576)
        read_parts(parts)
        waiting[:0] = parts
    assert single == [b"%d" % number for number in range(100)]


def test_parts_sort_between_the_neighbours_of_their_batch() -> None:
    batch, _ = sealed([50] * 4)
    batch.order = (7,)
    parts = batch.split(220)
    finish(parts[0])
    inner = parts[0].split(220)
    orders = [(6,), inner[0].order, inner[1].order, parts[1].order, (8,)]
    assert orders == sorted(orders)
    assert len(set(orders)) == 5


def test_parts_inherit_what_is_known_about_the_log() -> None:
    batch, _ = sealed([50] * 4)
    batch.maybe_written = batch.is_stored = True
    batch.transactional = True
    for part in batch.split(200):
        assert part.maybe_written
        assert part.persisted() == "yes"
        assert part.transactional


def test_a_batch_before_compression_can_be_split_as_well() -> None:
    batch = new(codec=codec("lz4"))
    for number in range(4):
        add(batch, b"%d" % number + bytes(60))
    batch.close()
    assert [part.count for part in batch.split(150)] == [1, 1, 1, 1]


def test_a_single_record_and_a_batch_that_is_done_are_not_split() -> None:
    """Spec 3.9; SN-11 for the expired one."""
    batch, _ = sealed([50])
    with pytest.raises(IllegalStateError, match="one record"):
        batch.split(100)
    done, deliveries = sealed([50, 50])
    done.fail(Failure(BrokerRejected, "expired"))
    with pytest.raises(IllegalStateError, match="PENDING"):
        done.split(100)
    assert [type(d.exception()) for d in deliveries] == [BrokerRejected] * 2


# -- reading records -----------------------------------------------------------------------


def region(*records: tuple[bytes | None, bytes | None]) -> bytes:
    batch = new()
    for key, value in records:
        add(batch, value, key=key)
    return bytes(batch.uncompressed())


def test_records_are_read_back_with_their_headers_encoded() -> None:
    batch = new()
    add(batch, b"v", key=b"", timestamp=T0)
    add(batch, None, key=None, timestamp=T0 - 9, headers=HEADERS)
    first, second = read_records(batch.uncompressed(), 2)
    assert first == (0, 0, b"", b"v", NO_HEADERS)
    assert second == (-9, 1, None, None, encode_headers(HEADERS))


def test_too_few_and_too_many_records_are_noticed() -> None:
    """RC-03."""
    data = region((b"k", b"v"), (b"k", b"v"))
    assert len(list(read_records(data, 2))) == 2
    with pytest.raises(ProtocolError, match="behind its last record"):
        list(read_records(data, 1))
    with pytest.raises(ProtocolError, match="cut off"):
        list(read_records(data, 3))


def test_every_cut_is_noticed() -> None:
    """RC-03: truncated varints, fields and records."""
    data = region((b"key", b"value" * 30))
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            list(read_records(data[:end], 1))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("0c000000" + "0a6b" + "00", "5 bytes does not fit"),  # a key longer than the batch
        ("0e000000" + "026b" + "7e76", "63 bytes does not fit"),  # a value likewise
        ("0c000000" + "0301" + "00", "-2 bytes does not fit"),  # a length below null's
        ("0a000000" + "01" + "01", "fields are longer"),  # no count of headers
        ("08000000" + "026b" + "0276" + "00", "longer than the record"),  # the record ends before
        ("00", "longer than its batch"),  # an empty record
        ("01", "longer than its batch"),  # a negative length
        ("ff" * 10 + "01", "too long"),  # a varint without end
    ],
)
def test_damaged_records_are_refused(record: str, reason: str) -> None:
    """RC-03."""
    data = bytearray.fromhex(record)
    if record.startswith("0a"):
        data[0] = 2 * (len(data) - 1)
    with pytest.raises(ProtocolError, match=reason):
        list(read_records(data, 1))


def test_the_header_struct_is_that_of_the_protocol() -> None:
    """The offsets of spec 2.2, by hand."""
    batch = new()
    add(batch, b"v", key=b"k", timestamp=T0)
    batch.set_producer_state(0x0102030405060708, 0x1112, 0x21222324, transactional=True)
    data = finish(batch)
    assert struct.unpack_from(">q", data, 0) == (0,)
    assert struct.unpack_from(">i", data, 8) == (len(data) - 12,)
    assert struct.unpack_from(">i", data, 12) == (-1,)
    assert data[16] == 2
    assert struct.unpack_from(">h", data, 21) == (0x10,)
    assert struct.unpack_from(">i", data, 23) == (0,)
    assert struct.unpack_from(">qq", data, 27) == (T0, T0)
    assert data[43:57].hex() == "01020304050607081112" + "21222324"
    assert struct.unpack_from(">i", data, 57) == (1,)
    assert batch.state == PENDING
