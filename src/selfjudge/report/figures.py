"""The charts as PNG files, for use elsewhere; needs matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from selfjudge.report.charts import look, spread
from selfjudge.report.plots import PALETTE, Bars, Chart, Lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 48
"""Letters of a text in a figure."""
MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "plus": "P"}


def draw(charts: Iterable[Chart], folder: Path) -> list[str]:
    """Names of the files drawn; none where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = []
    for chart in charts:
        tall = 3.6 if isinstance(chart, Lines) else 1.3 + 0.34 * len(chart.rows)
        figure = Figure(figsize=(5.6, tall), layout="constrained")
        axes = figure.subplots()
        _lines(axes, chart) if isinstance(chart, Lines) else _bars(axes, chart)
        axes.set_title(_plain(chart.title), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        names.append(f"{chart.id}.png")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # letters that its fonts lack are boxes, and nobody's concern
            figure.savefig(folder / names[-1], dpi=150)
    return names


def _plain(text: str) -> str:
    """Text of bounded length in which matplotlib sees no formula."""
    return (text if len(text) <= LONGEST else text[: LONGEST - 1] + "…").replace("$", r"\$")


def _colour(style: int) -> str:
    return PALETTE[int(look(style)[0][1:])][0]


def _dashes(style: int) -> tuple[int, tuple[float, ...] | None]:
    dash = look(style)[2]
    return 0, tuple(float(part) / 1.5 for part in dash.split()) if dash else None


def _lines(axes: Axes, chart: Lines) -> None:
    named: set[str] = set()
    for series in chart.series:
        xs, ys = [p.x for p in series.points], [p.y for p in series.points]
        axes.plot(
            xs, ys, color=_colour(series.style), linestyle=_dashes(series.style), linewidth=1.5, markersize=5,
            marker=MARKERS[look(series.style)[1]] if series.marked else None,
            label=None if series.name in named else _plain(series.name),
        )  # fmt: skip
        named.add(series.name)
        for point in series.points:
            if point.tag and chart.sees(point):
                axes.annotate(_plain(point.tag), (point.x, point.y), (4, 4), textcoords="offset points", fontsize=8)
    seen = [p for s in chart.series for p in s.points if chart.sees(p)]
    if len(seen) < sum(len(s.points) for s in chart.series):
        axes.set_xlim(*spread([p.x for p in seen]))
        axes.set_ylim(*spread([*(p.y for p in seen), *([] if chart.level is None else [chart.level])]))
    if chart.level is not None:
        axes.axhline(chart.level, color=_colour(0), linewidth=1, linestyle=":", zorder=0)
    if chart.band is not None:
        low, high = axes.get_ylim()
        axes.axhspan(*chart.band, color=_colour(0), alpha=0.08, linewidth=0)
        axes.set_ylim(low, high)
    if chart.unit:
        axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    if chart.log_x:
        axes.set_xscale("log")
    axes.set(xlabel=_plain(chart.x), ylabel=_plain(chart.y))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)


def _bars(axes: Axes, chart: Bars) -> None:
    labels = [_plain(label) for label, _ in chart.rows]
    done = [0.0] * len(labels)
    for style, name in enumerate(chart.names, 1):
        values = [row[style - 1] for _, row in chart.rows]
        if any(values):
            axes.barh(range(len(labels)), values, left=done, color=_colour(style), label=_plain(name), height=0.7)
        done = [a + b for a, b in zip(done, values, strict=True)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(_plain(chart.x))
    if len(chart.names) > 1:
        axes.figure.legend(fontsize=8, frameon=False, ncols=len(chart.names), loc="outside lower center")
