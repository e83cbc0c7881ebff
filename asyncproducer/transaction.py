"""What a transaction is to its user: a block of code, offsets, and the group they are of."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asyncproducer.errors import KafkaError, TransactionAborted
from asyncproducer.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from asyncproducer.producer import Producer

__all__ = ["Transaction", "group_metadata", "offset_map", "place"]

K = TypeVar("K")
V = TypeVar("V")

#: How librdkafka begins what `Consumer.consumer_group_metadata()` of confluent-kafka returns. The
#: generation follows as an int in the machine's own byte order, then text that ends with zeros.
_LIBRDKAFKA = b"CGMDv2:"

#: What the fields of a request have room for.
_INT32, _INT64, _TEXT_BYTES = 2**31 - 1, 2**63 - 1, 2**15 - 1


#: The blocks that this code runs in. What a block has started, a task or a callback, runs in it.
_blocks: ContextVar[tuple[object, ...]] = ContextVar("asyncproducer.transaction", default=())


class Transaction(Generic[K, V]):
    """`async with producer.transaction()`: see there."""

    def __init__(self, producer: Producer[K, V]) -> None:
        self._producer = producer
        self._number = 0
        #: Whether somebody has asked for its abort, and whether that was the block itself.
        self._is_aborted = self._knows = False

    async def __aenter__(self) -> Producer[K, V]:
        producer = self._producer
        if producer._lacks_epoch():
            try:
                await producer.abort_transaction()
            finally:
                producer._leave_abort()
        self._number = producer._begin(self._aborting)
        self._is_aborted = self._knows = False
        _blocks.set((*_blocks.get(), self))
        return producer

    def _aborting(self) -> None:
        self._is_aborted = True
        self._knows = self._knows or self in _blocks.get()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _blocks.set(tuple(block for block in _blocks.get() if block is not self))
        producer = self._producer
        if not producer._is_unfinished(self._number):
            if exc is None and self._is_aborted and not self._knows:
                raise TransactionAborted(
                    "the transaction was aborted by another task, nothing of it counts"
                )
            return  # the block has ended it
        if exc is not None:
            await self._abort_after(exc)
            return
        try:
            await producer.commit_transaction()
        except TransactionAborted as error:
            aborted = TransactionAborted(
                f"the transaction was aborted, nothing of it counts: {error.__cause__ or error}"
            )
            aborted.code = error.code
            await self._abort_after(aborted)
            raise aborted from error.__cause__

    async def _abort_after(self, error: BaseException) -> None:
        """Abort because of `error`, which is what is raised then."""
        if not self._producer._is_unfinished(self._number):
            return  # somebody else has, and the next one may be open
        try:
            await self._producer.abort_transaction()
        except KafkaError as also:
            if not self._producer._lacks_epoch():  # else it is aborted: the next one asks again
                error.add_note(f"aborting the transaction failed: {also}")
        finally:
            self._producer._leave_abort()


def group_metadata(group: Any) -> ConsumerGroupMetadata:
    """The group that offsets are of, from whatever the consumer's library says of it.

    Raises TypeError, ValueError.
    """
    if isinstance(group, str):
        return _checked(ConsumerGroupMetadata(group))
    if isinstance(group, bytes):
        return _checked(_from_librdkafka(group))
    name = getattr(group, "group_id", None)
    if not isinstance(name, str):
        raise TypeError(
            f"group is of type {type(group).__name__}: give the group's id, a "
            "ConsumerGroupMetadata, or what consumer_group_metadata() of confluent-kafka returns"
        )
    return _checked(
        ConsumerGroupMetadata(
            name,
            getattr(group, "generation_id", -1),
            getattr(group, "member_id", None) or "",
            getattr(group, "group_instance_id", None),
        )
    )


def _checked(group: ConsumerGroupMetadata) -> ConsumerGroupMetadata:
    if not group.group_id:
        raise ValueError("group has an empty id: offsets are kept under the id of their group")
    what = f"of group {group.group_id!r}"
    _check_text("group_id", group.group_id)
    _check_number(f"generation_id {what}", group.generation_id, -1, _INT32)
    _check_text(f"member_id {what}", group.member_id)
    if group.group_instance_id is not None:
        _check_text(f"group_instance_id {what}", group.group_instance_id)
    if group.generation_id > 0 and not group.member_id:
        raise ValueError(
            f"group {group.group_id!r} has generation_id={group.generation_id} and no member_id: "
            "a generation has members, give both or the group's id alone"
        )
    return group


def _check_number(what: str, value: Any, least: int, most: int) -> None:
    """What the wire has room for."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is {value!r}: it must be an int")
    if not least <= value <= most:
        raise ValueError(f"{what} is {value}: it must be from {least} to {most}")


def _check_text(what: str, value: Any) -> None:
    """What the wire has room for."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is {value!r}: it must be a str")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is {value!r}, which is no text: {error}") from None
    if size > _TEXT_BYTES:
        raise ValueError(f"{what} has {size} bytes: it must have at most {_TEXT_BYTES}")


def _from_librdkafka(data: bytes) -> ConsumerGroupMetadata:
    try:
        if not data.startswith(_LIBRDKAFKA):
            raise ValueError
        (generation,) = struct.unpack_from("=i", data, len(_LIBRDKAFKA))
        name, member, rest = data[len(_LIBRDKAFKA) + 4 :].split(b"\0", 2)
        # A byte that says whether it is null, then the text.
        instance = None if rest[:1] == b"\1" else rest[1:-1].decode()
        return ConsumerGroupMetadata(name.decode(), generation, member.decode(), instance)
    except (ValueError, struct.error):
        raise ValueError(
            f"group is {data[:20]!r}..., which is not what consumer_group_metadata() of "
            "confluent-kafka returns (CGMDv2)"
        ) from None


def offset_map(offsets: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    """Offsets by partition, from a mapping or from confluent-kafka's list of TopicPartition.

    Raises TypeError, ValueError.
    """
    if isinstance(offsets, Mapping):
        pairs = [(place(key), _offset(key, value)) for key, value in offsets.items()]
    elif isinstance(offsets, Iterable) and not isinstance(offsets, (str, bytes)):
        # Partitions that nothing was read from have a negative offset there: `position` of all
        # that is assigned is what their users give, and librdkafka leaves those out, too.
        pairs = [
            (place(each), _offset(each, each))
            for each in offsets
            if not (isinstance(getattr(each, "offset", None), int) and each.offset < 0)
        ]
    else:
        raise TypeError(
            f"offsets is of type {type(offsets).__name__}: give a mapping from TopicPartition to "
            "the offset of the next record, or a list of confluent-kafka's TopicPartition"
        )
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise ValueError(
                f"offsets has two for {key}, {found[key].offset} and {value.offset}: give one"
            )
    return found


def place(given: Any) -> TopicPartition:
    """A partition, whatever a library calls it. Raises TypeError."""
    if isinstance(given, tuple) and len(given) == 2:
        topic, partition = given
    else:
        topic, partition = getattr(given, "topic", None), getattr(given, "partition", None)
    if not isinstance(topic, str) or not isinstance(partition, int) or partition < 0:
        raise TypeError(f"{given!r} is no partition: give a TopicPartition")
    _check_text("the topic of an offset", topic)
    _check_number(f"the partition of {topic!r}", partition, 0, _INT32)
    return TopicPartition(topic, partition)


def _offset(place: Any, given: Any) -> OffsetAndMetadata:
    offset = given if isinstance(given, int) else getattr(given, "offset", None)
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"the offset of {place!r} is {given!r}: give an int or OffsetAndMetadata")
    if offset < 0:
        raise ValueError(f"the offset of {place!r} is {offset}: it cannot be less than 0")
    _check_number(f"the offset of {place!r}", offset, 0, _INT64)
    epoch = getattr(given, "leader_epoch", None)
    epoch = -1 if epoch is None else epoch
    _check_number(f"the leader epoch of {place!r}", epoch, -1, _INT32)
    metadata = getattr(given, "metadata", None) or ""
    _check_text(f"the metadata of {place!r}", metadata)
    return OffsetAndMetadata(offset, metadata, epoch)
