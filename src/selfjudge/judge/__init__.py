"""The judge: a tiny classifier over what the verification pass computed anyway."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from selfjudge.judge.config import JudgeConfig as JudgeConfig
    from selfjudge.judge.hub import find_judge as find_judge
    from selfjudge.judge.model import Judge as Judge

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"config": ["JudgeConfig"], "hub": ["find_judge"], "model": ["Judge"]}
)
