"""Nothing lost, nothing doubled, each key in order, whatever happens to the brokers.

Three real brokers, three replicas of which two must have a record, an idempotent producer with
the defaults. While it sends, brokers are killed, stopped, frozen. Afterwards the whole log is read
by librdkafka, and compared with what was sent, and with what the producer said.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import ElectionType, TopicPartition
from confluent_kafka.admin import AdminClient

from asyncproducer import Delivery, DeliveryError, Producer, RecordMetadata
from asyncproducer.testing.kafka import KafkaCluster

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic, Log, Reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PARTITIONS = 12


@dataclass
class Ledger:
    """What became of the records of a run."""

    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    #: Failed, but in the log: what `persisted="maybe"` is for.
    failed_but_in_log: int = 0
    #: The same with `persisted="no"`: a lie.
    denied_but_in_log: int = 0
    in_log: int = 0
    missing: int = 0
    duplicates: int = 0
    order_violations: int = 0
    #: Records whose metadata told another place than the one where the reader found them.
    misplaced: int = 0
    #: Acknowledged as stored by an earlier attempt whose answer was lost: the place is not told.
    place_unknown: int = 0
    faults: int = 0
    #: How many records had no end yet at the moment of each fault.
    unfinished_at_faults: tuple[int, ...] = ()
    retries: int = 0
    epoch_bumps: int = 0
    #: The longest time in which nothing was acknowledged although something was to be.
    longest_stall_s: float = 0.0
    longest_delivery_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        width = max(len(field.name) for field in fields(self))
        lines = [
            f"  {field.name:<{width}}  "
            + (
                f"{value:.2f}"
                if isinstance(value := getattr(self, field.name), float)
                else f"{value}"
            )
            for field in fields(self)
        ]
        return "\n".join(lines)


class Load:
    """Sends numbered records over many keys, and keeps the books.

    Record n has the number n as its value, and the n-th key, modulo the number of keys: in a
    correct log the numbers of each key ascend.
    """

    KEYS = 1000

    def __init__(self, producer: Producer[Any, Any], topic: str) -> None:
        self.ledger = Ledger()
        self.unfinished = 0
        #: Set while there are records without an end.
        self._busy = threading.Event()
        #: Set when a record has its end.
        self._news = asyncio.Event()
        self._producer = producer
        self._topic = topic
        self._deliveries: list[Delivery] = []
        self._loop = asyncio.get_running_loop()
        self._began = self._last_news = self._loop.time()

    async def send(self, count: int) -> None:
        """As quickly as there is room."""
        for _ in range(count):
            number = len(self._deliveries)
            now = self._loop.time()
            delivery = await self._producer.enqueue(
                self._topic, b"%d" % number, key=b"key-%d" % (number % self.KEYS)
            )
            if not self.unfinished:
                self._last_news = now
                self._busy.set()
            self.unfinished += 1
            self._deliveries.append(delivery)
            delivery.add_done_callback(partial(self._ended, now))

    def _ended(self, since: float, _: Delivery) -> None:
        now = self._loop.time()
        ledger = self.ledger
        ledger.longest_stall_s = max(ledger.longest_stall_s, now - self._last_news)
        ledger.longest_delivery_s = max(ledger.longest_delivery_s, now - since)
        self._last_news = now
        self._news.set()
        self.unfinished -= 1
        if not self.unfinished:
            self._busy.clear()

    async def during(self, fault: Callable[[], None], records: int) -> None:
        """Sends `records`, some at once, some while `fault` goes on in a thread, and the rest.

        The fault begins when there are records without an end.
        """

        def in_the_middle() -> None:
            while not (unfinished := self.unfinished):
                assert self._busy.wait(60), "nothing is sent"
            self.ledger.unfinished_at_faults += (unfinished,)
            fault()

        if not self._deliveries:
            # It is sending that the faults shall disturb, not its preparations.
            await self._producer.warm_up(self._topic)
        going_on = asyncio.create_task(asyncio.to_thread(in_the_middle))
        left = records
        portion = records // 4
        going_on.add_done_callback(lambda _: self._news.set())
        while left:
            self._news.clear()
            await self.send(min(portion, left))
            left -= min(portion, left)
            # The load is spread over the fault: more comes when there is less without an end.
            await self._news.wait()
            portion = left if going_on.done() else records // 4000
        await going_on
        self.ledger.faults += 1

    async def finish(self) -> list[RecordMetadata | DeliveryError]:
        """Waits for the end of each record, and closes the producer."""
        await self._producer.flush()
        ends: list[RecordMetadata | DeliveryError] = []
        for delivery in self._deliveries:
            error = delivery.exception()
            ends.append(delivery.result() if error is None else error)
        ledger = self.ledger
        ledger.sent = len(ends)
        ledger.acknowledged = sum(isinstance(end, RecordMetadata) for end in ends)
        ledger.failed = ledger.sent - ledger.acknowledged
        # What expired while it was under way keeps its memory until its request has ended.
        await self._producer.close()
        metrics = self._producer.metrics()
        ledger.retries = int(metrics["record_retry_total"])
        ledger.seconds = self._loop.time() - self._began
        sequences = self._producer._sequences
        ledger.epoch_bumps = 0 if sequences is None else sequences.epoch_bumps
        assert metrics["buffer_available_bytes"] == metrics["buffer_total_bytes"]
        return ends

    def audit(self, ends: list[RecordMetadata | DeliveryError], log: Log) -> None:
        """Compares the log with what was sent, and with where the producer said it is."""
        ledger = self.ledger
        found: set[int] = set()
        last_of_key: dict[bytes | None, int] = {}
        for partition, records in log.items():
            for record in records:
                number = int(record.value or b"-1")
                ledger.in_log += 1
                if number in found:
                    ledger.duplicates += 1
                    continue
                found.add(number)
                assert record.key == b"key-%d" % (number % self.KEYS)
                if number < last_of_key.get(record.key, -1):
                    ledger.order_violations += 1
                last_of_key[record.key] = number
                end = ends[number]
                if isinstance(end, DeliveryError):
                    ledger.failed_but_in_log += 1
                    ledger.denied_but_in_log += end.persisted == "no"
                elif not end.has_offset:
                    ledger.place_unknown += 1
                elif (end.partition, end.offset) != (partition, record.offset):
                    ledger.misplaced += 1
        ledger.missing = sum(
            isinstance(end, RecordMetadata) and number not in found
            for number, end in enumerate(ends)
        )

    async def settle(
        self, kafka3: KafkaCluster, read_quickly: Reader, capsys: pytest.CaptureFixture[str]
    ) -> Ledger:
        """The whole audit: prints the ledger, and asserts what must hold in every run."""
        ends = await self.finish()
        self.audit(ends, await read_quickly(kafka3, self._topic))
        ledger = self.ledger
        with capsys.disabled():
            sys.stdout.write(f"\n{self._topic}\n{ledger}\n")
        assert (ledger.missing, ledger.duplicates, ledger.order_violations) == (0, 0, 0)
        assert (ledger.misplaced, ledger.denied_but_in_log) == (0, 0)
        assert ledger.in_log == ledger.acknowledged + ledger.failed_but_in_log
        assert all(ledger.unfinished_at_faults)
        return ledger


def busiest(kafka3: KafkaCluster, topic: str) -> int:
    """The node that leads most partitions."""
    leaders = [partition.leader for partition in kafka3.topic(topic).values()]
    return max(kafka3.running, key=leaders.count)


def led_by_others(kafka3: KafkaCluster, topic: str, node: int) -> bool:
    partitions = kafka3.topic(topic).values()
    return bool(partitions) and all(p.leader not in (node, -1) for p in partitions)


def in_sync(kafka3: KafkaCluster, topic: str) -> bool:
    """All nodes must agree: one that was frozen may still take itself for a leader."""
    views = [kafka3.view(topic, node=node).topics.get(topic) for node in kafka3.running]
    first = views[0]
    if not first or any(view != first for view in views):
        return False
    return all(len(p.isr) == 3 and p.leader > 0 for p in first.values())


def elect_preferred_leaders(kafka3: KafkaCluster, topic: str) -> None:
    """Gives the node that came back its partitions again: leaders move once more."""
    admin = AdminClient({"bootstrap.servers": kafka3.bootstrap_servers})
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    admin.elect_leaders(ElectionType.PREFERRED, partitions).result(30)


async def freeze_twice(
    kafka3: KafkaCluster,
    topic: str,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
    enough: Callable[[int, bool], bool],
    **options: Any,
) -> Ledger:
    """The busiest node stands still and then catches up, two times.

    `enough` is asked when to go on: it gets the node, and whether something was retried.
    """
    async with Producer[Any, Any](kafka3.bootstrap_servers, **options) as producer:

        def freeze() -> None:
            node = busiest(kafka3, topic)
            retries = producer.metrics()["record_retry_total"]
            kafka3.pause(node)
            kafka3.wait_until(
                lambda: enough(node, producer.metrics()["record_retry_total"] > retries)
            )
            kafka3.resume(node)
            kafka3.wait_until(lambda: in_sync(kafka3, topic))

        load = Load(producer, topic)
        await load.during(freeze, 10_000)
        await load.during(freeze, 10_000)
        return await load.settle(kafka3, read_quickly, capsys)


@pytest.mark.long  # the chaos command's short form kills one, too
async def test_a_broker_is_killed_five_times_under_100000_records(
    kafka3: KafkaCluster,
    fresh_topic: FreshTopic,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic = fresh_topic(PARTITIONS, cluster=kafka3)

    def kill_and_restart() -> None:
        node = busiest(kafka3, topic)
        kafka3.kill(node)
        kafka3.wait_until(lambda: led_by_others(kafka3, topic, node))
        kafka3.restart(node)
        kafka3.wait_until(lambda: in_sync(kafka3, topic))
        elect_preferred_leaders(kafka3, topic)

    async with Producer[Any, Any](kafka3.bootstrap_servers, acks="all") as producer:
        load = Load(producer, topic)
        for _ in range(5):
            await load.during(kill_and_restart, 20_000)
        ledger = await load.settle(kafka3, read_quickly, capsys)
    assert (ledger.sent, ledger.acknowledged, ledger.faults) == (100_000, 100_000, 5)
    assert ledger.retries > 0


async def test_a_broker_is_stopped_and_started_while_sending(
    kafka3: KafkaCluster,
    fresh_topic: FreshTopic,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """IT-10: it hands its leaders over, and is a follower of all the others."""
    topic = fresh_topic(PARTITIONS, cluster=kafka3)

    loop = asyncio.get_running_loop()

    async with Producer[Any, Any](kafka3.bootstrap_servers) as producer:

        def stop_and_start() -> None:
            node = busiest(kafka3, topic)
            kafka3.stop_node(node)
            assert led_by_others(kafka3, topic, node)
            # The others take everything, without the one that is gone.
            asyncio.run_coroutine_threadsafe(producer.flush(), loop).result(60)
            kafka3.restart(node)
            kafka3.wait_until(lambda: in_sync(kafka3, topic))

        load = Load(producer, topic)
        await load.during(stop_and_start, 20_000)
        ledger = await load.settle(kafka3, read_quickly, capsys)
    assert ledger.failed == 0


@pytest.mark.parametrize("until_deposed", [False, True], ids=["stays leader", "is deposed"])
async def test_a_broker_freezes_for_longer_than_the_request_timeout(
    kafka3: KafkaCluster,
    fresh_topic: FreshTopic,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
    until_deposed: bool,
) -> None:
    """What it received before, it does when it wakes up: then the same comes again."""
    topic = fresh_topic(PARTITIONS, cluster=kafka3)
    ledger = await freeze_twice(
        kafka3,
        topic,
        read_quickly,
        capsys,
        lambda node, retried: retried and (not until_deposed or led_by_others(kafka3, topic, node)),
        request_timeout_ms=500,
        socket_connection_setup_timeout_ms=500,
    )
    assert ledger.failed == 0
    assert ledger.retries > 0


async def test_what_expires_while_a_broker_is_frozen(
    kafka3: KafkaCluster,
    fresh_topic: FreshTopic,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be in the log or not: that is told, and what comes behind it is not disturbed."""
    topic = fresh_topic(PARTITIONS, cluster=kafka3)
    ledger = await freeze_twice(
        kafka3,
        topic,
        read_quickly,
        capsys,
        lambda node, _: led_by_others(kafka3, topic, node),
        request_timeout_ms=400,
        delivery_timeout_ms=1200,
        socket_connection_setup_timeout_ms=400,
    )
    assert ledger.sent == 20_000
    assert ledger.failed > 0


async def test_all_brokers_are_gone_and_come_back(
    kafka3: KafkaCluster,
    fresh_topic: FreshTopic,
    read_quickly: Reader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With little memory, so that senders wait for it meanwhile."""
    topic = fresh_topic(PARTITIONS, cluster=kafka3)

    def blackout() -> None:
        for node in kafka3.running:
            kafka3.kill(node)
        kafka3.heal()
        kafka3.wait_until(lambda: in_sync(kafka3, topic))

    async with Producer[Any, Any](kafka3.bootstrap_servers, buffer_memory=500_000) as producer:
        load = Load(producer, topic)
        await load.during(blackout, 50_000)
        ledger = await load.settle(kafka3, read_quickly, capsys)
        assert producer.metrics()["bufferpool_wait_time_ns_total"] > 0
    assert ledger.failed == 0
