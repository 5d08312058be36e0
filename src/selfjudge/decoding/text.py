"""Text around the loop: finished answers (`generate`), token by token (`stream`), or a running `Batch`."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, overload

from selfjudge.decoding.admission import AdmissionQueue, Request, check_gamma, count_longest, limit_request, read_ids
from selfjudge.decoding.answer import Answer
from selfjudge.decoding.batch_gamma import BatchGamma
from selfjudge.decoding.capture import capture_cycles, capture_prompts, list_sizes, list_uncaptured
from selfjudge.decoding.cycle import CAPTURED_CYCLES
from selfjudge.decoding.edits import RowEdits
from selfjudge.decoding.gamma import MAX_AUTO_GAMMA
from selfjudge.decoding.grammar import Grammar, check_edits, read_form
from selfjudge.decoding.guards import asks_for_structure, structure_of
from selfjudge.decoding.loop import decode, find_statistics, measure_costs
from selfjudge.decoding.prefill import Prefill
from selfjudge.decoding.rule_parser import RuleRequest, resolve_rule
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.rules_by_row import EXACT_ROWS, SAMPLED_ROWS, RowRules, find_level
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.prefixes import open_store
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError, expect
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import Gamma, Generation, Piece, Step, default_gamma, expect_whole, is_whole


class DecodingOptions(TypedDict, total=False):
    """Options that complete a rule given as text, and options of decoding; with the same defaults everywhere."""

    judge: Judge | str | Path | None
    """A judge, its folder, hub id or embedded name; the one that ships for the pair if not given."""
    theta: float | str | None
    """The judge's threshold: a number, `F` or `R`; R if not given."""
    quality: float | None
    """Instead of `theta`: the share of bad substitutions that the judge must reject."""
    price: float | None
    """Instead of a threshold, for the rules margin and judged: the price of a token in the unit of harm."""
    strict_start: int | None
    """First tokens of an answer that relaxed rules verify exactly (default 16)."""
    strict_code: bool | None
    """Whether relaxed rules verify code, JSON, tables and tool calls exactly (default True)."""
    sampling: Sampling | None
    """Temperature and filters, for the rules sampling and judged."""
    gamma: Gamma | None
    """Draft tokens per cycle; 0 is plain decoding. `auto`, the default, chooses what is fastest here: cycle by cycle
    for `exact`, whose answers do not depend on it, and once for each request under other rules (`Generation.gamma`)."""
    engine: str
    """The engine for both models: auto (default), reference, cpu or cuda."""
    trace: bool
    """Whether answers say what the target wanted at judged tokens (default True)."""


class AnswerOptions(DecodingOptions, total=False):
    """Options of `generate` and `stream`."""

    max_new_tokens: int
    """Maximum new tokens (default 256)."""
    stop: Sequence[str]
    """Strings that end an answer."""
    seed: int | None
    """Seed under sampling rules (default 0). With one, a γ that is not given is fixed: the answer is repeatable."""
    raw: bool
    """Whether to use the prompt as it is, without chat template."""
    schema: Mapping[str, Any] | None
    """A JSON schema: the answer is JSON that fits it, and every rule verifies it exactly."""
    grammar: str | None
    """A grammar for the answer, instead of a schema: Lark, GBNF, or what `grammar.grammar_text` gives."""


class GenerateOptions(AnswerOptions, total=False):
    """Options of `generate` alone."""

    batch: int
    """Prompts that are decoded at a time (default 8)."""
    seeds: Sequence[int] | None
    """A seed for every prompt; by default it follows from `seed` and the prompt's index."""


@overload
def generate(  # type: ignore[overload-overlap]  # a string is a sequence of strings, and one prompt
    pair: Pair, prompts: Prompt, rule: str | AcceptanceRule | None = None, **options: Unpack[GenerateOptions]
) -> Generation: ...
@overload
def generate(
    pair: Pair, prompts: Sequence[Prompt], rule: str | AcceptanceRule | None = None, **options: Unpack[GenerateOptions]
) -> list[Generation]: ...
def generate(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt],
    rule: str | AcceptanceRule | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation | list[Generation]:
    """Answer one prompt (a string or chat messages) or a list of them, in the order given.

    >>> generate(pair, "Why does bread rise?", rule="judged", quality=0.9).text  # doctest: +SKIP

    A rule is text (see `selfjudge ls rules`) or an object; `exact` if not given. `GenerateOptions` lists the options.
    """
    batch, stop = options.pop("batch", 8), options.pop("stop", ())
    expect_whole("batch", batch, 1)
    listed = hasattr(prompts, "__len__") and not isinstance(prompts, Mapping)
    expect(listed, "prompts", "a text, chat messages, or a list of such prompts", prompts)
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping))
    all_prompts = cast("Sequence[Prompt]", [prompts] if single else prompts)
    decoding, requests = prepare(pair, all_prompts, rule, options)
    results = decoding.answer(requests, batch, stop)
    return results[0] if single else results


def stream(
    pair: Pair, prompt: Prompt, rule: str | AcceptanceRule | None = None, **options: Unpack[AnswerOptions]
) -> Stream:
    """Answer one prompt token by token; a rule and options as for `generate`."""
    stop = options.pop("stop", ())
    decoding, (request,) = prepare(pair, [prompt], rule, options)
    answer = Answer(pair.tokenizer, stop, len(request.prompt))
    return Stream(answer, decoding.steps([decoding.examine(request)], {0: answer}))


def prepare(
    pair: Pair,
    prompts: Sequence[Prompt],
    rule: str | AcceptanceRule | None,
    options: Any,
    encode: Callable[..., list[int]] | None = None,
) -> tuple[Decoding, list[Request]]:
    """What decodes under these options, and the requests that they describe. `encode` is the pair's own by default."""
    limit, raw = options.pop("max_new_tokens", 256), options.pop("raw", False)
    seed, seeds, grammar = options.pop("seed", None), options.pop("seeds", None), read_form(pair, options)
    seeded = seed is not None or seeds is not None
    decoding = Decoding(pair, rule, seeded=seeded, constrained=bool(grammar), **options)
    encode = encode or pair.encode
    seeds = [row_seed(seed or 0, i) for i in range(len(prompts))] if seeds is None else seeds
    fits = hasattr(seeds, "__len__") and len(seeds) == len(prompts) and all(map(is_whole, seeds))
    expect(fits, "seeds", "a list of a whole number for each prompt", seeds)
    requests = [
        Request(encode(prompt, raw=raw), limit, seeds[i], edits=(grammar.begin(),) if grammar else ())
        for i, prompt in enumerate(prompts)
    ]
    return decoding, requests


@dataclass
class Stream:
    """The pieces of one answer, to iterate over; afterwards `generation` holds the finished answer."""

    _answer: Answer
    _steps: Iterator[StepOutput]

    def __iter__(self) -> Iterator[Piece]:
        for step in self._steps:
            for _, pieces in step:
                yield from pieces
        if self._answer.out_of_memory:
            self._answer.generation()  # raises

    @property
    def generation(self) -> Generation:
        return self._answer.generation()


class Batch:
    """Answers that are decoded together; they may be added and dropped between steps. For one thread.
    All have the rule and the γ of the batch, unless it has `shared` rules (`share_rules`): `add` may name others."""

    def __init__(
        self,
        pair: Pair,
        rule: str | AcceptanceRule | None = None,
        *,
        rows: int = 8,
        length: int = 4096,
        shared: RowRules | None = None,
        prefix_cache: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> None:
        """At most `rows` answers are decoded at a time, others wait; `length` limits prompt and answer together.
        `prefix_cache` is the pair's memory for prefixes: 1GB, or a share of what is available (0.1), `0` for none."""
        expect_whole("rows", rows, 1)
        expect_whole("length", length, 1)
        self._decoding = Decoding(pair, rule, shared=shared, **options)
        self._decoding.engines.prefixes = open_store(pair.target_model, prefix_cache)
        self._queue = AdmissionQueue(rows, length)
        self._ids = max(len(pair.tokenizer), pair.target.get_output_embeddings().weight.shape[0])  # the number of ids
        self._answers: dict[int, Answer] = {}  # by row number, as the loop counts them
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
        by_step: bool = False,
        stop_ids: Collection[int] = (),
        ignore_eos: bool = False,
        edits: RowEdits = (),
        rule: str | AcceptanceRule | None = None,
        gamma: Gamma | None = None,
        trace: bool | None = None,
        salt: Hashable = "",
    ) -> Answer:
        """Answer a prompt of token ids from the next step on; `stop_ids` end it like the end token.
        `edits` are for it alone, and with shared rules so are `rule`, `gamma` and `trace`. Answers of the same `salt`
        share prefixes. With `by_step` a step has one piece of text, not one for each token."""
        prompt, stop_ids = (read_ids(*ids, self._ids) for ids in (("prompt", prompt), ("stop_ids", stop_ids)))
        streamed = streamed or bool(stop or stop_ids)
        answer = Answer(self._decoding.pair.tokenizer, stop, len(prompt), streamed, stop_ids, by_step)
        listed = isinstance(edits, list | tuple) and all(hasattr(one, "advance") for one in edits)
        expect(listed, "edits", "a tuple of objects with the methods of `LogitsEdit`", edits)
        request = Request(prompt, max_new_tokens, row_seed(seed, 0), ignore_eos=ignore_eos, edits=edits, salt=salt)
        self._queue.put(self._decoding.examine(self._decoding.complete(request, rule, gamma, trace)))
        self._answers[self._next] = answer
        self._next += 1
        return answer

    def drop(self, answer: Answer) -> None:
        """Cancel an answer: it leaves before the next step."""
        for row in [row for row, other in self._answers.items() if other is answer]:
            del self._answers[row]
            self._dropped.add(row)

    def step(self, crowded: bool = False) -> StepOutput:
        """One pass over all rows, or over a chunk of waiting prompts; an empty list once no row is left.
        If `crowded`, other batches wait: chunks are then small even while no row is being decoded."""
        self._queue.crowded = crowded
        if self._steps is None and self._queue.waiting:
            first = self._queue.waiting.popleft()
            self._steps = self._decoding.steps([first], self._answers, self._dropped, self._queue)
        output: StepOutput | None = None
        try:
            output = None if self._steps is None else next(self._steps, None)
        except BaseException:  # all answers are lost
            self._answers.clear()
            self._queue.waiting.clear()
            raise
        finally:
            if output is None:  # the loop has ended; the next one numbers its rows from 0
                self._steps, self._next = None, 0
                self._dropped.clear()
        return output or []

    def capture(self, seconds: float, notify: Callable[[float], None] = lambda share: None) -> bool:
        """Capture the cycles this batch may have, for about so many seconds, without rows; the next batch has them.
        Returns whether none is left, as on engines that capture nothing."""
        return self._decoding.capture(self._queue.rows, self._queue.length, seconds, notify)

    def close(self) -> None:
        """Cancel all answers and end the loop, so that its engines can be used again."""
        self._dropped.update(self._answers)
        self._answers.clear()
        self._queue.waiting.clear()
        self.step()


StepOutput = list[tuple[Answer, list[Piece]]]  # answers that got tokens in a step, each with its new pieces of text


class Decoding:
    """A rule, the engines and the options with which a pair decodes."""

    def __init__(
        self,
        pair: Pair,
        rule: str | AcceptanceRule | None,
        *,
        gamma: Gamma | None = None,
        engine: str = "auto",
        trace: bool = True,
        seeded: bool = False,
        constrained: bool = False,
        shared: RowRules | None = None,
        **rule_options: Any,
    ) -> None:
        """A sampled answer that is `seeded` has a fixed γ unless one is given. A grammar makes it `constrained`. With
        `shared` rules these are those of requests that name none."""
        expect(isinstance(pair, Pair), "pair", "a Pair, such as Pair.load('smollm2-135m')", pair)
        expect(isinstance(shared, RowRules | None), "shared", "what `share_rules` gives", shared)
        self.pair, self.trace = pair, trace
        self.rule = _guard(resolve_rule(pair, rule, **rule_options), pair, constrained)
        self.shared, self.rows_rule = shared, shared or self.rule
        if (judge := self.rows_rule.judge) is not None:
            judge.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
            judge.on(pair.target.device)  # copied before graphs are captured
        if gamma is None and seeded and self.rule.sampling is not None:
            gamma = max(default_gamma(pair.target.device.type), self.rule.matches_needed + 1)
        self.gamma: Gamma = "auto" if gamma is None else gamma
        _check_gamma(self.gamma, self.rule)
        self.engines = PairEngines(pair, engine, drafts=shared is not None or self.gamma != 0)
        self.most = SHARED_GAMMA if pair.draft is not None else 0  # drafts that an answer with shared rules may have

    def complete(
        self, request: Request, rule: str | AcceptanceRule | None, gamma: Gamma | None, trace: bool | None
    ) -> Request:
        """The request with a rule, a γ and a trace of its own, or those of the batch."""
        if self.shared is None:
            if (rule, gamma, trace) != (None, None, None):
                raise SelfJudgeError("all answers of this batch have one rule: make it with `shared` rules")
            return request
        constrained = any(isinstance(edit, Grammar) for edit in request.edits)
        expect(trace in (None, False, True), "trace", "True or False", trace)
        if not isinstance(rule, AcceptanceRule | None):
            rule = RuleRequest(rule).resolve(self.pair, self.shared.judge)
        own = self.rule if rule is None else _guard(rule, self.pair, constrained)
        gamma = self.gamma if gamma is None else gamma
        _check_gamma(gamma, own)
        if not shares(self.shared, own, gamma):
            raise SelfJudgeError(f"rule {own.name!r} with γ = {gamma} needs a batch of its own")
        if isinstance(gamma, int):
            own.check(gamma)
        drafts = 0 if self.pair.draft is None else gamma
        return request._replace(rule=own, gamma=drafts, trace=self.trace if trace is None else trace)

    def capture(self, rows: int, length: int, seconds: float, notify: Callable[[float], None]) -> bool:
        """`Batch.capture`, for up to so many rows of at most `length` tokens."""
        end = time.perf_counter() + seconds
        with self.engines.borrow(hidden=self.rows_rule.judge is not None) as engines:
            if not engines.target.static:
                if self.gamma == "auto":
                    measure_costs(engines, 1)
                    measure_costs(engines, rows)
                return True
            statistics = find_statistics(engines)
            rules, most = [self.rule], max(size.gamma for size in list_sizes(self.gamma, self.rule, statistics))
            if self.shared is not None:
                levels = find_level(rules), EXACT_ROWS, SAMPLED_ROWS
                rules, most = list(dict.fromkeys(map(self.shared.at, levels))), self.most
            prefill = Prefill(engines, most + 1)
            if not prefill.make_room(AdmissionQueue(rows, length), 1):
                return True
            engines.reserve(rows := prefill.rows, prefill.length + most + 1)
            left: list[Callable[[], object]] = []
            if not engines.has_asides:
                left.append(partial(capture_prompts, engines, rows, prefill.length))
            if self.gamma == "auto" and EXACT in rules:
                choice = BatchGamma(engines, self.rows_rule, most, self.trace, statistics=statistics)
                left += [partial(choice.time_all, n, statistics.costs) for n in statistics.costs.list_untimed(rows)]
            left += [
                partial(capture_cycles, engines, rule, n, [size], trace=self.trace)
                for rule in rules
                for n, size in list_uncaptured(engines, rule, rows, self.gamma, statistics, trace=self.trace)
            ][:CAPTURED_CYCLES]
            for done, act in enumerate(left, 1):
                act()
                notify(done / len(left))
                if time.perf_counter() >= end:
                    return done == len(left)
        return True

    def examine(self, request: Request) -> Request:
        """The request, limited to the context window, and whether it is structured where the rule wants to know."""
        request = limit_request(request, self.pair.window)
        rule = request.rule or self.rule
        constrained, guards = any(isinstance(edit, Grammar) for edit in request.edits), rule.guards
        if constrained and request.ignore_eos:
            raise SelfJudgeError("`ignore_eos` does not go with a grammar, which ends the answer")
        if guards is None or guards.structure is None:
            if constrained and not rule.lossless:
                raise SelfJudgeError("relaxed rules verify what a grammar constrains exactly: leave `strict_code` on")
            return request
        if constrained:
            return request._replace(structured=True)
        text = str(self.pair.tokenizer.decode(request.prompt))
        return request._replace(structured=request.structured or asks_for_structure(text))

    def answer(self, requests: Sequence[Request], batch: int, stop: Sequence[str]) -> list[Generation]:
        """Answer all requests, at most `batch` at a time: others enter as answers end. In the order given."""
        requests = [self.examine(request) for request in requests]
        left = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))  # similar lengths: little padding
        results: dict[int, Generation] = {}
        while left:
            asked = [requests[i] for i in left]
            answers = [Answer(self.pair.tokenizer, stop, len(r.prompt), streamed=bool(stop)) for r in asked]
            queue = AdmissionQueue(batch, max(map(count_longest, asked)), patient=True)
            for _ in self.steps(asked, dict(enumerate(answers)), queue=queue if len(left) > batch or results else None):
                pass
            given_up = [i for i, a in zip(left, answers, strict=True) if a.out_of_memory and not requests[i].edits]
            again = given_up if len(given_up) < len(left) else []  # beside fewer others
            results |= {i: a.generation() for i, a in zip(left, answers, strict=True) if i not in again}
            left = again
        return [results[i] for i in range(len(requests))]

    def steps(
        self,
        requests: Sequence[Request],
        answers: dict[int, Answer],
        dropped: set[int] | None = None,
        queue: AdmissionQueue | None = None,
    ) -> Iterator[StepOutput]:
        """Run the loop and add its tokens to `answers`, whose keys are rows; yield the new pieces of every step."""
        dropped, warned = set() if dropped is None else dropped, False
        with self.engines.borrow(hidden=self.rows_rule.judge is not None) as engines:
            if self.gamma == "auto" and requests:
                measure_costs(engines, len(requests), queue)  # no part of an answer's time
            for answer in answers.values():
                answer.started = time.perf_counter()
            for step in decode(
                engines,
                requests,
                self.rows_rule,
                gamma=self.gamma if self.shared is None else self.most,
                eos_ids=self.pair.eos_ids,
                trace=self.trace or self.shared is not None,  # then each request says so itself
                queue=queue,
                cancelled=dropped,
            ):
                if step.non_finite and not warned:
                    warned = True
                    warnings.warn("non-finite logits or hidden states: alignment alone decided there", stacklevel=2)
                yield _hand_out(step, answers, dropped)
        for request in requests if queue is None or queue.patient else ():
            check_edits(request.edits)


def _hand_out(step: Step, answers: dict[int, Answer], dropped: set[int]) -> StepOutput:
    """Give each answer its tokens of a step; finished ones leave `answers`, those cut by a stop string are dropped."""
    output: StepOutput = []
    now = time.perf_counter()
    for row in step.out_of_memory:
        if (answer := answers.pop(row, None)) is not None:
            answer.out_of_memory = True
            output.append((answer, []))
    for emission in step.emissions:
        if (answer := answers.get(emission.row)) is None:
            continue  # dropped
        output.append((answer, answer.take(emission, step)))
        answer.seconds["total"] = now - answer.started
        if answer.finish:
            del answers[emission.row]
        if answer.finish == "stop":
            dropped.add(emission.row)
    return output


def _check_gamma(gamma: Gamma, rule: AcceptanceRule) -> None:
    """Refuse a γ that no cycle can have. γ = 0 with a relaxed rule gives a warning only: `auto` may have chosen it for
    an answer that is asked for again."""
    check_gamma(gamma)
    if gamma == 0 and not rule.lossless:
        warnings.warn(f"γ = 0 is plain decoding: there are no drafts for rule {rule.name!r}", stacklevel=4)


def _guard(rule: AcceptanceRule, pair: Pair, constrained: bool) -> AcceptanceRule:
    """Give a rule what its guards need of the pair; answers `constrained` by a grammar need one. It is the same object
    every time, because engines find the graphs captured for a rule by its identity."""
    lacking: dict[str, Any] = {}
    if getattr(rule, "guard", False) and not rule.guarded():
        lacking["special"] = pair.special_ids
    if constrained and not (rule.lossless or rule.strict_code):
        lacking["strict_code"] = True
    if (rule.strict_code or lacking.get("strict_code")) and rule.structure is None:
        lacking["structure"] = structure_of(pair.tokenizer)
    if not lacking:
        return rule
    make = partial(dataclasses.replace, rule, **lacking)
    return pair.target_model.keep(("guarded rule", rule, *lacking.values()), make)


SHARED_GAMMA = MAX_AUTO_GAMMA  # the most drafts in batches with shared rules: every row has cache slots for them


def share_rules(pair: Pair, judge: Judge | None = None) -> RowRules:
    """What answers with unlike rules share in one `Batch`; the same object every time, as in `_guard`."""
    structure = structure_of(pair.tokenizer)
    make = partial(RowRules, judge, pair.special_ids, structure=structure)
    return pair.target_model.keep(("shared rules", judge, structure), make)


def shares(shared: RowRules, rule: AcceptanceRule, gamma: Gamma) -> bool:
    """Whether an answer with this rule and this γ may be in a batch with shared rules."""
    least = rule.matches_needed + 1 if gamma == "auto" else gamma
    return shared.fits(rule) and least <= SHARED_GAMMA


def row_seed(seed: int, row: int) -> int:
    """The seed of one row's random numbers."""
    expect_whole("seed", seed)
    return (int(seed) * 1_000_003 + row) % (1 << 63)
