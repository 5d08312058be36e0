"""The benchmarks of large targets and of families: what they compute from what they measure."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from selfjudge.models.shape import FAMILIES
from selfjudge.store import read_json, write_json, write_tensors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from family_speed import family_model
from whole_line import RECIPE, Watch, read_distillation, table


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_have_the_shape_of_the_llama(family: str) -> None:
    """Matrices have as many weights in all, so that times can be compared."""
    sizes = [
        sum(p.numel() for p in family_model(name, "tiny", torch.device("cpu"), torch.float32).module.parameters() if p.dim() == 2)
        for name in (family, "llama")
    ]  # fmt: skip
    assert sizes[0] == sizes[1]


def test_peak_memory_is_kept_when_it_is_freed(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "peaks.json", time.monotonic())
    before = watch.figures.get("host_anonymous", 0)
    block = np.ones(1 << 27, np.uint8)
    watch.look()
    size = len(block)
    del block
    watch.close()
    figures = read_json(tmp_path / "peaks.json")
    assert figures["host_anonymous"] > size
    assert figures["host_anonymous"] >= before
    assert figures["host_resident"] >= figures["host_anonymous"]


def test_a_part_of_a_distillation_says_what_the_whole_takes(tmp_path: Path) -> None:
    """100 prompts in 10 s, 40 tokens of answers in 4 s, 5 s a step after the first; 7 s for answers to held-out prompts."""
    work = tmp_path / "work"
    work.mkdir()
    write_json(
        work / "prompts.json", {"seconds": 10.0, "yields": {"self": {"written": 60}, "self-code": {"written": 40}}}
    )
    for name, seconds in (("answers-00000", 7.0), ("answers-00001", 3.0), ("answers-00002", 1.0)):
        write_json(work / f"{name}.json", {"seconds": seconds})
        write_tensors(
            work / f"{name}.safetensors", {"lengths": np.asarray([30, 10]), "prompt_lengths": np.asarray([15, 5])}
        )
    history = [{"step": 1, "seconds": 20.0}, {"step": 2, "seconds": 25.0}]
    write_tensors(work / "train.safetensors", {"w": np.zeros(1)}, {"step": 3, "seconds": 30.0, "history": history})
    part = read_distillation(tmp_path, 100.0)
    assert part["seconds_per"] == pytest.approx({"prompt": 0.1, "answer_token": 0.1, "step": 5.0})
    assert part["seconds_of"]["rest"] == pytest.approx(100 - 10 - 4 - 30)
    recipe = read_json(RECIPE)
    prompts = sum(source.get("written", 0) for source in recipe["sources"])
    whole = 56 + 0.1 * prompts + 0.1 * recipe["training"]["answer_tokens"] + 5 * recipe["training"]["steps"]
    assert part["whole_recipe_minutes"] == pytest.approx(whole / 60)


def test_a_step_that_failed_or_was_ended_says_so() -> None:
    memory = {"host_anonymous": 2.345, "device_allocated": 16.8}
    steps = {
        "load": {"seconds": 12.3, "load_seconds": 8.04, "gigabytes": memory},
        "label": {"seconds": 75.0, "ended_after": 75.0, "gigabytes": {}},
        "train": {"seconds": 2.0, "error": "no labels", "gigabytes": {}},
    }
    lines = table({"steps": steps}).splitlines()
    assert lines[2] == "| load | 12 | 8.0 | 2.3 | – | 16.8 | – |"
    assert lines[3].startswith("| label | ended |")
    assert lines[4].startswith("| train | failed |")
