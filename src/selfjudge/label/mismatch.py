"""Mismatches: where the draft, reading the target's response, predicts another token; their labels by likelihood."""

from collections.abc import Iterator, Sequence

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


def label_by_likelihood(
    pair: Pair, config: LabelConfig, responses: Sequence[Row], scorer: Scorer, tau: float, notify: Tell
) -> Labels:
    """A token is acceptable if its score is above τ."""
    texts = [(row["prompt_ids"], row["response_ids"], row["finish"] == "length") for row in responses]
    cases = find_mismatches(pair, texts, config.suffix_length)
    scores = scorer(cases, notify)
    verdicts: list[Row] = [{"label": int(score > tau)} for each in scores for score in each.prefix + each.suffix]
    return make_labels(pair, config, list(zip(responses, cases, scores, strict=True)), verdicts, {})


def make_labels(
    pair: Pair,
    config: LabelConfig,
    cases: Sequence[tuple[Row, Case, Scores]],
    verdicts: Sequence[Row],
    counts: dict[str, int],
) -> Labels:
    """Rows and row-aligned arrays of the places whose scores are finite; the others are counted.

    Each case comes with the row of the target's original response and with its scores. `verdicts` have the label of
    each place of each case and whatever else the method stores."""
    scores = Scores.join([each for _, _, each in cases], config.suffix_length, pair.hidden_size)
    places = [(row, case, *place) for row, case, _ in cases for place in zip(case.places, case.drafts, strict=True)]
    finite = np.isfinite(scores.prefix + scores.suffix)
    rows = [
        {
            "prompt_id": response["prompt_id"],
            "source": response["source"],
            "position": len(case.prompt) + place,
            "target_token": case.response[place],
            "draft_token": draft,
            "prefix_score": round(prefix, 5),
            "suffix_score": round(suffix, 5),
            "score": round(prefix + suffix, 5),
            "method": config.method,
            **verdict,
        }
        for (response, case, place, draft), verdict, prefix, suffix, is_finite in zip(
            places, verdicts, scores.prefix.tolist(), scores.suffix.tolist(), finite, strict=True
        )
        if is_finite
    ]
    arrays = {
        name: array[finite].astype(config.hidden_dtype if name.startswith("hidden") else array.dtype)
        for name, array in vars(scores).items()
        if config.previous or name != "hidden_before"
    }
    return Labels(rows, arrays, {**counts, "not_finite": len(places) - len(rows)})
