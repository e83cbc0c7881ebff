from __future__ import annotations

import dataclasses
import importlib
import io
import struct
import tracemalloc
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.serial import entity_writer

from asyncproducer.core.metadata import Node
from asyncproducer.core.primitives import Buffer
from asyncproducer.core.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceResponse,
    ProduceTopic,
    RecordError,
    decode_produce,
    encode_produce,
)
from asyncproducer.errors import ConfigError, ProtocolError, UnsupportedVersionError

VERSIONS = range(3, 14)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TOPIC_ID = bytes(range(1, 17))
INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=40)
IDS = st.binary(min_size=16, max_size=16).filter(any)


def batch(payload: bytes = b"records", *, magic: int = 2, codec: int = 0) -> bytes:
    """A batch as far as the request's writer looks at it: its length, magic and codec."""
    header = bytearray(61)
    struct.pack_into(">i", header, 8, 61 + len(payload) - 12)
    header[16] = magic
    struct.pack_into(">h", header, 21, codec)
    return bytes(header) + payload


def topic(*partitions: ProducePartition, topic_id: bytes | None = TOPIC_ID) -> ProduceTopic:
    return ProduceTopic("orders", topic_id, partitions)


def encode(version: int, *topics: ProduceTopic, **changes: Any) -> list[Buffer]:
    arguments: dict[str, Any] = {"acks": -1, "timeout_ms": 30000, "transactional_id": None}
    return encode_produce(version, 7, "me", topics=topics, **arguments | changes)


def test_what_is_kept_of_a_senders_requests_changes_none() -> None:
    """A sender's transactional id changes where it takes over other ids; the rest may well."""
    part = topic(ProducePartition(0, [batch()]))
    heads: dict[tuple[int, str | None, int, int, str | None], bytes] = {}
    senders = [
        (client_id, acks, timeout_ms, name)
        for client_id in ("me", None)
        for acks in (-1, 1)
        for timeout_ms in (1000, 2000)
        for name in ("id", "other", None)
    ]
    twice = [sender for sender in senders for _ in range(2)]
    sizes = set()
    for number, (version, sender) in enumerate(product((9, 13, 9, 3, 13, 3), twice)):
        kept, fresh = (
            encode_produce(version, number, *sender, [part], heads=kept) for kept in (heads, None)
        )
        assert list(map(bytes, kept)) == list(map(bytes, fresh))
        assert kept[0][8:12] == struct.pack(">i", number)
        sizes.add(len(heads))
    assert sizes == set(range(1, 9)), "ids that change all the time are not kept for ever"


# -- kio, the second opinion ---------------------------------------------------------------


def kio_entity(entity_type: Any, **values: object) -> Any:
    """`entity_type` with those of the values that this version has."""
    names = {field.name for field in dataclasses.fields(entity_type)}
    return entity_type(**{name: value for name, value in values.items() if name in names})


def kio_bytes(entity: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def kio_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
    topics: Sequence[ProduceTopic],
) -> bytes:
    schema: Any = importlib.import_module(f"kio.schema.produce.v{version}.request")
    request = kio_entity(
        schema.ProduceRequest,
        transactional_id=transactional_id,
        acks=acks,
        timeout=timedelta(milliseconds=timeout_ms),
        topic_data=tuple(
            kio_entity(
                schema.TopicProduceData,
                name=each.name,
                topic_id=uuid.UUID(bytes=each.topic_id),
                partition_data=tuple(
                    schema.PartitionProduceData(
                        index=part.partition, records=b"".join(map(bytes, part.records))
                    )
                    for part in each.partitions
                ),
            )
            for each in topics
        ),
    )
    header = request.__header_schema__(
        request_api_key=0,
        request_api_version=version,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    frame = kio_bytes(header) + kio_bytes(request)
    return len(frame).to_bytes(4, "big") + frame


def kio_response(version: int, response: ProduceResponse) -> bytes:
    """One topic entry per partition: what is written is read back in the same order."""
    schema: Any = importlib.import_module(f"kio.schema.produce.v{version}.response")
    record_error: Any = getattr(schema, "BatchIndexAndErrorMessage", None)
    leader: Any = getattr(schema, "LeaderIdAndEpoch", None)
    node: Any = getattr(schema, "NodeEndpoint", None)

    def partition(part: ProducePartitionResponse) -> Any:
        return kio_entity(
            schema.PartitionProduceResponse,
            index=part.partition,
            error_code=KioErrorCode(part.error_code),
            base_offset=part.base_offset,
            log_append_time=None
            if part.log_append_time == -1
            else EPOCH + timedelta(milliseconds=part.log_append_time),
            log_start_offset=part.log_start_offset,
            record_errors=tuple(
                record_error(batch_index=error.batch_index, batch_index_error_message=error.message)
                for error in part.record_errors
                if record_error
            ),
            error_message=part.error_message,
            current_leader=leader(leader_id=part.leader, leader_epoch=part.leader_epoch)
            if leader
            else None,
        )

    return kio_bytes(
        kio_entity(
            schema.ProduceResponse,
            responses=tuple(
                kio_entity(
                    schema.TopicProduceResponse,
                    name=part.topic,
                    topic_id=None if part.topic_id is None else uuid.UUID(bytes=part.topic_id),
                    partition_responses=(partition(part),),
                )
                for part in response.partitions
            ),
            throttle_time=timedelta(milliseconds=response.throttle_ms),
            node_endpoints=tuple(
                node(node_id=each.node_id, host=each.host, port=each.port, rack=each.rack)
                for each in response.nodes
                if node
            ),
        )
    )


def known_to(version: int, response: ProduceResponse) -> ProduceResponse:
    """The response without what the version cannot carry."""
    partitions = []
    for each in response.partitions:
        part = each
        if version < 5:
            part = part._replace(log_start_offset=-1)
        if version < 8:
            part = part._replace(record_errors=(), error_message=None)
        if version < 10:
            part = part._replace(leader=-1, leader_epoch=-1)
        if version < 13:
            part = part._replace(topic_id=None)
        else:
            part = part._replace(topic=None)
        partitions.append(part)
    return ProduceResponse(
        partitions, response.nodes if version >= 10 else (), response.throttle_ms
    )


@st.composite
def record_buffers(draw: st.DrawFn) -> list[Buffer]:
    """One batch: whole, or its header and its payload apart, as bytes or as views."""
    payload = draw(st.binary(max_size=200))
    whole = batch(payload)
    if draw(st.booleans()):
        return [memoryview(bytearray(b"x" + whole))[1:]]
    return [bytearray(whole[:61]), whole[61:]]


TOPICS = st.lists(
    st.builds(
        ProduceTopic,
        TEXT,
        IDS,
        st.lists(st.builds(ProducePartition, INT32, record_buffers()), max_size=3),
    ),
    max_size=3,
)

PARTITION_RESPONSES = st.builds(
    ProducePartitionResponse,
    topic=TEXT,
    topic_id=IDS,
    partition=INT32,
    error_code=st.sampled_from([code.value for code in KioErrorCode]),
    base_offset=INT64,
    log_append_time=st.just(-1) | st.integers(0, 253_402_300_799_000),
    log_start_offset=INT64,
    record_errors=st.lists(st.builds(RecordError, INT32, st.none() | TEXT), max_size=3).map(tuple),
    error_message=st.none() | TEXT,
    leader=INT32,
    leader_epoch=INT32,
)

RESPONSES = st.builds(
    ProduceResponse,
    st.lists(PARTITION_RESPONSES, max_size=3),
    st.lists(st.builds(Node, INT32, TEXT, INT32, st.none() | TEXT), max_size=3).map(tuple),
    st.integers(0, 2**31 - 1),
)

#: A response with something of everything.
RICH = ProduceResponse(
    [
        ProducePartitionResponse("orders", TOPIC_ID, 0, 0, 2**40, 1_700_000_000_123, 17),
        ProducePartitionResponse(
            "orders",
            TOPIC_ID,
            1,
            87,
            -1,
            -1,
            -1,
            (RecordError(0, "no key"), RecordError(5, None)),
            "one or more records have been rejected",
        ),
        ProducePartitionResponse("naïve", TOPIC_ID, 2, 6, -1, -1, -1, leader=3, leader_epoch=9),
    ],
    (Node(3, "kafka-3.example", 9092, "rack-a"), Node(4, "::1", 19092)),
    250,
)


# -- the request ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=40, deadline=None)
@given(
    correlation_id=INT32,
    client_id=st.none() | TEXT,
    acks=st.sampled_from([-1, 0, 1]),
    timeout_ms=st.integers(0, 2**31 - 1),
    transactional_id=st.none() | TEXT,
    topics=TOPICS,
)
def test_request_is_byte_for_byte_that_of_kio(
    version: int,
    correlation_id: int,
    client_id: str | None,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
    topics: list[ProduceTopic],
) -> None:
    buffers = encode_produce(
        version,
        correlation_id,
        client_id,
        acks=acks,
        timeout_ms=timeout_ms,
        transactional_id=transactional_id,
        topics=topics,
    )
    expected = kio_request(
        version, correlation_id, client_id, acks, timeout_ms, transactional_id, topics
    )
    assert b"".join(buffers) == expected


@pytest.mark.parametrize(
    ("version", "frame"),
    [
        (3, "0000006b 0000 0003 00000007 00026d65 ffff ffff 00007530"
            " 00000001 00066f7264657273 00000001 00000004 0000003f {batch}"),
        (9, "00000064 0000 0009 00000007 00026d65 00 00 ffff 00007530"
            " 02 076f7264657273 02 00000004 40 {batch} 00 00 00"),
        (13, "0000006d 0000 000d 00000007 00026d65 00 00 ffff 00007530"
             " 02 0102030405060708090a0b0c0d0e0f10 02 00000004 40 {batch} 00 00 00"),
    ],
)  # fmt: skip
def test_request_vectors(version: int, frame: str) -> None:
    records = batch(b"ab")
    encoded = b"".join(encode(version, topic(ProducePartition(4, [records]))))
    assert encoded == bytes.fromhex(frame.format(batch=records.hex()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [0, 65, 66, 67, 16320, 16321, 2_100_000])
def test_request_with_sizes_around_the_varint_steps(version: int, size: int) -> None:
    topics = [topic(ProducePartition(0, [batch(bytes(size))]))]
    assert b"".join(encode(version, *topics)) == kio_request(
        version, 7, "me", -1, 30000, None, topics
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_record_buffers_are_passed_on_and_only_one_bytes_object_lies_between(version: int) -> None:
    header, payload, whole = bytearray(batch(b"abc")[:61]), b"abc", memoryview(batch(b"other"))
    buffers = encode(
        version,
        topic(ProducePartition(0, [header, payload]), ProducePartition(1, [whole])),
        topic(ProducePartition(0, [whole])),
    )
    given = [buffer for buffer in buffers if any(buffer is b for b in (header, payload, whole))]
    assert [id(buffer) for buffer in given] == [id(b) for b in (header, payload, whole, whole)]
    kinds = "".join("r" if any(b is g for g in given) else "s" for b in buffers)
    assert kinds == ("srrsrsrs" if version >= 9 else "srrsrsr")
    assert all(type(buffer) is bytes for buffer in buffers if all(buffer is not g for g in given))


def test_size_counts_every_byte_of_the_frame_but_its_own() -> None:
    for version in VERSIONS:
        frame = b"".join(encode(version, topic(ProducePartition(0, [batch()]))))
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "0 bytes"),
        ([b""], "0 bytes"),
        ([batch()[:60]], "60 bytes"),
        ([b"", batch()], "0 bytes"),
        ([batch(magic=0)], "magic 0"),
        ([batch(magic=1)], "magic 1"),
        ([batch(magic=3)], "magic 3"),
        ([batch(), batch()], "not exactly one"),
        ([batch() + batch()], "not exactly one"),
        ([batch()[:-1]], "not exactly one"),
        ([batch() + b"x"], "not exactly one"),
    ],
)
def test_records_that_are_not_one_batch_of_magic_2_are_refused(
    version: int, records: list[bytes], problem: str
) -> None:
    """RC-08: exactly one batch per partition; none, and magic 0 or 1, are refused."""
    with pytest.raises(ValueError, match=f"orders-3: .*{problem}"):
        encode(version, topic(ProducePartition(3, records)))


@pytest.mark.parametrize("version", VERSIONS)
def test_zstd_is_refused_before_version_7(version: int) -> None:
    """RC-08: zstd needs Produce 7."""
    zstd = topic(ProducePartition(0, [batch(codec=4)]))
    if version < 7:
        with pytest.raises(UnsupportedVersionError, match="zstd needs Produce version 7"):
            encode(version, zstd)
    else:
        encode(version, zstd)


@pytest.mark.parametrize("codec", [1, 2, 3, 0x10, 0x18 | 3])
def test_other_codecs_and_attributes_pass_in_every_version(codec: int) -> None:
    encode(3, topic(ProducePartition(0, [batch(codec=codec)])))


@pytest.mark.parametrize("version", [-1, 0, 2, 14])
def test_versions_out_of_range_are_refused(version: int) -> None:
    """RC-08: versions 3 to 13."""
    with pytest.raises(UnsupportedVersionError, match=f"version {version} is not"):
        encode(version)
    with pytest.raises(UnsupportedVersionError, match=f"version {version} is not"):
        decode_produce(version, b"")


@pytest.mark.parametrize("topic_id", [None, b"short"])
def test_topic_without_id_is_refused_only_in_version_13(topic_id: bytes | None) -> None:
    nameless = topic(ProducePartition(0, [batch()]), topic_id=topic_id)
    encode(12, nameless)
    with pytest.raises(ValueError, match="'orders' has no id"):
        encode(13, nameless)


@pytest.mark.parametrize("version", [3, 9])
def test_transactional_id_that_does_not_fit_is_a_config_error(version: int) -> None:
    with pytest.raises(ConfigError):
        encode(version, transactional_id="x" * 40000)


class Huge(bytes):
    """Says that it is larger than any frame, without being it."""

    def __len__(self) -> int:
        return 2**31 - 1 + 12


def test_request_larger_than_a_frame_is_refused() -> None:
    records = bytearray(batch())
    struct.pack_into(">i", records, 8, 2**31 - 1)
    with pytest.raises(ValueError, match="does not fit in a frame"):
        encode(9, topic(ProducePartition(0, [Huge(records)])))


# -- the response --------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=40, deadline=None)
@given(response=RESPONSES)
def test_response_is_read_as_kio_wrote_it(version: int, response: ProduceResponse) -> None:
    body = kio_response(version, response)
    assert decode_produce(version, memoryview(body)) == known_to(version, response)


@pytest.mark.parametrize("version", VERSIONS)
def test_response_with_everything(version: int) -> None:
    assert decode_produce(version, kio_response(version, RICH)) == known_to(version, RICH)


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (3, "00000001 00066f7264657273 00000001"
            " 00000004 ffff 0000000000000011 ffffffffffffffff 00000005"),
        (8, "00000001 00066f7264657273 00000001"
            " 00000004 ffff 0000000000000011 ffffffffffffffff ffffffffffffffff"
            " 00000000 ffff 00000005"),
        (9, "02 076f7264657273 02"
            " 00000004 ffff 0000000000000011 ffffffffffffffff ffffffffffffffff"
            " 01 00 00 00 00000005 00"),
    ],
)  # fmt: skip
def test_response_vectors(version: int, body: str) -> None:
    assert decode_produce(version, bytes.fromhex(body)) == ProduceResponse(
        [ProducePartitionResponse("orders", None, 4, -1, 17, -1)], (), 5
    )


def test_error_code_that_nobody_knows_yet_is_a_number() -> None:
    one = ProduceResponse([ProducePartitionResponse("t", None, 0, 0, 1, -1)], (), 0)
    for version in range(3, 13):
        body = bytearray(kio_response(version, one))
        at = body.index(b"t") + 1 + (1 if version >= 9 else 4) + 4
        body[at : at + 2] = (29999).to_bytes(2, "big")
        assert decode_produce(version, body).partitions[0].error_code == 29999


#: One partition, the tagged fields left open: `{0}` ends the partition, `{1}` the response.
OPEN = "02 {id} 02 00000004 0006" + " ffffffffffffffff" * 3 + " 01 00 {0} 00 00000005 {1}"
LEADER = "0000000300000009"
NODES = "02 00000003 0268 00002384 00"  # one node, its tagged fields not yet written


def open_body(version: int, partition_tags: str, response_tags: str) -> bytes:
    name = TOPIC_ID.hex() if version >= 13 else "076f7264657273"
    return bytes.fromhex(OPEN.format(partition_tags, response_tags, id=name))


@pytest.mark.parametrize("version", range(10, 14))
@pytest.mark.parametrize(
    ("partition_tags", "response_tags"),
    [
        # as brokers write it
        (f"01 00 09 {LEADER} 00", f"01 00 0d {NODES} 00"),
        # an unknown field after it, and before it
        (f"02 00 09 {LEADER} 00 05 02 aabb", f"02 00 0d {NODES} 00 8101 01 aa"),
        (f"02 05 02 aabb 00 09 {LEADER} 00", f"02 05 00 00 0d {NODES} 00"),
        # an unknown field inside
        (f"01 00 0d {LEADER} 01 07 02 aabb", f"01 00 10 {NODES} 01 00 01 aa"),
    ],
)
def test_leader_hints_are_read_and_unknown_tagged_fields_are_skipped(
    version: int, partition_tags: str, response_tags: str
) -> None:
    """KIP-951 and KIP-482."""
    response = decode_produce(version, open_body(version, partition_tags, response_tags))
    assert [(part.leader, part.leader_epoch) for part in response.partitions] == [(3, 9)]
    assert response.nodes == (Node(3, "h", 9092, None),)
    assert response.throttle_ms == 5


def test_leader_hint_is_an_unknown_field_in_version_9() -> None:
    body = open_body(9, f"01 00 09 {LEADER} 00", f"01 00 0d {NODES} 00")
    response = decode_produce(9, body)
    assert response.partitions[0].leader == -1
    assert response.nodes == ()


@pytest.mark.parametrize(
    ("partition_tags", "response_tags"),
    [
        (f"01 00 08 {LEADER} 00", "00"),  # the field is shorter than what is in it
        (f"01 00 0a {LEADER} 00 00", "00"),  # ... and longer
        (f"01 00 7f {LEADER} 00", "00"),  # ... and longer than the message
        ("01 05 7f aa", "00"),
        ("ffffffff0f 05 00", "00"),
        ("00", f"01 00 0c {NODES} 00"),
        ("00", f"01 00 0e {NODES} 00 00"),
        ("00", "01 00 05 ffffffff0f"),
        ("00", "01 00 01 00"),  # null
    ],
)
def test_malformed_tagged_fields_are_refused(partition_tags: str, response_tags: str) -> None:
    with pytest.raises(ProtocolError, match="malformed Produce v10 response"):
        decode_produce(10, open_body(10, partition_tags, response_tags))


# -- hostile input -------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_response_cut_at_any_byte_is_refused(version: int) -> None:
    body = kio_response(version, RICH)
    for size in range(len(body)):
        with pytest.raises(ProtocolError):
            decode_produce(version, body[:size])


@pytest.mark.parametrize("version", VERSIONS)
def test_trailing_bytes_are_refused(version: int) -> None:
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        decode_produce(version, kio_response(version, RICH) + b"\0")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0"])
def test_no_count_or_length_makes_the_reader_allocate(version: int, value: bytes) -> None:
    body = kio_response(version, RICH)
    wild = value if version < 9 else b"\xff\xff\xff\xff\x0f"
    tracemalloc.start()
    try:
        for at in range(len(body)):
            for cut in (body[:at] + wild + body[at + 4 :], body[:at] + wild + body[at + 1 :]):
                try:
                    decode_produce(version, cut)
                except ProtocolError:
                    pass
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(version=st.sampled_from(VERSIONS), body=st.binary(max_size=120))
def test_noise_is_refused_with_our_own_error(version: int, body: bytes) -> None:
    try:
        decode_produce(version, body)
    except ProtocolError:
        pass


@settings(max_examples=300, deadline=None)
@given(version=st.sampled_from(VERSIONS), data=st.data())
def test_damaged_response_is_read_or_refused_with_our_own_error(
    version: int, data: st.DataObject
) -> None:
    body = bytearray(kio_response(version, RICH))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_produce(version, body)
    except ProtocolError:
        pass
