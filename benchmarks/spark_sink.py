"""Rows per second of the sink for Spark beside Spark's own, and what exactly once costs.

    pip install "asyncproducer[spark,kafka]" psutil
    python benchmarks/spark_sink.py --json benchmarks/results/spark.json

One real Kafka and one Spark, `local[2]`, which share the cores of this machine. Rows have values of
100 bytes that Spark makes itself, and where there are keys, 16 bytes of them. Each case runs some
times unmeasured, then once a round; who is first rotates. Every run has a topic of its own, whose
end offsets must be what was written (exactly once, where they count transactions as well: the
records that are read as committed).
Spark talks to its Python workers by Unix domain sockets.
"built-in, tuned" is Spark's sink with linger.ms=20 and batch.size=1000000; "asyncproducer, tuned"
this one where Spark does not ask for the size of each Arrow batch after each row, as the queries
and the jobs by groups have it, too (docs/spark-clusters.md, Tuning). Queries are not planned
adaptively either, but for the one whose name says so; "noop" only makes the rows. They go from
Kafka to Kafka: "at least once" with values alone, "same columns" and "exactly once" with one more,
the origin of each row (marker=source), "groups" with a shuffle by partition, which marker=group
needs and at least once is given to compare. Jobs by groups have half the rows, and each value once.
"per core" is by a second of CPU of Spark, its Python workers included; "added" is by a micro-batch,
beside one whose sink is noop. With --defaults the queries alone run, and nothing of this is set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import asyncproducer
from asyncproducer.spark import by_kafka_partition, origin
from asyncproducer.spark.connector import connector_jars
from asyncproducer.testing import KafkaCluster
from asyncproducer.testing.java import spark_java_home

_PARTITIONS = 8
_TUNED = {"kafka.linger.ms": "20", "kafka.batch.size": "1000000"}
#: Spark ends an Arrow batch by rows, and by bytes, which it counts after each row below this.
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_BY_ROWS = str(2**31 - 1)
#: Whether Spark plans what follows a shuffle when that is done.
_ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"
#: Rows in a batch of a query.
_HUGE, _LARGE, _SMALL = 400_000, 100_000, 1_000

_GROUPED = ["built-in", "at least once, groups", "exactly once, groups", "noop"]
#: What takes long, and tells no more of many rows than of fewer.
_NOT_HUGE = ["built-in", "exactly once, groups, adaptive"]
_QUERIES = [
    "at least once",
    "at least once, same columns",
    "exactly once",
    "exactly once, groups",
    "exactly once, groups, adaptive",
    "at least once, groups",
    "built-in",
    "noop",
]

Row = dict[str, Any]


class Bench:
    """A Kafka, a Spark, and the topics of the runs."""

    def __init__(
        self, kafka: KafkaCluster, spark: SparkSession, rows: int, *, defaults: bool
    ) -> None:
        self.kafka = kafka
        self.spark = spark
        self.rows = rows
        self.defaults = defaults
        self._numbers = count()

    def topic(self, name: str, partitions: int = _PARTITIONS) -> str:
        """A new one."""
        topic = f"{name}-{next(self._numbers)}"
        self.kafka.create_topic(topic, partitions=partitions)
        return topic

    def options(self, topic: str) -> dict[str, str]:
        """Of each sink."""
        return {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, "topic": topic}

    # -- jobs ----------------------------------------------------------------------------------

    def job(self, sink: str, *, keyed: bool, grouped: bool = False) -> Row:
        """All rows, once."""
        topic = self.topic("job")
        kind = _kind(sink.partition(", ")[0])
        value = "rpad(string(id), 100, 'x')" if grouped else f"'{'x' * 100}'"
        columns = [f.expr(f"cast({value} as binary)").alias("value")]
        if keyed:
            columns.append(f.expr("cast(string(id + 1000000000000000) as binary)").alias("key"))
        count = self.rows // 2 if grouped else self.rows
        rows = self.spark.range(0, count, 1, 2).select(*columns)
        options = self.options(topic) | (_TUNED if sink == "built-in, tuned" else {})
        exact = sink.startswith("exactly once")
        if "groups" in sink:
            rows = by_kafka_partition(rows, tasks=2, partitions=_PARTITIONS)
        if exact:
            options |= {"delivery": "exactly_once", "sink.id": topic, "job.id": "1", "tasks": "2"}
        writer = rows.write.format(kind).mode("append")
        if grouped or sink == "asyncproducer, tuned":
            self.spark.conf.set(_ARROW_BYTES, _BY_ROWS)
        else:
            self.spark.conf.unset(_ARROW_BYTES)
        before, began = self._cpu(), time.perf_counter()
        writer.options(**options).save()
        seconds = time.perf_counter() - began
        cpu = [after - least for after, least in zip(self._cpu(), before, strict=True)]
        self.check(topic, self.found(topic, committed=exact), 0 if sink == "noop" else count)
        return {
            "rows_per_s": count / seconds,
            "rows_per_s_per_core": count / cpu[0],
            "spark_cpu_ns_per_row": cpu[0] / count * 1e9,
            "kafka_cpu_ns_per_row": cpu[1] / count * 1e9,
        }

    def check(self, topic: str, found: int, wanted: int) -> None:
        """Raises RuntimeError if a run has not written all; else its topic is not needed longer."""
        if found != wanted:
            raise RuntimeError(f"{topic} has {found} records, not {wanted}")
        self.kafka.admin.delete_topics(topic)

    def _cpu(self) -> tuple[float, float]:
        """Seconds of CPU of Spark with its Python workers, and of Kafka."""
        spark = kafka = 0.0
        for process in psutil.Process().children(recursive=True):
            try:
                used = sum(process.cpu_times()[:4])
                if "kafka.Kafka" in process.cmdline():
                    kafka += used
                else:
                    spark += used
            except psutil.NoSuchProcess:
                pass
        return spark, kafka

    # -- queries -------------------------------------------------------------------------------

    def source(self, rows: int) -> str:
        """A topic of two partitions with so many rows."""
        topic = self.topic("source", 2)
        value = f.expr("cast(rpad(string(id), 100, 'x') as binary)").alias("value")
        partition = f.expr("cast(id % 2 as int)").alias("partition")
        rows_ = self.spark.range(0, rows, 1, 2).select(value, partition)
        options = self.options(topic)
        rows_.write.format("asyncproducer").mode("append").options(**options).save()
        return topic

    def found(self, topic: str, *, committed: bool) -> int:
        """How many records readers see; of committed ones: end offsets count markers, too."""
        if not committed:
            return sum(self.kafka.end_offsets(topic).values())
        options = {"subscribe": topic, "kafka.isolation.level": "read_committed"}
        rows = self.spark.read.format("kafka").options(**self.options(topic), **options).load()
        return int(rows.count())

    def query(self, sink: str, source: str, batch: int) -> Row:
        """From Kafka to Kafka, in batches of so many rows."""
        topic = self.topic("query")
        read = {"subscribe": source, "startingOffsets": "earliest"}
        rows: DataFrame = (
            self.spark.readStream.format("kafka")
            .options(**self.options(topic), **read, maxOffsetsPerTrigger=str(batch))
            .load()
        )
        options = self.options(topic)
        exact, groups = sink.startswith("exactly once"), "groups" in sink
        if not self.defaults:
            self.spark.conf.set(_ADAPTIVE, str(sink.endswith("adaptive")).lower())
            self.spark.conf.set(_ARROW_BYTES, _BY_ROWS)
        if sink in ("exactly once", "at least once, same columns"):
            rows = rows.select("value", origin(source))
        else:
            rows = rows.select("value")
        if groups:
            rows = by_kafka_partition(rows, tasks=2, partitions=_PARTITIONS)
        if exact:
            options |= {"delivery": "exactly_once", "sink.id": topic}
            options |= {"tasks": "2"} if groups else {"marker": "source"}
        with tempfile.TemporaryDirectory() as checkpoint:
            query = (
                rows.writeStream.format(_kind(sink))
                .options(**options)
                .option("checkpointLocation", checkpoint)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        if sink != "noop":
            wanted = self.found(source, committed=False)
            self.check(topic, self.found(topic, committed=exact), wanted)
        # The first batches find nothing ready, and the last may be smaller.
        full = [each for each in query.recentProgress if each["numInputRows"] == batch][2:]
        trigger = statistics.median(each["durationMs"]["triggerExecution"] for each in full)
        return {"batches": len(full), "trigger_ms": trigger, "rows_per_s": batch / trigger * 1e3}


def _kind(sink: str) -> str:
    """Spark's name of it."""
    return {"noop": "noop", "built-in": "kafka"}.get(sink, "asyncproducer")


def _rounds(
    names: list[str], run: Callable[[str], Row], rounds: int, unmeasured: int
) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(-unmeasured, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            row = run(name)
            if number >= 0:
                found[name].append(row)
    return found


def _summary(cases: dict[str, dict[str, list[Row]]]) -> str:
    lines = []
    for case, sinks in cases.items():
        columns = list(next(iter(sinks.values()))[0])
        lines += ["", f"| {case} | {' | '.join(columns)} | rows/s to the first's |"]
        lines.append("|---" * (len(columns) + 2) + "|")
        first = next(iter(sinks.values()))
        for sink, runs in sinks.items():
            medians = [
                f"{statistics.median(run[column] for run in runs):,.0f}" for column in columns
            ]
            ratios = sorted(
                run["rows_per_s"] / other["rows_per_s"]
                for run, other in zip(runs, first, strict=True)
            )
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            lines.append(f"| {sink} | {' | '.join(medians)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="default: %(default)s")
    parser.add_argument(
        "--batches", type=int, default=12, help="of a query, 3 or more (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--unmeasured",
        type=int,
        default=3,
        help="rounds before these: the JVM compiles what it runs often (default: %(default)s)",
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="the queries alone, with Spark's own settings: Python workers by TCP, adaptive "
        "plans, Arrow batches that end by bytes",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    options = parser.parse_args()
    if options.batches < 3:
        parser.error("the first two batches do not count: give --batches 3 or more")
    os.environ["JAVA_HOME"] = spark_java_home(os.environ)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # What a deleted topic has is gone at once, not after a minute.
    properties = {"file.delete.delay.ms": "100"}
    jvm = ["-XX:TieredStopAtLevel=4"]
    with KafkaCluster(own=True, properties=properties, jvm_options=jvm) as kafka:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.jars", ",".join(map(str, connector_jars())))
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.memory", "2g")
            .config("spark.python.unix.domain.socket.enabled", str(not options.defaults).lower())
            .config("spark.sql.streaming.numRecentProgressUpdates", "1000")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        bench = Bench(kafka, spark, options.rows, defaults=options.defaults)
        try:
            cases = _cases(bench, options.rounds, options.unmeasured, options.batches)
        finally:
            spark.stop()
    print(_summary(cases))
    if options.json:
        about = {
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "pyspark": spark.version,
            "asyncproducer": f"{asyncproducer.__version__} {asyncproducer.IMPLEMENTATION}",
            "rows": options.rows,
            "rounds": options.rounds,
            "unmeasured": options.unmeasured,
            "spark_settings": "defaults" if options.defaults else "tuned",
        }
        text = json.dumps({"about": about, "cases": cases}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def _jobs(bench: Bench, rounds: int, unmeasured: int) -> dict[str, dict[str, list[Row]]]:
    sinks = ["built-in", "built-in, tuned", "asyncproducer", "asyncproducer, tuned", "noop"]
    jobs = {
        name: _rounds(
            sinks,
            lambda sink, keyed=keyed: bench.job(sink, keyed=keyed),  # type: ignore[misc]
            rounds,
            unmeasured,
        )
        for name, keyed in (("value", False), ("key and value", True))
    }
    return jobs | {
        f"{name}, by groups": _rounds(
            _GROUPED,
            lambda sink, keyed=keyed: bench.job(sink, keyed=keyed, grouped=True),  # type: ignore[misc]
            rounds,
            unmeasured,
        )
        for name, keyed in (("value", False), ("key and value", True))
    }


def _queries(size: int, *, defaults: bool) -> list[str]:
    """Which there are. By default all are planned adaptively: one of them would run twice."""
    left_out = ["exactly once, groups, adaptive"] if defaults else []
    if size >= _HUGE:
        left_out += _NOT_HUGE
    return [each for each in _QUERIES if each not in left_out]


def _cases(
    bench: Bench, rounds: int, unmeasured: int, batches: int
) -> dict[str, dict[str, list[Row]]]:
    cases = {} if bench.defaults else _jobs(bench, rounds, unmeasured)
    for size in (_HUGE, _LARGE, _SMALL):
        source = bench.source(size * batches)
        runs = _rounds(
            _queries(size, defaults=bench.defaults),
            lambda sink, source=source, size=size: bench.query(sink, source, size),  # type: ignore[misc]
            rounds,
            unmeasured,
        )
        for found in runs.values():
            for run, none in zip(found, runs["noop"], strict=True):
                run["added_ms"] = run["trigger_ms"] - none["trigger_ms"]
        cases[f"batches of {size:,} rows"] = runs
    return cases


if __name__ == "__main__":
    main()
