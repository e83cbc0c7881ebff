"""Serializers for everyday use: text, JSON and MessagePack.

    Producer("localhost:9092", key_serializer=str_serializer, value_serializer=json_serializer)

Each is a plain function `value -> bytes`, and any other one will do as well. None never
reaches them: it is Kafka's null. What they raise reaches the caller of `send` as the
cause of a SerializationError, before anything is buffered.

JSON and MessagePack are msgspec's. Beside what the formats know, it takes dataclasses,
`msgspec.Struct`, TypedDict, NamedTuple, Enum, UUID, Decimal, and dates and times. A
pydantic model, alone or inside of these, is sent as its `model_dump(mode="json")`.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["json_serializer", "msgpack_serializer", "str_serializer"]


def _plain(value: Any) -> Any:
    """What msgspec does not know, as something that it does."""
    # By the method's name: pydantic need not be there, and others who have it are welcome.
    dump = None if isinstance(value, type) else getattr(value, "model_dump", None)
    if dump is None:
        kind = type(value)
        raise TypeError(
            f"objects of type {kind.__module__}.{kind.__qualname__} cannot be encoded: give what "
            "the format knows, a dataclass, a msgspec.Struct or a pydantic model, or write a "
            "serializer of your own, a function value -> bytes"
        )
    return dump(mode="json")


# Encoders are made once: that is what makes msgspec fast.
_json = msgspec.json.Encoder(enc_hook=_plain)
_msgpack = msgspec.msgpack.Encoder(enc_hook=_plain)


def json_serializer(value: object) -> bytes:
    """The value as JSON, in UTF-8, without whitespace, keys in the order they are given.

    A pydantic model goes as `model.model_dump(mode="json")` gives it.
    Raises TypeError for a type that it does not know.
    """
    return _json.encode(value)


def msgpack_serializer(value: object) -> bytes:
    """The value as MessagePack: the same types as JSON, and bytes. A pydantic model goes as
    what it would be in JSON, so that bytes in it become text.

    Raises TypeError for a type that it does not know.
    """
    return _msgpack.encode(value)


def str_serializer(value: object) -> bytes:
    """The text `str(value)` in UTF-8: for keys that are numbers, UUIDs or strings.

    Raises TypeError for bytes, whose text would be the Python literal `b'...'`, and
    UnicodeEncodeError for what UTF-8 has not, a lone surrogate.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"str_serializer was given {type(value).__name__}, which it would garble")
    return str(value).encode()
