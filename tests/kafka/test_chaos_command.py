"""`python -m tests.chaos`, in short: nine faults, with a seed of its own each time; and whole."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.chaos.__main__ import Run, parse
from tests.chaos.faults import BROKER_FAULTS, WIRE_FAULTS
from tests.chaos.loads import LOADS

if TYPE_CHECKING:
    from asyncproducer.testing.kafka import KafkaCluster

pytestmark = pytest.mark.slow

FAULTS = [
    *("kill_coordinator", "kill_group_coordinator"),
    *("pause_and_depose", "move_leaders", "move_address"),
    *("cut_after", "truncate_answer", "black_hole", "delay"),
]


@pytest.mark.timeout(180)
async def test_nine_kinds_of_faults_lose_double_and_reorder_nothing(
    kafka3: KafkaCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(parse(["--faults", f"{len(FAULTS)}", "--only", *FAULTS]), kafka3)
    status = await run.run()
    report = capsys.readouterr().out
    assert status == 0, report
    assert Counter(run.happened) == Counter(FAULTS)
    assert [outcome.name for outcome in run.outcomes] == list(LOADS)
    for outcome in run.outcomes:
        assert outcome.verdict.acknowledged > 0
        assert outcome.retries > 0, report
    (transactional,) = (o for o in run.outcomes if o.promise.transactional)
    assert transactional.offsets.offsets_committed == transactional.commits > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_hundred_faults_lose_double_and_reorder_nothing(
    kafka3: KafkaCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(parse(["--faults", "100"]), kafka3)
    status = await run.run()
    report = capsys.readouterr().out
    assert status == 0, report
    assert set(run.happened) == {*BROKER_FAULTS, *WIRE_FAULTS}
