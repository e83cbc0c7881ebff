from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI

from asyncproducer import ConnectionFailed, MetadataTimeout, Producer, ProducerClosed
from asyncproducer.integrations.fastapi import get_producer, lifespan, readiness
from asyncproducer.testing import EmbeddedCluster

pytestmark = pytest.mark.virtual_time

Message = MutableMapping[str, Any]


class App:
    """A small application, its producers, and a client for it."""

    def __init__(
        self, cluster: EmbeddedCluster, producer: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self._options = producer or {}
        self.made: list[Producer[Any, Any]] = []
        self.fastapi = FastAPI(lifespan=lifespan(self._make, **options))
        self.fastapi.include_router(readiness())
        self.fastapi.post("/orders")(_create)
        self._cluster = cluster

    def _make(self) -> Producer[Any, Any]:
        producer: Producer[Any, Any] = Producer(
            self._cluster.bootstrap_servers,
            connector=self._cluster.connector,
            max_block_ms=1000,
            **self._options,
        )
        self.made.append(producer)
        return producer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """What a server does: run the lifespan, and hand its state to each request."""
        async with self.fastapi.router.lifespan_context(self.fastapi) as state:

            async def served(
                scope: Message,
                receive: Callable[[], Awaitable[Message]],
                send: Callable[[Message], Awaitable[None]],
            ) -> None:
                await self.fastapi({**scope, "state": dict(state or {})}, receive, send)

            async with _client(served) as client:
                yield client


async def _create(
    order: dict[str, str], producer: Annotated[Producer[Any, Any], Depends(get_producer)]
) -> dict[str, int]:
    metadata = await producer.send("t4", order["item"], key=order["id"])
    return {"partition": metadata.partition, "offset": metadata.offset}


def _client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_route_gets_the_producer_and_answers_with_the_acknowledgement(
    cluster: EmbeddedCluster,
) -> None:
    async with App(cluster).client() as client:
        response = await client.post("/orders", json={"id": "1", "item": "tea"})
    place = response.json()
    (record,) = cluster.records("t4", place["partition"])
    assert record.offset == place["offset"] == 0
    assert (record.key, record.value) == (b"1", b"tea")


async def test_topics_are_warm_before_the_first_request(cluster: EmbeddedCluster) -> None:
    async with App(cluster, warm_up=["t4"]).client() as client:
        cluster.inject(api="metadata", no_answer=True, times=None)
        assert (await client.post("/orders", json={"id": "1", "item": "tea"})).status_code == 200


async def test_the_application_does_not_start_without_a_broker(cluster: EmbeddedCluster) -> None:
    app = App(cluster)
    for node in cluster.node_ids:
        await cluster.stop_broker(node)
    with pytest.raises(ConnectionFailed):
        async with app.client():
            pass
    assert app.made[0].health.state == "closed"


async def test_the_application_does_not_start_without_its_topic(cluster: EmbeddedCluster) -> None:
    app = App(cluster, warm_up=["nowhere"])
    with pytest.raises(MetadataTimeout, match="nowhere"):
        async with app.client():
            pass
    assert app.made[0].health.state == "closed"


async def test_an_application_can_start_again(cluster: EmbeddedCluster) -> None:
    app = App(cluster)
    for _ in range(2):
        async with app.client() as client:
            assert (await client.post("/orders", json={"id": "1", "item": "x"})).is_success
    assert [producer.health.state for producer in app.made] == ["closed", "closed"]


async def test_readiness_is_the_producers_health(cluster: EmbeddedCluster) -> None:
    app = App(cluster, warm_up=["t4"])
    async with app.client() as client:
        response = await client.get("/readyz")
        assert (response.status_code, response.json()["problem"]) == (200, None)
        assert response.json()["brokers_connected"] == 2
        await app.made[0].close()
        response = await client.get("/readyz")
        assert (response.status_code, response.json()["state"]) == (503, "closed")


async def test_readiness_may_have_another_path_and_is_not_in_the_schema(
    cluster: EmbeddedCluster,
) -> None:
    app = App(cluster)
    app.fastapi.include_router(readiness("/health/kafka"))
    async with app.client() as client:
        assert (await client.get("/health/kafka")).status_code in (200, 503)
        assert list((await client.get("/openapi.json")).json()["paths"]) == ["/orders"]


async def test_the_end_of_the_application_sends_what_is_buffered(
    cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(cluster)
    async with app.client():
        delivery = await app.made[0].enqueue("t", "last words")
        assert not delivery.done()
    assert [r.value for r in cluster.records("t")] == [b"last words"]
    assert (await delivery).offset == 0
    assert not caplog.records


async def test_the_end_of_the_application_is_bounded_and_tells_what_it_gave_up(
    cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(cluster, close_timeout=2.0, warm_up=["t"])
    async with app.client():
        cluster.inject(api="produce", no_answer=True, times=None)
        delivery = await app.made[0].enqueue("t", "lost words")
    report = await app.made[0].close()
    assert report.aborted == 1
    assert report.elapsed == pytest.approx(2.0)
    assert delivery.exception() is not None
    assert "1 records were not acknowledged within 2.0 s" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


@pytest.mark.parametrize(
    ("options", "takes"), [({}, 3.0), ({"close_timeout": 2.0}, 2.0), ({"close_timeout": None}, 9.0)]
)
async def test_the_end_takes_as_long_as_the_lifespan_says_else_as_the_producer(
    cluster: EmbeddedCluster, options: dict[str, Any], takes: float
) -> None:
    producer = {"close_timeout": 3.0, "delivery_timeout_ms": 9000, "request_timeout_ms": 8000}
    app = App(cluster, producer, warm_up=["t"], **options)
    async with app.client():
        cluster.inject(api="produce", no_answer=True, times=None)
        delivery = await app.made[0].enqueue("t", "lost words")
    assert (await app.made[0].close()).elapsed == pytest.approx(takes, abs=0.01)
    assert delivery.exception() is not None


async def test_a_producer_of_a_test_takes_its_place_without_a_lifespan(
    cluster: EmbeddedCluster, new_producer: Callable[..., Any]
) -> None:
    app = App(cluster)
    producer = new_producer()
    await producer.start()
    app.fastapi.dependency_overrides[get_producer] = lambda: producer
    async with _client(app.fastapi) as client:
        assert (await client.post("/orders", json={"id": "1", "item": "x"})).is_success
    assert app.made == []


async def test_without_a_lifespan_the_error_says_what_to_do(cluster: EmbeddedCluster) -> None:
    async with _client(App(cluster).fastapi) as client:
        with pytest.raises(RuntimeError, match=r"FastAPI\(lifespan=lifespan\(\.\.\.\)\)"):
            await client.get("/readyz")


async def test_it_goes_into_a_lifespan_of_the_users(cluster: EmbeddedCluster) -> None:
    app = App(cluster)
    inner = app.fastapi.router.lifespan_context

    @asynccontextmanager
    async def own(fastapi: Any) -> AsyncIterator[dict[str, Any]]:
        async with inner(fastapi) as state:
            yield {**(state or {}), "database": "db"}

    async with own(app.fastapi) as state:
        assert state == {"producer": app.made[0], "database": "db"}
    with pytest.raises(ProducerClosed):
        await app.made[0].send("t", b"x")
