"""Real tasks that await deliveries: what they sleep on must be to them what a future is.

`core/delivery.py` has its own idea of what a Task needs of the thing that it sleeps on. The rules
are tested in tests/core/test_delivery.py with a loop in small; here are the tasks of asyncio,
those written in C and those written in Python, in all the ways in which somebody can wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import anyio
import pytest

from asyncproducer import BrokerRejected, Delivery, DeliveryError, RecordMetadata
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.delivery import Failure
from asyncproducer.intake import Breath
from asyncproducer.testing.clock import VirtualTimeLoop

T = TypeVar("T")

Loop: TypeAlias = asyncio.AbstractEventLoop

#: Seconds. Virtual ones, but for uvloop, whose clock is the machine's.
TICK = 0.001


# -- the loops and the tasks -------------------------------------------------------------------


def _python_task(loop: Loop, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    kind: type[asyncio.Task[T]] = getattr(asyncio.tasks, "_PyTask")  # noqa: B009 no stub has it
    return kind(coro, loop=loop, **options)


def _eager_task(loop: Loop, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    options.setdefault("eager_start", True)
    return asyncio.Task(coro, loop=loop, **options)


def _uvloop() -> Loop:
    loop: Loop = pytest.importorskip("uvloop").new_event_loop()
    return loop


class World(NamedTuple):
    """Where a test takes place."""

    name: str
    new_loop: Callable[[], Loop] = VirtualTimeLoop
    new_task: Any = None
    debug: bool = False


WORLDS = [
    World("tasks in C"),
    World("tasks in C, debug mode", debug=True),
    World("tasks in Python", new_task=_python_task),
    World("tasks in Python, debug mode", new_task=_python_task, debug=True),
    World("uvloop", _uvloop),
    World("uvloop, tasks in Python, debug mode", _uvloop, _python_task, debug=True),
]
if sys.version_info >= (3, 12):
    WORLDS.append(World("eager tasks", new_task=_eager_task))


@pytest.fixture(params=WORLDS, ids=lambda world: world.name)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """A loop that is not running yet. At the end no task is left, and nothing went wrong in it."""
    world: World = request.param
    loop = world.new_loop()
    loop.set_debug(world.debug)
    loop.set_task_factory(world.new_task)
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    yield loop
    if loop.is_closed():
        return
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not left
    assert not unseen


def test_each_world_has_its_own_tasks() -> None:
    async def scene() -> asyncio.Task[Any] | None:
        return asyncio.current_task()

    for world in WORLDS[:4]:
        loop = world.new_loop()
        loop.set_task_factory(world.new_task)
        task = loop.run_until_complete(scene())
        loop.close()
        assert (type(task) is asyncio.Task) == (world.new_task is None)
        assert (type(task).__module__, type(task).__name__) == (
            "_asyncio" if world.new_task is None else "asyncio.tasks",
            "Task",
        )


# -- batches -----------------------------------------------------------------------------------


def new(loop: Loop, records: int = 3) -> tuple[ProducerBatch, list[Delivery]]:
    batch = ProducerBatch("orders", 0, write_limit=100_000, created_at=0.0, loop=loop)
    deliveries = []
    for number in range(records):
        delivery = batch.try_append(number, None, b"%d" % number + bytes(100), NO_HEADERS)
        assert delivery is not None
        deliveries.append(delivery)
    return batch, deliveries


def split(batch: ProducerBatch, limit: int = 10) -> list[ProducerBatch]:
    batch.close()
    batch.seal()
    return batch.split(limit)


def refusal() -> Failure:
    return Failure(BrokerRejected, "no")


async def asleep(*awaitables: Awaitable[T]) -> list[asyncio.Task[T]]:
    """A task for each, which has begun to wait."""
    tasks: list[Any] = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    return tasks


async def turn() -> None:
    await asyncio.sleep(0)


class CountingFence:
    def __init__(self) -> None:
        self.passes = 0

    def passed(self) -> None:
        self.passes += 1


# -- the end of the record ---------------------------------------------------------------------


def test_a_task_gets_the_metadata_of_its_own_record(loop: Loop) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop)
        tasks = await asleep(*deliveries)
        batch.acknowledge(500, -1)
        assert [(await task).offset for task in tasks] == [500, 501, 502]
        assert (await deliveries[1]).offset == 501

    loop.run_until_complete(scene())


def test_every_task_gets_an_exception_of_its_own(loop: Loop) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop, 2)
        tasks = await asleep(deliveries[0], deliveries[0], deliveries[1])
        batch.fail(refusal())
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [BrokerRejected] * 3
        assert len(set(map(id, errors))) == 3

    loop.run_until_complete(scene())


def test_one_delivery_may_be_awaited_by_several_tasks(loop: Loop) -> None:
    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        tasks = await asleep(delivery, delivery, delivery)
        tasks[1].cancel()
        await turn()
        batch.acknowledge(7, -1)
        await turn()
        assert [task.done() for task in tasks] == [True, True, True]
        assert [tasks[0].result().offset, tasks[2].result().offset] == [7, 7]
        assert tasks[1].cancelled()

    loop.run_until_complete(scene())


def test_what_is_done_is_awaited_without_a_turn_of_the_loop(loop: Loop) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop, 1)
        batch.acknowledge(0, -1)
        turns: list[str] = []
        loop.call_soon(turns.append, "turn")
        await deliveries[0]
        assert turns == []
        await turn()

    loop.run_until_complete(scene())


def test_tasks_wake_in_the_order_in_which_they_began_to_wait(loop: Loop) -> None:
    """In the turn after the end of the batch, between what was called before and after that."""
    order: list[object] = []

    async def wait(number: int, delivery: Delivery) -> None:
        await delivery
        order.append(number)
        loop.call_soon(order.append, f"{number} calls")

    async def scene() -> None:
        batch, deliveries = new(loop, 4)
        tasks = await asleep(*(wait(number, deliveries[number]) for number in (2, 0, 3, 1, 2)))
        loop.call_soon(order.append, "before")
        batch.acknowledge(0, -1)
        loop.call_soon(order.append, "after")
        assert order == []
        await turn()
        assert order == ["before", 2, 0, 3, 1, 2, "after"]
        assert all(task.done() for task in tasks)
        await turn()
        assert order[7:] == [f"{number} calls" for number in (2, 0, 3, 1, 2)]

    loop.run_until_complete(scene())


def test_a_task_that_wakes_may_await_another_delivery_of_the_batch(loop: Loop) -> None:
    async def both(first: Delivery, second: Delivery) -> list[int]:
        return [(await first).offset, (await second).offset]

    async def scene() -> None:
        batch, deliveries = new(loop, 2)
        later, [last] = new(loop, 1)
        tasks = await asleep(both(*deliveries), both(deliveries[1], last))
        batch.acknowledge(10, -1)
        await turn()
        assert tasks[0].result() == [10, 11]
        assert not tasks[1].done()
        later.acknowledge(20, -1)
        assert await tasks[1] == [11, 20]

    loop.run_until_complete(scene())


def test_the_tasks_of_a_batch_that_is_split_wait_for_the_parts(loop: Loop) -> None:
    """RA-20. One of them is cancelled before that, one after."""

    async def scene() -> None:
        batch, deliveries = new(loop, 4)
        tasks = await asleep(*deliveries)
        tasks[0].cancel()
        parts = split(batch)
        tasks[2].cancel()
        parts[3].acknowledge(30, -1)
        await turn()
        assert [task.done() for task in tasks] == [True, False, True, True]
        assert [tasks[0].cancelled(), tasks[2].cancelled()] == [True, True]
        assert tasks[3].result().offset == 30
        for part in parts[:3]:
            part.acknowledge(20, -1)
        assert (await tasks[1]).offset == 20

    loop.run_until_complete(scene())


def test_each_task_wakes_in_its_own_context(loop: Loop) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    async def wait(delivery: Delivery, name: str | None) -> str:
        if name is not None:
            user.set(name)
        await delivery
        seen = user.get()
        user.set("changed")
        return seen

    async def scene() -> None:
        batch, deliveries = new(loop, 4)
        user.set("main")
        shared = contextvars.copy_context()
        shared.run(user.set, "shared")
        tasks = await asleep(wait(deliveries[0], "Ann"), wait(deliveries[1], None))
        tasks += [loop.create_task(wait(d, None), context=shared) for d in deliveries[2:]]
        await turn()
        user.set("who acknowledges")
        batch.acknowledge(0, -1)
        assert await asyncio.gather(*tasks) == ["Ann", "main", "shared", "changed"]
        assert user.get() == "who acknowledges"

    loop.run_until_complete(scene())


# -- asyncio's ways to wait --------------------------------------------------------------------


def test_gather(loop: Loop) -> None:
    async def scene() -> None:
        good, deliveries = new(loop, 2)
        bad, [refused] = new(loop, 1)
        loop.call_soon(good.acknowledge, 4, -1)
        loop.call_soon(bad.fail, refusal())
        results = await asyncio.gather(*deliveries, refused, return_exceptions=True)
        assert [getattr(result, "offset", type(result)) for result in results] == [
            4,
            5,
            BrokerRejected,
        ]
        with pytest.raises(BrokerRejected):
            await asyncio.gather(*deliveries, refused)

    loop.run_until_complete(scene())


def test_a_gather_that_is_cancelled_cancels_each_wait(loop: Loop) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop)
        gathering = asyncio.gather(*deliveries)
        await turn()
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        batch.acknowledge(0, -1)
        assert deliveries[2].result().offset == 2

    loop.run_until_complete(scene())


def test_ensure_future_makes_a_task_of_a_delivery(loop: Loop) -> None:
    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        assert not asyncio.isfuture(delivery)
        task = asyncio.ensure_future(delivery)
        assert asyncio.isfuture(task)
        await turn()
        batch.acknowledge(9, -1)
        assert (await task).offset == 9

    loop.run_until_complete(scene())


def test_wait_and_as_completed(loop: Loop) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop)
        tasks = await asleep(*deliveries)
        parts = split(batch)
        done, pending = await asyncio.wait(tasks, timeout=TICK)
        assert (len(done), len(pending)) == (0, 3)
        parts[2].acknowledge(30, -1)
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == ({tasks[2]}, {tasks[0], tasks[1]})
        loop.call_soon(parts[1].acknowledge, 20, -1)
        loop.call_soon(parts[0].acknowledge, 10, -1)
        offsets = [(await next_one).offset for next_one in asyncio.as_completed(pending)]
        assert offsets == [20, 10]

    loop.run_until_complete(scene())


def test_wait_for(loop: Loop) -> None:
    wait_for = getattr(asyncio, "wait_for")  # noqa: B009 users may call what we may not

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        with pytest.raises(TimeoutError):
            await wait_for(delivery, TICK)
        with pytest.raises(TimeoutError):
            await wait_for(delivery, 0)
        assert not delivery.done()
        loop.call_later(TICK, batch.acknowledge, 3, -1)
        assert (await wait_for(delivery, 1000 * TICK)).offset == 3
        assert (await wait_for(delivery, None)).offset == 3

    loop.run_until_complete(scene())


def test_timeout(loop: Loop) -> None:
    """The task goes on afterwards, and is not cancelled."""

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        me = asyncio.current_task()
        assert me is not None
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(TICK):
                    await delivery
            assert me.cancelling() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await delivery
        loop.call_later(TICK, batch.acknowledge, 3, -1)
        async with asyncio.timeout(1000 * TICK):
            assert (await delivery).offset == 3

    loop.run_until_complete(scene())


def test_of_two_timeouts_the_outer_one_may_be_the_one_that_ends(loop: Loop) -> None:
    expired: list[bool] = []

    async def hurried(delivery: Delivery) -> None:
        async with asyncio.timeout(TICK) as outer:
            try:
                async with asyncio.timeout(1000 * TICK) as inner:
                    await delivery
            finally:
                expired.extend((outer.expired(), inner.expired()))

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        with pytest.raises(TimeoutError):
            await hurried(delivery)
        assert expired == [True, False]
        batch.acknowledge(0, -1)

    loop.run_until_complete(scene())


def test_task_group(loop: Loop) -> None:
    async def wait(delivery: Delivery) -> int:
        return (await delivery).offset

    async def scene() -> None:
        batch, deliveries = new(loop)
        loop.call_later(TICK, batch.acknowledge, 6, -1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(delivery)) for delivery in deliveries]
        assert [task.result() for task in tasks] == [6, 7, 8]

    loop.run_until_complete(scene())


def test_a_task_group_in_which_one_record_fails_cancels_the_other_waits(loop: Loop) -> None:
    tasks: list[asyncio.Task[RecordMetadata]] = []

    async def wait(delivery: Delivery) -> RecordMetadata:
        return await delivery

    async def together(*deliveries: Delivery) -> None:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(wait(delivery)) for delivery in deliveries)
            await deliveries[0]

    async def scene() -> None:
        good, deliveries = new(loop, 2)
        bad, [refused] = new(loop, 1)
        loop.call_later(TICK, bad.fail, refusal())
        with pytest.raises(ExceptionGroup) as raised:
            await together(*deliveries, refused)
        assert [type(error) for error in raised.value.exceptions] == [BrokerRejected]
        assert [task.cancelled() for task in tasks] == [True, True, False]
        me = asyncio.current_task()
        assert me is not None
        assert me.cancelling() == 0
        good.acknowledge(0, -1)
        assert (await deliveries[0]).offset == 0

    loop.run_until_complete(scene())


def test_a_shielded_wait_goes_on(loop: Loop) -> None:
    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        inner = asyncio.ensure_future(delivery)
        [outer] = await asleep(asyncio.shield(inner))
        outer.cancel()
        await turn()
        assert outer.cancelled()
        assert not inner.done()
        batch.acknowledge(2, -1)
        assert (await inner).offset == 2

    loop.run_until_complete(scene())


def test_cancel_scopes_of_anyio(loop: Loop) -> None:
    """What FastAPI and others wait in. They cancel in every turn until the task has left."""

    async def moving_on(delivery: Delivery, after: float) -> RecordMetadata | None:
        with anyio.move_on_after(after):
            return await delivery
        return None

    async def failing(delivery: Delivery, after: float) -> RecordMetadata:
        with anyio.fail_after(after):
            return await delivery

    async def cancelled_together(*deliveries: Delivery) -> None:
        async def wait(delivery: Delivery) -> None:
            await delivery

        async with anyio.create_task_group() as group:
            for delivery in deliveries:
                group.start_soon(wait, delivery)
            await turn()
            group.cancel_scope.cancel()
            await deliveries[0]

    async def scene() -> None:
        batch, deliveries = new(loop)
        assert await moving_on(deliveries[0], TICK) is None
        with pytest.raises(TimeoutError):
            await failing(deliveries[0], TICK)
        if loop.get_task_factory() is not _eager_task:  # anyio's groups know no such tasks
            await cancelled_together(*deliveries)
        me = asyncio.current_task()
        assert me is not None
        assert me.cancelling() == 0
        loop.call_soon(batch.acknowledge, 5, -1)
        assert (await failing(deliveries[0], 1000 * TICK)).offset == 5
        assert await moving_on(deliveries[1], 1000 * TICK) == deliveries[1].result()

    loop.run_until_complete(scene())


# -- cancellation ------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_before_it_runs_never_waits(loop: Loop) -> None:
    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        task = asyncio.ensure_future(delivery)
        task.cancel()
        await turn()
        assert task.cancelled()
        batch.acknowledge(0, -1)
        assert (await delivery).offset == 0

    loop.run_until_complete(scene())


@pytest.mark.parametrize("done", [False, True])
def test_a_task_that_was_cancelled_before_its_wait_raises_where_it_would_sleep(
    loop: Loop, done: bool
) -> None:
    steps: list[str] = []

    async def wait(delivery: Delivery) -> None:
        me = asyncio.current_task()
        assert me is not None
        me.cancel("enough")
        try:
            await delivery
            steps.append("delivery")
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            steps.append(str(error))
            raise

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        if done:
            batch.acknowledge(0, -1)
        task = asyncio.ensure_future(wait(delivery))
        await asyncio.wait([task])
        assert task.cancelled()
        assert steps == (["delivery", "enough"] if done else ["enough"])
        if not done:
            batch.acknowledge(0, -1)
        assert (await delivery).offset == 0

    loop.run_until_complete(scene())


def test_a_cancellation_ends_the_wait_in_the_next_turn_and_only_this_one(loop: Loop) -> None:
    caught: list[BaseException] = []

    async def wait(delivery: Delivery) -> RecordMetadata:
        try:
            return await delivery
        except asyncio.CancelledError as error:
            caught.append(error)
            raise

    async def scene() -> None:
        batch, deliveries = new(loop)
        tasks = await asleep(*map(wait, deliveries))
        assert tasks[1].cancel("enough")
        assert not tasks[1].done()
        await turn()
        assert [task.done() for task in tasks] == [False, True, False]
        assert tasks[1].cancelled()
        assert not deliveries[1].done()
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await tasks[1]
        assert [error.args for error in caught] == [("enough",)]
        batch.acknowledge(0, -1)
        assert [(await task).offset for task in (tasks[0], tasks[2])] == [0, 2]
        assert deliveries[1].result().offset == 1
        assert not tasks[1].cancel()

    loop.run_until_complete(scene())


@pytest.mark.parametrize("acknowledged_first", [False, True])
def test_cancelled_in_the_turn_of_the_acknowledgement(loop: Loop, acknowledged_first: bool) -> None:
    """The wait is cancelled, the record is in the log, nobody else is disturbed."""

    async def scene() -> None:
        batch, deliveries = new(loop)
        tasks = await asleep(*deliveries)
        if acknowledged_first:
            batch.acknowledge(0, -1)
            assert tasks[1].cancel()
        else:
            assert tasks[1].cancel()
            batch.acknowledge(0, -1)
        await turn()
        assert all(task.done() for task in tasks)
        assert tasks[1].cancelled()
        assert [tasks[0].result().offset, tasks[2].result().offset] == [0, 2]
        assert deliveries[1].result().offset == 1

    loop.run_until_complete(scene())


@pytest.mark.parametrize("other", [0, 2])
def test_cancelled_by_a_task_that_wakes_with_it(loop: Loop, other: int) -> None:
    """The one that runs later is cancelled, the one that ran before has its result."""

    async def scene() -> None:
        batch, deliveries = new(loop)
        answers: list[bool] = []

        async def wait(number: int) -> None:
            await deliveries[number]
            if number == 1:
                answers.append(tasks[other].cancel())

        tasks = await asleep(*map(wait, range(3)))
        batch.acknowledge(0, -1)
        await turn()
        assert all(task.done() for task in tasks)
        assert answers == [other == 2]
        assert [task.cancelled() for task in tasks] == [False, False, other == 2]

    loop.run_until_complete(scene())


def test_cancelled_twice_before_it_runs_is_one_cancellation(loop: Loop) -> None:
    caught: list[int] = []

    async def wait(delivery: Delivery) -> int:
        try:
            await delivery
        except asyncio.CancelledError:
            me = asyncio.current_task()
            assert me is not None
            caught.append(me.cancelling())
        await turn()
        return (await delivery).offset

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        [task] = await asleep(wait(delivery))
        task.cancel()
        task.cancel()
        await turn()
        assert caught == [2]
        await turn()
        batch.acknowledge(8, -1)
        assert await task == 8
        assert caught == [2]

    loop.run_until_complete(scene())


def test_cancelled_again_while_it_cleans_up(loop: Loop) -> None:
    steps: list[str] = []

    async def wait(delivery: Delivery, other: Delivery) -> None:
        try:
            await delivery
        except asyncio.CancelledError as error:
            steps.append(str(error))
            try:
                await other
            except asyncio.CancelledError as error:
                steps.append(str(error))
                await delivery
            raise

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        never, [other] = new(loop, 1)
        [task] = await asleep(wait(delivery, other))
        task.cancel("first")
        await turn()
        task.cancel("second")
        await turn()
        assert steps == ["first", "second"]
        assert not task.done()
        batch.acknowledge(0, -1)
        with pytest.raises(asyncio.CancelledError):
            await task
        never.acknowledge(0, -1)

    loop.run_until_complete(scene())


def test_a_task_may_swallow_its_cancellation_and_wait_on(loop: Loop) -> None:
    async def wait(delivery: Delivery) -> int:
        for _ in range(3):
            with pytest.raises(asyncio.CancelledError):
                await delivery
        return (await delivery).offset

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        [task] = await asleep(wait(delivery))
        for _ in range(3):
            task.cancel()
            await turn()
            assert not task.done()
        batch.acknowledge(4, -1)
        assert await task == 4

    loop.run_until_complete(scene())


def test_a_cancellation_that_is_taken_back_before_the_task_runs(loop: Loop) -> None:
    """Task.uncancel forgets what has not been raised yet from Python 3.13 on, not before."""

    async def scene() -> None:
        batch, deliveries = new(loop, 2)
        tasks = await asleep(*deliveries)
        task = tasks[0]
        task.cancel()
        assert task.uncancel() == 0
        await turn()
        assert task.cancelled() == (sys.version_info < (3, 13))
        assert task.done() == task.cancelled()
        batch.acknowledge(3, -1)
        if not task.done():
            assert (await task).offset == 3
        assert (await tasks[1]).offset == 4

    loop.run_until_complete(scene())


def test_a_failure_in_the_turn_of_the_cancellation_counts_as_seen_by_nobody(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        batch, deliveries = new(loop, 2)
        tasks = await asleep(*deliveries)
        batch.fail(refusal())
        tasks[0].cancel()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        assert type(tasks[1].exception()) is BrokerRejected

    gc.collect()
    caplog.clear()
    loop.run_until_complete(scene())
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncproducer"] == [
        "1 of 2 records to orders-0 were not delivered and nobody looked at the result "
        "(persisted: no): BrokerRejected: no"
    ]


# -- what must not be --------------------------------------------------------------------------


def test_a_waiter_is_awaited_by_one_task_and_as_often_as_that_wants(loop: Loop) -> None:
    """As `Producer.send` does it. A cancellation does not use the waiter up."""

    async def wait(waiter: Any) -> str:
        await waiter
        return "woken"

    async def stubborn(waiter: Any) -> str:
        with pytest.raises(asyncio.CancelledError):
            await waiter
        return await wait(waiter)

    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        waiter = delivery.waiter()
        assert waiter is not None
        [task] = await asleep(stubborn(waiter))
        with pytest.raises(RuntimeError, match="await the delivery instead"):
            await asyncio.ensure_future(wait(waiter))
        task.cancel()
        await turn()
        assert not task.done()
        batch.acknowledge(0, -1)
        assert await task == "woken"
        await waiter
        assert delivery.waiter() is None

    loop.run_until_complete(scene())


def test_a_task_tells_what_it_waits_for(loop: Loop) -> None:
    async def scene() -> None:
        batch, [delivery] = new(loop, 1)
        [task] = await asleep(delivery)
        assert "wait_for=<Waiter for orders-0 pending>" in repr(task)
        batch.acknowledge(0, -1)
        await task

    loop.run_until_complete(scene())


def test_awaiting_in_another_loop_is_an_error_of_that_task_alone(loop: Loop) -> None:
    batch, deliveries = new(loop, 2)
    other = VirtualTimeLoop()

    async def elsewhere() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="attached to a different loop"):
                await deliveries[0]

    async def scene() -> None:
        tasks = await asleep(*deliveries)
        batch.acknowledge(0, -1)
        assert [(await task).offset for task in tasks] == [0, 1]

    try:
        other.run_until_complete(elsewhere())
        loop.run_until_complete(scene())

        async def afterwards() -> int:
            return (await deliveries[0]).offset

        assert other.run_until_complete(afterwards()) == 0
    finally:
        other.close()


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_wants_to_leave_the_program_takes_nobody_with_it(
    loop: Loop, at: int, error: type[BaseException]
) -> None:
    """Whoever lets the loop run on, as `asyncio.run` does to clean up, finds the others awake."""
    batch, deliveries = new(loop, 4)
    woken: list[int] = []

    async def wait(number: int) -> None:
        await deliveries[number]
        woken.append(number)
        if number == at:
            raise error

    async def more_turns(count: int) -> None:
        for _ in range(count):
            await turn()

    tasks = [loop.create_task(wait(number)) for number in range(4)]
    loop.run_until_complete(more_turns(1))
    batch.acknowledge(0, -1)
    with pytest.raises(error):
        loop.run_forever()
    if isinstance(loop, VirtualTimeLoop):  # asyncio's stops here, uvloop after this turn
        assert woken == list(range(at + 1))
    loop.run_until_complete(more_turns(2))
    assert woken == [0, 1, 2, 3]
    assert [type(task.exception()) for task in tasks] == [
        error if number == at else type(None) for number in range(4)
    ]


def test_a_loop_that_is_closed_leaves_its_waiters_asleep(loop: Loop) -> None:
    """The batch ends all the same. To cancel a task of that loop fails as it does with futures."""
    batch, deliveries = new(loop, 2)
    fence = CountingFence()
    batch.add_fence(fence)

    async def wait(delivery: Delivery) -> None:
        await delivery

    async def future() -> None:
        await loop.create_future()

    tasks = [loop.create_task(wait(delivery)) for delivery in deliveries]
    reference = loop.create_task(future())
    loop.run_until_complete(asyncio.sleep(0))
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    loop.close()
    for task in (reference, tasks[0]):
        with pytest.raises(RuntimeError, match="closed"):
            task.cancel()
    batch.acknowledge(0, -1)
    assert fence.passes == 1
    assert deliveries[1].result().offset == 1
    assert not any(task.done() for task in tasks)
    del task, tasks, reference
    gc.collect()
    assert {context["message"] for context in lost} == {"Task was destroyed but it is pending!"}
    assert len(lost) == 3


def test_a_batch_and_its_tasks_are_freed_together(loop: Loop) -> None:
    """Nobody knows them any more, and they never end: a cycle, which the collector takes."""

    async def wait(delivery: Delivery) -> None:
        await delivery

    async def scene() -> weakref.ref[ProducerBatch]:
        batch, deliveries = new(loop)
        for delivery in deliveries:
            loop.create_task(wait(delivery))
        await turn()
        return weakref.ref(batch)

    lost: list[dict[str, Any]] = []
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: lost.append(context))
    batch = loop.run_until_complete(scene())
    gc.collect()
    assert batch() is None
    assert len(lost) == 3
    loop.set_exception_handler(handler)


def test_a_batch_that_has_its_end_is_no_cycle(loop: Loop) -> None:
    """So that a failure that nobody looked at is reported when the last delivery goes."""
    if loop.get_task_factory() is _python_task:
        pytest.skip("a task in Python that was cancelled is a cycle of its own (from 3.12 on)")

    async def wait(delivery: Delivery) -> None:
        await delivery

    async def scene() -> weakref.ref[ProducerBatch]:
        batch, deliveries = new(loop)
        tasks = await asleep(*map(wait, deliveries))
        tasks[0].cancel()
        await turn()
        batch.acknowledge(0, -1)
        await asyncio.wait(tasks)
        return weakref.ref(batch)

    gc.collect()
    gc.disable()
    try:
        batch = loop.run_until_complete(scene())
        assert batch() is None
    finally:
        gc.enable()


# -- as with futures ---------------------------------------------------------------------------


async def with_future(delivery: Delivery) -> RecordMetadata:
    """What `await delivery` would be if each wait had a future of its own."""
    if not delivery.done():
        future = asyncio.get_running_loop().create_future()

        def wake(_: Delivery) -> None:
            if not future.done():
                future.set_result(None)

        delivery.add_done_callback(wake)
        await future
    return delivery.result()


class Storm:
    """Tasks wait in all sorts of ways for batches that end, are split, or fail, and are cancelled.

    What happens depends on the seed alone, unless the tasks wake in another order.
    """

    def __init__(self, seed: int, wait: Callable[[Delivery], Awaitable[RecordMetadata]]) -> None:
        self.random = random.Random(seed)
        self.wait = wait
        self.loop = asyncio.get_running_loop()
        self.log: list[str] = []
        self.batches: list[ProducerBatch] = []
        self.deliveries: list[Delivery] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def end_of(self, delivery: Delivery) -> str:
        try:
            return f"offset {(await self.wait(delivery)).offset}"
        except DeliveryError as error:
            return type(error).__name__

    async def plain(self, delivery: Delivery) -> str:
        return f"offset {(await self.wait(delivery)).offset}"

    async def a_turn_later(self, delivery: Delivery) -> str:
        # A group takes no second task when the first one has failed: an eager one may, at once.
        await turn()
        return await self.plain(delivery)

    async def stubborn(self, delivery: Delivery) -> str:
        try:
            return await self.end_of(delivery)
        except asyncio.CancelledError:
            return "in spite of all " + await self.end_of(delivery)

    async def hurried(self, delivery: Delivery) -> str:
        try:
            async with asyncio.timeout(TICK * self.random.choice([0, 1, 3])):
                return await self.end_of(delivery)
        except TimeoutError:
            return "too late"

    async def shielded(self, delivery: Delivery) -> str:
        return await asyncio.shield(self.end_of(delivery))

    async def several(self, delivery: Delivery) -> str:
        others = self.random.choices(self.deliveries, k=2)
        return " ".join(await asyncio.gather(*map(self.end_of, (delivery, *others))))

    async def grouped(self, delivery: Delivery) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.a_turn_later(delivery))
                group.create_task(self.a_turn_later(self.random.choice(self.deliveries)))
        except ExceptionGroup as errors:
            return f"{len(errors.exceptions)} failed"
        return "both"

    async def spiteful(self, delivery: Delivery) -> str:
        end = await self.end_of(delivery)
        return f"{end} {self.random.choice(self.tasks).cancel()}"

    async def in_turn(self, delivery: Delivery) -> str:
        return " ".join([await self.end_of(d) for d in (delivery, *self.deliveries[-3:])])

    async def run(self, name: str, way: Callable[[Delivery], Awaitable[str]]) -> None:
        delivery = self.random.choice(self.deliveries)
        try:
            self.log.append(f"{name} {await way(delivery)}")
        except (DeliveryError, asyncio.CancelledError) as error:
            self.log.append(f"{name} {type(error).__name__}")
            raise

    def begin(self) -> None:
        batch, deliveries = new(self.loop, self.random.choice([1, 2, 8]))
        self.batches.append(batch)
        self.deliveries += deliveries

    def start(self) -> None:
        way = self.random.choice(
            [
                self.plain,
                self.stubborn,
                self.hurried,
                self.shielded,
                self.several,
                self.grouped,
                self.spiteful,
                self.in_turn,
            ]
        )
        name = f"{len(self.tasks)} {way.__name__}"
        self.tasks.append(self.loop.create_task(self.run(name, way)))

    def end(self) -> None:
        if self.batches:
            batch = self.batches.pop(self.random.randrange(len(self.batches)))
            if self.random.random() < 0.2:
                batch.fail(refusal())
            else:
                batch.acknowledge(self.random.randrange(1000), -1)

    def split(self) -> None:
        large = [batch for batch in self.batches if batch.count > 1]
        if large:
            batch = self.random.choice(large)
            self.batches.remove(batch)
            self.batches += split(batch, 600)

    def cancel(self) -> None:
        if self.tasks:
            self.random.choice(self.tasks).cancel()

    def mark(self) -> None:
        self.loop.call_soon(self.log.append, f"mark {len(self.log)}")

    async def rage(self) -> list[str]:
        happenings = [self.begin, self.start, self.end, self.split, self.cancel, self.mark]
        self.begin()
        for _ in range(300):
            happening = self.random.choices([*happenings, None], [3, 10, 2, 1, 3, 2, 6])[0]
            if happening is not None:
                happening()
            else:
                await asyncio.sleep(self.random.choice([0, 0, 0, TICK]))
        while self.batches:
            self.end()
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(TICK)  # what was shielded
        assert len(self.log) >= len(ends)
        for delivery in self.deliveries:
            delivery.exception()  # else the batch would complain that nobody asked
        return [*self.log, *(type(end).__name__ for end in ends)]


def rage(
    world: World, seed: int, wait: Callable[[Delivery], Awaitable[RecordMetadata]]
) -> list[str]:
    async def scene() -> list[str]:
        return await Storm(seed, wait).rage()

    loop = world.new_loop()
    loop.set_debug(world.debug)
    loop.set_task_factory(world.new_task)
    try:
        log = loop.run_until_complete(scene())
        assert not asyncio.all_tasks(loop)
    finally:
        loop.close()
    return log


SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "world", [w for w in WORLDS if w.new_loop is VirtualTimeLoop], ids=lambda world: world.name
)
def test_a_storm_ends_as_it_does_with_futures(world: World, seed: int) -> None:
    """Every wait ends in the same way and in the same order, however it is cancelled."""
    assert rage(world, seed, lambda delivery: delivery) == rage(world, seed, with_future)


def test_all_sorts_of_things_happen_in_the_storms() -> None:
    log = "\n".join(line for seed in SEEDS for line in rage(WORLDS[0], seed, with_future))
    for what in (
        "plain offset",
        "plain BrokerRejected",
        "plain CancelledError",
        "stubborn in spite of all offset",
        "stubborn in spite of all BrokerRejected",
        "stubborn CancelledError",
        "hurried offset",
        "hurried too late",
        "hurried CancelledError",
        "shielded offset",
        "shielded CancelledError",
        "several offset",
        "several CancelledError",
        "grouped both",
        "grouped 1 failed",
        "grouped CancelledError",
        "in_turn BrokerRejected offset",
        " True",
        " False",
        "mark",
    ):
        assert what in log, what


# -- letting others go first -------------------------------------------------------------------


def test_a_breath_ends_when_it_is_ended(loop: Loop) -> None:
    """Its task runs within that call, in its own context; once."""
    place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")
    told: list[str] = []

    async def wait(breath: Breath, name: str) -> str:
        place.set(name)
        await breath
        told.append(place.get())
        return name

    async def scene() -> None:
        breaths = [Breath(loop), Breath(loop)]
        tasks = await asleep(wait(breaths[0], "first"), wait(breaths[1], "second"))

        def end() -> None:
            for breath in (breaths[1], breaths[1], breaths[0]):
                breath.end()
                told.append("ended")

        await turn()
        assert told == []
        loop.call_soon(end)
        assert await asyncio.gather(*tasks) == ["first", "second"]
        assert told == ["second", "ended", "ended", "first", "ended"]
        await breaths[0]  # it is over: nobody waits

    loop.run_until_complete(scene())


@pytest.mark.parametrize("ended", ["before", "after", "never"])
def test_cancelled_while_others_go_first(loop: Loop, ended: str) -> None:
    async def scene() -> None:
        breath = Breath(loop)
        (task,) = await asleep(await_it(breath))
        if ended == "before":
            loop.call_soon(breath.end)
        task.cancel()
        task.cancel()
        if ended == "after":
            loop.call_soon(breath.end)
        with pytest.raises(asyncio.CancelledError):
            await task
        await turn()

    async def await_it(breath: Breath) -> None:
        await breath

    loop.run_until_complete(scene())
