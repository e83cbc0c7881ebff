"""Java's producer, driven by Kafka's own load generator (kafka-producer-perf-test)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from asyncproducer.bench.peers import Job, Result
from asyncproducer.bench.workloads import payloads
from asyncproducer.testing.java import find_java
from asyncproducer.testing.kafka import DEFAULT_VERSION
from asyncproducer.testing.kafka_nodes import kafka_jars

__all__ = ["Run", "command", "measure", "seconds"]

_TOOLS = f"org.apache.kafka:kafka-tools:{DEFAULT_VERSION}"
_MAIN = "org.apache.kafka.tools.ProducerPerformance"

_SUMMARY = re.compile(
    r"^(?P<records>\d+) records sent, (?P<rate>[\d.]+) records/sec.* ms max latency, \d+ ms 50th",
    re.MULTILINE,
)

#: Its compiler needs much more than the others' tenth until it has seen the hot code often enough:
#: so many times the case's records go first, and as many count.
_TIMES = 2


class Run(NamedTuple):
    """One JVM from its start to its end."""

    output: str
    cpu_s: float
    max_rss_mib: float


def seconds(output: str, records: int) -> float:
    """How long so many records took. ValueError, with what was printed, if it does not say so."""
    found = _SUMMARY.search(output)
    if found is None or int(found["records"]) != records:
        raise ValueError(f"ProducerPerformance printed no summary of {records} records:\n{output}")
    return records / float(found["rate"])


def command(job: Job, payload_file: Path, records: int) -> list[str]:
    """The arguments of ProducerPerformance."""
    case = job.case
    properties = {
        "acks": "all",
        "linger.ms": case.linger_ms,
        "enable.idempotence": str(case.idempotent).lower(),
        "compression.type": case.codec,
    }
    if case.level is not None:
        properties[f"compression.{case.codec}.level"] = case.level
    if case.batch_bytes:
        properties["batch.size"] = case.batch_bytes
    transactions: list[str] = []
    if case.transaction_ms:
        transactions += ["--transactional-id", job.topics[0]]
        transactions += ["--transaction-duration-ms", f"{case.transaction_ms:.0f}"]
    return [
        *("--bootstrap-server", job.servers),
        *("--topic", job.topics[0]),
        *("--num-records", str(records)),
        *("--throughput", "-1"),
        *("--payload-file", str(payload_file)),
        *transactions,
        *("--command-property", *(f"{name}={value}" for name, value in properties.items())),
    ]


def measure(job: Job) -> Result:
    """See worker.py. Time and CPU are those of a whole run less those of one that only warms up:
    the start of the JVM is no part of them. (Its own figure "after the warm-up" counts the time of
    what the warm-up has left in the buffer, but not its records.)"""
    records = warm_up = _TIMES * job.case.records
    java = find_java(os.environ)
    jars = os.pathsep.join(map(str, kafka_jars(DEFAULT_VERSION, _TOOLS)))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "payloads")
        file.write_bytes(b"\n".join(payloads(job.case)))
        # As kafka-producer-perf-test.sh starts it. Numbers are to have a point in any country.
        start = [java.executable, "-Xmx512m", "-Duser.language=en", "-cp", jars, _MAIN]
        start[1:1] = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        short = _run([*start, *command(job, file, warm_up)])
        long = _run([*start, *command(job, file, warm_up + records)])
    took = seconds(long.output, warm_up + records) - seconds(short.output, warm_up)
    cpu_s = long.cpu_s - short.cpu_s
    # Of too few records nothing can be told: two starts differ by more than they take.
    if min(took, cpu_s) <= 0:
        raise NotImplementedError(f"Java's start takes longer than {records} records")
    return {
        "version": f"{DEFAULT_VERSION} (Java {java.version})",
        "sent": warm_up + warm_up + records,
        "records": records,
        "seconds": took,
        "records_per_s": records / took,
        "cpu_us_per_record": cpu_s / records * 1e6,
        "max_rss_mib": long.max_rss_mib,
    }


def _run(arguments: list[str]) -> Run:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"ProducerPerformance ended with {process.returncode}:\n{text}")
    return Run(text, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
