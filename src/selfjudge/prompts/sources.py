"""Where prompts come from: the target itself, the training split of a task, a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair, Prompt
from selfjudge.prompts.builtin import read_prompts
from selfjudge.prompts.self_written import written_passages, written_prompts
from selfjudge.tasks.base import FILE, Task, known, split_of, task
from selfjudge.tasks.cnn_dailymail import summarise

LEARNABLE = ("train", "fold-", "dev", "validation")  # splits begin with one of these
SELF = ("self", "self-summaries")
SELF_COUNT = 20000  # prompts that the target writes if no number is given
Notify = Callable[[str, float], None]


@dataclass(frozen=True)
class Source:
    """`self`, `self-summaries`, a task's training split or a file, and how much of it."""

    name: str
    count: int | None = None
    answers: int = 1
    """Per prompt, where several are wanted: one greedy, the others sampled."""
    weight: float | None = None
    """Its share among the weighted sources of a limited run."""

    @classmethod
    def parse(cls, text: str, answers: int = 1) -> Source:
        """`NAME`, `NAME:COUNT`, `NAME:COUNTxANSWERS` or `NAME@WEIGHT`, such as `self:20000`, `gsm8k:7000x4`, `dolly@2`."""
        name, at, weight = text.rpartition("@")
        if at and _number(weight) is not None:
            if not 0 < float(weight) < math.inf:
                raise SelfJudgeError(f"{text!r} asks for nothing: weights must be more than 0 and finite")
            return cls(name, None, answers, float(weight))
        name, colon, numbers = text.rpartition(":")
        if not colon or not numbers[:1].isdigit() or f"{name}:" == FILE:
            return cls(text, SELF_COUNT if text in SELF else None, answers)
        count, _, each = numbers.partition("x")
        try:
            made = cls(name, int(count), int(each) if each else answers)
        except ValueError:
            raise SelfJudgeError(f"prompts are NAME, NAME:COUNT or NAME:COUNTxANSWERS, not {text!r}") from None
        if not made.count or made.answers < 1:
            raise SelfJudgeError(f"{text!r} asks for nothing: counts must be at least 1")
        return made

    @property
    def licence(self) -> str:
        if self.name in SELF:
            return "written by the target"
        return task(self.name).licence if known(self.name) else "given by the user"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def limited(sources: Sequence[Source], limit: int | None) -> list[Source]:
    """The sources with counts that add up to `limit`: what has a count keeps it, the rest is split by weight (1 if none)."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise SelfJudgeError("the same source of prompts is named twice")
    if limit is None:
        if any(source.weight is not None for source in sources):
            raise SelfJudgeError("weights need a --limit to be shares of")
        return list(sources)
    open_ended = [s for s in sources if s.count is None or (s.name in SELF and s.count == SELF_COUNT)]
    left = limit - sum(s.count or 0 for s in sources if s not in open_ended)
    if left < len(open_ended):
        raise SelfJudgeError(f"--limit {limit} is less than the sources ask for: lower their counts or raise it")
    total = sum(s.weight or 1.0 for s in open_ended)
    counts: dict[str, int] = {}
    exact = 0.0
    for source in open_ended:  # rounded so that they add up
        exact += left * (source.weight or 1.0) / total
        counts[source.name] = round(exact) - sum(counts.values())
        if not counts[source.name]:
            raise SelfJudgeError(f"--limit {limit} leaves nothing for {source.name}: raise it, or its weight")
    return [replace(s, count=counts[s.name]) if s in open_ended else s for s in sources]


@dataclass(frozen=True)
class Asked:
    """A prompt, where it is from, and the task's row if an answer can be checked."""

    id: str
    source: str
    prompt: Prompt
    row: dict[str, Any] | None = None


def load_prompts(source: Source, data: Path | None, *, skip_broken: Callable[[str], None] | None = None) -> list[Asked]:
    """The prompts of a task's training split, or of another that may be learnt from, or of a file; broken lines are refused, or told to `skip_broken`."""
    if known(source.name):
        one, split = task(source.name, data), split_of(source.name) or "train"
        if split in one.splits and not split.startswith(LEARNABLE):
            raise SelfJudgeError(f"{source.name}: nothing is learnt from this split; take one of: {_learnable(one)}")
        return [Asked(row["id"], source.name, one.prompt(row), row) for row in one.examples(split, source.count)]
    path = Path(source.name).expanduser()
    prompts = read_prompts(path, skip_broken=skip_broken)[: source.count]
    return [Asked(f"{path.stem}-{i}", source.name, prompt) for i, prompt in enumerate(prompts)]


def _learnable(one: Task) -> str:
    return ", ".join(split for split in one.splits if split.startswith(LEARNABLE)) or "none, it is for tests alone"


def write_prompts(
    pair: Pair, source: Source, seed: int, batch: int, notify: Notify
) -> tuple[list[Asked], dict[str, Any]]:
    """Prompts that the target writes itself, and what became of those it wrote."""
    count = source.count
    assert count is not None
    articles = source.name == "self-summaries"
    stage = "the target writes articles" if articles else "the target writes prompts"
    done, shown = 0, -1

    def tell(tokens: int) -> None:
        nonlocal done, shown
        done += tokens
        percent = min(100, 100 * done // (count * (600 if articles else 60)))
        if percent > shown:
            shown = percent
            notify(stage, percent / 100)

    if articles:
        passages = written_passages(
            pair.target, pair.tokenizer, count, eos_ids=pair.eos_ids, seed=seed, batch=batch, notify=tell
        )
        texts, report = [summarise(text) for text in passages], {"written": count, "kept": len(passages)}
    else:
        texts, report = written_prompts(
            pair.target, pair.tokenizer, count, eos_ids=pair.eos_ids, special_ids=pair.special_ids, seed=seed,
            batch=batch, notify=tell,
        )  # fmt: skip
    return [Asked(f"{source.name}-{seed}-{i}", source.name, text) for i, text in enumerate(texts)], report
