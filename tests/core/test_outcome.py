from __future__ import annotations

import pytest

from asyncproducer.core.outcome import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    OFFSET_FETCH,
    PRODUCE,
    TRANSACTIONAL,
    TXN_OFFSET_COMMIT,
    Action,
    Decision,
    TxnAction,
    decide,
    rule_for,
    txn_action_for,
)
from asyncproducer.errors import ErrorCode, Persisted

E = ErrorCode
ACK, RETRY, SPLIT, FAIL, FATAL = (
    Action.ACKNOWLEDGE,
    Action.RETRY,
    Action.SPLIT,
    Action.FAIL,
    Action.FATAL,
)


def ask(
    code: int,
    *,
    records: int = 5,
    attempts: int = 0,
    retries: int = 2**31 - 1,
    expired: bool = False,
    idempotent: bool = True,
) -> Decision:
    return decide(
        code,
        records=records,
        attempts=attempts,
        retries=retries,
        expired=expired,
        idempotent=idempotent,
    )


NO: Persisted = "no"
MAYBE: Persisted = "maybe"
YES: Persisted = "yes"

#: code, without idempotence, with it, asks for metadata, is in the log: spec 7.2.
TABLE = [
    (E.NONE, ACK, ACK, False, YES),
    (E.UNKNOWN_SERVER_ERROR, FAIL, FAIL, False, MAYBE),
    (E.CORRUPT_MESSAGE, RETRY, RETRY, False, NO),
    (E.UNKNOWN_TOPIC_OR_PARTITION, RETRY, RETRY, True, NO),
    (E.LEADER_NOT_AVAILABLE, RETRY, RETRY, True, NO),
    (E.REPLICA_NOT_AVAILABLE, RETRY, RETRY, True, NO),
    (E.NETWORK_EXCEPTION, RETRY, RETRY, True, MAYBE),
    (E.KAFKA_STORAGE_ERROR, RETRY, RETRY, True, MAYBE),
    (E.LISTENER_NOT_FOUND, RETRY, RETRY, True, NO),
    (E.NOT_LEADER_OR_FOLLOWER, RETRY, RETRY, True, MAYBE),
    (E.FENCED_LEADER_EPOCH, RETRY, RETRY, True, NO),
    (E.UNKNOWN_LEADER_EPOCH, RETRY, RETRY, False, NO),
    (E.REQUEST_TIMED_OUT, RETRY, RETRY, False, MAYBE),
    (E.MESSAGE_TOO_LARGE, SPLIT, SPLIT, False, NO),
    (E.RECORD_LIST_TOO_LARGE, FAIL, FAIL, False, NO),
    (E.INVALID_TOPIC_EXCEPTION, FAIL, FAIL, False, NO),
    (E.NOT_ENOUGH_REPLICAS, RETRY, RETRY, False, NO),
    (E.NOT_ENOUGH_REPLICAS_AFTER_APPEND, RETRY, RETRY, False, YES),
    (E.INVALID_REQUIRED_ACKS, FAIL, FAIL, False, NO),
    (E.TOPIC_AUTHORIZATION_FAILED, FAIL, FAIL, False, NO),
    (E.CLUSTER_AUTHORIZATION_FAILED, FAIL, FATAL, False, NO),
    (E.INVALID_TIMESTAMP, FAIL, FAIL, False, NO),
    (E.INVALID_RECORD, FAIL, FAIL, False, NO),
    (E.POLICY_VIOLATION, FAIL, FAIL, False, NO),
    (E.INVALID_REQUEST, FAIL, FAIL, False, NO),
    (E.UNSUPPORTED_COMPRESSION_TYPE, FAIL, FAIL, False, NO),
    (E.UNSUPPORTED_FOR_MESSAGE_FORMAT, FAIL, FAIL, False, NO),
    (E.UNSUPPORTED_VERSION, FAIL, FATAL, False, NO),
    (E.OUT_OF_ORDER_SEQUENCE_NUMBER, FAIL, RETRY, False, NO),
    (E.DUPLICATE_SEQUENCE_NUMBER, ACK, ACK, False, YES),
    (E.INVALID_PRODUCER_EPOCH, FAIL, FAIL, False, NO),
    (E.INVALID_TXN_STATE, FAIL, FAIL, False, NO),
    (E.INVALID_PRODUCER_ID_MAPPING, FAIL, FATAL, False, NO),
    (E.CONCURRENT_TRANSACTIONS, RETRY, RETRY, False, NO),
    (E.COORDINATOR_LOAD_IN_PROGRESS, RETRY, RETRY, False, NO),
    (E.COORDINATOR_NOT_AVAILABLE, RETRY, RETRY, False, NO),
    (E.NOT_COORDINATOR, RETRY, RETRY, False, NO),
    (E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, FAIL, FATAL, False, NO),
    (E.UNKNOWN_PRODUCER_ID, FAIL, RETRY, False, NO),
    (E.THROTTLING_QUOTA_EXCEEDED, RETRY, RETRY, False, NO),
    (E.PRODUCER_FENCED, FAIL, FATAL, False, NO),
    (E.UNKNOWN_TOPIC_ID, RETRY, RETRY, True, NO),
    (E.INCONSISTENT_TOPIC_ID, RETRY, RETRY, True, NO),
    (E.TRANSACTION_ABORTABLE, FAIL, FAIL, False, NO),
]


@pytest.mark.parametrize(
    ("code", "plain", "idempotent", "refresh", "persisted"),
    TABLE,
    ids=[row[0].name for row in TABLE],
)
def test_what_a_code_asks_for(
    code: ErrorCode, plain: Action, idempotent: Action, refresh: bool, persisted: Persisted
) -> None:
    """Spec 7.2; SI-20, SI-21: which codes end the producer, and which only the batch.

    `persisted` is beyond Java: the leader may have appended and then resigned, so the
    delivery may not be told "no" (DelayedProduce).
    """
    without = ask(code, idempotent=False)
    with_it = ask(code)
    assert (without.action, with_it.action) == (plain, idempotent)
    assert without[1:3] == with_it[1:3] == (refresh, persisted)


def test_every_code_of_kafka_has_its_rule() -> None:
    assert set(PRODUCE) == {int(code) for code in ErrorCode}


def test_after_a_code_that_no_broker_gives_to_a_produce_request_nobody_knows() -> None:
    listed = {row[0] for row in TABLE}
    others = [code for code in ErrorCode if code not in listed]
    assert {rule_for(code).persisted for code in others} == {"maybe", "no"}
    assert [code for code in others if rule_for(code).persisted == "no"] == [
        E.TRANSACTION_COORDINATOR_FENCED
    ]


def test_an_unknown_code_counts_as_unknown_server_error() -> None:
    """Spec 7.0."""
    assert rule_for(12345) is rule_for(E.UNKNOWN_SERVER_ERROR)
    assert ask(12345) == ask(E.UNKNOWN_SERVER_ERROR)


@pytest.mark.parametrize(
    ("attempts", "retries", "action"),
    [(0, 1, RETRY), (1, 1, FAIL), (2, 1, FAIL), (0, 0, FAIL), (10**6, 2**31 - 1, RETRY)],
)
def test_a_batch_is_put_back_as_often_as_retries_says(
    attempts: int, retries: int, action: Action
) -> None:
    """SN-03."""
    assert ask(E.NETWORK_EXCEPTION, attempts=attempts, retries=retries).action is action


def test_an_expired_batch_is_neither_retried_nor_split() -> None:
    """SN-11."""
    assert ask(E.NETWORK_EXCEPTION, expired=True).action is FAIL
    assert ask(E.MESSAGE_TOO_LARGE, expired=True).action is FAIL
    assert ask(E.OUT_OF_ORDER_SEQUENCE_NUMBER, expired=True).action is FAIL
    assert ask(E.NONE, expired=True).action is ACK


def test_a_single_record_that_is_too_large_fails() -> None:
    """Spec 3.9."""
    assert ask(E.MESSAGE_TOO_LARGE, records=2).action is SPLIT
    assert ask(E.MESSAGE_TOO_LARGE, records=1).action is FAIL


def test_a_split_uses_up_no_retry() -> None:
    assert ask(E.MESSAGE_TOO_LARGE, attempts=3, retries=3).action is SPLIT


@pytest.mark.parametrize(
    ("code", "sequence"),
    [
        (E.OUT_OF_ORDER_SEQUENCE_NUMBER, "out_of_order"),
        (E.UNKNOWN_PRODUCER_ID, "unknown_producer"),
        (E.NETWORK_EXCEPTION, ""),
    ],
)
def test_the_sequences_are_looked_at_before_a_retry_only(code: ErrorCode, sequence: str) -> None:
    """Spec 8.5: with the retries used up, failing the batch is what bumps the epoch."""
    assert ask(code).sequence == sequence
    exhausted = ask(code, attempts=1, retries=1)
    assert (exhausted.action, exhausted.sequence) == (FAIL, "")
    assert ask(code, idempotent=False).sequence == ""


# -- transactions --------------------------------------------------------------------------

REPEAT, FIND, ABORT, BUMP, FENCED, GONE = (
    TxnAction.REPEAT,
    TxnAction.FIND,
    TxnAction.ABORTABLE,
    TxnAction.BUMP,
    TxnAction.FENCED,
    TxnAction.FATAL,
)

#: Spec 7.4: code, then FindCoordinator, InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn,
#: TxnOffsetCommit and EndTxn; None where the spec says nothing of its own.
TXN_TABLE: list[tuple[ErrorCode, tuple[TxnAction | None, ...]]] = [
    (E.NONE, (TxnAction.DONE,) * 6),
    (E.COORDINATOR_LOAD_IN_PROGRESS, (REPEAT,) * 6),
    (E.COORDINATOR_NOT_AVAILABLE, (REPEAT, FIND, FIND, FIND, FIND, FIND)),
    (E.NOT_COORDINATOR, (REPEAT, FIND, FIND, FIND, FIND, FIND)),
    (E.REQUEST_TIMED_OUT, (REPEAT, REPEAT, REPEAT, REPEAT, FIND, REPEAT)),
    (E.CONCURRENT_TRANSACTIONS, (None, REPEAT, REPEAT, REPEAT, REPEAT, REPEAT)),
    (E.UNKNOWN_TOPIC_OR_PARTITION, (None, None, REPEAT, None, REPEAT, None)),
    (E.TOPIC_AUTHORIZATION_FAILED, (None, None, ABORT, None, GONE, None)),
    (E.OPERATION_NOT_ATTEMPTED, (None, None, ABORT, None, None, None)),
    (E.GROUP_AUTHORIZATION_FAILED, (ABORT, None, None, ABORT, ABORT, None)),
    (E.CLUSTER_AUTHORIZATION_FAILED, (GONE, ABORT, ABORT, GONE, GONE, GONE)),
    (E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, (GONE, ABORT, GONE, GONE, GONE, GONE)),
    (E.INVALID_PRODUCER_EPOCH, (None, FENCED, FENCED, FENCED, FENCED, FENCED)),
    (E.PRODUCER_FENCED, (None, FENCED, FENCED, FENCED, FENCED, FENCED)),
    (E.INVALID_TXN_STATE, (None, GONE, GONE, GONE, GONE, GONE)),
    (E.INVALID_PRODUCER_ID_MAPPING, (None, GONE, GONE, GONE, GONE, GONE)),
    (E.UNKNOWN_PRODUCER_ID, (None, GONE, BUMP, BUMP, GONE, BUMP)),
    (E.TRANSACTION_ABORTABLE, (ABORT,) * 6),
    (E.UNKNOWN_MEMBER_ID, (None, None, None, None, ABORT, None)),
    (E.ILLEGAL_GENERATION, (None, None, None, None, ABORT, None)),
    (E.GROUP_ID_NOT_FOUND, (None, None, None, None, ABORT, None)),
    (E.STALE_MEMBER_EPOCH, (None, None, None, None, ABORT, None)),
    (E.FENCED_INSTANCE_ID, (None, None, None, None, ABORT, None)),
    (E.UNSUPPORTED_FOR_MESSAGE_FORMAT, (None, None, None, None, GONE, None)),
    (E.UNKNOWN_TOPIC_ID, (None, None, None, None, REPEAT, None)),
    (E.INVALID_TRANSACTION_TIMEOUT, (None, GONE, None, None, None, None)),
    (E.INVALID_REQUEST, (GONE, GONE, ABORT, GONE, GONE, GONE)),
]
TABLES = (
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    TXN_OFFSET_COMMIT,
    END_TXN,
)


@pytest.mark.parametrize(("code", "actions"), TXN_TABLE)
def test_what_a_code_asks_for_in_a_transaction(
    code: ErrorCode, actions: tuple[TxnAction | None, ...]
) -> None:
    """Spec 7.4; TX-09 to TX-14, TX-20, TX-25, TX-34, TX-39, TX-41."""
    for table, action in zip(TABLES, actions, strict=True):
        assert action is None or txn_action_for(table, code) is action


def test_every_code_of_kafka_has_its_rule_in_a_transaction() -> None:
    assert tuple(TRANSACTIONAL.values()) == TABLES
    for table in TABLES:
        assert set(table) == {int(code) for code in ErrorCode}
        assert txn_action_for(table, 12345) is table[E.UNKNOWN_SERVER_ERROR]


def test_committed_offsets_are_asked_for_again_where_that_may_help() -> None:
    assert set(OFFSET_FETCH) == {int(code) for code in ErrorCode}
    actions = {E.UNSTABLE_OFFSET_COMMIT: REPEAT, E.NOT_COORDINATOR: FIND, E.INVALID_GROUP_ID: GONE}
    for code, action in actions.items():
        assert OFFSET_FETCH[code] is action
