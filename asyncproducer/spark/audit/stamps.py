"""The stamp that makes a record countable, and the trace that stages of a pipeline leave on it.

A stamp is 28 bytes, big-endian, without padding:

    at  bytes  field
     0    4    run      u32: one run of a load; all that is judged together
     4    4    lane     u32: one writer of the run, which counts by itself
     8    8    seq      u64: 0, 1, 2, ... in its lane, without a gap; below 2**63
    16    8    send_us  u64: when it was made, in microseconds since 1970; below 2**63
    24    4    crc      u32: CRC-32C of the payload

It comes first in the value, and the payload is the rest of the value. Or it is the value of the
header `apx`, and the payload is the whole value (of a record without a value: no bytes). Where a
record has the header, the header holds.

There is no magic number: the CRC tells a stamp from other bytes, with one error in 2**32. A damaged
payload is known by its run and lane, which the ledger names.

A trace is a header `apx-trace`, one for each stage that a record has passed, in that order:

     0    8    in_us    u64: when the stage got the record
     8    8    out_us   u64: when the stage gave it on
    16    ..   the stage's name, UTF-8

Pure Python, for those who write records; whole columns are for `columns.py`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

__all__ = [
    "HEADER",
    "MAX_LANE",
    "MAX_SEQ",
    "SIZE",
    "TRACE_HEADER",
    "Stamp",
    "Trace",
    "encode_stamp",
    "encode_trace",
    "read_stamp",
    "read_trace",
]

SIZE = 28
HEADER = "apx"
TRACE_HEADER = "apx-trace"

MAX_LANE = 2**32 - 1
#: Spark's longs have a sign.
MAX_SEQ = 2**63 - 1

_STAMP = struct.Struct(">IIQQI")
_TIMES = struct.Struct(">QQ")


class Stamp(NamedTuple):
    """The fields of a stamp."""

    run: int
    lane: int
    seq: int
    send_us: int
    crc: int

    def holds(self, payload: bytes | memoryview) -> bool:
        """Whether this is the payload that it was made for."""
        return crc32c(payload) == self.crc


class Trace(NamedTuple):
    """One stage that a record has passed."""

    stage: str
    in_us: int
    out_us: int


def encode_stamp(
    run: int, lane: int, seq: int, send_us: int, payload: bytes | memoryview = b""
) -> bytes:
    """The stamp of a payload: to be put before it, or into the header `apx`.

    Raises ValueError for a number that does not fit.
    """
    _check("run", run, MAX_LANE)
    _check("lane", lane, MAX_LANE)
    _check("seq", seq, MAX_SEQ)
    _check("send_us", send_us, MAX_SEQ)
    return _STAMP.pack(run, lane, seq, send_us, crc32c(payload))


def read_stamp(data: bytes | memoryview) -> Stamp:
    """The stamp that bytes begin with, if they do: only `Stamp.holds` tells.

    Raises ValueError where there cannot be one.
    """
    if len(data) < SIZE:
        raise ValueError(f"{len(data)} bytes are no stamp: it has {SIZE}")
    stamp = Stamp._make(_STAMP.unpack_from(data))
    _check("seq", stamp.seq, MAX_SEQ)
    _check("send_us", stamp.send_us, MAX_SEQ)
    return stamp


def encode_trace(stage: str, in_us: int, out_us: int) -> bytes:
    """The value of one header `apx-trace`. Raises ValueError for times that do not fit."""
    _check("in_us", in_us, MAX_SEQ)
    _check("out_us", out_us, MAX_SEQ)
    return _TIMES.pack(in_us, out_us) + stage.encode()


def read_trace(data: bytes) -> Trace:
    """The fields of one header `apx-trace`. Raises ValueError for bytes that are none."""
    if len(data) < _TIMES.size:
        raise ValueError(f"{len(data)} bytes are no trace: it has {_TIMES.size} and a name")
    in_us, out_us = _TIMES.unpack_from(data)
    _check("in_us", in_us, MAX_SEQ)
    _check("out_us", out_us, MAX_SEQ)
    return Trace(data[_TIMES.size :].decode(), in_us, out_us)


def _check(name: str, value: int, limit: int) -> None:
    if not 0 <= value <= limit:
        raise ValueError(f"{name} is {value}: it must be within 0 and {limit}")
