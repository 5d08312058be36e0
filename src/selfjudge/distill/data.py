"""What a student learns from: prompts → the target's answers → its top-k probabilities at every token of them.

Everything lies in numbered files that are written whole and sealed, so that an interrupted run goes on where it was.
Everything follows from the seed, so that another machine of the same kind makes the same data anew.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfjudge.decoding.plain import respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.distill.config import DistillConfig
from selfjudge.engine.teacher_forced import GRID, Sequences, logit_rows, logits_of, teacher_forced, width
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.prompts.collect import Collector
from selfjudge.store import Journal, RunFolder, read_tensors, sha256, write_tensors
from selfjudge.store.artefacts import DistillPrompts, WrittenRow
from selfjudge.store.schema import conform
from selfjudge.types import Notify

Row = dict[str, Any]
CHUNK = 4096  # answers per file
TEMPERATURES = (0.7, 1.0)


@dataclass(frozen=True)
class Maker:
    """Makes the data of a run: numbered files below `work`, each sealed, so that an interrupted run goes on."""

    pair: Pair
    config: DistillConfig
    run: RunFolder
    data: Path | None
    notify: Notify

    def prompts(self) -> tuple[list[Row], dict[str, Any]]:
        """Rows {source, ids, answers, held_out} in random order, and what became of each source's prompts."""
        file = self.run.work / "prompts.safetensors"
        with Journal(self.run.work / "written.jsonl", WrittenRow) as journal:
            if self.run.sealed("prompts") is None:
                self._make_prompts(file, journal)
            journal.remove()
        return _read_prompts(file)

    def _make_prompts(self, file: Path, journal: Journal) -> None:
        config, begun = self.config, time.monotonic() - journal.seconds
        longest = config.max_prompt_tokens
        collect = Collector(self.pair, longest, config.seed, config.batch, self.data, self.notify, journal=journal)
        records, report = collect(config.sources)
        if len(records) < 2:
            raise SelfJudgeError("fewer than two prompts are left to learn from: give more with `prompts`")
        answers = {source.name: source.answers for source in config.sources}
        rows = [{"source": record.source, "ids": ids, "answers": answers[record.source]} for record, ids in records]
        random.Random(config.seed).shuffle(rows)  # noqa: S311
        chosen = held_out(rows, config.held_out, by_source=config.kind == "eagle3")
        for i, row in enumerate(rows):
            row["held_out"] = i in chosen
        _write_prompts(file, rows, report)
        self.run.seal("prompts", ["work/prompts.safetensors"], **self._seconds(begun))

    def answers(self, rows: Sequence[Row]) -> list[Path]:
        """Files of answers: tokens of prompt and answer, lengths, the target's top-k at every token of the answer.

        For a head there is no top-k, and temperatures come mixed: files may be left out, when `data_minutes` are spent.
        """
        config = self.config
        parts = list(chunks(jobs(rows, config.seed)))
        if config.kind == "eagle3":
            first, others = parts[:1], parts[1:]  # the first holds the held-out answers
            random.Random(config.seed).shuffle(others)  # noqa: S311
            parts = first + others
        made_from = sha256(self.run.work / "prompts.safetensors")
        spent = (self.run.sealed("prompts") or {}).get("seconds", 0.0)
        files = []
        for done, (number, part) in enumerate(parts):
            name = f"answers-{number:05d}"
            seal = self.run.sealed(name, made_from)
            if seal is None:
                if config.data_minutes is not None and spent > 60 * config.data_minutes and done > 1:
                    continue  # a later one may be there already
                seal = self._answer(name, rows, part, (done, len(parts)), made_from)
            spent += seal.get("seconds", 0.0)
            files.append(self.run.work / f"{name}.safetensors")
        return files

    def _answer(
        self, name: str, rows: Sequence[Row], part: Sequence[Job], place: tuple[int, int], made_from: str
    ) -> dict[str, Any]:
        """Make one file of answers, the part at `place` among so many; its seal."""
        begun, (done, count) = time.monotonic(), place
        sequences = self._sequences(rows, part, done / count, 1 / count)
        arrays = _arrays(part, sequences)
        if self.config.kind == "layers":
            self.notify("the target answers, top-k", done / count)
            arrays["log_p"], arrays["index"] = teacher(self.pair, sequences, self.config.top_k)
        write_tensors(self.run.work / f"{name}.safetensors", arrays, {"temperature": part[0].temperature})
        return self.run.seal(name, [f"work/{name}.safetensors"], made_from, **self._seconds(begun))

    def _seconds(self, begun: float) -> dict[str, Any]:
        """What a seal says of the time since then: only where it counts, or the same work would leave other bytes."""
        return {} if self.config.data_minutes is None else {"seconds": round(time.monotonic() - begun, 1)}

    def _sequences(self, rows: Sequence[Row], part: Sequence[Job], done: float, share: float) -> Sequences:
        """Prompts and the target's answers to them; `done` of the work is done before, this part is a `share` of it."""
        self.notify("the target answers", done)
        prompts = [rows[job.prompt]["ids"] for job in part]
        answers: dict[int, list[int]] = {}
        for index, tokens, _ in respond(
            self.pair.target,
            prompts,
            eos_ids=self.pair.eos_ids,
            max_new_tokens=self.config.max_new_tokens,
            sampling=Sampling(part[0].temperature) if part[0].temperature else None,
            seeds=[job.seed for job in part],
            batch=self.config.batch,
        ):
            answers[index] = tokens
            if len(answers) % 64 == 0:
                self.notify("the target answers", done + share * len(answers) / len(part))
        return [(prompt, answers[i]) for i, prompt in enumerate(prompts)]


def held_out(rows: Sequence[Row], count: int, *, by_source: bool) -> set[int]:
    """Which rows are held out: the first, at most half of them; or as many of each source, at most half of each."""
    if not by_source:
        return set(range(min(count, len(rows) // 2)))
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row["source"], []).append(i)
    ranked = sorted((rank, i) for own in places.values() for rank, i in enumerate(own[: len(own) // 2]))
    return {i for _, i in ranked[:count]} or {0}


def _arrays(part: Sequence[Job], sequences: Sequences) -> dict[str, Any]:
    return {
        "tokens": np.concatenate([np.asarray([*prompt, *answer], np.int32) for prompt, answer in sequences]),
        "prompt_lengths": np.asarray([len(prompt) for prompt, _ in sequences], np.int32),
        "lengths": np.asarray([len(prompt) + len(answer) for prompt, answer in sequences], np.int32),
        "prompts": np.asarray([job.prompt for job in part], np.int32),
    }


def _write_prompts(file: Path, rows: Sequence[Row], report: dict[str, Any]) -> None:
    names = list(report)
    arrays = {
        "ids": np.concatenate([np.asarray(row["ids"], np.int32) for row in rows]),
        "lengths": np.asarray([len(row["ids"]) for row in rows], np.int32),
        "sources": np.asarray([names.index(row["source"]) for row in rows], np.int32),
        "answers": np.asarray([row["answers"] for row in rows], np.int32),
        "held_out": np.asarray([row["held_out"] for row in rows], np.uint8),
    }
    write_tensors(file, arrays, {"sources": names, "report": report})


def _read_prompts(file: Path) -> tuple[list[Row], dict[str, Any]]:
    arrays, metadata = read_tensors(file)
    conform(metadata, DistillPrompts, file)
    ids = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
    rows = [
        {"source": metadata["sources"][s], "ids": i.tolist(), "answers": int(a), "held_out": bool(h)}
        for i, s, a, h in zip(ids, arrays["sources"], arrays["answers"], arrays["held_out"], strict=True)
    ]
    return rows, metadata["report"]


@dataclass(frozen=True)
class Job:
    """One answer to make."""

    prompt: int
    temperature: float
    seed: int


def jobs(rows: Sequence[Row], seed: int) -> list[Job]:
    """Every answer to make, held-out prompts (greedy alone) first; in chunks of like temperature."""
    every = [Job(i, 0.0, 0) for i, row in enumerate(rows) if row["held_out"]]
    every += [Job(i, 0.0, 0) for i, row in enumerate(rows) if not row["held_out"]]
    most = max(row["answers"] for row in rows)
    for n in range(1, most):
        temperature = TEMPERATURES[(n - 1) % len(TEMPERATURES)]
        every += [
            Job(i, temperature, ((seed * 1_000_003 + n) * 1_000_003 + i) % (1 << 63))
            for i, row in enumerate(rows)
            if not row["held_out"] and row["answers"] > n
        ]
    return every


def chunks(every: Sequence[Job]) -> Iterator[tuple[int, list[Job]]]:
    """Numbered pieces of at most CHUNK answers of one temperature."""
    number, start = 0, 0
    while start < len(every):
        end = start
        while end < min(start + CHUNK, len(every)) and every[end].temperature == every[start].temperature:
            end += 1
        yield number, list(every[start:end])
        number, start = number + 1, end


@torch.no_grad()
def teacher(pair: Pair, sequences: Sequences, k: int) -> tuple[Any, Any]:
    """[R, k] log-probabilities (float16) and ids (int32) at every token of every answer, in order."""
    k = min(k, pair.target.get_output_embeddings().weight.shape[0])
    starts = np.cumsum([0, *(len(answer) for _, answer in sequences)])
    log_p = np.empty((starts[-1], k), np.float16)
    index = np.empty((starts[-1], k), np.int32)
    for part, hidden in teacher_forced(pair.target, sequences):
        values, places = [], []
        for piece in hidden.split(logit_rows(pair.target)):
            logits = logits_of(pair.target, piece)
            best, place = largest(logits, k)
            values.append((best.float() - logits.float().logsumexp(-1, keepdim=True)).half())
            places.append(place.int())
        part_p, part_i = torch.cat(values).cpu().numpy(), torch.cat(places).cpu().numpy()
        at = 0
        for i in part:
            size = len(sequences[i][1])
            log_p[starts[i] : starts[i] + size] = part_p[at : at + size]
            index[starts[i] : starts[i] + size] = part_i[at : at + size]
            at += size
    return log_p, index


def largest(logits: Tensor, k: int, group: int = 128) -> tuple[Tensor, Tensor]:
    """`topk` of long rows, several times faster: the k largest lie in the k groups with the largest maxima."""
    rows, size = logits.shape
    if size % group or size // group <= k:
        values, index = logits.topk(k, -1)
        return values, index
    grouped = logits.view(rows, size // group, group)
    groups = grouped.amax(-1).topk(k, -1).indices  # [R, k]
    near = grouped.gather(1, groups[..., None].expand(rows, k, group)).view(rows, k * group)
    values, at = near.topk(k, -1)
    return values, groups.gather(1, at // group) * group + at % group


@dataclass(frozen=True)
class Data:
    """All that a student learns from and is measured on."""

    training: Corpus
    held_out: Corpus
    report: dict[str, Any]
    """What became of the prompts, by source."""


@dataclass
class Corpus:
    """Answers in memory, flat; on the device if they fit."""

    tokens: Tensor
    starts: Tensor
    """Where each sequence begins in `tokens`."""
    prompt_lengths: Tensor
    lengths: Tensor
    answers: Tensor
    """Where each sequence's answer begins in `log_p` and `index`."""
    log_p: Tensor | None
    """The target's top-k at every token of the answers, and `index`; None where the target is asked again."""
    index: Tensor | None
    sources: list[str]

    @classmethod
    def read(cls, files: Sequence[Path], rows: Sequence[Row], *, held_out: bool, device: torch.device) -> Corpus:
        """The answers to held-out prompts, or all others."""
        parts: dict[str, list[Any]] = {}
        for file in files:
            for name, array in _chosen(read_tensors(file)[0], rows, held_out).items():
                parts.setdefault(name, []).append(array)
        if not sum(len(prompts) for prompts in parts.get("prompts", [])):
            raise SelfJudgeError("there is no answer to learn from")
        arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
        lengths, prompt_lengths = (arrays[name].astype(np.int64) for name in ("lengths", "prompt_lengths"))
        size = sum(array.nbytes for array in arrays.values())
        place = device
        if device.type == "cuda" and size > 0.4 * torch.cuda.mem_get_info(device)[0]:
            place = torch.device("cpu")

        def put(array: Any) -> Tensor:
            return torch.from_numpy(array).to(place)

        def starts(sizes: Any) -> Tensor:
            return put(np.concatenate([[0], np.cumsum(sizes)[:-1]]))

        return cls(
            tokens=put(arrays["tokens"]),
            starts=starts(lengths),
            prompt_lengths=put(prompt_lengths),
            lengths=put(lengths),
            answers=starts(lengths - prompt_lengths),
            log_p=put(arrays["log_p"]) if "log_p" in arrays else None,
            index=put(arrays["index"]) if "index" in arrays else None,
            sources=[rows[p]["source"] for p in arrays["prompts"]],
        )

    def batches(self, tokens: int, generator: torch.Generator) -> list[Tensor]:
        """Sequences of like length together, at most `tokens` padded tokens a batch, in random order and few shapes."""
        widths = (self.lengths.cpu() + GRID - 1) // GRID * GRID
        order = torch.randperm(len(widths), generator=generator)
        order = order[widths[order].argsort(descending=True, stable=True)]
        batches, start = [], 0
        while start < len(order):
            end = start + max(1, tokens // int(widths[order[start]]))
            batches.append(order[start:end].to(self.tokens.device))
            start = end
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def ids(self, rows: Tensor, device: torch.device) -> Tensor:
        """Tokens [B, T] of these sequences, zeros after their ends."""
        lengths = self.lengths[rows]
        column = torch.arange(width(int(lengths.max()), device), device=rows.device)
        places = (self.starts[rows][:, None] + column).clamp_max(len(self.tokens) - 1)
        ids: Tensor = self.tokens[places].long() * (column < lengths[:, None])
        return ids.to(device, non_blocking=True)

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, T], which of them predict a token of the answer [B, T], and its top-k there ([R, k], [R, k])."""
        assert self.log_p is not None
        assert self.index is not None
        lengths, prompts, ids = self.lengths[rows], self.prompt_lengths[rows], self.ids(rows, device)
        column = torch.arange(ids.shape[1], device=rows.device)
        predicts = (column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)
        places = (self.answers[rows][:, None] + column - (prompts[:, None] - 1))[predicts]
        tensors = (predicts, self.log_p[places], self.index[places])
        return ids, *(t.to(device, non_blocking=True) for t in tensors)  # type: ignore[return-value]

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def counts(self, vocabulary: int) -> Tensor:
        """[V] how often each token occurs in the answers."""
        sequence = torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)
        place = torch.arange(len(self.tokens), device=sequence.device) - self.starts[sequence]
        return torch.bincount(self.tokens[place >= self.prompt_lengths[sequence]].long(), minlength=vocabulary)


def _chosen(arrays: dict[str, Any], rows: Sequence[Row], held_out: bool) -> dict[str, Any]:
    """The arrays of a file of answers, of those to held-out prompts alone or of all others."""
    wanted = np.asarray([rows[p]["held_out"] == held_out for p in arrays["prompts"]], bool)
    if wanted.all():
        return arrays
    tokens = np.repeat(wanted, arrays["lengths"])
    answers = np.repeat(wanted, arrays["lengths"] - arrays["prompt_lengths"])
    masks = {"tokens": tokens, "log_p": answers, "index": answers}
    return {name: array[masks.get(name, wanted)] for name, array in arrays.items()}
