"""GGUF file → transformers checkpoint, and compact draft → transformers checkpoint."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json

STORED_DTYPE = torch.float16  # 4-bit weights, dequantised, keep 11 bits


def load_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file as an ordinary, unquantised model."""
    try:
        import gguf  # noqa: F401  (transformers reads the file through it)
    except ImportError:
        raise SelfJudgeError("reading GGUF files needs the package gguf: pip install gguf accelerate") from None
    with quiet():
        try:
            loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:  # the reader raises whatever a malformed file makes it stumble over
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SelfJudgeError(f"cannot read {file} as a GGUF model: {reason}") from None
        # transformers keeps the model marked as quantised, which save_pretrained refuses: rebuild it from its parts
        config = loaded.config
        config.__dict__.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
    return plain.eval(), tokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a transformers checkpoint with its tokenizer and chat template."""
    model, tokenizer = load_gguf(gguf, STORED_DTYPE)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def materialise(compact: Path, target: Path, folder: Path) -> None:
    """Write the checkpoint of a draft whose embeddings are the target's own matrices times learned projections."""
    with quiet():
        embeddings = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        tensors = {name: tensor.float() for name, tensor in load_file(compact / "draft.safetensors").items()}
        raw = read_json(compact / "config.json")
        config = AutoConfig.for_model(**raw)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            tensors["model.embed_tokens.weight"] = embeddings.get_input_embeddings().weight @ tensors.pop("proj_in")
            tensors["lm_head.weight"] = embeddings.get_output_embeddings().weight @ tensors.pop("proj_out")
        model.load_state_dict(tensors)
        model.to(STORED_DTYPE).save_pretrained(folder)
        AutoTokenizer.from_pretrained(target).save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own progress bars and advice: ours is the only voice on stderr."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws its bar unasked
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
