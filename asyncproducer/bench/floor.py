"""What a loop waits on this machine without doing anything for Kafka, when all cores are busy.

`python -m asyncproducer.bench.floor` runs a loop whose turns compute half a millisecond each, while
another process computes on each of the other cores, and prints, as JSON, what `loads` tells of the
loop of a load. Where a machine has its cores for itself, that is little more than a turn; a virtual
one may be held up by its host for milliseconds, which no figure of its own tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from time import perf_counter, thread_time

from asyncproducer.bench.loads import stalls
from asyncproducer.bench.peers import Result

__all__ = ["measured", "run"]

_TURN_S = 0.0005
_SECONDS = 5.0
_TIMEOUT_S = 60.0


def measured() -> Result:
    """`run`, in a process of its own, by the names under which a run's facts have it."""
    command = [sys.executable, "-m", "asyncproducer.bench.floor"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return {f"floor_{name}": round(value, 2) for name, value in json.loads(told.stdout).items()}


def run(seconds: float = _SECONDS) -> Result:
    """Turns of half a millisecond for so long, beside processes that compute."""
    # They end by themselves, should nobody be there who does it.
    busy = (
        f"import time\nend = time.monotonic() + {2 * seconds + 5}\nwhile time.monotonic() < end: 0"
    )
    with ExitStack() as others:
        for _ in range((os.cpu_count() or 1) - 1):
            other = subprocess.Popen([sys.executable, "-I", "-c", busy])
            others.callback(other.wait)
            others.callback(other.kill)
        result = asyncio.run(_turns(seconds))
    return {name: result[name] for name in ("stall_p999_ms", "turn_wait_p999_ms") if name in result}


async def _turns(seconds: float) -> Result:
    result: Result = {}
    async with stalls(result, wanted=True):
        end = perf_counter() + seconds
        while perf_counter() < end:
            turn = thread_time() + _TURN_S
            while thread_time() < turn:
                pass
            await asyncio.sleep(0)
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run()))
