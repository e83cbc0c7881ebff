"""A client that does only what it is told: one request, of any version, or any bytes.

For tests of brokers, not of producers. It neither retries nor checks what a broker
would refuse, and speaks to a real broker as to an embedded one.

    async with await RawClient.connect("localhost:9092") as client:
        response = await client.request("metadata", 12, topics=None, ...)
"""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kio.serial import entity_writer

from asyncproducer.net.transport import Connector, TcpConnector
from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.messages import Message, build, decode_response, request_class

__all__ = ["RawClient", "encode_request"]

_KEYS = {api.name: key for key, api in APIS.items()}


def encode_request(
    api: str,
    version: int,
    fields: Mapping[str, Any],
    *,
    correlation_id: int = 0,
    client_id: str | None = "raw",
) -> bytes:
    """A request frame, its size included. `fields` by kio's names; times in ms."""
    request = request_class(_KEYS[api], version)
    header = request.__header_schema__(
        request_api_key=_KEYS[api],
        request_api_version=version,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    out = io.BytesIO()
    entity_writer(type(header))(out, header)
    entity_writer(request)(out, build(request, fields))
    return len(out.getvalue()).to_bytes(4, "big") + out.getvalue()


class RawClient:
    """One connection. `connect` makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._correlation_ids = itertools.count(1)

    @classmethod
    async def connect(cls, server: str, connector: Connector | None = None) -> Self:
        """Connects to "host:port". Raises ConnectionFailed."""
        connector = connector or TcpConnector()
        host, _, port = server.rpartition(":")
        address = (await connector.resolve(host.strip("[]"), int(port)))[0]
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**27, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await connector.connect(
            lambda: protocol, address, ssl=None, server_hostname=None
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. What goes wrong with it then is of no interest."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    async def request(self, api: str, version: int, **fields: Any) -> Message:
        """Sends a request, and returns kio's message of the answer.

        Raises asyncio.IncompleteReadError when the connection is closed instead.
        """
        correlation_id = self.send(api, version, **fields)
        return await self.receive(api, version, correlation_id)

    def send(self, api: str, version: int, **fields: Any) -> int:
        """Sends a request, and returns its correlation id."""
        correlation_id = next(self._correlation_ids)
        self.writer.write(encode_request(api, version, fields, correlation_id=correlation_id))
        return correlation_id

    async def receive(self, api: str, version: int, correlation_id: int) -> Message:
        """The next answer. Raises ValueError when it is not the one to this request."""
        frame = await self.receive_frame()
        answered, message = decode_response(_KEYS[api], version, frame)
        if answered != correlation_id:
            raise ValueError(f"correlation id {answered}, not {correlation_id}")
        return message

    async def receive_frame(self) -> bytes:
        """The next answer's bytes, without their size."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(size)
