"""The page of `selfjudge demo`: the rules side by side, and the first answer under each of them, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from selfjudge.report.formats import fixed, percent, quote_token, tenths, thousandths
from selfjudge.report.page import render
from selfjudge.report.records import ORIGINS
from selfjudge.report.table import Column, Table, word_column


def demo_page(result: Mapping[str, Any]) -> str:
    """One self-contained HTML page from what `selfjudge demo --json` prints.

    A row of `result["rows"]` may have `tokens` of its first answer: `[text, origin, target's choice, its probability,
    judge's score]`. Without them the answer is shown as plain text. All but `rows` may be missing: a demo may have been
    stopped.
    """
    result = encodable(result)
    rows: list[dict[str, Any]] = result["rows"]
    return render(
        "demo.html",
        title="Speculative decoding with a judge, on this machine",
        finding=describe_result(result),
        table=_table(result),
        prompt=result.get("prompt") or "",
        answers=[_answer(row) for row in rows if row.get("tokens") or row.get("example")],
        data={},
    )


def describe_result(result: Mapping[str, Any]) -> str:
    """The result in one or two sentences: the fastest judge against `exact` and plain decoding."""
    rows = {row["rule"]: row for row in result["rows"]}
    judged = [row for row in result["rows"] if row["uses_judge"]]
    if not judged or "exact" not in rows:
        return "The demo was stopped before a judge had answered."
    best, exact = max(judged, key=lambda row: row["tokens_per_second"]), rows["exact"]
    m, m_exact = best["mean_accepted_length"], exact["mean_accepted_length"]
    passes = f"{m:.2f} tokens per target pass, exact {m_exact:.2f}; " if m and m_exact else ""
    parts = [
        f"The judge ({best['rule']}) yields {passes}it is {best['speed_over_plain']:.2f} × as fast as plain decoding,"
        f" exact {exact['speed_over_plain']:.2f} ×.",
        f"It accepts {percent(best['judged_share'])} of its tokens against the target’s choice. Its answers are those"
        f" of plain decoding for the first {100 * best['same_start_as_plain']:.0f} % of their tokens on average,"
        f" {100 * best['same_answer_as_plain']:.0f} % of them to the end.",
    ]
    if "plain" in rows:
        judge, plain = thousandths(best["log_likelihood"]), thousandths(rows["plain"]["log_likelihood"])
        parts.append(f"The target gives its tokens a log-likelihood of {judge}: its own greedy answers have {plain}.")
    return " ".join(parts)


def _table(result: Mapping[str, Any]) -> Table:
    columns = (
        word_column("rule", "rule"),
        Column("γ", "gamma"),
        Column("m", "mean_accepted_length", fixed, help="tokens per target pass"),
        Column("judged", "judged_share", percent, help="tokens taken against the target's choice"),
        Column("tokens/s", "tokens_per_second", tenths),
        Column("× plain", "speed_over_plain", fixed, help="speed over plain decoding"),
        Column("same start", "same_start_as_plain", percent, help="share of an answer that is plain decoding’s"),
        Column("log-likelihood", "log_likelihood", thousandths, help="of the answers, per token, by the target"),
    )
    quality = result.get("quality", 0.9)
    notes = [f"The judges’ threshold rejects {100 * quality:g} % of bad substitutions (q{quality:g})."]
    if result.get("dtype"):
        notes.append(f"Weights: {result['dtype']}, the draft’s {result['draft_dtype']}.")
    if result.get("tune"):
        notes.append(f"A small tune: {result['tune']['finding']} {result['tune']['claim']}")
    return Table("rules", "Rules side by side", columns, tuple(result["rows"]), " ".join(notes))


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = [show_token(*token) for token in row.get("tokens") or ()]
    counts = Counter(token["origin"] for token in tokens)
    return {
        "rule": row["rule"],
        "text": row.get("example") or "",
        "tokens": tokens,
        "counts": ", ".join(f"{counts[origin]} {origin}" for origin in ORIGINS) if tokens else "",
    }


def show_token(
    text: str, origin: str, choice: str | None = None, probability: float | None = None, score: float | None = None
) -> dict[str, str]:
    """A token as the template shows it; `wanted` is the target's choice where that is another token."""
    wanted = ""
    if choice is not None and choice != text:
        certainty = "" if probability is None else f" (p {probability:.2f})"
        judged = "" if score is None else f"; judge’s score {score:.2f}"
        wanted = f"target wanted {quote_token(choice)}{certainty}{judged}"
    return {"text": text, "origin": origin if origin in ORIGINS else "draft", "wanted": wanted}


def encodable(value: Any) -> Any:
    """The value with lone surrogates, which UTF-8 cannot encode, replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {encodable(k): encodable(v) for k, v in value.items()}
    return [encodable(v) for v in value] if isinstance(value, list) else value
