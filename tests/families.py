"""Tiny random models of every family that the fast engines run, each with the properties that set it apart."""

from __future__ import annotations

import torch
import transformers as hf

from conftest import _COMMON

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24}
_GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_WINDOW = {"sliding_window": 6}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama 3, `llama3` rope": ("LlamaConfig", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "Llama with biases, `linear` rope": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "Mistral, sliding window": ("MistralConfig", {**_WINDOW, "head_dim": 16}),
    "Qwen2 and 2.5": ("Qwen2Config", {}),
    "Qwen2, `yarn` rope, windows in some layers": (
        "Qwen2Config",
        {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1, "rope_parameters": _YARN},
    ),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "OLMo 2": ("Olmo2Config", {}),
    "Granite 3": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.25, "logits_scaling": 2.0},
    ),
    "Phi-3 and 4": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "Phi-3, sliding window": ("Phi3Config", {**_WINDOW, "hidden_size": 48}),
    "Gemma": ("GemmaConfig", {**_GEMMA, "hidden_act": "gelu_pytorch_tanh"}),
    "Gemma 2": (
        "Gemma2Config",
        {**_GEMMA, **_WINDOW, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "Gemma 3 (text)": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            **_WINDOW,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}  # fmt: skip


def family_model(name: str, seed: int = 0, **options: object) -> hf.PreTrainedModel:
    """A model of three layers whose norms and biases are random too."""
    kind, own = FAMILIES[name]
    config = getattr(hf, kind)(**{**_COMMON, "num_hidden_layers": 3, **own, **options})
    torch.manual_seed(seed)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"  # torch's own has no caps
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
