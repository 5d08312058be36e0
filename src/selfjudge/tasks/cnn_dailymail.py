"""CNN/DailyMail: news stories to summarise (Nallapati et al. 2016). There is no training split at hand."""

from __future__ import annotations

from functools import cache
from typing import Any

from selfjudge.tasks.base import Row, Task

MEASURES = ("rouge1", "rouge2", "rougeL")


class CnnDailymail(Task, columns={"id": str, "article": str, "highlights": str}):
    name = "cnn_dailymail"
    summary = "news stories to summarise"
    licence = "Apache-2.0"
    splits = ("test",)
    file = "test_first500.jsonl"
    new_tokens = 256
    hub = ("abisee/cnn_dailymail", "3.0.0")
    requires = ("rouge-score",)

    def prompt(self, row: Row) -> str:
        return ask_for_summary(row["article"])

    def story(self, row: Row) -> str:
        return str(row["article"])

    def score(self, row: Row, text: str) -> dict[str, float]:
        """F measures of words, pairs of words and the longest common subsequence, stemmed."""
        measured = _load_scorer().score(row["highlights"], text)
        return {name: float(measured[name].fmeasure) for name in MEASURES}


@cache
def _load_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(MEASURES, use_stemmer=True)


def ask_for_summary(text: str) -> str:
    """The prompt that asks for a summary of a text."""
    return f"Summarize the following article in a few sentences.\n\n{text}"
