"""The rules that `tune` tries, in families from strict to loose, and the pairs of a rule and γ that it tests. No torch.
At end-of-sequence and other special tokens the target alone decides. A rule's speed at a γ and a load (rows at a time)
is its tokens per cycle over the seconds of such a cycle. It has a best γ at each load, and a pair is tested if it may
gain over `exact`, plain decoding and the stricter pair before it. Speeds are of prompts set aside, and kept."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from selfjudge.decoding.rule_parser import STRICT, RuleRequest, rule_options, with_options
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig

_RULES: dict[str, tuple[str, ...]] = {
    "margin": tuple(f"margin:{margin:g},guard=on" for margin in (0.1, 0.25, 0.5, 1.0, 2.0, 3.0)),  # nats
    "priced": tuple(f"margin:price={price:g},guard=on" for price in (0.02, 0.05, 0.1, 0.2, 0.4)),  # nats a token
    "judged": (),  # the judge's own thresholds
    # normalised entropy of the target; drafts that must match after a mismatch: more find hardly any at usual γ
    "fly": tuple(f"fly:{entropy:g},2,guard=on" for entropy in (0.3, 0.2, 0.1, 0.05)),
    "topk": tuple(f"topk:{k},guard=on" for k in (2, 3, 5)),
}
FAMILIES = tuple(_RULES)
NAMED = "rules"  # the family of rules that the user names, in the order given
_QUALITIES = (0.98, 0.95, 0.9, 0.8, 0.6)  # shares of bad substitutions that the judge rejects
_THETAS = (0.95, 0.9, 0.8, 0.65, 0.5)  # thresholds of a judge without a quality curve
Families = dict[str, tuple[str, ...]]  # the rules of each family as text, from strict to loose
RefusedRule = tuple[str, str, str]  # the family and text of a rule that does not work with the γ of a run, and why
SplitFamilies = tuple[Families, list[RefusedRule]]
BASELINES = ("exact", "plain")
LEAST_GAIN = 0.03  # of a pair that is tested, by expected speeds: one that gains less cannot be shown to pay
PUT_OFF = 3  # a pair is tested last if the next looser one is expected to gain more than so many times as much
Speeds = Sequence[dict[str, Any]]  # rows of load, rule, γ, tokens per cycle and expected tokens/s


def list_families(names: Sequence[str], judge: JudgeConfig | None, rules: Sequence[str] | None = None) -> Families:
    """Families by name, or of these `rules`. Without a judge, judged is left out of all, and refused among several."""
    if rules is not None:
        return {NAMED: name_rules(rules)}
    if judge is None and tuple(names) == FAMILIES:
        names = [name for name in names if name != "judged"]
    return {name: _list_judged(judge) if name == "judged" else _RULES[name] for name in names}


def name_rules(texts: Sequence[str]) -> tuple[str, ...]:
    """Rules as candidates: guarded as those of families are, unless their text says otherwise."""
    named = dict.fromkeys(texts)
    for text in named:
        kind, options = RuleRequest(text).kind, RuleRequest(text).options
        if kind.lossless or STRICT.keys() & options.keys():
            raise SelfJudgeError(f"`rules`: {text} must be relaxed; `strict_start` and `strict_code` are for all")
        named[text] = None if "guard" in options or rule_options(kind)["guard"] else "on"
    return tuple(with_options(text, guard=guard) for text, guard in named.items())


def _list_judged(judge: JudgeConfig | None) -> tuple[str, ...]:
    """The judged rules with distinct thresholds below 1, the largest first."""
    if judge is None:
        raise SelfJudgeError("the family judged needs a judge: give `judge`, or leave it out of `families`")
    thresholds = [f"q{share:g}" for share in _QUALITIES] if judge.quality_curve else [f"{t:g}" for t in _THETAS]
    distinct = {judge.threshold(text if text[0] == "q" else float(text)): text for text in reversed(thresholds)}
    return tuple(f"judged:{text}" for theta, text in sorted(distinct.items(), reverse=True) if theta < 1)


def split_by_gamma(families: Families, gamma: int | None, judge: JudgeConfig | None) -> SplitFamilies:
    """Families with the rules that work at this γ, None: at some, and the others; raises if none or a named one not."""
    kept: Families = {}
    refused: list[RefusedRule] = []
    for family, rules in families.items():
        for rule in rules:
            try:
                RuleRequest(rule, gamma=gamma).resolve((), judge)
                kept[family] = (*kept.get(family, ()), rule)
            except SelfJudgeError as error:
                if family == NAMED:
                    raise
                refused.append((family, rule, str(error)))
    if not kept:
        raise SelfJudgeError(refused[-1][2])
    return kept, refused


@dataclass(frozen=True)
class RulePair:
    """A rule at a γ, and the loads at which it is the rule's best one."""

    rule: str
    gamma: int
    loads: tuple[int, ...]


Pairs = dict[str, list[RulePair]]  # the pairs of each family, in the order in which they are tested


def find_best(speeds: Speeds, load: int, rules: Collection[str]) -> dict[str, Any] | None:
    """The fastest row of these rules at a load."""
    rows = (row for row in speeds if row["load"] == load and row["rule"] in rules)
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)


def find_rate(speeds: Speeds, load: int, rules: Collection[str]) -> float:
    """The expected tokens/s of the fastest of these rules at its best γ; 0 if none is known."""
    return float((find_best(speeds, load, rules) or {"tokens_per_second": 0})["tokens_per_second"])


def plan_pairs(families: Families, speeds: Speeds, loads: Sequence[int], gamma: int, *version: float) -> Pairs:
    """The pairs of each family, from strict to loose, then by γ, that are by LEAST_GAIN faster at a load than
    `exact`, plain decoding and the pair before; those that PUT_OFF says last. Named rules: all, in their order. Without
    speeds all, at `gamma`. `version`: what both numbers were once; at 0 the pair before did not count."""
    if not speeds:
        return {name: [RulePair(rule, gamma, tuple(loads)) for rule in rules] for name, rules in families.items()}
    pairs, (gain, times) = Pairs(), version or (LEAST_GAIN, PUT_OFF)
    for name, rules in families.items():
        least = -math.inf if name == NAMED else gain
        reached = {load: find_rate(speeds, load, BASELINES) for load in loads}
        for rule in rules:
            by_gamma: dict[int, list[int]] = {}
            for load in loads:
                best = find_best(speeds, load, (rule,))
                if best is not None and best["tokens_per_second"] > (1 + least) * reached[load]:
                    by_gamma.setdefault(int(best["gamma"]), []).append(load)
                    reached[load] = best["tokens_per_second"] if gain else reached[load]
            if by_gamma:
                own = [RulePair(rule, chosen, tuple(at)) for chosen, at in sorted(by_gamma.items())]
                pairs.setdefault(name, []).extend(own)
    return {name: _put_off(name, own, speeds, times) for name, own in pairs.items()}


def _put_off(name: str, pairs: list[RulePair], speeds: Speeds, times: float) -> list[RulePair]:
    """The pairs, with those last that at all their loads gain little against the next one there: prompts would be gone
    before it is tested. Not against the fastest one, which mostly loses too much: then all hope would rest on it."""
    gains = {(p, n): find_rate(speeds, n, (p.rule,)) - find_rate(speeds, n, BASELINES) for p in pairs for n in p.loads}
    after = {(p, n): next((gains[q, n] for q in pairs[pairs.index(p) + 1 :] if n in q.loads), 0) for p, n in gains}
    return sorted(pairs, key=lambda p: name != NAMED and all(times * gains[p, n] < after[p, n] for n in p.loads))
