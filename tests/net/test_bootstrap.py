from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from asyncproducer.config import ProducerConfig
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.metadata import Node
from asyncproducer.errors import ConnectionFailed, ProtocolError
from asyncproducer.net.bootstrap import Bootstrap
from asyncproducer.net.transport import Address, Connector

pytestmark = pytest.mark.virtual_time

CANONICAL = "resolve_canonical_bootstrap_servers_only"


class Dns:
    """Forward and reverse lookups."""

    def __init__(self, **hosts: list[str]) -> None:
        self.hosts = hosts
        self.names: dict[str, str] = {}

    async def resolve(self, host: str, port: int) -> list[Address]:
        if host not in self.hosts:
            raise ConnectionFailed(f"cannot resolve {host}")
        return [Address(socket.AF_INET, ip, port) for ip in self.hosts[host]]

    async def canonical_name(self, address: Address) -> str:
        return self.names.get(address.host, address.host)


def make(*servers: str, dns: Dns | None = None, lookup: str = "use_all_dns_ips") -> Bootstrap:
    dns = dns or Dns()
    return Bootstrap(
        ProducerConfig(bootstrap_servers=servers, client_dns_lookup=lookup),
        cast("Connector", dns),
        backoff=ExponentialBackoff(0.05, 1.0, random=lambda: 0.5),
        loop=asyncio.get_running_loop(),
        canonical_name=dns.canonical_name,
    )


async def test_nodes_have_negative_ids_and_keep_the_names() -> None:
    """CU-01: names are resolved only when we connect."""
    nodes = await make("one:9092", "[::1]:9093").nodes(0.0)
    assert nodes == [Node(-1, "one", 9092), Node(-2, "::1", 9093)]


async def test_canonical_lookup_gives_each_address_of_each_host_by_its_own_name() -> None:
    """CU-01."""
    dns = Dns(alias=["10.0.0.1", "10.0.0.2"], other=["10.0.0.2", "10.0.0.3"])
    dns.names = {"10.0.0.1": "kafka1", "10.0.0.2": "kafka2"}
    nodes = await make("alias:9092", "other:9092", dns=dns, lookup=CANONICAL).nodes(1.0)
    assert [(node.host, node.port) for node in nodes] == [
        ("kafka1", 9092),
        ("kafka2", 9092),
        ("10.0.0.3", 9092),
    ]


async def test_canonical_lookup_skips_hosts_without_an_address() -> None:
    """CU-01."""
    bootstrap = make("bad:9092", "good:9092", dns=Dns(good=["10.0.0.1"]), lookup=CANONICAL)
    assert [node.host for node in await bootstrap.nodes(1.0)] == ["10.0.0.1"]


async def test_canonical_lookup_tries_again_while_no_host_has_an_address() -> None:
    """CU-01."""
    loop = asyncio.get_running_loop()
    dns = Dns()
    bootstrap = make("late:9092", dns=dns, lookup=CANONICAL)
    loop.call_later(1.0, dns.hosts.__setitem__, "late", ["10.0.0.1"])
    assert len(await bootstrap.nodes(60.0)) == 1
    assert 1.0 < loop.time() < 3.0


async def test_canonical_lookup_gives_up_at_the_deadline() -> None:
    """CU-01."""
    bootstrap = make("one:9092", "[::1]:9092", lookup=CANONICAL)
    with pytest.raises(ConnectionFailed) as caught:
        await bootstrap.nodes(5.0)
    assert "  one:9092: cannot resolve one" in str(caught.value)
    assert "  [::1]:9092: cannot resolve ::1" in str(caught.value)
    assert 3.0 < asyncio.get_running_loop().time() <= 5.0


async def test_a_lookup_that_hangs_ends_at_the_deadline() -> None:
    class Hanging(Dns):
        async def resolve(self, host: str, port: int) -> list[Address]:
            await asyncio.sleep(1000.0)
            raise AssertionError

    with pytest.raises(ConnectionFailed):
        await make("one:9092", dns=Hanging(), lookup=CANONICAL).nodes(5.0)
    assert asyncio.get_running_loop().time() == 5.0


async def test_the_reverse_lookup_of_the_system_is_the_default() -> None:
    bootstrap = Bootstrap(
        ProducerConfig(bootstrap_servers=("alias:9092",), client_dns_lookup=CANONICAL),
        cast("Connector", Dns(alias=["192.0.2.1"])),  # TEST-NET-1: no name for it anywhere
        backoff=ExponentialBackoff(0.05, 1.0, random=lambda: 0.5),
        loop=asyncio.get_running_loop(),
    )
    assert await bootstrap.nodes(60.0) == [Node(-1, "192.0.2.1", 9092)]


async def test_the_error_has_the_newest_reason_of_each_address() -> None:
    bootstrap = make("one:9092", "two:9092", "[::1]:9092")
    one, two, _ = await bootstrap.nodes(0.0)
    last = ConnectionFailed("no route")
    bootstrap.note(one, ConnectionFailed("refused"))
    bootstrap.note(two, ConnectionFailed("closed"))
    bootstrap.note(one, last)
    bootstrap.note(Node(1, "two", 9092), ConnectionFailed("of a real broker, not of interest"))
    error = bootstrap.unreachable(12.34)
    assert str(error) == (
        "no Kafka broker could be reached within 12.3 s:\n"
        "  one:9092: no route\n"
        "  two:9092: closed\n"
        "  [::1]:9092: no answer yet"
    )
    assert error.__cause__ is last


async def test_it_is_hopeless_only_when_no_address_can_ever_work() -> None:
    bootstrap = make("one:9092", "two:9092")
    one, two = await bootstrap.nodes(0.0)
    seen = [bootstrap.hopeless]
    bootstrap.note(one, ProtocolError("this is HTTP"))
    seen.append(bootstrap.hopeless)
    bootstrap.note(two, ConnectionFailed("refused"))
    seen.append(bootstrap.hopeless)
    untrusted = ConnectionFailed("certificate not trusted")
    untrusted.retriable = False
    bootstrap.note(two, untrusted)
    seen.append(bootstrap.hopeless)
    assert seen == [False, False, False, True]
