from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from asyncproducer.bench import floor


def test_a_loop_that_does_nothing_is_measured_beside_busy_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: Any, **options: Any) -> None:
            super().__init__(command, **options)
            if "-c" in command:  # the other one sleeps
                started.append(self)

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(subprocess, "Popen", Started)
    result = floor.run(0.05)
    assert result["stall_p999_ms"] > 0 < result["turn_wait_p999_ms"]
    assert [process.returncode is not None for process in started] == [True, True], "they are ended"


def test_the_facts_of_a_run_have_it_by_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, '{"stall_p999_ms": 1.2345}', "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert floor.measured() == {"floor_stall_p999_ms": 1.23}
    assert asked == [[sys.executable, "-m", "asyncproducer.bench.floor"]]
