"""Result folders → one self-contained page, figures and tables. Reads files only; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.report.charts import MOST_METHODS, make_charts
from selfjudge.report.draw import draw
from selfjudge.report.page import render_report
from selfjudge.report.read import read_results
from selfjudge.report.tables import make_tables
from selfjudge.report.verdict import make_verdict
from selfjudge.store import check_page, read_json, write_json, write_text
from selfjudge.store.artefacts import ReportRecord

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
