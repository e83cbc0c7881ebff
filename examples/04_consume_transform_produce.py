"""Read a topic, transform each record, write another topic: exactly once.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/04_consume_transform_produce.py

It runs until Ctrl-C. asyncproducer only produces; the consumer is aiokafka's. The results and the
place in the source are one transaction: both count, or neither, wherever this process dies. Who
reads the results must do so with isolation_level="read_committed".

This is for one process: its transactional id sees to that. A second one takes over, and this one
ends with ProducerFenced. To share the partitions among several, give each its own id, and let the
group assign them: confluent-kafka's consumer tells its membership
(`send_offsets(..., consumer.consumer_group_metadata())`), so that the group refuses the places of
one that it has given up.
"""

import asyncio
import os

from aiokafka import AIOKafkaConsumer, TopicPartition

from asyncproducer import Producer, TransactionAborted

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")
SOURCE, TARGET, GROUP = "orders", "invoices", "invoices"


def invoice(order: bytes) -> bytes:
    return b"invoice for " + order


async def main() -> None:
    # No auto commit: the places are committed by the producer, with the results.
    consumer = AIOKafkaConsumer(
        bootstrap_servers=SERVERS,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    # The producer comes first: its start ends what a former process had open, and only then is it
    # certain where to go on.
    async with Producer(SERVERS, transactional_id="invoices-1") as producer, consumer:
        infos = await producer.partitions_for(SOURCE)
        consumer.assign([TopicPartition(SOURCE, info.partition) for info in infos])
        print("ready", flush=True)
        while True:
            fetched = await consumer.getmany(timeout_ms=1000)
            if not fetched:
                continue
            places = {place: records[-1].offset + 1 for place, records in fetched.items()}
            try:
                async with producer.transaction() as tx:
                    for records in fetched.values():
                        for record in records:
                            # The key goes along: what was in order stays in order.
                            await tx.enqueue(TARGET, invoice(record.value), key=record.key)
                    await tx.send_offsets(places, GROUP)
            except TransactionAborted as error:
                print(f"again: {error}", flush=True)
                for place, records in fetched.items():
                    consumer.seek(place, records[0].offset)
                continue
            for place, offset in places.items():
                print(f"{SOURCE}-{place.partition}: done up to {offset}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        # main() was cancelled where it waited. A transaction that was open is aborted: the next
        # start does it again.
        print("stopped")
