"""A pair: target, draft and the tokenizer they share, checked once for compatibility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError, first_line
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import EMBEDDED, check_reference, draft_for, shipped_draft, unknown_model
from selfjudge.models.convert import STORED_DTYPE, gguf_tokenizer, load_gguf, quiet
from selfjudge.models.device import chosen_device
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import ARCHITECTURES, GgufFile, gguf_of, model_of
from selfjudge.models.heads import KIND as HEAD_KIND, head_folder
from selfjudge.models.memory import check_memory
from selfjudge.models.pull import Progress, block_file, checkpoint_folder, draft_sha256
from selfjudge.models.speculators import load_head
from selfjudge.models.tokens import context_window, end_ids, special_ids
from selfjudge.models.weights import check_weights
from selfjudge.store import fingerprint, hub_options, unreachable, weight_files

Prompt = str | Sequence[Mapping[str, str]]
"""A user message, or a whole conversation as chat messages."""

_PROBE = "It's 3.14% of\tthe naïve façade — 東京 🙂\n  def f(x): return x**2"


@dataclass(frozen=True)
class Pair:
    """A causal LM of transformers and a draft with its vocabulary: another one, or an EAGLE-3 head."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | EagleHead | None
    """A model of its own, or a head that reads the target's states."""
    tokenizer: PreTrainedTokenizerBase
    target_id: str
    draft_id: str
    target_sha256: str = ""
    draft_sha256: str = ""
    int8: bool = False
    """Whether both models run with weights quantised to int8 (CPU engine)."""
    draft_int8: bool | None = False
    """Whether the draft runs with such weights, under every rule; None: where the CPU engine can."""

    @classmethod
    def load(
        cls,
        target: str = "smollm2-135m",
        draft: str | None = None,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        draft_dtype: str | None = None,
        needs_draft: bool = True,
        full_precision: bool = False,
        progress: Progress | None = None,
    ) -> Pair:
        """Load by embedded name (its draft ships with it), hub id, checkpoint folder or GGUF file; a draft may be the
        folder of an EAGLE-3 head, ours or one in the format of speculators or of EAGLE's own code.

        The device is cuda, mps or cpu, the first that is there. The dtype is bfloat16 on cuda, float16 on mps. On cpu
        it is `q4` for embedded models and GGUF files, float32 for others, and the draft then runs in int8 if it can.
        `q4` leaves weights in their GGUF file, whose blocks the CPU engine runs as they are; `int8` loads float32 and
        lets the CPU engine quantise it. With a dtype of floats the draft has it, too, unless `draft_dtype` is int8.
        `full_precision` chooses a dtype of floats: for labels, likelihoods and training.
        Without `needs_draft` the pair may lack a draft: it is then good for plain decoding.
        """
        place = chosen_device(device)
        default = dtype is None and place.type == "cpu" and not full_precision
        if default and stays_in_file(target):
            dtype = "q4"
        int8, blocks = dtype == "int8", dtype == "q4"
        kind = torch.float32 if int8 or blocks else chosen_dtype(dtype, place)
        _check_cpu_dtypes(place, kind, dtype, draft_dtype)
        draft_int8 = True if draft_dtype else None if blocks or default else False
        name = target if draft is None else f"{target}+{draft}"
        load = _load_blocks if blocks else _load
        model, tokenizer, target_sha256 = load(target, "target", place, kind, progress)
        if draft is None and not needs_draft and shipped_draft(target) is None:
            return cls(name, model, None, tokenizer, target, "", target_sha256, int8=int8)
        draft = draft_for(target, draft)
        check_reference(draft, "draft")
        if (folder := head_folder(draft)) is not None:
            head, sha256 = load_head(folder, model, target_sha256, target)
            return cls(name, model, head, tokenizer, target, draft, target_sha256, sha256, int8, draft_int8)
        if blocks and stays_in_file(draft):
            shared = tokenizer if draft == f"{target}/draft" else None
            small, small_tokenizer, small_sha256 = _load_blocks(draft, "draft", place, kind, progress, shared)
        else:
            small, small_tokenizer, small_sha256 = _load(draft, "draft", place, kind, progress)
        if small_tokenizer is not tokenizer:
            check_tokenizers(tokenizer, small_tokenizer, target, draft)
        for reference, loaded in ((target, model), (draft, small)):
            rows = loaded.get_input_embeddings().weight.shape[0]
            if rows < len(tokenizer):
                raise SelfJudgeError(f"{reference} embeds {rows} tokens and its tokenizer has {len(tokenizer)}")
        return cls(name, model, small, tokenizer, target, draft, target_sha256, small_sha256, int8, draft_int8)

    @cached_property
    def judge(self) -> Judge | None:
        """The judge that ships for this target, loaded on first use; None where none ships."""
        folder = EMBEDDED[self.target_id].judge if self.target_id in EMBEDDED else None
        return None if folder is None else Judge.from_pretrained(folder)

    @property
    def dtype(self) -> str:
        """The name of the target's weight format as tables print it."""
        if gguf_of(self.target) is not None:
            return "q4"
        return "int8" if self.int8 else str(self.target.dtype).removeprefix("torch.")

    @property
    def draft_kind(self) -> str | None:
        """`eagle3` for a head, `layers` for a model; None without a draft."""
        return None if self.draft is None else HEAD_KIND if isinstance(self.draft, EagleHead) else "layers"

    @property
    def window(self) -> int:
        """The most tokens, prompt and answer, that target and draft can hold."""
        own = context_window(self.target)
        if self.draft is None:
            return own
        return min(own, self.draft.window if isinstance(self.draft, EagleHead) else context_window(self.draft))

    def draft_model(self, purpose: str) -> PreTrainedModel:
        """The draft as a model of its own; a head cannot serve this purpose."""
        if self.draft is None:
            raise SelfJudgeError(f"no draft ships for {self.target_id}: name one with `draft`")
        if isinstance(self.draft, EagleHead):
            raise SelfJudgeError(f"{purpose} needs a draft that is a model of its own; {self.draft_id} is a head")
        return self.draft

    @property
    def hidden_size(self) -> int:
        return int(self.target.get_output_embeddings().weight.shape[1])

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer, from the generation config, the model config and the tokenizer."""
        return end_ids(self.target.generation_config, self.target.config, self.tokenizer)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """End-of-sequence and other special tokens: there the judge has no say."""
        return special_ids(self.tokenizer, self.eos_ids)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, through the chat template with generation prompt unless `raw`."""
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise SelfJudgeError(EMPTY_PROMPT)
        if raw:
            if not isinstance(prompt, str):
                raise SelfJudgeError("a raw prompt must be a string, not chat messages")
            return list(self.tokenizer(prompt)["input_ids"])
        return self.encode_many([prompt])[0]

    def encode_many(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of many prompts through the chat template, in one call of the tokenizer."""
        if not self.tokenizer.chat_template:
            raise SelfJudgeError(f"the tokenizer of {self.target_id} has no chat template: use `raw`")
        if not prompts:
            return []
        texts = []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
            try:
                texts.append(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            except Exception as error:  # whatever the model's own template raises
                raise SelfJudgeError(f"the chat template does not take these messages: {first_line(error)}") from None
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids


def _check_cpu_dtypes(
    place: torch.device, kind: torch.dtype, dtype: str | torch.dtype | None, draft_dtype: str | None
) -> None:
    if draft_dtype not in (None, "int8"):
        raise SelfJudgeError(f"`draft_dtype` can only be int8, on a cpu, not {draft_dtype!r}")
    for name, value in (("dtype", dtype), ("draft_dtype", draft_dtype)):
        if value in ("int8", "q4") and place.type != "cpu":
            raise SelfJudgeError(f"`{name}` {value} needs a cpu, not {place.type}")
    if draft_dtype and kind != torch.float32:
        raise SelfJudgeError("`draft_dtype` int8 needs a target in float32")


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
    if target_tokenizer(_PROBE)["input_ids"] != draft_tokenizer(_PROBE)["input_ids"]:
        raise SelfJudgeError(
            f"the tokenizers of {target} and {draft} have one vocabulary but split text differently:"
            " a pair must share one"
        )


def chosen_dtype(dtype: str | torch.dtype | None, place: torch.device) -> torch.dtype:
    """The dtype of that name, or the one that suits the device."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return {"cuda": torch.bfloat16, "mps": torch.float16}.get(place.type, torch.float32)
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise SelfJudgeError(f"unknown `dtype` {dtype!r}; there are: {', '.join(known)}, int8 (cpu), q4 (cpu)")
    return known[dtype]


def stays_in_file(reference: str) -> bool:
    """Whether a model can run from the blocks of its GGUF file: an embedded one, or a file of a known architecture."""
    if reference.removesuffix("/draft") in EMBEDDED:
        return True
    path = Path(reference).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        return False
    return GgufFile(path).metadata.get("general.architecture") in ARCHITECTURES


def _load(
    reference: str, role: str, place: torch.device, dtype: torch.dtype, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Model, tokenizer and a hash that identifies the weights."""
    check_reference(reference, role)
    folder = checkpoint_folder(reference, progress)
    _say_loading(reference, progress)
    if folder is not None:
        embedded = EMBEDDED[reference.removesuffix("/draft")]
        sha256 = embedded.sha256 if folder.name == "target" else draft_sha256(embedded) or ""
        stored = sum(file.stat().st_size for file in weight_files(folder))
        check_memory(stored // STORED_DTYPE.itemsize * dtype.itemsize, reference)
        model, tokenizer = _checkpoint(folder, dtype)
        return model.to(place), tokenizer, sha256
    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        check_memory(_weights(path) * dtype.itemsize, reference)
        model, tokenizer = load_gguf(path, dtype)
        return model.to(place), tokenizer, fingerprint([path])
    if path.is_dir():
        stored = sum(file.stat().st_size for file in weight_files(path))
        check_memory(stored // torch.float32.itemsize * dtype.itemsize, reference)  # at least: it may be stored in less
        model, tokenizer = _checkpoint(path, dtype)
        return model.to(place), tokenizer, fingerprint(weight_files(path))
    model, tokenizer = _checkpoint(reference, dtype)
    return model.to(place), tokenizer, fingerprint(weight_files(reference))


def _say_loading(reference: str, progress: Progress | None) -> None:
    if progress is not None:
        progress(f"loading {reference}", 0.0)


def _weights(path: Path) -> int:
    """How many weights a GGUF file holds; 0 for a file that only transformers may be able to read."""
    try:
        return sum(tensor.rows * tensor.cols for tensor in GgufFile(path).tensors.values())
    except SelfJudgeError:
        return 0


def _load_blocks(
    reference: str,
    role: str,
    place: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """`_load` for a model whose weights stay in a GGUF file; its tokenizer is not read where it is known."""
    check_reference(reference, role)
    found = block_file(reference, progress)
    _say_loading(reference, progress)
    if found is not None:
        path, folder = found
        embedded = EMBEDDED[reference.removesuffix("/draft")]
        sha256 = embedded.sha256 if embedded.name == reference else draft_sha256(embedded) or ""
        if tokenizer is None:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    else:
        path = Path(reference).expanduser()
        if path.suffix != ".gguf" or not path.is_file():
            raise SelfJudgeError(f"`dtype` q4 needs a GGUF file or an embedded model, not {reference}")
        sha256 = fingerprint([path])
    model = model_of(path)
    check_memory(path.stat().st_size, reference)  # its blocks are copied in another order
    return model, gguf_tokenizer(path) if tokenizer is None else tokenizer, sha256


def _checkpoint(source: Path | str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with quiet():
            where = {} if isinstance(source, Path) else hub_options()
            model, loading = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, trust_remote_code=False, output_loading_info=True, **where
            )
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:  # transformers raises many kinds for a missing, gated or malformed checkpoint
        if isinstance(source, Path):
            raise SelfJudgeError(f"{source} is not a readable checkpoint: {first_line(error)}") from None
        raise unknown_model(source, unreachable() or first_line(error)) from None
    check_weights(model, loading, source)
    return model.eval(), tokenizer
