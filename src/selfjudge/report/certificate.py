"""The certificate as a page and as text: a sentence, the evidence, the rules, answers lost and gained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from selfjudge.report.charts import Chart, Point, Series
from selfjudge.report.demo import show_token
from selfjudge.report.draw import draw
from selfjudge.report.formats import fixed, points, show_interval, show_text, signed_points, tenths, whole
from selfjudge.report.page import render
from selfjudge.report.table import GAMMA, PER_PASS, Column, Table, escape, word_column
from selfjudge.report.verdict import LOW_SCORE

RUN = "Run this in the folder of this certificate"
UNITS = {
    "score": "points",
    "same_answer": "points of agreement (same extracted answer as exact)",
    "overlap": "points of agreement (words in common with exact)",
}
"""Unit of each measure."""
SPEEDS = (
    "Speeds are of the certified rules with most tokens per pass. They, exact and plain decoding answered the same"
    " batches in turn."
)


def make_title(certificate: Mapping[str, Any]) -> str:
    return f"{'Certificate' if certificate['certified'] else 'Nothing certified'} for {certificate['pair']}"


def describe_result(certificate: Mapping[str, Any]) -> str:
    """The result in a sentence, and in another one why it has no speeds, if they were not reliable."""
    doubt = describe_unreliable(certificate)
    if not certificate["certified"]:
        why = "" if not certificate["stopped"] else " so far (the time was up)"
        if plain_wins(certificate):
            return f"Nothing here beats plain decoding{why}: use exact without a recipe (--gamma auto or 0)."
        where = " in tokens per target pass" if doubt and _has_certified(certificate) else ""
        return f"Nothing here beats exact{where}{why}: use exact (γ = {certificate['gamma']}).{doubt and f' {doubt}'}"
    interval = show_interval(certificate["mean_difference_ci"], signed_points)
    change = f"{signed_points(certificate['mean_difference'])} {interval} {UNITS[certificate['measure']]}"
    return (
        f"{certificate['rule']} (γ = {certificate['gamma']}): {_gain(certificate)}, {change},"
        f" certified ≤ {points(certificate['epsilon']).removesuffix('.0')}.{doubt and f' {doubt}'}"
    )


def describe_unreliable(certificate: Mapping[str, Any]) -> str:
    """Why there are no speeds, and what to do; empty if they are reliable, or were not asked for."""
    doubt = certificate.get("unreliable", "")
    if not doubt:
        return ""
    if not _has_certified(certificate):
        return f"Speeds are not stated: {doubt}."
    return f"Speeds were not compared: {doubt}. Run it again with --resume: the answers are kept."


def _has_certified(certificate: Mapping[str, Any]) -> bool:
    return any(row["refuted"] for row in certificate["candidates"])


def plain_wins(certificate: Mapping[str, Any]) -> bool:
    """Whether nothing was faster than plain decoding: then no recipe is of use."""
    return not certificate["certified"] and certificate["exact_over_plain"] == 1


def describe_claim(certificate: Mapping[str, Any]) -> str:
    """The claim, and the prompts it holds for."""
    unit, confidence = UNITS[certificate["measure"]], points(1 - certificate["delta"]).removesuffix(".0")
    if not certificate["certified"]:
        lost = f"to lose at most {points(certificate['epsilon'])} {unit} with {confidence} % confidence"
        if _has_certified(certificate):
            faster = (
                "surely yields more tokens per target pass" if certificate.get("unreliable") else "was surely faster"
            )
            return f"Exact decoding loses nothing. Relaxed rules were certified {lost}; none {faster}."
        return f"Exact decoding loses nothing. No relaxed rule was certified {lost}."
    plain = ""
    if certificate["exact_over_plain"] and certificate["speed_measure"] == "tokens_per_second":
        over = certificate["exact_over_plain"] * certificate["speed_ratio"]
        plain = f"; {fixed(over)} × plain speed"
    single = _is_single(certificate)
    what, mean = ("prompts", "") if single else ("groups of prompts", " in the mean over groups of equal weight,")
    return (
        f"On {what} like these {whole(certificate['n'])}, at most {points(certificate['epsilon'])}"
        f" {unit} are lost against exact decoding,{mean} with {confidence} % confidence{plain}."
        " It is void for other prompts, models, engines or settings."
    )


def _is_single(certificate: Mapping[str, Any]) -> bool:
    """Whether every prompt is a group of its own."""
    return re.fullmatch(r"(\d+\*)?1|", certificate["groups"]) is not None


def describe_doubt(certificate: Mapping[str, Any]) -> str:
    """Why the certificate says little: `exact` itself is hardly ever right, or gives no answers; else empty."""
    exact = certificate.get("exact") or {}
    n, score, missed = exact.get("n") or 0, exact.get("score"), exact.get("without_answer") or 0
    if not n or ((score is None or score >= LOW_SCORE) and missed <= n / 2):
        return ""
    reasons = [] if score is None else [f"exact itself scores {points(score)} of 100 points"]
    reasons += [f"{missed} of its {n} outputs contain no extractable answer"] if missed else []
    cut = exact.get("cut_off") or 0
    advice = "Its answers are extracted, and wrong: take prompts that this target can answer, or another pair"
    if missed > n / 2:
        advice = 'Let prompts ask for an answer that can be extracted, such as "The answer is …"'
        if cut > missed / 2:
            advice = f"{cut} of these were cut off at the length limit: raise --max-new-tokens"
    return f"There is little to lose here: {' and '.join(reasons)}. {advice}, or certify agreement (--measure overlap)."


def _gain(certificate: Mapping[str, Any]) -> str:
    """The speed against `exact`."""

    def change(ratio: float) -> str:
        return fixed(100 * (ratio - 1), 0, "+")

    what = "tokens/s" if certificate["speed_measure"] == "tokens_per_second" else "tokens per target pass"
    return f"{change(certificate['speed_ratio'])} % {show_interval(certificate['speed_ci'], change)} {what}"


def _notes(certificate: Mapping[str, Any]) -> list[str]:
    """How the rule was found, and what the figures besides the claim are."""
    lines = [
        f"Measured: {certificate['measure_words']}. One observation a group: prompts of one “group” and near-duplicates"
        f" ({certificate['similar']:.0%} of their 3-word pieces in common) count together, by their mean.",
        f"Attempt {certificate['attempt']} on these prompts, as far as this machine knows. All attempts together are"
        f" wrong with probability δ = {certificate['delta']:g} at most, so later ones have smaller shares.",
        f"Families ({', '.join(certificate['families'])}) have equal shares of that. In a family the rules are tested"
        " from strict to loose, in an order fixed beforehand, until one is not certified.",
        "Brackets are 95 % bootstrap intervals: of the change and of tokens per pass over prompts, of the speed over"
        " turns. They are not part of the certificate, and do not allow for the choice among rules.",
        *([SPEEDS] if certificate["speed_measure"] == "tokens_per_second" else []),
    ]
    if evidence := certificate["evidence"]:
        lines.append(
            f"The bet was won after {evidence['refuted_at']} observations (p = {evidence['p_value']:.2g} at any time,"
            f" {evidence['delta']:.3g} was needed). {certificate['lost']} answers lost and {certificate['gained']}"
            f" gained; the share of observations with a loss is at most {points(evidence['lost_bound'])} % (exact"
            " binomial bound, for a rule chosen beforehand)."
        )
    return lines


def _facts(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The models, prompts, engine and versions that the certificate holds for."""
    versions = ", ".join(f"{name} {number}" for name, number in certificate["versions"].items())
    machine = certificate.get("machine") or {}
    return [
        ("pair", certificate["pair"]),
        ("rule", f"{certificate['resolved']}, γ = {certificate['gamma']}"),
        ("target, sha256", show_text(certificate.get("target_sha256"))),
        ("draft, sha256", show_text(certificate.get("draft_sha256"))),
        ("tokenizer, sha256", certificate["tokenizer_sha256"]),
        ("prompts", f"{certificate['task']}, sha256 {certificate['prompts_sha256']}"),
        ("engine", f"{certificate['engine']}, {certificate['dtype']}, {certificate.get('batch')} prompts at a time"),
        ("machine", show_text(machine.get("gpu") or machine.get("cpu") or machine.get("arch"))),
        ("versions", versions),
        ("date", certificate["date"]),
    ]


def list_commands(certificate: Mapping[str, Any]) -> list[str]:
    """Commands to run in the folder of the certificate."""
    flags = certificate.get("flags")
    if not flags:
        return []
    if plain_wins(certificate):
        return [f"selfjudge serve {flags['selfjudge'].partition(' --rule ')[0]}"]
    lines = ["selfjudge serve --recipe .", f"selfjudge serve {flags['selfjudge']}"]
    return [*lines, flags["vllm"]] if flags["vllm"] else lines


def _split_candidates(certificate: Mapping[str, Any]) -> tuple[Table, str]:
    """The rules that were tried with their outcomes, and a line that names the others."""
    by_m = certificate["speed_measure"] != "tokens_per_second"
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
        Column("m × exact" if by_m else "speed × exact", "speed_ratio", fixed, "speed_ci", best),
    )
    tried = [row for row in certificate["candidates"] if row["n_used"]]
    others: dict[str, list[str]] = {}
    for row in certificate["candidates"]:
        if not row["n_used"]:
            others.setdefault(row["why"].removeprefix("not tried: "), []).append(row["rule"])
    listed = "; ".join(f"{', '.join(rules)} ({why})" for why, rules in others.items())
    return Table("candidates", "Rules that were tried", columns, tuple(tried)), listed


def _evidence_chart(evidence: Mapping[str, Any], rule: str) -> Chart:
    """The capital of the bet over the prompts; it is won at the dotted line."""
    course = tuple(Point(t, value, f"after {t} prompts: ln K = {value:.4f}") for t, value in evidence["log_capital"])
    series = (Series(rule, 1, course, marked=False),)
    return Chart("evidence", "Evidence over prompts", "prompts", "ln of the capital", series, level=evidence["goal"])


def certificate_markdown(certificate: Mapping[str, Any]) -> str:
    """The certificate as text; names of models and files are escaped, commands stand in a block of code."""
    table, untried = _split_candidates(certificate)
    doubt = describe_doubt(certificate)
    parts = [
        f"# {escape(make_title(certificate))}",
        *([f"**{doubt}**"] if doubt else []),
        describe_result(certificate),
        describe_claim(certificate),
        *(
            [f"{RUN}:", "\n".join(f"    {' '.join(line.split())}" for line in lines)]
            if (lines := list_commands(certificate))
            else []
        ),
        "\n".join(f"- {line}" for line in _notes(certificate)),
        *([table.markdown().rstrip()] if table.rows else []),
        *([f"Not tried: {escape(untried)}."] if untried else []),
        "\n".join(f"- {name}: {escape(value)}" for name, value in _facts(certificate)),
    ]
    return "\n\n".join(parts) + "\n"


def certificate_page(certificate: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML page. `examples` are answers lost and gained, with the tokens of both."""
    evidence = certificate["evidence"]
    table, untried = _split_candidates(certificate)
    return render(
        "certificate.html",
        title=make_title(certificate),
        doubt=describe_doubt(certificate),
        finding=describe_result(certificate),
        claim=describe_claim(certificate),
        run=RUN,
        commands=list_commands(certificate),
        notes=_notes(certificate),
        facts=_facts(certificate),
        drawing=draw(_evidence_chart(evidence, certificate["rule"])).svg if evidence else None,
        table=table,
        untried=untried,
        count_untried=len(certificate["candidates"]) - len(table.rows),
        examples=[_example(example) for example in examples],
        data={},
    )


def _example(example: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": example["kind"],
        "id": example["id"],
        "difference": signed_points(example["difference"]),
        "prompt": example["answers"][0]["prompt"],
        "answers": [
            {
                "rule": answer["rule"],
                "answer": answer["answer"],
                "score": fixed(answer["score"]) if answer["score"] is not None else "",
                "tokens": [
                    show_token(t["text"], t["origin"], t.get("choice"), t.get("p_choice"), t.get("judge"))
                    for t in answer["tokens"]
                ],
            }
            for answer in example["answers"]
        ],
    }
