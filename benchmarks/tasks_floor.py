"""What asyncio alone takes for tasks that await futures: the floor of W3.

    python benchmarks/tasks_floor.py

No producer and no broker: the futures of all tasks are done a linger time later, by one callback.
Prints CPU microseconds per future of bursts of 100 to 50,000 tasks, each in a fresh process,
medians of `--rounds` rounds that follow each other, and how many times 100 tasks' that is. A burst
is of new tasks that await one future each; with `--loop` the same tasks await one after the other.
With `--no-gc` without Python's garbage collector.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
from time import process_time

TASKS = (100, 1_000, 8_000, 50_000)
LINGER_S = 0.005


async def measured(tasks: int, total: int, *, loops: bool) -> float:
    """CPU microseconds per future, of bursts of so many until `total` are done."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    def done() -> None:
        for future in waiting:
            future.set_result(None)
        waiting.clear()

    async def send() -> None:
        future = loop.create_future()
        waiting.append(future)
        await future

    async def burst() -> None:
        loop.call_later(LINGER_S, done)
        await asyncio.gather(*(send() for _ in range(tasks)))

    async def send_again() -> None:
        while True:
            await send()

    async def next_burst() -> None:
        await asyncio.sleep(LINGER_S)  # meanwhile all hear of the last one, and wait again
        done()

    if loops:
        _again = [asyncio.create_task(send_again()) for _ in range(tasks)]
        burst = next_burst
    await burst()
    began, sent = process_time(), 0
    while sent < total:
        await burst()
        sent += tasks
    return (process_time() - began) / sent * 1e6


def main() -> None:
    """Measure and print, or, with `--one`, be one of the measurements."""
    parser = argparse.ArgumentParser(description="what asyncio alone takes for a task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total", type=int, default=250_000, help="futures in each measurement")
    parser.add_argument("--loop", action="store_true", help="the same tasks again and again")
    parser.add_argument("--no-gc", action="store_true", help="without the garbage collector")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if options.no_gc:
            gc.disable()
        print(asyncio.run(measured(options.one, options.total, loops=options.loop)))
        return
    command = [sys.executable, __file__, "--total", f"{options.total}"]
    command += ["--no-gc"] * options.no_gc + ["--loop"] * options.loop
    taken: dict[int, list[float]] = {tasks: [] for tasks in TASKS}
    for _ in range(options.rounds):
        for tasks in TASKS:
            output = subprocess.check_output([*command, "--one", f"{tasks}"], text=True)
            taken[tasks].append(float(output))
    for tasks, times in taken.items():
        ratios = [time / first for time, first in zip(times, taken[TASKS[0]], strict=True)]
        median, ratio = statistics.median(times), statistics.median(ratios)
        print(f"{tasks:>6,} tasks: {median:6.2f} us of CPU each, {ratio:.2f} of {TASKS[0]}")


if __name__ == "__main__":
    main()
