"""Scripted faults: what a broker does wrong, to which requests, how often.

    fault = cluster.inject(api="produce", error="NOT_LEADER_OR_FOLLOWER", times=2)
    ...
    await fault.reached()          # the first of them has arrived
    assert fault.hits == 2

Rules are asked in the order in which they were made. The first one that matches a
request is applied to it, and no other. A rule may combine effects: an error, after a
delay, with a throttle time. They happen in this order:

    processed? -> hold -> delay -> drop | no_answer | answer (throttle, corrupt, truncate)

A fault may keep the request from being processed (an error, `drop="before"`,
`no_answer`) or not (`drop="after"`, `delay`, `throttle_ms`, `truncate`, `corrupt`, and
everything with `after_append`). That is the difference between "certainly not in the
log" and "maybe in the log", so it is always said.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from asyncproducer.errors import ErrorCode

__all__ = ["BatchSummary", "Fault", "Faults", "Injection", "ReceivedRequest"]

Drop = Literal["before", "after"]
Corruption = Literal["correlation_id", "garbage", "size"]


class BatchSummary(NamedTuple):
    """What a produce request had for one partition. All -1 where it was no batch."""

    topic: str | None
    partition: int
    size_bytes: int
    record_count: int = -1
    codec_id: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    is_transactional: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class ReceivedRequest:
    """A request that a node has received, as tests look at it."""

    node_id: int
    #: Numbers the connections of the cluster in the order of their arrival.
    connection_id: int
    #: The loop's time, in seconds.
    received_at: float
    #: "produce", "init_producer_id" ...
    api: str
    api_key: int
    version: int
    correlation_id: int
    #: Without the four bytes that tell it.
    size_bytes: int
    client_id: str | None = None
    #: Its fields that are neither arrays nor structures, by kio's names; times in ms.
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: The topics that it names, each with a partition or None. A topic that is not known
    #: by its id is None.
    partitions: Sequence[tuple[str | None, int | None]] = ()
    #: Of a produce request.
    batches: Sequence[BatchSummary] = ()
    #: Bytes behind the end of the request: 0, unless its writer is wrong.
    bytes_left_over: int = 0
    #: kio's message. None once a produce request is answered: the log of requests should
    #: not hold all records a second time.
    body: Any = dataclasses.field(default=None, repr=False)


class Injection(NamedTuple):
    """The error to answer for one topic, partition or request."""

    code: ErrorCode
    message: str | None
    record_errors: Sequence[tuple[int, str | None]]
    after_append: bool


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Fault:
    """One rule: whom it concerns, and what it does. `Faults.inject` makes it, and explains it."""

    faults: Faults
    api: str | None
    error: ErrorCode | None
    times: int | None
    topic: str | None
    partition: int | None
    node: int | None
    when: Callable[[ReceivedRequest], bool] | None
    delay: float
    hold: bool
    drop: Drop | None
    no_answer: bool
    after_append: bool
    throttle_ms: int
    truncate: int | None
    corrupt: Corruption | None
    record_errors: Sequence[tuple[int, str | None]]
    error_message: str | None
    #: How many requests it was applied to.
    hits: int = 0
    _released: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _waiting: list[tuple[int, asyncio.Future[None]]] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        shown = {
            "api": self.api,
            "error": None if self.error is None else self.error.name,
            "topic": self.topic,
            "partition": self.partition,
            "node": self.node,
            "times": self.times,
            "hits": self.hits,
        }
        return f"<Fault {' '.join(f'{k}={v}' for k, v in shown.items() if v is not None)}>"

    @property
    def used_up(self) -> bool:
        """Whether it was applied as often as it was meant to."""
        return self.times is not None and self.hits >= self.times

    @property
    def processes(self) -> bool:
        """Whether a request is processed at all, as far as there is no error for it."""
        return self.after_append or not (self.drop == "before" or self.no_answer)

    def remove(self) -> None:
        """Ends the rule, and releases what it holds. Without effect the second time."""
        self.faults.remove(self)
        self.release()

    def release(self) -> None:
        """Lets go of the requests that `hold` keeps, and of later ones."""
        self._released.set()

    async def released(self) -> None:
        """Waits while `hold` keeps requests."""
        if self.hold:
            await self._released.wait()

    async def reached(self, count: int = 1) -> None:
        """Waits until the rule has been applied to `count` requests in all.

        It may be answered by then, unless the rule says `hold`. Safe to cancel.
        """
        if self.hits < count:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((count, future))
            await future

    def matches(self, request: ReceivedRequest) -> bool:
        """Whether the rule concerns this request."""
        return (
            not self.used_up
            and self.api in (None, request.api)
            and self.node in (None, request.node_id)
            and self._matches_partitions(request.partitions)
            and (self.when is None or self.when(request))
        )

    def hit(self) -> None:
        """Counts a request, and wakes those in `reached`."""
        self.hits += 1
        for entry in tuple(self._waiting):
            count, future = entry
            if self.hits >= count:
                self._waiting.remove(entry)
                if not future.done():
                    future.set_result(None)

    def injected(self, topic: str | None = None, partition: int | None = None) -> Injection | None:
        """The error for this part of a request, None where it is to be treated as usual."""
        if (
            self.error is None
            or self.topic not in (None, topic)
            or self.partition not in (None, partition)
        ):
            return None
        return Injection(self.error, self.error_message, self.record_errors, self.after_append)

    def _matches_partitions(self, partitions: Sequence[tuple[str | None, int | None]]) -> bool:
        if self.topic is None and self.partition is None:
            return True
        return any(
            self.topic in (None, topic)
            and (partition is None or self.partition in (None, partition))
            for topic, partition in partitions
        )


class Faults:
    """The rules of one cluster, in order."""

    def __init__(self, api_names: Iterable[str]) -> None:
        self._api_names = {_plain(name): name for name in api_names}
        self._rules: list[Fault] = []

    def inject(
        self,
        api: str | None = None,
        *,
        error: str | int | None = None,
        times: int | None = 1,
        topic: str | None = None,
        partition: int | None = None,
        node: int | None = None,
        when: Callable[[ReceivedRequest], bool] | None = None,
        delay: float = 0.0,
        hold: bool = False,
        drop: Drop | None = None,
        no_answer: bool = False,
        after_append: bool = False,
        throttle_ms: int = 0,
        truncate: int | None = None,
        corrupt: Corruption | None = None,
        record_errors: Sequence[tuple[int, str | None]] = (),
        error_message: str | None = None,
    ) -> Fault:
        """Adds a rule. Raises ValueError for an unknown API or error, and for nonsense.

        Which requests: `api` by name ("produce", "InitProducerId"; None is every one),
        `node`, `topic`, `partition` (those that name it, at least), `when` (all of them
        must agree). `times`: how many requests, None without end.

        What happens, apart from waiting nothing by default:
        - `error`: this code (name or number) is answered, with `error_message` and
          `record_errors` where the API has them, for the topic and partition given, or
          for all of the request. Nothing is done for them, unless `after_append`: then it
          is done, be it an append, an end of a transaction, or whatever the API does.
        - `delay`: seconds between processing and answer. `hold`: until `release()`.
        - `drop`: the connection is closed "before" the request is processed or "after".
        - `no_answer`: nothing is answered, and nothing more on this connection, which
          stays open. The request is not processed, unless `after_append`.
        - `throttle_ms`: goes into the answer, and the connection is silent so long (KIP-219).
        - `truncate`: only so many bytes of the answer are sent, then the connection closes.
        - `corrupt`: the answer has another "correlation_id", "garbage" behind its header,
          or an impossible "size".
        """
        if times is not None and times < 1:
            raise ValueError(f"times={times}: a rule is applied once at least")
        if delay < 0 or throttle_ms < 0 or (truncate is not None and truncate < 0):
            raise ValueError("delay, throttle_ms and truncate cannot be negative")
        for name, value, known in (
            ("drop", drop, (None, "before", "after")),
            ("corrupt", corrupt, (None, "correlation_id", "garbage", "size")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}: it is one of {known}")
        fault = Fault(
            faults=self,
            api=self._api_name(api),
            error=None if error is None else _error_code(error),
            times=times,
            topic=topic,
            partition=partition,
            node=node,
            when=when,
            delay=delay,
            hold=hold,
            drop=drop,
            no_answer=no_answer,
            after_append=after_append,
            throttle_ms=throttle_ms,
            truncate=truncate,
            corrupt=corrupt,
            record_errors=record_errors,
            error_message=error_message,
        )
        self._rules.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Takes a rule out, if it is still there."""
        if fault in self._rules:
            self._rules.remove(fault)

    def clear(self) -> None:
        """Removes all rules, and releases what they hold."""
        for fault in tuple(self._rules):
            fault.remove()

    def match(self, request: ReceivedRequest) -> Fault | None:
        """The rule to apply to a request. It counts as a hit."""
        # A rule that is used up stays: it may still hold requests, for `clear` to release.
        for fault in self._rules:
            if fault.matches(request):
                fault.hit()
                return fault
        return None

    def _api_name(self, api: str | None) -> str | None:
        if api is None:
            return None
        try:
            return self._api_names[_plain(api)]
        except KeyError:
            known = ", ".join(sorted(self._api_names.values()))
            raise ValueError(f"api={api!r}: it is one of {known}") from None


def _plain(name: str) -> str:
    """ "InitProducerId" and "INIT_PRODUCER_ID" are the same."""
    return name.replace("_", "").lower()


def _error_code(error: str | int) -> ErrorCode:
    try:
        return ErrorCode[error] if isinstance(error, str) else ErrorCode(error)
    except (KeyError, ValueError):
        raise ValueError(f"error={error!r}: Kafka has no such error code") from None
