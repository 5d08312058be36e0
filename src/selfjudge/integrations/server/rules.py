"""Which rule a request is decoded with: the server's own, or what its `selfjudge` field says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from selfjudge.decoding.rule_parser import OPEN_REQUEST, STRICT, RuleRequest
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, share_rules, shares
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.types import Gamma, default_gamma


@dataclass(frozen=True)
class RuleChoice:
    """How an answer is decoded."""

    rule: AcceptanceRule
    gamma: Gamma
    request: RuleRequest = field(compare=False)  # what was asked for, with the rule named
    trace: bool = False  # whether to note what the target wanted at judged tokens
    shared: RowRules | None = field(default=None, compare=False)  # None: its rule cannot be in a batch with others

    @property
    def key(self) -> RowRules | RuleChoice:
        """Requests with equal keys share a batch."""
        return self if self.shared is None else self.shared

    @property
    def of_row(self) -> dict[str, Any]:
        """What `Batch.add` is told of this answer alone."""
        return {} if self.shared is None else {"rule": self.rule, "gamma": self.gamma, "trace": self.trace}

    def __str__(self) -> str:
        """For people: `judged, θ = 0.7, γ = 4`."""
        theta = "" if self.rule.theta is None else f", θ = {self.rule.theta:.3g}"
        return f"{self.request}{theta}, γ = {self.gamma}"

    @property
    def mode(self) -> str:
        """The label `mode` of the metrics: `judged` where drafts may be accepted against the target's choice."""
        return "off" if self.rule.lossless or self.gamma == 0 else "judged"

    def make_batch(self, pair: Pair, config: ServerConfig) -> Batch:
        """An empty batch of answers with this key."""
        limits: dict[str, Any] = {"rows": config.max_batch, "length": config.max_context}
        options: dict[str, Any] = {"engine": config.engine, "prefix_cache": config.prefix_cache, "trace": self.trace}
        return Batch(pair, self.rule, gamma=self.gamma, shared=self.shared, **limits, **options)

    def as_json(self) -> dict[str, Any]:
        rule = self.rule
        strict = {name: getattr(rule, name) for name in STRICT}
        return {"rule": self.request.text, "theta": rule.theta, "price": rule.price, "gamma": self.gamma, **strict}


@dataclass
class Rules:
    """The server's judge, and the rule of requests that name none."""

    pair: Pair
    judge: Judge | None
    own: RuleRequest
    refuted: bool = False
    """Whether requests that name nothing are decoded exactly, since the certificate of the server's rule is refuted."""

    def __post_init__(self) -> None:
        self._resolve = lru_cache(256)(self._find)  # most requests ask for the same

    def choose(
        self,
        asked: RuleRequest = OPEN_REQUEST,
        sampling: Sampling | None = None,
        *,
        off: bool = False,
        trace: bool = False,
        seeded: bool = False,
    ) -> RuleChoice:
        """How a request is decoded; `off` is without judge, as is γ = 0, which an answer that is asked for again may
        have had. A SelfJudgeError says what is wrong with it. A sampled answer depends on γ: it is fixed for a request
        with a seed, whose answer can then be had again."""
        if off and not asked.is_open:
            raise SelfJudgeError("`off` means without judge: leave out `rule`, `theta`, `quality` and `price`")
        if asked.gamma == 0:
            self._resolve(replace(asked, gamma=None), sampling, trace, seeded)  # there is such a rule
        if off or asked.gamma == 0 or (asked.is_open and self.refuted):
            asked = replace(asked, rule="exact")
        return self._resolve(asked, sampling, trace, seeded)

    def _find(self, asked: RuleRequest, sampling: Sampling | None, trace: bool, seeded: bool) -> RuleChoice:
        request = asked.inherit(self.own)
        if request.kind.lossless:
            request = replace(request, rule=None)  # `exact` or `sampling`, depending on the temperature
        request = request.named(sampling)
        rule = request.resolve(self.pair, self.judge, sampling)
        gamma = self._gamma(request.gamma, fixed=seeded and sampling is not None)
        if isinstance(gamma, int):
            rule.check(gamma)
        shared = share_rules(self.pair, self.judge)
        return RuleChoice(rule, gamma, request, trace, shared=shared if shares(shared, rule, gamma) else None)

    def _gamma(self, gamma: Gamma | None, *, fixed: bool) -> Gamma:
        if self.pair.draft is not None:
            default: Gamma = default_gamma(self.pair.target.device.type) if fixed else "auto"
            return default if gamma is None else gamma
        if gamma not in (None, "auto", 0):
            raise SelfJudgeError("`gamma` above 0 needs a draft model, and this server has none")
        return 0
