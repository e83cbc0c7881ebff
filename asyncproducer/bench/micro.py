"""Small operations, so many times each: `main(LOOPS)`, where LOOPS is JSON, how often by name.

Nothing is measured here: instructions.py counts what the process executes. An operation that is
not named is not even prepared.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.partitioner import murmur2
from asyncproducer.core.primitives import write_unsigned_varint
from asyncproducer.core.produce import (
    ProducePartition,
    ProduceTopic,
    decode_produce,
    encode_produce,
)

if TYPE_CHECKING:
    from asyncproducer.producer import Producer

__all__ = ["OPERATIONS", "main"]

_VALUE = b"v" * 100
_TIMESTAMP = 1_800_000_000_000
_VERSION = 9
_PARTITIONS = 6
_MOST_ROWS = 10_000


def _new_batch(size: int) -> ProducerBatch:
    return ProducerBatch("topic", 0, write_limit=size, created_at=0.0)


def append(loops: int) -> None:
    """A record of 100 bytes is written into a batch."""
    batch = _new_batch(1_000_000)
    for _ in range(loops):
        batch.try_append(0, None, _VALUE, NO_HEADERS)


def varint(loops: int) -> None:
    """A varint of two bytes is written into a request."""
    out = bytearray()
    for _ in range(loops):
        write_unsigned_varint(out, 300)


def _closed_batch() -> ProducerBatch:
    batch = _new_batch(16_384)
    while batch.try_append(0, None, _VALUE, NO_HEADERS) is not None:
        pass
    batch.close()
    return batch


def crc32c(loops: int) -> None:
    """The header of a batch of 16 KiB is written, with its CRC-32C."""
    batch = _closed_batch()
    for _ in range(loops):
        batch.seal()


def murmur2_16(loops: int) -> None:
    """A key of 16 bytes is hashed."""
    key = b"0123456789abcdef"
    for _ in range(loops):
        murmur2(key)


def encode(loops: int) -> None:
    """A Produce request with 6 batches is written."""
    batch = _closed_batch()
    batch.seal()
    partitions = [ProducePartition(n, batch.buffers()) for n in range(_PARTITIONS)]
    topics = [ProduceTopic("topic", None, partitions)]
    for _ in range(loops):
        encode_produce(
            _VERSION, 1, "c", acks=-1, timeout_ms=1, transactional_id=None, topics=topics
        )


def decode(loops: int) -> None:
    """The answer to a Produce request with 6 batches is read."""
    partitions = b"".join(
        struct.pack(">ihqqq", n, 0, 10_000, -1, 0) + b"\x01\x00\x00" for n in range(_PARTITIONS)
    )
    body = b"\x02\x06topic" + bytes([_PARTITIONS + 1]) + partitions + b"\x00" + bytes(4) + b"\x00"
    for _ in range(loops):
        decode_produce(_VERSION, body)


def enqueue(loops: int) -> None:
    """`await producer.enqueue()` of a record of 100 bytes, into a batch that is open.

    Ends the process: it must be the last operation.
    """

    async def records(producer: Producer) -> None:
        for _ in range(loops):
            await producer.enqueue("topic", _VALUE)

    _measured(records)


def enqueue_whole(loops: int) -> None:
    """`await producer.enqueue()` of a record that has all there is: a key, a header, a partition
    and a timestamp.

    Ends the process: it must be the last operation.
    """
    headers = [("trace", b"0123456789abcdef")]

    async def records(producer: Producer) -> None:
        for _ in range(loops):
            await producer.enqueue(
                "topic", _VALUE, key=b"key", headers=headers, partition=0, timestamp=_TIMESTAMP
            )

    _measured(records)


def send_many(loops: int) -> None:
    """A record of 100 bytes of a list, by `await producer.send_many()`, into a batch that is open.

    Ends the process: it must be the last operation.
    """

    async def records(producer: Producer) -> None:
        await _let_in(producer.send_many("topic", [_VALUE] * loops))

    _measured(records)


def send_table(loops: int) -> None:
    """A value of 100 bytes of a table, by `await producer.send_table()`, into a batch that is open.

    Ends the process: it must be the last operation.
    """
    _table(loops)


def send_table_keys(loops: int) -> None:
    """The same with a key of 10 bytes, by which it finds its partition of six.

    Ends the process: it must be the last operation.
    """
    _table(loops, key="key")


def _table(loops: int, key: str | None = None) -> None:
    import pyarrow as pa

    async def records(producer: Producer) -> None:
        # To make one must not cost more for more rows.
        keys = pa.array([b"key-%06d" % n for n in range(_MOST_ROWS)], pa.binary())
        values = pa.array([_VALUE] * _MOST_ROWS, pa.binary())
        table = pa.table({"value": values, "key": keys}).slice(0, loops)
        await _let_in(producer.send_table("topic", table, value="value", key=key))

    _measured(records, _PARTITIONS)


async def _let_in(sending: Coroutine[Any, Any, object]) -> None:
    """Give it the time to take all in. It must not end: what it then waits for never comes."""
    task = asyncio.create_task(sending)
    if (await asyncio.wait([task], timeout=1.0))[0]:
        raise RuntimeError(f"it has ended, and is to wait for acknowledgements: {task.result()}")


def send(loops: int) -> None:
    """`await producer.send()` of a record of 100 bytes, one after the other: each makes a request
    of its own, which is answered as a broker has answered the one before them.

    Ends the process: it must be the last operation.
    """

    async def records(producer: Producer) -> None:
        await _let_answer_alike(producer)
        for _ in range(loops):
            await producer.send("topic", _VALUE)

    _measured(records)


def acknowledged(loops: int) -> None:
    """`await producer.enqueue()` of a record of 100 bytes, and its part of a request and of its
    acknowledgement, where all go in one batch.

    Ends the process: it must be the last operation.
    """

    async def records(producer: Producer) -> None:
        await _let_answer_alike(producer)
        deliveries = [await producer.enqueue("topic", _VALUE) for _ in range(loops)]
        await producer.flush()
        if not (deliveries[0].done() and deliveries[-1].done()):
            raise RuntimeError("a record has no end after a flush")

    _measured(records)


async def _let_answer_alike(producer: Producer) -> None:
    """What is sent from now on is answered as a broker answers a first record."""
    (link,) = producer._cluster._links.values()
    transport: Any = link.connection._transport  # type: ignore[union-attr]  # it is there
    _answer_alike(transport, await _answer(transport, producer.send("topic", _VALUE)))


async def _answer(transport: asyncio.Transport, sending: Awaitable[object]) -> bytes:
    """What comes until that is done."""
    received: list[bytes] = []
    peer = transport.get_protocol()

    class Recorder(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.append(bytes(data))
            peer.data_received(data)  # type: ignore[attr-defined]

    transport.set_protocol(Recorder())
    await sending
    transport.set_protocol(peer)
    return b"".join(received)


def _answer_alike(transport: Any, answer: bytes) -> None:
    """Each request is answered so in the next turn, with its own correlation id, and goes no
    further: what a broker of ours executes is none of what is counted."""
    peer: Any = transport.get_protocol()
    soon = asyncio.get_running_loop().call_soon

    def write(request: bytes) -> None:
        # size, api key and version; size
        soon(peer.data_received, answer[:4] + request[8:12] + answer[8:])

    transport.write = write
    transport.writelines = lambda pieces: write(pieces[0])


def _measured(
    records: Callable[[Producer], Coroutine[Any, Any, None]], partitions: int = 1
) -> None:
    """Let records into a producer that sends nothing meanwhile, and end the process."""
    from asyncproducer.producer import Producer
    from asyncproducer.testing import EmbeddedCluster, MemoryNetwork, clock

    async def scenario() -> None:
        network = MemoryNetwork(latency=0.001)
        async with (
            EmbeddedCluster(topics={"topic": partitions}, network=network) as cluster,
            Producer(
                cluster.bootstrap_servers,
                connector=cluster.connector,
                linger_ms=60_000,
                batch_size=1_000_000,
            ) as producer,
        ):
            await producer.enqueue("topic", _VALUE)
            await records(producer)
            # To close it would send them all, and the broker here would read each of them.
            os._exit(0)

    clock.run(scenario())


OPERATIONS: dict[str, Callable[[int], None]] = {
    "append": append,
    "varint": varint,
    "crc32c": crc32c,
    "murmur2": murmur2_16,
    "encode": encode,
    "decode": decode,
    "enqueue": enqueue,
    "enqueue_whole": enqueue_whole,
    "acknowledged": acknowledged,
    "send": send,
    "send_many": send_many,
    "send_table": send_table,
    "send_table_keys": send_table_keys,
}


def main(text: str) -> None:
    """Run the operations."""
    gc.disable()  # when it runs depends on everything else
    for name, loops in json.loads(text).items():
        OPERATIONS[name](loops)
