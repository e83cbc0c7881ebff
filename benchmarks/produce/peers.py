"""The producers that are compared, each behind the same four calls.

A worker process imports only its own peer. All have the same settings: acks=all,
idempotent, linger 5 ms, no compression; batch size and the rest are each one's default.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Any, Protocol

PEERS = ("asyncproducer", "asyncproducer-python", "aiokafka")


class Peer(Protocol):
    version: str

    async def start(self, bootstrap_servers: str, topic: str) -> None: ...
    def send(self, value: bytes) -> Awaitable[Any]:
        """Done when the record is acknowledged."""
        ...

    def enqueue(self, value: bytes) -> Awaitable[Any]:
        """Done when the record is buffered."""
        ...

    async def flush(self) -> None: ...
    async def stop(self) -> None: ...


class AsyncProducer:
    def __init__(self) -> None:
        import asyncproducer

        self._module = asyncproducer
        self.version = f"{asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})"

    async def start(self, bootstrap_servers: str, topic: str) -> None:
        self._topic = topic
        self._producer = self._module.Producer(bootstrap_servers, linger_ms=5)
        await self._producer.start()
        await self._producer.warm_up(topic)

    def send(self, value: bytes) -> Awaitable[Any]:
        return self._producer.send(self._topic, value)

    def enqueue(self, value: bytes) -> Awaitable[Any]:
        return self._producer.enqueue(self._topic, value)

    async def flush(self) -> None:
        await self._producer.flush()

    async def stop(self) -> None:
        await self._producer.close()


class AioKafka:
    def __init__(self) -> None:
        import aiokafka

        self._module = aiokafka
        self.version = str(aiokafka.__version__)

    async def start(self, bootstrap_servers: str, topic: str) -> None:
        self._topic = topic
        self._producer = self._module.AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers, acks="all", enable_idempotence=True, linger_ms=5
        )
        await self._producer.start()
        await self._producer.partitions_for(topic)

    def send(self, value: bytes) -> Awaitable[Any]:
        waiting: Awaitable[Any] = self._producer.send_and_wait(self._topic, value)
        return waiting

    def enqueue(self, value: bytes) -> Awaitable[Any]:
        waiting: Awaitable[Any] = self._producer.send(self._topic, value)
        return waiting

    async def flush(self) -> None:
        await self._producer.flush()

    async def stop(self) -> None:
        await self._producer.stop()


def environment(peer: str) -> dict[str, str]:
    """The environment of the worker process of a peer."""
    chosen = dict(os.environ)
    if peer == "asyncproducer":
        chosen["ASYNCPRODUCER_IMPL"] = "compiled"
    elif peer == "asyncproducer-python":
        chosen["ASYNCPRODUCER_IMPL"] = "python"
    return chosen


def make(peer: str) -> Peer:
    return AioKafka() if peer == "aiokafka" else AsyncProducer()
