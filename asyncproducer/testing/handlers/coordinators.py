"""FindCoordinator (10) and InitProducerId (22)."""

from __future__ import annotations

from datetime import timedelta

from asyncproducer.errors import ErrorCode, error_name
from asyncproducer.testing.handlers.api import Call, api
from asyncproducer.testing.messages import Response
from asyncproducer.testing.state import CoordinatorKind, RequestRefused

__all__ = ["find_coordinator", "init_producer_id"]

#: `transaction.max.timeout.ms`
_MAX_TRANSACTION_TIMEOUT = timedelta(minutes=15)

_GROUP = 0
_KINDS: dict[int, CoordinatorKind] = {_GROUP: "group", 1: "transaction"}


@api(10, "find_coordinator", 0, 6)
def find_coordinator(call: Call) -> Response:
    """One key up to v3, several from v4 on."""
    if call.version < 4:
        return _coordinator(call, call.body.key)
    keys = call.body.coordinator_keys
    return {"coordinators": [{"key": key, **_coordinator(call, key)} for key in keys]}


def _coordinator(call: Call, key: str) -> Response:
    try:
        call.refuse_injected()
        kind = _KINDS.get(getattr(call.body, "key_type", _GROUP))
        if kind is None:
            raise RequestRefused(ErrorCode.INVALID_REQUEST)
        node = call.state.coordinator(kind, key)
    except RequestRefused as exc:
        return {
            "error_code": exc.code,
            "error_message": exc.message or ("" if call.version >= 4 else error_name(exc.code)),
            "node_id": -1,
            "host": "",
            "port": -1,
        }
    return {
        "error_code": ErrorCode.NONE,
        "error_message": "" if call.version >= 4 else error_name(ErrorCode.NONE),
        "node_id": node.node_id,
        "host": node.host,
        "port": node.port,
    }


@api(22, "init_producer_id", 0, 6, advertised_max_version=5)
def init_producer_id(call: Call) -> Response:
    """A producer id. PRODUCER_FENCED is INVALID_PRODUCER_EPOCH before v4.

    v6 (KIP-939) is not stable in Kafka, so it is not advertised, and two-phase commit is
    refused as it is where `transaction.two.phase.commit.enable` is off.

    Without a transactional id every request gets a new producer id at epoch 0, also one
    that names the old id: that is what TransactionCoordinator.handleInitProducerId does.
    With one, the epoch goes up by one, and older producers are fenced.
    """
    try:
        with call.effect():
            producer_id, epoch = _init_producer_id(call)
    except RequestRefused as exc:
        code = exc.code
        if code == ErrorCode.PRODUCER_FENCED and call.version < 4:
            code = ErrorCode.INVALID_PRODUCER_EPOCH
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"error_code": ErrorCode.NONE, "producer_id": producer_id, "producer_epoch": epoch}


def _init_producer_id(call: Call) -> tuple[int, int]:
    body = call.body
    producer_id: int = getattr(body, "producer_id", -1)
    epoch: int = getattr(body, "producer_epoch", -1)
    if (producer_id == -1) != (epoch == -1):
        raise RequestRefused(ErrorCode.INVALID_REQUEST)
    if body.transactional_id is None:
        return call.state.new_producer_id(), 0
    if not body.transactional_id:
        raise RequestRefused(ErrorCode.INVALID_REQUEST)
    if getattr(body, "enable2_pc", False):
        raise RequestRefused(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if getattr(body, "keep_prepared_txn", False):
        raise RequestRefused(ErrorCode.UNSUPPORTED_VERSION)
    call.check_coordinator("transaction", body.transactional_id)
    if not timedelta(0) < body.transaction_timeout <= _MAX_TRANSACTION_TIMEOUT:
        raise RequestRefused(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    expected = None if producer_id == -1 else (producer_id, epoch)
    timeout_ms = body.transaction_timeout // timedelta(milliseconds=1)
    return call.transactions.initialize(body.transactional_id, timeout_ms, expected)
