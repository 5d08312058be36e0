"""Settings of our rules inside vLLM, of engine and requests, and what is refused; imports neither vLLM nor torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rule_parser import STRICT, RuleRequest, with_options
from selfjudge.decoding.rules import AcceptanceRule, Judged, JudgeOnly
from selfjudge.decoding.rules_baselines import Divergence, RegretBudget
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.models.tokens import end_ids, special_ids
from selfjudge.store import fingerprint, parse_json, read_json, weight_files
from selfjudge.store.schema import PullManifest

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge

INSTALL = "in an environment of its own: pip install '.[vllm]' vllm==0.26.0 (docs/vllm.md)"
WORKER = "selfjudge.integrations.vllm.JudgeWorker"
KEY = "selfjudge"
MAX_WARNINGS = 100  # the most warnings about requests in the log of one engine
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
REQUEST_FIELDS = ("rule", "theta", "quality", "price", *STRICT)


def parse_object(text: str, name: str) -> dict[str, Any]:
    """A JSON object that somebody wrote."""
    with contextlib.suppress(ValueError):
        if isinstance(value := parse_json(text), dict):
            return value
    raise SelfJudgeError(f"{name} must be a JSON object, not {text[:60]!r}")


def read_settings(additional: Any) -> RuleRequest:
    """The judge and the rule of requests that name none: the object under "selfjudge" of `--additional-config`."""
    raw = additional.get(KEY) if isinstance(additional, Mapping) else None
    raw = dict(raw) if isinstance(raw, Mapping) else {}
    known = ("judge", *REQUEST_FIELDS)
    if unknown := sorted(set(raw) - set(known)):
        raise SelfJudgeError(f"unknown setting {unknown[0]!r} of the rule in vLLM; there are: {', '.join(known)}")
    judge = raw.pop("judge", None) or None
    own = RuleRequest(judge=judge, **raw)
    if not isinstance(judge, (str, type(None))) or (judge is None and own.needs_judge):
        raise SelfJudgeError(
            'JudgeWorker does not know its judge: give --additional-config \'{"selfjudge": {"judge": FOLDER}}\''
        )
    return own


def read_options(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is under "selfjudge", an object or JSON text: {"off": True}, or some of `REQUEST_FIELDS`; nothing where a
    request leaves its rule to the engine, as with {} and {"off": false}."""
    given = (extra_args or {}).get(KEY)
    given = {} if given is None else given
    if isinstance(given, str):
        given = parse_object(given, "the request's `selfjudge`")
    if isinstance(given, Mapping) and list(given) == ["off"] and isinstance(given["off"], bool):
        return {"off": True} if given["off"] else {}
    if not isinstance(given, Mapping) or not set(given) <= set(REQUEST_FIELDS):
        fields = ", ".join(REQUEST_FIELDS)
        raise SelfJudgeError(f"a request gives `off` as true or false, or some of {fields}, not {str(given)[:60]!r}")
    return {name: value for name, value in given.items() if value is not None}


class RequestRules:
    """The rule of each request; None is lossless. A request with options that cannot be read, or with a temperature and
    a rule that is greedy here, is decoded losslessly, and the log says so once."""

    def __init__(
        self,
        settings: RuleRequest,
        judge: Judge | JudgeConfig | None,
        special: tuple[int, ...],
        gamma: int,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`settings` as `read_settings` has them. With a judge's config alone, rules can be checked and not used."""
        self.judge, self.special, self.gamma, self.warn = judge, special, gamma, warn
        self.own = replace(settings.named(), judge=None)
        self._warned: set[str] = set()
        self.default = self._resolve(self.own)

    def __call__(self, params: Any) -> AcceptanceRule | None:
        """The rule of a request with these `SamplingParams` of vLLM; none inside a grammar."""
        if getattr(params, "structured_outputs", None) is not None:
            return None
        try:
            rule = self.requested(params.extra_args)
            alone = isinstance(rule, Judged) and rule.price is None and not rule.matches_needed
            if rule is not None and params.temperature and not alone:  # it looks at what follows a draft
                raise SelfJudgeError(f"rule {rule.name!r} is greedy here: leave out the temperature")
        except SelfJudgeError as error:
            if self.warn and str(error) not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(str(error))
                self.warn(f"a request is decoded losslessly: {error}")
            return None
        return rule

    def requested(self, extra_args: Mapping[str, Any] | None) -> AcceptanceRule | None:
        """The rule of a request with these `extra_args`."""
        options = read_options(extra_args)
        if "off" in options:
            return None
        return self._resolve(RuleRequest(**options).inherit(self.own)) if options else self.default

    def _resolve(self, request: RuleRequest) -> AcceptanceRule | None:
        if not request.options.get("guard", True):
            raise SelfJudgeError("in vLLM special tokens are left to the target: leave `guard` out of the rule")
        if request.kind is JudgeOnly:
            raise SelfJudgeError("rule 'judge_only' rejects aligned drafts, which vLLM accepts: use rule judged")
        if request.kind in (Divergence, RegretBudget):
            lacks = "the draft's logits" if request.kind is Divergence else "what an answer has spent so far"
            raise SelfJudgeError(f"rule {request.kind.name!r} needs {lacks}, which it does not have in vLLM")
        if request.kind.lossless:
            return None
        guard = None if "guard" in request.options else True
        guarded = replace(request, rule=with_options(request.text, guard=guard), gamma=self.gamma)
        return guarded.resolve(self.special, self.judge, bare=False)


def check_supported(config: Any) -> None:
    """Refuse an engine that our rules cannot work in, before any weight is read."""
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
        "--skip-tokenizer-init: what the guards look for is not known": getattr(model, "skip_tokenizer_init", False),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise SelfJudgeError(f"JudgeWorker does not work with {reason}")


def load(config: Any) -> tuple[RuleRequest, Judge | None]:
    """The settings of a vLLM configuration and the judge, if they name one, checked against its target."""
    check_supported(config)
    settings = read_settings(config.additional_config)
    judge = None
    if settings.judge:
        from selfjudge.judge.model import Judge

        judge, model = Judge.from_pretrained(settings.judge), config.model_config
        known = target_sha256(model.model, judge.config.target_sha256)
        judge.config.check_target(model.model, known, model.get_hidden_size())
    RequestRules(settings, judge, (), config.speculative_config.num_speculative_tokens)
    return settings, judge


def target_sha256(model: str, wanted: str = "") -> str:
    """The hash by which judges know a target: from a pulled model's manifest if it is `wanted` or nothing is, else that
    of the weight files, by which a judge trained with the folder of a pulled model knows it."""
    path = Path(model)
    manifest = path.parent / "manifest.json"
    if path.name == "target" and manifest.is_file():
        with contextlib.suppress(SelfJudgeError):  # the manifest of another program
            pulled = str(read_json(manifest, PullManifest)["sha256"])
            if wanted in ("", pulled):
                return pulled
    return fingerprint([path] if path.is_file() else weight_files(path if path.is_dir() else model))


def guarded_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that are left to the target: the special tokens, as `Pair` has them."""
    generation = SimpleNamespace(**model.try_get_generation_config())
    return special_ids(tokenizer, end_ids(generation, model.hf_text_config, tokenizer))
