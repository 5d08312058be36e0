"""What is asked of the judge inside vLLM, by the engine's configuration and by single requests; what is refused.

Everything here reads vLLM's objects and imports none of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.models.tokens import end_ids, special_ids
from selfjudge.store import fingerprint, read_json, weight_files

KEY = "selfjudge"
COMPLAINTS = 100  # about requests, in the log of one engine
OFF = math.inf
"""No score is greater: the lossless rule, bit for bit. θ = 1 refuses as much, but the judge is asked."""


@dataclass(frozen=True)
class WorkerConfig:
    """The object under "selfjudge" of vLLM's `--additional-config`."""

    judge: str
    """A judge folder, or a repository of the hub."""
    theta: float | str | None = None
    quality: float | None = None
    guard: bool = True
    """Leave special tokens to the target."""

    @classmethod
    def read(cls, additional: Any) -> WorkerConfig:
        raw = additional.get(KEY) if isinstance(additional, Mapping) else None
        if not isinstance(raw, Mapping) or not isinstance(raw.get("judge"), str):
            raise SelfJudgeError(
                'JudgeWorker does not know its judge: give --additional-config \'{"selfjudge": {"judge": FOLDER}}\''
            )
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(raw) - set(known)):
            raise SelfJudgeError(f"unknown setting {unknown[0]!r} of the judge in vLLM; there are: {', '.join(known)}")
        if not isinstance(raw.get("guard", True), bool):
            raise SelfJudgeError(f"guard is true or false, not {raw['guard']!r}")
        return cls(**raw)

    def threshold(self, judge: Judge) -> float:
        """The θ of requests that ask for nothing else: as given, else R."""
        if self.theta is None and self.quality is None:
            return judge.threshold("R")
        return chosen_threshold(judge, self.theta, self.quality)


def chosen_threshold(judge: Judge, theta: Any, quality: Any) -> float:
    """θ by number or name, or by quality; one of them."""
    if (theta is None) == (quality is None):
        raise SelfJudgeError("quality chooses θ: give one of theta and quality")
    for name, value in (("theta", theta), ("quality", quality)):
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            raise SelfJudgeError(f"{name} must be a number, not {value!r}")
    if isinstance(quality, str):
        raise SelfJudgeError(f"quality is a share in [0, 1], not {quality!r}")
    return judge.threshold(theta) if quality is None else judge.quality(quality)


def requested_threshold(judge: Judge, default: float, extra_args: Mapping[str, Any] | None) -> float:
    """θ of one request: `extra_args` {"selfjudge": {"off": true} | {"theta": x} | {"quality": q}}, or that object as JSON text."""
    asked = (extra_args or {}).get(KEY)
    if asked is None:
        return default
    if isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except ValueError:
            raise SelfJudgeError(f"the request's selfjudge is no JSON: {asked[:60]!r}") from None
    if not isinstance(asked, Mapping) or len(asked) != 1 or not set(asked) <= {"off", "theta", "quality"}:
        raise SelfJudgeError(f"a request says one of off, theta and quality, not {str(asked)[:60]!r}")
    if "off" in asked:
        if not isinstance(asked["off"], bool):
            raise SelfJudgeError(f"off is true or false, not {asked['off']!r}")
        return OFF if asked["off"] else default
    return chosen_threshold(judge, asked.get("theta"), asked.get("quality"))


class Thresholds:
    """θ of each request. One whose wish cannot be read is decoded losslessly and named in the log, once."""

    def __init__(self, judge: Judge, default: float, warn: Callable[[str], None]) -> None:
        self.judge, self.default, self.warn = judge, default, warn
        self._complained: set[str] = set()

    def __call__(self, params: Any) -> float:
        """Of vLLM's `SamplingParams`."""
        try:
            return requested_threshold(self.judge, self.default, params.extra_args)
        except SelfJudgeError as error:
            if str(error) not in self._complained and len(self._complained) < COMPLAINTS:
                self._complained.add(str(error))
                self.warn(f"a request is decoded without the judge: {error}")
            return OFF


def refuse(config: Any) -> None:
    """Say no to what the judge cannot work with, before any weight is read."""
    spec, parallel, model = config.speculative_config, config.parallel_config, config.model_config
    if spec is None:
        raise SelfJudgeError("JudgeWorker has nothing to verify: give --speculative-config with a draft")
    method = getattr(spec, "rejection_sample_method", "standard")
    reasons = {
        f"rejection_sample_method {method}: use standard": method not in ("standard", "strict", "probabilistic"),
        "adaptive verification": getattr(spec, "enable_adaptive_verification", False),
        "batch-sharded sampling": getattr(parallel, "enable_batch_sharded_sampling", False),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"{model.logprobs_mode}, which would show its mark: use raw_logprobs": model.logprobs_mode.startswith("processed"),
        "LoRA adapters, which change the target": config.lora_config is not None,
        "watermarks": getattr(config, "watermark_config", None) is not None,
    }  # fmt: skip
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise SelfJudgeError(f"JudgeWorker does not work with {reason}")


def load(config: Any) -> tuple[WorkerConfig, Judge]:
    """The judge of a vLLM configuration, checked against its target."""
    refuse(config)
    settings = WorkerConfig.read(config.additional_config)
    judge = Judge.from_pretrained(settings.judge)
    model = config.model_config
    judge.check_target(model.model, target_sha256(model.model), model.get_hidden_size())
    settings.threshold(judge)
    return settings, judge


def target_sha256(model: str) -> str:
    """The hash under which judges know a target: of a pulled model the one of its manifest, else one of its weight files."""
    path = Path(model)
    manifest = path.parent / "manifest.json"
    if path.name == "target" and manifest.is_file():
        found = read_json(manifest)
        if isinstance(found, dict) and isinstance(found.get("sha256"), str):
            return str(found["sha256"])
    if path.is_file():
        return fingerprint([path])
    return fingerprint(weight_files(path if path.is_dir() else model))


def guarded_ids(settings: WorkerConfig, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Where the judge has no say: the special tokens that `Pair` finds."""
    if not settings.guard:
        return ()
    if tokenizer is None:
        raise SelfJudgeError("without a tokenizer special tokens are not known: leave out --skip-tokenizer-init")
    generation = SimpleNamespace(**model.try_get_generation_config())
    return special_ids(tokenizer, end_ids(generation, model.hf_text_config, tokenizer))
