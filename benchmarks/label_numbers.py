"""Numbers for numbers: `python benchmarks/label_numbers.py --labels DIR --out FILE`.

A number that stands for another fits its sentence and is wrong. What do labels by likelihood say of such substitutions on GSM8K
prompts, with and without the first tokens of the suffix?
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from selfjudge.label.folder import read_manifest, read_shards
from selfjudge.label.methods import compute_tau
from selfjudge.label.score import sum_scores
from selfjudge.models.pull import checkpoint_folder
from selfjudge.store import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=Path, required=True, help="a folder with its own τ evidence")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="gsm8k")
    o = parser.parse_args()
    manifest = read_manifest(o.labels)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder(manifest["target"]), trust_remote_code=False)

    def number(token: int) -> bool:
        return str(tokenizer.decode([token])).strip().isdigit()

    both: list[bool] = []
    parts: list[dict[str, Any]] = []
    for rows, arrays in read_shards(o.labels):
        wanted = np.asarray([row["source"] == o.source for row in rows])
        parts.append({key: arrays[key][wanted] for key in ("log_p", "original", "substituted")})
        both += [number(r["target_token"]) and number(r["draft_token"]) for r in rows if r["source"] == o.source]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    numbers = np.asarray(both)
    change = np.where(np.isnan(arrays["original"]), 0, arrays["substituted"] - arrays["original"])
    result: dict[str, Any] = {"labels": str(manifest["target"]), "source": o.source, "rows": len(numbers), "groups": []}
    for name, group in (("numbers for numbers", numbers), ("others", ~numbers)):
        row: dict[str, Any] = {
            "group": name, "rows": int(group.sum()), "median_change_of_the_next_token": float(np.median(change[group, 0])),
            "median_change_of_tokens_4_to_20": float(np.median(change[group, 3:].sum(1))),
        }  # fmt: skip
        for gap in (0, 3):
            length = manifest["suffix_length"]
            scores = sum_scores(arrays, length, gap=gap)
            tau = compute_tau(o.labels / "calibration.safetensors", length, 0.9, gap=gap)["tau"]
            row[f"acceptable_gap_{gap}"] = float((scores[group] > tau).mean())
        result["groups"].append(row)
        print(row)
    write_json(o.out, result)


if __name__ == "__main__":
    main()
