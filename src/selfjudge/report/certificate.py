"""The certificate as a page: a sentence, the evidence, the rules, answers lost and gained."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from selfjudge.report.charts import Chart, Point, Series
from selfjudge.report.draw import draw
from selfjudge.report.formats import Sentences, fixed, points, show_count, signed_points, tenths, whole
from selfjudge.report.page import render
from selfjudge.report.tables import GAMMA, PER_PASS, Column, Row, Table, word_column
from selfjudge.report.verdict import LOW_SCORE

SMALLEST_GAIN = {"tokens_per_second": 0.03, "expected_tokens_per_second": 0.05, "mean_accepted_length": 0.05}
"""A smaller gain is not worth an answer: `exact` is recommended. What was not timed must show more."""
GAINS = {
    "tokens_per_second": ("tokens/s", "speed × exact"),
    "expected_tokens_per_second": ("tokens/s, as expected", "expected speed × exact"),
    "mean_accepted_length": ("tokens per target pass", "m × exact"),
}
"""What a gain is of, by how speeds compare, in a sentence and as the head of a column."""
WHOLE_ANSWERS = re.compile(r"((\d+\*)?-?[01]( |$))*")  # differences of a score that changes by whole answers alone


def _find_closest(certificate: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest certified rule, which was not taken; None if none is certified and compared at this load."""
    own = [row for row in certificate["candidates"] if row["speed_load"] == certificate["load"]]
    compared = [row for row in own if row["refuted"] and row["speed_ci"] is not None]
    return max(compared, key=lambda row: row["speed_ci"][0], default=None)


def list_loads(certificate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The certificate as it is for each load."""
    return [dict(certificate), *({**certificate, **row} for row in certificate["more_loads"])]


_describe = Sentences(
    "certificate.txt", gains=GAINS, low_score=LOW_SCORE, smallest_gain=SMALLEST_GAIN,
    trimmed=lambda share: points(share).removesuffix(".0"), ratio=lambda ratio: fixed(100 * (ratio - 1), 0, "+"),
    has_right_and_wrong=lambda known: all(WHOLE_ANSWERS.fullmatch(row["differences"]) for row in known["candidates"]),
    find_closest=_find_closest,
    is_single=lambda known: re.fullmatch(r"(\d+\*)?1|", known["groups"]) is not None,
)  # fmt: skip
describe_baseline = partial(_describe, "baseline")  # how `exact` and plain decoding do
describe_verdict = partial(_describe, "verdict")  # gain and loss, for a reader without statistics
describe_result = partial(_describe, "result")  # the result, and why it has no speeds, if they were not reliable
describe_by_load = partial(_describe, "by_load")  # the result for one load
describe_claim = partial(_describe, "claim")  # what is claimed, and for which prompts
describe_doubt = partial(_describe, "doubt")  # why it says little, where `exact` is hardly ever right; else empty


def _split_candidates(certificate: Mapping[str, Any]) -> tuple[Table, str]:
    """The rules that were tried with their outcomes, and a line that names the others."""
    best = "against exact at its own best γ, which may be 0"
    columns = (
        word_column("rule", "rule"),
        word_column("outcome", "why", wide=True),
        GAMMA,
        Column("prompts", "n_used", whole),
        Column("change, points", "mean_difference", signed_points),
        Column("lost", "lost", whole),
        Column("gained", "gained", whole),
        PER_PASS,
        Column("tokens/s", "tokens_per_second", tenths),
        Column(GAINS[certificate["speed_measure"]][1], "speed_ratio", fixed, "speed_ci", best),
    )
    tried = [row for row in certificate["candidates"] if row["n_used"]]
    others: dict[str, list[str]] = {}
    for row in certificate["candidates"]:
        if not row["n_used"]:
            others.setdefault(row["why"].removeprefix("not tried: "), []).append(row["rule"])
    listed = "; ".join(f"{', '.join(rules)} ({why})" for why, rules in others.items())
    return Table("candidates", "Rules that were tried", columns, tuple(tried)), listed


def _tabulate_loads(certificate: Mapping[str, Any]) -> Table | None:
    """What is chosen for each load; None if there is one."""

    def read_exact(name: str) -> Callable[[Row], float | None]:
        return lambda row: (row.get("exact") or {}).get(name)

    columns = (
        Column("requests at a time", "load", whole),
        word_column("rule", lambda row: row["rule"] if row["gamma"] else "plain decoding"),
        GAMMA,
        Column("change, points", "mean_difference", signed_points, "mean_difference_ci"),
        Column("exact, tokens/s", read_exact("tokens_per_second"), tenths, help="at its own best γ"),
        Column("plain, tokens/s", read_exact("plain_tokens_per_second"), tenths),
        Column(GAINS[certificate["speed_measure"]][1], "speed_ratio", fixed, "speed_ci"),
    )
    rows = list_loads(certificate)
    return Table("loads", "By load", columns, tuple(rows)) if len(rows) > 1 else None


def certificate_page(certificate: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML page. `examples` are answers lost and gained, with the tokens of both."""
    chart, (table, untried) = None, _split_candidates(certificate)
    if evidence := certificate["evidence"]:  # the capital of the bet over the prompts; it is won at the dotted line
        course = (Point(t, k, f"after {show_count(t, 'prompt')}: ln K = {k:.4f}") for t, k in evidence["log_capital"])
        series, heads = Series(certificate["rule"], 1, tuple(course), marked=False), ("prompts", "ln of the capital")
        chart = Chart("evidence", "Evidence over prompts", *heads, (series,), level=evidence["goal"])
    return render(
        "certificate.html",
        certificate=certificate,
        describe=_describe,
        title=_describe("title", certificate),
        loads=_tabulate_loads(certificate),
        table=table,
        untried=untried,
        drawing=chart and draw(chart),
        examples=examples,
    )
