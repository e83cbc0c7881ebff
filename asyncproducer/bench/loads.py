"""How a peer is driven. Each load returns what it saw; the worker adds CPU and memory."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
import sys
import time
from array import array
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from asyncproducer.bench.peers import Job, Peer, Result
from asyncproducer.bench.workloads import Case, Load, payloads

__all__ = [
    "LOADS",
    "Meter",
    "in_turn",
    "longest_wait",
    "peak_rss_mib",
    "percentile",
    "stalls",
    "values_of",
    "warm_up",
    "warming",
]

#: The longest that records of an open loop are waited for after the last has left.
_PATIENCE_S = 60.0

#: The fewest that each task of a loop sends: a single one would measure how tasks are made.
_LOOP_SENDS = 5

#: After so many records a transaction that ends by time looks at the clock.
_PER_LOOK = 100

#: Of more rows than this a table is made of the same rows again and again.
_DISTINCT_ROWS = 1_000_000

_TICK_S = 0.001
_IDLE = str(Path(__file__).with_name("idle.py"))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _latencies(seconds: Iterable[float]) -> Result:
    ordered = sorted(seconds)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
    return {name: percentile(ordered, share) * 1e3 for name, share in shares.items()}


def _rss_mib() -> float:
    """Resident memory now; where Linux does not tell, the most there was so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak_mib()
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


#: The most resident memory before the last Meter was made.
_earlier_peak_mib = 0.0


def peak_rss_mib() -> float:
    """The most resident memory that this process has had."""
    return max(_earlier_peak_mib, _peak_mib())


def _forget_peak() -> None:
    """Let the system begin anew with the most: to make a table's columns of lists takes more memory
    than the table then has, and none of that is the producer's. (Linux can.)"""
    global _earlier_peak_mib
    _earlier_peak_mib = peak_rss_mib()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    try:
        # Not getrusage: what it tells begins with the size of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except OSError:
        import resource  # not on Windows, and only needed where there is no /proc

        unit = 2**20 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class Meter:
    """Time, CPU of all threads, and memory from its making on."""

    def __init__(self) -> None:
        _forget_peak()
        self._rss = _rss_mib()
        self._cpu = time.process_time()
        self.began = perf_counter()

    def rss_growth_mib(self) -> float:
        """The most memory so far, less what there was when it was made."""
        return max(0.0, _peak_mib() - self._rss)

    def rss_left_mib(self) -> float:
        """The memory there is now, less what there was when it was made."""
        return max(0.0, _rss_mib() - self._rss)

    def result(self, records: int) -> Result:
        """What the records took."""
        seconds = perf_counter() - self.began
        cpu = time.process_time() - self._cpu
        return {
            "records": records,
            "seconds": seconds,
            "records_per_s": records / seconds,
            "cpu_us_per_record": cpu / records * 1e6,
            "rss_growth_mib": self.rss_growth_mib(),
        }


@asynccontextmanager
async def stalls(result: Result, *, wanted: bool) -> AsyncIterator[None]:
    """Adds to the result for how long the loop was not there for a task that was due.

    It is late because its thread computes, or because the operating system gives the core
    to somebody else (a broker on the same machine). So two things are counted beside it: what
    the thread computed in one turn of the loop, and how late a process is that does nothing.
    """
    if not wanted:
        yield
        return
    late = array("d")  # small: the memory is measured, too

    async def tick() -> None:
        while True:
            due = perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late.append(max(0.0, perf_counter() - due))

    idle = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", _IDLE, str(_TICK_S)), stdin=PIPE, stdout=PIPE
    )
    if idle.stdout is not None:
        await idle.stdout.readline()  # it is there
    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)  # it is to be there before the load, which may not let it begin
    turns = _Turns(asyncio.get_running_loop())
    try:
        yield
        await asyncio.sleep(2 * _TICK_S)  # let it see the last stall
    finally:
        ticker.cancel()
        told, _ = await idle.communicate(b"")  # its standard input ends
    result["stall_p999_ms"] = percentile(sorted(late), 0.999) * 1e3
    result["stall_max_ms"] = max(late) * 1e3
    result["stall_idle_p999_ms"] = float(told)
    if turns.computed:
        result["turn_wait_p999_ms"] = longest_wait(turns.computed, turns.idle, 0.999) * 1e3


class _Turns:
    """What the turns of a loop take from now on. Nothing where it is not asyncio's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        #: Seconds that this thread computed in each turn.
        self.computed = array("d")
        #: Seconds in which it waited for something to do.
        self.idle = 0.0
        turn = getattr(loop, "_run_once", None)
        selector = getattr(loop, "_selector", None)
        if turn is None or selector is None:
            return
        select = selector.select

        def measured_turn() -> None:
            before = time.thread_time()
            turn()
            self.computed.append(time.thread_time() - before)

        def measured_select(timeout: float | None = None) -> Any:
            before = perf_counter()
            try:
                return select(timeout)
            finally:
                self.idle += perf_counter() - before

        vars(loop)["_run_once"] = measured_turn
        selector.select = measured_select


def longest_wait(turns: Iterable[float], idle: float, share: float) -> float:
    """How long at most, for so much of all time, what comes waits until the turn of then ends.

    In a turn of d seconds, what comes waits longer than w in d - w of them; in an idle second
    nothing waits. So one long turn counts as much as it is long, among however many short ones.
    """
    ordered = sorted(turns, reverse=True)
    allowed = (1 - share) * (sum(ordered) + idle)
    longer = 0.0
    for count, turn in enumerate(ordered, 1):
        longer += turn
        wait = (longer - allowed) / count
        if count == len(ordered) or wait >= ordered[count]:
            return max(0.0, wait)
    return 0.0


def values_of(case: Case) -> Iterator[Any]:
    """The values, for ever."""
    return cycle(_some_values(case))


def _some_values(case: Case) -> Sequence[Any]:
    return _documents(case) if case.serializer else payloads(case)


def in_turn(values: Sequence[Any], first: int, count: int) -> Iterator[Sequence[Any]]:
    """`count` of the endless repetition of `values`, from number `first` on, in pieces: to find the
    next value is no part of what its record costs."""
    while count > 0:
        at = first % len(values)
        piece = values if at == 0 and count >= len(values) else values[at : at + count]
        yield piece
        first += len(piece)
        count -= len(piece)


@functools.cache
def _documents(case: Case) -> list[dict[str, Any]]:
    return [{"id": n, "text": text.decode()} for n, text in enumerate(payloads(case))]


#: How many partitions the tenth goes to that is not measured.
_MOST_WARMED = 6

#: A topic, and what else the case names for a record of it.
_Target: TypeAlias = tuple[str, dict[str, Any]]


def _targets(job: Job) -> list[_Target]:
    case = job.case
    given: dict[str, Any] = {}
    if case.headers:
        given["headers"] = [(f"header-{n}", b"some value") for n in range(case.headers)]
    if not case.run_length:
        return [(topic, given) for topic in job.topics]
    partitions = range(case.partitions)
    return [(topic, {"partition": p, **given}) for topic in job.topics for p in partitions]


def _runs(targets: list[_Target], case: Case, records: int) -> Iterator[tuple[_Target, int]]:
    """To which target how many records in a row go."""
    if not case.run_length:
        yield targets[0], records
        return
    for target in cycle(targets):
        yield target, min(case.run_length, records)
        records -= case.run_length
        if records <= 0:
            return


async def _fill(peer: Peer, job: Job, records: int, targets: list[_Target] | None = None) -> int:
    """Returns how many were sent: fewer where transactions by time have taken too long."""
    values = _some_values(job.case)
    if targets is None:
        targets = _targets(job)
    enqueue = peer.enqueue
    sent = 0
    async for share in _transactions(peer, job.case, records):
        for (topic, given), count in _runs(targets, job.case, share):
            for piece in in_turn(values, sent, count):
                # The loop that a user would write: nothing between it and the producer's method.
                if peer.blocking:
                    peer.enqueue_all(topic, piece, given)
                elif given:
                    for value in piece:
                        await enqueue(topic, value, **given)
                else:
                    for value in piece:
                        await enqueue(topic, value)
            sent += count
    await peer.flush()
    return sent


async def _transactions(peer: Peer, case: Case, records: int) -> AsyncIterator[int]:
    """How many records to send next; they are a transaction, or a part of one that ends by time,
    or, without any, all of them."""
    if not case.transactional:
        yield records
        return
    if case.transaction_ms:
        sent = 0
        began = now = perf_counter()
        while sent < records and now < began + case.seconds:
            await peer.begin()
            end = perf_counter() + case.transaction_ms / 1e3
            while True:
                yield (count := min(_PER_LOOK, records - sent))
                sent += count
                now = perf_counter()
                if sent == records or now >= end:
                    break
            await peer.commit(sent if case.offsets else None)
        return
    for sent in range(0, records, case.transaction):
        await peer.begin()
        yield (count := min(case.transaction, records - sent))
        await peer.commit(sent + count if case.offsets else None)


async def warm_up(peer: Peer, job: Job) -> int:
    """A tenth of the records, unmeasured, and one to each partition where the case goes through
    them: what is done once for a partition is not what a record costs. Returns how many.

    The tenth to no more than six of them, then: what follows the first 4 KiB of a partition begins
    its indexes, which takes Kafka 8 ms in files that it has mapped. (Where a partition gets more
    than one batch after that, as with 1,000 topics, it is measured, for all alike.)"""
    case = job.case
    targets = _targets(job)
    once = 0
    if case.run_length:
        each = replace(job, case=replace(case, run_length=1))
        once = await _fill(peer, each, len(targets))
    return once + await _fill(peer, job, warming(case), targets[:_MOST_WARMED])


def warming(case: Case) -> int:
    """How many records go first, unmeasured: a tenth, but who is slow must not need minutes."""
    return max(1, min(case.records // 10, 100_000))


async def flood(peer: Peer, job: Job) -> Result:
    """One task or thread enqueues all, then flushes."""
    case = job.case
    result: Result = {}
    async with stalls(result, wanted=case.ticker and not peer.blocking):
        meter = Meter()
        sent = await _fill(peer, job, case.records)
        result.update(meter.result(sent))
    return result


async def lists(peer: Peer, job: Job) -> Result:
    """The same by lists, as long as transactions are. Making them counts. Waits for each list
    only if the peer's call does."""
    case = job.case
    send_list = peer.send_list_to(job.topics[0])
    if send_list is None:
        return await flood(peer, job)
    values = values_of(case)
    meter = Meter()
    async for count in _transactions(peer, case, case.records):
        sent = send_list(list(islice(values, count)))
        if not peer.blocking:
            await sent
    await peer.flush()
    return meter.result(case.records)


def _collect(case: Case) -> None:
    """Set the collector as the case says. For good: this process is for this case."""
    if case.patient_collector:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)


async def burst(peer: Peer, job: Job) -> Result:
    """New tasks with one send each, all at once; again when all are done. Making them counts."""
    case = job.case
    send, values = peer.send_to(job.topics[0]), values_of(case)
    _collect(case)
    sent, meter = 0, Meter()
    while sent < case.records and perf_counter() - meter.began < case.seconds:
        await asyncio.gather(*(send(value) for value in islice(values, case.tasks)))
        sent += case.tasks
    return meter.result(sent)


async def loop(peer: Peer, job: Job) -> Result:
    """Tasks that send one record after the other, five at least, until all are sent or the time
    is up. Making the tasks does not count."""
    case = job.case
    _collect(case)
    send, values = peer.send_to(job.topics[0]), values_of(case)
    latencies = array("d")
    go = asyncio.Event()

    async def service() -> None:
        await go.wait()
        for value in islice(values, max(_LOOP_SENDS, case.records // case.tasks)):
            if case.pause_ms:
                await asyncio.sleep(case.pause_ms / 1e3)
            before = perf_counter()
            if before - meter.began > case.seconds:
                break
            await send(value)
            latencies.append(perf_counter() - before)

    tasks = asyncio.gather(*(service() for _ in range(case.tasks)))
    await asyncio.sleep(0)  # all have begun, and wait
    meter = Meter()
    go.set()
    await tasks
    return {**meter.result(len(latencies)), **_latencies(latencies)}


async def rate(peer: Peer, job: Job) -> Result:
    """Record n leaves n / rate seconds after the start; its latency counts from then.

    A peer that makes the sender wait makes all later records late, and that counts too.
    """
    case = job.case
    enqueue, values = peer.watch(job.topics[0]), values_of(case)
    latencies = array("d")
    result: Result = {}

    def done(intended: float) -> None:
        latencies.append(perf_counter() - intended)

    async def idle(seconds: float) -> None:
        if peer.blocking:
            # In whole milliseconds, as asyncio's loop waits: librdkafka does not wait for a part
            # of one, and who asks it again and again keeps a processor busy.
            peer.serve(max(0, math.ceil(seconds * 1e3)) / 1e3)
        else:
            await asyncio.sleep(max(0.0, seconds))

    async with stalls(result, wanted=case.ticker and not peer.blocking):
        meter = Meter()
        sent, began = 0, meter.began
        while sent < case.records:
            due = min(case.records, int((perf_counter() - began) * case.rate) + 1)
            for value in islice(values, max(0, due - sent)):
                entered = enqueue(value, functools.partial(done, began + sent / case.rate))
                if not peer.blocking:
                    await entered
                sent += 1
            await idle(began + sent / case.rate - perf_counter())
        # Without a flush: lingering is a part of the latency.
        deadline = perf_counter() + _PATIENCE_S
        while len(latencies) < case.records:
            if perf_counter() > deadline:
                missing = case.records - len(latencies)
                raise RuntimeError(f"{missing} records have no end {_PATIENCE_S} s after the last")
            await idle(0.001)
        result.update(meter.result(case.records))
    return result | _latencies(latencies)


async def exhaust(peer: Peer, job: Job) -> Result:
    """Tasks enqueue without a pause, for a time. Tells how evenly they got room."""
    case = job.case
    topic, enqueue, values = job.topics[0], peer.enqueue, values_of(case)
    # By task: nothing is kept for each record, since the memory is what is measured.
    counts: list[int] = []
    longest: list[float] = []
    result: Result = {}

    async def greedy() -> None:
        count, most = 0, 0.0
        while (before := perf_counter()) < end:
            await enqueue(topic, next(values))
            most = max(most, perf_counter() - before)
            count += 1
            if count % 100 == 0:
                await asyncio.sleep(0)  # a peer that never makes us wait must not lock others out
        counts.append(count)
        longest.append(most)

    async with stalls(result, wanted=case.ticker):
        meter = Meter()
        end = meter.began + case.seconds
        await asyncio.gather(*(greedy() for _ in range(case.tasks)))
        await peer.flush()
        result.update(meter.result(sum(counts)))
    result["most_by_least_records"] = max(counts) / max(1, min(counts))
    result["longest_wait_ms"] = max(longest) * 1e3
    result["longest_by_shortest_wait"] = max(longest) / max(min(longest), 1e-6)
    return result


# -- bulk: lists and tables ----------------------------------------------------------


def _bulk(peer: Any, method: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(peer.producer, method, None)
    if found is None:
        raise NotImplementedError(f"this version has no {method}")
    return found


async def many(peer: Peer, job: Job) -> Result:
    """One call of send_many with a list of values."""
    send_many = _bulk(peer, "send_many")
    values = list(islice(values_of(job.case), job.case.records))
    gc.collect()  # what was made before is looked at before
    meter = Meter()
    await send_many(job.topics[0], values)
    return meter.result(len(values))


def _arrow(case: Case) -> Any:
    import pyarrow

    rows = min(case.records, _DISTINCT_ROWS)
    keys = [b"key-%d" % (n % 10_000) for n in range(rows)]
    values = list(islice(values_of(case), rows))
    found = pyarrow.table({"k": keys, "v": values})
    times, rest = divmod(case.records, rows)
    return pyarrow.concat_tables([found] * times + [found.slice(0, rest)] * (rest > 0))


def _table(case: Case) -> Any:
    # Each row an object of its own, as rows of Arrow become.
    return _arrow(case).to_pandas(deduplicate_objects=False) if case.pandas else _arrow(case)


def _rows_of(table: Any) -> Iterator[Iterable[tuple[bytes, bytes]]]:
    """Keys and values of all rows, as Python objects; in pieces, as in `in_turn`."""
    if not hasattr(table, "to_batches"):
        yield table.itertuples(index=False, name=None)
        return
    for batch in table.to_batches(10_000):
        yield zip(batch["k"].to_pylist(), batch["v"].to_pylist(), strict=True)


async def rows(peer: Peer, job: Job) -> Result:
    """A table's rows, as Python objects, through the enqueue loop. Making the objects counts."""
    table = _table(job.case)
    topic, enqueue = job.topics[0], peer.enqueue
    gc.collect()
    meter = Meter()
    for piece in _rows_of(table):
        for key, value in piece:
            entered = enqueue(topic, value, key=key)
            if not peer.blocking:
                await entered
    await peer.flush()
    return meter.result(len(table))


async def table(peer: Peer, job: Job) -> Result:
    """One call of send_table."""
    send_table = _bulk(peer, "send_table")
    data = _table(job.case)
    gc.collect()
    meter = Meter()
    await send_table(job.topics[0], data, key="k", value="v")
    return meter.result(len(data))


LOADS: dict[Load, Callable[[Peer, Job], Awaitable[Result]]] = {
    "flood": flood,
    "burst": burst,
    "loop": loop,
    "rate": rate,
    "exhaust": exhaust,
    "many": many,
    "rows": rows,
    "table": table,
    "lists": lists,
}
