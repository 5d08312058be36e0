"""What the host does in a step of vLLM's second model runner, once the step before had the same requests: printed as JSON.

Kernels are compiled for an H200 and not run: no device is needed. Run it with Triton and vLLM:
`PYTHONPATH=.venv-vllm/triton .venv-vllm/bin/python tests/step_costs.py`.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.vllm.approval import Approval, Counts, Verification
from selfjudge.integrations.vllm.plan import RequestGuards
from selfjudge.integrations.vllm.v2 import MarkProcessor, SecondRunnerAdapter
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge

GAMMA, HIDDEN, VOCAB, STEPS = 5, 64, 1000, 3
MIXED = ("margin:1", "margin:price=0.2", "judged:0.5", "off")
RULES = {rule: (rule,) for rule in ("off", *MIXED[:3], "judged:price=0.04", "topk:3", "fly:0.5,2")} | {"mixed": MIXED}
CPU, SPECIAL = torch.device("cpu"), (5, 17, 100)
cost = {"launches": 0, "by_the_front_end": 0, "operators": 0}


class Launcher:
    """Instead of the code that starts a kernel."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        cost["launches"] += 1


class Machine:
    """Instead of a GPU's driver."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024), unload_module=lambda *_: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
    )  # fmt: skip

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        cost["operators"] += 1
        return operator(*args, **(options or {}))


class Words:
    """A tokenizer of some tokens that are no structure."""

    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return 10

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["a"] * len(ids)


def steps_of(
    rules: tuple[str, ...], judge: Judge, slots: torch.dtype = torch.int32, *, warmed: bool = False
) -> dict[str, int]:
    """The costs of the last of some steps of requests with these rules; of the first one where kernels are `warmed`."""
    guards, requests, n = RequestGuards(Words(), 8, CPU), len(rules), len(rules) * (GAMMA + 1)
    verification = Verification(
        Approval(judge, SPECIAL, CPU), Counts(CPU, "model", "0"), None, guards, lambda said: said
    )  # type: ignore[arg-type]
    marks = MarkProcessor(verification, 8, GAMMA)
    if warmed:
        warm_up(marks)
    for slot, text in enumerate(rules):
        marks.enter(slot, None if text == "off" else RuleRequest(text).resolve(SPECIAL, judge), [])
    ends = (GAMMA + 1) * np.arange(requests + 1, dtype=np.int32)
    batch = SimpleNamespace(
        num_reqs=requests, idx_mapping_np=np.arange(requests, dtype=np.int32), idx_mapping=torch.arange(requests, dtype=slots),
        logits_indices=torch.arange(n), positions=torch.arange(n), input_ids=torch.zeros(n, dtype=torch.int32),
        cu_num_logits=torch.from_numpy(ends), cu_num_logits_np=ends,
    )  # fmt: skip
    hidden, logits, emitted = torch.zeros(n, HIDDEN), torch.zeros(n, VOCAB), torch.ones(requests, dtype=torch.int32)
    with Operators():
        for _ in range(1 if warmed else STEPS):
            cost.update(dict.fromkeys(cost, 0))
            marks.decide(hidden, logits, batch)
            marks.apply(logits, None)
            marks.finish(batch, emitted)
    return dict(cost)


def warm_up(marks: MarkProcessor) -> None:
    """Compile as an adapter does before the first request."""
    adapter = SecondRunnerAdapter.__new__(SecondRunnerAdapter)
    adapter.marks, adapter.listed = marks, True
    adapter.runner = SimpleNamespace(dtype=torch.float32, vocab_size=VOCAB)
    adapter._warm_up()


def main() -> None:
    driver.set_active(Machine())
    launch = triton.JITFunction.run

    def asked(*args: Any, **options: Any) -> Any:
        cost["by_the_front_end"] += 1
        return launch(*args, **options)

    triton.JITFunction.run = asked
    if os.environ.get("OTHER_TRITON"):
        triton.compiler.CompiledKernel.__getitem__ = lambda _, grid: lambda: grid  # which takes no arguments
    config = JudgeConfig(HIDDEN)
    judge = Judge(config, torch.randn(config.width))
    costs = {name: steps_of(rules, judge) for name, rules in RULES.items()}
    for slots in (torch.int32, torch.int64):
        costs[f"first step, {slots}"] = steps_of(MIXED, judge, slots, warmed=True)
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
