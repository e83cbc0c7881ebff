from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import asyncproducer
from asyncproducer import errors, records


def test_every_exported_name_is_there() -> None:
    for name in asyncproducer.__all__:
        assert hasattr(asyncproducer, name), name


def test_exported_names_are_unique() -> None:
    assert len(asyncproducer.__all__) == len(set(asyncproducer.__all__))


def test_nothing_public_is_left_out() -> None:
    """A name without an underscore is exported, or is a module of the package."""
    public = {
        name
        for name, value in vars(asyncproducer).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == {name for name in asyncproducer.__all__ if name != "__version__"}


@pytest.mark.parametrize("module", [errors, records], ids=["errors", "records"])
def test_all_classes_of_a_module_can_be_imported_from_the_package(module: object) -> None:
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == getattr(module, "__name__", ""):
            assert getattr(asyncproducer, name) is value, name


def test_errors_have_one_root() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, BaseException):
            is_group = issubclass(value, BaseExceptionGroup)
            assert issubclass(value, asyncproducer.KafkaError) or is_group, name


def test_no_user_error_is_an_assertion() -> None:
    for value in vars(errors).values():
        if inspect.isclass(value):
            assert not issubclass(value, AssertionError)


@pytest.mark.parametrize("name", [n for n in asyncproducer.__all__ if n != "__version__"])
def test_exported_classes_have_a_docstring(name: str) -> None:
    value = getattr(asyncproducer, name)
    assert not inspect.isclass(value) or value.__doc__


def test_public_methods_of_the_producer_have_a_docstring() -> None:
    for name, value in vars(asyncproducer.Producer).items():
        if not name.startswith("_"):
            assert inspect.getdoc(getattr(value, "__func__", value)), name


def test_send_family_has_one_signature() -> None:
    """Topic and value are positional, all else is keyword-only."""
    producer = asyncproducer.Producer
    send, *others = (
        list(inspect.signature(method).parameters.values())
        for method in (
            producer.send,
            producer.enqueue,
            producer.send_nowait,
            asyncproducer.Portal.send,
        )
    )
    assert [p.name for p in send if p.kind is not p.KEYWORD_ONLY] == ["self", "topic", "value"]
    assert [p.name for p in send if p.kind is p.KEYWORD_ONLY] == [
        "key",
        "headers",
        "partition",
        "timestamp",
    ]
    assert others == [send, send, send]


def test_version_is_that_of_the_project() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    match = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert match is not None
    assert match[1] == asyncproducer.__version__


def test_implementation_is_known() -> None:
    assert asyncproducer.IMPLEMENTATION in ("compiled", "python")


def test_importing_is_light() -> None:
    """No test kit, no kio schema of a broker's side, no pytest: only what producing needs."""
    code = (
        "import sys, asyncproducer\n"
        "print([m for m in sys.modules if m.split('.')[0] in {'pytest', 'aiokafka', 'rich'}"
        " or m.startswith(('asyncproducer.testing', 'asyncproducer.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
