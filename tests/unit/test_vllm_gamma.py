"""γ in vLLM: by a table of its engine's costs, by what a draft's card says, and by what its version can do."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import tiny_head, tiny_model
from fake_certificate import recipe_folder
from selfjudge.cli.doctor import _cache
from selfjudge.cli.main import app
from selfjudge.decoding.costs import CostTable
from selfjudge.integrations.hosts import VARIABLE
from selfjudge.integrations.server.playground import FACTS
from selfjudge.integrations.vllm import gamma, serve
from selfjudge.integrations.vllm.config import BY_BATCH, EngineGamma, WorkerConfig
from selfjudge.integrations.vllm.gamma import (
    can_schedule,
    choose_gamma,
    describe_engine,
    expected_speeds,
    read_card,
    schedule_gammas,
)
from selfjudge.integrations.vllm.serve import RUNNER
from selfjudge.models.pair import Pair
from selfjudge.models.speculators import write_head

PAIR = ("org/big", "org/small")


def add_costs(table: CostTable) -> CostTable:
    """Tokens cost nothing at one row, and as much as a pass at many: what a GPU does."""
    for rows in (1, 8, 64, 256):
        for drafts in (0, 1, 2, 3, 5, 8):
            tokens = rows * (drafts + 1)
            table.add(rows, drafts, (0.03 * drafts, max(1.0, tokens / 200)))
    return table


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM that can change γ with its batch, on a CPU; its file of settings."""
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(RUNNER, raising=False)
    monkeypatch.setattr(gamma.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(serve, "versions", lambda *names: {"vllm": "0.32.0"})
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "vllm")]
    monkeypatch.setattr(gamma, "find_spec", lambda name: spec)
    file = tmp_path / "vllm" / "config" / "speculative.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"    {BY_BATCH}: list[tuple[int, int, int]] | None = None\n", "utf-8")
    return file


def keep(shape: str) -> None:
    table = add_costs(CostTable(shape))
    for rows in table.cycles:
        table.save(rows)


def test_the_speed_of_a_gamma_is_its_expected_tokens_over_its_seconds() -> None:
    speeds = expected_speeds(add_costs(CostTable()), [0.5, 0.8], 1)
    assert list(speeds) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert speeds[0] == pytest.approx(1.0)
    assert speeds[2] == pytest.approx((1 + 0.5 + 0.5 * 0.8) / 1.06)
    assert speeds[3] == pytest.approx((1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8) / 1.09)  # the last share goes on
    assert list(expected_speeds(add_costs(CostTable()), [0.5], 1, least=7)) == [0, 8]
    assert list(expected_speeds(add_costs(CostTable()), [0.5], 1, least=12)) == [0, 12]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.95])
def test_a_schedule_covers_all_sizes_and_is_never_far_from_the_best(share: float) -> None:
    table = add_costs(CostTable())
    schedule = schedule_gammas(table, [share])
    assert schedule[0][0] == 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(schedule))
    assert schedule[-1][1] >= 256
    chosen = [g for _, _, g in schedule]
    assert chosen == sorted(chosen, reverse=True)  # more requests, fewer drafts
    assert len(set(chosen)) == len(chosen)
    for first, _, g in schedule:
        speeds = expected_speeds(table, [share], first)
        assert speeds[g] == max(speeds.values())
    without = schedule_gammas(table, [share], may_stop=False)
    assert min(g for _, _, g in without) >= 1
    assert min(g for _, _, g in schedule_gammas(table, [share], least=3, may_stop=False)) >= 3


def test_the_first_start_takes_the_default_and_the_next_the_table(vllm: Path) -> None:
    first = choose_gamma(*PAIR)
    assert first.gamma == 5
    assert first.options == {"num_speculative_tokens": 5}
    assert "the default: what steps cost is measured once vLLM is up" in first.reason
    keep(first.costs)
    chosen = choose_gamma(*PAIR)
    assert chosen.costs == first.costs
    assert chosen.gamma == max(g for _, _, g in chosen.schedule) == chosen.options["num_speculative_tokens"]
    assert chosen.options[BY_BATCH][0] == [*chosen.schedule[0]]
    assert "a guess that 70% of the drafts are accepted" in chosen.reason
    assert "\n" not in chosen.reason


def test_one_load_has_one_gamma(vllm: Path) -> None:
    keep(choose_gamma(*PAIR).costs)
    one, many = choose_gamma(*PAIR, load=1), choose_gamma(*PAIR, load=256)
    assert one.options == {"num_speculative_tokens": one.gamma}
    assert one.gamma > many.gamma >= 1
    assert "for 256 requests at a time" in many.reason
    assert "plain decoding may be faster" in many.reason
    assert "plain" not in one.reason
    assert choose_gamma(*PAIR, load=128, least=4).gamma >= 4
    vllm.write_text("nothing of the kind", "utf-8")
    assert f"for {gamma.LOAD} requests at a time" in choose_gamma(*PAIR).reason


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"flags": ["--enforce-eager"]}])
def test_a_table_belongs_to_one_engine(vllm: Path, other: dict[str, Any]) -> None:
    keep(choose_gamma(*PAIR).costs)
    assert "the default" in choose_gamma(*PAIR, **other).reason
    assert "the default" in choose_gamma("org/other", PAIR[1]).reason


def test_a_checkpoint_that_has_changed_is_another_engine(vllm: Path, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    shapes = set()
    for layers in (1, 2):
        (tmp_path / "big" / "config.json").write_text(json.dumps({"layers": layers}), "utf-8")
        shapes.add(describe_engine(str(tmp_path / "big"), PAIR[1], None, ()))
    assert len(shapes) == 2


@pytest.mark.parametrize("damage", ["no JSON", "{}", '{"shape": "of another machine", "cycles": {}}'])
def test_a_damaged_table_is_measured_anew(vllm: Path, tmp_path: Path, damage: str) -> None:
    shape = choose_gamma(*PAIR).costs
    keep(shape)
    (file,) = (tmp_path / "home" / "costs").iterdir()
    file.write_text(damage, "utf-8")
    again = choose_gamma(*PAIR)
    assert again.gamma == 5
    assert "is measured once vLLM is up" in again.reason
    keep(shape)
    assert "by what steps cost in this engine" in choose_gamma(*PAIR).reason


def test_without_vllm_nothing_is_said_of_gamma(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gamma, "find_spec", lambda name: None)
    assert choose_gamma(*PAIR) == EngineGamma(5)
    assert choose_gamma(*PAIR, least=7) == EngineGamma(7)


@pytest.mark.parametrize(
    ("installed", "runner", "cuda", "head", "expected"),
    [
        ("0.32.0", None, False, False, True),
        ("0.32.0", "0", False, False, True),
        ("0.32.0", None, True, True, True),
        ("0.32.0", None, True, False, False),  # a small model would draft on
        ("0.32.0", "0", True, True, False),  # no CUDA graphs
        ("0.31.0", None, True, True, False),  # the first runner is taken
    ],
)
def test_gamma_changes_with_the_batch_where_that_costs_nothing(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, installed: str, runner: str | None, cuda: bool, head: bool, expected: bool
) -> None:  # fmt: skip
    monkeypatch.setattr(serve, "versions", lambda *names: {"vllm": installed})
    monkeypatch.setenv(RUNNER, runner or "")
    if runner is None:
        monkeypatch.delenv(RUNNER)
    monkeypatch.setattr(gamma.torch.cuda, "is_available", lambda: cuda)
    assert can_schedule("qwen2.5-coder-1.5b/eagle3" if head else "qwen2.5-coder-1.5b/draft") is expected
    vllm.write_text("num_speculative_tokens: int", "utf-8")
    assert not can_schedule("qwen2.5-coder-1.5b/eagle3")


def test_the_card_of_a_head_says_how_many_drafts_are_accepted(tmp_path: Path) -> None:
    shares = read_card("qwen2.5-coder-1.5b/eagle3")
    assert len(shares) == 5
    assert all(0.5 < share < 1 for share in shares)
    assert read_card("smollm2-135m/draft") == read_card("org/small") == []
    for metrics in ({}, {"top1": {"all": [0.5, 2]}}, {"top1": {"all": "x"}}, {"top1": [1]}):
        write_head(tiny_head(tiny_model(seed=1, num_hidden_layers=4)), tmp_path, metrics=metrics)
        assert read_card(str(tmp_path)) == []


def test_the_worker_is_told_which_table_to_measure() -> None:
    told = WorkerConfig(costs="shape").as_json()
    assert WorkerConfig.read({"selfjudge": told}).costs == "shape"
    assert "costs" not in WorkerConfig().as_json()


def test_serve_says_which_gamma_it_takes(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, str]
) -> None:
    called: list[str] = []
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.main", called.extend)
    for variable in (VARIABLE, FACTS):
        monkeypatch.setenv(variable, "")

    def start(*more: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        called.clear()
        models = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
        done = CliRunner().invoke(app, ["serve", "--backend", "vllm", *models, *more])
        assert done.exit_code == 0, done.output
        speculation, settings = (
            json.loads(called[called.index(f"--{name}") + 1]) for name in ("speculative-config", "additional-config")
        )
        return done.output, speculation, settings["selfjudge"]

    said, speculation, settings = start()
    assert "γ 5, the default" in said
    assert speculation["num_speculative_tokens"] == 5
    keep(settings["costs"])
    (line,) = [check.found for check in _cache() if check.name == "speeds"]
    assert line.startswith(f"{checkpoints['target']} in vLLM, auto, cpu, rows 1: γ 0 1e+03 ms")
    said, speculation, again = start("--gamma", "auto")
    assert again == settings
    assert "by what steps cost in this engine" in said
    assert BY_BATCH in speculation
    assert BY_BATCH not in start("--load", "4")[1]
    assert BY_BATCH not in start("--rule", "margin")[1]  # whose answers depend on γ
    said, speculation, settings = start("--gamma", "3")
    assert "γ" not in said
    assert speculation["num_speculative_tokens"] == 3
    assert "costs" not in settings
    assert start("--rule", "fly", "--load", "256")[1]["num_speculative_tokens"] == 8  # its window is 6
    done = CliRunner().invoke(app, ["serve", "--load", "4"])
    assert "`load` goes with --recipe or --backend vllm" in str(done.exception)


@pytest.mark.parametrize(
    ("certified", "asked", "taken", "said"),
    [
        ("float32", [], ["--dtype", "float32"], ""),
        ("float16", ["--dtype", "bfloat16"], ["--dtype", "bfloat16"], "with float16, this is bfloat16: not covered"),
        ("q4", [], [], "with q4, this is the checkpoint's: not covered by it"),
    ],
)
def test_vllm_takes_the_dtype_of_a_recipe(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, str], tmp_path: Path, certified: str, asked: list[str],
    taken: list[str], said: str,
) -> None:  # fmt: skip
    called: list[str] = []
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.main", called.extend)
    for variable in (VARIABLE, FACTS):
        monkeypatch.setenv(variable, "")
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    folder = recipe_folder(tmp_path / "tuned", pair, engine="vllm", dtype=certified)
    done = CliRunner().invoke(app, ["serve", "--backend", "vllm", "--recipe", str(folder), *asked])
    assert done.exit_code == 0, done.output
    given = called[called.index("--dtype") :][:2] if "--dtype" in called else []
    assert given == taken
    assert said in done.output
    assert said or "not covered" not in done.output


def test_a_recipe_of_plain_decoding_is_not_for_the_worker(tiny_pair: Pair, tmp_path: Path) -> None:
    folder = recipe_folder(tmp_path / "plain", tiny_pair, rule="exact", certified=False, gamma=0)
    done = CliRunner().invoke(app, ["serve", "--backend", "vllm", "--recipe", str(folder)])
    assert str(done.exception) == f"{folder} decodes plainly (γ 0): serve it without --backend vllm"
