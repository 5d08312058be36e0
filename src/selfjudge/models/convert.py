"""GGUF file → model or checkpoint of transformers; compact draft → checkpoint or GGUF file."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.checkpoint import check_finite, read_packed
from selfjudge.models.device import check_memory
from selfjudge.models.gguf import (
    GgufFile,
    TensorInfo,
    checkpoint_name,
    expected_tensors,
    gguf_file,
    int8_blocks,
    open_model,
    tensor_order,
)
from selfjudge.models.shape import describe, head_width
from selfjudge.store import quiet_hub, read_json, scratch
from selfjudge.types import Tell, ignore

if TYPE_CHECKING:
    from gguf import GGUFWriter

STORED_DTYPE = torch.float16  # 4-bit weights, dequantised, keep 11 bits
PIECE_WEIGHTS = 1 << 20  # weights that a core dequantises at a time


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file carries, or the one beside it where transformers cannot read it."""
    with quiet():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
        except Exception as error:  # the reader raises many kinds for a malformed file
            unknown = "is not supported yet" in str(error)  # transformers reads no tokenizer of this architecture
            if not unknown or not (file.parent / "tokenizer.json").is_file():
                advice = "; put its tokenizer.json and tokenizer_config.json beside it" if unknown else ""
                raise SelfJudgeError(f"cannot read {file} as a GGUF model: {first_line(error)}{advice}") from None
            try:
                tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
            except Exception as beside:  # as above
                raise SelfJudgeError(f"cannot read the tokenizer beside {file}: {first_line(beside)}") from None
    return tokenizer


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer that a GGUF file carries, with its chat template."""
    with quiet():
        gguf_tokenizer(gguf).save_pretrained(folder)


def convert(gguf: Path, folder: Path, tell: Tell = ignore) -> None:
    """Write the model in a GGUF file as a transformers checkpoint, without its tokenizer."""
    with quiet():
        dequantise(open_model(gguf), STORED_DTYPE, tell).save_pretrained(folder)


def dequantise(model: PreTrainedModel, dtype: torch.dtype, tell: Tell = ignore) -> PreTrainedModel:
    """The model of a GGUF file with its weights as floats in memory; `tell` hears the share that is done."""
    file = gguf_file(model)
    assert file is not None
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model.config, dtype=dtype, trust_remote_code=False)
    check_memory(sum(p.numel() for p in whole.parameters()) * dtype.itemsize, str(file.path))
    whole.to_empty(device="cpu").requires_grad_(False)
    whole.tie_weights()
    whole.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    for module in whole.modules():
        if hasattr(module, "scalar_embed_scale"):  # computed, not stored
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    shape = describe(model.config)
    names = {checkpoint_name(name, shape): name for name in file.tensors if name != "rope_freqs.weight"}
    pieces = []
    for name, parameter in whole.named_parameters():
        if (source := file.tensors.get(names.pop(name, ""))) is None:
            raise SelfJudgeError(f"{file.path} lacks the weights of {name}")
        order = tensor_order(model.config, source.name, len(parameter))
        step = source.rows if order is not None else max(1, PIECE_WEIGHTS // source.cols)
        pieces += [(parameter, source, order, slice(first, first + step)) for first in range(0, source.rows, step)]
    if names:
        raise SelfJudgeError(f"{file.path}: {min(names.values())} has no place in a model of floats: use `dtype` q4")

    def fill(piece: tuple[Tensor, TensorInfo, NDArray[Any] | None, slice]) -> None:
        """Dequantise some rows of a tensor into a parameter; those that a file has in another order all at once."""
        parameter, source, order, rows = piece
        if order is not None and source.rows == 1:  # a bias
            values = file.floats(source)[:, order]
        else:
            values = file.floats(source, rows if order is None else order)
        if source.name.endswith("norm.weight"):
            values = values - shape.family.norm_offset
        parameter.view(source.rows, source.cols)[rows] = torch.from_numpy(values).to(dtype)

    workers = ThreadPoolExecutor(torch.get_num_threads())
    try:
        for done, _ in enumerate(workers.map(fill, pieces), 1):
            tell(done / len(pieces))
    finally:
        workers.shutdown(cancel_futures=True)
    return whole.eval()


def write_blocks(model: PreTrainedModel, path: Path) -> None:
    """Write a Llama- or Qwen2-shaped model as a GGUF file: matrices in int8 (Q8_0), the embedding in float16."""
    from gguf import GGMLQuantizationType

    config, shape, writer = model.config, describe(model.config), start_gguf(path, model.config)
    writer.add_key_length(head_width(config))
    names = [*expected_tensors(config), "output.weight"]
    names += [name.replace("weight", "bias") for name in names if name.startswith("blk.")]
    parameters = dict(model.named_parameters())
    for name in names:
        if (parameter := parameters.get(checkpoint_name(name, shape))) is None:
            continue
        values = parameter.detach().float()
        if (order := tensor_order(config, name, len(values))) is not None:
            values = values[torch.from_numpy(np.argsort(order))]
        if values.dim() == 1:
            writer.add_tensor(name, values.numpy())
        elif name == "token_embd.weight" and "lm_head.weight" in parameters:
            writer.add_tensor(name, values.half().numpy())
        else:
            blocks = int8_blocks(values).reshape(len(values), -1)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    finish_gguf(writer)


def start_gguf(path: Path, config: PretrainedConfig) -> GGUFWriter:
    """A GGUF file that says the shape of a model, to which tensors can be added."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    return writer


def finish_gguf(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_draft(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a draft with its target's tokenizer as a checkpoint, each file whole."""
    with quiet(), scratch(folder / ".making") as making:  # a kill leaves what safetensors had begun
        model.to(STORED_DTYPE).save_pretrained(making)
        tokenizer.save_pretrained(making)
        for file in making.iterdir():
            os.replace(file, folder / file.name)


def read_compact_draft(compact: Path, target: PreTrainedModel | GgufFile) -> PreTrainedModel:
    """The draft in a folder of layers and projections, whose embeddings are the target's own matrices times these."""
    tensors = read_packed(compact)
    check_finite(tensors.items(), compact)
    try:
        return build_draft(tensors, read_json(compact / "config.json"), target)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:  # other names or shapes than the config's
        raise SelfJudgeError(f"the draft in {compact} is damaged: {first_line(error)}") from None


def build_draft(
    tensors: Mapping[str, Tensor], raw: Mapping[str, Any], target: PreTrainedModel | GgufFile
) -> PreTrainedModel:
    """An ordinary float32 model on the CPU from a draft's layers and projections, or from its own embeddings."""
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    state = {name: tensor.float().cpu() for name, tensor in tensors.items()}
    for projection, name in (("proj_in", "model.embed_tokens.weight"), ("proj_out", "lm_head.weight")):
        if projection in state:
            by, rows = state.pop(projection), _read_embedding_rows(target, output=projection == "proj_out")
            state[name] = torch.cat([some @ by for some in rows])
    model.load_state_dict(state)
    return model.eval()


def _read_embedding_rows(target: PreTrainedModel | GgufFile, *, output: bool) -> Iterator[Tensor]:
    """Rows of the target's input or output matrix in float32, some at a time: of a file no other tensor is read."""
    if isinstance(target, PreTrainedModel):
        module = target.get_output_embeddings() if output else target.get_input_embeddings()
        yield from (rows.float().cpu() for rows in module.weight.detach().split(8192))
        return
    name = "output.weight" if output and "output.weight" in target.tensors else "token_embd.weight"
    tensor = target.tensors[name]
    for first in range(0, tensor.rows, 8192):
        yield torch.from_numpy(target.floats(tensor, slice(first, first + 8192)))


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
