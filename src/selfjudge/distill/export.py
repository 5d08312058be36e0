"""Writing a finished draft: compact form and checkpoint, or head; model card and, last, `run.json`."""

from __future__ import annotations

import shutil
from typing import Any

import torch

from selfjudge.distill.data import DataMaker, Dataset
from selfjudge.distill.eagle import HeadLearner, Sizes
from selfjudge.distill.student import Student
from selfjudge.distill.train import TrainingState, top1
from selfjudge.models.convert import materialise, quiet, read_compact, write_compact
from selfjudge.models.eagle import EagleConfig
from selfjudge.models.pull import served_reference
from selfjudge.models.speculators import load_head, write_speculators
from selfjudge.store import markdown_table, write_text

INT8_LOSS = 0.002  # top-1 agreement that int8 rows may cost before float16 is kept


def export_student(maker: DataMaker, student: Student, data: Dataset, state: TrainingState) -> dict[str, Any]:
    """Write the compact form, the checkpoint and the card, `run.json` last; what it says.

    The student keeps the weights that ship.
    """
    pair, out, compact = maker.pair, maker.run.path, maker.run.path / "compact"
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
    result = {
        **_describe(maker, data, state),
        "parameters": sum(tensor.numel() for tensor in student.tensors().values()),
        "top1_held_out": {"as_trained": trained, "int8": rounded},
        "compact": {"format": "int8 rows" if int8 else "float16", "bytes": size},
    }
    write_text(out / "README.md", _student_card(result))
    shutil.copy(out / "README.md", compact / "README.md")
    maker.run.finish(**result)
    return result


def export_head(maker: DataMaker, learner: HeadLearner, data: Dataset, state: TrainingState) -> dict[str, Any]:
    """Write the head, its form for vLLM and its card, `run.json` last; what it says."""
    pair, run, unroll = maker.pair, maker.run, maker.config.unroll
    names = {"target": pair.target_id, "sha256": pair.target_sha256}
    trained = learner.measure()
    learner.save(run.path, trained.figures, **names)
    finished = load_head(run.path, pair.target, pair.target_sha256, pair.target_id)
    sizes = Sizes(torch.ones_like(learner.sizes.features), learner.sizes.states)
    rounded = HeadLearner(pair.target, finished, sizes, data.training, data.held_out, unroll).measure()
    size = learner.save(run.path, rounded.figures, **names)
    if len(set(finished.config.aux_layers)) == 3:
        folder, verifier = run.path / "speculators", served_reference(pair.target_id)
        write_speculators(finished, pair.target, folder, steps=unroll, verifier=verifier)
    counts = data.held_out.counts(finished.config.vocab_size)
    result = {
        "kind": maker.config.kind,
        **_describe(maker, data, state),
        "parameters": sum(p.numel() for p in finished.parameters()),
        "held_out": {"as_trained": trained.figures, "int8": rounded.figures},
        "draft_vocabulary": {
            "tokens": finished.config.draft_vocab_size,
            "share_of_held_out_answers": round(float(counts[finished.draft_ids].sum() / counts.sum()), 5),
        },
        "compact": {"format": "int8 groups", "bytes": size},
    }
    write_text(run.path / "README.md", _head_card(result, finished.config))
    run.finish(**result)
    return result


def _describe(maker: DataMaker, data: Dataset, state: TrainingState) -> dict[str, Any]:
    """The target, settings, sources and training of a draft, for `run.json`."""
    return {
        "target": maker.pair.target_id,
        "settings": maker.config.as_settings(),
        "sources": [
            {"name": s.name, "licence": s.licence, "answers_per_prompt": s.answers, **data.report[s.name]}
            for s in maker.config.sources
        ],
        "training": {
            "answers": len(data.training.lengths),
            "answer_tokens": data.training.answer_tokens,
            "steps": state.step,
            "tokens_seen": state.tokens,
            "seconds": round(state.seconds, 1),
            "history": state.history,
        },
    }


def _head_card(result: dict[str, Any], shape: EagleConfig) -> str:
    s, m = result["settings"], result["held_out"]["int8"]["m"]
    low, middle, high = shape.aux_layers
    figures = markdown_table(["prompts", "m"], ([name, f"{value:.2f}"] for name, value in sorted(m.items())))
    return f"""# An EAGLE-3 head for {result["target"]}

One layer that reads what enters layers {low}, {middle} and {high} of the target:
{result["parameters"] / 1e6:.1f} M trained parameters, {result["compact"]["bytes"] / 1e6:.1f} MB in int8,
made by `selfjudge distill --kind eagle3` from the target's own answers.
Its embedding and its output matrix are the target's. It proposes {shape.draft_vocab_size:,} tokens,
{result["draft_vocabulary"]["share_of_held_out_answers"]:.2%} of those in held-out answers.

## Training

{_training_words(result["training"])}
Loss: cross-entropy against the target's distribution over these tokens, unrolled over {s["unroll"]} steps.

{_source_table(result["sources"])}

Held-out prompts of the same sources, tokens per target pass at γ = {s["unroll"]}, greedy and exact:

{figures}

The licence of the target applies to this head, since it was made from the target's weights and answers.
"""


def _training_words(t: dict[str, Any]) -> str:
    return f"""{t["answers"]:,} answers, {t["answer_tokens"]:,} tokens in all: one greedy per prompt, the others
sampled at temperatures 0.7 and 1.0. {t["steps"]:,} steps, {t["tokens_seen"]:,} tokens, {t["seconds"]:.0f} s."""


def _source_table(sources: list[dict[str, Any]]) -> str:
    rows = ([s["name"], s["prompts"], s["answers_per_prompt"], s["licence"]] for s in sources)
    return markdown_table(["prompts", "used", "answers each", "licence of the prompts"], rows, "lrrl")


def _student_card(result: dict[str, Any]) -> str:
    s = result["settings"]
    shipped = "int8" if result["compact"]["format"].startswith("int8") else "as_trained"
    by_source = ", ".join(f"{k} {v:.1%}" for k, v in sorted(result["top1_held_out"][shipped].items()))
    return f"""# A draft for {result["target"]}

{s["layers"]} layers of width {s["width"]}, {result["parameters"] / 1e6:.1f} M trained parameters,
distilled by `selfjudge distill` from the target's own answers. `compact/` holds layers and projections
({result["compact"]["format"]}, {result["compact"]["bytes"] / 1e6:.1f} MB).
The checkpoint beside this file is an ordinary transformers model with the target's tokenizer.

## Training

{_training_words(result["training"])}
Loss: cross-entropy against the target's {s["top_k"]} most likely tokens.

{_source_table(result["sources"])}

Held-out prompts of the same mix, top-1 agreement with the target: {by_source}.

The licence of the target applies to this draft, since it was made from the target's weights and answers.
"""
