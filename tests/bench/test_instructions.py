from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncproducer.bench import instructions, micro

#: They have a producer, and end the process.
_LAST = [
    "enqueue",
    "enqueue_whole",
    "acknowledged",
    "send",
    "send_many",
    "send_table",
    "send_table_keys",
]


class Ended(BaseException):
    """In the place of the process's end."""


def _end(status: int) -> None:
    raise Ended(status)


def test_an_operation_is_the_difference_of_two_numbers_of_it() -> None:
    runs = [{"a": 10, "b": 10}, {"a": 30, "b": 10}, {"a": 10, "b": 30}, {"c": 5}, {"c": 15}]
    totals = [1000, 1400, 1100, 7000, 8000]
    assert instructions.per_operation(runs, totals) == {"a": 20.0, "b": 5.0, "c": 100.0}


def test_the_least_of_several_counts_is_what_an_operation_needs() -> None:
    counts = [{"a": 3.0, "b": 1.0}, {"a": 2.0, "b": 5.0}]
    assert instructions.least(counts) == {"a": 2.0, "b": 1.0}


def test_classes_made_before_do_not_disturb_what_is_run() -> None:
    command = instructions._command({"varint": 2, "crc32c": 1}, place=64)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    command = instructions._command({"no such": 2})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("KeyError: 'no such'")


def test_more_than_five_percent_more_is_a_problem_and_less_is_none() -> None:
    baseline = {"a": 100.0, "b": 100.0, "c": 100.0}
    assert instructions.compare({"a": 105.0, "b": 100.0, "c": 50.0}, baseline) == []
    assert instructions.compare({"a": 106.0, "b": 100.0, "c": 100.0}, baseline) == [
        "a: 106.0 instructions, 6.0% more than the 100.0 of the baseline (at most 5% are allowed)"
    ]


def test_an_operation_that_does_nothing_any_more_is_a_problem() -> None:
    baseline = {"a": 100.0, "b": 100.0}
    assert instructions.compare({"a": 3.0}, baseline) == [
        "b has a baseline, and is not counted: write it anew with --update, if that is meant",
        "a: 3.0 instructions, less than 50% of the 100.0 of the baseline: if it still does its "
        "work, write it with --update",
    ]


@pytest.mark.parametrize("name", ["send_many", "send_table"])
def test_a_bulk_that_ends_has_not_been_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise ValueError("refused")

    async def taken(*_: object, **__: object) -> int:
        return 7

    monkeypatch.setattr(os, "_exit", _end)
    monkeypatch.setattr(f"asyncproducer.producer.Producer.{name}", refused)
    with pytest.raises(ValueError, match="refused"):
        micro.OPERATIONS[name](2)
    monkeypatch.setattr(f"asyncproducer.producer.Producer.{name}", taken)
    with pytest.raises(RuntimeError, match="it has ended, and is to wait for acknowledgements: 7"):
        micro.OPERATIONS[name](2)


def test_an_operation_without_a_baseline_is_no_more_than_it_was() -> None:
    assert instructions.compare({"new": 7.0}, {}) == []


def test_each_baseline_of_the_repository_has_every_operation() -> None:
    baselines = instructions.read(
        Path(__file__).parents[2] / "benchmarks/results/instructions.json"
    )
    assert len(baselines) >= 2
    for counted in baselines.values():
        assert set(counted) == set(micro.OPERATIONS)


def test_an_update_leaves_the_baselines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results" / "instructions.json"
    assert instructions.read(file) == {}
    for key, number in (("one", 1.0), ("other", 2.0), ("one", 3.0)):
        monkeypatch.setattr(instructions, "baseline_key", lambda key=key: key)
        instructions.update(file, {"a": number})
    assert instructions.read(file) == {"one": {"a": 3.0}, "other": {"a": 2.0}}


def test_without_valgrind_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(instructions.ValgrindMissing, match="counted by valgrind, which is not on"):
        instructions.count()


def test_instructions_by_function_are_read_from_what_valgrind_prints() -> None:
    annotated = """
100 (100.0%)  PROGRAM TOTALS

Ir                    file:function
1,050 (10.51%)  /build/Python/ceval.c:_PyEval_EvalFrameDefault'2 [/lib/libpython3.11.so.1.0]
   50 ( 3.82%)  /build/Python/ceval.c:_PyEval_EvalFrameDefault [/lib/libpython3.11.so.1.0]
    7 ( 0.10%)  ???:0x0000000000401000 [/lib/ld-linux.so.2]
    3 ( 0.01%)  ./string/memmove.S:memcpy
"""
    assert instructions.by_function(annotated) == {
        "_PyEval_EvalFrameDefault": 1100,
        "0x0000000000401000": 7,
        "memcpy": 3,
    }


@pytest.mark.parametrize("name", [n for n in micro.OPERATIONS if n not in _LAST])
def test_each_operation_runs(name: str) -> None:
    micro.OPERATIONS[name](2)


@pytest.mark.parametrize("name", _LAST)
def test_an_operation_with_a_producer_ends_its_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", _end)
    with pytest.raises(Ended):
        micro.OPERATIONS[name](2)


def test_each_send_is_a_request_of_its_own_that_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[bytes] = []
    answer_alike = micro._answer_alike

    def counted(transport: Any, answer: bytes) -> None:
        answer_alike(transport, answer)
        write = transport.write

        def counted_write(request: bytes) -> None:
            requests.append(bytes(request[8:12]))
            write(request)

        transport.write = counted_write
        transport.writelines = lambda pieces: counted_write(pieces[0])

    monkeypatch.setattr(os, "_exit", _end)
    monkeypatch.setattr(micro, "_answer_alike", counted)
    with pytest.raises(Ended):
        micro.send(3)
    numbers = [int.from_bytes(number) for number in requests]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_every_operation_is_counted() -> None:
    assert {name for loops in instructions._LOOPS for name in loops} == set(micro.OPERATIONS)
