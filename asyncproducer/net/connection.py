"""One connection to one broker: handshake, pipelined requests, deadlines, throttling.

    NEW -> CONNECTING ----------------> NEGOTIATING -> READY -> CLOSED
               `-> AUTHENTICATING (SASL) -^        AUTHENTICATING <-> READY (KIP-368)

A broker answers the requests of one connection in the order in which they came. So the
requests in flight are a queue: a response belongs to its head, and the correlation id
only proves that. There is no task per request: `send` writes and notes the request, the
reader completes it, one timer watches the earliest deadline.

When a request gets no answer in time, or the peer breaks the rules, nothing that comes
later can be trusted to be an answer. So the connection ends, and everything in flight
ends with it, oldest first: the order in which batches must be sent again.

Callbacks run synchronously. They may call any method, `send` and `close` included.
"""

from __future__ import annotations

import asyncio
import random as random_module
import ssl
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, TypeVar

from asyncproducer.core import wire
from asyncproducer.core.wire import ApiKey
from asyncproducer.errors import (
    AuthenticationError,
    ConnectionFailed,
    IllegalStateError,
    KafkaError,
    ProtocolError,
    RequestTimedOut,
)
from asyncproducer.logs import guarded
from asyncproducer.net import handshake, security
from asyncproducer.net.frames import FrameReader, frame
from asyncproducer.net.in_flight import InFlight, OnDone, Pending
from asyncproducer.net.outbox import Outbox
from asyncproducer.net.transport import Address, Connector, connection_failed, unwritten
from asyncproducer.net.unwritten import Unwritten
from asyncproducer.net.waiting import time_of

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.metadata import Node
    from asyncproducer.core.metrics import Metrics
    from asyncproducer.core.wire import Buffer

__all__ = ["TRANSITIONS", "Connection", "ConnectionState"]

logger = guarded("asyncproducer.net.connection")

R = TypeVar("R")


class ConnectionState(Enum):
    """Where in its life a connection is."""

    NEW = "new"
    CONNECTING = "connecting"
    AUTHENTICATING = "authenticating"
    NEGOTIATING = "negotiating"
    READY = "ready"
    CLOSED = "closed"


_S = ConnectionState
# Looked up once: before CPython 3.12 a member costs its class a search each time.
_READY = _S.READY
_CLOSED = _S.CLOSED

#: Every legal move.
TRANSITIONS: Mapping[ConnectionState, frozenset[ConnectionState]] = {
    _S.NEW: frozenset({_S.CONNECTING, _S.CLOSED}),
    _S.CONNECTING: frozenset({_S.AUTHENTICATING, _S.NEGOTIATING, _S.CLOSED}),
    # The second one is the way back from authenticating again.
    _S.AUTHENTICATING: frozenset({_S.NEGOTIATING, _S.READY, _S.CLOSED}),
    _S.NEGOTIATING: frozenset({_S.READY, _S.CLOSED}),
    _S.READY: frozenset({_S.AUTHENTICATING, _S.CLOSED}),
    _S.CLOSED: frozenset(),
}

#: The correlation ids that Java keeps for SASL (SaslClientAuthenticator): the answer to
#: a request of ours can then never be taken for one of the authentication's.
SASL_IDS = range(2147483640, 2147483648)
_FIRST_NEGATIVE_ID = -(2**31)

#: Seconds for what the transport still holds to leave, when we close in peace.
CLOSE_GRACE = 1.0

#: asyncio's default: with more bytes unwritten the transport pauses us.
HIGH_WATER_BYTES = 64 * 1024

#: How much is written before the loop may turn, and for how many seconds.
_BYTES_AT_ONCE = 1024 * 1024
_SECONDS_AT_ONCE = 0.00045
#: To write less than this takes no time.
_LARGE_BYTES = 64 * 1024

#: Where in the session's life to authenticate again (Java: ReauthenticationInfo): early
#: enough for a slow answer, and not all connections at once.
_REAUTHENTICATE_FROM, _REAUTHENTICATE_TO = 0.85, 0.95


class Connection:
    """One connection to one broker. Used once: after CLOSED make a new one.

    `on_closed(connection, reason)` is called exactly once, whatever ends the connection
    (a failed `open` too), after everything in flight was completed. `on_room(connection)`
    is called when `can_send` has become True for another reason than an answer to
    `send`. `ssl_context`: instead of the one that `config` asks for.
    """

    def __init__(
        self,
        node: Node,
        config: ProducerConfig,
        connector: Connector,
        *,
        client_id: str,
        loop: asyncio.AbstractEventLoop,
        on_closed: Callable[[Connection, BaseException], None],
        on_room: Callable[[Connection], None],
        metrics: Metrics,
        ssl_context: ssl.SSLContext | None = None,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self.node = node
        #: What the broker speaks: API key -> lowest and highest version.
        self.versions: Mapping[int, tuple[int, int]] = {}
        self.finalized_features: Mapping[str, int] = {}
        self.finalized_features_epoch = -1
        self._time = time_of(loop)
        #: When something was last sent or received, on the loop's clock.
        self.last_used = self._time()
        #: The shortest time between a request and its answer, in seconds; inf before the first.
        self.round_trip = inf
        self._config = config
        self._connector = connector
        self._client_id = client_id
        self._loop = loop
        self._on_closed = on_closed
        self._on_room = on_room
        self._metrics = metrics
        self._ssl_context = ssl_context
        self._random = random
        self._max_in_flight = config.max_in_flight_requests_per_connection
        self._request_timeout = config.request_timeout_ms / 1000
        self._state = _S.NEW
        self._reason: BaseException | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._in_flight = InFlight(loop, self._timed_out)
        self._unwritten = Unwritten(
            loop,
            left=self._bytes_left,
            on_written=self._written,
            on_timeout=self._not_written,
        )
        self._outbox = Outbox()
        self._paused = False
        #: How much more may be written in this turn of the loop, for how long that was done, and
        #: whether `_turned` is to be called.
        self._allowance = _BYTES_AT_ONCE
        self._writing = 0.0
        self._turning = False
        self._correlation_id = 0
        self._sasl_id = 0
        self._throttled_until = 0.0
        self._throttle_timer: asyncio.TimerHandle | None = None
        self._renew_at: float | None = None
        self._session_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._reauthentication: asyncio.Task[None] | None = None
        self._draining = False
        self._drained: asyncio.Future[None] | None = None
        self._answers = 0
        self._gone = asyncio.Event()
        self._name = _name(node)

    def __repr__(self) -> str:
        return f"<Connection to {self._name} {self._state.name} in_flight={self.in_flight}>"

    # --- what it can do now ---

    @property
    def state(self) -> ConnectionState:
        """Where in its life the connection is."""
        return self._state

    @property
    def in_flight(self) -> int:
        """Requests that have no response yet, or that get none and are not written yet."""
        return len(self._in_flight) + len(self._unwritten)

    @property
    def throttled_until(self) -> float:
        """Until when the broker wants us to be silent; 0.0 or past when it does not."""
        return self._throttled_until

    @property
    def is_lost(self) -> bool:
        """Whether asyncio has seen its end already: there will be no more answers."""
        return self._transport is not None and self._transport.is_closing()

    def can_send(self, now: float) -> bool:
        """Whether `send` and `request` are allowed now."""
        return (
            self._state is _READY
            and len(self._in_flight) < self._max_in_flight
            and now >= self._throttled_until
            and not self._paused
            and not self._outbox
            and not self._draining
            # asyncio has seen its end, and tells us in the next turn. What is written until then is
            # never read, and CPython 3.12 and 3.13 are not fit for it: see `_write_on`.
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def _why_not(self, now: float) -> str:
        if self._state is not _READY:
            return f"it is {self._state.name}"
        if self._draining:
            return "it is about to authenticate again"
        if self._paused or self._outbox:
            return "the socket takes no more bytes"
        if self.is_lost:
            return "it has just been lost"
        if now < self._throttled_until:
            return f"the broker throttles it for {self._throttled_until - now:.3f} s more"
        return f"{len(self._in_flight)} requests are in flight, the most allowed"

    def version(self, api_key: ApiKey, cap: int | None = None) -> int:
        """The version to use for a request, at most `cap`. Raises UnsupportedVersionError."""
        return wire.choose_version(api_key, self.versions, cap=cap)

    def next_correlation_id(self) -> int:
        """The id for the next request: it rises, wraps around, and leaves out SASL's range."""
        correlation_id = self._correlation_id
        following = correlation_id + 1
        self._correlation_id = _FIRST_NEGATIVE_ID if following == SASL_IDS.start else following
        return correlation_id

    # --- opening ---

    async def open(self, address: Address, deadline: float) -> None:
        """Connects to `address` and shakes hands: TCP, TLS, SASL, ApiVersions.

        All or nothing: returns READY, or raises and is CLOSED. `deadline` (the loop's
        clock) covers all of it; each request on the way has `request_timeout_ms` too.
        Cancelling closes the connection.
        Raises ConnectionFailed, ProtocolError, RequestTimedOut, AuthenticationError,
        BrokerError (ApiVersions was refused), ConfigError (TLS files, SASL options).
        """
        self._move(_S.CONNECTING)
        try:
            async with asyncio.timeout_at(deadline):
                await self._connect(address)
                if self._config.uses_sasl:
                    await self._authenticate()
                await self._negotiate()
                if self._config.uses_sasl or self._config.uses_tls:
                    # Not earlier: TLS 1.3 tells of a certificate that the broker does not
                    # like only with the first answer.
                    self._metrics.authenticated(self._time())
        except asyncio.CancelledError:
            self.close(ConnectionFailed(f"{self._name}: connecting was cancelled"))
            raise
        except TimeoutError as exc:
            if isinstance(exc, KafkaError):  # RequestTimedOut: it knows better
                self.close(exc)
                raise
            error = ConnectionFailed(
                f"{self._name} at {address} was not ready in time: it was still"
                f" {self._state.value}; check the address, the network and firewalls, or raise"
                " socket_connection_setup_timeout_ms"
            )
            self.close(error)
            raise error from exc
        except Exception as exc:
            if _is_refusal(exc):
                self._metrics.authentication_failed(self._time())
            self.close(exc)
            raise
        logger.debug("%s is ready", self._name)

    async def _connect(self, address: Address) -> None:
        context: ssl.SSLContext | None = None
        if self._config.uses_tls:
            context = self._ssl_context or self._config.ssl_context
            if context is None:
                # Anew for each connection: certificates are renewed under a running process.
                context = await asyncio.to_thread(security.ssl_context, self._config)
        transport, _ = await self._connector.connect(
            lambda: _Peer(self),
            address,
            ssl=context,
            server_hostname=self.node.host if context is not None else None,
        )
        if self._reason is not None:  # closed, or lost, while it was being made
            transport.abort()
            raise self._reason

    async def _negotiate(self) -> None:
        self._advance(_S.NEGOTIATING)
        response = await handshake.negotiate(self)
        self.versions = response.versions
        self.finalized_features = response.finalized_features
        self.finalized_features_epoch = response.finalized_features_epoch
        self._answers = 0
        self._become_ready()

    def _become_ready(self) -> None:
        self._advance(_S.READY)
        if self._renew_at is not None:
            self._session_timer = self._loop.call_at(self._renew_at, self._renew)

    # --- SASL ---

    async def _authenticate(self) -> None:
        self._advance(_S.AUTHENTICATING)
        self._sasl_id = SASL_IDS.start
        self.versions = await handshake.discover(self)
        mechanism = await security.mechanism(self._config)
        await self._converse(mechanism)

    async def _converse(self, mechanism: security.Mechanism) -> None:
        lifetime = await handshake.authenticate(self, mechanism, self.versions)
        span = _REAUTHENTICATE_TO - _REAUTHENTICATE_FROM
        part = _REAUTHENTICATE_FROM + span * self._random()
        self._renew_at = self._time() + lifetime * part if lifetime > 0 else None

    def _renew(self) -> None:
        self._session_timer = None
        self._reauthentication = self._loop.create_task(
            self._reauthenticate(), name=f"authenticate {self._name} again"
        )

    async def _reauthenticate(self) -> None:
        """KIP-368. Nothing may be in flight while the tokens are exchanged.

        The token provider, which may be slow, is asked before the sending stops.
        """
        try:
            mechanism = await self._fresh_mechanism()
            await self._drain()
            began = self._time()
            self._advance(_S.AUTHENTICATING)
            self._sasl_id = SASL_IDS.start
            await self._converse(mechanism)
        except Exception as exc:
            if _is_refusal(exc):
                self._metrics.reauthentication_failed(self._time())
            # The broker will end the session: no new requests, and those in flight may finish.
            await self._drain()
            self._reauthentication = None
            self.close(exc)
            return
        self._reauthentication = None
        self._draining = False
        now = self._time()
        self._metrics.reauthenticated(now - began, now)
        self._become_ready()
        logger.debug("%s: authenticated again", self._name)
        self._room()

    async def _fresh_mechanism(self) -> security.Mechanism:
        try:
            async with asyncio.timeout(self._request_timeout):
                return await security.mechanism(self._config)
        except TimeoutError as exc:
            raise security.authentication_error(
                "sasl_oauth_token_provider did not return a token within request_timeout_ms"
            ) from exc

    async def _drain(self) -> None:
        self._draining = True
        if self._in_flight:
            self._drained = self._loop.create_future()
            await self._drained

    async def ask(self, request: wire.Request[R], version: int) -> R:
        """A request of the handshake (`handshake.Channel`), whatever `can_send` says."""
        sasl = self._state is _S.AUTHENTICATING
        return await self._ask(
            request, version, self._next_sasl_id() if sasl else self.next_correlation_id()
        )

    async def exchange_raw(self, token: bytes) -> bytes:
        """A bare token of the handshake (`handshake.Channel`)."""
        answer: asyncio.Future[bytes] = self._loop.create_future()

        def on_done(body: bytes | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if body is None:
                answer.set_exception(error or ConnectionFailed(f"{self._name}: no answer"))
            else:
                answer.set_result(bytes(body))

        self._write(None, 0, 0, (frame(token),), self._request_timeout, on_done)
        return await answer

    def _next_sasl_id(self) -> int:
        correlation_id = self._sasl_id
        last = correlation_id == SASL_IDS.stop - 1
        self._sasl_id = SASL_IDS.start if last else correlation_id + 1
        return correlation_id

    # --- requests ---

    def send(
        self,
        api_key: ApiKey,
        version: int,
        correlation_id: int,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        on_done: OnDone,
        expect_response: bool = True,
    ) -> None:
        """Writes one whole frame now. The buffers must not change until `on_done`.

        `on_done` is called exactly once, never from inside `send`: with the response's
        body and None; or with None and RequestTimedOut, ConnectionFailed or
        ProtocolError; or, without `expect_response`, with None and None when the system
        has taken all bytes. `timeout` is in seconds, and is for that, too.
        Raises IllegalStateError when `can_send` is False; nothing is written then.
        """
        self._check_room()
        if expect_response:
            self._write(api_key, version, correlation_id, buffers, timeout, on_done)
            return
        self._hand_over(self._live_transport(), buffers)
        since = self.last_used
        self._unwritten.add(Pending(api_key, version, correlation_id, timeout, since, on_done))

    async def request(
        self, request: wire.Request[R], *, timeout: float | None = None, cap: int | None = None
    ) -> R:
        """Sends a request and waits for its response; `timeout` in seconds.

        The default is `request_timeout_ms`. Cancelling ends the wait only: the request
        stays in flight, and its response is dropped. A throttle time in the response is
        obeyed.
        Raises IllegalStateError when `can_send` is False, UnsupportedVersionError (both:
        nothing was sent), RequestTimedOut, ConnectionFailed, ProtocolError.
        """
        self._check_room()
        version = self.version(request.api_key, cap)
        return await self._ask(request, version, self.next_correlation_id(), timeout)

    def _check_room(self) -> None:
        now = self._time()
        if not self.can_send(now):
            raise IllegalStateError(
                f"the connection to {self._name} cannot send now: {self._why_not(now)}"
            )

    def _ask(
        self,
        request: wire.Request[R],
        version: int,
        correlation_id: int,
        timeout: float | None = None,
    ) -> asyncio.Future[R]:
        """Sends a request whatever `can_send` says."""
        answer: asyncio.Future[R] = self._loop.create_future()

        def on_done(body: bytes | None, error: BaseException | None) -> None:
            was_full = len(self._in_flight) == self._max_in_flight - 1
            if body is None:
                if not answer.done():
                    answer.set_exception(error or ConnectionFailed(f"{self._name}: no answer"))
                return
            # Decoded even when nobody waits any more: the throttle time still counts.
            try:
                response = request.decode(version, body)
            except Exception as exc:
                broken = self._unreadable(f"its answer to {request.api_key.name} v{version}", exc)
                if not answer.done():
                    answer.set_exception(broken)
                self.close(broken)
                return
            if self._state is not _S.AUTHENTICATING:
                self._metrics.throttled(getattr(response, "throttle_ms", 0))
            if wire.throttles_client(request.api_key, version):
                self.throttle(getattr(response, "throttle_ms", 0), self._time())
            if not answer.done():
                answer.set_result(response)
            if was_full:
                self._room()

        encoded = wire.encode_frame(request, version, correlation_id, self._client_id)
        self._write(
            request.api_key,
            version,
            correlation_id,
            (encoded,),
            self._request_timeout if timeout is None else timeout,
            on_done,
        )
        return answer

    def _write(
        self,
        api_key: ApiKey | None,
        version: int,
        correlation_id: int,
        buffers: Sequence[Buffer],
        timeout: float,
        on_done: OnDone,
    ) -> None:
        transport = self._live_transport()
        self._in_flight.add(api_key, version, correlation_id, timeout, on_done)
        self._hand_over(transport, buffers)

    def _hand_over(self, transport: asyncio.Transport, buffers: Sequence[Buffer]) -> None:
        self.last_used = self._time()
        size = self._outbox.put(buffers)
        self._write_on(transport)
        self._unwritten.handed(size)
        self._metrics.written(self.node.node_id, size, self.last_used)

    def _write_on(self, transport: asyncio.Transport) -> None:
        """Give the transport what it takes, but not for long in a turn of the loop.

        Nothing once it is closing: `writelines` of CPython 3.12 and 3.13 (gh-136234) would fail, or
        watch the socket on: its number is soon that of another, which then waits in vain.
        """
        try:
            self._write_pieces(transport)
        except Exception as exc:
            # Nobody knows what it has taken. Who sends is to have its request in flight before it
            # hears of the end, and what follows must not get behind half a request.
            error = ConnectionFailed(f"writing to {self._name} failed: {exc!r}")
            error.__cause__ = exc
            self._loop.call_soon(self.close, error)
            transport.abort()

    def _write_pieces(self, transport: asyncio.Transport) -> None:
        outbox = self._outbox
        began = -1.0
        while outbox and not self._paused and not transport.is_closing():
            before = len(outbox)
            large = before >= _LARGE_BYTES
            if large:
                if self._allowance <= 0:
                    return  # `_turned` goes on
                if not self._turning:
                    self._turning = True
                    self._loop.call_soon(self._turned)
                if began < 0.0:
                    began = self._time()
            piece = outbox.take()
            if len(piece) == 1:
                transport.write(piece[0])  # CPython 3.11 would copy it in `writelines`
            else:
                transport.writelines(piece)
                if not self._paused and transport.get_write_buffer_size() > HIGH_WATER_BYTES:
                    # CPython before 3.12.9 and 3.13.2 forgets to pause us after `writelines`
                    # (gh-127655), but not after this: it sets what is set already.
                    transport.set_write_buffer_limits(HIGH_WATER_BYTES)
            if large:
                self._allowance -= before - len(outbox)
                now = self._time()
                self._writing += now - began
                began = now
                if self._writing >= _SECONDS_AT_ONCE:
                    self._allowance = 0

    def _turned(self) -> None:
        self._turning = False
        waiting = self._allowance <= 0 and self._outbox
        self._allowance = _BYTES_AT_ONCE
        self._writing = 0.0
        if waiting:
            self._go_on()

    def _go_on(self) -> None:
        """The transport may take more: write the rest, then tell that there is room."""
        transport = self._transport
        if transport is None or self._state is _CLOSED:
            return
        self._write_on(transport)
        self._unwritten.look()
        if not self._outbox and not self._paused:
            self._room()

    def _live_transport(self) -> asyncio.Transport:
        transport = self._transport
        if transport is None or self._reason is not None:
            raise self._reason or IllegalStateError(f"the connection to {self._name} is not open")
        return transport

    def _bytes_left(self) -> int | None:
        left = None if self._transport is None else unwritten(self._transport)
        return None if left is None else left + len(self._outbox)

    def _written(self, on_done: OnDone) -> None:
        self._loop.call_soon(self._guarded, on_done, None, None)

    # --- deadlines and throttling ---

    def _not_written(self, late: Pending) -> None:
        self.close(
            RequestTimedOut(
                f"{self._name} did not take all of {late} within {late.timeout:g} s: the"
                f" connection is closed, with {self.in_flight} requests in flight"
            )
        )

    def _timed_out(self, late: Pending) -> None:
        self.close(
            RequestTimedOut(
                f"{self._name} did not answer {late} within {late.timeout:g} s: the connection"
                f" is closed, with {self.in_flight} requests in flight"
            )
        )

    def throttle(self, throttle_ms: int, now: float) -> None:
        """The broker wants silence for `throttle_ms` (KIP-219).

        `can_send` is False until then; the end never moves back. The requests in flight
        get as much more time, for the broker reads nothing meanwhile.
        """
        if throttle_ms <= 0 or self._state is _CLOSED:
            return
        delay = throttle_ms / 1000
        self._in_flight.extend(delay)
        self._unwritten.extend(delay)
        until = now + delay
        if until <= self._throttled_until:
            return
        self._throttled_until = until
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
        self._throttle_timer = self._loop.call_at(until, self._throttle_over)

    def _throttle_over(self) -> None:
        self._throttle_timer = None
        # Timers may fire a clock tick early; `can_send` must be True in `on_room`.
        self._throttled_until = 0.0
        self._room()

    def _room(self) -> None:
        if self.can_send(self._time()):
            self._guarded(self._on_room, self)

    # --- what the transport says ---

    def _connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._metrics.connection_opened(self._time())
        if self._state is _CLOSED:
            transport.abort()

    def _data_received(self, data: bytes) -> None:
        if self._state is _CLOSED:
            return
        self._metrics.read(self.node.node_id, len(data), self._time())
        try:
            for received in self._frames.feed(data):
                self._frame_received(received)
                if self._reason is not None:  # closed by a callback
                    return
        except ProtocolError as exc:
            self.close(self._unreadable(None, exc))

    def _frame_received(self, received: bytes) -> None:
        request, body = self._in_flight.take(received)
        self._answers += 1
        self.last_used = self._time()
        if self.last_used - request.since < self.round_trip:
            self.round_trip = self.last_used - request.since
        self._metrics.answered(self.last_used)
        self._guarded(request.on_done, body, None)
        if self._drained is not None and not self._in_flight and not self._drained.done():
            self._drained.set_result(None)

    def _unreadable(self, what: str | None, exc: Exception) -> ProtocolError:
        text = f"{what} cannot be read: {exc}" if what else str(exc)
        error = ProtocolError(f"{self._name}: {text}")
        error.__cause__ = exc
        return error

    def _pause_writing(self) -> None:
        self._paused = True

    def _resume_writing(self) -> None:
        self._paused = False
        self._go_on()

    def _connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._metrics.connection_closed(self._time())
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self._state is not _CLOSED:
            error = connection_failed(exc, self._name, hint=self._lost_hint())
            error.__cause__ = exc
            self.close(error)
        self._gone.set()

    def _lost_hint(self) -> str | None:
        if self._frames.incomplete:
            return "it stopped in the middle of a response"
        if self._answers or not self._in_flight:
            return None
        if self._state is not _READY:
            if self._config.uses_tls:
                return (
                    "it answered nothing: perhaps it wants another client certificate"
                    " (ssl_certfile; the broker's log says), or is not a Kafka broker"
                )
            protocol = "SASL_SSL" if self._config.uses_sasl else "SSL"
            return (
                "it answered nothing: perhaps the port speaks TLS (then set security_protocol to"
                f" {protocol}), or is not a Kafka broker's"
            )
        if self._config.uses_sasl:
            return None
        return (
            "it did not answer the first request of this connection: if none to this broker has"
            " worked yet, it may be a SASL listener (then set security_protocol)"
        )

    # --- the end ---

    def close(self, reason: BaseException | None = None) -> None:
        """Ends the connection. Everything in flight completes with `reason`, oldest first.

        Does nothing when it is closed already. Without a reason the bytes that the
        transport holds may still leave, for at most CLOSE_GRACE seconds.
        """
        if self._state is _CLOSED:
            return
        # Before what tells so is gone with the transport.
        self._unwritten.look()
        peaceful = reason is None
        if reason is None:
            reason = ConnectionFailed(f"the connection to {self._name} was closed by this client")
        logger.debug("the connection to %s ends: %s", self._name, reason)
        self._move(_S.CLOSED)
        self._reason = reason
        for timer in (self._throttle_timer, self._session_timer):
            if timer is not None:
                timer.cancel()
        if self._reauthentication is not None:
            self._reauthentication.cancel()
        self._close_transport(peaceful)
        for lost in (self._in_flight, self._unwritten):
            for request in lost.clear():
                self._guarded(request.on_done, None, reason)
        self._guarded(self._on_closed, self, reason)

    def abort(self) -> None:
        """Cuts the transport of a connection that was closed and may still be writing.

        `wait_closed` then ends with the next turn of the loop.
        """
        if self._transport is not None:
            self._transport.abort()

    def _close_transport(self, peaceful: bool) -> None:
        transport = self._transport
        if transport is None:
            # Not made yet, then `_connect` ends it; or lost already.
            self._gone.set()
        elif peaceful:
            try:
                while self._outbox and not transport.is_closing():
                    transport.writelines(self._outbox.take())
                transport.close()
            except Exception as exc:
                logger.debug("%s did not get the last bytes: %r", self._name, exc)
                transport.abort()
            self._close_timer = self._loop.call_later(CLOSE_GRACE, transport.abort)
        else:
            transport.abort()
        self._outbox.clear()

    async def wait_closed(self) -> None:
        """Waits until the transport is gone. Call `close` first. Cancel-safe."""
        await self._gone.wait()
        if self._reauthentication is not None:
            await asyncio.wait([self._reauthentication])

    # --- helpers ---

    def _move(self, to: ConnectionState) -> None:
        if to not in TRANSITIONS[self._state]:
            raise IllegalStateError(
                f"the connection to {self._name} cannot go from {self._state.name} to {to.name}"
            )
        self._state = to

    def _advance(self, to: ConnectionState) -> None:
        """The next step of a handshake, which somebody may have closed meanwhile."""
        if self._reason is not None:
            raise self._reason
        self._move(to)

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        """A callback that raises must not keep the others from running."""
        try:
            callback(*args)
        except Exception as exc:
            self._loop.call_exception_handler(
                {
                    "message": f"a callback of the connection to {self._name} failed",
                    "exception": exc,
                }
            )


class _Peer(asyncio.Protocol):
    """What the transport calls. It knows nothing but its connection."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection._connection_made(transport)  # type: ignore[arg-type]  # streams only

    def data_received(self, data: bytes) -> None:
        self._connection._data_received(data)

    def pause_writing(self) -> None:
        self._connection._pause_writing()

    def resume_writing(self) -> None:
        self._connection._resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection._connection_lost(exc)


def _is_refusal(error: BaseException) -> bool:
    """Whether SASL or TLS said no: nothing else that may end a connection does."""
    return isinstance(error, AuthenticationError) or isinstance(error.__cause__, ssl.SSLError)


def _name(node: Node) -> str:
    place = f"{node.host}:{node.port}"
    # Bootstrap brokers have no id yet: Java numbers them -1, -2, ...
    return f"bootstrap broker {place}" if node.node_id < 0 else f"broker {node.node_id} ({place})"
