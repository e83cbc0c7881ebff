"""The producer's memory: who waits for it is served in order, and nothing gets lost.

The pool counts bytes (`buffer_memory`). The buffers themselves belong to the batches,
so unlike Java's BufferPool there is no free list of buffers.

Why no asyncio.Condition

A fair pool is usually told as a lock and a condition: take the lock, wait until there
is room, be notified by whoever releases. In asyncio this has three faults.

- A notify can get lost. Up to CPython 3.12 `Condition.notify()` may pick a waiter that
  is cancelled in the same turn of the loop. The waiter goes, nobody else is woken, and
  memory lies free while tasks sleep.
- A waiter that was cancelled has to take the lock again before it may leave. anyio
  cancels again in every turn of the loop until the task is gone, so while somebody
  else holds the lock the task spins.
- `notify()` needs the lock, so giving memory back would have to be `async`. It happens
  where batches are completed, in a plain callback.

And waking is not giving: between the notify and the turn in which the waiter runs, a
newcomer may take the memory. (Java's BufferPool.allocate allows that. We do not.)

What we keep is the meaning of the fair condition: waiters queue, and the releaser
hands over.

- Whoever finds room and an empty line takes it at once (`try_reserve`).
- Everybody else joins the line with a Ticket (`enter`). As long as anybody is in it,
  newcomers are refused, also those whose small ask would fit.
- `release` gives the memory to the ticket at the head, within the same call. If that is
  not enough for the head, it holds what there is and waits for the rest: nobody can
  overtake, so a large ask is not starved by small ones.
- When the head has all it asked for, its `granted()` is called, still within the
  release. The memory is the owner's from then on: no time passes between handing over
  and using it, so there is no window for a newcomer or a cancellation to fall into.
- Who leaves (cancelled, timed out, closed) gives back what it held, and the turn passes
  on within the same call.

One broker does not take the room of the others

A broker that stands still lets go of nothing, and whoever has records for it goes on
asking: in the end it has all memory, and those wait as well whose brokers are quick. So
the batches that are for one broker, its `Share`, may be up to eight times what is free
(the rule by which switches divide their memory among their ports, Choudhury and Hahne:
Dynamic queue length thresholds). It looks at no clock, and knows no quick and no slow: one
broker may have 8/9 of the memory, of two that stand still each 8/17, and the others go
on in what is left. Whoever has a record for a broker with as much steps aside when it is
at the head, into a line of that broker, and is called back when there is less for it, or
more is free. Where there is one broker there are no others, and no such bound. (In a
buffer of a few records' size, one may take all that those have left that stand still:
then the others wait as well.)

    available + held + reserved == total

holds at every moment in which code outside of this module can run, `held` being what
the head has so far.

Callbacks. `claim`, `granted` and `refused` run inside release(), enter(), leave(),
serve() and close(), and may call all of these again. Inner calls only change the
numbers; the outermost one goes round once more until the head cannot be served. So the
stack stays flat, and the order stays that of the line.

Deadlines are in one heap with one timer for the pool, since thousands may wait with
deadlines that differ by microseconds and hardly ever come.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import Collection
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from asyncproducer.errors import (
    BufferTimeout,
    IllegalStateError,
    ProducerClosed,
    RecordTooLarge,
    again,
)
from asyncproducer.net.waiting import Changes, time_of

if TYPE_CHECKING:
    from asyncproducer.core.metrics import Metrics

__all__ = ["BufferPool", "BufferPoolStatistics", "Share", "Ticket"]

#: A heap with so few entries is not worth tidying up.
_SMALL_HEAP = 64

#: A broker's share is at most so many times what is free, where there are others.
_TIMES_FREE = 8


class Share:
    """What a broker has of a pool's memory.

    held: bytes of the batches that are for it, counted by whoever reserves them. line: who waits
    until it has less, in order. called: the one of them that is back in the line of all. queues:
    how many partitions it leads that something was sent to. hurried: whether the accumulator has
    let go all that lingered for it.
    """

    __slots__ = ("called", "held", "hurried", "line", "node", "queues")

    def __init__(self, node: int) -> None:
        self.node = node
        self.held = 0
        self.line: OrderedDict[Ticket, None] = OrderedDict()
        self.called: Ticket | None = None
        self.queues = 0
        self.hurried = False

    def is_waited_for(self) -> bool:
        """Whether somebody waits for it to have less."""
        return bool(self.line) or self.called is not None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} node={self.node} held={self.held} waiting={len(self.line)}>"


class Ticket:
    """A place in the line for memory. Subclasses say what happens when its turn comes.

    A ticket may enter again once it has been served, refused, or has left.
    The callbacks must not block; what they raise goes to the loop's exception handler.
    """

    __slots__ = ("_asked", "_called", "_deadline", "_entered", "_held")

    # Set and used by the pool. `_asked` and `_held` are bytes; `_called`: it had stepped aside for
    # this broker, and has been called back.
    _asked: int
    _called: Share | None
    _held: int
    _deadline: float
    _entered: float

    def claim(self) -> bool:
        """Asked at the head of the line, before memory is given. True: none is needed.

        The owner has then got what it wanted without it (its record fits into a batch
        that was opened meanwhile), and the ticket is done: `granted` is not called.
        It is asked again whenever the line is served, so it should be cheap.
        """
        return False

    def share(self) -> Share | None:
        """For which broker the memory is, as of now. Asked at the head of the line; None: for
        none in particular."""
        return None

    def granted(self) -> None:
        """All memory that the ticket asked for belongs to its owner now.

        If it raises, the pool takes the memory back, and calls `refused` with what it
        raised: raise before you keep the memory.
        """
        raise NotImplementedError

    def refused(self, error: BaseException) -> None:
        """The ticket is out of the line, with nothing.

        BufferTimeout, ProducerClosed, or what its `granted` raised.
        """
        raise NotImplementedError


class BufferPoolStatistics(NamedTuple):
    """A BufferPool's numbers at one moment. Sizes are in bytes."""

    total: int
    available: int
    held: int
    reserved: int
    waiting: int
    exhausted: int
    waited_seconds: float


class BufferPool:
    """`total_bytes` of memory, handed out in the order of asking, but see `Share`.

    available: free bytes. held: what the head of the line has so far.
    exhausted: how many asks ended with BufferTimeout, or would not wait (Java:
    buffer-exhausted-total). waited_seconds: the sum of all ended waits, however they
    ended (Java: bufferpool-wait-time-ns-total). closed: whether close() was called.
    `metrics` hears of the last two, of the waits once per turn of the line.
    """

    __slots__ = (
        "_deadlines",
        "_enough",
        "_line",
        "_loop",
        "_metrics",
        "_order",
        "_resting",
        "_serving",
        "_set_aside",
        "_shares",
        "_time",
        "_timer",
        "_timer_at",
        "_told_seconds",
        "available",
        "closed",
        "exhausted",
        "held",
        "total",
        "waited_seconds",
    )

    def __init__(
        self,
        total_bytes: int,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics | None = None,
    ) -> None:
        if total_bytes < 0:
            raise ValueError(f"a buffer pool cannot have {total_bytes} bytes")
        self.total = total_bytes
        self.available = total_bytes
        self.held = 0
        self.exhausted = 0
        self.waited_seconds = 0.0
        self.closed = False
        self._loop = loop
        self._time = time_of(loop)
        self._metrics = metrics
        # What of waited_seconds the metrics have.
        self._told_seconds = 0.0
        # A linked list in which any ticket can be found: leaving from the middle is as
        # cheap as from the head. (A plain dict slows down when always cut at its head.)
        self._line: OrderedDict[Ticket, None] = OrderedDict()
        self._shares: dict[int, Share] = {}
        #: Who is in the line of a broker, and of which.
        self._set_aside: dict[Ticket, Share] = {}
        self._serving = False
        # Ends the rest of those who rest: with so many bytes free, or closed.
        self._resting = Changes(loop)
        self._enough = math.inf
        # Tickets that are out of the line stay in the heap until they come up, or until
        # there are too many of them.
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def waiting(self) -> int:
        """How many tickets wait (Java: waiting-threads)."""
        return len(self._line) + len(self._set_aside)

    @property
    def tickets(self) -> Collection[Ticket]:
        """The tickets in the line of all, in order. The same object for the pool's whole life."""
        return self._line

    @property
    def set_aside(self) -> Collection[Ticket]:
        """The tickets in the lines of single brokers. The same object for the pool's whole life."""
        return self._set_aside

    def share(self, node: int) -> Share:
        """What the broker has of the memory."""
        share = self._shares.get(node)
        if share is None:
            share = self._shares[node] = Share(node)
        return share

    def is_held_up(self, share: Share | None, size: int = 0) -> bool:
        """Whether a broker gets no `size` bytes now, though they may be free: it would have more
        than it may, or somebody waits for it."""
        return share is not None and (share.is_waited_for() or self._has_enough(share, size))

    def has_better(self, share: Share, size: int = 0) -> bool:
        """Whether another broker than this one, which is held up, is not (for `size` bytes), or has
        less than half."""
        return any(
            not self.is_held_up(other, size) or 2 * other.held < share.held
            for other in self._shares.values()
            # One that leads nothing, or what had no leader for a while, takes nothing.
            if other is not share and other.node >= 0 and other.queues
        )

    def told_of(self, share: Share) -> str:
        """What a broker that is held up has, in words."""
        who = "partitions without a leader have" if share.node < 0 else f"broker {share.node} has"
        kept = ", and what is free is kept for the others" if self.available else ""
        return f"{who} {share.held} of them{kept}"

    def is_wanted(self, share: Share | None) -> bool:
        """Whether somebody waits for memory that this broker's batches have."""
        return bool(self._line) or (share is not None and bool(share.line))

    @property
    def reserved(self) -> int:
        """Bytes that were handed out and not given back."""
        return self.total - self.available - self.held

    def statistics(self) -> BufferPoolStatistics:
        """All numbers at this moment."""
        return BufferPoolStatistics(
            self.total,
            self.available,
            self.held,
            self.reserved,
            self.waiting,
            self.exhausted,
            self.waited_seconds,
        )

    def try_reserve(self, size: int, share: Share | None = None, *, spares: bool = False) -> bool:
        """Takes `size` bytes if they are free and nobody waits for memory. Never waits.

        `share`: of the broker that they are for, which must not be held up. `spares`: nor may it
        have more than its part with them, for who can do with less.

        Raises RecordTooLarge (more than the pool will ever have), ProducerClosed.
        """
        if self._line or size > self.available or self.closed or size < 0:
            self._check(size)
            return False
        if share is not None and (
            self.is_held_up(share, size) or (spares and self._has_enough(share, size, True))
        ):
            return False
        self.available -= size
        return True

    def release(self, size: int) -> None:
        """Gives `size` reserved bytes back, and serves the line with them.

        Works after close() too. Raises IllegalStateError for more than is reserved.
        """
        if not 0 <= size <= self.total - self.available - self.held:
            raise IllegalStateError(
                f"cannot release {size} bytes of {self.reserved} reserved: each reservation"
                " is given back once"
            )
        self.available += size
        if self.available >= self._enough:
            self._enough = math.inf
            self._resting.tell()
        if self._line or self._set_aside:
            self.serve()

    def enter(self, size: int, deadline: float, ticket: Ticket) -> None:
        """Joins the line; `deadline` is in the loop's time, infinity for none.

        The ticket may be served before this returns; if not, and the deadline is not
        in the future, it is refused before this returns.

        Raises RecordTooLarge, ProducerClosed, IllegalStateError (it is in the line).
        """
        self._check(size)
        if self._waits(ticket):
            raise IllegalStateError("the ticket is already in the line")
        ticket._asked = size
        ticket._held = 0
        ticket._called = None
        ticket._deadline = deadline
        ticket._entered = now = self._time()
        self._line[ticket] = None
        self.serve()
        if not self._waits(ticket):
            return
        if deadline <= now:
            # Within the callbacks of another ticket it has not had its turn yet, but
            # that is a matter of this instant, and so is a deadline of now.
            self._time_out(ticket, now)
            self.serve()
        elif deadline < math.inf:
            self._watch(ticket)

    def turned_away(self) -> None:
        """Somebody who would not wait found no room: counts as exhausted."""
        self._count_exhausted(self._time())

    def leave(self, ticket: Ticket) -> None:
        """Out of the line, with nothing; does nothing if the ticket is not in it.

        None of the ticket's callbacks is called.
        """
        if self._waits(ticket):
            self._remove(ticket, self._time())
            self.serve()

    def serve(self) -> None:
        """Serves the line as far as it goes. The other methods do this by themselves.

        To be called when the answer of a `claim()` may have changed without them.
        """
        if self._serving:
            return  # the outer call goes on until the head cannot be served
        self._serving = True
        try:
            while (self._line and self._serve_head()) or (self._set_aside and self._call_back()):
                pass
        finally:
            self._serving = False
            self._tell_waits()

    async def reserve(self, size: int, deadline: float) -> None:
        """Takes `size` bytes; waits for them in the line until `deadline`, in the loop's time.

        Cancelled: nothing was taken, also when memory and the cancellation come in the
        same turn of the loop.

        Raises BufferTimeout, RecordTooLarge, ProducerClosed.
        """
        if self.try_reserve(size):
            return
        waiter = _Waiter(self._loop.create_future())
        self.enter(size, deadline, waiter)
        try:
            error = await waiter.answer
        except BaseException:  # cancelled, or the coroutine was closed
            # Three cases: still in the line; the answer came in the turn in which the
            # task was cancelled, and it was memory; or an error, which nobody waits for.
            # Nothing is awaited here, so that anyio has nothing to cancel again.
            self.leave(waiter)
            if waiter.has_memory:
                self.release(size)
            raise
        if error is not None:
            raise error

    async def rest(self, seconds: float, free: float = math.inf) -> None:
        """Waits so long, or until `free` bytes are free, or the pool is closed: for who looks at it
        now and then. May end earlier, with the rest of somebody who wanted less."""
        if not self.closed:
            self._enough = min(self._enough, free)
            await self._resting.wait(self._time() + seconds)

    def close(self, error: BaseException | None = None) -> None:
        """Refuses everybody who waits with ProducerClosed, or with `error`, and all who come
        later with ProducerClosed. Who rests goes on.

        What is reserved can still be released. Closing again does nothing.
        """
        if self.closed:
            return
        self.closed = True
        self._resting.tell()
        now = self._time()
        tickets = self.everybody()
        # All are out before the first is told: no callback finds a line to be served.
        for ticket in tickets:
            self._remove(ticket, now)
        self._deadlines.clear()
        self._disarm()
        self._tell_waits()
        for ticket in tickets:
            self._refuse(
                ticket,
                again(error)
                if error is not None
                else ProducerClosed(
                    f"the producer was closed while a record waited for {ticket._asked} bytes"
                    " of buffer_memory"
                ),
            )

    def __repr__(self) -> str:
        numbers = " ".join(f"{name}={value}" for name, value in self.statistics()._asdict().items())
        return f"<{type(self).__name__} {numbers}{' closed' if self.closed else ''}>"

    # --- the line -------------------------------------------------------------------------

    def everybody(self) -> list[Ticket]:
        """All who wait, in whatever line."""
        return [*self._line, *self._set_aside]

    def _waits(self, ticket: Ticket) -> bool:
        return ticket in self._line or ticket in self._set_aside

    def _has_enough(self, share: Share, size: int, spares: bool = False) -> bool:
        """Whether a broker has its part, and gets no `size` bytes more."""
        if not share.held:
            return False
        # Nor shall it have more than its part with them. But where what is kept for the others
        # would not do for one like this, it is not kept.
        more = size if spares or size <= self.total // 10 else 0
        # Who needs more than is free takes all of it: if no others have the rest, all would wait
        # for this one.
        alone = size > self.available and share.held + size > self.total
        if not alone and share.held + more <= _TIMES_FREE * (self.available - more):
            return False
        for other in self._shares.values():
            if other is not share and (other.held or (other.queues and other.node >= 0)):
                return True
        return False

    def _check(self, size: int) -> None:
        if self.closed:
            raise ProducerClosed("the producer is closed")
        if size > self.total:
            raise RecordTooLarge(
                f"{size} bytes will never fit into the buffer of {self.total} bytes:"
                " raise buffer_memory"
            )
        if size < 0:
            raise ValueError(f"cannot reserve {size} bytes")

    def _serve_head(self) -> bool:
        """One turn for the ticket at the head. True: look at the line again."""
        ticket = next(iter(self._line))
        # Before it claims anything, which would be to overtake who waits for its broker. Who has
        # got a part already was let through, and took all that was free.
        if not ticket._held and self._steps_aside(ticket):
            return True
        claimed = self._claim(ticket)
        if ticket not in self._line:
            return True  # it left, or the pool was closed, inside of claim()
        if claimed:
            self._remove(ticket, self._time())
            return True
        # What is available is read after claim(), which may have released some.
        given = min(ticket._asked - ticket._held, self.available)
        self.available -= given
        self.held += given
        ticket._held += given
        if ticket._held < ticket._asked:
            return False
        self.waited_seconds += self._time() - ticket._entered
        self._take_out(ticket)
        self.held -= ticket._held
        self._grant(ticket)
        return True

    def _steps_aside(self, ticket: Ticket) -> bool:
        """Into the line of its broker, if that is held up. Who was called back goes to its head."""
        if len(self._shares) < 2:
            return False
        try:
            share = ticket.share()
        except (SystemExit, KeyboardInterrupt):
            self._loop.call_soon(self.serve)
            raise
        except BaseException as error:
            self._report(ticket, "share", error)
            return False
        if share is None:
            return False
        called = ticket._called
        if called is None:
            if not self.is_held_up(share, ticket._asked):
                return False
        elif not self._has_enough(share, ticket._asked):
            return False
        self._take_out(ticket)
        self._set_aside[ticket] = share
        share.line[ticket] = None
        if called is share:
            share.line.move_to_end(ticket, last=False)
        return True

    def _call_back(self) -> bool:
        """One more ticket from a broker's line: into that of all, or out with what it claimed."""
        # What a ticket does when it is asked may bring the first batch of one more broker.
        for share in tuple(self._shares.values()):
            if not share.line or share.called is not None:
                continue
            ticket = next(iter(share.line))
            if not self._has_enough(share, ticket._asked):
                self._take_out(ticket)
                share.called = ticket
                ticket._called = share
                self._line[ticket] = None
                return True
            claimed = self._claim(ticket)
            if not self._waits(ticket):
                return True
            if claimed:
                self._remove(ticket, self._time())
                return True
        return False

    def move(self, share: Share | None, node: int) -> Share:
        """A partition that was of one broker, or is new, is another one's from now on.

        Whoever stepped aside for the former is back in the line of all, before the others, so that
        who comes now for that partition does not overtake. In the next turn of the loop they are
        served, or step aside again.
        """
        if share is not None:
            share.queues -= 1
            self._recall(share)
            if not share.queues and self._set_aside:
                # The fewer there are, the more each may have.
                self._loop.call_soon(self.serve)
        share = self.share(node)
        share.queues += 1
        return share

    def _recall(self, share: Share) -> None:
        if not share.is_waited_for():
            return
        head = next(iter(self._line), None)
        if head is not None:
            # Only the head may have a part of what it wants.
            self.available += head._held
            self.held -= head._held
            head._held = 0
        back = list(share.line)
        if share.called is not None:
            back.insert(0, share.called)
        for ticket in reversed(back):
            self._take_out(ticket)
            self._line[ticket] = None
            self._line.move_to_end(ticket, last=False)
        self._loop.call_soon(self.serve)

    def _take_out(self, ticket: Ticket) -> None:
        share = self._set_aside.pop(ticket, None)
        if share is not None:
            del share.line[ticket]
            return
        del self._line[ticket]
        if ticket._called is not None:
            ticket._called.called = None
            ticket._called = None

    def _remove(self, ticket: Ticket, now: float) -> None:
        """Takes a ticket that was not granted out of the line. Its memory is free again."""
        self._take_out(ticket)
        self.available += ticket._held
        self.held -= ticket._held
        ticket._held = 0
        self.waited_seconds += now - ticket._entered

    # --- numbers --------------------------------------------------------------------------

    def _tell_waits(self) -> None:
        seconds = self.waited_seconds - self._told_seconds
        if seconds and self._metrics is not None:
            self._told_seconds = self.waited_seconds
            self._metrics.memory_waited(seconds, self._time())

    def _count_exhausted(self, now: float) -> None:
        self.exhausted += 1
        if self._metrics is not None:
            self._metrics.buffer_exhausted(now)

    # --- callbacks ------------------------------------------------------------------------

    def _claim(self, ticket: Ticket) -> bool:
        try:
            return ticket.claim()
        except (SystemExit, KeyboardInterrupt):
            self._loop.call_soon(self.serve)
            raise
        except BaseException as error:  # as asyncio does for its callbacks
            self._report(ticket, "claim", error)
            return False  # then it gets memory, like everybody

    def _grant(self, ticket: Ticket) -> None:
        size = ticket._asked  # it may enter again, for another size, before it raises
        try:
            ticket.granted()
        except BaseException as error:
            self.available += size  # the loop in serve() goes on with it
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                self._loop.call_soon(self.serve)
                raise
            self._report(ticket, "granted", error)
            if not self._waits(ticket):
                self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: BaseException) -> None:
        try:
            ticket.refused(error)
        except (SystemExit, KeyboardInterrupt):
            self._loop.call_soon(self.serve)
            raise
        except BaseException as raised:
            self._report(ticket, "refused", raised)

    def _report(self, ticket: Ticket, name: str, error: BaseException) -> None:
        self._loop.call_exception_handler(
            {
                "message": f"{type(ticket).__name__}.{name}() failed: the line for memory goes on",
                "exception": error,
                "ticket": ticket,
            }
        )

    # --- deadlines ------------------------------------------------------------------------

    def _watch(self, ticket: Ticket) -> None:
        # Entries of tickets that are done: at most as many as wait, and a few.
        if len(self._deadlines) > 2 * self.waiting + _SMALL_HEAP:
            self._deadlines = [entry for entry in self._deadlines if self._is_live(entry)]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (ticket._deadline, next(self._order), ticket))
        if ticket._deadline < self._timer_at:
            self._arm(ticket._deadline)

    def _is_live(self, entry: tuple[float, int, Ticket]) -> bool:
        """Whether a heap entry still counts: its ticket waits, and not for a second time."""
        deadline, _, ticket = entry
        return self._waits(ticket) and ticket._deadline == deadline

    def _arm(self, deadline: float) -> None:
        self._disarm()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_at = math.inf

    def _on_timer(self) -> None:
        # asyncio may run a timer up to its clock's resolution early: then it is due.
        now = max(self._time(), self._timer_at)
        self._disarm()
        self._serving = True  # what they held is passed on when all of them are out
        try:
            while self._deadlines and self._deadlines[0][0] <= now:
                entry = heapq.heappop(self._deadlines)
                if self._is_live(entry):
                    self._time_out(entry[2], now)
        finally:
            self._serving = False
            while self._deadlines and not self._is_live(self._deadlines[0]):
                heapq.heappop(self._deadlines)
            if self._deadlines:
                self._arm(self._deadlines[0][0])
        self.serve()

    def _time_out(self, ticket: Ticket, now: float) -> None:
        share = self._set_aside.get(ticket)
        self._remove(ticket, now)
        self._count_exhausted(now)
        slow = "the brokers do not keep up"
        if share is not None:
            slow = f"{self.told_of(share)}: it does not keep up"
        self._refuse(
            ticket,
            BufferTimeout(
                f"no {ticket._asked} bytes of buffer_memory within {now - ticket._entered:.3f} s:"
                f" {self.available} of {self.total} bytes are free, {self.waiting} others wait;"
                f" {slow} (raise buffer_memory or max_block_ms, or send less)"
            ),
        )


class _Waiter(Ticket):
    """The ticket of a task that awaits reserve()."""

    __slots__ = ("answer", "has_memory")

    def __init__(self, answer: asyncio.Future[BaseException | None]) -> None:
        # The error is a result, not an exception: a future whose exception is not
        # retrieved, because its task was cancelled in the same turn, would be logged.
        self.answer = answer
        self.has_memory = False

    def claim(self) -> bool:
        # Cancelled, but its task has not run yet to leave the line.
        return self.answer.done()

    def granted(self) -> None:
        self.answer.set_result(None)
        self.has_memory = True  # after what may fail: on a closed loop the pool keeps it

    def refused(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_result(error)
