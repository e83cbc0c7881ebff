from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from asyncproducer.spark import kept


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(kept, "_modules", 0)
    monkeypatch.setattr(gc, "collect", lambda: found.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: found.append("freeze"))
    return found


def test_what_is_imported_is_frozen_once(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    kept.freeze()
    # Garbage is not kept for good with the rest.
    assert calls == ["collect", "freeze"]
    kept.freeze()
    assert calls == ["collect", "freeze"]


def test_what_is_imported_later_is_frozen_too(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    kept.freeze()
    monkeypatch.setitem(sys.modules, "imported_later", ModuleType("imported_later"))
    kept.freeze()
    assert calls == ["collect", "freeze"] * 2


def test_a_process_that_ends_with_its_task_is_left_alone(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    kept.freeze()
    assert calls == []
