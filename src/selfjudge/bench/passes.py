"""What a forward pass costs: against batch, tokens per pass and context length, and against the memory it must read.

A pass reads every weight (the embedding table apart, where the head has its own) and the keys and values of its rows.
That many bytes over the measured bandwidth is the floor that the `over_floor` column compares with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfjudge.bench.config import PassesConfig
from selfjudge.bench.shapes import SHAPES, check_shape
from selfjudge.engine.base import Engine
from selfjudge.engine.cpu.weights import packed
from selfjudge.engine.draft import EagleDraft
from selfjudge.engine.select import common_kind, make_draft, make_engine
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import gguf_of
from selfjudge.store import measured_on

AXES = {"tokens": "tokens per pass (γ+1)", "context": "context length", "batch": "batch"}


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a known shape with random weights."""
    check_shape(shape)
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


def bytes_per_pass(model: PreTrainedModel, batch: int, context: int, int8: bool = False) -> int:
    """What a pass must read at least: the weights once, and the cached keys and values of every row."""
    config = model.config.get_text_config()
    if int8 or gguf_of(model) is not None:
        weights = packed(model, int8).bytes_per_pass
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
            weights -= model.get_input_embeddings().weight.numel() * model.dtype.itemsize
    dim = model.base_model.layers[0].self_attn.head_dim
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * context * batch * model.dtype.itemsize
    return int(weights + cache)


@torch.no_grad()
def pass_seconds(
    model: PreTrainedModel,
    batch: int,
    tokens: int,
    context: int,
    *,
    int8: bool = False,
    kind: str = "auto",
    repeats: int = 10,
) -> float:
    """Median seconds of one pass of `tokens` tokens a row after `context` cached ones."""
    engine: Engine = make_engine(model, int8=int8, kind=kind)
    engine.reserve(batch, context + tokens + 1)
    size = model.get_input_embeddings().weight.shape[0]
    engine.extend(torch.randint(size, (batch, context), device=model.device), keep=1)
    x = torch.randint(size, (batch, tokens), device=model.device)
    back = torch.full((batch,), tokens, device=model.device)

    def step() -> None:
        engine.extend(x)
        engine.rewind(back)

    (captured,) = engine.capture([step], engine.state())
    return seconds_of(captured, model.device, repeats)


@torch.no_grad()
def head_seconds(head: EagleHead, target: PreTrainedModel, context: int, *, repeats: int = 10) -> float:
    """Median seconds of one more proposal of a head, for one row, after `context` cached entries."""
    draft = make_draft(head, target, kind=common_kind(target, head, "auto"))
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
    model: PreTrainedModel,
    name: str,
    config: PassesConfig | None = None,
    *,
    int8: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time every combination; the result is what `selfjudge bench passes --json` prints."""
    config = config or PassesConfig()
    config.check()
    speed = bandwidth(model.device)
    rows = []
    for batch, context, count in product(config.batches, config.contexts, config.tokens):
        notify(f"batch {batch}, context {context}, {count} tokens a pass")
        seconds = pass_seconds(model, batch, count, context, int8=int8, kind=config.engine, repeats=config.repeats)
        floor = bytes_per_pass(model, batch, context, int8) / speed
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
        "engine": type(make_engine(model, int8=int8, kind=config.engine)).__name__,
        **measured_on(),
        "dtype": "q4" if gguf_of(model) is not None else "int8" if int8 else str(model.dtype).removeprefix("torch."),
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
