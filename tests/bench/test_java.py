from __future__ import annotations

from pathlib import Path

import pytest

from asyncproducer.bench.peers import Job
from asyncproducer.bench.peers.java import command, seconds
from asyncproducer.bench.workloads import Case

#: What 4.3.1 printed for 2,200 records.
OUTPUT = """\
WARNING: some warning
1100 records sent, 219.9 records/sec (0.02 MB/sec), 9.5 ms avg latency, 90.0 ms max latency.
2200 records sent, 4592.901879 records/sec (0.44 MB/sec), 70.11 ms avg latency, 230.00 ms max \
latency, 72 ms 50th, 97 ms 95th, 99 ms 99th, 230 ms 99.9th.
"""


def test_the_last_summary_counts_and_reports_on_the_way_do_not() -> None:
    assert seconds(OUTPUT, 2200) == pytest.approx(0.479)


def test_a_summary_of_another_number_of_records_is_none() -> None:
    with pytest.raises(ValueError, match=r"(?s)no summary of 1100 records:.*2200 records sent"):
        seconds(OUTPUT, 1100)


def test_output_without_a_summary_is_shown() -> None:
    with pytest.raises(ValueError, match=r"(?s)no summary of 7 records:.*Connection refused"):
        seconds("Connection refused\n", 7)


def test_java_ends_transactions_by_time() -> None:
    case = Case(name="x", records=100, transaction_ms=100.0)
    arguments = command(Job("java", "host:1", ("topic",), case), Path("values"), 110)
    place = arguments.index("--transactional-id")
    assert arguments[place : place + 4] == [
        *("--transactional-id", "topic", "--transaction-duration-ms", "100")
    ]


def test_java_gets_the_settings_of_all_others() -> None:
    case = Case(name="x", records=100, codec="lz4", level=9, idempotent=False, batch_bytes=1000)
    job = Job("java", "host:1", ("topic",), case)
    arguments = command(job, Path("values"), 110)
    assert arguments[: arguments.index("--command-property")] == [
        *("--bootstrap-server", "host:1", "--topic", "topic", "--num-records", "110"),
        *("--throughput", "-1", "--payload-file", "values"),
    ]
    assert set(arguments[arguments.index("--command-property") + 1 :]) == {
        "acks=all",
        "linger.ms=5",
        "enable.idempotence=false",
        "compression.type=lz4",
        "compression.lz4.level=9",
        "batch.size=1000",
    }
