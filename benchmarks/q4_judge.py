"""Does a judge that was trained on float states decide alike in q4? `python benchmarks/q4_judge.py --out FILE`.

The target answers the built-in prompts greedily in float32. At every token of these answers the draft proposes one; where it
is not the target's, both targets read it, in float32 and in q4, and the judge scores what each of them sees. Counted are
the decisions at several thresholds, and how often the two targets choose the same token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from selfjudge.decoding.text import generate
from selfjudge.engine.base import Engine
from selfjudge.engine.select import make_engine
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on, write_json
from selfjudge.types import Block


@dataclass
class Sight:
    """What one target sees: its choice at each token, and the judge's score of each proposal that is not its own."""

    choices: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def look(engine: Engine, judge: Judge, prompt: Sequence[int], answer: Sequence[int], drafts: Sequence[int]) -> Sight:
    """Along an answer, with a pass for each proposal that differs from it; those of the answer are read after it."""
    seen, one = Sight(), torch.tensor([1])
    engine.reserve(1, len(prompt) + len(answer) + 1)
    output = engine.extend(torch.tensor([prompt]), keep=1)
    for token, draft in zip(answer, drafts, strict=True):
        before = output
        seen.choices.append(int(before.logits[0, -1].argmax()))
        if draft != token:
            after = engine.extend(torch.tensor([[draft]]))
            states = [before.hidden, after.hidden]
            block = Block(
                torch.tensor([[draft]]),
                torch.cat([before.logits[:, -1:], after.logits], 1),
                torch.cat([state[:, -1:] for state in states if state is not None], 1),
            )
            seen.scores.append(float(judge(block)[0, 0]))
            engine.rewind(one)
        output = engine.extend(torch.tensor([[token]]))
    return seen


def proposals(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What the draft says at each token of an answer, given all before."""
    engine.reserve(1, len(prompt) + len(answer))
    logits = engine.extend(torch.tensor([[*prompt, *answer[:-1]]]), keep=len(answer)).logits
    return [int(token) for token in logits[0].argmax(-1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=len(BUILT_IN))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    o = parser.parse_args()
    whole, blocks = (Pair.load(o.pair, device="cpu", dtype=dtype) for dtype in ("float32", "q4"))
    judge = whole.judge
    assert judge is not None
    assert blocks.draft is not None
    prompts = [text for _, text in BUILT_IN[: o.limit]]
    answers = generate(whole, prompts, gamma=0, max_new_tokens=o.max_new_tokens)
    draft = make_engine(blocks.draft)
    engines = [make_engine(pair.target, hidden=True) for pair in (whole, blocks)]
    seen = (Sight(), Sight())
    for prompt, answer in zip(whole.encode_many(prompts), answers, strict=True):
        drafts = proposals(draft, prompt, answer.tokens)
        for sight, engine in zip(seen, engines, strict=True):
            more = look(engine, judge, prompt, answer.tokens, drafts)
            sight.choices += more.choices
            sight.scores += more.scores
    one, other = (torch.tensor(sight.scores) for sight in seen)
    thresholds = {"F": judge.threshold("F"), "R": judge.threshold("R"), "q0.9": judge.quality(0.9)}
    decisions = {
        name: {
            "theta": theta,
            "same": float(((one > theta) == (other > theta)).float().mean()),
            "accepted_float32": float((one > theta).float().mean()),
            "accepted_q4": float((other > theta).float().mean()),
        }
        for name, theta in thresholds.items()
    }
    result = {
        "pair": whole.name, **measured_on(), "prompts": len(prompts), "max_new_tokens": o.max_new_tokens,
        "tokens": len(seen[0].choices), "mismatches": len(one),
        "same_choice": sum(a == b for a, b in zip(*(s.choices for s in seen), strict=True)) / len(seen[0].choices),
        "mean_score_difference": float((one - other).abs().mean()), "decisions": decisions,
    }  # fmt: skip
    write_json(o.out, result)
    print(result)


if __name__ == "__main__":
    main()
