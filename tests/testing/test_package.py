from __future__ import annotations

import subprocess
import sys

import pytest

from asyncproducer import testing


def test_all_names_are_there() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
        assert name in dir(testing)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="EmbeddedClusters"):
        _ = testing.EmbeddedClusters


def test_importing_the_package_costs_next_to_nothing() -> None:
    code = (
        "import sys, asyncproducer; before = {*sys.modules};"
        "import asyncproducer.testing; print(*sorted({*sys.modules} - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["asyncproducer.testing"]
