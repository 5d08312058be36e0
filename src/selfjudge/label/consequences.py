"""Consequences: put the draft's token at one mismatch, let the target finish the answer, see whether it is kept.

Substitutions are independent: each is the only one in the target's own response. Places are drawn evenly over responses
and, within each, over margins. At a tenth of them the target's own token is put in again: what such a control loses is
the noise of the method."""

import hashlib
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import torch

from selfjudge.engine.teacher_forced import logits_of, teacher_forced
from selfjudge.label.checks import Original, Substitution, compare_answers, continue_responses
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.mismatch import find_mismatches, make_labels
from selfjudge.label.score import Case, Scorer
from selfjudge.models.pair import Pair
from selfjudge.types import Tell

CONTROL_EVERY = 10  # places
MARGINS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats that part the groups that places are drawn from


def label_by_consequences(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], scorer: Scorer, notify: Tell
) -> Labels:
    """A token is acceptable if the answer is kept after it.

    Rows have `control` (was the answer kept after the target's own token? None where that was not tried) and `margin`
    in nats, besides the fields of all methods."""
    cases = draw_cases(pair, originals, config)
    scored = [(o.row, case, scores) for o, case, scores in zip(originals, cases, scorer(cases), strict=True)]
    drafts = [
        Substitution(original, original.response, place, token)
        for original, case in zip(originals, cases, strict=True)
        for place, token in zip(case.places, case.drafts, strict=True)
    ]
    controls = [replace(s, token=s.response[s.place]) for s in drafts[::CONTROL_EVERY]]
    tried = [*drafts, *controls]
    new = continue_responses(pair, config, tried, notify)
    kept = compare_answers(tried, new)
    terms = [float(term) for _, _, scores in scored for term in scores.prefix]
    verdicts: list[Row] = [
        {"label": int(same), "margin": round(-term, 5), "control": None}
        for term, same in zip(terms, kept, strict=False)
    ]
    for verdict, same in zip(verdicts[::CONTROL_EVERY], kept[len(drafts) :], strict=True):
        verdict["control"] = int(same)
    counts = {
        # as if each were read alone
        "target_tokens": sum(len(s.original.prompt) + len(tokens) for s, tokens in zip(tried, new, strict=True)),
        "controls": len(controls),
        "controls_kept": sum(verdict["control"] for verdict in verdicts[::CONTROL_EVERY]),
    }
    return make_labels(pair, config, scored, verdicts, counts)


def draw_cases(pair: Pair, originals: Sequence[Original], config: LabelConfig) -> list[Case]:
    """The mismatches of each response that are tried: at most `config.substitutions`, all where that is None."""
    window = pair.window
    mismatches = find_mismatches(pair, [(o.prompt, o.response, False) for o in originals], config.suffix_length)
    cases = [
        _select_places(case, [k for k, place in enumerate(case.places) if len(case.prompt) + place + 1 < window])
        for case in mismatches
    ]
    if config.substitutions is None:
        return cases
    drawn = []
    for original, case, margins in zip(originals, cases, compute_margins(pair, cases), strict=True):
        seed = hashlib.sha256(f"{config.seed}:{original.row['prompt_id']}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed))  # the same places, whatever else is drawn
        drawn.append(_select_places(case, draw_places(margins, config.substitutions, rng)))
    return drawn


def _select_places(case: Case, chosen: Sequence[int]) -> Case:
    return replace(case, places=[case.places[k] for k in chosen], drafts=[case.drafts[k] for k in chosen])


def draw_places(margins: Sequence[float], most: int, rng: np.random.Generator) -> list[int]:
    """At most `most` indices, ascending: in turn from each group of similar margins, at random within it."""
    groups: dict[int, list[int]] = {}
    for index, margin in enumerate(margins):
        groups.setdefault(bisect(MARGINS, margin), []).append(index)
    mixed = [rng.permutation(groups[key]).tolist() for key in rng.permutation(sorted(groups)).tolist()]
    in_turn = [index for layer in zip_longest(*mixed) for index in layer if index is not None]
    return sorted(in_turn[:most])


@torch.no_grad()
def compute_margins(pair: Pair, cases: Sequence[Case]) -> list[list[float]]:
    """By how many nats the target prefers its own token to the draft's, at every place of every case."""
    margins: list[list[float]] = [[] for _ in cases]
    for part, hidden in teacher_forced(pair.target_model, [(case.prompt, case.response) for case in cases]):
        by_case = hidden.split([len(cases[i].response) for i in part])
        for case, states, i in zip((cases[i] for i in part), by_case, part, strict=True):
            own = [case.response[place] for place in case.places]
            tokens = torch.tensor([own, case.drafts], dtype=torch.long, device=hidden.device).T
            logits = logits_of(pair.target, states[list(case.places)]).float().gather(1, tokens)
            margins[i] = (logits[:, 0] - logits[:, 1]).tolist()  # Δ log p = Δ logit
    return margins
