"""What tokenizers and configurations say: which tokens end a text or are special, how long a context may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def end_ids(*sources: Any) -> frozenset[int]:
    """Every id that ends an answer: `eos_token_id` of generation config, model config and tokenizer."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(found)


def special_ids(tokenizer: Any, ends: Iterable[int]) -> tuple[int, ...]:
    """End-of-sequence and other special tokens of a tokenizer of transformers: those the guard is for."""
    added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return tuple(sorted({*ends, *added, *tokenizer.all_special_ids}))


def context_window(model: PreTrainedModel) -> int:
    """The most positions the model was made for."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if value := getattr(config, name, None):
            return int(value)
    return 1 << 30
