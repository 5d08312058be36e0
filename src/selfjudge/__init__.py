"""Speculative decoding for language models: lossless by default, and relaxed where the loss is certified on your own
prompts.

>>> from selfjudge import Pair, generate
>>> pair = Pair.load("smollm2-135m")
>>> answer = generate(pair, "Why does bread rise?", rule="judged", quality=0.9)
>>> print(answer.text, answer.judged_tokens)  # doctest: +SKIP"""

import os as _os
import platform as _platform
from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports as _lazy_exports

# By default waiting OpenMP threads spin: ten times slower beside a busy program. Set before torch is loaded.
if "OMP_WAIT_POLICY" not in _os.environ:
    _os.environ.setdefault("GOMP_SPINCOUNT", "4000" if _platform.machine() in ("x86_64", "AMD64") else "100000")

if TYPE_CHECKING:
    from selfjudge.decoding.admission import AdmissionQueue as AdmissionQueue, Request as Request
    from selfjudge.decoding.asynchronous import AsyncBatch as AsyncBatch, AsyncStream as AsyncStream
    from selfjudge.decoding.loop import decode as decode
    from selfjudge.decoding.rule_parser import RuleRequest as RuleRequest, resolve_rule as resolve_rule
    from selfjudge.decoding.rules import (
        AcceptanceRule as AcceptanceRule,
        Exact as Exact,
        FLy as FLy,
        Judged as Judged,
        JudgeOnly as JudgeOnly,
        Margin as Margin,
        Relaxed as Relaxed,
        SpeculativeSampling as SpeculativeSampling,
        TopK as TopK,
        Typical as Typical,
    )
    from selfjudge.decoding.rules_baselines import (
        Divergence as Divergence,
        LogitRatio as LogitRatio,
        RegretBudget as RegretBudget,
        TwoThresholds as TwoThresholds,
    )
    from selfjudge.decoding.sampling import Sampling as Sampling
    from selfjudge.decoding.text import Batch as Batch, generate as generate, stream as stream
    from selfjudge.engine.select import PairEngines as PairEngines
    from selfjudge.errors import SelfJudgeError as SelfJudgeError
    from selfjudge.judge.config import JudgeConfig as JudgeConfig
    from selfjudge.judge.model import Judge as Judge
    from selfjudge.models.pair import Pair as Pair
    from selfjudge.types import (
        Block as Block,
        Generation as Generation,
        JudgedToken as JudgedToken,
        Piece as Piece,
        Step as Step,
        Verdict as Verdict,
    )

__getattr__, __dir__, __all__ = _lazy_exports(__name__, __file__)
