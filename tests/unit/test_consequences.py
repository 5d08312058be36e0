"""Consequences: which places are drawn, how answers are finished and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_model
from runs import SimilarReplies, label_settings as settings_of
from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import Original, OutcomeCheck, Substitution, compare_answers, continue_responses
from selfjudge.label.methods import MARGINS, compute_margins, draw_cases, draw_places
from selfjudge.label.pipeline import label_pair
from selfjudge.label.score import Case
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_places_are_drawn_evenly_over_margins() -> None:
    margins = [0.1] * 60 + [3.0] * 5 + [20.0] * 35
    for most in (3, 6, 9, 15):
        drawn = draw_places(margins, most, rng(most))
        counts = np.histogram([margins[i] for i in drawn], [0, 0.5, 4, 99])[0]
        assert counts.tolist() == [most // 3] * 3
        assert drawn == sorted(set(drawn))
    assert len(draw_places(margins, 30, rng())) == 30  # a group that is used up leaves its turns to the others
    assert draw_places(margins, 200, rng()) == list(range(100))
    assert draw_places([], 5, rng()) == []


def test_every_place_may_be_drawn_and_the_first_ones_are_not_preferred() -> None:
    margins = [MARGINS[i % 5] for i in range(40)]
    drawn = np.bincount([place for seed in range(400) for place in draw_places(margins, 10, rng(seed))], minlength=40)
    assert drawn.min() > 60  # 100 on average
    assert drawn.max() < 145


def original_of(prompt: list[int], response: list[int], check: OutcomeCheck | None = None) -> Original:
    row = {"prompt_id": "p", "prompt_ids": prompt, "response_ids": response}
    return Original(row, "said", check or SimilarReplies())


def substitute(original: Original, place: int, token: int) -> Substitution:
    return Substitution(original, original.response, place, token)


def test_margins_are_the_targets(tiny_pair: Pair) -> None:
    cases = [
        Case([5, 6, 7], [8, 9, 10, 11, 12], [0, 2, 3], [20, 21, 22]),
        Case([9, 8], [7, 6, 5], [], []),
        Case([5], [30, 31, 32], [1], [33]),
    ]
    found = compute_margins(tiny_pair, cases)
    assert [len(margins) for margins in found] == [3, 0, 1]
    for case, margins in zip(cases, found, strict=True):
        with torch.no_grad():
            log_p = tiny_pair.target(torch.tensor([[*case.prompt, *case.response]])).logits[0].log_softmax(-1)
        for place, token, margin in zip(case.places, case.drafts, margins, strict=True):
            row = log_p[len(case.prompt) + place - 1]
            assert margin == pytest.approx(float(row[case.response[place]] - row[token]), abs=1e-4)


def test_an_answer_is_finished_as_it_would_be_alone(tiny_pair: Pair) -> None:
    """Together, with limits of their own, and one by one: the target's greedy tokens."""
    config = settings_of("", method="consequences", max_new_tokens=20, batch=3)
    original = original_of([5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15])
    tried = [substitute(original, place, 20 + place) for place in range(7)]
    together = continue_responses(tiny_pair, config, tried)
    for one, found in zip(tried, together, strict=True):
        tokens = [*original.prompt, *one.start]
        while len(tokens) < 3 + 20 and (len(tokens) == 4 + one.place or tokens[-1] not in tiny_pair.eos_ids):
            with torch.no_grad():
                tokens.append(int(tiny_pair.target(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(found) == tokens[3:]
        assert continue_responses(tiny_pair, config, [one]) == [found]


class SecondChanged(OutcomeCheck):
    """Kept, but for the second one that is asked about."""

    def __call__(self, substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
        assert all(s.original.check is self for s in substitutions)
        return [number != 1 for number in range(len(responses))]


def test_every_check_is_asked_about_its_own_answers(tiny_pair: Pair) -> None:
    config = settings_of("", method="consequences", max_new_tokens=20, batch=3)
    checks = (SecondChanged(), SimilarReplies())
    originals = [original_of([5, 6, 7 + n], [8, 9, 10, 11, 12, 13, 14, 15], check) for n, check in enumerate(checks)]
    tried = [substitute(originals[place % 2], place, 20 + place) for place in range(7)]
    told: list[float] = []
    new = continue_responses(tiny_pair, config, tried, told.append)
    kept = compare_answers(tried, new)
    assert kept[0::2] == [1, 0, 1, 1]
    assert kept[1::2] == SimilarReplies()(tried[1::2], new[1::2])
    assert told == sorted(told)
    assert told[-1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "taste"}, "unknown `method`"),
        ({"method": "consequences", "substitutions": 0}, "`substitutions` must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    options: dict, message: str, tiny_pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "w5 w6"}\n')
    with pytest.raises(SelfJudgeError, match=message) as caught:
        label_pair(tiny_pair, tmp_path / "labels", settings_of(str(tmp_path / "asked.jsonl"), **options))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "labels" / "settings.json").exists()


def test_places_beyond_a_window_are_left_out(tiny_pair: Pair) -> None:
    pair = replace(tiny_pair, draft_model=Draft(tiny_model("gpt2", seed=5, n_positions=16)))
    original = original_of(list(range(5, 12)), list(range(20, 50)))
    config = settings_of("", method="consequences")
    (case,) = draw_cases(pair, [original], config)
    assert case.places
    assert all(len(original.prompt) + place + 1 < 16 for place in case.places)
