"""Which rule a request is decoded with: the server's own, or what its `selfjudge` field says."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from selfjudge.decoding.rule_parser import RULES, default_rule, names_threshold, parse_rule
from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.types import MAX_GAMMA, Gamma, default_gamma

LOSSLESS = ("exact", "sampling")  # the same promise, at temperature 0 and above
MAX_BUILT = 64  # rules that are kept for requests to come


@dataclass(frozen=True)
class RuleOptions:
    """What a request says about its rule, as in `schema.DecodeOptions`; None is the server's own setting."""

    rule: str | None = None
    theta: float | str | None = None
    quality: float | None = None
    price: float | None = None
    gamma: Gamma | None = None
    off: bool = False
    judged_tokens: bool = False
    tokens: bool = False


@dataclass(frozen=True)
class Choice:
    """How an answer is decoded. Requests with equal choices share a batch."""

    rule: str
    theta: float | None
    price: float | None
    gamma: Gamma
    sampling: Sampling | None
    trace: bool = False
    """Whether to note what the target wanted at judged tokens."""
    background: bool = False
    """Whether nobody waits for the answer (`shadow`): such answers have a batch of their own."""

    def __str__(self) -> str:
        """For people: `margin, price 0.1, γ = 4`."""
        named = {"θ": self.theta, "price": self.price}
        return ", ".join(
            [self.rule, *(f"{name} {x:.3g}" for name, x in named.items() if x is not None), f"γ = {self.gamma}"]
        )

    @property
    def mode(self) -> str:
        """The label `mode` of the metrics: `judged` where drafts may be accepted against the target's choice."""
        return "off" if self.rule in LOSSLESS or self.gamma == 0 else "judged"


@dataclass
class Rules:
    """The server's own settings and the rules that were built so far."""

    pair: Pair
    judge: Judge | None
    rule: str
    theta: float | str | None
    """Of the judged rules: a number or the name of a threshold."""
    gamma: Gamma | None
    """Of requests that name none; None: what suits the rule."""
    price: float | None = None
    """Of the server's own rule; a request that names a rule, θ, quality or price of its own does not get it."""
    refuted: bool = False
    """Whether requests that name nothing are decoded exactly, since the certificate of the server's rule is refuted."""
    built: OrderedDict[Choice, AcceptanceRule] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.special = self.pair.special_ids

    def switch_to_exact(self) -> None:
        """From now on, for requests that name no rule, threshold or price of their own."""
        self.refuted = True

    def choose(self, options: RuleOptions, sampling: Sampling | None) -> Choice:
        """The choice of a request, checked; a wrong one is a SelfJudgeError."""
        said = (options.rule, options.theta, options.quality, options.price) != (None,) * 4
        if options.off and said:
            raise SelfJudgeError("`off` means without judge: leave out `rule`, `theta`, `quality` and `price`")
        if options.theta is not None and options.quality is not None:
            raise SelfJudgeError("`quality` chooses θ: leave out one of `quality` and `theta`")
        off = options.off or (self.refuted and not said)
        rule = "exact" if off else self._own_rule(options) if options.rule is None else options.rule
        if rule in LOSSLESS:
            rule = "exact" if sampling is None else "sampling"
        gamma = self.own_gamma(rule) if options.gamma is None else options.gamma
        if gamma != "auto" and not 0 <= gamma <= MAX_GAMMA:
            raise SelfJudgeError(f"`gamma` must lie between 0 and {MAX_GAMMA}, not {gamma}")
        if self.pair.draft is None and gamma == "auto":
            gamma = 0
        if gamma and self.pair.draft is None:
            raise SelfJudgeError("`gamma` above 0 needs a draft model, and this server has none")
        price = options.price if said or off else self.price
        theta = self._theta(rule, options, price)
        choice = Choice(rule, theta, price, gamma, sampling, trace=options.judged_tokens or options.tokens)
        built = self.build(choice)
        if gamma != "auto":
            built.check(gamma)
        return choice

    def own_gamma(self, rule: str) -> Gamma:
        """Of requests with this rule that name no γ."""
        if self.gamma is not None:
            return self.gamma
        if self.pair.draft is None:
            return 0
        return "auto" if rule == "exact" else default_gamma(self.pair.target.device.type)

    def _own_rule(self, options: RuleOptions) -> str:
        """Of a request that names none: a threshold or a price means judged where the server's own rule has neither."""
        return default_rule(options.theta, options.quality, options.price) if self.rule in LOSSLESS else self.rule

    def _theta(self, rule: str, options: RuleOptions, price: float | None) -> float | None:
        kind = RULES.get(rule.partition(":")[0])
        if kind is None or not issubclass(kind, Judged) or self.judge is None:
            if options.theta is not None or options.quality is not None:
                raise SelfJudgeError(f"rule {rule!r} does not use a judge here: leave out `theta` and `quality`")
            return None
        if options.quality is not None:
            return self.judge.quality(options.quality)
        if options.theta is not None:
            return self.judge.threshold(options.theta)
        if self.theta is None or price is not None or names_threshold(rule):
            return None
        return self.judge.threshold(self.theta)

    def build(self, choice: Choice) -> AcceptanceRule:
        """The same rule for equal choices, so that engines find what they recorded with it."""
        with self.lock:
            if choice not in self.built:
                self.built[choice] = parse_rule(
                    choice.rule,
                    special=self.special,
                    sampling=choice.sampling,
                    judge=self.judge if choice.rule.startswith("judge") else None,
                    theta=choice.theta,
                    price=choice.price,
                )
                if len(self.built) > MAX_BUILT:
                    self.built.popitem(last=False)
            self.built.move_to_end(choice)
            return self.built[choice]
