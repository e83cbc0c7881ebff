"""send_table: every row of every kind of table arrives, and what is wrong with one is said."""

from __future__ import annotations

import asyncio
import gc
import struct
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import polars
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncproducer import (
    BatchDeliveryError,
    BrokerRejected,
    Interceptor,
    InvalidTopic,
    OffsetRange,
    Producer,
    ProducerNotStarted,
    Record,
    SerializationError,
    TableResult,
    TopicPartition,
    TransactionAborted,
)
from asyncproducer import arrow as module
from asyncproducer.arrow import Columns, open_table
from asyncproducer.core.partitioner import partition_for_key
from asyncproducer.serializers import str_serializer
from asyncproducer.testing import EmbeddedCluster

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

PAIRS = pa.struct([("key", pa.string()), ("value", pa.binary())])


def stored(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[Any]:
    return [r.value for r in cluster.records(topic, partition)]


def read(table: Any, topic: str | None = "t", **names: Any) -> list[Record]:
    """What the record path reads of a table, without a producer."""
    reader = open_table(table)
    wanted: dict[str, Any] = dict.fromkeys(("key", "value", "headers", "partition", "timestamp"))
    columns = Columns(reader.schema, topic, **{"topic_column": None, **wanted, **names})
    records: list[Record] = []
    for rows in columns.tables(reader):
        rows.now = -1
        for row in range(rows.count):
            record = rows.record(row)
            records.append(record)
            if rows.read(row):
                # Both ways of reading find the same.
                assert rows.fields()[:2] == (record.key, record.value)
                assert rows.topic == record.topic
                assert rows.partition == (-1 if record.partition is None else record.partition)
                assert rows.timestamp == (-1 if record.timestamp is None else record.timestamp)
    return records


# -- types -------------------------------------------------------------------------------------

TEXTS = ["a", None, "", "ä" * 50, "last"]
BYTES = [None if text is None else text.encode() for text in TEXTS]


def typed(kind: pa.DataType) -> pa.Array:
    return pa.array(TEXTS, kind)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.binary_view(),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [(0, 5), (1, 3), (4, 1), (2, 0)], ids=str)
def test_values_of_any_kind_of_text_and_bytes(kind: pa.DataType, window: tuple[int, int]) -> None:
    table = pa.table({"v": typed(kind), "k": typed(kind)}).slice(*window)
    wanted = BYTES[window[0] : sum(window)]
    assert [(r.key, r.value) for r in read(table, key="k", value="v")] == [
        (data, data) for data in wanted
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()], ids=str)
@pytest.mark.parametrize("index", [pa.int8(), pa.uint16(), pa.int64()], ids=str)
def test_dictionaries_are_decoded(kind: pa.DataType, index: pa.DataType) -> None:
    values = pa.array(["a", "b", None], kind)
    array = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 2, 1], index), values)
    table = pa.table({"v": array}).slice(1)
    assert [r.value for r in read(table, value="v")] == [b"a", None, None, b"b"]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.binary_view()], ids=str)
def test_of_a_large_dictionary_only_what_a_block_has_is_converted(kind: pa.DataType) -> None:
    texts = pa.array([None if n == 7 else f"a text of {n}" for n in range(50_001)]).cast(kind)[1:]
    indices = pa.array([49_999, None, 6, 4, 49_999])
    table = pa.table({"x": pa.DictionaryArray.from_arrays(indices, texts)}).slice(1)
    wanted = [None, None, "a text of 5", "a text of 50000"]
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        keys = [r.key for r in read(table, key="x")]
        if kind != pa.binary_view():
            assert [r.topic for r in read(table, None, topic_column="x")] == wanted
    finally:
        pa.set_memory_pool(usual)
    assert keys == [text and text.encode() for text in wanted]
    assert pool.max_memory() < 50_000


def test_a_dictionary_of_views_as_polars_makes_it() -> None:
    for texts in (["a", None, "b"], [None, None]):
        frame = polars.DataFrame({"v": polars.Series(texts, dtype=polars.Categorical)})
        assert [r.value for r in read(frame, value="v")] == [
            text and text.encode() for text in texts
        ]
        assert [r.topic for r in read(frame, None, topic_column="v")] == texts


def test_fixed_sizes_and_extension_types() -> None:
    table = pa.table({"v": pa.array([b"abc", None, b"xyz"], pa.binary(3))}).slice(1)
    assert [r.value for r in read(table, value="v")] == [None, b"xyz"]
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16)))
    assert [r.value for r in read(pa.table({"v": uuids}), value="v")] == [bytes(16)]


def test_a_column_of_nulls_is_null() -> None:
    table = pa.table({name: pa.nulls(2) for name in "kvhpt"})
    records = read(table, key="k", value="v", headers="h", partition="p", timestamp="t")
    assert records == [Record("t")] * 2


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(PAIRS),
        pa.large_list(PAIRS),
        pa.map_(pa.string(), pa.binary()),
        pa.list_(pa.struct([("n", pa.large_string()), ("v", pa.string_view())])),
        pa.map_(pa.dictionary(pa.int32(), pa.string()), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [(0, 5), (1, 4), (3, 2), (1, 1)], ids=str)
def test_headers_of_any_kind(kind: pa.DataType, window: tuple[int, int]) -> None:
    given = [
        [("a", "1"), ("a", None)],
        None,
        [],
        [("b" * 200, "x" * 300)],
        [("", ""), ("ä", "ö")],
    ]
    name = getattr(kind, "value_type", None)
    first, second = (
        (kind.value_type.field(0).name, kind.value_type.field(1).name)
        if name is not None and pa.types.is_struct(name)
        else ("key", "value")
    )
    if pa.types.is_map(kind) and pa.types.is_dictionary(kind.key_type):
        plain = pa.array(given, pa.map_(pa.string(), pa.string()))
        array = pa.MapArray.from_arrays(
            pa.array([0, 2, None, 2, 3, 5], pa.int32()), plain.keys.dictionary_encode(), plain.items
        )
    elif pa.types.is_map(kind):
        array = pa.array(given, kind)
    else:
        array = pa.array(
            [None if row is None else [{first: n, second: v} for n, v in row] for row in given],
            kind,
        )
    table = pa.table({"h": array, "v": pa.nulls(5, pa.binary())}).slice(*window)
    found = [record.headers for record in read(table, headers="h", value="v")]
    wanted = [
        [(n, None if v is None else v.encode()) for n, v in row] if row else None for row in given
    ]
    assert found == wanted[window[0] : sum(window)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()])
def test_partitions_of_any_integer(kind: pa.DataType) -> None:
    table = pa.table({"p": pa.array([9, 0, None, 3], kind)}).slice(1)
    assert [r.partition for r in read(table, partition="p")] == [0, None, 3]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_timestamps_of_any_unit(unit: str, zone: str | None) -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = [moment if zone else moment.replace(tzinfo=None), None] * 2
    array = pa.array(values, pa.timestamp(unit, zone))
    table = pa.table({"t": array, "d": array.dictionary_encode()}).slice(1)
    for column in ("t", "d"):
        times = [r.timestamp for r in read(table, timestamp=column)]
        assert times == [None, 1704164645000, None]


def test_a_stored_timestamp_is_read_by_who_has_made_no_array() -> None:
    """pyarrow loads some of itself with the first array that is made."""
    stream = pa.BufferOutputStream()
    table = pa.table({"value": [b"v"], "t": pa.array([1_700_000_000_123_456], pa.timestamp("us"))})
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write(table)
    code = (
        "import sys, pyarrow as pa; from asyncproducer.arrow import Columns;"
        "reader = pa.ipc.open_stream(sys.stdin.buffer.read());"
        "parts = dict.fromkeys(('topic_column', 'key', 'headers', 'partition'));"
        "columns = Columns(reader.schema, 't', value='value', timestamp='t', **parts);"
        "print([rows.record(0).timestamp for rows in columns.tables(reader)])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], input=stream.getvalue(), capture_output=True, timeout=60
    )
    assert (told.stdout.decode(), told.stderr.decode()) == ("[1700000000123]\n", "")


@pytest.mark.parametrize("sentinel", [2**62, -(2**62)])
def test_a_time_that_is_too_large_is_wrong_by_itself(sentinel: int) -> None:
    table = pa.table({"t": pa.array([1, sentinel, None, 2], pa.timestamp("s"))})
    times = [r.timestamp for r in read(table, timestamp="t")]
    assert times == [1000, -(2**63), None, 2000]


def test_timestamps_are_cut_to_milliseconds_and_integers_are_taken_for_them() -> None:
    table = pa.table({"t": pa.array([1_999_999], pa.timestamp("ns")), "i": pa.array([7])})
    assert [r.timestamp for r in read(table, timestamp="t")] == [1]
    assert [r.timestamp for r in read(table, timestamp="i")] == [7]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", "b", None, "a"]),
        pa.array(["a", "b", None, "a"], pa.string_view()),
        pa.array(["a", "b", None, "a"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type)[:20],
)
def test_topics_of_rows(array: pa.Array) -> None:
    table = pa.table({"topic": array}).slice(1)
    records = read(table, None, topic_column="topic")
    assert [r.topic for r in records] == ["b", None, "a"]


@given(
    st.lists(st.tuples(st.none() | st.binary(max_size=20), st.none() | st.text(max_size=5))),
    st.integers(0, 5),
    st.integers(1, 7),
)
def test_slices_and_chunks_are_read_where_they_are(
    rows: list[tuple[bytes | None, str | None]], first: int, chunk: int
) -> None:
    whole = pa.table(
        {
            "k": pa.array([k for k, _ in rows], pa.binary()),
            "v": pa.array([v for _, v in rows], pa.large_string()),
            "h": pa.array(
                [None if k is None else [("n", k)] * (len(k) % 3) for k, _ in rows],
                pa.map_(pa.string(), pa.binary()),
            ),
        }
    )
    pieces = [whole.slice(at, chunk) for at in range(first, len(rows), chunk)]
    table = pa.concat_tables(pieces) if pieces else whole.slice(0, 0)
    wanted = [
        Record(
            "t",
            None if v is None else v.encode(),
            k,
            None if k is None or len(k) % 3 == 0 else [("n", k)] * (len(k) % 3),
        )
        for k, v in rows[first:]
    ]
    assert read(table, key="k", value="v", headers="h") == wanted


def test_blocks_of_a_batch_find_their_own_headers_and_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ROWS", 3)
    pairs = [[("n", b"%d" % n)] * (n % 3) for n in range(20)]
    table = pa.table(
        {
            "d": pa.array([f"t{n % 4}" for n in range(20)]).dictionary_encode(),
            "h": pa.array(pairs, pa.map_(pa.string_view(), pa.binary())),
        }
    )
    records = read(table, None, topic_column="d", headers="h")
    assert [r.headers or [] for r in records] == pairs
    assert [r.topic for r in records] == [f"t{n % 4}" for n in range(20)]


# -- what holds tables -------------------------------------------------------------------------


class Foreign:
    """Somebody else's table: only the C interface."""

    def __init__(self, table: Any, name: str) -> None:
        setattr(self, name, getattr(table, name))


def sources() -> Iterator[Any]:
    table = pa.table({"value": [b"0", b"1", b"2"]})
    batch = table.to_batches()[0]
    yield table
    yield batch
    yield pa.RecordBatchReader.from_batches(table.schema, [batch.slice(0, 1), batch.slice(1)])
    yield polars.DataFrame({"value": [b"0", b"1", b"2"]})
    yield Foreign(table, "__arrow_c_stream__")
    yield Foreign(batch, "__arrow_c_array__")


@pytest.mark.parametrize("table", list(sources()), ids=lambda table: type(table).__name__)
def test_whatever_has_the_arrow_interface_is_a_table(table: Any) -> None:
    assert [r.value for r in read(table, value="value")] == [b"0", b"1", b"2"]


async def test_what_is_no_table_is_refused(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        not_one: Any = [{"value": b"x"}]
        with pytest.raises(TypeError, match="of type list: give a pyarrow Table"):
            await producer.send_table("t", not_one)


async def test_without_pyarrow_the_error_says_what_to_install(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"value": [b"x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    async with new_producer() as producer:
        with pytest.raises(ImportError, match=r'pip install "asyncproducer\[arrow\]"'):
            await producer.send_table("t", table)


def test_importing_the_package_does_not_import_pyarrow() -> None:
    code = "import sys, asyncproducer; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- what is refused before anything is sent ---------------------------------------------------


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"value": "nothing"}, "value='nothing': the table has no such column, only 'value', 'n'"),
        ({"key": "n"}, "key='n': the column is of type double, it must be binary or text: cast"),
        ({"headers": "value"}, "headers='value': .* binary, it must be list<struct<name: text"),
        ({"headers": "l"}, "headers='l'"),
        ({"partition": "value"}, "partition='value': .* it must be an integer"),
        ({"timestamp": "d"}, "timestamp='d': .* date32.*, it must be a timestamp"),
        ({"value": "twice"}, "value='twice': the table has 2 such columns"),
    ],
)
async def test_columns_that_do_not_fit_are_refused_before_anything_is_sent(
    cluster: EmbeddedCluster, new_producer: New, names: Any, says: str
) -> None:
    columns = [
        pa.array([b"v"]),
        pa.array([1.5]),
        pa.array([["x"]]),
        pa.array([0], pa.date32()),
        pa.array([b"a"]),
        pa.array([b"b"]),
    ]
    table = pa.table(columns, ["value", "n", "l", "d", "twice", "twice"])
    async with new_producer() as producer:
        with pytest.raises(SerializationError, match=says):
            await producer.send_table("t", table, **names)
    assert stored(cluster) == []


async def test_names_must_be_names(cluster: EmbeddedCluster, new_producer: New) -> None:
    table = pa.table({"value": [b"x"]})
    number: Any = 0
    async with new_producer() as producer:
        with pytest.raises(TypeError, match="value=0: give the name of a column"):
            await producer.send_table("t", table, value=number)
        with pytest.raises(InvalidTopic, match="'a b'"):
            await producer.send_table("a b", table)
        with pytest.raises(SerializationError, match="topic='topic': the table has no such"):
            await producer.send_table(None, table)


async def test_a_serializer_is_not_passed_by(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(key_serializer=str_serializer) as producer:
        with pytest.raises(SerializationError, match="has a key_serializer: use a Producer"):
            await producer.send_table("t", pa.table({"value": [b"x"]}))


async def test_the_producer_must_be_started() -> None:
    with pytest.raises(ProducerNotStarted):
        await Producer("broker:9092").send_table("t", pa.table({"value": [b"x"]}))


# -- into the log ------------------------------------------------------------------------------


async def test_all_six_columns_arrive(cluster: EmbeddedCluster, new_producer: New) -> None:
    """As a sink of Spark's has them."""
    count = 1000
    table = pa.table(
        {
            "topic": ["t4"] * count,
            "key": [b"key %d" % (n % 50) for n in range(count)],
            "value": [None if n % 10 == 0 else b"%d" % n for n in range(count)],
            "headers": pa.array(
                [[{"key": "n", "value": b"%d" % n}] * (n % 3) for n in range(count)],
                pa.list_(PAIRS),
            ),
            "partition": pa.array([n % 4 if n % 7 == 0 else None for n in range(count)]),
            "timestamp": pa.array(
                [1_700_000_000_000 + n for n in range(count)], pa.timestamp("ms", "UTC")
            ),
        }
    )
    names: Any = {name: name for name in table.column_names if name != "topic"}
    async with new_producer() as producer:
        result = await producer.send_table(None, table, **names)
    wanted: dict[int, list[Any]] = {n: [] for n in range(4)}
    for row in table.to_pylist():
        partition = row["partition"]
        if partition is None:
            partition = partition_for_key(row["key"], 4)
        headers = tuple((h["key"], h["value"]) for h in row["headers"])
        milliseconds = round(row["timestamp"].timestamp() * 1000)
        wanted[partition].append((row["key"], row["value"], headers, milliseconds))
    for partition, rows in wanted.items():
        found = cluster.records("t4", partition)
        assert [(r.key, r.value, r.headers, r.timestamp) for r in found] == rows
        place = TopicPartition("t4", partition)
        assert result.offsets[place] == OffsetRange(0, len(rows) - 1, len(rows))
    assert (len(result), result.acknowledged, result.failed) == (count, count, [])
    assert repr(result) == "<TableResult 1000 acknowledged, 0 failed>"
    assert result.errors_table().num_rows == 0


async def test_rows_of_several_topics(cluster: EmbeddedCluster, new_producer: New) -> None:
    table = pa.table(
        {"where": ["t", "t4", None, "a b", "t"] * 100, "value": [b"%d" % n for n in range(500)]}
    )
    async with new_producer() as producer:
        result = await producer.send_table(None, table, topic_column="where", raise_on_error=False)
    assert [int(v) for v in stored(cluster)] == [n for n in range(500) if n % 5 in (0, 4)]
    assert sum(len(cluster.records("t4", p)) for p in range(4)) == 100
    assert {row % 5 for row, _ in result.failed} == {2, 3}
    assert {type(error) for _, error in result.failed} == {InvalidTopic}
    assert result.offsets[TopicPartition("t", 0)] == OffsetRange(0, 199, 200)


async def test_a_value_column_alone_sticks_to_partitions(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    values = [b"%0100d" % n for n in range(5000)]
    async with new_producer() as producer:
        result = await producer.send_table("t4", pa.table({"value": values}))
    logs = [stored(cluster, "t4", partition) for partition in range(4)]
    assert sorted(v for log in logs for v in log) == values
    assert all(log == sorted(log) for log in logs)
    assert sum(range.records for range in result.offsets.values()) == 5000


async def test_an_empty_table_sends_nothing(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        for table in (
            pa.table({"value": pa.array([], pa.binary())}),
            pa.RecordBatchReader.from_batches(pa.schema([("value", pa.binary())]), []),
        ):
            result = await producer.send_table("t", table)
            assert (len(result), result.acknowledged, result.offsets) == (0, 0, {})
    assert stored(cluster) == []


async def test_a_reader_is_taken_as_there_is_room(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Batch by batch; the order stays, with memory for a few records."""
    schema = pa.schema([("value", pa.binary())])
    made = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal made
        for _ in range(20):
            values = [b"%0100d" % n for n in range(made * 50, made * 50 + 50)]
            made += 1
            yield pa.record_batch([pa.array(values)], schema=schema)

    async with new_producer(buffer_memory=2000, batch_size=500, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        cluster.pause(2)
        reader = pa.RecordBatchReader.from_batches(schema, batches())
        task = asyncio.create_task(producer.send_table("t", reader))
        await asyncio.sleep(1)
        assert made <= 2
        cluster.resume(1)
        cluster.resume(2)
        result = await task
    assert result.offsets == {TopicPartition("t", 0): OffsetRange(0, 999, 1000)}
    assert [int(v) for v in stored(cluster)] == [*range(1000)]


async def test_tables_as_they_come_are_one_sending(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def tables(*values: list[bytes]) -> AsyncIterator[Any]:
        for each in values:
            await asyncio.sleep(1)  # the loop goes on
            yield pa.record_batch({"value": pa.array(each, pa.binary())})
        await asyncio.sleep(1)  # all are acknowledged before it is known that these were all

    async with new_producer(linger_ms=0) as producer:
        sending = asyncio.create_task(
            producer.send_table("t", tables([b"a", b"b"], [], [b"c"]), raise_on_error=False)
        )
        await asyncio.sleep(1.5)
        assert stored(cluster) == [b"a", b"b"]
        result = await sending
        assert (len(result), result.acknowledged) == (3, 3)
        assert result.offsets == {TopicPartition("t", 0): OffsetRange(0, 2, 3)}
        assert stored(cluster) == [b"a", b"b", b"c"]
        assert len(await producer.send_table("t", tables())) == 0


async def test_tables_as_they_come_have_the_same_columns(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def tables() -> AsyncIterator[Any]:
        yield pa.record_batch({"value": [b"a"]})
        yield pa.record_batch({"value": ["b"]})

    async with new_producer() as producer:
        with pytest.raises(SerializationError, match="value: binary, this one value: string"):
            await producer.send_table("t", tables())
        await producer.flush()
        assert stored(cluster) == [b"a"]


def batches_of(schema: pa.Schema, *batches: dict[str, Any]) -> pa.RecordBatchReader:
    """A reader, which looks at none of them."""
    return pa.RecordBatchReader.from_batches(schema, map(pa.record_batch, batches))


KEY_AND_VALUE = pa.schema([("k", pa.binary()), ("v", pa.binary())])


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"v": [b"2"], "k": [b"b"]}, "v: binary, k: binary"),
        ({"k": [b"b"]}, "k: binary"),
        ({"k": [b"b"], "v": [b"2"], "w": [b""]}, "k: binary, v: binary, w: binary"),
        ({"k": [b"b"], "v": ["2"]}, "k: binary, v: string"),
    ],
    ids=["another order", "too few", "too many", "another type"],
)
async def test_a_batch_that_has_other_columns_than_its_reader_is_refused(
    cluster: EmbeddedCluster, new_producer: New, other: dict[str, Any], shown: str
) -> None:
    reader = batches_of(KEY_AND_VALUE, {"k": [b"a"], "v": [b"1"]}, other)
    async with new_producer() as producer:
        with pytest.raises(
            SerializationError, match=f"that has k: binary, v: binary, this batch {shown}; bring"
        ):
            await producer.send_table("t", reader, key="k", value="v")
    assert stored(cluster) == [b"1"]


def test_a_batch_may_say_other_things_of_nulls_than_its_reader() -> None:
    def pairs(nullable: bool) -> pa.DataType:
        return pa.list_(pa.struct([pa.field("n", pa.string(), nullable), ("v", pa.binary())]))

    schema = pa.schema([pa.field("v", pa.binary(), False), ("h", pairs(False))], {"made": "by us"})
    reader = batches_of(
        schema,
        {"v": [b"1"], "h": pa.array([[("n", b"x")]], pairs(True))},
        {"v": pa.nulls(1), "h": pa.nulls(1)},
        {"v": [b"3"], "h": pa.array([None], pairs(True))},
    )
    assert read(reader, value="v", headers="h") == [
        Record("t", b"1", None, [("n", b"x")]),
        Record("t"),
        Record("t", b"3"),
    ]


async def test_tables_as_they_come_may_say_other_things_of_nulls(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def tables() -> AsyncIterator[Any]:
        for nullable in (False, True):
            schema = pa.schema([pa.field("value", pa.binary(), nullable)])
            yield pa.record_batch({"value": [b"a"]}, schema)

    async with new_producer() as producer:
        assert (await producer.send_table("t", tables())).acknowledged == 2


def too_long(table: pa.Table) -> pa.RecordBatchReader:
    """A reader of a batch of more rows than its buffers have: somebody has changed their number."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write(table)
    count = struct.pack("<q", table.num_rows)
    return pa.ipc.open_stream(
        stream.getvalue().to_pybytes().replace(count, struct.pack("<q", 6000))
    )


@pytest.mark.parametrize(
    ("part", "column", "says"),
    [
        ("value", pa.array([b"value"] * 3331), "'value' of type binary .* Buffer #1 too small"),
        ("key", pa.array(["k"] * 3331).dictionary_encode(), "'key' of type dictionary"),
        ("headers", pa.array([[("n", b"")]] * 3331, pa.map_("string", "binary")), "'headers' of"),
        ("partition", pa.array([0] * 3331, pa.int32()), "'partition' of type int32"),
        ("timestamp", pa.array([1, None] * 1666, pa.timestamp("us"))[1:], "'timestamp' of"),
        ("topic_column", pa.array(["t"] * 3331, pa.string_view()), "'topic_column' of"),
    ],
)
def test_a_column_with_less_than_its_length_asks_for_is_said(
    part: str, column: pa.Array, says: str
) -> None:
    """pyarrow would convert what lies behind its end, or crash."""
    reader = too_long(pa.table({part: column}))
    with pytest.raises(SerializationError, match=f"the column {says}"):
        read(reader, None if part == "topic_column" else "t", **{part: part})


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [0, -5, 1, 3], [0, 9, 9, 3]], ids=str)
def test_headers_that_a_block_does_not_have_are_said(
    monkeypatch: pytest.MonkeyPatch, offsets: list[int]
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ROWS", 1)
    pairs = pa.array([{"key": "n", "value": b""}] * 3, PAIRS)
    buffers = [None, pa.py_buffer(array("i", offsets))]
    lists = pa.Array.from_buffers(pa.list_(PAIRS), 3, buffers, children=[pairs])
    with pytest.raises(SerializationError, match=r"the column 'h' of type list.* cannot be read"):
        read(pa.table({"h": lists}), headers="h")


@pytest.mark.parametrize("unused", [0, 10], ids=["few names", "more names than rows"])
async def test_rows_with_an_index_that_is_of_no_topic_are_refused(
    cluster: EmbeddedCluster, new_producer: New, unused: int
) -> None:
    indexes = pa.array([0, -1, 2 + unused, -2, 1, None], pa.int8())
    names = pa.array(["t", "t4", *["unused"] * unused])
    topics = pa.DictionaryArray.from_arrays(indexes, names, safe=False)
    table = pa.table({"topic": topics, "value": [b"%d" % n for n in range(6)]})
    async with new_producer() as producer:
        result = await producer.send_table(None, table, raise_on_error=False)
    assert [(row, type(error)) for row, error in result.failed] == [
        (row, InvalidTopic) for row in (1, 2, 3, 5)
    ]
    assert result.errors_table()["topic"].to_pylist() == [None] * 4
    assert stored(cluster) == [b"0"]


def broken_text(*parts: bytes) -> pa.Array:
    """A column of text with any bytes."""
    ends = array("i", accumulate(map(len, parts), initial=0))
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


@pytest.mark.parametrize("what", ["topic", "header"])
async def test_names_that_are_no_text_are_said_and_the_transaction_is_not_committed(
    cluster: EmbeddedCluster, new_producer: New, what: str
) -> None:
    names = broken_text(b"t", b"\xff\xfe", b"t")
    values = pa.array([b"1", b"2", b"3"])
    pairs = pa.StructArray.from_arrays([names, values], ["k", "v"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pairs)
    sends: dict[str, tuple[str | None, Any, dict[str, Any]]] = {
        "topic": (None, pa.table({"value": values, "topic": names}), {}),
        "header": ("t", pa.table({"value": values, "h": lists}), {"headers": "h"}),
    }
    topic, table, columns = sends[what]
    async with new_producer(transactional_id="x") as producer:
        await producer.begin_transaction()
        with pytest.raises(SerializationError, match=rf"a {what}'s name is not UTF-8: b'\\xff"):
            await producer.send_table(topic, table, **columns)
        with pytest.raises(TransactionAborted, match="is not UTF-8"):
            await producer.commit_transaction()
        await producer.abort_transaction()


async def test_what_has_its_end_is_not_kept(
    cluster: EmbeddedCluster, new_producer: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ROWS", 100)
    most = 0
    begin = TableResult._begin

    def spy(self: TableResult, rows: Any) -> None:
        nonlocal most
        begin(self, rows)
        most = max(most, len(self._under_way))

    monkeypatch.setattr(TableResult, "_begin", spy)
    async with new_producer(buffer_memory=40_000) as producer:
        result = await producer.send_table("t", pa.table({"value": [bytes(100)] * 20_000}))
    assert result.acknowledged == 20_000
    assert most < 20
    assert not result._under_way


async def test_an_error_of_the_reader_ends_the_sending_and_what_came_before_goes_on(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    schema = pa.schema([("value", pa.binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([b"0", b"1"])], schema=schema)
        raise ZeroDivisionError("enough")

    async with new_producer() as producer:
        with pytest.raises(ZeroDivisionError):
            await producer.send_table("t", pa.RecordBatchReader.from_batches(schema, batches()))
    assert stored(cluster) == [b"0", b"1"]


async def test_cancelled_no_further_row_is_taken_and_what_is_buffered_goes_on(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    table = pa.table({"value": [b"%0100d" % n for n in range(5000)]})
    async with new_producer(buffer_memory=4000, batch_size=500, batch_max_bytes=0) as producer:
        await producer.warm_up("t")
        task = asyncio.create_task(producer.send_table("t", table))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    numbers = [int(v) for v in stored(cluster)]
    assert 0 < len(numbers) < 5000
    assert numbers == [*range(len(numbers))]


# -- rows that fail ----------------------------------------------------------------------------


async def test_a_row_that_is_wrong_does_not_stop_the_others(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    table = pa.table(
        {
            "value": pa.array([b"0", bytes(2_000_000), b"2", b"3", b"4", b"5"]),
            "partition": [0, None, -1, 7, 0, 0],
            "timestamp": [1, 1, 1, 1, -5, 1],
            "headers": pa.array(
                [None, None, None, None, None, [{"key": None, "value": b""}]], pa.list_(PAIRS)
            ),
        }
    )
    names: Any = {name: name for name in ("partition", "timestamp", "headers")}
    async with new_producer(max_block_ms=1000) as producer:
        with pytest.raises(BatchDeliveryError, match=r"5 of 6 rows .* row 1: ") as caught:
            await producer.send_table("t4", table, **names)
        assert producer.metrics()["record_error_total"] == 5
    result = caught.value.result
    assert stored(cluster, "t4") == [b"0"]
    assert isinstance(result, TableResult)
    errors = result.errors_table()
    assert errors.drop_columns("message").to_pydict() == {
        "row": [1, 2, 3, 4, 5],
        "topic": ["t4"] * 5,
        "partition": [None, -1, 7, 0, 0],
        "error": [
            "RecordTooLarge",
            "InvalidPartition",
            "MetadataTimeout",
            "InvalidTimestamp",
            "SerializationError",
        ],
        "persisted": ["no"] * 5,
    }
    assert "max_request_size" in errors["message"][0].as_py()
    assert "header 0 has the name None" in errors["message"][4].as_py()
    assert len(caught.value.exceptions) == 5


async def test_rows_that_the_broker_refuses(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("compact", configs={"cleanup.policy": "compact"})
    table = pa.table({"k": [b"k", None, b"k"] * 50, "value": [b"%d" % n for n in range(150)]})
    async with new_producer(linger_ms=0, batch_size=1) as producer:
        result = await producer.send_table("compact", table, key="k", raise_on_error=False)
    assert result.acknowledged == 100
    errors = result.errors_table()
    assert errors["row"].to_pylist() == [*range(1, 150, 3)]
    assert set(errors["error"].to_pylist()) == {"BrokerRejected"}
    assert set(errors["partition"].to_pylist()) == {0}
    assert {type(error) for _, error in result.failed} == {BrokerRejected}
    assert result.offsets == {TopicPartition("compact", 0): OffsetRange(0, 99, 100)}
    assert "nobody looked" not in caplog.text


async def test_a_million_rows_for_a_topic_that_is_not_there_share_their_error(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    table = pa.table({"value": pa.nulls(10_000, pa.binary())})
    async with new_producer(max_block_ms=1000) as producer:
        with pytest.raises(BatchDeliveryError, match="10000 of 10000 rows") as caught:
            await producer.send_table("nowhere", table)
    assert len(caught.value.exceptions) == 100
    failed = caught.value.result.failed
    assert [row for row, _ in failed] == [*range(10_000)]
    assert len({id(error) for _, error in failed}) == 2


async def test_what_was_raised_is_not_logged_as_something_that_nobody_looked_at(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"value": [bytes(10)] * 500})
    cluster.inject("produce", error="INVALID_RECORD", times=None)
    async with new_producer() as producer:
        with pytest.raises(BatchDeliveryError):
            await producer.send_table("t", table)
    gc.collect()
    assert "nobody looked" not in caplog.text
    async with new_producer() as producer:
        await producer.send_table("t", table, raise_on_error=False)
    gc.collect()
    assert "500 of 500 records to t-0 were not delivered and nobody looked" in caplog.text


async def test_splits_keep_the_counts(cluster: EmbeddedCluster, new_producer: New) -> None:
    cluster.create_topic("small", configs={"max.message.bytes": "1000"})
    values = [b"%0100d" % n for n in range(500)]
    async with new_producer(batch_size=16_000) as producer:
        await producer.warm_up("small")
        result = await producer.send_table("small", pa.table({"value": values}))
        assert producer.metrics()["batch_split_total"] > 0
    assert result.offsets == {TopicPartition("small", 0): OffsetRange(0, 499, 500)}
    assert stored(cluster, "small") == values


async def test_without_acknowledgements_there_are_no_offsets(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(acks=0, enable_idempotence=False) as producer:
        result = await producer.send_table("t", pa.table({"value": [b"x"] * 10}))
    assert result.offsets == {TopicPartition("t", 0): OffsetRange(-1, -1, 10)}


async def test_interceptors_see_every_row(cluster: EmbeddedCluster, new_producer: New) -> None:
    class Watching(Interceptor):
        def on_send(self, record: Record) -> Record:
            return record._replace(value=record.value + b"!", headers=record.headers)

    table = pa.table(
        {"value": [b"1", b"2"], "h": pa.array([[("n", b"x")], []], pa.map_("string", "binary"))}
    )
    async with new_producer(interceptors=[Watching()]) as producer:
        result = await producer.send_table("t", table, headers="h")
    assert result.acknowledged == 2
    assert [(r.value, r.headers) for r in cluster.records("t")] == [
        (b"1!", (("n", b"x"),)),
        (b"2!", ()),
    ]


async def test_the_portal_sends_tables(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        portal = producer.portal()
        table = pa.table({"v": ["a", "b"]})

        def in_thread() -> Any:
            return portal.send_table("t", table, value="v")

        future = await asyncio.get_running_loop().run_in_executor(None, in_thread)
        result = await asyncio.wrap_future(future)
    assert result.acknowledged == 2
    assert stored(cluster) == [b"a", b"b"]
