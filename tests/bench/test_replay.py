from __future__ import annotations

import asyncio
from itertools import cycle

import pytest

from asyncproducer.bench.peers import Job
from asyncproducer.bench.replay import measure, requests
from asyncproducer.bench.workloads import Case, payloads
from asyncproducer.core.produce import decode_produce
from asyncproducer.core.wire import split_frame
from asyncproducer.testing import EmbeddedCluster, RawClient


async def produce(cluster: EmbeddedCluster, frames: list[tuple[bytes, int]]) -> list[int]:
    """The error codes of the partitions of all answers."""
    codes: list[int] = []
    async with await RawClient.connect(cluster.bootstrap_servers, cluster.connector) as client:
        for frame, _ in frames:
            client.writer.write(frame)
        for number in range(len(frames)):
            answered, body = split_frame(0, 9, await client.receive_frame())
            assert answered == number
            codes += [p.error_code for p in decode_produce(9, body).partitions]
    return codes


@pytest.fixture
def values() -> list[bytes]:
    return [b"%050d" % n for n in range(1000)]


@pytest.mark.virtual_time
async def test_a_broker_takes_them_and_every_record_is_there_once(values: list[bytes]) -> None:
    async with EmbeddedCluster(topics={"t": 3}) as cluster:
        frames = list(
            requests("t", iter(values), 100, partitions=3, batch_bytes=500, batches_per_request=2)
        )
        assert set(await produce(cluster, frames)) == {0}
        stored = cluster.records("t")
        assert all(cluster.records("t", partition) for partition in range(3))
    assert len(stored) == sum(count for _, count in frames) == 100
    assert len({r.value for r in stored}) == 100


@pytest.mark.virtual_time
async def test_sequences_go_on_from_one_list_of_requests_to_the_next(values: list[bytes]) -> None:
    async with EmbeddedCluster(topics={"t": 2}) as cluster:
        async with await RawClient.connect(cluster.bootstrap_servers) as client:
            answer = await client.request(
                "init_producer_id", 2, transactional_id=None, transaction_timeout=1000
            )
        sequences = [0, 0]
        endless = cycle(values)
        for count in (40, 60):
            frames = list(
                requests(
                    "t",
                    endless,
                    count,
                    partitions=2,
                    batch_bytes=400,
                    batches_per_request=2,
                    producer_id=answer.producer_id,
                    sequences=sequences,
                )
            )
            assert set(await produce(cluster, frames)) == {0}
        assert sum(sequences) == len(cluster.records("t")) == 100


def test_batches_are_as_large_and_requests_as_full_as_was_asked(values: list[bytes]) -> None:
    frames = list(
        requests("t", cycle(values), 3000, partitions=6, batch_bytes=10_000, batches_per_request=3)
    )
    full = [len(frame) for frame, _ in frames[:-1]]
    assert all(3 * 9_900 < size < 3 * 10_000 + 200 for size in full)


def test_a_batch_of_one_byte_has_one_record(values: list[bytes]) -> None:
    frames = requests("t", cycle(values), 5, partitions=6, batch_bytes=1, batches_per_request=1)
    assert [count for _, count in frames] == [1] * 5


@pytest.mark.parametrize("load", ["flood", "loop"])
async def test_a_replay_through_a_socket_says_what_it_has_sent(load: str) -> None:
    case = Case(name="x", load=load, records=50)  # type: ignore[arg-type] # one of both
    async with EmbeddedCluster(topics={"t": 6}) as cluster:
        job = Job("wire-replay", cluster.bootstrap_servers, ("t",), case, 800.0, 2.0)
        result = await asyncio.to_thread(measure, job)
        assert result["sent"] == len(cluster.records("t")) == 55
        assert {r.value for r in cluster.records("t")} <= set(payloads(case))
    assert result["records"] == 50
    assert ("p50_ms" in result) == (load == "loop")


async def test_a_lone_replay_pauses_as_long_as_the_case_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("asyncproducer.bench.replay.time.sleep", slept.append)
    case = Case(name="x", load="loop", records=20, pause_ms=3.0)
    async with EmbeddedCluster(topics={"t": 6}) as cluster:
        job = Job("wire-replay", cluster.bootstrap_servers, ("t",), case, 800.0, 2.0)
        result = await asyncio.to_thread(measure, job)
    assert slept.count(0.003) == result["records"] == 20


async def test_a_topic_of_several_leaders_is_refused() -> None:
    async with EmbeddedCluster(brokers=2, topics={"t": 2}) as cluster:
        job = Job("wire-replay", cluster.bootstrap_servers, ("t",), Case(name="x"))
        with pytest.raises(RuntimeError, match=r"led by \[1, 2\]; a replay needs a single leader"):
            await asyncio.to_thread(measure, job)
