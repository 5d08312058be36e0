"""A strong draft from a target: its own weights, rounded to a few bits. `python benchmarks/rounded_draft.py --target P --out FOLDER`.

It saves no time, since it has the target's size. It answers a question: what does a judge gain where the draft is good, so that
mismatches are choices between two likely words? Linear layers are rounded to the nearest of 2^bits levels between the least and the largest
weight of a group. Embeddings, head, norms and biases stay. FOLDER is an ordinary checkpoint. Then

    python benchmarks/label_run.py --pair P --draft FOLDER --methods selfjudge --prompts gsm8k:600 dolly:400 self:200 --data DIR --out LABELS
    selfjudge train LABELS/selfjudge --suffix-gap 3 --out JUDGE
    selfjudge eval --target P --draft FOLDER --judge gap=JUDGE --rules "exact judged:q0.8@gap margin:1" --gammas 10 --tasks gsm8k --data DIR --out OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from selfjudge.models.pair import Pair
from selfjudge.store import write_json


def round_weights(weight: Tensor, bits: int, group: int) -> Tensor:
    """`weight` with each group of `group` weights of a row on 2^bits evenly spaced levels."""
    rows, columns = weight.shape
    if columns % group:
        raise SystemExit(f"rows of {columns} weights cannot be cut into groups of {group}: choose another --group")
    groups = weight.float().reshape(rows, columns // group, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return (((groups - low) / step).round() * step + low).reshape(rows, columns).to(weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m", help="embedded name, hub id or folder")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    pair = Pair.load(o.target, device=o.device, needs_draft=False, full_precision=True)
    head = pair.target.get_output_embeddings()
    changed = 0
    with torch.no_grad():
        for module in pair.target.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(round_weights(module.weight, o.bits, o.group))
                changed += module.weight.numel()
    pair.target.half().save_pretrained(o.out)
    pair.tokenizer.save_pretrained(o.out)
    write_json(o.out / "rounded.json", {"of": o.target, "bits": o.bits, "group": o.group, "weights": changed})
    print(f"{changed:,} weights of {o.target} on {2**o.bits} levels a group of {o.group}: {o.out}")


if __name__ == "__main__":
    main()
