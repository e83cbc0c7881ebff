"""The brokers as a whole: bootstrap, connections by node, metadata refresh, control requests.

Two kinds of tasks run here, all of them ended by `close()`: one that keeps the metadata
fresh, and one per broker that somebody wants to talk to (`net/link.py`). When to ask for
metadata, and what an answer means, is decided in `core/metadata.py`; here is only who is
asked, and what to do while nobody can be.

A bootstrap address is asked for metadata like any broker, under a negative id. As soon as
the cluster has named its brokers, the bootstrap connection is closed. (Java keeps it
until it is idle, as a second connection to the same broker.)

Control requests (metadata, the producer id, coordinators) share the connections with
Produce requests, which take each slot the moment it is free. A control request that finds
all connections full *claims* one of them: `connection()` then hides it from the scheduler
until the request has gone out. So metadata stays fresh on a saturated cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeVar

from asyncproducer.core import wire
from asyncproducer.core.answers import API_VERSIONS, Answer, answer_for
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.reconnect import ReconnectState
from asyncproducer.errors import (
    AuthenticationError,
    BrokerError,
    ConfigError,
    ConnectionFailed,
    IllegalStateError,
    KafkaError,
    ProducerClosed,
    RequestTimedOut,
    UnsupportedVersionError,
    error_name,
)
from asyncproducer.logs import guarded
from asyncproducer.net.bootstrap import Bootstrap, CanonicalName
from asyncproducer.net.connection import Connection
from asyncproducer.net.link import BrokerLink, LinkState
from asyncproducer.net.waiting import Changes, time_of

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.metadata import (
        ClusterMetadata,
        LeaderHint,
        MetadataChange,
        MetadataPlan,
        MetadataResponse,
        Node,
    )
    from asyncproducer.core.metrics import Metrics
    from asyncproducer.net.transport import Connector

__all__ = ["Cluster"]

logger = guarded("asyncproducer.net.cluster")

R = TypeVar("R")

#: After this many seconds of silence from one broker, another is tried beside it. Java
#: waits for the whole connection setup timeout (10 s) instead.
CONNECT_PATIENCE = 1.0
#: The same for a Metadata request that has no answer; or so many times as long as the last answer
#: took, if that is more. Each silence doubles it, lest a large cluster whose brokers need seconds
#: is asked for ever and never heard. Java waits for request.timeout.ms.
METADATA_PATIENCE, _PATIENCE_FACTOR = 1.0, 4.0
#: How often a claimed connection is looked at: answers to Produce requests make room
#: without a word to us.
ROOM_CHECK = 0.02
#: The pause after an exception that nobody foresaw.
UNEXPECTED_PAUSE = 0.1

#: No other broker, and no later time, will take these back.
_FINAL = (AuthenticationError, UnsupportedVersionError, ConfigError)


class Cluster:
    """See the module's text. Belongs to one event loop; use once: after `close()` make a new one.

    `on_change()` is called whenever the scheduler may be able to do something that it
    could not do before: a connection became ready, was lost, or has room again.
    `on_metadata(change)` is called for each Metadata response that was of use, for leaders
    named by Produce responses, and when the known leaders are forgotten to begin anew;
    never for bootstrap. `on_moved(node_id)` is called when a broker is not where it was any more:
    what is under way may have its answer yet, what is sent from now on goes elsewhere.
    All are called synchronously, and not from inside the methods that the scheduler calls,
    `take_hints` excepted.
    """

    def __init__(
        self,
        config: ProducerConfig,
        metadata: ClusterMetadata,
        connector: Connector,
        *,
        client_id: str,
        loop: asyncio.AbstractEventLoop,
        random: Callable[[], float],
        on_change: Callable[[], None],
        on_metadata: Callable[[MetadataChange], None],
        on_moved: Callable[[int], None],
        metrics: Metrics,
        connection_factory: Callable[..., Connection] = Connection,
        canonical_name: CanonicalName | None = None,
    ) -> None:
        self.metadata = metadata
        self.closed = False
        #: The last refusal of our credentials, of our protocol versions or of our TLS
        #: options; None again as soon as a broker takes them. Who waits may give up.
        self.fatal_error: KafkaError | None = None
        #: Levels of the cluster's finalized features, as the broker told that knew the newest.
        self.features: Mapping[str, int] = {}
        self._features_epoch = -1
        self._config = config
        self._connector = connector
        self._client_id = client_id
        self._loop = loop
        self._time = time_of(loop)
        self._random = random
        self._on_change = on_change
        self._on_metadata = on_metadata
        self._on_moved = on_moved
        self._metrics = metrics
        self._connection_factory = connection_factory

        backoff = partial(ExponentialBackoff, random=random)
        self._reconnect_backoff = backoff(
            config.reconnect_backoff_ms / 1000, config.reconnect_backoff_max_ms / 1000
        )
        self._setup_timeout = backoff(
            config.socket_connection_setup_timeout_ms / 1000,
            config.socket_connection_setup_timeout_max_ms / 1000,
        )
        self._retry_backoff = backoff(
            config.retry_backoff_ms / 1000, config.retry_backoff_max_ms / 1000
        )
        max_idle_ms = config.connections_max_idle_ms
        self._max_idle = max_idle_ms / 1000 if max_idle_ms >= 0 else inf

        self._bootstrap = Bootstrap(
            config,
            connector,
            backoff=self._reconnect_backoff,
            loop=loop,
            canonical_name=canonical_name,
        )
        self._links: dict[int, BrokerLink] = {}
        self._leaving: dict[BrokerLink, None] = {}
        self._changes = Changes(loop)
        self._refresher: asyncio.Task[None] | None = None
        self._fetching = False
        # For how long a Metadata request may have no answer before another broker is asked.
        self._patience = METADATA_PATIENCE
        # Until when the refresher sleeps; -inf while it is awake, and will look by itself.
        self._asleep_until = -inf
        self._heard = False
        # Since any broker was last ready.
        self.last_error: BaseException | None = None

    # Life

    async def start(self, deadline: float) -> None:
        """Reach any of `bootstrap_servers`, and learn the cluster's brokers from it.

        Tries again and again until `deadline` (the loop's clock). All or nothing: when
        it fails or is cancelled, the cluster is closed and nothing of it is left.

        Raises: ConnectionFailed with the reason for each address; earlier than the
        deadline when no address has a Kafka broker behind it. AuthenticationError,
        UnsupportedVersionError and ConfigError (TLS files) at once.
        """
        if self._refresher is not None or self.closed:
            raise IllegalStateError("the cluster was started before: make a new one")
        started_at = self._time()
        try:
            self.metadata.bootstrap(await self._bootstrap.nodes(deadline))
            self._refresher = self._loop.create_task(self._refresh(), name="asyncproducer metadata")
            while not self._heard:
                if self.fatal_error is not None:
                    raise self.fatal_error
                if self._time() >= deadline or self._bootstrap.hopeless:
                    raise self._bootstrap.unreachable(self._time() - started_at)
                await self._changes.wait(deadline)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all tasks and connections, and wait until they are gone.

        What is in flight ends with ConnectionFailed, who waits in `request` gets
        ProducerClosed. May be called again, and from several tasks.
        """
        self.closed = True
        self.metadata.close()
        self._changes.tell()
        links = [*self._links.values(), *self._leaving]
        for link in links:
            link.cancel()
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.wait([self._refresher])
        for link in links:
            await link.closed()

    def abort(self) -> None:
        """Cut all connections now, whatever they still have to write. To be followed by `close`.

        A connection that `close` ends may take a moment to write what it has accepted.
        """
        reason = ProducerClosed("the producer was closed, and had no time left")
        for link in [*self._links.values(), *self._leaving]:
            link.drop(reason)

    # For the scheduler and the producer. Nothing here waits.

    def connection(self, node_id: int) -> Connection | None:
        """The broker's connection if it is READY, else None.

        When there is none, one is made in the background, as soon as the backoff allows.
        """
        link = self._links.get(node_id)
        if link is None or link.connection is None:
            link = self._link(node_id)
            if link is not None and not self.closed:
                link.ask()
            return None
        if link.claims:
            # Only when there is room: who waits may turn to another full connection, and
            # giving up its claim on this one brings the scheduler here again.
            if link.connection.can_send(self._time()):
                self._changes.tell()
            return None
        return link.connection

    @property
    def connected(self) -> int:
        """How many brokers have a READY connection."""
        return sum(link.connection is not None for link in self._links.values())

    @property
    def in_flight(self) -> int:
        """Requests of all connections that have no end yet: see `Connection.in_flight`."""
        return sum(
            link.connection.in_flight
            for link in self._links.values()
            if link.connection is not None
        )

    def has_room(self, node_id: int) -> bool:
        """Whether the broker's connection takes a request now."""
        link = self._links.get(node_id)
        connection = None if link is None or link.claims else link.connection
        return connection is not None and connection.can_send(self._time())

    def hungry(self, fed: Container[int]) -> bool:
        """Whether a broker's connection takes a request now, and it is none of those that are fed:
        there is nothing for it."""
        return any(node_id not in fed and self.has_room(node_id) for node_id in self._links)

    def round_trips(self) -> list[float]:
        """Of each broker that is connected: the shortest time that an answer took, in seconds."""
        return [
            link.connection.round_trip
            for link in self._links.values()
            if link.connection is not None
        ]

    def is_idle(self, node_id: int) -> bool:
        """Whether the broker's connection has nothing to do, and takes a request now."""
        link = self._links.get(node_id)
        connection = None if link is None else link.connection
        return (
            connection is not None
            and connection.in_flight == 0
            # A throttled one has nothing to do either.
            and connection.can_send(self._time())
        )

    def highest_version(self, node_id: int, api_key: wire.ApiKey) -> int | None:
        """The newest version of a request that the broker speaks; None while nobody is connected
        to it, -1 for none."""
        link = self._links.get(node_id)
        if link is None or link.connection is None:
            return None
        return link.connection.versions.get(api_key, (-1, -1))[1]

    def add_topic(self, name: str) -> None:
        """The topic is in use. Cheap; metadata of a new one is asked for at once."""
        if self.metadata.add_topic(name, self._time()):
            self._wake_refresher()

    def request_update(self, *, reset_backoff: bool = False) -> None:
        """Want a full metadata update, as soon as the backoff allows."""
        self.metadata.request_update(reset_backoff=reset_backoff)
        self._wake_refresher()

    def request_update_for_topic(self, name: str) -> None:
        """Want news of this topic."""
        self.metadata.request_update_for_topic(name)
        self._wake_refresher()

    def take_hints(self, hints: Iterable[LeaderHint], nodes: Iterable[Node]) -> None:
        """The new leaders that a Produce response named, and where they listen (KIP-951)."""
        change = self.metadata.update_leaders(hints, nodes)
        if change.applied:
            self._announce(change)

    # For who may wait

    async def request(
        self,
        request: wire.Request[R],
        *,
        deadline: float,
        node_id: int | None = None,
        once: bool = False,
    ) -> R:
        """Ask the least loaded broker, or this one, and return its answer.

        Connects if need be. Lost connections and timeouts are repeated with backoff until
        `deadline` (the loop's clock), unless it is to be tried `once`. Cancelling ends the wait;
        the request may have been sent. Error codes inside the answer are the caller's business.

        Raises: RequestTimedOut at the deadline, AuthenticationError or
        UnsupportedVersionError when a broker refuses us meanwhile, ProducerClosed; with `once`
        also ConnectionFailed.
        """
        known_refusal = self.fatal_error
        began = self._time()
        version = self.metadata.version
        error: BaseException | None = None
        failures = 0
        while True:
            if self.closed:
                raise ProducerClosed("the producer was closed while it waited for a broker")
            if self._time() >= deadline:
                raise self._no_answer(request, node_id, error or self.last_error)
            if self.fatal_error is not None and self.fatal_error is not known_refusal:
                raise self.fatal_error
            if once and node_id is not None:
                self._check_reachable(node_id, began, version)
            connection = await self._connection_with_room(node_id, deadline)
            if connection is None:
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    return await connection.request(request, cap=request.cap)
            except (ConnectionFailed, RequestTimedOut) as exc:
                if once:
                    raise
                error = exc
            except TimeoutError:
                continue
            retry_at = self._time() + self._retry_backoff.delay(failures)
            failures += 1
            await asyncio.sleep(min(retry_at, deadline) - self._time())

    def _check_reachable(self, node_id: int, since: float, version: int) -> None:
        """Raise if an attempt to connect to the broker has failed since then, or if newer
        metadata has no such broker."""
        if node_id not in self.metadata.nodes and self.metadata.version != version:
            raise ConnectionFailed(f"broker {node_id} is not in the cluster")
        link = self._links.get(node_id)
        if link is not None and link.connection is None and link.reconnect.failed_at >= since:
            raise ConnectionFailed(
                f"broker {node_id} cannot be reached: {link.error}"
            ) from link.error

    def _no_answer(
        self, request: wire.Request[R], node_id: int | None, cause: BaseException | None
    ) -> RequestTimedOut:
        whom = "no broker" if node_id is None else f"broker {node_id} has not"
        why = "" if cause is None else f": {cause}"
        error = RequestTimedOut(f"{whom} answered {request.api_key.name} in time{why}")
        error.__cause__ = cause
        return error

    # Choosing a broker

    def _link(self, node_id: int) -> BrokerLink | None:
        """The way to a broker that the metadata knows."""
        node = self.metadata.nodes.get(node_id)
        return None if node is None else self._link_to(node)

    def _link_to(self, node: Node) -> BrokerLink:
        link = self._links.get(node.node_id)
        if link is None:
            link = self._links[node.node_id] = BrokerLink(
                node,
                reconnect=ReconnectState(self._reconnect_backoff, self._setup_timeout),
                connector=self._connector,
                make_connection=self._make_connection,
                max_idle=self._max_idle,
                loop=self._loop,
                owner=self,
            )
        return link

    def _make_connection(self, link: BrokerLink) -> Connection:
        return self._connection_factory(
            link.node,
            self._config,
            self._connector,
            client_id=self._client_id,
            loop=self._loop,
            on_closed=link.connection_closed,
            on_room=self._room,
            metrics=self._metrics,
        )

    def _least_loaded(self, now: float) -> BrokerLink | None:
        """The broker to ask; None only when there is none at all (Java: leastLoadedNode)."""
        nodes = list(self.metadata.nodes.values())
        start = int(self._random() * len(nodes))
        best: BrokerLink | None = None
        best_rank = (inf, inf)
        for node in nodes[start:] + nodes[:start]:
            link = self._link_to(node)
            rank = _rank(link, now)
            if rank < best_rank:
                best, best_rank = link, rank
            if rank == _IDLE:
                break
        return best

    async def _connection_with_room(self, node_id: int | None, until: float) -> Connection | None:
        """One step towards a connection that can send: it, or None when something changed.

        Whoever gets it must send at once, without an await in between.
        """
        now = self._time()
        link = self._least_loaded(now) if node_id is None else self._link(node_id)
        if link is None:
            if node_id is not None:
                self.request_update()
            await self._changes.wait(until)
            return None
        connection = link.connection
        if connection is None:
            link.ask()
            await self._changes.wait(min(until, now + CONNECT_PATIENCE))
            return None
        if connection.can_send(now):
            return connection
        link.claims += 1
        try:
            await self._changes.wait(min(until, max(connection.throttled_until, now + ROOM_CHECK)))
        finally:
            link.claims -= 1
            self._loop.call_soon(self._unclaimed, link)
        usable = link.connection is connection and connection.can_send(self._time())
        return connection if usable else None

    def _unclaimed(self, link: BrokerLink) -> None:
        if not link.claims:
            self._tell()

    # Metadata

    async def _refresh(self) -> None:
        """Keep the metadata fresh, until cancelled."""
        while True:
            try:
                await self._refresh_step()
            except Exception:
                logger.exception("the metadata refresh failed unexpectedly; it goes on")
                self.metadata.failed_update(self._time())
                await asyncio.sleep(UNEXPECTED_PAUSE)

    def _wake_refresher(self) -> None:
        """An update may be due earlier than the refresher thinks.

        Only then: who waits for news and asks for an update whenever woken would be woken
        by that, for ever.
        """
        if self.metadata.next_update_at(self._time()) < self._asleep_until:
            self._changes.tell()

    async def _refresh_step(self) -> None:
        metadata = self.metadata
        now = self._time()
        if metadata.rebootstrap_due(now):
            self._start_over(now)
        due_at = metadata.next_update_at(now)
        if due_at > now:
            self._asleep_until = min(due_at, metadata.rebootstrap_at)
            try:
                await self._changes.wait(self._asleep_until)
            finally:
                self._asleep_until = -inf
            return
        metadata.begin_attempt(now)
        if self._all_failed():
            # KIP-899. The links stay: they know the backoff of brokers that come back.
            logger.info("no known broker can be reached: asking bootstrap_servers again")
            self._announce(metadata.rebootstrap(now))
        connection = await self._connection_with_room(None, metadata.rebootstrap_at)
        if connection is not None:
            await self._fetch(connection)

    def _all_failed(self) -> bool:
        """Whether each known broker was tried since an update is due, and none can be reached.

        Java starts over as soon as all are in backoff, which for a small cluster is after
        any lost connection, and may never be when attempts and updates are in step.
        """
        metadata = self.metadata
        since = metadata.attempt_started_at
        if not metadata.can_rebootstrap or metadata.bootstrapping or since is None:
            return False
        links = [self._link_to(node) for node in metadata.nodes.values()]
        return all(
            link.connection is None
            and link.state is not LinkState.CONNECTING
            and link.reconnect.failed_at >= since
            for link in links
        )

    async def _fetch(self, connection: Connection) -> None:
        metadata = self.metadata
        began = self._time()
        plan = metadata.plan(began)
        others = len(metadata.nodes) > 1
        until = min(metadata.rebootstrap_at, began + self._patience if others else inf)
        self._fetching = True
        try:
            async with asyncio.timeout_at(until if until < inf else None):
                response = await connection.request(wire.MetadataRequest(plan.topics))
        except KafkaError as exc:
            metadata.failed_update(self._time())
            self._refused(connection.node, exc)
        except TimeoutError:
            if until < metadata.rebootstrap_at:
                self._silent(connection.node)
            # else the next step starts over
        else:
            took = self._time() - began
            self._patience = max(METADATA_PATIENCE, _PATIENCE_FACTOR * took)
            self._take(connection.node, plan, response)
        finally:
            self._fetching = False

    def _silent(self, node: Node) -> None:
        """It may be frozen, or slow: another is asked, and it is the last to be asked again.

        What was asked stays in flight; the connection ends if that is never answered.
        """
        self.metadata.failed_update(self._time())
        link = self._links.get(node.node_id)
        if link is not None:
            link.useless = True
        logger.info("no metadata from %s within %.1f s: asking another", node, self._patience)
        self._patience *= 2

    def _take(self, node: Node, plan: MetadataPlan, response: MetadataResponse) -> None:
        change = self.metadata.update(plan, response, self._time())
        link = self._links.get(node.node_id)
        if link is not None:
            link.useless = not change.applied
        if change.applied:
            self._heard = True
            self.fatal_error = None
            self._announce(change)
            return
        reason = (
            f"it answered METADATA with {error_name(response.error_code)}"
            if response.error_code
            else "it answered METADATA without any broker, not even itself: is it starting up?"
        )
        self._refused(node, ConnectionFailed(reason))

    def _refused(self, node: Node, error: KafkaError) -> None:
        """A broker that we are connected to gave no metadata."""
        self._report(node, f"no metadata from {node}: {error}")
        self._note(node, error)
        self._changes.tell()

    def _report(self, node: Node, text: str) -> None:
        """A warning, but only the first time."""
        link = self._links.get(node.node_id)
        repeated = link is not None and link.reported == text
        if link is not None:
            link.reported = text
        logger.log(logging.DEBUG if repeated else logging.WARNING, "%s", text)

    def _note(self, node: Node, error: BaseException) -> None:
        self._bootstrap.note(node, error)
        self.last_error = error
        if isinstance(error, _FINAL):
            self.fatal_error = error

    def _start_over(self, now: float) -> None:
        """KIP-1102: whatever the known brokers are, they are not our cluster any more."""
        logger.warning("no metadata from any known broker: beginning again with bootstrap_servers")
        error = ConnectionFailed("the connection was closed to begin again with bootstrap_servers")
        links, self._links = self._links, {}
        self._features_epoch = -1
        change = self.metadata.rebootstrap(now)
        for link in links.values():
            self._leaving[link] = None
            link.drop(error)
        self._announce(change)

    def _announce(self, change: MetadataChange) -> None:
        try:
            self._on_metadata(change)
        except Exception:
            logger.exception("unexpected error in the handling of new metadata")
        if change.nodes_changed and not self.metadata.bootstrapping:
            self._reconcile()
        self._changes.tell()
        self._tell()

    def _reconcile(self) -> None:
        """Leave brokers that are gone, and go to the new address of those that moved."""
        for node_id, link in list(self._links.items()):
            node = self.metadata.nodes.get(node_id)
            if node is not None and (node.host, node.port) == (link.node.host, link.node.port):
                link.node = node
                continue
            was_wanted = link.state is not LinkState.IDLE
            del self._links[node_id]
            self._leaving[link] = None
            self._on_moved(node_id)
            link.retire()
            moved = self._link(node_id)
            if moved is not None and was_wanted:
                logger.info("broker %d moved from %s to %s", node_id, link.node, node)
                moved.ask()

    # What the links report

    def link_ready(self, link: BrokerLink) -> None:
        """Called by a link: it has a connection."""
        level = logging.DEBUG if link.reported is None else logging.INFO
        logger.log(level, "connected to %s", link.node)
        link.reported = None
        self.fatal_error = self.last_error = None
        connection = link.connection
        if connection is not None and connection.finalized_features_epoch >= self._features_epoch:
            self._features_epoch = connection.finalized_features_epoch
            self.features = connection.finalized_features
        self._changes.tell()
        self._tell()

    def link_failed(self, link: BrokerLink, error: Exception) -> None:
        """Called by a link: an attempt to connect failed."""
        hint = "" if link.node.node_id < 0 else " (its advertised.listeners address)"
        self._report(link.node, f"cannot connect to {link.node}{hint}: {error}")
        self._trouble(link, error)

    def link_lost(self, link: BrokerLink, error: BaseException) -> None:
        """Called by a link: the connection ended."""
        logger.info("lost the connection to %s: %s", link.node, error)
        self._trouble(link, error)

    def link_gone(self, link: BrokerLink) -> None:
        """Called by a retired link: nothing is left of it."""
        self._leaving.pop(link, None)

    def _trouble(self, link: BrokerLink, error: BaseException) -> None:
        """What we know may be stale: ask, but not in a hurry."""
        metadata, now = self.metadata, self._time()
        self._note(link.node, error)
        code = error.code if isinstance(error, BrokerError) else None
        if code is not None and answer_for(API_VERSIONS, code) is Answer.REBOOTSTRAP:
            metadata.require_rebootstrap()
        if not self._fetching and metadata.next_update_at(now) <= now:
            metadata.failed_update(now)
        metadata.request_update()
        self._changes.tell()
        self._tell()

    def _room(self, connection: Connection) -> None:
        if any(link.claims for link in self._links.values()):
            self._changes.tell()  # else nobody waits for it: who refreshes metadata may sleep
        self._tell()

    def _tell(self) -> None:
        if self.closed:
            return
        try:
            self._on_change()
        except Exception:
            logger.exception("unexpected error in the handling of a change")


def _rank(link: BrokerLink, now: float) -> tuple[float, float]:
    """How well a broker suits for a control request: the smallest is the best."""
    connection = link.connection
    if connection is not None:
        if connection.throttled_until > now:
            return 6, connection.throttled_until
        if link.useless or connection.is_lost:
            return 4, connection.in_flight
        # A full one is better than a new one: something will be answered soon.
        return (0 if connection.can_send(now) else 1), connection.in_flight
    if link.state is LinkState.CONNECTING:
        since = link.reconnect.last_attempt_at
        return (5 if now >= since + CONNECT_PATIENCE else 2), since
    if link.reconnect.can_connect(now):
        return 3, link.reconnect.last_attempt_at
    return 7, link.reconnect.retry_at


#: The rank of a connection without anything in flight: nothing is better.
_IDLE = (0, 0)
