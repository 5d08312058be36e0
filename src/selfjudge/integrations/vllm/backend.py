"""The target inside vLLM, whatever its size and however many devices it is spread over.
`label` has two engines in turn: the first generates the responses, the second returns hidden states (token pooling).
This process holds nothing of the target but the output matrix, which turns states into likelihoods as in `label.score`.
Branches share their prefix with the response through vLLM's prefix cache.

For `eval` and `tune` our worker decides, and each request names its rule; rules that need another γ or another judge
need another engine. An engine's step is a cycle: it gives a request accepted drafts and a token of the target. Drafts
accepted against the target's choice are told by their rank among its log-probabilities."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from selfjudge.decoding.plain import Response
from selfjudge.decoding.rule_parser import rule_text
from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import Answerer, Answers
from selfjudge.integrations.vllm.config import KEY, WORKER
from selfjudge.integrations.vllm.serve import PairEngine, speculation
from selfjudge.judge.model import Judge
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.catalogue import draft_for, head_folder
from selfjudge.models.checkpoint import check_finite, find_files, read_headers
from selfjudge.models.device import choose_device
from selfjudge.models.load import Draft, Target, check_tokenizers, choose_dtype
from selfjudge.models.pair import Pair, Prompt
from selfjudge.models.pull import checkpoint_folder, weights_sha256
from selfjudge.store import hub_options
from selfjudge.types import PHASES, Finish, Generation, Origin

CASES = 1 << 18  # tokens of responses that are scored together
POOLING = {  # options of the engine that returns hidden states
    "runner": "pooling",
    "convert": "embed",
    "pooler_config": {"task": "token_embed", "use_activation": False},
    "enable_prefix_caching": True,
}


def outline_pair(
    target: str, draft: str | None, *, device: str | None = None, dtype: str | None = None
) -> tuple[Pair, str]:
    """A pair whose target has no weights but its output matrix, and what vLLM has to load for it."""
    head_device = choose_device(device)
    kind = choose_dtype(dtype, head_device)
    name = target if draft is None else f"{target}+{draft}"
    draft = draft_for(target, draft)
    # a head runs inside vLLM alone; labelling, which needs it here, refuses it
    small = None if head_folder(draft) is not None else Pair.load(draft, device=device, dtype=kind, needs_draft=False)
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


class VllmAnswerer(Answerer):
    """Answers with vLLM. `engine_options` go to `vllm.LLM`; `judge` is the one that the first engine is to have."""

    engine = "vllm"
    one_gamma = True

    def __init__(
        self, pair: Pair, model: str, engine_options: Mapping[str, Any] | None = None, judge: Judge | None = None
    ) -> None:
        self.pair, self.judge = pair, judge
        self._engine = PairEngine(pair, model, engine_options)
        self._folder = tempfile.TemporaryDirectory(prefix="selfjudge-judge-")

    @property
    def device(self) -> str:
        return str(self.pair.target.get_output_embeddings().weight.device.type)

    def answer(
        self, prompts: Sequence[Prompt], run: RuleRun, max_new_tokens: int, seeds: Sequence[int],
        *, batch: int | None = None, trace: bool = False,
    ) -> Answers:  # fmt: skip
        """Greedy answers; seeds are for rules that vLLM does not take."""
        from vllm.sampling_params import RequestOutputKind

        rule, gamma = run.rule, run.gamma
        extra = {KEY: request_options(rule)}
        more = {"logprobs": 0, "output_kind": RequestOutputKind.DELTA, "extra_args": extra if gamma else None}
        engine = self._start(gamma, rule.judge).llm_engine
        encoded = self.pair.encode_many(prompts)
        eos_ids = self.pair.eos_ids
        params = [self._engine.sampling_params(ids, max_new_tokens, eos_ids, **more) for ids in encoded]
        steps: dict[str, list[EngineStep]] = {str(i): [] for i in range(len(encoded))}
        start = time.perf_counter()
        for name, ids, own in zip(steps, encoded, params, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, own)
        while engine.has_unfinished_requests():
            for output in engine.step():
                steps[output.request_id].append(read_step(output.outputs[0], lossless=rule.lossless))
        total = time.perf_counter() - start
        answers = [join_steps(self.pair, len(ids), own) for ids, own in zip(encoded, steps.values(), strict=True)]
        return answers, {**dict.fromkeys(PHASES, 0.0), "total": total}

    def _start(self, gamma: int, judge: Judge | None) -> Any:
        """The engine with this γ and judge."""
        self.judge = judge or self.judge
        folder = None if self.judge is None else Path(self._folder.name) / self.judge.digest()
        if self.judge is not None and folder is not None and not folder.is_dir():
            self.judge.save_pretrained(folder)
        # rules are timed on the same prompts: none may find them read already
        ours: dict[str, Any] = {"enable_prefix_caching": False}
        if gamma:
            settings = {"rule": "exact"} if folder is None else {"judge": str(folder)}
            ours["speculative_config"] = speculation(self.pair.target_id, self.pair.draft_id, gamma)
            ours |= {"worker_cls": WORKER, "additional_config": {KEY: settings}}
        return self._engine.start(ours)


EngineStep = tuple[list[int], list[Origin], str | None]  # tokens, their origins, why the answer ended with them


def read_step(step: Any, *, lossless: bool) -> EngineStep:
    """What an engine's step gave: accepted drafts, and the target's own token after them. Its log-probabilities, an
    object for each token, are not kept."""
    tokens = list(step.token_ids)
    ranks = [1 if lossless else step.logprobs[i][token].rank or 1 for i, token in enumerate(tokens)]
    origins: list[Origin] = ["judge" if rank > 1 else "draft" for rank in ranks]
    if origins and origins[-1] == "draft":  # a limit may cut a block after a judged draft
        origins[-1] = "target"
    return tokens, origins, step.finish_reason


def join_steps(pair: Pair, prompt_tokens: int, steps: Sequence[EngineStep]) -> Generation:
    """An answer from what an engine's steps gave."""
    tokens = [token for own, _, _ in steps for token in own]
    origins = [origin for _, own, _ in steps for origin in own]
    text = str(pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    cycles = max(0, sum(bool(own) for own, _, _ in steps) - 1)  # the first step reads the prompt
    finish: Finish = "eos" if any(reason == "stop" for _, _, reason in steps) else "length"
    return Generation(tuple(tokens), tuple(origins), text, cycles, finish, prompt_tokens)


def request_options(rule: AcceptanceRule) -> dict[str, Any]:
    """What a request says to be decoded with this rule (`config.RequestRules`)."""
    if rule.name == "sampling" or (isinstance(rule, Judged) and rule.base.name == "sampling"):
        raise SelfJudgeError(f"`backend` vllm answers greedily: rule {rule.name!r} with a temperature needs torch")
    if rule.lossless:
        return {"off": True}
    if not getattr(rule, "guard", True):
        raise SelfJudgeError(f"in vLLM special tokens are left to the target: write rule {rule.name!r} with guard=on")
    strict = {"strict_start": rule.strict_start or 0, "strict_code": bool(rule.strict_code)}
    return {"rule": rule_text(rule, "guard", *strict), **strict}
