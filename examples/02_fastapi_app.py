"""A web service: POST /orders answers when the order is in the log, not before.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/02_fastapi_app.py
curl localhost:8000/orders --json '{"customer": "alice", "item": "tea"}'
curl localhost:8000/readyz
"""

import os
from typing import Annotated, TypeAlias

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from asyncproducer import KafkaError, Producer
from asyncproducer.integrations.fastapi import get_producer, lifespan, readiness
from asyncproducer.serializers import json_serializer

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")


class Order(BaseModel):
    customer: str
    item: str
    quantity: int = 1


class Place(BaseModel):
    partition: int
    offset: int


def make_producer() -> Producer[str, Order]:
    # A client waits for each answer: give up earlier than the two minutes that are the default.
    return Producer(
        SERVERS,
        value_serializer=json_serializer,  # takes pydantic models
        delivery_timeout_ms=10_000,
        request_timeout_ms=5_000,
    )


# Started before the first request, with the topic's metadata and connections at hand. On SIGTERM
# uvicorn finishes its requests; then what is buffered is sent, for at most 20 seconds.
app = FastAPI(lifespan=lifespan(make_producer, warm_up=["orders"], close_timeout=20))

# GET /readyz: 200 or 503, with producer.health as JSON.
app.include_router(readiness())

OrderProducer: TypeAlias = Annotated[Producer[str, Order], Depends(get_producer)]


@app.post("/orders", status_code=201)
async def create(order: Order, producer: OrderProducer) -> Place:
    # However many requests wait here at once: they share batches and one connection per broker.
    metadata = await producer.send("orders", order, key=order.customer)
    return Place(partition=metadata.partition, offset=metadata.offset)


@app.exception_handler(KafkaError)
async def unavailable(request: Request, error: KafkaError) -> JSONResponse:
    # The client learns whether it may simply try again: an order must not be placed twice.
    safe = getattr(error, "persisted", "no") == "no"
    return JSONResponse({"error": str(error), "safe_to_retry": safe}, status_code=503)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
