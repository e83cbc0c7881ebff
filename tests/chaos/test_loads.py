"""What the chaos runs rely on: their verdict fails for whatever must not be, and for that alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial

import pytest

from asyncproducer import Producer
from asyncproducer.testing import EmbeddedCluster
from tests.chaos import loads
from tests.chaos.loads import LOADS, TRANSACTION, Load, Outcome

pytestmark = pytest.mark.virtual_time

#: Partition, offset, key and value, as the log has them.
Read = tuple[int, int, bytes | None, bytes | None]
#: The log of one partition, made into another one.
Change = Callable[[list[Read]], list[Read]]
NewLoad = Callable[[str], Load]


@pytest.fixture
def new_load(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> NewLoad:
    monkeypatch.setattr(loads, "Producer", partial(Producer, connector=cluster.connector))
    return lambda name: Load(name, cluster.bootstrap_servers, "t", 200)


async def run(load: Load, seconds: float) -> None:
    await load.start()
    await asyncio.sleep(seconds)
    await load.end()


def log(cluster: EmbeddedCluster, *, committed: bool) -> list[Read]:
    return [(0, r.offset, r.key, r.value) for r in cluster.records("t", 0, committed=committed)]


def outcome(load: Load, records: list[Read]) -> Outcome:
    for record in records:
        load.ledger.read(*record)
    return load.outcome()


def swapped(records: list[Read]) -> list[Read]:
    """The first two have changed places."""
    (_, first, *one), (_, second, *other) = records[:2]
    return [(0, first, *other), (0, second, *one), *records[2:]]  # type: ignore[list-item]


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "clean": (lambda records: records, set()),
    "lost": (lambda records: records[1:], {"lost"}),
    "doubled": (lambda records: [*records, (0, 10**6, *records[-1][2:])], {"doubled"}),
    "reordered": (swapped, {"reordered", "misplaced"}),
    "unexplained": (lambda records: [*records, (0, 10**6, None, b"who?")], {"foreign"}),
    "altered": (
        lambda records: [*records[1:], (*records[0][:3], (records[0][3] or b"") + b"!")],
        {"altered", "lost"},
    ),
    "elsewhere": (lambda records: [(0, 10**6, *records[0][2:]), *records[1:]], {"misplaced"}),
}


#: What a load need not keep.
ALLOWED = {
    "acks1": {"lost", "doubled", "reordered", "misplaced"},
    "plain": {"doubled", "reordered"},
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("change", CHANGES)
async def test_a_log_is_wrong_where_it_is_not_what_was_promised(
    cluster: EmbeddedCluster, new_load: NewLoad, name: str, change: str
) -> None:
    load = new_load(name)
    await run(load, 2)
    make, expected = CHANGES[change]
    records = log(cluster, committed=True)
    assert len(records) >= 100
    assert set(outcome(load, make(records)).wrong) == expected - ALLOWED.get(name, set())


async def test_a_transaction_that_is_seen_in_part_is_wrong(
    cluster: EmbeddedCluster, new_load: NewLoad
) -> None:
    for part in ("of a committed one", "of an aborted one"):
        load = new_load("transactional")
        before = len(log(cluster, committed=True)), len(log(cluster, committed=False))
        await run(load, 2)
        assert load.commits > load.aborts > 0
        whole = log(cluster, committed=True)[before[0] :]
        everything = log(cluster, committed=False)[before[1] :]
        assert len(whole) == load.commits * TRANSACTION
        assert len(everything) == len(whole) + load.aborts * TRANSACTION
        if part == "of a committed one":
            assert outcome(load, whole[: -TRANSACTION // 2]).wrong == {"lost": TRANSACTION // 2}
        else:
            aborted = set(everything) - set(whole)
            seen = sorted({*whole, *sorted(aborted)[:5]})
            assert outcome(load, seen).wrong == {"denied": 5}


@pytest.mark.parametrize("name", LOADS)
async def test_records_fail_in_haste_and_else_are_wrong_to_fail(
    cluster: EmbeddedCluster, new_load: NewLoad, name: str
) -> None:
    """For 4 s no record is answered, though all are stored: the hasty ones run out of time."""
    load = new_load(name)
    await load.start()
    fault = cluster.inject("produce", no_answer=True, after_append=True, times=None)
    await asyncio.sleep(4)
    fault.remove()
    await load.end()
    found = outcome(load, log(cluster, committed=True))
    assert found.wrong == {}
    assert (found.verdict.failed > 0) == (found.verdict.maybe_in_log > 0) == (name == "hasty")
    for count in ("failed_maybe", "refused"):
        failed = dataclasses.replace(found.verdict, **{count: 7, "failed_no": 0})
        wrong = dataclasses.replace(found, verdict=failed).wrong
        assert wrong == ({} if name == "hasty" else {count.split("_")[0]: 7})


async def test_memory_that_is_not_given_back_is_wrong(
    cluster: EmbeddedCluster, new_load: NewLoad
) -> None:
    load = new_load("hasty")
    await run(load, 1)
    found = outcome(load, log(cluster, committed=True))
    assert found.wrong == {}
    assert dataclasses.replace(found, memory_balanced=False).wrong == {"memory": 1}
