"""The limit: Produce requests that are made before, pipelined through a bare socket.

No producer can be faster on the same batches: here is neither an event loop nor a record.
Everything is what this producer would have sent, written by the same code (core/batch.py,
core/produce.py): a producer id, sequences, a header and a CRC for each batch. The partitions
must have one leader, since there is one connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from time import perf_counter
from typing import TypeVar

from asyncproducer.bench.loads import Meter, peak_rss_mib, percentile, warming
from asyncproducer.bench.peers import Job, Result
from asyncproducer.bench.workloads import payloads
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.produce import (
    ProducePartition,
    ProduceTopic,
    decode_produce,
    encode_produce,
)
from asyncproducer.core.wire import (
    ApiKey,
    InitProducerIdRequest,
    MetadataRequest,
    Request,
    encode_frame,
    split_frame,
)

__all__ = ["DEPTH", "Wire", "measure", "requests"]

R = TypeVar("R")

#: Requests that have no answer yet: as many as max.in.flight allows an idempotent producer.
DEPTH = 5

#: Brokers from 2.4 on have these. 12 is the last version of Produce that names topics.
_PRODUCE_VERSION = 9
_METADATA_VERSION = 9
_PRODUCER_ID_VERSION = 2

_CLIENT_ID = "wire-replay"
_TIMEOUT_MS = 30_000

#: What a batch of ours has where none was measured before.
_BATCH_BYTES = 16_384
_LONE_SENDS = 2_000


class Wire:
    """A blocking connection to one broker."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=60.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._input = self._socket.makefile("rb")

    def close(self) -> None:
        """Ends the connection."""
        self._input.close()
        self._socket.close()

    def ask(self, request: Request[R], version: int) -> R:
        """The answer to a request of any kind."""
        self.send(encode_frame(request, version, 0, _CLIENT_ID))
        _, body = split_frame(request.api_key, version, self.receive())
        return request.decode(version, body)

    def send(self, frame: bytes) -> None:
        """Writes a whole frame."""
        self._socket.sendall(frame)

    def receive(self) -> bytes:
        """The next answer, without its size."""
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, size: int) -> bytes:
        data = self._input.read(size)
        if len(data) < size:
            raise ConnectionError("the broker closed the connection")
        return data

    def produced(self) -> None:
        """Reads the answer to a Produce request. Raises RuntimeError if a batch was refused."""
        _, body = split_frame(ApiKey.PRODUCE, _PRODUCE_VERSION, self.receive())
        for partition in decode_produce(_PRODUCE_VERSION, body).partitions:
            if partition.error_code:
                raise RuntimeError(
                    f"{partition.topic}-{partition.partition}: error {partition.error_code}"
                )


def requests(
    topic: str,
    values: Iterator[bytes],
    records: int,
    *,
    partitions: int,
    batch_bytes: int,
    batches_per_request: int,
    producer_id: int = -1,
    sequences: list[int] | None = None,
) -> Iterator[tuple[bytes, int]]:
    """Whole frames, and how many records are in each.

    Batches of `batch_bytes` go to the partitions in turn, at most one to a
    partition in a request. With a `producer_id`, `sequences` has the next one by partition,
    and is kept up to date.
    """
    sequences = [0] * partitions if sequences is None else sequences
    places = cycle(range(partitions))
    per_request = min(batches_per_request, partitions)
    number = 0
    while records > 0:
        batches: list[ProducerBatch] = []
        for partition in islice(places, per_request):
            if records == 0:
                break
            batch = _batch(topic, partition, values, records, batch_bytes)
            records -= batch.count
            if producer_id >= 0:
                batch.set_producer_state(producer_id, 0, sequences[partition], transactional=False)
                sequences[partition] += batch.count
            batch.seal()
            batches.append(batch)
        buffers = encode_produce(
            _PRODUCE_VERSION,
            number,
            _CLIENT_ID,
            acks=-1,
            timeout_ms=_TIMEOUT_MS,
            transactional_id=None,
            topics=[
                ProduceTopic(
                    topic, None, [ProducePartition(b.partition, b.buffers()) for b in batches]
                )
            ],
        )
        yield b"".join(buffers), sum(batch.count for batch in batches)
        number += 1


def _batch(
    topic: str, partition: int, values: Iterator[bytes], most: int, size: int
) -> ProducerBatch:
    now = time.time_ns() // 1_000_000
    batch = ProducerBatch(topic, partition, write_limit=size, created_at=0.0)
    for value in values:
        if batch.try_append(now, None, value, NO_HEADERS) is None or batch.count == most:
            break
    batch.close()
    return batch


def _leader(servers: str, topic: str) -> tuple[str, int]:
    """Where the partitions of the topic are led. Raises RuntimeError if by several brokers."""
    host, _, port = servers.split(",")[0].rpartition(":")
    wire = Wire((host, int(port)))
    try:
        answer = wire.ask(MetadataRequest([topic]), _METADATA_VERSION)
    finally:
        wire.close()
    leaders = {p.leader for t in answer.topics for p in t.partitions}
    if len(leaders) != 1:
        raise RuntimeError(f"{topic}: led by {sorted(leaders)}; a replay needs a single leader")
    (leader,) = (node for node in answer.nodes if node.node_id in leaders)
    return leader.host, leader.port


def measure(job: Job) -> Result:
    """See worker.py."""
    wire = Wire(_leader(job.servers, job.topics[0]))
    try:
        result = _lone(wire, job) if job.case.load == "loop" else _flood(wire, job)
    finally:
        wire.close()
    return {**result, "version": "bare socket", "max_rss_mib": peak_rss_mib()}


def _prepared(wire: Wire, job: Job, counts: Sequence[int]) -> list[list[tuple[bytes, int]]]:
    """Frames for so many records each, which follow one another."""
    case = job.case
    producer_id = -1
    if case.idempotent:
        answer = wire.ask(InitProducerIdRequest(None, _TIMEOUT_MS), _PRODUCER_ID_VERSION)
        if answer.error_code:
            raise RuntimeError(f"no producer id: error {answer.error_code}")
        producer_id = answer.producer_id
    sequences = [0] * case.partitions
    values = cycle(payloads(case))
    return [
        list(
            requests(
                job.topics[0],
                values,
                count,
                partitions=case.partitions,
                batch_bytes=round(job.batch_bytes) or case.batch_bytes or _BATCH_BYTES,
                batches_per_request=max(1, round(job.batches_per_request)),
                producer_id=producer_id,
                sequences=sequences,
            )
        )
        for count in counts
    ]


def _pipelined(wire: Wire, frames: list[tuple[bytes, int]]) -> None:
    waiting = 0
    for frame, _ in frames:
        if waiting == DEPTH:
            wire.produced()
            waiting -= 1
        wire.send(frame)
        waiting += 1
    for _ in range(waiting):
        wire.produced()


def _flood(wire: Wire, job: Job) -> Result:
    records, warm = job.case.records, warming(job.case)
    before, frames = _prepared(wire, job, (warm, records))
    _pipelined(wire, before)
    meter = Meter()
    _pipelined(wire, frames)
    result = meter.result(records)
    return {
        **result,
        "sent": warm + records,
        "requests": len(frames),
        "batch_bytes": job.batch_bytes or _BATCH_BYTES,
    }


def _lone(wire: Wire, job: Job) -> Result:
    """The bare round trip: one request with one record at a time."""
    case = job.case
    count = min(case.records, _LONE_SENDS)
    warm = max(1, count // 10)
    # A batch of one byte takes one record.
    single = Job(job.peer, job.servers, job.topics, case, 1.0, 1.0)
    before, frames = _prepared(wire, single, (warm, count))
    _pipelined(wire, before)
    taken: list[float] = []
    meter = Meter()
    for frame, _ in frames:
        if case.pause_ms:
            time.sleep(case.pause_ms / 1e3)
        began = perf_counter()
        wire.send(frame)
        wire.produced()
        taken.append(perf_counter() - began)
    result = meter.result(count)
    taken.sort()
    return {
        **result,
        "sent": warm + count,
        "p50_ms": percentile(taken, 0.5) * 1e3,
        "p99_ms": percentile(taken, 0.99) * 1e3,
        "p999_ms": percentile(taken, 0.999) * 1e3,
    }
