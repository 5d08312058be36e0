"""Records → charts as data; `draw` makes pictures of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from selfjudge.report import records
from selfjudge.report.formats import change, gain, points, show_number
from selfjudge.report.records import EvalRun, Interval, Results, group_by_task
from selfjudge.report.tables import number_ids

MOST_METHODS = 5  # number of methods in one chart; the tables have all
GAIN = "gain in m against exact, %"
FIRST = ("exact", "judged", "margin", "fly", "topk")  # rules that a chart draws first, one method of each


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""  # text that is shown when the point is pointed at
    tag: str = ""  # text beside the point
    interval: Interval | None = None  # confidence interval of y


@dataclass(frozen=True)
class Series:
    name: str
    style: int
    points: tuple[Point, ...]
    marked: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines, each through its points in their order."""

    id: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    task: str = ""
    level: float | None = None  # the y of a horizontal line, such as that of `exact`

    @property
    def description(self) -> str:
        """The chart in words, for screen readers."""

        def place(point: Point) -> str:
            return f"{show_number(point.x, 2)}, {show_number(point.y, 2)}"

        ends = ((s.name, dict.fromkeys((s.points[0], s.points[-1]))) for s in self.series if s.points)
        lines = (f"{name}: {' to '.join(map(place, points))}" for name, points in ends)
        return f"{self.y} against {self.x}. {'; '.join(lines)}"


def make_charts(results: Results) -> dict[str, list[Chart]]:
    """Section → its charts; sections without data are left out."""
    return number_ids({"trade-off": trade_offs(results.runs), "agreement": agreements(results.runs)})


@dataclass(frozen=True)
class _Facet:
    """One task's runs at its usual γ, of the methods that are drawn, with styles that all facets share."""

    heading: str
    slug: str
    task: str
    runs: list[EvalRun]
    methods: list[str]
    styles: Mapping[str, int]

    @property
    def first(self) -> EvalRun:
        """The run of the first method besides `exact` that its title is about: at its first named threshold."""
        candidates = [r for r in self.runs if r.method == self.methods[1]]
        return next((r for r in candidates if r.is_named), candidates[0])

    def series(self, point: Callable[[EvalRun], Point]) -> tuple[Series, ...]:
        """A line for each method, a point for each of its runs."""
        lines = {m: sorted((point(r) for r in self.runs if r.method == m), key=lambda p: p.x) for m in self.methods}
        return tuple(Series(method, self.styles[method], tuple(points)) for method, points in lines.items())


def _facets(runs: Sequence[EvalRun], has_figure: Callable[[EvalRun], bool]) -> Iterable[_Facet]:
    """A facet for each task where `exact` and at least one other method have the figure that is drawn."""
    candidates = (r for r in runs if r.m is not None and r.name != "judge_only")
    paired = [r for r in candidates if r.name == "exact" or (r.m_ratio is not None and has_figure(r))]
    styles = {"exact": 0}
    for (pair, task), every in group_by_task(paired).items():
        gamma = records.usual_gamma(every)
        here = [r for r in every if r.gamma == gamma]
        methods = _choose_methods(here)
        for method in methods:
            styles.setdefault(method, len(styles))
        if len(methods) > 1 and "exact" in methods:
            title, part = records.name_task(pair, task, runs)
            shown = [r for r in here if r.method in methods]
            yield _Facet(f"{title}, γ = {gamma}", part, task, shown, methods, styles)


def _choose_methods(runs: Sequence[EvalRun]) -> list[str]:
    """At most MOST_METHODS: one of each rule (or the method) in `FIRST`, then those with most runs."""
    count = Counter(r.method for r in runs if r.name != "null")
    rules = {r.method: r.name for r in runs}
    chosen = []
    for rule in FIRST:
        same_rule = [rule] if rule in count else [method for method in count if rules[method] == rule]
        chosen += sorted(same_rule, key=lambda method: -count[method])[:1]
    others = sorted(count, key=lambda method: -count[method])
    return list(dict.fromkeys([*chosen, *others]))[:MOST_METHODS]


def trade_offs(runs: Sequence[EvalRun]) -> Iterable[Chart]:
    """The change of the score, paired with `exact`, against the gain in m: a line a method, a point a threshold."""
    for facet in _facets(runs, lambda r: r.delta_score is not None):
        run = facet.first
        shown = change(run.delta_score, run.delta_ci, run.scored < records.FEWEST_SCORED)
        finding = f"{facet.heading}: {run.rule} {gain(run.m_ratio)} m, {shown}"
        axes = GAIN, f"change of {run.measure}, points"
        name = records.slug("trade-off", facet.slug)
        yield Chart(name, finding, *axes, facet.series(_score_point), facet.task, level=0.0)


def _score_point(run: EvalRun) -> Point:
    """A run against `exact`, which is at the origin."""
    label = f"{run.rule}, γ = {run.gamma}: m {run.m:.2f}, {run.measure} {100 * run.score:.1f}"
    if run.m_ratio is None or run.delta_score is None:
        return Point(0.0, 0.0, label)
    tag = run.option if run.option in ("F", "R") else ""
    return Point(100 * (run.m_ratio - 1), 100 * run.delta_score, label, tag, _show_spread(run, run.delta_ci))


def agreements(runs: Sequence[EvalRun]) -> Iterable[Chart]:
    """The share of answers that are those of `exact` against the gain in m, where that is not the score already."""
    for facet in _facets(runs, lambda r: r.agreement is not None and r.measure != records.MATCHING_WORDS):
        run = facet.first
        finding = f"{facet.heading}: {run.rule} {gain(run.m_ratio)} m, {points(run.agreement)} % the same"
        name, series = records.slug("agreement", facet.slug), facet.series(_agreement_point)
        yield Chart(name, finding, GAIN, "same answer, %", series, facet.task, level=100.0)


def _agreement_point(run: EvalRun) -> Point:
    if run.m_ratio is None or run.agreement is None:
        return Point(0.0, 100.0, "exact")
    same = 100 * run.agreement
    label = f"{run.rule}: {gain(run.m_ratio)} m, {same:.1f} % the same"
    return Point(100 * (run.m_ratio - 1), same, label, interval=_show_spread(run, run.agreement_ci))


def _show_spread(run: EvalRun, interval: Interval | None) -> Interval | None:
    return None if run.scored < records.FEWEST_SCORED else in_points(interval)


def in_points(interval: Interval | None) -> Interval | None:
    """An interval of shares, times 100."""
    return None if interval is None else (100 * interval[0], 100 * interval[1])
