"""`await producer.enqueue()` and `send()` without a coroutine: Entry does what one would.

Compiled, it is what these methods of a Producer return; uncompiled, it is tested all the same.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import time
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import Any

import anyio
import pytest

from asyncproducer import (
    BufferTimeout,
    ConnectionFailed,
    Delivery,
    DeliveryError,
    ErrorCode,
    Producer,
    ProducerClosed,
    ProducerNotStarted,
    RecordMetadata,
    SerializationError,
)
from asyncproducer._implementation import IMPLEMENTATION
from asyncproducer.intake import Entry, Front
from asyncproducer.testing import EmbeddedCluster

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]


class Short:
    """Both methods of a producer as they are where it is compiled."""

    def __init__(self, producer: Producer[Any, Any]) -> None:
        self.enqueue: Any = MethodType(Front.enqueue, producer)
        self.send: Any = MethodType(Front.send, producer)


async def running(producer: Producer[Any, Any]) -> Short:
    await producer.start()
    await producer.warm_up("t", "t4")
    return Short(producer)


async def fill(producer: Producer[Any, Any]) -> Delivery:
    """Take all the memory, with a record that stays in the buffer."""
    return producer.send_nowait("t", bytes(900), partition=0)


#: Both methods, where a test holds for both.
both = pytest.mark.parametrize("name", ["enqueue", "send"])


async def acknowledged(result: Delivery | RecordMetadata) -> RecordMetadata:
    """What `send` returns at once, and `enqueue` in a second step."""
    return result if type(result) is RecordMetadata else await result  # type: ignore[misc]


FULL = {
    "batch_size": 1000,
    "buffer_memory": 1000,
    "max_request_size": 1000,
    "linger_ms": 10_000,
    "adaptive_linger": False,
    "delivery_timeout_ms": 60_000,
}


def values(cluster: EmbeddedCluster, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in cluster.records(topic)]


@both
async def test_compiled_the_producer_hands_it_out(new_producer: New, name: str) -> None:
    producer = new_producer()
    await running(producer)
    entry = getattr(producer, name)("t", b"1")
    assert (type(entry) is Entry) == (IMPLEMENTATION == "compiled")
    await entry


@both
async def test_the_next_record_has_nothing_of_the_one_before(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    """The object that was awaited is used again."""
    producer = new_producer()
    await running(producer)
    send = getattr(producer, name)
    for fields in ({"headers": [("h", b"1")]}, {"timestamp": 1}, {"key": b"k"}, {}):
        await send("t", b"whole", partition=0, **fields)
        await send("t", b"plain")
    await producer.flush()
    records = cluster.records("t")
    plain = [record for record in records if record.value == b"plain"]
    assert [(r.key, r.headers) for r in plain] == [(None, ())] * 4
    assert all(record.timestamp > 1 for record in plain)
    whole = [record for record in records if record.value == b"whole"]
    assert [(r.key, r.headers, r.timestamp == 1) for r in whole] == [
        (None, (("h", b"1"),), False),
        (None, (), True),
        (b"k", (), False),
        (None, (), False),
    ]


async def test_sends_that_wait_keep_no_delivery(new_producer: New) -> None:
    """In tens of thousands of tasks, each object that the garbage collector sees costs."""
    producer = new_producer()
    short = await running(producer)
    sends = [asyncio.ensure_future(short.send("t", b"%d" % n)) for n in range(10)]
    sends += [asyncio.ensure_future(producer.send("t", b"%d" % n)) for n in range(10)]
    await asyncio.sleep(0)
    assert not any(send.done() for send in sends)
    kept = [thing for thing in gc.get_objects() if type(thing) is Delivery]
    assert (
        len(kept) <= 1
    )  # the last one, until the loop turns: where nobody has it, it is used again
    assert len({(await send).offset for send in sends}) == 20


async def test_a_subclass_keeps_its_own_methods(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    class Upper(Producer[Any, Any]):
        async def enqueue(self, topic: str, value: Any = None, **fields: Any) -> Delivery:
            return await super().enqueue(topic, value.upper(), **fields)

        async def send(self, topic: str, value: Any = None, **fields: Any) -> RecordMetadata:
            return await super().send(topic, value.upper(), **fields)

    producer = Upper(cluster.bootstrap_servers, connector=cluster.connector)
    async with producer:
        await (await producer.enqueue("t", b"value", key=b"k"))
        await producer.send("t", b"another", key=b"k")
    assert values(cluster) == [b"VALUE", b"ANOTHER"]


@both
async def test_what_a_test_has_put_in_the_place_of_a_method_is_called(
    new_producer: New, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Producer, name, lambda self, *_: f"{name} replaced")
    producer = new_producer()
    await running(producer)
    assert getattr(producer, name)("t", b"v") == f"{name} replaced"


@both
async def test_it_counts_as_a_coroutine_function(new_producer: New, name: str) -> None:
    """Else Starlette would call it in a thread, as a background task."""
    producer = new_producer()
    short = await running(producer)
    for method in (getattr(producer, name), getattr(short, name)):
        assert asyncio.iscoroutinefunction(method)
        assert method.__doc__ == getattr(Producer, name).__doc__


async def test_it_is_done_in_its_first_step(cluster: EmbeddedCluster, new_producer: New) -> None:
    """With room and metadata, the loop does not turn."""
    producer = new_producer()
    short = await running(producer)
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    delivery = await short.enqueue(
        "t4", b"v", key=b"k", headers={"h": b"1"}, partition=3, timestamp=7
    )
    assert type(delivery) is Delivery
    assert turns == []
    metadata = await delivery
    assert (metadata.partition, metadata.timestamp) == (3, 7)
    [record] = cluster.records("t4")
    assert (record.key, record.value) == (b"k", b"v")
    assert list(record.headers) == [("h", b"1")]


async def test_the_value_is_optional(cluster: EmbeddedCluster, new_producer: New) -> None:
    short = await running(new_producer())
    await (await short.enqueue("t", key=b"k"))
    assert values(cluster) == [None]


async def test_nothing_happens_before_it_is_awaited(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    producer = new_producer()
    short = await running(producer)
    first = short.enqueue("t", b"first")
    second = short.enqueue("t", b"second")
    assert not producer._accumulator.incomplete
    later = await second
    await (await first)
    await later
    assert values(cluster) == [b"second", b"first"]


@both
async def test_never_awaited_is_a_warning(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    short = await running(new_producer())
    with pytest.warns(RuntimeWarning, match=rf"{name}\('t', ...\) was never awaited"):
        getattr(short, name)("t", b"lost")
    assert values(cluster) == []


@both
async def test_awaited_twice_is_an_error(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    short = await running(new_producer())
    entry = getattr(short, name)("t", b"once")
    await acknowledged(await entry)
    with pytest.raises(RuntimeError, match=rf"the same {name}\(\) twice"):
        await entry
    assert values(cluster) == [b"once"]


@both
async def test_one_that_is_kept_is_not_used_again(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    """Compiled, a loop of sends has one Entry for all its records."""
    short = await running(new_producer())
    kept = getattr(short, name)("t", b"1", partition=0)
    await acknowledged(await kept)
    another = getattr(short, name)("t", b"2", partition=0)
    with pytest.raises(RuntimeError, match="twice"):
        await kept
    await acknowledged(await another)
    for value in (b"3", b"4"):
        await acknowledged(await getattr(short, name)("t", value, partition=0))
    assert values(cluster) == [b"1", b"2", b"3", b"4"]


@both
async def test_one_that_is_used_again_and_never_awaited_is_a_warning_too(
    new_producer: New, name: str
) -> None:
    short = await running(new_producer())
    await acknowledged(await getattr(short, name)("t", b"v"))
    with pytest.warns(RuntimeWarning, match="was never awaited"):
        getattr(short, name)("t", b"lost")


@pytest.mark.parametrize("python_tasks", [False, True])
async def test_two_tasks_cannot_await_the_same_send(
    cluster: EmbeddedCluster, new_producer: New, python_tasks: bool
) -> None:
    short = await running(new_producer())
    entry = short.send("t", b"once")
    task: Any = asyncio.tasks._PyTask if python_tasks else asyncio.Task  # type: ignore[attr-defined]
    first, second = task(entry), task(entry)
    with pytest.raises(RuntimeError, match=r"this send\(\) is being awaited already"):
        await second
    assert (await first).offset == 0
    assert values(cluster) == [b"once"]


@both
async def test_errors_come_when_it_is_awaited(new_producer: New, name: str) -> None:
    producer = new_producer()
    short = await running(producer)
    entry = getattr(short, name)("t", 5)
    with pytest.raises(SerializationError):
        await entry
    assert producer.metrics()["record_error_total"] == 1
    await producer.close()
    entry = getattr(short, name)("t", b"late")
    with pytest.raises(ProducerClosed):
        await entry


@pytest.mark.parametrize("python_task", [False, True])
async def test_a_record_that_is_not_delivered_is_an_error_of_send(
    cluster: EmbeddedCluster, new_producer: New, python_task: bool
) -> None:
    short = await running(new_producer())
    cluster.inject("produce", error="INVALID_RECORD")
    task: Any = asyncio.tasks._PyTask if python_task else asyncio.Task  # type: ignore[attr-defined]
    with pytest.raises(DeliveryError) as caught:
        await task(short.send("t", b"v"))
    assert caught.value.code == ErrorCode.INVALID_RECORD
    assert values(cluster) == []


async def test_cancelled_while_it_waits_for_the_brokers_the_delivery_goes_on(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    producer = new_producer()
    short = await running(producer)
    entry = short.send("t", b"v")
    task = asyncio.create_task(entry)
    await asyncio.sleep(0)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    with pytest.raises(RuntimeError, match="twice"):
        await entry
    await producer.flush()
    assert values(cluster) == [b"v"]


async def as_task(entry: Any) -> Any:
    return await asyncio.create_task(entry)


async def as_one_of_many(entry: Any) -> Any:
    [result] = await asyncio.gather(entry)
    return result


async def with_time_limit(entry: Any) -> Any:
    return await asyncio.wait_for(entry, 1.0)  # noqa: TID251 (users do)


async def in_a_task_group(entry: Any) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(entry)
    return task.result()


async def shielded(entry: Any) -> Any:
    return await asyncio.shield(entry)


@both
@pytest.mark.parametrize(
    "run", [as_task, as_one_of_many, with_time_limit, in_a_task_group, shielded]
)
async def test_asyncio_takes_it_for_a_coroutine(
    cluster: EmbeddedCluster,
    new_producer: New,
    run: Callable[[Any], Coroutine[Any, Any, Any]],
    name: str,
) -> None:
    short = await running(new_producer())
    entry = getattr(short, name)("t", b"v")
    assert asyncio.iscoroutine(entry)
    assert inspect.isawaitable(entry)
    metadata = await acknowledged(await run(entry))
    assert (metadata.topic, metadata.offset) == ("t", 0)
    assert values(cluster) == [b"v"]


@both
async def test_a_plain_python_task_runs_it(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    """That calls `send`, where the C one has a shorter way."""
    short = await running(new_producer())
    task: Any = asyncio.tasks._PyTask(getattr(short, name)("t", b"v"))  # type: ignore[attr-defined]
    assert (await acknowledged(await task)).offset == 0
    assert values(cluster) == [b"v"]


@pytest.mark.skipif(IMPLEMENTATION != "compiled", reason="else it is a plain object")
async def test_it_cannot_be_made_or_copied_by_others(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    for made in (Entry(), Entry.__new__(Entry)):
        with pytest.raises(TypeError, match="only a producer makes these"):
            made.send(None)
    producer = new_producer()
    short = await running(producer)
    entry = short.send("t", b"v")
    with pytest.raises(TypeError, match=r"send\(\) cannot be copied"):
        copy.copy(entry)
    await entry
    assert values(cluster) == [b"v"]


async def test_made_before_the_producer_was_started_it_says_so(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """By a `start` that failed: what it has left is of no use to anybody."""
    producer = new_producer(max_block_ms=100)
    for broker in (1, 2):
        await cluster.stop_broker(broker)
    with pytest.raises(ConnectionFailed):
        await producer.start()
    entry = Short(producer).send("t", b"v")
    for broker in (1, 2):
        await cluster.start_broker(broker)
    await running(producer)
    with pytest.raises(ProducerNotStarted, match="before the producer was started"):
        await entry
    assert values(cluster) == []


async def test_anyio_runs_it(cluster: EmbeddedCluster, new_producer: New) -> None:
    producer = new_producer()
    await running(producer)
    async with anyio.create_task_group() as group:
        group.start_soon(producer.enqueue, "t", b"v")
        group.start_soon(producer.send, "t", b"w")
    await producer.flush()
    assert values(cluster) == [b"v", b"w"]


@both
@pytest.mark.parametrize("python_task", [False, True])
async def test_it_waits_for_room(
    cluster: EmbeddedCluster, new_producer: New, python_task: bool, name: str
) -> None:
    producer = new_producer(**FULL)
    short = await running(producer)
    await fill(producer)
    entry = getattr(short, name)("t", bytes(800))
    task: Any
    if python_task:
        task = asyncio.tasks._PyTask(entry)  # type: ignore[attr-defined]
    else:
        task = asyncio.create_task(entry)
    await asyncio.sleep(0)
    assert producer._pool.waiting == 1
    result = await task
    await producer.flush()
    assert (await acknowledged(result)).offset == 1
    assert [len(value or b"") for value in values(cluster)] == [900, 800]


@both
async def test_cancelled_while_it_waits_for_room_nothing_is_sent(
    cluster: EmbeddedCluster, new_producer: New, name: str
) -> None:
    producer = new_producer(**FULL)
    short = await running(producer)
    first = await fill(producer)
    task = asyncio.create_task(getattr(short, name)("t", bytes(800)))
    await asyncio.sleep(0)
    assert producer._pool.waiting == 1
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert producer._pool.waiting == 0
    await first
    await producer.flush()
    assert [len(value or b"") for value in values(cluster)] == [900]


async def test_no_room_in_time(cluster: EmbeddedCluster, new_producer: New) -> None:
    producer = new_producer(**FULL, max_block_ms=1000)
    short = await running(producer)
    cluster.pause(1)
    cluster.pause(2)
    first = await fill(producer)
    with pytest.raises(BufferTimeout):
        await short.enqueue("t", bytes(800))
    assert producer.metrics()["record_error_total"] == 1
    cluster.resume(1)
    cluster.resume(2)
    await first


@both
async def test_given_up_while_it_waits(new_producer: New, name: str) -> None:
    producer = new_producer(**FULL)
    short = await running(producer)
    first = await fill(producer)
    entry = getattr(short, name)("t", bytes(800))
    entry.send(None)
    assert producer._pool.waiting == 1
    entry.close()
    assert producer._pool.waiting == 0
    await first


@both
async def test_given_up_before_it_began(new_producer: New, name: str) -> None:
    short = await running(new_producer())
    entry = getattr(short, name)("t", b"v")
    entry.close()
    with pytest.raises(RuntimeError, match="twice"):
        await entry


@both
async def test_an_exception_thrown_in_before_it_began(new_producer: New, name: str) -> None:
    """As a task does that is cancelled before it runs."""
    short = await running(new_producer())
    error = KeyError("k")
    for thrown in ((error,), (KeyError, error, None)):
        entry = getattr(short, name)("t", b"v")
        with pytest.raises(KeyError) as caught:
            entry.throw(*thrown)
        assert caught.value is error
    task = asyncio.create_task(getattr(short, name)("t", b"v"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@both
async def test_however_it_is_called(cluster: EmbeddedCluster, new_producer: New, name: str) -> None:
    """Topic and value alone have a way of their own, where it is compiled."""
    producer = new_producer()
    short = await running(producer)
    method: Any = getattr(Front, name)
    bound: Any = getattr(short, name)
    await bound("t", b"1")
    await method(producer, "t", b"2")
    await bound("t", value=b"3")
    await bound(topic="t", value=b"4")
    await bound("t", b"5", key=b"k", partition=0)
    await bound(*("t", b"6"), **{})
    await bound("t")
    for given, named in (
        (("t", b"v", b"k"), {}),
        ((), {}),
        ((), {"value": b"v"}),
        (("t", b"v"), {"topic": "t"}),
        (("t", b"v"), {"wrong": 1}),
    ):
        with pytest.raises(TypeError, match=name):
            bound(*given, **named)
    if IMPLEMENTATION == "compiled":
        for nobody in (object(), None, Front, "t"):
            for named in ({}, {"key": b"k"}):
                with pytest.raises(TypeError, match="in the place of the producer"):
                    method(nobody, "t", b"v", **named)
        with pytest.raises(TypeError, match="in the place of the producer"):
            method("t", b"v")
    await producer.flush()
    assert sorted(values(cluster), key=str) == sorted(
        [b"1", b"2", b"3", b"4", b"5", b"6", None], key=str
    )


async def test_a_timestamp_is_the_time_of_the_call(new_producer: New) -> None:
    """To the millisecond, also where the clock is not asked for each."""
    producer = new_producer()
    short = await running(producer)
    seen = set()
    for number in range(20_000):
        before = time.time_ns() // 1_000_000
        delivery = await short.enqueue("t", b"v")
        after = time.time_ns() // 1_000_000
        assert before <= delivery.timestamp <= after
        seen.add(delivery.timestamp)
        if number % 1000 == 0:
            time.sleep(0.0005)  # noqa: ASYNC251 - the loop's own clock stands still here
    assert len(seen) > 10


async def test_what_a_long_loop_adds_waits_for_more_of_it(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Batches are full, but more is on its way, and the broker is busy. So until the loop ends."""
    producer = new_producer(linger_ms=1000)
    short = await running(producer)
    await short.send("t", b"first", partition=0)
    assert producer._intake is not None
    accumulator = producer._intake.accumulator
    held = cluster.inject("produce", hold=True)
    records = 1
    # Until a turn of the loop could not take them all.
    while not accumulator.pouring:
        await short.enqueue("t", bytes(100), partition=0)
        records += 1
        assert records < 5000
    metrics = producer.metrics()
    assert metrics["requests_in_flight"] == 1
    assert metrics["record_send_total"] < records / 4
    await asyncio.sleep(0.001)
    assert not accumulator.pouring
    metrics = producer.metrics()
    assert metrics["requests_in_flight"] == 2
    assert metrics["record_send_total"] == records
    held.release()
    await producer.flush()
    assert len(values(cluster)) == records


@pytest.mark.parametrize("direct", [False, True])
async def test_a_long_loop_lets_others_run(
    cluster: EmbeddedCluster, new_producer: New, direct: bool
) -> None:
    """Without ever waiting for room: answers must be read, here after two thousand records."""
    producer = new_producer()
    short = await running(producer)
    enqueue: Any = short.enqueue if direct else producer.enqueue
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def turn(number: int) -> None:
        turns.append(number)
        if number < 100:
            loop.call_soon(turn, number + 1)

    loop.call_soon(turn, 1)
    records = 4400
    for _ in range(records):
        await enqueue("t", bytes(100))
    assert turns == [1, 2]
    await producer.flush()
    assert len(values(cluster)) == records


async def test_it_ends_by_stop_iteration_with_the_result(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """`await` hears of it so from CPython 3.12 on; `next` does everywhere."""
    producer = new_producer()
    short = await running(producer)
    entry = short.enqueue("t", b"one")
    with pytest.raises(StopIteration) as stop:
        next(entry)
    delivery: Any = stop.value.value
    assert type(delivery) is Delivery
    entry = short.send("t", b"two")
    waiter = next(entry)
    assert not waiter.done()
    await delivery
    assert waiter.done()
    with pytest.raises(StopIteration) as stop:
        next(entry)
    assert type(stop.value.value) is RecordMetadata
    with pytest.raises(SerializationError):
        next(short.enqueue("t", 1))
    assert values(cluster) == [b"one", b"two"]


async def test_an_object_without_attributes_in_its_dict_finds_its_methods_quickly(
    new_producer: New,
) -> None:
    producer = new_producer()
    await producer.start()
    await producer.send("t", b"")
    assert vars(producer) == {}
    producer.mark = "a test's"  # type: ignore[attr-defined]
    assert vars(producer) == {"mark": "a test's"}


async def deliveries_alive() -> int:
    """Once the loop has turned."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return sum(type(thing) is Delivery for thing in gc.get_objects())


async def test_nothing_keeps_a_delivery_that_nobody_has(new_producer: New) -> None:
    """Where `await` goes by StopIteration, the last one is used again."""
    producer = new_producer(linger_ms=10_000, adaptive_linger=False)
    short = await running(producer)
    gc.collect()
    before = await deliveries_alive()
    seen = {id(await short.enqueue("t", b"%d" % n, partition=0)) for n in range(100)}
    if IMPLEMENTATION == "compiled":
        assert len(seen) == 1, "the same object served all of them"
    assert await deliveries_alive() == before
    kept = [await short.enqueue("t", b"%d" % n, partition=0) for n in range(100)]
    assert await deliveries_alive() == before + 100
    await producer.flush()
    assert [(await delivery).offset for delivery in kept] == [*range(100, 200)]


async def test_a_stop_iteration_that_somebody_keeps_stays_what_it_is(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    producer = new_producer(linger_ms=10_000, adaptive_linger=False)
    short = await running(producer)
    kept: list[StopIteration] = []
    for n in range(3):
        with pytest.raises(StopIteration) as stop:
            next(short.enqueue("t", b"%d" % n, partition=0))
        kept.append(stop.value)
        await short.enqueue("t", b"between", partition=0)
        with pytest.raises(SerializationError):
            await short.enqueue("t", 1)
        await asyncio.sleep(0)
    await producer.flush()
    assert [(await stop.value).offset for stop in kept] == [0, 2, 4]
    assert all(stop.__traceback__ is not None and stop.__context__ is None for stop in kept)
    assert len(values(cluster)) == 6
