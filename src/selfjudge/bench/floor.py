"""The least time that a forward pass can take: the bytes that it must read, over the memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from selfjudge.engine.cpu.weights import packed
from selfjudge.models.loaded import LoadedModel


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
        weights = packed(loaded, int8).bytes_per_pass
    else:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
            weights -= model.get_input_embeddings().weight.numel() * model.dtype.itemsize
    dim = model.base_model.layers[0].self_attn.head_dim
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * context * batch * model.dtype.itemsize
    return int(weights + cache)
