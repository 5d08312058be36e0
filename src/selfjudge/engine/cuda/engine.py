"""The CUDA engine: described models with a static cache, every pass of one shape, replayed as a graph.
Row b of the cache holds its tokens at slots 0 … length−1; the last slot takes padding tokens. A rewind is a subtraction
on the device: rejected tokens are overwritten. A smaller batch uses the first rows of the same cache, so captured
graphs stay valid. Without Triton or a GPU, torch operations replace its kernels: tests on a CPU cover this file."""

import contextlib
import copy
import functools
import gc
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from selfjudge.engine.base import ASIDE_TOKENS, Engine, HeadEngine, Output, move_rows
from selfjudge.engine.cuda.kernels_torch import Kernels
from selfjudge.engine.cuda.weights import HeadWeights, ModelWeights
from selfjudge.models.device import CAPTURING, send
from selfjudge.models.eagle import EagleHead
from selfjudge.models.load import Draft, LoadedModel, as_draft, as_loaded
from selfjudge.models.memory import PASS_TOKENS, token_bytes
from selfjudge.models.shape import UnknownShapeError, describe_model
from selfjudge.models.tokens import context_window
from selfjudge.ops import has_triton

PREFILLS = 32  # shapes of prompts that are kept as graphs, at most
CAPTURED_TOKENS = 8192  # prompts of at most this many tokens in all are captured as a graph when their shape recurs
SLOTS = 256  # cache lengths are multiples of this, so that the next batch is likely to fit into the same cache
ASIDES = 3  # engines made by `aside` that are kept with their cache and graphs
WIDEST_HEAD = 256  # columns of a head that the kernels can hold


def why_not(module: PreTrainedModel | EagleHead) -> str | None:
    """Why this engine cannot run a model or a head; None if it can."""
    try:
        shape = module.config.shape if isinstance(module, EagleHead) else describe_model(module)
    except UnknownShapeError as error:
        return str(error)
    return f"its heads are {shape.head_dim} wide" if shape.head_dim > WIDEST_HEAD or shape.head_dim % 2 else None


def _count_slots(length: int) -> int:
    """Cache slots of a row of at most `length` tokens."""
    return (length + 2 + SLOTS - 1) // SLOTS * SLOTS


_Prefill = tuple[Callable[[], None], Tensor, Tensor, Output]  # captured: replay, its tokens, counts and output


class CudaEngine(Engine):
    """A model with a static cache, whose passes are captured as CUDA graphs."""

    static = copies_blocks = True
    version = 0
    captures = property(lambda self: self.device.type == "cuda")  # graphs; elsewhere passes run as they are
    _is_aside = False

    def __init__(
        self, model: PreTrainedModel | LoadedModel, *, hidden: bool = False, features: tuple[int, ...] = ()
    ) -> None:
        loaded = as_loaded(model)
        module = loaded.causal_lm
        self.weights = loaded.keep("cuda weights", lambda: ModelWeights(module))
        self.device, self.dtype = module.device, module.dtype
        self.vocab_size: int = self.weights.head.shape[0]
        self.window = context_window(module)
        self._want_hidden, self._features = hidden, features
        self._reset()

    def _reset(self) -> None:
        """Start without cache and captured graphs."""
        self.slots = 0
        self.usual = False  # whether it has captured passes over prompts of the usual shapes
        self.version = 0
        self.captured_cycles = {}
        self.asides: list[Self] = []  # engines whose rows have joined: the next prompts reuse their graphs
        self._graphs: WeakSet[Any] = WeakSet()  # those that are there share memory: they never run at the same time
        self._prefills: dict[Hashable, _Prefill | None] = {}  # of shapes of prompts; None: seen once
        self.lengths = self._lengths = torch.empty(0, dtype=torch.long, device=self.device)
        self._rotary: list[tuple[Tensor, Tensor]] = []  # of every kind cosine and sine by position
        self._cache = torch.empty(2, 0, 0, dtype=self.dtype, device=self.device)  # keys and values
        self.use_rows(0)

    @cached_property
    def _kernels(self) -> Kernels:
        if self.device.type != "cuda" or not has_triton():
            return Kernels()
        from selfjudge.engine.cuda.kernels_triton import TritonKernels

        return TritonKernels(self.device)

    @torch.no_grad()
    def reserve(self, batch: int, length: int) -> None:
        w, slots = self.weights, _count_slots(length)
        if self.rows_held(length) >= batch:
            self.use_rows(batch)
            self.lengths.zero_()
            return
        held, slots = (self._is_aside and self._grow(batch, length)) or (batch, slots)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # a cycle in flight may read what is freed
        asides = self.asides
        self.release()  # the old cache is freed before the new one is allocated
        self.asides = asides  # their graphs have caches of their own
        shape = (2, len(w.layers), held, w.kv_heads, slots, w.dim)
        self._cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._lengths = torch.zeros(held, dtype=torch.long, device=self.device)
        self._rotary = list(zip(*w.shape.rotary_tables(w.rotary, slots, w.dim, self.device), strict=True))
        self.slots = slots  # last: without memory for all of it there is no cache
        self.use_rows(batch)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, counts: Tensor) -> Output:
        """Prompts are padded to 64, 128 … tokens and, where cheap, 1, 2, 4 … rows: few graphs serve them all."""
        batch, width = tokens.shape
        rows, padded = 1 << (batch - 1).bit_length(), max(64, 1 << (width - 1).bit_length())
        cheap = rows * padded <= max(CAPTURED_TOKENS // 4, 2 * tokens.numel())
        rows = rows if cheap and rows <= len(self._lengths) else batch
        if not self.captures or rows * padded > CAPTURED_TOKENS or padded > self.slots:
            return self.extend(tokens, counts, keep=1)
        seen, captured = (key := (rows, padded)) in self._prefills, self._prefills.pop(key, None)
        while len(self._prefills) >= PREFILLS:
            self._prefills.pop(next(iter(self._prefills)))  # the shape that was used longest ago stands first
        self._prefills[key] = captured = captured or (self._capture_prefill(rows, padded) if seen else None)
        if captured is None:
            return self.extend(tokens, counts, keep=1)
        replay, all_tokens, all_counts, output = captured
        all_tokens[:batch, padded - width :].copy_(tokens)
        all_counts[:batch].copy_(counts)
        self._lengths[batch:rows].zero_()
        replay()
        hidden, features = (None if states is None else states[:batch] for states in (output.hidden, output.features))
        return Output(output.logits[:batch], hidden, None if features is None else features[:, padded - width :])

    def _capture_prefill(self, rows: int, width: int) -> _Prefill:
        tokens = torch.zeros(rows, width, dtype=torch.long, device=self.device)
        counts = torch.ones(rows, dtype=torch.long, device=self.device)
        outputs: list[Output] = []
        batch = self.use_rows(rows)
        try:
            (replay,) = self.capture([lambda: outputs.append(self.extend(tokens, counts, keep=1))], self.state())
        finally:
            self.use_rows(batch)
        return replay, tokens, counts, outputs[-1]

    def trim(self, *, cycles: bool = False) -> None:
        """Free what is kept for the next prompts, and the captured `cycles`."""
        self.asides.clear()
        if cycles:
            self.captured_cycles.clear()
            self._prefills.clear()

    def _grow(self, rows: int, length: int) -> tuple[int, int] | None:
        """Rows and slots of a cache for what this one holds and for these rows, if that is little."""
        grown = max(1 << (rows - 1).bit_length(), len(self._lengths)), max(_count_slots(length), self.slots)
        return grown if math.prod(grown) <= ASIDE_TOKENS else None

    def release(self) -> None:
        version = self.version
        self._reset()
        self.version = version + 1  # cycles that other engines captured with this cache are not found again

    def rows_held(self, length: int) -> int:
        """Rows of that length for which `reserve` needs no more memory."""
        return len(self._lengths) if length <= self.longest else 0

    @property
    def longest(self) -> int:
        """Maximum tokens of a row of this cache."""
        return self.slots - 2

    def row_bytes(self, length: int) -> int:
        """Bytes that `reserve` takes for a row of at most `length` tokens."""
        w = self.weights
        return token_bytes(len(w.layers), w.kv_heads, w.dim, self.dtype.itemsize) * _count_slots(length)

    @property
    def cache_bytes(self) -> int:
        return int(self._cache.nbytes)

    def use_rows(self, batch: int) -> int:
        before = len(self.lengths)
        self.lengths = self._lengths[:batch]
        self.keys, self.values = self._cache[:, :, :batch]
        return before

    def part(self, rows: slice) -> Self:
        other = super().part(rows)
        other.lengths, other.keys, other.values = self.lengths[rows], self.keys[:, rows], self.values[:, rows]
        other._prefills = {}  # captured passes work on the first rows
        return other

    @torch.no_grad()
    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        batch, width = tokens.shape
        keep = width if keep is None else keep
        if not self.slots:
            self.reserve(batch, self.window)
        w = self.weights
        x, slot, position = self._kernels.begin(tokens, counts, self.lengths, self.slots, w.embedding)
        if w.embedding_scale != 1:
            x.mul_(w.embedding_scale)
        features = x.new_empty(batch, width, len(self._features) * x.shape[2]) if self._features else None
        for start in range(0, width, PASS_TOKENS):  # of prompts this long all outputs are those of the last columns
            columns = slice(start, start + PASS_TOKENS)
            part, slots, places = (tensor[:, columns].contiguous() for tensor in (x, slot, position))
            states = None if features is None else features[:, columns]
            output = self._forward(part, slots, places, min(keep, part.shape[1]), states)
        self.lengths.add_(width if counts is None else counts)
        return Output(output.logits, output.hidden, features)

    def extend_first(self, tokens: Tensor, counts: Tensor) -> Output:
        """All tokens are computed: a captured pass has one shape."""
        output = self.extend(tokens)
        self.rewind(tokens.shape[1] - counts)
        return output

    def aside(self, rows: int = 0, length: int = 0) -> Self:
        oldest = self.asides[:1] if len(self.asides) >= ASIDES else []
        fitting = [other for other in self.asides if other.rows_held(length) >= rows]
        growing = [other for other in self.asides if other._grow(rows, length)]
        if kept := fitting or growing or oldest:
            other = min(kept, key=lambda one: (not one.usual, one.cache_bytes))  # for the same prompts the same
            self.asides.remove(other)
            return other
        other = copy.copy(self)
        other._reset()
        other._is_aside = True
        return other

    @torch.no_grad()
    def join(self, other: Self, idle: int = 0) -> None:
        """Copy the rows: captured graphs read the first rows of this cache."""
        there, new, slots = len(self.lengths), len(other.lengths), min(self.slots, other.slots)
        self.use_rows(there + new + idle)
        self.lengths[there:].zero_()
        self.lengths[there : there + new] = other.lengths
        self._cache[:, :, there : there + new, :, :slots] = other._cache[:, :, :new, :, :slots]
        self.keep_aside(other)

    def keep_aside(self, other: Self) -> None:
        """Let the next prompts be read by `other`, which `aside` made."""
        if len(self.asides) < ASIDES:
            self.asides.append(other)

    def view_block(self, row: int, start: int, stop: int) -> Tensor:
        return self._cache[:, :, row, :, start:stop]

    @torch.no_grad()
    def restore(self, rows: Sequence[Sequence[Tensor]]) -> None:
        lengths = [sum(block.shape[3] for block in blocks) for blocks in rows]
        for row in filter(lengths.__getitem__, range(len(rows))):
            torch.cat(list(rows[row]), 3, out=self._cache[:, :, row, :, : lengths[row]])
        self.lengths.copy_(send(lengths, self.device))

    def _forward(self, x: Tensor, slot: Tensor, position: Tensor, keep: int, features: Tensor | None) -> Output:
        """Run embedded tokens [B, T, H] through all layers; `features` gets the inputs of the layers that are wanted.
        x is the residual stream. `parts` of the last product may be missing from it: the next `norm` adds them."""
        w, kernels = self.weights, self._kernels
        batch, width = slot.shape
        epsilon, scale = w.epsilon, w.shape.residual_scale
        x = x.reshape(batch * width, -1)
        parts: Tensor | None = None
        after: Tensor | None = None
        for i, layer in enumerate(w.layers):
            keys, values = self.keys[i], self.values[i]
            normed = kernels.norm(x, parts, layer.attention_norm, epsilon, after, scale)
            for n, wanted in enumerate(self._features):  # a shallow model's low and high layer may be the same
                if features is not None and wanted == i:
                    features[:, :, n * x.shape[1] : (n + 1) * x.shape[1]] = x.view(batch, width, -1)
            q = kernels.rotate(
                kernels.product(normed, layer.qkv, layer.qkv_bias),
                self._rotary[layer.table], (slot, position), (keys, values), layer.head_norms,
            )  # fmt: skip
            mixed = kernels.attention(q, keys, values, position, layer.scoring)
            parts = kernels.add(x, mixed, layer.out, layer.out_bias, w.apart)
            normed = kernels.norm(x, parts, layer.mlp_norm, epsilon, layer.attention_after, scale)
            inner = kernels.gated(normed, layer.gate_up, layer.gate_up_bias, w.shape.activation)
            parts, after = kernels.add(x, inner, layer.down, layer.down_bias, w.apart), layer.mlp_after
        y = kernels.norm(x, parts, w.norm, epsilon, after, scale).view(batch, width, -1)[:, width - keep :]
        logits = F.linear(y.reshape(batch * keep, -1), w.head)
        if w.shape.logit_scale != 1:
            logits = logits * w.shape.logit_scale
        if cap := w.shape.logit_cap:
            logits = torch.tanh(logits / cap) * cap
        return Output(logits.view(batch, keep, -1), y if self._want_hidden else None)

    def bucket(self, rows: int, now: int = 0) -> int:
        """Graphs are captured for 1, 2, 4, 8 … rows; idle rows stay until they are half of the batch."""
        return now if now and rows > now // 2 else 1 << (rows - 1).bit_length()

    def rewind(self, rejected: Tensor) -> None:
        self.lengths.sub_(rejected)

    @torch.no_grad()
    def select(self, rows: list[int]) -> None:
        self.use_rows(len(rows))
        moved = sum(map(int.__ne__, rows, range(len(rows))))
        layers = max(1, len(self._lengths) // max(1, moved))  # copied at once: at most one of all rows
        move_rows(rows, [self._lengths, *(part.movedim(2, 0) for part in self._cache.split(layers, 1))])

    def state(self) -> list[Tensor]:
        return [self.lengths]

    def capture(self, functions: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
        if not self.captures:
            return list(functions)
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        # not `torch.cuda.graph`: before every capture it empties the allocator's cache, which takes longer
        side, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        graphs = []
        with _alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a phase may have nothing to do, and its graph be empty
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    for function in functions:  # compile what is new
                        function()
                    restore()
                    side.synchronize()
                    # the pool of a graph that is there: torch takes none whose graphs are all gone
                    pool = next((graph.pool() for graph in self._graphs), None) or torch.cuda.graph_pool_handle()
                    for function in functions:
                        graph = torch.cuda.CUDAGraph()
                        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # others may take memory
                        try:
                            function()
                        finally:
                            graph.capture_end()
                        graphs.append(graph)
            finally:  # also where there was no memory for it: the caller may free some and try again
                current.wait_stream(side)
                restore()
        self._graphs.update(graphs)
        return [graph.replay for graph in graphs]


class CudaHead(CudaEngine, HeadEngine):
    """An EAGLE-3 head: one layer, whose entries are made of a token and a state."""

    weights: HeadWeights  # type: ignore[assignment]

    def __init__(self, draft: EagleHead | Draft) -> None:
        draft = as_draft(draft)
        head = draft.eagle_head
        self.weights = draft.keep("cuda weights", lambda: HeadWeights(head))
        self.device, self.dtype = head.device, head.dtype
        self.window, self.vocabulary, self.hidden_size = head.window, head.draft_ids, head.config.hidden_size
        self._want_hidden, self._features = False, ()
        self._reset()

    @torch.no_grad()
    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        """Of entries before the last `keep`, only keys and values are computed."""
        w, kernels, (batch, width) = self.weights, self._kernels, tokens.shape
        e, slot, position = kernels.begin(tokens, counts, self.lengths, self.slots, w.embedding)
        self.lengths.add_(width if counts is None else counts)
        layer, size, keys, values = w.layers[0], e.shape[2], self.keys[0], self.values[0]
        given = states.reshape(batch * width, -1)
        fused = given.shape[1] != size
        x = given.new_zeros(batch * width, size) if fused else given.clone()
        n = kernels.norm(x, kernels.product(given, w.fuse, None) if fused else None, w.state_norm, w.epsilon)
        if w.norm_before_residual:
            x = n.clone()
        both = torch.cat([kernels.norm(e.view(batch * width, size), None, layer.attention_norm, w.epsilon), n], 1)
        qkv = kernels.product(both, layer.qkv, None)
        q = kernels.rotate(qkv, self._rotary[0], (slot, position), (keys, values))
        if keep < width:
            x = x.view(batch, width, size)[:, width - keep :].reshape(batch * keep, size).contiguous()
            q, position = q[:, width - keep :].contiguous(), position[:, width - keep :].contiguous()
        if not keep:
            return Output(x.new_empty(batch, 0, len(w.head)), None, x.view(batch, 0, size))
        mixed = kernels.attention(q, keys, values, position, layer.scoring)
        parts = kernels.add(x, mixed, layer.out, None)
        inner = kernels.gated(kernels.norm(x, parts, layer.mlp_norm, w.epsilon), layer.gate_up)
        parts = kernels.add(x, inner, layer.down, None)
        logits = F.linear(kernels.norm(x, parts, w.norm, w.epsilon), w.head)  # this norm completes x
        return Output(logits.view(batch, keep, -1), None, x.view(batch, keep, size))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let no other thread capture, and suspend garbage collection: it may free graphs of another engine."""
    with CAPTURING:
        running = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if running:
                gc.enable()
