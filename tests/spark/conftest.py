"""A broker in a thread of its own, for code that blocks; and Spark, for the tests that need it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from asyncproducer.spark import delivery, worker
from asyncproducer.spark.connector import connector_jars
from asyncproducer.testing import EmbeddedCluster, KafkaCluster, KafkaUnavailable
from asyncproducer.testing.java import spark_java_home

T = TypeVar("T")

#: A session for small tables and a few minutes: what pays for itself later costs here.
_SPARK = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

# They import pyspark, or what does.
collect_ignore: list[str] = []
if importlib.util.find_spec("pyspark") is None:
    collect_ignore += ["audit/test_command.py", "audit/test_tables.py"]


class Broker:
    """An embedded cluster, reached by TCP: `out` has four partitions, `in` has two."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.cluster = EmbeddedCluster(topics={"out": 4, "in": 2})
        asyncio.run_coroutine_threadsafe(self.cluster.start(), self._loop).result()

    def do(self, action: Callable[[EmbeddedCluster], T]) -> T:
        """On the cluster's own thread."""

        async def act() -> T:
            return action(self.cluster)

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    @property
    def servers(self) -> str:
        return self.cluster.bootstrap_servers

    def values(
        self, topic: str = "out", partition: int | None = None, *, committed: bool = True
    ) -> list[Any]:
        """Of one or of all partitions, sorted."""
        records = self.do(lambda cluster: cluster.records(topic, partition, committed=committed))
        return sorted(record.value for record in records)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.cluster.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    # Another test may have had this port, with the same sink.id and query: what it has told of
    # them is not known here.
    delivery._told.clear()
    broker = Broker()
    yield broker
    here = worker.worker()
    here.run(here.close())
    broker.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one session of all tests, with two threads."""
    from pyspark.sql import SparkSession

    # Where there is no Java, one comes with the extra `kafka`.
    os.environ["JAVA_HOME"] = spark_java_home(os.environ)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config(map=_SPARK)
        .config("spark.jars", ",".join(map(str, connector_jars())))
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def submit_args() -> str:
    """PYSPARK_SUBMIT_ARGS of a process that starts a session of its own."""
    options = [f"--conf={name}={value}" for name, value in _SPARK.items()]
    return shlex.join([*options, "pyspark-shell"])


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaCluster]:
    """One node of real Kafka."""
    cluster = KafkaCluster()
    try:
        yield cluster.start()
    except KafkaUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        cluster.stop()
