"""One broker that we may be connected to: connect on demand, live, be lost, back off.

            ask()              backoff over            open() done
    IDLE ──────────→ WAITING ──────────────→ CONNECTING ──────────→ READY
     ↑                  ↑                         │                    │
     │                  └── failed, and asked again                    │
     └──────────────── failed or lost or idle, and nobody asks ────────┘

There is one task per link while something is going on, and none in IDLE. A link connects
because somebody asks for it, never by itself: a broker that leads nothing which we write
to costs nothing. Who still wants the broker after a failure asks again when it hears of
the failure. A *retired* link takes no new work: its connection closes as soon as nothing
is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Protocol

from asyncproducer.errors import AuthenticationError, ConnectionFailed, KafkaError
from asyncproducer.logs import guarded
from asyncproducer.net.addresses import AddressRotation
from asyncproducer.net.waiting import Alarm

if TYPE_CHECKING:
    from asyncproducer.core.metadata import Node
    from asyncproducer.core.reconnect import ReconnectState
    from asyncproducer.net.connection import Connection
    from asyncproducer.net.transport import Connector

__all__ = ["BrokerLink", "LinkOwner", "LinkState"]

logger = guarded("asyncproducer.net.cluster")

#: How often a retired connection is looked at. It ends with its last response, and
#: nobody else is told of that one.
RETIRED_CHECK = 0.1


class LinkState(Enum):
    """See the picture at the top of the module."""

    IDLE = "idle"
    WAITING = "waiting"
    CONNECTING = "connecting"
    READY = "ready"


class LinkOwner(Protocol):
    """Who is told what becomes of a link. The calls are synchronous."""

    def link_ready(self, link: BrokerLink) -> None:
        """The link has a connection."""

    def link_failed(self, link: BrokerLink, error: Exception) -> None:
        """An attempt to connect failed. The backoff runs already."""

    def link_lost(self, link: BrokerLink, error: BaseException) -> None:
        """The connection ended, and not because the link wanted it to."""

    def link_gone(self, link: BrokerLink) -> None:
        """A retired link has closed its connection."""


class BrokerLink:
    """The way to one broker at one address. See the module's text."""

    def __init__(
        self,
        node: Node,
        *,
        reconnect: ReconnectState,
        connector: Connector,
        make_connection: Callable[[BrokerLink], Connection],
        max_idle: float,
        loop: asyncio.AbstractEventLoop,
        owner: LinkOwner,
    ) -> None:
        self.node = node
        self.state = LinkState.IDLE
        #: The connection while the link is READY.
        self.connection: Connection | None = None
        #: Why the last attempt failed or the last connection ended.
        self.error: BaseException | None = None
        #: The text of the last failure that was logged: repetitions are only for debugging.
        self.reported: str | None = None
        self.retired = False
        #: Connected, but its last answer to a Metadata request was of no use, or late.
        self.useless = False
        #: How many requests wait for room on this connection, and go before Produce requests.
        self.claims = 0
        self.reconnect = reconnect
        self._connector = connector
        self._make_connection = make_connection
        self._max_idle = max_idle
        self._loop = loop
        self._owner = owner
        self._addresses = AddressRotation()
        self._asked = False
        self._task: asyncio.Task[None] | None = None
        self._opening: Connection | None = None
        self._opening_error: BaseException | None = None
        # Closed, but its transport may still be writing.
        self._ending: Connection | None = None
        self._alarm = Alarm(loop)

    def __repr__(self) -> str:
        return f"<BrokerLink {self.node}: {self.state.value}>"

    def ask(self) -> None:
        """Connect as soon as the backoff allows, unless there is a connection."""
        if self.retired or self.connection is not None:
            return
        self._asked = True
        if self._task is None:
            self.state = LinkState.WAITING
            self._task = self._loop.create_task(
                self._run(), name=f"asyncproducer broker {self.node.node_id}"
            )

    def retire(self) -> None:
        """Take no new work, and close when nothing is in flight any more."""
        self.retired = True
        if self._task is None:
            self._owner.link_gone(self)
        elif self.connection is None:
            self.cancel()
        else:
            self._alarm.ring()

    def drop(self, reason: BaseException) -> None:
        """Close at once: what is in flight ends with `reason`. The link is retired."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self._alarm.ring()
            connection.close(reason)
        elif self._ending is not None:
            self._ending.abort()
        self.retire()

    def cancel(self) -> None:
        """End the task, and with it the connection. Await `closed` afterwards."""
        self._asked = False
        # A connection that ends already is waited for: its transport would be left behind.
        if self._task is not None and self._ending is None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait for the end of the task."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def connection_closed(self, connection: Connection, error: BaseException) -> None:
        """Called by the connection when it is closed, for whatever reason."""
        if connection is self._opening:
            self._opening_error = error
        if connection is not self.connection:
            return  # it failed while it was opened, or we closed it ourselves
        self.connection = None
        self.state = LinkState.WAITING
        self.error = error
        self.reconnect.lost(self._loop.time())
        self._addresses.forget()
        self._alarm.ring()
        if not self.retired:
            self._owner.link_lost(self, error)

    async def _run(self) -> None:
        try:
            while self._asked and not self.retired:
                self._asked = False
                try:
                    await self._live()
                except Exception as exc:
                    if self._loop.is_closed():
                        return  # and this is what was left of us
                    logger.exception("broker %s: unexpected error, trying again later", self.node)
                    self._failed(exc)
        finally:
            self._task = None
            self.state = LinkState.IDLE
            if self.retired:
                self._owner.link_gone(self)

    async def _live(self) -> None:
        """One attempt to connect, and the connection that comes of it, to its end."""
        self.state = LinkState.WAITING
        await asyncio.sleep(max(0.0, self.reconnect.retry_at - self._loop.time()))
        self.state = LinkState.CONNECTING
        try:
            connection = await self._connect()
        except (KafkaError, OSError) as exc:
            self._failed(exc)
            return
        self.connection = connection
        self.state = LinkState.READY
        self.error = None
        self.useless = False
        self.reconnect.ready()
        try:
            self._owner.link_ready(self)
            await self._watch(connection)
        finally:
            if self.connection is connection:
                self.connection = None
                self.state = LinkState.WAITING
            self._ending = connection
            try:
                connection.close()
                await connection.wait_closed()
            finally:
                self._ending = None

    async def _connect(self) -> Connection:
        deadline = self.reconnect.connecting(self._loop.time())
        if self._addresses.exhausted:
            await self._resolve(deadline)
        connection = self._opening = self._make_connection(self)
        self._opening_error = None
        try:
            await connection.open(self._addresses.take(), deadline)
            # The peer may have closed it before we came to run again.
            if self._opening_error is not None:
                raise ConnectionFailed(
                    f"the connection was lost at once: {self._opening_error}"
                ) from self._opening_error
        except BaseException:
            connection.close()
            raise
        finally:
            self._opening = self._opening_error = None
        return connection

    async def _resolve(self, deadline: float) -> None:
        host, port = self.node.host, self.node.port
        try:
            async with asyncio.timeout_at(deadline):
                self._addresses.resolved(await self._connector.resolve(host, port))
        except TimeoutError as exc:
            raise ConnectionFailed(
                f"the host name {host!r} was not resolved in time"
                " (socket_connection_setup_timeout_ms): check the DNS of this machine"
            ) from exc

    def _failed(self, exc: Exception) -> None:
        self.state = LinkState.WAITING
        self.error = exc
        self.reconnect.failed(
            self._loop.time(), authentication=isinstance(exc, AuthenticationError)
        )
        if not self.retired:
            self._owner.link_failed(self, exc)

    async def _watch(self, connection: Connection) -> None:
        """Return when the connection is lost, or idle, or retired and empty."""
        while self.connection is connection:
            now = self._loop.time()
            idle_at = inf
            if not connection.in_flight:
                # Not while it is throttled: nobody is told of its end, and what waits for it
                # would wait on.
                last_used = max(connection.last_used, connection.throttled_until)
                idle_at = last_used + self._max_idle
            if self.retired:
                if not connection.in_flight:
                    return
                until = now + RETIRED_CHECK
            elif now >= idle_at:
                logger.debug("broker %s: closing the idle connection", self.node)
                return
            else:
                # With something in flight it cannot become idle earlier than this.
                until = min(idle_at, now + self._max_idle)
            await self._alarm.sleep(until)
