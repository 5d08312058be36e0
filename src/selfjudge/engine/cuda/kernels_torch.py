"""The steps of a pass as torch operations: the contracts that `kernels_triton` keeps as well."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TensorPair = tuple[Tensor, Tensor]


class HeadNorms(NamedTuple):
    """Norms of queries and keys, before they are rotated."""

    query: Tensor  # [D] for each head, or [Hq, D] for the whole row
    key: Tensor
    epsilon: float
    dim: int  # columns of a head that are not padding

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm queries or keys [B, T, heads, D]."""
        wide = x.float()
        over, count = (-1, self.dim) if weight.dim() == 1 else ((-2, -1), self.dim * len(weight))
        mean = wide.pow(2).sum(over, keepdim=True) / count
        return times_weight(wide * torch.rsqrt(mean + self.epsilon), weight, x.dtype)


class Scoring(NamedTuple):
    """How attention scores keys."""

    scale: float
    window: int = 0  # positions that a query sees, its own included; 0: all
    cap: float = 0.0  # largest score, by tanh; 0: any


def times_weight(wide: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Normed values in float32 times a weight: in float32 where the weight is, else in `dtype`."""
    return (wide * weight).to(dtype) if weight.dtype == torch.float32 else wide.to(dtype) * weight


class Kernels:
    """The steps of a pass as torch operations. A product may be parts [S, M, N], which the step that reads it adds."""

    def begin(
        self, tokens: Tensor, counts: Tensor | None, lengths: Tensor, slots: int, embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed tokens [B, T] → [B, T, H]; also the slot and position [B, T] of each. Padding goes to the last slot."""
        width = tokens.shape[1]
        column = torch.arange(width, device=tokens.device)
        missing = torch.zeros_like(lengths) if counts is None else width - counts
        place = (lengths[:, None] + column - missing[:, None]).clamp(0, slots - 2)
        valid = column >= missing[:, None]
        x = F.embedding(tokens.clamp(0, embedding.shape[0] - 1), embedding)
        return x, torch.where(valid, place, slots - 1), torch.where(valid, place, 0)

    def norm(
        self,
        x: Tensor,
        parts: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        after: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Add the parts to x [M, H] in place; return x normalised, or x itself without a weight. x must be contiguous.
        With `after` as its weight, the sum of the parts is normalised first, then multiplied with `scale`."""
        assert x.is_contiguous()

        def normed(values: Tensor, by: Tensor) -> Tensor:
            wide = values.float()
            return times_weight(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon), by, values.dtype)

        if parts is not None:
            more = parts.sum(0)
            if after is not None:
                more = normed(more.to(x.dtype), after)
            x.add_(more if scale == 1 else more * scale)
        return x if weight is None else normed(x, weight)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[M, K] · [N, K]ᵀ → [S, M, N]"""
        return F.linear(x, weight, bias)[None]

    def add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, apart: bool = False) -> Tensor | None:
        """Add y · weightᵀ to x in place and return None, or return the parts [S, M, N] for the next `norm` to add.
        `apart` asks for the parts: that `norm` changes them first."""
        if apart:
            return self.product(y, weight, bias)
        x.addmm_(y, weight.t())
        if bias is not None:
            x.add_(bias)
        return None

    def rotate(
        self, qkv: Tensor, rotary: TensorPair, at: TensorPair, cache: TensorPair, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate queries and keys of [S, M, (Hq+2Hk)·D], cache keys and values; return queries [B, T, Hq, D].
        `rotary` is cosine and sine by position, `at` slot and position [B, T], `cache` keys and values."""
        (cosine, sine), (slot, position), (keys, values) = rotary, at, cache
        batch, width = slot.shape
        kv, dim = keys.shape[1], keys.shape[3]
        q, k, v = qkv.sum(0).to(keys.dtype).view(batch, width, -1, dim).tensor_split((-2 * kv, -kv), 2)
        if norms is not None:
            q, k = norms.apply(q, norms.query), norms.apply(k, norms.key)
        c, s = cosine[position][:, :, None], sine[position][:, :, None]

        def rotated(t: Tensor) -> Tensor:
            a, b = t.float().chunk(2, -1)
            return (t.float() * c + torch.cat([-b, a], -1) * s).to(t.dtype)

        index = slot[:, None, :, None].expand(batch, kv, width, dim)
        keys.scatter_(2, index, rotated(k).transpose(1, 2))
        values.scatter_(2, index, v.transpose(1, 2))
        return rotated(q)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scoring: Scoring | None = None
    ) -> Tensor:
        """[B, T, Hq, D] against the slots up to each query's position → [B·T, Hq·D]"""
        scale, window, cap = scoring or Scoring(q.shape[-1] ** -0.5)
        slot, at = torch.arange(keys.shape[2], device=q.device), position[:, None, :, None]
        seen = (slot <= at) & (slot > at - window) if window else slot <= at
        if cap:
            group = q.shape[2] // keys.shape[1]
            keys, values = (cache.repeat_interleave(group, 1) for cache in (keys, values))
            scores = torch.tanh(q.transpose(1, 2) @ keys.transpose(2, 3) * (scale / cap)) * cap
            mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1, torch.float32).to(q.dtype) @ values
        else:
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            )
        return mixed.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
        """[M, K] · [2I, K]ᵀ, gate and up → activation(gate) · up [M, I]"""
        gate, up = F.linear(x, weight, bias).chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up
