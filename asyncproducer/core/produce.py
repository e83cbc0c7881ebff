"""The Produce request and response, versions 3 to 13, straight from and to our own values.

| version | what it brought                                             |
|---------|-------------------------------------------------------------|
| 3       | record batch v2                                             |
| 5       | log start offset in the response                            |
| 7       | zstd                                                        |
| 8       | which records of a batch were bad, and why (KIP-467)        |
| 9       | flexible: compact lengths, tagged fields (KIP-482)          |
| 10      | who leads the partition now, and where it listens (KIP-951) |
| 12      | a transaction's partitions are added implicitly (KIP-890)   |
| 13      | topic ids instead of names (KIP-516)                        |

A request is a list of buffers. The batches in it are the accumulator's own buffers;
only the few bytes between them are written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from asyncproducer.core.metadata import Node
from asyncproducer.core.primitives import (
    Buffer,
    Reader,
    put_int32,
    write_compact_string,
    write_int16,
    write_int32,
    write_string,
    write_unsigned_varint,
)
from asyncproducer.errors import UnsupportedVersionError

__all__ = [
    "PRODUCE_VERSIONS",
    "ProducePartition",
    "ProducePartitionResponse",
    "ProduceResponse",
    "ProduceTopic",
    "RecordError",
    "decode_produce",
    "encode_produce",
]

#: Brokers 4.x may list 0 to 2 as well, for old librdkafka (KAFKA-18659), and refuse them.
PRODUCE_VERSIONS = (3, 13)

_LOG_START_OFFSET = 5
_ZSTD = 7
_RECORD_ERRORS = 8
_FLEXIBLE = 9
_CURRENT_LEADER = 10
_TOPIC_IDS = 13

_API_KEY = 0
_SIZE_BYTES = 4
_CORRELATION_ID_AT = 8
_INT32 = Struct(">i")
_KEPT_HEADS = 8

# The places in a batch's header that tell whether it is one whole batch of magic 2.
_HEADER_BYTES = 61
_BATCH_LENGTH_AT = 8
_BATCH_LENGTH_COUNTS_FROM = 12
_MAGIC_AT = 16
_MAGIC = 2
_CODEC_AT = 22  # the low byte of the attributes
_CODEC_MASK = 0x07
_CODEC_ZSTD = 4

_MAX_INT32 = 2**31 - 1

# No element can be shorter than this, whatever the version: the guards of array counts.
_MIN_TOPIC = 3
_MIN_PARTITION = 22  # index, error code, base offset, log append time
_MIN_RECORD_ERROR = 6
_MIN_NODE = 11

#: Both tagged fields that we know, CurrentLeader of a partition and NodeEndpoints of the
#: response, have the first tag of their structure.
_TAG = 0

#: What an answer is called in errors, by its version.
_ANSWERS = {
    version: f"Produce v{version} response"
    for version in range(PRODUCE_VERSIONS[0], PRODUCE_VERSIONS[1] + 1)
}


class ProducePartition(NamedTuple):
    """The buffers of exactly one batch for one partition. The first holds its whole header."""

    partition: int
    records: Sequence[Buffer]


class ProduceTopic(NamedTuple):
    """What goes to one topic. Without an id it can be sent up to version 12."""

    name: str
    topic_id: bytes | None
    partitions: Sequence[ProducePartition]


class RecordError(NamedTuple):
    """One bad record: its place in the batch, and the broker's words."""

    batch_index: int
    message: str | None


class ProducePartitionResponse(NamedTuple):
    """The answer for one partition.

    Up to version 12 `topic` names it, from 13 on `topic_id` does. Offsets and times are
    -1, `leader` and `leader_epoch` too, where the broker does not tell.
    """

    topic: str | None
    topic_id: bytes | None
    partition: int
    error_code: int
    base_offset: int
    log_append_time: int
    log_start_offset: int = -1
    record_errors: tuple[RecordError, ...] = ()
    error_message: str | None = None
    leader: int = -1
    leader_epoch: int = -1


class ProduceResponse(NamedTuple):
    """A decoded Produce response. `nodes` are the leaders that the partitions name."""

    partitions: list[ProducePartitionResponse]
    nodes: tuple[Node, ...]
    throttle_ms: int


def encode_produce(
    version: int,
    correlation_id: int,
    client_id: str | None,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
    topics: Sequence[ProduceTopic],
    heads: dict[tuple[int, str | None, int, int, str | None], bytes] | None = None,
) -> list[Buffer]:
    """The whole frame, its size included. Record buffers are passed on, not copied.

    `heads` belongs to the sender: what comes before the topics is kept there, by all that it is
    made of. It has an entry or two in most senders, and never more than `_KEPT_HEADS`, also where
    the transactional id changes all the time.

    Raises UnsupportedVersionError for a version that we do not write, and for zstd
    before version 7; ValueError for records that are not exactly one batch of magic 2,
    and for a topic without an id from version 13 on.
    """
    _check_version(version)
    flexible = version >= _FLEXIBLE
    buffers: list[Buffer] = []
    made_of = (version, client_id, acks, timeout_ms, transactional_id)
    head = None if heads is None else heads.get(made_of)
    if head is None:
        head = _head(version, client_id, acks, timeout_ms, transactional_id)
        if heads is not None:
            if len(heads) >= _KEPT_HEADS:
                heads.clear()
            heads[made_of] = head
    out = first = bytearray(head)
    put_int32(out, _CORRELATION_ID_AT, correlation_id)
    total = 0

    _write_count(out, len(topics), flexible)
    for topic in topics:
        _write_topic(out, topic, version, flexible)
        partitions = topic.partitions
        _write_count(out, len(partitions), flexible)
        for partition in partitions:
            records = partition.records
            size = _batch_size(topic, partition, version)
            write_int32(out, partition.partition)
            if flexible:
                write_unsigned_varint(out, size + 1)
            else:
                write_int32(out, size)
            total += len(out) + size
            buffers.append(bytes(out))
            buffers.extend(records)
            out = bytearray()
            if flexible:
                out.append(0)
        if flexible:
            out.append(0)
    if flexible:
        out.append(0)

    total += len(out)
    if out:
        buffers.append(bytes(out))
    size = total - _SIZE_BYTES
    if size > _MAX_INT32:
        raise ValueError(f"a request of {total} bytes does not fit in a frame")
    put_int32(first, 0, size)
    buffers[0] = bytes(first)
    return buffers


def _head(
    version: int, client_id: str | None, acks: int, timeout_ms: int, transactional_id: str | None
) -> bytes:
    """What comes before the topics. Size and correlation id are still 0."""
    out = bytearray(_SIZE_BYTES)
    write_int16(out, _API_KEY)
    write_int16(out, version)
    write_int32(out, 0)
    # The client id of a request header stays a string of the old kind (KIP-511).
    write_string(out, client_id)
    if version >= _FLEXIBLE:
        out.append(0)
        write_compact_string(out, transactional_id)
    else:
        write_string(out, transactional_id)
    write_int16(out, acks)
    write_int32(out, timeout_ms)
    return bytes(out)


def _check_version(version: int) -> None:
    low, high = PRODUCE_VERSIONS
    if version < low or version > high:
        raise UnsupportedVersionError(
            f"Produce version {version} is not one of ours, which are {low} to {high}"
        )


def _write_count(out: bytearray, count: int, flexible: bool) -> None:
    if flexible:
        write_unsigned_varint(out, count + 1)
    else:
        write_int32(out, count)


def _write_topic(out: bytearray, topic: ProduceTopic, version: int, flexible: bool) -> None:
    if version >= _TOPIC_IDS:
        topic_id = topic.topic_id
        if topic_id is None or len(topic_id) != 16:
            raise ValueError(
                f"topic {topic.name!r} has no id, Produce version {version} cannot name it"
            )
        out += topic_id
    elif flexible:
        write_compact_string(out, topic.name)
    else:
        write_string(out, topic.name)


def _batch_size(topic: ProduceTopic, partition: ProducePartition, version: int) -> int:
    """How many bytes the records are; refuses what is not exactly one whole batch v2."""
    records = partition.records
    size = 0
    for buffer in records:
        size += len(buffer)
    header = records[0] if records else b""
    if len(header) < _HEADER_BYTES:
        raise ValueError(
            f"{topic.name}-{partition.partition}: the first buffer has {len(header)} bytes, "
            f"a batch's header has {_HEADER_BYTES}"
        )
    if header[_MAGIC_AT] != _MAGIC:
        raise ValueError(
            f"{topic.name}-{partition.partition}: a batch of magic {header[_MAGIC_AT]}, "
            f"only magic {_MAGIC} can be sent"
        )
    length: int = _INT32.unpack_from(header, _BATCH_LENGTH_AT)[0]
    if length + _BATCH_LENGTH_COUNTS_FROM != size:
        raise ValueError(
            f"{topic.name}-{partition.partition}: {size} bytes of records are not exactly one "
            f"batch, whose header says {length + _BATCH_LENGTH_COUNTS_FROM}"
        )
    if version < _ZSTD and header[_CODEC_AT] & _CODEC_MASK == _CODEC_ZSTD:
        raise UnsupportedVersionError(
            f"zstd needs Produce version {_ZSTD}, the broker speaks {version}: "
            "choose another compression_type"
        )
    return size


def decode_produce(version: int, body: Buffer) -> ProduceResponse:
    """Reads the body of a response to a request of this version.

    Error codes are plain numbers: one that nobody knows yet is no reason to fail here.
    Raises ProtocolError for anything but one whole, well-formed response.
    """
    _check_version(version)
    flexible = version >= _FLEXIBLE
    reader = Reader(body, _ANSWERS[version], flexible=flexible)
    partitions: list[ProducePartitionResponse] = []
    for _ in range(reader.array_length(_MIN_TOPIC)):
        topic: str | None = None
        topic_id: bytes | None = None
        if version >= _TOPIC_IDS:
            topic_id = reader.uuid()
        else:
            topic = reader.string()
        count = reader.array_length(_MIN_PARTITION)
        partitions += [_read_partition(reader, version, topic, topic_id) for _ in range(count)]
        reader.skip_tagged_fields()
    throttle_ms = reader.int32()
    nodes: tuple[Node, ...] = ()
    if version >= _CURRENT_LEADER:
        for _ in range(reader.tagged_field_count()):
            if reader.unsigned_varint() == _TAG:
                outer = reader.enter()
                nodes = _read_nodes(reader)
                reader.leave(outer)
            else:
                reader.advance(reader.unsigned_varint())
    else:
        reader.skip_tagged_fields()
    reader.finish()
    # What calling the class does, without a call of its Python; likewise below.
    return tuple.__new__(ProduceResponse, (partitions, nodes, throttle_ms))


def _read_partition(
    reader: Reader, version: int, topic: str | None, topic_id: bytes | None
) -> ProducePartitionResponse:
    partition = reader.int32()
    error_code = reader.int16()
    base_offset = reader.int64()
    log_append_time = reader.int64()
    log_start_offset = reader.int64() if version >= _LOG_START_OFFSET else -1
    record_errors: tuple[RecordError, ...] = ()
    error_message: str | None = None
    if version >= _RECORD_ERRORS:
        count = reader.array_length(_MIN_RECORD_ERROR)
        if count:
            record_errors = _read_record_errors(reader, count)
        error_message = reader.nullable_string()
    leader = -1
    leader_epoch = -1
    if version >= _CURRENT_LEADER:
        for _ in range(reader.tagged_field_count()):
            if reader.unsigned_varint() == _TAG:
                outer = reader.enter()
                leader = reader.int32()
                leader_epoch = reader.int32()
                reader.skip_tagged_fields()
                reader.leave(outer)
            else:
                reader.advance(reader.unsigned_varint())
    else:
        reader.skip_tagged_fields()
    return tuple.__new__(
        ProducePartitionResponse,
        (
            topic,
            topic_id,
            partition,
            error_code,
            base_offset,
            log_append_time,
            log_start_offset,
            record_errors,
            error_message,
            leader,
            leader_epoch,
        ),
    )


def _read_record_errors(reader: Reader, count: int) -> tuple[RecordError, ...]:
    errors: list[RecordError] = []
    for _ in range(count):
        batch_index = reader.int32()
        errors.append(RecordError(batch_index, reader.nullable_string()))
        reader.skip_tagged_fields()
    return tuple(errors)


def _read_nodes(reader: Reader) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for _ in range(reader.array_length(_MIN_NODE)):
        node_id = reader.int32()
        host = reader.string()
        port = reader.int32()
        nodes.append(Node(node_id, host, port, reader.nullable_string()))
        reader.skip_tagged_fields()
    return tuple(nodes)
