"""Charts → SVG by matplotlib: text stays text, and marks have tooltips. Colours are the page's CSS variables, for
light, dark and print. Every style has a mark and dash of its own: colour is never the only difference."""

from __future__ import annotations

import io
import json
import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from selfjudge.report.charts import Chart, Series
from selfjudge.store import read_asset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = json.loads(read_asset("selfjudge.report", "colours.json"))
PALETTE: list[tuple[str, str]] = COLOURS["series"]  # (light, dark) of each style; style 0 is `exact`
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1.2, 2)), (0, (5, 2, 1.2, 2)))
SOFT, PAPER = COLOURS["page"]["soft"], COLOURS["page"]["paper"]
VARIABLES = {
    **{light: f"var(--s{i})" for i, (light, _) in enumerate(PALETTE)},
    **{colour: f"var(--{name})" for name, colour in COLOURS["page"].items()},
}
STYLE = Path(__file__).with_name("assets") / "chart.mplstyle"
LETTERS = 52  # letters that the width of a drawing has room for
KEPT = ("fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor", "font-weight", "font-size")
"""Style properties that become attributes: the page's content policy forbids style attributes."""


def draw(chart: Chart) -> Markup:
    """The chart as SVG without its title, which the page has beside it."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that matplotlib's fonts lack: the page has its own
        svg = _make_svg(make_figure(chart), chart)
    return Markup(ET.tostring(svg, encoding="unicode"))  # noqa: S704 - texts are escaped


def make_figure(chart: Chart) -> Figure:
    """The chart as a figure of matplotlib, to be made and saved under the settings of STYLE."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    if chart.level is not None:
        axes.axhline(chart.level, color=SOFT, linewidth=1, linestyle=(0, (2, 4)))
    lines = [_draw_series(axes, series, f"marks-{number}") for number, series in enumerate(chart.series)]
    axes.set(xlabel=_shorten(chart.x), ylabel=_shorten(chart.y))
    if len(lines) > 1:
        names = [_shorten(series.name) for series in chart.series]
        figure.legend(lines, names, loc="outside lower center", ncols=max(1, LETTERS // (max(map(len, names)) + 6)))
    return figure


def _draw_series(axes: Axes, series: Series, name: str) -> Any:
    """A line with its marks, intervals and tags; in the SVG the marks are the group `name`."""
    style, points = series.style, series.points
    colour = PALETTE[style if style < len(PALETTE) else 1 + (style - 1) % (len(PALETTE) - 1)][0]
    (line,) = axes.plot(
        [p.x for p in points], [p.y for p in points], color=colour, markeredgecolor=PAPER, clip_on=False, gid=name,
        linestyle=DASHES[style // 3 % len(DASHES)] if style else DASHES[2],
        marker=MARKERS[style % len(MARKERS)] if series.marked else "",
    )  # fmt: skip
    for point in points:
        if point.interval is not None:
            axes.vlines(point.x, *point.interval, color=colour, linewidth=1.2)
        if point.tag:
            place = (0, -14 if style % 2 else 7)  # neighbouring series do not write into the same place
            axes.annotate(
                _printable(point.tag), (point.x, point.y), place, textcoords="offset points", ha="center",
                weight="bold", color=colour,
            )  # fmt: skip
    return line


def _shorten(text: str, longest: int = 48) -> str:
    text = _printable(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _printable(text: str) -> str:
    """Text that every XML parser accepts."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _make_svg(figure: Figure, chart: Chart) -> ET.Element:
    """The figure as an element of the page: attributes instead of styles, the page's colours, ids of its own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", file.getvalue()).replace("xlink:href", "href")
    text = re.sub(r'( id="|"#|url\(#)', rf"\1{chart.id}-", text)
    svg = ET.fromstring(text)  # noqa: S314 - matplotlib wrote it just now
    for unwanted in (*svg.findall("metadata"), *svg.findall("defs")[:1]):  # the first holds a style sheet
        svg.remove(unwanted)
    for number, series in enumerate(chart.series):
        marks = svg.iterfind(f".//g[@id='{chart.id}-marks-{number}']//use")
        for mark, point in zip(marks, series.points, strict=False):
            ET.SubElement(mark, "title").text = _printable(point.label)
    for element in svg.iter():
        style = dict(part.split(": ", 1) for part in element.attrib.pop("style", "").split("; ") if ": " in part)
        element.attrib |= {name: VARIABLES.get(style[name], style[name]) for name in KEPT if name in style}
    labels = {"role": "img", "aria-labelledby": f"{chart.id}-t {chart.id}-d"}
    svg.attrib = {"class": "chart", "viewBox": svg.get("viewBox", ""), **labels}
    for place, (tag, content) in enumerate((("title", chart.title), ("desc", chart.description))):
        svg.insert(place, element := ET.Element(tag, id=f"{chart.id}-{tag[0]}"))
        element.text = _printable(content)
    return svg
