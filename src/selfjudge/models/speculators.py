"""Folders of EAGLE-3 heads, in the format of speculators, which vLLM loads; that of the paper's code is read as well.

FOLDER/
    config.json          the shape of the layer (in speculators' format under `transformer_layer_config`), the
                         layers of the target that are read, how many tokens are proposed; in ours also for which
                         target the head was made and how good it is
    model.safetensors    the parameters by vLLM's names (`midlayer.` in place of `layers.0.` in the paper's format);
                         lm_head: the rows of the output matrix; d2t: token − index of each row; t2d: a mask of those
                         tokens; perhaps embed_tokens

A head that ships is compact: `head.safetensors` has matrices as int8, or as six bits packed, with a float16 scale for
each 32 weights, and `draft_ids` in place of the maps. vLLM does not read those.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.eagle import EagleConfig, EagleHead, auxiliary_layers, decoder_layers
from selfjudge.models.shape import ROTARY
from selfjudge.models.weights import check_finite, read_packed
from selfjudge.store import read_json, whole_tensors, write_json
from selfjudge.store.schema import HeadFile, HeadShape, conform

FORMAT = "0.3.0"  # of speculators, whose fields these are
COMPACT = "head.safetensors"
_FIXED = {
    "num_hidden_layers": 1, "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "num_aux_hidden_states": 3,
    "use_aux_hidden_state": True,
}  # fmt: skip
"""Options of public heads, each with the one value that our heads have."""
_WRITTEN = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters",
)  # fmt: skip
"""What is written of a head's layer."""


def load_head(folder: Path, target: PreTrainedModel, sha256: str = "", name: str = "") -> EagleHead:
    """The head of a folder for this target, in its dtype on its device."""
    return read_head(folder, target).bind(target, sha256, name)


def read_head(folder: Path, target: PreTrainedModel) -> EagleHead:
    """The head of a folder, in float32, not bound yet; a damaged one, or one of another shape, is refused."""
    config, record = read_shape(folder, target)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read_packed(folder).items()}
    ids, order = _draft_ids(tensors, config, folder)
    output, embedding = tensors.pop("lm_head.weight", None), tensors.pop("embed_tokens.weight", None)
    for name, tensor, rows in (
        ("output", output, config.draft_vocab_size),
        ("embedding", embedding, config.vocab_size),
    ):
        if tensor is not None and tensor.shape != (rows, config.hidden_size):
            raise SelfJudgeError(f"{folder}: its {name} is {list(tensor.shape)}, not {[rows, config.hidden_size]}")
    try:
        head = EagleHead(config, ids)
        head.load_state_dict(tensors)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # other names, shapes or rotary embeddings
        fault = str(error).splitlines()[:2][-1].strip()  # the first line of a RuntimeError names the module alone
        raise SelfJudgeError(f"the head in {folder} is not one that can be read: {fault}") from None
    if output is not None:
        head.output = output[order]
    own = target.get_input_embeddings().weight
    if embedding is not None and not (own.shape == embedding.shape and torch.equal(own, embedding.to(own))):
        head.embedding = embedding.clone()  # load_file maps the file
    head.own = frozenset(name for name in ("output", "embedding") if getattr(head, name) is not None)
    check_finite([*head.named_parameters(), *((name, getattr(head, name)) for name in sorted(head.own))], folder)
    verifier = (record.get("speculators_config") or {}).get("verifier") or {}
    head.folder, head.target_sha256 = folder, record.get("target_sha256", "")
    head.target = record.get("target") or str(verifier.get("name_or_path") or "")
    return head.eval().requires_grad_(False)


def read_shape(folder: Path, target: PreTrainedModel) -> tuple[EagleConfig, dict[str, Any]]:
    """The shape of the head in a folder, and all that its config says; a shape that ours cannot have is refused."""
    file = folder / "config.json"
    record = read_json(file, HeadFile)
    kind = record.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise SelfJudgeError(f"{file}: a draft of type {kind!r} cannot be used: only eagle3")
    shape = conform(record.get("transformer_layer_config", record), HeadShape, file)
    eagle = record.get("eagle_config") or {}
    options: dict[str, Any] = {
        key: value for said in (shape, record, eagle) for key, value in said.items() if value is not None
    }
    for key, ours in {**_FIXED, "target_hidden_size": shape["hidden_size"]}.items():
        if (value := options.get(key, ours)) != ours:
            raise SelfJudgeError(f"{file}: a head with {key} {value!r} cannot be used: only {ours!r}")
    layers = options.get("eagle_aux_hidden_state_layer_ids") or auxiliary_layers(len(decoder_layers(target)))
    low_middle_high = sorted(layers)
    if len(low_middle_high) != 3:
        raise SelfJudgeError(f"{file}: a head that reads {len(low_middle_high)} layers cannot be used: only three")
    layer = {key: shape[key] for key in get_type_hints(HeadShape) if shape.get(key) is not None}
    try:
        config = EagleConfig(
            LlamaConfig(**{"num_hidden_layers": 1, "rms_norm_eps": 1e-6, **layer}),
            aux_layers=(low_middle_high[0], low_middle_high[1], low_middle_high[2]),
            draft_vocab_size=record.get("draft_vocab_size") or shape["vocab_size"],
            norm_before_residual=bool(record.get("norm_before_residual", "speculators_model_type" in record)),
        )
    except Exception as error:  # transformers raises many kinds
        raise SelfJudgeError(f"{file}: the shape of its layer cannot be read: {first_line(error)}") from None
    _check_shape(config, file)
    return config, record


def _check_shape(config: EagleConfig, file: Path) -> None:
    """Refuse what no head can have."""
    layer = config.layer
    wrong = {
        "num_key_value_heads": (layer.num_key_value_heads, layer.num_attention_heads % layer.num_key_value_heads != 0),
        "draft_vocab_size": (config.draft_vocab_size, config.draft_vocab_size > config.vocab_size),
        "rope_parameters": (layer.rope_parameters, layer.rope_parameters.get("rope_type") not in ROTARY),
    }
    for name, (value, bad) in wrong.items():
        if bad:
            raise SelfJudgeError(f"{file}: a head cannot have {name} {value}")


def _draft_ids(tensors: dict[str, Tensor], config: EagleConfig, folder: Path) -> tuple[Tensor, Tensor]:
    """[D] the tokens that a head proposes, ascending, and where each lies in its output matrix; takes out the maps."""
    places = torch.arange(config.draft_vocab_size)
    offsets, marked = tensors.pop("d2t", torch.zeros_like(places)), tensors.pop("t2d", None)
    named = places + offsets if offsets.shape == places.shape else offsets
    ids, order = tensors.pop("draft_ids", named).sort()
    fits = ids.shape == places.shape and not ids.is_floating_point()
    if not fits or not bool((ids[1:] > ids[:-1]).all()) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        expected = f"{config.draft_vocab_size} different token ids below {config.vocab_size}"
        raise SelfJudgeError(f"{folder}: its draft vocabulary must be {expected}")
    if marked is not None and not torch.equal(marked.nonzero().flatten(), ids):
        raise SelfJudgeError(f"{folder}: d2t and t2d must name the same tokens")
    return ids, order


def write_head(
    head: EagleHead, folder: Path, *, steps: int = 5, verifier: str = "", metrics: Mapping[str, Any] | None = None
) -> None:
    """Write `model.safetensors` (float16), then `config.json`: its existence means that the folder is whole.

    `steps` is how many tokens vLLM drafts unless told otherwise, `verifier` what vLLM loads as the target. The rows of
    the output matrix are copied, because vLLM wants them; the embedding is taken from the target."""
    config = head.config
    tensors = {name: p.detach() for name, p in head.named_parameters()}
    if head.output is not None:
        tensors["lm_head.weight"] = head.output
    if "embedding" in head.own:
        assert head.embedding is not None
        tensors["embed_tokens.weight"] = head.embedding
    tensors = {name: tensor.half().cpu().contiguous() for name, tensor in tensors.items()}
    if config.draft_vocab_size < config.vocab_size:  # vLLM takes no map where there is nothing to map
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    (folder / "config.json").unlink(missing_ok=True)
    with whole_tensors(folder / "model.safetensors") as file:
        save_file(tensors, file, {"format": "pt"})
    about = {"target": head.target, "target_sha256": head.target_sha256, "metrics": dict(metrics or {})}
    write_json(folder / "config.json", _config(head, steps, verifier or head.target) | about)


def _config(head: EagleHead, steps: int, verifier: str) -> dict[str, Any]:
    """`config.json`: what all heads have in common is in a file of this folder."""
    c, record = head.config, read_json(Path(__file__).with_name("speculators.json"))
    record |= {
        "speculators_version": FORMAT,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
    }
    record["speculators_config"] |= {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
        "verifier": {"name_or_path": verifier, "architectures": [head.architecture]},
    }
    layer = {name: getattr(c.layer, name) for name in _WRITTEN}
    record["transformer_layer_config"] |= {**layer, "max_position_embeddings": head.window}
    record["transformer_layer_config"]["rope_theta"] = c.layer.rope_parameters["rope_theta"]
    return record
