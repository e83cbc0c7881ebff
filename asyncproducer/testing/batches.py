"""Record batches (message format v2) as a broker sees them: header, CRC, records.

This is a second reading of the format, written without looking at our own writer
in `core/batch.py`: what one of them gets wrong, the other one notices. It is
stricter than Java's broker, which for instance lets a wrong offset delta pass.

    baseOffset i64 | batchLength i32 | partitionLeaderEpoch i32 | magic i8 | crc u32 |
    attributes i16 | lastOffsetDelta i32 | baseTimestamp i64 | maxTimestamp i64 |
    producerId i64 | producerEpoch i16 | baseSequence i32 | recordCount i32 | records

The CRC covers everything behind itself, so that a broker can set the base offset and
the leader epoch without touching it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from asyncproducer.errors import ErrorCode

__all__ = [
    "BatchError",
    "BatchHeader",
    "StoredRecord",
    "check_crc",
    "decode_batch",
    "decode_records",
    "encode_batch",
    "encode_marker",
    "increment_sequence",
    "read_header",
    "rewrite_offset",
    "rewrite_timestamp",
    "split_batches",
    "with_header",
]

_HEADER = Struct(">qiibIhiqqqhii")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 61

#: Bytes before and including batchLength: a batch is this much longer than it says.
LOG_OVERHEAD = 12
_MAGIC_OFFSET = 16
_CRC_OFFSET = 17
_CRC_COVERS_FROM = 21
_PREFIX = Struct(">qii")
_LENGTH = Struct(">i")
_CRC = Struct(">I")

_CODEC_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20

#: Of a control record: version and type; version and the coordinator's epoch.
_MARKER_KEY = Struct(">hh")
_MARKER_VALUE = Struct(">hi")
_ABORT, _COMMIT = 0, 1

MAX_SEQUENCE = 2**31 - 1


class BatchError(Exception):
    """A batch that a broker must refuse. `code` is the error that it answers."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_RECORD) -> None:
        super().__init__(message)
        self.code = code


class BatchHeader(NamedTuple):
    """The 61 bytes in front of the records. Nothing in here has been believed yet."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """The batch's size in bytes, header included."""
        return self.batch_length + LOG_OVERHEAD

    @property
    def codec_id(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & _CODEC_MASK

    @property
    def is_log_append_time(self) -> bool:
        """Whether all records have `max_timestamp`, which the broker set."""
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        """Whether the batch is part of a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether it holds a marker of Kafka's own instead of users' records."""
        return bool(self.attributes & _CONTROL)

    @property
    def last_offset(self) -> int:
        """The last record's offset."""
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """The last record's sequence number, -1 without a producer id."""
        if self.base_sequence < 0:
            return -1
        return increment_sequence(self.base_sequence, self.last_offset_delta)


class StoredRecord(NamedTuple):
    """One record of a partition's log."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    #: -1 for a producer that is not idempotent, as are the next two.
    producer_id: int = -1
    producer_epoch: int = -1
    sequence: int = -1
    is_transactional: bool = False
    is_control: bool = False

    @property
    def is_commit(self) -> bool:
        """Whether it is the marker of a transaction that was committed, not aborted."""
        return self.is_control and self.key == _MARKER_KEY.pack(0, _COMMIT)


def encode_batch(
    records: Sequence[tuple[bytes | None, bytes | None]],
    *,
    timestamps: Sequence[int],
    headers: Sequence[tuple[str, bytes | None]] = (),
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
    compress: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """A batch of (key, value) pairs as a producer would send it: for tests of brokers.

    Each record has the same headers. `attributes` are written as they are, so the codec's
    number has to be in them where `compress` is given.
    """
    body = bytearray()
    for index, ((key, value), timestamp) in enumerate(zip(records, timestamps, strict=True)):
        record = bytearray(1)
        _write_varint(record, timestamp - timestamps[0])
        _write_varint(record, index)
        _write_nullable_bytes(record, key)
        _write_nullable_bytes(record, value)
        _write_varint(record, len(headers))
        for name, content in headers:
            _write_nullable_bytes(record, name.encode())
            _write_nullable_bytes(record, content)
        _write_varint(body, len(record))
        body += record
    data = bytes(body) if compress is None else compress(bytes(body))
    header = BatchHeader(
        base_offset=0,
        batch_length=HEADER_BYTES - LOG_OVERHEAD + len(data),
        leader_epoch=-1,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=len(records) - 1,
        base_timestamp=timestamps[0],
        max_timestamp=max(timestamps),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return with_header(_HEADER.pack(*header) + data, header)


def encode_marker(
    producer_id: int, producer_epoch: int, *, committed: bool, timestamp: int
) -> bytes:
    """The control batch that ends a producer's transaction in one partition.

    The value's last part is the coordinator's epoch, which nobody here checks.
    """
    return encode_batch(
        [(_MARKER_KEY.pack(0, _COMMIT if committed else _ABORT), _MARKER_VALUE.pack(0, 0))],
        timestamps=[timestamp],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        attributes=_TRANSACTIONAL | _CONTROL,
    )


def with_header(batch: bytes, header: BatchHeader) -> bytes:
    """The batch's records behind another header, which gets the CRC that fits."""
    out = bytearray(_HEADER.pack(*header) + batch[HEADER_BYTES:])
    _CRC.pack_into(out, _CRC_OFFSET, crc32c(memoryview(out)[_CRC_COVERS_FROM:]))
    return bytes(out)


def increment_sequence(sequence: int, by: int) -> int:
    """`sequence + by`, where 0 comes after 2**31 - 1."""
    return (sequence + by) & MAX_SEQUENCE


def split_batches(data: bytes) -> Iterator[bytes]:
    """The batches in `data`, as Java's ByteBufferLogInputStream finds them.

    An incomplete batch at the end is left out: a fetch may cut one.
    Raises BatchError (CORRUPT_MESSAGE) when the length or the magic byte cannot be.
    """
    position = 0
    while len(data) - position > _MAGIC_OFFSET:
        (length,) = _LENGTH.unpack_from(data, position + 8)
        # 14 is the overhead of the oldest record format, the smallest there ever was.
        if length < 14:
            raise BatchError(f"a batch of {length} bytes cannot be", ErrorCode.CORRUPT_MESSAGE)
        magic = data[position + _MAGIC_OFFSET]
        if magic > 2:
            raise BatchError(f"unknown magic byte {magic}", ErrorCode.CORRUPT_MESSAGE)
        end = position + LOG_OVERHEAD + length
        if end > len(data):
            return
        yield data[position:end]
        position = end


def read_header(batch: bytes) -> BatchHeader:
    """The header of one batch. Raises BatchError (CORRUPT_MESSAGE) when it is too short."""
    if len(batch) < HEADER_BYTES:
        raise BatchError(
            f"{len(batch)} bytes are less than a batch header", ErrorCode.CORRUPT_MESSAGE
        )
    return BatchHeader._make(_HEADER.unpack_from(batch))


def check_crc(batch: bytes, header: BatchHeader) -> None:
    """Raises BatchError (CORRUPT_MESSAGE) unless the CRC-32C fits the batch."""
    computed = crc32c(memoryview(batch)[_CRC_COVERS_FROM:])
    if computed != header.crc:
        raise BatchError(
            f"the stored CRC is {header.crc:#010x}, the computed one {computed:#010x}",
            ErrorCode.CORRUPT_MESSAGE,
        )


def rewrite_offset(batch: bytes, base_offset: int, leader_epoch: int) -> bytes:
    """The batch with what a leader fills in. The CRC does not cover it."""
    prefix = _PREFIX.pack(base_offset, len(batch) - LOG_OVERHEAD, leader_epoch)
    return prefix + batch[_PREFIX.size :]


def rewrite_timestamp(
    batch: bytes, header: BatchHeader, max_timestamp: int, *, log_append_time: bool = False
) -> bytes:
    """The batch with another maximum timestamp, and so another CRC.

    With `log_append_time` the maximum counts for all records, none of which is touched.
    """
    attributes = header.attributes | (_LOG_APPEND_TIME if log_append_time else 0)
    return with_header(batch, header._replace(attributes=attributes, max_timestamp=max_timestamp))


def decode_batch(batch: bytes) -> list[StoredRecord]:
    """All records of one batch, every check included. Raises BatchError."""
    header = read_header(batch)
    if header.size != len(batch):
        raise BatchError(
            f"the batch says that it has {header.size} bytes, but has {len(batch)}",
            ErrorCode.CORRUPT_MESSAGE,
        )
    if header.magic != 2:
        raise BatchError(f"magic byte {header.magic} where 2 was expected")
    check_crc(batch, header)
    return decode_records(batch, header)


def decode_records(batch: bytes, header: BatchHeader) -> list[StoredRecord]:
    """The records behind a header whose CRC is right.

    Raises BatchError: INVALID_RECORD for records that are not well formed, and, as
    Java's broker does, UNKNOWN_SERVER_ERROR for data that cannot be decompressed.
    """
    data = batch[HEADER_BYTES:]
    if header.codec_id:
        data = _decompress(header.codec_id, data)
    records: list[StoredRecord] = []
    position = 0
    for index in range(header.record_count):
        try:
            record, position = _read_record(data, position, index, header)
        except BatchError as exc:
            raise BatchError(f"record {index}: {exc}") from None
        records.append(record)
    if position != len(data):
        raise BatchError(
            f"{len(data) - position} bytes are left behind the {header.record_count} records"
        )
    return records


def _decompress(codec_id: int, data: bytes) -> bytes:
    # Not at the top: it loads four libraries, which uncompressed records do not need.
    from asyncproducer.core.compression import DecompressionError, codec_by_id

    try:
        return codec_by_id(codec_id).decompress(data)
    except DecompressionError as exc:
        raise BatchError(str(exc), ErrorCode.UNKNOWN_SERVER_ERROR) from exc


def _read_record(
    data: bytes, position: int, index: int, header: BatchHeader
) -> tuple[StoredRecord, int]:
    length, position = _varint(data, position, len(data))
    end = position + length
    if length < 0 or end > len(data):
        raise BatchError(f"its length is {length}, {len(data) - position} bytes are left")
    if position == end:
        raise BatchError("its length is 0")
    # The attributes byte is unused and not checked, neither here nor in Java.
    timestamp_delta, position = _varint(data, position + 1, end, 64)
    offset_delta, position = _varint(data, position, end)
    if offset_delta != index:
        raise BatchError(f"its offset delta is {offset_delta}")
    key, position = _nullable_bytes(data, position, end, "key")
    value, position = _nullable_bytes(data, position, end, "value")
    headers, position = _read_headers(data, position, end)
    if position != end:
        raise BatchError(f"{end - position} bytes are left behind its headers")
    idempotent = header.base_sequence >= 0
    timestamp = header.base_timestamp + timestamp_delta
    record = StoredRecord(
        header.base_offset + offset_delta,
        header.max_timestamp if header.is_log_append_time else timestamp,
        key,
        value,
        headers,
        header.producer_id,
        header.producer_epoch,
        increment_sequence(header.base_sequence, offset_delta) if idempotent else -1,
        header.is_transactional,
        header.is_control,
    )
    return record, position


def _read_headers(
    data: bytes, position: int, end: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, position = _varint(data, position, end)
    # The smallest header has two bytes, so this also bounds what a lie can cost.
    if not 0 <= count <= end - position:
        raise BatchError(f"it has {count} headers in {end - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        key, position = _nullable_bytes(data, position, end, "header key")
        if key is None:
            raise BatchError("the key of a header is null")
        value, position = _nullable_bytes(data, position, end, "header value")
        try:
            headers.append((key.decode(), value))
        except UnicodeDecodeError as exc:
            raise BatchError("the key of a header is not UTF-8") from exc
    return tuple(headers), position


def _nullable_bytes(data: bytes, position: int, end: int, what: str) -> tuple[bytes | None, int]:
    length, position = _varint(data, position, end)
    if length == -1:
        return None, position
    stop = position + length
    if length < 0 or stop > end:
        raise BatchError(f"the length of the {what} is {length}, {end - position} bytes are left")
    return data[position:stop], stop


def _varint(data: bytes, position: int, end: int, bits: int = 32) -> tuple[int, int]:
    """A zig-zag varint of at most `bits`, and the position behind it."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> bits:
                raise BatchError(f"a varint has more than {bits} bits")
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift >= bits:
            raise BatchError(f"a varint has more than {bits} bits")
    raise BatchError("the data ends within a varint")


def _write_varint(out: bytearray, value: int) -> None:
    value = (value << 1) ^ (value >> 63)
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_nullable_bytes(out: bytearray, data: bytes | None) -> None:
    _write_varint(out, -1 if data is None else len(data))
    out += data or b""
