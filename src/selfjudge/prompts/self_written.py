"""Prompts that the target writes itself: sampled after the user header of its own chat template.

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
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Notify, Source
from selfjudge.tasks.cnn_dailymail import summarise

LONGEST = 160  # tokens of a self-written prompt
_MARK = "\u2592MARK\u2592"
OPENINGS = ("(CNN)", "(CNN) -- ", "LONDON, England (CNN) -- ", "WASHINGTON (CNN) -- ", "By . ", "NEW YORK -- ")


def write_prompts(
    pair: Pair, source: Source, seed: int, batch: int, notify: Notify
) -> tuple[list[str], dict[str, Any]]:
    """Prompts that the target writes itself, and what became of those it wrote."""
    count = source.count
    assert count is not None
    articles = source.name == "self-summaries"
    stage = "the target writes articles" if articles else "the target writes prompts"
    expected = count * (600 if articles else 60)  # tokens
    done, shown = 0, -1

    def tell(tokens: int) -> None:
        nonlocal done, shown
        done += tokens
        percent = min(100, 100 * done // expected)
        if percent > shown:
            shown = percent
            notify(stage, percent / 100)

    writer = Writer(pair.target, pair.tokenizer, pair.eos_ids, seed, batch, tell)
    if articles:
        passages = writer.passages(count)
        return [summarise(text) for text in passages], {"written": count, "kept": len(passages)}
    return writer.prompts(count, pair.special_ids)


@dataclass(frozen=True)
class Writer:
    """A target that writes. What it writes follows from the seed, whatever the batches are."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: Collection[int]
    seed: int = 0
    batch: int = 1024
    notify: Callable[[int], None] | None = None
    """Told how many tokens were written since it was told last."""

    def prompts(self, count: int, special_ids: Collection[int]) -> tuple[list[str], dict[str, int]]:
        """User prompts that pass the filter, of `count` that are written, and how many fell to which part of it."""
        starts = [user_header(self.tokenizer)] * count
        kept, report = [], Counter(written=count)
        seen: set[object] = set()
        for _, tokens, finish in sorted(self._sample(starts, LONGEST, 1.0, 0)):
            reason, text = _fault(tokens, finish, self.tokenizer, special_ids, seen)
            report[reason or "kept"] += 1
            if reason is None:
                kept.append(text)
        return kept, dict(report)

    def passages(
        self, count: int, openings: Sequence[str] = OPENINGS, longest: int = 900, shortest: int = 80
    ) -> list[str]:
        """Texts that continue the openings, without chat template; cut after the last whole sentence."""
        encoded = [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in openings]
        starts = [encoded[i % len(encoded)] for i in range(count)]
        passages = []
        for index, tokens, _ in sorted(self._sample(starts, longest, 0.8, 500_009)):
            text = str(self.tokenizer.decode([*starts[index], *tokens], skip_special_tokens=True))
            whole = re.match(r"(?s).*[.!?]", text)
            if whole and len(tokens) >= shortest:
                passages.append(whole.group(0))
        return passages

    def _sample(
        self, starts: Sequence[Sequence[int]], longest: int, temperature: float, first_seed: int
    ) -> Iterator[Answer]:
        return respond(
            self.model,
            starts,
            eos_ids=self.eos_ids,
            max_new_tokens=longest,
            sampling=Sampling(temperature),
            seeds=[(self.seed * 1_000_003 + first_seed + i) % (1 << 63) for i in range(len(starts))],
            batch=self.batch,
            notify=self.notify,
        )


def _fault(
    tokens: list[int], finish: str, tokenizer: PreTrainedTokenizerBase, special_ids: Collection[int], seen: set[object]
) -> tuple[str | None, str]:
    """Why a written prompt is not used, and its text."""
    if finish != "eos":
        return "unfinished", ""
    body = tokens[:-1]
    if any(token in special_ids for token in body):
        return "control tokens", ""
    text = str(tokenizer.decode(body)).strip()
    words = re.findall(r"\w+", text.lower())
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
