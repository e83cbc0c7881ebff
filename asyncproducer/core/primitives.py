"""The primitive types of Kafka's protocol: a cursor that reads them, functions that write them.

Integers are big-endian. From a message's flexible version on (KIP-482) lengths are
unsigned varints that hold the length plus one, 0 is null, and each structure ends with
tagged fields: pairs of tag and bytes, of which a reader skips those that it does not know.

Whatever is read may come from a peer that is broken or hostile. Every read looks first
whether its bytes are there; nothing is allocated because of a count or a length that
the bytes behind it do not bear out. What cannot be read is a ProtocolError.
"""

from __future__ import annotations

from typing import TypeAlias

from asyncproducer.errors import ConfigError, ProtocolError

__all__ = [
    "Buffer",
    "Reader",
    "int32_at",
    "put_int32",
    "write_compact_string",
    "write_int16",
    "write_int32",
    "write_string",
    "write_unsigned_varint",
]

#: What holds bytes here. A memoryview counts bytes (format "B").
Buffer: TypeAlias = bytes | bytearray | memoryview

#: A string's length is an int16 before the flexible versions.
_MAX_STRING_BYTES = 32767

_NO_UUID = bytes(16)

#: An unsigned varint holds 32 bits: four groups of seven, and four bits in a fifth byte.
_LAST_VARINT_SHIFT = 28
_LAST_VARINT_BITS = 0x0F


class Reader:
    """A cursor over one message.

    `flexible` says how strings and arrays are written, and whether structures end with
    tagged fields. `what` names the message in errors.
    """

    __slots__ = ("data", "end", "flexible", "position", "what")

    def __init__(self, data: Buffer, what: str, *, flexible: bool = False) -> None:
        # Bytes are the fastest thing to index. Responses are small: the copy costs nothing.
        self.data = data if isinstance(data, bytes) else bytes(data)
        self.position = 0
        self.end = len(self.data)
        self.flexible = flexible
        self.what = what

    # -- what can go wrong -----------------------------------------------------------------

    def error(self, problem: str) -> ProtocolError:
        """The error to raise for a problem at the cursor's place."""
        return ProtocolError(f"malformed {self.what}: {problem} at byte {self.position}")

    def advance(self, size: int) -> int:
        """Moves over the next `size` bytes. Returns where they start."""
        start = self.position
        if size < 0 or size > self.end - start:
            raise self.error(f"{size} bytes expected, {self.end - start} are left")
        self.position = start + size
        return start

    def finish(self) -> None:
        """The message must end here."""
        if self.position != self.end:
            raise self.error(f"{self.end - self.position} bytes too many")

    # -- numbers ---------------------------------------------------------------------------

    def boolean(self) -> bool:
        """One byte, 0 is false."""
        start = self.advance(1)
        return self.data[start] != 0

    def int16(self) -> int:
        """A signed 16-bit number."""
        return self._signed(2)

    def int32(self) -> int:
        """A signed 32-bit number."""
        return self._signed(4)

    def int64(self) -> int:
        """A signed 64-bit number."""
        return self._signed(8)

    def _signed(self, size: int) -> int:
        # Compiled, this takes a twentieth of a call of `struct`.
        start = self.advance(size)
        data = self.data
        value = data[start]
        if value >= 0x80:
            value -= 0x100
        for place in range(start + 1, start + size):
            value = value << 8 | data[place]
        return value

    def unsigned_varint(self) -> int:
        """An unsigned 32-bit number in one to five bytes."""
        data = self.data
        position = self.position
        end = self.end
        value = 0
        shift = 0
        while position < end:
            byte = data[position]
            position += 1
            if shift == _LAST_VARINT_SHIFT and byte > _LAST_VARINT_BITS:
                raise self.error("a varint of more than 32 bits")
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.position = position
                return value
            shift += 7
        raise self.error("a varint without its end")

    # -- strings and bytes -----------------------------------------------------------------

    def uuid(self) -> bytes | None:
        """16 bytes. All zero, which is Kafka's "none", is None."""
        start = self.advance(16)
        value = self.data[start : start + 16]
        return None if value == _NO_UUID else value

    def nullable_string(self) -> str | None:
        """UTF-8 text or null."""
        length = self.unsigned_varint() - 1 if self.flexible else self.int16()
        if length < 0:
            if length != -1:
                raise self.error(f"a string of {length} bytes")
            return None
        start = self.advance(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a string that is not UTF-8 ({error.reason}), ending") from error

    def string(self) -> str:
        """UTF-8 text."""
        value = self.nullable_string()
        if value is None:
            raise self.error("null where there must be a string")
        return value

    def byte_string(self) -> bytes:
        """Bytes with their length before them."""
        length = self.unsigned_varint() - 1 if self.flexible else self.int32()
        if length < 0:
            raise self.error("null or a negative length where there must be bytes")
        start = self.advance(length)
        return self.data[start : start + length]

    # -- structure -------------------------------------------------------------------------

    def array_length(self, element_size: int) -> int:
        """The count of an array whose elements take at least `element_size` bytes each.

        A count that the rest of the message cannot hold is refused before anybody
        loops over it.
        """
        count = self.unsigned_varint() - 1 if self.flexible else self.int32()
        if count < 0:
            raise self.error("null or a negative count where there must be an array")
        if count * element_size > self.end - self.position:
            raise self.error(f"an array of {count} elements, which {self._left()} cannot hold")
        return count

    def skip_int32_array(self) -> None:
        """Moves over an array of 32-bit numbers."""
        self.advance(4 * self.array_length(4))

    def skip_tagged_fields(self) -> None:
        """Moves over the tagged fields at a structure's end. None before flexible versions."""
        if not self.flexible:
            return
        # Almost always there are none.
        position = self.position
        if position < self.end and self.data[position] == 0:
            self.position = position + 1
            return
        for _ in range(self.tagged_field_count()):
            self.unsigned_varint()
            self.advance(self.unsigned_varint())

    def tagged_field_count(self) -> int:
        """How many tagged fields follow. Each takes two bytes at least: its tag and its size."""
        count = self.unsigned_varint()
        if count * 2 > self.end - self.position:
            raise self.error(f"{count} tagged fields, which {self._left()} cannot hold")
        return count

    def enter(self) -> int:
        """Reads the size of a tagged field, and lets the message end with the field.

        Returns what `leave` wants back.
        """
        size = self.unsigned_varint()
        outer = self.end
        if size > outer - self.position:
            raise self.error(f"a tagged field of {size} bytes, {self._left()} are left")
        self.end = self.position + size
        return outer

    def leave(self, outer: int) -> None:
        """The tagged field must end here; the message goes on."""
        self.finish()
        self.end = outer

    def _left(self) -> str:
        return f"{self.end - self.position} bytes"


def int32_at(data: bytes, place: int) -> int:
    """The signed 32-bit number at a place of which its caller knows that it is there."""
    value = data[place] << 24 | data[place + 1] << 16 | data[place + 2] << 8 | data[place + 3]
    return value - 0x1_0000_0000 if value > 0x7FFF_FFFF else value


def put_int32(out: bytearray, place: int, value: int) -> None:
    """Writes a 32-bit number over what is at this place."""
    out[place] = value >> 24 & 0xFF
    out[place + 1] = value >> 16 & 0xFF
    out[place + 2] = value >> 8 & 0xFF
    out[place + 3] = value & 0xFF


def write_unsigned_varint(out: bytearray, value: int) -> None:
    """Appends an unsigned number, seven bits in a byte, the lowest first."""
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)


def write_int16(out: bytearray, value: int) -> None:
    """Appends a signed 16-bit number. Raises ValueError for one that does not fit."""
    _write_signed(out, value, 2)


def write_int32(out: bytearray, value: int) -> None:
    """Appends a signed 32-bit number. Raises ValueError for one that does not fit."""
    _write_signed(out, value, 4)


def _write_signed(out: bytearray, value: int, size: int) -> None:
    above = value >> 8 * size - 1
    if above not in (0, -1):
        raise ValueError(f"{value} does not fit in {size} bytes")
    for shift in range(8 * size - 8, -8, -8):
        out.append(value >> shift & 0xFF)


def write_string(out: bytearray, value: str | None) -> None:
    """Appends a nullable string as it was before flexible versions.

    Raises ConfigError for text that does not fit.
    """
    if value is None:
        out += b"\xff\xff"
        return
    encoded = _encoded(value)
    write_int16(out, len(encoded))
    out += encoded


def write_compact_string(out: bytearray, value: str | None) -> None:
    """Appends a nullable string as flexible versions have it.

    Raises ConfigError for text that does not fit.
    """
    if value is None:
        out.append(0)
        return
    encoded = _encoded(value)
    write_unsigned_varint(out, len(encoded) + 1)
    out += encoded


def _encoded(value: str) -> bytes:
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{value!r} cannot be written as UTF-8: {error.reason}") from error
    if len(encoded) > _MAX_STRING_BYTES:
        raise ConfigError(
            f"{value[:20]!r}... takes {len(encoded)} bytes, "
            f"the protocol has room for {_MAX_STRING_BYTES}"
        )
    return encoded
