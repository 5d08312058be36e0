"""The target's own likelihoods of a draft token put in the place of the target's token.
    s(y, z_i) = log P(z_i | y_<i) − log P(y_i | y_<i)  +  log P(y_{i+1..i+N} | y_<i, z_i) − log P(y_{i+1..i+N} | y_≤i)

One pass over prompt and response scores the response itself and fills a cache. Each substitution is a branch off it:
the draft token and the N − 1 tokens of the response after it. Branches are packed side by side into rows. A mask shows
each branch only itself and the response up to its own place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from selfjudge.engine.reference import additive_masks, attention_kinds
from selfjudge.engine.teacher_forced import choose_width, log_probabilities, logit_rows, logits_of, sdpa_without_cudnn
from selfjudge.models.load import LoadedModel, as_loaded
from selfjudge.models.tokens import context_window
from selfjudge.types import Tell, ignore

TOKENS = {"cuda": 65536}  # of a pass, by device
PACK = {"cuda": 512}  # tokens of branches in a row, by device
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A response and the draft's tokens at some places of it."""

    prompt: Sequence[int]
    response: Sequence[int]
    places: Sequence[int]  # indices into the response, ascending
    drafts: Sequence[int]  # the draft's token at each place


@dataclass(frozen=True)
class Scores:
    """The target's likelihoods and states at the K places of a case."""

    log_p: Floats  # [K, 2] log-probabilities of the response's own token and of the draft's token
    entropy: Floats  # [K] entropy of the target's distribution, in nats
    rank: NDArray[np.int32]  # [K] number of tokens that the target finds more likely than the draft's
    original: Floats  # [K, N] log-probabilities of the tokens that follow in the response; nan past its end
    substituted: Floats  # [K, N] log-probabilities of the same tokens after the draft's token
    highest: Floats  # [K, N] log-probabilities of the most likely tokens there, after the draft's token
    hidden_before: Floats  # [K, H] states at the token before, which predicts both tokens
    hidden_target: Floats  # [K, H] states at the response's own token
    hidden_draft: Floats  # [K, H] states at the draft's token in its place

    @classmethod
    def join(cls, scores: Sequence[Scores], suffix_length: int, hidden_size: int) -> Scores:
        """The scores of several cases as one; without any, arrays of the right shapes with K = 0."""
        both, suffix, states = (np.zeros((0, width), np.float32) for width in (2, suffix_length, hidden_size))
        none = cls(both, both[:, 0], np.zeros(0, np.int32), *[suffix] * 3, *[states] * 3)
        return cls(*(np.concatenate([getattr(each, f.name) for each in (none, *scores)]) for f in fields(cls)))

    @property
    def prefix(self) -> Floats:
        """[K] the prefix term."""
        return self.log_p[:, 1] - self.log_p[:, 0]

    @property
    def suffix(self) -> Floats:
        """[K] the suffix term."""
        return sum_suffix(self.original, self.substituted)


def sum_suffix(original: NDArray[Any], substituted: NDArray[Any]) -> Floats:
    """[K] the change of the log-probabilities [K, N] of the suffix; nothing is added where `original` is nan."""
    change: Floats = np.where(np.isnan(original), 0, substituted - original).sum(1, dtype=np.float32)
    return change


def sum_scores(
    arrays: Mapping[str, NDArray[Any]], suffix_length: int, *, gap: int = 0, score: str = "likelihood"
) -> Floats:
    """[K] the score over at most `suffix_length` tokens of the suffix without the first `gap`. `likelihood` is the sum
    of the prefix and suffix terms. `confidence` takes the most likely tokens after the substitution instead of the
    original ones, and the mean instead of the sum."""
    suffix = slice(gap, suffix_length)
    original = arrays["original"][:, suffix]
    after = arrays["highest" if score == "confidence" else "substituted"][:, suffix]
    scores = arrays["log_p"][:, 1] - arrays["log_p"][:, 0] + sum_suffix(original, after)
    if score == "confidence":
        scores = scores / (1 + (~np.isnan(original)).sum(1))
    return np.asarray(scores, np.float32)


class Branch(NamedTuple):
    """A substitution as it is read: the draft's token at one place of a case, and the suffix after it."""

    case: int  # index of the case in its batch
    number: int  # index of the place in the case
    start: int  # position of the draft's token in prompt and response
    tokens: list[int]  # tokens that are read: the draft's token and all but the last of those that follow
    follows: list[int]  # tokens that are scored


class Scorer:
    """Scores cases with one target; `tokens` counts the tokens that it read."""

    def __init__(self, model: PreTrainedModel | LoadedModel, *, suffix_length: int = 20) -> None:
        self.loaded = as_loaded(model)
        self.model = model = self.loaded.causal_lm
        self.suffix_length = suffix_length
        self.tokens = 0
        self.device = model.device
        self._kinds = attention_kinds(model)
        self._window = context_window(model)
        self._sliding = getattr(model.config.get_text_config(), "sliding_window", None) or 0
        self._most = TOKENS.get(self.device.type, 512)
        self._pack = PACK.get(self.device.type, 64)

    def __call__(self, cases: Sequence[Case], notify: Tell = ignore) -> list[Scores]:
        """The scores of every case, in order; `notify` is told the share that is done."""
        assert all(a < b for case in cases for a, b in pairwise(case.places))
        if self.device.type == "cuda":
            self.loaded.release()  # the memory of its engine is needed here
        results: dict[int, Scores] = {}
        sizes = [len(case.prompt) + len(case.response) for case in cases]
        order = sorted(range(len(cases)), key=lambda i: (-sizes[i], i))
        while order:
            count = max(1, self._most // choose_width(sizes[order[0]], self.device, self._window))
            part, order = order[:count], order[count:]
            before = self.tokens
            try:
                scored = self._batch([cases[i] for i in part])
            except torch.OutOfMemoryError:  # half as much at a time, from now on
                if len(part) == 1 and self._most <= self._pack:
                    raise
                torch.cuda.empty_cache()
                self._most, order, self.tokens = self._most // 2, part + order, before
                continue
            results |= zip(part, scored, strict=True)
            notify(1 - len(order) / len(cases))
        return [results[i] for i in range(len(cases))]

    @torch.no_grad()
    def _batch(self, cases: Sequence[Case]) -> list[Scores]:
        """The scores of cases that share a pass."""
        wide = choose_width(max(len(c.prompt) + len(c.response) for c in cases), self.device, self._window)
        ids = torch.zeros(len(cases), wide, dtype=torch.long)
        for row, case in enumerate(cases):
            ids[row, : len(case.prompt) + len(case.response)] = torch.tensor([*case.prompt, *case.response])
        cache = DynamicCache()
        mask = None
        if self._kinds != {"full_attention"}:  # windows are said explicitly, as for the branches
            whole = torch.arange(wide, device=self.device).expand(len(cases), -1)
            mask = self._mask(whole, torch.zeros_like(whole), torch.zeros_like(whole), 0)
        with sdpa_without_cudnn():
            hidden = self.model.base_model(
                input_ids=ids.to(self.device), attention_mask=mask, past_key_values=cache, use_cache=True
            ).last_hidden_state
        self.tokens += sum(len(c.prompt) + len(c.response) for c in cases)
        results = [
            self._score_response(case, hidden[row, len(case.prompt) - 1 : len(case.prompt) + len(case.response)])
            for row, case in enumerate(cases)
        ]
        for rows in self._passes(self._branches(cases)):
            self._read(rows, cache, results)
        return results

    def _score_response(self, case: Case, states: Tensor) -> Scores:
        """Scores of the response, without branches; `states` begin at the prompt's last token."""
        response, places, drafts = (
            torch.tensor(list(tokens), dtype=torch.long, device=self.device)
            for tokens in (case.response, case.places, case.drafts)
        )
        log_p = log_probabilities(self.model, states[:-1], response)[0].cpu().numpy()
        parts = [torch.zeros((3, 0), device=self.device)]
        step = logit_rows(self.model)
        for state, draft in zip(states[places].split(step), drafts.split(step), strict=True):
            log_q = logits_of(self.model, state).float()
            log_q -= log_q.logsumexp(-1, keepdim=True)
            of_draft = log_q.gather(1, draft[:, None])
            entropy, rank = -(log_q.exp() * log_q).sum(-1), (log_q > of_draft).sum(-1)
            parts.append(torch.stack([of_draft.squeeze(1), entropy, rank]))
        draft_log_p, entropies, ranks = torch.cat(parts, 1).cpu().numpy()
        original = np.full((len(places), self.suffix_length), np.nan, np.float32)
        for row, place in enumerate(case.places):
            after = log_p[place + 1 : place + 1 + self.suffix_length]
            original[row, : len(after)] = after
        return Scores(
            log_p=np.stack([log_p[list(case.places)], draft_log_p], 1),
            entropy=entropies,
            rank=ranks.astype(np.int32),
            original=original,
            substituted=np.full_like(original, np.nan),
            highest=np.full_like(original, np.nan),
            hidden_before=states[places].float().cpu().numpy(),
            hidden_target=states[1 + places].float().cpu().numpy(),
            hidden_draft=np.empty((len(places), states.shape[-1]), np.float32),
        )

    def _branches(self, cases: Sequence[Case]) -> list[Branch]:
        """All substitutions of these cases, in order."""
        branches = []
        for row, case in enumerate(cases):
            for number, (place, draft) in enumerate(zip(case.places, case.drafts, strict=True)):
                follows = list(case.response[place + 1 : place + 1 + self.suffix_length])
                branches.append(Branch(row, number, len(case.prompt) + place, [draft, *follows[:-1]], follows))
        return branches

    def _passes(self, branches: Sequence[Branch]) -> Iterator[list[list[Branch]]]:
        """Passes of rows. A row holds branches of one response; rows of a pass have similar widths."""
        rows: list[list[Branch]] = []
        room = 0
        for branch in branches:
            if not rows or rows[-1][0].case != branch.case or room < len(branch.tokens):
                rows.append([])
                room = max(self._pack, len(branch.tokens))
            rows[-1].append(branch)
            room -= len(branch.tokens)
        rows.sort(key=lambda row: -sum(len(b.tokens) for b in row))
        while rows:
            count = max(1, self._most // choose_width(sum(len(b.tokens) for b in rows[0]), self.device))
            yield rows[:count]
            rows = rows[count:]

    def _read(self, rows: Sequence[Sequence[Branch]], prefixes: DynamicCache, results: Sequence[Scores]) -> None:
        """One pass over rows of branches; fills in their scores."""
        wide = choose_width(max(sum(len(b.tokens) for b in row) for row in rows), self.device)
        shape = (len(rows), wide)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        owner, starts = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        flat: list[Branch] = []
        first: list[int] = []  # indices of draft tokens in the flattened rows
        for row, branches in enumerate(rows):
            at = 0
            for branch in branches:
                here = slice(at, at + len(branch.tokens))
                tokens[row, here], owner[row, here], starts[row, here] = branch.tokens, len(flat), branch.start
                positions[row, here] = branch.start + np.arange(len(branch.tokens))
                flat.append(branch)
                first.append(row * wide + at)
                at = here.stop
        cases = torch.tensor([row[0].case for row in rows], device=self.device)
        length = int(starts.max())  # of the response before the last branch
        cache = DynamicCache()
        for number, layer in enumerate(prefixes.layers):
            cache.update(layer.keys[cases, :, :length], layer.values[cases, :, :length], number)
        place, owners, begins = (torch.from_numpy(a).to(self.device) for a in (positions, owner, starts))
        with sdpa_without_cudnn():
            hidden = self.model.base_model(
                input_ids=torch.from_numpy(tokens).to(self.device),
                position_ids=place,
                past_key_values=cache,
                attention_mask=self._mask(place, owners, begins, length),
                use_cache=True,
            ).last_hidden_state.flatten(0, 1)
        self.tokens += sum(len(branch.tokens) for branch in flat)
        self._fill_in(flat, hidden, first, results)

    def _fill_in(self, flat: Sequence[Branch], hidden: Tensor, first: Sequence[int], results: Sequence[Scores]) -> None:
        """Fill in the scores of branches whose states begin at the rows `first` of `hidden` [R, H]."""
        scored = [at + i for branch, at in zip(flat, first, strict=True) for i in range(len(branch.follows))]
        follows = [token for branch in flat for token in branch.follows]
        states = hidden[torch.tensor(first, dtype=torch.long, device=self.device)].float().cpu().numpy()
        rows, tokens = (torch.tensor(ids, dtype=torch.long, device=self.device) for ids in (scored, follows))
        log_p, highest, _ = (column.cpu().numpy() for column in log_probabilities(self.model, hidden[rows], tokens))
        at = 0
        for branch, state in zip(flat, states, strict=True):
            scores, count = results[branch.case], len(branch.follows)
            scores.hidden_draft[branch.number] = state
            scores.substituted[branch.number, :count] = log_p[at : at + count]
            scores.highest[branch.number, :count] = highest[at : at + count]
            at += count

    def _mask(self, positions: Tensor, owner: Tensor, starts: Tensor, length: int) -> Any:
        """Additive masks [B, 1, Q, L + Q] by kind of attention: the response before a branch, and the branch so far."""
        wide = positions.shape[1]
        slot = torch.arange(length, device=self.device)
        column = torch.arange(wide, device=self.device)
        same = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
        own = (same & (column[None, :] <= column[:, None])) | torch.eye(wide, dtype=torch.bool, device=self.device)
        seen = torch.cat([slot < starts[:, :, None], own], 2)
        keys = torch.cat([slot.expand(len(positions), -1), positions], 1)
        return additive_masks(self._kinds, seen, positions, keys, self._sliding, self.model.dtype)
