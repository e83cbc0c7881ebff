"""`asyncproducer bench`: this producer beside others, on real Kafka. See asyncproducer.bench."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncproducer.bench.micro import OPERATIONS
from asyncproducer.bench.peers import PEERS
from asyncproducer.bench.workloads import BASE_RECORDS, WORKLOADS, headline
from asyncproducer.cli.arguments import addresses, positive

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from asyncproducer.bench.peers import Result
    from asyncproducer.bench.running import Plan

__all__ = ["add_parser", "run"]

_MISSING = (
    'this benchmark needs packages that are not installed ({}): pip install "asyncproducer[bench]"'
)

_BASELINE = Path("benchmarks", "results", "instructions.json")


def add_parser(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure this producer beside others, on real Kafka",
        description="Measures acknowledged records per second, CPU, memory and latencies of this "
        "producer and of others on one real Kafka, which is started for it. Each measurement is a "
        "fresh process with a fresh topic, the order rotates, and the end offsets are checked. "
        "Without arguments: 100-byte records, flat out, 6 partitions, all peers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="workloads:\n"
        + "".join(f"  {w.id:<4} {w.title}\n" for w in WORKLOADS.values())
        + "  W16  is `--instructions`\n"
        + "\nExit status: 0 if all was measured, 1 if something failed or needs more instructions, "
        "2 for wrong\narguments or missing packages, 130 when interrupted.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="W", help="see below")
    what.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only cases whose names begin with one of these"
    )
    what.add_argument(
        "--peers", nargs="+", choices=PEERS, metavar="PEER", help=f"of {', '.join(PEERS)}"
    )
    what.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    what.add_argument(
        "--records",
        type=positive,
        default=BASE_RECORDS,
        help="of W1, the other cases in proportion; default: %(default)s",
    )
    what.add_argument("--size", type=positive, help="bytes of a value, instead of each case's own")
    what.add_argument(
        "--quick", action="store_true", help="one round of few records: does it work at all?"
    )
    what.add_argument(
        "--bootstrap-servers",
        type=addresses,
        metavar="HOST:PORT,...",
        help="a cluster that runs, instead of one that is started",
    )
    out = parser.add_argument_group("what comes of it")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    out.add_argument("--svg", type=Path, metavar="DIRECTORY", help="draw plots there")
    out.add_argument(
        "--page", type=Path, metavar="FILE", help="put tables and plots into this Markdown file"
    )
    out.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: use what --json has written before",
    )
    micro = parser.add_argument_group("instructions instead of time (W16)")
    micro.add_argument(
        "--instructions",
        action="store_true",
        help="count instructions per operation with valgrind, and compare them with the baseline",
    )
    micro.add_argument("--update", action="store_true", help="write the baseline")
    micro.add_argument(
        "--baseline", type=Path, default=_BASELINE, metavar="FILE", help="default: %(default)s"
    )
    micro.add_argument(
        "--profile", choices=OPERATIONS, help="instructions of one operation by function instead"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure; 0 if nothing went wrong."""
    from asyncproducer.testing.kafka import KafkaUnavailable

    try:
        _refuse_before(options)
        if options.instructions or options.update or options.profile:
            return _instructions(options)
        documents, failed = _documents(options)
        return _publish(options, documents) or int(failed)
    except ImportError as error:
        print(_MISSING.format(error), file=sys.stderr)
        return 2
    except _WrongArguments as error:
        print(f"asyncproducer bench: error: {error}", file=sys.stderr)
        return 2
    except (KafkaUnavailable, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class _WrongArguments(ValueError):
    """Arguments that argparse could not know to be wrong."""


def _refuse_before(options: argparse.Namespace) -> None:
    """What would fail after hours of measuring fails now. Raises _WrongArguments, ImportError."""
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise _WrongArguments(f"--json {options.json}: there is no directory {options.json.parent}")
    if options.svg is not None:
        from asyncproducer.bench import plots  # noqa: F401  # or it says what is missing
    if options.page is not None:
        from asyncproducer.bench import report

        report.page(options.page.read_text(encoding="utf-8"), (), ())
        home = options.page.resolve().parent
        if options.svg is not None and not options.svg.resolve().is_relative_to(home):
            raise _WrongArguments(
                f"--svg {options.svg}: a page shows plots that lie beside it or below, in {home}"
            )


# -- measuring -------------------------------------------------------------------------------


def _documents(options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """What was measured, now or before, and whether something failed."""
    if options.results:
        return [_read(path) for path in options.results], False
    from asyncproducer.bench import floor, running

    plan = _plan(options)
    planned = running.measurements(plan)
    if not planned:
        raise ValueError("none of these peers can do any of these cases: there is nothing to do")
    if missing := running.missing(dict.fromkeys(m.peer for m in planned)):
        raise ImportError(", ".join(f"{peer} needs {name}" for peer, name in missing.items()))
    results: list[Result] = []
    facts = running.facts(plan)
    if any(measurement.case.ticker for measurement in planned):
        facts |= floor.measured()
    document = {"command": _command(), "facts": facts, "results": results}
    with _ended_by_sigterm(), _terminal() as (console, progress):
        task = progress.add_task("measuring", total=len(planned))
        for result in running.run(plan):
            results.append(result)
            progress.update(task, advance=1, description=f"{result['workload']} {result['case']}")
            console.print(_line(result), markup=False, highlight=False)
            if options.json is not None:
                # Each time: a run takes long, and what is measured must not be lost.
                _write(options.json, document, last=len(results) == len(planned))
    return [document], any("error" in result for result in results)


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not document.keys() >= {"command", "facts", "results"}:
        raise _WrongArguments(f"--results {path}: this is not what --json has written")
    return document


def _write(path: Path, document: Mapping[str, Any], *, last: bool) -> None:
    """All or nothing: what is there stays whole, should the disk be full or somebody interrupt."""
    text = json.dumps(document, indent=1) + "\n"
    if path.exists() and not path.is_file():
        if last:
            path.write_text(text, encoding="utf-8")  # a pipe: who reads it reads one document
        return
    path = path.resolve()
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Meanwhile SIGTERM is an interrupt: brokers and workers are not to stay behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _plan(options: argparse.Namespace) -> Plan:
    from asyncproducer.bench.running import Plan

    workloads = [WORKLOADS[name] for name in options.workloads or ()] or [headline()]
    if options.cases:
        names = [c.name for w in workloads for c in w.cases]
        for text in options.cases:
            if not any(name.startswith(text) for name in names):
                known = ", ".join(map(repr, names))
                raise _WrongArguments(f"--cases: no case's name begins with {text!r}, of {known}")
        prefixes = tuple(options.cases)
        workloads = [
            dataclasses.replace(w, cases=tuple(c for c in w.cases if c.name.startswith(prefixes)))
            for w in workloads
        ]
    return Plan(
        workloads=tuple(workloads),
        peers=None if options.peers is None else tuple(options.peers),
        rounds=1 if options.quick else options.rounds,
        records=min(options.records, BASE_RECORDS // 100) if options.quick else options.records,
        size=options.size,
        quick=options.quick,
        bootstrap_servers=options.bootstrap_servers,
    )


def _command() -> str:
    return shlex.join(["asyncproducer", *sys.argv[1:]])


@contextmanager
def _terminal() -> Iterator[tuple[Console, Progress]]:
    """Where lines go, and a bar that is only there where somebody looks at it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield console, progress


def _line(result: Result) -> str:
    from asyncproducer.bench.report import METRICS

    start = f"{result['workload']} round {result['round']} {result['case']}, {result['peer']}: "
    if "error" in result or "skipped" in result:
        return start + str(result.get("error") or result["skipped"])
    numbers = (
        f"{metric.format.format(result[name])} {metric.title}"
        for name, metric in METRICS.items()
        if name in result
    )
    return start + ", ".join(numbers)


# -- telling ---------------------------------------------------------------------------------


def _publish(options: argparse.Namespace, documents: list[dict[str, Any]]) -> int:
    from asyncproducer.bench import report

    drawn: list[Path] = []
    if options.svg is not None:
        from asyncproducer.bench.plots import draw

        options.svg.mkdir(parents=True, exist_ok=True)
        drawn = [path for document in documents for path in draw(document, options.svg)]
    if options.page is not None:
        home = options.page.resolve().parent
        # Of a workload that is in several files, the last one is drawn.
        paths = dict.fromkeys(path.resolve() for path in drawn)
        plots = [path.relative_to(home).as_posix() for path in paths]
        text = report.page(options.page.read_text(encoding="utf-8"), documents, plots)
        options.page.write_text(text, encoding="utf-8")
    elif not options.svg or not options.results:
        for document in documents:
            print(report.section(document))
    return 0


def _instructions(options: argparse.Namespace) -> int:
    from asyncproducer.bench import instructions

    try:
        if options.profile:
            return _profile(instructions.profile(options.profile))
        counted = instructions.count()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    key = instructions.baseline_key()
    for name, number in counted.items():
        print(f"{name:<10} {number:>10,.1f} instructions")
    if options.update:
        instructions.update(options.baseline, counted)
        print(f"{options.baseline} has them now as the baseline of {key}")
        return 0
    known = instructions.read(options.baseline)
    if key not in known:
        print(
            f"{options.baseline} has no baseline of {key}, only of {', '.join(known) or 'nothing'}:"
            " write it with --update",
            file=sys.stderr,
        )
        return 1
    for name in counted.keys() - known[key].keys():
        print(f"{name} has no baseline of {key} yet: write it with --update")
    problems = instructions.compare(counted, known[key])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _profile(by_function: Mapping[str, float]) -> int:
    total = sum(by_function.values())
    print(f"{total:,.0f} instructions, by function as far as it has one in a hundred of them:")
    for function, count in sorted(by_function.items(), key=lambda item: -item[1]):
        if count >= total / 100:
            print(f"{count:>9,.1f}  {count / total:>5.1%}  {function}")
    return 0
