"""The prompts of several sources for one pair: loaded or self-written, encoded, without long and repeated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import write_prompts
from selfjudge.prompts.sources import SELF, PromptRecord, Source, load_prompts
from selfjudge.store import Journal
from selfjudge.types import Notify


@dataclass(frozen=True)
class Collector:
    """Collects prompts; see the module."""

    pair: Pair
    longest: int
    """Maximum tokens of a prompt."""
    seed: int
    batch: int
    data: Path | None
    notify: Notify
    journal: Journal | None = None
    """Keeps the prompts that the target writes, so that after a kill they are not written again."""

    def __call__(self, sources: Sequence[Source]) -> tuple[list[tuple[PromptRecord, list[int]]], dict[str, Any]]:
        """Prompts with their token ids, and what became of each source's prompts.

        A prompt that is repeated counts once: twins would end up on both sides of a split by prompt.
        """
        kept: dict[tuple[int, ...], tuple[PromptRecord, list[int]]] = {}
        report: dict[str, Any] = {}
        for source in sources:
            records, report[source.name] = self._load(source)
            encoded = self.pair.encode_many([record.prompt for record in records])
            fitting = [(record, ids) for record, ids in zip(records, encoded, strict=True) if len(ids) <= self.longest]
            before = len(kept)
            for record, ids in fitting:
                kept.setdefault(tuple(ids), (record, ids))
            new = len(kept) - before
            too_long = len(records) - len(fitting)
            report[source.name] |= {"too long": too_long, "repeated": len(fitting) - new, "prompts": new}
        return list(kept.values()), report

    def _load(self, source: Source) -> tuple[list[PromptRecord], dict[str, Any]]:
        if source.name not in SELF:
            records = load_prompts(source, self.data)
            return records, {"given": len(records)}
        prompts, report = write_prompts(self.pair, source, self.seed, self.batch, self.notify, self.journal)
        return [PromptRecord(f"{source.name}-{self.seed}-{i}", source.name, p) for i, p in enumerate(prompts)], report
