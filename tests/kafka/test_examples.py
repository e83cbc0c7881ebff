"""The examples and the demo on real Kafka; tests/test_examples.py has them on the embedded one."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncproducer
from asyncproducer import Producer
from asyncproducer.testing.kafka import KafkaCluster

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def python(kafka: KafkaCluster, *arguments: str) -> AsyncIterator[Process]:
    environment = {
        **os.environ,
        "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(Path(asyncproducer.__file__).parents[1]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def output(kafka: KafkaCluster, *arguments: str) -> str:
    async with python(kafka, *arguments) as process:
        out, err = await process.communicate()
        assert process.returncode == 0, (out.decode(), err.decode())
        return out.decode()


async def test_the_script_sends_in_every_way(kafka: KafkaCluster) -> None:
    out = await output(kafka, "examples/01_script.py")
    assert "send_many: 5000 acknowledged, 0 failed" in out


async def test_serializers_and_headers(kafka: KafkaCluster) -> None:
    out = await output(kafka, "examples/05_serializers_and_headers.py")
    assert "orders: 3 acknowledged" in out


async def test_consume_transform_produce_goes_on_where_it_was(kafka: KafkaCluster) -> None:
    async with Producer(kafka.bootstrap_servers) as producer:
        for _ in range(2):
            async with python(kafka, "examples/04_consume_transform_produce.py") as process:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n"
                sent = await producer.send("orders", "tea", key="k", partition=0)
                done = f"orders-0: done up to {sent.offset + 1}\n".encode()
                async for line in process.stdout:
                    if line == done:
                        break
                else:
                    raise AssertionError(f"it ended before {done!r}")


async def test_the_demo_finds_every_flight_once_and_in_order(kafka: KafkaCluster) -> None:
    servers = kafka.bootstrap_servers
    out = await output(
        kafka, "-m", "asyncproducer", "demo", "--bootstrap-servers", servers, "--records", "20000"
    )
    assert "✓ read back: all 20,000 records" in out
