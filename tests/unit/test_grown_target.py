"""A grown target and its head compute what the small ones do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from conftest import VOCAB, tiny_head, tiny_model
from proposals import prompts_of, requests_of
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import TopK
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.load import as_draft

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from grown_target import grow_head, grow_target, places


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_function_is_kept(kind: str) -> None:
    small = tiny_model(kind, seed=1, num_hidden_layers=3)
    large = grow_target(small, 5)
    assert large.config.hidden_size == 2 * small.config.hidden_size
    assert sum(p.numel() for p in large.parameters()) > 3 * sum(p.numel() for p in small.parameters())
    tokens = torch.tensor(prompts_of([17, 17]))
    torch.testing.assert_close(large(tokens).logits, small(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_head_grows_with_its_target() -> None:
    """Under a rule that takes every draft, answers are the head's: they stay the same."""
    small = tiny_model(seed=1, num_hidden_layers=5)
    large = grow_target(small, 8)
    found = []
    for target, head in ((small, tiny_head(small)), (large, grow_head(tiny_head(small), large, places(5, 8)))):
        features = as_draft(head).features
        engines = BatchEngines(make_engine(target, features=features), make_draft(head, target))
        steps = list(decode(engines, requests_of(prompts_of([5, 12]), 24), TopK(VOCAB), gamma=3))
        found.append([(e.row, e.tokens, e.origins) for step in steps for e in step.emissions])
    assert found[0] == found[1]
    assert any("judge" in origins for _, _, origins in found[0])


def test_what_cannot_be_grown_is_refused() -> None:
    with pytest.raises(SystemExit, match="--layers must be at least 3"):
        grow_target(tiny_model(num_hidden_layers=3), 2)
    with pytest.raises(SystemExit, match="models of type gpt2 cannot be grown"):
        grow_target(tiny_model("gpt2"), 8)
