"""Calibration prompts, none known to the judge, in an order fixed by their texts and the models; measures of loss."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.guards import asks_for_structure
from selfjudge.decoding.rule_parser import STRICT, RuleRequest, with_options
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import compute_overlap
from selfjudge.evaluate.config import RuleRun, TaskExamples, load_examples, plan_runs
from selfjudge.judge.config import JudgeConfig
from selfjudge.prompts.sources import find_learnt
from selfjudge.report.formats import Sentences
from selfjudge.tasks.base import Prompt, Row, join_messages
from selfjudge.tune import certify
from selfjudge.tune.config import BATCHES, CPU_MINUTES, FILE_TOKENS, GAMMAS, LOADS, TuneConfig
from selfjudge.tune.families import NAMED, Families, SplitFamilies, list_families, split_by_gamma
from selfjudge.tune.independence import SHINGLE, Groups, key_prompt, normalise
from selfjudge.tune.verify import pack
from selfjudge.types import Warn, default_gamma

if TYPE_CHECKING:
    from selfjudge.evaluate.execute import Answerer
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

JUDGE_NAME = "judge"
remark = Sentences("remarks.txt", "selfjudge.tune")
WORDS = {  # what each measure keeps, in the words of a certificate
    "score": "the task's score",
    "same_answer": "the same extracted answer as exact decoding",
    "overlap": "the words that exact decoding uses (overlap in order)",
}


@dataclass(frozen=True)
class CalibrationPrompt:
    """A prompt with the task that scores its answers."""

    id: str
    examples: TaskExamples
    row: Row

    @property
    def prompt(self) -> Prompt:
        return self.examples.task.prompt(self.row)

    @property
    def gold(self) -> str | None:
        return self.examples.task.gold(self.row)

    @property
    def has_score(self) -> bool:
        """Whether an answer to it is scored: benchmarks score all, a user's file those with an answer or a check."""
        task = self.examples.task
        return self.gold is not None if task.checkable else bool(task.score(self.row, ""))

    @property
    def group(self) -> Hashable | None:
        """The group that its file names, if it does."""
        name = self.row.get("group")
        return None if name is None else (self.examples.label, name)

    @property
    def text(self) -> str:
        """The prompt without what does not tell it from others."""
        return normalise(join_messages(self.prompt))


Prompts = Sequence[CalibrationPrompt]


def load_calibration(config: TuneConfig, warn: Warn, salt: str = "") -> list[list[CalibrationPrompt]]:
    """The prompts of all tasks by group, in the order that their texts and `salt` give. A repeated one counts once."""
    tasks = load_examples(config.evaluation)
    places: dict[str, int] = {}  # the index of each text
    prompts: list[CalibrationPrompt] = []
    names: list[tuple[int, Hashable | None]] = []
    for examples in tasks:
        for row in examples.rows:
            name = row["id"] if len(tasks) == 1 else f"{examples.label}:{row['id']}"
            prompt = CalibrationPrompt(name, examples, row)
            names.append((places.setdefault(prompt.text, len(prompts)), prompt.group))
            if len(places) > len(prompts):
                prompts.append(prompt)
    if len(names) > len(prompts):
        warn(f"{len(names) - len(prompts)} of {len(names)} prompts are repeated: each counts once")
    groups = Groups(len(prompts))
    groups.join_named(names)
    named, bodies = len(groups), _leave_out_systems([prompt.prompt for prompt in prompts])
    for examples in tasks:
        groups.join_similar({i: bodies[i] for i, p in enumerate(prompts) if p.examples is examples}, config.similar)
    if named < len(prompts):
        warn(f"{len(prompts)} prompts have {named} groups by their `group`: each group counts once")
    if len(groups) < named:
        merged = f"{named - len(groups)} of {len(prompts)} prompts are near-duplicates of others"
        how = f"`similar`: {config.similar:.0%} or more of their {SHINGLE}-word pieces in common"
        warn(f"{merged} ({how}): {len(groups)} groups are left, each counts once")
    return [[prompts[i] for i in group] for group in groups.order(list(places), salt)]


def _leave_out_systems(prompts: Sequence[Prompt]) -> list[str]:
    """The normalised texts of prompts without system messages that several of them have."""
    chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    count = Counter(m["content"] for chat in chats for m in chat if m["role"] == "system")
    kept = ([m for m in chat if m["role"] != "system" or count[m["content"]] == 1] for chat in chats)
    return [normalise(join_messages(chat)) for chat in kept]


def limit_prompts(groups: Sequence[list[CalibrationPrompt]], limit: int | None) -> list[list[CalibrationPrompt]]:
    """The first `limit` prompts, by group."""
    left, kept = math.inf if limit is None else limit, []
    for group in groups:
        if left > 0:
            kept.append(group if left >= len(group) else group[: int(left)])
            left -= len(group)
    return kept


def check_calibration(config: TuneConfig, judge: JudgeConfig | None) -> None:
    """Before models load, refuse what prompts and settings rule out, such as an ε that so few cannot certify. If the
    device chooses the batch, a CPU's is assumed, which sets the fewest aside; the error's count suffices on CUDA."""
    families, _ = split_by_gamma(list_families(config.families, judge, config.rules), config.gamma, judge)
    repeated: list[str] = []
    groups = load_calibration(config, repeated.append)
    choose_measure(config.measure, [prompt for group in groups for prompt in group])
    count, share = min(len(groups), config.limit or len(groups)), certify.share_delta(config.delta, 1)
    cpu, cuda = (config.batch or batch if config.times else None for batch in BATCHES.values())
    with _explained(*repeated):
        certify.check_prompt_count(count, cpu, config.epsilon, share, len(families), cuda)


@contextmanager
def _explained(*remarks: str) -> Iterator[None]:
    """An error of the block says these remarks first."""
    try:
        yield
    except SelfJudgeError as error:
        raise SelfJudgeError("; ".join([*filter(None, remarks), str(error)])) from None


def _check_strict_code(config: TuneConfig, prompts: Prompts) -> None:
    """Refuse to certify rules for code and structure on prompts most of which ask for neither."""
    asked = sum(asks_for_structure(join_messages(prompt.prompt)) for prompt in prompts)
    if not config.strict_code and 2 * asked < len(prompts):
        raise SelfJudgeError(
            "without `strict_code` rules are certified for code and structure, and"
            f" {asked} of {len(prompts)} prompts ask for them: give such prompts, or leave it on"
        )


def hash_prompts(prompts: Prompts) -> str:
    """SHA-256 of prompts, their right answers and their order."""
    text = "".join(f"{p.id}:{p.prompt}:{p.gold}:{p.row.get('check')}\n" for p in prompts)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def refuse_learnt(pair: Pair, prompts: Prompts, judge: Judge | None, config: TuneConfig, warn: Warn) -> None:
    """Refuse prompts that the draft or the judge was trained on; warn where that cannot be known."""
    judges, given = {} if judge is None else {"the judge": judge}, [prompt.prompt for prompt in prompts]
    for name, learnt in find_learnt(pair, judges, given, config.evaluation.tasks, config.data):
        if learnt is None:
            warn(f"{name} does not keep its training prompts: it cannot be checked whether some are among these")
        elif learnt:
            raise SelfJudgeError(
                f"{name} was trained on {len(learnt):,} of these prompts, such as {prompts[learnt[0]].id!r:.60},"
                " as far as it says: a certificate needs prompts that it has not seen"
            )


def choose_measure(wanted: str, prompts: Prompts) -> LossMeasure:
    """The measure of that name. `auto` is the score if all prompts have one, overlap if none has."""
    scored = sum(prompt.has_score for prompt in prompts)
    if wanted == "auto":
        wanted = "score" if scored else "overlap"
    if wanted == "same_answer" and not all(prompt.examples.task.checkable for prompt in prompts):
        raise SelfJudgeError("`measure` same_answer needs prompts whose answers can be found: take overlap")
    if wanted == "score" and scored < len(prompts):
        raise SelfJudgeError(
            f"{len(prompts) - scored} of {len(prompts)} prompts have neither answer nor check to score by:"
            " add them, or certify agreement with `measure` overlap"
        )
    return LossMeasure(wanted)


@dataclass(frozen=True)
class LossMeasure:
    """D of an answer against that of `exact`, in [−1, 1]."""

    name: str

    def score(self, prompts: Prompts, texts: Sequence[str]) -> list[tuple[str | None, dict[str, float]]]:
        """The answer found in each text, and its scores; neither if words alone count."""
        results: list[tuple[str | None, dict[str, float]]] = [(None, {})] * len(prompts)
        if self.name == "overlap":
            return results
        by_task: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_task.setdefault(id(prompt.examples), []).append(i)
        for places in by_task.values():
            rows = [prompts[i].row for i in places]
            scored = prompts[places[0]].examples.score(rows, [texts[i] for i in places])
            for i, result in zip(places, scored, strict=True):
                results[i] = result
        return results

    def compare(self, prompt: CalibrationPrompt, exact: Row, sample: Row) -> float:
        """D = S_exact − S_rule; 0 if the rule made no substitution."""
        if not sample["judged"]:
            return 0.0
        if self.name == "score":
            return float(exact["score"] - sample["score"])
        if self.name == "overlap":
            return 1.0 - compute_overlap(exact["text"], sample["text"])
        both_missing = exact["answer"] is None and sample["answer"] is None
        return 0.0 if both_missing or prompt.examples.task.same(prompt.row, exact["answer"], sample["answer"]) else 1.0


@dataclass(frozen=True)
class TuneJob:
    """What a run tests, and with what."""

    pair: Pair
    answerer: Answerer
    config: TuneConfig
    judge: Judge | None
    families: Families
    groups: list[list[CalibrationPrompt]]  # groups of prompts to calibrate with, in their order
    aside: list[list[CalibrationPrompt]]  # groups to choose γ with; no certificate rests on them
    measure: LossMeasure
    batch: int
    earlier: Sequence[str] = ()  # dates of earlier attempts on some of these prompts

    @classmethod
    def prepare(
        cls, pair: Pair, answerer: Answerer, config: TuneConfig, judge: Judge | str | Path | None, warn: Warn
    ) -> TuneJob:
        """Load prompts and the judge, or the one that ships for the target. Refuses prompts that it learnt from."""
        from selfjudge.judge.model import Judge

        loaded = Judge.from_pretrained(judge) if isinstance(judge, str | Path) else judge or pair.judge
        if loaded is None and config.uses_judge:
            warn("no judge ships for this target: the family judged is left out")
        families = list_families(config.families, None if loaded is None else loaded.config, config.rules)
        salt = f"{pair.target_sha256 or pair.target_id} {pair.draft_sha256 or pair.draft_id}"
        groups = limit_prompts(load_calibration(config, warn, salt), config.limit)
        prompts = [prompt for group in groups for prompt in group]
        used = loaded if config.uses_judge else None
        if used is not None:
            if not (used.config.target or used.config.target_sha256):
                raise SelfJudgeError("this judge names no target: a recipe needs one that was trained for its target")
            used.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
        refuse_learnt(pair, prompts, used, config, warn)
        batch = config.batch or BATCHES.get(answerer.device, BATCHES["cpu"])
        aside = certify.count_aside(len(groups), batch) if config.times else 0
        measure = choose_measure(config.measure, prompts)
        _check_strict_code(config, prompts)
        return cls(pair, answerer, config, used, families, groups[aside:], groups[:aside], measure, batch)

    def check_count(self) -> None:
        """Refuse an ε that so few prompts cannot certify; an earlier attempt on them is said."""
        count, batch = len(self.groups) + len(self.aside), self.batch if self.config.times else None
        families, _ = self.split_by_gamma(self.gammas[-1])
        with _explained(remark("attempt", self)):
            certify.check_prompt_count(count, batch, self.config.epsilon, self.delta, len(families))

    @cached_property
    def prompts(self) -> list[CalibrationPrompt]:
        """Prompts to calibrate with, in their order."""
        return [prompt for group in self.groups for prompt in group]

    @property
    def sizes(self) -> list[int]:
        """Prompts of each group."""
        return [len(group) for group in self.groups]

    @property
    def target(self) -> str:
        """What the ledger knows the target by."""
        return self.pair.target_sha256 or self.pair.target_id

    @property
    def keys(self) -> set[str]:
        """What the ledger knows the prompts by."""
        return {key_prompt(prompt.text) for group in (*self.aside, *self.groups) for prompt in group}

    @property
    def delta(self) -> float:
        """δ of this attempt."""
        return certify.share_delta(self.config.delta, 1 + len(self.earlier))

    @property
    def loads(self) -> tuple[int, ...]:
        """Rows at a time for which a pair is chosen."""
        return self.config.load or LOADS.get(self.answerer.device, LOADS["cpu"])

    @property
    def gammas(self) -> tuple[int, ...]:
        """γ to choose from, rising: one where it is given, without times, or if another restarts the engine."""
        if self.config.gamma or not self.config.times or self.answerer.one_gamma:
            return (self.config.gamma or default_gamma(self.answerer.device),)
        return GAMMAS.get(self.answerer.device, GAMMAS["cuda"])

    @property
    def minutes(self) -> float:
        """The most that the run may take."""
        return self.config.minutes or (CPU_MINUTES if self.answerer.device == "cpu" else math.inf)

    @property
    def max_new_tokens(self) -> int:
        own = FILE_TOKENS if self.config.prompts is not None else max(p.examples.task.new_tokens for p in self.prompts)
        return self.config.max_new_tokens or own

    def plan(self, rule: str, gamma: int) -> RuleRun:
        """The run of a rule at a γ, with the guards that it is served with; refused if the two do not fit."""
        judges = {} if self.judge is None else {JUDGE_NAME: self.judge}
        strict = {} if RuleRequest(rule).kind.lossless else {name: getattr(self.config, name) for name in STRICT}
        return plan_runs([with_options(rule, **strict)], [gamma], judges, self.pair)[0]

    def split_by_gamma(self, gamma: int) -> SplitFamilies:
        """The families that share δ at this γ, and the other rules."""
        return split_by_gamma(self.families, gamma, None if self.judge is None else self.judge.config)

    def claim(self, families: Collection[str]) -> certify.Claim:
        """The claim of every rule. Families share δ equally: all certificates are right with confidence 1 − δ. Rules of
        a family need no shares: each is tested at the family's level until one fails."""
        return certify.Claim(self.config.epsilon, self.delta / max(1, len(families)), len(self.groups))

    def describe_outlook(self) -> str:
        """What so many prompts can certify, before any is decoded."""
        families, _ = self.split_by_gamma(self.gammas[-1])
        claim = self.claim(families)
        fewest = certify.find_fewest_prompts(claim.epsilon, claim.delta)
        needed = certify.estimate_needed_prompts(claim.epsilon, claim.delta)
        return remark("outlook", self, claim, families, fewest, needed)

    def settings(self) -> dict[str, Any]:
        """The settings that a run must keep when it is resumed."""
        from selfjudge.engine.select import PairEngines
        from selfjudge.models.tokens import hash_tokenizer

        pair, config, judge = self.pair, self.config, self.judge
        return {
            "tasks": config.evaluation.tasks,
            "prompts_sha256": hash_prompts([prompt for group in (*self.aside, *self.groups) for prompt in group]),
            **{name: getattr(config, name) for name in ("epsilon", "delta", "similar", "gamma", "times", *STRICT)},
            "load": self.loads,
            "minutes": None if math.isinf(self.minutes) else self.minutes,
            "groups": pack([len(group) for group in (*self.aside, *self.groups)]),
            "families" if config.rules is None else NAMED: self.families,
            "judge": None if judge is None else [judge.digest(), judge.config.quality_curve],
            "measure": self.measure.name,
            "max_new_tokens": self.max_new_tokens,
            "batch": self.batch,
            "target": self.target,
            "draft": pair.draft_sha256 or pair.draft_id,
            "tokenizer": hash_tokenizer(pair.tokenizer),
            "dtype": pair.dtype,
            "draft_dtype": "int8" if PairEngines(pair).draft_int8 else None,
            "engine": self.answerer.engine,
        }
