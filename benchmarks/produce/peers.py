"""The producers that are compared, each behind the same four calls.

A worker process imports only its own peer. All have the same settings: acks=all,
idempotent, linger 5 ms, no compression; batch size and the rest are each one's default.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

PEERS = ("asyncproducer", "asyncproducer-python", "aiokafka")


class Peer(Protocol):
    version: str
    #: Awaited with a value: done when the record is acknowledged.
    send: Callable[[bytes], Awaitable[Any]]
    #: Awaited with a value: done when the record is buffered.
    enqueue: Callable[[bytes], Awaitable[Any]]

    async def start(self, bootstrap_servers: str, topic: str) -> None: ...
    async def flush(self) -> None: ...
    async def stop(self) -> None: ...


class AsyncProducer:
    send: Callable[[bytes], Awaitable[Any]]
    enqueue: Callable[[bytes], Awaitable[Any]]

    def __init__(self) -> None:
        import asyncproducer

        self._module = asyncproducer
        self.version = f"{asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})"

    async def start(self, bootstrap_servers: str, topic: str) -> None:
        self._producer = self._module.Producer(bootstrap_servers, linger_ms=5)
        await self._producer.start()
        await self._producer.warm_up(topic)
        self.send = partial(self._producer.send, topic)
        self.enqueue = partial(self._producer.enqueue, topic)

    async def flush(self) -> None:
        await self._producer.flush()

    async def stop(self) -> None:
        await self._producer.close()


class AioKafka:
    send: Callable[[bytes], Awaitable[Any]]
    enqueue: Callable[[bytes], Awaitable[Any]]

    def __init__(self) -> None:
        import aiokafka

        self._module = aiokafka
        self.version = str(aiokafka.__version__)

    async def start(self, bootstrap_servers: str, topic: str) -> None:
        self._producer = self._module.AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers, acks="all", enable_idempotence=True, linger_ms=5
        )
        await self._producer.start()
        await self._producer.partitions_for(topic)
        self.send = partial(self._producer.send_and_wait, topic)
        self.enqueue = partial(self._producer.send, topic)

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
