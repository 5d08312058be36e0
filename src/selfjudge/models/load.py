"""Loading: a reference becomes a module on its device, its tokenizer and the hash of its weights."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.catalogue import EMBEDDED, check_reference, head_folder, unknown_model
from selfjudge.models.checkpoint import find_files, open_checkpoint
from selfjudge.models.convert import dequantise, gguf_tokenizer, quiet
from selfjudge.models.device import check_memory, choose_device
from selfjudge.models.gguf import open_model
from selfjudge.models.loaded import Draft, Target
from selfjudge.models.memory import count_weights
from selfjudge.models.pull import block_file, checkpoint_folder, weights_sha256
from selfjudge.models.speculators import load_head
from selfjudge.models.tokens import PROBE
from selfjudge.models.weights import check_weights
from selfjudge.store import hub_options, unreachable
from selfjudge.types import Notify

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_LAYERS = 1 << 12


@dataclass(frozen=True)
class Loader:
    """Loads target and draft onto one device, in the formats that `choose` has found for them."""

    device: torch.device
    dtype: torch.dtype
    q4: bool
    """Whether weights stay in the blocks of their GGUF file."""
    int8: bool
    """Whether the CPU engine quantises the target."""
    draft_int8: bool | None
    """Whether it quantises the draft; None: where it can."""
    progress: Notify | None = None

    @classmethod
    def choose(
        cls,
        target: str,
        device: str | None,
        dtype: str | torch.dtype | None,
        draft_dtype: str | None,
        full_precision: bool,
        progress: Notify | None,
    ) -> Loader:
        """The device and the formats that these options of `Pair.load` mean for a target."""
        where = choose_device(device)
        by_default = dtype is None and where.type == "cpu" and not full_precision
        if by_default and stays_in_file(target):
            dtype = "q4"
        int8, q4 = dtype == "int8", dtype == "q4"
        floats = torch.float32 if dtype in ("int8", "q4") else choose_dtype(dtype, where)
        if draft_dtype not in (None, "int8"):
            raise SelfJudgeError(f"`draft_dtype` can only be int8, on a cpu, not {draft_dtype!r}")
        for name, value in (("dtype", dtype), ("draft_dtype", draft_dtype)):
            if value in ("int8", "q4") and where.type != "cpu":
                raise SelfJudgeError(f"`{name}` {value} needs a cpu, not {where.type}")
        if draft_dtype and floats != torch.float32:
            raise SelfJudgeError("`draft_dtype` int8 needs a target in float32")
        draft_int8 = True if draft_dtype or int8 else None if q4 or by_default else False
        return cls(where, floats, q4, int8, draft_int8, progress)

    def load_target(self, reference: str) -> tuple[Target, PreTrainedTokenizerBase]:
        """A causal LM and its tokenizer."""
        check_reference(reference, "target")
        module, tokenizer = self._load_blocks(reference) if self.q4 else self._load_floats(reference)
        return Target(module, reference, weights_sha256(reference), self.int8), tokenizer

    def load_draft(self, reference: str, target: Target, tokenizer: PreTrainedTokenizerBase) -> Draft:
        """A head for this target, or a causal LM with its tokenizer."""
        check_reference(reference, "draft")
        sha256 = weights_sha256(reference)
        if (folder := head_folder(reference)) is not None:
            head = load_head(folder, target.module, target.sha256, target.reference)
            return Draft(head, reference, sha256, self.draft_int8)
        if self.q4 and stays_in_file(reference):
            shared = tokenizer if reference == f"{target.reference}/draft" else None
            module, own_tokenizer = self._load_blocks(reference, shared)
        else:
            module, own_tokenizer = self._load_floats(reference)
        if own_tokenizer is not tokenizer:
            check_tokenizers(tokenizer, own_tokenizer, target.reference, reference)
        for name, model in ((target.reference, target.module), (reference, module)):
            rows = model.get_input_embeddings().weight.shape[0]
            if rows < len(tokenizer):
                raise SelfJudgeError(f"{name} embeds {rows} tokens and its tokenizer has {len(tokenizer)}")
        return Draft(module, reference, sha256, self.draft_int8)

    def _load_floats(self, reference: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model whose weights are floats in memory."""
        path = checkpoint_folder(reference, self.progress) or Path(reference).expanduser()
        self._say_loading(reference)
        if path.suffix == ".gguf" and path.is_file():
            return dequantise(open_model(path), self.dtype).to(self.device), gguf_tokenizer(path)
        return _load_checkpoint(path if path.is_dir() else reference, self.dtype, self.device)

    def _load_blocks(
        self, reference: str, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model whose weights stay in a GGUF file; its tokenizer is not read where it is known."""
        found = block_file(reference, self.progress)
        path = Path(reference).expanduser() if found is None else found[0]
        self._say_loading(reference)
        if path.suffix != ".gguf" or not path.is_file():
            raise SelfJudgeError(f"`dtype` q4 needs a GGUF file or an embedded model, not {reference}")
        if found is not None and tokenizer is None:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(found[1], trust_remote_code=False)
        module = open_model(path)
        check_memory(count_weights(module, "q4", "cpu"), reference)  # its blocks are copied in another order
        return module, gguf_tokenizer(path) if tokenizer is None else tokenizer

    def _say_loading(self, reference: str) -> None:
        if self.progress is not None:
            self.progress(f"loading {reference}", 0.0)


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of that name, or the one that suits the device."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return {"cuda": torch.bfloat16, "mps": torch.float16}.get(device.type, torch.float32)
    if dtype not in _FLOATS:
        raise SelfJudgeError(f"unknown `dtype` {dtype!r}; there are: {', '.join(_FLOATS)}, int8 (cpu), q4 (cpu)")
    return _FLOATS[dtype]


def stays_in_file(reference: str) -> bool:
    """Whether a model runs from the blocks of a GGUF file: an embedded one, or a file."""
    path = Path(reference).expanduser()
    return reference.removesuffix("/draft") in EMBEDDED or (path.suffix == ".gguf" and path.is_file())


def check_tokenizers(
    target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, target: str, draft: str
) -> None:
    """Refuse tokenizers that differ, naming the first tokens that do."""
    left = {index: token for token, index in target_tokenizer.get_vocab().items()}
    right = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    differing = [i for i in sorted(left.keys() | right.keys()) if left.get(i) != right.get(i)]
    if differing:
        shown = "; ".join(f"{i}: {left.get(i)!r} and {right.get(i)!r}" for i in differing[:3])
        raise SelfJudgeError(
            f"the tokenizers of {target} and {draft} differ in {len(differing)} tokens ({shown}): a pair must share one"
        )
    if target_tokenizer(PROBE)["input_ids"] != draft_tokenizer(PROBE)["input_ids"]:
        raise SelfJudgeError(
            f"the tokenizers of {target} and {draft} have one vocabulary but split text differently:"
            " a pair must share one"
        )


def _check_config(config: PretrainedConfig) -> None:
    """Refuse by name what transformers would stumble over, or run without sense."""
    if getattr(config, "num_hidden_layers", 0) > MOST_LAYERS:  # each is built before weights are looked for
        raise ValueError(f"it says that it has {config.num_hidden_layers} layers")
    rope, window = getattr(config, "rope_parameters", None) or {}, getattr(config, "sliding_window", None)
    for part in (rope, *rope.values()):
        kind = part.get("rope_type", "default") if isinstance(part, dict) else "default"
        if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise ValueError(f"its rotary embedding is of unknown type {kind!r}")
    for name in ("hidden_act", "hidden_activation"):
        if (activation := getattr(config, name, None)) is not None and activation not in ACT2FN:
            raise ValueError(f"its activation {activation!r} is unknown")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"its sliding window is {window!r}")


def _load_checkpoint(
    source: Path | str, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint in a folder, or one of the hub by its id, on its device."""
    try:
        with quiet():
            options = {} if isinstance(source, Path) else hub_options()
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
            _check_config(config.get_text_config())
            model, loading = _load_model(source, config, dtype, device, options)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except SelfJudgeError:
        raise
    except torch.OutOfMemoryError:
        raise SelfJudgeError(f"{source} does not fit into the memory of {device}") from None
    except Exception as error:  # transformers raises many kinds for a missing, gated or malformed checkpoint
        if isinstance(source, Path):
            raise SelfJudgeError(f"{source} is not a readable checkpoint: {first_line(error)}") from None
        raise unknown_model(source, unreachable() or first_line(error)) from None
    check_weights(model, loading, source)
    config = model.config.get_text_config()
    window, context = (getattr(config, name, None) for name in ("sliding_window", "max_position_embeddings"))
    if window is not None and context is not None and window > context:
        warnings.warn(f"{source}: its sliding window of {window} exceeds its context of {context}", stacklevel=2)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # torch's own attention has no caps
    return model.eval(), tokenizer


def _load_model(
    source: Path | str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a checkpoint, and what transformers says of names and shapes of its weights."""
    told = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}  # they are named later
    files = find_files(source, options)
    if files is None:  # weights of an old format, which transformers reads
        model, loading = AutoModelForCausalLM.from_pretrained(
            source, config=config, trust_remote_code=False, **told, **options
        )
        return model.to(device), loading
    weights = open_checkpoint(files, config, device)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    check_memory(count_weights(outline, str(dtype).removeprefix("torch."), device.type), str(source), device)
    model, loading = type(outline).from_pretrained(
        None, config=outline.config, state_dict=weights, trust_remote_code=False, **told
    )
    with contextlib.suppress(OSError):  # without one, the model's config names the end tokens
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    return model.to(device), loading
