"""Sampling: temperature and filters, draws by inversion, and random numbers of each row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfjudge.errors import expect
from selfjudge.models.device import send
from selfjudge.ops import argmax_checked, replace_non_finite, runs_kernels
from selfjudge.types import MAX_GAMMA, Block, LazyModule, check_settings, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, top-p and min-p, as in transformers; applied to target and draft alike."""

    temperature: float = setting(1.0, "Softmax temperature; 0 is greedy", minimum=0)
    top_p: float = setting(1.0, "Nucleus filter", above=0, maximum=1)
    top_k: int = setting(0, "Most likely tokens that are kept; 0 is off", minimum=0, maximum=(1 << 31) - 1)
    min_p: float = setting(0.0, "Least share of the best token's probability; 0 is off", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_settings(self)
        expect(self.temperature == 0 or self.temperature >= 0.01, "temperature", "0 or at least 0.01", self.temperature)

    def warp(self, logits: Tensor) -> Tensor:
        """[..., V] → [..., V] with filtered tokens at −inf."""
        if not self.temperature:
            return logits.float().masked_fill(logits < logits.amax(-1, keepdim=True), -math.inf)
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


class RowSampling:
    """`Sampling` of many rows at once, by numbers on their device; greedy rows have temperature 0.
    Only a CPU leaves greedy rows out. Elsewhere that would mean waiting: kernels (`fused`) skip them one by one, and
    without Triton all are computed, and `put` drops greedy ones."""

    COLUMNS = 4

    def __init__(self, columns: Tensor, *, filtered: bool) -> None:
        """`columns` [B, COLUMNS] are those of `list_columns`; unless `filtered`, no row has a filter."""
        sampled = columns[:, 0] > 0
        self.temperature, self.filtered, self.fused = columns[:, 0], filtered, runs_kernels(columns)
        self.rows: slice | Tensor = slice(None) if columns.is_cuda or self.fused else sampled.nonzero().squeeze(1)
        """Which rows of a batch the arguments and results of `warp` are."""
        self._sampled, self._columns = sampled[self.rows], columns[self.rows]

    @staticmethod
    def list_columns(sampling: Sampling | None) -> list[float]:
        """The numbers of a row that samples so, or is greedy: temperature, top-k, 1 − top-p, log of min-p."""
        if sampling is None:
            return [0.0, 0.0, 0.0, -math.inf]
        min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
        return [sampling.temperature, sampling.top_k, 1 - sampling.top_p, min_p]

    def warp(self, logits: Tensor) -> Tensor:
        """[S, …, V] → [S, …, V], as `Sampling.warp` of each row."""
        shape = [-1] + [1] * (logits.dim() - 1)
        temperature, top_k, rest, min_p = (column.view(shape) for column in self._columns.unbind(1))
        logits = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        if not self.filtered:
            return logits
        size, (ascending, order) = logits.shape[-1], logits.sort(dim=-1)
        beyond = torch.where(top_k > 0, size - top_k, 0).clamp_min(0).long()
        kth = ascending.gather(-1, beyond.expand(*logits.shape[:-1], 1))
        cut = ascending.masked_fill(ascending < kth, -math.inf).softmax(-1).cumsum(-1) <= rest
        cut[..., -1] = False  # the most likely token always stays
        removed = torch.zeros_like(cut).scatter(-1, order, cut) | (logits < kth)
        logits = logits.masked_fill(removed, -math.inf)
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p, -math.inf)

    def prepare(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """For kernels: logits [B, …, V] and the temperatures [B] that are left; only filters are applied here."""
        if not self.filtered:
            return logits, self.temperature
        return self.warp(replace_non_finite(logits)), self._sampled.float()

    def draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """By kernels: prepared logits [B, V], and a token of each row: drawn, or its likeliest where it is greedy."""
        from selfjudge.ops.sampling_triton import sample_rows

        tokens = argmax_checked(logits)[0]
        logits, temperature = self.prepare(logits)
        block = Block(tokens[:, None][:, :0], logits[:, None], uniforms=uniforms[:, None])
        sample_rows(block, block.target_logits, temperature, block.draft_tokens, torch.zeros_like(tokens), tokens)
        return logits, tokens

    def verify(
        self, block: Block, logits: Tensor, aligned: Tensor, n: Tensor | None = None, tokens: Tensor | None = None
    ) -> None:
        """By kernels, in the rows that sample: set aligned [B, γ], or tokens [B] after n [B] accepted drafts, as
        `SpeculativeSampling.aligned` and `following` do."""
        from selfjudge.ops.sampling_triton import sample_rows

        if self.filtered and n is not None:  # one row of each block, which stands for all of them
            logits = logits[torch.arange(len(n), device=n.device), n][:, None]
        logits, temperature = self.prepare(logits)
        sample_rows(block, logits.expand(-1, block.gamma + 1, -1), temperature, aligned, n, tokens)

    def put(self, values: Tensor, own: Tensor) -> Tensor:
        """[B, …] values with those [S, …] of the rows that sample in their places."""
        sampled = self._sampled.view([-1] + [1] * (own.dim() - 1))
        values = values.clone()
        values[self.rows] = torch.where(sampled, own, values[self.rows])
        return values


class RandomNumbers:
    """Random numbers of each row, independent of its neighbours; drawn for many cycles at a time."""

    AHEAD = 32  # cycles
    PER_CYCLE = 2 * MAX_GAMMA + 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generators: list[torch.Generator | None] = []  # None for greedy rows, which need no numbers
        self.drawn = torch.empty(0, 0, self.PER_CYCLE, device=device)  # [B, cycles, PER_CYCLE] of the next cycles

    @property
    def wanted(self) -> bool:
        """Whether some row samples: else nothing is drawn."""
        return any(self.generators)

    def _draw(self, generators: list[torch.Generator | None], cycles: int) -> Tensor:
        """[B, cycles, PER_CYCLE] numbers; the same ones whether cycles are drawn together or one by one."""
        return send(_draw_each(generators, cycles * self.PER_CYCLE), self.device).view(-1, cycles, self.PER_CYCLE)

    def enter(self, seeds: Iterable[int | None]) -> Tensor | None:
        """Append rows by seed (None: greedy); return [B, 1] numbers for the tokens of their prefill, if some sample."""
        new = [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]
        first = send(_draw_each(new, 1), self.device) if any(new) else None
        if new and (ahead := self.drawn.shape[1]):
            self.drawn = torch.cat([self.drawn, self._draw(new, ahead)])
        self.generators += new
        return first

    def next(self, gamma: int) -> Tensor | None:
        """[B, 2γ+1] numbers for one cycle: γ to draw drafts, γ to accept them, one for the token that follows.
        They come from the same places whatever its γ, so a row does not notice its neighbours' γ."""
        if not self.wanted:
            return None
        if not self.drawn.shape[1]:
            self.drawn = self._draw(self.generators, self.AHEAD)
        u, self.drawn = self.drawn[:, 0], self.drawn[:, 1:]
        return torch.cat([u[:, :gamma], u[:, MAX_GAMMA : MAX_GAMMA + gamma], u[:, -1:]], 1)

    def select(self, rows: list[int]) -> None:
        self.generators = [self.generators[i] for i in rows]
        kept = self.wanted and self.drawn.shape[1]
        self.drawn = self.drawn[send(rows, self.device)] if kept else self.drawn[:, :0]


def _draw_each(generators: list[torch.Generator | None], count: int) -> Tensor:
    """[B, count] numbers of each generator; zeros where there is none."""
    return torch.stack([torch.zeros(count) if g is None else torch.rand(count, generator=g) for g in generators])
