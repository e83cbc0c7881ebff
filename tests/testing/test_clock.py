"""The VirtualTimeLoop: time jumps when nothing can run, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest

from asyncproducer.testing import clock
from asyncproducer.testing.clock import DeadlockError, VirtualTimeLoop

#: Far more than any test here needs, and far less than the virtual times that are slept.
REAL_SECONDS = 20.0

T = TypeVar("T")
Events = list[tuple[selectors.SelectorKey, int]]
Select = Callable[[float | None], Events]


@pytest.fixture(autouse=True)
def _takes_no_real_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < REAL_SECONDS


def now() -> float:
    return asyncio.get_running_loop().time()


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def run_watched(main: Coroutine[Any, Any, T], on_wait: Callable[[float | None], object]) -> T:
    """`clock.run`, and `on_wait` is called whenever the loop is about to wait really."""

    class Loop(VirtualTimeLoop):
        def _wait(self, select: Select, timeout: float | None) -> Events:
            def watched(patience: float | None) -> Events:
                if patience != 0:
                    on_wait(patience)
                return select(patience)

            return super()._wait(watched, timeout)

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


# --- time ---------------------------------------------------------------------------------


def test_sleep_moves_the_time_exactly_to_the_deadline() -> None:
    async def main() -> list[float]:
        seen = [now()]
        for delay in (0.1, 0.2, 3600.0, 1e-6):
            await asyncio.sleep(delay)
            seen.append(now())
        return seen

    assert clock.run(main()) == [
        0.0,
        0.1,
        0.1 + 0.2,
        0.1 + 0.2 + 3600.0,
        0.1 + 0.2 + 3600.0 + 1e-6,
    ]


def test_time_stands_still_while_something_can_run() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert clock.run(main(), start=7.0) == 7.0


def test_timers_run_in_order_of_their_deadlines_and_each_at_its_own_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        def note(name: str) -> None:
            seen.append((name, now()))

        for name, delay in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("a2", 1.0)):
            loop.call_later(delay, note, name)
        loop.call_at(2.5, note, "at")
        loop.call_later(1.5, note, "never").cancel()
        await asyncio.sleep(4.0)
        return seen

    assert clock.run(main()) == [("a", 1.0), ("a2", 1.0), ("b", 2.0), ("at", 2.5), ("c", 3.0)]


def test_many_cancelled_timers_do_not_hide_the_next_one() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for i in range(500):  # more than asyncio keeps before it rebuilds its heap
            loop.call_later(1.0 + i, lambda: None).cancel()
        await asyncio.sleep(1000.0)
        return now()

    assert clock.run(main()) == 1000.0


@pytest.mark.parametrize("start", [0.0, 1.7e9, 2.0**52])
def test_timers_run_however_large_the_time_is(start: float) -> None:
    """A float's step at 1.7e9 is larger than the nanosecond that asyncio adds to "now"."""

    async def main() -> float:
        await asyncio.sleep(1.0)
        await asyncio.sleep(1.0)
        return now()

    assert clock.run(main(), start=start) == start + 2.0


def test_no_timer_is_early() -> None:
    """Who looks at the clock and sleeps again would be woken for ever, as time stands still."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        deadlines = [0.1 + 0.2, 0.3, 0.3 + 5e-10, 1.0]
        seen: list[float] = []
        for deadline in deadlines:
            loop.call_at(deadline, lambda: seen.append(now()))
        await asyncio.sleep(2.0)
        return seen

    assert clock.run(main()) == [0.3, 0.1 + 0.2, 0.3 + 5e-10, 1.0]


def test_a_timer_beyond_one_day_is_one_jump() -> None:
    async def main() -> int:
        await asyncio.sleep(1e7)
        return virtual_loop().jumps

    assert clock.run(main()) == 1


def test_a_deadline_in_the_past_does_not_turn_time_back() -> None:
    async def main() -> float:
        await asyncio.sleep(5.0)
        done = asyncio.Event()
        asyncio.get_running_loop().call_at(1.0, done.set)
        await done.wait()
        return now()

    assert clock.run(main()) == 5.0


def test_asyncio_timeout_fires_at_its_deadline() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.Event().wait()
        async with asyncio.timeout_at(41.0):
            await asyncio.sleep(0.5)
        return now()

    assert clock.run(main()) == 40.5


def test_anyio_follows_the_virtual_time() -> None:
    async def main() -> float:
        with anyio.move_on_after(60.0) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 5.0)
            group.start_soon(anyio.sleep, 7.0)
        return anyio.current_time()

    assert clock.run(main()) == 67.0


def test_debug_mode_works_and_calls_nothing_slow(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> bool:
        await asyncio.sleep(100.0)
        await asyncio.to_thread(int)
        return asyncio.get_running_loop().get_debug()

    assert clock.run(main(), debug=True)
    assert "took" not in caplog.text


def test_repr_shows_the_time() -> None:
    async def main() -> str:
        await asyncio.sleep(2.5)
        return repr(asyncio.get_running_loop())

    assert "time=2.500000 jumps=1 running=True" in clock.run(main())


def test_run_cancels_what_is_left_and_closes_the_loop() -> None:
    ended: list[str] = []
    loops: list[VirtualTimeLoop] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5.0)  # a clean-up that takes time
            ended.append("cancelled")

    async def main() -> None:
        loops.append(virtual_loop())
        loops.append(asyncio.create_task(forever()).get_loop())  # type: ignore[arg-type]
        await asyncio.sleep(1.0)

    clock.run(main())
    assert ended == ["cancelled"]
    assert loops[0].is_closed()
    assert loops[0].time() == 6.0


# --- executors ----------------------------------------------------------------------------


def test_a_job_in_an_executor_takes_no_virtual_time() -> None:
    waiting = threading.Event()

    async def main() -> tuple[float, float]:
        task = asyncio.create_task(asyncio.sleep(1000.0))
        assert await asyncio.to_thread(waiting.wait, REAL_SECONDS)
        at = now()
        await task
        return at, now()

    assert run_watched(main(), lambda _: waiting.set()) == (0.0, 1000.0)


def test_a_job_in_a_thread_of_anyio_takes_no_virtual_time() -> None:
    """FastAPI runs a plain `def` there, and no executor knows of it."""
    waiting = threading.Event()

    async def main() -> tuple[float, float]:
        task = asyncio.create_task(asyncio.sleep(1000.0))
        assert await anyio.to_thread.run_sync(waiting.wait, REAL_SECONDS)
        at = now()
        await task  # the thread is still there, but idle
        return at, now()

    assert run_watched(main(), lambda _: waiting.set()) == (0.0, 1000.0)


def test_a_short_job_comes_before_a_near_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may take longer than the time to the timer: it gets EXECUTOR_PATIENCE."""
    monkeypatch.setattr(clock, "EXECUTOR_PATIENCE", REAL_SECONDS)
    waiting = threading.Event()
    waits: list[float | None] = []

    def on_wait(patience: float | None) -> None:
        waits.append(patience)
        waiting.set()

    async def main() -> list[str]:
        seen: list[str] = []
        asyncio.get_running_loop().call_later(0.001, seen.append, "timer")
        assert await asyncio.to_thread(waiting.wait, REAL_SECONDS)
        seen.append("job")
        await asyncio.sleep(1.0)
        return seen

    assert run_watched(main(), on_wait) == ["job", "timer"]
    assert waits[0] == REAL_SECONDS


def test_a_job_that_needs_a_timer_of_the_loop_gets_it() -> None:
    """A thread that calls into the loop, as through a portal, and waits for virtual time."""

    async def main() -> float:
        loop = asyncio.get_running_loop()

        async def later() -> float:
            await asyncio.sleep(0.005)
            return now()

        def job() -> float:
            return asyncio.run_coroutine_threadsafe(later(), loop).result(REAL_SECONDS)

        return await asyncio.to_thread(job)

    assert clock.run(main()) == 0.005


def test_time_jumps_again_once_the_job_is_over() -> None:
    async def main() -> float:
        for _ in range(5):
            await asyncio.to_thread(int)
            await asyncio.sleep(10000.0)
        return now()

    assert clock.run(main()) == 50000.0


def test_a_cancelled_job_is_waited_for_no_longer() -> None:
    async def main() -> float:
        go_on = threading.Event()
        job = asyncio.create_task(asyncio.to_thread(go_on.wait, REAL_SECONDS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job
        await asyncio.sleep(10000.0)  # would take this long, were the job still counted
        go_on.set()
        return now()

    assert clock.run(main()) == 10000.0


def test_a_failed_job_gives_its_error() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        await asyncio.sleep(10000.0)

    clock.run(main())


def test_outside_work_lets_a_foreign_thread_answer_first() -> None:
    async def main() -> float:
        loop = virtual_loop()
        answer = asyncio.Event()
        go_on = threading.Event()

        def foreign() -> None:
            go_on.wait()
            loop.call_soon_threadsafe(answer.set)

        thread = threading.Thread(target=foreign)
        thread.start()
        with loop.outside_work():
            loop.call_soon(go_on.set)
            async with asyncio.timeout(REAL_SECONDS):
                await answer.wait()
        thread.join()
        return now()

    assert clock.run(main()) == 0.0


# --- sockets ------------------------------------------------------------------------------


class EchoServer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(EchoServer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        yield reader, writer
        writer.close()
        await writer.wait_closed()


def test_loopback_sockets_answer_in_no_time_while_timers_are_pending() -> None:
    async def main() -> float:
        async with echo_server() as (reader, writer):
            for i in range(50):
                async with asyncio.timeout(0.001):  # the nearest timer is 1 ms of virtual time away
                    writer.write(b"%06d" % i)
                    assert await reader.readexactly(6) == b"%06d" % i
        return now()

    assert clock.run(main()) == 0.0


def test_time_jumps_over_idle_sockets() -> None:
    async def main() -> float:
        async with echo_server() as (reader, writer):
            for _ in range(10):
                await asyncio.sleep(3600.0)
                writer.write(b"x")
                assert await reader.read(1) == b"x"
        return now()

    assert clock.run(main()) == 36000.0


def test_bytes_that_are_on_their_way_are_seen_before_time_jumps() -> None:
    """The peer's bytes arrive during the real wait before a jump."""
    ours, theirs = socket.socketpair()
    waits: list[float | None] = []

    def on_wait(patience: float | None) -> None:
        waits.append(patience)
        if patience == clock.SOCKET_PATIENCE:
            theirs.sendall(b"x")

    async def main() -> float:
        reader, writer = await asyncio.open_connection(sock=ours)
        timer = asyncio.get_running_loop().call_later(1e-6, lambda: None)
        assert await reader.read(1) == b"x"
        writer.close()
        await writer.wait_closed()
        timer.cancel()
        return now()

    with theirs:
        assert run_watched(main(), on_wait) == 0.0
    assert waits.count(clock.SOCKET_PATIENCE) == 1


def test_a_socket_without_any_timer_is_waited_for_really() -> None:
    """What arrives is not known to the loop: no deadlock, no jump, just waiting."""
    ours, theirs = socket.socketpair()
    waits: list[float | None] = []

    def on_wait(patience: float | None) -> None:
        if not waits:
            theirs.sendall(b"x")
        waits.append(patience)

    async def main() -> float:
        reader, writer = await asyncio.open_connection(sock=ours)
        assert await reader.read(1) == b"x"
        writer.close()
        return now()

    with theirs:
        assert run_watched(main(), on_wait) == 0.0
    assert waits[0] is None


# --- deadlock, limit ----------------------------------------------------------------------


def test_a_deadlock_is_an_error_that_names_every_task_and_where_it_waits() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    async def main() -> None:
        await asyncio.sleep(3.0)
        tasks = [asyncio.create_task(outer(), name="worker")]
        await asyncio.gather(*tasks)

    with pytest.raises(DeadlockError) as caught:
        clock.run(main())
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert "virtual time 3 s, 2 pending tasks" in text
    assert "main (test_clock.py:" in text
    worker = text[text.index("worker: ") :]
    assert worker.index("outer (") < worker.index("inner (") < worker.index("Event.wait (locks.py")


def test_a_deadlock_names_an_awaitable_that_is_no_coroutine() -> None:
    class Custom:
        def __await__(self) -> Generator[object, None, None]:
            yield from asyncio.get_running_loop().create_future()

    async def main() -> None:
        await Custom()

    with pytest.raises(DeadlockError, match=r"main \(.*Custom.__await__ \(test_clock.py:\d+\)"):
        clock.run(main())


def test_a_thread_that_the_loop_does_not_know_may_still_call_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "THREAD_PATIENCE", REAL_SECONDS)

    waiting = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        called = asyncio.Event()

        def call_in() -> None:
            waiting.wait(REAL_SECONDS)
            loop.call_soon_threadsafe(called.set)

        thread = threading.Thread(target=call_in)
        thread.start()
        await called.wait()
        thread.join()

    run_watched(main(), lambda _: waiting.set())


def test_an_idle_thread_only_delays_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "THREAD_PATIENCE", 0.01)

    async def main() -> None:
        await asyncio.to_thread(int)  # leaves an idle worker thread behind
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        clock.run(main())


def test_the_limit_ends_a_test_whose_periodic_timer_hides_a_deadlock() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - a periodic timer is the point
            await asyncio.sleep(300.0)

    with pytest.raises(DeadlockError, match=r"the time limit of 86400.0 s.*\n.*main \("):
        clock.run(main(), limit=86400.0)


def test_the_limit_itself_can_be_reached() -> None:
    async def main() -> float:
        await asyncio.sleep(10.0)
        return now()

    assert clock.run(main(), limit=10.0) == 10.0


def test_a_signal_does_not_look_like_a_deadlock() -> None:
    """A blocking select that a signal handler interrupts returns nothing; that means nothing."""
    ours, theirs = socket.socketpair()
    waiting = threading.Event()

    def send() -> None:
        waiting.wait(REAL_SECONDS)
        signal.raise_signal(signal.SIGUSR1)

    async def main() -> float:
        loop = virtual_loop()
        got = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, got.set)
        loop.add_reader(ours, lambda: None)  # so that the loop waits really
        sender = threading.Thread(target=send)
        sender.start()
        await got.wait()
        sender.join()
        loop.remove_reader(ours)
        loop.remove_signal_handler(signal.SIGUSR1)
        return now()

    with ours, theirs:
        assert run_watched(main(), lambda _: waiting.set()) == 0.0


def test_an_interrupted_wait_is_no_deadlock() -> None:
    """The selector may come back with nothing though it was to wait for ever."""
    ours, theirs = socket.socketpair()
    waits: list[float | None] = []

    class Loop(VirtualTimeLoop):
        def _wait(self, select: Select, timeout: float | None) -> Events:
            def interrupted(patience: float | None) -> Events:
                waits.append(patience)
                if patience is not None:
                    return select(patience)
                theirs.sendall(b"x")
                return []

            return super()._wait(interrupted, timeout)

    async def main() -> bytes:
        reader, writer = await asyncio.open_connection(sock=ours)
        data = await reader.read(1)
        writer.close()
        return data

    with theirs, asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(main()) == b"x"
    assert waits.count(None) == 1


def test_closing_waits_for_the_threads_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was cancelled runs on in its thread. Joining it is no deadlock."""
    monkeypatch.setattr(clock, "THREAD_PATIENCE", 0.0)
    joining = threading.Event()
    done: list[bool] = []

    async def main() -> None:
        task = asyncio.create_task(
            asyncio.to_thread(lambda: done.append(joining.wait(REAL_SECONDS)))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    run_watched(main(), lambda _: joining.set())
    assert done == [True]


def test_a_loop_that_is_stopped_does_not_jump() -> None:
    loop = VirtualTimeLoop()
    loop.call_later(10.0, lambda: None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert (loop.time(), loop.jumps) == (0.0, 0)
    loop.close()


def test_a_selector_without_its_loop_is_the_plain_one() -> None:
    selector = clock._Selector()
    assert selector.select(0) == []
    selector.close()


def test_without_a_limit_time_has_no_end() -> None:
    async def main() -> float:
        await asyncio.sleep(1e15)
        return now()

    assert clock.run(main(), limit=math.inf) == 1e15
