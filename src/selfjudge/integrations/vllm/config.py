"""Settings of the rules inside vLLM: of the engine, of single requests, and what is refused.

This module reads vLLM's objects; it imports neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from selfjudge.decoding.rule_parser import default_rule, names_threshold, parse_rule, read_rule
from selfjudge.decoding.rules import AcceptanceRule, Judged, JudgeOnly
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
MAX_BUILT = 256  # rules that are kept for requests to come
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
ASKED = ("rule", "theta", "quality", "price")


@dataclass(frozen=True)
class WorkerConfig:
    """The object under "selfjudge" of vLLM's `--additional-config`."""

    judge: str = ""
    """A judge folder, an embedded name, or a repository of the hub; `serve.command` fills in the judge that ships."""
    rule: str | None = None
    """Of requests that name none. If not given: exact; judged where a judge, θ, a quality or a price is given."""
    theta: float | str | None = None
    quality: float | None = None
    price: float | None = None
    guard: bool = True
    """Leave special tokens to the target, whatever the rule."""

    @property
    def own_rule(self) -> str:
        """The rule of requests that name nothing."""
        if self.rule is not None:
            return self.rule
        return default_rule(self.judge or None, self.theta, self.quality, self.price)

    @classmethod
    def read(cls, additional: Any) -> WorkerConfig:
        raw = additional.get(KEY) if isinstance(additional, Mapping) else None
        raw = raw if isinstance(raw, Mapping) else {}
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(raw) - set(known)):
            raise SelfJudgeError(f"unknown setting {unknown[0]!r} of the rule in vLLM; there are: {', '.join(known)}")
        if not isinstance(raw.get("guard", True), bool):
            raise SelfJudgeError(f"`guard` must be true or false, not {raw['guard']!r}")
        _check_types(raw)
        config = cls(**raw)
        if not isinstance(config.judge, str) or (not config.judge and uses_judge(config.own_rule)):
            raise SelfJudgeError(
                'JudgeWorker does not know its judge: give --additional-config \'{"selfjudge": {"judge": FOLDER}}\''
            )
        return config


def uses_judge(spec: str) -> bool:
    """Whether the rule of this text asks a judge."""
    return issubclass(read_rule(spec)[0], Judged)


def _check_types(options: Mapping[str, Any]) -> None:
    """Refuse values of `ASKED` that no request can mean."""
    if not isinstance(options.get("rule"), (str, type(None))):
        raise SelfJudgeError(f"`rule` must be text, such as 'margin:0.5', not {str(options['rule'])[:60]!r}")
    for name in ("theta", "quality", "price"):
        value = options.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            raise SelfJudgeError(f"`{name}` must be a number, not {value!r}")
        if isinstance(value, str) and name != "theta":
            raise SelfJudgeError(f"`{name}` must be a number, not {value!r}")
    if options.get("theta") is not None and options.get("quality") is not None:
        raise SelfJudgeError("`quality` chooses θ: give one of `theta` and `quality`")


class RequestRules:
    """The rule of each request; None is lossless.

    A request whose options cannot be read, or whose rule needs greedy decoding and has a temperature, is decoded
    losslessly, and the log says so once.
    """

    def __init__(
        self,
        settings: WorkerConfig,
        judge: Judge | JudgeConfig | None,
        special: tuple[int, ...],
        gamma: int,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """With a judge's config alone, rules can be checked and not used."""
        self.settings, self.judge, self.special, self.gamma, self.warn = settings, judge, special, gamma, warn
        self._built: dict[tuple[Any, ...], AcceptanceRule | None] = {}
        self._warned: set[str] = set()
        self.default = self.build({**{name: getattr(settings, name) for name in ASKED}, "rule": settings.own_rule})

    def __call__(self, params: Any) -> AcceptanceRule | None:
        """Of vLLM's `SamplingParams`."""
        try:
            rule = self.requested(params.extra_args)
            if rule is not None and params.temperature and not _samples(rule):
                raise SelfJudgeError(f"rule {rule.name!r} is greedy here: leave out the temperature")
        except SelfJudgeError as error:
            if self.warn and str(error) not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(str(error))
                self.warn(f"a request is decoded losslessly: {error}")
            return None
        return rule

    def requested(self, extra_args: Mapping[str, Any] | None) -> AcceptanceRule | None:
        """`extra_args` {"selfjudge": {"off": true}}, or one or more of `rule`, `theta`, `quality` and `price`.

        The inner object may also be JSON text.
        """
        options = (extra_args or {}).get(KEY)
        if options is None:
            return self.default
        if isinstance(options, str):
            try:
                options = parse_json(options)
            except ValueError:
                raise SelfJudgeError(f"the request's `selfjudge` is not JSON: {options[:60]!r}") from None
        if isinstance(options, Mapping) and list(options) == ["off"]:
            if not isinstance(options["off"], bool):
                raise SelfJudgeError(f"`off` must be true or false, not {options['off']!r}")
            return None if options["off"] else self.default
        if not isinstance(options, Mapping) or not options or not set(options) <= set(ASKED):
            raise SelfJudgeError(
                f"a request gives `off`, or some of `rule`, `theta`, `quality` and `price`, not {str(options)[:60]!r}"
            )
        if options.get("rule", "") is None:
            raise SelfJudgeError("`rule` must be text, not None")
        lossless = read_rule(self.settings.own_rule)[0].lossless  # then a threshold or a price alone means judged
        return self.build({"rule": "judged" if lossless else self.settings.own_rule, **options})

    def build(self, options: Mapping[str, Any]) -> AcceptanceRule | None:
        """The same object for the same options."""
        _check_types(options)
        key: tuple[Any, ...] = tuple(options.get(name) for name in ASKED)
        if key not in self._built:
            if len(self._built) >= MAX_BUILT:
                self._built.clear()
            self._built[key] = self._parsed(*key)
        return self._built[key]

    def _parsed(self, spec: str, theta: Any, quality: Any, price: Any) -> AcceptanceRule | None:
        kind, values = read_rule(spec)
        if values.get("guard", self.settings.guard) != self.settings.guard:
            raise SelfJudgeError("the guard of special tokens is a setting of the engine: leave it out of the rule")
        if kind is JudgeOnly:
            raise SelfJudgeError("rule 'judge_only' refuses aligned drafts, which vLLM accepts: use rule judged")
        judged = issubclass(kind, Judged)
        theta = f"q{quality}" if quality is not None else theta
        if judged and theta is None and price is None and not names_threshold(spec):
            ours = self.settings
            theta = f"q{ours.quality}" if ours.quality is not None else ours.theta
        rule: Any = parse_rule(
            spec, special=self.special, judge=cast("Any", self.judge) if judged else None, theta=theta, price=price
        )
        rule.check(self.gamma)
        if rule.lossless:
            return None
        return cast("AcceptanceRule", replace(rule, guard=self.settings.guard))


def _samples(rule: AcceptanceRule) -> bool:
    """Whether a rule goes with a temperature: one that does not look at what follows a draft."""
    return isinstance(rule, Judged) and rule.price is None and not rule.confirm


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
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise SelfJudgeError(f"JudgeWorker does not work with {reason}")


def load(config: Any) -> tuple[WorkerConfig, Judge | None]:
    """The settings of a vLLM configuration and the judge, if they name one, checked against its target."""
    check_supported(config)
    settings = WorkerConfig.read(config.additional_config)
    judge = None
    if settings.judge:
        from selfjudge.judge.model import Judge

        judge, model = Judge.from_pretrained(settings.judge), config.model_config
        known = target_sha256(model.model, judge.config.target_sha256)
        judge.check_target(model.model, known, model.get_hidden_size())
    RequestRules(settings, judge, (), config.speculative_config.num_speculative_tokens)
    return settings, judge


def target_sha256(model: str, wanted: str = "") -> str:
    """The hash by which judges know a target: from the manifest of a pulled model, else that of its weight files.

    A judge that was trained with the folder of a pulled model knows the latter: where `wanted` is not the former.
    """
    path = Path(model)
    manifest = path.parent / "manifest.json"
    if path.name == "target" and manifest.is_file():
        with contextlib.suppress(SelfJudgeError):  # somebody else's
            pulled = str(read_json(manifest, PullManifest)["sha256"])
            if wanted in ("", pulled):
                return pulled
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
