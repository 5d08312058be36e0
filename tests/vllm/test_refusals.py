"""What the worker refuses, with vLLM's real configuration and classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import TINY_GAMMA, started, tiny_engine
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.rejection_sampler import RejectionSampler

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm import config, v1
from selfjudge.integrations.vllm.signatures import adapter_of, exactly
from selfjudge.judge.model import Judge


@pytest.fixture(scope="module")
def real(tiny: Path) -> Any:
    options = tiny_engine(tiny, dtype="float32", enforce_eager=True)
    return EngineArgs(**options).create_engine_config()


def test_a_good_configuration_is_taken(real: Any, tiny: Path) -> None:
    settings, judge = config.load(real)
    rule = config.RequestRules(settings, judge, (), TINY_GAMMA).default
    assert rule is not None
    assert getattr(rule, "theta", None) == 0.5
    assert config.guarded_ids(real.model_config, _tokenizer(real)) == (0, 1, 2, 3)


def _tokenizer(real: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(real.model_config)


def put(where: str, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(real: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(getattr(real, where) if where else real, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("", "speculative_config", None), "nothing to verify: give --speculative-config"),
        (put("speculative_config", "rejection_sample_method", "block"), "rejection_sample_method block: use standard"),
        (put("speculative_config", "rejection_sample_method", "synthetic"), "rejection_sample_method synthetic"),
        (put("speculative_config", "rejection_sample_method", "fly"), "rejection_sample_method fly: use standard"),
        (put("speculative_config", "enable_adaptive_verification", True), "adaptive verification"),
        (put("parallel_config", "enable_batch_sharded_sampling", True), "batch-sharded sampling"),
        (put("parallel_config", "prefill_context_parallel_size", 2), "prefill context parallelism"),
        (put("model_config", "logprobs_mode", "processed_logprobs"), "processed_logprobs, which would show its mark"),
        (put("", "lora_config", object()), "LoRA adapters, which change the target"),
        (put("", "watermark_config", object()), "watermarks"),
        (put("model_config", "skip_tokenizer_init", True), "--skip-tokenizer-init: what the guards look for is not"),
        (put("", "additional_config", {"selfjudge": {"rule": "judged"}}), "does not know its judge"),
        (put("", "additional_config", {"selfjudge": {"rule": "fly"}}), "fly with window 6 needs `gamma` > 6, not 3"),
        (put("", "additional_config", {"selfjudge": {"rule": "topk", "price": 0.1}}), "rule 'topk' has no price"),
    ],
)
def test_what_the_judge_cannot_work_with(
    real: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], message: str
) -> None:
    change(real, monkeypatch)
    with pytest.raises(SelfJudgeError, match=message):
        config.load(real)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "reads hidden states of width 64"),
        ({"target": "other", "target_sha256": "f" * 64}, "was trained for other"),
    ],
)
def test_a_judge_of_another_target(
    real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    given = json.loads((Path(real.additional_config["selfjudge"]["judge"]) / "config.json").read_text())
    from selfjudge.judge.config import JudgeConfig

    Judge(JudgeConfig(**{**given, **changes})).save_pretrained(tmp_path)
    monkeypatch.setattr(real, "additional_config", {"selfjudge": {"judge": str(tmp_path)}})
    with pytest.raises(SelfJudgeError, match=message):
        config.load(real)


def test_an_unknown_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, metadata: Any, logits: Any) -> None: ...

    monkeypatch.setattr(RejectionSampler, "forward", forward)
    with pytest.raises(SelfJudgeError, match=r"does not know vLLM .*forward takes \(metadata, logits\), known is"):
        adapter_of(RejectionSampler.__module__)


def test_an_unknown_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class State: ...

    monkeypatch.setattr(v1, "ExecuteModelState", State)
    with pytest.raises(SelfJudgeError, match=r"State has no logits, spec_decode_metadata, sample_hidden_states"):
        v1.check()


def test_a_sampler_of_another_class_is_refused() -> None:
    with pytest.raises(SelfJudgeError, match="object is used where RejectionSampler is known"):
        exactly(object(), RejectionSampler)


def test_an_engine_without_drafts_does_not_start(tiny: Path) -> None:
    engine = tiny_engine(tiny)
    del engine["speculative_config"]
    said, answers = started(engine, [], v2=False)
    assert not answers
    assert "SelfJudgeError: JudgeWorker has nothing to verify: give --speculative-config with a draft" in said
