"""The example as its readers run it, with a driver and a worker killed on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import asyncproducer

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders_pipeline"
ORDERS = 3000
#: Few rows, and four JVMs: compiled code would cost more than it saves.
SMALL = (
    "--conf spark.sql.adaptive.enabled=false --conf spark.sql.codegen.wholeStage=false "
    "--conf spark.sql.shuffle.partitions=2 pyspark-shell"
)


@pytest.mark.parametrize(
    ("format_", "delivery"),
    [
        ("avro", "exactly_once"),
        pytest.param("json", "exactly_once", marks=pytest.mark.long),
        pytest.param("json", "at_least_once", marks=pytest.mark.long),
    ],
)
def test_each_order_is_in_every_topic_though_processes_are_killed(
    tmp_path: Path, format_: str, delivery: str
) -> None:
    output = tmp_path / "run"
    run = subprocess.run(
        [
            *(sys.executable, str(EXAMPLE), "--orders", str(ORDERS), "--rate", "0"),
            *("--kills", "2", "--format", format_, "--delivery", delivery),
            *("--output", str(output)),
        ],
        # The package that these tests test, also where it is not installed.
        env={
            **os.environ,
            "PYSPARK_SUBMIT_ARGS": SMALL,
            "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kill -9 of the driver of validate" in run.stdout
    assert "kill -9 of a Python worker of score" in run.stdout
    found = re.findall(r"^(\w+): (\S+), run \d+, (\w+): ([\d,]+) rec", run.stdout, re.M)
    assert {verdict for verdict, *_ in found} == {"clean"}
    counts = {target: int(number.replace(",", "")) for _, target, _, number in found}
    claims = {target: claim for _, target, claim, _ in found}
    assert claims.pop("raw-orders") == "exactly_once"
    assert set(claims.values()) == {delivery}
    assert counts["raw-orders"] == ORDERS
    if delivery == "exactly_once":
        # Of a stage that doubles, the next one takes all.
        scored = counts["fraud-scored-orders"]
        assert counts["validated-orders+orders-dlq"] == ORDERS
        assert 0.9 * ORDERS < scored < ORDERS  # the others are in the dead letter queue
        assert counts["analytics-events"] == scored
        assert 0.8 * scored < counts["fulfillment-orders"] < scored
    report = (output / "report.html").read_text(encoding="utf-8")
    assert "the driver of validate (1), a Python worker of score (1)" in report
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or [])
    ]
    assert left == []
