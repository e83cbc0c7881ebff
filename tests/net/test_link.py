from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from math import inf
from typing import cast

import pytest

from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.metadata import Node
from asyncproducer.core.reconnect import ReconnectState
from asyncproducer.errors import AuthenticationError, ConnectionFailed
from asyncproducer.net.connection import Connection
from asyncproducer.net.link import BrokerLink, LinkState
from asyncproducer.net.transport import Address, Connector

pytestmark = pytest.mark.virtual_time

ONE, TWO = (Address(socket.AF_INET, f"10.0.0.{n}", 9092) for n in (1, 2))
LOST = ConnectionFailed("lost")

Open = Callable[["FakeConnection", float], Awaitable[None]]


class FakeConnection:
    """What a link sees of a Connection."""

    def __init__(self, bench: Bench, link: BrokerLink) -> None:
        self.bench = bench
        self.link = link
        self.address: Address | None = None
        self.in_flight = 0
        self.last_used = 0.0
        self.throttled_until = 0.0
        self.closed_with: list[BaseException | None] = []
        #: How long its transport writes when it is closed, unless it is cut.
        self.writes_for = 0.0
        self.cut = asyncio.Event()
        self.gone_at: float | None = None

    async def open(self, address: Address, deadline: float) -> None:
        self.address = address
        self.last_used = self.bench.loop.time()
        self.bench.attempts.append((self.last_used, str(address.host), deadline))
        await self.bench.open(self, deadline)

    def close(self, reason: BaseException | None = None) -> None:
        if not self.closed_with:
            self.closed_with.append(reason)
            self.link.connection_closed(
                cast("Connection", self), reason or ConnectionFailed("by us")
            )

    def abort(self) -> None:
        self.cut.set()

    async def wait_closed(self) -> None:
        assert self.closed_with
        await asyncio.sleep(0)
        # (asyncio.timeout in a task that was cancelled ends as one in Python 3.11.2.)
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait([cut], timeout=self.writes_for)
        finally:
            cut.cancel()
        self.gone_at = self.bench.loop.time()


class Bench:
    """One link with everything around it: resolver, connections, and the owner."""

    def __init__(self, *, max_idle: float = inf) -> None:
        self.loop = asyncio.get_running_loop()
        self.attempts: list[tuple[float, str, float]] = []
        self.events: list[str] = []
        self.connections: list[FakeConnection] = []
        self.ready = asyncio.Event()
        self.lookups = 0
        self.addresses = [ONE]
        self.ask_again = False
        self.open: Open = accept
        self.link = BrokerLink(
            Node(1, "broker", 9092),
            reconnect=ReconnectState(
                ExponentialBackoff(0.05, 1.0, random=lambda: 0.5),
                ExponentialBackoff(10.0, 30.0, random=lambda: 0.5),
            ),
            connector=cast("Connector", self),
            make_connection=self._make_connection,
            max_idle=max_idle,
            loop=self.loop,
            owner=self,
        )

    def _make_connection(self, link: BrokerLink) -> Connection:
        self.connections.append(FakeConnection(self, link))
        return cast("Connection", self.connections[-1])

    async def resolve(self, host: str, port: int) -> list[Address]:
        self.lookups += 1
        return self.addresses

    @property
    def connection(self) -> FakeConnection:
        return self.connections[-1]

    def _event(self, what: str) -> None:
        self.events.append(f"{self.loop.time():.3f} {what}")
        if self.ask_again:
            self.link.ask()

    def link_ready(self, link: BrokerLink) -> None:
        assert link.connection is not None
        assert link.state is LinkState.READY
        self.ready.set()
        self._event("ready")

    def link_failed(self, link: BrokerLink, error: Exception) -> None:
        self._event(f"failed: {error}")

    def link_lost(self, link: BrokerLink, error: BaseException) -> None:
        assert link.connection is None
        self._event(f"lost: {error}")

    def link_gone(self, link: BrokerLink) -> None:
        self._event("gone")

    async def connect(self) -> FakeConnection:
        self.link.ask()
        await self.ready.wait()
        self.events.clear()
        return self.connection

    async def close(self) -> None:
        self.link.cancel()
        await self.link.closed()


async def accept(connection: FakeConnection, deadline: float) -> None:
    pass


async def refuse(connection: FakeConnection, deadline: float) -> None:
    raise ConnectionFailed("refused")


async def hang(connection: FakeConnection, deadline: float) -> None:
    await asyncio.sleep(deadline - asyncio.get_running_loop().time())
    raise ConnectionFailed("no answer")


# Connecting


async def test_a_link_does_nothing_until_somebody_asks() -> None:
    bench = Bench()
    await asyncio.sleep(100.0)
    assert bench.attempts == []
    assert bench.link.state is LinkState.IDLE
    assert bench.link.connection is None


async def test_asking_connects_in_the_background() -> None:
    """CC-01."""
    bench = Bench()
    bench.link.ask()
    bench.link.ask()
    states = [bench.link.state]
    await asyncio.sleep(0.01)
    states.append(bench.link.state)
    assert states == [LinkState.WAITING, LinkState.READY]
    assert cast("FakeConnection", bench.link.connection) is bench.connection
    assert bench.events == ["0.000 ready"]
    bench.link.ask()
    await asyncio.sleep(0.01)
    assert len(bench.connections) == 1
    await bench.close()


async def test_a_failed_attempt_is_not_repeated_unless_somebody_asks() -> None:
    bench = Bench()
    bench.open = refuse
    bench.link.ask()
    await asyncio.sleep(60.0)
    assert len(bench.attempts) == 1
    assert bench.events == ["0.000 failed: refused"]
    assert bench.link.state is LinkState.IDLE
    assert str(bench.link.error) == "refused"
    assert bench.connection.closed_with


async def test_who_asks_when_it_hears_of_the_failure_gets_the_next_attempt_after_the_backoff() -> (
    None
):
    """CC-05, NC-12."""
    bench = Bench()
    bench.open = refuse
    bench.ask_again = True
    bench.link.ask()
    await asyncio.sleep(4.0)
    assert [round(at, 3) for at, _, _ in bench.attempts] == [
        0.0, 0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55,
    ]  # fmt: skip
    await bench.close()


async def test_a_broker_that_does_not_answer_gets_more_time_with_each_attempt() -> None:
    """CC-08, NC-08, NC-19."""
    bench = Bench()
    bench.open = hang
    bench.ask_again = True
    bench.link.ask()
    await asyncio.sleep(120.0)
    assert [round(deadline - at, 3) for at, _, deadline in bench.attempts[:4]] == [
        10.0, 20.0, 30.0, 30.0,
    ]  # fmt: skip
    await bench.close()


async def test_a_refusal_of_our_credentials_backs_off_longer() -> None:
    """CC-03."""

    async def refuse_credentials(connection: FakeConnection, deadline: float) -> None:
        raise AuthenticationError("who are you?")

    bench = Bench()
    bench.open = refuse_credentials
    bench.ask_again = True
    bench.link.ask()
    await asyncio.sleep(0.2)
    assert [round(at, 3) for at, _, _ in bench.attempts] == [0.0, 0.1]
    await bench.close()


async def test_attempts_take_the_addresses_in_turn() -> None:
    """CC-07, NC-17: the name is looked up again when all were tried, or after a loss."""
    bench = Bench()
    bench.addresses = [ONE, TWO]
    bench.open = refuse
    bench.ask_again = True
    bench.link.ask()
    await asyncio.sleep(0.2)
    assert [host for _, host, _ in bench.attempts] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert bench.lookups == 2
    bench.open = accept
    await asyncio.sleep(0.2)
    assert bench.attempts[-1][1] == "10.0.0.2"
    bench.connection.close(LOST)
    await asyncio.sleep(0.1)
    assert bench.lookups == 3
    assert bench.attempts[-1][1] == "10.0.0.1"
    await bench.close()


async def test_a_name_that_cannot_be_resolved_is_a_failed_attempt() -> None:
    """NC-03."""
    bench = Bench()

    async def resolve(host: str, port: int) -> list[Address]:
        raise ConnectionFailed(f"cannot resolve {host}")

    bench.resolve = resolve  # type: ignore[method-assign]
    bench.link.ask()
    await asyncio.sleep(1.0)
    assert bench.events == ["0.000 failed: cannot resolve broker"]
    assert bench.link.reconnect.retry_at == pytest.approx(0.05)


async def test_a_resolver_that_hangs_ends_with_the_attempt() -> None:
    bench = Bench()

    async def resolve(host: str, port: int) -> list[Address]:
        await asyncio.sleep(1000.0)
        raise AssertionError

    bench.resolve = resolve  # type: ignore[method-assign]
    bench.link.ask()
    await asyncio.sleep(11.0)
    assert len(bench.events) == 1
    assert bench.events[0].startswith("10.000 failed: the host name 'broker' was not resolved")


async def test_a_bug_in_an_attempt_is_logged_and_the_link_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stumble(connection: FakeConnection, deadline: float) -> None:
        bench.open = accept
        raise ZeroDivisionError("oops")

    bench = Bench()
    bench.open = stumble
    bench.ask_again = True
    bench.link.ask()
    await asyncio.sleep(0.2)
    assert bench.events == ["0.000 failed: oops", "0.050 ready"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info
    await bench.close()


async def test_a_connection_that_is_lost_before_we_run_again_is_a_failed_attempt() -> None:
    async def accept_and_lose(connection: FakeConnection, deadline: float) -> None:
        connection.close(LOST)

    bench = Bench()
    bench.open = accept_and_lose
    bench.link.ask()
    await asyncio.sleep(1.0)
    assert bench.events == ["0.000 failed: the connection was lost at once: lost"]
    assert bench.link.connection is None


# Living


async def test_a_lost_connection_is_reported_at_once() -> None:
    """CC-01."""
    bench = Bench()
    connection = await bench.connect()
    connection.close(LOST)
    assert bench.link.connection is None
    assert bench.events == ["0.000 lost: lost"]
    assert bench.link.error is LOST
    assert not bench.link.reconnect.can_connect(0.049)
    await asyncio.sleep(60.0)
    assert len(bench.attempts) == 1
    assert bench.link.state is LinkState.IDLE


async def test_a_lost_connection_that_is_wanted_is_made_again_after_the_backoff() -> None:
    """CC-01, NC-12."""
    bench = Bench()
    connection = await bench.connect()
    bench.ask_again = True
    connection.close(LOST)
    await asyncio.sleep(1.0)
    assert bench.events == ["0.000 lost: lost", "0.050 ready"]
    await bench.close()


async def test_an_idle_connection_is_closed_in_silence() -> None:
    """It is no failure: no backoff, and nobody is told to look for another leader."""
    bench = Bench(max_idle=540.0)
    connection = await bench.connect()
    bench.ready.clear()
    await asyncio.sleep(539.0)
    assert not connection.closed_with
    await asyncio.sleep(2.0)
    assert connection.closed_with == [None]
    assert bench.events == []
    assert bench.link.reconnect.can_connect(0.0)
    await bench.connect()
    await bench.close()


async def test_a_connection_in_use_is_not_idle() -> None:
    bench = Bench(max_idle=100.0)
    connection = await bench.connect()
    await asyncio.sleep(90.0)
    connection.last_used = 90.0
    await asyncio.sleep(95.0)
    connection.in_flight = 1
    await asyncio.sleep(300.0)
    assert not connection.closed_with
    connection.in_flight = 0
    connection.last_used = 485.0
    await asyncio.sleep(120.0)
    assert connection.closed_with == [None]


async def test_without_a_limit_an_idle_connection_stays() -> None:
    bench = Bench()
    connection = await bench.connect()
    await asyncio.sleep(80000.0)
    assert not connection.closed_with
    await bench.close()


# Ending


async def test_cancelling_ends_the_task_and_the_connection() -> None:
    bench = Bench()
    connection = await bench.connect()
    bench.link.cancel()
    await bench.link.closed()
    assert connection.closed_with == [None]
    assert bench.events == []
    assert bench.link.connection is None
    assert bench.link.state is LinkState.IDLE
    assert len(asyncio.all_tasks()) == 1
    await bench.link.closed()


async def test_cancelling_an_attempt_leaves_nothing_open() -> None:
    bench = Bench()
    bench.open = hang
    bench.link.ask()
    await asyncio.sleep(1.0)
    assert bench.link.state is LinkState.CONNECTING
    bench.link.cancel()
    await bench.link.closed()
    assert bench.connection.closed_with == [None]


async def test_a_retired_link_closes_when_nothing_is_in_flight() -> None:
    bench = Bench()
    connection = await bench.connect()
    connection.in_flight = 1
    bench.link.retire()
    await asyncio.sleep(5.0)
    assert not connection.closed_with
    connection.in_flight = 0
    await asyncio.sleep(0.2)
    assert connection.closed_with == [None]
    assert [event.split()[1] for event in bench.events] == ["gone"]
    bench.link.ask()
    await asyncio.sleep(1.0)
    assert len(bench.connections) == 1


async def test_a_retired_link_that_loses_its_connection_is_gone_without_a_word() -> None:
    bench = Bench()
    connection = await bench.connect()
    connection.in_flight = 1
    bench.link.retire()
    await asyncio.sleep(0.01)
    connection.close(LOST)
    await asyncio.sleep(0.01)
    assert [event.split()[1] for event in bench.events] == ["gone"]


async def test_retiring_ends_an_attempt() -> None:
    bench = Bench()
    bench.open = hang
    bench.link.ask()
    await asyncio.sleep(1.0)
    bench.link.retire()
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert bench.connection.closed_with == [None]
    assert bench.events == ["1.000 gone"]


async def test_retiring_an_idle_link_is_the_end_at_once() -> None:
    bench = Bench()
    bench.link.retire()
    assert bench.events == ["0.000 gone"]


async def test_an_attempt_that_fails_after_retiring_is_not_reported() -> None:
    async def retire_and_refuse(connection: FakeConnection, deadline: float) -> None:
        bench.link.retired = True
        raise ConnectionFailed("refused")

    bench = Bench()
    bench.open = retire_and_refuse
    bench.link.ask()
    await asyncio.sleep(1.0)
    assert bench.events == ["0.000 gone"]


async def test_dropping_closes_at_once_what_is_in_flight_ends_with_the_reason() -> None:
    bench = Bench()
    connection = await bench.connect()
    connection.in_flight = 1
    reason = ConnectionFailed("starting over")
    bench.link.drop(reason)
    assert connection.closed_with == [reason]
    assert bench.link.connection is None
    await bench.link.closed()
    assert [event.split()[1] for event in bench.events] == ["gone"]


async def test_dropping_cuts_a_connection_that_is_being_closed() -> None:
    """What its transport still holds has no time any more, and nothing is left behind."""
    bench = Bench()
    connection = await bench.connect()
    connection.writes_for = 1.0
    bench.link.cancel()
    await asyncio.sleep(0.5)
    assert connection.gone_at is None
    bench.link.drop(ConnectionFailed("no time left"))
    await bench.link.closed()
    assert connection.closed_with == [None]
    assert connection.gone_at == 0.5
    assert bench.events == ["0.500 gone"]


@pytest.mark.parametrize("impatient", ["cancel", "retire"])
async def test_the_end_of_a_link_is_the_end_of_its_transport(impatient: str) -> None:
    """Here it was idle, and its end does not end the link; but then nobody wants it any more."""
    bench = Bench(max_idle=10.0)
    connection = await bench.connect()
    connection.writes_for = 1.0
    await asyncio.sleep(10.5)
    assert connection.closed_with
    assert connection.gone_at is None
    bench.link.ask()
    getattr(bench.link, impatient)()
    await bench.link.closed()
    assert connection.gone_at == 11.0
    assert len(bench.connections) == 1
    assert bench.events == (["11.000 gone"] if impatient == "retire" else [])


async def test_a_link_that_is_told_twice_to_end_does_not_leave_its_transport_behind() -> None:
    bench = Bench()
    connection = await bench.connect()
    connection.writes_for = 1.0
    bench.link.cancel()
    await asyncio.sleep(0.5)
    bench.link.cancel()
    await bench.link.closed()
    assert connection.gone_at == 1.0


async def test_a_link_tells_who_it_is() -> None:
    bench = Bench()
    assert repr(bench.link) == "<BrokerLink broker:9092 (id 1): idle>"
