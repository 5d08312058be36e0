"""What a forward pass costs: `python benchmarks/pass_cost.py --tokens 1 2 4 8 --contexts 100 400 --out FILE`.

Times passes against batch, tokens per pass and context length, and against the memory they must read. A pass reads
every weight (the embedding table only where it is also the output matrix) and the keys and values of its rows. That
many bytes over the measured bandwidth is the floor that `over_floor` compares with. `--model shape:llama-3.1-8b` is a
model of that shape with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import say
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfjudge.engine.base import Engine
from selfjudge.engine.cpu.weights import packed_weights
from selfjudge.engine.draft import EagleDraft
from selfjudge.engine.select import PairEngines, make_draft, make_engine
from selfjudge.models.device import choose_device
from selfjudge.models.load import LoadedModel, Target, as_loaded, choose_dtype
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, write_json


@dataclass(frozen=True)
class PassesConfig:
    """Which forward passes are timed, and how often."""

    batches: Sequence[int] = (1,)
    tokens: Sequence[int] = (1, 2, 4, 6, 8, 11)
    contexts: Sequence[int] = (300,)
    engine: str = "auto"
    repeats: int = 10


_QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen-draft-8x320": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8,
        "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
AXES = {"tokens": "tokens per pass (γ+1)", "context": "context length", "batch": "batch"}


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a known shape with random weights."""
    if shape not in SHAPES:
        raise SystemExit(f"unknown shape {shape!r}; shapes are: {', '.join(SHAPES)}")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**SHAPES[shape]), dtype=dtype, trust_remote_code=False
        )
    return model.eval()


def bandwidth(device: torch.device) -> float:
    """Bytes per second of memory traffic: a large copy on CUDA (read and written), a large sum on a CPU (read)."""
    if device.type == "cuda":
        source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device, repeats=10)
    numbers = torch.ones(1 << 27)
    return 4 * numbers.numel() / seconds_of(lambda: numbers.sum(), device, repeats=5)


def seconds_of(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
    return float(statistics.median(times))


def bytes_per_pass(loaded: LoadedModel, batch: int, context: int, int8: bool = False) -> int:
    """What a pass must read at least: the weights once, and the cached keys and values of every row."""
    model = loaded.causal_lm
    config = model.config.get_text_config()
    if int8 or loaded.file is not None:
        weights = packed_weights(loaded, int8).bytes_per_pass
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
            weights -= model.get_input_embeddings().weight.numel() * model.dtype.itemsize
    dim = model.base_model.layers[0].self_attn.head_dim
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * context * batch * model.dtype.itemsize
    return int(weights + cache)


@torch.no_grad()
def prepare_pass(
    of: PreTrainedModel | LoadedModel, batch: int, tokens: int, context: int, *, int8: bool = False, kind: str = "auto"
) -> Callable[[], object]:
    """One pass of `tokens` tokens a row after `context` cached ones, to be called again and again; captured on CUDA."""
    engine: Engine = make_engine(of, int8=int8, kind=kind)
    model = as_loaded(of).causal_lm
    engine.reserve(batch, context + tokens + 1)
    size = model.get_input_embeddings().weight.shape[0]
    engine.extend(torch.randint(size, (batch, context), device=model.device), keep=1)
    x = torch.randint(size, (batch, tokens), device=model.device)
    back = torch.full((batch,), tokens, device=model.device)

    def step() -> None:
        engine.extend(x)
        engine.rewind(back)

    (captured,) = engine.capture([step], engine.state())

    def replay() -> None:
        assert engine is not None  # a graph does not keep the tensors that it reads
        captured()

    return replay


@torch.no_grad()
def pass_seconds(
    of: PreTrainedModel | LoadedModel,
    batch: int,
    tokens: int,
    context: int,
    *,
    int8: bool = False,
    kind: str = "auto",
    repeats: int = 10,
) -> float:
    """Median seconds of one pass of `tokens` tokens a row after `context` cached ones."""
    captured = prepare_pass(of, batch, tokens, context, int8=int8, kind=kind)
    return seconds_of(captured, as_loaded(of).device, repeats)


@torch.no_grad()
def head_seconds(pair: Pair, context: int, *, repeats: int = 10) -> float:
    """Median seconds of one more proposal of a pair's head, for one row, after `context` cached entries."""
    assert pair.draft_model is not None
    head = pair.draft_model.eagle_head
    draft = make_draft(pair.draft_model, pair.target_model, kind=PairEngines(pair).kind)
    assert isinstance(draft, EagleDraft)
    engine, size = draft.engine, head.config.hidden_size
    engine.reserve(1, context + 2)
    tokens = torch.randint(head.config.vocab_size, (1, context), device=head.device)
    states = torch.randn(1, context, size, dtype=head.dtype, device=head.device)
    engine.append(tokens, states)
    token, state, back = tokens[:, :1], states[:, :1], torch.ones_like(tokens[0, :1])

    def step() -> None:
        engine.append(token, state)
        engine.rewind(back)

    (captured,) = engine.capture([step], engine.state())
    return seconds_of(captured, head.device, repeats)


def bench_passes(
    model: PreTrainedModel | LoadedModel,
    name: str,
    config: PassesConfig,
    *,
    int8: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time every combination of batch, context and tokens per pass."""
    loaded = as_loaded(model)
    speed = bandwidth(loaded.device)
    rows = []
    for batch, context, count in product(config.batches, config.contexts, config.tokens):
        notify(f"batch {batch}, context {context}, {count} tokens a pass")
        seconds = pass_seconds(loaded, batch, count, context, int8=int8, kind=config.engine, repeats=config.repeats)
        floor = bytes_per_pass(loaded, batch, context, int8) / speed
        rows.append(
            {
                "batch": batch,
                "context": context,
                "tokens": count,
                "milliseconds": seconds * 1e3,
                "floor_milliseconds": floor * 1e3,
                "over_floor": seconds / floor,
            }
        )
    return {
        "model": name,
        "engine": type(make_engine(loaded, int8=int8, kind=config.engine)).__name__,
        **measured_on(),
        "dtype": Target(loaded.causal_lm, int8=int8).dtype_name,
        "gigabytes_per_second": speed / 1e9,
        "runs": rows,
    }


def draw_passes(result: dict[str, Any], file: Path) -> None:
    """Cost against tokens per pass, context and batch: one panel for each that varies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = [a for a in AXES if len({r[a] for r in result["runs"]}) > 1] or ["tokens"]
    figure, panels = plt.subplots(1, len(axes), figsize=(5 * len(axes), 4), squeeze=False)
    for panel, axis in zip(panels[0], axes, strict=True):
        _draw_panel(panel, axis, result["runs"])
    device = result["machine"].get("gpu") or result["machine"].get("cpu", "")
    where = f"{result['model']}, {result['dtype']}, {device}, {result['date']}"
    figure.suptitle("; ".join(_finding(axis, result["runs"]) for axis in axes) + f"\n{where}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _finding(axis: str, runs: list[dict[str, Any]]) -> str:
    """What the largest value of an axis costs over its smallest, where the others are smallest."""
    others = {other: min(r[other] for r in runs) for other in AXES if other != axis}
    rows = sorted((r for r in runs if all(r[o] == v for o, v in others.items())), key=lambda r: r[axis])
    cost = rows[-1]["milliseconds"] / rows[0]["milliseconds"]
    return f"{axis} {rows[0][axis]} → {rows[-1][axis]}: {cost:.2f} × the time"


def _draw_panel(panel: Any, axis: str, runs: list[dict[str, Any]]) -> None:
    """Milliseconds against one axis, a line for each combination of the others."""
    others = [a for a in AXES if a != axis]
    groups = sorted({tuple(r[o] for o in others) for r in runs})
    for group in groups:
        rows = [r for r in runs if tuple(r[o] for o in others) == group]
        if len(rows) < 2:
            continue
        label = ", ".join(f"{o} {v}" for o, v in zip(others, group, strict=True))
        (line,) = panel.plot([r[axis] for r in rows], [r["milliseconds"] for r in rows], marker="o", label=label)
        panel.plot([r[axis] for r in rows], [r["floor_milliseconds"] for r in rows], ":", color=line.get_color())
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel("milliseconds (dotted: memory floor)")
    panel.set_ylim(bottom=0)
    if axis == "batch":
        panel.set_xscale("log", base=2)
    if len(groups) <= 8:
        panel.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="embedded name, model reference or shape:NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=PassesConfig.batches)
    parser.add_argument("--tokens", type=int, nargs="+", default=PassesConfig.tokens, help="tokens per pass (γ+1)")
    parser.add_argument("--contexts", type=int, nargs="+", default=PassesConfig.contexts)
    parser.add_argument("--engine", choices=("auto", "reference", "cpu", "cuda"), default="auto")
    parser.add_argument("--repeats", type=int, default=PassesConfig.repeats)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--figure", type=Path, default=None, help="draw the costs into this PNG file")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    if o.model.startswith("shape:"):
        device = choose_device(o.device)
        model = random_model(o.model.removeprefix("shape:"), device, choose_dtype(o.dtype, device))
    else:
        pair = Pair.load(o.model, device=o.device, dtype=o.dtype, needs_draft=False, full_precision=True)
        model = pair.target
    config = PassesConfig(o.batches, o.tokens, o.contexts, o.engine, o.repeats)
    result = bench_passes(model, o.model, config, int8=o.dtype == "int8", notify=say)
    write_json(o.out, result)
    if o.figure:
        draw_passes(result, o.figure)


if __name__ == "__main__":
    main()
