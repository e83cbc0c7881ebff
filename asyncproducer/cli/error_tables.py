"""The tables of docs/errors.md: what each error code means in the answer to each request.

What a code asks for is in the tables that the producer acts on: `core/outcome.py` and
`core/answers.py`. Here is only what each of these actions comes to, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from asyncproducer.core.answers import CONTROL, Answer
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.outcome import (
    PRODUCE,
    TRANSACTIONAL,
    Action,
    TxnAction,
    decide,
    fatal_error,
    rule_for,
)
from asyncproducer.core.transactions import Kind, TransactionManager
from asyncproducer.errors import ErrorCode, KafkaError, error_name, is_retriable, needs_refresh
from asyncproducer.net.groups import GROUP_TABLES, look

__all__ = [
    "REQUESTS",
    "Effect",
    "control_part",
    "effect",
    "group_part",
    "markdown_table",
    "matrix",
    "produce_table",
    "transactional_part",
]


class Effect(NamedTuple):
    """What comes of an error code in the answer to a request."""

    #: The word for what is done.
    answer: str
    #: The class of the error that its user may see.
    error: str = ""
    #: Whether the code is one after which the same may succeed later.
    retriable: bool = False
    #: What is asked for again, because our picture of it may be old.
    refresh: str = ""
    batch: str = "goes on"
    transaction: str = "goes on"
    user: str = "nothing"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _yes(value: bool) -> str:
    return "yes" if value else ""


# -- Produce -------------------------------------------------------------------------------

#: The class of the record's error, the transaction, and what the user gets.
_PRODUCE: Mapping[Action, tuple[str, str, str]] = {
    Action.ACKNOWLEDGE: ("", "goes on", "`RecordMetadata`"),
    Action.RETRY: (
        "`DeliveryTimeout`",
        "goes on; abortable if it fails",
        "nothing; the error when its time is up",
    ),
    Action.SPLIT: (
        "`BrokerRejected`",
        "goes on; abortable if it fails",
        "nothing; the error where it is a single record",
    ),
    Action.FAIL: ("`BrokerRejected`", "abortable", "the error"),
    Action.FATAL: ("`BrokerRejected`", "fatal", "the error; then each call raises {later}"),
}

#: With transactions nothing is renumbered under another epoch in the middle of one.
_SEQUENCE = {
    "out_of_order": "goes on; abortable, with `BrokerRejected`, where no earlier batch is missing",
    "unknown_producer": (
        "goes on; abortable, with `BrokerRejected`, where the log still has what we sent before"
    ),
}


def _produce(code: int) -> Effect:
    rule = rule_for(code)
    error, transaction, user = _PRODUCE[rule.action]
    later = f"`{type(fatal_error(code, None)).__name__}`"
    if code == ErrorCode.PRODUCER_FENCED:
        fenced = type(_txn_error("", code)).__name__
        later = f"`{fenced}`; {later} without a `transactional_id`"
    plain = decide(code, records=2, attempts=0, retries=1, expired=False, idempotent=False).action
    batch, otherwise = rule.action.value, _PRODUCE[plain][0]
    return Effect(
        answer=batch,
        error=error if otherwise == error else f"{error}; plain: {otherwise}",
        retriable=is_retriable(code),
        refresh="metadata" if rule.refresh else "",
        batch=batch if plain is rule.action else f"{batch}; plain: {plain.value}",
        transaction=_SEQUENCE.get(rule.sequence, transaction),
        user=user.format(later=later),
    )


def produce_table() -> str:
    """A row for each code in the answer to a Produce request."""
    head = (
        *("code", "name", "class", "retriable", "refresh"),
        *("batch", "in the log", "transaction", "the user"),
    )
    return markdown_table(head, map(_produce_row, sorted(PRODUCE)))


def _produce_row(code: int) -> tuple[str, ...]:
    row = _produce(code)
    return (
        *(str(code), error_name(code), row.error, _yes(row.retriable), row.refresh),
        *(row.batch, rule_for(code).persisted, row.transaction, row.user),
    )


# -- requests that are of no transaction ---------------------------------------------------

_TAKEN = Effect("take")
_WAITS = "waits, until `DeliveryTimeout`"
_CALLS_WAIT = "goes on; its calls wait, until `TransactionTimeout`"
_DOOMS = "abortable, if the record was of one"

_DISCONNECTED = Effect(
    "disconnect",
    "`ConnectionFailed`, cause `BrokerError`",
    refresh="metadata",
    batch=_WAITS,
    transaction=_CALLS_WAIT,
    user="`start()` raises it where no broker answers better",
)
_FROM_BOOTSTRAP = "metadata, from `bootstrap_servers`"
_NO_METADATA = Effect(
    "repeat",
    "`MetadataTimeout`, no cause",
    refresh="metadata",
    batch="goes on where its leader is known",
    user="nothing; the timeout of what waits, `ConnectionFailed` of `start()`",
)
_SASL = {
    Answer.TAKE: _TAKEN,
    Answer.REFUSED: Effect(
        "refused",
        "`AuthenticationError`",
        refresh="metadata",
        batch=_WAITS,
        transaction="fatal, where a request of one meets it",
        user="`start()` and calls that wait for metadata raise it",
    ),
}
_ABSENT = Effect(
    "repeat",
    "`MetadataTimeout`",
    refresh="metadata",
    batch="none yet: the record waits for the topic",
    transaction=_DOOMS,
    user="nothing; the error after `max_block_ms`",
)
_REFUSED = _ABSENT._replace(refresh="", batch="none yet", user="the calls that wait raise it")

#: What an answer comes to. `retriable` is the code's.
_CONTROL: Mapping[str, Mapping[Answer, Effect]] = {
    "ApiVersions": {
        Answer.TAKE: _TAKEN,
        Answer.OLDER: Effect(
            "older", _DISCONNECTED.error, user="nothing; the second time: disconnect"
        ),
        Answer.REBOOTSTRAP: _DISCONNECTED._replace(refresh=_FROM_BOOTSTRAP),
        Answer.DISCONNECT: _DISCONNECTED,
    },
    "SaslHandshake": _SASL,
    "SaslAuthenticate": _SASL,
    "Metadata": {
        Answer.TAKE: _TAKEN,
        Answer.REPEAT: _NO_METADATA,
        Answer.REBOOTSTRAP: _NO_METADATA._replace(
            refresh=_FROM_BOOTSTRAP, batch=_WAITS, transaction=_CALLS_WAIT
        ),
    },
    "... topic": {
        Answer.TAKE: _TAKEN,
        Answer.REPEAT: _ABSENT,
        Answer.WANTED: _ABSENT._replace(answer="repeat if wanted", refresh="metadata, if wanted"),
        Answer.INVALID: _REFUSED._replace(answer="invalid", error="`InvalidTopic`"),
        Answer.DENIED: _REFUSED._replace(answer="denied", error="`AuthorizationError`"),
    },
    "... partition": {
        Answer.TAKE: _TAKEN,
        Answer.REPEAT: Effect(
            "repeat",
            "`DeliveryTimeout`, no cause",
            refresh="metadata",
            batch="goes to the leader that is named; without one it waits",
            transaction="goes on; abortable if a batch fails",
            user="nothing; the error when a batch's time is up",
        ),
    },
    "InitProducerId": {
        Answer.TAKE: _TAKEN,
        Answer.REPEAT: Effect(
            "repeat",
            "`DeliveryTimeout`",
            batch=_WAITS,
            transaction="none",
            user="nothing; the error when a record's time is up",
        ),
        Answer.DENIED: Effect(
            "denied",
            "`AuthorizationError`",
            batch="fails with `AbortedError`, whose cause it is",
            transaction="none",
            user="the record's error; what comes later asks again",
        ),
        Answer.FATAL: Effect(
            "fatal",
            "`BrokerError`",
            batch="fails with `AbortedError`, whose cause it is",
            transaction="none",
            user="the record's error; then each call raises it",
        ),
    },
}


def _control(request: str, code: int) -> Effect:
    answer = CONTROL[request][code]
    return _CONTROL[request][answer]._replace(answer=answer.value, retriable=is_retriable(code))


# -- requests of transactions --------------------------------------------------------------

_KINDS = {
    "FindCoordinator": Kind.FIND_COORDINATOR,
    "InitProducerId": Kind.INIT_PRODUCER_ID,
    "AddPartitionsToTxn": Kind.ADD_PARTITIONS,
    "AddOffsetsToTxn": Kind.ADD_OFFSETS,
    "TxnOffsetCommit": Kind.COMMIT_OFFSETS,
    "EndTxn": Kind.END,
}

_HELD = "wait"
_DROPPED = "those not sent yet fail with `AbortedError`"
#: No record is sent before the first, or is left when the second is sent.
_WITHOUT_RECORDS = ("InitProducerId", "EndTxn")
_NEW = "those for partitions that are new to the transaction wait"
#: What waits until a request was done. From Kafka 4.0 on it is Produce that adds partitions.
_WAITS_FOR = {
    "FindCoordinator": "goes on",
    "AddPartitionsToTxn": "those not sent yet wait",
    "AddOffsetsToTxn": _NEW,
    "TxnOffsetCommit": "goes on",
}

#: The error that is seen (`{error}` is the code's own), and the rest.
_TRANSACTIONAL: Mapping[TxnAction, Effect] = {
    TxnAction.DONE: Effect("done"),
    TxnAction.REPEAT: Effect(
        "repeat",
        "`TransactionTimeout`, cause `{error}`",
        batch=_HELD,
        user="nothing; the error after `max_block_ms`, and called again it waits on",
    ),
    TxnAction.FIND: Effect(
        "find",
        "`TransactionTimeout`, cause `{error}`",
        refresh="coordinator",
        batch=_HELD,
        user="nothing; the error after `max_block_ms`, and called again it waits on",
    ),
    TxnAction.ABORTABLE: Effect(
        "abortable",
        "`TransactionAborted`, cause `{error}`",
        batch=_DROPPED,
        transaction="abortable",
        user="each call raises it until `abort_transaction()`",
    ),
    TxnAction.BUMP: Effect(
        "bump",
        "`TransactionAborted`, cause `{error}`",
        batch=_DROPPED,
        transaction="abortable; fatal before Kafka 2.5",
        user="each call raises it until `abort_transaction()`; `{error}` where it is fatal",
    ),
    TxnAction.FENCED: Effect(
        "fenced", "`{error}`", batch=_DROPPED, transaction="fatal", user="each call raises it"
    ),
    TxnAction.FATAL: Effect(
        "fatal", "`{error}`", batch=_DROPPED, transaction="fatal", user="each call raises it"
    ),
}


def _txn_error(request: str, code: int) -> KafkaError:
    backoff = ExponentialBackoff(1, 1, random=lambda: 0.5)
    manager = TransactionManager("", 0, version_two=lambda: True, backoff=backoff)
    return manager.error_for(_KINDS.get(request, Kind.END), code)


def _transactional(request: str, code: int) -> Effect:
    row = _TRANSACTIONAL[TRANSACTIONAL[request][code]]
    error = type(_txn_error(request, code)).__name__
    return row._replace(
        error=row.error.format(error=error),
        user=row.user.format(error=error),
        retriable=is_retriable(code),
        batch=_batches(request, row.batch),
    )


def _batches(request: str, what: str) -> str:
    if request in _WITHOUT_RECORDS:
        return "none"
    return _WAITS_FOR[request] if what == _HELD else what


# -- requests about a group ----------------------------------------------------------------


def _of_group(request: str, code: int) -> Effect:
    table = GROUP_TABLES[request]
    untouched = Effect(table[code].value, retriable=is_retriable(code))
    try:
        action, error = look(table, code, "")
    except KafkaError as refused:
        name = f"`{type(refused).__name__}`"
        return untouched._replace(error=name, user="`committed_offsets()` raises it")
    if error is None:
        return untouched
    return untouched._replace(
        error=f"`RequestTimedOut`, cause `{type(error).__name__}`",
        refresh="coordinator" if action is TxnAction.FIND else "",
        user="nothing; the error after `max_block_ms`",
    )


# -- all of them ---------------------------------------------------------------------------

#: The requests that we send, and what a code in their answers comes to.
REQUESTS: Mapping[str, Callable[[int], Effect]] = {
    "Produce": _produce,
    **{name: lambda code, name=name: _control(name, code) for name in CONTROL},  # type: ignore[misc]
    **{
        f"{name} of a transaction": lambda code, name=name: _transactional(name, code)  # type: ignore[misc]
        for name in TRANSACTIONAL
    },
    **{
        f"{name} of a group": lambda code, name=name: _of_group(name, code)  # type: ignore[misc]
        for name in GROUP_TABLES
    },
}


def effect(request: str, code: int) -> Effect:
    """What comes of `code` in the answer to `request`, which is one of REQUESTS."""
    return REQUESTS[request](code)


def matrix(tables: Mapping[str, Mapping[int, Enum]], refresh: Callable[[int], str]) -> str:
    """Tables by code, side by side."""
    return markdown_table(
        ("code", "name", "retriable", "refresh", *tables),
        (
            (
                *(str(int(code)), error_name(code), _yes(is_retriable(code)), refresh(code)),
                *(str(each[code].value) for each in tables.values()),
            )
            for code in sorted(ErrorCode)
        ),
    )


def control_part() -> str:
    """Of the requests that are of no transaction."""
    return _part(CONTROL, "{}", lambda code: "metadata" if needs_refresh(code) else "")


def transactional_part() -> str:
    """Of the requests to the coordinators of transactions."""
    return _part(TRANSACTIONAL, "{} of a transaction", _finds(TRANSACTIONAL))


def group_part() -> str:
    """Of the requests about a group's offsets."""
    return _part(GROUP_TABLES, "{} of a group", _finds(GROUP_TABLES))


def _finds(tables: Mapping[str, Mapping[int, TxnAction]]) -> Callable[[int], str]:
    def refresh(code: int) -> str:
        finds = [name for name, each in tables.items() if each[code] is TxnAction.FIND]
        if len(finds) == 1:
            return f"coordinator ({finds[0]})"
        return "coordinator" if finds else ""

    return refresh


def _part(
    tables: Mapping[str, Mapping[int, Enum]], name: str, refresh: Callable[[int], str]
) -> str:
    parts = [
        f"### {name.format(each).replace('...', 'Metadata:')}\n\n{_effects(name.format(each))}"
        for each in tables
    ]
    return "\n".join([*parts, f"### {name.format('All')} by code\n\n{matrix(tables, refresh)}"])


def _effects(request: str) -> str:
    """What can come of an answer, and of which codes."""
    groups: dict[Effect, list[str]] = {}
    for code in sorted(ErrorCode):
        groups.setdefault(effect(request, code), []).append(error_name(code))
    # Most codes are none that anybody expects there.
    named = {
        max(
            (found for found in groups if found.retriable is retriable),
            key=lambda found: len(groups[found]),
        ): text
        for retriable, text in ((True, "all other retriable codes"), (False, "all other codes"))
    }
    good = error_name(ErrorCode.NONE)
    rows = sorted(groups, key=lambda found: (found in named, good not in groups[found]))
    head = ("answer", "codes", "class", "retriable", "refresh", "batch", "transaction", "the user")
    return markdown_table(
        head,
        (
            (
                *(row.answer, named.get(row, ", ".join(groups[row])), row.error),
                *(_yes(row.retriable), row.refresh, row.batch, row.transaction, row.user),
            )
            for row in rows
        ),
    )
