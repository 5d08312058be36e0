"""lm-evaluation-harness drives the decoder: `python -m selfjudge.integrations.lm_eval run --model selfjudge --tasks …`.

`--model_args pair=smollm2-135m,rule=judged:q0.9,gamma=10` (or `target=…,draft=…,judge=…`). What a task generates is
decoded with the rule; likelihoods are the target's own under every rule, as the harness computes them."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import Any

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import AcceptanceRule, Exact
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.types import default_gamma

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError:
    raise SelfJudgeError("this needs lm-evaluation-harness: pip install lm-eval") from None


@register_model("selfjudge")
class SelfJudgeLM(HFLM):
    """A target with its draft, under one acceptance rule."""

    def __init__(
        self,
        pair: str = "smollm2-135m",
        *,
        rule: str | None = None,
        gamma: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 8,
        **options: Any,
    ) -> None:
        """`options`: target, draft and judge by name, device and dtype; the harness hands all of them over as text."""
        options.pop("max_batch_size", None)  # the harness always gives it
        target, draft, judge = (options.pop(name, None) for name in ("target", "draft", "judge"))
        device, dtype = options.pop("device", None), options.pop("dtype", None)
        if options:
            raise SelfJudgeError(f"unknown model argument {', '.join(options)}")
        self.pair = Pair.load(target or pair, draft, device=device, dtype=dtype, full_precision=True)
        self.request, self.most = RuleRequest(rule, judge), int(max_gen_toks)
        self.gamma = default_gamma(self.pair.target.device.type) if gamma is None else int(gamma)
        self.batch = int(batch_size) if str(batch_size).isdigit() else 8
        self._resolve(None)  # a wrong rule is refused before anything runs
        tokenizer = copy.deepcopy(self.pair.tokenizer)  # the harness gives its own a token to pad with
        super().__init__(
            self.pair.target, backend="causal", tokenizer=tokenizer, batch_size=self.batch, softmax_dtype="float32"
        )

    def _resolve(self, sampling: Sampling | None) -> AcceptanceRule:
        """The rule; with a temperature `sampling` takes the place of `exact`."""
        request = replace(self.request, rule=None) if self.request.kind is Exact else self.request
        return request.resolve(self.pair, sampling=sampling, bare=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string or the limit; requests with the same options are decoded together."""
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[self._options(dict(request.args[1]))].append(index)
        texts: dict[int, str] = {}
        for (until, length, sampling), members in groups.items():
            answers = generate(
                self.pair,
                [self._without_bos(requests[i].args[0]) for i in members],
                self._resolve(sampling),
                gamma=self.gamma,
                max_new_tokens=length,
                stop=list(until),
                batch=self.batch,
                raw=True,
                trace=False,
            )
            for i, answer in zip(members, answers, strict=True):
                texts[i] = answer.text
                self.cache_hook.add_partial("generate_until", requests[i].args, answer.text)
        return [texts[i] for i in range(len(requests))]

    def _options(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling | None]:
        """Stop strings, length and sampling (None: greedy) of a request, as the harness names them."""
        until = options.get("until") or []
        given = options.get("temperature")
        temperature = 1.0 if given is None else float(given)
        sampling = None
        if options.get("do_sample", given is not None) and temperature > 0:
            sampling = Sampling(temperature, float(options.get("top_p") or 1.0), int(options.get("top_k") or 0))
        stops = tuple(filter(None, [until] if isinstance(until, str) else until))
        return stops, int(options.get("max_gen_toks") or options.get("max_new_tokens") or self.most), sampling

    def _without_bos(self, text: str) -> str:
        """A text without the first token that the tokenizer adds by itself: a chat template may have written it."""
        tokenizer = self.pair.tokenizer
        adds_bos = tokenizer.bos_token and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        return text.removeprefix(tokenizer.bos_token) if adds_bos else text


if __name__ == "__main__":
    import sys

    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SelfJudgeError as error:
        sys.exit(f"selfjudge: {error}")
