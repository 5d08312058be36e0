"""A judge that says the same of every draft."""

from __future__ import annotations

import math

from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge


def constant_judge(probability: float, hidden_size: int, target: str = "") -> Judge:
    """A judge that gives every draft the same P(acceptable): 1 always accepts (θ < 1), 0 never does."""
    if probability in (0.0, 1.0):
        bias = math.copysign(200.0, probability - 0.5)  # its σ is 0 or 1 in float32
    else:
        bias = math.log(probability / (1 - probability))
    return Judge(JudgeConfig(hidden_size=hidden_size, target=target, label_method="constant"), bias=bias)
