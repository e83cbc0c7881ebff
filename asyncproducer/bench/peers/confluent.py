"""confluent-kafka: the blocking Producer with callbacks, and AIOProducer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka

from asyncproducer.bench.peers import Job, Plain, Result, Send
from asyncproducer.bench.serializers import serializer_of
from asyncproducer.bench.workloads import GROUP

__all__ = ["Confluent", "ConfluentAio"]

_VERSION = f"{confluent_kafka.version()} (librdkafka {confluent_kafka.libversion()[0]})"
_VERSION = _VERSION.replace("('", "").replace("',", "")

#: How often the callbacks of delivered records are asked for: each time costs, also for nothing.
_POLL_EVERY = 500

#: librdkafka refuses more than 100,000 unacknowledged records, and AIOProducer's futures fail
#: then: whoever is faster has to wait, and it is the caller who must see to that.
_MOST_UNACKNOWLEDGED = 50_000


def _configuration(job: Job) -> dict[str, Any]:
    case = job.case
    options: dict[str, Any] = {
        "bootstrap.servers": job.servers,
        "acks": "all",
        "enable.idempotence": case.idempotent,
        "linger.ms": case.linger_ms,
        "compression.type": case.codec,
    }
    if case.level is not None:
        options["compression.level"] = case.level
    if case.batch_bytes:
        options["batch.size"] = case.batch_bytes
    if case.transactional:
        options["transactional.id"] = job.topics[0]
    return options


class Confluent:
    """confluent_kafka.Producer, as its documentation uses it: a callback per record, and poll."""

    version = _VERSION
    blocking = True

    async def start(self, job: Job) -> None:
        """See Peer."""
        self._serializer = serializer_of(job.case, job.topics[0])
        self._failed: list[Any] = []
        self._until_poll = _POLL_EVERY
        self._producer = confluent_kafka.Producer(_configuration(job))
        self.enqueue = self._buffering()
        self._producer.list_topics(job.topics[0], timeout=30)
        if job.case.transactional:
            self._producer.init_transactions(30)
        if job.case.offsets:
            self._topic = job.topics[0]
            # Only a consumer gives what send_offsets_to_transaction takes.
            group = {"bootstrap.servers": job.servers, "group.id": GROUP}
            self._consumer = confluent_kafka.Consumer(group)
            self._group = self._consumer.consumer_group_metadata()

    def _on_delivery(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failed.append(error)

    def _buffering(self) -> Send:
        produce, poll, on_delivery = self._producer.produce, self._producer.poll, self._on_delivery
        serialize = self._serializer

        def enqueue(topic: str, value: Any, **named: Any) -> None:
            if serialize is not None:
                value = serialize(value)
            while True:
                try:
                    produce(topic, value, on_delivery=on_delivery, **named)
                    break
                except BufferError:
                    poll(0.1)
            self._until_poll -= 1
            if not self._until_poll:
                self._until_poll = _POLL_EVERY
                poll(0)

        return enqueue

    def enqueue_all(self, topic: str, values: Sequence[Any], given: Mapping[str, Any]) -> None:
        """See Peer."""
        if given or self._serializer is not None:
            for value in values:
                self.enqueue(topic, value, **given)
            return
        # A function of ours between it and the loop would be a fifteenth of what a record costs.
        produce, poll, on_delivery = self._producer.produce, self._producer.poll, self._on_delivery
        until_poll = self._until_poll
        for value in values:
            while True:
                try:
                    produce(topic, value, on_delivery=on_delivery)
                    break
                except BufferError:
                    poll(0.1)
            until_poll -= 1
            if not until_poll:
                until_poll = _POLL_EVERY
                poll(0)
        self._until_poll = until_poll

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """See Peer."""
        raise NotImplementedError

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """See Peer."""

        def enqueue(value: Any, done: Callable[[], object]) -> None:
            def on_delivery(error: Any, message: Any) -> None:
                self._on_delivery(error, message)
                done()

            self._producer.produce(topic, value, on_delivery=on_delivery)

        return enqueue

    def serve(self, seconds: float) -> None:
        """See Peer."""
        self._producer.poll(seconds)

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        """See Peer."""
        produce_batch = partial(self._producer.produce_batch, topic, on_delivery=self._on_delivery)

        def send_list(values: list[Any]) -> None:
            taken = produce_batch([{"value": value} for value in values])
            if taken != len(values):
                raise RuntimeError(f"{taken} of {len(values)} records were taken")

        return send_list

    async def begin(self) -> None:
        """See Peer."""
        self._producer.begin_transaction()

    async def commit(self, offset: int | None) -> None:
        """See Peer."""
        if offset is not None:
            place = confluent_kafka.TopicPartition(self._topic, 0, offset)
            self._producer.send_offsets_to_transaction([place], self._group)
        self._producer.commit_transaction()

    async def flush(self) -> None:
        """See Peer."""
        self._producer.flush()
        if self._failed:
            raise RuntimeError(f"{len(self._failed)} records failed, first: {self._failed[0]}")

    async def stop(self) -> None:
        """It has no close: the end of the process is its end."""

    def statistics(self) -> Result:
        """It tells none without a callback for statistics, which would cost."""
        return {}


class ConfluentAio(Plain):
    """confluent_kafka.aio.AIOProducer, with its defaults for batching and its thread pool."""

    version = _VERSION
    blocking = False

    async def start(self, job: Job) -> None:
        """See Peer."""
        from confluent_kafka.aio import AIOProducer

        self._producer = AIOProducer(_configuration(job))
        self._unacknowledged: deque[asyncio.Future[Any]] = deque()
        self.enqueue = self._buffering()

    def _buffering(self) -> Send:
        produce, unacknowledged = self._producer.produce, self._unacknowledged

        async def enqueue(topic: str, value: Any) -> asyncio.Future[Any]:
            future = await produce(topic, value)
            unacknowledged.append(future)
            if len(unacknowledged) > _MOST_UNACKNOWLEDGED:
                await unacknowledged.popleft()
            return future

        return enqueue

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """See Peer."""

        async def send(value: Any) -> None:
            await (await self._producer.produce(topic, value))

        return send

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """See Peer."""

        async def enqueue(value: Any, done: Callable[[], object]) -> None:
            future = await self._producer.produce(topic, value)
            future.add_done_callback(lambda _: done())

        return enqueue

    def serve(self, seconds: float) -> None:
        """See Peer."""
        raise NotImplementedError

    async def flush(self) -> None:
        """See Peer."""
        await self._producer.flush()
        while self._unacknowledged:
            await self._unacknowledged.popleft()

    async def stop(self) -> None:
        """See Peer."""
        await self._producer.close()

    def statistics(self) -> Result:
        """It tells none."""
        return {}
