"""Result folders → one self-contained HTML page, and tables. Reads files only; needs no torch. Jinja escapes every text
from a result. A content policy allows the page's script and style sheet by their hashes, so that an unescaped text
could not run. Tables and charts work without the script."""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from selfjudge.errors import SelfJudgeError
from selfjudge.report.charts import SECTIONS, make_charts
from selfjudge.report.draw import PALETTE, draw
from selfjudge.report.formats import describe_choice, fixed, points, signed_points
from selfjudge.report.records import EvalRun, group_by_task, name_task, read_results, rule_order, task_order, task_title
from selfjudge.report.tables import make_tables, number_ids
from selfjudge.report.verdict import make_verdict
from selfjudge.store import check_page, hash_source, read_asset, write_text
from selfjudge.store.files import make_templates
from selfjudge.store.schema import AnswerExample

Content = dict[str, Any]
TABLES = "tables.md"  # a folder that holds it is one of a report


def report(folders: Sequence[Path], out: Path) -> Content:
    """Write the page `out` and, in a folder of its name, tables.md. Returns its rows, runs and what was left out."""
    check_page(out)
    beside = out.with_suffix("")
    if beside.is_dir() and any(beside.iterdir()) and not (beside / TABLES).is_file():
        raise SelfJudgeError(f"{beside} is where {TABLES} goes and holds other files: name another page with `out`")
    runs, skipped = read_results(folders)
    tables, verdict = make_tables(runs), make_verdict(runs)
    by_task = {section: make_charts(runs, section) for section in SECTIONS}
    charts = number_ids({"verdict": [verdict.chart] if verdict else [], **by_task})
    drawings = {chart.id: draw(chart) for chart in chain.from_iterable(charts.values())}
    viewer = _viewer_data(runs)
    text = render(
        "report.html",
        **_describe_runs(runs),
        shown=[*tables, *charts, *(["viewer"] if viewer else [])],
        tables=tables,
        charts=charts,
        drawings=drawings,
        verdict=verdict,
        skipped=skipped,
        data={"runs": viewer},
    )
    every = list(chain.from_iterable(tables.values()))
    try:
        beside.mkdir(parents=True, exist_ok=True)
        write_text(beside / TABLES, "\n".join(table.markdown() for table in every))
        write_text(out, text)
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}") from None
    return {
        "runs": len(runs),
        "left_out": [{"folder": place, "why": why} for place, why in skipped.items()],
        "tables": {table.id: list(table.rows) for table in every},
    }


def render(template: str, **values: Any) -> str:
    """A page from a template of assets/, with the style sheet and the script in it; `data` is what the script reads."""
    colours = "".join(f"--s{i}:light-dark({light},{dark});" for i, (light, dark) in enumerate(PALETTE))
    style = read_asset("selfjudge.report", "page.css") + f":root{{{colours}}}"
    script = read_asset("selfjudge.report", "page.js")
    text = _templates().get_template(template).render({"style": style, "script": script, "data": {}, **values})
    return text.encode("utf-8", "replace").decode()  # halves of characters become question marks


@cache
def _templates() -> Environment:
    templates = make_templates(loader=PackageLoader("selfjudge.report", "assets"), autoescape=True)
    templates.globals.update(fixed=fixed, points=points, signed_points=signed_points)
    templates.filters["breakable"] = lambda text: Markup("<wbr>").join(re.split(r"(?<=[,:@])", text))
    templates.filters["describe_choice"] = describe_choice
    templates.filters["hash_source"] = hash_source
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return templates


def _viewer_data(runs: Sequence[EvalRun]) -> list[Content]:
    """Answers for the viewer, by run."""
    return [
        {
            "group": name_task(pair, task, runs)[0],
            "name": f"{run.rule}, γ = {run.gamma}",
            "examples": list(map(_viewer_example, run.examples)),
        }
        for (pair, task), here in group_by_task(runs).items()
        for run in here
        if run.examples
    ]


def _viewer_example(example: AnswerExample) -> Content:
    """A token is a list: text, origin, target's choice, p, p of the choice, judge's score, cycle."""
    numbers = ("p", "p_choice", "judge", "cycle")
    every = example["tokens"]
    tokens = [[t.get("text") or "", t["origin"], t.get("choice") or "", *map(t.get, numbers)] for t in every]
    prompt = str(example.get("prompt") or "")
    return {"id": example["id"], "prompt": prompt, "score": example.get("score"), "tokens": tokens}


def _describe_runs(runs: Sequence[EvalRun]) -> Content:
    """The page's title and lead, and the tasks and rules of its filter."""
    methods: dict[str, list[str]] = defaultdict(list)
    for run in sorted(runs, key=rule_order):
        if run.rule not in methods[run.method]:
            methods[run.method].append(run.rule)
    tasks = sorted({run.task for run in runs}, key=task_order)
    dates = sorted({run.date[:10] for run in runs} - {""})
    machines = sorted({run.machine for run in runs} - {""})
    names = ", ".join(map(task_title, tasks))
    days = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    return {
        "title": f"Evaluation of {', '.join(sorted({run.pair for run in runs}))}",
        "lead": ". ".join(filter(None, (f"Runs: {len(runs)}. Tasks: {names}", "; ".join(machines), days))) + ".",
        "tasks": [(task, task_title(task)) for task in tasks],
        "methods": methods,
    }
