"""A model in a GGUF file for the reference engine: its matrices become floats when a pass needs them.

This is for machines without a compiler, and for comparisons: the products are float32. Matrices that fit half of the
free memory stay in floats; the others are dequantised again in every pass, some rows at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from selfjudge.models.gguf import GgufFile, gguf_file, row_order
from selfjudge.models.loaded import LoadedModel
from selfjudge.models.memory import available_memory
from selfjudge.models.names import MATRICES, NORMS

PIECE = 1 << 24  # weights that are dequantised at a time
SMALL = 1 << 31  # bytes that are free where the system does not say


class FileLinear(nn.Module):
    """A linear map whose matrix stays in a file; `weight` has its shape and no values."""

    def __init__(
        self, file: GgufFile, name: str, shape: nn.Parameter, order: NDArray[np.int32] | None, keep: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = shape, None
        self.file, self.tensor, self.order = file, file.tensors[f"{name}.weight"], order
        file.check_finite(self.tensor)
        if f"{name}.bias" in file.tensors:
            self.bias = floats(file, f"{name}.bias")
            if order is not None:
                self.bias = nn.Parameter(self.bias[torch.from_numpy(order).long()], requires_grad=False)
        self.kept = torch.cat(list(self._pieces())) if keep else None

    def _pieces(self) -> Iterator[torch.Tensor]:
        step = max(1, PIECE // self.tensor.cols)
        for start in range(0, self.tensor.rows, step):
            rows = slice(start, start + step)
            yield torch.from_numpy(self.file.floats(self.tensor, rows if self.order is None else self.order[rows]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is not None:
            return linear(x, self.kept, self.bias)
        y = torch.cat([linear(x, piece) for piece in self._pieces()], -1)
        self.file.forget(self.tensor)
        return y if self.bias is None else y + self.bias


class FileEmbedding(nn.Module):
    """An embedding whose rows are read from a file; `weight` has its shape and no values."""

    def __init__(self, file: GgufFile, name: str, shape: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.file, self.tensor = shape, file, file.tensors[name]
        file.check_finite(self.tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self.file.floats(self.tensor, ids.flatten().numpy()))
        return rows.view(*ids.shape, self.tensor.cols)


def floats(file: GgufFile, name: str) -> nn.Parameter:
    """A vector of a file."""
    file.check_finite(file.tensors[name])
    return nn.Parameter(torch.from_numpy(file.floats(file.tensors[name])[0]), requires_grad=False)


def dequantised(model: LoadedModel, room: int | None = None) -> PreTrainedModel:
    """The model of a file in modules that compute, made once; at most `room` bytes of floats are kept."""
    return model.keep("dequantised", lambda: _dequantise(model.causal_lm, room))


def _dequantise(model: PreTrainedModel, room: int | None) -> PreTrainedModel:
    file = gguf_file(model)
    assert file is not None
    room = (available_memory() or SMALL) // 2 if room is None else room
    whole: PreTrainedModel = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # these have no values
    del whole.gguf_file
    whole.base_model._forward_pre_hooks.clear()  # the one that refuses to compute without values
    body = whole.base_model

    def matrix(name: str, old: nn.Module) -> FileLinear:
        nonlocal room
        size = 4 * old.weight.numel()  # type: ignore[operator]
        keep = size <= room
        room -= size if keep else 0
        order = row_order(model.config, f"{name}.weight")
        return FileLinear(file, name, old.weight, order, keep)  # type: ignore[arg-type]

    for i, layer in enumerate(body.layers):
        for part in MATRICES:
            parent, _, own = part.module.partition(".")
            old = layer.get_submodule(part.module)
            setattr(getattr(layer, parent), own, matrix(f"blk.{i}.{part.gguf}", old))
        for part in NORMS:
            layer.get_submodule(part.module).weight = floats(file, f"blk.{i}.{part.gguf}.weight")
    body.norm.weight = floats(file, "output_norm.weight")
    head = "output" if "output.weight" in file.tensors else "token_embd"
    whole.set_output_embeddings(matrix(head, whole.get_output_embeddings()))
    whole.set_input_embeddings(FileEmbedding(file, "token_embd.weight", whole.get_input_embeddings().weight))
    return whole
