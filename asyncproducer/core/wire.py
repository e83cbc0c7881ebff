"""Requests and responses: from bytes to the values of `core`, and back. The importer of kio.

Three things speak the protocol here:

- kio writes the small requests (metadata, handshakes, producer ids). Its modules are
  imported when the first request of a version is written, since they take some 50 ms.
- `primitives.Reader` reads every response. kio's reader is for peers that it trusts: it
  ends the process when a count is larger than memory, refuses error codes newer than
  itself, and tagged fields that it does not know, which the protocol wants skipped
  (KIP-482). A newer broker must not stop a producer, nor a hostile one its process.
- `produce` writes and reads Produce, which carries the records.

Each response that is not exactly one well-formed message is a ProtocolError, with
trailing bytes and truncation alike. Error codes are numbers, known or not.
"""

from __future__ import annotations

import importlib
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cache
from io import BytesIO
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from asyncproducer.core.metadata import MetadataResponse, Node, PartitionUpdate, TopicUpdate
from asyncproducer.core.primitives import Buffer, Reader, int32_at, write_string
from asyncproducer.core.produce import (
    PRODUCE_VERSIONS,
    ProducePartition,
    ProducePartitionResponse,
    ProduceResponse,
    ProduceTopic,
    RecordError,
    decode_produce,
    encode_produce,
)
from asyncproducer.errors import ConfigError, ErrorCode, ProtocolError, UnsupportedVersionError
from asyncproducer.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

__all__ = [
    "SUPPORTED",
    "AddOffsetsToTxnRequest",
    "AddOffsetsToTxnResponse",
    "AddPartitionsToTxnRequest",
    "AddPartitionsToTxnResponse",
    "ApiKey",
    "ApiVersionsRequest",
    "ApiVersionsResponse",
    "Buffer",
    "Coordinator",
    "EndTxnRequest",
    "EndTxnResponse",
    "FindCoordinatorRequest",
    "FindCoordinatorResponse",
    "InitProducerIdRequest",
    "InitProducerIdResponse",
    "MetadataRequest",
    "OffsetFetchRequest",
    "OffsetFetchResponse",
    "ProducePartition",
    "ProducePartitionResponse",
    "ProduceResponse",
    "ProduceTopic",
    "RecordError",
    "Request",
    "SaslAuthenticateRequest",
    "SaslAuthenticateResponse",
    "SaslHandshakeRequest",
    "SaslHandshakeResponse",
    "TxnOffsetCommitRequest",
    "TxnOffsetCommitResponse",
    "choose_version",
    "decode_produce",
    "encode_frame",
    "encode_produce",
    "request_header_version",
    "response_header_version",
    "split_frame",
    "throttles_client",
]

R = TypeVar("R")


# -- which requests, which versions --------------------------------------------------------


class ApiKey(IntEnum):
    """The requests that a producer, and its tests, may meet."""

    #: It is looked up with every request, and Enum's own takes ten times as long.
    __hash__ = int.__hash__

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    SASL_AUTHENTICATE = 36


#: The versions that we speak, first and last.
SUPPORTED: dict[ApiKey, tuple[int, int]] = {
    ApiKey.PRODUCE: PRODUCE_VERSIONS,
    # Version 4 came with Kafka 0.11, as Produce 3 did: allow_auto_topic_creation.
    ApiKey.METADATA: (4, 13),
    # 7 brought require_stable (KIP-447), 10 has topic ids for names.
    ApiKey.OFFSET_FETCH: (7, 9),
    ApiKey.FIND_COORDINATOR: (0, 6),
    ApiKey.SASL_HANDSHAKE: (0, 1),
    ApiKey.API_VERSIONS: (0, 4),
    # 6 is for two-phase commit (KIP-939), and not stable yet.
    ApiKey.INIT_PRODUCER_ID: (0, 5),
    # From 4 on it is for brokers among themselves (KIP-890).
    ApiKey.ADD_PARTITIONS_TO_TXN: (0, 3),
    ApiKey.ADD_OFFSETS_TO_TXN: (0, 4),
    ApiKey.END_TXN: (0, 5),
    ApiKey.TXN_OFFSET_COMMIT: (0, 5),
    ApiKey.SASL_AUTHENTICATE: (0, 2),
}

_API_VERSIONS = int(ApiKey.API_VERSIONS)

#: No version of this request is flexible.
_NEVER = 32767

#: The first flexible version (KIP-482) of each request.
_FLEXIBLE_SINCE: dict[int, int] = {
    ApiKey.PRODUCE: 9,
    ApiKey.FETCH: 12,
    ApiKey.LIST_OFFSETS: 6,
    ApiKey.METADATA: 9,
    ApiKey.OFFSET_FETCH: 6,
    ApiKey.FIND_COORDINATOR: 3,
    ApiKey.SASL_HANDSHAKE: _NEVER,
    ApiKey.API_VERSIONS: 3,
    ApiKey.INIT_PRODUCER_ID: 2,
    ApiKey.ADD_PARTITIONS_TO_TXN: 3,
    ApiKey.ADD_OFFSETS_TO_TXN: 3,
    ApiKey.END_TXN: 3,
    ApiKey.TXN_OFFSET_COMMIT: 3,
    ApiKey.SASL_AUTHENTICATE: 2,
}

#: From this version on a broker answers first, and expects the client to wait (KIP-219).
_THROTTLES_CLIENT_SINCE: dict[int, int] = {
    ApiKey.PRODUCE: 6,
    ApiKey.METADATA: 6,
    ApiKey.OFFSET_FETCH: 4,
    ApiKey.API_VERSIONS: 2,
    ApiKey.FIND_COORDINATOR: 2,
    ApiKey.INIT_PRODUCER_ID: 1,
    ApiKey.ADD_PARTITIONS_TO_TXN: 1,
    ApiKey.ADD_OFFSETS_TO_TXN: 1,
    ApiKey.END_TXN: 1,
    ApiKey.TXN_OFFSET_COMMIT: 1,
}


def _api_name(api_key: int) -> str:
    try:
        name = ApiKey(api_key).name
    except ValueError:
        return f"the request with key {int(api_key)}"
    return "".join([word.title() for word in name.split("_")])


def choose_version(
    api_key: ApiKey, broker: Mapping[int, tuple[int, int]], *, cap: int | None = None
) -> int:
    """The newest version that both sides speak, `cap` at most.

    `broker` is what the broker's ApiVersions response lists. Raises
    UnsupportedVersionError, which names both ranges, when there is none.
    """
    ours = SUPPORTED.get(api_key)
    if ours is None:
        raise UnsupportedVersionError(f"{_api_name(api_key)}: we do not speak it")
    low, high = ours
    if cap is not None and cap < high:
        high = cap
    theirs = broker.get(api_key)
    if theirs is None:
        raise UnsupportedVersionError(
            f"{_api_name(api_key)}: the broker does not speak it, we speak {low} to {high}"
        )
    version = min(high, theirs[1])
    if version < low or version < theirs[0]:
        raise UnsupportedVersionError(
            f"{_api_name(api_key)}: the broker speaks {theirs[0]} to {theirs[1]}, "
            f"we speak {low} to {high}"
        )
    return version


def _is_flexible(api_key: int, version: int) -> bool:
    since = _FLEXIBLE_SINCE.get(api_key)
    if since is None:
        raise UnsupportedVersionError(f"{_api_name(api_key)}: we do not know its headers")
    return version >= since


def request_header_version(api_key: int, version: int) -> int:
    """1, or 2 with tagged fields for a flexible request."""
    return 2 if _is_flexible(api_key, version) else 1


def response_header_version(api_key: int, version: int) -> int:
    """0, or 1 with tagged fields for a flexible request.

    ApiVersions keeps 0 for good: whoever reads it does not know yet which version the
    broker chose (KIP-511).
    """
    if api_key == _API_VERSIONS:
        return 0
    return 1 if _is_flexible(api_key, version) else 0


def throttles_client(api_key: int, version: int) -> bool:
    """Whether a throttle time in the response is for the client to wait (KIP-219).

    Before these versions the broker has waited already.
    """
    since = _THROTTLES_CLIENT_SINCE.get(api_key)
    return since is not None and version >= since


# -- frames --------------------------------------------------------------------------------

_FRAME = struct.Struct(">ihhi")  # size, api key, version, correlation id
_CORRELATION_ID_BYTES = 4


def encode_frame(
    request: Request[Any], version: int, correlation_id: int, client_id: str | None
) -> bytes:
    """The request as it goes to the socket: size, header, body.

    Raises ConfigError for text that does not fit in the protocol's strings.
    """
    body = request.encode(version)
    api_key = request.api_key
    header = bytearray(_FRAME.size)
    # A string of the old kind in either header: a broker must be able to read it
    # whatever the version is (KIP-511).
    write_string(header, client_id)
    if request_header_version(api_key, version) == 2:
        header.append(0)
    size = len(header) - 4 + len(body)
    _FRAME.pack_into(header, 0, size, api_key, version, correlation_id)
    return bytes(header) + body


def split_frame(api_key: int, version: int, frame: Buffer) -> tuple[int, bytes]:
    """Correlation id and body of a response frame, which comes without its size.

    `api_key` and `version` are those of the request that the frame should answer.
    Raises ProtocolError.
    """
    # Answers are short, and what reads them wants bytes.
    data = frame if isinstance(frame, bytes) else bytes(frame)
    size = len(data)
    if size < _CORRELATION_ID_BYTES:
        Reader(data, "response header").int32()  # raises
    correlation_id = int32_at(data, 0)
    body = _CORRELATION_ID_BYTES
    if response_header_version(api_key, version) > 0:
        if size > body and data[body] == 0:
            body += 1
        else:
            tags = Reader(data[body:], "response header", flexible=True)
            tags.skip_tagged_fields()
            body += tags.position
    return correlation_id, data[body:]


# -- the requests --------------------------------------------------------------------------


class Request(ABC, Generic[R]):
    """One request, whatever its version. `R` is what its response becomes."""

    __slots__ = ()

    api_key: ClassVar[ApiKey]

    @property
    def cap(self) -> int | None:
        """The newest version that this request may be sent in, or None: the newest of all."""
        return None

    def encode(self, version: int) -> bytes:
        """The body in this version.

        Raises UnsupportedVersionError for a version that we do not speak, or that
        cannot say what is asked; ConfigError for values that do not fit.
        """
        low, high = SUPPORTED[self.api_key]
        if not low <= version <= high:
            raise UnsupportedVersionError(
                f"{_api_name(self.api_key)}: version {version} is not one of ours, "
                f"which are {low} to {high}"
            )
        from kio.serial import entity_writer
        from kio.serial.errors import SerialError

        schema = _request_schema(self.api_key, version)
        out = BytesIO()
        try:
            entity = self._entity(version, schema)
            write = entity_writer(type(entity))
            write(out, entity)
        except (SerialError, struct.error, UnicodeEncodeError, OverflowError) as error:
            raise ConfigError(f"{_api_name(self.api_key)}: {error}") from error
        return out.getvalue()

    def decode(self, version: int, body: Buffer) -> R:
        """Reads the body of the response to this request in this version.

        Raises ProtocolError for anything but one whole, well-formed response.
        """
        reader = Reader(
            body,
            f"{_api_name(self.api_key)} v{version} response",
            flexible=_is_flexible(self.api_key, version),
        )
        value = self._read(version, reader)
        reader.finish()
        return value

    @abstractmethod
    def _entity(self, version: int, schema: Any) -> Any:
        """kio's request, from kio's module for this version."""

    @abstractmethod
    def _read(self, version: int, reader: Reader) -> R:
        """The response's value."""


@cache
def _request_schema(api_key: ApiKey, version: int) -> Any:
    return importlib.import_module(f"kio.schema.{api_key.name.lower()}.v{version}.request")


# -- ApiVersions ---------------------------------------------------------------------------


class ApiVersionsResponse(NamedTuple):
    """What a broker speaks, by api key, and the cluster's finalized features.

    `finalized_features` gives each feature's highest level; its epoch is -1 when unknown.
    """

    error_code: int
    versions: dict[int, tuple[int, int]]
    finalized_features: dict[str, int]
    finalized_features_epoch: int
    throttle_ms: int


#: What brokers accept as a client's name and version (KIP-511); else INVALID_REQUEST.
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")

_SOFTWARE_NAME = "asyncproducer"


@cache
def _software_version() -> str:
    from importlib import metadata

    try:
        version = metadata.version(_SOFTWARE_NAME)
    except metadata.PackageNotFoundError:
        version = ""
    return _software_word(version)


def _software_word(text: str) -> str:
    """The nearest thing that brokers accept: `1.0+dirty` becomes `1.0-dirty`."""
    return re.sub(r"[^a-zA-Z0-9\-.]", "-", text).strip("-.") or "unknown"


class ApiVersionsRequest(Request[ApiVersionsResponse]):
    """Asks which requests the broker speaks.

    From version 3 on it tells the broker what we are; the version is this package's
    where none is given. Raises ConfigError for words that brokers do not accept.
    """

    __slots__ = ("software_name", "software_version")

    api_key = ApiKey.API_VERSIONS

    def __init__(
        self, software_name: str = _SOFTWARE_NAME, software_version: str | None = None
    ) -> None:
        for word in (software_name, software_version):
            if word is not None and _SOFTWARE.fullmatch(word) is None:
                raise ConfigError(
                    f"{word!r}: brokers accept letters, digits, dots and dashes as a client's "
                    "name and version, and want a letter or digit at both ends"
                )
        self.software_name = software_name
        self.software_version = software_version

    def _entity(self, version: int, schema: Any) -> Any:
        if version < 3:
            return schema.ApiVersionsRequest()
        return schema.ApiVersionsRequest(
            client_software_name=self.software_name,
            client_software_version=self.software_version or _software_version(),
        )

    def decode(self, version: int, body: Buffer) -> ApiVersionsResponse:
        """Reads the response, also where the broker answers in version 0.

        A broker that does not speak the version asked for answers UNSUPPORTED_VERSION
        in version 0, that every client can read. Some peers keep to the version asked
        for. A body is never both: the high byte of the old count would be the new one.
        """
        if version > 0 and len(body) >= 2 and _error_code(body) == ErrorCode.UNSUPPORTED_VERSION:
            try:
                return super().decode(0, body)
            except ProtocolError:
                pass
        return super().decode(version, body)

    def _read(self, version: int, reader: Reader) -> ApiVersionsResponse:
        error_code = reader.int16()
        versions: dict[int, tuple[int, int]] = {}
        for _ in range(reader.array_length(6)):
            api_key = reader.int16()
            low = reader.int16()
            versions[api_key] = (low, reader.int16())
            reader.skip_tagged_fields()
        throttle_ms = reader.int32() if version >= 1 else 0
        features: dict[str, int] = {}
        epoch = -1
        if version >= 3:
            for _ in range(reader.tagged_field_count()):
                tag = reader.unsigned_varint()
                outer = reader.enter()
                if tag == 1:
                    epoch = reader.int64()
                elif tag == 2:
                    features = _read_finalized_features(reader)
                else:
                    reader.advance(reader.end - reader.position)
                reader.leave(outer)
        return ApiVersionsResponse(error_code, versions, features, epoch, throttle_ms)


def _error_code(body: Buffer) -> int:
    return int.from_bytes(body[:2], "big", signed=True)


def _read_finalized_features(reader: Reader) -> dict[str, int]:
    features: dict[str, int] = {}
    for _ in range(reader.array_length(6)):
        name = reader.string()
        features[name] = reader.int16()
        reader.int16()  # the lowest level: nobody asks
        reader.skip_tagged_fields()
    return features


# -- Metadata ------------------------------------------------------------------------------


class MetadataRequest(Request[MetadataResponse]):
    """Asks for the brokers, and for these topics: none of them where `topics` is empty."""

    __slots__ = ("allow_auto_topic_creation", "topics")

    api_key = ApiKey.METADATA

    def __init__(self, topics: Sequence[str], *, allow_auto_topic_creation: bool = True) -> None:
        self.topics = tuple(topics)
        self.allow_auto_topic_creation = allow_auto_topic_creation

    def _entity(self, version: int, schema: Any) -> Any:
        topic = schema.MetadataRequestTopic
        if version >= 10:
            topics = [topic(name=name, topic_id=None) for name in self.topics]
        else:
            topics = [topic(name=name) for name in self.topics]
        fields: dict[str, object] = {}
        if 8 <= version <= 10:
            fields["include_cluster_authorized_operations"] = False
        if version >= 8:
            fields["include_topic_authorized_operations"] = False
        return schema.MetadataRequest(
            topics=tuple(topics),
            allow_auto_topic_creation=self.allow_auto_topic_creation,
            **fields,
        )

    def _read(self, version: int, reader: Reader) -> MetadataResponse:
        throttle_ms = reader.int32()
        nodes: list[Node] = []
        for _ in range(reader.array_length(11)):
            node_id = reader.int32()
            host = reader.string()
            port = reader.int32()
            nodes.append(Node(node_id, host, port, reader.nullable_string()))
            reader.skip_tagged_fields()
        cluster_id = reader.nullable_string()
        controller_id = reader.int32()
        count = reader.array_length(6)
        topics = tuple([_read_topic(version, reader) for _ in range(count)])
        if 8 <= version <= 10:
            reader.int32()  # cluster_authorized_operations
        error_code = reader.int16() if version >= 13 else 0
        reader.skip_tagged_fields()
        return MetadataResponse(
            version,
            throttle_ms,
            error_code,
            cluster_id,
            controller_id,
            tuple(nodes),
            topics,
        )


def _read_topic(version: int, reader: Reader) -> TopicUpdate:
    error_code = reader.int16()
    # Null for a topic that was asked for by its id and does not exist (KIP-516).
    name = reader.nullable_string() if version >= 12 else reader.string()
    topic_id = reader.uuid() if version >= 10 else None
    internal = reader.boolean()
    partitions: list[PartitionUpdate] = []
    for _ in range(reader.array_length(18)):
        partition_error = reader.int16()
        partition = reader.int32()
        leader = reader.int32()
        leader_epoch = reader.int32() if version >= 7 else -1
        reader.skip_int32_array()  # replicas
        reader.skip_int32_array()  # in-sync replicas
        if version >= 5:
            reader.skip_int32_array()  # offline replicas
        reader.skip_tagged_fields()
        partitions.append(PartitionUpdate(partition, partition_error, leader, leader_epoch))
    if version >= 8:
        reader.int32()  # topic_authorized_operations
    reader.skip_tagged_fields()
    return TopicUpdate(name, topic_id, error_code, internal, tuple(partitions))


# -- InitProducerId ------------------------------------------------------------------------


class InitProducerIdResponse(NamedTuple):
    """A producer id and its epoch, both -1 with an error."""

    throttle_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int


class InitProducerIdRequest(Request[InitProducerIdResponse]):
    """Asks for a producer id, or for the next epoch of the one given (KIP-360, version 3)."""

    __slots__ = ("producer_epoch", "producer_id", "transaction_timeout_ms", "transactional_id")

    api_key = ApiKey.INIT_PRODUCER_ID

    def __init__(
        self,
        transactional_id: str | None,
        transaction_timeout_ms: int,
        producer_id: int = -1,
        producer_epoch: int = -1,
    ) -> None:
        self.transactional_id = transactional_id
        self.transaction_timeout_ms = transaction_timeout_ms
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch

    def _entity(self, version: int, schema: Any) -> Any:
        fields: dict[str, object] = {}
        if version >= 3:
            fields["producer_id"] = self.producer_id
            fields["producer_epoch"] = self.producer_epoch
        return schema.InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout=timedelta(milliseconds=self.transaction_timeout_ms),
            **fields,
        )

    def _read(self, version: int, reader: Reader) -> InitProducerIdResponse:
        throttle_ms = reader.int32()
        error_code = reader.int16()
        producer_id = reader.int64()
        producer_epoch = reader.int16()
        reader.skip_tagged_fields()
        return InitProducerIdResponse(throttle_ms, error_code, producer_id, producer_epoch)


# -- FindCoordinator -----------------------------------------------------------------------


class Coordinator(NamedTuple):
    """Who coordinates one group or one transactional id."""

    key: str
    node_id: int
    host: str
    port: int
    error_code: int
    error_message: str | None


class FindCoordinatorResponse(NamedTuple):
    """One coordinator for each key that was asked for."""

    throttle_ms: int
    coordinators: tuple[Coordinator, ...]


class FindCoordinatorRequest(Request[FindCoordinatorResponse]):
    """Asks who coordinates these keys: groups (`GROUP`) or transactional ids (`TRANSACTION`).

    Before version 4 there is one key to a request, and before version 1 only groups.
    """

    __slots__ = ("key_type", "keys")

    api_key = ApiKey.FIND_COORDINATOR

    GROUP: ClassVar[int] = 0
    TRANSACTION: ClassVar[int] = 1

    def __init__(self, key_type: int, keys: Sequence[str]) -> None:
        self.key_type = key_type
        self.keys = tuple(keys)

    def _entity(self, version: int, schema: Any) -> Any:
        if version >= 4:
            return schema.FindCoordinatorRequest(key_type=self.key_type, coordinator_keys=self.keys)
        if len(self.keys) != 1:
            raise UnsupportedVersionError(
                f"FindCoordinator: version {version} asks for one key, not for {len(self.keys)}"
            )
        if version >= 1:
            return schema.FindCoordinatorRequest(key=self.keys[0], key_type=self.key_type)
        if self.key_type != self.GROUP:
            raise UnsupportedVersionError("FindCoordinator: version 0 knows only groups")
        return schema.FindCoordinatorRequest(key=self.keys[0])

    def _read(self, version: int, reader: Reader) -> FindCoordinatorResponse:
        throttle_ms = reader.int32() if version >= 1 else 0
        if version < 4:
            error_code = reader.int16()
            error_message = reader.nullable_string() if version >= 1 else None
            node_id = reader.int32()
            host = reader.string()
            port = reader.int32()
            found = Coordinator(self.keys[0], node_id, host, port, error_code, error_message)
            reader.skip_tagged_fields()
            return FindCoordinatorResponse(throttle_ms, (found,))
        coordinators: list[Coordinator] = []
        for _ in range(reader.array_length(14)):
            key = reader.string()
            node_id = reader.int32()
            host = reader.string()
            port = reader.int32()
            error_code = reader.int16()
            error_message = reader.nullable_string()
            coordinators.append(Coordinator(key, node_id, host, port, error_code, error_message))
            reader.skip_tagged_fields()
        reader.skip_tagged_fields()
        return FindCoordinatorResponse(throttle_ms, tuple(coordinators))


# -- transactions --------------------------------------------------------------------------


def _by_topic(places: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in places:
        topics.setdefault(topic, []).append(partition)
    return topics


def _read_errors(reader: Reader) -> dict[TopicPartition, int]:
    """An error code for each partition of each topic. Named twice, a partition has none: one of
    its two answers is another's, and nothing tells which."""
    errors: dict[TopicPartition, int] = {}
    twice: set[TopicPartition] = set()
    for _ in range(reader.array_length(3)):
        topic = reader.string()
        for _ in range(reader.array_length(6)):
            place = TopicPartition(topic, reader.int32())
            if place in errors:
                twice.add(place)
            errors[place] = reader.int16()
            reader.skip_tagged_fields()
        reader.skip_tagged_fields()
    for place in twice:
        del errors[place]
    return errors


class AddPartitionsToTxnResponse(NamedTuple):
    """An error code for each partition that was to be added."""

    throttle_ms: int
    errors: dict[TopicPartition, int]


class AddPartitionsToTxnRequest(Request[AddPartitionsToTxnResponse]):
    """Adds partitions to the transaction, before anything is produced to them (before KIP-890)."""

    __slots__ = ("partitions", "producer_epoch", "producer_id", "transactional_id")

    api_key = ApiKey.ADD_PARTITIONS_TO_TXN

    def __init__(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Iterable[TopicPartition],
    ) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.partitions = tuple(partitions)

    def _entity(self, version: int, schema: Any) -> Any:
        # Named for what it became in version 4, which is for brokers.
        return schema.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.producer_epoch,
            v3_and_below_topics=tuple(
                schema.AddPartitionsToTxnTopic(name=name, partitions=tuple(numbers))
                for name, numbers in _by_topic(self.partitions).items()
            ),
        )

    def _read(self, version: int, reader: Reader) -> AddPartitionsToTxnResponse:
        throttle_ms = reader.int32()
        errors = _read_errors(reader)
        reader.skip_tagged_fields()
        return AddPartitionsToTxnResponse(throttle_ms, errors)


class AddOffsetsToTxnResponse(NamedTuple):
    """Whether the offsets of the group belong to the transaction now."""

    throttle_ms: int
    error_code: int


class AddOffsetsToTxnRequest(Request[AddOffsetsToTxnResponse]):
    """Adds a consumer group's offsets to the transaction (before KIP-890)."""

    __slots__ = ("group_id", "producer_epoch", "producer_id", "transactional_id")

    api_key = ApiKey.ADD_OFFSETS_TO_TXN

    def __init__(
        self, transactional_id: str, producer_id: int, producer_epoch: int, group_id: str
    ) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.group_id = group_id

    def _entity(self, version: int, schema: Any) -> Any:
        return schema.AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            group_id=self.group_id,
        )

    def _read(self, version: int, reader: Reader) -> AddOffsetsToTxnResponse:
        throttle_ms = reader.int32()
        error_code = reader.int16()
        reader.skip_tagged_fields()
        return AddOffsetsToTxnResponse(throttle_ms, error_code)


class TxnOffsetCommitResponse(NamedTuple):
    """An error code for each partition whose offset was to be committed."""

    throttle_ms: int
    errors: dict[TopicPartition, int]


class TxnOffsetCommitRequest(Request[TxnOffsetCommitResponse]):
    """Commits a consumer group's offsets with the transaction.

    The version tells the broker which protocol the transaction follows: from 5 on it adds the
    group to the transaction by itself (KIP-890).
    """

    __slots__ = (
        "group",
        "offsets",
        "producer_epoch",
        "producer_id",
        "transactional_id",
        "version_two",
    )

    api_key = ApiKey.TXN_OFFSET_COMMIT

    def __init__(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        group: ConsumerGroupMetadata,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        *,
        version_two: bool,
    ) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.group = group
        self.offsets = dict(offsets)
        self.version_two = version_two

    @property
    def cap(self) -> int | None:
        """Not the newest one in a transaction of the first version."""
        return None if self.version_two else 4

    def _entity(self, version: int, schema: Any) -> Any:
        topics = []
        for name, numbers in _by_topic(self.offsets).items():
            partitions = []
            for number in numbers:
                offset = self.offsets[TopicPartition(name, number)]
                fields: dict[str, object] = {}
                if version >= 2:
                    fields["committed_leader_epoch"] = offset.leader_epoch
                partitions.append(
                    schema.TxnOffsetCommitRequestPartition(
                        partition_index=number,
                        committed_offset=offset.offset,
                        committed_metadata=offset.metadata,
                        **fields,
                    )
                )
            topics.append(
                schema.TxnOffsetCommitRequestTopic(name=name, partitions=tuple(partitions))
            )
        member: dict[str, object] = {}
        if version >= 3:
            member["generation_id"] = self.group.generation_id
            member["member_id"] = self.group.member_id
            member["group_instance_id"] = self.group.group_instance_id
        elif self.group != ConsumerGroupMetadata(self.group.group_id):
            # Java: no silent step back to offsets that a consumer left behind can commit, too.
            raise UnsupportedVersionError(
                f"TxnOffsetCommit: version {version} cannot carry the consumer's membership of its "
                "group (KIP-447): give the group id alone, or use a broker from 2.5 on"
            )
        return schema.TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=self.group.group_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            topics=tuple(topics),
            **member,
        )

    def _read(self, version: int, reader: Reader) -> TxnOffsetCommitResponse:
        throttle_ms = reader.int32()
        errors = _read_errors(reader)
        reader.skip_tagged_fields()
        return TxnOffsetCommitResponse(throttle_ms, errors)


class EndTxnResponse(NamedTuple):
    """From version 5 on, the producer id and epoch for the next transaction; else -1."""

    throttle_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int


class EndTxnRequest(Request[EndTxnResponse]):
    """Commits or aborts the transaction. Version 5 also bumps the epoch (KIP-890)."""

    __slots__ = ("commit", "producer_epoch", "producer_id", "transactional_id", "version_two")

    api_key = ApiKey.END_TXN

    def __init__(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        version_two: bool,
    ) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.commit = commit
        self.version_two = version_two

    @property
    def cap(self) -> int | None:
        """Not the newest one in a transaction of the first version."""
        return None if self.version_two else 4

    def _entity(self, version: int, schema: Any) -> Any:
        return schema.EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            committed=self.commit,
        )

    def _read(self, version: int, reader: Reader) -> EndTxnResponse:
        throttle_ms = reader.int32()
        error_code = reader.int16()
        producer_id = reader.int64() if version >= 5 else -1
        producer_epoch = reader.int16() if version >= 5 else -1
        reader.skip_tagged_fields()
        return EndTxnResponse(throttle_ms, error_code, producer_id, producer_epoch)


class OffsetFetchResponse(NamedTuple):
    """What a group has committed: an error code and an offset (-1 for none) for each partition."""

    throttle_ms: int
    error_code: int
    offsets: dict[TopicPartition, tuple[int, OffsetAndMetadata]]


class OffsetFetchRequest(Request[OffsetFetchResponse]):
    """Asks for the committed offsets of a group, not for those that an open transaction may
    still change."""

    __slots__ = ("group_id", "partitions")

    api_key = ApiKey.OFFSET_FETCH

    def __init__(self, group_id: str, partitions: Iterable[TopicPartition]) -> None:
        self.group_id = group_id
        self.partitions = tuple(partitions)

    def _entity(self, version: int, schema: Any) -> Any:
        names = _by_topic(self.partitions).items()
        if version < 8:
            topics = tuple(
                schema.OffsetFetchRequestTopic(name=name, partition_indexes=tuple(numbers))
                for name, numbers in names
            )
            return schema.OffsetFetchRequest(
                group_id=self.group_id, topics=topics, require_stable=True
            )
        topics = tuple(
            schema.OffsetFetchRequestTopics(name=name, partition_indexes=tuple(numbers))
            for name, numbers in names
        )
        group = schema.OffsetFetchRequestGroup(group_id=self.group_id, topics=topics)
        return schema.OffsetFetchRequest(groups=(group,), require_stable=True)

    def _read(self, version: int, reader: Reader) -> OffsetFetchResponse:
        throttle_ms = reader.int32()
        offsets: dict[TopicPartition, tuple[int, OffsetAndMetadata]] = {}
        groups = 1 if version < 8 else reader.array_length(5)
        error_code = 0
        for _ in range(groups):
            if version >= 8:
                reader.string()
            for _ in range(reader.array_length(3)):
                topic = reader.string()
                for _ in range(reader.array_length(20)):
                    place = TopicPartition(topic, reader.int32())
                    offset, epoch = reader.int64(), reader.int32()
                    metadata = reader.nullable_string() or ""
                    found = OffsetAndMetadata(offset, metadata, epoch)
                    offsets[place] = (reader.int16(), found)
                    reader.skip_tagged_fields()
                reader.skip_tagged_fields()
            error_code = reader.int16()
            if version >= 8:
                reader.skip_tagged_fields()
        reader.skip_tagged_fields()
        return OffsetFetchResponse(throttle_ms, error_code, offsets)


# -- SASL ----------------------------------------------------------------------------------


class SaslHandshakeResponse(NamedTuple):
    """Whether the mechanism is accepted, and which ones the broker has."""

    error_code: int
    mechanisms: tuple[str, ...]


class SaslHandshakeRequest(Request[SaslHandshakeResponse]):
    """Chooses the SASL mechanism. After version 1 the tokens travel in SaslAuthenticate."""

    __slots__ = ("mechanism",)

    api_key = ApiKey.SASL_HANDSHAKE

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism

    def _entity(self, version: int, schema: Any) -> Any:
        return schema.SaslHandshakeRequest(mechanism=self.mechanism)

    def _read(self, version: int, reader: Reader) -> SaslHandshakeResponse:
        error_code = reader.int16()
        count = reader.array_length(2)
        return SaslHandshakeResponse(error_code, tuple([reader.string() for _ in range(count)]))


class SaslAuthenticateResponse(NamedTuple):
    """The server's token. A session of 0 ms never ends (KIP-368, from version 1 on)."""

    error_code: int
    error_message: str | None
    auth_bytes: bytes
    session_lifetime_ms: int


class SaslAuthenticateRequest(Request[SaslAuthenticateResponse]):
    """Carries one token of the mechanism. It may hold a password: there is no repr."""

    __slots__ = ("auth_bytes",)

    api_key = ApiKey.SASL_AUTHENTICATE

    def __init__(self, auth_bytes: bytes) -> None:
        self.auth_bytes = auth_bytes

    def _entity(self, version: int, schema: Any) -> Any:
        return schema.SaslAuthenticateRequest(auth_bytes=self.auth_bytes)

    def _read(self, version: int, reader: Reader) -> SaslAuthenticateResponse:
        error_code = reader.int16()
        error_message = reader.nullable_string()
        auth_bytes = reader.byte_string()
        session_lifetime_ms = reader.int64() if version >= 1 else 0
        reader.skip_tagged_fields()
        return SaslAuthenticateResponse(error_code, error_message, auth_bytes, session_lifetime_ms)
