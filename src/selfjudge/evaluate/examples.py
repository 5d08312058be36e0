"""Answers token by token, as target and judge see them, for the report's viewer; and which tokens were substituted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfjudge.engine.teacher_forced import Sequences, teacher_forced
from selfjudge.evaluate.likelihood import Likelihood, compute_likelihoods, count_substitutions
from selfjudge.judge.model import Judge, join_features
from selfjudge.models.pair import Pair, Prompt
from selfjudge.tasks.base import Row, join_messages
from selfjudge.types import Generation

SUBSTITUTION_ANSWERS = 200  # answers of a run that are searched for substitutions
KEPT_SUBSTITUTIONS = 50


def find_substitutions(
    pair: Pair, prompts: Sequence[Prompt], answers: Sequence[Generation]
) -> list[tuple[str, str, int]]:
    """(the target's choice, what was accepted instead, how often) in the first answers that have such a token."""
    chosen = [i for i, answer in enumerate(answers) if "judge" in answer.origins][:SUBSTITUTION_ANSWERS]
    if not chosen or not pair.target_model.full_precision:
        return []
    encoded = pair.encode_many([prompts[i] for i in chosen])
    seen = compute_likelihoods(pair, [(ids, answers[i].tokens) for ids, i in zip(encoded, chosen, strict=True)])
    return count_substitutions(pair, [answers[i] for i in chosen], seen)[:KEPT_SUBSTITUTIONS]


def make_example_rows(
    pair: Pair, prompts: Sequence[Prompt], answers: Sequence[Generation], judge: Judge | None
) -> list[Row]:
    """One row per answer: prompt, text, and each token's origin, target's choice, probabilities and judge score.

    A target that is quantised or remote gives origins only: the rest needs a pass in full precision.
    """
    columns: list[list[Row]] = [[{} for _ in answer.tokens] for answer in answers]
    if pair.target_model.full_precision:
        encoded = pair.encode_many(prompts)
        sequences = [(ids, answer.tokens) for ids, answer in zip(encoded, answers, strict=True)]
        seen = compute_likelihoods(pair, sequences)
        scores = _score_answers(pair, judge, sequences, seen)
        columns = [_describe_tokens(pair, *both) for both in zip(seen, scores, strict=True)]
    return [
        {"prompt": join_messages(prompt), "text": answer.text, "tokens": _make_token_rows(pair, answer, more)}
        for prompt, answer, more in zip(prompts, answers, columns, strict=True)
    ]


def _describe_tokens(pair: Pair, likelihood: Likelihood, judged: Sequence[float | None]) -> list[Row]:
    """What target and judge say of each token."""
    return [
        {
            "choice": str(pair.tokenizer.decode([likelihood.choices[k]])),
            "p": round(math.exp(likelihood.log_p[k]), 4),
            "p_choice": round(math.exp(likelihood.choice_log_p[k]), 4),
            "judge": judged[k],
        }
        for k in range(len(judged))
    ]


def _make_token_rows(pair: Pair, answer: Generation, columns: Sequence[Row]) -> list[Row]:
    rows: list[Row] = []
    cycle = 0
    for token, origin, more in zip(answer.tokens, answer.origins, columns, strict=True):
        rows.append({"text": str(pair.tokenizer.decode([token])), "origin": origin, **more, "cycle": cycle})
        cycle += origin == "target"
    return rows


@torch.no_grad()
def _score_answers(
    pair: Pair, judge: Judge | None, sequences: Sequences, seen: Sequence[Likelihood]
) -> list[list[float | None]]:
    """The judge's scores of every token but the last, whose hidden state no pass holds; None without a judge."""
    scores: list[list[float | None]] = [[None] * len(answer) for _, answer in sequences]
    if judge is None:
        return scores
    for part, hidden in teacher_forced(pair.target_model, sequences):
        at = 0
        for i in part:
            size = len(sequences[i][1])
            if size > 1:
                scores[i][:-1] = _score_tokens(judge, hidden[at : at + size].float(), seen[i])
            at += size
    return scores


def _score_tokens(judge: Judge, hidden: Tensor, seen: Likelihood) -> list[float | None]:
    """Scores of all tokens but the last. Row k of `hidden` predicts token k; the next row is the state at it."""
    margins = (torch.tensor(seen.log_p[:-1]) - torch.tensor(seen.choice_log_p[:-1])).to(hidden).clamp_max(0)
    scores = judge.to(hidden.device).score(join_features(judge.config.features, hidden[1:], margins, hidden[:-1]))
    if judge.config.margin_limit is not None:
        scores = torch.where(margins < -judge.config.margin_limit, 0.0, scores)
    return [round(value, 4) for value in scores.tolist()]
