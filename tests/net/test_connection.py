from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import trustme

from asyncproducer.config import ProducerConfig
from asyncproducer.core import wire
from asyncproducer.core.metadata import Node
from asyncproducer.core.metrics import Metrics
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import (
    AuthenticationError,
    BrokerError,
    ConnectionFailed,
    ErrorCode,
    IllegalStateError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from asyncproducer.net.connection import TRANSITIONS, Connection, ConnectionState
from asyncproducer.net.frames import FrameReader, frame
from asyncproducer.net.outbox import PIECE_BYTES
from asyncproducer.net.transport import Address, TcpConnector, unwritten
from asyncproducer.testing.clock import VirtualTimeLoop
from asyncproducer.testing.network import MemoryLink, MemoryNetwork

pytestmark = pytest.mark.virtual_time

S = ConnectionState
NODE = Node(1, "kafka1", 9092)
ADDRESS = Address(2, "10.0.0.1", 9092)
SECRET = "hunter2"
PRODUCE_VERSION = 9
SASL_FIRST_ID = 2147483640

Versions = dict[int, tuple[int, int]]

VERSIONS: Versions = {
    ApiKey.PRODUCE: (0, 13),
    ApiKey.METADATA: (0, 13),
    ApiKey.API_VERSIONS: (0, 4),
    ApiKey.INIT_PRODUCER_ID: (0, 1),
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.SASL_AUTHENTICATE: (0, 1),
}


# --- a broker that answers by script -------------------------------------------------------


class Received(NamedTuple):
    api_key: int
    version: int
    correlation_id: int
    client_id: str
    body: bytes


def parse(received: bytes) -> Received:
    api_key, version, correlation_id, length = struct.unpack_from(">hhih", received)
    end = 10 + length
    body = end + wire.request_header_version(api_key, version) - 1  # no tagged fields: one zero
    return Received(
        api_key, version, correlation_id, received[10:end].decode(), bytes(received[body:])
    )


def response(request: Received, body: bytes, *, correlation_id: int | None = None) -> bytes:
    wanted = request.correlation_id if correlation_id is None else correlation_id
    tags = b"\0" * wire.response_header_version(request.api_key, request.version)
    return frame(struct.pack(">i", wanted) + tags + body)


def api_versions_body(version: int, versions: Versions, error: int = 0, throttle: int = 0) -> bytes:
    entries = [struct.pack(">hhh", key, *span) for key, span in versions.items()]
    if version < 3:
        body = struct.pack(">hi", error, len(entries)) + b"".join(entries)
        return body + (struct.pack(">i", throttle) if version else b"")
    entries = [entry + b"\0" for entry in entries]
    # One finalized feature, transaction.version 2, with epoch 7 (KIP-584).
    name = b"transaction.version"
    features = b"\x02" + bytes([len(name) + 1]) + name + struct.pack(">hh", 2, 2) + b"\0"
    tags = b"\x02\x01\x08" + struct.pack(">q", 7) + b"\x02" + bytes([len(features)]) + features
    head = struct.pack(">h", error) + bytes([len(entries) + 1])
    return head + b"".join(entries) + struct.pack(">i", throttle) + tags


def producer_id_body(producer_id: int = 5, throttle: int = 0) -> bytes:
    return struct.pack(">ihqh", throttle, 0, producer_id, 0)


class Pipe(asyncio.Transport):
    """The client's end of a connection to `Broker`. What it does can be looked at."""

    def __init__(self, broker: Broker, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.broker = broker
        self.protocol = protocol
        self.writes: list[list[Any]] = []
        self.ended: str | None = None
        self.stuck = False
        #: Whether it takes one piece and then has to be emptied.
        self.full = False
        self.lost = False
        #: Whether asyncio has seen the end, but not told of it.
        self.closing = False
        #: With which write it sees it.
        self.closes_at = 0
        #: What a write raises.
        self.error: Exception | None = None
        self.left = 0
        self._frames = FrameReader()

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        assert self.ended is None, "written after the end"
        if self.error is not None:
            raise self.error
        self.writes.append(list(list_of_data))
        self.closing = self.closing or len(self.writes) == self.closes_at
        for received in self._frames.feed(b"".join(list_of_data)):
            asyncio.get_running_loop().call_soon(self.broker.got, self, bytes(received))
        if self.full:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return self.ended is not None or self.lost or self.closing

    def close(self) -> None:
        self.ended = "close"
        if not self.stuck:
            asyncio.get_running_loop().call_soon(self.hang_up)

    def abort(self) -> None:
        self.ended = "abort"
        asyncio.get_running_loop().call_soon(self.hang_up)

    # What the broker and the network do to the client:

    def feed(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def hang_up(self, exc: Exception | None = None) -> None:
        if not self.lost:
            self.lost = True
            self.protocol.connection_lost(exc)


Script = Callable[["Broker", Received], bytes | None]


class Broker:
    """Answers ApiVersions; everything else is `waiting` until a test answers it.

    It is the connector too, and is given a script to answer otherwise: the body of the
    response, b"" for an empty one, None for no response.
    """

    def __init__(self, script: Script | None = None, *, versions: Versions | None = None) -> None:
        self.versions = VERSIONS if versions is None else versions
        self.script = script
        self.requests: list[Received] = []
        self.waiting: list[Received] = []
        self.log: list[str] = []
        self.connects: list[tuple[Address, ssl.SSLContext | None, str | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.pipe: Pipe

    async def resolve(self, host: str, port: int) -> list[Address]:
        return [ADDRESS]

    async def connect(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        address: Address,
        *,
        ssl: ssl.SSLContext | None,
        server_hostname: str | None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        self.connects.append((address, ssl, server_hostname))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        protocol = protocol_factory()
        self.pipe = Pipe(self, protocol)
        protocol.connection_made(self.pipe)
        return self.pipe, protocol

    def got(self, pipe: Pipe, received: bytes) -> None:
        request = parse(received)
        self.log.append(f"{ApiKey(request.api_key).name} v{request.version}")
        body = None if self.script is None else self.script(self, request)
        if body is None and self.script is None and request.api_key == ApiKey.API_VERSIONS:
            body = api_versions_body(request.version, self.versions)
        self.requests.append(request)
        if body is None:
            self.waiting.append(request)
        elif pipe.ended is None:
            pipe.feed(response(request, body))

    def answer(self, *bodies: bytes) -> None:
        """Answers the oldest of the requests that wait, all in one chunk."""
        answered = [self.waiting.pop(0) for _ in bodies]
        self.pipe.feed(b"".join(map(response, answered, bodies)))


class Client:
    """A connection to a `Broker`, and everything that its callbacks were told, in order."""

    def __init__(self, broker: Broker, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: list[str] = []
        self.reason: BaseException | None = None
        self.closed = 0
        self.rooms: list[float] = []
        self.failures: list[str] = []
        self.loop.set_exception_handler(
            lambda loop, context: self.failures.append(context["message"])
        )
        self.broker = broker
        self.metrics = Metrics(client_id="me")
        ssl_context = options.pop("own_context", None)
        self.connection = Connection(
            NODE,
            ProducerConfig.from_options("kafka1:9092", **options),
            broker,
            client_id="me",
            loop=self.loop,
            on_closed=self._on_closed,
            on_room=self._on_room,
            metrics=self.metrics,
            ssl_context=ssl_context,
            random=lambda: 0.5,
        )

    def _on_closed(self, connection: Connection, reason: BaseException) -> None:
        assert connection is self.connection
        assert connection.state is S.CLOSED
        self.reason = reason
        self.closed += 1
        self.events.append("closed")

    def _on_room(self, connection: Connection) -> None:
        assert connection.can_send(self.loop.time())
        self.rooms.append(self.loop.time())

    async def open(self, timeout: float = 10.0) -> None:
        await self.connection.open(ADDRESS, self.loop.time() + timeout)

    def can_send(self) -> bool:
        return self.connection.can_send(self.loop.time())

    def send(
        self,
        name: str,
        *,
        timeout: float = 30.0,
        expect_response: bool = True,
        buffers: Sequence[bytes | bytearray | memoryview] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """A Produce request, whose end becomes the event `name` and what came of it."""
        connection = self.connection
        correlation_id = connection.next_correlation_id()

        def on_done(body: bytes | None, error: BaseException | None) -> None:
            what = bytes(body).decode() if body is not None else type(error).__name__
            self.events.append(f"{name}: {what}")
            if then is not None:
                then()

        header = struct.pack(">hhih", ApiKey.PRODUCE, PRODUCE_VERSION, correlation_id, 0) + b"\0"
        rest = [b"records"] if buffers is None else list(buffers)
        size = struct.pack(">i", len(header) + sum(map(len, rest)))
        connection.send(
            ApiKey.PRODUCE,
            PRODUCE_VERSION,
            correlation_id,
            [size + header, *rest],
            timeout=timeout,
            on_done=on_done,
            expect_response=expect_response,
        )


async def ready(script: Script | None = None, **options: Any) -> tuple[Client, Broker]:
    broker = Broker(script)
    client = Client(broker, **options)
    await client.open()
    return client, broker


async def settle() -> None:
    """Lets everything run that can run now."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- states --------------------------------------------------------------------------------


LEGAL = {
    (S.NEW, S.CONNECTING),
    (S.NEW, S.CLOSED),
    (S.CONNECTING, S.AUTHENTICATING),
    (S.CONNECTING, S.NEGOTIATING),
    (S.CONNECTING, S.CLOSED),
    (S.AUTHENTICATING, S.NEGOTIATING),
    (S.AUTHENTICATING, S.READY),
    (S.AUTHENTICATING, S.CLOSED),
    (S.NEGOTIATING, S.READY),
    (S.NEGOTIATING, S.CLOSED),
    (S.READY, S.AUTHENTICATING),
    (S.READY, S.CLOSED),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
async def test_only_the_legal_moves_are_possible(old: S, new: S) -> None:
    connection = Client(Broker()).connection
    connection._state = old
    if (old, new) in LEGAL:
        connection._move(new)
        assert connection.state is new
    else:
        with pytest.raises(IllegalStateError, match=f"from {old.name} to {new.name}"):
            connection._move(new)


def test_the_table_has_an_entry_for_every_state() -> None:
    assert set(TRANSITIONS) == set(S)


# --- opening -------------------------------------------------------------------------------


async def test_open_negotiates_and_is_ready() -> None:
    """NC-02: discovered versions; CC-01: connect, ready."""
    broker = Broker()
    client = Client(broker)
    connection = client.connection
    await client.open()
    assert connection.state is S.READY
    assert broker.connects == [(ADDRESS, None, None)]
    assert broker.log == ["API_VERSIONS v4"]
    assert broker.requests[0].client_id == "me"
    assert b"asyncproducer" in broker.requests[0].body
    assert connection.versions == VERSIONS
    assert connection.finalized_features == {"transaction.version": 2}
    assert connection.finalized_features_epoch == 7
    assert connection.version(ApiKey.PRODUCE) == 13
    assert connection.version(ApiKey.PRODUCE, 11) == 11
    assert client.can_send()
    assert connection.in_flight == 0
    assert client.closed == 0


async def test_repr_names_the_broker_and_the_state() -> None:
    client = Client(Broker())
    assert repr(client.connection) == "<Connection to broker 1 (kafka1:9092) NEW in_flight=0>"


async def test_an_older_broker_is_asked_again_on_the_same_connection() -> None:
    """NC-05: 35 with a version list."""

    def old(broker: Broker, request: Received) -> bytes:
        error = 35 if request.version > 2 else 0
        return api_versions_body(0 if error else request.version, {18: (0, 2)}, error)

    client, broker = await ready(old)
    assert broker.log == ["API_VERSIONS v4", "API_VERSIONS v2"]
    assert len(broker.connects) == 1
    assert client.connection.versions == {18: (0, 2)}


async def test_a_refused_negotiation_closes_the_connection() -> None:
    """NC-05: another error. NC-13: nobody but open() hears of the internal request."""
    client = Client(Broker(lambda broker, request: api_versions_body(4, {}, 42)))
    with pytest.raises(BrokerError, match="INVALID_REQUEST"):
        await client.open()
    assert client.connection.state is S.CLOSED
    assert client.events == ["closed"]
    assert client.broker.pipe.ended == "abort"
    await client.connection.wait_closed()


async def test_open_twice_is_illegal_and_does_no_harm() -> None:
    client, _ = await ready()
    with pytest.raises(IllegalStateError, match="READY to CONNECTING"):
        await client.open()
    assert client.connection.state is S.READY


async def test_a_failed_connect_is_told_to_both_the_caller_and_on_closed() -> None:
    client = Client(Broker())
    client.broker.error = ConnectionFailed("refused")
    with pytest.raises(ConnectionFailed, match="refused"):
        await client.open()
    assert (client.closed, client.reason) == (1, client.broker.error)
    await client.connection.wait_closed()


async def test_a_connect_that_takes_too_long_fails_at_the_deadline() -> None:
    """NC-08: connection setup timeout."""
    client = Client(Broker())
    client.broker.gate.clear()
    with pytest.raises(ConnectionFailed, match=r"10\.0\.0\.1:9092 was not ready.*connecting"):
        await client.open(10.0)
    assert client.loop.time() == 10.0
    assert client.closed == 1


async def test_a_broker_that_accepts_and_says_nothing_fails_at_the_deadline() -> None:
    """NC-19: a channel that never becomes ready is not stuck."""
    client = Client(Broker(lambda broker, request: None))
    with pytest.raises(ConnectionFailed, match="it was still negotiating"):
        await client.open(10.0)
    assert client.loop.time() == 10.0
    assert client.broker.pipe.ended == "abort"


async def test_the_request_timeout_counts_while_negotiating_too() -> None:
    client = Client(
        Broker(lambda broker, request: None), request_timeout_ms=2000, delivery_timeout_ms=5000
    )
    with pytest.raises(RequestTimedOut, match=r"API_VERSIONS v4 within 2 s"):
        await client.open(10.0)
    assert client.loop.time() == 2.0
    assert isinstance(client.reason, RequestTimedOut)


@pytest.mark.parametrize("connected", [False, True])
async def test_cancelling_open_closes_the_connection(connected: bool) -> None:
    client = Client(Broker(lambda broker, request: None))
    if not connected:
        client.broker.gate.clear()
    task = asyncio.create_task(client.open())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.connection.state is S.CLOSED
    assert isinstance(client.reason, ConnectionFailed)
    assert not connected or client.broker.pipe.ended == "abort"


async def test_closing_while_it_connects_ends_open_with_the_reason() -> None:
    """NC-18: closing a connecting node."""
    client = Client(Broker())
    client.broker.gate.clear()
    task = asyncio.create_task(client.open())
    await settle()
    client.connection.close(ConnectionFailed("not wanted any more"))
    client.broker.gate.set()
    with pytest.raises(ConnectionFailed, match="not wanted"):
        await task
    assert client.broker.pipe.ended == "abort"
    assert client.closed == 1


async def test_closing_while_it_negotiates_ends_open_with_the_reason() -> None:
    client = Client(Broker(lambda broker, request: None))
    task = asyncio.create_task(client.open())
    await settle()
    client.connection.close(ConnectionFailed("not wanted any more"))
    with pytest.raises(ConnectionFailed, match="not wanted"):
        await task


async def test_a_connection_lost_with_the_last_answer_does_not_become_ready() -> None:
    def answer_and_hang_up(broker: Broker, request: Received) -> bytes | None:
        broker.pipe.feed(response(request, api_versions_body(4, VERSIONS)))
        broker.pipe.hang_up()
        return None

    client = Client(Broker(answer_and_hang_up))
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        await client.open()
    assert client.connection.state is S.CLOSED


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers in HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "set security_protocol to SSL"),
        (b"\xff\xff\xff\xff", "does not speak Kafka"),
    ],
)
async def test_a_peer_of_another_kind_is_recognised(said: bytes, error: str) -> None:
    client = Client(Broker(lambda broker, request: broker.pipe.feed(said)))
    with pytest.raises(ProtocolError, match=rf"broker 1 \(kafka1:9092\): .*{error}"):
        await client.open()


SCRAM: dict[str, Any] = {
    "sasl_mechanism": "SCRAM-SHA-256",
    "sasl_username": "me",
    "sasl_password": SECRET,
}


@pytest.mark.parametrize(
    ("options", "guess"),
    [
        ({}, r"the port speaks TLS \(then set security_protocol to SSL\)"),
        (
            {"security_protocol": "SASL_PLAINTEXT", **SCRAM},
            r"the port speaks TLS \(then set security_protocol to SASL_SSL\)",
        ),
        ({"security_protocol": "SSL"}, "it wants another client certificate"),
        ({"security_protocol": "SASL_SSL", **SCRAM}, "it wants another client certificate"),
    ],
    ids=["plaintext", "SASL", "TLS", "SASL and TLS"],
)
async def test_a_peer_that_hangs_up_during_the_handshake_gets_a_guess(
    options: dict[str, Any], guess: str
) -> None:
    client = Client(Broker(lambda broker, request: broker.pipe.hang_up()), **options)
    with pytest.raises(ConnectionFailed, match=f"closed the connection; .*perhaps {guess}"):
        await client.open()


async def test_a_malformed_answer_to_the_handshake_closes() -> None:
    client = Client(Broker(lambda broker, request: b"\0\0\xff"))
    with pytest.raises(ProtocolError, match=r"API_VERSIONS v4 cannot be read"):
        await client.open()
    assert client.connection.state is S.CLOSED


async def test_tls_uses_the_given_context_and_the_brokers_name() -> None:
    own = ssl.create_default_context()
    client, broker = await ready(security_protocol="SSL", ssl_context=own)
    assert broker.connects == [(ADDRESS, own, "kafka1")]
    other = ssl.create_default_context()
    client = Client(broker, security_protocol="SSL", ssl_context=own, own_context=other)
    await client.open()
    assert broker.connects[1] == (ADDRESS, other, "kafka1")


async def test_plaintext_is_plaintext_whatever_context_there_is() -> None:
    """The configuration has said that it would have no effect."""
    own = ssl.create_default_context()
    client, broker = await ready(
        security_protocol="PLAINTEXT", ssl_context=own, own_context=ssl.create_default_context()
    )
    assert client.connection.state is S.READY
    assert broker.connects == [(ADDRESS, None, None)]


async def test_a_bootstrap_broker_is_named_by_its_place() -> None:
    client = Client(Broker())
    connection = Connection(
        Node(-1, "kafka1", 9092),
        ProducerConfig.from_options("kafka1:9092"),
        client.broker,
        client_id="me",
        loop=client.loop,
        on_closed=lambda connection, reason: None,
        on_room=lambda connection: None,
        metrics=client.metrics,
    )
    assert "to bootstrap broker kafka1:9092 NEW" in repr(connection)


# --- sending -------------------------------------------------------------------------------


async def test_requests_are_pipelined_and_answered_in_order() -> None:
    client, broker = await ready()
    for name in "abc":
        client.send(name)
    assert client.connection.in_flight == 3
    await settle()
    assert [r.api_key for r in broker.requests[1:]] == [ApiKey.PRODUCE] * 3
    broker.answer(b"1")
    assert client.events == ["a: 1"]
    assert client.connection.in_flight == 2
    broker.answer(b"2", b"3")
    assert client.events == ["a: 1", "b: 2", "c: 3"]
    assert client.rooms == [], "an answer to send() is not told twice"


async def test_the_shortest_time_of_an_answer_is_remembered() -> None:
    client, broker = await ready()
    assert client.connection.round_trip == 0.0  # of ApiVersions
    client.connection.round_trip = math.inf
    for seconds in (0.5, 0.2, 1.0):
        client.send(f"after {seconds}")
        await asyncio.sleep(seconds)
        broker.answer(b"")
    assert client.connection.round_trip == pytest.approx(0.2)


async def test_answers_may_come_byte_by_byte() -> None:
    client, broker = await ready()
    client.send("a")
    client.send("b")
    await settle()
    stream = b"".join(response(r, b"x") for r in broker.requests[1:])
    for i in range(len(stream)):
        broker.pipe.feed(stream[i : i + 1])
    assert client.events == ["a: x", "b: x"]


async def test_buffers_reach_the_transport_as_they_are() -> None:
    client, broker = await ready()
    records = bytearray(b"records")
    view = memoryview(b"more")
    client.send("a", buffers=[records, view])
    assert broker.pipe.writes[-1][1] is records
    assert broker.pipe.writes[-1][2] is view


async def test_nothing_is_written_when_it_cannot_send() -> None:
    """NC-01: sending to an unready node."""
    client = Client(Broker())
    with pytest.raises(IllegalStateError, match="cannot send now: it is NEW"):
        client.send("new")
    await client.open()
    client.broker.pipe.protocol.pause_writing()
    written = len(client.broker.pipe.writes)
    with pytest.raises(IllegalStateError, match="the socket takes no more bytes"):
        client.send("paused")
    client.broker.pipe.protocol.resume_writing()
    client.connection.throttle(500, client.loop.time())
    with pytest.raises(IllegalStateError, match=r"throttles it for 0\.500 s"):
        client.send("throttled")
    with pytest.raises(IllegalStateError, match="throttles"):
        await client.connection.request(wire.InitProducerIdRequest(None, 1000))
    assert len(client.broker.pipe.writes) == written
    client.connection.close()
    with pytest.raises(IllegalStateError, match="it is CLOSED"):
        client.send("closed")
    assert client.events == ["closed"]


async def test_nothing_is_written_to_what_asyncio_knows_is_lost() -> None:
    """It says so in the next turn of the loop, and whoever comes before that must wait for it."""
    client, broker = await ready()
    written = len(broker.pipe.writes)
    broker.pipe.closing = True
    assert not client.can_send()
    with pytest.raises(IllegalStateError, match="it has just been lost"):
        client.send("late")
    assert len(broker.pipe.writes) == written
    broker.pipe.hang_up()
    assert client.events == ["closed"]


async def test_what_is_found_lost_by_writing_gets_no_more() -> None:
    client, broker = await ready()
    broker.pipe.writes.clear()
    broker.pipe.closes_at = 2
    client.send("large", buffers=[bytes(3 * PIECE_BYTES)])
    assert len(broker.pipe.writes) == 2
    broker.pipe.hang_up()
    await settle()
    assert len(broker.pipe.writes) == 2
    assert client.events == ["large: ConnectionFailed", "closed"]


@pytest.mark.parametrize("ends", ["by itself", "in peace", "with a reason"])
async def test_a_transport_that_fails_is_a_connection_that_is_lost(ends: str) -> None:
    """Who sends hears of it once, and not in the middle of sending."""
    client, broker = await ready()
    client.send("before")
    broker.pipe.error = MemoryError("no room")
    client.send("a")
    assert client.events == []
    assert not client.can_send(), "what follows would get behind half a request"
    if ends != "by itself":
        client.connection.close(ConnectionFailed("enough") if ends == "with a reason" else None)
    await settle()
    assert client.events == ["before: ConnectionFailed", "a: ConnectionFailed", "closed"]
    if ends == "by itself":
        assert isinstance(client.reason, ConnectionFailed)
        assert "no room" in str(client.reason)
        assert client.reason.__cause__ is broker.pipe.error


async def test_the_last_bytes_may_fail_to_leave() -> None:
    client, broker = await ready()
    broker.pipe.full = True
    client.send("large", buffers=[bytes(3 * PIECE_BYTES)])
    broker.pipe.error = TypeError("a bug of somebody else")
    client.connection.close()
    assert broker.pipe.ended == "abort"
    await settle()
    assert client.events == ["large: ConnectionFailed", "closed"]


def sizes(pipe: Pipe) -> list[int]:
    return [sum(map(len, piece)) for piece in pipe.writes]


async def test_a_large_request_leaves_in_pieces_as_the_socket_takes_them() -> None:
    """Handed over at once, all of it would be copied, twice on CPython 3.11."""
    client, broker = await ready()
    rooms: list[int] = []
    client.connection._on_room = lambda connection: rooms.append(len(broker.pipe.writes))
    broker.pipe.writes.clear()
    broker.pipe.full = True
    client.send("large", buffers=[bytes(PIECE_BYTES), bytes(PIECE_BYTES // 2)])
    # With the small head as little of what is large as makes a write worth it.
    assert sizes(broker.pipe) == [16 * 1024]
    assert not client.can_send()
    broker.pipe.full = False
    broker.pipe.protocol.resume_writing()
    assert sum(sizes(broker.pipe)) > 1.5 * PIECE_BYTES
    assert rooms == [3]
    assert client.can_send()


async def test_the_loop_turns_while_a_very_large_request_leaves() -> None:
    """Also where the socket takes all of it."""
    client, broker = await ready()
    rooms: list[bool] = []
    client.connection._on_room = lambda connection: rooms.append(client.can_send())
    broker.pipe.writes.clear()
    client.send("very large", buffers=[bytes(20 * PIECE_BYTES)])
    assert sizes(broker.pipe) == [16 * 1024] + [PIECE_BYTES] * 2
    assert not client.can_send()
    with pytest.raises(IllegalStateError, match="the socket takes no more bytes"):
        client.send("another")
    await settle()
    assert sum(sizes(broker.pipe)) > 20 * PIECE_BYTES
    assert max(sizes(broker.pipe)) == PIECE_BYTES
    assert rooms == [True]


async def test_the_loop_turns_where_writing_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a turn may write is for all requests of that turn."""
    client, broker = await ready()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    write = broker.pipe.write

    def slow_write(data: bytes) -> None:
        write(data)
        loop._set_time(loop.time() + 0.0003)

    monkeypatch.setattr(broker.pipe, "write", slow_write)
    broker.pipe.writes.clear()
    for name in ("first", "second"):
        client.send(name, buffers=[bytes(100_000)])
        assert client.can_send()
    client.send("third", buffers=[bytes(100_000)])
    assert not client.can_send()
    assert sum(sizes(broker.pipe)) < 201_000
    await settle()
    assert client.can_send()
    assert sum(sizes(broker.pipe)) > 300_000


@pytest.mark.parametrize("reason", [None, ConnectionFailed("enough")])
@pytest.mark.parametrize(
    ("buffers", "first"),
    [([3 * PIECE_BYTES], 16 * 1024), ([20_000, 200_000, 7, 40_000, 300_000], 20_015)],
)
async def test_closed_in_peace_what_was_sent_may_still_leave(
    reason: ConnectionFailed | None, buffers: list[int], first: int
) -> None:
    client, broker = await ready()
    broker.pipe.writes.clear()
    broker.pipe.full = True
    client.send("large", buffers=[bytes(size) for size in buffers])
    client.connection.close(reason)
    pieces = sizes(broker.pipe)
    assert pieces[0] == first
    assert (sum(pieces) > sum(buffers)) == (reason is None)
    assert broker.pipe.ended == ("close" if reason is None else "abort")
    broker.pipe.protocol.resume_writing()
    assert sizes(broker.pipe) == pieces


async def test_without_an_answer_a_request_is_done_with_its_last_piece() -> None:
    client, broker = await ready()
    broker.pipe.full = True
    client.send("large", buffers=[bytes(2 * PIECE_BYTES)], expect_response=False)
    await settle()
    assert client.events == []
    broker.pipe.protocol.resume_writing()
    await settle()
    assert client.events == []
    broker.pipe.full = False
    broker.pipe.protocol.resume_writing()
    await settle()
    assert len(client.events) == 1


async def test_at_most_max_in_flight_requests_are_out() -> None:
    """All kinds of requests count."""
    client, broker = await ready(max_in_flight_requests_per_connection=2)
    client.send("a")
    task = asyncio.create_task(client.connection.request(wire.InitProducerIdRequest(None, 1000)))
    await settle()
    assert not client.can_send()
    with pytest.raises(IllegalStateError, match="2 requests are in flight"):
        client.send("c")
    broker.answer(b"1", producer_id_body())
    assert client.can_send()
    assert (await task).producer_id == 5


async def test_the_answer_to_a_request_tells_of_the_room_that_it_made() -> None:
    """Whoever waits for room to send() does not see the answers to request()."""
    client, broker = await ready(max_in_flight_requests_per_connection=1)
    for expected in (1, 2):
        task = asyncio.create_task(
            client.connection.request(wire.InitProducerIdRequest(None, 1000))
        )
        await settle()
        assert not client.can_send()
        broker.answer(producer_id_body())
        assert len(client.rooms) == expected
        await task


async def test_without_a_response_the_bytes_are_all_there_is() -> None:
    """SN-20: the system has taken them, and nothing that comes later takes them back."""
    client, broker = await ready(acks=0, enable_idempotence=False)
    client.send("a", expect_response=False)
    assert client.events == [], "on_done is never called from inside send()"
    assert client.connection.in_flight == 0
    client.connection.close()
    await settle()
    assert client.events == ["closed", "a: NoneType"]
    assert len(broker.requests) == 2


async def with_unwritten(*names: str) -> tuple[Client, MemoryNetwork]:
    """A connection whose peer reads nothing, and these requests that get no answer."""
    network = MemoryNetwork(window=1000)
    client = await in_memory(network, WithoutAcks)
    network.links[0].to_server.stall()
    for name in names:
        client.send(name, buffers=[bytes(5000)], expect_response=False)
    return client, network


async def test_without_a_response_a_request_ends_when_the_system_has_it() -> None:
    """SN-20: what the transport holds would be lost with it."""
    client, network = await with_unwritten("a", "b")
    await asyncio.sleep(20)
    assert client.events == []
    assert client.connection.in_flight == 2
    network.links[0].to_server.resume()
    await asyncio.sleep(0.1)
    assert client.events == ["a: NoneType", "b: NoneType"]
    assert client.connection.in_flight == 0
    client.connection.close()
    await client.connection.wait_closed()


async def test_a_request_ends_with_its_own_bytes_not_with_those_behind_it() -> None:
    client, broker = await ready()
    broker.pipe.left = 10_000
    client.send("a", expect_response=False)
    client.send("b")
    client.send("c", expect_response=False)
    b, c = [sum(map(len, write)) for write in broker.pipe.writes[-2:]]
    for left, events in ((b + c + 1, []), (b + c, ["a: NoneType"]), (1, ["a: NoneType"])):
        broker.pipe.left = left
        await asyncio.sleep(0.01)
        assert client.events == events
    assert client.connection.in_flight == 2
    client.connection.close()


async def test_a_request_ends_without_a_wait_when_writing_goes_on_after_a_pause() -> None:
    client, broker = await ready()
    broker.pipe.left = 10_000
    client.send("a", expect_response=False)
    broker.pipe.protocol.pause_writing()
    await asyncio.sleep(0.001)
    broker.pipe.left = 0
    broker.pipe.protocol.resume_writing()
    await asyncio.sleep(0)
    assert client.events == ["a: NoneType"]
    assert client.loop.time() == 0.001


@pytest.mark.parametrize("how", ["lost", "closed", "closed in peace"])
async def test_what_is_not_written_at_the_end_fails_and_what_is_does_not(how: str) -> None:
    client, broker = await ready()
    client.send("written", expect_response=False)
    broker.pipe.left = 10_000
    client.send("a", expect_response=False)
    client.send("b", expect_response=False)
    assert client.connection.in_flight == 2
    if how == "lost":
        broker.pipe.left = 0  # dropped
        broker.pipe.hang_up()
    else:
        client.connection.close(ConnectionFailed("enough") if how == "closed" else None)
    assert client.connection.in_flight == 0
    await settle()
    failed = ["a: ConnectionFailed", "b: ConnectionFailed", "closed"]
    assert sorted(client.events) == sorted([*failed, "written: NoneType"])
    assert [event for event in client.events if event in failed] == failed


async def test_what_has_left_meanwhile_is_seen_before_the_end() -> None:
    client, broker = await ready()
    broker.pipe.left = 10_000
    client.send("a", expect_response=False)
    await asyncio.sleep(0.001)
    broker.pipe.left = 0
    client.connection.close(ConnectionFailed("enough"))
    await settle()
    assert sorted(client.events) == ["a: NoneType", "closed"]


async def test_a_request_that_cannot_be_written_in_time_ends_the_connection() -> None:
    """6.6: in Java it is in flight as well. The peer may be gone without a word."""
    client, _ = await with_unwritten("a", "b")
    await asyncio.sleep(29.9)
    assert client.events == []
    await asyncio.sleep(0.2)
    assert client.events == ["a: RequestTimedOut", "b: RequestTimedOut", "closed"]
    assert re.search(
        r"did not take all of PRODUCE v9 within 30 s: .* 2 requests", str(client.reason)
    )
    await client.connection.wait_closed()


async def test_throttle_time_is_time_to_write_in() -> None:
    """NC-09: the broker reads nothing meanwhile."""
    client, _ = await with_unwritten("a")
    client.connection.throttle(5000, client.loop.time())
    await asyncio.sleep(34.9)
    assert client.events == []
    await asyncio.sleep(0.2)
    assert client.events == ["a: RequestTimedOut", "closed"]
    await client.connection.wait_closed()


async def test_correlation_ids_are_unique_and_leave_out_sasls_range() -> None:
    """NC-16."""
    connection = Client(Broker()).connection
    ids = [connection.next_correlation_id() for _ in range(3)]
    connection._correlation_id = 2147483638
    ids += [connection.next_correlation_id() for _ in range(3)]
    assert ids == [0, 1, 2, 2147483638, 2147483639, -2147483648]


async def test_last_used_moves_with_every_write_and_answer() -> None:
    client, broker = await ready()
    await asyncio.sleep(5)
    assert client.connection.last_used == 0.0
    client.send("a")
    assert client.connection.last_used == 5.0
    await asyncio.sleep(1)
    broker.answer(b"1")
    assert client.connection.last_used == 6.0


# --- answers that break the rules ----------------------------------------------------------


async def test_an_answer_out_of_order_ends_everything_oldest_first() -> None:
    client, broker = await ready()
    for name in "abc":
        client.send(name)
    await settle()
    broker.pipe.feed(response(broker.requests[2], b"1"))
    assert client.events == [
        "a: ProtocolError",
        "b: ProtocolError",
        "c: ProtocolError",
        "closed",
    ]
    assert "correlation id 2" in str(client.reason)
    assert broker.pipe.ended == "abort"


async def test_an_answer_to_nothing_ends_the_connection() -> None:
    client, broker = await ready()
    broker.pipe.feed(frame(b"\0\0\0\0"))
    assert isinstance(client.reason, ProtocolError)
    assert "nothing was asked" in str(client.reason)


async def test_answers_before_the_broken_one_count() -> None:
    client, broker = await ready()
    client.send("a")
    client.send("b")
    await settle()
    broker.pipe.feed(response(broker.requests[1], b"1") + b"\xff\xff\xff\xff")
    assert client.events == ["a: 1", "b: ProtocolError", "closed"]


async def test_what_comes_after_the_end_is_ignored() -> None:
    client, broker = await ready()
    client.send("a", then=client.connection.close)
    client.send("b")
    await settle()
    broker.answer(b"1", b"2")
    broker.pipe.feed(b"more")
    assert client.events == ["a: 1", "b: ConnectionFailed", "closed"]


# --- request() -----------------------------------------------------------------------------


PRODUCER_ID = wire.InitProducerIdRequest(None, 1000)


async def test_request_sends_the_version_of_both_and_reads_the_answer() -> None:
    """NC-02: request and response."""
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    assert broker.log[-1] == "INIT_PRODUCER_ID v1"
    broker.answer(producer_id_body(99))
    assert (await task).producer_id == 99
    task = asyncio.create_task(client.connection.request(PRODUCER_ID, cap=0))
    await settle()
    assert broker.log[-1] == "INIT_PRODUCER_ID v0"
    broker.answer(producer_id_body(98))
    assert (await task).producer_id == 98


async def test_a_cancelled_request_stays_in_flight_and_its_answer_is_dropped() -> None:
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.connection.in_flight == 1
    other = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    broker.answer(producer_id_body(1, throttle=100), producer_id_body(2))
    assert (await other).producer_id == 2
    assert client.connection.in_flight == 0
    assert client.connection.throttled_until == 0.1, "its throttle time counts all the same"


@pytest.mark.parametrize("answered", [True, False])
async def test_a_cancelled_request_that_fails_later_bothers_nobody(answered: bool) -> None:
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    if answered:
        broker.answer(b"short")
    else:
        client.connection.close()
    await settle()
    assert client.failures == []
    assert client.events == ["closed"]


async def test_a_malformed_answer_fails_its_request_and_ends_the_connection() -> None:
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    client.send("b")
    await settle()
    broker.answer(b"short")
    with pytest.raises(ProtocolError, match="INIT_PRODUCER_ID v1 cannot be read"):
        await task
    assert client.events == ["b: ProtocolError", "closed"]


async def test_a_version_that_the_broker_does_not_speak_is_an_error_and_nothing_is_sent() -> None:
    """NC-06: unsupported version."""
    client, broker = await ready()
    with pytest.raises(UnsupportedVersionError, match="FindCoordinator"):
        await client.connection.request(wire.FindCoordinatorRequest(0, ["g"]))
    assert client.connection.in_flight == 0
    assert len(broker.pipe.writes) == 1


async def test_a_lost_connection_fails_its_requests() -> None:
    """NC-13: disconnect during a user's request."""
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID))
    await settle()
    broker.pipe.hang_up(ConnectionResetError(104, "reset"))
    with pytest.raises(ConnectionFailed, match="Connection reset by peer") as e:
        await task
    assert isinstance(e.value.__cause__, ConnectionResetError)


# --- timeouts ------------------------------------------------------------------------------


async def test_one_late_answer_ends_everything_oldest_first() -> None:
    """NC-07; NC-14: completed in send order."""
    client, _ = await ready()
    client.send("a", timeout=30)
    await asyncio.sleep(1)
    client.send("b", timeout=5)
    client.send("c", timeout=60)
    await asyncio.sleep(4.5)
    assert client.events == []
    await asyncio.sleep(1)
    assert client.events == [
        "a: RequestTimedOut",
        "b: RequestTimedOut",
        "c: RequestTimedOut",
        "closed",
    ]
    assert "PRODUCE v9 within 5 s" in str(client.reason)
    assert client.broker.pipe.ended == "abort"


async def test_request_has_the_configured_timeout_unless_told_otherwise() -> None:
    """NC-07: per-request timeout and default timeout."""
    for timeout, expected in ((None, 3.0), (1.0, 1.0)):
        client, _ = await ready(request_timeout_ms=3000, delivery_timeout_ms=5000)
        start = client.loop.time()
        with pytest.raises(RequestTimedOut, match=f"within {expected:g} s"):
            await client.connection.request(PRODUCER_ID, timeout=timeout)
        assert client.loop.time() - start == expected


async def test_an_answer_in_time_is_no_timeout() -> None:
    client, broker = await ready()
    client.send("a", timeout=5)
    await asyncio.sleep(4)
    broker.answer(b"1")
    await asyncio.sleep(60)
    assert client.events == ["a: 1"]


# --- throttling ----------------------------------------------------------------------------


async def test_a_throttled_connection_is_silent_until_the_time_is_over() -> None:
    """CC-06; NC-09: request sent after throttle ends, connection not ready during it."""
    client, _ = await ready()
    client.connection.throttle(100, client.loop.time())
    assert not client.can_send()
    assert not client.connection.can_send(0.099)
    assert client.connection.can_send(0.1)
    await asyncio.sleep(1)
    assert client.rooms == [0.1]
    client.send("a")


async def test_the_end_of_a_throttle_never_moves_back() -> None:
    client, _ = await ready()
    client.connection.throttle(100, 0.0)
    client.connection.throttle(50, 0.0)
    assert client.connection.throttled_until == 0.1
    client.connection.throttle(300, 0.0)
    await asyncio.sleep(1)
    assert client.rooms == [0.3]


async def test_no_throttle_time_changes_nothing() -> None:
    client, _ = await ready()
    for none in (0, -1):
        client.connection.throttle(none, 0.0)
    assert client.can_send()
    await asyncio.sleep(1)
    assert client.rooms == []


async def test_throttle_time_extends_the_deadlines_in_flight() -> None:
    """NC-09: throttle time extends the request timeout."""
    client, _ = await ready()
    client.send("a", timeout=5)
    client.connection.throttle(2000, client.loop.time())
    client.connection.throttle(1000, client.loop.time())
    await asyncio.sleep(7.9)
    assert client.events == []
    await asyncio.sleep(0.2)
    assert client.events == ["a: RequestTimedOut", "closed"]


@pytest.mark.parametrize(("version", "until"), [(0, 0.0), (1, 0.25)])
async def test_only_newer_versions_throttle(version: int, until: float) -> None:
    """NC-09: responses below the version threshold do not throttle."""
    client, broker = await ready()
    task = asyncio.create_task(client.connection.request(PRODUCER_ID, cap=version))
    await settle()
    broker.answer(producer_id_body(5, throttle=250))
    await task
    assert client.connection.throttled_until == until


async def test_a_throttle_in_the_handshake_counts() -> None:
    client, _ = await ready(lambda broker, request: api_versions_body(4, VERSIONS, throttle=400))
    assert client.connection.state is S.READY
    assert not client.can_send()
    await asyncio.sleep(1)
    assert client.rooms == [0.4]


async def test_a_closed_connection_is_not_throttled_and_has_no_room() -> None:
    client, _ = await ready()
    client.connection.throttle(100, 0.0)
    client.connection.close()
    client.connection.throttle(900, 0.0)
    await asyncio.sleep(1)
    assert client.rooms == []
    assert client.connection.throttled_until == 0.1


# --- backpressure --------------------------------------------------------------------------


async def test_a_full_socket_buffer_stops_the_sending_until_it_drains() -> None:
    client, broker = await ready()
    broker.pipe.protocol.pause_writing()
    assert not client.can_send()
    broker.pipe.protocol.resume_writing()
    assert client.rooms == [0.0]


async def test_a_drained_buffer_is_no_room_while_something_else_is_in_the_way() -> None:
    client, broker = await ready()
    broker.pipe.protocol.pause_writing()
    client.connection.throttle(100, 0.0)
    broker.pipe.protocol.resume_writing()
    assert client.rooms == []
    await asyncio.sleep(1)
    assert client.rooms == [0.1]


# --- callbacks -----------------------------------------------------------------------------


def explode() -> None:
    raise RuntimeError("a callback's own problem")


async def test_a_callback_that_raises_is_reported_and_the_others_run() -> None:
    client, broker = await ready()
    client.send("a", then=explode)
    client.send("b")
    client.send("c", then=explode)
    client.send("d")
    await settle()
    broker.answer(b"1", b"2")
    client.connection.close()
    assert client.events == ["a: 1", "b: 2", "c: ConnectionFailed", "d: ConnectionFailed", "closed"]
    assert client.failures == ["a callback of the connection to broker 1 (kafka1:9092) failed"] * 2


async def test_a_failing_on_closed_is_reported() -> None:
    client, _ = await ready()
    client.connection._on_closed = lambda connection, reason: explode()
    client.connection.close()
    assert len(client.failures) == 1


async def test_a_callback_may_send_at_once() -> None:
    client, broker = await ready(max_in_flight_requests_per_connection=1)
    client.send("a", then=lambda: client.send("b"))
    await settle()
    broker.answer(b"1")
    await settle()
    broker.answer(b"2")
    assert client.events == ["a: 1", "b: 2"]


async def test_a_callback_may_close() -> None:
    client, broker = await ready()
    client.send("a", then=client.connection.close)
    client.send("b", then=client.connection.close)
    await settle()
    broker.answer(b"1")
    assert client.events == ["a: 1", "b: ConnectionFailed", "closed"]


async def test_a_callback_cannot_send_on_a_closing_connection() -> None:
    client, _ = await ready()
    client.send("a", then=lambda: client.send("b"))
    client.connection.close()
    assert client.events == ["a: ConnectionFailed", "closed"]
    assert len(client.failures) == 1


# --- the end -------------------------------------------------------------------------------


async def test_close_completes_what_is_in_flight_oldest_first_and_then_tells() -> None:
    """NC-14: disconnect with several in flight."""
    client, _ = await ready()
    for name in "abc":
        client.send(name)
    reason = ConnectionFailed("idle")
    client.connection.close(reason)
    client.connection.close()
    assert client.events == [
        "a: ConnectionFailed",
        "b: ConnectionFailed",
        "c: ConnectionFailed",
        "closed",
    ]
    assert (client.closed, client.reason) == (1, reason)
    await client.connection.wait_closed()
    await asyncio.sleep(60)
    assert client.closed == 1


async def test_a_new_connection_may_be_closed() -> None:
    client = Client(Broker())
    client.connection.close()
    await client.connection.wait_closed()
    assert client.closed == 1
    assert "closed by this client" in str(client.reason)


async def test_closing_in_peace_lets_written_bytes_leave() -> None:
    client, broker = await ready()
    client.connection.close()
    assert broker.pipe.ended == "close"
    await client.connection.wait_closed()


async def test_closing_in_peace_does_not_wait_for_ever() -> None:
    client, broker = await ready()
    broker.pipe.stuck = True
    client.connection.close()
    assert broker.pipe.ended == "close"
    await client.connection.wait_closed()
    assert client.loop.time() == 1.0
    assert broker.pipe.ended == "abort"


async def test_a_closing_connection_may_be_cut() -> None:
    client, broker = await ready()
    broker.pipe.stuck = True
    client.connection.close()
    client.connection.abort()
    await client.connection.wait_closed()
    assert client.loop.time() == 0.0
    assert broker.pipe.ended == "abort"
    broker.pipe.ended = "long ago"
    client.connection.abort()
    await asyncio.sleep(2.0)
    assert broker.pipe.ended == "long ago", "neither twice nor by the timer"


async def test_wait_closed_may_be_cancelled_and_called_again() -> None:
    client, broker = await ready()
    broker.pipe.stuck = True
    client.connection.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.connection.wait_closed()
    await client.connection.wait_closed()


async def test_a_lost_connection_tells_once() -> None:
    client, broker = await ready()
    client.send("a")
    broker.pipe.hang_up()
    client.connection.close()
    assert client.events == ["a: ConnectionFailed", "closed"]
    await client.connection.wait_closed()


async def test_a_loss_before_the_first_answer_may_be_for_lack_of_sasl() -> None:
    client, broker = await ready()
    client.send("a")
    broker.pipe.hang_up()
    assert "SASL listener" in str(client.reason)


async def test_a_loss_in_the_middle_of_an_answer_says_so() -> None:
    client, broker = await ready()
    client.send("a")
    await settle()
    broker.pipe.feed(response(broker.requests[1], b"1")[:-1])
    broker.pipe.hang_up()
    assert "in the middle of a response" in str(client.reason)


async def test_a_loss_in_idleness_needs_no_hint() -> None:
    client, broker = await ready()
    broker.pipe.hang_up()
    assert str(client.reason) == "broker 1 (kafka1:9092) closed the connection"


# --- SASL ----------------------------------------------------------------------------------


def sasl_script(
    *,
    lifetime_ms: int = 0,
    error: int = 0,
    message: bytes = b"",
    seen: list[bytes] | None = None,
) -> Script:
    """A broker with PLAIN: answers SASL; leaves the rest to the test."""

    def script(broker: Broker, request: Received) -> bytes | None:
        match request.api_key:
            case ApiKey.API_VERSIONS:
                return api_versions_body(request.version, broker.versions)
            case ApiKey.SASL_HANDSHAKE:
                return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
            case ApiKey.SASL_AUTHENTICATE:
                if seen is not None:
                    seen.append(request.body[4:])
                text = struct.pack(">h", len(message)) + message
                return struct.pack(">h", error) + text + struct.pack(">iq", 0, lifetime_ms)
        return None

    return script


PLAIN: dict[str, Any] = {
    "security_protocol": "SASL_PLAINTEXT",
    "sasl_mechanism": "PLAIN",
    "sasl_username": "alice",
    "sasl_password": SECRET,
}


async def test_sasl_comes_before_the_negotiation() -> None:
    tokens: list[bytes] = []
    client, broker = await ready(sasl_script(seen=tokens), **PLAIN)
    assert broker.log == [
        "API_VERSIONS v0",
        "SASL_HANDSHAKE v1",
        "SASL_AUTHENTICATE v1",
        "API_VERSIONS v4",
    ]
    assert tokens == [b"\0alice\0hunter2"]
    assert [r.correlation_id for r in broker.requests] == [
        SASL_FIRST_ID,
        SASL_FIRST_ID + 1,
        SASL_FIRST_ID + 2,
        0,
    ]
    assert client.can_send()


async def test_sasl_ids_stay_in_their_range() -> None:
    connection = Client(Broker()).connection
    connection._sasl_id = SASL_FIRST_ID + 6
    ids = [connection._next_sasl_id() for _ in range(3)]
    assert ids == [SASL_FIRST_ID + 6, SASL_FIRST_ID + 7, SASL_FIRST_ID]


async def test_a_refused_password_closes_with_the_brokers_words_and_no_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CC-03: authentication failure."""
    caplog.set_level(logging.DEBUG)
    client = Client(Broker(sasl_script(error=58, message=b"Invalid username")), **PLAIN)
    with pytest.raises(AuthenticationError, match="PLAIN: Invalid username") as e:
        await client.open()
    assert e.value.code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert client.reason is e.value
    assert client.connection.state is S.CLOSED
    assert caplog.records
    assert SECRET not in caplog.text + str(e.value) + repr(client.connection)


async def test_bare_tokens_for_brokers_before_1_0() -> None:
    def old(broker: Broker, request: Received) -> bytes | None:
        if request.api_key == ApiKey.SASL_HANDSHAKE:
            # From here on the stream has bare tokens.
            broker.pipe.broker = RawTokens(broker)
        return sasl_script()(broker, request)

    class RawTokens(Broker):
        def __init__(self, after: Broker) -> None:
            super().__init__()
            self.after = after

        def got(self, pipe: Pipe, received: bytes) -> None:
            assert received == b"\0alice\0hunter2"
            pipe.broker = self.after
            pipe.feed(frame(b""))

    broker = Broker(old, versions={**VERSIONS})
    del broker.versions[ApiKey.SASL_AUTHENTICATE]
    client = Client(broker, **PLAIN)
    await client.open()
    assert broker.log == ["API_VERSIONS v0", "SASL_HANDSHAKE v0", "API_VERSIONS v4"]


async def test_a_broker_that_hangs_up_on_a_bare_token_fails_the_opening() -> None:
    """Brokers before 1.0 have no other way to refuse a password."""

    def old(broker: Broker, request: Received) -> bytes | None:
        if request.api_key == ApiKey.SASL_HANDSHAKE:
            broker.pipe.broker = refusing
        return sasl_script()(broker, request)

    refusing = Broker()
    refusing.got = lambda pipe, received: pipe.hang_up()  # type: ignore[method-assign]
    broker = Broker(old, versions={**VERSIONS})
    del broker.versions[ApiKey.SASL_AUTHENTICATE]
    client = Client(broker, **PLAIN)
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        await client.open()
    assert len(client.broker.pipe.writes) == 3


async def test_a_token_provider_that_hangs_is_ended_by_the_deadline() -> None:
    async def provider() -> str:
        await asyncio.Event().wait()
        return "never"

    client = Client(
        Broker(sasl_script()),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=provider,
    )
    with pytest.raises(ConnectionFailed, match="still authenticating"):
        await client.open(10)


async def test_a_listener_that_hangs_up_on_sasl_clients_needs_no_hint_about_sasl() -> None:
    client, broker = await ready(sasl_script(), **PLAIN)
    client.send("a")
    broker.pipe.hang_up()
    assert str(client.reason) == "broker 1 (kafka1:9092) closed the connection"


async def test_cancelling_an_exchange_of_bare_tokens_closes() -> None:
    def old(broker: Broker, request: Received) -> bytes | None:
        if request.api_key == ApiKey.SASL_HANDSHAKE:
            broker.pipe.broker = silent
        return sasl_script()(broker, request)

    silent = Broker()
    silent.got = lambda pipe, received: None  # type: ignore[method-assign]
    broker = Broker(old, versions={**VERSIONS})
    del broker.versions[ApiKey.SASL_AUTHENTICATE]
    client = Client(broker, **PLAIN)
    with pytest.raises(ConnectionFailed, match="still authenticating"):
        await client.open(5)
    assert client.connection.in_flight == 0
    assert client.failures == []


async def test_a_request_before_open_is_illegal() -> None:
    with pytest.raises(IllegalStateError, match="not open"):
        await Client(Broker()).connection.ask(PRODUCER_ID, 0)


# --- authenticating again (KIP-368) --------------------------------------------------------


async def test_the_session_is_renewed_before_it_ends() -> None:
    client, broker = await ready(sasl_script(lifetime_ms=100_000), **PLAIN)
    del broker.log[:], broker.requests[:]
    await asyncio.sleep(89.9)
    assert broker.log == []
    await asyncio.sleep(0.2)
    assert broker.log == ["SASL_HANDSHAKE v1", "SASL_AUTHENTICATE v1"]
    assert [r.correlation_id for r in broker.requests] == [SASL_FIRST_ID, SASL_FIRST_ID + 1]
    assert client.connection.state is S.READY
    assert client.rooms == [pytest.approx(90.0)]
    await asyncio.sleep(90)
    assert len(broker.log) == 4, "and again"


async def test_a_session_shorter_than_the_negotiation_is_renewed_at_once() -> None:
    def slow(broker: Broker, request: Received) -> bytes | None:
        lifetime_ms = 1000 if len(broker.log) < 5 else 100_000
        return (
            None if len(broker.log) == 4 else sasl_script(lifetime_ms=lifetime_ms)(broker, request)
        )

    client = Client(Broker(slow), **PLAIN)
    opening = asyncio.create_task(client.open())
    await asyncio.sleep(5)
    client.broker.answer(api_versions_body(4, VERSIONS))
    await opening
    await settle()
    assert client.broker.log[4:] == ["SASL_HANDSHAKE v1", "SASL_AUTHENTICATE v1"]
    assert client.can_send()


async def test_requests_in_flight_finish_first_and_new_ones_wait() -> None:
    client, broker = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    del broker.log[:]
    await asyncio.sleep(8.9)
    client.send("a")
    client.send("b")
    await asyncio.sleep(0.5)
    assert not client.can_send()
    with pytest.raises(IllegalStateError, match="authenticate again"):
        client.send("c")
    broker.answer(b"1")
    await settle()
    assert broker.log == ["PRODUCE v9"] * 2
    broker.answer(b"2")
    await settle()
    assert client.events == ["a: 1", "b: 2"]
    assert broker.log[2:] == ["SASL_HANDSHAKE v1", "SASL_AUTHENTICATE v1"]
    assert len(client.rooms) == 1
    client.send("c")
    await settle()
    broker.answer(b"3")
    assert client.events[-1] == "c: 3"


async def test_a_refused_renewal_closes_after_what_was_in_flight() -> None:
    """Nothing that the broker has already taken is lost."""
    client, broker = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    await asyncio.sleep(8.9)
    client.send("a")
    broker.script = sasl_script(error=58, message=b"revoked")
    await asyncio.sleep(0.5)
    broker.answer(b"1")
    await settle()
    assert client.events == ["a: 1", "closed"]
    assert isinstance(client.reason, AuthenticationError)
    await client.connection.wait_closed()


class Provider:
    """Gives a first token, and then does what the test says."""

    def __init__(self) -> None:
        self.calls = 0
        self.then: Exception | asyncio.Event = asyncio.Event()

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls > 1:
            if isinstance(self.then, Exception):
                raise self.then
            await self.then.wait()
        return "token"


async def with_provider() -> tuple[Client, Provider]:
    provider = Provider()
    client, _ = await ready(
        sasl_script(lifetime_ms=10_000),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=provider,
        request_timeout_ms=4000,
        delivery_timeout_ms=5000,
    )
    return client, provider


async def test_sending_goes_on_while_the_token_provider_is_asked() -> None:
    client, provider = await with_provider()
    await asyncio.sleep(10)
    assert provider.calls == 2
    assert client.can_send()
    assert isinstance(provider.then, asyncio.Event)
    provider.then.set()
    await settle()
    assert client.rooms == [10.0]


async def test_a_token_provider_that_hangs_at_the_renewal_ends_the_connection() -> None:
    client, _ = await with_provider()
    await asyncio.sleep(20)
    assert isinstance(client.reason, AuthenticationError)
    assert "within request_timeout_ms" in str(client.reason)


async def test_a_token_provider_that_fails_at_the_renewal_lets_requests_finish() -> None:
    client, provider = await with_provider()
    provider.then = OSError("no network")
    await asyncio.sleep(8.9)
    client.send("a")
    await asyncio.sleep(0.5)
    assert client.events == []
    client.broker.answer(b"1")
    await settle()
    assert client.events == ["a: 1", "closed"]
    assert "failed with OSError" in str(client.reason)


async def test_closing_ends_a_renewal_that_waits() -> None:
    client, _ = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    await asyncio.sleep(8.9)
    client.send("a")
    await asyncio.sleep(0.5)
    client.connection.close()
    await client.connection.wait_closed()
    assert client.events == ["a: ConnectionFailed", "closed"]
    assert len(asyncio.all_tasks()) == 1


async def test_a_late_answer_ends_a_renewal_that_waits() -> None:
    client, _ = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    await asyncio.sleep(8.9)
    client.send("a", timeout=2)
    await asyncio.sleep(5)
    assert client.events == ["a: RequestTimedOut", "closed"]
    assert len(asyncio.all_tasks()) == 1


async def test_a_connection_without_a_lifetime_is_never_renewed() -> None:
    _, broker = await ready(sasl_script(), **PLAIN)
    await asyncio.sleep(80_000)
    assert len(broker.log) == 4


# --- what is counted -----------------------------------------------------------------------


def numbers(client: Client, *names: str) -> list[float]:
    """Metrics by their names, "request" for "request_total"."""
    snapshot = client.metrics.snapshot(client.loop.time())
    return [snapshot[name if name in snapshot else f"{name}_total"] for name in names]


CONNECTIONS = ("connection_creation", "connection_close", "connection_count")
AUTHENTICATIONS = ("successful_authentication", "failed_authentication")
RENEWALS = ("successful_reauthentication", "failed_reauthentication")


async def test_what_is_written_and_read_is_counted_with_the_handshake() -> None:
    """Spec 10.8: outgoing-byte, incoming-byte, request, response, network-io."""
    client, broker = await ready()
    assert numbers(client, "request", "response", "network_io") == [1, 1, 2]
    client.send("a")
    client.send("b")
    await settle()
    assert numbers(client, "request", "response", "network_io") == [3, 1, 4]
    broker.answer(b"1", b"2")  # in one piece
    assert numbers(client, "request", "response", "network_io") == [3, 3, 5]
    frames = [b"".join(buffers) for buffers in broker.pipe.writes]
    answers = 4 + 4 + len(api_versions_body(4, VERSIONS)) + 2 * (4 + 4 + 1 + 1)
    assert numbers(client, "outgoing_byte", "incoming_byte") == [sum(map(len, frames)), answers]
    assert numbers(client, "outgoing_byte_total:node=node-1") == [sum(map(len, frames))]
    assert numbers(client, "incoming_byte_total:node=node-1") == [answers]
    assert numbers(client, "request_size_max") == [max(map(len, frames))]


async def test_a_request_without_a_response_is_counted_as_well() -> None:
    client, _ = await ready()
    client.send("a", expect_response=False)
    assert numbers(client, "request", "response") == [2, 1]


async def test_bytes_that_come_after_the_end_are_not_counted() -> None:
    client, broker = await ready()
    before = numbers(client, "incoming_byte", "network_io", "response")
    client.connection.close()
    broker.pipe.feed(b"late")
    assert numbers(client, "incoming_byte", "network_io", "response") == before


async def test_a_connection_is_open_from_its_making_until_its_transport_is_gone() -> None:
    client = Client(Broker(lambda broker, request: None))
    opening = asyncio.create_task(client.open())
    assert numbers(client, *CONNECTIONS) == [0, 0, 0]
    await settle()
    assert client.connection.state is S.NEGOTIATING
    assert numbers(client, *CONNECTIONS) == [1, 0, 1]
    client.connection.close()
    assert numbers(client, *CONNECTIONS) == [1, 0, 1], "what was written may still leave"
    await client.connection.wait_closed()
    assert numbers(client, *CONNECTIONS) == [1, 1, 0]
    with pytest.raises(ConnectionFailed):
        await opening


async def test_a_connection_that_the_broker_ends_is_counted_once() -> None:
    client, broker = await ready()
    broker.pipe.hang_up()
    client.connection.close()
    assert numbers(client, *CONNECTIONS) == [1, 1, 0]


async def test_a_connection_that_was_not_made_is_not_counted() -> None:
    client = Client(Broker())
    client.broker.error = ConnectionFailed("refused")
    with pytest.raises(ConnectionFailed):
        await client.open()
    assert numbers(client, *CONNECTIONS, *AUTHENTICATIONS) == [0, 0, 0, 0, 0]


async def test_plaintext_authenticates_nobody() -> None:
    client, _ = await ready()
    assert numbers(client, *AUTHENTICATIONS, *RENEWALS) == [0, 0, 0, 0]


async def test_sasl_and_tls_count_as_one_authentication() -> None:
    tls = {"ssl_context": ssl.create_default_context()}
    for script, options in (
        (sasl_script(), PLAIN),
        (sasl_script(), PLAIN | tls | {"security_protocol": "SASL_SSL"}),
        (None, tls | {"security_protocol": "SSL"}),
    ):
        client, _ = await ready(script, **options)
        assert numbers(client, *AUTHENTICATIONS) == [1, 0]
        assert numbers(client, "successful_authentication_no_reauth") == [1]


async def test_a_refused_password_is_a_failed_authentication() -> None:
    client = Client(Broker(sasl_script(error=58, message=b"no")), **PLAIN)
    with pytest.raises(AuthenticationError):
        await client.open()
    assert numbers(client, *AUTHENTICATIONS, *RENEWALS) == [0, 1, 0, 0]


async def test_a_broker_that_hangs_up_has_not_refused_to_authenticate() -> None:
    def hang_up(broker: Broker, request: Received) -> None:
        broker.pipe.hang_up()

    client = Client(Broker(hang_up), **PLAIN)
    with pytest.raises(ConnectionFailed):
        await client.open()
    assert numbers(client, *AUTHENTICATIONS) == [0, 0]


async def test_a_renewed_session_is_counted_with_the_time_in_which_nothing_was_sent() -> None:
    """Not with the wait for the answers that were under way."""
    client, broker = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    broker.script = None  # the test answers
    await asyncio.sleep(8.9)
    client.send("a")
    await asyncio.sleep(0.5)
    broker.answer(b"1")
    await settle()
    await asyncio.sleep(0.25)
    broker.answer(struct.pack(">hih", 0, 1, 5) + b"PLAIN")
    await settle()
    await asyncio.sleep(0.5)
    broker.answer(struct.pack(">hhiq", 0, 0, 0, 0))
    await settle()
    assert client.can_send()
    assert numbers(client, *AUTHENTICATIONS, *RENEWALS) == [1, 0, 1, 0]
    assert numbers(client, "reauthentication_latency_max") == [pytest.approx(750.0)]


async def test_a_refused_renewal_is_counted_as_such() -> None:
    client, broker = await ready(sasl_script(lifetime_ms=10_000), **PLAIN)
    broker.script = sasl_script(error=58, message=b"revoked")
    await asyncio.sleep(10)
    assert numbers(client, *AUTHENTICATIONS, *RENEWALS) == [1, 0, 0, 1]


async def test_the_throttle_time_of_every_answer_but_those_of_sasl_is_measured() -> None:
    """SN-02: that of ApiVersions, too. Where the broker has waited by itself, too."""

    def script(broker: Broker, request: Received) -> bytes | None:
        if request.api_key == ApiKey.API_VERSIONS and request.version > 0:
            return api_versions_body(request.version, VERSIONS, throttle=400)
        return sasl_script()(broker, request)

    client, broker = await ready(script, **PLAIN)
    for throttle, version in ((100, 1), (200, 0), (300, 1)):
        await asyncio.sleep(1)
        task = asyncio.create_task(client.connection.request(PRODUCER_ID, cap=version))
        await settle()
        broker.answer(producer_id_body(5, throttle=throttle))
        await task
    assert numbers(client, "produce_throttle_time_avg", "produce_throttle_time_max") == [250, 400]


# --- over a network with faults ------------------------------------------------------------


class Answering(asyncio.Protocol):
    """`Broker`'s ApiVersions, and the same producer id for everything else.

    With acks=0 a Produce request gets no answer.
    """

    acks = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self.frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for received in self.frames.feed(data):
            request = parse(bytes(received))
            body = producer_id_body(77)
            if request.api_key == ApiKey.API_VERSIONS:
                body = api_versions_body(request.version, VERSIONS)
            if self.acks or request.api_key != ApiKey.PRODUCE:
                self.transport.write(response(request, body))


class WithoutAcks(Answering):
    acks = 0


async def in_memory(network: MemoryNetwork, protocol: type[Answering] = Answering) -> Client:
    network.listen("kafka1", 9092, protocol)
    client = Client(Broker())
    client.connection._connector = network
    [address] = await network.resolve("kafka1", 9092)
    await client.connection.open(address, client.loop.time() + 10)
    return client


async def test_single_bytes_in_both_directions_are_enough() -> None:
    network = MemoryNetwork(latency=0.001)

    def split(link: MemoryLink) -> None:
        link.to_client.split(1)
        link.to_server.split(1)

    network.on_link = split
    client = await in_memory(network)
    requests = [client.connection.request(PRODUCER_ID) for _ in range(5)]
    assert [answer.producer_id for answer in await asyncio.gather(*requests)] == [77] * 5
    client.connection.close()
    await client.connection.wait_closed()


async def test_backpressure_of_the_network_stops_the_sending_and_starts_it_again() -> None:
    network = MemoryNetwork(window=1000)
    client = await in_memory(network)
    network.links[0].to_server.stall()
    client.send("large", buffers=[bytes(200_000)])
    assert not client.can_send()
    await asyncio.sleep(1)
    assert client.rooms == []
    network.links[0].to_server.resume()
    await asyncio.sleep(1)
    assert client.events[0].startswith("large: ")
    assert len(client.rooms) == 1
    client.connection.close()
    await client.connection.wait_closed()


async def test_a_connection_that_is_cut_fails_what_is_in_flight() -> None:
    network = MemoryNetwork(latency=0.001)
    client = await in_memory(network)
    client.send("a")
    network.links[0].cut()
    await client.connection.wait_closed()
    assert client.events == ["a: ConnectionFailed", "closed"]


class Deaf(Answering):
    """Stops to read after the handshake, until it is told to listen."""

    def __init__(self) -> None:
        self.deaf = True
        self.lost = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            self.transport.pause_reading()
        super().data_received(data)

    def listen(self) -> None:
        self.deaf = False
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@pytest.mark.real_time
@pytest.mark.parametrize("expect_response", [True, False])
async def test_a_full_socket_stops_the_sending(expect_response: bool) -> None:
    """Also with CPython 3.12.0 to 3.12.8 and 3.13.0 to 3.13.1, where asyncio forgets it."""
    loop = asyncio.get_running_loop()
    broker = Deaf()
    server = await loop.create_server(lambda: broker, "127.0.0.1", 0)
    client = Client(Broker())
    client.connection._connector = TcpConnector()
    address = Address(socket.AF_INET, *server.sockets[0].getsockname())
    await client.connection.open(address, loop.time() + 10)
    room = asyncio.Event()
    client.connection._on_room = lambda connection: room.set()
    client.send("large", buffers=[bytes(10_000_000)] * 3, expect_response=expect_response)
    can_send = client.can_send()
    broker.listen()
    if not can_send:
        await room.wait()
    client.connection.close()
    await client.connection.wait_closed()
    await broker.lost.wait()
    server.close()
    await server.wait_closed()
    assert not can_send, "pause_writing() was not called"
    assert room.is_set()


# --- over TLS ------------------------------------------------------------------------------


@pytest.mark.real_time
@pytest.mark.parametrize("trusted", [True, False])
async def test_a_whole_connection_over_tls(trusted: bool) -> None:
    loop = asyncio.get_running_loop()
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    server = await loop.create_server(Answering, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    known = authority if trusted else trustme.CA()
    metrics = Metrics(client_id="me")
    connection = Connection(
        Node(1, "localhost", port),
        ProducerConfig.from_options(
            f"localhost:{port}",
            security_protocol="SSL",
            ssl_truststore_certificates=known.cert_pem.bytes().decode(),
        ),
        TcpConnector(),
        client_id="me",
        loop=loop,
        on_closed=lambda connection, reason: None,
        on_room=lambda connection: None,
        metrics=metrics,
    )
    try:
        opening = connection.open(Address(socket.AF_INET, "127.0.0.1", port), loop.time() + 10)
        if trusted:
            await opening
            assert (await connection.request(PRODUCER_ID)).producer_id == 77
        else:
            with pytest.raises(ConnectionFailed, match="set ssl_cafile"):
                await opening
        counted = metrics.snapshot(loop.time())
        assert counted["successful_authentication_total"] == trusted
        assert counted["failed_authentication_total"] == (not trusted)
        assert counted["connection_creation_total"] == counted["connection_count"] == trusted
    finally:
        connection.close()
        await connection.wait_closed()
        server.close()
        await server.wait_closed()


@pytest.mark.real_time
async def test_over_tls_a_request_is_not_written_before_the_socket_has_it() -> None:
    """asyncio's transport for TLS does not count what it has given to the one below it."""
    loop = asyncio.get_running_loop()
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("kafka1").configure_cert(context)
    broker = Deaf()
    broker.acks = 0
    server = await loop.create_server(lambda: broker, "127.0.0.1", 0, ssl=context)
    client = Client(
        Broker(),
        security_protocol="SSL",
        ssl_truststore_certificates=authority.cert_pem.bytes().decode(),
    )
    client.connection._connector = TcpConnector()
    address = Address(socket.AF_INET, *server.sockets[0].getsockname())
    await client.connection.open(address, loop.time() + 10)
    done = asyncio.Event()
    transport = client.connection._transport
    assert transport is not None
    sent = 0
    while client.can_send():  # until both sockets are full, and a part is with the transports
        client.send(str(sent), buffers=[bytes(10_000)], expect_response=False, then=done.set)
        sent += 1
    below = unwritten(transport)
    assert below is not None
    assert below > transport.get_write_buffer_size()
    assert client.connection.in_flight > 0
    broker.listen()
    while len(client.events) < sent:
        done.clear()
        await done.wait()
    assert unwritten(transport) == 0
    assert client.events == [f"{number}: NoneType" for number in range(sent)]
    client.connection.close()
    assert unwritten(transport) is None
    await client.connection.wait_closed()
    await broker.lost.wait()
    server.close()
    await server.wait_closed()
