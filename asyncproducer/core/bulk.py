"""Many records at once: rows that are read one after the other, without an object for each.

`Rows` is a cursor: `read` makes one row the present one, as sizes and pointers where this
is compiled, as bytes where not. Who takes it in says so with `place`, and the rows keep
where each of them went: (outcome, index), as a Delivery does, once for each run of rows
that went in one after the other.
There are two kinds: `Objects`, what a caller iterates over, and `Table`, columns in
Arrow's layout.

A row that is not plain, or that something is wrong with, is not read (False). It goes the
way of a single record, which knows what to do with it, or what to say about it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncproducer.core.batch import (
    NO_HEADERS,
    ListedValues,
    ProducerBatch,
    Sizes,
    Values,
    encode_headers,
)
from asyncproducer.core.delivery import ACKNOWLEDGED, FAILED, PENDING, SPLIT, Delivery, Outcome
from asyncproducer.core.partitioner import murmur2
from asyncproducer.errors import IllegalStateError, SerializationError
from asyncproducer.records import Record, RecordMetadata

# ruff: noqa: F821 (names that bulk.pxd brings in where this module is compiled)
if TYPE_CHECKING:
    # Where this module is compiled, these are C functions, see bulk.pxd.
    COMPILED: bool
    PyByteArray_AS_STRING: Any
    PyByteArray_Resize: Any
    address: Any
    copied: Any
    hash_at: Any
    ints: Any
    is_ascii: Any
    octets: Any
    part: Any
    put_field: Any
    put_varint: Any
    wide_ints: Any

__all__ = [
    "Column",
    "HeaderColumn",
    "Numbers",
    "Objects",
    "Rows",
    "Table",
    "Tally",
    "gather",
    "murmur2_rows",
    "not_text",
]

#: Whether this module runs compiled, which C knows as a constant: what the other case needs is not
#: even there. A file that Python loads from source ends in .py.
globals()["COMPILED"] = not __file__.endswith(".py")

#: What the wire has room for.
_MAX_TIMESTAMP = 2**63 - 1
_MAX_PARTITION = 2**31 - 1

#: The most that a header adds to its name and its value: their lengths.
_HEADER_OVERHEAD = 10

#: What is kept of each run of rows: the first of them, the place of its outcome in `outcomes` or
#: -1 - the place of its error in `errors`, the first one's index there, the timestamp of all.
_RUN = 4

#: Whose size `gather` knows: of text it is near enough.
_SIZED = (bytes, str, bytearray)
#: It looks at the clock after the first item, and then after twice as many, but no more than so
#: many since it has looked last.
_MOST_BETWEEN_LOOKS = 64

_serials = count(1)

#: An outcome, the indexes of the first and the last row there, and how many rows it has.
Tally: TypeAlias = tuple[Outcome, int, int, int]


class Rows:
    """Some rows on their way in, and where each of them went."""

    # The row that was read last. `size` is that of key, value and headers together.
    topic: Any
    partition: int
    timestamp: int
    key_size: int
    value_size: int
    headers_size: int
    size: int
    key: Any
    value: Any
    headers: Any

    def __init__(self, room: int, topic: str | None) -> None:
        #: How many there are; at most `room`.
        self.count = 0
        #: Tells these rows from all others.
        self.serial = next(_serials)
        #: The timestamp of rows that bring none, in ms. Set by who takes them in.
        self.now = 0
        #: Whether far more of them come than brokers take at once, see TopicState.stays.
        self.abound = False
        #: Whether the last of them that went in did so in a topic that `stays`.
        self.stay = False
        #: Their bytes, of those that the last call of `Accumulator.append_spread` put in.
        self.written = 0
        self.topic = topic
        # What the three point at, where that is objects.
        self._key = b""
        self._value = b""
        self._headers = NO_HEADERS
        self.key = self._key
        self.value = self._value
        self.headers = self._headers
        self.headers_size = 1
        #: The batches that took rows in.
        self.outcomes: list[Outcome] = []
        #: Why others were refused, and the topic and partition that they were for.
        self.errors: list[tuple[Exception, Any, Any]] = []
        # Rows go in one after the other, none is left out: the next run begins behind the last.
        self._runs: Any = array("q", (0,)) * (_RUN * min(room, 4))
        #: How many of `_runs` are in use.
        self._run_end = 0
        #: How many of `outcomes` have their end, as far as was looked.
        self._ended = 0
        #: Rows whose failure somebody has looked at; or all of them.
        self._seen: set[int] = set()
        self._all_seen = False

    # -- reading ---------------------------------------------------------------------------

    def ends(self, row: int) -> bool:
        """Whether there is no row `row` any more: then it is the new `count`."""
        return row >= self.count

    def read(self, row: int) -> bool:
        """Make `row` the present one. False: it must go the way of a single record."""
        raise NotImplementedError

    def fill(self, batch: ProducerBatch, row: int, end: int, limit: int, most: int) -> int:
        """Append the rows from `row` on that are plain values for the present row's topic: what
        `ProducerBatch.append_values` does. Returns the first that is not in."""
        return row

    def record(self, row: int) -> Any:
        """The row as what a single record is: a Record, or a value."""
        raise NotImplementedError

    def drop(self) -> None:
        """All rows are in: what they were read from is not needed any more."""
        raise NotImplementedError

    def fields(self) -> tuple[bytes | None, bytes | None, bytes]:
        """Key, value and headers of the present row, as objects."""
        key = value = None
        if COMPILED:  # pragma: no cover - coverage sees no C
            if self.key_size >= 0:
                key = copied(self.key, self.key_size)
            if self.value_size >= 0:
                value = copied(self.value, self.value_size)
            return key, value, copied(self.headers, self.headers_size)
        if self.key_size >= 0:
            key = self._key
        if self.value_size >= 0:
            value = self._value
        return key, value, self._headers

    def key_partition(self, partition_count: int) -> int:
        """The partition of the present row's key, which is not null: as partition_for_key."""
        if COMPILED:  # pragma: no cover - coverage sees no C
            hashed = hash_at(self.key, self.key_size)
        else:
            hashed = murmur2(self._key)
        place: int = (hashed & 0x7FFFFFFF) % partition_count
        return place

    # -- where they went -------------------------------------------------------------------

    def place(self, row: int, outcome: Outcome, index: int) -> None:
        """The present row is the record at `index` of `outcome`."""
        self._put(row, self._slot(outcome), index, self.timestamp)

    def _place_run(self, row: int, batch: ProducerBatch, taken: int) -> None:
        """The rows from `row` on are the last `taken` records of the batch."""
        self._put(row, self._slot(batch), batch.count - taken, self.now)

    def _put(self, row: int, slot: int, index: int, timestamp: int) -> None:
        # (A view in a variable of this function's would cost each row of a table the making of it.)
        at = self._run_end
        if at > 0 and self._runs[at - 3] == slot:
            # Refused rows have no index.
            follows = index - self._runs[at - 2] == row - self._runs[at - 4] or slot < 0
            if follows and self._runs[at - 1] == timestamp:
                return
        if at == len(self._runs):
            self._grow(row)
        self._runs[at] = row
        self._runs[at + 1] = slot
        self._runs[at + 2] = index
        self._runs[at + 3] = timestamp
        self._run_end = at + _RUN

    def _grow(self, row: int) -> None:
        # As many as all rows have, if those before this one tell: often the last time.
        runs = len(self._runs) // _RUN
        expected = runs * self.count // max(1, row)
        grown = array("q", (0,)) * (_RUN * max(2 * runs + 1, expected + expected // 8))
        grown[: self._run_end] = self._runs
        self._runs = grown

    def _find(self, row: int) -> int:
        """Where the run of a row is in `_runs`."""
        runs = self._runs
        low = 0
        high = self._run_end // _RUN
        while high - low > 1:
            middle = (low + high) >> 1
            if runs[middle * _RUN] > row:
                high = middle
            else:
                low = middle
        return low * _RUN

    def _run_rows(self, at: int) -> int:
        """How many rows the run there has."""
        end = self.count if at + _RUN == self._run_end else self._runs[at + _RUN]
        rows: int = end - self._runs[at]
        return rows

    def _slot(self, outcome: Outcome) -> int:
        """Its place in `outcomes`, which it gets if it has none."""
        if outcome.taker != self.serial:
            outcome.taker = self.serial
            outcome.slot = len(self.outcomes)
            self.outcomes.append(outcome)
        return outcome.slot

    def placed(self, row: int, delivery: Delivery) -> None:
        """The row went in as a single record."""
        outcome = delivery._resolve()
        self._put(row, self._slot(outcome), delivery._index, delivery._timestamp)

    def refuse(self, row: int, error: Exception, topic: Any, partition: Any) -> None:
        """The row will not go in. Rows in succession may share an error."""
        last = self.errors[-1] if self.errors else None
        if last is None or last[0] is not error or last[1:] != (topic, partition):
            self.errors.append((error, topic, partition))
        self._put(row, -len(self.errors), 0, 0)

    def _delivery(self, row: int) -> Delivery:
        at = self._find(row)
        outcome: Outcome = self.outcomes[self._runs[at + 1]]
        delivery = outcome.delivery(self._runs[at + 2] + row - self._runs[at], -1, -1, -1)
        return delivery

    def unfinished(self) -> Delivery | None:
        """What to wait for next, until all rows have their end; None when they have."""
        while self._ended < len(self.outcomes):
            outcome = self.outcomes[self._ended]
            pending = _pending(outcome)
            if pending is not None:
                return pending.delivery(0, -1, -1, -1)
            self._ended += 1
        return None

    def clean(self) -> bool:
        """Whether every row is in the log."""
        return not self.errors and all(map(_acknowledged, self.outcomes))

    def failed(self, row: int) -> bool:
        """Whether the row has its end, and is not in the log."""
        if self._runs[self._find(row) + 1] < 0:
            return True
        delivery = self._delivery(row)
        outcome = delivery._resolve()
        return outcome.state == FAILED

    def failures(self) -> Iterator[int]:
        """The rows that are not in the log."""
        good = list(map(_acknowledged, self.outcomes))
        for at in range(0, self._run_end, _RUN):
            first, slot = self._runs[at], self._runs[at + 1]
            if slot < 0 or not good[slot]:
                for row in range(first, first + self._run_rows(at)):
                    if slot < 0 or self.failed(row):
                        yield row

    def error(self, row: int) -> tuple[Exception, Any, Any]:
        """Why a row of `failures` failed, its topic and its partition.

        It counts as looked at from now on.
        """
        slot: int = self._runs[self._find(row) + 1]
        if slot < 0:
            refusal: tuple[Exception, Any, Any] = self.errors[-1 - slot]
            return refusal
        delivery = self._delivery(row)
        outcome = delivery._resolve()
        if not self._all_seen and row not in self._seen:
            self._seen.add(row)
            outcome.observed += 1
        error = delivery.peek_exception()
        if error is None:
            raise IllegalStateError(f"row {row} has not failed")
        return error, outcome.topic, outcome.partition

    def look(self) -> None:
        """All failures count as looked at from now on."""
        if self._all_seen:
            return
        for row in self._seen:
            outcome = self._delivery(row)._resolve()
            outcome.observed -= 1
        self._all_seen = True
        for outcome, _, _, records in self.tally():
            outcome.observed += records

    def result(self, row: int) -> RecordMetadata | Exception:
        """Where the row is, or why it is not."""
        if self.failed(row):
            return self.error(row)[0]
        return self._delivery(row).result()

    def tally(self) -> list[Tally]:
        """How many rows are in which outcome."""
        places = len(self.outcomes)
        firsts = array("q", (0,)) * places
        lasts = array("q", (0,)) * places
        counts = array("q", (0,)) * places
        runs = self._runs
        run_end = self._run_end
        at = 0
        while at < run_end:
            first = runs[at]
            slot: int = runs[at + 1]
            index = runs[at + 2]
            at += _RUN
            if slot >= 0:
                rows = (runs[at] if at < run_end else self.count) - first
                if counts[slot] == 0:
                    firsts[slot] = index
                # A batch takes them in their order.
                lasts[slot] = index + rows - 1
                counts[slot] += rows
        tallies: list[Tally] = []
        for place, outcome in enumerate(self.outcomes):
            if outcome.state != SPLIT:
                tallies.append((outcome, firsts[place], lasts[place], counts[place]))
                continue
            for at in range(0, self._run_end, _RUN):
                if runs[at + 1] == place:
                    first = runs[at]
                    for row in range(first, first + self._run_rows(at)):
                        delivery = self._delivery(row)
                        part = delivery._resolve()
                        tallies.append((part, delivery._index, delivery._index, 1))
        return tallies


def _pending(outcome: Outcome) -> Outcome | None:
    """What of an outcome has no end yet: itself, or a part."""
    if outcome.state == PENDING:
        return outcome
    if outcome.state == SPLIT:
        for _, part in outcome.parts or ():
            pending = _pending(part)
            if pending is not None:
                return pending
    return None


def _acknowledged(outcome: Outcome) -> bool:
    if outcome.state == SPLIT:
        return all(_acknowledged(part) for _, part in outcome.parts or ())
    return outcome.state == ACKNOWLEDGED


# -- objects -------------------------------------------------------------------------------


def gather(
    iterator: Iterator[Any],
    items: list[Any],
    most: int,
    most_bytes: int,
    seconds: float,
    clock: Callable[[], float],
) -> None:
    """Append what an iterator gives next: at most so many items, about as many as have so many
    bytes, and what comes in so long. Raises what the iterator raises, behind those before it."""
    ends = clock() + seconds
    size = 0
    look = 1
    for taken, item in enumerate(iterator, 1):
        items.append(item)
        value = item[1] if type(item) is Record else item  # a key is small
        if type(value) in _SIZED:
            size += len(value)
        if taken == most or size >= most_bytes:
            return
        if taken == look:
            if clock() >= ends:
                return
            look += min(taken, _MOST_BETWEEN_LOOKS)


class Objects(Rows):
    """What a caller iterates over: bytes, Records of bytes, and what is not plain.

    The rows are those of `items` from `first` on, at most `room` of them where that is given. The
    list may be the caller's own, who may do with it what he likes meanwhile.
    """

    def __init__(
        self, items: list[Any], topic: str | None, room: int | None = None, first: int = 0
    ) -> None:
        count = len(items) - first
        if room is None:
            room = count
        super().__init__(room, topic)
        self.count = min(count, room)
        self._items = items
        #: The row of the first of `_items`.
        self._base = -first
        self._topic_of_all = topic
        # Of each row that was read, for its RecordMetadata.
        self._key_sizes = Sizes(room, -1)
        self._value_sizes = Sizes(room)
        self._values = ListedValues(items, self._value_sizes, self._base)

    def add(self, item: Any) -> None:
        """One more. There must be room."""
        self._items.append(item)
        self.count += 1

    def ends(self, row: int) -> bool:
        """See Rows."""
        if row < self.count and row - self._base >= len(self._items):
            self.count = row
        return row >= self.count

    def read(self, row: int) -> bool:
        """See Rows."""
        if self.ends(row):
            return False
        item = self._items[row - self._base]
        topic = self._topic_of_all
        key = None
        self.partition = -1
        self.timestamp = self.now
        if type(item) is Record:
            if COMPILED:  # pragma: no cover - coverage sees no C
                own = part(item, 0)
                value = part(item, 1)
                key = part(item, 2)
                headers = part(item, 3)
                partition = part(item, 4)
                timestamp = part(item, 5)
            else:
                own, value, key, headers, partition, timestamp = item
            if headers is not None:
                return False
            if topic is None:
                topic = own
            elif own is not topic and own != "" and own != topic:
                return False
            if partition is not None:
                if type(partition) is not int or not 0 <= partition <= _MAX_PARTITION:
                    return False
                self.partition = partition
            if timestamp is not None:
                if type(timestamp) is not int or not 0 <= timestamp <= _MAX_TIMESTAMP:
                    return False
                self.timestamp = timestamp
        else:
            value = item
        if type(topic) is not str:
            return False
        self.topic = topic
        self.key_size = self.value_size = -1
        self.size = 1
        if type(value) is bytes:
            self._value = value
            self.value = self._value
            self.value_size = len(self._value)
            self.size += self.value_size
        elif value is not None:
            return False
        if type(key) is bytes:
            self._key = key
            self.key = self._key
            self.key_size = len(self._key)
            self.size += self.key_size
        elif key is not None:
            return False
        self._key_sizes.put(row, self.key_size)
        self._value_sizes.put(row, self.value_size)
        return True

    def fill(self, batch: ProducerBatch, row: int, end: int, limit: int, most: int) -> int:
        """See Rows."""
        if self._topic_of_all is None:
            return row
        taken = batch.append_values(
            self._values, row - self._base, end - self._base, self.now, limit, most
        )
        if taken:
            self._place_run(row, batch, taken)
        return row + taken

    def record(self, row: int) -> Any:
        """See Rows."""
        return self._items[row - self._base]

    def drop(self) -> None:
        """See Rows. More may be added."""
        self._items = []
        self._base = self.count
        self._values = ListedValues(self._items, self._value_sizes, self._base)

    def placed(self, row: int, delivery: Delivery) -> None:
        """See Rows."""
        outcome = delivery._resolve()
        self._put(row, self._slot(outcome), delivery._index, delivery._timestamp)
        self._key_sizes.put(row, delivery._key_size)
        self._value_sizes.put(row, delivery._value_size)

    def _delivery(self, row: int) -> Delivery:
        at = self._find(row)
        outcome: Outcome = self.outcomes[self._runs[at + 1]]
        delivery = outcome.delivery(
            self._runs[at + 2] + row - self._runs[at],
            self._runs[at + 3],
            self._key_sizes.of(row),
            self._value_sizes.of(row),
        )
        return delivery


# -- columns -------------------------------------------------------------------------------


class Validity:
    """Which rows of a column are null: a bitmap that begins with bit `first`, or None."""

    def __init__(self, bitmap: memoryview | None, first: int) -> None:
        self._first = first
        self._all = bitmap is None
        #: How many bits there are.
        self._end = 0 if bitmap is None else 8 * len(bitmap)
        self._bitmap: Any = bitmap

    def has(self, row: int) -> bool:
        """Whether the row is not null."""
        if self._all:
            return True
        at = self._first + row
        if not 0 <= at < self._end:
            raise _damaged(f"row {row} has no bit that says whether it is null")
        return bool((self._bitmap[at >> 3] >> (at & 7)) & 1)


class Column(Values):
    """A column of bytes or text: each row is what is between two offsets.

    `offsets` are ints of 32 or 64 bits (formats "i" and "q"), the row 0 begins at the one
    with index `first`. `data` are the bytes; None for a column of lists, with `length`
    elements in all.
    """

    def __init__(
        self,
        offsets: memoryview,
        first: int,
        validity: Validity,
        data: memoryview | None,
        length: int = 0,
    ) -> None:
        self._first = first
        self._wide = offsets.format == "q"
        #: How many rows have both offsets.
        self._rows = len(offsets) - 1 - first
        if self._wide:
            self._wide_offsets: Any = offsets
        else:
            self._offsets: Any = offsets
        self._validity = validity
        self._end = length if data is None else len(data)
        self._data: Any = b"" if data is None else data
        #: Where the present row begins.
        self.start = 0
        if COMPILED:  # pragma: no cover - coverage sees no C
            self.base = address(self._data)
            if self._wide:
                self._wide_at = wide_ints(self._wide_offsets, first)
            else:
                self._narrow_at = ints(self._offsets, first)

    def locate(self, row: int) -> int:
        """Make `row` the present one. Returns its size, -1 for null."""
        return _locate(self, row)

    def present(self, size: int) -> bytes:
        """The present row, of `size` bytes, as an object."""
        return bytes(self._data[self.start : self.start + size])

    def get(self, row: int) -> bytes | None:
        """The row as an object."""
        size = self.locate(row)
        return None if size < 0 else self.present(size)

    def plain(self, first: int, end: int) -> Iterator[bytes | None]:
        """See Values."""
        with suppress(SerializationError):  # who reads that row alone hears of it
            for row in range(first, end):
                yield self.get(row)


# A function, not a method, so that C has it in place.
def _locate(column: Column, row: int) -> int:
    if not column._validity.has(row):
        return -1
    if not 0 <= row < column._rows:
        raise _damaged(f"row {row} of {column._rows}")
    if COMPILED:  # pragma: no cover - coverage sees no C
        if column._wide:
            start = column._wide_at[row]
            end = column._wide_at[row + 1]
        else:
            start = column._narrow_at[row]
            end = column._narrow_at[row + 1]
    else:
        place = column._first + row
        if column._wide:
            start = column._wide_offsets[place]
            end = column._wide_offsets[place + 1]
        else:
            start = column._offsets[place]
            end = column._offsets[place + 1]
    if start < 0 or end < start or end > column._end:
        raise _damaged(f"row {row} has the bytes from {start} to {end} of {column._end}")
    column.start = start
    if COMPILED:  # pragma: no cover - coverage sees no C
        column.at = column.base + start
    size: int = end - start
    return size


def murmur2_rows(column: Column, count: int) -> array[int]:
    """`murmur2` of each of the first `count` rows; 0 for null."""
    found = array("q", bytes(8 * count))
    hashes: Any = found
    for row in range(count):
        size = column.locate(row)
        if size >= 0:
            if COMPILED:  # pragma: no cover - coverage sees no C
                hashes[row] = hash_at(column.at, size)
            else:
                hashes[row] = murmur2(column.present(size))
    return found


class Numbers:
    """A column of 64-bit integers, the row 0 being `values[first]`."""

    def __init__(self, values: memoryview, first: int, validity: Validity) -> None:
        self._values: Any = values
        self._first = first
        self._rows = len(values) - first
        self._validity = validity

    def has(self, row: int) -> bool:
        """Whether the row is not null."""
        return self._validity.has(row)

    def get(self, row: int) -> int:
        """The row, which must not be null."""
        if not 0 <= row < self._rows:
            raise _damaged(f"row {row} of {self._rows}")
        return self._values[self._first + row]  # type: ignore[no-any-return]


class HeaderColumn:
    """A column of lists of (name, value). `present` tells which pairs are not null.

    Of the pairs, those from number `skipped` on are in `present`, `names` and `values`. What is
    None there is null in all rows.
    """

    def __init__(
        self,
        lists: Column,
        skipped: int,
        present: Validity,
        names: Column | None,
        values: Column | None,
    ) -> None:
        self._lists = lists
        self._skipped = skipped
        self._present = present
        self._names = names
        self._values = values
        self.buffer = bytearray(256)

    def pairs(self, row: int) -> list[tuple[str | None, bytes | None]] | None:
        """The headers of a row as objects; a name is None where it is null."""
        count = self._lists.locate(row)
        if count < 1:
            return None
        found: list[tuple[str | None, bytes | None]] = []
        start = self._lists.start - self._skipped
        for at in range(start, start + count):
            name = value = None
            if self._names is not None and self._present.has(at):
                name = self._names.get(at)
            if self._values is not None:
                value = self._values.get(at)
            try:
                found.append((None if name is None else name.decode(), value))
            except UnicodeDecodeError as error:
                raise not_text("a header's name", error) from error
        return found

    def encode(self, row: int) -> int:
        """Write the headers of a row into `buffer`. Returns their size, -1 if `pairs` must tell
        more: a name is null, or no text."""
        if not COMPILED:
            pairs = self.pairs(row) or []
            if None in [name for name, _ in pairs]:
                return -1
            self.buffer = bytearray(encode_headers(pairs))  # type: ignore[arg-type]  # no None
            return len(self.buffer)
        return self._encode(row)  # pragma: no cover - coverage sees no C

    def _encode(self, row: int) -> int:  # pragma: no cover - coverage sees no C
        count = self._lists.locate(row)
        if count < 0:
            count = 0
        start = self._lists.start - self._skipped
        names: Any = self._names
        values = self._values
        if names is None and count > 0:
            return -1
        room = _HEADER_OVERHEAD
        for index in range(start, start + count):
            if not self._present.has(index):
                return -1
            size = names.locate(index)
            if size < 0 or not (is_ascii(names.at, size) or _is_text(copied(names.at, size))):
                return -1
            room += size + _HEADER_OVERHEAD
            size = -1 if values is None else values.locate(index)
            if size > 0:
                room += size
        if room > len(self.buffer):
            PyByteArray_Resize(self.buffer, 2 * room)
        begin = PyByteArray_AS_STRING(self.buffer)
        at = put_varint(begin, count)
        for index in range(start, start + count):
            size = names.locate(index)
            at = put_field(at, size, names.at)
            if values is None:
                at = put_varint(at, -1)
            else:
                size = values.locate(index)
                at = put_field(at, size, values.at)
        return at - begin  # type: ignore[no-any-return]


def _is_text(data: bytes) -> bool:  # pragma: no cover - coverage sees no C
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _damaged(what: str) -> SerializationError:
    """For an array that does not have what it should."""
    return SerializationError(f"a damaged Arrow array: {what}; its validate(full=True) says more")


def not_text(what: str, error: UnicodeDecodeError) -> SerializationError:
    """For a column of text whose bytes are none."""
    return SerializationError(
        f"{what} is not UTF-8: {error.object[:80]!r}; the array is damaged, its "
        "validate(full=True) tells where"
    )


class Table(Rows):
    """Columns in Arrow's layout, with `rows` rows. A column that is None is null in all.

    `topics` are indexes of `names`; None where `topic` counts for all. Rows with an index that is
    none have no topic, and are refused like those where it is null. `partitions` may be
    null for "choose one", `timestamps` (ms) for "now".
    """

    def __init__(
        self,
        rows: int,
        *,
        topic: str | None,
        keys: Column | None,
        values: Column | None,
        headers: HeaderColumn | None = None,
        partitions: Numbers | None = None,
        timestamps: Numbers | None = None,
        topics: Numbers | None = None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(rows, topic)
        self.count = rows
        self._keys = keys
        self._values = values
        self._header_column = headers
        self._partitions = partitions
        self._timestamps = timestamps
        self._topics = topics
        self._names = list(names)
        others = (keys, headers, partitions, timestamps, topics)
        self._values_only = values is not None and all(column is None for column in others)

    def read(self, row: int) -> bool:
        """See Rows."""
        if self._topics is not None:
            topic = self._named(row)
            if topic is None:
                return False
            self.topic = topic
        self.partition = -1
        if self._partitions is not None and self._partitions.has(row):
            number = self._partitions.get(row)
            if not 0 <= number <= _MAX_PARTITION:
                return False
            self.partition = number
        self.timestamp = self.now
        if self._timestamps is not None and self._timestamps.has(row):
            number = self._timestamps.get(row)
            if number < 0:
                return False
            self.timestamp = number
        self.size = 0
        self.key_size = self.value_size = -1
        column = self._keys
        if column is not None:
            size = _locate(column, row)
            if size >= 0:
                self.key_size = size
                self.size += size
                if COMPILED:  # pragma: no cover - coverage sees no C
                    self.key = column.at
                else:
                    self.key = self._key = column.present(size)
        column = self._values
        if column is not None:
            size = _locate(column, row)
            if size >= 0:
                self.value_size = size
                self.size += size
                if COMPILED:  # pragma: no cover - coverage sees no C
                    self.value = column.at
                else:
                    self.value = self._value = column.present(size)
        headers = self._header_column
        if headers is not None:
            size = headers.encode(row)
            if size < 0:
                return False
            self.headers_size = size
            if COMPILED:  # pragma: no cover - coverage sees no C
                self.headers = octets(headers.buffer)
            else:
                self.headers = self._headers = bytes(headers.buffer)
        self.size += self.headers_size
        return True

    def _named(self, row: int) -> str | None:
        """The row's own topic; None where it is null, or has a number that is no name's."""
        topics: Any = self._topics
        number = topics.get(row) if topics.has(row) else -1
        return self._names[number] if 0 <= number < len(self._names) else None

    def fill(self, batch: ProducerBatch, row: int, end: int, limit: int, most: int) -> int:
        """See Rows. For tables of nothing but values."""
        column = self._values
        if column is None or not self._values_only:
            return row
        taken = batch.append_values(column, row, end, self.now, limit, most)
        if taken:
            self._place_run(row, batch, taken)
        return row + taken

    def record(self, row: int) -> Record:
        """See Rows."""
        topic: Any = self.topic
        if self._topics is not None:
            topic = self._named(row)
        headers: Any = None if self._header_column is None else self._header_column.pairs(row)
        partition = timestamp = None
        if self._partitions is not None and self._partitions.has(row):
            partition = self._partitions.get(row)
        if self._timestamps is not None and self._timestamps.has(row):
            timestamp = self._timestamps.get(row)
        return Record(
            topic,
            None if self._values is None else self._values.get(row),
            None if self._keys is None else self._keys.get(row),
            headers,
            partition,
            timestamp,
        )

    def drop(self) -> None:
        """See Rows."""
        self._keys = self._values = self._header_column = None
        self._partitions = self._timestamps = self._topics = None
