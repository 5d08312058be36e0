"""Labelling with the target inside vLLM: whatever vLLM can run and spread over devices can be labelled with.

Two engines, one after the other: one that generates the responses, and one that returns hidden states (token pooling). Everything
else follows from the states as it does in `label.score`: the output matrix, which is all this process holds of the target, turns
them into likelihoods. Branches share their prefix with the response through vLLM's prefix cache.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from selfjudge.decoding.plain import Answer
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.pair import Pair, check_tokenizers, chosen_device, chosen_dtype
from selfjudge.models.pull import pull
from selfjudge.store import fingerprint, read_json, weight_files

CASES = 1 << 18  # tokens of responses that are scored together


def outlined(
    target: str, draft: str | None, *, device: str | None = None, dtype: str | None = None
) -> tuple[Pair, str]:
    """A pair whose target is an outline, with no weights but its output matrix, and what vLLM is to load for it."""
    place = chosen_device(device)
    kind = chosen_dtype(dtype, place)
    embedded = EMBEDDED.get(target)
    name = target if draft is None else f"{target}+{draft}"
    if draft is None and embedded is not None and embedded.draft is not None:
        draft = f"{target}/draft"
    if draft is None:
        raise SelfJudgeError(f"{target} brings no draft of its own: name one with --draft")
    small = Pair.load(draft, device=device, dtype=kind, needs_draft=False)
    source = target if embedded is None else str(pull(target, verify=False) / "target")
    try:
        model = _outline(source, kind, place)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise SelfJudgeError(
            f"{source} is no checkpoint of safetensors that can be read: {first_line(error)}"
        ) from None
    check_tokenizers(tokenizer, small.tokenizer, target, draft)
    known = fingerprint(weight_files(source)) if embedded is None else embedded.sha256
    return Pair(name, model, small.target, tokenizer, target, draft, known, small.target_sha256), source


def _outline(source: str, dtype: torch.dtype, place: torch.device) -> PreTrainedModel:
    """The model on no device, its output matrix on that one."""
    from safetensors import safe_open

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with contextlib.suppress(OSError):  # without one, the model's configuration names the end tokens
        model.generation_config = GenerationConfig.from_pretrained(source)
    head = model.get_output_embeddings()
    name = next(name for name, tensor in model.named_parameters() if tensor is head.weight)
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
    index = folder / "model.safetensors.index.json"
    file = read_json(index)["weight_map"][name] if index.is_file() else "model.safetensors"
    with safe_open(folder / file, "pt") as tensors:
        head.weight = torch.nn.Parameter(tensors.get_tensor(name).to(place, dtype), requires_grad=False)
    return model.eval()


class Vllm:
    """The backend. `options` go to `vllm.LLM` (such as tensor_parallel_size); one engine lives at a time."""

    def __init__(self, pair: Pair, model: str, options: Mapping[str, Any] | None = None) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # this process has threads already
        self.pair, self.model, self.options = pair, model, dict(options or {})
        self._kind, self._llm = "", None

    def engine(self, kind: str) -> Any:
        """The engine that generates, or the one that pools; the other is shut down."""
        if self._kind != kind:
            self.close()
            from vllm import LLM

            pooled = {
                "runner": "pooling", "convert": "embed", "pooler_config": {"task": "token_embed", "use_activation": False},
                "enable_prefix_caching": True,
            }  # fmt: skip
            self._llm = LLM(
                **{"model": self.model, "dtype": self.pair.dtype, **(pooled if kind == "pool" else {}), **self.options}
            )
            self._kind = kind
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._kind, self._llm = "", None
        gc.collect()

    def respond(
        self, prompts: Sequence[Sequence[int]], *, eos_ids: Collection[int], max_new_tokens: int, batch: int
    ) -> Iterator[Answer]:
        from vllm import SamplingParams

        llm = self.engine("generate")
        window = llm.llm_engine.model_config.max_model_len
        if long := [len(prompt) for prompt in prompts if len(prompt) >= window]:
            raise SelfJudgeError(f"a prompt has {long[0]} tokens and vLLM's max_model_len is {window}: raise it")
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [
                SamplingParams(
                    temperature=0, max_tokens=min(max_new_tokens, window - len(prompt)), stop_token_ids=sorted(eos_ids),
                    detokenize=False,
                )
                for prompt in prompts
            ],
            use_tqdm=False,
        )  # fmt: skip
        for i, output in enumerate(outputs):
            (one,) = output.outputs
            yield i, list(one.token_ids), "eos" if one.finish_reason == "stop" else "length"

    def scorer(self, *, suffix_length: int, lookahead: int) -> Scorer:
        return StateScorer(self, suffix_length=suffix_length, lookahead=lookahead)

    def states(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Tensor]:
        """The states at the last `counts` tokens of each sequence, after the final norm."""
        from vllm import PoolingParams

        llm = self.engine("pool")

        def asked(which: Sequence[int], whole: bool) -> list[Tensor]:
            outputs = llm.encode(
                [{"prompt_token_ids": list(sequences[i])} for i in which],
                pooling_params=PoolingParams(skip_reading_prefix_cache=whole), pooling_task="token_embed", use_tqdm=False,
            )  # fmt: skip
            return [output.outputs.data for output in outputs]

        found = dict(enumerate(asked(range(len(sequences)), whole=False)))  # of tokens that were not in the cache
        short = [i for i, count in enumerate(counts) if len(found[i]) < count]
        found |= zip(short, asked(short, whole=True), strict=True) if short else []
        head = self.pair.target.get_output_embeddings().weight
        return [found[i][-count:].to(head.device, head.dtype) for i, count in enumerate(counts)]


class StateScorer(Scorer):
    """Scores from states that come from elsewhere."""

    def __init__(self, backend: Vllm, *, suffix_length: int, lookahead: int) -> None:
        super().__init__(backend.pair.target, suffix_length=suffix_length, lookahead=lookahead)
        self.backend = backend
        self.device = backend.pair.target.get_output_embeddings().weight.device
        self._most = CASES

    @torch.no_grad()
    def _batch(self, cases: Sequence[Case]) -> list[Scores]:
        whole = [[*case.prompt, *case.response] for case in cases]
        made = [
            self._own(case, states)
            for case, states in zip(
                cases, self.backend.states(whole, [len(case.response) + 1 for case in cases]), strict=True
            )
        ]
        branches = [
            branch
            for row, case in enumerate(cases)
            for number in range(len(case.places))
            for branch in self._branches(row, number, case)
        ]
        self.tokens += sum(map(len, whole)) + sum(len(branch.tokens) for branch in branches)
        self.padded = self.tokens
        if branches:
            states = self.backend.states(
                [[*whole[branch.case][: branch.start], *branch.tokens] for branch in branches],
                [len(branch.tokens) for branch in branches],
            )
            self._told(branches, torch.cat(states), [0, *accumulate(map(len, states))][:-1], made)
        return made


def parsed(text: str) -> dict[str, Any]:
    """The engine options of the command line."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SelfJudgeError(
            f"--engine-options is no JSON ({first_line(error)}): such as '{{\"tensor_parallel_size\": 2}}'"
        ) from None
    if not isinstance(found, dict):
        raise SelfJudgeError("--engine-options is a JSON object, such as '{\"tensor_parallel_size\": 2}'")
    return found
