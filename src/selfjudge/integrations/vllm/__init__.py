"""Our rules inside vLLM (docs/vllm.md). Importing this package does not import vLLM; `JudgeWorker` does.
--worker-cls selfjudge.integrations.vllm.JudgeWorker --additional-config '{"selfjudge": {"judge": FOLDER}}'"""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .worker import JudgeWorker as JudgeWorker

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
