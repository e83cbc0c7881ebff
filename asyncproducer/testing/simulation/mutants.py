"""Planted bugs: a simulation that does not find them would be of no use.

Each is a change of one line of the producer's source, made in this process while
`planted` is open. So they need the plain Python sources (`ASYNCPRODUCER_IMPL=python`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncproducer._implementation import IMPLEMENTATION

__all__ = ["MUTANTS", "Mutant", "planted"]


_FUTURE = "from __future__ import annotations\n"


class Mutant(NamedTuple):
    """A bug. `where`: module and function below asyncproducer; `old` is there once."""

    name: str
    where: str
    old: str
    new: str
    #: The first seed that finds it.
    seed: int


MUTANTS = (
    Mutant(
        "a retry is queued at the tail",
        "core.accumulator:Accumulator._insert",
        "queue.batches.insert(at, batch)",
        "queue.batches.append(batch)",
        6,
    ),
    Mutant(
        "one in flight: the partition is not muted",
        "core.accumulator:Accumulator._due_at",
        "self._one_in_flight and queue.in_flight",
        "False",
        20,
    ),
    Mutant(
        "a retry does not wait for those before it",
        "core.sequences:Sequences.may_drain",
        "return first is batch and partition.is_before_hole(batch)",
        "return True",
        549,
    ),
    Mutant(
        "a second batch follows before the first is stored",
        "core.sequences:Sequences.may_drain",
        "partition.last_acked_sequence >= 0",
        "True",
        6,
    ),
    Mutant(
        "a second retry is not queued",
        "net.scheduler:Scheduler._retry",
        "self._accumulator.retry(batch, now)",
        "batch.attempts == 1 or self._accumulator.retry(batch, now)",
        2,
    ),
    Mutant(
        "sequences do not start again under a new epoch",
        "core.sequences:Sequences._restart",
        "partition.next_sequence = 0",
        "pass",
        144,
    ),
    Mutant(
        "waiting batches keep their sequences after an epoch bump",
        "core.sequences:Sequences.apply_bumps",
        "for batch in partition.outstanding:",
        "for batch in partition.outstanding[:0]:",
        144,
    ),
    Mutant(
        "a hole is forgotten",
        "core.sequences:Sequences.bump",
        "self._renumber[partition] = None",
        "pass",
        6,
    ),
    Mutant(
        "the parts of a split batch have no sequences",
        "core.sequences:Sequences.split",
        "if batch.base_sequence < 0:",
        "if True:",
        124,
    ),
    Mutant(
        "memory of a repeated batch is given back twice",
        "core.accumulator:Accumulator._free",
        "self._returned += batch.memory",
        "self._returned += batch.memory * (2 if batch.sends > 1 else 1)",
        2,
    ),
    Mutant(
        "memory of a batch that expired on the wire stays taken",
        "core.accumulator:Accumulator.landed",
        "self._free(batch)",
        "pass",
        7,
    ),
    Mutant(
        "memory of who leaves the line is lost",
        "net.buffer_pool:BufferPool._remove",
        "self.available += ticket._held",
        "pass",
        7,
    ),
    Mutant(
        "memory that is given back reaches nobody in the line",
        "net.buffer_pool:BufferPool.release",
        "self.serve()",
        "pass",
        115,
    ),
    Mutant(
        "an error that may pass is taken for an acknowledgement",
        "net.scheduler:Scheduler._response",
        "code == ErrorCode.NONE or",
        "code in (ErrorCode.NONE, ErrorCode.NOT_ENOUGH_REPLICAS) or",
        25,
    ),
    Mutant(
        "a repeated batch that is stored counts as failed",
        "net.scheduler:Scheduler._response",
        "code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER",
        "False",
        316,
    ),
    Mutant(
        "what expires on the wire is said not to be stored",
        "core.accumulator:_failure",
        "batch.in_flight or batch.maybe_written",
        "batch.maybe_written",
        13,
    ),
    Mutant(
        "what was sent once is said not to be stored",
        "net.scheduler:Scheduler._conclude",
        "batch.maybe_written = True",
        "pass",
        27,
    ),
    Mutant(
        "an expired batch stays in its queue",
        "core.accumulator:Accumulator._give_up",
        "self._unqueue(queue, batch)",
        "pass",
        7,
    ),
    Mutant(
        "a late answer ends a batch again",
        "core.delivery:Outcome.acknowledge",
        "if self.state == FAILED:\n        return False",
        "self.state = PENDING",
        22,
    ),
    Mutant(
        "a waiter is lost when its batch is split",
        "core.delivery:Outcome.split_into",
        "for waiter in waiters or ():",
        "for waiter in ():",
        10,
    ),
    Mutant(
        "a flush does not wait for the parts of a split batch",
        "core.delivery:Outcome.split_into",
        "fence.replace(len(parts))",
        "pass",
        343,
    ),
    Mutant(
        "a split shifts offsets",
        "core.delivery:Delivery._resolve",
        "self._index -= start",
        "pass",
        10,
    ),
    Mutant(
        "a lost connection forgets what it carried",
        "net.connection:Connection.close",
        "self._guarded(request.on_done, None, reason)",
        "pass",
        4,
    ),
    Mutant(
        "a closed producer lets who waits for metadata wait on",
        "intake:Intake.close",
        "for pending in line:",
        "for pending in ():",
        8,
    ),
    Mutant(
        "nobody wakes when a batch has lingered",
        "core.accumulator:Accumulator.next_deadline",
        "deadline = timers[0][0] if timers else _NEVER",
        "deadline = _NEVER",
        6,
    ),
    Mutant(
        "a batch compressed too late keeps its mark",
        "core.accumulator:Accumulator._compressed",
        "ratio = batch.compressed(payload)",
        "ratio = batch.compressed(payload); batch.compressing = True",
        5,
    ),
)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The producer has this bug until the end of the block. Not safe in several threads.

    Raises RuntimeError with compiled modules, and where the source has changed so that
    the bug cannot be planted.
    """
    if IMPLEMENTATION == "compiled":
        raise RuntimeError("bugs are planted in the sources: set ASYNCPRODUCER_IMPL=python")
    module_name, _, path = mutant.where.partition(":")
    module = importlib.import_module(f"asyncproducer.{module_name}")
    owner: Any = module
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    healthy = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(healthy))
    if source.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.old!r} is not once in {mutant.where}")
    code = compile(
        _FUTURE + source.replace(mutant.old, mutant.new),
        f"<{mutant.where}, in which {mutant.name}>",
        "exec",
    )
    made: dict[str, Any] = {}
    exec(code, vars(module), made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, healthy)
