"""The driver that is killed: streaming queries from one topic to others, through the sink.

    python query.py SETTINGS.json

It runs until its standard input ends, which is also how it learns that its parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

__all__ = ["JVM_OPTIONS", "Settings", "batches", "done", "target"]

#: JVMs are started all the time: without these, most of it is compiling.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

#: Seconds without an end of the session; then the process ends all the same.
_PATIENCE_S = 10.0

#: Behind so many Arrow batches of a task comes a pause, in seconds, in which the sink's transaction
#: begins; and behind so many one in which it has sent some of them.
_FEW, _BEGUN_S = 2, 0.05
_SOME, _SENT_S = 8, 0.3


@dataclass(frozen=True)
class Settings:
    """What the driver is told, in a file."""

    servers: str
    #: Spark's master.
    master: str
    #: With checkpoints and reports.
    directory: str
    jars: tuple[str, ...]
    source: str
    partitions: int
    delivery: str
    keyings: tuple[str, ...]
    #: Records for one batch, at most.
    admit: int
    #: Rows that a task gets at once: it must get several times some.
    rows: int = 20
    tasks: int = 2

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """From such a file."""
        given = json.loads(path.read_text(encoding="utf-8"))
        tuples = {name: tuple(given[name]) for name in ("jars", "keyings")}
        return cls(**given | tuples)

    def checkpoint(self, keying: str) -> Path:
        """Of one of the queries."""
        return Path(self.directory) / f"checkpoint-{keying}"

    def reports(self, keying: str) -> Path:
        """What its commits have reported."""
        return Path(self.directory) / f"commits-{keying}.jsonl"


def target(keying: str) -> str:
    """The topic that a query writes."""
    return f"crash-{keying}"


def batches(checkpoint: Path) -> int:
    """How many batches a query has committed."""
    return max(_committed(checkpoint), default=-1) + 1


def done(checkpoint: Path) -> dict[int, int]:
    """The next offset of each partition of the source, behind the last batch that is committed."""
    last = max(_committed(checkpoint), default=None)
    if last is None:
        return {}
    lines = (checkpoint / "offsets" / str(last)).read_text(encoding="utf-8")
    (offsets,) = json.loads(lines.splitlines()[-1]).values()
    return {int(partition): offset for partition, offset in offsets.items()}


def _committed(checkpoint: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(checkpoint / "commits") if name.isdigit()]
    except FileNotFoundError:
        return []


# -- the process --------------------------------------------------------------------------------


def _session(settings: Settings) -> SparkSession:
    from pyspark.sql import SparkSession

    class_path = os.pathsep.join(settings.jars)
    options = {
        # So small that what a Python function makes goes on at once, not with the end of the task.
        "spark.buffer.size": "1024",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraClassPath": class_path,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "700m",
        "spark.executor.cores": "1",
        "spark.executor.extraClassPath": class_path,
        "spark.executor.extraJavaOptions": JVM_OPTIONS,
        "spark.executor.memory": "600m",
        "spark.locality.wait": "0",
        # For small batches, and for not many of them: it would cost more than it saves.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(settings.rows),
        "spark.sql.shuffle.partitions": str(settings.tasks),
        "spark.sql.warehouse.dir": f"{settings.directory}/warehouse",
        # Kills follow each other closely.
        "spark.task.maxFailures": "8",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.appName("crash").master(settings.master)
    for name, value in options.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _start(spark: SparkSession, settings: Settings, keying: str) -> StreamingQuery:
    """A query, from where its checkpoint says."""
    read = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.servers)
        .option("subscribe", settings.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.admit)
        .load()
    )
    writer = (
        _rows(read, settings, keying)
        .writeStream.format("asyncproducer")
        .queryName(keying)
        .option("kafka.bootstrap.servers", settings.servers)
        .option("topic", target(keying))
        .option("checkpointLocation", str(settings.checkpoint(keying)))
        .option("report.file", str(settings.reports(keying)))
        # Of who was killed, or hangs, others learn after a while. Here it is short.
        .option("kafka.request.timeout.ms", "5000")
        .option("kafka.transaction.timeout.ms", "15000")
        .option("delivery", settings.delivery)
    )
    if settings.delivery == "exactly_once":
        writer = writer.option("sink.id", target(keying)).option("marker", keying)
        if keying == "group":
            writer = writer.option("tasks", settings.tasks)
    return writer.start()


def _made(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
    """What was read, as it is: a function of the query, which dies behind some of its rows."""
    # hook/sitecustomize.py, which Python imports in Spark's processes.
    from sitecustomize import at  # type: ignore[import-not-found]

    for number, batch in enumerate(batches):
        if number == _FEW:
            time.sleep(_BEGUN_S)
        elif number == _SOME:
            at("making", settle=_SENT_S)
        yield batch


def _rows(read: DataFrame, settings: Settings, keying: str) -> DataFrame:
    read = read.mapInArrow(_made, read.schema)
    from asyncproducer.spark import by_kafka_partition, origin

    if keying == "source":
        return read.select("key", "value", origin(settings.source))
    rows = read.select("key", "value")
    return by_kafka_partition(rows, tasks=settings.tasks, partitions=settings.partitions)


def main(arguments: Sequence[str]) -> int:
    """Run until standard input ends. Returns 1 if a query has failed."""
    settings = Settings.load(Path(arguments[0]))
    asked = threading.Event()

    def wait_for_the_end() -> None:
        os.read(sys.stdin.fileno(), 1)
        asked.set()
        # Whatever still runs in the JVM, it ends with this process.
        time.sleep(_PATIENCE_S)
        os._exit(3)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    spark = _session(settings)
    queries = [_start(spark, settings, keying) for keying in settings.keyings]
    while not asked.wait(0.1) and all(query.isActive for query in queries):
        pass
    if not asked.is_set():
        for query in queries:
            if not query.isActive:
                sys.stderr.write(f"the query {query.name} has ended: {query.exception()}\n")
        sys.stderr.flush()
        # As fast as can be: it is started again.
        os._exit(1)
    for query in queries:
        query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
