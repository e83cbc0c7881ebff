"""What the subcommands send to, and a consumer that is not ours (aiokafka) to read it back."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from asyncproducer.errors import ErrorCode, error_name
from asyncproducer.net.security import ssl_context

if TYPE_CHECKING:
    from rich.console import Console

    from asyncproducer.config import ProducerConfig

__all__ = [
    "IDLE_MS",
    "ReadRecord",
    "Unreachable",
    "cleanup_policy",
    "cluster",
    "create_topic",
    "delete_topic",
    "embedded",
    "ends",
    "quiet",
    "read",
    "security",
    "told",
]

#: The log is read until its end. Where nothing comes for so long, it cannot be read: longer than
#: aiokafka waits for an answer (40 s), so that it has asked again by then.
IDLE_MS = 60_000

#: How long a consumer is waited for at once: what is no record does not end the wait.
POLL_MS = 200

#: Where nobody has set up logging, Python would print warnings.
_SILENCE = logging.NullHandler()


class Unreachable(Exception):
    """No broker answers where the command was told to look, or it does not do what is needed."""


def quiet(logger: str) -> None:
    """Keeps a library's log from the terminal, where nobody has asked for it."""
    logging.getLogger(logger).addHandler(_SILENCE)


def told(error: BaseException) -> str:
    """An error as one line: aiokafka's texts begin with their class, others do not."""
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}"


# -- the cluster -----------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """The embedded broker, until the other end of `pipe` is closed."""

    async def serve() -> None:
        from asyncproducer.testing import EmbeddedCluster

        # It would be the broker's speed that we show, were it to look at each record (half as
        # many records/s, measured). Reading them back finds more.
        async with EmbeddedCluster(brokers=1, validate_records=False) as cluster:
            pipe.send(cluster.bootstrap_servers)
            with contextlib.suppress(EOFError, OSError):
                await asyncio.to_thread(pipe.recv)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


@contextlib.contextmanager
def embedded(serve: Callable[[Connection], object] = _serve) -> Iterator[str]:
    """The address of an embedded broker in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            servers = ours.recv()
        except EOFError:
            raise RuntimeError("the embedded broker did not start") from None
        yield servers
    finally:
        ours.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()


@contextlib.contextmanager
def cluster(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, str]]:
    """(bootstrap servers, what it is), by the arguments --bootstrap-servers and --kafka."""
    if options.bootstrap_servers:
        yield options.bootstrap_servers, "Kafka"
    elif options.kafka:
        from asyncproducer.testing.kafka import KafkaCluster

        with console.status("starting Apache Kafka ..."):
            cluster = KafkaCluster()
            cluster.start()
        try:
            yield cluster.bootstrap_servers, "a local Apache Kafka"
        finally:
            cluster.stop()
    else:
        with embedded() as servers:
            yield servers, "the embedded broker"


def security(config: ProducerConfig) -> dict[str, Any]:
    """aiokafka's arguments for a producer's TLS and SASL options. Reads files.

    Raises ConfigError for files that cannot be used.
    """
    arguments: dict[str, Any] = {"security_protocol": config.security_protocol}
    if config.uses_tls:
        arguments["ssl_context"] = ssl_context(config)
    if config.uses_sasl:
        arguments["sasl_mechanism"] = config.sasl_mechanism
        arguments["sasl_plain_username"] = config.sasl_username
        arguments["sasl_plain_password"] = config.sasl_password
    return arguments


# -- topics ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _admin(servers: str, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaConnectionError

    admin = AIOKafkaAdminClient(bootstrap_servers=servers, **arguments)
    try:
        await admin.start()
        yield admin
    except KafkaConnectionError as error:
        raise Unreachable(f"no Kafka broker answers at {servers}: is one running there?") from error
    finally:
        await admin.close()


async def create_topic(
    servers: str, topic: str, partitions: int, arguments: Mapping[str, Any] | None = None
) -> bool:
    """Creates a topic with at most three replicas; False if it is there already.

    Raises Unreachable when no broker answers, or it may not be created.
    """
    from aiokafka.admin import NewTopic

    async with _admin(servers, arguments or {}) as admin:
        # All of them: to ask for one by its name might create it, and creating it may be refused
        # although it is there.
        if topic in await admin.list_topics():
            return False
        brokers = (await admin.describe_cluster())["brokers"]
        answer = await admin.create_topics([NewTopic(topic, partitions, min(3, len(brokers)))])
    _, code, *message = answer.topic_errors[0]
    if code == ErrorCode.TOPIC_ALREADY_EXISTS:
        return False
    if code:
        why = f" ({message[0]})" if message and message[0] else ""
        raise Unreachable(
            f"the topic {topic!r} is not there and cannot be created: {error_name(code)}{why}. Name"
            " one that exists with --topic, or have CREATE granted."
        )
    return True


async def delete_topic(servers: str, topic: str, arguments: Mapping[str, Any]) -> str | None:
    """Deletes a topic; the name of the error if that is refused."""
    async with _admin(servers, arguments) as admin:
        answer = await admin.delete_topics([topic])
    code = answer.topic_error_codes[0][1]
    return error_name(code) if code else None


async def cleanup_policy(servers: str, topic: str, arguments: Mapping[str, Any]) -> str | None:
    """The topic's cleanup.policy ("compact,delete"); None where the cluster does not tell.

    It takes DESCRIBE_CONFIGS, and not every broker that speaks the protocol knows the request. No
    error: what asks can do without.
    """
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
    from aiokafka.errors import KafkaError

    async with _admin(servers, arguments) as admin:
        asked = ConfigResource(ConfigResourceType.TOPIC, topic, {"cleanup.policy": None})
        try:
            (answer,) = await admin.describe_configs([asked])
        except KafkaError:
            return None
    # Which fields follow these depends on the version; where the code is an error, there are none.
    for _, _, _, _, entries in answer.resources:
        for name, value, *_ in entries:
            if name == "cleanup.policy":
                return str(value)
    return None


# -- reading back ----------------------------------------------------------------------------


class ReadRecord(NamedTuple):
    """A record as the consumer sees it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


#: Called with a partition, the first of some of its offsets, and the one behind the last of them.
Offsets: TypeAlias = Callable[[int, int, int], object]


def _consumer(servers: str, arguments: Mapping[str, Any] | None) -> Any:
    """A consumer that is not ours, without a group."""
    from aiokafka import AIOKafkaConsumer

    return AIOKafkaConsumer(
        bootstrap_servers=servers,
        enable_auto_commit=False,
        # Else it would go on at the end of a log that starts later now, and tell nobody.
        auto_offset_reset="none",
        max_partition_fetch_bytes=4 << 20,
        fetch_max_bytes=32 << 20,
        **(arguments or {}),
    )


async def ends(
    servers: str,
    topic: str,
    partitions: Sequence[int],
    arguments: Mapping[str, Any] | None = None,
) -> dict[int, int]:
    """Where the log of each partition ends now, `partitions` and any that the topic has beside."""
    from aiokafka import TopicPartition

    async with _consumer(servers, arguments) as consumer:
        found = await consumer.end_offsets([TopicPartition(topic, p) for p in partitions])
        # It has asked for the topic by now.
        present = consumer.partitions_for_topic(topic) or ()
        added = {TopicPartition(topic, p) for p in present} - found.keys()
        found |= await consumer.end_offsets(list(added))
        return {place.partition: offset for place, offset in found.items()}


async def read(
    servers: str,
    topic: str,
    starts: Mapping[int, int],
    arguments: Mapping[str, Any] | None = None,
    *,
    idle_ms: int = IDLE_MS,
    removed: Offsets | None = None,
    unread: Offsets | None = None,
) -> AsyncIterator[ReadRecord]:
    """Each record from `starts` to the present end; those of a partition in their order.

    A partition that is not in `starts` was added later, and is read from 0. What a log has no
    longer, since it starts later now, is left out, and told to `removed`. It ends early when
    nothing comes for `idle_ms`: what lies before the ends then is told to `unread`. Raises
    Unreachable when it may not be read.
    """
    from aiokafka import TopicPartition
    from aiokafka.errors import OffsetOutOfRangeError, TopicAuthorizationFailedError

    until = await ends(servers, topic, list(starts), arguments)
    left = {TopicPartition(topic, p) for p, end in until.items() if end > starts.get(p, 0)}
    if not left:
        return  # aiokafka cannot close a consumer of nothing
    async with _consumer(servers, arguments) as consumer:
        positions = {place: starts.get(place.partition, 0) for place in left}
        begins = await _begins(consumer, positions, removed)
        consumer.assign(left)
        # With nothing awaited in between: it would ask for an offset that nobody has committed.
        for place in left:
            consumer.seek(place, begins.get(place, positions[place]))
        heard = asyncio.get_running_loop().time()
        while left:
            try:
                fetched = await consumer.getmany(*left, timeout_ms=min(idle_ms, POLL_MS))
            except OffsetOutOfRangeError as error:
                fetched = {}
                begins = await _begins(consumer, error.args[0], removed)
                for place, begin in begins.items():
                    consumer.seek(place, begin)
                if not begins:  # a log that ends before: its leader may be behind
                    await asyncio.sleep(min(idle_ms, POLL_MS) / 1000)
            except TopicAuthorizationFailedError as error:
                raise Unreachable(
                    f"the topic {topic!r} may not be read back: have READ granted"
                ) from error
            for place, records in fetched.items():
                for record in records:
                    yield ReadRecord(place.partition, record.offset, record.key, record.value)
            now = asyncio.get_running_loop().time()
            if fetched:
                heard = now
            # Not the last record's offset: what ends a transaction has one, too.
            left = {p for p in left if await consumer.position(p) < until[p.partition]}
            if now >= heard + idle_ms / 1000:
                break
        if unread is not None:
            for place in left:
                unread(place.partition, await consumer.position(place), until[place.partition])


async def _begins(
    consumer: Any, positions: Mapping[Any, int], removed: Offsets | None
) -> dict[Any, int]:
    """Where the logs start now that start behind these positions. Tells `removed` of them."""
    begins: dict[Any, int] = await consumer.beginning_offsets(list(positions))
    later = {place: begin for place, begin in begins.items() if begin > positions[place]}
    if removed is not None:
        for place, begin in later.items():
            removed(place.partition, positions[place], begin)
    return later
