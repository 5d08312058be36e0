"""Which prompts count as one observation, and in which order: repeated ones, near-duplicates, groups that a file names.

A bet is valid for independent observations. Ten paraphrases of a prompt are won or lost together: counted as ten they
would certify a rule ten times as easily. So a group is one observation. Nobody chooses the order, for whoever may try
several orders can wait for a lucky one. Imports nothing but the standard library."""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, takewhile

SHINGLE = 3  # words in a row that are compared; a character beyond a to z and digits is a word of its own
SIMILAR = 0.7  # prompts are near-duplicates if they share at least so much of their shingles (Jaccard)
KEY_DIGITS = 16  # digits of a prompt's key in the ledger
_EXCLAIMED = re.compile(r"(?<=[^\W\d_]{2})!+(?=[\s?.'\"]|$)")  # marks after a word, not n! nor !=
_WORD = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def normalise(text: str) -> str:
    """A prompt without case, blanks and marks that end or part sentences; 4 − 2 is not 4 + 2, and 5! is not 5."""
    return " ".join(re.findall(r"\w+|[^\w\s.,;:?'\"]", _EXCLAIMED.sub("", text.casefold())))


def key_prompt(text: str) -> str:
    """The name of a normalised prompt in the ledger."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:KEY_DIGITS]


class Groups:
    """Indices of prompts, joined until all that depend on one another are in one group."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, index: int) -> int:
        """The index that stands for the group of this one."""
        while self._above[index] != index:
            self._above[index] = index = self._above[self._above[index]]
        return index

    def join(self, one: int, other: int) -> None:
        self._above[self.find(one)] = self.find(other)

    def join_named(self, names: Iterable[tuple[int, Hashable | None]]) -> None:
        """Join the prompts, given by index, of one name; a prompt may have several. None is no name."""
        first: dict[Hashable, int] = {}
        for index, name in names:
            if name is not None:
                self.join(index, first.setdefault(name, index))

    def join_similar(self, texts: Mapping[int, str], similar: float) -> None:
        """Join prompts, given by index, whose sets of shingles have a Jaccard index of at least `similar`.

        What is similar to one of a group belongs to it. What all texts begin or end with is not compared. Every pair
        above the threshold is found: two such sets share one of their rarest shingles, of which `similar` tells how
        many must be looked at."""
        words = [_WORD.findall(text) for text in texts.values()]
        for _ in range(2):  # what they begin with, then from the other end
            ends = zip(min(words, default=[]), max(words, default=[]), strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
            words = [each[common:][::-1] for each in words]
        sets = {
            index: {hash(tuple(each[i : i + SHINGLE])) for i in range(max(1, len(each) - SHINGLE + 1))}
            for index, each in zip(texts, words, strict=True)
        }
        count = Counter(chain.from_iterable(sets.values()))
        seen: dict[int, list[int]] = defaultdict(list)
        for index, own in sets.items():
            rare = sorted(own, key=lambda shingle: (count[shingle], shingle))
            rare = rare[: len(own) - math.ceil(similar * len(own)) + 1]
            for other in {other for shingle in rare for other in seen[shingle]}:
                if self.find(other) != self.find(index):
                    shared = len(own & sets[other])
                    if shared >= similar * (len(own) + len(sets[other]) - shared):
                        self.join(index, other)
            for shingle in rare:
                seen[shingle].append(index)

    def __len__(self) -> int:
        return sum(self.find(index) == index for index in range(len(self._above)))

    def order(self, texts: Sequence[str], salt: str) -> list[list[int]]:
        """The groups, and the prompts of each, in the order of hashes of their texts and of `salt`.

        A prompt that is added or left out moves no other."""

        def rank(*members: str) -> bytes:
            return hashlib.sha256("\0".join([salt, *members]).encode("utf-8", "replace")).digest()

        members: dict[int, list[int]] = defaultdict(list)
        for index in range(len(texts)):
            members[self.find(index)].append(index)
        groups = sorted(members.values(), key=lambda group: rank(*sorted(texts[i] for i in group)))
        return [sorted(group, key=lambda i: rank(texts[i])) for group in groups]
