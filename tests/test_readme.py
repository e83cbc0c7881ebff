"""Every Python block of README.md is run, each as its readers would: only the address differs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import confluent_kafka
import httpx
import pytest

import asyncproducer
from asyncproducer import ConfigError, Producer, Record
from asyncproducer.config import OPTIONS
from asyncproducer.testing import EmbeddedCluster
from asyncproducer.testing.java import spark_java_home

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

PATIENCE = 90.0


def blocks() -> dict[str, str]:
    """Heading -> the Python block below it."""
    found: dict[str, str] = {}
    for section in re.split(r"^#+ ", README, flags=re.MULTILINE)[1:]:
        for code in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            heading = section.splitlines()[0]
            assert heading not in found, "one block for each heading, please"
            found[heading] = code
    return found


#: Scripts: heading -> what they print.
SCRIPTS = {
    "asyncproducer": [r"in the log: partition \d, offset 0"],
    "Without Kafka at hand": [
        r"in the log: partition \d, offset 0",
        "read back: b'one tea'",
    ],
    "Sending in bulk": ["10000 acknowledged"],
    "Sending tables": [
        "2 of 3 rows are in the log",
        "orders-0: 2 from offset 0 to 1",
        "row 2: MetadataTimeout: partition 99 of 'orders' did not appear .*",
    ],
    "Transactions": ["committed", "aborted: sold out"],
    "When something fails": [
        "in the log",
        "refused, nothing was sent: .*max_request_size=1048576.*",
    ],
}
APPLICATION = "In FastAPI"
APPLICATION_TESTS = "Its tests"
TESTS = "Testing your code"
SPARK = "From Apache Spark"
PARTITIONER = "Coming from confluent-kafka"
#: They bring a cluster of their own.
WITHOUT_ADDRESS = {"Without Kafka at hand"}


def test_every_block_is_run_here() -> None:
    assert README.count("```python") == len(blocks())
    assert set(blocks()) == {*SCRIPTS, APPLICATION, APPLICATION_TESTS, TESTS, SPARK, PARTITIONER}


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(
        topics={"orders": 3, "clicks": 3}, auto_create_topics=False
    ) as cluster:
        yield cluster


async def python(*arguments: str, cwd: Path | None = None) -> tuple[str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        # The package that these tests test, also where it is not installed.
        env={
            **os.environ,
            "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
            # Debug mode reports on stderr whatever takes a tenth of a second.
            "PYTHONASYNCIODEBUG": "",
        },
        stdout=PIPE,
        stderr=PIPE,
        cwd=cwd,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.communicate()
        raise
    return out.decode(), err.decode()


def block(heading: str, cluster: EmbeddedCluster) -> str:
    code = blocks()[heading]
    assert code.count('"localhost:9092"') == (heading not in WITHOUT_ADDRESS)
    return code.replace("localhost:9092", cluster.bootstrap_servers)


@pytest.mark.parametrize("heading", SCRIPTS)
async def test_script(heading: str, cluster: EmbeddedCluster) -> None:
    out, err = await python("-Werror", "-c", block(heading, cluster))
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == len(SCRIPTS[heading])
    for line, pattern in zip(lines, SCRIPTS[heading], strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.spark
async def test_the_example_for_spark(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no Java, one comes with the extra `kafka`.
    monkeypatch.setenv("JAVA_HOME", spark_java_home(os.environ))
    out, err = await python("-c", block(SPARK, cluster))
    assert out == "all rows are acknowledged\n", err
    records = {(record.key, record.value) for record in cluster.records("orders")}
    assert records == {(b"alice", b"one tea"), (b"bob", b"two")}


async def test_the_first_example_runs_against_the_broker_command() -> None:
    section = README.split("## Without Kafka at hand")[1].split("\n## ")[0]
    assert "`asyncproducer broker` in another terminal serves localhost:9092" in section
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncproducer", "broker", "--port", "0"),
        env={**os.environ, "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1])},
        stdout=PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            address = (await process.stdout.readline()).decode().split()[-1]
        code = blocks()["asyncproducer"].replace("localhost:9092", address)
        out, _ = await python("-c", code)
    finally:
        process.terminate()
        await process.communicate()
    assert out == "in the log: partition 0, offset 0\n"


async def test_the_application(cluster: EmbeddedCluster) -> None:
    names: dict[str, Any] = {}
    exec(compile(block(APPLICATION, cluster), "README.md", "exec"), names)
    app = names["app"]
    async with app.router.lifespan_context(app) as state:

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/orders", json={"customer": "alice", "item": "tea"})
            assert (response.status_code, response.json()["offset"]) == (201, 0)
            assert (await client.get("/readyz")).json()["ready"] is True
    (record,) = cluster.records("orders")
    assert (record.key, record.value) == (b"alice", b'{"customer":"alice","item":"tea"}')


@pytest.mark.parametrize(
    "files",
    [
        {"test_block.py": TESTS},
        # Nothing listens at the address in it: without the lifespan nobody looks.
        {"test_block.py": APPLICATION_TESTS, "app.py": APPLICATION},
    ],
    ids=["service", "application"],
)
async def test_the_tests(tmp_path: Path, files: dict[str, str]) -> None:
    for name, heading in files.items():
        (tmp_path / name).write_text(blocks()[heading], encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    plugin = "asyncproducer.testing.plugin"
    installed = any(point.value == plugin for point in entry_points(group="pytest11"))
    options = ["-p", "no:cacheprovider", *([] if installed else ["-p", plugin])]
    out, _ = await python("-m", "pytest", *options, cwd=tmp_path)
    assert "1 passed" in out, out


async def test_the_partitioner_puts_keys_where_confluent_kafka_does() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks()[PARTITIONER], "README.md", "exec"), names)
    keys = [b"key %d" % number for number in range(50)]

    def send_theirs(servers: str) -> int:
        producer = confluent_kafka.Producer({"bootstrap.servers": servers})
        for key in keys:
            producer.produce("theirs", b"value", key=key)
        left: int = producer.flush(PATIENCE)
        return left

    async with EmbeddedCluster(topics={"theirs": 7, "ours": 7}) as cluster:
        assert await asyncio.to_thread(send_theirs, cluster.bootstrap_servers) == 0
        async with Producer(
            cluster.bootstrap_servers, partitioner=names["consistent_random"]
        ) as producer:
            await producer.send_many("ours", [Record("", b"value", key) for key in keys])
            await producer.send("ours", b"without a key")
        for partition in range(7):
            theirs, ours = (
                {record.key for record in cluster.records(topic, partition) if record.key}
                for topic in ("theirs", "ours")
            )
            assert ours == theirs
    assert str(names["producer"].config.partitioner).startswith("<function consistent_random")


def test_confluent_kafkas_options_in_the_text_are_taken_and_what_is_said_of_defaults_is_so() -> (
    None
):
    assert Producer.from_config({"bootstrap.servers": "broker:9092"}).config.enable_idempotence
    with pytest.raises(ConfigError, match=r"call Producer\.metrics"):
        Producer.from_config({"bootstrap.servers": "broker:9092", "statistics.interval.ms": 5})
    moved: Producer[Any, Any] = Producer.from_config(
        {"bootstrap.servers": "broker:9092", "partitioner": "murmur2_random"}
    )
    assert moved.config.partitioner in ("default", "murmur2")


# -- the text ----------------------------------------------------------------------------------


def test_the_table_of_errors_names_errors_that_are_there_with_their_bases() -> None:
    section = README.split("## When something fails")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*)\|$", section, re.MULTILINE)
    assert len(rows) == 11
    for row in rows:
        names, _, also, _ = row.split("|")
        classes = [getattr(asyncproducer, name) for name in re.findall(r"`(\w+)`", names)]
        for builtin in re.findall(r"`(\w+)`", also):
            assert builtin in {base.__name__ for base in classes[0].__mro__}
        assert all(issubclass(kind, Exception) for kind in classes)


@pytest.mark.parametrize(
    "option",
    [
        *("acks", "buffer_memory", "delivery_timeout_ms", "linger_ms", "max_block_ms", "retries"),
        *("max_in_flight_requests_per_connection", "enable_idempotence"),
    ],
)
def test_the_defaults_that_the_text_names(option: str) -> None:
    said = {
        "acks": -1,  # "all"
        "buffer_memory": 32 << 20,
        "delivery_timeout_ms": 120_000,
        "linger_ms": 5,
        "max_block_ms": 60_000,
        "retries": 2**31 - 1,
        "max_in_flight_requests_per_connection": 5,
        "enable_idempotence": True,
    }
    assert OPTIONS[option].default == said[option]


def test_the_options_in_the_text_are_options() -> None:
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)*_(?:ms|memory|size|type|bytes))`", README))
    words -= {"buffered_bytes", "timestamp_ms"}  # of Health, of aiokafka
    assert words
    assert words <= set(OPTIONS)


async def test_the_metrics_and_the_health_in_the_text_are_there(cluster: EmbeddedCluster) -> None:
    async with asyncproducer.Producer(cluster.bootstrap_servers) as producer:
        await producer.send("orders", b"x")
        metrics = producer.metrics()
        line = next(line for line in README.split("\n- ") if line.startswith("**Metrics**"))
        names = re.findall(r"`([a-z_]+(?::topic=orders)?)`", line)
        assert len(names) == 4
        assert all(name in metrics for name in names)
        line = next(line for line in README.split("\n- ") if line.startswith("**Health**"))
        fields = set(re.findall(r"`([a-z_]+)`", line)) - {"warm_up"}
        assert len(fields) == 6
        assert fields <= set(producer.health._fields)
