from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncproducer.net.outbox import PIECE_BYTES, Outbox


def test_pieces_are_no_larger_than_asked_and_in_order() -> None:
    outbox = Outbox()
    assert outbox.put([b"head", bytearray(b"0123456789"), b"tail"]) == 18
    assert [bytes(part) for part in outbox.take(6)] == [b"head", b"01"]
    assert len(outbox) == 12
    assert outbox.put((b"!",)) == 1
    assert [bytes(part) for part in outbox.take(4)] == [b"2345"]
    assert [bytes(part) for part in outbox.take(100)] == [b"6789", b"tail", b"!"]
    assert outbox.take() == []
    assert not outbox


def test_what_fits_is_handed_on_as_it_is() -> None:
    """Not even a view is made of it."""
    outbox = Outbox()
    buffers: list[bytes | memoryview] = [b"small", memoryview(bytes(PIECE_BYTES - 5))]
    outbox.put(buffers)
    piece = outbox.take()
    assert all(given is taken for given, taken in zip(buffers, piece, strict=True))


def test_nothing_is_copied() -> None:
    outbox = Outbox()
    data = bytearray(b"abcdef")
    outbox.put([data])
    first, second = outbox.take(3)[0], outbox.take(3)[0]
    data[:] = b"ABCDEF"
    assert (bytes(first), bytes(second)) == (b"ABC", b"DEF")


def test_cleared_it_is_empty() -> None:
    outbox = Outbox()
    outbox.put([b"a", b"b"])
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.take() == []


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 60), min_size=1))
def test_all_bytes_leave_once_and_in_order(buffers: list[bytes], sizes: list[int]) -> None:
    outbox = Outbox()
    outbox.put(buffers)
    written = b""
    while outbox:
        size = sizes[len(written) % len(sizes)]
        left = len(outbox)
        piece = b"".join(map(bytes, outbox.take(size)))
        assert len(piece) == min(size, left)
        written += piece
        assert len(outbox) == left - len(piece)
    assert written == b"".join(buffers)
