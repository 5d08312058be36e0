"""A pair and a rule as a command of SGLang, and a head as it loads it. Written by its source, never run.
SGLang decodes losslessly, or accepts a draft d where p(d) ≥ `threshold_single` or u ≤ p(d)/`threshold_acc`, which is
rule `sglang` without our guards. It reads neither threshold for greedy requests, and has no other rule."""

from __future__ import annotations

from pathlib import Path

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_baselines import TwoThresholds
from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json, whole_tensors, write_json


def check(rule: AcceptanceRule) -> None:
    """Refuse a rule that SGLang does not have."""
    if not (rule.lossless or isinstance(rule, TwoThresholds)):
        raise SelfJudgeError(f"SGLang has no rule like {rule.name!r}: use rule sglang, or exact")


def describe(rule: AcceptanceRule) -> str:
    """How a rule differs there from ours."""
    if rule.lossless:
        return "lossless here and there; sampled answers take other random numbers"
    return "SGLang ignores both thresholds for greedy requests, and has no guards: no certificate covers this"


def command(target: str, draft: str, rule: AcceptanceRule, gamma: int, *, head: bool) -> list[str]:
    """The words that start SGLang with γ drafts in a chain; a draft that is a `head` was exported for it."""
    flags = {"algorithm": "EAGLE3" if head else "STANDALONE", "draft-model-path": draft}
    flags |= {"num-steps": str(gamma), "eagle-topk": "1", "num-draft-tokens": str(gamma + 1)}
    if isinstance(rule, TwoThresholds):
        flags |= {"accept-threshold-single": f"{rule.single:g}", "accept-threshold-acc": f"{rule.acc:g}"}
    words = [word for name, value in flags.items() for word in (f"--speculative-{name}", value)]
    return ["python", "-m", "sglang.launch_server", "--model-path", target, *words]


def convert_head(folder: Path) -> None:
    """Rewrite an exported head of speculators' format for SGLang, which counts layers by outputs (vLLM: by inputs),
    adds to the state before its norm, and takes the target's embedding."""
    from safetensors.torch import load_file, save_file  # imports torch

    record, file = read_json(folder / "config.json"), folder / "model.safetensors"
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(file).items()}
    if record["norm_before_residual"] or "embed_tokens.weight" in tensors:
        what = "norm before the residual" if record["norm_before_residual"] else "own embedding"
        raise SelfJudgeError(f"SGLang loads no head with its {what}: {folder} is as vLLM loads it")
    layers = [layer - 1 for layer in record["eagle_aux_hidden_state_layer_ids"]]
    with whole_tensors(file) as written:
        save_file(tensors, written, {"format": "pt"})
    config = {
        **record["transformer_layer_config"],
        **{name: record[name] for name in ("draft_vocab_size", "target_hidden_size", "dtype")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    write_json(folder / "config.json", config)
