from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from asyncproducer.bench.memory import memory_at_hand

MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports free pages")


def resident_pages(memory: mmap.mmap) -> list[int]:
    """Which pages of it have memory, counted from 0 (/proc/self/pagemap: a word for each page,
    whose highest bit says so)."""
    first = ctypes.c_char.from_buffer(memory)
    at = ctypes.addressof(first) // mmap.PAGESIZE
    del first  # or it could not be closed
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(at * 8)
        words = pages.read(len(memory) // mmap.PAGESIZE * 8)
    return [n for n, (word,) in enumerate(struct.iter_unpack("=Q", words)) if word >> 63]


@linux
def test_resident_pages_are_told() -> None:
    with mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        assert resident_pages(memory) == []
        memory[3 * mmap.PAGESIZE] = 1
        assert resident_pages(memory) == [3]


@linux
def test_one_page_of_each_block_is_kept_and_the_rest_is_free() -> None:
    with memory_at_hand(5 * MIB) as memory:
        assert memory is not None
        assert resident_pages(memory) == [n * MIB // mmap.PAGESIZE for n in range(5)]
    assert memory.closed


@linux
def test_it_takes_no_more_than_a_third_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.sysconf
    pages = 10 * MIB // mmap.PAGESIZE
    monkeypatch.setattr(os, "sysconf", lambda n: pages if n == "SC_PHYS_PAGES" else real(n))
    with memory_at_hand() as memory:
        assert memory is not None
        assert len(memory) == 3 * MIB


@linux
@pytest.mark.parametrize(("bound", "mib"), [(f"{7 * MIB}\n", 2), ("max\n", 5), (None, 5)])
def test_it_takes_no_more_than_a_third_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bound: str | None, mib: int
) -> None:
    path = tmp_path / "memory.max"
    if bound is not None:
        path.write_text(bound)
    monkeypatch.setattr("asyncproducer.bench.memory._BOUND", path)
    with memory_at_hand(5 * MIB) as memory:
        assert memory is not None
        assert len(memory) == mib * MIB


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with memory_at_hand() as memory:
        assert memory is None
