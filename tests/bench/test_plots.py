from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncproducer.bench.plots import draw

pytest.importorskip("matplotlib")


def document(*cases: str) -> dict[str, Any]:
    facts = {"date": "2026-01-01", "rounds": 2, "cpus": 2, "machine": "a machine"}
    results = [
        {"workload": "W1", "case": c, "peer": p, "round": n, "records_per_s": 100.0 * n}
        for c in cases
        for p in ("asyncproducer", "aiokafka")
        for n in (1, 2)
    ]
    # One that could not be measured, and one of which nothing at all is known.
    results.append({"workload": "W1", "case": cases[0], "peer": "java", "round": 1, "error": "no"})
    return {"command": "asyncproducer bench --rounds 2", "facts": facts, "results": results}


@pytest.mark.parametrize("cases", [["6 partitions"], ["1 partition", "6 partitions"]])
def test_the_same_results_make_the_same_bytes(tmp_path: Path, cases: list[str]) -> None:
    (path,) = draw(document(*cases), tmp_path)
    first = path.read_bytes()
    assert path.name == "W1.svg"
    assert b"<svg" in first
    draw(document(*cases), tmp_path)
    assert path.read_bytes() == first


def test_the_command_is_in_the_picture(tmp_path: Path) -> None:
    (path,) = draw(document("6 partitions"), tmp_path)
    assert "asyncproducer bench --rounds 2" in path.read_text(encoding="utf-8")
