"""Cuts the byte stream of a connection into size-prefixed frames."""

from __future__ import annotations

from collections.abc import Iterator

from asyncproducer.core.primitives import Buffer, int32_at
from asyncproducer.errors import ProtocolError

__all__ = ["MAX_FRAME_BYTES", "FrameReader", "frame"]

#: A broker's largest honest answer (metadata of 100000s of partitions) is some 10 MB.
#: More is what text or TLS looks like when it is read as a size. The same number
#: limits requests in brokers (socket.request.max.bytes).
MAX_FRAME_BYTES = 100 * 1024 * 1024

_PREFIX = 4


def frame(payload: bytes) -> bytes:
    """`payload` with its size before it."""
    return len(payload).to_bytes(_PREFIX, "big") + payload


class FrameReader:
    """Give it what arrives, it gives the frames, without their size.

    However the stream was cut, a byte is copied once more at most: chunks of an incomplete frame
    are kept apart until the last one is there.
    """

    __slots__ = ("_chunks", "_have", "_need")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = _PREFIX

    @property
    def incomplete(self) -> bool:
        """Whether the stream has stopped in the middle of a frame."""
        return self._have > 0

    def feed(self, data: Buffer) -> Iterator[bytes]:
        """The frames that `data` completes. Iterate to the end, or never feed again.

        Raises ProtocolError, after the frames before it, for a size that no frame has.
        """
        if not isinstance(data, bytes):
            data = bytes(data)  # some transport's buffer
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
        start, end = 0, len(data)
        need = _PREFIX
        while end - start >= _PREFIX:
            need = _PREFIX + _size(data, start)
            if end - start < need:
                break
            yield data[start + _PREFIX : start + need]
            start += need
            need = _PREFIX
        self._chunks = [data[start:]] if start < end else []
        self._have = end - start
        self._need = need


def _size(data: bytes, start: int) -> int:
    size = int32_at(data, start)
    if 0 <= size <= MAX_FRAME_BYTES:
        return size
    first = bytes(data[start : start + _PREFIX])
    if first == b"HTTP" or first.lower() in (b"<!do", b"<htm"):
        raise ProtocolError(
            "the peer answers in HTTP: the port belongs to a web server, not to a Kafka broker"
        )
    if first[:2] == b"\x15\x03":  # a TLS alert record, version 3.x
        raise ProtocolError(
            "the peer answers with a TLS alert: the port speaks TLS, set security_protocol to SSL"
            " or SASL_SSL"
        )
    raise ProtocolError(
        f"the peer sent a frame of {size} bytes (at most {MAX_FRAME_BYTES} are accepted): it does"
        " not speak Kafka's protocol"
    )
