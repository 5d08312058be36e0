"""Training a student for a number of minutes, with checkpoints that survive the process."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from selfjudge.distill.data import Corpus
from selfjudge.distill.student import Student, distillation_loss
from selfjudge.engine.teacher_forced import attention
from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_tensors, write_tensors

WARM_UP = 100  # steps
DECAY = 0.01  # of matrices, per unit of learning rate
CHECKPOINT_SECONDS = 60.0


@dataclass
class State:
    """Where training stands; it travels with the checkpoint."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    epoch: int = 0
    position: int = 0
    """Batches of this epoch already seen."""
    best: float = 0.0
    without_gain: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def train(
    student: Student, corpus: Corpus, held_out: Corpus, checkpoint: Path, *, minutes: float, steps: int | None = None,
    rate: float = 3e-3,
    batch_tokens: int = 65536, evaluations: int = 10, patience: int = 4, seed: int = 0,
    notify: Callable[[str, float], None],
) -> State:  # fmt: skip
    """Train until the minutes are spent or `patience` evaluations brought no gain; the student ends up with its best weights.

    The learning rate follows the share of the time that is spent, or of `steps` where they are given: such a training can
    be repeated. A checkpoint that is found is continued.
    """
    device = student.proj_in.device
    parameters = dict(student.named_parameters())
    optimisers = make_optimisers(parameters, rate)
    state, best = State(), {name: p.detach().clone() for name, p in parameters.items()}
    if checkpoint.is_file():
        state, best = _restored(checkpoint, parameters, optimisers)
    budget, saved = minutes * 60, time.monotonic()
    last = time.monotonic()

    def spent() -> float:
        return min(1.0, state.seconds / budget if steps is None else state.step / steps)

    share = spent()
    if state.without_gain >= patience:
        share = 1.0
    evaluated, told = math.floor(share * evaluations), 0.0
    running: Tensor | None = None
    try:
        while share < 1.0:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + state.epoch)
            batches = corpus.batches(batch_tokens, generator)
            for rows in batches[state.position :]:
                warm = min(1.0, (state.step + 1) / WARM_UP)
                for group in (group for optimiser in optimisers for group in optimiser.param_groups):
                    group["lr"] = rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
                loss, count = _step(student, corpus, rows, optimisers, device)
                running = loss if running is None else 0.98 * running + 0.02 * loss
                state.step, state.tokens, state.position = state.step + 1, state.tokens + count, state.position + 1
                if device.type == "cuda" and state.step % 8 == 0:
                    torch.cuda.synchronize(device)  # or the clock runs ahead of the device
                now = time.monotonic()
                state.seconds, last = state.seconds + now - last, now
                share = spent()
                if share * evaluations >= evaluated + 1:
                    evaluated = math.floor(share * evaluations)
                    agreement = top1(student, held_out)
                    state.history.append({
                        "step": state.step, "seconds": round(state.seconds, 1), "tokens": state.tokens,
                        "loss": round(float(running), 4), "top1": round(agreement["all"], 4),
                    })  # fmt: skip
                    notify(f"training: loss {float(running):.3f}, held-out top-1 {agreement['all']:.1%}", share)
                    if agreement["all"] > state.best:
                        state.best, state.without_gain = agreement["all"], 0
                        best = {name: p.detach().clone() for name, p in parameters.items()}
                    else:
                        state.without_gain += 1
                    last = time.monotonic()  # evaluating is not training
                elif last - told > 1:
                    told = last
                    notify("training", share)
                if last - saved > CHECKPOINT_SECONDS:
                    _save(checkpoint, state, parameters, optimisers, best)
                    saved = last = time.monotonic()
                if share >= 1.0 or state.without_gain >= patience:
                    share = 1.0
                    break
            else:
                state.epoch, state.position = state.epoch + 1, 0
    finally:  # also when interrupted: nothing of the training is lost
        _save(checkpoint, state, parameters, optimisers, best)
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(best[name])
    return state


def make_optimisers(parameters: Mapping[str, Tensor], rate: float, *, muon: bool | None = None) -> list[Optimizer]:
    """Muon for the matrices of the layers (if not said otherwise, where bfloat16 products are fast), AdamW for all else."""
    cuda = all(p.is_cuda for p in parameters.values())
    muon = cuda if muon is None else muon
    layers = [p for name, p in parameters.items() if muon and p.dim() == 2 and name.startswith("model.")]
    rest = [p for p in parameters.values() if all(p is not q for q in layers)]
    matrices, vectors = ([p for p in rest if (p.dim() >= 2) == wide] for wide in (True, False))
    made: list[Optimizer] = [
        torch.optim.AdamW(
            [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=rate, betas=(0.9, 0.95), fused=cuda,
        )
    ]  # fmt: skip
    if layers:
        made.append(torch.optim.Muon(layers, lr=rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"))
    return made


def _step(
    student: Student, corpus: Corpus, rows: Tensor, optimisers: Sequence[Optimizer], device: torch.device
) -> tuple[Tensor, int]:
    ids, predicts, log_p, index = corpus.batch(rows, device)
    with attention(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        output = student.output()
        hidden = student.hidden(ids)[predicts].to(output.dtype)
    loss = distillation_loss(hidden, output, log_p, index)  # outside: autocast would make its softmax float32
    student.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    return loss.detach(), len(index)


@torch.no_grad()
def top1(student: Student, corpus: Corpus, batch_tokens: int = 32768) -> dict[str, float]:
    """How often the student's most likely token is the target's, at every token of held-out answers: all, and by source."""
    device = student.proj_in.device
    output = student.output()
    right: defaultdict[str, int] = defaultdict(int)
    seen: defaultdict[str, int] = defaultdict(int)
    student.eval()
    for rows in corpus.batches(batch_tokens, torch.Generator().manual_seed(0)):
        ids, predicts, _, index = corpus.batch(rows, device)
        with attention(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = student.hidden(ids)[predicts].to(output.dtype)
        same = torch.cat([(h @ output.T).argmax(-1) for h in hidden.split(8192)]) == index[:, 0]
        counts = predicts.sum(1)
        for source, hits, count in zip(
            [corpus.sources[i] for i in rows.tolist()],
            [int(part.sum()) for part in same.split(counts.tolist())],
            counts.tolist(),
            strict=True,
        ):
            for key in ("all", source):
                right[key] += hits
                seen[key] += count
    student.train()
    return {key: right[key] / seen[key] for key in right}


def _save(
    file: Path, state: State, parameters: Mapping[str, Tensor], optimisers: Sequence[Optimizer], best: Mapping[str, Tensor]
) -> None:  # fmt: skip
    arrays = {}
    for name, p in parameters.items():
        arrays[f"now.{name}"] = p.detach().cpu().numpy()
        arrays[f"best.{name}"] = best[name].cpu().numpy()
        for optimiser in optimisers:
            for key, tensor in optimiser.state.get(p, {}).items():
                if key != "step":
                    arrays[f"{key}.{name}"] = tensor.cpu().numpy()
    write_tensors(file, arrays, vars(state))


def _restored(
    file: Path, parameters: Mapping[str, Tensor], optimisers: Sequence[Optimizer]
) -> tuple[State, dict[str, Tensor]]:
    arrays, metadata = read_tensors(file)
    state = State(**metadata)
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if shapes != {k[4:]: v.shape for k, v in arrays.items() if k.startswith("now.")}:
        raise SelfJudgeError(f"{file} belongs to a student of another shape: remove it or name another --out")
    best = {}
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(torch.from_numpy(arrays[f"now.{name}"]))
            best[name] = torch.from_numpy(arrays[f"best.{name}"]).to(p)
    for optimiser in optimisers:
        keys = ("momentum_buffer",) if isinstance(optimiser, torch.optim.Muon) else ("exp_avg", "exp_avg_sq")
        owned = {id(p) for group in optimiser.param_groups for p in group["params"]}
        for name, p in parameters.items():
            if id(p) in owned and all(f"{key}.{name}" in arrays for key in keys):
                optimiser.state[p] = {key: torch.from_numpy(arrays[f"{key}.{name}"]).to(p) for key in keys}
                if "exp_avg" in keys:
                    step = torch.tensor(float(state.step), device=p.device if p.is_cuda else "cpu")
                    optimiser.state[p]["step"] = step
    return state, best
