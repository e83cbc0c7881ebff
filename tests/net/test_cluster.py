from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, cast

import pytest

from asyncproducer.config import ProducerConfig
from asyncproducer.core import wire
from asyncproducer.core.metadata import (
    ClusterMetadata,
    LeaderHint,
    MetadataChange,
    MetadataResponse,
    Node,
    PartitionUpdate,
    TopicUpdate,
)
from asyncproducer.core.metrics import Metrics
from asyncproducer.errors import (
    AuthenticationError,
    BrokerError,
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    IllegalStateError,
    KafkaError,
    ProducerClosed,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
)
from asyncproducer.net.cluster import Cluster
from asyncproducer.net.connection import Connection
from asyncproducer.net.transport import Address, Connector
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.network import MemoryNetwork

pytestmark = pytest.mark.virtual_time

Open = Callable[["FakeConnection", float], Awaitable[None]]
Answer = Callable[["FakeConnection", Any], Awaitable[Any]]

REFUSED = ConnectionFailed("connection refused")


class FakeConnection:
    """What a cluster sees of a Connection: opens and answers as its world wants it."""

    def __init__(
        self,
        world: World,
        node: Node,
        on_closed: Callable[[Connection, BaseException], None],
        on_room: Callable[[Connection], None],
    ) -> None:
        self.world = world
        self.node = node
        self.in_flight = 0
        self.last_used = world.now
        self.round_trip = node.node_id / 100
        self.throttled_until = 0.0
        self.versions = world.versions
        self.finalized_features = {"transaction.version": node.node_id}
        self.finalized_features_epoch = world.features_epochs.get(node.node_id, -1)
        self.max_in_flight = 5
        self.closed_with: BaseException | None = None
        self.opened = False
        self.is_lost = False
        self._on_closed = on_closed
        self._on_room = on_room
        self._in_flight: set[asyncio.Future[None]] = set()

    async def open(self, address: Address, deadline: float) -> None:
        self.world.attempts.append((round(self.world.now, 3), self.place))
        await self.world.opens.get(self.place, accept)(self, deadline)
        self.opened = True

    @property
    def place(self) -> str:
        return f"{self.node.host}:{self.node.port}"

    def can_send(self, now: float) -> bool:
        return (
            self.opened
            and not self.is_lost
            and self.closed_with is None
            and self.in_flight < self.max_in_flight
            and now >= self.throttled_until
        )

    async def request(self, request: Any, *, cap: int | None = None) -> Any:
        assert cap == getattr(request, "cap", None)
        if not self.can_send(self.world.now):
            raise IllegalStateError("cannot send")
        self.world.requests.append((self.node.node_id, request))
        self.in_flight += 1
        self.last_used = self.world.now
        asked = asyncio.ensure_future(self.world.answers.get(self.place, answer)(self, request))
        cut = self.world.loop.create_future()
        self._in_flight.add(cut)
        try:
            await asyncio.wait([asked, cut], return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                raise self.closed_with or AssertionError
            return asked.result()
        finally:
            asked.cancel()
            self._in_flight.discard(cut)
            self.in_flight -= 1

    def close(self, reason: BaseException | None = None) -> None:
        if self.closed_with is None:
            self.closed_with = reason or ConnectionFailed("closed by this client")
            for cut in self._in_flight:
                cut.set_result(None)
            self._on_closed(cast("Connection", self), self.closed_with)

    def room(self) -> None:
        self._on_room(cast("Connection", self))

    async def wait_closed(self) -> None:
        assert self.closed_with is not None


async def accept(connection: FakeConnection, deadline: float) -> None:
    pass


def refuse(error: Exception) -> Open:
    async def open(connection: FakeConnection, deadline: float) -> None:
        raise error

    return open


async def hang(connection: FakeConnection, deadline: float) -> None:
    await asyncio.sleep(deadline - connection.world.now)
    raise ConnectionFailed("no answer in time")


async def answer(connection: FakeConnection, request: Any) -> Any:
    await asyncio.sleep(0.001)
    if isinstance(request, wire.MetadataRequest):
        return connection.world.metadata_response(request.topics)
    return connection.node.node_id


async def never(connection: FakeConnection, request: Any) -> Any:
    await asyncio.sleep(1e9)


def fail_with(error: Exception) -> Answer:
    async def fail(connection: FakeConnection, request: Any) -> Any:
        raise error

    return fail


class World:
    """Brokers, DNS, a cluster under test, and what happened."""

    def __init__(self, *servers: str, brokers: str = "", **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.opens: dict[str, Open] = {}
        self.answers: dict[str, Answer] = {}
        self.unknown_hosts: set[str] = set()
        self.brokers: list[Node] = []
        self.features_epochs: dict[int, int] = {}
        self.versions: dict[int, tuple[int, int]] = {wire.ApiKey.INIT_PRODUCER_ID: (0, 4)}
        self.error_code = 0
        self.set_brokers(*brokers.split())
        self.attempts: list[tuple[float, str]] = []
        self.requests: list[tuple[int, Any]] = []
        self.connections: list[FakeConnection] = []
        self.changes = 0
        self.metadata_changes: list[MetadataChange] = []
        self.moved: list[int] = []
        self.on_change: Callable[[], object] = lambda: None
        self.random = 0.0
        config = ProducerConfig(bootstrap_servers=servers, **options)
        self.metadata = ClusterMetadata.from_config(config, lambda: 0.5)
        self.metrics = Metrics(client_id="test")
        self.cluster = Cluster(
            config,
            self.metadata,
            cast("Connector", self),
            client_id="test",
            loop=self.loop,
            # The first draws are for the order of nodes, 0.5 would be no jitter.
            random=lambda: self.random,
            on_change=self._on_change,
            on_metadata=self.metadata_changes.append,
            on_moved=self.moved.append,
            metrics=self.metrics,
            connection_factory=self._make_connection,
        )

    def _on_change(self) -> None:
        self.changes += 1
        self.on_change()

    def _make_connection(
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
    ) -> Connection:
        assert client_id == "test"
        assert loop is self.loop
        assert cast("World", connector) is self
        assert metrics is self.metrics
        self.connections.append(FakeConnection(self, node, on_closed, on_room))
        return cast("Connection", self.connections[-1])

    async def resolve(self, host: str, port: int) -> list[Address]:
        if host in self.unknown_hosts:
            raise ConnectionFailed(f"cannot resolve the host name {host!r}")
        return [Address(socket.AF_INET, "10.0.0.1", port)]

    def set_brokers(self, *places: str) -> None:
        """`1=one:9092`"""
        self.brokers = []
        for text in places:
            number, _, place = text.partition("=")
            host, _, port = place.partition(":")
            self.brokers.append(Node(int(number), host, int(port)))

    def metadata_response(self, topics: tuple[str, ...]) -> MetadataResponse:
        leader = self.brokers[0].node_id if self.brokers else -1
        return MetadataResponse(
            12,
            0,
            self.error_code,
            "cluster",
            leader,
            tuple(self.brokers),
            tuple(
                TopicUpdate(name, None, 0, False, (PartitionUpdate(0, 0, leader, 1),))
                for name in topics
            ),
        )

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def metadata_requests(self) -> list[tuple[int, tuple[str, ...]]]:
        """Node and topics of each Metadata request."""
        return [
            (node, request.topics)
            for node, request in self.requests
            if isinstance(request, wire.MetadataRequest)
        ]

    def open_places(self) -> list[str]:
        return sorted(each.place for each in self.connections if self._is_open(each))

    def _is_open(self, connection: FakeConnection) -> bool:
        return connection.opened and connection.closed_with is None

    async def start(self) -> None:
        await self.cluster.start(self.now + 60.0)

    async def connect(self, *node_ids: int) -> list[FakeConnection]:
        """READY connections to these nodes."""
        for node_id in node_ids:
            self.cluster.connection(node_id)
        await asyncio.sleep(0.01)
        return [cast("FakeConnection", self.cluster.connection(node_id)) for node_id in node_ids]


class Question:
    """A control request; the fake broker answers it with its node id."""

    api_key = wire.ApiKey.INIT_PRODUCER_ID
    cap = 3


def ask(
    world: World, *, seconds: float = 60.0, node_id: int | None = None, once: bool = False
) -> asyncio.Task[int]:
    request = cast("wire.Request[int]", Question())
    return asyncio.create_task(
        world.cluster.request(request, deadline=world.now + seconds, node_id=node_id, once=once)
    )


def assert_all_ended(world: World) -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert world.open_places() == []


# Bootstrap


async def test_start_learns_the_brokers_from_a_bootstrap_server() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    assert set(world.metadata.nodes) == {1, 2}
    assert world.metadata.cluster_id == "cluster"
    assert world.metadata_requests == [(-1, ())]
    await world.cluster.close()
    assert_all_ended(world)


async def test_the_bootstrap_connection_is_closed_when_the_brokers_are_known() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await asyncio.sleep(1.0)
    assert world.open_places() == []
    await world.cluster.close()


async def test_new_metadata_is_announced_bootstrap_is_not() -> None:
    """MD-16."""
    world = World("seed:9092", brokers="1=one:9092")
    world.answers["seed:9092"] = never
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await world.start()
    assert world.metadata_changes == []
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    assert world.metadata_changes == [MetadataChange(nodes_changed=True)]
    await world.cluster.close()


async def test_a_broker_that_refuses_does_not_keep_start_from_the_next_one() -> None:
    """CC-02."""
    world = World("bad:9092", "good:9092", brokers="1=one:9092")
    world.opens["bad:9092"] = refuse(REFUSED)
    await world.start()
    assert world.attempts == [(0.0, "bad:9092"), (0.1, "good:9092")]
    await world.cluster.close()


async def test_a_broker_that_is_silent_does_not_keep_start_from_the_next_one() -> None:
    """NC-08: nor does it have to wait for the connection setup timeout."""
    world = World("silent:9092", "good:9092", brokers="1=one:9092")
    world.opens["silent:9092"] = hang
    await world.start()
    assert [place for _, place in world.attempts] == ["silent:9092", "good:9092"]
    assert world.now == pytest.approx(1.0, abs=0.01)
    await world.cluster.close()
    assert_all_ended(world)


async def test_an_unknown_host_does_not_keep_start_from_the_next_one() -> None:
    """NC-03."""
    world = World("nowhere:9092", "good:9092", brokers="1=one:9092")
    world.unknown_hosts.add("nowhere")
    await world.start()
    assert set(world.metadata.nodes) == {1}
    await world.cluster.close()


async def test_start_tries_until_a_broker_comes_up() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    world.opens["seed:9092"] = refuse(REFUSED)
    world.loop.call_later(10.0, world.opens.clear)
    await world.start()
    assert 10.0 < world.now < 12.0
    assert len(world.attempts) > 8
    await world.cluster.close()


async def test_start_gives_up_at_the_deadline_with_the_reason_for_each_address() -> None:
    world = World("one:9092", "nowhere:9093", "silent:9092")
    world.opens["one:9092"] = refuse(REFUSED)
    world.opens["silent:9092"] = hang
    world.unknown_hosts.add("nowhere")
    with pytest.raises(ConnectionFailed) as caught:
        await world.cluster.start(8.0)
    assert world.now == 8.0
    assert str(caught.value) == (
        "no Kafka broker could be reached within 8.0 s:\n"
        "  one:9092: connection refused\n"
        "  nowhere:9093: cannot resolve the host name 'nowhere'\n"
        "  silent:9092: no answer yet"
    )
    assert caught.value.__cause__ is not None
    assert world.cluster.closed
    assert_all_ended(world)


@pytest.mark.parametrize(
    "error",
    [AuthenticationError("wrong password"), UnsupportedVersionError("too old"), ConfigError("ca")],
)
async def test_start_raises_a_final_refusal_as_it_is_and_at_once(error: KafkaError) -> None:
    """NC-11."""
    world = World("seed:9092", "other:9092")
    world.opens["seed:9092"] = refuse(error)
    with pytest.raises(type(error)) as caught:
        await world.start()
    assert caught.value is error
    assert world.now == 0.0
    assert_all_ended(world)


async def test_start_raises_when_the_broker_has_no_metadata_version_for_us() -> None:
    """NC-06."""
    world = World("seed:9092")
    world.answers["seed:9092"] = fail_with(UnsupportedVersionError("Metadata"))
    with pytest.raises(UnsupportedVersionError):
        await world.start()
    assert_all_ended(world)


async def test_start_gives_up_early_when_no_address_has_a_kafka_broker() -> None:
    world = World("web:80", "other:80")
    world.opens["web:80"] = world.opens["other:80"] = refuse(ProtocolError("this is HTTP"))
    with pytest.raises(ConnectionFailed, match="web:80: this is HTTP\n  other:80: this is HTTP"):
        await world.start()
    assert world.now < 1.0


async def test_start_goes_on_while_one_address_may_still_come_up() -> None:
    world = World("web:80", "late:9092", brokers="1=one:9092")
    world.opens["web:80"] = refuse(ProtocolError("this is HTTP"))
    world.opens["late:9092"] = refuse(REFUSED)
    world.loop.call_later(5.0, world.opens.pop, "late:9092")
    await world.start()
    await world.cluster.close()


async def test_a_broker_that_knows_no_broker_is_asked_again() -> None:
    """NC-20: an empty list counts as a failure."""
    world = World("seed:9092")
    world.loop.call_later(3.0, world.set_brokers, "1=one:9092")
    await world.start()
    assert 3.0 < world.now < 5.0
    await world.cluster.close()


async def test_a_broker_whose_metadata_is_of_no_use_does_not_keep_others_from_being_asked() -> None:
    async def empty(connection: FakeConnection, request: Any) -> Any:
        return world.metadata_response(())._replace(nodes=())

    world = World("empty:9092", "good:9092", brokers="1=one:9092")
    world.answers["empty:9092"] = empty
    await world.start()
    assert world.now < 1.0
    await world.cluster.close()


async def test_the_reason_may_be_that_metadata_failed() -> None:
    world = World("seed:9092", "other:9092")
    world.answers["other:9092"] = fail_with(RequestTimedOut("no answer to METADATA"))
    with pytest.raises(ConnectionFailed) as caught:
        await world.cluster.start(5.0)
    assert "  seed:9092: it answered METADATA without any broker" in str(caught.value)
    assert "  other:9092: no answer to METADATA" in str(caught.value)


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    world = World("silent:9092", "mute:9092")
    world.opens["silent:9092"] = hang
    world.answers["mute:9092"] = never
    starting = asyncio.create_task(world.start())
    await asyncio.sleep(3.0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert world.cluster.closed
    assert_all_ended(world)


async def test_a_cluster_is_started_once() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    with pytest.raises(IllegalStateError):
        await world.start()
    await world.cluster.close()
    with pytest.raises(IllegalStateError):
        await world.start()


async def test_canonical_names_are_what_we_connect_to() -> None:
    """CU-01."""
    world = World(
        "alias:9092",
        brokers="1=one:9092",
        client_dns_lookup="resolve_canonical_bootstrap_servers_only",
    )

    async def canonical_name(address: Address) -> str:
        return "real-name"

    world.cluster._bootstrap._canonical_name = canonical_name
    await world.start()
    assert world.attempts == [(0.0, "real-name:9092")]
    await world.cluster.close()


# Connections by node


async def test_asking_for_a_connection_makes_one_in_the_background() -> None:
    """CC-01."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    before = world.changes
    assert world.cluster.connection(1) is None
    await asyncio.sleep(0.01)
    connection = world.cluster.connection(1)
    assert connection is not None
    assert connection.node == Node(1, "one", 9092)
    assert world.changes == before + 1
    assert world.open_places() == ["one:9092"]
    await world.cluster.close()
    assert_all_ended(world)


async def test_the_connections_can_be_counted() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092 3=three:9092")
    await world.start()
    assert (world.cluster.connected, world.cluster.in_flight) == (0, 0)
    one, two = await world.connect(1, 2)
    one.in_flight, two.in_flight = 3, 0
    assert (world.cluster.connected, world.cluster.in_flight) == (2, 3)
    assert [world.cluster.is_idle(node_id) for node_id in (1, 2, 3, 4)] == [
        False, True, False, False,
    ]  # fmt: skip
    await world.cluster.close()


async def test_a_broker_is_hungry_that_takes_a_request_for_which_there_is_nothing() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092 3=three:9092")
    await world.start()
    assert not world.cluster.hungry(())
    one, _ = await world.connect(1, 2)
    assert world.cluster.hungry(())
    assert world.cluster.hungry({1})
    assert not world.cluster.hungry({1, 2})
    one.in_flight = one.max_in_flight
    assert not world.cluster.hungry({2})
    await world.cluster.close()


async def test_how_far_away_brokers_are_is_known_of_those_that_are_connected() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092 3=three:9092")
    await world.start()
    assert world.cluster.round_trips() == []
    await world.connect(1, 3)
    assert sorted(world.cluster.round_trips()) == [0.01, 0.03]
    await world.cluster.close()


async def test_an_unknown_node_has_no_connection() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    assert world.cluster.connection(7) is None
    assert world.cluster.connection(-1) is None
    await asyncio.sleep(1.0)
    assert len(world.attempts) == 1
    await world.cluster.close()


async def test_who_asks_at_each_change_gets_attempts_with_growing_pauses() -> None:
    """CC-05, NC-12."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.opens["one:9092"] = refuse(REFUSED)
    world.on_change = lambda: world.cluster.connection(1)
    world.random = 0.5
    world.attempts.clear()
    began = world.now
    world.cluster.connection(1)
    await asyncio.sleep(1.0)
    pauses = [round(at - began, 2) for at, place in world.attempts if place == "one:9092"]
    assert pauses == pytest.approx([0.0, 0.05, 0.15, 0.35, 0.75])
    await world.cluster.close()


async def test_a_lost_connection_is_told_and_makes_metadata_wanted() -> None:
    """CC-01."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    (connection,) = await world.connect(1)
    changes = world.changes
    asked = len(world.metadata_requests)
    connection.close(REFUSED)
    assert world.changes == changes + 1
    assert world.cluster.connection(1) is None
    await asyncio.sleep(1.0)
    assert len(world.metadata_requests) > asked
    assert world.cluster.connection(1) is not None
    await world.cluster.close()


async def test_an_idle_connection_is_closed_and_nothing_is_asked_because_of_it() -> None:
    world = World("seed:9092", brokers="1=one:9092", connections_max_idle_ms=20_000)
    await world.start()
    await world.connect(1)
    requests, changes = len(world.requests), world.changes
    await asyncio.sleep(60.0)
    assert world.open_places() == []
    assert (len(world.requests), world.changes) == (requests, changes)
    await world.cluster.close()


async def test_a_negative_idle_time_keeps_connections() -> None:
    world = World("seed:9092", brokers="1=one:9092", connections_max_idle_ms=-1)
    await world.start()
    await world.connect(1)
    await asyncio.sleep(3600.0)
    assert world.open_places() == ["one:9092"]
    await world.cluster.close()


async def test_refused_credentials_can_be_seen_until_a_broker_takes_them() -> None:
    """CC-03, NC-11."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    error = AuthenticationError("password changed")
    world.opens["one:9092"] = refuse(error)
    world.cluster.connection(1)
    await asyncio.sleep(0.01)
    assert world.cluster.fatal_error is error
    del world.opens["one:9092"]
    await asyncio.sleep(1.0)
    world.cluster.connection(1)
    await asyncio.sleep(1.0)
    assert world.cluster.fatal_error is None
    assert world.cluster.connection(1) is not None
    await world.cluster.close()


async def test_a_repeated_failure_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.opens["one:9092"] = refuse(REFUSED)
    world.on_change = lambda: world.cluster.connection(1)
    world.cluster.connection(1)
    await asyncio.sleep(5.0)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    refused = (
        "cannot connect to one:9092 (id 1) (its advertised.listeners address): connection refused"
    )
    assert warnings == [refused]
    # That it works again is worth a word, and so is the next failure.
    del world.opens["one:9092"]
    await asyncio.sleep(5.0)
    assert any(each.getMessage() == "connected to one:9092 (id 1)" for each in caplog.records)
    world.opens["one:9092"] = refuse(REFUSED)
    world.connections[-1].close(REFUSED)
    await asyncio.sleep(5.0)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings.count(refused) == 2
    await world.cluster.close()


# News of the brokers


async def refresh(world: World) -> None:
    world.cluster.request_update(reset_backoff=True)
    await asyncio.sleep(1.0)


async def test_a_broker_that_moved_is_connected_to_at_its_new_address() -> None:
    """CC-07, NC-17."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    one, _ = await world.connect(1, 2)
    one.in_flight = 1
    world.set_brokers("1=elsewhere:9092", "2=two:9092")
    await refresh(world)
    moved = world.cluster.connection(1)
    assert moved is not None
    assert moved.node.host == "elsewhere"
    assert world.moved == [-1, 1]  # the first is the bootstrap address
    assert one.closed_with is None
    one.in_flight = 0
    await asyncio.sleep(1.0)
    assert one.closed_with is not None
    assert world.open_places() == ["elsewhere:9092", "two:9092"]
    await world.cluster.close()
    assert_all_ended(world)


async def test_a_broker_that_moved_is_left_alone_when_nobody_was_connected() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    await world.connect(2)
    world.cluster.connection(1)
    await asyncio.sleep(0.01)
    world.connections[-1].close(REFUSED)
    await asyncio.sleep(0.0)
    world.set_brokers("1=elsewhere:9092", "2=two:9092")
    await refresh(world)
    assert world.open_places() == ["two:9092"]
    await world.cluster.close()


async def test_a_broker_that_left_is_closed_when_its_answers_are_in() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    one, _ = await world.connect(1, 2)
    one.in_flight = 1
    world.set_brokers("2=two:9092")
    await refresh(world)
    assert world.moved == [-1, 1]  # the first is the bootstrap address
    assert world.cluster.connection(1) is None
    assert one.closed_with is None
    one.in_flight = 0
    await asyncio.sleep(1.0)
    assert world.open_places() == ["two:9092"]
    await world.cluster.close()
    assert_all_ended(world)


async def test_close_ends_a_connection_that_is_still_leaving() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    one, _ = await world.connect(1, 2)
    one.in_flight = 1
    world.set_brokers("2=two:9092")
    await refresh(world)
    await world.cluster.close()
    assert_all_ended(world)


async def test_a_rack_may_change_without_a_new_connection() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    world.brokers = [Node(1, "one", 9092, "rack-b")]
    await refresh(world)
    assert one.closed_with is None
    assert world.open_places() == ["one:9092"]
    await world.cluster.close()


async def test_hints_of_produce_responses_are_taken_over() -> None:
    """MD-13."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.cluster.add_topic("t")
    await asyncio.sleep(0.1)
    hint = LeaderHint("t", 0, 2, 5)
    changes = world.changes
    world.cluster.take_hints([hint], [Node(2, "two", 9092)])
    assert world.metadata_changes[-1].topics == {"t"}
    assert world.changes == changes + 1
    (two,) = await world.connect(2)
    assert two.place == "two:9092"
    announced = len(world.metadata_changes)
    world.cluster.take_hints([hint], [])
    assert len(world.metadata_changes) == announced
    await world.cluster.close()


# Refreshing


async def test_a_new_topic_is_asked_for_at_once_and_alone() -> None:
    """PM-01."""
    world = World("seed:9092", brokers="1=one:9092")
    world.metadata.add_topic("old", 0.0)
    await world.start()
    began = world.now
    world.cluster.add_topic("new")
    await asyncio.sleep(0.05)
    assert world.metadata.topic("new") is not None
    assert world.metadata_requests == [(-1, ("old",)), (1, ("new",))]
    assert world.now - began < 0.1
    await world.cluster.close()


async def test_metadata_is_refreshed_when_it_is_old() -> None:
    world = World("seed:9092", brokers="1=one:9092", metadata_max_age_ms=10_000)
    await world.start()
    await asyncio.sleep(35.0)
    assert len(world.metadata_requests) == 4
    await world.cluster.close()


async def test_a_wanted_update_waits_for_the_backoff_only() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    world.metadata.add_topic("t", 0.0)
    await world.start()
    world.cluster.request_update()
    await asyncio.sleep(0.05)
    assert len(world.metadata_requests) == 1
    await asyncio.sleep(0.1)
    assert len(world.metadata_requests) == 2
    world.cluster.request_update_for_topic("t")
    await asyncio.sleep(1.0)
    assert world.metadata_requests[-1] == (1, ("t",))
    assert len(world.metadata_requests) == 3
    await world.cluster.close()


async def test_an_update_wanted_behind_our_back_does_not_hide_the_next_one() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await asyncio.sleep(1.0)
    world.metadata.request_update()
    world.cluster.request_update()
    await asyncio.sleep(1.0)
    assert len(world.metadata_requests) == 2
    await world.cluster.close()


async def test_a_metadata_request_that_is_lost_with_its_connection_counts_as_one_failure() -> None:
    """MD-03, NC-11, NC-13."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()

    async def lose(connection: FakeConnection, request: Any) -> Any:
        connection.close(REFUSED)
        await asyncio.sleep(1.0)

    world.answers["one:9092"] = lose
    await asyncio.sleep(1.0)
    began = world.now
    world.cluster.request_update()
    await asyncio.sleep(0.001)
    assert len(world.metadata_requests) == 2
    # Two failures would make it 0.2.
    assert world.metadata.next_update_at(world.now) == pytest.approx(began + 0.1)
    world.answers.clear()
    await asyncio.sleep(1.0)
    assert world.metadata.age(world.now) < 1.0
    await world.cluster.close()


async def test_a_failed_metadata_request_is_repeated_elsewhere() -> None:
    """NC-08."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    await asyncio.sleep(1.0)
    world.opens["one:9092"] = refuse(REFUSED)
    world.cluster.add_topic("t")
    await asyncio.sleep(0.5)
    assert world.metadata.topic("t") is not None
    assert world.metadata_requests[-1] == (2, ("t",))
    await world.cluster.close()


async def test_a_bug_in_the_refresh_is_logged_and_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.answers["one:9092"] = fail_with(ZeroDivisionError("oops"))
    world.cluster.request_update()
    await asyncio.sleep(1.0)
    assert "the metadata refresh failed unexpectedly; it goes on" in caplog.text
    world.answers.clear()
    world.cluster.add_topic("t")
    await asyncio.sleep(2.0)
    assert world.metadata.topic("t") is not None
    await world.cluster.close()


async def test_callbacks_that_raise_disturb_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World("seed:9092", brokers="1=one:9092")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    world.on_change = fail
    world.cluster._on_metadata = fail
    await world.start()
    assert len(await world.connect(1)) == 1
    assert "unexpected error in the handling of new metadata" in caplog.text
    assert "unexpected error in the handling of a change" in caplog.text
    await world.cluster.close()


# Starting over


async def test_when_no_known_broker_can_be_reached_the_bootstrap_servers_are_asked() -> None:
    """KIP-899."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    world.opens["one:9092"] = refuse(REFUSED)
    world.set_brokers("2=two:9092")
    one.close(REFUSED)
    await asyncio.sleep(2.0)
    assert set(world.metadata.nodes) == {2}
    assert world.cluster.connection(1) is None
    (two,) = await world.connect(2)
    assert two.place == "two:9092"
    await world.cluster.close()
    assert_all_ended(world)


async def test_a_lost_connection_alone_does_not_make_us_start_over() -> None:
    """KIP-899: the broker is tried first."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    one.close(REFUSED)
    await asyncio.sleep(5.0)
    assert [place for _, place in world.attempts].count("seed:9092") == 1
    assert world.metadata_requests[-1][0] == 1
    await world.cluster.close()


async def test_without_the_strategy_the_known_brokers_are_tried_on_and_on() -> None:
    world = World("seed:9092", brokers="1=one:9092", metadata_recovery_strategy="none")
    await world.start()
    (one,) = await world.connect(1)
    world.opens["one:9092"] = refuse(REFUSED)
    one.close(REFUSED)
    await asyncio.sleep(600.0)
    assert [place for _, place in world.attempts].count("seed:9092") == 1
    assert set(world.metadata.nodes) == {1}
    world.opens.clear()
    await asyncio.sleep(10.0)
    assert world.metadata_requests[-1][0] == 1
    await world.cluster.close()


async def test_metadata_that_never_comes_makes_us_start_over_once_per_trigger_time() -> None:
    """NC-20, KIP-1102."""
    world = World(
        "seed:9092",
        brokers="1=one:9092 2=two:9092",
        metadata_recovery_rebootstrap_trigger_ms=20_000,
    )
    await world.start()
    one, _ = await world.connect(1, 2)
    world.answers = dict.fromkeys(("one:9092", "two:9092", "seed:9092"), never)
    await asyncio.sleep(1.0)
    announced = len(world.metadata_changes)
    world.cluster.request_update()
    await asyncio.sleep(19.0)
    assert one.closed_with is None
    await asyncio.sleep(2.0)
    assert "begin again" in str(one.closed_with)
    assert len(world.metadata_changes) == announced + 1
    assert world.metadata.bootstrapping
    await asyncio.sleep(17.0)
    assert len(world.metadata_changes) == announced + 1
    await asyncio.sleep(3.0)
    assert len(world.metadata_changes) == announced + 2
    world.answers.clear()
    world.set_brokers("3=three:9092")
    await asyncio.sleep(25.0)
    assert set(world.metadata.nodes) == {3}
    await world.cluster.close()
    assert_all_ended(world)


async def test_what_is_in_flight_when_we_start_over_ends_as_disconnected() -> None:
    """NC-20."""
    world = World("seed:9092", brokers="1=one:9092", metadata_recovery_rebootstrap_trigger_ms=5_000)
    await world.start()
    (one,) = await world.connect(1)
    world.answers["one:9092"] = never
    produce = asyncio.create_task(one.request("produce"))
    world.cluster.request_update()
    with pytest.raises(ConnectionFailed, match="begin again"):
        await produce
    assert 5.0 < world.now < 6.0
    await world.cluster.close()


async def test_a_metadata_response_may_demand_to_start_over() -> None:
    """NC-20."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    world.error_code = ErrorCode.REBOOTSTRAP_REQUIRED
    world.cluster.request_update()
    await asyncio.sleep(0.15)
    assert "begin again" in str(one.closed_with)
    world.error_code = 0
    world.set_brokers("2=two:9092")
    await asyncio.sleep(2.0)
    assert set(world.metadata.nodes) == {2}
    await world.cluster.close()


async def test_a_refusal_of_apiversions_may_demand_to_start_over() -> None:
    """NC-21."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    (two,) = await world.connect(2)
    world.opens["one:9092"] = refuse(BrokerError(ErrorCode.REBOOTSTRAP_REQUIRED))
    announced = len(world.metadata_changes)
    world.cluster.connection(1)
    await asyncio.sleep(1.0)
    assert "begin again" in str(two.closed_with)
    # Once begun again, and once the brokers named anew.
    assert len(world.metadata_changes) == announced + 2
    await world.cluster.close()


async def test_attempts_are_given_up_when_we_start_over() -> None:
    world = World("seed:9092", brokers="1=one:9092", metadata_recovery_rebootstrap_trigger_ms=2_000)
    await world.start()
    world.opens["one:9092"] = hang
    world.cluster.request_update()
    await asyncio.sleep(3.0)
    assert set(world.metadata.nodes) == {1}
    assert [place for _, place in world.attempts].count("seed:9092") == 2
    await world.cluster.close()
    assert_all_ended(world)


# The least loaded broker


async def three_connected() -> tuple[World, list[FakeConnection]]:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092 3=three:9092")
    await world.start()
    return world, await world.connect(1, 2, 3)


async def test_an_idle_connection_is_preferred() -> None:
    """NC-10."""
    world, (one, two, _) = await three_connected()
    one.in_flight = two.in_flight = 1
    assert await ask(world) == 3
    await world.cluster.close()


async def test_among_busy_connections_the_one_with_the_fewest_in_flight_is_preferred() -> None:
    """NC-10."""
    world, (one, two, three) = await three_connected()
    one.in_flight, two.in_flight, three.in_flight = 3, 1, 2
    assert await ask(world) == 2
    await world.cluster.close()


async def test_the_scan_begins_at_a_random_node() -> None:
    """NC-10."""
    world, _ = await three_connected()
    world.random = 0.99
    assert await ask(world) == 3
    world.random = 0.5
    assert await ask(world) == 2
    await world.cluster.close()


async def test_throttled_connections_are_not_used() -> None:
    """NC-10, NC-09."""
    world, (one, two, _) = await three_connected()
    one.throttled_until = two.throttled_until = inf
    assert await ask(world) == 3
    await world.cluster.close()


async def test_when_all_are_throttled_the_first_to_be_free_is_waited_for() -> None:
    """NC-09, CC-06."""
    world, (one, two, three) = await three_connected()
    now = world.now
    one.throttled_until, two.throttled_until, three.throttled_until = now + 3, now + 2, now + 4
    assert await ask(world) == 2
    assert world.now == pytest.approx(now + 2, abs=0.1)
    assert len(world.connections) == 4
    await world.cluster.close()


async def test_a_ready_connection_is_preferred_to_a_new_one() -> None:
    """NC-10."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    (two,) = await world.connect(2)
    two.in_flight = 4
    assert await ask(world) == 2
    assert world.open_places() == ["two:9092"]
    await world.cluster.close()


async def test_what_has_just_been_lost_is_not_waited_for() -> None:
    """Until its last bytes have left, which may be never, asyncio does not tell."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    (two,) = await world.connect(2)
    two.is_lost, two.in_flight = True, 1
    assert await ask(world) == 1
    await world.cluster.close()


async def test_a_connection_in_the_making_is_preferred_to_another_new_one() -> None:
    """NC-10."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()

    async def accept_late(connection: FakeConnection, deadline: float) -> None:
        await asyncio.sleep(0.5)

    world.opens["two:9092"] = accept_late
    world.cluster.connection(2)
    await asyncio.sleep(0.1)
    assert await ask(world) == 2
    assert world.open_places() == ["two:9092"]
    await world.cluster.close()


async def test_of_the_nodes_that_could_be_tried_the_longest_untried_is_first() -> None:
    """NC-10."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092", metadata_max_age_ms=10**9)
    await world.start()
    one, _ = await world.connect(1, 2)
    await asyncio.sleep(10.0)
    one.close(REFUSED)
    await asyncio.sleep(10.0)
    for connection in world.connections:
        connection.close(REFUSED)
    world.attempts.clear()
    await asyncio.sleep(30.0)
    assert world.attempts
    assert await ask(world) in (1, 2)
    await world.cluster.close()


# Control requests


async def test_a_request_may_be_for_one_broker() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    assert await ask(world, node_id=2) == 2
    assert world.open_places() == ["two:9092"]
    await world.cluster.close()


async def test_a_request_for_an_unknown_broker_waits_for_news() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    asking = ask(world, node_id=2)
    await asyncio.sleep(0.5)
    assert not asking.done()
    world.set_brokers("1=one:9092", "2=two:9092")
    assert await asking == 2
    await world.cluster.close()


async def test_requests_for_unknown_brokers_do_not_keep_each_other_awake() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    request_update = world.metadata.request_update
    calls = 0

    def count(*, reset_backoff: bool = False) -> int:
        nonlocal calls
        calls += 1
        assert calls < 100  # without time passing: the test would hang here
        return request_update(reset_backoff=reset_backoff)

    world.metadata.request_update = count  # type: ignore[method-assign]
    asking = [ask(world, node_id=2), ask(world, node_id=3)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in asking)
    world.set_brokers("1=one:9092", "2=two:9092", "3=three:9092")
    assert await asyncio.gather(*asking) == [2, 3]
    await world.cluster.close()


@pytest.mark.parametrize("error", [REFUSED, RequestTimedOut("slow")])
async def test_a_request_that_gets_no_answer_is_repeated(error: KafkaError) -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await world.connect(1)
    world.answers["one:9092"] = fail_with(error)
    asking = ask(world)
    await asyncio.sleep(1.0)
    assert 3 <= sum(isinstance(each, Question) for _, each in world.requests) <= 6
    world.answers.clear()
    assert await asking == 1
    await world.cluster.close()


@pytest.mark.parametrize("error", [REFUSED, RequestTimedOut("slow")])
async def test_a_request_may_be_tried_only_once(error: KafkaError) -> None:
    """TX-11: another broker may coordinate now."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await world.connect(1)
    world.answers["one:9092"] = fail_with(error)
    with pytest.raises(type(error)) as caught:
        await ask(world, node_id=1, once=True)
    assert caught.value is error
    await world.cluster.close()


async def test_a_request_that_is_tried_once_does_not_wait_for_a_broker_that_is_down() -> None:
    """TX-11: nor for one that is gone; but for one that was never heard of."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    world.opens["two:9092"] = refuse(REFUSED)
    began = world.now
    with pytest.raises(ConnectionFailed, match="broker 2 cannot be reached: connection refused"):
        await ask(world, node_id=2, once=True)
    assert world.now < began + 1.0
    asking = ask(world, node_id=3, once=True)
    with pytest.raises(ConnectionFailed, match="broker 3 is not in the cluster"):
        await asking
    assert world.now < began + 5.0
    world.set_brokers("1=one:9092", "3=three:9092")
    assert await ask(world, node_id=3, once=True) == 3
    await world.cluster.close()


async def test_features_are_those_of_the_broker_that_knows_the_newest() -> None:
    """Spec 6.10: also when that one is gone."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092 3=three:9092")
    world.features_epochs = {1: 7, 2: 9, 3: 8}
    await world.start()
    levels = []
    for node in (1, 2, 3):
        await world.connect(node)
        levels.append(world.cluster.features["transaction.version"])
    assert levels == [1, 2, 2]
    await world.cluster.close()


async def test_features_of_another_cluster_count_although_they_are_older() -> None:
    """KIP-1102: what the brokers before have told is of no interest any more."""
    world = World("seed:9092", brokers="1=one:9092")
    world.features_epochs = {1: 9, 2: 3}
    await world.start()
    await world.connect(1)
    world.set_brokers("2=two:9092")
    world.metadata.require_rebootstrap()
    world.cluster.request_update()
    await asyncio.sleep(5)
    await world.connect(2)
    assert world.cluster.features == {"transaction.version": 2}
    await world.cluster.close()


async def test_the_newest_version_of_a_request_that_a_broker_speaks() -> None:
    """TX-36: as long as there is a connection to it."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    assert world.cluster.highest_version(1, wire.ApiKey.INIT_PRODUCER_ID) is None
    await world.connect(1)
    assert world.cluster.highest_version(1, wire.ApiKey.INIT_PRODUCER_ID) == 4
    assert world.cluster.highest_version(1, wire.ApiKey.END_TXN) == -1
    assert world.cluster.highest_version(9, wire.ApiKey.END_TXN) is None
    # An upgraded broker tells with its next connection.
    (connection,) = await world.connect(1)
    connection.close(REFUSED)
    assert world.cluster.highest_version(1, wire.ApiKey.INIT_PRODUCER_ID) is None
    world.versions = {wire.ApiKey.INIT_PRODUCER_ID: (0, 5)}
    await asyncio.sleep(5)  # as long as it may not be connected to again
    await world.connect(1)
    assert world.cluster.highest_version(1, wire.ApiKey.INIT_PRODUCER_ID) == 5
    await world.cluster.close()


async def test_a_request_ends_at_its_deadline_with_the_last_reason() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await world.connect(1)
    world.answers["one:9092"] = fail_with(REFUSED)
    began = world.now
    with pytest.raises(RequestTimedOut, match=r"INIT_PRODUCER_ID in time: connection refused"):
        await ask(world, seconds=3.0)
    assert world.now == pytest.approx(began + 3.0)
    world.answers["one:9092"] = never
    with pytest.raises(RequestTimedOut):
        await ask(world, seconds=3.0, node_id=1)
    assert world.open_places() == ["one:9092"]
    await world.cluster.close()


async def test_a_request_that_finds_no_broker_ends_at_its_deadline() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.opens["one:9092"] = world.opens["seed:9092"] = refuse(REFUSED)
    with pytest.raises(RequestTimedOut, match="connection refused"):
        await ask(world, seconds=3.0)
    await world.cluster.close()


async def test_other_errors_of_a_request_are_the_callers() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.answers["one:9092"] = fail_with(UnsupportedVersionError("too old"))
    with pytest.raises(UnsupportedVersionError):
        await ask(world)
    await world.cluster.close()


async def test_a_request_ends_when_our_credentials_are_refused_meanwhile() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    error = AuthenticationError("wrong password")
    world.opens["one:9092"] = world.opens["seed:9092"] = refuse(error)
    with pytest.raises(AuthenticationError):
        await ask(world)
    # Known beforehand, it does not count: the password may be right by now.
    world.opens.clear()
    assert world.cluster.fatal_error is error
    assert await ask(world) == 1
    await world.cluster.close()


async def test_a_cancelled_request_leaves_the_connection_alone() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await world.connect(1)
    world.answers["one:9092"] = never
    asking = ask(world)
    await asyncio.sleep(1.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.open_places() == ["one:9092"]
    await world.cluster.close()


async def test_requests_end_when_the_cluster_is_closed() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    world.answers["one:9092"] = never
    waiting = ask(world, node_id=7)
    asking = ask(world, node_id=1)
    await asyncio.sleep(1.0)
    await world.cluster.close()
    for task in (waiting, asking):
        with pytest.raises(ProducerClosed):
            await task
    with pytest.raises(ProducerClosed):
        await ask(world)
    assert_all_ended(world)


# Full connections


async def test_a_full_connection_is_reserved_for_the_control_request() -> None:
    """Otherwise Produce requests would take each slot, and metadata would grow old."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    one.in_flight = 5
    asking = ask(world)
    await asyncio.sleep(0.01)
    assert world.cluster.connection(1) is None
    one.in_flight = 4
    assert world.cluster.connection(1) is None
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert one.in_flight == 5
    assert world.cluster.connection(1) is not None
    assert await asking == 1
    await world.cluster.close()


async def test_the_scheduler_is_told_when_the_reservation_is_over() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    one.in_flight = 5
    asking = ask(world)
    await asyncio.sleep(0.01)
    seen: list[bool] = []
    world.on_change = lambda: seen.append(world.cluster.connection(1) is not None)
    asking.cancel()
    await asyncio.sleep(0.01)
    assert seen == [True]
    await world.cluster.close()


async def test_a_claim_does_not_wake_who_waits_while_all_connections_are_full() -> None:
    """Else claims that move from one full connection to another would keep the loop busy."""
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    for connection in await world.connect(1, 2):
        connection.in_flight = 5

    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        assert steps < 100  # without time passing: the test would hang here
        world.random = steps % 2 / 2  # the scan begins at the other one each time
        world.cluster.connection(1)
        world.cluster.connection(2)

    asking = ask(world)
    await asyncio.sleep(0.001)
    world.on_change = step
    step()
    await asyncio.sleep(1.0)
    world.on_change = lambda: None
    asking.cancel()
    await world.cluster.close()


async def test_room_is_noticed_when_the_connection_tells_of_it_or_not() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    one.in_flight = 5
    asking = ask(world)
    await asyncio.sleep(0.005)
    began = world.now
    one.in_flight = 0
    one.room()
    await asking
    assert world.now - began < 0.005
    one.in_flight = 5
    asking = ask(world)
    await asyncio.sleep(1.0)
    one.in_flight = 0
    await asking
    await world.cluster.close()


async def test_room_that_nobody_waits_for_wakes_only_the_scheduler() -> None:
    """Under load there is some with each request: who refreshes metadata sleeps on."""
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)
    await asyncio.sleep(0.01)
    looks = told = 0
    next_update_at = world.metadata.next_update_at

    def look(now: float) -> float:
        nonlocal looks
        looks += 1
        return next_update_at(now)

    def tell() -> None:
        nonlocal told
        told += 1

    world.metadata.next_update_at = look  # type: ignore[method-assign]
    world.on_change = tell
    for _ in range(10):
        one.room()
        await asyncio.sleep(0.001)
    assert (looks, told) == (0, 10)
    world.cluster.request_update()
    await asyncio.sleep(0.001)
    assert looks > 0
    await world.cluster.close()


async def test_metadata_is_refreshed_although_the_scheduler_takes_every_slot() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    (one,) = await world.connect(1)

    def produce() -> None:
        if world.cluster.connection(1) is not None and one.in_flight < 5:
            one.in_flight += 1
            world.loop.call_later(0.1, answered)

    def answered() -> None:
        one.in_flight -= 1
        produce()

    world.on_change = produce
    for _ in range(5):
        produce()
    world.cluster.add_topic("t")
    await asyncio.sleep(1.0)
    assert world.metadata.topic("t") is not None
    world.on_change = lambda: None
    await world.cluster.close()


# The end


async def test_close_may_be_called_often_and_before_start() -> None:
    world = World("seed:9092", brokers="1=one:9092")
    await world.cluster.close()
    world = World("seed:9092", brokers="1=one:9092")
    await world.start()
    await world.connect(1)
    await asyncio.gather(world.cluster.close(), world.cluster.close())
    await world.cluster.close()
    assert world.cluster.connection(1) is None
    assert world.metadata.closed
    changes = world.changes
    world.connections[-1].room()
    await asyncio.sleep(1.0)
    assert world.changes == changes
    assert_all_ended(world)


async def test_close_ends_attempts_and_backoff() -> None:
    world = World("seed:9092", brokers="1=one:9092 2=two:9092")
    await world.start()
    world.opens["one:9092"] = hang
    world.opens["two:9092"] = refuse(REFUSED)
    world.on_change = lambda: world.cluster.connection(2)
    world.cluster.connection(1)
    world.cluster.connection(2)
    await asyncio.sleep(3.0)
    await world.cluster.close()
    changes = world.changes
    await asyncio.sleep(10.0)
    assert world.changes == changes
    assert_all_ended(world)


# With real connections


#: Something to ask a real connection.
PRODUCER_ID = wire.InitProducerIdRequest(None, 60_000)


async def connected_to(brokers: EmbeddedCluster) -> Cluster:
    """A cluster with its own kind of connections, without jitter."""
    assert brokers.connector is not None
    config = ProducerConfig.from_options(brokers.bootstrap_servers)
    cluster = Cluster(
        config,
        ClusterMetadata.from_config(config, lambda: 0.5),
        brokers.connector,
        client_id="test",
        loop=asyncio.get_running_loop(),
        random=lambda: 0.5,
        on_change=lambda: None,
        on_metadata=lambda change: None,
        on_moved=lambda node_id: None,
        metrics=Metrics(client_id="test"),
    )
    await cluster.start(10.0)
    return cluster


async def ready_connections(cluster: Cluster, *node_ids: int) -> list[Connection]:
    found = []
    for node_id in node_ids:
        cluster.connection(node_id)
    await asyncio.sleep(0.1)
    for node_id in node_ids:
        connection = cluster.connection(node_id)
        assert connection is not None
        found.append(connection)
    return found


async def test_closing_one_connection_drops_what_is_in_flight_there_and_nowhere_else() -> None:
    """NC-04."""
    async with EmbeddedCluster(brokers=2, network=MemoryNetwork(latency=0.001)) as brokers:
        held = brokers.inject("init_producer_id", hold=True, times=None)
        cluster = await connected_to(brokers)
        one, two = await ready_connections(cluster, 1, 2)
        dropped = [asyncio.create_task(one.request(PRODUCER_ID)) for _ in range(3)]
        kept = asyncio.create_task(two.request(PRODUCER_ID))
        await held.reached(2)
        assert (cluster.in_flight, one.in_flight, two.in_flight) == (4, 3, 1)

        one.close()
        assert (cluster.in_flight, one.in_flight, two.in_flight) == (1, 0, 1)
        for request in dropped:
            with pytest.raises(ConnectionFailed, match="closed by this client"):
                await request
        assert not kept.done()
        held.release()
        assert (await kept).producer_id >= 0
        # An answer that was under way is nobody's any more, and disturbs nobody.
        (again,) = await ready_connections(cluster, 1)
        assert again is not one
        assert (await again.request(PRODUCER_ID)).producer_id >= 0
        await cluster.close()


async def test_a_connection_that_we_end_is_made_again_after_the_backoff_only() -> None:
    """NC-15: what was pending ends as disconnected in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    network = MemoryNetwork(latency=0.001)
    async with EmbeddedCluster(network=network) as brokers:
        held = brokers.inject("init_producer_id", hold=True)
        cluster = await connected_to(brokers)
        (connection,) = await ready_connections(cluster, 1)
        pending = asyncio.create_task(connection.request(PRODUCER_ID))
        await held.reached()
        ended_at = loop.time()
        connection.close(ConnectionFailed("its answers make no sense"))
        with pytest.raises(ConnectionFailed, match="its answers make no sense"):
            await pending
        assert loop.time() == ended_at

        connects: list[float] = []
        network.on_link = lambda link: connects.append(loop.time() - ended_at)
        assert cluster.connection(1) is None  # asks for one
        await asyncio.sleep(1)
        assert cluster.connection(1) is not None
        (made_at,) = connects
        assert 0.05 <= made_at < 0.06
        await cluster.close()


async def test_aborting_cuts_a_connection_that_is_being_closed() -> None:
    """A closer's time may end before that which a transport gets to write what it holds."""
    loop = asyncio.get_running_loop()
    network = MemoryNetwork(latency=0.001, window=1000)
    async with EmbeddedCluster(network=network) as brokers:
        cluster = await connected_to(brokers)
        (connection,) = await ready_connections(cluster, 1)
        [link] = network.links
        brokers.pause(1)
        for _ in range(5):
            asking = connection.request(wire.MetadataRequest(("t" * 249,) * 10))
            asyncio.ensure_future(asking).add_done_callback(lambda asked: asked.exception())
        await asyncio.sleep(0.1)
        assert link.client.get_write_buffer_size() > 0
        began = loop.time()
        closing = asyncio.create_task(cluster.close())
        await asyncio.sleep(0.5)
        assert not closing.done()
        cluster.abort()
        await closing
        assert loop.time() == began + 0.5
        assert connection._transport is None
        brokers.resume(1)


async def test_a_cluster_survives_the_loss_of_all_its_brokers() -> None:
    loop = asyncio.get_running_loop()
    network = MemoryNetwork(latency=0.001)
    async with EmbeddedCluster(brokers=3, topics={"t": 3}, network=network) as brokers:
        cluster = await connected_to(brokers)
        metadata = cluster.metadata
        cluster.add_topic("t")
        await asyncio.sleep(0.1)
        entry = metadata.topic("t")
        assert entry is not None
        assert entry.topic_id is not None
        assert entry.available == (0, 1, 2)

        for node_id in brokers.node_ids:
            cluster.connection(node_id)
        await asyncio.sleep(0.1)
        # One each: the bootstrap connection is closed.
        assert [brokers.connection_count(node_id) for node_id in brokers.node_ids] == [1, 1, 1]
        await brokers.stop_broker(1)
        await asyncio.sleep(2.0)
        known = metadata.leader("t", 0)
        assert known is not None
        assert known.leader in (2, 3)

        await brokers.stop_broker(2)
        await brokers.stop_broker(3)
        await asyncio.sleep(30.0)
        entry = metadata.topic("t")
        assert entry is not None
        assert (entry.partition_count, entry.available) == (3, ())
        for node_id in (1, 2, 3):
            await brokers.start_broker(node_id)
        request = wire.InitProducerIdRequest(None, 60_000)
        response = await cluster.request(request, deadline=loop.time() + 10.0)
        assert response.producer_id >= 0
        await asyncio.sleep(2.0)
        entry = metadata.topic("t")
        assert entry is not None
        assert entry.available == (0, 1, 2)
        await cluster.close()
        await asyncio.sleep(0.1)
        assert [brokers.connection_count(node_id) for node_id in brokers.node_ids] == [0, 0, 0]
