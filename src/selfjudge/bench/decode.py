"""Speed, side by side in one run: transformers plain, transformers assisted, our loop with γ = 0 and with drafts.

Every configuration answers the same prompts in every repeat; ratios are taken within a repeat and reported with their
spread, so that a machine that slows down slows down all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from selfjudge.bench.config import DecodeBenchConfig
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.text import generate
from selfjudge.engine.select import PairEngines
from selfjudge.models.pair import Pair, Prompt
from selfjudge.store import measured_on
from selfjudge.types import PHASES, Gamma, Generation, Notify, pooled_figures


@dataclass
class _Run:
    """One configuration: answers a prompt and says with which tokens; then what its last repeat gave."""

    name: str
    gamma: Gamma
    dtype: str
    """Of the target."""
    answer: Callable[[Prompt], tuple[tuple[int, ...], Generation | None]]
    judged: bool = False
    seconds: list[float] = field(default_factory=list)
    """Of each repeat."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [sum(map(len, self.tokens)) / s for s in self.seconds]


def bench_decode(
    pair: Pair,
    prompts: Sequence[Prompt],
    rules: Sequence[tuple[str, AcceptanceRule]] = (),
    config: DecodeBenchConfig | None = None,
    *,
    whole: Pair | None = None,
    notify: Notify = lambda stage, share: None,
) -> dict[str, Any]:
    """Time every configuration at batch 1; the result is what `selfjudge bench decode --json` prints.

    Ratios are to the first configuration, the `baseline`: transformers without draft, or our own loop without `peers`.
    transformers cannot run a pair in q4: it runs `whole`, the same pair in floats, and is left out where there is none.
    """
    config = config or DecodeBenchConfig()
    config.check()
    runs = _runs(pair, rules, config, pair if pair.dtype != "q4" else whole)
    _time(runs, prompts, config.repeats, notify, warm_all=pair.target.device.type == "cuda")
    firsts = {run.dtype: run for run in reversed(runs)}
    rows = [_row(run, runs[0], firsts[run.dtype]) for run in runs]
    return {
        **measured_on(),
        "pair": pair.name,
        "device": str(pair.target.device),
        "dtype": pair.dtype,
        "batch": 1,
        "prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "draft_dtype": PairEngines(pair).draft_dtype,
        "baseline": runs[0].name,
        "runs": rows,
        "best": _best(rows),
    }


def _runs(
    pair: Pair, rules: Sequence[tuple[str, AcceptanceRule]], config: DecodeBenchConfig, whole: Pair | None
) -> list[_Run]:
    """All configurations, the baseline first."""

    def ours(rule: AcceptanceRule, gamma: Gamma) -> Callable[[Prompt], tuple[tuple[int, ...], Generation]]:
        def answer(prompt: Prompt) -> tuple[tuple[int, ...], Generation]:
            (result,) = generate(
                pair, [prompt], rule, gamma=gamma, max_new_tokens=config.max_new_tokens, raw=config.raw, trace=False
            )
            return result.tokens, result

        return answer

    def theirs(whole: Pair, gamma: int = 0) -> _Run:
        limit, name = config.max_new_tokens, "transformers-assisted" if gamma else "transformers-plain"

        def answer(prompt: Prompt) -> tuple[tuple[int, ...], None]:
            return transformers_tokens(whole, prompt, limit, gamma=gamma, raw=config.raw), None

        return _Run(name, gamma, str(whole.target.dtype).removeprefix("torch."), answer)

    runs = []
    if config.peers and whole is not None:
        gammas = config.gammas if whole.draft_kind == "layers" else ()  # transformers cannot draft with a head
        runs += [theirs(whole, gamma) for gamma in (0, *gammas) if gamma != "auto"]
    runs += [_Run("selfjudge-plain", 0, pair.dtype, ours(EXACT, 0))]
    runs += [_Run("selfjudge-exact", g, pair.dtype, ours(EXACT, g)) for g in config.gammas]
    for name, rule in rules:
        judged = rule.judge is not None
        runs += [_Run(f"selfjudge-{name}", g, pair.dtype, ours(rule, g), judged) for g in config.gammas]
    return runs


def _time(runs: Sequence[_Run], prompts: Sequence[Prompt], repeats: int, notify: Notify, *, warm_all: bool) -> None:
    """Answer all prompts with every configuration, `repeats` times after a warm-up."""
    warm = prompts if warm_all else prompts[:1]  # on CUDA, every shape is recorded once
    for repeat in range(repeats + 1):  # repeat 0 warms up
        for number, run in enumerate(runs):
            turn = f"repeat {repeat}/{repeats}" if repeat else "warm-up"
            notify(f"{turn}: {run.name} γ={run.gamma}", number / len(runs))
            start = time.perf_counter()
            answers = [run.answer(prompt) for prompt in (prompts if repeat else warm)]
            if repeat:
                run.seconds.append(time.perf_counter() - start)
                run.tokens = [tokens for tokens, _ in answers]
                run.generations = [generation for _, generation in answers if generation is not None]


def _row(run: _Run, baseline: _Run, plain: _Run) -> dict[str, Any]:
    """The figures of one configuration: speed against the baseline, tokens against `plain`, which has its dtype."""
    ratios = [mine / theirs for mine, theirs in zip(run.speeds, baseline.speeds, strict=True)]
    same = sum(mine == theirs for mine, theirs in zip(run.tokens, plain.tokens, strict=True))
    phases = {p: sum(g.seconds[p] for g in run.generations) for p in PHASES if run.generations}
    return {
        "name": run.name,
        "gamma": run.gamma,
        "dtype": run.dtype,
        "tokens_per_second": statistics.mean(run.speeds),
        "ratio_to_plain": statistics.mean(ratios),
        "spread": [min(ratios), max(ratios)],
        **pooled_figures(run.generations),
        "identical_to_plain": same / len(run.tokens),
        "seconds": {"total": statistics.mean(run.seconds), **phases},
        "judge_time_share": _judge_time_share(run.generations) if run.judged else None,
    }


def _judge_time_share(generations: list[Generation]) -> float | None:
    """Share of the time of all phases that the judge took."""
    total = sum(g.seconds[p] for g in generations for p in PHASES)
    return sum(g.seconds["judge"] for g in generations) / total if total else None


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each name at its own best γ, and our `exact` against the peers at theirs."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["name"]
        if name not in best or row["tokens_per_second"] > best[name]["tokens_per_second"]:
            best[name] = row
    exact = best.get("selfjudge-exact")
    peers = ("transformers-plain", "transformers-assisted", "selfjudge-plain")
    ratio = {p: exact["tokens_per_second"] / best[p]["tokens_per_second"] for p in peers if exact and p in best}
    return {"gamma": {name: row["gamma"] for name, row in best.items()}, "exact_over": ratio}


@torch.inference_mode()
def transformers_tokens(
    pair: Pair, prompt: Prompt, max_new_tokens: int, *, gamma: int = 0, raw: bool = False
) -> tuple[int, ...]:
    """The same answer by `model.generate`: greedy, with the draft as assistant where γ > 0."""
    ids = torch.tensor([pair.encode(prompt, raw=raw)], device=pair.target.device)
    options: dict[str, Any] = {}
    if gamma:
        draft = pair.standalone_draft("assisted generation").causal_lm
        config = draft.generation_config
        config.num_assistant_tokens = gamma
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    output = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(pair.eos_ids),
        pad_token_id=min(pair.eos_ids, default=0),
        **options,
    )
    return tuple(output[0, ids.shape[1] :].tolist())
