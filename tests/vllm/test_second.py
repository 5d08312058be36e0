"""vLLM's second model runner with an EAGLE-3 head, through Triton's interpreter: every kind of request, against the torch
loop. So it ran with vLLM 0.26 (whose kernels need `tl.log` for `libdevice` there) and 0.32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from engines import TINY_GAMMA, greedy, run, started, tiny_engine
from heads import memorised
from test_tiny import PROMPTS, SHORT, TOKENS, check, runs

from selfjudge.decoding.plain import respond
from selfjudge.judge.model import Judge
from selfjudge.models.eagle import write_head
from selfjudge.models.pair import Pair


@pytest.fixture(scope="module")
def deep(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers, a judge, and a head that knows some of its answers."""
    root = tmp_path_factory.mktemp("deep")
    config = hf.AutoConfig.from_pretrained(tiny / "target")
    config.num_hidden_layers = 6
    torch.manual_seed(3)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / "target")
    hf.AutoTokenizer.from_pretrained(tiny / "target").save_pretrained(root / "target")
    target = Pair.load(str(root / "target"), device="cpu", dtype="float32", needs_draft=False)
    prompts = [target.encode(prompt, raw=True) for prompt in PROMPTS]
    answers = sorted(respond(target.target, prompts, eos_ids=target.eos_ids, max_new_tokens=TOKENS))
    head = memorised(target, prompts, [list(tokens) for _, tokens, _ in answers])
    write_head(head, root / "head", steps=TINY_GAMMA, verifier=str(root / "target"))
    judge = Judge.from_pretrained(tiny / "hidden")
    judge.config = replace(judge.config, target=str(root / "target"))
    judge.save_pretrained(root / "hidden")
    return root


def test_rules_beside_a_head_say_what_the_torch_loop_says(deep: Path) -> None:
    pair = Pair.load(str(deep / "target"), str(deep / "head"), device="cpu", dtype="float32")
    answers = run(tiny_engine(deep, speculative_config=head(deep)), runs(pair, SHORT), v2=True)
    check(pair, Judge.from_pretrained(deep / "hidden"), answers, SHORT)


def head(deep: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(deep / "head"), "num_speculative_tokens": TINY_GAMMA}


def test_what_vllm_tries_out_before_the_first_request_is_neither_counted_nor_warned_about(deep: Path) -> None:
    """It decodes with a temperature, which this rule does not take; a request with one is still warned about."""
    engine = tiny_engine(deep, speculative_config=head(deep), worker_cls="trying.TryingWorker")
    engine["additional_config"]["selfjudge"] = {"rule": "margin:1"}
    said, answers = started(engine, [{"prompts": [[5, 6, 7]], "params": greedy(4) | {"temperature": 0.7}}], v2=True)
    assert answers, said[-4000:]
    before, counted, after = said.partition("counted before the first request: 0")
    warned = "a request is decoded losslessly: rule 'margin' is greedy here"
    assert [counted != "", warned in before, warned in after] == [True, False, True], said[-4000:]
