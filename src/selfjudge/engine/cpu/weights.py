"""Weights as the kernel reads them: float32 in place, int8 made from it, or the blocks of a GGUF file, repacked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from selfjudge.engine.cpu.library import Layer, Matrix, Model, library
from selfjudge.models.device import give_back
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import MATRICES, NORMS, GgufFile, gguf_file, head_width, int8_blocks, row_order
from selfjudge.models.loaded import LoadedModel

F32, F16, Q8_0 = 0, 1, 8
LINE = 64  # bytes of a cache line
_OuterWeights = tuple[tuple[int, int, bool], int, Matrix]
"""Address and type of the embedding and whether it is packed, address of the final norm, and the output matrix."""


class PackedWeights:
    """The model as the kernel reads it, and the arrays that its addresses point to."""

    def __init__(self, model: PreTrainedModel, int8: bool) -> None:
        config, file = model.config.get_text_config(), gguf_file(model)
        self._set_up(int8, config.num_hidden_layers)
        embedding, norm, head = self._from_modules(model) if file is None else self._from_file(file, config)
        self.model = Model(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            head_width(config), config.intermediate_size, config.rms_norm_eps, *embedding, self.layers, norm, head,
        )  # fmt: skip
        give_back()  # the memory that packing needed

    def _set_up(self, int8: bool, layers: int) -> None:
        self.kept: list[Any] = []
        self.bytes_per_pass = 0
        self.int8 = int8
        self.kernel = library("native")
        self.layers = (Layer * layers)()

    # -------------------------------------------------------------------------------------- from a model's own tensors

    def _from_modules(self, model: PreTrainedModel) -> _OuterWeights:
        body, head = model.base_model, model.get_output_embeddings()
        if self.int8:
            linear = [module for module in body.layers.modules() if isinstance(module, nn.Linear)]
            self._make_room((Q8_0, *module.weight.shape) for module in [*linear, head])
        for layer, source in zip(self.layers, body.layers, strict=True):
            self._fill_layer(layer, source)
        embedding = self._pointer(body.embed_tokens.weight), F32, False
        return embedding, self._pointer(body.norm.weight), self._matrix(head.weight)

    def _fill_layer(self, layer: Layer, source: nn.Module) -> None:
        """The weights of a layer of transformers, or of a head, whose parts have the same names."""
        module: Any
        for part in MATRICES:
            module = source.get_submodule(part.module)
            setattr(layer, part.field, self._matrix(module.weight, module.bias))
        for part in NORMS:
            module = source.get_submodule(part.module)
            setattr(layer, part.field, self._pointer(module.weight))

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        rows, cols = weight.shape
        bias_address = None if bias is None else self._pointer(bias)
        if not self.int8:
            self.bytes_per_pass += weight.numel() * 4
            return Matrix(self._pointer(weight), bias_address, rows, cols, F32)
        return self._pack(int8_blocks(weight), rows, cols, Q8_0, bias_address)

    # ---------------------------------------------------------------------------------------------- from a GGUF file

    def _from_file(self, file: GgufFile, config: PretrainedConfig) -> _OuterWeights:
        head_name = output_name(file)
        self._make_room(
            (tensor.kind, tensor.rows, tensor.cols)
            for name, tensor in file.tensors.items()
            if tensor.kind not in (F32, F16) and name.startswith(("blk.", head_name))
        )
        for i, layer in enumerate(self.layers):
            for part in MATRICES:
                order = row_order(config, f"blk.{i}.{part.gguf}.weight")
                setattr(layer, part.field, self._file_matrix(file, f"blk.{i}.{part.gguf}", order))
            for part in NORMS:
                setattr(layer, part.field, self._file_floats(file, f"blk.{i}.{part.gguf}.weight"))
        head = self._file_matrix(file, head_name)
        return self._file_embedding(file, head), self._file_floats(file, "output_norm.weight"), head

    def _file_embedding(self, file: GgufFile, head: Matrix) -> tuple[int, int, bool]:
        """Address and type of the embedding: the rows of the output matrix where the two are one, else a copy."""
        tensor = file.tensors["token_embd.weight"]
        if output_name(file) == "token_embd":
            return head.weight, head.type, head.type != F32
        self.kept.append(raw := file.raw(tensor))
        return int(raw.ctypes.data), tensor.kind, False

    def _file_floats(self, file: GgufFile, name: str, order: NDArray[np.int32] | None = None) -> int:
        values = file.floats(file.tensors[name])
        values = np.ascontiguousarray(values[0] if order is None else values[0, order])
        self.kept.append(values)
        return int(values.ctypes.data)

    def _file_matrix(self, file: GgufFile, name: str, order: NDArray[np.int32] | None = None) -> Matrix:
        tensor = file.tensors[f"{name}.weight"]
        bias = self._file_floats(file, f"{name}.bias", order) if f"{name}.bias" in file.tensors else None
        if tensor.kind in (F32, F16):
            values = file.floats(tensor)
            values = values if order is None else values[order]
            self.kept.append(values)
            self.bytes_per_pass += values.nbytes
            return Matrix(values.ctypes.data, bias, len(values), tensor.cols, F32)
        rows = tensor.rows if order is None else len(order)
        return self._pack(file.raw(tensor), rows, tensor.cols, tensor.kind, bias, order)

    def _pack(
        self,
        raw: NDArray[np.uint8],
        rows: int,
        cols: int,
        kind: int,
        bias: int | None,
        order: NDArray[np.int32] | None = None,
    ) -> Matrix:
        """Pack the blocks of a matrix into the next free bytes; `order` names the rows to take."""
        address, size = self._free, self.kernel.packed_bytes(kind, rows, cols)
        wanted = None if order is None else order.ctypes.data
        self.kernel.pack(kind, rows, cols, raw.ctypes.data, wanted, address, torch.get_num_threads())
        self._free += size
        self.bytes_per_pass += size
        return Matrix(address, bias, rows, cols, kind)

    def _make_room(self, matrices: Iterable[tuple[int, int, int]]) -> None:
        """Allocate all packed matrices (kind, rows, cols) in one piece, so that large pages fit it."""
        size = sum(self.kernel.packed_bytes(*matrix) for matrix in matrices)
        room = torch.empty(size + LINE, dtype=torch.uint8)
        self.kept.append(room)
        self.kernel.use_large_pages(room.data_ptr(), size)
        self._free = -(-room.data_ptr() // LINE) * LINE


class PackedHead(PackedWeights):
    """A head as the kernel reads it. The rows of embedding and output are the target's, in its own format."""

    def __init__(self, head: EagleHead, target: LoadedModel, int8: bool) -> None:
        config, layer = head.config, head.layer
        file: Any = target.file  # there is one wherever the head lacks embedding or output
        self._set_up(int8, layers=1)
        kind = Q8_0 if int8 else F32
        matrices: list[Any] = [layer.get_submodule(part.module) for part in MATRICES]
        shapes = [(kind, *module.weight.shape) for module in (*matrices, head.fc)]
        if head.output is None:
            kind = file.tensors[f"{output_name(file)}.weight"].kind
        shapes.append((kind, len(head.draft_ids), config.hidden_size))
        self._make_room(shape for shape in shapes if shape[0] not in (F32, F16))
        self._fill_layer(self.layers[0], layer)
        if head.embedding is None:
            self.kept.append(weights := packed_weights(target, int8=False))
            embedding = weights.model.embedding, weights.model.embedding_type, weights.model.embedding_packed
        else:
            embedding = self._pointer(head.embedding), F32, False
        if head.output is None:
            order = head.draft_ids.numpy().astype(np.int32)
            self.kept.append(order)
            rows = self._file_matrix(file, output_name(file), order)
        else:
            rows = self._matrix(head.output)
        self.model = Model(
            1, config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size, config.eps,
            *embedding, self.layers, self._pointer(head.norm.weight), rows, self._pointer(layer.hidden_norm.weight),
            self._matrix(head.fc.weight), config.norm_before_residual,
        )  # fmt: skip


def output_name(file: GgufFile) -> str:
    """The name of a file's output matrix: the embedding's, where it has no other."""
    return "output" if "output.weight" in file.tensors else "token_embd"


def packed_weights(model: LoadedModel, int8: bool) -> PackedWeights:
    """The weights of a model, packed once and kept with it. Those of a GGUF file keep its format."""
    int8 = int8 and model.file is None
    return model.keep(("packed", int8), lambda: PackedWeights(model.causal_lm, int8))
