"""A network in memory: real protocols and transports, no sockets, and faults on demand.

    network = MemoryNetwork(latency=0.005)
    server = network.listen("broker-1", 9092, BrokerProtocol)
    producer = ...                       # give it `network` as its connector
    server.links[0].to_client.stall()    # the answers stop coming
    server.kill()                        # the broker is gone

`MemoryNetwork` is a `Connector`. Everything happens in callbacks of the event loop, in
an order that depends on nothing but the calls made: on a `VirtualTimeLoop` a test sees
the same at each run.

A link has two directions, and bytes go through three places in each:

    write() → the transport's write buffer → the wire → data_received()

- The wire takes `window` bytes, like the socket buffers of a TCP connection. What does
  not fit stays in the write buffer; above the high-water mark its protocol is told to
  pause. The write buffer keeps references to what was written, as asyncio's does from
  Python 3.12 on: who changes a buffer too early changes what the peer gets.
- Bytes stay on the wire for `latency` seconds, then as long as the reader has paused or
  the direction is stalled. They never overtake each other.
- All that has arrived comes as one piece, up to MAX_CHUNK, unless the direction
  `split`s it: one piece per turn of the loop.

The callbacks of a protocol are those that asyncio's socket transports make, in the same
order; the tests run the same cases over both. No TLS: use a real socket for that, which
a VirtualTimeLoop can.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import os
import socket
import ssl as tls
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from asyncproducer.errors import ConnectionFailed
from asyncproducer.net.transport import Address, connection_failed

__all__ = ["Direction", "MemoryLink", "MemoryNetwork", "MemoryServer", "MemoryTransport"]

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

#: The most that comes in one data_received() (asyncio: _SelectorSocketTransport.max_size).
MAX_CHUNK = 256 * 1024
#: What the wire takes by default: about what Linux gives a new connection.
WINDOW = 256 * 1024
#: asyncio's default high-water mark of the write buffer.
HIGH_WATER = 64 * 1024

_CLIENT_HOST = "10.255.255.1"


class MemoryNetwork:
    """Hosts, listeners, and the links between them. A `Connector` for tests.

    latency: seconds that bytes of new links need, each way. window: bytes that are on
    their way at most. hosts: name -> IP addresses; take a name away and it cannot be
    resolved. attempts: every address that connect() was called with. links: those that
    are not closed on both sides. on_link: called with each new link before any byte, and
    before its protocols know of it: the place to set faults.
    """

    def __init__(self, *, latency: float = 0.0, window: int = WINDOW) -> None:
        self.latency = latency
        self.window = window
        self.hosts: dict[str, list[str]] = {}
        self.attempts: list[Address] = []
        self.links: list[MemoryLink] = []
        self.on_link: Callable[[MemoryLink], None] | None = None
        self._servers: dict[tuple[str, int], MemoryServer] = {}
        self._ports = itertools.count(49152)  # the first of the ephemeral ones
        self._ips = (str(ip) for ip in ipaddress.ip_network("10.0.0.0/16").hosts())

    def add_host(self, name: str, *ips: str) -> None:
        """Gives `name` these addresses in DNS, in this order, or a new one."""
        self.hosts[name] = list(ips) or [next(self._ips)]

    def listen(self, host: str, port: int, protocol_factory: ProtocolFactory) -> MemoryServer:
        """Starts to listen. `host` is a name, which gets an address if it has none, or an IP.

        Port 0 is any free one. Raises OSError (EADDRINUSE).
        """
        if _family(host) is None and host not in self.hosts:
            self.add_host(host)
        ip = self.hosts[host][0] if host in self.hosts else host
        address = _address(ip, port or next(self._ports))
        server = MemoryServer(self, address, protocol_factory)
        server.start()
        return server

    async def resolve(self, host: str, port: int) -> list[Address]:
        """See `Connector.resolve`. An IP address is itself."""
        ips = [host] if _family(host) is not None else self.hosts.get(host)
        if not ips:
            raise ConnectionFailed(f"the host name {host!r} has no address in this network")
        return [_address(ip, port) for ip in ips]

    async def connect(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        address: Address,
        *,
        ssl: tls.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """See `Connector.connect`. It takes one round trip. Raises ValueError for `ssl`."""
        if ssl is not None:
            raise ValueError("there is no TLS in memory: use a real socket (TcpConnector)")
        loop = asyncio.get_running_loop()
        self.attempts.append(address)
        await asyncio.sleep(2 * self.latency)
        server = self._servers.get((address.host, address.port))
        if server is not None and server.delay:
            await asyncio.sleep(server.delay)
        if server is None or server.refuse or not server.is_serving():
            refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            raise connection_failed(refused, address) from refused
        if server.black_hole:
            await loop.create_future()  # until the caller gives up
        link = MemoryLink(self, server, _address(_CLIENT_HOST, next(self._ports)), loop)
        protocol = protocol_factory()
        transport = link.client
        connected: asyncio.Future[None] = loop.create_future()
        link._open(protocol, connected)
        try:
            await connected
        except BaseException:  # cancelled: nothing stays open
            transport.abort()
            raise
        return transport, protocol

    def __repr__(self) -> str:
        servers = ", ".join(str(server.address) for server in self._servers.values())
        return f"<MemoryNetwork servers=[{servers}] links={len(self.links)}>"


class MemoryServer:
    """A listening address.

    refuse: connections are refused, as if nothing listened. black_hole: connection
    attempts get no answer at all. delay: seconds until a connection is accepted, beyond
    the latency. links: its open links, oldest first. on_link: as that of the network,
    called after it.
    """

    def __init__(
        self, network: MemoryNetwork, address: Address, protocol_factory: ProtocolFactory
    ) -> None:
        self.address = address
        self.refuse = False
        self.black_hole = False
        self.delay = 0.0
        self.on_link: Callable[[MemoryLink], None] | None = None
        self._network = network
        self._protocol_factory = protocol_factory

    @property
    def links(self) -> list[MemoryLink]:
        """The links to it that are open, oldest first."""
        return [link for link in self._network.links if link.server_address is self.address]

    def is_serving(self) -> bool:
        """Whether it listens."""
        return self._network._servers.get(self._key) is self

    def start(self) -> None:
        """Listens again, on the same address. Raises OSError when another one does."""
        if self._network._servers.setdefault(self._key, self) is not self:
            raise OSError(errno.EADDRINUSE, f"somebody listens on {self.address} already")

    def close(self) -> None:
        """Stops listening. Open links stay, as with an asyncio server."""
        if self.is_serving():
            del self._network._servers[self._key]

    def kill(self) -> None:
        """The process is gone: stops listening, and all its links are reset."""
        self.close()
        for link in self.links:
            link.cut()

    @property
    def _key(self) -> tuple[str, int]:
        return self.address.host, self.address.port

    def __repr__(self) -> str:
        return f"<MemoryServer {self.address} serving={self.is_serving()} links={len(self.links)}>"


class MemoryLink:
    """One connection: two transports and the two directions between them."""

    def __init__(
        self,
        network: MemoryNetwork,
        server: MemoryServer,
        client_address: Address,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.client_address = client_address
        self.server_address = server.address
        self._network = network
        self._server = server
        self._loop = loop
        self.client = MemoryTransport(self, loop, client_address, server.address)
        self.server = MemoryTransport(self, loop, server.address, client_address)
        self.to_server = Direction(self.client, self.server, network, loop)
        self.to_client = Direction(self.server, self.client, network, loop)
        self.client._out, self.client._in = self.to_server, self.to_client
        self.server._out, self.server._in = self.to_client, self.to_server

    @property
    def closed(self) -> bool:
        """Whether both protocols have been told that the connection is lost."""
        return self.client._state == _LOST and self.server._state == _LOST

    def cut(self, error: Exception | None = None) -> None:
        """Both ends lose the connection in the next turn, with ConnectionResetError or `error`.

        What was on its way is gone.
        """
        for direction in (self.to_server, self.to_client):
            direction._clear()
        for transport in (self.client, self.server):
            transport._lose(error or _reset())

    def half_close(self) -> None:
        """Both ends read EOF after what is on its way, as if the other one had closed."""
        self.to_server.half_close()
        self.to_client.half_close()

    def _open(self, protocol: asyncio.BaseProtocol, connected: asyncio.Future[None]) -> None:
        self._network.links.append(self)
        for on_link in (self._network.on_link, self._server.on_link):
            if on_link is not None:
                on_link(self)
        self.client._start(protocol)
        self._loop.call_soon(_set_result_unless_done, connected)
        try:
            server_protocol = self._server._protocol_factory()
        except Exception as error:
            _report(self._loop, "the server's protocol factory failed", error)
            server_protocol = asyncio.Protocol()
            self.cut()
        self.server._start(server_protocol)

    def _forget_if_closed(self) -> None:
        if self.closed and self in self._network.links:
            self._network.links.remove(self)

    def __repr__(self) -> str:
        return f"<MemoryLink {self.client_address} -> {self.server_address} closed={self.closed}>"


class Direction:
    """One way of a link, from a writer to a reader, and what can go wrong there.

    latency: seconds; a change counts for bytes sent from then on. bytes_sent: those that
    left the writer's transport. bytes_delivered: those that the reader got.
    """

    def __init__(
        self,
        writer: MemoryTransport,
        reader: MemoryTransport,
        network: MemoryNetwork,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.latency = network.latency
        self.bytes_sent = 0
        self.bytes_delivered = 0
        self._writer = writer
        self._reader = reader
        self._loop = loop
        self._window = network.window
        # (arrival, bytes): in the order of sending. What arrives early, because the latency
        # has fallen, waits behind what was sent before. No bytes at all: EOF.
        self._wire: deque[tuple[float, bytes]] = deque()
        self._on_wire = 0
        self._turn: asyncio.Handle | None = None
        self._stalled = False
        self._black_hole = False
        self._ended = False
        self._sizes: Iterator[int] | None = None
        self._cut_after: int | None = None
        self._cut: Callable[[], None] = writer._link.cut

    def split(self, *sizes: int) -> None:
        """Delivers pieces of these sizes, over and over. `split(1)`: byte by byte.

        Without sizes: as usual. A piece is never larger than what has arrived.
        """
        if any(size < 1 for size in sizes):
            raise ValueError(f"pieces have at least one byte: {sizes}")
        self._sizes = itertools.cycle(sizes) if sizes else None

    def stall(self) -> None:
        """Delivers nothing until resume(). Nothing is lost, and the writer feels it."""
        self._stalled = True

    def resume(self) -> None:
        """Ends stall()."""
        self._stalled = False
        self._schedule()

    def black_hole(self) -> None:
        """Loses all that is on its way or sent later, EOF too. The writer notices nothing.

        For good: a stream that goes on after a gap is not what TCP can do.
        """
        self._black_hole = True
        self._schedule()

    def cut_after(self, count: int, *, reset: bool = True) -> None:
        """Delivers `count` more bytes and then cuts the link.

        reset: with a ConnectionResetError for both ends. Otherwise both ends read EOF,
        and nothing of what follows arrives.
        """
        link = self._writer._link
        self._cut = link.cut if reset else self._end_link
        self._cut_after = count
        if count <= 0:
            self._cut_now()

    def half_close(self) -> None:
        """The reader gets what is on its way and then EOF; what is sent later is lost."""
        self._send_eof()

    # --- for the transports ---------------------------------------------------------------

    def _room(self) -> int:
        return self._window - self._on_wire

    def _send(self, data: bytes) -> None:
        self.bytes_sent += len(data)
        if not self._ended:  # else half_close() was called
            self._put(data)

    def _send_eof(self) -> None:
        if not self._ended:
            self._ended = True
            self._put(b"")

    def _put(self, data: bytes) -> None:
        self._wire.append((self._loop.time() + self.latency, data))
        self._on_wire += len(data)
        self._schedule()

    def _schedule(self) -> None:
        if self._turn is not None or not self._wire or not self._open():
            return
        arrival = self._wire[0][0]
        if arrival <= self._loop.time():
            self._turn = self._loop.call_soon(self._deliver)
        else:
            self._turn = self._loop.call_at(arrival, self._deliver)

    def _open(self) -> bool:
        reader = self._reader
        if self._black_hole:
            return True
        return not self._stalled and (reader._state == _LOST or not reader._reading_paused)

    def _deliver(self) -> None:
        """One turn: one piece, or EOF."""
        self._turn = None
        if not self._open():
            return
        if not self._wire[0][1]:
            self._wire.popleft()
            if not self._black_hole:
                self._reader._receive_eof()
            return
        data = self._take()
        if not self._black_hole:
            self._hand_over(data)
        self._writer._flush()  # there is room on the wire again
        self._schedule()

    def _hand_over(self, data: bytes) -> None:
        if self._reader._state == _LOST:
            # A host that has closed the connection answers with a reset.
            self._loop.call_at(self._loop.time() + self.latency, self._writer._lose, _reset())
            return
        if self._reader._state != _OPEN:
            return  # closing: nobody reads any more
        count = self._reader._receive(data)
        self.bytes_delivered += count
        if self._cut_after is not None:
            self._cut_after -= count
            if not self._cut_after:
                self._cut_now()
                return
        if count < len(data):
            self._wire.appendleft((self._loop.time(), data[count:]))
            self._on_wire += len(data) - count

    def _take(self) -> bytes:
        """Takes the next piece of what has arrived off the wire."""
        limit = MAX_CHUNK if self._sizes is None else next(self._sizes)
        if self._cut_after is not None:
            limit = min(limit, self._cut_after)
        # A timer may be early by the resolution of the loop's clock.
        now = max(self._loop.time(), self._wire[0][0])
        pieces: list[bytes] = []
        while limit and self._wire and self._wire[0][0] <= now and self._wire[0][1]:
            arrival, data = self._wire.popleft()
            if len(data) > limit:
                self._wire.appendleft((arrival, data[limit:]))
                data = data[:limit]
            pieces.append(data)
            limit -= len(data)
            self._on_wire -= len(data)
        return b"".join(pieces)

    def _cut_now(self) -> None:
        self._cut_after = None
        self._cut()

    def _end_link(self) -> None:
        self._clear()
        self._ended = False
        self._writer._link.half_close()

    def _clear(self) -> None:
        """Forgets what is on its way, and sends nothing any more."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._wire.clear()
        self._on_wire = 0
        self._ended = True

    def __repr__(self) -> str:
        faults = [
            name
            for name, is_set in (
                ("stalled", self._stalled),
                ("black hole", self._black_hole),
                ("split", self._sizes is not None),
                (f"cut after {self._cut_after}", self._cut_after is not None),
            )
            if is_set
        ]
        return (
            f"<Direction sent={self.bytes_sent} delivered={self.bytes_delivered}"
            f" on_wire={self._on_wire}{''.join(f' {fault}' for fault in faults)}>"
        )


_OPEN, _CLOSING, _LOSING, _LOST = range(4)


class MemoryTransport(asyncio.Transport):
    """One end of a MemoryLink. See asyncio.Transport."""

    _out: Direction
    _in: Direction

    def __init__(
        self, link: MemoryLink, loop: asyncio.AbstractEventLoop, ours: Address, theirs: Address
    ) -> None:
        super().__init__(
            {"sockname": tuple(ours[1:]), "peername": tuple(theirs[1:]), "memory_link": link}
        )
        self._link = link
        self._loop = loop
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()
        self._state = _OPEN
        self._error: BaseException | None = None
        self._started = False
        self._reading_paused = True  # until the protocol has its connection_made()
        self._buffer: deque[memoryview] = deque()
        self._buffered = 0
        self._eof_written = False
        self._writing_paused = False
        self._high = HIGH_WATER
        self._low = HIGH_WATER // 4

    # --- reading --------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether the transport receives."""
        return self._state == _OPEN and not self._reading_paused

    def pause_reading(self) -> None:
        """No data_received() until resume_reading(). The wire fills, then the writer waits."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """Ends pause_reading()."""
        self._reading_paused = False
        self._in._schedule()

    # --- writing --------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queues `data`, by reference as far as the wire does not take it now. Never waits."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"expected a bytes-like object, not {type(data).__name__}")
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Queues all of them, by reference as far as the wire does not take them now.

        Any objects with the buffer protocol will do.
        """
        if self._eof_written:
            raise RuntimeError("cannot write after write_eof()")
        if self._state == _OPEN:
            views = [memoryview(data).cast("B") for data in list_of_data]
            self._buffer.extend(view for view in views if view)
            self._buffered += sum(map(len, views))
            self._flush()
            self._pause_writing_above_high()

    def write_eof(self) -> None:
        """EOF for the peer, after what was written; we can still read."""
        if self._state == _OPEN and not self._eof_written:
            self._eof_written = True
            self._flush()

    def can_write_eof(self) -> bool:
        """True."""
        return True

    def get_write_buffer_size(self) -> int:
        """Bytes that were written and that the wire has not taken."""
        return self._buffered

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """(low, high), in bytes."""
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Above `high` bytes the protocol is told to pause, down at `low` to go on."""
        if high is None:
            high = HIGH_WATER if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low
        self._pause_writing_above_high()

    # --- the end --------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Whether the transport is closed, or about to be."""
        return self._state != _OPEN

    def close(self) -> None:
        """Stops reading, writes what was queued, then connection_lost(None)."""
        if self._state == _OPEN:
            self._state = _CLOSING
            self._flush()

    def abort(self) -> None:
        """connection_lost(None) in the next turn; what was queued is dropped."""
        self._lose(None)

    # --- the rest of asyncio.Transport ----------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Exchanges the protocol."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The protocol."""
        return self._protocol

    def __repr__(self) -> str:
        state = ("open", "closing", "losing", "lost")[self._state]
        ours, theirs = self.get_extra_info("sockname"), self.get_extra_info("peername")
        return f"<MemoryTransport {ours} -> {theirs} {state} buffered={self._buffered}>"

    # --- inside ---------------------------------------------------------------------------

    def _start(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._loop.call_soon(self._connection_made)

    def _connection_made(self) -> None:
        lost_before = self._state == _LOSING  # before it was told that there is a connection
        self._started = True
        # A protocol may pause reading at once: so we are reading before it is told.
        self._reading_paused = False
        self._call_unharmed("connection_made", self)
        if lost_before:
            self._loop.call_soon(self._connection_lost)
        self._in._schedule()

    def _receive(self, data: bytes) -> int:
        """Hands `data` to the protocol, which may take less: how much it was."""
        if not isinstance(self._protocol, asyncio.BufferedProtocol):
            self._call("data_received", data)
            return len(data)
        buffer: Any = self._call("get_buffer", -1)
        if buffer is None:
            return 0  # it raised, and the connection is lost
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(data))
        if not count:
            self._fatal("get_buffer", RuntimeError("get_buffer() returned an empty buffer"))
            return 0
        into[:count] = data[:count]
        self._call("buffer_updated", count)
        return count

    def _receive_eof(self) -> None:
        if self._state == _OPEN and not self._call("eof_received"):
            self.close()

    def _flush(self) -> None:
        """Moves what it can to the wire, and does what was to follow the last byte."""
        if self._state not in (_OPEN, _CLOSING):
            return
        while self._buffer and (room := self._out._room()) > 0:
            view = self._buffer.popleft()
            if len(view) > room:
                self._buffer.appendleft(view[room:])
                view = view[:room]
            self._buffered -= len(view)
            self._out._send(bytes(view))
        if self._writing_paused and self._buffered <= self._low:
            self._writing_paused = False
            self._call_unharmed("resume_writing")  # may write more
        if self._buffer:
            return
        if self._state == _CLOSING:
            self._lose(None)
        elif self._eof_written:
            self._out._send_eof()

    def _pause_writing_above_high(self) -> None:
        if self._buffered > self._high and not self._writing_paused:
            self._writing_paused = True
            self._call_unharmed("pause_writing")

    def _lose(self, error: BaseException | None) -> None:
        if self._state in (_LOSING, _LOST):
            return
        self._state = _LOSING
        self._error = error
        self._buffer.clear()
        self._buffered = 0
        self._out._send_eof()
        if self._started:
            self._loop.call_soon(self._connection_lost)

    def _connection_lost(self) -> None:
        self._state = _LOST
        self._call_unharmed("connection_lost", self._error)
        self._in._schedule()  # what is on its way to us meets a closed port
        self._link._forget_if_closed()

    def _call(self, name: str, *args: Any) -> Any:
        """Calls the protocol. What it raises ends the connection, as in asyncio."""
        try:
            return getattr(self._protocol, name)(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._fatal(name, error)
            return None

    def _call_unharmed(self, name: str, *args: Any) -> None:
        # The callbacks for which asyncio only reports what they raise.
        try:
            getattr(self._protocol, name)(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            _report(self._loop, f"protocol.{name}() failed", error, transport=self)

    def _fatal(self, name: str, error: BaseException) -> None:
        _report(
            self._loop,
            f"Fatal error: protocol.{name}() call failed.",
            error,
            transport=self,
            protocol=self._protocol,
        )
        self._lose(error)


def _report(
    loop: asyncio.AbstractEventLoop, message: str, error: BaseException, **context: object
) -> None:
    loop.call_exception_handler({"message": message, "exception": error, **context})


def _set_result_unless_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def _family(host: str) -> int | None:
    """The address family of an IP address; None for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _address(ip: str, port: int) -> Address:
    family = _family(ip)
    if family is None:
        raise ValueError(f"{ip!r} is not an IP address")
    return Address(family, ip, port)
