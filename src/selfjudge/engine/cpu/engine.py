"""The CPU engine: Llama- and Qwen2-shaped models through one compiled forward pass (`kernels.cpp`).

The kernel is compiled once, by the machine's C++ compiler, into the cache folder. float32 weights are used in place;
`int8` weights are a quantised copy (one scale per group of 64), made once per model.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfjudge.engine.base import Eager, Output, chunk_tokens, shape_reason
from selfjudge.models.tokens import context_window
from selfjudge.store import home, locked

GROUP = 64  # as in kernels.cpp
CHUNK = 192  # tokens per pass of a long prompt
SOURCE = Path(__file__).with_name("kernels.cpp")


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32), ("cols", ctypes.c_int32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        ("attention_norm", ctypes.c_void_p), ("mlp_norm", ctypes.c_void_p),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("epsilon", ctypes.c_float), ("embedding", ctypes.c_void_p), ("layer", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p), ("head", _Matrix),
    )  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "slots", "outputs")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids", "row", "position", "output", "row_slots", "cosine", "sine", "cache", "logits", "states",
                "scratch",
            )
        ),
        ("threads", ctypes.c_int32),
    )  # fmt: skip


def why_not(model: PreTrainedModel, *, int8: bool = False) -> str | None:
    """Why this engine cannot run the model; None if it can."""
    config = model.config.get_text_config()
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    if model.dtype != torch.float32:
        return f"its dtype is {str(model.dtype).removeprefix('torch.')}, not float32"
    if (reason := shape_reason(model)) is not None:
        return reason
    attention = model.model.layers[0].self_attn
    if attention.head_dim % 4:
        return f"its heads are {attention.head_dim} wide"
    widths = (config.hidden_size, config.intermediate_size, config.num_attention_heads * attention.head_dim)
    if int8 and any(width % GROUP for width in widths):
        return f"int8 needs widths divisible by {GROUP}"
    return _compiler_reason()


@cache
def _compiler_reason() -> str | None:
    """Why the kernel cannot be compiled on this machine; found out once."""
    try:
        _library()
    except (OSError, subprocess.SubprocessError) as error:
        return f"its kernel cannot be compiled here ({str(error).splitlines()[0]})"
    return None


@cache
def _library() -> ctypes.CDLL:
    """Compile the kernel for this machine, once per source, compiler and processor."""
    compiler = (
        shlex.split(os.environ.get("CXX", "")) or [c for c in map(shutil.which, ("c++", "g++", "clang++")) if c][:1]
    )
    if not compiler:
        raise OSError("no C++ compiler found")
    arm = platform.machine() in ("aarch64", "arm64")
    flags = ["-O3", "-mcpu=native" if arm else "-march=native", "-std=c++17", "-shared", "-fPIC"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]  # sums keep their order: reassociation spills the registers
    about = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = Path("/proc/cpuinfo")
    processor = cpu.read_text().split("\n\n")[0] if cpu.exists() else platform.processor()
    processor = "".join(line for line in processor.splitlines() if "MHz" not in line)
    key = hashlib.sha256("\0".join([SOURCE.read_text(), about, *flags, processor]).encode()).hexdigest()[:16]
    built = home() / "kernels" / f"{key}.so"
    if not built.exists():
        with locked(built.with_suffix(".lock")):
            if not built.exists():
                with tempfile.TemporaryDirectory(dir=built.parent) as folder:
                    fresh = Path(folder) / built.name
                    command = [*compiler, *flags, str(SOURCE), "-o", str(fresh)]
                    # OpenMP is the threading of torch itself: both then share one pool of threads
                    if subprocess.run([*command, "-fopenmp"], capture_output=True, check=False).returncode:
                        plain = subprocess.run(command, capture_output=True, text=True, check=False)
                        if plain.returncode:
                            raise OSError(next((x for x in plain.stderr.splitlines() if "error" in x), "it failed"))
                    os.replace(fresh, built)
    library = ctypes.CDLL(str(built))
    library.scratch_size.restype = ctypes.c_int64
    library.scratch_size.argtypes = [ctypes.POINTER(_Model), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    library.forward.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Pass)]
    library.forward.restype = None
    return library


class _Packed:
    """The model as the kernel reads it, and the tensors that must outlive it."""

    def __init__(self, model: PreTrainedModel, int8: bool) -> None:
        config, body = model.config.get_text_config(), model.base_model
        self.kept: list[Tensor] = []
        self.bytes_per_pass = 0
        layers = (_Layer * len(body.layers))()
        for layer, source in zip(layers, body.layers, strict=True):
            attention, mlp = source.self_attn, source.mlp
            layer.query, layer.key, layer.value, layer.out = (
                self._matrix(m, int8) for m in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            )
            layer.gate, layer.up, layer.down = (
                self._matrix(m, int8) for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            )
            layer.attention_norm = self._pointer(source.input_layernorm.weight)
            layer.mlp_norm = self._pointer(source.post_attention_layernorm.weight)
        self.layers = layers
        attention = body.layers[0].self_attn
        self.model = _Model(
            len(layers), config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            attention.head_dim, config.intermediate_size, config.rms_norm_eps,
            self._pointer(body.embed_tokens.weight), layers, self._pointer(body.norm.weight),
            self._matrix(model.get_output_embeddings(), int8),
        )  # fmt: skip

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, linear: nn.Linear, int8: bool) -> _Matrix:
        weight: Tensor = linear.weight.detach()
        bias: Tensor | None = getattr(linear, "bias", None)
        rows, cols = weight.shape
        at_bias = None if bias is None else self._pointer(bias)
        if not int8:
            self.bytes_per_pass += weight.numel() * 4
            return _Matrix(self._pointer(weight), None, at_bias, rows, cols)
        values, scale = quantise(weight)
        self.bytes_per_pass += values.numel() + scale.numel() * 4
        return _Matrix(self._pointer(values), self._pointer(scale), at_bias, rows, cols)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [N, K] and scales [N, K/64]: the largest of a group becomes ±127."""
    groups = weight.detach().float().view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1) / 127
    values = (groups / scale.clamp_min(1e-30)[..., None]).round().to(torch.int8)
    return values.view(weight.shape), scale


_PACKED: WeakKeyDictionary[PreTrainedModel, dict[bool, _Packed]] = WeakKeyDictionary()


def packed(model: PreTrainedModel, int8: bool) -> _Packed:
    """Packed once per model and kept as long as it."""
    forms = _PACKED.setdefault(model, {})
    if int8 not in forms:
        forms[int8] = _Packed(model, int8)
    return forms[int8]


class CpuEngine(Eager):
    """See the module's docstring. Each row's keys and values lie at their positions: a rewind changes one number."""

    def __init__(self, model: PreTrainedModel, *, hidden: bool = False, int8: bool = False) -> None:
        super().__init__()
        self.device = model.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.window = context_window(model)
        self.chunk = chunk_tokens(model.device)
        self._rotary: nn.Module = model.model.rotary_emb
        self._packed = packed(model, int8)
        self._library = _library()
        self._want_hidden = hidden
        self._embeddings: int = model.get_input_embeddings().weight.shape[0]
        self._scratch = torch.empty(0)
        self._cosine = self._sine = torch.empty(0)
        self.reserve(0, 0)

    def reserve(self, batch: int, length: int) -> None:
        """Empty the cache; it grows as needed, and to `length` at once."""
        self.lengths: list[int] = []
        self._caches: list[Tensor] = []  # of each row: keys and values [2, layers, heads, slots, dim]
        self._longest = length

    def aside(self) -> Self:
        other = copy.copy(self)
        other.reserve(0, 0)
        return other

    def join(self, other: Self, idle: int = 0) -> None:
        self.lengths, self._caches = self.lengths + other.lengths, self._caches + other._caches

    @torch.inference_mode()
    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        batch, width = tokens.shape
        keep = width if keep is None else keep
        used = [width] * batch if counts is None else counts.tolist()
        self.lengths = self.lengths or [0] * batch
        lengths = self.lengths
        self._grow([n + c for n, c in zip(lengths, used, strict=True)])
        ids = tokens.clamp(0, self._embeddings - 1).tolist()
        logits = torch.empty(batch, keep, self.vocab_size)
        states = torch.empty(batch, keep, self._packed.model.hidden)
        flat = [(b, column) for b in range(batch) for column in range(width - used[b], width)]
        written = 0
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            wanted = [i for i, (_, column) in enumerate(part) if column >= width - keep]
            self._pass(
                ids=[ids[b][column] for b, column in part],
                rows=[b for b, _ in part],
                positions=[lengths[b] + column - (width - used[b]) for b, column in part],
                outputs=wanted,
                logits=logits.view(-1, self.vocab_size)[written:],
                states=states.view(batch * keep, -1)[written:],
            )
            written += len(wanted)
        self.lengths = [n + c for n, c in zip(lengths, used, strict=True)]
        return Output(logits, states if self._want_hidden else None)

    def _pass(
        self, ids: list[int], rows: list[int], positions: list[int], outputs: list[int], logits: Tensor, states: Tensor
    ) -> None:
        model, count, threads = self._packed.model, len(rows), torch.get_num_threads()
        slots = [row.shape[3] for row in self._caches]
        tokens = torch.tensor(ids)
        numbers = torch.tensor([*rows, *positions, *slots, *outputs], dtype=torch.int32)
        caches = torch.tensor([row.data_ptr() for row in self._caches])
        size = self._library.scratch_size(ctypes.byref(model), count, max(slots), threads)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        row, position, row_slots, output = (
            numbers.data_ptr() + 4 * n for n in (0, count, 2 * count, 2 * count + len(slots))
        )
        described = _Pass(
            count, max(slots), len(outputs), tokens.data_ptr(), row, position, output, row_slots,
            self._cosine.data_ptr(), self._sine.data_ptr(), caches.data_ptr(),
            logits.data_ptr(), states.data_ptr(), self._scratch.data_ptr(), threads,
        )  # fmt: skip
        self._library.forward(ctypes.byref(model), ctypes.byref(described))

    def _grow(self, lengths: list[int]) -> None:
        """Room for so many positions of every row, and the rotary tables for them."""
        model = self._packed.model
        self._caches = self._caches or [torch.empty(2, model.layers, model.kv_heads, 0, model.head_dim)] * len(lengths)
        for b, (old, length) in enumerate(zip(self._caches, lengths, strict=True)):
            if length > (filled := old.shape[3]):
                slots = max(128, length + length // 2) if length > self._longest else self._longest
                self._caches[b] = torch.empty(2, model.layers, model.kv_heads, slots, model.head_dim)
                self._caches[b][:, :, :, :filled] = old
        most = max(row.shape[3] for row in self._caches)
        if most > len(self._cosine):
            cosine, sine = self._rotary(torch.empty(1, dtype=torch.float32), torch.arange(most)[None])
            self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()

    def rewind(self, refused: Tensor) -> None:
        self.lengths = [n - r for n, r in zip(self.lengths, refused.tolist(), strict=True)]

    def select(self, rows: list[int]) -> None:
        self.lengths, self._caches = [self.lengths[b] for b in rows], [self._caches[b] for b in rows]
