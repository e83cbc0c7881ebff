"""Java's producer, driven by Kafka's own load generator (kafka-producer-perf-test)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from asyncproducer.bench.peers import Job, Result
from asyncproducer.bench.workloads import LINGER_MS, payloads
from asyncproducer.testing.java import find_java
from asyncproducer.testing.kafka import DEFAULT_VERSION
from asyncproducer.testing.kafka_nodes import kafka_jars

__all__ = ["Run", "Summary", "command", "measure", "parse"]

_TOOLS = f"org.apache.kafka:kafka-tools:{DEFAULT_VERSION}"
_MAIN = "org.apache.kafka.tools.ProducerPerformance"

_SUMMARY = re.compile(
    r"^(?P<records>\d+) (?:steady state )?records sent, (?P<rate>[\d.]+) records/sec"
    r".* ms max latency, \d+ ms 50th",
    re.MULTILINE,
)


class Summary(NamedTuple):
    """What ProducerPerformance prints last: of all records, or of those after the warm-up."""

    records: int
    records_per_s: float


class Run(NamedTuple):
    """One JVM from its start to its end."""

    output: str
    cpu_s: float
    max_rss_mib: float


def parse(output: str) -> Summary:
    """The last summary. Raises ValueError, with what was printed, if there is none."""
    found = list(_SUMMARY.finditer(output))
    if not found:
        raise ValueError(f"ProducerPerformance printed no summary:\n{output}")
    return Summary(int(found[-1]["records"]), float(found[-1]["rate"]))


def command(job: Job, payload_file: Path, records: int, warm_up: int) -> list[str]:
    """The arguments of ProducerPerformance."""
    case = job.case
    properties = {
        "acks": "all",
        "linger.ms": LINGER_MS,
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
        *("--num-records", str(warm_up + records)),
        *("--warmup-records", str(warm_up)),
        *("--throughput", "-1"),
        *("--payload-file", str(payload_file)),
        *transactions,
        *("--command-property", *(f"{name}={value}" for name, value in properties.items())),
    ]


def measure(job: Job) -> Result:
    """See worker.py. The CPU is that of a whole run less that of one that only warms up:
    the start of the JVM is no part of it."""
    # Its compiler needs more than the others' tenth until it has seen the hot code often enough.
    records, warm_up = job.case.records, max(1, job.case.records // 2)
    java = find_java(os.environ)
    jars = os.pathsep.join(map(str, kafka_jars(DEFAULT_VERSION, _TOOLS)))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "payloads")
        file.write_bytes(b"\n".join(payloads(job.case)))
        # As kafka-producer-perf-test.sh starts it. Numbers are to have a point in any country.
        start = [java.executable, "-Xmx512m", "-Duser.language=en", "-cp", jars, _MAIN]
        start[1:1] = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        short = _run([*start, *command(job, file, warm_up, 0)])
        long = _run([*start, *command(job, file, records, warm_up)])
    summary = parse(long.output)
    if summary.records != records:
        raise ValueError(f"a summary of {summary.records} records, not {records}:\n{long.output}")
    cpu_s = long.cpu_s - short.cpu_s
    return {
        "version": f"{DEFAULT_VERSION} (Java {java.version})",
        "sent": warm_up + warm_up + records,
        "records": records,
        "seconds": records / summary.records_per_s,
        "records_per_s": summary.records_per_s,
        # Of too few records nothing can be told: two starts differ by more than they take.
        **({"cpu_us_per_record": cpu_s / records * 1e6} if cpu_s > 0 else {}),
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
