"""Labelling with the target inside vLLM, whatever its size and however many devices it is spread over.

Two engines, one after the other: the first generates the responses, the second returns hidden states (token pooling).
The output matrix, all that this process holds of the target, turns states into likelihoods as in `label.score`.
Branches share their prefix with the response through vLLM's prefix cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from selfjudge.decoding.plain import Response
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.integrations.vllm.serve import PairEngine
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.catalogue import draft_for, head_folder
from selfjudge.models.checkpoint import find_files, read_headers
from selfjudge.models.device import choose_device
from selfjudge.models.load import check_tokenizers, choose_dtype
from selfjudge.models.loaded import Draft, Target
from selfjudge.models.pair import Pair
from selfjudge.models.pull import checkpoint_folder, weights_sha256
from selfjudge.models.weights import check_finite
from selfjudge.store import hub_options

CASES = 1 << 18  # tokens of responses that are scored together
POOLING = {
    "runner": "pooling",
    "convert": "embed",
    "pooler_config": {"task": "token_embed", "use_activation": False},
    "enable_prefix_caching": True,
}
"""Options of the engine that returns hidden states."""


def outline_pair(
    target: str, draft: str | None, *, device: str | None = None, dtype: str | None = None
) -> tuple[Pair, str]:
    """A pair whose target has no weights but its output matrix, and what vLLM has to load for it."""
    head_device = choose_device(device)
    kind = choose_dtype(dtype, head_device)
    name = target if draft is None else f"{target}+{draft}"
    draft = draft_for(target, draft)
    if head_folder(draft) is not None:
        small: Pair | None = None  # a head runs inside vLLM alone; labelling, which needs it here, refuses it
    else:
        small = Pair.load(draft, device=device, dtype=kind, needs_draft=False)
    source = str(checkpoint_folder(target) or target)
    try:
        model = _outline(source, kind, head_device)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise SelfJudgeError(f"{source} is not a readable checkpoint of safetensors: {first_line(error)}") from None
    if small is not None:
        check_tokenizers(tokenizer, small.tokenizer, target, draft)
    target_model = Target(model, target, weights_sha256(target))
    draft_model = Draft(None if small is None else small.target, draft, weights_sha256(draft))
    return Pair(name, target_model, draft_model, tokenizer), source


def _outline(source: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on the meta device, its output matrix on `device`."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    with contextlib.suppress(OSError):  # without one, the model's config names the end tokens
        model.generation_config = GenerationConfig.from_pretrained(source)
    head = model.get_output_embeddings()
    name = next(name for name, tensor in model.named_parameters() if tensor is head.weight)
    files = find_files(source, {} if Path(source).is_dir() else hub_options())
    if files is None:
        raise OSError("it has no safetensors files")
    weight = read_headers(files, device)[name].to(dtype=dtype)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    check_finite([(name, head.weight)], source)
    return model.eval()


class VllmBackend:
    """Labels with vLLM. `options` go to `vllm.LLM` (such as tensor_parallel_size); one engine lives at a time."""

    def __init__(self, pair: Pair, model: str, options: Mapping[str, Any] | None = None) -> None:
        self.pair = pair
        self._engine = PairEngine(pair, model, options)
        pair.target_model.remote = self

    def close(self) -> None:
        self._engine.close()

    def respond(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        eos_ids: Collection[int],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        notify: Callable[[int], None] | None = None,
    ) -> Iterator[Response]:
        """As `decoding.plain.respond`, all at once: vLLM makes the batches. It has random numbers of its own."""
        if not prompts:
            return
        llm = self._engine.start({})
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        own_seeds: Sequence[int | None] = seeds or [None] * len(prompts)
        drawn = {} if sampling is None else asdict(sampling)
        params = [
            self._engine.sampling_params(prompt, limit, eos_ids, seed=seed, **drawn)
            for prompt, limit, seed in zip(prompts, limits, own_seeds, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        for i, output in enumerate(outputs):
            (completion,) = output.outputs
            if notify:
                notify(len(completion.token_ids))
            yield i, list(completion.token_ids), "eos" if completion.finish_reason == "stop" else "length"

    def scorer(self, suffix_length: int) -> Scorer:
        return StateScorer(self, suffix_length)

    def states(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Tensor]:
        """The states at the last `counts` tokens of each sequence, after the final norm."""
        if not sequences:
            return []
        from vllm import PoolingParams

        llm = self._engine.start(POOLING)

        def encode(indices: Sequence[int], whole: bool) -> list[Tensor]:
            outputs = llm.encode(
                [{"prompt_token_ids": list(sequences[i])} for i in indices],
                pooling_params=PoolingParams(skip_reading_prefix_cache=whole),
                pooling_task="token_embed",
                use_tqdm=False,
            )
            return [output.outputs.data for output in outputs]

        states = encode(range(len(sequences)), whole=False)  # of tokens that were not in the cache
        short = [i for i, count in enumerate(counts) if len(states[i]) < count]
        for i, complete in zip(short, encode(short, whole=True) if short else [], strict=True):
            states[i] = complete
        head = self.pair.target.get_output_embeddings().weight
        return [state[-count:].to(head.device, head.dtype) for state, count in zip(states, counts, strict=True)]


class StateScorer(Scorer):
    """Scores from the states that vLLM returns."""

    def __init__(self, backend: VllmBackend, suffix_length: int) -> None:
        super().__init__(backend.pair.target, suffix_length=suffix_length)
        self.backend = backend
        self.device = backend.pair.target.get_output_embeddings().weight.device
        self._most = CASES

    @torch.no_grad()
    def _batch(self, cases: Sequence[Case]) -> list[Scores]:
        whole = [[*case.prompt, *case.response] for case in cases]
        response_states = self.backend.states(whole, [len(case.response) + 1 for case in cases])
        scores = [self._score_response(case, states) for case, states in zip(cases, response_states, strict=True)]
        branches = self._branches(cases)
        self.tokens += sum(map(len, whole)) + sum(len(branch.tokens) for branch in branches)
        if branches:
            states = self.backend.states(
                [[*whole[branch.case][: branch.start], *branch.tokens] for branch in branches],
                [len(branch.tokens) for branch in branches],
            )
            self._fill_in(branches, torch.cat(states), [0, *accumulate(map(len, states))][:-1], scores)
        return scores
