"""A process that only sleeps: how late the machine lets one be that has nothing to do.

`python idle.py TICK_S` prints a line, sleeps so long at a time until its standard input ends, then
prints, in milliseconds, by how much it was late at the 99.9th percentile. It imports next to
nothing, so that it costs what is measured beside it next to nothing.
"""

from __future__ import annotations

import sys
from threading import Event, Thread
from time import perf_counter, sleep


def main(tick: float) -> None:
    """Sleep until standard input ends."""
    ended = Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    Thread(target=wait, daemon=True).start()
    late: list[float] = []
    print("ready", flush=True)
    while not late or not ended.is_set():
        due = perf_counter() + tick
        sleep(tick)
        late.append(perf_counter() - due)
    late.sort()
    print(late[len(late) * 999 // 1000] * 1e3)


if __name__ == "__main__":
    main(float(sys.argv[1]))
