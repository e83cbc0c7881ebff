"""The serializers of a history's user: plain, async or at times the one, at times the other.

They may wait, and raise. What they are given shows whose record it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from asyncproducer.errors import BufferFull, IllegalStateError, MetadataNotReady, ProducerClosed
from asyncproducer.testing.simulation.model import WRITTEN, key_of, value_of
from asyncproducer.testing.simulation.plan import PlannedRecord

__all__ = ["Serializers"]


class _Unwritten(Exception):
    """What a serializer raises that is a user's own."""


#: What serializers raise: also what they may have got of another producer, or of another task.
_RAISED: tuple[type[BaseException], ...] = (
    _Unwritten,
    ProducerClosed,
    IllegalStateError,
    BufferFull,
    MetadataNotReady,
    asyncio.CancelledError,
)


class Serializers:
    """As `setting` says. Without one there are none, and records are sent as bytes.

    `setting`: "key" and "value" are "plain", "async" or "either"; an async one takes one of the
    seconds of "waits", a record whose number "fails" divides is refused.
    `on_done` and `on_failed` hear the numbers of records that a serializer has done with.
    """

    def __init__(
        self,
        setting: Mapping[str, Any],
        on_done: Callable[[int], None],
        on_failed: Callable[[int], None],
    ) -> None:
        self._setting = setting
        self._on_done = on_done
        self._on_failed = on_failed

    def options(self) -> dict[str, Any]:
        """Arguments of the producer."""
        ways: dict[str, dict[str, Any]] = {
            "key": {"plain": self._key, "async": self._key_later, "either": self._key_either},
            "value": {
                "plain": self._value,
                "async": self._value_later,
                "either": self._value_either,
            },
        }
        return {
            f"{what}_serializer": those[self._setting[what]]
            for what, those in ways.items()
            if what in self._setting
        }

    def key(self, record: PlannedRecord) -> Any:
        """What is sent as its key."""
        return record if "key" in self._setting else key_of(record)

    def value(self, record: PlannedRecord) -> Any:
        """What is sent as its value."""
        return record if "value" in self._setting else value_of(record)

    # -- the serializers: of keys with one argument, of values with three

    def _key(self, record: PlannedRecord) -> bytes | None:
        return self._written(record, key_of(record))

    async def _key_later(self, record: PlannedRecord) -> bytes | None:
        await self._wait(record)
        return self._key(record)

    def _key_either(self, record: PlannedRecord) -> Any:
        return self._key_later(record) if record.number % 2 else self._key(record)

    def _value(self, _topic: str, record: PlannedRecord, _headers: Any) -> bytes | None:
        return self._written(record, value_of(record))

    async def _value_later(self, topic: str, record: PlannedRecord, headers: Any) -> bytes | None:
        await self._wait(record)
        headers.append(WRITTEN)
        return self._value(topic, record, headers)

    def _value_either(self, topic: str, record: PlannedRecord, headers: Any) -> Any:
        way = self._value_later if record.number % 3 else self._value
        return way(topic, record, headers)

    async def _wait(self, record: PlannedRecord) -> None:
        waits = self._setting["waits"]
        await asyncio.sleep(waits[record.number % len(waits)])

    def _written(self, record: PlannedRecord, data: bytes | None) -> bytes | None:
        fails = self._setting.get("fails")
        if fails and record.number % fails == 0:
            self._on_failed(record.number)
            raise _RAISED[record.number // fails % len(_RAISED)]
        self._on_done(record.number)
        return data
