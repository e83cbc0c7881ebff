"""What answers mean: one table for each request, then the limits.

`PRODUCE` says what each error code asks for. `decide` adds what the batch has behind
it: its attempts, its age, whether it is alone in its batch. The scheduler only does
what comes out. `TRANSACTIONAL` has the tables of the requests of a transaction; what comes
of them there is in transactions.py. The documentation's tables are made from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from asyncproducer.errors import (
    AuthorizationError,
    BrokerError,
    ErrorCode,
    KafkaError,
    Persisted,
    error_name,
    is_retriable,
    needs_refresh,
)

__all__ = [
    "ADD_OFFSETS_TO_TXN",
    "ADD_PARTITIONS_TO_TXN",
    "END_TXN",
    "FIND_COORDINATOR",
    "INIT_PRODUCER_ID",
    "PRODUCE",
    "TRANSACTIONAL",
    "TXN_OFFSET_COMMIT",
    "Action",
    "Decision",
    "Rule",
    "TxnAction",
    "decide",
    "fatal_error",
    "rule_for",
    "txn_action_for",
]


class Action(Enum):
    """What happens to the batch."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    SPLIT = "split"
    FAIL = "fail"
    FATAL = "fatal"


class Rule(NamedTuple):
    """What one error code asks for, before limits are looked at.

    `persisted`: what the answer says of the log, where it is not an acknowledgement.
    `sequence`: which look at the sequences comes first, if any.
    """

    action: Action
    refresh: bool = False
    persisted: Persisted = "no"
    sequence: str = ""


def _before_append() -> frozenset[int]:
    """The codes that a leader answers before it appends anything (Java: KafkaApis,
    ReplicaManager.appendRecords, UnifiedLog.append).

    After another one nobody knows. Either no broker gives it to a Produce request, or not
    only then: NOT_LEADER_OR_FOLLOWER and KAFKA_STORAGE_ERROR are also said of a batch that
    was appended and waited for its replicas, when the leader resigned or lost its disk
    (Java: DelayedProduce.tryComplete). UNKNOWN_TOPIC_OR_PARTITION is said of one, too, when
    its topic was deleted meanwhile: with all that was in its log. No answer at all is
    REQUEST_TIMED_OUT or NETWORK_EXCEPTION.
    """
    E = ErrorCode
    return frozenset(
        (
            E.CORRUPT_MESSAGE,
            E.UNKNOWN_TOPIC_OR_PARTITION,
            E.LEADER_NOT_AVAILABLE,
            E.REPLICA_NOT_AVAILABLE,
            E.MESSAGE_TOO_LARGE,
            E.COORDINATOR_LOAD_IN_PROGRESS,
            E.COORDINATOR_NOT_AVAILABLE,
            E.NOT_COORDINATOR,
            E.INVALID_TOPIC_EXCEPTION,
            E.RECORD_LIST_TOO_LARGE,
            E.NOT_ENOUGH_REPLICAS,
            E.INVALID_REQUIRED_ACKS,
            E.TOPIC_AUTHORIZATION_FAILED,
            E.CLUSTER_AUTHORIZATION_FAILED,
            E.INVALID_TIMESTAMP,
            E.UNSUPPORTED_VERSION,
            E.INVALID_REQUEST,
            E.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            E.POLICY_VIOLATION,
            E.OUT_OF_ORDER_SEQUENCE_NUMBER,
            E.INVALID_PRODUCER_EPOCH,
            E.INVALID_TXN_STATE,
            E.INVALID_PRODUCER_ID_MAPPING,
            E.CONCURRENT_TRANSACTIONS,
            E.TRANSACTION_COORDINATOR_FENCED,
            E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            E.UNKNOWN_PRODUCER_ID,
            E.LISTENER_NOT_FOUND,
            E.FENCED_LEADER_EPOCH,
            E.UNKNOWN_LEADER_EPOCH,
            E.UNSUPPORTED_COMPRESSION_TYPE,
            E.INVALID_RECORD,
            E.THROTTLING_QUOTA_EXCEEDED,
            E.PRODUCER_FENCED,
            E.UNKNOWN_TOPIC_ID,
            E.INCONSISTENT_TOPIC_ID,
            E.TRANSACTION_ABORTABLE,
        )
    )


def _rules() -> dict[int, Rule]:
    before_append = _before_append()
    rules = {
        int(code): Rule(
            Action.RETRY if is_retriable(code) else Action.FAIL,
            refresh=needs_refresh(code),
            persisted="no" if code in before_append else "maybe",
        )
        for code in ErrorCode
    }
    E = ErrorCode
    rules[E.NONE] = Rule(Action.ACKNOWLEDGE, persisted="yes")
    # The batch is in the log already: an earlier attempt was stored, its answer was lost.
    rules[E.DUPLICATE_SEQUENCE_NUMBER] = Rule(Action.ACKNOWLEDGE, persisted="yes")
    # All replicas in sync have it: there are only fewer of them than min.insync.replicas wants
    # (Java: Partition.checkEnoughReplicasReachOffset).
    rules[E.NOT_ENOUGH_REPLICAS_AFTER_APPEND] = Rule(Action.RETRY, persisted="yes")
    rules[E.MESSAGE_TOO_LARGE] = Rule(Action.SPLIT)
    rules[E.OUT_OF_ORDER_SEQUENCE_NUMBER] = Rule(Action.RETRY, sequence="out_of_order")
    rules[E.UNKNOWN_PRODUCER_ID] = Rule(Action.RETRY, sequence="unknown_producer")
    # These end the producer (spec 7.0): nothing that it sends can succeed any more.
    for code in (
        E.CLUSTER_AUTHORIZATION_FAILED,
        E.UNSUPPORTED_VERSION,
        E.INVALID_PRODUCER_ID_MAPPING,
        E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        E.PRODUCER_FENCED,
    ):
        rules[code] = Rule(Action.FATAL)
    return rules


#: Error code of a partition in a Produce answer → what it asks for.
PRODUCE: dict[int, Rule] = _rules()


class Decision(NamedTuple):
    """What to do with a batch, and whether to ask for fresh metadata."""

    action: Action
    refresh: bool
    persisted: Persisted
    sequence: str


def rule_for(code: int) -> Rule:
    """The rule of an error code; an unknown code counts as UNKNOWN_SERVER_ERROR."""
    return PRODUCE.get(code, PRODUCE[ErrorCode.UNKNOWN_SERVER_ERROR])


def decide(
    code: int,
    *,
    records: int,
    attempts: int,
    retries: int,
    expired: bool,
    idempotent: bool,
) -> Decision:
    """What to do with a batch that got `code`.

    `attempts` counts how often it was put back so far, `retries` is the option,
    `expired` whether its delivery timeout has passed.
    """
    rule = rule_for(code)
    action = rule.action
    sequence = rule.sequence if idempotent else ""
    if action is Action.SPLIT and (records < 2 or expired):
        action = Action.FAIL
    if rule.sequence and not idempotent:
        action = Action.FAIL
    if action is Action.FATAL and not idempotent:
        # Without a producer id there is no state that could be broken for good.
        action = Action.FAIL
    if action is Action.RETRY and (expired or attempts >= retries):
        action = Action.FAIL
    if action is not Action.RETRY:
        sequence = ""
    return Decision(action, rule.refresh, rule.persisted, sequence)


def fatal_error(code: int, message: str | None) -> KafkaError:
    """What every later call raises after FATAL."""
    if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
        error: KafkaError = AuthorizationError(message or error_name(code))
        error.code = code
        return error
    return BrokerError(code, message)


# -- transactions --------------------------------------------------------------------------


class TxnAction(Enum):
    """What happens to a request of a transaction, and to the transaction."""

    DONE = "done"
    REPEAT = "repeat"
    #: Another broker coordinates now: ask for it, then repeat.
    FIND = "find"
    #: The transaction cannot be committed any more. The next one may go well.
    ABORTABLE = "abortable"
    #: The same where a new epoch can be had (Kafka 2.5), else fatal.
    BUMP = "bump"
    #: Another producer has taken over.
    FENCED = "fenced"
    FATAL = "fatal"


def _txn_rules(
    other: TxnAction, *, coordinator: bool = True, **special: TxnAction
) -> dict[int, TxnAction]:
    """The table of a request. `other` is for what nobody expects; `special` is by name."""
    rules = {int(code): TxnAction.REPEAT if is_retriable(code) else other for code in ErrorCode}
    rules[ErrorCode.NONE] = TxnAction.DONE
    if coordinator:
        rules[ErrorCode.COORDINATOR_NOT_AVAILABLE] = TxnAction.FIND
        rules[ErrorCode.NOT_COORDINATOR] = TxnAction.FIND
        # Also the epoch: with the coordinator, it is always the other producer's that is newer.
        rules[ErrorCode.INVALID_PRODUCER_EPOCH] = TxnAction.FENCED
        rules[ErrorCode.PRODUCER_FENCED] = TxnAction.FENCED
    for code in (
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.UNSUPPORTED_VERSION,
    ):
        rules[code] = TxnAction.FATAL
    for name, action in special.items():
        rules[ErrorCode[name]] = action
    return rules


_ABORTABLE, _FATAL = TxnAction.ABORTABLE, TxnAction.FATAL

#: Of the first one `start()` is what fails, and it can be tried again. Of one for another epoch:
#: the transaction has its end, and the next abort asks again.
INIT_PRODUCER_ID = _txn_rules(
    _FATAL,
    CLUSTER_AUTHORIZATION_FAILED=_ABORTABLE,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED=_ABORTABLE,
    TRANSACTION_ABORTABLE=_ABORTABLE,
)

ADD_PARTITIONS_TO_TXN = _txn_rules(_ABORTABLE, UNKNOWN_PRODUCER_ID=TxnAction.BUMP)

ADD_OFFSETS_TO_TXN = _txn_rules(
    _FATAL,
    UNKNOWN_PRODUCER_ID=TxnAction.BUMP,
    GROUP_AUTHORIZATION_FAILED=_ABORTABLE,
    TRANSACTION_ABORTABLE=_ABORTABLE,
)

#: The coordinator to be found again is the group's.
TXN_OFFSET_COMMIT = _txn_rules(
    _FATAL,
    REQUEST_TIMED_OUT=TxnAction.FIND,
    GROUP_AUTHORIZATION_FAILED=_ABORTABLE,
    TRANSACTION_ABORTABLE=_ABORTABLE,
    # The consumer is not, or no more, the member that it says it is.
    ILLEGAL_GENERATION=_ABORTABLE,
    UNKNOWN_MEMBER_ID=_ABORTABLE,
    FENCED_INSTANCE_ID=_ABORTABLE,
    GROUP_ID_NOT_FOUND=_ABORTABLE,
    STALE_MEMBER_EPOCH=_ABORTABLE,
)

#: What makes a commit abortable is fatal for an abort: there is nothing else left to do.
END_TXN = _txn_rules(_FATAL, UNKNOWN_PRODUCER_ID=TxnAction.BUMP, TRANSACTION_ABORTABLE=_ABORTABLE)

FIND_COORDINATOR = _txn_rules(
    _FATAL,
    coordinator=False,
    GROUP_AUTHORIZATION_FAILED=_ABORTABLE,
    TRANSACTION_ABORTABLE=_ABORTABLE,
)

#: By the request's name, in the order of a transaction.
TRANSACTIONAL: Mapping[str, Mapping[int, TxnAction]] = {
    "FindCoordinator": FIND_COORDINATOR,
    "InitProducerId": INIT_PRODUCER_ID,
    "AddPartitionsToTxn": ADD_PARTITIONS_TO_TXN,
    "AddOffsetsToTxn": ADD_OFFSETS_TO_TXN,
    "TxnOffsetCommit": TXN_OFFSET_COMMIT,
    "EndTxn": END_TXN,
}

#: Of no transaction: whatever neither passes nor moves is the error of the call.
OFFSET_FETCH = _txn_rules(_FATAL)


def txn_action_for(table: Mapping[int, TxnAction], code: int) -> TxnAction:
    """What an error code asks for; an unknown code counts as UNKNOWN_SERVER_ERROR."""
    return table.get(code, table[ErrorCode.UNKNOWN_SERVER_ERROR])
