"""Benchmarks whose answers are numbers, letters, formulas or texts. Those that ask for programs are in `code`."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from hashlib import sha256
from typing import Any, Literal

from selfjudge.tasks.base import Row, Task, normalise_words
from selfjudge.tasks.scoring import find_boxed, find_final_number, find_numbers, find_tagged, same_maths, same_number


class Gsm8k(Task, columns={"question": str, "answer": str}):
    """Grade-school word problems (Cobb et al. 2021)."""

    name = "gsm8k"
    summary = "grade-school word problems; the last number is the answer"
    licence = "MIT"
    splits = ("train", "test")
    checkable = True
    hub = ("openai/gsm8k", "main")

    def prompt(self, row: Row) -> str:
        return f'{row["question"]}\nReason step by step, then end with "The final answer is [answer]".'

    def gold(self, row: Row) -> str | None:
        return next(iter(find_numbers(row["answer"].rpartition("####")[2])), None)

    def extract(self, row: Row, text: str) -> str | None:
        return find_final_number(text)

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return same_number(a, b)


class Math500(Task, columns={"unique_id": str, "problem": str, "answer": str}):
    """Competition problems (Hendrycks et al. 2021; Lightman et al. 2023). There is no training split."""

    name = "math500"
    summary = "competition mathematics; answers compared as formulas"
    licence = "MIT"
    splits = ("test",)
    row_id = "{unique_id}"
    new_tokens = 1024
    checkable = True
    hub = ("HuggingFaceH4/MATH-500", None)
    requires = ("math-verify",)

    def prompt(self, row: Row) -> str:
        return f"{row['problem']}\nReason step by step, then give the final answer between [answer] and [/answer]."

    def gold(self, row: Row) -> str | None:
        return str(row["answer"])

    def extract(self, row: Row, text: str) -> str | None:
        between_tags = find_tagged(text)
        return find_boxed(text) if between_tags is None else find_boxed(between_tags) or between_tags

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and same_maths(a, b)


_ANSWER = re.compile(r"(?i:answer is):?\s*\**\s*(?:\\boxed\{)?\s*(?:\(\s*([A-Da-d])\s*\)|([A-D])(?![\w']))")
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-D])\)?\s*\}")  # models that learnt from MATH
_COLUMNS = {"subject": str, "question": str, "choices": tuple[str, str, str, str], "answer": Literal[0, 1, 2, 3]}


class Mmlu(Task, columns=_COLUMNS):
    """Multiple-choice questions of 57 subjects (Hendrycks et al. 2021), with chain of thought."""

    name = "mmlu"
    summary = "multiple-choice questions of 57 subjects, with chain of thought"
    licence = "MIT"
    splits = ("dev", "test")
    checkable = True
    hub = ("cais/mmlu", "all")

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """With a limit: always the same sample, with a share of every subject; a smaller one is part of a larger."""
        rows = super().examples(split)
        if limit is None or limit >= len(rows):
            return rows
        sizes, seen = Counter(row["subject"] for row in rows), Counter[str]()
        depths = []
        for place, row in enumerate(rows):
            depths.append(((seen[row["subject"]] + 0.5) / sizes[row["subject"]], place))
            seen[row["subject"]] += 1
        return [rows[place] for _, place in sorted(depths)[:limit]]

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        # five questions occur in both splits
        return rows if split == "test" else self.drop_test_questions(rows, self.rows("test"))

    def prompt(self, row: Row) -> str:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return (
            f"Here is a multiple-choice question about {row['subject'].replace('_', ' ')}.\n\n"
            f"{row['question']}\n{choices}\n\n"
            'Reason step by step, then end with "The answer is (X)", where X is the letter of the right choice.'
        )

    def question(self, row: Row) -> str:
        # the same question occurs in several subjects
        return normalise_words(f"{row['question']} {' '.join(row['choices'])}")

    def gold(self, row: Row) -> str | None:
        return "ABCD"[row["answer"]]

    def extract(self, row: Row, text: str) -> str | None:
        if answers := _ANSWER.findall(text):
            return str(answers[-1][0] or answers[-1][1]).upper()
        boxed: list[str] = _BOXED.findall(text)
        return boxed[-1] if boxed else None


class CnnDailymail(Task, columns={"id": str, "article": str, "highlights": str}):
    """News stories to summarise (Nallapati et al. 2016). There is no training split at hand."""

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
        measured = _load_rouge().score(row["highlights"], text)
        return {name: float(measure.fmeasure) for name, measure in measured.items()}


@cache
def _load_rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(("rouge1", "rouge2", "rougeL"), use_stemmer=True)


def ask_for_summary(text: str) -> str:
    """The prompt that asks for a summary of a text."""
    return f"Summarize the following article in a few sentences.\n\n{text}"


class Dolly(Task, columns={"instruction": str, "context": str}):
    """15,011 instructions written by people (Databricks 2023), sorted by hash; the last 1,000 are the test split."""

    name = "dolly"
    summary = "instructions written by people, some with a passage to work on"
    licence = "CC-BY-SA-3.0"
    splits = ("train", "test")
    file = "databricks-dolly-15k.sha256-sorted.jsonl"
    row_id = "{index}"
    hub = ("databricks/databricks-dolly-15k", None)

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        train, test = rows[:-1000], rows[-1000:]
        return test if split == "test" else self.drop_test_questions(train, test)  # a few instructions occur twice

    def load_from_hub(self, split: str) -> list[Row]:
        """The hub's only split, sorted as the file is."""
        columns = ("instruction", "context", "response", "category")
        rows = [{name: row[name] for name in columns} for row in super().load_from_hub("train")]
        return sorted(rows, key=lambda row: sha256(json.dumps(row).encode()).digest())

    def prompt(self, row: Row) -> str:
        return f"{row['instruction']}\n\n{row['context']}" if row["context"].strip() else str(row["instruction"])
