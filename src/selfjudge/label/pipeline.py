"""Labels without annotation: prompts → the target's responses → mismatches and scores → labels by τ.

Every stage works in numbered parts that are written whole and sealed with checksums (`store.RunFolder`). A run that was
killed goes on where it was and ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from selfjudge.decoding.plain import respond
from selfjudge.decoding.rule_parser import resolve_rule
from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import LOOKAHEAD
from selfjudge.label.backend import Backend, Torch
from selfjudge.label.calibrate import FEWEST, calibrate
from selfjudge.label.config import FULL_PRECISION, GREEDY, ROUNDED, LabelConfig
from selfjudge.label.consequences import label_by_consequences
from selfjudge.label.folder import FORMAT, Labels, Row, write_shard
from selfjudge.label.methods import label_by_likelihood, label_by_preservation
from selfjudge.label.mismatch import NOTHING
from selfjudge.label.score import Scorer
from selfjudge.label.tau import known_tau
from selfjudge.models.pair import Pair
from selfjudge.prompts.collect import Collector
from selfjudge.store import Journal, RunFolder, read_rows, sha256, write_rows
from selfjudge.store.artefacts import (
    CalibrationSeal,
    LabelManifest,
    LabelPrompt,
    LabelShard,
    PromptsSeal,
    Response,
    WrittenRow,
)
from selfjudge.tasks.code import CodeTask
from selfjudge.tasks.registry import is_task, load_task
from selfjudge.tasks.sandbox.runner import check_isolation
from selfjudge.types import Notify, Warn, default_gamma

SHARD = 64  # responses
CONTINUATIONS = {"cuda": 16384}  # of a shard of consequences, by device
TYPICAL_PLACES = 32  # of a response, where all are tried
T = TypeVar("T")


@dataclass
class _Run:
    """What all stages need."""

    pair: Pair
    config: LabelConfig
    folder: RunFolder
    backend: Backend
    data: Path | None
    notify: Notify
    warn: Warn
    policy: AcceptanceRule | None = None
    """What finishes the answers of consequences; the target alone if None."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock by stage."""
    labelled: int = 0
    """Rows made by this process."""

    def timed(self, stage: str, work: Callable[..., T], *arguments: Any) -> T:
        """Run a stage and note how long it took."""
        begun = time.monotonic()
        result = work(self, *arguments)
        self.seconds[stage] = round(time.monotonic() - begun, 3)
        return result


def label_pair(
    pair: Pair,
    out: Path,
    config: LabelConfig | None = None,
    *,
    backend: Backend | None = None,
    data: Path | None = None,
    resume: bool = False,
    notify: Notify = lambda stage, share: None,
    warn: Warn = lambda text: None,
) -> dict[str, Any]:
    """Label into the folder `out`; what its manifest says.

    The target runs in this process, unless a `backend` is handed in. With `resume`, a run begun in `out` goes on.
    """
    config = config or LabelConfig()
    config.check()
    if pair.draft is None and pair.draft_id:
        raise SelfJudgeError(f"labels by vLLM need a `draft` that is a model, and {pair.draft_id} is a head")
    if pair.draft is None:
        raise SelfJudgeError(f"no draft ships for {pair.target_id}: name one with `draft`")
    if pair.dtype in ROUNDED:
        raise SelfJudgeError(FULL_PRECISION.format(pair.dtype))
    if config.lookahead:
        pair.standalone_draft("`lookahead`")
    if config.batch is None:
        config = replace(config, batch=1024 if pair.target.device.type == "cuda" else 64)
    folder = RunFolder(out, done="manifest.json", schema=LabelManifest)
    folder.claim(resume=resume)
    if not folder.begun:
        _check_possible(pair, config, data)
    policy = _policy(pair, config)
    settings = {
        **config.as_settings(),
        "target": pair.target_sha256 or pair.target_id,
        "draft": pair.draft_sha256 or pair.draft_id,
        "dtype": pair.dtype,
        **({} if policy is None else {"judge": _sha256_of(policy)}),
    }
    with folder.working(settings, free=("allow_unsafe",)):
        if (manifest := folder.result()) is not None:
            if all(folder.intact(part["files"]) for part in (manifest, *manifest["shards"])):
                return manifest
            folder.reopen()
            warn(f"a file of {out} is damaged: making it again")
        return _label(_Run(pair, config, folder, backend or Torch(pair), data, notify, warn, policy))


def _policy(pair: Pair, config: LabelConfig) -> AcceptanceRule | None:
    """The judged rule that finishes answers, if there is one and it fits the pair."""
    if config.policy == GREEDY:
        return None
    rule = resolve_rule(pair, config.policy, judge=config.judge)
    assert rule.judge is not None
    rule.judge.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    rule.check(config.gamma or default_gamma(pair.target.device.type))
    return rule


def _sha256_of(policy: AcceptanceRule) -> str:
    """SHA-256 of the judge and its threshold."""
    assert isinstance(policy, Judged)
    return hashlib.sha256(f"{policy.theta}:{policy.judge.digest()}".encode()).hexdigest()


def _check_possible(pair: Pair, config: LabelConfig, data: Path | None) -> None:
    """Refuse early what would fail late: unreadable prompts, a τ that cannot be had, code that cannot be run."""
    config.check_prompts(data)
    sources = config.sources() if config.method != "selfjudge" else []
    checked = [source.name for source in sources if is_task(source.name)]
    if config.calibrate:
        checked.append(config.calibrate)
    if config.takes_shipped_tau:
        known_tau(pair.target_id, pair.draft_sha256, config.suffix_length)
    if any(isinstance(load_task(name), CodeTask) for name in checked) and not config.allow_unsafe:
        check_isolation()


def _label(run: _Run) -> dict[str, Any]:
    """All stages; the manifest, written last."""
    prompts, yields = run.timed("prompts", _prompts)
    tau = run.timed("tau", _tau)
    if tau.get("fallback"):
        many = "many" if tau["critical"] >= FEWEST else "few"
        run.warn(
            f"{tau['critical']} of {tau['mismatches']} mismatches are critical, too {many} to find τ by:"
            f" it is set by an {tau['fallback']}"
        )
    files = run.timed("responses", _responses, prompts)
    if run.pair.target.device.type == "cuda":
        run.pair.target_model.release()  # the memory of its engine is needed now
    shards = run.timed("labels", _shards, files, len(prompts), tau["tau"])
    if not any(shard["rows"] for shard in shards):
        if run.config.method != "selfjudge" and not any(shard["searched"] for shard in shards):
            raise SelfJudgeError("no response has an answer to preserve: raise `max_new_tokens`, or give other prompts")
        raise SelfJudgeError(NOTHING)
    out = run.folder.path
    public = ("prompt_id", "source", "prompt_ids", "response_ids", "finish")
    write_rows(
        out / "responses.jsonl",
        ({key: row[key] for key in public} for file in files for row in read_rows(file, Response)),
    )
    manifest = {**_facts(run, tau), "prompts": len(prompts), "yields": yields, **_sums(shards), "shards": shards}
    kept = [name for name in ("responses.jsonl", "calibration.safetensors") if (out / name).is_file()]
    manifest["files"] = {name: sha256(out / name) for name in kept}
    spent = sum(seconds for stage, seconds in run.seconds.items() if stage != "tau")
    run.folder.finish(
        manifest,
        settings=asdict(run.config),
        seconds=run.seconds,
        rows_per_hour=round(3600 * run.labelled / max(spent, 1e-3)),
    )
    return manifest


def _facts(run: _Run, tau: dict[str, Any]) -> dict[str, Any]:
    pair, config = run.pair, run.config
    return {
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
        **({"policy": config.policy, "outcome": config.outcome} if config.method == "consequences" else {}),
        **({} if run.policy is None else {"policy_sha256": _sha256_of(run.policy)}),
    }


def _sums(shards: Sequence[Row]) -> dict[str, int]:
    always = ("rows", "acceptable", "target_tokens", "response_tokens")
    sums = (*always, *(key for key in ("controls", "controls_kept") if any(key in shard for shard in shards)))
    return {key: sum(shard.get(key, 0) for shard in shards) for key in sums}


def _prompts(run: _Run) -> tuple[list[Row], dict[str, Any]]:
    """Rows {prompt_id, source, prompt_ids, request, row}, and what became of each source's prompts."""
    file = run.folder.work / "prompts.jsonl"
    with Journal(run.folder.work / "written.jsonl", WrittenRow) as journal:
        if (seal := run.folder.sealed("prompts", schema=PromptsSeal)) is None:
            made = _make_prompts(run, file, journal)
        else:
            made = list(read_rows(file, LabelPrompt)), seal["yields"]
        journal.remove()
    return made


def _make_prompts(run: _Run, file: Path, journal: Journal) -> tuple[list[Row], dict[str, Any]]:
    config, pair = run.config, run.pair
    longest = min(config.max_prompt_tokens, pair.window - 1)
    skip_broken = run.warn if config.skip_broken else None
    collect = Collector(pair, longest, config.seed, config.batch_size, run.data, run.notify, skip_broken, journal)
    records, yields = collect(config.sources())
    rows: list[Row] = []
    names: Counter[str] = Counter()
    for record, ids in records:
        names[record.id] += 1  # two files may have one name, and users choose ids
        name = record.id if names[record.id] == 1 else f"{record.id}~{names[record.id]}"
        rows.append(
            {"prompt_id": name, "source": record.source, "prompt_ids": ids, "request": record.prompt, "row": record.row}
        )
    first, step = config.shard
    if not (rows := rows[first::step]):
        raise SelfJudgeError("there is no prompt left to label: give more with `prompts`")
    write_rows(file, rows)
    run.folder.seal("prompts", ["work/prompts.jsonl"], yields=yields)
    return rows, yields


def _tau(run: _Run) -> dict[str, Any]:
    """τ and what speaks for it: given, calibrated here, or shipped with the pair."""
    config = run.config
    if config.tau is not None:
        return {"tau": config.tau, "given": True}
    if config.calibrate is None:
        if not config.takes_shipped_tau:
            return {"tau": None}
        return known_tau(run.pair.target_id, run.pair.draft_sha256, config.suffix_length)
    if (seal := run.folder.sealed("calibration", schema=CalibrationSeal)) is not None:
        return {key: value for key, value in seal.items() if key not in ("files", "made_from")}
    name = "calibration.safetensors"
    scorer = run.backend.scorer(suffix_length=config.suffix_length, lookahead=0)
    evidence = calibrate(run.pair, config, scorer, run.data, run.folder.path / name, run.notify)
    run.folder.seal("calibration", [name], **evidence)
    return evidence


def _responses(run: _Run, prompts: Sequence[Row]) -> list[Path]:
    """Files of responses, `batch` prompts each: greedy, as fast as the engine makes them."""
    files = []
    batch = run.config.batch_size
    made_from = sha256(run.folder.work / "prompts.jsonl")
    for number, start in enumerate(range(0, len(prompts), batch)):
        name = f"responses-{number:05d}"
        files.append(run.folder.work / f"{name}.jsonl")
        if run.folder.sealed(name, made_from) is not None:
            continue
        part = prompts[start : start + batch]
        responses: dict[int, Row] = {}
        for index, tokens, finish in respond(
            run.pair.target_model,
            [row["prompt_ids"] for row in part],
            eos_ids=run.pair.eos_ids,
            max_new_tokens=run.config.max_new_tokens,
            batch=batch,
        ):
            responses[index] = {"response_ids": tokens, "finish": finish}
            run.notify("the target answers", (start + len(responses)) / len(prompts))
        write_rows(files[-1], ({**row, **responses[i]} for i, row in enumerate(part)))
        run.folder.seal(name, [f"work/{name}.jsonl"], made_from)
    return files


def _shards(run: _Run, files: Sequence[Path], total: int, tau: float | None) -> list[Row]:
    """The seals of all shards of labels, made or found."""
    config = run.config
    size = _shard_size(run)
    lookahead = LOOKAHEAD if config.lookahead else 0
    scorer = run.backend.scorer(suffix_length=config.suffix_length, lookahead=lookahead)
    made_from = hashlib.sha256("".join([*map(sha256, files), repr(tau)]).encode()).hexdigest()
    seals: list[Row] = []
    done, begun = 0, time.monotonic()
    responses = chain.from_iterable(read_rows(file, Response) for file in files)
    for number, part in enumerate(_batched(responses, size)):
        if (seal := run.folder.sealed(f"labels-{number:05d}", made_from, LabelShard)) is None:

            def notify(share: float, before: int = done, count: int = len(part)) -> None:
                run.notify("labels", (before + share * count) / total)

            labels = _labels(run, part, scorer, tau, notify)
            run.labelled += len(labels.rows)
            rate = run.labelled / (time.monotonic() - begun)
            run.notify(f"labels: {run.labelled} made, {rate:.3g} a second", (done + len(part)) / total)
            seal = write_shard(run.folder, number, labels, made_from)
        seals.append(seal)
        done += len(part)
    return seals


def _shard_size(run: _Run) -> int:
    """Responses of a shard: some for likelihoods, a batch for searches, which advance together, and for consequences
    as many as have enough continuations; all where the backend does not answer and score at a time."""
    config = run.config
    if config.method != "selfjudge" and run.backend.alternates:
        return sys.maxsize
    if config.method == "consequences":
        most = CONTINUATIONS.get(run.pair.target.device.type, 4 * config.batch_size)
        return max(1, most // (config.substitutions or TYPICAL_PLACES))
    return SHARD if config.method == "selfjudge" else config.batch_size


def _labels(
    run: _Run, responses: Sequence[Row], scorer: Scorer, tau: float | None, notify: Callable[[float], None]
) -> Labels:
    """The labels of a shard of responses, with what they cost."""
    before = scorer.tokens
    if run.config.method == "selfjudge":
        assert tau is not None
        labels = label_by_likelihood(run.pair, run.config, responses, scorer, tau, notify)
    elif run.config.method == "consequences":
        labels = label_by_consequences(run.pair, run.config, responses, scorer, run.policy, run.data, notify)
    else:
        labels = label_by_preservation(run.pair, run.config, responses, scorer, run.data, notify)
    counts = labels.counts
    counts["target_tokens"] = counts.get("target_tokens", 0) + scorer.tokens - before
    counts["acceptable"] = sum(row["label"] for row in labels.rows)
    counts["response_tokens"] = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in responses)
    return labels


def _batched(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while part := list(islice(rows, size)):
        yield part
