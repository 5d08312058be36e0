"""Does γ change greedy answers, and where? `python benchmarks/gamma_ties.py --pair P --data DIR --out FILE`.

`exact` is lossless up to rounding. Another γ is another matrix shape, for which a library may choose a kernel that rounds otherwise.
Two tokens that the target finds equally likely may then change places. The script answers GSM8K with each γ and counts the answers that differ
from those of the first. Where they differ it asks the target, token by token, how far apart the two tokens are.
A few steps of the dtype are ties; more would be a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfjudge.decoding.rules import EXACT
from selfjudge.decoding.text import generate
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, write_json
from selfjudge.tasks import load_task


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two answers differ."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--gammas", type=int, nargs="+", default=[10, 5, 10, 5, 6])
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--gaps", type=int, default=40, help="differences to look at")
    parser.add_argument("--device", default=None)
    o = parser.parse_args()
    pair = Pair.load(o.pair, device=o.device, full_precision=True)
    gsm8k = load_task("gsm8k", o.data)
    prompts = [gsm8k.prompt(row) for row in gsm8k.examples("test", o.limit)]
    first: list[Sequence[int]] = []
    runs, gaps = list[dict[str, Any]](), list[dict[str, Any]]()
    for gamma in o.gammas:
        answers = generate(pair, prompts, EXACT, gamma=gamma, max_new_tokens=o.max_new_tokens, batch=len(prompts))
        tokens = [a.tokens for a in answers]
        first = first or list(tokens)
        places = [first_difference(a, b) for a, b in zip(first, tokens, strict=True)]
        runs.append({"gamma": gamma, "parted": [row for row, place in enumerate(places) if place is not None]})
        print(gamma, len(runs[-1]["parted"]), flush=True)
        if gaps or not runs[-1]["parted"]:
            continue
        answered = zip(pair.encode_many(prompts), first, tokens, places, strict=True)
        for row, (ids, before, now, place) in enumerate(answered):
            if place is not None and place < min(len(before), len(now)) and len(gaps) < o.gaps:
                context = torch.tensor([[*ids, *before[:place]]], device=pair.target.device)
                with torch.no_grad():
                    logits = pair.target(context, logits_to_keep=1).logits[0, -1].float()
                gaps.append({"gamma": gamma, "row": row, "logits": [float(logits[t[place]]) for t in (before, now)]})
    print("logits", [gap["logits"] for gap in gaps])
    write_json(o.out, {
        "pair": pair.name, **measured_on(), "dtype": pair.dtype,
        "prompts": len(prompts), "max_new_tokens": o.max_new_tokens, "runs": runs, "gaps": gaps,
    })  # fmt: skip


if __name__ == "__main__":
    main()
