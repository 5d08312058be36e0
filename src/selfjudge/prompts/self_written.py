"""Prompts that the target writes itself: sampled after the user header of its own chat template.

No data is needed: what an instruction-tuned model believes users ask is in its weights (Magpie, Xu et al. 2024).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.decoding.plain import respond
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

    if articles:
        passages = sample_passages(
            pair.target, pair.tokenizer, count, eos_ids=pair.eos_ids, seed=seed, batch=batch, notify=tell
        )
        return [summarise(text) for text in passages], {"written": count, "kept": len(passages)}
    return sample_prompts(
        pair.target,
        pair.tokenizer,
        count,
        eos_ids=pair.eos_ids,
        special_ids=pair.special_ids,
        seed=seed,
        batch=batch,
        notify=tell,
    )


def sample_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    eos_ids: Collection[int],
    special_ids: Collection[int],
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 1024,
    notify: Callable[[int], None] | None = None,
) -> tuple[list[str], dict[str, int]]:
    """Let the target write `count` user prompts; those that pass the filter, and how many fell to which part of it."""
    header = user_header(tokenizer)
    answers = respond(
        model,
        [header] * count,
        eos_ids=eos_ids,
        max_new_tokens=LONGEST,
        sampling=Sampling(temperature),
        seeds=[(seed * 1_000_003 + i) % (1 << 63) for i in range(count)],
        batch=batch,
        notify=notify,
    )
    kept, report = [], Counter(written=count)
    seen: set[object] = set()
    for _, tokens, finish in sorted(answers):  # in the order of their seeds, whatever the batches were
        reason, text = _fault(tokens, finish, tokenizer, special_ids, seen)
        report[reason or "kept"] += 1
        if reason is None:
            kept.append(text)
    return kept, dict(report)


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


def sample_passages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    eos_ids: Collection[int],
    seed: int = 0,
    openings: Sequence[str] = OPENINGS,
    longest: int = 900,
    shortest: int = 80,
    batch: int = 1024,
    notify: Callable[[int], None] | None = None,
) -> list[str]:
    """Texts that the target continues from the openings, without chat template; cut after the last whole sentence."""
    starts = [list(tokenizer(openings[i % len(openings)], add_special_tokens=False)["input_ids"]) for i in range(count)]
    texts: dict[int, str] = {}
    for index, tokens, _ in respond(
        model,
        starts,
        eos_ids=eos_ids,
        max_new_tokens=longest,
        sampling=Sampling(0.8),
        seeds=[(seed * 1_000_003 + 500_009 + i) % (1 << 63) for i in range(count)],
        batch=batch,
        notify=notify,
    ):
        text = str(tokenizer.decode([*starts[index], *tokens], skip_special_tokens=True))
        whole = re.match(r"(?s).*[.!?]", text)
        if whole and len(tokens) >= shortest:
            texts[index] = whole.group(0)
    return [texts[i] for i in sorted(texts)]


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
