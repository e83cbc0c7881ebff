from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asyncproducer.errors import ProtocolError
from asyncproducer.net.frames import MAX_FRAME_BYTES, FrameReader, frame


def feed(reader: FrameReader, *chunks: bytes) -> list[bytes]:
    return [bytes(received) for chunk in chunks for received in reader.feed(chunk)]


PAYLOADS = [b"first", b"", b"third" * 100, b"\x00"]
STREAM = b"".join(map(frame, PAYLOADS))


def test_frame_has_its_size_before_it() -> None:
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_several_frames_in_one_chunk(kind: Callable[[bytes], bytes]) -> None:
    assert feed(FrameReader(), kind(STREAM)) == PAYLOADS


def test_byte_by_byte() -> None:
    reader = FrameReader()
    assert feed(reader, *(STREAM[i : i + 1] for i in range(len(STREAM)))) == PAYLOADS
    assert not reader.incomplete


@pytest.mark.parametrize("seed", range(20))
def test_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(STREAM) + 1) for _ in range(rng.randrange(12)))
    chunks = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert feed(FrameReader(), *chunks) == PAYLOADS


def test_trailing_bytes_wait_for_the_rest_of_their_frame() -> None:
    reader = FrameReader()
    assert feed(reader, frame(b"one") + frame(b"two")[:5]) == [b"one"]
    assert reader.incomplete
    assert feed(reader, frame(b"two")[5:]) == [b"two"]
    assert not reader.incomplete


def test_an_incomplete_frame_is_not_joined_for_every_chunk() -> None:
    """Its chunks are kept apart: a long answer in small pieces must not cost n^2."""
    reader = FrameReader()
    payload = bytes(1000)
    stream = frame(payload)
    for i in range(len(stream) - 1):
        assert feed(reader, stream[i : i + 1]) == []
    assert len(reader._chunks) > 900
    assert feed(reader, stream[-1:]) == [payload]


def test_an_empty_chunk_changes_nothing() -> None:
    reader = FrameReader()
    assert feed(reader, b"", frame(b"x")[:3], b"", frame(b"x")[3:], b"") == [b"x"]


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "web server"),
        (b"<!DOCTYPE HTML>", "web server"),
        (b"<html>", "web server"),
        (b"\x15\x03\x03\x00\x02\x02\x50", "security_protocol to SSL"),
        ((-1).to_bytes(4, "big", signed=True), "frame of -1 bytes"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "does not speak Kafka"),
    ],
)
def test_a_size_that_no_frame_has_is_an_error_that_says_what_it_looks_like(
    prefix: bytes, said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        feed(FrameReader(), prefix)


def test_the_largest_frame_is_only_waited_for() -> None:
    assert feed(FrameReader(), MAX_FRAME_BYTES.to_bytes(4, "big")) == []


def test_frames_before_the_bad_one_are_delivered() -> None:
    frames = FrameReader().feed(frame(b"good") + b"\xff\xff\xff\xff")
    assert bytes(next(frames)) == b"good"
    with pytest.raises(ProtocolError):
        next(frames)
