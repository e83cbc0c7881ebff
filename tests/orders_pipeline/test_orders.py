"""How orders are written: our framing against that of the registry's own serializer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from orders_pipeline.orders import MOCK, SCHEMAS, Codec, Order, UndecodableError, orders, register

AVRO = Codec({"raw": 7, "validated": 258, "scored": 70_000})
JSON = Codec()

ORDER: Order = {
    "order_id": "o-1",
    "customer": "c-1",
    "country": "DE",
    "ship_to": "FR",
    "sku": "sku-1",
    "quantity": 3,
    "unit_cents": 250,
    "currency": "EUR",
    "placed_us": 1_700_000_000_000_000,
}
SCORED: Order = ORDER | {"total_cents": 750, "fraud_score": 0.25, "approved": True}


@pytest.mark.parametrize("codec", [AVRO, JSON], ids=["avro", "json"])
def test_orders_come_back_as_they_were(codec: Codec) -> None:
    assert codec.decode(codec.encode("raw", ORDER)) == ORDER
    assert codec.decode(codec.encode("scored", SCORED)) == SCORED


def test_avro_begins_with_a_zero_and_the_id_of_its_schema() -> None:
    assert AVRO.encode("validated", SCORED)[:5] == b"\x00\x00\x00\x01\x02"
    assert AVRO.encode("scored", SCORED)[:5] == b"\x00\x00\x01\x11\x70"


def test_the_registry_gives_each_schema_an_id_and_keeps_it() -> None:
    ids = register(MOCK)
    assert sorted(ids) == sorted(SCHEMAS)
    assert len(set(ids.values())) == len(SCHEMAS)


def test_confluents_serializer_writes_and_reads_the_same() -> None:
    from confluent_kafka import schema_registry
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    registry: Any = schema_registry
    client = registry.SchemaRegistryClient.new_client({"url": MOCK})
    schema_id = client.register_schema("other-value", registry.Schema(SCHEMAS["raw"], "AVRO"))
    ours = Codec({"raw": schema_id}).encode("raw", ORDER)
    context = SerializationContext("other", MessageField.VALUE)
    assert AvroSerializer(client, SCHEMAS["raw"])(ORDER, context) == ours
    assert AvroDeserializer(client)(ours, context) == ORDER


@pytest.mark.parametrize(
    ("codec", "value", "why"),
    [
        (AVRO, None, "no value"),
        (AVRO, b"", "no value"),
        (AVRO, b"\x00\x00", "framing"),
        (AVRO, b"\x01" + AVRO.encode("raw", ORDER)[1:], "framing"),
        (AVRO, b"\x00\x00\x00\x00\x09abc", "schema id 9 "),
        (AVRO, AVRO.encode("raw", ORDER)[:20], "not Avro of schema id 7: "),
        (AVRO, AVRO.encode("raw", ORDER) + b"xx", "2 bytes behind"),
        (JSON, b"{", "not JSON"),
        (JSON, b"\xff", "not JSON"),
        (JSON, b"[" * 200_000, "not JSON"),
        (JSON, b"[1]", "no order"),
        (JSON, json.dumps(ORDER | {"quantity": "3"}).encode(), "no order"),
        (JSON, json.dumps({"order_id": "o-1"}).encode(), "no order"),
    ],
)
def test_what_is_no_order_is_told_why(codec: Codec, value: bytes | None, why: str) -> None:
    with pytest.raises(UndecodableError, match=why):
        codec.decode(value)


@pytest.mark.parametrize("end", range(len(AVRO.encode("raw", ORDER))))
def test_an_order_that_ends_anywhere_is_no_order(end: int) -> None:
    with pytest.raises(UndecodableError):
        AVRO.decode(AVRO.encode("raw", ORDER)[:end])


def test_the_same_seed_gives_the_same_orders() -> None:
    first, again, other = (
        list(itertools.islice(orders(AVRO, seed, itertools.count(1)), 200)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
