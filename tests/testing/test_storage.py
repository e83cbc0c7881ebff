from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncproducer.core.compression import codec
from asyncproducer.errors import ErrorCode
from asyncproducer.testing.batches import (
    BatchError,
    decode_batch,
    encode_batch,
    read_header,
    with_header,
)
from asyncproducer.testing.storage import (
    AbortedTransaction,
    Appended,
    AppendRefused,
    LogConfig,
    PartitionLog,
)

NOW = 1_700_000_000_000
HOUR = 3_600_000


def batch(
    *values: bytes | None,
    key: bytes | None = b"k",
    timestamps: Sequence[int] | None = None,
    producer: tuple[int, int, int] = (-1, -1, -1),
    attributes: int = 0,
) -> bytes:
    """`producer` is (id, epoch, base sequence)."""
    return encode_batch(
        [(key, value) for value in values or (b"v",)],
        timestamps=timestamps or [NOW] * max(1, len(values)),
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        attributes=attributes,
    )


def append(log: PartitionLog, data: bytes, *, epoch: int = 0, now: int = NOW) -> Appended:
    return log.append(data, leader_epoch=epoch, now_ms=now)


def refused(log: PartitionLog, data: bytes, *, now: int = NOW) -> AppendRefused:
    """What `append` raises. It must not change anything."""
    before = (log.start_offset, log.end_offset, list(log.batches()))
    with pytest.raises(AppendRefused) as raised:
        append(log, data, now=now)
    assert (log.start_offset, log.end_offset, list(log.batches())) == before
    return raised.value


@pytest.fixture
def log() -> PartitionLog:
    return PartitionLog(LogConfig())


def test_offsets_go_on_from_batch_to_batch(log: PartitionLog) -> None:
    assert append(log, batch(b"a", b"b")) == Appended(0, -1, 0)
    assert append(log, batch(b"c"), epoch=4) == Appended(2, -1, 0)
    assert (log.end_offset, log.last_stable_offset) == (3, 3)
    assert [(r.offset, r.value) for r in log.records()] == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert [stored.header.leader_epoch for stored in log.batches()] == [0, 4]
    assert [log.leader_epoch_at(offset) for offset in range(4)] == [0, 0, 4, -1]


def test_a_stored_batch_differs_only_in_offset_and_epoch(log: PartitionLog) -> None:
    append(log, batch(b"a"))
    data = batch(b"b", attributes=0)
    append(log, data, epoch=1)
    (_, stored) = log.batches()
    assert stored.data[:16] == (1).to_bytes(8, "big") + data[8:12] + (1).to_bytes(4, "big")
    assert stored.data[16:] == data[16:]


# -- what is refused, whoever sends it


def test_a_batch_must_start_at_offset_0(log: PartitionLog) -> None:
    data = batch()
    error = refused(log, (5).to_bytes(8, "big") + data[8:])
    assert (error.code, error.error_message) == (ErrorCode.INVALID_RECORD, None)


def test_a_batch_may_have_max_message_bytes_and_no_more() -> None:
    data = batch(b"v" * 100)
    append(PartitionLog(LogConfig(max_message_bytes=len(data))), data)
    error = refused(PartitionLog(LogConfig(max_message_bytes=len(data) - 1)), data)
    assert (error.code, error.log_start_offset) == (ErrorCode.MESSAGE_TOO_LARGE, -1)


def test_a_wrong_crc_is_a_corrupt_message(log: PartitionLog) -> None:
    data = batch()
    error = refused(log, data[:-1] + b"\x02")
    assert (error.code, error.log_start_offset) == (ErrorCode.CORRUPT_MESSAGE, -1)


def test_too_few_bytes_are_a_corrupt_message(log: PartitionLog) -> None:
    assert refused(log, batch()[:60]).code == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("count", "last_offset_delta"), [(0, -1), (-1, -2), (2, 0), (1, 1), (1, -1)]
)
@pytest.mark.parametrize("validate_records", [True, False])
def test_the_record_count_must_fit_the_offsets(
    count: int, last_offset_delta: int, validate_records: bool
) -> None:
    header = read_header(batch())._replace(record_count=count, last_offset_delta=last_offset_delta)
    log = PartitionLog(LogConfig(), validate_records=validate_records)
    error = refused(log, with_header(batch(), header))
    assert (error.code, error.log_start_offset) == (ErrorCode.INVALID_RECORD, 0)


def test_clients_may_not_write_control_batches(log: PartitionLog) -> None:
    error = refused(log, batch(producer=(1, 0, 0), attributes=0x30))
    assert error.code == ErrorCode.INVALID_RECORD


def test_a_producer_id_needs_a_sequence(log: PartitionLog) -> None:
    assert refused(log, batch(producer=(1, 0, -1))).code == ErrorCode.INVALID_RECORD


def test_an_unknown_codec_is_no_known_error(log: PartitionLog) -> None:
    assert refused(log, batch(attributes=5)).code == ErrorCode.UNKNOWN_SERVER_ERROR


def test_records_that_do_not_fit_their_count_are_refused(log: PartitionLog) -> None:
    header = read_header(batch())._replace(record_count=2, last_offset_delta=1)
    data = with_header(batch(), header)
    assert refused(log, data).code == ErrorCode.INVALID_RECORD


def test_unchecked_records_are_found_out_when_they_are_read() -> None:
    log = PartitionLog(LogConfig(), validate_records=False)
    header = read_header(batch())._replace(record_count=2, last_offset_delta=1)
    append(log, with_header(batch(), header))
    with pytest.raises(BatchError):
        log.records()


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_stored_as_they_came(log: PartitionLog, name: str) -> None:
    data = encode_batch(
        [(None, b"value" * 100)],
        timestamps=[NOW],
        attributes=["none", "gzip", "snappy", "lz4", "zstd"].index(name),
        compress=codec(name).compress,
    )
    append(log, data)
    assert [record.value for record in log.records()] == [b"value" * 100]
    assert next(log.batches()).data[16:] == data[16:]


# -- timestamps


@pytest.mark.parametrize("validate_records", [True, False])
def test_timestamps_must_be_within_bounds(validate_records: bool) -> None:
    config = LogConfig(timestamp_before_max_ms=1000, timestamp_after_max_ms=2000)
    log = PartitionLog(config, validate_records=validate_records)
    for good in (NOW - 1000, NOW + 2000, -1):
        append(log, batch(timestamps=[good]))
    for bad in (NOW - 1001, NOW + 2001):
        error = refused(log, batch(timestamps=[bad]))
        assert error.code == ErrorCode.INVALID_TIMESTAMP
        assert [index for index, _ in error.record_errors] == [0]
        assert error.error_message


def test_each_bad_timestamp_is_named(log: PartitionLog) -> None:
    late = NOW + HOUR + 1
    error = refused(log, batch(b"a", b"b", b"c", timestamps=[late, NOW + HOUR, late]))
    assert error.code == ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in error.record_errors] == [0, 2]
    assert str(late) in str(error.record_errors[0][1])


def test_there_is_no_lower_bound_by_default(log: PartitionLog) -> None:
    append(log, batch(timestamps=[0]))


def test_log_append_time_replaces_the_producers_timestamps() -> None:
    log = PartitionLog(LogConfig(log_append_time=True))
    # Also those that are out of bounds: nobody will see them.
    answer = append(log, batch(b"a", b"b", timestamps=[5, NOW * 2]), now=NOW + 7)
    assert answer == Appended(0, NOW + 7, 0)
    assert [record.timestamp for record in log.records()] == [NOW + 7, NOW + 7]
    assert decode_batch(next(log.batches()).data)  # its CRC is right


def test_a_producer_may_not_claim_log_append_time(log: PartitionLog) -> None:
    error = refused(log, batch(b"a", b"b", attributes=0x08))
    assert error.code == ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in error.record_errors] == [0, 1]


def test_a_wrong_maximum_timestamp_is_corrected(log: PartitionLog) -> None:
    data = batch(b"a", b"b", timestamps=[NOW, NOW + 3])
    append(log, with_header(data, read_header(data)._replace(max_timestamp=NOW + 1)))
    stored = next(log.batches())
    assert stored.header.max_timestamp == NOW + 3
    assert decode_batch(stored.data)


# -- compacted topics


@pytest.mark.parametrize("validate_records", [True, False])
def test_a_compacted_topic_takes_no_null_key(validate_records: bool) -> None:
    log = PartitionLog(LogConfig(compacted=True), validate_records=validate_records)
    append(log, batch(b"v", key=b""))
    error = refused(log, batch(b"a", b"b", key=None))
    assert error.code == ErrorCode.INVALID_RECORD
    assert [index for index, _ in error.record_errors] == [0, 1]
    assert error.error_message


# -- idempotent producers


def test_sequences_must_go_on_without_a_gap(log: PartitionLog) -> None:
    append(log, batch(b"a", b"b", producer=(1, 0, 0)))
    error = refused(log, batch(b"d", producer=(1, 0, 3)))
    assert (error.code, error.log_start_offset) == (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0)
    assert append(log, batch(b"c", producer=(1, 0, 2))).base_offset == 2


def test_other_producers_have_sequences_of_their_own(log: PartitionLog) -> None:
    append(log, batch(producer=(1, 0, 0)))
    append(log, batch(producer=(2, 0, 0)))
    append(log, batch())
    append(log, batch(producer=(1, 0, 1)))
    assert [record.producer_id for record in log.records()] == [1, 2, -1, 1]


def test_a_repeated_batch_gets_its_old_offset(log: PartitionLog) -> None:
    for sequence in range(0, 10, 2):
        append(log, batch(b"a", b"b", producer=(1, 0, sequence)))
    for sequence in range(0, 10, 2):
        answer = append(log, batch(b"a", b"b", producer=(1, 0, sequence)))
        # The append time is the batch's maximum timestamp: so Java's broker answers.
        assert answer == Appended(sequence, NOW, 0, duplicate=True)
    assert log.end_offset == 10


def test_only_the_last_five_batches_are_remembered(log: PartitionLog) -> None:
    for sequence in range(6):
        append(log, batch(producer=(1, 0, sequence)))
    error = refused(log, batch(producer=(1, 0, 0)))
    assert error.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert append(log, batch(producer=(1, 0, 1))).duplicate


def test_a_duplicate_has_the_same_first_and_last_sequence(log: PartitionLog) -> None:
    append(log, batch(b"a", b"b", b"c", producer=(1, 0, 0)))
    error = refused(log, batch(b"a", b"b", producer=(1, 0, 0)))
    assert error.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_zero_comes_after_the_highest_sequence(log: PartitionLog) -> None:
    """RC-04"""
    append(log, batch(producer=(1, 0, 2**31 - 1)))
    append(log, batch(b"b", producer=(1, 0, 0)))
    assert append(log, batch(producer=(1, 0, 2**31 - 1))).duplicate


def test_a_batch_whose_sequences_wrap_is_one_batch(log: PartitionLog) -> None:
    append(log, batch(b"a", b"b", b"c", producer=(1, 0, 2**31 - 2)))
    assert refused(log, batch(producer=(1, 0, 0))).code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert append(log, batch(producer=(1, 0, 1))).base_offset == 3


def test_a_new_epoch_starts_at_0(log: PartitionLog) -> None:
    append(log, batch(producer=(1, 0, 0)))
    error = refused(log, batch(producer=(1, 1, 1)))
    assert error.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(log, batch(producer=(1, 1, 0)))
    append(log, batch(producer=(1, 1, 1)))


def test_an_old_epoch_is_refused_also_for_a_duplicate(log: PartitionLog) -> None:
    append(log, batch(producer=(1, 0, 0)))
    append(log, batch(producer=(1, 1, 0)))
    assert refused(log, batch(producer=(1, 0, 0))).code == ErrorCode.INVALID_PRODUCER_EPOCH
    assert refused(log, batch(producer=(1, 0, 1))).code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_the_epoch_of_a_refused_batch_is_not_taken_over(log: PartitionLog) -> None:
    append(log, batch(producer=(1, 0, 0)))
    refused(log, batch(producer=(1, 1, 7)))
    append(log, batch(producer=(1, 0, 1)))


@pytest.mark.parametrize("forget", [True, False])
def test_any_sequence_is_taken_from_a_producer_without_state(
    log: PartitionLog, forget: bool
) -> None:
    if forget:
        append(log, batch(producer=(1, 0, 0)))
        log.forget_producers()
    append(log, batch(b"x", producer=(1, 0, 17)))
    assert refused(log, batch(producer=(1, 0, 19))).code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


# -- reading


# -- transactions

TRANSACTIONAL = 0x10


def in_transaction(*values: bytes, producer: tuple[int, int, int]) -> bytes:
    return batch(*values, producer=producer, attributes=TRANSACTIONAL)


def end(log: PartitionLog, producer_id: int, epoch: int = 0, *, committed: bool = True) -> None:
    log.append_marker(producer_id, epoch, committed=committed, leader_epoch=0, now_ms=NOW)


def test_what_is_stable_ends_where_the_oldest_open_transaction_begins(log: PartitionLog) -> None:
    append(log, batch(b"a"))
    append(log, in_transaction(b"b", producer=(1, 0, 0)))
    append(log, in_transaction(b"c", producer=(2, 0, 0)))
    append(log, in_transaction(b"d", producer=(1, 0, 1)))
    assert (log.last_stable_offset, log.end_offset) == (1, 4)
    end(log, 1)
    assert (log.last_stable_offset, log.end_offset) == (2, 5)
    end(log, 2)
    assert (log.last_stable_offset, log.end_offset) == (6, 6)


def test_only_what_is_stable_is_read_as_committed(log: PartitionLog) -> None:
    append(log, in_transaction(b"a", producer=(1, 0, 0)))
    end(log, 1)
    append(log, in_transaction(b"b", producer=(1, 0, 1)))
    append(log, batch(b"c"))
    stable, marker, *_ = log.batches()
    assert log.read(0, 10**6, committed=True) == stable.data + marker.data
    assert log.read(2, 10**6, committed=True, at_least_one=True) == b""
    assert [r.value for r in log.records(committed=True)] == [b"a"]
    assert [r.value for r in log.records()] == [b"a", b"b", b"c"]
    assert [(r.offset, r.is_commit) for r in log.markers()] == [(1, True)]


def test_aborted_records_are_those_of_their_producer_and_their_range(log: PartitionLog) -> None:
    append(log, in_transaction(b"a", producer=(1, 0, 0)))
    append(log, in_transaction(b"b", producer=(2, 0, 0)))
    append(log, batch(b"c"))
    end(log, 1, committed=False)
    end(log, 2)
    append(log, in_transaction(b"d", producer=(1, 0, 1)))
    end(log, 1)
    aborted = [AbortedTransaction(1, 0, 3)]
    assert [r.value for r in log.records(committed=True)] == [b"b", b"c", b"d"]
    for first, behind, expected in ((0, 1, aborted), (3, 9, aborted), (4, 9, []), (0, 0, [])):
        assert log.aborted(first, behind) == expected


def test_a_marker_without_records_aborts_nothing(log: PartitionLog) -> None:
    end(log, 1, committed=False)
    assert log.aborted(0, 9) == []
    assert log.last_stable_offset == 1


def test_after_a_marker_of_the_next_epoch_the_producer_starts_at_0(log: PartitionLog) -> None:
    append(log, in_transaction(b"a", producer=(1, 0, 0)))
    end(log, 1, 1)
    late = refused(log, in_transaction(b"b", producer=(1, 0, 1)))
    assert late.code == ErrorCode.INVALID_PRODUCER_EPOCH
    gap = refused(log, in_transaction(b"b", producer=(1, 1, 1)))
    assert gap.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(log, in_transaction(b"b", producer=(1, 1, 0)))


def test_a_transaction_is_open_for_its_producer_in_its_epoch(log: PartitionLog) -> None:
    append(log, in_transaction(b"a", producer=(1, 3, 0)))
    known = {(i, epoch): log.has_transaction(i, epoch) for i in (1, 2) for epoch in (2, 3, 4)}
    assert [key for key, is_open in known.items() if is_open] == [(1, 3)]
    mixed = refused(log, batch(b"b", producer=(1, 3, 1)))
    assert (mixed.code, mixed.log_start_offset) == (ErrorCode.INVALID_TXN_STATE, 0)


def test_a_transaction_begins_with_the_lowest_sequence_that_came(log: PartitionLog) -> None:
    for sequence in (5, 4, 6):
        header = read_header(in_transaction(b"a", producer=(1, 0, sequence)))
        log.expect_first(header, from_0=False)
    for sequence in (5, 6):
        gap = refused(log, in_transaction(b"a", producer=(1, 0, sequence)))
        assert gap.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(log, in_transaction(b"a", producer=(1, 0, 4)))
    append(log, in_transaction(b"a", producer=(1, 0, 5)))


def test_a_read_starts_with_the_batch_that_holds_the_offset(log: PartitionLog) -> None:
    for value in (b"a", b"b", b"c"):
        append(log, batch(value, value))
    stored = [entry.data for entry in log.batches()]
    size = len(stored[0])
    assert log.read(0, 3 * size) == b"".join(stored)
    assert log.read(3, 3 * size) == stored[1] + stored[2]
    assert log.read(2, 2 * size - 1) == stored[1]
    assert log.read(6, 3 * size) == b""


def test_at_least_one_batch_comes_if_that_is_wanted(log: PartitionLog) -> None:
    append(log, batch(b"a"))
    append(log, batch(b"b"))
    assert log.read(0, 1) == b""
    assert log.read(0, 1, at_least_one=True) == next(log.batches()).data


def test_deleted_records_are_gone_and_offsets_stay(log: PartitionLog) -> None:
    for value in (b"a", b"b", b"c"):
        append(log, batch(value, value, producer=(1, 0, 2 * (value[0] - 97))))
    log.delete_before(3)
    assert (log.start_offset, log.end_offset) == (3, 6)
    assert [(r.offset, r.value) for r in log.records()] == [(3, b"b"), (4, b"c"), (5, b"c")]
    assert append(log, batch(b"d", producer=(1, 0, 6))) == Appended(6, -1, 3)
    log.delete_before(2)  # never backwards
    assert log.start_offset == 3
    log.delete_before(99)  # never beyond the end
    assert (log.start_offset, log.records()) == (7, [])


def test_offsets_are_found_by_timestamp(log: PartitionLog) -> None:
    append(log, batch(b"a", b"b", timestamps=[NOW, NOW + 10]))
    append(log, batch(b"c", b"d", timestamps=[NOW + 30, NOW + 20]))
    assert log.find_timestamp(NOW - 5) == (NOW, 0)
    assert log.find_timestamp(NOW + 1) == (NOW + 10, 1)
    assert log.find_timestamp(NOW + 15) == (NOW + 30, 2)
    assert log.find_timestamp(NOW + 31) is None
    assert log.latest_timestamp() == (NOW + 30, 2)
    log.delete_before(3)
    assert log.find_timestamp(NOW) == (NOW + 20, 3)


def test_an_empty_log_has_no_timestamp(log: PartitionLog) -> None:
    assert log.latest_timestamp() is None


def test_watchers_hear_of_appends_until_they_stop(log: PartitionLog) -> None:
    seen: list[int] = []

    def watcher() -> None:
        seen.append(log.end_offset)

    log.watch(watcher)
    append(log, batch())
    refused(log, batch(producer=(1, 0, -1)))
    log.unwatch(watcher)
    log.unwatch(watcher)
    append(log, batch())
    assert seen == [1]
