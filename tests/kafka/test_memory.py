"""How much memory a flood takes, in a process that does nothing else."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncproducer.testing.kafka import KafkaCluster

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic

_STATUS = Path("/proc/self/status")

#: Beside `buffer_memory`: objects of Python, spare buffers, what codecs work with.
_MOST_BESIDE_MIB = 20

_FLOOD = """\
import asyncio, sys
from pathlib import Path
from asyncproducer import Producer

def mib(what):
    return int(Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) / 1024

async def flood(servers, topic, codec, rounds):
    values = [(b'{"id":%06d,"text":"' % n + b"some more words " * 70)[:1000] for n in range(1000)]
    async with Producer(servers, compression_type=codec) as producer:
        await producer.send(topic, values[0])
        Path("/proc/self/clear_refs").write_text("5")  # the most begins with what is there now
        before = mib("VmRSS")
        for _ in range(int(rounds)):
            for value in values:
                await producer.enqueue(topic, value)
        await producer.flush()
        print(producer.config.buffer_memory / 2**20, mib("VmHWM") - before)

asyncio.run(flood(*sys.argv[1:]))
"""


@pytest.mark.skipif(not _STATUS.exists(), reason="Linux tells what a process takes")
@pytest.mark.parametrize(
    ("codec", "rounds"),
    [("none", 200), ("gzip", 200), ("snappy", 200), ("lz4", 200), ("zstd", 800)],
)
async def test_a_flood_takes_no_more_memory_than_it_may(
    kafka: KafkaCluster, fresh_topic: FreshTopic, codec: str, rounds: int
) -> None:
    """(With zstd it was 54 to 59 MiB once, in the second second.)"""
    topic = fresh_topic(6, configs={"retention.bytes": "10000000", "segment.bytes": "10000000"})
    arguments = (kafka.bootstrap_servers, topic, codec, str(rounds))
    # How its free memory lies is the system's: where it is too much, once more.
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _FLOOD, *arguments, stdout=PIPE
        )
        told, _ = await process.communicate()
        assert process.returncode == 0
        allowed, taken = map(float, told.split())
        if taken < allowed + _MOST_BESIDE_MIB:
            break
    # It has filled its memory: else nothing would be said of the most that it takes.
    assert allowed / 4 < taken < allowed + _MOST_BESIDE_MIB
