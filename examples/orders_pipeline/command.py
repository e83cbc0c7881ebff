"""The command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncproducer.testing import KafkaUnavailable
from asyncproducer.testing.java import JavaUnavailable
from orders_pipeline.orders import MOCK
from orders_pipeline.pipeline import Failed, Options, run

__all__ = ["main", "parse"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python examples/orders_pipeline",
        description="Starts Kafka, three stages of Spark and a load of orders, kills what it is "
        "told to kill, and lets the audit judge what the topics hold.",
        epilog="Exit status: 0 clean, 1 the claim is violated, 2 it came to no verdict, "
        "3 nothing is wrong as far as can be seen, and not all can be; 130 interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--orders", type=_positive, default=20_000, help="how many are sent")
    add("--rate", type=_number, default=5_000, help="orders per second, 0 for all at once")
    add("--kills", type=_number, default=0, help="kill -9 so often: drivers and Python workers")
    add("--format", choices=("avro", "json"), default="avro", help="of the orders")
    add("--registry", default=MOCK, metavar="URL", help="of a Schema Registry, for avro")
    add(
        "--delivery",
        choices=("exactly_once", "at_least_once"),
        default="exactly_once",
        help="of all stages",
    )
    add("--partitions", type=_positive, default=2, help="of each topic")
    add(
        "--admit",
        type=_positive,
        help="orders for one batch of a stage, at most; default: a tenth of all, 1,000 to 20,000",
    )
    add("--cores", type=_positive, default=2, help="Spark's threads of each stage")
    add("--seed", type=_number, default=1, help="of the orders, and of what is killed when")
    add("--timeout", type=_positive, default=1800, metavar="SECONDS", help="for all of it")
    add("--output", type=Path, help="a new directory; default: orders-pipeline-TIME")
    return parser


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if _number(text) == 0:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; exits with status 2 if they are wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    output = given.output or Path(time.strftime("orders-pipeline-%Y%m%d-%H%M%S"))
    if output.exists():
        parser.error(f"{output} is there already: give --output a new directory")
    return Options(
        orders=given.orders,
        kills=given.kills,
        rate=given.rate,
        partitions=given.partitions,
        admit=given.admit or min(20_000, max(1_000, given.orders // 10)),
        cores=given.cores,
        format=given.format,
        registry=given.registry,
        delivery=given.delivery,
        output=output,
        timeout_s=given.timeout,
        seed=given.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    options = parse(arguments)
    try:
        return run(options)
    except (Failed, JavaUnavailable, KafkaUnavailable) as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
        return 130
