"""Requests for rules: text such as `topk:3` or `judged:F`, with a judge, θ, quality, price and γ. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from selfjudge.decoding import rules, rules_baselines as baselines
from selfjudge.decoding.guards import STRICT_CODE, STRICT_START, structure_of
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Exact, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError, expect, unknown
from selfjudge.judge.config import JudgeConfig, find_judge
from selfjudge.types import MAX_GAMMA, Gamma, check_settings, setting

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule
    for rule in (
        Exact, SpeculativeSampling, rules.TopK, rules.Relaxed, rules.Typical, rules.Margin, rules.FLy, rules.Judged,
        rules.JudgeOnly, baselines.Divergence, baselines.LogitRatio, baselines.RegretBudget, baselines.TwoThresholds,
    )
}  # fmt: skip

CONTEXT = ("judge", "base", "sampling", "special", "structure")
"""Fields of rules that the caller fills in: a rule's text cannot give them."""
STRICT: dict[str, Any] = {"strict_start": STRICT_START, "strict_code": STRICT_CODE}
"""Options that all relaxed rules have, and what they are where somebody decodes for a pair and names none."""
_BOOLS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True)
class RuleRequest:
    """A rule and its strictness, as requested in Python, on the command line or from a server.
    Construction refuses what cannot be read or contradicts itself. Requests that mean the same resolve to the same rule
    object: engines find the graphs captured for a rule by identity."""

    rule: str | None = setting(
        None,
        "Acceptance rule, such as topk:2 or judged:0.4. If not given: exact; judged where --judge, --theta, --quality"
        " or --price is given; sampling with --temperature.",
    )
    judge: Any = setting(None, "Judge folder, hub id or embedded name; else the one that ships for the target.")
    theta: float | str | None = setting(
        None,
        "Strictness (how sure a rule must be before it accepts a draft that is not the target's choice) as a judge's"
        " threshold: a number in [0, 1], larger accepts less, or F or R (the default).",
    )
    quality: float | None = setting(
        None, "Strictness as a share: 0.9 is the θ that rejects 90 % of bad substitutions.", minimum=0, maximum=1
    )
    price: float | None = setting(
        None,
        "Strictness as a price: accept a substitution where the tokens it wins, at this price in nats, outweigh its"
        " harm; with --rule margin or judged.",
        **rules.PRICE_RANGE,
    )
    gamma: Gamma | None = setting(
        None,
        "Tokens drafted per step (γ), 0 is plain decoding; auto, the default, chooses what is fastest: for every step"
        " under exact, once for an answer under other rules.",
        minimum=0,
        maximum=MAX_GAMMA,
        word="auto",
    )
    strict_start: int | None = setting(
        None, f"First tokens of an answer that relaxed rules verify exactly, {STRICT_START} by default.", minimum=0
    )
    strict_code: bool | None = setting(None, "Relaxed rules verify code, JSON, tables and tool calls exactly (default)")

    def __post_init__(self) -> None:
        if isinstance(self.theta, str):
            with suppress(ValueError):
                object.__setattr__(self, "theta", float(self.theta))
        expect(isinstance(self.rule, str | None), "rule", "text, such as 'margin:0.5', or a rule object", self.rule)
        check_settings(self)
        if self.theta is not None and self.quality is not None:
            raise SelfJudgeError("`quality` chooses θ: leave out one of `quality` and `theta`")
        if "theta" in self._given and not self.needs_judge:
            raise self._without_judge()
        if "price" in self._given and not _takes(self.kind, "price"):
            raise SelfJudgeError(f"rule {self.kind.name!r} has no price: `price` goes with rule margin or judged")
        named = (("theta", "a threshold"), ("price", "a price"), *((name, name) for name in STRICT))
        for name, said in named:
            if name in {**self._given, **self._strict} and name in self.options:
                others = "`theta` and `quality`" if name == "theta" else f"`{name}`"
                raise SelfJudgeError(f"{self.rule} names {said} already: leave out {others}")

    @property
    def text(self) -> str:
        """The rule that is meant: the one named, else `judged` where a judge, θ, quality or price is given."""
        if self.rule is not None:
            return self.rule
        return "exact" if self.is_open and self.judge is None else "judged"

    def __str__(self) -> str:
        """The text of a rule that means the same, such as `judged:theta=q0.9`."""
        return with_options(self.text, **self._given, **self._strict)

    @property
    def kind(self) -> type[AcceptanceRule]:
        """The class of the rule that is meant."""
        return _parse(self.text)[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the rule's text gives."""
        return _parse(self.text)[1]

    @property
    def needs_judge(self) -> bool:
        return _takes(self.kind, "judge")

    @property
    def is_open(self) -> bool:
        """Whether the request names neither a rule nor θ, quality or price."""
        return self.rule is None and not self._given

    @property
    def _given(self) -> dict[str, Any]:
        """θ and price, where a field gives them, as options of a rule's text."""
        theta = self.theta if self.quality is None else f"q{self.quality}"
        return {name: value for name, value in (("theta", theta), ("price", self.price)) if value is not None}

    @property
    def _strict(self) -> dict[str, Any]:
        """The guards that fields give; none for a lossless rule, which has nothing to guard."""
        given = {name: getattr(self, name) for name in STRICT if not self.kind.lossless}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def _values(self) -> dict[str, Any]:
        """All options that are given, in the rule's text or as a field."""
        return {**self.options, **self._given, **self._strict}

    def _without_judge(self) -> SelfJudgeError:
        return SelfJudgeError(
            f"rule {self.text!r} does not use a judge: leave out `judge`, `theta` and `quality`, or use rule judged"
        )

    def named(self, sampling: Sampling | None = None) -> RuleRequest:
        """The same request with its rule named; with `sampling` the default is rule sampling instead of exact."""
        if self.rule is not None and (self.rule != "sampling" or sampling is None):
            return self
        lossless = "exact" if _drawn(sampling) is None else "sampling"
        return replace(self, rule=lossless if self.text in ("exact", "sampling") else self.text)

    def _without(self, names: Collection[str]) -> RuleRequest:
        """The same request, whose rule's text does not name these options; θ and price replace each other."""
        names = {*names, *(("theta", "price") if {"theta", "price"} & set(names) else ())}
        kept = {name: value for name, value in self.options.items() if name not in names}
        return self if len(kept) == len(self.options) else replace(self, rule=with_options(self.kind.name, **kept))

    def inherit(self, own: RuleRequest) -> RuleRequest:
        """Complete the request with a server's `own`, which replaces it where it is open. θ, quality or price without a
        rule apply to the own rule, or to judged if that is lossless. A judged rule without them takes the own θ or
        quality, never the own price. Guards come from the own request, its rule's text included, or from this one."""
        guards = {name: own.options.get(name, getattr(own, name)) for name in STRICT if name not in self.options}
        own = own._without({*self._given, *STRICT})
        mine = {
            name: value if getattr(self, name) is None else getattr(self, name)
            for name, value in {"gamma": own.gamma, **guards}.items()
        }
        if self.is_open:
            return replace(own, **mine)
        rule = own.text if self.rule is None and not own.kind.lossless else self.rule
        request = replace(self, rule=rule, **mine)
        if request.needs_judge and {"theta", "price"}.isdisjoint(request._values):
            return replace(request, theta=own.theta, quality=own.quality)
        return request

    def strictly(self) -> RuleRequest:
        """The same request, whose rule verifies structured answers exactly, whatever it says about that."""
        return replace(self._without({"strict_code"}), strict_code=True)

    def threshold(self, judge: Judge | JudgeConfig) -> float:
        """θ as a number; the default of this judge if the request has none."""
        return judge.threshold(self._values.get("theta"))

    def resolve(
        self,
        pair: Pair | tuple[int, ...] = (),
        judge: Judge | JudgeConfig | None = None,
        sampling: Sampling | None = None,
        *,
        bare: bool | None = None,
    ) -> AcceptanceRule:
        """The rule for a pair, or for its special token ids. For a pair, relaxed rules have the guards of STRICT unless
        the request names others, or `bare` asks for none; for special token ids only where it is False. A rule that
        needs a judge gets the one of the request, else `judge`, else the one that ships for the pair. A `JudgeConfig`
        in its place gives a rule to check, not to decode with, and needs no torch."""
        request = self.named(sampling)
        kind, values, sampling = request.kind, request._values, _drawn(sampling)
        if self.gamma == 0 and not kind.lossless:
            raise SelfJudgeError(f"rule {kind.name!r} needs drafts: name another `gamma` than 0, or rule exact")
        judge = request._choose_judge(pair, judge)
        if sampling is not None and not (_takes(kind, "sampling") or _takes(kind, "base")):
            raise SelfJudgeError(f"rule {kind.name!r} is greedy: `temperature` goes with sampling, judged or sglang")
        if judge is not None and "price" not in values:
            values["theta"] = request.threshold(judge)
        bare = isinstance(pair, tuple) if bare is None else bare
        values = values if bare or kind.lossless else {**STRICT, **values}
        special = pair if isinstance(pair, tuple) else pair.special_ids
        strict_code = bool(values.get("strict_code")) and not isinstance(pair, tuple)
        structure = structure_of(pair.tokenizer) if strict_code else None  # type: ignore[union-attr]
        build = _build if isinstance(judge, JudgeConfig) else _build_once
        context = {"special": special, "sampling": sampling, "judge": judge, "structure": structure}
        rule = build(kind.name, tuple(sorted(values.items())), **context)
        if isinstance(self.gamma, int):
            rule.check(self.gamma)
        return rule

    def _choose_judge(
        self, pair: Pair | tuple[int, ...], judge: Judge | JudgeConfig | None
    ) -> Judge | JudgeConfig | None:
        """The judge for the rule, as `resolve` says; None where it uses none."""
        if not self.needs_judge:
            if self.judge is not None:
                raise self._without_judge()
            return None
        if self.judge is not None:
            return load_judge(self.judge)
        judge = pair.judge if judge is None and not isinstance(pair, tuple) else judge
        if judge is None:
            raise SelfJudgeError(f"rule {self.kind.name!r} needs a judge and none ships for this target: give `judge`")
        return judge


def resolve_rule(
    pair: Pair, rule: str | AcceptanceRule | None = None, *, sampling: Sampling | None = None, **options: Any
) -> AcceptanceRule:
    """The rule that text or an object names, ready for this pair; `options` are those of `RuleRequest`."""
    known = [f.name for f in fields(RuleRequest)]
    for name in options.keys() - known:
        raise unknown("option", name, [*known[1:], "sampling"])
    expect(isinstance(sampling, Sampling | None), "sampling", "a Sampling, such as Sampling(0.7)", sampling)
    if not isinstance(rule, AcceptanceRule):
        return RuleRequest(rule, **options).resolve(pair, sampling=sampling)
    if sampling is not None or any(value is not None for value in options.values()):
        raise SelfJudgeError(
            "a rule object is complete: `judge`, `theta`, `quality`, `price`, `sampling` go with a text"
        )
    return rule


def _drawn(sampling: Sampling | None) -> Sampling | None:
    """The same, or None if it is greedy."""
    return sampling if sampling is not None and sampling.temperature else None


def load_judge(judge: Judge | JudgeConfig | str | Path) -> Judge | JudgeConfig:
    """The judge itself, or the one of that name; files are read again once they have changed."""
    if not isinstance(judge, (str, Path)):
        expect(hasattr(judge, "threshold"), "judge", "a Judge, its folder, hub id or embedded name", judge)
        return judge
    file = find_judge(judge) / "model.safetensors"
    return _read_judge(str(judge), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(16)  # the same object, and so the same rule, every time
def _read_judge(source: str, changed: int) -> Judge:
    from selfjudge.judge.model import Judge

    return Judge.from_pretrained(source)


def _build(name: str, values: tuple[tuple[str, Any], ...], **context: Any) -> AcceptanceRule:
    kind = RULES[name]
    if kind is Exact:
        return EXACT
    sampling = context["sampling"]
    context["base"] = EXACT if sampling is None else SpeculativeSampling(sampling)
    context["sampling"] = sampling or Sampling()
    return kind(**dict(values), **{key: context[key] for key in CONTEXT if _takes(kind, key)})


_build_once = lru_cache(256)(_build)


def _takes(kind: type[AcceptanceRule], field: str) -> bool:
    return any(f.name == field for f in fields(kind))


def rule_options(kind: type[AcceptanceRule]) -> dict[str, object]:
    """The options that a rule's text may give, with their defaults."""
    hidden = (*CONTEXT, *STRICT)
    names = {f.name: None if f.default is MISSING else f.default for f in fields(kind) if f.name not in hidden}
    return names | kind.defaults | ({} if kind.lossless else STRICT)


def rule_text(rule: AcceptanceRule, *without: str) -> str:
    """A rule object's name with its options, as a rule's text gives them."""
    names = dict.fromkeys([*rule_options(type(rule)), *sorted(vars(rule))])  # not all rules are dataclasses
    return with_options(rule.name, **{name: getattr(rule, name) for name in names if name not in (*CONTEXT, *without)})


def with_options(text: str, **options: object) -> str:
    """A rule's text with these options added; None adds nothing."""
    for name, value in options.items():
        if value is not None:
            text += f"{',' if ':' in text else ':'}{name}={value}"
    return text


@lru_cache(256)
def _parse(text: str) -> tuple[type[AcceptanceRule], Mapping[str, Any]]:
    """The class and the options of `name`, `name:value,…` or `name:option=value,…`."""
    name, _, listed = text.partition(":")
    if name not in RULES:
        raise unknown("rule", name, RULES)
    known = rule_options(RULES[name])
    in_order = [option for option in known if option not in STRICT]
    values: dict[str, Any] = {}
    for index, part in enumerate(filter(None, listed.split(","))):
        key, named, value = part.partition("=")
        if not named:
            if index >= len(in_order):
                raise SelfJudgeError(f"rule {name!r} takes at most {len(in_order)} values, got {listed!r}")
            key, value = in_order[index], part
        if key not in known:
            raise SelfJudgeError(f"rule {name!r} has no option {key!r}; it has: {', '.join(known) or 'none'}")
        if key in values:
            raise SelfJudgeError(f"rule {text!r} names {key} twice")
        values[key] = _convert(name, key, value, known[key])
    return RULES[name], MappingProxyType(values)


def _convert(rule: str, key: str, text: str, default: object) -> object:
    """The value of an option, in the type of its default."""
    if key == "theta" and text[:1] in ("F", "R", "Y", "q"):
        return text
    try:
        if isinstance(default, bool):
            return _BOOLS[text.lower()]
        value = int(text) if isinstance(default, int) else float(text)
    except (KeyError, ValueError):
        wanted = {bool: "on or off", int: "a whole number"}.get(type(default), "a number")
        raise SelfJudgeError(f"rule {rule!r}: {key} must be {wanted}, not {text!r}") from None
    if not abs(value) < 1 << 31:  # refuses NaN, too
        raise SelfJudgeError(f"rule {rule!r}: {key}={text!r} is out of range")
    return value


OPEN_REQUEST = RuleRequest()  # a request that leaves everything open
