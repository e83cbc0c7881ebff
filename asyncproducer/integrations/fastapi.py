"""A producer in a FastAPI (or Starlette) application: lifespan, dependency, readiness.

    app = FastAPI(lifespan=lifespan(Producer.from_env, warm_up=["orders"]))
    app.include_router(readiness())

    @app.post("/orders")
    async def create(order: Order, producer: Annotated[Producer, Depends(get_producer)]): ...

The producer lies in the lifespan state (`request.state.producer`), which the server
hands to each request: uvicorn and hypercorn do. So it belongs to the event loop that
serves, and every worker process has its own.

In your tests, a producer of the test takes its place without any lifespan:
`app.dependency_overrides[get_producer] = lambda: producer`. In virtual time give an
`async def` instead: FastAPI calls plain functions in threads, which have a time of their own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse

from asyncproducer.producer import Producer, Unset

__all__ = ["get_producer", "lifespan", "readiness"]

logger = logging.getLogger("asyncproducer.integrations.fastapi")


def lifespan(
    make_producer: Callable[[], Producer[Any, Any]],
    *,
    warm_up: Sequence[str] = (),
    close_timeout: float | Unset | None = Unset.CLOSE_TIMEOUT,
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """A lifespan for `FastAPI(lifespan=...)`: a started producer, closed at the end.

    `make_producer` is called at each start of the application, since a closed producer
    cannot be started again. `warm_up` names topics whose metadata and connections are
    there before the first request. When no broker can be reached, or a topic is not
    there, the application does not start. At the end what is buffered is sent, for at
    most `close_timeout` seconds (else the producer's own): less than your platform waits
    before it kills.

    With a lifespan of your own: `async with lifespan(make)(app) as state: yield state | mine`.
    """

    @asynccontextmanager
    async def manage(app: Any) -> AsyncIterator[dict[str, Any]]:
        producer = make_producer()
        try:
            await producer.start()
            await producer.warm_up(*warm_up)
            yield {"producer": producer}
        finally:
            report = await producer.close(close_timeout)
            if not report.clean:
                logger.error(
                    "%d records were not acknowledged within %.1f s at shutdown and were given up",
                    report.aborted,
                    report.elapsed,
                )

    return manage


async def get_producer(connection: HTTPConnection) -> Producer[Any, Any]:
    """The dependency: the application's producer, for HTTP routes and WebSockets.

    Never waits. Raises RuntimeError where no `lifespan` of ours has put one into the
    lifespan state.
    """
    producer: Producer[Any, Any] | None = getattr(connection.state, "producer", None)
    if producer is None:
        raise RuntimeError(
            "there is no producer in the lifespan state: use FastAPI(lifespan=lifespan(...)) and "
            "a server that runs lifespans; in tests, app.dependency_overrides[get_producer]"
        )
    return producer


def readiness(path: str = "/readyz") -> APIRouter:
    """A router with one route: `producer.health` as JSON, with 200 when it is ready, else 503."""
    router = APIRouter()

    @router.get(path, include_in_schema=False)
    async def ready(
        producer: Annotated[Producer[Any, Any], Depends(get_producer)],
    ) -> JSONResponse:
        health = producer.health
        return JSONResponse(health._asdict(), status_code=200 if health.ready else 503)

    return router
