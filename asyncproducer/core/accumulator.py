"""The partition queues: records come in at the back, batches leave at the front.

Nothing here looks at all partitions. A queue that has something to do is in exactly
one place: in the ready line of its leader's node (something can leave now), on the
deadline heap (linger, or the backoff of a retry), among the leaderless, among those that
wait for the loop's next turn, or nowhere, when it waits for an event that will touch it
again: an answer, a compressed batch, a producer id, memory. `_touch` decides which,
whenever something about a queue changed.

Who may wait, may not be here: `append` returns None where memory is needed that the
pool does not give at once; `batch_bytes` says how much.

Memory is given back through `_free` alone, and reaches the pool in `give_back`, which
the shell calls when its step is over: handing memory on appends further records, and
that must not happen in the middle of a change.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import (
    BATCH_OVERHEAD,
    GONE,
    RECORD_OVERHEAD,
    ProducerBatch,
    batch_upper_bound,
)
from asyncproducer.core.compression import Codec, RatioEstimator
from asyncproducer.core.delivery import PENDING, Delivery, Failure
from asyncproducer.core.metadata import TopicMetadata
from asyncproducer.core.partitioner import BuiltInPartitioner
from asyncproducer.core.sequences import PartitionSequences, Sequences
from asyncproducer.core.spares import SpareBuffers
from asyncproducer.errors import AbortedError, DeliveryError, DeliveryTimeout

# ruff: noqa: F821 (names that accumulator.pxd brings in where this module is compiled)
if TYPE_CHECKING:
    from asyncproducer.core.bulk import Rows

    # Where this module is compiled, these are C functions, see accumulator.pxd.
    COMPILED: bool
    append_bytes: Any
    delivery_of: Any
    hash_octets: Any
    put_row: Any
    size_of: Any

__all__ = ["Accumulator", "Fence", "Memory", "PartitionQueue", "TopicState"]

#: Whether this module runs compiled, which C knows as a constant: what the other case needs is not
#: even there. A file that Python loads from source ends in .py.
globals()["COMPILED"] = not __file__.endswith(".py")

_NEVER = float("inf")

#: A heap with so few entries is not worth tidying up.
_SMALL_HEAP = 64

#: The most that a record adds to its key, value and headers, lengths included.
_MOST_ADDED = RECORD_OVERHEAD + 10

#: What is ready for a broker that has other requests to answer leaves when it is as large as the
#: largest batch, or so many times `batch_size`, or is of so many partitions, or has waited so many
#: seconds.
_WORTH_BATCHES = 64
_WORTH_PARTITIONS = 100
_MOST_HELD_SECONDS = 0.005

#: What is compressed in one turn of the loop takes so many seconds or so. A batch that does not
#: fit any more waits for the next turn if it is small: a thread would take longer to hear of it.
#: A large one goes to a thread in any case: what else it brings about comes to the turn as well.
_COMPRESSING_SECONDS = 0.00035
_THREAD_BYTES = 65_536
#: How much the newest measurement counts of how long it takes to compress a byte; and of what is
#: known of a codec beforehand, so many times are the most that this may come to.
_LEARNING = 0.1
_MOST_QUICKER = 2
#: As the least, a batch of ordinary size is compressed here if it is known that it may.
_LEAST_QUICK_BYTES = 16_384

#: How often the load of a topic's queues is looked at, in seconds per partition: counting is
#: O(partitions). And so much less often where a choice is made with each `batch_size`.
_LOAD_SECONDS_PER_PARTITION = 1e-5
_LOAD_MIN_SECONDS = 0.01


#: How many partitions are tried for a record without one, whose brokers get no more memory.
_MOST_ELSEWHERE = 16

#: A full batch gets more memory in the first of so many parts of `delivery_timeout_ms`.
_GROWING_PARTS = 32


class Memory(Protocol):
    """What the accumulator needs of the buffer pool."""

    #: Bytes in all, and those that are free.
    total: int
    available: int

    def try_reserve(self, size: int, share: Any = None, *, spares: bool = False) -> bool:
        """Take `size` bytes for a broker, if they are free, nobody waits, and it may have more;
        with `spares`, if it still may with them."""
        ...

    def release(self, size: int) -> None:
        """Give `size` bytes back."""
        ...

    def share(self, node: int) -> Any:
        """What the broker has of the memory: we count its `held`."""
        ...

    def is_held_up(self, share: Any, size: int = 0) -> bool:
        """Whether the broker gets no `size` bytes more now, though they may be free."""
        ...

    def has_better(self, share: Any, size: int = 0) -> bool:
        """Whether another broker is not held up, or has much less."""
        ...

    def move(self, share: Any, node: int) -> Any:
        """A partition is another broker's now, whose share is returned. Who waits for what the
        former has is asked anew."""
        ...

    def is_wanted(self, share: Any) -> bool:
        """Whether somebody waits for what the broker's batches have."""
        ...

    @property
    def waiting(self) -> int:
        """How many wait for memory."""
        ...


class Fence:
    """Passed when all the batches it stands behind have their end (flush)."""

    def __init__(self, on_passed: Callable[[], None]) -> None:
        self.remaining = 0
        self._on_passed = on_passed

    def replace(self, parts: int) -> None:
        """A batch was split into `parts`."""
        self.remaining += parts - 1

    def passed(self) -> None:
        """One batch has its end."""
        self.remaining -= 1
        if self.remaining == 0:
            self._on_passed()


def _failure(
    kind: type[DeliveryError],
    batch: ProducerBatch,
    what: str,
    cause: BaseException | None,
    now: float,
    code: int | None = None,
) -> Failure:
    """Why a batch ends that no broker has decided about."""
    return Failure(
        kind,
        f"{batch.count} record(s) for {batch.topic}-{batch.partition} {what}",
        persisted=batch.persisted(),
        code=code,
        cause=cause,
        attempts=batch.sends,
        elapsed=now - batch.created_at,
    )


#: After so many turns in which there was no time to compress it, a batch goes before others.
_OFTEN_PASSED = 4


class PartitionQueue:
    """The batches of one partition, and where the queue stands."""

    def __init__(self, topic: TopicState, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        #: Head: next to leave. Only the tail may still take records (`open`).
        self.batches: deque[ProducerBatch] = deque()
        self.open: ProducerBatch | None = None
        #: Whether that does not linger any more, and leaves as soon as it can.
        self.quiet = False
        #: How often its head had to wait for another turn to be compressed, since one left.
        self.passed = 0
        self.in_flight: list[ProducerBatch] = []
        self.leader = -1
        self.leader_epoch = -1
        #: What the leader has of the memory.
        self.share: Any = None
        self.next_order = 0
        #: The node in whose ready line the queue stands, or None.
        self.ready_at: int | None = None
        #: When the deadline heap will touch it; entries with another time are stale.
        self.timer = _NEVER
        self.sequences = PartitionSequences(self)

    def __repr__(self) -> str:
        return (
            f"<PartitionQueue {self.topic.name}-{self.partition} queued={len(self.batches)} "
            f"in_flight={len(self.in_flight)} leader={self.leader}>"
        )


class TopicState:
    """A topic: its metadata, its queues, its sticky partition."""

    def __init__(
        self, name: str, view: TopicMetadata, partitioner: BuiltInPartitioner, most_bytes: int = 0
    ) -> None:
        self.name = name
        #: Up to this a batch may grow. Less than configured where the broker took no more.
        self.most_bytes = most_bytes
        self.view = view
        #: That of `view`.
        self.partition_count = view.partition_count
        #: Whether metadata has the topic now.
        self.known = True
        self.partitioner = partitioner
        self.queues: list[PartitionQueue | None] = [None] * view.partition_count
        self.queued_batches = 0
        self.load_at = 0.0
        #: The batch that records without a partition go to, as long as it is open. None: ask
        #: the partitioner.
        self.sticky: ProducerBatch | None = None
        #: Bytes that `sticky` has got and the partitioner has not heard of, and with how many of
        #: them it hears: sooner it would make no new choice.
        self.unsaid = 0
        self.room = 0
        #: Whether records without a partition go on in a ripe batch until it is full, instead of
        #: to another partition with each `batch_size`.
        self.stays = False


class Accumulator:
    """All queues of a producer. Called with `now`, never waits."""

    def __init__(
        self,
        memory: Memory,
        *,
        batch_size: int,
        batch_max_bytes: int = 0,
        linger: float,
        delivery_timeout: float,
        retry_backoff: ExponentialBackoff,
        random: Callable[[], int],
        codec: Codec | None = None,
        sequences: Sequences | None = None,
        max_in_flight: int = 5,
        adaptive: bool = True,
        adaptive_linger: bool = False,
        availability_timeout: float = 0.0,
        quick_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
        loop: Any = None,
        trouble: Callable[[], BaseException | None] = lambda: None,
        on_failed: Callable[[ProducerBatch, Failure], None] | None = None,
        spare_bytes: int = 0,
    ) -> None:
        self._memory = memory
        #: Buffers for the next batches.
        self.spares = SpareBuffers(spare_bytes, memory)
        self._batch_size = max(1, batch_size)
        # A batch size of 1 promises one record in each batch.
        self._batch_max_bytes = batch_max_bytes if batch_size > 1 else 0
        self._linger = linger
        #: How long a batch that could leave may be held up (`held_until`), and up to how many
        #: bytes. Where batches do not grow that would be for nothing.
        grows = self._batch_max_bytes > batch_size and codec is None
        self._held = min(linger, _MOST_HELD_SECONDS) if grows else 0.0
        self._worth = min(self._batch_max_bytes, _WORTH_BATCHES * batch_size)
        self._delivery_timeout = delivery_timeout
        #: So long after its beginning a full batch gets more memory.
        self._grows_for = delivery_timeout / _GROWING_PARTS
        self._retry_backoff = retry_backoff
        self._random = random
        self._codec = codec
        self._sequences = sequences
        #: With one request in flight, a partition never has two batches on the wire, so
        #: that retries keep the order even without sequences (Java: guaranteeMessageOrder).
        self._one_in_flight = max_in_flight == 1
        self._adaptive = adaptive
        self._adaptive_linger = adaptive_linger
        self._availability_timeout = availability_timeout
        if quick_bytes is None:
            quick_bytes = 0 if codec is None else codec.quick_bytes
        #: How much may be compressed here in one turn of the loop, and how much of that is left.
        #: The former follows what `clock` says of how long it takes.
        self.quick_bytes = self._quick_left = quick_bytes
        self._least_quick = min(quick_bytes, _LEAST_QUICK_BYTES)
        self._most_quick = _MOST_QUICKER * quick_bytes
        self._clock = clock
        self._slowness = _COMPRESSING_SECONDS / quick_bytes if quick_bytes else 0.0
        #: Whether anything was compressed here since the loop has turned: `turned` is to be called.
        self.compressed_here = False
        #: Queues whose head waits for the next turn of the loop to be compressed.
        self.postponed: list[PartitionQueue] = []
        self._loop = loop
        #: What is wrong with the brokers just now, for the errors of what was never sent.
        self._trouble = trouble
        #: Hears of each batch that fails, before anybody else and in the middle of a change.
        self._on_failed = on_failed
        self.estimator = RatioEstimator()
        self.topics: dict[str, TopicState] = {}
        #: Node → queues that can leave now, in the order in which they became ready. Any of
        #: them can be taken out quickly, for when thousands change their leader at once.
        self.ready: dict[int, OrderedDict[PartitionQueue, None]] = {}
        #: Queues with something due whose partition has no leader.
        self.leaderless: dict[PartitionQueue, None] = {}
        #: Queues whose open batch waits for its linger time.
        self._lingering: dict[PartitionQueue, None] = {}
        self._timers: list[tuple[float, int, PartitionQueue]] = []
        self._timer_count = 0
        #: From this length on, the heap is looked through for stale entries.
        self._timer_limit = _SMALL_HEAP
        #: Batches without an end, oldest first.
        self.incomplete: OrderedDict[ProducerBatch, None] = OrderedDict()
        #: Closed batches to be compressed off the loop; the shell takes them.
        self.to_compress: list[ProducerBatch] = []
        #: Queues whose open batch is new: candidates for leaving before their linger time.
        self.fresh: list[PartitionQueue] = []
        self.flushing = 0
        self.closed = False
        self._rushing = False
        self._returned = 0
        #: Whether somebody adds more than a turn of the loop takes: more will come in the next.
        self.pouring = False
        #: Set when a queue became ready or a batch began; the shell clears it.
        self.news = False
        #: The last delivery, for as long as the loop has not turned: where nobody keeps it, it
        #: serves the next record, too.
        self.last: Delivery | None = None
        #: Node → (last time it had data and was ready, last time it was drained).
        self._node_times: dict[int, tuple[float, float]] = {}

    # -- topics ----------------------------------------------------------------------------

    def update_topic(self, view: TopicMetadata, now: float) -> TopicState:
        """Take over what metadata says of a topic: new partitions, other leaders."""
        state = self.topics.get(view.name)
        if state is None:
            state = TopicState(
                view.name,
                view,
                BuiltInPartitioner(view.name, self._batch_size, self._random),
                self._batch_max_bytes,
            )
            self.topics[view.name] = state
            return state
        if not (state.known and state.view.topic_id == view.topic_id):
            for queue in state.queues:
                if queue is not None:
                    queue.sequences.maybe_forgotten = True
                    for batch in queue.in_flight:
                        batch.sent_to = GONE
        self._unstick(state)
        state.view = view
        state.partition_count = view.partition_count
        state.known = True
        missing = view.partition_count - len(state.queues)
        if missing > 0:
            state.queues.extend([None] * missing)
        for queue in state.queues:
            if queue is not None:
                self._update_leader(queue, now)
        return state

    def remove_topic(self, name: str, now: float) -> None:
        """Metadata dropped the topic. What is queued stays until it expires or it returns."""
        state = self.topics.get(name)
        if state is None:
            return
        state.known = False
        self._unstick(state)
        # The partitions stay, without leaders: what is queued waits for the topic to return.
        state.view = TopicMetadata(
            name=name,
            topic_id=state.view.topic_id,
            partitions=tuple(p._replace(leader=-1) for p in state.view.partitions),
            internal=state.view.internal,
        )
        # Who waits for memory may have chosen a partition of it: later nobody would hear of it.
        busy = bool(self._memory.waiting)
        for queue in state.queues:
            if queue is not None:
                busy = busy or bool(queue.batches or queue.in_flight)
                self._update_leader(queue, now)
        if not busy and all(q is None or q.sequences.next_sequence == 0 for q in state.queues):
            # Sequences outlive a topic that is not heard of for a while; without any,
            # nothing is lost with the state.
            del self.topics[name]

    def _update_leader(self, queue: PartitionQueue, now: float) -> None:
        partitions = queue.topic.view.partitions
        leader, epoch = -1, -1
        if queue.partition < len(partitions):
            leader = partitions[queue.partition].leader
            epoch = partitions[queue.partition].leader_epoch
        if epoch > queue.leader_epoch:
            if queue.leader_epoch >= 0:
                # A new leader: what waits out its backoff may go there at once (KIP-951).
                for batch in queue.batches:
                    if batch.attempts > 0:
                        batch.retry_at = now
            queue.leader_epoch = epoch
        if leader != queue.leader or queue.share is None:
            queue.leader = leader
            self._leave_line(queue)
            queue.share = self._memory.move(queue.share, leader)
        self._touch(queue, now)

    def node_moved(self, node: int) -> None:
        """The broker has another address now: what is on its way there goes to the old one.

        Whether it arrives is not known before its connection ends. Until then nothing follows
        it on another: a broker knows the last five batches, and would not recognise it then.
        """
        for topic in self.topics.values():
            for queue in topic.queues:
                if queue is not None:
                    for batch in queue.in_flight:
                        if batch.sent_to == node:
                            batch.sent_to = GONE

    def _leave_line(self, queue: PartitionQueue) -> None:
        if queue.ready_at is not None:
            line = self.ready[queue.ready_at]
            del line[queue]
            if not line:
                del self.ready[queue.ready_at]
            queue.ready_at = None
        self.leaderless.pop(queue, None)

    # -- coming in -------------------------------------------------------------------------

    def append_open(
        self,
        topic: TopicState,
        partition: int,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
        size: int,
    ) -> Delivery | None:
        """`append`, where that is no more than writing into an open batch; else None.

        The way of nearly every record. Nothing becomes due here, so it needs no time. Key and
        value are bytes or None, `size` is that of key, value and headers together.
        """
        batch = _with_room(topic, partition, size)
        if batch is None:
            return None
        before = batch.size
        delivery: Delivery | None
        if COMPILED:  # pragma: no cover - coverage sees no C
            if not append_bytes(batch, timestamp, key, value, headers):
                return None
            delivery = delivery_of(
                self, batch, batch.count - 1, timestamp, size_of(key), size_of(value)
            )
        else:
            delivery = batch.try_append(timestamp, key, value, headers)
            if delivery is None:
                return None
        if partition < 0:
            self._count(topic, batch, before)
        return delivery

    def stay(self, topic: TopicState, stays: bool) -> None:
        """`stays` of a topic. Where records are compressed, threads shall have several batches."""
        topic.stays = stays and self._codec is None

    def append_row(self, topic: TopicState, partition: int, rows: Rows) -> ProducerBatch | None:
        """`append_open` of the row that `rows` has read. Returns the batch that it is in."""
        batch = _with_room(topic, partition, rows.size)
        if batch is None:
            return None
        before = batch.size
        if not batch.append_fields(
            rows.timestamp,
            rows.key_size,
            rows.key,
            rows.value_size,
            rows.value,
            rows.headers_size,
            rows.headers,
        ):
            return None
        if partition < 0:
            self._count(topic, batch, before)
        return batch

    def append_run(self, topic: TopicState, rows: Rows, row: int, end: int, most: int) -> int:
        """`append_row` of the rows from `row` on that go where the one before went, without a
        partition or key of their own and no larger than `most` bytes, as long as that takes no
        more than writing.

        Returns the first row that is not in, or `end`.
        """
        batch = topic.sticky
        if batch is None or not batch.is_open or self._codec is not None:
            return row
        before = batch.size
        limit = batch.easy
        if not (topic.stays and batch.ripe):
            limit = min(limit, before + topic.partitioner.room(batch.ripe) - topic.unsaid)
        name = rows.topic
        row = rows.fill(batch, row, end, limit - _MOST_ADDED - 1, most - 1)
        while row < end and rows.read(row):
            if rows.partition >= 0 or rows.key_size >= 0 or rows.topic is not name:
                break
            if rows.size > most:
                break
            if batch.size + rows.size + _MOST_ADDED >= limit or not batch.append_fields(
                rows.timestamp,
                rows.key_size,
                rows.key,
                rows.value_size,
                rows.value,
                rows.headers_size,
                rows.headers,
            ):
                break
            rows.place(row, batch, batch.count - 1)
            row += 1
        if batch.size > before:
            self._count(topic, batch, before)
        return row

    def append_spread(
        self, topic: TopicState, rows: Rows, row: int, end: int, most: int, hashes: bool
    ) -> int:
        """`append_row` of the rows from `row` on that have a partition, or a key where keys are
        hashed (`hashes`), no headers, and no more than `most` bytes, as long as that takes no more
        than writing. None where records are compressed, nor in plain Python: it would save nothing.

        Returns the first row that is not in, or `end`. `rows.written` are the bytes of the others.
        """
        rows.written = 0
        if COMPILED and self._codec is None:  # pragma: no cover - coverage sees no C
            partition_count = topic.partition_count
            name = rows.topic
            while row < end and rows.read(row):
                if rows.topic is not name or rows.size > most or rows.headers_size != 1:
                    break
                place = rows.partition
                if place < 0:
                    if rows.key_size < 0 or not hashes:
                        break
                    place = (hash_octets(rows.key, rows.key_size) & 0x7FFFFFFF) % partition_count
                elif place >= partition_count:
                    break
                if not put_row(topic, place, rows, row):
                    break
                rows.written += rows.size
                row += 1
        return row

    def _count(self, topic: TopicState, batch: ProducerBatch, before: int) -> None:
        """The sticky batch has grown from `before` bytes."""
        size = batch.size - before
        if self._codec is not None:
            size = batch.on_the_wire(size)
        topic.unsaid += size
        # Of a batch that is stayed in, the partitioner hears when it is closed.
        if topic.unsaid >= topic.room and not (topic.stays and batch.ripe):
            self._tell(topic, batch)

    def _tell(self, topic: TopicState, batch: ProducerBatch) -> None:
        """Let the partitioner know what the sticky batch has got, and perhaps choose anew."""
        size, topic.unsaid = topic.unsaid, 0
        partitioner = topic.partitioner
        if partitioner.update(batch.partition, size, topic.view, batch.ripe):
            topic.sticky = None
        else:
            topic.room = partitioner.room(batch.ripe)

    def _unstick(self, topic: TopicState) -> None:
        """Ask the partitioner for the next record's partition: it is to know all of this one."""
        batch = topic.sticky
        if batch is not None:
            # Whatever the batch is now, with so little there was no choice to make.
            topic.partitioner.update(batch.partition, topic.unsaid, topic.view, False)
            topic.unsaid = 0
            topic.sticky = None

    def append(
        self,
        topic: TopicState,
        partition: int,
        timestamp: int,
        key: Any,
        value: Any,
        headers: bytes,
        now: float,
        granted: int = 0,
    ) -> Delivery | None:
        """Add a record. `partition` -1 lets the sticky partitioner choose.

        Returns None if a new batch is needed and the pool has no memory for it now. With
        `granted` bytes (`batch_bytes`), reserved by the caller, it succeeds, and what is not
        needed of them goes back to the pool.
        """
        if not topic.known:
            topic = self._revive(topic)
        sticky = partition < 0
        if sticky and not (topic.stays and topic.sticky is not None and topic.sticky.ripe):
            self._unstick(topic)
        while True:
            if sticky:
                partition = topic.partitioner.peek(topic.view)
            queue = topic.queues[partition]
            if queue is None:
                queue = self._new_queue(topic, partition, now)
            batch = queue.open
            if batch is not None:
                before = batch.estimated_size()
                delivery = batch.try_append(timestamp, key, value, headers)
                if delivery is None:
                    size = batch_upper_bound(key, value, headers) - BATCH_OVERHEAD
                    memory = batch.memory
                    if self._grow(queue, batch, size, now, granted):
                        try:
                            delivery = batch.try_append(timestamp, key, value, headers)
                        finally:
                            if delivery is not None:
                                granted = 0
                            elif granted:
                                self._returned -= memory + granted - batch.memory
                                self._charge(batch, memory)
                                batch.widen(memory, batch.ripe)
                    elif (
                        batch.ripe
                        and not granted
                        and batch.size + size <= topic.most_bytes
                        and now < batch.created_at + self._grows_for
                    ):
                        # It may leave, or grow by what this record will get.
                        self._refused(queue, size, now)
                        return None
                if delivery is not None:
                    if sticky:
                        self._produced(topic, queue, batch, batch.estimated_size() - before, now)
                    if not batch.ripe and batch.is_full():
                        self._close_tail(queue, now)
                    if granted:
                        self._returned += granted
                    return delivery
                if topic.stays and self._adaptive and now >= topic.load_at:
                    self._update_load(topic, now)
                self._close_tail(queue, now)
            if not sticky:
                break
            # Every batch of this queue is full: a switch that was put off until then
            # happens here (KIP-794), or has happened.
            partitioner = topic.partitioner
            switched = partitioner.update(partition, 0, topic.view, True)
            if not switched and partitioner.peek(topic.view) == partition:
                break
            # Whether the next one is somebody's who waits was not asked.
            if not granted and self._memory.waiting and not self.move_on(topic):
                self._refused(queue, 0, now)
                return None
        size = self.batch_bytes(key, value, headers)
        if not granted and not self._memory.try_reserve(size, queue.share):
            self._refused(queue, size, now)
            return None
        try:
            batch = self._new_batch(queue, size, now)
            delivery = batch.try_append(timestamp, key, value, headers)
        except BaseException:
            # Out of memory, or a value that cannot be read after all. What was granted
            # is taken back by the one who granted it.
            if not granted:
                self._returned += size
            raise
        if granted > size:
            self._returned += granted - size
        self._begin(queue, batch)
        if sticky:
            self._produced(topic, queue, batch, batch.estimated_size(), now)
        if batch.is_full():
            self._close_tail(queue, now)
        else:
            self._touch(queue, now)
        return delivery

    def _grow(
        self, queue: PartitionQueue, batch: ProducerBatch, size: int, now: float, granted: int
    ) -> bool:
        """Make room for `size` bytes more, or refuse. What was `granted` for them is used up then.

        Where records are compressed, a batch may need more memory than `batch_size` until it
        is full. And a full batch that nobody takes yet becomes larger: so batches are small
        where brokers are quick, and large where they are busy. Memory comes in steps that
        double, and only while nobody waits for any; in larger ones while half of it is free, since
        each is a buffer of its own, to be written on its own. (What is compressed is one, and is
        copied.) In one, if so, where the records that come are going to fill it.
        """
        ripe = batch.ripe or batch.estimated_size() + size > batch.write_limit
        if ripe and now >= batch.created_at + self._grows_for:
            # All its records expire with its first one. Where nothing can leave for long, those
            # that come later are to have their own time.
            return False
        size += batch.size
        limit = 2 * batch.memory
        if ripe:
            most = queue.topic.most_bytes
            if size > most:
                return False
            larger = most if queue.topic.stays else min(2 * limit, most)
            if 2 * (self._memory.available - (larger - batch.memory)) >= self._memory.total:
                limit = larger
            if limit > most:
                limit = most
        if limit < size:
            limit = size
        grows = True
        if granted:
            # Nobody is passed over: its turn has come.
            limit = min(limit, batch.memory + granted)
            self._returned += batch.memory + granted - limit
            self._charge(batch, limit)
        elif limit > batch.memory:
            grows = self._memory.try_reserve(limit - batch.memory, queue.share, spares=True)
            if not grows and ripe:
                # As much as a batch that begins gets: else who does not wait is turned away, where
                # only the larger step was too large.
                limit = max(size, min(limit, batch.memory + self._batch_size))
                grows = self._memory.try_reserve(limit - batch.memory, queue.share)
            if grows:
                self._charge(batch, limit)
        if not grows and not ripe:
            return False
        news = ripe and not batch.ripe
        batch.widen(batch.memory, ripe)
        if news:
            queue.topic.room = 0
            self._touch(queue, now)
        return grows

    def _charge(self, batch: ProducerBatch, memory: int) -> None:
        """So many bytes of the pool are the batch's now, and its broker's."""
        share = batch.share
        if share is not None:
            share.held += memory - batch.memory
        batch.memory = memory

    def share_of(self, topic: TopicState, partition: int) -> Any:
        """What the broker of a record has of the memory. `partition` as for `append`."""
        if not topic.known:
            topic = self._revive(topic)
        if partition < 0:
            partition = topic.partitioner.peek(topic.view)
        queue = topic.queues[partition]
        if queue is None:
            # It hears of another leader. Nothing is due in it, so it needs no time.
            queue = self._new_queue(topic, partition, 0.0)
        return queue.share

    def move_on(self, topic: TopicState, size: int = 0) -> bool:
        """Let records without a partition go to a broker that is not held up, if there is one, or
        else to one that does not have much more than others. `size`: what the next one needs.

        Returns whether it is not held up.
        """
        for _ in range(_MOST_ELSEWHERE):
            share = self.share_of(topic, -1)
            if not self._memory.is_held_up(share, size):
                return True
            if topic.partition_count < 2 or not self._memory.has_better(share, size):
                break
            self._unstick(topic)
            # So much makes it choose anew.
            partitioner = topic.partitioner
            partitioner.update(partitioner.peek(topic.view), 2 * self._batch_size, topic.view, True)
        return False

    def batch_bytes(self, key: Any, value: Any, headers: bytes) -> int:
        """How much memory a new batch takes that begins with this record."""
        size = batch_upper_bound(key, value, headers)
        return size if size > self._batch_size else self._batch_size

    def _revive(self, topic: TopicState) -> TopicState:
        """The topic as it is known now: it was dropped while its record waited for memory."""
        state = self.topics.setdefault(topic.name, topic)
        missing = len(topic.queues) - len(state.queues)
        if missing > 0:
            # It came back with fewer partitions. What is for one of the others expires.
            state.queues.extend([None] * missing)
        return state

    def _new_queue(self, topic: TopicState, partition: int, now: float) -> PartitionQueue:
        queue = PartitionQueue(topic, partition)
        topic.queues[partition] = queue
        self._update_leader(queue, now)
        return queue

    def _new_batch(self, queue: PartitionQueue, size: int, now: float) -> ProducerBatch:
        codec = self._codec
        topic = queue.topic
        batch = ProducerBatch.__new__(ProducerBatch)
        batch.begin(
            topic.name,
            queue.partition,
            # 1 promises one record in each batch: what the bound has left over is no room.
            size if self._batch_size > 1 else 1,
            now,
            codec,
            1.0 if codec is None else self.estimator.estimate(topic.name, codec.codec_id),
            size,
            self._loop,
            self.spares,
        )
        batch.order = (queue.next_order,)
        return batch

    def _begin(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Take a new batch in. It has its first record: nobody may meet an empty one."""
        memory, batch.memory = batch.memory, 0
        batch.share = queue.share
        self._charge(batch, memory)
        queue.next_order += 1
        queue.batches.append(batch)
        queue.open = batch
        queue.quiet = False
        queue.topic.queued_batches += 1
        self.incomplete[batch] = None
        self.news = True
        if self._adaptive_linger:
            self.fresh.append(queue)

    def _produced(
        self, topic: TopicState, queue: PartitionQueue, batch: ProducerBatch, size: int, now: float
    ) -> None:
        begins = batch.ripe or batch.count == 1
        if begins and self._adaptive and now >= topic.load_at + _LOAD_MIN_SECONDS:
            self._update_load(topic, now)
        switched = False
        if topic.stays and batch.ripe:
            topic.unsaid += size
        else:
            switched = topic.partitioner.update(queue.partition, size, topic.view, batch.is_full())
        topic.sticky = None if switched else batch
        topic.room = 0

    def _close_tail(self, queue: PartitionQueue, now: float) -> None:
        batch = queue.open
        if batch is not None:
            self._close(queue, batch)
        self._touch(queue, now)

    def _close(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """The open batch takes no more records."""
        batch.close()
        queue.open = None
        if queue.topic.sticky is batch:
            self._unstick(queue.topic)

    def _update_load(self, topic: TopicState, now: float) -> None:
        """Tell the partitioner how long the queues are (KIP-794, adaptive)."""
        count = len(topic.view.partitions)
        topic.load_at = now + count * _LOAD_SECONDS_PER_PARTITION
        if topic.queued_batches < 2 and self._availability_timeout <= 0:
            # At most the batch that just began: nothing to balance.
            topic.partitioner.update_load(None)
            return
        sizes: list[int] = []
        ids: list[int] = []
        started = 0
        for info in topic.view.partitions:
            queue = topic.queues[info.partition]
            if queue is not None:
                started += 1
            if info.leader < 0:
                continue
            queued = 0
            if queue is not None:
                for batch in queue.batches:
                    # One that has grown counts as those it stands for.
                    queued += 1 + batch.size // self._batch_size if batch.ripe else 1
            if queued and self._availability_timeout > 0:
                ready, drained = self._node_times.get(info.leader, (0.0, 0.0))
                if ready - drained > self._availability_timeout:
                    continue
            sizes.append(queued)
            ids.append(info.partition)
        if started < count:
            # As long as some partition was never used, all are tried (as Java does).
            topic.partitioner.update_load(None)
            return
        length = len(sizes)
        # The partitioner learns from the arrays' size that partitions were left out.
        padding = count - length
        topic.partitioner.update_load(sizes + [0] * padding, ids + [-1] * padding, length)

    def node_seen(self, node: int, now: float, *, drained: bool) -> None:
        """A node with ready data could, or could not, take it (availability timeout)."""
        _, last_drain = self._node_times.get(node, (now, now))
        self._node_times[node] = (now, now if drained else last_drain)

    # -- becoming ready --------------------------------------------------------------------

    def _due_at(self, queue: PartitionQueue, now: float) -> float:
        """When the head of the queue may leave; -1 for now, infinity for "an event tells"."""
        head = queue.batches[0]
        if head.compressing or (self._one_in_flight and queue.in_flight):
            return _NEVER
        if head.attempts > 0:
            return head.retry_at if head.retry_at > now else -1.0
        if not head.is_open or head.is_full() or len(queue.batches) > 1:
            return -1.0
        if self.flushing or self.closed or self._memory.is_wanted(queue.share):
            return -1.0
        if queue.quiet:
            return -1.0
        due = head.created_at + self._linger
        return due if due > now else -1.0

    def _touch(self, queue: PartitionQueue, now: float) -> None:
        """Put the queue where it belongs, after anything about it changed."""
        if queue.ready_at is not None:
            return
        if not queue.batches:
            queue.timer = _NEVER
            self._lingering.pop(queue, None)
            self.leaderless.pop(queue, None)
            return
        due = self._due_at(queue, now)
        if due < 0:
            queue.timer = _NEVER  # a loop that has nothing else to do is not woken for it
            self._lingering.pop(queue, None)
            if queue.leader < 0:
                self.leaderless[queue] = None
            elif self._sequences is not None and not self._sequences.may_drain(
                queue.sequences, queue.batches[0]
            ):
                self.leaderless.pop(queue, None)
            else:
                self.leaderless.pop(queue, None)
                line = self.ready.get(queue.leader)
                if line is None:
                    line = self.ready[queue.leader] = OrderedDict()
                line[queue] = None
                queue.ready_at = queue.leader
            self.news = True
            return
        if due < _NEVER:
            if queue.batches[0].attempts == 0:
                self._lingering[queue] = None
                if queue.share is not None and queue.share.hurried:
                    queue.share.hurried = False
            if queue.timer != due:
                queue.timer = due
                self._timer_count += 1
                heapq.heappush(self._timers, (due, self._timer_count, queue))
                if len(self._timers) > self._timer_limit:
                    self._tidy_timers()
                self.news = True

    def settle(self, now: float, is_idle: Callable[[int], bool]) -> bool:
        """Let batches leave that nobody adds to and whose broker has nothing to do.

        Called once per turn of the loop while there is something `fresh`. A lone record
        leaves after one quiet turn instead of its linger time; a burst grows until it is
        over, then leaves. Where the broker is busy, lingering costs nothing and saves
        requests. Returns whether to call again in the next turn.
        """
        growing: list[PartitionQueue] = []
        fresh, self.fresh = self.fresh, growing
        for queue in fresh:
            batch = queue.open
            if batch is None or queue.ready_at is not None or queue.leader < 0:
                continue
            if batch.count != batch.seen:
                batch.seen = batch.count
                growing.append(queue)
            elif is_idle(queue.leader):
                head = queue.batches[0]
                if head is batch or (
                    head.attempts == 0
                    and (
                        self._sequences is None or self._sequences.may_drain(queue.sequences, head)
                    )
                ):
                    self._close_tail(queue, now)
                else:
                    # Behind what cannot leave. Closed, it would be followed by one for each record.
                    # (What only waits to be compressed can: there, records go on to other
                    # partitions, and as many batches leave in fewer requests.)
                    queue.quiet = True
        return bool(growing)

    def touch_all(self, now: float) -> None:
        """Look at every queue that holds something: the producer id came, or an epoch changed."""
        for topic in self.topics.values():
            for queue in topic.queues:
                if queue is not None and queue.batches:
                    self._touch(queue, now)

    def touch_partitions(self, partitions: Iterable[PartitionSequences], now: float) -> None:
        """Look at the queues whose sequences were renumbered or resolved."""
        for sequences in partitions:
            self._touch(sequences.owner, now)

    def _refused(self, queue: PartitionQueue, size: int, now: float) -> None:
        """There are no `size` bytes for a record of the queue: what has them shall not linger."""
        if self._rushing:
            return
        share = queue.share
        if not self._memory.is_held_up(share, size) or share.called is not None:
            # Who is called back waits for what any broker has.
            self._hurry(now)
        elif not share.hurried:
            share.hurried = True
            self._hurry(now, share)

    def _hurry(self, now: float, share: Any = None) -> None:
        """Nothing lingers any more: memory ran out, a flush began, or we are closing. `share`: or
        one broker has as much of it as it may, and only what is for that does not."""
        self._rushing = True
        for queue in list(self._lingering):
            if share is not None and queue.share is not share:
                continue
            self._lingering.pop(queue, None)
            queue.timer = _NEVER
            if queue.ready_at is None and queue.batches:
                self._close_tail(queue, now)
        self._rushing = False

    def gather(self, node: int, is_new: Callable[[PartitionSequences], bool], now: float) -> None:
        """The next request to `node` adds partitions to a transaction: what lingers for others that
        are new to it goes along. They would have to wait for the answer, and be added by another.

        Not where they are compressed: what is large leaves later than what is gathered, then.
        """
        if self._codec is not None:
            return
        for queue in list(self._lingering):
            if queue.leader == node and queue.ready_at is None and is_new(queue.sequences):
                self._close_tail(queue, now)

    def _tidy_timers(self) -> None:
        # A batch that fills before a long linger time is over leaves its entry behind.
        timers = self._timers
        timers[:] = [entry for entry in timers if entry[2].timer == entry[0]]
        heapq.heapify(timers)
        self._timer_limit = max(_SMALL_HEAP, 2 * len(timers))

    def fire_timers(self, now: float) -> None:
        """Touch the queues whose linger time or backoff is over."""
        timers = self._timers
        while timers and timers[0][0] <= now:
            when, _, queue = heapq.heappop(timers)
            if queue.timer == when:
                queue.timer = _NEVER
                self._touch(queue, now)

    def next_deadline(self, expires_from: float = -_NEVER) -> float:
        """When something must be done if nothing happens before; infinity for never.

        `expires_from`: nothing expires before.
        """
        timers = self._timers
        while timers and timers[0][2].timer != timers[0][0]:
            heapq.heappop(timers)
        deadline = timers[0][0] if timers else _NEVER
        for batch in self.incomplete:
            expiry = batch.created_at + self._delivery_timeout
            if expiry < expires_from:
                expiry = expires_from
            return expiry if expiry < deadline else deadline
        return deadline

    # -- leaving ---------------------------------------------------------------------------

    def drain(self, node: int, max_size: int, now: float) -> list[ProducerBatch]:
        """Take the batches of one request to `node`: at most one per partition, sealed.

        Queues leave the line in turn, and line up again behind the others if they have
        more: no partition starves. A batch that is larger than `max_size` goes alone.
        """
        line = self.ready.get(node)
        if line is None:
            return []
        drained: list[ProducerBatch] = []
        size = 0
        again: list[PartitionQueue] = []
        for _ in range(len(line)):
            queue = next(iter(line))
            head = queue.batches[0] if queue.batches else None
            if head is None or not self._may_leave(queue, head, now):
                del line[queue]
                queue.ready_at = None
                if head is not None:
                    again.append(queue)
                continue
            if drained and size + head.estimated_size() > max_size:
                break
            wanting = head.needs_compression()
            if wanting and self._postpones(head):
                # It may grow until then.
                self.postponed.append(queue)
                queue.passed += 1
                del line[queue]
                queue.ready_at = None
                continue
            if head.is_open:
                self._close(queue, head)
            if wanting and not self._compress(head):
                del line[queue]
                queue.ready_at = None
                continue
            batch_size = head.estimated_size()
            if drained and size + batch_size > max_size:
                break
            try:
                self._take(queue, head, now)
            except Exception:
                if drained:
                    break  # what was taken goes; the next call tells
                raise
            del line[queue]
            queue.ready_at = None
            queue.passed = 0
            size += batch_size
            drained.append(head)
            again.append(queue)
        if not line:
            del self.ready[node]
        for queue in again:
            self._touch(queue, now)
        return drained

    def held_until(self, node: int, now: float) -> float:
        """Until when what is ready for a broker shall wait that has other requests to answer.

        -1 if it is worth a request of its own, or nothing will be added to it. A small one costs
        the broker and us about as much as a large one, and with the next answer leaves all that
        has grown until then. Nothing waits longer than it may linger for that. What is compressed
        does not wait: other threads could be at it.
        """
        line = self.ready.get(node)
        if line is None or not self.pouring or not self._held or len(line) > _WORTH_PARTITIONS:
            return -1.0
        if self.flushing or self.closed or self._memory.is_wanted(self._memory.share(node)):
            return -1.0
        until = now + self._held
        size = 0
        for queue in line:
            if not queue.batches:
                continue
            head = queue.batches[0]
            size += head.size
            due = head.created_at + self._held
            if head.attempts > 0 or due <= now or size >= self._worth:
                return -1.0
            if due < until:
                until = due
        return until

    def _may_leave(self, queue: PartitionQueue, head: ProducerBatch, now: float) -> bool:
        if self._due_at(queue, now) >= 0:
            return False
        return self._sequences is None or self._sequences.may_drain(queue.sequences, head)

    def turned(self, now: float) -> bool:
        """The loop has turned. Returns whether something waited for it."""
        self.compressed_here = False
        self._quick_left = self.quick_bytes
        postponed, self.postponed = self.postponed, []
        for queue in postponed:
            self._touch(queue, now)
        ready = self.ready
        #: Node → how often that queue of it was postponed that was most often. Who was last, first.
        passed: dict[int, int] = {}
        for queue in reversed(postponed):
            node = queue.ready_at
            if node is None:
                continue
            passed[node] = max(passed.get(node, 0), queue.passed)
            if queue.passed >= _OFTEN_PASSED:
                # Behind those whose turn has just been, it would be postponed again. (Always in
                # front, as many batches leave in half as many again requests.)
                ready[node].move_to_end(queue, last=False)
        if len(ready) > 1:
            # The time is used up by the brokers that are served first: each is that in its turn.
            first = sorted(passed, key=passed.__getitem__, reverse=True)
            lines = {node: ready[node] for node in first}
            for node, line in ready.items():
                lines.setdefault(node, line)
            self.ready = lines
        return bool(postponed)

    def _postpones(self, batch: ProducerBatch) -> bool:
        """Whether it is compressed in the next turn: here, but there is no time left in this."""
        size = batch.size
        return self._quick_left < size <= self.quick_bytes and size < _THREAD_BYTES

    def _compress(self, batch: ProducerBatch) -> bool:
        """Compress it here if that is quick; hand it over and return False if it is not."""
        codec = batch.codec
        if codec is None:
            return True
        size = batch.size
        if size > self._quick_left or size >= _THREAD_BYTES:
            batch.compressing = True
            self.to_compress.append(batch)
            return False
        self._quick_left -= size
        self.compressed_here = True
        try:
            if self._clock is None:
                payload = codec.compress(batch.uncompressed())
            else:
                began = self._clock()
                payload = codec.compress(batch.uncompressed())
                self._learn(size, self._clock() - began)
        except Exception:
            # The shell does what is done with a large batch: try again, and give it up
            # (`not_compressed`). Not here, in the middle of a request.
            batch.compressing = True
            self.to_compress.append(batch)
            return False
        self._compressed(batch, payload)
        return True

    def _learn(self, size: int, seconds: float) -> None:
        """So long it took to compress so much."""
        slowness = self._slowness
        slowness += (seconds / size - slowness) * _LEARNING
        self._slowness = max(slowness, _COMPRESSING_SECONDS / self._most_quick)
        allowed = int(_COMPRESSING_SECONDS / self._slowness)
        self.quick_bytes = max(self._least_quick, allowed)

    def _compressed(self, batch: ProducerBatch, payload: bytes) -> None:
        ratio = batch.compressed(payload)
        if batch.codec is not None:
            self.estimator.observe(batch.topic, batch.codec.codec_id, ratio)

    def compressed(self, batch: ProducerBatch, payload: bytes, now: float) -> None:
        """The shell has compressed a batch of `to_compress`."""
        if batch.state != PENDING:
            batch.compressing = False
            batch.release()
            return
        self._compressed(batch, payload)
        self._touch(self._queue(batch), now)

    def not_compressed(self, batch: ProducerBatch, error: Exception, now: float) -> bool:
        """The codec failed for a batch of `to_compress`: it ends. False if it had before."""
        batch.compressing = False
        if batch.state != PENDING:
            batch.release()
            return False
        what = f"could not be compressed: {error!r}"
        return self.give_up(batch, _failure(DeliveryError, batch, what, error, now), now)

    def _take(self, queue: PartitionQueue, batch: ProducerBatch, now: float) -> None:
        if self._sequences is not None:
            self._sequences.assign(queue.sequences, batch)
        batch.seal()
        queue.batches.popleft()
        queue.topic.queued_batches -= 1
        batch.in_flight = True
        batch.sends += 1
        batch.drained_at = now
        batch.sent_to = queue.leader
        batch.sent_leader_epoch = queue.leader_epoch
        queue.in_flight.append(batch)

    def _queue(self, batch: ProducerBatch) -> PartitionQueue:
        topic = self.topics[batch.topic]
        queue = topic.queues[batch.partition]
        if queue is None:
            raise AssertionError("a batch has a queue")
        return queue

    # -- answers ---------------------------------------------------------------------------

    def landed(self, batch: ProducerBatch) -> None:
        """The network is done with the batch: its answer came, or its connection ended.

        Comes before what the answer means. Memory of a batch that was given up
        meanwhile is given back only now: the socket could still have read it.
        """
        queue = self._queue(batch)
        batch.in_flight = False
        queue.in_flight.remove(batch)
        if batch.state != PENDING:
            self._free(batch)
            # Nothing else may follow, and with one request in flight the queue waits for
            # this. Any time that has passed will do: its timers fire with the next step.
            self._touch(queue, batch.drained_at)

    def acknowledge(
        self, batch: ProducerBatch, base_offset: int, log_append_time: int, now: float
    ) -> bool:
        """The batch is stored. False if it had been given up before."""
        queue = self._queue(batch)
        if self._sequences is not None and batch.base_sequence >= 0:
            self._sequences.acknowledged(queue.sequences, batch, base_offset)
        # Before anybody is told: a callback may begin a flush or an abort.
        self.incomplete.pop(batch, None)
        fresh = batch.acknowledge(base_offset, log_append_time)
        if fresh:
            self._free(batch)
        self._touch(queue, now)
        return fresh

    def retry(self, batch: ProducerBatch, now: float) -> None:
        """Put the batch back, in its place, to be sent again after its backoff."""
        queue = self._queue(batch)
        batch.attempts += 1
        if queue.leader_epoch > batch.sent_leader_epoch >= 0:
            # The leader moved while the request was under way: no reason to wait.
            batch.retry_at = now
        else:
            batch.retry_at = now + self._retry_backoff.delay(batch.attempts - 1)
        self._insert(queue, [batch])
        self._touch(queue, now)

    def _insert(self, queue: PartitionQueue, batches: list[ProducerBatch]) -> None:
        """Put batches back by their order in the partition, which is the sequences' order."""
        self._leave_line(queue)
        first = batches[0].order
        at = 0
        for other in queue.batches:
            if other.order > first:
                break
            at += 1
        for batch in reversed(batches):
            queue.batches.insert(at, batch)
        queue.topic.queued_batches += len(batches)

    def split(self, batch: ProducerBatch, now: float) -> list[ProducerBatch]:
        """The broker found the batch too large: its records go again, in smaller ones.

        The parts keep the place, the sequences and the age of the batch; they use
        memory outside the pool, and no retry is counted.
        """
        queue = self._queue(batch)
        if batch.codec is not None and batch.payload is not None:
            ratio = len(batch.payload) / max(1, batch.size - 61)
            self.estimator.reset_after_split(batch.topic, batch.codec.codec_id, ratio)
        # What is this large is not tried again.
        queue.topic.most_bytes = min(queue.topic.most_bytes, batch.size // 2)
        places = batch.divided(self._batch_size)
        parts = [part for _, part in places]
        # What takes memory, and may find none, comes before the batch is no longer PENDING: it can
        # be failed until then.
        rest = list(self.incomplete)
        at = rest.index(batch)
        rest[at : at + 1] = parts
        incomplete = OrderedDict.fromkeys(rest)
        batch.split_into(places)
        self.incomplete = incomplete
        if self._sequences is not None:
            self._sequences.split(queue.sequences, batch, parts)
        self._free(batch)
        self._insert(queue, parts)
        self._touch(queue, now)
        return parts

    def fail(self, batch: ProducerBatch, failure: Failure, now: float) -> bool:
        """The batch ends here, as a broker's answer wants it. False if it had ended before."""
        queue = self._queue(batch)
        if self._sequences is not None:
            if batch.maybe_written:
                # The batches behind it may be stored, too: they must ask under the
                # sequences that the broker knows before anything is renumbered.
                self._sequences.expired(queue.sequences, batch)
            else:
                self._sequences.rejected(queue.sequences, batch)
        fresh = self._end(batch, failure)
        self._touch(queue, now)
        return fresh

    def _end(self, batch: ProducerBatch, failure: Failure) -> bool:
        # Before anybody is told: a callback may begin a flush or an abort.
        self.incomplete.pop(batch, None)
        try:
            if self._on_failed is not None and batch.state == PENDING:
                self._on_failed(batch, failure)
        finally:
            # Whatever that raises: nobody would end it later, and who waits for it would for ever.
            fresh = batch.fail(failure)
            if fresh:
                self._free(batch)
        return fresh

    def _free(self, batch: ProducerBatch) -> None:
        """The one place where a batch's memory is given back; see `give_back`."""
        if batch.in_flight:
            return
        if not batch.compressing:
            batch.release()
        self._returned += batch.memory
        self._charge(batch, 0)

    def give_back(self) -> None:
        """Hand freed memory to the pool, and so to those who wait for it."""
        while self._returned:
            size, self._returned = self._returned, 0
            self._memory.release(size)

    # -- giving up -------------------------------------------------------------------------

    def has_expired(self, now: float) -> bool:
        """Whether the delivery timeout of a batch is over."""
        for batch in self.incomplete:
            return batch.created_at + self._delivery_timeout <= now
        return False

    def expire(self, now: float, in_flight: bool = True) -> list[ProducerBatch]:
        """Fail the batches whose delivery timeout is over; returns them.

        `in_flight`: those, too, that a broker has not answered for.
        """
        expired: list[ProducerBatch] = []
        for batch in self.incomplete:
            if batch.created_at + self._delivery_timeout > now:
                break
            if in_flight or not batch.in_flight:
                expired.append(batch)
        given_up: list[ProducerBatch] = []
        failure: Exception | None = None
        for batch in expired:
            try:
                if self.give_up(batch, self._expiry(batch, now), now):
                    given_up.append(batch)
            except Exception as error:
                failure = error  # the others have their end all the same
        if failure is not None:
            raise failure
        return given_up

    def give_up(self, batch: ProducerBatch, failure: Failure, now: float) -> bool:
        """End a batch that no broker has decided about. False if a callback was faster."""
        if batch.state != PENDING:
            return False
        queue = self._queue(batch)
        if self._sequences is not None:
            self._sequences.expired(queue.sequences, batch)
        self._unqueue(queue, batch)
        self._end(batch, failure)
        self._touch(queue, now)
        return True

    def _unqueue(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        if batch.in_flight:
            return
        self._leave_line(queue)
        try:
            queue.batches.remove(batch)
        except ValueError:
            return  # a failure has left it nowhere: here is its end
        queue.topic.queued_batches -= 1
        if queue.open is batch:
            self._close(queue, batch)

    def _expiry(self, batch: ProducerBatch, now: float) -> Failure:
        age_ms = round((now - batch.created_at) * 1000)
        limit_ms = round(self._delivery_timeout * 1000)
        cause = batch.last_error
        if batch.in_flight:
            what = "the broker has not answered the request that carries it"
        elif batch.sends:
            failed = "the attempt" if batch.sends == 1 else f"the last of {batch.sends} attempts"
            what = f"{failed} failed with: {cause}"
        else:
            cause = self._trouble()
            if cause is not None:
                what = f"it was never sent: {cause}"
            elif self._queue(batch).leader < 0:
                what = "it was never sent: the partition has no leader, or the topic is gone"
            else:
                what = "it was never sent: no connection to the leader had room"
        what = (
            f"expired {age_ms} ms after their batch was created: {what} "
            f"(delivery_timeout_ms={limit_ms})"
        )
        code = getattr(cause, "code", None)
        return _failure(DeliveryTimeout, batch, what, cause, now, code)

    def abort(
        self,
        reason: str,
        cause: BaseException | None,
        now: float,
        keep: Callable[[ProducerBatch], bool] = lambda batch: False,
    ) -> list[ProducerBatch]:
        """Fail every batch that has no end yet and is not to be kept; returns them."""
        aborted: list[ProducerBatch] = []
        for batch in list(self.incomplete):
            if keep(batch):
                continue
            failure = _failure(AbortedError, batch, f"were given up: {reason}", cause, now)
            if self.give_up(batch, failure, now):
                aborted.append(batch)
        return aborted

    # -- flush and close -------------------------------------------------------------------

    def begin_flush(self, fence: Fence, now: float) -> None:
        """Nothing lingers until `end_flush`; `fence` is behind all batches of now."""
        self.flushing += 1
        for batch in self.incomplete:
            fence.remaining += 1
            batch.add_fence(fence)
        self._hurry(now)

    def end_flush(self) -> None:
        """The flush is over, or was given up."""
        self.flushing -= 1

    def close(self, now: float) -> None:
        """Nothing lingers any more; the caller appends nothing from now on."""
        self.closed = True
        self._hurry(now)

    def sequences_of(self, batch: ProducerBatch) -> PartitionSequences:
        """The numbers of the batch's partition."""
        return self._queue(batch).sequences


def _with_room(topic: TopicState, partition: int, size: int) -> ProducerBatch | None:
    """The open batch that the next record goes to, if that takes no more than writing."""
    if partition < 0:
        batch = topic.sticky
        if batch is None:
            batch = _switched(topic)
    else:
        queue = topic.queues[partition]
        if queue is None:
            return None
        batch = queue.open
    if batch is None or not batch.is_open:
        return None
    # What fills it exactly takes the long way, too.
    if batch.size + size + _MOST_ADDED < batch.easy:
        return batch
    return batch if batch.has_room(size + _MOST_ADDED + 1) else None


def _switched(topic: TopicState) -> ProducerBatch | None:
    """The open batch of the partition that the sticky partitioner has turned to."""
    queue = topic.queues[topic.partitioner.peek(topic.view)]
    if queue is not None:
        topic.sticky = queue.open
        topic.room = 0
    return topic.sticky
