"""CNN/DailyMail: news stories to summarise (Nallapati et al. 2016). There is no training split at hand."""

from __future__ import annotations

from selfjudge.tasks import Row, Task, read_jsonl


class CnnDailymail(Task):
    name = "cnn_dailymail"
    summary = "news stories to summarise"
    licence = "Apache-2.0"
    splits = ("test",)

    def rows(self, split: str) -> list[Row]:
        return read_jsonl(self.file("test_first500.jsonl"))

    def prompt(self, row: Row) -> str:
        return summarise(row["article"])


def summarise(text: str) -> str:
    """Ask for a summary."""
    return f"Summarize the following article in a few sentences.\n\n{text}"


TASK = CnnDailymail
