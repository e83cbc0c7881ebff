from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest
import trustme

from asyncproducer.errors import ConnectionFailed
from asyncproducer.net.transport import Address, TcpConnector, connection_failed

LOCALHOST = "127.0.0.1"


class Peer(asyncio.Protocol):
    """Remembers what its transport tells it."""

    def __init__(self) -> None:
        self.data = b""
        self.heard = asyncio.Event()
        self.lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.heard.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.set_result(exc)


class Greeter(Peer):
    """A server that greets whoever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(b"hello")


class Talker(Peer):
    """A server that answers the first bytes with some of its own, and hangs up."""

    answer = b""

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.answer)
        self.transport.close()


class HttpServer(Talker):
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@contextlib.asynccontextmanager
async def server(
    factory: Callable[[], asyncio.Protocol] = Greeter, context: ssl.SSLContext | None = None
) -> AsyncIterator[Address]:
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(factory, LOCALHOST, 0, ssl=context)
    try:
        port = listening.sockets[0].getsockname()[1]
        yield Address(socket.AF_INET, LOCALHOST, port)
    finally:
        listening.close()
        await listening.wait_closed()


async def connect(
    address: Address,
    context: ssl.SSLContext | None = None,
    hostname: str | None = None,
    connector: TcpConnector | None = None,
) -> Peer:
    _, peer = await (connector or TcpConnector()).connect(
        Peer, address, ssl=context, server_hostname=hostname
    )
    assert isinstance(peer, Peer)
    return peer


async def hang_up(peer: Peer) -> None:
    peer.transport.abort()
    await peer.lost


async def failure(
    address: Address, context: ssl.SSLContext | None = None, hostname: str | None = None
) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        await connect(address, context, hostname)
    assert caught.value.__cause__ is not None
    return caught.value


# --- names ---


def answering(*addresses: tuple[socket.AddressFamily, str]) -> Callable[..., object]:
    """A resolver with fixed answers, in the place of the loop's."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        await asyncio.sleep(0)
        return [(family, 1, 6, "", (ip, port, 0, 0)) for family, ip in addresses]

    return getaddrinfo


async def test_an_ip_address_needs_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", None)
    v4 = await TcpConnector().resolve("10.1.2.3", 9092)
    assert v4 == [Address(socket.AF_INET, "10.1.2.3", 9092)]
    assert str(v4[0]) == "10.1.2.3:9092"
    v6 = await TcpConnector().resolve("::1", 9092)
    assert v6 == [Address(socket.AF_INET6, "::1", 9092)]
    assert str(v6[0]) == "[::1]:9092"


async def test_mixed_families_begin_with_that_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-01, but unlike Java the other family is tried as well: localhost may be ::1 first."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    answer = answering((v6, "::1"), (v4, "10.0.0.1"), (v6, "::2"), (v6, "::1"))
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
    assert await TcpConnector().resolve("kafka", 9) == [
        Address(v6, "::1", 9),
        Address(v6, "::2", 9),
        Address(v4, "10.0.0.1", 9),
    ]


async def test_the_system_resolves_localhost() -> None:
    addresses = await TcpConnector().resolve("localhost", 9092)
    assert addresses
    assert {address.host for address in addresses} <= {"127.0.0.1", "::1"}


async def test_a_name_that_does_not_exist_is_connection_failed() -> None:
    """NC-03: bad host name."""
    with pytest.raises(ConnectionFailed, match=r"'no-such-host\.invalid'.*bootstrap_servers") as e:
        await TcpConnector().resolve("no-such-host.invalid", 9092)
    assert isinstance(e.value.__cause__, OSError)
    assert e.value.retriable


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".com"])
async def test_a_name_that_is_none_is_connection_failed(name: str) -> None:
    """NC-03: bad host name."""
    with pytest.raises(ConnectionFailed, match="cannot resolve"):
        await TcpConnector().resolve(name, 9092)


async def test_a_name_without_addresses_is_connection_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answering())
    with pytest.raises(ConnectionFailed, match="'kafka' has no address"):
        await TcpConnector().resolve("kafka", 9092)


# --- TCP ---


async def test_connects_and_sets_the_socket_options() -> None:
    connector = TcpConnector(send_buffer_bytes=40_000, receive_buffer_bytes=50_000)
    async with server() as address:
        peer = await connect(address, connector=connector)
        sock = peer.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # Linux doubles what it is asked for.
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (40_000, 80_000)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) in (50_000, 100_000)
        await hang_up(peer)


async def test_minus_one_leaves_the_systems_buffer_sizes() -> None:
    with socket.socket() as fresh:
        default = fresh.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    with socket.socket() as sock:
        TcpConnector()._set_options(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == default


async def test_a_refused_connection_says_what_to_check() -> None:
    with socket.socket() as unused:
        unused.bind((LOCALHOST, 0))
        address = Address(socket.AF_INET, *unused.getsockname())
        error = await failure(address)
    assert str(error).startswith(f"{address}: Connection refused; nothing listens on this port")
    assert error.retriable


async def test_no_socket_to_be_had_is_connection_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", exhausted)
    assert "ulimit" in str(await failure(Address(2, LOCALHOST, 1)))


async def test_cancelling_connect_closes_the_socket() -> None:
    with socket.socket() as full:
        # A listener with a backlog of one or two, which nobody empties: further connects wait.
        full.bind((LOCALHOST, 0))
        full.listen(0)
        address = Address(socket.AF_INET, *full.getsockname())
        waiting = [asyncio.create_task(connect(address)) for _ in range(4)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        pending = [task for task in waiting if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in waiting:
            if not task.cancelled():
                await hang_up(task.result())
        assert pending
    # An open socket would be a ResourceWarning, which fails the test.


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ETIMEDOUT, "does not answer"),
        (errno.EHOSTUNREACH, "no route to this host"),
        (errno.ENETUNREACH, "no route to this network"),
        (errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_system_errors_have_a_text_and_a_hint(number: int, said: str) -> None:
    error = connection_failed(OSError(number, "Connect call failed ('1.2.3.4', 9)"), "broker 1")
    assert str(error).startswith("broker 1: ")
    assert said in str(error)
    assert "Connect call" not in str(error)


def test_errors_without_a_number_keep_their_text() -> None:
    assert str(connection_failed(OSError("odd"), "b")) == "b: odd"
    assert str(connection_failed(RuntimeError(), "b")) == "b: RuntimeError"
    assert str(connection_failed(socket.gaierror(-2, "no name"), "b")) == "b: no name"


def test_the_end_of_the_stream_is_told_with_the_callers_hint() -> None:
    assert str(connection_failed(None, "broker 1")) == "broker 1 closed the connection"
    assert str(connection_failed(None, "b", hint="why")) == "b closed the connection; why"


# --- TLS ---


class Tls:
    """An authority, the broker's context, and clients' contexts."""

    def __init__(self) -> None:
        self.authority = trustme.CA()
        self.broker = self.issue("localhost")

    def issue(self, *names: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert(*names).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def tls() -> Tls:
    return Tls()


async def test_tls_with_a_trusted_certificate(tls: Tls) -> None:
    async with server(context=tls.broker) as address:
        peer = await connect(address, tls.client(), "localhost")
        assert peer.transport.get_extra_info("cipher")
        await peer.heard.wait()
        assert peer.data == b"hello"
        await hang_up(peer)


async def test_an_untrusted_certificate_says_to_set_the_ca(tls: Tls) -> None:
    async with server(context=tls.broker) as address:
        error = await failure(address, ssl.create_default_context(), "localhost")
    assert "set ssl_cafile" in str(error)
    assert not error.retriable, "repeating does not make a certificate trusted"


@pytest.mark.parametrize("hostname", ["broker1.example", "127.0.0.1"])
async def test_a_certificate_for_another_name_says_so(tls: Tls, hostname: str) -> None:
    async with server(context=tls.broker) as address:
        error = await failure(address, tls.client(), hostname)
    assert "a name that the certificate contains" in str(error)
    assert hostname in str(error)


async def test_without_name_check_any_name_of_a_trusted_authority_will_do(tls: Tls) -> None:
    context = tls.client()
    context.check_hostname = False
    async with server(context=tls.broker) as address:
        for hostname in ("broker1.example", None):
            await hang_up(await connect(address, context, hostname))


async def test_an_expired_certificate_says_to_renew_it(tls: Tls, tmp_path: Path) -> None:
    from datetime import UTC, datetime

    expired = tls.authority.issue_cert("localhost", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    broker = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    expired.configure_cert(broker)
    async with server(context=broker) as address:
        error = await failure(address, tls.client(), "localhost")
    assert "expired" in str(error)
    assert "renew" in str(error)


async def test_a_plaintext_port_that_answers_in_http_says_so(tls: Tls) -> None:
    async with server(HttpServer) as address:
        error = await failure(address, tls.client(), "localhost")
    assert "the port" in str(error)
    assert "security_protocol" in str(error) or "HTTP" in str(error)


async def test_a_plaintext_port_that_hangs_up_says_what_it_may_be(tls: Tls) -> None:
    async with server(Talker) as address:
        error = await failure(address, tls.client(), "localhost")
    assert "during the TLS handshake" in str(error)
    assert "PLAINTEXT" in str(error)


@contextlib.asynccontextmanager
async def blocking_server(context: ssl.SSLContext) -> AsyncIterator[Address]:
    """Shakes hands with one client, in a thread: asyncio's server sends no TLS alerts."""

    def serve() -> None:
        accepted, _ = listening.accept()
        with (
            accepted,
            contextlib.suppress(OSError),
            context.wrap_socket(accepted, server_side=True) as wrapped,
        ):
            wrapped.recv(1)

    with socket.socket() as listening:
        listening.bind((LOCALHOST, 0))
        listening.listen()
        serving = asyncio.create_task(asyncio.to_thread(serve))
        yield Address(socket.AF_INET, *listening.getsockname())
        await serving


async def test_no_common_tls_version_says_so(tls: Tls) -> None:
    broker = tls.issue("localhost")
    broker.maximum_version = ssl.TLSVersion.TLSv1_2
    context = tls.client()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    async with blocking_server(broker) as address:
        error = await failure(address, context, "localhost")
    assert "none of our TLS versions" in str(error)


async def test_a_broker_that_wants_a_certificate_of_ours_says_so_when_it_hangs_up(
    tls: Tls,
) -> None:
    """In TLS 1.3 the client hears of it only after its own handshake is done."""
    broker = tls.issue("localhost")
    broker.verify_mode = ssl.CERT_REQUIRED
    async with blocking_server(broker) as address:
        peer = await connect(address, tls.client(), "localhost")
        error = connection_failed(await peer.lost, "broker 1")
    assert "set ssl_certfile and ssl_keyfile" in str(error)
    assert not error.retriable


async def test_cancelling_a_tls_handshake_leaves_nothing_open(tls: Tls) -> None:
    silent = Peer()
    async with server(lambda: silent) as address:
        task = asyncio.create_task(connect(address, tls.client(), "localhost"))
        await silent.heard.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await silent.lost


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("SSLV3_ALERT_BAD_CERTIFICATE", "refused our certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", "does not trust the CA of our certificate"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "no common cipher"),
        ("WRONG_VERSION_NUMBER", "does not seem to speak TLS"),
    ],
)
def test_tls_reasons_are_explained(reason: str, said: str) -> None:
    exc = ssl.SSLError(1, f"[SSL: {reason}] text")
    exc.reason = reason
    assert said in str(connection_failed(exc, "b"))


def test_an_unknown_tls_reason_is_shown_as_it_is() -> None:
    error = connection_failed(ssl.SSLError(1, "[SSL] strange"), "b")
    assert str(error) == "b: TLS failed: [SSL] strange"
    assert error.retriable


@pytest.mark.parametrize("port", [-1, 65536, 2**31 - 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_port_that_cannot_be_is_a_failed_connection(host: str, port: int) -> None:
    """Metadata tells hosts and ports: OverflowError would not look like the broker's fault."""
    with pytest.raises(ConnectionFailed, match=rf"cannot have the port {port}\b"):
        await TcpConnector().resolve(host, port)
