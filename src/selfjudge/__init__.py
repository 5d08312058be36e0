"""selfjudge: speculative decoding in which a tiny learned judge accepts draft tokens that keep the target's meaning.

>>> from selfjudge import Pair, generate
>>> pair = Pair.load("smollm2-135m")
>>> answer = generate(pair, "Why is the sky blue?", rule="judged", quality=0.9)
>>> print(answer.text, answer.judged_tokens)  # doctest: +SKIP
"""

from importlib import metadata as _metadata
from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from selfjudge.decoding.admission import AdmissionQueue as AdmissionQueue
    from selfjudge.decoding.admission import Request as Request
    from selfjudge.decoding.loop import decode as decode
    from selfjudge.decoding.rule_parser import parse_rule as parse_rule
    from selfjudge.decoding.rule_parser import resolve_rule as resolve_rule
    from selfjudge.decoding.rules import AcceptanceRule as AcceptanceRule
    from selfjudge.decoding.rules import Exact as Exact
    from selfjudge.decoding.rules import FLy as FLy
    from selfjudge.decoding.rules import Judged as Judged
    from selfjudge.decoding.rules import JudgeOnly as JudgeOnly
    from selfjudge.decoding.rules import Margin as Margin
    from selfjudge.decoding.rules import Relaxed as Relaxed
    from selfjudge.decoding.rules import SpeculativeSampling as SpeculativeSampling
    from selfjudge.decoding.rules import TopK as TopK
    from selfjudge.decoding.rules import Typical as Typical
    from selfjudge.decoding.sampling import Sampling as Sampling
    from selfjudge.decoding.text import Batch as Batch
    from selfjudge.decoding.text import generate as generate
    from selfjudge.decoding.text import stream as stream
    from selfjudge.engine.select import make_engine as make_engine
    from selfjudge.errors import SelfJudgeError as SelfJudgeError
    from selfjudge.judge.config import JudgeConfig as JudgeConfig
    from selfjudge.judge.model import Judge as Judge
    from selfjudge.models.pair import Pair as Pair
    from selfjudge.types import Block as Block
    from selfjudge.types import Generation as Generation
    from selfjudge.types import JudgedToken as JudgedToken
    from selfjudge.types import Piece as Piece
    from selfjudge.types import Step as Step
    from selfjudge.types import Verdict as Verdict

__version__ = _metadata.version("selfjudge")
__getattr__, __dir__, __all__ = _lazy_exports(
    __name__,
    {
        "decoding.admission": ["AdmissionQueue", "Request"],
        "decoding.loop": ["decode"],
        "decoding.rule_parser": ["parse_rule", "resolve_rule"],
        "decoding.rules": [
            "AcceptanceRule", "Exact", "FLy", "Judged", "JudgeOnly", "Margin", "Relaxed", "SpeculativeSampling", "TopK",
            "Typical",
        ],
        "decoding.sampling": ["Sampling"],
        "decoding.text": ["Batch", "generate", "stream"],
        "engine.select": ["make_engine"],
        "errors": ["SelfJudgeError"],
        "judge.config": ["JudgeConfig"],
        "judge.model": ["Judge"],
        "models.pair": ["Pair"],
        "types": ["Block", "Generation", "JudgedToken", "Piece", "Step", "Verdict"],
    },
)  # fmt: skip
