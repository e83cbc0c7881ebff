"""Valid messages of every API and version, with values of all kinds, made from kio's classes."""

from __future__ import annotations

import dataclasses
import io
import random
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from types import UnionType
from typing import Any, get_origin

from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from asyncproducer.testing import EmbeddedCluster
from asyncproducer.testing.batches import encode_batch
from asyncproducer.testing.messages import request_class, response_class
from asyncproducer.testing.shapes import inner_type

from .mutator import Span, mutate, spans

__all__ = ["broken_answer", "broken_request", "encode", "records", "sample", "whole_answer"]

#: That of `t` in the cluster of the target `broker`, which is the same each time.
_TOPIC_ID = EmbeddedCluster(topics={"t": 2})._state.topic("t").topic_id

#: How many valid messages of a kind there are to begin with. To make one takes longer than to
#: break it.
_SAMPLES = 24

_TEXTS = ("t", "t", "t", "", "a-topic.with_a-longer_name", "é ☃ 𝄞", "localhost", "x" * 200)
_BITS = {"int8": 8, "int16": 16, "uint16": 16, "int32": 32, "int64": 64}


def sample(rng: random.Random, message_class: Any, **wanted: Any) -> Any:
    """A message with random values, but for the fields that are given."""
    values = {
        field.name: wanted[field.name] if field.name in wanted else _field(rng, field)
        for field in dataclasses.fields(message_class)
    }
    return message_class(**values)


def encode(message: Any, **header: Any) -> bytes:
    """The bytes of a message, behind its header if there is one."""
    out = io.BytesIO()
    if header:
        header_class = message.__header_schema__
        names = {field.name for field in dataclasses.fields(header_class)}
        values = {name: value for name, value in header.items() if name in names}
        entity_writer(header_class)(out, header_class(**values))
    entity_writer(type(message))(out, message)
    return out.getvalue()


def whole_answer(key: int, version: int, number: int) -> bytes:
    """One of the answers that are broken, with its header."""
    return _valid(response_class(key, version), number)[0]


def broken_answer(rng: random.Random, key: int, version: int) -> bytes:
    """An answer with its header, valid or not."""
    return _broken(rng, response_class(key, version))


def broken_request(rng: random.Random, key: int, version: int) -> bytes:
    """A request with its header, valid or not."""
    return _broken(rng, request_class(key, version))


def _broken(rng: random.Random, message_class: Any) -> bytes:
    frame, where = _valid(message_class, rng.randrange(_SAMPLES))
    if rng.random() < 0.05:
        return frame
    other, _ = _valid(message_class, rng.randrange(_SAMPLES))
    return mutate(rng, frame, where, other)


@cache
def _valid(message_class: Any, number: int) -> tuple[bytes, Sequence[Span]]:
    """A valid message with its header, and where its fields are. Half of them without error."""
    rng = random.Random(f"{message_class.__name__} {message_class.__version__} {number}")
    wanted = {}
    if number % 2 and "error_code" in message_class.__dataclass_fields__:
        wanted["error_code"] = ErrorCode.none
    frame = encode(
        sample(rng, message_class, **wanted),
        request_api_key=message_class.__api_key__,
        request_api_version=message_class.__version__,
        correlation_id=7,
        client_id=rng.choice((None, "me")),
    )
    return frame, spans(message_class, frame)


def _field(rng: random.Random, field: dataclasses.Field[Any]) -> Any:
    inner, is_array = inner_type(field.type)
    is_optional = get_origin(field.type) is UnionType
    if is_optional and "tag" not in field.metadata and rng.random() < 0.3:
        return None
    if not is_array:
        return _value(rng, inner, field)
    return tuple(_value(rng, inner, field) for _ in range(rng.choice((0, 1, 1, 2, 5))))


def _value(rng: random.Random, inner: Any, field: dataclasses.Field[Any]) -> Any:
    if dataclasses.is_dataclass(inner):
        return sample(rng, inner)
    kind = field.metadata["kafka_type"]
    if kind in _BITS:
        return _number(rng, _BITS[kind], signed=kind != "uint16")
    makers: dict[str, Callable[[], Any]] = {
        "bool": lambda: rng.random() < 0.5,
        "float64": lambda: rng.random(),
        "string": lambda: rng.choice(_TEXTS),
        "bytes": lambda: rng.randbytes(rng.choice((0, 1, 50))),
        "records": lambda: records(rng),
        "uuid": lambda: rng.choice((_TOPIC_ID, uuid.UUID(int=rng.getrandbits(128) | 1))),
        "error_code": lambda: rng.choice((ErrorCode.none, *ErrorCode)),
        "timedelta_i32": lambda: timedelta(milliseconds=rng.choice((0, 1, 250, 2**31 - 1))),
        "timedelta_i64": lambda: timedelta(milliseconds=rng.choice((0, 1, 250, 2**40))),
        "datetime_i64": lambda: datetime(2025, 1, 2, tzinfo=UTC),
    }
    return makers[kind]()


def _number(rng: random.Random, bits: int, *, signed: bool) -> int:
    high = 2 ** (bits - signed) - 1
    return rng.choice((0, 1, 2, 3, rng.randint(0, high), high, -1 if signed else 5))


def records(rng: random.Random) -> bytes:
    """One record batch, sometimes of an idempotent producer."""
    count = rng.choice((1, 2, 7))
    ids = (rng.randrange(5), 0, 0) if rng.random() < 0.5 else (-1, -1, -1)
    return encode_batch(
        [(rng.choice((None, b"key")), rng.choice((None, b"", b"v" * 90))) for _ in range(count)],
        timestamps=[1_700_000_000_000 + n for n in range(count)],
        headers=rng.choice(((), (("h", b"x"), ("", None)))),
        producer_id=ids[0],
        producer_epoch=ids[1],
        base_sequence=ids[2],
    )
