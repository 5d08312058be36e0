"""Facts from tokenizers and model configs: end tokens, special tokens, a hash, the context window."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "It's 3.14% of\tthe naïve façade — 東京 🙂\n  def f(x): return x**2"
"""A text that tokenizers with one vocabulary split differently."""


def end_ids(*sources: Any) -> frozenset[int]:
    """Every id that ends an answer: `eos_token_id` of generation config, model config and tokenizer."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(ids)


def special_ids(tokenizer: Any, ends: Iterable[int]) -> tuple[int, ...]:
    """End-of-sequence and other special tokens of a tokenizer of transformers: the guard leaves them to the target."""
    added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return tuple(sorted({*ends, *added, *tokenizer.all_special_ids}))


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary, of how it splits a text, and of its chat template."""
    facts = [sorted(tokenizer.get_vocab().items()), list(tokenizer(PROBE)["input_ids"]), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def context_window(model: PreTrainedModel) -> int:
    """The most positions the model was made for."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if value := getattr(config, name, None):
            return int(value)
    return 1 << 30
