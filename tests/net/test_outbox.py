from __future__ import annotations

from hypothesis import example, given
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
    buffers: list[bytes | memoryview] = [b"small", memoryview(bytes(20_000)), b"another"]
    outbox.put(buffers)
    piece = outbox.take()
    assert all(given is taken for given, taken in zip(buffers, piece, strict=True))


def test_what_is_large_goes_alone() -> None:
    """Else a transport would copy it, to join it with the others."""
    outbox = Outbox()
    large = bytes(37_856 + 2 * PIECE_BYTES)
    outbox.put([b"head", large, b"between", bytes(32_768), bytes(20_000), b"tail"])
    assert [list(map(len, outbox.take())) for _ in range(7)] == [
        [4, 16_380],
        [PIECE_BYTES],
        [PIECE_BYTES],
        [21_476, 7],
        [32_768],
        [20_000, 4],
        [],
    ]


def test_what_is_small_is_joined_in_pieces_that_a_processor_keeps() -> None:
    """A request of a hundred small batches, joined at once, is written to memory and read again."""
    outbox = Outbox()
    outbox.put([bytes(16_384)] * 17 + [bytes(200_000)])
    assert [list(map(len, outbox.take())) for _ in range(5)] == [
        [16_384] * 8,
        [16_384] * 8,
        [16_384],
        [200_000],
        [],
    ]


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


@given(
    st.lists(st.binary(max_size=50) | st.integers(10_000, 70_000).map(bytes)),
    st.lists(st.integers(1, 60) | st.integers(10_000, 140_000), min_size=1),
)
@example([b"all", b"of", b"these"], [4])
def test_all_bytes_leave_once_and_in_order(buffers: list[bytes], sizes: list[int]) -> None:
    outbox = Outbox()
    outbox.put(buffers)
    written = b""
    while outbox:
        size = sizes[len(written) % len(sizes)]
        left = len(outbox)
        piece = b"".join(map(bytes, outbox.take(size)))
        if any(len(buffer) >= 32 * 1024 for buffer in buffers):
            # Nothing large is joined.
            assert min(size, left, 16 * 1024) <= len(piece) <= size
        else:
            assert len(piece) == min(size, left)
        written += piece
        assert len(outbox) == left - len(piece)
    assert written == b"".join(buffers)


def test_a_buffer_without_bytes_is_not_handed_on() -> None:
    outbox = Outbox()
    assert outbox.put([b"a", b"", bytearray(b"b"), memoryview(b"")]) == 2
    assert outbox.take() == [b"a", b"b"]
    outbox.put([b""])
    assert outbox.take() == []
