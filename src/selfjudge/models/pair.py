"""A pair: target, draft and the tokenizer they share, checked once for compatibility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError, first_line
from selfjudge.models.catalogue import EMBEDDED, check_reference
from selfjudge.models.convert import load_gguf, quiet
from selfjudge.models.pull import Progress, draft_sha256, pull
from selfjudge.models.tokens import end_ids, special_ids
from selfjudge.store import fingerprint, weight_files

Prompt = str | Sequence[Mapping[str, str]]
"""A user message, or a whole conversation as chat messages."""

_PROBE = "It's 3.14% of\tthe naïve façade — 東京 🙂\n  def f(x): return x**2"


@dataclass(frozen=True)
class Pair:
    """Two causal LMs of transformers with one vocabulary."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    target_id: str
    draft_id: str
    target_sha256: str = ""
    draft_sha256: str = ""
    int8: bool = False
    """Whether the engines shall use weights quantised to int8 (CPU engine)."""
    draft_int8: bool = False
    """Whether the draft alone shall use such weights, under every rule; under lossless rules it does so anyway."""

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
        progress: Progress | None = None,
    ) -> Pair:
        """Load by embedded name (which brings its draft), hub id, checkpoint folder or GGUF file.

        The device is cuda, mps or cpu, whichever is there first; the dtype bfloat16 on cuda, float16 on mps, float32
        on cpu. The dtype `int8` loads float32 and lets the CPU engine quantise; as `draft_dtype`, the draft alone. Without
        `needs_draft` the pair may lack a draft and serves plain decoding alone.
        """
        place = chosen_device(device)
        int8 = dtype == "int8"
        if draft_dtype not in (None, "int8"):
            raise SelfJudgeError(f"a draft has the target's dtype, or int8 on a cpu, not {draft_dtype!r}")
        if (int8 or draft_dtype) and place.type != "cpu":
            raise SelfJudgeError(f"{'dtype' if int8 else 'draft dtype'} int8 is for the cpu, not for {place.type}")
        if draft_dtype and not int8 and chosen_dtype(dtype, place) != torch.float32:
            raise SelfJudgeError("draft dtype int8 goes with a target in float32")
        kind = torch.float32 if int8 else chosen_dtype(dtype, place)
        name = target if draft is None else f"{target}+{draft}"
        model, tokenizer, target_sha256 = _load(target, "target", place, kind, progress)
        if draft is None and target in EMBEDDED and EMBEDDED[target].draft is not None:
            draft = f"{target}/draft"
        if draft is None:
            if needs_draft:
                raise SelfJudgeError(f"{target} brings no draft of its own: name one with --draft")
            return cls(name, model, None, tokenizer, target, "", target_sha256, int8=int8)
        small, small_tokenizer, small_sha256 = _load(draft, "draft", place, kind, progress)
        check_tokenizers(tokenizer, small_tokenizer, target, draft)
        for which, one in ((target, model), (draft, small)):
            rows = one.get_input_embeddings().weight.shape[0]
            if rows < len(tokenizer):
                raise SelfJudgeError(f"{which} embeds {rows} tokens and its tokenizer has {len(tokenizer)}")
        return cls(
            name, model, small, tokenizer, target, draft, target_sha256, small_sha256, int8, draft_dtype == "int8"
        )

    @property
    def dtype(self) -> str:
        """The name of the target's weight format as tables print it."""
        return "int8" if self.int8 else str(self.target.dtype).removeprefix("torch.")

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
        """Token ids of many prompts through the chat template; the tokenizer takes them all at once."""
        if not self.tokenizer.chat_template:
            raise SelfJudgeError(f"the tokenizer of {self.target_id} has no chat template: use --raw")
        if not prompts:
            return []
        texts = []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
            try:
                texts.append(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            except Exception as error:  # whatever the model's own template raises
                raise SelfJudgeError(f"the chat template does not take these messages: {first_line(error)}") from None
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found


def check_tokenizers(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, target: str, draft: str) -> None:
    """Refuse tokenizers that differ, naming the first tokens that do."""
    left = {index: token for token, index in one.get_vocab().items()}
    right = {index: token for token, index in other.get_vocab().items()}
    differing = [i for i in sorted(left.keys() | right.keys()) if left.get(i) != right.get(i)]
    if differing:
        shown = "; ".join(f"{i}: {left.get(i)!r} and {right.get(i)!r}" for i in differing[:3])
        raise SelfJudgeError(
            f"the tokenizers of {target} and {draft} differ in {len(differing)} tokens ({shown}): a pair must share one"
        )
    if one(_PROBE)["input_ids"] != other(_PROBE)["input_ids"]:
        raise SelfJudgeError(
            f"the tokenizers of {target} and {draft} have one vocabulary but split text differently: a pair must share one"
        )


def chosen_device(name: str | None) -> torch.device:
    """The device of that name, or the best there is."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        place = torch.device(name)
        torch.empty(1, device=place)
        if place.type == "cuda" and place.index is not None:
            torch.cuda.set_device(place)  # kernels are launched on the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SelfJudgeError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return place


def chosen_dtype(dtype: str | torch.dtype | None, place: torch.device) -> torch.dtype:
    """The dtype of that name, or the one that suits the device."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return {"cuda": torch.bfloat16, "mps": torch.float16}.get(place.type, torch.float32)
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise SelfJudgeError(f"unknown dtype {dtype!r}; dtypes are: {', '.join(known)}, int8 (cpu)")
    return known[dtype]


def _load(
    reference: str, role: str, place: torch.device, dtype: torch.dtype, progress: Progress | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Model, tokenizer and a hash that identifies the weights."""
    check_reference(reference, role)
    name = reference.removesuffix("/draft")
    if name in EMBEDDED:
        wants_draft = reference.endswith("/draft")
        folder = pull(name, progress, verify=False) / ("draft" if wants_draft else "target")
        identity = (draft_sha256(EMBEDDED[name]) or "") if wants_draft else EMBEDDED[name].sha256
        model, tokenizer = _checkpoint(folder, dtype)
        return model.to(place), tokenizer, identity
    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        model, tokenizer = load_gguf(path, dtype)
        return model.to(place), tokenizer, fingerprint([path])
    if path.is_dir():
        model, tokenizer = _checkpoint(path, dtype)
        return model.to(place), tokenizer, fingerprint(weight_files(path))
    model, tokenizer = _checkpoint(reference, dtype)
    return model.to(place), tokenizer, fingerprint(weight_files(reference))


def _checkpoint(source: Path | str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises many kinds for a missing, gated or malformed checkpoint
        if isinstance(source, Path):
            raise SelfJudgeError(f"{source} is no readable checkpoint: {first_line(error)}") from None
        raise SelfJudgeError(
            f"unknown model {source!r}: no embedded model ({', '.join(EMBEDDED)}), file or folder of that name,"
            f" and the hub did not give it ({first_line(error)})"
        ) from None
    return model.eval(), tokenizer
