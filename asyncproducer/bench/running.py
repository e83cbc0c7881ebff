"""All measurements of a run: a fresh process and fresh topics for each, in rotating order.

A round has all cases of its workload, and in each of them every peer has its turn. So the peers
of a round see the same machine and the same brokers, and no peer is always the first. What counts
is in the log: the end offsets must be what the worker says that it sent; in transactions, the
records that are committed.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncproducer
from asyncproducer.bench.committed import count_committed
from asyncproducer.bench.memory import memory_at_hand
from asyncproducer.bench.peers import PEERS, Job, Result, environment
from asyncproducer.bench.proxy import delayed
from asyncproducer.bench.worker import CANNOT, as_text
from asyncproducer.bench.workloads import (
    BASE_RECORDS,
    Case,
    Workload,
    headline,
    payloads,
    scaled,
)
from asyncproducer.testing.kafka import KafkaCluster

__all__ = [
    "Measurement",
    "Plan",
    "brokers_cpu_s",
    "facts",
    "in_order",
    "measurements",
    "missing",
    "rotated",
    "run",
    "run_group",
]

#: The longest that a measurement may take, its process's start included.
_TIMEOUT_S = 600.0
_OURS = "asyncproducer"
_OURS_PLAIN = "asyncproducer-python"
_REPLAY = "wire-replay"

#: Brokers compile what they run often: after so many records they are as fast as they get.
_WARM_UP = Case(name="warm-up", records=BASE_RECORDS)
_WARM_UPS = 6


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how often."""

    workloads: tuple[Workload, ...]
    #: None: those of each workload.
    peers: tuple[str, ...] | None = None
    rounds: int = 5
    #: In the place of BASE_RECORDS.
    records: int = BASE_RECORDS
    #: Bytes of a value, in the place of each case's own.
    size: int | None = None
    quick: bool = False
    #: A cluster that runs; None: real Kafka is started for the run.
    bootstrap_servers: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One process that is to be run."""

    workload: Workload
    case: Case
    peer: str
    round: int


def rotated(peers: Sequence[str], number: int) -> list[str]:
    """The peers in the order of round `number`, from 0 on."""
    turn = number % len(peers) if peers else 0
    return [*peers[turn:], *peers[:turn]]


def in_order(peers: Sequence[str], number: int) -> list[str]:
    """The same, but the wire replay is next after ours: its batches are like those that ours had in
    the same round, and minutes later the machine may not be as fast as it was."""
    found = rotated([peer for peer in peers if peer != _REPLAY], number)
    if _REPLAY in peers:
        found.insert(found.index(_OURS) + 1 if _OURS in found else len(found), _REPLAY)
    return found


def measurements(plan: Plan) -> list[Measurement]:
    """All of them, in their order. A peer that cannot do a case has none of it.

    A round has all cases of its workload: what one costs beside another is told by rounds too, and
    a machine that is slow for some minutes must not be slow for one of them only.
    """
    found: list[Measurement] = []
    for workload in plan.workloads:
        cases = [scaled(c, plan.records, size=plan.size, quick=plan.quick) for c in workload.cases]
        for number, case in itertools.product(range(plan.rounds), cases):
            peers = [p for p in plan.peers or workload.peers if PEERS[p].can(case)]
            if peers:
                found += [Measurement(workload, case, p, number) for p in in_order(peers, number)]
    return found


def missing(peers: Iterable[str]) -> dict[str, str]:
    """The packages that are not installed, by the peers that need them."""
    needed = {peer: PEERS[peer].needs for peer in peers}
    return {
        peer: name
        for peer, names in needed.items()
        for name in names
        if importlib.util.find_spec(name) is None
    }


def facts(plan: Plan) -> dict[str, Any]:
    """Where and of what the figures are."""
    sample = b"".join(payloads(Case(name="", size=1_000)))
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "asyncproducer": f"{asyncproducer.__version__}{_commit()}",
        "rounds": plan.rounds,
        # How well 1 MB of the values of 1 kB can be compressed (level 6), as a share.
        "gzip_ratio": round(len(zlib.compress(sample)) / len(sample), 2),
    }


def _commit(source: Path = Path(asyncproducer.__file__).parents[1]) -> str:
    """Which state of the sources is measured, in parentheses; "" where that is not a checkout."""
    if not (source / ".git").exists():
        return ""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" ({told.stdout.strip()})"


@contextmanager
def _kafka(servers: str | None) -> Iterator[KafkaCluster]:
    if servers is not None:
        os.environ["KAFKA_BOOTSTRAP_SERVERS"] = servers
    # Real brokers run with the good compiler, and with memory: 10,000 partitions need some. A quick
    # start is of no use here.
    with KafkaCluster(
        jvm_options=["-XX:TieredStopAtLevel=4", "-Xmx4g"],
        # The memory that deleted topics take in the page cache is what the next ones shall get.
        properties={"log.segment.delete.delay.ms": "1000", "log.initial.task.delay.ms": "1000"},
    ) as cluster:
        yield cluster


def run(plan: Plan) -> Iterator[Result]:
    """The results of `measurements(plan)`, one after the other, each when it is there. Blocks.

    A measurement that fails has an "error" in its result, and the others go on.
    Raises KafkaUnavailable.
    """
    found = measurements(plan)
    with ExitStack() as stack:
        if not plan.quick and plan.bootstrap_servers is None:
            stack.enter_context(memory_at_hand())
        cluster = stack.enter_context(_kafka(plan.bootstrap_servers))
        bench = _Bench(cluster, stack)
        # Brokers are slow at first, and somebody would be the first.
        for _ in range(1 if plan.quick else _WARM_UPS):
            bench.warm_up(scaled(_WARM_UP, plan.records))
        for measurement in found:
            yield {
                "workload": measurement.workload.id,
                "case": measurement.case.name,
                "peer": measurement.peer,
                "round": measurement.round + 1,
                "parameters": dataclasses.asdict(measurement.case),
                **bench.measure(measurement),
            }
        bench.forget_shared()


def brokers_cpu_s(proc: Path = Path("/proc")) -> float:
    """What the brokers that this process has started have computed: user and system, seconds.

    0 where Linux does not tell it, or they are somebody else's.
    """
    total = 0
    for children in proc.glob("self/task/*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):
                # The name is in parentheses, and what follows it has numbers of its own.
                name, _, fields = (proc / pid / "stat").read_text().rpartition(")")
                if name.endswith("(java"):
                    user, system = fields.split()[11:13]
                    total += int(user) + int(system)
    return total / os.sysconf("SC_CLK_TCK")


def run_group(
    command: Sequence[str], given: str, environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Run a command with this input; its status and what it has printed. Blocks.

    Whatever ends it, and be it an interrupt, the processes that it has started end with it: a load
    generator that nobody waits for would be measured with all that comes next.
    Raises subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,  # not a session: processors are shared by these
    )
    try:
        out, err = process.communicate(given, timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, out, err


class _Bench:
    def __init__(self, cluster: KafkaCluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self._proxies: dict[float, str] = {}
        self._numbers = itertools.count(1)
        self._prefix = f"bench-{datetime.datetime.now():%m%d%H%M%S}"
        #: The workload whose measurements of a case share its topics, and these by case.
        self._sharing = ""
        self._shared: dict[Case, tuple[str, ...]] = {}
        #: By case: what the batches of this producer were like, for the wire replay.
        self._ours: dict[str, Result] = {}
        #: Who warms the brokers up: the compiled one, where it is there.
        self._warming = _OURS

    def warm_up(self, case: Case) -> None:
        """A measurement that nobody hears of."""
        result = self.measure(Measurement(headline(), case, self._warming, 0))
        if "error" in result and self._warming == _OURS:
            self._warming = _OURS_PLAIN
            self.warm_up(case)

    def measure(self, measurement: Measurement) -> Result:
        """The result of one process, or {"error": why not}, or {"skipped": why}."""
        case, workload = measurement.case, measurement.workload
        topics: tuple[str, ...] = ()
        try:
            topics = self._topics(workload, case)
            before = self._stored(topics) if workload.shared_topics else 0
            busy = brokers_cpu_s()
            result = self._worker(measurement, topics)
            if "sent" in result:
                busy = brokers_cpu_s() - busy
                # Of a load that time has ended most may be what went first, by a flood.
                if busy > 0 and result.get("records", 0) >= case.records:
                    result["broker_cpu_us_per_record"] = busy / result["sent"] * 1e6
                stored = self._committed(topics) if case.transactional else self._stored(topics)
                stored -= before
                if stored != result["sent"]:
                    text = f"{result['sent']} records were sent, {stored} are in the log"
                    return {"error": text}
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        finally:
            if not workload.shared_topics:
                self._delete(topics)
        key = f"{workload.id} {case.name}"
        if measurement.peer == _OURS or key not in self._ours:
            self._ours[key] = result
        return result

    def _worker(self, measurement: Measurement, topics: tuple[str, ...]) -> Result:
        case, peer = measurement.case, measurement.peer
        like = self._ours.get(f"{measurement.workload.id} {case.name}", {})
        job = Job(
            peer,
            self._servers(case.rtt_ms),
            topics,
            case,
            like.get("batch_bytes", 0.0),
            like.get("batches_per_request", 0.0),
        )
        # The job is not an argument: 5,000 topics are too much for one.
        status, out, err = run_group(
            [sys.executable, "-m", "asyncproducer.bench.worker"],
            as_text(job),
            environment(peer),
            _TIMEOUT_S,
        )
        if status not in (0, CANNOT) or not out.strip():
            raise RuntimeError(f"{out}{err}".strip()[-2000:] or f"it ended with {status}")
        result: Result = json.loads(out.splitlines()[-1])
        if "cannot" in result:
            return {"skipped": result["cannot"]}
        return result

    def _servers(self, rtt_ms: float) -> str:
        if rtt_ms not in self._proxies:
            servers = self._cluster.bootstrap_servers
            self._proxies[rtt_ms] = self._stack.enter_context(delayed(servers, rtt_ms))
        return self._proxies[rtt_ms]

    # -- topics

    def _topics(self, workload: Workload, case: Case) -> tuple[str, ...]:
        if not workload.shared_topics:
            return self._create(case)
        if self._sharing != workload.id:
            self.forget_shared()
            self._sharing = workload.id
        if case not in self._shared:
            self._shared[case] = self._create(case)
        return self._shared[case]

    def _create(self, case: Case) -> tuple[str, ...]:
        names = tuple(f"{self._prefix}-{next(self._numbers)}" for _ in range(case.topics))
        for name in names:
            self._cluster.create_topic(name, partitions=case.partitions, timeout_s=300.0)
        return names

    def forget_shared(self) -> None:
        """Deletes the topics of the last workload whose measurements shared them."""
        for topics in self._shared.values():
            self._delete(topics)
        self._shared.clear()

    def _delete(self, topics: tuple[str, ...]) -> None:
        # The figures are there, and brokers that do not answer the next measurement tells of.
        with suppress(RuntimeError, OSError):
            self._cluster.admin.delete_topics(*topics)

    def _committed(self, topics: tuple[str, ...]) -> int:
        return sum(count_committed(self._cluster, t) for t in topics)

    def _stored(self, topics: tuple[str, ...]) -> int:
        return sum(sum(self._cluster.end_offsets(t).values()) for t in topics)
