"""The pytest plugin, run by an inner pytest."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest_plugins = "pytester"

PLUGIN = "asyncproducer.testing.plugin"

HEADER = """
import asyncio
import pytest
from asyncproducer.testing.clock import VirtualTimeLoop

def is_virtual():
    return isinstance(asyncio.get_running_loop(), VirtualTimeLoop)

"""


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    pytester.makeini(
        "[pytest]\n"
        "asyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
        "addopts = --strict-markers\n"
    )
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *plugin_option(), *args)


def plugin_option() -> tuple[str, ...]:
    # An installed package brings its entry point; then `-p` would register it twice.
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    return () if installed else ("-p", PLUGIN)


def test_the_marker_puts_a_test_and_its_fixtures_on_virtual_time(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        HEADER
        + """
@pytest.fixture
async def loop():
    yield asyncio.get_running_loop()
    await asyncio.sleep(3600)

async def test_before():
    assert not is_virtual()

@pytest.mark.virtual_time(start=5.0)
@pytest.mark.parametrize("seconds", [10.0, 3600.0])
async def test_marked(loop, seconds):
    assert loop is asyncio.get_running_loop() and is_virtual()
    await asyncio.sleep(seconds)
    assert loop.time() == 5.0 + seconds

async def test_after(loop_is_real=True):
    assert not is_virtual()
"""
    )
    run(pytester).assert_outcomes(passed=4)


def test_a_file_and_a_class_can_be_marked_and_a_test_can_step_out(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        HEADER
        + """
pytestmark = pytest.mark.virtual_time

async def test_file():
    assert is_virtual()

def test_not_async():
    pass

@pytest.mark.real_time
async def test_real():
    assert not is_virtual()

@pytest.mark.real_time
class TestReal:
    async def test_real(self):
        assert not is_virtual()

    @pytest.mark.virtual_time
    async def test_virtual(self):
        assert is_virtual()
"""
    )
    run(pytester).assert_outcomes(passed=5)


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["", "xdist"])
def test_on_a_test_that_is_not_async_the_marker_is_an_error(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(
        HEADER + "@pytest.mark.virtual_time\ndef test_x(): pass\n" + "async def test_good(): pass\n"
    )
    result = run(pytester, *workers)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*::test_x is marked virtual_time, but is not async: *"])


@pytest.mark.parametrize(
    "test",
    [
        "@pytest.mark.anyio\nasync def test_x(): pass\n",
        "async def test_x(anyio_backend): pass\n",
        "@pytest.mark.anyio\n@given(integers())\nasync def test_x(n): pass\n",
        "class TestX(IsolatedAsyncioTestCase):\n    async def test_x(self): pass\n",
        "async def test_x(): pass\n",
    ],
    ids=["anyio", "anyio fixture", "anyio with hypothesis", "unittest", "nobody"],
)
def test_on_a_test_that_others_run_the_marker_is_an_error(
    pytester: pytest.Pytester, test: str
) -> None:
    """They would run it in real time, and nobody would notice."""
    pytester.makepyfile(
        "from unittest import IsolatedAsyncioTestCase\n"
        "from hypothesis import given\n"
        "from hypothesis.strategies import integers\n"
        + HEADER
        + "pytestmark = pytest.mark.virtual_time\n\n"
        + "@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n\n"
        + test
    )
    result = run(pytester, "-o", "asyncio_mode=strict")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_x* is marked virtual_time, but pytest-asyncio does not *"]
    )


def test_the_name_of_a_test_does_not_change(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HEADER + "@pytest.mark.virtual_time\nasync def test_name(): pass\n")
    run(pytester, "-v").stdout.fnmatch_lines(["*::test_name PASSED*"])


def test_a_deadlock_fails_the_test_and_not_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEADER
        + """
pytestmark = pytest.mark.virtual_time

async def test_deadlock():
    await asyncio.Event().wait()

@pytest.mark.virtual_time(limit=10.0)
async def test_limit():
    while True:
        await asyncio.sleep(1.0)

async def test_default_limit():
    while True:
        await asyncio.sleep(600.0)

async def test_next():
    pass
"""
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*DeadlockError: nothing can ever happen*",
            "*test_deadlock (*",
            "*the time limit of 10.0 s*",
            "*the time limit of 86400.0 s*",
        ]
    )


def test_one_line_in_a_conftest_opts_a_directory_in(pytester: pytest.Pytester) -> None:
    line = "from asyncproducer.testing.plugin import {}_loops as pytest_asyncio_loop_factories\n"
    pytester.makepyfile(
        **{
            "top/conftest": line.format("virtual_time"),
            "top/test_virtual": HEADER
            + "async def test_virtual():\n    assert is_virtual()\n\n"
            + "@pytest.mark.real_time\n"
            + "async def test_real():\n    assert not is_virtual()\n",
            "top/kafka/conftest": line.format("real_time"),
            "top/kafka/test_real": HEADER
            + "async def test_real():\n    assert not is_virtual()\n\n"
            + "@pytest.mark.virtual_time\n"
            + "async def test_virtual():\n    assert is_virtual()\n",
            "other/test_other": HEADER + "async def test_real():\n    assert not is_virtual()\n",
        }
    )
    run(pytester).assert_outcomes(passed=5)


def test_the_loops_of_others_stay_for_tests_without_our_marker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
import asyncio

class OtherLoop(asyncio.SelectorEventLoop):
    pass

def pytest_asyncio_loop_factories(config, item):
    return {"other": OtherLoop}
"""
    )
    pytester.makepyfile(
        HEADER
        + """
@pytest.mark.virtual_time
async def test_virtual():
    assert is_virtual()

async def test_other():
    assert type(asyncio.get_running_loop()).__name__ == "OtherLoop"
"""
    )
    run(pytester).assert_outcomes(passed=2)


def test_without_a_marker_the_plugin_answers_for_nobody(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEADER
        + """
async def test_plain(request):
    assert not is_virtual()
    hook = request.config.hook.pytest_asyncio_loop_factories
    assert not hook.get_hookimpls()
"""
    )
    run(pytester).assert_outcomes(passed=1)


def test_a_marker_without_pytest_asyncio_is_an_error_that_says_what_to_do(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.virtual_time\nasync def test_x(): pass\n")
    result = pytester.runpytest_inprocess(
        "-p", "no:asyncio", "-p", "no:cacheprovider", *plugin_option()
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*install or upgrade pytest-asyncio*"])
