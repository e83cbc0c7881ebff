"""An event loop whose clock jumps: tests of timeouts and backoff that take no time.

The clock of `VirtualTimeLoop` stands still while anything can run. When nothing
can, it jumps to the next timer. So `await asyncio.sleep(3600)` takes microseconds,
`loop.time()` is exactly 3600.0 later, and what a test sees depends on no machine.

    def test_backoff():
        clock.run(scenario())          # a loop, a task, everything closed at the end

With pytest: the marker `virtual_time` of `asyncproducer.testing.plugin`.

When does time move? The loop asks its selector to wait for `timeout` seconds, and
that happens only when no callback is ready. At this one place we decide:

1. Bytes that have already arrived on a socket come first, always.
2. While a job runs in an executor (`asyncio.to_thread`, `loop.getaddrinfo`, ...) or in
   one of anyio's threads (a `def` of FastAPI) we wait for it really, and time stands
   still: a job that the test awaits takes no virtual time. But the job may itself wait
   for a timer of this loop (a thread that uses a producer through its portal), so time
   may not stand still for ever: it jumps once the distance to the next timer, and at
   least EXECUTOR_PATIENCE, has really passed.
3. While a socket is registered we wait SOCKET_PATIENCE really before each jump, so
   that bytes in flight on the loopback interface are seen before time moves on.
   The trade: each jump costs a millisecond, and a peer in another thread or process
   that needs longer than that to answer finds that our time has passed by. Tests
   with a slow peer belong on a real loop; tests with many jumps belong on
   `asyncproducer.testing.network`, which has no sockets.
4. Else time jumps to the next timer at once.
5. No timer, no job, no socket: nothing can ever happen. A real loop would hang. We
   raise, and name every pending task and the line that it waits in. (A thread that
   this loop does not know could still call in, so when there are other threads we
   give them THREAD_PATIENCE first.)

A loop in which some timer always repeats never comes to rule 5; for it there is
`limit`, a virtual time that a test never reaches.

What is not patched: `time.time()`, `time.monotonic()` and `time.sleep()`. Nothing in
debug mode is slow, since the clock that measures callbacks stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pathlib
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from asyncproducer.net.threads import jobs_elsewhere

__all__ = ["DeadlockError", "VirtualTimeLoop", "run"]

T = TypeVar("T")

_Events = list[tuple[selectors.SelectorKey, int]]

#: Real seconds that a job in an executor gets before time jumps over it. Our own jobs
#: (compression, DNS) need far less; a portal's caller pays this once per timer.
EXECUTOR_PATIENCE = 0.05
#: Real seconds that bytes on the loopback interface may be on their way.
SOCKET_PATIENCE = 0.001
#: Real seconds that threads unknown to the loop get before we call it a deadlock.
THREAD_PATIENCE = 1.0


class DeadlockError(RuntimeError):
    """Nothing on the loop can ever happen again, or the time limit was reached."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type,unused-ignore]
    """The system's selector, but its loop decides how long to wait.

    The loop's `_run_once` is where asyncio sleeps, and the selector is its only
    public seam: everything else of the loop stays as it is.
    """

    loop: VirtualTimeLoop | None = None

    def select(self, timeout: float | None = None) -> _Events:
        if self.loop is None:
            return super().select(timeout)
        return self.loop._wait(super().select, timeout)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at `start` (seconds).

    `limit`: raise DeadlockError when the time would pass this point; for tests in
    which a periodic timer hides that nothing else moves.

    It is a complete selector event loop: sockets, executors, signals and debug mode
    work. Timers fire in order of their deadlines, and `time()` is then exactly the
    deadline.
    """

    def __init__(self, *, start: float = 0.0, limit: float = math.inf) -> None:
        self._limit = limit
        self._jumps = 0
        self._outside_jobs = 0
        self._jobs_elsewhere: Callable[[], int] | None = None
        self._set_time(start)
        selector = _Selector()
        super().__init__(selector)
        self._virtual_selector = selector
        selector.loop = self
        self._set_time(start)  # again: the base class has set its own clock resolution

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now

    @property
    def jumps(self) -> int:
        """How often the time has moved: a measure of timers, and of busy waiting."""
        return self._jumps

    @contextlib.contextmanager
    def outside_work(self) -> Iterator[None]:
        """While this is open, the loop waits really, as it does for a job in an executor.

        For threads and processes that the loop cannot see: it sees the jobs of its executors,
        and of anyio's threads those that run with anyio's default limiter. (One that goes on for
        long there, such as a server, needs a limiter of its own: else time is real until its end.)
        """
        self._outside_jobs += 1
        try:
            yield
        finally:
            self._outside_jobs -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As in asyncio; time stands still until the job is done."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._outside_jobs += 1
        # The callback of the asyncio future, not the end of the job in its thread: only
        # then has the loop heard of the result. A cancelled job is waited for no longer.
        future.add_done_callback(self._job_done)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """As in asyncio. It joins threads in a thread, which must not look like a deadlock."""
        with self.outside_work():
            await super().shutdown_default_executor(*args, **kwargs)

    def close(self) -> None:
        """Closes the loop and its selector."""
        self._virtual_selector.loop = None  # a reference cycle less
        super().close()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} time={self._now:.6f} jumps={self._jumps}"
            f" running={self.is_running()} closed={self.is_closed()} debug={self.get_debug()}>"
        )

    async def _learn_of_jobs(self) -> None:
        self._jobs_elsewhere = int  # none, should anyio not tell
        self._jobs_elsewhere = jobs_elsewhere()

    def _job_done(self, _: object) -> None:
        self._outside_jobs -= 1

    def _set_time(self, now: float) -> None:
        self._now = now
        # BaseEventLoop runs a timer when its deadline < now + resolution. So with one step
        # of a float no timer runs early: who then finds that its time has not come, and
        # sleeps again until the same deadline, would be woken for ever while time stands
        # still. On a real clock that is over within the resolution, a nanosecond.
        self._clock_resolution = math.ulp(now)

    def _next_timer(self) -> float | None:
        # The selector's `timeout` is rounded and at most a day, and adding it up would
        # make 0.1 + 0.2 end at 0.30000000000000004. The deadline itself is exact.
        # BaseEventLoop has just removed cancelled timers from the head of this heap.
        scheduled: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009
        return scheduled[0].when() if scheduled else None

    def _wait(self, select: Callable[[float | None], _Events], timeout: float | None) -> _Events:
        events = select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        when = self._next_timer()
        busy = self._outside_jobs
        if not busy and threading.active_count() > 1:
            if self._jobs_elsewhere is None:
                self.create_task(self._learn_of_jobs())
                return events  # and it runs before we are asked again
            busy = self._jobs_elsewhere()
        if busy:
            patience = None if when is None else max(when - self._now, EXECUTOR_PATIENCE)
        elif len(self._virtual_selector.get_map()) > 1:  # one is the loop's own self-pipe
            patience = None if when is None else SOCKET_PATIENCE
        elif when is None and threading.active_count() > 1:
            patience = THREAD_PATIENCE
        else:
            patience = 0
        if patience != 0:
            events = select(patience)
            # None: the wait was interrupted by a signal; let the loop ask again.
            if events or patience is None:
                return events
        if when is None:
            raise DeadlockError(self._report("nothing can ever happen on this loop"))
        if when > self._limit:
            raise DeadlockError(self._report(f"the time limit of {self._limit} s is reached"))
        self._jumps += 1
        self._set_time(when)  # later than now, else the timeout would have been 0
        return events

    def _report(self, what: str) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"{what} (virtual time {self._now:g} s, {len(tasks)} pending tasks)"]
        lines += [f"  {task.get_name()}: {_where(task)}" for task in tasks]
        return "\n".join(lines)


def _where(task: asyncio.Task[Any]) -> str:
    """The chain of coroutines of a task, each with the line in which it waits."""
    steps: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        for kind in ("cr", "ag", "gi"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                break
        else:
            break  # a future, or an awaitable written in C
        file = pathlib.PurePath(frame.f_code.co_filename).name
        steps.append(f"{awaited.__qualname__} ({file}:{frame.f_lineno})")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return " -> ".join(steps)


def run(
    main: Coroutine[Any, Any, T],
    *,
    start: float = 0.0,
    limit: float = math.inf,
    debug: bool | None = None,
) -> T:
    """`asyncio.run` on a new `VirtualTimeLoop`: runs `main`, then closes everything.

    Raises DeadlockError when `main` can never end.
    """

    def factory() -> VirtualTimeLoop:
        return VirtualTimeLoop(start=start, limit=limit)

    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(main)
