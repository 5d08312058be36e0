"""The fastest rule whose loss is certified on one's own prompts."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from selfjudge.tune.config import TuneConfig as TuneConfig
    from selfjudge.tune.pipeline import tune_pair as tune_pair
    from selfjudge.tune.recipe import Recipe as Recipe

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
