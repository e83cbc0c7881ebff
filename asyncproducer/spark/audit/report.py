"""One HTML file with what an audit found: no script, nothing from the network, light and dark."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncproducer.spark.audit import plots
from asyncproducer.spark.audit.judge import BUCKET
from asyncproducer.spark.audit.latency import below_zero, quantile_us

__all__ = ["ROWS", "render"]

#: So many rows of a table are shown, those with the most to say first.
ROWS = 50

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --good: #1f8a5b; --bad: #c8452f; --doubt: #a77800 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       background: Canvas; color: CanvasText }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
         vertical-align: top }
th { font-weight: 600 } .text { text-align: left }
.wide { overflow-x: auto } .note { opacity: .75; font-size: .85rem; max-width: 46rem }
.clean { color: var(--good) } .violated { color: var(--bad) } .incomplete { color: var(--doubt) }
b.clean, b.violated, b.incomplete { font-size: 1.05rem }
"""

Row = Mapping[str, Any]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, Mapping):
        return html.escape("/".join(str(part) for part in value.values()))
    if isinstance(value, (list, tuple)):
        return html.escape("; ".join(map(str, value)))
    return "" if value is None else html.escape(str(value))


#: Numbers that are names: without commas.
_NAMES = {"run", "lane", "partition", "first_seq", "last_seq", "before_seq", "after_seq", "seq"}
_NAMES |= {"producer_batch", "key_hash"}


def _table(rows: Sequence[Row], names: str) -> str:
    """`names`: the columns, with a space between."""
    columns = names.split()

    def cell(row: Row, name: str) -> str:
        value = row[name]
        text = str(value) if name in _NAMES and value is not None else _cell(value)
        kind = "" if isinstance(value, (int, float)) else "text"
        if name == "verdict":
            kind = f"text {text}"
            text = f"<b class={text}>{text}</b>"
        return f'<td class="{kind}">{text}</td>'

    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(cell(row, name) for name in columns)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _section(title: str, note: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2><p class=note>{html.escape(note)}</p>{''.join(parts)}"


def _of(total: int) -> str:
    return f" The first {ROWS} of {total:,}; all are in the table." if total > ROWS else ""


def _latency(rows: Iterable[Row]) -> tuple[list[Row], dict[str, dict[int, int]]]:
    stages: dict[tuple[Any, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    longest: dict[tuple[Any, ...], int] = {}
    for row in rows:
        stage = (row["run"], row["topic"], row["stage"])
        stages[stage][row["bucket"]] += row["count"]
        longest[stage] = max(row["max_us"], longest.get(stage, row["max_us"]))
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p99.9_ms": 0.999}
    table: list[Row] = [
        {
            **dict(zip(("run", "topic", "stage"), stage, strict=True)),
            "records": sum(buckets.values()),
            # The end of a bucket may be behind all that is in it.
            **{
                name: min(quantile_us(buckets, share), longest[stage]) / 1000
                for name, share in shares.items()
            },
            "max_ms": longest[stage] / 1000,
            "below_zero": below_zero(buckets),
        }
        for stage, buckets in sorted(stages.items())
    ]
    several = len({stage[0] for stage in stages}) > 1
    names = {
        stage: f"{stage[1]}: {stage[2]}" + f", run {stage[0]}" * several for stage in sorted(stages)
    }
    return table, {names[stage]: stages[stage] for stage in sorted(stages)}


def render(tables: Mapping[str, Sequence[Row]], totals: Mapping[str, int], facts: Row) -> str:
    """The report. `tables`: rows by the name of the table; `totals`: how many there are of those
    that were cut. `facts`: told as they are.
    """
    verdicts = tables["audit_verdict"]
    parts = [
        _table(
            verdicts,
            "target run verdict delivery ordered records acked lost duplicates phantom late"
            " corrupt in_doubt in_doubt_present aborted reasons",
        ),
        "<p class=note>lost: acknowledged, and not in the log. duplicates: records beyond the first"
        " of their number. phantom: in the log, although failed or never tried. in doubt: of which"
        " the writer was not told; present: those of them that are there. late: behind a later"
        " record of their lane, in the same partition. aborted: seen by those only who read"
        " uncommitted.</p>",
    ]
    wrong = tables["audit_buckets"]
    if wrong:
        parts.append(
            _section(
                "Where",
                f"Each mark is a stretch of {BUCKET:,} numbers in which something is lost or"
                " doubled.",
                plots.lanes(wrong, BUCKET),
            )
        )
    if tables["audit_gaps"]:
        parts.append(
            _section(
                "Lost",
                "Ranges of numbers, and the nearest ones that are in the log (topic/partition/"
                "offset): they were sent between these two." + _of(totals["audit_gaps"]),
                _table(
                    tables["audit_gaps"],
                    "target run lane first_seq last_seq lost before after before_send_us"
                    " after_send_us",
                ),
            )
        )
    if tables["audit_dups"]:
        parts.append(
            _section(
                "Doubled",
                "The classes are guesses, by what else is there twice; the numbers are exact.",
                _table(tables["dup_classes"], "target run class numbers ms_apart"),
                "<p class=note>Of these:" + _of(totals["audit_dups"]) + "</p>",
                _table(
                    tables["audit_dups"],
                    "target run lane seq copies same_partition offset_distance ms_apart"
                    " producer_batch class",
                ),
            )
        )
    if tables["audit_order"]:
        parts.append(
            _section(
                "Out of order",
                "By partition and lane; the displacement is in numbers of the lane."
                + _of(totals["audit_order"]),
                _table(
                    tables["audit_order"],
                    "topic partition run lane records late_records max_displacement",
                ),
            )
        )
    table, curves = _latency(tables["audit_latency"])
    if table:
        parts.append(
            _section(
                "Latency",
                "From the stamp to the broker's clock (append), or to the time that"
                " the producer gave the record (create: it says nothing of the broker). Read from"
                " buckets: at most 9 % too much. Below zero: the clocks differ.",
                plots.latency(curves),
                _table(table, "run topic stage records p50_ms p99_ms p99.9_ms max_ms below_zero"),
            )
        )
    if tables["audit_skew"]:
        parts.append(
            _section(
                "Partitions",
                "How evenly the records lie; a partition without any is not here.",
                plots.skew(tables["audit_skew"]),
                _table(
                    _by_topic(tables["audit_skew"]),
                    "topic partitions records bytes records_max_to_mean records_cv"
                    " bytes_max_to_mean bytes_cv",
                ),
            )
        )
    if tables["audit_keys"]:
        parts.append(
            _section(
                "Keys",
                "The most frequent ones, by Spark's xxhash64 of the key.",
                _table(tables["audit_keys"], "topic rank key_hash records bytes share"),
            )
        )
    parts.append(
        _section(
            "Input",
            "Records that take part, those with a stamp of other runs, and those without a stamp"
            " that holds.",
            _table(tables["audit_kinds"], "topic kind count"),
        )
    )
    told = "".join(
        f"<tr><td class=text>{html.escape(str(name))}</td><td class=text>{_cell(value)}</td></tr>"
        for name, value in facts.items()
        if name != "verdict"
    )
    parts.append(f"<h2>This audit</h2><div class=wide><table>{told}</table></div>")
    verdict = html.escape(str(facts["verdict"]))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>Audit</title>"
        f"<style>{_STYLE}</style><h1>Audit: <span class={verdict}>{verdict}</span></h1>"
        f"{''.join(parts)}</html>\n"
    )


def _by_topic(rows: Sequence[Row]) -> list[Row]:
    topics: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        topics[row["topic"]].append(row)
    return [
        {
            **found[0],
            "partitions": len(found),
            "records": sum(row["records"] for row in found),
            "bytes": sum(row["bytes"] for row in found),
        }
        for _, found in sorted(topics.items())
    ]
