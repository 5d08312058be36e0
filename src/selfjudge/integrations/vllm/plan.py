"""Which request owns each draft of a step, and what its rule asks of it; does not import vLLM.
vLLM verifies the drafts of all requests as one flat list of n rows; request `owner[i]` owns row i. The guards of
relaxed rules (`decoding.guards`) keep the state of each request's text on the device: of the text before its newest
token, which the next step reads. Steps without drafts are not seen: after a missed token all is verified exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from selfjudge.decoding.guards import ALWAYS, LINE, asks_for_structure, structure_of
from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.decoding.rules_by_row import Code, encode
from selfjudge.models.device import send


@dataclass(frozen=True)
class DraftRows:
    """Which of R requests owns each of n flat rows."""

    owner: Tensor  # [n] the request of each row
    place: Tensor  # [n] its index within the request's block
    counts: Tensor  # [R] drafts of each request
    first: Tensor  # [R] the first row of each request

    @classmethod
    def of(cls, counts: Tensor, total: int) -> DraftRows:
        """From the drafts of each request [R] on the device, and their sum on the host: nothing waits."""
        requests = torch.arange(len(counts), device=counts.device)
        owner = torch.repeat_interleave(requests, counts, output_size=total)
        first = counts.cumsum(0) - counts
        return cls(owner, torch.arange(total, device=counts.device) - first[owner], counts, first)

    @cached_property
    def newest(self) -> Tensor:
        """[R] the row of each request's newest token, among rows of which every request has one before its drafts."""
        return self.first + torch.arange(len(self.first), device=self.first.device)

    def leading(self, flags: Tensor) -> Tensor:
        """[R] how many flags [n] of each request's block are true before the first false one."""
        stops = torch.where(flags, self.counts[self.owner], self.place)
        return self.counts.scatter_reduce(0, self.owner, stops, "amin")


class Plan:
    """What the rules of R requests ask of the rows of a step."""

    def __init__(self, rules: Sequence[AcceptanceRule | None], rows: Any = None, sizes: Sequence[int] = ()) -> None:
        """`sizes` [R]: how many drafts each request has, known without asking the device."""
        self.rules, self.rows, self.sizes = list(rules), rows, sizes
        self.judged = any(isinstance(rule, Judged) for rule in self.rules)

    @cached_property
    def codes(self) -> list[Code] | None:
        """One for each request; None where a rule has none."""
        known = [encode(rule) for rule in self.rules]
        return None if None in known else [code for code in known if code is not None]

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether a draft's fate depends on those after it."""
        return any(code.price < math.inf or code.window for code in self.codes or ())

    @cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The codes on the device: value and limit of each row [n], price and window of each request [R]."""
        device, owner = self.rows.owner.device, self.rows.owner
        value, limit, price, window = send(self.codes, device).unbind(1)
        return value[owner].int(), limit[owner], price.contiguous(), window.int()


class LastPlan:
    """Rows and plan of a step. Most steps have those of the step before: then nothing is computed."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._rows: DraftRows | None = None
        self._plan: Plan | None = None

    def rows(self, sizes: list[int], device: torch.device) -> DraftRows:
        """The rows of requests with so many drafts."""
        if self._rows is None or self._sizes != sizes:
            self._sizes, self._rows = sizes, DraftRows.of(send(sizes, device), sum(sizes))
        return self._rows

    def plan(self, rules: Sequence[AcceptanceRule | None], rows: DraftRows) -> Plan:
        """What these rules ask of the latest rows."""
        if self._plan is None or self._plan.rows is not rows or self._plan.rules != list(rules):
            self._plan = Plan(rules, rows, self._sizes)
        return self._plan


class RequestGuards:
    """The guards of requests by their slots; a slot is a number that a request keeps."""

    def __init__(self, tokenizer: Any, slots: int, device: torch.device) -> None:
        self.tokenizer, self.structure = tokenizer, structure_of(tokenizer)
        self.state, self.position, self.strict_until = torch.zeros((3, slots), dtype=torch.long, device=device)
        """[slots] the state before the newest token, that token's position, the first position that is not strict."""
        self.code = torch.zeros(slots, dtype=torch.bool, device=device)  # [slots] code is verified exactly
        self._step: tuple[Tensor, Tensor, Tensor] | None = None

    def begin(self, rule: AcceptanceRule | None, prompt: Sequence[int] | None) -> tuple[int, int, int, bool]:
        """The state of a request that begins, the position of its newest token, the first one that is not strict, and
        whether code is. Without its tokens, where it is a matrix of embeddings, all of it is verified exactly."""
        length = 0 if prompt is None else len(prompt)
        strict_code = rule is not None and bool(rule.strict_code)
        asks = prompt is None or (strict_code and asks_for_structure(str(self.tokenizer.decode(list(prompt)))))
        strict_start = (rule.strict_start or 0) if rule is not None else 0
        return ALWAYS if asks else LINE, length, length + strict_start, strict_code

    def enter(self, slot: int, rule: AcceptanceRule | None, prompt: Sequence[int] | None) -> None:
        """A request begins in this slot."""
        self.state[slot], self.position[slot], self.strict_until[slot], self.code[slot] = self.begin(rule, prompt)

    def find_exact(
        self, slots: Tensor, newest: Tensor, positions: Tensor, drafts: Tensor, rows: DraftRows, most: int
    ) -> Tensor:
        """[n] the drafts at which alignment alone decides; `newest` tokens and their `positions` are of the requests
        [R] in these `slots`, each with at most `most` drafts."""
        place = torch.arange(most, device=drafts.device)
        at = (rows.first[:, None] + place).clamp_max(max(0, len(drafts) - 1))
        block = torch.where(place < rows.counts[:, None], drafts[at].long(), 0)
        missed = positions > self.position[slots]
        before = torch.where(missed, ALWAYS, self.state[slots])
        states = self.structure.follow(before, torch.cat([newest[:, None].long(), block], 1))
        inside = self.structure.on(drafts.device)[1][states[:, 1:]]
        strict = positions[:, None] + 1 + place < self.strict_until[slots][:, None]
        exact = ((inside[:, :-1] | inside[:, 1:]) & self.code[slots][:, None]) | strict
        self._step = slots, states, positions
        flat: Tensor = exact[rows.owner, rows.place]
        return flat

    def advance(self, emitted: Tensor) -> None:
        """Follow the tokens that each request [R] of the latest step got: its accepted drafts, and one more."""
        if self._step is None:
            return
        (slots, states, positions), self._step = self._step, None
        begun = positions >= self.position[slots]  # before that a prompt is being read
        after = states.gather(1, emitted.long().clamp_min(1)[:, None]).squeeze(1)
        self.state[slots] = torch.where(begun, after, self.state[slots])
        self.position[slots] = torch.where(begun, positions + emitted, self.position[slots])
