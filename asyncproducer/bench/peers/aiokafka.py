"""aiokafka's AIOKafkaProducer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiokafka

from asyncproducer.bench.peers import Job, Result
from asyncproducer.bench.serializers import serializer_of
from asyncproducer.bench.workloads import GROUP

__all__ = ["AioKafka"]


class AioKafka:
    """AIOKafkaProducer."""

    version = str(aiokafka.__version__)
    blocking = False

    async def start(self, job: Job) -> None:
        """See Peer."""
        case = job.case
        options: dict[str, Any] = {"max_batch_size": case.batch_bytes} if case.batch_bytes else {}
        if serializer := serializer_of(case, job.topics[0]):
            options["value_serializer"] = serializer
        if case.transactional:
            options["transactional_id"] = job.topics[0]
        self._producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=job.servers,
            acks="all",
            enable_idempotence=case.idempotent,
            linger_ms=case.linger_ms,
            compression_type=None if case.codec == "none" else case.codec,
            **options,
        )
        self._place = aiokafka.TopicPartition(job.topics[0], 0)
        self.enqueue = self._producer.send
        await self._producer.start()
        # All at once: each question is for all topics so far.
        await self._producer.client.set_topics(job.topics)
        for topic in job.topics:
            await self._producer.partitions_for(topic)

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """See Peer."""
        return partial(self._producer.send_and_wait, topic)

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """See Peer."""

        async def enqueue(value: Any, done: Callable[[], object]) -> None:
            future = await self._producer.send(topic, value)
            future.add_done_callback(lambda _: done())

        return enqueue

    def serve(self, seconds: float) -> None:
        """See Peer."""
        raise NotImplementedError

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        """It has batches of its user's making, for one partition each: no such thing."""
        return None

    async def begin(self) -> None:
        """See Peer."""
        await self._producer.begin_transaction()

    async def commit(self, offset: int | None) -> None:
        """See Peer."""
        if offset is not None:
            await self._producer.send_offsets_to_transaction({self._place: offset}, GROUP)
        await self._producer.commit_transaction()

    async def flush(self) -> None:
        """See Peer."""
        await self._producer.flush()

    async def stop(self) -> None:
        """See Peer."""
        await self._producer.stop()

    def statistics(self) -> Result:
        """It tells none."""
        return {}
