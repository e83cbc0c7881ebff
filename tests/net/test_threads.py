from __future__ import annotations

import asyncio
import threading
import time

import pytest

from asyncproducer.net.threads import in_thread

LONGER_THAN_A_TURN = 0.02


def work() -> threading.Thread:
    time.sleep(LONGER_THAN_A_TURN)
    return threading.current_thread()


async def test_runs_in_another_thread_while_the_loop_goes_on() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await in_thread(work) is not threading.current_thread()
    counting.cancel()
    assert turns > 1


async def test_exception_comes_back() -> None:
    def broken() -> None:
        raise ZeroDivisionError("in the thread")

    with pytest.raises(ZeroDivisionError, match="in the thread"):
        await in_thread(broken)


async def test_cancelling_ends_the_wait_and_not_the_work() -> None:
    """A producer that closes has no time to wait for a compression."""
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go_on.wait(10)
        ended.set()

    task = asyncio.create_task(in_thread(slow))
    assert await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)


@pytest.mark.virtual_time
async def test_virtual_time_stands_still_meanwhile() -> None:
    """Compression must not make batches expire in a test."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(0.001, lambda: None)
    await in_thread(work)
    assert loop.time() == 0
    timer.cancel()
