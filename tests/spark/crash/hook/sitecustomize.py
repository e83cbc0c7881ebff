"""Lets the sink's processes die, or wait, at a step of its protocol. Only for the crash test.

Python imports this module when it starts, if its directory is on the path. The crash test puts it
on that of the driver and of the executors, so that nothing in the sink need know of it.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: What names the directory with the tickets.
TICKETS = "ASYNCPRODUCER_CRASH_TICKETS"

_PACKAGE = "asyncproducer"
_SINK = "asyncproducer.spark.delivery"
#: Nobody waits longer, in seconds: who has told it to may be gone.
_PATIENCE_S = 20.0
#: In this time records reach brokers, and an EndTxn is on its way without an answer.
_PRODUCED_S, _ENDING_S = 0.1, 0.001


def at(step: str, unit: str = "", settle: float = 0.0) -> None:
    """A process is at a step. If there is a ticket for it: dies, or blocks until it may go on."""
    for seconds in _waits(step, unit, settle):
        time.sleep(seconds)


async def at_meanwhile(step: str, settle: float = 0.0) -> None:
    """The same, with the loop at work: what has been sent reaches the brokers."""
    for seconds in _waits(step, "", settle):
        await asyncio.sleep(seconds)


def _waits(step: str, unit: str, settle: float) -> Iterator[float]:
    """For how long to wait, each time, until the process may go on. Dies if it must."""
    directory = os.environ[TICKETS]
    ticket = os.path.join(directory, step)
    claimed = f"{ticket}.{os.getpid()}.{unit.replace('/', '_')}"
    try:
        with open(ticket, encoding="utf-8") as file:
            order = file.read()
        os.rename(ticket, claimed)
    except FileNotFoundError:
        return
    yield settle
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + _PATIENCE_S
    while os.path.exists(claimed) and time.monotonic() < deadline:
        yield 0.01


def wrap(delivery: Any) -> None:
    """Put the steps into the sink's module, and into that of its workers, which it has imported."""
    workers: Any = sys.modules[delivery.Feed.__module__]
    Attempt, Sink, Producer = delivery._Attempt, delivery.Sink, delivery.Producer
    begin, send, write, commit = Attempt._begin, Sink._send, Sink.write, Sink.commit
    transactional = workers.Worker.transactional
    #: The driver may write what Spark has made no tasks for.
    in_commit = False

    class CrashingProducer(Producer):  # type: ignore[misc, valid-type]
        #: Of an attempt; others have none.
        unit = ""

        def at(self, step: str) -> None:
            if self.unit and not in_commit:
                at(step, self.unit)

        async def send_offsets(self, *arguments: Any) -> None:
            await super().send_offsets(*arguments)
            self.at("marker-sent")
            if in_commit and not self.unit:
                at("telling")

        async def commit_transaction(self) -> None:
            ending = asyncio.ensure_future(super().commit_transaction())
            await asyncio.sleep(_ENDING_S)
            self.at("ending")
            await ending
            self.at("ended")

    async def crashing_transactional(self: Any, options: Any, name: str) -> Any:
        if not in_commit:
            at("fencing", name)
        producer = await transactional(self, options, name)
        producer.unit = name
        producer.at("fenced")
        return producer

    async def crashing_begin(self: Any, producer: Any) -> Any:
        result = await begin(self, producer)
        producer.at("marker-read")
        return result

    async def crashing_send(self: Any, producer: Any, batches: Any, *arguments: Any) -> Any:
        async def sent() -> AsyncIterator[Any]:
            taken = 0
            async for batch in batches:
                yield batch
                taken += 1
                if taken == 2 and not in_commit:
                    await at_meanwhile("producing", settle=_PRODUCED_S)

        result = await send(self, producer, sent(), *arguments)
        if not in_commit:
            await at_meanwhile("produced")
        return result

    def crashing_write(self: Any, *arguments: Any) -> Any:
        report = write(self, *arguments)
        if not in_commit:
            at("reporting")
        return report

    def crashing_commit(self: Any, *arguments: Any) -> Any:
        nonlocal in_commit
        at("committing")
        in_commit = True
        try:
            report = commit(self, *arguments)
        finally:
            in_commit = False
        at("committed")
        return report

    delivery.Producer = workers.Producer = CrashingProducer
    workers.Worker.transactional = crashing_transactional
    Attempt._begin = crashing_begin
    Sink._send, Sink.write, Sink.commit = crashing_send, crashing_write, crashing_commit


class _Loader(importlib.abc.Loader):
    """Another loader, and then `after`."""

    def __init__(self, loader: importlib.abc.Loader, after: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the sink's module when it is imported: before, nothing of it must be loaded."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in (_PACKAGE, _SINK):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            self.go_first()  # it may be found later
        else:
            spec.loader = _Loader(spec.loader, wrap if name == _SINK else self.go_first)
        return spec

    def go_first(self, _: object = None) -> None:
        """Also when the package has put a finder of its own there, to load what is not compiled."""
        sys.meta_path.insert(0, self)


if TICKETS in os.environ:
    _Finder().go_first()
