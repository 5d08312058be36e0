"""Shells around the loop: prompts in, text out, whole (`generate`), token by token (`stream`), or with coming and going (`Batch`)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from selfjudge.decoding.loop import AdmissionQueue, Request, decode
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.engine.select import borrowed, common_kind, supports_int8_draft
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import PHASES, Finish, Generation, Origin, Piece, Step


def generate(
    pair: Pair,
    prompts: Sequence[Prompt],
    rule: AcceptanceRule | None = None,
    *,
    gamma: int = 5,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    confidence: float = 0.0,
    batch: int = 8,
    raw: bool = False,
    engine: str = "auto",
    same_draft_weights: bool = False,
) -> list[Generation]:
    """Answer all prompts, `batch` at a time, in the order given. `confidence` is that of `decode`.

    `seeds` gives every prompt its own seed; else it follows from `seed` and the prompt's place in the list.
    With `same_draft_weights` the draft has the same weights under every rule, for comparing them: under a lossless rule
    it may otherwise run with int8.
    """
    if isinstance(prompts, str):
        raise SelfJudgeError("prompts come as a list: generate(pair, [prompt])")
    if batch < 1:
        raise SelfJudgeError(f"batch must be at least 1, not {batch}")
    if seeds is None:
        seeds = [row_seed(seed, i) for i in range(len(prompts))]
    encoded = [pair.encode(prompt, raw=raw) for prompt in prompts]
    by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # neighbours of like length: little padding
    results: dict[int, Generation] = {}
    for start in range(0, len(by_length), batch):
        rows = by_length[start : start + batch]
        answers = [Answer(pair.tokenizer, stop, len(encoded[i]), streamed=bool(stop)) for i in rows]
        asked = [Request(encoded[i], max_new_tokens, seeds[i]) for i in rows]
        for _ in _run(
            pair,
            rule,
            gamma,
            confidence,
            engine,
            asked,
            dict(enumerate(answers)),
            same_draft_weights=same_draft_weights,
        ):
            pass
        results |= {i: answer.generation() for i, answer in zip(rows, answers, strict=True)}
    return [results[i] for i in range(len(encoded))]


class Stream:
    """Iterate over the pieces of one answer; `generation` holds the whole afterwards."""

    def __init__(
        self,
        pair: Pair,
        prompt: Prompt,
        rule: AcceptanceRule | None = None,
        *,
        gamma: int = 5,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int = 0,
        confidence: float = 0.0,
        raw: bool = False,
        engine: str = "auto",
    ) -> None:
        ids = pair.encode(prompt, raw=raw)
        self._answer = Answer(pair.tokenizer, stop, len(ids))
        asked = [Request(ids, max_new_tokens, row_seed(seed, 0))]
        self._steps = _run(pair, rule, gamma, confidence, engine, asked, {0: self._answer})

    def __iter__(self) -> Iterator[Piece]:
        for step in self._steps:
            for _, pieces in step:
                yield from pieces

    @property
    def generation(self) -> Generation:
        return self._answer.generation()


def stream(pair: Pair, prompt: Prompt, rule: AcceptanceRule | None = None, **options: object) -> Stream:
    """Answer one prompt token by token; takes the options of `generate` except `batch`."""
    return Stream(pair, prompt, rule, **options)  # type: ignore[arg-type]


class Batch:
    """Answers that one rule makes together, and that may come and go between steps. For one thread."""

    def __init__(
        self,
        pair: Pair,
        rule: AcceptanceRule | None = None,
        *,
        gamma: int = 5,
        rows: int = 8,
        length: int = 4096,
        confidence: float = 0.0,
        engine: str = "auto",
    ) -> None:
        """`rows` at most are decoded at a time, others wait; `length` is the most tokens of a prompt with its answer."""
        self._tokenizer = pair.tokenizer
        self._settings = pair, rule, gamma, confidence, engine
        self._queue = AdmissionQueue(rows, length)
        self._answers: dict[int, Answer] = {}  # by the number that the loop gives or will give them
        self._dropped: set[int] = set()
        self._next = 0
        self._steps: Iterator[StepOutput] | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        seed: int = 0,
        streamed: bool = True,
    ) -> Answer:
        """A prompt of token ids that shall be answered from the next step on."""
        answer = Answer(self._tokenizer, stop, len(prompt), streamed)
        self._queue.put(Request(prompt, max_new_tokens, row_seed(seed, 0)))
        self._answers[self._next] = answer
        self._next += 1
        return answer

    def drop(self, answer: Answer) -> None:
        """Give up an answer: it leaves before the next step."""
        for row in [row for row, other in self._answers.items() if other is answer]:
            del self._answers[row]
            self._dropped.add(row)

    def step(self) -> StepOutput:
        """One pass over all rows, or the prefill of those that enter; nothing once none is left."""
        if self._steps is None and self._queue.waiting:
            first = self._queue.waiting.popleft()
            self._steps = _run(*self._settings, [first], self._answers, self._dropped, self._queue)
        found = None if self._steps is None else next(self._steps, None)
        if found is None:  # the loop has ended, and will number from 0 again
            self._steps, self._next = None, 0
            self._dropped.clear()
        return found or []

    def close(self) -> None:
        """Give up all answers and end the loop, so that its engines can be used again."""
        self._dropped.update(self._answers)
        self._answers.clear()
        self._queue.waiting.clear()
        self.step()


def int8_draft(pair: Pair, rule: AcceptanceRule, engine: str = "auto") -> bool:
    """Whether the draft runs with int8 weights: asked for, or harmless. It is harmless on the CPU engine under a lossless
    rule, where drafts decide how fast an answer comes and not what it says, unless the draft is the target itself."""
    if pair.draft is None or pair.int8 or pair.draft_int8:
        return pair.int8 or pair.draft_int8
    itself = pair.draft is pair.target or (pair.target_sha256 != "" and pair.target_sha256 == pair.draft_sha256)
    return rule.lossless and not itself and supports_int8_draft(pair.draft, engine)


_GUARDED: WeakKeyDictionary[AcceptanceRule, tuple[tuple[int, ...], AcceptanceRule]] = WeakKeyDictionary()


def _guarded(rule: AcceptanceRule, pair: Pair) -> AcceptanceRule:
    """A guarded rule that was built without special tokens gets those of the pair; the same one every time, so that
    engines find what they recorded with it."""
    given: tuple[int, ...] = getattr(rule, "special", ())
    if not getattr(rule, "guard", False) or given:
        return rule
    special = pair.special_ids
    if rule not in _GUARDED or _GUARDED[rule][0] != special:
        _GUARDED[rule] = special, dataclasses.replace(rule, special=special)  # type: ignore[call-arg]
    return _GUARDED[rule][1]


def row_seed(seed: int, row: int) -> int:
    """The seed of one row's random numbers."""
    return (seed * 1_000_003 + row) % (1 << 63)


def _run(
    pair: Pair,
    rule: AcceptanceRule | None,
    gamma: int,
    confidence: float,
    engine: str,
    asked: Sequence[Request],
    answers: dict[int, Answer],
    dropped: set[int] | None = None,
    queue: AdmissionQueue | None = None,
    same_draft_weights: bool = False,
) -> Iterator[StepOutput]:
    """Drive the loop, feeding each answer, by its row, until it is finished; yields the new pieces of every step."""
    rule = _guarded(rule or EXACT, pair)
    if rule.judge is not None:
        rule.judge.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
        rule.judge.to(pair.target.device)
    drafted = pair.draft is not None and gamma > 0
    with contextlib.ExitStack() as stack:
        if pair.draft is not None and drafted:
            engine = common_kind(pair.target, pair.draft, engine)
        target = stack.enter_context(borrowed(pair.target, hidden=rule.judge is not None, int8=pair.int8, kind=engine))
        draft = None
        if pair.draft is not None and drafted:
            rough = pair.int8 or pair.draft_int8 if same_draft_weights else int8_draft(pair, rule, engine)
            draft = stack.enter_context(borrowed(pair.draft, int8=rough, kind=engine))
        dropped = set() if dropped is None else dropped
        warned = False
        for first in answers.values():
            first.begun = time.perf_counter()
        for step in decode(
            target, draft, [new.prompt for new in asked], rule, gamma=gamma,
            max_new_tokens=[new.max_new_tokens for new in asked], seeds=[new.seed for new in asked],
            eos_ids=pair.eos_ids, confidence=confidence, cancelled=dropped, queue=queue,
        ):  # fmt: skip
            if step.irregular and not warned:
                warned = True
                warnings.warn(
                    "non-finite logits or hidden states: alignment alone decided at those tokens", stacklevel=2
                )
            taken: StepOutput = []
            now = time.perf_counter()
            for emission in step.emissions:
                if (answer := answers.get(emission.row)) is None:
                    continue  # given up
                taken.append((answer, answer.take(emission.tokens, emission.origins, emission.finish, step)))
                answer.seconds["total"] = now - answer.begun
                if answer.finish:
                    del answers[emission.row]
                if answer.finish == "stop":
                    dropped.add(emission.row)
            yield taken


@dataclass(eq=False)
class Answer:
    """One answer in the making: tokens, origins, text, and the cut at a stop string."""

    tokenizer: PreTrainedTokenizerBase
    stop: Sequence[str]
    prompt_tokens: int
    streamed: bool = True
    """Whether text is wanted token by token; a whole answer without stop strings is decoded once, at its end."""
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    cycles: int = 0
    finish: Finish | None = None
    begun: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "total"), 0.0))

    def __post_init__(self) -> None:
        self._text = Detokenizer(self.tokenizer)
        if isinstance(self.stop, str) or any(not s for s in self.stop):
            raise SelfJudgeError("stop strings come as a list, and none may be empty")

    def take(self, tokens: Sequence[int], origins: Sequence[Origin], finish: Finish | None, step: Step) -> list[Piece]:
        self.cycles += step.cycle > 0
        for phase in PHASES:
            self.seconds[phase] += step.seconds[phase]
        if not self.streamed:
            self.tokens += tokens
            self.origins += origins
            self.finish = finish
            if finish is not None:
                self.text = self._text.whole(self.tokens)
            return []
        pieces = []
        for i, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self.tokens.append(token)
            self.origins.append(origin)
            self.text += self._text.add(token)
            last = finish is not None and i + 1 == len(tokens)
            if last:
                self.text += self._text.rest()
            cut = min(
                (at for s in self.stop if (at := self.text.find(s, max(0, self.shown - len(s)))) >= 0), default=-1
            )
            if cut >= 0:
                self.text, self.finish = self.text[:cut], "stop"
            elif last:
                self.finish = finish
            pieces.append(Piece(self._showable(), token, origin))
            if self.finish:
                break
        return pieces

    def _showable(self) -> str:
        """Text not yet shown, less an end that may turn out to begin a stop string."""
        end = len(self.text)
        if self.finish is None:
            for s in self.stop:
                held = next((n for n in range(min(len(s) - 1, end), 0, -1) if self.text.endswith(s[:n])), 0)
                end = min(end, len(self.text) - held)
        new, self.shown = self.text[self.shown : end], max(self.shown, end)
        return new

    def generation(self) -> Generation:
        if self.finish is None:
            raise SelfJudgeError("the answer is not finished: iterate over the whole stream first")
        return Generation(
            tuple(self.tokens),
            tuple(self.origins),
            self.text,
            self.cycles,
            self.finish,
            self.prompt_tokens,
            self.seconds,
        )


StepOutput = list[tuple[Answer, list[Piece]]]
"""What each answer got from a step."""


class Detokenizer:
    """Text of a growing token sequence, special tokens left out, never an incomplete character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # decode from here: a few tokens back, for tokenizers that treat a first word differently
        self.read = 0

    def add(self, token: int) -> str:
        """The text this token completes; empty while a multi-byte character is open."""
        self.ids.append(token)
        new = self._new()
        if new.endswith("\ufffd"):
            return ""
        if new:  # special tokens have no text and are no context
            self.context = self.read
        self.read = len(self.ids)
        return new

    def rest(self) -> str:
        """What is left at the end, incomplete characters included."""
        new = self._new()
        self.read = len(self.ids)
        return new

    def whole(self, ids: list[int]) -> str:
        """The text of a complete sequence."""
        return self._decode(ids)

    def _new(self) -> str:
        if self.read == len(self.ids):
            return ""
        before = self._decode(self.ids[self.context : self.read])
        return self._decode(self.ids[self.context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
