"""Mismatches: where the draft, reading the target's response, predicts another token; their labels by likelihood."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfjudge.engine.teacher_forced import Sequences, head_choices, logit_rows, logits_of, teacher_forced
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.eagle import EagleHead
from selfjudge.models.pair import Pair
from selfjudge.types import Tell

NOTHING = "there is no mismatch to label: the draft says what the target says (is it the same model?)"


@torch.no_grad()
def predict_draft_tokens(pair: Pair, sequences: Sequences) -> list[list[int]]:
    """The draft's most likely token at every place of every response; past its context window, the response's own."""
    window = pair.window
    tokens_of: list[list[int]] = [list(response) for _, response in sequences]
    seen = [(prompt, response[: max(0, window - len(prompt))]) for prompt, response in sequences]
    readable = [i for i, (_, response) in enumerate(seen) if response]
    for part, choices in _predict(pair, [seen[i] for i in readable]):
        tokens, at = choices.tolist(), 0
        for i in (readable[p] for p in part):
            size = len(seen[i][1])
            tokens_of[i][:size] = tokens[at : at + size]
            at += size
    return tokens_of


def _predict(pair: Pair, sequences: Sequences) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of sequences and the draft's tokens [R] at all places of their responses, in that order."""
    draft, vocabulary = pair.draft, pair.target.get_output_embeddings().weight.shape[0]
    assert draft is not None
    if isinstance(draft, EagleHead):
        yield from head_choices(draft, pair.target, sequences)
        return
    for part, hidden in teacher_forced(draft, sequences):
        pieces = hidden.split(logit_rows(draft))
        yield part, torch.cat([logits_of(draft, piece)[:, :vocabulary].argmax(-1) for piece in pieces])


def select_places(
    response: Sequence[int], drafts: Sequence[int], special: frozenset[int], *, suffix_length: int, cut: bool
) -> list[int]:
    """Places that can be labelled: tokens differ, none is special, and not the last one.

    In a response that the length limit `cut`, places with fewer than `suffix_length` tokens after them are left out."""
    end = len(response) - 1
    if cut:
        end = min(end, len(response) - suffix_length)
    return [i for i in range(max(0, end)) if differ(response[i], drafts[i], special)]


def differ(own: int, draft: int, special: frozenset[int]) -> bool:
    """Whether two tokens differ and neither is special: special tokens are left to the guard."""
    return own != draft and own not in special and draft not in special


def find_mismatches(
    pair: Pair, responses: Sequence[tuple[Sequence[int], Sequence[int], bool]], suffix_length: int
) -> list[Case]:
    """The places that can be labelled in each response, given as prompt, response and whether the limit cut it."""
    special = frozenset(pair.special_ids)
    drafts = predict_draft_tokens(pair, [(prompt, response) for prompt, response, _ in responses])
    cases = []
    for (prompt, response, cut), choices in zip(responses, drafts, strict=True):
        places = select_places(response, choices, special, suffix_length=suffix_length, cut=cut)
        cases.append(Case(prompt, response, places, [choices[i] for i in places]))
    return cases


class Candidate(NamedTuple):
    """A draft token at one place of a response, with its scores."""

    response: Row  # row of the target's original response
    case: Case
    scores: Scores  # scores of all places of the case
    k: int  # index of the place in the case


def label_by_likelihood(
    pair: Pair, config: LabelConfig, responses: Sequence[Row], scorer: Scorer, tau: float, notify: Tell
) -> Labels:
    """A token is acceptable if its score is above τ."""
    texts = [(row["prompt_ids"], row["response_ids"], row["finish"] == "length") for row in responses]
    cases = find_mismatches(pair, texts, config.suffix_length)
    candidates: list[Candidate] = []
    verdicts: list[Row] = []
    for response, case, scores in zip(responses, cases, scorer(cases, notify), strict=True):
        candidates += [Candidate(response, case, scores, k) for k in range(len(case.places))]
        verdicts += [{"label": int(score > tau)} for score in scores.prefix + scores.suffix]
    return make_labels(pair, config, candidates, verdicts, {})


def make_labels(
    pair: Pair, config: LabelConfig, candidates: Sequence[Candidate], verdicts: Iterable[Row], counts: dict[str, int]
) -> Labels:
    """Rows and row-aligned arrays of the candidates whose scores are finite; the others are counted.

    `verdicts` have the label of each candidate and whatever else the method stores."""
    scores = Scores.gather([(c.scores, c.k) for c in candidates], config.suffix_length, pair.hidden_size)
    finite = np.isfinite(scores.prefix + scores.suffix)
    rows: list[Row] = []
    for candidate, verdict, term, after in zip(candidates, verdicts, scores.prefix, scores.suffix, strict=True):
        case, place = candidate.case, candidate.case.places[candidate.k]
        prefix, suffix = float(term), float(after)
        if np.isfinite(prefix + suffix):
            rows.append(
                {
                    "prompt_id": candidate.response["prompt_id"],
                    "source": candidate.response["source"],
                    "position": len(case.prompt) + place,
                    "target_token": case.response[place],
                    "draft_token": case.drafts[candidate.k],
                    "prefix_score": round(prefix, 5),
                    "suffix_score": round(suffix, 5),
                    "score": round(prefix + suffix, 5),
                    "method": config.method,
                    **verdict,
                }
            )
    arrays = {
        name: array[finite].astype(config.hidden_dtype if name.startswith("hidden") else array.dtype)
        for name, array in vars(scores).items()
        if config.previous or name != "hidden_before"
    }
    return Labels(rows, arrays, {**counts, "not_finite": len(candidates) - len(rows)})
