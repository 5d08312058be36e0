"""Charts as inline SVG. Colours are CSS classes (`s0` … of the page's style sheet), so light, dark and print need no second drawing.

No meaning hangs on colour alone: every style has its own mark and dash as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

from selfjudge.report.plots import DASHES, MARKS, PALETTE, Bars, Chart, Lines, Series

WIDTH, HEIGHT = 460, 310
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 12, 44
BAR, GAP = 20, 8
LETTER = 6.4
"""Width of a letter of the charts' small print, roughly."""

Scale = Callable[[float], float]


def svg(chart: Chart) -> str:
    return _lines(chart) if isinstance(chart, Lines) else _bars(chart)


def look(style: int) -> tuple[str, str, str]:
    """(class, mark, dash) of a style: nine colours, six marks, four dashes."""
    colour = style if style < len(PALETTE) else 1 + (style - 1) % (len(PALETTE) - 1)
    return f"s{colour}", MARKS[style % len(MARKS)], DASHES[(style // 3) % len(DASHES)] if style else DASHES[2]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most about `most`."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / most))
    step *= next(f for f in (1, 2, 2.5, 5, 10) if span / (step * f) <= most)
    return [round(step * i, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick: 12, 0.25, 7.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}".replace("-", "−")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with a margin."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or max(0.5, abs(high) * 0.05)
    return low - margin, high + margin


def _axes(chart: Lines) -> tuple[Scale, Scale, list[float], list[float]]:
    every = [p for s in chart.series for p in s.points if chart.sees(p)]
    ys = [*(p.y for p in every), *([] if chart.level is None else [chart.level])]
    (x_low, x_high), (y_low, y_high) = (
        ((0.0, 1.0), (0.0, 1.0)) if chart.unit else (spread([p.x for p in every]), spread(ys))
    )
    if chart.log_x:
        x_low, x_high = min(p.x for p in every) / 1.2, max(p.x for p in every) * 1.2
        tens = range(math.floor(math.log10(x_low)), math.ceil(math.log10(x_high)) + 1)
        marks = [f * 10.0**t for t in tens for f in (1, 3) if x_low <= f * 10.0**t <= x_high]
    elif len({p.x for p in every}) <= 8 and all(float(p.x).is_integer() for p in every) and chart.x == "γ":
        marks = sorted({p.x for p in every})
    else:
        marks = ticks(x_low, x_high)

    def along(value: float) -> float:
        share = (
            math.log(value / x_low) / math.log(x_high / x_low) if chart.log_x else (value - x_low) / (x_high - x_low)
        )
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def up(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    return along, up, marks, ticks(y_low, y_high)


def _lines(chart: Lines) -> str:
    x, y, x_ticks, y_ticks = _axes(chart)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    if chart.band is not None:
        top, low = (min(bottom, max(TOP, y(value))) for value in (chart.band[1], chart.band[0]))
        parts.append(f'<rect class="band" x="{LEFT}" y="{top}" width="{right - LEFT}" height="{low - top:.1f}"/>')
    for value in x_ticks:
        parts.append(f'<path class="grid" d="M{x(value)} {TOP}V{bottom}"/><text x="{x(value)}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')  # fmt: skip
    for value in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value)}H{right}"/><text x="{LEFT - 7}" y="{y(value) + 4}" text-anchor="end">{number(value)}</text>')  # fmt: skip
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    if chart.unit:
        parts.append(f'<path class="diagonal" d="M{x(0)} {y(0)}L{x(1)} {y(1)}"/>')
    parts.append(f'<text class="name" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x)}</text>')  # fmt: skip
    middle = (TOP + bottom) / 2
    parts.append(f'<text class="name" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">{escape(chart.y)}</text>')  # fmt: skip
    if chart.level is not None:
        parts.append(f'<path class="level" d="M{LEFT} {y(chart.level)}H{right}"/>')
    if not all(chart.sees(p) for s in chart.series for p in s.points):
        parts.append(f'<clipPath id="{chart.id}-view"><path d="M{LEFT} {TOP}H{right}V{bottom}H{LEFT}z"/></clipPath>')
    parts += [_series(chart, series, x, y) for series in chart.series]
    return _whole(chart, HEIGHT, parts, _told(chart))


def _series(chart: Lines, series: Series, x: Scale, y: Scale) -> str:
    colour, mark, dash = look(series.style)
    parts = [f'<g class="{colour}">']
    seen = [p for p in series.points if chart.sees(p)]
    if len(series.points) > 1:
        path = "L".join(f"{x(p.x)} {y(p.y)}" for p in series.points)
        view = "" if len(seen) == len(series.points) else f' clip-path="url(#{chart.id}-view)"'
        parts.append(f'<path class="line" d="M{path}"' + (f' stroke-dasharray="{dash}"' if dash else "") + f"{view}/>")
    for point in seen if series.marked else ():
        parts.append(f'<path class="mark" d="{_mark(mark, x(point.x), y(point.y))}"><title>{escape(point.label)}</title></path>')  # fmt: skip
        if point.tag:
            below = 14 if series.style % 2 else -7  # neighbours do not write into the same place
            parts.append(f'<text class="tag" x="{x(point.x)}" y="{y(point.y) + below}" text-anchor="middle">{escape(point.tag)}</text>')  # fmt: skip
    return "".join([*parts, "</g>"])


def _mark(kind: str, x: float, y: float, r: float = 4) -> str:
    """A path around (x, y)."""
    x, y = round(x, 1), round(y, 1)
    return {
        "circle": f"M{x - r} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{x - r + 0.5} {y - r + 0.5}h{2 * r - 1}v{2 * r - 1}h{1 - 2 * r}z",
        "triangle": f"M{x} {y - r - 0.5}l{r + 0.5} {2 * r}h{-2 * r - 1}z",
        "diamond": f"M{x} {y - r - 1}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
        "down": f"M{x} {y + r + 0.5}l{r + 0.5} {-2 * r}h{-2 * r - 1}z",
        "plus": f"M{x - 1.5} {y - r}h3v{r - 1.5}h{r - 1.5}v3h{1.5 - r}v{r - 1.5}h-3v{1.5 - r}h{1.5 - r}v-3h{r - 1.5}z",
    }[kind]


def _bars(chart: Bars) -> str:
    longest = max(len(label) for label, _ in chart.rows)
    fits = min(28, longest)
    left = 14 + LETTER * fits
    height = TOP + len(chart.rows) * (BAR + GAP) + BOTTOM
    bottom, right = height - BOTTOM, WIDTH - RIGHT - (0 if chart.shares else 62)
    most = 1.0 if chart.shares else max(sum(values) for _, values in chart.rows) or 1.0

    def x(value: float) -> float:
        return round(left + value / most * (right - left), 1)

    parts = []
    for value in ticks(0, most, 5):
        shown = f"{100 * value:g} %" if chart.shares else number(value)
        parts.append(f'<path class="grid" d="M{x(value)} {TOP}V{bottom}"/><text x="{x(value)}" y="{bottom + 16}" text-anchor="middle">{shown}</text>')  # fmt: skip
    for row, (label, values) in enumerate(chart.rows):
        top = TOP + row * (BAR + GAP)
        short = label if len(label) <= fits else label[: fits - 1] + "…"
        parts.append(f'<text x="{left - 7}" y="{top + BAR - 6}" text-anchor="end">{escape(short)}<title>{escape(label)}</title></text>')  # fmt: skip
        done = 0.0
        for style, (name, value) in enumerate(zip(chart.names, values, strict=True), 1):
            if not value:
                continue
            wide = x(done + value) - x(done)
            said = f"{100 * value:.1f} %" if chart.shares else f"{value:,.0f}"
            parts.append(f'<rect class="bar {look(style)[0]}" x="{x(done)}" y="{top}" width="{max(0.5, wide):.1f}" height="{BAR}"><title>{escape(f"{label}: {name} {said}")}</title></rect>')  # fmt: skip
            inside = f"{name} {100 * value:.0f} %" if chart.shares else ""
            if inside and LETTER * len(inside) + 6 < wide:
                parts.append(f'<text class="inside" x="{x(done) + wide / 2:.1f}" y="{top + BAR - 6}" text-anchor="middle">{inside}</text>')  # fmt: skip
            done += value
        if not chart.shares:
            parts.append(f'<text x="{x(done) + 6}" y="{top + BAR - 6}">{done:,.0f}</text>')
    parts.append(f'<path class="axis" d="M{left} {TOP}V{bottom}"/>')
    parts.append(f'<text class="name" x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">{escape(chart.x)}</text>')  # fmt: skip
    rows = "; ".join(f"{label}: " + ", ".join(f"{n} {v:.3g}" for n, v in zip(chart.names, values, strict=True)) for label, values in chart.rows)  # fmt: skip
    return _whole(chart, height, parts, rows)


def _told(chart: Lines) -> str:
    """The chart in words, for those who do not see it."""
    ends = (
        f"{s.name}: {number(round(s.points[0].x, 2))}, {number(round(s.points[0].y, 2))}"
        + (f" to {number(round(s.points[-1].x, 2))}, {number(round(s.points[-1].y, 2))}" if len(s.points) > 1 else "")
        for s in chart.series
        if s.points
    )
    return f"{chart.y} against {chart.x}. " + "; ".join(ends)


def _whole(chart: Chart, height: float, parts: Sequence[str], told: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{chart.id}-t {chart.id}-d">'
        f'<title id="{chart.id}-t">{escape(chart.title)}</title><desc id="{chart.id}-d">{escape(told)}</desc>{"".join(parts)}</svg>'
    )


def legend(charts: Sequence[Chart]) -> list[tuple[str, Markup]]:
    """One list for all charts of a section: name, and line and mark of each style; boxes where they are bars."""
    shown: dict[str, int] = {}
    for chart in charts:
        if isinstance(chart, Lines):
            shown |= {s.name: s.style for s in chart.series}
        elif len(chart.names) > 1:
            shown |= {name: style for style, name in enumerate(chart.names, 1)}
    boxes = all(isinstance(chart, Bars) for chart in charts)
    return [(name, Markup(_swatch(style, boxes))) for name, style in shown.items()]  # noqa: S704


def _swatch(style: int, box: bool) -> str:
    colour, mark, dash = look(style)
    drawn = (
        '<rect class="bar" x="9" y="2" width="12" height="12"/>' if box
        else f'<path class="line" d="M0 8H30"{f""" stroke-dasharray="{dash}" """ if dash else ""}/><path class="mark" d="{_mark(mark, 15, 8)}"/>'
    )  # fmt: skip
    return f'<svg class="swatch {colour}" viewBox="0 0 30 16" aria-hidden="true">{drawn}</svg>'
