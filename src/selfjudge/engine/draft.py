"""Drafts: they propose tokens to a target, and keep up with the tokens that are accepted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, device

from selfjudge.engine.base import Engine, HeadEngine, RowCache
from selfjudge.errors import SelfJudgeError
from selfjudge.types import Verdict

BACKLOG = 64  # newest tokens that a draft reads when it drafts again after plain cycles; it never reads older ones


class Backlog:
    """The tokens of every row that a draft has not read, the newest last, in buffers that captured graphs refer to."""

    def __init__(self, on: device, hidden: int = 0, dtype: torch.dtype = torch.float32) -> None:
        """With `hidden`, every token has a state of that width beside it."""
        self._buffers = [
            torch.zeros(0, BACKLOG, dtype=torch.long, device=on),
            torch.zeros(0, dtype=torch.long, device=on),
            torch.zeros(0, BACKLOG, hidden, dtype=dtype, device=on),
        ]
        self.reserve(0)

    def _rows(self, batch: int) -> None:
        """Work on the first rows of the buffers, which grow if they must."""
        if batch > len(self._buffers[0]):
            old = self._buffers
            self._buffers = [b.new_zeros((batch, *b.shape[1:])) for b in old]
            for new, values in zip(self._buffers, old, strict=True):
                new[: len(values)] = values
        self.tokens, self.missing, self.states = (b[:batch] for b in self._buffers)
        """[B, BACKLOG], right-aligned; [B] how many of them have not been read; [B, BACKLOG, H]"""

    def reserve(self, batch: int) -> None:
        """Begin with so many rows, each of which lacks the token that the target says after its prompt."""
        self._rows(batch)
        self.missing.fill_(1)
        self.states.zero_()
        self.most = 1
        """The most that a row may lack, as far as the host knows."""

    def enter(self, first: Tensor) -> None:
        new = len(self.missing) - len(first)
        self.tokens[new:, -1] = first
        self.missing[new:] = 1

    def push(self, tokens: Tensor, states: Tensor | None = None) -> None:
        """One more token [B, 1] of every row, and its state [B, 1, H]."""
        self.tokens.copy_(torch.cat([self.tokens[:, 1:], tokens], 1))
        if states is not None:
            self.states.copy_(torch.cat([self.states[:, 1:], states], 1))
        self.missing.add_(1).clamp_(max=BACKLOG)

    def caught_up(self) -> None:
        """All but the newest token of every row have been read."""
        self.missing.fill_(1)
        self.most = 1

    def join(self, other: Self, idle: int) -> None:
        there, new = len(self.missing), len(other.missing)
        self._rows(there + new + idle)
        self.missing[there:] = 1
        for mine, others in zip(self.tensors(), other.tensors(), strict=True):
            mine[there : there + new] = others
        self.most = max(self.most, other.most)

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.missing.device)
        for tensor in self.tensors():
            tensor[: len(rows)] = tensor[index]
        self._rows(len(rows))

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.missing, self.states]


class Drafter(RowCache):
    """Proposes tokens to a target, over the same ragged batch. γ may change from cycle to cycle, also to 0 and back.

    It has an engine and the backlog of its rows, which change together.
    """

    engine: RowCache
    features: tuple[int, ...] = ()
    """Layers of the target whose inputs the draft reads, for every token; most drafts read none."""
    vocabulary: Tensor | None = None
    """[D] the token of each of its logits; None where the logits are those of all tokens, in their order."""

    def __init__(self, engine: RowCache, backlog: Backlog) -> None:
        self.engine, self.backlog = engine, backlog
        self.device, self.window, self.static = engine.device, engine.window, engine.static

    @property
    def version(self) -> int:
        return self.engine.version

    def reserve(self, batch: int, length: int) -> None:
        self.engine.reserve(batch, length)
        self.backlog.reserve(batch)

    def join(self, other: Self, idle: int = 0) -> None:
        self.engine.join(other.engine, idle)
        self.backlog.join(other.backlog, idle)

    def select(self, rows: list[int]) -> None:
        self.engine.select(rows)
        self.backlog.select(rows)

    def state(self) -> list[Tensor]:
        return [*self.engine.state(), *self.backlog.tensors()]

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        """The next tokens [B, T] of prompts, of row b the last counts[b], with the target's features [B, T, F]."""

    def enter(self, first: Tensor) -> None:
        """The prompts of the last rows have been read; [B'] the target's first tokens after them."""
        self.backlog.enter(first)

    def prepare(self, gamma: int) -> None:
        """Catch up before a cycle of γ proposals, outside of its captured graph, where a cycle would read too little.

        Plain cycles read nothing, so that they cost nothing; after many of them the oldest tokens are left out.
        """

    def propose(self, gamma: int) -> Tensor:
        """Read the accepted tokens that have not been read; logits [B, D] of the first of γ proposals."""
        raise NotImplementedError

    def extend(self, tokens: Tensor) -> Tensor:
        """Logits [B, D] of the proposal that follows the proposals so far, the last of which are `tokens` [B]."""
        raise NotImplementedError

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        """Forget the rejected ones of proposals [B, γ], γ ≥ 0; `features` [B, γ+1, F] are of the verifying pass."""


class LayersDraft(Drafter):
    """A whole model as a draft. It lacks the newest token, and the last proposal too if all of them are accepted."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Backlog(engine.device))

    def aside(self) -> Self:
        return type(self)(self.engine.aside())

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        self.engine.prefill(tokens, counts)

    def prepare(self, gamma: int) -> None:
        backlog = self.backlog
        if gamma and self.static and backlog.most > 2:
            self.engine.prefill(backlog.tokens[:, -backlog.most : -1], backlog.missing - 1)
            backlog.caught_up()
        backlog.most = 2 if gamma else min(backlog.most + 1, BACKLOG)

    def propose(self, gamma: int) -> Tensor:
        width = 2 if self.static else int(self.backlog.missing.max())
        missing = None if width == 1 else self.backlog.missing
        return self.engine.extend(self.backlog.tokens[:, -width:], missing, keep=1).logits[:, -1]

    def extend(self, tokens: Tensor) -> Tensor:
        return self.engine.extend(tokens[:, None]).logits[:, -1]

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        k, drafted, last = verdict.n_accepted, drafts.shape[1], verdict.next_token[:, None]
        if not drafted:
            self.backlog.push(last)
            return
        self.engine.rewind((drafted - 1 - k).clamp_min(0))  # the last draft itself was never fed to the draft
        # a fully accepted block leaves the draft two tokens behind: d_γ and the bonus token
        self.backlog.tokens[:, -2:] = torch.cat([drafts[:, -1:], last], 1)
        self.backlog.missing.copy_(1 + (k == drafted).long())


class EagleDraft(Drafter):
    """A head as a draft. Its cache holds entries of the target's own states; proposals are rewound after each cycle."""

    engine: HeadEngine

    def __init__(self, engine: HeadEngine, features: tuple[int, ...], dtype: torch.dtype) -> None:
        """`features` are the target's layers that the head reads, in the dtype of the target's states."""
        super().__init__(engine, Backlog(engine.device, len(features) * engine.hidden_size, dtype))
        self.features, self.vocabulary = features, engine.vocabulary
        self._begun = False

    def reserve(self, batch: int, length: int) -> None:
        super().reserve(batch, length)
        self._begun = False

    def aside(self) -> Self:
        return type(self)(self.engine.aside(), self.features, self.backlog.states.dtype)

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        """A prompt's first token makes no entry: there is no state before it. Its last state waits for the answer."""
        assert features is not None
        before = torch.cat([self.backlog.states[:, -1:], features[:, :-1]], 1)
        self.engine.append(tokens, before, counts if self._begun else counts - 1, keep=0)
        self.backlog.states[:, -1:] = features[:, -1:]
        self._begun = True

    def prepare(self, gamma: int) -> None:
        backlog = self.backlog
        if gamma and self.static and backlog.most > gamma + 1:
            late = slice(-backlog.most, -1)
            self.engine.append(backlog.tokens[:, late], backlog.states[:, late], backlog.missing - 1, keep=0)
            backlog.caught_up()
        backlog.most = gamma + 1 if gamma else min(backlog.most + 1, BACKLOG)

    def propose(self, gamma: int) -> Tensor:
        backlog, width = self.backlog, gamma + 1 if self.static else int(self.backlog.missing.max())
        return self._step(backlog.tokens[:, -width:], backlog.states[:, -width:], backlog.missing)

    def extend(self, tokens: Tensor) -> Tensor:
        return self._step(tokens[:, None], self._last, None)

    def _step(self, tokens: Tensor, states: Tensor, counts: Tensor | None) -> Tensor:
        output = self.engine.append(tokens, states, counts)
        assert output.features is not None
        self._last = output.features
        return output.logits[:, -1]

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        assert features is not None
        k, drafted, last = verdict.n_accepted, drafts.shape[1], verdict.next_token[:, None]
        if not drafted:
            self.backlog.push(last, features)
            return
        self.engine.rewind(torch.full_like(k, drafted - 1))  # entries whose states were the head's own
        # d_1 … d_k and the token after them, each with the target's state before it, right-aligned
        column = (torch.arange(drafted + 1, device=k.device) - (drafted - k)[:, None]).clamp_min(0)
        tokens = torch.cat([drafts, last], 1).scatter_(1, k[:, None], last)
        self.backlog.tokens[:, -drafted - 1 :] = tokens.gather(1, column)
        states = features.gather(1, column[..., None].expand_as(features))
        self.backlog.states[:, -drafted - 1 :] = states
        self.backlog.missing.copy_(k + 1)


@dataclass(frozen=True, eq=False)
class BatchEngines:
    """A target's engine and its draft over the same rows."""

    target: Engine
    draft: Drafter | None = None
    """None for plain decoding."""
    kept: dict[Hashable, Any] = field(default_factory=dict)
    """What earlier batches learned about these models on such engines."""

    def __post_init__(self) -> None:
        if self.target.static and self.draft is not None and not self.draft.static:
            raise SelfJudgeError(
                "a target on the cuda engine needs a draft on it too: use the reference engine for both"
            )

    @property
    def caches(self) -> list[RowCache]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def window(self) -> int:
        """The most positions that a row may have."""
        return min(cache.window for cache in self.caches)

    def reserve(self, rows: int, length: int) -> None:
        """Begin a batch: room for so many rows of at most `length` tokens."""
        for cache in self.caches:
            cache.reserve(rows, length)

    def aside(self) -> BatchEngines:
        """The same weights with empty caches, for prompts that will `join` these."""
        return BatchEngines(self.target.aside(), self.draft and self.draft.aside(), self.kept)

    def join(self, other: BatchEngines, idle: int) -> None:
        """Take over the rows of engines that were `aside`, then some idle ones."""
        for cache, others in zip(self.caches, other.caches, strict=True):
            cache.join(others, idle)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        for cache in self.caches:
            cache.select(rows)
