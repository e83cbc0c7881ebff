"""docs/errors.md, cell by cell: each request is answered with a code, and what then happens to a
record, to the transaction and to the calls is put into the words of the page.

The words come from what was observed, not from the page: a cell that says something else fails.
Each different row of a request is tried, with its first and its last code.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from asyncproducer import (
    AbortedError,
    BrokerError,
    ConnectionFailed,
    Delivery,
    DeliveryTimeout,
    ErrorCode,
    KafkaError,
    MetadataTimeout,
    Producer,
    ProducerFenced,
    RequestTimedOut,
    TopicPartition,
    TransactionAborted,
    TransactionTimeout,
)
from asyncproducer.cli.error_tables import REQUESTS, effect
from asyncproducer.core import wire
from asyncproducer.net import handshake
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork
from asyncproducer.testing.handlers import APIS

pytestmark = pytest.mark.virtual_time

New = Callable[..., Producer[Any, Any]]

#: A record lives 4 s, a call waits for 2 s.
OPTIONS: dict[str, Any] = {
    "delivery_timeout_ms": 4000,
    "request_timeout_ms": 1000,
    "max_block_ms": 2000,
}
OFFSETS = {("in", 0): 5}


class Seen(NamedTuple):
    """What was seen, in the words of the page."""

    error: str
    batch: str
    transaction: str
    user: str


def said(request: str, code: ErrorCode) -> Seen:
    """What the page says."""
    row = effect(request, code)
    return Seen(row.error, row.batch, row.transaction, row.user)


def codes(request: str) -> list[ErrorCode]:
    """The first and the last code of each row, but for those of success."""
    rows: dict[Any, list[ErrorCode]] = {}
    for code in sorted(ErrorCode):
        rows.setdefault(effect(request, code), []).append(code)
    ends = {code for found in rows.values() for code in (found[0], found[-1])}
    return sorted(ends - {ErrorCode.NONE})


def cases(*requests: str) -> pytest.MarkDecorator:
    found = [(request, code) for request in requests for code in codes(request)]
    return pytest.mark.parametrize(
        ("request_", "code"), found, ids=[f"{request}-{code.name}" for request, code in found]
    )


#: What matters is their cause.
_WITH_CAUSE = (ConnectionFailed, TransactionAborted, TransactionTimeout, RequestTimedOut)


def quoted(error: KafkaError) -> str:
    """`Class`, with its cause where the code is the cause's."""
    if type(error) is KafkaError and isinstance(error.__cause__, KafkaError):
        error = error.__cause__  # an abort that failed: see the text of the page
    name = f"`{type(error).__name__}`"
    if error.code is None or isinstance(error, _WITH_CAUSE):
        cause = error.__cause__
        name += ", no cause" if cause is None else f", cause `{type(cause).__name__}`"
    return name


def has_code(error: BaseException, code: ErrorCode) -> bool:
    """Whether the error is of this code, or the one behind it."""
    if isinstance(error, ProducerFenced):
        return error.code == ErrorCode.PRODUCER_FENCED
    return code in (getattr(error, "code", None), getattr(error.__cause__, "code", None))


async def error_of(call: Awaitable[Any]) -> KafkaError | None:
    try:
        await call
    except KafkaError as error:
        return error
    return None


def now() -> float:
    return asyncio.get_running_loop().time()


# -- requests of a transaction -------------------------------------------------------------------

#: Brokers before Kafka 2.5 give no new epoch, those before 4.0 have transactions of version 1.
OLD_VERSIONS = {22: (0, 2), 0: (3, 8), 26: (0, 1), 28: (0, 2), 24: (0, 1), 25: (0, 1)}


@pytest.fixture
async def old() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(
        topics={"t": 1, "t4": 4, "in": 1},
        network=MemoryNetwork(latency=0.001),
        finalized_features={},
        request_versions=OLD_VERSIONS,
    ) as cluster:
        yield cluster


@pytest.fixture
def modern(cluster: EmbeddedCluster) -> EmbeddedCluster:
    """With transactions of version 1: those of version 2 have no AddPartitionsToTxn."""
    cluster.create_topic("in", partitions=1)
    cluster.set_feature("transaction.version", 1)
    return cluster


def transactional(cluster: EmbeddedCluster, new: New, **options: Any) -> Producer[Any, Any]:
    return new(
        transactional_id="tx",
        bootstrap_servers=cluster.bootstrap_servers,
        connector=cluster.connector,
        **{**OPTIONS, **options},
    )


def calls_of(producer: Producer[Any, Any]) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Those within a transaction, and the one that ends it whatever has happened."""
    return {
        "send": lambda: producer.send("t", b"later"),
        "enqueue": lambda: producer.enqueue("t", b"later"),
        "send_many": lambda: producer.send_many("t", [b"later"]),
        "send_offsets": lambda: producer.send_offsets(OFFSETS, "g"),
        "commit": producer.commit_transaction,
        "begin": producer.begin_transaction,
        "abort": producer.abort_transaction,
    }


#: The call that waits for a request.
CALLS = {
    "FindCoordinator": "send_offsets",
    "InitProducerId": "abort",
    "AddPartitionsToTxn": "commit",
    "AddOffsetsToTxn": "send_offsets",
    "TxnOffsetCommit": "send_offsets",
    "EndTxn": "commit",
}


async def works(producer: Producer[Any, Any]) -> None:
    """Another transaction goes well."""
    async with producer.transaction() as tx:
        await tx.send("t", b"works")


async def what_became_of(
    producer: Producer[Any, Any], call: str, code: ErrorCode | None, error: KafkaError
) -> tuple[str, str]:
    """The transaction and the user, after a call has raised and the trouble is over."""
    calls = calls_of(producer)
    if isinstance(error, TransactionTimeout):
        assert await error_of(calls[call]()) is None
        if call == "send_offsets":
            await producer.commit_transaction()
        await works(producer)
        return "goes on", "nothing; the error after `max_block_ms`, and called again it waits on"
    later = {name: await error_of(calls[name]()) for name in calls if name != "abort"}
    aborted = await error_of(producer.abort_transaction())
    if aborted is None:
        del later["begin"]
        await works(producer)
    else:
        later["abort"] = aborted
    for each in later.values():
        assert each is not None
        assert (type(each), quoted(each)) == (type(error), quoted(error))
        assert code is None or has_code(each, code)
    if aborted is None:
        return "abortable", "each call raises it until `abort_transaction()`"
    return "fatal", "each call raises it"


def of_records(records: list[Delivery]) -> str:
    """The first is for a partition that the transaction has, the second one for another."""
    ends = [type(r.exception()).__name__ if r.done() else "" for r in records]
    return {
        (): "none",
        ("", ""): "those not sent yet wait",
        ("NoneType", ""): "those for partitions that are new to the transaction wait",
        ("NoneType", "NoneType"): "goes on",
        ("AbortedError", "AbortedError"): "those not sent yet fail with `AbortedError`",
    }[tuple(ends)]


async def in_transaction(cluster: EmbeddedCluster, new: New, api: str, code: ErrorCode) -> Seen:
    # A record leaves after 1 s, if it may.
    producer = transactional(cluster, new, linger_ms=1000, adaptive_linger=False)
    await producer.start()
    await producer.warm_up("t")
    await producer.begin_transaction()
    records: list[Delivery] = []
    if api == "InitProducerId":
        # Asked for a new epoch, it is, to abort what has failed so.
        cluster.inject("add_partitions_to_txn", error="UNKNOWN_PRODUCER_ID")
        assert isinstance(await error_of(producer.send("t", b"lost")), AbortedError)
    elif api != "AddPartitionsToTxn":
        await producer.send("t4", b"earlier", partition=0)
    cluster.inject(api, error=code, times=None)
    if api not in ("InitProducerId", "EndTxn"):
        records += [await producer.enqueue("t4", b"record", partition=n) for n in range(2)]
    began = now()
    error = await error_of(calls_of(producer)[CALLS[api]]())
    assert error is not None
    assert has_code(error, code)
    assert isinstance(error, TransactionTimeout) == (now() - began > 1)
    batch = of_records(records)
    cluster.clear_faults()
    transaction, user = await what_became_of(producer, CALLS[api], code, error)
    if isinstance(error, TransactionTimeout):
        assert [each.exception() for each in records] == [None] * len(records)
    return Seen(quoted(error), batch, transaction, user)


@cases(*(name for name in REQUESTS if name.endswith("of a transaction")))
async def test_a_request_of_a_transaction(
    modern: EmbeddedCluster, old: EmbeddedCluster, new_producer: New, request_: str, code: ErrorCode
) -> None:
    api = request_.split(" ")[0]
    seen = await in_transaction(modern, new_producer, api, code)
    if api != "InitProducerId":  # none is asked for, in the middle of their transactions
        before = await in_transaction(old, new_producer, api, code)
        assert before.batch == seen.batch
        if not api.startswith("Add"):  # transactions of version 2 have no need of these
            modern.set_feature("transaction.version", 2)
            newest = await in_transaction(modern, new_producer, api, code)
            assert newest._replace(batch=seen.batch) == seen
            if newest != seen:
                seen = newest._replace(batch=f"{newest.batch}; before Kafka 4.0 {seen.batch}")
        if before.transaction != seen.transaction:
            seen = seen._replace(
                transaction=f"{seen.transaction}; {before.transaction} before Kafka 2.5",
                user=f"{seen.user}; {before.error} where it is {before.transaction}",
            )
        else:
            assert (before.error, before.user) == (seen.error, seen.user)
    assert seen == said(request_, code)


@cases("FindCoordinator of a transaction", "InitProducerId of a transaction")
async def test_a_start_that_fails_can_be_tried_again(
    modern: EmbeddedCluster, new_producer: New, request_: str, code: ErrorCode
) -> None:
    """Where the page says "abortable", there is nothing to be aborted yet: see its text."""
    modern.inject(request_.split(" ")[0], error=code, times=None)
    producer = transactional(modern, new_producer)
    error = await error_of(producer.start())
    assert error is not None
    assert has_code(error, code)
    assert quoted(error) == said(request_, code).error.removeprefix("`TransactionAborted`, cause ")
    modern.clear_faults()
    await producer.start()
    await works(producer)


# -- making a connection -------------------------------------------------------------------------


class Trouble(NamedTuple):
    """What no connection gets through, from the call of `begin` to that of `end`."""

    begin: Callable[[], object]
    end: Callable[[], object]
    options: dict[str, Any]


class Refuses:
    """A broker's part in a SASL handshake: it answers one of the requests with a code."""

    def __init__(self, refused: str, code: int) -> None:
        self.codes = {refused: code}

    async def ask(self, request: wire.Request[Any], version: int) -> Any:
        if isinstance(request, wire.SaslHandshakeRequest):
            return wire.SaslHandshakeResponse(self.codes.get("SaslHandshake", 0), ("PLAIN",))
        return wire.SaslAuthenticateResponse(self.codes.get("SaslAuthenticate", 0), None, b"", 0)

    async def exchange_raw(self, token: bytes) -> bytes:
        raise AssertionError("SaslAuthenticate is spoken here")


def sasl(monkeypatch: pytest.MonkeyPatch, request: str, code: ErrorCode) -> Trouble:
    """The embedded broker has no SASL: it is another one that is asked for the password."""
    authenticate = handshake.authenticate
    answers = [0]

    async def elsewhere(channel: Any, mechanism: Any, versions: Any) -> float:
        spoken: dict[int, tuple[int, int]] = {
            wire.ApiKey.SASL_HANDSHAKE: (0, 1),
            wire.ApiKey.SASL_AUTHENTICATE: (0, 2),
        }
        return await authenticate(Refuses(request, answers[-1]), mechanism, spoken)

    monkeypatch.setattr(handshake, "authenticate", elsewhere)
    return Trouble(
        lambda: answers.append(code),
        lambda: answers.append(0),
        {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": "user",
            "sasl_plain_password": "password",
        },
    )


async def of_connections(
    cluster: EmbeddedCluster, new: New, trouble: Trouble, code: ErrorCode
) -> Seen:
    def begin() -> None:
        trouble.begin()
        for node in cluster.node_ids:
            cluster.kill_connections(node)

    begin()
    producer = new(**OPTIONS, **trouble.options)
    started = await error_of(producer.start())
    assert started is not None
    assert has_code(started, code)
    trouble.end()
    await producer.start()
    await producer.warm_up("t")
    begin()
    record = await producer.enqueue("t", b"waits")
    asked = await error_of(producer.send("t4", b"a topic that is not known yet"))
    assert not record.done()
    trouble.end()
    await record
    begin()
    lost = await error_of(producer.send("t", b"lost"))
    trouble.end()

    ends: list[str] = []
    for is_waiting in (True, False):  # a record; else the end of the transaction meets it
        producer = transactional(cluster, new, **trouble.options)
        await producer.start()
        await producer.begin_transaction()
        await producer.send("t", b"earlier")
        begin()
        if is_waiting:
            record = await producer.enqueue("t", b"waits")
        error = await error_of(producer.commit_transaction())
        trouble.end()
        assert error is not None
        end, _ = await what_became_of(producer, "commit", code, error)
        ends.append(end)
    waits = "goes on; its calls wait, until `TransactionTimeout`"
    return Seen(
        quoted(started),
        f"waits, until `{type(lost).__name__}`",
        {
            ("goes on", "goes on"): waits,
            ("goes on", "fatal"): "fatal, where a request of one meets it",
        }[ends[0], ends[1]],
        "`start()` and calls that wait for metadata raise it"
        if type(asked) is type(started)
        else "`start()` raises it where no broker answers better",
    )


@cases("ApiVersions", "SaslHandshake", "SaslAuthenticate")
async def test_a_request_of_a_new_connection(
    cluster: EmbeddedCluster,
    new_producer: New,
    request_: str,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.create_topic("in", partitions=1)
    if request_ != "ApiVersions":
        trouble = sasl(monkeypatch, request_, code)
    else:
        trouble = Trouble(
            lambda: cluster.inject("api_versions", error=code, times=None), cluster.clear_faults, {}
        )
    seen = await of_connections(cluster, new_producer, trouble, code)
    if code == ErrorCode.UNSUPPORTED_VERSION and request_ == "ApiVersions":
        cluster.inject("api_versions", error=code)
        async with new_producer(**OPTIONS) as producer:
            await producer.send("t", b"fine")
        disconnected = said(request_, ErrorCode.UNKNOWN_SERVER_ERROR)
        assert seen == disconnected
        nothing = said(request_, ErrorCode.NONE)
        assert nothing.user == "nothing"
        seen = nothing._replace(error=seen.error, user="nothing; the second time: disconnect")
    assert seen == said(request_, code)


# -- metadata ------------------------------------------------------------------------------------


def answer(
    monkeypatch: pytest.MonkeyPatch, key: wire.ApiKey, change: Callable[[dict[str, Any]], object]
) -> None:
    """What the embedded broker answers is changed before it is sent."""
    api = APIS[key]

    async def handle(call: Any) -> Any:
        found: Any = api.handle(call)
        response = await found if inspect.isawaitable(found) else found
        change(response)
        return response

    monkeypatch.setitem(APIS, key, api._replace(handle=handle))


@cases("Metadata")
async def test_metadata_as_a_whole(
    cluster: EmbeddedCluster,
    new_producer: New,
    request_: str,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [0]
    answer(monkeypatch, wire.ApiKey.METADATA, lambda found: found.update(error_code=answers[-1]))

    def begin() -> None:
        answers.append(code)

    def end() -> None:
        answers.append(0)

    cluster.create_topic("in", partitions=1)
    begin()
    producer = new_producer(**OPTIONS)
    began = now()
    started = await error_of(producer.start())
    assert type(started) is ConnectionFailed
    assert now() - began == 2
    assert code.name in str(started)
    end()
    await producer.start()
    await producer.warm_up("t")
    begin()
    error = await error_of(producer.send("t4", b"a topic that is not known yet"))
    assert error is not None
    record = await producer.enqueue("t", b"record")
    await asyncio.sleep(2)
    batch = "goes on where its leader is known"
    if not record.done():
        batch = f"waits, until `{type(await error_of(producer.send('t', b'lost'))).__name__}`"
    end()
    await producer.send("t", b"later")

    producer = transactional(cluster, new_producer)
    await producer.start()
    await producer.begin_transaction()
    await producer.send("t", b"earlier")
    begin()
    asks = asyncio.ensure_future(error_of(producer.warm_up("t4")))
    await asyncio.sleep(0.5)
    ended = await error_of(producer.commit_transaction())
    end()
    transaction = "goes on"
    if ended is not None:
        await what_became_of(producer, "commit", None, ended)
        transaction += f"; its calls wait, until `{type(ended).__name__}`"
    await asks
    begin()
    assert await doomed_by(producer, producer.send("in", b"not known yet")) == "abortable"
    user = f"nothing; the timeout of what waits, `{type(started).__name__}` of `start()`"
    assert Seen(quoted(error), batch, transaction, user) == said(request_, code)


async def doomed_by(producer: Producer[Any, Any], send: Awaitable[Any]) -> str:
    """What a record that fails makes of its transaction."""
    await producer.begin_transaction()
    failed = await error_of(send)
    assert failed is not None
    error = await error_of(producer.commit_transaction())
    assert isinstance(error, TransactionAborted)
    await producer.abort_transaction()
    return "abortable"


@cases("... topic")
async def test_metadata_of_a_topic(
    cluster: EmbeddedCluster, new_producer: New, request_: str, code: ErrorCode
) -> None:
    def begin() -> None:
        cluster.inject("metadata", error=code, topic="t4", times=None)

    async with new_producer(**OPTIONS) as producer:
        await producer.warm_up("t")
        begin()
        began = now()
        error = await error_of(producer.send("t4", b"record"))
        assert error is not None
        assert has_code(error, code)
        waited = now() - began
        batch, user = "none yet", "the calls that wait raise it"
        if waited > 1:
            assert waited == 2
            later = asyncio.ensure_future(producer.send("t4", b"later"))
            await asyncio.sleep(1)
            cluster.clear_faults()
            assert (await later).offset == 0
            batch += ": the record waits for the topic"
            user = "nothing; the error after `max_block_ms`"
        cluster.clear_faults()
    producer = transactional(cluster, new_producer)
    await producer.start()
    begin()
    transaction = await doomed_by(producer, producer.send("t4", b"record"))
    seen = Seen(quoted(error), batch, f"{transaction}, if the record was of one", user)
    page = said(request_, code)
    if isinstance(error, MetadataTimeout):
        assert isinstance(error.__cause__, BrokerError)
        seen = seen._replace(error="`MetadataTimeout`")
    assert seen == page


@cases("... partition")
async def test_metadata_of_a_partition(
    cluster: EmbeddedCluster,
    new_producer: New,
    request_: str,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaderless = [False]

    def change(found: dict[str, Any]) -> None:
        for partition in (p for topic in found["topics"] for p in topic["partitions"]):
            partition["error_code"] = code
            if leaderless[-1]:
                partition["leader_id"] = -1

    answer(monkeypatch, wire.ApiKey.METADATA, change)
    async with new_producer(**OPTIONS) as producer:
        await producer.send("t", b"to the leader that is named")
    leaderless.append(True)
    producer = new_producer(**OPTIONS)
    await producer.start()
    error = await error_of(producer.send("t", b"record"))
    assert error is not None
    page = said(request_, code)
    if effect(request_, code).answer == "take":
        assert page == said(request_, ErrorCode.NONE)
        return
    assert page == Seen(
        quoted(error),
        "goes to the leader that is named; without one it waits",
        "goes on; abortable if a batch fails",
        "nothing; the error when a batch's time is up",
    )
    producer = transactional(cluster, new_producer)
    await producer.start()
    assert await doomed_by(producer, producer.send("t", b"record")) == "abortable"


# -- producer ids, groups ------------------------------------------------------------------------


@cases("InitProducerId")
async def test_a_producer_id(
    cluster: EmbeddedCluster, new_producer: New, request_: str, code: ErrorCode
) -> None:
    cluster.inject("init_producer_id", error=code, times=None, delay=0.5)
    producer = new_producer(**OPTIONS)
    await producer.start()
    began = now()
    error = await error_of(producer.send("t", b"record"))
    assert error is not None
    assert has_code(error, code)
    is_timeout = isinstance(error, DeliveryTimeout)
    assert is_timeout == (now() - began > 3.9)
    cluster.clear_faults()
    later = await error_of(producer.send("t", b"later"))
    if is_timeout:
        assert later is None
        name, batch = "`DeliveryTimeout`", "waits, until `DeliveryTimeout`"
        user = "nothing; the error when a record's time is up"
    else:
        name = f"`{type(error.__cause__).__name__}`"
        batch = f"fails with `{type(error).__name__}`, whose cause it is"
        user = "the record's error; what comes later asks again"
    if later is not None:
        assert (type(later), later.code) == (type(error.__cause__), code)
        user = "the record's error; then each call raises it"
    assert Seen(name, batch, "none", user) == said(request_, code)


@cases("FindCoordinator of a group", "OffsetFetch of a group")
async def test_a_request_about_a_group(
    cluster: EmbeddedCluster, new_producer: New, request_: str, code: ErrorCode
) -> None:
    cluster.create_topic("in", partitions=1)
    partition = TopicPartition("in", 0)
    producer = transactional(cluster, new_producer)
    await producer.start()
    await producer.begin_transaction()
    cluster.inject(request_.split(" ")[0], error=code, times=None)
    record = await producer.enqueue("t", b"record")
    began = now()
    error = await error_of(producer.committed_offsets("g", [partition]))
    assert error is not None
    assert has_code(error, code)
    waited = now() - began
    cluster.clear_faults()
    assert await producer.committed_offsets("g", [partition]) == {}
    assert await error_of(producer.commit_transaction()) is None
    assert await error_of(record) is None
    user = "`committed_offsets()` raises it"
    if waited > 1:
        assert waited == 2
        user = "nothing; the error after `max_block_ms`"
    assert Seen(quoted(error), "goes on", "goes on", user) == said(request_, code)


# -- Produce -------------------------------------------------------------------------------------


def tell_log_start(found: dict[str, Any]) -> None:
    """Nothing was deleted from the log: it has what was sent before."""
    for part in (p for topic in found["responses"] for p in topic["partition_responses"]):
        part["log_start_offset"] = 0


@cases("Produce")
async def test_produce(
    cluster: EmbeddedCluster,
    new_producer: New,
    request_: str,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code == ErrorCode.UNKNOWN_PRODUCER_ID:
        answer(monkeypatch, wire.ApiKey.PRODUCE, tell_log_start)
    cluster.create_topic("in", partitions=1)
    ends: list[tuple[str, str]] = []
    stored = code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER
    error: KafkaError | None = None
    for times in (1, None):
        producer = transactional(cluster, new_producer)
        await producer.start()
        await producer.begin_transaction()
        await producer.send("t", b"earlier")
        cluster.inject("produce", error=code, times=times, after_append=stored)
        began = now()
        # Where it comes once, it is of a batch that can be split.
        await producer.send_many("t", [b"record"] * (2 if times else 1), raise_on_error=False)
        waited = now() - began
        cluster.clear_faults()
        error = await error_of(producer.commit_transaction())
        if error is None:
            ends.append(("goes on", ""))
        else:
            end, _ = await what_became_of(producer, "commit", code, error)
            ends.append((end, type(error).__name__))

    idempotent = new_producer(**OPTIONS)
    await idempotent.start()
    await idempotent.send("t", b"earlier")
    cluster.inject("produce", error=code, times=None, after_append=stored)
    began = now()
    failed = await error_of(idempotent.send("t", b"record"))
    waited = now() - began
    cluster.clear_faults()
    later = await error_of(idempotent.send("t", b"later"))
    plain = new_producer(**OPTIONS, enable_idempotence=False)
    await plain.start()
    cluster.inject("produce", error=code, times=None, after_append=stored)
    failed_too = await error_of(plain.send("t", b"record"))
    cluster.clear_faults()

    (once, _), (always, kind) = ends
    transaction, user = once, "the error"
    if failed is None:
        user = "`RecordMetadata`"
    elif always == "fatal":
        user += f"; then each call raises `{kind}`"
        assert later is not None
        if type(later).__name__ != kind:
            user += f"; `{type(later).__name__}` without a `transactional_id`"
    elif waited > 1:
        user = "nothing; the error when its time is up"
    elif once == "goes on":
        user = "nothing; the error where it is a single record"
    if once != always:
        transaction += f"; {always} if it fails"
    elif waited > 1:
        where = {
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: "no earlier batch is missing",
            ErrorCode.UNKNOWN_PRODUCER_ID: "the log still has what we sent before",
        }[code]
        assert error is not None
        transaction = f"goes on; {always}, with `{type(error.__cause__).__name__}`, where {where}"
    page = said(request_, code)
    name, other = (
        "" if each is None else f"`{type(each).__name__}`" for each in (failed, failed_too)
    )
    if name != other:
        name += f"; plain: {other}"
    assert Seen(name, page.batch, transaction, user) == page
