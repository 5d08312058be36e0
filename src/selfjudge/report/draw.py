"""Charts → pictures: each is drawn once by matplotlib, as SVG for the page and as PNG for use elsewhere.

In the SVG text stays text, and marks and bars say what they are when pointed at. Colours are the page's CSS variables,
so light, dark and print need no second drawing. Colour is never alone: every style has its own mark and dash.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from selfjudge.report.charts import Bars, Chart, Lines, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    ("#5b6470", "#a4adba"), ("#2566ad", "#7db4f0"), ("#b8500f", "#f2a167"),
    ("#1f7f4c", "#6fd09c"), ("#7445ab", "#bf9bee"), ("#b02a63", "#f08bb5"),
    ("#0f7580", "#5fcbd6"), ("#6f690e", "#cfc45a"), ("#83502f", "#d6a988"),
)  # fmt: skip
"""(light, dark) of each style; style 0 is `exact`."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ((), (6, 3), (2, 3), (8, 3, 2, 3))
INK, SOFT, RULE, FAINT, PAPER = "#1c2127", "#57606a", "#dfe2e5", "#eef0f1", "#fdfdfb"
"""As in page.css, where they have dark counterparts."""
VARIABLES = {
    **{light: f"var(--s{i})" for i, (light, _) in enumerate(PALETTE)},
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    RULE: "var(--rule)",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
}
SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "selfjudge", "text.parse_math": False, "font.size": 11,
    "axes.edgecolor": RULE, "axes.labelcolor": INK, "axes.facecolor": "none", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": FAINT, "figure.facecolor": "none",
    "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "xtick.bottom": False, "ytick.left": False,
    "text.color": INK, "lines.linewidth": 1.6, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip

WIDTH, HEIGHT = 460, 310
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 12, 44
BAR, GAP = 20, 8
"""Points, as are all sizes of a drawing."""
LETTER = 6.4
"""Width of a letter, roughly."""
LONGEST_TEXT, LONGEST_TITLE, LONGEST_LABEL = 48, 76, 28

NAMESPACE = "{http://www.w3.org/2000/svg}"
KEPT = ("fill", "stroke", "stroke-width", "stroke-dasharray", "text-anchor", "font-weight", "font-size")
"""What is kept of a shape's style, as attributes: the page's policy allows no style in them."""
Titles = dict[str, list[str]]
"""Name of a group of shapes (`sj-CLASS-NUMBER`) → what each of them shows when pointed at."""


@dataclass(frozen=True)
class Drawing:
    svg: Markup
    png: bytes


def draw(chart: Chart) -> Drawing:
    """The chart alone as SVG: title and legend stand beside it on the page. The PNG has them in it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore", UserWarning)  # letters that its fonts lack are boxes in the PNG alone
        if isinstance(chart, Lines):
            height, left, right = HEIGHT, float(LEFT), RIGHT
        else:
            height, right = TOP + len(chart.rows) * (BAR + GAP) + BOTTOM, RIGHT if chart.shares else RIGHT + 62
            left = 14 + LETTER * min(LONGEST_LABEL, max(len(label) for label, _ in chart.rows))
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        axes = figure.add_axes(
            (left / WIDTH, BOTTOM / height, (WIDTH - left - right) / WIDTH, (height - TOP - BOTTOM) / height)
        )
        titles = _draw_lines(axes, chart) if isinstance(chart, Lines) else _draw_bars(axes, chart)
        svg = _svg(figure, "chart", titles, chart.id)
        svg.attrib |= {"role": "img", "aria-labelledby": f"{chart.id}-t {chart.id}-d"}
        for place, (tag, text) in enumerate((("title", chart.title), ("desc", chart.description))):
            svg.insert(place, element := ET.Element(tag, id=f"{chart.id}-{tag[0]}"))
            element.text = _printable(text)
        return Drawing(_markup(svg), _png(figure, axes, chart))


@cache
def swatch(style: int, box: bool) -> Markup:
    """A style as a legend shows it: a bar's box, or line and mark."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(30 / 72, 16 / 72))
        if box:
            figure.add_artist(Rectangle((0.3, 0.125), 0.4, 0.75, facecolor=_colour(style)))
        else:
            figure.add_artist(_line([0, 1], [0.5, 0.5], style))
            figure.add_artist(_line([0.5], [0.5], style, marked=True))
        svg = _svg(figure, "swatch", {}, "")
        svg.set("aria-hidden", "true")
        return _markup(svg)


def legend(charts: Sequence[Chart]) -> list[tuple[str, Markup]]:
    """One list of names and swatches for all charts of a section; bars of one kind need none."""
    styles: dict[str, int] = {}
    for chart in charts:
        styles |= chart.styles
    boxes = all(isinstance(chart, Bars) for chart in charts)
    return [(name, swatch(style, boxes)) for name, style in styles.items()]


def _colour(style: int) -> str:
    return PALETTE[style if style < len(PALETTE) else 1 + (style - 1) % (len(PALETTE) - 1)][0]


def _line(xs: Sequence[float], ys: Sequence[float], style: int, marked: bool = False, **more: Any) -> Any:
    """A line of a style, or its marks alone."""
    from matplotlib.lines import Line2D

    if marked:
        look = {"linestyle": "none", "marker": MARKERS[style % len(MARKERS)], "markersize": 8, "markeredgecolor": PAPER}
    else:
        dashes = DASHES[(style // 3) % len(DASHES)] if style else DASHES[2]
        look = {"linestyle": (0, tuple(d / 1.6 for d in dashes)) if dashes else "-"}
    return Line2D(xs, ys, color=_colour(style), clip_on=False, **{**look, **more})


def _draw_lines(axes: Axes, chart: Lines) -> Titles:
    titles: Titles = {}
    _set_axes(axes, chart)
    low, high = axes.get_ylim()
    if chart.band is not None:
        band = [min(high, max(low, edge)) for edge in chart.band]
        axes.axhspan(*band, facecolor=FAINT, zorder=0.5, clip_on=False)
    if chart.unit:
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (2, 4)), clip_on=False)
    if chart.level is not None:
        axes.axhline(chart.level, color=SOFT, linewidth=1, linestyle=(0, (2, 4)), clip_on=False)
    for place, series in enumerate(chart.series):
        seen = [p for p in series.points if chart.sees(p)]
        if len(series.points) > 1:
            line = _line(
                [p.x for p in series.points], [p.y for p in series.points], series.style, gid=f"sj-line-{place}"
            )
            axes.add_line(line)
            line.set_clip_on(len(seen) < len(series.points))
        if seen and series.marked:
            marks = _line(
                [p.x for p in seen], [p.y for p in seen], series.style, True, gid=f"sj-mark-{place}", zorder=3
            )
            axes.add_line(marks)
            titles[f"sj-mark-{place}"] = [p.label for p in seen]
        for point in (p for p in seen if p.interval is not None):
            ends = [max(low, min(high, end)) for end in point.interval or ()]
            axes.plot([point.x] * 2, ends, color=_colour(series.style), linewidth=1.2, zorder=2, clip_on=False)
        below = -14 if series.style % 2 else 7  # neighbours do not write into the same place
        for point in (p for p in seen if p.tag and series.marked):
            axes.annotate(
                _plain(point.tag), (point.x, point.y), (0, below), textcoords="offset points", ha="center",
                weight="bold", color=_colour(series.style), gid=f"sj-tag-{place}", zorder=4,
            )  # fmt: skip
    return titles


def _set_axes(axes: Axes, chart: Lines) -> None:
    """Limits that hold every point in view, round ticks and names."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    seen = [p for s in chart.series for p in s.points if chart.sees(p)]
    xs, levels = sorted({p.x for p in seen}), [] if chart.level is None else [chart.level]
    if chart.log_x:
        axes.set_xscale("log")
        axes.set_xlim(xs[0] / 1.2, xs[-1] * 1.2)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(*((0, 1) if chart.unit else _spread(xs)))
        every = chart.x == "γ" and len(xs) <= 8
        axes.xaxis.set_major_locator(FixedLocator(xs) if every else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    floor = -math.inf if chart.floor is None else chart.floor
    ends = [max(floor, end) for p in seen for end in p.interval or ()]
    axes.set_ylim(*((0, 1) if chart.unit else _spread([*(p.y for p in seen), *ends, *levels])))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set(xlabel=_plain(chart.x), ylabel=_plain(chart.y))
    axes.yaxis.set_label_coords(-(LEFT - 14) / (WIDTH - LEFT - RIGHT), 0.5)
    axes.grid(clip_on=False)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with a margin."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or max(0.5, abs(high) * 0.05)
    return low - margin, high + margin


def _draw_bars(axes: Axes, chart: Bars) -> Titles:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    titles: Titles = {}
    most = 1.0 if chart.shares else max(sum(values) for _, values in chart.rows) or 1.0
    axes.set(xlim=(0, most), ylim=(len(chart.rows) - 0.5, -0.5), xlabel=_plain(chart.x))
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %" if chart.shares else number(v)))
    axes.set_yticks(range(len(chart.rows)), [_plain(label, LONGEST_LABEL) for label, _ in chart.rows])
    axes.grid(axis="x", clip_on=False)
    room = axes.get_position().width * WIDTH / most
    for row, (label, values) in enumerate(chart.rows):
        axes.yaxis.get_majorticklabels()[row].set_gid(f"sj-label-{row}")
        titles[f"sj-label-{row}"] = [label]
        end = 0.0
        for style, (name, value) in enumerate(zip(chart.names, values, strict=True), 1):
            if not value:
                continue
            gid = f"sj-bar-{row}.{style}"
            look: dict[str, Any] = {
                "color": _colour(style),
                "edgecolor": PAPER,
                "linewidth": 1,
                "clip_on": False,
                "gid": gid,
            }
            axes.barh(row, value, BAR / (BAR + GAP), end, **look)
            titles[gid] = [f"{label}: {name} " + (f"{100 * value:.1f} %" if chart.shares else f"{value:,.0f}")]
            inside = _plain(f"{name} {100 * value:.0f} %") if chart.shares else ""
            if inside and LETTER * len(inside) + 6 < value * room:
                axes.text(end + value / 2, row, inside, color=PAPER, ha="center", va="center", fontsize=10.5)
            end += value
        if not chart.shares:
            axes.annotate(f"{end:,.0f}", (end, row), (6, 0), textcoords="offset points", va="center", color=SOFT)
    return titles


def _plain(text: str, longest: int = LONGEST_TEXT) -> str:
    """Text of bounded length."""
    text = _printable(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _printable(text: str) -> str:
    """Text that every XML parser takes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _png(figure: Figure, axes: Axes, chart: Chart) -> bytes:
    """The drawing with its title above and its legend below."""
    from matplotlib.patches import Patch

    labels = [_plain(name) for name in chart.styles]
    columns = max(1, min(len(labels), int(WIDTH / (LETTER * max(map(len, labels), default=1) + 40))))
    above, below = 22, 14 * -(-len(labels) // columns) + 8 if labels else 0
    box, height = axes.get_position(), figure.get_figheight() * 72
    total = height + above + below
    figure.set_figheight(total / 72)
    axes.set_position((box.x0, (box.y0 * height + below) / total, box.width, box.height * height / total))
    axes.set_title(_plain(chart.title, LONGEST_TITLE), fontsize=10, y=1.02)
    if labels:
        styles = chart.styles.values()
        handles: list[Any] = (
            [Patch(color=_colour(style)) for style in styles]
            if isinstance(chart, Bars)
            else [(_line([], [], style), _line([], [], style, True, markersize=6)) for style in styles]
        )
        figure.legend(handles, labels, loc="lower center", ncols=columns, borderaxespad=0.2, labelspacing=0.3)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor="white")
    return file.getvalue()


def _svg(figure: Figure, kind: str, titles: Titles, prefix: str) -> ET.Element:
    """The figure as an element for the page: no namespace, style or name of matplotlib's is left in it."""
    file = io.StringIO()
    figure.savefig(file, format="svg")
    drawn = ET.fromstring(file.getvalue())  # noqa: S314 - matplotlib wrote it just now
    shapes = {f"#{shape.get('id')}": shape.get("d", "") for shape in drawn.iter(f"{NAMESPACE}path") if shape.get("id")}
    svg = ET.Element("svg", {"class": kind, "viewBox": drawn.get("viewBox", "")})
    for child in drawn:
        svg.extend(_for_page(child, titles, shapes, prefix))
    return svg


def _for_page(element: ET.Element, titles: Titles, shapes: Mapping[str, str], prefix: str) -> Iterator[ET.Element]:
    """The element as the page shows it; groups that say nothing give way to what they hold."""
    tag, name = element.tag.removeprefix(NAMESPACE), element.get("id", "")
    if tag in ("metadata", "style", "defs") and element.find(f"{NAMESPACE}clipPath") is None:
        return
    own = ET.Element("path" if tag == "use" else tag, _attributes(element, shapes, prefix))
    own.text = (element.text or "").strip() or None
    for child in element:
        own.extend(_for_page(child, titles, shapes, prefix))
    if name.startswith("sj-"):
        own.set("class", name.removeprefix("sj-").rpartition("-")[0])
        leaves = [leaf for leaf in own.iter() if leaf.tag in ("path", "text")]
        for leaf, title in zip(leaves, titles.get(name, ()), strict=False):
            ET.SubElement(leaf, "title").text = _printable(title)
    if tag == "g" and not own.attrib:
        yield from own
    else:
        yield own


def _attributes(element: ET.Element, shapes: Mapping[str, str], prefix: str) -> dict[str, str]:
    style = dict(part.split(": ", 1) for part in element.get("style", "").split("; ") if ": " in part)
    kept = {name: VARIABLES.get(style[name], style[name]) for name in KEPT if name in style}
    if kept.get("font-size") == "11px":
        del kept["font-size"]  # as all text of a chart
    if "clip-path" in element.attrib:
        kept["clip-path"] = element.attrib["clip-path"].replace("#", f"#{prefix}-")
    if element.tag == f"{NAMESPACE}clipPath":
        kept["id"] = f"{prefix}-{element.get('id')}"
    if element.tag == f"{NAMESPACE}use":
        kept["d"] = _short(shapes[element.get("{http://www.w3.org/1999/xlink}href", "")])
        kept["transform"] = _short(f"translate({element.get('x')} {element.get('y')})")
        return kept
    for name in ("d", "x", "y", "width", "height", "transform"):
        if name in element.attrib and "rotate(-0 " not in element.attrib[name]:
            kept[name] = _short(element.attrib[name])
    return kept


def _short(text: str) -> str:
    """Numbers to two digits, without spaces that nobody needs."""
    text = re.sub(r"-?\d+\.\d+", lambda found: f"{round(float(found[0]), 2) + 0.0:g}", " ".join(text.split()))
    return re.sub(r"(?<=[A-Za-z]) | (?=[A-Za-z])", "", text)


def _markup(svg: ET.Element) -> Markup:
    return Markup(ET.tostring(svg, encoding="unicode"))  # noqa: S704 - every text in it was escaped
