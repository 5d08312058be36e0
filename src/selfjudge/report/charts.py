"""Records → charts as data; `draw` makes pictures of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from selfjudge.report.equal_m import AGREES, CURVES, compares, curve, lead_over
from selfjudge.report.records import (
    Interval,
    Results,
    Run,
    by_task,
    named,
    rule_order,
    several,
    timed,
    title,
    usual_gamma,
)
from selfjudge.report.table import distinct, fixed, signed_points, slug
from selfjudge.report.tables import suffix_groups

MOST_METHODS = 5
"""Methods in one trade-off, where no other number is asked for; the tables have all."""
GAIN = "gain in m against exact, %"
IN_VIEW = 15.0
"""Points of score below `exact` that a trade-off shows: what loses more would press all else into a corner."""


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""
    """What it is, for whoever points at it."""
    tag: str = ""
    """Written beside it."""
    interval: Interval | None = None
    """Of y."""


@dataclass(frozen=True)
class Series:
    name: str
    style: int
    points: tuple[Point, ...]
    marked: bool = True


@dataclass(frozen=True)
class Lines:
    """Points joined in their order."""

    id: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    task: str = ""
    log_x: bool = False
    unit: bool = False
    """Both axes from 0 to 1, with the diagonal."""
    level: float | None = None
    """The y of `exact`."""
    band: Interval | None = None
    """And its interval."""
    floor: float | None = None
    """Points below it are out of view; lines run on to the edge."""

    def sees(self, point: Point) -> bool:
        return self.floor is None or point.y >= self.floor

    @property
    def styles(self) -> dict[str, int]:
        """Style by name, for a legend."""
        return {series.name: series.style for series in self.series}

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        lines = (
            f"{s.name}: "
            + " to ".join(f"{number(p.x, 2)}, {number(p.y, 2)}" for p in dict.fromkeys((s.points[0], s.points[-1])))
            for s in self.series
            if s.points
        )
        return f"{self.y} against {self.x}. " + "; ".join(lines)


@dataclass(frozen=True)
class Bars:
    """Rows (label, values) of stacked segments, which are named by `names` and styled in their order."""

    id: str
    title: str
    x: str
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    names: tuple[str, ...]
    task: str = ""
    shares: bool = False

    @property
    def styles(self) -> dict[str, int]:
        """Style by name, for a legend; one kind of bar needs none."""
        return {name: style for style, name in enumerate(self.names, 1)} if len(self.names) > 1 else {}

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        rows = ((label, zip(self.names, values, strict=True)) for label, values in self.rows)
        return "; ".join(f"{label}: " + ", ".join(f"{name} {value:.3g}" for name, value in row) for label, row in rows)


Chart = Lines | Bars


def number(value: float, digits: int = 10) -> str:
    """A tick: 12, 0.25, 7.5M."""
    value = round(value, digits)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}".replace("-", "−")


def styles(names: Iterable[str]) -> dict[str, int]:
    """A style for each name; `exact` is always 0."""
    others = [name for name in dict.fromkeys(names) if name != "exact"]
    return {"exact": 0, **{name: number for number, name in enumerate(others, 1)}}


def charts(results: Results, methods: int = MOST_METHODS) -> dict[str, list[Chart]]:
    """Section → its charts, trade-offs with at most so many methods; sections without data are left out."""
    runs = results.runs
    sections: dict[str, list[Chart]] = {
        "trade-off": list(trade_offs(runs, methods)),
        "equal-m": list(agreements(runs, methods)),
        "gamma": list(gammas(runs)),
        "two-stage": list(two_stages(runs)),
        "suffix-length": list(suffixes(runs)),
        "roc": list(rocs(results)),
        "study": list(learning(results)),
        "labelling": list(label_rates(results)),
        "time": list(time_splits(runs)),
    }
    ids = iter(distinct(chart.id for section in sections.values() for chart in section))
    return {name: [replace(chart, id=next(ids)) for chart in section] for name, section in sections.items() if section}


def _where(pair: str, task: str, runs: Sequence[Run]) -> tuple[str, str]:
    """(title, part of an id) of a facet."""
    pairs = several(r.pair for r in runs)
    return title(task) + (f", {pair}" if pairs else ""), slug(pair if pairs else "", task)


def _score(run: Run) -> str:
    return f"{run.measure}, points"


def _point(run: Run) -> Point:
    assert run.m is not None
    tag = run.option if run.judge and named(run) else ""
    label = f"{run.rule}, γ = {run.gamma}: m {run.m:.2f}, {run.measure} {100 * run.score:.1f}"
    return Point(run.m, 100 * run.score, label, tag)


def _method(run: Run) -> str:
    return run.method


def _curves(runs: Iterable[Run], name: Callable[[Run], str], style: dict[str, int]) -> tuple[Series, ...]:
    """Score against m, a line for each name."""
    grouped: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.m is not None:
            grouped[name(run)].append(run)
    return tuple(
        Series(key, style[key], tuple(map(_point, sorted(line, key=lambda r: (r.m, r.option)))))
        for key, line in grouped.items()
    )


def _trade_off(name: str, heading: str, series: tuple[Series, ...], run: Run, runs: Sequence[Run]) -> Lines:
    """Score against m, with the level of `exact` at the task and γ of `run`, where it was run."""
    chart = Lines(name, heading, "m", _score(run), series, run.task)
    place = run.pair, run.task, run.gamma, run.fold
    exact = next((r for r in runs if r.name == "exact" and (r.pair, r.task, r.gamma, r.fold) == place), None)
    if exact is None:
        return chart
    band = (100 * exact.score_ci[0], 100 * exact.score_ci[1]) if exact.score_ci else None
    chart = replace(chart, level=100 * exact.score, band=band)
    return drop_far_points(chart)


def drop_far_points(chart: Lines) -> Lines:
    """The chart without what lies far below its level, where anything else is left; its title says how many."""
    assert chart.level is not None
    clipped = replace(chart, floor=chart.level - IN_VIEW)
    seen = [clipped.sees(p) for s in chart.series for p in s.points]
    if all(seen) or sum(seen) < 2:
        return chart
    return replace(clipped, title=f"{chart.title}; {seen.count(False)} below, out of view")


@dataclass(frozen=True)
class _Facet:
    """One task's runs at its usual γ, of the methods that are drawn, and a style for each that all facets share."""

    pair: str
    task: str
    runs: list[Run]
    methods: list[str]
    style: Mapping[str, int]

    def series(self, point: Callable[[Run], Point]) -> tuple[Series, ...]:
        return tuple(
            Series(_with_note(method, self.runs), self.style[method], tuple(sorted(points, key=lambda p: p.x)))
            for method in self.methods
            if (points := [point(r) for r in self.runs if r.method == method])
        )


def _by_task(runs: Sequence[Run], most: int, known: Callable[[Run], bool], first: Sequence[str]) -> Iterable[_Facet]:
    """A facet a task, of the runs that have what is drawn, `exact` and at least one other method among them."""
    candidates = (r for r in runs if r.m is not None and not r.fold and r.name != "judge_only")
    paired = [r for r in candidates if r.name == "exact" or (r.m_ratio is not None and known(r))]
    facets = {place: [r for r in here if r.gamma == usual_gamma(here)] for place, here in by_task(paired).items()}
    drawn = {place: _drawn(here, most, first) for place, here in facets.items()}
    style = styles(method for methods in drawn.values() for method in methods)
    for (pair, task), here in facets.items():
        methods = drawn[pair, task]
        if len(methods) > 1 and "exact" in methods:
            yield _Facet(pair, task, [r for r in here if r.method in methods], methods, style)


def trade_offs(runs: Sequence[Run], most: int = MOST_METHODS) -> Iterable[Lines]:
    """The change of the score, paired with `exact`, against the gain in m: a line a method, a point a threshold.

    At most so many of a task are drawn. A judge alone has charts of its own.
    """
    for facet in _by_task(runs, most, lambda r: r.delta_score is not None, ("exact", "margin", "fly", "topk")):
        heading, part = _where(facet.pair, facet.task, runs)
        axes = GAIN, f"change of {facet.runs[0].measure}, points"
        finding = f"{heading}, γ = {facet.runs[0].gamma}: {_finding(facet.runs, facet.methods)}"
        chart = Lines(slug("trade-off", part), finding, *axes, facet.series(_paired), facet.task, level=0.0)
        yield drop_far_points(chart)


def agreements(runs: Sequence[Run], most: int = MOST_METHODS) -> Iterable[Lines]:
    """The share of answers that are those of `exact` against the gain in m, where an untrained margin was run."""
    for facet in _by_task(runs, max(most, 3), lambda r: r.agreement is not None, ("exact", *CURVES)):
        if "margin" not in facet.methods or not any(map(compares, facet.runs)):
            continue
        heading, part = _where(facet.pair, facet.task, runs)
        finding = f"{heading}, γ = {facet.runs[0].gamma}: {_most_ahead(facet.runs)}"
        start = Point(0.0, 100.0, "exact")
        series = tuple(
            replace(line, points=(start, *line.points)) if line.name in CURVES else line
            for line in facet.series(_agreeing)
        )
        yield Lines(slug("equal-m", part), finding, GAIN, "same answer, %", series, facet.task, level=100.0)


def _agreeing(run: Run) -> Point:
    if run.m_ratio is None or run.agreement is None:
        return Point(0.0, 100.0, "exact")
    gain, same = 100 * (run.m_ratio - 1), 100 * run.agreement
    ends = None if run.agreement_ci is None else (100 * run.agreement_ci[0], 100 * run.agreement_ci[1])
    return Point(gain, same, f"{run.rule}: {gain:+.1f} % m, {same:.1f} % the same", interval=ends)


def _most_ahead(runs: Sequence[Run]) -> str:
    """Which rule is furthest above the margin at its own m, beyond its interval."""
    leads = ((lead_over(run, curve("margin", run, runs), AGREES), run.rule) for run in runs if compares(run))
    sure = [(lead.value, rule) for lead, rule in leads if lead is not None and lead.is_sure]
    if not sure:
        return "no rule surely keeps more than margin"
    lead, rule = max(sure)
    return f"{rule} keeps {fixed(100 * lead, 1)} points more than margin"


def _drawn(runs: Sequence[Run], most: int, first: Sequence[str]) -> list[str]:
    """At most so many methods: `exact`, what ships, one of each rule of `first`, then those with most runs."""
    names = {r.method: r.name for r in runs if r.name != "null"}
    count = Counter(r.method for r in runs)
    ships = [method for method in names if any(r.ships for r in runs if r.method == method)]
    chosen = [*first[:1], *ships[:1]]
    for rule in first[1:]:
        alike = [rule] if rule in names else [method for method, name in names.items() if name == rule]
        chosen += sorted(alike, key=lambda method: -count[method])[:1]
    others = sorted(names, key=lambda method: (method not in ships, -count[method]))
    return list(dict.fromkeys(method for method in (*chosen, *others) if method in names))[:most]


def _with_note(method: str, runs: Sequence[Run]) -> str:
    return f"{method} (ships)" if any(r.ships for r in runs if r.method == method) else method


def _finding(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """What the first drawn method besides `exact` gains and costs, at its first named threshold."""
    one = next((r for r in runs if r.method == methods[1] and named(r)), None)
    one = one or next(r for r in runs if r.method == methods[1])
    assert one.m_ratio is not None
    assert one.delta_score is not None
    return f"{one.rule} {fixed(100 * (one.m_ratio - 1), 1, '+')} % m, {signed_points(one.delta_score)} points"


def _paired(run: Run) -> Point:
    """A run against `exact`; `exact` itself is where nothing changes."""
    point = _point(run)
    if run.m_ratio is None or run.delta_score is None:
        return Point(0.0, 0.0, point.label)
    ends = None if run.delta_ci is None else (100 * run.delta_ci[0], 100 * run.delta_ci[1])
    tag = point.tag if run.option in ("F", "R") else ""
    return Point(100 * (run.m_ratio - 1), 100 * run.delta_score, point.label, tag, ends)


def two_stages(runs: Sequence[Run]) -> Iterable[Lines]:
    """judge_only and judged of the same judge, where the former was run."""
    alone = {(r.pair, r.task, r.gamma, r.judge) for r in runs if r.name == "judge_only"}
    judged = [r for r in runs if r.name in ("judged", "judge_only") and r.m is not None]
    chosen = sorted((r for r in judged if (r.pair, r.task, r.gamma, r.judge) in alone), key=rule_order)
    return _facets("two-stage", chosen, lambda r: r.name, styles(r.method for r in chosen), runs)


def _facets(
    name: str, chosen: Sequence[Run], kind: Callable[[Run], str], style: dict[str, int], runs: Sequence[Run]
) -> Iterable[Lines]:
    """A trade-off for each task at the γ that most of its runs have, where runs of several kinds were chosen."""
    for (pair, task), here in by_task(chosen).items():
        gamma = usual_gamma(here)
        shown = [r for r in here if r.gamma == gamma]
        if several(map(kind, shown)):
            heading, part = _where(pair, task, runs)
            series = _curves(shown, _method, style)
            best = {k: max(r.m or 0.0 for r in shown if kind(r) == k) for k in dict.fromkeys(map(kind, shown))}
            finding = ", ".join(f"{k} {m:.2f}" for k, m in best.items())
            yield _trade_off(slug(name, part), f"{heading}, γ = {gamma}: m up to {finding}", series, shown[0], runs)


def gammas(runs: Sequence[Run]) -> Iterable[Lines]:
    """m and score against γ, for rules that were run at several."""
    known: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=rule_order):
        if run.m is not None and not run.fold:
            known[run.pair, run.task, run.rule].append(run)
    swept = {key: sorted(line, key=lambda r: r.gamma) for key, line in known.items() if several(r.gamma for r in line)}
    style = styles(rule for _, _, rule in swept)
    for pair, task in by_task(r for line in swept.values() for r in line):
        heading, part = _where(pair, task, runs)
        here = {rule: line for (p, t, rule), line in swept.items() if (p, t) == (pair, task)}
        measured = _score(next(iter(here.values()))[0])
        for what, y in (("m", "m"), ("score", measured)):
            series = tuple(
                Series(rule, style[rule], tuple(_at_gamma(r, what) for r in line)) for rule, line in here.items()
            )
            yield Lines(slug("gamma", part, what), f"{heading}: {_range(series[0], what)}", "γ", y, series, task)


def _range(series: Series, what: str) -> str:
    """From its first γ to its last: `m of exact 3.01 at γ = 3, 5.56 at 20`."""
    first, last = series.points[0], series.points[-1]
    digits = 2 if what == "m" else 1
    return f"{what} of {series.name} {first.y:.{digits}f} at γ = {first.x:g}, {last.y:.{digits}f} at {last.x:g}"


def _at_gamma(run: Run, what: str) -> Point:
    point = _point(run)
    return Point(run.gamma, point.x if what == "m" else point.y, point.label)


def suffixes(runs: Sequence[Run]) -> Iterable[Lines]:
    """A line an N; several judges of one N are lines of their own."""
    grouped = suffix_groups(runs)
    every = sorted((r for compared in grouped.values() for r in compared), key=lambda r: r.suffix_length or 0)
    judges: dict[int | None, set[str]] = defaultdict(set)
    for run in every:
        judges[run.suffix_length].add(run.judge)

    def length(run: Run) -> str:
        return f"N = {run.suffix_length}" + (f", {run.judge}" if len(judges[run.suffix_length]) > 1 else "")

    style = styles(map(length, every))
    for place, ((pair, task, gamma, features, _, method, _), compared) in enumerate(grouped.items()):
        heading, part = _where(pair, task, runs)
        which = ", ".join(filter(None, (f"γ = {gamma}", method, features)))
        if series := _curves(compared, length, style):
            name = slug("suffix-length", part, str(place))
            yield _trade_off(name, f"{heading}, {which}", series, compared[0], runs)


def rocs(results: Results) -> Iterable[Lines]:
    series: list[Series] = []
    curves = ((card.label, card.roc) for card in results.judges if card.roc is not None)
    for style, (judge, roc) in enumerate(curves, 1):
        name = judge + ("" if roc.auc is None else f", AUC {roc.auc:.3f}")
        curve = tuple(Point(x, y) for x, y in zip(roc.fpr, roc.tpr, strict=True))
        series.append(Series(name, style, curve, marked=False))
        series += [Series(name, style, (Point(*at, f"{judge}, {mark}", mark),)) for mark, at in roc.marks.items()]
    if series:
        axes = "unacceptable tokens accepted", "acceptable tokens accepted"
        areas = [
            (card.roc.auc, card.label) for card in results.judges if card.roc is not None and card.roc.auc is not None
        ]
        best = f": {max(areas)[1]} has the largest AUC, {max(areas)[0]:.3f}" if areas else ""
        yield Lines("roc", f"ROC on holdout mismatches{best}", *axes, tuple(series), unit=True)


def learning(results: Results) -> Iterable[Lines]:
    for place, study in enumerate(results.studies):
        series = []
        for style, (kind, label) in enumerate((("linear", "linear"), ("mlp", "MLP")), 1):
            known = [(row["labels"], row[kind]) for row in study.learning_curve]
            points = tuple(Point(n, y, f"{label}, {n:,.0f} labels: {y:.3f}") for n, y in known if n and y is not None)
            series += [Series(label, style, points)] if points else []
        if series:
            name, axes = slug("learning-curve", str(place) if place else ""), ("labels", "ROC-AUC, holdout mismatches")
            most = [f"{line.name} {line.points[-1].y:.3f} at {line.points[-1].x:,.0f} labels" for line in series]
            yield Lines(name, f"{study.target}: ROC-AUC of {', '.join(most)}", *axes, tuple(series), log_x=True)


def label_rates(results: Results) -> Iterable[Bars]:
    grouped: dict[tuple[str, str], list[tuple[str, tuple[float, ...]]]] = defaultdict(list)
    for run in results.labels:
        grouped[run.pair, run.provenance.machine].append((run.method, (run.rows_per_hour,)))
    for (pair, machine), rows in grouped.items():
        heading = ", ".join(filter(None, (pair, machine)))
        ordered = sorted(rows, key=lambda row: row[1])
        if (slowest := ordered[0][1][0]) > 0 and len(ordered) > 1:
            times = f"{ordered[-1][1][0] / slowest:.0f}"
            heading = f"{ordered[-1][0]} makes {times} times the labels of {ordered[0][0]}; {heading}"
        yield Bars(slug("labelling", pair, machine), heading, "labels per hour", tuple(rows), ("labels per hour",))


def time_splits(runs: Sequence[Run]) -> Iterable[Bars]:
    names = ("draft", "target", "judge", "rule", "other")
    for (pair, task), here in by_task(runs).items():
        rows = []
        for run in timed(here):
            total = sum(run.phases.values())
            label = run.rule + (f", fold {run.fold}" if run.fold else "")
            rows.append((label, tuple(run.phases.get(name, 0.0) / total for name in names)))
        if rows:
            heading, part = _where(pair, task, runs)
            label, shares = rows[0]
            heading = f"{heading}, γ = {usual_gamma(here)}: the target takes {shares[1]:.0%} under {label}"
            yield Bars(slug("time", part), heading, "share of the time", tuple(rows), names, task, shares=True)
