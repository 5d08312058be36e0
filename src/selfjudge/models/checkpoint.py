"""The weights of a checkpoint: all of the model's, none of another's, every one finite; and how int8 rounds them.
Tensors of safetensors files are read one by one onto their device, and dequantised where they are quantised. Files are
read in pieces of PIECE bytes, not mapped: memory of the host does not grow with the checkpoint. The `state_dict` that
transformers gets has the entries of `open_checkpoint`, each read when transformers comes to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import read_json
from selfjudge.store.schema import TensorIndex

GROUP = 32  # weights per scale of int8, as in engine/cpu/blocks.h
DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that old checkpoints carry although the model computes them."""
PIECE = 1 << 26  # bytes of a file that are in host memory at a time, on the way to another device
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PACKED, QWEIGHT = "weight_packed", "qweight"
SCALES = ("weight_scale_inv", "weight_scale")  # of weights of one byte
UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_global_scale")
"""Ends of names of what quantises activations or a cache: weights alone are dequantised here."""
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ keeps each of eight columns in a word, by four bits
METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq")
LAYOUTS = ("gptq", "gptq_v2", "gemm")  # of the last two


def check_weights(model: PreTrainedModel, loading: Mapping[str, Iterable[Any]], source: Path | str) -> None:
    """Refuse a checkpoint whose tensors are not the model's, or not finite: transformers would invent missing ones."""
    for what, problem in (
        ("mismatched_keys", "has weights of other shapes than its config says"),
        ("missing_keys", "lacks weights of this model"),
        ("unexpected_keys", "has unknown weights of this model"),
    ):
        names = [name if isinstance(name, str) else name[0] for name in loading.get(what, ())]
        if wrong := sorted(name for name in names if not name.endswith(DERIVED)):
            raise SelfJudgeError(f"{source} {problem} ({len(wrong)}: {wrong[0]} …)")
    check_finite(model.named_parameters(), source)
    config = model.config.get_text_config()
    check_heads(getattr(config, "num_attention_heads", 1), getattr(config, "num_key_value_heads", None) or 1, source)


def check_heads(heads: int, kv_heads: int, source: Path | str) -> None:
    """Refuse heads that cannot share keys: engines would read beyond the last."""
    if heads % kv_heads:
        raise SelfJudgeError(f"{source} has {heads} heads, which cannot share {kv_heads} key heads evenly")


def check_finite(weights: Iterable[tuple[str, Tensor]], source: Path | str) -> None:
    """Refuse weights that are not finite."""
    for name, weight in weights:
        if not bool(weight.isfinite().all()):
            raise SelfJudgeError(f"{source} has weights that are not finite ({name})")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [N, K] and float16 scales [N, K/32]: the largest of a group becomes ±127; the last may be short.
    What `dequantise` gives is quantised to the same values again."""
    rows, cols = weight.shape
    groups = F.pad(weight.detach().float(), (0, -cols % GROUP)).view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1) / 127).half()
    values = (groups / scale.float().clamp_min(1e-30)[..., None]).round().clamp(-127, 127).to(torch.int8)
    return values.view(rows, -1)[:, :cols].contiguous(), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """[N, K] in float32 from what `quantise` gives, or from a scale [N] of each row."""
    if scale.dim() == 1:
        return values.float() * scale.float()[:, None]
    return values.float() * scale.float().repeat_interleave(GROUP, 1)[:, : values.shape[1]]


def unpack_six(packed: Tensor) -> Tensor:
    """int8 [N, K], of ±31, from bytes [N, 3K/4] that hold four values in three."""
    x, y, z = packed.short().view(len(packed), -1, 3).unbind(-1)
    four = [x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2]
    return (torch.stack(four, -1) - 32).to(torch.int8).flatten(1)


def read_packed(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder, floats in float32.
    A matrix in int8, or six bits in uint8, as in drafts that ship, is dequantised with its scales (`NAME.scale`)."""
    stored: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            stored |= load_file(file)
        for name, tensor in stored.items():
            if tensor.dtype in (torch.int8, torch.uint8):
                values = unpack_six(tensor) if tensor.dtype == torch.uint8 else tensor
                tensors[name] = dequantise(values, stored[f"{name}.scale"])
            elif not name.endswith(".scale"):
                tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    except (OSError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
        raise SelfJudgeError(f"cannot read the weights in {folder}: {first_line(error)}") from None
    if not stored:
        raise SelfJudgeError(f"{folder} has no model.safetensors: weights of a draft are read in this format alone")
    return tensors


class LazyTensor:
    """A tensor that is read when transformers comes to it; it stays on its own device, whatever it is asked for."""

    def __getitem__(self, _: Any) -> LazyTensor:
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return self.read().to(dtype)

    def read(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class StoredTensor(LazyTensor):
    """A tensor in a file, from byte `offset` on, for a device."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    device: torch.device

    def read(self) -> Tensor:
        raw = torch.empty(math.prod(self.shape) * self.dtype.itemsize, dtype=torch.uint8, device=self.device)
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
class QuantisedTensor(LazyTensor):
    """A matrix of which a checkpoint has the parts of a quantisation, by the ends of their names."""

    parts: dict[str, StoredTensor]
    scheme: QuantScheme

    def read(self) -> Tensor:
        parts = {name: part.read() for name, part in self.parts.items()}
        return _scale_weights(parts, self.scheme) if "weight" in parts else _unpack_weights(parts, self.scheme)


@dataclass(frozen=True)
class QuantScheme:
    """What the config of a quantisation says of its numbers."""

    method: str
    bits: int
    block: tuple[int, int] | None  # rows and columns that share a scale, of weights of one byte
    zero_offset: int  # added to the zeros that GPTQ stores


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
    if missing := [name for name in names if find(name) is None]:
        raise ValueError(f"its shard {missing[0]} is missing")
    return [Path(find(name) or "") for name in names]


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


def open_checkpoint(files: list[Path], config: PretrainedConfig, device: torch.device) -> dict[str, LazyTensor]:
    """The weights of a checkpoint by name, for a model of floats; a quantisation is taken out of the config."""
    tensors = read_headers(files, device)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return dict(tensors)
    scheme = _read_scheme(quantisation if isinstance(quantisation, dict) else quantisation.to_dict())
    del config.quantization_config
    weights: dict[str, LazyTensor] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "bias":
            weights[name] = tensor
        elif part not in UNUSED:
            modules.setdefault(module, {})[part] = tensor
    for module, parts in modules.items():
        if _can_dequantise(parts):
            weights[f"{module}.weight"] = QuantisedTensor(parts, scheme)
        elif len(parts) > 1 and "weight" in parts:
            raise ValueError(f"{module} is quantised by {scheme.method} in a way that needs --backend vllm")
        else:
            weights |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
    return weights


def _can_dequantise(parts: Mapping[str, StoredTensor]) -> bool:
    """Whether these are the parts of a matrix in words, or of one in bytes with its scales."""
    one_byte = "weight" in parts and parts["weight"].dtype in ONE_BYTE and len(parts) == 2
    return PACKED in parts or QWEIGHT in parts or (one_byte and any(name in parts for name in SCALES))


def _read_scheme(quantisation: dict[str, Any]) -> QuantScheme:
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
    return QuantScheme(method, bits, block and tuple(block), int(layout != "gptq_v2"))


def _scale_weights(parts: dict[str, Tensor], scheme: QuantScheme) -> Tensor:
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


def _unpack_weights(parts: dict[str, Tensor], scheme: QuantScheme) -> Tensor:
    """[N, K] from words of whole numbers, of zeros, and scales [N, G] by group of inputs. compressed-tensors has words
    [N, K/8] and perhaps zeros [N/8, G]; GPTQ words [K/8, N], AWQ [K, N/8], both zeros [G, N/8] and scales [G, N]."""
    bits, zeros = scheme.bits, torch.tensor(1 << scheme.bits - 1)
    if PACKED in parts:
        rows, cols = parts["weight_shape"].tolist()
        values, scales = _unpack(parts[PACKED], bits, 1)[:, :cols], parts["weight_scale"]
        if "weight_zero_point" in parts:
            zeros = _unpack(parts["weight_zero_point"], bits, 0)[:rows]
    else:
        axis, order = (1, AWQ_ORDER) if scheme.method == "awq" else (0, None)
        values, scales = _unpack(parts[QWEIGHT], bits, axis, order).t(), parts["scales"].t()
        zeros = _unpack(parts["qzeros"], bits, 1, order).t()
        if scheme.method == "gptq":
            zeros = (zeros + scheme.zero_offset) & (1 << bits) - 1
    groups = parts.get("weight_g_idx", parts.get("g_idx"))
    if groups is None or bool((groups < 0).any()):
        groups = torch.arange(values.shape[1], device=values.device) // -(-values.shape[1] // scales.shape[1])
    groups = groups.long()
    shift = zeros.to(values.device) if zeros.dim() == 0 else zeros[:, groups]
    return ((values - shift) * scales.float()[:, groups]).contiguous()
