"""What must be true of a history: the producer's promises, each as one function.

A `History` is what was seen: what users were told about their records, and what the logs
hold in the end. It knows nothing of how the producer works. `check` asks every rule.

Two things are no faults, because no Kafka producer can prevent them. Without idempotence,
what is sent again may be stored again, in another order. And a leader that has forgotten a
producer takes any sequence for its first: a batch that it refused, for another reason, then
comes after the one that was sent behind it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import StoredRecord
from asyncproducer.testing.simulation.plan import PATIENT_MS, PlannedRecord

__all__ = [
    "RULES",
    "WRITTEN",
    "Ended",
    "History",
    "Sent",
    "Transaction",
    "Violation",
    "check",
    "headers_of",
    "key_of",
    "value_of",
]

#: What a timer may be late on a virtual clock.
_TICK = 1e-6

#: What sixty records may take, one after the other, on a good network.
_CALM_SECONDS = 1.5

#: A header that a serializer may have added.
WRITTEN = ("written", b"")

Place = tuple[str, int]


class Violation(NamedTuple):
    """A broken promise: which, and what shows it."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


def value_of(record: PlannedRecord) -> bytes:
    """The bytes that are sent for a record: its number, and what makes it so long."""
    return b"%d:" % record.number + b"x" * record.size


def key_of(record: PlannedRecord) -> bytes | None:
    """Its key as bytes."""
    return None if record.key is None else record.key.encode()


def headers_of(record: PlannedRecord) -> tuple[tuple[str, bytes | None], ...]:
    """Its headers: each third record has some."""
    if record.number % 3:
        return ()
    return ("number", b"%d" % record.number), ("none", None), ("number", b"")


@dataclasses.dataclass(slots=True)
class Sent:
    """One record, and what its sender was told."""

    record: PlannedRecord
    #: The time in the loop's seconds. `called` and `entered` count events instead: entered
    #: before another was called says that the order of the two is certain.
    called_at: float
    called: int
    entered: int | None = None
    entered_at: float | None = None
    ended_at: float | None = None
    #: Records of one `send_many` have an order of their own.
    stream: int | None = None
    timestamp: int = -1
    #: "" as long as nobody was told anything; "acknowledged", "failed"; "refused" before it
    #: was buffered; "cancelled" while it was being sent: nobody was told what became of it.
    outcome: str = ""
    partition: int = -1
    offset: int = -1
    #: Of a failure: "no", "maybe", "yes". Of any error: its type.
    persisted: str = ""
    error: str = ""
    code: int | None = None
    #: The transaction that was open when it was sent.
    transaction: int | None = None
    #: Whether it got no memory in time, and nobody had any then.
    nobody_had_any: bool = False
    #: How often its delivery has told of its end; None where there is no delivery to ask.
    ends: int | None = None

    def __str__(self) -> str:
        return f"record {self.record.number} for {self.record.topic}"


@dataclasses.dataclass(slots=True)
class Transaction:
    """One transaction, and what its user was told."""

    #: Counted by the producer, and by the plan: from 1 on.
    number: int
    planned: int
    began_at: float
    commit_asked: bool = False
    offsets_asked: bool = False
    #: The transaction of the plan whose offsets they are: its own, or one's before it.
    offsets_of: int = 0
    #: Whether a commit was refused with TransactionAborted: nothing of it counts.
    refused: bool = False
    #: "committed" or "aborted"; "" is in doubt.
    told: str = ""
    #: When its abort was first asked for, and when a call for its end last returned.
    aborting_at: float | None = None
    ended_at: float | None = None

    def may_be_committed(self) -> bool:
        """As far as its user knows."""
        return self.commit_asked and not self.refused and self.told != "aborted"

    def __str__(self) -> str:
        return f"transaction {self.planned}"


class Ended(NamedTuple):
    """A call that had a time limit."""

    what: str
    began_at: float
    ended_at: float
    #: Seconds; None where there was none.
    limit: float | None


@dataclasses.dataclass
class History:
    """What was seen."""

    options: Mapping[str, Any]
    #: Whether nothing went wrong on the brokers' side but a group's coordinator, and the network
    #: was quick.
    calm: bool = False
    #: Whether all that went wrong was of a kind that passes.
    mendable: bool = False
    sent: list[Sent] = dataclasses.field(default_factory=list)
    logs: dict[Place, list[StoredRecord]] = dataclasses.field(default_factory=dict)
    #: When a topic was deleted, and what its logs held then. Another one of its name followed.
    deleted: list[tuple[float, dict[Place, list[StoredRecord]]]] = dataclasses.field(
        default_factory=list
    )
    transactions: list[Transaction] = dataclasses.field(default_factory=list)
    #: What read_committed shows of the logs.
    committed: dict[Place, list[StoredRecord]] = dataclasses.field(default_factory=dict)
    #: The number of a transaction in the plan -> the offset that was committed for it.
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    #: When another producer took the transactional id.
    taken_over_at: float | None = None
    #: Records for which the user's own code has raised, by number: what their senders are told.
    spoiled: dict[int, str] = dataclasses.field(default_factory=dict)
    #: Where the leader has forgotten its producers.
    forgotten: set[Place] = dataclasses.field(default_factory=set)
    calls: list[Ended] = dataclasses.field(default_factory=list)
    #: What World has found wrong itself: memory, errors in the log, tasks left behind ...
    found: list[Violation] = dataclasses.field(default_factory=list)
    counters: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def idempotent(self) -> bool:
        """Whether each record is to be stored once."""
        return bool(self.options["enable_idempotence"])

    def lives(self) -> list[dict[Place, list[StoredRecord]]]:
        """The logs of the topics that were deleted, in that order, and those of the end."""
        return [*(logs for _, logs in self.deleted), self.logs]

    def stored(self) -> dict[int, list[tuple[Place, StoredRecord]]]:
        """Where each record is or was, by number."""
        places: dict[int, list[tuple[Place, StoredRecord]]] = defaultdict(list)
        for logs in self.lives():
            for number, found in _by_number(logs).items():
                places[number] += found
        return places

    @property
    def transactional(self) -> bool:
        """Whether the producer has transactions."""
        return "transactional_id" in self.options


def _by_number(
    logs: Mapping[Place, list[StoredRecord]],
) -> dict[int, list[tuple[Place, StoredRecord]]]:
    places: dict[int, list[tuple[Place, StoredRecord]]] = defaultdict(list)
    for place, records in logs.items():
        for record in records:
            number = (record.value or b"").partition(b":")[0]
            places[int(number) if number.isdigit() else -1].append((place, record))
    return places


def check(history: History) -> list[Violation]:
    """All broken promises; empty for a good history."""
    return history.found + [violation for rule in RULES for violation in rule(history)]


# -- the rules ---------------------------------------------------------------------------------


def _every_record_has_one_end(history: History) -> Iterator[Violation]:
    for sent in history.sent:
        if not sent.outcome:
            yield Violation("pending", f"{sent} has no end, and the producer is closed")
        if sent.ends not in (None, 1):
            yield Violation("ends", f"the delivery of {sent} has ended {sent.ends} times")


def _acknowledged_is_stored_where_it_was_said(history: History) -> Iterator[Violation]:
    stored = history.stored()
    for sent in history.sent:
        if sent.outcome != "acknowledged" or history.options.get("acks") == 0:
            continue
        found = [
            record.offset
            for place, record in stored.get(sent.record.number, ())
            if place == (sent.record.topic, sent.partition)
        ]
        if not found:
            yield Violation("lost", f"{sent} was acknowledged and is not in the log")
        elif sent.offset >= 0 and sent.offset not in found:
            yield Violation("offset", f"{sent} is at {found}, not at offset {sent.offset}")


def _is_stored_once(history: History) -> Iterator[Violation]:
    if not history.idempotent and history.options.get("retries") != 0:
        return
    for logs in history.lives():
        for number, places in _by_number(logs).items():
            if len(places) > 1:
                where = [f"{topic}-{index}@{record.offset}" for (topic, index), record in places]
                yield Violation("doubled", f"record {number} is at {', '.join(where)}")


def _what_was_acknowledged_is_not_in_the_next_topic(history: History) -> Iterator[Violation]:
    ended_at = {
        sent.record.number: sent.ended_at
        for sent in history.sent
        if sent.outcome == "acknowledged" and sent.ended_at is not None
    }
    lives = history.lives()
    for life, (deleted_at, gone) in enumerate(history.deleted, start=1):
        for logs in lives[life:]:
            again = _by_number({place: logs[place] for place in gone if place in logs})
            for number in again:
                if ended_at.get(number, deleted_at) < deleted_at:
                    yield Violation("doubled", f"record {number} of a deleted topic came again")


def _persisted_is_true(history: History) -> Iterator[Violation]:
    stored = history.stored()
    for sent in history.sent:
        is_stored = sent.record.number in stored
        if sent.outcome == "refused" and is_stored:
            yield Violation("refused", f"{sent} was refused with {sent.error} and is in the log")
        if sent.outcome != "failed":
            continue
        if sent.persisted == "no" and is_stored:
            yield Violation(
                "persisted", f"{sent} failed with {sent.error}, persisted no, and is in the log"
            )
        if sent.persisted == "yes" and not is_stored:
            yield Violation("persisted", f"{sent} failed with persisted yes, and is not stored")
        if sent.persisted not in ("no", "maybe", "yes"):
            yield Violation("persisted", f"{sent} failed with persisted={sent.persisted!r}")
        if sent.code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            # Which says that the broker has it, as it should.
            yield Violation("duplicate", f"{sent} failed, because it is stored")


def _keeps_its_contents(history: History) -> Iterator[Violation]:
    sent_by_number = {sent.record.number: sent for sent in history.sent}
    for number, places in history.stored().items():
        sent = sent_by_number.get(number)
        for (topic, index), record in places:
            where = f"{topic}-{index}@{record.offset}"
            if sent is None:
                yield Violation("foreign", f"{where} holds {record.value!r}, which nobody sent")
                continue
            planned = sent.record
            if (record.key, record.value) != (key_of(planned), value_of(planned)):
                yield Violation("altered", f"{where} holds other bytes than {sent}")
            if record.headers not in (headers_of(planned), (*headers_of(planned), WRITTEN)):
                yield Violation("altered", f"{sent} has the headers {record.headers}")
            if planned.partition not in (None, index) or planned.topic != topic:
                yield Violation("altered", f"{sent} is in {where}")
            appended = history.counters.get("log append time")
            if record.timestamp != sent.timestamp and not appended:
                yield Violation("altered", f"{sent} has the timestamp {record.timestamp}")


def _keeps_keys_together(history: History) -> Iterator[Violation]:
    if history.options.get("partitioner", "default") == "round_robin":
        return
    if history.options.get("partitioner_ignore_keys"):
        return
    partitions: dict[tuple[str, str], int] = {}
    for sent in history.sent:
        key, index = sent.record.key, sent.partition
        if key is None or index < 0 or sent.record.partition is not None:
            continue
        if partitions.setdefault((sent.record.topic, key), index) != index:
            yield Violation("scattered", f"key {key} of {sent.record.topic} is in two partitions")


def _keeps_the_order(history: History) -> Iterator[Violation]:
    if not history.idempotent and (
        history.options["max_in_flight_requests_per_connection"] > 1
        # Without answers, nobody knows when a leader that hangs has taken its request.
        or history.options.get("acks") == 0
    ):
        return
    sent_by_number = {sent.record.number: sent for sent in history.sent}
    logs = [log for life in history.lives() for log in life.items()]
    for (topic, index), records in logs:
        if (topic, index) in history.forgotten:
            continue
        seen: set[int] = set()
        order: list[Sent] = []
        for record in records:
            number = int((record.value or b"-1:").partition(b":")[0])
            sent = sent_by_number.get(number)
            if sent is None or number in seen:
                continue
            seen.add(number)
            # One at a time, but without sequences: what was given up may come late.
            if history.idempotent or sent.outcome == "acknowledged":
                order.append(sent)
        yield from _disorder(f"{topic}-{index}", order)


def _disorder(where: str, order: list[Sent]) -> Iterator[Violation]:
    """`order`: as they are in the log."""
    last_called: Sent | None = None  # the one of those so far that was called last
    single: Sent | None = None
    streams: dict[int, Sent] = {}
    for sent in order:
        before: Sent | None
        if sent.stream is None:
            # They enter in the order of their calls, wherever they had to wait.
            before = single
            single = sent
        else:
            before = streams.get(sent.stream)
            streams[sent.stream] = sent
        if before is None or before.called < sent.called:
            before = last_called
            if before is None or sent.entered is None or before.called < sent.entered:
                before = None
        if before is not None:
            yield Violation("reordered", f"{where}: {sent} was sent before {before}, stored after")
        if last_called is None or sent.called > last_called.called:
            last_called = sent


def _is_refused_where_its_users_code_raised(history: History) -> Iterator[Violation]:
    for sent in history.sent:
        error = history.spoiled.get(sent.record.number)
        if error is None or sent.outcome == "cancelled":
            continue
        if (sent.outcome, sent.error) != ("refused", error):
            told = f"{sent.outcome} {sent.error}".strip()
            yield Violation("spoiled", f"{sent} was {told}, and was to be refused with {error}")


def _ends_in_time(history: History) -> Iterator[Violation]:
    timeout = history.options["delivery_timeout_ms"] / 1000
    block = history.options["max_block_ms"] / 1000
    for sent in history.sent:
        taken = _seconds(sent.entered_at, sent.ended_at)
        if taken is not None and taken > timeout + _TICK:
            yield Violation("late", f"{sent} took {taken} s to its end")
        # A send_many waits for each of its records.
        waited = _seconds(sent.called_at, sent.entered_at)
        if waited is None and sent.outcome == "refused":
            waited = _seconds(sent.called_at, sent.ended_at)
        if sent.stream is None and waited is not None and waited > block + _TICK:
            yield Violation("blocked", f"{sent} waited {waited} s for metadata and room")
    for call in history.calls:
        taken = call.ended_at - call.began_at
        if call.limit is not None and taken > call.limit + _TICK:
            yield Violation("overtime", f"{call.what} took {taken} s, its limit is {call.limit}")


def _seconds(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else ended - began


def _is_quick_where_nothing_is_wrong(history: History) -> Iterator[Violation]:
    if not history.calm:
        return
    for transaction in history.transactions:
        taken = _seconds(transaction.aborting_at, transaction.ended_at)
        if taken is not None and taken > _CALM_SECONDS:
            yield Violation("calm", f"the abort of {transaction} took {taken} s for no reason")
    patience = history.options["linger_ms"] / 1000 + _CALM_SECONDS
    if history.options["delivery_timeout_ms"] / 1000 < patience:
        return
    for sent in history.sent:
        if sent.outcome == "failed" and sent.error != "AbortedError":
            yield Violation("calm", f"{sent} failed with {sent.error}, and nothing was wrong")
        taken = _seconds(sent.entered_at, sent.ended_at)
        if taken is not None and taken > patience:
            yield Violation("calm", f"{sent} took {taken} s for no reason")


def _is_committed_where_nothing_is_wrong(history: History) -> Iterator[Violation]:
    if not history.calm:
        return
    sent_in: dict[int | None, list[Sent]] = defaultdict(list)
    for sent in history.sent:
        sent_in[sent.transaction].append(sent)
    closing = min((call.began_at for call in history.calls if call.what == "close"), default=None)
    for transaction in history.transactions:
        if closing is not None and (
            transaction.ended_at is None or transaction.ended_at >= closing
        ):
            continue  # a close that cannot wait gives records up
        if transaction.refused and not any(map(_may_spoil, sent_in[transaction.number])):
            yield Violation("calm", f"{transaction} could not be committed for no reason")


#: Refusals that are an answer, not a failure: who does not wait may have to try again.
_NO_FAILURE = ("BufferFull", "MetadataNotReady")

#: What records hear of a transaction that has ended, or never will.
_OF_THE_END = ("TransactionAborted", "AbortedError", "IllegalStateError", "ProducerClosed")


def _may_spoil(sent: Sent) -> bool:
    """Whether its transaction may have failed because of this record."""
    if sent.outcome == "cancelled":
        return True  # what it was told, nobody knows
    return sent.error not in ("", *_NO_FAILURE, *_OF_THE_END)


def _nothing_expires_that_has_time(history: History) -> Iterator[Violation]:
    if history.options["delivery_timeout_ms"] < PATIENT_MS:
        return
    for sent in history.sent:
        if sent.error in ("DeliveryTimeout", "BufferTimeout"):
            yield Violation("starved", f"{sent}: {sent.error}, long after all troubles were over")


def _memory_reaches_who_waits_for_it(history: History) -> Iterator[Violation]:
    # What is given back at that very moment comes too late.
    given_back = {
        sent.ended_at for sent in history.sent if sent.outcome in ("acknowledged", "failed")
    }
    for sent in history.sent:
        if sent.nobody_had_any and sent.ended_at not in given_back:
            yield Violation("starved", f"{sent} got no memory, though nobody has any")


def _nothing_fails_that_can_be_mended(history: History) -> Iterator[Violation]:
    if not history.mendable:
        return
    forgetful = {topic for topic, _ in history.forgotten}
    for sent in history.sent:
        # A batch that may be stored, behind which another one was taken for the first of all: it
        # can neither follow nor be sent anew (see above).
        unclear = sent.error == "BrokerRejected" and sent.persisted == "maybe"
        if sent.outcome == "failed" and not (unclear and sent.record.topic in forgetful):
            yield Violation("needless", f"{sent}: {sent.error}, and all that was wrong has passed")


def _transactions_are_atomic(history: History) -> Iterator[Violation]:
    """A committed one is visible whole, in doubt whole or not at all, any other not at all."""
    if not history.transactional:
        return
    visible = _by_number(history.committed)
    sent_in: dict[int | None, list[Sent]] = defaultdict(list)
    for sent in history.sent:
        sent_in[sent.transaction].append(sent)
        if len(visible[sent.record.number]) > 1:
            yield Violation("doubled", f"{sent} is visible twice")
    for sent in sent_in.pop(None, ()):
        if sent.outcome not in ("refused", "cancelled") or visible[sent.record.number]:
            yield Violation("outside", f"{sent} was taken outside of a transaction")
    for transaction in history.transactions:
        records = sent_in.pop(transaction.number, [])
        seen = [sent for sent in records if visible[sent.record.number]]
        unseen = [
            sent
            for sent in records
            if not visible[sent.record.number]
            and not (sent.outcome == "refused" and sent.error in _NO_FAILURE)
            and sent.outcome != "cancelled"
        ]
        offset = history.offsets.get(transaction.offsets_of)
        if offset is not None and offset != transaction.offsets_of:
            yield Violation("offsets", f"{transaction} has committed the offset {offset}")
        # Another one may have committed the same.
        alone = not any(
            other is not transaction
            and other.offsets_of == transaction.offsets_of
            and other.offsets_asked
            and other.may_be_committed()
            for other in history.transactions
        )
        is_shown = offset is not None and (alone or transaction.told == "committed")
        shown: list[object] = [*seen, *(["its offsets"] if is_shown else [])]
        hidden: list[object] = [
            *unseen,
            *(["its offsets"] if offset is None and transaction.offsets_asked else []),
        ]
        if transaction.told == "committed":
            if hidden:
                yield Violation("torn", f"{transaction} is committed without {_list(hidden)}")
            for sent in records:
                if sent.outcome == "failed":
                    yield Violation("torn", f"{transaction} is committed, and {sent} has failed")
        elif transaction.told == "aborted" or transaction.refused:
            if shown:
                yield Violation("undead", f"{transaction} is aborted, but not {_list(shown)}")
        elif not transaction.commit_asked:
            if shown:
                yield Violation("undead", f"nobody has committed {_list(shown)} of {transaction}")
        elif shown and hidden:
            yield Violation("torn", f"{transaction} has {_list(shown)} without {_list(hidden)}")
        if (
            history.taken_over_at is not None
            and transaction.began_at > history.taken_over_at
            and shown
        ):
            yield Violation("fenced", f"{_list(shown)} of {transaction}, which was fenced before")
    for sents in sent_in.values():
        for sent in sents:
            yield Violation("outside", f"{sent} is of a transaction that nobody has begun")


def _list(items: list[object]) -> str:
    return ", ".join(map(str, items))


RULES: tuple[Callable[[History], Iterator[Violation]], ...] = (
    _every_record_has_one_end,
    _acknowledged_is_stored_where_it_was_said,
    _is_stored_once,
    _what_was_acknowledged_is_not_in_the_next_topic,
    _persisted_is_true,
    _keeps_its_contents,
    _keeps_keys_together,
    _keeps_the_order,
    _is_refused_where_its_users_code_raised,
    _ends_in_time,
    _is_quick_where_nothing_is_wrong,
    _is_committed_where_nothing_is_wrong,
    _nothing_expires_that_has_time,
    _memory_reaches_who_waits_for_it,
    _nothing_fails_that_can_be_mended,
    _transactions_are_atomic,
)
