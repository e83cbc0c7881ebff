"""`python -m asyncproducer.cli.docs [DIRECTORY]`: the parts of docs/ that are made from the code.

options.md and errors.md are written anew; in design.md the tables between the marks
`<!-- states: NAME -->` and `<!-- end -->` are. The tests compare all of them.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from asyncproducer import errors
from asyncproducer.config import options_table
from asyncproducer.core import sequences
from asyncproducer.core.outcome import produce_table
from asyncproducer.net import connection
from asyncproducer.producer import TRANSITIONS as PRODUCER_TRANSITIONS

__all__ = ["design_page", "errors_page", "exception_tree", "state_table", "write"]

S = TypeVar("S", bound=Enum)

_ERRORS = """\
# Errors

<!-- Generated: python -m asyncproducer.cli.docs -->

What is known before a record is in the buffer is raised by the call: `send`, `enqueue` and
`send_nowait` then have sent nothing. What goes wrong later comes through the record's `Delivery`
(`send` awaits it for you) as a `DeliveryError`. `send_many` puts both into its result.

## The tree

{tree}
In parentheses: the builtin exception that it is as well, so that `except TimeoutError` and the
like work. Every `KafkaError` has `code` (Kafka's error code, or None) and `retriable` (whether the
same may succeed later).

## Is the record in the log?

A `DeliveryError` carries `topic`, `partition`, `attempts` (how often the record was sent),
`elapsed` (seconds since its batch began), and as `__cause__` the last thing that went wrong.
`persisted` answers the question that decides whether you may send the record again:

| `persisted` | means | sending it again |
|---|---|---|
| `"no"` | it was never sent, or each request with it was clearly refused | cannot duplicate it |
| `"maybe"` | a request with it got no answer, or one that leaves it open | may duplicate it |
| `"yes"` | it is in the log all the same; no error of this version says so | duplicates it |

`BrokerRejected` has two more, for brokers that name the bad records of a batch (KIP-467):
`record_index`, the record's place in its batch, or None where another record of the batch was the
bad one; and `broker_message`.

## What an answer to a Produce request means

One row per error code of the protocol. "Batch" is what happens to the batch that got it:

- **acknowledge**: its records are in the log.
- **retry**: it is sent again, in its place and after `retry_backoff_ms`, until
  `delivery_timeout_ms` has passed (`DeliveryTimeout`) or `retries` is used up.
- **split**: a batch of several records is sent again as smaller ones; a single record fails.
- **fail**: its records fail with `BrokerRejected`; with `DeliveryError` itself where it was the
  connection and not the broker that said no.
- **fatal**: they fail, and the producer with them: every later call raises. Without
  `enable_idempotence` only the batch fails. So it does then with OUT_OF_ORDER_SEQUENCE_NUMBER and
  UNKNOWN_PRODUCER_ID.

"Metadata refresh": the answer says that our picture of the cluster is old. "May be in the log":
after this answer `persisted` is `"maybe"`, if the record fails in the end. A request that got no
answer at all counts as NETWORK_EXCEPTION, one that got none in time as REQUEST_TIMED_OUT.

{table}"""


def errors_page() -> str:
    """The text of docs/errors.md."""
    return _ERRORS.format(tree=f"```text\n{exception_tree()}```\n", table=produce_table())


def exception_tree() -> str:
    """The exceptions of the package, with what they mean."""
    rows = [*_branches(errors.KafkaError, "", ""), *_branches(errors.BatchDeliveryError, "", "")]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {meaning}\n" for name, meaning in rows)


def _branches(kind: type[BaseException], before: str, below: str) -> Iterator[tuple[str, str]]:
    mixins = [base.__name__ for base in kind.__bases__ if base.__module__ == builtins.__name__]
    plain = not mixins or kind is errors.KafkaError
    name = kind.__name__ if plain else f"{kind.__name__} ({', '.join(mixins)})"
    sentence = re.split(r"\.(?:\s|$)", kind.__doc__ or "")[0]
    yield before + name, " ".join(sentence.split())
    children = [c for c in kind.__subclasses__() if c.__module__ == errors.__name__]
    for child in children:
        last = child is children[-1]
        yield from _branches(
            child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")
        )


def state_table(transitions: Mapping[S, frozenset[S]]) -> str:
    """The legal moves of a state machine as Markdown."""
    lines = ["| from | to |", "|---|---|"]
    for state, targets in transitions.items():
        ordered = [s.name for s in type(state) if s in targets]
        lines.append(f"| {state.name} | {', '.join(ordered) or '(the end)'} |")
    return "\n".join(lines) + "\n"


def design_page(text: str) -> str:
    """docs/design.md with the state tables as the code has them now."""
    tables = {
        "producer": state_table(PRODUCER_TRANSITIONS),
        "connection": state_table(connection.TRANSITIONS),
        "producer id": state_table(sequences.TRANSITIONS),
    }
    for name, table in tables.items():
        start, end = f"<!-- states: {name} -->\n", "<!-- end -->"
        pattern = re.escape(start) + r".*?" + re.escape(end)
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"the page has no table of the states of: {name}")
        text = re.sub(pattern, lambda _: start + table + end, text, flags=re.DOTALL)  # noqa: B023
    return text


def write(directory: Path) -> None:
    """Bring the pages in `directory` up to date."""
    design = directory / "design.md"
    pages = {
        directory / "options.md": options_table(),
        directory / "errors.md": errors_page(),
        design: design_page(design.read_text(encoding="utf-8")),
    }
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(*sys.argv[1:2] or ["docs"]))
