"""Requests and responses as kio's messages, whatever their version.

kio has one set of classes per API *and version*. A handler should not care: it gets
the request as it is, and returns its response as a plain mapping with the fields of
all versions that it supports. `encode_response` takes those that the version at hand
has. Times are int milliseconds in such a mapping, error codes are ints.

What a peer sends is not trusted: `decode_header` and `decode_body` raise MalformedRequest,
and nothing else, for bytes that are no request.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from asyncproducer.core.primitives import Reader
from asyncproducer.errors import ProtocolError
from asyncproducer.testing.shapes import check, check_header, inner_type

__all__ = [
    "BytesBehind",
    "MalformedRequest",
    "Message",
    "RequestHeader",
    "Response",
    "build",
    "decode_body",
    "decode_header",
    "decode_response",
    "encode_message",
    "encode_response",
    "request_class",
    "response_class",
    "scalar_fields",
]

#: An entity of kio. Its class depends on API and version, so its fields are not typed.
Message: TypeAlias = Any

#: What a handler returns: field name -> value, nested mappings, and lists of mappings.
Response: TypeAlias = Mapping[str, Any]

_FIXED_HEADER = struct.Struct(">hhi")
_SIZE = struct.Struct(">i")

#: Names given to `build` that a class has not, as (class name, field name): fields of
#: other versions, if nobody mistyped. The tests check that.
LEFT_OUT: set[tuple[str, str]] = set()


class BytesBehind(ValueError):
    """An answer is longer than its message."""


class MalformedRequest(Exception):
    """The peer sent bytes that are no request of this API and version."""


class RequestHeader(NamedTuple):
    """The part of a request that every broker can read."""

    api_key: int
    api_version: int
    correlation_id: int


def decode_header(frame: bytes) -> RequestHeader:
    """The first 8 bytes of a request, which never change. Raises MalformedRequest."""
    if len(frame) < _FIXED_HEADER.size:
        raise MalformedRequest(f"a request of {len(frame)} bytes")
    return RequestHeader._make(_FIXED_HEADER.unpack_from(frame))


def decode_body(api_key: int, version: int, frame: bytes) -> tuple[str | None, Message, int]:
    """Client id, message, and number of bytes left over, of a request whose header was read.

    Bytes are left over when the writer is wrong. Java's broker overlooks them, and
    librdkafka (2.16) relies on that. Raises MalformedRequest.
    """
    request = request_class(api_key, version)
    try:
        _check(request, frame)
        header, position = entity_reader(request.__header_schema__)(frame, 0)
        message, size = entity_reader(request)(frame, position)
    except ProtocolError as exc:
        raise MalformedRequest(str(exc)) from exc
    # kio's native readers raise their own DecodeError, ValueError for a varint, KeyError
    # for an unknown tag, OverflowError for a time: every one of them is the peer's fault.
    except Exception as exc:
        raise MalformedRequest(f"{request.__name__} v{version}: {exc!r}") from exc
    return header.client_id, message, len(frame) - position - size


def encode_response(api_key: int, version: int, correlation_id: int, values: Response) -> bytes:
    """A whole response frame, the 4 bytes of its size included."""
    return encode_message(correlation_id, build(response_class(api_key, version), values))


def encode_message(correlation_id: int, response: Message) -> bytes:
    """A response frame as above, from kio's message."""
    out = io.BytesIO()
    out.write(bytes(_SIZE.size))
    header = response.__header_schema__
    entity_writer(header)(out, header(correlation_id=correlation_id))
    entity_writer(type(response))(out, response)
    out.seek(0)
    out.write(_SIZE.pack(len(out.getbuffer()) - _SIZE.size))
    return out.getvalue()


def decode_response(api_key: int, version: int, frame: bytes) -> tuple[int, Message]:
    """Correlation id and message of a response frame, which comes without its size.

    Raises BytesBehind for bytes behind the message, ProtocolError where counts or lengths
    cannot be, and what kio raises for the rest.
    """
    response = response_class(api_key, version)
    _check(response, frame)
    header, position = entity_reader(response.__header_schema__)(frame, 0)
    message, size = entity_reader(response)(frame, position)
    if position + size != len(frame):
        raise BytesBehind(f"{len(frame) - position - size} bytes behind the answer")
    return header.correlation_id, message


def _check(message_class: Any, frame: bytes) -> None:
    reader = Reader(frame, f"{message_class.__name__} v{message_class.__version__}")
    check_header(message_class.__header_schema__, reader)
    # The header of an ApiVersions response never is flexible.
    reader.flexible = message_class.__flexible__
    check(message_class, reader)


@cache
def request_class(api_key: int, version: int) -> Any:
    """kio's class of a request."""
    return load_request_schema(api_key, version)


@cache
def response_class(api_key: int, version: int) -> Any:
    """kio's class of a response."""
    return load_response_schema(api_key, version)


def build(message_class: Any, values: Mapping[str, Any]) -> Message:
    """A message from a mapping. Names that this version has not are left out.

    Raises TypeError when a field without a default is missing.
    """
    return message_class(
        **{
            name: values[name] if convert is None else convert(values[name])
            for name, convert in _conversions(message_class, frozenset(values))
        }
    )


@cache
def _conversions(
    message_class: Any, names: frozenset[str]
) -> list[tuple[str, Callable[[Any], Any] | None]]:
    fields = {field.name: field for field in dataclasses.fields(message_class)}
    LEFT_OUT.update((message_class.__name__, name) for name in names - fields.keys())
    return [(name, _conversion(field)) for name, field in fields.items() if name in names]


def _conversion(field: dataclasses.Field[Any]) -> Callable[[Any], Any] | None:
    inner, is_array = inner_type(field.type)
    if dataclasses.is_dataclass(inner):
        if is_array:
            return lambda values: (
                None if values is None else tuple(build(inner, value) for value in values)
            )
        return lambda value: None if value is None else build(inner, value)
    if is_array:
        return lambda values: None if values is None else tuple(values)
    return _CONVERSIONS.get(field.metadata["kafka_type"])


def _datetime(milliseconds: int) -> datetime | None:
    """None, which is -1 on the wire, where there is no such date."""
    try:
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return None if milliseconds < 0 else epoch + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "error_code": ErrorCode,
    "timedelta_i32": lambda milliseconds: timedelta(milliseconds=milliseconds),
    "datetime_i64": _datetime,
}


def scalar_fields(message: Message) -> dict[str, Any]:
    """The fields of a message that are neither arrays nor structures; times in ms."""
    return {
        name: value // timedelta(milliseconds=1)
        if isinstance(value := getattr(message, name), timedelta)
        else value
        for name in _scalar_names(message.__class__)
    }


@cache
def _scalar_names(message_class: Any) -> tuple[str, ...]:
    def is_scalar(field: dataclasses.Field[Any]) -> bool:
        inner, is_array = inner_type(field.type)
        return not (is_array or dataclasses.is_dataclass(inner))

    return tuple(field.name for field in dataclasses.fields(message_class) if is_scalar(field))
