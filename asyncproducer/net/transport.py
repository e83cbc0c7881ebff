"""From a host name to a connected transport: DNS, TCP, TLS.

This is where errors of the operating system and of OpenSSL become
`ConnectionFailed`, with a hint about what to change. Nothing in here knows Kafka.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl as tls
from collections.abc import Callable
from typing import NamedTuple, Protocol

from asyncproducer.errors import ConnectionFailed

__all__ = ["Address", "Connector", "TcpConnector", "connection_failed", "unwritten"]

_MAX_PORT = 65535


class Address(NamedTuple):
    """One resolved address of a broker. `host` is an IP address, never a name."""

    family: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connector(Protocol):
    """Makes transports. The default is `TcpConnector`; tests bring a network in memory."""

    async def resolve(self, host: str, port: int) -> list[Address]:
        """All addresses of `host` to try, in order; never an empty list.

        Raises ConnectionFailed when the name cannot be resolved.
        """

    async def connect(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        address: Address,
        *,
        ssl: tls.SSLContext | None,
        server_hostname: str | None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connects, and shakes hands when `ssl` is given.

        There is no time limit inside: the caller cancels, and then nothing stays open.
        Raises ConnectionFailed.
        """


class TcpConnector:
    """The operating system's TCP, and OpenSSL, through the running event loop.

    A buffer size of -1 leaves the system's own (Java: Selectable.USE_DEFAULT_BUFFER_SIZE).
    """

    __slots__ = ("_receive_buffer_bytes", "_send_buffer_bytes")

    def __init__(self, *, send_buffer_bytes: int = -1, receive_buffer_bytes: int = -1) -> None:
        self._send_buffer_bytes = send_buffer_bytes
        self._receive_buffer_bytes = receive_buffer_bytes

    async def resolve(self, host: str, port: int) -> list[Address]:
        """All addresses of `host`, those of the first one's family first.

        Raises ConnectionFailed when there is none.
        """
        if not 0 <= port <= _MAX_PORT:  # a broker told it: options were looked at before
            raise ConnectionFailed(
                f"{host!r} cannot have the port {port}, the last one is {_MAX_PORT}; check the"
                " advertised.listeners of the brokers"
            )
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            pass  # a name
        else:
            family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
            return [Address(family, host, port)]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A label that is too long or empty fails in the IDNA codec, before DNS is asked.
        except (OSError, UnicodeError) as exc:
            raise ConnectionFailed(
                f"cannot resolve the host name {host!r}: {_text(exc)}; check bootstrap_servers,"
                " or the advertised.listeners of the brokers, and the DNS of this machine"
            ) from exc
        if not found:
            raise ConnectionFailed(f"the host name {host!r} has no address")
        # Java drops all other families (ClientUtils.filterPreferredAddresses). But where
        # localhost is ::1 first and the broker listens on 127.0.0.1 only, it would then
        # never be tried. Where only one family is routed, the other costs an attempt.
        family = found[0][0]
        found.sort(key=lambda info: info[0] != family)
        # `dict.fromkeys`: a hosts file with a double line gives the same address twice.
        hosts = dict.fromkeys((info[0], str(info[4][0])) for info in found)
        return [Address(family, ip, port) for family, ip in hosts]

    async def connect(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        address: Address,
        *,
        ssl: tls.SSLContext | None,
        server_hostname: str | None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connects, and shakes hands when `ssl` is given. See `Connector.connect`."""
        loop = asyncio.get_running_loop()
        try:
            sock = socket.socket(address.family, socket.SOCK_STREAM)
        except OSError as exc:  # out of file descriptors, no IPv6, ...
            raise connection_failed(exc, address) from exc
        try:
            self._set_options(sock)
            await loop.sock_connect(sock, (address.host, address.port))
        except OSError as exc:
            sock.close()
            raise connection_failed(exc, address) from exc
        except BaseException:  # cancelled
            sock.close()
            raise
        # From here on the event loop owns the socket, and closes it when this fails.
        try:
            return await loop.create_connection(
                protocol_factory,
                sock=sock,
                ssl=ssl,
                # "" is asyncio's way to say: TLS, but there is no name to send or check.
                server_hostname=(server_hostname or "") if ssl is not None else None,
            )
        except OSError as exc:  # ssl.SSLError is one
            raise connection_failed(exc, address, handshake=ssl is not None) from exc

    def _set_options(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Requests are written whole: waiting to fill a TCP segment would only add latency.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Before connect(): the window scale is agreed upon in the SYN.
        if self._send_buffer_bytes >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        if self._receive_buffer_bytes >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)


def unwritten(transport: asyncio.Transport) -> int | None:
    """How many bytes a transport holds that the system has not taken yet.

    None when it is closing: what it holds then may never be written.
    """
    # asyncio's transport for TLS has another one below it, which counts for itself. There is
    # no public way to it; uvloop has none at all, and hides less than a pause allows.
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    if transport.is_closing() or (below is not None and below.is_closing()):
        return None
    size = transport.get_write_buffer_size()
    return size if below is None else size + int(below.get_write_buffer_size())


def connection_failed(
    exc: BaseException | None, peer: object, *, handshake: bool = False, hint: str | None = None
) -> ConnectionFailed:
    """The `ConnectionFailed` for what the system said, and what to change.

    `exc` None: the peer closed the connection. `handshake`: TLS was not up yet. `hint`:
    what the caller knows of it. The caller raises it `from exc`. What a retry cannot
    mend (a certificate that is not trusted, a port that speaks something else) has
    `retriable` False.
    """
    if isinstance(exc, tls.SSLError):
        return _tls_failed(exc, peer)
    if handshake and (exc is None or isinstance(exc, ConnectionError)):
        return ConnectionFailed(
            f"{peer} closed the connection during the TLS handshake: either the port speaks"
            " plaintext (then set security_protocol to PLAINTEXT or SASL_PLAINTEXT), or the"
            " broker refuses our TLS version or certificate (its log says which)"
        )
    if hint is None and isinstance(exc, OSError):
        hint = _HINTS.get(exc.errno or 0)
    text = f"{peer} closed the connection" if exc is None else f"{peer}: {_text(exc)}"
    return ConnectionFailed(f"{text}; {hint}" if hint else text)


_HINTS = {
    errno.ECONNREFUSED: "nothing listens on this port: check that the broker runs, and that"
    " bootstrap_servers and its advertised.listeners name the right host and port",
    errno.ETIMEDOUT: "the host does not answer: check the address, the network and firewalls",
    errno.EHOSTUNREACH: "there is no route to this host: check the address and the network",
    errno.ENETUNREACH: "there is no route to this network: check the address and the network",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
    errno.EACCES: "the system does not allow this connection (firewall, sandbox)",
}


#: A part of OpenSSL's reason -> what it means for a Kafka client. The first match counts.
_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "the port does not seem to speak TLS: set security_protocol to"
    " PLAINTEXT or SASL_PLAINTEXT, or use the broker's TLS port",
    "HTTP_REQUEST": "the port speaks HTTP",
    "CERTIFICATE_REQUIRED": "the broker wants a client certificate: set ssl_certfile and"
    " ssl_keyfile",
    "UNKNOWN_CA": "the broker does not trust the CA of our certificate (ssl_certfile)",
    "CERTIFICATE_EXPIRED": "the broker says that our certificate (ssl_certfile) has expired",
    "BAD_CERTIFICATE": "the broker refused our certificate (ssl_certfile)",
    "CERTIFICATE_UNKNOWN": "the broker refused our certificate (ssl_certfile)",
    "PROTOCOL_VERSION": "the broker speaks none of our TLS versions (its ssl.enabled.protocols)",
    "UNSUPPORTED_PROTOCOL": "the broker offers only a TLS version that is too old",
    "HANDSHAKE_FAILURE": "there is no common cipher, or the broker wants a client certificate:"
    " set ssl_certfile and ssl_keyfile",
}


def _tls_failed(exc: tls.SSLError, peer: object) -> ConnectionFailed:
    if isinstance(exc, tls.SSLCertVerificationError):
        error = ConnectionFailed(
            f"{peer}: the broker's certificate is not accepted: {exc.verify_message}; "
            + _certificate_hint(exc)
        )
        error.retriable = False
        return error
    reason = getattr(exc, "reason", None) or ""  # only OpenSSL's own errors have one
    for part, hint in _TLS_HINTS.items():
        if part in reason:
            error = ConnectionFailed(f"{peer}: TLS failed ({reason}): {hint}")
            error.retriable = False
            return error
    return ConnectionFailed(f"{peer}: TLS failed: {_text(exc)}")


def _certificate_hint(exc: tls.SSLCertVerificationError) -> str:
    # X509_V_ERR_*: 62 hostname mismatch, 64 IP address mismatch, 10 expired, 9 not yet valid.
    if exc.verify_code in (62, 64):
        return (
            "connect by a name that the certificate contains (bootstrap_servers, and the"
            " advertised.listeners of the brokers)"
        )
    if exc.verify_code in (9, 10):
        return "check the clock of this machine, or renew the broker's certificate"
    return "set ssl_cafile to the CA that signed it"


def _text(exc: BaseException) -> str:
    if isinstance(exc, OSError):
        # asyncio's own text for a failed connect names neither cause nor remedy. The numbers
        # of getaddrinfo and OpenSSL are not those of the system: their text is in strerror.
        foreign = isinstance(exc, (socket.gaierror, tls.SSLError))
        if exc.errno is not None and not foreign:
            return os.strerror(exc.errno)
        if exc.strerror:
            return exc.strerror
    return str(exc) or type(exc).__name__
