"""Result folders → one self-contained HTML page, figures and tables. Reads files only; needs no torch.

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
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from selfjudge.errors import SelfJudgeError
from selfjudge.report.charts import MOST_METHODS, Chart, make_charts
from selfjudge.report.draw import PALETTE, Drawing, draw, draw_legend
from selfjudge.report.records import (
    EvalRun,
    Results,
    group_by_task,
    name_task,
    read_results,
    rule_order,
    task_order,
    task_title,
)
from selfjudge.report.table import Table
from selfjudge.report.tables import make_tables
from selfjudge.report.verdict import make_verdict
from selfjudge.store import check_page, read_json, write_json, write_text
from selfjudge.store.artefacts import AnswerExample, ReportRecord

SECTIONS = {
    "verdict": "Verdict",
    "averages": "Averages",
    "task": "Per task",
    "trade-off": "Trade-off",
    "equal-m": "At equal m",
    "substitutions": "Substitutions",
    "viewer": "Tokens",
    "provenance": "Provenance",
}
"""Heading of every section, in the page's order."""
RECORD = "report.json"
"""File beside the figures: rows of the tables and names of the figures, so that the next report knows its own files."""


def report(folders: Sequence[Path], out: Path, *, methods: int = MOST_METHODS) -> dict[str, Any]:
    """Write the page `out`, and beside it, in a folder of the same name, PNG figures, tables.md and report.json.

    A trade-off draws at most so many `methods`. Returns the rows of the tables, the names of the figures, the number of
    runs and what was left out.
    """
    if methods < 2:
        raise SelfJudgeError(f"`methods` must be at least 2, exact and another, not {methods}")
    check_page(out)
    beside = out.with_suffix("")
    earlier = _earlier_figures(beside)
    results = read_results(folders)
    tables, charts = make_tables(results), make_charts(results, methods)
    first = make_verdict(results.runs)
    if first is not None:
        tables = {"verdict": [first.table], **tables}
        charts = {"verdict": [first.chart], **charts}
    drawings = {chart.id: draw(chart) for section in charts.values() for chart in section}
    text = render_report(results, tables, charts, drawings, () if first is None else first.sentences)
    every = [table for section in tables.values() for table in section]
    summary: dict[str, Any] = {
        "runs": len(results.runs),
        "figures": [f"{name}.png" for name in drawings],
        "left_out": [{"folder": place, "why": why} for place, why in results.skipped],
        "tables": {table.id: list(table.rows) for table in every},
    }
    try:
        beside.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            (beside / f"{name}.png").write_bytes(drawing.png)
        for name in earlier - set(summary["figures"]):
            (beside / name).unlink(missing_ok=True)
        write_text(beside / "tables.md", "\n".join(table.markdown() for table in every))
        write_json(beside / RECORD, summary)
        write_text(out, text)
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}") from None
    return summary


def _earlier_figures(folder: Path) -> set[str]:
    """The figures that an earlier report left in its folder; a folder with other files is an error."""
    if folder.is_file():
        raise SelfJudgeError(f"cannot use {folder} as a folder: it is a file; name another page with `out`")
    if not folder.is_dir() or not any(folder.iterdir()):
        return set()
    if not (folder / RECORD).is_file():
        raise SelfJudgeError(f"{folder} is where the figures go and holds other files: name another page with `out`")
    names = read_json(folder / RECORD, ReportRecord).get("figures", [])
    return {name for name in names if name.endswith(".png") and Path(name).name == name}


@dataclass(frozen=True)
class Section:
    """A section as the template shows it, which also explains it."""

    id: str
    heading: str
    legend: Sequence[tuple[str, Markup]] = ()
    figures: Sequence[tuple[Chart, Markup]] = ()
    tables: Sequence[Table] = ()


def render_report(
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
    """Answers for the viewer, by run."""
    return {
        "runs": [
            {
                "group": name_task(pair, task, runs)[0],
                "name": f"{run.rule}, γ = {run.gamma}",
                "examples": [_viewer_example(example) for example in run.examples],
            }
            for (pair, task), here in group_by_task(runs).items()
            for run in here
            if run.examples
        ]
    }


def _viewer_example(example: AnswerExample) -> dict[str, Any]:
    """A token is a list: text, origin, target's choice, p, p of the choice, judge's score, cycle."""
    tokens = [
        [
            t.get("text") or "",
            t["origin"],
            t.get("choice") or "",
            *(t.get(k) for k in ("p", "p_choice", "judge", "cycle")),
        ]
        for t in example["tokens"]
    ]
    prompt = str(example.get("prompt") or "")
    return {"id": example["id"], "prompt": prompt, "score": example.get("score"), "tokens": tokens}


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
    for name, heading in SECTIONS.items():
        own_charts, own_tables = charts.get(name, ()), tables.get(name, ())
        if own_charts or own_tables or (name == "viewer" and any(run.examples for run in results.runs)):
            figures = [(chart, drawings[chart.id].svg) for chart in own_charts]
            sections.append(Section(name, heading, draw_legend(own_charts), figures, own_tables))
    return sections
