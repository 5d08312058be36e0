"""GGUF file → transformers checkpoint, and compact draft → transformers checkpoint."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.weights import check_finite, check_weights
from selfjudge.store import quiet_hub, read_json, write_json, write_tensors

STORED_DTYPE = torch.float16  # 4-bit weights, dequantised, keep 11 bits


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file carries."""
    with quiet():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
        except Exception as error:  # the reader raises many kinds for a malformed file
            raise SelfJudgeError(f"cannot read {file} as a GGUF model: {first_line(error)}") from None
    return tokenizer


def load_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file as an ordinary, unquantised model."""
    with quiet():
        try:
            loaded, loading = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
        except Exception as error:  # the reader raises many kinds for a malformed file
            raise SelfJudgeError(f"cannot read {file} as a GGUF model: {first_line(error)}") from None
        check_weights(loaded, loading, file)
        tokenizer = gguf_tokenizer(file)
        # transformers keeps the model marked as quantised, which save_pretrained refuses: rebuild it from its parts
        config = loaded.config
        config.__dict__.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
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


def write_compact(tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, *, int8: bool = True) -> int:
    """Write a draft's layers and projections: matrices as int8 rows with a float32 scale each, or all in float16.

    Returns the bytes of the tensors' file.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if int8 and tensor.dim() == 2:
            rows = tensor.detach().float().cpu()
            scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
            packed[name] = (rows / scale).round().clamp(-127, 127).to(torch.int8)
            packed[f"{name}.scale"] = scale.squeeze(1).contiguous()
        else:
            packed[name] = tensor.detach().half().cpu().contiguous()
    write_tensors(folder / "draft.safetensors", {name: tensor.numpy() for name, tensor in packed.items()})
    write_json(folder / "config.json", dict(config))
    return (folder / "draft.safetensors").stat().st_size


def read_compact(folder: Path) -> dict[str, Tensor]:
    """The tensors of a compact draft, in float32."""
    try:
        packed = load_file(folder / "draft.safetensors")
        tensors = {
            name: tensor.float() * packed[f"{name}.scale"].float()[:, None]
            if tensor.dtype == torch.int8
            else tensor.float()
            for name, tensor in packed.items()
            if not name.endswith(".scale")
        }
    except (OSError, SafetensorError, KeyError, IndexError, RuntimeError) as error:
        raise SelfJudgeError(f"cannot read the draft in {folder}: {first_line(error)}") from None
    check_finite(tensors.items(), folder / "draft.safetensors")
    return tensors


def materialise(compact: Path, target: Path | PreTrainedModel, folder: Path) -> None:
    """Write the checkpoint of a draft whose embeddings are the target's own matrices times learned projections.

    `target` is the checkpoint of the target, whose tokenizer is then saved as well, or the loaded model.
    """
    with quiet():
        loaded = isinstance(target, PreTrainedModel)
        model = target
        if not loaded:
            model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, trust_remote_code=False)
        try:
            draft = draft_model(read_compact(compact), read_json(compact / "config.json"), model)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:  # other names or shapes than the config's
            raise SelfJudgeError(f"the draft in {compact} is damaged: {first_line(error)}") from None
        draft.to(STORED_DTYPE).save_pretrained(folder)
        if not loaded:
            AutoTokenizer.from_pretrained(target, trust_remote_code=False).save_pretrained(folder)


def draft_model(tensors: Mapping[str, Tensor], raw: Mapping[str, Any], target: PreTrainedModel) -> PreTrainedModel:
    """An ordinary float32 model on the CPU from a draft's layers and projections, or from its own embeddings."""
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    state = {name: tensor.float().cpu() for name, tensor in tensors.items()}
    for projection, name, module in (
        ("proj_in", "model.embed_tokens.weight", target.get_input_embeddings()),
        ("proj_out", "lm_head.weight", target.get_output_embeddings()),
    ):
        if projection in state:
            state[name] = module.weight.detach().float().cpu() @ state.pop(projection)
    model.load_state_dict(state)
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice, and the hub's retries: stderr is for our own lines."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with quiet_hub(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader always draws a bar
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
