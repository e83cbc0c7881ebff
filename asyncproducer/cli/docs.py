"""`python -m asyncproducer.cli.docs [DIRECTORY]`: the parts of docs/ that are made from the code.

options.md, errors.md and metrics.md are written anew; in design.md the tables between the marks
`<!-- states: NAME -->` and `<!-- end -->` are. In a checkout, asyncproducer/options.py is made from
the table of the options as well. The tests compare all of them.
"""

from __future__ import annotations

import argparse
import builtins
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

from asyncproducer import errors
from asyncproducer.cli.error_tables import (
    control_part,
    group_part,
    markdown_table,
    produce_table,
    transactional_part,
)
from asyncproducer.config import NAMES, OPTIONS, Option
from asyncproducer.core import sequences, transactions
from asyncproducer.core.metrics import LEFT_OUT, metrics_table
from asyncproducer.net import connection
from asyncproducer.option_names import LIBRDKAFKA, REFUSED, REFUSED_FAMILIES, Refused
from asyncproducer.producer import TRANSITIONS as PRODUCER_TRANSITIONS

__all__ = [
    "design_page",
    "errors_page",
    "exception_tree",
    "main",
    "metrics_page",
    "options_module",
    "options_page",
    "state_table",
    "write",
]

S = TypeVar("S", bound=Enum)

_ERRORS = """\
# Errors

<!-- Generated: python -m asyncproducer.cli.docs -->

What is known before a record is in the buffer is raised by the call: `send`, `enqueue` and
`send_nowait` then have sent nothing. What goes wrong later comes through the record's `Delivery`
(`send` awaits it for you) as a `DeliveryError`. `send_many` puts both into its result.

## The tree

{tree}
The Spark sink has three more, which Spark puts into errors of its own: `SinkStopped`, where exactly
once cannot be kept up or cannot be known to be, `SharedSource`, where it has stopped so for good,
and `RowsCutShort`, where what makes the rows has failed ([when it stops](spark.md#when-it-stops)).

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
| `"yes"` | it is in the log all the same, but has fewer replicas than it should | duplicates it |

The last one is what NOT_ENOUGH_REPLICAS_AFTER_APPEND says: all replicas in sync have the record,
and they are fewer than `min.insync.replicas`. A topic that is deleted takes it along, as it takes
what was acknowledged: both tell of the log that the record was sent to, not of one with the same
name that is made later.

`BrokerRejected` has two more, for brokers that name the bad records of a batch (KIP-467):
`record_index`, the record's place in its batch, and `broker_message`. Where a broker names several,
`code` is INVALID_RECORD for each of them. Records that only shared their batch have neither `code`
nor `record_index`: nothing is wrong with them, and `persisted` tells what sending them again does.

## How to read the tables

They say, for each error code of the protocol and each request that we send, what the producer does.
They are made from the tables that it acts on. A code that Kafka does not know yet counts as
UNKNOWN_SERVER_ERROR.

- **class**: the class of the error that you may see. Its `code` is the code (PRODUCER_FENCED for
  each `ProducerFenced`); where it is a timeout, or "cause" is said, the error of the code is its
  `__cause__`.
- **retriable**: whether the same may succeed later: `retriable` of a `BrokerError` and of a
  `BrokerRejected`.
- **refresh**: what is asked for again, since our picture of the cluster is old.
- **batch**, **transaction**, **the user**: what happens to the batches that wait for the answer, to
  the open transaction (if the producer has a `transactional_id`), and to the calls. A transaction
  that is *abortable* can only be aborted: its calls raise `TransactionAborted` until
  `abort_transaction()`, then the next one can begin. After *fatal* every call raises, of a
  transaction or not, until the producer is closed.

In ABORTABLE_ERROR and FATAL_ERROR the message begins with the call and the state:
`commit_transaction() is not allowed in state ABORTABLE_ERROR: ...`.

## What an answer to a Produce request means

"Batch" is what happens to the batch that got it:

- **acknowledge**: its records are in the log.
- **retry**: it is sent again, in its place and after `retry_backoff_ms`, until
  `delivery_timeout_ms` has passed (`DeliveryTimeout`) or `retries` is used up (`BrokerRejected`).
  With `enable_idempotence` a batch whose own answer was lost, behind one that was given up without
  an answer or refused, ends instead (`BrokerRejected`, OUT_OF_ORDER_SEQUENCE_NUMBER, `persisted`
  maybe) where under a new epoch it might be stored twice. (Java sends it.)
- **split**: a batch of several records is sent again as smaller ones; a single record fails. With
  `enable_idempotence` those of a batch that may be in the log already, because an earlier answer
  was lost, are not stored twice: OUT_OF_ORDER_SEQUENCE_NUMBER ends them, `persisted` maybe.
- **fail**: its records fail with `BrokerRejected`; with `DeliveryError` itself where it was the
  connection and not the broker that said no.
- **fatal**: they fail, and the producer with them: every later call raises.
- **plain**: so it is without `enable_idempotence`, where that differs. There is no state then that
  could be broken for good.

"In the log" is what this answer says of the batch; where the record fails in the end, the most
that any answer to its requests has said is its `persisted`. A request that got no answer at all
counts as NETWORK_EXCEPTION, one that got none in time as REQUEST_TIMED_OUT.

With a `transactional_id`, a batch that fails makes its transaction abortable; so does a record that
`send` refuses.

{table}
## What an answer to another request means

None of these ends a record by itself, but for "denied" and "fatal": what cannot be known or done
yet waits, records until `delivery_timeout_ms` has passed, calls until `max_block_ms` has.

- **take**: what the answer says is taken.
- **repeat**: the same is asked again, after `retry_backoff_ms` and more each time; **repeat if
  wanted**: as long as a call waits for it.
- **older**: asked again at once, in a version that the broker speaks; it is not asked a third time.
- **disconnect**: the connection is closed, and made again after `reconnect_backoff_ms`. `start()`
  raises at once where no broker answers better, and the code is not retriable. **refused**:
  besides, calls that wait for metadata raise `AuthenticationError`.
- **rebootstrap**: all brokers are forgotten, and `bootstrap_servers` are asked (KIP-1102).
- **denied**: what waits fails with `AuthorizationError`; what comes later asks again. **invalid**:
  the same with `InvalidTopic`.
- **fatal**: the producer has failed for good: every call raises.

Metadata has three kinds of codes: of the answer, of a topic in it, of a partition. InitProducerId
is that of a producer without `transactional_id`. Under "All by code" are the words alone, for all
codes side by side; "refresh" says there which codes mean by themselves that the metadata is old.

{control}
## What an answer to a request of a transaction means

The coordinators' answers:

- **done**: the request did its work.
- **repeat**: it is sent again after `retry_backoff_ms`, until it is done. The call that waits for
  it does so for `max_block_ms` (`TransactionTimeout`); called again, it goes on waiting.
- **find**: the same, after asking who the coordinator is now. So it is without any answer.
- **abortable**: the calls within the transaction raise `TransactionAborted`, whose cause and `code`
  say why, until `abort_transaction()`. Then another one can begin. It is fatal where there is no
  transaction to be aborted: in `start()`, and as the answer to the `EndTxn` of an abort. So it is
  for the `EndTxn` of a commit that was asked for before, where the earlier answer was lost or was
  one that is repeated (but CONCURRENT_TRANSACTIONS): nobody knows whether it was committed. Of the
  `InitProducerId` that asks for the next epoch after a commit or an abort: that has its end, a
  commit raises nothing, and an abort says that it is done; no other transaction begins until
  `abort_transaction()`, called once more, has got the epoch. `async with producer.transaction()`
  calls it by itself. After a commit the calls raise `IllegalStateError` instead, and that abort
  what it was refused with: nothing may say that what is committed does not count.
- **bump**: abortable where the brokers give a new epoch (Kafka 2.5), else fatal; and fatal where
  *abortable* is.
- **fenced**: every later call raises `ProducerFenced`: there is another producer with this
  `transactional_id`, or a transaction was open for longer than `transaction_timeout_ms`.
- **fatal**: every later call raises this error. A commit that is done, and only got no epoch for
  the next transaction, raises nothing then either. `start()` can be tried again where it is the one
  that fails. Where it is an abort that fails, the error is a `KafkaError` with this one as cause,
  unless it says all there is to say (`ProducerFenced`, `AuthorizationError`).

{transactional}
## What a code in an answer about a group's offsets means

`committed_offsets()` asks for the group's coordinator, and then the coordinator. **repeat** and
**find** are as above. Whatever else is not done is raised by the call, and touches neither batch
nor transaction.

{groups}"""


_METRICS = """\
# Metrics

<!-- Generated: python -m asyncproducer.cli.docs -->

`producer.metrics()` returns all of them as a new dict, from name to number. It is cheap, never
waits, and can be called in every state of the producer. Nothing is counted per record, only per
batch, request and connection.

Names are those of Java's `producer-metrics` in snake_case. Behind a colon is a tag:
`record_send_total:topic=orders` is of one topic (Java: `producer-topic-metrics`),
`request_latency_avg:node=node-1` of one broker (`producer-node-metrics`; `node--1` is the first of
`bootstrap_servers`). A topic is there from its first batch on, a broker from its first connection.
Java's tag `client-id` is `producer.client_id` here.

- `_total` counts from the start of the producer, and never goes back.
- `_rate` is per second, `_avg` and `_max` are of one value, all three over the last
  `metrics_num_samples` windows (2) of `metrics_sample_window_ms` (30 s).
- Times are in ms unless the name says ns. Sizes are in bytes.
- What has no value yet is 0, where Java has NaN.
- Java's `metrics()` is a live view. Here the dict is yours, and each call makes a new one.
- All of them are of Java's recording level INFO; Java's producer has no others.
  `metrics_recording_level` takes nothing else: DEBUG and TRACE are refused with ConfigError.

{table}
Java has some more, which are left out:

{left_out}"""


_OPTIONS = """\
# Options

<!-- Generated: python -m asyncproducer.cli.docs -->

Options are Java's, in snake_case: `Producer("localhost:9092", linger_ms=20)`. The defaults are
those of Kafka 4 unless the text says otherwise. An option that is unknown, out of range, not
supported or in contradiction to another one raises `ConfigError`; nothing is ignored silently.

There are three other ways to give options:

- `ProducerConfig.from_mapping(mapping)` takes Java's dotted names, or librdkafka's (see below).
  Values may be text: `"true"`, `"20"`. An option set under two names is an error. A dump of all of
  Java's options loads: what has Java's default asks for nothing, where we do not have it. Where
  that default would switch on a feature, the log says that there is none.
- `ProducerConfig.from_env(prefix="KAFKA_")` takes `KAFKA_LINGER_MS` for `linger_ms` and so on.
  Variables that are no option are ignored, since `KAFKA_HOME`, `KAFKA_OPTS` and others belong to
  other software, except those within one or two typing errors of an option, and the names below
  that are not supported yet: they are errors. Beside a broker, whose containers use such names
  too, choose another prefix.
- `ProducerConfig(...)` itself, with the same checks.

An error names the options as they were given: `linger_ms`, `linger.ms` or `KAFKA_LINGER_MS`. For
type checkers and editors, `asyncproducer.config.Options` is a TypedDict of all options.

`config.replace(...)` changes options, `config.explain()` shows what is in effect.
"""


_OPTIONS_MODULE = '''\
"""The options as keyword arguments, for type checkers and editors.

Generated from the table in config.py: python -m asyncproducer.cli.docs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ssl import SSLContext

    from asyncproducer.config import PartitionerOption, TokenProvider
else:
    SSLContext = PartitionerOption = TokenProvider = Any

__all__ = ["Options"]


class Options(TypedDict, total=False):
    """Every option, and what may be passed for it. See docs/options.md.

    `options: Options = {{"linger_ms": 20}}`, then `Producer("localhost:9092", **options)`.
    """

{fields}'''


def options_module() -> str:
    """The text of asyncproducer/options.py."""
    fields = [_field(name, option, option.doc) for name, option in OPTIONS.items()]
    fields += [_field(a, OPTIONS[n], f"Another name of `{n}`.") for a, n in NAMES.aliases.items()]
    return _OPTIONS_MODULE.format(fields="\n".join(fields))


def _field(name: str, option: Option, doc: str) -> str:
    """A key of the TypedDict, with the text that editors show."""
    lines = textwrap.wrap(f'"""{doc}', 96)
    closing = '"""' if len(lines) == 1 and len(lines[0]) <= 93 else '\n"""'
    text = textwrap.indent("\n".join(lines) + closing, "    ")
    return f"    {name}: {option.kind.annotation}\n{text}\n"


def options_page() -> str:
    """The text of docs/options.md: all options and names."""
    core = [o for o in OPTIONS.values() if not _is_security(o)]
    security = [o for o in OPTIONS.values() if _is_security(o)]
    head = ("option", "Java", "type", "default", "valid", "meaning")
    parts = [
        _OPTIONS,
        "## Sending\n",
        markdown_table(head, map(_option_row, core)),
        "## Security\n",
        markdown_table(head, map(_option_row, security)),
        "## Other names\n",
        "Aliases among the options:\n",
        markdown_table(
            ("alias", "option"),
            ((f"`{alias}`", f"`{name}`") for alias, name in NAMES.aliases.items()),
        ),
        "librdkafka's names in `from_mapping`, where they differ from Java's:\n",
        markdown_table(
            ("librdkafka", "option", "value"),
            ((f"`{name}`", f"`{f.option}`", f.note) for name, f in LIBRDKAFKA.items()),
        ),
        "## Not supported\n",
        "These names of other clients are refused with a hint. Java's default is accepted and "
        "dropped.\n",
        markdown_table(("name", "why"), ((f"`{n}`", _cell(r.hint)) for n, r in _all_refused())),
    ]
    return "\n".join(parts)


def _all_refused() -> Iterator[tuple[str, Refused]]:
    yield from REFUSED.items()
    yield from ((f"{start}*", refused) for start, refused in REFUSED_FAMILIES.items())


def _is_security(option: Option) -> bool:
    return option.name.startswith(("security_", "sasl_", "ssl_"))


def _option_row(option: Option) -> tuple[str, ...]:
    doc = option.doc
    if option.later:
        doc += f" Not supported yet: {option.later}; only the default is accepted."
    return (
        f"`{option.name}`",
        f"`{option.java}`" if option.java else "",
        option.kind.type_name,
        "required" if option.required else f"`{option.default!r}`",
        _cell(option.kind.range),
        _cell(doc),
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    left_out = "".join(f"- {names}: {why}\n" for names, why in LEFT_OUT.items())
    return _METRICS.format(table=metrics_table(), left_out=left_out)


def errors_page() -> str:
    """The text of docs/errors.md."""
    return _ERRORS.format(
        tree=f"```text\n{exception_tree()}```\n",
        table=produce_table(),
        control=control_part(),
        transactional=transactional_part(),
        groups=group_part(),
    )


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
        "transaction": state_table(transactions.TRANSITIONS),
    }
    for name, table in tables.items():
        start, end = f"<!-- states: {name} -->\n", "<!-- end -->"
        pattern = re.escape(start) + r".*?" + re.escape(end)
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"the page has no table of the states of: {name}")
        text = re.sub(pattern, lambda _: start + table + end, text, flags=re.DOTALL)  # noqa: B023
    return text


def write(directory: Path) -> None:
    """Bring the pages in `directory` up to date, and the options.py of the checkout around it."""
    design = directory / "design.md"
    pages = {
        directory / "options.md": options_page(),
        directory / "errors.md": errors_page(),
        directory / "metrics.md": metrics_page(),
        design: design_page(design.read_text(encoding="utf-8")),
    }
    module = directory.parent / "asyncproducer" / "options.py"
    if module.exists():
        pages[module] = options_module()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages; SystemExit with a message where there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncproducer.cli.docs",
        description="Brings the parts of docs/ that are made from the code up to date.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path("docs"),
        metavar="DIRECTORY",
        help="where options.md, errors.md, metrics.md and design.md are; default: %(default)s",
    )
    directory: Path = parser.parse_args(arguments).directory
    if not (directory / "design.md").is_file():
        parser.error(f"there is no design.md in {directory}: is this the root of a checkout?")
    write(directory)


if __name__ == "__main__":
    main()
