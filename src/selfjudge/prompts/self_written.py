"""Prompts that the target samples after the user header of its chat template, without data (Magpie, Xu et al. 2024). It
asks what it was trained for; an opening, such as "Translate to Spanish:", leads it to other kinds."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfjudge.decoding.plain import Response, respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair, Prompt
from selfjudge.prompts.sources import SELF, PromptRecord, Source, load_prompts
from selfjudge.store import read_json
from selfjudge.tasks.benchmarks import ask_for_summary
from selfjudge.types import Notify

LONGEST = 160  # tokens of a self-written prompt
LONGEST_TEXT = 384  # tokens of one that includes a text
REPLY = 192  # tokens of an answer that a conversation goes on from
_MARK = "\u2592MARK\u2592"
OPENINGS = read_json(Path(__file__).with_name("openings.json"), dict[str, list[str]])
"""Openings of the texts of each style; the target writes the rest."""
TURNS = (("user", LONGEST, 1.0, 9), ("assistant", REPLY, 0.7, 11), ("user", LONGEST, 1.0, 10))
"""Role, most tokens, temperature and part of the seeds of each message of a conversation."""
_APART = 500_009  # between the seeds of one part and those of the next
_WITH_TEXT = ("self-extraction", "self-code")


@dataclass(frozen=True)
class Collector:
    """Collects the prompts of several sources for one pair: loaded or self-written, without long and repeated ones."""

    pair: Pair
    longest: int  # maximum tokens of a prompt
    seed: int
    batch: int
    data: Path | None
    notify: Notify

    def __call__(self, sources: Sequence[Source]) -> tuple[list[tuple[PromptRecord, list[int]]], dict[str, Any]]:
        """Prompts with their token ids, and what became of each source's prompts. A repeated prompt counts once: twins
        would end up on both sides of a split by prompt."""
        kept: dict[tuple[int, ...], tuple[PromptRecord, list[int]]] = {}
        report: dict[str, Any] = {}
        for source in sources:
            if source.name in SELF:
                prompts, report[source.name] = self._write(source)
                named = [(f"{source.name}-{self.seed}-{i}", prompt) for i, prompt in enumerate(prompts)]
                records = [PromptRecord(name, source.name, prompt) for name, prompt in named]
            else:
                records = load_prompts(source, self.data)
                report[source.name] = {"given": len(records)}
            encoded = self.pair.encode_many([record.prompt for record in records])
            fitting = [(record, ids) for record, ids in zip(records, encoded, strict=True) if len(ids) <= self.longest]
            before = len(kept)
            for record, ids in fitting:
                kept.setdefault(tuple(ids), (record, ids))
            new = len(kept) - before
            too_long = len(records) - len(fitting)
            report[source.name] |= {"too long": too_long, "repeated": len(fitting) - new, "prompts": new}
        return list(kept.values()), report

    def _write(self, source: Source) -> tuple[Sequence[Prompt], dict[str, Any]]:
        """Prompts that the target writes itself, and what became of those it wrote."""
        count, name = source.count, source.name
        assert count is not None
        expected = count * {"self-summaries": 600, "self-chats": 240}.get(name, 60)  # tokens
        done = 0

        def report_tokens(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.notify("the target writes prompts", min(1, done / expected))

        writer = Writer(self.pair, self.seed, self.batch, report_tokens)
        if name == "self-summaries":
            passages = writer.write_passages(count)
            return [ask_for_summary(text) for text in passages], {"written": count, "kept": len(passages)}
        return writer.write_chats(count) if name == "self-chats" else writer.write_prompts(count, name)


@dataclass(frozen=True)
class Writer:
    """A target that writes. Its texts follow from the seed, whatever the batches are."""

    pair: Pair
    seed: int = 0
    batch: int = 1024
    notify: Callable[[int], None] = lambda tokens: None  # told how many tokens were written since it was told last

    def write_prompts(self, count: int, style: str = "self") -> tuple[list[str], dict[str, int]]:
        """The prompts that pass the filter, of `count` that are written, and how many did not pass, by reason."""
        header = encode_chat_start(self.pair.tokenizer, [], "user")
        openings = [self._encode(text) for text in OPENINGS.get(style, ("",))]
        starts = [[*header, *openings[i % len(openings)]] for i in range(count)]
        longest = LONGEST_TEXT if style in _WITH_TEXT else LONGEST
        part = 0 if style == "self" else 2 + list(OPENINGS).index(style)
        kept, report = [], Counter(written=count)
        seen: set[object] = set()
        for i, tokens, finish in sorted(self._sample(starts, longest, 1.0, part)):
            reason, text = find_fault(self.pair, tokens, finish, seen, openings[i % len(openings)])
            report[reason or "kept"] += 1
            if reason is None:
                kept.append(text)
        return kept, dict(report)

    def write_chats(self, count: int) -> tuple[list[list[dict[str, str]]], dict[str, int]]:
        """Conversations of three messages: a prompt, the target's answer and the user's next turn, all its own."""
        report = Counter(written=count)
        chats: list[list[dict[str, str]]] = [[] for _ in range(count)]
        for role, longest, temperature, part in TURNS:
            starts = [encode_chat_start(self.pair.tokenizer, chat, role) for chat in chats]
            longer, seen = [], set[object]()
            for i, tokens, finish in sorted(self._sample(starts, longest, temperature, part)):
                reason, text = find_fault(self.pair, tokens, finish, seen if role == "user" else set())
                if reason is None:
                    longer.append([*chats[i], {"role": role, "content": text}])
                else:
                    report[reason if role == "user" else f"answer {reason}"] += 1
            chats = longer
        report["kept"] = len(chats)
        return chats, dict(report)

    def write_passages(self, count: int, longest: int = 900, shortest: int = 80) -> list[str]:
        """Texts that continue openings, without chat template; cut after the last whole sentence."""
        encoded = [self._encode(text) for text in OPENINGS["self-summaries"]]
        starts = [encoded[i % len(encoded)] for i in range(count)]
        passages = []
        for index, tokens, _ in sorted(self._sample(starts, longest, 0.8, 1)):
            text = str(self.pair.tokenizer.decode([*starts[index], *tokens], skip_special_tokens=True))
            whole = re.match(r"(?s).*[.!?]", text)
            if whole and len(tokens) >= shortest:
                passages.append(whole.group(0))
        return passages

    def _encode(self, text: str) -> list[int]:
        return list(self.pair.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _sample(self, starts: Sequence[Sequence[int]], most: int, temperature: float, part: int) -> Iterator[Response]:
        """Continuations of the starts, in any order. Every `part` of the texts has seeds of its own."""
        first_seed = self.seed * 1_000_003 + part * _APART
        return respond(
            self.pair.target_model,
            starts,
            eos_ids=self.pair.eos_ids,
            max_new_tokens=most,
            sampling=Sampling(temperature),
            seeds=[(first_seed + i) % (1 << 63) for i in range(len(starts))],
            batch=self.batch,
            notify=self.notify,
        )


def find_fault(
    pair: Pair, tokens: list[int], finish: str, seen: set[object], opening: Sequence[int] = ()
) -> tuple[str | None, str]:
    """Why a text is not used, None if it is, and the text. A common `opening` does not make two texts duplicates."""
    if finish != "eos":
        return "unfinished", ""
    body = tokens[:-1]
    if any(token in pair.special_ids for token in body):
        return "control tokens", ""
    text = str(pair.tokenizer.decode([*opening, *body])).strip()
    words = re.findall(r"\w+", str(pair.tokenizer.decode(body)).lower())
    if len(words) < 3 or "\ufffd" in text:
        return "too short", text
    keys = (tuple(words), tuple(words[:10]) if len(words) >= 10 else None, frozenset(words))
    if any(key is not None and key in seen for key in keys):
        return "duplicate" if keys[0] in seen else "near-duplicate", text
    seen.update(key for key in keys if key is not None)
    return None, text


def encode_chat_start(tokenizer: PreTrainedTokenizerBase, chat: Sequence[dict[str, str]], role: str) -> list[int]:
    """Token ids of everything before the text of the next message of a chat, which is written by `role`."""
    if not tokenizer.chat_template:
        raise SelfJudgeError("the target has no chat template and cannot write prompts: give a file with `prompts`")
    text = tokenizer.apply_chat_template([*chat, {"role": role, "content": _MARK}], tokenize=False)
    assert isinstance(text, str)
    before, _, _ = text.rpartition(_MARK)
    if not before:
        raise SelfJudgeError("the target's chat template has no user header, so it cannot write prompts itself")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])
