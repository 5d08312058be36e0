"""The most likely token of odd rows."""

from __future__ import annotations

import math

import pytest
import torch

from selfjudge.ops import argmax_checked, has_non_finite, replace_non_finite

NAN, INF = math.nan, math.inf
ROWS = [
    ([1.0, 3.0, 2.0, 3.0], 1, False),  # ties: the first
    ([NAN, 3.0, 2.0, 4.0], 3, True),
    ([5.0, NAN, NAN, NAN], 0, True),
    ([5.0, 1.0, INF, 2.0], 2, True),
    ([5.0, INF, 1.0, INF], 1, True),
    ([NAN, 1.0, INF, -INF], 2, True),
    ([-INF, -INF, -INF, -INF], 0, False),
    ([NAN, NAN, NAN, NAN], 0, True),
    ([-INF, NAN, -INF, -INF], 0, True),
    ([-INF, -INF, -7.0, -INF], 2, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_odd_rows(dtype: torch.dtype) -> None:
    logits = torch.tensor([row for row, _, _ in ROWS], dtype=dtype)
    choice, odd = argmax_checked(logits)
    assert choice.tolist() == [best for _, best, _ in ROWS]
    assert choice.tolist() == replace_non_finite(logits).argmax(-1).tolist()
    assert odd.tolist() == has_non_finite(logits).tolist() == [bad for _, _, bad in ROWS]


def test_each_row_alone_and_any_leading_shape() -> None:
    """One odd row does not decide how the others are read."""
    for row, best, bad in ROWS:
        choice, odd = argmax_checked(torch.tensor(row))
        assert (int(choice), bool(odd)) == (best, bad)
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0))
    choice, odd = argmax_checked(logits)
    assert torch.equal(choice, logits.argmax(-1))
    assert odd.shape == (2, 5)
    assert not odd.any()


def test_regular_logits_have_a_finite_maximum_and_a_softmax() -> None:
    for dtype in (torch.float32, torch.float16):
        made = replace_non_finite(torch.tensor([row for row, _, _ in ROWS], dtype=dtype))
        assert made.amax(-1).isfinite().all()
        assert (made.float() / 0.5).softmax(-1).isfinite().all()
    assert replace_non_finite(torch.full((1, 4), -INF)).softmax(-1).tolist() == [[0.25] * 4]
