from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer._implementation import IMPLEMENTATION
from asyncproducer.arrow import Columns, murmur2_of, open_table
from asyncproducer.core.accumulator import Accumulator, TopicState
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch, encode_headers, read_records
from asyncproducer.core.bulk import (
    Column,
    HeaderColumn,
    Numbers,
    Objects,
    Rows,
    Table,
    Validity,
)
from asyncproducer.core.compression import codec
from asyncproducer.core.delivery import Delivery, Failure
from asyncproducer.core.metadata import PartitionMetadata, TopicMetadata
from asyncproducer.core.partitioner import murmur2, partition_for_key
from asyncproducer.errors import BrokerRejected, RecordTooLarge, SerializationError
from asyncproducer.records import Record, RecordMetadata
from tests.core.memory import Undivided

T0 = 1_700_000_000_000
#: How many rows a run may have, small enough to end in the middle of something.
RUN = 7
#: More than any record here has.
MOST = 100_000

PARTITIONS = 3

BYTES = (
    st.none() | st.binary(max_size=90) | st.sampled_from([b"", bytes(63), bytes(64), bytes(300)])
)
RECORDS = st.lists(
    st.builds(
        Record,
        topic=st.just("t"),
        value=BYTES,
        key=BYTES,
        headers=st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3),
        partition=st.none() | st.integers(0, PARTITIONS - 1),
        timestamp=st.integers(T0 - 1000, T0 + 100_000),
    ),
    max_size=60,
)


class Memory(Undivided):
    """Counts. Nobody waits."""

    def __init__(self, total: int) -> None:
        self.total = self.available = total

    def try_reserve(self, size: int, share: None = None, *, spares: bool = False) -> bool:
        if size > self.available:
            return False
        self.available -= size
        return True

    def release(self, size: int) -> None:
        self.available += size


def accumulator(
    *, batch_max_bytes: int, compression: str, total: int = 10**9
) -> tuple[Accumulator, TopicState, Memory]:
    numbers = count()
    memory = Memory(total)
    made = Accumulator(
        memory,
        batch_size=400,
        batch_max_bytes=batch_max_bytes,
        linger=1.0,
        delivery_timeout=120.0,
        retry_backoff=ExponentialBackoff(0.1, 1.0, random=lambda: 0.5),
        random=lambda: next(numbers) * 7,
        codec=None if compression == "none" else codec(compression),
    )
    partitions = tuple(PartitionMetadata(n, 1, 0) for n in range(PARTITIONS))
    return made, made.update_topic(TopicMetadata("t", partitions), 0.0), memory


def take(made: Accumulator, topic: TopicState, rows: Rows) -> int:
    """As intake does it. Returns the first row that did not get in."""
    row = 0
    while row < rows.count:
        assert rows.read(row)
        place = rows.partition
        if place < 0 and rows.key_size >= 0:
            place = rows.key_partition(PARTITIONS)
        batch = made.append_row(topic, place, rows)
        if batch is not None:
            rows.place(row, batch, batch.count - 1)
        else:
            key, value, headers = rows.fields()
            delivery = made.append(topic, place, rows.timestamp, key, value, headers, 0.0)
            if delivery is None:
                return row
            rows.placed(row, delivery)
        row += 1
        end = min(rows.count, row + RUN)
        if place < 0:
            row = made.append_run(topic, rows, row, end, MOST)
        else:
            row = made.append_spread(topic, rows, row, end, MOST, True)
    return rows.count


def batches(topic: TopicState) -> list[ProducerBatch]:
    return [batch for queue in topic.queues if queue is not None for batch in queue.batches]


def wire(batch: ProducerBatch) -> bytes:
    batch.close()
    if batch.needs_compression():
        assert batch.codec is not None
        batch.compressed(batch.codec.compress(batch.uncompressed()))
    batch.seal()
    return b"".join(batch.buffers())


def acknowledge_twins(topic: TopicState, other: TopicState) -> None:
    """The batches of both are the same, to the last byte."""
    assert [wire(batch) for batch in batches(topic)] == [wire(batch) for batch in batches(other)]
    for number, (batch, twin) in enumerate(zip(batches(topic), batches(other), strict=True)):
        assert batch.max_record_size == twin.max_record_size
        batch.acknowledge(1000 * number, -1)
        twin.acknowledge(1000 * number, -1)


def place_of(rows: Rows, row: int) -> tuple[str, int, int]:
    result = rows.result(row)
    assert isinstance(result, RecordMetadata)
    return result[:3]


def table_of(records: list[Record]) -> Table:
    table = pa.table(
        {
            "key": pa.array([r.key for r in records], pa.binary()),
            "value": pa.array([r.value for r in records], pa.binary()),
            "headers": pa.array([r.headers for r in records], pa.map_(pa.string(), pa.binary())),
            "partition": pa.array([r.partition for r in records], pa.int32()),
            "timestamp": pa.array([r.timestamp for r in records], pa.timestamp("ms", "UTC")),
        }
    )
    columns = Columns(
        table.schema,
        "t",
        topic_column=None,
        **{name: name for name in table.column_names},
    )
    (rows,) = columns.tables(open_table(table))
    return rows


@given(RECORDS, st.sampled_from(["none", "gzip"]), st.sampled_from([0, 1500]))
def test_rows_of_a_table_make_the_same_bytes_as_single_records(
    records: list[Record], compression: str, batch_max_bytes: int
) -> None:
    if not records:
        return
    options: Any = {"batch_max_bytes": batch_max_bytes, "compression": compression}
    one, topic, memory = accumulator(**options)
    other, other_topic, other_memory = accumulator(**options)
    rows = table_of(records)
    assert take(one, topic, rows) == len(records)
    append_open: Callable[..., Delivery | None] = other.append_open
    append: Callable[..., Delivery | None] = other.append
    deliveries = []
    for record in records:
        headers = encode_headers(record.headers)  # type: ignore[arg-type]  # pairs
        place = record.partition
        if place is None:
            place = -1 if record.key is None else partition_for_key(record.key, PARTITIONS)
        size = len(record.key or b"") + len(record.value or b"") + len(headers)
        parts: tuple[Any, ...] = (
            other_topic,
            place,
            record.timestamp,
            record.key,
            record.value,
            headers,
        )
        delivery = append_open(*parts, size) or append(*parts, 0.0)
        assert delivery is not None
        deliveries.append(delivery)
    assert memory.available == other_memory.available
    acknowledge_twins(topic, other_topic)
    # A table does not keep sizes and timestamps.
    assert [place_of(rows, n) for n in range(len(records))] == [
        delivery.result()[:3] for delivery in deliveries
    ]


def values_of(items: list[bytes | None]) -> Table:
    table = pa.table({"value": pa.array(items, pa.binary())})
    names: Any = dict.fromkeys(("key", "headers", "partition", "timestamp"))
    columns = Columns(table.schema, "t", topic_column=None, value="value", **names)
    (rows,) = columns.tables(open_table(table))
    return rows


@given(
    st.lists(st.none() | st.binary(max_size=90), min_size=1, max_size=80),
    st.sampled_from(["none", "gzip"]),
    st.sampled_from([0, 1500]),
    st.booleans(),
)
def test_plain_values_make_the_same_bytes_as_single_records(
    items: list[bytes | None], compression: str, batch_max_bytes: int, is_table: bool
) -> None:
    options: Any = {"batch_max_bytes": batch_max_bytes, "compression": compression}
    one, topic, memory = accumulator(**options)
    other, other_topic, other_memory = accumulator(**options)
    rows: Rows = values_of(items) if is_table else Objects(list(items), "t")
    rows.now = 7
    assert take(one, topic, rows) == len(items)
    deliveries = []
    for item in items:
        size = len(item or b"") + 1
        delivery = other.append_open(other_topic, -1, 7, None, item, NO_HEADERS, size)
        delivery = delivery or other.append(other_topic, -1, 7, None, item, NO_HEADERS, 0.0)
        assert delivery is not None
        # One that is not kept is used again for the next.
        deliveries.append(delivery)
    assert memory.available == other_memory.available
    acknowledge_twins(topic, other_topic)
    wanted = [delivery.result() for delivery in deliveries]
    if is_table:
        assert [place_of(rows, n) for n in range(len(items))] == [each[:3] for each in wanted]
    else:
        assert [rows.result(n) for n in range(len(items))] == wanted


def test_a_run_ends_before_anything_else_is_due() -> None:
    """Of records that all go the same way only those that decide something go alone."""
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression="none")
    rows = Objects([bytes(30)] * 1000, "t")
    alone = 0
    row = 0
    while row < rows.count:
        before = row
        row = made.append_run(topic, rows, row, rows.count, MOST)
        if row == rows.count:
            break
        assert rows.read(row)
        if made.append_row(topic, -1, rows) is None:
            assert made.append(topic, -1, 0, None, bytes(30), NO_HEADERS, 0.0) is not None
        row += 1
        alone += 1
        assert row > before
    assert sum(batch.count for batch in batches(topic)) == 1000
    # Batches of 400 bytes hold 9 of 38 bytes or so: at each boundary a few go alone.
    assert 1000 / 20 < alone < 1000 / 2


@pytest.mark.parametrize("plain", [True, False])
def test_rows_that_abound_fill_one_batch_after_the_other(plain: bool) -> None:
    """A run goes on as far as there is memory for the batch."""
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression="none")
    made.stay(topic, True)
    values = [b"%030d" % n for n in range(3000)]
    rows = Objects(values if plain else [Record("t", value) for value in values], "t")
    rows.now = 1
    assert take(made, topic, rows) == 3000
    *full, _ = rows.outcomes
    assert all(isinstance(batch, ProducerBatch) and batch.size > 9900 for batch in full)
    assert [record.value for batch in rows.outcomes for record in read(batch)] == values


def read(batch: Any) -> list[Any]:
    return list(read_records(batch.uncompressed(), batch.count))


def test_a_run_ends_where_the_list_does_by_now() -> None:
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression="none")
    items = [b"%d" % n for n in range(20)]
    rows = Objects(items, "t", 15, 2)
    assert rows.count == 15
    assert made.append(topic, -1, 0, None, items[2], NO_HEADERS, 0.0) is not None
    assert rows.read(0)
    assert made.append_run(topic, rows, 1, 5, MOST) == 5
    del items[9:]
    assert made.append_run(topic, rows, 5, 15, MOST) == 7
    assert not rows.read(7)
    assert rows.ends(7)
    assert rows.count == 7
    (batch,) = batches(topic)
    records = read_records(batch.uncompressed(), batch.count)
    assert [record.value for record in records] == [b"%d" % n for n in range(2, 9)]


def test_a_run_takes_no_row_that_says_where_it_goes() -> None:
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression="none")
    items = [b"a", b"b", Record("t", b"c", partition=3), b"d", Record("t", b"e", b"key"), b"f"]
    rows = Objects(items, "t")
    assert made.append_run(topic, rows, 0, 6, MOST) == 0  # there is no batch yet
    assert made.append(topic, -1, 0, None, b"a", NO_HEADERS, 0.0) is not None
    assert rows.read(0)
    assert made.append_run(topic, rows, 1, 6, MOST) == 2
    assert made.append_run(topic, rows, 3, 6, MOST) == 4
    assert made.append_run(topic, rows, 5, 5, MOST) == 5
    assert made.append_run(topic, rows, 5, 6, MOST) == 6
    (batch,) = batches(topic)
    assert batch.count == 4


@pytest.mark.parametrize(
    ("stop", "most", "hashes"),
    [
        (Record("t", b"v"), MOST, True),  # it goes where others do
        (Record("t", b"v", b"key"), MOST, False),
        (Record("t", b"v", b"key", headers=[("h", b"")]), MOST, True),
        (Record("t", bytes(60), b"key"), 50, True),
        (Record("t", b"v", partition=PARTITIONS), MOST, True),
        (Record("t", b"v", partition=0), MOST, True),  # there is no batch yet
    ],
    ids=["no place", "no hash", "headers", "large", "no such partition", "no batch"],
)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_rows_with_a_place_go_in_as_long_as_nothing_else_is_due(
    stop: Record, most: int, hashes: bool, compression: str
) -> None:
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression=compression)
    place = partition_for_key(b"key", PARTITIONS)
    assert place == 1
    plain = Record("t", b"v", b"key") if hashes else Record("t", b"v", partition=place)
    rows = Objects([plain, plain, plain, stop, plain], None)
    assert made.append_spread(topic, rows, 0, 5, most, hashes) == 0  # there is no batch yet
    assert rows.written == 0
    assert made.append(topic, place, 0, None, b"a", NO_HEADERS, 0.0) is not None
    # In plain Python, and where records are compressed, it saves nothing.
    some, all_ = (2, 3) if IMPLEMENTATION == "compiled" and compression == "none" else (0, 0)
    assert made.append_spread(topic, rows, 0, 2, most, hashes) == some
    assert made.append_spread(topic, rows, some, 5, most, hashes) == all_
    assert rows.written == (all_ - some) * (len(b"v") + len(plain.key or b"") + 1)
    (batch,) = batches(topic)
    assert batch.count == 1 + all_
    batch.acknowledge(70, -1)
    assert [place_of(rows, row) for row in range(all_)] == [
        ("t", place, 71 + row) for row in range(all_)
    ]


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_run_takes_no_row_that_is_larger_than_a_record_may_be(table: bool, plain: bool) -> None:
    made, topic, _ = accumulator(batch_max_bytes=10_000, compression="none")
    large = bytes(99) if plain else Record("t", bytes(99))
    rows: Rows = Objects([b"a", b"b", large, b"c"], "t")
    if table:
        rows = values_of([b"a", b"b", bytes(99), b"c"])
    assert made.append(topic, -1, 0, None, b"a", NO_HEADERS, 0.0) is not None
    assert rows.read(0)
    assert made.append_run(topic, rows, 1, 4, 99) == 2
    assert made.append_run(topic, rows, 2, 4, 99) == 2
    assert made.append_run(topic, rows, 2, 4, 100) == 4


@given(RECORDS)
def test_rows_that_are_objects_make_the_same_metadata_as_single_records(
    records: list[Record],
) -> None:
    records = [record._replace(headers=None) for record in records]
    made, topic, _ = accumulator(batch_max_bytes=1500, compression="none")
    rows = Objects(list(records), "t")
    assert take(made, topic, rows) == len(records)
    for batch in batches(topic):
        batch.acknowledge(7, -1)
    results = [rows.result(row) for row in range(rows.count)]
    sizes = [
        tuple(-1 if data is None else len(data) for data in (record.key, record.value))
        for record in records
    ]
    assert [r[3:] for r in results if isinstance(r, RecordMetadata)] == [
        (record.timestamp, *size) for record, size in zip(records, sizes, strict=True)
    ]


def test_rows_stop_where_memory_ends_and_what_is_in_stays() -> None:
    made, topic, memory = accumulator(batch_max_bytes=0, compression="none", total=1000)
    rows = Objects([b"%0100d" % n for n in range(50)], "t")
    stopped = take(made, topic, rows)
    assert 4 <= stopped < 10
    assert memory.available < 400
    assert sum(batch.count for batch in batches(topic)) == stopped


@pytest.mark.parametrize(
    "item",
    [
        "text",
        bytearray(b"x"),
        5,
        Record("t", "text"),
        Record("t", b"v", "text"),
        Record("t", b"v", headers={"h": b"1"}),
        Record("t", b"v", partition=-1),
        Record("t", b"v", partition=2**40),
        Record("t", b"v", partition=True),
        Record("t", b"v", timestamp=-1),
        Record("t", b"v", timestamp=2**63),
        Record("other", b"v"),
    ],
    ids=repr,
)
def test_what_is_not_plain_is_not_read(item: Any) -> None:
    rows = Objects([item], "t")
    assert not rows.read(0)
    assert rows.record(0) is item


def test_a_record_brings_its_topic_where_there_is_none_for_all() -> None:
    rows = Objects([Record("a", b"1"), Record("b", b"2"), b"3", Record("", b"4")], None)
    assert rows.read(0)
    assert rows.topic == "a"
    assert rows.read(1)
    assert rows.topic == "b"
    assert not rows.read(2)
    rows = Objects([Record("", b"1"), Record("all", b"2")], "all")
    assert rows.read(0)
    assert rows.topic == "all"
    assert rows.read(1)


def test_more_can_be_added_after_a_drop() -> None:
    made, topic, _ = accumulator(batch_max_bytes=0, compression="none")
    rows = Objects([], "t", 3)
    for row, value in enumerate([b"a", b"b", b"c"]):
        rows.add(value)
        assert rows.record(row) == value
        assert rows.read(row)
        assert rows.fields() == (None, value, b"\x00")
        batch = made.append_row(topic, 0, rows)
        if batch is None:
            delivery = made.append(topic, 0, T0, None, value, b"\x00", 0.0)
            assert delivery is not None
            rows.placed(row, delivery)
        else:
            rows.place(row, batch, batch.count - 1)
        rows.drop()
    (batch,) = batches(topic)
    batch.acknowledge(5, -1)
    assert [place_of(rows, row)[2] for row in range(3)] == [5, 6, 7]


def test_two_bulks_that_share_a_batch_keep_their_own_places() -> None:
    made, topic, _ = accumulator(batch_max_bytes=0, compression="none")
    bulks = [Objects([b"x"] * 4, "t"), Objects([b"y"] * 4, "t")]
    for row in range(4):
        for rows in bulks:
            assert rows.read(row)
            delivery = made.append(topic, 0, T0, None, rows.fields()[1], b"\x00", 0.0)
            assert delivery is not None
            rows.placed(row, delivery)
    (batch,) = batches(topic)
    assert batch.count == 8
    batch.acknowledge(100, -1)
    assert [place_of(rows, n)[2] for rows in bulks for n in range(4)] == [
        *range(100, 108, 2),
        *range(101, 109, 2),
    ]
    totals: dict[str, int] = {}
    for rows, name in zip(bulks, "xy", strict=True):
        totals[name] = sum(records for _, _, _, records in rows.tally())
    assert totals == {"x": 4, "y": 4}


def full(values: int = 12) -> tuple[Objects, ProducerBatch]:
    made, topic, _ = accumulator(batch_max_bytes=5000, compression="none")
    rows = Objects([Record("t", b"%030d" % n, partition=0) for n in range(values)], "t")
    assert take(made, topic, rows) == values
    (batch,) = batches(topic)
    batch.close()
    return rows, batch


@pytest.mark.parametrize("together", [0, 1, 5, 40, 99, 190])
@pytest.mark.parametrize("apart", [1, 3])
def test_each_row_is_found_however_runs_are_spread(together: int, apart: int) -> None:
    """There is room for all runs, also where the first rows tell little of the others."""
    batches = [
        ProducerBatch("t", number, write_limit=MOST, created_at=0.0) for number in range(PARTITIONS)
    ]
    rows = Objects([b"v"] * 200, "t")
    places: list[tuple[int, int]] = []
    for row in range(rows.count):
        number = 0 if row < together else row // apart % PARTITIONS
        assert rows.read(row)
        assert batches[number].try_append(T0, None, b"v", NO_HEADERS)
        places.append((number, batches[number].count - 1))
        rows.place(row, batches[number], batches[number].count - 1)
    for batch in batches:
        batch.acknowledge(0, -1)
    found: list[Any] = [rows.result(row) for row in range(rows.count)]
    assert [(each.partition, each.offset) for each in found] == places
    assert sorted(
        (outcome.partition, records) for outcome, _, _, records in rows.tally()
    ) == sorted((batch.partition, batch.count) for batch in batches if batch.count)


def test_rows_follow_a_split() -> None:
    rows, batch = full()
    parts = batch.split(200)
    assert len(parts) > 2
    assert not rows.clean()
    waited = []
    for number, part in enumerate(parts):
        delivery = rows.unfinished()
        assert delivery is not None
        assert not delivery.done()
        waited.append(delivery)
        part.acknowledge(1000 * number, -1)
    assert rows.unfinished() is None
    assert all(delivery.done() for delivery in waited)
    assert rows.clean()
    assert list(rows.failures()) == []
    expected = [1000 * n + at for n, part in enumerate(parts) for at in range(part.count)]
    assert [place_of(rows, row)[2] for row in range(12)] == expected
    found: dict[int, int] = {}
    for outcome, first, last, records in rows.tally():
        assert first == last
        found[outcome.base_offset] = found.get(outcome.base_offset, 0) + records
    assert found == {1000 * n: part.count for n, part in enumerate(parts)}


def test_a_part_that_fails_fails_its_rows_only_and_looking_is_counted_once() -> None:
    rows, batch = full()
    parts = batch.split(200)
    for part in parts[1:]:
        part.acknowledge(0, -1)
    parts[0].fail(Failure(BrokerRejected, "no", code=10))
    failed = list(rows.failures())
    assert failed == list(range(parts[0].count))
    assert parts[0].observed == 0
    for _ in range(2):
        errors = [rows.error(row) for row in failed]
    assert {(type(error), topic, partition) for error, topic, partition in errors} == {
        (BrokerRejected, "t", 0)
    }
    assert isinstance(rows.result(0), BrokerRejected)
    assert parts[0].observed == parts[0].count
    assert isinstance(rows.result(11), RecordMetadata)


def test_a_look_at_all_failures_counts_each_row_once() -> None:
    rows, batch = full()
    batch.fail(Failure(BrokerRejected, "no"))
    rows.error(3)
    rows.look()
    assert batch.observed == 12
    rows.look()
    rows.error(5)
    assert batch.observed == 12


def test_refusals_in_succession_may_share_an_error() -> None:
    rows = Objects([b""] * 4, "t")
    error = RecordTooLarge("too large")
    for row, partition in enumerate([1, 1, 2, 2]):
        rows.refuse(row, error, "t", partition)
    assert len(rows.errors) == 2
    assert [rows.error(row)[2] for row in range(4)] == [1, 1, 2, 2]
    assert list(rows.failures()) == [0, 1, 2, 3]
    assert rows.result(3) is error


@pytest.mark.parametrize("offsets", [[0, 9], [-1, 2], [3, 2]], ids=str)
@pytest.mark.parametrize("code", ["i", "q"])
def test_offsets_outside_of_the_data_are_refused(offsets: list[int], code: Any) -> None:
    column = Column(memoryview(array(code, offsets)), 0, Validity(None, 0), memoryview(b"abcd"))
    rows = Table(1, topic="t", keys=None, values=column)
    with pytest.raises(SerializationError, match=r"damaged.* of 4"):
        rows.read(0)


def numbers(*values: int, bits: bytes | None = None) -> Numbers:
    bitmap = None if bits is None else memoryview(bits)
    return Numbers(memoryview(array("q", values)), 0, Validity(bitmap, 0))


def texts(*ends: int, length: int = 0, bits: bytes | None = None) -> Column:
    data = None if length else memoryview(b"texts")
    bitmap = None if bits is None else memoryview(bits)
    return Column(memoryview(array("i", ends)), 0, Validity(bitmap, 0), data, length)


LAST = 8


@pytest.mark.parametrize(
    "columns",
    [
        {"values": texts(*[0] * (LAST + 1))},
        {"keys": texts()},
        {"timestamps": numbers(*[1] * LAST)},
        {"partitions": numbers(*[1] * 20, bits=b"\xff")},
        {"topics": numbers(*[0] * LAST)},
        {
            "headers": HeaderColumn(
                texts(*range(20), length=20), 0, Validity(None, 0), texts(*[0] * 9), None
            )
        },
        # Behind a row that is null, so that nobody has looked at its end.
        {
            "headers": HeaderColumn(
                texts(*[5] * LAST, 3, 6, length=9, bits=b"\x7f\xff"),
                5,
                Validity(memoryview(b"\xff"), 0),
                texts(0, 1, 2, 3),
                None,
            )
        },
    ],
    ids=["values", "nothing", "numbers", "nulls", "topics", "headers", "earlier headers"],
)
def test_a_row_that_a_column_does_not_have_is_a_damaged_array(columns: dict[str, Any]) -> None:
    rows = Table(LAST + 2, topic="t", names=["t"], **{"keys": None, "values": None, **columns})
    for read in (rows.read, rows.record):
        with pytest.raises(SerializationError, match="a damaged Arrow array: row "):
            list(map(read, range(LAST + 1)))


@pytest.mark.parametrize("index", [-1, -2, 2, 2**40])
def test_an_index_that_is_of_no_topic_is_as_none(index: int) -> None:
    topics = numbers(0, index, 1)
    rows = Table(3, topic=None, keys=None, values=None, topics=topics, names=["a", "b"])
    assert [rows.read(row) for row in range(3)] == [True, False, True]
    assert [rows.record(row).topic for row in range(3)] == ["a", None, "b"]


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())],
)
def test_a_column_is_hashed_by_the_row(kind: Any) -> None:
    values = [b"21", None, b"", b"foobar", b"x" * 1000, b"a"]
    column = pa.array(values, pa.binary()).cast(kind)
    expected = [0 if value is None else murmur2(value) for value in values]
    assert list(murmur2_of(column)) == expected
    assert list(murmur2_of(column.slice(2, 3))) == expected[2:5]
    assert list(murmur2_of(column.slice(0, 0))) == []


def test_a_damaged_column_is_not_hashed() -> None:
    offsets = pa.py_buffer(array("i", [0, 5, 2]))
    column = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"12345")])
    with pytest.raises(SerializationError, match="damaged"):
        murmur2_of(column)
