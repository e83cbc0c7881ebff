"""This producer. Which implementation runs, and on which loop, the worker has decided."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncproducer
from asyncproducer.bench.built import built
from asyncproducer.bench.peers import Job, Result
from asyncproducer.bench.serializers import serializer_of
from asyncproducer.bench.workloads import GROUP
from asyncproducer.options import Options
from asyncproducer.producer import Producer
from asyncproducer.records import TopicPartition

__all__ = ["Ours"]


class Ours:
    """asyncproducer.Producer."""

    version = f"{asyncproducer.__version__} ({built()})"
    blocking = False

    async def start(self, job: Job) -> None:
        """See Peer."""
        case = job.case
        options: Options = {
            "linger_ms": case.linger_ms,
            "compression_type": case.codec,
            "compression_level": case.level,
            "enable_idempotence": case.idempotent,
        }
        if case.batch_bytes:
            options["batch_size"] = options["batch_max_bytes"] = case.batch_bytes
        if case.transactional:
            options["transactional_id"] = job.topics[0]
        self.producer: Producer[Any, Any] = Producer(
            job.servers, value_serializer=serializer_of(case, job.topics[0]), **options
        )
        self._place = TopicPartition(job.topics[0], 0)
        await self.producer.start()
        self.enqueue = self.producer.enqueue
        await self.producer.warm_up(*job.topics)

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """See Peer."""
        return partial(self.producer.send, topic)

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """See Peer."""

        async def enqueue(value: Any, done: Callable[[], object]) -> None:
            delivery = await self.producer.enqueue(topic, value)
            delivery.add_done_callback(lambda _: done())

        return enqueue

    def serve(self, seconds: float) -> None:
        """See Peer."""
        raise NotImplementedError

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        """See Peer."""
        return partial(self.producer.send_many, topic)

    async def begin(self) -> None:
        """See Peer."""
        await self.producer.begin_transaction()

    async def commit(self, offset: int | None) -> None:
        """See Peer."""
        if offset is not None:
            await self.producer.send_offsets({self._place: offset}, GROUP)
        await self.producer.commit_transaction()

    async def flush(self) -> None:
        """See Peer."""
        await self.producer.flush()

    async def stop(self) -> None:
        """See Peer."""
        await self.producer.close()

    def statistics(self) -> Result:
        """See Peer."""
        metrics = self.producer.metrics()
        records, batches = metrics["record_send_total"], metrics["batch_count"]
        if not batches:
            return {}
        per_request = metrics["records_per_request_avg"]
        return {
            "batch_bytes": metrics["batch_size_avg"],
            "records_per_batch": records / batches,
            "batches_per_request": per_request * batches / records,
        }
