"""Charts → pictures: each is drawn once by matplotlib, as SVG for the page and as PNG for other uses.

In the SVG text stays text, and marks have tooltips. Colours are the page's CSS variables, so light, dark and print
need no second drawing. Colour is never the only difference: every style has its own mark and dash."""

from __future__ import annotations

import io
import json
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from selfjudge.report.charts import Chart, Point, Series
from selfjudge.report.formats import show_number
from selfjudge.store import read_asset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = json.loads(read_asset("selfjudge.report", "colours.json"))
PALETTE: list[tuple[str, str]] = COLOURS["series"]  # (light, dark) of each style; style 0 is `exact`
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ((), (6, 3), (2, 3), (8, 3, 2, 3))
SOFT, PAPER = COLOURS["page"]["soft"], COLOURS["page"]["paper"]
VARIABLES = {
    **{light: f"var(--s{i})" for i, (light, _) in enumerate(PALETTE)},
    **{colour: f"var(--{name})" for name, colour in COLOURS["page"].items()},
}
STYLE = Path(__file__).with_name("assets") / "chart.mplstyle"
WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 46  # sizes of a drawing, in points
LETTER = 7.0  # approximate width of a letter, in points
LONGEST_TEXT, LONGEST_TITLE = 48, 76
KEPT = ("fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor", "font-weight", "font-size")
"""Style properties that become attributes: the page's content policy forbids style attributes."""
Tooltips = dict[str, list[str]]  # id of a group of marks → the tooltip of each


@dataclass(frozen=True)
class Drawing:
    svg: Markup
    png: bytes


def draw(chart: Chart) -> Drawing:
    """The chart as SVG without its title, which the page has beside it, and as PNG with it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that matplotlib's fonts lack are boxes in the PNG
        labels = [_shorten(series.name) for series in chart.series if len(chart.series) > 1]
        columns = max(1, min(len(labels), int(WIDTH / (LETTER * max(map(len, labels), default=1) + 40))))
        below = BOTTOM + (17 * -(-len(labels) // columns) + 8 if labels else 0)
        height = HEIGHT - BOTTOM + below
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        size = (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / height
        axes = figure.add_axes((LEFT / WIDTH, below / height, *size))
        tooltips = _draw_lines(axes, chart)
        if labels:
            handles: list[Any] = [(_line([], [], s.style), _marks([], [], s.style, markersize=6)) for s in chart.series]
            figure.legend(handles, labels, loc="lower center", ncols=columns, borderaxespad=0.2, labelspacing=0.3)
        svg = _svg(figure, tooltips, chart.id)
        svg.attrib |= {"role": "img", "aria-labelledby": f"{chart.id}-t {chart.id}-d"}
        for place, (tag, text) in enumerate((("title", chart.title), ("desc", chart.description))):
            svg.insert(place, element := ET.Element(tag, id=f"{chart.id}-{tag[0]}"))
            element.text = _printable(text)
        axes.set_title(_shorten(chart.title, LONGEST_TITLE), fontsize=10, y=1.02)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.1)
        return Drawing(Markup(ET.tostring(svg, encoding="unicode")), png.getvalue())  # noqa: S704 - texts are escaped


def _colour(style: int) -> str:
    return PALETTE[style if style < len(PALETTE) else 1 + (style - 1) % (len(PALETTE) - 1)][0]


def _line(xs: Sequence[float], ys: Sequence[float], style: int, **more: Any) -> Any:
    from matplotlib.lines import Line2D

    dashes = DASHES[(style // 3) % len(DASHES)] if style else DASHES[2]
    dashed: Any = (0, tuple(d / 1.6 for d in dashes)) if dashes else "-"
    return Line2D(xs, ys, color=_colour(style), linestyle=dashed, **{"clip_on": False, **more})


def _marks(xs: Sequence[float], ys: Sequence[float], style: int, **more: Any) -> Any:
    from matplotlib.lines import Line2D

    look = {"marker": MARKERS[style % len(MARKERS)], "markersize": 8, "markeredgecolor": PAPER, "clip_on": False}
    return Line2D(xs, ys, color=_colour(style), linestyle="none", **{**look, **more})


def _draw_lines(axes: Axes, chart: Chart) -> Tooltips:
    tooltips: Tooltips = {}
    _set_axes(axes, chart)
    low, high = axes.get_ylim()
    if chart.level is not None:
        axes.axhline(chart.level, color=SOFT, linewidth=1, linestyle=(0, (2, 4)), clip_on=False)
    for place, series in enumerate(chart.series):
        points = series.points
        if len(points) > 1:
            axes.add_line(_line(*_coordinates(points), series.style, gid=f"line-{place}"))
        if points and series.marked:
            axes.add_line(_marks(*_coordinates(points), series.style, gid=f"mark-{place}", zorder=3))
            tooltips[f"mark-{place}"] = [p.label for p in points]
            _draw_tags(axes, series, f"tag-{place}")
        for point in (p for p in points if p.interval is not None):
            ends = [max(low, min(high, end)) for end in point.interval or ()]
            axes.plot([point.x] * 2, ends, color=_colour(series.style), linewidth=1.2, zorder=2, clip_on=False)
    return tooltips


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [p.x for p in points], [p.y for p in points]


def _draw_tags(axes: Axes, series: Series, gid: str) -> None:
    for point in (p for p in series.points if p.tag):
        below = -14 if series.style % 2 else 7  # neighbouring series do not write into the same place
        axes.annotate(
            _shorten(point.tag), (point.x, point.y), (0, below), textcoords="offset points", ha="center",
            weight="bold", color=_colour(series.style), gid=gid, zorder=4,
        )  # fmt: skip


def _set_axes(axes: Axes, chart: Chart) -> None:
    """Limits that hold every point; round ticks and names."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    points = [p for s in chart.series for p in s.points]
    ends = [end for p in points for end in p.interval or ()]
    levels = [] if chart.level is None else [chart.level]
    axes.set_xlim(*_with_margin([p.x for p in points]))
    axes.set_ylim(*_with_margin([*(p.y for p in points), *ends, *levels]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: show_number(value)))
    axes.set(xlabel=_shorten(chart.x), ylabel=_shorten(chart.y))
    axes.yaxis.set_label_coords(-(LEFT - 14) / (WIDTH - LEFT - RIGHT), 0.5)
    axes.grid(clip_on=False)


def _with_margin(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values, a little wider."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or max(0.5, abs(high) * 0.05)
    return low - margin, high + margin


def _shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    text = _printable(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _printable(text: str) -> str:
    """Text that every XML parser accepts."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _svg(figure: Figure, tooltips: Tooltips, prefix: str) -> ET.Element:
    """The figure as an element of the page: attributes instead of styles, the page's colours, ids with a prefix."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", file.getvalue()).replace("xlink:href", "href")
    svg = ET.fromstring(text)  # noqa: S314 - matplotlib wrote it just now
    for parent in svg.iter():
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    for element in svg.iter():
        name, tips = element.get("id", ""), tooltips.get(element.get("id", ""), ())
        for mark, tip in zip(element.iter("use"), tips, strict=False):
            ET.SubElement(mark, "title").text = _printable(tip)
        element.attrib = _attributes(element, prefix)
        if re.fullmatch(r"(line|mark|tag)-\d+", name):
            element.set("class", name.partition("-")[0])
    svg.attrib = {"class": "chart", "viewBox": svg.get("viewBox", "")}
    return svg


def _attributes(element: ET.Element, prefix: str) -> dict[str, str]:
    kept = {name: _short(value) for name, value in element.attrib.items() if name not in ("style", "id")}
    style = dict(part.split(": ", 1) for part in element.get("style", "").split("; ") if ": " in part)
    kept |= {name: VARIABLES.get(style[name], style[name]) for name in KEPT if name in style}
    if element.tag in ("path", "clipPath") and "id" in element.attrib:
        kept["id"] = f"{prefix}-{element.get('id')}"
    return kept | {key: kept[key].replace("#", f"#{prefix}-") for key in ("href", "clip-path") if key in kept}


def _short(text: str) -> str:
    """Numbers to two digits."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{round(float(found[0]), 2) + 0.0:g}", " ".join(text.split()))
