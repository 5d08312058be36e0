"""Edits that parameters of a request ask for: penalties, a bias, a least length, noted log-probabilities.
They change the target's logits before temperature and rule, as in vLLM: lossless rules follow the changed target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfjudge.decoding.edits import LogitsEdit
from selfjudge.engine.base import Engine

LEAST_LOGPROB = -9999.0  # JSON has no infinity
PROMPT_CHUNK = 256  # tokens of a prompt whose logits are in memory at a time
BAN = -100.0  # a bias that forbids its token altogether, as OpenAI describes it


class TokenLogprobs(NamedTuple):
    """The target's log-probability of a token, and its most likely tokens with theirs. A prompt's first has none."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class LogProbabilities(LogitsEdit):
    """Notes the log-probabilities of every token of an answer. As the first edit of a row it sees the target's own."""

    def __init__(self, top: int = 0) -> None:
        self.top = top
        self.noted: list[TokenLogprobs] = []

    @torch.no_grad()
    def read_prompt(self, target: Engine, prompt: Sequence[int]) -> Iterator[None]:
        """Note the tokens of a prompt before those of its answer, pass by pass on an engine that holds nothing else."""
        self.noted.append(TokenLogprobs(prompt[0], None, ()))
        target.reserve(1, len(prompt))
        for begin in range(0, len(prompt) - 1, PROMPT_CHUNK):
            read, following = (prompt[i : i + PROMPT_CHUNK] for i in (begin, begin + 1))
            logits = target.extend(torch.tensor([read], device=target.device)).logits[0, : len(following)]
            self.edit(logits, ())
            self.advance(following)
            yield

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        self._rows = logits.float().log_softmax(-1).nan_to_num(LEAST_LOGPROB).clamp_min(LEAST_LOGPROB)

    def advance(self, tokens: Sequence[int]) -> None:
        rows = self._rows[: len(tokens)]
        chosen = rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
        values, ids = rows.topk(min(self.top, rows.shape[-1]))
        best = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True))
        self.noted += map(TokenLogprobs, tokens, chosen, best)


class TokenBias(LogitsEdit):
    """Adds a number to the logits of some tokens; BAN forbids them."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.tokens = list(bias)
        self.values = [-math.inf if value <= BAN else value for value in bias.values()]

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        logits[:, self.tokens] += logits.new_tensor(self.values)

    def advance(self, tokens: Sequence[int]) -> None:
        """A bias stays the same."""


class LeastTokens(LogitsEdit):
    """Forbids the tokens that end an answer until it has so many."""

    def __init__(self, least: int, ends: Iterable[int]) -> None:
        self.left, self.ends = least, list(ends)

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        logits[: max(0, self.left), self.ends] = -math.inf

    def advance(self, tokens: Sequence[int]) -> None:
        self.left -= len(tokens)


class Penalties(LogitsEdit):
    """Presence and frequency penalties over the answer's tokens; the one for repetition counts the prompt's, too."""

    def __init__(
        self, presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0, prompt: Iterable[int] = ()
    ) -> None:
        self.presence, self.frequency, self.repetition = presence, frequency, repetition
        self.prompt = set(prompt) if repetition != 1 else set()
        self.counts: Counter[int] = Counter(dict.fromkeys(self.prompt, 0))

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        columns = {token: j for j, token in enumerate(dict.fromkeys((*self.counts, *drafts)))}
        counts = torch.tensor([float(self.counts[token]) for token in columns]).repeat(len(logits), 1)
        for i, draft in enumerate(drafts, 1):
            counts[i:, columns[draft]] += 1  # row i follows drafts[:i]
        counts = counts.to(logits.device)
        read = torch.tensor([token in self.prompt for token in columns], dtype=torch.bool, device=logits.device)
        tokens = torch.tensor(list(columns), dtype=torch.long, device=logits.device)
        chosen = logits[:, tokens].float()
        repeated = torch.where(chosen > 0, chosen / self.repetition, chosen * self.repetition)
        chosen = torch.where((counts > 0) | read, repeated, chosen)
        chosen -= self.frequency * counts + self.presence * (counts > 0)
        logits[:, tokens] = chosen.to(logits.dtype)

    def advance(self, tokens: Sequence[int]) -> None:
        self.counts.update(tokens)
