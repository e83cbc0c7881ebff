"""`python -m produce`: peers side by side, in one run, on one real Kafka.

Each measurement is a fresh process on a fresh topic of 6 partitions; the order of the
peers rotates with the rounds; what counts is in the log (end offsets). Medians over the
rounds, and their ratios: machines differ, and are noisy, ratios of one run less so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from asyncproducer.testing.kafka import KafkaCluster
from produce.peers import PEERS, environment

NUMBERS = {
    "records_per_s": "enqueue loop, records/s",
    "cpu_us_per_record": "client CPU, us/record",
    "concurrent_per_s": "new tasks, one send each, records/s",
    "sustained_per_s": "tasks that send in a loop, records/s",
    "lone_p50_ms": "lone send p50, ms",
    "lone_p99_ms": "lone send p99, ms",
    "max_rss_mib": "max RSS, MiB",
}


def run(
    cluster: KafkaCluster, peer: str, number: int, options: argparse.Namespace
) -> dict[str, Any]:
    topic = f"bench-{number}-{peer}"
    cluster.create_topic(topic, partitions=options.partitions)
    arguments = [peer, cluster.bootstrap_servers, topic, str(options.records), str(options.tasks)]
    done = subprocess.run(
        [sys.executable, "-m", "produce.worker", *arguments],
        env=environment(peer),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{peer} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    stored = sum(cluster.end_offsets(topic).values())
    if stored != result["sent"]:
        raise RuntimeError(f"{peer}: sent {result['sent']} records, {stored} are in the log")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m produce", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--tasks", type=int, default=8_000, help="concurrent sends")
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with KafkaCluster() as cluster:
        for number in range(options.rounds):
            turn = number % len(options.peers)
            for peer in options.peers[turn:] + options.peers[:turn]:
                result = run(cluster, peer, number, options)
                results.append(result)
                print(
                    f"round {number + 1} {peer:<22} {result['records_per_s']:>9,.0f} records/s, "
                    f"{result['cpu_us_per_record']:.2f} us; "
                    f"{options.tasks} tasks {result['concurrent_per_s']:>7,.0f}/s, "
                    f"in a loop {result['sustained_per_s']:>7,.0f}/s; "
                    f"lone {result['lone_p50_ms']:.2f} ms",
                    flush=True,
                )
    report(results, options)
    if options.json:
        facts = {"python": platform.python_version(), "machine": platform.platform()}
        options.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1))


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    medians = {
        peer: {n: median(r[n] for r in results if r["peer"] == peer) for n in NUMBERS}
        for peer in options.peers
    }
    base = medians.get("aiokafka")
    print(f"\n| median of {options.rounds} | " + " | ".join(options.peers) + " |")
    print("|---" * (len(options.peers) + 1) + "|")
    for name, title in NUMBERS.items():
        cells = []
        for peer in options.peers:
            cell = f"{medians[peer][name]:,.2f}"
            if base and peer != "aiokafka":
                cell += f" ({medians[peer][name] / base[name]:.2f}x)"
            cells.append(cell)
        print(f"| {title} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
