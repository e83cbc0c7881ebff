"""`python -m asyncproducer.bench.proxy SERVERS RTT_MS`: the same brokers, further away.

Each request and each answer is held back by half the round-trip time, and nothing else is
changed: whatever arrives meanwhile is held back beside it, so that throughput is not limited.
(Connecting takes no longer: a handshake of TCP is answered at once.)

Brokers tell their addresses in Metadata answers, and clients go there: past the proxy, if it
were not for `_through_us`, which puts the proxy's own addresses into them.

It prints its addresses, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeAlias

from asyncproducer.testing.messages import decode_header, decode_response, encode_message

__all__ = ["DelayProxy", "delayed"]

_METADATA = 3
_HOST = "127.0.0.1"

_Change: TypeAlias = Callable[[bytes], Awaitable[bytes]]
#: Frames under way, each with the time when it is due; None at the end.
_Line: TypeAlias = asyncio.Queue[tuple[float, bytes] | None]


class DelayProxy:
    """An async context manager. `servers` are "host:port,..."; all times are of its loop."""

    def __init__(self, servers: str, rtt_s: float) -> None:
        self._seeds = [_address(server) for server in servers.split(",")]
        self._delay = rtt_s / 2
        self._ports: dict[tuple[str, int], int] = {}
        self._servers: list[asyncio.Server] = []
        self._clients: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for seed in self._seeds:
            await self._port_for(seed)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients go instead of `servers`."""
        return ",".join(f"{_HOST}:{self._ports[seed]}" for seed in self._seeds)

    async def _port_for(self, broker: tuple[str, int]) -> int:
        """Where this broker is reached through the proxy; listens there from the first call on."""
        if broker not in self._ports:

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None  # start_server calls in a task of its own
                self._clients.add(task)
                try:
                    await self._serve(broker, reader, writer)
                except (OSError, asyncio.CancelledError):
                    pass  # either side is gone, or the proxy ends
                finally:
                    self._clients.discard(task)
                    writer.close()

            server = await asyncio.start_server(serve, _HOST, 0, limit=2**20)
            self._servers.append(server)
            self._ports[broker] = server.sockets[0].getsockname()[1]
        return self._ports[broker]

    async def _serve(
        self, broker: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(*broker, limit=2**20)
        #: Metadata requests without an answer: version by correlation id.
        asked: dict[int, int] = {}

        async def request(frame: bytes) -> bytes:
            header = decode_header(frame[4:12])
            if header.api_key == _METADATA:
                asked[header.correlation_id] = header.api_version
            return frame

        async def answer(frame: bytes) -> bytes:
            version = asked.pop(int.from_bytes(frame[4:8], "big", signed=True), None)
            return frame if version is None else await self._through_us(frame, version)

        try:
            async with asyncio.TaskGroup() as group:
                for source, sink, change in (
                    (reader, far_writer, request),
                    (far_reader, writer, answer),
                ):
                    line: _Line = asyncio.Queue()
                    group.create_task(self._take(source, line, change))
                    group.create_task(self._give(line, sink))
        except* OSError:
            pass
        finally:
            far_writer.close()

    async def _take(self, source: asyncio.StreamReader, line: _Line, change: _Change) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                prefix = await source.readexactly(4)
                frame = prefix + await source.readexactly(int.from_bytes(prefix, "big"))
                arrived = loop.time()
                line.put_nowait((arrived + self._delay, await change(frame)))
        except (asyncio.IncompleteReadError, OSError):
            line.put_nowait(None)

    async def _give(self, line: _Line, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (item := await line.get()) is not None:
            due, frame = item
            await asyncio.sleep(due - loop.time())
            sink.write(frame)
            await sink.drain()
        sink.close()

    async def _through_us(self, frame: bytes, version: int) -> bytes:
        """The Metadata answer with our addresses in the place of the brokers'."""
        correlation_id, message = decode_response(_METADATA, version, frame[4:])
        brokers = [
            dataclasses.replace(b, host=_HOST, port=await self._port_for((b.host, b.port)))
            for b in message.brokers
        ]
        return encode_message(correlation_id, dataclasses.replace(message, brokers=tuple(brokers)))


def _address(server: str) -> tuple[str, int]:
    host, _, port = server.strip().rpartition(":")
    return host.strip("[]"), int(port)


async def _main(servers: str, rtt_ms: float) -> None:
    async with DelayProxy(servers, rtt_ms / 1000) as proxy:
        print(proxy.bootstrap_servers, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def delayed(servers: str, rtt_ms: float) -> Iterator[str]:
    """The addresses of a proxy in a process of its own, which lives as long as the context."""
    if not rtt_ms:
        yield servers
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncproducer.bench.proxy", servers, str(rtt_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        yield process.stdout.readline().strip()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
