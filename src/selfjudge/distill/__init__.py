"""`selfjudge distill`: a draft for a target that has none."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .config import DistillConfig as DistillConfig
    from .pipeline import distill_draft as distill_draft

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
