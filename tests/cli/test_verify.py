from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncproducer import DeliveryTimeout, Producer
from asyncproducer.cli import clusters, main, verify
from asyncproducer.config import ProducerConfig
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.ledger import Ledger, Verdict

RECORDS = 500


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with clusters.embedded() as servers:
        yield servers


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def run_verify(servers: str, *arguments: str) -> int:
    return main(["verify", "--bootstrap-servers", servers, "--records", str(RECORDS), *arguments])


def run_json(
    capsys: pytest.CaptureFixture[str], servers: str, *arguments: str
) -> tuple[int, dict[str, Any]]:
    status = run_verify(servers, "--json", *arguments)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


# -- the whole -------------------------------------------------------------------------------


def test_records_are_sent_read_back_and_judged(
    servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verify(servers) == 0
    out = capsys.readouterr().out
    assert f"Kafka at {servers}, topic asyncproducer-verify-" in out
    assert "acknowledged  500, failed 0, refused 0" in out
    assert "✓ read back: 500 records, all that were acknowledged, each once, in order" in out
    for word in ("p50 ", "p99 ", "p99.9 ", "max "):
        assert word in out
    assert "faults" not in out


def test_it_brings_a_broker_to_try_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--embedded", "--records", "10"]) == 0
    assert "the embedded broker at 127.0.0.1:" in capsys.readouterr().out


def test_json_is_all_that_a_program_reads(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(
        capsys, servers, "--option", "linger.ms=1", "--option", "batch_size=1000", "--keys", "0"
    )
    assert status == 0
    assert document["good"] is document["clean"] is True
    assert document["options"] == {"batch_size": 1000, "linger_ms": 1}
    assert document["records"]["acknowledged"] == document["records"]["in_log"] == RECORDS
    assert {*document["latency_ms"]} == {"p50", "p99", "p99.9", "max"}
    assert document["faults"] is None


def test_under_faults_nothing_is_lost_and_what_happened_can_be_replayed(
    servers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    rules = [
        {"kind": "cut_before", "after": 2},
        {"kind": "cut_after", "after": 4, "chance": 0.9, "times": 2},
        {"kind": "truncate_answer", "after": 9},
    ]
    plan.write_text(json.dumps({"faults": rules}))
    # A record a batch, six partitions: over 80 requests, however slow the machine.
    small = ["--option", "batch.size=1", "--option", "batch.max.bytes=1"]
    arguments = ["--option", "reconnect.backoff.max.ms=50", *small]
    status, document = run_json(capsys, servers, "--faults", str(plan), "--seed", "5", *arguments)
    assert status == 0
    assert document["retries"] > 0
    injected = document["faults"]["injected"]
    assert injected == {"cut_before": 1, "cut_after": 2, "truncate_answer": 1}
    assert document["faults"]["replay"]["seed"] == 5
    plan.write_text(json.dumps(document["faults"]["replay"]))
    assert run_verify(servers, "--faults", str(plan), *arguments) == 0
    assert "faults        cut_" in capsys.readouterr().out


def test_records_that_fail_are_no_success_although_all_that_was_said_is_true(
    servers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"kind": "black_hole", "seconds": 600}]}')
    hasty = ["--option", "delivery.timeout.ms=300", "--option", "request.timeout.ms=200"]
    assert run_verify(servers, "--faults", str(plan), "--option", "linger.ms=0", *hasty) == 1
    out = capsys.readouterr().out
    assert "0 maybe (and 0 of them are)" not in out
    assert "DeliveryTimeout: " in out
    assert "✗ not every record was acknowledged" in out


# -- what it finds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda log: log[1:], "✗ read back: 1 lost\n"),
        (lambda log: [*log, log[0]], "✗ read back: 1 doubled\n"),
        (lambda log: [log[1], log[0], *log[2:]], "✗ read back: 1 out of order\n"),
        (lambda log: [log[0]._replace(value=log[0].value + b"?"), *log[1:]], "1 lost, 1 altered\n"),
        (
            lambda log: [*log[:-1], log[-1]._replace(offset=0)],
            "1 not where the acknowledgement said\n",
        ),
        (lambda log: [log[0]._replace(value=b"x"), *log], "1 records in the topic are not of this"),
    ],
)
def test_what_is_wrong_in_the_log_is_told(
    servers: str,
    change: Any,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = clusters.read

    async def altered(*args: Any, **kwargs: Any) -> AsyncIterator[clusters.ReadRecord]:
        for record in change([record async for record in read(*args, **kwargs)]):
            yield record

    monkeypatch.setattr(verify, "read", altered)
    status = run_verify(servers, "--partitions", "1")
    out = capsys.readouterr().out
    assert told in out
    assert status == ("✗" in out)


@pytest.mark.parametrize("lost", [0, 1])
async def test_what_retention_removed_before_it_was_read_is_neither_lost_nor_good(
    lost: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, loop = clusters.read, asyncio.get_running_loop()

    async def after_retention(*args: Any, **kwargs: Any) -> AsyncIterator[clusters.ReadRecord]:
        # The cluster lives on the test's loop, which hears of this before it is asked to fetch.
        loop.call_soon_threadsafe(cluster.delete_records, "t", 0, 40)
        async for record in read(*args, **kwargs):
            if record.offset >= 40 + lost:
                yield record

    monkeypatch.setattr(verify, "read", after_retention)
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        servers = cluster.bootstrap_servers
        arguments = ("--topic", "t", "--option", "batch.size=1000")
        status = await asyncio.to_thread(run_verify, servers, *arguments)
    out = capsys.readouterr().out
    told = "40 no longer in the log (partition 0's log starts at 40 now: retention or Delete"
    assert told in out
    if lost:
        assert status == 1
        assert "✗ read back: 1 lost\n" in out
    else:
        assert status == 3
        assert "? read back: 460 records, each once" in out
        assert "40 others cannot be judged" in out
        assert "✗" not in out


def test_json_has_what_was_removed(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = clusters.read

    async def later(*args: Any, removed: Any, **_: Any) -> AsyncIterator[clusters.ReadRecord]:
        removed(0, 0, 40)
        async for record in read(*args):
            if record.offset >= 40:
                yield record

    monkeypatch.setattr(verify, "read", later)
    status, document = run_json(capsys, servers, "--partitions", "1")
    assert status == 3
    assert (document["good"], document["clean"], document["judged"]) == (False, True, False)
    assert (document["records"]["removed"], document["records"]["lost"]) == (40, 0)
    assert document["log_starts"] == {"0": 40}


@pytest.mark.parametrize("end", [RECORDS, RECORDS + 7])
def test_what_could_not_be_read_is_neither_lost_nor_good(
    end: int, servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With those of others behind them, or without."""
    read, first = clusters.read, end - 40

    async def silent(*args: Any, unread: Any, **_: Any) -> AsyncIterator[clusters.ReadRecord]:
        async for record in read(*args):
            if record.offset < first:
                yield record
        unread(0, first, end)

    monkeypatch.setattr(verify, "read", silent)
    unread = RECORDS - first
    status, document = run_json(capsys, servers, "--partitions", "1")
    assert status == 3
    assert (document["good"], document["clean"], document["judged"]) == (False, True, False)
    assert (document["records"]["unread"], document["records"]["lost"]) == (unread, 0)
    assert document["unread_from"] == {"0": first}
    assert run_verify(servers, "--partitions", "1") == 3
    out = capsys.readouterr().out
    assert f"? read back: {first} records, each once" in out
    told = f"{unread} could not be read back (partition 0 from offset {first} on: nothing came for"
    assert told in out


def test_where_all_that_was_sent_was_read_what_was_not_may_still_be_wrong() -> None:
    found = result(Verdict(sent=10, acknowledged=10, in_log=10))
    assert found.status == 0
    found.unread_from = {0: 10}
    assert (found.status, found.good) == (3, False)


@pytest.mark.parametrize(
    "option", ["partitioner.class=round_robin", "partitioner.ignore.keys=true"]
)
def test_keys_that_do_not_tell_the_partition_may_be_on_several(
    option: str, servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A record a batch: without regard to keys, the next one goes to another partition.
    arguments = ("--keys", "3", "--option", option, "--option", "batch.size=1")
    status, document = run_json(capsys, servers, *arguments)
    assert (status, document["clean"]) == (0, True)
    assert document["records"]["split_keys"] == 0
    assert document["records"]["moved_keys"] > 0
    assert run_verify(servers, *arguments) == 0
    assert f"on a second partition, which is no fault: {option[:20]}" in capsys.readouterr().out


async def test_keys_may_move_where_partitions_are_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send, loop = verify._send, asyncio.get_running_loop()

    async def growing(producer: Any, topic: str, ledger: Any, options: Any, status: Any) -> None:
        options.records = RECORDS // 2
        await send(producer, topic, ledger, options, status)
        # The cluster lives on the test's loop.
        loop.call_soon_threadsafe(cluster.add_partitions, topic, 7)
        while len(await producer.partitions_for(topic)) < 7:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.01)
        options.records = RECORDS
        await send(producer, topic, ledger, options, status)

    monkeypatch.setattr(verify, "_send", growing)
    async with EmbeddedCluster(topics={"t": 2}) as cluster:
        servers = cluster.bootstrap_servers
        arguments = ("--topic", "t", "--keys", "20", "--option", "metadata.max.age.ms=20")
        status = await asyncio.to_thread(run_verify, servers, *arguments)
    assert status == 0
    out = capsys.readouterr().out
    assert "✓ read back: 500 records" in out
    assert "which is no fault: partitions were added to the topic" in out


async def _compact(*_: Any) -> str:
    return "compact,delete"


def test_in_a_compacted_topic_only_what_has_no_later_record_of_its_key_is_lost(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = clusters.read

    async def compacted(*args: Any, **kwargs: Any) -> AsyncIterator[clusters.ReadRecord]:
        last = {record.key: record async for record in read(*args, **kwargs)}
        for record in last.values():
            yield record

    monkeypatch.setattr(verify, "cleanup_policy", _compact)
    monkeypatch.setattr(verify, "read", compacted)
    assert run_verify(servers, "--keys", "20", "--partitions", "1") == 3
    out = capsys.readouterr().out
    assert "is compacted (cleanup.policy=compact,delete): of each key only the last record" in out
    assert "? read back: 20 records" in out
    told = "480 not in the log, with a later record of their key behind them (cleanup.policy=comp"
    assert told in out


def test_a_compacted_topic_of_which_nothing_was_removed_is_good(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "cleanup_policy", _compact)
    status, document = run_json(capsys, servers, "--keys", "20")
    assert status == 0
    assert document["judged"] is True
    assert document["cleanup_policy"] == "compact,delete"


def test_a_topic_of_its_own_is_deleted_and_others_are_not(
    servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def exists(topic: str) -> bool:
        return not asyncio.run(clusters.create_topic(servers, topic, 1))

    _, document = run_json(capsys, servers)
    assert not exists(document["topic"])
    _, document = run_json(capsys, servers, "--keep-topic", "--partitions", "2")
    assert exists(document["topic"])
    for _ in range(2):  # what is in it already does not matter
        status, document = run_json(capsys, servers, "--topic", "mine")
        assert (status, document["topic"], document["records"]["foreign"]) == (0, "mine", 0)
    assert exists("mine")


# -- sending ---------------------------------------------------------------------------------


class Status:
    def update(self, text: str) -> None:
        pass


async def send(
    cluster: EmbeddedCluster,
    network: MemoryNetwork,
    topic: str = "t",
    buffer_memory: int = 2**20,
    **arguments: Any,
) -> tuple[Ledger, float]:
    """The ledger, and the seconds that sending took."""
    ledger = Ledger()
    options = argparse.Namespace(records=None, seconds=None, rate=None)
    vars(options).update(arguments)
    async with Producer[bytes, bytes](
        cluster.bootstrap_servers,
        connector=network,
        max_block_ms=5000,
        buffer_memory=buffer_memory,
    ) as producer:
        await producer.warm_up("t")
        began = asyncio.get_running_loop().time()
        await verify._send(producer, topic, ledger, options, Status())
        took = asyncio.get_running_loop().time() - began
    return ledger, took


@pytest.mark.virtual_time
async def test_a_rate_is_kept(cluster: EmbeddedCluster, network: MemoryNetwork) -> None:
    ledger, took = await send(cluster, network, records=101, rate=50)
    assert len(ledger) == 101
    assert took == pytest.approx(2.0, abs=0.01)


@pytest.mark.virtual_time
async def test_with_a_rate_latency_counts_from_the_time_at_which_a_record_was_due(
    cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    fault = cluster.inject(api="produce", delay=2.0)
    ledger, _ = await send(cluster, network, records=100, rate=50, buffer_memory=20_000)
    assert fault.hits == 1
    # Room for some: the others were late for up to two seconds, and none of them was spared that.
    assert sum(latency > 0.5 for latency in ledger.latencies) > 50


@pytest.mark.virtual_time
async def test_the_time_ends_the_sending(cluster: EmbeddedCluster, network: MemoryNetwork) -> None:
    ledger, took = await send(cluster, network, seconds=3, rate=50)
    assert 149 <= len(ledger) <= 151
    assert took == pytest.approx(3.0, abs=0.03)


@pytest.mark.virtual_time
async def test_a_record_that_is_not_taken_ends_the_sending(
    cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    ledger, took = await send(cluster, network, topic="none", records=1000)
    assert (ledger.verdict().refused, ledger.verdict().sent) == (1, 1)
    assert [*ledger.errors] == ["MetadataTimeout"]
    assert took == pytest.approx(5.0, abs=0.1)


# -- what may be wrong -----------------------------------------------------------------------


def test_a_cluster_that_is_not_there_is_told_and_exit_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_verify("localhost:1", "--option", "max.block.ms=100") == 1
    out = capsys.readouterr().out
    assert out.startswith("ConnectionFailed: ")
    assert "localhost:1" in out
    assert "Connection refused" in out


def test_a_cluster_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 2
    assert "verify which cluster?" in capsys.readouterr().out


def test_a_properties_file_may_name_the_cluster_and_options_replace_it(
    servers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"# ours\n\nbootstrap.servers = {servers}\nlinger.ms=3\nacks=1\n")
    arguments = ["--config", str(file), "--option", "acks=all", "--records", "10", "--json"]
    assert main(["verify", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bootstrap_servers"] == servers
    assert document["options"] == {"acks": -1, "linger_ms": 3}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--option", "linger.msx=1"], "linger.ms"),
        (["--option", "linger.ms=soon"], "'soon'"),
        (["--option", "transactional.id=x"], "verify sends without transactions"),
        (["--faults", "nowhere.json"], "--faults nowhere.json: "),
        (["--faults", "mixed", "--option", "security.protocol=SSL"], "use a listener without TLS"),
    ],
)
def test_wrong_options_are_told_before_anything_is_done(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verify("localhost:1", *arguments) == 2
    assert says in capsys.readouterr().out


def test_a_plan_that_is_nested_too_deeply_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("[" * 100_000 + "]" * 100_000)
    assert run_verify("localhost:1", "--faults", str(plan)) == 2
    assert f"--faults {plan}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--option", "linger.ms"], "'linger.ms' is not NAME=VALUE"),
        (["--config", "nowhere.properties"], "nowhere.properties"),
        (["--records", "0"], "0 is less than 1"),
        (["--kafka", "--embedded"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_exit_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_line_of_a_properties_file_that_is_none_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text("acks\n")
    with pytest.raises(SystemExit):
        main(["verify", "--config", str(file)])
    assert "'acks' is not NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["rich", "rich.console", "aiokafka"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str,
    servers: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert run_verify(servers) == 2
    captured = capsys.readouterr()
    assert 'pip install "asyncproducer[verify]"' in captured.out + captured.err


def test_the_extra_brings_what_verify_imports() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"]["verify"]
    assert {requirement.split(">")[0] for requirement in extra} == {"aiokafka", "rich"}


def test_interrupted_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> verify.Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_verify", interrupted)
    assert main(["verify", "--embedded"]) == 130
    assert capsys.readouterr().out == "interrupted\n"


# -- the screen ------------------------------------------------------------------------------


def result(verdict: Verdict, **options: Any) -> verify.Result:
    return verify.Result(
        topic="t",
        servers="a:1",
        verdict=verdict,
        seconds=1.0,
        latencies=[0.001],
        metrics={},
        errors={DeliveryTimeout.__name__: "late"},
        config=ProducerConfig("a:1", **options),
    )


def screen(verdict: Verdict, **options: Any) -> str:
    out = io.StringIO()
    verify._print(Console(file=out, width=200), result(verdict, **options))
    return out.getvalue()


def test_what_the_options_do_not_promise_is_said_where_it_happens() -> None:
    lost = Verdict(sent=10, acknowledged=10, in_log=9, lost=1)
    doubled = Verdict(sent=10, acknowledged=10, in_log=11, doubled=1)
    assert "acks=1 acknowledges before" in screen(lost, acks=1)
    assert "acknowledges before" not in screen(lost)
    assert "without enable.idempotence" in screen(doubled, enable_idempotence=False)
    assert "without enable.idempotence" not in screen(doubled)


def test_records_that_failed_are_no_success_whatever_else_was_removed() -> None:
    verdict = Verdict(sent=10, acknowledged=9, failed_no=1, in_log=5, removed=4)
    assert result(verdict).status == 1
    assert "✗ not every record was acknowledged" in screen(verdict)


def test_failures_are_told_with_what_they_said_of_the_log() -> None:
    verdict = Verdict(
        sent=10, acknowledged=4, failed_no=3, failed_maybe=2, failed_yes=1, in_log=6, maybe_in_log=1
    )
    text = screen(verdict)
    assert "3 certainly not in the log, 2 maybe (and 1 of them are), 1 in the log all" in text
    assert "DeliveryTimeout: late" in text
