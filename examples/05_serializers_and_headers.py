"""Typed values as JSON, headers, a partitioner and an interceptor of your own.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/05_serializers_and_headers.py
"""

import asyncio
import os
import uuid
import zlib
from collections import Counter
from datetime import UTC, datetime

import msgspec

from asyncproducer import Interceptor, Producer, Record, RecordMetadata
from asyncproducer.plugins import TopicView
from asyncproducer.records import Header
from asyncproducer.serializers import json_serializer, str_serializer

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")


class Order(msgspec.Struct):
    id: uuid.UUID
    item: str
    at: datetime


class VipPartitioner:
    """Partition 0 is for customers whose name begins with "vip", the others share the rest.

    Called with the serialized key and value; `partition=` in a send is stronger.
    """

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None, /) -> int:
        if topic.partition_count == 1 or not key or key.startswith(b"vip"):
            return 0
        return 1 + zlib.crc32(key) % (topic.partition_count - 1)


class Census(Interceptor):
    """Gives each record an id that a consumer can know again, and counts outcomes by topic."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def on_send(self, record: Record) -> Record:
        headers = dict(record.headers or ())
        return record._replace(headers={**headers, "record-id": str(uuid.uuid4())})

    def on_acknowledgement(
        self,
        metadata: RecordMetadata,
        exception: BaseException | None,
        headers: tuple[Header, ...],
    ) -> None:
        outcome = "acknowledged" if exception is None else type(exception).__name__
        self.outcomes[metadata.topic, outcome] += 1


async def main() -> None:
    census = Census()
    async with Producer(
        SERVERS,
        key_serializer=str_serializer,
        value_serializer=json_serializer,
        partitioner=VipPartitioner(),
        interceptors=[census],
    ) as producer:
        for customer in ("vip alice", "bob", "carol"):
            order = Order(uuid.uuid4(), "tea", datetime.now(UTC))
            headers = {"content-type": "application/json"}
            metadata = await producer.send("orders", order, key=customer, headers=headers)
            print(f"{customer}: partition {metadata.partition}")
    for (topic, outcome), count in census.outcomes.items():
        print(f"{topic}: {count} {outcome}")


if __name__ == "__main__":
    asyncio.run(main())
