"""What others get while a broker stands still: real Kafka, three brokers, one of them paused.

    python benchmarks/standing_broker.py

Each partition is on one broker, and one broker is stopped (SIGSTOP) for some seconds while records
of 1 kB are sent to all. Prints how many records the other brokers acknowledged per second, before,
in each second of the pause, and after it. The loads:

tasks   60 tasks that enqueue without a pause, each to a partition of its own
sends   600 tasks that await one send after the other, each to a partition of its own
flood   one task that enqueues records without a key
keyed   one task that enqueues records with keys: it has its order, so it waits for the broker
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

from asyncproducer import Delivery, Producer
from asyncproducer.testing.kafka import KafkaCluster

BROKERS = 3
PARTITIONS = 6
VALUE = bytes(1_000)
LOADS = ("tasks", "sends", "flood", "keyed")


class Count:
    """How many records the brokers that go on have acknowledged, by the second."""

    def __init__(self, partitions: set[int]) -> None:
        self._partitions = partitions
        self._began = perf_counter()
        self.seconds: Counter[int] = Counter()

    def sent(self, partition: int) -> None:
        """One more."""
        if partition in self._partitions:
            self.seconds[int(perf_counter() - self._began)] += 1

    def ended(self, delivery: Delivery) -> None:
        """One more, if it did not fail."""
        if delivery.exception() is None:
            self.sent(delivery.partition)


@asynccontextmanager
async def under_load(
    producer: Producer, topic: str, load: str, count: Count
) -> AsyncIterator[None]:
    """The load runs meanwhile."""
    stopped = asyncio.Event()

    async def enqueues(partition: int | None, *, keyed: bool = False) -> None:
        number = 0
        while not stopped.is_set():
            key = b"%d" % number if keyed else None
            delivery = await producer.enqueue(topic, VALUE, key=key, partition=partition)
            delivery.add_done_callback(count.ended)
            number += 1

    async def sends(partition: int) -> None:
        while not stopped.is_set():
            await producer.send(topic, VALUE, partition=partition)
            count.sent(partition)

    if load == "tasks":
        work = [enqueues(number % PARTITIONS) for number in range(60)]
    elif load == "sends":
        work = [sends(number % PARTITIONS) for number in range(600)]
    else:
        work = [enqueues(None, keyed=load == "keyed")]
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
        yield
        stopped.set()


async def measured(cluster: KafkaCluster, load: str, seconds: int) -> Counter[int]:
    """Acknowledged by those that go on, by the second; the pause begins after two."""
    topic = f"standing-{load}"
    cluster.create_topic(topic, partitions=PARTITIONS, replication=1)
    leaders = {number: view.leader for number, view in cluster.topic(topic).items()}
    paused = leaders[0]
    async with Producer(cluster.bootstrap_servers) as producer:
        for partition in range(PARTITIONS):
            await producer.send(topic, VALUE, partition=partition)
        count = Count({number for number, leader in leaders.items() if leader != paused})
        async with under_load(producer, topic, load, count):
            await asyncio.sleep(2)
            await asyncio.to_thread(cluster.pause, paused)
            try:
                await asyncio.sleep(seconds)
            finally:
                await asyncio.to_thread(cluster.resume, paused)
            await asyncio.sleep(2)
    return count.seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what others get while a broker stands still")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--seconds", type=int, default=3, help="how long it stands still")
    options = parser.parse_args()
    with KafkaCluster(BROKERS) as cluster:
        for load in options.loads:
            got = asyncio.run(measured(cluster, load, options.seconds))
            second = [f"{got[number]:,}" for number in range(4 + options.seconds)]
            parts = (second[:2], second[2:-2], second[-2:])
            print(f"{load}: {' | '.join(' '.join(part) for part in parts)}", flush=True)


if __name__ == "__main__":
    main()
