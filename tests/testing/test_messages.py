from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.serial import entity_reader

from asyncproducer.testing.handlers import APIS
from asyncproducer.testing.messages import (
    MalformedRequest,
    RequestHeader,
    build,
    decode_body,
    decode_header,
    encode_response,
    request_class,
    response_class,
    scalar_fields,
)
from asyncproducer.testing.raw_client import encode_request

PRODUCE, METADATA, INIT_PRODUCER_ID = 0, 3, 22

PRODUCE_FIELDS = {
    "transactional_id": None,
    "acks": -1,
    "timeout": 1500,
    "topic_data": [
        {
            "name": "t",
            "topic_id": uuid.UUID(int=7),
            "partition_data": [{"index": 3, "records": b"xyz"}],
        }
    ],
}


def produce_frame(version: int) -> bytes:
    return encode_request("produce", version, PRODUCE_FIELDS, correlation_id=9)[4:]


@pytest.mark.parametrize("version", range(3, 14))
def test_a_request_is_read_in_every_version(version: int) -> None:
    frame = produce_frame(version)
    assert decode_header(frame) == RequestHeader(PRODUCE, version, 9)
    client_id, body, left_over = decode_body(PRODUCE, version, frame)
    assert (client_id, left_over) == ("raw", 0)
    assert body.topic_data[0].partition_data[0].records == b"xyz"
    assert scalar_fields(body) == {"transactional_id": None, "acks": -1, "timeout": 1500}


@pytest.mark.parametrize("version", [3, 13])
def test_a_request_that_is_cut_is_malformed(version: int) -> None:
    frame = produce_frame(version)
    for size in range(8, len(frame)):
        with pytest.raises(MalformedRequest):
            decode_body(PRODUCE, version, frame[:size])


def test_bytes_behind_a_request_are_counted() -> None:
    assert decode_body(PRODUCE, 9, produce_frame(9) + b"\0\0")[2] == 2


def test_a_frame_without_a_whole_header_is_malformed() -> None:
    for size in range(8):
        with pytest.raises(MalformedRequest, match=f"a request of {size} bytes"):
            decode_header(bytes(size))


@pytest.mark.parametrize("version", [3, 13])
def test_an_array_that_may_not_be_null_is_malformed_when_it_is(version: int) -> None:
    for topics in (None, [{"name": "t", "topic_id": None, "partition_data": None}]):
        frame = encode_request("produce", version, {**PRODUCE_FIELDS, "topic_data": topics})[4:]
        with pytest.raises(MalformedRequest, match="null or a negative count"):
            decode_body(PRODUCE, version, frame)


def test_an_array_that_may_be_null_is_read() -> None:
    fields = {
        "topics": None,
        "allow_auto_topic_creation": True,
        "include_topic_authorized_operations": False,
    }
    _, body, _ = decode_body(METADATA, 12, encode_request("metadata", 12, fields)[4:])
    assert body.topics is None


@given(st.sampled_from(sorted(APIS)), st.data(), st.binary(max_size=60))
def test_random_bytes_are_a_request_or_malformed(
    key: int, data: st.DataObject, body: bytes
) -> None:
    api = APIS[key]
    version = data.draw(st.integers(api.min_version, api.max_version))
    frame = key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\1\xff\xff" + body
    try:
        decode_body(key, version, frame)
    except MalformedRequest:
        pass


def test_fields_of_other_versions_are_left_out() -> None:
    values = {"error_code": 0, "api_keys": [], "throttle_time": 250}
    assert not hasattr(build(response_class(18, 0), values), "throttle_time")
    assert build(response_class(18, 1), values).throttle_time == timedelta(milliseconds=250)


def test_a_field_that_is_missing_is_found() -> None:
    with pytest.raises(TypeError, match="throttle_time"):
        build(response_class(INIT_PRODUCER_ID, 0), {"error_code": 0, "producer_epoch": 1})


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        (-1, None),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)),
        (2**62, None),  # a year that Python does not know
    ],
)
def test_times_are_milliseconds(milliseconds: int, expected: datetime | None) -> None:
    partition = {
        "index": 0,
        "error_code": 0,
        "base_offset": 1,
        "log_append_time": milliseconds,
        "record_errors": [],
    }
    values = {
        "throttle_time": 0,
        "responses": [{"name": "t", "partition_responses": [partition]}],
    }
    frame = encode_response(PRODUCE, 9, 77, values)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert int.from_bytes(frame[4:8], "big") == 77
    response, size = entity_reader(response_class(PRODUCE, 9))(frame, 9)
    assert 9 + size == len(frame)
    assert response.responses[0].partition_responses[0].log_append_time == expected


def test_api_versions_is_answered_without_tags_in_the_header() -> None:
    """A client that does not know the broker yet has to be able to read it (KIP-511)."""
    frame = encode_response(18, 3, 1, {"error_code": 0, "api_keys": [], "throttle_time": 0})
    assert frame[8:10] == b"\0\0"  # right behind the correlation id


def test_classes_are_those_of_the_version() -> None:
    assert request_class(PRODUCE, 7).__version__ == 7
    assert response_class(PRODUCE, 8).__version__ == 8
