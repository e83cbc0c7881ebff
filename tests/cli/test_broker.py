from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncproducer import Producer
from asyncproducer.cli import main

# The command is a process of its own, which is waited for really.


@contextmanager
def broker(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, what it listens on)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncproducer", "broker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Debug mode reports on stderr whatever takes a tenth of a second.
        env={**os.environ, "PYTHONASYNCIODEBUG": ""},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        assert "It keeps nothing: all records are in memory" in process.stdout.readline()
        yield process, line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


async def test_it_serves_until_it_is_interrupted_and_ends_without_a_word_too_many() -> None:
    arguments = ["--brokers", "2", "--topic", "orders:3", "clicks", "--topic", "a:2"]
    with broker("--port", "0", *arguments) as (process, servers):
        assert re.fullmatch(r"127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", servers)
        async with Producer(servers) as producer:
            counts = [len(await producer.partitions_for(t)) for t in ("orders", "clicks", "a")]
            assert counts == [3, 1, 2]
            assert (await producer.send("created", b"tea")).offset == 0
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ended, nothing was kept\n", "")


def test_it_ends_with_sigterm_too() -> None:
    with broker("--port", "0") as (process, _):
        process.terminate()
        assert process.communicate(timeout=30)[1] == ""
        assert process.returncode == 0


def test_the_port_is_the_one_that_was_asked_for() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with broker("--port", str(port)) as (_, servers):
        assert servers == f"127.0.0.1:{port}"


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["broker", "--port", str(taken.getsockname()[1])]) == 1
    err = capsys.readouterr().err
    assert "address already in use" in err
    assert "Choose another --port" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "65536"], "65536 is more than 65535"),
        (["--port", "-1"], "-1 is less than 0"),
        (["--port", "http"], "'http' is not a whole number"),
        (["--brokers", "0"], "0 is less than 1"),
        (["--topic", ":3"], "':3' is not NAME:PARTITIONS"),
        (["--topic", "a:0"], "0 is less than 1"),
        (["--topic", "a:b"], "'b' is not a whole number"),
        (["--topic"], "expected at least one argument"),
        (["--topic", "a/b"], "a topic's name has 1 to 249 characters"),
        (["--topic", "a", "a:2"], "topic a already exists"),
        (["--port", "65535", "--brokers", "2"], "there are no 2 ports from there to 65535"),
    ],
)
def test_wrong_arguments_are_exit_status_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["broker", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert told in capsys.readouterr().err
