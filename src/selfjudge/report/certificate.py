"""The certificate as a page and as text: a sentence, the evidence, the rules, answers lost and gained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfjudge.report.charts import Chart, Point, Series
from selfjudge.report.demo import show_token
from selfjudge.report.draw import draw
from selfjudge.report.formats import fixed, points, show_interval, show_text, signed_points, tenths, whole
from selfjudge.report.page import render
from selfjudge.report.table import GAMMA, PER_PASS, Column, Table, escape, word_column
from selfjudge.report.verdict import LOW_SCORE
from selfjudge.store import fill_template

SMALLEST_GAIN = {"tokens_per_second": 0.03, "mean_accepted_length": 0.05}
"""A smaller gain is not worth an answer: `exact` is recommended. Tokens per pass, without times, must show more."""
COMMAND = "selfjudge serve --recipe ."
UNITS = {
    "score": "points",
    "same_answer": "points of agreement (same extracted answer as exact)",
    "overlap": "points of agreement (words in common with exact)",
}
"""Unit of each measure."""
ASSETS = Path(__file__).with_name("assets")


def make_title(certificate: Mapping[str, Any]) -> str:
    if certificate["certified"]:
        return f"Certificate for {certificate['pair']}"
    return f"{'Nothing to gain' if _has_certified(certificate) else 'Nothing certified'} for {certificate['pair']}"


def describe_baseline(certificate: Mapping[str, Any]) -> str:
    """How `exact` and plain decoding do: their score, and their speeds where they are known."""
    exact = certificate.get("exact") or {}
    n, score = whole(exact.get("n") or certificate["n"]), exact.get("score")
    compared = f"Rules are compared with exact on {n} prompts by {certificate['measure_words']}"
    sentence = compared if score is None else f"Exact decoding scores {points(score)} of 100 points on {n} prompts"
    rate, plain = exact.get("tokens_per_second"), exact.get("plain_tokens_per_second")
    if rate:
        sentence += f"{',' if score is None else ''} at {tenths(rate)} tokens/s"
    return sentence + (f"; plain decoding, with the same answers, at {tenths(plain)} tokens/s." if plain else ".")


def describe_verdict(certificate: Mapping[str, Any]) -> str:
    """What is gained and what may be lost, for a reader without statistics."""
    if not certificate["certified"]:
        return describe_result(certificate)
    runs, epsilon = 1 / certificate["delta"], points(certificate["epsilon"]).removesuffix(".0")
    often = f"{runs - 1:.0f} times out of {runs:.0f}" if abs(runs - round(runs)) < 1e-6 else _confidence(certificate)
    unit = "answers in 100" if _has_right_and_wrong(certificate) else "points of 100"
    gain = fixed(100 * (certificate["speed_ratio"] - 1), 0)
    timed = certificate["speed_measure"] == "tokens_per_second"
    gained = f"{gain} % in speed over exact" if timed else f"{gain} % in tokens per target pass; the speed is not known"
    lost = {
        "score": f"You lose at most {epsilon} {unit}",
        "same_answer": f"At most {epsilon} answers in 100 differ from those of exact",
        "overlap": f"At most {epsilon} % of the words differ from those of exact",
    }[certificate["measure"]]
    return f"You gain {gained}. {lost}, {often}."


def _has_right_and_wrong(certificate: Mapping[str, Any]) -> bool:
    """Whether scores change by whole answers alone."""
    return all(re.fullmatch(r"((\d+\*)?-?[01]( |$))*", row["differences"]) for row in certificate["candidates"])


def describe_result(certificate: Mapping[str, Any]) -> str:
    """The result in a sentence, and in another one why it has no speeds, if they were not reliable."""
    doubt = describe_unreliable(certificate)
    if not certificate["certified"]:
        best, use = ("plain decoding", "no drafts") if plain_wins(certificate) else ("exact", "exact")
        why = "" if not certificate["stopped"] else " so far (the time was up)"
        closest = _describe_closest(certificate)
        result = f"Nothing here beats {best}{why}{closest and f': {closest}'}."
        return f"{result} Use {use} (γ = {certificate['gamma']}).{doubt and f' {doubt}'}"
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


def _describe_closest(certificate: Mapping[str, Any]) -> str:
    """Why the fastest certified rule was not taken; empty if none is certified."""
    compared = [row for row in certificate["candidates"] if row["refuted"] and row["speed_ci"] is not None]
    if not compared:
        return ""
    row = max(compared, key=lambda row: row["speed_ci"][0])
    low, high = row["speed_ci"]
    how = "slower" if high < 1 else "hardly faster" if low > 1 else "not shown to be faster"
    return f"{row['rule']} is certified, but {how} ({_gain({**certificate, **row})})"


def _has_certified(certificate: Mapping[str, Any]) -> bool:
    return any(row["refuted"] for row in certificate["candidates"])


def plain_wins(certificate: Mapping[str, Any]) -> bool:
    """Whether nothing was faster than plain decoding: the recipe then makes no drafts."""
    return not certificate["certified"] and certificate["exact_over_plain"] == 1


def _confidence(certificate: Mapping[str, Any]) -> str:
    return f"with {points(1 - certificate['delta']).removesuffix('.0')} % confidence"


def describe_claim(certificate: Mapping[str, Any]) -> str:
    """The claim, and the prompts it holds for."""
    unit, confidence = UNITS[certificate["measure"]], _confidence(certificate)
    if not certificate["certified"]:
        lost = f"to lose at most {points(certificate['epsilon'])} {unit} {confidence}"
        if _has_certified(certificate):
            measure = certificate["speed_measure"]
            what = "faster" if measure == "tokens_per_second" else "ahead in tokens per target pass"
            faster = f"is surely {what} and gains {100 * SMALLEST_GAIN[measure]:.0f} % or more"
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
        f" {unit} are lost against exact decoding,{mean} {confidence}{plain}."
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


def list_other_commands(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What may be run instead of COMMAND, in the folder of the certificate: when, and the command."""
    flags = certificate.get("flags") or {"selfjudge": "", "vllm": None}
    others = [("Inside vLLM", f"{COMMAND} --backend vllm")] if flags["vllm"] else []
    options = " ".join(flags["selfjudge"].split())
    return [*others, ("The same by its options, unchecked", f"selfjudge serve {options}")] if options else others


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


def _contents(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """What the page and the text both say, by the names in their templates."""
    table, untried = _split_candidates(certificate)
    return {
        "certificate": certificate,
        "title": make_title(certificate),
        "doubt": describe_doubt(certificate),
        "baseline": describe_baseline(certificate),
        "verdict": describe_verdict(certificate),
        "finding": describe_result(certificate),
        "claim": describe_claim(certificate),
        "command": COMMAND,
        "others": list_other_commands(certificate),
        "notes": fill_template(ASSETS / "notes.txt", certificate=certificate, points=points).splitlines(),
        "facts": _facts(certificate),
        "table": table,
        "untried": untried,
    }


def certificate_markdown(certificate: Mapping[str, Any]) -> str:
    """The certificate as text; names of models and files are escaped, commands stand in a block of code."""
    return fill_template(ASSETS / "certificate.md", escape=escape, **_contents(certificate))


def certificate_page(certificate: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML page. `examples` are answers lost and gained, with the tokens of both."""
    evidence = certificate["evidence"]
    chart = draw(_evidence_chart(evidence, certificate["rule"])).svg if evidence else None
    forms = {"points": signed_points, "fixed": fixed, "show": _show_tokens}
    return render("certificate.html", **_contents(certificate), **forms, drawing=chart, examples=examples, data={})


def _show_tokens(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        show_token(t["text"], t["origin"], t.get("choice"), t.get("p_choice"), t.get("judge")) for t in answer["tokens"]
    ]
