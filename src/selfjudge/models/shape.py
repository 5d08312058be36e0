"""What a decoder is made of: one description, read from a config of transformers, that all fast engines run.
GGUF files become such a config first (`gguf.py`); `families.json` has what a model type's config does not say. What
cannot be described is refused with the property that is in the way."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from selfjudge.store import read_json

ROTARY = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
NO_ROTARY = "none"
FULL, SLIDING = "full_attention", "sliding_attention"


class UnknownShapeError(ValueError):
    """A property of a model that cannot be described."""


class LayerPart(NamedTuple):
    """A matrix or a norm of a decoder layer; `rows` of a matrix that may hold others as well, from row `first` on."""

    field: str  # its name in the layers of both engines
    gguf: str  # its name in a GGUF file, after `blk.N.`
    module: str  # its name in a checkpoint, after `model.layers.N.`
    rows: int
    cols: int
    first: int = 0


@dataclass(frozen=True)
class Family:
    """What the models of a type do, as far as their config does not say it. The defaults are Llama's."""

    norms: str = "before"  # `before` attention and feed-forward layer, `after` them, or `both`
    norm_offset: float = 0.0  # added to the weights of all norms
    wide_norms: bool = False  # whether a norm is multiplied with its weights in float32
    qk_norm: str = ""  # norms of queries and keys: none, of each `head`, or of the `whole` row
    fused: bool = False  # whether queries, keys and values are one matrix of a checkpoint, and gate and up another
    scaled_embedding: bool = False  # whether embeddings are multiplied with the root of their width
    windows: str = ""  # which layers a sliding window has: none, `all`, or by the `layers` that the config lists
    reads: tuple[str, ...] = ()  # names in its config that other types ignore
    gguf: str = ""  # the general architecture of its GGUF files, where they are read
    interleaved: bool = False  # whether rotary pairs of queries and keys lie side by side in those files


FAMILIES = {
    name: Family(**entry | {"reads": tuple(entry.get("reads", ()))})
    for name, entry in read_json(Path(__file__).with_name("families.json")).items()
}  # by the model type of transformers


@dataclass(frozen=True)
class Shape:
    """What a decoder is made of, without its weights."""

    family: Family
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    attention_scale: float
    windows: tuple[int, ...] = (0,)  # positions that each layer sees, a token's own included; 0: all
    rotary: tuple[str, ...] = ("",)  # of each layer: the only embedding, that of its kind of layers, or `none`
    rotary_dim: int = 0  # columns of a head that are rotated
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0  # largest attention score, by tanh; 0: any. `logit_cap` likewise
    logit_cap: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.windows)

    @cached_property
    def rotary_kinds(self) -> list[str]:
        return sorted(set(self.rotary))

    @cached_property
    def matrices(self) -> tuple[LayerPart, ...]:
        """The matrices of a layer, in the order of the CPU kernel."""
        width, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = LayerPart("out", "attn_output", "self_attn.o_proj", width, queries)
        down = LayerPart("down", "ffn_down", "mlp.down_proj", width, inner)
        names = [(f"attn_{x}", f"self_attn.{x}_proj") for x in "qkv"]
        names += [(f"ffn_{x}", f"mlp.{x}_proj") for x in ("gate", "up")]
        firsts = (0, 0, 0, 0, 0)
        if self.family.fused:
            names = [("attn_qkv", "self_attn.qkv_proj")] * 3 + [("ffn_up", "mlp.gate_up_proj")] * 2
            firsts = (0, queries, queries + keys, 0, inner)
        fields, rows = ("query", "key", "value", "gate", "up"), (queries, keys, keys, inner, inner)
        reading = zip(fields, names, rows, firsts, strict=True)  # the residual stream
        *qkv, gate, up = (LayerPart(field, *name, count, width, first) for field, name, count, first in reading)
        return (*qkv, out, gate, up, down)

    @cached_property
    def norms(self) -> tuple[LayerPart, ...]:
        """The norms of a layer."""
        names, norms = [], self.family.norms
        if norms != "after":
            mlp = "post_attention_layernorm" if norms == "before" else "pre_feedforward_layernorm"
            names += [("attention_norm", "attn_norm", "input_layernorm"), ("mlp_norm", "ffn_norm", mlp)]
        if norms != "before":
            names.append(("attention_after", "post_attention_norm", "post_attention_layernorm"))
            names.append(("mlp_after", "post_ffw_norm", "post_feedforward_layernorm"))
        parts = [LayerPart(*name, 1, self.hidden) for name in names]
        if self.family.qk_norm:
            queries, keys = (self.heads, self.kv_heads) if self.family.qk_norm == "whole" else (1, 1)
            parts.append(LayerPart("query_norm", "attn_q_norm", "self_attn.q_norm", 1, queries * self.head_dim))
            parts.append(LayerPart("key_norm", "attn_k_norm", "self_attn.k_norm", 1, keys * self.head_dim))
        return tuple(parts)

    def rotated_columns(self, width: int) -> Tensor | None:
        """Order of the columns of a head of queries or keys, which engines pair by halves; None where it is their own.
        A head gets `width` columns; −1 marks a column of zeros. Columns that are not rotated fill both halves."""
        if width == self.head_dim == self.rotary_dim:
            return None
        half, rest = self.rotary_dim // 2, list(range(self.rotary_dim, self.head_dim))
        rest += [-1] * (width - self.head_dim)
        free = width // 2 - half
        first, second = list(range(half)) + rest[:free], list(range(half, self.rotary_dim)) + rest[free:]
        return torch.tensor(first + second)

    def rotary_tables(self, module: nn.Module, count: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [kinds, count, width] of the first positions: 1 and 0 where nothing is rotated."""
        positions = torch.arange(count, device=device)[None]
        empty = torch.empty(1, dtype=torch.float32, device=device)
        cosine = torch.ones(len(self.rotary_kinds), count, 2, width // 2, device=device)
        sine = torch.zeros_like(cosine)
        for i, kind in enumerate(self.rotary_kinds):
            if kind == NO_ROTARY:
                continue
            for table, values in zip((cosine, sine), module(empty, positions, *([kind] if kind else [])), strict=True):
                table[i, ..., : self.rotary_dim // 2] = values[0].float().view(count, 2, -1)
        return cosine.flatten(2), sine.flatten(2)


def head_width(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def kernel_width(dim: int, device: torch.device) -> int:
    """Columns of a head on a device: those of the next power of two on CUDA, of which the last are zeros."""
    return 1 << max(4, (dim - 1).bit_length()) if device.type == "cuda" else dim


def describe(config: PretrainedConfig) -> Shape:
    """The shape of the models of a config; UnknownShapeError names the property that cannot be described."""
    config = config.get_text_config()
    if (family := FAMILIES.get(config.model_type)) is None:
        raise UnknownShapeError(f"models of type {config.model_type!r} run on the reference engine")

    def read(name: str, default: Any) -> Any:
        value = getattr(config, name, None) if name in family.reads else None
        return default if value is None else value

    if read("use_bidirectional_attention", False):
        raise UnknownShapeError("its attention is bidirectional")
    activation = read("hidden_activation", getattr(config, "hidden_act", None))
    if activation not in ACTIVATIONS:
        raise UnknownShapeError(f"its activation is {activation!r}")
    for name in ("logits_scaling", "query_pre_attn_scalar"):  # divisors
        if not read(name, 1) > 0:
            raise UnknownShapeError(f"its {name} is {read(name, 1)}")
    kinds, windows = _describe_windows(config, family)
    dim, width = head_width(config), config.hidden_size
    rotary, rotary_dim = _describe_rotary(config, family, kinds)
    return Shape(
        family=family,
        hidden=width,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=dim,
        epsilon=config.rms_norm_eps,
        attention_scale=float(read("attention_multiplier", read("query_pre_attn_scalar", dim) ** -0.5)),
        windows=windows,
        rotary=rotary,
        rotary_dim=rotary_dim,
        activation=ACTIVATIONS[activation],
        embedding_scale=width**0.5 if family.scaled_embedding else float(read("embedding_multiplier", 1.0)),
        residual_scale=float(read("residual_multiplier", 1.0)),
        logit_scale=1 / read("logits_scaling", 1.0),
        attention_cap=float(read("attn_logit_softcapping", 0.0)),
        logit_cap=float(read("final_logit_softcapping", 0.0)),
    )


def _describe_windows(config: PretrainedConfig, family: Family) -> tuple[list[str], tuple[int, ...]]:
    """Kind and window of each layer. A window that the whole context fits into is none."""
    window, kinds = getattr(config, "sliding_window", None), [FULL] * config.num_hidden_layers
    if family.windows == "all" and window is not None:
        kinds = [SLIDING] * len(kinds)
    elif family.windows == "layers":
        kinds = list(getattr(config, "layer_types", None) or kinds)
    if others := sorted(set(kinds) - {FULL, SLIDING}):
        raise UnknownShapeError(f"it has layers of type {others[0]!r}")
    if len(kinds) != config.num_hidden_layers:
        raise UnknownShapeError(f"it lists the types of {len(kinds)} layers and has {config.num_hidden_layers}")
    if SLIDING in kinds and (not isinstance(window, int) or window < 1):
        raise UnknownShapeError(f"its sliding window is {window!r}")
    narrow = 0 if window is None or window >= config.max_position_embeddings else window
    return kinds, tuple(narrow if kind == SLIDING else 0 for kind in kinds)


def _describe_rotary(config: PretrainedConfig, family: Family, kinds: list[str]) -> tuple[tuple[str, ...], int]:
    """Rotary embedding of each layer and how many columns of a head it rotates."""
    rope, dim = config.rope_parameters or {}, head_width(config)
    by_layer = isinstance(rope.get(kinds[0]), dict)
    for kind in sorted(set(kinds)) if by_layer else [""]:
        name = (rope[kind] if by_layer else rope).get("rope_type", "default")
        if name not in ROTARY:
            raise UnknownShapeError(f"its rotary embedding is of type {name!r}")
    share = rope.get("partial_rotary_factor", 1.0) if "partial_rotary_factor" in family.reads else 1.0
    if (width := int(dim * share)) % 2 or dim % 2 or not 0 < width <= dim:
        raise UnknownShapeError(f"it rotates {width} of the {dim} columns of a head")
    rotated = config.no_rope_layers if "no_rope_layers" in family.reads else [1] * len(kinds)
    if len(rotated) < len(kinds):
        raise UnknownShapeError(f"it says for {len(rotated)} of its {len(kinds)} layers whether they are rotated")
    names = [kind if by_layer else "" for kind in kinds]
    return tuple(name if here else NO_ROTARY for name, here in zip(names, rotated, strict=False)), width


def describe_model(model: PreTrainedModel) -> Shape:
    """The shape of a model, whose layers must have the weights that it says and no others."""
    shape, layers = describe(model.config), getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(model.base_model, "rotary_emb"):
        raise UnknownShapeError(f"{type(model).__name__} keeps its decoder layers elsewhere than other models")
    needed = {f"{part.module}.weight" for part in (*shape.matrices, *shape.norms)}
    known = needed | {f"{part.module}.bias" for part in shape.matrices}
    for layer in layers:
        names = {name for name, _ in layer.named_parameters()}
        if wrong := sorted((needed - names) | (names - known)):
            raise UnknownShapeError(f"its layers have other weights than their type ({wrong[0]})")
    if len(layers) != shape.layers:
        raise UnknownShapeError(f"its config says {shape.layers} layers and it has {len(layers)}")
    return shape
