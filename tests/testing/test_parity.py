"""What the embedded broker and Apache Kafka have in common: the same tests run on both."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

from asyncproducer import Producer
from asyncproducer.core.compression import codec
from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import (
    StoredRecord,
    decode_batch,
    encode_batch,
    read_header,
    split_batches,
    with_header,
)
from asyncproducer.testing.broker import EmbeddedCluster
from asyncproducer.testing.kafka import KafkaCluster
from asyncproducer.testing.messages import Message
from asyncproducer.testing.raw_client import RawClient, encode_request

KV = (b"k", b"v")
PRODUCE_VERSIONS = range(3, 14)


class Broker(NamedTuple):
    """A cluster of one node, of either kind."""

    bootstrap_servers: str
    create: Callable[..., Awaitable[None]]
    #: Returns when clients see the topic, with so many partitions, which all have a leader.
    until_there: Callable[..., Awaitable[None]]


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "kafka":
        real: KafkaCluster = request.getfixturevalue("kafka")

        async def create(name: str, **options: Any) -> None:
            await asyncio.to_thread(real.create_topic, name, **options)

        async def until_there(name: str, partitions: int | None = None) -> None:
            def there() -> bool:
                found = real.topic(name).values()
                whole = bool(found) if partitions is None else len(found) == partitions
                return whole and all(partition.leader >= 0 for partition in found)

            # Kafka does some things a little later than it says.
            await asyncio.to_thread(real.wait_until, there)

        yield Broker(real.bootstrap_servers, create, until_there)
        return
    async with EmbeddedCluster() as cluster:

        async def create_embedded(name: str, **options: Any) -> None:
            cluster.create_topic(name, **options)

        async def at_once(name: str, partitions: int | None = None) -> None:
            pass

        yield Broker(cluster.bootstrap_servers, create_embedded, at_once)


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.connect(broker.bootstrap_servers.split(",")[0]) as client:
        yield client


numbers = itertools.count(time.time_ns())


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A name that no other test has, nor one of an earlier run on somebody's cluster."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", request.node.name)[:80] + f"-{next(numbers)}"


@pytest.fixture
async def topic(broker: Broker, topic_name: str) -> str:
    await broker.create(topic_name, partitions=1)
    return topic_name


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def batch(*records: tuple[bytes | None, bytes | None], **options: Any) -> bytes:
    options.setdefault("timestamps", [now_ms()] * max(1, len(records)))
    return encode_batch(records or [KV], **options)


def idempotent(producer_id: int, epoch: int, sequence: int, count: int = 1) -> bytes:
    return batch(
        *[KV] * count, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
    )


async def metadata(client: RawClient, *names: str, version: int = 12, create: bool = False) -> Any:
    return await client.request(
        "metadata",
        version,
        topics=[{"name": name, "topic_id": None} for name in names],
        allow_auto_topic_creation=create,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )


async def topic_id(client: RawClient, name: str) -> uuid.UUID:
    found: uuid.UUID = (await metadata(client, name)).topics[0].topic_id
    return found


def produce_fields(
    name: str, records: bytes | None, *, acks: int = -1, partition: int = 0, topic_id: Any = None
) -> dict[str, Any]:
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout": 5000,
        "topic_data": [
            {
                "name": name,
                "topic_id": topic_id,
                "partition_data": [{"index": partition, "records": records}],
            }
        ],
    }


async def produce(
    client: RawClient, name: str, records: bytes | None, *, version: int = 12, **options: Any
) -> Message:
    """The answer for the one partition."""
    fields = produce_fields(name, records, **options)
    response = await client.request("produce", version, **fields)
    return response.responses[0].partition_responses[0]


async def fetch(client: RawClient, name: str, *, offset: int = 0, version: int = 12) -> Message:
    """The answer for partition 0."""
    response = await client.request(
        "fetch",
        version,
        max_wait=0,
        min_bytes=0,
        max_bytes=10**7,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[
            {
                "topic": name,
                "topic_id": await topic_id(client, name) if version > 12 else None,
                "partitions": [
                    {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10**7}
                ],
            }
        ],
        forgotten_topics_data=[],
        rack_id="",
    )
    return response.responses[0].partitions[0]


async def fetch_waiting(
    client: RawClient, name: str, offset: int, *, max_wait: int = 60_000, min_bytes: int = 1
) -> list[StoredRecord]:
    """Partition 0 from this offset on, as soon as there is so much."""
    place = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10**6}
    async with asyncio.timeout(20):
        response = await client.request(
            "fetch",
            4,
            max_wait=max_wait,
            min_bytes=min_bytes,
            max_bytes=10**6,
            isolation_level=0,
            topics=[{"topic": name, "partitions": [place]}],
        )
    data = response.responses[0].partitions[0].records
    return [record for stored in split_batches(data) for record in decode_batch(stored)]


async def read_all(client: RawClient, name: str) -> list[StoredRecord]:
    data = (await fetch(client, name)).records
    return [record for stored in split_batches(data) for record in decode_batch(stored)]


async def assert_closed(client: RawClient) -> None:
    assert await client.reader.read() == b""


# -- ApiVersions and the life of a connection


@pytest.mark.parametrize("version", range(5))
async def test_api_versions_lists_what_a_producer_needs(client: RawClient, version: int) -> None:
    response = await client.request(
        "api_versions", version, client_software_name="a.b-c", client_software_version="1.0"
    )
    assert response.error_code == ErrorCode.NONE
    ranges = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
    # 0 is a lie for librdkafka's sake (KAFKA-18659).
    assert ranges[0] == (0, 13)
    for key, wanted in {1: 12, 2: 7, 3: 12, 10: 4, 18: 4, 19: 7, 20: 6, 22: 5, 37: 3}.items():
        assert ranges[key][0] <= wanted <= ranges[key][1]


async def test_a_client_name_that_is_not_well_formed_is_an_invalid_request(
    client: RawClient,
) -> None:
    response = await client.request(
        "api_versions", 3, client_software_name="-x", client_software_version="1"
    )
    assert response.error_code == ErrorCode.INVALID_REQUEST
    assert response.api_keys == ()


async def test_api_versions_from_the_future_is_answered_in_v0(client: RawClient) -> None:
    fields = {"client_software_name": "x", "client_software_version": "1"}
    frame = bytearray(encode_request("api_versions", 3, fields, correlation_id=5))
    frame[6:8] = (99).to_bytes(2, "big")
    client.writer.write(frame)
    response = await client.receive("api_versions", 0, 5)
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    (supported,) = response.api_keys
    assert supported.api_key == 18
    assert supported.max_version >= 4
    # The connection goes on.
    assert (await client.request("api_versions", 0)).error_code == ErrorCode.NONE


@pytest.mark.parametrize(("position", "number"), [(4, 999), (6, 99)], ids=["api", "version"])
async def test_what_the_broker_does_not_know_closes_the_connection(
    client: RawClient, position: int, number: int
) -> None:
    frame = bytearray(encode_request("metadata", 1, {"topics": []}))
    frame[position : position + 2] = number.to_bytes(2, "big")
    client.writer.write(frame)
    await assert_closed(client)


async def test_produce_v2_is_advertised_and_refused(client: RawClient) -> None:
    frame = bytearray(encode_request("produce", 3, produce_fields("t", b"")))
    frame[6:8] = (2).to_bytes(2, "big")
    client.writer.write(frame)
    await assert_closed(client)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",  # a negative size
        b"\x7f\xff\xff\xff",  # a size that is too large
        b"\0\0\0\x03abc",  # no header
        b"\0\0\0\x0c\0\x03\0\x01\0\0\0\x01\xff\xff\xff\xff",  # a body that ends early
    ],
)
async def test_a_malformed_request_closes_the_connection(
    client: RawClient, broker: Broker, data: bytes
) -> None:
    client.writer.write(data)
    await assert_closed(client)
    async with await RawClient.connect(broker.bootstrap_servers.split(",")[0]) as other:
        assert (await other.request("api_versions", 0)).error_code == ErrorCode.NONE


async def test_pipelined_requests_are_answered_in_order(client: RawClient, topic: str) -> None:
    ids = []
    for index in range(10):
        api, version = (("metadata", 1), ("api_versions", 0))[index % 2]
        ids.append((api, version, client.send(api, version, topics=[])))
    for api, version, correlation_id in ids:
        await client.receive(api, version, correlation_id)


# -- Produce: what is stored


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
async def test_produce_answers_with_the_base_offset(
    client: RawClient, topic: str, version: int
) -> None:
    """SN-01"""
    number = await topic_id(client, topic)
    for offset in (0, 2):
        answer = await produce(client, topic, batch(KV, KV), version=version, topic_id=number)
        assert (answer.error_code, answer.index) == (ErrorCode.NONE, 0)
        assert (answer.base_offset, answer.log_append_time) == (offset, None)
        if version >= 5:
            assert answer.log_start_offset == 0
    records = await read_all(client, topic)
    assert [(r.offset, r.key, r.value) for r in records] == [(i, *KV) for i in range(4)]


@pytest.mark.parametrize("name", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_codec_is_stored_and_read_back(
    client: RawClient, topic: str, name: str
) -> None:
    codec_id = ["none", "gzip", "snappy", "lz4", "zstd"].index(name)
    rows = [(b"key", b"x" * 1000), (None, None), (b"", b"")]
    compress = None if name == "none" else codec(name).compress
    data = batch(*rows, headers=[("h", None), ("h", b"1")], attributes=codec_id, compress=compress)
    assert (await produce(client, topic, data)).error_code == ErrorCode.NONE
    records = await read_all(client, topic)
    assert [(record.key, record.value) for record in records] == rows
    assert {record.headers for record in records} == {(("h", None), ("h", b"1"))}
    header = read_header((await fetch(client, topic)).records)
    assert header.codec_id == codec_id


async def test_log_append_time_is_answered_and_stored(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    await broker.create(topic_name, configs={"message.timestamp.type": "LogAppendTime"})
    before = now_ms()
    answer = await produce(client, topic_name, batch(KV, KV, timestamps=[1, 2]))
    appended = answer.log_append_time.timestamp() * 1000
    assert before <= round(appended) <= now_ms()
    assert {r.timestamp for r in await read_all(client, topic_name)} == {round(appended)}


async def test_acks_1_is_answered(client: RawClient, topic: str) -> None:
    assert (await produce(client, topic, batch(), acks=1)).error_code == ErrorCode.NONE


async def test_acks_0_has_no_answer(client: RawClient, topic: str) -> None:
    client.send("produce", 9, **produce_fields(topic, batch(), acks=0))
    # The next answer is the next request's.
    assert (await metadata(client, topic)).topics[0].name == topic
    assert len(await read_all(client, topic)) == 1


async def test_acks_0_and_an_error_close_the_connection(client: RawClient, topic: str) -> None:
    client.send("produce", 9, **produce_fields(topic, batch(), acks=0, partition=7))
    await assert_closed(client)


async def test_acks_0_is_processed_although_the_client_closes_at_once(
    broker: Broker, client: RawClient, topic: str
) -> None:
    async with await RawClient.connect(broker.bootstrap_servers.split(",")[0]) as other:
        for _ in range(3):
            other.send("produce", 9, **produce_fields(topic, batch(), acks=0))
    records: list[StoredRecord] = []
    while len(records) < 3:
        records += await fetch_waiting(client, topic, len(records))
    assert [record.offset for record in records] == [0, 1, 2]


# -- Produce: what is refused


@pytest.mark.parametrize("acks", [2, -2, 100])
async def test_other_acks_are_refused(client: RawClient, topic: str, acks: int) -> None:
    answer = await produce(client, topic, batch(), acks=acks)
    assert answer.error_code == ErrorCode.INVALID_REQUIRED_ACKS
    assert (answer.base_offset, answer.log_start_offset) == (-1, -1)


async def test_unknown_topics_and_partitions_are_refused(client: RawClient, topic: str) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await produce(client, topic, batch(), partition=1)).error_code == unknown
    assert (await produce(client, f"not-{topic}"[-80:], batch())).error_code == unknown
    number = uuid.uuid4()
    answer = await produce(client, topic, batch(), version=13, topic_id=number)
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_ID


def changed(data: bytes, **fields: int) -> bytes:
    """The batch with another header, and a CRC that fits."""
    return with_header(data, read_header(data)._replace(**fields))


def moved_to(offset: int) -> bytes:
    return offset.to_bytes(8, "big") + batch()[8:]


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (lambda: b"", ErrorCode.INVALID_RECORD),
        (lambda: batch()[:30], ErrorCode.INVALID_RECORD),
        (lambda: batch()[:-1], ErrorCode.INVALID_RECORD),
        (lambda: batch() + batch(), ErrorCode.INVALID_RECORD),
        (lambda: batch()[:16] + b"\1" + batch()[17:], ErrorCode.INVALID_RECORD),
        (lambda: batch()[:16] + b"\3" + batch()[17:], ErrorCode.CORRUPT_MESSAGE),
        (lambda: batch()[:8] + b"\0\0\0\1" + batch()[12:], ErrorCode.CORRUPT_MESSAGE),
        (lambda: batch()[:-1] + b"\2", ErrorCode.CORRUPT_MESSAGE),
        (lambda: moved_to(1), ErrorCode.INVALID_RECORD),
        (lambda: changed(batch(), record_count=0), ErrorCode.INVALID_RECORD),
        (lambda: changed(batch(), record_count=2), ErrorCode.INVALID_RECORD),
        (
            lambda: changed(batch(), record_count=2, last_offset_delta=1),
            ErrorCode.INVALID_RECORD,
        ),
        (
            lambda: changed(batch(KV, KV), record_count=1, last_offset_delta=0),
            ErrorCode.INVALID_RECORD,
        ),
        (lambda: changed(batch(), attributes=0x20), ErrorCode.INVALID_RECORD),
        (lambda: changed(batch(), attributes=5), ErrorCode.UNKNOWN_SERVER_ERROR),
        (lambda: changed(batch(), attributes=1), ErrorCode.UNKNOWN_SERVER_ERROR),
        (lambda: changed(batch(), attributes=2), ErrorCode.UNKNOWN_SERVER_ERROR),
        (lambda: changed(batch(), attributes=3), ErrorCode.UNKNOWN_SERVER_ERROR),
        (lambda: changed(batch(), attributes=4), ErrorCode.UNKNOWN_SERVER_ERROR),
        (
            lambda: changed(batch(), producer_id=1, producer_epoch=0),
            ErrorCode.INVALID_RECORD,
        ),
    ],
    ids=[
        "nothing",
        "half a header",
        "cut",
        "two batches",
        "magic 1",
        "magic 3",
        "length 1",
        "crc",
        "base offset",
        "no records",
        "count",
        "too few records",
        "too many records",
        "control",
        "codec 5",
        "not gzip",
        "not snappy",
        "not lz4",
        "not zstd",
        "no sequence",
    ],
)
async def test_bad_batches_are_refused(
    client: RawClient, topic: str, records: Callable[[], bytes | None], code: ErrorCode
) -> None:
    """RC-03, RC-08"""
    answer = await produce(client, topic, records())
    assert ErrorCode(answer.error_code) == code
    assert (answer.base_offset, answer.record_errors) == (-1, ())
    # Nothing has happened.
    assert (await produce(client, topic, batch())).base_offset == 0


async def test_a_batch_of_zstd_needs_produce_v7(client: RawClient, topic: str) -> None:
    data = batch(attributes=4, compress=codec("zstd").compress)
    answer = await produce(client, topic, data, version=6)
    assert answer.error_code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert (await produce(client, topic, data, version=7)).error_code == ErrorCode.NONE


async def test_a_batch_may_have_max_message_bytes_and_no_more(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    data = batch((None, b"v" * 1000))
    await broker.create(topic_name, configs={"max.message.bytes": str(len(data))})
    assert (await produce(client, topic_name, data)).error_code == ErrorCode.NONE
    answer = await produce(client, topic_name, batch((None, b"v" * 1001)))
    assert (answer.error_code, answer.log_start_offset) == (ErrorCode.MESSAGE_TOO_LARGE, -1)


async def test_the_default_limit_is_a_mebibyte_and_a_bit(client: RawClient, topic: str) -> None:
    overhead = len(batch((None, b"v" * 1_000_000))) - 1_000_000
    for size, code in ((1_048_588, ErrorCode.NONE), (1_048_589, ErrorCode.MESSAGE_TOO_LARGE)):
        data = batch((None, b"v" * (size - overhead)))
        assert len(data) == size
        assert (await produce(client, topic, data)).error_code == code


async def test_timestamps_out_of_bounds_are_named(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    bounds = {f"message.timestamp.{side}.max.ms": "60000" for side in ("before", "after")}
    await broker.create(topic_name, configs=bounds)
    now = now_ms()
    answer = await produce(
        client, topic_name, batch(KV, KV, KV, timestamps=[now - 90_000, now, now + 90_000])
    )
    assert (answer.error_code, answer.base_offset) == (ErrorCode.INVALID_TIMESTAMP, -1)
    assert [error.batch_index for error in answer.record_errors] == [0, 2]
    assert answer.log_start_offset == 0
    assert answer.error_message
    answer = await produce(client, topic_name, batch(timestamps=[now + 90_000]), version=7)
    assert answer.error_code == ErrorCode.INVALID_TIMESTAMP


async def test_an_hour_ahead_is_the_default_bound(client: RawClient, topic: str) -> None:
    soon, late = now_ms() + 3_500_000, now_ms() + 3_700_000
    assert (await produce(client, topic, batch(timestamps=[soon]))).error_code == ErrorCode.NONE
    answer = await produce(client, topic, batch(timestamps=[late]))
    assert answer.error_code == ErrorCode.INVALID_TIMESTAMP
    assert (await produce(client, topic, batch(timestamps=[0]))).error_code == ErrorCode.NONE
    assert (await produce(client, topic, batch(timestamps=[-1]))).error_code == ErrorCode.NONE


async def test_a_compacted_topic_takes_no_null_key(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    await broker.create(topic_name, configs={"cleanup.policy": "compact"})
    answer = await produce(client, topic_name, batch(KV, (None, b"v"), (b"", b"v")))
    assert answer.error_code == ErrorCode.INVALID_RECORD
    assert [error.batch_index for error in answer.record_errors] == [1]
    assert answer.error_message
    assert (await produce(client, topic_name, batch((b"", None)))).error_code == ErrorCode.NONE


async def test_no_more_replicas_are_wanted_than_there_are(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    await broker.create(topic_name, partitions=1, configs={"min.insync.replicas": "2"})
    assert (await produce(client, topic_name, batch())).error_code == ErrorCode.NONE


async def test_internal_topics_are_not_written_to(broker: Broker, client: RawClient) -> None:
    name = "__transaction_state"
    await metadata(client, name, create=True)
    await broker.until_there(name)
    assert (await metadata(client, name)).topics[0].is_internal
    answer = await produce(client, name, batch())
    assert answer.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert (answer.base_offset, answer.log_start_offset) == (-1, -1)


async def test_the_true_maximum_timestamp_is_stored(client: RawClient, topic: str) -> None:
    now = now_ms()
    data = changed(batch(KV, KV, timestamps=[now, now - 5]), max_timestamp=now - 5)
    assert (await produce(client, topic, data)).error_code == ErrorCode.NONE
    assert read_header((await fetch(client, topic)).records).max_timestamp == now


# -- Produce: idempotence


@pytest.fixture
async def has_ids(broker: Broker) -> None:
    """A broker has to get a block of ids first. A producer waits for that."""
    async with Producer(broker.bootstrap_servers) as producer:
        await producer.warm_up()


@pytest.fixture
async def pid(client: RawClient, has_ids: None) -> int:
    response = await init_producer_id(client)
    assert response.error_code == ErrorCode.NONE
    found: int = response.producer_id
    return found


async def init_producer_id(
    client: RawClient, *, version: int = 5, producer_id: int = -1, epoch: int = -1
) -> Message:
    return await client.request(
        "init_producer_id",
        version,
        transactional_id=None,
        transaction_timeout=60_000,
        producer_id=producer_id,
        producer_epoch=epoch,
    )


@pytest.mark.parametrize("version", range(6))
@pytest.mark.usefixtures("has_ids")
async def test_each_producer_gets_an_id_of_its_own_at_epoch_0(
    client: RawClient, version: int
) -> None:
    answers = [await init_producer_id(client, version=version) for _ in range(3)]
    assert {(a.error_code, a.producer_epoch) for a in answers} == {(ErrorCode.NONE, 0)}
    assert len({answer.producer_id for answer in answers}) == 3


async def test_without_a_transactional_id_the_old_producer_id_does_not_matter(
    client: RawClient, pid: int
) -> None:
    answer = await init_producer_id(client, producer_id=pid, epoch=0)
    assert (answer.error_code, answer.producer_epoch) == (ErrorCode.NONE, 0)
    assert answer.producer_id != pid


async def test_half_of_a_producer_id_is_an_invalid_request(client: RawClient, pid: int) -> None:
    for producer_id, epoch in ((pid, -1), (-1, 0)):
        answer = await init_producer_id(client, producer_id=producer_id, epoch=epoch)
        assert answer.error_code == ErrorCode.INVALID_REQUEST


async def test_a_repeated_batch_gets_its_old_offset(
    client: RawClient, topic: str, pid: int
) -> None:
    batches = [idempotent(pid, 0, 3 * i, count=3) for i in range(5)]
    for index, data in enumerate(batches):
        assert (await produce(client, topic, data)).base_offset == 3 * index
    for index, data in enumerate(batches):
        answer = await produce(client, topic, data)
        assert (answer.error_code, answer.base_offset) == (ErrorCode.NONE, 3 * index)
        # A quirk: a duplicate has its maximum timestamp for the append time.
        appended = round(answer.log_append_time.timestamp() * 1000)
        assert appended == read_header(data).max_timestamp
    assert len(await read_all(client, topic)) == 15


async def test_the_sixth_batch_from_the_end_is_not_remembered(
    client: RawClient, topic: str, pid: int
) -> None:
    for sequence in range(6):
        await produce(client, topic, idempotent(pid, 0, sequence))
    answer = await produce(client, topic, idempotent(pid, 0, 0))
    assert answer.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await produce(client, topic, idempotent(pid, 0, 1))).base_offset == 1


@pytest.mark.parametrize(
    ("stored", "sent", "code"),
    [
        ([(0, 0)], (0, 2), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        ([(0, 5)], (0, 4), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        ([(0, 0)], (1, 1), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        ([(0, 0)], (1, 0), ErrorCode.NONE),
        ([(0, 0), (1, 0)], (0, 1), ErrorCode.INVALID_PRODUCER_EPOCH),
        ([(0, 0), (1, 0)], (0, 0), ErrorCode.INVALID_PRODUCER_EPOCH),
        ([(0, 2**31 - 1)], (0, 0), ErrorCode.NONE),
        ([], (0, 17), ErrorCode.NONE),
        ([], (3, 17), ErrorCode.NONE),
    ],
    ids=[
        "gap",
        "backwards",
        "new epoch, not from 0",
        "new epoch",
        "old epoch",
        "old epoch, duplicate",
        "wrap",
        "unknown producer",
        "unknown producer, later epoch",
    ],
)
async def test_sequences_are_checked(
    client: RawClient,
    topic: str,
    pid: int,
    stored: Sequence[tuple[int, int]],
    sent: tuple[int, int],
    code: ErrorCode,
) -> None:
    """Pairs of epoch and sequence."""
    for epoch, sequence in stored:
        answer = await produce(client, topic, idempotent(pid, epoch, sequence))
        assert answer.error_code == ErrorCode.NONE
    answer = await produce(client, topic, idempotent(pid, *sent))
    assert ErrorCode(answer.error_code) == code
    assert answer.log_start_offset == 0
    assert answer.base_offset == (len(stored) if code == ErrorCode.NONE else -1)


async def test_a_transactional_batch_needs_a_transactional_id(
    client: RawClient, topic: str, pid: int
) -> None:
    data = batch(producer_id=pid, producer_epoch=0, base_sequence=0, attributes=0x10)
    answer = await produce(client, topic, data, version=11)
    assert answer.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


# -- Metadata


@pytest.mark.parametrize("version", range(1, 14))
async def test_metadata_tells_leaders_and_nodes(
    broker: Broker, client: RawClient, topic_name: str, version: int
) -> None:
    await broker.create(topic_name, partitions=3)
    response = await metadata(client, topic_name, version=version)
    (found,) = response.topics
    assert (found.error_code, found.name, found.is_internal) == (ErrorCode.NONE, topic_name, False)
    assert sorted(p.partition_index for p in found.partitions) == [0, 1, 2]
    (node,) = response.brokers
    assert f"{node.host}:{node.port}" == broker.bootstrap_servers
    for partition in found.partitions:
        assert (partition.error_code, partition.leader_id) == (ErrorCode.NONE, node.node_id)
        assert partition.replica_nodes == partition.isr_nodes == (node.node_id,)
        if version >= 7:
            assert partition.leader_epoch == 0
    assert response.controller_id == node.node_id
    if version >= 2:
        assert response.cluster_id
    if version >= 10:
        assert found.topic_id is not None


async def test_all_topics_are_listed(client: RawClient, topic: str) -> None:
    response = await client.request("metadata", 1, topics=None)
    assert topic in {found.name for found in response.topics}
    response = await client.request("metadata", 1, topics=[])
    assert response.topics == ()
    response = await client.request("metadata", 0, topics=[])
    assert topic in {found.name for found in response.topics}


async def test_an_unknown_topic_is_not_created_unless_wanted(
    client: RawClient, topic_name: str
) -> None:
    for _ in range(2):
        (found,) = (await metadata(client, topic_name)).topics
        assert found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert (found.name, found.topic_id, found.partitions) == (topic_name, None, ())


async def test_a_topic_is_created_for_the_next_request(
    broker: Broker, client: RawClient, topic_name: str
) -> None:
    (found,) = (await metadata(client, topic_name, create=True)).topics
    assert found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await broker.until_there(topic_name)
    (found,) = (await metadata(client, topic_name)).topics
    assert found.error_code == ErrorCode.NONE


@pytest.mark.parametrize("create", [True, False])
async def test_a_bad_name_is_an_invalid_topic(client: RawClient, create: bool) -> None:
    (found,) = (await metadata(client, "no spaces", create=create)).topics
    assert found.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


async def test_a_topic_is_found_by_its_id(client: RawClient, topic: str) -> None:
    number = await topic_id(client, topic)
    unknown = uuid.uuid4()
    response = await client.request(
        "metadata",
        12,
        topics=[{"name": None, "topic_id": n} for n in (number, unknown)],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )
    answers = {found.topic_id: (found.error_code, found.name) for found in response.topics}
    assert answers == {
        number: (ErrorCode.NONE, topic),
        unknown: (ErrorCode.UNKNOWN_TOPIC_ID, None),
    }


# -- Fetch and ListOffsets


@pytest.mark.parametrize("version", range(4, 19))
async def test_records_are_fetched_in_every_version(
    client: RawClient, topic: str, version: int
) -> None:
    for value in (b"a", b"b"):
        await produce(client, topic, batch((None, value), (None, value)))
    answer = await fetch(client, topic, offset=2, version=version)
    assert (answer.error_code, answer.high_watermark) == (ErrorCode.NONE, 4)
    assert answer.last_stable_offset == 4
    assert [(r.offset, r.value) for r in decode_batch(answer.records)] == [(2, b"b"), (3, b"b")]
    assert (await fetch(client, topic, offset=4, version=version)).records in (b"", None)


@pytest.mark.parametrize("offset", [-1, 2])
async def test_offsets_out_of_range_are_refused(client: RawClient, topic: str, offset: int) -> None:
    await produce(client, topic, batch())
    answer = await fetch(client, topic, offset=offset)
    assert answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


async def list_offset(client: RawClient, name: str, timestamp: int, *, version: int = 7) -> Any:
    response = await client.request(
        "list_offsets",
        version,
        replica_id=-1,
        isolation_level=0,
        topics=[{"name": name, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}],
        timeout=1000,
    )
    return response.topics[0].partitions[0]


@pytest.mark.parametrize("version", range(1, 12))
async def test_offsets_are_listed_by_timestamp(client: RawClient, topic: str, version: int) -> None:
    now = now_ms()
    await produce(client, topic, batch(KV, KV, timestamps=[now, now + 10]))
    await produce(client, topic, batch(KV, KV, timestamps=[now + 30, now + 20]))
    wanted = {
        -1: (-1, 4),
        -2: (-1, 0),
        now: (now, 0),
        now + 5: (now + 10, 1),
        now + 15: (now + 30, 2),
        now + 31: (-1, -1),
    }
    if version >= 7:
        wanted[-3] = (now + 30, 2)
    if version >= 8:
        wanted[-4] = (-1, 0)
    if version >= 9:
        wanted[-5] = (-1, -1)
    for timestamp, expected in wanted.items():
        answer = await list_offset(client, topic, timestamp, version=version)
        assert answer.error_code == ErrorCode.NONE
        assert (answer.timestamp, answer.offset) == expected, timestamp
        if version >= 4 and answer.offset >= 0:
            assert answer.leader_epoch == 0


async def test_offsets_of_an_unknown_partition_are_refused(
    client: RawClient, topic_name: str
) -> None:
    answer = await list_offset(client, topic_name, -1)
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_fetch_waits_for_data_no_longer_than_asked(
    broker: Broker, client: RawClient, topic: str
) -> None:
    waiting = asyncio.create_task(fetch_waiting(client, topic, 0))
    async with await RawClient.connect(broker.bootstrap_servers.split(",")[0]) as other:
        await produce(other, topic, batch())
    assert len(await waiting) == 1
    # There will never be so many bytes.
    assert len(await fetch_waiting(client, topic, 0, max_wait=50, min_bytes=10**6)) == 1


# -- topics


async def create_topics(
    client: RawClient, *topics: Mapping[str, Any], version: int = 7, validate_only: bool = False
) -> dict[str, Message]:
    defaults: dict[str, Any] = {
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [],
        "configs": [],
    }
    response = await client.request(
        "create_topics",
        version,
        topics=[{**defaults, **topic} for topic in topics],
        timeout=10_000,
        validate_only=validate_only,
    )
    return {result.name: result for result in response.topics}


@pytest.mark.parametrize("version", range(2, 8))
async def test_topics_are_created_and_deleted(
    broker: Broker, client: RawClient, topic_name: str, version: int
) -> None:
    wanted = {"name": topic_name, "num_partitions": 2, "replication_factor": 1}
    results = await create_topics(client, wanted, version=version)
    assert results[topic_name].error_code == ErrorCode.NONE
    if version >= 5:
        assert results[topic_name].num_partitions == 2
        assert results[topic_name].replication_factor == 1
    await broker.until_there(topic_name, 2)
    results = await create_topics(client, wanted, version=version)
    assert results[topic_name].error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    response = await client.request(
        "delete_topics",
        version - 1,
        topic_names=[topic_name],
        topics=[{"name": topic_name, "topic_id": None}],
        timeout=10_000,
    )
    assert [(r.name, r.error_code) for r in response.responses] == [(topic_name, ErrorCode.NONE)]
    await broker.until_there(topic_name, 0)
    (found,) = (await metadata(client, topic_name)).topics
    assert found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_topic_is_deleted_by_its_id(client: RawClient, topic: str) -> None:
    number, unknown = await topic_id(client, topic), uuid.uuid4()
    response = await client.request(
        "delete_topics",
        6,
        topics=[{"name": None, "topic_id": n} for n in (number, unknown)],
        timeout=10_000,
    )
    assert {r.topic_id: r.error_code for r in response.responses} == {
        number: ErrorCode.NONE,
        unknown: ErrorCode.UNKNOWN_TOPIC_ID,
    }


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"name": "no spaces"}, ErrorCode.INVALID_TOPIC_EXCEPTION),
        ({"num_partitions": 0}, ErrorCode.INVALID_PARTITIONS),
        ({"replication_factor": 9}, ErrorCode.INVALID_REPLICATION_FACTOR),
        ({"configs": [{"name": "nonsense", "value": "1"}]}, ErrorCode.INVALID_CONFIG),
        (
            {"configs": [{"name": "cleanup.policy", "value": "compost"}]},
            ErrorCode.INVALID_CONFIG,
        ),
        (
            {"assignments": [{"partition_index": 1, "broker_ids": [1]}]},
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        (
            {"num_partitions": 1, "assignments": [{"partition_index": 0, "broker_ids": [1]}]},
            ErrorCode.INVALID_REQUEST,
        ),
    ],
)
async def test_impossible_topics_are_refused(
    client: RawClient, topic_name: str, options: Mapping[str, Any], code: ErrorCode
) -> None:
    results = await create_topics(client, {"name": topic_name, **options})
    (result,) = results.values()
    assert (ErrorCode(result.error_code), result.topic_id) == (code, None)
    assert result.error_message


async def test_validate_only_creates_nothing(client: RawClient, topic_name: str) -> None:
    results = await create_topics(client, {"name": topic_name}, validate_only=True)
    assert results[topic_name].error_code == ErrorCode.NONE
    (found,) = (await metadata(client, topic_name)).topics
    assert found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", range(4))
async def test_partitions_are_added(
    broker: Broker, client: RawClient, topic: str, version: int
) -> None:
    async def grow(count: int) -> ErrorCode:
        response = await client.request(
            "create_partitions",
            version,
            topics=[{"name": topic, "count": count, "assignments": None}],
            timeout=10_000,
            validate_only=False,
        )
        return ErrorCode(response.results[0].error_code)

    assert await grow(3) == ErrorCode.NONE
    await broker.until_there(topic, 3)
    assert len((await metadata(client, topic)).topics[0].partitions) == 3
    assert await grow(3) == ErrorCode.INVALID_PARTITIONS


# -- coordinators


@pytest.mark.parametrize("version", range(7))
async def test_coordinators_are_found(broker: Broker, client: RawClient, version: int) -> None:
    async def find() -> Message:
        response = await client.request(
            "find_coordinator", version, key="a-group", key_type=0, coordinator_keys=["a-group"]
        )
        if version >= 1:
            assert response.throttle_time == timedelta(0)
        return response.coordinators[0] if version >= 4 else response

    found = await find()
    if found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:
        await broker.until_there("__consumer_offsets")  # Kafka makes it now
        found = await find()
    assert found.error_code == ErrorCode.NONE
    assert f"{found.host}:{found.port}" == broker.bootstrap_servers
