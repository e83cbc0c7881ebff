"""`python -m asyncproducer.bench.worker <JOB`: one measurement; prints one line of JSON.

JOB is a Job as JSON. Exit status 3: this peer, here and now, cannot do that case; the line
tells why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from asyncproducer.bench.peers import PEERS, Job, Peer, Result, load_peer
from asyncproducer.bench.workloads import Case

__all__ = ["CANNOT", "as_text", "drive", "main"]

CANNOT = 3


async def drive(peer: Peer, job: Job) -> Result:
    """What a peer did that was started, given the load, and stopped."""
    from asyncproducer.bench.loads import LOADS, Meter, peak_rss_mib, values_of, warm_up

    next(values_of(job.case))  # they are made now: their memory is not the producer's
    await peer.start(job)
    before = Meter()
    # Who waits for room waits from the first record on.
    warm = 0 if job.case.load == "exhaust" else await warm_up(peer, job)
    left, most = before.rss_left_mib(), before.rss_growth_mib()
    result = await LOADS[job.case.load](peer, job)
    result["sent"] = warm + result["records"]
    # A buffer that the warm-up has filled grows no more, and is the producer's all the same.
    result["rss_growth_mib"] = max(most, left + result["rss_growth_mib"])
    result["version"] = peer.version
    result.update(peer.statistics())
    await peer.stop()
    result["max_rss_mib"] = peak_rss_mib()
    return result


def _measure(job: Job) -> Result:
    kind = PEERS[job.peer]
    found = load_peer(job.peer)
    if kind.whole:
        result: Result = found(job)
        return result
    factory = None
    if kind.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(drive(found(), job))


def main(text: str) -> int:
    """Do what the job says; returns the exit status."""
    told = json.loads(text)
    case = Case(**told.pop("case"))
    job = Job(**{**told, "case": case, "topics": tuple(told["topics"])})
    try:
        result = _measure(job)
    except NotImplementedError as error:
        print(json.dumps({"cannot": str(error)}))
        return CANNOT
    print(json.dumps(result))
    return 0


def as_text(job: Job) -> str:
    """The job as `main` reads it."""
    return json.dumps(dataclasses.asdict(job))


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read()))
