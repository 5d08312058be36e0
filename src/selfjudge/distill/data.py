"""Training data of a draft: prompts → the target's answers → its top-k probabilities at every token of them.
Numbered files are written whole and sealed, so that an interrupted run goes on where it was. The seed decides all of
it: another machine of the same kind makes the same data."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.decoding.plain import respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.distill.config import DistillConfig
from selfjudge.engine.teacher_forced import GRID, Sequences, choose_width, logit_rows, logits_of, teacher_forced
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import prompt_key, write_training_prompts
from selfjudge.models.device import send
from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import Collector
from selfjudge.store import RunFolder, read_rows, read_tensors, sha256, write_rows, write_tensors
from selfjudge.store.schema import DistillPrompt, PromptsSeal
from selfjudge.types import Notify

Row = dict[str, Any]  # a prompt, as `DistillPrompt` describes it
CHUNK = 4096  # answers per file
MEASURE_TOKENS = 32768  # tokens of a batch without gradients
TEMPERATURES = (0.7, 1.0)
PROMPTS = "work/prompts.jsonl"


@dataclass(frozen=True)
class Job:
    """One answer to make."""

    prompt: int
    temperature: float
    seed: int
    held_out: bool


@dataclass(frozen=True)
class DataMaker:
    """Makes the data of a run, in sealed files below `work`, or reads what an earlier process has made."""

    pair: Pair
    config: DistillConfig
    run: RunFolder
    data: Path | None  # the folder of the benchmarks' files
    notify: Notify

    def make(self) -> Dataset:
        """All prompts and answers; the memory of the target's engine is free afterwards."""
        rows, seal = self._prompts()
        write_training_prompts(self.run.path, (prompt_key(row["ids"]) for row in rows))
        files = self._answers(rows, seal.get("seconds", 0.0))
        self.pair.target_model.release()
        if self.pair.target.device.type == "cuda":
            torch.cuda.empty_cache()
        held_out, training = (Corpus.read(files, rows, held_out=held) for held in (True, False))
        return Dataset(training, held_out, seal["yields"])

    @cached_property
    def origin(self) -> str:
        """The checksum of the prompts, which all later parts are made from."""
        return sha256(self.run.path / PROMPTS)

    def _prompts(self) -> tuple[list[Row], dict[str, Any]]:
        """The prompts in random order, and their seal, which says what became of each source's prompts."""
        seal = self.run.sealed("prompts", schema=PromptsSeal) or self._make_prompts()
        return list(read_rows(self.run.path / PROMPTS, DistillPrompt)), seal

    def _make_prompts(self) -> dict[str, Any]:
        """Collect the prompts, choose which are held out, and write them in random order; their seal."""
        config, begun = self.config, time.monotonic()
        longest = config.max_prompt_tokens
        collect = Collector(self.pair, longest, config.seed, config.batch, self.data, self.notify)
        records, report = collect(config.sources)
        if len(records) < 2:
            raise SelfJudgeError("fewer than two prompts are left to learn from: give more with `prompts`")
        random.Random(config.seed).shuffle(records)  # noqa: S311
        answers = {source.name: source.answers for source in config.sources}
        chosen = choose_held_out([record.source for record, _ in records], config.held_out)
        rows = (
            {"source": record.source, "ids": ids, "answers": answers[record.source], "held_out": i in chosen}
            for i, (record, ids) in enumerate(records)
        )
        write_rows(self.run.path / PROMPTS, rows)
        return self.run.seal("prompts", [PROMPTS], yields=report, **self._seconds(begun))

    def _answers(self, rows: Sequence[Row], spent: float) -> list[Path]:
        """Files of answers, held-out first, others mixed, within `data_minutes`; the prompts took `spent` seconds."""
        limit, order = self.config.data_minutes, random.Random(self.config.seed)  # noqa: S311
        parts = list(enumerate(list_jobs(rows, self.config.seed)))
        parts.sort(key=lambda part: (not part[1][0].held_out, order.random()))
        files: list[Path] = []
        for done, (number, part) in enumerate(parts):

            def tell(stage: str, share: float, done: int = done) -> None:
                self.notify(stage, (done + share) / len(parts))

            name = f"answers-{number:05d}"
            seal = self.run.sealed(name, self.origin)
            if seal is None:
                learnable = done > 0 and not parts[done - 1][1][0].held_out
                if limit is not None and spent > 60 * limit and learnable:
                    continue  # a later one may be there already
                seal = self._make_answers(name, rows, part, tell)
            spent += seal.get("seconds", 0.0)
            files.append(self.run.work / f"{name}.safetensors")
        return files

    def _make_answers(self, name: str, rows: Sequence[Row], part: Sequence[Job], tell: Notify) -> dict[str, Any]:
        """Make a file: tokens of prompts and answers, lengths, for a student the target's top-k at answer tokens."""
        begun, stage, config = time.monotonic(), "the target answers", self.config
        tell(stage, 0.0)
        prompts = [rows[job.prompt]["ids"] for job in part]
        answers: dict[int, list[int]] = {}
        for index, tokens, _ in respond(
            self.pair.target_model,
            prompts,
            eos_ids=self.pair.eos_ids,
            max_new_tokens=config.max_new_tokens,
            sampling=Sampling(part[0].temperature) if part[0].temperature else None,
            seeds=[job.seed for job in part],
            batch=config.batch,
        ):
            answers[index] = tokens
            if len(answers) % 64 == 0:
                tell(stage, len(answers) / len(part))
        sequences = [(prompt, answers[i]) for i, prompt in enumerate(prompts)]
        arrays = {
            "tokens": np.concatenate([np.asarray([*prompt, *answer], np.int32) for prompt, answer in sequences]),
            "prompt_lengths": np.asarray([len(prompt) for prompt, _ in sequences], np.int32),
            "lengths": np.asarray([len(prompt) + len(answer) for prompt, answer in sequences], np.int32),
            "prompts": np.asarray([job.prompt for job in part], np.int32),
        }
        if config.kind == "layers":
            tell(f"{stage}, top-k", 0.0)
            arrays["log_p"], arrays["index"] = read_top_k(self.pair, sequences, config.top_k)
        write_tensors(self.run.work / f"{name}.safetensors", arrays)
        return self.run.seal(name, [f"work/{name}.safetensors"], self.origin, **self._seconds(begun))

    def _seconds(self, begun: float) -> dict[str, Any]:
        """The seconds since then, for a seal: only where time is limited, or repeated work would leave other bytes."""
        return {} if self.config.data_minutes is None else {"seconds": round(time.monotonic() - begun, 1)}


def choose_held_out(sources: Sequence[str], count: int) -> set[int]:
    """Which prompts are held out: as many of each source, at most half of each."""
    places: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        places.setdefault(source, []).append(i)
    ranked = sorted((rank, i) for own in places.values() for rank, i in enumerate(own[: len(own) // 2]))
    return {i for _, i in ranked[:count]} or {0}


def list_jobs(rows: Sequence[Row], seed: int) -> list[list[Job]]:
    """Every answer to make, in parts of at most CHUNK: those to held-out prompts, which are greedy alone, then the
    first answers to the others, the second ones, and so on. The answers of a part have one temperature."""
    rounds = [[Job(i, 0.0, 0, True) for i, row in enumerate(rows) if row["held_out"]]]
    for n in range(max(row["answers"] for row in rows)):
        temperature = TEMPERATURES[(n - 1) % len(TEMPERATURES)] if n else 0.0
        prompts = [i for i, row in enumerate(rows) if row["answers"] > n and not row["held_out"]]
        seeds = [((seed * 1_000_003 + n) * 1_000_003 + i) % (1 << 63) if n else 0 for i in prompts]
        rounds.append([Job(i, temperature, own, False) for i, own in zip(prompts, seeds, strict=True)])
    return [jobs[start : start + CHUNK] for jobs in rounds for start in range(0, len(jobs), CHUNK)]


@torch.no_grad()
def read_top_k(pair: Pair, sequences: Sequences, k: int) -> tuple[Any, Any]:
    """The target's k most likely tokens at every token of all answers: [R, k] float16 log-probabilities, int32 ids."""
    k = min(k, pair.target.get_output_embeddings().weight.shape[0])
    starts = np.cumsum([0, *(len(answer) for _, answer in sequences)])
    log_p = torch.empty((starts[-1], k), dtype=torch.float16)
    index = torch.empty((starts[-1], k), dtype=torch.int32)
    for part, hidden in teacher_forced(pair.target_model, sequences):
        values, places = [], []
        for piece in hidden.split(logit_rows(pair.target)):
            logits = logits_of(pair.target, piece)
            best, tokens = logits.topk(k, -1)
            values.append((best.float() - logits.float().logsumexp(-1, keepdim=True)).half())
            places.append(tokens.int())
        sizes = [len(sequences[i][1]) for i in part]
        columns = (torch.cat(column).cpu().split(sizes) for column in (values, places))
        for i, p, t in zip(part, *columns, strict=True):
            log_p[starts[i] : starts[i + 1]], index[starts[i] : starts[i + 1]] = p, t
    return log_p.numpy(), index.numpy()


@dataclass(frozen=True)
class Dataset:
    """All that a student learns from and is measured on."""

    training: Corpus
    held_out: Corpus
    report: dict[str, Any]  # what became of the prompts, by source


class CorpusEntry(NamedTuple):
    """A prompt and the target's answer to it."""

    source: str  # the prompt's source
    prompt_length: int  # in tokens
    tokens: NDArray[np.int32]  # of prompt and answer
    log_p: Any = None  # [A, k] the target's largest log-probabilities at tokens of the answer; None: it is asked again
    index: Any = None  # [A, k] the tokens that `log_p` belongs to


@dataclass(frozen=True)
class Corpus:
    """Answers in memory."""

    answers: list[CorpusEntry]

    @classmethod
    def read(cls, files: Sequence[Path], rows: Sequence[Row], *, held_out: bool) -> Corpus:
        """The answers to held-out prompts, or all others."""
        answers: list[CorpusEntry] = []
        for file in files:
            arrays, _ = read_tensors(file)
            if rows[arrays["prompts"][0]]["held_out"] != held_out:
                continue
            sources = [rows[prompt]["source"] for prompt in arrays["prompts"]]
            prompts, lengths = arrays["prompt_lengths"], arrays["lengths"]
            tokens = np.split(arrays["tokens"], np.cumsum(lengths)[:-1])
            ends = np.cumsum(lengths - prompts)[:-1]  # of answers among the tokens of answers
            top_k = [np.split(arrays[name], ends) for name in ("log_p", "index") if name in arrays]
            answers += map(CorpusEntry, sources, prompts.tolist(), tokens, *top_k)
        if not answers:
            raise SelfJudgeError("there is no answer to learn from")
        return cls(answers)

    def batches(self, tokens: int, generator: torch.Generator) -> list[list[int]]:
        """Indices of answers of like length, at most `tokens` padded tokens a batch, in random order and few shapes."""
        widths = [-(-len(answer.tokens) // GRID) * GRID for answer in self.answers]
        order = torch.randperm(len(widths), generator=generator).tolist()
        order.sort(key=lambda i: -widths[i])
        batches, start = [], 0
        while start < len(order):
            end = start + max(1, tokens // widths[order[start]])
            batches.append(order[start:end])
            start = end
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def ids(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """Tokens [B, T] of these answers and their prompts, zeros after their ends."""
        sequences = [self.answers[i].tokens for i in rows]
        ids = np.zeros((len(sequences), choose_width(max(map(len, sequences)), device)), np.int64)
        for row, tokens in zip(ids, sequences, strict=True):
            row[: len(tokens)] = tokens
        return send(ids, device)

    def batch(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, T], which of them predict a token of the answer [B, T], and its top-k there ([R, k], [R, k])."""
        answers, ids = [self.answers[i] for i in rows], self.ids(rows, device)
        predicts = np.zeros(ids.shape, bool)
        for row, answer in zip(predicts, answers, strict=True):
            row[answer.prompt_length - 1 : len(answer.tokens) - 1] = True
        log_p, index = (np.concatenate(parts) for parts in zip(*((a.log_p, a.index) for a in answers), strict=True))
        return ids, send(predicts, device), send(log_p, device), send(index, device)

    @property
    def answer_tokens(self) -> int:
        return sum(len(answer.tokens) - answer.prompt_length for answer in self.answers)

    def count_tokens(self, vocabulary: int) -> Tensor:
        """[V] how often each token occurs in the answers."""
        tokens = np.concatenate([answer.tokens[answer.prompt_length :] for answer in self.answers])
        return torch.from_numpy(np.bincount(tokens, minlength=vocabulary))
