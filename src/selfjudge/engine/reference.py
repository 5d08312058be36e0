"""The reference engine: any causal LM of transformers, on any device, in ragged batches.
Every row appends to the same cache slots. Slots that a row has rejected or never had (left padding) are holes, which
the attention mask hides from it. Keys stay in time order, so causality by slot holds; each row has its own position
ids. Unused trailing slots are cut off at once, so a batch of one has no holes. Too many holes are compacted."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from selfjudge.engine.base import Engine, HeadEngine, Output
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleHead, captured_states
from selfjudge.models.tokens import context_window

PREFILL_CHUNK = 512  # bounds mask and activation memory: nothing grows with the square of the prompt
HOLE_SHARE = 0.25  # compact when the cache is longer than its longest row by this share and HOLE_SLACK slots
HOLE_SLACK = 32
_REWINDABLE = {"full_attention", "sliding_attention"}
_PASS = threading.Lock()  # the hooks of a pass would see those of other threads


class SlotLayer(DynamicLayer):
    """A cache layer that appends in place into buffers that grow by half, instead of copying them in every pass."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.used = 0
        self.buffers = [new.new_empty((*new.shape[:2], 0, new.shape[3])) for new in (key_states, value_states)]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            more = max(64, end + end // 2) - self.buffers[0].shape[2]
            self.buffers = [pad(buffer, (0, 0, 0, more)) for buffer in self.buffers]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.used : end] = new
        self.cut(end)
        return self.keys, self.values

    def cut(self, length: int) -> None:
        """Use the first `length` slots."""
        self.used = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def gather(self, slots: Tensor) -> None:
        """Keep slots [B, S'] of each row."""
        self.buffers = [
            own.gather(2, slots[:, None, :, None].expand(-1, own.shape[1], -1, own.shape[3]))
            for own in (self.keys, self.values)
        ]
        self.cut(slots.shape[1])

    def join(self, other: SlotLayer, slots: int) -> None:
        """Append the rows of another layer; all rows are padded on the left to `slots` slots."""
        here, there = (0, 0, slots - self.used, 0), (0, 0, slots - other.used, 0)
        both = ((self.keys, other.keys), (self.values, other.values))
        self.buffers = [torch.cat([pad(own, here), pad(new, there)]) for own, new in both]
        self.cut(slots)

    def select(self, rows: Tensor) -> None:
        self.buffers = [own.index_select(0, rows) for own in (self.keys, self.values)]
        self.cut(self.used)


class SlotCache(Engine):
    """The rows of a batch in shared slots: which slots belong to which row, at which position."""

    _kinds: set[str]
    _sliding: int

    def reserve(self, batch: int, length: int) -> None:
        """Empty the cache; it grows as needed."""
        self.cache = Cache(layer_class_to_replicate=SlotLayer)
        self.slots = 0
        self.valid = torch.zeros(0, 0, dtype=torch.bool, device=self.device)  # [B, S] the slot belongs to the row
        self.positions = torch.zeros(0, 0, dtype=torch.long, device=self.device)  # [B, S] its position in the row
        self.lengths = torch.zeros(0, dtype=torch.long, device=self.device)  # [B] tokens of the row

    def _parts(self, tokens: Tensor, counts: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Add slots for tokens [B, T], a chunk at a time: yields its columns and positions. Must be run to its end."""
        batch, width = tokens.shape
        if not self.slots:
            self.valid = self.valid.new_zeros((batch, 0))
            self.positions = self.positions.new_zeros((batch, 0))
            self.lengths = self.lengths.new_zeros(batch)
        valid = torch.ones_like(tokens, dtype=torch.bool)  # [B, T] the token belongs to its row
        if counts is not None:
            valid = torch.arange(width, device=self.device) >= width - counts[:, None]
        positions = (self.lengths[:, None] + valid.cumsum(1) - 1).clamp(0, self.window - 1)
        for start in range(0, width, PREFILL_CHUNK):
            part = slice(start, min(start + PREFILL_CHUNK, width))
            self.valid = torch.cat([self.valid, valid[:, part]], 1)
            self.positions = torch.cat([self.positions, positions[:, part]], 1)
            self.slots += part.stop - part.start
            yield part, positions[:, part]
        self.lengths = self.lengths + valid.sum(1)
        self._compact_if_sparse()

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

    def _mask(self, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor] | None:
        """Additive masks [B, 1, T, S] by attention kind; a query sees its row's earlier slots inside the window."""
        if width == 1 and self._kinds == {"full_attention"} and bool(self.valid.all()):
            return None
        slot = torch.arange(self.slots, device=self.device)
        query = slot[-width:]
        causal = slot[None, :] <= query[:, None]  # [T, S]
        itself = slot[None, :] == query[:, None]  # padding queries see themselves: no empty softmax
        seen = (self.valid[:, None, :] & causal) | itself
        return additive_masks(self._kinds, seen, self.positions[:, -width:], self.positions, self._sliding, dtype)

    @torch.inference_mode()
    def rewind(self, rejected: Tensor) -> None:
        if not bool(rejected.any()):
            return
        # a row's last tokens are its last valid slots: count valid slots from the right
        from_right = self.valid.flip(1).cumsum(1).flip(1)
        self.valid = self.valid & (from_right > rejected[:, None])
        self.lengths = self.lengths - rejected
        used = self.valid.any(0).nonzero()
        end = int(used[-1]) + 1 if len(used) else 0
        if end < self.slots:
            self.slots = end
            self.valid, self.positions = self.valid[:, :end], self.positions[:, :end]
            for layer in self.cache.layers:
                layer.cut(end)
        self._compact_if_sparse()

    def _compact_if_sparse(self) -> None:
        longest = int(self.lengths.max())
        if self.slots - longest > HOLE_SHARE * self.slots + HOLE_SLACK:
            self._compact(longest)

    def _compact(self, longest: int) -> None:
        """Move each row's valid slots to the right end of the shortest cache that holds the longest row."""
        order = self.valid.long().argsort(dim=1, stable=True)[:, self.slots - longest :]  # first holes, then by time
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
        if rows and self.slots > (longest := int(self.lengths.max())):
            self._compact(longest)


class ReferenceEngine(SlotCache):
    """Any causal LM of transformers, run as it is."""

    def __init__(self, model: PreTrainedModel, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.device = model.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.window = context_window(model)
        self.captured_cycles = {}
        self._embeddings: int = model.get_input_embeddings().weight.shape[0]
        self._want_hidden, self._features = hidden, features
        self._kinds = attention_kinds(model)
        self._sliding = getattr(config, "sliding_window", None) or 0
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reserve(0, 0)

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        width = tokens.shape[1]
        keep = width if keep is None else keep
        tokens = tokens.clamp(0, self._embeddings - 1)  # ids from a longer, padded vocabulary
        outputs = []
        for part, positions in self._parts(tokens, counts):
            wanted = max(0, part.stop - max(part.start, width - keep))
            outputs.append(self._pass(tokens[:, part], positions, wanted))
        if len(outputs) == 1:
            return outputs[0]
        logits, hidden, features = zip(*((o.logits, o.hidden, o.features) for o in outputs), strict=True)
        joined = (None if parts[0] is None else torch.cat(parts, 1) for parts in (hidden, features))
        return Output(torch.cat(logits, 1), next(joined), next(joined))

    def _pass(self, tokens: Tensor, positions: Tensor, keep: int) -> Output:
        arguments: dict[str, Any] = {"logits_to_keep": max(keep, 1)} if self._keeps_logits else {}  # 0: all
        captured: list[Tensor] = []
        with _PASS, contextlib.ExitStack() as stack:
            if self._want_hidden:
                head = self.model.get_output_embeddings()
                hook = head.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
                stack.callback(hook.remove)
            states = stack.enter_context(captured_states(self.model, self._features)) if self._features else []
            logits = self.model(
                input_ids=tokens,
                attention_mask=self._mask(tokens.shape[1], self.model.dtype),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **arguments,
            ).logits
        first = logits.shape[1] - keep
        hidden = captured[0][:, captured[0].shape[1] - keep :] if captured else None
        return Output(logits[:, first:], hidden, torch.cat(states, -1) if states else None)


class ReferenceHead(SlotCache, HeadEngine):
    """An EAGLE-3 head, run as a torch module. An entry is made of a token and a state."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.device, self.window = head.device, head.window
        self.vocabulary, self.hidden_size = head.draft_ids, head.config.hidden_size
        self._kinds, self._sliding = {"full_attention"}, 0
        self.reserve(0, 0)

    @torch.inference_mode()
    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        head = self.head
        tokens = tokens.clamp(0, head.config.vocab_size - 1)
        for part, positions in self._parts(tokens, counts):
            g = states[:, part] if states.shape[2] == self.hidden_size else head.fc(states[:, part])
            mask = self._mask(g.shape[1], g.dtype)
            a = head(tokens[:, part], g, positions, mask=mask, cache=self.cache)
        last = a[:, a.shape[1] - keep :]
        return Output(head.logits(last), None, last)


def additive_masks(
    kinds: set[str], seen: Tensor, queries: Tensor, keys: Tensor, window: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, T, S] by attention kind of what each query sees [B, T, S]; in layers with a sliding window
    that is less, by the positions of queries [B, T] and keys [B, S]."""
    masks = {}
    for kind in kinds:
        inside = seen & (queries[:, :, None] - keys[:, None, :] < window) if kind == "sliding_attention" else seen
        mask = torch.zeros(inside.shape, dtype=dtype, device=inside.device)
        masks[kind] = mask.masked_fill_(~inside, torch.finfo(dtype).min).unsqueeze(1)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_kinds(model: PreTrainedModel) -> set[str]:
    """The kinds of attention layers of a model. Raises SelfJudgeError where the cache cannot be rewound."""
    config = model.config.get_text_config()
    name = config.model_type
    if getattr(model, "_is_stateful", False):
        raise SelfJudgeError(f"models of type {name!r} keep a recurrent state, which cannot be rewound")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise SelfJudgeError(f"models of type {name!r} do not take position ids, which ragged batches need")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {"sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"}
    if others := ", ".join(sorted(kinds - _REWINDABLE)):
        raise SelfJudgeError(f"models of type {name!r} have {others} layers, whose state cannot be rewound")
    return kinds
