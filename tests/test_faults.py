# A Delivery need not be awaited.
# mypy: disable-error-code="unused-awaitable"
"""What goes wrong around a producer, one test or more for each: it ends, and says what happened."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import re
import ssl
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from asyncproducer import (
    AbortedError,
    BrokerRejected,
    BufferTimeout,
    ConnectionFailed,
    Delivery,
    DeliveryTimeout,
    ForkError,
    Interceptor,
    KafkaError,
    MetadataTimeout,
    Producer,
    ProducerClosed,
    ProtocolError,
    Record,
    RecordTooLarge,
    SerializationError,
    WrongLoopError,
)
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork, VirtualTimeLoop
from asyncproducer.testing.clock import run
from tests.loop import turns

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]


def now() -> float:
    return asyncio.get_running_loop().time()


def values(cluster: EmbeddedCluster, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    return [record.value for record in cluster.records(topic, partition)]


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


# -- bad input ---------------------------------------------------------------------------------


async def test_unknown_topic_without_auto_creation(new_producer: New) -> None:
    async with new_producer(max_block_ms=2000) as producer:
        began = now()
        with pytest.raises(MetadataTimeout, match=r"auto\.create\.topics\.enable"):
            await producer.send("missing", b"value")
        assert now() - began == pytest.approx(2)


async def test_unknown_topic_with_auto_creation(network: MemoryNetwork) -> None:
    async with (
        EmbeddedCluster(network=network, auto_create_topics=True) as cluster,
        Producer(cluster.bootstrap_servers, connector=network) as producer,
    ):
        assert (await producer.send("missing", b"value")).offset == 0


async def test_record_too_large(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        with pytest.raises(RecordTooLarge, match=r"2000088 bytes, .* max_request_size=1048576"):
            producer.send_nowait("t", bytes(2_000_000))
        assert producer.health.buffered_bytes == 0
    assert not cluster.received("produce")


async def test_a_record_that_a_throttled_broker_keeps_waiting_expires_in_time(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """The connection is idle, so the record is taken to it at once, but it may not take it."""
    async with new_producer(
        linger_ms=0, request_timeout_ms=100, delivery_timeout_ms=100
    ) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", throttle_ms=500)
        await producer.send("t", b"first")
        await asyncio.sleep(0.01)  # now nothing is under way
        began = now()
        with pytest.raises(DeliveryTimeout):
            await producer.send("t", b"second")
        assert now() - began == pytest.approx(0.1)


async def test_a_batch_that_is_being_compressed_expires_in_time(new_producer: New) -> None:
    """Its topic is known and its broker idle, so its step is not the scheduler's own."""

    async def slowly(function: Callable[[], bytes]) -> bytes:
        await asyncio.sleep(5)
        return function()

    async with new_producer(
        linger_ms=0,
        compression_type="zstd",
        compression_level=15,  # never on the loop
        request_timeout_ms=100,
        delivery_timeout_ms=100,
    ) as producer:
        await producer.warm_up("t")
        await asyncio.sleep(0.01)
        producer._scheduler._in_thread = slowly
        began = now()
        with pytest.raises(DeliveryTimeout):
            await producer.send("t", b"value")
        assert now() - began == pytest.approx(0.1)


async def test_a_connection_that_is_throttled_is_not_idle(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Else it would be closed, and nobody would tell the record that waits for it."""
    async with new_producer(linger_ms=0, connections_max_idle_ms=20) as producer:
        await producer.warm_up("t")
        cluster.inject("produce", throttle_ms=80)
        await producer.send("t", b"first")
        began = now()
        await producer.send("t", b"second")
        assert now() - began < 0.2
    assert values(cluster) == [b"first", b"second"]


async def test_full_buffer(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer(buffer_memory=20_000, max_block_ms=2000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        first = producer.send_nowait("t", b"first")
        await asyncio.sleep(0.1)
        began = now()
        with pytest.raises(BufferTimeout, match=r"3616 of 20000 bytes are free"):
            await producer.send("t", b"second")
        assert now() - began == pytest.approx(2)
        cluster.resume(1)
        await first
    assert values(cluster) == [b"first"]


async def test_serializer_and_interceptor_that_raise(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """The serializer's error is the sender's; the interceptor's is nobody's but the log's."""

    class Broken(Interceptor):
        def on_send(self, record: Record) -> Record:
            raise ZeroDivisionError("in on_send")

        def on_acknowledgement(self, *args: Any) -> None:
            raise ZeroDivisionError("in on_acknowledgement")

    def serialize(value: Any) -> bytes:
        return bytes([value])

    async with new_producer(value_serializer=serialize, interceptors=[Broken()]) as producer:
        with pytest.raises(SerializationError, match="ValueError: bytes must be in range"):
            await producer.send("t", 1000)
        await producer.send("t", 65)
    assert values(cluster) == [b"A"]
    assert len(errors_logged(caplog)) == 4


# -- a broker that is gone ---------------------------------------------------------------------

#: Expires after 5 s; a request gets no answer for 3.
PATIENCE: dict[str, Any] = {"delivery_timeout_ms": 5000, "request_timeout_ms": 3000}


async def test_broker_gone_before_the_record_was_sent(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(**PATIENCE) as producer:
        await producer.warm_up("t")
        await cluster.stop_broker(1)
        await cluster.stop_broker(2)
        await asyncio.sleep(0.1)
        began = now()
        with pytest.raises(DeliveryTimeout, match="was never sent") as caught:
            await producer.send("t", b"value")
        assert now() - began == pytest.approx(5, abs=0.01)
        assert (caught.value.persisted, caught.value.attempts) == ("no", 0)
        assert "it was never sent: " in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectionError)
    assert values(cluster) == []


@pytest.mark.parametrize("is_stored", [False, True])
async def test_broker_gone_while_the_record_was_in_flight(
    cluster: EmbeddedCluster, new_producer: New, is_stored: bool
) -> None:
    """Nobody can know from here, so it is "maybe" both times."""
    cluster.inject("produce", drop="after" if is_stored else "before")
    async with new_producer(**PATIENCE) as producer:
        await producer.warm_up("t")
        delivery = producer.send_nowait("t", b"value")
        while not cluster.received("produce"):  # noqa: ASYNC110 there is no event
            await asyncio.sleep(0.0001)
        await cluster.stop_broker(1)
        await cluster.stop_broker(2)
        with pytest.raises(DeliveryTimeout) as caught:
            await delivery
        assert caught.value.persisted == "maybe"
        assert caught.value.attempts == 1
    assert values(cluster) == [b"value"] * is_stored


@pytest.mark.parametrize("is_stored", [False, True])
async def test_broker_that_does_not_answer(
    cluster: EmbeddedCluster, new_producer: New, is_stored: bool
) -> None:
    cluster.inject("produce", no_answer=True, after_append=is_stored, times=None)
    async with new_producer(**PATIENCE) as producer:
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t", b"value")
        assert caught.value.persisted == "maybe"
        cluster.clear_faults()
        await producer.send("t", b"later")
    assert values(cluster) == [b"value"] * is_stored + [b"later"]


async def test_broker_that_throttles_for_longer_than_a_record_lives(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Nothing else than the record's own deadline wakes anybody: not an answer, not a timer."""
    cluster.inject("produce", throttle_ms=600_000)
    async with new_producer(**PATIENCE, linger_ms=0) as producer:
        await producer.send("t", b"value")
        await asyncio.sleep(0.1)
        began = now()
        with pytest.raises(DeliveryTimeout, match="was never sent"):
            await producer.send("t", b"later")
        assert now() - began == pytest.approx(5, abs=0.01)
    assert values(cluster) == [b"value"]


async def test_refused_record_is_certainly_not_stored(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    cluster.inject("produce", error="NOT_ENOUGH_REPLICAS", times=None)
    async with new_producer(**PATIENCE) as producer:
        with pytest.raises(DeliveryTimeout) as caught:
            await producer.send("t", b"value")
        assert caught.value.persisted == "no"
    assert values(cluster) == []


@pytest.mark.parametrize("persisted", ["no", "maybe"])
async def test_what_persisted_says_is_true(
    cluster: EmbeddedCluster, new_producer: New, persisted: str
) -> None:
    """Many records, random trouble: no record that is said not to be stored is in the log."""
    faults: list[dict[str, Any]] = [
        {"drop": "before"},
        {"drop": "after"},
        {"no_answer": True},
        {"no_answer": True, "after_append": True},
        {"error": "NOT_ENOUGH_REPLICAS"},
        {"error": "REQUEST_TIMED_OUT", "after_append": True},
        {"error": "INVALID_RECORD"},
    ]
    sent: list[Delivery] = []
    async with new_producer(
        delivery_timeout_ms=1500, request_timeout_ms=1000, batch_size=150, linger_ms=0
    ) as producer:
        await producer.warm_up("t")
        for number in range(150):
            if number % 3 == 0:
                cluster.inject("produce", **faults[number // 3 % len(faults)])
            sent.append(await producer.enqueue("t", b"%0100d" % number))
            await asyncio.sleep(0.1)
    log = {int(value or b"") for value in values(cluster)}
    found = 0
    for number, delivery in enumerate(sent):
        error = delivery.exception()
        if error is None:
            assert number in log
        elif error.persisted == persisted:
            found += 1
            assert persisted == "maybe" or number not in log
    assert found


# -- something else on the port ----------------------------------------------------------------


class Speaks(asyncio.Protocol):
    """Answers the first bytes it gets with what it has to say, and closes."""

    def __init__(self, answer: bytes, *, closes: bool = True) -> None:
        self.answer = answer
        self.closes = closes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(self.answer)
        if self.closes:
            self.transport.close()


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
#: A fatal alert: unexpected_message, which is what a TLS server says to a Kafka request.
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x0a"


@pytest.mark.parametrize(
    ("answer", "hint"), [(HTTP, "HTTP"), (TLS_ALERT, "TLS")], ids=["http", "tls"]
)
async def test_wrong_port(network: MemoryNetwork, answer: bytes, hint: str) -> None:
    """Found at once, not after max_block_ms, and named."""
    network.listen("web", 9092, lambda: Speaks(answer))
    producer: Producer[Any, Any] = Producer("web:9092", connector=network, max_block_ms=30_000)
    began = now()
    with pytest.raises(ConnectionFailed, match=hint) as caught:
        await producer.start()
    assert now() - began < 1
    assert "web:9092" in str(caught.value)
    assert isinstance(caught.value.__cause__, ProtocolError)
    assert not network.links
    await producer.close()


async def test_port_where_nobody_answers(network: MemoryNetwork) -> None:
    network.listen("mute", 9092, asyncio.Protocol)
    producer: Producer[Any, Any] = Producer("mute:9092", connector=network, max_block_ms=3000)
    began = now()
    with pytest.raises(ConnectionFailed, match="mute:9092"):
        await producer.start()
    assert now() - began == pytest.approx(3, abs=0.01)
    await producer.close()


@pytest.mark.real_time
async def test_wrong_port_that_is_a_real_http_server() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(HTTP)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        producer: Producer[Any, Any] = Producer(f"127.0.0.1:{port}", max_block_ms=20_000)
        with pytest.raises(ConnectionFailed, match="HTTP"):
            await producer.start()
        await producer.close()


class Tls:
    """A server that speaks TLS, as a broker's listener does, and the authority to trust."""

    def __init__(self) -> None:
        self.authority = trustme.CA()
        self.accepted = 0

    async def __aenter__(self) -> Tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        return self

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


async def refused_start(
    producer: Producer[Any, Any], caplog: pytest.LogCaptureFixture
) -> tuple[ConnectionFailed, str, list[str]]:
    """Why it cannot start; the warning, and what was logged of the later attempts."""
    caplog.set_level(logging.DEBUG, "asyncproducer.net.cluster")
    began = now()
    with pytest.raises(ConnectionFailed) as caught:
        await producer.start()
    assert now() - began == pytest.approx(producer.config.max_block_ms / 1000, abs=0.01)
    await producer.close()
    told = [r for r in caplog.records if r.name == "asyncproducer.net.cluster"]
    (warning,) = [r.getMessage() for r in told if r.levelno >= logging.WARNING]
    assert told[0].getMessage() == warning, "with the first attempt"
    return caught.value, warning, [r.getMessage() for r in told[1:]]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "SSL"),
        (
            {
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_mechanism": "PLAIN",
                "sasl_username": "alice",
                "sasl_password": "secret",
            },
            "SASL_SSL",
        ),
    ],
    ids=["plaintext", "SASL"],
)
async def test_wrong_port_that_is_a_real_tls_server(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], wanted: str
) -> None:
    """It hangs up without a word, as a broker does that is about to restart. So start() tries
    again until max_block_ms; the log has the guess from the first attempt on, and only once."""
    async with Tls() as server:
        producer: Producer[Any, Any] = Producer(server.address, max_block_ms=5000, **options)
        error, warning, later = await refused_start(producer, caplog)
        assert server.accepted == 0
    assert len(later) >= 5
    for text in (warning, str(error)):
        assert server.address in text
        assert re.search(rf"speaks TLS .*security_protocol to {wanted}\b", text), text


async def test_wrong_port_for_a_client_with_tls(caplog: pytest.LogCaptureFixture) -> None:
    """A broker closes the connection on what looks like a request of 369 MB."""
    authority = trustme.CA()
    async with EmbeddedCluster() as cluster:
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            security_protocol="SSL",
            ssl_truststore_certificates=authority.cert_pem.bytes().decode(),
            max_block_ms=5000,
        )
        error, warning, later = await refused_start(producer, caplog)
        assert cluster.requests == []
    assert len(later) >= 5
    for text in (warning, str(error)):
        assert cluster.bootstrap_servers in text
        assert re.search(r"speaks plaintext .*security_protocol to PLAINTEXT\b", text), text


async def test_tls_server_that_hangs_up_on_a_client_with_tls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the handshake, as brokers do that refuse our certificate: the guess is another one."""
    async with Tls() as server:
        producer: Producer[Any, Any] = Producer(
            server.address,
            security_protocol="SSL",
            ssl_truststore_certificates=server.authority.cert_pem.bytes().decode(),
            max_block_ms=5000,
        )
        error, _, _ = await refused_start(producer, caplog)
        assert server.accepted >= 1
    assert "closed the connection" in str(error)
    assert "speaks TLS" not in str(error)


# -- event loops, threads and processes --------------------------------------------------------


@pytest.mark.real_time
async def test_second_event_loop(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Every call says so, and the producer's own loop is not disturbed."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        delivery = await producer.enqueue("t", b"1")

        async def elsewhere() -> None:
            for call in (producer.send, producer.enqueue):
                with pytest.raises(WrongLoopError, match="one producer per loop"):
                    await call("t", b"value")
            with pytest.raises(WrongLoopError):
                producer.send_nowait("t", b"value")
            with pytest.raises(WrongLoopError):
                await producer.flush()
            with pytest.raises(WrongLoopError):
                await producer.partitions_for("t")
            with pytest.raises(WrongLoopError):
                await producer.start()
            with pytest.raises(WrongLoopError, match="own event loop"):
                await producer.close()
            assert producer.health.state == "running"

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        await delivery
        await producer.send("t", b"2")
    assert values(cluster) == [b"1", b"2"]


async def test_without_any_event_loop(cluster: EmbeddedCluster, new_producer: New) -> None:
    """A thread calls what needs no await."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        caught: list[BaseException] = []

        def work() -> None:
            try:
                producer.send_nowait("t", b"value")
            except WrongLoopError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(caught) == 1
    assert values(cluster) == []


async def test_one_producer_in_each_of_two_loops(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Each with its own."""
    async with new_producer() as producer:
        await producer.send("t", b"here")

    async def there() -> int:
        network = MemoryNetwork()
        async with (
            EmbeddedCluster(network=network) as other,
            Producer(other.bootstrap_servers, connector=network) as its_own,
        ):
            return (await its_own.send("t", b"there")).offset

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run(there())))
    thread.start()
    thread.join()
    assert results == [0]


async def test_use_after_close(new_producer: New) -> None:
    async with new_producer() as producer:
        await producer.send("t", b"value")
    with pytest.raises(ProducerClosed):
        await producer.send("t", b"value")


FORK = """
    import asyncio, os, sys
    from asyncproducer import ForkError, Producer, ProducerStateError
    from asyncproducer.testing import EmbeddedCluster

    async def in_child(producer, portal, delivery):
        for call in (
            lambda: producer.send("t", b"child"),
            lambda: producer.enqueue("t", b"child"),
            lambda: producer.flush(),
            lambda: producer.partitions_for("t"),
            lambda: producer.start(),
        ):
            try:
                await call()
            except ForkError as error:
                assert str(os.getppid()) in str(error), error
            else:
                raise AssertionError("no ForkError")
        for call in (
            lambda: producer.send_nowait("t", b"child"),
            lambda: portal.send("t", b"child"),
            lambda: portal.flush(),
            lambda: producer.portal(),
        ):
            try:
                call()
            except ForkError:
                pass
            else:
                raise AssertionError("no ForkError")
        assert producer.health.problem == "the process was forked"
        report = await producer.close()
        assert report.aborted == 1, report
        assert not delivery.done()
        assert (await producer.close()) is report

    async def main():
        async with EmbeddedCluster(topics={"t": 1}) as cluster:
            async with Producer(
                cluster.bootstrap_servers, linger_ms=60_000, adaptive_linger=False
            ) as producer:
                await producer.warm_up("t")
                delivery = producer.send_nowait("t", b"parent")
                portal = producer.portal()
                pid = os.fork()
                if pid == 0:
                    status = 1
                    try:
                        asyncio.run(in_child(producer, portal, delivery))
                        status = 0
                    except BaseException as error:
                        print("in the child:", repr(error), file=sys.stderr, flush=True)
                    finally:
                        os._exit(status)
                _, status = os.waitpid(pid, 0)
                assert os.waitstatus_to_exitcode(status) == 0
                producer.send_nowait("t", b"parent too")
                await producer.flush()
            values = [record.value for record in cluster.records("t")]
            assert values == [b"parent", b"parent too"], values
        print("done")

    asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_use_after_fork() -> None:
    """The child's producer refuses, closing it harms nobody, and the parent's goes on."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(FORK)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_fork_before_the_start_is_no_problem() -> None:
    """Only a started producer belongs to its process."""
    from asyncproducer.producer import _after_fork_in_child

    async def main() -> int:
        network = MemoryNetwork()
        async with EmbeddedCluster(network=network) as cluster:
            producer: Producer[Any, Any] = Producer(cluster.bootstrap_servers, connector=network)
            _after_fork_in_child()
            async with producer:
                return (await producer.send("t", b"value")).offset

    assert run(main()) == 0


async def test_after_a_fork_nothing_can_be_sent(new_producer: New) -> None:
    """As the child sees it, without a child."""
    from asyncproducer.producer import _after_fork_in_child

    async with new_producer() as producer:
        assert producer._intake is not None
        _after_fork_in_child()
        try:
            with pytest.raises(ForkError, match=f"in process {os.getpid()}"):
                await producer.send("t", b"value")
        finally:
            producer._forked = False
            producer._intake.open()


# -- cancelled ---------------------------------------------------------------------------------


async def test_cancelled_while_waiting_for_metadata(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer() as producer:
        sending = asyncio.create_task(producer.send("late", b"value"))
        await asyncio.sleep(1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        cluster.create_topic("late")
        await producer.send("late", b"another")
    assert values(cluster, "late") == [b"another"]


async def test_cancelled_while_waiting_for_memory(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    async with new_producer(buffer_memory=20_000) as producer:
        await producer.warm_up("t")
        cluster.pause(1)
        producer.send_nowait("t", b"1")
        await asyncio.sleep(0.1)
        sending = asyncio.create_task(producer.send("t", b"2"))
        await asyncio.sleep(1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        cluster.resume(1)
        await producer.send("t", b"3")
    assert values(cluster) == [b"1", b"3"]


@pytest.mark.parametrize("observed", [False, True], ids=["", "interceptors"])
@pytest.mark.parametrize("call", ["send", "enqueue"])
@pytest.mark.parametrize("which", ["key_serializer", "value_serializer"])
async def test_cancelled_in_an_async_serializer(
    cluster: EmbeddedCluster, new_producer: New, which: str, call: str, observed: bool
) -> None:
    """It is cancelled itself, nothing is sent, and the interceptors are told once."""
    entered, left = asyncio.Event(), asyncio.Event()
    told: list[BaseException | None] = []

    class Notes(Interceptor):
        def on_acknowledgement(self, metadata: Any, exception: Any, headers: Any) -> None:
            told.append(exception)

    async def slow(data: bytes) -> bytes:
        if data == b"slow":
            entered.set()
            try:
                await asyncio.sleep(3600)
            finally:
                left.set()
        return data

    async with new_producer(
        **{which: slow}, interceptors=[Notes()] if observed else []
    ) as producer:
        await producer.warm_up("t")
        sending = asyncio.create_task(getattr(producer, call)("t", b"slow", key=b"slow"))
        await entered.wait()
        # Nobody stands behind it: its place in the line is taken when it has its bytes.
        await producer.send("t", b"1", key=b"k")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert left.is_set()
        assert (producer.health.waiting_senders, producer.health.buffered_bytes) == (0, 0)
        await producer.send("t", b"2", key=b"k")
        assert producer.metrics()["record_error_total"] == 0
    assert values(cluster) == [b"1", b"2"]
    if observed:
        assert [type(error) for error in told] == [
            type(None),
            asyncio.CancelledError,
            type(None),
        ]


async def test_cancelled_in_partitions_for(cluster: EmbeddedCluster, new_producer: New) -> None:
    """Others who wait for the same are not disturbed, and get it when it is there."""
    async with new_producer() as producer:
        asking = [asyncio.create_task(producer.partitions_for("late")) for _ in range(3)]
        await asyncio.sleep(1)
        asking[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking[1]
        assert not asking[0].done()
        assert not asking[2].done()
        cluster.create_topic("late", partitions=2)
        assert len(await asking[0]) == len(await asking[2]) == 2
        assert (await producer.send("late", b"value")).offset == 0


@pytest.mark.parametrize("phase", ["metadata", "connections", "producer id"])
async def test_cancelled_in_warm_up(
    cluster: EmbeddedCluster, new_producer: New, phase: str
) -> None:
    """Whatever it waits for: a later one finds all as it was, and ends as it should."""
    held = cluster.inject("init_producer_id", hold=True) if phase == "producer id" else None
    async with new_producer() as producer:
        if phase == "metadata":
            cluster.delete_topic("t4")
        if phase == "connections":
            cluster.pause(2)
        warming = [asyncio.create_task(producer.warm_up("t4")) for _ in range(2)]
        await asyncio.sleep(1)
        warming[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming[0]
        assert not warming[1].done()
        if phase == "metadata":
            cluster.create_topic("t4", partitions=4)
        cluster.resume(2)
        if held is not None:
            held.release()
        await warming[1]
        began = now()
        await producer.warm_up("t4")
        assert now() == began
        assert [(await producer.send("t4", b"", partition=p)).offset for p in range(4)] == [0] * 4


@pytest.mark.parametrize("ended", ["cancelled", "timed out"])
@pytest.mark.parametrize("call", ["partitions_for", "warm_up"])
async def test_who_waits_no_more_is_not_remembered(
    cluster: EmbeddedCluster, new_producer: New, call: str, ended: str
) -> None:
    """However long the cluster is silent: a probe that asks again and again leaves nothing."""
    async with new_producer(max_block_ms=2000) as producer:
        await producer.warm_up("t")
        # Each answer would wake those who wait, and forget them.
        for node in cluster.node_ids:
            cluster.pause(node)
        for _ in range(5):
            asking = asyncio.create_task(getattr(producer, call)("missing"))
            await asyncio.sleep(1)
            assert len(producer._watchers) == 1
            if ended == "cancelled":
                asking.cancel()
            with pytest.raises((asyncio.CancelledError, MetadataTimeout)):
                await asking
        assert producer._watchers == []
        for node in cluster.node_ids:
            cluster.resume(node)


@pytest.mark.parametrize("phase", ["buffered", "in flight"])
async def test_cancelled_when_it_is_too_late(
    cluster: EmbeddedCluster, new_producer: New, phase: str
) -> None:
    """The wait ends, the delivery goes on."""
    async with new_producer(linger_ms=5000, adaptive_linger=False) as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", hold=True)
        sending = asyncio.create_task(producer.send("t", b"value"))
        await turns()
        if phase == "in flight":
            await held.reached()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert producer.health.incomplete_batches == 1
        held.release()
    assert values(cluster) == [b"value"]


async def test_cancelled_during_a_flush(cluster: EmbeddedCluster, new_producer: New) -> None:
    async with new_producer() as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", hold=True)
        delivery = producer.send_nowait("t", b"value")
        flushing = asyncio.create_task(producer.flush())
        await held.reached()
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        held.release()
        await delivery
    assert values(cluster) == [b"value"]


@pytest.mark.parametrize("phase", ["connecting", "negotiating", "metadata"])
async def test_cancelled_during_the_start(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New, phase: str
) -> None:
    """Nothing is left open, and it can be started again."""
    if phase == "negotiating":
        cluster.inject("api_versions", no_answer=True, times=None)
    if phase == "metadata":
        cluster.inject("metadata", no_answer=True, times=None)
    producer = new_producer()
    starting = asyncio.create_task(producer.start())
    if phase == "connecting":
        await turns(3)
    else:
        await asyncio.sleep(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.sleep(0.1)
    assert not network.links
    assert producer.health.state == "created"
    cluster.clear_faults()
    await producer.start()
    await producer.send("t", b"value")


async def test_cancelled_during_the_close(
    network: MemoryNetwork, cluster: EmbeddedCluster, new_producer: New
) -> None:
    """Everything is given up at once, and it is closed all the same."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        held = cluster.inject("produce", hold=True)
        delivery = producer.send_nowait("t", b"value")
        closing = asyncio.create_task(producer.close())
        await held.reached()
        began = now()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert now() == began
        assert producer.health.state == "closed"
        error = delivery.exception()
        assert isinstance(error, AbortedError)
        assert error.persisted == "maybe"


async def test_close_that_is_cancelled_again_and_again(
    cluster: EmbeddedCluster, new_producer: New
) -> None:
    """As anyio does in each turn of the loop. It is closed a moment later."""
    async with new_producer() as producer:
        await producer.warm_up("t")
        cluster.inject("produce", hold=True)
        producer.send_nowait("t", b"value")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(1)
        while not closing.done():
            closing.cancel()
            await asyncio.sleep(0)
        assert closing.cancelled()
        await asyncio.sleep(0.1)
        assert producer.health.state == "closed"
        cluster.clear_faults()


# -- forgotten ---------------------------------------------------------------------------------


async def test_failed_delivery_that_nobody_awaits_is_logged_once(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per batch, with how many and why."""
    cluster.inject("produce", error="INVALID_RECORD", error_message="because")
    async with new_producer() as producer:
        await producer.warm_up("t")
        for number in range(3):
            producer.send_nowait("t", b"%d" % number)
        await producer.flush()
        gc.collect()
        (text,) = errors_logged(caplog)
        assert text.startswith("3 of 3 records to t-0 were not delivered and nobody looked")
        assert "persisted: no" in text
        assert "INVALID_RECORD: because" in text


async def test_failed_delivery_that_is_looked_at_is_not_logged(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.inject("produce", error="INVALID_RECORD", times=None)
    async with new_producer() as producer:
        with pytest.raises(BrokerRejected):
            await producer.send("t", b"awaited")
        delivery = await producer.enqueue("t", b"asked")
        await producer.flush()
        assert delivery.exception() is not None
        result = await producer.send_many("t", [b"many"] * 3, raise_on_error=False)
        assert len(result.failed) == 3
        delivery = await producer.enqueue("t", b"with a callback")
        delivery.add_done_callback(lambda delivery: delivery.exception())
        await producer.flush()
        del delivery, result
        gc.collect()
    assert errors_logged(caplog) == []


async def test_observing_interceptor_does_not_hide_a_forgotten_failure(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.inject("produce", error="INVALID_RECORD")
    async with new_producer(interceptors=[Interceptor()]) as producer:
        await producer.enqueue("t", b"value")
        await producer.flush()
        gc.collect()
        assert len(errors_logged(caplog)) == 1


async def test_batch_with_one_record_looked_at(
    cluster: EmbeddedCluster, new_producer: New, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.inject("produce", error="INVALID_RECORD")
    async with new_producer() as producer:
        await producer.warm_up("t")
        sent = [producer.send_nowait("t", b"%d" % n) for n in range(3)]
        await producer.flush()
        assert sent[1].exception() is not None
        del sent
        gc.collect()
        (text,) = errors_logged(caplog)
        assert text.startswith("2 of 3 records to t-0")


# -- the loop goes away ------------------------------------------------------------------------


async def left_running(made: list[Any], *, waits: bool, **options: Any) -> None:
    """Starts a producer, with a record that is not delivered yet, and leaves it like that."""
    network = MemoryNetwork()
    cluster = EmbeddedCluster(network=network, topics={"t": 1})
    await cluster.start()
    producer: Producer[Any, Any] = Producer(
        cluster.bootstrap_servers, connector=network, buffer_memory=20_000, **options
    )
    await producer.start()
    await producer.warm_up("t")
    if options:
        await producer.begin_transaction()
    cluster.pause(1)
    delivery = producer.send_nowait("t", b"value")
    made += [producer, delivery]

    async def wait() -> None:
        await delivery

    if waits:
        tasks = [
            asyncio.create_task(wait()),
            asyncio.create_task(producer.flush()),
            asyncio.create_task(producer.send("t", bytes(10_000))),
            asyncio.create_task(producer.send("missing", b"")),
            asyncio.create_task(producer.partitions_for("missing")),
        ]
        made.append(tasks)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("waits", [False, True])
def test_asyncio_run_ended_without_a_close(waits: bool) -> None:
    """What was under way is lost with its loop, and says so. Closing it from another takes no
    time."""
    made: list[Any] = []
    run(left_running(made, waits=waits))
    producer, delivery = made[:2]
    assert "own task was cancelled" in str(delivery.exception())

    async def another_loop() -> None:
        with pytest.raises(WrongLoopError):
            await producer.send("t", b"value")
        began = now()
        report = await producer.close()
        assert (report.aborted, report.failed, report.elapsed) == (0, 1, 0.0)
        assert await producer.close() is report
        with pytest.raises(ProducerClosed):
            await producer.send("t", b"value")
        assert now() == began

    run(another_loop())
    error = delivery.exception()
    assert isinstance(error, AbortedError)
    assert error.persisted == "maybe"
    assert producer.health.state == "closed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"transactional_id": "tx"}], ids=["", "transaction"])
@pytest.mark.parametrize("waits", [False, True])
def test_loop_closed_with_tasks_pending(waits: bool, options: dict[str, Any]) -> None:
    """Without asyncio.run, which would have cancelled them. They complain when collected."""
    made: list[Any] = []
    loop = VirtualTimeLoop()
    loop.run_until_complete(left_running(made, waits=waits, **options))
    loop.close()
    producer, delivery = made[:2]
    report = run(producer.close())
    assert report.aborted == 1
    assert isinstance(delivery.exception(), AbortedError)
    made.clear()
    del producer, delivery
    gc.collect()


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_log_handler_that_raises_costs_no_record(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Four batches in one request are to be sent again, and each is logged."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            raise error

    seen: list[str] = []
    monkeypatch.setattr(logging.getLogger("asyncproducer"), "handlers", [Broken()])
    monkeypatch.setattr(logging.getLogger("asyncproducer"), "level", logging.DEBUG)
    async with (
        EmbeddedCluster(topics={"t": 4}, network=network) as cluster,
        Producer(cluster.bootstrap_servers, connector=network, linger_ms=30) as producer,
    ):
        for partition in range(4):
            await producer.send("t", b"0", partition=partition)
        cluster.inject("produce", error="NOT_LEADER_OR_FOLLOWER")
        began = asyncio.get_running_loop().time()
        sends = [producer.send("t", b"1", partition=partition) for partition in range(4)]
        assert [sent.offset for sent in await asyncio.gather(*sends)] == [1] * 4
        assert asyncio.get_running_loop().time() < began + 1
        assert producer.health.buffered_bytes == 0
    assert any("is repeated: NOT_LEADER_OR_FOLLOWER" in line for line in seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by", ["callback", "interceptor"])
def test_a_program_is_ended_by_who_hears_that_the_loop_was_closed(by: str) -> None:
    """In the loop that is left, and when the producer is closed."""

    class Ends(Interceptor):
        def on_acknowledgement(self, *_: object) -> None:
            end()

    def end(*_: object) -> None:
        raise SystemExit(7)

    made: list[Any] = []

    async def main() -> None:
        network = MemoryNetwork()
        cluster = EmbeddedCluster(topics={"t": 1}, network=network)
        await cluster.start()
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=network,
            linger_ms=1000,
            adaptive_linger=False,
            interceptors=[Ends()] if by == "interceptor" else [],
        )
        await producer.start()
        delivery = await producer.enqueue("t", b"value")
        if by == "callback":
            delivery.add_done_callback(end)
        made.extend([cluster, producer, delivery])

    async def closes() -> None:
        try:
            await made[1].close()
        finally:
            closed.append(made[1].health.state)
            await asyncio.sleep(0)  # the loop ends at the latest here

    closed: list[str] = []
    loop = VirtualTimeLoop()
    loop.run_until_complete(main())
    loop.close()
    with pytest.raises(SystemExit, match="7"):
        run(closes())
    assert closed == ["closed"]
    assert made[2].exception().persisted == "no"
    made.clear()
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_tried_again_when_the_loop_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """With real sockets, whose transports complain about the loop."""
    made: list[Any] = []

    async def main() -> None:
        cluster = EmbeddedCluster(topics={"t": 1})
        await cluster.start()
        producer: Producer[Any, Any] = Producer(cluster.bootstrap_servers)
        await producer.start()
        made.extend([cluster, producer, await producer.send("t", b"value")])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    asyncio.run(made[1].close())
    made.clear()
    gc.collect()
    assert not [r for r in caplog.records if "asyncproducer" in r.name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("age", [0.0, 100.0])
def test_report_of_records_whose_loop_is_closed_is_right(age: float) -> None:
    """Closed from elsewhere, on another clock: how old a record is goes by its own."""
    made: list[Any] = []

    async def main() -> None:
        network = MemoryNetwork(latency=0.001)
        cluster = EmbeddedCluster(network=network, topics={"t": 1, "u": 1})
        await cluster.start()
        producer: Producer[Any, Any] = Producer(
            cluster.bootstrap_servers,
            connector=network,
            batch_size=150,
            batch_max_bytes=0,
            max_in_flight_requests_per_connection=1,
        )
        await producer.start()
        await asyncio.sleep(age)
        await producer.send("t", b"acknowledged")
        await producer.warm_up("u")
        held = cluster.inject("produce", hold=True)
        in_flight = producer.send_nowait("t", b"%0100d" % 1)
        await held.reached()
        await asyncio.sleep(2)
        queued = producer.send_nowait("t", b"%0100d" % 2)
        await asyncio.sleep(3)
        made.extend([producer, in_flight, queued])

    loop = VirtualTimeLoop()
    loop.run_until_complete(main())
    loop.close()
    producer, in_flight, queued = made
    report = run(producer.close())
    assert (report.acknowledged, report.failed, report.aborted) == (1, 2, 2)
    told = [(e.persisted, e.attempts) for e in (in_flight.exception(), queued.exception())]
    assert told == [("maybe", 1), ("no", 0)]
    assert in_flight.exception().elapsed == pytest.approx(5, abs=0.01)
    assert queued.exception().elapsed == pytest.approx(3, abs=0.01)
    assert producer.health.state == "closed"
    made.clear()
    del producer, in_flight, queued
    gc.collect()  # what was left pending complains now


def test_forgotten_producer_warns() -> None:
    made: list[Any] = []
    run(left_running(made, waits=False))
    made.pop()

    def forget() -> None:
        made.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"unclosed <Producer .* running>") as seen:
        forget()
    assert len(seen) == 1


def test_loop_that_ends_in_the_middle_of_a_close() -> None:
    """The rest of the close can be done from anywhere."""
    made: list[Any] = []

    async def main() -> None:
        await left_running(made, waits=False)
        closing = asyncio.create_task(made[0].close())
        await asyncio.sleep(1)
        made.append(closing)

    run(main())
    producer, delivery, closing = made
    assert closing.cancelled()
    assert producer.health.state in ("closing", "closed")
    report = run(producer.close())
    assert isinstance(delivery.exception(), AbortedError)
    assert producer.health.state == "closed"
    assert report.failed == 1


def test_closed_producer_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with (
            EmbeddedCluster(network=network, topics={"t": 1}) as cluster,
            Producer(cluster.bootstrap_servers, connector=network) as producer,
        ):
            await producer.send("t", b"value")

    run(main())
    gc.collect()
    assert not recwarn.list


def test_started_again_in_another_loop_after_a_failed_start() -> None:
    producer: Producer[Any, Any]

    async def fails() -> None:
        nonlocal producer
        network = MemoryNetwork()
        network.add_host("gone")
        producer = Producer("gone:9092", connector=network, max_block_ms=1000)
        with pytest.raises(ConnectionFailed):
            await producer.start()

    async def works() -> None:
        network = MemoryNetwork()
        async with EmbeddedCluster(network=network, topics={"t": 1}) as cluster:
            host, port = cluster.bootstrap_servers.split(":")
            network.add_host("gone", host)
            producer._plugins = producer._plugins._replace(connector=network)
            server = network.listen(host, 9092, asyncio.Protocol)
            server.close()
            forward = network._servers[host, int(port)]
            network._servers[host, 9092] = forward
            async with producer:
                await producer.send("t", b"value")

    run(fails())
    run(works())


# -- everything together -----------------------------------------------------------------------

#: What a broker may answer at any time, and be honest.
HONEST = [
    "NOT_ENOUGH_REPLICAS",
    "NOT_LEADER_OR_FOLLOWER",
    "LEADER_NOT_AVAILABLE",
    "CORRUPT_MESSAGE",
    "NETWORK_EXCEPTION",
    "THROTTLING_QUOTA_EXCEEDED",
    "INVALID_RECORD",
    "UNKNOWN_SERVER_ERROR",
]
#: What it says of a batch only if it has lost something, or is broken.
LIES = [
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
    "UNKNOWN_PRODUCER_ID",
    "INVALID_PRODUCER_EPOCH",
    "MESSAGE_TOO_LARGE",
]


class Storm:
    """A producer in random trouble, the same for each seed."""

    def __init__(self, seed: int, *, idempotent: bool, lies: bool) -> None:
        self.rng = rng = random.Random(seed)
        random.seed(seed)
        self.errors = HONEST + (LIES if lies else [])
        self.network = MemoryNetwork(latency=0.001)
        self.cluster = EmbeddedCluster(3, topics={"a": 1, "b": 3}, network=self.network, seed=seed)
        self.cluster.create_topic("small", partitions=2, configs={"max.message.bytes": "450"})
        self.options: dict[str, Any] = {
            "enable_idempotence": idempotent,
            "batch_size": rng.choice([1, 150, 1000]),
            "linger_ms": rng.choice([0, 20]),
            "adaptive_linger": rng.random() < 0.5,
            "compression_type": rng.choice(["none", "lz4"]),
            "buffer_memory": rng.choice([4000, 1_000_000]),
            "max_block_ms": rng.choice([500, 60_000]),
            "delivery_timeout_ms": rng.choice([3000, 60_000]),
            "request_timeout_ms": 1000,
            "reconnect_backoff_max_ms": 1000,
            "max_in_flight_requests_per_connection": rng.choice([1, 5]),
            "retries": rng.choice([3, 2**31 - 1]),
        }
        self.stopped: set[int] = set()
        #: Number, topic, delivery of what was buffered; number of what certainly was not.
        self.buffered: list[tuple[int, str, Delivery]] = []
        self.refused: list[int] = []

    async def run(self) -> None:
        rng = self.rng
        async with self.cluster:
            self.producer: Producer[Any, Any] = Producer(
                self.cluster.bootstrap_servers, connector=self.network, **self.options
            )
            await self.producer.start()
            tasks = []
            number = 0
            for _ in range(60):
                for _ in range(rng.choice([0, 1, 3, 10])):
                    tasks.append(asyncio.create_task(self.send(number)))
                    number += 1
                if rng.random() < 0.1:
                    tasks.append(asyncio.create_task(self.flush()))
                await self.trouble()
                await asyncio.sleep(rng.choice([0, 0.001, 0.05, 0.5]))
            if rng.random() < 0.7:
                self.cluster.clear_faults()
                for node in self.stopped:
                    await self.cluster.start_broker(node)
            report = await self.producer.close(rng.choice([0, 1, 30]))
            assert report.elapsed < 30.1
            await asyncio.gather(*tasks)

    async def send(self, number: int) -> None:
        rng = self.rng
        topic = rng.choice(["a", "b", "small"])
        value = b"%0*d" % (rng.choice([6, 120]), number)
        partition = rng.choice([None, 0])
        try:
            async with asyncio.timeout(rng.choice([None, None, 0.3])):
                delivery = await self.producer.enqueue(topic, value, partition=partition)
        except KafkaError:
            self.refused.append(number)
        except TimeoutError:
            pass  # cancelled, perhaps in the turn in which it was buffered
        else:
            self.buffered.append((number, topic, delivery))

    async def flush(self) -> None:
        try:
            await self.producer.flush(self.rng.choice([None, 0.1]))
        except (TimeoutError, ProducerClosed):
            pass

    async def trouble(self) -> None:
        rng, cluster = self.rng, self.cluster
        what = rng.random()
        node = rng.choice(cluster.node_ids)
        if what < 0.15:
            fault: dict[str, Any] = rng.choice(
                [
                    {"drop": "before"},
                    {"drop": "after"},
                    {"no_answer": True},
                    {"no_answer": True, "after_append": True},
                    {"delay": rng.choice([0.1, 1.5])},
                    {"throttle_ms": 300},
                    {"truncate": rng.randrange(20)},
                    {"corrupt": rng.choice(["correlation_id", "garbage", "size"])},
                ]
            )
            cluster.inject(rng.choice(["produce", "produce", "metadata"]), **fault)
        elif what < 0.3:
            cluster.inject("produce", error=rng.choice(self.errors), times=rng.choice([1, 3]))
        elif what < 0.35 and node not in self.stopped:
            cluster.move_leader("a", 0, node)
        elif what < 0.4 and node in self.stopped:
            await cluster.start_broker(node)
            self.stopped.remove(node)
        elif what < 0.4 and len(self.stopped) < 2:
            await cluster.stop_broker(node)
            self.stopped.add(node)
        elif what < 0.44:
            cluster.pause(node)
            asyncio.get_running_loop().call_later(rng.choice([0.3, 3]), cluster.resume, node)
        elif what < 0.47:
            cluster.kill_connections(node)

    def check(self, *, in_order: bool, no_duplicates: bool) -> None:
        logs = {
            (topic, partition): [int(v or b"") for v in values(self.cluster, topic, partition)]
            for topic, count in (("a", 1), ("b", 3), ("small", 2))
            for partition in range(count)
        }
        stored = Counter(number for log in logs.values() for number in log)
        for number, topic, delivery in self.buffered:
            assert delivery.done()
            error = delivery.exception()
            if error is None:
                assert stored[number], f"{number} was acknowledged, and is not stored"
                offset = delivery.result().offset
                assert offset < 0 or logs[topic, delivery.partition][offset] == number
            elif error.persisted == "no":
                assert not stored[number], f"{number} is stored, but: {error}"
        assert not stored.keys() & set(self.refused)
        if no_duplicates:
            assert max(stored.values(), default=1) == 1
        for place, log in logs.items():
            first_times = list(dict.fromkeys(log))
            assert not in_order or first_times == sorted(first_times), place
        pool = self.producer._pool
        assert (pool.available, pool.held, pool.waiting) == (pool.total, 0, 0)
        assert not self.producer._accumulator.incomplete


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["idempotent", "not idempotent", "lies"])
async def test_storm(kind: str, seed: int) -> None:
    """Every record has one end, and it is true; the order is kept; nothing is left.

    With sequences nothing is stored twice. A broker that lies about sequences may get
    records twice, and out of order; all else holds.
    """
    idempotent = kind != "not idempotent"
    storm = Storm(seed, idempotent=idempotent, lies=kind == "lies")
    await storm.run()
    one_in_flight = storm.options["max_in_flight_requests_per_connection"] == 1
    storm.check(
        in_order=kind != "lies" and (idempotent or one_in_flight),
        no_duplicates=kind == "idempotent",
    )
