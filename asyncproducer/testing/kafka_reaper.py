"""Ends brokers whose owner died without a chance to end them (SIGKILL, a job's time limit).

Runs as its own small process: `python kafka_reaper.py DIRECTORY`. The owner writes `+pid` when a
broker starts and `-pid` when it has been waited for. The pipe closes when the owner ends, however
it ends: then the brokers that are left are killed and the directory is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable


def survivors(lines: Iterable[str]) -> set[int]:
    """The pids that were announced and not withdrawn, known when `lines` end."""
    pids: set[int] = set()
    for line in lines:
        sign, pid = line[:1], int(line[1:])
        if sign == "+":
            pids.add(pid)
        else:
            pids.discard(pid)
    return pids


def main(directory: str) -> None:
    """Waits for the owner's end, then ends what it left."""
    for pid in survivors(sys.stdin):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
