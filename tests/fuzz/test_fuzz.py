"""A little of each target, each time, and every input that once was a finding."""

from __future__ import annotations

import json
import random
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncproducer.core import wire
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.produce import ProducePartition, ProduceTopic, encode_produce
from asyncproducer.core.wire import ApiKey, EndTxnRequest, encode_frame
from asyncproducer.testing.messages import BytesBehind, MalformedRequest, decode_body

from . import mutator, runner
from .messages import broken_request, whole_answer
from .producer import exchanges_batches, misplaces_batches, turns_end
from .runner import Finding, corpus, make, replay
from .targets import DECODERS, TARGETS, Target

#: What fits into a few seconds: of each kind as many with a seed that is always the same as
#: with a fresh one.
INPUTS = {
    "answers": 300,
    "frames": 300,
    "handshake": 100,
    "sasl": 30,
    "batches": 300,
    "own-records": 300,
    "requests": 300,
    "broker": 60,
    "producer-answers": 10,
    "producer-requests": 10,
}


@pytest.mark.parametrize(
    "times", [1, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_do_no_harm(name: str, times: int) -> None:
    target = TARGETS[name]
    for seed in ("fixed", secrets.token_hex(4)):
        for number in range(INPUTS[name] * times):
            try:
                target.run(make(target, seed, number))
            except Exception as exc:
                exc.add_note(
                    f"python -m tests.fuzz --target {name} --seed {seed} --inputs {number + 1}"
                )
                raise


@pytest.mark.parametrize(
    ("name", "path"), list(corpus()), ids=lambda value: getattr(value, "stem", str(value))
)
def test_what_once_was_a_finding_is_none_any_more(name: str, path: Path) -> None:
    replay(name, path)


@pytest.mark.parametrize("key", sorted({key for key, _ in DECODERS}))
@pytest.mark.parametrize("number", range(3))
def test_an_answer_that_is_read_as_another_is_a_finding(
    key: ApiKey, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever API and field it is."""
    target = TARGETS["answers"]
    version = max(v for k, v in DECODERS if k == key)
    whole = {bytes([key, version]) + whole_answer(key, version, n) for n in range(24)}
    for data in whole:
        target.run(data)

    def other(value: Any) -> Any:
        field = value._fields[(0, 1, -1)[number]]
        return value._replace(**{field: ...})

    if key == ApiKey.PRODUCE:
        read = wire.decode_produce
        monkeypatch.setattr(wire, "decode_produce", lambda v, body: other(read(v, body)))
    else:
        (kind,) = (r for r in wire.Request.__subclasses__() if r.api_key == key)
        decode = kind.decode
        monkeypatch.setattr(kind, "decode", lambda self, v, body: other(decode(self, v, body)))
    for data in whole:
        with pytest.raises(AssertionError):
            target.run(data)


def test_an_answer_behind_which_there_is_more_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TARGETS["answers"]
    data = bytes([ApiKey.END_TXN, 5]) + whole_answer(ApiKey.END_TXN, 5, 0) + b"more"
    target.run(data)
    decode = EndTxnRequest.decode
    monkeypatch.setattr(EndTxnRequest, "decode", lambda self, v, b: decode(self, v, b[:-4]))
    with pytest.raises(BytesBehind):
        target.run(data)


# -- the tool itself -------------------------------------------------------------------------------


class Takes(Target):
    """Takes the input for Python, and runs it."""

    name = "takes"
    files = ()
    memory = 32
    seconds = 0.2

    def make(self, rng: random.Random) -> bytes:
        return b"%d" % rng.getrandbits(64)

    def run(self, data: bytes) -> None:
        exec(data.decode())


SPINS = "from time import process_time as t\nn = t()\nwhile t() - n"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("1 + 1", None),
        ("1 / 0", "error"),
        (f"{SPINS} < 0.3: pass", "slow"),
        pytest.param(f"{SPINS} < 0.3: pass  #{2**21 * 'x'}", None, id="more time for 2 MiB"),
        pytest.param(f"{SPINS} < 0.5: pass  #{2**21 * 'x'}", "slow", id="too slow for 2 MiB"),
        ("bytearray(b'x') * 2**28", "memory"),
    ],
)
def test_what_an_input_does_is_judged(code: str, kind: str | None) -> None:
    found = runner._judge(Takes(), code.encode())
    assert (found and found[0]) == kind


def test_the_same_number_of_the_same_seed_is_the_same_input() -> None:
    target = TARGETS["answers"]
    assert make(target, "a", 5) == make(target, "a", 5)
    assert make(target, "a", 5) != make(target, "b", 5)
    assert make(target, "a", 5) != make(target, "a", 6)


def test_a_worker_that_dies_or_hangs_is_a_finding_and_another_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The input is the one that it was at, and the next worker starts behind it."""
    monkeypatch.setattr(runner, "HANGS_AFTER", 0.3)
    monkeypatch.setattr(runner, "CORPUS", tmp_path)
    firsts = []
    ends = ["os.abort()", "time.sleep(100)", "print('{\"done\": 3}')"]

    def command(arguments: list[str]) -> list[str]:
        first = int(arguments[arguments.index("--first") + 1])
        file = arguments[arguments.index("--current") + 1]
        firsts.append(first)
        # It did one input, and is at the next: number + 1, size, input.
        at = (first + 2).to_bytes(8, "big") + (7).to_bytes(8, "big") + b"input %d" % (first + 1)
        code = f"import os, time\nwith open({file!r}, 'r+b') as f: f.write({at!r})\n"
        return [sys.executable, "-c", code + ends[len(firsts) - 1]]

    monkeypatch.setattr(runner, "_command", command)
    report = runner.fuzz("answers", "seed", seconds=100, inputs=50, coverage=None)
    assert firsts == [0, 2, 4]
    assert report.inputs == 2 + 2 + 3
    assert [(f.kind, f.data) for f in report.findings] == [
        ("crash", b"input 1"),
        ("hang", b"input 3"),
    ]
    path = report.findings[0].save()
    assert path == Finding("answers", "crash", b"input 1", "").path
    assert path.read_bytes() == b"input 1"


def test_a_worker_tells_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken(Takes):
        def run(self, data: bytes) -> None:
            raise ZeroDivisionError("always")

    monkeypatch.setattr(runner, "_limit_memory", lambda target: None)
    current = tmp_path / "current"
    runner._Current(current, create=True)
    runner.work(Broken(), "seed", 10, 1e9, 7, current)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("finding") for line in said] == ["error", "error", None]
    assert bytes.fromhex(said[0]["data"]) == make(Broken(), "seed", 10)
    assert said[2] == {"done": 7}


@pytest.mark.parametrize(("inputs", "ended_at"), [(3, 3), (100, 7)])
def test_coverage_is_measured_of_the_first_inputs_only(
    inputs: int, ended_at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Counts(Takes):
        done = 0

        def run(self, data: bytes) -> None:
            self.done += 1

    monkeypatch.setattr(runner, "_limit_memory", lambda target: None)
    current = tmp_path / "current"
    runner._Current(current, create=True)
    target = Counts()
    ended = []
    measured = runner.Measured(1e9, inputs, lambda: ended.append(target.done))
    runner.work(target, "seed", 0, 1e9, 7, current, measured)
    assert ended == [ended_at]


def test_a_worker_that_takes_over_measures_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def command(arguments: list[str]) -> list[str]:
        there = "--measured-inputs" in arguments
        measured.append(arguments[arguments.index("--measured-inputs") + 1] if there else None)
        first = int(arguments[arguments.index("--first") + 1])
        file = arguments[arguments.index("--current") + 1]
        at = (first + 6).to_bytes(8, "big") + bytes(8)  # it dies at its sixth input
        code = f"import os\nwith open({file!r}, 'r+b') as f: f.write({at!r})\nos.abort()"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(runner, "_command", command)
    runner.fuzz("answers", "seed", seconds=100, inputs=18, coverage=tmp_path / "coverage")
    assert measured == ["3", None, None]
    measured.clear()
    runner.fuzz("answers", "seed", seconds=100, inputs=40, coverage=tmp_path / "coverage")
    assert measured[:3] == ["8", "2", None]


def test_what_is_broken_was_whole_before() -> None:
    """Most inputs are nearly valid: else only the first check of each parser would be met."""
    rng = random.Random(1)
    taken = 0
    for _ in range(300):
        try:
            decode_body(3, 12, broken_request(rng, 3, 12))
            taken += 1
        except MalformedRequest:
            pass
    assert 30 < taken < 270


def produce_request(version: int, values: dict[int, bytes]) -> bytes:
    """With a batch of one record for each partition, without the size before it."""
    partitions = []
    for partition, value in values.items():
        batch = ProducerBatch("t", partition, write_limit=1000, created_at=0.0)
        batch.try_append(0, None, value, NO_HEADERS)
        batch.close()
        batch.seal()
        partitions.append(ProducePartition(partition, batch.buffers()))
    topic_id = bytes(range(16)) if version == 13 else None
    buffers = encode_produce(
        version,
        1,
        "c",
        acks=-1,
        timeout_ms=1,
        transactional_id=None,
        topics=[ProduceTopic("t", topic_id, partitions)],
    )
    return b"".join(buffers)[4:]


def test_what_repeats_itself_again_and_again_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutator, "MAX_BYTES", 100)
    monkeypatch.setattr(mutator, "_MUTATIONS", (lambda rng, data, where, other: data * 2,))
    sizes = {len(mutator.mutate(random.Random(seed), bytes(10), (), b"")) for seed in range(20)}
    assert sizes == {20, 40, 80, 100}


@pytest.mark.parametrize("version", [3, 9, 13])
def test_a_batch_in_the_place_of_another_is_told_from_what_a_broker_refuses(version: int) -> None:
    frame = produce_request(version, {0: b"one", 1: b"two"})
    assert exchanges_batches(frame, produce_request(version, {0: b"two", 1: b"two"}))
    assert exchanges_batches(frame, produce_request(version, {0: b"two", 1: b"one"}))
    assert not exchanges_batches(frame, frame)
    assert not exchanges_batches(frame, produce_request(version, {0: b"one"}))
    # Who asks for another partition is told of that one: nobody takes it for an answer.
    assert not exchanges_batches(frame, produce_request(version, {0: b"one", 7: b"two"}))
    assert not exchanges_batches(frame, frame.replace(b"one", b"one"[::-1]))
    if version < 13:
        nameless = frame.replace(*{3: (b"\0\1t", b"\0\0"), 9: (b"\2t", b"\1")}[version])
        assert nameless != frame
        assert not exchanges_batches(frame, nameless)
    for cut in range(len(frame)):
        assert not exchanges_batches(frame, frame[:cut])
        assert not exchanges_batches(frame[:cut], frame)


@pytest.mark.parametrize("version", [3, 9, 13])
def test_a_batch_where_it_was_not_is_noticed(version: int) -> None:
    frame = produce_request(version, {0: b"one", 1: b"two"})
    assert misplaces_batches(frame, produce_request(version, {0: b"one", 7: b"two"}))
    assert misplaces_batches(frame, produce_request(version, {0: b"two", 1: b"two"}))
    assert not misplaces_batches(frame, frame)
    assert not misplaces_batches(frame, produce_request(version, {1: b"two"}))
    assert not misplaces_batches(frame, frame.replace(b"one", b"one"[::-1]))


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_commit_that_has_become_an_abort_is_noticed(version: int) -> None:
    commit, abort = (
        encode_frame(
            EndTxnRequest("tx", 1, 0, commit=commit, version_two=version == 5), version, 1, "c"
        )[4:]
        for commit in (True, False)
    )
    assert turns_end(commit, abort)
    assert turns_end(abort, commit)
    assert not turns_end(commit, commit)
    assert not turns_end(commit, commit[:-1])
    assert not turns_end(commit, produce_request(9, {0: b"one"}))
