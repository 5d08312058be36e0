"""Training a student or a head for a number of minutes or steps, with checkpoints that survive a kill."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from selfjudge.distill.config import Schedule
from selfjudge.distill.data import Dataset
from selfjudge.errors import SelfJudgeError
from selfjudge.models.checkpoint import check_finite
from selfjudge.store import read_tensors, write_tensors
from selfjudge.store.schema import conform
from selfjudge.types import Notify, ignore

WARM_UP = 100  # steps
DECAY = 0.01  # weight decay of matrices, per unit of learning rate
CHECKPOINT_SECONDS = 60.0


@dataclass
class TrainingState:
    """How far training has come; it is part of the checkpoint."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    epoch: int = 0
    position: int = 0  # batches of this epoch already seen
    best: float = 0.0
    without_gain: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class HeldOutScore(NamedTuple):
    """How good a learner is on held-out answers."""

    score: float  # the figure by which the best weights are chosen: larger is better
    figures: dict[str, Any]  # all figures, for the history
    text: str


class Learner(Protocol):
    """A model in training: its parameters, its loss and its measure."""

    data: Dataset
    layers: tuple[str, ...]  # prefixes of the names of parameters in layers: Muon trains the matrices among them

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def loss(self, rows: Sequence[int]) -> tuple[Tensor, int]:
        """The loss on these answers of the training corpus, and how many tokens it is a mean over."""

    def measure(self) -> HeldOutScore:
        """How good it is on held-out answers."""


class Trainer:
    """One training: what learns, its optimisers, its progress and best weights so far; each new best calls `keep`."""

    def __init__(
        self,
        learner: Learner,
        checkpoint: Path,
        schedule: Schedule,
        notify: Notify,
        keep: Callable[[HeldOutScore], object] = ignore,
    ) -> None:
        self.learner, self.keep = learner, keep
        self.checkpoint, self.schedule, self.notify = checkpoint, schedule, notify
        self.parameters: dict[str, nn.Parameter] = dict(learner.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.optimisers = make_optimisers(self.parameters, schedule.rate, learner.layers)
        self.state, self.best = TrainingState(), self._copy()
        if checkpoint.is_file():
            self._restore()
        self.loss: Tensor | None = None
        self.clock = time.monotonic()

    @property
    def share(self) -> float:
        """The share of the training that is done, by minutes, or by steps where they are given."""
        if self.state.without_gain >= self.schedule.patience:
            return 1.0
        steps = self.schedule.steps
        spent = self.state.seconds / (self.schedule.minutes * 60) if steps is None else self.state.step / steps
        return min(1.0, spent)

    def run(self) -> TrainingState:
        """Train, from a checkpoint if there is one, until the schedule or all gain ends; the best weights are kept."""
        evaluations = self.schedule.evaluations
        evaluated, notified, saved = math.floor(self.share * evaluations), 0.0, time.monotonic()
        batches = self._batches()
        try:
            while self.share < 1.0:
                self._learn(next(batches))
                if self.share * evaluations >= evaluated + 1:
                    evaluated = math.floor(self.share * evaluations)
                    self._evaluate()
                elif self.clock - notified > 1:
                    notified = self.clock
                    self.notify("training", self.share)
                if self.clock - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = self.clock = time.monotonic()
        finally:  # also when interrupted: nothing of the training is lost
            self._save()
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.best[name])
        return self.state

    def _batches(self) -> Iterator[Sequence[int]]:
        """The batches of all epochs from where the training is; each epoch has an order of its own."""
        state = self.state
        while True:
            generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + state.epoch)
            yield from self.learner.data.training.batches(self.schedule.batch_tokens, generator)[state.position :]
            state.epoch, state.position = state.epoch + 1, 0

    def _learn(self, rows: Sequence[int]) -> None:
        """One step; the learning rate warms up and then follows a cosine of the share that is done."""
        state = self.state
        warm = min(1.0, (state.step + 1) / WARM_UP)
        rate = self.schedule.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.share)))
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = rate
        loss, count = self.learner.loss(rows)
        for p in self.parameters.values():
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.loss = loss.detach() if self.loss is None else 0.98 * self.loss + 0.02 * loss.detach()
        state.step, state.tokens, state.position = state.step + 1, state.tokens + count, state.position + 1
        if self.device.type == "cuda" and state.step % 8 == 0:
            torch.cuda.synchronize(self.device)  # or the clock runs ahead of the device
        now = time.monotonic()
        state.seconds, self.clock = state.seconds + now - self.clock, now

    def _evaluate(self) -> None:
        """Measure the learner on held-out answers and keep the best weights; this time is not training."""
        state, share = self.state, self.share
        loss, measure = float(self.loss) if self.loss is not None else 0.0, self.learner.measure()
        reached = {"step": state.step, "seconds": round(state.seconds, 1), "tokens": state.tokens}
        state.history.append({**reached, "loss": round(loss, 4), **measure.figures})
        self.notify(f"training: loss {loss:.3f}, held-out {measure.text}", share)
        if measure.score > state.best:
            state.best, state.without_gain, self.best = measure.score, 0, self._copy()
            self.keep(measure)
        else:
            state.without_gain += 1
        self.clock = time.monotonic()

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _save(self) -> None:
        """Write the checkpoint: current and best weights, the optimisers' state, how far training has come."""
        arrays = {}
        for name, p in self.parameters.items():
            arrays[f"now.{name}"] = p.detach().cpu().numpy()
            arrays[f"best.{name}"] = self.best[name].cpu().numpy()
            for optimiser in self.optimisers:
                for key, tensor in optimiser.state.get(p, {}).items():
                    arrays[f"{key}@{name}"] = tensor.cpu().numpy()
        write_tensors(self.checkpoint, arrays, vars(self.state))

    def _restore(self) -> None:
        """Continue from the checkpoint; one of another shape, or with non-finite weights, is refused."""
        file, parameters = self.checkpoint, self.parameters
        arrays, metadata = read_tensors(file)
        self.state = TrainingState(**conform(metadata, TrainingState, file))
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        if shapes != {k[4:]: v.shape for k, v in arrays.items() if k.startswith("now.")}:
            raise SelfJudgeError(f"{file} belongs to a student of another shape: remove it or name another `out`")
        check_finite(((name, torch.from_numpy(array)) for name, array in arrays.items()), file)
        owner = {p: own for own in self.optimisers for group in own.param_groups for p in group["params"]}
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(torch.from_numpy(arrays[f"now.{name}"]))
                self.best[name] = torch.from_numpy(arrays[f"best.{name}"]).to(p)
                for key in (key for key in arrays if key.endswith(f"@{name}")):
                    owner[p].state[p][key.split("@")[0]] = torch.from_numpy(arrays[key]).to(p.device)


def with_gradients(loss: Tensor, *gradients: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that was computed without autograd, with its gradient for each of some tensors."""
    for tensor, gradient in gradients:
        product = (tensor * gradient).sum()
        loss = loss + (product - product.detach())  # nothing, with that gradient
    return loss


def make_optimisers(
    parameters: Mapping[str, Tensor], rate: float, layers: tuple[str, ...] = ("model.",), *, muon: bool | None = None
) -> list[Optimizer]:
    """Muon for matrices whose names begin like `layers` (by default on CUDA alone), AdamW for the rest."""
    cuda = all(p.is_cuda for p in parameters.values())
    muon = cuda if muon is None else muon
    inner = [p for name, p in parameters.items() if muon and p.dim() == 2 and name.startswith(layers)]
    rest = [p for p in parameters.values() if all(p is not q for q in inner)]
    matrices, vectors = ([p for p in rest if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimisers: list[Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=cuda)]
    if inner:
        optimisers.append(torch.optim.Muon(inner, lr=rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"))
    return optimisers
