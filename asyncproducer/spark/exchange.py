"""The stream by which Spark's JVM sends to the Python worker that runs us."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["hasten", "incoming"]


def incoming() -> Any:
    """What `main` of Spark's worker, which has called us, reads from; None without it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        stream = frame.f_locals.get("infile")
        if stream is not None:
            return stream
        frame = frame.f_back
    return None


def hasten() -> None:
    """Let the JVM and this worker not wait for each other's acknowledgements.

    Either writes in pieces to a TCP socket, and holds back a small one until what was sent before
    is acknowledged, which the other side's kernel delays by 40 ms (Nagle's algorithm and delayed
    acknowledgements). Acknowledges at once what has come, and holds back nothing from now on. To be
    called where something is read next: the first counts until this side has written. Does nothing
    where the system has no such option, nor to another kind of stream, or one that is closed.
    """
    with (
        suppress(AttributeError, OSError, ValueError),
        socket.fromfd(incoming().fileno(), socket.AF_INET, socket.SOCK_STREAM) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
