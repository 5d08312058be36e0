"""Answers token by token, as target and judge see them: likelihoods, substitutions, and rows of the report's viewer."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from selfjudge.engine.teacher_forced import Sequences, log_probabilities, teacher_forced
from selfjudge.judge.model import Judge, join_features
from selfjudge.models.pair import Pair, Prompt
from selfjudge.tasks.base import Row, join_messages
from selfjudge.types import Generation

SUBSTITUTION_ANSWERS = 200  # answers of a run that are searched for substitutions
KEPT_SUBSTITUTIONS = 50


@dataclass(frozen=True)
class Likelihood:
    """The target's view of an answer."""

    log_p: list[float]  # log-probability of each token
    choices: list[int]  # the target's most likely token at each position
    choice_log_p: list[float]  # log-probabilities of `choices`
    scores: list[float | None]
    """The judge's score of each token but the last, whose hidden state no pass holds; None without a judge."""


@torch.no_grad()
def compute_likelihoods(pair: Pair, sequences: Sequences, judge: Judge | None = None) -> list[Likelihood]:
    """The target's view of every answer, and the judge's, if there is one, in one teacher-forced pass."""
    results: list[Likelihood] = [Likelihood([], [], [], []) for _ in sequences]
    readable = [i for i, (_, answer) in enumerate(sequences) if answer]
    for part, hidden in teacher_forced(pair.target_model, [sequences[i] for i in readable]):
        chosen = [readable[p] for p in part]
        tokens = torch.tensor([t for i in chosen for t in sequences[i][1]], device=hidden.device)
        log_p, best, choices = (column.tolist() for column in log_probabilities(pair.target, hidden, tokens))
        at = 0
        for i in chosen:
            end = at + len(sequences[i][1])
            results[i] = seen = Likelihood(log_p[at:end], choices[at:end], best[at:end], [None] * (end - at))
            if judge is not None and end - at > 1:
                seen.scores[:-1] = _score_tokens(judge, hidden[at:end].float(), seen)
            at = end
    return results


def find_substitutions(
    pair: Pair, prompts: Sequence[Prompt], answers: Sequence[Generation]
) -> list[tuple[str, str, int]]:
    """(the target's choice, what was accepted instead, how often) in the first answers that have such a token, the most
    frequent first."""
    chosen = [i for i, answer in enumerate(answers) if "judge" in answer.origins][:SUBSTITUTION_ANSWERS]
    pairs = [(token.target_token, token.token) for i in chosen for token in answers[i].judged_tokens]
    if pair.target_model.full_precision and chosen:
        encoded = pair.encode_many([prompts[i] for i in chosen])
        sequences = [(ids, answers[i].tokens) for ids, i in zip(encoded, chosen, strict=True)]
        seen = zip(chosen, compute_likelihoods(pair, sequences), strict=True)
        columns = (zip(view.choices, answers[i].tokens, answers[i].origins, strict=True) for i, view in seen)
        pairs = [(choice, token) for choice, token, origin in chain(*columns) if origin == "judge" and choice != token]
    text = {token: str(pair.tokenizer.decode([token])) for both in pairs for token in both}
    return [(text[choice], text[token], n) for (choice, token), n in Counter(pairs).most_common(KEPT_SUBSTITUTIONS)]


def make_example_rows(
    pair: Pair, prompts: Sequence[Prompt], answers: Sequence[Generation], judge: Judge | None
) -> list[Row]:
    """One row per answer: prompt, text, and each token's origin, target's choice, probabilities and judge score.

    A target that is quantised or remote gives origins, and the rest for judged tokens that were traced: for others it
    takes a pass in full precision."""
    views: Sequence[Likelihood | None] = [None] * len(answers)
    if pair.target_model.full_precision:
        encoded = pair.encode_many(prompts)
        sequences = [(ids, answer.tokens) for ids, answer in zip(encoded, answers, strict=True)]
        views = compute_likelihoods(pair, sequences, judge)
    return [
        {"prompt": join_messages(prompt), "text": answer.text, "tokens": make_token_rows(pair, answer, seen)}
        for prompt, answer, seen in zip(prompts, answers, views, strict=True)
    ]


def make_token_rows(pair: Pair, answer: Generation, seen: Likelihood | None = None) -> list[Row]:
    """Rows of tokens; what `seen` does not tell is known of the tokens whose acceptance was traced."""
    if seen is not None:
        p, p_choice = (map(math.exp, values) for values in (seen.log_p, seen.choice_log_p))
        views = dict(enumerate(zip(seen.choices, p, p_choice, seen.scores, strict=True)))
    else:
        views = {t.index: (t.target_token, t.probability, t.target_probability, t.score) for t in answer.judged_tokens}
    rows: list[Row] = []
    cycle = 0
    for k, (token, origin) in enumerate(zip(answer.tokens, answer.origins, strict=True)):
        row: Row = {"text": str(pair.tokenizer.decode([token], skip_special_tokens=True)), "origin": origin}
        if k in views:
            choice, *shares = views[k]
            row["choice"] = row["text"] if choice == token else str(pair.tokenizer.decode([choice]))
            rounded = (None if share is None else round(share, 4) for share in shares)
            row |= zip(("p", "p_choice", "judge"), rounded, strict=True)
        rows.append({**row, "cycle": cycle})
        cycle += origin == "target"
    return rows


def _score_tokens(judge: Judge, hidden: Tensor, seen: Likelihood) -> list[float | None]:
    """Scores of all tokens but the last. Row k of `hidden` predicts token k; the next row is the state at it."""
    margins = (torch.tensor(seen.log_p[:-1]) - torch.tensor(seen.choice_log_p[:-1])).to(hidden).clamp_max(0)
    scores = judge.to(hidden.device).score(join_features(judge.config.features, hidden[1:], margins, hidden[:-1]))
    if judge.config.margin_limit is not None:
        scores = torch.where(margins < -judge.config.margin_limit, 0.0, scores)
    return [round(value, 4) for value in scores.tolist()]
