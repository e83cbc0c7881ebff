"""`python -m asyncproducer.spark.audit`: audits topics, writes the tables and the report."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncproducer
from asyncproducer.spark.audit.ledger import Entry, LedgerError, read_ledger
from asyncproducer.spark.audit.targets import Target, TargetError, check, parse_target
from asyncproducer.spark.audit.verdict import Verdict
from asyncproducer.spark.connector import CONNECTOR, connector_version
from asyncproducer.testing.java import JavaUnavailable, spark_java_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from asyncproducer.spark.audit.audit import Outcome

__all__ = ["main"]

_STATUS = {Verdict.CLEAN: 0, Verdict.VIOLATED: 1, Verdict.INCOMPLETE: 3}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncproducer.spark.audit",
        description="Compares stamped records in topics with the ledger of those who wrote them.",
        epilog="Exit status: 0 clean, 1 the claim is violated, 2 no verdict: wrong arguments or"
        " input, or an error, 3 nothing is wrong as far as can be seen, and not all can be seen.",
    )
    where = parser.add_argument_group("input").add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap-servers", metavar="HOST:PORT,...", help="read from Kafka")
    where.add_argument(
        "--parquet", metavar="PATH", help="read from Parquet with the columns of the Kafka source"
    )
    more = parser.add_argument_group("of the input")
    more.add_argument(
        "--parquet-uncommitted", metavar="PATH", help="the same, read uncommitted: counts aborted"
    )
    more.add_argument(
        "--kafka-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of Spark's Kafka source, as kafka.security.protocol=SSL or startingOffsets=...",
    )
    more.add_argument(
        "--no-headers", action="store_true", help="stamps are in values only: quicker"
    )
    parser.add_argument(
        "--target",
        type=_target,
        action="append",
        default=[],
        metavar="TOPIC | NAME=TOPIC+TOPIC[:of=TOPIC+TOPIC][:partial][:unordered][:CLAIM]",
        help="what is judged as one, more than once, too; with `of` it must hold what these hold",
    )
    parser.add_argument("--ledger", metavar="PATH", help="Parquet, a file or a directory of files")
    parser.add_argument("--output", required=True, metavar="DIRECTORY", help="new, for the tables")
    parser.add_argument("--report", metavar="FILE", help="default: report.html in the output")
    parser.add_argument(
        "--fact",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="what the report tells of this audit besides, as kills=3",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, no more")
    spark = parser.add_argument_group("Spark (under spark-submit it has its own)")
    spark.add_argument("--master", help="default: local[*] unless spark-submit says otherwise")
    spark.add_argument("--jars", help="files of the Kafka connector, with commas")
    spark.add_argument("--packages", help=f"of the Kafka connector: {CONNECTOR}:VERSION")
    spark.add_argument(
        "--memory", default="2g", help="of the driver in local mode; default: %(default)s"
    )
    return parser


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _target(text: str) -> Target:
    try:
        return parse_target(text)
    except TargetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an audit; returns the exit status. Raises SystemExit for wrong arguments or input."""
    try:
        return _main(arguments)
    except Exception:
        # Left alone it would end with 1, which is a verdict.
        traceback.print_exc()
        return 2


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    entries: list[Entry] = []
    try:
        check(options.target)
        if options.ledger:
            entries = read_ledger(options.ledger)
    except (TargetError, LedgerError, OSError) as error:
        parser.error(str(error))
    for path in (options.parquet, options.parquet_uncommitted):
        if path and "://" not in path and not Path(path).exists():
            parser.error(f"there is nothing at {path}")
    local = "://" not in options.output
    if local and Path(options.output).exists():
        parser.error(f"{options.output} is there already: an audit writes a new directory")
    if not local and not options.report:
        parser.error("say with --report where the report goes: the output is not a local directory")
    try:
        from pyspark.errors import AnalysisException

        from asyncproducer.spark.audit.audit import audit
        from asyncproducer.spark.audit.records import SourceError
    except ImportError as error:
        parser.error(f'the audit needs pyspark ({error}): pip install "asyncproducer[audit]"')
    try:
        spark, ours = _session(options)
    except JavaUnavailable as error:
        parser.error(str(error))
    try:
        began = time.monotonic()
        frame, uncommitted = _frames(spark, options)
        outcome = audit(
            spark, frame, options.target, entries, options.output, uncommitted=uncommitted
        )
        facts = {
            **dict(options.fact),
            "verdict": str(outcome.verdict),
            "command": f"python -m {__package__} {shlex.join(arguments or sys.argv[1:])}",
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "asyncproducer": asyncproducer.__version__,
            "Spark": f"{spark.version}, {spark.sparkContext.master}",
            "seconds": round(time.monotonic() - began, 1),
            "seconds per table": [f"{name} {took}" for name, took in outcome.seconds.items()],
        }
        report = _report(spark, outcome, facts, options)
    except SourceError as error:
        parser.error(str(error))
    except AnalysisException as error:
        parser.error(_told(error))
    finally:
        if ours:
            spark.stop()
    _print(outcome, facts, report, options)
    return _STATUS[outcome.verdict]


def _session(options: argparse.Namespace) -> tuple[SparkSession, bool]:
    """The one that this process has, or a new one; and whether it is new."""
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    if found is not None:
        return found, False
    # The default is whatever `python3` is, which may lack all that the workers need.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("asyncproducer audit")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    submitted = "SPARK_ENV_LOADED" in os.environ
    if not submitted:
        os.environ["JAVA_HOME"] = spark_java_home(os.environ)
    if options.master or not submitted:
        builder = builder.master(options.master or "local[*]")
    if (options.master or "local").startswith("local"):
        builder = builder.config("spark.driver.memory", options.memory)
    if options.jars:
        builder = builder.config("spark.jars", options.jars)
    if options.packages:
        builder = builder.config("spark.jars.packages", options.packages)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session, True


def _frames(spark: SparkSession, options: argparse.Namespace) -> tuple[DataFrame, DataFrame | None]:
    """What is committed, and all there is, if that can be told."""
    if options.parquet:
        frame = spark.read.parquet(options.parquet)
        everything = None
        if options.parquet_uncommitted:
            everything = spark.read.parquet(options.parquet_uncommitted)
        return (
            frame.drop("headers") if options.no_headers else frame,
            everything,
        )
    return _from_kafka(spark, options, "read_committed"), _from_kafka(
        spark, options, "read_uncommitted"
    )


def _from_kafka(spark: SparkSession, options: argparse.Namespace, isolation: str) -> DataFrame:
    topics = {topic for target in options.target for topic in target.topics + target.of}
    reader = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", options.bootstrap_servers)
        .option("subscribe", ",".join(sorted(topics)))
        .option("includeHeaders", str(not options.no_headers).lower())
    )
    for name, value in options.kafka_option:
        reader = reader.option(name, value)
    return reader.option("kafka.isolation.level", isolation).load()


def _told(error: Any) -> str:
    text = str(error).strip().split("\n", 1)[0]
    if "kafka" in text and "data source" in text.lower():
        import pyspark

        package = f"{CONNECTOR}:{connector_version(pyspark.__version__)}"
        return f"Spark has no Kafka connector: give --packages {package} or --jars ({text})"
    return text


def _report(
    spark: SparkSession, outcome: Outcome, facts: dict[str, Any], options: argparse.Namespace
) -> str:
    from asyncproducer.spark.audit.collecting import collect
    from asyncproducer.spark.audit.report import render

    tables, totals = collect(spark, outcome.output)
    path = options.report or f"{outcome.output}/report.html"
    Path(path).write_text(render(tables, totals, facts), encoding="utf-8")
    return path


def _kept(row: dict[str, Any]) -> str:
    """What is so where the claim is kept."""
    found = "all that was acknowledged"
    # The claim may be that nothing is lost, no more.
    found += f", and {row['duplicates']:,} doubled" if row["duplicates"] else ", once"
    return f"{found} ({row['aborted']:,} aborted)" if row["aborted"] else found


def _print(
    outcome: Outcome, facts: dict[str, Any], report: str, options: argparse.Namespace
) -> None:
    if options.json:
        print(json.dumps({**facts, "report": report, "targets": outcome.rows}, indent=1))
        return
    for row in outcome.rows:
        found = "; ".join(row["reasons"]) or _kept(row)
        run = "no run" if row["run"] is None else f"run {row['run']}"
        print(
            f"{row['verdict']}: {row['target']}, {run}, {row['delivery']}:"
            f" {row['records']:,} records, {found}"
        )
    print(f"{outcome.verdict}; tables in {outcome.output}, report in {report}")
