"""Which runs an evaluation has: every rule, with every judge that it may use, at every γ. Loads no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from selfjudge.decoding.rule_parser import RuleRequest, rule_text
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Exact
from selfjudge.errors import SelfJudgeError

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge

NULL = "null"
Judges = Mapping[str, "Judge"]


@dataclass(frozen=True, eq=False)
class RuleRun:
    """One rule at one γ, with the name of its judge."""

    name: str
    gamma: int
    rule: AcceptanceRule
    judge: str | None = None

    def batch(self, size: int) -> int:
        """Rows decoded together, if others have `size`. `null` is `exact` in other batches: only rounding differs."""
        if self.name != NULL:
            return size
        return size // 2 if size > 1 else 2

    @property
    def folder(self) -> str:
        return f"{self.name}-g{self.gamma}"

    @cached_property
    def identity(self) -> str:
        """Digest of the name, γ, the rule's options and its judge; `run_sha256` of summaries."""
        names = dict.fromkeys([*(f.name for f in fields(self.rule)), *sorted(vars(self.rule))])  # of any class
        values = {name: getattr(self.rule, name) for name in names if name not in ("judge", "base")}
        given = {name: value for name, value in values.items() if value is not None}
        judge = "" if self.rule.judge is None else self.rule.judge.digest()
        return hashlib.sha256(f"{self.name}:{self.gamma}:{self.rule.name}:{given}:{judge}".encode()).hexdigest()


def plan_runs(
    rules: Sequence[str | AcceptanceRule], gammas: Sequence[int], judges: Judges, special: tuple[int, ...]
) -> list[RuleRun]:
    """Runs of rules such as `exact`, `topk:2`, `judged:F@mine`, or of rule objects.

    A judged rule that names no judge runs once with each. `exact` comes first: the others are compared with it.
    `null` is `exact` once more, in batches of another size.
    """
    variants: dict[str, tuple[AcceptanceRule, str | None]] = {}
    for rule in sorted(rules, key=lambda rule: not (rule == "exact" or isinstance(rule, Exact))):
        if not isinstance(rule, AcceptanceRule):
            variants |= _resolve(rule, judges, special)
        elif (name := rule_text(rule)) in variants:
            raise SelfJudgeError(f"two rules are called {name}: give them different names, or judges by `judges`")
        else:
            variants[name] = rule, None
    for gamma in gammas:
        for resolved, _ in variants.values():
            resolved.check(gamma)
    return [RuleRun(name, gamma, resolved, judge) for gamma in gammas for name, (resolved, judge) in variants.items()]


def _resolve(spec: str, judges: Judges, special: tuple[int, ...]) -> dict[str, tuple[AcceptanceRule, str | None]]:
    """The rules that a text stands for, by name, each with the name of its judge."""
    if spec == NULL:
        return {NULL: (EXACT, None)}
    text, _, wanted = spec.partition("@")
    request = RuleRequest(text)
    if not request.needs_judge:
        if wanted:
            raise SelfJudgeError(f"rule {text!r} does not use a judge: leave out @{wanted}")
        return {spec: (request.resolve(special), None)}
    if not judges:
        raise SelfJudgeError(f"rule {spec!r} needs a judge: give `judge`, such as mine=FOLDER")
    if wanted and wanted not in judges:
        raise SelfJudgeError(f"rule {spec!r} names an unknown judge; judges are: {', '.join(judges)}")
    names = [wanted] if wanted else list(judges)
    return {f"{text}@{name}": (request.resolve(special, judges[name]), name) for name in names}


def needs_judge(spec: str) -> bool:
    """Whether a rule's text, such as `judged:F@mine`, asks for a judge."""
    return spec != NULL and RuleRequest(spec.partition("@")[0]).needs_judge
