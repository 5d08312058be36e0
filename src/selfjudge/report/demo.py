"""The page of `selfjudge demo`, and its last sentences: the gain, then rules side by side, with answers by token."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from selfjudge.report.formats import Sentences, fixed, percent, tenths
from selfjudge.report.page import render
from selfjudge.report.records import ORIGINS
from selfjudge.report.tables import GAMMA, PER_PASS, RULE, Column, Table
from selfjudge.types import GLOSSARY


def _unless_busy(key: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: "busy" if row.get("busy") else row[key]


COLUMNS = (
    RULE,
    Column(GAMMA.head, "gamma_mean", tenths, help="mean of all steps"),
    PER_PASS,
    Column("judged", "judged_share", percent, help=f"tokens {GLOSSARY['judged']}"),
    Column("tokens/s", _unless_busy("tokens_per_second"), tenths, help="median of the turns"),
    Column("× plain", _unless_busy("speed_over_plain"), fixed, help="speed over plain decoding"),
    Column("same start", "same_start_as_plain", percent, help="mean share until plain decoding differs"),
)
"""Columns of rules side by side."""


def demo_page(result: Mapping[str, Any]) -> str:
    """One self-contained HTML page from the output of `selfjudge demo --json`. Only `rows` is required: a demo may have
    been stopped. A row with `tokens` (see `make_token_rows`) shows its first answer token by token, others as plain
    text. `gain` is the question on the large model, with rows of its own."""
    rows, gain, findings = result["rows"], result.get("gain") or {"rows": []}, describe_gain(result)
    notes = _say("notes", result, "" if "busy" in " ".join(findings) else result.get("busy", ""))  # busy: said once
    return render(
        "demo.html",
        title="Speculative decoding on this machine",
        findings=findings,
        gain=gain if gain["rows"] else None,
        gain_table=gain_table(gain) if gain["rows"] else None,
        table=Table("rules", "Rules side by side", COLUMNS, tuple(rows), notes) if rows else None,
        pair=result.get("pair") or "the small pair",
        prompt=result.get("prompt") or "",
        answers=[row for row in rows if row.get("tokens") or row.get("example")],
        origins=ORIGINS,
        following=describe_next(result),
        glossary=GLOSSARY,
    )


def describe_gain(result: Mapping[str, Any]) -> list[str]:
    """What was gained and what it cost, a sentence each: on the large model where it was asked, else on the small."""
    gain = {row["rule"]: row for row in (result.get("gain") or {}).get("rows", ())}
    if "exact" in gain:
        relaxed = next((row for name, row in gain.items() if name not in ("plain", "exact")), None)
        exact, busy = gain["exact"], result["gain"]["busy"]
        return [_say("gained", gain["plain"], exact, busy), _say("cost", exact, relaxed, busy)]
    rows = {row["rule"]: row for row in result["rows"]}
    judged = [row for row in result["rows"] if row["uses_judge"]]
    if not judged or "exact" not in rows:
        return ["The demo was stopped before a judge had answered."]
    best = max(judged, key=lambda row: row["mean_accepted_length"] or 0.0)
    return [_say("gained_small", best, rows["exact"], result.get("busy", "")), _say("cost_small", best)]


_say = Sentences("demo.txt", glossary=GLOSSARY)
describe_next = partial(_say, "next")  # what to type after the demo


def mark_substitutions(tokens: Sequence[Mapping[str, Any]]) -> str:
    """An answer as text, with every substitution as [accepted|what the target wanted]; line ends follow the bracket."""

    def mark(text: str, choice: str) -> str:
        return f"[{text}|{choice}]".replace("\n", "↵") + "\n" * text.count("\n")

    return "".join(mark(t["text"], t["choice"]) if t["origin"] == "judge" else t["text"] for t in tokens)


def gain_table(gain: Mapping[str, Any]) -> Table:
    """The question on the large model: what each rule took for it."""
    return Table("gain", "One question by turns", COLUMNS, tuple(gain["rows"]), _say("gain_note", gain))
