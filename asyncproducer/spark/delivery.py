"""What a task does with its rows, and the driver with the tasks' reports. Knows nothing of Spark.

At least once: one producer per process and options sends them, and the task is done when all are
acknowledged. Exactly once: a producer of the unit's own, one transaction; see markers.py.
"""

from __future__ import annotations

import logging
import time
from asyncio import Task as LoopTask
from asyncio import create_task, gather, sleep, timeout
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from asyncproducer.bulk import TableResult
from asyncproducer.errors import (
    ConfigError,
    ErrorCode,
    KafkaError,
    MetadataTimeout,
    ProducerFenced,
    TransactionTimeout,
)
from asyncproducer.producer import Producer
from asyncproducer.records import TopicPartition
from asyncproducer.spark.columns import SinkColumns
from asyncproducer.spark.markers import (
    Action,
    Decision,
    Marker,
    SharedSource,
    SinkStopped,
    Unit,
    check_adopted,
    check_groups,
    check_layout,
    check_sources,
    decide,
    disagreement,
    is_delivered,
    marker_of_source,
)
from asyncproducer.spark.options import Keying, SinkOptions
from asyncproducer.spark.reports import CommitReport, TaskReport
from asyncproducer.spark.rows import (
    Groups,
    Offsets,
    payload_bytes,
    read_of,
    several_sources,
)
from asyncproducer.spark.worker import Feed, worker

__all__ = ["Sink", "Task"]

logger = logging.getLogger("asyncproducer.spark")

#: Seconds: for a producer's end when its transaction failed, for a task of a query that ended,
#: between two looks at the marker that another attempt is to write.
_ABORT_S, _FREE_MS, _LOOK_S = 10.0, 5_000, 0.2
#: The driver says again that the query is alive after so many seconds.
_ALIVE_S = 3600.0

#: When this process has last written the progress of a query, by servers, markers' topic, sink and
#: query.
_told: dict[tuple[str, str, str, str], float] = {}
#: What sinks that it has prepared have in common with later ones, by servers, sink and report file.
_prepared: dict[tuple[str, str, str], tuple[Keying, str, int, int]] = {}


class Task(NamedTuple):
    """Which part of what this is, as Spark tells it."""

    partition: int
    batch: int = 0
    query: str = ""


class _Place(NamedTuple):
    """Where a unit's marker is. The same name is its transactional id."""

    name: str
    partition: TopicPartition


@dataclass(frozen=True)
class Sink:
    """A sink with its options, checked. Picklable."""

    options: SinkOptions
    columns: SinkColumns

    # -- tasks -----------------------------------------------------------------------------

    def write(self, batches: Iterable[Any], task: Task) -> TaskReport:
        """Deliver the rows of one task. Blocks until they are, or raises.

        `batches` are Arrow record batches. Raises SinkStopped where exactly-once delivery cannot
        be kept up; KafkaError, BatchDeliveryError for what goes wrong on the way. In both cases
        nothing is delivered of what is written in a transaction, and another attempt may follow.
        """
        filled = (batch for batch in batches if batch.num_rows)
        if self.options.keying is Keying.NONE:
            return self._write_plainly(filled, task)
        return self._write_once(filled, task)

    def _write_plainly(self, batches: Iterator[Any], task: Task) -> TaskReport:
        async def deliver(feed: Feed) -> TaskReport:
            began = time.monotonic()
            here = worker()
            try:
                producer = await here.producer(self.options)
                before = producer.metrics()
                result, size = await self._send(producer, feed)
            except BaseException:
                await here.forget(self.options)
                raise
            return _report(task, producer, before, began, result, size)

        return worker().feed(batches, deliver)

    async def _send(
        self,
        producer: Producer[Any, Any],
        batches: Feed,
        look: Callable[[Any], Any] = lambda batch: batch,
        at_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> tuple[TableResult, int]:
        """Send what `look` makes of each batch. Returns when all are acknowledged.

        When there is no further batch, what `at_end` returns begins, and is waited for as well.
        """
        size = 0
        ended: LoopTask[None] | None = None

        async def rows() -> AsyncIterator[Any]:
            nonlocal size, ended
            async for each in batches:
                batch = look(each)
                size += payload_bytes(batch, self.columns)
                yield batch
            if at_end is not None:
                ended = create_task(at_end())
            # Nothing follows for which a batch could linger. Its error is that of the rows.
            with suppress(KafkaError):
                await producer.flush()

        try:
            result = await producer.send_table(
                self.options.topic,
                rows(),
                **self.columns.of_table(),  # type: ignore[arg-type]
            )
            if ended is not None:
                await ended
        except BaseException:
            if ended is not None:
                ended.cancel()
                await gather(ended, return_exceptions=True)
            raise
        return result, size

    def _write_once(self, batches: Iterator[Any], task: Task) -> TaskReport:
        # Nobody else is fenced for rows that cannot be made.
        first = next(batches, None)
        batches = chain([] if first is None else [first], batches)
        if self.options.keying is Keying.GROUP:
            return _GroupAttempt(self, task).deliver(batches)
        if first is None:
            return TaskReport(task.partition)  # nothing was read: there is nothing to remember
        return _SourceAttempt(self, task, first).deliver(batches)

    # -- the driver ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before the tasks of a batch begin: what would fail them, or harm. Blocks at most
        `max_block_ms`, and asks nothing when this process has done it before.

        Raises ConfigError, SinkStopped, KafkaError.
        """
        options = self.options
        common = (options.keying, options.marker_topic, options.tasks, self._partitions)
        key = (options.servers, options.sink_id, options.report_file or "")
        if _prepared.get(key) == common:
            return
        if options.report_file is not None:
            try:
                with open(options.report_file, "a", encoding="utf-8"):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"report.file={options.report_file!r} cannot be written on the driver: {error}"
                ) from error
        if options.keying is not Keying.NONE:
            worker().run(self._agree(options.tasks, self._partitions))
        _prepared[key] = common

    @property
    def _partitions(self) -> int:
        """Of how many by_kafka_partition has chosen, where that matters."""
        return self.columns.partitions if self.options.keying is Keying.GROUP else 0

    async def _agree(self, tasks: int, partitions: int) -> None:
        """On the kind of marker, and how rows are grouped, before the first unit is written.

        A replay of the first batch finds markers of some units only.
        """
        place = self.place("driver")
        producer: Producer[Any, Any]
        async with Producer(config=self.options.config(transactional_id=place.name)) as producer:
            await self._find_marker_topic(producer)
            found = await _marker(producer, place)
            adopt = self.options.adopt
            if found is not None:
                # Once for a batch: when it is run again, some groups may be written.
                adopted = adopt is not None and adopt > found.batch
                name = f"sink.id {self.options.sink_id}"
                check_layout(name, found, tasks, partitions, adopted=adopted)
                if found.partitions == partitions:
                    if not self.options.streaming:
                        # So that it does not expire before the units' own. (Queries tell progress.)
                        await self._keep(producer, place, found)
                    return
                last = -1
                for group in range(tasks):
                    written = await _marker(producer, self.place(f"g{group}"))
                    if written is None or adopt is None:
                        continue
                    if written.batch >= adopt:
                        check_layout(f"group {group} of {tasks}", written, tasks, partitions)
                    last = max(last, written.batch)
                if self.options.streaming and adopt is not None and last >= 0:
                    check_adopted(adopt, last)
            batch = self.options.job_id if adopt is None else adopt
            marker = Marker(batch or 0, tasks=tasks, partitions=partitions)
            await self._keep(producer, place, marker)

    async def _keep(self, producer: Producer[Any, Any], place: _Place, marker: Marker) -> None:
        async with producer.transaction():
            await producer.send_offsets({place.partition: marker.packed()}, place.name)

    async def _find_marker_topic(self, producer: Producer[Any, Any]) -> None:
        """It is not created, unless rows go there: with a wrong name there would be no markers."""
        name = self.options.marker_topic
        is_target = name == self.options.topic
        find = producer.partitions_for if is_target else producer._topic_id
        try:
            await find(name)
        except MetadataTimeout as error:
            raise ConfigError(
                f"{'topic' if is_target else 'marker.topic'}={name!r}: there is no such topic, and "
                "markers are kept under its partition 0. If this sink has written under another "
                "one, name that; else create it"
            ) from error

    def commit(
        self, reports: Sequence[TaskReport], batch: int | None = None, query: str = ""
    ) -> CommitReport:
        """All tasks are done. Raises SinkStopped if some unit had no task, or two."""
        number = self._number(batch)
        if self.options.keying is Keying.GROUP:
            missing = sorted(set(range(self.options.tasks)) - {each.task for each in reports})
            if any(each.rows or each.skipped for each in reports) or not reports:
                check_groups(missing, self.options.tasks)
            else:
                # Where Spark sees that there are no rows, it makes a single task of the groups.
                empty = [self.write((), Task(n, number, query)) for n in missing]
                reports = [*reports, *empty]
        elif self.options.keying is Keying.SOURCE:
            self._check_sources(reports, Marker(number, query))
        if self.options.keying is not Keying.NONE and self.options.streaming:
            self._tell_progress(number, query)
        # A job has a number only where markers need one.
        counted = batch if self.options.keying is Keying.NONE else number
        report = CommitReport.of(counted, reports)
        logger.info("committed %s", report)
        if self.options.report_file is not None:
            with open(self.options.report_file, "a", encoding="utf-8") as file:
                file.write(f"{report}\n")
        return report

    def _check_sources(self, reports: Sequence[TaskReport], marker: Marker) -> None:
        named = [(each.source, each.task) for each in reports if each.source]
        try:
            check_sources(named)
        except SharedSource as error:
            for source, tasks in Counter(source for source, _ in named).items():
                if tasks > 1:
                    worker().run(self.stop(source, marker, error))
            raise

    async def stop(self, source: str, marker: Marker, error: SharedSource) -> None:
        """Nobody goes on at this source: with a new checkpoint, rows would be left out."""
        topic, _, partition = source.rpartition("-")
        place = self.place(f"{topic}/{partition}")
        try:
            await self._revise(place, lambda found: replace(found or marker, stopped=True))
        except KafkaError as failed:
            error.add_note(
                f"This could not be kept under sink.id ({failed}): a query with a new checkpoint "
                "and this sink.id would not stop, and leave rows out"
            )

    async def _revise(self, place: _Place, revised: Callable[[Marker | None], Marker]) -> None:
        """Put another marker in the place of the one that is there, if there is one."""
        config = self.options.config(transactional_id=place.name)
        producer: Producer[Any, Any]
        async with Producer(config=config) as producer:
            await self._keep(producer, place, revised(await _marker(producer, place)))

    def abort(self) -> None:
        """The batch failed: end open transactions of its tasks, which would hold readers back.

        As far as that is possible at once; harmless at any time, whatever is committed.
        """
        if self.options.keying is not Keying.GROUP:
            return
        worker().run(self._fence(self.place(f"g{n}").name for n in range(self.options.tasks)))

    async def _fence(self, transactional_ids: Iterable[str]) -> None:
        async def fence(name: str) -> None:
            config = self.options.config(transactional_id=name, max_block_ms=_FREE_MS)
            producer: Producer[Any, Any] = Producer(config=config)
            with suppress(KafkaError):
                await producer.start()
            await producer.close()

        await gather(*map(fence, transactional_ids))

    def _number(self, batch: int | None) -> int:
        job = self.options.job_id
        return (job if batch is None else batch) or 0

    def _tell_progress(self, batch: int, query: str) -> None:
        """That a query is alive, so that a unit without a marker is known to be new.

        Of groups: that what `_agree` has written does not expire.
        """
        options = self.options
        key = (options.servers, options.marker_topic, options.sink_id, query)
        if _told.get(key, -_ALIVE_S) + _ALIVE_S > time.monotonic():
            return
        marker = Marker(batch, query, tasks=options.tasks, partitions=self._partitions)

        def later(found: Marker | None) -> Marker:
            if found is None or found.query != marker.query:
                return marker
            # Never back, as an older checkpoint would have it.
            return replace(marker, batch=max(found.batch, marker.batch))

        worker().run(self._revise(self.place("driver"), later))
        _told[key] = time.monotonic()

    def place(self, unit: str) -> _Place:
        """Where the marker of a unit is."""
        return _Place(
            f"{self.options.sink_id}/{unit}", TopicPartition(self.options.marker_topic, 0)
        )


class _Attempt:
    """One attempt at one unit."""

    def __init__(self, sink: Sink, task: Task, place: _Place) -> None:
        self.sink = sink
        self.task = task
        self.place = place
        self.batch = task.batch if sink.options.streaming else sink.options.job_id or 0

    def deliver(self, batches: Iterator[Any]) -> TaskReport:
        """One transaction, or none if the unit is delivered already. Blocks until that is so."""
        return worker().feed(batches, self._deliver)

    async def _deliver(self, batches: Feed) -> TaskReport:
        began = time.monotonic()
        here = worker()
        options = self.sink.options
        patience = options.config().transaction_timeout_ms / 1000
        producer: Producer[Any, Any] | None = None
        has_begun = is_idle = False
        try:
            producer = await here.transactional(options, self.place.name)
            found, decision = await self._begin(producer)
            if found is not None and decision.action is Action.SKIP:
                await self._look_at_all(batches)
                self.is_done(found)
                is_idle = True
                return self._skipped(began)
            has_begun = True
            before = producer.metrics()
            rows, result, size = await self._transact(
                producer, found, decision.start, batches, patience
            )
            is_idle = True
        except Exception as error:
            waits = await _waits_for_another(producer if has_begun else None, error, patience)
            if isinstance(error, SharedSource):
                await self._stop_source(error)
            if not waits or isinstance(error, SinkStopped):
                raise
            # What the other attempt delivers is known from all of them.
            await self._look_at_all(batches)
            try:
                await self._await_marker(time.monotonic() + waits, error)
            except SharedSource as shared:
                await self._stop_source(shared)
                raise
            return self._skipped(began)
        finally:
            if producer is not None:
                # With a transaction that has no end nobody begins the next one.
                await (here.keep(options, producer) if is_idle else producer.close(_ABORT_S))
        report = _report(self.task, producer, before, began, result, size)
        return replace(report, source=self.source, skipped=self.rows - rows)

    async def _stop_source(self, error: SharedSource) -> None:
        marker = Marker(self.batch, self.task.query, self.task.partition)
        await self.sink.stop(self.source, marker, error)

    async def _look_at_all(self, batches: Feed) -> None:
        async for each in batches:
            self.look(each)

    def _skipped(self, began: float) -> TaskReport:
        return TaskReport(
            self.task.partition,
            source=self.source,
            skipped=self.rows,
            seconds=time.monotonic() - began,
        )

    async def _begin(self, producer: Producer[Any, Any]) -> tuple[Marker | None, Decision]:
        """All earlier attempts are fenced: see what they have done, and begin if that is less."""
        unit, found = await gather(self.unit(producer), _marker(producer, self.place))
        progress = None
        if found is None:
            progress = await _marker(producer, self.sink.place("driver"))
        decision = decide(unit, found, progress)
        if decision.action is Action.WRITE:
            await producer.begin_transaction()
        return found, decision

    async def _transact(
        self,
        producer: Producer[Any, Any],
        found: Marker | None,
        start: int,
        batches: Feed,
        patience: float,
    ) -> tuple[int, TableResult, int]:
        written = 0

        def look(batch: Any) -> Any:
            nonlocal written
            kept = self.look(batch, start)
            written += kept.num_rows
            return kept

        def mark() -> Coroutine[Any, Any, None]:
            # The rows may still be on their way: it counts when they do.
            packed = self.marker(found).packed()
            return producer.send_offsets({self.place.partition: packed}, self.place.name)

        result, size = await self.sink._send(producer, batches, look, mark)
        await self._commit(producer, time.monotonic() + patience)
        return written, result, size

    async def _commit(self, producer: Producer[Any, Any], deadline: float) -> None:
        while True:
            try:
                return await producer.commit_transaction()
            except TransactionTimeout:
                # Who gives up here does not know whether it is committed; the next attempt does.
                if time.monotonic() >= deadline:
                    raise

    async def _await_marker(self, deadline: float, error: Exception) -> None:
        """Another attempt has fenced this one: it delivers the unit, or nobody has yet."""
        reader = await worker().producer(self.sink.options)
        while True:
            found = await _marker(reader, self.place)
            if found is not None and self.is_done(found):
                return
            if time.monotonic() >= deadline:
                raise error
            await sleep(_LOOK_S)

    #: How many rows were looked at.
    rows = 0
    #: Where they were read, if that is the unit.
    source = ""

    async def unit(self, producer: Producer[Any, Any]) -> Unit:
        """What is to be delivered."""
        raise NotImplementedError

    def look(self, batch: Any, start: int = 0) -> Any:
        """Check a batch, and return what of it is to be written."""
        raise NotImplementedError

    def marker(self, found: Marker | None) -> Marker:
        """Of what was looked at, in the place of what was found. May raise SinkStopped."""
        raise NotImplementedError

    def is_done(self, found: Marker) -> bool:
        """Whether the marker says that what was looked at is delivered.

        Raises SinkStopped if it was something else.
        """
        raise NotImplementedError


class _GroupAttempt(_Attempt):
    """A group: the rows of one Spark partition."""

    def __init__(self, sink: Sink, task: Task) -> None:
        super().__init__(sink, task, sink.place(f"g{task.partition}"))
        tasks = sink.options.tasks
        if task.partition >= tasks:
            raise SinkStopped(
                f"there are more than tasks={tasks} Spark partitions: write what "
                "by_kafka_partition returns as it is, with the same number of tasks"
            )
        self._groups = Groups(sink.columns, task.partition, tasks)
        self._unit = Unit(
            f"group {task.partition} of {tasks}",
            self.batch,
            task.query,
            task.partition,
            streaming=sink.options.streaming,
            tasks=tasks,
            partitions=sink.columns.partitions,
            adopt=sink.options.adopt,
            trust=sink.options.trust,
        )

    async def unit(self, producer: Producer[Any, Any]) -> Unit:
        return self._unit

    def look(self, batch: Any, start: int = 0) -> Any:
        self._groups.look(batch)
        self.rows += batch.num_rows
        return batch

    def marker(self, found: Marker | None) -> Marker:
        return Marker(
            self.batch,
            self.task.query,
            self.task.partition,
            self._unit.tasks,
            self._unit.partitions,
            self.rows,
            self._groups.routing,
        )

    def is_done(self, found: Marker) -> bool:
        if (found.batch, found.query) != (self.batch, self.task.query):
            return False
        wrong = disagreement(self._unit, found, self.rows, self._groups.routing)
        if wrong is not None:
            raise SinkStopped(wrong)
        return True


class _SourceAttempt(_Attempt):
    """What was read of one Kafka partition."""

    def __init__(self, sink: Sink, task: Task, first: Any) -> None:
        self._source, offsets = read_of(first, sink.columns)
        topic, partition = self._source
        super().__init__(sink, task, sink.place(f"{topic}/{partition}"))
        self._offsets = Offsets()
        self.source = f"{topic}-{partition}"
        self._unit = Unit(
            self.source,
            self.batch,
            task.query,
            task.partition,
            streaming=sink.options.streaming,
            first_offset=int(offsets.min()),
            adopt=sink.options.adopt,
        )

    async def unit(self, producer: Producer[Any, Any]) -> Unit:
        topic, _ = self._source
        options = self.sink.options
        try:
            if options.source_servers is None:
                topic_id = await producer._topic_id(topic)
            else:
                over = {**options.producer, "bootstrap.servers": options.source_servers}
                async with Producer(config=replace(options, producer=over).config()) as source:
                    topic_id = await source._topic_id(topic)
        except MetadataTimeout as error:
            raise SinkStopped(
                f"{self.source}: there is no topic {topic!r} at "
                f"{options.source_servers or options.servers}, where it was read: was it "
                "deleted, or read on another cluster? That is named by source.bootstrap.servers"
            ) from error
        self._unit = replace(self._unit, topic_id=str(topic_id or ""))
        return self._unit

    def look(self, batch: Any, start: int = 0) -> Any:
        here, offsets = read_of(batch, self.sink.columns)
        if here != self._source:
            raise several_sources([self._source, here])
        self.rows += batch.num_rows
        return self._offsets.look(batch, offsets, start)

    def marker(self, found: Marker | None) -> Marker:
        return marker_of_source(self._unit, found, self._offsets.seen)

    def is_done(self, found: Marker) -> bool:
        return is_delivered(self._unit, found, self._offsets.seen)


async def _waits_for_another(
    producer: Producer[Any, Any] | None, error: Exception, patience: float
) -> float:
    """For how many seconds another attempt at the unit may deliver it: 0 if none has begun."""
    if isinstance(error, ProducerFenced):
        return patience
    if producer is None:
        return 0.0
    try:
        # Produce does not tell it for sure, the coordinator does.
        async with timeout(_ABORT_S):
            await producer.abort_transaction()
    except ProducerFenced:
        return patience
    except (KafkaError, TimeoutError):
        pass
    # What it has aborted for another attempt, it takes for ours until that has got its epoch
    # (KIP-890). Or the transaction has taken too long: then nobody delivers.
    return min(_ABORT_S, patience) if _is_of_old_epoch(error) else 0.0


def _is_of_old_epoch(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_of_old_epoch, error.exceptions))
    return isinstance(error, KafkaError) and error.code == ErrorCode.INVALID_PRODUCER_EPOCH


async def _marker(producer: Producer[Any, Any], place: _Place) -> Marker | None:
    found = await producer.committed_offsets(place.name, [place.partition])
    return Marker.unpacked(found[place.partition]) if found else None


def _report(
    task: Task,
    producer: Producer[Any, Any],
    before: dict[str, float],
    began: float,
    result: TableResult,
    size: int,
) -> TaskReport:
    after = producer.metrics()
    if not result.acknowledged:
        after = {}  # the last requests were somebody else's
    return TaskReport(
        task.partition,
        rows=result.acknowledged,
        bytes=size,
        offsets=result.offsets,
        retries=int(after.get("record_retry_total", 0) - before.get("record_retry_total", 0)),
        seconds=time.monotonic() - began,
        latency_ms=after.get("request_latency_avg", 0.0),
        latency_ms_max=after.get("request_latency_max", 0.0),
    )
