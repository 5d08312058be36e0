"""Evaluate acceptance rules on tasks: what they gain in speed, and what they cost in answers."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from selfjudge.evaluate.config import EvalConfig as EvalConfig, ReproduceConfig as ReproduceConfig
    from selfjudge.evaluate.pipeline import evaluate_rules as evaluate_rules, reproduce_paper as reproduce_paper

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
