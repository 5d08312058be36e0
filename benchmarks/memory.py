"""What decoding needs of memory, computed and measured: `python benchmarks/memory.py --out FILE`.

Every run of RUNS is a process of its own on the CPU: it loads a pair, answers, and reads its private resident memory
before and after. `computed` is the formula of docs/memory.md: packed or float weights of target and draft, keys and
values. `shapes` has what the formula says of models that are not here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.store import measured_on, write_json

RUNS = (
    ("smollm2-135m", "q4", 1, 30), ("smollm2-135m", "q4", 8, 1500), ("smollm2-135m", "float32", 1, 30),
    ("smollm2-135m", "int8", 1, 30), ("qwen2.5-coder-1.5b", "q4", 1, 30), ("qwen2.5-coder-1.5b", "q4", 8, 300),
    ("qwen2.5-coder-1.5b", "float32", 1, 30), ("qwen2.5-coder-1.5b", "int8", 1, 30),
)  # fmt: skip
"""Pair, dtype, rows, words of each prompt."""
GAMMA, ANSWER = 3, 8
INT8, Q4_K, Q6_K = 544 / 512, 2368 / 4096, 3392 / 4096  # bytes per weight as the CPU engine packs them


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama- or Qwen2-shaped model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tied: bool

    @property
    def output(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def fused(self) -> int:
        """Weights that the CUDA engine keeps a second time: queries, keys, values, gate and up."""
        attention = (self.heads + 2 * self.kv_heads) * self.dim
        return self.layers * self.hidden * (attention + 2 * self.inner)

    @property
    def matrices(self) -> int:
        return self.fused + self.layers * self.hidden * (self.heads * self.dim + self.inner)

    def estimate(self) -> dict[str, float]:
        """Gigabytes of weights by format, and megabytes of keys and values for 1,000 tokens."""
        every = self.matrices + self.output * (1 if self.tied else 2)
        most = self.layers // 8  # Q4_K_M has more bits in these layers' values and last matrices
        rich = sum(i < most or i >= 7 * self.layers // 8 or (i - most) % 3 == 2 for i in range(self.layers))
        better = rich * self.hidden * (self.kv_heads * self.dim + self.inner)
        q4 = Q4_K * (self.matrices - better) + Q6_K * (better + self.output)
        q4 += 0 if self.tied else 144 / 256 * self.output  # an embedding of its own, as it is in the file
        cache = 2 * self.layers * self.kv_heads * self.dim / 1000
        return {
            "float32 cpu": 4 * every / 1e9, "int8 cpu": (4 * every + INT8 * (self.matrices + self.output)) / 1e9,
            "q4 cpu": q4 / 1e9, "bfloat16 reference": 2 * every / 1e9, "bfloat16 cuda": 2 * (every + self.fused) / 1e9,
            "cache float32": 4 * cache, "cache bfloat16": 2 * cache,
        }  # fmt: skip


SHAPES = {
    "1.5B": Shape(1536, 8960, 28, 12, 2, 128, 151936, True),
    "8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, False),
    "70B": Shape(8192, 28672, 80, 64, 8, 128, 128256, False),
}
"""Qwen2.5-1.5B, Llama-3.1-8B, Llama-3.1-70B."""


def resident() -> int:
    """Private resident bytes of this process: pages of mapped files are not counted."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(name: str, dtype: str, rows: int, words: int) -> dict[str, Any]:
    """Load a pair and answer; computed and measured bytes."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from selfjudge import Pair, generate
    from selfjudge.engine.cpu.engine import CpuEngine

    before, most = resident(), 0
    run_pass = CpuEngine._pass

    def watched(self: CpuEngine, *args: Any) -> None:
        nonlocal most
        run_pass(self, *args)
        most = max(most, resident())

    CpuEngine._pass = watched  # type: ignore[method-assign]
    pair = Pair.load(name, device="cpu", dtype=dtype)
    prompts = [f"{row}. " + "word " * words for row in range(rows)]
    length = len(pair.encode(prompts[0]))
    generate(pair, prompts, "exact", gamma=GAMMA, max_new_tokens=ANSWER, batch=rows)
    weights = cache = 0
    for loaded in (pair.target_model, pair.draft_model):
        assert loaded is not None
        (packed,) = (kept for key, kept in loaded.kept.items() if isinstance(key, tuple) and key[0] == "packed")
        if loaded.file is None and loaded.module is not None:
            weights += 4 * sum(p.numel() for p in loaded.module.parameters())
        if loaded.file is not None:
            weights += sum(part.nbytes for part in packed.kept)
        elif packed.int8:
            weights += packed.bytes_per_pass
        model = packed.model
        cache += 8 * model.layers * model.kv_heads * model.head_dim
    return {
        "pair": name, "dtype": dtype, "rows": rows, "prompt_tokens": length, "computed_weights": weights,
        "computed_cache": cache * rows * (length + ANSWER + GAMMA + 1), "resident_before": before, "resident": most,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(measure(*RUNS[args.run])))
        return
    runs = []
    for number in range(len(RUNS)):
        command = [sys.executable, __file__, "--out", str(args.out), "--run", str(number)]
        runs.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))
        print(json.dumps(runs[-1]), file=sys.stderr)
    shapes = {name: {key: round(value, 3) for key, value in s.estimate().items()} for name, s in SHAPES.items()}
    write_json(args.out, {**measured_on(), "runs": runs, "shapes": shapes})


if __name__ == "__main__":
    main()
