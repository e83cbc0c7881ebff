"""The medians as SVG: bars where a workload has one case, else lines over its cases.

The only importer of matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncproducer.bench.report import METRICS, Row, rows, workload_of

__all__ = ["draw"]


def draw(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """Writes a file for each workload of a run. The same run makes the same bytes.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "asyncproducer"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small, and can be searched for
    found = rows(document["results"])
    return [
        _draw(name, [row for row in found if row.workload == name], document, directory)
        for name in dict.fromkeys(row.workload for row in found)
    ]


def _draw(name: str, found: Sequence[Row], document: Mapping[str, Any], directory: Path) -> Path:
    from matplotlib.figure import Figure

    workload = workload_of(name)
    metric = METRICS[workload.metric]
    cases = list(dict.fromkeys(row.case for row in found))
    peers = list(dict.fromkeys(row.peer for row in found))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for place, peer in enumerate(peers):
        points = [
            (cases.index(row.case), row.stats[workload.metric])
            for row in found
            if row.peer == peer and workload.metric in row.stats
        ]
        middle = [stat.median for _, stat in points]
        spread = [
            [stat.median - stat.low for _, stat in points],
            [stat.high - stat.median for _, stat in points],
        ]
        if len(cases) == 1:
            axes.barh([place] * len(points), middle, xerr=spread)
        else:
            x = [at for at, _ in points]
            # The line only leads the eye: cases are points.
            axes.errorbar(x, middle, yerr=spread, label=peer, marker="o", linestyle=":", capsize=3)
    if len(cases) == 1:
        axes.set_yticks(range(len(peers)), peers)
        axes.invert_yaxis()
        axes.set_xlabel(metric.title)
        axes.xaxis.set_major_formatter("{x:,.10g}")
    else:
        axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
        axes.set_yscale("log")
        axes.set_ylabel(metric.title)
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.set_title(workload.title)
    facts = document["facts"]
    figure.supxlabel(
        f"{document['command']}\n{facts['date']}, medians and ranges of {facts['rounds']} rounds, "
        f"{facts['cpus']} CPUs, {facts['machine']}",
        fontsize=7,
    )
    path = directory / f"{name}.svg"
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path
