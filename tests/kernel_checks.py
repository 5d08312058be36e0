"""Triton kernels against the torch operations they replace, on whatever device there is.

On a GPU `tests/gpu` calls these; without one, `python kernel_checks.py` runs them under Triton's interpreter (`make test-vllm`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfjudge.integrations.vllm.approval import Approval, Rows
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.ops.argmax import broken, regular
from selfjudge.types import Block

VOCAB, HIDDEN = 9000, 1100  # more than one block of a row, and no multiple of it
SPECIAL = (5, 17, 8999)


def random_judge(features: str, units: int, limit: float | None = None) -> Judge:
    """One whose scores lie on both sides of a half."""
    config = JudgeConfig(HIDDEN, features=features, model="mlp" if units else "linear", margin_limit=limit)
    if not units:
        return Judge(config, torch.randn(config.width) / 30, 0.3)
    inner = torch.randn(units, config.width) / 30, torch.randn(units)
    return Judge(config, torch.randn(units) / units**0.5, 0.3, *inner)


def odd_rows(logits: Tensor) -> None:
    """Put into the first rows what a row may hold besides logits; in the last two, ties across blocks."""
    logits[0, 7], logits[1, VOCAB - 2], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[0, 3], logits[4, [8500, 60, 8300]], logits[5, [8998, 8997]] = 90.0, 90.0, 90.0


def check_top(device: torch.device, dtype: torch.dtype) -> None:
    from selfjudge.ops.argmax_triton import split_argmax

    logits = torch.randn(3, 2, VOCAB, device=device).to(dtype)
    odd_rows(logits.view(6, VOCAB))
    choice, odd = split_argmax(logits)
    assert torch.equal(choice, regular(logits.float()).argmax(-1))
    assert choice[2].tolist() == [60, 8997]
    assert torch.equal(odd, broken(logits))


def check_scores(device: torch.device, dtype: torch.dtype, features: str, units: int, limit: float | None) -> None:
    """Blocks: what `Judge.score` says, for every row that it can be asked about."""
    from selfjudge.ops.argmax_triton import split_argmax
    from selfjudge.ops.judge_score_triton import scores

    judge = random_judge(features, units, limit).to(device)
    hidden, logits = torch.randn(3, 5, HIDDEN, device=device), torch.randn(3, 5, VOCAB, device=device) * 4
    hidden, logits = hidden.to(dtype), logits.to(dtype)
    drafts = torch.randint(VOCAB, (3, 4), device=device)
    drafts[0] = logits[0, :-1].argmax(-1)
    logits[1, 0, drafts[1, 0]] = -torch.inf  # far below: the margin has an end
    hidden[2, 1, 5], hidden[2, 2, 6] = torch.nan, torch.inf
    fused = judge.fused()
    assert fused is not None
    found = scores(fused, hidden, logits, split_argmax(logits)[0], drafts)
    wanted = judge(Block(drafts, logits, hidden))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert wanted[2].isnan().tolist() == [True, True, False, False]
    assert (limit is not None) == bool((wanted[1:] == 0).any())


def check_approval(
    device: torch.device, dtype: torch.dtype, features: str, units: int, limit: float | None, special: tuple[int, ...]
) -> None:
    """Flat rows of requests: approval and mark. The rows of logits are part of wider ones, as where a vocabulary was padded."""
    counts = torch.tensor([3, 0, 5, 1, 4, *[2] * 6], device=device)
    n = int(counts.sum())
    rows = Rows.of(counts, n)
    at = torch.arange(n, device=device) + rows.owner
    m = n + len(counts)
    hidden, logits = torch.randn(m, HIDDEN, device=device), torch.randn(m, VOCAB + 24, device=device) * 4
    hidden, logits = hidden.to(dtype), logits.to(dtype)[:, :VOCAB]
    drafts = torch.randint(VOCAB, (n,), device=device, dtype=torch.int32)
    drafts[::3] = logits[at[::3]].argmax(-1).int()
    drafts[1], drafts[4] = -1, SPECIAL[1]
    hidden[at[5] + 1, 3], hidden[at[6] + 1, 2], logits[at[7], 9] = torch.nan, torch.inf, torch.nan
    logits[at[8], SPECIAL[2]] = 50.0
    first = n - 6  # the last drafts are predicted by odd rows, and are their most likely tokens, or one of them
    odd = logits[at[first:]]
    odd_rows(odd)
    logits[at[first:]] = odd
    drafts[first:] = torch.tensor([3, VOCAB - 2, 0, 0, 60, 8998])
    plain, ours = (Approval(random_judge(features, units, limit), special, device) for _ in range(2))
    ours.judge.load_state_dict(plain.judge.state_dict())
    plain.fused, ours.fused = None, ours.judge.fused()
    assert ours.fused is not None
    ours.warm_up(VOCAB, dtype)
    for theta in (0.5, torch.rand(n, device=device), 1.0, torch.full((n,), torch.inf, device=device)):
        found = ours(hidden, logits, at, drafts, theta, rows.owner)
        assert torch.equal(found, plain(hidden, logits, at, drafts, theta, rows.owner))
        assert not found[first : first + 2].any()  # broken
    approved = plain(hidden, logits, at, drafts, 0.5, rows.owner)
    assert 0 < int(approved.sum()) < n - 8
    approved[first:] = True
    processed = [logits[at].float() for _ in range(2)]
    for copy in processed:
        copy[:, 3] += 1
        copy[10, drafts[10]] = -torch.inf
    marks = [one.mark(copy, drafts, approved) for one, copy in zip((plain, ours), processed, strict=True)]
    torch.testing.assert_close(*processed, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(*marks)
    assert marks[0][0, first:].tolist() == [True, True, False, False, True, True]  # not −inf, not NaN
    assert marks[0][1, first:].tolist() == [True, True, True, True, True, False]


def check_all(device: torch.device) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        check_top(device, dtype)
        for features in FEATURES[:2]:
            for units, limit in ((0, None), (24, None), (0, 14.0)):
                check_scores(device, dtype, features, units, limit)
                for special in (SPECIAL, ())[: 2 if dtype == torch.float32 else 1]:
                    check_approval(device, dtype, features, units, limit, special)


if __name__ == "__main__":
    check_all(torch.device("cpu"))
    print("the kernels agree")
