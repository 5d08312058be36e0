"""What decoding needs of memory, computed and measured: `python benchmarks/memory.py --out FILE`.

Every run of RUNS is a process of its own on the CPU: it loads a pair, answers, and reads its private resident memory
before and after. `computed` is the estimate of `selfjudge doctor --model`: weights of target and draft, keys and values.
`shapes` has what it says of models that are not here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfjudge.models.gguf import TensorInfo
from selfjudge.models.memory import measure_draft, measure_need
from selfjudge.store import measured_on, write_json

RUNS = (
    ("smollm2-135m", "q4", 1, 30), ("smollm2-135m", "q4", 8, 1500), ("smollm2-135m", "float32", 1, 30),
    ("smollm2-135m", "int8", 1, 30), ("qwen2.5-coder-1.5b", "q4", 1, 30), ("qwen2.5-coder-1.5b", "q4", 8, 300),
    ("qwen2.5-coder-1.5b", "float32", 1, 30), ("qwen2.5-coder-1.5b", "int8", 1, 30),
)  # fmt: skip
"""Pair, dtype, rows, words of each prompt."""
GAMMA, ANSWER = 3, 8
SHAPES = {
    "1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
}
"""Qwen2.5-1.5B, Llama-3.1-8B, Llama-3.1-70B: type, width, inner width, layers, heads, key heads, vocabulary, tied."""


def outline(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> Any:
    """A model of that shape without weights, and the tensors of its Q4_K_M file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    most = layers // 8  # Q4_K_M has more bits in these layers' values and last matrices
    tensors = {}
    for name, weight in model.named_parameters():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        rich = layer < most or layer >= 7 * layers // 8 or (layer - most) % 3 == 2
        better = "lm_head" in name or (tied and "embed" in name) or (rich and ("v_proj" in name or "down" in name))
        rows, cols = weight.shape if weight.dim() == 2 else (1, len(weight))
        block = 0 if weight.dim() == 1 else 14 if better else 12
        file_name = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}.get(
            name, name
        )
        tensors[file_name] = TensorInfo(file_name, rows, cols, block, 0, rows * cols * 144 // 256)
    model.gguf_file = SimpleNamespace(tensors=tensors)
    return model


def estimate(shape: tuple[Any, ...]) -> dict[str, float]:
    """Gigabytes of weights by format, and megabytes of keys and values for 1,000 tokens."""
    model, wanted = outline(*shape), (("float32", "cpu"), ("int8", "cpu"), ("q4", "cpu"), ("bfloat16", "cuda"))
    needs = {f"{dtype} {device}": measure_need(model, dtype, device) for dtype, device in wanted}
    caches = {f"cache {dtype}": needs[f"{dtype} {device}"].token / 1e3 for dtype, device in (wanted[0], wanted[3])}
    return {name: need.weights / 1e9 for name, need in needs.items()} | caches


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
    target = measure_need(pair.target, dtype, "cpu")
    draft = measure_draft(pair.draft_id, pair.target, "q4" if dtype == "q4" else dtype, "cpu")
    weights, cache = target.weights + draft.weights, target.token + draft.token
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
    shapes = {name: {key: round(value, 3) for key, value in estimate(s).items()} for name, s in SHAPES.items()}
    write_json(args.out, {**measured_on(), "runs": runs, "shapes": shapes})


if __name__ == "__main__":
    main()
