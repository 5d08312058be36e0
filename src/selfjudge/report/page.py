"""Tables, charts and answers → one HTML page that needs nothing else. Every text from a result is escaped.

Tables and charts are in the page as they are; the script adds the filter, the theme and the token viewer. A content policy
allows this one script and style sheet by their hashes, so even a text that slipped through could not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from selfjudge.report.charts import legend, svg
from selfjudge.report.order import PAPER, by_task, rule_order, several, task_order, title
from selfjudge.report.plots import PALETTE, Chart
from selfjudge.report.records import Results, Run
from selfjudge.report.table import Column, Row, Table

SECTIONS = (
    ("averages", "Averages", "Change against <code>exact</code>, averaged over the tasks as in the paper. m is the number of tokens a target pass yields, its own included. Every cell has m, then the score in points and its change."),
    ("task", "Per task", "Every run. Brackets are 95 % intervals: of scores and Δtask by paired bootstrap over examples, of Δm and its ratio by the paired, linearised ratio."),
    ("trade-off", "Trade-off", "Score against m. A line is a method, a point one of its thresholds; F and R are the judge’s own. The dotted line is <code>exact</code> and the band its 95 % interval. Up and to the right is better. Where some lose more than 15 points and others do not, those are out of view, and the title says how many."),
    ("gamma", "Draft length γ", "m and score against the number of tokens drafted in a cycle."),
    ("two-stage", "Two stages", "<code>judged</code> accepts what alignment or the judge accepts, <code>judge_only</code> what the judge accepts."),
    ("suffix-length", "Suffix length N", "Judges whose labels scored N tokens after the substitution, compared by decoding with them."),
    ("roc", "Judges", "On mismatches of held-out prompts: which share of the acceptable and of the unacceptable draft tokens each threshold takes."),
    ("study", "Learning curves", "What more labels, and more to read, bring."),
    ("labelling", "Labelling", "Labels per hour of each labelling method, prompts and responses included, the search for τ not."),
    ("time", "Time", "Where the time of decoding goes."),
    ("substitutions", "Substitutions", "What is taken instead of the target’s choice, by task: for each method its threshold F, else the run with most."),
    ("extraction", "Extraction", "Answers in which no answer was found."),
    ("viewer", "Tokens", "An answer, token by token."),
    ("provenance", "Provenance", "What the figures were measured on."),
)  # fmt: skip
TABLES = {"roc": ("judges",), "study": ("features",)}
"""Sections whose tables have another name; the others’ begin with the section’s own."""
LETTERS: dict[str, str | int | None] = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def page(results: Results, tables: Sequence[Table], charts: Mapping[str, Sequence[Chart]]) -> str:
    """The whole page."""
    shown = {name: body for name, _, _ in SECTIONS if (body := _body(name, results, tables, charts))}
    style, script = _style(), _asset("page.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    return Template(_asset("page.html")).substitute(
        policy=escape(policy), title=escape(_title(results)), style=style, lead=escape(_lead(results)),
        nav="".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in SECTIONS if name in shown),
        filter=_filter(results.runs), footer="Intervals are 95 %; scores are points of 100.",
        body="\n".join(
            f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{heading}</h2><p>{about}</p>{shown[name]}</section>'
            for name, heading, about in SECTIONS if name in shown
        ),
        data=as_script(viewer_data(results.runs)), script=script,
    )  # fmt: skip


def as_script(value: Any) -> str:
    """JSON that no HTML parser can leave: `</script>`, comments and line separators are escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(str.maketrans(LETTERS))  # fmt: skip


def viewer_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Answers, their tokens as rows (text, origin, choice, p, p of the choice, judge's score, cycle)."""
    pairs = several(r.pair for r in runs)
    return {
        "runs": [
            {
                "group": title(task) + (f", {pair}" if pairs else ""),
                "name": f"{run.rule}, γ = {run.gamma}" + (f", fold {run.fold}" if run.fold else ""),
                "examples": [
                    {
                        "id": e.id, "prompt": e.prompt, "score": e.score,
                        "tokens": [[t.text, t.origin, t.choice, t.p, t.p_choice, t.judge, t.cycle] for t in e.tokens],
                    }
                    for e in run.examples
                ],
            }
            for (pair, task), mine in by_task(runs).items()
            for run in mine
            if run.examples
        ]
    }  # fmt: skip


def _asset(name: str) -> str:
    return resources.files("selfjudge.report").joinpath("assets", name).read_text(encoding="utf-8")


def _style() -> str:
    colours = "".join(f".s{i}{{--c:light-dark({light},{dark})}}" for i, (light, dark) in enumerate(PALETTE))
    return _asset("page.css") + colours


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _title(results: Results) -> str:
    pairs = sorted({run.pair for run in results.runs})
    return f"Evaluation of {', '.join(pairs)}" if pairs else "Judges and labels"


def _lead(results: Results) -> str:
    parts = []
    if runs := results.runs:
        tasks = sorted({r.task for r in runs}, key=task_order)
        dates = sorted({r.provenance.date[:10] for r in runs if r.provenance.date})
        machines = sorted({r.provenance.machine for r in runs if r.provenance.machine})
        parts.append(f"{_counted(len(runs), 'run')} of {_counted(len(tasks), 'task')}: {', '.join(map(title, tasks))}")
        parts += ["; ".join(machines)] if machines else []
        parts += [dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"] if dates else []
    else:
        found = ((results.judges, "judge"), (results.labels, "labelling run"), (results.studies, "study"))
        parts.append(", ".join(_counted(len(kind), name) for kind, name in found if kind))
    return ". ".join(parts) + "."


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what.removesuffix('y') + 'ies' if what.endswith('y') else what + 's'}"


def _body(name: str, results: Results, tables: Sequence[Table], charts: Mapping[str, Sequence[Chart]]) -> str:
    if name == "viewer":
        return VIEWER if any(run.examples for run in results.runs) else ""
    mine = [t for t in tables if any(t.id == n or t.id.startswith(f"{n}-") for n in TABLES.get(name, (name,)))]
    if name == "task":
        body = _grouped(mine)
    else:
        drawn = charts.get(name, ())
        figures = "".join(
            f'<figure data-task="{escape(c.task)}"><figcaption>{escape(c.title)}</figcaption>{svg(c)}</figure>' for c in drawn
        )  # fmt: skip
        body = (f'{legend(drawn)}<div class="facets">{figures}</div>' if drawn else "") + "".join(map(_table, mine))
    if name == "provenance" and results.skipped:
        left = "".join(f"<li><code>{escape(place)}</code>: {escape(why)}</li>" for place, why in results.skipped)
        body += f'<h3>Left out</h3><ul class="left-out">{left}</ul>'
    return body


def _grouped(tables: Sequence[Table]) -> str:
    """The paper's four tasks, LiveCodeBench, others."""
    kinds: dict[str, list[Table]] = {"Tasks of the average": [], "Code, apart as in the paper": [], "Other tasks": []}
    for table in tables:
        task = table.rows[0]["task"]
        kinds[list(kinds)[0 if task in PAPER else 1 if task.startswith("livecodebench") else 2]].append(table)
    return "".join(
        f"<div data-block><h3>{heading}</h3>{''.join(map(_table, mine))}</div>"
        for heading, mine in kinds.items()
        if mine
    )


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col"{_kind(c)}{f""" title="{escape(c.help)}" """ if c.help else ""}>{escape(c.head)}</th>' for c in table.columns
    )  # fmt: skip
    rows = "".join(_row(table, row) for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div data-block id="{table.id}-table"><div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}</div>"
    )


def _row(table: Table, row: Row) -> str:
    names = {key: str(row[key]) for key in ("task", "method", "rule") if isinstance(row.get(key), str)}
    marks = "".join(f' data-{key}="{escape(value)}"' for key, value in names.items())
    exact = ' class="exact"' if row.get("rule") == "exact" else ""
    cells = []
    for number, column in enumerate(table.columns):
        small = column.small(row)
        text = escape(column.show(row)) + (f"<small>{escape(small)}</small>" if small else "")
        cells.append(f'<th scope="row"{_kind(column)}>{text}</th>' if number == 0 else f"<td{_kind(column)}>{text}</td>")  # fmt: skip
    return f"<tr data-row{marks}{exact}>{''.join(cells)}</tr>"


def _kind(column: Column) -> str:
    return ' class="number"' if column.numeric else ' class="wide"' if column.wide else ""


def _filter(runs: Sequence[Run]) -> str:
    """Shown by the script; without it all rows are there."""
    if not runs:
        return ""
    tasks = "".join(f'<option value="{escape(t)}">{escape(title(t))}</option>' for t in sorted({r.task for r in runs}, key=task_order))  # fmt: skip
    methods: dict[str, list[str]] = {}
    for run in sorted(runs, key=rule_order):
        known = methods.setdefault(run.method, [])
        known += [] if run.rule in known else [run.rule]
    rules = "".join(
        f'<option value="r:{escape(known[0])}">{escape(known[0])}</option>' if len(known) == 1
        else f'<optgroup label="{escape(method)}"><option value="m:{escape(method)}">{escape(method)}, all</option>'
        + "".join(f'<option value="r:{escape(rule)}">{escape(rule)}</option>' for rule in known) + "</optgroup>"
        for method, known in methods.items()
    )  # fmt: skip
    return (
        '<div class="controls" id="filter" role="search" aria-label="Filter tables and charts" hidden>'
        f'<label>Task<select id="filter-task"><option value="">all tasks</option>{tasks}</select></label>'
        f'<label>Rule<select id="filter-rule"><option value="">all rules</option>{rules}</select></label>'
        '<button type="button" id="filter-clear">Show all</button><output id="filter-said" for="filter-task filter-rule"></output></div>'
    )


VIEWER = """<div id="token-viewer" hidden>
<div class="controls">
<label>Task<select id="pick-task"></select></label><label>Rule<select id="pick-rule"></select></label><label>Example<select id="pick-example"></select></label>
</div>
<ul class="legend" aria-label="Origins of tokens"><li><span class="key">draft</span> drafted, and the target’s choice</li>
<li><span class="key token judge">judge</span> drafted, accepted against the target’s choice (solid line)</li>
<li><span class="key token target">target</span> the target’s own (dotted line)</li></ul>
<div class="viewer"><div class="answer"><details class="prompt"><summary>Prompt</summary><pre id="prompt"></pre></details>
<p class="note" id="facts" aria-live="polite"></p>
<div class="tokens" id="tokens" role="listbox" aria-label="Tokens of the answer" aria-describedby="keys"></div>
<p class="keys" id="keys"><kbd>←</kbd> <kbd>→</kbd> token, <kbd>↑</kbd> <kbd>↓</kbd> line, <kbd>n</kbd> <kbd>p</kbd> next or previous judged token, <kbd>Home</kbd> <kbd>End</kbd></p></div>
<aside class="details" id="details" aria-live="polite" aria-label="The token"></aside></div>
</div><noscript><p>The viewer needs the page’s script.</p></noscript>"""
