"""The weights of a safetensors checkpoint, read one by one onto their device and dequantised where they are quantised.

Files are read, not mapped, PIECE bytes at a time: memory of the host does not grow with the checkpoint. transformers
takes the entries of `open_checkpoint` as its `state_dict` and asks each for its tensor when it comes to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from selfjudge.store import read_json
from selfjudge.store.artefacts import TensorIndex

PIECE = 1 << 26
"""Bytes of a file that are in host memory at a time, on the way to another device."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales beside weights of one byte."""
UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_global_scale")
"""Ends of names of what quantises activations or a cache: weights alone are dequantised here."""
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where AWQ keeps each of eight columns in a word, by four bits."""
METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq")
"""Quantisations that may be dequantised here, by the names of transformers."""
LAYOUTS = ("gptq", "gptq_v2", "gemm")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. What transformers calls on an entry of a `state_dict` reads it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Where in the file it begins."""
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, _: Any) -> StoredTensor:
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in this dtype, on its own device, whatever `device` says."""
        return self.read().to(dtype)

    def read(self) -> Tensor:
        """The tensor as it is stored, on its device."""
        raw = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for piece in raw.split(PIECE):
                host = piece if self.device.type == "cpu" else torch.empty(len(piece), dtype=torch.uint8)
                if file.readinto(cast(Any, host.numpy())) < len(piece):
                    raise ValueError(f"{self.file.name} ends early")
                if host is not piece:
                    piece.copy_(host)
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class QuantisedTensor:
    """A matrix of which a checkpoint has the parts of a quantisation; read like a `StoredTensor`."""

    parts: dict[str, StoredTensor]
    """By the end of their names."""
    dequantise: Callable[[dict[str, Tensor]], Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def __getitem__(self, _: Any) -> QuantisedTensor:
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.dequantise({name: part.read() for name, part in self.parts.items()}).to(dtype)


def find_files(source: Path | str, options: Mapping[str, Any]) -> list[Path] | None:
    """The safetensors files of a checkpoint folder or a hub id, fetched if need be; None where it has none."""

    def find(name: str) -> str | None:
        found: str | None = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **options)
        return found

    single, index = find("model.safetensors"), find("model.safetensors.index.json")
    if single is not None:
        return [Path(single)]
    if index is None:
        return None
    names = sorted(set(read_json(Path(index), TensorIndex)["weight_map"].values()))
    shards = {name: find(name) for name in names}
    for name, shard in shards.items():
        if shard is None:
            raise ValueError(f"its shard {name} is missing")
    return [Path(shard) for shard in shards.values() if shard is not None]


def read_headers(files: list[Path], device: torch.device) -> dict[str, StoredTensor]:
    """All tensors of these files by name, none of them read."""
    tensors = {}
    for path in files:
        with safe_open(path, "pt"):  # refuses a header that contradicts itself or the file
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if (dtype := DTYPES.get(entry["dtype"])) is None:
                raise ValueError(f"{name} is stored as {entry['dtype']}, which is not supported")
            first = 8 + size + entry["data_offsets"][0]
            tensors[name] = StoredTensor(path, dtype, tuple(entry["shape"]), first, device)
    return tensors


def open_checkpoint(
    files: list[Path], config: PretrainedConfig, device: torch.device
) -> dict[str, StoredTensor | QuantisedTensor]:
    """The weights of a checkpoint by name, for a model of floats; a quantisation is taken out of the config."""
    tensors = read_headers(files, device)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return dict(tensors)
    if not isinstance(quantisation, dict):
        quantisation = quantisation.to_dict()
    del config.quantization_config
    return _join_parts(tensors, quantisation)


def _join_parts(tensors: dict[str, StoredTensor], quantisation: dict[str, Any]) -> dict[str, Any]:
    """The tensors, with a `QuantisedTensor` in the place of the parts of each."""
    method, scheme = str(quantisation.get("quant_method")), _read_scheme(quantisation)
    weights: dict[str, StoredTensor | QuantisedTensor] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    packed = {"awq": ("qweight", _unpack_awq), "gptq": ("qweight", _unpack_gptq)}
    first, unpack = packed.get(method, ("weight_packed", _unpack_rows))
    for module, parts in modules.items():
        bias = parts.pop("bias", None)
        if bias is not None:
            weights[f"{module}.bias"] = bias
        parts = {name: tensor for name, tensor in parts.items() if name not in UNUSED}
        if first in parts:
            weights[f"{module}.weight"] = QuantisedTensor(parts, partial(unpack, scheme=scheme))
        elif "weight" in parts and parts["weight"].dtype in ONE_BYTE:
            if len(parts) != 2 or not any(name in parts for name in SCALES):
                raise ValueError(f"{module} is quantised by {method} in a way that needs --backend vllm")
            weights[f"{module}.weight"] = QuantisedTensor(parts, partial(_scale_weights, scheme=scheme))
        elif others := sorted(parts.keys() - {"weight"} if "weight" in parts else ()):
            raise ValueError(f"{module}.{others[0]}: weights quantised by {method} need --backend vllm")
        else:
            weights |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
    return weights


@dataclass(frozen=True)
class _Scheme:
    """What the config of a quantisation says of its numbers."""

    bits: int
    block: tuple[int, int] | None
    """Rows and columns that share a scale, of weights of one byte."""
    zero_offset: int
    """Added to the zeros that GPTQ stores."""


def _read_scheme(quantisation: dict[str, Any]) -> _Scheme:
    """The numbers of a quantisation that can be dequantised here; others are refused by name."""
    method = str(quantisation.get("quant_method"))
    groups = [group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values()]
    weights = groups[0] if groups else {}
    bits = weights.get("num_bits", quantisation.get("bits", quantisation.get("w_bit", 8)))
    layout = str(quantisation.get("checkpoint_format") or quantisation.get("version") or "gptq").lower()
    known = method in METHODS and bits in (4, 8) and not (bits == 4 and weights.get("type") == "float")
    known &= all(group == weights for group in groups) and (layout in LAYOUTS or method not in ("awq", "gptq"))
    if not known:
        raise ValueError(f"its weights are quantised by {method} in a way that needs --backend vllm")
    block = quantisation.get("weight_block_size") or weights.get("block_structure")
    return _Scheme(bits, block and tuple(block), int(layout != "gptq_v2"))


def _scale_weights(parts: dict[str, Tensor], scheme: _Scheme) -> Tensor:
    """[N, K] from values of one byte and a scale of the whole matrix, of each row [N, 1], or of blocks."""
    weight = parts["weight"].float()
    scale = next(parts[name] for name in SCALES if name in parts).float()
    if scheme.block is None or scale.numel() == 1:
        return weight * (scale.reshape(-1, 1) if scale.numel() in (1, len(weight)) else scale)
    for axis, size in enumerate(scheme.block):
        scale = scale.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
    return weight * scale


def _unpack(packed: Tensor, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Whole numbers that lie in words of 32 bits, the lowest bits first, along an axis."""
    words = packed.movedim(axis, -1)
    values = (words[..., None] >> torch.arange(0, 32, bits, device=packed.device)) & (1 << bits) - 1
    if order is not None:
        values = values[..., order]
    return values.flatten(-2).movedim(-1, axis)


def _unpack_gptq(parts: dict[str, Tensor], scheme: _Scheme) -> Tensor:
    """[N, K] from columns [K/8, N], zeros [G, N/8], scales [G, N] and the group of each input."""
    values = _unpack(parts["qweight"], scheme.bits, 0)
    zeros = (_unpack(parts["qzeros"], scheme.bits, 1) + scheme.zero_offset) & (1 << scheme.bits) - 1
    scales = parts["scales"].float()
    groups = parts.get("g_idx")
    if groups is None:
        groups = torch.arange(len(values), device=values.device) // (len(values) // len(scales))
    return ((values - zeros[groups.long()]) * scales[groups.long()]).t().contiguous()


def _unpack_awq(parts: dict[str, Tensor], scheme: _Scheme) -> Tensor:
    """[N, K] from rows [K, N/8], zeros [G, N/8] and scales [G, N]."""
    values, zeros = (_unpack(parts[name], scheme.bits, 1, AWQ_ORDER) for name in ("qweight", "qzeros"))
    scales, size = parts["scales"].float(), len(values) // len(parts["scales"])
    return ((values - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).t().contiguous()


def _unpack_rows(parts: dict[str, Tensor], scheme: _Scheme) -> Tensor:
    """[N, K] from rows [N, K/8] of compressed-tensors, scales [N, G] and, where it is not symmetric, zeros [N/8, G]."""
    rows, cols = parts["weight_shape"].tolist()
    half = 1 << scheme.bits - 1
    values, scales = _unpack(parts["weight_packed"], scheme.bits, 1)[:, :cols] - half, parts["weight_scale"].float()
    groups = parts.get("weight_g_idx")
    if groups is None or bool((groups < 0).any()):
        groups = torch.arange(cols, device=values.device) // -(-cols // scales.shape[1])
    if "weight_zero_point" in parts:
        zeros = _unpack(parts["weight_zero_point"], scheme.bits, 0)[:rows] - half
        values = values - zeros[:, groups.long()]
    return values * scales[:, groups.long()]
