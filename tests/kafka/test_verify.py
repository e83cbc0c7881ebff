"""`asyncproducer verify` against real Kafka, in a process of its own, as its users run it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Any

from asyncproducer.testing.kafka import KafkaCluster


async def verify(kafka: KafkaCluster, *arguments: str) -> tuple[int | None, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncproducer", "verify", "--json"),
        *("--bootstrap-servers", kafka.bootstrap_servers, *arguments),
        stdout=PIPE,
    )
    out, _ = await process.communicate()
    document: dict[str, Any] = json.loads(out)
    return process.returncode, document


async def test_a_real_cluster_is_verified(kafka: KafkaCluster) -> None:
    status, document = await verify(kafka, "--records", "20000")
    assert status == 0
    assert document["records"]["acknowledged"] == document["records"]["in_log"] == 20_000
    assert kafka.topic(document["topic"]) == {}


async def test_a_real_cluster_is_verified_through_faults(kafka: KafkaCluster) -> None:
    status, document = await verify(
        kafka,
        *("--records", "20000", "--rate", "5000", "--faults", "mixed"),
        *("--option", "request.timeout.ms=1500"),
    )
    assert document["clean"], document
    assert status == 0
    assert document["retries"] > 0
    assert sum(document["faults"]["injected"].values()) > 5
