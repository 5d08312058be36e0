"""Weights as the CUDA kernels read them: matrices fused, heads in the order and the width of the kernels."""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfjudge.engine.cuda.kernels_torch import HeadNorms, Scoring
from selfjudge.models.eagle import EagleHead
from selfjudge.models.shape import Shape, describe_model, kernel_width


class LayerWeights(NamedTuple):
    """A decoder layer: queries, keys and values fused into one matrix, gate and up into another."""

    attention_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Tensor
    down: Tensor
    scoring: Scoring
    table: int  # which of the rotary tables is its own
    head_norms: HeadNorms | None = None
    attention_after: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    mlp_after: Tensor | None = None


class _Layer:
    """Reads the weights of a layer of transformers, or of a head, by the names of its description."""

    def __init__(self, module: nn.Module, shape: Shape, width: int) -> None:
        self.module, self.shape = module, shape
        self.parts = {part.field: part for part in (*shape.matrices, *shape.norms)}
        padding = torch.cat([torch.arange(shape.head_dim), torch.full((width - shape.head_dim,), -1)])
        self.padded = padding if width > shape.head_dim else None
        rotated = shape.rotated_columns(width)
        self.columns = {"query": rotated, "key": rotated, "value": self.padded}

    def fuse(self, index: int) -> LayerWeights:
        """The weights of layer `index`, as the kernels read them."""
        shape, qkv, gate_up = self.shape, ("query", "key", "value"), ("gate", "up")
        norms = None
        if shape.family.qk_norm:
            query, key = (self._arrange(self._norm(f"{name}_norm"), name) for name in ("query", "key"))
            if shape.family.qk_norm == "whole":
                query, key = query.view(shape.heads, -1), key.view(shape.kv_heads, -1)
            norms = HeadNorms(query, key, shape.epsilon, shape.head_dim)
        out = self._joined("weight", "out")
        assert out is not None
        if self.padded is not None:
            out = _pick_columns(out.t(), shape.head_dim, self.padded).t().contiguous()
        return LayerWeights(
            attention_norm=self._norm("attention_norm"),
            qkv=cast(Tensor, self._joined("weight", *qkv)),
            qkv_bias=self._joined("bias", *qkv),
            out=out,
            out_bias=self._joined("bias", "out"),
            mlp_norm=self._norm("mlp_norm"),
            gate_up=cast(Tensor, self._joined("weight", *gate_up)),
            down=cast(Tensor, self._joined("weight", "down")),
            scoring=Scoring(shape.attention_scale, shape.windows[index], shape.attention_cap),
            table=shape.rotary_kinds.index(shape.rotary[index]),
            head_norms=norms,
            attention_after=self._norm("attention_after"),
            gate_up_bias=self._joined("bias", *gate_up),
            down_bias=self._joined("bias", "down"),
            mlp_after=self._norm("mlp_after"),
        )

    def _norm(self, field: str) -> Any:
        """The weight of a norm; None where there is none."""
        if field not in self.parts:
            return None
        return norm_weight(self.module.get_submodule(self.parts[field].module), self.shape)

    def _joined(self, kind: str, *fields: str) -> Tensor | None:
        """Weights or biases below each other: as they are where a checkpoint has them so."""
        parts = [self.parts[field] for field in fields]
        found = {p.module: getattr(self.module.get_submodule(p.module), kind) for p in parts}
        if any(tensor is None for tensor in found.values()):
            return None
        tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in found.items()}
        if all(self.columns.get(field) is None for field in fields):
            if len(tensors) == 1:
                return tensors[parts[0].module]
            if len(tensors) == len(parts):
                return _join_in_place(list(found.values()))
        rows = (tensors[p.module][p.first : p.first + p.rows] for p in parts)
        return torch.cat([self._arrange(r, field) for r, field in zip(rows, fields, strict=True)])

    def _arrange(self, rows: Tensor, field: str) -> Tensor:
        """The rows of the heads in the order of the kernels."""
        columns = self.columns.get(field)
        return rows if columns is None else _pick_columns(rows, self.shape.head_dim, columns)


def _join_in_place(parameters: list[nn.Parameter]) -> Tensor:
    """Parameters below each other in one piece of memory, where they lie themselves from now on: no second copy."""
    tensors = [p.detach() for p in parameters]
    first, ends = tensors[0], [t.data_ptr() + t.nbytes for t in tensors]
    in_one_piece = all(t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for t in tensors)
    if in_one_piece and [t.data_ptr() for t in tensors[1:]] == ends[:-1] and all(t.is_contiguous() for t in tensors):
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    joined = torch.cat(tensors)
    for parameter, part in zip(parameters, joined.split([len(t) for t in tensors]), strict=True):
        parameter.data = part
    return joined


def norm_weight(norm: nn.Module, shape: Shape) -> Tensor:
    """The weight of a norm as the kernels multiply with it."""
    weight = cast(Tensor, norm.weight).detach()
    return weight.float() + shape.family.norm_offset if shape.family.wide_norms else weight


def _pick_columns(rows: Tensor, dim: int, columns: Tensor) -> Tensor:
    """Of heads of `dim` rows each, these rows; −1 is a row of zeros."""
    columns = columns.to(rows.device)
    picked = rows.reshape(-1, dim, *rows.shape[1:])[:, columns.clamp_min(0)]
    picked[:, columns < 0] = 0
    return picked.flatten(0, 1)


class _Weights:
    """The weights of a model, or of a head, as the kernels read them."""

    def __init__(self, shape: Shape, layers: Iterable[nn.Module], norm: nn.Module, rotary: nn.Module) -> None:
        self.shape, self.rotary = shape, rotary
        self.norm = norm_weight(norm, shape)
        self.dim = kernel_width(shape.head_dim, self.norm.device)
        self.layers = []
        for i, layer in enumerate(layers):
            self.layers.append(_Layer(layer, shape, self.dim).fuse(i))
            if self.norm.is_cuda:  # what was fused is free, in pieces that fit nothing else
                torch.cuda.empty_cache()
        self.kv_heads, self.epsilon = shape.kv_heads, shape.epsilon
        self.apart = shape.family.norms != "before" or shape.residual_scale != 1
        """Whether what a layer adds to the residual stream is changed first."""


class ModelWeights(_Weights):
    def __init__(self, model: PreTrainedModel) -> None:
        body = model.base_model
        super().__init__(describe_model(model), body.layers, body.norm, body.rotary_emb)
        self.embedding, self.head = body.embed_tokens.weight.detach(), model.get_output_embeddings().weight.detach()
        self.embedding_scale = self.shape.embedding_scale
        if self.shape.family.scaled_embedding:  # rounded, as in training
            self.embedding_scale = float(torch.tensor(self.embedding_scale, dtype=self.embedding.dtype))


class HeadWeights(_Weights):
    def __init__(self, head: EagleHead) -> None:
        assert head.embedding is not None
        assert head.output is not None
        super().__init__(head.config.shape, [head.layer], head.norm, head.rotary_emb)
        self.fuse, self.state_norm = head.fc.weight.detach(), head.layer.hidden_norm.weight.detach()
        self.head, self.embedding = head.output, head.embedding
        self.norm_before_residual = head.config.norm_before_residual
