"""What a query's checkpoint says about how the query runs. Spark does not say it otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["runs_without_batches"]


def runs_without_batches(location: str) -> bool:
    """Whether no batch is about to be written: then the query's trigger is continuous.

    Spark writes down a micro-batch in `offsets` before it asks for a writer, and in `commits` when
    the batch is done. With a continuous trigger it asks for one when the query starts. False where
    that cannot be known: where the checkpoint is not on this machine.
    """
    parts = urlsplit(location)
    if not location or parts.scheme not in ("", "file"):
        return False
    path = Path(unquote(parts.path) if parts.scheme else location)
    try:
        if not (path / "metadata").is_file():
            return False
        return _last(path / "offsets") <= _last(path / "commits")
    except OSError:
        return False


def _last(log: Path) -> int:
    """The number of the last batch there; -1 for none."""
    if not log.is_dir():
        return -1
    # (Twice a batch. With 200 batches kept, a Path for each name made it 0.8 instead of 0.3 ms.)
    return max((int(name) for name in os.listdir(log) if name.isdigit()), default=-1)
