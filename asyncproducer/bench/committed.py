"""What a `read_committed` consumer would be given of a topic, counted by the headers of batches.

End offsets do not tell: each transaction has a marker in each of its partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from asyncproducer.testing.batches import read_header, split_batches
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.raw_client import RawClient

__all__ = ["count_committed", "records_before"]

_READ_COMMITTED = 1
_MOST_BYTES = 16 * 2**20
_WAIT_MS = 100


def count_committed(cluster: KafkaCluster, topic: str, *, timeout_s: float = 30.0) -> int:
    """The records of all partitions, when no transaction is open: brokers write markers after
    they have told the producer that all is well. Blocks.

    Raises TimeoutError where one stays open, RuntimeError, OSError.
    """
    ends: dict[int, int] = {}

    def closed() -> bool:
        ends.update(cluster.end_offsets(topic, committed=True))
        return ends == cluster.end_offsets(topic)

    cluster.wait_until(closed, timeout_s=timeout_s)
    leaders = {number: view.leader for number, view in cluster.topic(topic).items()}
    addresses = cluster.addresses
    by_server: dict[str, dict[int, int]] = {}
    for number, end in ends.items():
        host, port = addresses[leaders[number]]
        by_server.setdefault(f"{host}:{port}", {})[number] = end
    return sum(asyncio.run(records_before(s, topic, mine)) for s, mine in by_server.items())


async def records_before(server: str, topic: str, ends: Mapping[int, int]) -> int:
    """The committed records before these offsets of the partitions, all led by `server`.

    Raises RuntimeError where the broker refuses, or something was aborted: nobody does that here.
    """
    count = 0
    async with await RawClient.connect(server) as client:
        for partition, end in ends.items():
            position = 0
            while position < end:
                answer = await client.request(
                    "fetch",
                    11,
                    max_wait=_WAIT_MS,
                    min_bytes=1,
                    isolation_level=_READ_COMMITTED,
                    topics=[
                        {
                            "topic": topic,
                            "partitions": [
                                {
                                    "partition": partition,
                                    "fetch_offset": position,
                                    "partition_max_bytes": _MOST_BYTES,
                                }
                            ],
                        }
                    ],
                    forgotten_topics_data=[],
                )
                (data,) = answer.responses[0].partitions
                if data.error_code or data.aborted_transactions:
                    what = data.error_code or f"{len(data.aborted_transactions)} aborted ones"
                    raise RuntimeError(f"transactions in {topic}-{partition}: {what}")
                for batch in split_batches(bytes(data.records or b"")):
                    header = read_header(batch)
                    position = header.last_offset + 1
                    if not header.is_control:
                        count += header.record_count
    return count
