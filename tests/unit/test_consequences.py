"""Consequences: which places are drawn, how answers are finished and compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import tiny_model
from runs import label_settings as settings_of
from selfjudge.errors import SelfJudgeError
from selfjudge.label import consequences
from selfjudge.label.consequences import (
    MARGINS,
    SIMILAR_TOKENS,
    Outcome,
    Substitution,
    continuations,
    draw,
    draw_cases,
    finish_and_compare,
    margins_of,
    similarities,
)
from selfjudge.label.pipeline import label_pair
from selfjudge.label.preservation import Search
from selfjudge.label.score import Case
from selfjudge.models.loaded import Draft
from selfjudge.models.pair import Pair


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_places_are_drawn_evenly_over_margins() -> None:
    margins = [0.1] * 60 + [3.0] * 5 + [20.0] * 35
    for most in (3, 6, 9, 15):
        drawn = draw(margins, most, rng(most))
        counts = np.histogram([margins[i] for i in drawn], [0, 0.5, 4, 99])[0]
        assert counts.tolist() == [most // 3] * 3
        assert drawn == sorted(set(drawn))
    assert len(draw(margins, 30, rng())) == 30  # a group that is used up leaves its turns to the others
    assert draw(margins, 200, rng()) == list(range(100))
    assert draw([], 5, rng()) == []


def test_every_place_may_be_drawn_and_the_first_ones_are_not_preferred() -> None:
    margins = [MARGINS[i % 5] for i in range(40)]
    drawn = np.bincount([place for seed in range(400) for place in draw(margins, 10, rng(seed))], minlength=40)
    assert drawn.min() > 60  # 100 on average
    assert drawn.max() < 145


def search_of(prompt: list[int], response: list[int]) -> Search:
    return Search(prompt, tuple(response), "asked", answer="said")


def test_similarity_is_the_share_of_tokens_in_common_after_the_place() -> None:
    response = list(range(100, 160))
    search = search_of([1, 2], response)
    same = (*response[:5], 7, *response[6:])
    shifted = (*response[:5], 7, 8, *response[6:])
    other = (*response[:5], 7, *[9] * 50)
    short = (*response[:5], 7)
    found = similarities([Substitution(search, 5, 7)] * 4, [same, shifted, other, short])
    assert found == [1.0, (SIMILAR_TOKENS - 1) / SIMILAR_TOKENS, 0.0, 0.0]
    end = Substitution(search, len(response) - 1, 7)
    assert similarities([end], [(*response[:-1], 7)]) == [1.0]  # nothing follows in either


def test_margins_are_the_targets(tiny_pair: Pair) -> None:
    cases = [
        Case([5, 6, 7], [8, 9, 10, 11, 12], [0, 2, 3], [20, 21, 22]),
        Case([9, 8], [7, 6, 5], [], []),
        Case([5], [30, 31, 32], [1], [33]),
    ]
    found = margins_of(tiny_pair, cases)
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
    search = search_of([5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15])
    tried = [Substitution(search, place, 20 + place) for place in range(7)]
    together = continuations(tiny_pair, config, tried, None)
    for one, found in zip(tried, together, strict=True):
        tokens = one.prefix
        while len(tokens) < 3 + 20 and (len(tokens) == 4 + one.place or tokens[-1] not in tiny_pair.eos_ids):
            with torch.no_grad():
                tokens.append(int(tiny_pair.target(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(found) == tokens[3:]
        assert continuations(tiny_pair, config, [one], None) == [found]


SEARCHES = [search_of([5, 6, 7 + n], [8, 9, 10, 11, 12, 13, 14, 15]) for n in range(3)]
TRIED = [Substitution(SEARCHES[place % 3], place, 20 + place) for place in range(7)]
"""By turns: an open prompt whose meaning is checked, one by similarity, one that asks for a program."""


def meaning(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
    """Kept, but for the second one that is asked about."""
    assert all(search is SEARCHES[0] for search in searches)
    return [number != 1 for number in range(len(texts))]


def outcomes(run_programs: Any) -> list[Outcome]:
    kinds = [Outcome(meaning), Outcome(None), Outcome(run_programs, runs_programs=True)]
    return [kinds[place % 3] for place in range(7)]


@pytest.mark.parametrize("free", [True, False])
def test_programs_run_while_the_other_answers_are_written_where_cores_are_free(
    free: bool, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of("", method="consequences", max_new_tokens=20, batch=3)
    written, calls = threading.Event(), []

    def watched(pair: Pair, config: Any, substitutions: Sequence[Substitution], *rest: Any) -> list[tuple[int, ...]]:
        calls.append([s.place for s in substitutions])
        found = continuations(pair, config, substitutions, *rest)
        if len(substitutions) > 2:
            written.set()
        return found

    def run_programs(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        assert written.wait(60), "the others wait for the programs"
        assert (threading.current_thread() is threading.main_thread()) is not free
        return [text == expected for text in texts]

    whole = continuations(tiny_pair, config, TRIED, None)
    expected = tiny_pair.tokenizer.decode(list(whole[5]))  # what the second program is
    monkeypatch.setattr(consequences, "continuations", watched)
    monkeypatch.setattr(consequences, "has_free_cores", lambda pair: free)
    told: list[float] = []
    others, kept = finish_and_compare(tiny_pair, config, TRIED, outcomes(run_programs), None, told.append)
    assert calls == ([[2, 5], [0, 1, 3, 4, 6]] if free else [[0, 1, 2, 3, 4, 5, 6]])
    assert others == whole
    assert kept[0::3] == [1, 0, 1]
    assert kept[1::3] == similarities(TRIED[1::3], whole[1::3])
    assert kept[2::3] == [float(whole[2] == whole[5]), 1]
    assert told == sorted(told)
    assert told[-1] == 1


def test_an_error_does_not_wait_for_programs_that_have_not_begun(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of("", method="consequences", max_new_tokens=20, batch=3)
    begun, tested = threading.Event(), []

    def run_programs(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        tested.append(len(texts))
        begun.set()
        time.sleep(0.05)
        return [True] * len(texts)

    def failing(pair: Pair, config: Any, substitutions: Sequence[Substitution], *rest: Any) -> list[tuple[int, ...]]:
        if substitutions[0].search is SEARCHES[2]:
            return continuations(pair, config, substitutions, *rest)
        assert begun.wait(60)
        raise SelfJudgeError("out of memory")

    monkeypatch.setattr(consequences, "continuations", failing)
    monkeypatch.setattr(consequences, "has_free_cores", lambda pair: True)
    monkeypatch.setattr(consequences, "PROGRAMS_AT_A_TIME", 1)
    with pytest.raises(SelfJudgeError, match="out of memory"):
        finish_and_compare(tiny_pair, config, TRIED * 20, outcomes(run_programs) * 20, None, lambda share: None)
    assert len(tested) < 40  # of 40


def test_an_error_of_a_program_is_told(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_programs(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        raise SelfJudgeError("no sandbox")

    config = settings_of("", method="consequences", max_new_tokens=20, batch=3)
    monkeypatch.setattr(consequences, "has_free_cores", lambda pair: True)
    with pytest.raises(SelfJudgeError, match="no sandbox"):
        finish_and_compare(tiny_pair, config, TRIED, outcomes(run_programs), None, lambda share: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "judged"}, "`policy` goes with `method` consequences, not with selfjudge"),
        ({"judge": "smollm2-135m"}, "`judge` and `gamma` belong to a `policy`"),
        ({"gamma": 3}, "`judge` and `gamma` belong to a `policy`"),
        ({"method": "consequences", "policy": "topk"}, "greedy or a judged rule such as judged:F, not 'topk'"),
        ({"method": "consequences", "policy": "judged:x"}, "theta='x' is not a number"),
        ({"method": "consequences", "policy": "judged"}, "give `judge`"),
        ({"method": "consequences", "policy": "judged", "gamma": 99}, "`gamma` must be at most 20"),
        ({"method": "consequences", "outcome": "taste"}, "unknown `outcome`"),
        ({"method": "consequences", "similarity": 0.0}, "`similarity` must be more than 0"),
        ({"method": "consequences", "lookahead": True}, "`lookahead` goes with `method` selfjudge"),
        ({"method": "consequences", "policy": "judged", "backend": "vllm"}, "`policy` judged needs `backend` torch"),
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
    search = search_of(list(range(5, 12)), list(range(20, 50)))
    config = settings_of("", method="consequences")
    (case,) = draw_cases(pair, [search], config)
    assert case.places
    assert all(len(search.prompt) + place + 1 < 16 for place in case.places)
