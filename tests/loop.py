"""What tests wait for instead of for time."""

from __future__ import annotations

import asyncio


async def turns(count: int = 10) -> None:
    """The loop turns so often: what can run now, and what follows from it, has run then."""
    for _ in range(count):
        await asyncio.sleep(0)
