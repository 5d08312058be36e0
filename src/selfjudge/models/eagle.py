"""The EAGLE-3 head: a draft of one layer that reads the target's own states (Li et al. 2025).
Entry t of the head gets the target's states at position t and the token at t+1, and proposes the token at t+2:
    g = fc(states of a low, a middle and a high layer)    where the target has been; else g = a of the entry before
    r = g + attention(norm(embedding of the token) ‖ norm(g));   a = r + mlp(norm(r));   logits = norm(a) · outputᵀ

Embedding and output matrix are the target's own; of the output only the rows of a draft vocabulary are used. Names and
order of operations are those of vLLM and speculators. Folders have the format of speculators, which vLLM loads; that of
the paper's code is read as well:

    config.json          the shape of the layer (in speculators' format under `transformer_layer_config`), the target's
                         layers that are read, tokens to propose; in ours also the head's target and its quality
    model.safetensors    the parameters by vLLM's names (`midlayer.` in place of `layers.0.` in the paper's format);
                         lm_head: the rows of the output matrix; d2t: token − index of each row; t2d: a mask of those
                         tokens; perhaps embed_tokens
    head.safetensors     in heads that ship, which vLLM does not read: matrices as int8, or as six bits packed, with a
                         float16 scale for each 32 weights, and `draft_ids` in place of the maps"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.checkpoint import check_finite, read_packed
from selfjudge.models.gguf import FULL_PRECISION, gguf_file
from selfjudge.models.shape import ROTARY, Shape, describe
from selfjudge.models.tokens import context_window
from selfjudge.store import read_json, whole_tensors, write_json
from selfjudge.store.schema import HeadConfig, HeadFile, HeadShape, conform

FORMAT = "0.3.0"  # of speculators, whose fields these are
COMPACT = "head.safetensors"
_WRITTEN = (  # what is written of a head's layer
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a head."""

    layer: LlamaConfig  # with the target's width, vocabulary, rotary embedding and ε of the norms
    aux_layers: tuple[int, int, int]  # their inputs are read: i is the residual stream into decoder layer i, as in vLLM
    draft_vocab_size: int
    norm_before_residual: bool = False  # whether r = norm(g) + attention(…), as in many public heads; else g + …

    @classmethod
    def for_target(cls, target: PreTrainedModel, draft_vocab_size: int, intermediate_size: int | None = None) -> Self:
        """A head with the target's attention; the feed-forward layer is 8/3 as wide as the model if not given."""
        layers, large = len(decoder_layers(target)), target.config.get_text_config()
        width, heads = int(large.hidden_size), int(large.num_attention_heads)
        rope = dict(getattr(large, "rope_parameters", None) or {})
        if rope.get("rope_type") not in ROTARY or "rope_theta" not in rope:
            rope = {"rope_type": "default", "rope_theta": 10000.0}
        layer = LlamaConfig(
            num_hidden_layers=1,
            hidden_size=width,
            intermediate_size=intermediate_size or max(64, round(width * 8 / 3 / 64) * 64),
            num_attention_heads=heads,
            num_key_value_heads=int(getattr(large, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(large, "head_dim", None) or width // heads),
            rope_parameters=rope,
            rms_norm_eps=float(getattr(large, "rms_norm_eps", 1e-6)),
            vocab_size=int(target.get_input_embeddings().weight.shape[0]),
        )
        return cls(layer, auxiliary_layers(layers), draft_vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.layer.vocab_size)

    @property
    def shape(self) -> Shape:
        """Its layer, as engines read it."""
        return describe(self.layer)


def auxiliary_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer of so many: 2, half of them, and the third from the end, where they differ."""
    low = min(2, max(0, layers - 3))
    high = max(layers - 3, min(low + 2, layers - 1))
    return low, min(max(layers // 2, low + 1), high), high


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The layers whose states a head reads; a target without `model.layers` is refused."""
    layers = getattr(target.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        kind = target.config.get_text_config().model_type
        raise SelfJudgeError(f"the states of a model of type {kind!r} cannot be read: an EAGLE-3 head needs them")
    return layers


@contextlib.contextmanager
def captured_states(target: PreTrainedModel, aux_layers: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """The states that enter these layers, in their order, [B, T, H] each; filled by each pass of the target."""
    states: list[Tensor] = [torch.empty(0)] * len(aux_layers)
    layers = decoder_layers(target)

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [layers[i].register_forward_pre_hook(keep(n), with_kwargs=True) for n, i in enumerate(aux_layers)]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


class Norm(nn.RMSNorm):
    """RMSNorm; its weight takes the dtype of what it norms."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class EagleLayer(nn.Module):
    """The decoder layer, in two halves, before and after its attention: training has an attention of its own."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        width, shape = config.hidden_size, config.layer
        self.hidden_norm = Norm(width, shape.rms_norm_eps)
        self.input_layernorm = Norm(width, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(width, shape.rms_norm_eps)
        self.dim = shape.head_dim
        queries, keys = shape.num_attention_heads * self.dim, shape.num_key_value_heads * self.dim
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.self_attn = nn.ModuleDict({n: nn.Linear(2 * width, s, bias=False) for n, s in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(queries, width, bias=False)
        self.mlp = LlamaMLP(shape)

    def project(self, embedded: Tensor, g: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, T, dim], keys and values [B, kv_heads, T, dim] of entries [B, T, H]."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)
        projections = (self.self_attn[name] for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (project(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for project in projections)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return q, k, v

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        """The output of the layer [B, T, H] from that of its attention [B, heads, T, dim]."""
        r = self.hidden_norm(g) if self.norm_before_residual else g
        r = r + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        out: Tensor = r + self.mlp(self.post_attention_layernorm(r))
        return out


class EagleHead(nn.Module):
    """An EAGLE-3 head. Parameters have the names of vLLM's; `draft_ids` [D] are token ids, ascending."""

    draft_ids: Tensor
    embedding: Tensor | None
    """[V, H] embedding of the target; like `output` [D, H] None before `bind` and where the weights stay in a file."""
    output: Tensor | None
    own: frozenset[str] = frozenset()  # which of the two come with the head: public heads may have their own
    folder: Path | None = None  # folder from which the matrices can be read again

    def __init__(self, config: EagleConfig, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = Norm(config.hidden_size, config.layer.rms_norm_eps)
        self.register_buffer("draft_ids", draft_ids.long(), persistent=False)
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("output", None, persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(config.layer)
        self.target, self.target_sha256 = "", ""
        self.architecture = ""  # class of the target in transformers
        self.window = 1 << 30

    @property
    def layer(self) -> EagleLayer:
        only = self.layers[0]
        assert isinstance(only, EagleLayer)
        return only

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def bind(
        self, target: PreTrainedModel, sha256: str = "", name: str = "", *, dtype: torch.dtype | None = None
    ) -> Self:
        """Use a target's embedding, output matrix, device and dtype (unless given); refuse one that does not fit."""
        self.check_target(target, sha256, name or "this target")
        self.window, self.architecture = context_window(target), type(target).__name__
        self.target, self.target_sha256 = name or self.target, sha256 or self.target_sha256
        self.to(device=target.device, dtype=dtype or target.dtype)
        # in float32: a rounded angle grows with the position
        self.rotary_emb = LlamaRotaryEmbedding(self.config.layer).to(target.device)
        if gguf_file(target) is None and "embedding" not in self.own:
            self.embedding = target.get_input_embeddings().weight.detach()
        if gguf_file(target) is None and "output" not in self.own:
            self.output = target.get_output_embeddings().weight.detach()[self.draft_ids]
        return self

    def free_matrices(self) -> None:
        """Free the matrices, which an engine has packed, where they can be read again."""
        if self.folder is not None:
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.data = parameter.data.new_empty((0, parameter.shape[1]))

    def check_target(self, target: PreTrainedModel, sha256: str, name: str) -> None:
        """Refuse a target that this head was not trained for."""
        config, layers = self.config, len(decoder_layers(target))
        rows, width = target.get_input_embeddings().weight.shape
        if sha256 and self.target_sha256 and sha256 != self.target_sha256:
            raise SelfJudgeError(f"this head was trained for {self.target or 'another target'}, not for {name}")
        if width != config.hidden_size or rows != config.vocab_size:
            sizes = f"states of width {config.hidden_size} over {config.vocab_size} tokens"
            raise SelfJudgeError(f"this head reads {sizes}, and {name} has {width} and {rows}")
        if (deepest := max(config.aux_layers)) >= layers:
            raise SelfJudgeError(f"this head reads what enters layer {deepest}, and {name} has {layers} layers")

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embedding is None:
            raise SelfJudgeError(FULL_PRECISION)
        return F.embedding(tokens, self.embedding)

    def forward(
        self,
        tokens: Tensor,
        g: Tensor,
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """a [B, T, H] of entries with tokens [B, T] and g [B, T, H]; `positions` [B, T] are 0 … T−1 if not given.
        Keys and values go into `cache` where there is one. `mask` [B, 1, T, S] is True for what an entry may see of it;
        without a mask entries see themselves and those before them, so the cache must be empty or T = 1."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        q, k, v = self.layer.project(self.embed(tokens), g, self.rotary_emb(g, positions))
        if cache is not None:
            k, v = cache.update(k, v, 0)
        causal = mask is None and q.shape[2] > 1
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.layer.finish(g, attended)

    def logits(self, a: Tensor) -> Tensor:
        """[.., D] over the draft vocabulary."""
        if self.output is None:
            raise SelfJudgeError(FULL_PRECISION)
        return F.linear(self.norm(a), self.output)


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
        raise SelfJudgeError(f"the head in {folder} is not one that can be read: {first_line(error)}") from None
    if output is not None:
        head.output = output[order]
    own = target.get_input_embeddings().weight
    if embedding is not None and not (own.shape == embedding.shape and torch.equal(own, embedding.to(own))):
        head.embedding = embedding.clone()  # load_file maps the file
    head.own = frozenset(name for name in ("output", "embedding") if getattr(head, name) is not None)
    check_finite([*head.named_parameters(), *head.named_buffers()], folder)
    verifier = (record.get("speculators_config") or {}).get("verifier") or {}
    head.folder, head.target_sha256 = folder, record.get("target_sha256", "")
    head.target = record.get("target") or str(verifier.get("name_or_path") or "")
    return head.eval().requires_grad_(False)


def read_shape(folder: Path, target: PreTrainedModel) -> tuple[EagleConfig, dict[str, Any]]:
    """The shape of the head in a folder, and all that its config says; a shape that ours cannot have is refused."""
    file = folder / "config.json"
    record = read_json(file, HeadFile)
    shape = conform(record.get("transformer_layer_config", record), HeadShape, file)
    eagle = record.get("eagle_config") or {}
    said = {key: value for part in (shape, record, eagle) for key, value in part.items() if value is not None}
    options: dict[str, Any] = conform(said, HeadConfig, file)
    layers = options.get("eagle_aux_hidden_state_layer_ids") or auxiliary_layers(len(decoder_layers(target)))
    low, middle, high = sorted(layers)
    layer = {key: shape[key] for key in get_type_hints(HeadShape) if shape.get(key) is not None}
    try:
        config = EagleConfig(
            LlamaConfig(**{"num_hidden_layers": 1, "rms_norm_eps": 1e-6, **layer}),
            aux_layers=(low, middle, high),
            draft_vocab_size=record.get("draft_vocab_size") or shape["vocab_size"],
            norm_before_residual=bool(record.get("norm_before_residual", "speculators_model_type" in record)),
        )
    except Exception as error:  # transformers raises many kinds
        raise SelfJudgeError(f"{file}: the shape of its layer cannot be read: {first_line(error)}") from None
    _check_shape(config, options.get("target_hidden_size", config.hidden_size), file)
    return config, record


def _check_shape(config: EagleConfig, target_width: int, file: Path) -> None:
    """Refuse what no head can have."""
    layer = config.layer
    wrong = {
        "target_hidden_size": (target_width, target_width != config.hidden_size),
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
    vLLM drafts `steps` tokens by default for `verifier`, whose embedding it takes; the output rows are copied."""
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
