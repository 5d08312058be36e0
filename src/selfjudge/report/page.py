"""Tables, charts and answers → one HTML page that needs nothing else.

Jinja escapes every text from a result. A content policy allows the page's script and style sheet by their hashes:
a text that slipped through could not run or load anything. Tables and charts need no script; it adds the filter, the
theme and the token viewer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from selfjudge.report.charts import Chart
from selfjudge.report.draw import PALETTE, Drawing, legend
from selfjudge.report.records import (
    PAPER,
    EvalRun,
    Results,
    group_by_task,
    place_title,
    rule_order,
    task_order,
    task_title,
)
from selfjudge.report.table import Table

SECTIONS = {
    "verdict": ("Verdict", ""),
    "averages": (
        "Averages",
        "Change against <code>exact</code>, averaged over the tasks as in the paper. m is the number of tokens that a"
        " target pass yields, its own included. Every cell has m, then the score in points and its change.",
    ),
    "task": (
        "Per task",
        "Every run. Brackets are 95 % intervals by paired bootstrap over examples. A rule with <code>q0.9</code> has"
        " the threshold that rejects 90 % of bad substitutions.",
    ),
    "trade-off": (
        "Trade-off",
        "The change of the score against the gain in m, both paired with <code>exact</code>, which is the dotted line."
        " A line is a method, a point one of its thresholds: F and R are the judge’s own, q0.9 rejects 90 % of bad"
        " substitutions. Bars are 95 % intervals. Up and to the right is better. Not all methods are drawn; the"
        " tables have all. A rule that loses more than 15 points is out of view, and the title says how many.",
    ),
    "equal-m": (
        "At equal m",
        "Which rule keeps more of the answers of <code>exact</code> for the same gain in m? A lead is the distance"
        " from the line through the points of an untrained margin, or of a priced one, from <code>exact</code> on, in"
        " points; its 95 % interval is paired by example. ≥ is a lower bound: no margin with a smaller m was run."
        " Beyond a line’s last point there is no lead.",
    ),
    "substitutions": (
        "Substitutions",
        "Tokens taken instead of the target’s choice, by task: for each method its threshold F, else the run with"
        " most.",
    ),
    "viewer": ("Tokens", "An answer, token by token."),
    "provenance": ("Provenance", "The machines, judges and versions behind the figures."),
}
"""Heading and explanation of every section, in the page's order."""


@dataclass(frozen=True)
class Section:
    """A section as the template shows it; tables follow the heading given with them, if any."""

    id: str
    heading: str
    about: Markup
    legend: Sequence[tuple[str, Markup]] = ()
    figures: Sequence[tuple[Chart, Markup]] = ()
    tables: Sequence[tuple[str, Sequence[Table]]] = ()


def page(
    results: Results,
    tables: Mapping[str, Sequence[Table]],
    charts: Mapping[str, Sequence[Chart]],
    drawings: Mapping[str, Drawing],
    sentences: Sequence[str] = (),
) -> str:
    """The whole page; tables and charts by section, drawings by chart, the verdict in sentences."""
    runs = results.runs
    methods: dict[str, dict[str, None]] = {}
    for run in sorted(runs, key=rule_order):
        methods.setdefault(run.method, {})[run.rule] = None
    tasks = sorted({run.task for run in runs}, key=task_order)
    return render(
        "report.html",
        title=f"Evaluation of {', '.join(sorted({run.pair for run in runs}))}",
        lead=_lead(runs, tasks),
        sections=_sections(results, tables, charts, drawings),
        tasks=[(task, task_title(task)) for task in tasks],
        methods={method: list(rules) for method, rules in methods.items()},
        sentences=sentences,
        skipped=results.skipped,
        data=viewer_data(runs),
    )


def render(template: str, **values: Any) -> str:
    """A page from a template of assets/, with the style sheet and the script in it."""
    style, script = _style(), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}';"
        " base-uri 'none'; form-action 'none'"
    )
    return _templates().get_template(template).render(style=style, script=script, policy=policy, **values)


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("selfjudge.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates


def _asset(name: str) -> Markup:
    file = resources.files("selfjudge.report").joinpath("assets", name)
    return Markup(file.read_text(encoding="utf-8"))  # noqa: S704


def _style() -> Markup:
    colours = "".join(f"--s{i}:light-dark({light},{dark});" for i, (light, dark) in enumerate(PALETTE))
    return _asset("page.css") + Markup(f":root{{{colours}}}")  # noqa: S704


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def viewer_data(runs: Sequence[EvalRun]) -> dict[str, Any]:
    """Answers for the viewer; a token is a list (text, origin, choice, p, p of the choice, judge's score, cycle)."""
    return {
        "runs": [
            {
                "group": place_title(pair, task, runs),
                "name": f"{run.rule}, γ = {run.gamma}",
                "examples": [
                    {
                        "id": e.id, "prompt": e.prompt, "score": e.score,
                        "tokens": [[t.text, t.origin, t.choice, t.p, t.p_choice, t.judge, t.cycle] for t in e.tokens],
                    }
                    for e in run.examples
                ],
            }
            for (pair, task), here in group_by_task(runs).items()
            for run in here
            if run.examples
        ]
    }  # fmt: skip


def _lead(runs: Sequence[EvalRun], tasks: Sequence[str]) -> str:
    dates = sorted({run.provenance.date[:10] for run in runs if run.provenance.date})
    machines = sorted({run.provenance.machine for run in runs if run.provenance.machine})
    parts = [
        f"Runs: {len(runs)}. Tasks: {', '.join(map(task_title, tasks))}",
        "; ".join(machines),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
    ]
    return ". ".join(filter(None, parts)) + "."


def _sections(
    results: Results,
    tables: Mapping[str, Sequence[Table]],
    charts: Mapping[str, Sequence[Chart]],
    drawings: Mapping[str, Drawing],
) -> list[Section]:
    """The sections that have something to show."""
    sections = []
    for name, (heading, about) in SECTIONS.items():
        own_charts, own_tables = charts.get(name, ()), tables.get(name, ())
        if own_charts or own_tables or (name == "viewer" and any(run.examples for run in results.runs)):
            grouped = _group_by_kind(own_tables) if name == "task" else [("", own_tables)]
            figures = [(chart, drawings[chart.id].svg) for chart in own_charts]
            sections.append(Section(name, heading, Markup(about), legend(own_charts), figures, grouped))  # noqa: S704
    return sections


def _group_by_kind(tables: Sequence[Table]) -> list[tuple[str, list[Table]]]:
    """The paper's four tasks, LiveCodeBench, others."""
    kinds: dict[str, list[Table]] = {
        "Tasks of the average": [],
        "Code, separate as in the paper": [],
        "Other tasks": [],
    }
    for table in tables:
        task = table.rows[0]["task"]
        kinds[list(kinds)[0 if task in PAPER else 1 if task.startswith("livecodebench") else 2]].append(table)
    return [(heading, kind) for heading, kind in kinds.items() if kind]
