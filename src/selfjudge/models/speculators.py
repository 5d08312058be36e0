"""An EAGLE-3 head in the format of speculators, which vLLM loads as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from selfjudge.models.eagle import EagleHead
from selfjudge.models.tokens import context_window
from selfjudge.store import whole, write_json

FORMAT = "0.3.0"  # of speculators, whose fields these are


def write_speculators(head: EagleHead, target: PreTrainedModel, folder: Path, *, steps: int) -> None:
    """Write `model.safetensors` (float16) and `config.json` for a head that is bound to its target.

    `steps` is how many tokens vLLM drafts unless told otherwise. The rows of the output matrix are copied, because vLLM
    wants them; the embedding is taken from the target.
    """
    config = head.config
    assert head.output is not None
    ids = head.draft_ids.cpu()
    tensors = {name: p.detach().half().cpu().contiguous() for name, p in head.named_parameters()}
    tensors["lm_head.weight"] = head.output.half().cpu().contiguous()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    with whole(folder / "model.safetensors") as partial:
        save_file(tensors, partial, {"format": "pt"})
    write_json(folder / "config.json", _config(head, target, steps))


def _config(head: EagleHead, target: PreTrainedModel, steps: int) -> dict[str, Any]:
    c = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
        "tie_word_embeddings": False,
        "dtype": "float16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"name_or_path": head.target, "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": c.eps,
            "rope_parameters": dict(c.rope_parameters),
            "rope_theta": c.rope_parameters["rope_theta"],
            "max_position_embeddings": context_window(target),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    }
