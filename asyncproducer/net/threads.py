"""Work that would hold up the loop, in a worker thread. The only importer of anyio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import anyio.to_thread

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a worker thread and return its result.

    Cancelled: the wait ends at once, and the function goes on to its end. What it reads
    must stay as it is until then.
    """
    # A loop with a clock of its own (asyncproducer.testing) lets it stand still meanwhile.
    outside_work = getattr(asyncio.get_running_loop(), "outside_work", nullcontext)
    with outside_work():
        return await anyio.to_thread.run_sync(function)
