"""Labels at full size for a pair: `python benchmarks/label_run.py --pair P --data DIR --out DIR`.

Calibrates τ, labels by likelihood, by preserved answers and by the target's own verdict, and writes what each cost:
`summary.json` (rows, seconds by stage, rows an hour, memory), `tau.json` (for every N, to ship with the pair), the evidence for τ and a sample
of the rows. Features stay in the label folders: train where they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from common import say

from selfjudge.cli.output import Progress
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import read_shards
from selfjudge.label.methods import compute_tau
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, read_json, write_json, write_rows

LENGTHS = (0, 5, 10, 20)
SAMPLE = 300


def keep_sample(labels: Path, out: Path) -> None:
    """Every n-th row of a label folder, in `sample.jsonl`."""
    rows = [row for part, _ in read_shards(labels) for row in part]
    write_rows(out / "sample.jsonl", rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", default=["gsm8k:900", "livecodebench:300", "dolly:900", "self:900"])
    parser.add_argument("--auto", nargs="+", default=["gsm8k:300"])
    parser.add_argument("--auto-plus", nargs="+", default=["gsm8k:150", "dolly:150"])
    parser.add_argument("--methods", nargs="+", default=["selfjudge", "autojudge", "autojudge+"])
    parser.add_argument("--substitutions", type=int, default=None, help="most that the searches try in a response")
    parser.add_argument("--tau", type=float, default=None, help="a known τ; calibrated if not given")
    parser.add_argument("--calibrate", default="gsm8k")
    parser.add_argument("--calibrate-prompts", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--hidden-dtype", default="float16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--allow-unsafe", action="store_true")
    return parser.parse_args()


def main() -> None:
    o = options()
    pair = Pair.load(o.pair, o.draft, device=o.device, full_precision=True)
    cuda = pair.target.device.type == "cuda"
    summary: dict[str, Any] = {
        "pair": pair.name, **measured_on(),
        "dtype": pair.dtype, "batch": o.batch, "max_new_tokens": o.max_new_tokens, "substitutions": o.substitutions, "runs": [],
    }  # fmt: skip
    for method, prompts in (("selfjudge", o.prompts), ("autojudge", o.auto), ("autojudge+", o.auto_plus)):
        if method not in o.methods:
            continue
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        settings = LabelConfig(
            prompts=tuple(prompts), method=method, max_new_tokens=o.max_new_tokens, batch=o.batch,
            tau=o.tau if method == "selfjudge" else None,
            calibrate=o.calibrate if method == "selfjudge" and o.tau is None else None, calibrate_prompts=o.calibrate_prompts,
            allow_unsafe=o.allow_unsafe, hidden_dtype=o.hidden_dtype,
            substitutions=None if method == "selfjudge" else o.substitutions,
        )  # fmt: skip
        out = o.out / method.replace("+", "-plus")
        manifest = label_pair(  # never resumed: it is timed
            pair, out, settings, data=o.data, notify=Progress(), warn=print
        )
        seconds = time.monotonic() - begun
        spent = read_json(out / "run.json")["seconds"]
        own = seconds - spent["tau"]  # finding τ is not labelling
        summary["runs"].append({
            "method": method, "prompts": manifest["prompts"], "rows": manifest["rows"],
            "acceptable": manifest["acceptable"] / manifest["rows"], "seconds": spent, "rows_per_hour": manifest["rows"] / own * 3600,
            "rows_per_second_of_labelling": manifest["rows"] / spent["labels"], "yields": manifest["yields"],
            "target_tokens_per_label": manifest["target_tokens"] / manifest["rows"], "tau": manifest["tau_evidence"],
            "peak_gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        })  # fmt: skip
        write_json(o.out / "summary.json", summary)
        say(json.dumps(summary["runs"][-1]))
        if method == "selfjudge":
            keep_sample(out, o.out)
            if o.tau is not None:
                continue
            evidence = out / "calibration.safetensors"
            shutil.copy(evidence, o.out / "calibration.safetensors")
            taus = {
                str(n): {**manifest["tau_evidence"], **compute_tau(evidence, n, settings.reject_recall)}
                for n in LENGTHS
            }
            write_json(o.out / "tau.json", {"draft_sha256": pair.draft_sha256, "tau": taus})


if __name__ == "__main__":
    main()
