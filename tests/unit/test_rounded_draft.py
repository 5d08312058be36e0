"""The strong draft of research/log.md: what rounding does to weights."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from selfjudge.models.pair import Pair

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rounded_draft.py"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_group_lies_on_few_levels_and_near_its_weights(bits: int) -> None:
    round_weights = runpy.run_path(str(SCRIPT))["round_weights"]
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    got = round_weights(weight, bits, 64)
    groups = weight.reshape(6, 4, 64)
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (got - weight).abs().reshape(6, 4, 64).amax(-1)
    assert (error <= step / 2 + 1e-6).all()
    levels = [len(torch.unique((g * 1e4).round())) for g in got.reshape(24, 64)]
    assert max(levels) <= 2**bits
    assert min(levels) > 2
    assert torch.allclose(got.reshape(6, 4, 64).amax(-1), groups.amax(-1))  # the ends of a group are levels


def test_a_constant_group_stays() -> None:
    round_weights = runpy.run_path(str(SCRIPT))["round_weights"]
    assert torch.equal(round_weights(torch.full((1, 64), 0.25), 3, 64), torch.full((1, 64), 0.25))


def test_a_row_that_groups_do_not_divide_is_refused() -> None:
    round_weights = runpy.run_path(str(SCRIPT))["round_weights"]
    with pytest.raises(SystemExit, match="rows of 100 weights"):
        round_weights(torch.zeros(2, 100), 3, 64)


def test_the_folder_is_a_draft_and_only_linear_layers_are_rounded(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rounded"
    monkeypatch.setattr("sys.argv", ["x", "--target", checkpoints["target"], "--group", "8", "--bits", "2", "--device", "cpu", "--out", str(out)])  # fmt: skip
    runpy.run_path(str(SCRIPT), run_name="__main__")
    pair = Pair.load(checkpoints["target"], str(out), device="cpu", dtype="float32")
    assert pair.draft is not None
    mine, theirs = pair.draft.state_dict(), pair.target.state_dict()
    same = {name for name in theirs if torch.allclose(mine[name], theirs[name], atol=1e-3)}
    linear = {f"{name}.weight" for name, module in pair.target.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(theirs) - same == linear - {"lm_head.weight"}
