"""Storms: an accumulator between random senders and brokers that check what they get.

The brokers keep the sequences as real ones do: the last five batches of a producer are
recognised, an older epoch is fenced, anything that does not follow is out of order. What
a request does at a broker and when its answer arrives are two steps, so that leaders
move, connections break and deliveries expire in between. After every step all of the
accumulator's books are checked, at the end the logs.
"""

from __future__ import annotations

import contextvars
import os
import random
import struct
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from crc32c import crc32c

from asyncproducer.core.accumulator import Accumulator, Fence, PartitionQueue, TopicState
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch, batch_upper_bound, read_records
from asyncproducer.core.compression import codec, codec_by_id
from asyncproducer.core.delivery import FAILED, PENDING, Delivery, Failure, Waiter
from asyncproducer.core.metadata import PartitionMetadata, TopicMetadata
from asyncproducer.core.outcome import Action, decide, rule_for
from asyncproducer.core.sequences import IdState, Sequences, is_before
from asyncproducer.errors import BrokerRejected, ErrorCode
from tests.core.memory import Undivided

TOPIC = "storm"
MAX_SEQUENCE = 2**31 - 1


class Setup(NamedTuple):
    """What kind of producer goes through the storm."""

    idempotent: bool = True
    compression: str = "none"
    max_in_flight: int = 5
    retries: int = 2**31 - 1
    delivery_timeout: float = 1000.0
    total_memory: int = 8000
    batch_size: int = 400
    batch_max_bytes: int = 0
    partitions: int = 3
    nodes: int = 3
    first_epoch: int = 0
    first_sequence: int = 0
    adaptive_linger: bool = False
    #: How often connections break and leaders move.
    unrest: int = 2
    #: How often a broker answers, and how often it does so with an error.
    answers: int = 20
    errors: float = 1.0
    steps: int = 400


# -- memory --------------------------------------------------------------------------------


class Ticket:
    """A sender that waits for memory."""

    def __init__(self, size: int, append: Callable[[int], bool]) -> None:
        self.size = size
        self.append = append


class Pool(Undivided):
    """Memory in order of asking. Like net's BufferPool, but without deadlines."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.available = total
        self.line: deque[Ticket] = deque()
        self._serving = False

    @property
    def waiting(self) -> int:
        return len(self.line)

    def try_reserve(self, size: int, share: None = None, *, spares: bool = False) -> bool:
        if self.line or size > self.available:
            return False
        self.available -= size
        return True

    def release(self, size: int) -> None:
        assert 0 <= size <= self.total - self.available, "more is given back than was taken"
        self.available += size
        self.serve()

    def enter(self, ticket: Ticket) -> None:
        self.line.append(ticket)
        self.serve()

    def leave(self, ticket: Ticket) -> None:
        self.line.remove(ticket)
        self.serve()

    def serve(self) -> None:
        if self._serving:
            return
        self._serving = True
        while self.line:
            head = self.line[0]
            if head.append(0):
                assert self.line.popleft() is head
            elif head.size <= self.available:
                self.line.popleft()
                self.available -= head.size
                assert head.append(head.size), "granted memory, and the record was not taken"
            else:
                break
        self._serving = False


def test_the_pool_serves_in_order_and_lets_nobody_past() -> None:
    pool = Pool(100)
    served: list[str] = []

    def sender(name: str) -> Callable[[int], bool]:
        def append(granted: int) -> bool:
            if granted:
                served.append(name)
            return granted > 0

        return append

    assert pool.try_reserve(80)
    pool.enter(Ticket(50, sender("large")))
    pool.enter(Ticket(10, sender("small")))
    assert not pool.try_reserve(5)
    assert (served, pool.waiting) == ([], 2)
    pool.release(80)
    assert (served, pool.waiting, pool.available) == (["large", "small"], 0, 40)


# -- brokers -------------------------------------------------------------------------------

_HEADER = struct.Struct(">qiibIhiqqqhii")


class WireBatch(NamedTuple):
    """A batch as it was written to the wire. `records` are the numbers of the senders."""

    partition: int
    size: int
    producer_id: int
    epoch: int
    sequence: int
    records: list[int]


def parse(partition: int, data: bytes) -> WireBatch:
    """Read a batch as a broker does, and check all that it says about itself."""
    (offset, length, leader_epoch, magic, crc, attributes, last_delta, _, _, pid, epoch, seq, n) = (
        _HEADER.unpack_from(data)
    )
    assert (offset, leader_epoch, magic) == (0, -1, 2)
    assert length == len(data) - 12
    assert crc == crc32c(data[21:])
    assert last_delta == n - 1
    assert n > 0
    records = data[61:]
    if attributes & 7:
        records = codec_by_id(attributes & 7).decompress(records)
    values = [record.value for record in read_records(records, n)]
    ids = [int(value.partition(b":")[0]) for value in values if value is not None]
    return WireBatch(partition, len(data), pid, epoch, seq, ids)


class Stored(NamedTuple):
    """One of the last batches of a producer."""

    first: int
    last: int
    base_offset: int


class Log:
    """A partition's records, and what the leader remembers of the producers."""

    def __init__(self) -> None:
        self.records: list[int] = []
        self.leader = 0
        self.epoch = 0
        self.producers: dict[int, tuple[int, deque[Stored]]] = {}

    def append(self, batch: WireBatch) -> tuple[int, int]:
        """(error code, base offset)"""
        last = (batch.sequence + len(batch.records) - 1) % (MAX_SEQUENCE + 1)
        if batch.producer_id >= 0:
            known = self.producers.get(batch.producer_id)
            if known is not None:
                epoch, recent = known
                if batch.epoch < epoch:
                    return ErrorCode.INVALID_PRODUCER_EPOCH, -1
                if batch.epoch > epoch:
                    if batch.sequence != 0:
                        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
                else:
                    for stored in recent:
                        if (stored.first, stored.last) == (batch.sequence, last):
                            return ErrorCode.NONE, stored.base_offset
                    if batch.sequence != (recent[-1].last + 1) % (MAX_SEQUENCE + 1):
                        return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            if known is None or known[0] != batch.epoch:
                known = self.producers[batch.producer_id] = (batch.epoch, deque(maxlen=5))
            known[1].append(Stored(batch.sequence, last, len(self.records)))
        self.records += batch.records
        return ErrorCode.NONE, len(self.records) - len(batch.records)


def test_the_log_checks_sequences_as_a_broker_does() -> None:
    log = Log()

    def batch(epoch: int, sequence: int, count: int = 1) -> WireBatch:
        return WireBatch(0, 100, 7, epoch, sequence, list(range(sequence, sequence + count)))

    assert log.append(batch(0, 40, 2)) == (0, 0)  # nothing known: any sequence will do
    assert log.append(batch(0, 43))[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    for sequence in range(42, 47):
        assert log.append(batch(0, sequence)) == (0, sequence - 40)
    assert log.append(batch(0, 42)) == (0, 2)  # recognised, stored once
    assert log.append(batch(0, 40, 2))[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER  # forgotten
    assert log.append(batch(1, 3))[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert log.append(batch(1, 0)) == (0, 7)
    assert log.append(batch(0, 47))[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    assert log.records == [40, 41, 42, 43, 44, 45, 46, 0]


# -- the storm -----------------------------------------------------------------------------


class Request:
    """A Produce request on its way: processed by the broker, or not yet."""

    def __init__(self, node: int, batches: list[ProducerBatch]) -> None:
        self.node = node
        self.batches = batches
        self.wire = [parse(b.partition, b"".join(b.buffers())) for b in batches]
        self.answers: list[tuple[int, int]] | None = None


class Loop:
    """Of an event loop what the accumulator's batches know of it."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        self.due.append((function, arguments))

    def turn(self) -> None:
        due, self.due = self.due, []
        for function, arguments in due:
            function(*arguments)


class Sleeper:
    """Who waits for a delivery; a task in small. Woken for nothing, it sleeps on."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.context = contextvars.copy_context()
        self.ends = 0
        self.run()

    def run(self, woken_by: Waiter | None = None) -> None:
        if next(self.waiter, None) is None:
            self.ends += 1
        else:
            self.waiter.add_done_callback(self.run, context=self.context)


def test_a_sleeper_ends_in_the_turn_after_its_delivery() -> None:
    loop = Loop()
    batch = ProducerBatch(TOPIC, 0, write_limit=1000, created_at=0.0, loop=loop)
    delivery = batch.try_append(0, None, b"", NO_HEADERS)
    assert delivery is not None
    waiter = delivery.waiter()
    assert waiter is not None
    sleeper = Sleeper(waiter)
    waiter.cancel()
    loop.turn()
    assert sleeper.ends == 0
    batch.acknowledge(0, -1)
    assert sleeper.ends == 0
    loop.turn()
    assert sleeper.ends == 1
    loop.turn()
    assert sleeper.ends == 1


class Sent:
    """A record and what became of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.delivery: Delivery | None = None
        self.sleeper: Sleeper | None = None
        self.ends = 0


class Flush:
    """A flush and the batches that it waits for."""

    def __init__(self, deliveries: list[Delivery]) -> None:
        self.deliveries = deliveries
        self.passed = 0


RETRIABLE_NOT_STORED = (
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
)
RETRIABLE_STORED = (
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
)
FOR_GOOD = (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_RECORD)


class Storm:
    """The accumulator, a scheduler in small around it, the brokers, and the checks."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(seed)
        self.now = 100.0
        self.loop = Loop()
        self.pool = Pool(setup.total_memory)
        self.sequences = Sequences() if setup.idempotent else None
        self.next_producer_id = 1000
        self.accumulator = Accumulator(
            self.pool,
            batch_size=setup.batch_size,
            batch_max_bytes=setup.batch_max_bytes,
            linger=0.005,
            delivery_timeout=setup.delivery_timeout,
            retry_backoff=ExponentialBackoff(0.1, 1.0, random=self.random.random),
            random=lambda: self.random.getrandbits(31),
            codec=None if setup.compression == "none" else codec(setup.compression),
            sequences=self.sequences,
            max_in_flight=setup.max_in_flight,
            quick_bytes=300,
            adaptive_linger=setup.adaptive_linger,
            loop=self.loop,
            spare_bytes=setup.total_memory // 4,
        )
        self.logs = [Log() for _ in range(setup.partitions)]
        for index, log in enumerate(self.logs):
            log.leader = index % setup.nodes
        self.connected = dict.fromkeys(range(setup.nodes), True)
        self.requests: dict[int, deque[Request]] = {n: deque() for n in range(setup.nodes)}
        self.largest_batch = self.random.choice([150, 10**9]) if setup.errors else 10**9
        self.calm = False
        self.jobs: list[ProducerBatch] = []
        self.sent: list[Sent] = []
        self.append_order: list[int] = []
        self.flushes: list[Flush] = []
        self.flushing = 0
        self.last_bytes: dict[ProducerBatch, tuple[tuple[int, int, int], bytes]] = {}
        self.stepping = False
        self.turns_waited_for = 0
        self.refresh()

    # -- what happens --

    @property
    def topic(self) -> TopicState:
        state = self.accumulator.topics.get(TOPIC)
        if state is None:
            self.refresh()
            state = self.accumulator.topics[TOPIC]
        return state

    def refresh(self) -> None:
        view = TopicMetadata(
            TOPIC,
            tuple(PartitionMetadata(i, log.leader, log.epoch) for i, log in enumerate(self.logs)),
        )
        self.accumulator.update_topic(view, self.now)

    def vanish(self) -> None:
        self.accumulator.remove_topic(TOPIC, self.now)

    def send(self) -> None:
        number = len(self.sent)
        partition = self.random.choice([-1, *range(self.setup.partitions)])
        size = self.random.choice([0, 10, 50, 50, 50, 150, 150, 390, 700])
        if self.random.random() < 0.5:
            value = b"%d:%s" % (number, bytes(size))
        else:
            value = b"%d:%s" % (number, self.random.randbytes(size))
        key = self.random.choice([None, b"", b"key"])
        timestamp = 1_700_000_000_000 + self.random.randint(-100, 100)
        record = Sent(number)
        self.sent.append(record)
        topic = self.topic

        def append(granted: int) -> bool:
            delivery = self.accumulator.append(
                topic, partition, timestamp, key, value, NO_HEADERS, self.now, granted
            )
            if delivery is None:
                return False
            assert delivery.partition == partition or partition < 0
            record.delivery = delivery
            self.append_order.append(number)
            delivery.add_done_callback(lambda _: self.ended(record))
            if self.random.random() < 0.5:
                waiter = delivery.waiter()
                assert waiter is not None
                record.sleeper = Sleeper(waiter)
            return True

        if self.pool.waiting or not append(0):
            self.pool.enter(
                Ticket(
                    max(batch_upper_bound(key, value, NO_HEADERS), self.setup.batch_size), append
                )
            )

    def ended(self, record: Sent) -> None:
        record.ends += 1
        assert record.ends == 1, "a delivery ended twice"
        if not self.calm and self.random.random() < 0.05:
            self.send()

    def give_up_waiting(self) -> None:
        if self.pool.line:
            self.pool.leave(self.random.choice(self.pool.line))

    def wake(self) -> None:
        """Somebody who awaits is cancelled, and that is taken back before they run."""
        if self.sent:
            sleeper = self.random.choice(self.sent).sleeper
            if sleeper is not None:
                sleeper.waiter.cancel()

    def flush(self) -> None:
        flush = Flush(
            [s.delivery for s in self.sent if s.delivery is not None and not s.delivery.done()]
        )

        def passed() -> None:
            flush.passed += 1
            assert all(delivery.done() for delivery in flush.deliveries)

        fence = Fence(passed)
        self.accumulator.begin_flush(fence, self.now)
        self.flushes.append(flush)
        self.flushing += 1
        if not fence.remaining:
            assert not flush.deliveries
            flush.passed = 1

    def end_flush(self) -> None:
        """One that has passed, or is given up."""
        if self.flushing:
            self.flushing -= 1
            self.accumulator.end_flush()

    def settle_down(self) -> None:
        """A turn of the loop, with adaptive linger."""
        self.accumulator.settle(self.now, lambda node: not self.requests[node])

    def move_leader(self) -> None:
        log = self.random.choice(self.logs)
        log.leader = self.random.choice([-1, *range(self.setup.nodes)])
        if self.random.random() < 0.8:
            log.epoch += 1

    def change_largest_batch(self) -> None:
        """Only up: a broker does not refuse as too large what it has stored before."""
        self.largest_batch = max(self.largest_batch, self.random.choice([200, 300, 500, 10**9]))

    def answer_producer_id(self) -> None:
        sequences = self.sequences
        if sequences is None or sequences.state is not IdState.REQUESTED:
            return
        if not self.calm and self.random.random() < 0.3:
            sequences.request_failed()
            return
        sequences.assigned(self.next_producer_id, self.setup.first_epoch)
        self.next_producer_id += 1
        if self.setup.first_sequence:
            for queue in self.queues():
                numbers = queue.sequences
                if numbers.producer_id < 0:
                    numbers.producer_id = sequences.producer_id
                    numbers.producer_epoch = sequences.producer_epoch
                    numbers.next_sequence = self.setup.first_sequence
        self.accumulator.touch_all(self.now)

    def compress(self) -> None:
        if self.jobs:
            batch = self.jobs.pop(self.random.randrange(len(self.jobs)))
            assert batch.codec is not None
            payload = batch.codec.compress(batch.uncompressed())
            self.accumulator.compressed(batch, payload, self.now)

    def process(self) -> None:
        """A broker works on the next request of one of the connections."""
        node = self.random.choice(list(self.requests))
        for request in self.requests[node]:
            if request.answers is None:
                request.answers = [self.store(node, wire) for wire in request.wire]
                return

    def store(self, node: int, wire: WireBatch) -> tuple[int, int]:
        log = self.logs[wire.partition]
        if log.leader != node:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER, -1
        if wire.size > self.largest_batch:
            return ErrorCode.MESSAGE_TOO_LARGE, -1
        luck = 1.0 if self.calm else self.random.random() / max(self.setup.errors, 1e-9)
        if luck < 0.03:
            return self.random.choice(FOR_GOOD), -1
        if luck < 0.10:
            return self.random.choice(RETRIABLE_NOT_STORED), -1
        code, base_offset = log.append(wire)
        if code == ErrorCode.NONE and luck < 0.16:
            return self.random.choice(RETRIABLE_STORED), -1
        return code, base_offset

    def answer(self) -> None:
        """The oldest answer on one of the connections arrives."""
        node = self.random.choice(list(self.requests))
        line = self.requests[node]
        if not line or line[0].answers is None:
            return
        request = line.popleft()
        assert request.answers is not None
        for batch, (code, base_offset) in zip(request.batches, request.answers, strict=True):
            self.accumulator.landed(batch)
            if code == ErrorCode.NONE:
                self.accumulator.acknowledge(batch, base_offset, -1, self.now)
            else:
                self.conclude(batch, code)
        self.accumulator.give_back()

    def disconnect(self) -> None:
        """A connection breaks. The broker may have worked on some of what it had got."""
        node = self.random.choice(list(self.requests))
        line = self.requests[node]
        for request in line:
            if request.answers is None:
                if self.random.random() < 0.5:
                    break
                request.answers = [self.store(node, wire) for wire in request.wire]
        lost = list(line)
        line.clear()
        self.connected[node] = False
        code = self.random.choice([ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT])
        for request in lost:
            for batch in request.batches:
                self.accumulator.landed(batch)
                self.conclude(batch, code)
        self.accumulator.give_back()

    def connect(self) -> None:
        self.connected[self.random.choice(list(self.connected))] = True

    def abort(self) -> None:
        pending = [s for s in self.sent if s.delivery is not None and not s.delivery.done()]
        self.accumulator.abort("enough", None, self.now)
        self.accumulator.give_back()
        assert all(s.delivery is not None and s.delivery.done() for s in pending)

    def turn(self) -> None:
        """The event loop turns, as the accumulator hears of it: as long as something was done."""
        accumulator = self.accumulator
        if accumulator.compressed_here and accumulator.turned(self.now):
            self.turns_waited_for += 1

    def pass_time(self) -> None:
        self.now += self.random.choice([0.0001, 0.001, 0.001, 0.004, 0.01, 0.1, 0.3])

    # -- the scheduler in small --

    def conclude(self, batch: ProducerBatch, code: int) -> None:
        rule = rule_for(code)
        if rule.persisted != "no":
            batch.maybe_written = True
            batch.is_stored = batch.is_stored or rule.persisted == "yes"
        if batch.state != PENDING:
            return
        decision = decide(
            code,
            records=batch.count,
            attempts=batch.attempts,
            retries=self.setup.retries,
            expired=self.now - batch.created_at >= self.setup.delivery_timeout,
            idempotent=self.sequences is not None,
        )
        if decision.action is Action.RETRY:
            if decision.sequence == "out_of_order" and self.sequences is not None:
                self.sequences.out_of_order(self.accumulator.sequences_of(batch), batch)
            self.accumulator.retry(batch, self.now)
        elif decision.action is Action.SPLIT:
            self.accumulator.split(batch, self.now)
        else:
            assert decision.action is Action.FAIL
            self.accumulator.fail(
                batch,
                Failure(BrokerRejected, f"code {code}", persisted=batch.persisted(), code=code),
                self.now,
            )

    def step(self) -> None:
        accumulator = self.accumulator
        for _ in range(100):
            accumulator.news = False
            if self.sequences is not None:
                accumulator.touch_partitions(self.sequences.resolve(), self.now)
                accumulator.touch_partitions(self.sequences.apply_bumps(), self.now)
                if self.sequences.needs_id:
                    self.sequences.requested()
            for batch in accumulator.expire(self.now):
                assert batch.created_at + self.setup.delivery_timeout <= self.now
            accumulator.give_back()
            accumulator.fire_timers(self.now)
            for node in list(accumulator.ready):
                self.serve(node)
            while accumulator.to_compress:
                self.jobs.append(accumulator.to_compress.pop())
            accumulator.give_back()
            if not accumulator.news:
                return
        raise AssertionError("the scheduler would turn for ever")

    def serve(self, node: int) -> None:
        line = self.requests[node]
        while self.connected[node] and len(line) < self.setup.max_in_flight:
            batches = self.accumulator.drain(node, 1500, self.now)
            if not batches:
                return
            assert len(batches) == 1 or sum(b.estimated_size() for b in batches) <= 1500
            for batch in batches:
                assert batch.retry_at <= self.now, "sent again before its backoff was over"
                self.check_bytes(batch)
            assert len({b.partition for b in batches}) == len(batches)
            line.append(Request(node, batches))

    # -- the checks --

    def queues(self) -> list[PartitionQueue]:
        return [q for t in self.accumulator.topics.values() for q in t.queues if q is not None]

    def check_bytes(self, batch: ProducerBatch) -> None:
        """The bytes of a retry are the same, unless it goes under another epoch."""
        data = b"".join(batch.buffers())
        producer = (batch.producer_id, batch.producer_epoch, batch.base_sequence)
        before = self.last_bytes.get(batch)
        if before is not None:
            if before[0][:2] == producer[:2]:
                assert before == (producer, data)
            else:
                assert before[1][61:] == data[61:]
        self.last_bytes[batch] = (producer, data)

    def check(self) -> None:
        self.check_places()
        self.check_memory()
        self.check_lines()
        self.check_ends()
        if self.sequences is not None:
            self.check_sequences()

    def check_places(self) -> None:
        """Every batch is in exactly one place, in order."""
        places: dict[ProducerBatch, int] = {}
        on_wire = [b for line in self.requests.values() for r in line for b in r.batches]
        queued = 0
        for queue in self.queues():
            queued += len(queue.batches)
            for batch in queue.batches:
                places[batch] = places.get(batch, 0) + 1
                assert batch.state == PENDING
                assert not batch.in_flight
                assert batch.count > 0
                assert batch.is_open == (batch is queue.open)
            assert queue.open is None or queue.open is queue.batches[-1]
            orders = [batch.order for batch in queue.batches]
            assert orders == sorted(set(orders))
            for batch in queue.in_flight:
                assert batch.in_flight
                assert batch in on_wire
                assert batch.state in (PENDING, FAILED)
                if batch.state == PENDING:
                    places[batch] = places.get(batch, 0) + 1
            if self.setup.max_in_flight == 1:
                assert len(queue.in_flight) <= 1
        assert len(on_wire) == sum(len(queue.in_flight) for queue in self.queues())
        assert set(places.values()) <= {1}
        assert places.keys() == self.accumulator.incomplete.keys()
        assert queued == sum(t.queued_batches for t in self.accumulator.topics.values())
        created = [batch.created_at for batch in self.accumulator.incomplete]
        assert created == sorted(created)
        if created:
            first_expiry = created[0] + self.setup.delivery_timeout
            assert first_expiry > self.now
            assert self.accumulator.next_deadline() <= first_expiry

    def check_memory(self) -> None:
        """What was taken and not given back is what the batches hold; and all buffers, with those
        that are kept for the next batches, are no larger than the pool."""
        batches = [b for q in self.queues() for b in (*q.batches, *q.in_flight)]
        assert self.pool.total - self.pool.available == sum(b.memory for b in batches)
        buffers = self.accumulator.spares.size
        for batch in batches:
            if batch.memory and batch.buffer is not None:
                buffers += sum(len(piece.obj) for piece in batch.buffers())
        assert buffers <= self.pool.total

    def check_lines(self) -> None:
        """No queue is lost: it stands in line, or has a timer, or waits for an event."""
        lines = self.accumulator.ready
        standing = [(queue, node) for node, line in lines.items() for queue in line]
        assert all(lines.values())
        assert len(standing) == len({queue for queue, _ in standing})
        for queue, node in standing:
            assert queue.ready_at == node == queue.leader
        for queue in self.queues():
            in_line = queue.ready_at is not None
            assert in_line == (queue in [q for q, _ in standing])
            if not queue.batches:
                assert queue not in self.accumulator.leaderless
                continue
            head = queue.batches[0]
            if head.compressing or (self.setup.max_in_flight == 1 and queue.in_flight):
                continue
            if head.attempts:
                due = head.retry_at
            elif (
                not head.is_open
                or head.is_full()
                or len(queue.batches) > 1
                or self.accumulator.flushing
                or self.accumulator.closed
                or self.pool.waiting
            ):
                due = self.now
            else:
                due = head.created_at + 0.005
            if queue.leader < 0:
                assert due > self.now or queue in self.accumulator.leaderless
            elif self.sequences is None or self.sequences.may_drain(queue.sequences, head):
                timed = due > self.now and self.accumulator.next_deadline() <= due
                waits = queue in self.accumulator.postponed
                if waits:
                    assert self.accumulator.compressed_here, "else nobody asks for the next turn"
                assert in_line or timed or waits, f"{queue} is lost"

    def check_ends(self) -> None:
        for record in self.sent:
            if record.delivery is not None:
                assert record.ends == record.delivery.done()
            if record.sleeper is not None and record.delivery is not None:
                assert record.sleeper.ends == record.delivery.done()
        for flush in self.flushes:
            assert flush.passed <= 1

    def check_sequences(self) -> None:
        incomplete = self.accumulator.incomplete
        for queue in self.queues():
            outstanding = queue.sequences.outstanding
            with_sequence = [
                b
                for b in (*queue.batches, *queue.in_flight)
                if b.base_sequence >= 0 and b.state == PENDING
            ]
            assert len(outstanding) == len(set(outstanding))
            assert set(outstanding) == set(with_sequence)
            for batch in outstanding:
                assert batch in incomplete
                assert batch.producer_id == queue.sequences.producer_id
                assert batch.producer_epoch == queue.sequences.producer_epoch
            for first, second in pairwise(outstanding):
                assert is_before(first.base_sequence, second.base_sequence)
                assert first.order < second.order

    # -- the whole of it --

    def run(self) -> None:
        happenings: list[tuple[Callable[[], None], int]] = [
            (self.send, 30),
            (self.pass_time, 15),
            (self.process, 20),
            (self.answer, self.setup.answers),
            (self.answer_producer_id, 5),
            (self.compress, 6),
            (self.turn, 20),
            (self.disconnect, self.setup.unrest),
            (self.connect, 2 * self.setup.unrest),
            (self.move_leader, self.setup.unrest),
            (self.refresh, 2 * self.setup.unrest),
            (self.flush, 1),
            (self.end_flush, 2),
            (self.change_largest_batch, 1),
            (self.give_up_waiting, 1),
            (self.wake, 1),
        ]
        if self.random.random() < 0.3:
            happenings.append((self.vanish, 1))
        if self.random.random() < 0.3:
            happenings.append((self.abort, 1))
        if self.setup.adaptive_linger:
            happenings.append((self.settle_down, 10))
        names = [happening for happening, _ in happenings]
        weights = [weight for _, weight in happenings]
        for _ in range(self.setup.steps):
            self.random.choices(names, weights)[0]()
            self.accumulator.give_back()
            self.step()
            self.loop.turn()
            self.check()
        self.settle()
        self.check_logs()

    def settle(self) -> None:
        """The storm is over: everything must come to its end, and soon."""
        self.calm = True
        self.largest_batch = 10**9
        for index, log in enumerate(self.logs):
            if log.leader < 0:
                log.leader = index % self.setup.nodes
                log.epoch += 1
        while self.flushing:
            self.end_flush()
        if self.random.random() < 0.3:
            self.accumulator.close(self.now)
        calm_at = self.now
        for _ in range(3000):
            self.refresh()
            for node in self.connected:
                self.connected[node] = True
            self.answer_producer_id()
            self.compress()
            self.turn()
            self.step()
            self.process()
            self.answer()
            self.step()
            self.loop.turn()
            self.check()
            busy = self.jobs or any(self.requests.values())
            if not (busy or self.accumulator.incomplete or self.pool.line):
                break
            id_missing = self.sequences is not None and self.sequences.state is not IdState.READY
            if not (busy or id_missing or self.accumulator.compressed_here):
                self.now = max(self.now, self.accumulator.next_deadline())
                assert self.now < calm_at + 30, "something is stuck"
        assert not self.accumulator.incomplete
        assert not self.pool.line
        assert self.pool.available == self.pool.total
        assert not self.accumulator.ready
        assert not self.accumulator.leaderless
        assert all(flush.passed == 1 for flush in self.flushes)
        self.acknowledged = sum(
            s.delivery is not None and s.delivery.exception() is None for s in self.sent
        )

    def check_logs(self) -> None:
        delivered: list[dict[int, list[int]]] = []
        for log in self.logs:
            offsets: dict[int, list[int]] = {}
            for offset, number in enumerate(log.records):
                offsets.setdefault(number, []).append(offset)
            delivered.append(offsets)
        for record in self.sent:
            delivery = record.delivery
            if delivery is None:
                continue
            error = delivery.exception()
            offsets_of = delivered[delivery.partition].pop(record.number, [])
            if self.sequences is not None:
                assert len(offsets_of) <= 1, f"record {record.number} is stored twice"
            if error is None:
                assert delivery.result().offset in offsets_of
            elif error.persisted == "no":
                assert not offsets_of, f"{error} but it is at {offsets_of}"
            elif error.persisted == "yes":
                assert offsets_of, f"{error} but it is nowhere"
            else:
                assert error.persisted == "maybe"
        assert not any(delivered), "records that nobody sent"
        if self.sequences is not None or self.setup.max_in_flight == 1:
            for queue in self.queues():
                self.check_order(self.logs[queue.partition])

    def check_order(self, log: Log) -> None:
        """Records of a partition are stored in the order in which they were appended."""
        order = {record: place for place, record in enumerate(self.append_order)}
        first = list(dict.fromkeys(log.records))
        places = [order[number] for number in first]
        assert places == sorted(places), f"out of order: {first}"


DEEP = Setup(partitions=1, nodes=2, total_memory=10**6, batch_size=100, steps=800)
SETUPS = {
    "idempotent": Setup(),
    "idempotent, lz4": Setup(compression="lz4"),
    "idempotent, one in flight": Setup(max_in_flight=1),
    "idempotent, expiring": Setup(delivery_timeout=0.6),
    "idempotent, expiring, lz4": Setup(delivery_timeout=0.6, compression="lz4"),
    "idempotent, expiring, one in flight": Setup(delivery_timeout=0.6, max_in_flight=1),
    "idempotent, few retries": Setup(retries=2),
    "idempotent, last epochs": Setup(first_epoch=32765, retries=2),
    "idempotent, wrapping": Setup(first_sequence=MAX_SEQUENCE - 20),
    "idempotent, one partition": Setup(partitions=1, delivery_timeout=2.0),
    "plain": Setup(idempotent=False),
    "plain, expiring, lz4": Setup(idempotent=False, compression="lz4", delivery_timeout=0.6),
    "plain, one in flight": Setup(idempotent=False, max_in_flight=1),
    "plain, one in flight, expiring": Setup(
        idempotent=False, max_in_flight=1, delivery_timeout=0.6
    ),
    "plenty of memory": Setup(total_memory=10**6),
    "deep pipelines": DEEP,
    "deep pipelines, answers get lost": DEEP._replace(answers=5, unrest=4, errors=0.0),
    "deep pipelines, few errors": DEEP._replace(answers=8, errors=0.3),
    "deep pipelines, few retries": DEEP._replace(answers=8, errors=0.5, retries=1),
    "adaptive linger": Setup(total_memory=10**5, adaptive_linger=True),
    "hardly any memory": Setup(total_memory=1000, partitions=2),
    "growing": Setup(total_memory=10**5, batch_max_bytes=3000),
    "growing, lz4": Setup(total_memory=10**5, batch_max_bytes=3000, compression="lz4"),
    "growing, little memory": Setup(batch_max_bytes=3000, answers=8),
    "growing, expiring": Setup(batch_max_bytes=3000, delivery_timeout=0.6, answers=8),
    "growing, plain, one in flight": Setup(
        idempotent=False, max_in_flight=1, total_memory=10**5, batch_max_bytes=3000
    ),
    "growing, deep pipelines": DEEP._replace(batch_max_bytes=2000, answers=8),
}


#: More storms find more: STORM_SEEDS=500 takes about half an hour.
SEEDS = range(int(os.environ.get("STORM_SEEDS", "3")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SETUPS)
def test_storm(name: str, seed: int) -> None:
    """RA-06, RA-17, RA-21, SI-04 to SI-09, SI-12 to SI-17, SI-22 to SI-24, in any mixture."""
    storm = Storm(seed, SETUPS[name])
    storm.run()
    assert storm.acknowledged > 0
    if storm.setup.compression == "none":
        assert storm.turns_waited_for == 0
    elif not storm.setup.batch_max_bytes:
        assert storm.turns_waited_for > 0
