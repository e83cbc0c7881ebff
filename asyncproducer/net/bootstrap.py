"""`bootstrap_servers`: the nodes to begin with, and why none of them could be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from asyncproducer.core.metadata import Node
from asyncproducer.errors import ConnectionFailed, KafkaError, ProtocolError
from asyncproducer.logs import guarded

if TYPE_CHECKING:
    from asyncproducer.config import ProducerConfig
    from asyncproducer.core.backoff import ExponentialBackoff
    from asyncproducer.net.transport import Address, Connector

__all__ = ["Bootstrap", "CanonicalName"]

logger = guarded("asyncproducer.net.cluster")

CanonicalName = Callable[["Address"], Awaitable[str]]


class Bootstrap:
    """The configured addresses, and what went wrong last with each of them.

    With `client_dns_lookup=resolve_canonical_bootstrap_servers_only` each IP address of
    each host counts by its own name from DNS (KIP-302): Kerberos needs the real names
    behind an alias. Else the names are taken as they are, and resolved when we connect.
    """

    def __init__(
        self,
        config: ProducerConfig,
        connector: Connector,
        *,
        backoff: ExponentialBackoff,
        loop: asyncio.AbstractEventLoop,
        canonical_name: CanonicalName | None = None,
    ) -> None:
        self._config = config
        self._connector = connector
        self._backoff = backoff
        self._loop = loop
        self._canonical_name = canonical_name or _reverse_lookup
        self._addresses = list(config.bootstrap_servers)
        # The newest comes last.
        self._reasons: dict[str, BaseException] = {}

    async def nodes(self, deadline: float) -> list[Node]:
        """The nodes to begin with. Their ids are -1, -2, ...: no broker has such an id.

        Raises: ConnectionFailed when no canonical name was found until `deadline`.
        """
        addresses = [_split(text) for text in self._config.bootstrap_servers]
        if self._config.client_dns_lookup == "resolve_canonical_bootstrap_servers_only":
            addresses = await self._canonical(addresses, deadline)
            self._addresses = [_join(*address) for address in addresses]
        return [Node(-1 - index, host, port) for index, (host, port) in enumerate(addresses)]

    def note(self, node: Node, error: BaseException) -> None:
        """This happened when the node was tried. Nodes that are brokers are not of interest."""
        if node.node_id < 0:
            self._note(_join(node.host, node.port), error)

    @property
    def hopeless(self) -> bool:
        """Whether each address has something else than a Kafka broker for us behind it."""
        return all(
            _is_final(self._reasons[text]) if text in self._reasons else False
            for text in self._addresses
        )

    def unreachable(self, elapsed: float) -> ConnectionFailed:
        """The error for whoever waits for the first broker: each address with its reason."""
        lines = [
            f"  {text}: {self._reasons.get(text, 'no answer yet')}" for text in self._addresses
        ]
        error = ConnectionFailed(
            f"no Kafka broker could be reached within {elapsed:.1f} s:\n" + "\n".join(lines)
        )
        error.__cause__ = next(reversed(self._reasons.values()), None)
        return error

    def _note(self, text: str, error: BaseException) -> None:
        self._reasons.pop(text, None)
        self._reasons[text] = error

    async def _canonical(
        self, addresses: Iterable[tuple[str, int]], deadline: float
    ) -> list[tuple[str, int]]:
        """Skips hosts that have no address, tries again when none has one."""
        started_at = self._loop.time()
        failures = 0
        while True:
            found: dict[tuple[str, int], None] = {}
            for host, port in addresses:
                try:
                    async with asyncio.timeout_at(deadline):
                        for address in await self._connector.resolve(host, port):
                            found[await self._canonical_name(address), port] = None
                except (KafkaError, OSError) as exc:
                    logger.warning("bootstrap server %s: %s", _join(host, port), exc)
                    self._note(_join(host, port), exc)
            if found:
                return list(found)
            retry_at = self._loop.time() + self._backoff.delay(failures)
            failures += 1
            if retry_at >= deadline:
                raise self.unreachable(self._loop.time() - started_at)
            await asyncio.sleep(retry_at - self._loop.time())


def _is_final(reason: BaseException) -> bool:
    return isinstance(reason, ProtocolError) or not getattr(reason, "retriable", True)


def _split(address: str) -> tuple[str, int]:
    """Host and port of an address in the form that ProducerConfig keeps."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _reverse_lookup(address: Address) -> str:
    """The name that DNS has for an address, or the address itself."""
    loop = asyncio.get_running_loop()
    host, _ = await loop.getnameinfo((address.host, address.port))
    return host
