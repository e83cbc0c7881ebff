"""Buffers that are used again (core/spares.py), and batches that are written into them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.core import spares as module
from asyncproducer.core.batch import (
    NO_HEADERS,
    RECORD_OVERHEAD,
    ListedValues,
    ProducerBatch,
    read_records,
)
from asyncproducer.core.spares import SpareBuffers

COMPILED = not str(module.__file__).endswith(".py")
compiled_only = pytest.mark.skipif(not COMPILED, reason="only compiled code uses buffers again")


class Memory:
    """The pool, as far as spares look at it."""

    def __init__(self, available: int) -> None:
        self.available = available


def spares_of(most_bytes: int, *, available: int = 1 << 20) -> SpareBuffers:
    return SpareBuffers(most_bytes, Memory(available))


def test_a_buffer_is_given_out_again_for_its_size_alone() -> None:
    spares = spares_of(100)
    spares.put(bytearray(b"x" * 30))
    assert spares.size == 30
    assert spares.take(29) is None
    assert spares.take(31) is None
    assert bytes(spares.take(30) or b"") == b"x" * 30
    assert spares.size == 0
    assert spares.take(30) is None


def test_what_is_kept_has_a_limit() -> None:
    """Sizes that nobody asks for any more must not keep out those that are asked for."""
    spares = spares_of(100)
    for size in (30, 30, 40):
        spares.put(bytearray(size))
    assert spares.size == 100
    assert spares.take(30) is not None
    assert spares.take(30) is not None
    spares.put(bytearray(30))  # asked for not long ago
    spares.put(bytearray(50))
    assert spares.size == 80
    assert spares.take(40) is None
    spares.put(bytearray(101))
    assert spares.size == 80
    assert spares.take(30) is not None
    assert spares.take(50) is not None
    assert spares.size == 0


@pytest.mark.parametrize("available", [100, 95, 70, 50, 0])
def test_all_buffers_together_are_no_larger_than_the_pool(available: int) -> None:
    """What a new one has was taken from the pool before: so others of that size have to go."""
    spares = spares_of(100, available=available)
    for size in (10, 10, 30, 50):
        spares.put(bytearray(size))
    assert spares.size == 100
    assert spares.take(20) is None
    kept = [size for size in (10, 10, 30, 50) if spares.take(size) is not None]
    assert kept == {100: [10, 10, 30, 50], 95: [10, 30, 50], 70: [50], 50: [50], 0: []}[available]
    assert spares.size == 0


def test_a_buffer_that_is_there_costs_no_other() -> None:
    spares = spares_of(100, available=0)
    for size in (10, 30):
        spares.put(bytearray(size))
    assert spares.take(30) is not None
    assert spares.size == 10


def test_none_is_kept_where_none_may_be() -> None:
    spares = spares_of(0)
    spares.put(bytearray(1))
    assert spares.size == 0
    assert spares.take(1) is None


@compiled_only
def test_a_buffer_that_somebody_looks_at_is_not_kept() -> None:
    """A transport may still have a part of it to write."""
    spares = spares_of(100)
    buffer = bytearray(10)
    view = memoryview(buffer)[2:4]
    spares.put(buffer)
    assert spares.take(10) is None
    view.release()
    spares.put(buffer)
    assert spares.take(10) is buffer


def filled(spares: SpareBuffers, value: bytes, *, records: int, capacity: int = 0) -> ProducerBatch:
    batch = ProducerBatch(
        "t", 0, write_limit=1000, created_at=0.0, memory=capacity or 1000, spares=spares
    )
    if capacity:
        batch.widen(capacity, True)
    for _ in range(records):
        assert batch.try_append(0, None, value, NO_HEADERS) is not None
    batch.close()
    batch.seal()
    return batch


def values(batch: ProducerBatch) -> list[bytes | None]:
    return [record.value for record in read_records(batch.uncompressed(), batch.count)]


@compiled_only
def test_a_batch_has_nothing_of_the_one_before() -> None:
    """BP-02"""
    spares = spares_of(10_000)
    first = filled(spares, b"a" * 50, records=10)
    first.release()
    assert spares.size == 1000
    second = filled(spares, b"b" * 20, records=3)
    assert spares.size == 0
    assert values(second) == [b"b" * 20] * 3
    assert b"a" not in b"".join(second.buffers())
    fresh = filled(spares_of(0), b"b" * 20, records=3)
    assert b"".join(second.buffers()) == b"".join(fresh.buffers())


@compiled_only
def test_a_batch_that_grows_goes_on_in_another_buffer() -> None:
    """Of a size that others have there, too, however much the first had left over."""
    spares = spares_of(100_000)
    first = filled(spares, b"a" * 50, records=30, capacity=2000)
    assert [len(piece) for piece in first.buffers()] == [973, 798]
    first.release()
    assert spares.size == 2000
    grown = filled(spares, b"b" * 70, records=22, capacity=2000)
    assert spares.size == 0
    assert len(grown.buffers()) == 2
    assert values(grown) == [b"b" * 70] * 22
    grown.release()
    assert spares.size == 2000


@compiled_only
def test_little_of_the_memory_of_a_batch_is_lost() -> None:
    """Also where it grows in steps of which each has room for one and a half records."""
    batch = ProducerBatch("t", 0, write_limit=1000, created_at=0.0, memory=1000)
    for memory in range(1000, 31_000, 1000):
        batch.widen(memory, True)
        while batch.try_append(5, None, b"v" * 600, NO_HEADERS) is not None:
            pass
    batch.close()
    batch.seal()
    pieces = [len(piece.obj) for piece in batch.buffers()]
    assert sum(pieces) <= 30_000
    assert sum(pieces) - batch.size <= 30_000 // 8
    assert len(pieces) > 5, "what is full is not copied again and again"


@compiled_only
def test_a_record_that_needs_all_of_the_memory_gets_it() -> None:
    """What the first buffer has left over is a part of that."""
    batch = ProducerBatch("t", 0, write_limit=400, created_at=0.0, memory=400)
    assert batch.try_append(5, None, b"v" * 100, NO_HEADERS) is not None
    batch.widen(1000, True)
    assert batch.try_append(5, None, b"w" * 800, NO_HEADERS) is not None
    batch.close()
    batch.seal()
    assert [len(piece.obj) for piece in batch.buffers()] == [1000]
    assert values(batch) == [b"v" * 100, b"w" * 800]


@compiled_only
@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_buffer_that_there_is_no_memory_for_costs_no_record(in_bulk: bool) -> None:
    batch = ProducerBatch("t", 0, write_limit=1000, created_at=0.0, memory=1000)
    assert batch.try_append(5, None, b"v" * 800, NO_HEADERS) is not None
    batch.widen(2**62, True)
    append: Any = partial(batch.try_append, 5, None, b"w" * 500, NO_HEADERS)
    if in_bulk:
        listed = ListedValues([b"w" * 500])
        append = partial(batch.append_values, listed, 0, 1, 5, 2**61, 10**6)
    with pytest.raises(MemoryError):
        append()
    batch.widen(1000, True)
    assert batch.try_append(5, None, b"x" * 10, NO_HEADERS) is not None
    batch.close()
    batch.seal()
    assert values(batch) == [b"v" * 800, b"x" * 10]
    assert len(b"".join(batch.buffers())) == batch.size


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=30),
    in_bulk=st.booleans(),
)
def test_the_pieces_of_a_batch_are_what_one_buffer_would_have(
    steps: list[tuple[int, int]], in_bulk: bool
) -> None:
    """Also when it is sealed a second time; and they take no more memory than it has, but for a
    first record that is large."""
    grown = ProducerBatch("t", 0, write_limit=1000, created_at=0.0, memory=1000)
    whole = ProducerBatch("t", 0, write_limit=10**6, created_at=0.0, memory=10**6)
    memory = 1000
    for number, (records, size) in enumerate(steps):
        listed = [b"%d" % number * size] * records
        memory *= 2
        grown.widen(memory, True)
        taken = 0
        if in_bulk and len(listed):
            limit = grown.easy - RECORD_OVERHEAD
            taken = grown.append_values(ListedValues(listed), 0, records, 5, limit, 10**6)
            assert whole.append_values(ListedValues(listed), 0, taken, 5, 10**6, 10**6) == taken
        for value in listed[taken:]:
            if grown.try_append(5, b"k", value, NO_HEADERS) is not None:
                assert whole.try_append(5, b"k", value, NO_HEADERS) is not None
        if memory > 200_000:
            break
    if grown.count == 0:
        return
    for batch in (grown, whole):
        batch.close()
    for sequence in (0, 7):
        for batch in (grown, whole):
            batch.set_producer_state(1, 2, sequence, transactional=False)
            batch.seal()
        assert b"".join(grown.buffers()) == b"".join(whole.buffers())
    assert bytes(grown.uncompressed()) == bytes(whole.uncompressed())
    assert grown.size <= memory + 12_000
    if COMPILED:
        assert sum(len(piece.obj) for piece in grown.buffers()) <= memory + 12_000


@compiled_only
def test_the_bytes_of_a_batch_stay_as_long_as_somebody_has_them() -> None:
    """What a connection has still to write of a batch that was given up."""
    spares = spares_of(10_000)
    given_up = filled(spares, b"a" * 50, records=10)
    (under_way,) = given_up.buffers()
    before = bytes(under_way)
    given_up.release()
    filled(spares, b"b" * 50, records=10)
    assert bytes(under_way) == before


def test_the_buffer_of_compressed_records_is_free() -> None:
    spares = spares_of(10_000)
    batch = filled(spares, b"a", records=1)
    batch.compressed(b"shorter")
    assert batch.buffer is None
    assert spares.size == (1000 if COMPILED else 0)
