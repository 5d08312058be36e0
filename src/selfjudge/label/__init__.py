"""`selfjudge label`: which draft tokens are acceptable, without annotation."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .config import LabelConfig as LabelConfig
    from .pipeline import label_pair as label_pair

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
