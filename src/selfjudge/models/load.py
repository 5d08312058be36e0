"""Loading: a reference becomes a model on its device, its tokenizer and the hash of its weights."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from selfjudge.models.checkpoint import check_weights, find_files, open_checkpoint
from selfjudge.models.convert import dequantise, gguf_tokenizer, quiet
from selfjudge.models.device import check_memory, choose_device
from selfjudge.models.eagle import EagleHead, load_head
from selfjudge.models.gguf import FULL_PRECISION, GgufFile, gguf_file, open_model
from selfjudge.models.memory import count_weights
from selfjudge.models.pull import block_file, checkpoint_folder, weights_sha256
from selfjudge.models.tokens import PROBE, context_window
from selfjudge.store import hub_options, unreachable
from selfjudge.types import Notify, ignore

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_LAYERS = 1 << 12

_T = TypeVar("_T")
_KEEPING = threading.RLock()  # batches in several threads share what is kept, and packing may free its source


@dataclass(eq=False)
class LoadedModel:
    """What target and draft share. Where the weights stay in a GGUF file, the module has their shapes alone."""

    module: PreTrainedModel | EagleHead | None  # None: it is in a remote engine alone
    reference: str = ""  # embedded name, hub id or path that it was loaded from
    sha256: str = ""  # hash of the weights; empty where none is known
    int8: bool | None = False  # whether the CPU engine quantises the weights to int8; None: where it can
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What engines keep for the next batch: packed weights, idle engines with their captured graphs."""

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The module, which is not a head."""
        assert isinstance(self.module, PreTrainedModel)
        return self.module

    @property
    def device(self) -> torch.device:
        assert self.module is not None
        return self.module.device

    @property
    def file(self) -> GgufFile | None:
        """The GGUF file that holds the weights; None where the module holds them itself."""
        return None if self.module is None else gguf_file(self.module)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What is kept under this key, made where it is not there yet."""
        with _KEEPING:
            if key not in self.kept:
                self.kept[key] = make()
            value: _T = self.kept[key]
        return value

    def release(self) -> None:
        """Free the memory of everything that engines keep; the next engine makes it again."""
        self.kept.clear()


@dataclass(eq=False)
class Target(LoadedModel):
    """A causal LM of transformers; any model that generates text by itself can be one."""

    module: PreTrainedModel
    int8: bool = False  # whether the CPU engine quantises the weights to int8
    remote: Any = None  # the `VllmBackend` that answers for it; the module then has shape and output matrix alone

    @property
    def dtype_name(self) -> str:
        """The weight format as tables print it."""
        if self.file is not None:
            return "q4"
        return "int8" if self.int8 else str(self.module.dtype).removeprefix("torch.")

    def check_full_precision(self) -> None:
        """Refuse a model whose weights stay in a file, before any work."""
        if self.file is not None:
            raise SelfJudgeError(FULL_PRECISION)


@dataclass(eq=False)
class Draft(LoadedModel):
    """What drafts for a target: a causal LM with its vocabulary, or an EAGLE-3 head that reads its states."""

    @property
    def head(self) -> EagleHead | None:
        """The module, where it is a head."""
        return self.module if isinstance(self.module, EagleHead) else None

    @property
    def eagle_head(self) -> EagleHead:
        """The module, which is a head."""
        assert isinstance(self.module, EagleHead)
        return self.module

    @property
    def features(self) -> tuple[int, ...]:
        """The layers of the target whose inputs it reads."""
        return () if self.head is None else self.head.config.aux_layers

    @property
    def window(self) -> int:
        """The most positions that it can hold."""
        return context_window(self.causal_lm) if self.head is None else self.head.window


def as_loaded(model: PreTrainedModel | EagleHead | LoadedModel) -> LoadedModel:
    """A model of transformers or a head as a loaded one, for which nothing is kept yet."""
    if isinstance(model, LoadedModel):
        return model
    return Draft(model) if isinstance(model, EagleHead) else Target(model)


def as_draft(model: PreTrainedModel | EagleHead | Draft) -> Draft:
    """A model or a head as a draft, for which nothing is kept yet."""
    return model if isinstance(model, Draft) else Draft(model)


@dataclass(frozen=True)
class Loader:
    """Loads target and draft onto one device, in the formats that `choose` has found for them."""

    device: torch.device
    dtype: torch.dtype
    q4: bool  # whether weights stay in the blocks of their GGUF file
    int8: bool  # whether the CPU engine quantises the target
    draft_int8: bool | None  # whether it quantises the draft; None: where it can
    progress: Notify = ignore

    @classmethod
    def choose(
        cls,
        target: str,
        device: str | None,
        dtype: str | torch.dtype | None,
        draft_dtype: str | None,
        full_precision: bool,
        progress: Notify = ignore,
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
        self.progress(f"loading {reference}", 0.0)
        if path.suffix == ".gguf" and path.is_file():
            return dequantise(open_model(path), self.dtype).to(self.device), gguf_tokenizer(path)
        return _load_checkpoint(path if path.is_dir() else reference, self.dtype, self.device)

    def _load_blocks(
        self, reference: str, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model whose weights stay in a GGUF file; its tokenizer is not read where it is known."""
        found = block_file(reference, self.progress)
        path = Path(reference).expanduser() if found is None else found[0]
        self.progress(f"loading {reference}", 0.0)
        if path.suffix != ".gguf" or not path.is_file():
            raise SelfJudgeError(f"`dtype` q4 needs a GGUF file or an embedded model, not {reference}")
        if found is not None and tokenizer is None:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(found[1], trust_remote_code=False)
        module = open_model(path)
        check_memory(count_weights(module, "q4", "cpu"), reference)  # its blocks are copied in another order
        return module, gguf_tokenizer(path) if tokenizer is None else tokenizer


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
