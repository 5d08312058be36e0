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

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from selfjudge.distill.config import FREE, DistillConfig
from selfjudge.distill.data import Corpus, Data, Maker
from selfjudge.distill.export import export
from selfjudge.distill.student import Student
from selfjudge.distill.train import Schedule, train
from selfjudge.engine.select import release
from selfjudge.errors import SelfJudgeError
from selfjudge.models.gguf import check_whole_weights
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Notify, check_readable
from selfjudge.store import RunFolder
from selfjudge.store.artefacts import DistillSettings
from selfjudge.store.schema import conform


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
            return _distill(Maker(pair, config, run, data, notify))
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
    schedule = Schedule(config.minutes, config.steps, config.rate, config.batch_tokens, seed=config.seed)
    checkpoint = run.work / "train.safetensors"
    state = train(student, data.training, data.held_out, checkpoint, schedule, maker.notify)
    maker.notify("writing", 1.0)
    return export(run, pair, student, data, config, state)


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
