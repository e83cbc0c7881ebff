"""Serializers for everyday use: text, JSON and MessagePack.

    Producer("localhost:9092", key_serializer=str_serializer, value_serializer=json_serializer)

Each is a plain function `value -> bytes`, and any other one will do as well. None never
reaches them: it is Kafka's null. What they raise reaches the caller of `send` as the
cause of a SerializationError, before anything is buffered.

JSON and MessagePack are msgspec's. Beside what the formats know, it takes dataclasses,
`msgspec.Struct`, TypedDict, NamedTuple, Enum, UUID, Decimal, and dates and times.
"""

from __future__ import annotations

import msgspec

__all__ = ["json_serializer", "msgpack_serializer", "str_serializer"]

# Encoders are made once: that is what makes msgspec fast.
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def json_serializer(value: object) -> bytes:
    """The value as JSON, in UTF-8, without whitespace, keys in the order they are given.

    A pydantic model is not known here: give `model.model_dump(mode="json")`.
    Raises TypeError for a type that it does not know.
    """
    return _json.encode(value)


def msgpack_serializer(value: object) -> bytes:
    """The value as MessagePack: the same types as JSON, and bytes.

    Raises TypeError for a type that it does not know.
    """
    return _msgpack.encode(value)


def str_serializer(value: object) -> bytes:
    """The text `str(value)` in UTF-8: for keys that are numbers, UUIDs or strings.

    Bytes are refused with TypeError: their text would be the Python literal `b'...'`.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"str_serializer was given {type(value).__name__}, which it would garble")
    return str(value).encode()
