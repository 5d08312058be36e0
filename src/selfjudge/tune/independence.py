"""Which prompts count as one observation, in which order, and which were tested before. Loads no torch. A bet is valid
for independent observations. Paraphrases of a prompt are won or lost together: ten counted one by one would certify a
rule ten times as easily. So a group is one observation. Nobody chooses the order: whoever may try several can wait for
a lucky one. The ledger, HOME/attempts.jsonl or the file that SELFJUDGE_LEDGER names, has a row for every run of `tune`.
An attempt with prompts of an earlier one of the same target spends a share of δ of its own (`certify.share_delta`); a
resumed run is the same attempt. Attempts are hidden by removing the file or tuning on another machine."""

import hashlib
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import home, locked, read_rows, write_rows
from selfjudge.store.schema import LedgerRow

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
        """Join prompts, by index, whose sets of shingles have a Jaccard index of at least `similar`, and all that such
        pairs connect. What all texts begin or end with is not compared. Every such pair is found: its sets share one of
        their rarest shingles, of which `similar` tells how many must be looked at."""
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
        """Groups, and prompts in each, by hashes of their texts and `salt`: one prompt more or less moves no other."""

        def rank(*members: str) -> bytes:
            return hashlib.sha256("\0".join([salt, *members]).encode("utf-8", "replace")).digest()

        members: dict[int, list[int]] = defaultdict(list)
        for index in range(len(texts)):
            members[self.find(index)].append(index)
        groups = sorted(members.values(), key=lambda group: rank(*sorted(texts[i] for i in group)))
        return [sorted(group, key=lambda i: rank(texts[i])) for group in groups]


def ledger_file() -> Path:
    return Path(os.environ.get("SELFJUDGE_LEDGER") or home() / "attempts.jsonl").expanduser()


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return list(read_rows(file, LedgerRow)) if file.is_file() else []
    except OSError as error:
        raise SelfJudgeError(f"cannot read {file}: {error.strerror}; let SELFJUDGE_LEDGER name another file") from None


def find_earlier(attempt: str | None, target: str, keys: Collection[str]) -> list[str]:
    """Dates of the attempts on some of these prompts, by `keys`, with this target, before `attempt`; None: all."""
    own, dates = frozenset(keys), []
    for row in _read(ledger_file()):
        if row["id"] == attempt:
            break
        if row["target"] == target and not own.isdisjoint(row["prompts"]):
            dates.append(row["date"])
    return dates


def note_attempt(attempt: str, target: str, keys: Collection[str]) -> list[str]:
    """Add an attempt to the ledger unless it is there; the dates of the earlier ones."""
    file = ledger_file()
    try:
        with locked(file.with_name(f".{file.name}.lock")):
            rows = _read(file)
            if all(row["id"] != attempt for row in rows):
                date = time.strftime("%Y-%m-%d", time.gmtime())
                write_rows(file, [*rows, {"id": attempt, "date": date, "target": target, "prompts": sorted(keys)}])
    except OSError as error:
        raise SelfJudgeError(
            f"cannot note this attempt in {file}: {error.strerror}; let SELFJUDGE_LEDGER name another file"
        ) from None
    return find_earlier(attempt, target, keys)
