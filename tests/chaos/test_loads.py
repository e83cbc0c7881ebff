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
from tests.chaos.offsets import logged_offset

pytestmark = pytest.mark.virtual_time

#: Partition, offset, key and value, as the log has them.
Read = tuple[int, int, bytes | None, bytes | None]
#: The log of one partition, made into another one.
Change = Callable[[list[Read]], list[Read]]
NewLoad = Callable[[str], Load]


@pytest.fixture
def new_load(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> NewLoad:
    monkeypatch.setattr(loads, "Producer", partial(Producer, connector=cluster.connector))
    made: list[Load] = []
    groups = cluster._groups
    end = groups.end_transaction

    def ended(group_id: str, producer_id: int, *, committed: bool) -> None:
        """The embedded coordinator has no log of its own that could be read."""
        end(group_id, producer_id, committed=committed)
        if committed:
            load = made[-1]
            load.offset_found = cluster.committed_offsets(load.group)[load.place].offset
            load.logged_offsets.append(load.offset_found)

    monkeypatch.setattr(groups, "end_transaction", ended)

    def make(name: str) -> Load:
        made.append(Load(name, cluster.bootstrap_servers, "t", 200))
        return made[-1]

    return make


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
            # Its offset has moved.
            wrong = {"lost": TRANSACTION // 2, "torn": 1, "offset_elsewhere": 1}
            assert outcome(load, whole[: -TRANSACTION // 2]).wrong == wrong
        else:
            aborted = set(everything) - set(whole)
            seen = sorted({*whole, *sorted(aborted)[:5]})
            assert outcome(load, seen).wrong == {"denied": 5}


def of_an_aborted_one(load: Load) -> None:
    load.logged_offsets.insert(3, load.ends[3])


def moved_by_an_abort(load: Load) -> None:
    """The last one that the group has, though no record of it can be read."""
    load.ends.append(len(load.ledger))
    load.logged_offsets.append(load.ends[-1])
    load.offset_found = load.ends[-1]


def not_moved(load: Load) -> None:
    load.logged_offsets.pop()
    load.offset_found = load.logged_offsets[-1]


def asked_again(load: Load) -> None:
    load.logged_offsets.insert(3, load.logged_offsets[2])


def late(load: Load) -> None:
    load.logged_offsets.insert(3, load.logged_offsets[1])


OFFSETS: dict[str, tuple[Callable[[Load], object], set[str]]] = {
    "clean": (lambda load: None, set()),
    "asked again": (asked_again, set()),
    "of an aborted one": (of_an_aborted_one, {"torn"}),
    "moved by an abort": (moved_by_an_abort, {"torn", "offset_elsewhere"}),
    "not moved": (not_moved, {"torn", "offset_elsewhere"}),
    "missing": (lambda load: load.logged_offsets.pop(3), {"torn"}),
    "late": (late, {"went_back"}),
    "elsewhere": (lambda load: setattr(load, "offset_found", load.ends[0]), {"offset_elsewhere"}),
    "nowhere": (lambda load: setattr(load, "offset_found", -1001), {"offset_elsewhere"}),
}


@pytest.mark.parametrize("change", OFFSETS)
async def test_offsets_are_wrong_where_they_do_not_move_with_the_records(
    cluster: EmbeddedCluster, new_load: NewLoad, change: str
) -> None:
    load = new_load("transactional")
    # Some offsets are stored without an answer, and stored again.
    cluster.inject("txn_offset_commit", no_answer=True, after_append=True, times=2)
    await run(load, 8)
    assert len(load.ends) == load.commits + load.aborts
    make, expected = OFFSETS[change]
    make(load)
    found = outcome(load, log(cluster, committed=True))
    assert set(found.wrong) == expected
    if not expected:
        assert found.offsets.offsets_committed == load.commits > load.aborts > 1
        last = [end for turn, end in enumerate(load.ends, 1) if turn % 4][-1]
        assert found.offsets.offset_found == found.offsets.offset_expected == last


def test_only_what_a_group_has_committed_for_the_partition_is_looked_at() -> None:
    key = b"\0\x01\0\x01g\0\x02in\0\0\0\0"
    value = b"\0\x03\0\0\0\0\0\0\x01\x02\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0"
    assert logged_offset(key, value, "g", "in") == 258
    assert logged_offset(key, None, "g", "in") == -1
    assert logged_offset(key, value, "h", "in") is None
    assert logged_offset(key, value, "g", "on") is None
    assert logged_offset(key, value, "g", "in", 1) is None
    assert logged_offset(b"\0\x02" + key[2:], value, "g", "in") is None
    assert logged_offset(None, value, "g", "in") is None


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
