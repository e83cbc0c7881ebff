"""Which record path runs, and that the tests run on the one they mean."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import asyncproducer
from asyncproducer import _implementation
from asyncproducer._implementation import (
    IMPLEMENTATION,
    SourceFinder,
    choose,
    is_compiled,
    modules_of,
    tell,
)
from asyncproducer.core import partitioner

TOX_ENV = os.environ.get("TOX_ENV_NAME", "")


@pytest.mark.parametrize(
    ("asked", "built", "chosen"),
    [
        ("auto", [True, True], "compiled"),
        ("auto", [False, False], "python"),
        ("auto", [], "python"),
        ("compiled", [True, True], "compiled"),
        ("python", [True, True], "python"),
        ("python", [False, False], "python"),
    ],
)
def test_the_compiled_modules_are_used_if_all_are_there(
    asked: str, built: list[bool], chosen: str
) -> None:
    assert choose(asked, built) == chosen


@pytest.mark.parametrize("built", [[], [False], [True, False]])
def test_compiled_fails_where_a_module_is_not(built: list[bool]) -> None:
    missing = built.count(False)
    with pytest.raises(ImportError, match=f"{missing} of {len(built)} modules are not compiled"):
        choose("compiled", built)


def test_half_of_the_modules_is_none_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="half compiled"):
        assert choose("auto", [True, False]) == "python"


def test_compiled_modules_need_no_source_unless_python_is_meant() -> None:
    assert choose("auto", [True, True], without_source=2) == "compiled"
    with pytest.raises(
        ImportError, match=r"2 of 3 modules are compiled and have no \.py .*: unset"
    ):
        choose("python", [True, True, True], without_source=2)
    with pytest.raises(ImportError, match=r"1 of 2 modules .*: it is half compiled"):
        choose("auto", [True, False], without_source=1)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="ASYNCPRODUCER_IMPL=native"):
        choose("native", [True])


@pytest.mark.parametrize(
    ("implementation", "asked", "told"),
    [
        ("python", None, ["runs as plain Python"]),
        ("python", "auto", ["runs as plain Python"]),
        ("python", "python", []),
        ("compiled", None, []),
    ],
)
def test_the_fallback_is_told_once_unless_it_was_chosen(
    implementation: str,
    asked: str | None,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_implementation, "IMPLEMENTATION", implementation)
    monkeypatch.delenv("ASYNCPRODUCER_IMPL", raising=False)
    if asked is not None:
        monkeypatch.setenv("ASYNCPRODUCER_IMPL", asked)
    tell.cache_clear()
    for _ in range(2):
        tell()
    assert [record.name for record in caplog.records] == ["asyncproducer"] * len(told)
    assert all(text in caplog.text for text in told)


@pytest.mark.parametrize(
    ("built", "told"),
    [
        ([False, False], "no compiled modules. Install a C compiler .* --no-binary asyncproducer "),
        (
            [True, False],
            r"only 1 of its 2 modules .* again \(pip install [^()]* --force-reinstall ",
        ),
    ],
)
def test_the_advice_fits_what_is_installed_and_names_its_version(
    built: list[bool],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_implementation, "IMPLEMENTATION", "python")
    monkeypatch.setattr(_implementation, "_built", built)
    monkeypatch.delenv("ASYNCPRODUCER_IMPL", raising=False)
    tell.cache_clear()
    tell()
    assert re.search(f"{told}asyncproducer=={re.escape(asyncproducer.__version__)}", caplog.text)


def test_what_is_compiled_counts_where_no_pxd_is(tmp_path: Path) -> None:
    """PyInstaller packs what can be imported, and nothing beside."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / f"batch{EXTENSION_SUFFIXES[0]}").touch()
    (tmp_path / "core/batch.pxd").touch()
    (tmp_path / "core" / f"wire{EXTENSION_SUFFIXES[-1]}").touch()
    (tmp_path / "core/produce.pxd").touch()
    for other in ("errors.py", "core/old.cpython-27-pdp11.so", "py.typed"):
        (tmp_path / other).touch()
    assert [source.name for source in modules_of(tmp_path)] == ["batch.py", "produce.py", "wire.py"]


def test_an_extension_of_another_interpreter_does_not_count(tmp_path: Path) -> None:
    source = tmp_path / "batch.py"
    (tmp_path / "batch.cpython-27-pdp11.so").touch()
    assert not is_compiled(source)
    (tmp_path / f"batch{EXTENSION_SUFFIXES[0]}").touch()
    assert is_compiled(source)


def test_the_source_is_found_beside_an_extension(tmp_path: Path) -> None:
    (tmp_path / "batch.py").touch()
    (tmp_path / f"batch{EXTENSION_SUFFIXES[0]}").touch()
    spec = SourceFinder().find_spec("asyncproducer.core.batch", [str(tmp_path)])
    assert spec is not None
    assert spec.origin == str(tmp_path / "batch.py")


def test_only_our_own_sources_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "batch.py").touch()
    find = SourceFinder().find_spec
    assert find("others.core.batch", [str(tmp_path)]) is None
    assert find("asyncproducer", None) is None
    assert find("asyncproducer.core.absent", [str(tmp_path)]) is None


def test_the_package_tells_what_runs() -> None:
    assert asyncproducer.IMPLEMENTATION == IMPLEMENTATION
    assert (Path(partitioner.__file__).suffix == ".py") is (IMPLEMENTATION == "python")


@pytest.mark.skipif(not TOX_ENV, reason="a checkout may be tested as it is")
def test_tox_tests_the_wheel_and_not_the_checkout() -> None:
    assert Path(asyncproducer.__file__).is_relative_to(sys.prefix)


@pytest.mark.skipif("compiled" not in TOX_ENV, reason="not meant to be compiled")
def test_where_a_compiler_is_the_wheel_is_compiled() -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang", "cl"))) and os.name != "nt":
        pytest.skip("no C compiler here: this is the fallback")
    assert IMPLEMENTATION == "compiled"
