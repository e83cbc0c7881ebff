"""From what users give to what the wire takes: keys, values, headers, timestamps, partitioners.

Everything here is checked before a record is buffered, and says in its errors what
was given and what is wanted.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from asyncproducer.core.partitioner import Murmur3Partitioner, RoundRobinPartitioner
from asyncproducer.errors import (
    ConfigError,
    InvalidTimestamp,
    RecordError,
    SerializationError,
)

if TYPE_CHECKING:
    from asyncproducer.plugins import Partitioner, TopicView
    from asyncproducer.records import Header

__all__ = [
    "MAX_TIMESTAMP",
    "RecordSerializer",
    "cancellations",
    "header_list",
    "partitioner_of",
    "timestamp_ms",
    "to_bytes",
    "unchanging",
]


#: What can be sent as it is, beside None.
_SENDABLE = (bytes, bytearray, memoryview, str)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

#: What the record format has room for.
MAX_TIMESTAMP = 2**63 - 1


class _FunctionPartitioner:
    """A plain function as a partitioner."""

    def __init__(self, function: Callable[[TopicView, bytes | None, bytes | None], int]) -> None:
        self.partition = function


def partitioner_of(choice: Any) -> Partitioner | None:
    """The partitioner of the option `partitioner`; None for the built-in one."""
    if choice in ("default", "murmur2"):
        return None
    if choice == "round_robin":
        return RoundRobinPartitioner()
    if choice == "murmur3":
        return Murmur3Partitioner()
    if hasattr(choice, "partition"):
        partitioner: Partitioner = choice
        return partitioner
    return _FunctionPartitioner(choice)


class RecordSerializer:
    """A user's serializer, called in one way; its errors are SerializationErrors."""

    __slots__ = ("_wide", "function", "is_async", "what")

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        wide = _takes_three(function) if callable(function) else None
        if wide is None:
            raise ConfigError(
                f"{what}_serializer={function!r}: must be a function value -> bytes, or "
                f"(topic, value, headers) -> bytes{_signature_of(function)}"
            )
        self.function = function
        self.what = what
        self._wide = wide
        #: Known to be. A function that turns out to return an awaitable is treated the same.
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    @staticmethod
    def of(function: Callable[..., Any] | None, what: str) -> RecordSerializer | None:
        """The serializer of the argument `key_serializer` or `value_serializer`."""
        return None if function is None else RecordSerializer(function, what)

    def __call__(self, topic: str, value: Any, headers: list[Header]) -> Any:
        """What the user's function returns; an awaitable if it is async."""
        if value is None and not self._wide:
            return None
        try:
            result = self.function(topic, value, headers) if self._wide else self.function(value)
        except RecordError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            # Also an error of ours, of another producer perhaps, and the cancellation of another
            # task: nobody has cancelled this one, which waits for nothing.
            raise self._failed(topic, error) from error
        return result if type(result) is bytes else self._checked(topic, result, or_awaitable=True)

    async def awaited(self, topic: str, result: Any) -> Any:
        """What an async serializer returns in the end."""
        before = cancellations()
        try:
            data = await result
        except RecordError:
            raise
        except asyncio.CancelledError as error:
            if cancellations() > before:
                raise
            # Of somebody whom the serializer has waited for.
            raise self._failed(topic, error) from error
        except Exception as error:
            raise self._failed(topic, error) from error
        return self._checked(topic, data)

    def _checked(self, topic: str, result: Any, *, or_awaitable: bool = False) -> Any:
        if result is None or isinstance(result, _SENDABLE):
            return unchanging(result)  # its owner may use it again, for the value perhaps
        if or_awaitable and inspect.isawaitable(result):
            return result
        raise SerializationError(
            f"the {self.what} for topic {topic} is of type {type(result).__name__}, as its "
            f"{self.what}_serializer returned it: it must return bytes, bytearray, memoryview, "
            "str or None"
        )

    def _failed(self, topic: str, error: BaseException) -> SerializationError:
        return SerializationError(
            f"the {self.what} for topic {topic} could not be serialized: "
            f"{type(error).__name__}: {error}"
        )


def cancellations() -> int:
    """How many cancellations the task that runs has met. It may have swallowed some, and those
    that it was only asked for come at its next await."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling() - getattr(task, "_must_cancel", False)


def _takes_three(function: Callable[..., Any]) -> bool | None:
    """Whether it wants (topic, value, headers), not the value alone. None: it takes neither."""
    try:
        signature = inspect.signature(function)
        # A wrapper may say that it is what it wraps, and take other arguments.
        own = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return False  # a builtin: value -> bytes
    required = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if len(required) == 3 and _takes(own, 3):
        return True
    if _takes(signature, 1) or _takes(own, 1):
        return False
    return True if _takes(signature, 3) or _takes(own, 3) else None


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _signature_of(function: Any) -> str:
    return f"; it is called as {inspect.signature(function)}" if callable(function) else ""


def unchanging(data: Any) -> Any:
    """A copy of bytes that can be changed: of what is to be read later."""
    return _copied(data) if isinstance(data, (bytearray, memoryview)) else data


def _copied(data: bytes | bytearray | memoryview) -> bytes:
    try:
        return bytes(data)
    except ValueError as error:  # a view that was released
        raise SerializationError(f"a {type(data).__name__} cannot be read: {error}") from error


def to_bytes(topic: str, what: str, data: Any) -> bytes:
    """What can be sent without a serializer, as bytes.

    A copy of what can be changed: the record may wait in line while its owner goes on.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _copied(data)
    if isinstance(data, str):
        try:
            # Not what a class of its own makes of it: what is compiled takes it for bytes.
            return str.encode(data)
        except UnicodeEncodeError as error:
            raise SerializationError(
                f"the {what} for topic {topic} is not UTF-8: {error}"
            ) from error
    raise SerializationError(
        f"the {what} for topic {topic} is of type {type(data).__name__}: give bytes, bytearray, "
        f"memoryview, str or None, or give the Producer a {what}_serializer"
    )


def header_list(headers: Any) -> list[Header]:
    """Headers as pairs of str and bytes or None. Raises SerializationError with the place."""
    if isinstance(headers, (str, bytes)):
        raise SerializationError(
            f"headers={headers!r}: give a mapping, or pairs of a name and a value"
        )
    items = headers.items() if isinstance(headers, Mapping) else headers
    result: list[Header] = []
    try:
        for index, pair in enumerate(items):
            if type(pair) is tuple and len(pair) == 2:
                name, value = pair
                if type(name) is str and type(value) is bytes and name.isascii():
                    result.append(pair)  # as nearly all are
                    continue
            if isinstance(pair, (str, bytes)) or len(pair) != 2:
                raise SerializationError(
                    f"header {index} is {pair!r}: must be a pair of name and value"
                )
            name, value = pair
            if not isinstance(name, str):
                raise SerializationError(f"header {index} has the name {name!r}: must be a str")
            if not name.isascii():
                _utf8(name, index)  # raises now what encoding it later would raise
            if isinstance(value, str):
                value = _utf8(value, index)
            elif isinstance(value, (bytearray, memoryview)):
                value = _copied(value)
            elif value is not None and not isinstance(value, bytes):
                raise SerializationError(
                    f"header {index} ({name!r}) has a value of type {type(value).__name__}: "
                    "must be bytes, str or None"
                )
            result.append((name, value))
    except TypeError as error:
        raise SerializationError(
            f"headers of type {type(headers).__name__}: give a mapping, or pairs"
        ) from error
    return result


def _utf8(text: str, index: int) -> bytes:
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:
        raise SerializationError(f"header {index} is not UTF-8: {error}") from error


def timestamp_ms(timestamp: Any) -> int:
    """An int or an aware datetime as ms since 1970. Raises InvalidTimestamp."""
    if isinstance(timestamp, datetime):
        if timestamp.tzinfo is None or timestamp.utcoffset() is None:
            raise InvalidTimestamp(
                f"timestamp {timestamp!r} has no time zone: use an aware datetime, "
                "for example datetime.now(timezone.utc)"
            )
        # What is less than a millisecond is cut off, as from the times of tables. The difference of
        # other libraries' datetimes may be one of theirs, which divides in another way.
        timestamp = datetime.__sub__(timestamp, _EPOCH) // _MILLISECOND
    if type(timestamp) is not int:
        raise InvalidTimestamp(
            f"timestamp {timestamp!r}: must be an int (ms since 1970) or an aware datetime"
        )
    if timestamp < 0:
        raise InvalidTimestamp(f"timestamp {timestamp}: must not be before 1970")
    if timestamp > MAX_TIMESTAMP:
        raise InvalidTimestamp(f"timestamp {timestamp}: must be ms since 1970, in 63 bits")
    return timestamp
