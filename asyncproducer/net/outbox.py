"""What a connection has still to write, in pieces that a transport takes without copying much.

A request may have megabytes. Handed to a transport at once, CPython 3.11 would join its
buffers, and keep a copy of all that the socket does not take: milliseconds in which the event
loop stands still. So the bytes stay where they are, and the transport gets as much as it
asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from asyncproducer.core.primitives import Buffer

__all__ = ["PIECE_BYTES", "Outbox"]

#: Where a socket takes it, so much goes with one call. Of what one does not take, CPython before
#: 3.12 makes a copy: a larger piece would hold up the loop for that.
PIECE_BYTES = 512 * 1024

#: To join this much, and to allocate what it is joined in, takes longer than another write.
_LARGE_BYTES = 32 * 1024
#: But a write that has so little takes the rest from what is large.
_LEAST_BYTES = 16 * 1024
#: As much of what is small is joined: what is joined is still near the processor when the socket
#: copies it.
_JOINED_BYTES = 128 * 1024


class Outbox:
    """Buffers in the order of writing. `len` is how many bytes they have."""

    __slots__ = ("_buffers", "_size")

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, buffers: Iterable[Buffer]) -> int:
        """Add them behind the others. They must not change until they are taken.

        Returns how many bytes they have.
        """
        before = self._size
        for buffer in buffers:
            if len(buffer):  # CPython 3.12 and later wait for ever to write nothing
                self._buffers.append(buffer)
                self._size += len(buffer)
        return self._size - before

    def take(self, most: int = PIECE_BYTES) -> list[Buffer]:
        """The first `most` bytes, or all there are; or fewer, so that nothing large is joined."""
        piece: list[Buffer] = []
        taken = 0
        while taken < most and self._buffers:
            buffer = self._buffers[0]
            size = wanted = len(buffer)
            if piece and size < _LARGE_BYTES and taken + size > _JOINED_BYTES:
                break
            if size > most - taken:
                wanted = most - taken
            if size >= _LARGE_BYTES:
                if taken >= _LEAST_BYTES:
                    break
                if piece and wanted > _LEAST_BYTES - taken:
                    wanted = _LEAST_BYTES - taken
            if wanted < size:
                view = memoryview(buffer)
                self._buffers[0] = view[wanted:]
                buffer = view[:wanted]
            else:
                self._buffers.popleft()
            piece.append(buffer)
            taken += wanted
            if wanted >= _LARGE_BYTES:
                break
        self._size -= taken
        return piece

    def clear(self) -> None:
        """Nothing of it will be written."""
        self._buffers.clear()
        self._size = 0
