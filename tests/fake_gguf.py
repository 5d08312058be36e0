"""Small GGUF files: random blocks of every type, and tiny models of transformers written as a file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfjudge.engine.cpu.library import Matrix, library
from selfjudge.models.convert import finish_gguf, start_gguf
from selfjudge.models.gguf import BLOCKS, RECODED
from selfjudge.models.shape import describe

KINDS = sorted(kind for kind in BLOCKS if kind > 1 and kind not in RECODED)


def random_blocks(kind: int, rows: int, cols: int, seed: int = 0) -> NDArray[np.uint8]:
    """[rows, bytes] any bits that a file may hold, with scales of ordinary size."""
    _, weights, size = BLOCKS[kind]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * cols // weights, size), np.uint8)
    for at in {2: (0,), 6: (0,), 8: (0,), 10: (80, 82), 11: (108,), 14: (208,), 20: (0,), 23: (0,)}.get(
        kind, (0, 2)
    ):  # where halves lie
        halves = random.uniform(-0.1, 0.1, len(data)).astype(np.float16)
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def dequantised(data: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    """The reader of the gguf package, which shares no line with ours."""
    return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind)), np.float32)


LARGE = 2.0
"""A group of activations is rounded a second time where its scale exceeds so many times the mean of its token's."""


def int8_groups(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Activations as the kernel rounds them: int8 in groups of 32, and of large groups what is left, once more."""
    groups = x.reshape(len(x), -1, 32)
    rounded, scale = _int8(groups)
    rest, _ = _int8((groups - rounded).astype(np.float32))
    large = scale > LARGE * scale.mean(1, keepdims=True)
    return (rounded + np.where(large, rest, 0)).reshape(x.shape)


def _int8(groups: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    most = np.abs(groups).max(-1, keepdims=True)
    inverse = np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), 0).astype(np.float32)
    scale = most / np.float32(127)
    return np.rint(groups * inverse).astype(np.float64) * scale, scale


Product = Callable[[NDArray[np.uint8], int, NDArray[np.float32]], NDArray[np.float32]]
"""Blocks [rows, bytes], their type and activations [tokens, cols] → [tokens, rows]."""


def product(data: NDArray[np.uint8], kind: int, x: NDArray[np.float32], processor: str) -> NDArray[np.float32]:
    """[tokens, rows] by the kernel, compiled for a processor whose programs run here."""
    kernel, rows, (tokens, cols) = library(processor), len(data), x.shape
    room = torch.empty(kernel.packed_bytes(kind, rows, cols) + 64, dtype=torch.uint8)
    at = -(-room.data_ptr() // 64) * 64
    kernel.pack(kind, rows, cols, data.ctypes.data, None, at, 1)
    matrix = Matrix(at, None, rows, cols, kind)
    y, quantised = np.empty((tokens, rows), np.float32), np.empty(tokens * kernel.quantised_bytes(cols), np.uint8)
    kernel.apply(ctypes.byref(matrix), x.ctypes.data, tokens, quantised.ctypes.data, y.ctypes.data)
    return y


def check_kind(kind: int, kernel: str | Product = "native") -> None:
    """The kernel against floats in double precision, with an odd number of rows; the same bits for 1 … 9 tokens."""
    multiply = partial(product, processor=kernel) if isinstance(kernel, str) else kernel
    rows, cols = 37, 512
    data = random_blocks(kind, rows, cols, seed=kind)
    x = np.random.default_rng(1).normal(size=(9, cols)).astype(np.float32)
    x[3, 32:64], x[4] = 0, x[4] * 1e-3
    x[1, 40], x[5, 40], x[5, 500], x[6, 100] = 30, -50, 20, 300  # large groups, shared and not
    expected = int8_groups(x) @ dequantised(data, kind).astype(np.float64).T
    all_at_once = multiply(data, kind, x)
    assert np.abs(all_at_once - expected).max() < 2e-6 * np.abs(expected).max() * cols**0.5
    for tokens in range(1, 9):
        for first in (0, 9 - tokens):
            some = multiply(data, kind, np.ascontiguousarray(x[first : first + tokens]))
            assert np.array_equal(some, all_at_once[first : first + tokens]), (tokens, first)


def write_model(
    model: PreTrainedModel,
    path: Path,
    kinds: dict[str, str],
    blocks: dict[str, tuple[NDArray[np.uint8], int]] | None = None,
    **metadata: Any,
) -> None:
    """A Llama or Qwen2 as a file; `kinds` are block types by a part of a tensor's name, F32 for others.

    `blocks` are tensors that are written as they are, with their type.
    """
    config = model.config
    writer = start_gguf(path, config) if config.model_type in ("llama", "qwen2") else _start(path, config)
    alphabet = sorted(bytes_to_unicode().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "ab", "<|endoftext|>"])
    writer.add_token_merges(["a b"])
    if config.vocab_size > len(alphabet) + 1:
        writer.add_eos_token_id(len(alphabet) + 1)
    for key, value in metadata.items():
        writer.add_key_value(key, *((value, gguf.GGUFValueType.STRING) if isinstance(value, str) else value))
    for key, tensor in file_tensors(model).items():
        kind = next((kind for part, kind in kinds.items() if part in key), "F32")
        block = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(tensor, block)
        if blocks and key in blocks:
            data, block = blocks[key][0], gguf.GGMLQuantizationType(blocks[key][1])
        writer.add_tensor(key, data, raw_dtype=block)
    finish_gguf(writer)


def _start(path: Path, config: Any) -> gguf.GGUFWriter:
    """The metadata that llama.cpp's converter writes for a family."""
    name, rope = config.model_type.removesuffix("_text"), config.rope_parameters
    rope = rope.get("full_attention", rope)
    flat = SimpleNamespace(**config.to_dict() | {"model_type": name, "rope_parameters": rope})
    writer = start_gguf(path, flat)  # type: ignore[arg-type]
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if name == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "phi3":
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * width))
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    return writer


def file_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """The tensors of a model by their names in a file; Llama's rotary pairs side by side, as files have them."""
    shape = describe(model.config)
    names = {part.module: part.gguf for part in (*shape.matrices, *shape.norms)}
    names |= {"embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm"}
    tensors = {}
    for key, parameter in model.named_parameters():
        if key == "model.rope_freqs":
            tensors["rope_freqs.weight"] = parameter.detach().numpy()
            continue
        parts = key.removeprefix("model.").split(".")
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        own = ".".join(parts[2 if layer else 0 : -1])
        value = parameter.detach().numpy()
        if model.config.model_type.startswith("gemma") and own.endswith("norm"):
            value = value + 1
        if model.config.model_type in ("llama", "granite", "smollm3") and names[own] in ("attn_q", "attn_k"):
            width = model.model.layers[0].self_attn.head_dim
            value = value.reshape(-1, 2, width // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        tensors[f"{layer}{names[own]}.{parts[-1]}"] = np.ascontiguousarray(value)
    return tensors
