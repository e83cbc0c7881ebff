"""`asyncproducer verify` against real Kafka, in a process of its own, as its users run it.

Where something is to happen between its sending and its reading, it is in the test's process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from asyncproducer.cli import clusters, main
from asyncproducer.cli import verify as command
from asyncproducer.testing.kafka import KafkaCluster

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic


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


def test_what_is_deleted_before_it_is_read_cannot_be_judged(
    kafka: KafkaCluster,
    fresh_topic: FreshTopic,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = clusters.read

    async def after_deletion(*args: Any, **kwargs: Any) -> AsyncIterator[clusters.ReadRecord]:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(40)})
        await admin.close()
        async for record in read(*args, **kwargs):
            yield record

    monkeypatch.setattr(command, "read", after_deletion)
    topic = fresh_topic(configs={"cleanup.policy": "compact,delete"})
    arguments = ["--bootstrap-servers", kafka.bootstrap_servers, "--topic", topic]
    status = main(["verify", "--json", *arguments, "--records", "100"])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert status == 3, document
    assert (document["records"]["removed"], document["records"]["in_log"]) == (40, 60)
    assert document["clean"]
    assert document["log_starts"] == {"0": 40}
    assert document["cleanup_policy"] == "compact,delete"
    assert "is compacted" in captured.err
