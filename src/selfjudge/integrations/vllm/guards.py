"""The guards of relaxed rules (`decoding.guards`) inside vLLM: the state of each request's text, on the device.

A step verifies drafts after a request's newest token, which the step before, or the prompt, has yielded. So a state is
that of the text before the newest token, which the next step reads. Steps without drafts are not seen: where a token
was missed, which positions tell, the rest of the answer is verified exactly. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfjudge.decoding.guards import ALWAYS, LINE, asks_for_structure, structure_of
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.integrations.vllm.plan import DraftRows


class RequestGuards:
    """The guards of requests by their slots; a slot is a number that a request keeps."""

    def __init__(self, tokenizer: Any, slots: int, device: torch.device) -> None:
        self.tokenizer, self.structure = tokenizer, structure_of(tokenizer)
        self.state, self.position, self.strict_until = torch.zeros((3, slots), dtype=torch.long, device=device)
        """[slots] the state before the newest token, that token's position, the first position that is not strict."""
        self.code = torch.zeros(slots, dtype=torch.bool, device=device)
        """[slots] whether code and structure are verified exactly."""
        self._step: tuple[Tensor, Tensor, Tensor] | None = None

    def enter(self, slot: int, rule: AcceptanceRule | None, prompt: Sequence[int] | None) -> None:
        """A request begins. Without its tokens, where it is a matrix of embeddings, all of it is verified exactly."""
        length = 0 if prompt is None else len(prompt)
        strict_code = rule is not None and bool(rule.strict_code)
        asks = prompt is None or (strict_code and asks_for_structure(str(self.tokenizer.decode(list(prompt)))))
        self.state[slot], self.position[slot], self.code[slot] = ALWAYS if asks else LINE, length, strict_code
        self.strict_until[slot] = length + ((rule.strict_start or 0) if rule is not None else 0)

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
