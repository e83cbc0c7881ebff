from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import io
import re
import struct
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.serial import entity_reader, entity_writer

from asyncproducer.core import wire
from asyncproducer.core.metadata import MetadataResponse, Node, PartitionUpdate, TopicUpdate
from asyncproducer.core.wire import (
    SUPPORTED,
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    ApiKey,
    ApiVersionsRequest,
    ApiVersionsResponse,
    Coordinator,
    EndTxnRequest,
    EndTxnResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    MetadataRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    Request,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    choose_version,
    encode_frame,
    request_header_version,
    response_header_version,
    split_frame,
    throttles_client,
)
from asyncproducer.errors import ConfigError, ProtocolError, UnsupportedVersionError
from asyncproducer.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

TOPIC_ID = bytes(range(1, 17))
OTHER_ID = bytes(range(21, 37))
TEXT = st.text(max_size=40)


# -- kio, the second opinion ---------------------------------------------------------------


def kio_schema(api_key: ApiKey, version: int, direction: str) -> Any:
    return importlib.import_module(f"kio.schema.{api_key.name.lower()}.v{version}.{direction}")


def kio_entity(entity_type: Any, **values: object) -> Any:
    """`entity_type` with those of the values that this version has."""
    names = {field.name for field in dataclasses.fields(entity_type)}
    return entity_type(**{name: value for name, value in values.items() if name in names})


def kio_bytes(entity: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def kio_uuid(topic_id: bytes | None) -> uuid.UUID | None:
    return None if topic_id is None else uuid.UUID(bytes=topic_id)


def code(value: int) -> KioErrorCode:
    return KioErrorCode(value)


# Per request: kio's response in one version, made from our value, and what is left of
# our value in that version.


def kio_api_versions(schema: Any, value: ApiVersionsResponse) -> Any:
    feature: Any = getattr(schema, "FinalizedFeatureKey", None)
    supported: Any = getattr(schema, "SupportedFeatureKey", None)
    names = value.finalized_features
    return kio_entity(
        schema.ApiVersionsResponse,
        error_code=code(value.error_code),
        api_keys=tuple(
            schema.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in value.versions.items()
        ),
        throttle_time=ms(value.throttle_ms),
        supported_features=tuple(
            supported(name=name, min_version=0, max_version=1) for name in names if supported
        ),
        finalized_features_epoch=value.finalized_features_epoch,
        finalized_features=tuple(
            feature(name=name, max_version_level=level, min_version_level=level // 2)
            for name, level in names.items()
            if feature
        ),
        zk_migration_ready=True,
    )


def kept_of_api_versions(version: int, value: ApiVersionsResponse) -> ApiVersionsResponse:
    if version < 1:
        value = value._replace(throttle_ms=0)
    if version < 3:
        value = value._replace(finalized_features={}, finalized_features_epoch=-1)
    return value


def kio_metadata(schema: Any, value: MetadataResponse) -> Any:
    return kio_entity(
        schema.MetadataResponse,
        throttle_time=ms(value.throttle_ms),
        brokers=tuple(
            schema.MetadataResponseBroker(
                node_id=node.node_id, host=node.host, port=node.port, rack=node.rack
            )
            for node in value.nodes
        ),
        cluster_id=value.cluster_id,
        controller_id=value.controller_id,
        topics=tuple(
            kio_entity(
                schema.MetadataResponseTopic,
                error_code=code(topic.error_code),
                name=topic.name,
                topic_id=kio_uuid(topic.topic_id),
                is_internal=topic.internal,
                partitions=tuple(
                    kio_entity(
                        schema.MetadataResponsePartition,
                        error_code=code(each.error_code),
                        partition_index=each.partition,
                        leader_id=each.leader,
                        leader_epoch=each.leader_epoch,
                        replica_nodes=(each.leader, 2, 3),
                        isr_nodes=(each.leader,),
                        offline_replicas=(7, 8)[: each.partition],
                    )
                    for each in topic.partitions
                ),
                topic_authorized_operations=-1,
            )
            for topic in value.topics
        ),
        cluster_authorized_operations=-2,
        error_code=code(value.error_code),
    )


def kept_of_metadata(version: int, value: MetadataResponse) -> MetadataResponse:
    topics = []
    for each in value.topics:
        topic = each
        if version < 10:
            topic = topic._replace(topic_id=None)
        if version < 7:
            partitions = tuple(part._replace(leader_epoch=-1) for part in topic.partitions)
            topic = topic._replace(partitions=partitions)
        topics.append(topic)
    return value._replace(
        version=version,
        topics=tuple(topics),
        error_code=value.error_code if version >= 13 else 0,
    )


def kio_find_coordinator(schema: Any, value: FindCoordinatorResponse) -> Any:
    coordinator: Any = getattr(schema, "Coordinator", None)
    first = value.coordinators[0]
    return kio_entity(
        schema.FindCoordinatorResponse,
        throttle_time=ms(value.throttle_ms),
        coordinators=tuple(
            coordinator(**{**each._asdict(), "error_code": code(each.error_code)})
            for each in value.coordinators
            if coordinator
        ),
        error_code=code(first.error_code),
        error_message=first.error_message,
        node_id=first.node_id,
        host=first.host,
        port=first.port,
    )


def kept_of_find_coordinator(
    version: int, value: FindCoordinatorResponse
) -> FindCoordinatorResponse:
    coordinators = value.coordinators
    if version < 4:
        coordinators = coordinators[:1]
    if version < 1:
        return FindCoordinatorResponse(0, (coordinators[0]._replace(error_message=None),))
    return FindCoordinatorResponse(value.throttle_ms, coordinators)


def kio_init_producer_id(schema: Any, value: InitProducerIdResponse) -> Any:
    return schema.InitProducerIdResponse(
        throttle_time=ms(value.throttle_ms),
        error_code=code(value.error_code),
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
    )


def _by_topic(errors: Mapping[TopicPartition, int]) -> dict[str, list[tuple[int, int]]]:
    topics: dict[str, list[tuple[int, int]]] = {}
    for place, error in errors.items():
        topics.setdefault(place.topic, []).append((place.partition, error))
    return topics


def kio_add_partitions_to_txn(schema: Any, value: AddPartitionsToTxnResponse) -> Any:
    return schema.AddPartitionsToTxnResponse(
        throttle_time=ms(value.throttle_ms),
        results_by_topic_v3_and_below=tuple(
            schema.AddPartitionsToTxnTopicResult(
                name=name,
                results_by_partition=tuple(
                    schema.AddPartitionsToTxnPartitionResult(
                        partition_index=number, partition_error_code=code(error)
                    )
                    for number, error in each
                ),
            )
            for name, each in _by_topic(value.errors).items()
        ),
    )


def kio_add_offsets_to_txn(schema: Any, value: AddOffsetsToTxnResponse) -> Any:
    return schema.AddOffsetsToTxnResponse(
        throttle_time=ms(value.throttle_ms), error_code=code(value.error_code)
    )


def kio_txn_offset_commit(schema: Any, value: TxnOffsetCommitResponse) -> Any:
    return schema.TxnOffsetCommitResponse(
        throttle_time=ms(value.throttle_ms),
        topics=tuple(
            schema.TxnOffsetCommitResponseTopic(
                name=name,
                partitions=tuple(
                    schema.TxnOffsetCommitResponsePartition(
                        partition_index=number, error_code=code(error)
                    )
                    for number, error in each
                ),
            )
            for name, each in _by_topic(value.errors).items()
        ),
    )


def kio_end_txn(schema: Any, value: EndTxnResponse) -> Any:
    return kio_entity(
        schema.EndTxnResponse,
        throttle_time=ms(value.throttle_ms),
        error_code=code(value.error_code),
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
    )


def kept_of_end_txn(version: int, value: EndTxnResponse) -> EndTxnResponse:
    return value if version >= 5 else value._replace(producer_id=-1, producer_epoch=-1)


def kio_offset_fetch(schema: Any, value: OffsetFetchResponse) -> Any:
    names: dict[str, list[Any]] = {}
    plural = hasattr(schema, "OffsetFetchResponseGroup")
    part = schema.OffsetFetchResponsePartitions if plural else schema.OffsetFetchResponsePartition
    topic = schema.OffsetFetchResponseTopics if plural else schema.OffsetFetchResponseTopic
    for place, (error, found) in value.offsets.items():
        names.setdefault(place.topic, []).append(
            part(
                partition_index=place.partition,
                committed_offset=found.offset,
                committed_leader_epoch=found.leader_epoch,
                metadata=found.metadata or None,
                error_code=code(error),
            )
        )
    topics = tuple(topic(name=name, partitions=tuple(each)) for name, each in names.items())
    if not plural:
        return schema.OffsetFetchResponse(
            throttle_time=ms(value.throttle_ms), topics=topics, error_code=code(value.error_code)
        )
    group = schema.OffsetFetchResponseGroup(
        group_id="group", topics=topics, error_code=code(value.error_code)
    )
    return schema.OffsetFetchResponse(throttle_time=ms(value.throttle_ms), groups=(group,))


def kio_sasl_handshake(schema: Any, value: SaslHandshakeResponse) -> Any:
    return schema.SaslHandshakeResponse(
        error_code=code(value.error_code), mechanisms=value.mechanisms
    )


def kio_sasl_authenticate(schema: Any, value: SaslAuthenticateResponse) -> Any:
    return kio_entity(
        schema.SaslAuthenticateResponse,
        error_code=code(value.error_code),
        error_message=value.error_message,
        auth_bytes=value.auth_bytes,
        session_lifetime=ms(value.session_lifetime_ms),
    )


def kept_of_sasl_authenticate(
    version: int, value: SaslAuthenticateResponse
) -> SaslAuthenticateResponse:
    return value if version >= 1 else value._replace(session_lifetime_ms=0)


def all_of_it(version: int, value: Any) -> Any:
    return value


class Case(NamedTuple):
    """One request, a response with something of everything, and any response."""

    request: Request[Any]
    rich: Any
    responses: st.SearchStrategy[Any]
    to_kio: Callable[[Any, Any], Any]
    kept: Callable[[int, Any], Any] = all_of_it

    def body(self, version: int, value: Any) -> bytes:
        schema = kio_schema(self.request.api_key, version, "response")
        return kio_bytes(self.to_kio(schema, value))


INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
THROTTLE = st.integers(0, 2**31 - 1)
CODES = st.sampled_from([each.value for each in KioErrorCode])
#: 35 has rules of its own, see the tests of ApiVersions.
CODES_BUT_35 = CODES.filter(lambda value: value != 35)
NODES = st.builds(Node, INT32, TEXT, INT32, st.none() | TEXT)
#: As answers have them: by topic.
ERRORS = st.dictionaries(st.builds(TopicPartition, TEXT, st.integers(0, 9)), CODES, max_size=4).map(
    lambda errors: {
        TopicPartition(name, number): error
        for name, each in _by_topic(errors).items()
        for number, error in each
    }
)

CASES = {
    "ApiVersions": Case(
        ApiVersionsRequest(),
        ApiVersionsResponse(
            42,
            {0: (3, 13), 3: (4, 13), 18: (0, 4), 32767: (0, 0)},
            {"transaction.version": 2, "metadata.version": 29},
            11,
            400,
        ),
        st.builds(
            ApiVersionsResponse,
            CODES_BUT_35,
            st.dictionaries(INT16, st.tuples(INT16, INT16), max_size=4),
            st.dictionaries(TEXT, INT16, max_size=3),
            INT64,
            THROTTLE,
        ),
        kio_api_versions,
        kept_of_api_versions,
    ),
    "Metadata": Case(
        MetadataRequest(["orders"]),
        MetadataResponse(
            13,
            20,
            129,
            "q1Sh-9_ISia_zwGINzRvyQ",
            2,
            (Node(1, "kafka-1", 9092, "rack-a"), Node(2, "::1", 9093)),
            (
                TopicUpdate(
                    "orders",
                    TOPIC_ID,
                    0,
                    False,
                    (PartitionUpdate(0, 0, 1, 17), PartitionUpdate(1, 5, -1, -1)),
                ),
                TopicUpdate("__consumer_offsets", OTHER_ID, 0, True, ()),
                TopicUpdate("gone", None, 3, False, ()),
            ),
        ),
        st.builds(
            MetadataResponse,
            st.just(13),
            THROTTLE,
            CODES,
            st.none() | TEXT,
            INT32,
            st.lists(NODES, max_size=3).map(tuple),
            st.lists(
                st.builds(
                    TopicUpdate,
                    TEXT,
                    st.none() | st.binary(min_size=16, max_size=16).filter(any),
                    CODES,
                    st.booleans(),
                    st.lists(
                        st.builds(PartitionUpdate, st.integers(0, 9), CODES, INT32, INT32),
                        max_size=3,
                    ).map(tuple),
                ),
                max_size=3,
            ).map(tuple),
        ),
        kio_metadata,
        kept_of_metadata,
    ),
    "InitProducerId": Case(
        InitProducerIdRequest("payments", 60000),
        InitProducerIdResponse(30, 51, 2**40, 7),
        st.builds(InitProducerIdResponse, THROTTLE, CODES, INT64, INT16),
        kio_init_producer_id,
    ),
    "FindCoordinator": Case(
        FindCoordinatorRequest(FindCoordinatorRequest.GROUP, ["payments"]),
        FindCoordinatorResponse(
            30,
            (
                Coordinator("payments", 1, "kafka-1", 9092, 0, None),
                Coordinator("refunds", -1, "", -1, 15, "no coordinator"),
            ),
        ),
        st.builds(
            FindCoordinatorResponse,
            THROTTLE,
            st.lists(
                st.builds(
                    Coordinator, st.just("payments"), INT32, TEXT, INT32, CODES, st.none() | TEXT
                ),
                min_size=1,
                max_size=3,
            ).map(tuple),
        ),
        kio_find_coordinator,
        kept_of_find_coordinator,
    ),
    "AddPartitionsToTxn": Case(
        AddPartitionsToTxnRequest(
            "tx", 2**40, 7, [TopicPartition("orders", 0), TopicPartition("clicks", 3)]
        ),
        AddPartitionsToTxnResponse(
            30, {TopicPartition("orders", 0): 51, TopicPartition("clicks", 3): 29}
        ),
        st.builds(AddPartitionsToTxnResponse, THROTTLE, ERRORS),
        kio_add_partitions_to_txn,
    ),
    "AddOffsetsToTxn": Case(
        AddOffsetsToTxnRequest("tx", 2**40, 7, "group"),
        AddOffsetsToTxnResponse(30, 51),
        st.builds(AddOffsetsToTxnResponse, THROTTLE, CODES),
        kio_add_offsets_to_txn,
    ),
    "TxnOffsetCommit": Case(
        TxnOffsetCommitRequest(
            "tx",
            2**40,
            7,
            ConsumerGroupMetadata("group"),
            {TopicPartition("orders", 0): OffsetAndMetadata(12)},
            version_two=True,
        ),
        TxnOffsetCommitResponse(
            30, {TopicPartition("orders", 0): 16, TopicPartition("orders", 1): 0}
        ),
        st.builds(TxnOffsetCommitResponse, THROTTLE, ERRORS),
        kio_txn_offset_commit,
    ),
    "EndTxn": Case(
        EndTxnRequest("tx", 2**40, 7, commit=True, version_two=True),
        EndTxnResponse(30, 51, 2**41, 8),
        st.builds(EndTxnResponse, THROTTLE, CODES, INT64, INT16),
        kio_end_txn,
        kept_of_end_txn,
    ),
    "OffsetFetch": Case(
        OffsetFetchRequest("group", [TopicPartition("orders", 0)]),
        OffsetFetchResponse(
            30,
            15,
            {
                TopicPartition("orders", 0): (88, OffsetAndMetadata(-1)),
                TopicPartition("clicks", 3): (0, OffsetAndMetadata(2**40, '{"batch": 7}', 5)),
            },
        ),
        st.builds(
            OffsetFetchResponse,
            THROTTLE,
            CODES,
            st.dictionaries(
                st.builds(TopicPartition, TEXT, INT32),
                st.tuples(CODES, st.builds(OffsetAndMetadata, INT64, TEXT, INT32)),
                max_size=3,
            ),
        ),
        kio_offset_fetch,
    ),
    "SaslHandshake": Case(
        SaslHandshakeRequest("PLAIN"),
        SaslHandshakeResponse(33, ("SCRAM-SHA-512", "GSSAPI")),
        st.builds(SaslHandshakeResponse, CODES, st.lists(TEXT, max_size=3).map(tuple)),
        kio_sasl_handshake,
    ),
    "SaslAuthenticate": Case(
        SaslAuthenticateRequest(b"\0user\0secret"),
        SaslAuthenticateResponse(58, "wrong password", b"\0\xff", 3_600_000),
        st.builds(
            SaslAuthenticateResponse,
            CODES,
            st.none() | TEXT,
            st.binary(max_size=40),
            st.integers(0, 2**40),
        ),
        kio_sasl_authenticate,
        kept_of_sasl_authenticate,
    ),
}


def versions(name: str) -> range:
    low, high = SUPPORTED[CASES[name].request.api_key]
    return range(low, high + 1)


EVERY_VERSION = [(name, version) for name in CASES for version in versions(name)]
FLEXIBLE_VERSIONS = [
    (name, version)
    for name, version in EVERY_VERSION
    if request_header_version(CASES[name].request.api_key, version) == 2
]
every_version = pytest.mark.parametrize(("name", "version"), EVERY_VERSION)


# -- responses -----------------------------------------------------------------------------


@every_version
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_response_is_read_as_kio_wrote_it(name: str, version: int, data: st.DataObject) -> None:
    case = CASES[name]
    value = data.draw(case.responses)
    body = memoryview(case.body(version, value))
    assert case.request.decode(version, body) == case.kept(version, value)


@every_version
def test_response_with_everything(name: str, version: int) -> None:
    case = CASES[name]
    body = case.body(version, case.rich)
    assert case.request.decode(version, body) == case.kept(version, case.rich)


@every_version
def test_response_cut_at_any_byte_is_refused(name: str, version: int) -> None:
    case = CASES[name]
    body = case.body(version, case.rich)
    for size in range(len(body)):
        with pytest.raises(ProtocolError, match=f"malformed {name} v{version} response"):
            case.request.decode(version, body[:size])


@every_version
def test_trailing_bytes_are_refused(name: str, version: int) -> None:
    case = CASES[name]
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        case.request.decode(version, case.body(version, case.rich) + b"\0")


@pytest.mark.parametrize(("name", "version"), FLEXIBLE_VERSIONS)
def test_unknown_tagged_fields_at_the_end_are_skipped(name: str, version: int) -> None:
    """KIP-482: a newer broker may send what we do not know."""
    case = CASES[name]
    value = case.rich
    if isinstance(value, ApiVersionsResponse):  # its own tagged fields end it otherwise
        value = value._replace(finalized_features={}, finalized_features_epoch=-1)
        body = kio_bytes(
            dataclasses.replace(
                kio_api_versions(kio_schema(ApiKey.API_VERSIONS, version, "response"), value),
                zk_migration_ready=False,
            )
        )
    else:
        body = case.body(version, value)
    assert body[-1] == 0
    body = body[:-1] + bytes.fromhex("02 8101 03 aabbcc 9a05 00")
    assert case.request.decode(version, body) == case.kept(version, value)


@every_version
def test_error_code_that_nobody_knows_yet_is_a_number(name: str, version: int) -> None:
    case = CASES[name]
    places = error_code_places(case, version)
    assert places
    for at in places:
        body = bytearray(case.body(version, case.rich))
        body[at : at + 2] = (29999).to_bytes(2, "big")
        assert "29999" in repr(case.request.decode(version, body))


def error_code_places(case: Case, version: int) -> list[int]:
    """Where a body differs when only an error code is another one."""
    rich = case.rich
    if isinstance(rich, MetadataResponse):
        topics = tuple(topic._replace(error_code=0x1D) for topic in rich.topics)
        changed: Any = rich._replace(topics=topics, error_code=0x1D)
    elif isinstance(rich, FindCoordinatorResponse):
        changed = rich._replace(
            coordinators=tuple(each._replace(error_code=0x1D) for each in rich.coordinators)
        )
    elif isinstance(rich, (AddPartitionsToTxnResponse, TxnOffsetCommitResponse)):
        changed = rich._replace(errors=dict.fromkeys(rich.errors, 0x1D))
    else:
        changed = rich._replace(error_code=0x1D)
    body, other = case.body(version, rich), case.body(version, changed)
    return [at - 1 for at in range(len(body)) if body[at] != other[at]]


@every_version
def test_no_count_or_length_makes_the_reader_allocate(name: str, version: int) -> None:
    """kio's own reader ends the process here, for want of memory."""
    case = CASES[name]
    body = case.body(version, case.rich)
    tracemalloc.start()
    try:
        for at in range(len(body)):
            for wild in (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x0f"):
                for kept in (body[at + len(wild) :], body[at + 1 :]):
                    try:
                        case.request.decode(version, body[:at] + wild + kept)
                    except ProtocolError:
                        pass
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


@every_version
@settings(max_examples=50, deadline=None)
@given(body=st.binary(max_size=80))
def test_noise_is_read_or_refused_with_our_own_error(name: str, version: int, body: bytes) -> None:
    try:
        CASES[name].request.decode(version, body)
    except ProtocolError:
        pass


def test_text_that_is_not_utf_8_is_refused_with_its_cause() -> None:
    case = CASES["Metadata"]
    body = case.body(9, case.rich).replace(b"orders", b"or\xff\xfers")
    with pytest.raises(ProtocolError, match="not UTF-8") as raised:
        case.request.decode(9, body)
    assert isinstance(raised.value.__cause__, UnicodeDecodeError)


@pytest.mark.parametrize("version", range(4, 14))
def test_topic_without_a_name_is_accepted_only_from_metadata_12_on(version: int) -> None:
    case = CASES["Metadata"]
    value = case.rich._replace(topics=(TopicUpdate("x", TOPIC_ID, 100, False, ()),))
    body = case.body(version, value)
    null = (
        body.replace(b"\x02x", b"\x00") if version >= 9 else body.replace(b"\0\x01x", b"\xff\xff")
    )
    assert null != body
    if version >= 12:
        assert case.request.decode(version, null).topics[0].name is None
    else:
        with pytest.raises(ProtocolError, match="null where there must be a string"):
            case.request.decode(version, null)


# -- ApiVersions ---------------------------------------------------------------------------

ONE_ENTRY = ApiVersionsResponse(35, {18: (0, 2)}, {}, -1, 0)


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("versions_listed", [{}, {18: (0, 2)}, {18: (0, 0), 0: (0, 7), 3: (0, 5)}])
def test_unsupported_api_versions_is_read_from_a_version_0_body(
    version: int, versions_listed: dict[int, tuple[int, int]]
) -> None:
    """NC-05: whatever version was asked for, the answer to an unsupported one is version 0."""
    value = ONE_ENTRY._replace(versions=versions_listed)
    body = CASES["ApiVersions"].body(0, value)
    assert ApiVersionsRequest().decode(version, body) == value


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("versions_listed", [{}, {18: (0, 2)}, {18: (0, 0), 0: (0, 7), 3: (0, 5)}])
def test_unsupported_api_versions_is_read_from_a_body_of_the_version_asked_for(
    version: int, versions_listed: dict[int, tuple[int, int]]
) -> None:
    """NC-05: some peers answer so."""
    value = CASES["ApiVersions"].rich._replace(error_code=35, versions=versions_listed)
    body = CASES["ApiVersions"].body(version, value)
    assert ApiVersionsRequest().decode(version, body) == kept_of_api_versions(version, value)


def test_only_error_35_may_come_in_version_0() -> None:
    body = CASES["ApiVersions"].body(0, ONE_ENTRY._replace(error_code=42))
    with pytest.raises(ProtocolError, match="ApiVersions v4"):
        ApiVersionsRequest().decode(4, body)


def test_error_35_in_a_body_of_no_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="ApiVersions v4"):
        ApiVersionsRequest().decode(4, b"\0\x23\0\0")


def test_api_versions_request_vectors() -> None:
    request = ApiVersionsRequest("asyncproducer", "1.2.3")
    assert encode_frame(request, 0, 5, "me").hex(" ", 2).replace(" ", "") == (
        "0000000c001200000000000500026d65"
    )
    assert encode_frame(request, 4, 5, "me").hex() == (
        "00000022" "0012" "0004" "00000005" "00026d65" "00"
        "0e6173796e6370726f6475636572" "06312e322e33" "00"
    )  # fmt: skip


@pytest.mark.parametrize("word", ["", "-x", "x.", "a b", "a+b", "ä", "x\n"])
def test_client_software_words_that_brokers_refuse_are_config_errors(word: str) -> None:
    with pytest.raises(ConfigError, match="brokers accept"):
        ApiVersionsRequest(word)
    with pytest.raises(ConfigError, match="brokers accept"):
        ApiVersionsRequest("x", word)


@given(st.text(alphabet="aZ09.-+_! ä", max_size=8))
def test_package_version_becomes_a_word_that_brokers_accept(version: str) -> None:
    word = wire._software_word(version)
    assert re.fullmatch(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?", word)
    ApiVersionsRequest(word, word)


@pytest.fixture
def fresh_software_version() -> Iterator[None]:
    wire._software_version.cache_clear()
    yield
    wire._software_version.cache_clear()


@pytest.mark.usefixtures("fresh_software_version")
def test_version_sent_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{len(name)}.1+dirty")
    assert b"\x0e" + b"asyncproducer" + b"\x0b" + b"13.1-dirty" in ApiVersionsRequest().encode(3)


@pytest.mark.usefixtures("fresh_software_version")
def test_version_sent_is_unknown_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert b"\x08unknown" in ApiVersionsRequest().encode(4)


# -- requests ------------------------------------------------------------------------------


def read_request(request: Request[Any], version: int) -> Any:
    schema = kio_schema(request.api_key, version, "request")
    body = request.encode(version)
    name = type(request).__name__
    entity, size = entity_reader(getattr(schema, name))(body, 0)
    assert size == len(body)
    return entity


@pytest.mark.parametrize("version", versions("Metadata"))
def test_metadata_request_names_its_topics(version: int) -> None:
    entity = read_request(MetadataRequest(["a", "b"], allow_auto_topic_creation=False), version)
    assert [topic.name for topic in entity.topics] == ["a", "b"]
    assert entity.allow_auto_topic_creation is False
    assert all(getattr(topic, "topic_id", None) is None for topic in entity.topics)
    for name in ("include_cluster_authorized_operations", "include_topic_authorized_operations"):
        assert getattr(entity, name, False) is False


@pytest.mark.parametrize("version", versions("Metadata"))
def test_metadata_request_without_topics_asks_for_none_and_not_for_all(version: int) -> None:
    entity = read_request(MetadataRequest([]), version)
    assert entity.topics == ()
    assert entity.allow_auto_topic_creation is True


@pytest.mark.parametrize("version", versions("InitProducerId"))
@pytest.mark.parametrize("timeout_ms", [0, 1, 60000, 2**31 - 1])
def test_init_producer_id_request(version: int, timeout_ms: int) -> None:
    entity = read_request(InitProducerIdRequest("tx", timeout_ms, 2**40, 7), version)
    assert entity.transactional_id == "tx"
    assert entity.transaction_timeout == ms(timeout_ms)
    if version >= 3:
        assert (entity.producer_id, entity.producer_epoch) == (2**40, 7)


def test_init_producer_id_request_vector() -> None:
    assert InitProducerIdRequest(None, 2**31 - 1).encode(4).hex() == (
        "00" "7fffffff" "ffffffffffffffff" "ffff" "00"
    )  # fmt: skip


@pytest.mark.parametrize("version", versions("FindCoordinator"))
def test_find_coordinator_request(version: int) -> None:
    entity = read_request(FindCoordinatorRequest(FindCoordinatorRequest.GROUP, ["g"]), version)
    assert (entity.coordinator_keys if version >= 4 else (entity.key,)) == ("g",)
    assert getattr(entity, "key_type", 0) == 0
    transaction = FindCoordinatorRequest(FindCoordinatorRequest.TRANSACTION, ["t"])
    if version >= 1:
        assert read_request(transaction, version).key_type == 1
    else:
        with pytest.raises(UnsupportedVersionError, match="only groups"):
            transaction.encode(version)


@pytest.mark.parametrize("version", versions("FindCoordinator"))
def test_find_coordinator_takes_several_keys_from_version_4_on(version: int) -> None:
    request = FindCoordinatorRequest(FindCoordinatorRequest.GROUP, ["a", "b"])
    if version >= 4:
        assert read_request(request, version).coordinator_keys == ("a", "b")
    else:
        with pytest.raises(UnsupportedVersionError, match="one key, not for 2"):
            request.encode(version)


@pytest.mark.parametrize("version", versions("AddPartitionsToTxn"))
def test_add_partitions_to_txn_request_lists_partitions_by_topic(version: int) -> None:
    places = [TopicPartition("a", 0), TopicPartition("b", 1), TopicPartition("a", 2)]
    entity = read_request(AddPartitionsToTxnRequest("tx", 2**40, 7, places), version)
    assert entity.v3_and_below_transactional_id == "tx"
    assert (entity.v3_and_below_producer_id, entity.v3_and_below_producer_epoch) == (2**40, 7)
    assert [(t.name, t.partitions) for t in entity.v3_and_below_topics] == [
        ("a", (0, 2)),
        ("b", (1,)),
    ]


@pytest.mark.parametrize("name", ["AddPartitionsToTxn", "TxnOffsetCommit"])
@pytest.mark.parametrize("codes", [(22, 0), (0, 22), (0, 0)])
def test_answer_that_names_a_partition_twice_tells_nothing_of_it(
    name: str, codes: tuple[int, int]
) -> None:
    """One of the two is another's, and nothing tells which."""
    throttle, topic = bytes(4), b"\x03in"
    parts = [(0, codes[0]), (1, 0), (0, codes[1])]
    listed = b"".join(struct.pack(">ih", *part) + b"\0" for part in parts)
    body = throttle + b"\x02" + topic + bytes([len(parts) + 1]) + listed + b"\0" + b"\0"
    answer = CASES[name].request.decode(3, body)
    assert answer.errors == {TopicPartition("in", 1): 0}


@pytest.mark.parametrize("version", versions("AddOffsetsToTxn"))
def test_add_offsets_to_txn_request(version: int) -> None:
    entity = read_request(AddOffsetsToTxnRequest("tx", 2**40, 7, "g"), version)
    assert (entity.transactional_id, entity.group_id) == ("tx", "g")
    assert (entity.producer_id, entity.producer_epoch) == (2**40, 7)


@pytest.mark.parametrize("version", versions("TxnOffsetCommit"))
def test_txn_offset_commit_request(version: int) -> None:
    """TX-27: membership travels from version 3 on, and is never dropped silently."""
    offsets = {
        TopicPartition("a", 0): OffsetAndMetadata(5, "note", 3),
        TopicPartition("b", 1): OffsetAndMetadata(6),
        TopicPartition("a", 2): OffsetAndMetadata(7),
    }

    def request(group: ConsumerGroupMetadata) -> TxnOffsetCommitRequest:
        return TxnOffsetCommitRequest("tx", 2**40, 7, group, offsets, version_two=False)

    entity = read_request(request(ConsumerGroupMetadata("g")), version)
    assert (entity.transactional_id, entity.group_id) == ("tx", "g")
    assert (entity.producer_id, entity.producer_epoch) == (2**40, 7)
    found = {
        (topic.name, each.partition_index): (
            each.committed_offset,
            each.committed_metadata,
            getattr(each, "committed_leader_epoch", None),
        )
        for topic in entity.topics
        for each in topic.partitions
    }
    epoch = (lambda known: known) if version >= 2 else (lambda known: None)
    assert found == {
        ("a", 0): (5, "note", epoch(3)),
        ("a", 2): (7, "", epoch(-1)),
        ("b", 1): (6, "", epoch(-1)),
    }
    member = request(ConsumerGroupMetadata("g", 4, "me", "instance"))
    if version >= 3:
        entity = read_request(member, version)
        assert (entity.generation_id, entity.member_id) == (4, "me")
        assert entity.group_instance_id == "instance"
    else:
        with pytest.raises(UnsupportedVersionError, match="membership"):
            member.encode(version)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("version", versions("EndTxn"))
def test_end_txn_request(version: int, commit: bool) -> None:
    request = EndTxnRequest("tx", 2**40, 7, commit=commit, version_two=False)
    entity = read_request(request, version)
    assert entity.transactional_id == "tx"
    assert (entity.producer_id, entity.producer_epoch) == (2**40, 7)
    assert entity.committed is commit


@pytest.mark.parametrize("version", versions("OffsetFetch"))
def test_offset_fetch_request_wants_offsets_that_no_open_transaction_changes(version: int) -> None:
    request = OffsetFetchRequest("g", [TopicPartition("a", 2), TopicPartition("b", 0)])
    entity = read_request(request, version)
    group = entity if version < 8 else entity.groups[0]
    assert (group.group_id, entity.require_stable) == ("g", True)
    assert [(t.name, t.partition_indexes) for t in group.topics] == [("a", (2,)), ("b", (0,))]


def test_versions_that_say_a_transaction_is_of_version_two_are_kept_from_others() -> None:
    """TX-42: the version of these requests tells the broker which protocol is followed."""
    group = ConsumerGroupMetadata("g")
    for version_two, cap in ((False, 4), (True, None)):
        end = EndTxnRequest("tx", 1, 0, commit=True, version_two=version_two)
        offsets = TxnOffsetCommitRequest("tx", 1, 0, group, {}, version_two=version_two)
        assert (end.cap, offsets.cap) == (cap, cap)
    assert InitProducerIdRequest("tx", 1).cap is None


@pytest.mark.parametrize("version", versions("SaslHandshake"))
def test_sasl_handshake_request(version: int) -> None:
    assert read_request(SaslHandshakeRequest("PLAIN"), version).mechanism == "PLAIN"


@pytest.mark.parametrize("version", versions("SaslAuthenticate"))
def test_sasl_authenticate_request_carries_its_token_and_does_not_show_it(version: int) -> None:
    request = SaslAuthenticateRequest(b"\0user\0secret")
    assert read_request(request, version).auth_bytes == b"\0user\0secret"
    assert "secret" not in repr(request)


@pytest.mark.parametrize("name", CASES)
def test_request_in_a_version_that_is_not_ours_is_refused(name: str) -> None:
    for version in (versions(name)[0] - 1, versions(name)[-1] + 1):
        with pytest.raises(UnsupportedVersionError, match=f"{name}: version {version} is not"):
            CASES[name].request.encode(version)


@pytest.mark.parametrize(
    "request_",
    [
        InitProducerIdRequest("x" * 40000, 1),
        InitProducerIdRequest("half \ud800 a pair", 1),
        InitProducerIdRequest(None, 2**31),
        InitProducerIdRequest(None, 2**80),
    ],
)
def test_values_that_the_protocol_cannot_carry_are_config_errors(request_: Request[Any]) -> None:
    with pytest.raises(ConfigError, match="InitProducerId"):
        request_.encode(1)


# -- versions ------------------------------------------------------------------------------


def test_chosen_version_is_the_newest_that_both_speak() -> None:
    assert choose_version(ApiKey.METADATA, {3: (0, 9)}) == 9
    assert choose_version(ApiKey.METADATA, {3: (0, 99)}) == 13
    assert choose_version(ApiKey.METADATA, {3: (4, 4)}) == 4
    assert choose_version(ApiKey.PRODUCE, {0: (0, 13)}, cap=12) == 12
    assert choose_version(ApiKey.PRODUCE, {0: (0, 8)}, cap=12) == 8
    assert choose_version(ApiKey.PRODUCE, {0: (0, 99)}, cap=99) == 13


@pytest.mark.parametrize(
    ("broker", "cap", "message"),
    [
        ({0: (0, 2)}, None, "Produce: the broker speaks 0 to 2, we speak 3 to 13"),
        ({0: (14, 16)}, None, "Produce: the broker speaks 14 to 16, we speak 3 to 13"),
        ({0: (12, 13)}, 11, "Produce: the broker speaks 12 to 13, we speak 3 to 11"),
        ({0: (5, 4)}, None, "Produce: the broker speaks 5 to 4, we speak 3 to 13"),
        ({3: (0, 9)}, None, "Produce: the broker does not speak it, we speak 3 to 13"),
        ({}, None, "Produce: the broker does not speak it, we speak 3 to 13"),
    ],
)
def test_no_common_version_is_an_error_with_both_ranges(
    broker: dict[int, tuple[int, int]], cap: int | None, message: str
) -> None:
    with pytest.raises(UnsupportedVersionError) as raised:
        choose_version(ApiKey.PRODUCE, broker, cap=cap)
    assert str(raised.value) == message
    assert raised.value.code == 35


def test_request_that_we_do_not_speak_is_unsupported() -> None:
    with pytest.raises(UnsupportedVersionError, match="ListOffsets: we do not speak it"):
        choose_version(ApiKey.LIST_OFFSETS, {2: (0, 9)})


@given(st.tuples(st.integers(0, 20), st.integers(0, 20)), st.none() | st.integers(0, 20))
def test_chosen_version_is_always_in_both_ranges(theirs: tuple[int, int], cap: int | None) -> None:
    low, high = SUPPORTED[ApiKey.PRODUCE]
    allowed = [
        version
        for version in range(low, high + 1)
        if theirs[0] <= version <= theirs[1] and (cap is None or version <= cap)
    ]
    try:
        version = choose_version(ApiKey.PRODUCE, {0: theirs}, cap=cap)
    except UnsupportedVersionError:
        assert not allowed
    else:
        assert version == max(allowed)


def test_kio_has_every_version_that_we_speak() -> None:
    for api_key, (low, high) in SUPPORTED.items():
        for version in range(low, high + 1):
            assert kio_schema(api_key, version, "request")


# -- headers and frames --------------------------------------------------------------------


def split(api_key: int, version: int, frame: bytes) -> tuple[int, bytes]:
    whole = split_frame(api_key, version, frame)
    assert split_frame(api_key, version, memoryview(frame)) == whole
    return whole


@pytest.mark.parametrize("api_key", ApiKey)
def test_header_versions_are_those_of_kio(api_key: ApiKey) -> None:
    found = 0
    for version in range(20):
        try:
            request = kio_schema(api_key, version, "request")
        except ModuleNotFoundError:
            continue
        found += 1
        response = kio_schema(api_key, version, "response")
        assert request.RequestHeader.__version__ == request_header_version(api_key, version)
        assert response.ResponseHeader.__version__ == response_header_version(api_key, version)
    assert found >= 2


def test_headers_of_a_request_that_we_do_not_know_are_an_error() -> None:
    with pytest.raises(UnsupportedVersionError, match="the request with key 4711"):
        request_header_version(4711, 0)


@every_version
@pytest.mark.parametrize("client_id", ["me", "", None, "ä€"])
def test_frame_is_size_header_and_body(name: str, version: int, client_id: str | None) -> None:
    request = CASES[name].request
    schema = kio_schema(request.api_key, version, "request")
    header = schema.RequestHeader(
        request_api_key=request.api_key,
        request_api_version=version,
        correlation_id=-5,
        client_id=client_id,
    )
    expected = kio_bytes(header) + request.encode(version)
    frame = encode_frame(request, version, -5, client_id)
    assert type(frame) is bytes
    assert frame == len(expected).to_bytes(4, "big") + expected


def test_client_id_that_does_not_fit_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        encode_frame(SaslHandshakeRequest("PLAIN"), 1, 1, "x" * 40000)


@every_version
def test_response_frame_is_split_at_its_header(name: str, version: int) -> None:
    api_key = CASES[name].request.api_key
    schema = kio_schema(api_key, version, "response")
    header = kio_bytes(schema.ResponseHeader(correlation_id=-5))
    correlation_id, body = split(api_key, version, header + b"\0body")
    assert correlation_id == -5
    assert body == b"\0body"


def test_api_versions_response_has_no_tagged_fields_in_its_header() -> None:
    assert split(18, 4, b"\0\0\0\1\0\x23") == (1, b"\0\x23")


def test_tagged_fields_of_a_response_header_are_skipped() -> None:
    frame = bytes.fromhex("00000001 02 00 01 aa 05 02 bbcc 0007")
    assert split(ApiKey.METADATA, 9, frame) == (1, b"\0\7")


@pytest.mark.parametrize("frame", ["", "000000", "00000001", "0000000101", "000000010102ff"])
def test_frame_without_its_whole_header_is_refused(frame: str) -> None:
    with pytest.raises(ProtocolError, match="malformed response header"):
        split(ApiKey.METADATA, 9, bytes.fromhex(frame))


def test_body_may_be_empty_after_the_header() -> None:
    assert split(ApiKey.METADATA, 8, b"\0\0\0\1") == (1, b"")
    assert split(ApiKey.METADATA, 9, b"\0\0\0\1\0") == (1, b"")


def test_throttle_time_is_for_the_client_from_certain_versions_on() -> None:
    """Spec 6.9, KIP-219."""
    since = {0: 6, 3: 6, 9: 4, 18: 2, 10: 2, 22: 1, 24: 1, 25: 1, 26: 1, 28: 1}
    for api_key in ApiKey:
        for version in range(8):
            expected = version >= since.get(api_key, 99)
            assert throttles_client(api_key, version) is expected


# -- import --------------------------------------------------------------------------------


def test_kio_is_not_imported_before_the_first_request_is_written() -> None:
    program = (
        "import sys\n"
        "import asyncproducer.core.wire as wire\n"
        "def kio(): return [name for name in sys.modules if name.split('.')[0] == 'kio']\n"
        "assert not kio(), kio()\n"
        "wire.MetadataRequest(['x']).encode(12)\n"
        "assert 'kio.schema.metadata.v12.request' in kio()\n"
        "assert 'kio.schema.metadata.v13.request' not in kio()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
