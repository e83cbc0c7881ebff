from __future__ import annotations

import json

import pytest

from asyncproducer.bench.peers import PEERS
from asyncproducer.bench.workloads import BASE_RECORDS, WORKLOADS, Case, headline, payloads, scaled

CASES = {f"{w.id} {c.name}": c for w in WORKLOADS.values() for c in w.cases}


@pytest.mark.parametrize("size", [1, 20, 30, 100, 1_000, 900_000])
def test_values_have_their_size_and_are_json(size: int) -> None:
    values = payloads(Case(name="", size=size))
    assert {len(value) for value in values} == {size}
    for value in values[:10]:
        json.loads(value)


def test_values_are_the_same_in_each_process_and_have_no_line_ends() -> None:
    first = payloads(Case(name="a", size=100))
    payloads.cache_clear()
    assert payloads(Case(name="b", size=100)) == first
    assert len(set(first)) == 1000
    assert not any(b"\n" in value for value in first)  # Java reads them from lines


def test_a_case_has_a_name_of_its_own() -> None:
    assert len(CASES) == sum(len(w.cases) for w in WORKLOADS.values())


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_each_case_can_be_done_by_each_peer_or_it_is_said_who_cannot(workload: object) -> None:
    for name, case in CASES.items():
        assert PEERS["asyncproducer"].can(case), name


def test_who_cannot_do_what() -> None:
    def able(name: str) -> set[str]:
        return {peer for peer, kind in PEERS.items() if kind.can(CASES[name])}

    assert able("W1 6 partitions") == set(PEERS)
    assert able("W3 1 task") == set(PEERS) - {"confluent", "kafka-python", "java"}
    assert "wire-replay" not in able("W3 100 tasks in a loop")
    assert "aiokafka" in able("W3 8,000 new tasks")
    assert "aiokafka" not in able("W3 50,000 new tasks")
    assert not able("W12 3 headers") & {"java", "wire-replay"}
    with_transactions = {p for p in PEERS if p.startswith(("async", "aiokafka"))} | {"confluent"}
    assert able("W7 1,000 records a transaction") == with_transactions
    assert able("W7 1,000 records a transaction, lists") == with_transactions
    assert able("W7 100 records and a group's offset a transaction") == with_transactions
    assert able("W7 transactions of 100 ms") == with_transactions | {"java"}
    assert able("W6 lz4") & {"java", "wire-replay"} == {"java"}
    assert able("W6 zstd, level 9") & {"aiokafka", "confluent", "java"} == {"confluent", "java"}
    assert able("W14 send_table, Arrow with keys") == {p for p in PEERS if p.startswith("async")}


def test_records_are_scaled_in_proportion() -> None:
    assert scaled(Case(name="", records=BASE_RECORDS // 4), 4000).records == 1000
    assert scaled(Case(name="", records=10), 3000).records == 1
    assert scaled(Case(name="", size=100), BASE_RECORDS, size=200).size == 200


def test_a_quick_case_takes_about_a_second() -> None:
    case = Case(name="", load="rate", rate=100, records=1000, tasks=50_000)
    quick = scaled(case, BASE_RECORDS, quick=True)
    assert (quick.records, quick.seconds, quick.tasks) == (100, 1.0, 1_000)


def test_the_headline_is_w1_with_6_partitions_and_all_peers() -> None:
    (case,) = headline().cases
    assert (case.partitions, case.size, case.load) == (6, 100, "flood")
    assert set(headline().peers) == set(PEERS) - {"asyncproducer-before"}
