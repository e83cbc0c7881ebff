"""`python -m asyncproducer.bench.training`: what a profiled build runs (setup.py).

It is compiled twice; in between, its modules count how often each branch is taken here. So here is
what the loads of the benchmarks do, of most a little, and what a record can have beside, against
brokers of this package: nothing is measured, and nothing beside the package and what it needs has
to be there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from asyncproducer.bench.peers import Job, load_peer
from asyncproducer.bench.worker import drive
from asyncproducer.bench.workloads import Case
from asyncproducer.producer import Producer
from asyncproducer.testing import EmbeddedCluster

__all__ = ["CASES", "WHOLE", "main"]

_PEER = "asyncproducer"
#: So many times three records that have all there is, or nothing.
WHOLE = 20_000
_HEADERS = [("trace", b"0123456789abcdef"), ("empty", None)]

#: A function that no case executes is compiled as it would be without a profile; a branch of one
#: that they do execute counts as rare. So what is usual must be here.
CASES = (
    Case(name="flood", records=300_000),
    Case(name="by partition", records=50_000, run_length=148),
    Case(name="headers", records=50_000, headers=3),
    Case(name="1 kB", records=50_000, size=1_000),
    Case(name="lz4", records=30_000, size=1_000, codec="lz4"),
    Case(name="not idempotent", records=30_000, idempotent=False),
    Case(name="transactions", records=20_000, transaction=1_000),
    Case(name="list", load="many", records=300_000),
    Case(name="list of 1 kB", load="many", records=30_000, size=1_000),
    Case(name="task", load="loop", records=2_000),
    Case(name="tasks", load="loop", tasks=100, records=50_000),
    Case(name="new tasks", load="burst", tasks=1_000, records=30_000),
)


def _records() -> Iterator[dict[str, object]]:
    """The arguments of records that have all there is, or nothing."""
    now = time.time_ns() // 1_000_000
    for n in range(WHOLE):
        key = b"key-%d" % (n % 1_000)
        yield {"value": b"value", "key": key}
        yield {"value": None, "key": key, "headers": _HEADERS}
        yield {"value": b"value", "key": key, "partition": n % 6, "timestamp": now}


async def _everything(cluster: EmbeddedCluster) -> None:
    async with Producer(cluster.bootstrap_servers) as producer:
        deliveries = [
            await producer.enqueue("everything", **record)  # type: ignore[arg-type]  # by name
            for record in _records()
        ]
        for delivery in deliveries:
            await delivery


async def _train() -> list[int]:
    sent = []
    # A batch costs the broker the same, however many records it has: the producer is to be busy.
    async with EmbeddedCluster(default_partitions=6, validate_records=False) as cluster:
        for n, case in enumerate(CASES):
            topic = f"training-{n}"
            job = Job(_PEER, cluster.bootstrap_servers, (topic,), case)
            sent.append((await drive(load_peer(_PEER)(), job))["sent"])
            cluster.delete_topic(topic)
        await _everything(cluster)
    return sent


def main() -> list[int]:
    """Do all of it; returns how many records each case has sent.

    Raises KafkaError.
    """
    return asyncio.run(_train())


if __name__ == "__main__":
    main()
