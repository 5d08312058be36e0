"""Three methods of labelling. Each labels places where the draft, reading the target's response, differs from it.
Preservation (AutoJudge, and AutoJudge+ for prompts without a right answer) searches a response from left to right. It
puts the draft's token at the first mismatch, lets the target finish, and compares answers. If the answer is kept, the
new response becomes the current one. Otherwise the token is critical. Searches of many prompts share a batch.
Likelihood rejects tokens that score below τ. The same search finds critical tokens on prompts with a checkable answer;
τ is the score under which the share `reject_recall` of them lies. It belongs to one suffix length. The evidence keeps
the log-probability of every position, so that τ can be computed for another.
Consequences are those of one substitution in the target's own response. Places are drawn evenly over responses and,
within each, over margins. A tenth of them are controls with the target's own token: what those lose is noise."""

import hashlib
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.engine.teacher_forced import Sequences, head_choices, logit_rows, logits_of, teacher_forced
from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import AnswerCheck, Original, Substitution, compare_answers, continue_responses
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.score import Case, Scorer, Scores, sum_scores
from selfjudge.models.eagle import EagleHead
from selfjudge.models.pair import Pair
from selfjudge.store import read_tensors, write_tensors
from selfjudge.types import Notify, Tell, ignore

NOTHING = "there is no mismatch to label: the draft says what the target says (is it the same model?)"
CONTROL_EVERY = 10  # places
MARGINS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats that part the groups that places are drawn from
WEAK = 0.9  # share of critical mismatches from which the target is called too weak to tell
FEWEST = 20  # critical tokens that a quantile is taken of
ACCEPTABLE_RATE = 0.15  # where there is no such quantile: the share of mismatches that is accepted
EVIDENCE_ARRAYS = ("log_p", "original", "substituted", "highest")


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
    """Places to label: tokens differ, neither is special, and at least one token follows (`suffix_length` if `cut`)."""
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
    """Rows and row-aligned arrays of the places with finite scores; the others count as `not_finite`. Each case comes
    with the row of the original response. `verdicts` have the label of each place and what else the method stores."""
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


@dataclass(frozen=True)
class Event:
    """A substitution that a search has tried."""

    substitution: Substitution
    kept: bool  # whether the answer was preserved: then the token is not critical
    tokens: int  # number of tokens that the target read and wrote to find out


@dataclass
class Search:
    """The search for critical tokens in a response, from left to right."""

    original: Original
    response: tuple[int, ...]  # the current response: the original one, with all substitutions that kept its answer
    place: int = 0  # where the search goes on
    drafts: list[int] = field(default_factory=list)  # the draft's tokens along the response; empty after a change
    events: list[Event] = field(default_factory=list)
    done: bool = False


def search_critical_tokens(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], *, most: int | None = None, notify: Tell = ignore
) -> list[Event]:
    """Run the searches of all responses to their ends, or until each has tried `most` substitutions."""
    searches = [Search(original, original.response) for original in originals]
    while waiting := _advance(pair, searches, most):
        tried = [Substitution(s.original, s.response, s.place, s.drafts[s.place]) for s in waiting]
        responses = continue_responses(pair, config, tried)
        kept = compare_answers(tried, responses)
        for search, substitution, response, is_kept in zip(waiting, tried, responses, kept, strict=True):
            search.events.append(Event(substitution, is_kept, len(search.original.prompt) + len(response)))
            search.place += 1
            if is_kept:
                search.response, search.drafts = response, []
        notify(sum(s.done for s in searches) / len(searches))
    return [event for search in searches for event in search.events]


def _advance(pair: Pair, searches: Sequence[Search], most: int | None) -> list[Search]:
    """Move every search to its next mismatch; returns those that are not done."""
    special = frozenset(pair.special_ids)
    active = [s for s in searches if not s.done]
    changed = [s for s in active if not s.drafts]
    sequences = [(s.original.prompt, s.response) for s in changed]
    for search, drafts in zip(changed, predict_draft_tokens(pair, sequences), strict=True):
        search.drafts = drafts
    for search in active:
        places = range(search.place, len(search.response))
        ahead = (i for i in places if differ(search.response[i], search.drafts[i], special))
        search.place = next(ahead, len(search.response))
        search.done = search.place >= len(search.response) - 1 or len(search.events) == most
    return [s for s in active if not s.done]


def score_events(scorer: Scorer, events: Sequence[Event]) -> list[tuple[Row, Case, Scores]]:
    """The responses that the events were tried in, as cases with their scores; their places are the events in order."""
    rows, cases = [], []
    for (original, response), group in groupby(events, lambda e: (e.substitution.original, e.substitution.response)):
        tried = [event.substitution for event in group]
        rows.append(original.row)
        cases.append(Case(original.prompt, response, [s.place for s in tried], [s.token for s in tried]))
    return list(zip(rows, cases, scorer(cases), strict=True))


def label_by_preservation(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], scorer: Scorer, notify: Tell
) -> Labels:
    """A token is acceptable if the answer is preserved; on open prompts (autojudge+) the target compares meanings. A
    position counts in the response that the search had reached."""
    events = search_critical_tokens(pair, config, originals, most=config.substitutions, notify=notify)
    verdicts: list[Row] = [{"label": int(event.kept)} for event in events]
    counts = {"target_tokens": sum(event.tokens for event in events)}
    return make_labels(pair, config, score_events(scorer, events), verdicts, counts)


def label_by_consequences(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], scorer: Scorer, notify: Tell
) -> Labels:
    """A token is acceptable if the answer is kept after it. Rows also have `margin` in nats and `control`: whether the
    answer was kept after the target's own token, None where that was not tried."""
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
        _keep_places(case, [k for k, place in enumerate(case.places) if len(case.prompt) + place + 1 < window])
        for case in mismatches
    ]
    if config.substitutions is None:
        return cases
    drawn = []
    for original, case, margins in zip(originals, cases, compute_margins(pair, cases), strict=True):
        seed = hashlib.sha256(f"{config.seed}:{original.row['prompt_id']}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed))  # the same places, whatever else is drawn
        drawn.append(_keep_places(case, draw_places(margins, config.substitutions, rng)))
    return drawn


def _keep_places(case: Case, chosen: Sequence[int]) -> Case:
    """The case with these of its places alone."""
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


def calibrate(
    check: AnswerCheck, config: LabelConfig, responses: Sequence[Row], scorer: Scorer, evidence: Path, notify: Notify
) -> dict[str, Any]:
    """Search and score the critical tokens of responses to a task; τ and how it was found. Arrays go to `evidence`."""
    pair, task = check.pair, check.task
    originals = check.find_originals(responses)
    if not originals:
        raise SelfJudgeError(f"no response to {task.name} has an answer to keep: raise `max_new_tokens` or give `tau`")
    events = search_critical_tokens(pair, config, originals, notify=lambda share: notify("τ: critical tokens", share))
    if not events:
        raise SelfJudgeError(f"the draft never differs from the target on {task.name}: there is nothing to judge")
    scored = score_events(scorer, events)
    scores = Scores.join([each for _, _, each in scored], scorer.suffix_length, pair.hidden_size)
    arrays = {name: getattr(scores, name) for name in EVIDENCE_ARRAYS}
    arrays["critical"] = np.asarray([not event.kept for event in events], np.uint8)
    write_tensors(evidence, arrays, {"task": task.name, "prompts": len(originals)})
    tau = compute_tau(evidence, config.suffix_length, config.reject_recall)
    return {"task": task.name, "prompts": len(originals), **tau}


def read_evidence(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of EVIDENCE_FILE; a file with other arrays is an error."""
    arrays, _ = read_tensors(file)
    shapes = {name: array.shape for name, array in arrays.items() if array.dtype.kind in "fu"}
    rows, suffix = shapes.get("critical", ()), shapes.get("original", ())
    expected = {"log_p": (*rows, 2), "original": suffix, "substituted": suffix, "highest": suffix}
    is_valid = len(rows) == 1 and rows[0] and len(suffix) == 2 and suffix[:1] == rows
    if not is_valid or any(shapes.get(name) != shape for name, shape in expected.items()):
        raise SelfJudgeError(f"{file} is not the evidence of a calibration: label again")
    return arrays


def compute_tau(
    evidence: Path, suffix_length: int, reject_recall: float, *, gap: int = 0, score: str = "likelihood"
) -> dict[str, Any]:
    """τ for a score with this suffix length and gap (see `sum_scores`), from stored evidence."""
    arrays = read_evidence(evidence)
    scores = sum_scores(arrays, suffix_length, gap=gap, score=score)
    finite = np.isfinite(scores)
    scores, is_critical = scores[finite], arrays["critical"].astype(bool)[finite]
    critical = scores[is_critical]
    share = len(critical) / max(1, len(scores))
    weak = share > WEAK or len(critical) < FEWEST
    if weak:
        tau = float(np.quantile(scores, 1 - ACCEPTABLE_RATE))
    else:  # the smallest score that at least this share of the critical tokens does not exceed
        tau = float(np.quantile(critical, reject_recall, method="inverted_cdf"))
    return {
        "tau": tau,
        "suffix_length": suffix_length,
        "score": "mean" if score == "confidence" else "sum",
        "reject_recall": reject_recall,
        "mismatches": len(scores),
        "critical": len(critical),
        "critical_share": share,
        "acceptable_rate": float((scores > tau).mean()),
        "fallback": f"acceptable rate {ACCEPTABLE_RATE:.0%}" if weak else None,
    }
