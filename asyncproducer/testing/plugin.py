"""pytest plugin: async tests on virtual time.

It is registered as an entry point (`pytest11`), so the marker is there as soon as the
package is installed. It needs pytest-asyncio with the hook `pytest_asyncio_loop_factories`.

One test, one class or one file:

    @pytest.mark.virtual_time
    async def test_backoff():
        await asyncio.sleep(3600)           # takes no time

    pytestmark = pytest.mark.virtual_time                 # the whole file
    @pytest.mark.virtual_time(start=100.0, limit=600.0)   # arguments of VirtualTimeLoop

A whole directory: one line in its conftest.py, and the reverse for a directory in it:

    from asyncproducer.testing.plugin import virtual_time_loops as pytest_asyncio_loop_factories
    from asyncproducer.testing.plugin import real_time_loops as pytest_asyncio_loop_factories

There, `@pytest.mark.real_time` takes a single test out. The async fixtures of a test
run on its loop; with a loop scope wider than one function all its tests share a clock.

It is pytest-asyncio that runs a test on a loop of ours. The marker on a test that somebody
else runs (anyio's plugin, unittest), or on one that is not async, would do nothing: such a
test fails. On a class or a file it does not mind tests in there that are not async.

How it works: pytest-asyncio asks that hook which loops a test is to run on. Once any
plugin answers it, it must answer for every test. We therefore join in only when the
first marked test is collected, as a wrapper around whoever else answers, so a project
that does not use the markers is collected as if this plugin were not there.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator, Mapping

import pytest

from asyncproducer.testing.clock import VirtualTimeLoop

__all__ = ["LoopFactories", "real_time_loops", "virtual_time_loops"]

LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]

_HOOK = "pytest_asyncio_loop_factories"
_PLUGIN_NAME = "asyncproducer-virtual-time"

#: A test that needs more virtual time than a day has a periodic timer and waits for
#: something that will not come.
_LIMIT = 86400.0


def real_time_loops(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """The hook's answer for a directory of tests on asyncio's own loop."""
    return _marked(item) or {"asyncio": asyncio.new_event_loop}


def virtual_time_loops(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """The hook's answer for a directory of tests on the VirtualTimeLoop."""
    return _marked(item) or _virtual_time()


def _virtual_time(*, start: float = 0.0, limit: float = _LIMIT) -> LoopFactories:
    return {"virtual_time": functools.partial(VirtualTimeLoop, start=start, limit=limit)}


def _closest(item: pytest.Item) -> pytest.Mark | None:
    """The marker of ours that counts: a test's own, before its class's or file's."""
    marks = (mark for mark in item.iter_markers() if mark.name in ("virtual_time", "real_time"))
    return next(marks, None)


def _marked(item: pytest.Item) -> LoopFactories | None:
    """What the closest of our markers asks for."""
    mark = _closest(item)
    if mark is None:
        return None
    if mark.name == "real_time":
        return {"asyncio": asyncio.new_event_loop}
    return _virtual_time(**mark.kwargs)


class _MarkedLoops:
    """Answers for marked tests, and leaves the others to whoever answers for them."""

    @pytest.hookimpl(wrapper=True)
    def pytest_asyncio_loop_factories(
        self, config: pytest.Config, item: pytest.Item
    ) -> Generator[None, LoopFactories | None, LoopFactories]:
        others = yield
        return _marked(item) or others or {"asyncio": asyncio.new_event_loop}


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    config.addinivalue_line(
        "markers",
        "virtual_time(start=0.0, limit=86400.0): run this async test on a loop whose clock"
        " jumps to the next timer when nothing else can run",
    )
    config.addinivalue_line(
        "markers", "real_time: run this async test on asyncio's own loop, in a virtual_time place"
    )


# A wrapper, since it has to act before pytest-asyncio's own implementation of this hook,
# which is `tryfirst` and may be registered after this one.
@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Joins in with the first marked test."""
    manager = metafunc.config.pluginmanager
    if _marked(metafunc.definition) is not None and not manager.hasplugin(_PLUGIN_NAME):
        if not hasattr(manager.hook, _HOOK):
            raise pytest.UsageError(
                "the markers virtual_time and real_time need a pytest-asyncio with the hook"
                f" {_HOOK}: install or upgrade pytest-asyncio"
            )
        manager.register(_MarkedLoops(), _PLUGIN_NAME)
    yield


# When the test is to run: what is raised while tests are collected is lost in pytest-xdist.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses the marker where it would do nothing."""
    mark = _closest(item)
    if mark is not None and mark.name == "virtual_time" and not _on_a_loop_of_ours(item):
        _refuse_what_is_without_effect(item)


def _on_a_loop_of_ours(item: pytest.Item) -> bool:
    import pytest_asyncio  # is there: a marked test without it was an error before

    return pytest_asyncio.is_async_test(item)


def _refuse_what_is_without_effect(item: pytest.Item) -> None:
    function = getattr(item, "obj", None)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if inspect.iscoroutinefunction(function):
        pytest.fail(
            f"{item.nodeid} is marked virtual_time, but pytest-asyncio does not run it, so that it"
            " would run in real time: mark it asyncio (and not anyio), or set asyncio_mode=auto;"
            " or take it out with the marker real_time",
            pytrace=False,
        )
    if any(mark.name == "virtual_time" for mark in item.own_markers):
        pytest.fail(
            f"{item.nodeid} is marked virtual_time, but is not async: it has no event loop whose"
            " time could be virtual. Make it `async def`, or take the marker away",
            pytrace=False,
        )
