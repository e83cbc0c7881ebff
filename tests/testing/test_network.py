"""The network in memory: like TCP as asyncio shows it, and its faults.

The first part runs each case over memory and over loopback sockets: what protocols see
must be the same. The second part is about what only the memory network does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest

from asyncproducer.errors import ConnectionFailed
from asyncproducer.net.transport import Address, Connector, TcpConnector
from asyncproducer.testing import clock
from asyncproducer.testing import network as module
from asyncproducer.testing.network import Direction, MemoryLink, MemoryNetwork, MemoryServer
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

MB = 1 << 20


class Recorder(asyncio.Protocol):
    """Notes what its transport tells it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.data = b""
        self.pieces: list[bytes] = []
        self.keep_open = False
        self.error: BaseException | None = None
        self.transport: asyncio.Transport
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_data: Callable[[bytes], object] | None = None
        self.on_made: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.log.append("made")
        if self.on_made is not None:
            self.on_made()

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        if self.log[-1] != "data":
            self.log.append("data")
        self.data += data
        self.pieces.append(data)
        if self.on_data is not None:
            self.on_data(data)

    def eof_received(self) -> bool:
        self.log.append("eof")
        return self.keep_open

    def pause_writing(self) -> None:
        self.log.append("pause")

    def resume_writing(self) -> None:
        self.log.append("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.log.append("lost")
        self.error = exc
        self.lost.set_result(None)


class Buffered(asyncio.BufferedProtocol):
    """Reads into a small buffer of its own."""

    def __init__(self, size: int = 3) -> None:
        self.buffer = bytearray(size)
        self.data = b""
        self.log: list[str] = []
        self.transport: asyncio.Transport
        self.on_data: Callable[[], object] | None = None
        self.lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        if self.on_data is not None:
            self.on_data()

    def eof_received(self) -> None:
        self.log.append("eof")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.set_result(exc)


async def until(condition: Callable[[], object]) -> None:
    """Waits in small virtual steps. Over sockets a step is a real millisecond."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


@pytest.fixture
async def errors() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


@pytest.fixture(autouse=True)
async def _no_unexpected_errors(errors: list[dict[str, Any]]) -> AsyncIterator[None]:
    yield
    assert [(e["message"], e.get("exception")) for e in errors] == []


# --- the same over memory and over sockets ------------------------------------------------


class World(Protocol):
    """Somewhere to listen, and a connector to get there."""

    connector: Connector

    async def listen(self, factory: Callable[[], asyncio.BaseProtocol]) -> Address: ...

    async def close(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.connector: Connector = self.network

    async def listen(self, factory: Callable[[], asyncio.BaseProtocol]) -> Address:
        return self.network.listen("broker", 0, factory).address

    async def close(self) -> None:
        for link in list(self.network.links):
            link.cut()
        await turns()
        assert self.network.links == []


class TcpWorld:
    def __init__(self) -> None:
        self.connector: Connector = TcpConnector()
        self.servers: list[asyncio.Server] = []

    async def listen(self, factory: Callable[[], asyncio.BaseProtocol]) -> Address:
        server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
        self.servers.append(server)
        host, port = server.sockets[0].getsockname()
        return Address(socket.AF_INET, host, port)

    async def close(self) -> None:
        for server in self.servers:
            server.close()
            await server.wait_closed()


@pytest.fixture(params=[MemoryWorld, TcpWorld])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world: World = request.param()
    yield world
    await world.close()


class Pair:
    """A client and the server's side of its connection."""

    def __init__(self, client: Recorder, server: Recorder) -> None:
        self.client = client
        self.server = server


async def connect(
    world: World,
    make_client: Callable[[], Recorder] = Recorder,
    make_server: Callable[[], Recorder] = Recorder,
) -> Pair:
    made: list[Recorder] = []

    def factory() -> Recorder:
        made.append(make_server())
        return made[0]

    address = await world.listen(factory)
    transport, client = await world.connector.connect(
        make_client, address, ssl=None, server_hostname=None
    )
    assert isinstance(client, Recorder)
    assert client.transport is transport
    await until(lambda: made and made[0].log)
    return Pair(client, made[0])


@pytest.fixture
async def pair(world: World) -> AsyncIterator[Pair]:
    pair = await connect(world)
    yield pair
    for side in (pair.client, pair.server):
        # CPython 3.11 fails in abort() once the connection is lost, if close() had to flush.
        if not side.lost.done():
            side.transport.abort()
            await side.lost


async def test_bytes_go_both_ways(pair: Pair) -> None:
    pair.client.transport.write(b"question")
    pair.client.transport.writelines([b"s", bytearray(b"!"), memoryview(b" ?")])
    await until(lambda: pair.server.data == b"questions! ?")
    pair.server.transport.write(b"answer")
    await until(lambda: pair.client.data == b"answer")
    assert pair.client.log == pair.server.log == ["made", "data"]


async def test_each_side_knows_both_addresses(pair: Pair) -> None:
    client, server = pair.client.transport, pair.server.transport
    assert client.get_extra_info("peername") == server.get_extra_info("sockname")
    assert client.get_extra_info("sockname") == server.get_extra_info("peername")
    assert client.get_extra_info("no such thing", 7) == 7


async def test_nothing_listens_means_connection_failed(world: World) -> None:
    address = await world.listen(Recorder)
    nobody = Address(address.family, address.host, 1)
    with pytest.raises(ConnectionFailed, match="nothing listens on this port") as caught:
        await world.connector.connect(Recorder, nobody, ssl=None, server_hostname=None)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_an_ip_address_resolves_to_itself(world: World) -> None:
    assert await world.connector.resolve("10.1.2.3", 9092) == [
        Address(socket.AF_INET, "10.1.2.3", 9092)
    ]
    assert await world.connector.resolve("::1", 9092) == [Address(socket.AF_INET6, "::1", 9092)]


async def test_close_flushes_and_the_peer_reads_eof(pair: Pair) -> None:
    data = bytes(range(256)) * (4 * MB // 256)  # more than any window
    pair.client.transport.write(data)
    pair.client.transport.close()
    assert pair.client.transport.is_closing()
    assert not pair.client.transport.is_reading()
    pair.client.transport.close()
    await pair.client.lost
    await pair.server.lost
    assert pair.server.data == data
    assert pair.server.log == ["made", "data", "eof", "lost"]
    assert pair.client.log[0] == "made"
    assert pair.client.log[-1] == "lost"
    assert "eof" not in pair.client.log
    assert (pair.client.error, pair.server.error) == (None, None)


async def test_abort_drops_what_was_queued(pair: Pair) -> None:
    pair.server.transport.pause_reading()
    pair.client.transport.write(bytes(32 * MB))
    assert pair.client.transport.get_write_buffer_size() > 0
    pair.client.transport.abort()
    assert pair.client.log == ["made", "pause"]  # connection_lost is not called at once
    assert pair.client.transport.get_write_buffer_size() == 0
    await pair.client.lost
    pair.server.transport.resume_reading()
    await pair.server.lost
    assert len(pair.server.data) < 32 * MB
    assert (pair.client.log[-1], pair.client.error) == ("lost", None)


async def test_writing_after_close_is_ignored(pair: Pair) -> None:
    pair.client.transport.close()
    pair.client.transport.write(b"x")
    await pair.client.lost
    pair.client.transport.write(b"x")
    if sys.version_info < (3, 12):  # later, asyncio's own fails there with a TypeError
        pair.client.transport.writelines([b"x"])
    await pair.server.lost
    assert pair.server.data == b""


async def test_half_closed_the_other_side_may_go_on(pair: Pair) -> None:
    pair.server.keep_open = True
    assert pair.client.transport.can_write_eof()
    pair.client.transport.write(b"last words")
    pair.client.transport.write_eof()
    pair.client.transport.write_eof()
    with pytest.raises(RuntimeError, match="write_eof"):
        pair.client.transport.write(b"x")
    await until(lambda: pair.server.log[-1] == "eof")
    assert pair.server.data == b"last words"
    await asyncio.sleep(0.01)
    pair.server.transport.write(b"and yet")
    await until(lambda: pair.client.data == b"and yet")
    assert not pair.client.transport.is_closing()
    pair.server.transport.close()
    await pair.client.lost
    assert pair.client.log == ["made", "data", "eof", "lost"]


async def test_write_eof_follows_the_last_byte(pair: Pair) -> None:
    pair.client.transport.write(bytes(4 * MB))
    pair.client.transport.write_eof()
    await pair.server.lost
    assert len(pair.server.data) == 4 * MB
    assert pair.server.log == ["made", "data", "eof", "lost"]


async def test_eof_closes_unless_the_protocol_keeps_it_open(pair: Pair) -> None:
    pair.client.transport.write_eof()
    await pair.server.lost
    await pair.client.lost
    assert pair.server.log == pair.client.log == ["made", "eof", "lost"]


async def test_a_reader_that_pauses_holds_up_the_writer(pair: Pair) -> None:
    pair.server.transport.pause_reading()
    assert not pair.server.transport.is_reading()
    sent = 0
    while "pause" not in pair.client.log:
        pair.client.transport.write(bytes(MB))
        sent += MB
        await asyncio.sleep(0.001)
    assert pair.client.transport.get_write_buffer_size() > 64 * 1024
    await asyncio.sleep(0.01)
    assert pair.server.data == b""
    assert pair.client.log == ["made", "pause"]
    pair.server.transport.resume_reading()
    assert pair.server.transport.is_reading()
    await until(lambda: len(pair.server.data) == sent)
    assert pair.client.log == ["made", "pause", "resume"]
    assert pair.client.transport.get_write_buffer_size() == 0


async def test_the_marks_of_the_write_buffer_can_be_moved(pair: Pair) -> None:
    transport = pair.client.transport
    assert isinstance(transport, asyncio.Transport)
    assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
    transport.set_write_buffer_limits(high=1000)
    assert transport.get_write_buffer_limits() == (250, 1000)
    transport.set_write_buffer_limits(low=100)
    assert transport.get_write_buffer_limits() == (100, 400)
    transport.set_write_buffer_limits()
    assert transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
    with pytest.raises(ValueError, match="high"):
        transport.set_write_buffer_limits(high=1, low=2)
    pair.server.transport.pause_reading()
    transport.set_write_buffer_limits(high=64 * MB)
    transport.write(bytes(32 * MB))
    assert pair.client.log == ["made"]
    transport.set_write_buffer_limits(high=0)
    assert pair.client.log == ["made", "pause"]
    pair.server.transport.resume_reading()
    await until(lambda: pair.client.log == ["made", "pause", "resume"])
    assert transport.get_write_buffer_size() == 0


async def test_writing_to_a_peer_that_has_gone_resets_the_connection(pair: Pair) -> None:
    pair.client.keep_open = True
    pair.server.transport.close()
    await until(lambda: pair.client.log[-1] == "eof")
    pair.client.transport.write(b"x")
    await asyncio.sleep(0.01)
    pair.client.transport.write(b"y")
    await pair.client.lost
    assert isinstance(pair.client.error, ConnectionError)
    assert pair.client.log == ["made", "eof", "lost"]


async def test_only_bytes_can_be_written(pair: Pair) -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        pair.client.transport.write("text")  # type: ignore[arg-type]
    pair.client.transport.write(b"")
    pair.client.transport.writelines([])
    pair.client.transport.write(memoryview(b"abcdefgh").cast("I"))
    await until(lambda: pair.server.data == b"abcdefgh")


async def test_a_protocol_may_pause_and_close_in_its_own_callbacks(world: World) -> None:
    transport = asyncio.selector_events._SelectorTransport  # type: ignore[attr-defined]
    if isinstance(world, TcpWorld) and "is_reading" not in transport._add_reader.__code__.co_names:
        pytest.skip("this Python reads what was paused in connection_made (3.11.2 does)")

    def make_server() -> Recorder:
        server = Recorder()
        server.on_made = lambda: server.transport.pause_reading()
        server.on_data = lambda _: server.transport.close()
        return server

    pair = await connect(world, make_server=make_server)
    pair.client.transport.write(b"x")
    await asyncio.sleep(0.01)
    assert pair.server.log == ["made"]
    pair.server.transport.resume_reading()
    await pair.server.lost
    await pair.client.lost
    assert pair.server.log == ["made", "data", "lost"]
    assert pair.client.log == ["made", "eof", "lost"]


@pytest.mark.parametrize("name", ["data_received", "eof_received"])
async def test_a_protocol_that_raises_loses_its_connection(
    pair: Pair, errors: list[dict[str, Any]], name: str
) -> None:
    error = ZeroDivisionError()

    def fail(*_: object) -> None:
        raise error

    setattr(pair.server, name, fail)
    pair.client.transport.write(b"x")
    pair.client.transport.write_eof()
    await pair.server.lost
    assert pair.server.error is error
    await pair.client.lost
    assert [(e["message"], e["exception"], e["protocol"]) for e in errors] == [
        (f"Fatal error: protocol.{name}() call failed.", error, pair.server)
    ]
    errors.clear()


@pytest.mark.parametrize("name", ["pause_writing", "resume_writing", "connection_lost"])
async def test_a_protocol_that_raises_elsewhere_is_only_reported(
    pair: Pair, errors: list[dict[str, Any]], name: str
) -> None:
    error = ZeroDivisionError()
    real = getattr(pair.client, name)

    def fail(*args: Any) -> None:
        real(*args)
        raise error

    setattr(pair.client, name, fail)
    pair.server.transport.pause_reading()
    pair.client.transport.write(bytes(16 * MB))
    pair.server.transport.resume_reading()
    await until(lambda: len(pair.server.data) == 16 * MB)
    pair.client.transport.close()
    await pair.server.lost
    assert pair.client.log == ["made", "pause", "resume", "lost"]
    assert [e["exception"] for e in errors] == [error]
    errors.clear()


async def test_the_protocol_can_be_exchanged(pair: Pair) -> None:
    other = Recorder()
    other.log.append("exchanged")
    transport = pair.server.transport
    transport.set_protocol(other)
    assert transport.get_protocol() is other
    pair.client.transport.write(b"x")
    await until(lambda: other.data == b"x")
    transport.set_protocol(pair.server)


async def test_a_buffered_protocol_reads_into_its_own_buffer(world: World) -> None:
    made: list[Buffered] = []

    def factory() -> Buffered:
        made.append(Buffered())
        return made[0]

    address = await world.listen(factory)
    transport, _ = await world.connector.connect(Recorder, address, ssl=None, server_hostname=None)
    await until(lambda: made)
    server = made[0]
    server.on_data = lambda: server.transport.pause_reading()
    transport.write(b"0123456789")
    await until(lambda: server.data)
    await asyncio.sleep(0.01)
    assert server.data == b"012"  # paused in the middle of what has arrived
    server.on_data = None
    server.transport.resume_reading()
    await until(lambda: server.data == b"0123456789")
    transport.close()
    assert await server.lost is None
    assert server.log == ["eof"]


@pytest.mark.parametrize("name", ["get_buffer", "buffer_updated", "empty"])
async def test_a_buffered_protocol_that_fails_loses_its_connection(
    world: World, errors: list[dict[str, Any]], name: str
) -> None:
    made: list[Buffered] = []
    error: Exception = ZeroDivisionError()

    def fail(_: int) -> None:
        raise error

    def factory() -> Buffered:
        made.append(Buffered(0 if name == "empty" else 3))
        if name != "empty":
            setattr(made[0], name, fail)
        return made[0]

    address = await world.listen(factory)
    transport, client = await world.connector.connect(
        Recorder, address, ssl=None, server_hostname=None
    )
    assert isinstance(client, Recorder)
    transport.write(b"x")
    await until(lambda: made)
    lost = await made[0].lost
    assert type(lost) is (RuntimeError if name == "empty" else ZeroDivisionError)
    await client.lost
    assert [e["exception"] for e in errors] == [lost]
    errors.clear()


async def test_streams_work_on_top(world: World) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    loop = asyncio.get_running_loop()
    address = await world.listen(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)
    )
    reader = asyncio.StreamReader(limit=65536)
    transport, protocol = await world.connector.connect(
        lambda: asyncio.StreamReaderProtocol(reader), address, ssl=None, server_hostname=None
    )
    assert isinstance(protocol, asyncio.StreamReaderProtocol)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    data = bytes(range(256)) * (8 * MB // 256)

    async def send() -> None:
        for i in range(0, len(data), 100_000):
            writer.write(data[i : i + 100_000])
            await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    assert await reader.read(-1) == data
    await sending
    writer.close()
    await writer.wait_closed()


# --- only in memory -----------------------------------------------------------------------


class Linked:
    """A link in memory with recorders on both sides."""

    def __init__(self, network: MemoryNetwork, server: MemoryServer) -> None:
        self.network = network
        self.listener = server
        self.client: Recorder
        self.server: Recorder
        self.link: MemoryLink

    def direction(self, name: str) -> tuple[Recorder, Recorder, Direction]:
        """(writer, reader, direction)"""
        if name == "to_server":
            return self.client, self.server, self.link.to_server
        return self.server, self.client, self.link.to_client


async def linked(network: MemoryNetwork | None = None) -> Linked:
    network = network or MemoryNetwork()
    made: list[Recorder] = []

    def factory() -> Recorder:
        made.append(Recorder())
        return made[-1]

    both = Linked(network, network.listen("broker-1", 9092, factory))
    (address,) = await network.resolve("broker-1", 9092)
    _, client = await network.connect(Recorder, address)
    assert isinstance(client, Recorder)
    await asyncio.sleep(0)
    both.client, both.server, both.link = client, made[0], network.links[0]
    return both


both_directions = pytest.mark.parametrize("name", ["to_server", "to_client"])


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_names_resolve_to_what_listens_or_was_added() -> None:
    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    network.add_host("kafka", "10.9.0.1", "10.9.0.2")
    network.add_host("lonely")
    assert await network.resolve("broker-1", 1) == [Address(socket.AF_INET, "10.0.0.1", 1)]
    assert await network.resolve("lonely", 1) == [Address(socket.AF_INET, "10.0.0.2", 1)]
    assert [address.host for address in await network.resolve("kafka", 9092)] == [
        "10.9.0.1",
        "10.9.0.2",
    ]
    assert server.address == Address(socket.AF_INET, "10.0.0.1", 9092)
    assert repr(network) == "<MemoryNetwork servers=[10.0.0.1:9092] links=0>"


async def test_an_unknown_name_is_connection_failed() -> None:
    network = MemoryNetwork()
    network.listen("broker-1", 9092, Recorder)
    del network.hosts["broker-1"]
    for name in ("broker-1", "nobody"):
        with pytest.raises(ConnectionFailed, match=f"{name}' has no address"):
            await network.resolve(name, 9092)


async def test_two_ports_of_a_host_share_its_address() -> None:
    network = MemoryNetwork()
    one, two, free, also_free = (
        network.listen("broker-1", port, Recorder).address for port in (1, 2, 0, 0)
    )
    assert {one.host, two.host, free.host} == {"10.0.0.1"}
    assert free.port != also_free.port
    with pytest.raises(OSError, match=r"10\.0\.0\.1:1") as caught:
        network.listen("10.0.0.1", 1, Recorder)
    assert caught.value.errno == errno.EADDRINUSE


async def test_one_can_listen_on_an_ip_address_but_hosts_have_no_names_for_ips() -> None:
    network = MemoryNetwork()
    assert str(network.listen("::1", 9092, Recorder).address) == "[::1]:9092"
    await network.connect(Recorder, Address(socket.AF_INET6, "::1", 9092))
    network.links[0].cut()
    network.add_host("typo", "broker-2")
    with pytest.raises(ValueError, match="'broker-2' is not an IP address"):
        await network.resolve("typo", 9092)


async def test_there_is_no_tls() -> None:
    network = MemoryNetwork()
    address = network.listen("broker-1", 9092, Recorder).address
    with pytest.raises(ValueError, match="no TLS in memory"):
        await network.connect(Recorder, address, ssl=ssl.create_default_context())


async def test_the_order_of_events_is_always_the_same() -> None:
    """Client first, then server; a reader hears of bytes one turn after they were written."""
    both = await linked()
    both.client.transport.write(b"a")
    assert both.server.data == b""
    await asyncio.sleep(0)
    assert both.server.data == b"a"


async def test_latency_is_per_direction_and_connecting_takes_a_round_trip() -> None:
    both = await linked(MemoryNetwork(latency=0.010))
    assert now() == 0.020
    both.link.to_client.latency = 0.5
    both.client.transport.write(b"a")
    both.server.transport.write(b"b")
    await asyncio.sleep(0.009)
    assert both.server.data == b""
    await asyncio.sleep(0.001)
    await turns()
    assert (both.server.data, both.client.data) == (b"a", b"")
    await asyncio.sleep(0.490)
    await turns()
    assert both.client.data == b"b"


async def test_bytes_never_overtake_each_other_when_the_latency_falls() -> None:
    both = await linked(MemoryNetwork(latency=1.0))
    both.client.transport.write(b"slow ")
    both.link.to_server.latency = 0.0
    both.client.transport.write(b"fast")
    both.client.transport.write_eof()
    await asyncio.sleep(0.9)
    assert both.server.data == b""
    await asyncio.sleep(0.1)
    await turns()
    assert both.server.data == b"slow fast"
    assert both.server.log == ["made", "data", "eof", "lost"]


async def test_what_arrived_together_comes_as_one_piece() -> None:
    both = await linked()
    for i in range(5):
        both.client.transport.write(b"%d" % i)
    await turns()
    assert both.server.pieces == [b"01234"]


async def test_a_piece_is_as_large_as_asyncio_reads_at_most() -> None:
    both = await linked(MemoryNetwork(window=MB))
    both.client.transport.write(bytes(MB))
    await turns()
    assert [len(piece) for piece in both.server.pieces] == [module.MAX_CHUNK] * 4


@both_directions
async def test_split_delivers_single_bytes_one_per_turn(name: str) -> None:
    both = await linked()
    writer, reader, direction = both.direction(name)
    direction.split(1)
    writer.transport.write(b"abc")
    writer.transport.close()
    for count in (1, 2, 3):
        await asyncio.sleep(0)
        assert reader.pieces == [b"a", b"b", b"c"][:count]
    await reader.lost
    assert reader.log == ["made", "data", "eof", "lost"]


async def test_split_takes_sizes_in_turn_and_ends_with_none() -> None:
    both = await linked()
    both.link.to_server.split(1, 3)
    both.client.transport.write(b"abcdefg")
    both.client.transport.write(b"hij")
    await turns()
    assert both.server.pieces == [b"a", b"bcd", b"e", b"fgh", b"i", b"j"]
    both.link.to_server.split()
    both.client.transport.write(b"klmno")
    await turns()
    assert both.server.pieces[-1] == b"klmno"
    with pytest.raises(ValueError, match="at least one byte"):
        both.link.to_server.split(1, 0)


async def test_the_window_is_all_that_is_on_its_way() -> None:
    both = await linked(MemoryNetwork(latency=1.0, window=1000))
    transport = both.client.transport
    transport.set_write_buffer_limits(high=500, low=100)
    transport.write(bytes(1500))
    assert transport.get_write_buffer_size() == 500
    assert both.client.log == ["made"]
    transport.write(b"x")
    assert both.client.log == ["made", "pause"]
    assert both.link.to_server.bytes_sent == 1000
    assert repr(transport).endswith("open buffered=501>")
    await asyncio.sleep(1.0)
    await turns()
    assert both.client.log == ["made", "pause", "resume"]
    assert transport.get_write_buffer_size() == 0
    assert both.link.to_server.bytes_delivered == 1000
    await asyncio.sleep(1.0)
    await turns()
    assert len(both.server.data) == both.link.to_server.bytes_delivered == 1501


async def test_writing_resumes_at_the_low_water_mark() -> None:
    both = await linked(MemoryNetwork(latency=1.0, window=10))
    transport = both.client.transport
    transport.set_write_buffer_limits(high=25, low=10)
    transport.write(bytes(40))
    seen = []
    for _ in range(3):
        seen.append((transport.get_write_buffer_size(), both.client.log[-1]))
        await asyncio.sleep(1.0)
        await turns()
    assert seen == [(30, "pause"), (20, "pause"), (10, "resume")]


def test_bytes_that_come_a_little_early_are_on_time() -> None:
    """asyncio may run a timer up to its clock's resolution (a nanosecond) early."""

    class EarlyLoop(clock.VirtualTimeLoop):
        def time(self) -> float:
            return super().time() - 5e-10

        def _set_time(self, now: float) -> None:
            super()._set_time(now)
            self._clock_resolution = 1e-9

    async def main() -> None:
        both = await linked(MemoryNetwork(latency=1.0))
        both.client.transport.write(b"x")
        await asyncio.sleep(1.5)
        assert both.server.pieces == [b"x"]

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        runner.run(main())


async def test_what_waits_in_the_write_buffer_is_not_a_copy() -> None:
    """Who changes a buffer before it is on the wire changes what is sent, as in asyncio 3.12."""
    both = await linked(MemoryNetwork(window=4))
    data = bytearray(b"abcdefgh")
    both.client.transport.write(data)
    data[:] = b"ABCDEFGH"
    await turns()
    assert both.server.data == b"abcdEFGH"


async def test_what_resume_writing_writes_comes_after_what_was_queued() -> None:
    both = await linked(MemoryNetwork(window=10))
    transport = both.client.transport
    transport.set_write_buffer_limits(high=8, low=4)
    more = iter([b" and then more"])
    both.client.resume_writing = (  # type: ignore[method-assign]
        lambda: transport.write(next(more, b""))
    )
    transport.write(b"this is too much for the wire")
    transport.write(b", is it not?")
    assert both.client.log == ["made", "pause"]
    await turns(20)
    assert both.server.data == b"this is too much for the wire, is it not? and then more"
    assert both.client.log == ["made", "pause", "pause"]


# --- faults -------------------------------------------------------------------------------


@both_directions
async def test_stalled_bytes_wait_and_the_writer_feels_it(name: str) -> None:
    both = await linked(MemoryNetwork(window=100))
    writer, reader, direction = both.direction(name)
    writer.transport.set_write_buffer_limits(high=50)
    direction.stall()
    writer.transport.write(bytes(200))
    writer.transport.write_eof()
    await asyncio.sleep(1000.0)
    assert reader.log == ["made"]
    assert writer.log == ["made", "pause"]
    assert "stalled" in repr(direction)
    direction.resume()
    await reader.lost
    assert len(reader.data) == 200
    assert reader.log == ["made", "data", "eof", "lost"]


async def test_a_stall_while_a_delivery_is_due_holds_it_back() -> None:
    both = await linked(MemoryNetwork(latency=1.0))
    both.client.transport.write(b"x")
    await asyncio.sleep(0.5)
    both.link.to_server.stall()
    await asyncio.sleep(10.0)
    assert both.server.data == b""
    both.link.to_server.resume()
    await turns()
    assert both.server.data == b"x"


@both_directions
async def test_a_black_hole_takes_everything_and_the_writer_notices_nothing(name: str) -> None:
    both = await linked(MemoryNetwork(window=100, latency=0.1))
    writer, reader, direction = both.direction(name)
    writer.transport.write(b"on its way")
    reader.transport.pause_reading()
    direction.black_hole()
    writer.transport.write(bytes(10_000))
    await asyncio.sleep(1000.0)
    assert writer.transport.get_write_buffer_size() == 0
    assert direction.bytes_sent == 10_010
    writer.transport.close()
    await writer.lost
    await asyncio.sleep(1000.0)
    assert reader.log == ["made"]
    assert "black hole" in repr(direction)
    reader.transport.write(b"are you there?")  # the other way works: nobody is
    await reader.lost
    assert isinstance(reader.error, ConnectionResetError)


@both_directions
@pytest.mark.parametrize("count", [1, 5, 8])
async def test_cut_after_delivers_exactly_so_many_bytes(name: str, count: int) -> None:
    both = await linked()
    writer, reader, direction = both.direction(name)
    writer.transport.write(b"before")
    await turns()
    direction.cut_after(count)
    assert f"cut after {count}" in repr(direction)
    writer.transport.write(b"1234")
    await turns()
    writer.transport.write(b"5678")
    await turns()
    assert reader.data == b"before12345678"[: 6 + count]
    for side in (writer, reader):
        assert side.log[-1] == "lost"
        assert isinstance(side.error, ConnectionResetError)
        assert side.error.errno == errno.ECONNRESET
    assert both.link.closed
    assert both.network.links == []


async def test_cut_after_counts_across_split_pieces() -> None:
    both = await linked()
    both.link.to_server.split(3)
    both.link.to_server.cut_after(7)
    both.client.transport.write(b"0123456789")
    await both.server.lost
    assert both.server.pieces == [b"012", b"345", b"6"]


async def test_cut_after_without_a_reset_is_an_eof_for_both() -> None:
    both = await linked()
    both.link.to_server.cut_after(3, reset=False)
    both.client.transport.write(b"0123456789")
    await both.server.lost
    await both.client.lost
    assert both.server.data == b"012"
    assert both.server.log == ["made", "data", "eof", "lost"]
    assert both.client.log == ["made", "eof", "lost"]
    assert both.client.error is both.server.error is None


async def test_cut_after_nothing_is_now() -> None:
    both = await linked()
    both.link.to_server.cut_after(0)
    await turns()
    assert both.client.log == both.server.log == ["made", "lost"]


async def test_cut_loses_what_is_on_its_way_and_tells_both_in_the_next_turn() -> None:
    both = await linked(MemoryNetwork(latency=1.0))
    both.client.transport.write(b"x")
    error = ConnectionAbortedError()
    both.link.cut(error)
    assert both.client.log == both.server.log == ["made"]
    assert both.client.transport.is_closing()
    both.link.cut()
    await asyncio.sleep(10.0)
    assert both.client.log == both.server.log == ["made", "lost"]
    assert both.client.error is both.server.error is error


async def test_cut_inside_data_received_ends_it_there() -> None:
    both = await linked()
    both.server.on_data = lambda _: both.link.cut()
    both.link.to_server.split(1)
    both.client.transport.write(b"abc")
    await both.server.lost
    await turns()
    assert both.server.data == b"a"


async def test_cut_inside_buffer_updated_ends_it_there() -> None:
    network = MemoryNetwork()
    made: list[Buffered] = []

    def factory() -> Buffered:
        made.append(Buffered())
        return made[0]

    server = network.listen("broker-1", 9092, factory)
    transport, _ = await network.connect(Recorder, server.address)
    await turns()
    made[0].on_data = network.links[0].cut
    transport.write(b"abcdef")
    await made[0].lost
    await turns()
    assert made[0].data == b"abc"


@both_directions
async def test_half_close_is_an_eof_after_what_is_on_its_way(name: str) -> None:
    both = await linked()
    writer, reader, direction = both.direction(name)
    reader.keep_open = True
    writer.transport.write(b"x")
    direction.half_close()
    writer.transport.write(b"lost")
    await turns()
    writer.transport.write(b"lost as well")
    await turns()
    assert reader.data == b"x"
    assert reader.log == ["made", "data", "eof"]
    reader.transport.write(b"the other way works")
    await turns()
    assert writer.data == b"the other way works"


async def test_half_close_of_the_link_looks_like_a_polite_end_to_both() -> None:
    both = await linked()
    both.link.half_close()
    await both.client.lost
    await both.server.lost
    assert both.client.log == both.server.log == ["made", "eof", "lost"]


async def test_bytes_on_their_way_to_one_that_closes_reset_the_sender() -> None:
    both = await linked(MemoryNetwork(latency=1.0))
    both.server.keep_open = True
    both.server.transport.write(b"x")
    both.client.transport.close()
    await both.client.lost
    assert now() == 2.0
    await both.server.lost
    assert now() == 4.0  # one second there, one for the reset
    assert isinstance(both.server.error, ConnectionResetError)


async def test_bytes_for_a_reader_that_pauses_and_closes_reset_the_sender() -> None:
    both = await linked()
    both.client.transport.pause_reading()
    both.server.keep_open = True
    both.server.transport.write(b"x")
    await turns()
    both.client.transport.close()
    await both.server.lost
    assert isinstance(both.server.error, ConnectionResetError)
    assert both.client.data == b""


async def test_one_that_is_closing_reads_no_more() -> None:
    """It has still to write, and cannot: its peer has paused."""
    both = await linked(MemoryNetwork(window=10))
    both.server.transport.pause_reading()
    both.client.transport.write(bytes(100))
    both.client.transport.close()
    both.server.transport.write(b"x")
    await turns()
    assert both.client.log == ["made"]
    both.server.transport.resume_reading()
    await both.client.lost
    await both.server.lost
    assert both.client.data == b""
    assert len(both.server.data) == 100


# --- listeners ----------------------------------------------------------------------------


async def test_a_listener_can_refuse() -> None:
    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    server.refuse = True
    with pytest.raises(ConnectionFailed) as caught:
        await network.connect(Recorder, server.address)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    server.refuse = False
    await network.connect(Recorder, server.address)
    assert network.attempts == [server.address] * 2
    network.links[0].cut()


async def test_a_black_hole_answers_no_connection_attempt() -> None:
    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    server.black_hole = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30.0):
            await network.connect(Recorder, server.address)
    assert now() == 30.0
    assert network.links == []


async def test_a_listener_can_take_its_time() -> None:
    network = MemoryNetwork(latency=0.5)
    server = network.listen("broker-1", 9092, Recorder)
    server.delay = 2.0
    await network.connect(Recorder, server.address)
    assert now() == 3.0
    network.links[0].cut()


async def test_a_listener_that_closes_meanwhile_refuses() -> None:
    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    server.delay = 2.0
    asyncio.get_running_loop().call_later(1.0, server.close)
    with pytest.raises(ConnectionFailed):
        await network.connect(Recorder, server.address)


async def test_a_listener_that_closes_keeps_its_links() -> None:
    both = await linked()
    assert both.listener.links == [both.link]
    both.listener.close()
    both.listener.close()
    assert not both.listener.is_serving()
    with pytest.raises(ConnectionFailed):
        await both.network.connect(Recorder, both.listener.address)
    both.client.transport.write(b"x")
    await turns()
    assert both.server.data == b"x"


async def test_a_killed_listener_resets_its_links_and_can_come_back() -> None:
    both = await linked()
    other = both.network.listen("broker-2", 9092, Recorder)
    await both.network.connect(Recorder, other.address)
    assert repr(both.listener) == "<MemoryServer 10.0.0.1:9092 serving=True links=1>"
    both.listener.kill()
    await both.client.lost
    assert isinstance(both.client.error, ConnectionResetError)
    assert both.listener.links == []
    assert len(other.links) == 1
    both.listener.start()
    await both.network.connect(Recorder, both.listener.address)
    assert len(both.listener.links) == 1
    assert repr(both.listener.links[0]).endswith("-> 10.0.0.1:9092 closed=False>")


async def test_faults_can_be_set_before_the_first_byte() -> None:
    network = MemoryNetwork()
    order: list[str] = []

    def on_link(link: MemoryLink) -> None:
        order.append("network")
        link.to_server.split(1)

    server = network.listen("broker-1", 9092, lambda: recorder)
    recorder = Recorder()
    recorder.on_made = lambda: order.append("made")
    network.on_link = on_link
    server.on_link = lambda link: order.append("server")
    transport, _ = await network.connect(Recorder, server.address)
    transport.write(b"ab")
    await turns()
    assert recorder.pieces == [b"a", b"b"]
    assert order == ["network", "server", "made"]


async def test_a_link_that_is_cut_at_birth_is_made_and_then_lost() -> None:
    network = MemoryNetwork()
    made: list[Recorder] = []

    def factory() -> Recorder:
        made.append(Recorder())
        return made[0]

    server = network.listen("broker-1", 9092, factory)
    server.on_link = lambda link: link.cut()
    transport, client = await network.connect(Recorder, server.address)
    assert isinstance(client, Recorder)
    assert transport.is_closing()
    await turns()
    assert client.log == made[0].log == ["made", "lost"]
    assert network.links == []


async def test_a_server_whose_factory_fails_resets_the_client(
    errors: list[dict[str, Any]],
) -> None:
    def fail() -> Recorder:
        raise ZeroDivisionError

    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, fail)
    _, client = await network.connect(Recorder, server.address)
    assert isinstance(client, Recorder)
    await client.lost
    assert isinstance(client.error, ConnectionResetError)
    await turns()
    assert network.links == []
    assert [type(e["exception"]) for e in errors] == [ZeroDivisionError]
    errors.clear()


async def test_a_client_whose_factory_fails_opens_nothing() -> None:
    def fail() -> Recorder:
        raise ZeroDivisionError

    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    with pytest.raises(ZeroDivisionError):
        await network.connect(fail, server.address)
    assert network.links == []


@pytest.mark.parametrize("after", [0, 1, 2, 3])
async def test_a_cancelled_connect_leaves_nothing_open(after: int) -> None:
    network = MemoryNetwork()
    server = network.listen("broker-1", 9092, Recorder)
    task = asyncio.create_task(network.connect(Recorder, server.address))
    await turns(after)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():  # it was done already
        task.result()[0].close()
    await turns()
    assert network.links == []


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["data_received", "connection_lost"])
def test_an_interrupt_in_a_protocol_goes_up(name: str, interrupt: type[BaseException]) -> None:
    async def main() -> None:
        both = await linked()

        def interrupted(_: object) -> None:
            raise interrupt

        setattr(both.server, name, interrupted)
        both.client.transport.write(b"x")
        both.client.transport.close()
        await asyncio.sleep(1.0)

    with pytest.raises(interrupt):
        clock.run(main())
