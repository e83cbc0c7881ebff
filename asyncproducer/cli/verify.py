"""`asyncproducer verify`: does this cluster keep what this producer says of it?

Numbered records go into the cluster, through a proxy in which things go wrong if that is wanted
(`--faults`), and a consumer that is not ours (aiokafka) reads the log back. Then each record is
compared with what the producer said of it: lost, doubled, out of order, in another place, or in
the log although an error said that it is not. What the broker has removed by the topic's rules
before it could be read, and what could not be read at all, is counted by itself: nobody can say of
it that it was lost, or kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncproducer
from asyncproducer.cli.arguments import addresses, positive, within
from asyncproducer.cli.clusters import (
    IDLE_MS,
    Unreachable,
    cleanup_policy,
    cluster,
    create_topic,
    delete_topic,
    ends,
    quiet,
    read,
    security,
    told,
)
from asyncproducer.config import ProducerConfig
from asyncproducer.errors import AuthorizationError, BufferFull, ConfigError, KafkaError
from asyncproducer.producer import Producer
from asyncproducer.testing.ledger import Ledger, Verdict, percentile
from asyncproducer.testing.proxy import FaultPlan, FaultProxy

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Result", "add_parser", "run"]

#: Where neither --records nor --seconds is given.
RECORDS = 100_000

#: How long a cluster may take to answer at all.
PATIENCE_MS = 10_000

#: The shortest sleep of a paced sender, in seconds: what is due by then is sent at once.
TICK = 0.005

_MISSING = (
    "verify needs rich and aiokafka, which are not installed ({}): "
    'pip install "asyncproducer[verify]"'
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "verify",
        help="send numbered records to a cluster, and prove what became of each one",
        description="Sends numbered records to a cluster, reads them back with another client, and"
        " compares each one with what the producer said of it. With --faults they go through a"
        " proxy that cuts, truncates, delays, throttles, refuses and swallows by plan.",
        epilog="Exit status: 0 if every record was acknowledged and is in the log once, in order,"
        " where it was told to be; 1 if not; 2 for wrong arguments or missing packages; 3 if"
        " nothing is wrong as far as can be seen, and the broker has removed records (retention,"
        " DeleteRecords, compaction) before they were read, or they could not be read; 130 when"
        " interrupted.",
    )
    where = parser.add_argument_group("where").add_mutually_exclusive_group()
    where.add_argument(
        "--bootstrap-servers", type=addresses, metavar="HOST:PORT,...", help="any Kafka cluster"
    )
    where.add_argument(
        "--kafka", action="store_true", help="a local Apache Kafka (Docker, or a JVM from pip)"
    )
    where.add_argument(
        "--embedded", action="store_true", help="a broker that is embedded for this, to try it out"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the producer, by Java's or librdkafka's name; more than once, too",
    )
    how.add_argument(
        "--config",
        type=_properties,
        default={},
        metavar="FILE",
        help="a properties file with such options (passwords belong there)",
    )
    how.add_argument(
        "--faults",
        metavar="PLAN",
        help='"mixed" (every kind, for half a minute or longer), or a JSON file: {"seed": 7, '
        '"faults": [{"kind": "cut_after", "chance": 0.01, "times": 5}]}',
    )
    how.add_argument("--seed", type=within(0), help="of the plan, instead of its own")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--topic", help="created if it is not there; default: a new one, deleted in the end"
    )
    what.add_argument(
        "--keep-topic", action="store_true", help="do not delete the topic that was created"
    )
    what.add_argument(
        "--partitions", type=positive, default=6, help="of a new topic; default: %(default)s"
    )
    what.add_argument(
        "--records", type=positive, help=f"default: {RECORDS:,}, or what --seconds allow"
    )
    what.add_argument("--seconds", type=positive, help="send for at most so long")
    what.add_argument("--rate", type=positive, help="records per second; default: no limit")
    what.add_argument("--size", type=positive, default=200, help="bytes; default: %(default)s")
    what.add_argument(
        "--keys", type=within(0), default=1000, help="how many; 0: none; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, no more")
    parser.set_defaults(run=run)


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip().replace("_", "."), value.strip()


def _properties(path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return dict(
            _option(line)
            for line in map(str.strip, lines)
            if line and not line.startswith(("#", "!"))
        )
    except (OSError, UnicodeDecodeError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def run(options: argparse.Namespace) -> int:
    """Verify; 0 if every record was acknowledged, and is where it should be, once. See `--help`."""
    try:
        from rich.console import Console
    except ImportError as error:
        print(_MISSING.format(error), file=sys.stderr)
        return 2
    # With --json, the standard output is for a program.
    console = Console(stderr=options.json, soft_wrap=True)

    def problem(text: str) -> None:
        console.print(text, style="red", markup=False, highlight=False)

    quiet("aiokafka")
    try:
        plan = _plan(options)
        if plan is not None:
            quiet("asyncproducer")  # it would tell of each fault
        mapping = {**options.config, **dict(options.option)}
        servers = mapping.pop("bootstrap.servers", None)
        if not (options.bootstrap_servers or options.kafka or options.embedded):
            if servers is None:
                raise ConfigError(
                    "verify which cluster? Give --bootstrap-servers, --kafka or --embedded"
                )
            options.bootstrap_servers = servers
        # Before anything is started.
        _config(mapping, "localhost:9092", plan)
        result = asyncio.run(_verify(options, mapping, plan, console))
    except Unreachable as error:
        problem(str(error))
        return 1
    except (ConfigError, ValueError) as error:
        problem(str(error))
        return 2
    except ImportError as error:
        problem(_MISSING.format(error))
        return 2
    except AuthorizationError as error:
        problem(f"{told(error)}. To send takes WRITE and DESCRIBE on the topic, to check READ.")
        return 1
    except (KafkaError, OSError, RuntimeError) as error:
        # A RuntimeError is what aiokafka's errors are, and KafkaUnavailable.
        problem(told(error))
        return 1
    except KeyboardInterrupt:
        problem("interrupted")
        return 130
    if options.json:
        print(json.dumps(result.document(), indent=1))
    else:
        _print(console, result)
    return result.status


def _plan(options: argparse.Namespace) -> FaultPlan | None:
    if options.faults is None:
        return None
    if options.faults == "mixed":
        return FaultPlan.mixed(options.seed or 0)
    try:
        plan = FaultPlan.from_json(Path(options.faults).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--faults {options.faults}: {error}") from None
    return plan if options.seed is None else FaultPlan(plan.faults, options.seed)


def _config(mapping: dict[str, str], servers: str, plan: FaultPlan | None) -> ProducerConfig:
    config = ProducerConfig.from_mapping({**mapping, "bootstrap.servers": servers})
    if plan is not None and config.uses_tls:
        raise ConfigError(
            f"--faults goes through a proxy that reads what is sent, so security.protocol="
            f"{config.security_protocol} is not possible: use a listener without TLS"
        )
    if config.transactional_id is not None:
        raise ConfigError(
            f"transactional.id={config.transactional_id}: verify sends without transactions, and "
            "would fence the producer that has this id: leave it out"
        )
    return config


# -- the run ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What a run has shown."""

    topic: str
    servers: str
    verdict: Verdict
    seconds: float
    latencies: list[float]
    metrics: dict[str, float]
    errors: dict[str, str]
    config: ProducerConfig
    #: The topic's cleanup.policy, None if the cluster does not tell.
    cleanup_policy: str | None = None
    #: Where the logs start now from which something was removed before it was read, by partition.
    log_starts: dict[int, int] = dataclasses.field(default_factory=dict)
    #: The first offset that could not be read, by partition, where there is one.
    unread_from: dict[int, int] = dataclasses.field(default_factory=dict)
    #: What makes the records of a key go to several partitions, if something does.
    moved_by: str | None = None
    #: What went wrong in the proxy, if there was one.
    faults: dict[str, int] | None = None
    replay: FaultPlan | None = None

    @property
    def good(self) -> bool:
        """Nothing went wrong, nothing failed either, and all of it could be judged."""
        return self.status == 0

    @property
    def judged(self) -> bool:
        """All of it could be judged. What could not be read may hold what must not be."""
        return not self.verdict.unjudged and not self.unread_from

    @property
    def status(self) -> int:
        """The exit status; 3 if only what cannot be judged keeps it from being good."""
        verdict = self.verdict
        if not verdict.clean or verdict.acknowledged < verdict.sent:
            return 1
        return 0 if self.judged else 3

    @property
    def retries(self) -> int:
        """Records that were sent again."""
        return int(self.metrics.get("record_retry_total", 0))

    def latency_ms(self) -> dict[str, float]:
        """From the call to the acknowledgement, the wait for room included."""
        shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
        return {
            name: round(percentile(self.latencies, share) * 1e3, 3)
            for name, share in shares.items()
        }

    def document(self) -> dict[str, Any]:
        """All of it for a program."""
        verdict = self.verdict
        return {
            "good": self.good,
            "clean": verdict.clean,
            "judged": self.judged,
            "topic": self.topic,
            "cleanup_policy": self.cleanup_policy,
            "bootstrap_servers": self.servers,
            "version": asyncproducer.__version__,
            "implementation": asyncproducer.IMPLEMENTATION,
            "options": {name: _plain(getattr(self.config, name)) for name in self._shown()},
            "records": {
                **dataclasses.asdict(verdict),
                "failed": verdict.failed,
                "unexplained": verdict.unexplained,
            },
            "log_starts": self.log_starts,
            "unread_from": self.unread_from,
            "seconds": round(self.seconds, 3),
            "records_per_second": round(verdict.acknowledged / max(self.seconds, 1e-9)),
            "latency_ms": self.latency_ms(),
            "retries": self.retries,
            "errors": self.errors,
            "faults": None
            if self.replay is None
            else {"injected": self.faults, "replay": json.loads(self.replay.to_json())},
        }

    def _shown(self) -> list[str]:
        """Options that were given, without secrets and objects."""
        return sorted(
            name
            for name in self.config.explicit
            if name != "bootstrap_servers" and not name.startswith(("ssl_", "sasl_"))
        )


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


async def _verify(
    options: argparse.Namespace,
    mapping: dict[str, str],
    plan: FaultPlan | None,
    console: Console,
) -> Result:
    topic = options.topic or f"asyncproducer-verify-{int(time.time())}"
    with cluster(options, console) as (servers, what):
        config = _config(mapping, servers, plan)
        # First, since nobody tells better why a cluster cannot be used.
        async with Producer[bytes, bytes](
            config=config.replace(max_block_ms=min(config.max_block_ms, PATIENCE_MS))
        ):
            pass
        arguments = security(config)
        created = await create_topic(servers, topic, options.partitions, arguments)
        try:
            policy = await cleanup_policy(servers, topic, arguments)
            if _compacts(policy):
                console.print(
                    f"the topic {topic} is compacted (cleanup.policy={policy}): of each key only"
                    " the last record stays for certain. What is removed before it is read cannot"
                    " be judged",
                    style="yellow",
                    highlight=False,
                )
            async with _proxy(servers, plan) as proxy:
                near = servers if proxy is None else proxy.bootstrap_servers
                config = _config(mapping, near, plan)
                if not options.json:
                    console.print(f"{what} at {servers}, topic {topic}", highlight=False)
                with console.status("sending ...") as status:
                    result = await _run(options, config, servers, topic, arguments, policy, status)
                if proxy is not None:
                    result.faults, result.replay = proxy.counts, proxy.replay()
                return result
        finally:
            if created and not options.topic and not options.keep_topic:
                refused = await delete_topic(servers, topic, arguments)
                if refused:
                    console.print(f"the topic {topic} could not be deleted: {refused}")


def _compacts(policy: str | None) -> bool:
    return policy is not None and "compact" in policy


@contextlib.asynccontextmanager
async def _proxy(servers: str, plan: FaultPlan | None) -> AsyncIterator[FaultProxy | None]:
    if plan is None:
        yield None
        return
    async with FaultProxy(servers, plan) as proxy:
        yield proxy


async def _run(
    options: argparse.Namespace,
    config: ProducerConfig,
    servers: str,
    topic: str,
    arguments: dict[str, Any],
    policy: str | None,
    status: Any,
) -> Result:
    ledger = Ledger(keys=options.keys, size=options.size, compacted=_compacts(policy))
    loop = asyncio.get_running_loop()
    async with Producer[bytes, bytes](config=config) as producer:
        partitions = [info.partition for info in await producer.partitions_for(topic)]
        starts = await ends(servers, topic, partitions, arguments)
        await producer.warm_up(topic)
        began = loop.time()
        await _send(producer, topic, ledger, options, status)
        status.update("waiting for the last acknowledgements ...")
        await producer.flush()
        seconds = loop.time() - began
        await producer.close()
        metrics = producer.metrics()
    async for record in read(
        servers, topic, starts, arguments, removed=ledger.removed, unread=ledger.unread
    ):
        ledger.read(*record)
        if record.offset % 5000 == 0:
            status.update(f"reading back: partition {record.partition}, offset {record.offset:,}")
    verdict, moved_by = ledger.verdict(), None
    if verdict.split_keys:
        moved_by = _scatters(config)
        if moved_by is None:
            present = await ends(servers, topic, partitions, arguments)
            if len(present) > len(partitions):
                moved_by = "partitions were added to the topic"
    if moved_by is not None:
        verdict = dataclasses.replace(verdict, split_keys=0, moved_keys=verdict.split_keys)
    return Result(
        topic=topic,
        servers=servers,
        verdict=verdict,
        seconds=seconds,
        latencies=list(ledger.latencies),
        metrics=metrics,
        errors=ledger.errors,
        config=config,
        cleanup_policy=policy,
        log_starts=ledger.log_starts,
        unread_from=ledger.unread_from,
        moved_by=moved_by,
    )


def _scatters(config: ProducerConfig) -> str | None:
    """The option with which a key does not tell the partition, if there is one."""
    if config.partitioner == "round_robin":
        return "partitioner.class=round_robin"
    if config.partitioner_ignore_keys and config.partitioner != "murmur3":
        return "partitioner.ignore.keys=true"
    return None


async def _send(
    producer: Producer[bytes, bytes],
    topic: str,
    ledger: Ledger,
    options: argparse.Namespace,
    status: Any,
) -> None:
    """Ends with the records, with the time, or with the first record that is not taken."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    records = options.records or (sys.maxsize if options.seconds else RECORDS)
    while len(ledger) < records:
        now = due = loop.time()
        if options.seconds and now >= began + options.seconds:
            break
        if options.rate:
            # Who is late has waited already: else a slow cluster would be asked less.
            due = began + len(ledger) / options.rate
            if due - now > TICK:
                await asyncio.sleep(due - now)
                now = loop.time()
        key, value = ledger.next_record()
        try:
            delivery = await producer.enqueue(topic, value, key=key)
        except KafkaError as error:
            ledger.refuse(error)
            if not isinstance(error, BufferFull):  # which passes
                break
        else:
            ledger.track(delivery, min(now, due))
        if len(ledger) % 2000 == 0:
            status.update(f"sending: {len(ledger):,}, of which {ledger.open:,} are under way")


# -- the screen ------------------------------------------------------------------------------


def _print(console: Console, result: Result) -> None:
    from rich.table import Table

    verdict, latency = result.verdict, result.latency_ms()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    add = table.add_row
    rate = verdict.acknowledged / max(result.seconds, 1e-9)
    add("records", f"{verdict.sent:,} in {result.seconds:.2f} s, {rate:,.0f} records/s")
    add(
        "acknowledged",
        f"{verdict.acknowledged:,}, failed {verdict.failed:,}, refused {verdict.refused:,}",
    )
    if verdict.failed:
        add(
            "failed",
            f"{verdict.failed_no:,} certainly not in the log, {verdict.failed_maybe:,} maybe (and"
            f" {verdict.maybe_in_log:,} of them are), {verdict.failed_yes:,} in the log all the"
            " same",
        )
    for name, text in result.errors.items():
        add("", f"{name}: {text}")
    add("retries", f"{result.retries:,} records were sent again")
    add(
        "call to ack",
        "  ".join(f"{name} {value:,.1f} ms" for name, value in latency.items())
        + ", the wait for room included",
    )
    if result.faults is not None:
        add("faults", "  ".join(f"{k}: {n}" for k, n in result.faults.items()) or "none")
    if verdict.foreign:
        add("others", f"{verdict.foreign:,} records in the topic are not of this run")
    console.print(table, highlight=False)
    wrong = {
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "out of order": verdict.reordered,
        "on a second partition": verdict.split_keys,
        "not where the acknowledgement said": verdict.misplaced,
        "in the log although said not to be": verdict.denied,
        "not in the log although said to be": verdict.claimed,
        "altered": verdict.altered,
        "without an end": verdict.unresolved,
    }
    if not verdict.clean:
        counts = ", ".join(f"{number:,} {name}" for name, number in wrong.items() if number)
        console.print(f"✗ read back: {counts}", style="red", highlight=False)
    elif not result.judged:
        console.print(
            f"? read back: {verdict.in_log:,} records, each once, in order, and where it was told"
            f" to be; {verdict.unjudged:,} others cannot be judged",
            style="yellow",
            highlight=False,
        )
    else:
        console.print(
            f"✓ read back: {verdict.in_log:,} records, all that were acknowledged, each once, in"
            " order, and where it was told to be",
            style="green",
            highlight=False,
        )
    for line in (*_unjudged(result), *_promises(result)):
        console.print(line, highlight=False)


def _unjudged(result: Result) -> list[str]:
    """What was removed by the broker's own rules, or not read: no loss, and no success."""
    verdict = result.verdict
    lines = []
    if verdict.removed:
        starts = ", ".join(
            f"partition {partition}'s log starts at {start:,} now"
            for partition, start in sorted(result.log_starts.items())
        )
        lines.append(
            f"{verdict.removed:,} no longer in the log ({starts}: retention or DeleteRecords)"
        )
    if verdict.compacted:
        lines.append(
            f"{verdict.compacted:,} not in the log, with a later record of their key behind them"
            f" (cleanup.policy={result.cleanup_policy})"
        )
    if result.unread_from:
        places = ", ".join(
            f"partition {partition} from offset {offset:,} on"
            for partition, offset in sorted(result.unread_from.items())
        )
        lines.append(
            f"{verdict.unread:,} could not be read back ({places}: nothing came for"
            f" {IDLE_MS // 1000} s)"
        )
    return lines


def _promises(result: Result) -> list[str]:
    """What the options do not promise, where it happened."""
    config, verdict = result.config, result.verdict
    lines = []
    if verdict.lost and config.acks != -1:
        lines.append(
            f"acks={config.acks} acknowledges before the replicas have a record: acks=all does not"
            " lose one when a leader goes"
        )
    if (verdict.doubled or verdict.reordered) and not config.enable_idempotence:
        lines.append("without enable.idempotence, what is sent again may be doubled or reordered")
    if verdict.moved_keys:
        lines.append(
            f"{verdict.moved_keys:,} on a second partition, which is no fault: {result.moved_by}"
        )
    if verdict.clean and verdict.acknowledged < verdict.sent:
        lines.append(
            "✗ not every record was acknowledged; what the errors said of them is true, as far as"
            " the log shows"
        )
    return lines
