from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

from asyncproducer import SerializationError
from asyncproducer.serializers import json_serializer, msgpack_serializer, str_serializer
from asyncproducer.testing import EmbeddedCluster


@dataclass
class Order:
    id: UUID
    at: datetime
    price: Decimal


class Model(pydantic.BaseModel):
    id: UUID
    at: datetime
    price: Decimal
    link: pydantic.HttpUrl


ORDER = Order(UUID(int=7), datetime(2026, 1, 2, tzinfo=UTC), Decimal("9.50"))
PLAIN = {
    "id": "00000000-0000-0000-0000-000000000007",
    "at": "2026-01-02T00:00:00Z",
    "price": "9.50",
}


def test_json_is_compact_utf8_in_the_order_given() -> None:
    assert (
        json_serializer({"b": "ü", "a": [1, None, True]}) == '{"b":"ü","a":[1,null,true]}'.encode()
    )


def test_json_takes_dataclasses_dates_decimals_and_uuids() -> None:
    assert json.loads(json_serializer(ORDER)) == PLAIN


def test_msgpack_takes_the_same_and_bytes() -> None:
    assert msgspec.msgpack.decode(msgpack_serializer(ORDER), type=Order) == ORDER
    assert msgspec.msgpack.decode(msgpack_serializer({"raw": b"\x00"})) == {"raw": b"\x00"}


MODEL = Model(
    id=ORDER.id, at=ORDER.at, price=ORDER.price, link=pydantic.HttpUrl("https://example.org/")
)
PLAIN_MODEL = {**PLAIN, "link": "https://example.org/"}


@pytest.mark.parametrize(
    ("serializer", "decode"),
    [(json_serializer, json.loads), (msgpack_serializer, msgspec.msgpack.decode)],
)
def test_pydantic_models_are_what_they_say_they_are_in_json(
    serializer: Callable[[object], bytes], decode: Callable[[bytes], object]
) -> None:
    """Alone and inside of other things."""
    assert decode(serializer(MODEL)) == PLAIN_MODEL
    assert decode(serializer({"orders": [MODEL, None]})) == {"orders": [PLAIN_MODEL, None]}


@pytest.mark.parametrize("value", [Model, object()], ids=["class", "object"])
@pytest.mark.parametrize("serializer", [json_serializer, msgpack_serializer])
def test_the_error_of_an_unknown_type_says_what_can_be_given(
    serializer: Callable[[object], bytes], value: object
) -> None:
    with pytest.raises(TypeError, match=r"objects of type .* cannot be encoded: .* dataclass"):
        serializer(value)


def test_without_pydantic_nobody_imports_it() -> None:
    code = "import asyncproducer.serializers, sys; print('pydantic' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("value", "expected"), [("ü", "ü".encode()), (7, b"7"), (UUID(int=7), PLAIN["id"].encode())]
)
def test_str_is_the_text_of_the_value(value: object, expected: bytes) -> None:
    assert str_serializer(value) == expected


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_str_refuses_bytes_rather_than_sending_a_python_literal(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        str_serializer(value)


@pytest.mark.parametrize("serializer", [json_serializer, msgpack_serializer])
def test_an_unknown_type_is_a_type_error(serializer: Callable[[object], bytes]) -> None:
    with pytest.raises(TypeError, match="complex"):
        serializer(1j)


@pytest.mark.virtual_time
async def test_a_producer_uses_them_for_keys_and_values(
    new_producer: Callable[..., Any], cluster: EmbeddedCluster
) -> None:
    producer = new_producer(key_serializer=str_serializer, value_serializer=json_serializer)
    await producer.start()
    await producer.send("t", {"n": 1}, key=7)
    await producer.send("t", None, key=7)
    assert [(r.key, r.value) for r in cluster.records("t")] == [(b"7", b'{"n":1}'), (b"7", None)]


@pytest.mark.virtual_time
async def test_a_producer_sends_pydantic_models(
    new_producer: Callable[..., Any], cluster: EmbeddedCluster
) -> None:
    producer = new_producer(value_serializer=json_serializer)
    await producer.start()
    await producer.send("t", MODEL)
    assert json.loads(cluster.records("t")[0].value or b"") == PLAIN_MODEL


@pytest.mark.virtual_time
async def test_what_cannot_be_serialized_is_refused_before_anything_is_sent(
    new_producer: Callable[..., Any], cluster: EmbeddedCluster
) -> None:
    producer = new_producer(value_serializer=json_serializer)
    await producer.start()
    with pytest.raises(SerializationError, match=r"value for topic t .*complex") as caught:
        await producer.send("t", 1j)
    assert isinstance(caught.value.__cause__, TypeError)
    assert cluster.records("t") == []


def test_the_package_itself_does_not_import_them() -> None:
    code = "import asyncproducer, sys; print('asyncproducer.serializers' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["False"]
