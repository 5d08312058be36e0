"""Substitutions in finished responses, and how the answers that they lead to are compared with the original ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.decoding.plain import respond
from selfjudge.label.config import LabelConfig, is_checkable
from selfjudge.label.folder import Row
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window
from selfjudge.tasks import Task, load_task
from selfjudge.tasks.base import join_messages
from selfjudge.types import Tell, ignore

VERDICT_TOKENS = 12
SAME_QUESTION = Path(__file__).with_name("same.txt").read_text("utf-8")


@dataclass(frozen=True, eq=False)
class Original:
    """A finished response of the target, and the answer in it that must be kept."""

    row: Row  # row of the response: prompt, tokens, and the task's row if there is one
    answer: Any
    check: OutcomeCheck

    @property
    def prompt(self) -> list[int]:
        return list(self.row["prompt_ids"])

    @property
    def response(self) -> tuple[int, ...]:
        return tuple(self.row["response_ids"])


@dataclass(frozen=True, eq=False)
class Substitution:
    """A token put at one place of a response."""

    original: Original
    response: tuple[int, ...]  # the response that is changed: the original one, or one that a search has reached
    place: int
    token: int

    @property
    def start(self) -> tuple[int, ...]:
        """The response up to the substituted token."""
        return (*self.response[: self.place], self.token)


class OutcomeCheck:
    """Says which new responses keep the answers of the original ones."""

    unclear = 0  # number of verdicts that could not be understood

    def __call__(self, substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the response that each substitution led to keeps the answer."""
        raise NotImplementedError


class AnswerCheck(OutcomeCheck):
    """A task's own check: the answer found in the text is that of the original response."""

    def __init__(self, pair: Pair, task: Task) -> None:
        self.pair, self.task = pair, task

    def __call__(self, substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
        originals = [s.original for s in substitutions]
        answers = self.extract([original.row for original in originals], responses)
        return [
            answer is not None and self.task.same(original.row["row"], original.answer, answer)
            for original, answer in zip(originals, answers, strict=True)
        ]

    def extract(self, rows: Sequence[Row], responses: Sequence[Sequence[int]]) -> list[str | None]:
        """The answers in some responses to the prompts of `rows`."""
        return self.task.extract_many([row["row"] for row in rows], decode_many(self.pair, responses))

    def find_originals(self, rows: Sequence[Row]) -> list[Original]:
        """The finished responses that have an answer to keep."""
        rows = [row for row in rows if row["finish"] == "eos"]
        answers = self.extract(rows, [row["response_ids"] for row in rows])
        return [
            Original(row, answer, self)
            for row, answer in zip(rows, answers, strict=True)
            if self.task.is_scorable(row["row"], answer)
        ]


class MeaningCheck(OutcomeCheck):
    """The target itself says whether two replies mean the same; an unclear verdict counts as different."""

    def __init__(self, pair: Pair, batch: int) -> None:
        self.pair, self.batch = pair, batch

    def __call__(self, substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
        pair, texts = self.pair, decode_many(self.pair, responses)
        questions = [
            SAME_QUESTION.format(request=join_messages(s.original.row["request"]), first=s.original.answer, second=text)
            for s, text in zip(substitutions, texts, strict=True)
        ]
        encoded = pair.encode_many(questions)
        fitting = [i for i, ids in enumerate(encoded) if len(ids) + VERDICT_TOKENS <= context_window(pair.target)]
        self.unclear += len(encoded) - len(fitting)  # too long to be asked
        kept = [text == s.original.answer for s, text in zip(substitutions, texts, strict=True)]
        answers = answer_prompts(pair, [encoded[i] for i in fitting], VERDICT_TOKENS, self.batch)
        for i, verdict in zip(fitting, decode_many(pair, [tokens for tokens, _ in answers]), strict=True):
            named = re.search("SAME|DIFFERENT", verdict.upper())  # the first of them counts
            self.unclear += named is None
            if named and named.group() == "SAME":
                kept[i] = True
        return kept


def find_originals(pair: Pair, config: LabelConfig, responses: Sequence[Row], data: Path | None) -> list[Original]:
    """The finished responses with something to keep, by source; without a right answer, whole replies are compared."""
    open_check = MeaningCheck(pair, config.batch_size)
    originals: list[Original] = []
    for name in sorted({row["source"] for row in responses}):
        rows = [row for row in responses if row["source"] == name and row["finish"] == "eos"]
        if is_checkable(name):
            check = AnswerCheck(pair, load_task(name, data, allow_unsafe=config.allow_unsafe))
            originals += check.find_originals(rows)
        else:
            texts = decode_many(pair, [row["response_ids"] for row in rows])
            originals += [Original(row, text, open_check) for row, text in zip(rows, texts, strict=True)]
    return originals


def decode_many(pair: Pair, responses: Sequence[Sequence[int]]) -> list[str]:
    return [str(pair.tokenizer.decode(list(tokens), skip_special_tokens=True)) for tokens in responses]


def continue_responses(
    pair: Pair, config: LabelConfig, substitutions: Sequence[Substitution], notify: Tell = ignore
) -> list[tuple[int, ...]]:
    """Each response with its substitution, as the target finishes it from there."""
    prompts = [[*s.original.prompt, *s.start] for s in substitutions]
    limits = [config.max_new_tokens - s.place - 1 for s in substitutions]
    answers = answer_prompts(pair, prompts, limits, config.batch_size, notify)
    return [(*s.start, *tokens) for s, (tokens, _) in zip(substitutions, answers, strict=True)]


def answer_prompts(
    pair: Pair, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], batch: int, notify: Tell = ignore
) -> list[tuple[list[int], str]]:
    """The target's greedy answer to each prompt and why it ended, in order, as fast as its engine makes them."""
    answers: list[tuple[list[int], str]] = [([], "")] * len(prompts)
    responses = respond(pair.target_model, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch)
    for done, (i, tokens, finish) in enumerate(responses, 1):
        answers[i] = tokens, finish
        notify(done / len(prompts))
    return answers


def compare_answers(substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
    """Whether the response that each substitution led to keeps the original answer, by the check of its prompt."""
    kept = [False] * len(substitutions)
    for check in dict.fromkeys(s.original.check for s in substitutions):
        group = [i for i, s in enumerate(substitutions) if s.original.check is check]
        verdicts = check([substitutions[i] for i in group], [responses[i] for i in group])
        for i, verdict in zip(group, verdicts, strict=True):
            kept[i] = verdict
    return kept
