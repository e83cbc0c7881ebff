"""Orders and how they are written: Avro in the framing of Schema Registry, or JSON.

A value is a zero byte, the schema's id (u32, big-endian), and Avro's bytes. The registry is asked
once, by the command, for the ids; the stages get ids and schemas with their settings.
"""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import fastavro

__all__ = ["MOCK", "SCHEMAS", "Codec", "Form", "Order", "UndecodableError", "orders", "register"]

Order: TypeAlias = dict[str, Any]
#: What a stage has added: each form has the fields of those before it.
Form: TypeAlias = Literal["raw", "validated", "scored"]

#: A registry within this process, of the registry's own client.
MOCK = "mock://orders"

_FRAME = struct.Struct(">bI")

_RAW = [
    {"name": "order_id", "type": "string"},
    {"name": "customer", "type": "string"},
    {"name": "country", "type": "string"},
    {"name": "ship_to", "type": "string"},
    {"name": "sku", "type": "string"},
    {"name": "quantity", "type": "int"},
    {"name": "unit_cents", "type": "long"},
    {"name": "currency", "type": "string"},
    {"name": "placed_us", "type": "long"},
]
_VALIDATED = [*_RAW, {"name": "total_cents", "type": "long"}]
_SCORED = [
    *_VALIDATED,
    {"name": "fraud_score", "type": "double"},
    {"name": "approved", "type": "boolean"},
]


def _record(name: str, fields: list[dict[str, str]]) -> str:
    return json.dumps({"type": "record", "name": name, "namespace": "shop", "fields": fields})


SCHEMAS: Mapping[Form, str] = {
    "raw": _record("RawOrder", _RAW),
    "validated": _record("ValidatedOrder", _VALIDATED),
    "scored": _record("ScoredOrder", _SCORED),
}


class UndecodableError(ValueError):
    """Bytes that are no order; the message says why."""


def register(url: str) -> dict[Form, int]:
    """The id of each schema, which a registry that does not know it yet gives it. Blocks."""
    from confluent_kafka import schema_registry

    registry: Any = schema_registry
    client = registry.SchemaRegistryClient.new_client({"url": url})
    return {
        form: client.register_schema(f"orders-{form}-value", registry.Schema(text, "AVRO"))
        for form, text in SCHEMAS.items()
    }


@cache
def _parsed(form: Form) -> Any:
    return fastavro.parse_schema(json.loads(SCHEMAS[form]))


@dataclass(frozen=True)
class Codec:
    """Orders to bytes and back. `ids` of Avro's schemas; without them, JSON. Picklable."""

    ids: Mapping[Form, int] | None = None

    def encode(self, form: Form, order: Order) -> bytes:
        """The value of a record. The order has the fields of the form."""
        if self.ids is None:
            return json.dumps(order, separators=(",", ":")).encode()
        out = io.BytesIO()
        out.write(_FRAME.pack(0, self.ids[form]))
        fastavro.schemaless_writer(out, _parsed(form), order)
        return out.getvalue()

    def decode(self, value: bytes | None) -> Order:
        """What `encode` was given. Raises UndecodableError."""
        if not value:
            raise UndecodableError("there is no value")
        if self.ids is None:
            return _from_json(value)
        if len(value) < _FRAME.size or value[0] != 0:
            raise UndecodableError("not in the framing of Schema Registry")
        (_, schema_id) = _FRAME.unpack_from(value)
        form = next((form for form, known in self.ids.items() if known == schema_id), None)
        if form is None:
            raise UndecodableError(f"schema id {schema_id} is not one of an order")
        body = io.BytesIO(value)
        body.seek(_FRAME.size)
        try:
            order = fastavro.schemaless_reader(body, _parsed(form), None)
        except (ArithmeticError, EOFError, IndexError, UnicodeDecodeError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise UndecodableError(f"not Avro of schema id {schema_id}: {why}") from error
        if body.tell() != len(value):
            raise UndecodableError(f"{len(value) - body.tell()} bytes behind the order")
        assert isinstance(order, dict)
        return order


def _from_json(value: bytes) -> Order:
    try:
        order = json.loads(value)
    except (RecursionError, ValueError) as error:
        raise UndecodableError(f"not JSON: {error}") from error
    if not fastavro.validate(order, _parsed("raw"), raise_errors=False):
        raise UndecodableError("JSON, but no order")
    assert isinstance(order, dict)
    return order


# -- orders to try it with ----------------------------------------------------------------------

_COUNTRIES = ("DE", "FR", "GB", "JP", "US")
_CURRENCIES = {"DE": "EUR", "FR": "EUR", "GB": "GBP", "JP": "JPY", "US": "USD"}
#: One order in so many has something wrong.
_WRONG = 40


def orders(codec: Codec, seed: int, placed_us: Iterator[int]) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of orders without end: some are wrong, some are odd, a few no orders at all.

    The same seed gives the same orders, apart from their times.
    """
    chance = random.Random(seed)
    for number, placed in enumerate(placed_us):
        order = _order(number, placed, chance)
        value = codec.encode("raw", order)
        if chance.randrange(_WRONG) == 0:
            value = _spoiled(order, value, codec, chance)
        yield order["customer"].encode(), value


def _order(number: int, placed_us: int, chance: random.Random) -> Order:
    country = chance.choice(_COUNTRIES)
    is_far = chance.random() < 0.1
    return {
        "order_id": f"o-{number:09d}",
        "customer": f"c-{chance.randrange(5000)}",
        "country": country,
        "ship_to": chance.choice(_COUNTRIES) if is_far else country,
        "sku": f"sku-{chance.randrange(800)}",
        "quantity": min(1 + int(chance.expovariate(0.6)), 50),
        "unit_cents": 1 + int(chance.lognormvariate(8, 1.2)),
        "currency": _CURRENCIES[country],
        "placed_us": placed_us,
    }


def _spoiled(order: Order, value: bytes, codec: Codec, chance: random.Random) -> bytes:
    wrong: Sequence[Order] = (
        {"quantity": 0},
        {"unit_cents": -1},
        {"currency": "XXX"},
        {"sku": ""},
        {},
    )
    change = chance.choice(wrong)
    return codec.encode("raw", order | change) if change else value[: len(value) // 2]
