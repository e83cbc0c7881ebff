from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncproducer import Producer
from asyncproducer.errors import KafkaError
from asyncproducer.spark.audit.ledger import (
    SCHEMA,
    Entry,
    LedgerError,
    StampedLedger,
    entries_of,
    read_ledger,
    write_ledger,
)
from asyncproducer.spark.audit.stamps import read_stamp
from asyncproducer.testing import EmbeddedCluster, MemoryNetwork

ENTRIES = [
    Entry(1, 0, "t", 0, 99, failed=((3, 5), (90, 99)), in_doubt=((7, 7),), batch_id=4),
    Entry(1, 1, "t", 5, 4, delivery="at_least_once", ordered=False, sink_id="orders"),
]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_ledger(tmp_path / "a.parquet", ENTRIES[:1])
    write_ledger(tmp_path / "b.parquet", ENTRIES[1:])
    assert read_ledger(tmp_path) == ENTRIES
    assert read_ledger(tmp_path / "b.parquet") == ENTRIES[1:]
    with pytest.raises(FileExistsError):
        write_ledger(tmp_path / "a.parquet", [])


def test_what_has_neither_failed_nor_is_in_doubt_is_acknowledged() -> None:
    assert (ENTRIES[0].attempted, ENTRIES[0].acked) == (100, 100 - 3 - 10 - 1)
    assert (ENTRIES[1].attempted, ENTRIES[1].acked) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": 2**32}, "run must be within 0 and 4294967295"),
        ({"lane": -1}, "lane must be within"),
        ({"first_seq": 9}, "9 to 4 are no numbers"),
        ({"failed": ((3, 5),)}, "3 to 5, failed or in doubt, is outside of 0 to 4"),
        ({"failed": ((1, 3),), "in_doubt": ((3, 4),)}, "overlaps another"),
        ({"in_doubt": ((2, 1),)}, "2 to 1"),
        ({"delivery": "twice"}, "'twice', not one of exactly_once, at_least_once, at_most_once"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"run": 1, "lane": 2, "topic": "t", "first_seq": 0, "last_seq": 4}
    with pytest.raises(LedgerError, match=message):
        Entry(**(fields | change))


def table(**changes: Any) -> pa.Table:
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {
        **{"run": 1, "lane": 2, "topic": "t", "attempted": 5, "acked": 4},
        **{"first_seq": 0, "last_seq": 4, "failed": [{"first": 2, "last": 2}]},
        **{"delivery": "exactly_once", "ordered": True, "config_hash": "", "sink_id": ""},
    }
    return pa.Table.from_pylist([row | changes], SCHEMA)


def test_a_ledger_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    assert entries_of(table())[0].acked == 4
    with pytest.raises(LedgerError, match=r"5 attempted and 5 acknowledged are told.* 5 and 4"):
        entries_of(table(acked=5))
    with pytest.raises(LedgerError, match="null in the ledger's column lane"):
        entries_of(table(lane=None))
    with pytest.raises(LedgerError, match="no column acked, sink_id"):
        entries_of(table().drop_columns(["acked", "sink_id"]))
    with pytest.raises(LedgerError, match="other types"):
        entries_of(table().set_column(1, "lane", pa.array(["x"])))
    with pytest.raises(FileNotFoundError, match="no ledger at"):
        read_ledger(tmp_path / "none")
    (tmp_path / "text").write_text("text, and long enough to be looked at")
    with pytest.raises(LedgerError, match="is no ledger"):
        read_ledger(tmp_path / "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LedgerError, match="the directory is empty"):
        read_ledger(tmp_path / "empty")


@pytest.mark.virtual_time
async def test_a_stamped_load_keeps_its_books(
    cluster: EmbeddedCluster, network: MemoryNetwork
) -> None:
    ledger = StampedLedger(7, 3, keys=10, size=50)
    async with Producer(cluster.bootstrap_servers, connector=network) as producer:
        for number in range(20):
            key, value = ledger.next_record()
            if number in (4, 5):
                ledger.refuse(KafkaError("refused"))
            else:
                ledger.track(await producer.enqueue("t", value, key=key), now=0.0)
        await producer.flush()
        ledger.next_record()  # nothing is known of it yet
        ledger.abort(20)
        ledger.next_record()
    entry = ledger.entry("t", batch_id=9)
    assert entry == Entry(7, 3, "t", 0, 21, ((4, 5), (20, 20)), ((21, 21),), batch_id=9)
    values = [record.value or b"" for record in cluster.records("t", 0)]
    stamps = [read_stamp(value) for value in values]
    assert [stamp.seq for stamp in stamps] == [n for n in range(20) if n not in (4, 5)]
    assert {stamp[:2] for stamp in stamps} == {(7, 3)}
    assert all(stamp.holds(value[28:]) for stamp, value in zip(stamps, values, strict=True))
    assert {len(value) for value in values} == {50}
    with pytest.raises(NotImplementedError):
        ledger.read(0, 0, None, values[0])
