"""What is sent while brokers break, and what must hold for it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncproducer import Producer, TopicPartition
from asyncproducer.errors import (
    BufferFull,
    ConnectionFailed,
    MetadataTimeout,
    TransactionAborted,
    TransactionTimeout,
)
from asyncproducer.testing.ledger import Ledger, Verdict

__all__ = ["LOADS", "Load", "Offsets", "Outcome", "Promise"]

#: How often a paced sender wakes, in seconds.
TICK = 0.02
#: How long a load may take to begin, in seconds.
_START_S = 60.0
#: How long a transaction that will be aborted waits for its offsets, in seconds.
_OFFSETS_S = 0.1


@dataclasses.dataclass(frozen=True)
class Promise:
    """The options of a load, and what they do not promise: it is counted, and no failure.

    `why`: the reason for what they allow.
    `may_fail`: whether records may fail at all. With time enough, none does.
    `transactional`: each some records are a transaction, together with the offset that a group
    would have come to by consuming what they were made of. Some are aborted on purpose.
    """

    options: Mapping[str, Any]
    allows: Sequence[str] = ()
    why: str = ""
    may_fail: bool = False
    transactional: bool = False


#: Half-open connections are noticed after two seconds, and metadata is asked for all the time.
_REQUEST = {
    "request_timeout_ms": 2000,
    "socket_connection_setup_timeout_ms": 2000,
    "metadata_max_age_ms": 1000,
}
_PATIENT = {**_REQUEST, "delivery_timeout_ms": 180_000}
_PLAIN = {**_PATIENT, "enable_idempotence": False}

LOADS = {
    "acks1": Promise(
        {**_PLAIN, "acks": 1},
        ("lost", "doubled", "reordered", "misplaced"),
        "acks=1, not idempotent. A leader that goes takes with it what only it had acknowledged, "
        "and what is sent again may be there already, or come behind what followed it.",
    ),
    "plain": Promise(
        {**_PLAIN, "acks": "all"},
        ("doubled", "reordered"),
        "acks=all, not idempotent. What is sent again may be there already, or come behind what "
        "followed it.",
    ),
    "idempotent": Promise({**_PATIENT, "compression_type": "lz4"}),
    # Records expire while they are under way: what the errors say of the log must be true.
    "hasty": Promise(
        {**_REQUEST, "request_timeout_ms": 700, "delivery_timeout_ms": 1500, "max_block_ms": 500},
        may_fail=True,
    ),
    # Who reads what is committed sees each transaction whole, or nothing of it: records and offset.
    "transactional": Promise(
        {**_PATIENT, "transaction_timeout_ms": 180_000, "max_block_ms": 10_000},
        transactional=True,
    ),
}

#: Records of a transaction; each fourth is aborted.
TRANSACTION = 40


@dataclasses.dataclass(frozen=True)
class Offsets:
    """What a group has of a load's transactions, beside what the log has of their records."""

    #: Transactions whose offset the group has had.
    offsets_committed: int = 0
    #: Where the group must be, by the last records that can be read, and where it is. 0: nowhere.
    offset_expected: int = 0
    offset_found: int = 0

    # What must not be.

    #: Transactions of which only the records count, or only the offset.
    torn: int = 0
    #: How often the group has gone back.
    went_back: int = 0

    @classmethod
    def judged(cls, expected: Sequence[int], logged: Sequence[int], found: int) -> Offsets:
        """`expected`: of the transactions whose records can be read. `logged`: the group's own log.

        In the log an offset may come twice: its request was made again.
        """
        return cls(
            offsets_committed=len(set(logged)),
            offset_expected=expected[-1] if expected else 0,
            offset_found=max(found, 0),
            torn=len(set(expected) ^ set(logged)),
            went_back=sum(after < before for before, after in itertools.pairwise(logged)),
        )

    @property
    def wrong(self) -> dict[str, int]:
        """What must not be, also where it is 0."""
        elsewhere = int(self.offset_found != self.offset_expected)
        return {"torn": self.torn, "went_back": self.went_back, "offset_elsewhere": elsewhere}


@dataclasses.dataclass
class Outcome:
    """What became of a load."""

    name: str
    promise: Promise
    verdict: Verdict
    retries: int
    epoch_bumps: int
    commits: int
    aborts: int
    memory_balanced: bool
    longest_delivery_s: float
    offsets: Offsets

    @property
    def wrong(self) -> dict[str, int]:
        """What must not be, and is."""
        verdict, allows = self.verdict, self.promise.allows
        found = {
            name: getattr(verdict, name)
            for name in (
                *("lost", "doubled", "reordered", "split_keys"),
                *("misplaced", "denied", "claimed", "altered", "unresolved", "foreign"),
            )
            if name not in allows
        }
        if not self.promise.may_fail:
            found["failed"] = verdict.failed
            found["refused"] = verdict.refused
        found["memory"] = not self.memory_balanced
        found.update(self.offsets.wrong)
        return {name: number for name, number in found.items() if number}


class Load:
    """One producer that sends numbered records at a rate, until it is told to end."""

    def __init__(self, name: str, servers: str, topic: str, rate: int) -> None:
        self.name = name
        self.topic = topic
        self.promise = promise = LOADS[name]
        self.ledger = Ledger(keys=500)
        options = dict(promise.options)
        #: aiokafka's arguments for who reads it back.
        self.reading: dict[str, str] = {}
        if promise.transactional:
            options["transactional_id"] = topic
            self.reading["isolation_level"] = "read_committed"
        self.producer: Producer[bytes, bytes] = Producer(
            servers, client_id=f"chaos-{name}", **options
        )
        self.commits = self.aborts = 0
        #: The group whose offsets are sent, and for which partition: any will do.
        self.group, self.place = topic, TopicPartition(topic, 0)
        #: The offset that each transaction has sent: the number of its last record, and one more.
        self.ends: list[int] = []
        #: What others read of the group: all that it has committed, and where it is.
        self.logged_offsets: list[int] = []
        self.offset_found = 0
        self._rate = rate
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Its own limits are for the faults, not for the beginning.
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    await self.producer.start()
                    await self.producer.warm_up(self.topic)
                    break
                except (ConnectionFailed, MetadataTimeout):
                    continue
        send = self._send_transactions if self.promise.transactional else self._send
        self._task = asyncio.create_task(send(), name=f"load {self.name}")

    @property
    def retries(self) -> int:
        return int(self.producer.metrics()["record_retry_total"])

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._ending:
            now = loop.time()
            due = int((now - began) * self._rate) + 1
            for _ in range(min(due - len(self.ledger), 1000)):
                key, value = self.ledger.next_record()
                now = loop.time()
                try:
                    delivery = await self.producer.enqueue(self.topic, value, key=key)
                except BufferFull as error:
                    self.ledger.refuse(error)
                    break
                self.ledger.track(delivery, now)
            await asyncio.sleep(TICK)

    async def _send_transactions(self) -> None:
        """One after the other, at the rate at which they can be committed, or the given one."""
        producer, ledger = self.producer, self.ledger
        loop = asyncio.get_running_loop()
        began = loop.time()
        for turn in itertools.count(1):
            await asyncio.sleep(max(TICK, began + len(ledger) / self._rate - loop.time()))
            if self._ending:
                return
            first = len(ledger)
            try:
                await producer.begin_transaction()
                for _ in range(TRANSACTION):
                    key, value = ledger.next_record()
                    ledger.track(
                        await producer.enqueue(self.topic, value, key=key), now=loop.time()
                    )
                self.ends.append(len(ledger))
                offsets = partial(producer.send_offsets, {self.place: len(ledger)}, self.group)
                if turn % 4:
                    await until_known(offsets)
                    await until_known(producer.commit_transaction)
                    self.commits += 1
                    continue
                # An abort drops what was not sent: with this it has something to take back. It
                # need not wait for the group's coordinator, wherever the offset is by then.
                await producer.flush()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_OFFSETS_S):
                        await offsets()
            except TransactionAborted:
                pass
            await until_known(producer.abort_transaction)
            self.aborts += 1
            ledger.abort(first)

    async def end(self) -> None:
        """Sends no more, waits for the end of each record, and closes the producer."""
        self._ending = True
        if self._task is not None:
            await self._task
            await self.producer.flush()
        await self.producer.close()

    def outcome(self) -> Outcome:
        """After `end`, and after the logs of the records and of the group were read."""
        metrics = self.producer.metrics()
        # Who reads decides, not what the commit told us.
        expected = [end for end in self.ends if self.ledger.was_read(end - 1)]
        sequences = self.producer._sequences
        return Outcome(
            name=self.name,
            promise=self.promise,
            verdict=self.ledger.verdict(),
            retries=self.retries,
            epoch_bumps=0 if sequences is None else sequences.epoch_bumps,
            commits=self.commits,
            aborts=self.aborts,
            memory_balanced=metrics["buffer_available_bytes"] == metrics["buffer_total_bytes"],
            longest_delivery_s=max(self.ledger.latencies, default=0.0),
            offsets=Offsets.judged(expected, self.logged_offsets, self.offset_found),
        )


async def until_known(end: Callable[[], Awaitable[None]]) -> None:
    """The same call again waits for the end of the one that had no answer in time."""
    while True:
        try:
            return await end()
        except TransactionTimeout:
            pass
