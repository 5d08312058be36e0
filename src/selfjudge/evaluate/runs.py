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
    """One rule at one γ."""

    name: str
    gamma: int
    rule: AcceptanceRule
    judge: str | None = None

    @property
    def is_null(self) -> bool:
        """Whether it is `exact` once more, in batches of another size: it differs from `exact` by rounding alone."""
        return self.name == NULL

    def batch(self, size: int) -> int:
        """Rows that are decoded together, where others have `size`."""
        return size if not self.is_null else size // 2 if size > 1 else 2

    @property
    def folder(self) -> str:
        return f"{self.name}-g{self.gamma}"

    @property
    def identity(self) -> str:
        """Digest of the name and of what decides the answers; stands in summaries as `run_sha256`."""
        return hashlib.sha256(f"{self.name}:{self.meaning}".encode()).hexdigest()

    @cached_property
    def meaning(self) -> str:
        """Digest of what decides the answers beside the prompts: γ, the rule's options, its threshold and judge."""
        digest, rule = hashlib.sha256(f"{self.gamma}{NULL if self.is_null else ''}".encode()), self.rule
        names = dict.fromkeys([*(f.name for f in fields(rule)), *sorted(vars(rule))])  # not all rules are dataclasses
        values = {name: getattr(rule, name) for name in names if name not in ("judge", "base")}
        values = {name: value for name, value in values.items() if value is not None}
        digest.update(f"{rule.name}:{values}".encode())
        if rule.judge is not None:
            digest.update(rule.judge.digest().encode())
        return digest.hexdigest()


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
            variants |= _variants(rule, judges, special)
        elif (name := rule_text(rule)) in variants:
            raise SelfJudgeError(f"two rules are called {name}: give them different names, or judges by `judges`")
        else:
            variants[name] = rule, None
    for gamma in gammas:
        for parsed, _ in variants.values():
            parsed.check(gamma)
    return [RuleRun(name, gamma, parsed, judge) for gamma in gammas for name, (parsed, judge) in variants.items()]


def _variants(spec: str, judges: Judges, special: tuple[int, ...]) -> dict[str, tuple[AcceptanceRule, str | None]]:
    """What one rule's text stands for, by name: (the rule, the judge's name)."""
    rule, _, wanted = spec.partition("@")
    if spec == NULL:
        return {NULL: (EXACT, None)}
    request = RuleRequest(rule)
    if not request.needs_judge:
        if wanted:
            raise SelfJudgeError(f"rule {rule!r} does not use a judge: leave out @{wanted}")
        return {spec: (request.resolve(special), None)}
    if not judges:
        raise SelfJudgeError(f"rule {spec!r} needs a judge: give `judge`, such as mine=FOLDER")
    if wanted and wanted not in judges:
        raise SelfJudgeError(f"rule {spec!r} names an unknown judge; judges are: {', '.join(judges)}")
    return {
        f"{rule}@{name}": (request.resolve(special, judges[name]), name) for name in ([wanted] if wanted else judges)
    }


def needs_judge(spec: str) -> bool:
    """Whether a rule's text, such as `judged:F@mine`, asks for a judge."""
    return spec != NULL and RuleRequest(spec.partition("@")[0]).needs_judge
