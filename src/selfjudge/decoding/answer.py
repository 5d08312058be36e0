"""An answer while it is decoded: tokens become text, stop strings cut it, judged tokens are recorded."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from selfjudge.errors import SelfJudgeError
from selfjudge.types import PHASES, Emission, Finish, Generation, JudgedToken, Origin, Piece, Step


@dataclass(eq=False)
class Answer:
    tokenizer: PreTrainedTokenizerBase
    stop: Sequence[str]
    prompt_tokens: int
    streamed: bool = True  # whether text is wanted token by token; else an answer without stops is decoded at its end
    stop_ids: Collection[int] = ()  # token ids that end the answer, without text of their own
    by_step: bool = False  # whether text is wanted a step at a time: one piece has it, that of the last token
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    judged_tokens: list[JudgedToken] = field(default_factory=list)
    text: str = ""
    shown: int = 0  # characters of the text that were streamed
    cycles: int = 0
    drafted: int = 0  # draft tokens of all cycles
    guarded: int = 0  # tokens that a guard left to exact verification
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    gamma: int = 0  # draft tokens of the latest cycle
    fixed_gamma: int | None = None  # γ where it is the same for the whole answer
    cost: float = 0.0  # seconds of all cycles by the table of costs; 0 where γ was fixed
    plain_cost: float = 0.0  # seconds of plain cycles for the tokens after the first, by the same table
    finish: Finish | None = None
    out_of_memory: bool = False  # whether it was given up: the device has no memory for it
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "total"), 0.0))

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        listed = isinstance(self.stop, Collection) and not isinstance(self.stop, str)
        if not listed or not all(isinstance(s, str) and s for s in self.stop):
            raise SelfJudgeError("`stop` is a list of strings, and none may be empty")

    def take(self, emission: Emission, step: Step) -> list[Piece]:
        """Add the tokens of a step; return the new pieces of text, none unless the answer is streamed."""
        self.gamma = step.drafted
        if emission.gamma >= 0:
            self.fixed_gamma = emission.gamma
            self.gamma = min(self.gamma, emission.gamma)
        self.drafted += self.gamma
        self.guarded += emission.guarded
        self.cached += step.cached.get(emission.row, 0)
        for phase, spent in step.seconds.items():
            self.seconds[phase] += spent
        if step.cycle > 0:
            self.cycles += 1
            self.cost += step.cost
            self.plain_cost += step.plain_cost * len(emission.tokens)
        judged = {j.index: self._with_text(j) for j in emission.judged}
        if not self.streamed:
            self.tokens += emission.tokens
            self.origins += emission.origins
            self.judged_tokens += judged.values()
            if emission.finish is not None:
                self.finish = emission.finish
                self.text = self._detokenizer.decode(self.tokens)
            return []
        pieces, count = [], len(emission.tokens)
        size = count if self.by_step and not (self.stop or self.stop_ids) else 1
        for i in range(0, count, size):
            last = i + size - 1
            finish = emission.finish if last + 1 == count else None
            text = self._add(emission.tokens[i : i + size], emission.origins[i : i + size], finish)
            pieces.append(Piece(text, emission.tokens[last], emission.origins[last], judged.get(last)))
            self.judged_tokens += [judged[j] for j in range(i, i + size) if j in judged]
            if self.finish:
                break
        return pieces

    def _with_text(self, judged: JudgedToken) -> JudgedToken:
        """A judged token with its text, and with its index in the answer instead of the emission."""
        text, target_text = self._detokenizer.decode([judged.token]), self._detokenizer.decode([judged.target_token])
        return replace(judged, index=len(self.tokens) + judged.index, text=text, target_text=target_text)

    def _add(self, tokens: Sequence[int], origins: Sequence[Origin], finish: Finish | None) -> str:
        """Add tokens and return the text that can now be shown; sets `finish` at the end or at a stop string."""
        self.tokens += tokens
        self.origins += origins
        if tokens[-1] in self.stop_ids:
            finish = "stop"
        else:
            self.text += self._detokenizer.add(*tokens)
        if finish is not None:
            self.text += self._detokenizer.rest()
        starts = (self.text.find(s, max(0, self.shown - len(s))) for s in self.stop)
        cut = min((at for at in starts if at >= 0), default=-1)
        if cut >= 0:
            self.text, self.finish = self.text[:cut], "stop"
        else:
            self.finish = finish
        return self._showable()

    def _showable(self) -> str:
        """Text not yet shown, without an end that may be the beginning of a stop string; marks it as shown."""
        end = len(self.text)
        if self.finish is None:
            for s in self.stop:
                held = next((n for n in range(min(len(s) - 1, end), 0, -1) if self.text.endswith(s[:n])), 0)
                end = min(end, len(self.text) - held)
        new, self.shown = self.text[self.shown : end], max(self.shown, end)
        return new

    def generation(self) -> Generation:
        if self.out_of_memory:
            raise SelfJudgeError("the device has no memory for this request: shorten it, or try again later")
        if self.finish is None:
            raise SelfJudgeError("the answer is not finished: read the whole stream first")
        return Generation(
            tokens=tuple(self.tokens),
            origins=tuple(self.origins),
            text=self.text,
            cycles=self.cycles,
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            seconds=self.seconds,
            judged_tokens=tuple(self.judged_tokens),
            drafted=self.drafted,
            gamma=self.fixed_gamma,
            speed_over_plain=self.plain_cost / self.cost if self.cost else None,
            guarded_tokens=self.guarded,
            cached_tokens=self.cached,
        )


class Detokenizer:
    """Text of a growing token sequence, without special tokens or incomplete characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # decode from here: a few tokens back, for tokenizers that treat a first word differently
        self.read = 0
        backend = getattr(tokenizer, "backend_tokenizer", None)
        joins = type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"  # no token's text depends on others
        plain = joins and type(tokenizer).decode is PreTrainedTokenizerBase.decode
        self._backend = backend if plain else None  # decodes without the checks of transformers, which take longer

    def add(self, *tokens: int) -> str:
        """The text these tokens complete, but for an open multi-byte character."""
        self.ids += tokens
        new = self._new()
        if new.endswith("\ufffd"):
            if len(tokens) == 1:
                return ""
            del self.ids[-len(tokens) :]
            return "".join(map(self.add, tokens))
        if new:  # special tokens have no text, and give no context
            self.context = self.read if self._backend is None else len(self.ids)
        self.read = len(self.ids)
        return new

    def rest(self) -> str:
        """The remaining text at the end, incomplete characters included."""
        new = self._new()
        self.read = len(self.ids)
        return new

    def _new(self) -> str:
        if self.read == len(self.ids):
            return ""
        before = self.decode(self.ids[self.context : self.read]) if self.context < self.read else ""
        return self.decode(self.ids[self.context :])[len(before) :]

    def decode(self, ids: list[int]) -> str:
        """The text of a complete sequence."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=True))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
