"""Breaks messages where it hurts: lengths, counts, numbers, ends of fields."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncproducer.core.primitives import Reader, write_unsigned_varint
from asyncproducer.testing.shapes import check, check_header

__all__ = ["Span", "mutate", "spans"]


class Span(NamedTuple):
    """Where a field, or the length before it, stands in a message."""

    start: int
    size: int
    is_varint: bool = False


class _Mapper(Reader):
    """A reader that notes what it was asked for."""

    __slots__ = ("spans",)

    def __init__(self, data: bytes) -> None:
        super().__init__(data, "message")
        self.spans: list[Span] = []

    def advance(self, size: int) -> int:
        start = super().advance(size)
        self.spans.append(Span(start, size))
        return start

    def unsigned_varint(self) -> int:
        start = self.position
        value = super().unsigned_varint()
        self.spans.append(Span(start, self.position - start, True))
        return value


def spans(message_class: Any, data: bytes, *, header: bool = True) -> list[Span]:
    """The fields of a valid message. Raises ProtocolError for another one."""
    mapper = _Mapper(data)
    if header:
        check_header(message_class.__header_schema__, mapper)
    mapper.flexible = message_class.__flexible__
    check(message_class, mapper)
    return mapper.spans


Mutation = Callable[[random.Random, bytes, Sequence[Span], bytes], bytes]

_NUMBERS = (0, 1, 2, -1, -2, 127, 128, 255, 32767, -32768, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_VARINTS = (0, 1, 2, 127, 128, 2**14, 2**28, 2**31 - 1, 2**31, 2**32 - 1)
#: More bytes than the value needs, or more than there can be.
_ODD_VARINTS = (b"\x80\x00", b"\x81\x80\x80\x80\x00", b"\xff" * 4 + b"\x7f", b"\xff" * 10, b"\x80")


#: No input is larger. What repeats itself six times would take all the memory there is.
MAX_BYTES = 4 * 1024 * 1024


def mutate(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    """`data` with one to six things wrong. `other`: a message to take pieces from."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(_MUTATIONS)(rng, data, where, other)[:MAX_BYTES]
    return data


def _place(rng: random.Random, data: bytes, where: Sequence[Span]) -> Span:
    """A field, mostly; or any place. What was changed before may have moved fields."""
    if where and rng.random() < 0.8:
        span = rng.choice(where)
        if span.start + span.size <= len(data):
            return span
    start = rng.randrange(len(data) + 1)
    return Span(start, min(rng.choice((1, 2, 4, 8)), len(data) - start))


def _put(data: bytes, span: Span, new: bytes) -> bytes:
    return data[: span.start] + new + data[span.start + span.size :]


def _number(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    span = _place(rng, data, where)
    if span.is_varint:
        return _put(data, span, _varint(rng, data, span))
    size = min(span.size, 8)
    left = len(data) - span.start - size
    value = rng.choice((*_NUMBERS, left, left + 1, left - 1, left // 2))
    new = (value % 256**size).to_bytes(size, "big") if size else b""
    return _put(data, span._replace(size=size), new)


def _varint(rng: random.Random, data: bytes, span: Span) -> bytes:
    if rng.random() < 0.3:
        return rng.choice(_ODD_VARINTS)
    left = len(data) - span.start - span.size
    out = bytearray()
    write_unsigned_varint(out, rng.choice((*_VARINTS, left, left + 1, left + 2)))
    return bytes(out)


def _flip(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return _put(data, Span(at, 1), bytes([data[at] ^ (1 << rng.randrange(8))]))


def _noise(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    return _put(data, _place(rng, data, where), rng.randbytes(rng.choice((1, 2, 4, 30))))


def _cut(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    span = _place(rng, data, where)
    return data[: span.start + rng.choice((0, span.size))]


def _grow(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    return data + rng.choice((b"\0", rng.randbytes(5), other, bytes(1000)))


def _leave_out(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    start, end = sorted((_place(rng, data, where).start, _place(rng, data, where).start))
    return data[:start] + data[end:]


def _repeat(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    start, end = sorted((_place(rng, data, where).start, _place(rng, data, where).start))
    return data[:start] + data[start:end] * rng.choice((2, 3, 50)) + data[end:]


def _splice(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    cut = _place(rng, data, where).start
    return data[:cut] + other[rng.choice((cut, rng.randrange(len(other) + 1))) :]


def _tag(rng: random.Random, data: bytes, where: Sequence[Span], other: bytes) -> bytes:
    """A tagged field where there may be none yet: one that nobody knows, or a known one twice."""
    ends = [at for at in range(len(data)) if data[at] == 0]
    at = rng.choice(ends) if ends else len(data)
    field = bytes([rng.choice((0, 1, 2, 99))]) + rng.choice(
        (b"\0", b"\3abc", b"\x08" + bytes(8), b"\xff\xff\xff\xff\x0f", b"\x7f")
    )
    count = rng.choice((1, 2, 3))
    return data[:at] + bytes([count]) + field * count + data[at + 1 :]


_MUTATIONS: tuple[Mutation, ...] = (
    _number,
    _number,
    _number,
    _flip,
    _flip,
    _noise,
    _cut,
    _grow,
    _leave_out,
    _repeat,
    _splice,
    _tag,
)
