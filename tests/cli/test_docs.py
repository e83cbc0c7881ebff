from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import asyncproducer
from asyncproducer import errors
from asyncproducer.cli.docs import (
    design_page,
    errors_page,
    exception_tree,
    main,
    metrics_page,
    options_module,
    options_page,
    state_table,
)
from asyncproducer.config import NAMES, OPTIONS
from asyncproducer.core.outcome import PRODUCE
from asyncproducer.core.sequences import TRANSITIONS, IdState
from asyncproducer.errors import error_name
from asyncproducer.option_names import LIBRDKAFKA, REFUSED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(asyncproducer.__file__).parent

HOW = "run: python -m asyncproducer.cli.docs"

#: `core/batch.py:ProducerBatch.seal`, `net/buffer_pool.py`
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# -- errors.md ---------------------------------------------------------------------------------


def test_errors_are_up_to_date() -> None:
    assert page("errors.md") == errors_page(), HOW


def test_the_tree_has_every_exception_under_its_parent() -> None:
    parents: list[str] = []
    seen = {}
    for line in exception_tree().splitlines():
        match = re.match(r"([│├└─ ]*)(\w+)", line)
        assert match is not None
        depth = len(match[1]) // 3
        parents[depth:] = [match[2]]
        seen[match[2]] = parents[depth - 1] if depth else None
    classes = {name: getattr(errors, name) for name in errors.__all__}
    expected = {n for n, c in classes.items() if isinstance(c, type) and issubclass(c, Exception)}
    assert set(seen) == expected
    for name, parent in seen.items():
        if parent is not None:
            assert classes[parent] in classes[name].__bases__


def test_the_tree_names_the_builtin_exceptions_and_says_what_each_means() -> None:
    lines = {match[0]: line for line in exception_tree().splitlines() if (match := _name(line))}
    assert "DeliveryTimeout (TimeoutError)" in lines["DeliveryTimeout"]
    assert "BatchDeliveryError (ExceptionGroup)" in lines["BatchDeliveryError"]
    assert all(re.search(r"\w {2,}\S|\) {2,}\S", line) for line in lines.values())


def _name(line: str) -> re.Match[str] | None:
    return re.search(r"\w+", line)


def test_the_tree_at_the_top_of_errors_py_is_the_same() -> None:
    drawn = re.findall(r"[├└]─ (\w+)", errors.__doc__ or "")
    assert drawn == re.findall(r"[├└]─ (\w+)", exception_tree())


def test_the_table_has_every_error_code() -> None:
    text = errors_page()
    for code in PRODUCE:
        assert f"| {code} | {error_name(code)} |" in text


# -- metrics.md --------------------------------------------------------------------------------


def test_metrics_are_up_to_date() -> None:
    assert page("metrics.md") == metrics_page(), HOW


# -- design.md ---------------------------------------------------------------------------------


def test_the_state_tables_of_the_design_are_up_to_date() -> None:
    assert page("design.md") == design_page(page("design.md")), HOW


def test_a_state_table_has_each_state_with_its_moves_in_order() -> None:
    assert state_table(TRANSITIONS).splitlines()[2:] == [
        "| NONE | REQUESTED, FATAL |",
        "| REQUESTED | NONE, READY, FATAL |",
        "| READY | NONE, FATAL |",
        "| FATAL | FATAL |",
    ]
    assert "| NONE | (the end) |" in state_table({IdState.NONE: frozenset()})


def test_a_page_without_its_tables_is_an_error() -> None:
    with pytest.raises(ValueError, match="no table of the states of: producer"):
        design_page("# How it works\n")


def test_every_place_that_the_design_names_exists() -> None:
    references = REFERENCE.findall(page("design.md"))
    assert len(references) > 50
    missing = [
        f"{file}:{name}"
        for file, name in references
        if not file.startswith("tests/") and name and name not in names_in(file)
    ]
    assert not missing
    for file, _ in references:
        assert ((ROOT if file.startswith("tests/") else PACKAGE) / file).is_file(), file


@pytest.mark.parametrize("path", ["docs/design.md", "CONTRIBUTING.md"])
def test_the_layers_in_the_text_are_those_that_are_checked(path: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (c["layers"] for c in project["tool"]["importlinter"]["contracts"] if "layers" in c)
    here = {entry.stem for entry in PACKAGE.iterdir()}
    named = [[n for n in re.findall(r"\w+", layer) if n in here] for layer in layers]
    written = " → ".join(", ".join(names) for names in named if names != ["__main__"])
    assert f"`{written}`" in " ".join((ROOT / path).read_text(encoding="utf-8").split())


@cache
def names_in(file: str) -> set[str]:
    """The classes, functions and constants of a source file, methods as Class.method.

    From the source: a compiled class does not show its C methods.
    """
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(prefix + node.name)
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)

    collect(ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body, "")
    return names


# -- options.md --------------------------------------------------------------------------------


def test_options_are_up_to_date() -> None:
    assert page("options.md") == options_page(), HOW


def test_options_have_every_name_and_well_formed_tables() -> None:
    text = options_page()
    for name in (*OPTIONS, *NAMES.aliases, *LIBRDKAFKA, *REFUSED):
        assert f"| `{name}` |" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert {line.count(" | ") for line in rows} == {1, 2, 5}


# -- all pages ---------------------------------------------------------------------------------


def test_the_module_writes_the_pages_as_they_are(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "design.md").write_text(
        re.sub(r"\| CREATED \|.*", "| CREATED | old |", page("design.md")), encoding="utf-8"
    )
    command = [sys.executable, "-W", "error", "-m", "asyncproducer.cli.docs"]
    subprocess.run([*command, str(docs)], check=True, timeout=60)
    for name in ("options.md", "errors.md", "metrics.md", "design.md"):
        assert (docs / name).read_bytes() == page(name).encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["docs"]


def test_options_py_is_up_to_date() -> None:
    assert (PACKAGE / "options.py").read_text(encoding="utf-8") == options_module(), HOW


def test_options_py_of_the_checkout_is_written_too(tmp_path: Path) -> None:
    for directory in ("docs", "asyncproducer"):
        (tmp_path / directory).mkdir()
    (tmp_path / "docs" / "design.md").write_text(page("design.md"), encoding="utf-8")
    module = tmp_path / "asyncproducer" / "options.py"
    module.touch()
    main([str(tmp_path / "docs")])
    assert module.read_text(encoding="utf-8") == options_module()


def test_help_is_told_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "usage: python -m asyncproducer.cli.docs [-h] [DIRECTORY]" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["missing"], ["--unknown"]])
def test_a_place_without_pages_is_an_error_and_no_traceback(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert re.search(r"error: (there is no design\.md in|unrecognized)", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["options.md", "errors.md", "metrics.md"])
def test_a_generated_page_names_the_command_that_makes_it(name: str) -> None:
    assert "<!-- Generated: python -m asyncproducer.cli.docs -->" in page(name)


@pytest.mark.parametrize(
    "path", ["README.md", "docs/design.md", "docs/errors.md", "docs/metrics.md"]
)
def test_links_inside_the_repository_lead_somewhere(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for link in links:
        target, _, anchor = link.partition("#")
        file = (ROOT / path).parent / target if target else ROOT / path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
