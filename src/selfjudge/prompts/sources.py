"""Sources of prompts: the target itself, the training split of a task, a file. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import KEY_DIGITS, PROMPTS_FILE, prompt_key
from selfjudge.models.catalogue import draft_folder
from selfjudge.store import read_json, read_rows, sha256
from selfjudge.store.schema import PromptRow, TrainingPrompts
from selfjudge.tasks import is_task, load_task, split_of
from selfjudge.tasks.base import FILE, Prompt, find_prompt, parse_split

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

LEARNABLE = ("train", "dev", "validation")  # splits begin with one of these
SELF = (
    "self", "self-code", "self-math", "self-choices", "self-writing", "self-extraction", "self-translation",
    "self-chats", "self-summaries",
)  # fmt: skip
BUILT_IN = tuple((row["kind"], row["prompt"]) for row in read_rows(Path(__file__).with_name("builtin.jsonl")))
"""Kind and text of a few prompts, so that demo and bench need no data."""
SELF_COUNT = 20000  # prompts that the target writes if no number is given


@dataclass(frozen=True)
class Source:
    """The target itself (one of `SELF`), a task's training split or a file, and how many prompts are taken from it."""

    name: str
    count: int | None = None
    answers: int = 1  # number of answers to each prompt: one greedy, the others sampled

    @classmethod
    def parse(cls, text: str, answers: int = 1) -> Source:
        """`NAME`, `NAME:COUNT` or `NAME:COUNTxANSWERS`: `self`, `dolly:500`, `gsm8k:7000x4`."""
        name, colon, numbers = text.rpartition(":")
        if not colon or not numbers[:1].isdigit() or "]" in numbers or f"{name}:" == FILE:
            return cls(text, SELF_COUNT if text in SELF else None, answers)
        count, _, each = numbers.partition("x")
        try:
            source = cls(name, int(count), int(each) if each else answers)
        except ValueError:
            raise SelfJudgeError(f"prompts are NAME, NAME:COUNT or NAME:COUNTxANSWERS, not {text!r}") from None
        if not source.count or source.answers < 1:
            raise SelfJudgeError(f"{text!r} asks for nothing: counts must be at least 1")
        return source

    @property
    def file(self) -> Path | None:
        """The file that it names, if it is one."""
        path = Path(self.name.removeprefix(FILE)).expanduser()
        return path if path.is_file() else None

    @property
    def licence(self) -> str:
        if self.name in SELF:
            return "written by the target"
        return load_task(self.name).licence if is_task(self.name) else "given by the user"


def hash_files(sources: Iterable[Source]) -> dict[str, str]:
    """The checksums of the files among some sources: a run is not resumed with other prompts."""
    return {str(source.file): sha256(source.file) for source in sources if source.file is not None}


def apply_limit(sources: Sequence[Source], limit: int | None) -> list[Source]:
    """The sources with counts that add up to `limit`: a given count stays, the others share the rest evenly."""
    if len({source.name for source in sources}) < len(sources):
        raise SelfJudgeError("the same source of prompts is named twice")
    if limit is None:
        return list(sources)
    open_ended = [s for s in sources if s.count is None or (s.name in SELF and s.count == SELF_COUNT)]
    rest = limit - sum(s.count or 0 for s in sources if s not in open_ended)
    if rest < len(open_ended):
        raise SelfJudgeError(f"a `limit` of {limit} is less than the sources ask for: lower their counts or raise it")
    counts = {s: rest * (i + 1) // len(open_ended) - rest * i // len(open_ended) for i, s in enumerate(open_ended)}
    return [replace(s, count=counts.get(s, s.count)) for s in sources]


@dataclass(frozen=True)
class PromptRecord:
    """A prompt, its source, and the task's row if an answer can be checked."""

    id: str
    source: str
    prompt: Prompt
    row: dict[str, Any] | None = None


def load_prompts(source: Source, data: Path | None) -> list[PromptRecord]:
    """The prompts of a task's split that may be learnt from (`train` if none is named), or of a file."""
    if not is_task(source.name):
        path = Path(source.name).expanduser()
        prompts = read_prompts(path)[: source.count]
        return [PromptRecord(f"{path.stem}-{i}", source.name, prompt) for i, prompt in enumerate(prompts)]
    task, split = load_task(source.name, data), split_of(source.name) or "train"
    if any(parse_split(s)[0] in task.splits and not s.startswith(LEARNABLE) for s in split.split("+")):
        learnable = ", ".join(s for s in task.splits if s.startswith(LEARNABLE)) or "none, it is for tests alone"
        raise SelfJudgeError(f"{source.name}: nothing is learnt from this split; take one of: {learnable}")
    return [PromptRecord(row["id"], source.name, task.prompt(row), row) for row in task.examples(split, source.count)]


def check_readable(sources: Sequence[Source], data: Path | None) -> None:
    """Refuse sources whose prompts cannot be read, before anything is written."""
    for source in sources:
        if source.name not in SELF:
            load_prompts(source, data)


def read_prompts(path: Path) -> list[Prompt]:
    """A prompts file: one JSON object a line with `prompt` or `messages` (a conversation); `.txt`: a prompt a line."""
    if path.suffix == ".txt":
        try:
            lines = path.read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SelfJudgeError(f"cannot read {path}: {error}") from None
        prompts: list[Prompt] = [line.strip() for line in lines if line.strip()]
    else:
        prompts = [find_prompt(row, path, number) for number, row in enumerate(read_rows(path, PromptRow), 1)]
    if not prompts:
        raise SelfJudgeError(f"{path} holds no prompt")
    return prompts


def find_learnt(
    pair: Pair, judges: Mapping[str, Judge], prompts: Sequence[Prompt], tasks: Sequence[str], data: Path | None
) -> Iterator[tuple[str, list[int] | None]]:
    """The draft and each judge by name, and which of the prompts, from `tasks`, it was trained with, as far as its
    `prompts.json` says: that has keys, or names tasks, as of what ships. None where there is no such file."""

    def encode(prompts: Sequence[Prompt]) -> list[str]:
        return [prompt_key(ids)[:KEY_DIGITS] for ids in pair.encode_many(prompts)]

    keys, asked = encode(prompts), {split for task in tasks for split in _list_splits(task, "test")}
    models = {"the draft": draft_folder(pair.draft_id)} if pair.draft_id else {}
    for name, folder in (models | {name: judge.folder for name, judge in judges.items()}).items():
        if folder is None or not (folder / PROMPTS_FILE).is_file():
            yield name, None
            continue
        known = read_json(folder / PROMPTS_FILE, TrainingPrompts)
        named = (s for s in map(Source.parse, known.get("sources", ())) if asked & _list_splits(s.name, "train"))
        own = {*known["prompts"], *encode([r.prompt for source in named for r in load_prompts(source, data)])}
        yield name, [place for place, key in enumerate(keys) if key in own]


def _list_splits(task: str, default: str) -> set[str]:
    """The splits that a task's name means, wholly or in part; that of all rows counts as the one to learn from."""
    names = [parse_split(part)[0] for part in (split_of(task) or default).split("+")]
    return {f"{task.partition('/')[0]}/{'train' if name == 'all' else name}" for name in names}
