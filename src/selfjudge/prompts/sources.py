"""Where prompts come from: the target itself, the training split of a task, a file. Light: configs import this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import parse_json
from selfjudge.tasks.base import FILE, Prompt, Task, parse_split
from selfjudge.tasks.registry import is_task, load_task, split_of
from selfjudge.types import Warn

LEARNABLE = ("train", "dev", "validation")  # splits begin with one of these
SELF = (
    "self", "self-code", "self-math", "self-choices", "self-writing", "self-extraction", "self-translation",
    "self-chats", "self-summaries",
)  # fmt: skip
SELF_COUNT = 20000  # prompts that the target writes if no number is given


@dataclass(frozen=True)
class Source:
    """What the target writes (`SELF`), a task's training split or a file, and how much of it."""

    name: str
    count: int | None = None
    answers: int = 1
    """Per prompt, where several are wanted: one greedy, the others sampled."""
    weight: float | None = None
    """Its share among the weighted sources of a limited run."""

    @classmethod
    def parse(cls, text: str, answers: int = 1) -> Source:
        """`NAME`, `NAME:COUNT`, `NAME:COUNTxANSWERS` or `NAME@WEIGHT`: `self:20000`, `gsm8k:7000x4`, `dolly@2`."""
        name, at, weight = text.rpartition("@")
        if at and _number(weight) is not None:
            if not 0 < float(weight) < math.inf:
                raise SelfJudgeError(f"{text!r} asks for nothing: weights must be more than 0 and finite")
            return cls(name, None, answers, float(weight))
        name, colon, numbers = text.rpartition(":")
        if not colon or not numbers[:1].isdigit() or "]" in numbers or f"{name}:" == FILE:
            return cls(text, SELF_COUNT if text in SELF else None, answers)
        count, _, each = numbers.partition("x")
        try:
            source = cls(name, int(count), int(each) if each else answers)
        except ValueError:
            raise SelfJudgeError(f"prompts are NAME, NAME:COUNT or NAME:COUNTxANSWERS, not {text!r}") from None
        if not source.count or source.answers < 1:
            raise SelfJudgeError(f"{text!r} asks for nothing: counts must be at least 1")
        return source

    @property
    def licence(self) -> str:
        if self.name in SELF:
            return "written by the target"
        return load_task(self.name).licence if is_task(self.name) else "given by the user"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def limited(sources: Sequence[Source], limit: int | None) -> list[Source]:
    """The sources with counts that add up to `limit`: a given count stays, the rest is split by weight (1 if none)."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise SelfJudgeError("the same source of prompts is named twice")
    if limit is None:
        if any(source.weight is not None for source in sources):
            raise SelfJudgeError("weights need a `limit` to be shares of")
        return list(sources)
    open_ended = [s for s in sources if s.count is None or (s.name in SELF and s.count == SELF_COUNT)]
    left = limit - sum(s.count or 0 for s in sources if s not in open_ended)
    if left < len(open_ended):
        raise SelfJudgeError(f"a `limit` of {limit} is less than the sources ask for: lower their counts or raise it")
    total = sum(s.weight or 1.0 for s in open_ended)
    counts: dict[str, int] = {}
    exact = 0.0
    for source in open_ended:  # rounded so that they add up
        exact += left * (source.weight or 1.0) / total
        counts[source.name] = round(exact) - sum(counts.values())
        if not counts[source.name]:
            raise SelfJudgeError(f"a `limit` of {limit} leaves nothing for {source.name}: raise it, or its weight")
    return [replace(s, count=counts[s.name]) if s in open_ended else s for s in sources]


@dataclass(frozen=True)
class PromptRecord:
    """A prompt, where it is from, and the task's row if an answer can be checked."""

    id: str
    source: str
    prompt: Prompt
    row: dict[str, Any] | None = None


def load_prompts(source: Source, data: Path | None, *, skip_broken: Warn | None = None) -> list[PromptRecord]:
    """The prompts of a task's split that may be learnt from (`train` if none is named), or of a file.

    Broken lines of a file are refused, or left out and told to `skip_broken`.
    """
    if is_task(source.name):
        origin, split = load_task(source.name, data), split_of(source.name) or "train"
        if any(parse_split(s)[0] in origin.splits and not s.startswith(LEARNABLE) for s in split.split("+")):
            raise SelfJudgeError(f"{source.name}: nothing is learnt from this split; take one of: {_learnable(origin)}")
        rows = origin.examples(split, source.count)
        return [PromptRecord(row["id"], source.name, origin.prompt(row), row) for row in rows]
    path = Path(source.name).expanduser()
    prompts = read_prompts(path, skip_broken=skip_broken)[: source.count]
    return [PromptRecord(f"{path.stem}-{i}", source.name, prompt) for i, prompt in enumerate(prompts)]


def read_prompts(path: Path, *, skip_broken: Warn | None = None) -> list[str | list[dict[str, str]]]:
    """A prompts file: one JSON object a line with `prompt` or `messages` (a conversation); `.txt`: a prompt a line.

    A line that is neither is refused; with `skip_broken` it is left out, and that is told which lines they were.
    """
    prompts: list[str | list[dict[str, str]]] = []
    broken: list[int] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(file)  # lines end where files end them, not at every separator of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append(line.strip())
            continue
        try:
            prompts.append(_prompt(parse_json(line)))
        except (ValueError, KeyError, TypeError):
            broken.append(number)
    if broken:
        numbers = ", ".join(map(str, broken[:5])) + (" …" if len(broken) > 5 else "")
        which = f"line{'s' if len(broken) > 1 else ''} {numbers}"
        if skip_broken is None:
            raise SelfJudgeError(f'{path}, {which}: expected a JSON object with "prompt" or "messages"')
        skip_broken(f"{path}: left out {which} ({len(broken)} of {len(prompts) + len(broken)})")
    if not prompts:
        raise SelfJudgeError(f"{path} holds no prompt")
    return prompts


def _prompt(row: dict[str, Any]) -> str | list[dict[str, str]]:
    prompt = row["messages"] if "messages" in row else row["prompt"]
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
        return prompt
    raise TypeError(prompt)


def _learnable(origin: Task) -> str:
    return ", ".join(split for split in origin.splits if split.startswith(LEARNABLE)) or "none, it is for tests alone"


def check_readable(sources: Sequence[Source], data: Path | None, *, skip_broken: bool = False) -> None:
    """Refuse sources whose prompts cannot be read, before anything is written."""
    for source in sources:
        if source.name not in SELF:
            load_prompts(source, data, skip_broken=(lambda text: None) if skip_broken else None)
