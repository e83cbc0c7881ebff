from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from asyncproducer.spark.exchange import hasten, incoming

_TCP = socket.IPPROTO_TCP


def main(infile: Any) -> None:
    """As `pyspark.worker.main` has it, some frames above us."""
    (lambda: hasten())()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection by TCP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        server.accept()[0] as here,
    ):
        yield there, here


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux has it")
def test_a_tcp_connection_acknowledges_at_once_and_holds_nothing_back(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    there, here = pair
    here.setsockopt(_TCP, socket.TCP_QUICKACK, 0)
    assert (
        here.getsockopt(_TCP, socket.TCP_QUICKACK),
        here.getsockopt(_TCP, socket.TCP_NODELAY),
    ) == (0, 0)
    with here.makefile("rb") as stream:
        main(stream)
        assert here.getsockopt(_TCP, socket.TCP_QUICKACK)
        assert here.getsockopt(_TCP, socket.TCP_NODELAY)
        there.sendall(b"rows")  # it is open as before
        assert stream.read(4) == b"rows"


def test_other_streams_are_left_alone() -> None:
    main(io.BytesIO())
    with open(__file__, "rb") as closed:
        pass
    main(closed)
    there, here = socket.socketpair()
    with there, here, here.makefile("rb") as stream:
        main(stream)
        there.sendall(b"rows")
        assert stream.read(4) == b"rows"


def test_outside_a_worker_there_is_no_stream() -> None:
    assert incoming() is None
    hasten()
