"""What was sent is what two foreign consumers read, byte for byte, where the metadata says."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pyarrow as pa
import pytest

from asyncproducer import Producer, Record, RecordMetadata
from asyncproducer.core.batch import batch_upper_bound, encode_headers
from asyncproducer.core.partitioner import partition_for_key
from asyncproducer.testing.kafka import KafkaCluster

if TYPE_CHECKING:
    from tests.kafka.conftest import FreshTopic, Reader, ReadRecord

CODECS: list[tuple[str, int | None]] = [
    ("none", None),
    ("gzip", None),
    ("snappy", None),
    ("lz4", None),
    ("zstd", None),
]

#: A level changes how much work a codec does, and not its format.
LEVELS = [("gzip", 1), ("gzip", 9), ("lz4", 12), ("zstd", -7), ("zstd", 12)]

#: Each has a partition of its own.
GUARANTEES: list[dict[str, Any]] = [
    {},
    {"enable_idempotence": False},
    {"acks": 1},
    {"acks": 0},
]

MAX_REQUEST_SIZE = 1_048_576

KEYS: list[Any] = [None, b"", "clé", bytes(300)]

HEADERS: list[Any] = [
    None,
    {"ключ": "значение"},
    [("null", None)],
    [
        *[("twice", b"1"), ("twice", b"2"), ("null", None), ("empty", b""), ("", b"no name")],
        ("large", b"\0\xff" * 4000),
    ],
]

#: Small ones in each of the types that may be sent, and then sizes: larger than a batch, 100 KiB.
VALUES: list[Any] = [None, b"", bytearray(b"v"), memoryview(b"view"), "größe", 20_000, 102_400]

#: So large that few of them are enough.
HUGE = 900 * 1024

#: Where the encoding of a length gets longer, and where a batch is full.
LENGTHS = (1, 63, 64, 8191, 8192, 16_384)


def wire_headers(headers: Any) -> tuple[tuple[str, bytes | None], ...]:
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    return tuple((k, v.encode() if isinstance(v, str) else v) for k, v in pairs)


def wire(data: Any) -> bytes | None:
    return data.encode() if isinstance(data, str) else None if data is None else bytes(data)


def text(size: int) -> bytes:
    return (b"0123456789" * (size // 10 + 1))[:size]


def combinations(topic: str, partition: int) -> Iterator[Record]:
    """Every key with every value, header list and timestamp: the whole product.

    Only of HUGE values there are four: one with each key, each header list and each timestamp.
    Then come values of certain lengths.
    """
    # None is the producer's own. The others go back and forth within a batch.
    leap_day = datetime(2020, 2, 29, 12, 30, 15, 123_000, tzinfo=UTC)
    timestamps = [None, 0, leap_day, time.time_ns() // 1_000_000]
    randbytes = random.Random(partition).randbytes
    contents = itertools.cycle([randbytes, text])  # as bad for compression as can be, and as good
    for key, value, headers, timestamp in itertools.product(KEYS, VALUES, HEADERS, timestamps):
        if isinstance(value, int):
            value = next(contents)(value)
        yield Record(topic, value, key, headers, partition, timestamp)
    for key, headers, timestamp in zip(KEYS, HEADERS, timestamps, strict=True):
        yield Record(topic, next(contents)(HUGE), key, headers, partition, timestamp)
    for length, content in itertools.product(LENGTHS, [randbytes, text]):
        yield Record(topic, content(length), text(length % 999), None, partition)
    yield Record(topic, bytes(largest_value()), b"k", {"h": b""}, partition)


def largest_value() -> int:
    """Of a record with this key and header, that max_request_size still allows."""
    size = MAX_REQUEST_SIZE
    while batch_upper_bound(b"k", bytes(size), encode_headers([("h", b"")])) > MAX_REQUEST_SIZE:
        size -= 1
    return size


def milliseconds(timestamp: int | datetime | None) -> int | None:
    if isinstance(timestamp, datetime):
        return int(timestamp.timestamp() * 1000)
    return timestamp


def check(
    sent: list[tuple[Record, RecordMetadata]],
    read: list[ReadRecord],
    *,
    append_time: bool,
    acks: int,
    between: tuple[int, int],
) -> None:
    """`between`: the time when all this was sent."""
    assert len(read) == len(sent)
    for offset, ((record, metadata), found) in enumerate(zip(sent, read, strict=True)):
        key, value = wire(record.key), wire(record.value)
        assert found.offset == offset
        assert (found.key, found.value) == (key, value)
        assert found.headers == wire_headers(record.headers)
        assert found.is_append_time == append_time
        own = milliseconds(record.timestamp)
        if append_time or own is None:
            assert between[0] <= found.timestamp <= between[1]
        else:
            assert found.timestamp == own
        told = metadata._replace(offset=found.offset) if acks == 0 else metadata
        if acks == 0:
            assert metadata.offset == -1
        if not (acks == 0 and append_time):
            assert metadata.timestamp == found.timestamp
        assert told == RecordMetadata(
            record.topic,
            record.partition or 0,
            found.offset,
            metadata.timestamp,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
        )


async def send_all(
    kafka: KafkaCluster, records: list[Record], **options: Any
) -> list[tuple[Record, RecordMetadata]]:
    async with Producer[Any, Any](kafka.bootstrap_servers, linger_ms=20, **options) as producer:
        result = await producer.send_many(None, records)
        outcomes = [m for m in result if isinstance(m, RecordMetadata)]
    return list(zip(records, outcomes, strict=True))


async def until_there(kafka: KafkaCluster, topic: str, counts: dict[int, int]) -> None:
    """Without acks nobody is told when the broker has the records."""
    await asyncio.to_thread(kafka.wait_until, lambda: kafka.end_offsets(topic) == counts)


@pytest.mark.parametrize(
    ("codec", "level"), [*CODECS, *(pytest.param(*one, marks=pytest.mark.long) for one in LEVELS)]
)
async def test_readers_see_what_was_sent(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader, codec: str, level: int | None
) -> None:
    """IT-01: each codec with all that acks and idempotence can be."""
    created = fresh_topic(len(GUARANTEES))
    appended = fresh_topic(len(GUARANTEES), configs={"message.timestamp.type": "LogAppendTime"})
    for topic in (created, appended):
        began = time.time_ns() // 1_000_000
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    send_all(
                        kafka,
                        list(combinations(topic, partition)),
                        compression_type=codec,
                        compression_level=level,
                        **options,
                    )
                )
                for partition, options in enumerate(GUARANTEES)
            ]
        sent = [task.result() for task in tasks]
        counts = {partition: len(records) for partition, records in enumerate(sent)}
        await until_there(kafka, topic, counts)
        log = await read_log(kafka, topic)
        ended = time.time_ns() // 1_000_000
        for partition, options in enumerate(GUARANTEES):
            check(
                sent[partition],
                log[partition],
                append_time=topic == appended,
                acks=options.get("acks", -1),
                between=(began, ended),
            )


@pytest.mark.parametrize("options", [{"linger_ms": 0}, {"batch_size": 0}, {"batch_size": 1000}])
async def test_each_record_is_told_its_own_place(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_log: Reader, options: dict[str, Any]
) -> None:
    """IT-02: with and without a partition, with and without a key, in many small batches."""
    topic = fresh_topic(3)
    async with Producer[Any, Any](
        kafka.bootstrap_servers, compression_type="lz4", **options
    ) as producer:
        deliveries = [
            await producer.enqueue(
                topic,
                b"%d" % number,
                key=b"%d" % (number % 50) if number % 2 else None,
                partition=number % 3 if number % 5 == 0 else None,
            )
            for number in range(600)
        ]
        places = [await delivery for delivery in deliveries]
    log = await read_log(kafka, topic)
    for number, place in enumerate(places):
        found = log[place.partition][place.offset]
        assert (found.offset, found.timestamp) == (place.offset, place.timestamp)
        assert found.value == b"%d" % number
    assert sum(map(len, log.values())) == 600


async def test_keys_go_where_other_clients_put_them(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_quickly: Reader
) -> None:
    topic = fresh_topic(7)
    random_bytes = random.Random(7).randbytes
    keys = [random_bytes(length) for length in range(1, 301)]
    async with Producer[Any, Any](kafka.bootstrap_servers) as producer:
        result = await producer.send_many(topic, [Record(topic, b"ours", key) for key in keys])
    ours = {key: m.partition for key, m in zip(keys, result, strict=True) if isinstance(m, tuple)}

    other = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"}
    )
    for key in keys:
        other.produce(topic, b"theirs", key)
    assert await asyncio.to_thread(other.flush, 30) == 0
    log = await read_quickly(kafka, topic)
    theirs = {r.key: p for p, records in log.items() for r in records if r.value == b"theirs"}
    assert theirs == ours
    assert set(ours.values()) == set(range(7))


@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_readers_see_the_rows_of_a_table(
    kafka: KafkaCluster, fresh_topic: FreshTopic, read_quickly: Reader, codec: str
) -> None:
    """As many rows as wait for memory several times, in every column that there is."""
    topic = fresh_topic(5)
    count = 50_000
    now = time.time_ns() // 1_000_000
    rows = [
        (
            b"key %d" % (n % 977) if n % 3 else None,
            None if n % 101 == 0 else b"%0*d" % (n % 500, n),
            [("n", b"%d" % n), ("null", None)][: n % 3],
            n % 5 if n % 7 == 0 else None,
            now + n,
        )
        for n in range(count)
    ]
    keys, values, headers, partitions, timestamps = zip(*rows, strict=True)
    table = pa.table(
        {
            "topic": pa.array([topic] * count).dictionary_encode(),
            "key": pa.array(keys, pa.binary_view()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(headers, pa.map_(pa.string(), pa.binary())),
            "partition": pa.array(partitions, pa.int32()),
            "timestamp": pa.array(timestamps, pa.timestamp("ms", "UTC")),
        }
    )
    async with Producer[Any, Any](
        kafka.bootstrap_servers, compression_type=codec, buffer_memory=2_000_000
    ) as producer:
        result = await producer.send_table(
            None,
            table,
            key="key",
            headers="headers",
            partition="partition",
            timestamp="timestamp",
        )
    assert result.acknowledged == count
    log = await read_quickly(kafka, topic)
    for place, offsets in result.offsets.items():
        assert offsets == (0, len(log[place.partition]) - 1, len(log[place.partition]))
    of = {r.timestamp - now: partition for partition, found in log.items() for r in found}
    assert len(of) == count
    wanted: dict[int, list[Any]] = {partition: [] for partition in log}
    for number, (key, value, pairs, partition, timestamp) in enumerate(rows):
        assert partition is None or of[number] == partition
        assert partition is not None or key is None or of[number] == partition_for_key(key, 5)
        wanted[of[number]].append((key, value, tuple(pairs), timestamp))
    for partition, found in log.items():
        assert [(r.key, r.value, r.headers, r.timestamp) for r in found] == wanted[partition]
