"""Rules of unlike rows in one pass: what each row asks is a line of numbers beside its tokens (`Code`).
A pass computes each quantity once, and every row takes its own. The numbers are part of `Cycle.row_state`, so one
captured cycle serves every mix, and rows may enter and leave. Rules without a code have batches of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from selfjudge.decoding.guards import Guards
from selfjudge.decoding.rules import (
    EXACT,
    AcceptanceRule,
    Exact,
    FLy,
    Judged,
    Margin,
    SpeculativeSampling,
    TopK,
    compute_margin,
    is_among,
    list_existing,
)
from selfjudge.decoding.sampling import RowSampling
from selfjudge.ops import runs_kernels, worth_taking
from selfjudge.types import Block, LazyModule, Verdict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from selfjudge.judge.model import Judge
else:
    torch = LazyModule("torch")

SCORE, LOG_SCORE, MARGIN, RANK, ENTROPY = range(5)
"""What is computed of a draft; all but the margin and the rank with a minus, so that less is better."""


class Code(NamedTuple):
    """A draft passes if its value is below the limit (NaN: if its harm is worth the price) and `window` more match."""

    value: int
    limit: float
    price: float = math.inf
    window: int = 0


LOSSLESS = Code(MARGIN, -math.inf)


def encode(rule: AcceptanceRule | None) -> Code | None:
    """The code of a rule, of which vLLM's worker knows all; None: this rule has none, and is asked itself."""
    if rule is None or type(rule) in (Exact, SpeculativeSampling):
        return LOSSLESS
    if type(rule) is Judged:
        if rule.price is not None:
            return Code(LOG_SCORE, math.nan, rule.price)
        return Code(SCORE, -rule.theta, window=rule.confirm)
    if type(rule) is Margin:
        return Code(MARGIN, rule.threshold) if rule.price is None else Code(MARGIN, math.nan, rule.price)
    if type(rule) is TopK:
        return Code(RANK, rule.k)
    if type(rule) is FLy:
        at_most = torch.nextafter(torch.tensor(-rule.entropy), torch.tensor(1.0))  # −H ≤ −entropy
        return Code(ENTROPY, float(at_most), window=rule.window)
    return None


SETTINGS = len(Code._fields) + 1 + RowSampling.COLUMNS
"""Numbers of a row: its code, whether the guard of special tokens is on, how it samples."""


def list_settings(rules: Sequence[AcceptanceRule]) -> Tensor:
    """[B, SETTINGS] float32 the numbers of rows with these rules, all of which have a code."""
    lines = []
    for rule in rules:
        code, sampling = encode(rule), rule.sampling
        assert code is not None
        lines.append([*code, bool(rule.guarded()), *RowSampling.list_columns(sampling)])
    return torch.tensor(lines, dtype=torch.float32)


EXACT_ROWS, RELAXED_ROWS, SAMPLED_ROWS, FILTERED_ROWS = range(4)
"""What the rows of a pass need at most: the argmax alone; the judge and margins; random numbers; filters, too."""


def find_level(rules: Sequence[AcceptanceRule]) -> int:
    """The lowest level that does for rows with these rules."""
    level = EXACT_ROWS
    for rule in rules:
        if (sampling := rule.sampling) is not None:
            filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p
            level = max(level, FILTERED_ROWS if filtered else SAMPLED_ROWS)
        elif not rule.lossless:
            level = max(level, RELAXED_ROWS)
    return level


@dataclass(frozen=True, eq=False)
class RowRules(AcceptanceRule):
    """Every row has a rule of its own (`Block.settings`). It accepts what that rule accepts, on a CPU bit for bit.
    All rows have the same judge, special tokens and structure table, where their rules have any."""

    name = "rows"
    summary = "every row has a rule of its own"

    judge: Judge | None = None  # type: ignore[misc]
    special: tuple[int, ...] = ()
    level: int = FILTERED_ROWS

    @cached_property
    def _levels(self) -> Sequence[AcceptanceRule]:
        return [EXACT, *(replace(self, level=level) for level in range(RELAXED_ROWS, self.level)), self]

    def at(self, level: int) -> AcceptanceRule:
        """The rule of passes that need no more than this level, `EXACT` at the lowest; the same object every time."""
        return self._levels[level]

    def fits(self, rule: AcceptanceRule) -> bool:
        """Whether rows with this rule may be among these rows."""
        code, guards = encode(rule), rule.guards
        return (
            code is not None
            and code.value <= MARGIN
            and rule.judge in (None, self.judge)
            and rule.guarded() in ((), self.special)
            and (guards is None or guards.structure in (None, self.structure))
            and type(getattr(rule, "base", EXACT)) in (Exact, SpeculativeSampling)
        )

    @property
    def sampling(self) -> Any:  # type: ignore[override]
        """Not None where some row samples. How it does is among its settings."""
        return RowSampling if self.level >= SAMPLED_ROWS else None

    def sampled(self, settings: Tensor) -> RowSampling:
        """How the rows with these settings sample."""
        return RowSampling(settings[:, -RowSampling.COLUMNS :], filtered=self.level == FILTERED_ROWS)

    def finite(self, logits: Tensor, bad_rows: Tensor) -> Tensor:
        read = self.sampling is not None and not runs_kernels(logits)  # kernels replace; margins are not read there
        return super().finite(logits, bad_rows) if read else logits

    @property
    def guards(self) -> Guards:
        return Guards(0, self.structure)  # how many tokens are left of its strict start is among the state of a row

    def aligned(self, block: Block, logits: Tensor, choice: Tensor) -> Tensor:
        aligned = super().aligned(block, logits, choice)
        if self.sampling is None:
            return aligned
        own, part = self._sampled(block)
        if own.fused:
            own.verify(block, logits, aligned)
            return aligned
        rule = SpeculativeSampling(own)  # type: ignore[arg-type]
        return own.put(aligned, rule.aligned(part, logits[own.rows], choice[own.rows]))

    def following(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, n: Tensor) -> Tensor:
        token = super().following(block, logits, choice, aligned, n)
        if self.sampling is None:
            return token
        own, part = self._sampled(block)
        if own.fused:
            own.verify(block, logits, aligned, n, token)
            return token
        inputs = (logits[own.rows], choice[own.rows], aligned[own.rows], n[own.rows])
        return own.put(token, SpeculativeSampling(own).following(part, *inputs))  # type: ignore[arg-type]

    def _sampled(self, block: Block) -> tuple[RowSampling, Block]:
        """How rows sample, and what sampling reads of those that do: their draft logits are theirs alone."""
        assert block.settings is not None
        assert block.uniforms is not None
        own = self.sampled(block.settings)
        limits = None if block.limits is None else block.limits[own.rows]
        part = Block(
            block.draft_tokens[own.rows], block.target_logits, None, block.draft_logits, block.uniforms[own.rows],
            limits=limits,
        )  # fmt: skip
        return own, part

    def settled(self, block: Block) -> bool:
        if block.draft_tokens.device.type != "cpu" or block.argmax is None:
            return False
        assert block.settings is not None
        undecided = block.draft_tokens != block.argmax[0][:, :-1]
        if self.sampling is not None:
            undecided = undecided | (self.sampled(block.settings).temperature > 0)[:, None]
        if (inside := list_existing(block)) is not None:
            undecided = undecided & inside[:, 1:]
        return not bool((undecided & (block.settings[:, 1:2] != -math.inf)).any())  # of rows that are not lossless

    def __call__(self, block: Block) -> Verdict:
        if block.scores is not None:  # where the judge has no say, it does not matter that it could not say
            assert block.settings is not None
            block = replace(block, scores=torch.where(block.settings[:, :1] <= LOG_SCORE, block.scores, 0.0))
        return super().__call__(block)

    def _accepted(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, unusable: Tensor) -> Tensor:
        if block.scores is None and self.settled(block):
            return aligned
        assert block.settings is not None
        which, limit, _, _, guarded = block.settings[:, : len(Code._fields) + 1, None].unbind(1)
        price, window = block.settings[:, 2], block.settings[:, 3]
        alignment_only = unusable if block.exact_only is None else unusable | block.exact_only
        if self.special:
            special = is_among(block.draft_tokens, self.special) | is_among(choice, self.special)
            alignment_only = alignment_only | (special & (guarded > 0))
        value = compute_margin(block, logits)
        if block.scores is not None:
            judged = torch.where(which == SCORE, -block.scores, -block.scores.log())
            value = torch.where(which <= LOG_SCORE, judged, value)
        harm = torch.where(limit.isnan(), value, torch.where(value < limit, 0.0, math.inf))
        harm = harm.masked_fill(alignment_only, math.inf)  # no walk passes a mismatch there
        return aligned | worth_taking(harm, aligned, price, window)
