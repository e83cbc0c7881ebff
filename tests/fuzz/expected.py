"""What our reader must have found in an answer, from what kio has read in the same bytes.

Written from the protocol's field names, not from our reader: that is what it is held against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from asyncproducer.core import wire
from asyncproducer.core.metadata import MetadataResponse, Node, PartitionUpdate, TopicUpdate
from asyncproducer.core.produce import ProducePartitionResponse, ProduceResponse, RecordError
from asyncproducer.core.wire import ApiKey
from asyncproducer.records import OffsetAndMetadata, TopicPartition

__all__ = ["expected"]

_MS = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def expected(key: ApiKey, version: int, theirs: Any) -> Any:
    """The value of ours for kio's `theirs`."""
    return _BY_KEY[key](version, theirs)


def _throttle(theirs: Any) -> int:
    found = getattr(theirs, "throttle_time", None)
    return 0 if found is None else found // _MS


def _id(found: Any) -> bytes | None:
    return None if found is None else bytes(found.bytes)


def _produce(version: int, theirs: Any) -> ProduceResponse:
    partitions = []
    for topic in theirs.responses:
        for p in topic.partition_responses:
            leader = getattr(p, "current_leader", None)
            append_time = p.log_append_time
            partitions.append(
                ProducePartitionResponse(
                    getattr(topic, "name", None),
                    _id(getattr(topic, "topic_id", None)),
                    p.index,
                    p.error_code,
                    p.base_offset,
                    # kio's times are some microseconds off in far years.
                    -1 if append_time is None else round((append_time - _EPOCH) / _MS),
                    getattr(p, "log_start_offset", -1),
                    tuple(
                        RecordError(e.batch_index, e.batch_index_error_message)
                        for e in getattr(p, "record_errors", ())
                    ),
                    getattr(p, "error_message", None),
                    -1 if leader is None else leader.leader_id,
                    -1 if leader is None else leader.leader_epoch,
                )
            )
    return ProduceResponse(
        partitions, _nodes(getattr(theirs, "node_endpoints", ())), _throttle(theirs)
    )


def _nodes(found: Iterable[Any]) -> tuple[Node, ...]:
    return tuple(Node(n.node_id, n.host, n.port, n.rack) for n in found)


def _metadata(version: int, theirs: Any) -> MetadataResponse:
    topics = tuple(
        TopicUpdate(
            t.name,
            _id(getattr(t, "topic_id", None)),
            t.error_code,
            t.is_internal,
            tuple(
                PartitionUpdate(
                    p.partition_index,
                    p.error_code,
                    p.leader_id,
                    getattr(p, "leader_epoch", -1),
                )
                for p in t.partitions
            ),
        )
        for t in theirs.topics
    )
    return MetadataResponse(
        version,
        _throttle(theirs),
        getattr(theirs, "error_code", 0),
        theirs.cluster_id,
        theirs.controller_id,
        _nodes(theirs.brokers),
        topics,
    )


def _api_versions(version: int, theirs: Any) -> wire.ApiVersionsResponse:
    features = getattr(theirs, "finalized_features", ())
    return wire.ApiVersionsResponse(
        theirs.error_code,
        {a.api_key: (a.min_version, a.max_version) for a in theirs.api_keys},
        {f.name: f.max_version_level for f in features},
        getattr(theirs, "finalized_features_epoch", -1),
        _throttle(theirs),
    )


def _find_coordinator(version: int, theirs: Any) -> wire.FindCoordinatorResponse:
    several = theirs.coordinators if version >= 4 else (theirs,)
    found = [
        wire.Coordinator(
            getattr(c, "key", "a key"),
            c.node_id,
            c.host,
            c.port,
            c.error_code,
            getattr(c, "error_message", None),
        )
        for c in several
    ]
    return wire.FindCoordinatorResponse(_throttle(theirs), tuple(found))


def _once(errors: list[tuple[TopicPartition, int]]) -> dict[TopicPartition, int]:
    """Nobody knows the code of a partition that is named twice."""
    times = Counter(place for place, _ in errors)
    return {place: code for place, code in errors if times[place] == 1}


def _add_partitions(version: int, theirs: Any) -> wire.AddPartitionsToTxnResponse:
    errors = [
        (TopicPartition(t.name, p.partition_index), p.partition_error_code)
        for t in theirs.results_by_topic_v3_and_below
        for p in t.results_by_partition
    ]
    return wire.AddPartitionsToTxnResponse(_throttle(theirs), _once(errors))


def _commit_offsets(version: int, theirs: Any) -> wire.TxnOffsetCommitResponse:
    errors = [
        (TopicPartition(t.name, p.partition_index), p.error_code)
        for t in theirs.topics
        for p in t.partitions
    ]
    return wire.TxnOffsetCommitResponse(_throttle(theirs), _once(errors))


def _fetch_offsets(version: int, theirs: Any) -> wire.OffsetFetchResponse:
    groups = theirs.groups if version >= 8 else (theirs,)
    offsets = {
        TopicPartition(t.name, p.partition_index): (
            p.error_code,
            OffsetAndMetadata(p.committed_offset, p.metadata or "", p.committed_leader_epoch),
        )
        for group in groups
        for t in group.topics
        for p in t.partitions
    }
    code = groups[-1].error_code if groups else 0
    return wire.OffsetFetchResponse(_throttle(theirs), code, offsets)


_BY_KEY: dict[ApiKey, Callable[[int, Any], Any]] = {
    ApiKey.PRODUCE: _produce,
    ApiKey.METADATA: _metadata,
    ApiKey.API_VERSIONS: _api_versions,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.ADD_PARTITIONS_TO_TXN: _add_partitions,
    ApiKey.TXN_OFFSET_COMMIT: _commit_offsets,
    ApiKey.OFFSET_FETCH: _fetch_offsets,
    ApiKey.INIT_PRODUCER_ID: lambda _, theirs: wire.InitProducerIdResponse(
        _throttle(theirs), theirs.error_code, theirs.producer_id, theirs.producer_epoch
    ),
    ApiKey.ADD_OFFSETS_TO_TXN: lambda _, theirs: wire.AddOffsetsToTxnResponse(
        _throttle(theirs), theirs.error_code
    ),
    ApiKey.END_TXN: lambda _, theirs: wire.EndTxnResponse(
        _throttle(theirs),
        theirs.error_code,
        getattr(theirs, "producer_id", -1),
        getattr(theirs, "producer_epoch", -1),
    ),
    ApiKey.SASL_HANDSHAKE: lambda _, theirs: wire.SaslHandshakeResponse(
        theirs.error_code, theirs.mechanisms
    ),
    ApiKey.SASL_AUTHENTICATE: lambda version, theirs: wire.SaslAuthenticateResponse(
        theirs.error_code,
        theirs.error_message,
        theirs.auth_bytes,
        theirs.session_lifetime // _MS if version >= 1 else 0,
    ),
}
