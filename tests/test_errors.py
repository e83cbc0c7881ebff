"""Errors as values: they are copied, sent to other processes, and raised more than once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from asyncproducer import errors
from asyncproducer.errors import (
    AbortedError,
    AuthenticationError,
    AuthorizationError,
    BatchDeliveryError,
    BrokerError,
    BrokerRejected,
    BufferTimeout,
    DeliveryError,
    DeliveryTimeout,
    ErrorCode,
    KafkaError,
    ProducerClosed,
    again,
)

#: What a delivery knows, and none of it is a default.
DELIVERY: dict[str, Any] = {
    "topic": "orders",
    "partition": 3,
    "persisted": "maybe",
    "attempts": 4,
    "elapsed": 2.5,
}

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KafkaError)
]
#: Those that are made of a text alone.
PLAIN = [kind for kind in KINDS if not issubclass(kind, (BrokerError, DeliveryError))]


def rejected() -> BrokerRejected:
    error = BrokerRejected("refused", **DELIVERY, code=ErrorCode.INVALID_RECORD)
    error.record_index = 7
    error.broker_message = "no key"
    return error


def denied(kind: type[KafkaError]) -> KafkaError:
    """With a code of its own, as a broker's answer gives it."""
    error = kind("not for you")
    error.code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return error


EXAMPLES: list[KafkaError] = [
    *(kind(f"what {kind.__name__} says") for kind in PLAIN),
    denied(AuthenticationError),
    denied(AuthorizationError),
    BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the leader moved"),
    BrokerError(ErrorCode.INVALID_REQUEST),
    BrokerError(12345, "of a version to come"),
    DeliveryError("lost", **DELIVERY),
    DeliveryError("lost", **DELIVERY, code=ErrorCode.NETWORK_EXCEPTION),
    DeliveryTimeout("late", **DELIVERY, code=ErrorCode.NOT_ENOUGH_REPLICAS),
    AbortedError("given up", **DELIVERY),
    rejected(),
]


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"pickle {n}": pickled(n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "again": again,
}
every_way = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))


def facts(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error),
        "args": error.args,
        "text": str(error),
        "attributes": vars(error),
        "code": getattr(error, "code", None),
        "retriable": getattr(error, "retriable", None),
    }


def traceback_length(error: BaseException) -> int:
    length, traceback = 0, error.__traceback__
    while traceback is not None:
        length, traceback = length + 1, traceback.tb_next
    return length


def test_there_is_an_example_of_each_error() -> None:
    assert {type(error) for error in EXAMPLES} == set(KINDS)


@every_way
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_copy_says_the_same(error: KafkaError, way: Callable[[Any], Any]) -> None:
    before = dict(vars(error))
    other = way(error)
    assert other is not error
    assert facts(other) == facts(error)
    # Its attributes are its own.
    other.code = 99
    other.remark = "mine"
    assert vars(error) == before


@every_way
def test_a_copy_of_all_errors_of_a_send_many_has_each_of_them(way: Callable[[Any], Any]) -> None:
    parts = [DeliveryTimeout("late", **DELIVERY), rejected(), BufferTimeout("full")]
    group = BatchDeliveryError("3 of 3 records", parts)
    other = way(group)
    assert other is not group
    assert type(other) is BatchDeliveryError
    assert (str(other), other.message) == (str(group), "3 of 3 records")
    assert [facts(part) for part in other.exceptions] == [facts(part) for part in parts]


class Quota(KafkaError):
    """Somebody's own error, which makes its text of what it is given."""

    def __init__(self, tenant: str, *, limit: int) -> None:
        super().__init__(f"{tenant} may not send more than {limit}")
        self.tenant = tenant
        self.limit = limit


@every_way
def test_a_copy_does_not_need_what_its_class_is_called_with(way: Callable[[Any], Any]) -> None:
    other = way(Quota("alice", limit=7))
    assert type(other) is Quota
    assert (other.tenant, other.limit) == ("alice", 7)
    assert str(other) == "alice may not send more than 7"


@pytest.mark.parametrize("cause", [None, BrokerError(ErrorCode.PRODUCER_FENCED)])
def test_again_has_the_same_cause(cause: BaseException | None) -> None:
    error = AbortedError("given up")
    error.__cause__ = cause
    assert again(error).__cause__ is cause


def test_an_error_that_is_raised_again_and_again_collects_no_tracebacks() -> None:
    error = BrokerError(ErrorCode.PRODUCER_FENCED, "there is another one")

    def raise_it() -> None:
        raise again(error)

    seen: list[BrokerError] = []
    for _ in range(100):
        with pytest.raises(BrokerError) as caught:
            raise_it()
        seen.append(caught.value)
    assert len({id(one) for one in seen}) == 100
    assert {traceback_length(one) for one in seen} == {2}
    assert error.__traceback__ is None


def test_again_leaves_the_traceback_of_the_first_time_behind() -> None:
    with pytest.raises(ProducerClosed) as caught:
        raise ProducerClosed("closed")
    assert caught.value.__traceback__ is not None
    fresh = again(caught.value)
    assert fresh.__traceback__ is None
    assert fresh.__context__ is None
