"""Each example runs as its readers run it: a process of its own, on a broker over TCP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

import asyncproducer
from asyncproducer import Producer
from asyncproducer.testing import EmbeddedCluster

EXAMPLES = Path(__file__).parents[1] / "examples"

#: Far more than any of them takes, on a machine that is busy.
PATIENCE = 90.0

needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="there is no SIGTERM to handle on Windows"
)


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    topics = {"orders": 3, "results": 3, "invoices": 3}
    async with EmbeddedCluster(brokers=2, topics=topics, auto_create_topics=False) as cluster:
        yield cluster


@asynccontextmanager
async def example(name: str, servers: str, **environ: str) -> AsyncIterator[Process]:
    """A running example. It is killed at the end if it still runs."""
    environment = {
        **os.environ,
        "KAFKA_BOOTSTRAP_SERVERS": servers,
        "PYTHONIOENCODING": "utf-8",
        # The package that these tests test, also where it is not installed.
        "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1]),
        # Debug mode reports on stderr whatever takes a tenth of a second.
        "PYTHONASYNCIODEBUG": "",
        **environ,
    }
    # Shells start what runs in the background with SIGINT ignored, and processes inherit that.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-Werror",
            str(EXAMPLES / name),
            env=environment,
            stdout=PIPE,
            stderr=PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, interrupt)
    try:
        async with asyncio.timeout(PATIENCE):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(name: str, cluster: EmbeddedCluster) -> list[str]:
    """The lines of an example that ends by itself, and well."""
    async with example(name, cluster.bootstrap_servers) as process:
        out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode().splitlines()


async def line(process: Process, pattern: str, *, stderr: bool = False) -> re.Match[str]:
    """The next line of output that matches."""
    stream = process.stderr if stderr else process.stdout
    assert stream is not None
    seen = []
    while text := (await stream.readline()).decode():
        seen.append(text)
        if match := re.search(pattern, text):
            return match
    rest = b"" if process.stderr is None or stderr else await process.stderr.read()
    raise AssertionError(f"no {pattern!r} in {seen}; {rest.decode()}")


def values(cluster: EmbeddedCluster, topic: str) -> list[str]:
    return [(record.value or b"").decode() for record in cluster.records(topic)]


def test_every_example_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in source


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert f"examples/{path.name}\n" in text


async def test_script(cluster: EmbeddedCluster) -> None:
    assert await run("01_script.py", cluster) == [
        f"send: orders-{_partition(cluster, 'one tea')} at offset 0",
        "send: 1000 more, all at once",
        "enqueue: 100 records, all acknowledged",
        "send_many: 5000 acknowledged, 0 failed",
    ]
    found = values(cluster, "orders")
    assert len(found) == len(set(found)) == 6101


def _partition(cluster: EmbeddedCluster, value: str) -> int:
    return next(
        partition
        for partition in range(3)
        if value.encode() in [record.value for record in cluster.records("orders", partition)]
    )


@needs_signals
async def test_fastapi_app(cluster: EmbeddedCluster) -> None:
    order = {"customer": "alice", "item": "tea"}
    async with example("02_fastapi_app.py", cluster.bootstrap_servers, PORT="0") as process:
        url = (await line(process, r"running on (http://\S+)", stderr=True))[1]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            response = await client.get("/readyz")
            assert (response.status_code, response.json()["ready"]) == (200, True)

            response = await client.post("/orders", json=order)
            assert response.status_code == 201
            place = response.json()
            (record,) = cluster.records("orders", place["partition"])
            assert record.offset == place["offset"]
            assert json.loads(record.value or b"") == {**order, "quantity": 1}

            cluster.inject(api="produce", error="INVALID_RECORD")
            response = await client.post("/orders", json=order)
            assert (response.status_code, response.json()["safe_to_retry"]) == (503, True)

            cluster.inject(api="produce", error="UNKNOWN_SERVER_ERROR")
            response = await client.post("/orders", json=order)
            assert (response.status_code, response.json()["safe_to_retry"]) == (503, False)

            assert (await client.post("/orders", json={"customer": 1})).status_code == 422

            # A request that waits for its acknowledgement when the service is told to end.
            held = cluster.inject(api="produce", hold=True)
            last = asyncio.create_task(client.post("/orders", json=order))
            await held.reached()
            process.send_signal(signal.SIGTERM)
            await line(process, "Shutting down", stderr=True)
            held.release()
            assert (await last).status_code == 201
        await line(process, "Application shutdown complete", stderr=True)
        assert await process.wait() in (0, -signal.SIGTERM)
    assert len(cluster.records("orders")) == 2


@needs_signals
async def test_background_worker(cluster: EmbeddedCluster) -> None:
    produced = cluster.inject(api="produce", times=None)  # no fault: it only counts
    async with example("03_background_worker.py", cluster.bootstrap_servers) as process:
        await line(process, "^ready$")
        await produced.reached(5)
        process.send_signal(signal.SIGTERM)
        count = int((await line(process, r"^stopped: (\d+) acknowledged, 0 failed$"))[1])
        assert await process.wait() == 0
    jobs = sorted(int(value.removeprefix("result of job ")) for value in values(cluster, "results"))
    assert jobs == list(range(count))


async def test_consume_transform_produce(cluster: EmbeddedCluster) -> None:
    name = "04_consume_transform_produce.py"
    servers = cluster.bootstrap_servers
    numbers = itertools.count()

    async def new_orders(producer: Producer, count: int) -> str:
        """So many more, and what the example says when it has done them."""
        sent = [await producer.enqueue("orders", str(next(numbers)), key="k") for _ in range(count)]
        last = await sent[-1]
        return f"^orders-{last.partition}: done up to {last.offset + 1}$"

    async with Producer(servers) as producer:
        async with example(name, servers) as process:
            await line(process, "^ready$")
            await line(process, await new_orders(producer, 30))
        # It was killed. Another one goes on where it had been.
        async with example(name, servers) as process:
            await line(process, await new_orders(producer, 30))
            # A transaction that fails is done again.
            cluster.inject(api="produce", topic="invoices", error="INVALID_RECORD")
            done = await new_orders(producer, 1)
            await line(process, "^again: .*INVALID_RECORD")
            await line(process, done)
            # This one is killed between its results and the end of the transaction.
            refused = cluster.inject("end_txn", error="COORDINATOR_LOAD_IN_PROGRESS", times=None)
            await new_orders(producer, 1)
            await refused.reached()
        refused.remove()
        # The next one aborts that, and does it again.
        async with example(name, servers) as process:
            await line(process, await new_orders(producer, 30))
    expected = [b"invoice for %d" % n for n in range(92)]
    assert [r.value for r in cluster.records("invoices", committed=True)] == expected
    # What was aborted is in the log as well: only who does not look sees it.
    assert len(cluster.records("invoices")) == 93


async def test_consume_transform_produce_ends_where_another_one_begins(
    cluster: EmbeddedCluster,
) -> None:
    name = "04_consume_transform_produce.py"
    servers = cluster.bootstrap_servers
    async with Producer(servers) as producer, example(name, servers) as old:
        await line(old, "^ready$")
        async with example(name, servers) as young:
            await line(young, "^ready$")
            await producer.send("orders", "tea")
            _, err = await old.communicate()
            assert old.returncode == 1
            assert re.search(rb"ProducerFenced: .*another producer has taken over", err)
            await line(young, "done up to 1$")
    assert [r.value for r in cluster.records("invoices", committed=True)] == [b"invoice for tea"]


@needs_signals
async def test_consume_transform_produce_ends_with_ctrl_c(cluster: EmbeddedCluster) -> None:
    async with (
        Producer(cluster.bootstrap_servers) as producer,
        example("04_consume_transform_produce.py", cluster.bootstrap_servers) as process,
    ):
        await line(process, "^ready$")
        await producer.send("orders", "tea")
        await line(process, "done up to 1$")
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"stopped\n", b"")


async def test_serializers_and_headers(cluster: EmbeddedCluster) -> None:
    lines = await run("05_serializers_and_headers.py", cluster)
    assert lines[0] == "vip alice: partition 0"
    assert re.fullmatch("bob: partition [12]", lines[1])
    assert lines[-1] == "orders: 3 acknowledged"
    (record,) = cluster.records("orders", 0)
    assert record.key == b"vip alice"
    order = json.loads(record.value or b"")
    assert list(order) == ["id", "item", "at"]
    headers = dict(record.headers)
    assert headers["content-type"] == b"application/json"
    assert len(headers["record-id"] or b"") == 36


async def test_testing_your_service(tmp_path: Path) -> None:
    """In a directory with no settings of ours, as in a reader's own project."""
    path = tmp_path / "test_shop.py"
    path.write_bytes((EXAMPLES / "06_testing_your_service.py").read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugin = [] if _installed() else ["-p", "asyncproducer.testing.plugin"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, str(path)),
        env={**os.environ, "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1])},
        cwd=tmp_path,
        stdout=PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate()
    assert "4 passed" in out.decode(), out.decode()


async def test_testing_your_service_runs_in_the_checkout() -> None:
    """As its header says: with pytest and pytest-asyncio alone. Our own settings need more."""
    name = "examples/06_testing_your_service.py"
    plugin = [] if _installed() else ["-p", "asyncproducer.testing.plugin"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:timeout"),
        *(*plugin, name),
        env={**os.environ, "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1])},
        cwd=EXAMPLES.parent,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    assert "4 passed" in out.decode(), (out + err).decode()
    assert "warning" not in (out + err).decode().lower()


def _installed() -> bool:
    return any(e.value == "asyncproducer.testing.plugin" for e in entry_points(group="pytest11"))
