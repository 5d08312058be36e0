"""Shapes of well-known models, filled with random weights: only the time of a pass means something."""

from __future__ import annotations

from typing import Any

from selfjudge.errors import SelfJudgeError

_QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen-draft-8x320": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8,
        "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def check_shape(name: str) -> None:
    """Refuse a name that is not one of the shapes."""
    if name not in SHAPES:
        raise SelfJudgeError(f"unknown shape {name!r}; shapes are: {', '.join(SHAPES)}")
