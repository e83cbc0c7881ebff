"""The producer as a whole against an embedded cluster, with somebody in the middle.

Whoever is in the middle changes bytes of answers, or of requests, never of both in one
history. TCP's peers do not do that; broken proxies and hostile brokers do. What must
hold all the same:

- each delivery ends within its timeout, and `close` ends;
- a record that is acknowledged is in the log;
- where requests are changed, one whose error says `persisted="no"` is not, what an idempotent
  producer sends is there once and in order, and a transaction is whole: all of it is read as
  committed, or nothing, and which of them is what its calls have said. Nothing tells an answer
  that was forged from a broker's own. So some requests are left as they are: nobody puts a batch in
  another's place, since checksums cover what is in a batch, and not whose it is, and nobody turns
  a commit into an abort: all is answered as if it was well. Once a batch has been written to
  a partition that it was not for, only `persisted="no"` is checked, for the next batch of
  that partition has the same sequence, and is told to be there already;
- all memory is given back, no task and no connection stays;
- nothing fails in a way that only the log, or the event loop, hears of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

from asyncproducer import Delivery, KafkaError, Producer, TopicPartition
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import ProtocolError
from asyncproducer.net.transport import Address
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.messages import (
    MalformedRequest,
    decode_body,
    decode_header,
    request_class,
    response_class,
)
from asyncproducer.testing.network import MemoryServer

from .mutator import Span, mutate, spans

__all__ = ["Complaints", "exchanges_batches", "misplaces_batches", "one_history", "turns_end"]

#: Where a batch has its checksum: what is before, none covers.
_CRC_AT = 17

_VERSIONS = {ApiKey.PRODUCE: (3, 13), ApiKey.END_TXN: (0, 5)}


class Complaints(logging.Handler):
    """Everything that is logged as an error, or that only the event loop hears of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._logger = logging.getLogger("asyncproducer")
        self._heard: list[str] = []
        self._cause: BaseException | None = None

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._before = self._logger.propagate, self._logger.level
        self._logger.propagate = False
        self._logger.setLevel(logging.ERROR)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate, level = self._before
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage(), record.exc_info[1] if record.exc_info else None)

    def watch_loop(self) -> None:
        """Hears of the running loop's unhandled exceptions, too."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self._hear(context["message"], context.get("exception"))
        )

    def _hear(self, message: str, cause: BaseException | None) -> None:
        self._heard.append(f"{message}: {cause!r}" if cause else message)
        self._cause = self._cause or cause

    def check(self) -> None:
        """Raises AssertionError with what was heard, if anything was."""
        if self._heard:
            raise AssertionError("\n".join(self._heard)) from self._cause


# -- in the middle ---------------------------------------------------------------------------------


class Middle(MemoryNetwork):
    """A network whose wires go through somebody's hands: the frames of one `side` are changed.

    Each one with the probability `rate`, as long as `is_busy`.
    """

    def __init__(self, rng: random.Random, side: str, rate: float) -> None:
        super().__init__(latency=0.001)
        self.rng = rng
        self.side = side
        self.rate = rate
        self.is_busy = True
        self.changed = 0
        #: A batch has been where it was not for: that partition is the middle's work now.
        self.misplaced = False
        #: Of each link: API key and version of what was asked and not answered yet.
        self.asked: weakref.WeakKeyDictionary[Any, deque[tuple[int, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> MemoryServer:
        return super().listen(host, port, lambda: _Relay(self, "requests", protocol_factory()))

    async def connect(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        address: Address,
        **tls: Any,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await super().connect(
            lambda: _Relay(self, "answers", protocol_factory()), address, **tls
        )

    def pass_on(self, side: str, link: Any, frame: bytes) -> bytes:
        """A frame, with its size, as it goes on."""
        asked = self.asked.setdefault(link, deque())
        if side == "requests":
            key = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
            asked.append(key)
        else:
            key = asked.popleft() if asked else (-1, -1)
        if side == self.side and self.is_busy and self.rng.random() < self.rate:
            self.changed += 1
            return self._change(side, frame, *key)
        return len(frame).to_bytes(4, "big") + frame

    def _change(self, side: str, frame: bytes, key: int, version: int) -> bytes:
        while True:
            changed = self._changed(side, frame, key, version)
            if side == "answers":
                return changed
            if not exchanges_batches(frame, changed[4:]) and not turns_end(frame, changed[4:]):
                self.misplaced |= misplaces_batches(frame, changed[4:])
                return changed

    def _changed(self, side: str, frame: bytes, key: int, version: int) -> bytes:
        size = len(frame).to_bytes(4, "big")
        if self.rng.random() < 0.1:
            # The stream itself: where its sizes are, and nothing behind is a frame any more.
            return mutate(self.rng, size + frame, (), frame)
        changed = mutate(self.rng, frame, self._spans(side, frame, key, version), frame[::-1])
        return len(changed).to_bytes(4, "big") + changed

    def _spans(self, side: str, frame: bytes, key: int, version: int) -> list[Span]:
        try:
            kind = (request_class if side == "requests" else response_class)(key, version)
            found = spans(kind, frame)
        except (ProtocolError, KeyError, ValueError):
            return []
        # Correlation ids and keys less often than what is behind them.
        return [span for span in found if span.start >= 8 or self.rng.random() < 0.1]


def exchanges_batches(frame: bytes, changed: bytes) -> bool:
    """Whether a Produce request has, where one of its batches was, another of them now."""
    return not _moved(frame, changed).isdisjoint(_batches(frame))


def misplaces_batches(frame: bytes, changed: bytes) -> bool:
    """Whether a Produce request has one of its batches where that one was not."""
    return bool(_moved(frame, changed))


def _moved(frame: bytes, changed: bytes) -> set[tuple[Any, ...]]:
    """Where a batch of `frame` is now, and was not."""
    was = _batches(frame)
    return {
        place
        for place, summed in _batches(changed).items()
        if summed != was.get(place) and summed in was.values()
    }


def turns_end(frame: bytes, changed: bytes) -> bool:
    """Whether a commit has become an abort, or an abort a commit."""
    was, now = (_body(each, ApiKey.END_TXN) for each in (frame, changed))
    return was is not None and now is not None and was.committed != now.committed


def _batches(frame: bytes) -> dict[tuple[Any, ...], bytes]:
    """What checksums cover, by topic and partition. None where there is no Produce request."""
    body = _body(frame, ApiKey.PRODUCE)
    return {
        # By name, which may be empty, or by id (version 13).
        (
            getattr(topic, "name", None),
            getattr(topic, "topic_id", None),
            partition.index,
        ): (partition.records or b"")[_CRC_AT:]
        for topic in (body.topic_data if body is not None else ())
        for partition in topic.partition_data
    }


def _body(frame: bytes, api_key: ApiKey) -> Any:
    """That of a request of this kind; None for others."""
    try:
        header = decode_header(frame)
        low, high = _VERSIONS[api_key]
        if header.api_key != api_key or not low <= header.api_version <= high:
            return None
        return decode_body(api_key, header.api_version, frame)[1]
    except MalformedRequest:
        return None


class _Relay(asyncio.Protocol):
    """Between a transport and its protocol: whole frames go through the middle."""

    def __init__(self, middle: Middle, side: str, inner: asyncio.BaseProtocol) -> None:
        assert isinstance(inner, asyncio.Protocol)
        self._middle = middle
        self._side = side
        self._inner = inner
        self._link: Any = None
        self._buffer = b""
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = transport.get_extra_info("memory_link")
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        out = b""
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end:
                break
            out += self._middle.pass_on(self._side, self._link, self._buffer[4:end])
            self._buffer = self._buffer[end:]
        if out:
            self._inner.data_received(out)


# -- one history -----------------------------------------------------------------------------------

_DELIVERY_TIMEOUT = 5.0
_MAX_BLOCK = 2.0
_NOW_MS = 1_700_000_000_000


async def one_history(rng: random.Random, side: str) -> None:
    """A producer's life, from start to close. AssertionError where something does not hold."""
    random.seed(rng.getrandbits(32))  # jitter, sticky partitions
    network = Middle(rng, side, rng.choice((0.02, 0.1, 0.5)))
    produce = rng.choice((3, 7, 9, 12, 13))
    metadata = rng.choice((4, 8, 9, 12, 13))
    cluster = EmbeddedCluster(
        brokers=2,
        topics={"t": 2, "u": 1},
        network=network,
        auto_create_topics=False,
        request_versions={0: (3, produce), 3: (4, metadata)},
        start_time_ms=_NOW_MS,
        seed=rng.getrandbits(32),
    )
    transactional = rng.random() < 0.3
    idempotent = transactional or rng.random() < 0.7
    async with cluster:
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=network,
            client_id="fuzz",
            enable_idempotence=idempotent,
            transactional_id="fuzz" if transactional else None,
            linger_ms=rng.choice((0, 5)),
            batch_size=rng.choice((100, 16384)),
            max_in_flight_requests_per_connection=rng.choice((1, 5)),
            buffer_memory=rng.choice((20_000, 2**25)),
            delivery_timeout_ms=int(_DELIVERY_TIMEOUT * 1000),
            request_timeout_ms=1000,
            max_block_ms=int(_MAX_BLOCK * 1000),
            metadata_max_age_ms=rng.choice((100, 300_000)),
        )
        network.is_busy = rng.random() < 0.3  # else the producer may start in peace
        sent: Sent = []
        transactions: list[Transaction] = []
        try:
            # It may fail: with an error of ours, and in time.
            async with asyncio.timeout(3 * _MAX_BLOCK + 30):
                await producer.start()
        except KafkaError:
            pass
        else:
            network.is_busy = True
            if transactional:
                transactions = await _transact(rng, producer)
                sent = [each for transaction in transactions for each in transaction.sent]
            else:
                sent = await _send(rng, producer)
            await _all_ended(sent)
        network.is_busy = rng.random() < 0.5
        async with asyncio.timeout(60):
            await producer.close(rng.choice((0, 1, 30)))
        if not transactional or side == "requests":
            # A broker refuses more in transactions, and a forged answer may say that it did not.
            _check_log(
                cluster,
                sent,
                trusts_successes=not network.misplaced,
                trusts_refusals=side == "requests",
            )
        if side == "requests" and idempotent and not network.misplaced:
            _check_order(cluster)
            _check_transactions(cluster, transactions)
        if producer._loop is not None:
            pool = producer._pool
            assert (pool.available, pool.held, pool.waiting) == (pool.total, 0, 0)
            assert not producer._accumulator.incomplete
    for _ in range(5):
        await asyncio.sleep(network.latency)
    assert not network.links, network.links
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


#: Values, and what became of them.
Sent: TypeAlias = list[tuple[bytes, Delivery]]


@dataclass
class Transaction:
    """What its user knows of it. `is_committed` is None where he heard of neither end."""

    sent: Sent = field(default_factory=list)
    is_committed: bool | None = None


async def _send(rng: random.Random, producer: Producer[Any, Any], first: int = 0) -> Sent:
    sent = []
    for number in range(first, first + rng.choice((5, 40))):
        value = b"%d:" % number + bytes(rng.choice((1, 90)))
        try:
            async with asyncio.timeout(_MAX_BLOCK + 1):
                topic = rng.choice("ttu")
                sent.append((value, await producer.enqueue(topic, value, timestamp=_NOW_MS)))
        except KafkaError:
            pass
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0.001, 0.05, 0.5)))
    return sent


async def _transact(rng: random.Random, producer: Producer[Any, Any]) -> list[Transaction]:
    """A few transactions. Every call of theirs may fail, in time."""
    transactions = []
    for number in range(3):
        transaction = Transaction()
        transactions.append(transaction)
        try:
            async with asyncio.timeout(3 * _MAX_BLOCK + 30):
                await producer.begin_transaction()
                transaction.sent = await _send(rng, producer, 100 * number)
                if rng.random() < 0.5:
                    await producer.send_offsets({TopicPartition("u", 0): 1}, "group")
                await producer.commit_transaction()
                transaction.is_committed = True
        except KafkaError:
            with contextlib.suppress(KafkaError):
                async with asyncio.timeout(3 * _MAX_BLOCK + 30):
                    await producer.abort_transaction()
                    transaction.is_committed = False
    return transactions


async def _all_ended(sent: Sent) -> None:
    async with asyncio.timeout(_DELIVERY_TIMEOUT + 1):
        await asyncio.gather(*(delivery for _, delivery in sent), return_exceptions=True)


def _check_log(
    cluster: EmbeddedCluster, sent: Sent, *, trusts_successes: bool, trusts_refusals: bool
) -> None:
    log = {record.value for topic in "tu" for record in cluster.records(topic)}
    for value, delivery in sent:
        error = delivery.exception()
        if error is None:
            assert value in log or not trusts_successes, (
                f"{value[:10]!r} is acknowledged and not in the log"
            )
        elif trusts_refusals and error.persisted == "no":
            assert value not in log, f"{value[:10]!r} is in the log, and {error!r} says no"


def _check_order(cluster: EmbeddedCluster) -> None:
    for place in (TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)):
        numbers = [_number(record.value) for record in cluster.records(*place)]
        assert numbers == sorted(set(numbers)), f"{place} has {numbers}"


def _number(value: bytes | None) -> int:
    return int((value or b"").partition(b":")[0])


def _check_transactions(cluster: EmbeddedCluster, transactions: list[Transaction]) -> None:
    read = {record.value for topic in "tu" for record in cluster.records(topic, committed=True)}
    for transaction in transactions:
        values = [value for value, _ in transaction.sent]
        seen = [value in read for value in values]
        numbers = list(map(_number, values))
        assert all(seen) or not any(seen), f"of {numbers} these are read: {seen}"
        if transaction.is_committed is not None and values:
            assert seen[0] is transaction.is_committed, (
                f"{'committed' if transaction.is_committed else 'aborted'}, and read: {seen}"
            )
        if any(seen):
            failed = [_number(value) for value, sent in transaction.sent if sent.exception()]
            assert not failed, f"committed over {failed}"
