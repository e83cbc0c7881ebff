"""`python -m asyncproducer.bench.proxy SERVERS RTT_MS`: the same brokers, further away.

A FaultProxy without faults: each request and each answer is held back by half the round-trip
time, and throughput is not limited. It prints its addresses, and ends when its standard input
does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncproducer.testing.proxy import FaultProxy

__all__ = ["delayed"]


async def _main(servers: str, rtt_ms: float) -> None:
    async with FaultProxy(servers, latency=rtt_ms / 2000) as proxy:
        print(proxy.bootstrap_servers, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def delayed(servers: str, rtt_ms: float) -> Iterator[str]:
    """The addresses of a proxy in a process of its own, which lives as long as the context."""
    if not rtt_ms:
        yield servers
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncproducer.bench.proxy", servers, str(rtt_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        yield process.stdout.readline().strip()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
