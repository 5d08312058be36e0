"""Labels without annotation: prompts → the target's responses → mismatches and scores → labels by τ. Every stage seals
numbered parts (`store.RunFolder`): a killed run resumes and ends in the same bytes."""

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import AnswerCheck, answer_prompts, find_originals
from selfjudge.label.config import LabelConfig, refuse_quantised, require_tau
from selfjudge.label.folder import EVIDENCE_FILE, FORMAT, SUMMED, Labels, Row, write_shard
from selfjudge.label.methods import (
    FEWEST,
    NOTHING,
    calibrate,
    label_by_consequences,
    label_by_likelihood,
    label_by_preservation,
)
from selfjudge.label.score import Scorer
from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import Collector
from selfjudge.prompts.sources import Source
from selfjudge.store import RunFolder, read_rows, sha256, write_rows
from selfjudge.store.schema import CalibrationSeal, LabelPrompt, LabelShard, PromptsSeal, Response
from selfjudge.tasks import load_task
from selfjudge.types import Notify, Tell, Warn, check_config, ignore

SHARD = 64  # responses
CONTINUATIONS = {"cuda": 16384}  # of a shard of consequences, by device
TYPICAL_PLACES = 32  # of a response, where all are tried
T = TypeVar("T")


@dataclass
class _LabelRun:
    """A run of `label_pair`: what all of its stages share."""

    pair: Pair
    config: LabelConfig
    folder: RunFolder
    data: Path | None
    notify: Notify
    warn: Warn
    seconds: dict[str, float] = field(default_factory=dict)  # wall clock by stage
    labelled: int = 0  # number of rows made by this process

    def timed(self, stage: str, work: Callable[..., T], *arguments: Any) -> T:
        """Run a stage and note how long it took."""
        begun = time.monotonic()
        result = work(self, *arguments)
        self.seconds[stage] = round(time.monotonic() - begun, 3)
        return result

    def scorer(self) -> Scorer:
        target, length = self.pair.target_model, self.config.suffix_length
        return Scorer(target, suffix_length=length) if target.remote is None else target.remote.scorer(length)


def label_pair(
    pair: Pair,
    out: Path | str,
    config: LabelConfig | None = None,
    *,
    data: Path | str | None = None,
    resume: bool = False,
    notify: Notify = ignore,
    warn: Warn = ignore,
) -> dict[str, Any]:
    """Label into the folder `out`; returns its manifest. With `resume`, a run begun in `out` goes on."""
    config, out, data = config or LabelConfig(), Path(out), None if data is None else Path(data)
    check_config(config, LabelConfig)
    if pair.draft is None:
        head = f"labels by vLLM need a `draft` that is a model, and {pair.draft_id} is a head"
        raise SelfJudgeError(head if pair.draft_id else f"no draft ships for {pair.target_id}: name one with `draft`")
    refuse_quantised(pair.dtype)
    if config.batch is None:
        config = replace(config, batch=1024 if pair.target.device.type == "cuda" else 64)
    folder = config.claim(out, data, resume, pair.target_id, pair.draft_sha256)
    settings = {
        **config.as_settings(),
        "target": pair.target_sha256 or pair.target_id,
        "draft": pair.draft_sha256 or pair.draft_id,
        "dtype": pair.dtype,
    }
    with folder.working(settings, free=("allow_unsafe",)):
        if (manifest := folder.result()) is not None:
            if all(folder.intact(part["files"]) for part in (manifest, *manifest["shards"])):
                return manifest
            folder.reopen()
            warn(f"a file of {out} is damaged: making it again")
        return _label(_LabelRun(pair, config, folder, data, notify, warn))


def _label(run: _LabelRun) -> dict[str, Any]:
    """All stages; the manifest, written last."""
    prompts, yields = run.timed("prompts", _make_prompts)
    tau = run.timed("tau", _find_tau)
    if tau.get("fallback"):
        many = "many" if tau["critical"] >= FEWEST else "few"
        run.warn(
            f"{tau['critical']} of {tau['mismatches']} mismatches are critical, too {many} to find τ by:"
            f" it is set by an {tau['fallback']}"
        )
    files = run.timed("responses", _make_responses, prompts)
    shards = run.timed("labels", _make_shards, files, len(prompts), tau["tau"])
    out = run.folder.path
    public = ("prompt_id", "source", "prompt_ids", "response_ids", "finish")
    responses = (row for file in files for row in read_rows(file, Response))
    write_rows(out / "responses.jsonl", ({key: row[key] for key in public} for row in responses))
    pair, config = run.pair, run.config
    manifest = {
        "format_version": FORMAT,
        "target": pair.target_id,
        "draft": pair.draft_id,
        "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256,
        "dtype": pair.dtype,
        "hidden_size": pair.hidden_size,
        "hidden_dtype": config.hidden_dtype,
        "layer": "final",
        "norm": "post_final_norm",
        "method": config.method,
        "suffix_length": config.suffix_length,
        "tau": tau["tau"],
        "tau_evidence": tau,
        "prompts": len(prompts),
        "yields": yields,
        **{key: sum(shard[key] for shard in shards) for key in SUMMED if key in shards[0]},
        "shards": shards,
        "files": {name: sha256(out / name) for name in ("responses.jsonl", EVIDENCE_FILE) if (out / name).is_file()},
    }
    spent = sum(seconds for stage, seconds in run.seconds.items() if stage != "tau")
    run.folder.finish(
        manifest,
        settings=asdict(config),
        seconds=run.seconds,
        rows_per_hour=round(3600 * run.labelled / max(spent, 1e-3)),
    )
    return manifest


def _make_prompts(run: _LabelRun) -> tuple[list[Row], dict[str, Any]]:
    """Rows {prompt_id, source, prompt_ids, request, row}, and what became of each source's prompts."""
    file = run.folder.work / "prompts.jsonl"
    if (seal := run.folder.sealed("prompts", schema=PromptsSeal)) is not None:
        return list(read_rows(file, LabelPrompt)), seal["yields"]
    rows, yields = _collect(run, run.config.sources)
    if not rows:
        raise SelfJudgeError("there is no prompt left to label: give more with `prompts`")
    write_rows(file, rows)
    run.folder.seal("prompts", ["work/prompts.jsonl"], yields=yields)
    return rows, yields


def _collect(run: _LabelRun, sources: Sequence[Source]) -> tuple[list[Row], dict[str, Any]]:
    """The prompts of these sources as rows with unique ids, and what became of each source's prompts."""
    config, pair = run.config, run.pair
    longest = min(config.max_prompt_tokens, pair.window - 1)
    collect = Collector(pair, longest, config.seed, config.batch_size, run.data, run.notify)
    records, yields = collect(sources)
    rows: list[Row] = []
    names: Counter[str] = Counter()
    for record, ids in records:
        names[record.id] += 1  # two files may have one name, and users choose ids
        name = record.id if names[record.id] == 1 else f"{record.id}~{names[record.id]}"
        rows.append(
            {"prompt_id": name, "source": record.source, "prompt_ids": ids, "request": record.prompt, "row": record.row}
        )
    return rows, yields


def _find_tau(run: _LabelRun) -> dict[str, Any]:
    """τ and how it was found: given, calibrated here, or shipped with the pair."""
    config = run.config
    if config.takes_shipped_tau:
        return require_tau(run.pair.target_id, run.pair.draft_sha256, config.suffix_length)
    if config.calibrate is None:
        return {"tau": config.tau, "given": config.tau is not None}
    if (seal := run.folder.sealed("calibration", schema=CalibrationSeal)) is not None:
        return {key: value for key, value in seal.items() if key not in ("files", "made_from")}
    prompts, _ = _collect(run, [Source(config.calibrate, config.calibrate_prompts)])
    responses = _answer(run, prompts, lambda share: run.notify("τ: the target answers", share))
    check = AnswerCheck(run.pair, load_task(config.calibrate, run.data, allow_unsafe=config.allow_unsafe))
    found = calibrate(check, config, responses, run.scorer(), run.folder.path / EVIDENCE_FILE, run.notify)
    run.folder.seal("calibration", [EVIDENCE_FILE], **found)
    return found


def _answer(run: _LabelRun, prompts: Sequence[Row], notify: Tell) -> list[Row]:
    """The prompts with the target's greedy responses."""
    config, asked = run.config, [row["prompt_ids"] for row in prompts]
    answers = answer_prompts(run.pair, asked, config.max_new_tokens, config.batch_size, notify)
    return [
        {**row, "response_ids": tokens, "finish": finish}
        for row, (tokens, finish) in zip(prompts, answers, strict=True)
    ]


def _make_responses(run: _LabelRun, prompts: Sequence[Row]) -> list[Path]:
    """Files of responses, `batch` prompts each."""
    files = []
    batch = run.config.batch_size
    made_from = sha256(run.folder.work / "prompts.jsonl")
    for number, start in enumerate(range(0, len(prompts), batch)):
        name = f"responses-{number:05d}"
        files.append(run.folder.work / f"{name}.jsonl")
        if run.folder.sealed(name, made_from) is not None:
            continue
        part = prompts[start : start + batch]
        write_rows(files[-1], _answer(run, part, _report(run, "the target answers", start, len(part), len(prompts))))
        run.folder.seal(name, [f"work/{name}.jsonl"], made_from)
    return files


def _report(run: _LabelRun, stage: str, before: int, count: int, total: int) -> Tell:
    """Reports a share of `count` items of a stage as a share of all `total`, of which `before` are done."""
    return lambda share: run.notify(stage, (before + share * count) / total)


def _make_shards(run: _LabelRun, files: Sequence[Path], total: int, tau: float | None) -> list[Row]:
    """The seals of all shards of labels, made or found."""
    scorer = run.scorer()
    made_from = hashlib.sha256("".join([*map(sha256, files), repr(tau)]).encode()).hexdigest()
    seals: list[Row] = []
    done, begun = 0, time.monotonic()
    responses = chain.from_iterable(read_rows(file, Response) for file in files)
    size = _shard_size(run)
    for number, part in enumerate(iter(lambda: list(islice(responses, size)), [])):
        if (seal := run.folder.sealed(f"labels-{number:05d}", made_from, LabelShard)) is None:
            labels = _label_shard(run, part, scorer, tau, _report(run, "labels", done, len(part), total))
            run.labelled += len(labels.rows)
            rate = run.labelled / (time.monotonic() - begun)
            run.notify(f"labels: {run.labelled} made, {rate:.3g} a second", (done + len(part)) / total)
            seal = write_shard(run.folder, number, labels, made_from)
        seals.append(seal)
        done += len(part)
    if not any(seal.get("searched", 1) for seal in seals):
        raise SelfJudgeError("no response has an answer to preserve: raise `max_new_tokens`, or give other prompts")
    if not any(seal["rows"] for seal in seals):
        raise SelfJudgeError(NOTHING)
    return seals


def _shard_size(run: _LabelRun) -> int:
    """Responses of a shard: a constant, for searches a batch, for consequences as many as have enough continuations. A
    remote engine that takes turns at answering and scoring has one shard."""
    config = run.config
    if config.method == "selfjudge":
        return SHARD
    if run.pair.target_model.remote is not None:
        return sys.maxsize
    if config.method == "consequences":
        most = CONTINUATIONS.get(run.pair.target.device.type, 4 * config.batch_size)
        return max(1, most // (config.substitutions or TYPICAL_PLACES))
    return config.batch_size


def _label_shard(run: _LabelRun, responses: Sequence[Row], scorer: Scorer, tau: float | None, notify: Tell) -> Labels:
    """The labels of a shard of responses, and what they cost."""
    before = scorer.tokens
    if run.config.method == "selfjudge":
        assert tau is not None
        labels = label_by_likelihood(run.pair, run.config, responses, scorer, tau, notify)
    else:
        originals = find_originals(run.pair, run.config, responses, run.data)
        method = label_by_consequences if run.config.method == "consequences" else label_by_preservation
        labels = method(run.pair, run.config, originals, scorer, notify)
        labels.counts["searched"] = len(originals)
        labels.counts["left_out"] = len(responses) - len(originals)
        labels.counts["unclear_verdicts"] = sum(check.unclear for check in {o.check for o in originals})
    counts = labels.counts
    counts["target_tokens"] = counts.get("target_tokens", 0) + scorer.tokens - before
    counts["acceptable"] = sum(row["label"] for row in labels.rows)
    counts["response_tokens"] = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in responses)
    return labels
