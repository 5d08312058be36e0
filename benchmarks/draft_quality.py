"""How good a draft is: `python benchmarks/draft_quality.py --draft DIR --prompts gsm8k dolly --data DATA --out FILE`.

Says for each kind of prompt how often the draft agrees with the target, the accepted length m, and the speed that these
predict: m tokens for γ draft steps and one pass of γ+1 tokens, as they were timed alone. What decoding makes of it is
timed beside it, on a few of the prompts.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import read_task_prompts, say
from pass_cost import head_seconds, pass_seconds

from selfjudge.decoding.admission import Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.label.methods import predict_draft_tokens
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, write_json
from selfjudge.types import Step


@dataclass(frozen=True)
class DraftBenchConfig:
    """How a draft is compared with its target."""

    gammas: Sequence[int] = (3, 5, 10)
    max_new_tokens: int = 128
    batch: int = 16
    """Prompts at a time, where nothing is timed."""
    timed: int = 4
    """Prompts of each kind whose decoding is timed, one at a time."""
    repeats: int = 20
    """Timed passes of each kind."""


CONTEXT = 300  # cached tokens when a pass is timed


def bench_draft(
    pair: Pair,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    config: DraftBenchConfig | None = None,
    *,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Agreement, pooled m and tokens per second for every set of prompts and for all together; costs of steps."""
    if pair.draft is None:
        raise SelfJudgeError(f"no draft ships for {pair.target_id}: name one with `draft`")
    config = config or DraftBenchConfig()
    parameters = sum(p.numel() for p in pair.draft.parameters())  # before an engine packs them and lets them go
    target_seconds = {
        tokens: pass_seconds(pair.target_model, 1, tokens, CONTEXT, repeats=config.repeats)
        for tokens in (1, *(g + 1 for g in config.gammas))
    }
    if pair.draft_kind == "eagle3":
        draft_seconds = head_seconds(pair, CONTEXT, repeats=config.repeats)
    else:
        draft_seconds = pass_seconds(pair.standalone_draft("`bench draft`"), 1, 1, CONTEXT, repeats=config.repeats)
    counts = {name: _count(pair, name, ids, config, notify) for name, ids in prompts.items()}
    total: Counter[str] = Counter()
    for count in counts.values():
        total.update(count)
    cycle_seconds = {gamma: gamma * draft_seconds + target_seconds[gamma + 1] for gamma in config.gammas}
    runs = [_row(name, count, cycle_seconds, target_seconds[1]) for name, count in {**counts, "all": total}.items()]
    return {
        "pair": pair.name,
        **measured_on(),
        "device": str(pair.target.device),
        "dtype": pair.dtype,
        "max_new_tokens": config.max_new_tokens,
        "draft_kind": pair.draft_kind,
        "draft_parameters": parameters,
        "draft_pass_milliseconds": draft_seconds * 1e3,
        "context": CONTEXT,
        "target_pass_milliseconds": {str(t): s * 1e3 for t, s in target_seconds.items()},
        "draft_over_target": draft_seconds / target_seconds[1],
        "runs": runs,
    }


def _count(
    pair: Pair, name: str, prompts: Sequence[Sequence[int]], config: DraftBenchConfig, notify: Callable[[str], None]
) -> Counter[str]:
    """What a set of prompts adds to the sums: prompts, answer tokens, agreement, and tokens and cycles for each γ."""
    notify(f"{name}: agreement")
    hits, seen = agreement(pair, prompts, max_new_tokens=config.max_new_tokens, batch=config.batch)
    sums: Counter[str] = Counter(n=len(prompts), hits=hits, seen=seen)
    for gamma in config.gammas:
        notify(f"{name}: γ = {gamma}")
        tokens, cycles = accepted(pair, prompts, gamma=gamma, max_new_tokens=config.max_new_tokens, batch=config.batch)
        sums[f"tokens_{gamma}"], sums[f"cycles_{gamma}"] = tokens, cycles
    if chosen := prompts[: config.timed]:
        for gamma in (0, *config.gammas):
            notify(f"{name}: γ = {gamma}, timed")
            tokens, nanoseconds = timed(pair, chosen, gamma=gamma, max_new_tokens=config.max_new_tokens)
            sums[f"timed_tokens_{gamma}"], sums[f"nanoseconds_{gamma}"] = tokens, nanoseconds
    return sums


def _row(name: str, sums: Counter[str], cycle_seconds: Mapping[int, float], plain_seconds: float) -> dict[str, Any]:
    """A line of the table; what was not timed is None."""
    row: dict[str, Any] = {
        "prompts": name,
        "n": sums["n"],
        "top1": sums["hits"] / max(1, sums["seen"]),
        "answer_tokens": sums["seen"],
        "predicted_tokens_per_second_plain": 1 / plain_seconds,
        "tokens_per_second_plain": _per_second(sums, 0),
    }
    for gamma, seconds in cycle_seconds.items():
        m = sums[f"tokens_{gamma}"] / max(1, sums[f"cycles_{gamma}"])
        row |= {
            f"m_gamma_{gamma}": m,
            f"predicted_speedup_gamma_{gamma}": m * plain_seconds / seconds,
            f"predicted_tokens_per_second_gamma_{gamma}": m / seconds,
            f"tokens_per_second_gamma_{gamma}": _per_second(sums, gamma),
        }
    return row


def _per_second(sums: Counter[str], gamma: int) -> float | None:
    nanoseconds = sums[f"nanoseconds_{gamma}"]
    return sums[f"timed_tokens_{gamma}"] / nanoseconds * 1e9 if nanoseconds else None


def accepted(
    pair: Pair, prompts: Sequence[Sequence[int]], *, gamma: int, max_new_tokens: int, batch: int
) -> tuple[int, int]:
    """Tokens and cycles of greedy speculative decoding, over all prompts; prefill's token belongs to no cycle."""
    tokens = cycles = 0
    order = sorted(prompts, key=len, reverse=True)
    for start in range(0, len(order), batch):
        for step in _steps(pair, order[start : start + batch], gamma, max_new_tokens):
            if step.cycle:
                cycles += len(step.emissions)
                tokens += sum(len(e.tokens) for e in step.emissions)
    return tokens, cycles


def timed(pair: Pair, prompts: Sequence[Sequence[int]], *, gamma: int, max_new_tokens: int) -> tuple[int, int]:
    """Tokens and nanoseconds of greedy decoding, one prompt at a time, without the time and the token of prefill.

    The first prompt is decoded once before, so that kernels are compiled and cycles recorded. γ = 0 is plain decoding.
    """
    tokens = nanoseconds = 0
    for place, prompt in enumerate([prompts[0], *prompts]):
        begun = None
        for step in _steps(pair, [prompt], gamma, max_new_tokens):
            if not step.cycle:
                begun = time.perf_counter_ns()
            elif place:
                tokens += sum(len(e.tokens) for e in step.emissions)
        if place and begun is not None:
            nanoseconds += time.perf_counter_ns() - begun
    return tokens, nanoseconds


def _steps(pair: Pair, prompts: Sequence[Sequence[int]], gamma: int, max_new_tokens: int) -> Iterator[Step]:
    """Greedy decoding of a batch."""
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    with PairEngines(pair, drafts=gamma > 0).borrow() as engines:
        yield from decode(engines, requests, EXACT, gamma=gamma, eos_ids=pair.eos_ids)


def agreement(pair: Pair, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch: int) -> tuple[int, int]:
    """At how many tokens of the target's greedy answers the draft, given all before, agrees; of how many."""
    assert pair.draft is not None
    answers = respond(pair.target_model, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch)
    sequences = [(prompts[index], answer) for index, answer, _ in answers]
    proposals = predict_draft_tokens(pair, sequences)
    hits = sum(
        d == y
        for drafts, (_, answer) in zip(proposals, sequences, strict=True)
        for d, y in zip(drafts, answer, strict=True)
    )
    return hits, sum(len(answer) for _, answer in sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m", help="embedded name or target")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--prompts", nargs="+", default=["built-in"], help="tasks (their test split) or prompts files")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--gammas", type=int, nargs="+", default=DraftBenchConfig.gammas)
    parser.add_argument("--max-new-tokens", type=int, default=DraftBenchConfig.max_new_tokens)
    parser.add_argument("--batch", type=int, default=DraftBenchConfig.batch)
    parser.add_argument("--timed", type=int, default=DraftBenchConfig.timed)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    prompts = {name: read_task_prompts(name, o.data, o.limit) for name in o.prompts}
    pair = Pair.load(o.pair, o.draft, device=o.device, dtype=o.dtype, full_precision=True)
    encoded = {name: pair.encode_many(texts) for name, texts in prompts.items()}
    config = DraftBenchConfig(o.gammas, o.max_new_tokens, o.batch, o.timed)
    write_json(o.out, bench_draft(pair, encoded, config, notify=say))


if __name__ == "__main__":
    main()
