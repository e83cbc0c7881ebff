"""`asyncproducer broker`: the embedded cluster as a process of its own, to try things out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

from asyncproducer.cli.arguments import positive, within

if TYPE_CHECKING:
    from asyncproducer.testing import EmbeddedCluster

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "broker",
        help="serve an embedded cluster on this machine, to try things out",
        description="Serves an embedded cluster on this machine. It speaks Kafka's protocol and "
        "keeps nothing: all records are in memory, and gone with it. Nobody can join a consumer "
        "group. Topics that somebody asks for are created, with one partition.",
        epilog="Ctrl-C ends it. Exit status: 0 then, 1 if it cannot listen, 2 for wrong arguments.",
    )
    parser.add_argument(
        "--port",
        type=within(0, 65535),
        default=9092,
        help="of the first broker, the others follow; 0: any; default: %(default)s",
    )
    parser.add_argument("--brokers", type=positive, default=1, help="default: %(default)s")
    parser.add_argument(
        "--topic",
        type=_topic,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME:PARTITIONS",
        help="a topic to begin with; more than once, too",
    )
    parser.set_defaults(run=run)


def _topic(text: str) -> tuple[str, int]:
    name, _, partitions = text.partition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:PARTITIONS")
    return name, positive(partitions or "1")


def run(options: argparse.Namespace) -> int:
    """Serve until it is interrupted."""
    # Only this command needs the test kit.
    from asyncproducer.testing import EmbeddedCluster

    try:
        cluster = EmbeddedCluster(options.brokers, port=options.port, request_log_size=0)
        for name, partitions in options.topic:
            cluster.create_topic(name, partitions=partitions)
    except ValueError as error:
        print(f"asyncproducer broker: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_serve(cluster))
    except OSError as error:
        print(
            f"asyncproducer broker: {error}. Choose another --port; 0 is any that is free.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        pass  # where there are no signal handlers
    print("ended, nothing was kept")
    return 0


async def _serve(cluster: EmbeddedCluster) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(number, ended.set)
    async with cluster:
        print(
            f"listening on {cluster.bootstrap_servers}\n"
            "It keeps nothing: all records are in memory, and gone when it ends (Ctrl-C).",
            flush=True,
        )
        await ended.wait()
