"""A draft for a target that has none: prompts → answers with top-k → student → checkpoint and compact form.

OUT/
    settings.json             what the run was begun with
    work/prompts.safetensors  answers-*.safetensors  train.safetensors     (may be deleted when all is done)
    compact/                  layers and projections, int8 rows: what travels
    config.json  model.safetensors  tokenizer …                            an ordinary transformers checkpoint
    README.md                 model card
    run.json                  written last: its existence means done
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from selfjudge.distill.data import Corpus, make_answers, make_prompts
from selfjudge.distill.student import Shape, Student
from selfjudge.distill.train import State, top1, train
from selfjudge.engine.select import release
from selfjudge.errors import SelfJudgeError
from selfjudge.models.convert import materialise, quiet, read_compact, write_compact
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import SELF, Source, load_prompts
from selfjudge.store import locked, provenance, read_json, read_tensors, refuse_other, sha256, write_json

INT8_LOSS = 0.002  # of top-1 agreement: what int8 rows may cost before float16 is kept


@dataclass(frozen=True)
class DistillConfig:
    """What decides the result; a run is continued only with the same ones (`minutes` may grow)."""

    layers: int = 4
    width: int = 384
    inner: int | None = None
    free_embeddings: bool = False
    minutes: float = 8.0
    steps: int | None = None
    """Train for so many steps instead, so that the clock has no say."""
    prompts: tuple[str, ...] = ("self:20000x3",)
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1536
    held_out: int = 256
    top_k: int = 16
    rate: float = 4e-3
    batch_tokens: int = 65536
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.inner)

    @property
    def sources(self) -> list[Source]:
        return [Source.parse(text, answers=3) for text in self.prompts]

    def check(self) -> None:
        """Refuse what cannot work before any model is loaded."""
        Shape(self.layers, self.width, self.inner)  # refuses a size that cannot be
        names = [source.name for source in self.sources]
        if weighted := [source.name for source in self.sources if source.weight is not None]:
            raise SelfJudgeError(f"{weighted[0]} has a weight: distill takes counts, such as {weighted[0]}:1000x2")
        if len(set(names)) < len(names):
            raise SelfJudgeError("the same source of prompts is named twice")
        if self.rate <= 0:
            raise SelfJudgeError(f"--rate must be more than 0, not {self.rate}")
        if self.steps is not None and self.steps < 1:
            raise SelfJudgeError(f"--steps must be at least 1, not {self.steps}")
        if self.minutes <= 0:
            raise SelfJudgeError(f"--minutes must be more than 0, not {self.minutes}")
        for name in ("max_new_tokens", "held_out", "top_k", "batch_tokens"):
            if getattr(self, name) < 1:
                raise SelfJudgeError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


def distill(
    pair: Pair, out: Path, settings: DistillConfig, *, data: Path | None = None, batch: int = 1024,
    notify: Callable[[str, float], None] = lambda stage, share: None,
) -> dict[str, Any]:  # fmt: skip
    """Make a draft for `pair.target` in the folder `out`; what `run.json` says. Goes on where an earlier call ended."""
    settings.check()
    if not pair.tokenizer.chat_template:
        raise SelfJudgeError(
            f"{pair.target_id} has no chat template: a draft is distilled from answers to chat prompts"
        )
    try:
        _not_a_strangers(out)
        if not (out / "work" / "prompts.safetensors").is_file():
            for source in settings.sources:  # before anything is written
                if source.name not in SELF:
                    load_prompts(source, data)
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".lock", waiting=f"waiting for another process that works on {out} …"):
            if (finished := _same_settings(out, pair, settings)) is not None:
                return finished
            held_out, corpus, yields = prepare(pair, out / "work", settings, data=data, batch=batch, notify=notify)
            student = Student(pair.target, settings.shape, free=settings.free_embeddings, seed=settings.seed)
            state = train(
                student, corpus, held_out, out / "work" / "train.safetensors", minutes=settings.minutes,
                steps=settings.steps, rate=settings.rate, batch_tokens=settings.batch_tokens, seed=settings.seed,
                notify=notify,
            )  # fmt: skip
            notify("writing", 1.0)
            return export(pair, student, held_out, corpus, out, settings, yields, state)
    except torch.OutOfMemoryError as error:
        raise SelfJudgeError(
            f"out of memory ({str(error).splitlines()[0]}): use a smaller --batch-tokens or --batch; what is done is kept"
        ) from None
    except (OSError, SafetensorError) as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; what is done is kept, run the command again") from None


def prepare(
    pair: Pair,
    work: Path,
    settings: DistillConfig,
    *,
    data: Path | None,
    batch: int,
    notify: Callable[[str, float], None],
) -> tuple[Corpus, Corpus, dict[str, Any]]:
    """Make, or read, the answers: those to held-out prompts, all others, and what became of the prompts by source."""
    prompts = work / "prompts.safetensors"
    rows = make_prompts(
        pair, settings.sources, prompts, seed=settings.seed, data=data, held_out=settings.held_out,
        longest=settings.max_prompt_tokens, batch=batch, notify=notify,
    )  # fmt: skip
    files = make_answers(
        pair, rows, work, seed=settings.seed, max_new_tokens=settings.max_new_tokens, top_k=settings.top_k, batch=batch,
        notify=notify,
    )  # fmt: skip
    device = pair.target.device
    release(pair.target)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held_out, corpus = (Corpus.read(files, rows, held_out=h, device=device) for h in (True, False))
    return held_out, corpus, read_tensors(prompts)[1]["report"]


def _not_a_strangers(out: Path) -> None:
    """Refuse a folder with other things in it: a draft brings a README.md and a config.json of its own."""
    if out.is_dir() and not (out / "settings.json").is_file():
        strange = [p.name for p in out.iterdir() if p.name not in (".lock", "work")]
        if strange:
            raise SelfJudgeError(f"{out} holds other files ({strange[0]} …): name a new or empty folder with --out")


def _same_settings(out: Path, pair: Pair, settings: DistillConfig) -> dict[str, Any] | None:
    """Refuse to continue a run with other settings than it was begun with; more minutes or steps are fine. A finished run's result."""
    files = [Path(source.name).expanduser() for source in settings.sources]
    now = {
        **asdict(settings), "prompts": list(settings.prompts), "target": pair.target_sha256,
        "prompt files": {str(f): sha256(f) for f in files if f.is_file()},
    }  # fmt: skip
    then: dict[str, Any] = read_json(out / "settings.json") if (out / "settings.json").is_file() else now
    refuse_other(out, then, {key: value for key, value in now.items() if key not in ("minutes", "steps")})
    longer = settings.minutes > then["minutes"] or (settings.steps or 0) > (then["steps"] or 0)
    if (out / "run.json").is_file() and not longer:
        found: dict[str, Any] = read_json(out / "run.json")
        return found
    (out / "run.json").unlink(missing_ok=True)  # its existence means done
    write_json(out / "settings.json", now)
    return None


def export(
    pair: Pair, student: Student, held_out: Corpus, corpus: Corpus, out: Path, settings: DistillConfig,
    yields: dict[str, Any], state: State,
) -> dict[str, Any]:  # fmt: skip
    """Write the compact form, the checkpoint, the card and, last, `run.json`; the student keeps the shipped weights."""
    compact = out / "compact"
    whole = top1(student, held_out)
    trained = {name: tensor.clone() for name, tensor in student.tensors().items()}
    size = write_compact(trained, student.raw, compact)
    student.load(read_compact(compact))
    rounded = top1(student, held_out)
    int8 = whole["all"] - rounded["all"] <= INT8_LOSS
    if not int8:
        size = write_compact(trained, student.raw, compact, int8=False)
        student.load(read_compact(compact))
    materialise(compact, pair.target, out)
    with quiet():
        pair.tokenizer.save_pretrained(out)
    result = {
        "target": pair.target_id,
        "settings": asdict(settings),
        "sources": [{"name": s.name, "licence": s.licence, "answers_per_prompt": s.answers, **yields[s.name]} for s in settings.sources],
        "training": {
            "answers": len(corpus.lengths), "answer_tokens": len(corpus.index), "steps": state.step,
            "tokens_seen": state.tokens, "seconds": round(state.seconds, 1), "history": state.history,
        },
        "parameters": sum(t.numel() for t in student.tensors().values()),
        "top1_held_out": {"as_trained": whole, "int8": rounded},
        "compact": {"format": "int8 rows" if int8 else "float16", "bytes": size},
    }  # fmt: skip
    (out / "README.md").write_text(_card(result), encoding="utf-8")
    shutil.copy(out / "README.md", compact / "README.md")
    write_json(out / "run.json", provenance(**result))
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

{s["layers"]} layers of width {s["width"]}, {result["parameters"] / 1e6:.1f} M trained parameters, distilled by `selfjudge distill` from the target's own
answers. `compact/` holds layers and projections ({result["compact"]["format"]}, {result["compact"]["bytes"] / 1e6:.1f} MB); the checkpoint beside this file is an ordinary
transformers model with the target's tokenizer.

## Training

{t["answers"]:,} answers, {t["answer_tokens"]:,} tokens in all, one greedy per prompt and the others sampled at temperatures 0.7 and 1.0; loss: cross-entropy
against the target's {s["top_k"]} most likely tokens; {t["steps"]:,} steps, {t["tokens_seen"]:,} tokens, {t["seconds"]:.0f} s.

| prompts | used | answers each | licence of the prompts |
| --- | ---: | ---: | --- |
{rows}

Held-out prompts of the same mix, top-1 agreement with the target: {by_source}.

The licence of the target applies to this draft, since it was made from the target's weights and answers.
"""
