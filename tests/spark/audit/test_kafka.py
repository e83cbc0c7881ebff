"""A stamped load into real Kafka, transactions that are aborted included, read back by Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncproducer import Producer
from asyncproducer.spark.audit.command import main
from asyncproducer.spark.audit.ledger import Entry, StampedLedger, write_ledger
from asyncproducer.testing import KafkaCluster

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(600)]

RUN = 0xA0D17


async def load(producer: Producer[Any, Any], topic: str, ledger: StampedLedger, count: int) -> None:
    for _ in range(count):
        key, value = ledger.next_record()
        ledger.track(await producer.enqueue(topic, value, key=key), now=0.0)


async def written(kafka: KafkaCluster, directory: Path) -> int:
    """Two plain lanes and one of transactions, every third of them aborted: how many records."""
    entries, aborted = [], 0
    for lane in (0, 1):
        ledger = StampedLedger(RUN, lane, keys=100, size=120)
        async with Producer(kafka.bootstrap_servers) as producer:
            await load(producer, "plain", ledger, 5000)
        entries.append(ledger.entry("plain"))
    ledger = StampedLedger(RUN, 2, keys=100, size=60)
    async with Producer(kafka.bootstrap_servers, transactional_id="audit") as producer:
        for number in range(9):
            await producer.begin_transaction()
            first = len(ledger)
            await load(producer, "whole", ledger, 100)
            if number % 3 == 1:
                await producer.flush()  # into the log, where they are not to be read
                await producer.abort_transaction()
                ledger.abort(first)
                aborted += len(ledger) - first
            else:
                await producer.commit_transaction()
    entries.append(ledger.entry("whole"))
    write_ledger(directory / "ledger.parquet", entries)
    return aborted


Audit = Callable[[str], tuple[int, dict[str, Any]]]


@pytest.fixture
def audited(
    spark: Any, kafka: KafkaCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Audit:
    """Audits both topics, into a directory of that name: the status, and what it says."""

    def audited(output: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = main(
            [
                *("--bootstrap-servers", kafka.bootstrap_servers, "--json"),
                *("--target", "plain", "--target", "whole"),
                *("--ledger", str(tmp_path / "ledger.parquet"), "--output", str(tmp_path / output)),
            ]
        )
        return status, json.loads(capsys.readouterr().out)

    return audited


async def test_what_kafka_holds_is_what_the_producer_said(
    kafka: KafkaCluster, audited: Audit, tmp_path: Path
) -> None:
    for topic in ("plain", "whole"):
        kafka.create_topic(topic, partitions=3, configs={"message.timestamp.type": "LogAppendTime"})
    aborted = await written(kafka, tmp_path)
    status, told = audited("out")
    names = ("target", "records", "acked", "lost", "duplicates", "phantom", "aborted", "verdict")
    assert [tuple(row[name] for name in names) for row in told["targets"]] == [
        ("plain", 10_000, 10_000, 0, 0, 0, 0, "clean"),
        ("whole", 600, 600, 0, 0, 0, aborted, "clean"),
    ]
    assert status == 0
    assert aborted == 300
    # The same audit must see what goes wrong: a record written twice, and one that never came.
    ledger = StampedLedger(RUN, 3, size=60)
    async with Producer(kafka.bootstrap_servers) as producer:
        key, value = ledger.next_record()
        for _ in range(2):
            await producer.send("plain", value, key=key)
    (tmp_path / "ledger.parquet").rename(tmp_path / "first.parquet")
    directory = tmp_path / "ledger.parquet"
    directory.mkdir()
    (tmp_path / "first.parquet").rename(directory / "first.parquet")
    write_ledger(directory / "more.parquet", [Entry(RUN, 3, "plain", 0, 1)])
    status, told = audited("again")
    assert status == 1
    plain, whole = told["targets"]
    assert (plain["lost"], plain["duplicates"], whole["verdict"]) == (1, 1, "clean")
