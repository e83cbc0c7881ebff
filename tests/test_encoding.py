from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from asyncproducer.core.partitioner import Murmur3Partitioner, RoundRobinPartitioner
from asyncproducer.encoding import (
    MAX_TIMESTAMP,
    RecordSerializer,
    header_list,
    partitioner_of,
    timestamp_ms,
    to_bytes,
)
from asyncproducer.errors import (
    ConfigError,
    InvalidTimestamp,
    KafkaError,
    RecordTooLarge,
    SerializationError,
)
from asyncproducer.plugins import TopicView
from asyncproducer.records import Header

# -- partitioners ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "murmur2"])
def test_built_in_partitioner_is_none(name: str) -> None:
    assert partitioner_of(name) is None


def test_partitioners_have_names() -> None:
    assert isinstance(partitioner_of("round_robin"), RoundRobinPartitioner)
    assert isinstance(partitioner_of("murmur3"), Murmur3Partitioner)


def test_partitioner_may_be_an_object_or_a_function() -> None:
    class Last:
        def partition(self, topic: TopicView, key: bytes | None, value: bytes | None) -> int:
            return topic.partition_count - 1

    last = Last()
    assert partitioner_of(last) is last
    function = partitioner_of(lambda topic, key, value: 3)
    assert function is not None
    assert function.partition(None, None, None) == 3  # type: ignore[arg-type]  # it does not look


# -- serializers -------------------------------------------------------------------------------


def call(function: Callable[..., Any], value: Any, headers: list[Header] | None = None) -> Any:
    serializer = RecordSerializer.of(function, "value")
    assert serializer is not None
    return serializer("orders", value, [] if headers is None else headers)


def test_no_serializer_is_none() -> None:
    assert RecordSerializer.of(None, "key") is None


def test_serializer_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="key_serializer=5: must be a function"):
        RecordSerializer.of(5, "key")  # type: ignore[arg-type]  # that is the point


def test_narrow_serializer_gets_the_value() -> None:
    assert call(str.encode, "text") == b"text"
    assert call(json.dumps, {"a": 1}) == '{"a": 1}'  # options have defaults: still narrow


def test_narrow_serializer_is_not_asked_about_null() -> None:
    assert call(str.encode, None) is None


def test_wide_serializer_gets_topic_and_headers() -> None:
    headers: list[Header] = []

    def wide(topic: str, value: Any, headers: list[Header]) -> bytes:
        headers.append(("schema", b"1"))
        return f"{topic}:{value}".encode()

    assert call(wide, None, headers) == b"orders:None"
    assert headers == [("schema", b"1")]


def test_the_third_argument_of_a_wide_serializer_may_have_a_default() -> None:
    def wide(topic: str, value: Any, headers: list[Header] | None = None) -> bytes:
        assert headers == []
        return topic.encode()

    assert call(wide, 1) == b"orders"


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lambda value, ctx: b"", "(value, ctx)"),
        (lambda: b"", "()"),
        (lambda value, *, schema: b"", "(value, *, schema)"),
        (lambda topic, value, headers, *, schema: b"", "(topic, value, headers, *, schema)"),
        (lambda a, b, c, d: b"", "(a, b, c, d)"),
    ],
)
def test_serializer_with_other_arguments_is_refused(
    function: Callable[..., Any], signature: str
) -> None:
    """Else it would fail with each record."""
    with pytest.raises(ConfigError) as caught:
        RecordSerializer.of(function, "value")
    text = str(caught.value)
    assert text.startswith("value_serializer=<function")
    assert "must be a function value -> bytes, or (topic, value, headers) -> bytes" in text
    assert text.endswith(f"; it is called as {signature}")


def test_what_a_wrapper_wraps_may_have_other_arguments() -> None:
    def wrapped(value: str, ctx: str) -> bytes:
        return (value + ctx).encode()

    @functools.wraps(wrapped)
    def narrow(value: str) -> bytes:
        return wrapped(value, "!")

    @functools.wraps(wrapped)
    def wide(topic: str, value: str, headers: list[Header]) -> bytes:
        return wrapped(value, topic)

    assert call(narrow, "text") == b"text!"
    assert call(wide, "text") == b"textorders"


def wide_arguments(topic: str, value: Any, headers: list[Header]) -> bytes:
    return topic.encode()


def test_a_wrapper_that_passes_all_on_is_what_it_wraps() -> None:
    @functools.wraps(wide_arguments)
    def logged(*args: Any) -> bytes:
        return wide_arguments(*args)

    @functools.wraps(wide_arguments)
    def narrow(value: str) -> bytes:
        return wide_arguments("other", value, [])

    assert call(logged, 1) == b"orders"
    assert call(narrow, 1) == b"other"


@pytest.mark.parametrize(("result", "kind"), [({"a": 1}, "dict"), (5, "int"), ([b"a"], "list")])
async def test_what_a_serializer_returns_must_be_bytes(result: Any, kind: str) -> None:
    """The text must not ask for a serializer: there is one."""
    pattern = f"^the key for topic orders is of type {kind}, as its key_serializer returned it: "

    async def later(value: Any) -> Any:
        return result

    with pytest.raises(SerializationError, match=pattern) as caught:
        RecordSerializer(lambda value: result, "key")("orders", 1, [])
    assert "give the Producer" not in str(caught.value)
    serializer = RecordSerializer(later, "key")
    with pytest.raises(SerializationError, match=pattern):
        await serializer.awaited("orders", serializer("orders", 1, []))


@pytest.mark.parametrize("result", [bytearray(b"a"), memoryview(bytearray(b"a"))])
async def test_what_a_serializer_may_use_again_is_copied_at_once(result: Any) -> None:
    async def later(value: Any) -> Any:
        return result

    data = [
        call(lambda value: result, 1),
        await RecordSerializer(later, "key").awaited("orders", call(later, 1)),
    ]
    result[:] = b"b"
    assert data == [b"a", b"a"]


@pytest.mark.parametrize("result", [b"a", "a", None])
async def test_a_serializer_may_return_what_needs_none(result: Any) -> None:
    async def later(value: Any) -> Any:
        return result

    assert call(lambda value: result, 1) is result
    assert await RecordSerializer(later, "key").awaited("orders", call(later, 1)) is result


def test_wide_serializer_may_be_an_object() -> None:
    class Wide:
        def __call__(self, topic: str, value: Any, headers: list[Header]) -> bytes:
            return topic.encode()

    assert call(Wide(), 1) == b"orders"


def test_builtin_without_a_signature_is_narrow() -> None:
    # `type` objects in C have none that Python could read.
    assert call(bytes, [1, 2]) == b"\x01\x02"


def test_serializer_error_names_topic_and_cause() -> None:
    """KP-10: a value that the serializer does not take."""
    with pytest.raises(SerializationError, match="the value for topic orders could not") as caught:
        call(str.encode, 5)
    assert isinstance(caught.value.__cause__, TypeError)


def test_own_errors_of_a_serializer_pass() -> None:
    error = RecordTooLarge("not with me")

    def refuse(value: Any) -> bytes:
        raise error

    with pytest.raises(KafkaError) as caught:
        call(refuse, 1)
    assert caught.value is error


async def encode(value: str) -> bytes:
    return value.encode()


class AsyncSerializer:
    async def __call__(self, topic: str, value: str, headers: list[Header]) -> bytes:
        return value.encode()

    async def serialize(self, value: str) -> bytes:
        return value.encode()


@pytest.mark.parametrize(
    "function",
    [encode, functools.partial(encode), AsyncSerializer(), AsyncSerializer().serialize],
    ids=["function", "partial", "object", "method"],
)
async def test_async_serializer_is_recognised(function: Callable[..., Awaitable[bytes]]) -> None:
    serializer = RecordSerializer(function, "value")
    assert serializer.is_async
    assert await serializer.awaited("orders", serializer("orders", "text", [])) == b"text"


@pytest.mark.parametrize("function", [str.encode, bytes, lambda value: b""])
def test_plain_serializer_is_not_async(function: Callable[..., Any]) -> None:
    assert not RecordSerializer(function, "value").is_async


async def test_async_serializer_error_names_topic_and_cause() -> None:
    async def broken(value: Any) -> bytes:
        raise ZeroDivisionError("by the serializer")

    serializer = RecordSerializer(broken, "key")
    with pytest.raises(SerializationError, match="the key for topic orders") as caught:
        await serializer.awaited("orders", serializer("orders", 1, []))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_own_errors_of_an_async_serializer_pass() -> None:
    error = RecordTooLarge("not with me")

    async def refuse(value: Any) -> bytes:
        raise error

    serializer = RecordSerializer(refuse, "key")
    with pytest.raises(RecordTooLarge) as caught:
        await serializer.awaited("orders", serializer("orders", 1, []))
    assert caught.value is error


# -- values without a serializer ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"bytes", b"bytes"),
        (bytearray(b"array"), b"array"),
        (memoryview(b"view"), b"view"),
        (memoryview(b"every second")[::2], b"eeyscn"),
        (memoryview(array("H", [1])), b"\x01\x00"),
        ("é", b"\xc3\xa9"),
        ("", b""),
    ],
)
def test_what_needs_no_serializer(data: Any, expected: bytes) -> None:
    assert to_bytes("orders", "value", data) == expected
    assert type(to_bytes("orders", "value", data)) is bytes


def test_what_can_be_changed_is_copied() -> None:
    data = bytearray(b"before")
    taken = to_bytes("orders", "value", data)
    data[:] = b"after!"
    assert taken == b"before"


@pytest.mark.parametrize("data", [5, 5.0, ["a"], {"a": 1}, object()])
def test_other_types_need_a_serializer(data: Any) -> None:
    with pytest.raises(SerializationError, match=f"of type {type(data).__name__}: give bytes"):
        to_bytes("orders", "key", data)


def test_str_that_is_not_utf8() -> None:
    with pytest.raises(SerializationError, match="the value for topic orders is not UTF-8"):
        to_bytes("orders", "value", "\udc80")


# -- headers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, []),
        ([], []),
        ({"a": b"1", "b": None, "c": "é"}, [("a", b"1"), ("b", None), ("c", b"\xc3\xa9")]),
        ([("a", b"1"), ("a", b"2")], [("a", b"1"), ("a", b"2")]),
        ([["a", bytearray(b"1")]], [("a", b"1")]),
        ((pair for pair in [("é", memoryview(b"1"))]), [("é", b"1")]),
    ],
    ids=["empty mapping", "empty list", "mapping", "twice", "lists", "generator"],
)
def test_headers_may_be_a_mapping_or_pairs(headers: Any, expected: list[Header]) -> None:
    assert header_list(headers) == expected


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ("text", "give a mapping, or pairs of a name and a value"),
        (b"bytes", "give a mapping, or pairs of a name and a value"),
        (5, "headers of type int"),
        ([5], "headers of type list"),
        ([("a", b"1"), "bc"], "header 1 is 'bc': must be a pair"),
        ([("a", b"1", b"2")], "header 0 is .* must be a pair"),
        ({5: b"1"}, "header 0 has the name 5: must be a str"),
        ({b"a": b"1"}, "header 0 has the name b'a'"),
        ([("a", b"1"), ("b", 5)], r"header 1 \('b'\) has a value of type int"),
        ({"\udc80": b"1"}, "header 0 is not UTF-8"),
        ({"a": "\udc80"}, "header 0 is not UTF-8"),
    ],
)
def test_header_errors_name_the_place(headers: Any, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        header_list(headers)


# -- timestamps --------------------------------------------------------------------------------


class Elsewhere(datetime):
    """Of a library whose differences are its own."""

    def __sub__(self, other: Any) -> Any:
        return NotImplemented


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (0, 0),
        (MAX_TIMESTAMP, MAX_TIMESTAMP),
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(2024, 2, 29, 12, 0, 0, 1500, tzinfo=UTC), 1709208000001),
        (datetime(2024, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 1735689599999),
        (datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), 1704067200000),
        (Elsewhere(2024, 1, 1, tzinfo=UTC), 1704067200000),
        (datetime.max.replace(tzinfo=UTC), 253402300799999),
    ],
)
def test_timestamp_is_ms_since_1970(timestamp: Any, expected: int) -> None:
    assert timestamp_ms(timestamp) == expected


@pytest.mark.parametrize(
    ("timestamp", "message"),
    [
        (-1, "must not be before 1970"),
        (datetime(1969, 12, 31, tzinfo=UTC), "must not be before 1970"),
        (datetime(2024, 1, 1), "has no time zone"),
        (MAX_TIMESTAMP + 1, "in 63 bits"),
        (1.5, "must be an int"),
        ("now", "must be an int"),
        (True, "must be an int"),
    ],
)
def test_bad_timestamps(timestamp: Any, message: str) -> None:
    with pytest.raises(InvalidTimestamp, match=message):
        timestamp_ms(timestamp)
