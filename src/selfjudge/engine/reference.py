"""The reference engine: any causal LM of transformers, on any device, in ragged batches.

Every row appends to the same cache slots. Slots that a row has refused (or never had: left padding) are holes, hidden
from it by the attention mask. Keys stay in time order, so causality by slot holds; explicit position ids give each row
its own positions. Trailing slots that no row uses are cut off at once: a batch of one never has a hole. The cache is
compacted when holes exceed a share of it.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from selfjudge.engine.base import Eager, Output, chunk_tokens
from selfjudge.errors import SelfJudgeError
from selfjudge.models.tokens import context_window

PREFILL_CHUNK = 512  # bounds mask and activation memory: nothing grows with the square of the prompt
HOLE_SHARE = 0.25  # compact when more than this share of the slots, and HOLE_SLACK more, exceed the longest row
HOLE_SLACK = 32
_ATTENTION = {"full_attention", "sliding_attention"}


class SlotLayer(DynamicLayer):
    """A cache layer that appends in place into a buffer that grows by doubling, instead of copying it every pass."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.used = 0
        self.key_buffer = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.value_buffer = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        if end > self.key_buffer.shape[2]:
            self.key_buffer = self._grown(self.key_buffer, end)
            self.value_buffer = self._grown(self.value_buffer, end)
        self.key_buffer[:, :, self.used : end] = key_states
        self.value_buffer[:, :, self.used : end] = value_states
        self.cut(end)
        return self.keys, self.values

    def _grown(self, buffer: Tensor, needed: int) -> Tensor:
        grown = buffer.new_empty((*buffer.shape[:2], max(64, needed + needed // 2), buffer.shape[3]))
        grown[:, :, : self.used] = buffer[:, :, : self.used]
        return grown

    def cut(self, length: int) -> None:
        """Use the first `length` slots."""
        self.used = length
        self.keys = self.key_buffer[:, :, :length]
        self.values = self.value_buffer[:, :, :length]

    def gather(self, slots: Tensor) -> None:
        """Keep slots [B, S'] of each row."""
        heads, dim = self.keys.shape[1], self.keys.shape[3]
        self.key_buffer = self.keys.gather(2, slots[:, None, :, None].expand(-1, heads, -1, dim))
        heads, dim = self.values.shape[1], self.values.shape[3]
        self.value_buffer = self.values.gather(2, slots[:, None, :, None].expand(-1, heads, -1, dim))
        self.cut(slots.shape[1])

    def join(self, other: SlotLayer, slots: int) -> None:
        """Take the rows of another layer after its own; both get `slots` slots, the added ones first."""
        here, there = (0, 0, slots - self.used, 0), (0, 0, slots - other.used, 0)
        self.key_buffer = torch.cat([pad(self.keys, here), pad(other.keys, there)])
        self.value_buffer = torch.cat([pad(self.values, here), pad(other.values, there)])
        self.cut(slots)

    def select(self, rows: Tensor) -> None:
        self.key_buffer = self.keys.index_select(0, rows)
        self.value_buffer = self.values.index_select(0, rows)
        self.cut(self.used)


class ReferenceEngine(Eager):
    """See the module's docstring."""

    def __init__(self, model: PreTrainedModel, *, hidden: bool = False) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model = model
        self.device = model.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.window: int = context_window(model)
        self.chunk = chunk_tokens(model.device)
        self._embeddings: int = model.get_input_embeddings().weight.shape[0]
        self._want_hidden = hidden
        self._kinds = attention_kinds(model)
        self._sliding = getattr(config, "sliding_window", None) or 0
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reserve(0, 0)

    def reserve(self, batch: int, length: int) -> None:
        """Empty the cache; it grows as needed."""
        self.cache = Cache(layer_class_to_replicate=SlotLayer)
        self.slots = 0
        self.valid = torch.zeros(0, 0, dtype=torch.bool, device=self.device)  # [B, S] the slot belongs to the row
        self.positions = torch.zeros(0, 0, dtype=torch.long, device=self.device)  # [B, S] its position in the row
        self.lengths = torch.zeros(0, dtype=torch.long, device=self.device)  # [B] tokens of the row

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        batch, width = tokens.shape
        keep = width if keep is None else keep
        if not self.slots:
            self.valid = self.valid.new_zeros((batch, 0))
            self.positions = self.positions.new_zeros((batch, 0))
            self.lengths = self.lengths.new_zeros(batch)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if counts is not None:
            valid = torch.arange(width, device=self.device) >= width - counts[:, None]
        positions = (self.lengths[:, None] + valid.cumsum(1) - 1).clamp(0, self.window - 1)
        tokens = tokens.clamp(0, self._embeddings - 1)  # ids from a longer, padded vocabulary
        output = None
        for start in range(0, width, PREFILL_CHUNK):
            part = slice(start, min(start + PREFILL_CHUNK, width))
            wanted = max(0, part.stop - max(part.start, width - keep))
            output = _joined(output, self._pass(tokens[:, part], valid[:, part], positions[:, part], wanted))
        self.lengths = self.lengths + valid.sum(1)
        self._tidy()
        assert output is not None
        return output

    def aside(self) -> Self:
        """New rows are read into a cache of their own: a pass over this one would cover every row."""
        other = copy.copy(self)
        other.reserve(0, 0)
        return other

    @torch.inference_mode()
    def join(self, other: Self, idle: int = 0) -> None:
        if not len(self.lengths):
            self.cache, self.slots = other.cache, other.slots
            self.valid, self.positions, self.lengths = other.valid, other.positions, other.lengths
            return
        slots = max(self.slots, other.slots)
        for layer, new_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.join(new_layer, slots)
        left, right = (slots - self.slots, 0), (slots - other.slots, 0)
        self.valid = torch.cat([pad(self.valid, left), pad(other.valid, right)])
        self.positions = torch.cat([pad(self.positions, left), pad(other.positions, right)])
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.slots = slots

    def _pass(self, tokens: Tensor, valid: Tensor, positions: Tensor, keep: int) -> Output | None:
        self.valid = torch.cat([self.valid, valid], 1)
        self.positions = torch.cat([self.positions, positions], 1)
        self.slots += tokens.shape[1]
        arguments: dict[str, Any] = {"logits_to_keep": max(keep, 1)} if self._keeps_logits else {}
        captured: list[Tensor] = []
        hook = None
        if self._want_hidden:
            head = self.model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        try:
            logits = self.model(
                input_ids=tokens,
                attention_mask=self._mask(tokens.shape[1]),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **arguments,
            ).logits
        finally:
            if hook is not None:
                hook.remove()
        if not keep:
            return None
        return Output(logits[:, -keep:], captured[0][:, -keep:] if captured else None)

    def _mask(self, width: int) -> Tensor | dict[str, Tensor] | None:
        """Additive [B, 1, T, S] masks by attention kind: own slots, not later ones, inside the sliding window."""
        if width == 1 and self._kinds == {"full_attention"} and bool(self.valid.all()):
            return None
        slot = torch.arange(self.slots, device=self.device)
        query = slot[-width:]
        causal = slot[None, :] <= query[:, None]  # [T, S]
        itself = slot[None, :] == query[:, None]  # padding queries see themselves: no empty softmax
        seen = self.valid[:, None, :] & causal
        masks = {}
        for kind in self._kinds:
            allowed = seen
            if kind == "sliding_attention":
                distance = self.positions[:, -width:, None] - self.positions[:, None, :]
                allowed = seen & (distance < self._sliding)
            dtype = self.model.dtype
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
            masks[kind] = mask.masked_fill_(~(allowed | itself), torch.finfo(dtype).min).unsqueeze(1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def rewind(self, refused: Tensor) -> None:
        if not bool(refused.any()):
            return
        # a row's last tokens are its last valid slots: count valid slots from the right
        from_right = self.valid.flip(1).cumsum(1).flip(1)
        self.valid = self.valid & (from_right > refused[:, None])
        self.lengths = self.lengths - refused
        used = self.valid.any(0).nonzero()
        end = int(used[-1]) + 1 if len(used) else 0
        if end < self.slots:
            self._cut(end)
        self._tidy()

    def _tidy(self) -> None:
        longest = int(self.lengths.max())
        if self.slots - longest > HOLE_SHARE * self.slots + HOLE_SLACK:
            self._compact(longest)

    def _cut(self, end: int) -> None:
        self.slots = end
        self.valid, self.positions = self.valid[:, :end], self.positions[:, :end]
        for layer in self.cache.layers:
            layer.cut(end)

    def _compact(self, longest: int) -> None:
        """Move each row's valid slots to the right end of the shortest cache that holds the longest row."""
        order = self.valid.long().argsort(dim=1, stable=True)[:, -longest:]  # holes first, then tokens in time order
        for layer in self.cache.layers:
            layer.gather(order)
        self.valid, self.positions = self.valid.gather(1, order), self.positions.gather(1, order)
        self.slots = longest

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for layer in self.cache.layers:
            layer.select(index)
        self.valid, self.positions = self.valid[index], self.positions[index]
        self.lengths = self.lengths[index]
        longest = int(self.lengths.max()) if rows else 0
        if rows and self.slots > longest:
            self._compact(longest)


def _joined(first: Output | None, second: Output | None) -> Output | None:
    if first is None or second is None:
        return second if first is None else first
    hidden = None
    if first.hidden is not None and second.hidden is not None:
        hidden = torch.cat([first.hidden, second.hidden], 1)
    return Output(torch.cat([first.logits, second.logits], 1), hidden)


def attention_kinds(model: PreTrainedModel) -> set[str]:
    """Which attention layers the model mixes; models whose cache cannot be rewound are refused."""
    config = model.config.get_text_config()
    name = config.model_type
    if getattr(model, "_is_stateful", False):
        raise SelfJudgeError(f"models of type {name!r} keep a recurrent state, which cannot be rewound")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise SelfJudgeError(f"models of type {name!r} do not take position ids, which ragged batches need")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"}
    if not kinds <= _ATTENTION:
        raise SelfJudgeError(
            f"models of type {name!r} have {', '.join(sorted(kinds - _ATTENTION))} layers,"
            " whose state cannot be rewound"
        )
    return kinds
