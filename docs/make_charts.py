"""Draw the charts of docs/results.md, one a pair, from files of results/: `python docs/make_charts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from selfjudge.report.charts import Chart, Point, Series
from selfjudge.report.draw import PALETTE, STYLE, make_figure
from selfjudge.report.records import task_title

DOCS = Path(__file__).parent
SPEED = DOCS.parent / "results/drafts/qwen2.5-coder-1.5b/h200-speed.json"
TRADE_OFF = DOCS.parent / "results/judges/smollm2-135m/tradeoff.json"
LINES = {"judged@smollm2-135m": "judged (ships)", "margin": "margin", "random": "at random"}


def draw_qwen(file: Path) -> None:
    """Tokens per second of plain decoding, and what `exact` with the head adds."""
    runs: list[dict[str, Any]] = json.loads(SPEED.read_text())["speed"]
    mine = [run for run in runs if (run["draft"], run["gamma"]) in (("shipped", 0), ("eagle3", "auto"))]
    rates = {(run["task"], run["gamma"]): run["tokens_per_second"] for run in mine}
    tasks = dict.fromkeys(run["task"] for run in mine)
    rows = {task: (rates[task, 0], rates[task, "auto"] - rates[task, 0]) for task in tasks}
    ratios = [sum(row) / row[0] for row in rows.values()]
    finding = f"Qwen2.5-Coder-1.5B: exact is {min(ratios):.1f} to {max(ratios):.1f} times plain decoding"
    figure = Figure(figsize=(6.4, 0.39 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    names = [task_title(task) for task in rows]
    plain, added = zip(*rows.values(), strict=True)
    axes.barh(names, plain, 0.7, label="plain", color=PALETTE[1][0])
    bars = axes.barh(names, added, 0.7, plain, label="more with exact and the head", color=PALETTE[2][0])
    axes.bar_label(bars, [f"{sum(row):,.0f}" for row in rows.values()], padding=6)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set(xlabel="tokens/s at batch 1, one H200", title=finding)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=150)


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
    return Chart("smollm2-135m", finding, "gain in m against exact, %", "same GSM8K answers, %", tuple(series))


if __name__ == "__main__":
    draw_qwen(DOCS / "qwen2.5-coder-1.5b.png")
    with rc_context(fname=STYLE):
        drawn = make_figure(chart := smollm2())
        drawn.axes[0].set_title(chart.title, fontsize=10)
        drawn.savefig(DOCS / "smollm2-135m.png", dpi=150, facecolor="white", bbox_inches="tight")
