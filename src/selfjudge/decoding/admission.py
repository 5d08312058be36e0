"""The rows of a batch: requests wait, enter as rows, emit tokens and leave."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.acceptance import RowBlocks
from selfjudge.decoding.cycle import CycleOutcome
from selfjudge.decoding.edits import RowEdits
from selfjudge.decoding.gamma import LiveRows
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_by_row import find_level
from selfjudge.engine.draft import BatchEngines
from selfjudge.errors import SelfJudgeError, expect
from selfjudge.types import MAX_GAMMA, Emission, Finish, Gamma, Origin, TokenColumn, expect_whole, is_whole


class Request(NamedTuple):
    """A prompt to be answered."""

    prompt: Sequence[int]  # token ids
    max_new_tokens: int = 256
    seed: int = 0  # seed of the row's random numbers, under sampling rules
    structured: bool = False  # whether the prompt asks for code or other structure: guarded rules verify it exactly
    ignore_eos: bool = False  # whether the answer goes on after an end token
    edits: RowEdits = ()  # what reads or changes the logits of this answer; they are for one request alone
    rule: AcceptanceRule | None = None  # its own rule, where those of the batch are `RowRules`; `exact` if not given
    gamma: Gamma | None = None  # its own γ there
    trace: bool = True  # whether to say what the target wanted at judged tokens, if the batch does
    salt: Hashable = ""  # only requests of the same salt share prefixes that were read before


def count_longest(request: Request) -> int:
    """The most tokens that the row of a request may have, prompt and answer."""
    return len(request.prompt) + request.max_new_tokens


@dataclass
class AdmissionQueue:
    """Requests that wait for a running batch; the caller adds them between steps."""

    rows: int  # maximum rows at a time
    length: int  # maximum tokens of a row, prompt and answer; caches of static engines begin shorter, and grow
    waiting: deque[Request] = field(default_factory=deque)  # requests in the order of their arrival
    patient: bool = False  # whether nobody waits for first tokens: prompts are then read many at a time
    crowded: bool = False  # whether other batches wait for their turn: prompts are then read in small chunks

    def put(self, request: Request) -> None:
        if count_longest(request) > self.length:
            raise SelfJudgeError(f"a row of this batch has at most {self.length} tokens, prompt and answer")
        self.waiting.append(request)


def settle(kept: Sequence[int]) -> list[int]:
    """These places of rows in an order in which most rows stay: a vacant one gets the last row that lies behind."""
    there = set(kept)
    moved = sorted(place for place in there if place >= len(kept))
    return [place if place in there else moved.pop() for place in range(len(kept))]


@dataclass
class BatchRows:
    """The state of the rows in a batch."""

    index: NDArray[np.int64]  # number of each row, in the order of requests; −1: idle, to fill a captured size
    left: NDArray[np.int64]  # tokens that each row may still emit
    finished: NDArray[np.bool_]  # whether each row has ended
    gamma: NDArray[np.int64]  # γ of each row where it stays the same for the whole answer, else −1
    counts: NDArray[np.float64]  # as in `RowBlocks`
    run: NDArray[np.int64]  # as in `RowBlocks`
    endless: NDArray[np.bool_]  # whether end tokens are ignored
    requests: NDArray[np.object_]  # what each row answers; None of idle rows
    needs: NDArray[np.int64]  # [B, 3] of each row: its rule's level (`RowRules`), whether it is traced, has edits

    @classmethod
    def new(cls, numbers: Sequence[int], requests: Sequence[Request | None], gamma: int = -1) -> BatchRows:
        """Rows with these numbers and requests; idle ones are finished. A request's own γ goes before `gamma`."""
        index, objects = np.array(numbers, np.int64), np.empty(len(numbers), object)
        for row, request in enumerate(requests):  # numpy would make a table of them
            objects[row] = request
        left = np.array([1 if request is None else request.max_new_tokens for request in requests], np.int64)
        given = [None if request is None else request.gamma for request in requests]
        gammas = np.array([own if isinstance(own, int) else gamma for own in given], np.int64)
        endless = np.array([request is not None and request.ignore_eos for request in requests], np.bool_)
        needs = [
            (0, 0, 0) if r is None else (find_level([r.rule] if r.rule else []), r.trace, bool(r.edits))
            for r in requests
        ]
        needed = np.array(needs, np.int64).reshape(-1, 3)
        return cls(index, left, index < 0, gammas, *RowBlocks.new(len(index)), endless, objects, needed)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def alive(self) -> list[int]:
        """Positions of the rows that have not ended."""
        return np.flatnonzero(~self.finished).tolist()

    def cancel(self, cancelled: set[int]) -> None:
        """Finish the cancelled rows, and remove them from the caller's set."""
        if cancelled:
            self.finished |= np.isin(self.index, list(cancelled))
            cancelled.difference_update(self.index.tolist())

    def select(self, kept: list[int]) -> BatchRows:
        return BatchRows(*(column[kept] for column in vars(self).values()))

    def extended(self, other: BatchRows) -> BatchRows:
        columns = zip(vars(self).values(), vars(other).values(), strict=True)
        return BatchRows(*(np.concatenate(both) for both in columns))

    @property
    def longest(self) -> int:
        """The most tokens that a live row may have; 0 without live rows."""
        return max(map(count_longest, self.requests[~self.finished]), default=0)

    @property
    def blocks(self) -> RowBlocks:
        return RowBlocks(self.counts, self.run)

    @property
    def live(self) -> LiveRows:
        """What γ is chosen by."""
        live = ~self.finished
        return LiveRows(RowBlocks(self.counts[live], self.run[live]), self.left[live])

    @property
    def live_needs(self) -> tuple[int, bool, bool]:
        """The most that a live row needs: a level, a trace, edits."""
        level, traced, edited = self.needs[~self.finished].max(0, initial=0).tolist()
        return level, bool(traced), bool(edited)

    @property
    def live_edits(self) -> Sequence[RowEdits]:
        """The edits of each row, without those of ended ones; empty where no live row has any."""
        if not self.live_needs[2]:
            return ()
        return [() if ended else own.edits for own, ended in zip(self.requests, self.finished, strict=True)]

    def emit(self, outcome: CycleOutcome, eos_ids: Collection[int]) -> Sequence[Emission]:
        """Give a cycle's tokens to the live rows, cut at the end token and at their limits."""
        active = np.flatnonzero(~self.finished)
        if not outcome.drafts.shape[1]:  # one token a row, all rows at once
            column = outcome.next_token[active]
            self.left[active] -= 1
            at_end = np.any([column == token for token in eos_ids], 0) & ~self.endless[active]
            ended = np.where(at_end, 1, np.where(self.left[active] == 0, 2, 0))
            self.finished[active] = ended > 0
            if self.needs[active, 2].any():
                for row, token in zip(active.tolist(), column.tolist(), strict=True):
                    self._advance(row, [token])
            return TokenColumn(self.index[active], column, ended, self.gamma[active])
        columns = (outcome.accepted, outcome.next_token, outcome.drafts, outcome.judged, outcome.guarded)
        rows = zip(active.tolist(), *(column[active].tolist() for column in columns), strict=True)
        emissions = []
        for row, k, next_token, drafts, judged, exact in rows:
            tokens, finish = self._cut(row, [*drafts[:k], next_token], eos_ids)
            self._advance(row, tokens)
            origins: list[Origin] = ["judge" if by_judge else "draft" for by_judge in judged[:k]]
            origins = [*origins, "target"][: len(tokens)]
            traced = "judge" in origins and self.requests[row].trace
            judged_tokens = outcome.judged_tokens(row, len(tokens)) if traced else ()
            number, gamma = int(self.index[row]), int(self.gamma[row])
            guarded = (exact & (1 << len(tokens)) - 1).bit_count() if exact else 0
            emissions.append(Emission(number, tuple(tokens), tuple(origins), finish, judged_tokens, gamma, guarded))
        return tuple(emissions)

    def _advance(self, row: int, tokens: Sequence[int]) -> None:
        for edit in self.requests[row].edits:
            edit.advance(tokens)

    def _cut(self, row: int, tokens: list[int], eos_ids: Collection[int]) -> tuple[list[int], Finish | None]:
        """The tokens that a row may still emit, and why it ends with them; None if it does not end."""
        finish: Finish | None = None
        eos_ids = () if self.endless[row] else eos_ids
        for j, token in enumerate(tokens):
            if token in eos_ids or j + 1 == self.left[row]:
                finish = "eos" if token in eos_ids else "length"
                tokens = tokens[: j + 1]
                break
        self.left[row] -= len(tokens)
        self.finished[row] = finish is not None
        return tokens, finish


def check_requests(
    engines: BatchEngines, requests: Sequence[Request], rule: AcceptanceRule, gamma: Gamma
) -> list[Request]:
    """Check requests before any work; return them with the limits that the context window allows."""
    check_gamma(gamma)
    if gamma and engines.draft is None:
        raise SelfJudgeError("`gamma` > 0 needs a draft model; use gamma 0 for plain decoding")
    if not requests:
        raise SelfJudgeError("there is no prompt to decode")
    rule.check(int(gamma))
    return [limit_request(request, engines.window) for request in requests]


def read_ids(name: str, tokens: Iterable[int], vocabulary: int) -> list[int]:
    """A copy of token ids; whatever else it is, an engine would take it for some."""
    try:
        ids = list(map(operator.index, tokens))
    except TypeError:
        raise SelfJudgeError(f"`{name}` is a list of token ids, which are whole numbers") from None
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise SelfJudgeError(f"`{name}`: token ids lie between 0 and {vocabulary - 1}")
    return ids


def check_gamma(gamma: Gamma) -> None:
    """Refuse a γ that no cycle can have."""
    if gamma == "auto":
        return
    expect(is_whole(gamma), "gamma", "a whole number or auto", gamma)
    if not 0 <= gamma <= MAX_GAMMA:
        raise SelfJudgeError(f"`gamma` must lie between 0 (plain decoding) and {MAX_GAMMA}, not {gamma}")


def limit_request(request: Request, window: int) -> Request:
    """Return the request with the limit that the context window allows; refuse it if no token fits."""
    expect_whole("max_new_tokens", request.max_new_tokens, 1)
    length = len(request.prompt)
    if not length:
        raise SelfJudgeError("the prompt is empty: give at least one token")
    if length >= window:
        raise SelfJudgeError(f"the prompt has {length} tokens and the context window holds {window}: shorten it")
    return request._replace(max_new_tokens=min(request.max_new_tokens, window - length))
