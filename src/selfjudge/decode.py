"""THE loop: batched speculative decoding over any two engines and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many stand, both caches
are rewound, and the rows get their accepted drafts plus one token of the target. γ = 0 is plain autoregressive decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`shells.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfjudge.accept import AcceptanceRule, regular, sample
from selfjudge.engine import Engine
from selfjudge.errors import SelfJudgeError
from selfjudge.types import PHASES, Block, Emission, Finish, Origin, Step, Verdict


def decode(
    target: Engine,
    draft: Engine | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    *,
    gamma: int = 5,
    max_new_tokens: int = 256,
    eos_ids: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    cancelled: Collection[int] = (),
) -> Iterator[Step]:
    """Decode all prompts together; rows that finish leave the batch.

    `draft` may be None only with γ = 0. `cancelled` may be filled by the caller between steps: those rows leave before
    the next one. With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours.
    """
    limits = check(target, draft, prompts, rule, gamma, max_new_tokens)
    seeds = range(len(prompts)) if seeds is None else seeds
    rows = [
        _Row(i, limit, torch.Generator().manual_seed(seed))
        for i, (limit, seed) in enumerate(zip(limits, seeds, strict=True))
    ]
    clock = _Clock(target.device)

    # prefill: the target's token after the prompt belongs to no cycle
    tokens, counts = _left_padded(prompts, target.device)
    with clock("target"):
        output = target.extend(tokens, counts, keep=1)
    with clock("rule"):
        block = Block(tokens[:, :0], output.logits, output.hidden, uniforms=_uniforms(rows, 1, rule, target.device))
        verdict = rule(block)
        last = verdict.next_token[:, None]
    if draft is not None and gamma:
        with clock("draft"):
            draft.extend(tokens, counts, keep=1)
    backlog, missing = last, torch.ones_like(counts)  # emitted tokens [B, 2] the draft has not seen yet, and how many
    yield _emitted(0, rows, tokens[:, :0], verdict, eos_ids, clock)

    cycle = 0
    while True:
        alive = [i for i, row in enumerate(rows) if not row.finished and row.index not in cancelled]
        if len(alive) < len(rows):
            if not alive:
                return
            rows = [rows[i] for i in alive]
            last, backlog, missing = last[alive], backlog[alive], missing[alive]
            target.select(alive)
            if draft is not None and gamma:
                draft.select(alive)

        cycle += 1
        width = min(gamma, max(row.left for row in rows) - 1)  # no drafts past the longest row's limit
        u = _uniforms(rows, 2 * gamma + 1, rule, target.device)
        drafts, draft_logits = last[:, :0], None
        if width and draft is not None:
            with clock("draft"):
                drafts, draft_logits = _propose(draft, backlog, missing, width, rule, target.vocab_size, u)
        with clock("target"):
            output = target.extend(torch.cat([last, drafts], 1))
        uniforms = None if u is None else torch.cat([u[:, gamma : gamma + width], u[:, -1:]], 1)
        block = Block(drafts, output.logits, output.hidden, draft_logits, uniforms)
        if rule.judge is not None and width:
            with clock("judge"):
                block = replace(block, scores=rule.judge(block))
        with clock("rule"):
            verdict = rule(block)
            k = verdict.n_accepted
            target.rewind(width - k)
            if width and draft is not None:
                draft.rewind((width - 1 - k).clamp_min(0))  # d_γ itself was never fed to the draft
            last = verdict.next_token[:, None]
            # a fully accepted block leaves the draft two tokens behind: d_γ and the bonus token
            backlog, missing = last, torch.ones_like(missing)
            if width and bool((k == width).any()):
                backlog = torch.cat([drafts[:, -1:], last], 1)
                missing = 1 + (k == width).long()
        yield _emitted(cycle, rows, drafts, verdict, eos_ids, clock)


def _propose(
    draft: Engine, backlog: Tensor, missing: Tensor, gamma: int, rule: AcceptanceRule, vocab_size: int, u: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[B, γ] drafts and, when sampling, the [B, γ, V] logits they were drawn from."""
    tokens: list[Tensor] = []
    drawn_from: list[Tensor] = []
    output = draft.extend(backlog, missing if backlog.shape[1] > 1 else None, keep=1)
    for i in range(gamma):
        logits = _fitted(regular(output.logits[:, -1]), vocab_size)
        if rule.sampling is not None:
            assert u is not None
            logits = rule.sampling.warp(logits)
            drawn_from.append(logits)
            tokens.append(sample(logits.softmax(-1), u[:, i]))
        else:
            tokens.append(logits.argmax(-1))
        if i + 1 < gamma:
            output = draft.extend(tokens[-1][:, None])
    return torch.stack(tokens, 1), torch.stack(drawn_from, 1) if drawn_from else None


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the target's vocabulary: families pad their embedding matrices to different sizes."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :vocab_size]


@dataclass
class _Row:
    """What the loop keeps of one row."""

    index: int
    left: int
    """Tokens it may still emit."""
    generator: torch.Generator
    finished: bool = False


def _emitted(
    cycle: int, rows: list[_Row], drafts: Tensor, verdict: Verdict, eos_ids: Collection[int], clock: _Clock
) -> Step:
    """Move the verdict to the host (the one synchronisation of a cycle), cut at the end token and the limit."""
    with clock("rule"):
        drafted, judged = drafts.tolist(), verdict.judged.tolist()
        counts, following = verdict.n_accepted.tolist(), verdict.next_token.tolist()
        irregular = bool(verdict.irregular)
    emissions = []
    for i, row in enumerate(rows):
        k = counts[i]
        tokens = [*drafted[i][:k], following[i]]
        origins: list[Origin] = [*("judge" if judged[i][j] else "draft" for j in range(k)), "target"]
        finish: Finish | None = None
        for j, token in enumerate(tokens):
            if token in eos_ids or j + 1 == row.left:
                finish = "eos" if token in eos_ids else "length"
                tokens, origins = tokens[: j + 1], origins[: j + 1]
                break
        row.left -= len(tokens)
        row.finished = finish is not None
        emissions.append(Emission(row.index, tuple(tokens), tuple(origins), finish))
    return Step(cycle, tuple(emissions), clock.take(), irregular)


def check(
    target: Engine,
    draft: Engine | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    gamma: int,
    max_new_tokens: int,
) -> list[int]:
    """Refuse impossible requests before any work; the number of tokens each row may emit."""
    if gamma < 0:
        raise SelfJudgeError(f"gamma must be 0 (plain decoding) or more, not {gamma}")
    if gamma and draft is None:
        raise SelfJudgeError("gamma > 0 needs a draft model; use gamma 0 for plain decoding")
    if max_new_tokens < 1:
        raise SelfJudgeError(f"max-new-tokens must be at least 1, not {max_new_tokens}")
    if not prompts:
        raise SelfJudgeError("there is no prompt to decode")
    rule.check(gamma)
    window = target.window if draft is None else min(target.window, draft.window)
    limits = []
    for prompt in prompts:
        if not prompt:
            raise SelfJudgeError("the prompt is empty: give at least one token")
        if len(prompt) >= window:
            raise SelfJudgeError(
                f"the prompt has {len(prompt)} tokens and the context window holds {window}: shorten the prompt"
            )
        limits.append(min(max_new_tokens, window - len(prompt)))
    return limits


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(padded, device=device), torch.tensor(counts, device=device)


def _uniforms(rows: list[_Row], count: int, rule: AcceptanceRule, device: torch.device) -> Tensor | None:
    """[B, count] from each row's own generator, the same count every cycle whatever the neighbours do."""
    if rule.sampling is None:
        return None
    return torch.stack([torch.rand(count, generator=row.generator) for row in rows]).to(device)


class _Clock:
    """Wall clock by phase; on an accelerator each phase waits for its kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
