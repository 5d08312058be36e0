"""How much memory training takes: `python benchmarks/train_memory.py --rows 1000000 --width 4096 --out DIR`.

Writes a label folder of random features whose labels a hidden direction decides, trains on it in a process of its own and reports
that process's peak memory. Deletes the folder afterwards.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from selfjudge.label.folder import FORMAT, Labels, write_shard
from selfjudge.store import RunFolder, measured_on, sha256, write_json, write_rows

SHARD = 10_000
SUFFIX = 20
ROWS_A_PROMPT = 25


def write_labels(out: Path, rows: int, width: int, device: str) -> None:
    """A finished label folder of `rows` rows."""
    random = torch.Generator(device).manual_seed(0)
    direction = torch.randn(width, generator=random, device=device) / width**0.5
    shards = []
    for number, start in enumerate(range(0, rows, SHARD)):
        n = min(SHARD, rows - start)
        hidden, original = (torch.randn(n, width, generator=random, device=device) for _ in range(2))
        good = (hidden @ direction + torch.randn(n, generator=random, device=device) > 1).tolist()
        lines = [
            {
                "prompt_id": f"p{(start + i) // ROWS_A_PROMPT}", "source": "random", "position": i, "target_token": 1, "draft_token": 2,
                "prefix_score": -1.0, "suffix_score": 0.0, "score": -1.0, "label": int(good[i]), "method": "selfjudge",
            }
            for i in range(n)
        ]  # fmt: skip
        log_p = -np.random.default_rng(number).exponential(size=(n, 2)).astype(np.float32)
        arrays = {
            "hidden_draft": hidden.half().cpu().numpy(), "hidden_target": original.half().cpu().numpy(), "log_p": log_p,
            "original": np.zeros((n, SUFFIX), np.float32), "substituted": np.zeros((n, SUFFIX), np.float32),
            "highest": np.zeros((n, SUFFIX), np.float32), "rank": np.ones(n, np.int32),
        }  # fmt: skip
        shards.append(write_shard(RunFolder(out), number, Labels(lines, arrays, {"acceptable": sum(good)}), ""))
    prompts = range(-(-rows // ROWS_A_PROMPT))
    write_rows(
        out / "responses.jsonl", ({"prompt_id": f"p{i}", "source": "random", "prompt_ids": [i]} for i in prompts)
    )
    write_json(out / "manifest.json", {
        "format_version": FORMAT, "target": "random", "draft": "random", "target_sha256": "", "draft_sha256": "", "dtype": "float16",
        "hidden_size": width, "hidden_dtype": "float16", "layer": "final", "norm": "post_final_norm", "method": "selfjudge",
        "suffix_length": SUFFIX, "tau": -1.0, "tau_evidence": {}, "rows": rows, "prompts": len(prompts), "shards": shards,
        "files": {"responses.jsonl": sha256(out / "responses.jsonl")},
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    labels = o.out / "labels"
    shutil.rmtree(labels, ignore_errors=True)
    shutil.rmtree(o.out / "judge", ignore_errors=True)
    begun = time.monotonic()
    write_labels(labels, o.rows, o.width, o.device)
    written = time.monotonic()
    command = [sys.executable, "-m", "selfjudge", "train", str(labels), "--out", str(o.out / "judge")]
    subprocess.run([*command, "--device", o.device, "--json"], check=True, stdout=subprocess.DEVNULL)
    result = {
        "rows": o.rows, "width": o.width, "device": o.device, **measured_on(),
        "write_seconds": written - begun, "train_seconds": time.monotonic() - written,
        "feature_bytes": o.rows * o.width * 2, "peak_memory_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9,
    }  # fmt: skip
    write_json(o.out / "memory.json", result)
    print(result, flush=True)
    shutil.rmtree(labels)


if __name__ == "__main__":
    main()
