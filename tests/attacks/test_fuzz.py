"""Mutants of models, judges and recipes: each is refused in one line or accepted, and none ends its process."""

from __future__ import annotations

from collections import Counter

import pytest

from fuzzing import Worker

COUNTS = {"gguf": 450, "safetensors": 150, "judge": 250, "recipe": 150}


def count(kind: str, seeds: range) -> Counter[str]:
    worker = Worker()
    counts: Counter[str] = Counter()
    strange = []
    for seed in seeds:
        said = worker(kind, seed)
        counts[said.partition(" ")[0]] += 1
        if said not in ("refused", "accepted"):
            strange.append(f"{kind} {seed}: {said}")
    worker.close()
    print(f"{kind}: {dict(counts)}")
    assert strange == []
    assert counts["refused"] > len(seeds) // 10
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_1000_mutants(kind: str) -> None:
    assert count(kind, range(COUNTS[kind])).total() == COUNTS[kind]
