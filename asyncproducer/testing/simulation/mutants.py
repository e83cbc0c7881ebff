"""Planted bugs: a simulation that does not find them would be of no use.

Each is a change of one line of the producer's source, made in this process while
`planted` is open. So they need the plain Python sources (`ASYNCPRODUCER_IMPL=python`).
Which seeds find them is in known.py, which `--mutants --record` writes.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asyncproducer._implementation import IMPLEMENTATION
from asyncproducer.testing.simulation.model import Violation
from asyncproducer.testing.simulation.seeds import make_plan
from asyncproducer.testing.simulation.world import run

__all__ = ["MUTANTS", "Mutant", "Search", "changed_source", "find", "planted"]

_FUTURE = "from __future__ import annotations\n"

#: The promises that are about transactions alone.
_OF_TRANSACTIONS = {"torn", "undead", "outside"}


class Mutant(NamedTuple):
    """A bug. `where`: module and function below asyncproducer; `old` is there once."""

    name: str
    where: str
    old: str
    new: str
    #: The promises that it breaks: nothing else counts as finding it.
    rules: tuple[str, ...] = ()

    @property
    def transactional(self) -> bool:
        """Whether only producers with transactions have it."""
        return "transactions:" in self.where or not _OF_TRANSACTIONS.isdisjoint(self.rules)

    def shown_by(self, violations: Iterable[Violation]) -> bool:
        """Whether this bug is what was found.

        A history that hangs takes seconds, and leaves a mess: only where nothing else can be.
        """
        rules = {violation.rule for violation in violations}
        return not rules.isdisjoint(self.rules) and ("hang" in self.rules or "hang" not in rules)


class Search(NamedTuple):
    """What came of looking for a planted bug."""

    #: The seeds that show it, and how many were tried.
    seeds: tuple[int, ...]
    tried: int
    #: In how many of them a promise was broken, by its rule: also those that are not the bug's.
    rules: Counter[str]


MUTANTS = (
    Mutant(
        "a retry is queued at the tail",
        "core.accumulator:Accumulator._insert",
        "queue.batches.insert(at, batch)",
        "queue.batches.append(batch)",
        ("reordered",),
    ),
    Mutant(
        "one in flight: the partition is not muted",
        "core.accumulator:Accumulator._due_at",
        "self._one_in_flight and queue.in_flight",
        "False",
        ("reordered",),
    ),
    Mutant(
        "a retry does not wait for those before it",
        "core.sequences:Sequences.may_drain",
        "return first is batch and (partition.is_before_hole(batch) or self._asks(batch))",
        "return True",
        ("doubled", "reordered"),
    ),
    Mutant(
        "a second batch follows before the first is stored",
        "core.sequences:Sequences.may_drain",
        "partition.last_acked_sequence < 0",
        "False",
        ("reordered",),
    ),
    Mutant(
        "what waits for the loop's next turn is forgotten",
        "core.accumulator:Accumulator.turned",
        "self._touch(queue, now)",
        "pass",
        ("calm", "starved"),
    ),
    Mutant(
        "what follows goes to a broker's new address",
        "core.accumulator:Accumulator.node_moved",
        "batch.sent_to = GONE",
        "pass",
        ("needless",),
    ),
    Mutant(
        "what follows overtakes what is on its way to the topic before",
        "core.accumulator:Accumulator.update_topic",
        "batch.sent_to = GONE",
        "pass",
        ("reordered", "starved"),
    ),
    Mutant(
        "what the topic before has acknowledged counts for the next one",
        "core.sequences:Sequences.acknowledged",
        "if batch.sent_to != GONE:",
        "if True:",
        ("reordered",),
    ),
    Mutant(
        "a leader that the topic before had is believed",
        "net.scheduler:Scheduler._response",
        "part.leader_epoch >= 0 and batch.sent_to != GONE",
        "part.leader_epoch >= 0",
        ("starved",),
    ),
    Mutant(
        "a second retry is not queued",
        "net.scheduler:Scheduler._retry",
        "self._accumulator.retry(batch, now)",
        "batch.attempts == 1 or self._accumulator.retry(batch, now)",
        ("starved",),
    ),
    Mutant(
        "sequences do not start again under a new epoch",
        "core.sequences:Sequences._restart",
        "partition.next_sequence = 0",
        "pass",
        ("starved",),
    ),
    Mutant(
        "waiting batches keep their sequences after an epoch bump",
        "core.sequences:Sequences.apply_bumps",
        "for batch in partition.outstanding:",
        "for batch in partition.outstanding[:0]:",
        ("starved",),
    ),
    Mutant(
        "a hole is forgotten",
        "core.sequences:Sequences.bump",
        "self._renumber[partition] = None",
        "pass",
        ("starved",),
    ),
    Mutant(
        "the parts of a split batch have no sequences",
        "core.sequences:Sequences.split",
        "if batch.base_sequence < 0:",
        "if True:",
        ("starved",),
    ),
    Mutant(
        "what may be stored as a whole is sent again in parts under a new epoch",
        "core.sequences:Sequences.gives_up",
        "return partition.outstanding[:1] == [batch] and (",
        "return False and (",
        ("doubled",),
    ),
    Mutant(
        "memory of a repeated batch is given back twice",
        "core.accumulator:Accumulator._free",
        "self._returned += batch.memory",
        "self._returned += batch.memory * (2 if batch.sends > 1 else 1)",
        ("memory",),
    ),
    Mutant(
        "memory of a batch that expired on the wire stays taken",
        "core.accumulator:Accumulator.landed",
        "self._free(batch)",
        "pass",
        ("memory",),
    ),
    Mutant(
        "memory of a batch that has its end counts for its broker on and on",
        "core.accumulator:Accumulator._free",
        "self._charge(batch, 0)",
        "batch.memory = 0",
        ("memory", "starved", "blocked"),
    ),
    Mutant(
        "who comes later claims what fits before who waits for the broker's memory",
        "net.buffer_pool:BufferPool._serve_head",
        "if not ticket._held and self._steps_aside(ticket):",
        "if not ticket._held and not ticket.claim() and self._steps_aside(ticket):",
        ("reordered",),
    ),
    Mutant(
        "memory of who leaves the line is lost",
        "net.buffer_pool:BufferPool._remove",
        "self.available += ticket._held",
        "pass",
        ("memory",),
    ),
    Mutant(
        "memory that is given back reaches nobody in the line",
        "net.buffer_pool:BufferPool.release",
        "self.serve()",
        "pass",
        ("starved", "blocked"),
    ),
    Mutant(
        "an error that may pass is taken for an acknowledgement",
        "net.scheduler:Scheduler._response",
        "code in (_NONE, _DUPLICATE)",
        "code in (_NONE, _DUPLICATE, ErrorCode.NOT_ENOUGH_REPLICAS)",
        ("lost",),
    ),
    Mutant(
        "a repeated batch that is stored counts as failed",
        "net.scheduler:Scheduler._response",
        "code in (_NONE, _DUPLICATE)",
        "code == _NONE",
        ("duplicate",),
    ),
    Mutant(
        "what expires on the wire is said not to be stored",
        "core.batch:ProducerBatch.persisted",
        "self.in_flight or self.maybe_written",
        "self.maybe_written",
        ("persisted",),
    ),
    Mutant(
        "what was sent once is said not to be stored",
        "net.scheduler:Scheduler._conclude",
        "batch.maybe_written = True",
        "pass",
        ("persisted",),
    ),
    Mutant(
        "an expired batch stays in its queue",
        "core.accumulator:Accumulator.give_up",
        "self._unqueue(queue, batch)",
        "pass",
        ("logged", "memory"),
    ),
    Mutant(
        "a late answer ends a batch again",
        "core.delivery:Outcome.acknowledge",
        "if self.state == FAILED:\n        return False",
        "self.state = PENDING",
        ("ends",),
    ),
    Mutant(
        "a waiter is lost when its batch is split",
        "core.delivery:Outcome.split_into",
        "for waiter in waiters or ():",
        "for waiter in ():",
        ("hang", "stuck", "pending"),
    ),
    Mutant(
        "a flush does not wait for the parts of a split batch",
        "core.delivery:Outcome.split_into",
        "fence.replace(len(parts))",
        "pass",
        ("flush",),
    ),
    Mutant(
        "a split shifts offsets",
        "core.delivery:Place._resolve",
        "self._index -= start",
        "pass",
        ("offset",),
    ),
    Mutant(
        "a lost connection forgets what it carried",
        "net.connection:Connection.close",
        "self._guarded(request.on_done, None, reason)",
        "pass",
        ("memory", "starved"),
    ),
    Mutant(
        "a closed producer lets who waits for metadata wait on",
        "intake:Intake.close",
        "self._refuse_lines(error)",
        "pass",
        ("stuck", "pending"),
    ),
    Mutant(
        "nobody wakes when a batch has lingered",
        "core.accumulator:Accumulator.next_deadline",
        "deadline = timers[0][0] if timers else _NEVER",
        "deadline = _NEVER",
        ("calm", "late", "starved", "pending"),
    ),
    Mutant(
        "a batch compressed too late keeps its mark",
        "core.accumulator:Accumulator._compressed",
        "ratio = batch.compressed(payload)",
        "ratio = batch.compressed(payload); batch.compressing = True",
        ("starved",),
    ),
    Mutant(
        "a commit does not wait for records on their way",
        "net.transactions:Transactions.step",
        "busy=manager.is_ending and self._is_busy()",
        "busy=False",
        ("torn",),
    ),
    Mutant(
        "a failed record does not keep its transaction from being committed",
        "net.transactions:Transactions.batch_failed",
        "if not self._manager.is_doomed:",
        "if False:",
        ("torn",),
    ),
    Mutant(
        "a refused record does not keep its transaction from being committed",
        "net.transactions:Transactions.refused",
        "self._doom(error)",
        "pass",
        ("torn",),
    ),
    Mutant(
        "an abort is sent as a commit",
        "core.transactions:TransactionManager._end",
        "commit=call == COMMIT",
        "commit=True",
        ("undead",),
    ),
    Mutant(
        "offsets are not sent after their group was added",
        "core.transactions:TransactionManager.answered",
        "self._push_offsets(request.operation)",
        "request.operation.finish()",
        ("torn",),
    ),
    Mutant(
        "an end that is in doubt is told as done",
        "net.transactions:Transactions._wait",
        "raise self._timeout(operation)",
        "return",
        ("torn", "undead"),
    ),
    Mutant(
        "a coordinator that moved is not looked for",
        "core.transactions:TransactionManager._lose_coordinator",
        "self.coordinators.pop(request.key, None)",
        "pass",
        ("starved",),
    ),
    Mutant(
        "what an aborted transaction has dropped leaves a gap in the sequences",
        "core.transactions:TransactionManager._ended",
        "self.sequences.rewind()",
        "pass",
        ("starved",),
    ),
    Mutant(
        "an abort waits for a group's coordinator",
        "core.transactions:TxnRequest.__init__",
        "_FIND_GROUP if finds_group else kind.priority",
        "kind.priority",
        ("calm",),
    ),
    Mutant(
        "a record for a new partition waits for a group's coordinator",
        "core.transactions:TxnRequest.__lt__",
        "(self.priority, self.number) < (other.priority, other.number)",
        "(self.kind.priority, self.number) < (other.kind.priority, other.number)",
        ("calm",),
    ),
    Mutant(
        "a partitioner that raises does not keep its transaction from being committed",
        "net.transactions:Transactions.refused",
        "self._doom(error)",
        "type(error).__name__ == 'InvalidPartition' or self._doom(error)",
        ("torn",),
    ),
    Mutant(
        "a serializer that raises does not keep its transaction from being committed",
        "net.transactions:Transactions.refused",
        "self._doom(error)",
        "type(error).__name__ == 'SerializationError' or self._doom(error)",
        ("torn",),
    ),
    Mutant(
        "a serializer that raises too late spoils the next transaction",
        "intake:Intake._refuse",
        "if openings == self.openings:",
        "if True:",
        ("calm",),
    ),
    Mutant(
        "a serializer's error that looks like ours keeps its name",
        "encoding:RecordSerializer.__call__",
        "except RecordError:",
        "except (RecordError, RuntimeError):",
        ("spoiled",),
    ),
    Mutant(
        "offsets that nobody waited for are taken for those of the next transaction",
        "core.transactions:TransactionManager._ended",
        "self._last_offsets = None",
        "pass",
        ("torn",),
    ),
    Mutant(
        "a commit does not wait for serializers",
        "net.transactions:Transactions._is_busy",
        "if intake.serializing and not self._manager.is_doomed:",
        "if False:",
        ("torn", "undead"),
    ),
    Mutant(
        "a record whose serializer was slow comes into the next transaction",
        "intake:Intake._check_open",
        "if openings != self.openings:",
        "if False:",
        ("outside", "torn", "undead"),
    ),
    Mutant(
        "a send_many goes on in the next transaction",
        "bulk:Sending._take",
        "if intake is not None and intake.openings != self._opening:",
        "if False:",
        ("outside",),
    ),
    Mutant(
        "a commit is called aborted when the next epoch is refused",
        "core.transactions:TransactionManager._no_epoch",
        "ending.finish()",
        "ending.finish(self.aborted())",
        ("undead",),
    ),
    Mutant(
        "a coordinator is never asked for the end that is told",
        "core.transactions:TransactionManager.next_request",
        "if not self._started:",
        "if True:",
        ("torn",),
    ),
)


def changed_source(mutant: Mutant) -> str:
    """The function that has this bug, as source. It is there beside compiled modules too.

    Raises RuntimeError where the source has changed so that the bug cannot be planted.
    """
    module_name, _, path = mutant.where.partition(":")
    file = Path(__file__).parents[2].joinpath(*module_name.split(".")).with_suffix(".py")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    node: Any = ast.parse("".join(lines))
    for name in path.split("."):
        node = next(inner for inner in node.body if getattr(inner, "name", None) == name)
    first = min(inner.lineno for inner in (node, *node.decorator_list))
    source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    if source.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.old!r} is not once in {mutant.where}")
    return source.replace(mutant.old, mutant.new)


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
    code = compile(
        _FUTURE + changed_source(mutant),
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


def find(mutant: Mutant, seeds: Iterable[int], enough: int = 1) -> Search:
    """Looks for a planted bug, until so many seeds have shown it."""
    found: list[int] = []
    rules: Counter[str] = Counter()
    tried = 0
    with planted(mutant):
        for seed in seeds:
            if len(found) >= enough:
                break
            violations = run(make_plan(seed)).violations
            tried += 1
            rules.update({violation.rule for violation in violations})
            if mutant.shown_by(violations):
                found.append(seed)
    return Search(tuple(found), tried, rules)
