"""The report's plots as SVG, to be put into HTML: lines and text have the colour of the page.

The only importer of matplotlib here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncproducer.spark.audit.latency import bounds_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["lanes", "latency", "skew"]

#: Stands for the page's colour of text until the SVG is made.
_INK = "#010203"
#: To be told apart on white and on black.
_COLOURS = ("#3b82d0", "#d9663f", "#2f9e6e", "#b65fa8", "#b98a12", "#6b7fd7")
#: Where there are more lines than colours.
_DASHES = ("-", "--", ":", "-.")


def _figure(height: float) -> tuple[Figure, Axes]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small, and can be searched for
    matplotlib.rcParams["svg.hashsalt"] = "asyncproducer"
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    dashes = [each for each in _DASHES for _ in _COLOURS]
    axes.set_prop_cycle(color=_COLOURS * len(_DASHES), linestyle=dashes)
    axes.tick_params(colors=_INK, which="both")
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(_INK)
    for side, spine in axes.spines.items():
        spine.set_color(_INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.grid(alpha=0.25, color=_INK)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    figure.patch.set_alpha(0.0)
    return figure, axes


def _svg(figure: Figure, axes: Axes, *, legend: bool = True) -> str:
    if legend and axes.get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper right", ncols=4, labelcolor=_INK, frameon=False, fontsize="small"
        )
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # As wide as the page lets it be.
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', svg, count=1)


def latency(rows: Mapping[str, Mapping[int, int]]) -> str:
    """Which share of the records took longer, by stage. `rows`: buckets of each."""
    figure, axes = _figure(4.2)
    for name, buckets in rows.items():
        left = total = sum(buckets.values())
        points = []
        for bucket in sorted(buckets):
            left -= buckets[bucket]
            if bucket > 0 and left:
                points.append((bounds_us(bucket)[1] / 1000, left / total))
        if points:
            axes.plot(*zip(*points, strict=True), label=name)
    if axes.has_data():  # else there is nothing to have a logarithm of
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of records that took longer")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    return _svg(figure, axes)


def skew(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records of each partition, topic by topic."""
    figure, axes = _figure(3.2)
    topics = list(dict.fromkeys(row["topic"] for row in rows))
    at = 0
    ticks: list[int] = []
    names: list[str] = []
    for topic in topics:
        parts = sorted((row["partition"], row["records"]) for row in rows if row["topic"] == topic)
        places = range(at, at + len(parts))
        axes.bar(places, [records for _, records in parts], label=topic)
        if len(rows) <= 60:
            ticks += places
            names += [str(partition) for partition, _ in parts]
        at += len(parts) + 1
    axes.set_xticks(ticks, names)
    axes.set_xlabel("partition")
    axes.set_ylabel("records")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return _svg(figure, axes)


def lanes(rows: Sequence[Mapping[str, Any]], bucket_size: int) -> str:
    """Where in the lanes something is lost or doubled. `rows`: of audit_buckets."""
    names = sorted({(row["target"], row["run"], row["lane"]) for row in rows})[:60]
    figure, axes = _figure(1.2 + 0.28 * len(names))
    for number, (what, colour) in enumerate((("lost", _COLOURS[1]), ("duplicates", _COLOURS[4]))):
        marks = [
            ((row["bucket"] + 0.5) * bucket_size, names.index(lane) + 0.2 * number, row[what])
            for row in rows
            if row[what] and (lane := (row["target"], row["run"], row["lane"])) in names
        ]
        if marks:
            x, y, counts = zip(*marks, strict=True)
            sizes = [14 + 60 * count / bucket_size for count in counts]
            axes.scatter(x, y, s=sizes, color=colour, label=what, alpha=0.8)
    labels = [f"{target}, run {run}, lane {lane}" for target, run, lane in names]
    axes.set_yticks(range(len(names)), labels, fontsize="small")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("number in its lane")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return _svg(figure, axes)
