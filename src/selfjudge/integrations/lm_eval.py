"""lm-evaluation-harness drives the decoder: `python -m selfjudge.integrations.lm_eval run --model selfjudge --tasks …`.

`--model_args pair=smollm2-135m,rule=judged:q0.9,gamma=10` (or `target=…,draft=…,judge=…`). What a task generates is decoded
with the rule; likelihoods are the target's own and no rule changes them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from selfjudge.decoding.rule_parser import parse_rule
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.likelihood import likelihoods
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.pair import Pair

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    raise SelfJudgeError("this needs lm-evaluation-harness: pip install lm-eval (or selfjudge[eval])") from None


@register_model("selfjudge")
class SelfJudgeLM(TemplateLM):
    """A target with its draft, under one acceptance rule."""

    backend = "causal"

    def __init__(
        self, pair: str = "smollm2-135m", target: str | None = None, draft: str | None = None, judge: str | None = None,
        rule: str = "exact", gamma: int = 5, max_gen_toks: int = 256, batch_size: int | str = 8, device: str | None = None,
        dtype: str | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        unknown.pop("max_batch_size", None)  # the harness always names it
        if unknown:
            raise SelfJudgeError(f"unknown model argument {', '.join(unknown)}")
        self.pair = Pair.load(target or pair, draft, device=device, dtype=dtype)
        self.spec, self.gamma, self.max_gen_toks = rule, int(gamma), int(max_gen_toks)
        self.batch = int(batch_size) if str(batch_size).isdigit() else 8
        known = EMBEDDED.get(self.pair.target_id)
        where = judge or (known.judge if known and rule.startswith("judge") else None)
        self.judge = Judge.from_pretrained(where) if where else None
        self._rule(None)  # a wrong one is refused before anything runs

    def _rule(self, temperature: float | None, top_p: float = 1.0, top_k: int = 0) -> AcceptanceRule:
        """The rule; a temperature makes `exact` the sampling rule and goes below a judged one."""
        sampling = Sampling(temperature, top_p, top_k) if temperature else None
        spec = "sampling" if sampling and self.spec == "exact" else self.spec
        return parse_rule(spec, special=self.pair.special_ids, sampling=sampling, judge=self.judge)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string or the limit; requests with the same options are decoded together."""
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            options = dict(request.args[1])
            until = options.pop("until", None) or []
            warmth = options.pop("temperature", None)
            sampled = bool(options.pop("do_sample", warmth is not None and float(warmth) > 0)) and warmth != 0
            key = (
                tuple([until] if isinstance(until, str) else until),
                int(options.pop("max_gen_toks", None) or options.pop("max_new_tokens", None) or self.max_gen_toks),
                float(1.0 if warmth is None else warmth) if sampled else None,
                float(options.pop("top_p", None) or 1.0), int(options.pop("top_k", None) or 0),
            )  # fmt: skip
            groups[key].append(index)
        texts: dict[int, str] = {}
        for (until, length, temperature, top_p, top_k), members in groups.items():
            rule = self._rule(temperature, top_p, top_k) if temperature else self._rule(None)
            answers = generate(
                self.pair, [self._begun(requests[i].args[0]) for i in members], rule, gamma=self.gamma, max_new_tokens=length,
                stop=[s for s in until if s], batch=self.batch, raw=True,
            )  # fmt: skip
            for i, answer in zip(members, answers, strict=True):
                texts[i] = answer.text
                self.cache_hook.add_partial("generate_until", requests[i].args, answer.text)
        return [texts[i] for i in range(len(requests))]

    def _begun(self, text: str) -> str:
        """A text without the token that the tokenizer puts in front by itself: a chat template may have written it."""
        bos = self.pair.tokenizer.bos_token
        doubled = (
            bos and text.startswith(bos) and self.pair.tokenizer("").input_ids[:1] == [self.pair.tokenizer.bos_token_id]
        )
        return text.removeprefix(bos) if doubled else text

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        seen = likelihoods(self.pair, [(context, answer) for _, context, answer in requests])
        return [
            (sum(one.log_p), one.choices == list(answer)) for one, (_, _, answer) in zip(seen, requests, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        return [sum(one.log_p) for one in likelihoods(self.pair, [([self.prefix_token_id], ids) for ids in encoded])]

    @property
    def eot_token_id(self) -> int:
        return int(self.pair.tokenizer.eos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids: list[int] = self.pair.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))
        return ids

    @property
    def tokenizer_name(self) -> str:
        return self.pair.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return str(self.pair.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.pair.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )


if __name__ == "__main__":
    import sys

    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SelfJudgeError as error:
        sys.exit(f"selfjudge: {error}")
