from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import anyio.to_thread
import pytest

from asyncproducer.net import threads
from asyncproducer.net.threads import Workers
from asyncproducer.testing import clock
from asyncproducer.testing.clock import VirtualTimeLoop

Select = Callable[[float | None], Any]

#: Only a test that fails waits for so long.
REAL_SECONDS = 10.0


async def test_runs_in_another_thread_while_the_loop_goes_on() -> None:
    turned = threading.Event()

    async def turn() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        turned.set()

    def work() -> threading.Thread:
        assert turned.wait(REAL_SECONDS), "the loop stands still"
        return threading.current_thread()

    turning = asyncio.create_task(turn())
    assert await Workers().run(work) is not threading.current_thread()
    await turning


async def test_exception_comes_back() -> None:
    def broken() -> None:
        raise ZeroDivisionError("in the thread")

    with pytest.raises(ZeroDivisionError, match="in the thread"):
        await Workers().run(broken)


async def test_cancelling_ends_the_wait_and_not_the_work() -> None:
    """A producer that closes has no time to wait for a compression."""
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go_on.wait(REAL_SECONDS)
        ended.set()

    task = asyncio.create_task(Workers().run(slow))
    assert await asyncio.to_thread(started.wait, REAL_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    go_on.set()
    assert await asyncio.to_thread(ended.wait, REAL_SECONDS)


@pytest.mark.virtual_time
async def test_virtual_time_stands_still_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compression must not make batches expire in a test."""
    monkeypatch.setattr(clock, "EXECUTOR_PATIENCE", REAL_SECONDS)
    waiting = threading.Event()
    wait = VirtualTimeLoop._wait

    def watched(self: VirtualTimeLoop, select: Select, timeout: float | None) -> Any:
        def watched_select(patience: float | None) -> Any:
            if patience != 0:
                waiting.set()  # instead of letting the time jump
            return select(patience)

        return wait(self, watched_select, timeout)

    monkeypatch.setattr(VirtualTimeLoop, "_wait", watched)
    loop = asyncio.get_running_loop()
    timer = loop.call_later(0.001, lambda: None)
    assert await Workers().run(lambda: waiting.wait(REAL_SECONDS))
    assert loop.time() == 0
    timer.cancel()


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (2, 1), (4, 3)])
async def test_a_core_is_left_to_the_loop(
    monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int
) -> None:
    """Where all of them compress, the loop's turns wait for the operating system."""
    monkeypatch.setattr(threads, "_cores", lambda: cores)
    workers = Workers()
    running: list[int] = []
    ended: list[int] = []
    go_on = [threading.Event() for _ in range(6)]
    started = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def work(number: int) -> None:
        loop.call_soon_threadsafe(started.put_nowait, number)
        assert go_on[number].wait(REAL_SECONDS)

    tasks = [asyncio.create_task(workers.run(partial(work, number))) for number in range(6)]
    async with asyncio.timeout(REAL_SECONDS):
        while len(ended) < 6:
            running.append(await started.get())
            assert len(running) <= at_once
            if len(running) == at_once:
                assert started.empty()
                for number in running:
                    go_on[number].set()
                await asyncio.wait([tasks[number] for number in running])
                ended += running
                running = []
    assert sorted(ended) == [*range(6)]


async def test_the_next_begins_though_the_loop_has_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop that floods turns seldom: the worker must not stand idle until it does."""
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    workers = Workers()
    begun = SimpleQueue[int]()
    go_on = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        begun.put(number)
        assert go_on[number].wait(REAL_SECONDS)

    tasks = [asyncio.create_task(workers.run(partial(work, number))) for number in range(3)]
    first = await asyncio.to_thread(begun.get, timeout=REAL_SECONDS)
    go_on[first].set()
    for _ in range(2):
        # This blocks the loop.
        number = begun.get(timeout=REAL_SECONDS)
        assert begun.empty(), "one at a time"
        go_on[number].set()
    await asyncio.gather(*tasks)


async def test_what_is_done_is_told_before_the_line_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first batch of a long line can leave while the second is compressed."""
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    workers = Workers()
    go_on = threading.Event()
    first = asyncio.create_task(workers.run(lambda: "first"))
    waiting = asyncio.create_task(workers.run(lambda: go_on.wait(REAL_SECONDS)))
    async with asyncio.timeout(REAL_SECONDS):
        assert await first == "first"
    assert not waiting.done()
    go_on.set()
    assert await waiting


async def test_the_worker_ends_with_the_last_of_the_line() -> None:
    """Who closes at once afterwards leaves no task behind, and the next work begins anew."""
    workers = Workers()
    before = asyncio.all_tasks()
    for number in range(3):
        assert await workers.run(partial(abs, number)) == number
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


async def test_what_is_cancelled_in_the_line_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    workers = Workers()
    begun = SimpleQueue[int]()
    go_on = threading.Event()

    def work(number: int) -> int:
        begun.put(number)
        assert go_on.wait(REAL_SECONDS)
        return number

    tasks = [asyncio.create_task(workers.run(partial(work, number))) for number in range(3)]
    assert await asyncio.to_thread(begun.get, timeout=REAL_SECONDS) == 0
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    go_on.set()
    assert [await tasks[0], await tasks[2]] == [0, 2]
    assert begun.get(timeout=REAL_SECONDS) == 2
    assert begun.empty()


@pytest.mark.parametrize("cores", [2, 8])
async def test_where_no_thread_is_to_be_had_the_loop_does_one_a_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cores: int
) -> None:
    """A container that has as many threads as it may: a late turn is better than a lost record."""
    monkeypatch.setattr(threads, "_cores", lambda: cores)

    async def none_left(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers()
    turn, turns = 0, list[int]()

    def work(number: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        turns.append(turn)
        return 6 // number

    with monkeypatch.context() as patched:
        patched.setattr(anyio.to_thread, "run_sync", none_left)
        tasks = [asyncio.create_task(workers.run(partial(work, number))) for number in (1, 0, 2, 3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        async with asyncio.timeout(REAL_SECONDS):
            while not all(task.done() for task in tasks):
                turn += 1
                await asyncio.sleep(0)
    assert [tasks[0].result(), tasks[3].result()] == [6, 2]
    assert isinstance(tasks[1].exception(), ZeroDivisionError)
    assert tasks[2].cancelled()
    assert len(turns) == len(set(turns)) == 3, "not what nobody waits for any more"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["no thread to compress in, so the loop waits for it: can't start new thread"]
    assert await workers.run(threading.current_thread) is not threading.main_thread()


async def test_where_no_other_thread_is_to_be_had_that_one_does_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_cores", lambda: 8)
    workers = Workers()
    started, go_on = threading.Event(), threading.Event()

    def first() -> threading.Thread:
        started.set()
        go_on.wait(REAL_SECONDS)
        return threading.current_thread()

    tasks = [asyncio.create_task(workers.run(first))]
    assert await asyncio.to_thread(started.wait, REAL_SECONDS)

    async def none_left(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(anyio.to_thread, "run_sync", none_left)
    tasks += [asyncio.create_task(workers.run(threading.current_thread)) for _ in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    go_on.set()
    async with asyncio.timeout(REAL_SECONDS):
        [thread] = {await task for task in tasks}
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("turned", [False, True])
async def test_a_worker_that_is_cancelled_tells_who_waits_and_another_follows(
    monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    """Before its first turn a task runs nothing at all, not even its `finally`."""
    monkeypatch.setattr(threads, "_cores", lambda: 2)
    workers = Workers()
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(REAL_SECONDS)

    before = asyncio.all_tasks()
    waiting = [asyncio.create_task(workers.run(work)) for _ in range(2)]
    await asyncio.sleep(0)
    [worker] = asyncio.all_tasks() - before - {*waiting}
    if turned:
        assert await asyncio.to_thread(started.wait, REAL_SECONDS)
    worker.cancel()
    async with asyncio.timeout(REAL_SECONDS):
        told = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in told] == ["its worker was cancelled"] * 2
    go_on.set()
    async with asyncio.timeout(REAL_SECONDS):
        assert await workers.run(partial(abs, -1)) == 1


def test_the_loop_may_end_before_the_work_does() -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(REAL_SECONDS)
        ended.set()

    async def main() -> None:
        workers = Workers()
        tasks = [asyncio.create_task(workers.run(work)) for _ in range(8)]
        await asyncio.to_thread(started.wait, REAL_SECONDS)
        del tasks

    asyncio.run(main())
    go_on.set()
    assert ended.wait(REAL_SECONDS)
