"""What a query's checkpoint tells of its trigger."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncproducer.spark.checkpoint import runs_without_batches


def checkpoint(where: Path, offsets: int, commits: int) -> Path:
    """Of a query that has begun so many batches, and ended so many."""
    where.mkdir()
    (where / "metadata").write_text('{"id":"q"}')
    for name, count in (("offsets", offsets), ("commits", commits)):
        log = where / name
        log.mkdir()
        for number in range(count):
            (log / str(number)).write_text("v1")
            (log / f".{number}.crc").write_text("crc")
    return where


@pytest.mark.parametrize(
    ("offsets", "commits", "without"),
    [(0, 0, True), (1, 0, False), (11, 10, False), (11, 11, True), (1, 2, True)],
)
def test_a_batch_that_is_to_be_written_has_begun_and_has_no_end(
    tmp_path: Path, offsets: int, commits: int, without: bool
) -> None:
    where = checkpoint(tmp_path / "with space", offsets, commits)
    assert runs_without_batches(str(where)) is without
    assert runs_without_batches(where.as_uri()) is without


def test_a_new_query_has_no_logs(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text("{}")
    assert runs_without_batches(str(tmp_path))
    assert runs_without_batches(f"file:{tmp_path}")


def test_nothing_is_known_of_a_checkpoint_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = checkpoint(tmp_path / "checkpoint", 0, 0)
    assert not runs_without_batches(f"hdfs://name{where}")
    assert not runs_without_batches(f"s3a://bucket{where}")
    assert not runs_without_batches(str(tmp_path / "none"))
    monkeypatch.chdir(where)
    assert not runs_without_batches("")
