"""The stages, and the process of one: a Spark driver with one streaming query.

    python -m orders_pipeline.stages SETTINGS.json NAME

It runs until its standard input ends, which is also how it learns that its parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orders_pipeline import rules
from orders_pipeline.batches import SCHEMA, Work
from orders_pipeline.orders import Codec, Form
from orders_pipeline.rules import Rule

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

__all__ = ["STAGES", "Settings", "Stage", "Status", "done", "is_up", "replayed", "session"]
__all__ += ["start", "targets"]


@dataclass(frozen=True)
class Stage:
    """One streaming query: what it reads, what it does, where the results go."""

    name: str
    source: str
    sinks: tuple[str, ...]
    rule: Rule
    #: Its share of the limit for one batch, which it reads at most.
    admits: float = 1.0
    #: Those of its sinks to which only some orders of the source go.
    partial: tuple[str, ...] = ()


#: One after the other; the topics between them are the queues.
STAGES = (
    Stage("validate", rules.RAW, (rules.VALIDATED, rules.DLQ), rules.validate),
    Stage("score", rules.VALIDATED, (rules.SCORED,), rules.score),
    Stage(
        "fan-out",
        rules.SCORED,
        (rules.ANALYTICS, rules.FULFILLMENT),
        rules.fan_out,
        admits=0.5,  # it writes two for each
        partial=(rules.FULFILLMENT,),
    ),
)


def targets(delivery: str) -> list[str]:
    """What the audit is to judge: the load, and each stage against what is before it.

    Of the topics that only some orders go to, the ledger says which: see judging.py.
    """
    claim = delivery if delivery == "exactly_once" else f"unordered:{delivery}"
    found = [rules.RAW]
    for stage in STAGES:
        whole = "+".join(topic for topic in stage.sinks if topic not in stage.partial)
        found.append(f"{whole}={whole}:of={stage.source}:{claim}")
        found += [f"{topic}:{claim}" for topic in stage.partial]
    return found


@dataclass(frozen=True)
class Settings:
    """What all stages are told, in a file."""

    servers: str
    #: With a directory for each stage.
    directory: str
    run: int
    delivery: str
    #: Of Avro's schemas; none: JSON.
    ids: Mapping[Form, int] | None
    #: Orders for one batch, at most.
    admit: int
    jars: tuple[str, ...]
    #: Spark's threads of each stage.
    cores: int = 2

    def save(self, path: Path) -> None:
        """As JSON, in one step."""
        _replace(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """From such a file."""
        given = json.loads(path.read_text(encoding="utf-8"))
        return cls(**given | {"jars": tuple(given["jars"])})

    def of(self, stage: Stage) -> Path:
        """Where the stage keeps its checkpoint, its status and its log."""
        return Path(self.directory) / stage.name


@dataclass(frozen=True)
class Status:
    """How the last batch was: the process of a stage says so in a file."""

    batch: int = -1
    rows: int = 0
    seconds: float = 0.0
    #: From the stamp to the end of this stage's work.
    age_p50_ms: float = 0.0
    age_p99_ms: float = 0.0

    @classmethod
    def load(cls, directory: Path) -> Status:
        """The newest, or that of a stage that has not done anything."""
        try:
            return cls(**json.loads((directory / _STATUS).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()


_STATUS = "status.json"


def is_up(directory: Path) -> bool:
    """Whether the stage's query has begun, at some time."""
    return (directory / "checkpoint" / "metadata").exists()


def done(directory: Path) -> dict[int, int]:
    """The next offset of each partition of the source, as the stage's checkpoint has it.

    What is before these has gone through the stage, whatever happens to it now.
    """
    try:
        batches = os.listdir(directory / "checkpoint" / "commits")
    except FileNotFoundError:
        return {}
    last = max((int(name) for name in batches if name.isdigit()), default=None)
    if last is None:
        return {}
    lines = (directory / "checkpoint" / "offsets" / str(last)).read_text(encoding="utf-8")
    (offsets,) = json.loads(lines.splitlines()[-1]).values()
    return {int(partition): offset for partition, offset in offsets.items()}


def replayed(directory: Path) -> int:
    """How many rows of the stage's batches were delivered by an attempt whose end nobody heard of,
    and so not written again. By the sink's reports, of which a kill may have cut one off.
    """
    try:
        lines = (directory / "commits.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    rows = 0
    for line in lines:
        with suppress(ValueError):
            rows += json.loads(line)["skipped"]
    return rows


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


# -- the process --------------------------------------------------------------------------------


def session(settings: Settings, name: str, *, memory: str = "1g") -> SparkSession:
    """A new one, for a stage or for the audit."""
    from pyspark.sql import SparkSession

    # The default is whatever `python3` is, which may lack all that the workers need.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    found: SparkSession = (
        SparkSession.builder.appName(f"orders: {name}")
        # A task whose worker is killed is tried again; the default in local mode is not to.
        .master(f"local[{settings.cores},4]")
        .config("spark.jars", ",".join(settings.jars))
        .config("spark.driver.memory", memory)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        # By TCP, each thing that is asked of a Python worker waits 40 ms for an acknowledgement.
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.warehouse.dir", f"{settings.directory}/{name}/warehouse")
        .getOrCreate()
    )
    found.sparkContext.setLogLevel("ERROR")
    return found


def start(spark: SparkSession, settings: Settings, stage: Stage) -> StreamingQuery:
    """The stage's query, from where its checkpoint says."""
    from pyspark.sql import functions as F

    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", stage.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max(1, int(settings.admit * stage.admits)))
        .option("includeHeaders", "true")
        .load()
        .select("key", "value", "headers", "topic", "partition", "offset")
    )
    ages = F.percentile_approx("age_us", [0.5, 0.99]).alias("ages")
    results = (
        source.mapInArrow(Work(stage.name, stage.rule, Codec(settings.ids)), SCHEMA)
        .observe("orders", ages)
        .drop("age_us")
    )
    writer = (
        results.writeStream.format("asyncproducer")
        .queryName(stage.name)
        .option("kafka.bootstrap.servers", settings.servers)
        .option("checkpointLocation", str(settings.of(stage) / "checkpoint"))
        .option("report.file", str(settings.of(stage) / "commits.jsonl"))
        .option("delivery", settings.delivery)
    )
    if settings.delivery == "exactly_once":
        # The rows of one task come from one partition, and no other task has any of it: its
        # offsets tell what is done. No shuffle, and the rule may do again what it has done.
        writer = (
            writer.option("marker", "source")
            .option("sink.id", f"orders-{settings.run}-{stage.name}")
            .option("marker.topic", stage.sinks[0])
        )
    return writer.start()


def _status(progress: Mapping[str, Any]) -> Status:
    found = progress["observedMetrics"].get("orders")
    ages = (found["ages"] if found else None) or (0, 0)
    return Status(
        progress["batchId"],
        progress["numInputRows"],
        progress["batchDuration"] / 1000,
        ages[0] / 1000,
        ages[1] / 1000,
    )


def main(arguments: list[str]) -> int:
    """Run a stage until standard input ends. Returns 1 if its query has failed."""
    path, name = arguments
    settings = Settings.load(Path(path))
    stage = next(stage for stage in STAGES if stage.name == name)
    asked = threading.Event()

    def wait_for_the_end() -> None:
        os.read(sys.stdin.fileno(), 1)
        asked.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    spark = session(settings, stage.name)
    query = start(spark, settings, stage)
    try:
        known = -1
        while query.isActive and not asked.wait(0.2):
            progress = query.lastProgress
            if progress is not None and progress["batchId"] != known and progress["numInputRows"]:
                known = progress["batchId"]
                _replace(settings.of(stage) / _STATUS, asdict(_status(progress)))
        if not asked.is_set():
            query.awaitTermination(10)  # raises what has ended it
            return 1
        query.stop()
        return 0
    finally:
        # Whatever still runs in the JVM, it ends with this process.
        threading.Thread(target=_end_soon, daemon=True).start()
        spark.stop()


def _end_soon() -> None:
    time.sleep(10)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
