"""Settings of the judge inside vLLM: of the engine, of single requests, and what is refused.

This module reads vLLM's objects; it imports neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.models.tokens import end_ids, special_ids
from selfjudge.store import fingerprint, parse_json, read_json, weight_files
from selfjudge.store.artefacts import PullManifest

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge

WORKER = "selfjudge.integrations.vllm.JudgeWorker"
KEY = "selfjudge"
MAX_WARNINGS = 100  # about requests, in the log of one engine
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
OFF = math.inf
"""The θ of lossless requests. θ = 1 accepts as little, but there the judge is asked."""


@dataclass(frozen=True)
class WorkerConfig:
    """The object under "selfjudge" of vLLM's `--additional-config`."""

    judge: str = ""
    """A judge folder, an embedded name, or a repository of the hub; `serve.command` fills in the judge that ships."""
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
            raise SelfJudgeError(f"`guard` must be true or false, not {raw['guard']!r}")
        return cls(**raw)

    def threshold(self, judge: Judge) -> float:
        """The θ of requests that name none."""
        if self.theta is None and self.quality is None:
            return judge.default_threshold
        return chosen_threshold(judge, self.theta, self.quality)


def chosen_threshold(judge: Judge | JudgeConfig, theta: Any, quality: Any) -> float:
    """θ by number or name, or by quality: one of the two must be given."""
    if (theta is None) == (quality is None):
        raise SelfJudgeError("`quality` chooses θ: give one of `theta` and `quality`")
    for name, value in (("theta", theta), ("quality", quality)):
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            raise SelfJudgeError(f"`{name}` must be a number, not {value!r}")
    if isinstance(quality, str):
        raise SelfJudgeError(f"`quality` must lie in [0, 1], not {quality!r}")
    return judge.threshold(theta) if quality is None else judge.quality(quality)


def requested_threshold(judge: Judge, default: float, extra_args: Mapping[str, Any] | None) -> float:
    """θ of one request: `extra_args` {"selfjudge": {"off": true} | {"theta": x} | {"quality": q}}.

    The inner object may also be JSON text.
    """
    options = (extra_args or {}).get(KEY)
    if options is None:
        return default
    if isinstance(options, str):
        try:
            options = parse_json(options)
        except ValueError:
            raise SelfJudgeError(f"the request's `selfjudge` is not JSON: {options[:60]!r}") from None
    if not isinstance(options, Mapping) or len(options) != 1 or not set(options) <= {"off", "theta", "quality"}:
        raise SelfJudgeError(f"a request gives one of `off`, `theta` and `quality`, not {str(options)[:60]!r}")
    if "off" in options:
        if not isinstance(options["off"], bool):
            raise SelfJudgeError(f"`off` must be true or false, not {options['off']!r}")
        return OFF if options["off"] else default
    return chosen_threshold(judge, options.get("theta"), options.get("quality"))


class Thresholds:
    """θ of each request. A request whose options cannot be read is decoded losslessly, and the log says so once."""

    def __init__(self, judge: Judge, default: float, warn: Callable[[str], None]) -> None:
        self.judge, self.default, self.warn = judge, default, warn
        self._warned: set[str] = set()

    def __call__(self, params: Any) -> float:
        """Of vLLM's `SamplingParams`."""
        try:
            return requested_threshold(self.judge, self.default, params.extra_args)
        except SelfJudgeError as error:
            if str(error) not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(str(error))
                self.warn(f"a request is decoded without the judge: {error}")
            return OFF


def check_supported(config: Any) -> None:
    """Refuse an engine that the judge cannot work in, before any weight is read."""
    spec, parallel, model = config.speculative_config, config.parallel_config, config.model_config
    if spec is None:
        raise SelfJudgeError("JudgeWorker has nothing to verify: give --speculative-config with a draft")
    method, mode = getattr(spec, "rejection_sample_method", "standard"), model.logprobs_mode
    reasons = {
        f"rejection_sample_method {method}: use standard": method not in ("standard", "strict", "probabilistic"),
        "adaptive verification": getattr(spec, "enable_adaptive_verification", False),
        "batch-sharded sampling": getattr(parallel, "enable_batch_sharded_sampling", False),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"{mode}, which would show its mark: use raw_logprobs": mode.startswith("processed"),
        "LoRA adapters, which change the target": config.lora_config is not None,
        "watermarks": getattr(config, "watermark_config", None) is not None,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise SelfJudgeError(f"JudgeWorker does not work with {reason}")


def load(config: Any) -> tuple[WorkerConfig, Judge]:
    """The judge of a vLLM configuration, checked against its target."""
    from selfjudge.judge.model import Judge

    check_supported(config)
    settings = WorkerConfig.read(config.additional_config)
    judge = Judge.from_pretrained(settings.judge)
    model = config.model_config
    judge.check_target(model.model, target_sha256(model.model), model.get_hidden_size())
    settings.threshold(judge)
    return settings, judge


def target_sha256(model: str) -> str:
    """The hash by which judges know a target: from the manifest of a pulled model, else that of its weight files."""
    path = Path(model)
    manifest = path.parent / "manifest.json"
    if path.name == "target" and manifest.is_file():
        with contextlib.suppress(SelfJudgeError):  # somebody else's
            return str(read_json(manifest, PullManifest)["sha256"])
    if path.is_file():
        return fingerprint([path])
    return fingerprint(weight_files(path if path.is_dir() else model))


def guarded_ids(settings: WorkerConfig, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that are left to the target: the special tokens, as `Pair` has them."""
    if not settings.guard:
        return ()
    if tokenizer is None:
        raise SelfJudgeError("special tokens are not known without a tokenizer: leave out --skip-tokenizer-init")
    generation = SimpleNamespace(**model.try_get_generation_config())
    return special_ids(tokenizer, end_ids(generation, model.hf_text_config, tokenizer))
