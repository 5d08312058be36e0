"""How numbers, intervals and tokens are written in tables, charts and sentences."""

import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from selfjudge.store import read_asset
from selfjudge.store.files import make_templates


def show_text(value: Any) -> str:
    return "–" if value is None or value == "" else str(value)


def show_interval(ends: Any, form: Callable[[Any], str]) -> str:
    return "" if ends is None else f"[{form(ends[0])}, {form(ends[1])}]"


def fixed(value: Any, digits: int = 2, sign: str = "") -> str:
    """Rounded, with a real minus and none before a zero; a value that is not a number is shown as text."""
    if not isinstance(value, int | float):
        return show_text(value)
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}".replace("-", "−")


whole, tenths = (partial(fixed, digits=digits) for digits in (0, 1))
signed = partial(fixed, sign="+")


def show_count(n: int, noun: str) -> str:
    """A number of things: 1 prompt, 2,000 prompts."""
    return f"{whole(n)} {noun}{'' if n == 1 else 's'}"


def points(value: float | None) -> str:
    return fixed(None if value is None else 100 * value, 1)


def signed_points(value: float | None) -> str:
    return signed(None if value is None else 100 * value, 1)


def change(value: float | None, interval: Any, few: bool) -> str:
    """A change of the score in points, if its interval shows one; `few` examples show nothing."""
    if few:
        return "too few prompts to tell"
    unclear = interval is not None and interval[0] <= 0 <= interval[1]
    return "no change shown" if unclear else f"{signed_points(value)} points"


def percent(value: Any) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if isinstance(value, int | float) else show_text(value)


def gain(ratio: float | None) -> str:
    """A ratio as a change in per cent: 1.05 is +5.0 %."""
    return "–" if ratio is None else f"{fixed(100 * (ratio - 1), 1, '+')} %"


def quote_token(token: str) -> str:
    """A token with its spaces, line ends and other invisible characters visible, cut at 24 letters."""
    token = token if len(token) <= 24 else token[:23] + "…"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token.replace("\\", "\\\\"))
    return f"“{shown.replace(' ', '␣')}”"


def describe_choice(token: Mapping[str, Any]) -> str:
    """What the target wanted in place of a token, where that is known to be another."""
    choice, p, score = (token.get(name) for name in ("choice", "p_choice", "judge"))
    if choice in (None, token["text"]):
        return ""
    certainty = "" if p is None else f" (p {p:.2f})"
    judged = "" if score is None else f"; judge’s score {score:.2f}"
    return f"target wanted {quote_token(choice)}{certainty}{judged}"


class Sentences:
    """The sentences of an asset, one a macro, with blanks merged; they may use this module's functions and `words`."""

    def __init__(self, asset: str, package: str = "selfjudge.report", **words: Any) -> None:
        self.asset, self.package, self.words = asset, package, words

    @cached_property
    def _macros(self) -> Any:
        made = make_templates()
        made.globals |= {**globals(), **self.words}
        return made.from_string(read_asset(self.package, self.asset)).module

    def __call__(self, what: str, *about: Any) -> str:
        return re.sub("[ \n]+", " ", getattr(self._macros, what)(*about)).strip()
