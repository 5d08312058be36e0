"""A draft for a target that has none: prompts → answers → a student or a head → files that can be shipped.
OUT/
    settings.json             what the run was begun with
    work/prompts.jsonl  answers-*.safetensors  train.safetensors           (may be deleted when all is done)
    config.json  model.safetensors  tokenizer …                            an ordinary transformers checkpoint
    config.json  model.safetensors                                         or an EAGLE-3 head, from the first evaluation
    README.md  prompts.json   model card; keys of the prompts, which `tune` refuses
    run.json                  written last: its existence means done"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from selfjudge.distill.config import FREE, DistillConfig
from selfjudge.distill.data import DataMaker, Dataset
from selfjudge.distill.learners import HeadLearner, Student, StudentLearner, choose_vocabulary, measure_sizes, new_head
from selfjudge.distill.train import Trainer, TrainingState
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.convert import build_draft, save_draft
from selfjudge.models.eagle import EagleConfig, decoder_layers
from selfjudge.models.pair import Pair
from selfjudge.models.pull import served_reference
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder, fill_template, read_tensors, write_tensors, write_text
from selfjudge.store.schema import conform
from selfjudge.types import Notify, check_config, ignore


def distill_draft(
    pair: Pair, out: Path, config: DistillConfig | None = None, *, data: Path | None = None, notify: Notify = ignore
) -> dict[str, Any]:
    """Make a draft for `pair.target` in the folder `out`; what `run.json` says. Goes on where an earlier call ended.
    A finished run returns at once, unless more minutes or steps of training are wanted than it had."""
    config = config or DistillConfig()
    check_config(config, DistillConfig)
    pair.target_model.check_full_precision()
    if config.kind == "eagle3":
        decoder_layers(pair.target)  # refuses a target whose states cannot be read
    if not pair.tokenizer.chat_template:
        raise SelfJudgeError(f"{pair.target_id} has no chat template: a draft learns from answers to chat prompts")
    run = RunFolder(out)
    if not run.claim(own=("work",)):  # a checkpoint of the training may be brought along
        check_readable(config.sources, data)
    settings = {**config.as_settings(), "target": pair.target_sha256}
    try:
        with run.working(settings, free=FREE) as then:
            conform(then, DistillConfig, out / "settings.json")
            longer = config.minutes > then.get("minutes", 0) or (config.steps or 0) > (then.get("steps") or 0)
            if (result := run.result()) is not None and not longer:
                return result
            run.reopen(settings)
            if pair.target.device.type == "cpu" and not config.prompts:
                notify("on a CPU so many answers take hours; docs/distill.md has a small first try", 0.0)
            return _distill(DataMaker(pair, config, run, data, notify))
    except torch.OutOfMemoryError as error:
        words = f"out of memory ({first_line(error)}): use a smaller `batch_tokens` or `batch`"
        raise SelfJudgeError(f"{words}; what is done is kept") from None
    except SafetensorError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; what is done is kept and the run can be resumed") from None


def _distill(maker: DataMaker) -> dict[str, Any]:
    """Data, training, export."""
    pair, config, run, notify = maker.pair, maker.config, maker.run, maker.notify
    data, checkpoint = maker.make(), run.work / "train.safetensors"
    if config.kind == "eagle3":
        head = _head_learner(maker, data)
        trainer = Trainer(head, checkpoint, config.schedule, notify, lambda score: head.save(run.path, score.figures))
        state = trainer.run()
        notify("writing", 1.0)
        return export_head(maker, head, state)
    learner = StudentLearner(Student(pair.target, config), data)
    state = Trainer(learner, checkpoint, config.schedule, notify).run()
    notify("writing", 1.0)
    return export_student(maker, learner, state)


def _head_learner(maker: DataMaker, data: Dataset) -> HeadLearner:
    """A new head and its task. Its vocabulary and the sizes of what it reads stay the same when a run goes on."""
    config, run, target = maker.config, maker.run, maker.pair.target
    file, origin = run.work / "head.safetensors", maker.origin
    vocabulary = int(target.get_input_embeddings().weight.shape[0])
    size = min(config.draft_vocab, vocabulary)
    shape = EagleConfig.for_target(target, size, config.inner)
    if run.sealed("head", origin) is None:
        ids = choose_vocabulary(data.training, vocabulary, size, sorted(maker.pair.eos_ids))
        features, states = measure_sizes(target, shape.aux_layers, data.held_out)
        tensors = {"draft_ids": ids, "features": features, "states": states}
        write_tensors(file, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})
        run.seal("head", ["work/head.safetensors"], origin)
    arrays = {name: torch.from_numpy(array).to(target.device) for name, array in read_tensors(file)[0].items()}
    head = new_head(target, shape, arrays["draft_ids"], arrays["states"], config.seed)
    head.target, head.target_sha256 = maker.pair.target_id, maker.pair.target_sha256
    return HeadLearner(target, head, arrays["features"], data, config.unroll)


def export_student(maker: DataMaker, learner: StudentLearner, state: TrainingState) -> dict[str, Any]:
    """Write the checkpoint and the card, `run.json` last; what it says."""
    pair, student = maker.pair, learner.student
    save_draft(build_draft(student.tensors(), student.raw, pair.target), pair.tokenizer, maker.run.path)
    figures = {
        "parameters": sum(tensor.numel() for tensor in student.tensors().values()),
        "top1_held_out": learner.agreement(),
    }
    return _finish(maker, learner.data, state, figures, "student.md")


def export_head(maker: DataMaker, learner: HeadLearner, state: TrainingState) -> dict[str, Any]:
    """Write the head and its card, `run.json` last; what it says."""
    head, held_out = learner.head, learner.measure().figures
    learner.save(maker.run.path, held_out, served_reference(maker.pair.target_id))
    counts = learner.data.held_out.count_tokens(head.config.vocab_size)
    figures = {
        "kind": maker.config.kind,
        "layers": head.config.aux_layers,
        "parameters": sum(p.numel() for p in head.parameters()),
        "held_out": held_out,
        "draft_vocabulary": {
            "tokens": head.config.draft_vocab_size,
            "share_of_held_out_answers": round(float(counts[head.draft_ids.cpu()].sum() / counts.sum()), 5),
        },
    }
    return _finish(maker, learner.data, state, figures, "head.md")


def _finish(
    maker: DataMaker, data: Dataset, state: TrainingState, figures: dict[str, Any], card: str
) -> dict[str, Any]:
    """Write the card by its template, and `run.json` last; what that says."""
    out = maker.run.path
    result = {
        "target": maker.pair.target_id,
        "settings": maker.config.as_settings(),
        "sources": [
            {"name": s.name, "licence": s.licence, "answers_per_prompt": s.answers, **data.report[s.name]}
            for s in maker.config.sources
        ],
        "training": {
            "answers": len(data.training.answers),
            "answer_tokens": data.training.answer_tokens,
            "steps": state.step,
            "tokens_seen": state.tokens,
            "seconds": round(state.seconds, 1),
            "history": state.history,
        },
        **figures,
        "bytes": (out / "model.safetensors").stat().st_size,
    }
    write_text(out / "README.md", fill_template(Path(__file__).with_name(card), **result))
    maker.run.finish(**result)
    return result
