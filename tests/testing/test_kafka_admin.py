"""What the test cluster's questions do when a broker misbehaves; the answers of real brokers are
checked in tests/kafka/test_cluster.py."""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v12.response import (
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from kio.schema.response_header.v1.header import ResponseHeader
from kio.schema.types import BrokerId, TopicName
from kio.serial import entity_writer
from kio.static.primitive import i32, i32Timedelta

from asyncproducer.testing import kafka_admin
from asyncproducer.testing.kafka_admin import Admin, AdminError

Broker = Callable[[socket.socket, int], None]
Serve = Callable[[Broker], tuple[str, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a one-connection broker: it is given the connection and the correlation id."""
    with ExitStack() as stack:

        def start(broker: Broker) -> tuple[str, int]:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                connection, _ = listener.accept()
                with connection:
                    request = connection.recv(65536)
                    (correlation_id,) = struct.unpack_from(">i", request, 8)
                    broker(connection, correlation_id)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            host, port = listener.getsockname()
            return host, port

        yield start


def answer_metadata(connection: socket.socket, correlation_id: int) -> None:
    partition = MetadataResponsePartition(
        error_code=ErrorCode.leader_not_available, partition_index=i32(0), leader_id=BrokerId(-1)
    )
    topic = MetadataResponseTopic(
        error_code=ErrorCode.none, name=TopicName("t"), topic_id=None, partitions=(partition,)
    )
    response = MetadataResponse(
        throttle_time=i32Timedelta.parse(timedelta()),
        brokers=(),
        topics=(topic,),
    )
    body = io.BytesIO()
    entity_writer(ResponseHeader)(body, ResponseHeader(correlation_id=i32(correlation_id)))
    entity_writer(MetadataResponse)(body, response)
    connection.sendall(struct.pack(">i", body.tell()) + body.getvalue())


def hang_up(connection: socket.socket, correlation_id: int) -> None:
    """Closes after the request."""


def test_the_next_node_is_asked_when_one_hangs_up(serve: Serve) -> None:
    admin = Admin({1: serve(hang_up), 2: serve(answer_metadata)})
    assert admin.view("t").controller_id == -1


def test_a_node_that_was_named_is_the_only_one_asked(serve: Serve) -> None:
    admin = Admin({1: serve(hang_up), 2: ("127.0.0.1", 1)})
    with pytest.raises(ConnectionResetError):
        admin.view("t", node=1)


def test_an_answer_to_another_question_is_refused(serve: Serve) -> None:
    admin = Admin({1: serve(lambda c, correlation_id: answer_metadata(c, correlation_id + 1))})
    with pytest.raises(ConnectionError, match=r"answer \d+ to request \d+"):
        admin.view("t")


class Dripping:
    """A connection on which a byte comes every 30 ms, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answer = struct.pack(">i", 1000)
        #: How long each call was ready to wait.
        self.patience: list[float] = []

    def __enter__(self) -> Dripping:
        return self

    def __exit__(self, *_: object) -> None: ...

    def settimeout(self, value: float) -> None:
        self.patience.append(round(value, 9))

    def sendall(self, data: bytes) -> None: ...

    def recv(self, size: int) -> bytes:
        self.now += 0.03
        byte, self.answer = self.answer[:1], self.answer[1:]
        return byte or b"x"


def test_dripping_bytes_do_not_extend_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes in time, and the answer does not."""
    node = Dripping()
    monkeypatch.setattr(kafka_admin, "time", SimpleNamespace(monotonic=lambda: node.now))
    monkeypatch.setattr(
        kafka_admin, "socket", SimpleNamespace(create_connection=lambda address, timeout: node)
    )
    with pytest.raises(TimeoutError, match="did not answer in time"):
        Admin({1: ("127.0.0.1", 1)}, timeout_s=0.2).view("t")
    # The request, and then each byte: four of the size, three of what should follow.
    assert node.patience == [0.2, 0.2, 0.17, 0.14, 0.11, 0.08, 0.05, 0.02]


def test_without_a_leader_there_is_no_end_offset_yet(serve: Serve) -> None:
    with pytest.raises(AdminError, match="t-0: leader_not_available") as caught:
        Admin({1: serve(answer_metadata)}).end_offsets("t")
    assert caught.value.retriable


def test_without_nodes_there_is_nobody_to_ask() -> None:
    with pytest.raises(OSError, match="no node to ask"):
        Admin({}).view()
