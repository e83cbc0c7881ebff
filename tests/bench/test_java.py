from __future__ import annotations

from pathlib import Path

import pytest

from asyncproducer.bench.peers import Job
from asyncproducer.bench.peers.java import command, parse
from asyncproducer.bench.workloads import Case

#: What 4.3.1 printed for 2,000 records after 200 of a warm-up.
OUTPUT = """\
WARNING: some warning
1100 records sent, 219.9 records/sec (0.02 MB/sec), 9.5 ms avg latency, 90.0 ms max latency.
2200 records sent, 4592.901879 records/sec (0.44 MB/sec), 70.11 ms avg latency, 230.00 ms max \
latency, 72 ms 50th, 97 ms 95th, 99 ms 99th, 230 ms 99.9th.
2000 steady state records sent, 17094.017094 records/sec (1.63 MB/sec), 60.50 ms avg latency, \
98.00 ms max latency, 66 ms 50th, 93 ms 95th, 97 ms 99th, 98 ms 99.9th.
"""


def test_the_last_summary_counts_and_reports_on_the_way_do_not() -> None:
    assert parse(OUTPUT) == (2000, 17094.017094)


def test_a_run_without_warm_up_has_one_summary() -> None:
    assert parse("\n".join(OUTPUT.splitlines()[:3])) == (2200, 4592.901879)


def test_output_without_a_summary_is_shown() -> None:
    with pytest.raises(ValueError, match=r"(?s)no summary:.*Connection refused"):
        parse("Connection refused\n")


def test_java_ends_transactions_by_time() -> None:
    case = Case(name="x", records=100, transaction_ms=100.0)
    arguments = command(Job("java", "host:1", ("topic",), case), Path("values"), 100, 10)
    place = arguments.index("--transactional-id")
    assert arguments[place : place + 4] == [
        *("--transactional-id", "topic", "--transaction-duration-ms", "100")
    ]


def test_java_gets_the_settings_of_all_others() -> None:
    case = Case(name="x", records=100, codec="lz4", level=9, idempotent=False, batch_bytes=1000)
    job = Job("java", "host:1", ("topic",), case)
    arguments = command(job, Path("values"), 100, 10)
    assert arguments[: arguments.index("--command-property")] == [
        *("--bootstrap-server", "host:1", "--topic", "topic", "--num-records", "110"),
        *("--warmup-records", "10", "--throughput", "-1", "--payload-file", "values"),
    ]
    assert set(arguments[arguments.index("--command-property") + 1 :]) == {
        "acks=all",
        "linger.ms=5",
        "enable.idempotence=false",
        "compression.type=lz4",
        "compression.lz4.level=9",
        "batch.size=1000",
    }
