"""Weights as they are loaded: all of the model's, none of another's, every one finite; and how int8 rounds them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from selfjudge.errors import SelfJudgeError, first_line

GROUP = 32  # weights per scale of int8, as in engine/cpu/blocks.h
DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that old checkpoints carry although the model computes them."""


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
    """int8 values [N, K] and float16 scales [N, K/32]: the largest of a group becomes ±127.

    The last group may be short. What `dequantise` gives is quantised to the same values again."""
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

    Packed as in drafts that ship, a matrix is int8, or six bits in uint8, and has scales beside it (`NAME.scale`)."""
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
