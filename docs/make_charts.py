"""Draw the charts of docs/results.md, one a pair, from files of results/: `python docs/make_charts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfjudge.report.charts import Bars, Chart, Lines, Point, Series
from selfjudge.report.draw import draw
from selfjudge.report.records import title

DOCS = Path(__file__).parent
SPEED = DOCS.parent / "results/drafts/qwen2.5-coder-1.5b/h200-speed.json"
TRADE_OFF = DOCS.parent / "results/judges/smollm2-135m/tradeoff.json"
LINES = {"judged@smollm2-135m": "judged (ships)", "margin": "margin", "random": "at random"}


def qwen() -> Chart:
    """Tokens per second of plain decoding, and what `exact` with the head adds."""
    runs: list[dict[str, Any]] = json.loads(SPEED.read_text())["speed"]
    mine = [run for run in runs if (run["draft"], run["gamma"]) in (("shipped", 0), ("eagle3", "auto"))]
    rates = {(run["task"], run["gamma"]): run["tokens_per_second"] for run in mine}
    tasks = dict.fromkeys(run["task"] for run in mine)
    rows = {task: (rates[task, 0], rates[task, "auto"] - rates[task, 0]) for task in tasks}
    ratios = [sum(row) / row[0] for row in rows.values()]
    finding = f"Qwen2.5-Coder-1.5B: exact is {min(ratios):.1f} to {max(ratios):.1f} times plain decoding"
    names = ("plain", "more with exact and the head")
    labelled = tuple((title(task), row) for task, row in rows.items())
    return Bars("qwen2.5-coder-1.5b", finding, "tokens/s at batch 1, one H200", labelled, names)


def smollm2() -> Chart:
    """The share of GSM8K answers that stay the target's own, against the gain in m."""
    runs: list[dict[str, Any]] = [run for run in json.loads(TRADE_OFF.read_text())["runs"] if run["task"] == "gsm8k"]
    (exact,) = (run["mean_accepted_length"] for run in runs if run["rule"] == "exact")
    series = []
    for style, (rule, name) in enumerate(LINES.items(), 1):
        points = sorted(
            (100 * (r["mean_accepted_length"] / exact - 1), 100 * r["agreement"]) for r in runs if r["rule"] == rule
        )
        series.append(Series(name, style, tuple(Point(x, y) for x, y in points)))
    finding = "SmolLM2-135M: from +7 % m on, at most one answer in three stays the target's"
    if any(point.x >= 7 and point.y > 100 / 3 for line in series for point in line.points):
        raise SystemExit(f"no longer true: {finding}")
    return Lines("smollm2-135m", finding, "gain in m against exact, %", "same GSM8K answers, %", tuple(series))


if __name__ == "__main__":
    for chart in (qwen(), smollm2()):
        (DOCS / f"{chart.id}.png").write_bytes(draw(chart).png)
