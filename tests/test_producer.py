# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import asyncproducer
from asyncproducer import (
    AbortedError,
    AuthorizationError,
    BatchDeliveryError,
    BatchResult,
    BrokerRejected,
    BufferFull,
    BufferTimeout,
    CloseReport,
    ConfigError,
    ConnectionFailed,
    Delivery,
    DeliveryError,
    IllegalStateError,
    Interceptor,
    InvalidTopic,
    KafkaError,
    MetadataTimeout,
    PartitionInfo,
    Producer,
    ProducerClosed,
    ProducerConfig,
    ProducerNotStarted,
    Record,
    RecordMetadata,
    RecordTooLarge,
    SerializationError,
    TopicPartition,
)
from asyncproducer.plugins import TopicView
from asyncproducer.producer import State
from asyncproducer.serializers import json_serializer, str_serializer
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork, clock
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

#: A batch leaves when it is full, flushed, or after a minute.
LAZY: dict[str, Any] = {"linger_ms": 60_000, "adaptive_linger": False}


def now() -> float:
    return asyncio.get_running_loop().time()


def values(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    return [record.value for record in cluster.records(topic, partition)]


# -- making one --------------------------------------------------------------------------------


def test_making_one_needs_no_loop_and_does_nothing() -> None:
    producer: Producer[bytes, bytes] = Producer("broker:9092")
    assert producer.config.bootstrap_servers == ("broker:9092",)
    assert repr(producer) == "<Producer broker:9092 created>"
    assert producer.metrics()["record_send_total"] == 0
    assert not producer.health.ready


def test_options_are_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="linger_ms"):
        Producer("broker:9092", lingr_ms=5)  # type: ignore[call-arg]  # that is the point
    with pytest.raises(ConfigError, match="bootstrap_servers"):
        Producer()
    with pytest.raises(ConfigError, match="value_serializer=5"):
        Producer("broker:9092", value_serializer=5)  # type: ignore[arg-type]  # that is the point


class Deaf:
    def on_send(self, record: Record) -> Record:
        return record


@pytest.mark.parametrize(
    ("argument", "given", "says"),
    [
        ("config", {"bootstrap.servers": "a:1", "sasl.password": "secret"}, "from_config"),
        ("interceptors", [1], r"interceptors\[0\] .* int, .*on_send and no on_acknowledgement"),
        ("interceptors", [Interceptor(), Deaf()], r"interceptors\[1\] .*no on_acknowledgement"),
        ("interceptors", [Interceptor], r"interceptors\[0\] is the class Interceptor"),
        ("interceptors", Interceptor(), "a sequence"),
        ("connector", 5, "connector .* int, which has no resolve and no connect"),
        ("connector", MemoryNetwork, "connector is the class MemoryNetwork"),
        ("key_serializer", 5, "key_serializer=5"),
        ("close_timeout", -1, "close_timeout=-1"),
        ("close_timeout", "5", "close_timeout='5'"),
        ("close_timeout", True, "close_timeout=True"),
        ("close_timeout", math.nan, "close_timeout=nan"),
    ],
)
def test_arguments_are_checked_when_it_is_made(argument: str, given: Any, says: str) -> None:
    options = {argument: given}
    if argument != "config":
        options["bootstrap_servers"] = "broker:9092"
    with pytest.raises(ConfigError, match=says) as caught:
        Producer(**options)
    assert "secret" not in str(caught.value)


def test_the_classmethods_have_type_variables_of_their_own() -> None:
    """Else pyright takes `from_config(m, value_serializer=f)` for a producer of plain bytes."""
    own = {"Producer[K, V]", "SerializerFunction[K] | None", "SerializerFunction[V] | None"}
    methods: list[Any] = [Producer.from_config, Producer.from_env]
    for method in methods:
        assert own.isdisjoint(inspect.get_annotations(method.__func__).values())


def test_repr_of_one_that_could_not_be_made() -> None:
    """As a debugger or a traceback may ask for it."""
    producer: Producer[Any, Any] = Producer.__new__(Producer)
    producer._state = State.CREATED
    assert repr(producer) == "<Producer ? created>"


def test_config_and_options_do_not_go_together() -> None:
    config = ProducerConfig.from_options("broker:9092", linger_ms=7)
    assert Producer(config=config).config is config
    with pytest.raises(ConfigError, match="do not go together"):
        Producer(config=config, linger_ms=5)
    with pytest.raises(ConfigError, match="do not go together"):
        Producer("broker:9092", config=config)


def test_from_config_takes_names_of_java_and_librdkafka() -> None:
    mapping = {"bootstrap.servers": "a:1,b:2", "linger.ms": "7", "acks": "1"}
    producer: Producer[Any, Any] = Producer.from_config(
        mapping, key_serializer=str.encode, acks="all"
    )
    assert producer.config.bootstrap_servers == ("a:1", "b:2")
    assert (producer.config.linger_ms, producer.config.acks) == (7, -1)
    other: Producer[Any, Any] = Producer.from_config(
        {"bootstrap.servers": "a:1", "queue.buffering.max.ms": 9}
    )
    assert other.config.linger_ms == 9
    assert mapping == {"bootstrap.servers": "a:1,b:2", "linger.ms": "7", "acks": "1"}


def test_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "env:9092")
    monkeypatch.setenv("OTHER_BOOTSTRAP_SERVERS", "other:9092")
    monkeypatch.setenv("OTHER_LINGER_MS", "11")
    one: Producer[Any, Any] = Producer.from_env()
    two: Producer[Any, Any] = Producer.from_env("OTHER_", value_serializer=str.encode)
    assert one.config.bootstrap_servers == ("env:9092",)
    assert (two.config.bootstrap_servers, two.config.linger_ms) == (("other:9092",), 11)


async def test_serializers_are_arguments_and_may_be_left_out(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """CF-01: who gives one needs no option for it. Without one, also if None says so, bytes and
    text go as they are and the rest is refused by the send; Java refuses to make the producer.
    """
    async with new_producer(
        key_serializer=str_serializer, value_serializer=json_serializer
    ) as producer:
        await producer.send("t", {"n": 1}, key=7)
    for nothing in ({}, {"key_serializer": None, "value_serializer": None}):
        async with new_producer(**nothing) as producer:
            await producer.send("t", "größe", key=b"k")
            for record in ({"value": {"n": 1}}, {"value": b"v", "key": 7}):
                with pytest.raises(SerializationError):
                    await producer.send("t", **record)
    assert [(record.key, record.value) for record in cluster.records("t")] == [
        (b"7", b'{"n":1}'),
        (b"k", "größe".encode()),
        (b"k", "größe".encode()),
    ]
    servers = {"bootstrap.servers": "broker:9092"}
    Producer.from_config({**servers, "key.serializer": None})
    with pytest.raises(ConfigError, match="argument of Producer"):
        Producer.from_config({**servers, "key.serializer": "org.example.StringSerializer"})


async def test_made_from_config_it_sends(cluster: EmbeddedCluster) -> None:
    class Named(Producer[str, str]):
        """from_config gives what it is called on."""

    notes: list[Record] = []

    class Note(Interceptor):
        def on_send(self, record: Record) -> Record:
            notes.append(record)
            return record

    async with Named.from_config(
        {"bootstrap.servers": cluster.bootstrap_servers},
        connector=cluster.connector,
        key_serializer=str.encode,
        value_serializer=str.encode,
        interceptors=[Note()],
    ) as producer:
        assert type(producer) is Named
        await producer.send("t", "value", key="key")
    assert [(r.key, r.value) for r in cluster.records("t")] == [(b"key", b"value")]
    assert len(notes) == 1


async def test_client_ids(cluster: EmbeddedCluster, new_producer: New) -> None:
    """CF-09: plugins are made before the producer is, whose id they may ask for."""
    async with new_producer() as one, new_producer() as two, new_producer(client_id="me") as me:
        assert one.client_id != two.client_id
        assert one.client_id.startswith("producer-")
        await me.send("t", b"value")
    assert cluster.received("produce")[0].client_id == "me"


# -- its life ----------------------------------------------------------------------------------


async def test_states(new_producer: New) -> None:
    producer = new_producer()
    assert producer.health.state == "created"
    await producer.start()
    assert producer.health.state == "running"
    await producer.start()  # does nothing
    await producer.close()
    assert producer.health.state == "closed"
    assert repr(producer).endswith(" closed>")
    with pytest.raises(ProducerClosed, match=r"^start\(\): .*make a new one"):
        await producer.start()


async def test_starting_twice_at_the_same_time(new_producer: New) -> None:
    producer = new_producer()
    first = asyncio.create_task(producer.start())
    await turns(1)
    with pytest.raises(IllegalStateError, match=r"^start\(\): another task"):
        await producer.start()
    with pytest.raises(IllegalStateError, match=r"^close\(\): .* cancel start"):
        await producer.close()
    await first


def everything(producer: Producer[Any, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """All that needs a producer that runs, by the name that errors have for it; what some of it
    returns is to be awaited."""
    return [
        ("send", lambda: producer.send("t", b"value")),
        ("send", lambda: producer.enqueue("t", b"value")),
        ("send", lambda: producer.send_nowait("t", b"value")),
        ("send", lambda: producer.send_many("t", [b"value"])),
        ("flush", producer.flush),
        ("partitions_for", lambda: producer.partitions_for("t")),
        ("warm_up", lambda: producer.warm_up("t")),
        ("committed_offsets", lambda: producer.committed_offsets("g", [("t", 0)])),
        ("begin_transaction", producer.begin_transaction),
        ("commit_transaction", producer.commit_transaction),
        ("abort_transaction", producer.abort_transaction),
        ("send_offsets", lambda: producer.send_offsets({("t", 0): 1}, "g")),
        ("portal", producer.portal),
    ]


async def test_nothing_works_before_the_start(new_producer: New) -> None:
    for name, call in everything(new_producer()):
        with pytest.raises(ProducerNotStarted, match=rf"^{name}\(\): the producer is not started"):
            await call()


async def test_who_forgot_the_start_is_told_how_to_start(new_producer: New) -> None:
    producer = new_producer()
    for call in (producer.send, producer.enqueue):
        with pytest.raises(ProducerNotStarted, match="async with"):
            await call("t", b"value")


async def test_who_comes_while_it_starts_is_not_told_to_start_it(new_producer: New) -> None:
    producer = new_producer()
    starting = asyncio.create_task(producer.start())
    await asyncio.sleep(0)
    with pytest.raises(ProducerNotStarted, match=r"^flush\(\): .* STARTING it: wait for that"):
        await producer.flush()
    await starting
    await producer.flush()


async def test_nothing_works_after_the_close(new_producer: New) -> None:
    """IT-09."""
    async with new_producer() as producer:
        await producer.send("t", b"value")
    for name, call in everything(producer):
        with pytest.raises(ProducerClosed, match=rf"^{name}\(\): the producer is closed$"):
            await call()
    assert producer.metrics()["record_send_total"] == 1
    assert producer.health.problem == "the producer is closed"


async def test_failed_start_can_be_repeated(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """All or nothing."""
    await cluster.stop_broker(1)
    await cluster.stop_broker(2)
    producer = new_producer(max_block_ms=2000)
    began = now()
    with pytest.raises(ConnectionFailed, match="no Kafka broker could be reached within 2") as e:
        await producer.start()
    assert now() - began == pytest.approx(2.0, abs=0.01)
    for address in cluster.bootstrap_servers.split(","):
        assert address in str(e.value)
    assert not network.links
    assert producer.health.state == "created"
    with pytest.raises(ProducerNotStarted):
        await producer.send("t", b"value")
    await cluster.start_broker(1)
    await producer.start()
    await producer.send("t", b"value")


async def test_context_manager_closes_after_an_error(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """What was buffered is sent."""
    producer = new_producer(**LAZY)

    async def body() -> None:
        async with producer:
            await producer.enqueue("t", b"value")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert producer.health.state == "closed"
    assert values(cluster) == [b"value"]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_of_the_block_waits_for_close_timeout(
    cluster: EmbeddedCluster, new_producer: New, fails: bool
) -> None:
    """Also after an exception: what was taken is not dropped because something else failed."""
    producer = new_producer(close_timeout=3)

    async def body() -> Delivery:
        async with producer:
            await producer.warm_up("t")
            cluster.pause(1)
            deliveries.append(producer.send_nowait("t", b"value"))
            began.append(now())
            if fails:
                raise ZeroDivisionError
        return deliveries[0]

    deliveries: list[Delivery] = []
    began: list[float] = []
    if fails:
        with pytest.raises(ZeroDivisionError):
            await body()
    else:
        await body()
    assert now() - began[0] == pytest.approx(3, abs=0.01)
    assert isinstance(deliveries[0].exception(), AbortedError)
    cluster.resume(1)


@pytest.mark.parametrize(
    ("made", "given", "takes"),
    [
        ({}, {}, 30),
        ({"close_timeout": 2}, {}, 2),
        ({"close_timeout": 2}, {"timeout": 4}, 4),
        ({"close_timeout": 0}, {}, 0),
        ({"close_timeout": 2}, {"timeout": None}, 9),
        ({"close_timeout": None}, {}, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["close", "stop"])
async def test_close_and_stop_wait_for_close_timeout_unless_they_are_given_one(
    cluster: EmbeddedCluster,
    new_producer: New,
    name: str,
    made: dict[str, Any],
    given: dict[str, Any],
    takes: float,
) -> None:
    if takes == 9:
        made = {**made, "delivery_timeout_ms": 9000, "request_timeout_ms": 8000}
    async with new_producer(**made) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"value")
        report = await getattr(producer, name)(**given)
        assert report.elapsed == pytest.approx(takes, abs=0.01)
        assert isinstance(delivery.exception(), DeliveryError)
        cluster.resume(1)


async def test_every_way_to_make_one_takes_close_timeout(
    monkeypatch: pytest.MonkeyPatch, cluster: EmbeddedCluster
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", cluster.bootstrap_servers)
    mapping = {"bootstrap.servers": cluster.bootstrap_servers}
    options: dict[str, Any] = {"connector": cluster.connector, "close_timeout": 2}
    for producer in (Producer.from_config(mapping, **options), Producer.from_env(**options)):
        async with producer:
            await producer.warm_up("t")
            cluster.pause(1)
            delivery = producer.send_nowait("t", b"value")
            assert (await producer.close()).elapsed == pytest.approx(2, abs=0.01)
            assert isinstance(delivery.exception(), AbortedError)
            cluster.resume(1)


async def test_two_producers_share_nothing(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as one, new_producer() as two:
        await asyncio.gather(one.send("t", b"1"), two.send("t", b"2"))
        await one.close()
        await two.send("t", b"3")
    ids = {record.producer_id for record in cluster.records("t")}
    assert len(ids) == 2


@pytest.mark.real_time
async def test_over_tcp() -> None:
    """Its own connector, real sockets."""
    async with (
        EmbeddedCluster(topics={"t": 1}) as cluster,
        Producer(cluster.bootstrap_servers) as producer,
    ):
        result = await producer.send_many("t", [b"%d" % n for n in range(100)])
        assert result.acknowledged == 100
        await producer.flush()
        assert producer.health.ready
    assert values(cluster) == [b"%d" % n for n in range(100)]


# -- sending -----------------------------------------------------------------------------------


async def test_delivery(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t")
        delivery = producer.send_nowait("t", b"value", key=b"k", timestamp=1000)
        assert (delivery.topic, delivery.partition, delivery.timestamp) == ("t", 0, 1000)
        assert not delivery.done()
        with pytest.raises(IllegalStateError):
            delivery.result()
        with pytest.raises(IllegalStateError):
            delivery.exception()
        seen: list[Delivery] = []
        delivery.add_done_callback(seen.append)
        await producer.flush()
        assert seen == [delivery]
        assert delivery.exception() is None
        assert await delivery == await delivery == delivery.result()
        metadata = delivery.result()
        assert metadata == RecordMetadata("t", 0, 0, 1000, 1, 5)
        assert metadata.topic_partition == TopicPartition("t", 0)
        assert str(metadata.topic_partition) == "t-0"
        delivery.add_done_callback(seen.append)
        assert len(seen) == 2


async def test_delivery_may_be_awaited_by_many(cluster: EmbeddedCluster, new_producer: New) -> None:
    async def wait(delivery: Delivery) -> RecordMetadata:
        return await delivery

    async with new_producer() as producer:
        delivery = await producer.enqueue("t", b"value")
        tasks = [asyncio.create_task(wait(delivery)) for _ in range(3)]
        await turns(1)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1] == done[2] == delivery.result()


async def test_log_append_time_is_told(network: MemoryNetwork) -> None:
    """IT-01: where the topic keeps that."""
    async with (
        EmbeddedCluster(
            topics={"t": 1},
            network=network,
            message_timestamp_type="LogAppendTime",
            start_time_ms=1_000_000,
        ) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        metadata = await producer.send("t", b"value", timestamp=5)
        assert 1_000_000 <= metadata.timestamp < 1_001_000
        assert cluster.records("t")[0].timestamp == metadata.timestamp


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_codec(cluster: EmbeddedCluster, new_producer: New, codec: str) -> None:
    """IT-01: 100 records, null keys and values among them, offsets in order."""
    async with new_producer(compression_type=codec, linger_ms=10) as producer:
        await producer.warm_up("t")
        records = [
            Record("", None if n % 7 == 0 else b"%d" % n, key=None if n % 5 == 0 else b"k%d" % n)
            for n in range(100)
        ]
        result = await producer.send_many("t", records)
    assert [metadata.offset for metadata in result if isinstance(metadata, RecordMetadata)] == [
        *range(100)
    ]
    assert [(r.key, r.value) for r in cluster.records("t")] == [(r.key, r.value) for r in records]
    codec_ids = {b.codec_id for r in cluster.received("produce") for b in r.batches}
    assert codec_ids == {["none", "gzip", "snappy", "lz4", "zstd"].index(codec)}


async def test_compression_level(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(compression_type="gzip", compression_level=9) as producer:
        await producer.send("t", b"value" * 100)
    assert values(cluster) == [b"value" * 100]


async def test_batch_size_0(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-02: one record in each batch."""
    async with new_producer(batch_size=0) as producer:
        await producer.send_many("t4", [Record("", b"%d" % n, key=b"k") for n in range(5)])
        await producer.send_many("t4", [b"no key"] * 5)
    batches = [b for r in cluster.received("produce") for b in r.batches]
    assert {batch.record_count for batch in batches} == {1}
    assert len(batches) == 10


async def test_linger_gathers_records(cluster: EmbeddedCluster, new_producer: New) -> None:
    """It counts from the first record of a batch."""
    async with new_producer(linger_ms=100, adaptive_linger=False) as producer:
        await producer.warm_up("t")
        began = now()
        first = producer.send_nowait("t", b"1")
        await asyncio.sleep(0.09)
        producer.send_nowait("t", b"2")
        await first
        assert now() - began == pytest.approx(0.102, abs=0.001)
        assert values(cluster) == [b"1", b"2"]


async def test_lone_record_does_not_linger(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(linger_ms=60_000) as producer:
        await producer.warm_up("t")
        began = now()
        await producer.send("t", b"value")
        assert now() - began < 0.01


# -- send_many ---------------------------------------------------------------------------------


async def test_send_many_takes_values_and_records(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        result = await producer.send_many(
            "t4",
            [b"value", "text", None, Record("t4", b"r", b"k", {"h": b"1"}, 3, 1000)],
        )
        assert isinstance(result, BatchResult)
        assert result.acknowledged == len(result) == 4
        last = result[-1]
        assert isinstance(last, RecordMetadata)
        assert (last.topic, last.partition, last.timestamp) == ("t4", 3, 1000)
    (record,) = [r for r in cluster.records("t4", 3) if r.key == b"k"]
    assert record.headers == (("h", b"1"),)


async def test_send_many_to_several_topics(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        result = await producer.send_many(
            None, [Record("t", b"1"), Record("t4", b"2", partition=0), b"3"], raise_on_error=False
        )
    (failed,) = result.failed
    assert failed[0] == 2
    assert isinstance(failed[1], InvalidTopic)
    assert (values(cluster), values(cluster, "t4")) == ([b"1"], [b"2"])


async def test_send_many_refuses_a_record_that_names_another_topic(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        result = await producer.send_many(
            "t", [Record("t4", b"1"), Record("t", b"2"), Record("", b"3")], raise_on_error=False
        )
    ((index, error),) = result.failed
    assert (index, type(error)) == (0, InvalidTopic)
    assert "'t4'" in str(error)
    assert "'t'" in str(error)
    assert (values(cluster), cluster.records("t4")) == ([b"2", b"3"], [])


@pytest.mark.parametrize(
    "records",
    [Record("t", b"value"), "text", b"bytes", bytearray(b"x"), memoryview(b"x")],
    ids=type,
)
async def test_send_many_refuses_what_is_one_record(
    cluster: EmbeddedCluster, new_producer: New, records: Any
) -> None:
    """Each of them can be iterated, with another outcome than anybody wants."""
    async with new_producer() as producer:
        with pytest.raises(TypeError, match=f"one {type(records).__name__}, not an iterable"):
            await producer.send_many("t", records)
    assert values(cluster) == []


async def test_send_many_waits_once_for_a_topic_that_does_not_appear(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The other topics are not concerned."""
    async with new_producer(max_block_ms=1000) as producer:
        records = [Record(topic, b"%d" % n) for n in range(5) for topic in ("nowhere", "t")]
        began = now()
        result = await producer.send_many(None, records, raise_on_error=False)
        assert now() - began == pytest.approx(1.0, abs=0.1)
        assert [index for index, _ in result.failed] == [0, 2, 4, 6, 8]
        errors = [error for _, error in result.failed]
        assert {type(error) for error in errors} == {MetadataTimeout}
        assert len(set(map(id, errors))) == 5
        for error in errors:
            assert "'nowhere' is not known after 1000 ms" in str(error)
            assert isinstance(error.__cause__, KafkaError)
        assert producer.metrics()["record_error_total"] == 5
    assert values(cluster) == [b"%d" % n for n in range(5)]


async def test_send_many_waits_once_for_partitions_that_do_not_appear(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(max_block_ms=1000) as producer:
        records = [Record("", b"%d" % n, partition=n % 5) for n in range(20)]
        began = now()
        result = await producer.send_many("t4", records, raise_on_error=False)
        assert now() - began == pytest.approx(1.0, abs=0.1)
    assert [index for index, _ in result.failed] == [4, 9, 14, 19]
    assert {type(error) for _, error in result.failed} == {MetadataTimeout}


async def test_send_many_asks_once_for_a_topic_that_is_denied(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t", times=None)
    async with new_producer() as producer:
        began = now()
        result = await producer.send_many("t", [b"value"] * 100, raise_on_error=False)
        assert now() - began < 0.5
    errors = [error for _, error in result.failed]
    assert {type(error) for error in errors} == {AuthorizationError}
    assert len(errors) == len(set(map(id, errors))) == 100
    assert {error.code for error in errors if isinstance(error, KafkaError)} == {29}


async def test_send_many_goes_on_when_the_topic_is_there_after_all(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"waits in vain"
        await asyncio.sleep(600)  # nobody asks for it any more
        cluster.create_topic("late")
        yield b"refused at once, and asks"
        await asyncio.sleep(1)
        yield b"in time"

    async with new_producer(max_block_ms=1000) as producer:
        result = await producer.send_many("late", slow(), raise_on_error=False)
    assert [type(outcome) for outcome in result] == [
        MetadataTimeout,
        MetadataTimeout,
        RecordMetadata,
    ]


async def test_send_many_goes_on_when_the_partition_is_there_after_all(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def slow() -> AsyncIterator[Record]:
        yield Record("", b"waits in vain", partition=1)
        await asyncio.sleep(60)  # nobody asks for it any more
        cluster.add_partitions("t", 2)
        yield Record("", b"refused at once, and asks", partition=1)
        await asyncio.sleep(1)
        yield Record("", b"in time", partition=1)

    async with new_producer(max_block_ms=1000) as producer:
        result = await producer.send_many("t", slow(), raise_on_error=False)
    assert [index for index, _ in result.failed] == [0, 1]


async def test_send_many_waits_once_for_memory_that_does_not_come(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """A few records fill the buffer."""
    async with new_producer(
        buffer_memory=1000, batch_size=200, batch_max_bytes=0, max_block_ms=1000
    ) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        asyncio.get_running_loop().call_later(5, cluster.resume, 1)
        began = now()
        result = await producer.send_many(
            "t", (b"%0100d" % n for n in range(100)), raise_on_error=False
        )
        assert now() - began == pytest.approx(5.0, abs=0.1)
        assert producer.metrics()["record_error_total"] == len(result.failed) > 90
    errors = [error for _, error in result.failed]
    assert [index for index, _ in result.failed] == [*range(100 - len(errors), 100)]
    assert {type(error) for error in errors} == {BufferTimeout}
    assert len(set(map(id, errors))) == len(errors)
    assert all("bytes of buffer_memory within 1.000 s" in str(error) for error in errors)


async def test_send_many_does_not_wait_anew_for_what_is_larger_than_the_rest_of_the_buffer(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Some memory is free all the time, but not enough."""
    async with new_producer(buffer_memory=2_000_000, max_block_ms=1000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        asyncio.get_running_loop().call_later(5, cluster.resume, 1)
        began = now()
        result = await producer.send_many("t", [bytes(900_000)] * 20, raise_on_error=False)
        assert now() - began == pytest.approx(5.0, abs=0.1)
    assert [index for index, _ in result.failed] == [*range(2, 20)]


async def test_send_many_goes_on_as_long_as_the_buffer_drains(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Each record has its own time to get in, whatever all of them take."""
    cluster.inject("produce", delay=0.9, times=None)
    async with new_producer(
        buffer_memory=400,
        batch_size=200,
        batch_max_bytes=0,
        max_block_ms=1000,
        max_in_flight_requests_per_connection=1,
    ) as producer:
        began = now()
        result = await producer.send_many("t", (b"%0100d" % n for n in range(20)))
        assert now() - began > 8
    assert result.acknowledged == 20


async def test_send_many_goes_on_when_memory_comes_after_all(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        for number in range(20):
            yield b"%0100d" % number
        cluster.resume(1)
        await asyncio.sleep(1)
        for number in range(20):
            yield b"%0100d" % number

    async with new_producer(
        buffer_memory=1000, batch_size=200, batch_max_bytes=0, max_block_ms=1000
    ) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        result = await producer.send_many("t", slow(), raise_on_error=False)
    failed = [index for index, _ in result.failed]
    assert failed == [*range(20 - len(failed), 20)]
    assert len(failed) > 10


class Others:
    """What else the loop has to do: how often it has had its turn."""

    ran = 0

    async def run(self) -> None:
        while True:
            self.ran += 1
            await asyncio.sleep(0)


async def test_send_many_lets_others_run_while_it_refuses(new_producer: New) -> None:
    others = Others()

    def records() -> Iterator[bytes]:
        yield b"waits in vain"
        yield from [b"refused at once"] * 1500  # the first thousand may be taken before that ends
        task = asyncio.create_task(others.run())
        yield from [b"refused at once"] * 3500
        task.cancel()

    async with new_producer(max_block_ms=1000) as producer:
        with pytest.raises(BatchDeliveryError, match="5001 of 5001"):
            await producer.send_many("nowhere", records())
    assert 50 <= others.ran < 1000


@pytest.mark.parametrize("why", ["type", "serializer", "size", "no topic"])
async def test_send_many_lets_others_run_while_each_record_is_wrong(
    new_producer: New, why: str
) -> None:
    others = Others()

    def serialized(value: Any) -> bytes:
        raise KeyError(value)

    options: dict[str, Any] = {"value_serializer": serialized} if why == "serializer" else {}
    wrong: Any = bytes(2_000_000) if why == "size" else b"" if why == "no topic" else 1
    async with new_producer(**options) as producer:
        await producer.warm_up("t")
        task = asyncio.create_task(others.run())
        topic = None if why == "no topic" else "t"
        result = await producer.send_many(topic, [wrong] * 1000, raise_on_error=False)
        task.cancel()
    assert len(result.failed) == 1000
    assert 10 <= others.ran < 200
    for _, error in result.failed:
        assert error.__traceback__ is None, "its frames have the record"


async def test_a_record_that_cannot_be_read_does_not_stop_the_others(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    view = memoryview(b"gone")
    view.release()
    header: Any = ("name", view)
    records = [b"0", view, Record("t", b"2", headers=[header]), Record("t", b"3", key=view)]
    async with new_producer() as producer:
        result = await producer.send_many("t", [*records, b"4"], raise_on_error=False)
    assert [row for row, _ in result.failed] == [1, 2, 3]
    assert all(isinstance(error, SerializationError) for _, error in result.failed)
    assert [record.value for record in cluster.records("t")] == [b"0", b"4"]


async def test_send_many_of_nothing_is_refused_where_anything_would_be(new_producer: New) -> None:
    producer = new_producer()
    with pytest.raises(ProducerNotStarted):
        await producer.send_many("t", [])
    async with producer:
        assert len(await producer.send_many("t", [])) == 0
    taken = iter([b"v"])
    with pytest.raises(ProducerClosed):
        await producer.send_many("t", taken)
    assert list(taken) == [b"v"]


async def test_send_many_refuses_in_vain_and_notices_the_close(new_producer: New) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"waits in vain"
        await producer.close()
        yield b"too late"

    async with new_producer(max_block_ms=1000) as producer:
        with pytest.raises(ProducerClosed):
            await producer.send_many("nowhere", slow())


async def test_send_many_takes_iterators(cluster: EmbeddedCluster, new_producer: New) -> None:
    async def produce() -> AsyncIterator[bytes]:
        for number in range(50):
            await asyncio.sleep(0.01)
            yield b"%d" % number

    async with new_producer() as producer:
        await producer.send_many("t", produce())
        await producer.send_many("t", (b"%d" % number for number in range(50, 100)))
        assert (await producer.send_many("t", [])).acknowledged == 0
    assert values(cluster) == [b"%d" % number for number in range(100)]


async def test_send_many_keeps_the_order_with_a_tiny_buffer(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(buffer_memory=1000, batch_size=200, batch_max_bytes=0) as producer:
        result = await producer.send_many("t", (b"%0100d" % n for n in range(500)))
    assert [m.offset for m in result if isinstance(m, RecordMetadata)] == list(range(500))
    assert [int(value or b"") for value in values(cluster)] == list(range(500))


async def test_result_of_send_many(cluster: EmbeddedCluster, new_producer: New) -> None:
    """One entry per record, in their order: where it is, or why it is not."""
    cluster.create_topic("compact", configs={"cleanup.policy": "compact"})
    async with new_producer(linger_ms=0, batch_size=1) as producer:
        result = await producer.send_many(
            "compact",
            [
                Record("", b"good", b"k"),
                Record("", bytes(2_000_000), b"k"),
                Record("", b"no key"),
                Record("", 5, b"k"),
                Record("", b"good", b"k"),
            ],
            raise_on_error=False,
        )
    kinds = [type(outcome) for outcome in result]
    assert kinds == [
        RecordMetadata,
        RecordTooLarge,
        BrokerRejected,
        SerializationError,
        RecordMetadata,
    ]
    assert len(result) == 5
    assert result.acknowledged == 2
    assert [index for index, _ in result.failed] == [1, 2, 3]
    assert [type(error) for _, error in result.failed] == kinds[1:4]
    assert [type(outcome) for outcome in result[1:3]] == kinds[1:3]
    assert result.failed is result.failed
    assert repr(result) == "<BatchResult 2 acknowledged, 3 failed>"


async def test_send_many_raises_all_errors(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        with pytest.raises(BatchDeliveryError, match=r"2 of 3 records .* number 0: ") as caught:
            await producer.send_many("t", [bytes(2_000_000), b"good", 5])
    assert [type(error) for error in caught.value.exceptions] == [
        RecordTooLarge,
        SerializationError,
    ]
    assert values(cluster) == [b"good"]


async def test_send_many_with_an_iterable_that_raises(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """What was buffered goes on."""

    def broken() -> Iterator[bytes]:
        yield b"1"
        yield b"2"
        raise ZeroDivisionError

    async with new_producer() as producer:
        with pytest.raises(ZeroDivisionError):
            await producer.send_many("t", broken())
    assert values(cluster) == [b"1", b"2"]


async def test_send_many_cancelled(cluster: EmbeddedCluster, new_producer: New) -> None:
    async def endless() -> AsyncIterator[bytes]:
        number = 0
        while True:
            yield b"%d" % number
            number += 1
            await asyncio.sleep(1)

    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send_many("t", endless()))
        await asyncio.sleep(4.5)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert values(cluster) == [b"%d" % number for number in range(5)]


async def test_send_many_when_the_producer_is_closed_meanwhile(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.sleep(1)
        yield b"2"

    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send_many("t", slow()))
        await asyncio.sleep(0.5)
        await producer.close()
        with pytest.raises(ProducerClosed):
            await sending
    assert values(cluster) == [b"1"]


# -- flush -------------------------------------------------------------------------------------


async def test_flush_sends_what_lingers(cluster: EmbeddedCluster, new_producer: New) -> None:
    """KP-20, IT-07: linger ends, all is done afterwards, and the time is counted."""
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t4")
        began = now()
        sent = [producer.send_nowait("t4", b"%d" % n, partition=n % 4) for n in range(20)]
        await producer.flush()
        assert now() - began < 0.1
        assert all(delivery.done() for delivery in sent)
        assert producer.metrics()["flush_time_ns_total"] > 0
        # And lingering goes on.
        later = producer.send_nowait("t4", b"later", partition=0)
        await asyncio.sleep(50)
        assert not later.done()


async def test_flush_does_not_wait_for_later_records(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(batch_size=150, linger_ms=0) as producer:
        await producer.send("t4", b"0", partition=0)
        await producer.send("t4", b"0", partition=1)
        held = cluster.inject("produce", hold=True, node=2)
        early = producer.send_nowait("t4", b"early", partition=0)
        flushing = asyncio.create_task(producer.flush())
        await turns(2)
        late = producer.send_nowait("t4", b"late", partition=1)
        await flushing
        assert early.done()
        assert not late.done()
        held.release()


async def test_flush_without_anything_to_send(new_producer: New) -> None:
    async with new_producer() as producer:
        began = now()
        await producer.flush()
        await producer.flush(timeout=0)
        assert now() == began


async def test_failed_records_do_not_fail_a_flush(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", error="INVALID_RECORD")
        delivery = producer.send_nowait("t", b"bad")
        await producer.flush()
        assert isinstance(delivery.exception(), BrokerRejected)


async def test_flush_times_out(cluster: EmbeddedCluster, new_producer: New) -> None:
    """And the records go on."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"value")
        with pytest.raises(TimeoutError, match="1 batches were not acknowledged within 2 s"):
            await producer.flush(timeout=2)
        assert not delivery.done()
        cluster.resume(1)
        await delivery


async def test_flush_with_a_negative_timeout(new_producer: New) -> None:
    """As in close."""
    async with new_producer() as producer:
        with pytest.raises(ValueError, match="timeout=-1"):
            await producer.flush(-1)


async def test_cancelled_flush(cluster: EmbeddedCluster, new_producer: New) -> None:
    """The records go on, and lingering is not switched off for ever."""
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"1")
        flushing = asyncio.create_task(producer.flush())
        await asyncio.sleep(1)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        cluster.resume(1)
        await delivery
        later = producer.send_nowait("t", b"2")
        await asyncio.sleep(30)
        assert not later.done()


async def test_flushes_at_the_same_time(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t")
        sent = producer.send_nowait("t", b"1")
        first = asyncio.create_task(producer.flush())
        await turns(1)
        also = producer.send_nowait("t", b"2")
        await asyncio.gather(first, producer.flush())
        assert sent.done()
        assert also.done()


async def test_flush_from_a_callback(cluster: EmbeddedCluster, new_producer: New) -> None:
    """KP-21: a callback cannot wait, so nothing can lock up: it starts a task."""
    async with new_producer(**LAZY) as producer:
        begun: list[tuple[Delivery, asyncio.Task[None]]] = []

        def flush(_: Delivery) -> None:
            later = producer.send_nowait("t", b"later")
            begun.append((later, asyncio.create_task(producer.flush())))

        delivery = await producer.enqueue("t", b"value")
        delivery.add_done_callback(flush)
        began = now()
        await producer.flush()
        ((later, flushing),) = begun
        assert not later.done()
        await flushing
        assert later.result().offset == 1
        assert now() < began + 1


# -- what is known of topics -------------------------------------------------------------------


async def test_partitions_for(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(max_block_ms=3000) as producer:
        partitions = await producer.partitions_for("t4")
        topic_id = partitions[0].topic_id
        assert topic_id is not None
        assert topic_id != (await producer.partitions_for("t"))[0].topic_id
        assert partitions == tuple(PartitionInfo("t4", p, 1 + p % 2, 0, topic_id) for p in range(4))
        began = now()
        await producer.partitions_for("t4")
        assert now() == began
        with pytest.raises(MetadataTimeout, match="'missing' is not known after 3000 ms") as caught:
            await producer.partitions_for("missing")
        assert now() - began == pytest.approx(3.0)
        assert isinstance(caught.value.__cause__, KafkaError)


@pytest.mark.parametrize("topic", [None, 5, "a b"])
async def test_partitions_for_nonsense(new_producer: New, topic: Any) -> None:
    """KP-06."""
    async with new_producer() as producer:
        with pytest.raises(InvalidTopic):
            await producer.partitions_for(topic)


async def test_partitions_for_a_topic_that_was_denied_once(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("metadata", error="TOPIC_AUTHORIZATION_FAILED", topic="t")
    async with new_producer() as producer:
        with pytest.raises(KafkaError, match="not authorized"):
            await producer.partitions_for("t")
        assert len(await producer.partitions_for("t")) == 1


@pytest.mark.parametrize("call", ["partitions_for", "warm_up"])
async def test_who_waits_for_metadata_is_told_of_a_close_when_it_begins(
    cluster: EmbeddedCluster, new_producer: New, call: str
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        asking = asyncio.create_task(getattr(producer, call)("missing"))
        cluster.inject("produce", delay=5.0)
        delivery = await producer.enqueue("t", b"v")
        await asyncio.sleep(1)
        began = now()
        closing = asyncio.create_task(producer.close())
        with pytest.raises(ProducerClosed, match="closed while waiting for topic 'missing'"):
            await asking
        assert now() == began
        assert not closing.done()
        assert (await closing).clean
        assert delivery.done()


@pytest.mark.parametrize("call", ["partitions_for", "warm_up"])
async def test_nothing_is_left_of_a_call_that_waited_in_vain_or_was_cancelled(
    new_producer: New, call: str
) -> None:
    async with new_producer(max_block_ms=1000) as producer:
        for cancels in (True, False):
            asking = asyncio.create_task(getattr(producer, call)("missing"))
            await asyncio.sleep(0.5)
            assert len(producer._watchers) == 1
            if cancels:
                asking.cancel()
            await asyncio.wait([asking])
            assert producer._watchers == []
        with pytest.raises(MetadataTimeout):
            await asking


async def test_warm_up_leaves_nothing_to_wait_for(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t", "t4")
        assert producer.health.brokers_connected == 2
        began = now()
        deliveries = [producer.send_nowait("t4", b"value", partition=p) for p in range(4)]
        for delivery in deliveries:
            await delivery
        assert now() - began < 0.006  # two ways of a millisecond each, and the next request


async def test_warm_up_without_topics_gets_the_producer_id(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    held = cluster.inject("init_producer_id", hold=True)
    async with new_producer() as producer:
        warming = asyncio.create_task(producer.warm_up())
        await asyncio.sleep(1)
        assert not warming.done()
        held.release()
        await warming
    async with new_producer(enable_idempotence=False) as producer:
        await producer.warm_up()


async def test_warm_up_waits_for_the_leaders_of_now(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """A broker goes away while an application starts, and another leads its partitions."""
    async with new_producer(max_block_ms=60_000) as producer:
        await producer.partitions_for("t4")
        await cluster.stop_broker(2)
        warming = asyncio.create_task(producer.warm_up("t4"))
        await asyncio.sleep(0.05)
        for partition in range(4):
            cluster.move_leader("t4", partition, 1)
        began = now()
        await warming
        assert now() - began < 10


async def test_warm_up_that_fails(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(max_block_ms=2000) as producer:
        with pytest.raises(InvalidTopic):
            await producer.warm_up("t", "a/b")
        with pytest.raises(MetadataTimeout, match="'missing'"):
            await producer.warm_up("t", "missing")
        await cluster.stop_broker(2)
        cluster.move_leader("t4", 1, -1)
        began = now()
        await producer.warm_up("t")
        assert now() - began < 1


async def test_warm_up_without_a_connection(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(max_block_ms=2000) as producer:
        cluster.pause(2)
        with pytest.raises(MetadataTimeout, match="connections to the leaders of 't4': not within"):
            await producer.warm_up("t4")
        cluster.resume(2)


# -- close -------------------------------------------------------------------------------------


async def test_close_delivers_everything(cluster: EmbeddedCluster, new_producer: New) -> None:
    """IT-07: what lingers too. The report counts."""
    async with new_producer(**LAZY) as producer:
        await producer.warm_up("t")
        sent = [producer.send_nowait("t", b"%d" % n) for n in range(10)]
        report = await producer.close()
        assert all(delivery.done() for delivery in sent)
        assert report == CloseReport(10, 0, 0, report.elapsed)
        assert report.clean
        assert report.elapsed < 0.1
    assert len(values(cluster)) == 10


async def test_closing_again_gives_the_same_report(new_producer: New) -> None:
    """KP-15."""
    async with new_producer() as producer:
        await producer.send("t", b"value")
        report = await producer.close()
        assert await producer.close() is report
        assert await producer.close(0) is report
        assert await producer.stop() is report


async def test_close_of_one_that_was_never_started(new_producer: New) -> None:
    producer = new_producer()
    assert await producer.close() == CloseReport(0, 0, 0, 0.0)
    assert await producer.stop() == CloseReport(0, 0, 0, 0.0)
    with pytest.raises(ProducerClosed):
        await producer.start()


async def test_close_with_a_negative_timeout(new_producer: New) -> None:
    """KP-15."""
    async with new_producer() as producer:
        with pytest.raises(ValueError, match="timeout=-1"):
            await producer.close(-1)
        await producer.send("t", b"it goes on")


@pytest.mark.parametrize("timeout", [0, 0.5, 3])
async def test_close_ends_within_its_timeout_when_the_broker_hangs(
    cluster: EmbeddedCluster, new_producer: New, timeout: float
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        in_flight = producer.send_nowait("t", b"1")
        await asyncio.sleep(0.1)
        lingering = producer.send_nowait("t", b"2")
        began = now()
        report = await producer.close(timeout)
        assert now() - began == pytest.approx(timeout, abs=0.1)
        assert report.elapsed == pytest.approx(timeout, abs=0.1)
        assert (report.acknowledged, report.failed, report.aborted) == (0, 2, 2)
        assert not report.clean
        # The first batch of a partition is waited for: the second was never sent.
        for delivery, persisted in ((in_flight, "maybe"), (lingering, "no")):
            error = delivery.exception()
            assert isinstance(error, AbortedError)
            assert "the producer was closed" in str(error)
            assert error.persisted == persisted
        cluster.resume(1)


async def test_close_ends_within_its_timeout_when_the_brokers_are_gone(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        await cluster.stop_broker(1)
        await cluster.stop_broker(2)
        await asyncio.sleep(0.1)  # until it is noticed
        delivery = producer.send_nowait("t", b"value")
        report = await producer.close(5)
        assert report.elapsed == pytest.approx(5, abs=0.1)
        error = delivery.exception()
        assert isinstance(error, AbortedError)
        assert error.persisted == "no"


async def test_close_ends_within_its_timeout_when_the_broker_takes_no_more_bytes(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The transport still has some to write: there is no time left for that."""
    network.window = 1000
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        producer.send_nowait("t", bytes(100_000))
        report = await producer.close(2)
        assert report.elapsed == pytest.approx(2, abs=0.1)
        cluster.resume(1)


async def test_close_ends_within_its_timeout_when_only_bytes_are_left(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """With acks=0 a record has its end when the operating system has all its bytes."""
    network.window = 1000
    async with new_producer(acks=0, enable_idempotence=False) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", bytes(100_000))
        report = await producer.close(0.5)
        assert report.aborted == 1
        assert report.elapsed == pytest.approx(0.5, abs=0.01)
        assert isinstance(delivery.exception(), AbortedError)
        cluster.resume(1)


async def test_close_ends_within_its_timeout_when_it_is_throttled(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.inject("produce", throttle_ms=60_000)
        await producer.send("t", b"1")
        delivery = producer.send_nowait("t", b"2")
        report = await producer.close(3)
        assert report.elapsed == pytest.approx(3, abs=0.1)
        error = delivery.exception()
        assert isinstance(error, AbortedError)
        assert error.persisted == "no"


async def test_close_waits_out_a_short_throttle(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.inject("produce", throttle_ms=2000)
        await producer.send("t", b"1")
        delivery = producer.send_nowait("t", b"2")
        report = await producer.close(5)
        assert 1.9 < report.elapsed < 2.1
        assert report.clean
        assert delivery.result().offset == 1


async def test_close_without_a_timeout_is_bounded_by_the_delivery_timeout(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(request_timeout_ms=2000, delivery_timeout_ms=5000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"value")
        report = await producer.close(None)
        assert 4.9 < report.elapsed < 5.1
        assert report.aborted == 0
        assert isinstance(delivery.exception(), DeliveryError)
        cluster.resume(1)


async def test_a_close_that_takes_long_says_what_it_waits_for(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, after a second."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        producer.send_nowait("t", b"1")
        producer.send_nowait("t", b"2")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.9)
        assert not caplog.records
        also = asyncio.create_task(producer.close(20))
        await asyncio.sleep(0.2)
        (logged,) = caplog.records
        assert (logged.name, logged.levelno) == ("asyncproducer", logging.WARNING)
        assert logged.getMessage().startswith(
            "closing: 2 records are still to be acknowledged, waiting up to 30 s; close_timeout "
        )
        await also
        await closing
        said = [r for r in caplog.records if r.getMessage().startswith("closing: ")]
        assert said == [logged]
        cluster.resume(1)


async def test_a_close_that_waits_for_dead_brokers_says_so(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_producer(close_timeout=None) as producer:
        await producer.warm_up("t")
        for node in cluster.node_ids:
            await cluster.stop_broker(node)
        await asyncio.sleep(0.1)  # until it is noticed
        producer.send_nowait("t", b"value")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(2)
        said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("closing: ")]
        assert len(said) == 1
        assert "waiting up to 120 s (delivery_timeout_ms); close_timeout of the Produ" in said[0]
        assert ". No broker is connected: 127.0.0.1:" in said[0]
        await producer.close(0)
        await closing


async def test_a_close_that_is_done_in_a_second_says_nothing(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_producer() as producer:
        cluster.inject("produce", delay=0.8)
        await producer.enqueue("t", b"value")
        await producer.close()
        await asyncio.sleep(5)
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        producer.send_nowait("t", b"value")
        await producer.close(1)
        cluster.resume(1)
    assert not [r for r in caplog.records if r.getMessage().startswith("closing: ")]


async def test_a_record_that_waits_for_its_topic_at_the_close_is_told_so(new_producer: New) -> None:
    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send("nowhere", b"value"))
        await asyncio.sleep(1)
        await producer.close()
        with pytest.raises(ProducerClosed, match="waited for metadata of its topic"):
            await sending


async def test_closing_at_the_same_time(cluster: EmbeddedCluster, new_producer: New) -> None:
    """The one with the least patience decides for all."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        producer.send_nowait("t", b"value")
        began = now()
        patient = asyncio.create_task(producer.close(60))
        await asyncio.sleep(1)
        quick = asyncio.create_task(producer.close(1))
        reports = await asyncio.gather(patient, quick, producer.close(None))
        assert now() - began == pytest.approx(2, abs=0.1)
        assert reports[0] is reports[1] is reports[2]
        assert reports[0].aborted == 1
        cluster.resume(1)


@pytest.mark.parametrize("timeout", [0, 5])
async def test_close_from_a_delivery_callback(
    cluster: EmbeddedCluster, new_producer: New, timeout: float
) -> None:
    """IT-07."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        closing: list[asyncio.Task[CloseReport]] = []
        first = producer.send_nowait("t", b"1")
        first.add_done_callback(
            lambda _: closing.append(asyncio.create_task(producer.close(timeout)))
        )
        await first
        report = await closing[0]
        assert report.acknowledged == 1
        assert report.elapsed < 0.1


async def test_cancelled_close_gives_up_at_once_and_is_closed(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-16."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"value")
        closing = asyncio.create_task(producer.close(60))
        await asyncio.sleep(1)
        began = now()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert now() - began < 0.1
        assert producer.health.state == "closed"
        assert isinstance(delivery.exception(), AbortedError)
        assert (await producer.close()).aborted == 1
        cluster.resume(1)
        await asyncio.sleep(1)
        assert not network.links


async def test_sends_are_refused_from_the_moment_of_the_close(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        await producer.send("t", b"1")
        cluster.pause(1)
        delivery = producer.send_nowait("t", b"2")
        closing = asyncio.create_task(producer.close(5))
        await turns(1)
        assert producer.health.state == "closing"
        with pytest.raises(ProducerClosed):
            producer.send_nowait("t", b"3")
        with pytest.raises(ProducerClosed):
            await producer.send("t", b"3")
        with pytest.raises(ProducerClosed):
            await producer.start()
        cluster.resume(1)
        await closing
        assert delivery.result().offset == 1
    assert values(cluster) == [b"1", b"2"]


async def test_close_with_nothing_to_do_is_quick(new_producer: New) -> None:
    async with new_producer() as producer:
        report = await producer.close()
        assert report.elapsed < 0.01


async def test_acks_0_close_lets_the_bytes_leave(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """They count as acknowledged when the system has them: a close waits for that."""
    async with new_producer(acks=0, enable_idempotence=False) as producer:
        await producer.warm_up("t")
        for number in range(10):
            producer.send_nowait("t", b"%d" % number)
        report = await producer.close()
        assert report.acknowledged == 10
    await asyncio.sleep(1)
    assert len(values(cluster)) == 10


class Plugin(Interceptor):
    """Everything that a user may give, in one."""

    def __init__(self) -> None:
        self.closed = 0

    def __call__(self, value: Any) -> bytes:
        return bytes(value)

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None) -> int:
        return 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("started", [False, True])
async def test_plugins_are_closed_once(new_producer: New, started: bool) -> None:
    """KP-15: interceptors, serializers and the partitioner; each object once."""
    interceptor, partitioner, serializer = Plugin(), Plugin(), Plugin()
    producer = new_producer(
        interceptors=[interceptor],
        partitioner=partitioner,
        key_serializer=serializer,
        value_serializer=serializer,
    )
    if started:
        await producer.start()
        await producer.send("t", b"value")
    for _ in range(2):
        await producer.close()
    assert [plugin.closed for plugin in (interceptor, partitioner, serializer)] == [1, 1, 1]


@pytest.mark.parametrize(
    "mistake",
    [
        {"lingr_ms": 5},
        {"acks": 1, "enable_idempotence": True},
        {"value_serializer": 5},
        {"config": ProducerConfig.from_options("broker:9092")},
    ],
    ids=lambda mistake: "+".join(mistake),
)
async def test_plugins_of_a_producer_that_could_not_be_made_stay_the_callers(
    new_producer: New, mistake: dict[str, Any]
) -> None:
    """CF-12: Java makes its plugins itself, so it closes them. Ours can go to the next producer,
    which closes each once.
    """
    interceptor, partitioner, serializer = plugins = [Plugin(), Plugin(), Plugin()]
    options: dict[str, Any] = {
        "interceptors": [interceptor],
        "partitioner": partitioner,
        "key_serializer": serializer,
    }
    with pytest.raises(ConfigError):
        Producer("broker:9092", **{**options, **mistake})
    assert [plugin.closed for plugin in plugins] == [0, 0, 0]
    async with new_producer(**options) as producer:
        await producer.send("t", b"value", key=b"key")
    assert [plugin.closed for plugin in plugins] == [1, 1, 1]


class Panic(BaseException):
    """What extensions in Rust raise."""


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, Panic])
async def test_plugin_that_cannot_be_closed(
    cluster: EmbeddedCluster,
    new_producer: New,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    class Broken(Plugin):
        def close(self) -> None:
            raise error("a user's bug")

    last = Plugin()
    async with new_producer(interceptors=[Broken(), last]) as producer:
        await producer.send("t", b"value")
    assert last.closed == 1
    assert producer.health.state == "closed"
    (logged,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "close() of" in logged.getMessage()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_plugin_that_ends_the_program_when_it_is_closed(
    error: type[BaseException], started: bool
) -> None:
    """The others are closed all the same, and so is the producer."""

    class Ends(Plugin):
        def close(self) -> None:
            super().close()
            raise error

    plugins = [Ends(), Plugin()]

    async def scene() -> None:
        async with EmbeddedCluster(topics={"t": 1}, network=MemoryNetwork()) as cluster:
            producer: Producer[Any, Any] = Producer(
                cluster.bootstrap_servers, connector=cluster.connector, interceptors=plugins
            )
            if started:
                await producer.start()
            try:
                await producer.close()
                await asyncio.sleep(0)  # the loop ends at the latest here
            finally:
                closed.append(producer.health.state)

    closed: list[str] = []
    with pytest.raises(error):
        clock.run(scene())
    assert closed == ["closed"]
    assert [plugin.closed for plugin in plugins] == [1, 1]


# -- numbers -----------------------------------------------------------------------------------


def plain(metrics: dict[str, float]) -> set[str]:
    """The names of those that are neither of a topic nor of a node."""
    return {name for name in metrics if ":topic=" not in name and ":node=" not in name}


async def test_metrics(cluster: EmbeddedCluster, new_producer: New) -> None:
    """By Java's names; per topic and node behind a colon."""
    async with new_producer(linger_ms=10) as producer:
        await producer.send("t", b"value")
        for _ in range(9):
            await producer.send("t4", b"value", partition=1)
        metrics = producer.metrics()
        assert metrics["record_send_total"] == 10
        assert metrics["record_send_total:topic=t"] == 1
        assert metrics["record_send_total:topic=t4"] == 9
        assert metrics["request_total:node=node-1"] == 1
        assert metrics["request_total:node=node-2"] == 9
        assert metrics["record_error_total"] == 0
        assert metrics["request_latency_avg"] == pytest.approx(2.0, abs=0.1)
        assert metrics["connection_count"] == 2
        assert metrics["buffer_total_bytes"] == metrics["buffer_available_bytes"] == 33554432
        assert metrics["metadata_age"] > 0


async def test_a_flush_counts_the_time_that_it_took(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-28, KP-20: each flush, also one that is given up."""

    def flushed_ns() -> float:
        return producer.metrics()["flush_time_ns_total"]

    async with new_producer() as producer:
        await producer.warm_up("t")
        assert flushed_ns() == 0
        await producer.flush()
        assert flushed_ns() == 0, "there was nothing to wait for"
        for seconds in (2, 5):
            before = flushed_ns()
            held = cluster.inject("produce", hold=True)
            producer.send_nowait("t", b"value")
            flushing = asyncio.create_task(producer.flush())
            await asyncio.sleep(seconds)
            held.release()
            await flushing
            assert flushed_ns() - before == pytest.approx(seconds * 1e9, abs=1e7)
        before = flushed_ns()
        held = cluster.inject("produce", hold=True)
        producer.send_nowait("t", b"value")
        with pytest.raises(TimeoutError):
            await producer.flush(timeout=3)
        assert flushed_ns() - before == pytest.approx(3e9)
        held.release()


async def test_waits_for_metadata_are_counted_when_they_succeed(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """KP-28: of records, also for a partition, and of the calls that ask for partitions."""

    def waited_ns() -> float:
        return producer.metrics()["metadata_wait_time_ns_total"]

    async with new_producer(max_block_ms=30_000) as producer:
        assert waited_ns() == 0
        began = now()
        sending = [asyncio.create_task(producer.enqueue("late", b"value")) for _ in range(3)]
        await asyncio.sleep(10)
        cluster.create_topic("late")
        await asyncio.gather(*sending)
        assert now() - began > 10
        expected = 3 * (now() - began) * 1e9
        assert waited_ns() == pytest.approx(expected)
        # What is known takes no time.
        await producer.send("late", b"value")
        await producer.partitions_for("late")
        assert waited_ns() == pytest.approx(expected)

        began = now()
        enqueued = asyncio.create_task(producer.enqueue("late", b"value", partition=1))
        await asyncio.sleep(5)
        cluster.add_partitions("late", 2)
        await enqueued
        expected += (now() - began) * 1e9
        assert waited_ns() == pytest.approx(expected)

        for call in (producer.partitions_for, producer.warm_up):
            topic = f"later-{call.__name__}"
            began = now()
            asking = asyncio.create_task(call(topic))
            await asyncio.sleep(5)
            cluster.create_topic(topic)
            await producer.partitions_for(topic)
            waited = 2 * (now() - began) - 5
            await asking
            assert waited_ns() - expected == pytest.approx(waited * 1e9)
            expected = waited_ns()

        with pytest.raises(MetadataTimeout):
            await producer.enqueue("missing", b"value")
        with pytest.raises(MetadataTimeout):
            await producer.partitions_for("missing")
        assert waited_ns() == expected


async def test_metrics_are_a_snapshot_of_the_callers_own(new_producer: New) -> None:
    """KP-33: each call gives the numbers of its moment. Java's map is a view that follows them;
    like that one, ours cannot be used to change them.
    """
    async with new_producer() as producer:
        await producer.send("t", b"value")
        first = producer.metrics()
        await producer.send("t", b"value")
        second = producer.metrics()
        assert (first["record_send_total"], second["record_send_total"]) == (1, 2)
        second["record_send_total"] = 5
        second.clear()
        assert producer.metrics()["record_send_total"] == 2
    assert producer.metrics()["record_send_total"] == 2, "also of a closed one"


async def test_the_recording_level_is_info(new_producer: New) -> None:
    """KP-33: everything that Java's producer has is of this level. Others are refused."""
    async with new_producer(metrics_recording_level="INFO") as producer:
        names = plain(producer.metrics())
    async with new_producer() as producer:
        assert plain(producer.metrics()) == names
    for level in ("DEBUG", "TRACE"):
        with pytest.raises(ConfigError, match="not supported yet: metrics of other levels") as no:
            new_producer(metrics_recording_level=level)
        assert f"metrics_recording_level='{level}'" in str(no.value)


async def test_metrics_before_the_start_and_after_the_end(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The same names, but for topics and nodes."""
    earliest = time.time() * 1000 - 1
    producer = new_producer(buffer_memory=1_000_000)
    before = producer.metrics()
    assert before.pop("kafka_metrics_count") == len(before) + 1
    assert earliest <= before.pop("start_time_ms") <= time.time() * 1000
    assert before.pop(f"app_info:version={asyncproducer.__version__}") == 1
    assert before.pop("buffer_total_bytes") == before.pop("buffer_available_bytes") == 1_000_000
    assert set(before.values()) == {0}
    await producer.start()
    await producer.send("t", b"value")
    running = producer.metrics()
    new = new_producer().metrics()
    assert plain(running) == set(new)
    assert running["kafka_metrics_count"] == len(running) > len(new)
    await producer.close()
    closed = producer.metrics()
    assert set(closed) == set(running)
    assert closed["connection_count"] == 0
    assert closed["connection_close_total"] == closed["connection_creation_total"] > 0


async def test_metrics_of_all_connections(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Requests of all kinds count, and the bootstrap connection has a node of its own."""
    async with new_producer(enable_idempotence=False) as producer:
        await producer.send("t", b"value")
        metrics = producer.metrics()
        assert metrics["connection_creation_total"] == 2
        assert metrics["connection_close_total"] == 1, "that of bootstrap"
        assert metrics["request_total"] == metrics["response_total"] == len(cluster.requests)
        for name in ("outgoing_byte_total", "incoming_byte_total"):
            nodes = [value for key, value in metrics.items() if key.startswith(f"{name}:node=")]
            assert len(nodes) == 2
            assert min(nodes) > 0
            assert metrics[name] == sum(nodes)
        assert any(name.startswith("request_total:node=node--") for name in metrics)


async def test_what_is_refused_counts_in_the_time_in_which_it_is_refused(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Also where nothing else has happened for long, and then all is refused."""
    value: Any = object()
    async with new_producer() as producer:
        await producer.send("t", b"fine")
        await asyncio.sleep(1000)
        for _ in range(60):
            with pytest.raises(SerializationError):
                await producer.send("t", value)
        result = await producer.send_many("t", [value] * 30, raise_on_error=False)
        assert len(result.failed) == 30
        assert producer.metrics()["record_error_rate"] == pytest.approx(3.0)


async def test_what_is_never_answered_counts_in_the_time_in_which_that_is_known(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(
        enable_idempotence=False,
        retries=0,
        request_timeout_ms=100_000,
        delivery_timeout_ms=200_000,
    ) as producer:
        await producer.send("t", b"fine")
        cluster.pause(1)
        with pytest.raises(DeliveryError):
            await producer.send("t", b"not fine")
        assert producer.metrics()["record_error_rate"] == pytest.approx(1 / 30)
        cluster.resume(1)


async def test_metrics_of_a_full_buffer(cluster: EmbeddedCluster, new_producer: New) -> None:
    """BP-16: who gets no room counts once, whether it waited or not."""
    async with new_producer(
        **LAZY, buffer_memory=20_000, batch_size=10_000, max_block_ms=4000
    ) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        sent = [producer.send_nowait("t", bytes(9000)) for _ in range(2)]
        with pytest.raises(BufferFull):
            producer.send_nowait("t", bytes(9000))
        assert producer.metrics()["buffer_exhausted_total"] == 1
        waiting = asyncio.create_task(producer.enqueue("t", bytes(9000)))
        await asyncio.sleep(1)
        assert producer.metrics()["waiting_threads"] == 1
        assert producer.metrics()["bufferpool_wait_ratio"] == 0
        with pytest.raises(BufferTimeout):
            await waiting
        metrics = producer.metrics()
        assert metrics["waiting_threads"] == 0
        assert metrics["buffer_exhausted_total"] == metrics["record_error_total"] == 2
        assert metrics["buffer_exhausted_rate"] == metrics["record_error_rate"] > 0
        assert metrics["bufferpool_wait_time_ns_total"] == pytest.approx(4e9)
        assert metrics["bufferpool_wait_ratio"] == pytest.approx(4 / 30)
        cluster.resume(1)
        assert not any(delivery.done() for delivery in sent)


async def test_health(cluster: EmbeddedCluster, new_producer: New) -> None:
    producer = new_producer()
    assert producer.health.problem == "not started"
    await producer.start()
    await producer.warm_up("t", "t4")
    health = producer.health
    assert (health.ready, health.state, health.problem) == (True, "running", None)
    assert (health.brokers_known, health.brokers_connected) == (2, 2)
    cluster.pause(1)
    producer.send_nowait("t", b"value")
    await asyncio.sleep(2)
    health = producer.health
    assert (health.incomplete_batches, health.buffered_bytes) == (1, 16384)
    assert health.oldest_batch_age == pytest.approx(2, abs=0.1)
    await cluster.stop_broker(1)
    await cluster.stop_broker(2)
    await asyncio.sleep(0.1)
    assert (producer.health.problem or "").startswith("no broker is connected: broker 2")
    await producer.close(0)
    assert producer.health.problem == "the producer is closed"


async def test_an_idle_producer_without_connections_is_ready(new_producer: New) -> None:
    """Without idempotence nothing needs a connection between the start and the first record."""
    async with new_producer(enable_idempotence=False) as producer:
        await asyncio.sleep(1)
        assert producer.health.brokers_connected == 0
        assert producer.health.ready, producer.health.problem


def test_a_producer_whose_event_loop_is_closed_is_not_ready() -> None:
    network = MemoryNetwork()

    async def main() -> Producer[Any, Any]:
        async with EmbeddedCluster(topics={"t": 1}, network=network) as cluster:
            producer: Producer[Any, Any] = Producer(cluster.bootstrap_servers, connector=network)
            await producer.start()
            assert producer.health.ready
            return producer

    producer = clock.run(main())
    assert not producer.health.ready
    assert producer.health.problem == "the event loop of the producer is closed"
    clock.run(producer.close())


async def test_health_of_a_forked_child(new_producer: New) -> None:
    async with new_producer() as producer:
        producer._forked = True
        try:
            assert producer.health.problem == "the process was forked"
        finally:
            producer._forked = False
