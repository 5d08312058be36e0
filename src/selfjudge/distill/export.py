"""What a finished student is written as: compact form, checkpoint, model card and, last, `run.json`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Any

from selfjudge.distill.config import DistillConfig
from selfjudge.distill.data import Data
from selfjudge.distill.student import Student
from selfjudge.distill.train import State, top1
from selfjudge.models.convert import materialise, quiet, read_compact, write_compact
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder, write_text

INT8_LOSS = 0.002  # of top-1 agreement: what int8 rows may cost before float16 is kept


def export(
    run: RunFolder, pair: Pair, student: Student, data: Data, config: DistillConfig, state: State
) -> dict[str, Any]:
    """Write everything, `run.json` last; what it says. The student keeps the weights that ship."""
    out, compact = run.path, run.path / "compact"
    trained = top1(student, data.held_out)
    tensors = {name: tensor.clone() for name, tensor in student.tensors().items()}
    size = write_compact(tensors, student.raw, compact)
    student.load(read_compact(compact))
    rounded = top1(student, data.held_out)
    int8 = trained["all"] - rounded["all"] <= INT8_LOSS
    if not int8:
        size = write_compact(tensors, student.raw, compact, int8=False)
        student.load(read_compact(compact))
    materialise(compact, pair.target, out)
    with quiet():
        pair.tokenizer.save_pretrained(out)
    result: dict[str, Any] = {
        "target": pair.target_id,
        "settings": asdict(config),
        "sources": [
            {"name": s.name, "licence": s.licence, "answers_per_prompt": s.answers, **data.report[s.name]}
            for s in config.sources
        ],
        "training": {
            "answers": len(data.training.lengths),
            "answer_tokens": len(data.training.index),
            "steps": state.step,
            "tokens_seen": state.tokens,
            "seconds": round(state.seconds, 1),
            "history": state.history,
        },
        "parameters": sum(tensor.numel() for tensor in student.tensors().values()),
        "top1_held_out": {"as_trained": trained, "int8": rounded},
        "compact": {"format": "int8 rows" if int8 else "float16", "bytes": size},
    }
    write_text(out / "README.md", _card(result))
    shutil.copy(out / "README.md", compact / "README.md")
    run.finish(**result)
    return result


def _card(result: dict[str, Any]) -> str:
    s, t = result["settings"], result["training"]
    rows = "\n".join(
        f"| {source['name']} | {source['prompts']} | {source['answers_per_prompt']} | {source['licence']} |"
        for source in result["sources"]
    )
    shipped = "int8" if result["compact"]["format"].startswith("int8") else "as_trained"
    by_source = ", ".join(f"{k} {v:.1%}" for k, v in sorted(result["top1_held_out"][shipped].items()))
    return f"""# A draft for {result["target"]}

{s["layers"]} layers of width {s["width"]}, {result["parameters"] / 1e6:.1f} M trained parameters,
distilled by `selfjudge distill` from the target's own answers. `compact/` holds layers and projections
({result["compact"]["format"]}, {result["compact"]["bytes"] / 1e6:.1f} MB).
The checkpoint beside this file is an ordinary transformers model with the target's tokenizer.

## Training

{t["answers"]:,} answers, {t["answer_tokens"]:,} tokens in all: one greedy per prompt, the others sampled at
temperatures 0.7 and 1.0. Loss: cross-entropy against the target's {s["top_k"]} most likely tokens.
{t["steps"]:,} steps, {t["tokens_seen"]:,} tokens, {t["seconds"]:.0f} s.

| prompts | used | answers each | licence of the prompts |
| --- | ---: | ---: | --- |
{rows}

Held-out prompts of the same mix, top-1 agreement with the target: {by_source}.

The licence of the target applies to this draft, since it was made from the target's weights and answers.
"""
