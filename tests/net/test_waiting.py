from __future__ import annotations

import asyncio
from math import inf
from time import monotonic

import pytest

from asyncproducer.net.waiting import Alarm, Changes, time_of

pytestmark = pytest.mark.virtual_time


async def test_a_change_wakes_everybody_who_waits() -> None:
    loop = asyncio.get_running_loop()
    changes = Changes(loop)
    waiting = [asyncio.create_task(changes.wait(inf)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.tell()
    changes.tell()
    await asyncio.gather(*waiting)
    assert loop.time() == 0.0


async def test_without_a_change_the_wait_ends_at_its_time() -> None:
    loop = asyncio.get_running_loop()
    await Changes(loop).wait(2.5)
    assert loop.time() == 2.5


async def test_a_change_before_the_wait_does_not_count() -> None:
    loop = asyncio.get_running_loop()
    changes = Changes(loop)
    changes.tell()
    await changes.wait(1.0)
    assert loop.time() == 1.0


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    loop = asyncio.get_running_loop()
    changes = Changes(loop)
    waiting = asyncio.create_task(changes.wait(5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    changes.tell()
    await changes.wait(1.0)
    assert loop.time() == 1.0


async def test_an_alarm_ends_the_sleep() -> None:
    loop = asyncio.get_running_loop()
    alarm = Alarm(loop)
    sleeping = asyncio.create_task(alarm.sleep(inf))
    await asyncio.sleep(0)
    alarm.ring()
    await sleeping
    assert loop.time() == 0.0


async def test_an_alarm_before_the_sleep_ends_it_at_once_and_only_once() -> None:
    loop = asyncio.get_running_loop()
    alarm = Alarm(loop)
    alarm.ring()
    await alarm.sleep(1.0)
    assert loop.time() == 0.0
    await alarm.sleep(1.0)
    assert loop.time() == 1.0


async def test_those_who_wait_are_woken_in_their_order() -> None:
    """A set would make runs of the same simulation differ."""
    changes = Changes(asyncio.get_running_loop())
    woken: list[int] = []

    async def wait(number: int) -> None:
        await changes.wait(inf)
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(100)]
    await asyncio.sleep(0)
    changes.tell()
    await asyncio.gather(*tasks)
    assert woken == list(range(100))


async def test_the_time_of_an_ordinary_loop_is_asked_directly() -> None:
    loop = asyncio.get_running_loop()
    before = loop.time()
    await asyncio.sleep(2.5)
    assert time_of(loop)() == loop.time() == before + 2.5  # virtual
    ordinary = asyncio.SelectorEventLoop()
    try:
        assert time_of(ordinary) is monotonic
        assert ordinary.time() <= time_of(ordinary)() <= ordinary.time()
    finally:
        ordinary.close()
