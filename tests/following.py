"""Follow a plan of extensions, rewinds and changes of rows with an engine, and compare with fresh forward passes."""

from __future__ import annotations

import torch
import transformers as hf

from conftest import VOCAB
from selfjudge.engine.base import Engine


def follow(engine: Engine, model: hf.PreTrainedModel, batch: int, plan: list[tuple[str, int, int]], seed: int) -> None:
    """Do what the plan says, and compare every logit and state with those of a fresh forward."""
    random = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = [[] for _ in range(batch)]

    def extend(width: int, generator: torch.Generator, new: int = 0) -> None:
        """Append to all rows, or to as many new ones."""
        if new:
            rows.extend([] for _ in range(new))
        chosen = rows[-new:]
        tokens = torch.randint(0, VOCAB, (len(chosen), width), generator=generator)
        counts = torch.randint(1, width + 1, (len(chosen),), generator=generator)
        keep = 1 if new else int(counts.min())
        if new:
            other = engine.aside()
            other.reserve(new, 100)
            if counts.min() > 2:  # in two chunks
                other.prefill(tokens[:, : width - 2], counts - 2)
                output = other.prefill(tokens[:, width - 2 :], torch.full_like(counts, 2))
            else:
                output = other.prefill(tokens, counts)
            engine.join(other)
        else:
            output = engine.extend(tokens, counts, keep=keep)
        for b, row in enumerate(chosen):
            row += tokens[b, width - int(counts[b]) :].tolist()
            with torch.inference_mode():
                fresh = model(torch.tensor([row]), use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(output.logits[b], fresh.logits[0, -keep:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(output.hidden[b], fresh.hidden_states[-1][0, -keep:], atol=1e-4, rtol=1e-4)

    engine.reserve(10, 100)
    engine.reserve(batch, 100)
    extend(6, random)
    for name, size, salt in plan:
        generator = torch.Generator().manual_seed(salt)
        if name == "extend" and max(map(len, rows)) + size < 90:
            extend(size, generator)
        elif name == "rewind":
            most = min(size, *(len(row) - 1 for row in rows))
            refused = torch.randint(0, most + 1, (len(rows),), generator=generator)
            engine.rewind(refused)
            rows = [row[: len(row) - int(n)] for row, n in zip(rows, refused, strict=True)]
        elif name == "select":
            chosen = torch.randperm(len(rows), generator=generator)[:size].tolist()
            engine.select(chosen)
            rows = [rows[i] for i in chosen]
        elif name == "enter" and len(rows) + size <= 10:
            extend(5 + salt % 40, generator, new=size)
    extend(3, random)
