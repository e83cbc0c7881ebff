"""Instructions per operation, counted by valgrind: what a change costs, on any busy machine.

An operation is counted as the difference of two runs with different numbers of it: so whatever
Python and the imports execute falls out. Counts depend on the interpreter and the compiler,
hence a baseline for each: `asyncproducer bench --instructions --update` writes this one's.

They depend on how many classes were made before, too: CPython caches what attributes it has found
at places that follow from the number of the class, and two that meet at one place push each other
out each time (10 % of `decode`, once). Hence each is counted at several places, and the least is
what the code needs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncproducer import IMPLEMENTATION
from asyncproducer.bench.built import built

__all__ = [
    "TOLERANCE",
    "ValgrindMissing",
    "baseline_key",
    "by_function",
    "compare",
    "count",
    "least",
    "per_operation",
    "profile",
    "read",
    "update",
]

#: More instructions than this share above the baseline is a regression.
TOLERANCE = 0.05
#: With less than this share of the baseline an operation does not do its work any more, or a
#: regression up to the old baseline would not be seen.
LEAST = 0.5

#: How often each is run, and how much oftener in the run that is compared. enqueue stays below
#: the number from which it lets the event loop turn. It and those behind it need much else to be
#: imported, and end their process: they go in processes of their own.
_LOOPS: Sequence[Mapping[str, int]] = (
    {"append": 500, "varint": 500, "crc32c": 50, "murmur2": 500, "encode": 100, "decode": 100},
    {"enqueue": 300},
    {"enqueue_whole": 300},
    {"acknowledged": 300},
    {"send": 50},
    {"send_many": 1000},
    {"send_table": 1000},
    {"send_table_keys": 3000},
)
_FACTOR = 3

#: How many classes are made before the others, in one count and the next.
_PLACES = (0, 64, 128)
_PROGRAM = """\
import sys
for _ in range(int(sys.argv[1])):
    type("Unused", (), {"attribute": None}).attribute
from asyncproducer.bench import micro
micro.main(sys.argv[2])
"""

_COLLECTED = re.compile(r"Collected : (\d+)")
#: "1,234 (5.6%)  directory/file.c:function'2 [library]": '2 is a call in a call.
_FUNCTION = re.compile(
    r"^ *([\d,]+) \( *[\d.]+%\) +\S*:([^\s:]+?)(?:'\d+)?(?: \[.*)?$", re.MULTILINE
)


class ValgrindMissing(RuntimeError):
    """There is no valgrind on this machine."""


def baseline_key() -> str:
    """What counts can be compared: the same build, Python and machine."""
    python = f"{platform.python_implementation()}-{'.'.join(platform.python_version_tuple()[:2])}"
    return f"{python} {platform.machine()} {built()}"


def count() -> dict[str, float]:
    """Instructions by operation, the least of several places. Takes minutes.

    Raises ValgrindMissing.
    """
    valgrind = _valgrind()
    runs = [
        {**loops, **({} if more is None else {more: loops[more] * _FACTOR})}
        for loops in _LOOPS
        for more in (None, *loops)
    ]
    # Once without: what is not compiled to bytecode yet must not be counted.
    subprocess.run(_command(runs[0]), check=True)
    subprocess.run(_command(runs[-1]), check=True)
    tool = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null"]

    def total(place: int, loops: Mapping[str, int]) -> int:
        return _collected([*tool, *_command(loops, place)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        totals = [pool.map(partial(total, place), runs) for place in _PLACES]
        return least([per_operation(runs, list(found)) for found in totals])


def profile(name: str) -> dict[str, float]:
    """Instructions of one operation by the function that executes them. Raises ValgrindMissing.

    The functions of compiled modules and of CPython have the names that C knows them by.
    """
    valgrind = _valgrind()
    loops = next(loops[name] for loops in _LOOPS if name in loops)
    few, many = {name: loops}, {name: loops * _FACTOR}
    subprocess.run(_command(few), check=True)
    with TemporaryDirectory() as folder:
        totals = []
        for run in (few, many):
            file = Path(folder, str(run[name]))
            tool = [valgrind, "--tool=callgrind", f"--callgrind-out-file={file}"]
            _collected([*tool, *_command(run)])
            told = subprocess.run(
                ["callgrind_annotate", "--threshold=100", "--auto=no", file],
                capture_output=True,
                text=True,
                check=True,
            )
            totals.append(by_function(told.stdout))
    return {
        function: (count - totals[0][function]) / (many[name] - loops)
        for function, count in totals[1].most_common()
    }


def by_function(annotated: str) -> Counter[str]:
    """Instructions by function, from what callgrind_annotate prints."""
    found: Counter[str] = Counter()
    for count, function in _FUNCTION.findall(annotated):
        found[function] += int(count.replace(",", ""))
    return found


def _valgrind() -> str:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise ValgrindMissing(
            "instructions are counted by valgrind, which is not on the path: install it (Linux: "
            "`apt install valgrind` or the like; there is none for Windows)"
        )
    return valgrind


def _command(loops: Mapping[str, int], place: int = 0) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, str(place), json.dumps(loops)]


def _collected(command: list[str]) -> int:
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "ASYNCPRODUCER_IMPL": IMPLEMENTATION,
            # The threads of numpy, which pyarrow imports, wait in busy loops.
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = _COLLECTED.search(done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"valgrind ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return int(found[1])


def per_operation(runs: Sequence[Mapping[str, int]], totals: Sequence[int]) -> dict[str, float]:
    """Instructions of each operation, from runs of which one has more of it than another."""
    found: dict[str, float] = {}
    base, base_total = runs[0], totals[0]
    for run, total in zip(runs, totals, strict=True):
        if run.keys() != base.keys():
            base, base_total = run, total
        for name, loops in run.items():
            if loops > base[name]:
                found[name] = round((total - base_total) / (loops - base[name]), 1)
    return found


def least(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least of each operation's counts."""
    return {name: min(counted[name] for counted in counts) for name in counts[0]}


def compare(counted: Mapping[str, float], baseline: Mapping[str, float]) -> list[str]:
    """A sentence for each operation that takes more than TOLERANCE more than its baseline, less
    than LEAST of it, or is not counted any more."""
    problems = [
        f"{name} has a baseline, and is not counted: write it anew with --update, if that is meant"
        for name in baseline.keys() - counted.keys()
    ]
    for name, instructions in counted.items():
        known = baseline.get(name, instructions)
        if instructions > known * (1 + TOLERANCE):
            problems.append(
                f"{name}: {instructions:,.1f} instructions, {instructions / known - 1:.1%} more "
                f"than the {known:,.1f} of the baseline (at most {TOLERANCE:.0%} are allowed)"
            )
        elif instructions < known * LEAST:
            problems.append(
                f"{name}: {instructions:,.1f} instructions, less than {LEAST:.0%} of the "
                f"{known:,.1f} of the baseline: if it still does its work, write it with --update"
            )
    return problems


def read(path: Path) -> dict[str, dict[str, float]]:
    """All baselines of a file, none if there is no file."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def update(path: Path, counted: Mapping[str, float]) -> None:
    """Writes the counts as this interpreter's baseline, and leaves the others as they are."""
    known = {**read(path), baseline_key(): dict(counted)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
