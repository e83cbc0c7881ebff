"""Medians, ratios and losses, as Markdown.

A ratio is taken within a round, where both had the same machine and brokers, and the median of
the rounds is shown. It tells how many times better this producer is, whatever is measured: above
1 it wins, below 1 it loses, and each loss is listed once more under the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from asyncproducer.bench.peers import Result
from asyncproducer.bench.workloads import HEADLINE, WORKLOADS, Workload, headline

__all__ = [
    "METRICS",
    "Metric",
    "Row",
    "Stat",
    "losses",
    "page",
    "rows",
    "section",
    "tables",
    "workload_of",
]

_OURS = ("asyncproducer", "asyncproducer-uvloop", "asyncproducer-python")
#: No producer: the limit of all.
_LIMIT = "wire-replay"

_BEGIN, _END = "<!-- results -->", "<!-- end -->"


class Metric(NamedTuple):
    """How a number is shown, and whether more of it is better (None: it is neither)."""

    title: str
    format: str
    more_is_better: bool | None = False


METRICS: Mapping[str, Metric] = {
    "records_per_s": Metric("records/s", "{:,.0f}", True),
    "cpu_us_per_record": Metric("CPU µs/record", "{:,.2f}"),
    "broker_cpu_us_per_record": Metric("broker CPU µs/record", "{:,.2f}"),
    "p50_ms": Metric("p50 ms", "{:,.2f}"),
    "p99_ms": Metric("p99 ms", "{:,.2f}"),
    "p999_ms": Metric("p99.9 ms", "{:,.2f}"),
    "stall_p999_ms": Metric("loop stall p99.9 ms", "{:,.2f}"),
    "stall_max_ms": Metric("longest stall ms", "{:,.2f}"),
    "stall_idle_p999_ms": Metric("an idle process beside it p99.9 ms", "{:,.2f}", None),
    "turn_wait_p999_ms": Metric("wait for a turn's computing p99.9 ms", "{:,.2f}"),
    "most_by_least_records": Metric("most by least records of a task", "{:,.2f}"),
    "longest_by_shortest_wait": Metric("longest by shortest wait", "{:,.2f}"),
    "longest_wait_ms": Metric("longest wait ms", "{:,.0f}"),
    "rss_growth_mib": Metric("RSS growth MiB", "{:,.1f}", None),
    "max_rss_mib": Metric("max RSS MiB", "{:,.0f}"),
    "records_per_batch": Metric("records/batch", "{:,.0f}", None),
}


class Stat(NamedTuple):
    """One number over the rounds; `ratio` is None for this producer itself."""

    median: float
    low: float
    high: float
    ratio: float | None


class Row(NamedTuple):
    """What a peer did in a case. `problem`: why (some of) it is not there."""

    workload: str
    case: str
    peer: str
    rounds: int
    stats: Mapping[str, Stat]
    problem: str | None


def workload_of(name: str) -> Workload:
    """The workload that results name."""
    return headline() if name == HEADLINE else WORKLOADS[name]


def rows(results: Sequence[Result]) -> list[Row]:
    """A row for each workload, case and peer, in the order of the results' first round."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = (result["workload"], result["case"], result["peer"])
        groups.setdefault(key, []).append(result)
    found: list[Row] = []
    for (workload, case, peer), group in groups.items():
        base = next((n for n in _OURS if (workload, case, n) in groups), None)
        ours = {} if base is None else {r["round"]: r for r in groups[workload, case, base]}
        problems = [r.get("error") or r.get("skipped") for r in group]
        problem = next((str(p).splitlines()[-1] for p in problems if p), None)
        stats = {
            name: _stat(name, [r for r in group if name in r], {} if peer == base else ours)
            for name in METRICS
            if any(name in r for r in group)
        }
        found.append(Row(workload, case, peer, len(group), stats, problem))
    return found


def _stat(name: str, group: Sequence[Result], ours: Mapping[int, Result]) -> Stat:
    values = [r[name] for r in group]
    ratios: list[float] = []
    more_is_better = METRICS[name].more_is_better
    for result in group:
        mine = ours.get(result["round"], {}).get(name)
        if more_is_better is not None and mine and result[name]:
            ratios.append(mine / result[name] if more_is_better else result[name] / mine)
    return Stat(median(values), min(values), max(values), median(ratios) if ratios else None)


def _cell(name: str, stat: Stat | None, *, spread: bool) -> str:
    if stat is None:
        return ""
    form = METRICS[name].format.format
    text = form(stat.median)
    if spread and stat.low != stat.high:
        text += f" ({form(stat.low)} to {form(stat.high)})"
    if stat.ratio is not None:
        ratio = f"{stat.ratio:.2f}x"
        text += f", **{ratio}**" if stat.ratio < 1 else f", {ratio}"
    return text


def tables(results: Sequence[Result]) -> str:
    """A table for each workload."""
    all_rows = rows(results)
    parts: list[str] = []
    for name in dict.fromkeys(row.workload for row in all_rows):
        workload = workload_of(name)
        mine = [row for row in all_rows if row.workload == name]
        metrics = [m for m in METRICS if any(m in row.stats for row in mine)]
        lines = [f"### {name}: {workload.title}", "", f"Guards: {workload.guards}."]
        if workload.remark:
            lines.append(workload.remark)
        lines += ["", "| case | peer | " + " | ".join(METRICS[m].title for m in metrics) + " |"]
        lines.append("|---|---" + "|--:" * len(metrics) + "|")
        for row in mine:
            cells = [_cell(m, row.stats.get(m), spread=m == workload.metric) for m in metrics]
            if row.problem is not None:
                cells[0] = f"{cells[0]} {row.problem}".strip().replace("|", "\\|")
            lines.append(f"| {row.case} | {row.peer} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def losses(results: Sequence[Result]) -> list[str]:
    """A sentence for each number in which another producer is better."""
    return [
        f"{row.workload}, {row.case}: {row.peer} has {METRICS[name].format.format(stat.median)} "
        f"{METRICS[name].title}, {1 / stat.ratio:.2f} times better"
        for row in rows(results)
        if row.peer not in (*_OURS, _LIMIT)
        for name, stat in row.stats.items()
        if stat.ratio is not None and stat.ratio < 1
    ]


def section(document: Mapping[str, Any]) -> str:
    """One run: its command, where it ran, tables, losses."""
    facts = ", ".join(f"{name} {value}" for name, value in document["facts"].items())
    results = document["results"]
    versions = {r["peer"]: r["version"] for r in results if "version" in r}
    lost = losses(results) or ["nowhere in this run"]
    if not any(peer not in (*_OURS, _LIMIT) for peer in versions):
        lost = ["no other producer was measured in this run"]
    lines = [
        "```sh",
        document["command"],
        "```",
        "",
        f"{facts}.",
        "Peers: " + ", ".join(f"{peer} {version}" for peer, version in versions.items()) + ".",
        "",
        tables(results),
        "#### Where others are better",
        "",
        *(f"- {loss}" for loss in lost),
    ]
    return "\n".join(lines) + "\n"


def page(text: str, documents: Iterable[Mapping[str, Any]], plots: Iterable[str]) -> str:
    """`text` with the results between its marks. ValueError if it has no marks."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the results: {_BEGIN} and {_END} are missing")
    images = "".join(f"![{plot}]({plot})\n" for plot in plots)
    body = "\n".join(section(document) for document in documents)
    return f"{before}{begin}\n\n{images}\n{body}\n{end}{after}"
