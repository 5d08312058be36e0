"""selfjudge: speculative decoding in which a tiny learned judge accepts draft tokens that keep the target's meaning.

>>> from selfjudge import Pair, generate
>>> pair = Pair.load("smollm2-135m")
>>> print(generate(pair, ["Why is the sky blue?"])[0].text)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfjudge.decoding.rules import Sampling, parse_rule
    from selfjudge.decoding.text import generate, stream
    from selfjudge.errors import SelfJudgeError
    from selfjudge.judge.config import JudgeConfig
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair
    from selfjudge.types import Block, Generation, Step, Verdict

_WHERE = {
    "Block": "types", "Generation": "types", "Judge": "judge.model", "JudgeConfig": "judge.model", "Pair": "models.pair",
    "Sampling": "decoding.rules", "SelfJudgeError": "errors", "Step": "types", "Verdict": "types",
    "generate": "decoding.text", "parse_rule": "decoding.rules", "stream": "decoding.text",
}  # fmt: skip

__all__ = [
    "Block",
    "Generation",
    "Judge",
    "JudgeConfig",
    "Pair",
    "Sampling",
    "SelfJudgeError",
    "Step",
    "Verdict",
    "generate",
    "parse_rule",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `selfjudge --help` needs no torch."""
    if name == "__version__":
        return metadata.version("selfjudge")
    if name in _WHERE:
        return getattr(import_module(f"selfjudge.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'selfjudge' has no attribute {name!r}")
