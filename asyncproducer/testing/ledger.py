"""Numbered records: what was sent, what the producer said of each one, and what the log holds.

    ledger = Ledger()
    for _ in range(1000):
        key, value = ledger.next_record()
        ledger.track(await producer.enqueue("t", value, key=key), now=loop.time())
    await producer.flush()
    for ...:                                   # what an independent consumer reads
        ledger.read(partition, offset, key, value)
    for ...:                                   # what the broker removed before that, if it did
        ledger.removed(partition, first, end)
    for ...:                                   # what could not be read, if anything
        ledger.unread(partition, first, end)
    verdict = ledger.verdict()
    assert verdict.clean, verdict

Record n has n in its value, and the n-th key, modulo the number of keys. They must be sent by one
task, one after the other: then the numbers ascend in each partition, whatever was retried.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import itertools
import secrets
from array import array
from collections.abc import Iterator, Sequence
from functools import partial

from asyncproducer.core.delivery import Delivery

__all__ = ["Ledger", "State", "Verdict", "percentile"]


class State(enum.IntEnum):
    """What the producer has said of a record: nothing yet, that it is in the log, or an error.

    NO, MAYBE and YES failed, by what the error said of the log. REFUSED: the call raised.
    """

    OPEN = 0
    ACKNOWLEDGED = 1
    NO = 2
    MAYBE = 3
    YES = 4
    REFUSED = 5
    ABORTED = 6


class _Fate(enum.Enum):
    """Of a record that should be in the log, and is not. See `Verdict`."""

    LOST = enum.auto()
    REMOVED = enum.auto()
    COMPACTED = enum.auto()
    UNREAD = enum.auto()


# Plain numbers: one is written and read for each record.
_OPEN, _ACKNOWLEDGED, _NO, _MAYBE, _YES, _REFUSED, _ABORTED = map(int, State)
_FAILED = {"no": _NO, "maybe": _MAYBE, "yes": _YES}


@dataclasses.dataclass(slots=True)
class Verdict:
    """What became of the records of a run."""

    sent: int = 0
    #: The call raised: nothing was sent.
    refused: int = 0
    acknowledged: int = 0
    #: Failed, by what the error said of the log.
    failed_no: int = 0
    failed_maybe: int = 0
    failed_yes: int = 0
    #: Of a transaction that was aborted, whatever was said of them before.
    aborted: int = 0
    #: Records of this run in the log, each time.
    in_log: int = 0
    #: Of those that failed with "maybe": in the log after all.
    maybe_in_log: int = 0
    #: Acknowledged, without an offset: by acks=0, or as what an earlier attempt had stored.
    place_unknown: int = 0
    #: In the log, of somebody else.
    foreign: int = 0
    #: On another partition than the first record of its key, which nobody has promised.
    moved_keys: int = 0

    # What nobody can judge: of what the producer says to be in the log, and was not found.

    #: Where retention or DeleteRecords have removed records.
    removed: int = 0
    #: In a compacted topic, with a later record of the same key behind it.
    compacted: int = 0
    #: Where the log could not be read.
    unread: int = 0

    # What must not be.

    #: Acknowledged, and neither in the log, where it was read, nor removed by the broker's rules.
    lost: int = 0
    #: There more than once: each time after the first.
    doubled: int = 0
    #: Behind a record of its partition that was sent later.
    reordered: int = 0
    #: On another partition than the first record of its key.
    split_keys: int = 0
    #: In the log, but not at the partition and offset that the acknowledgement told.
    misplaced: int = 0
    #: In the log, although the error, the call, or the end of its transaction said that it is not.
    denied: int = 0
    #: Not in the log, although the error said that it is.
    claimed: int = 0
    #: In the log with another key or value than was sent.
    altered: int = 0
    #: Neither acknowledged nor failed.
    unresolved: int = 0

    @property
    def failed(self) -> int:
        """Records whose delivery ended with an error."""
        return self.failed_no + self.failed_maybe + self.failed_yes

    @property
    def unexplained(self) -> int:
        """What contradicts what the producer said."""
        return self.misplaced + self.denied + self.claimed + self.altered + self.unresolved

    @property
    def unjudged(self) -> int:
        """Records that may be in the log, unread, or that the broker removed by its rules."""
        return self.removed + self.compacted + self.unread

    @property
    def clean(self) -> bool:
        """Nothing lost, doubled, reordered or unexplained. Some may have failed, or be unjudged."""
        wrong = self.lost + self.doubled + self.reordered + self.split_keys + self.unexplained
        return wrong == 0


class Ledger:
    """The books of one run, on one event loop. See the module's text.

    `keys`: how many, 0 for records without a key. `size`: bytes of a value, at least.
    `compacted`: the topic's cleanup.policy has compact.
    """

    def __init__(self, *, keys: int = 1000, size: int = 100, compacted: bool = False) -> None:
        self._keys = keys
        self._size = size
        self._compacted = compacted
        self._prefix = b"%s " % secrets.token_hex(8).encode()
        self._states = bytearray()
        self._partitions = array("i")
        self._offsets = array("q")
        self._seen = bytearray()
        self._placed = bytearray()
        #: Seconds from the call to the acknowledgement.
        self.latencies = array("d")
        #: One error of each kind, as it was told.
        self.errors: dict[str, str] = {}
        #: How many records have no end yet.
        self.open = 0
        self._last: dict[int, int] = {}
        self._place_of: dict[bytes | None, int] = {}
        self._removed: dict[int, list[range]] = {}
        self._unread: dict[int, range] = {}
        #: By partition and key, in a compacted topic: the last record's offset.
        self._key_ends: dict[tuple[int, bytes], int] = {}
        self._verdict = Verdict()

    def __len__(self) -> int:
        return len(self._states)

    def next_record(self) -> tuple[bytes | None, bytes]:
        """Key and value of the record that is to be sent next."""
        number = len(self._states)
        self._states.append(_OPEN)
        self._partitions.append(-1)
        self._offsets.append(-1)
        return self._record(number)

    def _record(self, number: int) -> tuple[bytes | None, bytes]:
        key = b"key-%d" % (number % self._keys) if self._keys else None
        return key, (self._prefix + b"%d " % number).ljust(self._size, b".")

    def track(self, delivery: Delivery, now: float) -> None:
        """The last record was taken; `now`: the loop's time before the call."""
        self.open += 1
        delivery.add_done_callback(partial(self._ended, len(self._states) - 1, now))

    def refuse(self, error: Exception) -> None:
        """The call for the last record raised this."""
        self._states[-1] = _REFUSED
        self._note(error)

    def abort(self, first: int) -> None:
        """The records from this number on are of a transaction that was aborted.

        Who reads what is committed must not find them.
        """
        for number in range(first, len(self._states)):
            self._states[number] = _ABORTED

    def _ended(self, number: int, since: float, delivery: Delivery) -> None:
        self.open -= 1
        error = delivery.exception()
        if self._states[number] == _ABORTED:
            return
        if error is None:
            metadata = delivery.result()
            self._states[number] = _ACKNOWLEDGED
            self._partitions[number] = metadata.partition
            self._offsets[number] = metadata.offset
            self.latencies.append(asyncio.get_running_loop().time() - since)
        else:
            self._states[number] = _FAILED[error.persisted]
            self._partitions[number] = error.partition
            self._note(error)

    def _note(self, error: Exception) -> None:
        self.errors.setdefault(type(error).__name__, str(error))

    def read(self, partition: int, offset: int, key: bytes | None, value: bytes | None) -> None:
        """A record that the log holds. The records of a partition must come in their order."""
        verdict = self._verdict
        if self._compacted and key is not None:
            self._key_ends[partition, key] = offset  # whosever it is
        if value is None or not value.startswith(self._prefix):
            verdict.foreign += 1
            return
        verdict.in_log += 1
        digits = value[len(self._prefix) :].split(b" ", 1)[0]
        number = int(digits) if digits.isdigit() else -1
        if not 0 <= number < len(self._states) or (key, value) != self._record(number):
            verdict.altered += 1
            return
        if not self._seen:
            self._seen = bytearray(len(self._states))
            self._placed = bytearray(len(self._states))
        if (self._partitions[number], self._offsets[number]) == (partition, offset):
            self._placed[number] = 1
        if self._seen[number]:
            verdict.doubled += 1
            return
        self._seen[number] = 1
        if number < self._last.get(partition, -1):
            verdict.reordered += 1
        else:
            self._last[partition] = number
        if key is not None and self._place_of.setdefault(key, partition) != partition:
            verdict.split_keys += 1
        state = self._states[number]
        verdict.denied += state in (_NO, _REFUSED, _ABORTED)
        verdict.maybe_in_log += state == _MAYBE

    def removed(self, partition: int, first: int, end: int) -> None:
        """The log of this partition starts at `end` now: what was from `first` on is not there.

        What was not read of it is neither lost nor kept: nobody can tell.
        """
        self._removed.setdefault(partition, []).append(range(first, end))

    def unread(self, partition: int, first: int, end: int) -> None:
        """The log of this partition ends at `end`, and could not be read from `first` on."""
        self._unread[partition] = range(first, end)

    @property
    def unread_from(self) -> dict[int, int]:
        """The first offset that could not be read, of those partitions where there is one."""
        return {partition: part.start for partition, part in self._unread.items()}

    @property
    def log_starts(self) -> dict[int, int]:
        """Where the logs start now, of those partitions of which something was removed."""
        return {partition: parts[-1].stop for partition, parts in self._removed.items()}

    def verdict(self) -> Verdict:
        """What became of all records, by what was read so far."""
        states, offsets = self._states, self._offsets
        seen = self._seen or bytes(len(states))
        placed = self._placed or seen
        absent = self._absent()
        why = collections.Counter(absent.values())
        said = collections.Counter(states[n] for n, fate in absent.items() if fate is _Fate.LOST)
        return dataclasses.replace(
            self._verdict,
            sent=len(states),
            refused=states.count(_REFUSED),
            aborted=states.count(_ABORTED),
            acknowledged=states.count(_ACKNOWLEDGED),
            failed_no=states.count(_NO),
            failed_maybe=states.count(_MAYBE),
            failed_yes=states.count(_YES),
            unresolved=states.count(_OPEN),
            lost=said[_ACKNOWLEDGED],
            removed=why[_Fate.REMOVED],
            compacted=why[_Fate.COMPACTED],
            unread=why[_Fate.UNREAD],
            misplaced=sum(
                s == _ACKNOWLEDGED and offset >= 0 and found and not right
                for s, offset, found, right in zip(states, offsets, seen, placed, strict=True)
            ),
            claimed=said[_YES],
            place_unknown=sum(
                s == _ACKNOWLEDGED and offset < 0 for s, offset in zip(states, offsets, strict=True)
            ),
        )

    def ranges(self) -> Iterator[tuple[State, int, int]]:
        """The state of all records so far, with the first and the last number that have it."""
        first = 0
        for state, same in itertools.groupby(self._states):
            last = first + sum(1 for _ in same) - 1
            yield State(state), first, last
            first = last + 1

    def was_read(self, number: int) -> bool:
        """Whether the log holds the record of this number, by what was read so far."""
        return bool(self._seen) and bool(self._seen[number])

    def missing(self) -> list[tuple[int, int, int]]:
        """Number, and told partition and offset, of acknowledged records that are lost."""
        return [
            (number, self._partitions[number], self._offsets[number])
            for number, fate in self._absent().items()
            if fate is _Fate.LOST and self._states[number] == _ACKNOWLEDGED
        ]

    def _absent(self) -> dict[int, _Fate]:
        """Why each record was not found in the log of which the producer says that it is there."""
        seen = self._seen or bytes(len(self._states))
        return {
            number: self._fate(number)
            for number, state in enumerate(self._states)
            if state in (_ACKNOWLEDGED, _YES) and not seen[number]
        }

    def _fate(self, number: int) -> _Fate:
        """Without an offset it may have been anywhere in its partition."""
        partition, offset = self._partitions[number], self._offsets[number]
        parts = self._removed.get(partition, ())
        if any(offset in part or offset < 0 for part in parts):
            return _Fate.REMOVED
        if self._compacted:
            key, _ = self._record(number)
            if key is not None and self._key_ends.get((partition, key), -1) > offset:
                return _Fate.COMPACTED
        unread = self._unread.get(partition, ())
        # In a compacted topic, a later record of the key may be among these.
        if offset in unread or (unread and (offset < 0 or self._compacted)):
            return _Fate.UNREAD
        return _Fate.LOST


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed; 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
