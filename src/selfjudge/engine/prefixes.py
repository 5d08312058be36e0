"""Prefixes of earlier prompts and answers: keys and values of blocks of tokens, found again by all tokens up to them.
A block's key is the hash of its tokens and of the key before it; before the first stand the cache and the salt. Block i
holds the positions up to the last of its tokens, without this one: a prompt's last token is always read, for its
logits, and the newest entry of a head is made of the token after it."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise, takewhile
from threading import Lock

import torch
from torch import Tensor

from selfjudge.models.device import free_memory, parse_memory
from selfjudge.models.load import LoadedModel

BLOCK = 32  # tokens
RUN = 64  # blocks that are copied together, at most
SHARE = "0.1"  # of the memory that is available when a model's first `Batch` is made


def count_positions(blocks: int) -> int:
    """Positions that so many first blocks hold."""
    return max(0, blocks * BLOCK - 1)


class PrefixStore:
    """Blocks of any number of caches, at most `limit` bytes of them; those used longest ago go first."""

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.used, self._lock = limit, 0, Lock()
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()  # the latest use last

    def resize(self, limit: int) -> None:
        with self._lock:
            self.limit = limit
            self._make_room(0, ())

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._make_room(self.limit, ())

    def find(self, space: Hashable, tokens: Sequence[int]) -> list[Tensor]:
        """The blocks [2, layers, heads, n, width] of the longest known prefix; the last token is never part of it.
        `space` names the cache, and who may find what was stored for it."""
        with self._lock:
            found = list(takewhile(self._blocks.__contains__, _keys(space, tokens)))
            self._touch(found)
            return [self._blocks[key] for key in found]

    def put(self, space: Hashable, tokens: Sequence[int], view: Callable[[int, int], Tensor]) -> None:
        """Store copies of the blocks of these tokens that are not known; `view` gives the positions from … to."""
        with self._lock:
            keys = dict.fromkeys(_keys(space, tokens))
            self._touch(list(keys))
            known = sum(key in self._blocks for key in keys)  # the first ones: later ones go before them
            for key, block in zip(list(keys)[known:], _copy_runs(known, len(keys), view), strict=True):
                if not self._make_room(block.nbytes, keys):
                    break
                self._blocks[key] = block
                self.used += block.nbytes
            self._touch(list(keys))

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of blocks; the first of them are the last to go, since the others cannot be found without them."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def _make_room(self, needed: int, kept: Collection[bytes]) -> bool:
        """Remove the oldest blocks, but none of `kept`, until so many bytes more are allowed; whether they are."""
        while self.used + needed > self.limit:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in kept:
                return False
            self.used -= self._blocks.pop(oldest).nbytes
        return True


def open_store(model: LoadedModel, limit: str | None) -> PrefixStore | None:
    """The store that is kept for a target, of a size or a share of the available memory; None where it is `0`."""
    store = model.keep("prefixes", PrefixStore)
    size = 0.0 if limit == "0" else parse_memory(SHARE if limit is None else limit, "prefix_cache")
    if size <= 1:
        size *= (free_memory(model.device) or 8e9) + store.used  # a guess where the system does not say
    if limit is not None or not store.limit:
        store.resize(int(size))
    return store if store.limit else None


def _copy_runs(first: int, stop: int, view: Callable[[int, int], Tensor]) -> Iterator[Tensor]:
    """The blocks from `first` to `stop`, each with memory of its own. One call copies many: each call gives the
    interpreter away, and beside a busy server it takes longer to come back than a copy takes."""
    for start in range(first, stop, RUN):
        bounds = [count_positions(i) for i in range(start, min(start + RUN, stop) + 1)]
        sizes = [end - begin for begin, end in pairwise(bounds)]
        run = view(bounds[0], bounds[-1])
        yield from torch.split_with_sizes_copy(run, sizes, 3)  # type: ignore[misc, func-returns-value]


def _keys(space: Hashable, tokens: Sequence[int]) -> Iterator[bytes]:
    """The key of every full block of these tokens."""
    key = repr(space).encode()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        part = array("q", tokens[start : start + BLOCK]).tobytes()
        key = blake2b(part, digest_size=16, key=blake2b(key, digest_size=16).digest()).digest()
        yield key
