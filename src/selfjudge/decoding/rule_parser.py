"""Rules as text: `topk:3`, `relaxed:k=5,delta=0.2`, `judged:F`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rules import (
    EXACT,
    AcceptanceRule,
    Exact,
    FLy,
    Judged,
    JudgeOnly,
    Margin,
    RandomAcceptance,
    Relaxed,
    SpeculativeSampling,
    TopK,
    Typical,
)
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError, unknown

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule
    for rule in (Exact, SpeculativeSampling, TopK, Relaxed, Typical, Margin, FLy, RandomAcceptance, Judged, JudgeOnly)
}

NOT_IN_TEXT = {"judge", "base", "sampling", "special"}


def resolve_rule(
    pair: Pair,
    rule: str | AcceptanceRule | None = None,
    *,
    judge: Judge | str | Path | None = None,
    theta: float | str | None = None,
    quality: float | None = None,
    price: float | None = None,
    sampling: Sampling | None = None,
) -> AcceptanceRule:
    """The rule that text or an object names, ready for this pair.

    Without a rule it is `judged` where a judge, a threshold, a quality or a price is given, `sampling` where `sampling`
    is, and `exact` otherwise. A judged rule without a judge takes the one that ships for the pair.
    """
    judged = judge is not None or theta is not None or quality is not None
    if isinstance(rule, AcceptanceRule):
        if judged or price is not None or sampling is not None:
            raise SelfJudgeError(
                "a rule object is complete: `judge`, `theta`, `quality`, `price` and `sampling` go with a rule's text"
            )
        return rule
    spec = rule or default_rule(judge, theta, quality, price, sampling=sampling)
    if theta is not None and quality is not None:
        raise SelfJudgeError("`quality` chooses the threshold: leave out one of `quality` and `theta`")
    if issubclass(read_rule(spec)[0], Judged):
        judge = pair.judge if judge is None else _loaded(judge)
    elif judged:
        raise SelfJudgeError(
            f"rule {spec!r} does not use a judge: leave out `judge`, `theta` and `quality`, or use rule judged"
        )
    return _built(spec, pair.special_ids, sampling, judge, f"q{quality}" if quality is not None else theta, price)


def default_rule(*said: object, sampling: Sampling | None = None) -> str:
    """The rule where nobody names one: `judged` where anything was `said` about a judge, θ, a quality or a price."""
    if any(value is not None for value in said):
        return "judged"
    return "exact" if sampling is None else "sampling"


def _loaded(judge: Judge | str | Path) -> Judge:
    """The judge itself, or the one of that name; files are read again once they have changed."""
    from selfjudge.judge.hub import find_judge

    if not isinstance(judge, (str, Path)):
        return judge
    file = find_judge(judge) / "model.safetensors"
    return _read(str(judge), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(16)  # the same object, and so the same rule, every time
def _read(source: str, changed: int) -> Judge:
    from selfjudge.judge.model import Judge

    return Judge.from_pretrained(source)


@lru_cache(64)  # engines find what they recorded with a rule by its identity
def _built(
    spec: str, special: tuple[int, ...], sampling: Sampling | None, judge: Judge | None, theta: float | str | None,
    price: float | None,
) -> AcceptanceRule:  # fmt: skip
    return parse_rule(spec, special=special, sampling=sampling, judge=judge, theta=theta, price=price)


def options(rule: type[AcceptanceRule]) -> dict[str, object]:
    """The options that a rule's text may give, with their defaults."""
    names = {f.name: None if f.default is MISSING else f.default for f in fields(rule) if f.name not in NOT_IN_TEXT}
    return names | rule.defaults


def parse_rule(
    spec: str,
    *,
    special: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    judge: Judge | None = None,
    theta: float | str | None = None,
    price: float | None = None,
) -> AcceptanceRule:
    """Build a rule from `name`, `name:value,…` or `name:option=value,…`, such as `topk:3` or `relaxed:k=5,delta=0.2`.

    A temperature (`sampling`) belongs to `sampling` and to the judged rules on top of it; the others are greedy.
    """
    rule, values = read_rule(spec)
    if price is not None:
        if "price" not in options(rule):
            raise SelfJudgeError(f"rule {rule.name!r} has no price: `price` goes with rule margin or judged")
        if "price" in values:
            raise SelfJudgeError(f"{spec} names a price already: leave out `price`")
        values["price"] = price
    if issubclass(rule, Judged):
        if judge is None:
            raise SelfJudgeError(f"rule {rule.name!r} needs a judge and none ships for this target: give `judge`")
        if "theta" in values and theta is not None:
            raise SelfJudgeError(f"{spec} names a threshold already: leave out `theta` and `quality`")
        base = EXACT if sampling is None else SpeculativeSampling(sampling)
        return rule(judge, values.pop("theta", theta), base, special=special, **values)
    if judge is not None or theta is not None:
        raise SelfJudgeError(
            f"rule {rule.name!r} does not use a judge: leave out `judge`, `theta` and `quality`, or use rule judged"
        )
    if rule is SpeculativeSampling:
        return SpeculativeSampling(sampling or Sampling())
    if sampling is not None:
        raise SelfJudgeError(f"rule {rule.name!r} is greedy: `temperature` goes with rule sampling or judged")
    if rule is Exact:
        return EXACT
    return rule(**values, **({"special": special} if "guard" in options(rule) else {}))


def read_rule(spec: str) -> tuple[type[AcceptanceRule], dict[str, Any]]:
    """The class that a rule's text names and the options it gives; needs neither pair nor judge."""
    name, _, text = spec.partition(":")
    if name not in RULES:
        raise unknown("rule", name, RULES)
    rule = RULES[name]
    known = options(rule)
    values: dict[str, Any] = {}
    for index, part in enumerate(filter(None, text.split(","))):
        key, named, value = part.partition("=")
        if not named:
            if index >= len(known):
                raise SelfJudgeError(f"rule {name!r} takes at most {len(known)} values, got {text!r}")
            key, value = list(known)[index], part
        if key not in known:
            raise SelfJudgeError(f"rule {name!r} has no option {key!r}; it has: {', '.join(known) or 'none'}")
        values[key] = _convert(name, key, value, known[key])
    return rule, values


def names_threshold(spec: str) -> bool:
    """Whether a rule's text, such as `judged:0.4`, says itself what decides: a θ, or a price instead of one."""
    return not {"theta", "price"}.isdisjoint(read_rule(spec)[1])


def _convert(rule: str, key: str, text: str, default: object) -> object:
    if key == "theta" and text[:1] in ("F", "R", "Y", "q"):
        return text
    try:
        value = (
            _TRUTH[text.lower()]
            if isinstance(default, bool)
            else int(text)
            if isinstance(default, int)
            else float(text)
        )
    except (KeyError, ValueError):
        raise SelfJudgeError(f"rule {rule!r}: {key}={text!r} is not a number") from None
    if not abs(value) < 1 << 31:  # NaN is not, either
        raise SelfJudgeError(f"rule {rule!r}: {key}={text!r} is out of range")
    return value


_TRUTH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
