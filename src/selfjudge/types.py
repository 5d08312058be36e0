"""Records exchanged between modules: B rows, γ drafts, V tokens, H hidden. No torch here: reports run without it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib import import_module, metadata
from math import isfinite
from numbers import Integral, Real
from operator import ge, gt, le
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from selfjudge.errors import SelfJudgeError, expect

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

MAX_GAMMA = 32  # maximum draft tokens of a cycle, everywhere: rules that look ahead gain by long blocks
Gamma = int | Literal["auto"]  # draft tokens of a cycle, or `auto`: chosen while decoding (`decoding/gamma.py`)
ENGINES = ("auto", "reference", "cpu", "cuda")
GLOSSARY = {
    "m": "tokens per pass",
    "γ": "drafted per step",
    "judged": "accepted against the target's choice",
    "strictness": "how sure a rule must be before it accepts a draft that is not the target's choice",
}
"""What the short names of tables mean: the same words on the terminal, in pages and in the playground."""
DEFAULT_THETA = "R"  # the default threshold of a judge, everywhere: the strict one of the two that it is trained with


def explain(*labels: str) -> str:
    """What some labels of a table mean, as one line below it."""
    return "; ".join(f"{label}: {GLOSSARY[label]}" for label in labels)


def default_gamma(device: str) -> int:
    """Fixed γ, so that results do not depend on speed; smaller on a CPU, where passes of many tokens cost more."""
    return 3 if device == "cpu" else 5


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names are imported at first use: those that its
    `__init__.py`, this `file`, has under `if TYPE_CHECKING`. Commands that only check input do not wait for torch."""
    blocks = [node for node in ast.parse(Path(file).read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    where = {alias.name: "." * node.level + str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name == "__version__":
            return metadata.version(package)
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(where[name], package), name)

    names = sorted(where)
    return get, lambda: names, names


class LazyModule(ModuleType):
    """A module that is imported when something of it is first used: rules are read, and refused, without torch."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # found at once from now on
        return value


def setting(
    default: Any,
    help: str,  # noqa: A002 (the word that typer and argparse use)
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    word: str | None = None,
) -> Any:
    """A config field: default, meaning and range, for Python and command line. `word` may replace a whole number."""
    limits = {"minimum": minimum, "maximum": maximum, "above": above, "choices": tuple(choices), "word": word}
    return field(default=default, metadata={"help": help, **limits})


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def expect_whole(name: str, value: Any, least: int | None = None) -> None:
    """Refuse the value of an argument that is not a whole number, at least `least`."""
    wanted = "a whole number" if least is None else f"a whole number, at least {least}"
    expect(is_whole(value) and (least is None or value >= least), name, wanted, value)


def check_settings(config: Any, prefix: str = "") -> None:
    """Refuse values of other types and ranges than the fields of a config declare; None means not given."""
    for f in fields(config):
        name, given = f"{prefix}`{f.name}`", getattr(config, f.name)
        kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
        several = kind.startswith("tuple[") and given is not None
        if f.metadata and several and not isinstance(given, tuple | list):
            raise SelfJudgeError(f"{name} must be a tuple, not {given!r}")
        for value in given if several else (given,):
            missing = value is None and f.default is not None
            if f.metadata and (missing or value not in (None, f.metadata["word"])):
                _check_value(name, value, kind, f)


def check_config(config: Any, kind: type) -> None:
    """Refuse a config of another type, such as a dict, or what it refuses itself."""
    expect(isinstance(config, kind), "config", f"a {kind.__name__}", config)
    config.check()


KINDS: dict[str, Any] = {"int": Integral, "float": Real, "float | str": (Real, str), "bool": bool, "str": str}
"""Types of fields, by their names."""
WORDS = {Integral: "a whole number", bool: "True or False", str: "text"}


def _check_value(name: str, value: Any, listed: str, f: Field[Any]) -> None:
    low, high, above, choices, word = (f.metadata[key] for key in ("minimum", "maximum", "above", "choices", "word"))
    listed = listed.removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]")
    kind = KINDS.get("int" if word else listed, object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        other = f" or {word}" if word else ""
        raise SelfJudgeError(f"{name} must be {WORDS.get(kind, 'a number')}{other}, not {value!r}")
    if choices and value not in choices:
        raise SelfJudgeError(f"unknown {name} {value!r}; there are: {', '.join(choices)}")
    if isinstance(value, float) and not isfinite(value):
        raise SelfJudgeError(f"{name} must be a finite number, not {value}")
    for limit, holds, words in ((low, ge, "at least"), (above, gt, "more than"), (high, le, "at most")):
        if limit is not None and not holds(value, limit):
            raise SelfJudgeError(f"{name} must be {words} {limit}, not {value}")


Origin = Literal["draft", "judge", "target"]
"""A drafted token that is aligned (`draft`) or accepted anyway (`judge`), or the target's own choice (`target`)."""

Finish = Literal["eos", "length", "stop"]

Notify = Callable[[str, float], None]  # takes a report of progress: the stage, and the share of it that is done
Tell = Callable[[float], None]  # takes the share that is done of work that has no stages
Warn = Callable[[str], None]  # takes a warning of one line


def prefix_stages(name: str, notify: Notify) -> Notify:
    """A report of progress whose stages are those of `name`."""
    return lambda stage, share: notify(f"{name}: {stage}", share)


def ignore(*_: object) -> None:
    """Take a report or a warning, and do nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one verification pass over `[last token, d_1 … d_γ]` knows; a rule turns it into a Verdict."""

    draft_tokens: Tensor  # [B, γ] the drafts d_1 … d_γ
    target_logits: Tensor  # [B, γ+1, V] row i−1 predicts d_i; the last row predicts the bonus token
    hidden: Tensor | None = None  # [B, γ+1, H] what feeds the LM head, after the norm; row i is the state *at* d_i
    draft_logits: Tensor | None = None
    """[B, γ, V] the warped logits that drafts were drawn from; only for sampling, and for rules that read them. Where
    kernels sample, [B, γ, D] in the draft's vocabulary and, unless filtered, not divided by the temperature."""
    uniforms: Tensor | None = None  # [B, γ+1] in [0, 1): for each draft's acceptance and the token after; sampling only
    scores: Tensor | None = None  # [B, γ] the judge's P(acceptable), if a judge was asked; NaN where it could not say
    argmax: tuple[Tensor, Tensor] | None = None  # [B, γ+1] the target's likeliest tokens; rows with a NaN or +inf
    limits: Tensor | None = None  # [B] how many drafts each row has, 0 … γ, its first ones; None: all rows have γ
    spent: Tensor | None = None  # [B] what each answer has spent so far, under rules with a budget; None: nothing
    exact_only: Tensor | None = None  # [B, γ] where alignment alone decides, by a guard of the answer; None: nowhere
    settings: Tensor | None = None  # [B, SETTINGS] what each row asks, where rows have rules of their own
    draft_places: Tensor | None = None  # [V] the place of each token in the draft's vocabulary or −1; None: the same

    @property
    def gamma(self) -> int:
        return self.draft_tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided about a Block."""

    n_accepted: Tensor  # [B] k: d_1 … d_k are accepted, d_{k+1} is the first that is rejected
    next_token: Tensor  # [B] the target's correction at k+1, or the bonus token where k is the number of drafts
    judged: Tensor  # [B, γ] the draft was accepted although the alignment rule rejects it
    non_finite: Tensor  # [] whether a non-finite logit or hidden state was met (alignment alone decided there)
    spent: Tensor | None = None  # [B] what each answer has spent after this block; None under rules without a budget


@dataclass(frozen=True, slots=True)
class JudgedToken:
    """A token that was accepted against the target's choice."""

    index: int  # index among the tokens of the answer; in an `Emission`, which has no text, among those of the emission
    token: int
    text: str
    probability: float  # the target's probability of the token
    target_token: int  # the target's most likely token
    target_text: str
    target_probability: float  # the target's probability of that token
    score: float | None  # the judge's P(acceptable); None under rules without a judge


class Emission(NamedTuple):
    """What one row got from one step."""

    row: int  # index into the prompts handed to `decode`
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish: Finish | None = None  # why the row ended with this emission; None while it goes on
    judged: tuple[JudgedToken, ...] = ()  # its tokens of origin `judge`, where the loop was asked to trace them
    gamma: int = -1  # γ of the row where it stays the same for the whole answer, else −1
    guarded: int = 0  # tokens that a guard of the answer left to alignment


@dataclass(frozen=True, eq=False)
class TokenColumn(Sequence[Emission]):
    """Emissions of a step without drafts, one token a row: arrays, since thousands of `Emission`s are slow to make."""

    rows: NDArray[Any]
    tokens: NDArray[Any]
    ended: NDArray[Any]  # 0 goes on, 1 end token, 2 length limit
    gammas: NDArray[Any]  # as `Emission.gamma`

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row, token, finish = int(self.rows[i]), int(self.tokens[i]), FINISHES[int(self.ended[i])]
        return Emission(row, (token,), ("target",), finish, gamma=int(self.gammas[i]))


FINISHES: tuple[Finish | None, ...] = (None, "eos", "length")


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a streamed answer; its text is empty while a character or a possible stop string is incomplete."""

    text: str
    token: int
    origin: Origin
    judged: JudgedToken | None = None  # what the target wanted instead, where the token was accepted against it


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass over all active rows. Cycle 0 is a prefill: its tokens belong to no cycle. Where a prompt is read
    in chunks, only the last one has emissions and seconds."""

    cycle: int
    emissions: Sequence[Emission]
    seconds: Mapping[str, float]  # wall clock of this step by phase: draft, target, judge, rule
    non_finite: bool = False  # whether a non-finite logit or hidden state was met
    drafted: int = 0  # draft tokens of a row in this step: the most where rows have unlike γ
    cost: float = 0.0  # with γ = auto: seconds of this step by the table of costs, whatever the machine does; else 0
    plain_cost: float = 0.0  # the same of a step without drafts
    out_of_memory: tuple[int, ...] = ()  # rows that were given up: the device has no memory for them
    cached: Mapping[int, int] = field(default_factory=dict)  # of rows that enter: prompt tokens from the prefix cache


PHASES = ("draft", "target", "judge", "rule")


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer. `tokens` include the end token; nothing past the end or the length limit is counted."""

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    cycles: int
    finish: Finish
    prompt_tokens: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall clock by phase and `total`, of this row's passes
    judged_tokens: tuple[JudgedToken, ...] = ()  # the tokens of origin `judge`, and what the target wanted there
    drafted: int = 0  # draft tokens of all cycles, accepted or not
    gamma: int | None = None  # γ where the whole answer had one, given or chosen as it entered; else None
    speed_over_plain: float | None = None  # speed over plain decoding, by what both cost here; None: γ is fixed
    guarded_tokens: int = 0  # tokens of the cycles that a guard left to exact verification
    cached_tokens: int = 0  # tokens of the prompt that were found in the prefix cache

    @property
    def gamma_mean(self) -> float | None:
        """Mean number of draft tokens per cycle: γ where it is fixed, else the mean of what was chosen."""
        return self.drafted / self.cycles if self.cycles else None

    @property
    def mean_accepted_length(self) -> float | None:
        """m: tokens emitted per target pass, correction or bonus included; None when prefill alone ended the answer."""
        return (len(self.tokens) - 1) / self.cycles if self.cycles else None

    @property
    def drafts_accepted(self) -> float | None:
        """Drafted tokens emitted per cycle."""
        return sum(o != "target" for o in self.origins) / self.cycles if self.cycles else None

    @property
    def judged_share(self) -> float:
        """Share of the emitted tokens that were accepted against the alignment rule."""
        return sum(o == "judge" for o in self.origins) / max(1, len(self.origins))

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds["total"] if self.seconds.get("total") else 0.0


def pooled_figures(generations: Sequence[Generation]) -> dict[str, float | None]:
    """`gamma_mean`, `mean_accepted_length` (Σ tokens / Σ cycles), `judged_share` of a set; None instead of x / 0."""
    cycles, tokens = sum(g.cycles for g in generations), sum(len(g.tokens) for g in generations)
    in_cycles = sum(len(g.tokens) - 1 for g in generations if g.cycles)
    judged = sum(g.origins.count("judge") for g in generations)
    return {
        "gamma_mean": sum(g.drafted for g in generations) / cycles if cycles else None,
        "mean_accepted_length": in_cycles / cycles if cycles else None,
        "judged_share": judged / tokens if tokens else None,
    }
