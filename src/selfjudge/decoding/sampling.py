"""Sampling: temperature and filters, draws by inversion, and random numbers of each row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfjudge.types import MAX_GAMMA, LazyModule, check_settings, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, as in transformers; applied to target and draft alike."""

    temperature: float = setting(1.0, "Softmax temperature", minimum=0.01)
    top_p: float = setting(1.0, "Nucleus filter", above=0, maximum=1)
    top_k: int = setting(0, "Most likely tokens that are kept; 0 is off", minimum=0, maximum=(1 << 31) - 1)
    min_p: float = setting(0.0, "Least share of the best token's probability; 0 is off", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_settings(self)

    def warp(self, logits: Tensor) -> Tensor:
        """[..., V] → [..., V] with filtered tokens at −inf."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -math.inf)
        if self.top_p < 1:
            ascending, order = logits.sort(dim=-1)
            cut = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            cut[..., -1] = False  # the most likely token always stays
            logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -math.inf)
        if self.min_p:
            least = logits.amax(-1, keepdim=True) + math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -math.inf)
        return logits


def sample(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[..., V], [...] → [...] one token each by inversion of the cumulative distribution (need not be normalised)."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[..., -1:]
    point = torch.minimum(uniform.unsqueeze(-1) * total, total * (1 - 1e-6))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp_max(probabilities.shape[-1] - 1)


class RandomNumbers:
    """Random numbers of each row, independent of its neighbours; drawn for many cycles at a time."""

    AHEAD = 32  # cycles

    PER_CYCLE = 2 * MAX_GAMMA + 1

    def __init__(self, wanted: bool, device: torch.device) -> None:
        """Under greedy rules (not `wanted`) nothing is drawn."""
        self.wanted, self.device = wanted, device
        self.generators: list[torch.Generator] = []
        self.drawn: deque[Tensor] = deque()

    def _draw(self, generators: list[torch.Generator], cycles: int) -> Iterable[Tensor]:
        """[B, PER_CYCLE] numbers for each cycle; the same ones whether cycles are drawn together or one by one."""
        numbers = torch.stack([torch.rand(cycles * self.PER_CYCLE, generator=g) for g in generators]).to(self.device)
        return numbers.view(-1, cycles, self.PER_CYCLE).unbind(1)

    def enter(self, seeds: Iterable[int]) -> Tensor | None:
        """Append rows with these seeds; return [B, 1] numbers for the tokens that their prefill yields."""
        if not self.wanted:
            return None
        new = [torch.Generator().manual_seed(seed) for seed in seeds]
        first = torch.stack([torch.rand(1, generator=g) for g in new]).to(self.device)
        if self.drawn:
            ahead = self._draw(new, len(self.drawn))
            self.drawn = deque(torch.cat(both) for both in zip(self.drawn, ahead, strict=True))
        self.generators += new
        return first

    def next(self, gamma: int) -> Tensor | None:
        """[B, 2γ+1] numbers for one cycle: γ to draw drafts, γ to accept them, one for the token that follows.

        A cycle takes its numbers from the same places whatever its γ, so a row does not notice its neighbours' γ."""
        if not self.wanted:
            return None
        if not self.drawn:
            self.drawn.extend(self._draw(self.generators, self.AHEAD))
        u = self.drawn.popleft()
        return torch.cat([u[:, :gamma], u[:, MAX_GAMMA : MAX_GAMMA + gamma], u[:, -1:]], 1)

    def select(self, rows: list[int]) -> None:
        if self.wanted:
            self.generators = [self.generators[i] for i in rows]
            self.drawn = deque(u[rows] for u in self.drawn)
