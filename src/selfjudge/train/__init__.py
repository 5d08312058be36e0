"""`selfjudge train`: labels become a judge."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .config import TrainConfig as TrainConfig
    from .pipeline import train_judge as train_judge

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
