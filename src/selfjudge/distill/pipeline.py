"""A draft for a target that has none: prompts → answers → a student or a head → files that can be shipped.

OUT/
    settings.json             what the run was begun with
    work/prompts.jsonl  answers-*.safetensors  train.safetensors           (may be deleted when all is done)
    compact/                  layers and projections, int8 rows: what ships (kind layers)
    config.json  model.safetensors  tokenizer …                            an ordinary transformers checkpoint
    config.json  head.safetensors                                          or an EAGLE-3 head, from the first evaluation
    speculators/              the head as vLLM loads it
    README.md                 model card
    run.json                  written last: its existence means done
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from selfjudge.distill.config import FREE, DistillConfig
from selfjudge.distill.data import DataMaker, Dataset
from selfjudge.distill.eagle import HeadLearner, Sizes, draft_vocabulary, measure_sizes, new_head
from selfjudge.distill.export import export_head, export_student
from selfjudge.distill.student import Student
from selfjudge.distill.train import HeldOutScore, StudentLearner, Trainer
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleConfig, decoder_layers
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder, read_tensors, write_tensors
from selfjudge.store.schema import conform
from selfjudge.types import Notify


def distill_draft(
    pair: Pair,
    out: Path,
    config: DistillConfig | None = None,
    *,
    data: Path | None = None,
    notify: Notify = lambda stage, share: None,
) -> dict[str, Any]:
    """Make a draft for `pair.target` in the folder `out`; what `run.json` says. Goes on where an earlier call ended.

    A finished run returns at once, unless more minutes or steps of training are wanted than it had.
    """
    config = config or DistillConfig()
    config.check()
    pair.target_model.check_full_precision()
    if config.kind == "eagle3":
        decoder_layers(pair.target)  # refuses a target whose states cannot be read
    if not pair.tokenizer.chat_template:
        raise SelfJudgeError(
            f"{pair.target_id} has no chat template: a draft is distilled from answers to chat prompts"
        )
    run = RunFolder(out)
    run.claim(own=("work",))  # a checkpoint of the training may be brought along
    if not run.begun:
        check_readable(config.sources, data)
    settings = {**config.as_settings(), "target": pair.target_sha256}
    try:
        with run.working(settings, free=FREE) as then:
            conform(then, DistillConfig, out / "settings.json")
            longer = config.minutes > then.get("minutes", 0) or (config.steps or 0) > (then.get("steps") or 0)
            if (result := run.result()) is not None and not longer:
                return result
            run.reopen(settings)
            return _distill(DataMaker(pair, config, run, data, notify))
    except torch.OutOfMemoryError as error:
        raise SelfJudgeError(
            f"out of memory ({str(error).splitlines()[0]}): use a smaller `batch_tokens` or `batch`;"
            " what is done is kept"
        ) from None
    except SafetensorError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; what is done is kept and the run can be resumed") from None


def _distill(maker: DataMaker) -> dict[str, Any]:
    """Data, training, export."""
    pair, config, run, notify = maker.pair, maker.config, maker.run, maker.notify
    data, checkpoint = maker.make(), run.work / "train.safetensors"
    if config.kind == "eagle3":
        learner = _head_learner(maker, data)

        def keep(score: HeldOutScore) -> None:
            learner.save(run.path, score.figures, target=pair.target_id, sha256=pair.target_sha256)

        state = Trainer(learner, checkpoint, config.schedule, notify, keep).run()
        notify("writing", 1.0)
        return export_head(maker, learner, data, state)
    student = Student(pair.target, config)
    state = Trainer(StudentLearner(student, data), checkpoint, config.schedule, notify).run()
    notify("writing", 1.0)
    return export_student(maker, student, data, state)


def _head_learner(maker: DataMaker, data: Dataset) -> HeadLearner:
    """A new head and its task. Its vocabulary and the sizes of what it reads stay the same when a run goes on."""
    config, run, target = maker.config, maker.run, maker.pair.target
    file, origin = run.work / "head.safetensors", maker.origin
    vocabulary = int(target.get_input_embeddings().weight.shape[0])
    size = min(config.draft_vocab, vocabulary)
    shape = EagleConfig.for_target(target, size, config.inner)
    if run.sealed("head", origin) is None:
        ids = draft_vocabulary(data.training, vocabulary, size, sorted(maker.pair.eos_ids))
        sizes = measure_sizes(target, shape.aux_layers, data.held_out)
        tensors = {"draft_ids": ids, "features": sizes.features, "states": sizes.states}
        write_tensors(file, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})
        run.seal("head", ["work/head.safetensors"], origin)
    arrays = {name: torch.from_numpy(array).to(target.device) for name, array in read_tensors(file)[0].items()}
    sizes = Sizes(arrays["features"], arrays["states"])
    head = new_head(target, shape, arrays["draft_ids"], sizes, config.seed)
    return HeadLearner(target, head, sizes, data.training, data.held_out, config.unroll)
