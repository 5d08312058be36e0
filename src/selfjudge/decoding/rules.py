"""Acceptance rules: Block → Verdict, pure tensor functions, batched on the first axis.
A rule says which drafts it accepts. `AcceptanceRule.__call__` does the rest: the walk to the first rejected draft, the
token after it and the guard. A new rule is one class here and its entry in `rule_parser.RULES`; rules for comparison
are in `rules_baselines.py`.
p_i, the target's distribution of d_i, is row i−1 of `Block.target_logits`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from selfjudge.decoding.guards import Guards, StructureTable
from selfjudge.decoding.sampling import Sampling, sample
from selfjudge.errors import SelfJudgeError
from selfjudge.ops import argmax_checked, replace_non_finite, worth_taking
from selfjudge.types import DEFAULT_THETA, Block, LazyModule, Verdict, check_settings, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from selfjudge.judge.model import Judge
else:
    torch = LazyModule("torch")

PRICE_RANGE: dict[str, Any] = {"minimum": 0, "maximum": 1000}
"""Prices in nats: 0 is `exact`, and one of 1000 accepts whatever is followed by a match."""


@cache  # captured graphs keep reading these tensors
def _ids_tensor(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=device)


@dataclass(frozen=True, eq=False)
class AcceptanceRule:
    """Base of all rules: greedy alignment (d_i = argmax p_i) and the walk.
    `special` holds end-of-sequence and other special token ids. With `guard`, alignment alone decides where the draft
    or the target's likeliest token is special."""

    name: ClassVar[str]
    summary: ClassVar[str]
    lossless: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True  # whether the rule reads more of the target's logits than their argmax
    reads_draft: ClassVar[bool] = False  # whether the rule reads the draft's logits also where nothing is sampled
    sampling: ClassVar[Sampling | None] = None
    judge: ClassVar[Judge | None] = None
    theta: ClassVar[float | None] = None
    defaults: ClassVar[dict[str, object]] = {}  # defaults of options whose field says None because they exclude others

    strict_start: int | None = field(
        default=None, kw_only=True, metadata=setting(None, "First tokens verified exactly", minimum=0).metadata
    )
    strict_code: bool | None = field(default=None, kw_only=True)
    """Whether code and structure are verified exactly (`guards.py`): by `structure`, which whoever decodes gives."""
    structure: StructureTable | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_settings(self, f"{self.name}: ")

    @property
    def matches_needed(self) -> int:
        """How many drafts must match after one that is accepted against alignment."""
        return 0

    @property  # a class variable would change the order of the fields of subclasses
    def price(self) -> float | None:
        """π in the unit of `harm`. With a price, `worth_taking` decides, and `accepts` is not called."""
        return None

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        """[B, γ] accepted drafts, by the `logits` [B, γ, V] that predict them. All but lossless rules define it."""
        if not self.lossless:
            raise NotImplementedError(f"rule {self.name!r} does not define `accepts`")
        return aligned

    def harm(self, block: Block, logits: Tensor) -> Tensor:
        """[B, γ] float32, at least 0: what it costs to accept each draft against alignment; arguments as above."""
        raise NotImplementedError

    def aligned(self, block: Block, logits: Tensor, choice: Tensor) -> Tensor:
        """[B, γ] which drafts the lossless alignment rule accepts."""
        return block.draft_tokens == choice[:, :-1]

    def following(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, n: Tensor) -> Tensor:
        """[B] the target's token after n accepted drafts."""
        return choice.gather(1, n[:, None]).squeeze(1)

    def spend(self, block: Block, logits: Tensor, judged: Tensor, n: Tensor) -> Tensor | None:
        """[B] `Block.spent` after this block, n of whose drafts are accepted; None under rules without a budget."""
        return None

    def settled(self, block: Block) -> bool:
        """Whether alignment decides the whole block without the judge. Only on a CPU: elsewhere it means waiting."""
        return False

    @property
    def depends_on_gamma(self) -> bool:
        """Whether an answer depends on γ: all do but those of greedy lossless rules."""
        return not self.lossless or self.sampling is not None

    def check(self, gamma: int) -> None:
        """Refuse a γ this rule cannot work with."""
        n = self.matches_needed
        _require(
            gamma == 0 or gamma > n,
            f"{self.name} with window {n} needs `gamma` > {n}, not {gamma}: no mismatch could be confirmed",
        )

    @property
    def guards(self) -> Guards | None:
        """The guards of whole answers; a rule object has none unless it is given some."""
        structure = self.structure if self.strict_code else None
        return Guards(self.strict_start or 0, structure) if self.strict_start or structure else None

    def guarded(self) -> tuple[int, ...]:
        """Token ids at which alignment alone decides."""
        return getattr(self, "special", ()) if getattr(self, "guard", False) else ()

    def finite(self, logits: Tensor, bad_rows: Tensor) -> Tensor:
        """Logits without non-finite numbers, if the rule reads them; on a GPU the copy is cheaper than asking."""
        read = self.reads_logits and (logits.is_cuda or bool(bad_rows.any()))
        return replace_non_finite(logits) if read else logits

    def __call__(self, block: Block) -> Verdict:
        logits = block.target_logits
        choice, bad_rows = argmax_checked(logits) if block.argmax is None else block.argmax  # [B, γ+1]
        logits = self.finite(logits, bad_rows)
        aligned = self.aligned(block, logits, choice)
        inside = list_existing(block)
        if inside is not None:
            aligned, bad_rows = aligned & inside[:, 1:], bad_rows & inside
        non_finite, unusable = bad_rows.any(), bad_rows[:, :-1]
        if block.scores is not None:
            unusable = unusable | block.scores.isnan()
        elif block.hidden is not None:
            unusable = unusable | ~block.hidden[:, 1:].isfinite().all(-1)
        if block.hidden is not None or block.scores is not None:
            non_finite = non_finite | (unusable if inside is None else unusable & inside[:, 1:]).any()
        if inside is not None:
            unusable = unusable | ~inside[:, 1:]  # a draft that a row does not have is not aligned either: rejected
        accepted = self._accepted(block, logits[:, :-1], choice[:, :-1], aligned, unusable)
        judged = torch.zeros_like(aligned) if accepted is aligned else accepted & ~aligned
        n = accepted.long().cumprod(1).sum(1)  # the walk: stop at the first rejected draft
        spent = self.spend(block, logits[:, :-1], judged, n)
        return Verdict(n, self.following(block, logits, choice, aligned, n), judged, non_finite, spent)

    def _accepted(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, unusable: Tensor) -> Tensor:
        """[B, γ] accepted: by alignment if `unusable` or guarded, else by the rule; `aligned` itself if that is all."""
        if block.scores is None and self.settled(block):
            return aligned
        alignment_only = unusable if block.exact_only is None else unusable | block.exact_only
        if ids := self.guarded():
            alignment_only = alignment_only | is_among(block.draft_tokens, ids) | is_among(choice, ids)
        if self.price is not None:
            harm = self.harm(block, logits).masked_fill(alignment_only, math.inf)  # no walk passes a mismatch there
            return torch.where(alignment_only, aligned, aligned | worth_taking(harm, aligned, self.price))
        accepted = self.accepts(block, logits, aligned)
        if accepted.dtype != torch.bool or accepted.shape != aligned.shape:
            raise SelfJudgeError(
                f"rule {self.name!r}: `accepts` must give a bool for each draft, {list(aligned.shape)},"
                f" not {str(accepted.dtype).removeprefix('torch.')} {list(accepted.shape)}"
            )
        return aligned if accepted is aligned else torch.where(alignment_only, aligned, accepted)


def list_existing(block: Block) -> Tensor | None:
    """[B, γ+1] which rows of logits exist, limits[b] + 1 of each; column i also says if d_i does. None: no limits."""
    if block.limits is None:
        return None
    return torch.arange(block.gamma + 1, device=block.limits.device) <= block.limits[:, None]


def is_among(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Which tokens are one of these ids, like `torch.isin`, which sorts: a CUDA graph cannot capture that."""
    return (tokens[..., None] == _ids_tensor(ids, tokens.device)).any(-1)


def _confirmed(aligned: Tensor, window: int) -> Tensor:
    """[B, γ] where the next `window` drafts all match; beyond the block nothing matches."""
    ahead = torch.nn.functional.pad(aligned, (0, window), value=False).unfold(1, window, 1)
    return ahead[:, 1:].all(-1)[:, : aligned.shape[1]]


def gather_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """[..., V], [...] → [...] the values of these tokens."""
    return values.gather(-1, tokens[..., None]).squeeze(-1)


def _entropy(logits: Tensor) -> Tensor:
    """[..., V] → [...] entropy in nats."""
    terms: Tensor = torch.special.entr(logits.float().softmax(-1))
    return terms.sum(-1)


@dataclass(frozen=True, eq=False)
class Exact(AcceptanceRule):
    """d_i = argmax p_i. Lossless at temperature 0."""

    name = "exact"
    summary = "the draft is the target's most likely token; lossless for greedy decoding"
    lossless = True
    reads_logits = False


EXACT = Exact()  # one object for all: rules are compared by identity, and engines find captured graphs by it


@dataclass(frozen=True, eq=False)
class SpeculativeSampling(AcceptanceRule):
    """u < min(1, p_i(d_i)/q_i(d_i)); at a rejection sample from norm(max(0, p_i − q_i)). Lossless in distribution."""

    name = "sampling"
    summary = "accept with probability min(1, p/q), else sample the residual; lossless in distribution"
    lossless = True

    sampling: Sampling = field(default_factory=Sampling)  # type: ignore[misc]

    def aligned(self, block: Block, logits: Tensor, choice: Tensor) -> Tensor:
        assert block.uniforms is not None
        if not block.gamma:
            return block.draft_tokens == choice[:, :0]
        p, q = self.sampling.warp(logits[:, :-1]).softmax(-1), _draft(block.draft_logits)
        p_d, q_d = gather_tokens(p, block.draft_tokens), gather_tokens(q, block.draft_tokens)
        return block.uniforms[:, :-1] * q_d < p_d  # accept if u < p/q

    def following(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, n: Tensor) -> Tensor:
        assert block.uniforms is not None
        rows = torch.arange(len(n), device=n.device)
        p_n = self.sampling.warp(logits[rows, n]).softmax(-1)
        if block.gamma:
            assert block.draft_logits is not None
            at, drafted = n.clamp_max(block.gamma - 1), block.gamma if block.limits is None else block.limits
            # the bonus row has no q; and where alignment accepts but the judge rejects, p itself is the correction
            rejected = (n < drafted) & ~aligned[rows, at]
            q_n = _draft(block.draft_logits[rows, at]) * rejected[:, None]
            residual = (p_n - q_n).clamp_min(0)  # norm(max(0, p − q))
            p_n = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_n)
        return sample(p_n, block.uniforms[:, -1])


def _draft(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return replace_non_finite(logits).softmax(-1)


@dataclass(frozen=True, eq=False)
class TopK(AcceptanceRule):
    """d_i is among the k most likely tokens of p_i."""

    name = "topk"
    summary = "the draft is among the target's k most likely tokens (k=2 in the paper)"

    k: int = setting(2, "Most likely tokens that pass", minimum=1)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        return rank_drafts(logits, block.draft_tokens) < self.k


def rank_drafts(logits: Tensor, drafts: Tensor) -> Tensor:
    """[B, γ] how many tokens are more likely than d_i (0 = the most likely)."""
    return (logits > logits.gather(-1, drafts[..., None])).sum(-1)


@dataclass(frozen=True, eq=False)
class Relaxed(AcceptanceRule):
    """d_i is among the k most likely tokens and p_i(top) − p_i(d_i) ≤ delta (TensorRT-LLM's relaxed acceptance)."""

    name = "relaxed"
    summary = "top-k and a probability gap to the best of at most delta (TensorRT-LLM)"

    k: int = setting(10, "Most likely tokens that pass", minimum=1)
    delta: float = setting(0.6, "Largest gap to the best probability", minimum=0, maximum=1)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        p = logits.float().softmax(-1)
        gap = p.amax(-1) - gather_tokens(p, block.draft_tokens)
        return (rank_drafts(logits, block.draft_tokens) < self.k) & (gap <= self.delta)


@dataclass(frozen=True, eq=False)
class Typical(AcceptanceRule):
    """p_i(d_i) > min(ε, δ·exp(−H(p_i))): Medusa's typical acceptance, at the given softmax temperature."""

    name = "typical"
    summary = "the draft's probability exceeds min(epsilon, delta·exp(−entropy)) (Medusa)"

    epsilon: float = setting(0.09, "Largest threshold ε", above=0, maximum=1)
    delta: float = setting(0.3, "Factor δ of the entropy term", above=0, maximum=1)
    temperature: float = setting(1.0, "Softmax temperature", above=0)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        logits = logits.float() / self.temperature
        threshold = (self.delta * torch.exp(-_entropy(logits))).clamp_max(self.epsilon)
        return aligned | (gather_tokens(logits.log_softmax(-1), block.draft_tokens).exp() > threshold)


def compute_margin(block: Block, logits: Tensor) -> Tensor:
    """[B, γ] log p_i(top) − log p_i(d_i) = Δ logit, in float32."""
    best = logits.amax(-1) if block.argmax is None else gather_tokens(logits, block.argmax[0][:, :-1])
    return best.float() - gather_tokens(logits, block.draft_tokens).float()


@dataclass(frozen=True, eq=False)
class Margin(AcceptanceRule):
    """log p_i(top) − log p_i(d_i) < threshold (MARS, as a log-probability margin).
    With a price π the margin is the harm, in nats, and `worth_taking` replaces the threshold. π = 0 is `exact`. The
    guard is on with a price, as with a judge; without, it is off, as published."""

    name = "margin"
    summary = "the target's margin over the draft, in nats, is below the threshold (MARS), or worth its price"
    defaults: ClassVar[dict[str, object]] = {"threshold": 0.7, "guard": False}

    threshold: float = setting(None, "Margin in nats; `defaults`, none with a price", minimum=0)
    guard: bool = None  # type: ignore[assignment]
    special: tuple[int, ...] = ()
    price: float | None = setting(None, "Price of a token in nats", **PRICE_RANGE)

    def __post_init__(self) -> None:
        super().__post_init__()
        priced = self.price is not None
        _require(not priced or self.threshold is None, "margin: a price replaces the threshold: leave out one of them")
        if self.guard is None:
            object.__setattr__(self, "guard", priced)
        if self.threshold is None and not priced:
            object.__setattr__(self, "threshold", self.defaults["threshold"])

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        return aligned | (compute_margin(block, logits) < self.threshold)

    def harm(self, block: Block, logits: Tensor) -> Tensor:
        return compute_margin(block, logits)


@dataclass(frozen=True, eq=False)
class FLy(AcceptanceRule):
    """A mismatch passes where the target is unsure (H/log V ≥ entropy) and the next `window` drafts all match.
    The whole window must lie inside the block: a mismatch closer to its end is rejected."""

    name = "fly"
    summary = "a mismatch passes when the target is unsure and the next `window` drafts match (FLy)"

    entropy: float = setting(0.3, "Smallest entropy of the target, as a share of log V", minimum=0, maximum=1)
    window: int = setting(6, "Drafts that must match after a mismatch", minimum=1)
    guard: bool = False
    special: tuple[int, ...] = ()

    @property
    def matches_needed(self) -> int:
        return self.window

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        unsure = _entropy(logits) / math.log(logits.shape[-1]) >= self.entropy
        return aligned | (unsure & _confirmed(aligned, self.window))


class Layered(AcceptanceRule):
    """A rule on top of `base`, which is `exact` or `sampling`, and aligns and draws tokens as it does alone."""

    base: AcceptanceRule

    @property
    def sampling(self) -> Sampling | None:  # type: ignore[override]
        return self.base.sampling

    def aligned(self, block: Block, logits: Tensor, choice: Tensor) -> Tensor:
        return self.base.aligned(block, logits, choice)

    def following(self, block: Block, logits: Tensor, choice: Tensor, aligned: Tensor, n: Tensor) -> Tensor:
        return self.base.following(block, logits, choice, aligned, n)


@dataclass(frozen=True, eq=False)
class Judged(Layered):
    """The base rule accepts, OR judge(h at d_i) > θ. With θ = 1 or no score it is the base rule, bit for bit.
    On top of `sampling` this is no longer lossless: the base draws its random numbers all the same, and the residual is
    sampled only where both reject. With `confirm` W, the judge accepts a draft only if the base rule accepts the next W
    drafts of the block: fewer substitutions, each of which wins more tokens.
    With a price π the harm is −log P(acceptable), and `worth_taking` replaces θ; π = 0 is `exact`. A price is for
    greedy decoding: when sampling, later drafts match by chance, which vLLM draws after the rule."""

    name = "judged"
    summary = "exact or sampling accepts, or the judge does: P(acceptable) > θ, or worth its price"
    defaults: ClassVar[dict[str, object]] = {"theta": DEFAULT_THETA}

    judge: Judge  # type: ignore[misc]
    theta: float = None  # type: ignore[assignment, misc]  # the default threshold of the judge; none with a price
    base: AcceptanceRule = EXACT
    confirm: int = setting(0, "Drafts that must match after a judged one", minimum=0)
    guard: bool = True
    special: tuple[int, ...] = ()
    price: float | None = setting(None, "Price of a token in nats", **PRICE_RANGE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.price is None:
            object.__setattr__(self, "theta", self.judge.threshold(self.theta))
            return
        about = f"{self.name}: a price"
        _require(self.theta is None, f"{about} replaces θ: leave out one of `price`, `theta` and `quality`")
        _require(not self.confirm, f"{about} weighs what follows: leave out confirm")
        _require(self.base.sampling is None, f"{about} goes with greedy decoding: leave out `temperature`")

    @property
    def matches_needed(self) -> int:
        return self.confirm

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self.base.reads_logits

    def scores(self, block: Block) -> Tensor:
        """[B, γ] P(acceptable) of each draft."""
        return self.judge.on(block.draft_tokens.device)(block) if block.scores is None else block.scores

    def approves(self, block: Block) -> Tensor:
        """[B, γ] judge(h at d_i) > θ; a NaN score approves nothing."""
        return self.scores(block) > self.theta

    def harm(self, block: Block, logits: Tensor) -> Tensor:
        return -self.scores(block).log()

    def settled(self, block: Block) -> bool:
        drafts = block.draft_tokens
        if drafts.device.type != "cpu" or block.argmax is None or not isinstance(self.base, Exact):
            return False
        choice, inside = block.argmax[0][:, :-1], list_existing(block)
        return torch.equal(drafts, choice) if inside is None else not ((drafts != choice) & inside[:, 1:]).any()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        approved = self.approves(block)
        return aligned | (approved & _confirmed(aligned, self.confirm) if self.confirm else approved)


@dataclass(frozen=True, eq=False)
class JudgeOnly(Judged):
    """judge(h at d_i) > θ alone; guarded tokens are still decided by alignment."""

    name = "judge_only"
    summary = "the judge alone decides: P(acceptable) > θ"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.confirm == 0, "judge_only has no alignment to confirm with: leave confirm out")
        _require(self.price is None, "judge_only has no alignment that costs nothing: a price goes with rule judged")

    def settled(self, block: Block) -> bool:
        return False

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        return self.approves(block)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SelfJudgeError(message)
