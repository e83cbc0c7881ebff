"""`format("asyncproducer")`: what Spark calls, and what Spark tells. Needs pyspark 4.1.

For each batch Spark makes a writer in a process beside the driver, where options and schema are
checked, and sends it to the tasks. Those run `write`, and what they return comes back to `commit`:
of the same writer for a job, of another one for a streaming query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from asyncproducer.errors import ConfigError, KafkaError
from asyncproducer.spark.checkpoint import runs_without_batches
from asyncproducer.spark.columns import SinkColumns
from asyncproducer.spark.delivery import Sink, Task
from asyncproducer.spark.exchange import hasten, incoming
from asyncproducer.spark.kept import freeze
from asyncproducer.spark.markers import SinkStopped
from asyncproducer.spark.options import Keying, SinkOptions
from asyncproducer.spark.reports import TaskReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource", "RowsCutShort", "check", "register"]


_CONTINUOUS = (
    "with trigger(continuous=...) Spark commits what it has not given to this sink, nor to any "
    "that is written in Python. Use micro-batches (processingTime)"
)


class RowsCutShort(KafkaError):
    """The rows of a task ended before their end."""


class DefaultSource(DataSource):
    """Kafka topics as a place for rows: `df.write` and `df.writeStream`.

    Options: Kafka's own names, with `kafka.` before them or without; `topic`; and for
    exactly-once delivery `delivery`, `sink.id`, `marker`, `tasks`, `marker.topic`, `job.id`,
    `adopt`, `trust`, `source.bootstrap.servers`. `report.file` gets a line of JSON for each commit.
    Columns: `value`, `key`, `topic`, `partition`, `timestamp`, `headers`, as of the format "kafka".
    """

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "asyncproducer"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Of a batch job. Raises ConfigError; as `Sink.prepare`."""
        if overwrite:
            raise ConfigError('a topic cannot be overwritten: use mode("append")')
        return _Writer(_sink(self.options, schema, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Of a micro-batch. Raises ConfigError; as `Sink.prepare`."""
        checkpoint = self.options.get("checkpointlocation", "")
        if runs_without_batches(checkpoint):
            raise ConfigError(
                f"{_CONTINUOUS}. (By the checkpoint {checkpoint} on this machine no micro-batch "
                "has begun. If the query's is on another file system, name it with its scheme, as "
                "in hdfs:///...)"
            )
        # outputMode("complete") brings all rows again in each batch; Spark's sink sends them, too.
        return _StreamWriter(_sink(self.options, schema, streaming=True))


def register(spark: SparkSession) -> None:
    """Make `format("asyncproducer")` known to a session that has not found it by itself."""
    spark.dataSource.register(DefaultSource)


def check(df: DataFrame, options: Mapping[str, str]) -> None:
    """Refuse now what the sink refuses: these options, which it would be given, or df's columns.

    No row is made and no broker is asked. By itself the sink refuses them when Spark asks it: of a
    query before its first batch, of a job before it begins; but where the job has a shuffle and
    `spark.sql.adaptive.enabled` is true, when the rows are shuffled.

    Raises ConfigError.
    """
    _checked(options, df.schema, streaming=df.isStreaming)


def _checked(
    given: Mapping[str, str], schema: Any, *, streaming: bool
) -> tuple[SinkOptions, SinkColumns]:
    options = SinkOptions.of(dict(given), streaming=streaming)
    return options, SinkColumns.of(schema, options)


def _sink(given: Mapping[str, str], schema: Any, *, streaming: bool) -> Sink:
    hasten()
    sink = Sink(*_checked(given, schema, streaming=streaming))
    sink.prepare()
    freeze()
    return sink


@dataclass
class _Message(WriterCommitMessage):
    """A report on its way to the driver."""

    report: TaskReport
    query: str


def _write(sink: Sink, batches: Iterator[Any]) -> _Message:
    hasten()
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("the sink's write() runs in a task of Spark, and there is none")
    query, batch = "", "0"
    if sink.options.streaming and sink.options.keying is not Keying.NONE:
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            raise SinkStopped(
                f"Spark does not say which batch this is (query {query!r}, batch {batch!r}): "
                "exactly-once delivery needs its streaming.sql.batchId and sql.streaming.queryId; "
                "start the query by df.writeStream, or use delivery=at_least_once"
            )
    task = Task(context.partitionId(), int(batch), query)
    if sink.options.keying is not Keying.NONE:
        batches = _whole(batches)
    report = sink.write(batches, task)
    freeze()
    return _Message(report, query)


def _whole(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches. Raises RowsCutShort where they end since something before the sink has failed.

    Then Spark closes the stream, which Arrow takes for its end, and the task fails behind it: a
    transaction with what has come until then would be committed by then. Behind rows that are
    whole, Spark's worker protocol has more (SpecialLengths.END_OF_STREAM of pyspark.serializers,
    which pyspark.worker.main reads after us).
    """
    stream = incoming()
    yield from batches
    if stream is None:
        raise SinkStopped(
            "Spark's Python worker is another one than this sink knows (pyspark.worker.main has "
            "no infile): it cannot tell whether the rows of a task are whole"
        )
    if not stream.peek(1):
        raise RowsCutShort(
            "Spark ended the rows of this task early: what makes them has failed, see the error of "
            "the task beside this one. Nothing of them is delivered where delivery is exactly once"
        )


class _Writer(DataSourceArrowWriter):
    """Of a batch job."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Deliver the rows of one task."""
        return _write(self._sink, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._sink.commit([each.report for each in _ours(messages)])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Some task is not."""
        self._sink.abort()


class _StreamWriter(DataSourceStreamArrowWriter):
    """Of a micro-batch."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Deliver the rows of one task."""
        return _write(self._sink, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """All tasks are done. Raises ConfigError if they were not asked to write."""
        if None in messages:
            raise ConfigError(_CONTINUOUS)
        found = _ours(messages)
        query = found[0].query if found else ""
        self._sink.commit([each.report for each in found], batchId, query)
        freeze()

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Some task is not done. Also called when commit has raised."""
        self._sink.abort()


def _ours(messages: Sequence[WriterCommitMessage | None]) -> list[_Message]:
    return [cast(_Message, each) for each in messages if each is not None]


freeze()
