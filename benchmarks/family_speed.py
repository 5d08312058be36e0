"""Families of models beside a Llama of the same shape: `python benchmarks/family_speed.py --device cpu --dtype int8 --out FILE`.

Random weights, one row: milliseconds of a pass of 1 and 4 tokens. Family and Llama take turns, so that a machine that
slows down slows down both; a second Llama shows the noise. On a CPU the processor's time is counted: use one thread
(OMP_NUM_THREADS=1). FILE is written after every family. Windows are the defaults of transformers' configs, larger than
the context: attention reads as much in all families.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import say
from pass_cost import prepare_pass, seconds_of
from transformers import AutoConfig, AutoModelForCausalLM

from selfjudge.engine.select import choose_kind
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.device import choose_device
from selfjudge.models.load import Target, choose_dtype
from selfjudge.models.shape import FAMILIES
from selfjudge.store import measured_on, write_json

SIZES = {
    "1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "100m": (768, 2048, 12, 12, 4, 64, 8192),
    "tiny": (64, 128, 2, 4, 2, 16, 256),
}
"""Hidden and inner width, layers, heads, KV heads, width of a head, vocabulary."""
OWN: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
"""What a family has in its checkpoints and not in transformers' defaults."""


def family_model(family: str, size: str, device: torch.device, dtype: torch.dtype) -> Target:
    """A model of a family with random weights; all families have the same shape and tied embeddings."""
    hidden, inner, layers, heads, kv_heads, dim, vocabulary = SIZES[size]
    config = AutoConfig.for_model(
        family,
        **{
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocabulary, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **OWN.get(family, {}),
        },
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return Target(model.eval().requires_grad_(False))


def compare(
    family: dict[int, Callable[[], object]], llama: dict[int, Callable[[], object]], device: torch.device, turns: int
) -> dict[str, Any]:
    """Milliseconds of each number of tokens, by turns: the fastest of all turns, and the median ratio of a turn."""
    row: dict[str, Any] = {}
    for tokens, act in family.items():
        times: dict[str, list[float]] = {"family": [], "llama": []}
        order = [("family", act), ("llama", llama[tokens])]
        for turn in range(turns):
            for name, step in order if turn % 2 else reversed(order):
                times[name].append(seconds_of(step, device, repeats=10) if device.type == "cuda" else time_once(step))
        ratios = [a / b for a, b in zip(times["family"], times["llama"], strict=True)]
        fastest = {name: min(seconds) for name, seconds in times.items()}
        row[str(tokens)] = {
            "milliseconds": fastest["family"] * 1e3,
            "llama_milliseconds": fastest["llama"] * 1e3,
            "over_llama": fastest["family"] / fastest["llama"],
            "over_llama_median": statistics.median(ratios),
        }
    return row


def time_once(step: Callable[[], object]) -> float:
    """Processor seconds of one call, whatever else the machine does; of all threads together."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--size", default=None, choices=list(SIZES), help="1b on CUDA and 100m on a CPU if not given")
    parser.add_argument("--device")
    parser.add_argument("--dtype", help="bfloat16 on CUDA and int8 on a CPU if not given")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help="tokens per pass")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--turns", type=int, default=None, help="20 on CUDA and 200 on a CPU if not given")
    parser.add_argument("--budget", type=float, default=1e9, help="begin no family after so many seconds")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    device = choose_device(o.device)
    name = o.dtype or ("int8" if device.type == "cpu" else "bfloat16")
    int8 = name == "int8"
    dtype = torch.float32 if int8 else choose_dtype(name, device)
    size = o.size or ("100m" if device.type == "cpu" else "1b")
    turns = o.turns or (200 if device.type == "cpu" else 20)
    begun = time.monotonic()

    def prepare(family: str) -> dict[int, Callable[[], object]]:
        target = family_model(family, size, device, dtype)
        kind = choose_kind(target, int8=int8)
        if kind == "reference":
            raise SelfJudgeError(f"{family} runs on the reference engine here")
        return {tokens: prepare_pass(target, 1, tokens, o.context, int8=int8, kind=kind) for tokens in o.tokens}

    llama, rows = prepare("llama"), {}
    for family in o.families:
        if time.monotonic() - begun > o.budget:
            say(f"no time left for {family}")
            continue
        try:
            row = compare(prepare(family), llama, device, turns)
            say(family, *(f"{n} tokens {r['milliseconds']:.3f} ms, {r['over_llama']:.3f};" for n, r in row.items()))
        except Exception as error:  # the others are measured all the same
            row = {"error": f"{type(error).__name__}: {first_line(error)}"}
            say(family, row["error"])
        rows["llama again" if family == "llama" else family] = row
        gc.collect()
        shape = dict(zip(("hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "vocabulary"), SIZES[size]))  # noqa: B905
        about = {"dtype": name, "device": device.type, "size": size, "shape": shape, "context": o.context, "batch": 1}
        write_json(o.out, {**measured_on(), **about, "turns": turns, "families": rows})


if __name__ == "__main__":
    main()
