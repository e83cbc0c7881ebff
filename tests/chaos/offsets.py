"""What a group has committed, by who is not us: where it is now, and each place it has been at.

The first is what the group's coordinator answers confluent-kafka. It knows nothing of the
transactions before the last one, so the second is the coordinator's own log, read by aiokafka:
with each offset that was committed, and without those of aborted transactions.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import confluent_kafka

from asyncproducer.cli.clusters import read

if TYPE_CHECKING:
    from asyncproducer.testing.kafka import KafkaCluster

__all__ = ["committed_log", "committed_offset", "logged_offset"]

_LOG = "__consumer_offsets"
#: OffsetCommitKey, as Kafka writes it. Keys of other versions tell of members.
_KEY_VERSION = 1


async def committed_offset(cluster: KafkaCluster, group: str, topic: str) -> int:
    """Of partition 0, as soon as no transaction holds it back. Negative without one."""

    def ask() -> int:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": cluster.bootstrap_servers, "group.id": group}
        )
        try:
            (place,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], timeout=30)
            return int(place.offset)
        finally:
            consumer.close()

    return await asyncio.to_thread(ask)


async def committed_log(cluster: KafkaCluster, group: str, topic: str) -> list[int]:
    """All that the group has committed for partition 0, in the order of the log."""
    starts = dict.fromkeys(cluster.topic(_LOG), 0)
    reading = {"isolation_level": "read_committed"}
    found = [
        logged_offset(record.key, record.value, group, topic)
        async for record in read(cluster.bootstrap_servers, _LOG, starts, reading)
    ]
    return [offset for offset in found if offset is not None]


def logged_offset(
    key: bytes | None, value: bytes | None, group: str, topic: str, partition: int = 0
) -> int | None:
    """The offset that a record of the coordinator's log sets; -1 if it removes it.

    None for a record about anything else. OffsetCommitKey and OffsetCommitValue: the offset comes
    first in each version of the value.
    """
    names = b"".join(
        struct.pack(">h", len(name)) + name for name in (group.encode(), topic.encode())
    )
    if key != struct.pack(">h", _KEY_VERSION) + names + struct.pack(">i", partition):
        return None
    return -1 if value is None else int(struct.unpack_from(">hq", value)[1])
