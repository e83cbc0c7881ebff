"""Stamps and traces of whole Arrow columns, with numpy. No Spark here."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from crc32c import crc32c
from numpy.typing import NDArray

from asyncproducer.spark.audit.stamps import MAX_SEQ, SIZE

__all__ = ["Bools", "Longs", "Stamps", "decode", "decode_traces", "encode"]

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

_STAMP = np.dtype(
    [("run", ">u4"), ("lane", ">u4"), ("seq", ">u8"), ("send_us", ">u8"), ("crc", ">u4")]
)
_TIMES = np.dtype([("in_us", ">u8"), ("out_us", ">u8")])
_TRACES = pa.list_(
    pa.struct([("stage", pa.string()), ("in_us", pa.int64()), ("out_us", pa.int64())])
)


class Stamps(NamedTuple):
    """The fields of each row; zeros where `found` is False."""

    #: There are the bytes for a stamp, with numbers that can be. It need not be one.
    found: Bools
    run: Longs
    lane: Longs
    seq: Longs
    send_us: Longs
    #: The payload is the one that the stamp was made for.
    crc_ok: Bools
    #: Bytes of the record's value, the stamp included.
    size: Longs


class _Bytes(NamedTuple):
    """A binary column as it lies in memory."""

    starts: Longs
    ends: Longs
    valid: Bools
    data: memoryview


def _bytes(column: pa.Array) -> _Bytes:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        width = "i4"
    else:
        column = column.cast(pa.large_binary())
        width = "i8"
    rows = len(column)
    _, places, data = column.buffers()
    if rows == 0 or places is None:
        none = np.zeros(rows, np.int64)
        return _Bytes(none, none, np.zeros(rows, np.bool_), memoryview(b""))
    narrow = np.frombuffer(places, width)[column.offset : column.offset + rows + 1]
    offsets: Longs = narrow.astype(np.int64)
    valid = np.ones(rows, np.bool_)
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    return _Bytes(offsets[:-1], offsets[1:], valid, memoryview(data or b""))


def _gather(data: memoryview, starts: Longs, layout: np.dtype[Any]) -> NDArray[Any]:
    """The structures that begin at these places."""
    raw = np.frombuffer(data, np.uint8)
    rows: NDArray[np.uint8] = raw[starts[:, None] + np.arange(layout.itemsize)]
    return rows.view(layout).reshape(-1)


def _crcs(data: memoryview, starts: Longs, ends: Longs) -> NDArray[np.uint32]:
    payloads = map(slice, starts.tolist(), ends.tolist())
    return np.fromiter((crc32c(data[part]) for part in payloads), np.uint32, len(starts))


def decode(values: pa.Array, stamps: pa.Array | None = None) -> Stamps:
    """The stamps of records.

    `values`: the records' values, binary. `stamps`: the header `apx` of each one, null where it
    has none; None where no record has headers.
    """
    value = _bytes(values)
    rows = len(values)
    size = np.where(value.valid, value.ends - value.starts, 0)
    fields = np.zeros(rows, _STAMP)
    computed = np.zeros(rows, np.uint32)
    found = np.zeros(rows, np.bool_)
    in_value = size >= SIZE
    if stamps is not None:
        header = _bytes(stamps)
        in_value &= ~header.valid
        found = header.valid & (header.ends - header.starts == SIZE)
        at = np.flatnonzero(found)
        fields[at] = _gather(header.data, header.starts[at], _STAMP)
        starts = value.starts[at]
        computed[at] = _crcs(value.data, starts, starts + size[at])
    at = np.flatnonzero(in_value)
    if len(at):
        fields[at] = _gather(value.data, value.starts[at], _STAMP)
        computed[at] = _crcs(value.data, value.starts[at] + SIZE, value.ends[at])
    found |= in_value
    found &= (fields["seq"] <= MAX_SEQ) & (fields["send_us"] <= MAX_SEQ)
    fields[~found] = np.zeros((), _STAMP)
    return Stamps(
        found=found,
        run=fields["run"].astype(np.int64),
        lane=fields["lane"].astype(np.int64),
        seq=fields["seq"].astype(np.int64),
        send_us=fields["send_us"].astype(np.int64),
        crc_ok=found & (fields["crc"] == computed),
        size=size,
    )


def encode(run: int, lanes: Longs, seqs: Longs, send_us: Longs, payloads: pa.Array) -> pa.Array:
    """Values that begin with their stamps, as `encode_stamp` makes them.

    All have one length for each row; payloads may not be null. The caller checks the ranges.
    """
    payload = _bytes(payloads)
    rows = len(payloads)
    fields = np.empty(rows, _STAMP)
    fields["run"], fields["lane"], fields["seq"] = run, lanes, seqs
    fields["send_us"] = send_us
    fields["crc"] = _crcs(payload.data, payload.starts, payload.ends)
    stamps = pa.Array.from_buffers(
        pa.binary(SIZE), rows, [None, pa.py_buffer(fields.tobytes())]
    ).cast(pa.binary())
    return pa.compute.binary_join_element_wise(stamps, payloads.cast(pa.binary()), b"")


def decode_traces(traces: pa.Array) -> pa.Array:
    """Lists of `apx-trace` headers as lists of (stage, in_us, out_us).

    A header that is none is left out.
    """
    lists = traces.combine_chunks() if isinstance(traces, pa.ChunkedArray) else traces
    flat = _bytes(lists.flatten())
    parents = pa.compute.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    good = flat.valid & (flat.ends - flat.starts >= _TIMES.itemsize)
    at = np.flatnonzero(good)
    times = _gather(flat.data, flat.starts[at], _TIMES)
    fits = (times["in_us"] <= MAX_SEQ) & (times["out_us"] <= MAX_SEQ)
    at, times = at[fits], times[fits]
    names = [
        bytes(flat.data[start + _TIMES.itemsize : end]).decode(errors="replace")
        for start, end in zip(flat.starts[at].tolist(), flat.ends[at].tolist(), strict=True)
    ]
    counts = np.bincount(parents[at], minlength=len(lists))
    items = pa.StructArray.from_arrays(
        [
            pa.array(names, pa.string()),
            pa.array(times["in_us"].astype(np.int64)),
            pa.array(times["out_us"].astype(np.int64)),
        ],
        fields=list(_TRACES.value_type),
    )
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), items).cast(_TRACES)
