"""Weights as the kernel reads them: float32 in place, int8 made from it, or the blocks of a GGUF file, repacked."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from selfjudge.engine.cpu.library import Layer, Matrix, Model, library
from selfjudge.models.device import give_back
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import GgufFile, gguf_file, int8_blocks, tensor_order
from selfjudge.models.load import LoadedModel
from selfjudge.models.shape import LayerPart, Shape, describe_model

F32, F16, Q8_0 = 0, 1, 8
LINE = 64  # bytes of a cache line
PIECE = 1 << 26  # bytes that are allocated at a time for packed matrices, so that large pages fit them
_OuterWeights = tuple[tuple[int, int, bool], int, Matrix]
"""Address and type of the embedding and whether it is packed, address of the final norm, and the output matrix."""


class PackedWeights:
    """The model as the kernel reads it, and the arrays that its addresses point to."""

    def __init__(self, model: PreTrainedModel, int8: bool) -> None:
        file = gguf_file(model)
        self._set_up(int8, describe_model(model))
        if file is None:
            embedding, norm, head = self._from_modules(model)
        else:
            embedding, norm, head = self._from_file(file, model.config)
        self.model = Model(*self._sizes(), *embedding, ctypes.addressof(self.layers), norm, head)
        give_back()  # the memory that packing needed

    def _set_up(self, int8: bool, shape: Shape) -> None:
        self.kept: list[Any] = []
        self._free = self._end = 0  # addresses: the next free byte of the last piece, and its end
        self.bytes_per_pass = 0
        self.int8 = int8
        self.kernel = library("native")
        self.shape = shape
        self.layers = (Layer * shape.layers)()
        for layer, window, kind in zip(self.layers, shape.windows, shape.rotary, strict=True):
            layer.window, layer.table = window, shape.rotary_kinds.index(kind)
        columns = shape.rotated_columns(shape.head_dim)
        self._columns = None if columns is None else columns.numpy().astype(np.int32)

    def _sizes(self) -> tuple[Any, ...]:
        """The first fields of the kernel's model."""
        s = self.shape
        return (
            s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.epsilon, s.attention_scale,
            s.attention_cap, s.embedding_scale, s.residual_scale, s.logit_scale, s.logit_cap,
            s.activation == "gelu", s.family.qk_norm == "whole",
        )  # fmt: skip

    def _order(self, field: str, rows: int) -> NDArray[np.int32] | None:
        """The order of the rows of queries and keys, and of their norms; None where it is their own."""
        if self._columns is None or not field.startswith(("query", "key")):
            return None
        heads = np.arange(rows // self.shape.head_dim, dtype=np.int32)[:, None] * self.shape.head_dim
        return np.ascontiguousarray(heads + self._columns).reshape(-1)

    # -------------------------------------------------------------------------------------- from a model's own tensors

    def _from_modules(self, model: PreTrainedModel) -> _OuterWeights:
        body, head = model.base_model, model.get_output_embeddings()
        for layer, source in zip(self.layers, body.layers, strict=True):
            self._fill_layer(layer, source)
        embedding = self._pointer(body.embed_tokens.weight), F32, False
        return embedding, self._norm(body.norm), self._matrix(head.weight)

    def _fill_layer(self, layer: Layer, source: nn.Module) -> None:
        """The weights of a layer of transformers, or of a head, whose parts have the same names."""
        module: Any
        for part in self.shape.matrices:
            module = source.get_submodule(part.module)
            rows: Any = slice(part.first, part.first + part.rows)
            if (order := self._order(part.field, part.rows)) is not None:
                rows = torch.from_numpy(part.first + order)
            bias = None if module.bias is None else module.bias[rows]
            setattr(layer, part.field, self._matrix(module.weight[rows], bias))
        for part in self.shape.norms:
            norm, order = source.get_submodule(part.module), self._order(part.field, part.cols)
            setattr(layer, part.field, self._norm(norm, order))

    def _norm(self, module: Any, order: NDArray[np.int32] | None = None) -> int:
        weight = module.weight + self.shape.family.norm_offset if self.shape.family.norm_offset else module.weight
        return self._pointer(weight if order is None else weight[torch.from_numpy(order)])

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
        for i, layer in enumerate(self.layers):
            for part in self.shape.matrices:
                order = self._file_order(part, config)
                setattr(layer, part.field, self._file_matrix(file, f"blk.{i}.{part.gguf}", order))
            for part in self.shape.norms:  # a file has their offset in them
                order = self._order(part.field, part.cols)
                setattr(layer, part.field, self._file_floats(file, f"blk.{i}.{part.gguf}.weight", order))
        head = self._file_matrix(file, output_name(file))
        norm, tensor = self._file_floats(file, "output_norm.weight"), file.tensors["token_embd.weight"]
        if output_name(file) == "token_embd":  # the rows of the output matrix
            return (head.weight, head.type, head.type != F32), norm, head
        self.kept.append(raw := file.blocks(tensor))
        return (int(raw.ctypes.data), tensor.block_kind, False), norm, head

    def _file_order(self, part: LayerPart, config: PretrainedConfig) -> NDArray[np.int32] | None:
        """The rows of a tensor of a file that a matrix is made of; None: all, as they are."""
        order, rows = self._order(part.field, part.rows), tensor_order(config, f"{part.gguf}.weight", part.rows)
        if order is None and rows is None and not self.shape.family.fused:
            return None
        rows = np.arange(part.rows, dtype=np.int32) if rows is None else rows
        return np.ascontiguousarray((rows if order is None else rows[order]) + np.int32(part.first))

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
        return self._pack(file.blocks(tensor), rows, tensor.cols, tensor.block_kind, bias, order)

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
        size = self.kernel.packed_bytes(kind, rows, cols)
        if self._free + size > self._end:
            piece = torch.empty(max(size, PIECE) + LINE, dtype=torch.uint8)
            self.kept.append(piece)
            self.kernel.use_large_pages(piece.data_ptr(), len(piece))
            self._free, self._end = -(-piece.data_ptr() // LINE) * LINE, piece.data_ptr() + len(piece)
        address = self._free
        wanted = None if order is None else order.ctypes.data
        self.kernel.pack(kind, rows, cols, raw.ctypes.data, wanted, address, torch.get_num_threads())
        self._free += size
        self.bytes_per_pass += size
        return Matrix(address, bias, rows, cols, kind)


class PackedHead(PackedWeights):
    """A head as the kernel reads it. The rows of embedding and output are the target's, in its own format."""

    def __init__(self, head: EagleHead, target: LoadedModel, int8: bool) -> None:
        shape, layer = head.config.shape, head.layer
        file: Any = target.file  # there is one wherever the head lacks embedding or output
        self._set_up(int8, shape)
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
            *self._sizes(), *embedding, ctypes.addressof(self.layers), self._norm(head.norm), rows,
            self._pointer(layer.hidden_norm.weight), self._matrix(head.fc.weight), head.config.norm_before_residual,
        )  # fmt: skip


def output_name(file: GgufFile) -> str:
    """The name of a file's output matrix: the embedding's, where it has no other."""
    return "output" if "output.weight" in file.tensors else "token_embd"


def packed_weights(model: LoadedModel, int8: bool) -> PackedWeights:
    """The weights of a model, packed once and kept with it. Those of a GGUF file keep its format."""
    int8 = int8 and model.file is None
    return model.keep(("packed", int8), lambda: PackedWeights(model.causal_lm, int8))
