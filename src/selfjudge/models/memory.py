"""Memory that a model needs, from its config and file headers alone: for loading, admission, `doctor` and the docs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.catalogue import check_hub, check_reference, find_embedded, head_folder
from selfjudge.models.convert import quiet
from selfjudge.models.eagle import EagleHead, read_shape
from selfjudge.models.gguf import GgufFile, gguf_file, open_model
from selfjudge.models.shape import UnknownShapeError, describe, head_width, kernel_width
from selfjudge.store import home, hub_options

INT8 = 8
PACKED = {2: 2304, 3: 2560, 6: 3328, 7: 3584, INT8: 4352, 12: 2368, 13: 3392, 14: 3392}
"""Bytes of 4,096 weights as the CPU engine packs them, by the type of their blocks."""
LOGIT_BYTES = 16  # of a logit in 16 or 32 bits, its float32 copy, and the distribution that rules make of it
SPARE_SLOTS = 258  # tokens that a row of the CUDA cache may be longer than its text
OVERHEAD = {"cpu": 900_000_000, "cuda": 1_500_000_000}
"""Bytes of Python, torch, tokenizer and buffers on a CPU (measured); of CUDA's context, kernels and captured graphs."""
PASS_TOKENS = 8192  # tokens of a prompt whose intermediate values are on a CUDA device at a time


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model needs in one format on one kind of device."""

    weights: int
    token: int  # keys and values of one token of a row
    logits: int  # logits and their distribution, of one row
    workspace: int  # all else that does not grow with rows

    def row(self, length: int) -> int:
        """A row of at most so many tokens."""
        return self.token * (length + SPARE_SLOTS) + self.logits

    def rows_that_fit(self, length: int, budget: float) -> int:
        """Rows of that length in so many bytes."""
        return max(0, int(budget // self.row(length)))


def token_bytes(layers: int, kv_heads: int, width: int, itemsize: int) -> int:
    """Keys and values of one token of a row."""
    return 2 * layers * kv_heads * width * itemsize


def measure_need(model: PreTrainedModel, dtype: str, device: str) -> MemoryNeed:
    """What a model needs, with its weights or without: its `dtype` as tables print it, its device's type."""
    config = model.config.get_text_config()
    on_cuda, floats = device == "cuda", dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
    itemsize = getattr(torch, floats).itemsize
    width = kernel_width(head_width(config), torch.device(device)) if on_cuda else head_width(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = token_bytes(config.num_hidden_layers, kv_heads, width, itemsize)
    workspace = OVERHEAD["cuda" if on_cuda else "cpu"]
    if on_cuda:  # the widest values of a pass are those between the two feed-forward matrices
        wide = 4 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
        workspace += PASS_TOKENS * wide * itemsize
    return MemoryNeed(count_weights(model, dtype, device), token, LOGIT_BYTES * config.vocab_size, workspace)


def measure_draft(reference: str, target: PreTrainedModel, dtype: str, device: str) -> MemoryNeed:
    """What a draft of a target needs: a head or a model, in int8 where the target's weights are not floats."""
    folder, known = head_folder(reference), find_embedded(reference)
    size = PACKED[INT8] / 4096 if dtype in ("q4", "int8") else getattr(torch, dtype).itemsize
    if folder is None:
        shipped = None if known is None else known[0].draft
        model = outline_model(reference) if shipped is None else _outline(shipped, {})
        need = replace(measure_need(model, "int8" if dtype == "q4" else dtype, device), workspace=0)
        if dtype == "q4":  # its file has the embedding in float16 and all else in int8
            packed = sum(p.numel() for p in _matrices(model)) * PACKED[INT8] // 4096
            need = replace(need, weights=packed + 2 * model.get_input_embeddings().weight.numel())
        return need
    config, _ = read_shape(folder, target)
    with torch.device("meta"):
        head = EagleHead(config, torch.arange(config.draft_vocab_size))
    rows = config.draft_vocab_size * config.hidden_size  # of the output matrix
    weights = sum(p.numel() for p in head.parameters()) + rows
    layers = target.config.get_text_config().num_hidden_layers
    floats = 4 * rows if dtype == "int8" else 0  # beside their int8 copy
    return MemoryNeed(int(weights * size) + floats, measure_need(target, dtype, device).token // layers, 0, 0)


def count_weights(model: PreTrainedModel, dtype: str, device: str) -> int:
    """Bytes of the weights in memory."""
    file, head = gguf_file(model), model.get_output_embeddings().weight
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    count: int = sum(p.numel() for p in model.parameters())
    if tied and model.get_input_embeddings().weight is not head:
        count -= head.numel()
    if dtype == "q4":
        assert file is not None
        return _count_blocks(file)
    if dtype == "int8":  # beside their float32
        matrices = [p.numel() for p in _matrices(model)]
        return 4 * count + sum(matrices) * PACKED[INT8] // 4096
    itemsize: int = getattr(torch, dtype).itemsize
    return (count + (_count_arranged(model) if device == "cuda" else 0)) * itemsize


def _matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """The matrices of the layers and the output matrix."""
    head = model.get_output_embeddings().weight
    return [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name and p is not head] + [head]


def _count_arranged(model: PreTrainedModel) -> int:
    """Weights that the CUDA engine keeps a second time, in the order and the width of its kernels."""
    try:
        shape = describe(model.config)
    except UnknownShapeError:
        return 0  # the reference engine runs it
    width = kernel_width(shape.head_dim, torch.device("cuda"))
    if shape.rotated_columns(width) is None:
        return 0
    heads = 2 * shape.heads + 2 * shape.kv_heads if width > shape.head_dim else shape.heads + 2 * shape.kv_heads
    return shape.layers * shape.hidden * heads * width


def _count_blocks(file: GgufFile) -> int:
    """Bytes of the weights of a GGUF file as the CPU engine packs them."""
    total = sum(t.rows * t.cols * PACKED.get(t.block_kind, 4 * 4096) // 4096 for t in file.tensors.values())
    if "output.weight" in file.tensors:  # the embedding is looked up as it is
        embedding = file.tensors["token_embd.weight"]
        total += embedding.size - embedding.rows * embedding.cols * PACKED.get(embedding.block_kind, 4 * 4096) // 4096
    return total


def outline_model(reference: str) -> PreTrainedModel:
    """A model without its weights: an embedded one that was pulled, a GGUF file, a checkpoint folder or a hub id."""
    check_reference(reference, "model")
    path = Path(reference).expanduser()
    if (found := find_embedded(reference)) is not None:
        if found[1]:
            raise SelfJudgeError(f"{reference} is a draft: name its target")
        path = home() / "models" / f"{reference}.gguf"
        if not path.is_file():
            raise SelfJudgeError(f"{reference} is not here yet: selfjudge pull {reference}")
    if path.suffix == ".gguf":
        return open_model(path)
    check_hub(reference)
    return _outline(path, {}) if path.is_dir() else _outline(reference, hub_options())


def _outline(source: Path | str, options: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a checkpoint on the meta device."""
    try:
        with quiet():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a missing, gated or malformed config
        raise SelfJudgeError(f"{source} is not a readable checkpoint: {first_line(error)}") from None
    return model
