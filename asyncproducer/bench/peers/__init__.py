"""Who is measured, and the face that each peer shows to the loads.

A worker process imports the module of its own peer only. All get the same acks=all,
idempotence, linger and codec; what a case does not name is each one's default.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asyncproducer.bench.workloads import ALL, Case, Load

__all__ = [
    "PEERS",
    "Job",
    "Peer",
    "PeerKind",
    "Plain",
    "Result",
    "Send",
    "environment",
    "load_peer",
]

#: What a measurement found: numbers by metric, and "version".
Result: TypeAlias = dict[str, Any]

#: Takes topic and value, and perhaps key=, headers= or partition=; awaited by those that are not
#: blocking.
Send: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """What a worker process is told."""

    peer: str
    servers: str
    topics: tuple[str, ...]
    case: Case
    #: For the wire replay: what the batches of this producer were like on average.
    batch_bytes: float = 0.0
    batches_per_request: float = 0.0


class Peer(Protocol):
    """A producer behind the calls that the loads need."""

    version: str
    #: Whether its calls block instead of being awaited.
    blocking: bool
    #: From `start` on: buffers a value of a topic. Awaited, it gives the future of its
    #: acknowledgement. The producer's own method, where that does it.
    enqueue: Send

    async def start(self, job: Job) -> None:
        """Connects, and asks for what the first records would wait for."""
        ...

    def enqueue_all(self, topic: str, values: Sequence[Any], given: Mapping[str, Any]) -> None:
        """Only where it blocks: buffers all of them, by the loop that a user would write."""
        ...

    def send_to(self, topic: str) -> Callable[[Any], Awaitable[Any]]:
        """A function that, awaited with a value, returns when it is acknowledged."""
        ...

    def watch(self, topic: str) -> Callable[[Any, Callable[[], object]], Any]:
        """A function that buffers a value, and has the other argument called at its end."""
        ...

    def serve(self, seconds: float) -> None:
        """Only where it blocks: lets so much time pass, and has callbacks called."""
        ...

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        """A function that takes a list of values in one call, awaited by those that are not
        blocking. None: it has none."""
        ...

    async def begin(self) -> None:
        """Begins a transaction, where the case has them."""
        ...

    async def commit(self, offset: int | None) -> None:
        """Returns when the transaction is committed, with this offset of GROUP in the topic."""
        ...

    async def flush(self) -> None:
        """Returns when all that was buffered is acknowledged."""
        ...

    async def stop(self) -> None:
        """Closes it."""
        ...

    def statistics(self) -> Result:
        """What it tells of its batches, under the names of the results."""
        ...


class Plain:
    """What a peer inherits that has neither lists nor transactions here."""

    def send_list_to(self, topic: str) -> Callable[[list[Any]], Any] | None:
        """It has none."""
        return None

    async def begin(self) -> None:
        """See Peer."""
        raise NotImplementedError

    async def commit(self, offset: int | None) -> None:
        """See Peer."""
        raise NotImplementedError


_FUTURES: tuple[Load, ...] = ("flood", "burst", "loop", "rate", "exhaust", "rows", "lists")
_SENDING: tuple[Load, ...] = ("flood", "burst", "loop", "rate")
_BLOCKING: tuple[Load, ...] = ("flood", "rate", "rows", "lists")


@dataclass(frozen=True)
class PeerKind:
    """A row of the table of the peers."""

    module: str
    #: The class with the methods of Peer, or the function that does the whole measurement.
    name: str
    loads: tuple[Load, ...]
    #: The module measures by itself: it is not driven by our loads.
    whole: bool = False
    uvloop: bool = False
    transactional: bool = False
    #: Whether it has an option for the codec's level.
    levels: bool = False
    most_tasks: int = 1_000_000
    environment: dict[str, str] = field(default_factory=dict)
    #: The modules of others without which it is not there.
    needs: tuple[str, ...] = ()
    #: The variable that names the directory from which `asyncproducer` is imported; "": this one.
    checkout: str = ""

    def can(self, case: Case) -> bool:
        """Whether it has what the case needs."""
        if self.whole and not case.plain:
            return False
        if case.transactional and not self.transactional:
            return False
        if case.level is not None and not self.levels:
            return False
        if self.module == "replay" and (case.codec != "none" or case.tasks > 1):
            return False
        return case.load in self.loads and case.tasks <= self.most_tasks


_OURS: tuple[Load, ...] = (*_FUTURES, "many", "table")
_COMPILED = {"ASYNCPRODUCER_IMPL": "compiled"}

PEERS: dict[str, PeerKind] = {
    "asyncproducer": PeerKind(
        "peers.ours", "Ours", _OURS, transactional=True, levels=True, environment=_COMPILED
    ),
    "asyncproducer-uvloop": PeerKind(
        *("peers.ours", "Ours", _OURS),
        transactional=True,
        levels=True,
        uvloop=True,
        needs=("uvloop",),
        environment=_COMPILED,
    ),
    "asyncproducer-python": PeerKind(
        *("peers.ours", "Ours", _OURS),
        transactional=True,
        levels=True,
        environment={"ASYNCPRODUCER_IMPL": "python"},
    ),
    "aiokafka": PeerKind(
        *("peers.aiokafka", "AioKafka", _FUTURES),
        transactional=True,
        most_tasks=8_000,
        needs=("aiokafka",),
    ),
    "aiokafka-uvloop": PeerKind(
        *("peers.aiokafka", "AioKafka", _FUTURES),
        transactional=True,
        most_tasks=8_000,
        uvloop=True,
        needs=("aiokafka", "uvloop"),
    ),
    "confluent": PeerKind(
        *("peers.confluent", "Confluent", _BLOCKING),
        transactional=True,
        levels=True,
        needs=("confluent_kafka",),
    ),
    "confluent-aio": PeerKind(
        "peers.confluent", "ConfluentAio", _SENDING, levels=True, needs=("confluent_kafka",)
    ),
    "kafka-python": PeerKind("peers.kafka_python", "KafkaPython", _BLOCKING, needs=("kafka",)),
    "java": PeerKind(
        "peers.java", "measure", ("flood",), whole=True, transactional=True, levels=True
    ),
    "wire-replay": PeerKind("replay", "measure", ("flood", "loop"), whole=True),
    "asyncproducer-before": PeerKind(
        *("peers.ours", "Ours", _OURS),
        transactional=True,
        levels=True,
        environment=_COMPILED,
        checkout="ASYNCPRODUCER_BEFORE",
    ),
}
# Who wants another state of this producer to be measured has to say which.
assert tuple(PEERS) == (*ALL, "asyncproducer-before")


def environment(peer: str) -> dict[str, str]:
    """The environment of the worker process of a peer.

    Raises ValueError if the peer is in another checkout, and that is not there.
    """
    kind = PEERS[peer]
    found = {**os.environ, **kind.environment}
    if kind.checkout:
        path = Path(os.environ.get(kind.checkout, ""))
        if not Path(path, "asyncproducer", "bench", "worker.py").is_file():
            raise ValueError(
                f"{peer} needs {kind.checkout}: the directory of a compiled checkout that has this "
                f"one's asyncproducer/bench, not {str(path)!r}"
            )
        # Safe: what the command was started in must not come before it.
        found |= {"PYTHONPATH": str(path.resolve()), "PYTHONSAFEPATH": "1"}
    return found


def load_peer(peer: str) -> Any:
    """The class or function of a peer. ImportError if its library is not installed."""
    kind = PEERS[peer]
    return getattr(import_module(f"asyncproducer.bench.{kind.module}"), kind.name)
