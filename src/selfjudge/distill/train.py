"""Training a student for a number of minutes, with checkpoints that survive the process."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from selfjudge.distill.config import Schedule
from selfjudge.distill.data import Corpus
from selfjudge.distill.student import Student, distillation_loss
from selfjudge.engine.teacher_forced import attention
from selfjudge.errors import SelfJudgeError
from selfjudge.models.weights import check_finite
from selfjudge.store import read_tensors, write_tensors
from selfjudge.store.schema import conform
from selfjudge.types import Notify

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


class Measure(NamedTuple):
    """How good a learner is on held-out answers."""

    score: float
    """The weights with the largest are kept."""
    figures: dict[str, Any]
    """For the history."""
    text: str


class Learner(Protocol):
    """What is trained: its parameters, its loss and how it is measured."""

    corpus: Corpus
    layers: tuple[str, ...]
    """Names of parameters that belong to layers begin so: Muon trains their matrices."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def loss(self, rows: Tensor) -> tuple[Tensor, int]:
        """The loss on these rows of the corpus, and how many tokens it is a mean over."""

    def measure(self) -> Measure:
        """On held-out answers."""

    def keep(self, measure: Measure) -> None:
        """The weights of now are the best so far."""


class Trainer:
    """One training: what learns, its optimisers, where it stands, and its best weights so far."""

    def __init__(self, learner: Learner, checkpoint: Path, schedule: Schedule, notify: Notify) -> None:
        self.learner = learner
        self.checkpoint, self.schedule, self.notify = checkpoint, schedule, notify
        self.parameters: dict[str, nn.Parameter] = dict(learner.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.optimisers = make_optimisers(self.parameters, schedule.rate, learner.layers)
        self.state, self.best = State(), self._copy()
        if checkpoint.is_file():
            self.state, self.best = _restored(checkpoint, self.parameters, self.optimisers)
        self.loss: Tensor | None = None
        self.clock = time.monotonic()

    @property
    def share(self) -> float:
        """Of the training that is done: of its minutes, or of its steps where they are given."""
        if self.state.without_gain >= self.schedule.patience:
            return 1.0
        steps = self.schedule.steps
        spent = self.state.seconds / (self.schedule.minutes * 60) if steps is None else self.state.step / steps
        return min(1.0, spent)

    def run(self) -> State:
        """Train until the schedule is spent or evaluations bring no more gain; the learner then has its best weights.

        A checkpoint that exists is continued.
        """
        evaluations = self.schedule.evaluations
        evaluated, told, saved = math.floor(self.share * evaluations), 0.0, time.monotonic()
        try:
            while self.share < 1.0:
                generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.state.epoch)
                batches = self.learner.corpus.batches(self.schedule.batch_tokens, generator)
                for rows in batches[self.state.position :]:
                    self._learn(rows)
                    if self.share * evaluations >= evaluated + 1:
                        evaluated = math.floor(self.share * evaluations)
                        self._evaluate()
                    elif self.clock - told > 1:
                        told = self.clock
                        self.notify("training", self.share)
                    if self.clock - saved > CHECKPOINT_SECONDS:
                        self._save()
                        saved = self.clock = time.monotonic()
                    if self.share >= 1.0:
                        break
                else:
                    self.state.epoch, self.state.position = self.state.epoch + 1, 0
        finally:  # also when interrupted: nothing of the training is lost
            self._save()
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.best[name])
        return self.state

    def _learn(self, rows: Tensor) -> None:
        """One step; the learning rate warms up and then follows a cosine of the share that is done."""
        state = self.state
        warm = min(1.0, (state.step + 1) / WARM_UP)
        rate = self.schedule.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.share)))
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = rate
        loss, count = self._step(rows)
        self.loss = loss if self.loss is None else 0.98 * self.loss + 0.02 * loss
        state.step, state.tokens, state.position = state.step + 1, state.tokens + count, state.position + 1
        if self.device.type == "cuda" and state.step % 8 == 0:
            torch.cuda.synchronize(self.device)  # or the clock runs ahead of the device
        now = time.monotonic()
        state.seconds, self.clock = state.seconds + now - self.clock, now

    def _step(self, rows: Tensor) -> tuple[Tensor, int]:
        loss, count = self.learner.loss(rows)
        for p in self.parameters.values():
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss.detach(), count

    def _evaluate(self) -> None:
        """Measure the learner on held-out answers and keep the best weights; this time is not training."""
        state, share = self.state, self.share
        loss, measure = float(self.loss) if self.loss is not None else 0.0, self.learner.measure()
        state.history.append(
            {
                "step": state.step,
                "seconds": round(state.seconds, 1),
                "tokens": state.tokens,
                "loss": round(loss, 4),
                **measure.figures,
            }
        )
        self.notify(f"training: loss {loss:.3f}, held-out {measure.text}", share)
        if measure.score > state.best:
            state.best, state.without_gain, self.best = measure.score, 0, self._copy()
            self.learner.keep(measure)
        else:
            state.without_gain += 1
        self.clock = time.monotonic()

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _save(self) -> None:
        _save(self.checkpoint, self.state, self.parameters, self.optimisers, self.best)


@dataclass
class StudentLearner:
    """A student that learns from the target's most likely tokens; its top-1 agreement with the target is measured."""

    student: Student
    corpus: Corpus
    held_out: Corpus
    layers: tuple[str, ...] = ("model.",)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.student.named_parameters()

    def loss(self, rows: Tensor) -> tuple[Tensor, int]:
        device = self.student.proj_in.device
        ids, predicts, log_p, index = self.corpus.batch(rows, device)
        with attention(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = self.student.output()
            hidden = self.student.hidden(ids)[predicts].to(output.dtype)
        # outside: autocast would make its softmax float32
        return distillation_loss(hidden, output, log_p, index), len(index)

    def measure(self) -> Measure:
        agreement = top1(self.student, self.held_out)["all"]
        return Measure(agreement, {"top1": round(agreement, 4)}, f"top-1 {agreement:.1%}")

    def keep(self, measure: Measure) -> None:
        """The checkpoint holds them."""


def train(
    student: Student, corpus: Corpus, held_out: Corpus, checkpoint: Path, schedule: Schedule, notify: Notify
) -> State:
    """Train a student; it ends up with its best weights. See `Trainer.run`."""
    return Trainer(StudentLearner(student, corpus, held_out), checkpoint, schedule, notify).run()


def make_optimisers(
    parameters: Mapping[str, Tensor], rate: float, layers: tuple[str, ...] = ("model.",), *, muon: bool | None = None
) -> list[Optimizer]:
    """Muon for matrices whose names begin like `layers` (unless told otherwise, on CUDA alone), AdamW for the rest."""
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


@torch.no_grad()
def top1(student: Student, corpus: Corpus, batch_tokens: int = 32768) -> dict[str, float]:
    """How often the student's most likely token is the target's over all answers, and by source."""
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
    file: Path,
    state: State,
    parameters: Mapping[str, Tensor],
    optimisers: Sequence[Optimizer],
    best: Mapping[str, Tensor],
) -> None:
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
    state = State(**conform(metadata, State, file))
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if shapes != {k[4:]: v.shape for k, v in arrays.items() if k.startswith("now.")}:
        raise SelfJudgeError(f"{file} belongs to a student of another shape: remove it or name another `out`")
    check_finite(((name, torch.from_numpy(array)) for name, array in arrays.items()), file)
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
