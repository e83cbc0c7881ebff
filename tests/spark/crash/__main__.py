"""`python -m tests.spark.crash --kills 200`: the sink loses and doubles nothing, whoever dies.

Three real brokers, a standalone Spark cluster of two workers, and a driver with streaming queries
that copy a stamped load through the sink, while processes are killed by SIGKILL: Python workers,
executors, the driver (which goes on from its checkpoint) and brokers, anywhere and at each step of
the sink's protocol. At last the audit compares what is committed with what was sent.

Exit status: 0 if so many kills happened, and exactly once nothing was lost or doubled; or at least
once nothing was lost and something doubled, without which the test would show nothing. 1 if not.
2 if it came to no verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asyncproducer.testing import KafkaCluster, KafkaUnavailable
from asyncproducer.testing.java import JavaUnavailable, spark_java_home
from tests.spark.crash.run import Failed, Run, problems

KEYINGS = ("source", "group")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.spark.crash",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=_count, default=200, help="so many")
    add("--seed", type=int, help="of what is killed when; default: any")
    add("--delivery", choices=("exactly_once", "at_least_once"), default="exactly_once")
    add(
        "--keying",
        nargs="+",
        choices=KEYINGS,
        default=list(KEYINGS),
        help="the sink's marker: a query for each, side by side",
    )
    add("--brokers", type=int, choices=(1, 3), default=3, help="of Kafka")
    add("--transaction-version", type=int, choices=(1, 2), help="default: Kafka's own")
    add("--rate", type=_count, default=200, help="records a second")
    add("--admit", type=_count, default=1000, help="records for one batch, at most")
    add("--minutes", type=float, help="at most; default: 6, and a quarter for each kill")
    add("--report", type=Path, help="write the audit's report there")
    add("--output", type=Path, help="a new directory to keep; default: none is kept")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.randrange(2**32)
    if options.minutes is None:
        options.minutes = 6 + options.kills / 4
    if options.output is not None and options.output.exists():
        parser.error(f"{options.output} is there already: give --output a new directory")
    return options


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    directory = options.output or Path(tempfile.mkdtemp(prefix="asyncproducer-crash-"))
    directory = directory.resolve()
    directory.mkdir(exist_ok=True, parents=True)
    try:
        # For all processes of Spark, here once: they look for no other.
        os.environ["JAVA_HOME"] = spark_java_home(os.environ)
        version = options.transaction_version
        features = {"transaction.version": version} if version else {}
        with KafkaCluster(options.brokers, own=True, features=features) as kafka:
            return asyncio.run(_run(options, kafka, directory))
    except (Failed, JavaUnavailable, KafkaUnavailable) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
        return 130
    finally:
        if options.output is None:
            shutil.rmtree(directory, ignore_errors=True)


async def _run(options: argparse.Namespace, kafka: KafkaCluster, directory: Path) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    run = Run(options, kafka, directory)
    run.tell(f"seed {options.seed}")
    await run.all()
    print_ = sys.stdout.write
    print_(f"\n{run.report()}\n")
    wrong = problems(options.delivery, options.kills, len(run.happened), run.verdicts)
    for each in wrong:
        print_(f"✗ {each}\n")
    if not wrong:
        print_(f"✓ {len(run.happened)} kills, {options.delivery}: as promised\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
