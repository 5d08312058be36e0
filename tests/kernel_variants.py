"""How many variants of each Triton kernel are compiled for batches of 1 to 512 rows and γ of 0 to 10: printed as JSON.

Nothing is compiled and no device is needed: the tensors have shapes alone, and launches are only bound, by Triton's own rules
for an H200. Run it with Triton: `PYTHONPATH=.venv-vllm/triton .venv-vllm/bin/python tests/kernel_variants.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from typing import Any

import torch
import transformers as hf
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from selfjudge.engine.cuda.engine import CudaEngine, CudaHead
from selfjudge.engine.cuda.kernels_triton import TritonKernels
from selfjudge.judge.config import FEATURES
from selfjudge.models.eagle import EagleConfig, EagleHead
from selfjudge.ops.kernels_triton import JudgeWeights, block_scan, draft_scores, split_argmax

ROWS = [1, 2, 3, 5, *(n for power in (8, 16, 32, 48, 64, 128, 256, 511) for n in (power - 1, power, power + 1))]
GAMMAS = range(11)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
variants: dict[str, set[str]] = defaultdict(set)
_binders: dict[Any, Any] = {}


def bind(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Instead of a launch: note the key under which the kernel would be compiled."""
    if kernel not in _binders:
        _binders[kernel] = jit.create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    _, specialization, others = _binders[kernel](*arguments, **options)
    variants[kernel.__name__].add(str((specialization, sorted(others.items()))))


def make_engines() -> tuple[CudaEngine, CudaHead]:
    """A target of three layers and a head with the widths of Qwen2.5-Coder-1.5B."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = hf.Qwen2Config(vocab_size=151936, num_hidden_layers=3, max_position_embeddings=4096, **sizes)
    with torch.device("meta"):
        model = hf.Qwen2ForCausalLM(config).to(torch.bfloat16)
        head = EagleHead(EagleConfig.for_target(model, 32000), torch.arange(32000)).to(torch.bfloat16).bind(model)
    target, draft = CudaEngine(model, hidden=True, features=head.config.aux_layers), CudaHead(head)
    for engine in (target, draft):
        kernels = engine.__dict__["_kernels"] = TritonKernels()
        kernels.early = True
        engine.reserve(max(ROWS), 1024)
    return target, draft


def newest(rows: int, width: int) -> Tensor:
    """The newest tokens of a backlog."""
    return integers(rows, 64)[:, -width:]


def integers(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")


def run_cycle(target: CudaEngine, draft: CudaHead, judge: JudgeWeights, rows: int, gamma: int) -> None:
    """All kernels of a cycle."""
    target.use_rows(rows)
    draft.use_rows(rows)
    output = target.extend(integers(rows, gamma + 1))
    choice, _ = split_argmax(output.logits)
    if gamma:
        own = draft.append(newest(rows, gamma + 1), output.features, integers(rows))
        own = draft.append(newest(rows, 1), own.features)
        split_argmax(own.logits[:, -1])
        drafts = integers(rows, gamma)
        draft_scores(judge, output.hidden, output.logits, choice, drafts)
        block_scan(torch.empty(rows, gamma, device="meta"), drafts > 0, 0.1)


def main() -> None:
    triton.JITFunction.run = bind
    target, draft = make_engines()
    judge = JudgeWeights.of(torch.empty(3073, device="meta"), torch.empty(1, device="meta"), FEATURES[-1], -50.0, 14.0)
    for rows, gamma in product(ROWS, GAMMAS):
        run_cycle(target, draft, judge, rows, gamma)
    for rows, width in ((1, 40), (1, 600), (1, 4000), (8, 40), (8, 600), (64, 100)):  # prompts
        for engine in (target, draft):
            engine.use_rows(rows)
        output = target.extend(integers(rows, width), integers(rows), keep=1)
        draft.append(integers(rows, width), output.features, integers(rows), keep=0)
    print(json.dumps({name: len(keys) for name, keys in sorted(variants.items())}))


if __name__ == "__main__":
    main()
