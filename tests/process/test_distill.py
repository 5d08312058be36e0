"""Distillation on tiny models: data, loss, the student, its training and its compact form."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers as hf

import selfjudge.distill.data as data_module
import selfjudge.distill.learners as student_module
import selfjudge.distill.train as train_module
import selfjudge.engine.teacher_forced as forced_module
from conftest import CONFIGS, VOCAB, tiny_model
from runs import full_disk
from selfjudge.distill.config import DistillConfig, Schedule
from selfjudge.distill.data import Corpus, CorpusEntry, Dataset, list_jobs, read_top_k
from selfjudge.distill.learners import Student, StudentLearner, top_k_loss
from selfjudge.distill.train import Trainer, TrainingState
from selfjudge.errors import SelfJudgeError
from selfjudge.models.checkpoint import read_packed
from selfjudge.models.convert import build_draft, read_compact_draft
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Source
from selfjudge.store import read_tensors, sha256, write_tensors
from selfjudge.types import Notify

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pack_draft import pack_student

CPU = torch.device("cpu")


def quiet(stage: str, share: float) -> None:
    """Nobody listens."""


def shape(layers: int, width: int, **more: Any) -> DistillConfig:
    return DistillConfig(layers=layers, width=width, **more)


def test_a_run_knows_the_checksum_of_its_prompt_file_however_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why?"}\n')
    for name in (str(file), f"{file}:20", f"file:{file}"):
        assert DistillConfig(prompts=(name,)).as_settings()["prompt files"] == {str(file): sha256(file)}


def train(student: Student, corpus: Corpus, checkpoint: Path, schedule: Schedule, notify: Notify) -> TrainingState:
    """Train on a corpus and measure on the same."""
    return Trainer(StudentLearner(student, Dataset(corpus, corpus, {})), checkpoint, schedule, notify).run()


def made_up(sizes: list[tuple[int, int]], k: int = 3) -> tuple[Corpus, list[tuple[list[int], list[int]]]]:
    """A corpus of sequences (prompt, answer) whose top-k rows carry their own number."""
    rng = np.random.default_rng(1)
    sequences = [(rng.integers(1, VOCAB, p).tolist(), rng.integers(1, VOCAB, a).tolist()) for p, a in sizes]
    ends = np.cumsum([a for _, a in sizes])
    index = np.split(np.arange(ends[-1] * k, dtype=np.int32).reshape(-1, k), ends[:-1])
    answers = [
        CorpusEntry("made up", len(p), np.asarray(p + a, np.int32), np.minimum(own, 60_000).astype(np.float16), own)
        for (p, a), own in zip(sequences, index, strict=True)
    ]
    return Corpus(answers), sequences


# data


def test_sources_are_read_from_their_names() -> None:
    assert Source.parse("self", 3) == Source("self", 20000, 3)
    assert Source.parse("gsm8k:70x4", 3) == Source("gsm8k", 70, 4)
    assert Source.parse("dir/file.jsonl:7", 3) == Source("dir/file.jsonl", 7, 3)
    assert Source.parse("dir/file.jsonl", 3) == Source("dir/file.jsonl", None, 3)
    assert Source("gsm8k", 1, 1).licence == "MIT"
    for wrong in ("gsm8k:0", "gsm8k:5x0", "gsm8k:5y", "gsm8k:5xx"):
        with pytest.raises(SelfJudgeError) as caught:
            Source.parse(wrong, 3)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answers", [1, 3, 4, 6])
@pytest.mark.parametrize("size", [4, 25, 4096])
def test_every_answer_is_made_once_and_a_file_has_one_temperature(
    answers: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "CHUNK", size)
    rows = [{"held_out": i < 3, "answers": answers if i % 2 else 1} for i in range(11)]
    parts = list_jobs(rows, seed=5)
    wanted = [job for part in parts for job in part]
    assert sum(job.prompt < 3 for job in wanted) == 3
    assert len(wanted) == sum(1 if i < 3 else row["answers"] for i, row in enumerate(rows))
    sampled = [job.seed for job in wanted if job.temperature]
    assert len(set(sampled)) == len(sampled)
    assert len({(job.prompt, job.seed, job.held_out) for job in wanted}) == len(wanted)
    for part in parts:
        assert 0 < len(part) <= size
        assert len({(job.temperature, job.held_out) for job in part}) == 1


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_teacher_is_the_targets_own_distribution(
    kind: str, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_module, "TOKENS", {"cpu": 40})
    monkeypatch.setattr(forced_module, "LOGITS", {"cpu": 7 * VOCAB})
    options = {"final_logit_softcapping": 2.0} if kind == "gemma2" else {}
    pair = replace(tiny_pair, target_model=Target(tiny_model(kind, seed=3, **options)))
    _, sequences = made_up([(3, 5), (1, 9), (12, 1), (4, 4), (2, 20), (6, 6)])
    log_p, index = read_top_k(pair, sequences, 6)
    expected_p, expected_i = [], []
    for prompt, answer in sequences:
        with torch.no_grad():
            logits = pair.target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.log_softmax(-1).topk(6, -1)
        expected_p.append(best.values)
        expected_i.append(best.indices)
    assert torch.from_numpy(index).equal(torch.cat(expected_i).int())
    assert torch.allclose(torch.from_numpy(log_p).float(), torch.cat(expected_p), atol=0.01)


def test_a_batch_is_aligned() -> None:
    """Position i predicts token i+1: the top-k row at i is the row of token i+1 of the answer."""
    corpus, sequences = made_up([(3, 5), (1, 1), (1, 9), (12, 1), (4, 4), (2, 20)])
    for chosen in ([0], [1, 5], [5, 2, 0, 3], [4, 3, 2, 1, 0, 5]):
        ids, predicts, log_p, index = corpus.batch(chosen, CPU)
        assert ids.shape == predicts.shape == (len(chosen), max(len(p + a) for p, a in (sequences[i] for i in chosen)))
        at = 0
        for row, i in enumerate(chosen):
            prompt, answer = sequences[i]
            whole = prompt + answer
            assert ids[row].tolist() == whole + [0] * (ids.shape[1] - len(whole))
            places = predicts[row].nonzero().squeeze(1).tolist()
            assert [whole[p + 1] for p in places] == answer
            assert places[0] == len(prompt) - 1
            expected = torch.from_numpy(corpus.answers[i].index)
            assert torch.equal(index[at : at + len(answer)], expected)
            assert torch.equal(log_p[at : at + len(answer)], expected.half())
            at += len(answer)
        assert at == len(index)


def padded_size(corpus: Corpus, rows: list[int]) -> int:
    return len(rows) * max(len(corpus.answers[i].tokens) for i in rows)


@pytest.mark.parametrize("tokens", [1, 40, 300, 5000])
def test_batches_cover_everything_once_within_the_budget(tokens: int) -> None:
    rng = np.random.default_rng(0)
    corpus, _ = made_up([(int(p), int(a)) for p, a in rng.integers(1, 20, (400, 2))])
    first = corpus.batches(tokens, torch.Generator().manual_seed(0))
    assert sorted(i for rows in first for i in rows) == list(range(400))
    assert all(len(rows) == 1 or padded_size(corpus, rows) <= tokens for rows in first)
    assert corpus.batches(tokens, torch.Generator().manual_seed(0)) == first
    assert corpus.batches(tokens, torch.Generator().manual_seed(1)) != first


def test_one_longer_sequence_does_not_burst_the_budget() -> None:
    corpus, _ = made_up([*[(5, 104)] * 999, (5, 105)])
    for seed in range(5):
        for rows in corpus.batches(20000, torch.Generator().manual_seed(seed)):
            assert padded_size(corpus, rows) <= 20000


def test_a_corpus_splits_held_out_answers_from_the_others(tmp_path: Path) -> None:
    """A file of answers holds one kind alone."""
    rows = [{"held_out": i in (1, 3), "source": f"s{i}"} for i in range(4)]
    _, sequences = made_up([(2, 3), (4, 1), (1, 6), (3, 2)])
    files = [tmp_path / name for name in "abc"]
    for file, prompts in zip(files, ([1, 3], [0], [2]), strict=True):
        chosen = [sequences[i] for i in prompts]
        numbers = np.repeat(prompts, [len(a) for _, a in chosen])[:, None] * np.ones((1, 2))
        write_tensors(
            file,
            {
                "tokens": np.concatenate([p + a for p, a in chosen]).astype(np.int32),
                "prompt_lengths": np.array([len(p) for p, _ in chosen], np.int32),
                "lengths": np.array([len(p) + len(a) for p, a in chosen], np.int32),
                "prompts": np.array(prompts, np.int32),
                "log_p": numbers.astype(np.float16),
                "index": numbers.astype(np.int32),
            },
        )
    for held_out, wanted in ((True, [1, 3]), (False, [0, 2])):
        corpus = Corpus.read(files, rows, held_out=held_out)
        assert [answer.source for answer in corpus.answers] == [f"s{i}" for i in wanted]
        for row, i in enumerate(wanted):
            ids, _, _, index = corpus.batch([row], CPU)
            assert ids[0].tolist() == [*sequences[i][0], *sequences[i][1]]
            assert index.tolist() == [[i, i]] * len(sequences[i][1])
    with pytest.raises(SelfJudgeError, match="no answer"):
        Corpus.read(files[1:], rows, held_out=True)


# student and loss


def test_the_loss_and_its_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_module, "LOSS_ROWS", 4)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=random)
    output = torch.randn(30, 8, generator=random)
    best = torch.randn(11, 30, generator=random).mul(3).log_softmax(-1).topk(5, -1)
    results = []
    for plain in (True, False):
        h, w = hidden.clone().requires_grad_(), output.clone().requires_grad_()
        if plain:
            p = best.values.exp() / best.values.exp().sum(-1, keepdim=True)
            loss = -(p * (h @ w.T).log_softmax(-1).gather(1, best.indices)).sum(-1).mean()
        else:
            loss = top_k_loss(h, w, best.values, best.indices.int())
        (2.5 * loss).backward()
        results.append((loss.detach(), h.grad, w.grad))
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected, found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("hidden_size", [32, 128])
def test_a_student_and_its_ordinary_model_agree(kind: str, hidden_size: int) -> None:
    """Projections of the target's embeddings, narrower and wider than the target."""
    target = tiny_model(kind, seed=4, hidden_size=hidden_size)
    student = Student(target, shape(2, 64, seed=1))
    ids = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = student.hidden(ids) @ student.output().T
        model = build_draft(student.tensors(), student.raw, target)
        assert model.config.model_type == kind
        assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert expected.isfinite().all()
    for one, other in zip(Student(target, shape(2, 64, seed=1)).parameters(), student.parameters(), strict=True):
        assert torch.equal(one, other)


def test_any_architecture_can_have_a_student(any_model: hf.PreTrainedModel) -> None:
    student = Student(any_model, shape(1, 64))
    ids = torch.tensor([[5, 9, 2, 7]])
    with torch.no_grad():
        model = build_draft(student.tensors(), student.raw, any_model)
        assert torch.allclose(model(ids).logits, student.hidden(ids) @ student.output().T, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "width", "message"), [(0, 64, "`layers`"), (1, 32, "64"), (1, 100, "multiple of 64")]
)
def test_impossible_shapes_are_refused(layers: int, width: int, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message) as caught:
        shape(layers, width).check()
    assert "\n" not in str(caught.value)


def learnable(target: hf.PreTrainedModel) -> Corpus:
    """Answers that go up by one, with a confident teacher."""
    log_p = np.full((12, 2), (-0.01, -4.6), np.float16)
    answers = []
    for first in range(24):
        tokens = ((first + np.arange(14)) % (VOCAB - 4) + 4).astype(np.int32)
        index = np.stack([tokens[2:], (tokens[2:] + 7) % VOCAB], 1)
        answers.append(CorpusEntry("made up", 2, tokens, log_p, index))
    return Corpus(answers)


def test_a_student_learns(tmp_path: Path) -> None:
    target = tiny_model(seed=4)
    student, corpus = Student(target, shape(1, 64)), learnable(target)
    learner = StudentLearner(student, Dataset(corpus, corpus, {}))
    before = learner.agreement()["all"]
    schedule = Schedule(9, steps=200, rate=5e-3, batch_tokens=100)
    state = train(student, corpus, tmp_path / "train", schedule, quiet)
    after = learner.agreement()
    assert before < 0.3
    assert after["all"] == after["made up"] == state.best > 0.8
    assert state.history[-1]["loss"] < 0.5 * state.history[0]["loss"]


def test_training_goes_on_where_it_was(tmp_path: Path) -> None:
    target = tiny_model(seed=4)
    corpus = learnable(target)

    def run(minutes: float) -> tuple[TrainingState, Student]:
        student = Student(target, shape(1, 64))
        schedule = Schedule(minutes, rate=5e-3, batch_tokens=100, patience=99)
        return train(student, corpus, tmp_path / "train", schedule, quiet), student

    first, student = run(0.004)
    again, same = run(0.004)
    assert (again.step, again.history) == (first.step, first.history)
    for one, other in zip(student.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)
    more, _ = run(first.seconds / 30)  # twice as long as it took on this machine
    assert more.step > first.step
    assert more.seconds > first.seconds
    assert more.history[: len(first.history)] == first.history
    with pytest.raises(SelfJudgeError, match="another shape") as caught:
        train(Student(target, shape(1, 128)), corpus, tmp_path / "train", Schedule(1), quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon multiplies in bfloat16, whatever the CPU
@pytest.mark.parametrize("muon", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupted_training_ends_in_the_same_weights(
    muon: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of every optimiser travels with the checkpoint."""
    monkeypatch.setattr(train_module, "make_optimisers", partial(train_module.make_optimisers, muon=muon))
    target = tiny_model(seed=4)
    corpus = learnable(target)

    def run(name: str, evaluations_until: int | None = None) -> Student:
        student, seen = Student(target, shape(1, 64)), 0

        def notify(stage: str, share: float) -> None:
            nonlocal seen
            seen += stage.startswith("training:")
            if seen == evaluations_until:
                raise KeyboardInterrupt

        schedule = Schedule(1, steps=6, rate=5e-3, batch_tokens=100, patience=99)
        train(student, corpus, tmp_path / name, schedule, notify)
        return student

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", evaluations_until=3)
    parts = run("parts")
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_that_patience_ended_is_not_taken_up_again(tmp_path: Path) -> None:
    target = tiny_model(seed=4)
    corpus = learnable(target)
    schedule = Schedule(1, steps=60, rate=0.0, batch_tokens=100, patience=2)
    first = train(Student(target, shape(1, 64)), corpus, tmp_path / "train", schedule, quiet)
    assert first.without_gain == 2
    assert first.step < 60
    again = train(Student(target, shape(1, 64)), corpus, tmp_path / "train", schedule, quiet)
    assert again.step == first.step


# compact form


@pytest.mark.parametrize("magnitude", [30.0, 0.05, 1e-4])
def test_int8_rows_are_off_by_half_a_step_at_most(tmp_path: Path, magnitude: float) -> None:
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * magnitude
    matrix[7] = 0
    vector = torch.randn(300)
    size = pack_student({"m": matrix, "v": vector}, {"model_type": "llama"}, tmp_path)
    found = read_packed(tmp_path)
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert ((found["m"] - matrix).abs() <= 0.501 * step + 127 * step * 2**-11 + 1e-12).all()
    assert (found["m"][7] == 0).all()
    assert torch.equal(found["v"], vector.half().float())
    assert 1 <= size / matrix.numel() < 1.05
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama"}


def test_tensor_files_come_back_as_they_were_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.ones(3, np.float16),
        "c": np.zeros((0, 4), np.float32),
    }
    file = tmp_path / "deep" / "x.safetensors"
    write_tensors(file, arrays, {"é": [1, None, {"b": 2.5}]})
    found, metadata = read_tensors(file)
    assert metadata == {"é": [1, None, {"b": 2.5}]}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    with pytest.raises(SelfJudgeError, match="No space left"):
        write_tensors(file, {}, {})
    assert list(file.parent.iterdir()) == [file]
    assert read_tensors(file)[1] == metadata
    whole = file.read_bytes()
    for damaged in (b"", whole[:20], whole[:-5], b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(SelfJudgeError, match="cannot read") as caught:
            read_tensors(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(SelfJudgeError, match="cannot read"):
        read_tensors(tmp_path / "none")


def test_a_damaged_compact_draft_is_named(tmp_path: Path) -> None:
    target = tiny_model(seed=4)
    student = Student(target, shape(1, 64))
    pack_student(student.tensors(), student.raw, tmp_path)
    (tmp_path / "draft.safetensors").write_bytes((tmp_path / "draft.safetensors").read_bytes()[:-100])
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SelfJudgeError, match=r"cannot read|has no model") as caught:
            read_compact_draft(folder, target)
        assert "\n" not in str(caught.value)
