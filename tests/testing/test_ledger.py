from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncproducer import DeliveryTimeout, MetadataTimeout, Producer
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.ledger import Ledger, percentile

pytestmark = pytest.mark.virtual_time


async def send(ledger: Ledger, producer: Producer[Any, Any], count: int) -> None:
    for _ in range(count):
        key, value = ledger.next_record()
        ledger.track(await producer.enqueue("t4", value, key=key), now=0.0)


def read(ledger: Ledger, cluster: EmbeddedCluster) -> list[tuple[Any, ...]]:
    """All that is in the log, which is also returned: to be read again, altered or not at all."""
    found: list[tuple[Any, ...]] = [
        (partition, record.offset, record.key, record.value)
        for partition in range(4)
        for record in cluster.records("t4", partition)
    ]
    for record in found:
        ledger.read(*record)
    return found


@pytest.fixture
async def sent(cluster: EmbeddedCluster, network: MemoryNetwork) -> tuple[Ledger, list[Any]]:
    """100 records of 10 keys that are in the log, none of them read."""
    ledger = Ledger(keys=10)
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        await send(ledger, producer, 100)
        assert ledger.open == 100
    assert ledger.open == 0
    assert len(ledger) == len(ledger.latencies) == 100
    other = Ledger(keys=10)
    for _ in range(100):
        other.next_record()
    found = read(other, cluster)
    assert other.verdict().foreign == 100
    return ledger, found


def test_what_is_there_once_and_in_order_is_clean(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    for record in found:
        ledger.read(*record)
    verdict = ledger.verdict()
    assert verdict.clean
    assert (verdict.sent, verdict.acknowledged, verdict.in_log) == (100, 100, 100)
    assert (verdict.failed, verdict.unexplained, verdict.foreign) == (0, 0, 0)


def test_what_was_read_is_known_of_each_record(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    assert not ledger.was_read(7)
    for record in found:
        if b" 7 " not in record[3]:
            ledger.read(*record)
    assert [n for n in range(100) if not ledger.was_read(n)] == [7]


def test_what_is_acknowledged_and_not_read_is_lost(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    for record in found[1:]:
        ledger.read(*record)
    assert ledger.verdict().lost == 1
    assert not ledger.verdict().clean
    ((number, partition, offset),) = ledger.missing()
    assert (partition, offset) == found[0][:2]
    assert b" %d " % number in found[0][3]


def test_without_reading_all_is_lost(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, _ = sent
    assert ledger.verdict().lost == 100


def test_what_was_removed_before_it_was_read_is_not_lost(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    (partition, *_), *_ = found
    removed = [place for place in found if place[0] == partition][:5]
    others = [place for place in found if place not in removed]
    ledger.removed(partition, 0, 3)
    ledger.removed(partition, 3, 5)
    for record in others[:-1]:
        ledger.read(*record)
    verdict = ledger.verdict()
    assert (verdict.removed, verdict.lost, verdict.unjudged) == (5, 1, 5)
    assert not verdict.clean
    assert [place[1:] for place in ledger.missing()] == [others[-1][:2]]
    assert ledger.log_starts == {partition: 5}
    ledger.read(*others[-1])
    assert ledger.verdict().clean


def test_what_was_read_before_it_was_removed_is_judged(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    for record in found:
        ledger.read(*record)
    ledger.removed(found[0][0], 0, 5)
    assert ledger.verdict().clean
    assert ledger.verdict().unjudged == 0


@pytest.mark.parametrize("compacted", [True, False])
async def test_what_could_not_be_read_is_not_lost(
    compacted: bool, cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    ledger = Ledger(keys=1, compacted=compacted)
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        await send(ledger, producer, 10)
    ((partition, log),) = [(p, log) for p in range(4) if (log := cluster.records("t4", p))]
    for record in log[1:6]:
        ledger.read(partition, record.offset, record.key, record.value)
    ledger.unread(partition, 6, 9)
    verdict = ledger.verdict()
    # The first is missing, and so is the last: the log ended before it.
    assert (verdict.unread, verdict.unjudged) == ((4, 5) if compacted else (3, 3))
    assert (verdict.compacted, verdict.lost) == ((1, 0) if compacted else (0, 2))
    assert ledger.unread_from == {partition: 6}


def test_without_an_offset_it_may_be_any_that_was_not_read() -> None:
    ledger = Ledger()
    ledger.next_record()
    error = DeliveryTimeout("late", persisted="yes", partition=1)
    ledger.track(Failed(error), 0.0)  # type: ignore[arg-type]  # its Delivery
    ledger.unread(1, 0, 1)
    verdict = ledger.verdict()
    assert (verdict.claimed, verdict.unread) == (0, 1)


@pytest.mark.parametrize("compacted", [True, False])
async def test_in_a_compacted_topic_only_the_last_record_of_a_key_is_lost(
    compacted: bool, cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    ledger = Ledger(keys=2, compacted=compacted)
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        await send(ledger, producer, 6)
        # Of somebody else, behind the last record of the second key.
        await producer.send("t4", b"theirs", key=b"key-1")
    for partition in range(4):
        for record in cluster.records("t4", partition):
            if record.value and (b" 2 " in record.value or record.value == b"theirs"):
                ledger.read(partition, record.offset, record.key, record.value)
    verdict = ledger.verdict()
    # 0 is followed by 2, and 1, 3, 5 by theirs; 4 is followed by nothing.
    assert (verdict.compacted, verdict.lost) == ((4, 1) if compacted else (0, 5))


def test_what_is_read_twice_is_doubled_and_nothing_else(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    for record in [*found, found[0]]:
        ledger.read(*record)
    verdict = ledger.verdict()
    assert (verdict.doubled, verdict.reordered, verdict.misplaced) == (1, 0, 0)
    assert not verdict.clean


def test_what_lies_behind_a_later_one_is_reordered(sent: tuple[Ledger, list[Any]]) -> None:
    ledger, found = sent
    first, second, *others = found
    for record in (second, first, *others):
        ledger.read(*record)
    assert ledger.verdict().reordered == 1
    assert not ledger.verdict().clean


@pytest.mark.parametrize("change", [{"offset": 1}, {"partition": 1}])
def test_a_place_that_was_told_wrong_is_misplaced(
    sent: tuple[Ledger, list[Any]], change: dict[str, int]
) -> None:
    ledger, found = sent
    *others, (partition, offset, key, value) = found
    for record in others:
        ledger.read(*record)
    ledger.read(
        (partition + change.get("partition", 0)) % 4, offset + change.get("offset", 0), key, value
    )
    verdict = ledger.verdict()
    assert (verdict.misplaced, verdict.unexplained) == (1, 1)
    assert verdict.split_keys == ("partition" in change)


def test_which_of_two_copies_was_told_does_not_matter(sent: tuple[Ledger, list[Any]]) -> None:
    """Sent again without idempotence, it is the second one that is acknowledged."""
    ledger, (first, *others) = sent
    partition, offset, key, value = first
    for record in [(partition, offset + 7, key, value), *others, first]:
        ledger.read(*record)
    verdict = ledger.verdict()
    assert (verdict.doubled, verdict.misplaced) == (1, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"other", None), (None, None), (b"key-0", b"x"), (b"key-0", b"999 "), (b"key-1", None)],
)
def test_another_key_or_value_is_altered(
    sent: tuple[Ledger, list[Any]], key: bytes | None, value: bytes | None
) -> None:
    ledger, found = sent
    for partition, offset, own_key, own_value in found:
        if b" 0 " in own_value:
            start = own_value[: own_value.index(b" ") + 1]
            ledger.read(partition, offset, key, own_value if value is None else start + value)
        else:
            ledger.read(partition, offset, own_key, own_value)
    verdict = ledger.verdict()
    assert (verdict.altered, verdict.lost) == (1, 1)


@pytest.mark.parametrize(("drop", "in_log"), [("before", 0), ("after", 10)])
async def test_failures_count_by_what_they_say_of_the_log(
    cluster: EmbeddedCluster, network: MemoryNetwork, drop: Any, in_log: int
) -> None:
    ledger = Ledger(keys=0)
    cluster.inject(api="produce", drop=drop, times=None)
    async with Producer(
        cluster.bootstrap_servers,
        connector=network,
        delivery_timeout_ms=3000,
        request_timeout_ms=1000,
    ) as producer:
        await send(ledger, producer, 10)
    read(ledger, cluster)
    verdict = ledger.verdict()
    assert (verdict.failed_maybe, verdict.failed, verdict.acknowledged) == (10, 10, 0)
    assert (verdict.maybe_in_log, verdict.in_log) == (in_log, in_log)
    assert verdict.clean
    assert [*ledger.errors] == [DeliveryTimeout.__name__]


class Failed:
    """What `Ledger.track` wants of a delivery that has failed."""

    def __init__(self, error: DeliveryTimeout) -> None:
        self._error = error

    def add_done_callback(self, call: Any) -> None:
        call(self)

    def exception(self) -> DeliveryTimeout:
        return self._error


@pytest.mark.parametrize(
    ("persisted", "is_read", "field"), [("no", True, "denied"), ("yes", False, "claimed")]
)
def test_an_error_that_says_what_is_not_true_is_unexplained(
    persisted: Any, is_read: bool, field: str
) -> None:
    ledger = Ledger()
    key, value = ledger.next_record()
    error = DeliveryTimeout("late", persisted=persisted)
    ledger.track(Failed(error), 0.0)  # type: ignore[arg-type]  # its Delivery
    if is_read:
        ledger.read(0, 0, key, value)
    verdict = ledger.verdict()
    assert (getattr(verdict, field), verdict.unexplained, verdict.clean) == (1, 1, False)


def test_without_an_offset_it_may_be_any_that_was_removed_from_the_partition() -> None:
    ledger = Ledger()
    for partition in (0, 1):
        ledger.next_record()
        error = DeliveryTimeout("late", persisted="yes", partition=partition)
        ledger.track(Failed(error), 0.0)  # type: ignore[arg-type]  # its Delivery
    ledger.removed(1, 0, 1)
    verdict = ledger.verdict()
    assert (verdict.claimed, verdict.removed) == (1, 1)


def test_a_refused_record_must_not_be_in_the_log() -> None:
    ledger = Ledger()
    record = ledger.next_record()
    ledger.refuse(MetadataTimeout("no such topic"))
    assert ledger.verdict().clean
    assert ledger.verdict().refused == 1
    ledger.read(0, 0, *record)
    assert ledger.verdict().denied == 1


async def test_what_was_aborted_must_not_be_read(
    cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    ledger = Ledger(keys=0)
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        await send(ledger, producer, 5)
        await producer.flush()
        ledger.abort(3)
        await send(ledger, producer, 2)
        ledger.abort(5)  # before their end is known
    verdict = ledger.verdict()
    assert (verdict.aborted, verdict.acknowledged, verdict.lost) == (4, 3, 3)
    read(ledger, cluster)
    verdict = ledger.verdict()
    assert (verdict.denied, verdict.lost, verdict.clean) == (4, 0, False)


def test_a_record_without_an_end_is_unexplained() -> None:
    ledger = Ledger()
    ledger.next_record()
    assert ledger.verdict().unresolved == ledger.verdict().unexplained == 1


async def test_acks_0_tells_no_place(cluster: EmbeddedCluster, network: MemoryNetwork) -> None:
    ledger = Ledger()
    async with Producer(cluster.bootstrap_servers, connector=network, acks=0) as producer:
        await send(ledger, producer, 5)
        await asyncio.sleep(1)
    read(ledger, cluster)
    verdict = ledger.verdict()
    assert (verdict.place_unknown, verdict.misplaced, verdict.lost) == (5, 0, 0)


def test_values_have_their_size() -> None:
    assert len(Ledger(size=500).next_record()[1]) == 500
    assert Ledger(keys=0).next_record()[0] is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (1.0, 100), (0.0, 1)])
def test_percentiles(share: float, value: float) -> None:
    assert percentile(range(100, 0, -1), share) == value
    assert percentile([], share) == 0.0
