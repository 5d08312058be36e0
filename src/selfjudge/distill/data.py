"""What a student learns from: prompts → the target's answers → its top-k probabilities at every token of them.

Everything lies in numbered files that are written whole, so that an interrupted run goes on where it was; everything
follows from the seed, so that another machine of the same kind makes the same data anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfjudge.accept import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.prompts import read_prompts
from selfjudge.respond import respond
from selfjudge.self_written import written_passages, written_prompts
from selfjudge.store import read_tensors, write_tensors
from selfjudge.tasks import NAMES, task
from selfjudge.tasks.cnn_dailymail import summarise

CHUNK = 4096  # answers per file
TEACHER_TOKENS = {"cuda": 131072}  # tokens of a pass of the target, by device
TEACHER_LOGITS = {"cuda": 1 << 29}  # logits at a time
TEMPERATURES = (0.7, 1.0)
SELF = ("self", "self-summaries")

Notify = Callable[[str, float], None]


@dataclass(frozen=True)
class Source:
    """Where prompts come from: `self`, `self-summaries`, a task's training split or a file."""

    name: str
    count: int | None
    answers: int
    """Per prompt: one greedy, the others sampled."""

    @classmethod
    def parse(cls, text: str, answers: int) -> Source:
        """`NAME`, `NAME:COUNT` or `NAME:COUNTxANSWERS`, such as `self:20000` or `gsm8k:7000x4`."""
        name, colon, numbers = text.rpartition(":")
        if not colon or not numbers[:1].isdigit():
            return cls(text, 20000 if text in SELF else None, answers)
        count, _, each = numbers.partition("x")
        try:
            made = cls(name, int(count), int(each) if each else answers)
        except ValueError:
            raise SelfJudgeError(f"prompts are NAME, NAME:COUNT or NAME:COUNTxANSWERS, not {text!r}") from None
        if not made.count or made.answers < 1:
            raise SelfJudgeError(f"{text!r} asks for nothing: counts must be at least 1")
        return made

    @property
    def licence(self) -> str:
        if self.name in SELF:
            return "written by the target"
        return task(self.name).licence if self.name in NAMES else "given by the user"


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
    given = {source.name: given_prompts(source, data) for source in sources if source.name not in SELF}
    for source in sources:
        if source.name in SELF:
            texts, report[source.name] = _written(pair, source, seed, batch, notify)
        else:
            texts, report[source.name] = given[source.name], {"given": len(given[source.name])}
        encoded = pair.encode_many(texts)
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


def given_prompts(source: Source, data: Path | None) -> list[Any]:
    """The prompts of a task's training split or of a file."""
    if source.name in NAMES:
        one = task(source.name, data)
        return [one.prompt(row) for row in one.examples("train", source.count)]
    return list(read_prompts(Path(source.name).expanduser())[: source.count])


def _written(pair: Pair, source: Source, seed: int, batch: int, notify: Notify) -> tuple[list[Any], dict[str, Any]]:
    """Prompts that the target writes itself."""
    count = source.count
    assert count is not None
    articles = source.name == "self-summaries"
    stage = "the target writes articles" if articles else "the target writes prompts"
    done, shown = 0, -1

    def tell(tokens: int) -> None:
        nonlocal done, shown
        done += tokens
        percent = min(100, 100 * done // (count * (600 if articles else 60)))
        if percent > shown:
            shown = percent
            notify(stage, percent / 100)

    if not articles:
        return written_prompts(
            pair.target, pair.tokenizer, count, eos_ids=pair.eos_ids, special_ids=pair.special_ids, seed=seed,
            batch=batch, notify=tell,
        )  # fmt: skip
    passages = written_passages(
        pair.target, pair.tokenizer, count, eos_ids=pair.eos_ids, seed=seed, batch=batch, notify=tell
    )
    return [summarise(text) for text in passages], {"written": count, "kept": len(passages)}


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
def teacher(pair: Pair, sequences: Sequence[tuple[list[int], list[int]]], k: int) -> tuple[Any, Any]:
    """[R, k] log-probabilities (float16) and ids (int32) at every token of every answer, in order."""
    device = pair.target.device
    body, head = pair.target.base_model, pair.target.get_output_embeddings()
    cap = getattr(pair.target.config.get_text_config(), "final_logit_softcapping", None)
    vocabulary = head.weight.shape[0]
    k = min(k, vocabulary)
    most, at_once = TEACHER_TOKENS.get(device.type, 8192), TEACHER_LOGITS.get(device.type, 1 << 26)
    sizes = [len(prompt) + len(answer) for prompt, answer in sequences]
    order = sorted(range(len(sequences)), key=sizes.__getitem__)
    starts = np.cumsum([0, *(len(a) for _, a in sequences)])
    log_p = np.empty((starts[-1], k), np.float16)
    index = np.empty((starts[-1], k), np.int32)
    while order:
        longest = sizes[order[-1]]
        rows = 1
        while rows < len(order) and (rows + 1) * longest <= most and sizes[order[-rows - 1]] * 4 >= longest * 3:
            rows += 1
        part, order = order[-rows:], order[:-rows]
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        predicts = torch.zeros(len(part), longest, dtype=torch.bool)
        for row, i in enumerate(part):
            prompt, answer = sequences[i]
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            predicts[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        hidden = body(input_ids=ids.to(device), use_cache=False).last_hidden_state[predicts.to(device)]
        values, places = [], []
        for piece in hidden.split(max(1, at_once // vocabulary)):
            logits = head(piece)
            if cap:
                logits = cap * torch.tanh(logits / cap)
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
        """Sequences of like length together, at most `tokens` padded tokens a batch, in random order."""
        lengths = self.lengths.cpu()
        jitter = torch.rand(len(lengths), generator=generator) * 0.1 + 1
        order = (lengths * jitter).argsort(descending=True).tolist()
        sizes = lengths.tolist()
        made, start = [], 0
        while start < len(order):
            end, longest = start, 0
            while end < len(order) and (end == start or max(longest, sizes[order[end]]) * (end + 1 - start) <= tokens):
                longest = max(longest, sizes[order[end]])
                end += 1
            made.append(torch.tensor(order[start:end], device=self.tokens.device))
            start = end
        return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, T], which of them predict a token of the answer [B, T], and its top-k there ([R, k], [R, k])."""
        lengths, prompts = self.lengths[rows], self.prompt_lengths[rows]
        column = torch.arange(int(lengths.max()), device=rows.device)
        inside = column < lengths[:, None]
        ids = self.tokens[(self.starts[rows][:, None] + column).clamp_max(len(self.tokens) - 1)].long() * inside
        predicts = (column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)
        places = (self.answers[rows][:, None] + column - (prompts[:, None] - 1))[predicts]
        found = (ids, predicts, self.log_p[places], self.index[places])
        return tuple(t.to(device, non_blocking=True) for t in found)  # type: ignore[return-value]
