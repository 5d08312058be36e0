"""The names of a decoder's tensors: in a GGUF file, in a checkpoint of transformers, and in the CPU kernel's layer."""

from __future__ import annotations

from typing import NamedTuple


class LayerPart(NamedTuple):
    """A matrix or a norm of a decoder layer."""

    field: str
    """Its name in the layer of the CPU kernel."""
    gguf: str
    """Its name in a GGUF file, after `blk.N.`."""
    module: str
    """Its name in a checkpoint, after `model.layers.N.`."""


MATRICES = (
    LayerPart("query", "attn_q", "self_attn.q_proj"),
    LayerPart("key", "attn_k", "self_attn.k_proj"),
    LayerPart("value", "attn_v", "self_attn.v_proj"),
    LayerPart("out", "attn_output", "self_attn.o_proj"),
    LayerPart("gate", "ffn_gate", "mlp.gate_proj"),
    LayerPart("up", "ffn_up", "mlp.up_proj"),
    LayerPart("down", "ffn_down", "mlp.down_proj"),
)
NORMS = (
    LayerPart("attention_norm", "attn_norm", "input_layernorm"),
    LayerPart("mlp_norm", "ffn_norm", "post_attention_layernorm"),
)
_LAYER = {part.gguf: part.module for part in (*MATRICES, *NORMS)}
_MODEL = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}


def checkpoint_name(name: str) -> str:
    """The name in a checkpoint of a tensor of a GGUF file: `blk.3.attn_q.weight` is layer 3's `q_proj.weight`."""
    *layer, part, kind = name.split(".")
    return f"model.layers.{layer[1]}.{_LAYER[part]}.{kind}" if layer else f"{_MODEL[part]}.{kind}"
