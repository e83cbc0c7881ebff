"""Whether bytes can be a message, looked at before kio reads them.

kio's reader is for peers that it trusts: it makes room for as many elements as a count
announces, and ends the process where there is no such room. What a broker receives is
not to be trusted, so each count, length and size is compared with the bytes behind it
first. So is null refused where the protocol has none, which kio lets pass for arrays and
for what is in them. The shape of a message comes from kio's own classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin

from asyncproducer.core.primitives import Reader

__all__ = ["check", "check_header", "inner_type"]

#: Moves a reader over one field. Raises ProtocolError.
Step: TypeAlias = Callable[[Reader], object]

#: kio's names of the types that always take the same number of bytes.
_SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "error_code": 2,
    "int32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "float64": 8,
    "uuid": 16,
}


class _Shape(NamedTuple):
    steps: tuple[Step, ...]
    tagged: Mapping[int, Step]
    #: No message of this class has fewer bytes.
    smallest: int


def check(message_class: Any, reader: Reader) -> None:
    """Moves `reader` over one message. Raises ProtocolError where its bytes cannot be one.

    The flexibility is the reader's. Tags that are not known are moved over.
    """
    shape = _shape(message_class)
    for step in shape.steps:
        step(reader)
    if not reader.flexible:
        return
    for _ in range(reader.tagged_field_count()):
        known = shape.tagged.get(reader.unsigned_varint())
        outer = reader.enter()
        if known is None:
            reader.advance(reader.end - reader.position)
        else:
            known(reader)
        reader.leave(outer)


def check_header(header_class: Any, reader: Reader) -> None:
    """The same for the header in front. Its only string is of the old kind always (KIP-511)."""
    reader.flexible = False
    for step in _shape(header_class).steps:
        step(reader)
    reader.flexible = header_class.__flexible__
    reader.skip_tagged_fields()


@cache
def _shape(message_class: Any) -> _Shape:
    flexible = message_class.__flexible__
    steps: list[Step] = []
    tagged: dict[int, Step] = {}
    smallest = 0
    for field in dataclasses.fields(message_class):
        step, size = _step(field, flexible)
        if "tag" in field.metadata:
            tagged[field.metadata["tag"]] = step
        else:
            steps.append(step)
            smallest += size
    return _Shape(tuple(steps), tagged, smallest + flexible)


def _step(field: dataclasses.Field[Any], flexible: bool) -> tuple[Step, int]:
    """How to move over a field, and the fewest bytes that it takes."""
    inner, is_array = inner_type(field.type)
    nullable = get_origin(field.type) is UnionType
    if isinstance(inner, type) and dataclasses.is_dataclass(inner):
        if nullable and not is_array:
            raise NotImplementedError(f"{field.name}: a structure that may be null (KIP-893)")
        step, size = _structure(inner)
    else:
        kind = field.metadata["kafka_type"]
        step, size = _primitive(kind, flexible, nullable and not is_array)
    if not is_array:
        return step, size
    return lambda reader: _skip_array(reader, step, size, nullable), 1 if flexible else 4


def _structure(message_class: type) -> tuple[Step, int]:
    return lambda reader: check(message_class, reader), _shape(message_class).smallest


def _primitive(kind: str, flexible: bool, nullable: bool) -> tuple[Step, int]:
    if kind in _SIZES:
        size = _SIZES[kind]
        return lambda reader: reader.advance(size), size
    if kind == "string":
        return lambda reader: _skip_bytes(reader, Reader.int16, nullable), 1 if flexible else 2
    if kind in ("bytes", "records"):
        return lambda reader: _skip_bytes(reader, Reader.int32, nullable), 1 if flexible else 4
    raise NotImplementedError(f"kio's type {kind}")


def _skip_bytes(reader: Reader, old_length: Callable[[Reader], int], nullable: bool) -> None:
    length = reader.unsigned_varint() - 1 if reader.flexible else old_length(reader)
    if length != -1:
        reader.advance(length)
    elif not nullable:
        raise reader.error("null where there must be a string or bytes")


def _skip_array(reader: Reader, step: Step, smallest: int, nullable: bool) -> None:
    count = reader.unsigned_varint() - 1 if reader.flexible else reader.int32()
    if count < 0 and not (nullable and count == -1):
        raise reader.error("null or a negative count where there must be an array")
    left = reader.end - reader.position
    if count * smallest > left:
        raise reader.error(f"an array of {count} elements, which {left} bytes cannot hold")
    for _ in range(count):
        step(reader)


def inner_type(annotation: Any) -> tuple[Any, bool]:
    """(X, True) of `tuple[X, ...] | None`, (X, False) of `X | None`."""
    if get_origin(annotation) is UnionType:
        (annotation,) = (arg for arg in get_args(annotation) if arg is not NoneType)
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True
    return annotation, False
