"""The record batch, format v2: written while records arrive, sealed when it leaves.

Layout (Kafka protocol guide, "Record Batch"): a header of 61 bytes, then the records,
compressed as one block where a codec is used. The CRC covers everything from the
attributes on, so that brokers can set offset and leader epoch without touching it.
The header is written last and can be written again without touching the records: a
retry after an epoch bump changes producer id, epoch, sequence and CRC, nothing else.

One source, two builds: where this module is compiled (see batch.pxd), records are
written through a pointer into a buffer that is allocated once; else by joining
small bytes objects. `COMPILED` tells which; both are covered by the same tests.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from crc32c import crc32c

from asyncproducer.core.compression import Codec
from asyncproducer.core.delivery import PENDING, Delivery, Outcome
from asyncproducer.core.spares import SpareBuffers
from asyncproducer.errors import (
    IllegalStateError,
    Persisted,
    ProtocolError,
    SerializationError,
)

# ruff: noqa: F821 (names that batch.pxd brings in where this module is compiled)
if TYPE_CHECKING:
    # Where this module is compiled, these are C functions, see batch.pxd.
    COMPILED: bool
    FRONT_BYTES: int
    front: Any
    PyByteArray_AS_STRING: Any
    PyByteArray_Resize: Any
    append_bytes: Any
    blank: Any
    bytes_at: Any
    ap_prefetch: Any
    bytes_data: Any
    bytes_size: Any
    is_bytes: Any
    item_of: Any
    uncounted: Any
    count_of: Any
    memcpy: Any
    new_buffer: Any
    octets_of: Any
    put_field: Any
    put_header: Any
    put_int32: Any
    put_varint: Any
    size_of: Any
    utf8: Any
    utf8_size: Any

__all__ = [
    "BATCH_OVERHEAD",
    "NO_HEADERS",
    "RECORD_OVERHEAD",
    "ListedValues",
    "ProducerBatch",
    "Sizes",
    "Values",
    "batch_upper_bound",
    "encode_headers",
    "plain_headers",
    "read_records",
]

#: Whether this module runs compiled, which C knows as a constant: what the other case needs is not
#: even there. A file that Python loads from source ends in .py.
globals()["COMPILED"] = not __file__.endswith(".py")

#: Bytes of the batch header.
BATCH_OVERHEAD = 61

#: The most that a record adds to its key, value and headers: length (5), attributes (1),
#: timestamp delta (10), offset delta (5).
RECORD_OVERHEAD = 21

#: What a batch with one record adds to its fields, at most. A number of C where compiled.
_OVERHEAD = BATCH_OVERHEAD + RECORD_OVERHEAD

#: While a listed value is written, the one so many later comes from memory. A number of C, too.
_AHEAD = 8

#: Of a batch that is shorter, a copy is made for the CRC: that takes less than a view of it. A
#: number of C, too.
_COPIED_BYTES = 4096

#: A buffer of which more than this part would be left over is made larger instead, and copied.
_LOST_PART = 8

#: `ProducerBatch.sent_to` of what is on its way to another address of its broker than the one
#: that is used now, or to a topic of that name that was deleted.
GONE = -2

#: The compression estimate is stretched a little, so that batches end below their
#: limit rather than above it (Java: COMPRESSION_RATE_ESTIMATION_FACTOR).
_ESTIMATE_FACTOR = 1.05

_TRANSACTIONAL = 0x10

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC = struct.Struct(">I")
#: Where the CRC is, and from where it and the batch's length count. Numbers of C, too.
_CRC_AT = 17
_CRC_FROM = 21
_LENGTH_FROM = 12

#: Encoded header list of a record that has none.
NO_HEADERS = b"\x00"


def _varint(value: int) -> bytes:
    """Zig-zag base-128 of a signed number of at most 64 bits."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


#: Varints of the numbers that nearly every record needs. Index -1 is null's length.
_VARINTS = [_varint(n) for n in range(4096)]


def encode_headers(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    """The header list of a record as the wire has it."""
    if not headers:
        return NO_HEADERS
    parts = [_varint(len(headers))]
    for name, value in headers:
        encoded = str.encode(name)  # of any class
        size = len(encoded)
        parts.append(_VARINTS[size] if size < 4096 else _varint(size))
        parts.append(encoded)
        if value is None:
            parts.append(b"\x01")
        else:
            size = len(value)
            parts.append(_VARINTS[size] if size < 4096 else _varint(size))
            parts.append(value)
    return b"".join(parts)


def plain_headers(headers: Any) -> bytes | None:
    """`encode_headers` of what a user gave, where nothing of it has to be looked at more closely.

    That is a dict, or a list or tuple of tuples, of str and bytes, str or None; and only where
    this module is compiled. None: go the long way, which says what is wrong, if anything is.
    """
    if COMPILED:  # pragma: no cover - coverage sees no C
        # Copied: nobody may change what is measured first and written then.
        if type(headers) is dict:
            return _encode_plainly(tuple(headers.items()))
        if type(headers) is list or type(headers) is tuple:
            return _encode_plainly(tuple(headers))
    return None


def _encode_plainly(pairs: Any) -> bytes | None:  # pragma: no cover - coverage sees no C
    size = _size_of_length(len(pairs))
    try:
        for each in pairs:
            if type(each) is not tuple or len(each) != 2:
                return None
            pair = each
            name = pair[0]
            value = pair[1]
            if type(name) is not str:
                return None
            length = utf8_size(name)
            size += length + _size_of_length(length)
            if value is None:
                length = 0
            elif type(value) is bytes:
                length = len(value)
            elif type(value) is str:
                length = utf8_size(value)
            else:
                return None
            size += length + _size_of_length(length)
    except UnicodeEncodeError:
        return None
    encoded = blank(size)
    at = put_varint(octets_of(encoded), len(pairs))
    for pair in pairs:
        name = pair[0]
        value = pair[1]
        at = put_field(at, utf8_size(name), utf8(name))
        if value is None:
            at[0] = 1
            at += 1
        elif type(value) is bytes:
            at = put_field(at, len(value), value)
        else:
            at = put_field(at, utf8_size(value), utf8(value))
    return encoded  # type: ignore[no-any-return]


def _field_size(data: Any) -> int:
    """Bytes of a nullable field with its length."""
    if data is None:
        return 1
    length = len(data)
    return length + _size_of_length(length)


def _size_of_length(length: int) -> int:
    """Bytes of the varint of a length (which is not negative)."""
    if length < 64:
        return 1
    if length < 8192:
        return 2
    if length < 1048576:
        return 3
    if length < 134217728:
        return 4
    return 5


def _size_of_field(size: int) -> int:
    """Bytes of a nullable field of `size` bytes, -1 for null, with its length."""
    return 1 if size < 0 else size + _size_of_length(size)


def _size_of_delta(delta: int) -> int:
    """Bytes of the varint of a signed delta."""
    value = (delta << 1) ^ (delta >> 63)
    size = 1
    while value > 0x7F:
        value >>= 7
        size += 1
    return size


def batch_upper_bound(key: Any, value: Any, headers: bytes) -> int:
    """The most bytes that a batch with just this record takes, before compression.

    This is what `max_request_size` and `buffer_memory` are compared with
    (Java: AbstractRecords.estimateSizeInBytesUpperBound).
    """
    return _OVERHEAD + _field_size(key) + _field_size(value) + len(headers)


class Values:
    """Values that `ProducerBatch.append_values` reads, by number: a list, or a column (bulk.py)."""

    #: Compiled, where the present one begins.
    at: Any

    def locate(self, number: int) -> int:
        """Make it the present one. Returns its size, -1 for null, -2 if it is not plain."""
        raise NotImplementedError

    def plain(self, first: int, end: int) -> Iterator[bytes | None]:
        """Those from `first` on, up to the first that is not plain. Not where it is compiled."""
        raise NotImplementedError


#: `Sizes.same` before the first, and where not all have the same: no value has such a size.
_UNKNOWN = -2
_DIFFERENT = -3
#: No record is larger.
_LARGEST_SIZE = 2**31 - 1


class Sizes:
    """Of `room` values by number, put one after the other: one number while all have the same.

    `same`: that of those that are not put.
    """

    def __init__(self, room: int, same: int = _UNKNOWN) -> None:
        self._room = room
        self.same = same
        self._each: Any = None

    def put(self, number: int, size: int) -> None:
        """The value has this size, -1 for null. (Nobody asks for that of one that is too large.)"""
        size = min(size, _LARGEST_SIZE)
        if self._each is None:
            if size == self.same:
                return
            if self.same == _UNKNOWN:
                self.same = size
                return
            self._each = array("i", (self.same,)) * self._room
            self.same = _DIFFERENT
        self._each[number] = size

    def of(self, number: int) -> int:
        """The size of a value that was put."""
        return self.same if self._each is None else self._each[number]


class ListedValues(Values):
    """Plain are bytes, nothing else. The list may become shorter at any time.

    `sizes` gets the size of the value `number` at `base + number`.
    """

    def __init__(self, items: list[Any], sizes: Sizes | None = None, base: int = 0) -> None:
        self.items = items
        if COMPILED:  # pragma: no cover - coverage sees no C
            self.bare: Any = uncounted(items)
        self.sizes = sizes
        self.base = base

    def locate(self, number: int) -> int:
        """See Values."""
        if COMPILED:  # pragma: no cover - coverage sees no C
            return _locate(self, number)
        raise NotImplementedError

    def plain(self, first: int, end: int) -> Iterator[bytes | None]:
        """See Values."""
        for number, item in enumerate(self.items[first:end], self.base + first):
            if type(item) is not bytes:
                return
            if self.sizes is not None:
                self.sizes.put(number, len(item))
            yield item


def _locate(values: ListedValues, number: int) -> int:  # pragma: no cover - coverage sees no C
    """`values.locate`: a function is written in the place where it is called, a method is not."""
    count = count_of(values.bare)
    if number >= count:
        return -2
    if number + _AHEAD < count:
        ap_prefetch(item_of(values.bare, number + _AHEAD))
    item = item_of(values.bare, number)
    if not is_bytes(item):
        return -2
    values.at = bytes_data(item)
    size: int = bytes_size(item)
    if values.sizes is not None and size != values.sizes.same:
        values.sizes.put(values.base + number, size)
    return size


class ProducerBatch(Outcome):
    """A batch of records for one partition, from its first record to its end.

    Open: `try_append` takes records until the batch is full, and beyond that where it is `ripe`
    and has `capacity`. `close` ends it.
    `compress` (where a codec is used) and `seal` make `buffers()`. The broker's answer,
    or giving up, sets the outcome (see Outcome).
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        write_limit: int,
        created_at: float,
        codec: Codec | None = None,
        ratio: float = 1.0,
        memory: int = 0,
        loop: Any = None,
        spares: SpareBuffers | None = None,
    ) -> None:
        self.begin(topic, partition, write_limit, created_at, codec, ratio, memory, loop, spares)

    def begin(
        self,
        topic: str,
        partition: int,
        write_limit: int,
        created_at: float,
        codec: Codec | None,
        ratio: float,
        memory: int,
        loop: Any,
        spares: SpareBuffers | None,
    ) -> None:
        """What `__init__` does. Compiled, it is no call of Python's."""
        self._begin_at(topic, partition, loop)
        self.write_limit = write_limit
        #: Bytes that the records may take before compression: what memory is held for. Parts of
        #: a split use memory outside the pool.
        self.capacity = memory if memory > 0 else sys.maxsize
        #: Up to this size records are simply written. Where they are compressed, what is full is
        #: an estimate that each record changes.
        self.easy = min(write_limit, self.capacity) if codec is None else 0
        self.created_at = created_at
        self.codec = codec
        #: The compression estimate, taken once when the batch begins (Java does the same).
        self.ratio = ratio
        #: Bytes that the buffer pool reserved for this batch.
        self.memory = memory
        #: Among whose batches it is counted: those of the broker that it was begun for.
        self.share: Any = None
        #: Position of the batch in its partition's order; parts of a split sort inside it.
        self.order: tuple[int, ...] = ()
        self.is_open = True
        #: Large enough to leave, and still open: it grows on until its broker takes it.
        self.ripe = False
        #: How many records it had when it was last looked at (adaptive linger).
        self.seen = 0
        #: How often it was handed to a connection, and how often it was put back.
        self.sends = 0
        self.attempts = 0
        self.in_flight = False
        self.maybe_written = False
        #: It is a part of one that may be in a log whole: no broker would know the part then.
        self.whole_maybe_written = False
        #: A broker said that it is in its log, and yet did not acknowledge it.
        self.is_stored = False
        #: Why the last attempt was no success.
        self.last_error: BaseException | None = None
        self.drained_at = -1.0
        #: Not before this time may it be sent again.
        self.retry_at = 0.0
        #: The node and the leader epoch it was last sent to. `GONE` for the node: its partition is
        #: not there any more.
        self.sent_to = -1
        self.sent_leader_epoch = -1
        self.is_split = False
        self.max_record_size = 0
        self.compressing = False
        self.payload: bytes | None = None
        self.producer_id = -1
        self.producer_epoch = -1
        self.base_sequence = -1
        #: Whether its sequence is another one than it was last sent with.
        self.renumbered = False
        self.transactional = False
        self.base_timestamp = 0
        self.max_timestamp = -1
        self.size = BATCH_OVERHEAD
        self.header: bytearray | None = None
        #: Where its buffers come from and go to, if they can.
        self._spares = spares
        #: What is written now, and how many bytes are in those before it, which are full. (Only
        #: compiled code has several: it would copy what grows.)
        self.buffer: bytearray | None = None
        self._before = 0
        self._full: list[tuple[bytearray, int]] | None = None
        #: Bytes that full ones have left over.
        self._lost = 0
        #: Compiled, up to this size `put_record` may write, which looks at nothing else; 0 where it
        #: has no record yet, or is closed, or its records are compressed. With it goes `_first`:
        #: where the first byte would be, were all of them in the present buffer.
        self.quick_end = 0
        if COMPILED:  # pragma: no cover - coverage sees no C
            if spares is not None:
                self.buffer = spares.take(write_limit)
            if self.buffer is None:
                self.buffer = new_buffer(write_limit)
        else:
            self.buffer = bytearray(BATCH_OVERHEAD)

    # -- filling ---------------------------------------------------------------------------

    def estimated_size(self) -> int:
        """Bytes on the wire, as far as can be told: exact without compression and after it."""
        if self.payload is not None:
            return BATCH_OVERHEAD + len(self.payload)
        if self.codec is None:
            return self.size
        return BATCH_OVERHEAD + self.on_the_wire(self.size - BATCH_OVERHEAD)

    def on_the_wire(self, size: int) -> int:
        """What `size` bytes of records will take when they are compressed, as an estimate."""
        return int(size * self.ratio * _ESTIMATE_FACTOR)

    def is_full(self) -> bool:
        """Whether the batch should leave: closed, or filled to its limit."""
        if not self.is_open or self.ripe:
            return True
        return self.count > 0 and self.write_limit <= self.estimated_size()

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes more still leave a batch that is not full."""
        if self.size + size > self.capacity:
            return False
        if self.ripe:
            return True
        if self.codec is None:
            return self.size + size <= self.write_limit
        return self.estimated_size() + size <= self.write_limit

    def widen(self, capacity: int, ripe: bool) -> None:
        """There is memory for `capacity` bytes; `ripe`: all of it may be used."""
        self.capacity = capacity - self._lost
        self.ripe = ripe
        if ripe:
            self.easy = self.capacity
        elif self.codec is None:
            self.easy = min(self.write_limit, self.capacity)
        self._quicken()

    def _quicken(self) -> None:
        """Something changed of what `quick_end` depends on."""
        if COMPILED:  # pragma: no cover - coverage sees no C
            buffer = self.buffer
            self.quick_end = 0
            if buffer is not None and self.is_open and self.codec is None and self.count > 0:
                self.quick_end = min(self.easy, self._before + len(buffer))
                self._first = PyByteArray_AS_STRING(buffer) - self._before

    def try_append(
        self,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
    ) -> Delivery | None:
        """Write a record, or return None if the batch is closed or has no room for it.

        The first record always fits. `key` and `value` are bytes-like or None, `headers`
        comes from `encode_headers`, `timestamp` is ms.
        """
        if not self.is_open:
            return None
        if COMPILED:  # pragma: no cover - coverage sees no C
            # As bytes: their pointers are what goes on from here.
            if key is not None and type(key) is not bytes:
                key = bytes(key)
            if value is not None and type(value) is not bytes:
                value = bytes(value)
            key_size = size_of(key)
            value_size = size_of(value)
            if not append_bytes(self, timestamp, key, value, headers):
                return None
        else:
            key_size = -1 if key is None else len(key)
            value_size = -1 if value is None else len(value)
            if not self.append_fields(
                timestamp, key_size, key, value_size, value, len(headers), headers
            ):
                return None
        return self.delivery(self.count - 1, timestamp, key_size, value_size)

    def append_fields(
        self,
        timestamp: int,
        key_size: int,
        key: Any,
        value_size: int,
        value: Any,
        headers_size: int,
        headers: Any,
    ) -> bool:
        """`try_append` without a Delivery. False if the batch is closed or has no room.

        A size of -1 is null. Compiled, `key`, `value` and `headers` are pointers to as many
        bytes; else bytes.
        """
        if not self.is_open:
            return False
        count = self.count
        if count == 0:
            self.base_timestamp = timestamp
            delta = 0
        else:
            delta = timestamp - self.base_timestamp
        fields_size = headers_size + _size_of_field(key_size) + _size_of_field(value_size)
        body_size = 1 + _size_of_delta(delta) + _size_of_length(count) + fields_size
        record_size = body_size + _size_of_length(body_size)
        if self.size + record_size > self.easy and count > 0 and not self.has_room(record_size):
            return False
        buffer = self.buffer
        if buffer is None:
            raise IllegalStateError("the batch has given its buffer back")
        if COMPILED:  # pragma: no cover - coverage sees no C
            # The limit is an estimate where records are compressed: grow beyond it.
            if self.size + record_size > self._before + len(buffer):
                buffer = self._make_room(self.size, record_size)
            at = PyByteArray_AS_STRING(buffer) + (self.size - self._before)
            at = put_varint(at, body_size)
            at[0] = 0
            at = put_varint(at + 1, delta)
            at = put_varint(at, count)
            at = put_field(at, key_size, key)
            at = put_field(at, value_size, value)
            if headers_size == 1:
                at[0] = 0  # no headers, nearly always: a call of memcpy costs more
            else:
                memcpy(at, headers, headers_size)
        else:
            parts = [
                _VARINTS[body_size] if body_size < 4096 else _varint(body_size),
                b"\x00",
                _VARINTS[delta] if 0 <= delta < 4096 else _varint(delta),
                _VARINTS[count] if count < 4096 else _varint(count),
            ]
            if key_size < 0:
                parts.append(b"\x01")
            else:
                parts.append(_VARINTS[key_size] if key_size < 4096 else _varint(key_size))
                parts.append(key)
            if value_size < 0:
                parts.append(b"\x01")
            else:
                parts.append(_VARINTS[value_size] if value_size < 4096 else _varint(value_size))
                parts.append(value)
            parts.append(headers)
            buffer += b"".join(parts)
        self.count = count + 1
        self.size += record_size
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        bound = _OVERHEAD + fields_size
        if bound > self.max_record_size:
            self.max_record_size = bound
        if count == 0:
            self._quicken()
        return True

    def append_values(
        self, values: Values, first: int, end: int, timestamp: int, limit: int, most: int
    ) -> int:
        """Append those of `values` from `first` on that are plain and no larger than `most` bytes,
        as records of nothing else, as long as the batch and the next of them together are smaller
        than `limit`.

        Returns how many. There must be RECORD_OVERHEAD between `limit` and `easy`.
        """
        buffer = self.buffer
        if not self.is_open or buffer is None:
            return 0
        count = self.count
        if count == 0:
            self.base_timestamp = timestamp
        delta = timestamp - self.base_timestamp
        # Attributes, timestamp, no key, no headers.
        around = 3 + _size_of_delta(delta)
        size = self.size
        largest = -1
        number = first
        if COMPILED:  # pragma: no cover - coverage sees no C
            at = PyByteArray_AS_STRING(buffer) + (size - self._before)
            room = self._before + len(buffer)
            value_size = -2
            alike = 0
            listed = values if type(values) is ListedValues else None
            try:
                while number < end:
                    found = values.locate(number) if listed is None else _locate(listed, number)
                    if found < -1 or size + found >= limit:
                        break
                    if found != value_size or count >= alike:
                        if found > most:
                            break
                        value_size = found
                        if value_size > largest:
                            largest = value_size
                        number_size = _size_of_length(count)
                        body_size = around + _size_of_field(value_size) + number_size
                        record_size = body_size + _size_of_length(body_size)
                        # What is before the value. Of the records behind this one only their number
                        # in the batch is another, as long as it has as many bytes.
                        behind = put_varint(front, body_size)
                        behind[0] = 0
                        behind = put_varint(behind + 1, delta)
                        number_at = behind - front
                        behind = put_varint(behind, count)
                        behind[0] = 1
                        behind = put_varint(behind + 1, value_size)
                        front_size = behind - front
                        alike = 64  # a zigzag varint has 6 bits in its first byte, then 7
                        alike <<= 7 * (number_size - 1)
                    needed = size + record_size
                    if needed > room:
                        buffer = self._make_room(size, record_size)
                        at = PyByteArray_AS_STRING(buffer) + (size - self._before)
                        room = self._before + len(buffer)
                        if values.locate(number) != value_size:
                            break  # somebody else's code has run meanwhile
                    if needed + FRONT_BYTES <= room:
                        memcpy(at, front, FRONT_BYTES)  # of so many it is a few instructions
                    else:
                        memcpy(at, front, front_size)
                    put_varint(at + number_at, count)
                    at += front_size
                    if value_size > 0:
                        memcpy(at, values.at, value_size)
                        at += value_size
                    at[0] = 0
                    at += 1
                    size = needed
                    count += 1
                    number += 1
            except SerializationError:
                pass  # who reads that row alone hears of it
            finally:
                # Whatever was raised: what comes next is written behind what is there.
                self.count = count
                self.size = size
        else:
            parts: list[bytes] = []
            for value in values.plain(first, end):
                value_size = -1 if value is None else len(value)
                if value_size > most or size + value_size >= limit:
                    break
                body_size = around + _size_of_length(count) + _size_of_field(value_size)
                parts += (
                    _VARINTS[body_size] if body_size < 4096 else _varint(body_size),
                    b"\x00",
                    _VARINTS[delta] if 0 <= delta < 4096 else _varint(delta),
                    _VARINTS[count] if count < 4096 else _varint(count),
                    b"\x01",
                    _VARINTS[value_size] if -1 < value_size < 4096 else _varint(value_size),
                    value or b"",
                    b"\x00",
                )
                size += body_size + _size_of_length(body_size)
                if value_size > largest:
                    largest = value_size
                count += 1
                number += 1
            buffer += b"".join(parts)
            self.count = count
            self.size = size
        if number == first:
            return 0
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        bound = _OVERHEAD + 2 + _size_of_field(largest)
        if bound > self.max_record_size:
            self.max_record_size = bound
        self._quicken()
        return number - first

    def _make_room(
        self, written: int, record_size: int
    ) -> bytearray:  # pragma: no cover - coverage sees no C
        """The buffer for a record that does not fit behind the bytes that are written.

        Compiled only; else the buffer grows by itself.
        """
        buffer: Any = self.buffer
        has = self._before + len(buffer)
        if self.codec is not None or written == BATCH_OVERHEAD:
            # In one piece, as codecs want it; or nothing is in it yet.
            room = 2 * has if 2 * has < self.capacity else self.capacity
            if room < written + record_size:
                room = written + record_size
            return self._enlarge(room)
        left = has - written
        room = self.capacity - has if self.memory > 0 else 4 * has
        much = _LOST_PART * left > len(buffer) and room <= len(buffer)
        if much or left + room >= record_size > room:
            # Much would be lost, or what is lost is needed: to copy what there is costs less.
            return self._enlarge(len(buffer) + max(room, record_size - left))
        if room < record_size:
            room = record_size
        # Before anything is changed: it may be what there is no memory for.
        following: Any = None if self._spares is None else self._spares.take(room)
        if following is None:
            following = new_buffer(room)
        # What the last one has left over is lost. So this one has the size that others have at this
        # step, and is used again.
        self._lost += left
        self.capacity -= left
        if self.easy > self.capacity:
            self.easy = self.capacity
        if self._full is None:
            self._full = []
        self._full.append((buffer, written - self._before))
        self._before = written
        self.buffer = following
        self._quicken()
        return following  # type: ignore[no-any-return]

    def _enlarge(self, size: int) -> bytearray:  # pragma: no cover - coverage sees no C
        """The buffer that is written now, with as much room."""
        if self._spares is not None:
            self._spares.make_way()
        buffer: Any = self.buffer
        PyByteArray_Resize(buffer, size)
        self._quicken()
        return buffer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Take no more records."""
        self.is_open = False
        self.quick_end = 0

    # -- leaving ---------------------------------------------------------------------------

    def uncompressed(self) -> memoryview:
        """The records as they were written. Not after `compress`."""
        pieces = self._written()
        whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return whole[BATCH_OVERHEAD:]

    def _written(self) -> tuple[memoryview, ...]:
        """Header and records, in the order of writing."""
        if self.buffer is None:
            raise IllegalStateError("the batch has given its buffer back")
        last = memoryview(self.buffer)[: self.size - self._before]
        if self._full is None:
            return (last,)
        return (*[memoryview(buffer)[:size] for buffer, size in self._full], last)

    def needs_compression(self) -> bool:
        """Whether `compressed` must come before `seal`."""
        return self.codec is not None and self.payload is None

    def compressed(self, payload: bytes) -> float:
        """Take the compressed records. Returns what they shrank to, as a ratio."""
        ratio = len(payload) / (self.size - BATCH_OVERHEAD)
        self.payload = payload
        self._give_buffer_back()
        self.compressing = False
        return ratio

    def set_producer_state(
        self, producer_id: int, producer_epoch: int, base_sequence: int, transactional: bool
    ) -> None:
        """Who sends it, and as which records of theirs. Takes effect with the next `seal`."""
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence
        self.transactional = transactional

    def seal(self) -> None:
        """Write the header with its CRC. May be done again for another producer state."""
        if self.count == 0:
            raise IllegalStateError("an empty batch must never be sent")
        if self.is_open:
            raise IllegalStateError("an OPEN batch cannot be sealed: close it first")
        if self.producer_id < 0:
            if self.transactional:
                raise IllegalStateError("a transactional batch needs a producer id")
        elif self.producer_epoch < 0 or self.base_sequence < 0:
            raise IllegalStateError(
                f"producer id {self.producer_id} needs an epoch and a sequence, "
                f"not {self.producer_epoch} and {self.base_sequence}"
            )
        attributes = _TRANSACTIONAL if self.transactional else 0
        payload = self.payload
        if payload is None and self.codec is not None:
            raise IllegalStateError("the records must be compressed before the batch is sealed")
        if payload is not None:
            if self.codec is None:
                raise IllegalStateError("a batch without a codec has no compressed records")
            attributes |= self.codec.codec_id
            # A new one each time: an older header may still be on its way out.
            self.header = bytearray(BATCH_OVERHEAD)
            length = BATCH_OVERHEAD + len(payload)
        else:
            length = self.size
        header = self._head()
        self.renumbered = False
        if COMPILED:  # pragma: no cover - coverage sees no C
            at = PyByteArray_AS_STRING(header)
            put_header(
                at,
                length - _LENGTH_FROM,
                attributes,
                self.count,
                self.base_timestamp,
                self.max_timestamp,
                self.producer_id,
                self.producer_epoch,
                self.base_sequence,
            )
            if length <= _COPIED_BYTES and payload is None and self._full is None:
                crc = crc32c(bytes_at(at + _CRC_FROM, length - _CRC_FROM))
            else:
                crc = self._whole_crc()
            put_int32(at + _CRC_AT, crc)
        else:
            _HEADER.pack_into(
                header,
                0,
                0,
                length - _LENGTH_FROM,
                -1,
                2,
                0,
                attributes,
                self.count - 1,
                self.base_timestamp,
                self.max_timestamp,
                self.producer_id,
                self.producer_epoch,
                self.base_sequence,
                self.count,
            )
            _CRC.pack_into(header, _CRC_AT, self._whole_crc())

    def _whole_crc(self) -> int:
        """That of all buffers."""
        pieces = self.buffers()
        crc = crc32c(memoryview(pieces[0])[_CRC_FROM:])
        for piece in pieces[1:]:
            crc = crc32c(piece, crc)
        return crc

    def _head(self) -> bytearray:
        """What begins with the header."""
        head = self.buffer if self.payload is None else self.header
        if head is None:
            raise IllegalStateError("the batch has given its buffer back")
        if self.payload is None and self._full is not None:
            return self._full[0][0]  # pragma: no cover - compiled only
        return head

    def persisted(self) -> Persisted:
        """What is known of the log, if the batch ends now and nobody has acknowledged it."""
        if self.is_stored:
            return "yes"
        return "maybe" if self.in_flight or self.maybe_written else "no"

    def buffers(self) -> tuple[Any, ...]:
        """The sealed batch as buffers to write one after the other."""
        if self.payload is not None:
            return (self.header, self.payload)
        return self._written()

    def release(self) -> None:
        """Drop the bytes: deliveries keep the batch alive, they need no buffer."""
        self._give_buffer_back()
        self.payload = None
        self.header = None

    def _give_buffer_back(self) -> None:
        buffer = self.buffer
        self.buffer = None
        self.quick_end = 0
        if COMPILED and buffer is not None and self._spares is not None:  # pragma: no cover
            self._spares.put(buffer)
            if self._full is not None:
                for buffer, _ in self._full:
                    self._spares.put(buffer)
        self._full = None

    # -- splitting -------------------------------------------------------------------------

    def split(self, target_size: int) -> list[ProducerBatch]:
        """The records again, in batches of about `target_size` bytes, closed and ready to leave.

        For a broker that found the batch too large (KIP-126). Deliveries, waiters and
        callbacks move to the parts. A batch that is a part already, or not larger than that,
        halves, in records as well, so that repeated splits end at single records.
        """
        parts = self.divided(target_size)
        self.split_into(parts)
        return [part for _, part in parts]

    def divided(self, target_size: int) -> list[tuple[int, ProducerBatch]]:
        """What `split` makes of it, before anybody is told: the parts, and the index in this batch
        of the first record of each."""
        if self.state != PENDING:
            raise IllegalStateError("only a PENDING batch can be split")
        if self.count < 2:
            raise IllegalStateError("a batch of one record cannot be split")
        most = self.count
        if self.is_split:
            most = (self.count + 1) // 2
            target_size = max(self.max_record_size, self.estimated_size() // 2)
        data: Any
        if self.payload is None:
            data = self.uncompressed()
        elif self.codec is not None:
            data = memoryview(self.codec.decompress(self.payload, self.size))
        else:
            raise IllegalStateError("a batch without a codec has no compressed records")
        if BATCH_OVERHEAD + len(data) <= target_size:
            most = (self.count + 1) // 2
        parts: list[tuple[int, ProducerBatch]] = []
        batch: ProducerBatch | None = None
        for index, record in enumerate(read_records(data, self.count)):
            timestamp = self.base_timestamp + record.timestamp_delta
            if batch is not None and batch.count < most:
                delivery = batch.try_append(timestamp, record.key, record.value, record.headers)
                if delivery is not None:
                    continue
            bound = batch_upper_bound(record.key, record.value, record.headers)
            batch = ProducerBatch(
                self.topic,
                self.partition,
                write_limit=max(target_size, bound),
                created_at=self.created_at,
                codec=self.codec,
                ratio=1.0,
                loop=self.loop,
            )
            batch.is_split = True
            batch.order = (*self.order, len(parts))
            batch.try_append(timestamp, record.key, record.value, record.headers)
            parts.append((index, batch))
        for _, batch in parts:
            batch.close()
            batch.transactional = self.transactional
            batch.sends = self.sends
            batch.last_error = self.last_error
            batch.maybe_written = self.maybe_written
            batch.whole_maybe_written = self.maybe_written or self.whole_maybe_written
            batch.is_stored = self.is_stored
        return parts

    def __repr__(self) -> str:
        return (
            f"<ProducerBatch {self.topic}-{self.partition} {self.count} records "
            f"{self.estimated_size()} bytes attempts={self.attempts} seq={self.base_sequence}>"
        )


class RawRecord(NamedTuple):
    """A record as it stands in a batch. `headers` is the encoded list."""

    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    value: bytes | None
    headers: bytes


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A signed varint at `at`, and the position behind it."""
    value = 0
    shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ProtocolError("a varint in a record batch is cut off or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def _read_field(data: memoryview, at: int) -> tuple[bytes | None, int]:
    """A nullable field with its length at `at`, and the position behind it."""
    length, at = _read_varint(data, at)
    if length == -1:
        return None, at
    if length < 0 or at + length > len(data):
        raise ProtocolError(f"a field of {length} bytes does not fit in its record batch")
    return bytes(data[at : at + length]), at + length


def read_records(data: Any, count: int) -> Iterator[RawRecord]:
    """The records of an uncompressed records region. Raises ProtocolError if it is damaged."""
    view = memoryview(data)
    at = 0
    for _ in range(count):
        length, at = _read_varint(view, at)
        end = at + length
        if length < 1 or end > len(view):
            raise ProtocolError("a record is longer than its batch")
        at += 1  # attributes: no bit of it is used
        timestamp_delta, at = _read_varint(view, at)
        offset_delta, at = _read_varint(view, at)
        key, at = _read_field(view, at)
        value, at = _read_field(view, at)
        if at >= end:
            # There is at least the number of headers behind the value.
            raise ProtocolError("a record's fields are longer than the record")
        yield RawRecord(timestamp_delta, offset_delta, key, value, bytes(view[at:end]))
        at = end
    if at != len(view):
        raise ProtocolError("a record batch has bytes behind its last record")
