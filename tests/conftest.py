"""What holds for all tests: which code runs, and that no test leaves anything running behind it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

import asyncproducer
from asyncproducer import Producer, testing
from asyncproducer._implementation import IMPLEMENTATION

if TYPE_CHECKING:
    # Loaded by the fixtures that need it: most tests do without the embedded broker.
    from asyncproducer.testing import EmbeddedCluster, MemoryNetwork

# Examples take as long as they take: machines that build are slow and busy.
hypothesis.settings.register_profile("asyncproducer", deadline=None, print_blob=True)
hypothesis.settings.load_profile("asyncproducer")


def pytest_configure(config: pytest.Config) -> None:
    # An entry point where the package is installed; in a bare checkout nobody has told pytest.
    if not config.pluginmanager.has_plugin("asyncproducer"):
        config.pluginmanager.import_plugin("asyncproducer.testing.plugin")
    # Else a line in the log of whichever test is the first, and of each process that one starts.
    if IMPLEMENTATION == "python":
        os.environ.setdefault("ASYNCPRODUCER_IMPL", "python")


def pytest_report_header(config: pytest.Config) -> str:
    return f"asyncproducer: {IMPLEMENTATION}, from {Path(asyncproducer.__file__).parent}"


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_no_garbage() -> None:
    """Thousands of collected tests, and what those before have left in memory, would be looked at
    by each `gc.collect()`, which many tests and each simulated history call: that took more time
    than the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> None:
    """Autouse, so that it is set up first and judges last, after the test's own fixtures."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_guarded_loop")


@pytest.fixture
async def _guarded_loop() -> AsyncIterator[None]:
    """Fails a test that leaves a task, or an exception that only the loop has seen.

    A test that wants the loop's exception handler for itself sets its own.
    """
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    before = asyncio.all_tasks()
    yield
    # What the test has just cancelled or closed gets its last turns.
    for _ in range(3):
        await asyncio.sleep(0)
    leaked = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    for task in leaked:
        task.cancel()
    if leaked:
        pytest.fail("tasks left behind:\n" + "\n".join(map(repr, leaked)), pytrace=False)
    if unhandled:
        raise ExceptionGroup(
            "exceptions that only the loop has seen: " + ", ".join(c["message"] for c in unhandled),
            [c.get("exception") or RuntimeError(c["message"]) for c in unhandled],
        )


# -- the producer as a whole, on an embedded cluster in memory ---------------------------------


@pytest.fixture
def network() -> MemoryNetwork:
    """What `cluster` is on: a millisecond each way."""
    return testing.MemoryNetwork(latency=0.001)


@pytest.fixture
async def cluster(network: MemoryNetwork) -> AsyncIterator[EmbeddedCluster]:
    """Two brokers, which create no topics by themselves. `t` has one partition, `t4` has four."""
    async with testing.EmbeddedCluster(
        brokers=2, topics={"t": 1, "t4": 4}, network=network, auto_create_topics=False
    ) as cluster:
        yield cluster


@pytest.fixture
async def new_producer(cluster: EmbeddedCluster) -> AsyncIterator[Callable[..., Any]]:
    """Makes producers for `cluster`, which are closed at the end. Then nothing of them is left."""
    random.seed(0)  # backoff jitter and sticky partitions: each run is the same
    producers: list[Producer[Any, Any]] = []

    def new(**options: Any) -> Producer[Any, Any]:
        options.setdefault("connector", cluster.connector)
        if "config" not in options:
            options.setdefault("bootstrap_servers", cluster.bootstrap_servers)
        producer: Producer[Any, Any] = Producer(**options)
        producers.append(producer)
        return producer

    yield new
    for producer in producers:
        await producer.close(0)
        if producer._loop is not None:
            pool = producer._pool
            assert (pool.available, pool.held, pool.waiting) == (pool.total, 0, 0)
            assert not producer._accumulator.incomplete
