"""What an answer to a Produce request means for a batch: one table, then the limits.

`PRODUCE` says what each error code asks for. `decide` adds what the batch has behind
it: its attempts, its age, whether it is alone in its batch. The scheduler only does
what comes out. The documentation's table is made from `produce_table()`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from asyncproducer.errors import ErrorCode, error_name, is_retriable, needs_refresh

__all__ = ["PRODUCE", "Action", "Decision", "Rule", "decide", "produce_table", "rule_for"]


class Action(Enum):
    """What happens to the batch."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    SPLIT = "split"
    FAIL = "fail"
    FATAL = "fatal"


class Rule(NamedTuple):
    """What one error code asks for, before limits are looked at.

    `written`: whether the answer leaves it open that the batch was stored.
    `sequence`: which look at the sequences comes first, if any.
    """

    action: Action
    refresh: bool = False
    written: bool = False
    sequence: str = ""


def _rules() -> dict[int, Rule]:
    rules = {
        int(code): Rule(
            Action.RETRY if is_retriable(code) else Action.FAIL, refresh=needs_refresh(code)
        )
        for code in ErrorCode
    }
    E = ErrorCode
    rules[E.NONE] = Rule(Action.ACKNOWLEDGE)
    # The batch is in the log already: an earlier attempt was stored, its answer was lost.
    rules[E.DUPLICATE_SEQUENCE_NUMBER] = Rule(Action.ACKNOWLEDGE)
    rules[E.MESSAGE_TOO_LARGE] = Rule(Action.SPLIT)
    rules[E.OUT_OF_ORDER_SEQUENCE_NUMBER] = Rule(Action.RETRY, sequence="out_of_order")
    rules[E.UNKNOWN_PRODUCER_ID] = Rule(Action.RETRY, sequence="unknown_producer")
    # No clear answer: the leader may have stored it.
    rules[E.REQUEST_TIMED_OUT] = Rule(Action.RETRY, written=True)
    rules[E.NETWORK_EXCEPTION] = Rule(Action.RETRY, refresh=True, written=True)
    rules[E.NOT_ENOUGH_REPLICAS_AFTER_APPEND] = Rule(Action.RETRY, written=True)
    # Also the answers to a batch that was appended and waited for its replicas when the
    # leader resigned or lost its disk (Java: DelayedProduce.tryComplete).
    rules[E.NOT_LEADER_OR_FOLLOWER] = Rule(Action.RETRY, refresh=True, written=True)
    rules[E.KAFKA_STORAGE_ERROR] = Rule(Action.RETRY, refresh=True, written=True)
    rules[E.UNKNOWN_SERVER_ERROR] = Rule(Action.FAIL, written=True)
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
    written: bool
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
    return Decision(action, rule.refresh, rule.written, sequence)


def produce_table() -> str:
    """The table as Markdown, for the documentation."""
    lines = [
        "| code | name | batch | metadata refresh | may be in the log |",
        "|---:|---|---|---|---|",
    ]
    for code in sorted(PRODUCE):
        rule = PRODUCE[code]
        lines.append(
            f"| {code} | {error_name(code)} | {rule.action.value} "
            f"| {'yes' if rule.refresh else ''} | {'yes' if rule.written else ''} |"
        )
    return "\n".join(lines) + "\n"
