"""The cost of a relaxed rule without a benchmark: the likelihood of its answers, and which tokens it substituted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfjudge.engine.teacher_forced import Sequences, logit_rows, logits_of, teacher_forced
from selfjudge.models.pair import Pair
from selfjudge.types import Generation


@dataclass(frozen=True)
class Likelihood:
    """The target's view of an answer."""

    log_p: list[float]
    """Log-probability of each token."""
    choices: list[int]
    """The target's most likely token at each position."""
    choice_log_p: list[float]
    """Log-probabilities of `choices`."""


@torch.no_grad()
def compute_likelihoods(pair: Pair, sequences: Sequences) -> list[Likelihood]:
    """The target's log-probability of every token of every answer, in one teacher-forced pass."""
    results: list[Likelihood] = [Likelihood([], [], []) for _ in sequences]
    readable = [i for i, (_, answer) in enumerate(sequences) if answer]
    for part, hidden in teacher_forced(pair.target_model, [sequences[i] for i in readable]):
        chosen = [readable[p] for p in part]
        tokens = torch.tensor([t for i in chosen for t in sequences[i][1]], device=hidden.device)
        log_p: list[float] = []
        choices: list[int] = []
        best: list[float] = []
        step = logit_rows(pair.target)
        for states, emitted in zip(hidden.split(step), tokens.split(step), strict=True):
            logits = logits_of(pair.target, states).float()
            total, top = logits.logsumexp(-1), logits.max(-1)
            log_p += (logits.gather(1, emitted[:, None]).squeeze(1) - total).tolist()
            best += (top.values - total).tolist()
            choices += top.indices.tolist()
        at = 0
        for i in chosen:
            end = at + len(sequences[i][1])
            results[i] = Likelihood(log_p[at:end], choices[at:end], best[at:end])
            at = end
    return results


def average_log_likelihood(seen: Sequence[Likelihood]) -> float:
    """The mean log-probability over all tokens of all answers."""
    count = sum(len(answer.log_p) for answer in seen)
    return sum(sum(answer.log_p) for answer in seen) / max(1, count)


def count_substitutions(
    pair: Pair, answers: Sequence[Generation], seen: Sequence[Likelihood]
) -> list[tuple[str, str, int]]:
    """(the target's choice, what was accepted instead, how often), the most frequent first."""
    pairs = Counter(
        (choice, token)
        for answer, likelihood in zip(answers, seen, strict=True)
        for token, origin, choice in zip(answer.tokens, answer.origins, likelihood.choices, strict=True)
        if origin == "judge" and choice != token
    )
    text = {i: str(pair.tokenizer.decode([i])) for both in pairs for i in both}
    return [(text[a], text[b], n) for (a, b), n in pairs.most_common()]
