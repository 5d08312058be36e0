"""Labels without annotation: prompts → the target's responses → mismatches and scores → labels by τ.

Every stage works in numbered pieces that are written whole and sealed with checksums (shards.py), so that a run that was
killed goes on where it was and ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfjudge.engine.select import release
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import LOOKAHEAD
from selfjudge.label.backend import BACKENDS, Backend, Torch
from selfjudge.label.calibrate import FEWEST, begin, calibrate, extracted, scored
from selfjudge.label.folder import FORMAT, Arrays, Row, seal, sealed, unharmed, write_shard
from selfjudge.label.mismatch import NOTHING, find_mismatches, with_lookahead
from selfjudge.label.preservation import Search, asked_target, search
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window
from selfjudge.prompts.sources import SELF, Asked, Notify, Source, limited, load_prompts, write_prompts
from selfjudge.store import locked, provenance, read_json, read_rows, refuse_other, sha256, write_json, write_rows
from selfjudge.tasks.base import FILE, known, task
from selfjudge.tasks.code import CodeTask
from selfjudge.tasks.sandbox.runner import refuse_unisolated

METHODS = ("selfjudge", "autojudge", "autojudge+")
STAGES = ("prompts", "tau", "responses", "labels")
SHARD = 64  # responses


@dataclass(frozen=True)
class LabelConfig:
    """What decides the labels; a run is continued only with the same ones."""

    prompts: tuple[str, ...] = ("self:500",)
    limit: int | None = None
    method: str = "selfjudge"
    suffix_length: int = 20
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1536
    tau: float | None = None
    calibrate: str | None = None
    """The task whose critical tokens give τ."""
    calibrate_prompts: int = 100
    reject_recall: float = 0.9
    hidden_dtype: str = "float32"
    lookahead: bool = False
    """Store the target's log-probabilities of what the draft would say after its token."""
    substitutions: int | None = None
    """Most draft tokens that answer preservation tries in a response; all if not given."""
    batch: int = 64
    shard: tuple[int, int] = (0, 1)
    """Which of how many: prompts i, i + n, i + 2n … are labelled."""
    skip_broken: bool = False
    allow_unsafe: bool = False
    """Run generated code where it cannot be isolated."""
    seed: int = 0
    backend: str = "torch"

    def check(self) -> None:
        """Refuse what cannot work before any model is loaded."""
        self.sources()
        if self.method not in METHODS:
            raise SelfJudgeError(f"unknown method {self.method!r}; methods are: {', '.join(METHODS)}")
        if self.backend not in BACKENDS:
            raise SelfJudgeError(f"unknown backend {self.backend!r}; backends are: {', '.join(BACKENDS)}")
        if self.backend == "vllm":
            self._check_vllm()
        if self.lookahead and self.method != "selfjudge":
            raise SelfJudgeError(f"--lookahead goes with --method selfjudge, not with {self.method}")
        if self.hidden_dtype not in ("float32", "float16"):
            raise SelfJudgeError(f"hidden states are kept as float32 or float16, not {self.hidden_dtype}")
        if self.suffix_length < 0:
            raise SelfJudgeError(f"--suffix-length must not be negative, not {self.suffix_length}")
        for name in ("max_new_tokens", "batch", "calibrate_prompts"):
            if getattr(self, name) < 1:
                raise SelfJudgeError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("limit", "substitutions"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SelfJudgeError(f"--{name} must be at least 1, not {value}")
        if not 0 < self.reject_recall <= 1:
            raise SelfJudgeError(f"--reject-recall must lie above 0 and not above 1, not {self.reject_recall}")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise SelfJudgeError(f"--shard is i/n with i from 0 to n − 1, not {self.shard[0]}/{self.shard[1]}")
        if self.calibrate is not None and not (known(self.calibrate) and task(self.calibrate).checkable):
            raise SelfJudgeError(f"{self.calibrate} has no checkable answers to calibrate τ on")
        if wrong := [text for text, source in zip(self.prompts, self.sources(), strict=True) if source.answers > 1]:
            raise SelfJudgeError(
                f"a label needs one answer a prompt: write {wrong[0].rpartition('x')[0]}, not {wrong[0]}"
            )
        if self.tau is not None and not np.isfinite(self.tau):
            raise SelfJudgeError(f"--tau must be a finite number, not {self.tau}")
        if self.tau is not None and self.calibrate is not None:
            raise SelfJudgeError("give --tau or --calibrate, not both")
        if self.method == "autojudge":
            for source in self.sources():
                if not (known(source.name) and task(source.name).checkable):
                    raise SelfJudgeError(f"{source.name} has no checkable answers: autojudge+ takes such prompts")

    def _check_vllm(self) -> None:
        """What asks the target again and again, or samples, is the torch backend's."""
        if self.method != "selfjudge":
            raise SelfJudgeError(f"--backend vllm labels by likelihood: --method {self.method} needs --backend torch")
        if self.calibrate is not None:
            raise SelfJudgeError("--backend vllm searches for no τ: find it with --backend torch, then give --tau")
        if any(source.name in SELF for source in self.sources()):
            raise SelfJudgeError(
                "--backend vllm takes prompts of tasks and files: self-written ones need --backend torch"
            )

    def sources(self) -> list[Source]:
        return limited([Source.parse(text) for text in self.prompts], self.limit)


def label(
    pair: Pair, out: Path, settings: LabelConfig, *, backend: Backend | None = None, data: Path | None = None, resume: bool = False,
    notify: Notify = lambda stage, share: None, warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Label into the folder `out`; what its manifest says. The target runs here, unless a `backend` is handed in."""
    settings.check()
    if pair.draft is None:
        raise SelfJudgeError(f"no draft ships for {pair.target_id}: name one with `draft`")
    if pair.int8:
        raise SelfJudgeError("labels are made with whole weights: leave out --dtype int8")
    if out.exists() and not out.is_dir():
        raise SelfJudgeError(f"{out} is a file: name a folder with --out")
    if out.is_dir() and any(not p.name.startswith(".") for p in out.iterdir()):
        if not (out / "settings.json").is_file():
            raise SelfJudgeError(f"{out} holds other files: name a new or empty folder with --out")
        if not resume:
            raise SelfJudgeError(f"{out} was begun already: go on with --resume, or name another --out")
    try:
        if not (out / "settings.json").is_file():
            _possible(pair, settings, data)  # before anything is written
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / ".lock", refuse=f"another process works on {out}"):
            return _label(pair, out, settings, backend or Torch(pair), data, notify, warn)
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; what is done is kept, go on with --resume") from None


def _possible(pair: Pair, settings: LabelConfig, data: Path | None) -> None:
    """Refuse early what would fail late: prompts that cannot be read, a τ that cannot be had, code that cannot be run."""
    for source in settings.sources():
        if source.name not in SELF:
            load_prompts(source, data, skip_broken=(lambda text: None) if settings.skip_broken else None)
    checked = [settings.calibrate] if settings.calibrate else []
    if settings.calibrate:
        load_prompts(Source(settings.calibrate, settings.calibrate_prompts), data)
    elif settings.tau is None and settings.method == "selfjudge":
        _known_tau(pair, settings)
    if settings.method != "selfjudge":
        checked += [source.name for source in settings.sources() if known(source.name)]
    if any(isinstance(task(name), CodeTask) for name in checked) and not settings.allow_unsafe:
        refuse_unisolated()


def _label(
    pair: Pair, out: Path, settings: LabelConfig, backend: Backend, data: Path | None, notify: Notify,
    warn: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    _same_settings(out, pair, settings)
    if (out / "manifest.json").is_file():
        found: dict[str, Any] = read_json(out / "manifest.json")
        if all(unharmed(out, files) for files in (found["files"], *(shard["files"] for shard in found["shards"]))):
            return found
        (out / "manifest.json").unlink()  # its existence means done
        warn(f"a file of {out} is damaged: making it again")
    clock = [time.monotonic()]
    prompts, yields = _prompts(pair, out, settings, data, notify, warn)
    clock.append(time.monotonic())
    tau = _tau(pair, out, settings, data, notify)
    clock.append(time.monotonic())
    if tau["tau"] is not None and tau.get("fallback"):
        many = tau["critical"] >= FEWEST
        warn(
            f"{tau['critical']} of {tau['mismatches']} mismatches are critical, too {'many' if many else 'few'} to find τ by:"
            f" it is set by an {tau['fallback']}"
        )
    files = _responses(pair, out, settings, backend, prompts, notify)
    clock.append(time.monotonic())
    if pair.target.device.type == "cuda":
        release(pair.target)  # the memory of its engine is needed now
    shards = list(_shards(pair, out, settings, backend, files, len(prompts), tau["tau"], data, notify))
    clock.append(time.monotonic())
    rows = sum(shard["rows"] for shard in shards)
    if not rows and settings.method != "selfjudge" and not sum(shard["searched"] for shard in shards):
        raise SelfJudgeError("no response has an answer to preserve: raise --max-new-tokens, or give other prompts")
    if not rows:
        raise SelfJudgeError(NOTHING)
    write_rows(out / "responses.jsonl", (_public(row) for file in files for row in read_rows(file)))
    manifest = {
        "format_version": FORMAT, "target": pair.target_id, "draft": pair.draft_id,
        "target_sha256": pair.target_sha256, "draft_sha256": pair.draft_sha256, "dtype": pair.dtype,
        "hidden_size": pair.hidden_size, "hidden_dtype": settings.hidden_dtype, "layer": "last", "norm": "post_final_norm",
        "method": settings.method, "suffix_length": settings.suffix_length, "tau": tau["tau"], "tau_evidence": tau,
        "rows": rows, "acceptable": sum(shard["acceptable"] for shard in shards), "prompts": len(prompts),
        "yields": yields, "target_tokens": sum(shard["target_tokens"] for shard in shards),
        "response_tokens": sum(shard["response_tokens"] for shard in shards), "shards": shards,
        "files": {name: sha256(out / name) for name in ("responses.jsonl", "calibration.safetensors") if (out / name).is_file()},
    }  # fmt: skip
    spent = {stage: round(b - a, 3) for stage, a, b in zip(STAGES, clock, clock[1:], strict=False)}
    write_json(out / "run.json", provenance(settings=asdict(settings), seconds=spent))
    write_json(out / "manifest.json", manifest)
    return manifest


def _same_settings(out: Path, pair: Pair, settings: LabelConfig) -> None:
    files = [Path(source.name.removeprefix(FILE)).expanduser() for source in settings.sources()]
    now = {
        **asdict(settings), "prompts": list(settings.prompts), "shard": list(settings.shard),
        "target": pair.target_sha256 or pair.target_id, "draft": pair.draft_sha256 or pair.draft_id, "dtype": pair.dtype,
        "prompt files": {str(f): sha256(f) for f in files if f.is_file()},
    }  # fmt: skip
    then: dict[str, Any] = read_json(out / "settings.json") if (out / "settings.json").is_file() else now
    then = {**asdict(LabelConfig()), **then}  # what an older version did not know was as it is by default
    refuse_other(out, then, {key: value for key, value in now.items() if key != "allow_unsafe"})
    write_json(out / "settings.json", now)


def _prompts(
    pair: Pair, out: Path, settings: LabelConfig, data: Path | None, notify: Notify, warn: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    """Rows {prompt_id, source, prompt_ids, request, row}, and what became of each source's prompts."""
    file, seal_file = out / "work" / "prompts.jsonl", out / "work" / "prompts.json"
    if found := sealed(seal_file, out / "work"):
        return list(read_rows(file)), found["yields"]
    rows: list[Row] = []
    yields: dict[str, Any] = {}
    assert pair.draft is not None
    longest = min(settings.max_prompt_tokens, *(context_window(model) - 1 for model in (pair.target, pair.draft)))
    seen: set[tuple[int, ...]] = set()
    names: Counter[str] = Counter()
    for source in settings.sources():
        if source.name in SELF:
            asked, report = write_prompts(pair, source, settings.seed, settings.batch, notify)
        else:
            asked = load_prompts(source, data, skip_broken=warn if settings.skip_broken else None)
            report = {"given": len(asked)}
        encoded = pair.encode_many([one.prompt for one in asked])
        short = [(one, ids) for one, ids in zip(asked, encoded, strict=True) if len(ids) <= longest]
        before = len(rows)
        for one, ids in short:
            if tuple(ids) in seen:  # twins would end up on both sides of a split by prompt
                continue
            seen.add(tuple(ids))
            names[one.id] += 1
            name = one.id if names[one.id] == 1 else f"{one.id}~{names[one.id]}"  # files of one name, ids of a user
            rows.append(
                {"prompt_id": name, "source": one.source, "prompt_ids": ids, "request": one.prompt, "row": one.row}
            )
        new = len(rows) - before
        yields[source.name] = {
            **report, "too long": len(asked) - len(short), "repeated": len(short) - new, "prompts": new,
        }  # fmt: skip
    mine = rows[settings.shard[0] :: settings.shard[1]]
    if not mine:
        raise SelfJudgeError("there is no prompt left to label: give more with --prompts")
    write_rows(file, mine)
    seal(seal_file, out / "work", ("prompts.jsonl",), yields=yields)
    return mine, yields


def _tau(pair: Pair, out: Path, settings: LabelConfig, data: Path | None, notify: Notify) -> dict[str, Any]:
    """τ and what speaks for it: given, calibrated here, or shipped with the pair."""
    if settings.tau is not None:
        return {"tau": settings.tau, "given": True}
    if settings.calibrate is None:
        if settings.method != "selfjudge":
            return {"tau": None}  # these labels need none
        return _known_tau(pair, settings)
    seal_file = out / "work" / "calibration.json"
    if (found := sealed(seal_file, out)) is not None:
        return {k: v for k, v in found.items() if k not in ("files", "made_from")}
    source = Source(settings.calibrate, settings.calibrate_prompts)
    result = calibrate(
        pair, task(settings.calibrate, data, allow_unsafe=settings.allow_unsafe), load_prompts(source, data), suffix_length=settings.suffix_length,
        reject_recall=settings.reject_recall, max_new_tokens=settings.max_new_tokens, batch=settings.batch,
        evidence=out / "calibration.safetensors", notify=notify,
    )  # fmt: skip
    seal(seal_file, out, ("calibration.safetensors",), **result)
    return result


def _known_tau(pair: Pair, settings: LabelConfig) -> dict[str, Any]:
    if (shipped := shipped_tau(pair.target_id, pair.draft_sha256, settings.suffix_length)) is None:
        raise SelfJudgeError(
            "no τ is known for this pair and suffix length: calibrate it (--calibrate gsm8k, or --calibrate arithmetic"
            " without any data) or give --tau"
        )
    return shipped


def shipped_tau(target: str, draft_sha256: str, suffix_length: int) -> dict[str, Any] | None:
    """The τ that ships with an embedded pair, for its own draft and suffix length."""
    from selfjudge.models.catalogue import EMBEDDED

    embedded = EMBEDDED.get(target)
    file = embedded.draft / "tau.json" if embedded is not None and embedded.draft is not None else None
    if file is None or not file.is_file():
        return None
    found: dict[str, Any] = read_json(file)
    if found["draft_sha256"] != draft_sha256 or str(suffix_length) not in found["tau"]:
        return None
    return {**found["tau"][str(suffix_length)], "shipped": True}


def _responses(
    pair: Pair, out: Path, settings: LabelConfig, backend: Backend, prompts: Sequence[Row], notify: Notify
) -> list[Path]:
    """Files of responses, `batch` prompts each: greedy, as fast as the engine makes them."""
    files = []
    work = out / "work"
    origin = sha256(work / "prompts.jsonl")
    for number, start in enumerate(range(0, len(prompts), settings.batch)):
        file = work / f"responses-{number:05d}.jsonl"
        files.append(file)
        if sealed(work / f"responses-{number:05d}.json", work, origin):
            continue
        part = prompts[start : start + settings.batch]
        found: dict[int, tuple[list[int], str]] = {}
        for index, tokens, finish in backend.respond(
            [row["prompt_ids"] for row in part], eos_ids=pair.eos_ids, max_new_tokens=settings.max_new_tokens,
            batch=settings.batch,
        ):  # fmt: skip
            found[index] = tokens, finish
            notify("the target answers", (start + len(found)) / len(prompts))
        write_rows(file, ({**row, "response_ids": found[i][0], "finish": found[i][1]} for i, row in enumerate(part)))
        seal(work / f"responses-{number:05d}.json", work, (file.name,), origin)
    return files


def _public(row: Row) -> Row:
    return {key: row[key] for key in ("prompt_id", "source", "prompt_ids", "response_ids", "finish")}


def _shards(
    pair: Pair, out: Path, settings: LabelConfig, backend: Backend, files: Sequence[Path], all_rows: int, tau: float | None,
    data: Path | None, notify: Notify,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every shard of labels, made or found."""
    size = SHARD if settings.method == "selfjudge" else settings.batch  # searches advance together
    pending: list[Row] = []
    number, done = 0, 0
    made = _selfjudge if settings.method == "selfjudge" else _autojudge
    ahead = LOOKAHEAD if settings.lookahead else 0
    scorer = backend.scorer(suffix_length=settings.suffix_length, lookahead=ahead)
    origin = hashlib.sha256("".join([*map(sha256, files), repr(tau)]).encode()).hexdigest()

    begun, labelled = time.monotonic(), 0

    def shard() -> dict[str, Any]:
        nonlocal labelled
        if (found := sealed(out / "work" / f"labels-{number:05d}.json", out, origin)) is not None:
            return found
        before = scorer.tokens
        rows, arrays, revisions, counts = made(
            pair, settings, pending, scorer, tau, data,
            lambda share: notify("labels", (done + share * len(pending)) / all_rows),
        )  # fmt: skip
        counts["target_tokens"] = counts.get("target_tokens", 0) + scorer.tokens - before
        labelled += len(rows)
        rate = labelled / (time.monotonic() - begun)
        notify(f"labels: {labelled} made, {rate:.3g} a second", (done + len(pending)) / all_rows)
        return write_shard(
            out, number, rows, arrays, revisions, origin, acceptable=sum(r["label"] for r in rows),
            response_tokens=sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in pending), **counts,
        )  # fmt: skip

    for file in files:
        for row in read_rows(file):
            pending.append(row)
            if len(pending) == size:
                yield shard()
                number, done, pending = number + 1, done + len(pending), []
    if pending:
        yield shard()


def _selfjudge(
    pair: Pair, settings: LabelConfig, responses: Sequence[Row], scorer: Scorer, tau: float | None, data: Path | None,
    notify: Callable[[float], None],
) -> tuple[list[Row], Arrays, list[Row], dict[str, Any]]:  # fmt: skip
    """Labels by likelihood; rows whose score is no number are left out and counted."""
    assert tau is not None
    read = [(row["prompt_ids"], row["response_ids"], row["finish"] == "length") for row in responses]
    cases = find_mismatches(pair, read, settings.suffix_length)
    if settings.lookahead:
        cases = with_lookahead(pair, cases, LOOKAHEAD, batch=settings.batch)
    found = scorer(cases, notify)
    rows: list[Row] = []
    finite: list[bool] = []
    for row, case, scores in zip(responses, cases, found, strict=True):
        prefix, suffix = scores.prefix(), scores.suffix(settings.suffix_length)
        for k, place in enumerate(case.places):
            score = float(prefix[k] + suffix[k])
            finite.append(bool(np.isfinite(score)))
            if finite[-1]:
                rows.append(_row(row, case, k, place, float(prefix[k]), float(suffix[k]), score > tau, settings.method))
    arrays = {name: a[np.asarray(finite, bool)] for name, a in _arrays(found, settings, pair.hidden_size).items()}
    return rows, arrays, [], {"not_finite": len(finite) - len(rows)}


def _autojudge(
    pair: Pair, settings: LabelConfig, responses: Sequence[Row], scorer: Scorer, tau: float | None, data: Path | None,
    notify: Callable[[float], None],
) -> tuple[list[Row], Arrays, list[Row], dict[str, Any]]:  # fmt: skip
    """Labels by preserved answers; on open prompts (autojudge+) the target says whether the meaning is the same.

    A position counts in the response that the search had reached: the row names its revision, 0 being the original.
    """
    searches: list[Search] = []
    unclear = 0

    def count(number: int) -> None:
        nonlocal unclear
        unclear += number

    for name in sorted({row["source"] for row in responses}):
        part = [row for row in responses if row["source"] == name and row["finish"] == "eos"]
        checkable = known(name) and task(name).checkable
        if checkable:
            one = task(name, data, allow_unsafe=settings.allow_unsafe)
            asked = [Asked(row["prompt_id"], name, row["request"], row["row"]) for row in part]
            begun = begin(pair, one, asked, *([row[key] for row in part] for key in ("prompt_ids", "response_ids")))
            check = extracted(one)
        else:
            begun = [
                Search(
                    row["prompt_ids"], tuple(row["response_ids"]), _text(row["request"]), row["prompt_id"],
                    answer=str(pair.tokenizer.decode(row["response_ids"], skip_special_tokens=True)),
                )
                for row in part
            ]  # fmt: skip
            check = asked_target(pair, batch=settings.batch, unparsed=count)
        searches += begun
        before = len(searches) - len(begun)
        search(
            pair, begun, check, max_new_tokens=settings.max_new_tokens, batch=settings.batch, most=settings.substitutions,
            notify=lambda done, tried, before=before: notify((before + done) / len(responses)),  # type: ignore[misc]
        )  # fmt: skip
    if pair.target.device.type == "cuda":
        release(pair.target)
    owners = {row["prompt_id"]: row for row in responses}
    rows, parts = [], []
    numbers: dict[str, dict[tuple[int, ...], int]] = {}
    for one_search, event, scores, k in scored(scorer, searches):
        row = owners[one_search.prompt_id]
        revisions = numbers.setdefault(one_search.prompt_id, {tuple(row["response_ids"]): 0})
        revision = revisions.setdefault(event.response, len(revisions))
        own = Scores(**{name: getattr(scores, name)[k : k + 1] for name in Scores.__dataclass_fields__})
        prefix, suffix = float(own.prefix()[0]), float(own.suffix(settings.suffix_length)[0])
        if not np.isfinite(prefix + suffix):
            continue
        case = Case(row["prompt_ids"], event.response, [event.place], [event.draft])
        made = _row(row, case, 0, event.place, prefix, suffix, event.kept, settings.method)
        rows.append({**made, "revision": revision})
        parts.append(own)
    counts = {
        "target_tokens": sum(event.tokens for one in searches for event in one.events), "searched": len(searches),
        "left_out": len(responses) - len(searches), "unclear_verdicts": unclear,
    }  # fmt: skip
    kept = [
        {"prompt_id": name, "revision": number, "response_ids": list(response)}
        for name, found in numbers.items()
        for response, number in found.items()
        if number
    ]
    return rows, _arrays(parts, settings, pair.hidden_size), kept, counts


def _text(request: Any) -> str:
    return request if isinstance(request, str) else "\n".join(str(message.get("content", "")) for message in request)


def _row(
    response: Row, case: Case, k: int, place: int, prefix: float, suffix: float, acceptable: bool, method: str
) -> Row:
    return {
        "prompt_id": response["prompt_id"], "source": response["source"], "position": len(case.prompt) + place,
        "target_token": case.response[place], "draft_token": case.drafts[k], "prefix_score": round(prefix, 5),
        "suffix_score": round(suffix, 5), "score": round(prefix + suffix, 5), "label": int(acceptable), "method": method,
    }  # fmt: skip


def _arrays(found: Sequence[Scores], settings: LabelConfig, hidden_size: int) -> Arrays:
    """Everything but the rows, row-aligned."""
    empty = Scores(
        log_p=np.zeros((0, 2), np.float32), entropy=np.zeros(0, np.float32), rank=np.zeros(0, np.int32),
        original=np.zeros((0, settings.suffix_length), np.float32),
        substituted=np.zeros((0, settings.suffix_length), np.float32),
        hidden_target=np.zeros((0, hidden_size), np.float32), hidden_draft=np.zeros((0, hidden_size), np.float32),
        lookahead=np.zeros((0, LOOKAHEAD if settings.lookahead else 0), np.float32),
    )  # fmt: skip
    arrays: Arrays = {
        name: np.concatenate([getattr(empty, name), *(getattr(scores, name) for scores in found)])
        for name in Scores.__dataclass_fields__
    }
    for name in ("hidden_target", "hidden_draft"):
        arrays[name] = arrays[name].astype(settings.hidden_dtype)
    if not settings.lookahead:
        del arrays["lookahead"]
    return arrays


__all__ = ["METHODS", "LabelConfig", "label", "shipped_tau"]
