"""What the vLLM adapter does without vLLM: settings, wishes of requests, the mask, the mark, the counts, the command."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from selfjudge.cli.main import main
from selfjudge.decoding.rules import Judged
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm import serve
from selfjudge.integrations.vllm.approval import MARK, Approval, LastRows, Rows
from selfjudge.integrations.vllm.config import OFF, Thresholds, WorkerConfig, requested_threshold, target_sha256
from selfjudge.integrations.vllm.counts import STEPS, Counts, Step
from selfjudge.integrations.vllm.label import outline_pair, parse_engine_options
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import fingerprint
from selfjudge.types import Block

H, V = 6, 11
CPU = torch.device("cpu")


def judge(features: str = "hidden", **options: Any) -> Judge:
    torch.manual_seed(3)
    config = JudgeConfig(
        H, features=features, thresholds={"F": 0.6, "R": 0.7}, quality_curve=((0.5, 0.2), (0.9, 0.4)), **options
    )
    return Judge(config, torch.randn(config.width))


@pytest.mark.parametrize(
    ("given_", "theta"),
    [({}, 0.7), ({"theta": "F"}, 0.6), ({"theta": 0.1}, 0.1), ({"quality": 0.9}, 0.4), ({"guard": False}, 0.7)],
)
def test_settings_choose_a_threshold(given_: dict[str, Any], theta: float) -> None:
    assert WorkerConfig.read({"selfjudge": {"judge": "folder", **given_}}).threshold(judge()) == theta


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        (None, "does not know its judge"),
        ({"selfjudge": {"quality": 0.9}}, "does not know its judge"),
        ({"selfjudge": {"judge": "j", "thetta": 1}}, "unknown setting 'thetta'"),
        ({"selfjudge": {"judge": "j", "guard": "no"}}, "`guard` must be true or false, not 'no'"),
        ({"selfjudge": {"judge": "j", "theta": 0.1, "quality": 0.9}}, "`quality` chooses θ: give one of `theta` and `quality`"),
        ({"selfjudge": {"judge": "j", "theta": 2}}, r"`theta` must lie in \[0, 1\], not 2"),
        ({"selfjudge": {"judge": "j", "theta": "X"}}, "has no threshold 'X'"),
        ({"selfjudge": {"judge": "j", "theta": True}}, "`theta` must be a number, not True"),
        ({"selfjudge": {"judge": "j", "quality": "R"}}, r"`quality` must lie in \[0, 1\], not 'R'"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(additional: Any, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        WorkerConfig.read(additional).threshold(judge())


@pytest.mark.parametrize(
    ("extra", "theta"),
    [
        (None, 0.7),
        ({"other": 1}, 0.7),
        ({"selfjudge": {"off": True}}, OFF),
        ({"selfjudge": {"off": False}}, 0.7),
        ({"selfjudge": {"theta": 0}}, 0),
        ({"selfjudge": {"theta": "F"}}, 0.6),
        ({"selfjudge": {"quality": 0.5}}, 0.2),
        ({"selfjudge": '{"quality": 0.5}'}, 0.2),
        ({"selfjudge": {"quality": 1.0}}, 1.0),
    ],
)
def test_a_request_may_ask_for_its_own(extra: Any, theta: float) -> None:
    assert requested_threshold(judge(), 0.7, extra) == theta


@pytest.mark.parametrize("wish", ["off", "{", 3, {}, {"off": 1}, {"theta": 7}, {"off": True, "theta": 0.1}, {"x": 1}])
def test_a_wish_that_cannot_be_read_is_lossless_and_said_once(wish: Any) -> None:
    said: list[str] = []
    thresholds = Thresholds(judge(), 0.7, said.append)
    params = type("Params", (), {"extra_args": {"selfjudge": wish}})
    assert thresholds(params) == thresholds(params) == OFF
    assert len(said) == 1
    assert said[0].startswith("a request is decoded without the judge: ")


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum),
    features=st.sampled_from(FEATURES),
    seed=st.integers(0, 1000),
    special=st.sets(st.integers(0, V - 1), max_size=3),
    limit=st.sampled_from((None, 2.5)),
)
def test_flat_rows_are_judged_as_blocks_are(
    counts: list[int], features: str, seed: int, special: set[int], limit: float | None
) -> None:
    """What the rule `judged` says of each request's block alone, for all drafts that alignment refuses."""
    torch.manual_seed(seed)
    n, theta = sum(counts), 0.5
    drafts, hidden, logits = torch.randint(0, V, (n,)), torch.randn(n, H), torch.randn(n, V) * 3
    if seed % 5 == 0:
        hidden[0, 0] = torch.nan
    rows = Rows.of(torch.tensor(counts), n)
    # a request's rows: each predicts a draft that the row after it has read, and the last one predicts none
    at = torch.arange(n) + rows.owner
    states, predicting = torch.zeros(n + len(counts), H), torch.zeros(n + len(counts), V)
    states[at + 1], predicting[at] = hidden, logits
    approval = Approval(judge(features, margin_limit=limit), sorted(special), CPU)
    mask = approval(states, predicting, at, drafts, theta, rows.owner)
    marked, copy = logits.clone(), logits.clone()
    raised, aligned = approval.mark(marked, drafts, mask)
    assert torch.equal(raised, mask)
    assert torch.equal(aligned, drafts == copy.argmax(-1))
    rule, at = Judged(judge(features, margin_limit=limit), theta, special=tuple(special)), 0
    accepted = []
    for count in counts:
        here = slice(at, at + count)
        block = Block(
            drafts[None, here], torch.cat([logits[here], torch.zeros(1, V)])[None],
            torch.cat([torch.zeros(1, H), hidden[here]])[None],
        )  # fmt: skip
        verdict = rule(block)
        k = int(verdict.n_accepted)
        taken = marked[here].argmax(-1) == drafts[here]
        assert int(rows.leading(marked.argmax(-1) == drafts)[len(accepted)]) == k == int(taken.long().cumprod(0).sum())
        assert verdict.judged[0].tolist() == (mask & ~aligned)[here].tolist()
        accepted.append(k)
        at += count
    counted = Counts(CPU, "model", "0")
    counted.add(rows, torch.tensor(accepted) + 1, torch.stack([raised, aligned]))
    found = counted.read()
    cycles = sum(count > 0 for count in counts)
    assert found["cycles"] == cycles
    assert found["tokens"] == sum(accepted) + cycles
    assert found["aligned_tokens"] <= found["tokens"]
    assert found["tokens"] == found["aligned_tokens"] or found["judged_tokens"] > 0


def test_a_step_without_the_judge_counts_what_was_accepted_for_both() -> None:
    counted = Counts(CPU, "model", "0")
    counted.add(Rows.of(torch.tensor([3, 0, 2]), 5), torch.tensor([3, 0, 1]), None)  # the second has no drafts
    assert counted.read() == {"cycles": 2, "tokens": 4, "aligned_tokens": 4, "judged_tokens": 0}


def drawn_step(dice: random.Random, rows: LastRows, partly: bool) -> tuple[Step, list[int]]:
    """A step of up to four requests, and what it adds to each counter, counted one draft at a time."""
    counts = dice.choice([[3, 0, 2], [2, 2], [1], [0, 3, 3, 1], [0]])
    accepted = [dice.randint(0, count) for count in counts]
    judged = dice.random() < 0.7
    flags = torch.tensor([[dice.random() < 0.6 for _ in range(sum(counts))] for _ in range(3)], dtype=torch.bool)
    sampled = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    wanted, at = [0, 0, 0, 0], 0
    for i, (count, k) in enumerate(zip(counts, accepted, strict=True)):
        sampled[i, : k + 1] = 7
        raised, aligned, seen = ([False] * count for _ in range(3))
        if judged:
            raised, aligned, seen = flags[:, at : at + count].tolist()
        known = [judged and (s or not partly) for s in seen]
        aligned = [flag if here else place < k for place, (flag, here) in enumerate(zip(aligned, known, strict=True))]
        leading = next((place for place, flag in enumerate(aligned) if not flag), count)
        if count:
            against = sum(raised[place] and not aligned[place] for place in range(k))
            wanted = [a + b for a, b in zip(wanted, [1, k + 1, leading + 1, against], strict=True)]
        at += count
    step = Step(rows(counts, CPU), sampled, (flags if partly else flags[:2]) if judged else None)
    return (step._replace(sampled=(sampled >= 0).sum(1, dtype=torch.int32)) if partly else step), wanted


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), partly=st.booleans())
def test_steps_that_are_counted_together_count_as_one_by_one(seed: int, partly: bool) -> None:
    """Whatever changes between them: requests, the longest block, whether the judge was asked."""
    dice, rows, counted, wanted = random.Random(seed), LastRows(), Counts(CPU, "model", "0"), [0, 0, 0, 0]
    for _ in range(dice.randint(1, 2 * STEPS + 20)):
        step, more = drawn_step(dice, rows, partly)
        counted.add(*step)
        wanted = [a + b for a, b in zip(wanted, more, strict=True)]
        if dice.random() < 0.02:
            assert list(counted.read().values()) == wanted
    assert list(counted.read().values()) == wanted == list(counted.read().values())


def test_steps_are_kept_until_there_are_enough_or_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, rows, shown = Counts(CPU, "model", "0"), LastRows(), []
    monkeypatch.setattr(counted, "_show", shown.append)
    monkeypatch.setattr("selfjudge.integrations.vllm.counts.EVERY", -1.0)
    for _ in range(STEPS - 1):
        counted.add(rows([2, 1], CPU), torch.tensor([3, 1]), None)
    assert counted.total.tolist() == [0, 0, 0, 0]
    counted.add(rows([2, 1], CPU), torch.tensor([3, 1]), None)
    assert counted.total.tolist() == [2 * STEPS, 4 * STEPS, 4 * STEPS, 0]
    for idle in (True, False):
        counted.add(rows([1], CPU), torch.tensor([2]), None)
        counted.report(idle=idle)
    assert shown == [[2 * STEPS + n, 4 * STEPS + 2 * n, 4 * STEPS + 2 * n, 0] for n in (1, 2)]


def test_rows_are_computed_when_they_change() -> None:
    rows = LastRows()
    first = rows([2, 0, 1], CPU)
    assert rows([2, 0, 1], CPU) is first
    other = rows([1, 2], CPU)
    assert [t.tolist() for t in (other.owner, other.place, other.counts, other.predicting)] == [
        [0, 1, 1], [0, 0, 1], [1, 2], [0, 2, 3],
    ]  # fmt: skip


def test_off_is_no_threshold_that_a_request_can_name() -> None:
    """So that the worker can tell who asks and is refused from who does not ask."""
    assert requested_threshold(judge(), 0.7, {"selfjudge": {"theta": 1.0}}) < OFF
    assert requested_threshold(judge(), 0.7, {"selfjudge": {"off": True}}) == OFF


def test_each_row_has_the_threshold_of_its_request() -> None:
    hidden, logits, drafts = torch.randn(6, H), torch.randn(6, V), torch.tensor([1, 2, 3, -1])
    rows = Rows.of(torch.tensor([2, 2]), 4)
    at, theta = torch.tensor([0, 1, 3, 4]), torch.tensor([0.0, OFF])[rows.owner]
    mask = Approval(judge(), (), CPU)(hidden, logits, at, drafts, theta, rows.owner)
    assert mask.tolist() == [True, True, False, False]


def test_a_mark_spares_banned_tokens_missing_drafts_and_special_choices() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [2.0, 0.0, 1.0], [0.0, 0.0, 5.0], [0.0, 1.0, 2.0]])
    raised, aligned = Approval(judge(), [2], CPU).mark(
        logits, torch.tensor([1, -1, 0, 2]), torch.tensor([True, True, True, False])
    )
    assert raised.tolist() == [False, False, False, False]  # banned, no draft, the row's choice is special
    assert aligned.tolist() == [False, False, False, True]
    assert logits.max() < MARK


def test_the_hash_of_a_pulled_target_is_that_of_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert target_sha256(str(folder)) == fingerprint([folder / "model.safetensors"])
    (tmp_path / "manifest.json").write_text(
        json.dumps({"sha256": "abc" * 20 + "abcd", "draft_sha256": None, "files": {}})
    )
    assert target_sha256(str(folder)) == "abc" * 20 + "abcd"


@pytest.fixture
def no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfjudge.models.pull.home", lambda: Path("/"))
    monkeypatch.setattr("selfjudge.models.pull._Cache.whole", lambda *_, **__: True)


def test_the_command_of_an_embedded_pair(no_pull: None) -> None:
    words = serve.command(
        "smollm2-135m", None, WorkerConfig(quality=0.9), gamma=3, more=["--port", "9000", "--dtype", "float32"]
    )
    words.remove("--no-trust-remote-code")
    options = dict(zip(words[3:-2:2], words[4:-2:2], strict=True))
    assert options["--model"] == "/models/smollm2-135m/target"
    assert json.loads(options["--speculative-config"]) == {
        "model": "/models/smollm2-135m/draft", "num_speculative_tokens": 3,
    }  # fmt: skip
    settings = json.loads(options["--additional-config"])["selfjudge"]
    assert settings["quality"] == 0.9
    assert Judge.from_pretrained(settings["judge"]).config.target == "smollm2-135m"
    assert options["--worker-cls"] == "selfjudge.integrations.vllm.JudgeWorker"
    assert options["--served-model-name"] == "smollm2-135m"
    assert words[-2:] == ["--dtype", "float32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "org/big"}, "no draft ships for org/big: name one with `draft`"),
        ({"target": "org/big", "draft": "org/small"}, "no judge ships for org/big: name one with `judge`"),
        ({"gamma": 0}, "`gamma` must lie between 1 and 20 with vLLM, not 0"),
        ({"gamma": 21}, "`gamma` must lie between 1 and 20 with vLLM, not 21"),
        ({"worker": WorkerConfig(theta="X")}, "has no threshold 'X'"),
        ({"worker": WorkerConfig(theta=0.5, quality=0.5)}, "give one of `theta` and `quality`"),
        ({"worker": WorkerConfig("/nowhere")}, "is not a judge folder"),
    ],
)
def test_a_command_that_cannot_work_is_refused(no_pull: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        serve.command(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "jax"], "'--backend': 'jax' is not one of 'torch', 'vllm'"),
        (["--backend", "vllm", "--method", "autojudge"], "--method autojudge needs --backend torch"),
        (["--backend", "vllm", "--calibrate", "arithmetic"], "--backend vllm cannot search for τ: find it with --backend torch, then give --tau"),
        (["--backend", "vllm", "--prompts", "self:3"], "self-written ones need --backend torch"),
        (["--backend", "vllm", "--prompts", "arithmetic:3"], "vLLM is not installed here"),
        (["--engine-options", "{}"], "--engine-options are vLLM's: they go with --backend vllm"),
    ],
)  # fmt: skip
def test_labelling_in_vllm_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, options: list[str], message: str
) -> None:
    prompts = [] if "--prompts" in options else ["--prompts", "arithmetic:3"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["selfjudge", "label", "--out", str(tmp_path / "out"), *prompts, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_engine_options_are_a_json_object(text: str) -> None:
    with pytest.raises(SelfJudgeError, match="`engine_options` must be a JSON object"):
        parse_engine_options(text)


def test_an_outline_holds_the_output_matrix_and_nothing_else(checkpoints: dict[str, str]) -> None:
    whole = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    pair, model = outline_pair(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    assert model == checkpoints["target"]
    assert torch.equal(pair.target.get_output_embeddings().weight, whole.target.get_output_embeddings().weight)
    assert {p.device.type for p in pair.target.parameters()} == {"meta", "cpu"}
    for name in (
        "name",
        "special_ids",
        "eos_ids",
        "hidden_size",
        "dtype",
        "target_sha256",
        "draft_sha256",
        "target_id",
    ):
        assert getattr(pair, name) == getattr(whole, name)
    with pytest.raises(SelfJudgeError, match="is not a readable checkpoint of safetensors"):
        outline_pair("/nowhere", checkpoints["draft"], device="cpu")


def test_without_vllm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(SelfJudgeError, match="vLLM is not installed here"):
        serve.main(["python"])
