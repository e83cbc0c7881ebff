"""The command. See the package, and `--help`."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Total


def _measured() -> Callable[[], None] | None:
    """Measures coverage from now on, if that is asked for. The result ends it.

    Modules that are loaded before are not seen.
    """
    if "--coverage-file" not in sys.argv:
        return None
    import coverage

    file = sys.argv[sys.argv.index("--coverage-file") + 1]
    measured = coverage.Coverage(
        data_file=file, config_file=False, branch=True, source_pkgs=["asyncproducer"]
    )
    measured.start()

    def end() -> None:
        measured.stop()
        measured.save()

    return end


def main(end_measuring: Callable[[], None] | None = None) -> int:
    """1 if there were findings."""
    from . import runner
    from .report import Total
    from .targets import TARGETS

    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Hostile bytes for everything that reads what a peer sends. Findings are"
        f" kept in {runner.CORPUS.relative_to(runner.ROOT)}, where the tests run them.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="in all; default: %(default)g")
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="of each target, at most")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--seed", help="the same inputs again; default: another one each time")
    parser.add_argument("--no-coverage", action="store_true", help="do not measure it")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="add what this run does to a JSON file, and print all that is in it: a long run may"
        " come in pieces, one after the other",
    )
    parser.add_argument("--replay", action="store_true", help="run the kept inputs, nothing else")
    for internal in ("--worker", "--current", "--coverage-file"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    for internal in ("--first", "--measured-inputs"):
        parser.add_argument(internal, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measured-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(options, end_measuring)
    if options.replay:
        return _replay(options.target)
    try:
        total = Total(options.report)
    except (OSError, ValueError) as error:
        parser.error(f"--report: {error}")
    for name, fed in total.targets.items():
        if options.seed in fed.seeds and name in (options.target or TARGETS):
            parser.error(f"--report: {name} was fed the inputs of seed {options.seed} already")
    return _fuzz(options, total)


def _work(options: argparse.Namespace, end_measuring: Callable[[], None] | None) -> int:
    from . import runner
    from .targets import TARGETS

    measured = None
    if end_measuring is not None:
        measured = runner.Measured(options.measured_seconds, options.measured_inputs, end_measuring)
    runner.work(
        TARGETS[options.worker],
        options.seed,
        options.first,
        options.seconds,
        options.inputs,
        Path(options.current),
        measured,
    )
    return 0


def _fuzz(options: argparse.Namespace, total: Total) -> int:
    from . import runner
    from .report import Fed
    from .targets import TARGETS

    seed = options.seed or secrets.token_hex(4)
    names = options.target or list(TARGETS)
    out = sys.stdout.write
    out(f"seed {seed}\n")
    found = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            coverage = None if options.no_coverage else Path(directory) / f".coverage.{name}"
            report = runner.fuzz(
                name,
                seed,
                seconds=options.seconds / len(names),
                inputs=options.inputs,
                coverage=coverage,
            )
            out(Fed(report.inputs, report.seconds, len(report.findings)).line(name) + "\n")
            for finding in report.findings:
                out(f"  {finding.kind}: {finding.save()}\n{finding.text}\n")
            found += len(report.findings)
            total.add(report, seed, coverage)
            sys.stdout.flush()
    total.close()
    if options.report:
        out(f"all that is in {options.report}:\n")
        out("".join(f"{line}\n" for line in total.fed_lines()))
    out("".join(f"{line}\n" for line in total.reached_lines()))
    return min(found, 1)


def _replay(names: list[str] | None) -> int:
    from . import runner

    failed = 0
    for name, path in runner.corpus():
        if names and name not in names:
            continue
        try:
            runner.replay(name, path)
        except Exception as exc:
            failed += 1
            sys.stdout.write(f"{path}: {exc!r}\n")
    sys.stdout.write(f"{failed} of the kept inputs fail\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(_measured()))
