"""Prefill: prompts are read in chunks, between the steps of the rows that are already in the batch."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request, count_longest, limit_request
from selfjudge.decoding.cycle import PhaseTimer
from selfjudge.engine.base import Output
from selfjudge.engine.draft import BACKLOG, BatchEngines
from selfjudge.engine.prefixes import count_positions
from selfjudge.models.device import send
from selfjudge.models.memory import PASS_TOKENS
from selfjudge.types import Emission

START_TOKENS = 2048  # tokens of a row in the static caches of a queue, before it asks for more
WAIT_CYCLES, WAIT_SHARE = 8, 8  # see `admit`
EARLY_TOKENS = 256  # static engines store shorter prompts with their answers: others hardly wait for them
CHUNKS_ALONE = 4  # chunks in one pass while no other rows are decoded; requests that arrive meanwhile wait for it


class PrefillGroup:
    """Prompts that are read together, by engines whose cache holds nothing else."""

    def __init__(self, rows: Sequence[tuple[int, Request]], device: torch.device) -> None:
        """`rows` are row numbers and requests, which `limit_request` has checked."""
        self.numbers, self.requests = [number for number, _ in rows], [request for _, request in rows]
        self.device = device
        self.timer = PhaseTimer(device)
        self.begun = False
        self.engines: BatchEngines  # those that read it, once it has begun
        self.output: Output  # the target's output at the last token that was read
        self.cached = [[0] * len(self)] * 2  # first tokens of each row that target and draft need not read
        self.postpones = False  # whether the draft reads the prompts when it first drafts
        self._features: list[Tensor] = []  # of the target, for a head that postpones
        self.width = max(len(request.prompt) for request in self.requests)
        self.unread = self.width  # token columns that have not been read

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def longest(self) -> int:
        """Maximum tokens of a row, prompt and answer."""
        return max(map(count_longest, self.requests))

    @cached_property
    def _padded(self) -> Tensor:
        """[B, T] the last tokens of each prompt, which either cache lacks."""
        last = (request.prompt[-self.width :] for request in self.requests)
        return send([[0] * (self.width - len(tokens)) + list(tokens) for tokens in last], self.device)

    def begin(self, engines: BatchEngines, step_tokens: int, *, aside: bool = False) -> None:
        """Take engines, or others `aside`; a row may have `step_tokens` more. Static ones aside hold prompts."""
        room = self.longest + step_tokens
        if aside and engines.target.static:
            room = min(room, 1 << (self.width - 1).bit_length())  # what `CudaEngine.prefill` pads it to
        self.engines = engines.aside(len(self), room) if aside else engines
        self.begun = True
        self.engines.reserve(len(self), room)

    def restore(self, found: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        """Begin the rows of the engines with blocks that were found for them: of each row, and of each engine."""
        by_engine = list(zip(*found, strict=True))
        for engine, rows in zip(self.engines.engines, by_engine, strict=True):
            if any(rows):
                engine.restore(rows)
        self.cached = [[count_positions(len(blocks)) for blocks in rows] for rows in by_engine]
        self.postpones &= not any(self.cached[-1])
        prompts = enumerate(request.prompt for request in self.requests)
        read = self.cached[: 1 if self.postpones else None]
        self.width = self.unread = max(len(prompt) - min(rows[b] for rows in read) for b, prompt in prompts)

    def read_all(self) -> None:
        """Read all prompts at once. Without a draft, prefixes that prompts share are read once for all of them."""
        prompts, target = [request.prompt for request in self.requests], self.engines.target
        owners = list(range(len(self))) if self.engines.draft is not None else shared_prefixes(prompts)
        if owners == list(range(len(self))):
            self.read(self.width)
            return
        row_of = {head: row for row, head in enumerate(dict.fromkeys(owners))}
        heads = PrefillGroup([(row, Request(prompts[head][:-1])) for head, row in row_of.items()], self.device)
        heads.engines, heads.timer = self.engines, self.timer
        target.reserve(len(heads), self.longest + 1)
        heads.read(heads.width)
        surplus = [len(prompts[owner]) - len(own) for owner, own in zip(owners, prompts, strict=True)]
        with self.timer("target"):
            target.select([row_of[owner] for owner in owners])
            target.rewind(send(surplus, self.device))
            self.output = target.extend(send([prompt[-1:] for prompt in prompts], self.device))
        self.unread = 0

    def read(self, columns: int) -> None:
        """Read the next columns; of several rows all, where static engines read some rows after others."""
        self.timer.wait()
        assert columns >= self.width or len(self) == 1
        start = self.width - self.unread
        stop = min(start + columns, self.width)
        lengths = [len(request.prompt) - min(own) for request, *own in zip(self.requests, *self.cached, strict=True)]
        parts = list(passes(lengths, self.width)) if self.engines.target.static else [(slice(None), 0)]
        outputs = []
        for rows, padding in parts:
            engines = self.engines.part(rows) if len(parts) > 1 else self.engines
            outputs += self._read_rows(engines, rows, slice(start + padding, stop))
        if outputs:
            hidden = [output.hidden for output in outputs if output.hidden is not None]
            self.output = Output(torch.cat([o.logits for o in outputs]), torch.cat(hidden) if hidden else None)
        if self.postpones and stop == self.width and self.engines.draft is not None:
            self.engines.draft.postpone([request.prompt for request in self.requests], self._features)
        self.unread = self.width - stop

    def _read_rows(self, engines: BatchEngines, rows: slice, columns: slice) -> list[Output]:
        """Read columns of some rows through engines of these rows; the target's output, if its cache lacked any."""
        tokens, draft, features, outputs = self._padded[rows, columns], engines.draft, None, []
        if (counts := self._count(0, rows, columns)) is not None:
            with self.timer("target"):
                output = engines.target.prefill(tokens, counts)
            outputs, features = [Output(output.logits, output.hidden)], output.features
        if self.postpones:
            self._features += [] if features is None else [features]
        elif draft is not None and (counts := self._count(1, rows, columns)) is not None:
            with self.timer("draft"):
                draft.read(tokens, counts, features)
        return outputs

    def _count(self, cache: int, rows: slice, columns: slice) -> Tensor | None:
        """[B] how many of these columns a cache lacks, the last ones of each row; None where it has all of them."""
        cached = zip(self.requests[rows], self.cached[cache][rows], strict=True)
        lacking = [len(request.prompt) - count - (self.width - columns.stop) for request, count in cached]
        counts = [min(max(count, 0), columns.stop - columns.start) for count in lacking]
        return send(counts, self.device) if any(counts) else None


@dataclass
class Prefill:
    """The prompts that are being read. Short ones share a pass; a long one is read alone, one chunk at a time."""

    engines: BatchEngines
    step_tokens: int  # tokens of a row in one step, γ + 1: a row needs as many cache slots beyond its own tokens
    may_postpone: bool = False  # whether γ is chosen: the draft then reads prompts when it first drafts

    def __post_init__(self) -> None:
        self.groups: list[PrefillGroup] = []
        self.next_number = 0  # number of the next row
        self.cycles = 0  # cycles since prompts were admitted
        self._passed_over = False
        self.rows = self.length = 0  # what the caches hold: rows, and tokens of a row
        self.given_up: list[int] = []  # rows that the device has no memory for
        self._held = 0  # live rows when a prompt found no memory: it is read again when one has left
        self._one_by_one = False  # whether prompts are read in their order: one has found no memory beside others
        self.histories: dict[int, _RowHistory] = {}  # of the rows in the batch, where prefixes are kept
        self._early = EARLY_TOKENS if self.engines.target.static else 0

    def make_room(self, queue: AdmissionQueue, needed: int) -> bool:
        """Begin without rows, in caches for as many rows of the queue as there is memory for; False if for none.
        A row has room for `needed` tokens at least. Static caches begin small and grow with what is asked."""
        length, step_tokens = queue.length, self.step_tokens
        if self.engines.rows_held(length + step_tokens) < queue.rows:
            length = min(length, max(START_TOKENS, 2 * self.length))
        for tokens in (max(length, needed), needed):
            room = tokens + step_tokens
            if rows := self.engines.limit_rows(queue.rows, room, step_tokens=step_tokens, aside=1):
                self.engines.reserve(rows, room)
                self.rows, self.length = rows, self.engines.longest(room) - step_tokens
                self.engines.reserve(0, 0)  # the caches stay as large as they are
                return True
        return False

    def _make_shorter(self, queue: AdmissionQueue, rows: BatchRows, busy: int) -> bool:
        """Let a batch of few long rows run empty, to make room for many short ones. Returns whether they must wait."""
        if self.rows >= queue.rows or busy + len(queue.waiting) <= self.rows:
            return False
        waiting = map(count_longest, islice(queue.waiting, queue.rows))
        needed = max([rows.longest, *(group.longest for group in self.groups), *waiting])
        length = max(min(START_TOKENS, queue.length), min(needed, self.engines.window))
        if 2 * length > self.length:
            return False
        if not busy:
            self.length = 0
            self.make_room(queue, length)
            self.length = length  # where there is no memory for more rows, the caches stay as they are
        return busy > 0

    @property
    def ready(self) -> bool:
        """Whether a group has been read to its end."""
        return any(not group.unread for group in self.groups)

    def admit(self, queue: AdmissionQueue, rows: BatchRows, cancelled: set[int]) -> None:
        """Admit waiting requests while there is room beside the live rows and those that are being read. They wait
        until they are one for WAIT_SHARE live rows, which they interrupt, or WAIT_CYCLES have passed since the last."""
        self._one_by_one &= bool(self.groups)
        alive = len(rows.alive) if queue.waiting else 0
        busy = alive + sum(map(len, self.groups))
        if not queue.waiting or self._make_shorter(queue, rows, busy):
            return
        if self.cycles < WAIT_CYCLES and min(len(queue.waiting), self.rows - busy) < alive // WAIT_SHARE:
            return
        admitted: list[tuple[int, Request]] = []
        while queue.waiting and busy + len(admitted) < max(1, self.rows):
            number, request = self.next_number, queue.waiting[0]
            needed, fits = min(count_longest(request), self.engines.window), True
            if number not in cancelled and needed > self.length:
                if busy or admitted:
                    break  # it waits until the batch is empty, and the caches can grow
                fits = self.make_room(queue, needed)
            queue.waiting.popleft()
            self.next_number += 1
            if number in cancelled:
                cancelled.remove(number)
            elif fits:
                admitted.append((number, limit_request(request, self.engines.window)))
            else:
                self.given_up.append(number)
        self.cycles = 0 if admitted else self.cycles
        chunk = max(self.engines.target.chunk, 2 * alive * self.step_tokens, PASS_TOKENS * queue.patient)  # see `read`
        self._form_groups(admitted, chunk)

    def _form_groups(self, admitted: Sequence[tuple[int, Request]], chunk: int) -> None:
        """Prompts of which a chunk has room for the unread parts, padded, are read together."""
        groups: list[tuple[int, list[tuple[int, Request]]]] = []  # longest part of a prompt that is read; rows
        for number, request in admitted:
            found = self.engines.find_blocks(request.prompt, request.salt)
            unread, members = len(request.prompt) - min(map(count_positions, map(len, found))), [(number, request)]
            if groups and max(unread, groups[-1][0]) * (len(groups[-1][1]) + 1) <= chunk:
                longest, others = groups.pop()
                unread, members = max(unread, longest), [*others, *members]
            groups.append((unread, members))
        for unread, members in groups:
            self.groups.append(PrefillGroup(members, self.engines.target.device))
            self.groups[-1].unread = unread

    def cancel(self, cancelled: set[int]) -> None:
        """Drop the groups whose rows were all cancelled, and remove these rows from the set."""
        for group in [group for group in self.groups if cancelled.issuperset(group.numbers)]:
            self.groups.remove(group)
            cancelled.difference_update(group.numbers)
            if group.begun:
                self.engines.keep_aside(group.engines)

    def read(self, alive: int, crowded: bool) -> bool:
        """Read a chunk of the oldest group, or if the last one was its own, of that with the fewest unread columns.
        While rows are `alive`, or other batches wait (`crowded`), it costs as much as a step. False: no memory."""
        self._held = 0
        alone = not (alive or crowded) and len(self.groups) == 1
        chunk = max(self.engines.target.chunk * (CHUNKS_ALONE if alone else 1), 2 * alive * self.step_tokens)
        in_order = self._passed_over or self._one_by_one
        group = self.groups[0] if in_order else min(self.groups, key=lambda group: group.unread)
        self._passed_over = group is not self.groups[0]
        try:
            if not group.begun:
                group.begin(self.engines, self.step_tokens, aside=True)
                group.postpones = self.postpones(alive)
                group.restore([self.engines.find_blocks(r.prompt, r.salt) for r in group.requests])
            group.read(chunk if len(group) == 1 else group.width)
        except torch.OutOfMemoryError:
            self.begin_again(alive)
            return False
        return True

    def postpones(self, alive: int) -> bool:
        """Whether the draft reads the prompts of a new group when it first drafts: not while it drafts for other rows,
        which would wait for all of it; nor for a head beside kept prefixes, which needs states of all that was read."""
        draft = self.engines.draft
        if draft is None or draft.static or not self.may_postpone:
            return False
        return bool(not alive or draft.postponed) and not (draft.features and self.engines.prefixes is not None)

    def waits(self, alive: int, chunk_read: bool) -> bool:
        """Whether nothing can be read: no prompt, no memory beside `alive` rows, or their turn, as a chunk was read."""
        return not self.groups or 0 < self._held <= alive or (alive > 0 and chunk_read)

    def begin_again(self, alive: int, *read: PrefillGroup) -> None:
        """Free what is being read, or has been `read`: there was no memory for it. It is read again by halves, a single
        prompt when one of the `alive` rows has left. One that finds none without rows and other prompts is given up."""
        groups = [*read, *self.groups]
        begun = [group for group in groups if group.begun]
        if not alive and len(begun) == 1 == len(begun[0]):
            self.given_up += begun[0].numbers
            groups.remove(begun[0])
        self.groups = []
        for group in groups:
            rows = list(zip(group.numbers, group.requests, strict=True))
            size = -(-len(rows) // (1 + group.begun))
            self.groups += [PrefillGroup(rows[n : n + size], group.device) for n in range(0, len(rows), size)]
        self._held, self._one_by_one = alive if all(len(group) == 1 for group in begun) else 0, True
        self.engines.release_spare()

    def pop_ready(self) -> PrefillGroup:
        """Remove and return a group that has been read to its end."""
        group = next(group for group in self.groups if not group.unread)
        self.groups.remove(group)
        if self.engines.prefixes is not None:
            rows = zip(group.numbers, group.requests, strict=True)
            drafted = 0 if group.postpones else 1
            self.histories |= {n: _RowHistory(r.salt, list(r.prompt), drafted * (len(r.prompt) - 1)) for n, r in rows}
        return group

    def note(self, emissions: Sequence[Emission]) -> None:
        """Note the tokens of a step."""
        draft = self.engines.draft
        missing = 0 if draft is None else draft.backlog.max_missing
        for emission in emissions if self.histories else ():
            if (row := self.histories.get(emission.row)) is not None:
                row.tokens += emission.tokens
                row.has_gaps |= missing >= BACKLOG
                if not row.has_gaps and not (draft and draft.postponed):
                    row.drafted = max(row.drafted, len(row.tokens) - 1 - missing)

    def store(self, rows: BatchRows) -> None:
        """Store the blocks of rows that have entered or ended since the last call. The newest token has none yet."""
        places = zip(rows.index.tolist(), rows.finished.tolist(), strict=True) if self.histories else ()
        for place, (number, ended) in enumerate(places):
            row = self.histories.get(number)
            if row is not None and (ended or not (row.stored or len(row.tokens) < self._early)):
                row.stored = True
                self.engines.store_blocks(place, row.tokens, row.salt, (len(row.tokens) - 1, row.drafted))
                if ended:
                    del self.histories[number]


@dataclass
class _RowHistory:
    """The tokens of a row."""

    salt: Hashable
    tokens: list[int]  # prompt and answer so far
    drafted: int  # first positions that the draft's cache has at least
    has_gaps: bool = False  # whether plain cycles may have left out tokens, which the draft never reads
    stored: bool = False  # whether the blocks of its prompt are in the store


def shared_prefixes(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt one that begins with all of it but its last token: itself, unless sharing saves half of all."""
    bodies = [list(prompt[:-1]) for prompt in prompts]
    owners = list(range(len(prompts)))
    owner: int | None = None
    for i in sorted(owners, key=bodies.__getitem__, reverse=True):  # a prefix comes right after what it begins
        if owner is None or bodies[owner][: len(bodies[i])] != bodies[i]:
            owner = i
        owners[i] = owner
    read = sum(len(bodies[i]) for i in set(owners))
    return owners if 2 * read < sum(map(len, bodies)) else list(range(len(prompts)))


def passes(lengths: Sequence[int], width: int) -> Iterator[tuple[slice, int]]:
    """Split rows into passes of at most PASS_TOKENS: yields neighbours and how many columns are padding in all."""
    first = 0
    while first < len(lengths):
        longest, stop = max(1, lengths[first]), first + 1
        while stop < len(lengths):
            longer = max(longest, lengths[stop])
            if longer * (stop + 1 - first) > PASS_TOKENS:
                break
            longest, stop = longer, stop + 1
        yield slice(first, stop), width - longest
        first = stop
