"""The `asyncproducer` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import asyncproducer

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncproducer", description="Put records into Apache Kafka from asyncio."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"asyncproducer {asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Imported here: each command needs libraries that the others do not.
    from asyncproducer.cli import bench, broker, demo, verify

    demo.add_parser(commands)
    broker.add_parser(commands)
    bench.add_parser(commands)
    verify.add_parser(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
