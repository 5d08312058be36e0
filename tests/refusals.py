"""Wrong input, as command lines: what is known from the command line and small files, and what only the models tell."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig

from conftest import tiny_head, tiny_model
from fake_certificate import recipe_folder, tamper
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.convert import quiet
from selfjudge.models.eagle import EagleHead, write_head

Commands = dict[str, list[str]]


def write_inputs(folder: Path, checkpoints: dict[str, str]) -> None:
    """The files that the commands below name."""
    Judge(JudgeConfig(hidden_size=7, target="t")).save_pretrained(folder / "narrow")
    Judge(JudgeConfig(hidden_size=32, target="another", target_sha256="f" * 64)).save_pretrained(folder / "foreign")
    Judge(JudgeConfig(hidden_size=32, target=checkpoints["target"])).save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "odd")
    config = json.loads((folder / "odd" / "config.json").read_text())
    (folder / "odd" / "config.json").write_text(json.dumps({**config, "hidden_size": "x"}))
    (folder / "prompts.jsonl").write_text('{"question": "no prompt here"}\n')
    (folder / "numbers.jsonl").write_text('{"prompt": 5}\n')
    (folder / "asked.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w9 w8 w7"}\n')
    stranger: Any = SimpleNamespace(
        name="somebody's", target_id=checkpoints["target"], draft_id=checkpoints["draft"],
        target_sha256="f" * 64, draft_sha256="f" * 64,
    )  # fmt: skip
    recipe_folder(folder / "tuned", stranger)
    recipe_folder(folder / "tuned-exact", stranger, rule="exact", certified=False)
    recipe_folder(folder / "tuned-words", stranger, measure="overlap")
    for name, change in (("older", {"format_version": 1}), ("changed", {"gamma": 9})):
        tamper(
            recipe_folder(folder / name, stranger), "recipe.json", lambda content, change=change: content.update(change)
        )
    (folder / "begun").mkdir()
    (folder / "begun" / "settings.json").write_text("{}")
    (folder / "page.html").mkdir()
    (folder / "cut.gguf").write_bytes(_small_gguf(b"llama", 0)[:-1])
    (folder / "blocks.gguf").write_bytes(_small_gguf(b"llama", 99))
    (folder / "mamba.gguf").write_bytes(_small_gguf(b"mamba", 0))
    for name, text in (("damaged", "[]"), ("unreadable", "{")):
        (folder / name).mkdir()
        (folder / name / "summary.json").write_text(text)
    shutil.copytree(checkpoints["target"], folder / "bare")
    (folder / "bare" / "chat_template.jinja").unlink()
    shutil.copytree(checkpoints["target"], folder / "gpt2")
    with quiet():
        tiny_model("gpt2").save_pretrained(folder / "gpt2")
    _write_heads(folder)


def _write_heads(folder: Path) -> None:
    """Heads that fit the target of the checkpoints, and others; only one says for which target it was trained."""
    target = tiny_model(seed=1)
    head = tiny_head(target)
    write_head(head, folder / "head")
    head.target, head.target_sha256 = "another", "f" * 64
    write_head(head, folder / "foreign-head")
    write_head(tiny_head(tiny_model(hidden_size=16, num_attention_heads=2)), folder / "narrow-head")
    layer = LlamaConfig(
        **head.config.layer.to_dict() | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
    )
    odd = EagleHead(replace(head.config, layer=layer), head.draft_ids)
    write_head(odd, folder / "odd-head")
    deep = tiny_model(num_hidden_layers=4)
    for name, entries in (
        ("deep-head", {}),
        ("normed-head", {"norm_before_fc": True}),
        ("small-map-head", {"draft_vocab_size": 7}),
    ):
        write_head(tiny_head(deep), folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, **entries}))


def _small_gguf(architecture: bytes, kind: int) -> bytes:
    """A file with one tensor, whose blocks are of this type."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)
    head += text(b"x") + struct.pack("<IQIQ", 1, 32, kind, 0)
    return head + bytes(-len(head) % 32 + 128)


def known_at_once(folder: Path, checkpoints: dict[str, str]) -> Commands:
    """Refused from the command line and small files alone."""
    target, draft = ["--target", checkpoints["target"]], ["--draft", checkpoints["draft"]]
    new, asked = ["--out", str(folder / "new")], str(folder / "asked.jsonl")
    ask = ["generate", "w1 w2", *target, *draft]
    serve = ["serve", *target, *draft, "--port", "0"]
    vllm = ["serve", "--backend", "vllm"]
    distill = ["distill", *target, "--out", str(folder / "draft")]
    label = ["label", *target, *draft, "--prompts", asked]
    train = ["train", str(folder), *new]
    evaluate = ["eval", "--tasks", f"file:{asked}", *target, *draft, "--gammas", "2", *new]
    tune = ["tune", "--prompts", asked, *target, *draft, *new]
    return {
        "export of nothing": ["export", *new, *target],
        "export of a model": ["export", *new, *target, *draft],
        "export into": ["export", "--pair", "qwen2.5-coder-1.5b", "--out", str(folder)],
        "unknown pair": ["generate", "hi", "--pair", "nobody"],
        "nearly a model": ["generate", "hi", "--target", "smollm2-135"],
        "missing file": ["generate", "hi", "--target", "./missing.gguf", *draft],
        "a relaxed rule without drafts": [*ask, "--rule", "topk", "--gamma", "0"],
        "no draft": ["generate", "hi", *target, "--gamma", "2"],
        "empty prompt": ["generate", " ", *target, *draft],
        "gamma below": [*ask, "--gamma", "-2"],
        "gamma above": [*ask, "--gamma", "500"],
        "gamma of another kind": [*ask, "--gamma", "maybe"],
        "max-new-tokens": [*ask, "--max-new-tokens", "0"],
        "no number": [*ask, "--seed", "x"],
        "theta": [*ask, "--rule", "judged", "--theta", "1.5"],
        "quality": [*ask, "--quality", "90"],
        "no judge": [*ask, "--rule", "judged"],
        "judge unasked": [*ask, "--rule", "exact", "--judge", str(folder / "plain")],
        "no judge folder": [*ask, "--judge", str(folder / "begun")],
        "judge nowhere": [*ask, "--judge", "nowhere"],
        "judge not on the hub": [*ask, "--judge", "no-such-org/no-such-judge"],
        "odd judge": [*ask, "--judge", str(folder / "odd")],
        "unknown rule": [*ask, "--rule", "nope"],
        "rule option": [*ask, "--rule", "topk:z=1"],
        "rule range": [*ask, "--rule", "topk:99999999999"],
        "rule number": [*ask, "--rule", "topk:x"],
        "rule option twice": [*ask, "--rule", "margin:1,threshold=2"],
        "fly": [*ask, "--rule", "fly", "--gamma", "4"],
        "fly at a device's default": ["eval", "--tasks", "arithmetic", *new, "--rules", "fly:window=4", "--device", "cpu"],
        "judge of another pair": ["generate", "hi", "--judge", "qwen2.5-coder-1.5b"],
        "temperature": [*ask, "--rule", "exact", "--temperature", "0.7"],
        "temperature range": [*ask, "--rule", "sampling", "--temperature", "0.001"],
        "top-p": [*ask, "--rule", "sampling", "--top-p", "1.5"],
        "quality and theta": [*ask, "--judge", str(folder / "plain"), "--theta", "F", "--quality", "0.9"],
        "two thresholds": [*ask, "--rule", "judged:0.5", "--judge", str(folder / "plain"), "--theta", "0.4"],
        "price and theta": [*ask, "--judge", str(folder / "plain"), "--theta", "F", "--price", "0.1"],
        "price and quality of a server": [*serve, "--quality", "0.9", "--price", "0.1"],
        "price and margin": [*ask, "--rule", "margin:0.5", "--price", "0.1"],
        "two prices": [*ask, "--rule", "margin:price=0.5", "--price", "0.1"],
        "price without harm": [*ask, "--rule", "topk", "--price", "0.1"],
        "price below": [*ask, "--price", "-1"],
        "price when sampling": [*ask, "--judge", str(folder / "plain"), "--price", "0.1", "--temperature", "0.7"],
        "price and confirmation": [*ask, "--rule", "judged:confirm=2", "--judge", str(folder / "plain"), "--price", "1"],
        "no such threshold": [*ask, "--judge", str(folder / "plain"), "--theta", "Q"],
        "no curve": [*ask, "--judge", str(folder / "plain"), "--quality", "0.9"],
        "device": [*ask, "--device", "tpu9"],
        "dtype": [*ask, "--dtype", "int3"],
        "draft dtype": [*ask, "--draft-dtype", "float16"],
        "option": ["generate", "hi", "--no-such-option"],
        "nearly an option": [*ask, "--gama", "3"],
        "argument": ["generate"],
        "ls": ["ls", "nope"],
        "pull": ["pull", "nope"],
        "repeats": ["bench", "decode", *target, *draft, "--repeats", "0"],
        "gammas": ["bench", "decode", *target, *draft, "--gammas", "1,x"],
        "gammas range": ["bench", "decode", *target, *draft, "--gammas", "1,50"],
        "prompts": ["bench", "decode", *target, *draft, "--prompts", str(folder / "prompts.jsonl")],
        "prompt type": ["bench", "decode", *target, *draft, "--prompts", str(folder / "numbers.jsonl")],
        "source count": [*distill, "--prompts", "self:0"],
        "split": [*distill, "--prompts", "math500"],
        "no such file to learn from": [*distill, "--prompts", str(folder / "gone.jsonl")],
        "source": [*distill, "--prompts", "self:5xq"],
        "twice": [*distill, "--prompts", "self:5", "--prompts", "self:6"],
        "width": [*distill, "--width", "100"],
        "minutes": [*distill, "--minutes", "0"],
        "method": [*label, *new, "--method", "magic"],
        "both taus": [*label, *new, "--tau", "-5", "--calibrate", "arithmetic"],
        "tau of consequences": [*label, *new, "--method", "consequences", "--tau", "-5"],
        "calibration of consequences": [*label, *new, "--method", "consequences", "--calibrate", "arithmetic"],
        "uncheckable": [*label, *new, "--calibrate", "dolly"],
        "open prompts": [*label, *new, "--method", "autojudge"],
        "limit of counts": ["label", *target, *draft, "--prompts", "self:500", "--limit", "50", *new],
        "answers": ["label", *target, *draft, "--prompts", "self:5x3", "--tau", "-5", *new],
        "split for tests": ["label", *target, *draft, "--prompts", "livecodebench/test-1", *new, "--tau", "-5"],
        "no such file to label": ["label", *target, *draft, "--prompts", str(folder / "gone.jsonl"), *new, "--tau", "-5"],
        "broken prompts to label": [*label, "--prompts", str(folder / "prompts.jsonl"), *new, "--tau", "-5"],
        "engine options": [*label, *new, "--engine-options", "{}"],
        "no tau": [*label, *new],
        "no tau of this length": ["label", *new, "--suffix-length", "3"],
        "int8": [*label, *new, "--tau", "-5", "--dtype", "int8"],
        "labels in q4": [*label, *new, "--tau", "-5", "--dtype", "q4"],
        "a draft from q4": [*distill, "--dtype", "q4"],
        "begun": [*label, "--out", str(folder / "begun"), "--tau", "-5"],
        "strangers": ["distill", *target, "--out", str(folder)],
        "unfinished": ["labels", "info", str(folder / "begun")],
        "no labels": ["labels", "info", str(folder)],
        "unfinished labels": ["train", str(folder / "begun"), *new],
        "train into": ["train", str(folder), "--out", str(folder)],
        "train below a file": ["train", str(folder), "--out", str(folder / "prompts.jsonl" / "judge")],
        "labels gone": ["train", str(folder / "gone"), *new],
        "train features": [*train, "--features", "taste"],
        "as released, and not": [*train, "--as-released", "--features", "hidden+margin+previous"],
        "share": [*train, "--acceptable", "2"],
        "share and tau": [*train, "--acceptable", "0.3", "--tau", "-1"],
        "report nowhere": ["report", str(folder / "nowhere")],
        "report nothing": ["report", str(folder / "begun")],
        "report page": ["report", str(folder / "begun"), "--out", str(folder / "report.pdf")],
        "report folder": ["report", str(folder / "begun"), "--out", str(folder / "page.html")],
        "report among others": ["report", str(folder / "begun"), "--out", str(folder / "begun.html")],
        "report damaged": ["report", str(folder / "damaged")],
        "report unreadable": ["report", str(folder / "unreadable")],
        "backend": ["serve", "--backend", "magic"],
        "option of our loop": [*vllm, "--max-batch", "4"],
        "flags of vllm that no shell would read": [*vllm, "--vllm", "--foo 'bar"],
        "fly in vllm": [*vllm, "--rule", "fly", "--gamma", "5"],
        "draft dtype of our loop": [*vllm, "--draft-dtype", "int8"],
        "dtype of our loop": [*vllm, "--dtype", "q4"],
        "option of vllm": [*serve, "--vllm", "--enforce-eager"],
        "load of vllm": [*serve, "--load", "4"],
        "serve limit": [*serve, "--max-queue", "0"],
        "serve host": [*serve, "--host", "203.0.113.1"],
        "serve port": [*serve[:-1], "99999"],
        "serve theta": [*serve, "--theta", "0.4"],
        "serve key": [*serve, "--api-key", " "],
        "serve key twice": [*serve, "--api-key", "a, a"],
        "serve keys for vllm": [*serve, "--backend", "vllm", "--api-key", "a,b"],
        "serve timeout": [*serve, "--timeout", "0"],
        "serve temperature": [*serve, "--temperature", "0.001"],
        "serve a greedy rule at a temperature": [*serve, "--rule", "margin", "--temperature", "0.7"],
        "shadow of what is drawn": ["serve", "--recipe", str(folder / "tuned"), "--shadow", "0.1", "--temperature", "0.7"],
        "serve gamma": [*serve, "--gamma", "-1"],
        "serve a relaxed rule without drafts": [*serve, "--rule", "margin", "--gamma", "0"],
        "serve fly": [*serve, "--rule", "fly", "--gamma", "4"],
        "serve a judge of another pair": ["serve", "--port", "0", "--judge", "qwen2.5-coder-1.5b"],
        "vllm without judge": [*vllm, *target, *draft, "--rule", "judged"],
        "vllm without drafts": [*vllm, "--gamma", "0"],
        "vllm and a judge of another pair": [*vllm, "--judge", "qwen2.5-coder-1.5b"],
        "no task": ["eval", "--tasks", "", *new],
        "unknown task": [*evaluate, "--tasks", "nobody", "--rules", "exact"],
        "unknown rule of an evaluation": [*evaluate, "--rules", "nope"],
        "split of an evaluation": [*evaluate, "--tasks", "arithmetic/nope"],
        "data folder of an evaluation": [*evaluate, "--tasks", "gsm8k", "--data", str(folder / "nowhere")],
        "unknown task to reproduce": ["reproduce", "--tasks", "nobody", *new],
        "judge of an evaluation": [*evaluate, "--judge", "me=nowhere"],
        "a judge that no rule uses": [*evaluate, "--rules", "exact topk:2", "--judge", f"me={folder / 'plain'}"],
        "no judge for a rule": [*evaluate, "--rules", "judged:0.5"],
        "no such judge": [*evaluate, "--rules", "judged:0.5@you", "--judge", f"me={folder / 'plain'}"],
        "fly of an evaluation": [*evaluate[:-3], "3", *new, "--rules", "fly"],
        "fly of an evaluation at the default": ["eval", "--tasks", "arithmetic", *new, "--rules", "exact fly"],
        "evaluated judge of another pair": ["eval", "--tasks", "arithmetic", *new, "--judge", "qwen2.5-coder-1.5b"],
        "begun evaluation": [*evaluate[:-1], str(folder / "begun")],
        "nothing to tune on": ["tune", *new],
        "an epsilon of all": [*tune, "--epsilon", "1"],
        "no epsilon": [*tune, "--epsilon", "0"],
        "a delta of all": [*tune, "--delta", "2"],
        "no family": [*tune, "--families", ""],
        "unknown family": [*tune, "--families", "magic"],
        "family twice": [*tune, "--families", "margin,margin"],
        "begun tuning": [*tune[:-1], str(folder / "begun")],
        "too few prompts": [*tune, "--families", "margin"],
        "too few sums": ["tune", "--tasks", "arithmetic", "--limit", "20", "--epsilon", "0.01", *new],
        "more prompts than there are": [*tune, "--epsilon", "1e-9"],
        "no answers": [*tune, "--measure", "score"],
        "no answers to find": [*tune, "--measure", "same_answer"],
        "no judge to tune": [*tune, "--families", "judged"],
        "a judge that no family uses": [
            "tune", "--tasks", "arithmetic", "--epsilon", "0.3", "--families", "margin", *new, *target, *draft,
            "--judge", str(folder / "plain"),
        ],
        "rules and families": [*tune, "--families", "margin", "--rules", "topk:2"],
        "no rule to tune": [*tune, "--rules", " "],
        "a rule that loses nothing": [*tune, "--rules", "exact topk:2"],
        "a guard of one rule": [*tune, "--rules", "topk:2,strict_start=0"],
        "no judge for a named rule": [*tune, "--rules", "topk:2;judged:0.5"],
        "named rules at a small gamma": [*tune, "--rules", "margin:1 fly:0.3,2", "--gamma", "2"],
        "a judge that no named rule uses": [
            "tune", "--tasks", "arithmetic", "--epsilon", "0.3", "--rules", "margin:1", *new, *target, *draft,
            "--judge", str(folder / "plain"),
        ],
        "fly alone at a small gamma": [*tune, "--families", "fly", "--gamma", "2"],
        "unknown task to tune on": ["tune", "--tasks", "nobody", *new],
        "no recipe": [*ask, "--recipe", str(folder / "nowhere")],
        "unfinished recipe": [*ask, "--recipe", str(folder / "begun")],
        "shadow without recipe": [*serve, "--shadow", "0.1"],
        "shadow beyond all": [*serve, "--shadow", "2"],
        "recipe of another version": [*ask, "--recipe", str(folder / "older")],
        "recipe that was changed": [*ask, "--recipe", str(folder / "changed")],
        "key that is none": [*tune, "--sign", str(folder / "asked.jsonl")],
        "shadow of exact": ["serve", "--recipe", str(folder / "tuned-exact"), "--shadow", "0.1"],
        "vllm and a recipe of others": [*vllm, "--recipe", str(folder / "tuned")],
        "recipe and rule": [*ask, "--recipe", str(folder / "tuned"), "--rule", "topk:2"],
        "export of a recipe at another gamma": ["export", *new, "--recipe", str(folder / "tuned"), "--gamma", "7"],
        "bench of a recipe at other gammas": ["bench", "--recipe", str(folder / "tuned"), "--gammas", "2,4"],
        "a demo into a folder": ["demo", "--out", str(folder)],
        "preset": ["reproduce", "--preset", "huge", *new],
    }  # fmt: skip


def known_from_models(folder: Path, checkpoints: dict[str, str]) -> Commands:
    """Refused by what is in the models, by the device, or by packages that are not there."""
    target, draft = ["--target", checkpoints["target"]], ["--draft", checkpoints["draft"]]
    new, q4 = ["--out", str(folder / "new")], ["--dtype", "q4", "--device", "cpu"]
    ask = ["generate", "w1 w2", *target, *draft]
    label = ["label", *target, *draft, "--prompts", str(folder / "asked.jsonl"), "--max-new-tokens", "24"]
    distill = ["distill", *target, "--out", str(folder / "draft")]
    return {
        "unknown model": ["generate", "hi", "--target", "no-such-org/no-such-model", *draft],
        "foreign head": ["generate", "hi", *target, "--draft", str(folder / "foreign-head")],
        "narrow head": ["generate", "hi", *target, "--draft", str(folder / "narrow-head")],
        "deep head": ["generate", "hi", *target, "--draft", str(folder / "deep-head")],
        "normed head": ["generate", "hi", *target, "--draft", str(folder / "normed-head")],
        "head with another map": ["generate", "hi", *target, "--draft", str(folder / "small-map-head")],
        "odd head": ["generate", "hi", *target, "--draft", str(folder / "odd-head"), "--engine", "cpu"],
        "tokenizer mismatch": ["generate", "hi", *target, "--draft", checkpoints["stranger"]],
        "long prompt": ["generate", "w1 " * 200, *target, *draft],
        "judge width": [*ask, "--judge", str(folder / "narrow")],
        "judge target": [*ask, "--judge", str(folder / "foreign"), "--theta", "0.5"],
        "device that is not there": [*ask, "--device", "cuda:99"],
        "draft dtype beside another": [*ask, "--draft-dtype", "int8", "--dtype", "bfloat16", "--device", "cpu"],
        "q4 without a file": [*ask, *q4],
        "cut short": ["generate", "hi", "--target", str(folder / "cut.gguf"), *draft, *q4],
        "unknown blocks": ["generate", "hi", "--target", str(folder / "blocks.gguf"), *draft, *q4],
        "unknown shape": ["generate", "hi", "--target", str(folder / "mamba.gguf"), *draft, *q4],
        "data": [*distill, "--prompts", "gsm8k"],
        "chat template": ["distill", "--target", str(folder / "bare"), "--out", str(folder / "draft")],
        "states": ["distill", "--target", str(folder / "gpt2"), "--out", str(folder / "draft"), "--kind", "eagle3"],
        "recipe of others": ["generate", "w1 w2", "--recipe", str(folder / "tuned")],
        "engine options json": [*label, *new, "--tau", "-5", "--backend", "vllm", "--engine-options", "{"],
    }  # fmt: skip
