from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncproducer import (
    BatchDeliveryError,
    Delivery,
    ForkError,
    InvalidTopic,
    Portal,
    Producer,
    ProducerClosed,
    ProducerNotStarted,
    Record,
    RecordMetadata,
    RecordTooLarge,
    WrongLoopError,
)
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork, VirtualTimeLoop

New = Callable[..., Producer[Any, Any]]


@pytest.fixture
def network() -> MemoryNetwork:
    """Other threads wait really, so that this is on asyncio's own loop: without latency."""
    return MemoryNetwork()


async def in_thread(function: Callable[[], Any]) -> Any:
    """In another thread, which may use the producer of this loop."""
    return await asyncio.to_thread(function)


async def test_send_from_a_thread(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()

        def work() -> list[RecordMetadata]:
            assert threading.current_thread() is not threading.main_thread()
            futures = [
                portal.send("t", b"%d" % n, key=b"k", headers={"h": b"1"}, timestamp=1000)
                for n in range(10)
            ]
            return [future.result(timeout=10) for future in futures]

        sent = await in_thread(work)
    assert [metadata.offset for metadata in sent] == list(range(10))
    records = cluster.records("t")
    assert [record.value for record in records] == [b"%d" % n for n in range(10)]
    assert {record.headers for record in records} == {(("h", b"1"),)}
    assert {record.timestamp for record in records} == {1000}


async def test_enqueue_from_a_thread(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Its future ends when the record is buffered, long before the broker has it."""
    async with new_producer(linger_ms=60000, adaptive_linger=False) as producer:
        portal = producer.portal()

        def work() -> Delivery:
            future = portal.enqueue(
                "t4", b"value", key=b"k", headers={"h": b"1"}, partition=2, timestamp=1000
            )
            return future.result(timeout=10)

        delivery = await in_thread(work)
        assert not delivery.done()
        await producer.flush()
        assert delivery.result().partition == 2
    (record,) = cluster.records("t4", 2)
    assert (record.key, record.value) == (b"k", b"value")
    assert (record.headers, record.timestamp) == ((("h", b"1"),), 1000)


async def test_send_many_from_a_thread(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()

        def work() -> None:
            result = portal.send_many("t", iter([b"a", b"b"])).result(timeout=10)
            assert result.acknowledged == 2
            bad = Record("not/valid", b"c")
            result = portal.send_many(None, [bad], raise_on_error=False).result(timeout=10)
            ((index, error),) = result.failed
            assert index == 0
            assert isinstance(error, InvalidTopic)
            with pytest.raises(BatchDeliveryError):
                portal.send_many(None, [bad]).result(timeout=10)

        await in_thread(work)
    assert [record.value for record in cluster.records("t")] == [b"a", b"b"]


async def test_partition_is_passed_on(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()
        sent = await in_thread(lambda: portal.send("t4", b"value", partition=3).result(10))
    assert sent.partition == 3


async def test_flush_from_a_thread(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(linger_ms=60000, adaptive_linger=False) as producer:
        portal = producer.portal()

        def work() -> None:
            future = portal.send("t", b"value")
            portal.flush(5).result(timeout=10)
            assert future.done()

        await producer.warm_up("t")
        await in_thread(work)
    assert len(cluster.records("t")) == 1


async def test_errors_come_through_the_future(new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()

        def work() -> None:
            with pytest.raises(RecordTooLarge):
                portal.send("t", bytes(2_000_000)).result(timeout=10)
            with pytest.raises(InvalidTopic):
                portal.send("not/valid", b"value").result(timeout=10)

        await in_thread(work)


async def test_the_producer_is_called_on_its_own_thread_alone(
    new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GIL two threads in it would be two in the same objects."""
    async with new_producer() as producer:
        portal = producer.portal()
        called: list[int] = []
        send = producer.send

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(threading.get_ident())
            return send(*args, **kwargs)

        monkeypatch.setattr(producer, "send", noted)
        await in_thread(lambda: portal.send("t", b"value").result(timeout=10))
        assert called == [threading.get_ident()]


async def test_cancelling_the_future_ends_the_wait_only(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(max_block_ms=3600_000) as producer:
        portal = producer.portal()

        def work() -> None:
            future = portal.send("missing", b"value")
            assert future.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(timeout=10)

        await in_thread(work)
        await asyncio.sleep(0)
        assert producer.health.waiting_senders == 0


async def test_a_future_that_is_cancelled_at_once_sends_nothing(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        portal = producer.portal()
        thread = threading.Thread(target=lambda: portal.send("t", b"value").cancel())
        thread.start()
        thread.join()  # the loop stands still meanwhile: it has not begun
        await asyncio.sleep(0)
    assert cluster.records("t") == []


async def test_what_a_thread_has_stopped_waiting_for_goes_on(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        portal = producer.portal()

        def work() -> None:
            with pytest.raises(TimeoutError):
                portal.send("t", b"value").result(timeout=0)

        await in_thread(work)
        cluster.resume(1)
    assert [record.value for record in cluster.records("t")] == [b"value"]


async def test_a_flush_that_takes_too_long_is_told_by_its_future(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        portal = producer.portal()

        def work() -> None:
            future = portal.send("t", b"value")
            with pytest.raises(TimeoutError, match="still on their way"):
                portal.flush(0).result(timeout=10)
            assert not future.done()

        await in_thread(work)
        cluster.resume(1)
    assert len(cluster.records("t")) == 1


def test_every_call_tells_what_it_raises_and_that_it_does_not_wait() -> None:
    calls = [function for name, function in vars(Portal).items() if not name.startswith("_")]
    assert len(calls) == 10
    for function in calls:
        text = " ".join((function.__doc__ or "").split())
        assert "Does not wait. Raises WrongLoopError, ForkError; the future " in text


async def test_portal_on_the_producers_own_loop(new_producer: New) -> None:
    """It would wait for itself."""
    async with new_producer() as producer:
        portal = producer.portal()
        with pytest.raises(WrongLoopError, match="the portal is for other threads"):
            portal.send("t", b"value")
        with pytest.raises(WrongLoopError):
            portal.flush()


async def test_portal_needs_a_started_producer(new_producer: New) -> None:
    producer = new_producer()
    with pytest.raises(ProducerNotStarted):
        producer.portal()
    await producer.start()
    producer.portal()
    await producer.close()
    with pytest.raises(ProducerClosed):
        producer.portal()


async def test_portal_of_a_closed_producer(new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()

    def work() -> None:
        with pytest.raises(ProducerClosed):
            portal.send("t", b"value").result(timeout=10)

    await in_thread(work)


async def test_portal_can_be_had_in_another_thread(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Its user need not have prepared anything on the loop."""
    async with new_producer() as producer:
        sent = await in_thread(lambda: producer.portal().send("t", b"value").result(10))
    assert sent.offset == 0


async def test_portal_in_another_loop(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Of another thread: its futures can be awaited there."""
    async with new_producer() as producer:
        portal = producer.portal()

        async def elsewhere() -> RecordMetadata:
            return await asyncio.wrap_future(portal.send("t", b"value"))

        sent = await in_thread(lambda: asyncio.run(elsewhere()))
    assert sent.offset == 0


async def test_portal_in_a_forked_child(new_producer: New) -> None:
    """Nobody would ever run what it asks for. (tests/test_faults.py has a real fork.)"""
    async with new_producer() as producer:
        portal = producer.portal()

        def work() -> None:
            with pytest.raises(ForkError):
                portal.send("t", b"value")

        producer._forked = True
        try:
            await in_thread(work)
        finally:
            producer._forked = False


def test_portal_of_a_closed_loop() -> None:
    loop = VirtualTimeLoop()

    async def start() -> Producer[Any, Any]:
        network = MemoryNetwork()
        async with EmbeddedCluster(network=network) as cluster:
            producer: Producer[Any, Any] = Producer(cluster.bootstrap_servers, connector=network)
            await producer.start()
            portals.append(producer.portal())
            await producer.close()
            return producer

    portals: list[Any] = []
    loop.run_until_complete(start())
    loop.close()
    with pytest.raises(WrongLoopError, match="is closed"):
        portals[0].send("t", b"value")
