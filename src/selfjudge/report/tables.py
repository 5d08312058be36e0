"""Tables of the report: plain rows, and columns with their formats for page and Markdown; empty without data."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from selfjudge.report import formats, records
from selfjudge.report.formats import fixed, percent, quote_token, show_interval, show_text, whole
from selfjudge.report.records import PAPER, EvalRun, Interval, group_by_task, task_title
from selfjudge.store import markdown_table
from selfjudge.types import GLOSSARY

PAIRS_SHOWN = 3  # number of substitutions shown for each run
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """`form` shows the row's `value`: a key, or a function of the row. `below` is smaller under it, as text after
    `joint`: the key of an interval, or a function of the row."""

    head: str
    value: str | Callable[[Row], Any]
    form: Callable[[Any], str] = show_text
    below: str | Callable[[Row], str] = ""
    help: str = ""
    numeric: bool = True
    wide: bool = False
    joint: str = " "

    def show(self, row: Row) -> str:
        return self.form(row[self.value] if isinstance(self.value, str) else self.value(row))

    def small(self, row: Row) -> str:
        if not isinstance(self.below, str):
            return self.below(row)
        return show_interval(row[self.below], self.form) if self.below else ""

    def text(self, row: Row) -> str:
        """Both in one line."""
        return self.joint.join(filter(None, (self.show(row), self.small(row))))


def score_column(head: str, value: str, form: Callable[[Any], str], interval: str, words: str = "") -> Column:
    """A score or its change; the interval below it is left out where few examples were scored."""
    return Column(head, value, form, lambda row: "" if row["few"] else show_interval(row[interval], form), words)


def word_column(head: str, value: str | Callable[[Row], Any], **more: Any) -> Column:
    return Column(head, value, numeric=False, **more)


@dataclass(frozen=True)
class Table:
    """Rows have the keys `task`, `method` and `rule` where they belong to one: the page's filter reads them."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def markdown(self) -> str:
        """As a GitHub table; cells hold no markup of their own."""
        table = markdown_table(
            [escape(column.head) for column in self.columns],
            ([escape(column.text(row)) for column in self.columns] for row in self.rows),
            "".join("r" if column.numeric else "l" for column in self.columns),
        )
        note = f"\n{escape(self.note)}\n" if self.note else ""
        return f"## {escape(self.title)}\n\n{table}\n{note}"


def escape(text: str) -> str:
    """Safe in Markdown, tables included: no column, link, tag or emphasis comes from a result."""
    return re.sub(r"([\\|`*_\[\]<>&#])", r"\\\1", " ".join(text.split()))


def number_ids(sections: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """Section → its tables or charts, if it has any; an id that occurred before gets a number."""
    seen: Counter[str] = Counter()

    def number(part: Any) -> Any:
        seen[part.id] += 1
        return part if seen[part.id] == 1 else replace(part, id=f"{part.id}--{seen[part.id]}")

    numbered = {name: [number(part) for part in section] for name, section in sections.items()}
    return {name: section for name, section in numbered.items() if section}


RULE = word_column("rule", "rule")
GAMMA = Column(f"{GLOSSARY['γ']} (γ)", "gamma")
PER_PASS = Column(f"{GLOSSARY['m']} (m)", "mean_accepted_length", fixed, help="of the target, its own token included")
AGREEMENT = score_column(
    "same answer", "agreement", percent, "agreement_ci", "as exact; of open tasks the matching words"
)


def make_tables(runs: Sequence[EvalRun]) -> dict[str, list[Table]]:
    """Section → its tables; sections without data are left out."""
    sections = {
        "averages": [_averages(runs, pair) for pair in sorted({run.pair for run in runs})],
        "task": _per_task(runs),
        "provenance": [_provenance(runs)],
    }
    return number_ids({name: [table for table in section if table.rows] for name, section in sections.items()})


def _averages(runs: Sequence[EvalRun], pair: str) -> Table:
    """A pair's averages over the paper's tasks: every rule at every γ that covers all of its tasks."""
    scored = sorted((r for r in runs if r.pair == pair and r.task in PAPER), key=records.rule_order)
    tasks = sorted({r.task for r in scored}, key=PAPER.index)
    swept = {r.method for r in scored if r.is_named}
    rules: dict[str, list[EvalRun]] = defaultdict(list)
    for run in scored:
        if run.is_named or run.method not in swept:
            rules[run.rule].append(run)
    chosen = [each for own in rules.values() for each in _one_run_a_task(own) if len(each) > 1]
    rows = tuple(map(average_row, chosen))
    part, end = (pair, f", {pair}") if records.has_several_pairs(runs) else ("", "")
    columns, note = _average_columns(tasks), _average_note(tasks, rows)
    return Table(records.slug("averages", part), f"Average over tasks{end}", columns, rows, note)


def _average_note(tasks: Sequence[str], rows: Sequence[Row]) -> str:
    note = f"The mean is over {', '.join(map(task_title, tasks))}."
    if any(len(row["tasks"]) < len(tasks) for row in rows):
        note += " Rows with fewer tasks are not comparable with the others."
    if set(tasks) != set(PAPER):
        note += f" The paper's average is over {', '.join(map(task_title, PAPER))}: not all were run."
    return note


def _average_columns(tasks: Sequence[str]) -> tuple[Column, ...]:
    def m_of(task: str, row: Row) -> Any:
        return row["tasks"].get(task, {}).get("m")

    def score_of(task: str, row: Row) -> str:
        if (cell := row["tasks"].get(task)) is None:
            return ""
        change = "" if cell["delta_score"] is None else f" ({formats.signed_points(cell['delta_score'])})"
        return formats.points(cell["score"]) + change

    about = "m, then score in points and its change"
    return (
        RULE,
        replace(GAMMA, value="gammas"),
        *(Column(task_title(t), partial(m_of, t), fixed, partial(score_of, t), about, joint=" / ") for t in tasks),
        Column("mean Δm", "delta_m", formats.signed, "delta_m_ci", "against exact, same task and γ"),
        Column("mean m ratio", "m_ratio", fixed, "m_ratio_ci"),
        score_column("mean Δtask", "delta_score", formats.signed_points, "delta_ci", "points"),
        Column("tasks", lambda row: len(row["tasks"])),
    )


def _one_run_a_task(runs: Sequence[EvalRun]) -> list[list[EvalRun]]:
    """One rule's runs → sets with one run a task: each task at its own γ, or every γ that covers most tasks."""
    if len(runs) == len({r.task for r in runs}):
        return [list(runs)]
    gammas = [[r for r in runs if r.gamma == gamma] for gamma in sorted({r.gamma for r in runs})]
    most = max(map(len, gammas))
    return [chosen for chosen in gammas if len(chosen) == most]


def average_row(runs: Sequence[EvalRun]) -> Row:
    """One rule's runs, one a task, as a row: their means, with intervals."""
    agreements, figures = (
        [r.agreement for r in runs if r.agreement is not None],
        ("m", "score", "delta_m", "delta_score"),
    )
    row: dict[str, Any] = {
        "rule": runs[0].rule,
        "method": runs[0].method,
        "gammas": ", ".join(str(gamma) for gamma in sorted({r.gamma for r in runs})),
        "m": sum(r.m or 0.0 for r in runs) / len(runs),
        "agreement": sum(agreements) / len(agreements) if agreements else None,
        "agreement_ci": None,
        "few": sum(r.scored for r in runs) < records.FEWEST_SCORED,
        "tasks": {r.task: {name: getattr(r, name) for name in figures} for r in runs},
    }
    for name, interval in {"delta_m": "delta_m_ci", "m_ratio": "m_ratio_ci", "delta_score": "delta_ci"}.items():
        values = [None if r.kind == "exact" else getattr(r, name) for r in runs]
        row[name], row[interval] = mean_with_interval(values, [getattr(r, interval) for r in runs])
    return row


def mean_with_interval(
    values: Sequence[float | None], intervals: Sequence[Interval | None]
) -> tuple[float | None, Interval | None]:
    """The mean of independent figures and its interval; None where one of them is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    mean = sum(known) / len(known)
    if len(known) == 1 or None in intervals:
        return mean, intervals[0] if len(known) == 1 else None
    half = math.hypot(*((high - low) / 2 for low, high in filter(None, intervals))) / len(known)
    return mean, (mean - half, mean + half)


def _per_task(runs: Sequence[EvalRun]) -> list[Table]:
    """One table a task: every run."""
    tables = []
    for (pair, task), chosen in group_by_task(runs).items():
        title, part = records.name_task(pair, task, runs)
        busy = next((f"Where tokens/s are marked busy: {run.busy}." for run in chosen if run.busy), "")
        rows = tuple(run.row() for run in chosen)
        tables.append(Table(records.slug("task", part), title, _per_task_columns(chosen), rows, busy))
    return tables


def _per_task_columns(runs: Sequence[EvalRun]) -> tuple[Column, ...]:
    measure = runs[0].measure
    others = sorted({name for run in runs for name in run.scores} - {measure})
    return (
        word_column("rule", "rule", below=lambda r: "" if r["threshold"] is None else f"θ {r['threshold']:.3f}"),
        GAMMA,
        Column("n", "n", whole, lambda r: "" if r["n_scored"] in (None, r["n"]) else f"{r['n_scored']:,} scored"),
        PER_PASS,
        Column("Δm", "delta_m", formats.signed, "delta_m_ci", "against exact"),
        Column("m ratio", "m_ratio", fixed, "m_ratio_ci", "m over that of exact"),
        score_column(measure, "score", formats.points, "score_ci", "points"),
        score_column(f"Δ {measure}", "delta_score", formats.signed_points, "delta_ci", "points against exact"),
        *(_other_measure(name) for name in others),
        AGREEMENT,
        Column(
            "lost / gained",
            lambda r: None if r["lost"] is None else f"{r['lost']:,} / {r['gained']:,}",
            help="examples that score less than with exact, and more",
        ),
        Column("drafts/cycle", "drafts_accepted", fixed, help="drafted tokens accepted in a cycle"),
        Column("judged", "judged_share", percent, help="tokens taken against the target’s choice"),
        Column("no answer", "extraction_failures", percent, help="outputs without an extractable answer"),
        Column("cut off", "cut_off", percent, help="answers that ended at the length limit"),
        Column(
            "tokens/s",
            "tokens_per_second",
            lambda rate: whole(rate) if (rate or 0) >= 100 else formats.tenths(rate),
            lambda row: "busy" if row["busy"] else "",
            "rules by turns, a batch each",
        ),
        word_column("often judged", _list_substitutions, wide=True, help="target’s choice → token taken, how often"),
    )


def _list_substitutions(row: Row) -> str:
    """The most frequent tokens that were taken against the target's choice."""
    pairs = sorted(row["substitutions"], key=lambda pair: (-pair[2], pair))[:PAIRS_SHOWN]
    return ", ".join(f"{quote_token(choice)} → {quote_token(taken)} × {n}" for choice, taken, n in pairs)


def _other_measure(name: str) -> Column:
    def change(row: Row) -> str:
        if name not in row["delta_scores"]:
            return ""
        known = None if row["few"] else row["delta_scores_ci"].get(name)
        interval = formats.show_interval(known, formats.signed_points)
        return " ".join(filter(None, (formats.signed_points(row["delta_scores"][name]), interval)))

    return Column(name, lambda row: row["scores"].get(name), formats.points, change, "points; their change from exact")


def _provenance(runs: Sequence[EvalRun]) -> Table:
    """Where the figures come from: runs with the same provenance are one row."""
    names = ("pair", "judge", "judge_id", "batch", "max_new_tokens", *records.PROVENANCE)
    counts = Counter(tuple(getattr(run, name) for name in names) for run in runs)
    rows = tuple({**dict(zip(names, made, strict=True)), "runs": count} for made, count in counts.items())
    columns = (
        word_column("pair", "pair"),
        word_column("judge", "judge", below=lambda row: row["judge_id"][:12]),
        Column("runs", "runs"),
        word_column("machine", "machine", wide=True),
        word_column("dtype", "dtype"),
        Column("batch", "batch"),
        Column("new tokens", "max_new_tokens", help="the most that an answer may have"),
        word_column("versions", "versions", wide=True),
        Column("date", "date"),
        Column("commit", "commit"),
    )
    return Table("provenance", "Machines, judges, versions, dates", columns, rows)
