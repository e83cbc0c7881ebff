"""What a handler is, and the table of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from asyncproducer.testing.faults import Fault, Injection, ReceivedRequest
from asyncproducer.testing.groups import Groups
from asyncproducer.testing.messages import Message, Response
from asyncproducer.testing.state import ClusterState, CoordinatorKind, RequestRefused
from asyncproducer.testing.transactions import Transactions

__all__ = ["APIS", "Api", "Call", "CloseConnection", "Handler", "api", "topic_name"]


class CloseConnection(Exception):
    """The only answer that is left is to close the connection."""


@dataclasses.dataclass(slots=True)
class Call:
    """A request on its way through its handler, and the world around it."""

    request: ReceivedRequest
    state: ClusterState
    groups: Groups
    transactions: Transactions
    fault: Fault | None
    #: The cluster's clock: ms since 1970.
    now_ms: Callable[[], int]
    #: What ApiVersions advertises: API key -> (lowest, highest version).
    versions: Mapping[int, tuple[int, int]]

    @property
    def body(self) -> Message:
        """The request's message, of kio."""
        return self.request.body

    @property
    def version(self) -> int:
        """The version of request and response."""
        return self.request.version

    @property
    def node_id(self) -> int:
        """The node that was asked."""
        return self.request.node_id

    def injected(self, topic: str | None = None, partition: int | None = None) -> Injection | None:
        """The error that a fault wants for this part of the request."""
        return None if self.fault is None else self.fault.injected(topic, partition)

    def refuse_injected(self, topic: str | None = None, partition: int | None = None) -> None:
        """Raises RequestRefused where a fault wants it."""
        if (injected := self.injected(topic, partition)) is not None:
            raise RequestRefused(injected.code, injected.message or "")

    @contextmanager
    def effect(self, topic: str | None = None, partition: int | None = None) -> Iterator[None]:
        """Around what this part of the request does.

        Where a fault wants it, it is not done, or its success is not told: RequestRefused.
        """
        injected = self.injected(topic, partition)
        if injected is None or injected.after_append:
            yield
        self.refuse_injected(topic, partition)

    def check_coordinator(self, kind: CoordinatorKind, key: str) -> None:
        """Raises RequestRefused unless the node that was asked is in charge."""
        self.state.check_coordinator(kind, key, self.node_id)


#: Returns the response without its throttle time, or None where there is no answer
#: (acks=0). Raises CloseConnection. Only a handler that waits is async.
Handler: TypeAlias = Callable[[Call], Response | Awaitable[Response | None] | None]

#: The topics and partitions that a request names: what faults are matched with.
Touches: TypeAlias = Callable[[ClusterState, Message], Iterator[tuple[str | None, int | None]]]


class Api(NamedTuple):
    """One API: its key, its name, the versions that its handler can do."""

    key: int
    name: str
    min_version: int
    max_version: int
    handle: Handler
    touches: Touches | None
    #: What ApiVersions says to be the lowest version, where that is not the truth.
    advertised_min_version: int
    #: The highest one, unless the cluster is told to offer more.
    advertised_max_version: int


APIS: dict[int, Api] = {}


def api(
    key: int,
    name: str,
    min_version: int,
    max_version: int,
    *,
    touches: Touches | None = None,
    advertised_min_version: int | None = None,
    advertised_max_version: int | None = None,
) -> Callable[[Handler], Handler]:
    """Puts a handler into the table."""

    def register(handler: Handler) -> Handler:
        lowest = min_version if advertised_min_version is None else advertised_min_version
        highest = max_version if advertised_max_version is None else advertised_max_version
        APIS[key] = Api(key, name, min_version, max_version, handler, touches, lowest, highest)
        return handler

    return register


def topic_name(state: ClusterState, item: Message, field: str = "name") -> str | None:
    """The name of a topic in a request, which newer versions identify by its id."""
    if hasattr(item, field) and getattr(item, field) is not None:
        return str(getattr(item, field))
    try:
        return state.topic_by_id(item.topic_id).name
    except RequestRefused:
        return None
