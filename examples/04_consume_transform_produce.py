"""Read a topic, transform each record, write another topic: at least once.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/04_consume_transform_produce.py

It runs until Ctrl-C. asyncproducer only produces; the consumer is aiokafka's. The order is what
matters: the place in the source is noted after the results are acknowledged. A crash in between
repeats some records and never loses one. (For exactly once, give the Producer a transactional_id,
and send the results and the place within `async with producer.transaction()`.)

The place is kept as a record in a topic, so this works without a consumer group, for one
process. To share the partitions among several, let a group assign them: give the consumer
SOURCE and group_id="invoices", leave out assign and seek, and write
`await consumer.commit({place: records[-1].offset + 1})` where PROGRESS is sent.
"""

import asyncio
import os

from aiokafka import AIOKafkaConsumer, TopicPartition

from asyncproducer import Producer, Record

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")
#: Make PROGRESS with cleanup.policy=compact: only the last record of each key is of interest.
SOURCE, TARGET, PROGRESS = "orders", "invoices", "invoices-progress"


async def places_of(producer: Producer, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, info.partition) for info in await producer.partitions_for(topic)]


async def read_progress(consumer: AIOKafkaConsumer, notes: list[TopicPartition]) -> dict[int, int]:
    """Partition of the source -> the offset to go on from."""
    progress: dict[int, int] = {}
    ends = await consumer.end_offsets(notes)
    consumer.assign(notes)
    await consumer.seek_to_beginning(*notes)
    for note in notes:
        while await consumer.position(note) < ends[note]:
            for record in (await consumer.getmany(note, timeout_ms=1000)).get(note, []):
                progress[int(record.key)] = int(record.value)
    return progress


def invoice(order: bytes) -> bytes:
    return b"invoice for " + order


async def main() -> None:
    # No auto commit: it would note places whose results are not in the log yet.
    consumer = AIOKafkaConsumer(bootstrap_servers=SERVERS, enable_auto_commit=False)
    async with consumer, Producer(SERVERS) as producer:
        progress = await read_progress(consumer, await places_of(producer, PROGRESS))
        places = await places_of(producer, SOURCE)
        consumer.assign(places)
        for place in places:
            consumer.seek(place, progress.get(place.partition, 0))
        print("ready", flush=True)
        while True:
            fetched = await consumer.getmany(timeout_ms=1000)
            for place, records in fetched.items():
                # The key goes along: what was in order stays in order. Returns when all are
                # acknowledged; if one is not, it raises, we end, and the next start repeats.
                results = (Record(TARGET, invoice(r.value), key=r.key) for r in records)
                await producer.send_many(TARGET, results)
                offset = records[-1].offset + 1
                await producer.send(PROGRESS, str(offset), key=str(place.partition))
                print(f"{SOURCE}-{place.partition}: done up to {offset}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        # main() was cancelled where it waited, and the producer sent what it had before it closed.
        # What was not noted is done again.
        print("stopped")
