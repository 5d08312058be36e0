"""LabelledRows: parts, streaming, labels from stored scores, columns as a judge reads them while decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fake_labels import HIDDEN, SUFFIX, TAU, WIDTH, all_arrays, by_hand, everything, label_folder
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, LOWEST, SCORES, JudgeConfig, feature_width
from selfjudge.judge.model import Judge, join_features, margins
from selfjudge.label.folder import read_shards
from selfjudge.label.methods import compute_tau
from selfjudge.label.score import sum_scores
from selfjudge.store import read_rows, write_rows
from selfjudge.train import dataset as reading
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import PARTS, LabelledRows


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows of 60 prompts that a linear judge can learn, with evidence for τ."""
    return label_folder(tmp_path_factory.mktemp("labels") / "straight", evidence=400)


def prompts_of(folders: Sequence[Path]) -> list[tuple[int, ...]]:
    """The prompt's tokens of every row, in the order of the rows."""
    found = []
    for one in folders:
        asked = {row["prompt_id"]: tuple(row["prompt_ids"]) for row in read_rows(one / "responses.jsonl")}
        found += [asked[row["prompt_id"]] for rows, _ in read_shards(one) for row in rows]
    return found


def parts_of(rows: LabelledRows) -> dict[tuple[int, ...], int]:
    """Part of every prompt; a prompt in two of them fails."""
    found: dict[tuple[int, ...], int] = {}
    for prompt, part in zip(prompts_of(rows.folders), rows.part, strict=True):
        assert found.setdefault(prompt, int(part)) == part
    return found


def test_no_prompt_stands_in_two_parts(labels: Path, tmp_path: Path) -> None:
    """Not even one that two folders hold, under different names or, worse, under one name for two prompts."""
    again = label_folder(tmp_path / "again", name="other", first=20, prompts=60, each=3, seed=1)
    shifted = label_folder(tmp_path / "shifted", name="p", first=70, prompts=30, each=2, shards=1, seed=2)
    rows = LabelledRows.load([labels, again, shifted])
    found = parts_of(rows)
    assert len(rows) == 600 + 180 + 60
    assert rows.n_prompts == len(found) == 100
    assert np.bincount(list(found.values())).tolist() == [70, 15, 15]
    assert sum(rows.of(name).astype(int) for name in PARTS).tolist() == [1] * len(rows)
    assert parts_of(LabelledRows.load([shifted, labels, again])) == found
    numbers: dict[int, set[tuple[int, ...]]] = {}
    for number, prompt in zip(rows.prompts, prompts_of(rows.folders), strict=True):
        numbers.setdefault(int(number), set()).add(prompt)
    assert all(len(one) == 1 for one in numbers.values())


@pytest.mark.parametrize("count", [6, 7, 20, 60, 333])
def test_parts_are_70_15_15_of_the_prompts(tmp_path: Path, count: int) -> None:
    rows = LabelledRows.load([label_folder(tmp_path / "labels", prompts=count, each=1, shards=2)])
    sizes = [int(rows.of(name).sum()) for name in PARTS]
    assert sum(sizes) == count
    assert all(abs(size - share * count) <= 1 for size, share in zip(sizes, (0.7, 0.15, 0.15), strict=True))
    assert min(sizes) >= 1


def test_the_seed_decides_the_split(labels: Path) -> None:
    one, same, other = (LabelledRows.load([labels], seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.part, same.part)
    before = parts_of(one)
    moved = np.mean([before[prompt] != part for prompt, part in parts_of(other).items()])
    assert 0.2 < moved < 0.8  # 47 % are expected to
    assert one.n_prompts == other.n_prompts


def test_a_split_does_not_follow_the_order_of_the_prompts(labels: Path) -> None:
    """The first prompts of a folder are of one source: each part gets some of both ends."""
    places = [prompt[1] for prompt, part in parts_of(LabelledRows.load([labels])).items() if part]
    assert min(places) < 20 < 40 < max(places)


@pytest.mark.parametrize("originals", [False, True])
def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, originals: bool) -> None:
    """A chunk has at most `most` rows, and no more than `most` rows and one shard ever wait."""
    made = label_folder(tmp_path / "labels", prompts=48, each=10, shards=16)  # 30 rows a shard
    most, waited = 70, []
    monkeypatch.setattr(reading, "KEPT_BYTES", 0)
    monkeypatch.setattr(reading, "CHUNK_BYTES", most * 4 * WIDTH + 3)
    gathered, read = reading._split_chunks, reading.read_tensors
    opened: list[Path] = []

    def pieces(waiting: list[Any], *rest: Any) -> Any:
        waited.append(sum(len(piece.labels) for piece in waiting))
        return gathered(waiting, *rest)

    rows = LabelledRows.load([made])
    monkeypatch.setattr(reading, "_split_chunks", pieces)
    monkeypatch.setattr(reading, "read_tensors", lambda file, names: opened.append(file) or read(file, names))  # type: ignore[func-returns-value]
    every = np.ones(len(rows), bool)
    sizes = [len(piece.labels) for piece in rows.chunks(every, "hidden+margin", originals=originals)]
    assert sum(sizes) == 480 * (1 + originals) == sum(waited)
    assert max(sizes) <= most
    assert max(waited) < most + 30 * (1 + originals)
    assert len(opened) == 16 * (1 + originals)
    assert len(set(opened)) == 16


def test_shards_without_rows_do_no_harm(tmp_path: Path) -> None:
    rows = LabelledRows.load([label_folder(tmp_path / "labels", prompts=10, each=3, shards=15)])
    assert len(rows) == 30
    assert rows.n_prompts == 10
    x, _ = everything(rows, np.ones(30, bool), "hidden+margin", originals=True)
    assert x.shape == (60, WIDTH)


def by_confidence(arrays: dict[str, NDArray[Any]], k: int, length: int) -> float:
    """The released score of row k, place by place: how sure the target is after the substitution, less before it."""
    after, before = [float(arrays["log_p"][k, 1])], [float(arrays["log_p"][k, 0])]
    for old, new in itertools.islice(zip(arrays["original"][k], arrays["highest"][k], strict=True), length):
        if not math.isnan(old):
            after.append(float(new))
            before.append(float(old))
    return sum(after) / len(after) - sum(before) / len(before)


@pytest.mark.parametrize("length", [0, 1, 3, SUFFIX])
@pytest.mark.parametrize("score", SCORES)
def test_labels_follow_from_the_stored_scores(labels: Path, length: int, score: str) -> None:
    arrays = all_arrays(labels)
    count = by_hand if score == "likelihood" else by_confidence
    for tau in (-3.0, -0.7):
        rows = LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=length, tau=tau, score=score))
        scores = sum_scores(arrays, length, score=score)
        assert np.array_equal(rows.labels, scores > tau)
        hand = [count(arrays, k, length) for k in range(len(rows))]
        assert np.allclose(scores, hand, atol=1e-4)
        assert 0 < rows.labels.mean() < 1
        assert rows.taus == [tau]
    if length in (0, SUFFIX):
        return
    assert not np.array_equal(
        rows.labels, LabelledRows.load([labels]).relabel(TrainConfig(tau=-0.7, score=score)).labels
    )


@pytest.mark.parametrize("gap", [1, 3])
def test_the_first_tokens_of_a_suffix_can_be_passed_over(labels: Path, gap: int) -> None:
    arrays = all_arrays(labels)
    rows = LabelledRows.load([labels]).relabel(TrainConfig(suffix_gap=gap))
    expected = compute_tau(labels / "calibration.safetensors", SUFFIX, 0.9, gap=gap)["tau"]
    assert rows.taus == [expected] != [TAU]
    hand = np.asarray([by_hand(arrays, k, SUFFIX) - by_hand(arrays, k, gap) for k in range(len(rows))])
    hand += arrays["log_p"][:, 1] - arrays["log_p"][:, 0]  # what is before the suffix stands
    clear = np.abs(hand - expected) > 1e-4
    assert np.array_equal(rows.labels[clear], hand[clear] > expected)
    assert clear.mean() > 0.99
    with pytest.raises(SelfJudgeError, match=f"`suffix_gap` {SUFFIX} leaves nothing"):
        LabelledRows.load([labels]).relabel(TrainConfig(suffix_gap=SUFFIX))


def test_stored_labels_are_left_alone(tmp_path: Path) -> None:
    """Where nothing is asked for: those of other methods do not follow from scores at all."""
    made = label_folder(tmp_path / "labels", method="autojudge")
    rows = LabelledRows.load([made])
    assert rows.labels.tolist() == [row["label"] for found, _ in read_shards(made) for row in found]
    assert rows.taus == [None]


def test_a_tau_alone_asks_for_other_labels(labels: Path) -> None:
    rates_ = [
        float(LabelledRows.load([labels]).relabel(TrainConfig(tau=tau)).labels.mean()) for tau in (-8.0, TAU, 0.0)
    ]
    assert rates_ == sorted(rates_, reverse=True)
    assert rates_[1] == LabelledRows.load([labels]).labels.mean()
    assert len(set(rates_)) == 3


@pytest.mark.parametrize(
    ("length", "score"), [(2, "likelihood"), (0, "likelihood"), (SUFFIX, "confidence"), (3, "confidence")]
)
def test_tau_of_another_score_comes_from_the_folders_evidence(labels: Path, length: int, score: str) -> None:
    count = by_hand if score == "likelihood" else by_confidence
    rows = LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=length, score=score))
    expected = compute_tau(labels / "calibration.safetensors", length, 0.9, score=score)["tau"]
    assert rows.taus == [expected] != [TAU]
    arrays = all_arrays(labels)
    scores = sum_scores(arrays, length, score=score)
    assert np.array_equal(rows.labels, scores > expected)
    evidence = load_file(labels / "calibration.safetensors")
    critical = [count(evidence, k, length) for k in np.flatnonzero(evidence["critical"])]
    assert np.mean(np.asarray(critical) <= expected + 1e-4) >= 0.9
    assert np.mean(np.asarray(critical) < expected - 1e-4) < 0.9


def test_the_stored_tau_is_used_for_the_stored_scores(labels: Path) -> None:
    assert LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=SUFFIX)).taus == [TAU]
    assert np.array_equal(
        LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=SUFFIX)).labels,
        LabelledRows.load([labels]).labels,
    )


@pytest.mark.parametrize(("length", "score"), [(2, "likelihood"), (None, "confidence")])
def test_without_evidence_another_score_needs_a_tau(tmp_path: Path, length: int | None, score: str) -> None:
    made = label_folder(tmp_path / "labels")
    with pytest.raises(SelfJudgeError, match="give `tau` or `acceptable`") as error:
        LabelledRows.load([made]).relabel(TrainConfig(suffix_length=length, score=score))
    assert "\n" not in str(error.value)
    assert LabelledRows.load([made]).relabel(TrainConfig(suffix_length=length, score=score, tau=-2.0)).taus == [-2.0]


@pytest.mark.parametrize("asked", [{"suffix_length": 3}, {"tau": -2.0}, {"score": "confidence"}])
def test_autojudge_labels_cannot_be_made_again(tmp_path: Path, asked: dict[str, Any]) -> None:
    made = label_folder(tmp_path / "labels", method="autojudge", evidence=100)
    with pytest.raises(SelfJudgeError, match="autojudge labels: those do not follow from scores") as error:
        LabelledRows.load([made]).relabel(TrainConfig(**asked))
    assert "\n" not in str(error.value)


def test_a_stated_share_of_nothing_is_said_to_be_of_nothing(labels: Path) -> None:
    rows = LabelledRows.load([labels])
    rows.part[:] = -1
    with pytest.raises(SelfJudgeError, match="no mismatch that alignment would reject"):
        rows.relabel(TrainConfig(acceptable=0.3)).check("hidden")


@pytest.mark.parametrize("length", [0, 2, SUFFIX])
def test_labels_by_confidence_are_those_of_the_released_score(labels: Path, length: int) -> None:
    rows, arrays = LabelledRows.load([labels]), all_arrays(labels)
    scores = [by_confidence(arrays, k, length) for k in range(len(rows))]
    made = rows.relabel(TrainConfig(suffix_length=length, tau=-0.3, score="confidence"))
    sure = [abs(s + 0.3) > 1e-5 for s in scores]
    assert np.array_equal(made.labels[sure], [s > -0.3 for s, is_sure in zip(scores, sure, strict=True) if is_sure])
    assert rows.relabel(TrainConfig(suffix_length=length, acceptable=0.209, score="confidence")).labels[
        rows.used
    ].mean() == pytest.approx(0.209, abs=0.01)
    taus = [
        rows.relabel(TrainConfig(suffix_length=length, score=score)).taus[0] for score in ("confidence", "likelihood")
    ]  # from one evidence
    assert (taus[0] == taus[1]) == (length == 0)


def test_only_labels_by_likelihood_are_made_again(labels: Path, tmp_path: Path) -> None:
    other = label_folder(tmp_path / "other", method="consequences", first=60, seed=3)
    rows = LabelledRows.load([labels, other])
    made = rows.relabel(TrainConfig(suffix_length=3, tau=-2.0))
    assert np.array_equal(made.labels[600:], rows.labels[600:])
    assert np.array_equal(
        made.labels[:600], LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=3, tau=-2.0)).labels
    )
    assert made.taus == [-2.0, None]
    share = rows.relabel(TrainConfig(acceptable=0.3))
    used = share.used[:600]
    assert share.labels[:600][used].mean() == pytest.approx(0.3, abs=0.01)


def test_beyond_the_margin_limit_rows_belong_to_no_part(labels: Path) -> None:
    rows = LabelledRows.load([labels])
    margins = rows.log_p[:, 0] - rows.log_p[:, 1]
    limited = rows.limit_margin(1.5)
    assert 0 < (margins > 1.5).sum() < len(rows)
    assert np.array_equal(limited.used, rows.used & (margins <= 1.5))
    assert np.array_equal(limited.part[limited.used], rows.part[limited.used])
    assert np.array_equal(limited.labels, rows.labels)


@pytest.mark.parametrize("prompts", [3, 4, 5, 6, 7])
def test_every_part_has_a_prompt_where_there_are_three(tmp_path: Path, prompts: int) -> None:
    rows = LabelledRows.load([label_folder(tmp_path / "labels", prompts=prompts, each=30, shards=1)])
    assert {str(p) for p in np.unique(rows.part)} == {"0", "1", "2"}
    rows.check("hidden")


def test_a_part_with_labels_of_one_kind_is_refused(labels: Path) -> None:
    rows = LabelledRows.load([labels])
    rows.labels[rows.of("select")] = 0
    with pytest.raises(SelfJudgeError, match="part 'select' has labels of one kind only: 60 prompts are too few"):
        rows.check("hidden")


def test_labels_of_another_draft_are_welcome(labels: Path, tmp_path: Path) -> None:
    assert len(LabelledRows.load([labels, label_folder(tmp_path / "other", draft="e", draft_sha256="e" * 64)])) == 1200


def block_of(seed: int, rows: int = 5, gamma: int = 6, vocabulary: int = 11, hidden: int = HIDDEN) -> Any:
    """Logits with a draft that is the most likely token, some that are impossible and one that is nearly so."""
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, gamma + 1, vocabulary, generator=g)
    drafts = torch.randint(0, vocabulary, (rows, gamma), generator=g)
    drafts[0, 0] = logits[0, 0].argmax()
    logits[1, 1, drafts[1, 1]] = -200.0
    logits[2, 2, drafts[2, 2]] = -torch.inf
    states = torch.randn(rows, gamma + 1, hidden, generator=g)
    return SimpleNamespace(draft_tokens=drafts, target_logits=logits, hidden=states, scores=None, argmax=None)


def labelled(path: Path, block: Any) -> Path:
    """A label folder with the numbers of a Block, worked out one place at a time."""
    b, gamma = block.draft_tokens.shape
    said = block.target_logits.double().log_softmax(-1)
    made: dict[str, list[Any]] = {k: [] for k in ("hidden_draft", "hidden_target", "hidden_before", "log_p")}
    for i, j in itertools.product(range(b), range(gamma)):
        log_p = [float(said[i, k, block.draft_tokens[i, k]]) for k in range(gamma)]
        made["hidden_draft"].append(block.hidden[i, j + 1].tolist())
        made["hidden_target"].append((-block.hidden[i, j + 1]).tolist())
        made["hidden_before"].append(block.hidden[i, j].tolist())
        made["log_p"].append([float(said[i, j].max()), log_p[j]])
    arrays = {k: np.asarray(v, np.float32) for k, v in made.items()}
    arrays |= {k: np.zeros((b * gamma, SUFFIX), np.float32) for k in ("original", "substituted", "highest")}

    def fill(found: dict[str, NDArray[Any]]) -> None:
        found.update(arrays)

    return label_folder(path, prompts=b, each=gamma, shards=1, change=fill, method="autojudge")


def block_features(block: Any, features: str) -> torch.Tensor:
    margin = margins(block.target_logits[:, :-1], block.draft_tokens)
    return join_features(features, block.hidden[:, 1:], margin, block.hidden[:, :-1])


@pytest.mark.parametrize("features", FEATURES)
def test_a_block_is_read_as_the_rows_were(tmp_path: Path, features: str) -> None:
    block = block_of(0)
    rows = LabelledRows.load([labelled(tmp_path / "labels", block)])
    x, _ = everything(rows, np.ones(len(rows), bool), features)
    found = block_features(block, features)
    assert found.shape == (5, 6, feature_width(features, HIDDEN))
    assert found.dtype == torch.float32
    same = WIDTH if "margin" in features else HIDDEN
    assert torch.allclose(found.reshape(x.shape)[:, :same], x[:, :same], atol=1e-5)
    assert torch.equal(found[..., :HIDDEN], block.hidden[:, 1:])
    judge = Judge(
        JudgeConfig(hidden_size=HIDDEN, features=features), torch.linspace(-1, 1, feature_width(features, HIDDEN)), 0.2
    )
    assert torch.equal(judge(block), judge.score(found))
    if features == "hidden":
        return
    if "previous" in features:
        assert torch.equal(found[..., WIDTH:], block.hidden[:, :-1])
        assert torch.equal(x[:, WIDTH:], block.hidden[:, :-1].reshape(-1, HIDDEN))
    assert bool(found.isfinite().all())
    for i, j in itertools.product(range(5), range(6)):
        logits = block.target_logits[i, j].tolist()
        margin = logits[block.draft_tokens[i, j]] - max(logits)
        assert float(found[i, j, HIDDEN]) == pytest.approx(max(margin, LOWEST), abs=1e-5)
    assert found[0, 0, HIDDEN] == 0
    for i in (1, 2):
        assert set(found[i, i, HIDDEN:WIDTH].tolist()) == {LOWEST}


def test_the_targets_own_token_is_read_as_the_original_was(tmp_path: Path) -> None:
    block = block_of(1)
    rows = LabelledRows.load([labelled(tmp_path / "labels", block)])
    every = np.ones(len(rows), bool)
    x, y = everything(rows, every, "hidden+margin", originals=True)
    block.draft_tokens, block.hidden = block.target_logits[:, :-1].argmax(-1), -block.hidden
    found = block_features(block, "hidden+margin")
    assert torch.allclose(found.reshape(-1, WIDTH), x[len(rows) :], atol=1e-5)
    assert (y[len(rows) :] == 1).all()


def test_half_precision_logits_are_read_in_full() -> None:
    block = block_of(2)
    block.target_logits, block.hidden = block.target_logits.bfloat16(), block.hidden.bfloat16()
    found = block_features(block, "hidden+margin").double()
    said = block.target_logits[:, :-1].double().log_softmax(-1)
    own = said.gather(-1, block.draft_tokens[..., None])[..., 0]
    most = said.amax(-1)
    assert torch.allclose(found[..., HIDDEN], (own - most).clamp_min(LOWEST), atol=1e-5)


def test_responses_that_lack_a_labelled_prompt_are_one_line(tmp_path: Path) -> None:
    made = label_folder(tmp_path / "labels")
    write_rows(made / "responses.jsonl", list(read_rows(made / "responses.jsonl"))[:-5])
    with pytest.raises(SelfJudgeError):
        LabelledRows.load([made])


def test_evidence_that_was_damaged_is_refused(tmp_path: Path) -> None:
    made = label_folder(tmp_path / "labels", evidence=100)
    content = bytearray((made / "calibration.safetensors").read_bytes())
    content[-40] ^= 0xFF
    (made / "calibration.safetensors").write_bytes(content)
    with pytest.raises(SelfJudgeError, match="damaged"):
        LabelledRows.load([made]).relabel(TrainConfig(suffix_length=2))


def test_tau_of_another_length_rejects_what_the_folders_tau_rejects(tmp_path: Path) -> None:
    """The folder was calibrated to reject 70 % of the critical tokens, not the usual 90."""
    made = label_folder(tmp_path / "labels", evidence=400, tau_evidence={"reject_recall": 0.7})
    expected = compute_tau(made / "calibration.safetensors", 2, 0.7)["tau"]
    assert expected != compute_tau(made / "calibration.safetensors", 2, 0.9)["tau"]
    assert LabelledRows.load([made]).relabel(TrainConfig(suffix_length=2)).taus == [expected]
