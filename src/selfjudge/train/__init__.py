"""`selfjudge train`: labels become a judge."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"config": ["StudyConfig", "TrainConfig"], "pipeline": ["train_judge"], "study": ["run_study"]}
)

if TYPE_CHECKING:
    from .config import StudyConfig as StudyConfig, TrainConfig as TrainConfig
    from .pipeline import train_judge as train_judge
    from .study import run_study as run_study
