"""A pair: target, draft and the tokenizer they share, checked once for compatibility; its head, written for vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError, expect, first_line
from selfjudge.judge.config import shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import check_export, draft_for, head_folder, shipped_draft
from selfjudge.models.device import limit_memory
from selfjudge.models.eagle import COMPACT, FORMAT, EagleHead, write_head
from selfjudge.models.load import Draft, Loader, Target
from selfjudge.models.pull import served_reference
from selfjudge.models.tokens import context_window, end_ids, special_ids
from selfjudge.store import fingerprint, home, locked
from selfjudge.types import Notify, ignore

Prompt = str | Sequence[Mapping[str, str]]  # a user message, or a whole conversation as chat messages


@dataclass(frozen=True)
class Pair:
    """A target, the draft that proposes tokens to it, and their tokenizer."""

    name: str
    target_model: Target
    draft_model: Draft | None
    tokenizer: PreTrainedTokenizerBase

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
        gpu_memory: str | None = None,
        progress: Notify = ignore,
    ) -> Pair:
        """Load by embedded name (its draft ships with it), hub id, checkpoint folder or GGUF file; a draft may be the
        folder of an EAGLE-3 head, ours or one in the format of speculators or of EAGLE's own code.
        The device is cuda, mps or cpu, the first that is there. The dtype is bfloat16 on cuda, float16 on mps; on cpu
        `q4` for embedded models and GGUF files, else float32, and the draft then runs in int8 if it can. `q4` leaves
        weights in their GGUF file, whose blocks the CPU engine runs. `int8` loads float32, which the CPU engine
        quantises. A dtype of floats holds for the draft too, unless `draft_dtype` is int8; `full_precision` chooses
        one, for labels, likelihoods and training. `gpu_memory` limits what this process takes of a CUDA device: a share
        (`0.9`) or a size (`8GB`). Without `needs_draft` the pair may lack a draft: it then decodes only plainly."""
        for name, reference in (("target", target), ("draft", draft or target)):
            expect(isinstance(reference, str), name, "an embedded name, a hub id or a path, as text", reference)
        loader = Loader.choose(target, device, dtype, draft_dtype, full_precision, progress)
        if gpu_memory is not None:
            limit_memory(loader.device, gpu_memory)
        name = target if draft is None else f"{target}+{draft}"
        target_model, tokenizer = loader.load_target(target)
        draft_model = None
        if needs_draft or draft is not None or shipped_draft(target) is not None:
            draft_model = loader.load_draft(draft_for(target, draft), target_model, tokenizer)
        return cls(name, target_model, draft_model, tokenizer)

    @property
    def target(self) -> PreTrainedModel:
        """The target as a model of transformers."""
        return self.target_model.module

    @property
    def draft(self) -> PreTrainedModel | EagleHead | None:
        """The draft as a model of transformers, or the module of a head that reads the target's states."""
        return None if self.draft_model is None else self.draft_model.module

    @property
    def target_id(self) -> str:
        return self.target_model.reference

    @property
    def draft_id(self) -> str:
        """The draft's reference; empty without a draft."""
        return "" if self.draft_model is None else self.draft_model.reference

    @property
    def target_sha256(self) -> str:
        return self.target_model.sha256

    @property
    def draft_sha256(self) -> str:
        return "" if self.draft_model is None else self.draft_model.sha256

    @cached_property
    def judge(self) -> Judge | None:
        """The judge that ships for this target, loaded on first use; None where none ships."""
        folder = shipped_judge(self.target_id)
        return None if folder is None else Judge.from_pretrained(folder)

    @property
    def dtype(self) -> str:
        """The target's weight format as tables print it."""
        return self.target_model.dtype_name

    @property
    def draft_kind(self) -> str | None:
        """`eagle3` for a head, `layers` for a model; None without a draft."""
        if self.draft_model is None or self.draft is None:
            return None
        return "layers" if self.draft_model.head is None else "eagle3"

    @property
    def window(self) -> int:
        """The most tokens, prompt and answer, that target and draft can hold."""
        own = context_window(self.target)
        return own if self.draft_model is None or self.draft is None else min(own, self.draft_model.window)

    def standalone_draft(self, purpose: str) -> Draft:
        """The draft, which must be a model of its own for this purpose."""
        if self.draft_model is None:
            raise SelfJudgeError(f"no draft ships for {self.target_id}: name one with `draft`")
        if self.draft_model.head is not None:
            raise SelfJudgeError(f"{purpose} needs a draft that is a model of its own; {self.draft_id} is a head")
        return self.draft_model

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

    def encode(self, prompt: Prompt, *, raw: bool = False, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt, through the chat template with generation prompt and `variables`, unless `raw`."""
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise SelfJudgeError(EMPTY_PROMPT)
        if raw:
            expect(isinstance(prompt, str), "prompt", "a text where it is raw", prompt)
            return self._tokenize([prompt])[0]  # type: ignore[list-item]
        return self.encode_many([prompt], variables)[0]

    def encode_many(self, prompts: Sequence[Prompt], variables: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Token ids of many prompts through the chat template, in one call of the tokenizer."""
        if not self.tokenizer.chat_template:
            raise SelfJudgeError(f"the tokenizer of {self.target_id} has no chat template: use `raw`")
        if not prompts:
            return []
        texts, options = [], {**(variables or {}), "add_generation_prompt": True, "tokenize": False}
        for prompt in prompts:
            messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            listed = isinstance(messages, Sequence) and all(
                isinstance(m, Mapping)
                and "role" in m
                and any(m.get(key) is not None for key in ("content", "tool_calls"))
                for m in messages
            )
            expect(listed, "prompt", "a text or a list of chat messages with `role` and `content`", prompt)
            try:
                texts.append(self.tokenizer.apply_chat_template([*map(dict, messages)], **options))
            except Exception as error:  # whatever the model's own template raises
                raise SelfJudgeError(f"the chat template does not take these messages: {first_line(error)}") from None
        return self._tokenize(texts, add_special_tokens=False)

    def _tokenize(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        try:
            return list(self.tokenizer(texts, **options)["input_ids"])
        except TypeError:  # the library says that it is no text
            raise SelfJudgeError("the prompt holds half a character, which text in UTF-8 does not") from None


def export_head(target: str, draft: str, out: Path, *, steps: int = 5, progress: Notify = ignore) -> None:
    """Write the head `draft` of a target as vLLM loads it, in place of what was exported to `out` before.
    Target and draft are named as for `Pair.load`; `steps` is how many tokens vLLM drafts by default."""
    check_export(draft, out)
    pair = Pair.load(target, draft, device="cpu", dtype="float16", progress=progress)
    assert isinstance(pair.draft, EagleHead)
    if len(set(layers := pair.draft.config.aux_layers)) < 3:
        raise SelfJudgeError(f"vLLM reads three layers that differ, and this head reads {layers}")
    write_head(pair.draft, out, steps=steps, verifier=served_reference(target))


def exported_head(target: str, draft: str, *, steps: int = 5) -> Path | None:
    """The folder of a head that vLLM loads: its own, or HOME/heads/KEY of a compact one, made once. Else None."""
    if (folder := head_folder(draft)) is None:
        return None
    if not (folder / COMPACT).is_file():
        return folder.resolve()
    made_from = f"{fingerprint([folder / COMPACT])} {served_reference(target)} {FORMAT}"
    out = home() / "heads" / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    with locked(out.with_suffix(".lock")):
        if not (out / "config.json").is_file():
            export_head(target, draft, out, steps=steps)
    return out
