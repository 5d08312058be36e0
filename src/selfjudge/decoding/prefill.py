"""Prompts on their way into a batch: read in chunks, between the steps of the rows that are in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfjudge.decoding.admission import AdmissionQueue, Request, check_prompts
from selfjudge.decoding.cycle import PhaseTimer
from selfjudge.engine.base import Engine, Output, RowCache
from selfjudge.engine.draft import Draft

ALONE = 4  # chunks at once while nobody else is there: whoever comes waits for them


class Group:
    """Prompts that are read together, by engines whose cache holds nothing else."""

    def __init__(self, rows: Sequence[tuple[int, Request]], device: torch.device) -> None:
        """`rows` are numbers and requests; their limits are those that the context window allows."""
        self.numbers, self.requests = [number for number, _ in rows], [request for _, request in rows]
        self.tokens, self.counts = _left_padded([request.prompt for request in self.requests], device)
        self.timer = PhaseTimer(device)
        self.target: Engine | None = None
        self.draft: Draft | None = None
        self.output: Output
        """What the target says after the last token that was read."""
        self.left = self.tokens.shape[1]
        """Columns that have not been read."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def caches(self) -> list[RowCache]:
        return [cache for cache in (self.target, self.draft) if cache is not None]

    def read(self, columns: int | None = None) -> None:
        """Read the next columns through target and draft, or all of them. Only a single row is read in pieces."""
        self.timer.wait()
        width = self.tokens.shape[1]
        assert columns is None or columns >= width or len(self) == 1
        start = width - self.left
        stop = width if columns is None else min(start + columns, width)
        tokens, counts = self.tokens[:, start:stop], (self.counts - (width - stop)).clamp_max(stop - start)
        assert self.target is not None
        with self.timer("target"):
            self.output = self.target.prefill(tokens, counts)
        if self.draft is not None:
            with self.timer("draft"):
                self.draft.read(tokens, counts, self.output.features)
        self.left = width - stop


@dataclass
class Prefill:
    """Who is being read. Short prompts share a pass; a long one is read alone, one chunk at a time."""

    target: Engine
    draft: Draft | None
    step: int
    """Tokens of a row in one step, γ + 1: so many slots it needs beyond its own tokens."""

    def __post_init__(self) -> None:
        self.groups: list[Group] = []
        self.seen = 0  # rows so far: the number of the next one
        self._passed_over = False

    @property
    def ready(self) -> bool:
        """Whether a group has been read to its end."""
        return any(not group.left for group in self.groups)

    def admit(self, queue: AdmissionQueue, alive: int, cancelled: set[int]) -> None:
        """Take in who waits, while there is room beside `alive` rows and those that are being read."""
        taken: list[tuple[int, Request]] = []
        reading = sum(map(len, self.groups))
        while queue.waiting and alive + reading + len(taken) < queue.rows:
            number, request = self.seen, queue.waiting.popleft()
            self.seen += 1
            if number in cancelled:
                cancelled.remove(number)
                continue
            (limit,) = check_prompts(self.target, self.draft, [request.prompt], [request.max_new_tokens])
            taken.append((number, request._replace(max_new_tokens=limit)))
        together: list[tuple[int, Request]] = []
        for row in taken:
            longest = max(len(request.prompt) for _, request in [*together, row])
            if together and longest * (len(together) + 1) > self.target.chunk:
                self._add(together)
                together = []
            together.append(row)
        self._add(together)

    def _add(self, rows: list[tuple[int, Request]]) -> None:
        if rows:
            self.groups.append(Group(rows, self.target.device))

    def cancel(self, cancelled: set[int]) -> None:
        """Forget the groups that nobody waits for any more, and take their rows out of the set."""
        for group in [group for group in self.groups if cancelled.issuperset(group.numbers)]:
            self.groups.remove(group)
            cancelled.difference_update(group.numbers)

    def read(self, alive: int, crowded: bool) -> None:
        """Read a chunk of whoever has the least left; the oldest, if it was passed over the last time.

        Beside `alive` rows, or where it is `crowded` outside, a chunk costs about what a step costs.
        """
        alone = not (alive or crowded) and len(self.groups) == 1
        chunk = max(self.target.chunk * (ALONE if alone else 1), 2 * alive * self.step)
        group = self.groups[0] if self._passed_over else min(self.groups, key=lambda group: group.left)
        self._passed_over = group is not self.groups[0]
        if group.target is None:
            group.target, group.draft = self.target.aside(), self.draft and self.draft.aside()
            longest = max(len(request.prompt) + request.max_new_tokens for request in group.requests)
            for cache in group.caches:
                cache.reserve(len(group), longest + self.step)
        group.read(max(1, chunk // len(group)))

    def take(self) -> Group:
        """A group that has been read to its end."""
        group = next(group for group in self.groups if not group.left)
        self.groups.remove(group)
        return group


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(padded, device=device), torch.tensor(counts, device=device)
