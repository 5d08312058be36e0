"""Speed, side by side in one run: transformers plain, transformers assisted, our loop with γ = 0 and with drafts.
Every configuration answers the same prompts in every repeat; ratios are taken within a repeat, so that a machine that
slows down slows down all of them, and reported with their spread."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from selfjudge.bench.config import DecodeBenchConfig
from selfjudge.bench.turns import Turns
from selfjudge.decoding.costs import CostTable
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.text import generate
from selfjudge.engine.select import PairEngines
from selfjudge.models.pair import Pair, Prompt
from selfjudge.store import measured_on
from selfjudge.types import PHASES, Gamma, Generation, Notify, ignore, pooled_figures


@dataclass(eq=False)
class TimedRun:
    """A configuration that is timed, and what its repeats gave."""

    name: str
    pair: Pair
    gamma: Gamma
    rule: AcceptanceRule | None  # the rule of our loop; None is transformers
    seconds: list[float] = field(default_factory=list)  # of each repeat
    tokens: list[tuple[int, ...]] = field(default_factory=list)  # the answers of the last repeat
    generations: list[Generation] = field(default_factory=list)  # the same answers as our loop describes them

    def __str__(self) -> str:
        return f"{self.name} γ={self.gamma}"

    @property
    def dtype(self) -> str:
        """Format of the target's weights."""
        return self.pair.dtype if self.rule is not None else str(self.pair.target.dtype).removeprefix("torch.")

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [sum(map(len, self.tokens)) / s for s in self.seconds]

    def answer(self, prompts: Sequence[Prompt], config: DecodeBenchConfig) -> None:
        """Answer the prompts one by one and keep the answers."""
        limit = config.max_new_tokens
        if self.rule is None:
            assert self.gamma != "auto"
            self.tokens = [transformers_tokens(self.pair, p, limit, gamma=self.gamma) for p in prompts]
            return
        options: dict[str, Any] = {"gamma": self.gamma, "max_new_tokens": limit, "trace": False}
        self.generations = [generate(self.pair, [prompt], self.rule, **options)[0] for prompt in prompts]
        self.tokens = [generation.tokens for generation in self.generations]


def bench_decode(
    pair: Pair,
    prompts: Sequence[Prompt],
    config: DecodeBenchConfig,
    rules: Mapping[str, AcceptanceRule] | None = None,
    *,
    full: Pair | None = None,
    notify: Notify = ignore,
) -> dict[str, Any]:
    """Time every configuration at batch 1; the result is what `selfjudge bench decode --json` prints.
    Ratios are to the first configuration, the `baseline`: transformers without draft, or our own loop without `peers`.
    transformers cannot run q4: it runs `full`, the same pair in floats, and is left out where there is none."""
    runs = _plan(pair, pair if pair.dtype != "q4" else full, rules or {}, config)
    warm = prompts if pair.target.device.type == "cuda" else prompts[:1]  # on CUDA, every shape is captured once
    turns = Turns(runs, config.repeats, notify)
    for _, run in turns.run(lambda _, run: run.answer(prompts, config), lambda run: run.answer(warm, config), runs):
        run.seconds = turns.seconds[run]
    busy = turns.load.describe(r.seconds for r in runs if r.gamma != "auto")  # which may choose another γ each time
    firsts = {run.dtype: run for run in reversed(runs)}
    rows = [_row(run, runs[0], firsts[run.dtype]) for run in runs]
    # each name at its own best γ, and our `exact` against the peers at theirs
    best = {row["name"]: row for row in sorted(rows, key=lambda row: row["tokens_per_second"])}
    exact = best.get("selfjudge-exact")  # without any γ there is none
    peers = ("transformers-plain", "transformers-assisted", "selfjudge-plain")
    ratio = {p: exact["tokens_per_second"] / best[p]["tokens_per_second"] for p in peers if exact and p in best}
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
        "busy": busy,
        "runs": rows,
        "costs": CostTable(PairEngines(pair).shape()).cycles,
        "best": None if busy else {"gamma": {name: row["gamma"] for name, row in best.items()}, "exact_over": ratio},
    }


def _plan(
    pair: Pair, peer: Pair | None, rules: Mapping[str, AcceptanceRule], config: DecodeBenchConfig
) -> list[TimedRun]:
    """All configurations, the baseline first; transformers runs `peer`."""
    runs = []
    if config.peers and peer is not None:
        gammas = config.gammas if peer.draft_kind == "layers" else ()  # transformers cannot draft with a head
        runs += [TimedRun("transformers-plain", peer, 0, None)]
        runs += [TimedRun("transformers-assisted", peer, g, None) for g in gammas if g != "auto"]
    runs += [TimedRun("selfjudge-plain", pair, 0, EXACT)]
    for name, rule in {"exact": EXACT, **rules}.items():
        runs += [TimedRun(f"selfjudge-{name}", pair, g, rule) for g in config.gammas]
    return runs


def _row(run: TimedRun, baseline: TimedRun, plain: TimedRun) -> dict[str, Any]:
    """The figures of one configuration: speed against the baseline, tokens against `plain`, which has its dtype."""
    ratios = [mine / theirs for mine, theirs in zip(run.speeds, baseline.speeds, strict=True)]
    same = sum(mine == theirs for mine, theirs in zip(run.tokens, plain.tokens, strict=True))
    phases = {p: sum(g.seconds[p] for g in run.generations) for p in PHASES if run.generations}
    judged = run.rule is not None and run.rule.judge is not None
    return {
        "name": run.name,
        "gamma": run.gamma,
        "dtype": run.dtype,
        "tokens_per_second": statistics.mean(run.speeds),
        "ratio_to_plain": statistics.mean(ratios),
        "spread": [min(ratios), max(ratios)] if len(ratios) > 1 else None,
        **pooled_figures(run.generations),
        "identical_to_plain": same / len(run.tokens),
        "seconds": {"total": statistics.mean(run.seconds), **phases},
        "judge_time_share": phases["judge"] / sum(phases.values()) if judged else None,
    }


@torch.inference_mode()
def transformers_tokens(pair: Pair, prompt: Prompt, max_new_tokens: int, *, gamma: int = 0) -> tuple[int, ...]:
    """The greedy answer of transformers' `model.generate`, with the draft as assistant where γ > 0."""
    ids = torch.tensor([pair.encode(prompt)], device=pair.target.device)
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
