"""A Produce answer that is broken in every place: the batch is sent again, never acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest

from asyncproducer import Producer
from asyncproducer.testing import EmbeddedCluster

from .producer import Middle

pytestmark = pytest.mark.virtual_time

PRODUCE = 0


class Once(Middle):
    """Changes the first answer to a Produce request, and nothing else."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        super().__init__(random.Random(0), "answers", 1.0)
        self.change = change
        self.size = 0

    def _change(self, side: str, frame: bytes, key: int, version: int) -> bytes:
        if key == PRODUCE and not self.size:
            self.size = len(frame)
            frame = self.change(frame)
        return len(frame).to_bytes(4, "big") + frame


async def send(network: Once, version: int) -> tuple[BaseException | None, int]:
    """What the delivery of one record ended with, and how often it is in the log."""
    async with EmbeddedCluster(
        topics={"t": 1}, network=network, request_versions={PRODUCE: (3, version)}
    ) as cluster:
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=network,
            request_timeout_ms=1000,
            delivery_timeout_ms=3000,
        )
        async with producer:
            delivery = await producer.enqueue("t", b"value")
            await asyncio.gather(delivery, return_exceptions=True)
        assert not producer._accumulator.incomplete
        return delivery.exception(), len(cluster.records("t", 0))


async def size_of_an_answer(version: int) -> int:
    network = Once(lambda frame: frame)
    assert await send(network, version) == (None, 1)
    return network.size


@pytest.mark.parametrize("version", [3, 5, 8, 9, 13])
async def test_an_answer_that_ends_too_early_or_too_late_is_no_answer(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection ends with a ProtocolError that says where; the batch is sent again."""
    caplog.set_level(logging.WARNING, "asyncproducer")
    size = await size_of_an_answer(version)
    broken: list[Callable[[bytes], bytes]] = [itemgetter(slice(n)) for n in range(size)]
    broken += [lambda f: f + b"\0", lambda f: f + f, lambda f: f[:4] + bytes(1000)]
    for change in broken:
        caplog.clear()
        assert await send(Once(change), version) == (None, 1)
        (warning,) = [r.getMessage() for r in caplog.records if "is repeated" in r.getMessage()]
        assert "malformed" in warning


@pytest.mark.parametrize("version", [3, 9, 13])
@pytest.mark.parametrize("change", [0xFF, 0x01, pytest.param(0x80, marks=pytest.mark.long)])
async def test_an_answer_with_a_byte_that_is_wrong_does_no_harm(version: int, change: int) -> None:
    """Whether it can be read or not, the record is stored once. It may be told to have failed:
    nobody can see that the broker did not say so."""
    size = await size_of_an_answer(version)
    for place in range(size):

        def flip(frame: bytes, place: int = place) -> bytes:
            return frame[:place] + bytes([frame[place] ^ change]) + frame[place + 1 :]

        _, stored = await send(Once(flip), version)
        assert stored == 1
