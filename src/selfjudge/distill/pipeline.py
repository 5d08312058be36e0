"""A draft for a target that has none: prompts → answers → a student or a head → what travels.

OUT/
    settings.json             what the run was begun with
    work/prompts.safetensors  answers-*.safetensors  train.safetensors     (may be deleted when all is done)
    compact/                  layers and projections, int8 rows: what travels (kind layers)
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
from selfjudge.distill.data import Corpus, Data, Maker
from selfjudge.distill.eagle import HeadLearner, Sizes, draft_vocabulary, measure_sizes, new_head
from selfjudge.distill.export import export, export_head
from selfjudge.distill.student import Student
from selfjudge.distill.train import Trainer, train
from selfjudge.engine.select import release
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleConfig, decoder_layers
from selfjudge.models.gguf import check_whole_weights
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder, read_tensors, sha256, write_tensors
from selfjudge.store.artefacts import DistillSettings
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
    check_whole_weights(pair.target)
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
            conform(then, DistillSettings, out / "settings.json")
            longer = config.minutes > then["minutes"] or (config.steps or 0) > (then["steps"] or 0)
            if (result := run.result()) is not None and not longer:
                return result
            run.reopen(settings)
            maker = Maker(pair, config, run, data, notify)
            return _distill_head(maker) if config.kind == "eagle3" else _distill(maker)
    except torch.OutOfMemoryError as error:
        raise SelfJudgeError(
            f"out of memory ({str(error).splitlines()[0]}): use a smaller `batch_tokens` or `batch`;"
            " what is done is kept"
        ) from None
    except SafetensorError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; what is done is kept and the run can be resumed") from None


def _distill(maker: Maker) -> dict[str, Any]:
    """Data, training, export."""
    pair, config, run = maker.pair, maker.config, maker.run
    data = prepare(maker)
    student = Student(pair.target, config.shape, free=config.free_embeddings, seed=config.seed)
    checkpoint = run.work / "train.safetensors"
    state = train(student, data.training, data.held_out, checkpoint, config.schedule, maker.notify)
    maker.notify("writing", 1.0)
    return export(run, pair, student, data, config, state)


def _distill_head(maker: Maker) -> dict[str, Any]:
    """Data, training, export of an EAGLE-3 head."""
    pair, config, run = maker.pair, maker.config, maker.run
    data = prepare(maker)
    learner = _head_learner(maker, data)
    state = Trainer(learner, run.work / "train.safetensors", config.schedule, maker.notify).run()
    maker.notify("writing", 1.0)
    return export_head(run, pair, learner, data, config, state)


def _head_learner(maker: Maker, data: Data) -> HeadLearner:
    """A new head and its task; what was found in the data (vocabulary, sizes) stays the same when a run goes on."""
    pair, config, run = maker.pair, maker.config, maker.run
    target, file = pair.target, run.work / "head.safetensors"
    vocabulary = int(target.get_input_embeddings().weight.shape[0])
    size = min(config.draft_vocab, vocabulary)
    shape = EagleConfig.for_target(target, size, config.inner)
    made_from = sha256(run.work / "prompts.safetensors")
    if run.sealed("head", made_from) is None:
        ids = draft_vocabulary(data.training, vocabulary, size, sorted(pair.eos_ids))
        sizes = measure_sizes(target, shape.aux_layers, data.held_out)
        found = {"draft_ids": ids, "features": sizes.features, "states": sizes.states}
        write_tensors(file, {name: tensor.cpu().numpy() for name, tensor in found.items()})
        run.seal("head", ["work/head.safetensors"], made_from)
    arrays = {name: torch.from_numpy(array).to(target.device) for name, array in read_tensors(file)[0].items()}
    sizes = Sizes(arrays["features"], arrays["states"])
    head = new_head(target, shape, arrays["draft_ids"], sizes, config.seed)
    learner = HeadLearner(target, head, sizes, data.training, data.held_out, config.unroll)
    learner.folder, learner.name, learner.sha256 = run.path, pair.target_id, pair.target_sha256
    return learner


def prepare(maker: Maker) -> Data:
    """Make, or read, the answers; the target's engine is released afterwards."""
    rows, report = maker.prompts()
    files = maker.answers(rows)
    target = maker.pair.target
    release(target)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    held_out, training = (Corpus.read(files, rows, held_out=h, device=target.device) for h in (True, False))
    return Data(training, held_out, report)
