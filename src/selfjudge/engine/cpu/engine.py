"""The CPU engine: described models through one compiled forward pass (`kernels.cpp`, packed by `weights.py`)."""

import ctypes
import subprocess
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfjudge.engine.base import Engine, HeadEngine, Output, align_right
from selfjudge.engine.cpu.library import Pass, library
from selfjudge.engine.cpu.weights import PackedHead, PackedWeights, packed_weights
from selfjudge.models.checkpoint import GROUP
from selfjudge.models.device import give_back
from selfjudge.models.eagle import EagleHead, load_head
from selfjudge.models.gguf import gguf_file
from selfjudge.models.load import Draft, LoadedModel, as_draft, as_loaded
from selfjudge.models.shape import UnknownShapeError, describe_model
from selfjudge.models.tokens import context_window

CHUNK = 192  # tokens per pass of a long prompt


def why_not(module: PreTrainedModel | EagleHead, *, int8: bool = False) -> str | None:
    """Why this engine cannot run a model or a head; None if it can."""
    try:
        shape = module.config.shape if isinstance(module, EagleHead) else describe_model(module)
    except UnknownShapeError as error:
        return str(error)
    int8 = int8 and gguf_file(module) is None
    if module.device.type != "cpu":
        return f"it is on {module.device.type}"
    if module.dtype != torch.float32:
        return f"its dtype is {str(module.dtype).removeprefix('torch.')}, not float32"
    if shape.head_dim % 4:
        return f"its heads are {shape.head_dim} wide"
    if int8 and any(width % GROUP for width in (shape.hidden, shape.intermediate, shape.heads * shape.head_dim)):
        return f"int8 needs widths divisible by {GROUP}"
    return _compiler_reason()


@cache
def _compiler_reason() -> str | None:
    """Why the kernel cannot be compiled on this machine; found out once."""
    try:
        library("native")
    except (OSError, subprocess.SubprocessError) as error:
        return f"its kernel cannot be compiled here ({str(error).splitlines()[0]})"
    return None


def _last_columns(used: list[int], width: int) -> list[tuple[int, int]]:
    """Pairs (row, column) of the last used[b] columns of each row."""
    return [(b, column) for b, count in enumerate(used) for column in range(width - count, width)]


def _flat_index(cells: list[tuple[int, int]], width: int) -> Tensor:
    """Indices of (row, column) pairs in a flattened [B, width]."""
    return torch.tensor([b * width + column for b, column in cells], dtype=torch.long)


def _address(buffer: Tensor | None, row: int) -> int | None:
    """Where a row of a contiguous buffer of float32 begins."""
    return None if buffer is None else buffer.data_ptr() + 4 * row * buffer.shape[-1]


class CpuEngine(Engine):
    """A model through the compiled forward pass. A row's cache is indexed by position: a rewind changes a number."""

    copies_blocks = True

    def __init__(
        self,
        model: PreTrainedModel | LoadedModel,
        *,
        hidden: bool = False,
        features: tuple[int, ...] = (),
        int8: bool = False,
    ) -> None:
        loaded = as_loaded(model)
        module = loaded.causal_lm
        self.device = module.device
        self.vocab_size: int = module.get_output_embeddings().weight.shape[0]
        self.window = context_window(module)
        self.captured_cycles = {}
        self._embeddings: int = module.get_input_embeddings().weight.shape[0]
        self._want_hidden = hidden
        self._set_weights(packed_weights(loaded, int8), module.model.rotary_emb, features)

    def _set_weights(self, weights: PackedWeights, rotary: nn.Module, features: tuple[int, ...] = ()) -> None:
        """Run these weights; `features` are the layers whose inputs are wanted."""
        self._packed, self._library, self._rotary = weights, weights.kernel, rotary
        self._features = torch.tensor(features, dtype=torch.int32)
        self._scratch = torch.empty(0)
        self._cosine = self._sine = torch.empty(1, 0)
        self.reserve(0, 0)

    def reserve(self, batch: int, length: int) -> None:
        """Empty the cache; it grows as needed, and to `length` at once."""
        self.lengths: list[int] = []
        self._caches: list[Tensor] = []  # keys and values of each row: [2, layers, kv_heads, slots, dim]
        self._longest = length

    def join(self, other: Self, idle: int = 0) -> None:
        self.lengths, self._caches = self.lengths + other.lengths, self._caches + other._caches

    def view_block(self, row: int, start: int, stop: int) -> Tensor:
        return self._caches[row][:, :, :, start:stop]

    @torch.inference_mode()
    def restore(self, rows: Sequence[Sequence[Tensor]]) -> None:
        self.lengths = [sum(block.shape[3] for block in blocks) for blocks in rows]
        self._grow(self.lengths)
        for slots, length, blocks in zip(self._caches, self.lengths, rows, strict=True):
            if blocks:
                torch.cat(list(blocks), 3, out=slots[:, :, :, :length])

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        return self._run(tokens, counts, tokens.shape[1] if keep is None else keep)

    @torch.inference_mode()
    def extend_first(self, tokens: Tensor, counts: Tensor) -> Output:
        """One copy brings the outputs to their cells."""
        width = tokens.shape[1]
        output = self._run_flat(align_right(tokens, counts), counts.tolist(), width)
        place = (counts.cumsum(0) - counts)[:, None] + torch.minimum(torch.arange(width), counts[:, None] - 1)
        return output.take(place)

    def _run(self, tokens: Tensor, counts: Tensor | None, keep: int, states_in: Tensor | None = None) -> Output:
        """Append tokens [B, T], of row b the last counts[b]; `states_in` [B, T, F] are what a head reads with them."""
        batch, width = tokens.shape
        used = [width] * batch if counts is None else counts.tolist()
        output = self._run_flat(tokens, used, keep, states_in)
        if (features := output.features) is None or states_in is not None:
            return output
        if len(features) < batch * width:
            everywhere = torch.zeros(batch * width, features.shape[1])
            features = everywhere.index_copy_(0, _flat_index(_last_columns(used, width), width), features)
        return replace(output, features=features.view(batch, width, -1))

    def _run_flat(self, tokens: Tensor, used: list[int], keep: int, states_in: Tensor | None = None) -> Output:
        """Append the last used[b] tokens of each row, in passes of at most CHUNK. Outputs follow one another, not by
        row: those of the last `keep` columns may not fill their room for B · `keep`. Inputs of layers: [Σ used, F]."""
        batch, width = tokens.shape
        self.lengths = self.lengths or [0] * batch
        lengths = [n + c for n, c in zip(self.lengths, used, strict=True)]
        hidden, taps = self._packed.model.hidden, len(self._features)
        self._grow(lengths)
        ids, last = tokens.tolist(), self._embeddings - 1
        logits, states = torch.empty(batch, keep, self._packed.model.head.rows), torch.empty(batch, keep, hidden)
        flat, residual = _last_columns(used, width), None
        features = torch.empty(len(flat), taps * hidden) if taps else None
        if states_in is not None:
            residual, states_in = torch.empty_like(states), states_in.reshape(batch * width, -1)
            all_columns = len(flat) == batch * width
            states_in = states_in.contiguous() if all_columns else states_in[_flat_index(flat, width)]
        best, finite, written = torch.empty(batch, keep, dtype=torch.long), True, 0
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            cells = [(min(max(ids[b][column], 0), last), b, lengths[b] + column - width) for b, column in part]
            wanted = [i for i, (_, column) in enumerate(part) if column >= width - keep]
            into = [_address(buffer, written) for buffer in (logits, states, residual)]
            into += [best.data_ptr() + 8 * written, _address(features, start), _address(states_in, start)]
            finite &= self._pass(cells, wanted, into, 0 if states_in is None else states_in.shape[1])
            written += len(wanted)
        self.lengths = lengths
        argmax = (best, torch.zeros(batch, keep, dtype=torch.bool)) if finite else None
        return Output(logits, states if self._want_hidden else None, features if taps else residual, argmax)

    def _pass(
        self, cells: list[tuple[int, int, int]], outputs: list[int], buffers: Sequence[int | None], width: int
    ) -> bool:
        """Run cells (token, row, position) and write the logits and states of those that `outputs` indexes. `buffers`
        are addresses, the last that of what a head reads, of this width. Returns whether the logits are finite."""
        ids, rows, positions = zip(*cells, strict=True)
        logits, states, residual, best, features, states_in = buffers
        model, count, threads = self._packed.model, len(rows), torch.get_num_threads()
        slots = [row.shape[3] for row in self._caches]
        tokens, caches = array("q", ids), array("q", [row.data_ptr() for row in self._caches])
        numbers = array("i", [*rows, *positions, *slots, *outputs])
        first = numbers.buffer_info()[0]
        size = self._library.scratch_size(ctypes.byref(model), count, max(slots), threads)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        row, position, row_slots, output = (first + 4 * n for n in (0, count, 2 * count, 2 * count + len(slots)))
        arguments = Pass(
            count, max(slots), len(outputs), tokens.buffer_info()[0], row, position, output, row_slots,
            self._cosine.data_ptr(), self._sine.data_ptr(), caches.buffer_info()[0],
            logits, states, self._scratch.data_ptr(), threads, len(self._features), self._features.data_ptr(), features,
            states_in, width, residual, self._cosine.shape[1], best,
        )  # fmt: skip
        return bool(self._library.forward(ctypes.byref(model), ctypes.byref(arguments)))

    def _grow(self, lengths: list[int]) -> None:
        """Make room for this many positions of every row, and compute the rotary tables for them."""
        model = self._packed.model
        self._caches = self._caches or [torch.empty(2, model.layers, model.kv_heads, 0, model.head_dim)] * len(lengths)
        for b, (old, length) in enumerate(zip(self._caches, lengths, strict=True)):
            if length > (filled := old.shape[3]):
                slots = max(128, length + length // 2) if length > self._longest else self._longest
                self._caches[b] = torch.empty(2, model.layers, model.kv_heads, slots, model.head_dim)
                self._caches[b][:, :, :, :filled] = old
        most = max(row.shape[3] for row in self._caches)
        if most > self._cosine.shape[1]:
            shape = self._packed.shape
            self._cosine, self._sine = shape.rotary_tables(self._rotary, most, shape.head_dim, self.device)

    def rewind(self, rejected: Tensor) -> None:
        self.lengths = [n - r for n, r in zip(self.lengths, rejected.tolist(), strict=True)]

    def select(self, rows: list[int]) -> None:
        # a row that is named twice needs a second cache
        first = {b: i for i, b in reversed(list(enumerate(rows)))}
        self._caches = [self._caches[b] if first[b] == i else self._caches[b].clone() for i, b in enumerate(rows)]
        self.lengths = [self.lengths[b] for b in rows]


class CpuHead(CpuEngine, HeadEngine):
    """An EAGLE-3 head in the same kernel: one layer, whose entries are made of a token and a state."""

    def __init__(self, draft: EagleHead | Draft, target: PreTrainedModel | LoadedModel, *, int8: bool = False) -> None:
        draft, loaded = as_draft(draft), as_loaded(target)
        head = draft.eagle_head
        self.device, self.window, self._embeddings = head.device, head.window, head.config.vocab_size
        self._want_hidden = False
        self.vocabulary, self.hidden_size = head.draft_ids, head.config.hidden_size

        def pack() -> PackedHead:
            source = head
            if not head.fc.weight.numel():  # freed when it was packed in another way
                assert head.folder is not None
                source = load_head(head.folder, loaded.causal_lm)
            weights = PackedHead(source, loaded, int8)
            if int8 and loaded.file is not None:
                head.free_matrices()  # no other engine runs a head with a GGUF target
            give_back()
            return weights

        self._set_weights(draft.keep(("packed", int8), pack), head.rotary_emb)

    @torch.inference_mode()
    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        return self._run(tokens, counts, keep, states.float())
