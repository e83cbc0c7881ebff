"""kafka-python's KafkaProducer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import kafka

from asyncproducer.bench.peers import Job, Plain, Result
from asyncproducer.bench.serializers import serializer_of

__all__ = ["KafkaPython"]


class KafkaPython(Plain):
    """KafkaProducer, which sends from a thread of its own."""

    version = str(kafka.__version__)
    blocking = True

    async def start(self, job: Job) -> None:
        """See Peer."""
        case = job.case
        options: dict[str, Any] = {"batch_size": case.batch_bytes} if case.batch_bytes else {}
        if serializer := serializer_of(case, job.topics[0]):
            options["value_serializer"] = serializer
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=job.servers.split(","),
            acks="all",
            enable_idempotence=case.idempotent,
            linger_ms=case.linger_ms,
            compression_type=None if case.codec == "none" else case.codec,
            **options,
        )
        self.enqueue = self._producer.send
        for topic in job.topics:
            self._producer.partitions_for(topic)

    def enqueue_all(self, topic: str, values: Sequence[Any], given: Mapping[str, Any]) -> None:
        """See Peer."""
        enqueue = self.enqueue
        for value in values:
            enqueue(topic, value, **given)

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """See Peer."""
        raise NotImplementedError

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """See Peer."""

        def enqueue(value: Any, done: Callable[[], object]) -> None:
            self._producer.send(topic, value).add_callback(lambda _: done())

        return enqueue

    def serve(self, seconds: float) -> None:
        """See Peer."""
        time.sleep(seconds)

    async def flush(self) -> None:
        """See Peer."""
        self._producer.flush()

    async def stop(self) -> None:
        """See Peer."""
        self._producer.close()

    def statistics(self) -> Result:
        """Its metrics are rates of the last minute: of no use here."""
        return {}
