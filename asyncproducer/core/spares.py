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
    """At most `most_bytes` of buffers, by size: batches have few different ones."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        #: How many bytes they have.
        self.size = 0
        self._by_size: dict[int, list[bytearray]] = {}

    def take(self, size: int) -> bytearray | None:
        """One of `size` bytes, if there is any. What it holds is left from before."""
        buffers = self._by_size.get(size)
        if not buffers:
            return None
        self.size -= size
        return buffers.pop()

    def put(self, buffer: bytearray) -> None:
        """Keep it, unless somebody has a view of it: a transport may still have to write that."""
        if COMPILED and exports(buffer):  # pragma: no cover - coverage sees no C
            return
        size = len(buffer)
        if self.size + size > self._most_bytes:
            # Of sizes that are not asked for any more, perhaps.
            self.clear()
            if size > self._most_bytes:
                return
        buffers = self._by_size.get(size)
        if buffers is None:
            buffers = self._by_size[size] = []
        buffers.append(buffer)
        self.size += size

    def clear(self) -> None:
        """Keep none."""
        self._by_size = {}
        self.size = 0
