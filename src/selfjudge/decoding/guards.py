"""Guards of relaxed rules: where alignment alone decides.
The first tokens of an answer are verified exactly (`strict_start`): refusals are decided there. So are code, JSON,
tables and tool calls (`strict_code`): in whole answers whose prompt asks for them, elsewhere by the text so far. A
state machine over characters gives a table of what each token does to each state. So a block is followed on the device,
and a fence counts from the next token on. Rows are independent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from selfjudge.models.device import send
from selfjudge.types import LazyModule

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    torch = LazyModule("torch")

STRICT_START, STRICT_CODE = 16, True  # the guards of relaxed rules where nobody names others

(
    LINE, TEXT, REST, BRACKET, OPENED, JSON, JSON_LINE, DASHES, TABLE, TABLE_LINE, ALWAYS, NEVER,
    TICK, TICKS, CODE_LINE, CODE, CODE_TICK, CODE_TICKS, CLOSE,
) = range(19)  # fmt: skip
"""States: at the start of a line, and within; the rest of a line that is a table's or a tag's; after `[` at the start
of a line; after `{` or `[` within; in JSON, and at the start of its lines; in a line of dashes; in a table under such a
line, and at the start of its lines; all of an answer; nothing of it. Then those of fences: one and two backticks; at
the start of a line of code, and within; one and two backticks there; three, which close the fence if white space alone
follows."""
TILDES = CLOSE + 1 - TICK  # added to the states of fences where they are of tildes
STATES = CLOSE + 1 + TILDES
EXACT_STATES = (
    REST, JSON, JSON_LINE, TABLE, TABLE_LINE, ALWAYS,
    *(state + shift for shift in (0, TILDES) for state in (CODE_LINE, CODE, CODE_TICK, CODE_TICKS, CLOSE)),
)  # fmt: skip
_CLASSES = ("\n", " \t\r", "`", "~", "|", "<", "{", "[", "\"'", "-:", "}],0123456789")  # kinds; the last is all others
_NEWLINE, _SPACE, _TICK, _TILDE, _BAR, _ANGLE, _BRACE, _SQUARE, _QUOTE, _DASH, _DATA, _OTHER = range(12)
_JSON_BEGINS = dict.fromkeys((_BRACE, _SQUARE, _QUOTE, _DASH, _DATA), JSON)
_IN_TEXT = {_NEWLINE: LINE, _TICK: TICK, _BRACE: OPENED, _SQUARE: OPENED}
_IN_LINE = {_TICK: TICK, _BAR: REST, _ANGLE: REST, _BRACE: JSON, _SQUARE: BRACKET, _DASH: DASHES}
_STEPS = {
    LINE: (TEXT, {**_IN_LINE, _NEWLINE: LINE, _SPACE: LINE}),
    TEXT: (TEXT, _IN_TEXT),
    REST: (REST, {_NEWLINE: LINE}),
    BRACKET: (TEXT, {**_JSON_BEGINS, _NEWLINE: JSON_LINE, _SPACE: BRACKET, _TICK: TICK}),
    OPENED: (TEXT, {**_IN_TEXT, _NEWLINE: OPENED, _SPACE: OPENED, _QUOTE: JSON}),
    JSON: (JSON, {_NEWLINE: JSON_LINE}),
    JSON_LINE: (TEXT, {**_IN_LINE, **_JSON_BEGINS, _NEWLINE: LINE, _SPACE: JSON_LINE}),
    DASHES: (TEXT, {**_IN_TEXT, _SPACE: DASHES, _DASH: DASHES, _BAR: TABLE}),
    TABLE: (TABLE, {_NEWLINE: TABLE_LINE}),
    TABLE_LINE: (TABLE, {_NEWLINE: LINE}),
    ALWAYS: (ALWAYS, {}),
    NEVER: (NEVER, {}),
    TICK: (TEXT, {**_IN_TEXT, _TICK: TICKS}),
    TICKS: (TEXT, {**_IN_TEXT, _TICK: CODE}),
    CODE_LINE: (CODE, {_NEWLINE: CODE_LINE, _SPACE: CODE_LINE, _TICK: CODE_TICK}),
    CODE: (CODE, {_NEWLINE: CODE_LINE}),
    CODE_TICK: (CODE, {_NEWLINE: CODE_LINE, _TICK: CODE_TICKS}),
    CODE_TICKS: (CODE, {_NEWLINE: CODE_LINE, _TICK: CLOSE}),
    CLOSE: (CODE, {_NEWLINE: LINE, _SPACE: CLOSE, _TICK: CLOSE}),
}  # for each state the one after most characters, and after some kinds
_PIECES = str.maketrans("ĠĊĉč▁", " \n\t\r ")  # how byte-level and sentencepiece vocabularies write white space
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_WORDS = re.compile(f"[^{re.escape(''.join(_CLASSES))}]+")

_SHOWN = (
    r"```|#include|<tool|\"(type|name)\": ?\"|\bassert \w+\(|(?-i:\bSELECT\b.{1,200}\bFROM\b)"
    r"|^\s*(def|class) \w+.*:\s*$|^\s*import \w+"
)
_VERBS = "write|writing|implement|create|complete|fix|debug|refactor|develop|design|generate|provide|give|show"
_CODE = "code|function|program|script|class|method|query|regex|regular expression|algorithm|unit tests?|snippet"
_TO_CODE = r"(^\s*|\b(can|could|please|you|me|to) )(code|program|script) (an?|me|up|it|this|some)\b"
_WAYS = "in|as|into|to|return|output|using|with|valid|an?|the following|write|generate|create"
_FORMATS = r"json|yaml|xml|csv|html|css|sql|table|python|javascript|java|c\+\+|rust|bash"
_PROMPTS = re.compile(
    rf"{_SHOWN}|{_TO_CODE}|\b({_VERBS})\b[^.?!\n]{{0,60}}\b({_CODE})\b"
    rf"|\b({_WAYS})\b[^.?!\n]{{0,24}}\b({_FORMATS})(?!\w)",
    re.IGNORECASE | re.MULTILINE,
)


def asks_for_structure(prompt: str) -> bool:
    """Whether a prompt asks for code, JSON, tables or tool calls, or shows some."""
    return _PROMPTS.search(prompt) is not None


def _step(state: int, kind: int) -> int:
    """The state after one character."""
    if state > CLOSE or (kind == _TILDE and state in (LINE, JSON_LINE)):  # a fence of tildes is one of backticks
        after = _step(state - TILDES if state > CLOSE else LINE, {_TICK: _OTHER, _TILDE: _TICK}.get(kind, kind))
        return after + TILDES if after >= TICK else after
    otherwise, steps = _STEPS[state]
    return steps.get(kind, otherwise)


class StructureTable:
    """What every token of a vocabulary does to every state."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """`pieces` are the texts of the tokens."""
        kinds = {character: kind for kind, members in enumerate(_CLASSES) for character in members}
        steps = [[_step(state, kind) for state in range(STATES)] for kind in range(len(_CLASSES) + 1)]
        rows: dict[str, list[int]] = {}  # most tokens are words, which are all alike
        alike = [_WORDS.sub("w", piece) for piece in pieces]
        for piece in set(alike):
            after = list(range(STATES))
            for character in piece:
                step = steps[kinds.get(character, _OTHER)]
                after = [step[state] for state in after]
            rows[piece] = after
        numbers = {piece: number for number, piece in enumerate(rows)}
        table = np.array([*rows.values()], np.uint8).reshape(-1, STATES)
        self.after: NDArray[np.uint8] = table[[numbers[piece] for piece in alike]]  # [V, STATES]
        self._devices: dict[Any, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return "StructureTable()"  # part of the identity of runs

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table [V, STATES], and which states are exact [STATES]; the same tensors every time."""
        if device not in self._devices:
            exact = torch.zeros(STATES, dtype=torch.bool)
            exact[list(EXACT_STATES)] = True
            self._devices[device] = torch.from_numpy(self.after).to(device), exact.to(device)
        return self._devices[device]

    def follow(self, state: Tensor, tokens: Tensor) -> Tensor:
        """[B], [B, γ] → [B, γ+1] the state before each token, and after the last."""
        table, _ = self.on(tokens.device)
        steps, gap = table[tokens.clamp(0, len(table) - 1)].long(), 1  # [B, γ, STATES], each a function of the state
        while gap < tokens.shape[1]:  # compose each with the one before it, then with the two before, the four, …
            steps = torch.cat([steps[:, :gap], steps[:, gap:].gather(-1, steps[:, :-gap])], 1)
            gap *= 2
        after = steps.gather(-1, state[:, None, None].expand(-1, tokens.shape[1], 1)).squeeze(-1)
        return torch.cat([state[:, None], after], 1)


@lru_cache(8)  # a few tokenizers; rules with the same table are the same rule
def structure_of(tokenizer: Any) -> StructureTable:
    """The table of a tokenizer's vocabulary; special tokens have no text."""
    pieces, special = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), set(tokenizer.all_special_ids)
    texts = [_BYTE.sub(lambda m: chr(int(m[1], 16)), piece or "x").translate(_PIECES) for piece in pieces]
    return StructureTable(["" if number in special else text for number, text in enumerate(texts)])


class GuardedBlock:
    """The guards over one block."""

    def __init__(self, guards: Guards, state: Tensor, drafts: Tensor) -> None:
        """`state` [B, 2] of the rows, drafts [B, γ]."""
        self.guards, at = guards, torch.arange(drafts.shape[1] + 1, device=drafts.device)
        self.left = state[:, 1].long()
        self.exact = at < self.left[:, None]  # [B, γ+1] where alignment alone decides, also for the token after
        self.states = state[:, :1].long().expand(-1, len(at))
        if guards.structure is not None:
            self.states = guards.structure.follow(self.states[:, 0], drafts)
            inside = guards.structure.on(drafts.device)[1][self.states]
            # a draft that would begin structure is not accepted against the target either
            self.exact = self.exact | inside | torch.nn.functional.pad(inside[:, 1:], (0, 1))

    @property
    def bits(self) -> Tensor:
        """[B] the columns of `exact` as the bits of a number, the first as the lowest."""
        return (self.exact.long() << torch.arange(self.exact.shape[1], device=self.exact.device)).sum(1)

    def advance(self, n: Tensor, next_token: Tensor) -> Tensor:
        """[B, 2] the state after n accepted drafts and the target's token."""
        state = self.states.gather(1, n[:, None]).squeeze(1)
        if self.guards.structure is not None:
            state = self.guards.structure.follow(state, next_token[:, None])[:, 1]
        return torch.stack([state, (self.left - n - 1).clamp_min(0)], 1).float()


@dataclass(frozen=True)
class Guards:
    """Where alignment alone decides under a relaxed rule."""

    strict_start: int = 0
    structure: StructureTable | None = None

    def begin(self, structured: Iterable[bool], device: torch.device) -> Tensor:
        """[B, 2] state of new answers: text, tokens left of the strict start. `structured`: the prompt asks for it."""
        states = (LINE, ALWAYS) if self.structure else (NEVER, NEVER)
        begun = [[states[asked], self.strict_start] for asked in structured]
        return send(begun, device, torch.float32).reshape(-1, 2)
