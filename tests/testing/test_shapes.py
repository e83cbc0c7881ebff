from __future__ import annotations

import io
import uuid

import pytest
from kio.index import load_request_schema
from kio.serial import entity_writer

from asyncproducer.core.primitives import Reader
from asyncproducer.errors import ProtocolError
from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.messages import (
    MalformedRequest,
    build,
    decode_body,
    decode_response,
    request_class,
    response_class,
)
from asyncproducer.testing.raw_client import encode_request
from asyncproducer.testing.shapes import check, check_header

METADATA, API_VERSIONS, FETCH = 3, 18, 1
ALL = [(api.key, v) for api in APIS.values() for v in range(api.min_version, api.max_version + 1)]

#: Announces 2**32 - 2 elements. kio makes room for them, and ends the process where it cannot.
COMPACT_COUNT = b"\xff\xff\xff\xff\x0f"
COUNT = b"\x7f\xff\xff\xff"


@pytest.mark.parametrize(("key", "version"), ALL)
def test_every_message_that_a_broker_reads_or_writes_has_its_shape(key: int, version: int) -> None:
    for message_class in (request_class(key, version), response_class(key, version)):
        empty = Reader(b"", "nothing", flexible=message_class.__flexible__)
        if message_class.__name__ == "ApiVersionsRequest" and version < 3:
            check(message_class, empty)  # says nothing but its header
            continue
        with pytest.raises(ProtocolError, match="nothing"):
            check(message_class, empty)


def header(version: int, *, flexible: bool) -> bytes:
    client_id = b"\xff\xff"
    tags = b"\0" if flexible else b""
    return METADATA.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + client_id + tags


@pytest.mark.parametrize(
    "frame",
    [
        header(8, flexible=False) + COUNT,
        header(12, flexible=True) + COMPACT_COUNT,
        header(12, flexible=True)[:-1] + COMPACT_COUNT,  # tagged fields of the header
        header(12, flexible=True) + b"\x01\x01\x00" + COMPACT_COUNT,  # ... and of the message
    ],
)
def test_a_count_that_the_bytes_do_not_bear_out_is_refused(frame: bytes) -> None:
    version = int.from_bytes(frame[2:4], "big")
    with pytest.raises(MalformedRequest, match=r"which .* cannot hold"):
        decode_body(METADATA, version, frame)


@pytest.mark.parametrize("length", [-2, 5, 32767])
def test_a_length_that_the_bytes_do_not_bear_out_is_refused(length: int) -> None:
    name = length.to_bytes(2, "big", signed=True) + b"abcd"
    frame = header(8, flexible=False) + b"\0\0\0\1" + name
    with pytest.raises(MalformedRequest, match="bytes expected"):
        decode_body(METADATA, 8, frame)


def test_null_is_refused_where_the_protocol_has_none() -> None:
    """DeleteTopics v5: the array, and a name in it. Only the list of Metadata may be null."""
    request = request_class(20, 5)
    for body in (b"\0", b"\2\0"):
        with pytest.raises(ProtocolError, match="null"):
            check(request, Reader(body + bytes(5), "DeleteTopics", flexible=True))
    check(request_class(METADATA, 12), Reader(bytes(4), "Metadata", flexible=True))
    with pytest.raises(ProtocolError, match="negative count"):
        check(request_class(METADATA, 8), Reader(b"\xff\xff\xff\xfe" + bytes(9), "Metadata"))


def test_an_answer_is_looked_at_as_well() -> None:
    with pytest.raises(ProtocolError, match="cannot hold"):
        decode_response(API_VERSIONS, 4, bytes(4) + b"\0\0" + COMPACT_COUNT)


def test_tagged_fields_are_looked_into_where_they_are_known() -> None:
    """Fetch has tags of a string, of a structure, and, within a partition, of a uuid."""
    fetch = load_request_schema(FETCH, 17)
    fields = {
        "cluster_id": "somewhere",
        "replica_state": {"replica_id": 3, "replica_epoch": 9},
        "max_wait": 5,
        "min_bytes": 1,
        "topics": [
            {
                "topic_id": None,
                "partitions": [
                    {
                        "partition": 0,
                        "fetch_offset": 1,
                        "partition_max_bytes": 9,
                        "replica_directory_id": uuid.UUID(int=5),
                    }
                ],
            }
        ],
        "forgotten_topics_data": [],
    }
    out = io.BytesIO()
    entity_writer(fetch)(out, build(fetch, fields))
    whole = out.getvalue()
    reader = Reader(whole, "fetch", flexible=True)
    check(fetch, reader)
    reader.finish()
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            check(fetch, Reader(whole[:size], "fetch", flexible=True))


def test_a_tag_that_nobody_knows_is_moved_over() -> None:
    api_versions = request_class(API_VERSIONS, 3)
    reader = Reader(b"\2a\2b" + b"\1\x63\3xyz", "ApiVersions", flexible=True)
    check(api_versions, reader)
    reader.finish()


def test_a_header_keeps_its_old_string_and_then_has_tags() -> None:
    frame = encode_request(
        "metadata",
        12,
        {
            "topics": None,
            "allow_auto_topic_creation": True,
            "include_topic_authorized_operations": False,
        },
    )[4:]
    request = request_class(METADATA, 12)
    reader = Reader(frame, "metadata")
    check_header(request.__header_schema__, reader)
    check(request, reader)
    reader.finish()
