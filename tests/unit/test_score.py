"""Scores of substitutions: packed branches against one sequence at a time, on every architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import selfjudge.label.score as score_module
from conftest import CONFIGS, VOCAB, tiny_model
from selfjudge.label.score import Case, Scorer, sum_scores

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def naive(model, case: Case, suffix_length: int):
    """One full sequence for the response and one for every substitution, straight from the formula."""

    def read(tokens):
        captured = []
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float().cpu()
        hook.remove()
        return logits.log_softmax(-1), captured[0][0].cpu()

    prompt, response = list(case.prompt), list(case.response)
    first = len(prompt)
    log_p, hidden = read(prompt + response)
    rows = []
    for place, draft in zip(case.places, case.drafts, strict=True):
        at = first + place
        after = response[place + 1 : place + 1 + suffix_length]
        other, states = read(prompt + response[:place] + [draft] + after)
        before = log_p[at - 1]
        rows.append({
            "log_p": (float(before[response[place]]), float(before[draft])),
            "entropy": float(-(before.exp() * before).sum()),
            "rank": int((before > before[draft]).sum()),
            "original": [float(log_p[at + k, t]) for k, t in enumerate(after)],
            "substituted": [float(other[at + k, t]) for k, t in enumerate(after)],
            "hidden_target": hidden[at], "hidden_draft": states[at],
        })  # fmt: skip
    return rows


def cases_of(lengths, seed: int = 0) -> list[Case]:
    """Random responses with a substitution at every place but one in three."""
    rng = np.random.default_rng(seed)
    made = []
    for prompt, response in lengths:
        tokens = rng.integers(3, VOCAB, prompt + response).tolist()
        places = [i for i in range(response) if i % 3 != 1]
        made.append(Case(tokens[:prompt], tokens[prompt:], places, rng.integers(3, VOCAB, len(places)).tolist()))
    return made


def compare(model, cases, suffix_length: int, found) -> None:
    assert len(found) == len(cases)
    for case, scores in zip(cases, found, strict=True):
        expected = naive(model, case, suffix_length)
        assert len(scores.log_p) == len(expected)
        for k, row in enumerate(expected):
            count = len(row["original"])
            assert scores.log_p[k] == pytest.approx(row["log_p"], abs=1e-3)
            assert scores.entropy[k] == pytest.approx(row["entropy"], abs=1e-3)
            assert scores.rank[k] == row["rank"]
            assert scores.original[k, :count] == pytest.approx(row["original"], abs=1e-3)
            assert scores.substituted[k, :count] == pytest.approx(row["substituted"], abs=1e-3)
            assert np.isnan(scores.original[k, count:]).all()
            assert np.isnan(scores.substituted[k, count:]).all()
            total = row["log_p"][1] - row["log_p"][0] + sum(row["substituted"]) - sum(row["original"])
            assert scores.prefix[k] + scores.suffix[k] == pytest.approx(total, abs=1e-3)
            for name in ("hidden_target", "hidden_draft"):
                one, other = torch.from_numpy(getattr(scores, name)[k]), row[name]
                assert (one - other).norm() <= 1e-4 * other.norm()


QUICK = [("llama", 0), ("llama", 20), *((kind, 5) for kind in ("llama", "gpt2", "gemma2", "qwen2-mixed-window"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "suffix_length"),
    [
        pytest.param(
            kind,
            length,
            marks=() if (kind, length) in QUICK else [pytest.mark.slow, *[pytest.mark.versions] * (length == 5)],
        )
        for kind in sorted(CONFIGS)
        for length in (0, 1, 5, 20)
    ],
)
def test_packed_scores_are_those_of_one_sequence_at_a_time(
    kind: str, suffix_length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_module, "TOKENS", {"cpu": 90, "cuda": 160})
    monkeypatch.setattr(score_module, "PACK", {"cpu": 44, "cuda": 44})
    model = tiny_model(kind, seed=3).to(device)
    cases = cases_of([(3, 12), (40, 5), (1, 30), (7, 1), (2, 2)])
    compare(model, cases, suffix_length, Scorer(model, suffix_length=suffix_length)(cases))


def test_a_token_in_its_own_place_scores_nothing() -> None:
    model = tiny_model(seed=1)
    case = cases_of([(5, 30)])[0]
    same = Case(case.prompt, case.response, range(29), case.response[:29])
    scores = Scorer(model)([same])[0]
    assert np.abs(scores.prefix).max() < 1e-5
    assert np.abs(scores.suffix).max() < 1e-4
    assert np.allclose(scores.hidden_draft, scores.hidden_target, atol=1e-5)


def test_without_a_suffix_the_prefix_term_is_the_score() -> None:
    model = tiny_model(seed=1)
    case = cases_of([(5, 12)])[0]
    none, some = (Scorer(model, suffix_length=n)([case])[0] for n in (0, 20))
    assert none.suffix.tolist() == [0] * len(case.places)
    without = sum_scores(vars(some), 0)
    assert without.tolist() == some.prefix.tolist()
    assert np.allclose(none.prefix, some.prefix, atol=1e-5)
    assert np.allclose(none.hidden_draft, some.hidden_draft, atol=1e-5)


def test_a_case_without_places_gives_empty_scores() -> None:
    model = tiny_model(seed=1)
    empty = Case([5, 6], [7, 8, 9], [], [])
    found = Scorer(model)([empty, *cases_of([(4, 9)])])
    assert found[0].log_p.shape == (0, 2)
    assert found[0].hidden_draft.shape == (0, 32)
    assert found[0].suffix.shape == (0,)
    assert len(found[1].log_p) == 6


@pytest.mark.parametrize("suffix_length", [0, 5, 20])
def test_a_label_costs_its_own_tokens_alone(suffix_length: int) -> None:
    model = tiny_model(seed=1)
    cases = cases_of([(9, 40), (3, 33), (20, 21)])
    scorer = Scorer(model, suffix_length=suffix_length)
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    told: list[float] = []
    scorer(cases, told.append)
    assert told == sorted(told)
    assert told[-1] == 1
    once = sum(len(c.prompt) + len(c.response) for c in cases)
    labels = sum(len(c.places) for c in cases)
    assert scorer.tokens - once <= 1.25 * (1 + suffix_length) * labels
    assert sum(read) < 1.6 * scorer.tokens  # padding included


def test_out_of_memory_halves_the_batch_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=1)
    cases = cases_of([(9, 20)] * 7)
    monkeypatch.setattr(score_module, "TOKENS", {"cpu": 29 * 8})
    expected = Scorer(model)(cases)
    scorer = Scorer(model)
    once, sizes = scorer._batch, []

    def small(part):
        sizes.append(len(part))
        if len(part) > 2:
            raise torch.OutOfMemoryError("too much")
        return once(part)

    monkeypatch.setattr(scorer, "_batch", small)
    found = scorer(cases)
    assert sizes[0] == 7
    assert sizes.count(2) == 3  # halved until it fits, no further, and for the rest of the run
    again = len(sizes)
    scorer(cases)
    assert max(sizes[again:]) == 2
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one.substituted, other.substituted, atol=1e-4, equal_nan=True)

    def never(part):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(scorer, "_batch", never)
    with pytest.raises(torch.OutOfMemoryError):
        scorer(cases)
