"""Models: the pair (target, draft, tokenizer), and the embedded models that are fetched from the package index."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .catalogue import EMBEDDED as EMBEDDED, Embedded as Embedded
    from .pair import Pair as Pair, Prompt as Prompt

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"catalogue": ["EMBEDDED", "Embedded"], "pair": ["Pair", "Prompt"]}
)
