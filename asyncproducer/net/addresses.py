"""The IP addresses behind a broker's name, in turn."""

from __future__ import annotations

from collections.abc import Sequence

from asyncproducer.net.transport import Address

__all__ = ["AddressRotation"]


class AddressRotation:
    """The IP addresses of one broker, tried in turn (KIP-302, KIP-602).

    Each attempt takes the next address. When all were tried, or after an established
    connection was lost, the name is resolved again: the broker may have moved.
    """

    __slots__ = ("_addresses", "_last")

    def __init__(self) -> None:
        self._addresses: list[Address] = []
        self._last: Address | None = None

    @property
    def exhausted(self) -> bool:
        """Whether the name is to be resolved before the next attempt."""
        return not self._addresses

    def resolved(self, addresses: Sequence[Address]) -> None:
        """Begin with these. The one that was tried last comes not first, if there are others."""
        self._addresses = list(addresses)
        if len(addresses) > 1 and addresses[0] == self._last:
            del self._addresses[0]

    def take(self) -> Address:
        """The address for the next attempt."""
        self._last = self._addresses.pop(0)
        return self._last

    def forget(self) -> None:
        """An established connection was lost: resolve again."""
        self._addresses = []
