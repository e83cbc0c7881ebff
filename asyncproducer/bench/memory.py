"""Free memory that a virtual machine does not give back to its host while something is measured.

Linux reports free blocks of 2 MiB to a host that asks for them (free page reporting), and who
writes to such a block again waits until the host has found memory for it. A gigabyte of a new file
took 1.1 s so, and 0.26 s otherwise; and whether a measurement writes to the one memory or the other
is chance. So much memory is written to as a run needs, and freed but for one page of each block:
such a block is not free as a whole, so it is not reported, and it is what is taken first.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["memory_at_hand"]

#: The brokers' heap, and what is written until the topics before are removed.
_MOST_BYTES = 4 << 30
#: Half a block: where one begins is not known.
_KEEP_ONE_PAGE_OF = 1 << 20

#: What a container may have, where it is bounded.
_BOUND = Path("/sys/fs/cgroup/memory.max")


def _all_bytes() -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # it does not exist, or says "max"
        return min(machine, int(_BOUND.read_text()))
    return machine


@contextmanager
def memory_at_hand(most_bytes: int = _MOST_BYTES) -> Iterator[mmap.mmap | None]:
    """Within, so much free memory is really there: a third of the machine's at most, or of
    the container's. Gives what keeps it, as large as that; None where this is not Linux. Entering
    blocks, for a second or two for each GiB."""
    if sys.platform != "linux":
        yield None
        return
    size = min(most_bytes, _all_bytes() // 3)
    size -= size % _KEEP_ONE_PAGE_OF
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with suppress(OSError):  # a kernel without huge pages; a part of one would not be free
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        for block in range(0, size, _KEEP_ONE_PAGE_OF):
            rest = block + mmap.PAGESIZE
            memory.madvise(mmap.MADV_DONTNEED, rest, _KEEP_ONE_PAGE_OF - mmap.PAGESIZE)
        yield memory
