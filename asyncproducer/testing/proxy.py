"""A TCP proxy before real brokers, in which things go wrong by plan.

    plan = FaultPlan([ProxyFault(kind="cut_after", chance=0.01, times=None)], seed=7)
    async with FaultProxy(cluster.bootstrap_servers, plan) as proxy:
        async with Producer(proxy.bootstrap_servers) as producer:
            ...
    print(proxy.replay().to_json())    # the same faults again, without any chance

It passes frames on, request by request and answer by answer, so a fault happens at an exact
place: before a broker has the request, or after it has answered and nobody hears of it. That is
the difference between "certainly not in the log" and "maybe in the log".

Brokers tell their addresses in answers, and clients go there: past the proxy, if it did not put
addresses of its own into the answers that a producer asks for (Metadata, FindCoordinator, and
the leaders that Produce names).

Frames are read, so the connections must not be encrypted: PLAINTEXT and SASL_PLAINTEXT.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

from asyncproducer.testing.messages import (
    MalformedRequest,
    Message,
    decode_header,
    decode_response,
    encode_message,
)

__all__ = ["FaultPlan", "FaultProxy", "Injected", "Kind", "ProxyFault"]

Kind = Literal[
    "cut_before",
    "cut_after",
    "truncate_request",
    "truncate_answer",
    "delay",
    "throttle",
    "black_hole",
    "refuse",
]

_KINDS: tuple[str, ...] = get_args(Kind)

#: The requests that a plan may name, by API key.
_APIS = {
    0: "produce",
    3: "metadata",
    10: "find_coordinator",
    17: "sasl_handshake",
    18: "api_versions",
    22: "init_producer_id",
    24: "add_partitions_to_txn",
    25: "add_offsets_to_txn",
    26: "end_txn",
    28: "txn_offset_commit",
    36: "sasl_authenticate",
}

#: From which version on the answers to these requests have addresses of brokers in them.
_WITH_ADDRESSES = {0: 10, 3: 0, 10: 0}

#: Bytes that a throttled connection passes at once.
_SLICE = 4096

_Address: TypeAlias = tuple[str, int]
_Change: TypeAlias = Callable[[bytes], Awaitable["_Frame | None"]]


# -- the plan --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFault:
    """One rule: what goes wrong, with which requests, how often.

    kind: what happens to a request that the rule is applied to, or with it.

    - cut_before: the connection is reset, the broker has never seen the request.
    - cut_after: the broker has answered, the connection is reset before the answer is passed on.
    - truncate_request, truncate_answer: half of the frame is passed on, then the connection ends.
    - delay: the answer comes `seconds` later, and all others of the connection behind it.
    - throttle: the connection passes `bytes_per_second` each way, for `seconds`.
    - black_hole: all connections to this broker, and those that are made within `seconds`, are
      open and dead: what is sent disappears, and no answer comes ever.
    - refuse: all connections to this broker are reset, new ones are refused, for `seconds`.

    api: "produce", "metadata", "init_producer_id" ..., None for any. node: a broker's id, None
    for any. after: so many matching requests pass first. chance: of each one after these.
    times: at most, None for no limit.

    Raises ValueError for what cannot be.
    """

    kind: Kind
    api: str | None = "produce"
    node: int | None = None
    after: int = 0
    chance: float = 1.0
    times: int | None = 1
    seconds: float = 1.0
    bytes_per_second: int = 10_000

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, _KINDS)
        if self.api is not None:
            _one_of("api", self.api, tuple(_APIS.values()))
        _within("node", self.node, int, 0, optional=True)
        _within("after", self.after, int, 0)
        _within("chance", self.chance, float, 0, 1)
        _within("times", self.times, int, 1, optional=True)
        _within("seconds", self.seconds, float, 0)
        _within("bytes_per_second", self.bytes_per_second, int, 1)


def _one_of(name: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"{name}={given!r}: it must be one of {', '.join(known)}")


def _within(
    name: str,
    given: Any,
    kind: type,
    low: int,
    high: int | None = None,
    *,
    optional: bool = False,
) -> None:
    if given is None and optional:
        return
    number = isinstance(given, (int, kind)) and not isinstance(given, bool)
    if not number or not low <= given <= (given if high is None else high):
        what = "a whole number" if kind is int else "a number"
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}={given!r}: it must be {what}, {limits}")


@dataclasses.dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rules, asked in this order: the first one that fires is applied to a request, no other.

    Each rule has its own random numbers, from `seed` and its place, and counts the requests that
    match it: the same requests in the same order meet the same faults.
    """

    faults: tuple[ProxyFault, ...] = ()
    seed: int = 0

    def __init__(self, faults: Iterable[ProxyFault] = (), seed: int = 0) -> None:
        _within("seed", seed, int, 0)
        object.__setattr__(self, "faults", tuple(faults))
        object.__setattr__(self, "seed", seed)

    @classmethod
    def mixed(cls, seed: int = 0) -> FaultPlan:
        """Every kind of fault: once with the first requests, then with those that chance chooses.

        A dozen Produce requests meet all kinds. The black hole among them lasts until
        `request_timeout_ms` is over.
        """
        often = [
            ProxyFault(kind="cut_before", chance=0.02, times=4),
            ProxyFault(kind="cut_after", chance=0.02, times=4),
            ProxyFault(kind="truncate_request", chance=0.01, times=2),
            ProxyFault(kind="truncate_answer", chance=0.01, times=2),
            ProxyFault(kind="delay", chance=0.02, times=4, seconds=0.2),
            ProxyFault(kind="throttle", chance=0.01, times=1, bytes_per_second=100_000),
            ProxyFault(kind="refuse", chance=0.01, times=1),
            ProxyFault(kind="black_hole", chance=0.01, times=1),
        ]
        once = [
            dataclasses.replace(fault, after=place, chance=1.0, times=1)
            for place, fault in enumerate(often)
        ]
        others = [
            ProxyFault(kind="cut_after", api="metadata", chance=0.2, times=2),
            ProxyFault(kind="cut_after", api="init_producer_id"),
        ]
        # The second black hole would cost another half minute, and show nothing new.
        return cls([*once, *often[:-1], *others], seed)

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """A plan from `{"seed": 7, "faults": [{"kind": "cut_after", "chance": 0.01}, ...]}`.

        Raises ValueError that says what is wrong and where.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or not document.keys() <= {"seed", "faults"}:
            raise ValueError('a plan is an object with "faults", a list, and "seed", a number')
        rules = document.get("faults", [])
        if not isinstance(rules, list):
            raise ValueError('"faults" must be a list of objects')
        known = [field.name for field in dataclasses.fields(ProxyFault)]
        faults = []
        for number, rule in enumerate(rules):
            try:
                if not isinstance(rule, dict) or "kind" not in rule:
                    raise ValueError('it must be an object with at least a "kind"')
                for name in rule:
                    _one_of("field", name, tuple(known))
                faults.append(ProxyFault(**rule))
            except ValueError as error:
                raise ValueError(f"fault {number}: {error}") from None
        return cls(faults, document.get("seed", 0))

    def to_json(self) -> str:
        """The plan as `from_json` takes it."""
        return json.dumps({"seed": self.seed, "faults": [_told(fault) for fault in self.faults]})


def _told(fault: ProxyFault) -> dict[str, Any]:
    """What differs from the defaults, and the kind."""
    return {
        field.name: value
        for field in dataclasses.fields(fault)
        if (value := getattr(fault, field.name)) != field.default
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """A fault that has happened: when (seconds since the proxy's start), to which broker.

    `fault` is the rule that does the same again, without chance.
    """

    at: float
    node: int | None
    fault: ProxyFault


class _Met(NamedTuple):
    """A request has met a rule, which does this to it."""

    rule: _Rule
    fault: ProxyFault


class _Rule:
    def __init__(self, fault: ProxyFault, rng: random.Random) -> None:
        self.fault = fault
        self._rng = rng
        self._seen = 0
        self._hits = 0

    def take(self, api: str | None, node: int | None, *, taken: bool) -> _Met | None:
        """The exact fault if this request meets it; `taken`: another rule was first."""
        fault = self.fault
        if fault.api not in (None, api) or fault.node not in (None, node):
            return None
        self._seen += 1
        if self._seen <= fault.after or self._rng.random() >= fault.chance:
            return None
        if taken or (fault.times is not None and self._hits >= fault.times):
            return None
        self._hits += 1
        return _Met(self, dataclasses.replace(fault, after=self._seen - 1, chance=1.0, times=1))

    def give_back(self) -> None:
        """The answer that the fault was for did not come."""
        self._hits -= 1


# -- the proxy -------------------------------------------------------------------------------


class FaultProxy:
    """An async context manager. `servers` are "host:port,..."; all times are of its loop.

    `latency`: seconds by which each request and each answer is held back; whatever arrives
    meanwhile is held back beside it, so that throughput is not limited. (Connecting takes no
    longer: a handshake of TCP is answered at once.)

    A broker that is down looks a little different through it: a connection is accepted, and
    ends at once. Raises ValueError for addresses that are none.
    """

    def __init__(
        self, servers: str, plan: FaultPlan | None = None, *, latency: float = 0.0
    ) -> None:
        plan = plan or FaultPlan()
        self.latency = latency
        #: What has gone wrong so far.
        self.injected: list[Injected] = []
        self._seed = plan.seed
        self._seeds = [_address(server) for server in servers.split(",")]
        self._rules: list[_Rule] = []
        self._gates: dict[_Address, _Gate] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._node_ids: dict[_Address, int] = {}
        self._began = 0.0
        self._news = asyncio.Event()
        for fault in plan.faults:
            self.inject(fault)

    async def __aenter__(self) -> Self:
        self._began = asyncio.get_running_loop().time()
        try:
            for seed in self._seeds:
                await self._gate(seed)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for gate in self._gates.values():
            gate.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients go instead of `servers`."""
        return ",".join(f"{_HOST}:{self._gates[seed].port}" for seed in self._seeds)

    @property
    def counts(self) -> dict[str, int]:
        """How many faults of each kind have happened."""
        return dict(Counter(injected.fault.kind for injected in self.injected))

    def inject(self, fault: ProxyFault) -> None:
        """One more rule, behind those that are there. Takes effect with the next request."""
        rng = random.Random(f"{self._seed}/{len(self._rules)}")
        self._rules.append(_Rule(fault, rng))

    def clear(self) -> None:
        """Removes all rules. What they have begun goes on for its time."""
        self._rules.clear()

    async def happened(self, count: int) -> None:
        """Waits until so many faults have happened in all. Cancelling does no harm."""
        while len(self.injected) < count:
            self._news.clear()
            await self._news.wait()

    def replay(self) -> FaultPlan:
        """A plan with just the faults that have happened, each with the request that it met."""
        return FaultPlan([injected.fault for injected in self.injected], self._seed)

    # -- what the connections ask

    def _met(self, address: _Address, api_key: int) -> _Met | None:
        """The fault that this request meets."""
        api = _APIS.get(api_key)
        node = self._node_ids.get(address)
        met: _Met | None = None
        for rule in self._rules:
            met = rule.take(api, node, taken=met is not None) or met
        return met

    def _note(self, address: _Address, fault: ProxyFault) -> None:
        at = asyncio.get_running_loop().time() - self._began
        self.injected.append(Injected(round(at, 3), self._node_ids.get(address), fault))
        self._news.set()

    async def _gate(self, address: _Address) -> _Gate:
        """Where this broker is reached through the proxy; listens there from the first call on."""
        gate = self._gates.get(address)
        if gate is None:
            gate = self._gates[address] = _Gate(self, address)
            await gate.open()
        return gate

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _through_us(self, api_key: int, version: int, frame: bytes) -> bytes:
        """The answer with our addresses in the place of the brokers'."""
        correlation_id, message = decode_response(api_key, version, frame[4:])
        changed = message
        for name in ("brokers", "node_endpoints", "coordinators"):
            if nodes := getattr(message, name, ()):
                ours = tuple([await self._moved(node) for node in nodes])
                changed = dataclasses.replace(changed, **{name: ours})
        if hasattr(message, "host"):
            changed = await self._moved(changed)
        return frame if changed is message else encode_message(correlation_id, changed)

    async def _moved(self, node: Message) -> Message:
        if node.port <= 0:  # a coordinator that is not known
            return node
        address = (node.host, node.port)
        self._node_ids[address] = node.node_id
        gate = await self._gate(address)
        return dataclasses.replace(node, host=_HOST, port=gate.port)


_HOST = "127.0.0.1"


def _address(server: str) -> _Address:
    host, _, port = server.strip().rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{server!r} is not host:port")
    return host.strip("[]"), int(port)


class _Gate:
    """Where one broker is reached: a listening port, and the connections through it."""

    def __init__(self, proxy: FaultProxy, address: _Address) -> None:
        self.proxy = proxy
        self.address = address
        self.port = 0
        #: Until then, new connections are dead.
        self.dark_until = 0.0
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, _HOST, self.port, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def black_hole(self, seconds: float) -> None:
        self.dark_until = asyncio.get_running_loop().time() + seconds
        for connection in self.connections:
            connection.go_dark()

    def refuse(self, seconds: float) -> None:
        self.close()
        for connection in list(self.connections):
            connection.cut()
        self.proxy._spawn(self._open_again(seconds))

    async def _open_again(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._server is None:
            await self.open()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self.connections.add(connection)
        if asyncio.get_running_loop().time() < self.dark_until:
            connection.go_dark()
        self.proxy._spawn(connection.serve())


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """Something to be passed on. `ends`: the connection ends behind it."""

    data: bytes
    extra_delay: float = 0.0
    ends: bool = False


#: Frames under way, each with the time when it is due; None at the end.
_Line: TypeAlias = asyncio.Queue[tuple[float, _Frame] | None]


class _Connection:
    """One connection of a client, and the one to the broker that belongs to it."""

    def __init__(
        self, gate: _Gate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._gate = gate
        self._proxy = gate.proxy
        self._reader = reader
        self._writer = writer
        self._far_writer: asyncio.StreamWriter | None = None
        #: Requests without an answer: correlation id -> API key, version, fault of the answer.
        self._asked: dict[int, tuple[int, int, _Met | None]] = {}
        self._bytes_per_second = 0
        self._throttled_until = 0.0
        self._dark = False
        self._pumping: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        try:
            if not self._dark:
                self._pumping = asyncio.ensure_future(self._pump())
                await asyncio.wait([self._pumping])
                if not self._pumping.cancelled():
                    self._pumping.exception()
            if self._dark:
                while await self._reader.read(2**16):
                    pass  # it disappears
        except OSError:
            pass
        finally:
            if self._pumping is not None:
                self._pumping.cancel()
            self._gate.connections.discard(self)
            for _, _, met in self._asked.values():
                if met is not None:
                    met.rule.give_back()
            self._writer.close()
            if self._far_writer is not None:
                self._far_writer.close()

    def go_dark(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._dark = True
        if self._pumping is not None:
            self._pumping.cancel()

    def cut(self) -> None:
        """Resets both sides."""
        for writer in (self._writer, self._far_writer):
            if writer is not None:
                writer.transport.abort()

    async def _pump(self) -> None:
        far_reader, self._far_writer = await asyncio.open_connection(
            *self._gate.address, limit=2**20
        )
        with contextlib.suppress(OSError):
            async with asyncio.TaskGroup() as group:
                for source, sink, change in (
                    (self._reader, self._far_writer, self._request),
                    (far_reader, self._writer, self._answer),
                ):
                    line: _Line = asyncio.Queue()
                    group.create_task(self._take(source, line, change))
                    group.create_task(self._give(line, sink))

    async def _take(self, source: asyncio.StreamReader, line: _Line, change: _Change) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                prefix = await source.readexactly(4)
                data = prefix + await source.readexactly(int.from_bytes(prefix, "big"))
                arrived = loop.time()
                frame = await change(data)
                if frame is None:
                    return
                line.put_nowait((arrived + self._proxy.latency + frame.extra_delay, frame))
                if frame.ends:
                    return
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            line.put_nowait(None)  # however it ends: who passes it on must hear of it

    async def _give(self, line: _Line, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (item := await line.get()) is not None:
            due, frame = item
            await asyncio.sleep(due - loop.time())
            data = memoryview(frame.data)
            while data and loop.time() < self._throttled_until:
                sink.write(data[:_SLICE])
                await sink.drain()  # raises if nobody reads any more
                await asyncio.sleep(len(data[:_SLICE]) / self._bytes_per_second)
                data = data[_SLICE:]
            sink.write(data)
            await sink.drain()
            if frame.ends:
                break
        sink.close()

    async def _request(self, data: bytes) -> _Frame | None:
        """What becomes of a request; None: nothing more of this connection."""
        try:
            header = decode_header(data[4:12])
        except MalformedRequest:  # a bare SASL token
            return _Frame(data)
        met = self._proxy._met(self._gate.address, header.api_key)
        of_answer = met is not None and met.fault.kind in ("cut_after", "truncate_answer", "delay")
        self._asked[header.correlation_id] = (
            header.api_key,
            header.api_version,
            met if of_answer else None,
        )
        if met is None or of_answer:
            return _Frame(data)
        fault = met.fault
        kind = fault.kind
        self._proxy._note(self._gate.address, fault)
        if kind == "throttle":
            now = asyncio.get_running_loop().time()
            self._bytes_per_second = fault.bytes_per_second
            self._throttled_until = now + fault.seconds
            return _Frame(data)
        if kind == "truncate_request":
            return _Frame(data[: len(data) // 2], ends=True)
        if kind == "black_hole":
            self._gate.black_hole(fault.seconds)
        elif kind == "refuse":
            self._gate.refuse(fault.seconds)
        else:
            self.cut()
        return None

    async def _answer(self, data: bytes) -> _Frame | None:
        correlation_id = int.from_bytes(data[4:8], "big", signed=True)
        if correlation_id not in self._asked:  # a bare SASL token
            return _Frame(data)
        # Answers keep the order of the requests: those before it will not be answered (acks=0).
        while (oldest := next(iter(self._asked))) != correlation_id:
            del self._asked[oldest]
        api_key, version, met = self._asked.pop(correlation_id)
        if version >= _WITH_ADDRESSES.get(api_key, version + 1):
            data = await self._proxy._through_us(api_key, version, data)
        if met is None:
            return _Frame(data)
        fault = met.fault
        self._proxy._note(self._gate.address, fault)
        if fault.kind == "delay":
            return _Frame(data, extra_delay=fault.seconds)
        if fault.kind == "truncate_answer":
            return _Frame(data[: len(data) // 2], ends=True)
        self.cut()
        return None
