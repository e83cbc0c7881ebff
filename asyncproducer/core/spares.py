"""Buffers of batches that have left, kept for those to come.

Memory that is new to a process costs the system more than writing records into it: each 4 KiB are
cleared at their first use. With large batches that was a quarter of what a record cost. (Java's
BufferPool keeps those of `batch.size` as well.)

Only compiled code uses buffers again; else they grow by themselves, as bytes are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# ruff: noqa: F821 (names that spares.pxd brings in where this module is compiled)
if TYPE_CHECKING:
    # Where this module is compiled, this is a C function, see spares.pxd.
    exports: Any

__all__ = ["SpareBuffers"]

#: Whether this module runs compiled. A file that Python loads from source ends in .py.
COMPILED = not __file__.endswith(".py")


class SpareBuffers:
    """At most `most_bytes` of buffers, by size: batches have few different ones.

    `memory` is the pool that batches have their bytes from. Spares lie in what is free of it: who
    needs a buffer of a size that is not there lets others go, until all buffers together
    are no larger than the pool.
    """

    def __init__(self, most_bytes: int, memory: Any) -> None:
        self._most_bytes = most_bytes
        self._memory = memory
        #: How many bytes they have.
        self.size = 0
        #: The sizes of which there have been some for the longest time come first.
        self._by_size: dict[int, list[bytearray]] = {}

    def take(self, size: int) -> bytearray | None:
        """One of `size` bytes, if there is any. What it holds is left from before."""
        buffers = self._by_size.get(size)
        if buffers is None:
            self.make_way()
            return None
        self.size -= size
        buffer = buffers.pop()
        if not buffers:
            del self._by_size[size]
        return buffer

    def put(self, buffer: bytearray) -> None:
        """Keep it, unless somebody has a view of it: a transport may still have to write that."""
        if COMPILED and exports(buffer):  # pragma: no cover - coverage sees no C
            return
        size = len(buffer)
        if size > self._most_bytes:
            return
        self._shrink(self._most_bytes - size)
        buffers = self._by_size.get(size)
        if buffers is None:
            buffers = self._by_size[size] = []
        buffers.append(buffer)
        self.size += size

    def make_way(self) -> None:
        """For a buffer that is new, or larger now: it has its bytes from the pool already."""
        if self.size:
            self._shrink(self._memory.available)

    def _shrink(self, most_bytes: int) -> None:
        """Let others go, those of the size first that has been there for the longest time."""
        while self.size > most_bytes:
            size = next(iter(self._by_size))
            buffers = self._by_size[size]
            buffers.pop()
            self.size -= size
            if not buffers:
                del self._by_size[size]
