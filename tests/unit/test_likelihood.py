"""How likely the target finds an answer, and what a judge took instead of its choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import VOCAB
from fake_judge import constant_judge
from selfjudge.decoding.rules import Judged
from selfjudge.decoding.text import generate
from selfjudge.evaluate.likelihood import compute_likelihoods, find_substitutions
from selfjudge.models.pair import Pair


def test_likelihoods_are_those_of_one_sequence_at_a_time(tiny_pair: Pair) -> None:
    random = torch.Generator().manual_seed(0)
    sequences = [
        tuple(torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in sizes)
        for sizes in ((4, 9), (11, 3), (2, 0), (6, 1))
    ]
    seen = compute_likelihoods(tiny_pair, sequences)
    for (prompt, answer), found in zip(sequences, seen, strict=True):
        assert len(found.log_p) == len(found.choices) == len(answer)
        if not answer:
            continue
        with torch.no_grad():
            log_p = tiny_pair.target(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        rows = log_p[len(prompt) - 1 : -1]
        assert found.choices == rows.argmax(-1).tolist()
        expected = rows.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        assert found.log_p == pytest.approx(expected.tolist(), abs=1e-4)


def test_substitutions_are_the_tokens_that_a_judge_took(tiny_pair: Pair) -> None:
    prompts: list[Any] = ["w5 w6 w7", "w9 w8"]
    always = Judged(constant_judge(1.0, tiny_pair.hidden_size), 0.5, special=tiny_pair.special_ids)
    answers = generate(tiny_pair, prompts, always, gamma=3, max_new_tokens=20)
    found = find_substitutions(tiny_pair, prompts, answers)
    assert sum(n for *_, n in found) == sum(o == "judge" for a in answers for o in a.origins) > 0
    assert [n for *_, n in found] == sorted((n for *_, n in found), reverse=True)
    assert find_substitutions(tiny_pair, prompts, generate(tiny_pair, prompts, gamma=3, max_new_tokens=20)) == []
