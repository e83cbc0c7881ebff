from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncproducer.bench import running
from asyncproducer.bench.peers import environment
from asyncproducer.bench.running import (
    Measurement,
    Plan,
    brokers_cpu_s,
    in_order,
    measurements,
    rotated,
)
from asyncproducer.bench.workloads import WORKLOADS, Case, headline


def test_each_peer_is_first_in_some_round() -> None:
    peers = ["a", "b", "c"]
    assert [rotated(peers, n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert rotated(peers, 1) == ["b", "c", "a"]


def test_the_replay_follows_ours_whose_batches_it_has() -> None:
    plan = Plan((headline(),), ("asyncproducer", "wire-replay", "aiokafka"), rounds=3)
    peers = [each.peer for each in measurements(plan)]
    ours_first = ["asyncproducer", "wire-replay", "aiokafka"]
    assert peers == [*ours_first, "aiokafka", "asyncproducer", "wire-replay", *ours_first]


def test_without_ours_the_replay_is_last() -> None:
    assert in_order(["wire-replay", "aiokafka", "java"], 1) == ["java", "aiokafka", "wire-replay"]
    assert in_order(["wire-replay"], 1) == ["wire-replay"]


def test_a_round_has_all_cases_of_its_workload() -> None:
    """One case is compared with another as well: on a machine that is as quick for both."""
    workload = dataclasses.replace(WORKLOADS["W7"], cases=WORKLOADS["W7"].cases[:2])
    plan = Plan((workload,), peers=("asyncproducer", "aiokafka"), rounds=2, records=3000)
    found = [(m.case.name, m.round, m.peer) for m in measurements(plan)]
    assert found == [
        ("idempotent", 0, "asyncproducer"),
        ("idempotent", 0, "aiokafka"),
        ("not idempotent", 0, "asyncproducer"),
        ("not idempotent", 0, "aiokafka"),
        ("idempotent", 1, "aiokafka"),
        ("idempotent", 1, "asyncproducer"),
        ("not idempotent", 1, "aiokafka"),
        ("not idempotent", 1, "asyncproducer"),
    ]


def test_who_cannot_do_a_case_has_no_measurement_of_it() -> None:
    assert measurements(Plan((WORKLOADS["W12"],), peers=("java",))) != []
    assert {m.case.name for m in measurements(Plan((WORKLOADS["W12"],), peers=("java",)))} == {
        "no headers"
    }
    assert measurements(Plan((WORKLOADS["W11"],), peers=("java",))) == []


class Cluster:
    """Stands in for KafkaCluster: topics that somebody has filled."""

    bootstrap_servers = "nowhere:1"

    def __init__(self, stored: int) -> None:
        self.stored = stored
        self.topics: list[str] = []
        self.admin = self

    def create_topic(self, name: str, **_: Any) -> None:
        self.topics.append(name)

    def delete_topics(self, *names: str) -> None:
        self.topics = [t for t in self.topics if t not in names]

    def end_offsets(self, topic: str) -> dict[int, int]:
        assert topic in self.topics
        return {0: self.stored}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What workers answer, in their order; and afterwards, the jobs that they were given."""
    answers: list[Any] = []

    def worker(self: Any, measurement: Measurement, topics: tuple[str, ...]) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(running._Bench, "_worker", worker)
    return answers


def measure(cluster: Any, case: Case | None = None, peer: str = "asyncproducer") -> Any:
    case = case or Case(name="x", records=10)
    with ExitStack() as stack:
        bench = running._Bench(cluster, stack)
        return bench.measure(Measurement(headline(), case, peer, 0))


def test_records_that_are_not_in_the_log_make_it_an_error(told: list[Any]) -> None:
    cluster = Cluster(stored=9)
    told.append({"sent": 10, "records_per_s": 1e9})
    assert measure(cluster) == {"error": "10 records were sent, 9 are in the log"}
    told.append({"sent": 9, "records_per_s": 1})
    assert measure(cluster) == {"sent": 9, "records_per_s": 1}


def test_a_worker_that_fails_is_told_and_its_topic_is_deleted(told: list[Any]) -> None:
    cluster = Cluster(stored=0)
    told.append(RuntimeError("no module named so"))
    assert measure(cluster) == {"error": "no module named so"}
    assert cluster.topics == []


def test_brokers_that_refuse_to_make_or_to_delete_a_topic_do_not_end_the_run(
    told: list[Any],
) -> None:
    class Refusing(Cluster):
        def create_topic(self, name: str, **_: Any) -> None:
            raise RuntimeError("create topic: POLICY_VIOLATION")

    assert measure(Refusing(stored=0)) == {"error": "create topic: POLICY_VIOLATION"}

    class Keeping(Cluster):
        def delete_topics(self, *names: str) -> None:
            raise ConnectionError("nobody is there")

    told.append({"sent": 0})
    assert measure(Keeping(stored=0)) == {"sent": 0}


def test_brokers_are_warm_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def worker(self: Any, measurement: Measurement, topics: tuple[str, ...]) -> Any:
        asked.append(measurement.peer)
        if measurement.peer == "asyncproducer":
            raise RuntimeError("20 of 20 modules are not compiled")
        return {"sent": 0}

    monkeypatch.setattr(running._Bench, "_worker", worker)
    with ExitStack() as stack:
        bench = running._Bench(Cluster(stored=0), stack)  # type: ignore[arg-type] # stands in
        for _ in range(2):
            bench.warm_up(Case(name="warm-up"))
    assert asked == ["asyncproducer", "asyncproducer-python", "asyncproducer-python"]


def test_what_brokers_compute_is_not_told_of_a_load_that_time_has_ended(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of it may be what went first, by a flood."""
    seconds = iter((1.0, 3.0, 3.0, 4.0))
    monkeypatch.setattr(running, "brokers_cpu_s", lambda: next(seconds))
    told += [{"sent": 10, "records": 10}, {"sent": 10, "records": 4}]
    cluster = Cluster(stored=10)
    assert measure(cluster)["broker_cpu_us_per_record"] == pytest.approx(2e5)
    assert "broker_cpu_us_per_record" not in measure(cluster)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleeper, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "Path(sys.argv[1], str(child.pid)).touch()\n"
        "print(sys.stdin.read(), flush=True)\n"
        "time.sleep(float(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert running.run_group([*command, "0"], "job", {}, 60) == (0, "job\n", "")
    with pytest.raises(subprocess.TimeoutExpired):
        running.run_group([*command, "600"], "job", {}, 2)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while not all(map(_has_ended, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert all(map(_has_ended, pids))


def _has_ended(pid: int) -> bool:
    try:
        # Nobody may have asked yet how it has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_missing_packages_are_told_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "kafka" else name)
    assert running.missing(["asyncproducer", "kafka-python", "aiokafka"]) == {
        "kafka-python": "kafka"
    }


def test_what_a_peer_cannot_do_is_not_looked_up_in_the_log(told: list[Any]) -> None:
    told.append({"skipped": "this version has no send_table"})
    assert measure(Cluster(stored=0)) == {"skipped": "this version has no send_table"}


def test_of_transactions_it_is_what_is_committed_that_counts(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their markers have offsets, too."""
    cluster: Any = Cluster(stored=99)
    monkeypatch.setattr(running, "count_committed", lambda cluster, topic: 10)
    told.append({"sent": 10})
    assert measure(cluster, case=Case(name="x", transaction=5)) == {"sent": 10}
    told.append({"sent": 11})
    found = measure(cluster, case=Case(name="x", transaction=5))
    assert found == {"error": "11 records were sent, 10 are in the log"}


def test_shared_topics_are_made_once_and_only_what_is_new_counts(told: list[Any]) -> None:
    cluster = Cluster(stored=4)

    class Growing(Cluster):
        def end_offsets(self, topic: str) -> dict[int, int]:
            self.stored += 5
            return super().end_offsets(topic)

    cluster = Growing(stored=0)
    workload = dataclasses.replace(headline(), shared_topics=True)
    other = dataclasses.replace(workload, id="other")
    x, y = Case(name="x"), Case(name="y", partitions=2)
    with ExitStack() as stack:
        bench = running._Bench(cluster, stack)  # type: ignore[arg-type] # stands in for it
        for case in (x, y, x, y):
            told.append({"sent": 5})
            assert bench.measure(Measurement(workload, case, "aiokafka", 0)) == {"sent": 5}
        assert len(cluster.topics) == 2
        told.append({"sent": 5})
        assert bench.measure(Measurement(other, x, "aiokafka", 0)) == {"sent": 5}
        assert len(cluster.topics) == 1
        bench.forget_shared()
    assert cluster.topics == []


def test_what_brokers_compute_is_that_of_the_java_processes_that_were_started_here(
    tmp_path: Path,
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for task, children in ((1, "10 11 "), (2, "12 13"), (3, "")):
        (tmp_path / f"self/task/{task}").mkdir(parents=True)
        (tmp_path / f"self/task/{task}/children").write_text(children)
    stats = {10: ("java", 3, 1), 11: ("python", 50, 50), 12: ("a (java", 5, 0)}  # 13 has just gone
    for pid, (name, user, system) in stats.items():
        (tmp_path / str(pid)).mkdir()
        text = f"{pid} ({name}) S 1 2 3 4 5 6 7 8 9 10 {user * ticks} {system * ticks} 0 0"
        (tmp_path / f"{pid}/stat").write_text(text)
    assert brokers_cpu_s(tmp_path) == 9.0
    assert brokers_cpu_s(tmp_path / "nothing") == 0.0
    assert brokers_cpu_s() >= 0.0


def test_another_checkout_is_what_its_worker_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "asyncproducer" / "bench" / "worker.py"
    worker.parent.mkdir(parents=True)
    for package in (worker.parent.parent, worker.parent):
        (package / "__init__.py").touch()
    worker.write_text("""print('{"version": "older", "sent": 3}')""")
    monkeypatch.setenv("ASYNCPRODUCER_BEFORE", str(tmp_path))
    found = measure(Cluster(stored=3), peer="asyncproducer-before")
    assert found == {"version": "older", "sent": 3}


@pytest.mark.parametrize("told", [None, "."])
def test_a_checkout_that_is_not_there_is_asked_for(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASYNCPRODUCER_BEFORE", raising=False)
    if told:
        monkeypatch.setenv("ASYNCPRODUCER_BEFORE", told)
    with pytest.raises(ValueError, match="needs ASYNCPRODUCER_BEFORE: the directory of a compiled"):
        environment("asyncproducer-before")


def test_a_checkout_is_named_by_its_commit(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *command],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert running._commit(tmp_path) == ""
    try:
        git("init")
    except OSError:
        pytest.skip("there is no git")
    assert running._commit(tmp_path) == ""  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git("rev-parse", "--short", "HEAD")
    assert running._commit(tmp_path) == f" ({commit})"
    (tmp_path / "file").write_text("two")
    assert running._commit(tmp_path) == f" ({commit}-dirty)"
