"""One broker of an embedded cluster: its listener and its connections.

A connection does one request after the other, and answers it before it looks at the
next, as Java's broker does (it mutes the channel). So a client may pipeline, answers
keep their order, and an answer that is held back holds back all later ones.

What has arrived is processed even when the client is gone by then: with acks=0 it may
well send and close. Nobody gets the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar, cast

from asyncproducer.testing.faults import Corruption, Fault, Faults, ReceivedRequest
from asyncproducer.testing.groups import Groups
from asyncproducer.testing.handlers import APIS, Api, Call, CloseConnection
from asyncproducer.testing.handlers.api_versions import API_VERSIONS, unsupported_api_versions
from asyncproducer.testing.handlers.produce import summarize
from asyncproducer.testing.messages import (
    MalformedRequest,
    Message,
    RequestHeader,
    Response,
    decode_body,
    decode_header,
    encode_response,
    scalar_fields,
)
from asyncproducer.testing.state import ClusterState, Node
from asyncproducer.testing.transactions import Transactions

__all__ = ["BrokerNode", "Environment", "Listen", "Listener"]

logger = logging.getLogger("asyncproducer.testing.broker")

T = TypeVar("T")

_SIZE_BYTES = 4
_PRODUCE = 0

#: Requests of one connection that are read ahead, in bytes. More stay in its transport.
_READ_AHEAD_BYTES = 4 * 1024 * 1024


class Listener(NamedTuple):
    """A port that is listened on. `close` stops that; connections stay."""

    port: int
    close: Callable[[], Awaitable[None]]


#: Listens at a host and port (0: any), and makes a protocol for each connection.
Listen = Callable[[str, int, Callable[[], asyncio.Protocol]], Awaitable[Listener]]


class Environment:
    """What the nodes of a cluster share beside its state."""

    def __init__(
        self,
        state: ClusterState,
        *,
        versions: Mapping[int, tuple[int, int]],
        advertised: Mapping[int, tuple[int, int]],
        groups: Groups,
        transactions: Transactions,
        rng: random.Random,
        now_ms: Callable[[], int],
        max_request_bytes: int,
        log_size: int,
    ) -> None:
        self.state = state
        self.versions = versions
        self.advertised = advertised
        self.groups = groups
        self.transactions = transactions
        self.rng = rng
        self.now_ms = now_ms
        self.max_request_bytes = max_request_bytes
        self.faults = Faults(api.name for api in APIS.values())
        self.log: deque[ReceivedRequest] = deque(maxlen=log_size)
        self.connections_made = 0


class BrokerNode:
    """A broker that can be started, paused, and stopped; more than once."""

    def __init__(self, node: Node, environment: Environment) -> None:
        self.node = node
        self.environment = environment
        self.connections: dict[BrokerConnection, None] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.is_open = False
        self._listener: Listener | None = None

    @property
    def paused(self) -> bool:
        """Whether it is between `pause` and `resume`."""
        return not self.running.is_set()

    async def listen(self, listen: Listen) -> None:
        """Opens the port; the same one each time. Raises OSError. It is not alive yet."""
        self.is_open = True  # at once: somebody may connect before `listen` returns
        self._listener = await listen(self.node.host, self.node.port, self._make_connection)
        self.node.port = self._listener.port

    async def move(self, listen: Listen) -> None:
        """Listens at another port from now on. Its connections stay. Raises OSError."""
        listener = self._listener
        if listener is not None:
            self._listener = await listen(self.node.host, 0, self._make_connection)
            self.node.port = self._listener.port
            await listener.close()

    async def close(self) -> None:
        """Closes the port and drops all connections, whatever is under way."""
        self.is_open = False
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        tasks = [connection.task for connection in self.connections]
        self.drop_connections()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports tell their protocols now

    def drop_connections(self) -> int:
        """Drops all connections; requests that are not processed yet never will be."""
        count = sum(connection.is_open for connection in self.connections)
        for connection in list(self.connections):
            connection.drop()
        return count

    def pause(self) -> None:
        """Does nothing any more, as after SIGSTOP: clients connect and send, and wait."""
        self.running.clear()
        for connection in self.connections:
            connection.update_reading()

    def resume(self) -> None:
        """Goes on where `pause` stopped it."""
        self.running.set()
        for connection in self.connections:
            connection.update_reading()

    def _make_connection(self) -> BrokerConnection:
        self.environment.connections_made += 1
        return BrokerConnection(self, self.environment.connections_made)


class _ConnectionLost(Exception):
    """The client is gone while its answer was waited for."""


class BrokerConnection(asyncio.Protocol):
    """The broker's side of one connection."""

    task: asyncio.Task[None]

    def __init__(self, node: BrokerNode, connection_id: int) -> None:
        self._node = node
        self._environment = node.environment
        self._connection_id = connection_id
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._frame_bytes = 0
        self._deaf = False  # what comes in counts no more
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = self._loop.create_future()

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._node.is_open:  # accepted by the system just before the port was closed
            self._deaf = True
            self._loop.call_soon(self._abort)
            return
        self._node.connections[self] = None
        name = f"broker-{self._node.node.node_id}-connection-{self._connection_id}"
        self.task = self._loop.create_task(self._serve(), name=name)
        self.task.add_done_callback(lambda _: self._node.connections.pop(self, None))
        self.update_reading()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._buffer += data
        while len(self._buffer) >= _SIZE_BYTES:
            size = int.from_bytes(self._buffer[:_SIZE_BYTES], "big", signed=True)
            if not 0 <= size <= self._environment.max_request_bytes:
                logger.info("%s sent a request of %d bytes", self, size)
                self._buffer.clear()
                self.drop()
                return
            end = _SIZE_BYTES + size
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                self._frames.append(bytes(view[_SIZE_BYTES:end]))
            self._frame_bytes += size
            del self._buffer[:end]
        if self._frames:
            self._arrived.set()
            self.update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # Also after a half-close: Kafka does not answer a client that has closed its side.
        self._writable.set()
        self._lost.set_result(None)
        self._arrived.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- from the node

    def drop(self) -> None:
        """Drops the connection, and what has arrived on it."""
        self._frames.clear()
        self.task.cancel()
        self._abort()

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it."""
        return self._transport is not None and not self._transport.is_closing()

    def update_reading(self) -> None:
        """Reads from the transport unless the node is paused, or enough is waiting."""
        if self._transport is None or not self.is_open:
            return
        if self._node.paused or self._frame_bytes > _READ_AHEAD_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def __str__(self) -> str:
        return f"connection {self._connection_id} of broker {self._node.node.node_id}"

    # -- the requests, one by one

    async def _serve(self) -> None:
        try:
            while (frame := await self._next_frame()) is not None:
                with contextlib.suppress(_ConnectionLost):
                    await self._serve_one(frame)
        except (MalformedRequest, CloseConnection) as exc:
            logger.info("%s is closed: %s", self, exc)
        except Exception:
            # A bug in here must not look to the client like a broker that hangs.
            logger.exception("%s is closed", self)
        finally:
            self._deaf = True
            if self._transport is not None:
                self._transport.close()

    async def _serve_one(self, frame: bytes) -> None:
        await self._node.running.wait()
        header = decode_header(frame)
        api = APIS.get(header.api_key)
        versions = self._environment.versions.get(header.api_key)
        if api is None or versions is None:
            raise CloseConnection(f"unknown API {header.api_key}")
        if not versions[0] <= header.api_version <= versions[1]:
            if api.key != API_VERSIONS:
                raise CloseConnection(f"{api.name} v{header.api_version} is not supported")
            request = self._received(header, api, frame, None)
            fault = self._environment.faults.match(request)
            await self._answer(request, unsupported_api_versions(versions), fault, version=0)
            return
        decoded = decode_body(api.key, header.api_version, frame)
        request = self._received(header, api, frame, decoded)
        fault = self._environment.faults.match(request)
        response = await self._process(api, request, fault)
        if api.key == _PRODUCE:
            request.body = None
        await self._answer(request, response, fault)

    def _received(
        self,
        header: RequestHeader,
        api: Api,
        frame: bytes,
        decoded: tuple[str | None, Message, int] | None,
    ) -> ReceivedRequest:
        request = ReceivedRequest(
            node_id=self._node.node.node_id,
            connection_id=self._connection_id,
            received_at=self._loop.time(),
            api=api.name,
            api_key=api.key,
            version=header.api_version,
            correlation_id=header.correlation_id,
            size_bytes=len(frame),
        )
        if decoded is not None:
            state = self._environment.state
            request.client_id, request.body, request.bytes_left_over = decoded
            request.fields = scalar_fields(request.body)
            if api.touches is not None:
                request.partitions = [*api.touches(state, request.body)]
            if api.key == _PRODUCE:
                request.batches = summarize(state, request.body)
        self._environment.log.append(request)
        return request

    async def _process(
        self, api: Api, request: ReceivedRequest, fault: Fault | None
    ) -> Response | None:
        if fault is not None and not fault.processes:
            return None
        environment = self._environment
        call = Call(
            request=request,
            state=environment.state,
            groups=environment.groups,
            transactions=environment.transactions,
            fault=fault,
            now_ms=environment.now_ms,
            versions=environment.advertised,
        )
        response = api.handle(call)
        return await self._or_lost(response) if inspect.isawaitable(response) else response

    async def _answer(
        self,
        request: ReceivedRequest,
        response: Response | None,
        fault: Fault | None,
        *,
        version: int | None = None,
    ) -> None:
        if fault is not None:
            await self._hold_back(fault)
        if response is None:
            return
        throttle_ms = 0 if fault is None else fault.throttle_ms
        frame = encode_response(
            request.api_key,
            request.version if version is None else version,
            request.correlation_id,
            {**response, "throttle_time": throttle_ms},
        )
        if fault is not None and fault.corrupt is not None:
            frame = self._corrupt(frame, fault.corrupt)
        await self._node.running.wait()
        if fault is not None and fault.truncate is not None:
            self._write(frame[: fault.truncate])
            raise CloseConnection("the answer was cut, as a fault wants it")
        self._write(frame)
        await self._writable.wait()
        if throttle_ms:
            await self._or_lost(asyncio.sleep(throttle_ms / 1000))

    async def _hold_back(self, fault: Fault) -> None:
        await self._or_lost(fault.released())
        if fault.delay:
            await self._or_lost(asyncio.sleep(fault.delay))
        if fault.drop is not None:
            self._abort()
            self._frames.clear()
            raise CloseConnection("dropped, as a fault wants it")
        if fault.no_answer:
            self._deaf = True
            self._frames.clear()
            await asyncio.wait((self._lost,))
            raise CloseConnection("never answered, as a fault wanted it")

    def _corrupt(self, frame: bytes, how: Corruption) -> bytes:
        if how == "size":
            return b"\x7f\xff\xff\xff" + frame[_SIZE_BYTES:]
        header = frame[: _SIZE_BYTES + 4]
        if how == "garbage":
            return header + self._environment.rng.randbytes(len(frame) - len(header))
        wrong = int.from_bytes(header[_SIZE_BYTES:], "big") ^ 0x5A5A5A
        return header[:_SIZE_BYTES] + wrong.to_bytes(4, "big") + frame[len(header) :]

    # -- inside

    async def _next_frame(self) -> bytes | None:
        while not self._frames:
            if self._lost.done():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        self._frame_bytes -= len(frame)
        self.update_reading()
        return frame

    async def _or_lost(self, awaitable: Awaitable[T]) -> T:
        """Its result. Raises _ConnectionLost when the client goes away first."""
        future = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((future, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise _ConnectionLost
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                await asyncio.wait((future,))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and self.is_open:
            self._transport.write(data)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
