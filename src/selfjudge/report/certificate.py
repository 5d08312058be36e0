"""The certificate for people: a sentence, the evidence, every rule that was tried, answers lost and gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfjudge.report.charts import Lines, Point, Series
from selfjudge.report.demo import show_token, writable
from selfjudge.report.draw import draw
from selfjudge.report.page import render
from selfjudge.report.table import Column, Table, fixed, points, signed_points, text, whole, word_column
from selfjudge.report.verdict import LITTLE

RUN = "Run this in the folder of this certificate"


def finding(certificate: Mapping[str, Any]) -> str:
    """What came out, in a sentence."""
    if not certificate["certified"]:
        why = "" if not certificate["stopped"] else " so far (the time was up)"
        if plain_wins(certificate):
            return f"Nothing here beats plain decoding{why}: use exact without a recipe (--gamma auto or 0)."
        return f"Nothing here beats exact{why}: use exact (γ = {certificate['gamma']})."
    low, high = certificate["mean_difference_ci"]
    change = f"{signed_points(certificate['mean_difference'])} [{signed_points(low)}, {signed_points(high)}]"
    return (
        f"{certificate['rule']} (γ = {certificate['gamma']}): {gain(certificate)}, {change} {unit(certificate)},"
        f" certified ≤ {fixed(100 * certificate['epsilon'], 1).removesuffix('.0')}."
    )


def plain_wins(certificate: Mapping[str, Any]) -> bool:
    """Whether nothing was faster than plain decoding: then there is no recipe to be used."""
    return not certificate["certified"] and certificate["exact_over_plain"] == 1


def claim(certificate: Mapping[str, Any]) -> str:
    """What is claimed, of which prompts."""
    confidence = fixed(100 * (1 - certificate["delta"]), 1).removesuffix(".0")
    if not certificate["certified"]:
        lost = f"to lose at most {points(certificate['epsilon'])} {unit(certificate)} with {confidence} % confidence"
        if any(row["refuted"] for row in certificate["candidates"]):
            return f"Exact decoding loses nothing. Relaxed rules were certified {lost}; none was surely faster."
        return f"Exact decoding loses nothing. No relaxed rule was certified {lost}."
    plain = ""
    if certificate["exact_over_plain"] and certificate["speed_measure"] == "tokens_per_second":
        over = certificate["exact_over_plain"] * certificate["speed_ratio"]
        plain = f"; {fixed(over)} × plain speed"
    return (
        f"On prompts like these {whole(certificate['n'])}, at most {points(certificate['epsilon'])} {unit(certificate)}"
        f" are lost against exact decoding, with {confidence} % confidence{plain}. It is void for other prompts,"
        " models, engines or settings."
    )


def doubt(certificate: Mapping[str, Any]) -> str:
    """Why it says little: `exact` itself is hardly ever right here, or its answers are not found; else empty."""
    exact = certificate.get("exact") or {}
    n, score, missed = exact.get("n") or 0, exact.get("score"), exact.get("without_answer") or 0
    if not n or ((score is None or score >= LITTLE) and missed <= n / 2):
        return ""
    said = [] if score is None else [f"exact itself scores {points(score)} of 100 points"]
    said += [f"in {missed} of its {n} answers none was found"] if missed else []
    mend = (
        'Let prompts ask for an answer that is found, such as "The answer is …"'
        if missed > n / 2
        else "Its answers are found, and wrong: take prompts that this target can answer, or another pair"
    )
    return f"There is little to lose here: {' and '.join(said)}. {mend}, or certify agreement (--measure overlap)."


def gain(certificate: Mapping[str, Any]) -> str:
    """Speed against `exact`."""
    low, high = (100 * (end - 1) for end in certificate["speed_ci"])
    what = "tokens/s" if certificate["speed_measure"] == "tokens_per_second" else "tokens per target pass"
    ratio = fixed(100 * (certificate["speed_ratio"] - 1), 0, "+")
    return f"{ratio} % [{fixed(low, 0, '+')}, {fixed(high, 0, '+')}] {what}"


def unit(certificate: Mapping[str, Any]) -> str:
    """What a point is a point of."""
    return {
        "score": "points",
        "same_answer": "points of agreement (same extracted answer as exact)",
        "overlap": "points of agreement (words in common with exact)",
    }[certificate["measure"]]


def notes(certificate: Mapping[str, Any]) -> list[str]:
    """How it was found, and what the figures beside the claim are."""
    every = dict.fromkeys(row["family"] for row in certificate["candidates"])
    families = certificate.get("families", list(every))  # earlier versions did not write them
    lines = [
        *([doubt(certificate)] if doubt(certificate) else []),
        f"Measured: {certificate['measure_words']}. One prompt is one observation, a repeated prompt counts once.",
        f"Families ({', '.join(families)}) have equal shares of δ = {certificate['delta']:g}. In a family the rules are"
        " tested from strict to loose, in an order that was fixed before, until one is not certified.",
        "Brackets are 95 % bootstrap intervals: of the change over prompts, of the speed over batches. They are no part"
        " of the certificate, and do not allow for the choice among rules.",
    ]
    if evidence := certificate["evidence"]:
        lines.append(
            f"The bet was won after {evidence['refuted_at']} prompts (p = {evidence['p_value']:.2g} at any time,"
            f" {evidence['delta']:.3g} was needed). {certificate['lost']} answers lost and {certificate['gained']}"
            f" gained of {certificate['n']}; the share lost is at most {points(evidence['lost_bound'])} % (exact"
            " binomial bound, for a rule chosen beforehand)."
        )
    return lines


def facts(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the certificate is bound to."""
    versions = ", ".join(f"{name} {number}" for name, number in certificate["versions"].items())
    machine = certificate.get("machine") or {}
    return [
        ("pair", certificate["pair"]),
        ("target, sha256", text(certificate.get("target_sha256"))),
        ("draft, sha256", text(certificate.get("draft_sha256"))),
        ("prompts", f"{certificate['task']}, sha256 {certificate['prompts_sha256']}"),
        ("engine", f"{certificate['engine']}, {certificate['dtype']}, {certificate.get('batch')} prompts at a time"),
        ("machine", text(machine.get("gpu") or machine.get("cpu") or machine.get("arch"))),
        ("versions", versions),
        ("date", certificate["date"]),
    ]


def commands(certificate: Mapping[str, Any]) -> list[str]:
    """What to run, in the folder of the certificate."""
    flags = certificate.get("flags")
    if not flags:
        return []
    if plain_wins(certificate):
        return [f"selfjudge serve {flags['selfjudge'].partition(' --rule ')[0]}"]
    lines = ["selfjudge serve --recipe .", f"selfjudge serve {flags['selfjudge']}"]
    return [*lines, flags["vllm"]] if flags["vllm"] else lines


def candidates_table(certificate: Mapping[str, Any]) -> Table:
    """Every rule, and what came of it."""
    by_m = certificate["speed_measure"] != "tokens_per_second"
    columns = (
        word_column("rule", "rule"),
        word_column("family", "family"),
        Column("γ", "gamma"),
        Column("prompts", "n_used", whole),
        Column("change, points", "mean_difference", signed_points),
        Column("lost", "lost", whole),
        Column("gained", "gained", whole),
        Column("m", "mean_accepted_length", fixed, help="tokens per target pass"),
        Column("tokens/s", "tokens_per_second", lambda rate: fixed(rate, 1)),
        Column(
            "m × exact" if by_m else "speed × exact",
            "speed_ratio",
            fixed,
            below="speed_ci",
            help="against exact at its own best γ, which may be 0",
        ),
        word_column("what came of it", "why", wide=True),
    )
    return Table("candidates", "Every rule that was tried", columns, tuple(certificate["candidates"]))


def evidence_chart(certificate: Mapping[str, Any]) -> Lines | None:
    """The capital of the bet over the prompts; it is won at the dotted line."""
    evidence = certificate["evidence"]
    if not evidence:
        return None
    course = tuple(Point(t, value, f"after {t} prompts: ln K = {value}") for t, value in evidence["log_capital"])
    series = Series(certificate["rule"], 1, course, marked=False)
    return Lines("evidence", "Evidence over prompts", "prompts", "ln of the capital", (series,), level=evidence["goal"])


def certificate_markdown(certificate: Mapping[str, Any]) -> str:
    """The certificate as text."""
    parts = [
        f"# Certificate for {certificate['pair']}",
        finding(certificate),
        claim(certificate),
        *([f"{RUN}:", "\n".join(f"    {line}" for line in commands(certificate))] if commands(certificate) else []),
        "\n".join(f"- {line}" for line in notes(certificate)),
        candidates_table(certificate).markdown().rstrip(),
        "\n".join(f"- {name}: {value}" for name, value in facts(certificate)),
    ]
    return "\n\n".join(parts) + "\n"


def certificate_page(certificate: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML page. `examples` are answers lost and gained, with the tokens of both."""
    chart = evidence_chart(certificate)
    return render(
        "certificate.html",
        title=f"Certificate for {certificate['pair']}",
        finding=finding(certificate),
        claim=claim(certificate),
        run=RUN,
        commands=commands(certificate),
        notes=notes(certificate),
        facts=facts(certificate),
        chart=chart,
        drawing=None if chart is None else draw(chart).svg,
        table=candidates_table(certificate),
        examples=[_example(writable(dict(example))) for example in examples],
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
