"""The training of a profiled build: it must run wherever the package does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncproducer.bench import training


def test_each_load_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [min(case.records, 1_000) for case in training.CASES]
    short = (replace(case, records=n) for case, n in zip(training.CASES, wanted, strict=True))
    monkeypatch.setattr(training, "CASES", tuple(short))
    monkeypatch.setattr(training, "WHOLE", 100)
    sent = training.main()
    assert len(sent) == len(wanted)
    # A tenth of the records goes first.
    assert all(n >= least for n, least in zip(sent, wanted, strict=True))
