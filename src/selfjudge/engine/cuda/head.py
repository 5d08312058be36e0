"""An EAGLE-3 head on the CUDA engine: one layer with a static cache, in the same captured graphs as its target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfjudge.engine.base import Output, chunk_tokens
from selfjudge.engine.cuda.engine import CudaEngine, LayerWeights, passes, row_lengths
from selfjudge.models.eagle import EagleHead
from selfjudge.models.loaded import Draft, as_draft


class _HeadWeights:
    """The weights of a head as the kernels read them."""

    def __init__(self, head: EagleHead) -> None:
        config = head.config
        assert head.embedding is not None
        assert head.output is not None
        self.layers = [LayerWeights.fuse(head.layer)]
        self.fuse, self.state_norm = head.fc.weight.detach(), head.layer.hidden_norm.weight.detach()
        self.norm, self.head, self.embedding = head.norm.weight.detach(), head.output, head.embedding
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.epsilon, self.rotary, self.norm_before_residual = config.eps, head.rotary_emb, config.norm_before_residual


class CudaHead(CudaEngine):
    """Entries of a token and a state each, in a cache of one layer."""

    weights: _HeadWeights  # type: ignore[assignment]

    def __init__(self, draft: EagleHead | Draft) -> None:
        draft = as_draft(draft)
        head = draft.eagle_head
        self.weights = draft.keep("cuda weights", lambda: _HeadWeights(head))
        self.device, self.dtype = head.device, head.dtype
        self.vocab_size, self.window, self.chunk = head.config.vocab_size, head.window, chunk_tokens(head.device)
        self.vocabulary, self.hidden_size = head.draft_ids, head.config.hidden_size
        self._want_hidden, self._features = False, ()
        self._begin()

    @torch.no_grad()
    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        batch, width = tokens.shape
        e, slot, position = self._kernels.begin(tokens, counts, self.lengths, self.slots, self.weights.embedding)
        outputs = []
        for part, padding in passes([max(length, keep) for length in row_lengths(counts, batch, width)], width):
            x, given, slots, places = (t[part, padding:].contiguous() for t in (e, states, slot, position))
            outputs.append(self._layer(x, given, slots, places, part, keep))
        self.lengths.add_(width if counts is None else counts)
        logits, a = (torch.cat(both) if len(both) > 1 else both[0] for both in zip(*outputs, strict=True))
        return Output(logits, None, a)

    def _layer(
        self, e: Tensor, states: Tensor, slot: Tensor, position: Tensor, rows: slice, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, keep, D] and a [B, keep, H] of entries [B, T]; only keys and values are made of those before."""
        w, kernels = self.weights, self._kernels
        layer = w.layers[0]
        batch, width, size = e.shape
        keys, values = self.keys[0, rows], self.values[0, rows]
        given = states.reshape(batch * width, -1)
        fused = given.shape[1] != size
        x = given.new_zeros(batch * width, size) if fused else given.clone()
        n = kernels.norm(x, kernels.product(given, w.fuse, None) if fused else None, w.state_norm, w.epsilon)
        if w.norm_before_residual:
            x = n.clone()
        both = torch.cat([kernels.norm(e.view(batch * width, size), None, layer.attention_norm, w.epsilon), n], 1)
        qkv = kernels.product(both, layer.qkv, None)
        q = kernels.rotate(qkv, self._rotary, (slot, position), (keys, values), w.heads)
        if keep < width:
            x = x.view(batch, width, size)[:, width - keep :].reshape(batch * keep, size).contiguous()
            q, position = q[:, width - keep :].contiguous(), position[:, width - keep :].contiguous()
        if not keep:
            return x.new_empty(batch, 0, len(w.head)), x.view(batch, 0, size)
        parts = kernels.add(x, kernels.attention(q, keys, values, position), layer.out, None)
        inner = kernels.gated(kernels.norm(x, parts, layer.mlp_norm, w.epsilon), layer.gate_up)
        parts = kernels.add(x, inner, layer.down, None)
        logits = F.linear(kernels.norm(x, parts, w.norm, w.epsilon), w.head)  # and x is whole by now
        return logits.view(batch, keep, -1), x.view(batch, keep, size)
