"""One peer in a fresh process: prints one line of JSON with what it measured."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from produce.peers import Peer, make

VALUE = b"x" * 100
LONE_SENDS = 200
#: Concurrent sends are repeated in one process, and the median counts.
BURSTS = 5
SENDS_PER_TASK = 5


async def flood(peer: Peer, records: int) -> dict[str, float]:
    """One task enqueues all, then flushes: acknowledged records per second."""
    enqueue = peer.enqueue
    cpu = time.process_time()
    began = time.perf_counter()
    for _ in range(records):
        await enqueue(VALUE)
    await peer.flush()
    elapsed = time.perf_counter() - began
    cpu = time.process_time() - cpu
    return {"records_per_s": records / elapsed, "cpu_us_per_record": cpu / records * 1e6}


async def concurrent(peer: Peer, tasks: int) -> float:
    """So many new tasks await one send each: records per second. Making the tasks counts."""
    rates = []
    for _ in range(BURSTS):
        began = time.perf_counter()
        await asyncio.gather(*(peer.send(VALUE) for _ in range(tasks)))
        rates.append(tasks / (time.perf_counter() - began))
    return sorted(rates)[len(rates) // 2]


async def sustained(peer: Peer, tasks: int) -> float:
    """So many tasks await one send after the other, as a busy service does: records per second."""

    send = peer.send

    async def service() -> None:
        for _ in range(SENDS_PER_TASK):
            await send(VALUE)

    began = time.perf_counter()
    await asyncio.gather(*(service() for _ in range(tasks)))
    return tasks * SENDS_PER_TASK / (time.perf_counter() - began)


async def lone(peer: Peer) -> dict[str, float]:
    """One send after the other: milliseconds until each is acknowledged."""
    taken = []
    for _ in range(LONE_SENDS):
        began = time.perf_counter()
        await peer.send(VALUE)
        taken.append((time.perf_counter() - began) * 1e3)
    taken.sort()
    return {"lone_p50_ms": taken[len(taken) // 2], "lone_p99_ms": taken[int(len(taken) * 0.99)]}


async def measure(name: str, servers: str, topic: str, records: int, tasks: int) -> None:
    peer = make(name)
    await peer.start(servers, topic)
    warm_up = records // 10
    await flood(peer, warm_up)
    result: dict[str, float | str | int] = {"peer": name, "version": peer.version}
    result.update(await flood(peer, records))
    result["concurrent_per_s"] = await concurrent(peer, tasks)
    result["sustained_per_s"] = await sustained(peer, tasks)
    result.update(await lone(peer))
    await peer.stop()
    result["sent"] = warm_up + records + (BURSTS + SENDS_PER_TASK) * tasks + LONE_SENDS
    result["max_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


if __name__ == "__main__":
    name, servers, topic, records, tasks = sys.argv[1:]
    asyncio.run(measure(name, servers, topic, int(records), int(tasks)))
