"""The state machine of transactions, with a coordinator that answers as it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncproducer.cli.error_tables import effect
from asyncproducer.core import wire
from asyncproducer.core.backoff import ExponentialBackoff
from asyncproducer.core.batch import NO_HEADERS, ProducerBatch
from asyncproducer.core.outcome import TRANSACTIONAL
from asyncproducer.core.sequences import PartitionSequences
from asyncproducer.core.transactions import (
    ABORT,
    BEGIN,
    COMMIT,
    SEND,
    SEND_OFFSETS,
    START,
    Kind,
    MarkerPause,
    Operation,
    TransactionManager,
    TransactionState,
    TxnRequest,
)
from asyncproducer.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    ConnectionFailed,
    DeliveryTimeout,
    ErrorCode,
    IllegalStateError,
    KafkaError,
    ProducerClosed,
    ProducerFenced,
    RecordTooLarge,
    RequestTimedOut,
    TransactionAborted,
    UnsupportedVersionError,
)
from asyncproducer.records import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

E = ErrorCode
S = TransactionState

ME = (wire.FindCoordinatorRequest.TRANSACTION, "tx")
GROUP = ConsumerGroupMetadata("group")
GROUP_KEY = (wire.FindCoordinatorRequest.GROUP, "group")
PLACE = TopicPartition("in", 0)
OTHER_PLACE = TopicPartition("in", 1)
OFFSETS = {PLACE: OffsetAndMetadata(5), OTHER_PLACE: OffsetAndMetadata(6)}


def partition(topic: str = "t", number: int = 0) -> PartitionSequences:
    owner = SimpleNamespace(topic=SimpleNamespace(name=topic), partition=number, leader=1)
    return PartitionSequences(owner)


def batch(records: int = 1) -> ProducerBatch:
    made = ProducerBatch("t", 0, write_limit=16384, created_at=0.0)
    for _ in range(records):
        assert made.try_append(0, None, b"value", NO_HEADERS) is not None
    made.close()
    return made


class World:
    """A manager on version 1 or 2, its clock, and its brokers."""

    def __init__(self, version_two: bool = False, *, can_bump: bool = True) -> None:
        self.version_two = version_two
        self.now = 0.0
        self.epoch = 0
        self.manager = TransactionManager(
            "tx",
            60_000,
            version_two=lambda: self.version_two,
            backoff=ExponentialBackoff(0.1, 1.0, random=lambda: 0.5),
        )
        self.manager.can_bump = can_bump

    # -- requests

    def next(self, *, busy: bool = False) -> TxnRequest | None:
        return self.manager.next_request(self.now, busy=busy)

    def ask(self, kind: Kind, *, busy: bool = False) -> TxnRequest:
        """The next request, which is of this kind; time passes if it waits for that."""
        request = self.next(busy=busy)
        if request is None and self.manager.wake_at < float("inf"):
            self.now = self.manager.wake_at
            request = self.next(busy=busy)
        assert request is not None
        assert request.kind is kind
        return request

    def answer(
        self, request: TxnRequest, code: int = 0, **codes: int
    ) -> Iterable[PartitionSequences]:
        return self.manager.answered(request, self.response(request, code, codes), self.now)

    def response(self, request: TxnRequest, code: int, codes: dict[str, int]) -> Any:
        sent = request.wire
        if isinstance(sent, wire.FindCoordinatorRequest):
            node = -1 if code else 1
            found = (wire.Coordinator(sent.keys[0], node, "h", 1, code, None),)
            return wire.FindCoordinatorResponse(0, found)
        if isinstance(sent, wire.InitProducerIdRequest):
            if code:
                return wire.InitProducerIdResponse(0, code, -1, -1)
            self.epoch = sent.producer_epoch + 1
            return wire.InitProducerIdResponse(0, code, 4000, self.epoch)
        if isinstance(sent, wire.AddPartitionsToTxnRequest):
            places = {p: codes.get(str(p).replace("-", "_"), code) for p in sent.partitions}
            return wire.AddPartitionsToTxnResponse(0, places)
        if isinstance(sent, wire.AddOffsetsToTxnRequest):
            return wire.AddOffsetsToTxnResponse(0, code)
        if isinstance(sent, wire.TxnOffsetCommitRequest):
            places = {p: codes.get(str(p).replace("-", "_"), code) for p in sent.offsets}
            return wire.TxnOffsetCommitResponse(0, places)
        assert isinstance(sent, wire.EndTxnRequest)
        if code or not sent.version_two:
            return wire.EndTxnResponse(0, code, -1, -1)
        self.epoch = sent.producer_epoch + 1
        return wire.EndTxnResponse(0, 0, sent.producer_id, self.epoch)

    def run(self) -> list[Kind]:
        """Everything goes well from here on. Returns the requests."""
        kinds: list[Kind] = []
        while True:
            request = self.next()
            if request is None:
                if self.manager.wake_at == float("inf"):
                    return kinds
                self.now = self.manager.wake_at
                continue
            kinds.append(request.kind)
            self.answer(request)

    # -- states

    def ready(self) -> World:
        self.manager.observed(self.started())
        assert self.manager.state is S.READY
        return self

    def started(self) -> Operation:
        operation = self.manager.initialize()
        self.run()
        return operation

    def begun(self) -> World:
        self.ready().manager.begin()
        return self

    def joins(self, *partitions: PartitionSequences) -> World:
        """Their first batches may leave."""
        for each in partitions or (partition(),):
            if not self.manager.sequences.may_drain(each, batch()):
                self.answer(self.ask(Kind.ADD_PARTITIONS, busy=True))
            assert self.manager.sequences.may_drain(each, batch())
        return self

    def sends(self, where: PartitionSequences, records: int = 1) -> ProducerBatch:
        """A batch leaves."""
        sent = batch(records)
        assert self.manager.sequences.may_drain(where, sent)
        self.manager.sequences.assign(where, sent)
        sent.in_flight = True
        return sent

    def lands(self, where: PartitionSequences, sent: ProducerBatch, offset: int = 0) -> None:
        sent.in_flight = False
        self.manager.sequences.acknowledged(where, sent, offset)

    def ended(self, operation: Operation) -> None:
        assert operation.done
        self.manager.observed(operation)
        if operation.error is not None:
            raise operation.error


both_versions = pytest.mark.parametrize("two", [False, True], ids=["version 1", "version 2"])


# -- states and calls ----------------------------------------------------------------------

#: How each state is come to.
WAYS: dict[TransactionState, Callable[[], World]] = {
    S.UNINITIALIZED: World,
    S.INITIALIZING: lambda: initializing(),
    S.READY: lambda: World().ready(),
    S.IN_TRANSACTION: lambda: World().begun(),
    S.COMMITTING: lambda: ending(COMMIT),
    S.ABORTING: lambda: ending(ABORT),
    S.ABORTABLE_ERROR: lambda: failed(),
    S.FATAL_ERROR: lambda: fenced(),
}


def initializing() -> World:
    world = World()
    world.manager.initialize()
    return world


def ending(how: str) -> World:
    world = World().begun().joins()
    if how == COMMIT:
        world.manager.commit()
    else:
        world.manager.abort()
    return world


def failed(two: bool = False) -> World:
    world = World(two).begun().joins()
    world.manager.abortable(RecordTooLarge("too large"))
    return world


def fenced() -> World:
    world = World().begun()
    world.manager.fatal(ProducerFenced("fenced"))
    return world


def call(manager: TransactionManager, name: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        START: manager.initialize,
        BEGIN: manager.begin,
        SEND: lambda: manager.check(SEND),
        SEND_OFFSETS: lambda: manager.send_offsets(OFFSETS, GROUP),
        COMMIT: manager.commit,
        ABORT: manager.abort,
    }
    calls[name]()


@pytest.mark.parametrize("state", TransactionState)
def test_each_state_can_be_come_to(state: TransactionState) -> None:
    assert WAYS[state]().manager.state is state


#: Spec 9.2, written out here: the state in which each call is allowed. A commit and an abort may
#: also be called again while they go on: they wait for the same end.
LEGAL = [
    (S.UNINITIALIZED, START),
    (S.READY, BEGIN),
    (S.IN_TRANSACTION, SEND),
    (S.IN_TRANSACTION, SEND_OFFSETS),
    (S.IN_TRANSACTION, COMMIT),
    (S.IN_TRANSACTION, ABORT),
    (S.ABORTABLE_ERROR, ABORT),
    (S.COMMITTING, COMMIT),
    (S.ABORTING, ABORT),
]
NAMES = [START, BEGIN, SEND, SEND_OFFSETS, COMMIT, ABORT]
PAIRS = [(state, name) for state in TransactionState for name in NAMES]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


@pytest.mark.parametrize(("state", "name"), LEGAL)
def test_a_call_in_a_state_where_it_is_legal_is_taken(state: TransactionState, name: str) -> None:
    call(WAYS[state]().manager, name)


@pytest.mark.parametrize(("state", "name"), ILLEGAL)
def test_a_call_in_a_state_where_it_is_illegal_names_both_and_changes_nothing(
    state: TransactionState, name: str
) -> None:
    """TX-01, TX-08, TX-22, TX-38: IllegalStateError, or what went wrong before where it did."""
    manager = WAYS[state]().manager
    before = manager.error
    expected: type[KafkaError] = IllegalStateError
    text, code, cause = "", None, None
    if state is S.FATAL_ERROR:
        expected, text, code = ProducerFenced, "fenced", E.PRODUCER_FENCED
    elif state is S.ABORTABLE_ERROR and name not in (BEGIN, START):
        expected, text, cause = TransactionAborted, "too large; abort_transaction", before
    with pytest.raises(KafkaError) as caught:
        call(manager, name)
    assert type(caught.value) is expected
    named = f"{name}()"
    if name == SEND:
        named = "send() (or enqueue(), send_nowait(), send_many(), send_table())"
    assert str(caught.value).startswith(f"{named} is not allowed in state {state.name}: ")
    assert text in str(caught.value)
    assert (caught.value.code, caught.value.__cause__) == (code, cause)
    assert manager.state is state
    assert manager.error is before


def test_an_error_of_every_call_keeps_what_it_has_and_grows_no_longer() -> None:
    """Its class, cause, code and attributes are what `except` clauses look at."""
    world = World().begun()
    first = BrokerError(E.INVALID_PRODUCER_ID_MAPPING, "forgotten")
    first.__cause__ = cause = ConnectionFailed("lost")
    world.manager.fatal(first)
    texts = set()
    for _ in range(3):
        with pytest.raises(BrokerError) as caught:
            call(world.manager, BEGIN)
        assert caught.value is not first
        assert (caught.value.code, caught.value.retriable) == (first.code, False)
        assert caught.value.__cause__ is cause
        texts.add(str(caught.value))
    assert texts == {f"begin_transaction() is not allowed in state FATAL_ERROR: {first}"}


#: Spec 9.1, from where each state is come to. Not ours: UNINITIALIZED again, and an error once
#: more.
COME_FROM = {
    S.UNINITIALIZED: set[TransactionState](),
    S.INITIALIZING: {S.UNINITIALIZED, S.READY, S.COMMITTING, S.ABORTING},
    S.READY: {S.INITIALIZING, S.COMMITTING, S.ABORTING},
    S.IN_TRANSACTION: {S.READY},
    S.COMMITTING: {S.IN_TRANSACTION},
    S.ABORTING: {S.IN_TRANSACTION, S.ABORTABLE_ERROR},
    S.ABORTABLE_ERROR: {S.IN_TRANSACTION, S.COMMITTING, S.INITIALIZING},
    S.FATAL_ERROR: set(TransactionState) - {S.FATAL_ERROR},
}


@pytest.mark.parametrize("to", TransactionState)
@pytest.mark.parametrize("state", TransactionState)
def test_a_move_that_is_illegal_names_both_states(
    state: TransactionState, to: TransactionState
) -> None:
    manager = WAYS[state]().manager
    if state in COME_FROM[to]:
        manager._move(to)
        assert manager.state is to
        return
    with pytest.raises(IllegalStateError, match=f"{state.name} cannot become {to.name}"):
        manager._move(to)
    assert manager.state is state


@pytest.mark.parametrize(
    ("state", "is_open"),
    [
        (S.READY, False),
        (S.IN_TRANSACTION, True),
        (S.COMMITTING, True),
        (S.ABORTING, True),
        (S.ABORTABLE_ERROR, True),
        (S.FATAL_ERROR, False),
    ],
)
def test_a_transaction_is_open_from_its_beginning_to_the_answer_to_its_end(
    state: TransactionState, is_open: bool
) -> None:
    """TX-03."""
    world = WAYS[state]()
    assert world.manager.is_open is is_open
    if state in (S.COMMITTING, S.ABORTING):
        world.answer(world.ask(Kind.END))
        assert not world.manager.is_open


# -- the way of a transaction --------------------------------------------------------------


def test_requests_of_a_transaction_in_version_1() -> None:
    """TX-07: everything is asked for before it is done, and the end comes last."""
    world = World()
    manager = world.manager
    initialized = manager.initialize()
    find = world.ask(Kind.FIND_COORDINATOR)
    assert find.node is None
    assert isinstance(find.wire, wire.FindCoordinatorRequest)
    assert (find.wire.key_type, *find.wire.keys) == ME
    world.answer(find)
    init = world.ask(Kind.INIT_PRODUCER_ID)
    assert init.node == 1
    assert not initialized.done
    world.answer(init)
    world.ended(initialized)
    manager.begin()
    assert world.next() is None
    where = partition()
    world.joins(where)
    operation = manager.send_offsets(OFFSETS, GROUP)
    assert world.run() == [Kind.ADD_OFFSETS, Kind.FIND_COORDINATOR, Kind.COMMIT_OFFSETS]
    world.ended(operation)
    committed = manager.commit()
    end = world.ask(Kind.END)
    assert isinstance(end.wire, wire.EndTxnRequest)
    assert end.wire.commit
    assert end.wire.cap == 4
    world.answer(end)
    world.ended(committed)
    assert manager.state is S.READY
    assert manager.sequences.producer_epoch == 0


def test_requests_of_a_transaction_in_version_2() -> None:
    """TX-05, TX-07, TX-42, KP-30: partitions and offsets need no request of their own."""
    world = World(True).begun()
    manager = world.manager
    where = partition()
    assert manager.sequences.may_drain(where, batch())
    assert manager.sequences.may_drain(where, batch())
    assert world.next() is None
    operation = manager.send_offsets(OFFSETS, GROUP)
    assert world.run() == [Kind.FIND_COORDINATOR, Kind.COMMIT_OFFSETS]
    world.ended(operation)
    committed = manager.commit()
    end = world.ask(Kind.END)
    assert end.wire is not None
    assert end.wire.cap is None
    world.answer(end)
    world.ended(committed)
    assert manager.sequences.producer_epoch == 1


def test_offsets_are_committed_only_after_their_group_is_in_the_transaction() -> None:
    """TX-07: and only then the call has its end."""
    world = World().begun()
    operation = world.manager.send_offsets(OFFSETS, GROUP)
    world.answer(world.ask(Kind.ADD_OFFSETS))
    assert not operation.done
    world.answer(world.ask(Kind.FIND_COORDINATOR))
    request = world.ask(Kind.COMMIT_OFFSETS)
    assert isinstance(request.wire, wire.TxnOffsetCommitRequest)
    assert request.wire.offsets == OFFSETS
    assert request.wire.cap == 4
    assert not operation.done
    world.answer(request)
    assert operation.done


def test_one_request_at_a_time() -> None:
    """SN-13: nothing is asked while an answer is waited for."""
    world = World().begun()
    world.manager.send_offsets(OFFSETS, GROUP)
    request = world.ask(Kind.ADD_OFFSETS)
    world.manager.sequences.may_drain(partition(), batch())
    assert world.next() is None
    world.answer(request)
    assert Kind.ADD_PARTITIONS in world.run()


@both_versions
@pytest.mark.parametrize("on_its_way", [False, True])
def test_an_abort_forgets_who_coordinates_a_group(two: bool, on_its_way: bool) -> None:
    world = World(two).begun()
    operation = world.manager.send_offsets(OFFSETS, GROUP)
    if not two:
        world.answer(world.ask(Kind.ADD_OFFSETS))
    find = world.ask(Kind.FIND_COORDINATOR)
    if not on_its_way:
        world.answer(find, E.COORDINATOR_NOT_AVAILABLE)
    world.manager.abort()
    if on_its_way:
        world.answer(find, E.COORDINATOR_NOT_AVAILABLE)
    assert Kind.FIND_COORDINATOR not in world.run()
    assert operation.done
    assert world.manager.state is S.READY


def test_only_offsets_and_the_end_wait_for_a_groups_coordinator() -> None:
    world = World().begun()
    world.manager.send_offsets(OFFSETS, GROUP)
    world.answer(world.ask(Kind.ADD_OFFSETS))
    find = world.ask(Kind.FIND_COORDINATOR)
    world.answer(find, E.COORDINATOR_NOT_AVAILABLE)
    world.manager.commit()
    world.manager.sequences.may_drain(partition(), batch())
    world.answer(world.ask(Kind.ADD_PARTITIONS))
    assert world.ask(Kind.FIND_COORDINATOR) is find
    world.answer(find)
    assert world.run() == [Kind.COMMIT_OFFSETS, Kind.END]


@both_versions
def test_a_transaction_of_nothing_ends_without_a_request(two: bool) -> None:
    """TX-16: the broker has not heard of it."""
    for how in (COMMIT, ABORT):
        world = World(two).begun()
        operation = world.manager.commit() if how == COMMIT else world.manager.abort()
        assert world.run() == []
        world.ended(operation)
        assert world.manager.state is S.READY


def test_partitions_that_come_meanwhile_go_together_in_the_next_request() -> None:
    """TX-18."""
    world = World().begun()
    sequences = world.manager.sequences
    first, second, third = (partition("t", n) for n in range(3))
    assert not sequences.may_drain(first, batch())
    request = world.ask(Kind.ADD_PARTITIONS, busy=True)
    for each in (second, third, first):
        assert not sequences.may_drain(each, batch())
    assert list(world.answer(request)) == [first]
    assert sequences.may_drain(first, batch())
    request = world.ask(Kind.ADD_PARTITIONS, busy=True)
    assert isinstance(request.wire, wire.AddPartitionsToTxnRequest)
    assert request.wire.partitions == (TopicPartition("t", 1), TopicPartition("t", 2))


def test_what_is_added_late_is_added_before_the_end() -> None:
    """TX-18, TX-23: and the end waits until nothing is on its way."""
    world = World().begun()
    where = partition()
    assert not world.manager.sequences.may_drain(where, batch())
    world.manager.commit()
    world.answer(world.ask(Kind.ADD_PARTITIONS, busy=True))
    assert world.manager.sequences.may_drain(where, batch())
    assert world.next(busy=True) is None
    world.ask(Kind.END)


def test_only_partitions_in_the_transaction_may_send() -> None:
    """TX-04, TX-28: also while it can only be aborted; no new ones then."""
    world = World().begun()
    inside, outside = partition("t", 0), partition("t", 1)
    world.joins(inside)
    assert not world.manager.sequences.may_drain(outside, batch())
    world.manager.abortable(RecordTooLarge("too large"))
    assert world.manager.sequences.may_drain(inside, batch())
    assert not world.manager.sequences.may_drain(outside, batch())
    assert world.next() is None  # nor is it asked for
    operation = world.manager.abort()
    world.run()
    world.ended(operation)
    assert not world.manager.sequences.may_drain(inside, batch())


@both_versions
def test_nothing_may_be_sent_outside_of_a_transaction(two: bool) -> None:
    """TX-01."""
    world = World(two).ready()
    assert not world.manager.sequences.may_drain(partition(), batch())
    assert world.next() is None


def test_batches_are_marked_as_transactional() -> None:
    world = World(True).begun()
    sent = world.sends(partition())
    assert sent.transactional
    assert (sent.producer_id, sent.producer_epoch, sent.base_sequence) == (4000, 0, 0)


# -- versions ------------------------------------------------------------------------------


def test_the_version_changes_only_between_two_transactions() -> None:
    """TX-42: here from 1 to 2, with a new epoch, so that nothing old gets in."""
    world = World(False).begun()
    world.version_two = True
    where = partition()
    assert not world.manager.sequences.may_drain(where, batch())
    world.joins(where)
    operation = world.manager.commit()
    end = world.ask(Kind.END)
    assert isinstance(end.wire, wire.EndTxnRequest)
    assert not end.wire.version_two
    world.answer(end)
    assert not operation.done
    bump = world.ask(Kind.BUMP_EPOCH)
    assert isinstance(bump.wire, wire.InitProducerIdRequest)
    assert (bump.wire.producer_id, bump.wire.producer_epoch) == (4000, 0)
    world.answer(bump)
    world.ended(operation)
    assert world.manager.sequences.producer_epoch == 1
    world.manager.begin()
    assert world.manager.sequences.may_drain(where, batch())
    world.version_two = False
    operation = world.manager.commit()
    assert world.run() == [Kind.END]
    world.ended(operation)
    assert not world.manager.version_two
    world.manager.begin()
    assert not world.manager.sequences.may_drain(where, batch())


def test_the_version_stays_where_no_new_epoch_can_part_two_transactions() -> None:
    """Else the markers of this one, written later, would commit records of the next one."""
    world = World(False, can_bump=False).begun()
    world.version_two = True
    world.joins()
    operation = world.manager.commit()
    assert world.run() == [Kind.END]
    world.ended(operation)
    assert not world.manager.version_two


def test_a_producer_id_that_the_end_brings_is_taken_over() -> None:
    """TX-42: at the last epoch there is another id, whose epoch is 0."""
    world = World(True).begun().joins()
    world.manager.commit()
    end = world.ask(Kind.END)
    world.manager.answered(end, wire.EndTxnResponse(0, 0, 5000, 0), world.now)
    sequences = world.manager.sequences
    assert (sequences.producer_id, sequences.producer_epoch) == (5000, 0)


def test_sequences_start_anew_with_the_epoch_and_go_on_without_one() -> None:
    """TX-33, TX-42."""
    for two, expected in ((True, 0), (False, 3)):
        world = World(two).begun()
        where = partition()
        world.joins(where)
        world.lands(where, world.sends(where, records=3))
        operation = world.manager.commit()
        world.run()
        world.ended(operation)
        world.manager.begin()
        world.joins(where)
        assert world.sends(where).base_sequence == expected


# -- errors of records ---------------------------------------------------------------------


@both_versions
def test_a_transaction_with_a_failed_record_can_only_be_aborted(two: bool) -> None:
    """TX-22, TX-29, TX-40, KP-25: and the next one is as good as any."""
    world = World(two).begun().joins()
    cause = DeliveryTimeout("expired", code=E.REQUEST_TIMED_OUT)
    world.manager.abortable(cause)
    world.manager.abortable(RecordTooLarge("a second one"))
    for name in (SEND, SEND_OFFSETS, COMMIT):
        with pytest.raises(TransactionAborted, match="expired") as caught:
            call(world.manager, name)
        assert caught.value.__cause__ is cause
        assert caught.value.code == E.REQUEST_TIMED_OUT
    operation = world.manager.abort()
    world.run()
    world.ended(operation)
    world.manager.begin()
    world.joins()
    operation = world.manager.commit()
    world.run()
    world.ended(operation)


@both_versions
def test_a_record_that_fails_during_the_commit_ends_it(two: bool) -> None:
    """TX-29: its end is not sent any more."""
    world = World(two).begun().joins()
    operation = world.manager.commit()
    assert world.next(busy=True) is None
    world.manager.abortable(RecordTooLarge("too large"))
    assert operation.done
    assert world.next() is None
    with pytest.raises(TransactionAborted, match="too large"):
        world.ended(operation)
    world.manager.abort()
    end = world.ask(Kind.END)
    assert isinstance(end.wire, wire.EndTxnRequest)
    assert not end.wire.commit


def test_an_abort_after_an_error_gets_a_new_epoch_from_the_coordinator() -> None:
    """TX-34, TX-21: in version 1 by a request after the end; all sequences begin at 0."""
    world = World().begun()
    where = partition()
    world.joins(where)
    world.lands(where, world.sends(where, records=3))
    world.manager.abortable(BrokerError(E.INVALID_PRODUCER_EPOCH))
    operation = world.manager.abort()
    world.answer(world.ask(Kind.END))
    assert world.manager.state is S.INITIALIZING
    assert not operation.done
    world.answer(world.ask(Kind.BUMP_EPOCH))
    world.ended(operation)
    assert world.manager.sequences.producer_epoch == 1
    world.manager.begin()
    world.joins(where)
    assert world.sends(where).base_sequence == 0


def test_an_abort_after_an_error_needs_no_further_request_in_version_2() -> None:
    """TX-34: the end has brought the epoch."""
    world = failed(two=True)
    operation = world.manager.abort()
    assert world.run() == [Kind.END]
    world.ended(operation)
    assert world.manager.sequences.producer_epoch == 1


def test_an_error_before_anything_was_asked_needs_no_request_at_all() -> None:
    """TX-16, TX-26."""
    world = World().begun()
    world.manager.abortable(RecordTooLarge("too large"))
    operation = world.manager.abort()
    assert world.run() == []
    world.ended(operation)
    assert world.manager.sequences.producer_epoch == 0


def test_where_nobody_gives_epochs_a_certain_hole_is_gone_back_over() -> None:
    """TX-33: before Kafka 2.5."""
    world = World(can_bump=False).begun()
    where = partition()
    world.joins(where)
    world.lands(where, world.sends(where, records=3))
    refused = world.sends(where)
    assert refused.base_sequence == 3
    refused.in_flight = False
    world.manager.sequences.rejected(where, refused)
    world.manager.abortable(BrokerError(E.INVALID_RECORD))
    operation = world.manager.abort()
    assert world.run() == [Kind.END]
    world.ended(operation)
    world.manager.begin()
    world.joins(where)
    assert world.sends(where).base_sequence == 3


@pytest.mark.parametrize("aborting", [False, True])
def test_where_nobody_gives_epochs_an_unknown_fate_is_fatal(aborting: bool) -> None:
    """TX-30, TX-31: the next sequence could be anything."""
    world = World(can_bump=False).begun()
    where = partition()
    world.joins(where)
    lost = world.sends(where)
    if aborting:
        world.manager.abort()
    world.manager.sequences.expired(where, lost)
    if aborting:
        world.run()
    else:
        world.manager.abortable(DeliveryTimeout("expired"))
    assert world.manager.state is S.FATAL_ERROR
    with pytest.raises(TransactionAborted, match="too old to begin anew"):
        world.manager.check(BEGIN)


def test_a_batch_that_fails_after_the_new_epoch_changes_nothing_of_it() -> None:
    """TX-37: it was given up, and its answer comes late."""
    world = World(True).begun()
    where = partition()
    world.joins(where)
    late = world.sends(where)
    world.manager.sequences.expired(where, late)
    world.manager.abortable(DeliveryTimeout("expired"))
    operation = world.manager.abort()
    world.run()
    world.ended(operation)
    world.manager.begin()
    world.joins(where)
    world.lands(where, world.sends(where, records=2))
    world.manager.sequences.rejected(where, late)
    world.lands(where, late)
    assert not world.manager.sequences.damaged
    assert world.sends(where).base_sequence == 2


def test_an_error_during_an_abort_is_ignored() -> None:
    """TX-22: nothing of it counts anyway."""
    world = ending(ABORT)
    world.manager.abortable(RecordTooLarge("too large"))
    assert world.manager.is_doomed
    world.run()
    assert world.manager.state is S.READY


def test_nothing_more_happens_after_a_fatal_error() -> None:
    """TX-32: the first one stays."""
    world = fenced()
    world.manager.abortable(RecordTooLarge("too large"))
    world.manager.fatal(BrokerError(E.UNKNOWN_SERVER_ERROR))
    assert world.next() is None
    with pytest.raises(ProducerFenced):
        world.manager.check(SEND)


# -- answers -------------------------------------------------------------------------------


def reaches(kind: Kind) -> tuple[World, TxnRequest, Operation | None]:
    """A world whose next request, under way now, is of this kind; and who waits for it."""
    world = World()
    manager = world.manager
    operation: Operation | None = None
    if kind in (Kind.FIND_COORDINATOR, Kind.INIT_PRODUCER_ID):
        operation = manager.initialize()
        if kind is Kind.INIT_PRODUCER_ID:
            world.answer(world.ask(Kind.FIND_COORDINATOR))
        return world, world.ask(kind), operation
    world.begun()
    if kind is Kind.ADD_PARTITIONS:
        manager.sequences.may_drain(partition(), batch())
    elif kind in (Kind.ADD_OFFSETS, Kind.COMMIT_OFFSETS):
        operation = manager.send_offsets(OFFSETS, GROUP)
        if kind is Kind.COMMIT_OFFSETS:
            world.answer(world.ask(Kind.ADD_OFFSETS))
            world.answer(world.ask(Kind.FIND_COORDINATOR))
    elif kind is Kind.END:
        world.joins()
        operation = manager.commit()
    else:
        world.joins()
        manager.abortable(RecordTooLarge("too large"))
        operation = manager.abort()
        world.answer(world.ask(Kind.END))
    return world, world.ask(kind), operation


ALL = list(Kind)
AFTER_BEGIN = [Kind.ADD_PARTITIONS, Kind.ADD_OFFSETS, Kind.COMMIT_OFFSETS, Kind.END]
TO_A_COORDINATOR = [kind for kind in Kind if kind is not Kind.FIND_COORDINATOR]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "code",
    [E.COORDINATOR_LOAD_IN_PROGRESS, E.CONCURRENT_TRANSACTIONS, E.UNKNOWN_TOPIC_OR_PARTITION],
)
def test_what_may_pass_is_repeated_after_its_backoff(kind: Kind, code: ErrorCode) -> None:
    """TX-19, TX-25."""
    world, request, operation = reaches(kind)
    began = world.now
    world.answer(request, code)
    assert operation is None or not operation.done
    assert world.next() is None
    assert world.ask(kind) is request
    assert 0.001 <= world.now - began <= 0.1
    assert request.attempts == 1
    world.answer(request)
    world.run()
    assert operation is None or operation.done
    assert world.manager.error is None


def test_the_first_partitions_wait_only_a_moment_for_the_markers_of_the_last_transaction() -> None:
    """TX-06: up to 20 ms, soon at first, and retry_backoff_ms for everything else."""
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    world.answer(request, E.COORDINATOR_LOAD_IN_PROGRESS)
    assert world.next() is None
    assert world.manager.wake_at == pytest.approx(world.now + 0.1)
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    for pause in (0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02):
        world.answer(request, E.CONCURRENT_TRANSACTIONS)
        assert world.next() is None
        assert world.manager.wake_at == pytest.approx(world.now + pause)
        request = world.ask(Kind.ADD_PARTITIONS)
    world.answer(request)
    world.manager.sequences.may_drain(partition("t", 1), batch())
    world.answer(world.ask(Kind.ADD_PARTITIONS), E.CONCURRENT_TRANSACTIONS)
    assert world.next() is None
    assert world.manager.wake_at == pytest.approx(world.now + 0.1)


@pytest.mark.parametrize("kind", [Kind.ADD_OFFSETS, Kind.COMMIT_OFFSETS])
def test_so_do_the_offsets_of_a_group(kind: Kind) -> None:
    """Java waits for retry_backoff_ms: most of the time of a transaction with offsets."""
    world, request, _ = reaches(kind)
    world.answer(request, E.COORDINATOR_LOAD_IN_PROGRESS)
    assert world.next() is None
    assert world.manager.wake_at == pytest.approx(world.now + 0.1)
    world, request, _ = reaches(kind)
    for pause in (0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02):
        world.answer(request, E.CONCURRENT_TRANSACTIONS)
        assert world.next() is None
        assert world.manager.wake_at == pytest.approx(world.now + pause)
        request = world.ask(kind)


@pytest.mark.parametrize("kind", TO_A_COORDINATOR)
@pytest.mark.parametrize("code", [E.COORDINATOR_NOT_AVAILABLE, E.NOT_COORDINATOR])
def test_a_coordinator_that_is_none_any_more_is_looked_for(kind: Kind, code: ErrorCode) -> None:
    """TX-11, TX-19: and the same request goes to the new one."""
    world, request, operation = reaches(kind)
    world.answer(request, code)
    find = world.ask(Kind.FIND_COORDINATOR)
    assert find.key == request.key
    assert request.key is not None
    moved = wire.Coordinator(request.key[1], 7, "h", 1, 0, None)
    world.manager.answered(find, wire.FindCoordinatorResponse(0, (moved,)), world.now)
    assert world.ask(kind) is request
    assert request.node == 7
    world.answer(request)
    world.run()
    assert operation is None or operation.done


@pytest.mark.parametrize("kind", TO_A_COORDINATOR)
@pytest.mark.parametrize("error", [ConnectionFailed("lost"), RequestTimedOut("silent")])
def test_without_an_answer_the_coordinator_is_looked_for(kind: Kind, error: KafkaError) -> None:
    """TX-11: it may have died."""
    world, request, _ = reaches(kind)
    world.manager.failed(request, error, world.now)
    world.answer(world.ask(Kind.FIND_COORDINATOR))
    assert world.ask(kind) is request
    assert world.manager.trouble is error


def test_finding_a_coordinator_is_repeated_without_an_answer() -> None:
    world, request, _ = reaches(Kind.FIND_COORDINATOR)
    world.manager.failed(request, ConnectionFailed("lost"), world.now)
    assert world.ask(Kind.FIND_COORDINATOR) is request
    stranger = wire.Coordinator("other", 1, "h", 1, 0, None)
    world.manager.answered(request, wire.FindCoordinatorResponse(0, (stranger,)), world.now)
    assert world.ask(Kind.FIND_COORDINATOR) is request


def test_offsets_that_time_out_look_for_the_groups_coordinator() -> None:
    """TX-25."""
    world, request, _ = reaches(Kind.COMMIT_OFFSETS)
    world.answer(request, E.REQUEST_TIMED_OUT)
    assert world.ask(Kind.FIND_COORDINATOR).key == GROUP_KEY
    assert ME in world.manager.coordinators


def test_only_offsets_that_were_not_taken_are_sent_again() -> None:
    """TX-25."""
    world, request, operation = reaches(Kind.COMMIT_OFFSETS)
    world.answer(request, in_1=E.COORDINATOR_LOAD_IN_PROGRESS)
    again = world.ask(Kind.COMMIT_OFFSETS)
    assert isinstance(again.wire, wire.TxnOffsetCommitRequest)
    assert list(again.wire.offsets) == [OTHER_PLACE]
    assert operation is not None
    assert not operation.done
    world.answer(again)
    world.ended(operation)


@pytest.mark.parametrize("kind", TO_A_COORDINATOR)
@pytest.mark.parametrize("code", [E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED])
def test_a_producer_that_is_fenced_is_of_no_use_any_more(kind: Kind, code: ErrorCode) -> None:
    """TX-20: whatever tells it."""
    world, request, operation = reaches(kind)
    world.answer(request, code)
    assert world.manager.state is S.FATAL_ERROR
    if operation is not None:
        with pytest.raises(ProducerFenced, match="'tx'"):
            world.ended(operation)
    for name in NAMES:
        with pytest.raises(KafkaError, match="has taken over"):
            call(world.manager, name)


@pytest.mark.parametrize("kind", AFTER_BEGIN)
def test_an_abortable_answer_makes_the_transaction_so(kind: Kind) -> None:
    """TX-39."""
    world, request, operation = reaches(kind)
    world.answer(request, E.TRANSACTION_ABORTABLE)
    assert world.manager.is_doomed
    if operation is not None:
        with pytest.raises(TransactionAborted) as caught:
            world.ended(operation)
        assert caught.value.code == E.TRANSACTION_ABORTABLE
    operation = world.manager.abort()
    world.run()
    world.ended(operation)
    assert world.manager.state is S.READY


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (E.TRANSACTION_ABORTABLE, KafkaError),
        (E.UNKNOWN_PRODUCER_ID, KafkaError),
        (E.INVALID_TXN_STATE, KafkaError),
        (E.PRODUCER_FENCED, ProducerFenced),
    ],
)
def test_a_commit_that_was_asked_before_is_in_doubt_and_not_called_aborted(
    code: ErrorCode, kind: type[KafkaError]
) -> None:
    world = ending(COMMIT)
    operation = world.manager.commit()
    world.manager.failed(world.ask(Kind.END), ConnectionFailed("cut"), world.now)
    world.now += 1
    world.answer(world.ask(Kind.FIND_COORDINATOR))
    world.answer(world.ask(Kind.END), code)
    assert world.manager.state is S.FATAL_ERROR
    with pytest.raises(KafkaError, match=r"nobody knows whether .* was committed") as caught:
        world.ended(operation)
    assert type(caught.value) is kind
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("refusal", "clear"),
    [
        (E.CONCURRENT_TRANSACTIONS, True),
        # A coordinator says these also when it has lost its place while it wrote.
        (E.NOT_COORDINATOR, False),
        (E.COORDINATOR_NOT_AVAILABLE, False),
        (E.COORDINATOR_LOAD_IN_PROGRESS, False),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_commit_that_was_only_refused_is_not_in_doubt(
    refusal: ErrorCode, clear: bool, cut: bool
) -> None:
    """TX-39: and one whose answer was lost remains so, whatever is answered later."""
    world = ending(COMMIT)
    operation = world.manager.commit()
    if cut:
        world.manager.failed(world.ask(Kind.END), ConnectionFailed("cut"), world.now)
        world.now += 1
        world.answer(world.ask(Kind.FIND_COORDINATOR))
    world.answer(world.ask(Kind.END), refusal)
    world.now += 1
    if refusal in (E.NOT_COORDINATOR, E.COORDINATOR_NOT_AVAILABLE):
        world.answer(world.ask(Kind.FIND_COORDINATOR))
    world.answer(world.ask(Kind.END), E.TRANSACTION_ABORTABLE)
    with pytest.raises(KafkaError) as caught:
        world.ended(operation)
    if clear and not cut:
        assert world.manager.state is S.ABORTABLE_ERROR
        assert type(caught.value) is TransactionAborted
    else:
        assert world.manager.state is S.FATAL_ERROR
        assert "nobody knows whether" in str(caught.value)


def test_an_abort_that_can_only_be_aborted_is_fatal() -> None:
    """TX-39: and it is not called a transaction to be aborted."""
    world = ending(ABORT)
    operation = world.manager.abort()
    world.answer(world.ask(Kind.END), E.TRANSACTION_ABORTABLE)
    assert world.manager.state is S.FATAL_ERROR
    with pytest.raises(KafkaError, match="could not be aborted") as caught:
        world.ended(operation)
    assert type(caught.value) is KafkaError
    assert isinstance(caught.value.__cause__, BrokerError)


#: What makes the epoch for the next transaction one that can be asked for again (spec 7.4).
REFUSED = [
    (E.TRANSACTION_ABORTABLE, BrokerError),
    (E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, AuthorizationError),
    (E.CLUSTER_AUTHORIZATION_FAILED, AuthorizationError),
]


def needs_epoch(how: str) -> tuple[World, Operation]:
    """A transaction has its end, and the request for the next one's epoch is next."""
    world = World().begun().joins()
    if how == COMMIT:
        world.version_two = True  # the version changes with the epoch
        operation = world.manager.commit()
    else:
        world.manager.abortable(RecordTooLarge("too large"))
        operation = world.manager.abort()
    world.answer(world.ask(Kind.END))
    return world, operation


@pytest.mark.parametrize("how", [COMMIT, ABORT])
@pytest.mark.parametrize(("code", "kind"), REFUSED)
def test_an_epoch_that_is_refused_is_asked_for_again_by_the_next_abort(
    how: str, code: ErrorCode, kind: type[KafkaError]
) -> None:
    """TX-39, TX-12: what is committed stays so, and until then no transaction can begin."""
    world, operation = needs_epoch(how)
    manager = world.manager
    world.answer(world.ask(Kind.BUMP_EPOCH), code)
    past = "committed" if how == COMMIT else "aborted"
    text = f"the last transaction was {past}, but there is no epoch for the next one: "
    raised: type[KafkaError] = TransactionAborted
    if how == COMMIT:
        raised = kind if kind is AuthorizationError else KafkaError
    for pause in (0.1, 0.2, 0.4):
        assert manager.state is S.ABORTABLE_ERROR
        assert not manager.is_open
        assert world.next() is None
        if operation.name == COMMIT:
            world.ended(operation)
        else:
            with pytest.raises(KafkaError, match=text) as caught:
                world.ended(operation)
            assert type(caught.value) is raised
            assert caught.value.code == code
            assert type(caught.value.__cause__) is kind
        assert manager.lacks_epoch
        for name in (BEGIN, SEND, SEND_OFFSETS, COMMIT):
            with pytest.raises(KafkaError, match=rf"state ABORTABLE_ERROR: {text}.*asks") as other:
                call(manager, name)
            illegal = name == BEGIN or how == COMMIT
            assert type(other.value) is (IllegalStateError if illegal else TransactionAborted)
            assert type(other.value.__cause__) is kind
        # Refused once more, it changes nothing: it is asked for again and again, with a pause.
        began = world.now
        operation = manager.abort()
        assert world.next() is None
        bump = world.ask(Kind.BUMP_EPOCH)
        assert world.now - began == pytest.approx(pause)
        assert isinstance(bump.wire, wire.InitProducerIdRequest)
        assert (bump.wire.producer_id, bump.wire.producer_epoch) == (4000, 0)
        world.answer(bump, code)
    manager.observed(operation)
    operation = manager.abort()
    assert world.run() == [Kind.BUMP_EPOCH]
    world.ended(operation)
    assert (manager.state, manager.sequences.producer_epoch) == (S.READY, 1)
    assert not manager.lacks_epoch
    with pytest.raises(IllegalStateError, match=r"READY: begin_transaction\(\) comes first"):
        manager.abort()
    manager.begin()
    assert manager.is_open
    manager.abortable(RecordTooLarge("too large"))
    with pytest.raises(TransactionAborted, match="the transaction cannot be committed: too large"):
        manager.check(SEND)


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_so_it_is_where_the_coordinator_that_gives_epochs_cannot_be_asked_for(how: str) -> None:
    """TX-39: FindCoordinator, after the end of the transaction."""
    world, operation = needs_epoch(how)
    manager = world.manager
    manager.failed(world.ask(Kind.BUMP_EPOCH), ConnectionFailed("cut"), world.now)
    world.answer(world.ask(Kind.FIND_COORDINATOR), E.TRANSACTION_ABORTABLE)
    assert (operation.done, operation.error is None) == (True, how == COMMIT)
    manager.observed(operation)
    assert manager.lacks_epoch
    operation = manager.abort()
    assert world.next() is None  # there is a pause
    assert manager.wake_at == pytest.approx(world.now + 0.1)
    assert world.run() == [Kind.FIND_COORDINATOR, Kind.BUMP_EPOCH]
    world.ended(operation)
    assert manager.state is S.READY


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_where_the_coordinator_that_gives_epochs_is_refused_for_good_the_end_is_told(
    how: str,
) -> None:
    world, operation = needs_epoch(how)
    world.manager.failed(world.ask(Kind.BUMP_EPOCH), ConnectionFailed("cut"), world.now)
    world.answer(world.ask(Kind.FIND_COORDINATOR), E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    assert world.manager.state is S.FATAL_ERROR
    past = "committed" if how == COMMIT else "aborted"
    text = f"the transaction was {past}, but"
    if how == COMMIT:
        world.ended(operation)
    else:
        with pytest.raises(AuthorizationError, match=text):
            world.ended(operation)
    with pytest.raises(AuthorizationError, match=text):
        world.manager.begin()


def test_an_abort_that_nobody_asks_for_again_is_forgotten_where_its_epoch_is_refused() -> None:
    world, _ = needs_epoch(ABORT)
    operation = Operation("")
    for begins in (True, False):
        world.manager.leave_abort()
        world.answer(world.ask(Kind.BUMP_EPOCH), E.TRANSACTION_ABORTABLE)
        assert world.manager.lacks_epoch
        if begins:
            with pytest.raises(IllegalStateError, match="the last transaction was aborted, but"):
                world.manager.begin()
        operation = world.manager.abort()
    assert world.run() == [Kind.BUMP_EPOCH]
    world.ended(operation)


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_an_end_that_is_to_be_asked_for_comes_before_the_epoch(how: str) -> None:
    """Its call has timed out, or was cancelled."""
    world, operation = needs_epoch(how)
    world.answer(world.ask(Kind.BUMP_EPOCH), E.TRANSACTION_ABORTABLE)
    assert not world.manager.lacks_epoch
    with pytest.raises(IllegalStateError, match=rf"end of {how}\(\) is not known yet"):
        world.manager.begin()
    again = world.manager.commit() if how == COMMIT else world.manager.abort()
    assert again is operation
    world.manager.observed(again)
    assert world.manager.lacks_epoch


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_an_epoch_that_was_refused_is_asked_for_though_brokers_are_older_by_then(how: str) -> None:
    """What it was needed for stays: they give it, or say why not."""
    world, operation = needs_epoch(how)
    world.answer(world.ask(Kind.BUMP_EPOCH), E.TRANSACTION_ABORTABLE)
    world.manager.observed(operation)
    world.manager.can_bump = False
    operation = world.manager.abort()
    world.manager.failed(world.ask(Kind.BUMP_EPOCH), UnsupportedVersionError("too old"), world.now)
    assert world.manager.state is S.FATAL_ERROR
    with pytest.raises(UnsupportedVersionError, match="but there is no next one"):
        world.ended(operation)


def test_a_first_epoch_that_is_refused_fails_the_start() -> None:
    """TX-39: there is nothing to be aborted."""
    world, request, operation = reaches(Kind.INIT_PRODUCER_ID)
    world.answer(request, E.TRANSACTION_ABORTABLE)
    assert operation is not None
    with pytest.raises(BrokerError, match="TRANSACTION_ABORTABLE"):
        world.ended(operation)
    assert world.manager.state is S.FATAL_ERROR


@pytest.mark.parametrize("code", [E.GROUP_AUTHORIZATION_FAILED, E.TRANSACTION_ABORTABLE])
def test_an_abort_that_has_lost_its_coordinator_goes_on_asking_for_it(code: ErrorCode) -> None:
    """TX-39: it is being aborted already; and it asks after a pause."""
    world = ending(ABORT)
    operation = world.manager.abort()
    world.manager.failed(world.ask(Kind.END), ConnectionFailed("cut"), world.now)
    for _ in range(3):
        began = world.now
        world.answer(world.ask(Kind.FIND_COORDINATOR), code)
        assert world.manager.state is S.ABORTING
        assert world.next() is None
        assert world.manager.wake_at >= began + 0.05
    assert world.manager.trouble is not None
    assert world.manager.trouble.code == code
    assert world.run() == [Kind.FIND_COORDINATOR, Kind.END, Kind.BUMP_EPOCH]
    world.ended(operation)


@pytest.mark.parametrize("code", [E.GROUP_AUTHORIZATION_FAILED, E.TRANSACTION_ABORTABLE])
def test_a_commit_in_doubt_is_not_called_aborted_by_who_looks_for_the_coordinator(
    code: ErrorCode,
) -> None:
    """TX-39: it may be committed."""
    world = ending(COMMIT)
    operation = world.manager.commit()
    world.manager.failed(world.ask(Kind.END), ConnectionFailed("cut"), world.now)
    world.answer(world.ask(Kind.FIND_COORDINATOR), code)
    assert world.manager.state is S.COMMITTING
    assert world.next() is None
    assert not operation.done
    world.run()
    world.ended(operation)


def test_a_commit_in_doubt_is_so_where_the_coordinator_is_refused() -> None:
    world = ending(COMMIT)
    operation = world.manager.commit()
    world.manager.failed(world.ask(Kind.END), ConnectionFailed("cut"), world.now)
    world.answer(world.ask(Kind.FIND_COORDINATOR), E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    assert world.manager.state is S.FATAL_ERROR
    with pytest.raises(AuthorizationError, match=r"nobody knows whether .* was committed"):
        world.ended(operation)


def test_finding_the_groups_coordinator_may_make_it_abortable() -> None:
    """TX-13, TX-39."""
    for code in (E.GROUP_AUTHORIZATION_FAILED, E.TRANSACTION_ABORTABLE):
        world = World().begun()
        operation = world.manager.send_offsets(OFFSETS, GROUP)
        world.answer(world.ask(Kind.ADD_OFFSETS))
        world.answer(world.ask(Kind.FIND_COORDINATOR), code)
        assert world.manager.state is S.ABORTABLE_ERROR
        assert world.next() is None
        with pytest.raises(TransactionAborted):
            world.ended(operation)
        world.manager.abort()
        assert world.run() == [Kind.END, Kind.BUMP_EPOCH]


@pytest.mark.parametrize(
    "code",
    [
        E.FENCED_INSTANCE_ID,
        E.UNKNOWN_MEMBER_ID,
        E.ILLEGAL_GENERATION,
        E.GROUP_ID_NOT_FOUND,
        E.STALE_MEMBER_EPOCH,
        E.GROUP_AUTHORIZATION_FAILED,
    ],
)
def test_offsets_of_a_consumer_that_its_group_gave_up_are_not_committed(code: ErrorCode) -> None:
    """TX-10, TX-13."""
    world, request, operation = reaches(Kind.COMMIT_OFFSETS)
    world.answer(request, in_1=code)
    assert operation is not None
    with pytest.raises(TransactionAborted) as caught:
        world.ended(operation)
    assert caught.value.code == code
    operation = world.manager.abort()
    assert world.run() == [Kind.END, Kind.BUMP_EPOCH]
    world.ended(operation)


def test_topics_that_are_denied_are_named_together() -> None:
    """TX-14, TX-15: the commit is refused, the abort goes well."""
    world = World().begun()
    for topic in ("b", "a", "c"):
        world.manager.sequences.may_drain(partition(topic), batch())
    request = world.ask(Kind.ADD_PARTITIONS)
    world.answer(
        request,
        E.OPERATION_NOT_ATTEMPTED,
        b_0=E.TOPIC_AUTHORIZATION_FAILED,
        a_0=E.TOPIC_AUTHORIZATION_FAILED,
    )
    with pytest.raises(TransactionAborted, match="not authorized for a, b") as caught:
        world.manager.commit()
    assert isinstance(caught.value.__cause__, AuthorizationError)
    assert caught.value.code == E.TOPIC_AUTHORIZATION_FAILED
    operation = world.manager.abort()
    assert world.run() == [Kind.BUMP_EPOCH]  # TX-26: nothing is in it
    world.ended(operation)


def test_partitions_that_are_refused_are_named_with_their_errors() -> None:
    world = World().begun()
    for number in range(2):
        world.manager.sequences.may_drain(partition("t", number), batch())
    world.answer(world.ask(Kind.ADD_PARTITIONS), E.OPERATION_NOT_ATTEMPTED, t_1=E.INVALID_REQUEST)
    error = world.manager.error
    assert "t-0: OPERATION_NOT_ATTEMPTED, t-1: INVALID_REQUEST" in str(error)


def test_a_fatal_error_of_one_partition_counts_for_all() -> None:
    world = World().begun()
    for number in range(2):
        world.manager.sequences.may_drain(partition("t", number), batch())
    world.answer(world.ask(Kind.ADD_PARTITIONS), t_1=E.INVALID_TXN_STATE)
    assert world.manager.state is S.FATAL_ERROR


def test_commit_fails_where_adding_a_partition_is_denied_meanwhile() -> None:
    """TX-15."""
    world = World().begun()
    world.manager.sequences.may_drain(partition(), batch())
    request = world.ask(Kind.ADD_PARTITIONS)
    operation = world.manager.commit()
    world.answer(request, E.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(TransactionAborted, match="not authorized"):
        world.ended(operation)
    world.manager.abort()
    assert world.run() == [Kind.BUMP_EPOCH]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.FIND_COORDINATOR, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Kind.INIT_PRODUCER_ID, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Kind.INIT_PRODUCER_ID, E.CLUSTER_AUTHORIZATION_FAILED),
        (Kind.ADD_PARTITIONS, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Kind.ADD_OFFSETS, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Kind.COMMIT_OFFSETS, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Kind.END, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    ],
)
def test_a_transactional_id_that_is_denied(kind: Kind, code: ErrorCode) -> None:
    """TX-12."""
    world, request, operation = reaches(kind)
    world.answer(request, code)
    assert world.manager.state is S.FATAL_ERROR
    assert operation is None or isinstance(operation.error, AuthorizationError)
    assert isinstance(world.manager.error, AuthorizationError)
    assert world.manager.error.code == code


@pytest.mark.parametrize("kind", [*AFTER_BEGIN, Kind.BUMP_EPOCH])
@pytest.mark.parametrize("code", [E.INVALID_TXN_STATE, E.INVALID_PRODUCER_ID_MAPPING])
def test_what_nobody_can_mend_is_fatal(kind: Kind, code: ErrorCode) -> None:
    """TX-41."""
    world, request, operation = reaches(kind)
    world.answer(request, code)
    assert world.manager.state is S.FATAL_ERROR
    assert operation is None or operation.done


@pytest.mark.parametrize("kind", [Kind.ADD_OFFSETS, Kind.COMMIT_OFFSETS, Kind.END])
def test_an_error_that_nobody_expects_is_fatal_and_named(kind: Kind) -> None:
    """TX-09, TX-26: aborting is refused, too."""
    for code, name in ((E.UNSUPPORTED_FOR_MESSAGE_FORMAT, "MESSAGE_FORMAT"), (999, "999")):
        world, request, operation = reaches(kind)
        world.answer(request, code)
        assert operation is not None
        with pytest.raises(KafkaError, match=name):
            world.ended(operation)
        with pytest.raises(KafkaError, match=name):
            world.manager.abort()


def test_a_transaction_timeout_that_brokers_refuse_is_explained() -> None:
    world, request, operation = reaches(Kind.INIT_PRODUCER_ID)
    world.answer(request, E.INVALID_TRANSACTION_TIMEOUT)
    assert operation is not None
    with pytest.raises(BrokerError, match=r"transaction_timeout_ms=60000 .*max\.timeout"):
        world.ended(operation)


@pytest.mark.parametrize("name", TRANSACTIONAL)
def test_each_code_does_what_the_documentation_says(name: str) -> None:
    """Class, transaction, and who is asked again: docs/errors.md."""
    request_name = f"{name} of a transaction"
    for code in E:
        row = effect(request_name, code)
        if name == "FindCoordinator":  # that of a group: within a transaction
            world = World().begun()
            operation: Operation | None = world.manager.send_offsets(OFFSETS, GROUP)
            world.answer(world.ask(Kind.ADD_OFFSETS))
            request = world.ask(Kind.FIND_COORDINATOR)
        else:
            (kind,) = (k for k in Kind if k.value[1] == name)
            if kind is Kind.INIT_PRODUCER_ID and row.transaction == "abortable":
                kind = Kind.BUMP_EPOCH  # the first one has nothing before it: start() fails
            world, request, operation = reaches(kind)
        coordinators = dict(world.manager.coordinators)
        world.answer(request, code)
        state, error = world.manager.state, world.manager.error
        seen = row.error
        if row.transaction == "goes on":
            assert error is None
            assert state not in (S.ABORTABLE_ERROR, S.FATAL_ERROR)
            error = world.manager.trouble if code else None
            seen = seen.removeprefix("`TransactionTimeout`, cause ")
        elif row.transaction == "fatal":
            assert state is S.FATAL_ERROR
        else:
            assert state is S.ABORTABLE_ERROR
            seen = seen.removeprefix("`TransactionAborted`, cause ")
        assert seen == ("" if error is None else f"`{type(error).__name__}`"), code
        assert (world.manager.coordinators == coordinators) == (row.refresh != "coordinator") or (
            name == "FindCoordinator"
        )
        assert row.retriable == (error is not None and error.retriable)
        if operation is not None and operation.error is not None:
            assert f"`{type(operation.error).__name__}`" == row.error.partition(",")[0]


@pytest.mark.parametrize("can_bump", [True, False])
@pytest.mark.parametrize("kind", [Kind.ADD_PARTITIONS, Kind.ADD_OFFSETS, Kind.END])
def test_a_producer_that_the_coordinator_forgot_needs_a_new_epoch(
    kind: Kind, can_bump: bool
) -> None:
    """TX-34: where none can be had, it is fatal."""
    world, request, _ = reaches(kind)
    world.manager.can_bump = can_bump
    world.answer(request, E.UNKNOWN_PRODUCER_ID)
    assert world.manager.state is (S.ABORTABLE_ERROR if can_bump else S.FATAL_ERROR)
    if can_bump:
        world.manager.observed(world.manager._ending or Operation(""))
        operation = world.manager.abort()
        kinds = world.run()
        assert kinds[-1] is Kind.BUMP_EPOCH
        assert (Kind.END in kinds) == (kind is Kind.END)
        world.ended(operation)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "error", [UnsupportedVersionError("too old"), AuthenticationError("who are you")]
)
def test_a_request_that_cannot_be_made_is_fatal(kind: Kind, error: KafkaError) -> None:
    """TX-09, TX-27."""
    world, request, operation = reaches(kind)
    world.manager.failed(request, error, world.now)
    assert world.manager.state is S.FATAL_ERROR
    if operation is not None:
        with pytest.raises(type(error)):
            world.ended(operation)


@pytest.mark.parametrize("asked_before", [False, True])
def test_only_a_commit_that_was_asked_for_is_in_doubt(asked_before: bool) -> None:
    """The request that cannot be made was never sent."""
    world = ending(COMMIT)
    operation = world.manager.commit()
    request = world.ask(Kind.END)
    if asked_before:
        world.manager.failed(request, ConnectionFailed("cut"), world.now)
        world.now += 1
        world.answer(world.ask(Kind.FIND_COORDINATOR))
        request = world.ask(Kind.END)
    world.manager.failed(request, UnsupportedVersionError("too old"), world.now)
    with pytest.raises(UnsupportedVersionError) as caught:
        world.ended(operation)
    assert ("nobody knows whether" in str(caught.value)) is asked_before


def test_ids_that_are_none_are_asked_for_again() -> None:
    world, request, operation = reaches(Kind.INIT_PRODUCER_ID)
    world.manager.answered(request, wire.InitProducerIdResponse(0, 0, -1, -1), world.now)
    assert operation is not None
    assert not operation.done
    world.answer(world.ask(Kind.INIT_PRODUCER_ID))
    world.ended(operation)


def test_a_committed_transaction_stays_so_where_there_is_no_next_epoch() -> None:
    """Who was told of an error would send its records again. The next call says what is true:
    committed, and of no use any more."""
    world = World(False).begun().joins()
    world.version_two = True
    operation = world.manager.commit()
    world.answer(world.ask(Kind.END))
    world.answer(world.ask(Kind.BUMP_EPOCH), E.UNKNOWN_SERVER_ERROR)
    assert world.manager.state is S.FATAL_ERROR
    world.ended(operation)
    for name in NAMES:
        with pytest.raises(KafkaError, match="the transaction was committed, but"):
            call(world.manager, name)


# -- the markers of the last transaction ----------------------------------------------------


def test_nothing_is_waited_for_until_a_broker_had_to_wait() -> None:
    pause = MarkerPause()
    assert pause.begun(1.0) <= 1.0
    for _ in range(3):
        pause.ended(1.0, 1.005)
        assert pause.begun(1.006) == 1.005
        pause.answered(0.019, refused=False)
    assert pause.seconds == 0


@pytest.mark.parametrize(("latency", "refused"), [(0.021, False), (0.001, True)])
def test_the_pause_grows_while_brokers_have_to_wait_and_shrinks_slowly(
    latency: float, refused: bool
) -> None:
    pause = MarkerPause()
    seen = []
    for _ in range(12):
        pause.ended(1.0, 1.005)
        assert pause.begun(1.006) == 1.005 + pause.seconds
        pause.answered(latency, refused=refused)
        pause.answered(0.9, refused=True)  # only the first answer tells of the markers
        seen.append(pause.seconds)
    assert seen[:3] == pytest.approx([0.001, 0.0015, 0.00225])
    assert seen[-1] == 0.02
    pause.ended(1.0, 1.005)
    pause.begun(1.006)
    pause.answered(0.004, refused=False)
    assert pause.seconds == pytest.approx(0.0198)


def test_a_slow_broker_long_after_the_last_transaction_says_nothing_about_markers() -> None:
    pause = MarkerPause()
    pause.ended(1.0, 1.005)
    pause.begun(1.1)
    pause.answered(0.5, refused=True)
    assert pause.seconds == 0


def test_partitions_join_after_the_pause() -> None:
    world = World(True).begun()
    where = partition()
    world.manager.holds = True
    assert not world.manager.sequences.may_drain(where, batch())
    assert list(world.manager.release()) == [where]
    assert world.manager.sequences.may_drain(where, batch())
    assert list(world.manager.release()) == []


def test_a_pause_ends_with_its_transaction() -> None:
    world = World(True).begun()
    world.manager.holds = True
    assert not world.manager.sequences.may_drain(partition(), batch())
    operation = world.manager.abort()
    world.run()
    world.ended(operation)
    assert not world.manager.holds
    assert list(world.manager.release()) == []


def test_while_a_broker_adds_a_partition_no_other_one_joins_there() -> None:
    world = World(True).begun()
    manager = world.manager
    first, second, third, elsewhere = (partition(number=n) for n in range(4))
    elsewhere.owner.leader = 2
    assert manager.sequences.may_drain(first, batch())
    # A request may add several.
    assert manager.sequences.may_drain(second, batch())
    assert manager.sent(1, [first, second])
    assert not manager.sequences.may_drain(third, batch())
    assert manager.sequences.may_drain(elsewhere, batch())
    assert manager.sequences.may_drain(first, batch())
    assert not manager.sent(1, [first])
    assert manager.sent(2, [elsewhere])
    assert list(manager.added(2)) == [third]
    assert not manager.sequences.may_drain(third, batch())
    assert list(manager.added(1)) == [third]
    assert manager.sequences.may_drain(third, batch())
    assert manager.sent(1, [third])


def test_where_the_next_request_adds_a_partition() -> None:
    world = World(True).begun()
    manager = world.manager
    first, second = partition(number=0), partition(number=1)
    assert not manager.adds_at(1)
    assert manager.is_new(first)
    assert manager.sequences.may_drain(first, batch())
    assert manager.adds_at(1)
    assert not manager.adds_at(2)
    assert not manager.is_new(first)
    assert manager.is_new(second)
    # The second may have no room in that request.
    assert manager.sequences.may_drain(second, batch())
    assert manager.sent(1, [first])
    assert not manager.adds_at(1)
    assert list(manager.added(1)) == []
    assert manager.adds_at(1)


def test_a_partition_joins_when_all_requests_that_add_one_are_answered() -> None:
    """Two may be under way, where one request had no room for all that had joined."""
    world = World(True).begun()
    manager = world.manager
    first, second, third = (partition(number=n) for n in range(3))
    for where in (first, second):
        assert manager.sequences.may_drain(where, batch())
    for where in (first, second):
        assert manager.sent(1, [where])
    assert not manager.sequences.may_drain(third, batch())
    assert list(manager.added(1)) == []
    assert not manager.sequences.may_drain(third, batch())
    assert list(manager.added(1)) == [third]


def test_in_version_one_no_broker_adds_partitions() -> None:
    world = World().begun()
    where = partition()
    world.manager.sequences.may_drain(where, batch())
    world.run()
    assert world.manager.sequences.may_drain(where, batch())
    assert not world.manager.sent(1, [where])


# -- taking over -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tx", "another"])
def test_a_producer_can_begin_anew_under_any_id(name: str) -> None:
    world = World(True).begun()
    done = world.manager.commit()
    world.run()
    world.ended(done)
    world.manager.observed(done)
    operation = world.manager.take_over(name)
    if name != "tx":
        world.answer(world.ask(Kind.FIND_COORDINATOR))
    request = world.ask(Kind.INIT_PRODUCER_ID)
    sent = request.wire
    assert isinstance(sent, wire.InitProducerIdRequest)
    # As one that knows nothing: else only the same producer would get an epoch.
    assert (sent.transactional_id, sent.producer_id) == (name, -1)
    world.answer(request)
    world.ended(operation)
    assert world.manager.state is S.READY


def test_within_a_transaction_nothing_is_taken_over() -> None:
    world = World().begun()
    with pytest.raises(IllegalStateError):
        world.manager.take_over("another")
    assert world.manager.transactional_id == "tx"


# -- aborting ------------------------------------------------------------------------------


def test_an_abort_forgets_what_was_not_asked_yet() -> None:
    """TX-24: the partition was not added, so that there is nothing to end."""
    world = World().begun()
    world.manager.sequences.may_drain(partition(), batch())
    operation = world.manager.abort()
    assert world.run() == []
    world.ended(operation)


def test_an_abort_waits_for_what_was_asked_already() -> None:
    """TX-24: else nobody knew whether there is something to abort."""
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    operation = world.manager.abort()
    world.answer(request, E.COORDINATOR_LOAD_IN_PROGRESS)
    assert world.run() == [Kind.ADD_PARTITIONS, Kind.END]
    world.ended(operation)


def test_after_an_error_a_retry_is_not_waited_for_and_the_epoch_changes() -> None:
    """TX-24: whatever the coordinator made of it, a new epoch ends it."""
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    world.manager.failed(request, ConnectionFailed("lost"), world.now)
    world.manager.abortable(RecordTooLarge("too large"))
    operation = world.manager.abort()
    kinds = world.run()
    assert kinds[-1] is Kind.BUMP_EPOCH
    assert Kind.ADD_PARTITIONS not in kinds
    world.ended(operation)


def test_an_abort_drops_offsets_that_are_not_committed_yet() -> None:
    """TX-13: who waits for them learns it."""
    for answer_first in (False, True):
        world = World().begun()
        operation = world.manager.send_offsets(OFFSETS, GROUP)
        request = world.ask(Kind.ADD_OFFSETS)
        if answer_first:
            world.answer(request)
        aborted = world.manager.abort()
        if not answer_first:
            world.answer(request)
        with pytest.raises(TransactionAborted, match="aborted meanwhile"):
            world.ended(operation)
        assert Kind.COMMIT_OFFSETS not in world.run()
        world.ended(aborted)


def test_offsets_under_way_are_not_repeated_in_an_abort() -> None:
    world, request, operation = reaches(Kind.COMMIT_OFFSETS)
    aborted = world.manager.abort()
    world.manager.failed(request, ConnectionFailed("lost"), world.now)
    assert world.run() == [Kind.END, Kind.BUMP_EPOCH]
    world.ended(aborted)
    assert operation is not None
    assert isinstance(operation.error, TransactionAborted)
    world, request, operation = reaches(Kind.COMMIT_OFFSETS)
    world.manager.abort()
    world.answer(request, E.COORDINATOR_LOAD_IN_PROGRESS)
    assert world.run() == [Kind.END]


def over_without_an_answer(
    kind: Kind, commits: bool, *, can_bump: bool
) -> tuple[World, list[Kind]]:
    """A transaction that is over, though a request of it was lost; and the last ones made."""
    world, request, operation = reaches(kind)
    manager = world.manager
    manager.can_bump = can_bump
    manager.failed(request, ConnectionFailed("lost"), world.now)
    if kind is not Kind.END:
        if commits:
            world.run()
        operation = manager.commit() if commits else manager.abort()
    requests = world.run()
    assert operation is not None
    world.ended(operation)
    return world, requests


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("kind", AFTER_BEGIN)
def test_what_got_no_answer_must_not_get_into_the_next_transaction(
    kind: Kind, commits: bool
) -> None:
    """A broker that stood still may yet do it, as a part of what is open then."""
    world, requests = over_without_an_answer(kind, commits, can_bump=True)
    assert requests[-1] is Kind.BUMP_EPOCH
    world.manager.begin()
    world.joins()
    world.manager.commit()
    assert world.run() == [Kind.END]


def test_what_is_refused_while_the_end_is_on_its_way_changes_nothing() -> None:
    """It may be committed: who is told that it is aborted sends it again."""
    world, request, operation = reaches(Kind.END)
    late = RecordTooLarge("too large")
    world.manager.abortable(late)
    world.answer(request, E.COORDINATOR_LOAD_IN_PROGRESS)
    world.manager.abortable(late)
    assert world.run() == [Kind.END]
    assert operation is not None
    world.ended(operation)
    world.manager.begin()
    world.manager.abortable(late)
    assert world.manager.state is TransactionState.ABORTABLE_ERROR


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("kind", AFTER_BEGIN)
def test_where_nobody_gives_epochs_there_is_no_next_transaction_for_it_to_get_into(
    kind: Kind, commits: bool
) -> None:
    """It would commit that one, or its offsets with it. A partition more does no harm."""
    world, requests = over_without_an_answer(kind, commits, can_bump=False)
    manager = world.manager
    assert Kind.BUMP_EPOCH not in requests
    if kind not in (Kind.COMMIT_OFFSETS, Kind.END):
        manager.begin()
        return
    assert manager.state is TransactionState.FATAL_ERROR
    with pytest.raises(KafkaError, match=r"may arrive yet, in the next one") as caught:
        manager.begin()
    assert type(caught.value) is KafkaError


def test_version_two_has_a_new_epoch_for_each_transaction_anyway() -> None:
    world = World(version_two=True).begun()
    world.joins()
    operation = world.manager.commit()
    world.manager.failed(world.ask(Kind.END), ConnectionFailed("lost"), world.now)
    assert Kind.BUMP_EPOCH not in world.run()
    world.ended(operation)


# -- calls that nobody waits for any more --------------------------------------------------


@pytest.mark.parametrize("name", [COMMIT, ABORT])
def test_a_call_that_timed_out_goes_on_and_only_it_may_be_made_again(name: str) -> None:
    """TX-17: also when it has its end, until somebody knows of it."""
    world = World().begun().joins()
    again = world.manager.commit if name == COMMIT else world.manager.abort
    operation = again()
    request = world.ask(Kind.END)
    for done in (False, True):
        assert again() is operation
        for other in NAMES:
            if other in (name, START):
                continue
            with pytest.raises(IllegalStateError, match=rf"call {name}\(\) again"):
                call(world.manager, other)
        if not done:
            world.answer(request)
            world.run()
    assert again() is operation
    world.ended(operation)
    world.manager.begin()


def test_a_commit_that_failed_unseen_may_be_aborted_at_once() -> None:
    """There is nothing left to be known of it."""
    world = ending(COMMIT)
    world.manager.abortable(RecordTooLarge("too large"))
    world.manager.abort()
    world.run()
    assert world.manager.state is S.READY


def test_the_same_offsets_again_are_the_same_call() -> None:
    """As after a timeout; others are another one."""
    world = World().begun()
    operation = world.manager.send_offsets(OFFSETS, GROUP)
    assert world.manager.send_offsets(dict(OFFSETS), GROUP) is operation
    other = world.manager.send_offsets({PLACE: OffsetAndMetadata(7)}, GROUP)
    assert other is not operation
    world.run()
    world.ended(operation)
    assert world.manager.send_offsets(OFFSETS, GROUP) is not operation


def test_a_commit_waits_for_offsets_that_nobody_waits_for() -> None:
    world = World().begun()
    world.manager.send_offsets(OFFSETS, GROUP)
    operation = world.manager.commit()
    assert world.run() == [
        Kind.ADD_OFFSETS,
        Kind.FIND_COORDINATOR,
        Kind.COMMIT_OFFSETS,
        Kind.END,
    ]
    world.ended(operation)


def test_who_waits_when_the_producer_is_closed_learns_it() -> None:
    """TX-45."""
    world = World().begun().joins()
    offsets = world.manager.send_offsets(OFFSETS, GROUP)
    operation = world.manager.commit()
    world.manager.close(ProducerClosed("closed"))
    assert world.next() is None
    for each in (offsets, operation):
        with pytest.raises(ProducerClosed):
            world.ended(each)


def test_a_commit_that_only_misses_its_next_epoch_when_the_producer_is_closed_is_done() -> None:
    world, _, operation = reaches(Kind.BUMP_EPOCH)
    world.manager.close(ProducerClosed("closed"))
    assert operation is not None
    world.ended(operation)


def test_an_answer_after_the_end_changes_nothing() -> None:
    """TX-32."""
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    world.manager.fatal(ProducerFenced("fenced"))
    assert list(world.answer(request)) == []
    world, request, _ = reaches(Kind.ADD_PARTITIONS)
    world.manager.failed(request, ProducerClosed("closed"), world.now)
    assert world.next() is None


# -- what is logged ------------------------------------------------------------------------


def test_a_lost_coordinator_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncproducer")
    world, request, _ = reaches(Kind.INIT_PRODUCER_ID)
    for _ in range(3):
        world.manager.failed(request, ConnectionFailed("lost"), world.now)
        world.answer(world.ask(Kind.FIND_COORDINATOR))
        request = world.ask(Kind.INIT_PRODUCER_ID)
    assert len(caplog.records) == 1
    assert "tx: InitProducerId is repeated: lost" in caplog.text


def test_requests_and_operations_show_what_they_are() -> None:
    _, request, operation = reaches(Kind.END)
    assert repr(request) == "<TxnRequest EndTxn to 1 attempts=0>"
    assert repr(operation) == "<Operation commit_transaction under way >"
