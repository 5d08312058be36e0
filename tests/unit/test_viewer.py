"""What a judge took instead of the target's choice, and how likely the target finds answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import VOCAB
from fake_judge import constant_judge
from selfjudge.decoding.rules import Judged
from selfjudge.decoding.text import generate
from selfjudge.evaluate.execute import count_substitutions
from selfjudge.models.pair import Pair

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from judge_tradeoff import measure_log_likelihood


def test_likelihoods_are_those_of_one_sequence_at_a_time(tiny_pair: Pair) -> None:
    random = torch.Generator().manual_seed(0)
    sequences = [
        tuple(torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in sizes)
        for sizes in ((4, 9), (11, 3), (2, 0), (6, 1))
    ]
    expected = 0.0
    for prompt, answer in sequences:
        with torch.no_grad():
            log_p = tiny_pair.target(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        expected += float(log_p[len(prompt) - 1 : -1].gather(1, torch.tensor(answer, dtype=torch.long)[:, None]).sum())
    assert measure_log_likelihood(tiny_pair, sequences) == pytest.approx(expected, abs=1e-3)


def test_substitutions_are_the_tokens_that_a_judge_took(tiny_pair: Pair) -> None:
    prompts: list[Any] = ["w5 w6 w7", "w9 w8"]
    always = Judged(constant_judge(1.0, tiny_pair.hidden_size), 0.5, special=tiny_pair.special_ids)
    answers = generate(tiny_pair, prompts, always, gamma=3, max_new_tokens=20)
    found = count_substitutions(answers)
    assert sum(n for *_, n in found) == sum(o == "judge" for a in answers for o in a.origins) > 0
    assert [n for *_, n in found] == sorted((n for *_, n in found), reverse=True)
    ids = tiny_pair.encode_many(prompts)
    wanted = {}
    for prompt, answer in zip(ids, answers, strict=True):
        with torch.no_grad():
            logits = tiny_pair.target(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        for token, choice, origin in zip(answer.tokens, logits.argmax(-1).tolist(), answer.origins, strict=True):
            if origin == "judge":
                texts = tuple(str(tiny_pair.tokenizer.decode([t])) for t in (choice, token))
                wanted[texts] = wanted.get(texts, 0) + 1
    assert {(choice, taken): n for choice, taken, n in found} == wanted
    assert count_substitutions(generate(tiny_pair, prompts, gamma=3, max_new_tokens=20)) == []
