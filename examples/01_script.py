"""A script: the ways to send, and what each of them waits for.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/01_script.py
"""

import asyncio
import os

from asyncproducer import DeliveryError, Producer, Record

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")


async def main() -> None:
    # `async with` connects. At its end what is still buffered is sent, then all is closed.
    async with Producer(SERVERS, compression_type="lz4") as producer:
        # send: when this line is passed, the record is in the log, on all in-sync replicas.
        metadata = await producer.send("orders", b"one tea", key=b"alice")
        print(f"send: {metadata.topic_partition} at offset {metadata.offset}")

        # Many sends at once share batches and requests. No task needs its own connection.
        async with asyncio.TaskGroup() as group:
            for n in range(1000):
                group.create_task(producer.send("orders", f"order {n}", key=f"customer {n % 7}"))
        print("send: 1000 more, all at once")

        # enqueue: waits for room in the buffer only, and keeps the order of the calls.
        # Its Delivery can be awaited whenever you want to know, or never.
        deliveries = [await producer.enqueue("orders", f"late order {n}") for n in range(100)]
        try:
            for delivery in deliveries:
                await delivery
        except DeliveryError as error:
            # persisted: is it in the log? "no", "maybe", "yes". After "no" send it again.
            print(f"not acknowledged, persisted: {error.persisted}: {error}")
        print("enqueue: 100 records, all acknowledged")

        # send_many: an iterable (or async iterable), one outcome for each record.
        rows = (Record("orders", f"row {n}", key=f"customer {n % 7}") for n in range(5000))
        result = await producer.send_many("orders", rows, raise_on_error=False)
        print(f"send_many: {result.acknowledged} acknowledged, {len(result.failed)} failed")


if __name__ == "__main__":
    asyncio.run(main())
