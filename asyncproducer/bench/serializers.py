"""What turns the documents of a case into bytes: the same function for all peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from asyncproducer.bench.workloads import Case
from asyncproducer.serializers import json_serializer, msgpack_serializer

__all__ = ["Serialize", "serializer_of"]

Serialize: TypeAlias = Callable[[Any], bytes]

_SCHEMA = {
    "type": "record",
    "name": "Document",
    "fields": [{"name": "id", "type": "long"}, {"name": "text", "type": "string"}],
}


def serializer_of(case: Case, topic: str) -> Serialize | None:
    """The serializer of the values of `topic`; None where they are bytes.

    Raises ImportError if its library is not installed.
    """
    if case.serializer == "avro":
        return _avro(topic)
    return {"": None, "json": json_serializer, "msgpack": msgpack_serializer}[case.serializer]


def _avro(topic: str) -> Serialize:
    """Confluent's, with a registry in this process, which is asked before the first value."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    registry = SchemaRegistryClient.new_client({"url": "mock://bench"})
    serialize = AvroSerializer(registry, json.dumps(_SCHEMA))
    context = SerializationContext(topic, MessageField.VALUE)

    def serializer(value: Any) -> bytes:
        encoded: bytes = serialize(value, context)
        return encoded

    return serializer
