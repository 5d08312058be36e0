"""What a student learns from: prompts → the target's answers → its top-k probabilities at every token of them.

Everything lies in numbered files that are written whole, so that an interrupted run goes on where it was; everything
follows from the seed, so that another machine of the same kind makes the same data anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfjudge.decoding.plain import respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.teacher_forced import GRID, Sequences, logit_rows, logits_of, teacher_forced, width
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import SELF, Notify, Source, load_prompts, write_prompts
from selfjudge.store import read_tensors, write_tensors

CHUNK = 4096  # answers per file
TEMPERATURES = (0.7, 1.0)


def make_prompts(
    pair: Pair, sources: Sequence[Source], file: Path, *, seed: int, data: Path | None, held_out: int, longest: int,
    batch: int, notify: Notify,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows {source, ids, answers, held_out}, kept in `file`; prompts longer than `longest` tokens are left out."""
    if file.is_file():
        return _read_prompts(file)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    seen: set[tuple[int, ...]] = set()
    found = {source.name: load_prompts(source, data) for source in sources if source.name not in SELF}
    for source in sources:
        if source.name in SELF:
            asked, report[source.name] = write_prompts(pair, source, seed, batch, notify)
        else:
            asked, report[source.name] = found[source.name], {"given": len(found[source.name])}
        encoded = pair.encode_many([one.prompt for one in asked])
        short = [ids for ids in encoded if len(ids) <= longest]
        new = [ids for ids in dict.fromkeys(map(tuple, short)) if ids not in seen]
        seen.update(new)
        report[source.name] |= {
            "too long": len(encoded) - len(short), "repeated": len(short) - len(new), "prompts": len(new),
        }  # fmt: skip
        rows += [{"source": source.name, "ids": list(ids), "answers": source.answers} for ids in new]
    if len(rows) < 2:
        raise SelfJudgeError("fewer than two prompts are left to learn from: give more with --prompts")
    random.Random(seed).shuffle(rows)  # noqa: S311
    for i, row in enumerate(rows):
        row["held_out"] = i < min(held_out, len(rows) // 2)
    arrays = {
        "ids": np.concatenate([np.asarray(row["ids"], np.int32) for row in rows]),
        "lengths": np.asarray([len(row["ids"]) for row in rows], np.int32),
        "sources": np.asarray([[s.name for s in sources].index(row["source"]) for row in rows], np.int32),
        "answers": np.asarray([row["answers"] for row in rows], np.int32),
        "held_out": np.asarray([row["held_out"] for row in rows], np.uint8),
    }
    write_tensors(file, arrays, {"sources": [s.name for s in sources], "report": report})
    return rows


def _read_prompts(file: Path) -> list[dict[str, Any]]:
    arrays, metadata = read_tensors(file)
    ids = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
    return [
        {"source": metadata["sources"][s], "ids": i.tolist(), "answers": int(a), "held_out": bool(h)}
        for i, s, a, h in zip(ids, arrays["sources"], arrays["answers"], arrays["held_out"], strict=True)
    ]


@dataclass(frozen=True)
class Job:
    """One answer to make."""

    prompt: int
    temperature: float
    seed: int


def jobs(rows: Sequence[dict[str, Any]], seed: int) -> list[Job]:
    """Every answer to make, held-out prompts (greedy alone) first; in chunks of like temperature."""
    made = [Job(i, 0.0, 0) for i, row in enumerate(rows) if row["held_out"]]
    made += [Job(i, 0.0, 0) for i, row in enumerate(rows) if not row["held_out"]]
    most = max(row["answers"] for row in rows)
    for n in range(1, most):
        temperature = TEMPERATURES[(n - 1) % len(TEMPERATURES)]
        made += [
            Job(i, temperature, ((seed * 1_000_003 + n) * 1_000_003 + i) % (1 << 63))
            for i, row in enumerate(rows)
            if not row["held_out"] and row["answers"] > n
        ]
    return made


def chunks(made: Sequence[Job]) -> Iterator[tuple[int, list[Job]]]:
    """Numbered pieces of at most CHUNK answers of one temperature."""
    number, start = 0, 0
    while start < len(made):
        end = start
        while end < min(start + CHUNK, len(made)) and made[end].temperature == made[start].temperature:
            end += 1
        yield number, list(made[start:end])
        number, start = number + 1, end


def make_answers(
    pair: Pair, rows: Sequence[dict[str, Any]], folder: Path, *, seed: int, max_new_tokens: int, top_k: int, batch: int,
    notify: Notify,
) -> list[Path]:  # fmt: skip
    """Answer files: tokens of prompt and answer, lengths, and the target's top-k at every token of the answer."""
    parts = list(chunks(jobs(rows, seed)))
    files = []
    for number, part in parts:
        file = folder / f"answers-{number:05d}.safetensors"
        files.append(file)
        if file.is_file():
            continue
        share = number / len(parts)
        notify("the target answers", share)
        sampling = Sampling(part[0].temperature) if part[0].temperature else None
        prompts = [rows[job.prompt]["ids"] for job in part]
        found: dict[int, list[int]] = {}
        for index, tokens, _ in respond(
            pair.target, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, sampling=sampling,
            seeds=[job.seed for job in part], batch=batch,
        ):  # fmt: skip
            found[index] = tokens
            if len(found) % 64 == 0:
                notify("the target answers", share + len(found) / len(part) / len(parts))
        notify("the target answers, top-k", share)
        sequences = [(prompts[i], found[i]) for i in range(len(part))]
        arrays = {
            "tokens": np.concatenate([np.asarray(p + a, np.int32) for p, a in sequences]),
            "prompt_lengths": np.asarray([len(p) for p, _ in sequences], np.int32),
            "lengths": np.asarray([len(p) + len(a) for p, a in sequences], np.int32),
            "prompts": np.asarray([job.prompt for job in part], np.int32),
        }
        log_p, index_k = teacher(pair, sequences, top_k)
        write_tensors(file, {**arrays, "log_p": log_p, "index": index_k}, {"temperature": part[0].temperature})
    return files


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
        found_p, found_i = torch.cat(values).cpu().numpy(), torch.cat(places).cpu().numpy()
        at = 0
        for i in part:
            size = len(sequences[i][1])
            log_p[starts[i] : starts[i] + size] = found_p[at : at + size]
            index[starts[i] : starts[i] + size] = found_i[at : at + size]
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
    log_p: Tensor
    index: Tensor
    sources: list[str]

    @classmethod
    def read(
        cls, files: Sequence[Path], rows: Sequence[dict[str, Any]], *, held_out: bool, device: torch.device
    ) -> Corpus:
        """The answers to held-out prompts, or all others."""
        parts: dict[str, list[Any]] = {}
        for file in files:
            arrays, _ = read_tensors(file)
            wanted = np.asarray([rows[p]["held_out"] == held_out for p in arrays["prompts"]], bool)
            if not wanted.any():
                continue
            sizes = arrays["lengths"] - arrays["prompt_lengths"]
            if not wanted.all():
                token_mask, answer_mask = np.repeat(wanted, arrays["lengths"]), np.repeat(wanted, sizes)
                arrays = {
                    **{name: arrays[name][wanted] for name in ("prompts", "lengths", "prompt_lengths")},
                    "tokens": arrays["tokens"][token_mask],
                    "log_p": arrays["log_p"][answer_mask],
                    "index": arrays["index"][answer_mask],
                }
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
        if not parts:
            raise SelfJudgeError("there is no answer to learn from")
        whole = {name: np.concatenate(found) for name, found in parts.items()}
        lengths, prompt_lengths = (whole[name].astype(np.int64) for name in ("lengths", "prompt_lengths"))
        size = sum(array.nbytes for array in whole.values())
        place = device
        if device.type == "cuda" and size > 0.4 * torch.cuda.mem_get_info(device)[0]:
            place = torch.device("cpu")

        def first(sizes: Any) -> Tensor:
            return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)[:-1]])).to(place)

        return cls(
            tokens=torch.from_numpy(whole["tokens"]).to(place),
            starts=first(lengths),
            prompt_lengths=torch.from_numpy(prompt_lengths).to(place),
            lengths=torch.from_numpy(lengths).to(place),
            answers=first(lengths - prompt_lengths),
            log_p=torch.from_numpy(whole["log_p"]).to(place),
            index=torch.from_numpy(whole["index"]).to(place),
            sources=[rows[p]["source"] for p in whole["prompts"]],
        )

    def batches(self, tokens: int, generator: torch.Generator) -> list[Tensor]:
        """Sequences of like length together, at most `tokens` padded tokens a batch, in random order; of few shapes."""
        widths = (self.lengths.cpu() + GRID - 1) // GRID * GRID
        order = torch.randperm(len(widths), generator=generator)
        order = order[widths[order].argsort(descending=True, stable=True)]
        made, start = [], 0
        while start < len(order):
            end = start + max(1, tokens // int(widths[order[start]]))
            made.append(order[start:end].to(self.tokens.device))
            start = end
        return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, T], which of them predict a token of the answer [B, T], and its top-k there ([R, k], [R, k])."""
        lengths, prompts = self.lengths[rows], self.prompt_lengths[rows]
        column = torch.arange(width(int(lengths.max()), device), device=rows.device)
        inside = column < lengths[:, None]
        ids = self.tokens[(self.starts[rows][:, None] + column).clamp_max(len(self.tokens) - 1)].long() * inside
        predicts = (column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)
        places = (self.answers[rows][:, None] + column - (prompts[:, None] - 1))[predicts]
        found = (ids, predicts, self.log_p[places], self.index[places])
        return tuple(t.to(device, non_blocking=True) for t in found)  # type: ignore[return-value]
