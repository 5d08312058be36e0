"""Which rule a request is decoded with: the server's own, or what its `selfjudge` field says."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from selfjudge.decoding.rules import RULES, AcceptanceRule, Judged, Sampling, names_threshold, parse_rule
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair

LOSSLESS = ("exact", "sampling")  # one and the same promise, at temperature 0 and above


@dataclass(frozen=True)
class Choice:
    """How an answer is decoded. Requests with equal choices share a batch."""

    rule: str
    theta: float | None
    gamma: int
    sampling: Sampling | None


@dataclass(frozen=True)
class Asked:
    """What a request says of itself; None is the server's own."""

    rule: str | None = None
    theta: float | str | None = None
    quality: float | None = None
    gamma: int | None = None
    off: bool = False


@dataclass
class Rules:
    """The server's own settings and the rules that were built so far."""

    pair: Pair
    judge: Judge | None
    rule: str
    theta: float | str | None
    """Of the judged rules: a number or the name of a threshold."""
    gamma: int
    most_gamma: int = 20
    built: OrderedDict[Choice, AcceptanceRule] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.special = self.pair.special_ids

    def choose(self, asked: Asked, sampling: Sampling | None) -> Choice:
        """The choice of a request, checked; a wrong one is a SelfJudgeError."""
        if asked.off and (asked.rule, asked.theta, asked.quality) != (None, None, None):
            raise SelfJudgeError("off means without judge: leave out rule, theta and quality")
        if asked.theta is not None and asked.quality is not None:
            raise SelfJudgeError("quality chooses θ: leave out one of quality and theta")
        spec = "exact" if asked.off else self.rule if asked.rule is None else asked.rule
        if spec in LOSSLESS:
            spec = "exact" if sampling is None else "sampling"
        gamma = self.gamma if asked.gamma is None else asked.gamma
        if not 0 <= gamma <= self.most_gamma:
            raise SelfJudgeError(f"gamma must lie between 0 and {self.most_gamma}, not {gamma}")
        if gamma and self.pair.draft is None:
            raise SelfJudgeError("gamma > 0 needs a draft model; this server has none")
        choice = Choice(spec, self._theta(spec, asked), gamma, sampling)
        self.build(choice).check(gamma)
        return choice

    def _theta(self, spec: str, asked: Asked) -> float | None:
        rule = RULES.get(spec.partition(":")[0])
        if rule is None or not issubclass(rule, Judged) or self.judge is None:
            if asked.theta is not None or asked.quality is not None:
                raise SelfJudgeError(f"rule {spec!r} asks no judge here: leave out theta and quality")
            return None
        if asked.quality is not None:
            return self.judge.quality(asked.quality)
        if asked.theta is not None:
            return self.judge.threshold(asked.theta)
        return None if self.theta is None or names_threshold(spec) else self.judge.threshold(self.theta)

    def build(self, choice: Choice) -> AcceptanceRule:
        """The same rule for equal choices, so that engines find what they recorded with it; the latest 64 are kept."""
        with self.lock:
            if choice not in self.built:
                judged = choice.rule.startswith("judge")
                self.built[choice] = parse_rule(
                    choice.rule, special=self.special, sampling=choice.sampling,
                    judge=self.judge if judged else None, theta=choice.theta,
                )  # fmt: skip
                if len(self.built) > 64:
                    self.built.popitem(last=False)
            self.built.move_to_end(choice)
            return self.built[choice]
