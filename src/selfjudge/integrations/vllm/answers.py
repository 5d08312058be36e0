"""`eval` and `tune` with the target inside vLLM: our worker decides, each request names its rule.

One engine has one γ and one judge; rules that need neither another γ nor another judge share it. Each of the engine's
steps is a cycle: the tokens that it gives to a request are the accepted drafts and the target's own. Which drafts were
accepted against the target's choice is told by their rank among the target's own log-probabilities."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfjudge.decoding.rule_parser import rule_text
from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.execute import Answerer, Answers
from selfjudge.integrations.vllm.config import KEY, WORKER
from selfjudge.integrations.vllm.serve import PairEngine, speculation
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import PHASES, Generation, Origin


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

    def close(self) -> None:
        self._engine.close()

    def answer(
        self, prompts: Sequence[Prompt], rule: AcceptanceRule, gamma: int, max_new_tokens: int, seeds: Sequence[int]
    ) -> Answers:
        """Greedy answers; seeds are for rules that vLLM does not take."""
        from vllm.sampling_params import RequestOutputKind

        extra = {KEY: request_options(rule)}
        more = {"logprobs": 0, "output_kind": RequestOutputKind.DELTA, "extra_args": extra if gamma else None}
        engine = self._start(gamma, rule.judge).llm_engine
        encoded = self.pair.encode_many(prompts)
        eos_ids = self.pair.eos_ids
        params = [self._engine.sampling_params(ids, max_new_tokens, eos_ids, **more) for ids in encoded]
        answers = {str(i): PartialAnswer(len(ids)) for i, ids in enumerate(encoded)}
        start = time.perf_counter()
        for name, ids, own in zip(answers, encoded, params, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, own)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id].take(output.outputs[0], lossless=rule.lossless)
        total = time.perf_counter() - start
        generations = [answer.generation(self.pair) for answer in answers.values()]
        return generations, {**dict.fromkeys(PHASES, 0.0), "total": total}

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


@dataclass
class PartialAnswer:
    """An answer that is not complete yet."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    steps: int = 0
    finish: str | None = None

    def take(self, new: Any, *, lossless: bool) -> None:
        """What a step gave: accepted drafts, and the target's own token after them."""
        tokens = list(new.token_ids)
        for i, token in enumerate(tokens):
            origin: Origin = "target" if i + 1 == len(tokens) else "draft"
            if not lossless and (new.logprobs[i][token].rank or 1) > 1:  # a limit may cut a block after such a draft
                origin = "judge"
            self.tokens.append(token)
            self.origins.append(origin)
        self.steps += bool(tokens)
        self.finish = new.finish_reason or self.finish

    def generation(self, pair: Pair) -> Generation:
        text = str(pair.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return Generation(
            tuple(self.tokens),
            tuple(self.origins),
            text,
            max(0, self.steps - 1),  # the first step reads the prompt
            "eos" if self.finish == "stop" else "length",
            self.prompt_tokens,
        )


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
