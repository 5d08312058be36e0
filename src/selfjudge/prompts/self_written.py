"""Prompts that the target writes itself: sampled after the user header of its own chat template.

Left alone it asks what it was trained for; an opening, such as "Translate to Spanish:", leads it to other kinds.

No data is needed: what an instruction-tuned model believes users ask is in its weights (Magpie, Xu et al. 2024).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.decoding.plain import Answer, respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.models.loaded import LoadedModel
from selfjudge.models.pair import Pair, Prompt
from selfjudge.prompts.sources import Source
from selfjudge.store import Journal
from selfjudge.tasks.cnn_dailymail import ask_for_summary
from selfjudge.types import Notify

LONGEST = 160  # tokens of a self-written prompt
LONGEST_TEXT = 384  # of one that brings a text along
REPLY = 192  # tokens of an answer that a conversation goes on from
_MARK = "\u2592MARK\u2592"
OPENINGS = ("(CNN)", "(CNN) -- ", "LONDON, England (CNN) -- ", "WASHINGTON (CNN) -- ", "By . ", "NEW YORK -- ")
STYLES: dict[str, tuple[str, ...]] = {
    "self-code": (
        "Write a Python function", "Implement", "Write a program that", "Fix the bug in this code:\n\n```",
        "Explain what this code does:\n\n```", "How do I", "Write a SQL query", "Write unit tests for",
        "You are given", "Given an array", "Given a string", "Refactor", "Write a JavaScript function",
    ),
    "self-math": (
        "Solve the following problem step by step.", "A store sells", "If a train", "What is the value of", "How many",
        "Sarah has", "A farmer", "Calculate", "Find all", "In a class of", "John buys", "Reason step by step:",
    ),
    "self-choices": (
        "Here is a multiple-choice question about", "Which of the following", "Answer this multiple-choice question.",
        "Choose the correct answer.",
    ),
    "self-writing": (
        "Write a short story about", "Write an email to", "Write a poem about", "Write an essay on",
        "Give me five ideas for", "Explain to a beginner", "Describe", "What are the advantages of", "Compare",
        "Give me advice on", "Make a list of", "Who was", "Why do", "Tell me about", "Imagine",
    ),
    "self-extraction": (
        "Extract all names, places and dates from the following text:\n\n",
        "Read the text and answer the question.\n\nText:", "Based on the following passage, answer the question.\n\n",
        "Classify each of the following as", "Convert the following to JSON:\n\n", "Identify which",
        "Rewrite the following text in simpler words:\n\n", "Summarize the following in one sentence:\n\n",
        "Correct the grammar of this text:\n\n",
    ),
    "self-translation": (
        "Translate the following to German:", "Translate the following to French:", "Translate to Spanish:",
        "Translate this sentence into Chinese:", "How do you say", "Translate the following text to English:",
        "Translate to Italian:", "Translate to Japanese:",
    ),
}  # fmt: skip
"""How prompts of a kind begin; the target writes the rest."""
_APART = 500_009  # between the seeds of one style and those of the next
_WITH_TEXT = ("self-extraction", "self-code")


def write_prompts(
    pair: Pair, source: Source, seed: int, batch: int, notify: Notify, journal: Journal | None = None
) -> tuple[list[Prompt], dict[str, Any]]:
    """Prompts that the target writes itself, and what became of those it wrote.

    Whatever it writes goes into the journal, and what is there is not written again.
    """
    count, name = source.count, source.name
    assert count is not None
    articles = name == "self-summaries"
    stage = "the target writes articles" if articles else "the target writes prompts"
    expected = count * {"self-summaries": 600, "self-chats": 240}.get(name, 60)  # tokens
    done, shown = 0, -1

    def tell(tokens: int) -> None:
        nonlocal done, shown
        done += tokens
        percent = min(100, 100 * done // expected)
        if percent > shown:
            shown = percent
            notify(stage, percent / 100)

    writer = Writer(pair.target_model, pair.tokenizer, pair.eos_ids, seed, batch, tell, journal)
    if articles:
        passages = writer.passages(count)
        return [ask_for_summary(text) for text in passages], {"written": count, "kept": len(passages)}
    if name == "self-chats":
        chats, report = writer.chats(count, pair.special_ids)
        return list(chats), report
    texts, report = writer.prompts(count, pair.special_ids, name)
    return list(texts), report


@dataclass(frozen=True)
class Writer:
    """A target that writes. What it writes follows from the seed, whatever the batches are."""

    model: PreTrainedModel | LoadedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: Collection[int]
    seed: int = 0
    batch: int = 1024
    notify: Callable[[int], None] | None = None
    """Told how many tokens were written since it was told last."""
    journal: Journal | None = None

    def prompts(
        self, count: int, special_ids: Collection[int], style: str = "self"
    ) -> tuple[list[str], dict[str, int]]:
        """User prompts that pass the filter, of `count` that are written, and how many fell to which part of it."""
        header = user_header(self.tokenizer)
        openings = [self._encode(text) for text in STYLES.get(style, ("",))]
        starts = [[*header, *openings[i % len(openings)]] for i in range(count)]
        longest = LONGEST_TEXT if style in _WITH_TEXT else LONGEST
        first_seed = 0 if style == "self" else (2 + list(STYLES).index(style)) * _APART
        kept, report = [], Counter(written=count)
        seen: set[object] = set()
        for i, tokens, finish in sorted(self._sample(starts, longest, 1.0, first_seed)):
            opening = openings[i % len(openings)]
            reason, text = _fault(tokens, finish, self.tokenizer, special_ids, seen, opening)
            report[reason or "kept"] += 1
            if reason is None:
                kept.append(text)
        return kept, dict(report)

    def chats(self, count: int, special_ids: Collection[int]) -> tuple[list[list[dict[str, str]]], dict[str, int]]:
        """Conversations of three messages: a prompt, the target's answer and the user's next turn, all its own."""
        report = Counter(written=count)
        header = user_header(self.tokenizer)
        chats: list[list[dict[str, str]]] = []
        for last in (False, True):  # the first turn, and the one that follows its answer
            starts = [self._before([*chat, _user(_MARK)]) for chat in chats] if last else [header] * count
            seen: set[object] = set()
            begun, chats = chats, []
            for i, tokens, finish in sorted(self._sample(starts, LONGEST, 1.0, (9 + last) * _APART)):
                reason, text = _fault(tokens, finish, self.tokenizer, special_ids, seen)
                if reason is None:
                    chats.append([*(begun[i] if last else ()), _user(text)])
                else:
                    report[reason] += 1
            if not last:
                chats = self._answered(chats, special_ids, report)
        report["kept"] = len(chats)
        return chats, dict(report)

    def _answered(
        self, chats: Sequence[list[dict[str, str]]], special_ids: Collection[int], report: Counter[str]
    ) -> list[list[dict[str, str]]]:
        """The conversations with the target's answers; those that are not finished soon fall out."""
        starts = [self._before([*chat, {"role": "assistant", "content": _MARK}]) for chat in chats]
        answered = []
        for i, tokens, finish in sorted(self._sample(starts, REPLY, 0.7, 11 * _APART)):
            reason, text = _fault(tokens, finish, self.tokenizer, special_ids, set())
            if reason is None:
                answered.append([*chats[i], {"role": "assistant", "content": text}])
            else:
                report[f"answer {reason}"] += 1
        return answered

    def _before(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of everything that stands before the mark in a conversation."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False)
        assert isinstance(text, str)
        return self._encode(text.rpartition(_MARK)[0])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def passages(
        self, count: int, openings: Sequence[str] = OPENINGS, longest: int = 900, shortest: int = 80
    ) -> list[str]:
        """Texts that continue the openings, without chat template; cut after the last whole sentence."""
        encoded = [self._encode(text) for text in openings]
        starts = [encoded[i % len(encoded)] for i in range(count)]
        passages = []
        for index, tokens, _ in sorted(self._sample(starts, longest, 0.8, _APART)):
            text = str(self.tokenizer.decode([*starts[index], *tokens], skip_special_tokens=True))
            whole = re.match(r"(?s).*[.!?]", text)
            if whole and len(tokens) >= shortest:
                passages.append(whole.group(0))
        return passages

    def _sample(
        self, starts: Sequence[Sequence[int]], longest: int, temperature: float, first_seed: int
    ) -> Iterator[Answer]:
        """What follows the starts, in any order. `first_seed` tells the samples of one kind from those of another."""
        before = [row for row in (self.journal.rows if self.journal else ()) if row["part"] == first_seed]
        known = {row["index"]: row for row in before if row["index"] < len(starts)}
        left = [i for i in range(len(starts)) if i not in known]
        for i, row in known.items():
            if self.notify:
                self.notify(len(row["tokens"]))
            yield i, row["tokens"], row["finish"]
        for place, tokens, finish in respond(
            self.model,
            [starts[i] for i in left],
            eos_ids=self.eos_ids,
            max_new_tokens=longest,
            sampling=Sampling(temperature),
            seeds=[(self.seed * 1_000_003 + first_seed + i) % (1 << 63) for i in left],
            batch=self.batch,
            notify=self.notify,
        ):
            if self.journal:
                self.journal.add({"part": first_seed, "index": left[place], "tokens": tokens, "finish": finish})
            yield left[place], tokens, finish


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _fault(
    tokens: list[int],
    finish: str,
    tokenizer: PreTrainedTokenizerBase,
    special_ids: Collection[int],
    seen: set[object],
    opening: Sequence[int] = (),
) -> tuple[str | None, str]:
    """Why a written prompt is not used, and its text, `opening` included; that alone makes no two of them alike."""
    if finish != "eos":
        return "unfinished", ""
    body = tokens[:-1]
    if any(token in special_ids for token in body):
        return "control tokens", ""
    text = str(tokenizer.decode([*opening, *body])).strip()
    words = re.findall(r"\w+", str(tokenizer.decode(body)).lower())
    if len(words) < 3 or "\ufffd" in text:
        return "too short", text
    keys = (tuple(words), tuple(words[:10]) if len(words) >= 10 else None, frozenset(words))
    if any(key is not None and key in seen for key in keys):
        return "duplicate" if keys[0] in seen else "near-duplicate", text
    seen.update(key for key in keys if key is not None)
    return None, text


def user_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of everything that stands before a user's first message."""
    if not tokenizer.chat_template:
        raise SelfJudgeError(
            "the target has no chat template, so it cannot write prompts itself: give a file with `prompts`"
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    assert isinstance(text, str)
    before, mark, _ = text.partition(_MARK)
    if not mark or not before:
        raise SelfJudgeError("the target's chat template has no user header, so it cannot write prompts itself")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])
