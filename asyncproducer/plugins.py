"""What users may implement: serializers, partitioners, interceptors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from asyncproducer.records import Header, Record, RecordMetadata

__all__ = ["Interceptor", "Partitioner", "Serializer", "SerializerFunction", "TopicView"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Serializer(Protocol[T_contra]):
    """Turns a key or a value into bytes.

    A plain function `f(value) -> bytes` does as well: wrap nothing, pass it as it is.
    A serializer that needs `topic` or wants to add headers takes the three arguments;
    `headers` is a list that it may append `(name, bytes)` pairs to.
    """

    def __call__(
        self, topic: str, value: T_contra, headers: list[Header], /
    ) -> bytes | Awaitable[bytes | None] | None:
        """The bytes to send, None for null."""
        ...


#: What `key_serializer=` and `value_serializer=` accept: `value -> bytes`, or the three
#: arguments of Serializer; plain or async.
SerializerFunction: TypeAlias = Callable[[T], Any] | Callable[[str, T, list["Header"]], Any]


class TopicView(Protocol):
    """What a partitioner may know of a topic."""

    @property
    def name(self) -> str:
        """The topic."""
        ...

    @property
    def partition_count(self) -> int:
        """How many partitions the topic has."""
        ...

    @property
    def available(self) -> Sequence[int]:
        """The partitions that have a leader now, ascending."""
        ...


@runtime_checkable
class Partitioner(Protocol):
    """Chooses the partition of a record that names none.

    Called once per record with the serialized key and value, never concurrently.
    A number outside `range(topic.partition_count)` is refused with InvalidPartition.
    """

    def partition(self, topic: TopicView, key: bytes | None, value: bytes | None, /) -> int:
        """The partition of a record with these serialized bytes."""
        ...


class Interceptor:
    """Sees each record on its way in, and each outcome (Java: ProducerInterceptor).

    Override what you need. Exceptions raised here are logged and do not disturb the
    send. Both methods run on the event loop: keep them short.
    """

    def on_send(self, record: Record) -> Record:
        """Return the record to send: this one or another. Called before serialization."""
        return record

    def on_acknowledgement(
        self,
        metadata: RecordMetadata,
        exception: BaseException | None,
        headers: tuple[Header, ...],
    ) -> None:
        """Called exactly once per record. On failure `metadata` has offset and sizes -1.

        `headers` are those that the record had after `on_send` and serialization, also of one
        that was refused; none if they were no headers.
        """

    def close(self) -> None:
        """Called once, when the producer is closed."""
