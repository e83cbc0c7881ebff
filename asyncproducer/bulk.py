"""Sending in bulk: `send_many` and `send_table`, as rows that go in as far as nothing waits.

`Intake.enter_rows` takes in what is plain, in one loop without an object per record. The row
at which it stops goes the way of a single record: it waits in the lines in which all wait, or
gets the error that a single one would get. Then the loop goes on behind it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from asyncproducer import arrow
from asyncproducer.core.bulk import Objects, gather
from asyncproducer.core.delivery import ACKNOWLEDGED, Delivery, Outcome
from asyncproducer.core.transactions import SEND
from asyncproducer.errors import (
    AuthorizationError,
    BufferTimeout,
    IllegalStateError,
    InvalidTopic,
    KafkaError,
    MetadataTimeout,
    SerializationError,
    again,
)
from asyncproducer.intake import REFUSALS
from asyncproducer.records import BatchResult, OffsetRange, Record, TopicPartition

if TYPE_CHECKING:
    from asyncproducer.core.bulk import Rows, Table
    from asyncproducer.intake import Intake
    from asyncproducer.net.buffer_pool import BufferPool
    from asyncproducer.producer import Producer

__all__ = ["Sending", "TableResult"]

#: How many records are taken from an iterable at once: as many as have about so many bytes, or as
#: come in so long. What was taken is in memory; what a list has, is there anyway.
_CHUNK_BYTES = 262_144
_LARGEST_CHUNK = 1000
_CHUNK_S = 0.0005

#: How many records of a list share their bookkeeping. Memory for it is made before them: 0.2 ms.
_LARGEST_OF_LIST = 100_000

#: What an iterator gives that has nothing more.
_END: Any = object()

#: Else another thread could free an item of a list while C reads it.
_HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()

#: How many records share their bookkeeping that come one by one, or no more than a few at a time.
_ROOM = 256
_FEW = 64

#: Who had to wait for memory goes on when one in so many bytes of it is free, or after so many
#: pauses.
_SHARE = 8
_PAUSES = 10
_PAUSE_S = 0.005

#: Who has so much in memory, his own or not (the latter), goes on when it is no more than so much
#: (the former). It is some times what brokers take at once; more would be memory that is new to the
#: process, in which others would have to wait behind it.
_AHEAD_BYTES = (8 * 1024 * 1024, 16 * 1024 * 1024)
#: The former where one batch is filled after the other, the latter being twice that; where all are
#: filled at once, each would leave before it is large. It is so much for each broker, which works
#: at one batch and has the next one beside it, and what a fast network carries (bytes/s) while an
#: answer is on its way; but no more than `_MOST_STAYING_BYTES` in all. Memory that is used again at
#: once is still in the processor's cache.
_STAYING_BYTES, _STAYING_BYTES_PER_S = 1_500_000, 1e9
_MOST_STAYING_BYTES = 5 * 1024 * 1024
#: Whether a broker has nothing to take any more is looked at so often, as many times as above.
_LONGER_PAUSE_S = 0.01

#: How many records may be refused at once before the loop may turn.
_REFUSED_AT_ONCE = 50


class TableResult:
    """The outcome of a `send_table`.

    It keeps what failed, and sums of the rest: it stays small however many rows there were.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._acknowledged = 0
        self._offsets: dict[TopicPartition, OffsetRange] = {}
        #: Those that have no end yet as far as was looked, in order.
        self._under_way: deque[tuple[int, Table]] = deque()
        #: Those with a row that failed.
        self._failed_parts: list[tuple[int, Table]] = []
        self._failed: list[tuple[int, Exception]] | None = None

    def __len__(self) -> int:
        return self._rows

    @property
    def acknowledged(self) -> int:
        """How many rows are in the log."""
        return self._acknowledged

    @property
    def failed(self) -> list[tuple[int, Exception]]:
        """(row, exception) of the rows that were not acknowledged; the first row is 0."""
        if self._failed is None:
            self._failed = [(row, error) for row, error, _, _ in self._errors()]
        return self._failed

    @property
    def offsets(self) -> dict[TopicPartition, OffsetRange]:
        """Where the acknowledged rows are: first and last offset, and their number."""
        return dict(self._offsets)

    def errors_table(self) -> Any:
        """The rows that failed, as a pyarrow.Table.

        Its columns: `row` (from 0), `topic`, `partition` (null where none was chosen), `error`
        (the name of the exception's class), `message`, `persisted` ("no", "maybe", "yes").
        """
        return arrow.errors_table(self._errors())

    def _look(self) -> None:
        """Somebody hears of what failed, if not of each row."""
        for _, part in self._failed_parts:
            part.look()

    def _errors(self) -> Iterator[tuple[int, Exception, Any, Any]]:
        for first, part in self._failed_parts:
            for row in part.failures():
                yield (first + row, *part.error(row))

    def _begin(self, rows: Table) -> None:
        self._under_way.append((self._rows, rows))
        self._rows += rows.count

    def _next(self) -> Delivery | None:
        """What to wait for before `_settle` can go on; None when all rows have their end."""
        return self._under_way[0][1].unfinished() if self._under_way else None

    def _settle(self) -> None:
        """Count what has its end, and keep of it only what failed."""
        while self._under_way and self._under_way[0][1].unfinished() is None:
            first, part = self._under_way.popleft()
            for outcome, low, high, count in part.tally():
                if outcome.state == ACKNOWLEDGED and count:
                    self._acknowledged += count
                    self._add(outcome, low, high, count)
            if not part.clean():
                self._failed_parts.append((first, part))

    def _add(self, outcome: Outcome, low: int, high: int, count: int) -> None:
        place = TopicPartition(outcome.topic, outcome.partition)
        base = outcome.base_offset
        first, last = (-1, -1) if base < 0 else (base + low, base + high)
        known = self._offsets.get(place)
        if known is not None:
            first = known.first if first < 0 or 0 <= known.first < first else first
            last = max(known.last, last)
            count += known.records
        self._offsets[place] = OffsetRange(first, last, count)

    def __repr__(self) -> str:
        return (
            f"<TableResult {self._acknowledged} acknowledged, "
            f"{self._rows - self._acknowledged} failed>"
        )


class Asking:
    """Around what runs the caller's own code: whatever that raises, the rest is not sent."""

    __slots__ = ("_refused",)

    def __init__(self, refused: Callable[[BaseException], None]) -> None:
        self._refused = refused

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # One who is cancelled has not failed; see `Producer.send_many`.
        if isinstance(error, Exception):
            self._refused(error)


class Sending:
    """One send_many or send_table.

    It remembers what a record has waited for in vain, and does not wait for that again until
    it is there. Else each of a million records would wait `max_block_ms` for the same topic.
    """

    def __init__(self, producer: Producer[Any, Any], *, by_record: bool) -> None:
        self._producer = producer
        intake = producer._intake
        #: Which transaction it began in; 0 before the first.
        self._opening = 0 if intake is None else intake.openings
        #: Whether as much as `_staying` tells has once been in memory: large batches, one after the
        #: other.
        self._abounds = False
        #: Whether `enqueue` is to see each of them.
        self._by_record = by_record
        self.asking = Asking(self.refused)
        #: Topic → the error of the record that waited for it in vain.
        self._topics: dict[str, KafkaError] = {}
        #: The error of the record that waited for memory in vain, and how much was free then.
        self._memory: BufferTimeout | None = None
        self._free = 0
        #: How many records were refused because of this.
        self._refused = 0
        #: The error that the last of them got, and the one that it repeats.
        self._repeated: tuple[KafkaError, KafkaError] | None = None

    async def many(
        self, topic: str | None, records: Iterable[Any] | AsyncIterable[Any]
    ) -> BatchResult:
        """Take all records in, and wait until they have their end."""
        parts: list[Objects] = []
        if isinstance(records, AsyncIterable):
            with self.asking:
                entries = aiter(records)
            while True:
                with self.asking:
                    record = await anext(entries, _END)
                if record is _END:
                    break
                if not parts or parts[-1].count == _ROOM:
                    parts.append(Objects([], topic, _ROOM))
                rows = parts[-1]
                rows.add(record)
                await self._take(topic, rows, rows.count - 1)
        else:
            try:
                iterator = iter(records)
            except TypeError as error:
                wrong = TypeError(
                    f"records is of type {type(records).__name__}, not an iterable of records"
                )
                raise wrong from error
            except BaseException as error:
                self.refused(error)
                raise
            if type(records) in (list, tuple):
                await self._many_of(topic, parts, _listed(records))
            else:
                await self._many_from(topic, parts, iterator)
        for rows in parts:
            while (delivery := rows.unfinished()) is not None:
                await _ended(delivery)
        return BatchResult(parts)

    async def _many_of(self, topic: str | None, parts: list[Objects], items: list[Any]) -> None:
        """The list is read where it is: to copy it costs nearly as much as to write the records."""
        taken = 0
        while taken < len(items):  # as it is then
            rows = Objects(items, topic, min(len(items) - taken, _LARGEST_OF_LIST), taken)
            parts.append(rows)
            await self._take(topic, rows, 0)
            taken += rows.count

    async def _many_from(
        self, topic: str | None, parts: list[Objects], iterator: Iterator[Any]
    ) -> None:
        clock = asyncio.get_running_loop().time
        broken: BaseException | None = None
        shared: Objects | None = None
        while broken is None:
            items: list[Any] = []
            try:
                gather(iterator, items, _LARGEST_CHUNK, _CHUNK_BYTES, _CHUNK_S, clock)
            except BaseException as error:
                # Behind those that came before it. Nobody was cancelled: there is no await.
                broken = error
            if not items:
                break
            if len(items) > _FEW:
                shared, rows, first = None, Objects(items, topic), 0
                parts.append(rows)
            else:
                # Of who gives few at a time, each few shall not have a bookkeeping of their own.
                if shared is None or shared.count + len(items) > _ROOM:
                    shared = Objects([], topic, _ROOM)
                    parts.append(shared)
                rows, first = shared, shared.count
                for item in items:
                    rows.add(item)
            await self._take(topic, rows, first)
        if broken is not None:
            self.refused(broken)
            raise broken

    async def table(
        self, columns: arrow.Columns, reader: arrow.Reader, rest: AsyncIterator[Any] | None
    ) -> TableResult:
        """Take all rows of a reader in, then of tables as they come, and wait for their end."""
        result = TableResult()
        await self._take_batches(columns, reader, result)
        if rest is not None:
            while True:
                with self.asking:
                    table = await anext(rest, _END)
                    if table is _END:
                        break
                    reader = arrow.open_table(table)
                await self._take_batches(columns, reader, result)
            result._settle()  # what had its end while the next table was waited for
        while (delivery := result._next()) is not None:
            await _ended(delivery)
            result._settle()
        return result

    async def _take_batches(
        self, columns: arrow.Columns, reader: arrow.Reader, result: TableResult
    ) -> None:
        intake = self._producer._intake
        if intake is not None and intake.is_over():
            await intake.breathe()  # an empty table has no rows at all
        tables = columns.tables(reader)
        while True:
            with self.asking:
                rows = next(tables, None)
            if rows is None:
                break
            result._begin(rows)
            await self._take(None, rows, 0)
            result._settle()

    async def _take(self, topic: str | None, rows: Rows, row: int) -> None:
        """Buffer the rows from `row` on."""
        intake = self._producer._intake
        # To make the rows may have taken longer than to take them in.
        if intake is not None and intake.is_over():
            await intake.breathe()
        rows.abound = self._abounds
        pauses = 0
        while not rows.ends(row):
            if intake is not None and intake.openings != self._opening:
                raise IllegalStateError(
                    "these rows were not sent in the transaction that is open now: what is left "
                    "of them is not sent"
                )
            if intake is not None and not self._by_record:
                if intake.spent:
                    await intake.breathe()
                if self._memory is not None:
                    self._look_at_memory()
                elif pauses < _PAUSES:
                    full = self._producer._pool
                    used = full.total - full.available
                    if not rows.abound and used >= _STAYING_BYTES and used >= self._staying():
                        rows.abound = self._abounds = True
                    if rest := self._far_ahead(intake, rows, used, again=pauses > 0):
                        pauses += 1
                        await full.rest(_LONGER_PAUSE_S, full.total - rest)
                        continue
                pauses = 0
                first = row
                row = intake.enter_rows(rows, row)
                if rows.ends(row):
                    break
                if row > first and intake.spent:
                    continue  # it stopped so that the loop turns
            pool = None if intake is None else self._producer._pool
            waited = 0.0 if pool is None else pool.waited_seconds
            await self._take_one(topic, rows, row)
            row += 1
            if pool is not None and pool.waited_seconds != waited:
                await self._more_room(pool)
        rows.drop()

    def _far_ahead(self, intake: Intake, rows: Rows, used: int, *, again: bool) -> int:
        """How much may be in memory, where now are `used` bytes, when it goes on; 0: at once.

        As long as more would do nothing for the brokers: no one is without something to take.
        `again`: it was so, and is until some of it has left.
        """
        if rows.stay:
            if used < _STAYING_BYTES:
                return 0  # it is never less, and this is asked for each record of some iterables
            little = self._staying()
            much = 2 * little
        else:
            little, much = _AHEAD_BYTES
        if used < (little if again else much) or self._producer._pool.closed:
            return 0
        return 0 if self._producer._cluster.hungry(intake.accumulator.ready) else little

    def _staying(self) -> int:
        """Where one batch is filled after the other: so much, or twice that, keeps brokers busy."""
        trips = self._producer._cluster.round_trips()
        if not trips:
            return _MOST_STAYING_BYTES
        seconds = sum(trips)
        return int(
            min(_MOST_STAYING_BYTES, _STAYING_BYTES * len(trips) + _STAYING_BYTES_PER_S * seconds)
        )

    async def _more_room(self, pool: BufferPool) -> None:
        """Memory was waited for, and comes back by the batch: wait for that of several.

        What is buffered keeps the brokers busy much longer, and to be woken costs as much as
        thousands of rows. Not while others wait as well: they would pass.
        """
        for _ in range(_PAUSES):
            if pool.closed or pool.waiting or pool.available * _SHARE >= pool.total:
                return
            await pool.rest(_PAUSE_S)

    async def _take_one(self, topic: str | None, rows: Rows, row: int) -> None:
        record = rows.record(row)
        partition: int | None = None
        try:
            if type(record) is Record:
                partition = record.partition
                if topic is None:
                    topic = record.topic
                elif record.topic and record.topic != topic:
                    raise InvalidTopic(
                        f"a Record for topic {record.topic!r} in a send_many to {topic!r}: give "
                        "None as the topic for all, and each Record goes to its own"
                    )
            elif topic is None:
                raise InvalidTopic("without a topic for all, each record must be a Record")
            if self._topics or self._memory is not None:
                error = await self._still_vain(topic, partition, alike=type(rows) is not Objects)
                if error is not None:
                    rows.refuse(row, error, topic, partition)
                    await self._has_refused()
                    return
            if type(record) is Record:
                delivery = await self._producer.enqueue(
                    topic,
                    record.value,
                    key=record.key,
                    headers=record.headers,
                    partition=record.partition,
                    timestamp=record.timestamp,
                )
            else:
                delivery = await self._producer.enqueue(topic, record)
        except REFUSALS as error:
            if isinstance(error, BufferTimeout):
                self._memory = error
                self._free = self._producer._pool.available
            elif isinstance(error, (MetadataTimeout, AuthorizationError)) and topic is not None:
                self._topics[topic] = error
            self.refused(error)
            # Without the frames that it has come through, which have the record.
            rows.refuse(row, error.with_traceback(None), topic, partition)
            await self._has_refused()
        except (KafkaError, MemoryError, AssertionError):
            raise
        except Exception as error:
            if type(rows) is not Objects:
                raise
            # The caller's own headers or time zone raised it: that is this record's alone.
            wrong = SerializationError(f"to read the record raised {type(error).__name__}")
            wrong.__cause__ = error.with_traceback(None)
            self.refused(wrong)
            rows.refuse(row, wrong, topic, partition)
            await self._has_refused()
        else:
            rows.placed(row, delivery)

    async def _has_refused(self) -> None:
        """Let others run: a record that is refused waits for nothing."""
        self._refused += 1
        if self._refused % _REFUSED_AT_ONCE == 0:
            await asyncio.sleep(0)

    def refused(self, error: BaseException) -> None:
        """A record is not sent, or none of a table's: no transaction is committed without it."""
        intake = self._producer._intake
        if intake is not None and intake.openings == self._opening:
            self._producer._lost(error)

    def _look_at_memory(self) -> None:
        """Is there more than when it was waited for in vain?"""
        free = self._producer._pool.available
        if free > self._free or free >= self._producer._ample:
            self._memory = None  # the brokers go on: there is something to wait for

    async def _still_vain(
        self, topic: str, partition: int | None, *, alike: bool
    ) -> KafkaError | None:
        """The error of a record that would wait for what an earlier one waited for in vain.

        `alike`: it may be the same object for several records in succession.
        """
        producer = self._producer
        # What is no str is refused for that, and may be no key of a dict.
        error: KafkaError | None = self._topics.get(topic) if type(topic) is str else None
        if error is not None:
            view = producer._metadata.topic(topic)
            if view is None or (type(partition) is int and partition >= view.partition_count):
                # It may appear yet, for records that come later.
                producer._cluster.add_topic(topic)
                producer._cluster.request_update_for_topic(topic)
            else:
                error = None
        if error is None:
            self._look_at_memory()
            error = self._memory
        if error is None:
            return None
        producer._check_usable(SEND)
        producer._on_refused(topic)
        if alike and self._repeated is not None and self._repeated[1] is error:
            return self._repeated[0]
        fresh = again(error)
        fresh.args = (f"as with an earlier record of this call: {error}",)
        self._repeated = (fresh, error)
        return fresh


def _listed(records: Any) -> list[Any]:
    """As a list that no other thread changes while one of its items is written."""
    return records if type(records) is list and _HAS_GIL else list(records)


async def _ended(delivery: Delivery) -> None:
    waiter = delivery.waiter()
    if waiter is not None:
        await waiter
