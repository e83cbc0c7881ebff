"""One partition's log, and what a leader remembers about the producers that write it.

Nothing in here waits, has a clock or knows a request: `append` takes the time and
the leader epoch, and returns or raises what is to be answered. The order of the
checks, and so which error a batch with two faults gets, is that of Java's
UnifiedLog.append, LogValidator and ProducerAppendInfo (Kafka 4.x).

An uncompressed batch is stored with one copy and no work per record, when
`validate_records` is off; records are decoded when somebody reads them here.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import (
    MAX_SEQUENCE,
    BatchError,
    BatchHeader,
    StoredRecord,
    check_crc,
    decode_records,
    encode_marker,
    read_header,
    rewrite_offset,
    rewrite_timestamp,
)

__all__ = [
    "AbortedTransaction",
    "AppendRefused",
    "Appended",
    "LogConfig",
    "PartitionLog",
    "StoredBatch",
]

#: How many batches per producer are remembered to recognise duplicates
#: (Java: ProducerStateEntry.NUM_BATCHES_TO_RETAIN). The reason why an idempotent
#: producer may not have more than five requests in flight.
BATCHES_REMEMBERED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """The topic options that change what may be appended, with Kafka's defaults."""

    #: `max.message.bytes`: of one batch, header included, as it arrives.
    max_message_bytes: int = 1_048_588
    #: `message.timestamp.type=LogAppendTime`
    log_append_time: bool = False
    #: `cleanup.policy` contains `compact`: records need a key. Nothing is ever compacted.
    compacted: bool = False
    #: `message.timestamp.before.max.ms` and `message.timestamp.after.max.ms`
    timestamp_before_max_ms: int = 2**63 - 1
    timestamp_after_max_ms: int = 3_600_000
    #: `min.insync.replicas`
    min_insync_replicas: int = 1


class Appended(NamedTuple):
    """What a produce response says about a batch that is in the log."""

    base_offset: int
    #: The broker's time in ms, -1 where the topic keeps the producer's timestamps.
    log_append_time: int
    log_start_offset: int
    #: The batch was in the log already: these are its old offsets.
    duplicate: bool = False


class AppendRefused(Exception):
    """A batch was not appended. The attributes are those of a produce response.

    The exception's own text is for people. `error_message` goes to the client; Java's
    broker has one only together with `record_errors` (index, text): KIP-467.
    """

    def __init__(
        self,
        code: ErrorCode,
        text: str,
        *,
        log_start_offset: int = -1,
        record_errors: Sequence[tuple[int, str | None]] = (),
        error_message: str | None = None,
    ) -> None:
        super().__init__(text)
        self.code = code
        self.log_start_offset = log_start_offset
        self.record_errors = record_errors
        self.error_message = error_message


class StoredBatch(NamedTuple):
    """A batch in the log: its header, and all of its bytes."""

    header: BatchHeader
    data: bytes


class AbortedTransaction(NamedTuple):
    """What `read_committed` has to leave out: this producer's records in a range of offsets."""

    producer_id: int
    first_offset: int
    #: That of the marker.
    last_offset: int


class _RememberedBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int
    max_timestamp: int


class _FirstBatch(NamedTuple):
    """The lowest sequence that would have begun a transaction (Java: VerificationStateEntry)."""

    epoch: int
    sequence: int
    from_0: bool


class _ProducerState:
    """What the leader remembers about one producer id (Java: ProducerStateEntry)."""

    __slots__ = ("batches", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[_RememberedBatch] = deque(maxlen=BATCHES_REMEMBERED)

    def find_duplicate(self, header: BatchHeader) -> _RememberedBatch | None:
        if header.producer_epoch != self.epoch:
            return None
        wanted = (header.base_sequence, header.last_sequence)
        for batch in self.batches:
            if (batch.first_sequence, batch.last_sequence) == wanted:
                return batch
        return None

    def check(self, header: BatchHeader) -> None:
        if header.producer_epoch < self.epoch:
            raise AppendRefused(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"epoch {header.producer_epoch} of producer {header.producer_id} is older"
                f" than {self.epoch}",
            )
        if header.producer_epoch > self.epoch:
            if header.base_sequence != 0:
                raise AppendRefused(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"the new epoch {header.producer_epoch} of producer {header.producer_id}"
                    f" starts at sequence {header.base_sequence}, not at 0",
                )
            return
        # Without a batch in this epoch, a transaction's marker has begun it.
        last = self.batches[-1].last_sequence if self.batches else -1
        expected = 0 if last == MAX_SEQUENCE else last + 1
        if header.base_sequence != expected:
            raise AppendRefused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} sent sequence {header.base_sequence}"
                f" where {expected} is next",
            )

    def add(self, header: BatchHeader) -> None:
        if header.producer_epoch != self.epoch:
            self.epoch = header.producer_epoch
            self.batches.clear()
        if header.is_control:
            return
        self.batches.append(
            _RememberedBatch(
                header.base_sequence,
                header.last_sequence,
                header.base_offset,
                header.max_timestamp,
            )
        )


class PartitionLog:
    """The batches of one partition, in order of their offsets.

    All replicas share it: there is no replication to wait for, so the high watermark
    is the end of the log, and what was acknowledged is never lost.
    """

    def __init__(self, config: LogConfig, *, validate_records: bool = True) -> None:
        self.config = config
        self.start_offset = 0
        self.end_offset = 0
        self._validate_records = validate_records
        self._batches: list[StoredBatch] = []
        self._last_offsets: list[int] = []  # of _batches, to search in
        self._producers: dict[int, _ProducerState] = {}
        # Producer id -> first offset of its transaction, in the order of these offsets.
        self._open: dict[int, int] = {}
        self._first_batches: dict[int, _FirstBatch] = {}
        self._aborted: list[AbortedTransaction] = []
        # A dict keeps their order: a set would make runs differ.
        self._watchers: dict[Callable[[], None], None] = {}

    @property
    def last_stable_offset(self) -> int:
        """Where `read_committed` ends: at the first record whose transaction is open."""
        return max(self.start_offset, next(iter(self._open.values()), self.end_offset))

    def has_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether records of this producer, in this epoch, wait for their marker."""
        if producer_id not in self._open:
            return False
        return self._producers[producer_id].epoch == producer_epoch

    def expect_first(self, header: BatchHeader, *, from_0: bool) -> None:
        """A batch has come that would begin a transaction, if the coordinator agrees.

        Whether it does or not: no later one may begin it, else there would be a gap.
        `from_0`: nor any but sequence 0, where nothing is known of the producer.
        """
        known = self._first_batches.get(header.producer_id)
        if known is None or (header.producer_epoch, -header.base_sequence) > (
            known.epoch,
            -known.sequence,
        ):
            self._first_batches[header.producer_id] = _FirstBatch(
                header.producer_epoch, header.base_sequence, from_0
            )

    def append_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        committed: bool,
        leader_epoch: int,
        now_ms: int,
    ) -> None:
        """Ends a producer's transaction here. The producer goes on in the marker's epoch."""
        offset = self.end_offset
        first_offset = self._open.pop(producer_id, None)
        if first_offset is not None and not committed:
            self._aborted.append(AbortedTransaction(producer_id, first_offset, offset))
        marker = encode_marker(producer_id, producer_epoch, committed=committed, timestamp=now_ms)
        self._store(rewrite_offset(marker, offset, leader_epoch))

    def append(self, data: bytes, *, leader_epoch: int, now_ms: int) -> Appended:
        """Appends one batch as a producer sent it.

        `now_ms` is the broker's clock, ms since 1970. Raises AppendRefused; then
        nothing has changed.
        """
        try:
            header = self._check_batch(data)
            max_timestamp = self._check_records(data, header, now_ms)
        except BatchError as exc:
            known = exc.code in (ErrorCode.CORRUPT_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE)
            start = -1 if known else self.start_offset
            raise AppendRefused(exc.code, str(exc), log_start_offset=start) from exc
        duplicate = self._check_producer(header)
        if duplicate is not None:
            # The quirk is Java's: the batch's maximum timestamp comes back as the append
            # time, whatever kind of timestamps the topic keeps.
            return Appended(duplicate.base_offset, duplicate.max_timestamp, self.start_offset, True)
        if self.config.log_append_time:
            data = rewrite_timestamp(data, header, now_ms, log_append_time=True)
        elif max_timestamp != header.max_timestamp:
            data = rewrite_timestamp(data, header, max_timestamp)
        base_offset = self.end_offset
        self._store(rewrite_offset(data, base_offset, leader_epoch))
        log_append_time = now_ms if self.config.log_append_time else -1
        return Appended(base_offset, log_append_time, self.start_offset)

    def _check_batch(self, data: bytes) -> BatchHeader:
        header = read_header(data)
        if header.base_offset != 0:
            raise BatchError(f"the base offset of the batch is {header.base_offset}, not 0")
        if len(data) > self.config.max_message_bytes:
            raise BatchError(
                f"the batch has {len(data)} bytes, at most {self.config.max_message_bytes}"
                " are allowed (max.message.bytes)",
                ErrorCode.MESSAGE_TOO_LARGE,
            )
        check_crc(data, header)
        if header.codec_id > 4:
            raise BatchError(
                f"unknown compression codec {header.codec_id}", ErrorCode.UNKNOWN_SERVER_ERROR
            )
        count = header.record_count
        if count <= 0 or header.last_offset_delta + 1 != count:
            raise BatchError(
                f"the batch has {count} records, but its last offset delta is"
                f" {header.last_offset_delta}"
            )
        if header.is_control:
            raise BatchError("clients may not write control batches")
        if header.producer_id >= 0 and header.base_sequence < 0:
            raise BatchError(f"a producer id without a sequence number ({header.base_sequence})")
        return header

    def _check_records(self, data: bytes, header: BatchHeader, now_ms: int) -> int:
        """The records' true maximum timestamp: Java's broker corrects a wrong one, too."""
        config = self.config
        if not (self._validate_records or config.compacted):
            if not config.log_append_time and self._bad_timestamp(header.max_timestamp, now_ms):
                text = f"the timestamp {header.max_timestamp} is out of range"
                self._refuse_records(ErrorCode.INVALID_TIMESTAMP, [(0, text)])
            return header.max_timestamp
        records = decode_records(data, header)
        errors: list[tuple[int, str | None]] = []
        code = ErrorCode.INVALID_RECORD
        for index, record in enumerate(records):
            if config.compacted and record.key is None:
                errors.append((index, "a compacted topic takes no record without a key"))
            elif header.is_log_append_time:
                code = ErrorCode.INVALID_TIMESTAMP
                errors.append((index, "a producer may not set the timestamp type LogAppendTime"))
            elif not config.log_append_time and self._bad_timestamp(record.timestamp, now_ms):
                code = ErrorCode.INVALID_TIMESTAMP
                errors.append((index, f"the timestamp {record.timestamp} is out of range"))
        if errors:
            self._refuse_records(code, errors)
        return max(record.timestamp for record in records)

    def _bad_timestamp(self, timestamp: int, now_ms: int) -> bool:
        if timestamp == -1:  # the producer gave none
            return False
        age = now_ms - timestamp
        config = self.config
        return age > config.timestamp_before_max_ms or -age > config.timestamp_after_max_ms

    def _refuse_records(
        self, code: ErrorCode, errors: Sequence[tuple[int, str | None]]
    ) -> NoReturn:
        text = "One or more records have been rejected"
        raise AppendRefused(
            code,
            text,
            log_start_offset=self.start_offset,
            record_errors=errors,
            error_message=text,
        )

    def _check_producer(self, header: BatchHeader) -> _RememberedBatch | None:
        """The batch that this one repeats, None for a new one. Raises AppendRefused."""
        if header.producer_id < 0:
            return None
        state = self._producers.get(header.producer_id)
        first = self._first_batches.get(header.producer_id)
        if state is None:
            # Without any memory of the producer (its records were deleted, it was idle
            # for too long), every first sequence is taken: ProducerAppendInfo.checkSequence.
            if first is not None:
                self._check_first(header, 0 if first.from_0 else first.sequence)
            return None
        duplicate = state.find_duplicate(header)
        if duplicate is None:
            try:
                state.check(header)
            except AppendRefused as exc:
                exc.log_start_offset = self.start_offset
                raise
            if first is not None:
                self._check_first(header, first.sequence)
            if header.producer_id in self._open and not header.is_transactional:
                raise AppendRefused(
                    ErrorCode.INVALID_TXN_STATE,
                    f"producer {header.producer_id} has a transaction open, and sent a batch"
                    " that is not part of it",
                    log_start_offset=self.start_offset,
                )
        return duplicate

    def _check_first(self, header: BatchHeader, sequence: int) -> None:
        if header.base_sequence > sequence:
            raise AppendRefused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"the transaction of producer {header.producer_id} starts at sequence"
                f" {header.base_sequence}, not at {sequence}",
                log_start_offset=self.start_offset,
            )

    def _store(self, data: bytes) -> None:
        header = read_header(data)
        self._batches.append(StoredBatch(header, data))
        self._last_offsets.append(header.last_offset)
        self.end_offset = header.last_offset + 1
        if header.producer_id >= 0:
            state = self._producers.setdefault(
                header.producer_id, _ProducerState(header.producer_epoch)
            )
            state.add(header)
            if header.is_transactional and not header.is_control:
                self._open.setdefault(header.producer_id, header.base_offset)
                self._first_batches.pop(header.producer_id, None)
        self.notify()

    def read(
        self, offset: int, max_bytes: int, *, at_least_one: bool = False, committed: bool = False
    ) -> bytes:
        """Whole batches from the one that holds `offset` on, at most `max_bytes`.

        `at_least_one`: the first batch comes even if it is larger (KIP-74), so that a
        consumer cannot get stuck. `committed`: nothing from the last stable offset on; what
        was aborted is in it, see `aborted`. The caller has checked that the offset is in range.
        """
        chosen: list[bytes] = []
        size = 0
        end = self.last_stable_offset if committed else self.end_offset
        for index in range(bisect_left(self._last_offsets, offset), len(self._batches)):
            header, data = self._batches[index]
            if header.base_offset >= end:
                break
            if size + len(data) > max_bytes and not (at_least_one and not chosen):
                break
            chosen.append(data)
            size += len(data)
        return b"".join(chosen)

    def batches(self) -> Iterator[StoredBatch]:
        """The batches from the log's start on."""
        first = bisect_left(self._last_offsets, self.start_offset)
        yield from self._batches[first:]

    def aborted(self, first: int, end: int) -> list[AbortedTransaction]:
        """The aborted transactions that have something from `first` on and before `end`."""
        return [a for a in self._aborted if a.last_offset >= first and a.first_offset < end]

    def records(self, *, committed: bool = False) -> list[StoredRecord]:
        """Everybody's records without markers; `committed`: as a `read_committed` consumer.

        Decoded now. Raises BatchError for what was stored unchecked.
        """
        batches = [batch for batch in self.batches() if not batch.header.is_control]
        if committed:
            batches = [batch for batch in batches if self._is_committed(batch.header)]
        return self._decode(batches)

    def markers(self) -> list[StoredRecord]:
        """The records that end transactions."""
        return self._decode(batch for batch in self.batches() if batch.header.is_control)

    def _decode(self, batches: Iterable[StoredBatch]) -> list[StoredRecord]:
        return [
            record
            for batch in batches
            for record in decode_records(batch.data, batch.header)
            if record.offset >= self.start_offset
        ]

    def _is_committed(self, header: BatchHeader) -> bool:
        offset = header.base_offset
        return offset < self.last_stable_offset and not (
            header.is_transactional
            and any(a.producer_id == header.producer_id for a in self.aborted(offset, offset + 1))
        )

    def find_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first record that is at least so late, if any."""
        for batch in self.batches():
            if batch.header.max_timestamp >= timestamp:
                for record in decode_records(batch.data, batch.header):
                    if record.timestamp >= timestamp and record.offset >= self.start_offset:
                        return record.timestamp, record.offset
        return None

    def latest_timestamp(self) -> tuple[int, int] | None:
        """(timestamp, offset) of the record with the highest timestamp, the first of equals."""
        latest = max((b.header.max_timestamp for b in self.batches()), default=None)
        return None if latest is None else self.find_timestamp(latest)

    def leader_epoch_at(self, offset: int) -> int:
        """The leader epoch under which the record at `offset` was written, -1 if unknown."""
        index = bisect_left(self._last_offsets, offset)
        return self._batches[index].header.leader_epoch if index < len(self._batches) else -1

    def delete_before(self, offset: int) -> None:
        """Forgets the records before `offset`, as retention does. Producers stay known."""
        self.start_offset = max(self.start_offset, min(offset, self.end_offset))
        gone = bisect_left(self._last_offsets, self.start_offset)
        del self._batches[:gone], self._last_offsets[:gone]
        self.notify()

    def forget_producers(self) -> None:
        """Loses producers' state, as `producer.id.expiration.ms` does in the end.

        A producer whose transaction is open never expires.
        """
        self._producers = {n: state for n, state in self._producers.items() if n in self._open}

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after each append, until `unwatch`."""
        self._watchers[callback] = None

    def unwatch(self, callback: Callable[[], None]) -> None:
        """The end of `watch`; without effect when there was none."""
        self._watchers.pop(callback, None)

    def notify(self) -> None:
        """Calls the watchers: there is something to see for whoever waits for data."""
        for callback in tuple(self._watchers):
            callback()
